/* SPDX-License-Identifier: Apache-2.0 */
/* Products of experts, each with a weight of its own, beside one product of as many rows. */
#include <stdlib.h>

#include "anyrank/arith.h"
#include "bench/bench.h"
#include "bench/harness.h"
#include "ref/core/size.h"

enum { MOST_EXPERTS = 128, SAMPLES = 2 };

typedef struct group_row {
    size_t experts;
    const char *routing, *numerics;
    size_t rows, out, in;
    size_t largest;                                   /* rows of the expert that has most */
    double product_seconds, gradient_seconds;         /* medians */
    double product_over_one, gradient_over_one;       /* medians of (time)/(time of one product of all rows) */
    double product_over_native, gradient_over_native; /* of the native groups; 1 in their row */
    double spread;                                    /* of the first ratio */
} group_row;

/* Rows of each expert, in two samples: as many of each, or like 1, 1/2, 1/3, ... */
typedef struct sizes {
    size_t first[MOST_EXPERTS + 1], sample[MOST_EXPERTS * (SAMPLES + 1)];
    ar_groups groups;
} sizes;

static void cut_rows(sizes *s, size_t experts, size_t rows, bool even)
{
    double weight = 0.0, sum = 0.0;
    for (size_t i = 0; i < experts; i++)
        weight += even ? 1.0 : 1.0 / (double)(i + 1);
    s->first[0] = 0;
    for (size_t i = 0; i < experts; i++) {
        sum += even ? 1.0 : 1.0 / (double)(i + 1);
        s->first[i + 1] = i + 1 == experts ? rows : (size_t)((double)rows * sum / weight);
        const size_t own = s->first[i + 1] - s->first[i];
        for (size_t k = 0; k <= SAMPLES; k++)
            s->sample[i * (SAMPLES + 1) + k] = own * k / SAMPLES;
    }
    s->groups = (ar_groups){.n = experts, .samples = SAMPLES, .longest = rows, .first = s->first, .sample = s->sample};
}

/* One of the numerics, with the weights of all experts, one below the other, of which one product has the first. */
typedef struct side {
    ar_device *d;
    ar_ctx *ctx;
    ar_tensor x, w, y, dy; /* [rows, in], [experts * out, in], [rows, out], [rows, out] */
    ar_param *weight;      /* [made], whose gradients are added to */
    size_t made;
    ar_param **to; /* [experts] */
} side;

static ari_bench_device place_of(const side *s)
{
    return (ari_bench_device){s->d, ar_ctx_queue(s->ctx)};
}

static ar_status side_create(side *s, ar_numerics numerics, const group_row *row, const ari_bench_session *session)
{
    const size_t shape[2] = {row->out, row->in};
    ar_layout layout;
    AR_TRY(ar_device_create(&s->d, &session->device, session->threads));
    AR_TRY(ar_ctx_create(&s->ctx, &(ar_ctx_options){.device = s->d, .numerics = numerics}));
    const ari_bench_device on = place_of(s);
    AR_TRY(ari_bench_tensor(&on, &s->x, 2, (const size_t[]){row->rows, row->in}, 1));
    AR_TRY(ari_bench_tensor(&on, &s->w, 2, (const size_t[]){row->experts * row->out, row->in}, 2));
    AR_TRY(ari_bench_tensor(&on, &s->y, 2, (const size_t[]){row->rows, row->out}, 3));
    AR_TRY(ari_bench_tensor(&on, &s->dy, 2, (const size_t[]){row->rows, row->out}, 4));
    AR_TRY(ar_layout_replicate(&layout, 2, shape, 0, 1));
    AR_TRY(ARI_ALLOC_ZERO(&s->weight, row->experts, "weights of experts"));
    AR_TRY(ARI_ALLOC(&s->to, row->experts, "weights of experts"));
    for (; s->made < row->experts; s->made++) {
        s->to[s->made] = &s->weight[s->made];
        AR_TRY(ar_param_init(&s->weight[s->made], s->ctx, "weight", &layout, false));
    }
    return AR_OK;
}

static void side_destroy(side *s)
{
    for (size_t i = 0; i < s->made; i++)
        ar_param_fini(&s->weight[i]);
    free(s->weight);
    free(s->to);
    if (s->d) {
        const ar_buf all[] = {s->x.data, s->w.data, s->y.data, s->dy.data};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            s->d->ops->free(s->d, NULL, all[i]);
    }
    ar_ctx_destroy(s->ctx);
    ar_device_destroy(s->d);
}

/* The products and the gradients of all groups; the weights' operands are made before, as once in a step. */
static ar_status multiply(side *s, const ar_groups *g, double seconds[2])
{
    const ar_arith_ops *arith = ar_ctx_arith(s->ctx);
    const ari_bench_device on = place_of(s);
    const size_t out = s->y.shape[1];
    const ar_operand *b[MOST_EXPERTS];
    double at[3];
    for (size_t i = 0; i < g->n; i++) {
        const ar_parts w = {.n = 1, .part = {ar_tensor_slice(&s->w, 0, i * out, out)}};
        AR_TRY(arith->operand_b(s->ctx, &b[i], &w, true, s->x.shape[1], NULL, NULL, "experts"));
    }
    AR_TRY(ari_bench_clock(&on, &at[0]));
    AR_TRY(arith->contract_groups(s->ctx, &s->y, &s->x, b, g, NULL, "experts"));
    AR_TRY(ari_bench_clock(&on, &at[1]));
    AR_TRY(arith->grad_groups(s->ctx, s->to, &s->dy, 1, &s->x, g, NULL, "experts"));
    AR_TRY(ari_bench_clock(&on, &at[2]));
    ar_ctx_end_step(s->ctx);
    for (int i = 0; i < 2; i++)
        seconds[i] = at[i + 1] - at[i];
    return AR_OK;
}

