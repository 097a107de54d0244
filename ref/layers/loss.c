/* SPDX-License-Identifier: Apache-2.0 */
/* Losses: the sum of a loss's terms, losses as modules, cross-entropy, mean squared error. */
#include "anyrank/loss.h"
#include "ref/layers/loss.h"

#include <stdlib.h>

#include "ref/context/context_private.h"
#include "ref/core/record.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/faults.h"
#include "ref/layers/param_private.h"
#include "ref/numerics/bits.h"
#include "ref/placement/parallel_private.h"

static const size_t unit_shape = 1;

ar_status ari_loss_init(ar_param *sum, ar_ctx *ctx, bool spread)
{
    AR_TRY(ar_param_init_whole(sum, ctx, "loss", NULL, 1, &unit_shape, AR_INIT_ONES));
    sum->spread = spread;
    return AR_OK;
}

ar_status ari_loss_add(ar_param *sum, ar_ctx *ctx, const ar_tensor *x)
{
    const size_t column[2] = {ar_tensor_count(x), 1};
    ar_tensor terms;
    AR_TRY(ar_tensor_view(&terms, x->dtype, 2, column, x->data));
    return ctx->arith->grad_rows(ctx, sum, &terms, (ar_cbuf){NULL});
}

ar_status ari_loss_total(ar_param *sum, ar_ctx *ctx, float *total)
{
    ar_tensor value;
    if (sum->spread)
        AR_TRY(ctx->arith->grad_reduce(ctx, sum, ctx->tp, "loss"));
    AR_TRY(ctx->arith->grad_reduce(ctx, sum, ctx->dp, "loss"));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_LOSS_SUM, .name = "loss"));
    sum->has_grad = true; /* also if this rank added nothing: there is something to zero now */
    AR_TRY(ar_ctx_tensor(ctx, &value, AR_F32, 1, &unit_shape));
    AR_TRY(ctx->arith->grad_value(ctx, &value, sum));
    AR_TRY(ar_ctx_download(ctx, total, &value));
    ar_ctx_release(ctx, &value);
    return AR_OK;
}

ar_status ari_loss_share(ar_ctx *ctx, float *loss)
{
    const int ranks = ar_comm_size(ctx->pipeline);
    ar_tensor t;
    if (ranks == 1)
        return AR_OK;
    AR_TRY(ar_ctx_tensor(ctx, &t, AR_F32, 0, NULL));
    AR_TRY(ar_ctx_upload(ctx, &t, loss));
    AR_TRY(ar_comm_broadcast(ctx->pipeline, ctx->queue, t.data, 1, AR_F32, ranks - 1, "loss"));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_LOSS_SUM, .name = "loss"));
    if (ar_comm_rank(ctx->pipeline) + 1 < ranks)
        AR_TRY(ari_tap_world(ctx, "loss", 'f', &t));
    AR_TRY(ar_ctx_download(ctx, loss, &t));
    ar_ctx_release(ctx, &t);
    return AR_OK;
}

/* --- of a module -------------------------------------------------------------------------------------------------- */

struct ar_loss {
    const ar_loss_ops *ops;
    void *self; /* owned */
    char name[96];
    ar_param sum;
    bool subtract;
    bool stream;        /* y has this rank's positions between the regions */
    bool predicts_next; /* a position's label is that of the next id, even if labels are given */
    bool is_sum;        /* the sum itself, over 1 */
};

ar_status ar_loss_create(ar_loss **out, ar_ctx *ctx, const char *name, const ar_loss_ops *ops, void *self)
{
    ar_loss *l = NULL;
    ar_status st = AR_OK;
    AR_TRY_TO(failed, st, ARI_ALLOC_ZERO(&l, 1, name));
    if (!ops->targets || !ops->forward || !ops->backward || !ops->destroy)
        AR_TRY_TO(failed, st, ar_error_set(AR_ERR_ARG, "%s: a loss needs all its functions", name));
    l->ops = ops;
    AR_TRY_TO(failed, st, ari_path(l->name, sizeof l->name, name, NULL));
    AR_TRY_TO(failed, st, ari_loss_init(&l->sum, ctx, false));
    l->self = self;
    *out = l;
    return AR_OK;
failed:
    free(l);
    if (ops->destroy)
        ops->destroy(self);
    return st;
}

