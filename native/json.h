/* Step over JSON text, checking all of it.
 *
 * Each function takes where a token begins and where the text ends, and returns where the token ends, or NULL
 * where the text is not what it should be. What is accepted here, every JSON decoder accepts; some of what a
 * decoder would accept is refused: deep nesting, and escapes of surrogates.
 */

#ifndef TRACEDOC_JSON_H
#define TRACEDOC_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef const uint8_t *Text;

#define DEEPEST 63

#if defined(__GNUC__) && defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define EIGHT_AT_A_TIME 1
#ifdef __SSE2__
#define SIXTEEN_AT_A_TIME 1
#include <emmintrin.h>
#endif
#endif

static inline Text skip_space(Text at, Text end)
{
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r'))
        at++;
    return at;
}

static inline bool is_digit(uint8_t c)
{
    return (uint8_t)(c - '0') <= 9;
}

#ifdef EIGHT_AT_A_TIME
/* Return how many digits eight bytes begin with. */
static inline unsigned leading_digits(uint64_t bytes)
{
    uint64_t values = bytes ^ 0x3030303030303030u;
    uint64_t others = ((values + 0x7676767676767676u) | values) & 0x8080808080808080u;
    return others ? (unsigned)__builtin_ctzll(others) >> 3 : 8;
}

/* Return the number that the first `count` of eight bytes spell, 1 to 8 digits: two, four, eight at once. */
static inline uint64_t number_of_digits(uint64_t bytes, unsigned count)
{
    const uint64_t pairs = 0x000000ff000000ffu, hundreds = 0x000f424000000064u, ones = 0x0000271000000001u;
    uint64_t digits = (bytes ^ 0x3030303030303030u) << (64 - 8 * count);
    digits = digits * 10 + (digits >> 8);
    return ((digits & pairs) * hundreds + ((digits >> 16) & pairs) * ones) >> 32;
}
#endif

/* Step over digits, of which there may be none. */
static inline Text skip_digits(Text at, Text end)
{
#ifdef EIGHT_AT_A_TIME
    while (end - at >= 8) {
        uint64_t bytes;
        memcpy(&bytes, at, 8);
        unsigned count = leading_digits(bytes);
        at += count;
        if (count < 8)
            return at;
    }
#endif
    while (at < end && is_digit(*at))
        at++;
    return at;
}

/* Step over digits and append them to `number`, which wraps where there are more than 18. */
static inline Text read_digits(Text at, Text end, uint64_t *number)
{
    uint64_t read = *number;
#ifdef EIGHT_AT_A_TIME
    static const uint32_t powers[] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000};
    while (end - at >= 8) {
        uint64_t bytes;
        memcpy(&bytes, at, 8);
        unsigned count = leading_digits(bytes);
        if (count == 0)
            break;
        read = read * powers[count] + number_of_digits(bytes, count);
        at += count;
        if (count < 8)
            break;
    }
#endif
    for (; at < end && is_digit(*at); at++)
        read = 10 * read + (uint64_t)(*at - '0');
    *number = read;
    return at;
}

/* Step over a character that is not ASCII; UTF-8 as RFC 3629 defines it. */
static Text skip_wide(Text at, Text end)
{
    uint8_t lead = at[0];
    size_t more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
    if (lead < 0xc2 || lead > 0xf4 || (size_t)(end - at) <= more)
        return NULL;
    uint8_t second = at[1];
    if ((lead == 0xe0 && second < 0xa0) || (lead == 0xed && second > 0x9f) || (lead == 0xf0 && second < 0x90) ||
        (lead == 0xf4 && second > 0x8f))
        return NULL;
    for (size_t i = 1; i <= more; i++)
        if ((at[i] & 0xc0) != 0x80)
            return NULL;
    return at + more + 1;
}

/* Step over an escape; `at` is behind the backslash. */
static Text skip_escape(Text at, Text end)
{
    if (at == end)
        return NULL;
    if (*at != 'u')
        return memchr("\"\\/bfnrt", *at, 8) ? at + 1 : NULL;
    if (end - at < 5)
        return NULL;
    uint32_t code = 0;
    for (int i = 1; i <= 4; i++) {
        uint8_t c = at[i], letter = c | 0x20;
        if (is_digit(c))
            code = code * 16 + (c - '0');
        else if (letter >= 'a' && letter <= 'f')
            code = code * 16 + (letter - 'a' + 10);
        else
            return NULL;
    }
    return code >= 0xd800 && code <= 0xdfff ? NULL : at + 5;
}

