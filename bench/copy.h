/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_BENCH_COPY_H
#define ARI_BENCH_COPY_H

#include <stddef.h>

/* The simple ways of copying memory. Which is the fastest depends on the machine and on what stays in its caches, so a
 * benchmark that measures itself against a copy runs all of them and takes the fastest. */
typedef enum ari_bench_copy_kind {
    ARI_COPY_LIBRARY, /* memcpy */
    ARI_COPY_STREAM,  /* the widest stores that leave the cache alone */
    ARI_COPY_STRING,  /* the processor's own instruction for it (rep movsb) */
    ARI_COPY_KINDS
} ari_bench_copy_kind;

/** "memcpy", "streaming stores", "rep movsb". */
const char *ari_bench_copy_name(ari_bench_copy_kind k);
/** to and from are aligned to 64 bytes and do not overlap. Kinds that this machine does not have are memcpy. */
void ari_bench_copy(ari_bench_copy_kind k, void *to, const void *from, size_t bytes);

#endif
