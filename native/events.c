/* Read the events of a chunk of a trace into columns, if all of it is plain.
 *
 * Plain is what the typed decoder of tracedoc/trace/events.py takes as it stands, and some of that is called
 * odd here as well: keys that come twice, numbers in unusual spelling. So whatever is read here, it reads alike.
 */

#include "events.h"

#include <stdlib.h>
#include <string.h>

#include "json.h"

enum { PH, CAT, NAME, PID, TID, TS, DUR, ARGS, FIELDS };
enum {
    EXTERNAL_ID,
    OLD_EXTERNAL_ID,
    CORRELATION,
    DEVICE,
    STREAM,
    BYTES,
    DEVICE_TYPE,
    DEVICE_ID,
    RESERVED,
    ALLOCATED,
    WAIT_ON_STREAM,
    RECORDED_BY,
    GRID, /* from here on any value will do */
    COLLECTIVE,
    TYPES,
    DIMS,
    VALUES,
    STRIDES,
    ARGUMENTS,
    UNKNOWN = ARGUMENTS
};

#define CLOSES (-1) /* in place of a name: the object ends */

#define LARGEST_US UINT64_C(4000000000000000)
#define EXACT_BELOW_US (UINT64_C(1) << 43) /* with a fraction; floats of the other reader round beyond */
#define LONG_FRAME_NS 10000
#define MOST_DIGITS 18
#define LISTS(e) \
    &(e)->times, &(e)->head, &(e)->placed, &(e)->sized, &(e)->counted, &(e)->waits, &(e)->shaped, \
        &(e)->collectives, &(e)->metadata

typedef struct {
    Slice fields[FIELDS];
    Slice args[ARGUMENTS];
    uint32_t seen, seen_args;
    bool odd;
    Text end; /* of the chunk: where a value ends, more may be read than it holds */
} Event;

void events_begin(Events *events, const uint64_t random[2], enum Frames frames)
{
    memset(events, 0, sizeof *events);
    table_begin(&events->heads, random[0], random[1]);
    table_begin(&events->places, random[0], random[1]);
    table_begin(&events->shapes, random[0], random[1]);
    events->frames = frames;
    events->fields.count = events->args.count = OTHER + 1;
    for (int step = FIRST; step <= OTHER; step++)
        events->fields.all[step].reach = events->args.all[step].reach = SIZE_MAX;
}

void events_end(Events *events)
{
    List *lists[] = {LISTS(events)};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        free(lists[i]->items);
    free(events->traits);
    table_end(&events->heads);
    table_end(&events->places);
    table_end(&events->shapes);
    memset(events, 0, sizeof *events);
}

/* Return the next item of a list, to be written; NULL where memory is short. */
static inline void *next_item(List *list, size_t size)
{
    if (list->count == list->room) {
        void *items = grown(list->items, &list->room, list->count + 1, size);
        if (items == NULL)
            return NULL;
        list->items = items;
    }
    return (char *)list->items + size * list->count++;
}

/* --- Values --- */

static inline bool is_text(Slice value, const char *text)
{
    size_t size = strlen(text);
    return value.size == size && memcmp(value.at, text, size) == 0;
}

/* What a value is: any decoder reads the numbers without exponent and of at most 18 characters. */
enum { TEXT = 1, ESCAPED = 2, NUMBER = 4, LONG_NUMBER = 8, NOTHING = 16, OTHER_VALUE = 32 };
#define SIMPLE (TEXT | ESCAPED | NUMBER | NOTHING)

static inline unsigned kind_of_number(Text at, Text stop)
{
    for (Text c = at; c < stop; c++)
        if ((*c | 0x20) == 'e')
            return OTHER_VALUE;
    return stop - at > MOST_DIGITS ? LONG_NUMBER : NUMBER;
}