enum { NATIVE, EXACT, NUMERICS };
typedef struct bench {
    side side[NUMERICS];
    sizes experts, one;
} bench;

/* Of each numerics the groups' product and gradient, and one's. */
enum { PRODUCT, GRADIENT, ONE_PRODUCT, ONE_GRADIENT, TIMES };

static ar_status repetition(void *user, double times[NUMERICS * TIMES])
{
    bench *b = user;
    for (int i = 0; i < NUMERICS; i++) {
        AR_TRY(multiply(&b->side[i], &b->experts.groups, &times[i * TIMES + PRODUCT]));
        AR_TRY(multiply(&b->side[i], &b->one.groups, &times[i * TIMES + ONE_PRODUCT]));
    }
    return AR_OK;
}

static void fill_row(group_row *row, const ari_bench_series *s, size_t of)
{
    const ari_bench_stat product = ari_bench_ratio_of(s, of + PRODUCT, of + ONE_PRODUCT);
    row->product_seconds = ari_bench_times_of(s, of + PRODUCT).median;
    row->gradient_seconds = ari_bench_times_of(s, of + GRADIENT).median;
    row->product_over_one = product.median;
    row->gradient_over_one = ari_bench_ratio_of(s, of + GRADIENT, of + ONE_GRADIENT).median;
    row->product_over_native = ari_bench_ratio_of(s, of + PRODUCT, PRODUCT).median;
    row->gradient_over_native = ari_bench_ratio_of(s, of + GRADIENT, GRADIENT).median;
    row->spread = product.spread;
}

/* rows: those of one way to route, native and exact. */
static ar_status time_routing(group_row rows[NUMERICS], bool even, const ari_bench_session *session)
{
    bench b = {.side = {{.d = NULL}}};
    ari_bench_series s = {0};
    ar_status st = AR_OK;
    cut_rows(&b.experts, rows->experts, rows->rows, even);
    cut_rows(&b.one, 1, rows->rows, true);
    for (int i = 0; i < NUMERICS && st == AR_OK; i++)
        st = side_create(&b.side[i], i == NATIVE ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT, rows, session);
    if (st == AR_OK)
        st = ari_bench_repeat(&s, NUMERICS * TIMES, session->repetitions, 1, repetition, &b);
    for (size_t i = 0; i < NUMERICS && st == AR_OK; i++) {
        rows[i].numerics = i == NATIVE ? "native" : "exact";
        rows[i].routing = even ? "even" : "uneven";
        rows[i].largest = b.experts.first[1];
        fill_row(&rows[i], &s, i * TIMES);
    }
    ari_bench_series_destroy(&s);
    for (int i = 0; i < NUMERICS; i++)
        side_destroy(&b.side[i]);
    return st;
}

#define ARI_ROW group_row
static const ari_field fields[] = {
    ARI_FIELD("experts", "experts", COUNT, experts),
    ARI_FIELD("routing", "routing", TEXT, routing),
    ARI_FIELD("rows", "rows", COUNT, rows),
    ARI_FIELD("largest", "largest", COUNT, largest),
    ARI_FIELD("out", "out", COUNT, out),
    ARI_FIELD("in", "in", COUNT, in),
    ARI_FIELD("numerics", "numerics", TEXT, numerics),
    ARI_FIELD("product_seconds", "product", MILLISECONDS, product_seconds),
    ARI_FIELD("product_over_one", "of one", RATIO, product_over_one),
    ARI_FIELD("product_over_native", "of native", RATIO, product_over_native),
    ARI_FIELD("gradient_seconds", "gradient", MILLISECONDS, gradient_seconds),
    ARI_FIELD("gradient_over_one", "of one", RATIO, gradient_over_one),
    ARI_FIELD("gradient_over_native", "of native", RATIO, gradient_over_native),
    ARI_FIELD("spread", "spread", SHARE, spread),
};
#undef ARI_ROW

ar_status ari_bench_groups(ari_bench_session *s)
{
    static const size_t experts[] = {8, 64, MOST_EXPERTS};
    enum { COUNTS = sizeof experts / sizeof *experts, LINES = COUNTS * 2 * NUMERICS };
    const ari_bench_options *v = s->v;
    group_row rows[LINES];
    for (size_t i = 0; i < LINES; i += NUMERICS) {
        for (size_t k = i; k < i + NUMERICS; k++)
            rows[k] = (group_row){.experts = experts[i / 2 / NUMERICS],
                                  .rows = v->m ? v->m : 4096,
                                  .out = v->n ? v->n : 256,
                                  .in = v->k ? v->k : 512};
        ari_bench_progress(s, i, LINES);
        AR_TRY(time_routing(&rows[i], i / NUMERICS % 2 == 0, s));
    }
    return ari_bench_end(
        s, ARI_ROWS(fields, rows, LINES), s->threads,
        "\nOf each expert Y = X W^T and dW = dY^T X, W [out, in], of its rows, %d thread%s; medians. 'of one': over "
        "the\ntime with one expert that has all rows. 'uneven': experts have rows like 1, 1/2, 1/3, ..; 'largest': "
        "the first\none's. The weights' operands are made before. 'spread': of the product's ratio to one.\n",
        s->threads, ARI_PLURAL(s->threads));
}
