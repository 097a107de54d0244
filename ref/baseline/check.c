/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of the caller's arguments. */
#include "anyrank/activation.h"
#include "anyrank/config.h"
#include "anyrank/rope.h"
#include "ref/baseline/run.h"

#include <math.h>

#include "ref/core/size.h"

static ar_status check_rope(const ar_config *c, const ar_rope *r)
{
    const size_t turning = ar_rope_dim(r, c->head_dim);
    if (r->kind == AR_ROPE_NONE)
        return AR_OK;
    if (turning % 2 != 0 || turning > c->head_dim || !(r->theta > 0.0) ||
        (r->kind != AR_ROPE_DEFAULT && !(r->factor > 0.0)))
        return ar_error_set(AR_ERR_ARG,
                            "baseline: rope of %zu features with head_dim %zu, theta %g, factor %g: expected an even "
                            "number of them and positive numbers",
                            turning, c->head_dim, r->theta, r->factor);
    if (r->kind == AR_ROPE_LLAMA3 &&
        !(r->original_positions > 0 && r->low_freq_factor > 0.0 && r->high_freq_factor > r->low_freq_factor))
        return ar_error_set(AR_ERR_ARG,
                            "baseline: rope of Llama 3 of %zu positions with low_freq_factor %g, high_freq_factor %g: "
                            "expected positive numbers, the third above the second",
                            r->original_positions, r->low_freq_factor, r->high_freq_factor);
    if (r->kind == AR_ROPE_LONGROPE && turning / 2 > AR_ROPE_PAIRS)
        return ar_error_set(AR_ERR_ARG, "baseline: longrope of %zu pairs, expected at most %d", turning / 2,
                            AR_ROPE_PAIRS);
    return AR_OK;
}

/* Experts have the form of a gated MLP of two parameters for gate and up, and no biases. */
static ar_status check_experts(const ar_config *c, const ar_baseline_options *o)
{
    const ar_experts *x = &c->experts;
    const ari_bl_names *names = ari_bl_names_of(c->arch);
    if (x->n == 0)
        return AR_OK;
    if (x->per_token == 0 || x->per_token > x->n || x->ffn == 0)
        return ar_error_set(AR_ERR_ARG, "baseline: %zu experts of width %zu, %zu a token: expected 1 to %zu a token",
                            x->n, x->ffn, x->per_token, x->n);
    const bool kinks = c->activation == AR_ACT_RELU && o->kink;
    if (!c->gated || names->fc_param[1] == NULL || c->mlp_bias || kinks)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "baseline: experts%s%s: expected Llama's form, without biases, and without relu where "
                            "slopes are in doubt (native numerics)",
                            c->mlp_bias ? " with biases" : "", kinks ? " with relu" : "");
    return AR_OK;
}

static ar_status check_config(const ar_config *c, const ar_baseline_options *o)
{
    if (c->vocab == 0 || c->hidden == 0 || c->heads == 0 || c->kv_heads == 0 || c->head_dim == 0 || c->ffn == 0)
        return ar_error_set(
            AR_ERR_ARG,
            "baseline: vocab %zu, hidden %zu, heads %zu, kv_heads %zu, head_dim %zu, ffn %zu: expected all above 0",
            c->vocab, c->hidden, c->heads, c->kv_heads, c->head_dim, c->ffn);
    if (c->heads % c->kv_heads != 0)
        return ar_error_set(AR_ERR_ARG, "baseline: %zu heads over %zu kv_heads: expected a multiple", c->heads,
                            c->kv_heads);
    AR_TRY(check_rope(c, &c->rope));
    AR_TRY(check_rope(c, &c->local_rope));
    const ari_bl_names *names = ari_bl_names_of(c->arch);
    if (names == NULL)
        return ar_error_set(AR_ERR_UNSUPPORTED, "baseline: no names for architecture %d", (int)c->arch);
    const bool gated = names->fc[1] != NULL, learned = names->positions != NULL;
    if (c->gated != gated || c->learned_positions != learned)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "baseline: gated %d and learned_positions %d in architecture %d: expected %d and %d, as "
                            "docs/reference/models.md names its parts",
                            c->gated, c->learned_positions, (int)c->arch, gated, learned);
    return check_experts(c, o);
}