/* Step over any value, and say of which kind it is. */
static inline Text take_value(Text at, Text end, unsigned *kind)
{
    if (is_digit(*at)) {
        Text stop = *at == '0' ? at + 1 : skip_digits(at, end);
        if (stop < end && *stop == '.') {
            if (++stop == end || !is_digit(*stop))
                return NULL;
            stop = skip_digits(stop, end);
        }
        if (stop < end && (*stop | 0x20) == 'e') {
            *kind = OTHER_VALUE;
            return skip_number(at, end);
        }
        *kind = stop - at > MOST_DIGITS ? LONG_NUMBER : NUMBER;
        return stop;
    }
    if (*at == '"') {
        bool escaped = false;
        at = skip_string(at + 1, end, &escaped);
        *kind = escaped ? ESCAPED : TEXT;
        return at;
    }
    Text stop = skip_value(at, end);
    if (stop != NULL)
        *kind = *at == 'n' ? NOTHING : *at == '-' ? kind_of_number(at, stop) : OTHER_VALUE;
    return stop;
}

/* Read an integer, or text that is one; `null` leaves `number` as it is. `end` is that of the chunk. */
static inline bool read_integer(Slice value, Text end, int64_t *number)
{
    Text at = value.at, stop = at + value.size;
    if (*at == 'n')
        return true;
    if (*at == '"') {
        at++;
        stop--;
    }
    bool negative = at < stop && *at == '-';
    at += negative;
    if (at == stop || stop - at > MOST_DIGITS)
        return false;
    uint64_t read = 0;
    if (read_digits(at, end, &read) != stop)
        return false;
    *number = negative ? -(int64_t)read : (int64_t)read;
    return true;
}

/* Read a number without exponent, microseconds with at most three decimals, as nanoseconds.
 *
 * `exact` takes fractions of any time.
 */
static inline bool read_time(Slice value, Text end, bool exact, int64_t *ns)
{
    Text at = value.at, stop = at + value.size;
    bool negative = *at == '-';
    at += negative;
    if (stop - at > 20)
        return false;
    uint64_t read = 0;
    Text point = read_digits(at, end, &read);
    if (point - at > MOST_DIGITS || read >= LARGEST_US)
        return false;
    int64_t time = 1000 * (int64_t)read;
    if (point < stop) {
        if (*point != '.' || stop - point > 4 || (read >= EXACT_BELOW_US && (!exact || negative)))
            return false;
        static const int64_t units[] = {100, 10, 1}; /* of what one, two and three decimals count */
        uint64_t decimals = 0;
        read_digits(point + 1, end, &decimals);
        time += (int64_t)decimals * units[stop - point - 2];
    }
    *ns = negative ? -time : time;
    return true;
}

/* --- Keeping an event --- */

static inline Slice field(const Event *event, int name)
{
    return event->seen >> name & 1 ? event->fields[name] : (Slice){NULL, 0};
}

static inline Slice argument(const Event *event, int name)
{
    return event->seen_args >> name & 1 ? event->args[name] : (Slice){NULL, 0};
}

static inline bool integer_argument(const Event *event, int name, int64_t *number)
{
    return !(event->seen_args >> name & 1) || read_integer(event->args[name], event->end, number);
}

static Verdict keep_counters(Events *events, const Event *event, int64_t row)
{
    Counted found = {row, NO_ID, NO_ID, NO_ID, NO_ID};
    if (!integer_argument(event, DEVICE_TYPE, &found.type) || !integer_argument(event, DEVICE_ID, &found.device) ||
        !integer_argument(event, ALLOCATED, &found.allocated) || !integer_argument(event, RESERVED, &found.reserved))
        return ODD;
    Counted *counted = next_item(&events->counted, sizeof *counted);
    if (counted == NULL)
        return NO_MEMORY;
    *counted = found;
    return PLAIN;
}

static Verdict keep_wait(Events *events, const Event *event, int64_t row)
{
    Waited found = {row, NO_ID, NO_ID};
    if (!(event->seen_args >> RECORDED_BY & 1) || event->args[RECORDED_BY].at[0] == 'n')
        return PLAIN;
    if (!integer_argument(event, WAIT_ON_STREAM, &found.stream) ||
        !integer_argument(event, RECORDED_BY, &found.recorded_by))
        return ODD;
    Waited *waited = next_item(&events->waits, sizeof *waited);
    if (waited == NULL)
        return NO_MEMORY;
    *waited = found;
    return PLAIN;
}

