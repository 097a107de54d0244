/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

/** Computes *out = a * b. Errors: AR_ERR_OVERFLOW, naming both factors; *out is unchanged then. out may point to one of
 *  the factors. */
AR_NODISCARD ar_status ari_mul_size(size_t *out, size_t a, size_t b);
/** Computes *out = a + b. Errors: AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_add_size(size_t *out, size_t a, size_t b);
/** Allocate n elements of `size` bytes with malloc or calloc after checking the product; n = 0 gives a valid pointer.
 *  Errors: AR_ERR_OVERFLOW, AR_ERR_MEMORY; the message contains `label`. The caller releases the result with free(). */
AR_NODISCARD ar_status ari_alloc(void **out, size_t n, size_t size, const char *label);
AR_NODISCARD ar_status ari_alloc_zero(void **out, size_t n, size_t size, const char *label);
/* Do the same for elements of the type that *gives points to. */
#define ARI_ALLOC(gives, n, what) ari_alloc((void **)(gives), n, sizeof **(gives), what)
#define ARI_ALLOC_ZERO(gives, n, what) ari_alloc_zero((void **)(gives), n, sizeof **(gives), what)
/* Before a pointer's declaration: frees what the pointer points to at the end of its block, on every exit. */
#define ARI_OWNED __attribute__((cleanup(ari_free_owned)))
void ari_free_owned(void *pointer);
/* Do the same for a value that the function `by` ends: also as a declaration, with a pointer to the value; and for what
 * a pointer points to (possibly NULL), if ARI_OWNER has assigned `by` to its type. */
#define ARI_ENDED(by) __attribute__((cleanup(by)))
#define ARI_OWNED_BY(by) __attribute__((cleanup(by##_owned)))
#define ARI_OWNER(type, by)                       \
    static inline void by##_owned(type **pointer) \
    {                                             \
        by(*pointer);                             \
    }
/* Passes ownership of a value to the caller, so that it is not ended with its block. */
#define ARI_GIVE(gives, owned) \
    do {                       \
        *(gives) = (owned);    \
        (owned) = NULL;        \
    } while (0)

/* Memory for many temporaries that are freed together; a list of blocks, the newest first. Used by one thread. */
typedef struct ari_arena {
    void *last;
} ari_arena;
/** Allocates n zeroed elements, valid until ari_arena_end. Errors: as ari_alloc. */
AR_NODISCARD ar_status ari_arena_take(ari_arena *a, void **out, size_t n, size_t size, const char *label);
#define ARI_TAKE(gives, a, n, what) ari_arena_take(a, (void **)(gives), n, sizeof **(gives), what)
/** A copy of a text. */
AR_NODISCARD ar_status ari_arena_text(ari_arena *a, char **out, const char *text, const char *label);
/** Does what ari_grow does for a list in an arena; the old copies remain in the arena. */
AR_NODISCARD ar_status ari_arena_grow(ari_arena *a, void *list, size_t *capacity, size_t count, size_t size,
                                      const char *label);
#define ARI_GROW_IN(a, list, capacity, count, what) ari_arena_grow(a, list, capacity, count, sizeof **(list), what)
/** Frees what was allocated since a->last was `mark`; NULL: everything. */
void ari_arena_end(ari_arena *a, void *mark);
/** Frees all. */
static inline void ari_arena_free(ari_arena *a)
{
    ari_arena_end(a, NULL);
}
typedef struct ari_arena_scope {
    ari_arena *arena;
    void *before;
} ari_arena_scope;
static inline void ari_arena_scope_end(const ari_arena_scope *s)
{
    ari_arena_end(s->arena, s->before);
}
/* Frees what is allocated from here to the end of the block, on every exit. */
#define ARI_ARENA_SCOPE(a) ARI_ENDED(ari_arena_scope_end) ari_arena_scope arena_scope = {(a), (a)->last}

