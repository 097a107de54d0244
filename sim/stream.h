/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_SIM_STREAM_H
#define ARI_SIM_STREAM_H

#include <stdbool.h>
#include <stddef.h>

/** Whether outputs that are so large together would hardly stay in the cache anyway, beside as many bytes of inputs.
 * Then they are written past it: a plain store first reads the line that it overwrites. */
static inline bool ari_stream_pays(size_t bytes, int outputs)
{
    enum { OUTPUT_BYTES = 1 << 23 }; /* half of what the last-level caches of common machines hold at least */
    return bytes >= OUTPUT_BYTES / (size_t)outputs;
}
/** memcpy that does not leave the destination in the cache, where the machine can; plain memcpy elsewhere. */
void ari_stream_bytes(void *to, const void *from, size_t bytes);
/** Makes what was streamed so far visible before anything the caller publishes next. */
void ari_stream_end(void);

#endif
