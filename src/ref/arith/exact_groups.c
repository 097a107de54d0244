/* SPDX-License-Identifier: Apache-2.0 */
/* Groups of rows in the exact arithmetic, each with a B of its own (arith.h): what is exchanged between ranks, and the
 * memory of the integers, is of all groups together, so that neither depends on which rows are in which group. */
#include <stdlib.h>

#include "ref/arith/exact.h"
#include "ref/context/context.h"
#include "ref/core/size.h"
#include "ref/numerics/integer_sum.h"

enum { WORD = sizeof(int32_t) };

static ar_status new_packed(ar_ctx *ctx, ar_packed **p, size_t rows, size_t k, unsigned form)
{
    AR_TRY(ARI_KERNEL(ctx, packed_create, p, 1, rows, k, form));
    ari_step_count_alloc(ctx, ctx->device->ops->packed_bytes(*p));
    return AR_OK;
}

static void end_packed(ar_ctx *ctx, ar_packed *p)
{
    ari_step_count_free(ctx, p ? ctx->device->ops->packed_bytes(p) : 0);
    ctx->device->ops->packed_destroy(ctx->device, ctx->queue, p);
}

/* Rows and terms of what is packed, to be ended as that is. */
static ar_status part_of(ar_ctx *ctx, ar_packed **part, const ar_packed *whole, size_t row, size_t rows, size_t col,
                         size_t cols)
{
    const ar_part at = {.matrices = 1, .row = row, .rows = rows, .col = col, .cols = cols};
    AR_TRY(ARI_KERNEL(ctx, packed_part, part, whole, &at));
    ari_step_count_alloc(ctx, ctx->device->ops->packed_bytes(*part));
    return AR_OK;
}

/* --- products ----------------------------------------------------------------------------------------------------- */

/* The rows of all groups as integers, scaled by the columns of each one's B. */
typedef struct grouped {
    const ar_tensor *a;
    const ar_operand *const *b;
    const ar_groups *g;
    ar_buf e; /* [rows] */
    ar_packed *packed;
} grouped;

static ar_status quantise_groups(ar_ctx *ctx, grouped *o, const char *tag)
{
    const size_t rows = o->a->shape[0];
    AR_TRY(ari_step_alloc(ctx, &o->e, rows * WORD));
    for (size_t i = 0; i < o->g->n; i++) {
        const ar_tensor a = ari_group_rows(o->a, o->g, i);
        if (a.shape[0] > 0)
            AR_TRY(ARI_KERNEL(ctx, row_exponents, ar_buf_at(o->e, o->g->first[i] * WORD), &a, ar_const(o->b[i]->c), +1,
                              false, o->b[i]->narrow));
    }
    for (int i = 0; i < 2; i++)
        AR_TRY(ari_exact_max(ctx, o->b[0]->over[i], o->e, rows, tag));
    AR_TRY(new_packed(ctx, &o->packed, rows, o->a->shape[1], ari_exact_form(true, o->b[0]->narrow)));
    for (size_t i = 0; i < o->g->n; i++) {
        const ar_tensor a = ari_group_rows(o->a, o->g, i);
        if (a.shape[0] > 0)
            AR_TRY(ARI_KERNEL(ctx, pack, o->packed, o->g->first[i], 0, &a, ar_const(o->b[i]->c), +1, ar_const(o->e)));
    }
    return AR_OK;
}

/* Group i: rounded to its rows of y, or (limbs > 0) its integers to its part of the sums. */
static ar_status multiply_group(ar_ctx *ctx, const grouped *o, size_t i, const ar_tensor *y, ar_buf sums, int limbs)
{
    const size_t first = o->g->first[i], rows = o->g->first[i + 1] - first, n = o->b[i]->x.rows;
    const ar_cbuf e = ar_cbuf_at(ar_const(o->e), first * WORD), none = {NULL};
    ar_packed *a = NULL;
    if (rows == 0)
        return AR_OK;
    AR_TRY(part_of(ctx, &a, o->packed, first, rows, 0, o->a->shape[1]));
    const ar_tensor to = ari_group_rows(y, o->g, i);
    const ar_status st = limbs > 0
                             ? ARI_KERNEL(ctx, gemm_i64, ar_buf_at(sums, first * n * (size_t)limbs * sizeof(int64_t)),
                                          a, o->b[i]->packed, limbs, false)
                             : ARI_KERNEL(ctx, gemm_round, &to, a, o->b[i]->packed, e, ar_const(o->b[i]->e), none,
                                          AR_ACT_NONE, NULL, NULL);
    end_packed(ctx, a);
    ari_work_of_product(&(ari_extents){.batch = 1, .rows = rows, .k = o->a->shape[1]}, &o->b[i]->x);
    return st;
}

