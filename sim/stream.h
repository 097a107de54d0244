/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_SIM_STREAM_H
#define ARI_SIM_STREAM_H

#include <stdbool.h>
#include <stddef.h>

/** Whether outputs that are so large together would not stay in the cache anyway. Then they are written past it: a
 *  plain store first reads the line that it overwrites. Measured with 32 MiB of last-level cache, plain over streaming:
 *  0.8 at 24 MiB of outputs and 1.15 at 32 MiB with 2 ranks, 1.0 at both with 4, 0.9 at 16 MiB and 1.3 at 24 MiB
 * with 8. */
static inline bool ari_stream_pays(size_t bytes, int outputs)
{
    const size_t most = (size_t)24 << 20;
    return bytes >= most / (size_t)outputs;
}
/** memcpy that does not leave the destination in the cache, where the machine can; plain memcpy elsewhere. */
void ari_stream_bytes(void *to, const void *from, size_t bytes);
/** Makes what was streamed so far visible before anything the caller publishes next. */
void ari_stream_end(void);

#endif
