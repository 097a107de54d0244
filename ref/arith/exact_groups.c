/* SPDX-License-Identifier: Apache-2.0 */
/* Groups of rows in exact arithmetic, each with its own B (arith.h). Exchanged data and the memory of the integers
 * cover all groups together, so neither depends on which rows are in which group. */
#include <stdlib.h>

#include "ref/arith/exact.h"
#include "ref/context/context.h"
#include "ref/core/size.h"
#include "ref/core/tensor_private.h"
#include "ref/numerics/integer_sum.h"

enum { WORD = sizeof(int32_t) };

/* Returns rows and terms of a packed operand as an operand of its own, to be released like it. */
static ar_status part_of(ar_ctx *ctx, ar_packed **part, const ar_packed *full, size_t row, size_t rows, size_t col,
                         size_t cols)
{
    const ar_part block = {.matrices = 1, .row = row, .rows = rows, .col = col, .cols = cols};
    AR_TRY(ARI_KERNEL(ctx, packed_part, part, full, &block));
    ari_step_count_alloc(ctx, ctx->device->ops->packed_bytes(*part));
    return AR_OK;
}

/* --- products ----------------------------------------------------------------------------------------------------- */

/* The rows of all groups as integers, scaled by the columns of each one's B. */
typedef struct grouped {
    const ar_tensor *a;
    const ar_operand **b; /* [groups] */
    const ar_groups *g;
    ar_tensor y; /* fp32 result if no sums are folded */
    ar_buf e;    /* [rows] */
    ar_packed *packed;
    ari_sum_slice s; /* s.s.ptr NULL: not reduced */
} grouped;

static ar_status measure_group(ar_ctx *ctx, const grouped *o, size_t i)
{
    const ar_tensor a = ari_group_rows(o->a, o->g, i);
    if (a.shape[0] == 0)
        return AR_OK;
    return ARI_KERNEL(ctx, row_exponents, ar_buf_at(o->e, o->g->first[i] * WORD), &a, ar_const(o->b[i]->c), +1, false,
                      o->b[i]->narrow);
}

/* Multiplies group i: rounds the result to the group's rows of y, or stores its integers in its part of the sums. */
static ar_status multiply_group(ar_ctx *ctx, const grouped *o, size_t i)
{
    const size_t first_row = o->g->first[i], rows = o->g->first[i + 1] - first_row, n = o->b[i]->x.rows;
    const ar_cbuf e = ar_cbuf_at(ar_const(o->e), first_row * WORD), no_bias = {NULL};
    const ar_tensor src = ari_group_rows(o->a, o->g, i);
    ar_packed *a = NULL;
    ar_status st = AR_OK;
    if (rows == 0)
        return AR_OK;
    AR_TRY(ARI_KERNEL(ctx, pack, o->packed, first_row, 0, &src, ar_const(o->b[i]->c), +1, ar_const(o->e)));
    AR_TRY(part_of(ctx, &a, o->packed, first_row, rows, 0, o->a->shape[1]));
    if (o->s.s.ptr) {
        st = ARI_KERNEL(ctx, gemm_i64, ar_buf_at(o->s.s, first_row * n * (size_t)o->s.limbs * sizeof(int64_t)), a,
                        o->b[i]->packed, o->s.limbs, false);
    } else {
        const ar_tensor dst = ari_group_rows(&o->y, o->g, i);
        st = ARI_KERNEL(ctx, gemm_round, &dst, a, o->b[i]->packed, e, ar_const(o->b[i]->e), no_bias, AR_ACT_NONE, NULL,
                        NULL);
    }
    ari_exact_end_packed(ctx, a);
    ari_work_of_product(&(ari_extents){.batch = 1, .rows = rows, .k = o->a->shape[1]}, &o->b[i]->x);
    return st;
}