static Verdict keep_place(Events *events, const Event *event, int32_t row, uint32_t head)
{
    Slice parts[PARTS] = {argument(event, DEVICE), argument(event, STREAM), argument(event, GRID),
                          {(const uint8_t *)&head, sizeof head}};
    uint32_t place = table_number(&events->places, parts);
    Placed *placed = place == NO_ROOM ? NULL : next_item(&events->placed, sizeof *placed);
    if (placed == NULL)
        return NO_MEMORY;
    *placed = (Placed){row, (int32_t)place};
    Slice size = argument(event, BYTES);
    if (size.size == 0 || size.at[0] == 'n')
        return PLAIN;
    int64_t bytes;
    if (!read_integer(size, event->end, &bytes))
        return ODD;
    Sized *sized = next_item(&events->sized, sizeof *sized);
    if (sized == NULL)
        return NO_MEMORY;
    *sized = (Sized){row, bytes};
    return PLAIN;
}

static Verdict keep_shape(Events *events, const Event *event, int32_t row)
{
    /* Values differ from call to call. Those of sends and receives name the other rank, those of convolutions say
     * how they go over their input. */
    Slice name = event->fields[NAME];
    bool with_values = is_text(name, "\"c10d::send\"") || is_text(name, "\"c10d::recv_\"") ||
                       is_text(name, "\"aten::convolution\"") || is_text(name, "\"aten::convolution_backward\"");
    Slice none = {NULL, 0};
    Slice parts[PARTS] = {argument(event, DIMS), argument(event, TYPES),
                          with_values ? argument(event, VALUES) : none, argument(event, STRIDES)};
    uint32_t shape = table_number(&events->shapes, parts);
    Shaped *shaped = shape == NO_ROOM ? NULL : next_item(&events->shaped, sizeof *shaped);
    if (shaped == NULL)
        return NO_MEMORY;
    *shaped = (Shaped){row, (int32_t)shape};
    return PLAIN;
}

/* Keep a complete event or an instant, unless nobody wants it. */
static Verdict keep(Events *events, const Event *event, bool complete, const uint8_t *begin)
{
    const uint32_t heads_and_times = 1u << NAME | 1u << TS | (complete ? 1u << DUR : 0);
    if (event->odd || (event->seen & heads_and_times) != heads_and_times)
        return ODD;
    Times times = {0, 0, NO_ID, NO_ID};
    Slice duration = field(event, DUR);
    if (!read_time(event->fields[TS], event->end, true, &times.start_ns) ||
        (duration.size && !read_time(duration, event->end, false, &times.duration_ns)))
        return ODD;
    Slice category = field(event, CAT);
    if (events->frames != ALL_FRAMES && is_text(category, "\"python_function\"") &&
        (events->frames == NO_FRAMES || !complete || times.duration_ns < LONG_FRAME_NS))
        return PLAIN;
    Slice parts[PARTS] = {category, event->fields[NAME], field(event, PID), field(event, TID)};
    uint32_t head = table_number(&events->heads, parts);
    if (head == NO_ROOM)
        return NO_MEMORY;
    if (head > INT32_MAX)
        return ODD;
    uint8_t traits = head < events->classified ? events->traits[head] : UNCLASSIFIED;
    if (traits & REFUSED)
        return PLAIN;
    if (!integer_argument(event, CORRELATION, &times.correlation) ||
        !integer_argument(event, EXTERNAL_ID, &times.external_id) ||
        (times.external_id == NO_ID && !integer_argument(event, OLD_EXTERNAL_ID, &times.external_id)))
        return ODD;
    int32_t row = (int32_t)events->times.count;
    Times *kept = next_item(&events->times, sizeof *kept);
    int32_t *kept_head = kept == NULL ? NULL : next_item(&events->head, sizeof *kept_head);
    if (kept_head == NULL)
        return NO_MEMORY;
    *kept = times;
    *kept_head = (int32_t)head;
    Slice collective = argument(event, COLLECTIVE);
    if (collective.size && collective.at[0] != 'n') {
        Collective *found = next_item(&events->collectives, sizeof *found);
        if (found == NULL)
            return NO_MEMORY;
        *found = (Collective){row, collective.at - begin};
    }
    Verdict verdict = PLAIN;
    if (traits & ON_GPU)
        verdict = keep_place(events, event, row, head);
    if (verdict == PLAIN && traits & SHAPED && event->seen_args >> DIMS & 1)
        verdict = keep_shape(events, event, row);
    if (verdict == PLAIN && traits & COUNTED && !complete)
        verdict = keep_counters(events, event, row);
    if (verdict == PLAIN && traits & WAITS)
        verdict = keep_wait(events, event, row);
    return verdict;
}

