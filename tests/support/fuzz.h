/* SPDX-License-Identifier: Apache-2.0 */
/* Inputs for readers: a valid file's bytes, changed in places that a seed decides, the same in every run. */
#pragma once

#include <stdlib.h>
#include <string.h>

#include "ref/core/scheduler.h"

typedef struct fuzz_input {
    unsigned char *bytes; /* [room]; free() */
    size_t n, room;
} fuzz_input;

static inline fuzz_input fuzz_input_of(size_t room)
{
    const fuzz_input x = {.bytes = malloc(room), .room = room};
    if (x.bytes == NULL)
        abort();
    return x;
}

/* x becomes as `from`, which is not larger than its room. */
static inline void fuzz_copy(fuzz_input *x, const fuzz_input *from)
{
    memcpy(x->bytes, from->bytes, from->n);
    x->n = from->n;
}

static inline size_t fuzz_below(uint64_t *state, size_t n)
{
    return (size_t)(ari_splitmix(state) % (n == 0 ? 1 : n));
}

/* Replaces [at, at + old) by `text`; leaves x as it is where it does not have these bytes, or no room. */
static inline void fuzz_splice(fuzz_input *x, size_t at, size_t old, const void *text, size_t n)
{
    if (at + old > x->n || x->n - old + n > x->room)
        return;
    memmove(x->bytes + at + n, x->bytes + at + old, x->n - at - old);
    memcpy(x->bytes + at, text, n);
    x->n = x->n - old + n;
}
