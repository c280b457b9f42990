/* Read the events of a chunk of a trace into columns, if all of it is plain. */

#ifndef TRACEDOC_EVENTS_H
#define TRACEDOC_EVENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "table.h"

/* What is kept of the events with a certain head, as the assembler classified it. */
enum { ON_GPU = 1, SHAPED = 2, COUNTED = 4, WAITS = 8, REFUSED = 16, UNCLASSIFIED = ON_GPU | SHAPED | COUNTED | WAITS };

/* Which Python frames are kept. */
enum Frames { NO_FRAMES, LONG_FRAMES, ALL_FRAMES };

typedef enum { PLAIN, ODD, NO_MEMORY } Verdict;

/* The tables that a chunk fills; their rows count the events that were kept. */
typedef struct {
    int64_t start_ns, duration_ns, correlation, external_id;
} Times;
typedef struct {
    int32_t row, place;
} Placed;
typedef struct {
    int64_t row, bytes;
} Sized;
typedef struct {
    int64_t row, type, device, allocated, reserved;
} Counted;
typedef struct {
    int64_t row, stream, recorded_by;
} Waited;
typedef struct {
    int32_t row, shape;
} Shaped;
typedef struct {
    int64_t row, at; /* where the name of the collective begins in the chunk */
} Collective;
typedef struct {
    int64_t begin, end; /* of a metadata event in the chunk */
} Span;

#define LONGEST_STEP 48 /* whole words */
#define MOST_STEPS 255
#define STEP_SLOTS 1024

/* What stands between two values of an object: a comma, a key, a colon and space; and what followed it. */
typedef struct {
    size_t reach; /* how much text it takes to compare: its size, a word at least; unlimited where there is none */
    uint64_t mask; /* of what counts of the first word */
    uint8_t text[LONGEST_STEP];
    uint8_t size;
    int8_t name;
    uint8_t least; /* what follows has no smaller byte */
    uint8_t next[2];
} Step;

enum { FIRST, OTHER }; /* the beginning of an object; any step that is not remembered. Neither has text. */

typedef struct {
    Step all[MOST_STEPS];
    uint8_t slots[STEP_SLOTS]; /* by a hash of the text */
    int count;
} Steps;

typedef struct {
    void *items;
    size_t count, room;
} List;

typedef struct {
    Table heads;  /* category, name, process and thread */
    Table places; /* device, stream, grid and head */
    Table shapes; /* dimensions, types and strides; of sends, receives and convolutions, values */
    uint8_t *traits; /* of each head that was classified */
    size_t traits_room;
    size_t classified, known_places, known_shapes; /* how many of each the next chunk finds */
    enum Frames frames;
    int64_t elements;
    Steps fields, args; /* of events, and of their arguments */
    List times, head, placed, sized, counted, waits, shaped, collectives, metadata;
} Events;

#define NO_ID (-1)

/* Changes with what scan() returns, so that an older build is not taken for this one. */
#define SCANNER_LAYOUT 4

void events_begin(Events *events, const uint64_t random[2], enum Frames frames);
void events_end(Events *events);

/* Read a JSON array of events. Unless the verdict is PLAIN the tables mean nothing.
 *
 * Heads, places and shapes that are new get the next numbers, and are forgotten by the next call unless
 * events_classify was called.
 */
Verdict events_read(Events *events, const uint8_t *begin, const uint8_t *end);

/* Keep the heads, places and shapes of the chunk that was read; `traits` are those of the new heads. */
bool events_classify(Events *events, const uint8_t *traits, size_t count);

#endif