/* Checks that every row's documents are numbered 0, 1, 2, .. in order. */
static ar_status check_documents(const ar_batch *batch)
{
    int64_t document = 0;
    for (size_t i = 0; batch->documents != NULL && i < batch->batch * batch->seq; i++) {
        const bool is_row_start = i % batch->seq == 0;
        const int64_t min_document = is_row_start ? 0 : document, max_document = is_row_start ? 0 : document + 1;
        document = batch->documents[i];
        if (document < min_document || document > max_document)
            return ar_error_set(AR_ERR_DATA, "baseline: documents[%zu, %zu] is %lld, expected %lld%s", i / batch->seq,
                                i % batch->seq, (long long)document, (long long)min_document,
                                is_row_start ? "" : " or one more");
    }
    return AR_OK;
}

static ar_status check_masks(const ar_config *c, const ar_batch *batch)
{
    const size_t b = batch->batch, s = batch->seq;
    if (batch->padding_mask != NULL)
        for (size_t i = 0; i < b * s; i++)
            if (batch->padding_mask[i] > 1)
                return ar_error_set(AR_ERR_DATA, "baseline: padding_mask[%zu, %zu] is %u, expected 0 or 1", i / s,
                                    i % s, (unsigned)batch->padding_mask[i]);
    for (size_t i = 0; batch->position_ids != NULL && i < b * s; i++)
        if (batch->position_ids[i] < 0 || (uint64_t)batch->position_ids[i] >= c->max_positions)
            return ar_error_set(AR_ERR_DATA, "baseline: position_ids[%zu, %zu] is %lld, expected 0 to %zu", i / s,
                                i % s, (long long)batch->position_ids[i], c->max_positions - 1);
    if (batch->additive_mask == NULL)
        return AR_OK;
    const size_t n = batch->mask_batch, a = batch->mask_heads;
    if ((n != 1 && n != b) || (a != 1 && a != c->heads))
        return ar_error_set(AR_ERR_ARG, "baseline: additive_mask is [%zu, %zu, s, s], expected [1 or %zu, 1 or %zu]", n,
                            a, b, c->heads);
    for (size_t i = 0; i < n * a * s * s; i++) {
        const float x = batch->additive_mask[i];
        if (isnan(x) || (isinf(x) && x > 0.0F))
            return ar_error_set(AR_ERR_DATA,
                                "baseline: additive_mask[%zu, %zu, %zu, %zu] is %g, expected a finite value or -inf",
                                i / (s * s * a), i / (s * s) % a, i / s % s, i % s, (double)x);
    }
    return AR_OK;
}

/* Checks training options; ari_optimizer_check checks the optimizer's ranges. */
static ar_status check_training(const ar_baseline_options *o)
{
    const ar_optimizer_kind kind = o->optimizer.kind;
    if (!(o->dropout >= 0.0 && o->dropout < 1.0))
        return ar_error_set(AR_ERR_ARG, "baseline: dropout %g: expected a probability, at least 0 and below 1",
                            o->dropout);
    if (!(o->loss.label_smoothing >= 0.0 && o->loss.label_smoothing < 1.0) || !(o->loss.z_loss >= 0.0) ||
        isinf(o->loss.z_loss))
        return ar_error_set(AR_ERR_ARG,
                            "baseline: label smoothing %g, z-loss %g: expected a share from 0 to below 1 and a finite "
                            "weight from 0",
                            o->loss.label_smoothing, o->loss.z_loss);
    const ar_router_losses *r = &o->loss.router;
    if ((int)r->balance < 0 || r->balance >= AR_BALANCES || !(r->balance_weight >= 0.0) || isinf(r->balance_weight) ||
        !(r->z_loss >= 0.0) || isinf(r->z_loss) || !(r->bias_update >= 0.0) || isinf((float)r->bias_update))
        return ar_error_set(
            AR_ERR_ARG,
            "baseline: balance %d of weight %g, z-loss %g of routers, their bias by %g: finite numbers from 0",
            (int)r->balance, r->balance_weight, r->z_loss, r->bias_update);
    if (o->noise_seed != 0 && o->mode != AR_MODE_F64)
        return ar_error_set(AR_ERR_ARG, "baseline: noise in number mode %d: only binary64 takes it", (int)o->mode);
    if (o->steps < 0 || (o->steps > 0 && o->forward_only))
        return ar_error_set(AR_ERR_ARG, "baseline: %d steps, %s: expected 0 or more, and 0 of a forward pass alone",
                            o->steps, o->forward_only ? "forward only" : "forward and backward");
    if (!(o->clip >= 0.0) || isinf(o->clip))
        return ar_error_set(AR_ERR_ARG, "baseline: clip %g: expected a finite norm, at least 0", o->clip);
    if (kind < AR_OPTIMIZER_SGD || kind > AR_OPTIMIZER_MUON)
        return ar_error_set(AR_ERR_ARG, "baseline: optimizer %d", (int)kind);
    return AR_OK;
}