/* --- Reading an event --- */

static int field_named(const uint8_t *key, size_t size)
{
    switch (size) {
    case 2:
        if (key[0] == 'p' && key[1] == 'h')
            return PH;
        return key[0] == 't' && key[1] == 's' ? TS : FIELDS;
    case 3:
        if (memcmp(key, "cat", 3) == 0)
            return CAT;
        if (memcmp(key, "pid", 3) == 0)
            return PID;
        if (memcmp(key, "tid", 3) == 0)
            return TID;
        return memcmp(key, "dur", 3) == 0 ? DUR : FIELDS;
    case 4:
        if (memcmp(key, "name", 4) == 0)
            return NAME;
        return memcmp(key, "args", 4) == 0 ? ARGS : FIELDS;
    default:
        return FIELDS;
    }
}

static int argument_named(const uint8_t *key, size_t size)
{
    switch (size) {
    case 4:
        return memcmp(key, "grid", 4) == 0 ? GRID : UNKNOWN;
    case 5:
        return memcmp(key, "bytes", 5) == 0 ? BYTES : UNKNOWN;
    case 6:
        if (memcmp(key, "stream", 6) == 0)
            return STREAM;
        return memcmp(key, "device", 6) == 0 ? DEVICE : UNKNOWN;
    case 9:
        return memcmp(key, "Device Id", 9) == 0 ? DEVICE_ID : UNKNOWN;
    case 10:
        if (memcmp(key, "Input Dims", 10) == 0)
            return DIMS;
        return memcmp(key, "Input type", 10) == 0 ? TYPES : UNKNOWN;
    case 11:
        if (memcmp(key, "External id", 11) == 0)
            return EXTERNAL_ID;
        if (memcmp(key, "correlation", 11) == 0)
            return CORRELATION;
        if (memcmp(key, "external id", 11) == 0)
            return OLD_EXTERNAL_ID;
        return memcmp(key, "Device Type", 11) == 0 ? DEVICE_TYPE : UNKNOWN;
    case 13:
        return memcmp(key, "Input Strides", 13) == 0 ? STRIDES : UNKNOWN;
    case 14:
        if (memcmp(key, "wait_on_stream", 14) == 0)
            return WAIT_ON_STREAM;
        return memcmp(key, "Total Reserved", 14) == 0 ? RESERVED : UNKNOWN;
    case 15:
        if (memcmp(key, "Collective name", 15) == 0)
            return COLLECTIVE;
        if (memcmp(key, "Concrete Inputs", 15) == 0)
            return VALUES;
        return memcmp(key, "Total Allocated", 15) == 0 ? ALLOCATED : UNKNOWN;
    case 33:
        return memcmp(key, "wait_on_cuda_event_record_corr_id", 33) == 0 ? RECORDED_BY : UNKNOWN;
    default:
        return UNKNOWN;
    }
}

/* What stands between two values, up to where the second begins, is nearly always one of a few texts. So it is
 * compared with what followed last time before it is parsed.
 */
static inline bool follows(const Step *step, Text at, Text end)
{
    if ((size_t)(end - at) <= step->reach)
        return false;
    size_t size = step->size;
    uint64_t text, known;
    memcpy(&text, at, 8);
    memcpy(&known, step->text, 8);
    uint64_t differs = (text ^ known) & step->mask;
    if (size > 8) {
        size_t last = size - 8;
        for (size_t i = 8; i < last; i += 8) {
            memcpy(&text, at + i, 8);
            memcpy(&known, step->text + i, 8);
            differs |= text ^ known;
        }
        memcpy(&text, at + last, 8);
        memcpy(&known, step->text + last, 8);
        differs |= text ^ known;
    }
    /* More space than last time is parsed anew. */
    return differs == 0 && at[size] >= step->least;
}