void ar_loss_destroy(ar_loss *loss)
{
    if (!loss)
        return;
    loss->ops->destroy(loss->self);
    ar_param_fini(&loss->sum);
    free(loss);
}

ar_status ar_loss_targets(size_t *targets, const ar_loss *loss, const ar_ctx *ctx, const ar_batch *batch)
{
    ari_local_batch local;
    const ar_status st = ari_local_batch_init(&local, ctx, batch, false, loss->predicts_next);
    *targets = st == AR_OK ? loss->ops->targets(loss->self, &local.batch) : 0;
    ari_local_batch_fini(&local);
    return st;
}

/* Returns true if y has this rank's positions between the tensor-parallel regions, and not all positions. */
static bool is_stream(const ar_ctx *ctx, const ar_tensor *y, const ar_batch *batch)
{
    const size_t s = ari_batch_positions(batch);
    if (!ari_ctx_sp(ctx) || y->ndim < 3 || ari_check_sequence(ctx, s) != AR_OK)
        return false;
    const ar_positions positions = ari_local_positions(ctx, s, true);
    return y->shape[y->ndim - 2] == ari_positions_count(&positions);
}

ar_status ar_loss_forward(ar_loss *loss, ar_ctx *ctx, ar_saved *saved, const ar_tensor *y, const ar_batch *batch)
{
    ari_local_batch local;
    loss->stream = loss->sum.spread = is_stream(ctx, y, batch);
    ar_status st = ari_local_batch_init(&local, ctx, batch, loss->stream, loss->predicts_next);
    ari_ctx_place_batch(ctx, batch);
    ari_span_begin("%s:fwd", loss->name);
    const ari_ledger_place outer = ari_ledger_enter(ctx, loss->name, 'f');
    if (st == AR_OK)
        st = loss->ops->forward(loss->self, loss, ctx, saved, y, &local.batch);
    ari_ledger_leave(ctx, outer);
    ari_local_batch_fini(&local);
    return ari_span_end(st);
}

ar_status ar_loss_backward(ar_loss *loss, ar_ctx *ctx, ar_saved *saved, ar_tensor *dy, const ar_batch *batch)
{
    size_t t = batch->targets;
    ari_local_batch local;
    if (batch->global_batch == 0)
        AR_TRY(ar_loss_targets(&t, loss, ctx, batch));
    ar_status st = ari_local_batch_init(&local, ctx, batch, loss->stream, loss->predicts_next);
    ari_ctx_place_batch(ctx, batch);
    ari_span_begin("%s:bwd", loss->name);
    const ari_ledger_place outer = ari_ledger_enter(ctx, loss->name, 'b');
    if (st == AR_OK)
        st = loss->ops->backward(loss->self, loss, ctx, saved, dy, &local.batch, (double)t / ctx->loss_scale);
    ari_ledger_leave(ctx, outer);
    ari_local_batch_fini(&local);
    return ari_span_end(st);
}

/* Computes fl32(sum / divisor), NaN for a divisor of 0 (the mean of nothing); with `extra_loss` rounded again. */
ar_status ari_loss_value(ar_loss *loss, ar_ctx *ctx, float *value, size_t t, double extra_loss)
{
    const double divisor = loss->is_sum ? 1.0 : (double)t;
    float total = 0.0f;
    AR_TRY(ari_loss_total(&loss->sum, ctx, &total));
    *value = divisor > 0.0 ? (float)((double)total / divisor) : ari_nan32();
    *value = extra_loss != 0.0 ? (float)((double)*value + extra_loss) : *value; /* NaN too */
    return ari_tap_number(ctx, "loss", 'f', *value);
}

