/* SPDX-License-Identifier: Apache-2.0 */
/* Scaled dot-product attention with grouped KV heads, masks and RoPE: numerics.md section 4. Inside, tensors are
 * head-major, [b, heads, s, d], so that (query heads of a group x queries) is one strided dimension. */
#include "ref/baseline/run.h"

#include <math.h>

#include "ref/numerics/scalar.h"

/* --- heads -------------------------------------------------------------------------------------------------------- */

/* Columns [first, first + heads*d) of x [tokens, ld] to head-major. */
static void split_heads(const ari_bl_run *run, double *y, const double *x, size_t ld, size_t first, size_t heads,
                        size_t d)
{
    const size_t s = run->s;
    for (size_t n = 0; n < run->b; n++)
        for (size_t head = 0; head < heads; head++)
            for (size_t t = 0; t < s; t++)
                for (size_t i = 0; i < d; i++)
                    y[((n * heads + head) * s + t) * d + i] = x[(n * s + t) * ld + first + head * d + i];
}

/* The inverse. */
static void merge_heads(const ari_bl_run *run, double *x, size_t ld, size_t first, const double *y, size_t heads,
                        size_t d)
{
    const size_t s = run->s;
    for (size_t n = 0; n < run->b; n++)
        for (size_t head = 0; head < heads; head++)
            for (size_t t = 0; t < s; t++)
                for (size_t i = 0; i < d; i++)
                    x[(n * s + t) * ld + first + head * d + i] = y[((n * heads + head) * s + t) * d + i];
}

/* Emits a head-major tensor as [b, s, heads*d]. */
static ar_status emit_heads(ari_bl_run *run, const char *part, char pass, const double *y, size_t heads, size_t d)
{
    ARI_BL_SCOPE(run);
    const size_t features = heads * d;
    double *x = ari_bl_doubles(run, run->tokens, features);
    AR_TRY(run->memory);
    merge_heads(run, x, features, 0, y, heads, d);
    return ari_bl_emit_tokens(run, part, pass, x, features, 0, features);
}

/* --- softmax ------------------------------------------------------------------------------------------------------ */

static double exponential(const ari_bl_run *run, double x)
{
    return run->o->mode == AR_MODE_F64 ? ari_bl_fl(run, ari_exp64(x)) : (double)ari_exp32((float)x);
}

ARI_SIMD __attribute__((flatten)) void ari_bl_softmax(const ari_bl_run *run, double *p, const double *x,
                                                      const uint8_t *visible, size_t n, double *m, double *l)
{
    bool any = false, finite = true;
    double max = 0.0;
    for (size_t i = 0; i < n; i++) {
        p[i] = 0.0;
        if (visible != NULL && !visible[i])
            continue;
        finite = finite && ari_exponent64(x[i]) != ARI_EXP_NONFINITE;
        max = !any || x[i] > max ? x[i] : max;
        any = true;
    }
    *m = finite ? max + 0.0 : (double)ari_nan32(); /* + 0: -0 counts as +0 */
    *l = 0.0;
    if (!any)
        return;
    for (size_t i = 0; i < n; i++)
        if (visible == NULL || visible[i])
            p[i] = exponential(run, ari_bl_fl(run, x[i] - *m));
    *l = ari_bl_row_sum_below(run, p, n, 1); /* p <= 1 */
    for (size_t i = 0; i < n; i++)
        if (visible == NULL || visible[i])
            p[i] = ari_bl_fl(run, p[i] / *l);
}