/* Step over a text; `at` is behind the opening quote. `escaped` is set where it holds a backslash. */
static inline Text skip_string(Text at, Text end, bool *escaped)
{
    for (;;) {
#ifdef SIXTEEN_AT_A_TIME
        while (end - at >= 16) {
            __m128i bytes = _mm_loadu_si128((const __m128i *)at);
            __m128i quotes = _mm_cmpeq_epi8(bytes, _mm_set1_epi8('"'));
            __m128i backslashes = _mm_cmpeq_epi8(bytes, _mm_set1_epi8('\\'));
            __m128i controls = _mm_cmpeq_epi8(_mm_min_epu8(bytes, _mm_set1_epi8(0x1f)), bytes);
            /* A byte that is no ASCII has its own high bit set. */
            int special = _mm_movemask_epi8(_mm_or_si128(_mm_or_si128(quotes, backslashes), _mm_or_si128(controls, bytes)));
            if (special) {
                at += __builtin_ctz((unsigned)special);
                break;
            }
            at += 16;
        }
#elif defined(EIGHT_AT_A_TIME)
        const uint64_t ones = 0x0101010101010101u;
        while (end - at >= 8) {
            uint64_t bytes;
            memcpy(&bytes, at, 8);
            /* The lowest byte whose high bit is set is a quote, a backslash, a control or no ASCII. */
            uint64_t special = ((bytes ^ (ones * '"')) - ones) | ((bytes ^ (ones * '\\')) - ones) |
                               (bytes - ones * 0x20) | bytes;
            special &= ones * 0x80;
            if (special) {
                at += __builtin_ctzll(special) >> 3;
                break;
            }
            at += 8;
        }
#endif
        if (at == end)
            return NULL;
        uint8_t c = *at;
        if (c == '"')
            return at + 1;
        if (c == '\\') {
            *escaped = true;
            at = skip_escape(at + 1, end);
        } else if (c >= 0x80) {
            at = skip_wide(at, end);
        } else {
            at = c < 0x20 ? NULL : at + 1;
        }
        if (at == NULL)
            return NULL;
    }
}

static inline Text skip_number(Text at, Text end)
{
    if (at < end && *at == '-')
        at++;
    if (at == end || !is_digit(*at))
        return NULL;
    if (*at++ != '0')
        at = skip_digits(at, end);
    if (at < end && *at == '.') {
        if (++at == end || !is_digit(*at))
            return NULL;
        at = skip_digits(at, end);
    }
    if (at < end && (*at | 0x20) == 'e') {
        at++;
        if (at < end && (*at == '+' || *at == '-'))
            at++;
        if (at == end || !is_digit(*at))
            return NULL;
        at = skip_digits(at, end);
    }
    return at;
}

static inline Text skip_word(Text at, Text end, const char *word, size_t size)
{
    return (size_t)(end - at) >= size && memcmp(at, word, size) == 0 ? at + size : NULL;
}

/* Step over anything but an object and an array. */
static inline Text skip_scalar(Text at, Text end)
{
    bool escaped;
    if (is_digit(*at))
        return skip_number(at, end);
    switch (*at) {
    case '"':
        return skip_string(at + 1, end, &escaped);
    case 't':
        return skip_word(at, end, "true", 4);
    case 'f':
        return skip_word(at, end, "false", 5);
    case 'n':
        return skip_word(at, end, "null", 4);
    default:
        return skip_number(at, end);
    }
}

/* Step over the colon behind a key; return where the value begins. */
static inline Text skip_colon(Text at, Text end)
{
    at = skip_space(at, end);
    if (at == end || *at != ':')
        return NULL;
    at = skip_space(at + 1, end);
    return at == end ? NULL : at;
}

/* Step over an object or an array, without recursion: a bit for each level says which of the two it is. */
static Text skip_nested(Text at, Text end)
{
    uint64_t objects = 0;
    int depth = 0;
    bool escaped;
    for (;;) {
        /* Here a value begins. */
        if (*at == '{' || *at == '[') {
            if (++depth > DEEPEST)
                return NULL;
            objects = objects << 1 | (*at == '{');
            at = skip_space(at + 1, end);
            if (at == end)
                return NULL;
            if (*at == (objects & 1 ? '}' : ']'))
                goto closes;
            if (!(objects & 1))
                continue;
        } else {
            at = skip_scalar(at, end);
            if (at == NULL)
                return NULL;
            goto behind;
        }
    key:
        if (*at != '"' || (at = skip_string(at + 1, end, &escaped)) == NULL || (at = skip_colon(at, end)) == NULL)
            return NULL;
        continue;
    closes:
        at++;
        objects >>= 1;
        if (--depth == 0)
            return at;
    behind:
        at = skip_space(at, end);
        if (at == end)
            return NULL;
        if (*at == (objects & 1 ? '}' : ']'))
            goto closes;
        if (*at != ',')
            return NULL;
        at = skip_space(at + 1, end);
        if (at == end)
            return NULL;
        if (objects & 1)
            goto key;
    }
}

/* Step over any value; `at` is before the end. */
static inline Text skip_value(Text at, Text end)
{
    return *at == '{' || *at == '[' ? skip_nested(at, end) : skip_scalar(at, end);
}

#endif