ar_status ar_loss_value(ar_loss *loss, ar_ctx *ctx, float *value, size_t t)
{
    return ari_loss_value(loss, ctx, value, t, 0.0);
}

ar_status ari_loss_part(ar_loss *loss, ar_ctx *ctx, double *part, size_t t)
{
    float total = 0.0f;
    AR_TRY(ari_loss_total(&loss->sum, ctx, &total));
    *part = t > 0 ? (double)total / (double)t : 0.0;
    return AR_OK;
}

ar_status ar_loss_zero(ar_loss *loss, ar_ctx *ctx)
{
    return ari_param_zero_grad(&loss->sum, ctx);
}

void ari_loss_subtract(ar_loss *loss, bool subtract)
{
    loss->subtract = subtract;
}

ar_status ar_loss_add(ar_loss *loss, ar_ctx *ctx, const ar_tensor *terms)
{
    ar_tensor negated;
    if (terms->dtype != AR_F32)
        return ar_error_set(AR_ERR_DTYPE, "%s: terms are %s, expected F32", loss->name, ar_dtype_name(terms->dtype));
    if (!ari_tensor_is_contiguous(terms))
        return ar_error_set(AR_ERR_SHAPE, "%s: terms are a view with gaps, expected a contiguous tensor", loss->name);
    if (!loss->subtract)
        return ari_loss_add(&loss->sum, ctx, terms);
    AR_TRY(ar_like(ctx, &negated, terms));
    AR_TRY(ARI_KERNEL(ctx, scale, &negated, terms, -1.0f));
    AR_TRY(ari_loss_add(&loss->sum, ctx, &negated));
    ar_ctx_release(ctx, &negated);
    return AR_OK;
}

/* --- softmax cross-entropy ---------------------------------------------------------------------------------------- */

enum { SAVED_LOGITS, SAVED_KEY, SAVED_SUM, SAVED_TARGET_ROWS, SAVED_VALID, SAVED_BARE };
static const char CAPPED[] = "capped", SCALED[] = "scaled"; /* parts of the path of a head's values */

void ari_local_ids(ar_ctx *ctx, size_t vocab, size_t *start, size_t *rows)
{
    ari_split_uneven(vocab, ar_comm_size(ctx->tp), ar_comm_rank(ctx->tp), start, rows);
    ari_fault_own_ids(ctx, vocab, start, rows);
}

/* Over the tensor-parallel group, or (shared false) each rank by itself. */
static void init_cross_entropy(ari_cross_entropy *c, ar_ctx *ctx, size_t classes, bool shared)
{
    size_t start;
    *c = (ari_cross_entropy){
        .classes = classes, .owned = classes, .group = shared ? ctx->tp : NULL, .options = ctx->loss};
    c->rows = classes;
    if (shared) {
        ari_local_ids(ctx, classes, &c->start, &c->owned);
        ari_split_uneven(classes, ar_comm_size(ctx->tp), ar_comm_rank(ctx->tp), &start, &c->rows);
    }
}

typedef struct target_rows {
    ar_tensor row_of; /* int64 [n]: local row of the target, -1 if another rank holds it */
    ar_tensor valid;  /* u8 [n] */
} target_rows;

