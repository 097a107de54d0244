/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/queue.h"
#include "gpu/profile/profile.h"
#include "tests/support/test.h"

#include "ref/core/queue_impl.h"

OWNER(ari_profile, ari_profile_end)

enum { N = 1000 };

/* A device with two tensors. */
typedef struct bench {
    ar_device *d;
    ar_queue *q;
    ar_tensor x, y;
} bench;

static void make_tensor(bench *b, ar_tensor *t)
{
    ar_buf memory = {NULL};
    cr_assert_ok(b->d->ops->alloc(b->d, b->q, &memory, N * sizeof(float)));
    cr_assert_ok(ar_tensor_view(t, AR_F32, 1, (const size_t[]){N}, memory));
}

static void make(bench *b, ar_device_kind kind, ari_stream *stream)
{
    cr_assert_ok(ar_device_create(&b->d, &(ar_device_choice){kind, 0}, 1));
    if (stream)
        cr_assert_ok(ari_queue_create_on(&b->q, AR_QUEUE_INLINE, "test", stream));
    else
        cr_assert_ok(b->d->ops->queue_create(b->d, &b->q, AR_QUEUE_INLINE, "test"));
    make_tensor(b, &b->x);
    make_tensor(b, &b->y);
}

static void end(bench *b)
{
    b->d->ops->free(b->d, b->q, b->x.data);
    b->d->ops->free(b->d, b->q, b->y.data);
    ar_queue_destroy(b->q);
    ar_device_destroy(b->d);
}

static void fill_and_add(bench *b, int adds)
{
    cr_assert_ok(b->d->ops->fill(b->d, b->q, &b->x, 1.0f));
    cr_assert_ok(b->d->ops->fill(b->d, b->q, &b->y, 2.0f));
    for (int i = 0; i < adds; i++)
        cr_assert_ok(b->d->ops->add(b->d, b->q, &b->y, &b->x, &b->y));
    cr_assert_ok(ar_queue_sync(b->q, 0));
}

static const ari_profile_row *find(const ari_profile_row *rows, size_t n, const char *name, const char *part)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(rows[i].name, name) == 0 && !rows[i].part == !part && (!part || strcmp(rows[i].part, part) == 0))
            return &rows[i];
    return NULL;
}

Test(profile, counts_calls_and_the_bytes_of_their_tensors)
{
    static const ar_device_kind kinds[] = {AR_DEVICE_CPU, AR_DEVICE_EMULATED};
    for (size_t i = 0; i < 2; i++) {
        SCOPED(end) bench b = {0};
        ari_profile *p = NULL, *second = NULL;
        ari_profile_row rows[ARI_PROFILE_ROWS];
        size_t n = 0;
        make(&b, kinds[i], NULL);
        const ar_device_ops *before = b.d->ops;
        cr_assert_ok(ari_profile_begin(&p, b.d));
        cr_assert_eq(ari_profile_begin(&second, b.d), AR_ERR_ARG);
        fill_and_add(&b, 3);
        cr_assert_ok(ari_profile_read(p, rows, &n));
        cr_assert_eq(n, 2);
        const ari_profile_row *add = find(rows, n, "add", NULL), *fill = find(rows, n, "fill", NULL);
        cr_assert(add && fill);
        cr_assert_eq(add->calls, 3);
        cr_assert_eq(add->bytes, 3 * 3 * N * sizeof(float));
        cr_assert_eq(fill->calls, 2);
        cr_assert_eq(fill->bytes, 2 * N * sizeof(float));
        cr_assert_geq(rows[0].seconds, rows[1].seconds);
        cr_assert_ok(ari_profile_read(p, rows, &n));
        cr_assert_eq(n, 0, "what was read begins anew");
        ari_profile_end(p);
        cr_assert_eq(b.d->ops, before);
    }
}

