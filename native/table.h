/* Number distinct keys in order of appearance. */

#ifndef TRACEDOC_TABLE_H
#define TRACEDOC_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PARTS 4

/* A piece of text; of no size where there is none. */
typedef struct {
    const uint8_t *at;
    uint32_t size;
} Slice;

typedef struct {
    uint64_t hash;
    size_t offset; /* of the first part in `bytes`; the others follow */
    uint32_t sizes[PARTS];
    uint32_t follower; /* the number that was asked for after this one last time */
} Key;

/* Keys of up to four parts, whose bytes are copied. */
typedef struct {
    Key *keys;
    size_t count, room;
    uint32_t *slots; /* one more than the number of the key, 0 where a slot is free */
    size_t slot_count;
    uint8_t *bytes;
    size_t size, bytes_room;
    uint64_t seed, factor;
    uint32_t last; /* the number that was asked for last */
} Table;

#define NO_ROOM UINT32_MAX

/* Two random numbers keep strangers from choosing keys that collide. */
void table_begin(Table *table, uint64_t seed, uint64_t factor);
void table_end(Table *table);

/* Return the number of a key, a new one if it was not known; NO_ROOM where memory is short. */
uint32_t table_number(Table *table, const Slice parts[PARTS]);

/* Forget all keys but the first `count`. */
void table_truncate(Table *table, size_t count);

/* Return a part of a known key. */
Slice table_part(const Table *table, size_t number, int part);

/* Return `items` with room for `count` of `size` bytes each; NULL, and `items` stays, if memory is short. */
void *grown(void *items, size_t *room, size_t count, size_t size);

#endif
