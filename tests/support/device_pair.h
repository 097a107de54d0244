/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Two devices that should give the same bits: a case makes buffers that exist on both with the same contents, runs
 * slots of the table on both, and ends with its block; then every byte of every buffer is compared, inputs, the gaps of
 * strided views and guards around it all included. Buffers begin at odd places, since callers pass pieces of larger
 * ones.
 *
 *     PAIR_CASE(p, "n %zu", n);
 *     const pair_buf x = pair_floats(p, "x", n, PAIR_SPECIAL), y = pair_words(p, "y", PAIR_W32, n);
 *     PAIR_RUN(p, scale, y.at[s], ar_const(x.at[s]), 0.5f, n);
 *
 * A failure (memory, a slot's status) makes the rest of its case do nothing; its end reports it. Errors are printed as
 * they are found. */
#include "anyrank/device.h"

typedef enum pair_values {
    PAIR_ORDINARY,  /* uniform in (-4, 4) */
    PAIR_WIDE,      /* finite, exponents over the whole of fp32 */
    PAIR_SPECIAL,   /* ordinary, one in six a NaN, an infinity, a zero, a subnormal, the largest, the smallest */
    PAIR_ANY,       /* any 32 bits */
    PAIR_EQUAL,     /* one value everywhere */
    PAIR_ZERO,      /* +0 and -0 */
    PAIR_SUBNORMAL, /* subnormals alone */
    PAIR_LARGEST,   /* +-FLT_MAX */
    PAIR_TIES,      /* halfway between numbers of 8 and of 11 bits of significand, or close to it */
    PAIR_SQUARES,   /* finite, with squares and sums that stay finite and normal: 2^-60 .. 2^60 */
    PAIR_VALUE_KINDS,
    PAIR_EACH_ROW, /* pair_rows: another kind for each row */
    PAIR_CALM_ROWS /* pair_rows: ordinary ones, and every third row of another kind, finite or not */
} pair_values;
const char *pair_values_name(pair_values v);

/* How a buffer's elements are compared. */
typedef enum pair_kind {
    PAIR_W8,
    PAIR_W16,
    PAIR_W32,
    PAIR_W64,
    PAIR_F32_NAN, /* bits, but a NaN is any NaN: where the payload is not defined */
    PAIR_F64_NAN, /* likewise */
    PAIR_LIMBS,   /* two int64 an element, hi*2^32 + lo: the sum, however it is split */
    PAIR_KINDS
} pair_kind;

typedef struct pair_buf {
    ar_buf at[2];
    void *host; /* what both will hold, written before the first PAIR_RUN of the case; NULL: no buffer */
} pair_buf;
typedef struct pair_tensor {
    ar_tensor at[2];
    pair_buf buf;
} pair_tensor;

/* Where the elements of a view lie. */
typedef enum pair_layout {
    PAIR_ROW_MAJOR,
    PAIR_PADDED,   /* gaps after each row */
    PAIR_SPACED,   /* gaps of 16 bytes or more: rows are aligned where they have a multiple of 16 */
    PAIR_SWAPPED,  /* the last two dimensions: column after column */
    PAIR_GAPS,     /* swapped, with gaps between columns and between elements */
    PAIR_HEADS,    /* dimensions 1 and 2 of four: [b, s, heads, d] seen as [b, heads, s, d] */
    PAIR_REVERSED, /* the last row first: a negative stride */
    PAIR_LAYOUTS
} pair_layout;
const char *pair_layout_name(pair_layout l);

#define PAIR_BUFFERS 24
typedef struct pair_memory {
    char name[24];
    pair_kind kind;
    bool output; /* made without contents of its own */
    size_t count, front, bytes;
    ar_buf base[2];
    unsigned char *host;
    double *expected, *bound; /* pair_within; [count] */
} pair_memory;

/* What the cases of one slot gave. */
typedef struct pair_tally {
    uint64_t cases, words, differing, failures;
    bool missing; /* the other device does not have it */
} pair_tally;

typedef struct device_pair {
    ar_device *side[2]; /* the reference, and the other */
    ar_queue *queue[2];
    uint64_t state;  /* of the random numbers */
    int round;       /* 0: the sizes that are written down; more: random ones */
    ar_dtype stored; /* of the case's activations */
    bool skewed;     /* this case: memory is not aligned to more than its elements */
    bool small;      /* no long ones: a checker makes each access slow */
    const char *slot;
    bool spoil; /* one bit of what the other wrote, after each case */
    pair_tally tally;
    char text[160]; /* the case */
    ar_status status;
    bool uploaded;
    int reported, buffers;
    pair_memory memory[PAIR_BUFFERS];
} device_pair;

/** Devices and queues. Errors: those of the devices; the pair is closed then. */
AR_NODISCARD ar_status pair_open(device_pair *p, const ar_device_choice *reference, const ar_device_choice *other,
                                 int threads);
void pair_close(device_pair *p);

uint64_t pair_random(device_pair *p);
/** In [0, n). */
size_t pair_below(device_pair *p, size_t n);
/** Size number i of a list of adversarial ones, ends where it gives SIZE_MAX; in later rounds as many random ones. */
size_t pair_size(device_pair *p, size_t i);
float pair_value(device_pair *p, pair_values v);

/** Gives p back. */
device_pair *pair_begin(device_pair *p, const char *format, ...) AR_PRINTF(2, 3);
void pair_end(device_pair *p);
static inline void pair_leave(device_pair *const *p)
{
    pair_end(*p);
}
/* A case, which ends with the block that this line is in. */
#define PAIR_CASE(p, ...) \
    __attribute__((cleanup(pair_leave))) device_pair *const case_of_block = pair_begin(p, __VA_ARGS__)
/** Whether cases of this slot should go on: it is there, not enough of it was reported, and what was spoiled on purpose
 *  has not been seen yet. */
bool pair_goes_on(const device_pair *p);

/** An output: filled with a pattern that is a NaN in fp32. */
pair_buf pair_words(device_pair *p, const char *name, pair_kind kind, size_t count);
pair_buf pair_floats(device_pair *p, const char *name, size_t n, pair_values v);
pair_buf pair_rows(device_pair *p, const char *name, size_t rows, size_t cols, pair_values v);
/** Zeros. */
pair_buf pair_zeros(device_pair *p, const char *name, pair_kind kind, size_t count);
/** Of elements x[i] = low + i's random number below n; int64 or int32 by kind. */
pair_buf pair_integers(device_pair *p, const char *name, pair_kind kind, size_t count, int64_t low, uint64_t n);
pair_buf pair_bytes(device_pair *p, const char *name, size_t count, unsigned ones_of_eight);
pair_buf pair_none(void);

pair_tensor pair_output(device_pair *p, const char *name, int ndim, const size_t *shape, pair_layout layout);
pair_tensor pair_input(device_pair *p, const char *name, int ndim, const size_t *shape, pair_layout layout,
                       pair_values v);
/** The same of any dtype of whole bytes; elements of random bits where random. */
pair_tensor pair_typed(device_pair *p, const char *name, ar_dtype t, int ndim, const size_t *shape, pair_layout layout,
                       bool random);
/** A row-major view of a buffer. */
pair_tensor pair_view(pair_buf b, int ndim, const size_t *shape);

/** The same view in the dtype that activations have in this case: itself, or in one case of three a copy of bf16 numbers
 *  in the same layout. What it held is rounded to them first, in `v` too, so that expected values may be made of that. */
pair_tensor pair_stored(device_pair *p, pair_tensor v);

/** Element i, in row-major order of the view, in what both will hold. */
float *pair_element(pair_tensor v, size_t i);
size_t pair_count(pair_tensor v);

/** The elements of a view are not compared by bits, but on both sides with expected[i], within bound[i], i in
 *  row-major order; NaN is expected where expected[i] is one. The gaps of the view stay as they are. */
void pair_within(device_pair *p, pair_tensor v, const double *expected, const double *bound);

/* For macros. */
bool pair_ready(device_pair *p);
void pair_ran(device_pair *p, int side, ar_status st);

/* Runs a slot on both; in the arguments s is the side, 0 or 1. */
#define PAIR_RUN(p, slot, ...)  \
    for (int s = 0; s < 2; s++) \
        if (pair_ready(p))      \
    pair_ran((p), s, (p)->side[s]->ops->slot((p)->side[s], (p)->queue[s], __VA_ARGS__))