static ar_status make_targets(const ari_cross_entropy *c, ar_ctx *ctx, target_rows *t, const int64_t *labels, size_t n)
{
    ARI_OWNED int64_t *ids = NULL;
    ARI_OWNED uint8_t *valid = NULL;
    ar_tensor device_ids;
    AR_TRY(ARI_ALLOC(&ids, n, "targets"));
    AR_TRY(ARI_ALLOC(&valid, n, "targets"));
    for (size_t i = 0; i < n; i++) {
        ids[i] = labels[i];
        valid[i] = labels[i] != AR_IGNORE_INDEX;
    }
    ari_fault_targets_at_edge(ctx, c, ids, n);
    AR_TRY(ari_numbers(ctx, &device_ids, AR_I64, n, ids));
    AR_TRY(ar_ctx_tensor(ctx, &t->row_of, AR_I64, 1, &n));
    AR_TRY(ari_numbers(ctx, &t->valid, AR_U8, n, valid));
    AR_TRY(ARI_KERNEL(ctx, rows_in_range, t->row_of.data, ar_const(device_ids.data), n, (int64_t)c->start,
                      (int64_t)c->owned));
    ar_ctx_release(ctx, &device_ids);
    return AR_OK;
}

static ar_status over_ranks(const ari_cross_entropy *c, ar_ctx *ctx, const ar_tensor *t, size_t count, ar_op op,
                            const char *tag)
{
    if (!c->group)
        return AR_OK;
    return ar_comm_all_reduce(c->group, ctx->queue, t->data, ar_const(t->data), count, t->dtype, op, tag);
}

/* Computes *terms [n], a tensor of the step, for n tokens: logits [.., rows] contiguous, ids (host) below `classes` or
 * AR_IGNORE_INDEX. */
static ar_status cross_entropy_forward(ari_cross_entropy *c, ar_ctx *ctx, ar_saved *saved, ar_tensor *terms,
                                       const ar_tensor *logits, const int64_t *ids, size_t n)
{
    /* With label smoothing, the exponents of the logits follow their keys, and their sums follow those of the
     * exponentials, so one collective serves both. */
    const bool smoothed = c->options.label_smoothing > 0.0;
    const size_t reduced = smoothed ? 2 * n : n;
    const ar_tensor rows = ari_tensor_rows(logits);
    ar_buf exponents = {NULL}, values = {NULL};
    ar_tensor key, sum, bits;
    target_rows t;
    AR_TRY(make_targets(c, ctx, &t, ids, n));
    AR_TRY(ar_ctx_tensor(ctx, &key, AR_I32, 1, &reduced));
    AR_TRY(ar_ctx_tensor(ctx, &sum, AR_I64, 1, &reduced));
    AR_TRY(ar_ctx_tensor(ctx, &bits, AR_I32, 1, &n));
    AR_TRY(ar_ctx_tensor(ctx, terms, AR_F32, 1, &n));
    AR_TRY(ARI_KERNEL(ctx, ce_max, key.data, logits));
    if (smoothed) {
        exponents = ar_buf_at(key.data, n * sizeof(int32_t));
        values = ar_buf_at(sum.data, n * sizeof(int64_t));
        AR_TRY(ARI_KERNEL(ctx, row_exponents, exponents, &rows, (ar_cbuf){NULL}, 1, false, false));
    }
    if (!ari_faulty(ctx, "loss_parallel_no_max"))
        AR_TRY(over_ranks(c, ctx, &key, ari_fault_token_count(ctx, reduced), AR_MAX, "loss max"));
    AR_TRY(ARI_KERNEL(ctx, ce_sum, sum.data, logits, ar_const(key.data), c->classes));
    if (smoothed)
        AR_TRY(ARI_KERNEL(ctx, ce_logits, values, logits, ar_const(exponents), c->classes));
    AR_TRY(over_ranks(c, ctx, &sum, reduced, AR_SUM, "loss sum"));
    AR_TRY(ARI_KERNEL(ctx, ce_target, bits.data, logits, ar_const(t.row_of.data)));
    AR_TRY(over_ranks(c, ctx, &bits, n, AR_SUM, "loss target"));
    AR_TRY(ARI_KERNEL(ctx, ce_terms, terms->data, ar_const(key.data), ar_const(sum.data), ar_const(bits.data),
                      ar_const(t.valid.data), ar_const(exponents), ar_const(values), &c->options, n, c->classes));
    ar_ctx_release(ctx, &bits);
    ari_work_moves(ARI_GPU_MOVES_LOSS, false, ar_tensor_count(logits));
    AR_TRY(ar_saved_push(saved, c, SAVED_KEY, &key));
    AR_TRY(ar_saved_push(saved, c, SAVED_SUM, &sum));
    AR_TRY(ar_saved_push(saved, c, SAVED_TARGET_ROWS, &t.row_of));
    AR_TRY(ar_saved_push(saved, c, SAVED_VALID, &t.valid));
    return ar_saved_push(saved, c, SAVED_LOGITS, logits);
}