/* visible[key] for one query, and the finite mask entries added to its scores. */
static void mask_row(const ari_bl_run *run, uint8_t *visible, double *scores, size_t sample, size_t head, size_t query)
{
    const ar_batch *batch = run->batch;
    const size_t s = run->s;
    const float *additive = NULL;
    if (batch->additive_mask != NULL) {
        const size_t n = batch->mask_batch == 1 ? 0 : sample, a = batch->mask_heads == 1 ? 0 : head;
        additive = batch->additive_mask + ((n * batch->mask_heads + a) * s + query) * s;
    }
    for (size_t key = 0; key < s; key++) {
        visible[key] = !(run->c->causal && key > query) && !ari_bl_apart(batch, sample, query, key) &&
                       !(run->window > 0 && query >= key && query - key >= run->window) &&
                       !(batch->padding_mask != NULL && batch->padding_mask[sample * s + key] == 0) &&
                       !(additive != NULL && isinf(additive[key]));
        if (scores != NULL && additive != NULL && visible[key])
            scores[key] = ari_bl_branch(run, scores[key] + (double)additive[key]);
    }
}

double ari_bl_cap(double x, double c)
{
    return c * ari_tanh64(x / c);
}

/* The slope of c*tanh(x/c) is 1 - tanh^2. */
double ari_bl_uncap(double dy, double x, double c)
{
    const double t = ari_tanh64(x / c);
    return dy == 0.0 ? 0.0 : dy * ((1.0 - t) * (1.0 + t));
}

