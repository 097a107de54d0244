/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/stream.h"

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>

void ari_stream_bytes(void *to, const void *from, size_t bytes)
{
    enum { LINE = 64 };
    char *t = to;
    const char *f = from;
    /* Streaming stores fill whole cache lines; the ends are copied as usual. */
    const size_t head = (LINE - (uintptr_t)t % LINE) % LINE;
    if (bytes < head + LINE) {
        memcpy(t, f, bytes);
        return;
    }
    memcpy(t, f, head);
    size_t at = head;
    for (; at + LINE <= bytes; at += LINE) {
        for (size_t i = 0; i < LINE; i += sizeof(__m128i)) {
            __m128i part;
            memcpy(&part, f + at + i, sizeof part);
            _mm_stream_si128((void *)(t + at + i), part);
        }
    }
    memcpy(t + at, f + at, bytes - at);
}

void ari_stream_end(void)
{
    _mm_sfence(); /* streaming stores are not ordered by a later release store */
}

#else

void ari_stream_bytes(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

void ari_stream_end(void)
{
}

#endif