/* Computes *dlogits of the sum of all terms over `targets`; in_place: in the memory of the logits, which belong to the
 * caller. */
static ar_status cross_entropy_backward(ari_cross_entropy *c, ar_ctx *ctx, ar_saved *saved, ar_tensor *dlogits,
                                        double targets, bool in_place)
{
    ar_tensor logits, key, sum, row_of, valid;
    AR_TRY(ar_saved_pop(saved, c, SAVED_LOGITS, &logits));
    AR_TRY(ar_saved_pop(saved, c, SAVED_VALID, &valid));
    AR_TRY(ar_saved_pop(saved, c, SAVED_TARGET_ROWS, &row_of));
    AR_TRY(ar_saved_pop(saved, c, SAVED_SUM, &sum));
    AR_TRY(ar_saved_pop(saved, c, SAVED_KEY, &key));
    *dlogits = logits;
    if (!in_place)
        AR_TRY(ari_like(ctx, dlogits, &logits, c->rows));
    AR_TRY(ARI_KERNEL(ctx, ce_backward, dlogits, &logits, ar_const(key.data), ar_const(sum.data), ar_const(row_of.data),
                      ar_const(valid.data), &c->options, targets, c->classes));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_LOSS, .input = {&logits}, .out = {dlogits}));
    ari_work_moves(ARI_GPU_MOVES_LOSS, true, ar_tensor_count(dlogits));
    ar_tensor *const used[] = {&key, &sum, &row_of, &valid};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++)
        ar_ctx_release(ctx, used[i]);
    return AR_OK;
}

/* --- cross-entropy with one label for each row of logits ---------------------------------------------------------- */

typedef struct classifier {
    char head_name[96], name[112]; /* names of the head that computes the logits, and of the logits */
    ar_placement shard;            /* placement of the logits if they are sharded */
    ari_cross_entropy loss;
    ari_head_options head; /* options of a model's head; the name is ignored */
} classifier;

static size_t labels_of(const ar_batch *batch)
{
    return batch->batch * batch->seq;
}

static size_t classifier_targets(const void *self, const ar_batch *batch)
{
    (void)self;
    size_t count = 0;
    for (size_t i = 0; batch->labels && i < labels_of(batch); i++)
        count += batch->labels[i] != AR_IGNORE_INDEX;
    return count;
}

/* Returns the index in a row of labels of the label for one of this rank's positions. */
static size_t place_of(const ar_ctx *ctx, const ar_loss *loss, const ar_batch *local_batch, size_t i)
{
    if (!loss->predicts_next)
        return i;
    const ar_positions positions = ari_local_positions(ctx, ari_all_positions(ctx, local_batch->seq), false);
    return ari_positions_at(&positions, i) + 1;
}

static ar_status check_labels(const classifier *c, const ar_ctx *ctx, const ar_loss *loss, const ar_tensor *y,
                              const ar_batch *batch)
{
    AR_TRY(ari_check_features(c->name, "logits", y, c->loss.rows));
    const size_t rows = ari_tensor_rows(y).shape[0], n = batch->labels ? labels_of(batch) : 0;
    if (rows != n)
        return ar_error_set(AR_ERR_SHAPE,
                            "%s: %zu rows and %zu labels (batch %zu x seq %zu), expected one for each row", c->name,
                            rows, n, batch->batch, batch->seq);
    for (size_t i = 0; i < n; i++) {
        const int64_t label = batch->labels[i];
        if (label != AR_IGNORE_INDEX && (label < 0 || (size_t)label >= c->loss.classes))
            return ar_error_set(AR_ERR_DATA, "%s: labels[%zu, %zu] is %lld, neither a class below %zu nor %d", c->name,
                                i / batch->seq, place_of(ctx, loss, batch, i % batch->seq), (long long)label,
                                c->loss.classes, AR_IGNORE_INDEX);
    }
    return AR_OK;
}