/* Room for all groups' integers and sums, once the first one's B is there. */
static ar_status begin_groups(ar_ctx *ctx, grouped *o, const ar_tensor *y, bool fold, const char *tag)
{
    const ar_operand *b = o->b[0];
    const size_t rows = o->a->shape[0], k = o->a->shape[1];
    size_t bytes = 0;
    if (y->shape[0] != rows || y->shape[1] != b->x.rows || k != b->x.k)
        return ar_error_set(AR_ERR_SHAPE, "%s: [%zu, %zu] from [%zu, %zu] and matrices [%zu, %zu]", tag, y->shape[0],
                            y->shape[1], rows, k, b->x.rows, b->x.k);
    AR_TRY(ari_step_alloc(ctx, &o->e, rows * WORD));
    AR_TRY(ari_exact_new_packed(ctx, &o->packed, 1, rows, k, ari_exact_form(true, b->narrow)));
    if (!fold)
        return ari_wide_begin(ctx, &o->y, y);
    o->s = (ari_sum_slice){.limbs = ari_exact_limbs(b->narrow, b->k_full),
                           .count = ar_tensor_count(y),
                           .rows = y->shape[0],
                           .cols = y->shape[1]};
    AR_TRY(ari_mul_size(&bytes, o->s.count, (size_t)o->s.limbs * sizeof(int64_t)));
    return ari_step_alloc(ctx, &o->s.s, bytes);
}

/* Rounds this rank's slice of the sums to y in fp32; the exponents of B differ between groups. */
static ar_status round_groups(ar_ctx *ctx, const grouped *o, ar_buf y)
{
    const ari_sum_slice *s = &o->s;
    const size_t end = s->start + s->count, element_bytes = (size_t)s->limbs * sizeof(int64_t);
    for (size_t i = 0; i < o->g->n; i++) {
        const size_t group_begin = o->g->first[i] * s->cols, group_end = o->g->first[i + 1] * s->cols;
        const size_t overlap_begin = group_begin > s->start ? group_begin : s->start,
                     overlap_end = group_end < end ? group_end : end;
        if (overlap_begin < overlap_end)
            AR_TRY(ARI_KERNEL(ctx, round_i64, ar_buf_at(y, (overlap_begin - s->start) * sizeof(float)),
                              ar_cbuf_at(ar_const(s->s), (overlap_begin - s->start) * element_bytes), s->limbs,
                              overlap_begin - group_begin, overlap_end - overlap_begin, s->cols,
                              ar_cbuf_at(ar_const(o->e), o->g->first[i] * WORD), ar_const(o->b[i]->e)));
    }
    return AR_OK;
}

static ar_status fold_groups(ar_ctx *ctx, grouped *o, const ar_tensor *y, ar_comm *group, const char *tag)
{
    AR_TRY(ari_exact_slice(ctx, &o->s, ctx->queue, NULL, group, tag));
    const size_t start = o->s.start * ar_dtype_bytes(y->dtype);
    const ar_tensor local_slice = ari_tensor_flat(y->dtype, ar_buf_at(y->data, start), o->s.count);
    ar_tensor wide;
    AR_TRY(ari_wide_begin(ctx, &wide, &local_slice));
    AR_TRY(round_groups(ctx, o, wide.data));
    AR_TRY(ari_wide_end(ctx, &local_slice, &wide));
    ari_step_free(ctx, o->s.s);
    return ari_exact_gather(ctx, y, group);
}

