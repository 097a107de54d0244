/* SPDX-License-Identifier: Apache-2.0 */
/* Memory, queues, and copies of views. */

#include "gpu/conformance.h"
#include "gpu/device_private.h"
#include "ref/core/queue_private.h"
#include "tests/support/scoped.h"

typedef struct second_copy {
    ar_device *device;
    ar_buf to;
    ar_cbuf from;
    size_t bytes;
} second_copy;

static ar_status copy_on(void *arg, ar_queue *on)
{
    const second_copy *o = arg;
    return o->device->ops->copy(o->device, on, o->to, o->from, o->bytes);
}

/* A chain on a second queue, of each kind, is seen once that queue has been waited for. */
void queue_create_cases(device_pair *p)
{
    const size_t n = 1000;
    for (int kind = AR_QUEUE_INLINE; kind <= AR_QUEUE_THREAD && pair_goes_on(p); kind++) {
        PAIR_CASE(p, "kind %d", kind);
        const pair_buf x = pair_floats(p, "x", n, PAIR_ANY), y = pair_words(p, "y", PAIR_W32, n);
        for (int s = 0; s < 2 && pair_ready(p); s++) {
            ar_device *d = p->side[s];
            OWNED(ar_queue_destroy) ar_queue *q = NULL;
            second_copy o = {d, y.at[s], ar_const(x.at[s]), n * 4};
            pair_ran(p, s, ar_queue_sync(p->queue[s], 0)); /* what it reads has come */
            pair_ran(p, s, d->ops->queue_create(d, &q, (ar_queue_kind)kind, "second"));
            if (p->status == AR_OK)
                pair_ran(p, s, ari_queue_chain(q, copy_on, &o));
            if (p->status == AR_OK)
                pair_ran(p, s, ar_queue_sync(q, 0));
        }
    }
}

/* A device of its own beside the first one: made, used, destroyed, and the first one's memory is as it was. */
void destroy_cases(device_pair *p)
{
    for (int i = 0; i < 2 && pair_goes_on(p); i++) {
        PAIR_CASE(p, "a second pair of devices, number %d", i);
        const pair_buf y = pair_words(p, "y", PAIR_W32, 100);
        for (int s = 0; s < 2 && pair_ready(p); s++) {
            ar_device_choice which = {AR_DEVICE_CPU, 0};
            OWNED(ar_device_destroy) ar_device *d = NULL;
            ar_buf b = {NULL};
            pair_ran(p, s, ari_device_choice_parse(&which, p->side[s]->ops->name));
            if (p->status == AR_OK)
                pair_ran(p, s, ar_device_create(&d, &which, 1));
            if (p->status == AR_OK)
                pair_ran(p, s, d->ops->alloc(d, p->queue[s], &b, 1000));
            if (p->status == AR_OK)
                d->ops->free(d, p->queue[s], b);
        }
        PAIR_RUN(p, zero, y.at[s], 400);
    }
}

/* Sizes of all orders live at once, at multiples of 64 bytes, and none overlaps another. */
void alloc_cases(device_pair *p)
{
    enum { BLOCKS = 40 };
    PAIR_CASE(p, "%d blocks at once", BLOCKS);
    const pair_buf y = pair_words(p, "y", PAIR_W32, BLOCKS);
    for (int s = 0; s < 2 && pair_ready(p); s++) {
        ar_device *d = p->side[s];
        ar_buf b[BLOCKS] = {{NULL}};
        for (size_t i = 0; i < BLOCKS && p->status == AR_OK; i++) {
            const size_t bytes = i * i * i + 4;
            pair_ran(p, s, d->ops->alloc(d, p->queue[s], &b[i], bytes));
            if (p->status == AR_OK && (uintptr_t)b[i].ptr % 64 != 0)
                pair_ran(p, s, ar_error_set(AR_ERR_INTERNAL, "%zu bytes lie at %p", bytes, b[i].ptr));
            for (size_t at = 0; at < bytes / 4 && p->status == AR_OK; at += bytes / 4 - 1 > 0 ? bytes / 4 - 1 : 1)
                pair_ran(p, s, d->ops->copy(d, p->queue[s], ar_buf_at(b[i], at * 4), (ar_cbuf){&i}, 4));
        }
        for (size_t i = 0; i < BLOCKS && p->status == AR_OK; i++)
            pair_ran(p, s, d->ops->copy(d, p->queue[s], ar_buf_at(y.at[s], i * 4), ar_const(b[i]), 4));
        pair_ran(p, s, ar_queue_sync(p->queue[s], 0));
        for (size_t i = 0; i < BLOCKS; i++)
            d->ops->free(d, p->queue[s], b[i]);
    }
}

/* NULL is accepted; what is freed comes back, many times over. */
void free_cases(device_pair *p)
{
    PAIR_CASE(p, "a thousand times 1 MiB, one after the other");
    const pair_buf y = pair_words(p, "y", PAIR_W32, 16);
    for (int s = 0; s < 2 && pair_ready(p); s++) {
        ar_device *d = p->side[s];
        ar_buf b = {NULL};
        d->ops->free(d, p->queue[s], b);
        for (int i = 0; i < 1000 && p->status == AR_OK; i++) {
            pair_ran(p, s, d->ops->alloc(d, p->queue[s], &b, (size_t)1 << 20));
            if (p->status == AR_OK)
                d->ops->free(d, p->queue[s], b);
        }
    }
    PAIR_RUN(p, zero, y.at[s], 64);
}

