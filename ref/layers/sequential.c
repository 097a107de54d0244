/* SPDX-License-Identifier: Apache-2.0 */
/* A list of modules, and the stages of it that a pipeline's rank runs. */
#include <stdlib.h>
#include <string.h>

#include "anyrank/loss.h"
#include "ref/context/context_private.h"
#include "ref/core/record.h"
#include "ref/core/tensor_private.h"
#include "ref/core/text.h"
#include "ref/layers/batch_private.h"
#include "ref/layers/experts/scores.h"
#include "ref/layers/loss.h"
#include "ref/layers/module_private.h"
#include "ref/placement/parallel_private.h"

static const char LIST[] = "sequential";

typedef struct sequential_module {
    ar_module base;
    ar_module **child; /* [n] */
    size_t n;
    bool owns_children;
    size_t sp_index;         /* child that runs as under sequence parallelism, unlike all others; SIZE_MAX: none */
    bool positions;          /* a plan splits the positions of some value here */
    ari_staged *child_stage; /* [n] stages of a list that has been divided; NULL: it has not */
    ari_stages stages;
    ar_module **spare; /* [spares] modules of the pipeline's other end that share a parameter with a module here */
    size_t spares;
} sequential_module;

static bool enter_child(const sequential_module *m, ar_ctx *ctx, size_t i)
{
    const bool before = ctx->sp;
    ctx->sp = before || i == m->sp_index;
    if (m->child_stage)
        ctx->use = m->child_stage[i].unit ? ARI_USE_BETWEEN : ARI_USE_OUTER;
    return before;
}

/* y = children [begin, end) of x. */
static ar_status run_forward(const sequential_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                             const ar_batch *batch, size_t begin, size_t end)
{
    ar_tensor input = *x;
    *y = input;
    for (size_t i = begin; i < end && !(m->child_stage && m->child_stage[i].uncounted && ctx->counting); i++) {
        const bool sp = enter_child(m, ctx, i);
        const ar_status st = ar_module_forward(m->child[i], ctx, saved, y, &input, batch);
        ctx->sp = sp;
        AR_TRY(st);
        input = *y;
    }
    return AR_OK;
}

/* The first child computes no dx if it is not needed. */
static ar_status run_backward(const sequential_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx,
                              const ar_tensor *dy, const ar_batch *batch, size_t begin, size_t end)
{
    ar_tensor d = *dy, child_dx = d;
    for (size_t i = end; i-- > begin;) {
        const bool sp = enter_child(m, ctx, i);
        const ar_status st = ar_module_backward(m->child[i], ctx, saved, i > begin || dx ? &child_dx : NULL, &d, batch);
        ctx->sp = sp;
        AR_TRY(st);
        if (m->stages.fresh && (i > begin || dx) && child_dx.data.ptr != d.data.ptr)
            ar_ctx_release(ctx, &d);
        d = child_dx;
    }
    if (dx)
        *dx = d;
    return AR_OK;
}

static ar_status check_whole(const sequential_module *m, const ar_ctx *ctx)
{
    if (!m->child_stage || ar_comm_size(ctx->pipeline) == 1)
        return AR_OK;
    return ar_error_set(AR_ERR_ARG,
                        "%s: rank %d of a pipeline of %d has some of its modules: ar_module_train_step goes "
                        "through them",
                        m->base.name, ar_comm_rank(ctx->pipeline), ar_comm_size(ctx->pipeline));
}

static ar_status sequential_forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                                    const ar_batch *batch)
{
    const sequential_module *m = (const sequential_module *)base;
    AR_TRY(check_whole(m, ctx));
    if (m->positions && x->ndim < 3)
        return ar_error_set(AR_ERR_SHAPE,
                            "%s: the plan splits positions, S(1), and the value has %d dimensions, expected [samples, "
                            "positions, features]; features are S(-1)",
                            base->name, x->ndim);
    return run_forward(m, ctx, saved, y, x, batch, 0, m->n);
}