Test(profile, gives_parts_behind_their_slot)
{
    enum { K = 16 };
    SCOPED(end) bench b = {0};
    ari_profile *p = NULL;
    ari_profile_row rows[ARI_PROFILE_ROWS];
    ar_packed *left = NULL, *right = NULL;
    ar_tensor matrix;
    ar_buf exponents = {NULL};
    size_t n = 0;
    make(&b, AR_DEVICE_EMULATED, NULL);
    ar_device *d = b.d;
    cr_assert_ok(ari_profile_begin(&p, d));
    cr_assert_ok(ar_tensor_view(&matrix, AR_F32, 2, (const size_t[]){4, K}, b.x.data));
    cr_assert_ok(d->ops->alloc(d, b.q, &exponents, 4 * sizeof(int32_t)));
    cr_assert_ok(d->ops->packed_create(d, b.q, &left, 1, 4, K, true));
    cr_assert_ok(d->ops->packed_create(d, b.q, &right, 1, 4, K, false));
    fill_and_add(&b, 1);
    cr_assert_ok(d->ops->row_exponents(d, b.q, exponents, &matrix, (ar_cbuf){NULL}, 1, false, false));
    cr_assert_ok(d->ops->pack(d, b.q, left, 0, 0, &matrix, (ar_cbuf){NULL}, 1, ar_const(exponents)));
    cr_assert_ok(d->ops->pack(d, b.q, right, 0, 0, &matrix, (ar_cbuf){NULL}, -1, ar_const(exponents)));
    cr_assert_ok(d->ops->gemm_i64(d, b.q, b.y.data, left, right, 1, false));
    cr_assert_ok(ari_profile_read(p, rows, &n));
    const ari_profile_row *slot = find(rows, n, "gemm_i64", NULL), *part = find(rows, n, "gemm_i64", "int8 products");
    cr_assert(slot && part);
    cr_assert_eq(part, slot + 1);
    cr_assert_leq(part->seconds, slot->seconds);
    ari_profile_end(p);
    d->ops->packed_destroy(d, b.q, left);
    d->ops->packed_destroy(d, b.q, right);
    d->ops->free(d, b.q, exponents);
}

/* A stream whose clock goes on by a second with each stamp. */
typedef struct clock_mark {
    ari_mark base;
    double at;
} clock_mark;

typedef struct clock_stream {
    ari_stream base;
    double now;
    int marks;
} clock_stream;

static ar_status clock_stamp(ari_stream *s, ari_mark **m)
{
    clock_stream *c = (clock_stream *)s;
    if (!*m) {
        clock_mark *made = calloc(1, sizeof *made);
        made->base.ops = s->ops;
        *m = &made->base;
        c->marks++;
    }
    ((clock_mark *)*m)->at = ++c->now;
    return AR_OK;
}
static ar_status clock_await(const ari_mark *m, uint64_t timeout_ns)
{
    (void)m;
    (void)timeout_ns;
    return AR_OK;
}
static ar_status clock_elapsed(const ari_mark *from, const ari_mark *to, double *seconds)
{
    *seconds = ((const clock_mark *)to)->at - ((const clock_mark *)from)->at;
    return AR_OK;
}
static void clock_mark_destroy(ari_mark *m)
{
    free(m);
}
static void clock_destroy(ari_stream *s)
{
    (void)s;
}

Test(profile, takes_times_from_the_stream_where_it_has_stamps)
{
    static const ari_stream_ops ops = {.mark = clock_stamp,
                                       .await = clock_await,
                                       .mark_destroy = clock_mark_destroy,
                                       .destroy = clock_destroy,
                                       .stamp = clock_stamp,
                                       .elapsed = clock_elapsed};
    SCOPED(end) bench b = {0};
    OWNED(ari_profile_end) ari_profile *p = NULL;
    ari_profile_row rows[ARI_PROFILE_ROWS];
    size_t n = 0;
    clock_stream s = {.base = {.ops = &ops}};
    make(&b, AR_DEVICE_CPU, &s.base);
    cr_assert_ok(ari_profile_begin(&p, b.d));
    for (int pass = 0; pass < 2; pass++) {
        fill_and_add(&b, 3);
        cr_assert_ok(ari_profile_read(p, rows, &n));
        cr_assert_eq(n, 2);
        cr_assert_str_eq(rows[0].name, "add");
        cr_assert_float_eq(rows[0].seconds, 3.0, 1e-9);
        cr_assert_float_eq(rows[1].seconds, 2.0, 1e-9);
    }
    const int stamps = 2 * 5;
    cr_assert_geq(s.marks, stamps);
    cr_assert_lt(s.marks, 2 * stamps, "the second pass uses the marks of the first again");
}
