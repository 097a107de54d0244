/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/copy.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { LINE = 64 }; /* bytes that a streaming store fills at best */

const char *ari_bench_copy_name(ari_bench_copy_kind k)
{
    static const char *const names[ARI_COPY_KINDS] = {"memcpy", "streaming stores", "rep movsb"};
    return (unsigned)k < ARI_COPY_KINDS ? names[k] : "?";
}

#if defined(__x86_64__)

__attribute__((target("avx512f"))) static void stream_lines_512(char *to, const char *from, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += LINE)
        _mm512_stream_si512((void *)(to + at), _mm512_loadu_si512(from + at));
}

static void stream_lines(char *to, const char *from, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += sizeof(__m128i))
        _mm_stream_si128((void *)(to + at), _mm_loadu_si128((const void *)(from + at)));
}

static void stream(char *to, const char *from, size_t bytes)
{
    const size_t lines = bytes / LINE * LINE;
    if (__builtin_cpu_supports("avx512f"))
        stream_lines_512(to, from, lines);
    else
        stream_lines(to, from, lines);
    _mm_sfence(); /* part of what it costs: streaming stores are not ordered by a later release store */
    memcpy(to + lines, from + lines, bytes - lines);
}

static void string(void *to, const void *from, size_t bytes)
{
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
}

#else

static void stream(char *to, const char *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

static void string(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

#endif

void ari_bench_copy(ari_bench_copy_kind k, void *to, const void *from, size_t bytes)
{
    if (k == ARI_COPY_STREAM)
        stream(to, from, bytes);
    else if (k == ARI_COPY_STRING)
        string(to, from, bytes);
    else
        memcpy(to, from, bytes);
}