static ar_status sequential_backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                                     const ar_batch *batch)
{
    const sequential_module *m = (const sequential_module *)base;
    AR_TRY(check_whole(m, ctx));
    return run_backward(m, ctx, saved, dx, dy, batch, 0, m->n);
}

static size_t children(const ar_module *base, ar_module **out, size_t cap)
{
    const sequential_module *m = (const sequential_module *)base;
    for (size_t i = 0; i < m->n && i < cap; i++)
        out[i] = m->child[i];
    return m->n;
}

static void sequential_destroy(ar_module *base)
{
    sequential_module *m = (sequential_module *)base;
    for (size_t i = 0; m->owns_children && i < m->n; i++)
        ar_module_destroy(m->child[i]);
    for (size_t i = 0; m->owns_children && i < m->spares; i++)
        ar_module_destroy(m->spare[i]);
    free(m->spare);
    free(m->child);
    free(m->child_stage);
    free(m);
}

ar_status ari_sequential_create(ar_module **out, const char *name, ar_module *const *child, size_t n,
                                bool owns_children, size_t sp_index, bool positions)
{
    static const ar_module_ops ops = {.kind = LIST,
                                      .forward = sequential_forward,
                                      .backward = sequential_backward,
                                      .children = children,
                                      .destroy = sequential_destroy};
    sequential_module *m = NULL;
    if (n > 0 && !child)
        return ar_error_set(AR_ERR_ARG, "%s: a list of %zu modules is NULL", ARI_SHOW(name), n);
    AR_TRY(ARI_MODULE_BEGIN(&m, &ops, name, AR_HELD_UNKNOWN));
    ar_status st = ARI_ALLOC(&m->child, n, name);
    for (size_t i = 0; i < n && st == AR_OK; i++) {
        if (!child[i])
            st = ar_error_set(AR_ERR_ARG, "%s: child %zu of %zu is NULL", name, i, n);
        m->child[i] = child[i];
    }
    m->n = st == AR_OK ? n : 0;
    m->owns_children = owns_children;
    m->sp_index = sp_index;
    m->positions = positions;
    return ari_module_end(out, &m->base, st);
}

ar_status ar_sequential_create(ar_module **out, const char *name, ar_module *const *child, size_t n, bool owns_children)
{
    return ari_sequential_create(out, name, child, n, owns_children, SIZE_MAX, false);
}

ar_status ar_sequential_made(ar_module **out, const char *name, ar_module *const *child, size_t n, ar_status st)
{
    if (st == AR_OK)
        st = ar_sequential_create(out, name, child, n, true);
    for (size_t i = 0; child && i < n && st != AR_OK; i++)
        ar_module_destroy(child[i]);
    return st;
}

/* --- stages of a pipeline ----------------------------------------------------------------------------------------- */

/* Returns m as a list; NULL: m is another kind of module. */
static sequential_module *list_of(const ar_module *m)
{
    return m->ops->kind == LIST ? (sequential_module *)(uintptr_t)m : NULL;
}

/* Handles a parameter that modules of two ranks share: both ranks keep a copy, and the copies' gradients are summed,
 * which is supported between the first and the last rank. The module of the other rank, which may own the parameter,
 * becomes a spare. */
static ar_status share_ends(sequential_module *m, const ari_staged *child_stage, int rank, int ranks)
{
    for (size_t i = 0; i < m->n; i++) {
        for (size_t k = 0; k < m->n && child_stage[i].rank == rank; k++) {
            const bool is_end_pair = (child_stage[i].rank == 0 && child_stage[k].rank == ranks - 1) ||
                                     (child_stage[k].rank == 0 && rank == ranks - 1);
            ARI_OWNED ar_param **local_params = NULL, **peer_params = NULL;
            size_t n = 0, peer_count = 0;
            bool shares = false;
            if (child_stage[k].rank == rank)
                continue;
            AR_TRY(ari_module_list(&local_params, &n, m->child[i]));
            AR_TRY(ari_module_list(&peer_params, &peer_count, m->child[k]));
            for (size_t a = 0; a < n * peer_count; a++) {
                ar_param *p = local_params[a / peer_count];
                if (p != peer_params[a % peer_count])
                    continue;
                if (!is_end_pair)
                    AR_TRY(ar_error_set(AR_ERR_UNSUPPORTED,
                                        "%s: %s and %s share %s, and are in stages of two ranks, expected the first "
                                        "and the last: give both to one stage (ar_parallel.stages), or each a "
                                        "parameter of its own",
                                        m->base.name, m->child[i]->name, m->child[k]->name, p->name));
                shares = p->ends = true;
            }
            for (size_t s = 0; s < m->spares; s++)
                shares = shares && m->spare[s] != m->child[k];
            if (shares)
                m->spare[m->spares++] = m->child[k];
        }
    }
    return AR_OK;
}

