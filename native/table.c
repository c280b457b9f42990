/* Number distinct keys in order of appearance: open addressing, keys behind one another. */

#include "table.h"

#include <stdlib.h>
#include <string.h>

void *grown(void *items, size_t *room, size_t count, size_t size)
{
    if (count <= *room)
        return items;
    size_t wanted = *room < 64 ? 64 : *room;
    while (wanted < count) {
        if (wanted > SIZE_MAX / 2)
            return NULL;
        wanted *= 2;
    }
    if (wanted > SIZE_MAX / size)
        return NULL;
    void *larger = realloc(items, wanted * size);
    if (larger != NULL)
        *room = wanted;
    return larger;
}

void table_begin(Table *table, uint64_t seed, uint64_t factor)
{
    memset(table, 0, sizeof *table);
    table->seed = seed;
    table->factor = factor | 1;
}

void table_end(Table *table)
{
    free(table->keys);
    free(table->slots);
    free(table->bytes);
    memset(table, 0, sizeof *table);
}

static inline uint64_t mixed(uint64_t one, uint64_t other)
{
#ifdef __SIZEOF_INT128__
    unsigned __int128 product = (unsigned __int128)one * other;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
#else
    uint64_t product = (one ^ (one >> 32)) * (2 * other + 1);
    return product ^ (product >> 29) ^ other;
#endif
}

/* Return up to eight bytes as a number. */
static inline uint64_t word_of(const uint8_t *at, uint32_t size)
{
    if (size == 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        return word;
    }
    if (size >= 4) {
        uint32_t first, last;
        memcpy(&first, at, 4);
        memcpy(&last, at + size - 4, 4);
        return (uint64_t)first << 32 | last;
    }
    return size ? (uint64_t)at[0] << 16 | (uint64_t)at[size >> 1] << 8 | at[size - 1] : 0;
}

static inline uint64_t hash_of(const Table *table, const Slice parts[PARTS])
{
    uint64_t hash = table->seed;
    for (int part = 0; part < PARTS; part++) {
        const uint8_t *at = parts[part].at;
        uint32_t left = parts[part].size;
        hash ^= left;
        for (; left > 16; at += 16, left -= 16)
            hash = mixed(word_of(at, 8) ^ table->factor, word_of(at + 8, 8) ^ hash);
        uint64_t first = left < 8 ? word_of(at, left) : word_of(at, 8);
        uint64_t last = left < 8 ? 0 : word_of(at + left - 8, 8);
        hash = mixed(first ^ table->factor, last ^ hash);
    }
    return hash;
}

static inline bool is_same(const uint8_t *one, const uint8_t *other, uint32_t size)
{
    if (size < 8)
        return word_of(one, size) == word_of(other, size);
    for (uint32_t i = 0; i + 8 < size; i += 8)
        if (word_of(one + i, 8) != word_of(other + i, 8))
            return false;
    return word_of(one + size - 8, 8) == word_of(other + size - 8, 8);
}

static inline bool is_key(const Table *table, const Key *key, const Slice parts[PARTS])
{
    for (int part = 0; part < PARTS; part++)
        if (key->sizes[part] != parts[part].size)
            return false;
    const uint8_t *at = table->bytes + key->offset;
    for (int part = 0; part < PARTS; part++) {
        if (!is_same(at, parts[part].at, parts[part].size))
            return false;
        at += parts[part].size;
    }
    return true;
}

/* Put the number of a key into the first free slot that its hash leads to. */
static void place(Table *table, uint64_t hash, uint32_t number)
{
    size_t mask = table->slot_count - 1, slot = hash & mask;
    while (table->slots[slot])
        slot = (slot + 1) & mask;
    table->slots[slot] = number + 1;
}

static bool more_slots(Table *table)
{
    if (2 * (table->count + 1) <= table->slot_count)
        return true;
    size_t count = table->slot_count ? 2 * table->slot_count : 256;
    uint32_t *slots = calloc(count, sizeof *slots);
    if (slots == NULL)
        return false;
    free(table->slots);
    table->slots = slots;
    table->slot_count = count;
    for (size_t number = 0; number < table->count; number++)
        place(table, table->keys[number].hash, (uint32_t)number);
    return true;
}

/* Append a key; return its number, NO_ROOM where memory is short. */
static uint32_t append(Table *table, uint64_t hash, const Slice parts[PARTS])
{
    size_t size = table->size;
    for (int part = 0; part < PARTS; part++)
        size += parts[part].size;
    Key *keys = grown(table->keys, &table->room, table->count + 1, sizeof *keys);
    if (keys == NULL)
        return NO_ROOM;
    table->keys = keys;
    uint8_t *bytes = grown(table->bytes, &table->bytes_room, size, 1);
    if (bytes == NULL)
        return NO_ROOM;
    table->bytes = bytes;
    Key *key = &table->keys[table->count];
    key->hash = hash;
    key->offset = table->size;
    key->follower = 0;
    for (int part = 0; part < PARTS; part++) {
        key->sizes[part] = parts[part].size;
        if (parts[part].size)
            memcpy(table->bytes + table->size, parts[part].at, parts[part].size);
        table->size += parts[part].size;
    }
    place(table, hash, (uint32_t)table->count);
    return (uint32_t)table->count++;
}

static uint32_t found(Table *table, const Slice parts[PARTS])
{
    uint64_t hash = hash_of(table, parts);
    size_t mask = table->slot_count - 1;
    for (size_t slot = hash & mask; table->slots[slot]; slot = (slot + 1) & mask) {
        uint32_t number = table->slots[slot] - 1;
        if (table->keys[number].hash == hash && is_key(table, &table->keys[number], parts))
            return number;
    }
    return append(table, hash, parts);
}

uint32_t table_number(Table *table, const Slice parts[PARTS])
{
    /* Steps repeat, so what follows a key is likely what followed it last time. */
    if (table->last < table->count) {
        uint32_t guess = table->keys[table->last].follower;
        if (guess < table->count && is_key(table, &table->keys[guess], parts))
            return table->last = guess;
    }
    if (table->count >= NO_ROOM - 1 || !more_slots(table))
        return NO_ROOM;
    uint32_t number = found(table, parts);
    if (number == NO_ROOM)
        return number;
    if (table->last < table->count)
        table->keys[table->last].follower = number;
    return table->last = number;
}

void table_truncate(Table *table, size_t count)
{
    /* The last key took a slot that no key before it needs. */
    size_t mask = table->slot_count - 1;
    while (table->count > count) {
        uint32_t number = (uint32_t)--table->count;
        size_t slot = table->keys[number].hash & mask;
        while (table->slots[slot] != number + 1)
            slot = (slot + 1) & mask;
        table->slots[slot] = 0;
        table->size = table->keys[number].offset;
    }
}

Slice table_part(const Table *table, size_t number, int part)
{
    const Key *key = &table->keys[number];
    size_t offset = key->offset;
    for (int before = 0; before < part; before++)
        offset += key->sizes[before];
    return (Slice){table->bytes + offset, key->sizes[part]};
}
