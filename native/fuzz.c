/* Feed the scanner what libFuzzer thinks of, and hold its tables to what they promise. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "events.h"

#define HOLDS(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "does not hold: %s\n", #condition); \
            abort(); \
        } \
    } while (0)

static void check_tables(const Events *events, size_t size)
{
    size_t rows = events->times.count;
    const int32_t *heads = events->head.items;
    HOLDS(events->head.count == rows && (int64_t)rows <= events->elements);
    for (size_t i = 0; i < rows; i++)
        HOLDS(heads[i] >= 0 && (size_t)heads[i] < events->heads.count);
    const Placed *placed = events->placed.items;
    for (size_t i = 0; i < events->placed.count; i++)
        HOLDS((size_t)placed[i].row < rows && (size_t)placed[i].place < events->places.count);
    const Shaped *shaped = events->shaped.items;
    for (size_t i = 0; i < events->shaped.count; i++)
        HOLDS((size_t)shaped[i].row < rows && (size_t)shaped[i].shape < events->shapes.count);
    const Collective *collectives = events->collectives.items;
    for (size_t i = 0; i < events->collectives.count; i++)
        HOLDS((size_t)collectives[i].row < rows && (size_t)collectives[i].at < size);
    const Span *spans = events->metadata.items;
    for (size_t i = 0; i < events->metadata.count; i++)
        HOLDS(spans[i].begin >= 0 && spans[i].begin < spans[i].end && (size_t)spans[i].end <= size);
}

/* The first byte says how the scanner is set up; the rest is read twice, with the heads known the second time. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint64_t random[2] = {1, 3};
    if (size == 0)
        return 0;
    /* A copy of its own, so that a byte too many is found. */
    uint8_t *text = malloc(--size ? size : 1);
    if (text == NULL)
        return 0;
    memcpy(text, data + 1, size);
    Events *events = malloc(sizeof *events);
    if (events == NULL)
        abort();
    events_begin(events, random, (enum Frames)(data[0] % 3));
    for (int round = 0; round < 3; round++) {
        Verdict verdict = events_read(events, text, text + size);
        if (verdict != PLAIN)
            continue;
        check_tables(events, size);
        size_t count = events->heads.count - events->classified;
        HOLDS(round < 2 || count == 0 || data[0] & 4);
        uint8_t *traits = malloc(count + 1);
        if (traits == NULL)
            abort();
        for (size_t i = 0; i < count; i++)
            traits[i] = (uint8_t)((data[0] >> 3) + i) % 32;
        if (!(data[0] & 4))
            HOLDS(events_classify(events, traits, count));
        free(traits);
    }
    events_end(events);
    free(events);
    free(text);
    return 0;
}