/* Without peers, a group is multiplied as soon as its B has been computed, while its integers are in the caches. */
static ar_status contract_groups(ar_ctx *ctx, grouped *o, const ar_tensor *y, const ar_group_operands *b,
                                 ar_comm *group, const char *tag)
{
    size_t chunk = 1;
    for (size_t first_group = 0; first_group < o->g->n; first_group += chunk) {
        for (size_t i = first_group; i < first_group + chunk; i++) {
            AR_TRY(b->make(ctx, &o->b[i], b->user, i));
            if (i == 0) {
                AR_TRY(begin_groups(ctx, o, y, ari_has_peers(group), tag));
                chunk = ari_has_peers(o->b[0]->k_groups[0]) || ari_has_peers(o->b[0]->k_groups[1]) ? o->g->n : 1;
            }
            AR_TRY(measure_group(ctx, o, i));
        }
        for (int k = 0; k < 2; k++)
            AR_TRY(ari_exact_max(ctx, o->b[0]->k_groups[k], o->e, o->a->shape[0], tag));
        for (size_t i = first_group; i < first_group + chunk; i++)
            AR_TRY(multiply_group(ctx, o, i));
    }
    AR_TRY(ari_has_peers(group) ? fold_groups(ctx, o, y, group, tag) : ari_wide_end(ctx, y, &o->y));
    for (size_t i = 0; i < o->g->n; i++)
        ari_exact_operand_done(ctx, o->b[i]);
    ari_exact_end_packed(ctx, o->packed);
    ari_step_free(ctx, o->e);
    return AR_OK;
}

ar_status ari_exact_contract_groups(ar_ctx *ctx, const ar_tensor *y, const ar_tensor *a, const ar_group_operands *b,
                                    const ar_groups *g, ar_comm *group, const char *tag)
{
    grouped o = {.a = a, .g = g};
    AR_TRY(ari_check_groups(g, a->shape[0], tag));
    AR_TRY(ARI_ALLOC(&o.b, g->n, "operands of groups"));
    const ar_status st = contract_groups(ctx, &o, y, b, group, tag);
    free(o.b);
    return st;
}

/* --- gradients: one contraction for each group and sample, a run of rows ------------------------------------------ */

/* dy (sign +1) or x (-1), transposed to [features, rows], as integers: each run's rows have separate exponents. */
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
    const size_t *bounds = g->sample + run / g->samples * (g->samples + 1) + run % g->samples;
    return bounds[1] - bounds[0];
}

static ar_tensor run_of(const run_operand *o, const ar_groups *g, size_t run)
{
    return ar_tensor_slice(&o->t, 1, run_start(g, run), run_rows(g, run));
}

/* c [rows]. */
static ar_status run_quantise(ar_ctx *ctx, run_operand *o, const ar_groups *g, ar_cbuf c)
{
    const size_t features = o->t.shape[0], runs = g->n * g->samples;
    const bool narrow = ari_exact_is_narrow(ctx, g->longest);
    size_t bytes = 0;
    AR_TRY(ari_mul_size(&bytes, runs * features, WORD));
    AR_TRY(ari_step_alloc(ctx, &o->e, bytes));
    AR_TRY(ari_exact_new_packed(ctx, &o->packed, 1, features, o->t.shape[1], ari_exact_form(o->sign > 0, narrow)));
    for (size_t run = 0; run < runs; run++) {
        const ar_tensor t = run_of(o, g, run);
        const size_t start = run_start(g, run);
        const ar_buf e = ar_buf_at(o->e, run * features * WORD);
        AR_TRY(ARI_KERNEL(ctx, row_exponents, e, &t, ar_cbuf_at(c, start * WORD), o->sign, false, narrow));
        if (t.shape[1] > 0)
            AR_TRY(ARI_KERNEL(ctx, pack, o->packed, 0, start, &t, ar_cbuf_at(c, start * WORD), o->sign, ar_const(e)));
    }
    return AR_OK;
}

static void run_operand_end(ar_ctx *ctx, run_operand *o)
{
    ari_exact_end_packed(ctx, o->packed);
    ari_step_free(ctx, o->e);
}

static ar_cbuf run_exponents(const run_operand *o, size_t run)
{
    return ar_cbuf_at(ar_const(o->e), run * o->t.shape[0] * WORD);
}