static bool is_spare(const sequential_module *m, const ar_module *child)
{
    for (size_t i = 0; i < m->spares; i++) {
        if (m->spare[i] == child)
            return true;
    }
    return false;
}

ar_status ari_sequential_keep(ar_module *base, const ari_staged *child, const ari_stages *s, const ar_ctx *ctx)
{
    const int rank = ar_comm_rank(ctx->pipeline);
    sequential_module *m = list_of(base);
    size_t n = 0;
    if (!m || m->child_stage || m->sp_index != SIZE_MAX)
        return ar_error_set(AR_ERR_ARG, "%s: only a list of modules (ar_sequential_create) is cut, and once",
                            base->name);
    AR_TRY(ARI_ALLOC_ZERO(&m->spare, m->n, "stages"));
    AR_TRY(ARI_ALLOC_ZERO(&m->child_stage, m->n, "stages"));
    const ar_status st = share_ends(m, child, rank, ar_comm_size(ctx->pipeline));
    if (st != AR_OK) {
        m->spares = 0; /* the list still contains all modules */
        return st;
    }
    for (size_t i = 0; i < m->n; i++) {
        if (child[i].rank == rank) {
            m->child_stage[n] = child[i];
            m->child[n++] = m->child[i];
        } else if (m->owns_children && !is_spare(m, m->child[i])) {
            ar_module_destroy(m->child[i]);
        }
    }
    m->n = n;
    m->stages = *s;
    return AR_OK;
}

ar_status ari_sequential_recompute(ar_module *base, size_t begin, size_t end, const ar_recomputation *r)
{
    sequential_module *m = list_of(base);
    for (size_t i = begin; m && i < end; i += (size_t)ari_at_least_one(r->every))
        AR_TRY(ari_module_recompute(m->child[i], r->part));
    return AR_OK;
}

const ari_stages *ari_sequential_stages(const ar_module *base, const ari_staged **child)
{
    const sequential_module *m = list_of(base);
    if (!m || !m->child_stage)
        return NULL;
    if (child)
        *child = m->child_stage;
    return &m->stages;
}

size_t ari_sequential_units(const ar_module *base, ar_unit *out, size_t cap, int *root)
{
    const sequential_module *m = list_of(base);
    size_t count = 0;
    *root = 0;
    for (size_t i = 0; m && m->child_stage && i < m->n; i++) {
        const int stage = m->child_stage[i].stage < 0 ? m->stages.n - 1 : m->child_stage[i].stage;
        size_t k = 0;
        while (k < i && m->child[k] != m->child[i])
            k++;
        if (i == 0 && m->child_stage[i].unit)
            *root = m->stages.n - 1;
        if (k < i || !m->child_stage[i].unit || ar_module_params(m->child[i], NULL, 0, true) == 0)
            continue;
        if (count < cap)
            out[count] = (ar_unit){m->child[i], stage};
        count++;
    }
    return count;
}

/* --- passes of a rank's part -------------------------------------------------------------------------------------- */

ar_status ari_stage_between(const ar_module *base, ar_ctx *ctx, ar_tensor *t, const ar_batch *batch)
{
    const ari_between *b = &list_of(base)->stages.boundary;
    size_t shape[AR_MAX_DIMS] = {batch->batch};
    for (int d = 0; d < b->ndim; d++)
        shape[d + 1] = b->shape[d];
    if (b->ndim > 1) {
        const ar_positions positions = ari_local_positions(ctx, b->shape[0] > 0 ? b->shape[0] : batch->seq, true);
        shape[1] = ari_positions_count(&positions);
    }
    ctx->use = ARI_USE_BETWEEN;
    return ar_ctx_tensor(ctx, t, ctx->activations, b->ndim + 1, shape);
}