/* Parse what stands between two values, or before the first; return where the next one begins. */
static Text parse_step(Text at, Text end, bool first, int (*named)(const uint8_t *, size_t), int *name)
{
    at = skip_space(at, end);
    if (at < end && *at == '}') {
        *name = CLOSES;
        return at + 1;
    }
    if (!first)
        at = at < end && *at == ',' ? skip_space(at + 1, end) : end;
    if (at == end || *at != '"')
        return NULL;
    bool escaped = false;
    Text stop = skip_string(at + 1, end, &escaped);
    if (stop == NULL || escaped)
        return NULL;
    *name = named(at + 1, (size_t)(stop - at) - 2);
    return skip_colon(stop, end);
}

/* Return the step with a text, a new one if it was not known; OTHER if it cannot be remembered. */
static uint8_t step_of(Steps *steps, Text at, size_t size, int name)
{
    if (size > LONGEST_STEP)
        return OTHER;
    uint8_t text[LONGEST_STEP] = {0};
    memcpy(text, at, size);
    uint64_t hash = size, word;
    for (size_t i = 0; i < size; i += 8) {
        memcpy(&word, text + i, 8);
        hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        hash ^= hash >> 32;
    }
    uint8_t *slot = &steps->slots[hash % STEP_SLOTS];
    Step *found = &steps->all[*slot];
    if (*slot)
        return found->size == size && memcmp(found->text, at, size) == 0 ? *slot : OTHER;
    if (steps->count == MOST_STEPS)
        return OTHER;
    *slot = (uint8_t)steps->count++;
    found = &steps->all[*slot];
    found->size = (uint8_t)size;
    found->reach = size < 8 ? 8 : size;
    found->least = name == CLOSES ? 0 : ' ' + 1;
    found->name = (int8_t)name;
    memcpy(found->text, text, sizeof text);
    uint8_t mask[8] = {0};
    memset(mask, 0xff, size < 8 ? size : 8);
    memcpy(&found->mask, mask, 8);
    return *slot;
}

/* Parse and remember the step behind `*step`, which becomes it; return where the next value begins. */
static Text new_step(Steps *steps, uint8_t *step, Text at, Text end, int (*named)(const uint8_t *, size_t), int *name)
{
    Step *before = &steps->all[*step];
    Text value = parse_step(at, end, *step == FIRST, named, name);
    if (value == NULL)
        return NULL;
    *step = step_of(steps, at, (size_t)(value - at), *name);
    if (*step != OTHER) {
        before->next[1] = before->next[0];
        before->next[0] = *step;
    }
    return value;
}

/* Go to the next value of an object, whose key is `name`; or behind the object, and `name` is CLOSES.
 *
 * `step` is the step before, FIRST at the beginning of the object, and becomes the one taken.
 */
static inline Text next_value(Steps *steps, uint8_t *step, Text at, Text end,
                              int (*named)(const uint8_t *, size_t), int *name)
{
    Step *before = &steps->all[*step];
    uint8_t next = before->next[0];
    if (!follows(&steps->all[next], at, end)) {
        next = before->next[1];
        if (!follows(&steps->all[next], at, end))
            return new_step(steps, step, at, end, named, name);
        before->next[1] = before->next[0];
        before->next[0] = next;
    }
    *step = next;
    *name = steps->all[next].name;
    return at + steps->all[next].size;
}

static Text read_arguments(Steps *steps, Event *event, Text at, Text end)
{
    uint8_t step = FIRST;
    for (;;) {
        int name;
        unsigned kind;
        Text value = next_value(steps, &step, at, end, argument_named, &name);
        if (value == NULL || name == CLOSES)
            return value;
        at = take_value(value, end, &kind);
        if (at == NULL)
            return NULL;
        if (name != UNKNOWN) {
            event->odd |= (event->seen_args >> name & 1) | (name < GRID && !(kind & SIMPLE));
            event->seen_args |= 1u << name;
            event->args[name] = (Slice){value, (uint32_t)(at - value)};
        }
    }
}

