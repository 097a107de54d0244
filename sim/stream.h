/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_SIM_STREAM_H
#define ARI_SIM_STREAM_H

#include <stddef.h>

/** memcpy that does not leave the destination in the cache, where the machine can; plain memcpy elsewhere. */
void ari_stream_bytes(void *to, const void *from, size_t bytes);
/** Makes what was streamed so far visible before anything the caller publishes next. */
void ari_stream_end(void);

#endif
