/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/sum.h"

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum {
    LINE = 64,
    VECTORS = 8 /* vectors of a block; each needs a register, and older machines have 16 */
};

/* NOLINTBEGIN(bugprone-macro-parentheses): types and names cannot be put in parentheses. */

/* Vectors of `lanes` numbers are added number by number, as a loop over them would. Where the loops over
 * VECTORS are unrolled, `sum` never leaves the registers. */
#define UNROLLED _Pragma("GCC unroll 8") for (size_t u = 0; u < VECTORS; u++)
#define WRITE_BLOCK(store)                              \
    for (int k = 0; k < f->outputs; k++) {              \
        char *to = f->out[k] + at;                      \
        UNROLLED store(to + u * sizeof sum[0], sum[u]); \
    }
#define FUSED(name, isa, type, lanes, STREAM)                                     \
    isa static size_t name(const ari_fused *f, size_t at, size_t end)             \
    {                                                                             \
        typedef type vector __attribute__((vector_size((lanes) * sizeof(type)))); \
        vector sum[VECTORS], next;                                                \
        for (; end - at >= sizeof sum; at += sizeof sum) {                        \
            const char *from = f->in[0] + at;                                     \
            UNROLLED memcpy(&sum[u], from + u * sizeof next, sizeof next);        \
            for (int k = 1; k < f->inputs; k++) {                                 \
                from = f->in[k] + at;                                             \
                UNROLLED                                                          \
                {                                                                 \
                    memcpy(&next, from + u * sizeof next, sizeof next);           \
                    sum[u] += next;                                               \
                }                                                                 \
            }                                                                     \
            if (f->past_cache)                                                    \
                WRITE_BLOCK(STREAM)                                               \
            else                                                                  \
                WRITE_BLOCK(PLAIN)                                                \
        }                                                                         \
        for (; end - at >= sizeof next; at += sizeof next) {                      \
            memcpy(&sum[0], f->in[0] + at, sizeof next);                          \
            for (int k = 1; k < f->inputs; k++) {                                 \
                memcpy(&next, f->in[k] + at, sizeof next);                        \
                sum[0] += next;                                                   \
            }                                                                     \
            for (int k = 0; k < f->outputs; k++)                                  \
                PLAIN(f->out[k] + at, sum[0]);                                    \
        }                                                                         \
        return at;                                                                \
    }

#define PLAIN(to, x) memcpy(to, &(x), sizeof(x))

/* A version for each width of vectors, each with streaming stores of that width. */
#if defined(__x86_64__) && !defined(ARI_SANITIZED)
#define STREAM_64(to, x) _mm512_stream_si512((void *)(to), (__m512i)(x))
#define STREAM_32(to, x) _mm256_stream_si256((void *)(to), (__m256i)(x))
#define STREAM_16(to, x) _mm_stream_si128((void *)(to), (__m128i)(x))
#define VERSIONS(name, type)                                                                                           \
    FUSED(name##_64, __attribute__((target("avx512f"))), type, 64 / sizeof(type), STREAM_64)                           \
    FUSED(name##_32, __attribute__((target("avx2"))), type, 32 / sizeof(type), STREAM_32)                              \
    FUSED(name##_16, , type, 16 / sizeof(type), STREAM_16)                                                             \
    static ari_fused_fn name(void)                                                                                     \
    {                                                                                                                  \
        return __builtin_cpu_supports("avx512f") ? name##_64 : __builtin_cpu_supports("avx2") ? name##_32 : name##_16; \
    }
#else
#define VERSIONS(name, type)                           \
    FUSED(name##_16, , type, 16 / sizeof(type), PLAIN) \
    static ari_fused_fn name(void)                     \
    {                                                  \
        return name##_16;                              \
    }
#endif

VERSIONS(f32, float)
VERSIONS(f64, double)
VERSIONS(i32, uint32_t) /* integers wrap */
VERSIONS(i64, uint64_t)
/* NOLINTEND(bugprone-macro-parentheses) */

ari_fused_fn ari_fused_kernel(ar_dtype t, ar_op op)
{
    if (op != AR_SUM)
        return NULL;
    return t == AR_F32 ? f32() : t == AR_F64 ? f64() : t == AR_I32 ? i32() : t == AR_I64 ? i64() : NULL;
}

bool ari_fused_head(const ari_fused *f, size_t offset, size_t element, size_t *head)
{
    const size_t place = (uintptr_t)(f->out[0] + offset) % LINE;
    for (int k = 1; k < f->outputs; k++) {
        if ((uintptr_t)(f->out[k] + offset) % LINE != place)
            return false;
    }
    *head = (LINE - place) % LINE;
    return *head % element == 0;
}

/* --- copies past the cache ---------------------------------------------------------------------------------------- */

#if defined(__x86_64__)

void ari_stream_bytes(void *dst, const void *src, size_t bytes)
{
    char *t = dst;
    const char *f = src;
    /* Streaming stores write whole cache lines; the ends are copied normally. */
    const size_t head = (LINE - (uintptr_t)t % LINE) % LINE;
    if (bytes < head + LINE) {
        memcpy(t, f, bytes);
        return;
    }
    memcpy(t, f, head);
    size_t offset = head;
    for (; offset + LINE <= bytes; offset += LINE) {
        for (size_t i = 0; i < LINE; i += sizeof(__m128i)) {
            __m128i part;
            memcpy(&part, f + offset + i, sizeof part);
            _mm_stream_si128((void *)(t + offset + i), part);
        }
    }
    memcpy(t + offset, f + offset, bytes - offset);
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