/* Adds the gradients of parameter j of n in all groups. */
static ar_status add_runs(ar_ctx *ctx, ar_param *const *sums, int n, const run_operand *dy, const run_operand *x,
                          const ar_groups *g)
{
    for (size_t i = 0; i < g->n; i++) {
        const ar_runs runs = {g->samples, g->first[i], g->sample + i * (g->samples + 1)};
        const size_t rows = g->first[i + 1] - g->first[i], run = i * g->samples;
        ar_param *p = sums[i * (size_t)n];
        ari_work_of_gradient(dy->t.shape[0], x->t.shape[0], rows);
        if (!p->requires_grad || rows == 0)
            continue;
        const bool fresh = ari_exact_grad_begins(p->grad);
        AR_TRY(ARI_KERNEL(ctx, gemm_acc, p->grad->t, p->grad->hl, p->grad->n, p->grad->narrow, dy->packed, x->packed,
                          run_exponents(dy, run), run_exponents(x, run), &runs, fresh));
    }
    return AR_OK;
}

/* x's rows, and their exponents c [rows]. */
static ar_status add_groups(ar_ctx *ctx, ar_param *const *sums, const ar_tensor *dy, int n, const ar_tensor *x,
                            ar_cbuf c, const ar_groups *g)
{
    run_operand b = {.t = ari_tensor_transposed(x), .sign = -1};
    AR_TRY(run_quantise(ctx, &b, g, c));
    for (int j = 0; j < n; j++) {
        run_operand a = {.t = ari_tensor_transposed(&dy[j]), .sign = +1};
        AR_TRY(run_quantise(ctx, &a, g, c));
        AR_TRY(add_runs(ctx, sums + j, n, &a, &b, g));
        run_operand_end(ctx, &a);
    }
    run_operand_end(ctx, &b);
    return AR_OK;
}

/* --- where other ranks have rows of the samples ------------------------------------------------------------------- */

/* Runs of all ranks whose rows are sent to one rank. */
typedef struct shared_runs {
    size_t *rows; /* [ranks, runs] */
    int *owner;   /* [runs] */
    size_t *first_row, *sample;
    ar_groups g; /* groups of the received rows */
    ari_moved_rows moved;
    ari_arena memory;
} shared_runs;

static void shared_runs_end(shared_runs *s)
{
    ari_moved_rows_end(&s->moved);
    ari_arena_free(&s->memory);
}

static ar_status tell_runs(ar_ctx *ctx, size_t *rows, const ar_groups *g, const char *tag)
{
    const size_t runs = g->n * g->samples, ranks = (size_t)ar_comm_size(g->comm), me = (size_t)ar_comm_rank(g->comm);
    ARI_OWNED uint64_t *numbers = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&numbers, ranks * runs, "rows of samples"));
    for (size_t run = 0; run < runs; run++)
        numbers[me * runs + run] = run_rows(g, run);
    AR_TRY(ari_gather_words(ctx, g->comm, numbers, runs, tag));
    for (size_t i = 0; i < ranks * runs; i++)
        rows[i] = g->known ? g->known[i] : numbers[i];
    return AR_OK;
}

/* Fills the groups of the received runs; the other groups have no rows. */
static void own_groups(shared_runs *s, const ar_groups *g)
{
    const size_t runs = g->n * g->samples, ranks = (size_t)ar_comm_size(g->comm);
    s->g = (ar_groups){
        .n = g->n, .samples = g->samples, .longest = g->longest, .first = s->first_row, .sample = s->sample};
    for (size_t i = 0; i < g->n; i++) {
        size_t *sample = s->sample + i * (g->samples + 1);
        for (size_t k = 0; k < g->samples; k++) {
            const size_t run = i * g->samples + k;
            sample[k + 1] = sample[k];
            for (size_t r = 0; r < ranks && s->owner[run] == ar_comm_rank(g->comm); r++)
                sample[k + 1] += s->rows[r * runs + run];
        }
        s->first_row[i + 1] = s->first_row[i] + sample[g->samples];
    }
}