/* Copies a value that goes to another stage into memory of its own. */
static ar_status hand_over(const ar_module *base, ar_ctx *ctx, ar_tensor *y, const ar_tensor *value,
                           const ar_batch *batch)
{
    *y = *value;
    if (list_of(base)->stages.fresh)
        return AR_OK;
    AR_TRY(ari_stage_between(base, ctx, y, batch));
    if (value->ndim != y->ndim || memcmp(value->shape, y->shape, (size_t)y->ndim * sizeof *y->shape) != 0 ||
        !ari_tensor_is_contiguous(value) || value->dtype != y->dtype)
        return ar_error_set(AR_ERR_SHAPE, "%s: a value of %s between stages, which were cut for %s", base->name,
                            ARI_SHOW_SHAPE(value->ndim, value->shape), ARI_SHOW_SHAPE(y->ndim, y->shape));
    return ARI_KERNEL(ctx, copy, y->data, ar_const(value->data), ar_tensor_count(y) * ar_dtype_bytes(y->dtype));
}

/* Returns m as a list of which a pass runs only one stage; NULL: it is a single module. */
static const sequential_module *staged(const ar_module *m, const ar_ctx *ctx)
{
    const sequential_module *list = list_of(m);
    return list && list->child_stage && (list->stages.fresh || ar_comm_size(ctx->pipeline) > 1) ? list : NULL;
}

static bool is_last(const sequential_module *m, const ar_ctx *ctx, int i)
{
    return !m || (i + 1 == m->stages.n && ar_comm_rank(ctx->pipeline) + 1 == ar_comm_size(ctx->pipeline));
}

/* Returns the children [*begin, *end) of stage i. */
static void children_of(const sequential_module *m, int i, size_t *begin, size_t *end)
{
    *begin = 0;
    while (*begin < m->n && m->child_stage[*begin].stage != i)
        (*begin)++;
    *end = *begin;
    while (*end < m->n && m->child_stage[*end].stage == i)
        (*end)++;
}

static ar_status input_of(const ar_module *m, ar_ctx *ctx, ar_tensor *x, const ar_batch *batch)
{
    const sequential_module *list = list_of(m);
    *x = (ar_tensor){.ndim = 0};
    return (list && list->n > 0 ? list->child[0] : m)->ops->takes_ids ? AR_OK : ari_batch_input(ctx, x, batch);
}

ar_status ari_stage_forward(ar_module *m, ar_loss *loss, ar_ctx *ctx, ar_saved *saved, int i, ar_tensor *y,
                            const ar_tensor *x, const ar_batch *batch)
{
    const sequential_module *list = staged(m, ctx);
    ar_tensor input, out;
    size_t begin, end;
    ari_ctx_place_batch(ctx, batch);
    if (i == 0 && ar_comm_rank(ctx->pipeline) == 0)
        AR_TRY(input_of(m, ctx, &input, batch));
    else
        input = *x;
    if (list) {
        children_of(list, i, &begin, &end);
        AR_TRY(run_forward(list, ctx, saved, &out, &input, batch, begin, end));
    } else {
        AR_TRY(ar_module_forward(m, ctx, saved, &out, &input, batch));
    }
    if (!is_last(list, ctx, i))
        return hand_over(m, ctx, y, &out, batch);
    if (ar_comm_size(ctx->pipeline) > 1 && ari_faulty(ctx, "pp_loss_last_micro_batch"))
        AR_TRY(ar_loss_zero(loss, ctx));
    if (!ctx->counting)
        AR_TRY(ar_loss_forward(loss, ctx, saved, &out, batch));
    return list && list->stages.further ? ari_further_forward(list->stages.further, ctx, saved, batch) : AR_OK;
}