static ar_placement placed(const classifier *c, const ar_loss *loss)
{
    return ari_placed_by_features(c->shard) ? c->shard : loss->stream ? ari_shard_tokens : ari_replicated;
}

static ar_status tap_logits(const classifier *c, const ar_loss *loss, ar_ctx *ctx, const char *part, char pass,
                            const ar_tensor *t)
{
    return ari_tap_placed(ctx, c->head_name, part, pass, t, c->loss.classes, placed(c, loss));
}

/* Turns *logits into the logits that the loss uses. */
static ar_status form_logits(const classifier *c, const ar_loss *loss, ar_ctx *ctx, ar_saved *saved, ar_tensor *logits)
{
    const ari_head_options *o = &c->head;
    if (o->cap > 0.0) {
        const ar_tensor bare = *logits;
        AR_TRY(ar_saved_push(saved, c, SAVED_BARE, &bare));
        AR_TRY(ar_like(ctx, logits, &bare));
        AR_TRY(ARI_KERNEL(ctx, softcap, logits, &bare, 1.0f, o->cap));
        AR_TRY(tap_logits(c, loss, ctx, CAPPED, 'f', logits));
    }
    if (o->scale == 0.0)
        return AR_OK;
    AR_TRY(ARI_KERNEL(ctx, scale, logits, logits, (float)o->scale));
    return tap_logits(c, loss, ctx, SCALED, 'f', logits);
}

static ar_status classifier_forward(void *self, ar_loss *loss, ar_ctx *ctx, ar_saved *saved, const ar_tensor *y,
                                    const ar_batch *batch)
{
    classifier *c = self;
    const ar_placement placement = placed(c, loss);
    ar_tensor terms, logits = *y;
    AR_TRY(form_logits(c, loss, ctx, saved, &logits));
    AR_TRY(check_labels(c, ctx, loss, y, batch));
    AR_TRY(cross_entropy_forward(&c->loss, ctx, saved, &terms, &logits, batch->labels, labels_of(batch)));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_LOSS, .operation = "cross-entropy", .name = c->name, .input = {&logits},
                    .out = {&terms}, .input_placement = &placement));
    AR_TRY(ar_loss_add(loss, ctx, &terms));
    ar_ctx_release(ctx, &terms);
    return AR_OK;
}

static ar_status unform_logits(const classifier *c, const ar_loss *loss, ar_ctx *ctx, ar_saved *saved, ar_tensor *dy)
{
    const ari_head_options *o = &c->head;
    ar_tensor bare;
    if (o->cap > 0.0) {
        AR_TRY(tap_logits(c, loss, ctx, CAPPED, 'b', dy));
        AR_TRY(ar_saved_pop(saved, c, SAVED_BARE, &bare));
        AR_TRY(ARI_KERNEL(ctx, softcap_backward, dy, dy, &bare, 1.0f, o->cap));
        ar_ctx_release(ctx, &bare);
    }
    if (o->scale == 0.0)
        return AR_OK;
    AR_TRY(tap_logits(c, loss, ctx, SCALED, 'b', dy));
    return ARI_KERNEL(ctx, scale, dy, dy, (float)o->scale);
}