/* Within the device, from the host and to it, of any number of bytes at any address. */
void copy_cases(device_pair *p)
{
    size_t n;
    for (size_t i = 0; (n = pair_size(p, i)) != SIZE_MAX && pair_goes_on(p); i++) {
        PAIR_CASE(p, "%zu bytes", n);
        const pair_buf x = pair_bytes(p, "x", n + 3, 4), y = pair_words(p, "y", PAIR_W8, n + 3);
        const pair_buf z = pair_words(p, "z", PAIR_W8, n);
        OWNED(free) unsigned char *host = malloc(n + 1);
        if (!host)
            abort();
        PAIR_RUN(p, copy, ar_buf_at(y.at[s], 3), ar_const(ar_buf_at(x.at[s], 1)), n);
        for (int s = 0; s < 2 && p->status == AR_OK; s++) {
            ar_device *d = p->side[s];
            pair_ran(p, s, d->ops->copy(d, p->queue[s], (ar_buf){host}, ar_const(ar_buf_at(y.at[s], 3)), n));
            pair_ran(p, s, ar_queue_sync(p->queue[s], 0));
            for (size_t k = 0; k < n; k++)
                host[k] ^= 0x55;
            pair_ran(p, s, d->ops->copy(d, p->queue[s], z.at[s], (ar_cbuf){host}, n));
            memset(host, 0, n); /* it was borrowed until return */
        }
    }
}

void zero_cases(device_pair *p)
{
    size_t n;
    for (size_t i = 0; (n = pair_size(p, i)) != SIZE_MAX && pair_goes_on(p); i++) {
        PAIR_CASE(p, "%zu bytes", n);
        const pair_buf y = pair_words(p, "y", PAIR_W8, n + 5);
        PAIR_RUN(p, zero, ar_buf_at(y.at[s], 2), n);
    }
}

/* Between F32 and BF16. */
static void convert_view(device_pair *p, int ndim, const size_t *shape, pair_layout to, pair_layout from)
{
    PAIR_CASE(p, "%d dimensions %zu %zu.. %s from %s, converted", ndim, shape[0], ndim > 1 ? shape[1] : 0,
              pair_layout_name(to), pair_layout_name(from));
    p->stored = AR_BF16;
    const pair_tensor wide = pair_input(p, "x", ndim, shape, from, pair_below(p, 2) ? PAIR_TIES : PAIR_EACH_ROW);
    const pair_tensor narrow = pair_stored(p, pair_input(p, "z", ndim, shape, from, PAIR_EACH_ROW));
    const pair_tensor y = pair_stored(p, pair_output(p, "y", ndim, shape, to));
    const pair_tensor w = pair_output(p, "w", ndim, shape, to);
    PAIR_RUN(p, copy_strided, &y.at[s], &wide.at[s]);
    PAIR_RUN(p, copy_strided, &w.at[s], &narrow.at[s]);
}

static void copy_view(device_pair *p, ar_dtype t, int ndim, const size_t *shape, pair_layout to, pair_layout from)
{
    PAIR_CASE(p, "%s %d dimensions %zu %zu.. %s from %s", ar_dtype_name(t), ndim, shape[0], ndim > 1 ? shape[1] : 0,
              pair_layout_name(to), pair_layout_name(from));
    const pair_tensor x = pair_typed(p, "x", t, ndim, shape, from, true);
    const pair_tensor y = pair_typed(p, "y", t, ndim, shape, to, false);
    PAIR_RUN(p, copy_strided, &y.at[s], &x.at[s]);
}

void copy_strided_cases(device_pair *p)
{
    static const ar_dtype types[] = {AR_F32, AR_I64, AR_BF16, AR_F64, AR_U8, AR_I32};
    static const size_t shapes[][5] = {{1, 257},         {2, 33, 65}, {2, 1, 40},  {3, 2, 7, 33}, {4, 2, 3, 5, 8},
                                       {4, 2, 5, 3, 16}, {2, 0, 5},   {2, 64, 32}, {1, 1},        {4, 1, 1, 1, 1}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int to = 0; to < PAIR_LAYOUTS; to++)
            for (int from = 0; from < PAIR_LAYOUTS && pair_goes_on(p); from++) {
                size_t shape[4];
                memcpy(shape, &shapes[i][1], sizeof shape);
                for (size_t k = 0; k < shapes[i][0] && p->round > 0; k++)
                    shape[k] = pair_below(p, 40);
                copy_view(p, types[(i + (size_t)to + (size_t)from) % (sizeof types / sizeof *types)], (int)shapes[i][0],
                          shape, (pair_layout)to, (pair_layout)from);
                convert_view(p, (int)shapes[i][0], shape, (pair_layout)to, (pair_layout)from);
            }
}