/** Makes space for one more element in a list of `count`: doubles *capacity (64 at first) when the list is full. list
 *  points to the list's pointer. Errors: AR_ERR_OVERFLOW, AR_ERR_MEMORY, naming `label`; the list is unchanged then. */
AR_NODISCARD ar_status ari_grow(void *list, size_t *capacity, size_t count, size_t size, const char *label);
#define ARI_GROW(list, capacity, count, what) ari_grow(list, capacity, count, sizeof **(list), what)

/* In a comparison function for qsort: returns the order of x and y by these values unless they are equal. */
#define ARI_ASCENDING(of_x, of_y)            \
    do {                                     \
        if ((of_x) != (of_y))                \
            return (of_x) < (of_y) ? -1 : 1; \
    } while (0)
/* Calls qsort, also for an empty list, which may be NULL. */
#define ARI_SORT(list, n, compare)                   \
    do {                                             \
        if ((n) > 1)                                 \
            qsort(list, n, sizeof *(list), compare); \
    } while (0)

/* Raises `low` to the first index up to `high` for which `before` is false, as it is for all later indices; `before` is
 * an expression of index i. */
#define ARI_BISECT(low, high, i, before)             \
    for (size_t end_ = (high); (low) < end_;) {      \
        const size_t i = (low) + (end_ - (low)) / 2; \
        if (before)                                  \
            (low) = i + 1;                           \
        else                                         \
            end_ = i;                                \
    }

/** Computes the coordinates of element `index` in row-major order in a tensor of that shape; 0 along a dimension of
 *  extent 0. */
static inline void ari_coordinates(size_t *coords, size_t index, int ndim, const size_t *shape)
{
    for (int d = ndim - 1; d >= 0; d--) {
        coords[d] = shape[d] ? index % shape[d] : 0;
        index = shape[d] ? index / shape[d] : 0;
    }
}

/** True if two shapes, of n and of m dimensions, are the same. */
static inline bool ari_same_extents(int n, const size_t *a, int m, const size_t *b)
{
    bool equal = n == m;
    for (int d = 0; equal && d < n; d++)
        equal = a[d] == b[d];
    return equal;
}

/** Returns the number of elements of a box; the caller knows that it does not overflow. */
static inline size_t ari_volume(const size_t *extent, int ndim)
{
    size_t n = 1;
    for (int d = 0; d < ndim; d++)
        n *= extent[d];
    return n;
}

/** Computes the strides of a row-major tensor. */
static inline void ari_row_major(size_t *stride, int ndim, const size_t *extent)
{
    size_t step = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        stride[d] = step;
        step *= extent[d]; /* may overflow if another extent is 0, in which case the tensor is empty */
    }
}

/** Intersects [begin_a, begin_a + n) with [begin_b, begin_b + m): [*start, *start + *count). Returns false if the
 *  intersection is empty. */
static inline bool ari_overlap(size_t *start, size_t *count, size_t begin_a, size_t n, size_t begin_b, size_t m)
{
    const size_t begin = begin_a > begin_b ? begin_a : begin_b,
                 end = begin_a + n < begin_b + m ? begin_a + n : begin_b + m;
    *start = begin;
    *count = end > begin ? end - begin : 0;
    return end > begin;
}

/** The larger of two sizes, and the smaller. */
static inline size_t ari_larger(size_t a, size_t b)
{
    return a > b ? a : b;
}
static inline size_t ari_smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/** Return a / b rounded up to an integer, and n rounded up to a multiple of `step`. */
static inline size_t ari_ceil_div(size_t a, size_t b)
{
    return a / b + (a % b != 0);
}
static inline size_t ari_round_up(size_t n, size_t step)
{
    return ari_ceil_div(n, step) * step;
}

/** Returns a layout's extent or a number of steps, with 0 (not given) replaced by 1. */
static inline int ari_at_least_one(int extent)
{
    return extent > 1 ? extent : 1;
}

AR_END_DECLS