static double scale_of(const ari_bl_run *run)
{
    const double n = run->c->query_scalar > 0.0 ? run->c->query_scalar : (double)run->c->head_dim;
    return ari_bl_fl(run, 1.0 / sqrt(n));
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

/* Probabilities [s, s] of one head of one sample, and sunk [s], that of its sink, a logit more of each row which sees a
 * key. bare [s, s]: the scores before capping; NULL: they are not capped. */
static ar_status head_probs(ari_bl_run *run, size_t sample, size_t head, double *probs, double *bare, double *sunk,
                            const double *sink, const double *q, const double *k)
{
    ARI_BL_SCOPE(run);
    const size_t s = run->s, d = run->c->head_dim;
    double *scores = ari_bl_doubles(run, s, s), *logits = ari_bl_doubles(run, 2, s + 1), *p = logits + s + 1;
    uint8_t *visible = ari_bl_take(run, s + 1, 1, 1);
    AR_TRY(run->memory);
    const ari_bl_matrix q_rows = {q, d, 1}, k_rows = {k, d, 1};
    AR_TRY(ari_bl_contract(run, scores, s, s, d, q_rows, k_rows, ARI_BL_PLAIN));
    const double scale = scale_of(run);
    for (size_t query = 0; query < s; query++) {
        double *row = scores + query * s, m, l;
        for (size_t key = 0; key < s; key++)
            row[key] = ari_bl_branch(run, row[key] * scale);
        for (size_t key = 0; bare != NULL && key < s; key++) {
            bare[query * s + key] = row[key];
            row[key] = ari_bl_branch(run, ari_bl_cap(row[key], run->c->score_cap));
        }
        mask_row(run, visible, row, sample, head, query);
        double *most = run->largest == NULL ? NULL : run->largest + head / (run->c->heads / run->c->kv_heads);
        for (size_t key = 0; most != NULL && key < s; key++)
            *most = visible[key] && row[key] > *most ? row[key] : *most;
        visible[s] = 0;
        for (size_t key = 0; key < s; key++) {
            logits[key] = row[key];
            visible[s] |= visible[key];
        }
        logits[s] = sink != NULL ? *sink : 0.0;
        ari_bl_softmax(run, p, logits, visible, sink != NULL ? s + 1 : s, &m, &l);
        for (size_t key = 0; key < s; key++)
            probs[query * s + key] = p[key];
        if (sink != NULL)
            sunk[query] = p[s];
        for (size_t key = 0; run->noise != NULL && key < s; key++)
            probs[query * s + key] = ari_bl_branch(run, probs[query * s + key]);
    }
    return AR_OK;
}

static ar_status emit_probs(ari_bl_run *run, char pass, const double *probs)
{
    const size_t shape[4] = {run->b, run->c->heads, run->s, run->s};
    return ari_bl_emit(run, run->names->probs, pass, 4, shape, probs);
}

/* y, head-major: columns [first, first + heads*d) of x [tokens, ld] normalised. */
static ar_status normalise(ari_bl_run *run, const ari_bl_norm *norm, ari_bl_norm_saved *saved, double *y,
                           const double *x, size_t ld, size_t first, size_t heads)
{
    const size_t width = heads * run->c->head_dim;
    double *rows = ari_bl_doubles(run, run->tokens, width);
    AR_TRY(run->memory);
    for (size_t t = 0; t < run->tokens; t++)
        for (size_t i = 0; i < width; i++)
            rows[t * width + i] = x[t * ld + first + i];
    AR_TRY(ari_bl_norm_forward(run, norm, saved, rows));
    split_heads(run, y, saved->y, width, 0, heads, run->c->head_dim);
    return AR_OK;
}

/* The way back: g, head-major, from the gradient of what was normalised to that of what it was made of. */
static ar_status normalise_backward(ari_bl_run *run, const ari_bl_norm *norm, const ari_bl_norm_saved *saved, double *g,
                                    size_t heads)
{
    ARI_BL_SCOPE(run);
    const size_t width = heads * run->c->head_dim;
    double *dy = ari_bl_doubles(run, run->tokens, width), *dx = ari_bl_doubles(run, run->tokens, width);
    AR_TRY(run->memory);
    merge_heads(run, dy, width, 0, g, heads, run->c->head_dim);
    AR_TRY(ari_bl_norm_backward(run, norm, dx, NULL, NULL, dy, saved));
    AR_TRY(ari_bl_norm_gradients(run, norm, dy, saved));
    split_heads(run, g, dx, width, 0, heads, run->c->head_dim);
    return AR_OK;
}

/* q, k, v as they leave the projections, and as they enter the scores. */
static ar_status split_qkv(ari_bl_run *run, ari_bl_attention *a, const ari_bl_norm norm[2], const double *qkv)
{
    const ari_bl_names *names = run->names;
    const size_t heads = run->c->heads, groups = run->c->kv_heads, d = run->c->head_dim;
    const size_t values = ar_config_value_dim(run->c), q_width = heads * d, kv_width = groups * d;
    const size_t ld = q_width + kv_width + groups * values;
    split_heads(run, a->q, qkv, ld, 0, heads, d);
    split_heads(run, a->k, qkv, ld, q_width, groups, d);
    split_heads(run, a->v, qkv, ld, q_width + kv_width, groups, values);
    for (size_t i = 0, at = 0, width[3] = {q_width, kv_width, groups * values}; i < 3; at += width[i++])
        if (names->qkv[i] != NULL)
            AR_TRY(ari_bl_emit_tokens(run, names->qkv[i], 'f', qkv, ld, at, width[i]));
    if (run->c->qk_norm != AR_QK_NORM_NONE) {
        AR_TRY(normalise(run, &norm[0], &a->normed[0], a->q, qkv, ld, 0, heads));
        AR_TRY(normalise(run, &norm[1], &a->normed[1], a->k, qkv, ld, q_width, groups));
    }
    if (run->rope->kind == AR_ROPE_NONE)
        return AR_OK;
    ari_bl_rotate(run, a->q, heads, 1.0);
    ari_bl_rotate(run, a->k, groups, 1.0);
    AR_TRY(emit_heads(run, names->rope[0], 'f', a->q, heads, d));
    return emit_heads(run, names->rope[1], 'f', a->k, groups, d);
}

/* The heads of all samples, [b, H], which do not depend on one another; backward those of a KV head meet. */
typedef struct all_heads {
    const ari_bl_attention *a;
    const ari_bl_params *p;
    double *out, *dout, *dq, *dk, *dv, *dp, *ds, *dot; /* head-major, or [b, H, s, s]; dot [b, H, s] */
} all_heads;

static size_t members_of(const ari_bl_run *run)
{
    return run->c->heads / run->c->kv_heads; /* heads of a sample are a multiple: at / members is n*groups + group */
}

static ar_status probs_of_head(ari_bl_run *run, void *of, size_t at)
{
    const all_heads *h = of;
    const ari_bl_attention *a = h->a;
    const size_t heads = run->c->heads, s = run->s, d = run->c->head_dim;
    return head_probs(run, at / heads, at % heads, a->probs + at * s * s, a->bare == NULL ? NULL : a->bare + at * s * s,
                      a->sunk == NULL ? NULL : a->sunk + at * s, h->p->sinks == NULL ? NULL : h->p->sinks + at % heads,
                      a->q + at * s * d, a->k + at / members_of(run) * s * d);
}

static ar_status context_of_head(ari_bl_run *run, void *of, size_t at)
{
    const all_heads *h = of;
    const size_t s = run->s, values = ar_config_value_dim(run->c);
    const ari_bl_matrix p_rows = {h->a->dropped + at * s * s, s, 1},
                        v_columns = {h->a->v + at / members_of(run) * s * values, 1, values};
    return ari_bl_contract(run, h->out + at * s * values, s, values, s, p_rows, v_columns, ARI_BL_SCALED);
}

ar_status ari_bl_attention_forward(ari_bl_run *run, ari_bl_attention *a, const ari_bl_params *p, const double *qkv)
{
    const size_t heads = run->c->heads, groups = run->c->kv_heads, s = run->s, d = run->c->head_dim;
    const size_t values = ar_config_value_dim(run->c);
    a->q = ari_bl_doubles(run, run->tokens, heads * d);
    a->k = ari_bl_doubles(run, run->tokens, groups * d);
    a->v = ari_bl_doubles(run, run->tokens, groups * values);
    a->probs = ari_bl_doubles(run, run->tokens * heads, s);
    a->context = ari_bl_doubles(run, run->tokens, heads * values);
    a->dropped = run->o->dropout > 0.0 ? ari_bl_doubles(run, run->tokens * heads, s) : a->probs;
    a->bare = run->c->score_cap > 0.0 ? ari_bl_doubles(run, run->tokens * heads, s) : NULL;
    a->sunk = p->sinks != NULL ? ari_bl_doubles(run, run->tokens, heads) : NULL;
    AR_TRY(run->memory);
    AR_TRY(split_qkv(run, a, p->qk_norm, qkv));
    const ari_bl_memory *mark = run->top;
    double *out = ari_bl_doubles(run, run->tokens, heads * values);
    AR_TRY(run->memory);
    run->largest = p->largest;
    all_heads all = {.a = a, .p = p, .out = out};
    for (size_t at = 0; p->largest != NULL && at < run->b * heads; at++) /* which all of them raise */
        AR_TRY(probs_of_head(run, &all, at));
    if (p->largest == NULL)
        AR_TRY(ari_bl_each(run, run->b * heads, probs_of_head, &all));
    AR_TRY(emit_probs(run, 'f', a->probs));
    if (run->o->dropout > 0.0)
        AR_TRY(ari_bl_dropout(run, run->names->drop_probs, 'f', a->dropped, a->probs, heads, s));
    AR_TRY(ari_bl_each(run, run->b * heads, context_of_head, &all));
    ari_bl_keep_all(run, out, run->tokens * heads * values);
    merge_heads(run, a->context, heads * values, 0, out, heads, values);
    ari_bl_release(run, mark);
    return ari_bl_emit_tokens(run, run->names->context, 'f', a->context, heads * values, 0, heads * values);
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

/* +0 in dP [s, s] at masked keys, and dS [s, s] of one head: dS = fl32(fl32(Pr*(dP - D))*scale), D = sum of Pr*dP, which
 * goes to dot [s]. */
static ar_status head_backward(ari_bl_run *run, size_t sample, size_t head, double *dp, double *ds, double *dot,
                               const double *probs, const double *bare)
{
    ARI_BL_SCOPE(run);
    const size_t s = run->s;
    double *products = ari_bl_doubles(run, s, 1);
    uint8_t *visible = ari_bl_take(run, s, 1, 1);
    AR_TRY(run->memory);
    const double scale = scale_of(run);
    for (size_t query = 0; query < s; query++) {
        const double *p = probs + query * s;
        double *dp_row = dp + query * s, *ds_row = ds + query * s;
        mask_row(run, visible, NULL, sample, head, query);
        for (size_t key = 0; key < s; key++) {
            dp_row[key] = visible[key] ? dp_row[key] : 0.0;
            products[key] = p[key] * dp_row[key];
        }
        const double sum = ari_bl_row_sum(run, products, s);
        dot[query] = sum;
        for (size_t key = 0; key < s; key++)
            if (visible[key]) {
                double d = ari_bl_branch(run, p[key] * (dp_row[key] - sum));
                if (bare != NULL)
                    d = ari_bl_branch(run, ari_bl_uncap(d, bare[query * s + key], run->c->score_cap));
                ds_row[key] = ari_bl_branch(run, d * scale);
            }
    }
    return AR_OK;
}

static ar_status dp_of_head(ari_bl_run *run, void *of, size_t at)
{
    const all_heads *h = of;
    const size_t s = run->s, values = ar_config_value_dim(run->c);
    const ari_bl_matrix dout_rows = {h->dout + at * s * values, values, 1},
                        v_rows = {h->a->v + at / members_of(run) * s * values, values, 1};
    return ari_bl_contract(run, h->dp + at * s * s, s, s, values, dout_rows, v_rows, ARI_BL_PLAIN);
}

static ar_status ds_of_head(ari_bl_run *run, void *of, size_t at)
{
    const all_heads *h = of;
    const size_t heads = run->c->heads, s = run->s;
    return head_backward(run, at / heads, at % heads, h->dp + at * s * s, h->ds + at * s * s, h->dot + at * s,
                         h->a->probs + at * s * s, h->a->bare == NULL ? NULL : h->a->bare + at * s * s);
}

/* The gradients of KV head kv of [b, G]. dK and dV are one contraction over (query heads of the group x queries), dQ one
 * per query head. V met the probabilities after dropout. */
static ar_status gradients_of_kv_head(ari_bl_run *run, void *of, size_t kv)
{
    const all_heads *h = of;
    const size_t s = run->s, d = run->c->head_dim, members = members_of(run), at = kv * members; /* its first head */
    const size_t values = ar_config_value_dim(run->c);
    double *dq = h->dq + at * s * d, *dk = h->dk + kv * s * d, *dv = h->dv + kv * s * values;
    const double *ds = h->ds + at * s * s;
    const ari_bl_matrix ds_columns = {ds, 1, s}, p_columns = {h->a->dropped + at * s * s, 1, s};
    const ari_bl_matrix q_columns = {h->a->q + at * s * d, 1, d}, k_columns = {h->a->k + kv * s * d, 1, d};
    const ari_bl_matrix dout_columns = {h->dout + at * s * values, 1, values};
    for (size_t member = 0; member < members; member++) {
        const ari_bl_matrix ds_rows = {ds + member * s * s, s, 1};
        AR_TRY(ari_bl_contract(run, dq + member * s * d, s, d, s, ds_rows, k_columns, ARI_BL_SCALED));
    }
    ari_bl_keep_all(run, dq, members * s * d);
    AR_TRY(ari_bl_contract(run, dk, s, d, members * s, ds_columns, q_columns, ARI_BL_SCALED));
    AR_TRY(ari_bl_contract(run, dv, s, values, members * s, p_columns, dout_columns, ARI_BL_SCALED));
    ari_bl_keep_all(run, dk, s * d);
    ari_bl_keep_all(run, dv, s * values);
    return AR_OK;
}

/* Gradients at the scores' inputs back to the projections' outputs, emitted on the way. */
static ar_status finish_qkv(ari_bl_run *run, double *dqkv, double *dq, double *dk, const double *dv,
                            const ari_bl_norm norm[2], const ari_bl_norm_saved normed[2])
{
    const ari_bl_names *names = run->names;
    const size_t heads = run->c->heads, groups = run->c->kv_heads, d = run->c->head_dim;
    const size_t values = ar_config_value_dim(run->c), q_width = heads * d, kv_width = groups * d;
    const size_t ld = q_width + kv_width + groups * values;
    if (run->rope->kind != AR_ROPE_NONE) {
        AR_TRY(emit_heads(run, names->rope[0], 'b', dq, heads, d));
        AR_TRY(emit_heads(run, names->rope[1], 'b', dk, groups, d));
        ari_bl_rotate(run, dq, heads, -1.0);
        ari_bl_rotate(run, dk, groups, -1.0);
    }
    if (run->c->qk_norm != AR_QK_NORM_NONE) {
        AR_TRY(normalise_backward(run, &norm[0], &normed[0], dq, heads));
        AR_TRY(normalise_backward(run, &norm[1], &normed[1], dk, groups));
    }
    AR_TRY(emit_heads(run, names->dqkv[2], 'b', dv, groups, values));
    AR_TRY(emit_heads(run, names->dqkv[0], 'b', dq, heads, d));
    AR_TRY(emit_heads(run, names->dqkv[1], 'b', dk, groups, d));
    merge_heads(run, dqkv, ld, 0, dq, heads, d);
    merge_heads(run, dqkv, ld, q_width, dk, groups, d);
    merge_heads(run, dqkv, ld, q_width + kv_width, dv, groups, values);
    return AR_OK;
}

/* A sink has no value, so that of its probability the gradient is 0 and that of the logit -p*D: a term of each row. */
static ar_status sink_gradient(ari_bl_run *run, const double *sunk, const double *dot)
{
    ARI_BL_SCOPE(run);
    const size_t heads = run->c->heads, s = run->s;
    double *values = ari_bl_doubles(run, run->tokens, heads), *gradient = ari_bl_doubles(run, heads, 1);
    AR_TRY(run->memory);
    for (size_t at = 0; at < run->b * heads; at++)
        for (size_t query = 0; query < s; query++)
            values[(at / heads * s + query) * heads + at % heads] =
                ari_bl_branch(run, -(sunk[at * s + query] * dot[at * s + query]));
    const ari_bl_terms terms = {.values = values, .stream = true};
    AR_TRY(ari_bl_gradient(run, gradient, 1, heads, &terms));
    return ari_bl_emit_gradient(run, run->names->sinks, "", heads, 0, gradient);
}

ar_status ari_bl_attention_backward(ari_bl_run *run, double *dqkv, const double *dcontext, const ari_bl_params *p,
                                    const ari_bl_attention *a)
{
    ARI_BL_SCOPE(run);
    const size_t heads = run->c->heads, groups = run->c->kv_heads, s = run->s, d = run->c->head_dim;
    const size_t values = ar_config_value_dim(run->c);
    double *dout = ari_bl_doubles(run, run->tokens, heads * values), *dq = ari_bl_doubles(run, run->tokens, heads * d);
    double *dk = ari_bl_doubles(run, run->tokens, groups * d), *dv = ari_bl_doubles(run, run->tokens, groups * values);
    double *dp = ari_bl_doubles(run, run->tokens * heads, s), *ds = ari_bl_doubles(run, run->tokens * heads, s);
    double *dot = ari_bl_doubles(run, run->tokens, heads);
    AR_TRY(run->memory);
    split_heads(run, dout, dcontext, heads * values, 0, heads, values);
    all_heads all = {.a = a, .dout = dout, .dq = dq, .dk = dk, .dv = dv, .dp = dp, .ds = ds, .dot = dot};
    AR_TRY(ari_bl_each(run, run->b * heads, dp_of_head, &all));
    if (run->o->dropout > 0.0)
        AR_TRY(ari_bl_dropout(run, run->names->drop_probs, 0, dp, dp, heads, s));
    AR_TRY(ari_bl_each(run, run->b * heads, ds_of_head, &all));
    AR_TRY(emit_probs(run, 'b', dp));
    if (a->sunk != NULL)
        AR_TRY(sink_gradient(run, a->sunk, dot));
    AR_TRY(ari_bl_each(run, run->b * groups, gradients_of_kv_head, &all));
    return finish_qkv(run, dqkv, dq, dk, dv, p->qk_norm, a->normed);
}