/* Assigns runs to ranks in turn, by the sum of their group's and sample's numbers. */
static ar_status shared_runs_make(shared_runs *s, ar_ctx *ctx, const ar_groups *g, const char *tag)
{
    const size_t runs = g->n * g->samples, ranks = (size_t)ar_comm_size(g->comm);
    AR_TRY(ARI_TAKE(&s->rows, &s->memory, ranks * runs, "rows of samples"));
    AR_TRY(ARI_TAKE(&s->owner, &s->memory, runs, "ranks of samples"));
    AR_TRY(ARI_TAKE(&s->first_row, &s->memory, g->n + 1, "rows of groups"));
    AR_TRY(ARI_TAKE(&s->sample, &s->memory, g->n * (g->samples + 1), "rows of samples"));
    AR_TRY(tell_runs(ctx, s->rows, g, tag));
    for (size_t run = 0; run < runs; run++)
        s->owner[run] = (int)((run / g->samples + run % g->samples) % ranks);
    own_groups(s, g);
    return ari_moved_rows_init(&s->moved, ctx, &(ari_row_blocks){g->comm, runs, s->owner, s->rows});
}

static ar_status add_moved(ar_ctx *ctx, ar_param *const *sums, const ar_tensor *dy, int n, const ar_tensor *x,
                           const ar_tensor *c, const shared_runs *s, const char *tag)
{
    ar_tensor c_all, x_all, dy_all[AR_MAX_PARTS];
    for (int r = 0; r < ar_comm_size(s->moved.group); r++)
        ctx->routed.gradients += r == ar_comm_rank(s->moved.group) ? 0 : s->moved.sent[r];
    AR_TRY(ari_move_rows(&c_all, c, &s->moved, tag));
    AR_TRY(ari_move_rows(&x_all, x, &s->moved, tag));
    for (int j = 0; j < n; j++)
        AR_TRY(ari_move_rows(&dy_all[j], &dy[j], &s->moved, tag));
    AR_TRY(add_groups(ctx, sums, dy_all, n, &x_all, ar_const(c_all.data), &s->g));
    for (int j = 0; j < n; j++)
        ar_ctx_release(ctx, &dy_all[j]);
    ARI_RELEASE(ctx, &x_all, &c_all);
    return AR_OK;
}

static ar_status add_shared(ar_ctx *ctx, ar_param *const *sums, const ar_tensor *dy, int n, const ar_tensor *x,
                            const ar_tensor *c, const ar_groups *g, const char *tag)
{
    ARI_ENDED(shared_runs_end) shared_runs s = {.rows = NULL};
    AR_TRY(shared_runs_make(&s, ctx, g, tag));
    return add_moved(ctx, sums, dy, n, x, c, &s, tag);
}

ar_status ari_exact_grad_groups(ar_ctx *ctx, ar_param *const *sums, const ar_tensor *dy, int n, const ar_tensor *x,
                                const ar_groups *g, ar_comm *x_rows_over, const char *tag)
{
    const ar_tensor x_t = ari_tensor_transposed(x);
    ar_tensor c; /* int32, because the data are not floats */
    bool any = false;
    AR_TRY(ari_check_groups(g, x->shape[0], tag));
    for (size_t i = 0; i < g->n * (size_t)n; i++) { /* zeros if there are no rows */
        bool is_trained = false;
        AR_TRY(ari_grad_begin(ctx, &is_trained, sums[i], &dy[i % (size_t)n], x));
        any = any || is_trained;
    }
    if (!any)
        return AR_OK;
    AR_TRY(ari_new_rows(ctx, &c, AR_F32, x->shape[0], 1));
    AR_TRY(ARI_KERNEL(ctx, col_exponents, c.data, &x_t, false));
    AR_TRY(ari_exact_max(ctx, x_rows_over, c.data, x->shape[0], tag));
    AR_TRY(ari_has_peers(g->comm) ? add_shared(ctx, sums, dy, n, x, &c, g, tag)
                                  : add_groups(ctx, sums, dy, n, x, ar_const(c.data), g));
    ar_ctx_release(ctx, &c);
    return AR_OK;
}