static inline Text read_field(Steps *steps, Event *event, int name, Text at, Text end)
{
    static const uint8_t plain[FIELDS] = {[PH] = TEXT,     [CAT] = TEXT,
                                          [NAME] = SIMPLE, [PID] = SIMPLE,
                                          [TID] = SIMPLE,  [TS] = NUMBER | LONG_NUMBER,
                                          [DUR] = NUMBER | LONG_NUMBER};
    if (event->seen >> name & 1)
        return NULL;
    event->seen |= 1u << name;
    if (name == ARGS && *at == '{')
        return read_arguments(steps, event, at + 1, end);
    unsigned kind;
    Text stop = take_value(at, end, &kind);
    if (stop == NULL)
        return NULL;
    event->fields[name] = (Slice){at, (uint32_t)(stop - at)};
    event->odd |= !(plain[name] & kind);
    return name == PH && (kind != TEXT || stop - at != 3) ? NULL : stop;
}

static inline bool is_untimed(uint8_t phase)
{
    return phase == 's' || phase == 'f' || phase == 't' || phase == 'C' || phase == 'I';
}

/* Read the event that begins at `at`; `begin` is where the chunk begins. */
static Text read_event(Events *events, Text at, Text begin, Text end, Verdict *verdict)
{
    Event event;
    event.seen = event.seen_args = 0;
    event.odd = false;
    event.end = end;
    Text start = at++;
    uint8_t step = FIRST;
    for (;;) {
        int name;
        at = next_value(&events->fields, &step, at, end, field_named, &name);
        if (at == NULL)
            return NULL;
        if (name == CLOSES)
            break;
        at = name == FIELDS ? skip_value(at, end) : read_field(&events->args, &event, name, at, end);
        if (at == NULL)
            return NULL;
    }
    if (!(event.seen >> PH & 1))
        return NULL;
    uint8_t phase = event.fields[PH].at[1];
    if (phase == 'X' || phase == 'i') {
        *verdict = keep(events, &event, phase == 'X', begin);
        return at;
    }
    if (phase == 'M') {
        Span *span = next_item(&events->metadata, sizeof *span);
        if (span == NULL)
            *verdict = NO_MEMORY;
        else
            *span = (Span){start - begin, at - begin};
        return at;
    }
    return is_untimed(phase) ? at : NULL;
}

Verdict events_read(Events *events, const uint8_t *begin, const uint8_t *end)
{
    /* What was numbered in a chunk that nobody classified is forgotten. */
    table_truncate(&events->heads, events->classified);
    table_truncate(&events->places, events->known_places);
    table_truncate(&events->shapes, events->known_shapes);
    List *lists[] = {LISTS(events)};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        lists[i]->count = 0;
    events->elements = 0;
    Text at = begin;
    if (end - begin > INT32_MAX || at == end || *at != '[')
        return ODD;
    Verdict verdict = PLAIN;
    do {
        at = skip_space(at + 1, end);
        if (at == end || *at != '{')
            return ODD;
        at = read_event(events, at, begin, end, &verdict);
        if (at == NULL || verdict != PLAIN)
            return verdict == PLAIN ? ODD : verdict;
        events->elements++;
        at = skip_space(at, end);
    } while (at < end && *at == ',');
    return at < end && *at == ']' && skip_space(at + 1, end) == end ? PLAIN : ODD;
}

bool events_classify(Events *events, const uint8_t *traits, size_t count)
{
    if (count != events->heads.count - events->classified)
        return false;
    uint8_t *room = grown(events->traits, &events->traits_room, events->heads.count, 1);
    if (room == NULL && events->heads.count)
        return false;
    events->traits = room;
    if (count)
        memcpy(events->traits + events->classified, traits, count);
    events->classified = events->heads.count;
    events->known_places = events->places.count;
    events->known_shapes = events->shapes.count;
    return true;
}
