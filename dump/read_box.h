/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_DUMP_READ_BOX_H
#define ARI_DUMP_READ_BOX_H

#include "anyrank/dump.h"

/* Elements that lie next to each other in the full tensor. */
typedef struct ari_dump_run {
    const char *data; /* the first of them in the file */
    size_t step;      /* from one to the next there, in bytes */
    size_t full;      /* the first's number in the full tensor, row-major */
    size_t count;
} ari_dump_run;

/** Calls f for every run of a box's elements among [start, start + count) of the full tensor, in ascending order. A
 *  status other than AR_OK ends it and is returned. The dtype has whole bytes. */
AR_NODISCARD ar_status ari_dump_each_run(const ar_dump_tensor *t, const ar_dump_part *p, const ar_dump_box *b,
                                         size_t start, size_t count,
                                         ar_status (*f)(void *user, const ari_dump_run *run), void *user);
/** Copies a run's elements of `bytes` bytes each, closely packed. */
void ari_dump_copy_run(void *out, const ari_dump_run *run, size_t bytes);
/** Copies a box's elements among [start, start + count) of the full tensor to where they are in `out`, which begins
 * with element `start`. */
void ari_dump_copy_box(char *out, const ar_dump_tensor *t, const ar_dump_part *p, const ar_dump_box *b, size_t start,
                       size_t count);
/** Elements of a box. */
size_t ari_dump_box_count(int ndim, const ar_dump_box *b);

#endif