ar_status ari_bl_check(const ar_config *c, const ar_baseline_options *o, const ar_batch *batch)
{
    if (c == NULL || o == NULL || batch == NULL)
        return ar_error_set(AR_ERR_ARG, "baseline: config, options or batch is NULL");
    if (o->mode != AR_MODE_EXACT && o->mode != AR_MODE_FP32 && o->mode != AR_MODE_F64)
        return ar_error_set(AR_ERR_ARG, "baseline: number mode %d", (int)o->mode);
    AR_TRY(check_config(c, o));
    if (ari_bl_names_of(c->arch)->head == NULL && (o->loss.label_smoothing > 0.0 || o->loss.z_loss > 0.0))
        return ar_error_set(AR_ERR_ARG, "baseline: label smoothing or z-loss of architecture %d, which has no logits",
                            (int)c->arch);
    return check_training(o);
}

/* The largest index of an element at a dropout site, every sequence being as long as the model allows. */
static ar_status check_dropout(const ar_config *c, const ar_batch *batch)
{
    size_t rows = 0, probs = 0;
    AR_TRY(ari_mul_size(&rows, batch->batch, c->max_positions));
    AR_TRY(ari_mul_size(&probs, rows, c->heads));
    AR_TRY(ari_mul_size(&probs, probs, c->max_positions));
    return ari_mul_size(&rows, rows, c->hidden);
}

ar_status ari_bl_check_batch(const ar_config *c, const ar_baseline_options *o, const ar_batch *batch)
{
    if (o->dropout > 0.0)
        AR_TRY(check_dropout(c, batch));
    if (batch->batch == 0 || batch->seq == 0)
        return ar_error_set(AR_ERR_ARG, "baseline: batch %zu, seq %zu: expected both above 0", batch->batch,
                            batch->seq);
    if (batch->seq > c->max_positions)
        return ar_error_set(AR_ERR_ARG, "baseline: seq %zu is longer than max_positions %zu", batch->seq,
                            c->max_positions);
    if (c->rope.kind && batch->seq >= (size_t)1 << 20) /* the domain of the shared sine and cosine */
        return ar_error_set(AR_ERR_UNSUPPORTED, "baseline: seq %zu with rope, expected below 2^20", batch->seq);
    AR_TRY(check_documents(batch));
    return check_masks(c, batch);
}

bool ari_bl_in_different_documents(const ar_batch *batch, size_t sample, size_t t, size_t u)
{
    const int32_t *documents = batch->documents;
    return documents != NULL && documents[sample * batch->seq + t] != documents[sample * batch->seq + u];
}

size_t ari_bl_position(const ar_batch *batch, size_t sample, size_t t)
{
    if (batch->position_ids != NULL)
        return (size_t)batch->position_ids[sample * batch->seq + t];
    size_t document_start = batch->documents != NULL ? t : 0;
    while (document_start > 0 && !ari_bl_in_different_documents(batch, sample, document_start - 1, t))
        document_start--;
    return t - document_start;
}

int64_t ari_bl_target(const ar_batch *batch, size_t row, size_t position)
{
    const int64_t *labels = batch->labels != NULL ? batch->labels : batch->input_ids;
    if (position + 1 == batch->seq ||
        (!batch->targets_cross && ari_bl_in_different_documents(batch, row, position, position + 1)))
        return AR_IGNORE_INDEX;
    return labels[row * batch->seq + position + 1];
}

ar_status ari_bl_check_tokens(const ar_config *c, const ar_batch *batch)
{
    if (batch->input_ids == NULL)
        return ar_error_set(AR_ERR_ARG, "baseline: input_ids is NULL");
    for (size_t i = 0; i < batch->batch * batch->seq; i++) {
        const int64_t id = batch->input_ids[i];
        if (id < 0 || (uint64_t)id >= c->vocab)
            return ar_error_set(AR_ERR_DATA, "baseline: input_ids[%zu, %zu] is %lld, expected 0 to %zu", i / batch->seq,
                                i % batch->seq, (long long)id, c->vocab - 1);
    }
    for (size_t n = 0; n < batch->batch; n++)
        for (size_t t = 0; t < batch->seq; t++) {
            const int64_t target = ari_bl_target(batch, n, t);
            if (target != AR_IGNORE_INDEX && (target < 0 || (uint64_t)target >= c->vocab))
                return ar_error_set(AR_ERR_DATA, "baseline: labels[%zu, %zu] is %lld, expected 0 to %zu or %d", n,
                                    t + 1, (long long)target, c->vocab - 1, AR_IGNORE_INDEX);
        }
    return AR_OK;
}