static ar_status multiply_groups(ar_ctx *ctx, const grouped *o, const ar_tensor *y, ar_buf sums, int limbs)
{
    for (size_t i = 0; i < o->g->n; i++)
        AR_TRY(multiply_group(ctx, o, i, y, sums, limbs));
    return AR_OK;
}

/* y, fp32, = this rank's slice of the sums rounded: the exponents of B change from group to group. */
static ar_status round_groups(ar_ctx *ctx, const grouped *o, ar_buf y, const ari_sum_slice *s)
{
    const size_t end = s->start + s->count, each = (size_t)s->limbs * sizeof(int64_t);
    for (size_t i = 0; i < o->g->n; i++) {
        const size_t first = o->g->first[i] * s->cols, last = o->g->first[i + 1] * s->cols;
        const size_t from = first > s->start ? first : s->start, to = last < end ? last : end;
        if (from < to)
            AR_TRY(ARI_KERNEL(ctx, round_i64, ar_buf_at(y, (from - s->start) * sizeof(float)),
                              ar_cbuf_at(ar_const(s->s), (from - s->start) * each), s->limbs, from - first, to - from,
                              s->cols, ar_cbuf_at(ar_const(o->e), o->g->first[i] * WORD), ar_const(o->b[i]->e)));
    }
    return AR_OK;
}

static ar_status fold_groups(ar_ctx *ctx, const grouped *o, const ar_tensor *y, ar_comm *over, const char *tag)
{
    const size_t total = ar_tensor_count(y);
    ari_sum_slice s = {.limbs = ari_exact_limbs(o->b[0]->narrow, o->b[0]->k_full),
                       .width = ari_exact_width(o->b[0]->narrow, o->b[0]->k_full),
                       .count = total,
                       .rows = y->shape[0],
                       .cols = y->shape[1]};
    size_t bytes = 0;
    AR_TRY(ari_mul_size(&bytes, total, (size_t)s.limbs * sizeof(int64_t)));
    AR_TRY(ari_step_alloc(ctx, &s.s, bytes));
    AR_TRY(multiply_groups(ctx, o, y, s.s, s.limbs));
    AR_TRY(ari_exact_slice(ctx, &s, ctx->queue, NULL, over, tag));
    const ar_tensor own = ar_tensor_flat(y->dtype, ar_buf_at(y->data, s.start * ar_dtype_bytes(y->dtype)), s.count);
    ar_tensor wide = own;
    if (y->dtype != AR_F32)
        AR_TRY(ar_ctx_tensor(ctx, &wide, AR_F32, 1, &s.count));
    AR_TRY(round_groups(ctx, o, wide.data, &s));
    AR_TRY(ari_exact_store(ctx, &own, &wide));
    ari_step_free(ctx, s.s);
    return ari_exact_gather(ctx, y, over);
}

static ar_status round_all(ar_ctx *ctx, const grouped *o, const ar_tensor *y)
{
    ar_tensor wide = *y;
    if (y->dtype != AR_F32)
        AR_TRY(ar_ctx_tensor(ctx, &wide, AR_F32, y->ndim, y->shape));
    AR_TRY(multiply_groups(ctx, o, &wide, (ar_buf){NULL}, 0));
    return ari_exact_store(ctx, y, &wide);
}

ar_status ari_exact_contract_groups(ar_ctx *ctx, const ar_tensor *y, const ar_tensor *a, const ar_operand *const *b,
                                    const ar_groups *g, ar_comm *over, const char *tag)
{
    grouped o = {.a = a, .b = b, .g = g};
    AR_TRY(ari_check_groups(g, a->shape[0], tag));
    if (y->shape[0] != a->shape[0] || y->shape[1] != b[0]->x.rows || a->shape[1] != b[0]->x.k)
        return ar_error_set(AR_ERR_SHAPE, "%s: [%zu, %zu] from [%zu, %zu] and matrices [%zu, %zu]", tag, y->shape[0],
                            y->shape[1], a->shape[0], a->shape[1], b[0]->x.rows, b[0]->x.k);
    AR_TRY(quantise_groups(ctx, &o, tag));
    AR_TRY(ari_has_peers(over) ? fold_groups(ctx, &o, y, over, tag) : round_all(ctx, &o, y));
    end_packed(ctx, o.packed);
    ari_step_free(ctx, o.e);
    return AR_OK;
}