static ar_status classifier_backward(void *self, ar_loss *loss, ar_ctx *ctx, ar_saved *saved, ar_tensor *dy,
                                     const ar_batch *batch, double t)
{
    (void)batch;
    classifier *c = self;
    AR_TRY(cross_entropy_backward(&c->loss, ctx, saved, dy, t / c->head.weight, loss->predicts_next));
    AR_TRY(unform_logits(c, loss, ctx, saved, dy));
    return tap_logits(c, loss, ctx, "logits", 'b', dy);
}

static const ar_loss_ops cross_entropy = {.kind = "cross_entropy",
                                          .targets = classifier_targets,
                                          .forward = classifier_forward,
                                          .backward = classifier_backward,
                                          .destroy = free};

static ar_status create_classifier(ar_loss **out, ar_ctx *ctx, const char *name, const char *head_name, size_t classes,
                                   ar_placement shard, const ari_head_options *head)
{
    ARI_OWNED classifier *c = NULL;
    void *self = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&c, 1, name));
    c->shard = shard;
    c->head = *head;
    AR_TRY(ari_path(c->head_name, sizeof c->head_name, head_name, NULL));
    AR_TRY(ari_path(c->name, sizeof c->name, head_name, "logits"));
    init_cross_entropy(&c->loss, ctx, classes, ari_placed_by_features(shard));
    ARI_GIVE(&self, c);
    return ar_loss_create(out, ctx, name, &cross_entropy, self);
}

ar_status ar_cross_entropy_create(ar_loss **out, ar_ctx *ctx, const char *name, size_t classes, ar_held placement)
{
    if (placement == AR_HELD_UNKNOWN || classes < 1)
        return ar_error_set(
            AR_ERR_ARG,
            "%s: cross-entropy of %zu classes needs at least one, and to know whether the logits are whole or a shard",
            name, classes);
    return create_classifier(out, ctx, name, name, classes,
                             placement == AR_HELD_SHARD ? ari_shard_features : ari_replicated,
                             &(ari_head_options){.weight = 1.0});
}

ar_status ari_head_loss_create(ar_loss **out, ar_ctx *ctx, size_t classes, ar_placement logits,
                               const ari_head_options *o)
{
    AR_TRY(create_classifier(out, ctx, "loss", o->name, classes, logits, o));
    (*out)->predicts_next = true;
    return AR_OK;
}

/* --- the sum of an output ----------------------------------------------------------------------------------------- */

static ar_status sum_forward(void *self, ar_loss *loss, ar_ctx *ctx, ar_saved *saved, const ar_tensor *y,
                             const ar_batch *batch)
{
    (void)self, (void)saved, (void)batch;
    const ar_placement placement = loss->stream ? ari_shard_tokens : ari_replicated;
    ari_work_moves(ARI_GPU_MOVES_LOSS, false, ar_tensor_count(y));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_LOSS, .operation = "sum", .input = {y}, .input_placement = &placement));
    return ari_loss_add(&loss->sum, ctx, y);
}

static ar_status sum_backward(void *self, ar_loss *loss, ar_ctx *ctx, ar_saved *saved, ar_tensor *dy,
                              const ar_batch *batch, double t)
{
    const size_t *width = self, shape[3] = {batch->batch, batch->seq, *width};
    const ar_placement placement = loss->stream ? ari_shard_tokens : ari_replicated;
    (void)saved, (void)t;
    ctx->use = ARI_USE_BETWEEN;
    AR_TRY(ar_ctx_tensor(ctx, dy, ctx->activations, 3, shape));
    ari_work_moves(ARI_GPU_MOVES_LOSS, true, ar_tensor_count(dy));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_LOSS, .operation = "sum", .out = {dy}, .output_placement = &placement));
    return ARI_KERNEL(ctx, fill, dy, (float)ctx->loss_scale);
}

