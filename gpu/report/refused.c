/* SPDX-License-Identifier: Apache-2.0 */
/* int8 matmuls that the library refused, recorded per process, whose ranks share a GPU. */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>

#include "anyrank/device.h"
#include "gpu/report/device_private.h"
#include "gpu/report/refused.h"

typedef struct shape {
    size_t m, n, k, batch;
    uint64_t times;
} shape;

enum { SHAPES = 12 };

/* Guarded by `lock`. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static shape shapes[SHAPES];
static size_t shape_count;
static uint64_t total, of_others;

void ari_gpu_note_refused(size_t m, size_t n, size_t k, size_t batch)
{
    size_t i = 0;
    pthread_mutex_lock(&lock);
    while (i < shape_count && (shapes[i].m != m || shapes[i].n != n || shapes[i].k != k || shapes[i].batch != batch))
        i++;
    if (i == shape_count && shape_count < SHAPES)
        shapes[shape_count++] = (shape){m, n, k, batch, 0};
    total++;
    if (i < shape_count)
        shapes[i].times++;
    else
        of_others++;
    pthread_mutex_unlock(&lock);
}

/* Appends to text and adds to *used, which may exceed size. */
static void append(char *text, size_t size, size_t *used, const shape *s, const char *before)
{
    const size_t offset = *used < size ? *used : size;
    const int n = snprintf(text + offset, size - offset, "%s%zu x [%zu, %zu] of %zu terms (%" PRIu64 ")", before,
                           s->batch, s->m, s->n, s->k, s->times);
    *used += n > 0 ? (size_t)n : 0;
}

uint64_t ari_gpu_refused_products(char *text, size_t size)
{
    pthread_mutex_lock(&lock);
    const uint64_t refused = total;
    size_t used = (size_t)snprintf(text, size, refused == 0 ? "none" : "%" PRIu64 ": ", refused);
    for (size_t i = 0; i < shape_count; i++)
        append(text, size, &used, &shapes[i], i == 0 ? "" : ", ");
    if (of_others > 0 && used < size)
        snprintf(text + used, size - used, ", other shapes (%" PRIu64 ")", of_others);
    pthread_mutex_unlock(&lock);
    return refused;
}