/* --- gradients: one contraction for each group and sample, a run of rows ------------------------------------------ */

/* dy (sign +1) or x (-1) transposed, [features, rows], as integers: the rows of each run have exponents of their own. */
typedef struct run_operand {
    ar_tensor t; /* [features, rows] */
    int sign;
    ar_buf e; /* [runs, features] */
    ar_packed *packed;
} run_operand;

static size_t run_start(const ar_groups *g, size_t run)
{
    return g->first[run / g->samples] + g->sample[run / g->samples * (g->samples + 1) + run % g->samples];
}

static size_t run_rows(const ar_groups *g, size_t run)
{
    const size_t *of = g->sample + run / g->samples * (g->samples + 1) + run % g->samples;
    return of[1] - of[0];
}

static ar_tensor run_of(const run_operand *o, const ar_groups *g, size_t run)
{
    return ar_tensor_slice(&o->t, 1, run_start(g, run), run_rows(g, run));
}

/* c [rows]. Where other ranks have rows of the samples, runs without rows here have their exponents. */
static ar_status run_quantise(ar_ctx *ctx, run_operand *o, const ar_groups *g, ar_cbuf c, const char *tag)
{
    const size_t features = o->t.shape[0], runs = g->n * g->samples;
    size_t bytes = 0;
    AR_TRY(ari_mul_size(&bytes, runs * features, WORD));
    AR_TRY(ari_step_alloc(ctx, &o->e, bytes));
    for (size_t run = 0; run < runs; run++) {
        const ar_tensor t = run_of(o, g, run);
        AR_TRY(ARI_KERNEL(ctx, row_exponents, ar_buf_at(o->e, run * features * WORD), &t,
                          ar_cbuf_at(c, run_start(g, run) * WORD), o->sign, false,
                          ari_exact_is_narrow(ctx, g->longest)));
    }
    AR_TRY(ari_exact_max(ctx, g->over, o->e, runs * features, tag));
    AR_TRY(new_packed(ctx, &o->packed, features, o->t.shape[1],
                      ari_exact_form(o->sign > 0, ari_exact_is_narrow(ctx, g->longest))));
    for (size_t run = 0; run < runs; run++) {
        const ar_tensor t = run_of(o, g, run);
        const size_t start = run_start(g, run);
        if (t.shape[1] > 0)
            AR_TRY(ARI_KERNEL(ctx, pack, o->packed, 0, start, &t, ar_cbuf_at(c, start * WORD), o->sign,
                              ar_cbuf_at(ar_const(o->e), run * features * WORD)));
    }
    return AR_OK;
}

static void run_operand_end(ar_ctx *ctx, run_operand *o)
{
    end_packed(ctx, o->packed);
    ari_step_free(ctx, o->e);
}

static ar_cbuf run_exponents(const run_operand *o, size_t run)
{
    return ar_cbuf_at(ar_const(o->e), run * o->t.shape[0] * WORD);
}

/* A run whose sums all ranks of the sequence complete. */
static ar_status add_shared_run(ar_ctx *ctx, ar_param *p, const run_operand *dy, const run_operand *x,
                                const ar_groups *g, size_t run, const ari_shared_rows *s, const char *tag)
{
    const size_t start = run_start(g, run), rows = run_rows(g, run);
    ar_packed *a = NULL, *b = NULL;
    ar_status st = AR_OK;
    if (rows == 0) {
        st = ARI_KERNEL(ctx, zero, s->sums, s->out * s->in * (size_t)s->limbs * sizeof(int64_t));
    } else {
        AR_TRY(part_of(ctx, &a, dy->packed, 0, s->out, start, rows));
        AR_TRY(part_of(ctx, &b, x->packed, 0, s->in, start, rows));
        st = ARI_KERNEL(ctx, gemm_i64, s->sums, a, b, s->limbs, false);
        end_packed(ctx, b);
        end_packed(ctx, a);
    }
    AR_TRY(st);
    return ari_shared_rows_add(ctx, p, s, run_exponents(dy, run), run_exponents(x, run), tag);
}

