/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "anyrank/sketch.h"
#include "ref/core/float_bits.h"
#include "ref/core/size.h"

/* Number of words for a sketch's figures in a file. */
enum { WORDS = 13 };

/* Written part of a sketch: its non-zero blocks with one bit each, and the rows from the first to the last non-zero
 * one. A rank has few of both. */
typedef struct extent {
    uint64_t blocks;
    size_t written; /* blocks */
    size_t row, rows;
} extent;

static extent extent_of(const ar_sketch *s)
{
    extent e = {0};
    for (size_t i = 0; i < s->blocks * AR_SKETCH_BUCKETS; i++)
        e.blocks |= (uint64_t)(ari_bits64(s->bucket[i]) != 0) << i / AR_SKETCH_BUCKETS;
    for (size_t b = 0; b < s->blocks; b++)
        e.written += e.blocks >> b & 1;
    size_t end = s->rows;
    while (end > 0 && s->row_digest[end - 1] == 0)
        end--;
    while (e.row < end && s->row_digest[e.row] == 0)
        e.row++;
    e.rows = end - e.row;
    return e;
}

static size_t bytes_of(const extent *e)
{
    return (WORDS + e->written * AR_SKETCH_BUCKETS) * sizeof(uint64_t) + e->rows * sizeof(uint32_t);
}

size_t ar_sketch_bytes(const ar_sketch *s)
{
    const extent e = extent_of(s);
    return bytes_of(&e);
}

static void write_bytes(unsigned char *out, uint64_t x, int bytes)
{
    for (int i = 0; i < bytes; i++)
        out[i] = (unsigned char)(x >> 8 * i);
}

static uint64_t get(const unsigned char *data, int bytes)
{
    uint64_t x = 0;
    for (int i = 0; i < bytes; i++)
        x |= (uint64_t)data[i] << 8 * i;
    return x;
}

void ar_sketch_encode(unsigned char *out, const ar_sketch *s)
{
    const extent e = extent_of(s);
    const uint64_t word[WORDS] = {s->digest,
                                  s->count,
                                  s->zeros,
                                  s->nan,
                                  s->inf,
                                  s->places,
                                  s->first,
                                  s->last,
                                  ari_bits64(s->sum),
                                  ari_bits64(s->sum_squares),
                                  ari_bits64(s->max_abs),
                                  e.blocks,
                                  (uint64_t)e.row | (uint64_t)e.rows << 32};
    for (size_t i = 0; i < WORDS; i++, out += sizeof *word)
        write_bytes(out, word[i], sizeof *word);
    for (size_t i = 0; i < s->blocks * AR_SKETCH_BUCKETS; i++) {
        if (e.blocks >> i / AR_SKETCH_BUCKETS & 1) {
            write_bytes(out, ari_bits64(s->bucket[i]), sizeof(double));
            out += sizeof(double);
        }
    }
    for (size_t i = 0; i < e.rows; i++, out += sizeof(uint32_t))
        write_bytes(out, s->row_digest[e.row + i], sizeof(uint32_t));
}

ar_status ar_sketch_decode(ar_sketch *s, const unsigned char *data, size_t n, size_t *used)
{
    uint64_t word[WORDS] = {0};
    for (size_t i = 0; i < WORDS && (i + 1) * sizeof *word <= n; i++)
        word[i] = get(data + i * sizeof *word, sizeof *word);
    extent e = {.blocks = word[11], .row = (size_t)(word[12] & UINT32_MAX), .rows = (size_t)(word[12] >> 32)};
    for (size_t b = 0; b < s->blocks; b++)
        e.written += e.blocks >> b & 1;
    const bool beyond = s->blocks < 64 && e.blocks >> s->blocks != 0;
    if (n < WORDS * sizeof *word || beyond || e.row > s->rows || e.rows > s->rows - e.row || bytes_of(&e) > n)
        return ar_error_set(AR_ERR_FORMAT, "sketch: its figures end too early, or are of another tensor");
    *used = bytes_of(&e);
    data += sizeof word;
    s->digest = word[0];
    s->count = word[1];
    s->zeros = word[2];
    s->nan = word[3];
    s->inf = word[4];
    s->places = word[5];
    s->first = word[6];
    s->last = word[7];
    s->sum = ari_float64(word[8]);
    s->sum_squares = ari_float64(word[9]);
    s->max_abs = ari_float64(word[10]);
    for (size_t i = 0; i < s->blocks * AR_SKETCH_BUCKETS; i++) {
        const bool written = e.blocks >> i / AR_SKETCH_BUCKETS & 1;
        s->bucket[i] = written ? ari_float64(get(data, sizeof(double))) : 0.0;
        data += written ? sizeof(double) : 0;
    }
    for (size_t i = 0; i < e.rows; i++, data += sizeof(uint32_t))
        s->row_digest[e.row + i] = (uint32_t)get(data, sizeof(uint32_t));
    return AR_OK;
}

uint64_t ar_sketch_hash(const unsigned char *data, size_t n)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < n; i += 8)
        hash = (hash ^ get(data + i, n - i < 8 ? (int)(n - i) : 8)) * UINT64_C(0x100000001b3);
    return hash;
}