ar_status ari_stage_backward(ar_module *m, ar_loss *loss, ar_ctx *ctx, ar_saved *saved, int i, ar_tensor *dx,
                             const ar_tensor *dy, const ar_batch *batch)
{
    const sequential_module *list = staged(m, ctx);
    const bool inner = i > 0 || ar_comm_rank(ctx->pipeline) > 0;
    ar_tensor d, stage_dx;
    size_t begin, end;
    ari_ctx_place_batch(ctx, batch);
    if (list && list->stages.further && is_last(list, ctx, i))
        AR_TRY(ari_further_backward(list->stages.further, ctx, saved, batch));
    ctx->use = ARI_USE_OUTER;
    if (is_last(list, ctx, i))
        AR_TRY(ar_loss_backward(loss, ctx, saved, &d, batch));
    else
        d = *dy;
    if (!list)
        return ar_module_backward(m, ctx, saved, NULL, &d, batch);
    children_of(list, i, &begin, &end);
    AR_TRY(run_backward(list, ctx, saved, inner ? &stage_dx : NULL, &d, batch, begin, end));
    return inner ? hand_over(m, ctx, dx, &stage_dx, batch) : AR_OK;
}

/* --- of a step ---------------------------------------------------------------------------------------------------- */

size_t ari_trained_depths(const ar_module *m)
{
    const ari_stages *s = ari_sequential_stages(m, NULL);
    return s ? s->depths : 0;
}

static size_t next_targets(const ar_ctx *ctx, const ar_batch *batch)
{
    const ar_positions positions = ari_local_positions(ctx, batch->seq, false);
    const size_t n = ari_positions_count(&positions);
    size_t count = 0;
    for (size_t i = 0; i < batch->batch * n; i++)
        count += ari_local_target(ctx, batch, i / n, &positions, i % n) != AR_IGNORE_INDEX;
    return count;
}

ar_status ari_trained_targets(size_t count[1 + AR_MAX_MTP], const ar_module *m, const ar_loss *loss, const ar_ctx *ctx,
                              const ar_batch *batch)
{
    if (loss)
        AR_TRY(ar_loss_targets(&count[0], loss, ctx, batch));
    else
        count[0] = next_targets(ctx, batch);
    for (size_t depth = 1; depth <= ari_trained_depths(m); depth++) {
        ARI_OWNED int64_t *memory = NULL;
        ar_batch rolled;
        AR_TRY(ari_batch_roll(&rolled, &memory, batch, depth));
        count[depth] = next_targets(ctx, &rolled);
    }
    return AR_OK;
}

void ari_trained_further(ar_module *m, const size_t *targets)
{
    const ari_stages *s = ari_sequential_stages(m, NULL);
    if (s && s->further)
        ari_further_set_targets(s->further, targets);
}

ar_status ari_trained_zero(ar_module *m, ar_loss *loss, ar_ctx *ctx)
{
    const ari_stages *s = ari_sequential_stages(m, NULL);
    AR_TRY(ar_module_zero_grad(m, ctx));
    AR_TRY(ari_balance_zero(m, ctx));
    AR_TRY(ari_scores_zero(m));
    if (loss)
        AR_TRY(ar_loss_zero(loss, ctx));
    return s && s->further ? ari_further_zero(s->further, ctx) : AR_OK;
}

ar_status ari_trained_loss(ar_module *m, ar_loss *loss, ar_ctx *ctx, float *value, size_t targets)
{
    const ari_stages *s = ari_sequential_stages(m, NULL);
    double extra_loss = 0.0;
    *value = 0.0f;
    ari_span_begin("loss");
    ar_status st = ari_balance_value(m, ctx, &extra_loss);
    if (st == AR_OK && s && s->further)
        st = ari_further_loss(s->further, ctx, &extra_loss);
    if (st == AR_OK && ar_comm_rank(ctx->pipeline) + 1 == ar_comm_size(ctx->pipeline))
        st = ari_loss_value(loss, ctx, value, targets, extra_loss);
    return ari_span_end(st == AR_OK ? ari_loss_share(ctx, value) : st);
}