static ar_status add_shared_runs(ar_ctx *ctx, ar_param *const *to, int n, const run_operand *dy, const run_operand *x,
                                 const ar_groups *g, const char *tag)
{
    ari_shared_rows s;
    ar_status st = AR_OK;
    AR_TRY(ari_shared_rows_init(&s, ctx, g->over, dy->t.shape[0], x->t.shape[0], g->longest));
    for (size_t run = 0; run < g->n * g->samples && st == AR_OK; run++) {
        ar_param *p = to[run / g->samples * (size_t)n];
        st = p->requires_grad ? add_shared_run(ctx, p, dy, x, g, run, &s, tag) : AR_OK;
    }
    ari_shared_rows_fini(&s, ctx);
    return st;
}

/* All groups' parameters number j of n. */
static ar_status add_runs(ar_ctx *ctx, ar_param *const *to, int n, const run_operand *dy, const run_operand *x,
                          const ar_groups *g, const char *tag)
{
    if (ari_has_peers(g->over))
        AR_TRY(add_shared_runs(ctx, to, n, dy, x, g, tag));
    for (size_t i = 0; i < g->n; i++) {
        const ar_runs runs = {g->samples, g->first[i], g->sample + i * (g->samples + 1)};
        const size_t rows = g->first[i + 1] - g->first[i], run = i * g->samples;
        const ar_param *p = to[i * (size_t)n];
        ari_work_of_gradient(dy->t.shape[0], x->t.shape[0], rows);
        if (p->requires_grad && rows > 0 && !ari_has_peers(g->over))
            AR_TRY(ARI_KERNEL(ctx, gemm_acc, p->grad->t, p->grad->hl, p->grad->narrow, dy->packed, x->packed,
                              run_exponents(dy, run), run_exponents(x, run), &runs, ari_exact_grad_begins(p->grad)));
    }
    return AR_OK;
}

/* Gives the parameters that are to have one a gradient, also where there are no rows: zeros. */
static ar_status begin_gradients(ar_ctx *ctx, bool *any, ar_param *const *to, size_t n, const ar_tensor *dy,
                                 const ar_tensor *x, int each)
{
    *any = false;
    for (size_t i = 0; i < n; i++) {
        const ar_tensor *terms = &dy[i % (size_t)each];
        if (terms->shape[0] != x->shape[0] || terms->shape[1] * x->shape[1] != ar_tensor_count(&to[i]->value))
            return ar_error_set(AR_ERR_SHAPE, "%s: gradient from dy [%zu, %zu] and x [%zu, %zu]", to[i]->name,
                                terms->shape[0], terms->shape[1], x->shape[0], x->shape[1]);
        if (!to[i]->requires_grad)
            continue;
        AR_TRY(ari_exact_grad_ensure(ctx, to[i]));
        *any = to[i]->has_grad = true;
    }
    return AR_OK;
}

ar_status ari_exact_grad_groups(ar_ctx *ctx, ar_param *const *to, const ar_tensor *dy, int n, const ar_tensor *x,
                                const ar_groups *g, ar_comm *x_rows_over, const char *tag)
{
    run_operand b = {.t = ar_tensor_transposed(x), .sign = -1};
    ar_buf c = {NULL}; /* of each row */
    bool any = false;
    AR_TRY(ari_check_groups(g, x->shape[0], tag));
    AR_TRY(begin_gradients(ctx, &any, to, g->n * (size_t)n, dy, x, n));
    if (!any)
        return AR_OK;
    AR_TRY(ari_step_alloc(ctx, &c, x->shape[0] * WORD));
    AR_TRY(ARI_KERNEL(ctx, col_exponents, c, &b.t, false));
    AR_TRY(ari_exact_max(ctx, x_rows_over, c, x->shape[0], tag));
    AR_TRY(run_quantise(ctx, &b, g, ar_const(c), tag));
    for (int j = 0; j < n; j++) {
        run_operand a = {.t = ar_tensor_transposed(&dy[j]), .sign = +1};
        AR_TRY(run_quantise(ctx, &a, g, ar_const(c), tag));
        AR_TRY(add_runs(ctx, to + j, n, &a, &b, g, tag));
        run_operand_end(ctx, &a);
    }
    run_operand_end(ctx, &b);
    ari_step_free(ctx, c);
    return AR_OK;
}