ar_status ari_sum_loss_create(ar_loss **out, ar_ctx *ctx, size_t width)
{
    static const ar_loss_ops ops = {.kind = "sum",
                                    .targets = classifier_targets,
                                    .forward = sum_forward,
                                    .backward = sum_backward,
                                    .destroy = free};
    size_t *self = NULL;
    AR_TRY(ARI_ALLOC(&self, 1, "a sum"));
    *self = width;
    AR_TRY(ar_loss_create(out, ctx, "loss", &ops, self));
    (*out)->predicts_next = (*out)->is_sum = true;
    (*out)->sum.spread = ari_ctx_sp(ctx); /* also on a rank without samples */
    return AR_OK;
}

/* --- mean squared error ------------------------------------------------------------------------------------------- */

typedef struct squared_error {
    char name[112]; /* name of the output */
} squared_error;

static size_t squared_targets(const void *self, const ar_batch *batch)
{
    (void)self;
    return batch->target ? batch->batch * batch->target_width : 0;
}

/* Computes difference = y - t and terms = difference squared, in fp32. */
static ar_status squared_forward(void *self, ar_loss *loss, ar_ctx *ctx, ar_saved *saved, const ar_tensor *y,
                                 const ar_batch *batch)
{
    const squared_error *s = self;
    const size_t n = ar_tensor_count(y);
    const ar_placement placement = loss->stream ? ari_shard_tokens : ari_replicated;
    ar_tensor minus_t, difference, terms;
    if (y->ndim < 1 || !ari_tensor_is_contiguous(y) || y->shape[0] != batch->batch || n != squared_targets(s, batch))
        return ar_error_set(AR_ERR_SHAPE,
                            "%s: %zu elements (%d dimensions) and %zu targets of %zu samples, expected one for each",
                            s->name, n, y->ndim, squared_targets(s, batch), batch->batch);
    AR_TRY(ar_ctx_tensor(ctx, &minus_t, AR_F32, y->ndim, y->shape));
    AR_TRY(ar_ctx_upload(ctx, &minus_t, batch->target));
    AR_TRY(ARI_KERNEL(ctx, scale, &minus_t, &minus_t, -1.0f));
    AR_TRY(ar_ctx_tensor(ctx, &difference, AR_F32, y->ndim, y->shape));
    AR_TRY(ARI_KERNEL(ctx, add, &difference, y, &minus_t));
    AR_TRY(ar_mul(ctx, &terms, &difference, &difference));
    AR_TRY(ar_loss_add(loss, ctx, &terms));
    ARI_RELEASE(ctx, &terms, &minus_t);
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_LOSS, .operation = "squared error", .name = s->name, .input = {y},
                    .out = {&difference}, .input_placement = &placement));
    return ar_saved_push(saved, self, 0, &difference);
}

static ar_status squared_backward(void *self, ar_loss *loss, ar_ctx *ctx, ar_saved *saved, ar_tensor *dy,
                                  const ar_batch *batch, double t)
{
    (void)loss, (void)batch;
    ar_tensor difference;
    AR_TRY(ar_saved_pop(saved, self, 0, &difference));
    AR_TRY(ar_ctx_tensor(ctx, dy, ctx->activations, difference.ndim, difference.shape));
    AR_TRY(ARI_KERNEL(ctx, scale, dy, &difference, t > 0.0 ? (float)(2.0 / t) : 0.0f));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_LOSS, .operation = "squared error", .input = {&difference}, .out = {dy}));
    return ar_tap_value(ctx, ((const squared_error *)self)->name, 'b', dy, AR_HELD_WHOLE);
}

ar_status ar_squared_error_create(ar_loss **out, ar_ctx *ctx, const char *name)
{
    static const ar_loss_ops ops = {.kind = "squared_error",
                                    .targets = squared_targets,
                                    .forward = squared_forward,
                                    .backward = squared_backward,
                                    .destroy = free};
    ARI_OWNED squared_error *s = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&s, 1, name));
    AR_TRY(ari_path(s->name, sizeof s->name, name, "output"));
    void *self = NULL;
    ARI_GIVE(&self, s);
    return ar_loss_create(out, ctx, name, &ops, self);
}
