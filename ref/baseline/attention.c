/* SPDX-License-Identifier: Apache-2.0 */
/* Scaled dot-product attention with grouped KV heads, masks and RoPE: numerics.md section 4. Internally tensors are
 * stored head by head, [b, heads, s, d], so that (query heads of a group x queries) is one strided dimension. */
#include "anyrank/config.h"
#include "ref/baseline/run.h"

#include <math.h>
#include <stdio.h>

#include "ref/numerics/digest.h"
#include "ref/numerics/elementary.h"

/* --- heads -------------------------------------------------------------------------------------------------------- */

/* Columns [first_col, first_col + heads*d) of x [tokens, ld] to head-major. */
static void split_heads(const ari_bl_run *run, double *y, const double *x, size_t ld, size_t first_col, size_t heads,
                        size_t d)
{
    const size_t s = run->s;
    for (size_t n = 0; n < run->b; n++)
        for (size_t head = 0; head < heads; head++)
            for (size_t t = 0; t < s; t++)
                for (size_t i = 0; i < d; i++)
                    y[((n * heads + head) * s + t) * d + i] = x[(n * s + t) * ld + first_col + head * d + i];
}

/* The inverse. */
static void merge_heads(const ari_bl_run *run, double *x, size_t ld, size_t first_col, const double *y, size_t heads,
                        size_t d)
{
    const size_t s = run->s;
    for (size_t n = 0; n < run->b; n++)
        for (size_t head = 0; head < heads; head++)
            for (size_t t = 0; t < s; t++)
                for (size_t i = 0; i < d; i++)
                    x[(n * s + t) * ld + first_col + head * d + i] = y[((n * heads + head) * s + t) * d + i];
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

/* A query of a head, and some of its keys. */
typedef struct score_row {
    size_t sample, head, query, first_key, keys;
} score_row;

/* visible[i] of each of the keys, and the finite mask entries added to their scores. */
static void mask_row(const ari_bl_run *run, uint8_t *visible, double *scores, const score_row *query_row)
{
    const ar_batch *batch = run->batch;
    const size_t s = run->s, query = query_row->query;
    const float *additive = NULL;
    if (batch->additive_mask != NULL) {
        const size_t n = batch->mask_batch == 1 ? 0 : query_row->sample,
                     a = batch->mask_heads == 1 ? 0 : query_row->head;
        additive = batch->additive_mask + ((n * batch->mask_heads + a) * s + query) * s + query_row->first_key;
    }
    for (size_t i = 0; i < query_row->keys; i++) {
        const size_t key = query_row->first_key + i;
        visible[i] = !(run->c->causal && key > query) &&
                     !ari_bl_in_different_documents(batch, query_row->sample, query, key) &&
                     !(run->window > 0 && query >= key && query - key >= run->window) &&
                     !(batch->padding_mask != NULL && batch->padding_mask[query_row->sample * s + key] == 0) &&
                     !(additive != NULL && isinf(additive[i]));
        if (scores != NULL && additive != NULL && visible[i])
            scores[i] = ari_bl_branch(run, scores[i] + (double)additive[i]);
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

/* Computes a row's logits from its products q k^T. bare: receives the scores before capping; NULL: no capping. */
static void logits_of(const ari_bl_run *run, double *row, double *bare, uint8_t *visible, const score_row *query_row,
                      double scale)
{
    for (size_t i = 0; i < query_row->keys; i++)
        row[i] = ari_bl_branch(run, row[i] * scale);
    for (size_t i = 0; bare != NULL && i < query_row->keys; i++) {
        bare[i] = row[i];
        row[i] = ari_bl_branch(run, ari_bl_cap(row[i], run->c->score_cap));
    }
    mask_row(run, visible, row, query_row);
}

/* Queries [first_query, first_query + rows) of a head of [b, H], with all keys. */
typedef struct band {
    size_t head, first_query, rows;
    double *probs, *bare; /* [rows, s]; bare: the scores before capping; NULL: no capping */
} band;

/* Computes the band's probabilities, the largest logits and sums of its rows, and the saved values of sinks: the
 * probability of an additional logit in each row that sees a key. */
static ar_status band_probs(ari_bl_run *run, const band *b, const ari_bl_attention *a, const ari_bl_params *p)
{
    ARI_BL_SCOPE(run);
    const size_t s = run->s, d = run->c->head_dim, heads = run->c->heads, group = heads / run->c->kv_heads;
    const size_t row = b->head * s + b->first_query, head = b->head % heads;
    double *scores = ari_bl_doubles(run, b->rows, s), *logits = ari_bl_doubles(run, 2, s + 1), *pr = logits + s + 1;
    uint8_t *visible = ari_bl_take(run, s + 1, 1, 1);
    AR_TRY(run->memory);
    const ari_bl_matrix q_rows = {a->q + row * d, d, 1}, k_rows = {a->k + b->head / group * s * d, d, 1};
    AR_TRY(ari_bl_contract(run, scores, b->rows, s, d, q_rows, k_rows, ARI_BL_PLAIN));
    const double scale = scale_of(run);
    for (size_t r = 0; r < b->rows; r++) {
        const score_row query_row = {b->head / heads, head, b->first_query + r, 0, s};
        double *x = scores + r * s, *probs = b->probs + r * s;
        logits_of(run, x, b->bare == NULL ? NULL : b->bare + r * s, visible, &query_row, scale);
        double *max_logit = run->largest == NULL ? NULL : run->largest + head / group;
        for (size_t key = 0; max_logit != NULL && key < s; key++)
            *max_logit = visible[key] && x[key] > *max_logit ? x[key] : *max_logit;
        visible[s] = 0;
        for (size_t key = 0; key < s; key++) {
            logits[key] = x[key];
            visible[s] |= visible[key];
        }
        logits[s] = p->sinks != NULL ? p->sinks[head] : 0.0;
        ari_bl_softmax(run, pr, logits, visible, p->sinks != NULL ? s + 1 : s, &a->max_logit[row + r],
                       &a->sum[row + r]);
        for (size_t key = 0; key < s; key++)
            probs[key] = pr[key];
        if (a->sunk != NULL)
            a->sunk[row + r] = pr[s];
        for (size_t key = 0; run->noise != NULL && key < s; key++)
            probs[key] = ari_bl_branch(run, probs[key]);
    }
    return AR_OK;
}

/* Digests of a band's rows (digest.h), which here as in the ranks are of fp32 values. */
static void digest_rows(const ari_bl_run *run, double *digest, const double *x, size_t rows)
{
    for (size_t r = 0; digest != NULL && r < rows; r++) {
        uint64_t sum = 0;
        for (size_t key = 0; key < run->s; key++)
            sum += ari_digest_term((float)x[r * run->s + key], key);
        for (int i = 0; i < ARI_DIGEST; i++)
            digest[r * ARI_DIGEST + (size_t)i] = ari_digest_number(sum, i);
    }
}

/* Allocates digests of all rows of [b, H, s]; NULL: not requested. */
static double *take_digests(ari_bl_run *run)
{
    return run->o->digests && run->o->emit != NULL ? ari_bl_doubles(run, run->tokens * run->c->heads, ARI_DIGEST)
                                                   : NULL;
}

static ar_status emit_digests(ari_bl_run *run, const char *part, char pass, const double *digest)
{
    const size_t shape[4] = {run->b, run->c->heads, run->s, ARI_DIGEST};
    char name[ARI_BL_NAME_SIZE];
    snprintf(name, sizeof name, "%s" ARI_DIGESTED, part);
    return digest == NULL ? AR_OK : ari_bl_emit(run, name, pass, 4, shape, digest);
}

static ar_status emit_probs(ari_bl_run *run, char pass, const double *probs)
{
    const size_t shape[4] = {run->b, run->c->heads, run->s, run->s};
    return run->s > AR_SCORES_WHOLE ? AR_OK : ari_bl_emit(run, run->names->probs, pass, 4, shape, probs);
}

/* Normalises columns [first_col, first_col + heads*d) of x [tokens, ld] to y, stored head by head. */
static ar_status normalise(ari_bl_run *run, const ari_bl_norm *norm, ari_bl_norm_saved *saved, double *y,
                           const double *x, size_t ld, size_t first_col, size_t heads)
{
    const size_t width = heads * run->c->head_dim;
    double *rows = ari_bl_doubles(run, run->tokens, width);
    AR_TRY(run->memory);
    for (size_t t = 0; t < run->tokens; t++)
        for (size_t i = 0; i < width; i++)
            rows[t * width + i] = x[t * ld + first_col + i];
    AR_TRY(ari_bl_norm_forward(run, norm, saved, rows));
    split_heads(run, y, saved->y, width, 0, heads, run->c->head_dim);
    return AR_OK;
}

/* Backward pass of a normalisation: turns g, head-major, from the gradient of the normalised values into the gradient
 * of the input. */
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

/* Splits q, k, v: as they leave the projections, and as they enter the scores. */
static ar_status split_qkv(ari_bl_run *run, ari_bl_attention *a, const ari_bl_norm norm[2], const double *qkv)
{
    const ari_bl_names *names = run->names;
    const size_t heads = run->c->heads, groups = run->c->kv_heads, d = run->c->head_dim;
    const size_t values = ar_config_value_dim(run->c), q_width = heads * d, kv_width = groups * d;
    const size_t ld = q_width + kv_width + groups * values;
    split_heads(run, a->q, qkv, ld, 0, heads, d);
    split_heads(run, a->k, qkv, ld, q_width, groups, d);
    split_heads(run, a->v, qkv, ld, q_width + kv_width, groups, values);
    for (size_t i = 0, column = 0, width[3] = {q_width, kv_width, groups * values}; i < 3; column += width[i++])
        if (names->qkv[i] != NULL)
            AR_TRY(ari_bl_emit_tokens(run, names->qkv[i], 'f', qkv, ld, column, width[i]));
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

/* Heads of all samples, [b, H], which are independent in the forward pass; in the backward pass those of a KV head are
 * summed. */
typedef struct all_heads {
    const ari_bl_attention *a;
    const ari_bl_params *p;
    double *out, *dout, *dq, *dk, *dv, *dp, *ds, *dot; /* stored head by head, or [b, H, s, s]; dot [b, H, s] */
    double *digests, *dropped_digests;                 /* [b, H, s, ARI_DIGEST]; NULL: not requested */
} all_heads;

static size_t members_of(const ari_bl_run *run)
{
    return run->c->heads / run->c->kv_heads; /* heads of a sample are a multiple: head / members is n*groups + group */
}

static ar_status probs_of_head(ari_bl_run *run, void *task_arg, size_t head)
{
    const all_heads *h = task_arg;
    const ari_bl_attention *a = h->a;
    const size_t s = run->s;
    const band full_band = {head, 0, s, a->probs + head * s * s, a->bare == NULL ? NULL : a->bare + head * s * s};
    return band_probs(run, &full_band, a, h->p);
}

static ar_status context_of_head(ari_bl_run *run, void *task_arg, size_t head)
{
    const all_heads *h = task_arg;
    const size_t s = run->s, values = ar_config_value_dim(run->c);
    const ari_bl_matrix p_rows = {h->a->dropped + head * s * s, s, 1},
                        v_columns = {h->a->v + head / members_of(run) * s * values, 1, values};
    return ari_bl_contract(run, h->out + head * s * values, s, values, s, p_rows, v_columns, ARI_BL_SCALED);
}

/* Sizes of the bands of queries and keys in which a head is computed if only the rows' largest logits and sums are
 * saved, so that memory grows with the sequence and not with its square. */
enum { QUERIES = 256, KEYS = 64 };

static ar_status new_band(ari_bl_run *run, band *b, size_t head, size_t first_query)
{
    const size_t rows = run->s - first_query < QUERIES ? run->s - first_query : QUERIES;
    *b = (band){.head = head, .first_query = first_query, .rows = rows, .probs = ari_bl_doubles(run, rows, run->s)};
    b->bare = run->c->score_cap > 0.0 ? ari_bl_doubles(run, rows, run->s) : NULL;
    return run->memory;
}

/* The band's probabilities after dropout, which may be the same. */
static ar_status drop_band(ari_bl_run *run, double **dropped, const band *b, double *probs)
{
    const ari_bl_region region = {b->head * run->s + b->first_query, b->rows, 0, run->s};
    *dropped = probs;
    if (run->o->dropout > 0.0) {
        *dropped = ari_bl_doubles(run, b->rows, run->s);
        AR_TRY(run->memory);
        ari_bl_drop(run, run->names->drop_probs, *dropped, probs, &region, run->c->max_positions);
    }
    return AR_OK;
}

static double *digest_at(double *digests, size_t row)
{
    return digests == NULL ? NULL : digests + row * ARI_DIGEST;
}

static ar_status bands_of_head(ari_bl_run *run, void *task_arg, size_t head)
{
    const all_heads *h = task_arg;
    const size_t s = run->s, values = ar_config_value_dim(run->c);
    const ari_bl_matrix v_columns = {h->a->v + head / members_of(run) * s * values, 1, values};
    for (size_t first_query = 0; first_query < s; first_query += QUERIES) {
        ARI_BL_SCOPE(run);
        const size_t row = head * s + first_query;
        band b;
        double *dropped = NULL;
        AR_TRY(new_band(run, &b, head, first_query));
        AR_TRY(band_probs(run, &b, h->a, h->p));
        AR_TRY(drop_band(run, &dropped, &b, b.probs));
        digest_rows(run, digest_at(h->digests, row), b.probs, b.rows);
        digest_rows(run, digest_at(h->dropped_digests, row), dropped, b.rows);
        const ari_bl_matrix p_rows = {dropped, s, 1};
        AR_TRY(ari_bl_contract(run, h->out + row * values, b.rows, values, s, p_rows, v_columns, ARI_BL_SCALED));
    }
    return AR_OK;
}

/* Heads are independent, unless all of them raise the largest logits. */
static ar_status each_head(ari_bl_run *run, all_heads *head_data,
                           ar_status (*task)(ari_bl_run *run, void *task_arg, size_t head))
{
    const size_t n = run->b * run->c->heads;
    for (size_t head = 0; head_data->p->largest != NULL && head < n; head++)
        AR_TRY(task(run, head_data, head));
    return head_data->p->largest != NULL ? AR_OK : ari_bl_each(run, n, task, head_data);
}

static ar_status forward_in_bands(ari_bl_run *run, all_heads *head_data)
{
    head_data->digests = take_digests(run);
    head_data->dropped_digests = run->o->dropout > 0.0 ? take_digests(run) : NULL;
    AR_TRY(run->memory);
    AR_TRY(each_head(run, head_data, bands_of_head));
    AR_TRY(emit_digests(run, run->names->probs, 'f', head_data->digests));
    return emit_digests(run, run->names->drop_probs, 'f', head_data->dropped_digests);
}

static ar_status forward_at_once(ari_bl_run *run, all_heads *head_data)
{
    const ari_bl_attention *a = head_data->a;
    const char pass = run->s > AR_SCORES_WHOLE ? 0 : 'f';
    AR_TRY(each_head(run, head_data, probs_of_head));
    AR_TRY(emit_probs(run, 'f', a->probs));
    if (run->o->dropout > 0.0)
        AR_TRY(ari_bl_dropout(run, run->names->drop_probs, pass, a->dropped, a->probs, run->c->heads, run->s));
    return ari_bl_each(run, run->b * run->c->heads, context_of_head, head_data);
}

/* Rounding errors are drawn once for each number, so a run with noise keeps the probabilities that it computed. */
static bool keeps_probs(const ari_bl_run *run)
{
    return run->s <= AR_SCORES_WHOLE || run->noise != NULL;
}

static void take_scores(ari_bl_run *run, ari_bl_attention *a)
{
    const size_t rows = run->tokens * run->c->heads;
    a->max_logit = ari_bl_doubles(run, rows, 1);
    a->sum = ari_bl_doubles(run, rows, 1);
    a->probs = a->dropped = a->bare = NULL;
    if (!keeps_probs(run))
        return;
    a->probs = ari_bl_doubles(run, rows, run->s);
    a->dropped = run->o->dropout > 0.0 ? ari_bl_doubles(run, rows, run->s) : a->probs;
    a->bare = run->c->score_cap > 0.0 ? ari_bl_doubles(run, rows, run->s) : NULL;
}

ar_status ari_bl_attention_forward(ari_bl_run *run, ari_bl_attention *a, const ari_bl_params *p, const double *qkv)
{
    const size_t heads = run->c->heads, groups = run->c->kv_heads, d = run->c->head_dim;
    const size_t values = ar_config_value_dim(run->c);
    a->q = ari_bl_doubles(run, run->tokens, heads * d);
    a->k = ari_bl_doubles(run, run->tokens, groups * d);
    a->v = ari_bl_doubles(run, run->tokens, groups * values);
    a->context = ari_bl_doubles(run, run->tokens, heads * values);
    take_scores(run, a);
    a->sunk = p->sinks != NULL ? ari_bl_doubles(run, run->tokens, heads) : NULL;
    AR_TRY(run->memory);
    AR_TRY(split_qkv(run, a, p->qk_norm, qkv));
    const ari_bl_memory *mark = run->top;
    double *out = ari_bl_doubles(run, run->tokens, heads * values);
    AR_TRY(run->memory);
    run->largest = p->largest;
    all_heads head_data = {.a = a, .p = p, .out = out};
    AR_TRY(keeps_probs(run) ? forward_at_once(run, &head_data) : forward_in_bands(run, &head_data));
    ari_bl_keep_all(run, out, run->tokens * heads * values);
    merge_heads(run, a->context, heads * values, 0, out, heads, values);
    ari_bl_release(run, mark);
    return ari_bl_emit_tokens(run, run->names->context, 'f', a->context, heads * values, 0, heads * values);
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

/* Returns the gradient of a score before scale and cap from the gradient of its logit: p*(dp - D), through the cap,
 * times the scale. */
static double score_gradient(const ari_bl_run *run, double p, double dp, double dot, const double *bare, double scale)
{
    double d = ari_bl_branch(run, p * (dp - dot));
    if (bare != NULL)
        d = ari_bl_branch(run, ari_bl_uncap(d, *bare, run->c->score_cap));
    return ari_bl_branch(run, d * scale);
}

/* Sets dP [rows, s] to +0 at masked keys and computes dS [rows, s] of a band: dS = fl32(fl32(Pr*(dP - D))*scale); D =
 * sum of Pr*dP is stored in dot [rows]. */
static ar_status band_backward(ari_bl_run *run, const band *b, double *dp, double *ds, double *dot)
{
    ARI_BL_SCOPE(run);
    const size_t s = run->s, heads = run->c->heads;
    double *products = ari_bl_doubles(run, s, 1);
    uint8_t *visible = ari_bl_take(run, s, 1, 1);
    AR_TRY(run->memory);
    const double scale = scale_of(run);
    for (size_t r = 0; r < b->rows; r++) {
        const score_row query_row = {b->head / heads, b->head % heads, b->first_query + r, 0, s};
        const double *p = b->probs + r * s, *bare = b->bare == NULL ? NULL : b->bare + r * s;
        double *dp_row = dp + r * s, *ds_row = ds + r * s;
        mask_row(run, visible, NULL, &query_row);
        for (size_t key = 0; key < s; key++) {
            dp_row[key] = visible[key] ? dp_row[key] : 0.0;
            products[key] = p[key] * dp_row[key];
        }
        dot[r] = ari_bl_row_sum(run, products, s);
        for (size_t key = 0; key < s; key++)
            if (visible[key])
                ds_row[key] = score_gradient(run, p[key], dp_row[key], dot[r], bare == NULL ? NULL : bare + key, scale);
    }
    return AR_OK;
}

static ar_status dp_of_head(ari_bl_run *run, void *task_arg, size_t head)
{
    const all_heads *h = task_arg;
    const size_t s = run->s, values = ar_config_value_dim(run->c);
    const ari_bl_matrix dout_rows = {h->dout + head * s * values, values, 1},
                        v_rows = {h->a->v + head / members_of(run) * s * values, values, 1};
    return ari_bl_contract(run, h->dp + head * s * s, s, s, values, dout_rows, v_rows, ARI_BL_PLAIN);
}

static ar_status ds_of_head(ari_bl_run *run, void *task_arg, size_t head)
{
    const all_heads *h = task_arg;
    const size_t s = run->s;
    const band full_band = {head, 0, s, h->a->probs + head * s * s,
                            h->a->bare == NULL ? NULL : h->a->bare + head * s * s};
    return band_backward(run, &full_band, h->dp + head * s * s, h->ds + head * s * s, h->dot + head * s);
}

/* Computes the gradients of KV head kv of [b, G]. dK and dV are one contraction over (query heads of the group x
 * queries), dQ is one per query head. V was multiplied by the probabilities after dropout. */
static ar_status gradients_of_kv_head(ari_bl_run *run, void *task_arg, size_t kv)
{
    const all_heads *h = task_arg;
    const size_t s = run->s, d = run->c->head_dim, members = members_of(run),
                 first_head = kv * members; /* first query head of the KV head */
    const size_t values = ar_config_value_dim(run->c);
    double *dq = h->dq + first_head * s * d, *dk = h->dk + kv * s * d, *dv = h->dv + kv * s * values;
    const double *ds = h->ds + first_head * s * s;
    const ari_bl_matrix ds_columns = {ds, 1, s}, p_columns = {h->a->dropped + first_head * s * s, 1, s};
    const ari_bl_matrix q_columns = {h->a->q + first_head * s * d, 1, d}, k_columns = {h->a->k + kv * s * d, 1, d};
    const ari_bl_matrix dout_columns = {h->dout + first_head * s * values, 1, values};
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

/* Computes D, dQ and digests of dP for one head, in bands of queries. */
static ar_status back_by_queries(ari_bl_run *run, void *task_arg, size_t head)
{
    const all_heads *h = task_arg;
    const size_t s = run->s, d = run->c->head_dim, values = ar_config_value_dim(run->c), kv = head / members_of(run);
    const ari_bl_matrix v_rows = {h->a->v + kv * s * values, values, 1}, k_columns = {h->a->k + kv * s * d, 1, d};
    for (size_t first_query = 0; first_query < s; first_query += QUERIES) {
        ARI_BL_SCOPE(run);
        const size_t row = head * s + first_query;
        band b;
        AR_TRY(new_band(run, &b, head, first_query));
        double *dp = ari_bl_doubles(run, b.rows, s), *ds = ari_bl_doubles(run, b.rows, s);
        AR_TRY(run->memory);
        AR_TRY(band_probs(run, &b, h->a, h->p));
        const ari_bl_matrix dout_rows = {h->dout + row * values, values, 1}, ds_rows = {ds, s, 1};
        AR_TRY(ari_bl_contract(run, dp, b.rows, s, values, dout_rows, v_rows, ARI_BL_PLAIN));
        AR_TRY(drop_band(run, &dp, &b, dp));
        AR_TRY(band_backward(run, &b, dp, ds, h->dot + row));
        digest_rows(run, digest_at(h->digests, row), dp, b.rows);
        AR_TRY(ari_bl_contract(run, h->dq + row * d, b.rows, d, s, ds_rows, k_columns, ARI_BL_SCALED));
    }
    ari_bl_keep_all(run, h->dq + head * s * d, s * d);
    return AR_OK;
}

/* Some keys of a head, [s, keys]: products of scores and dP, which become Pr and dS. first_query: first query that may
 * see one of them; earlier rows stay zero. */
typedef struct columns {
    size_t head, first_key, keys, first_query;
    double *pr, *ds, *bare; /* bare: for one row; NULL: scores are not capped */
    uint8_t *visible;
} columns;

/* Computes columns from the rows' largest logits, sums and D. */
ARI_SIMD __attribute__((flatten)) static void finish_columns(const ari_bl_run *run, const all_heads *h,
                                                             const columns *c)
{
    const size_t heads = run->c->heads, keys = c->keys;
    const double scale = scale_of(run);
    for (size_t query = c->first_query; query < run->s; query++) {
        const size_t row = c->head * run->s + query;
        const score_row query_row = {c->head / heads, c->head % heads, query, c->first_key, keys};
        const double m = h->a->max_logit[row], l = h->a->sum[row];
        double *x = c->pr + query * keys, *dx = c->ds + query * keys;
        logits_of(run, x, c->bare, c->visible, &query_row, scale);
        for (size_t i = 0; i < keys; i++) {
            const double p = c->visible[i] ? ari_bl_fl(run, exponential(run, ari_bl_fl(run, x[i] - m)) / l) : 0.0;
            const double *bare = c->bare == NULL ? NULL : c->bare + i;
            dx[i] = c->visible[i] ? score_gradient(run, p, dx[i], h->dot[row], bare, scale) : 0.0;
            x[i] = p;
        }
    }
}

/* Pr after dropout and dS of `head` and of `keys` keys from `first_key` on. */
static ar_status columns_of_head(ari_bl_run *run, const all_heads *h, columns *c)
{
    ARI_BL_SCOPE(run);
    const size_t s = run->s, d = run->c->head_dim, values = ar_config_value_dim(run->c), head = c->head;
    const size_t key = head / members_of(run) * s + c->first_key, row = head * s + c->first_query,
                 rows = s - c->first_query;
    const ari_bl_region region = {row, rows, c->first_key, c->keys};
    const ari_bl_matrix q_rows = {h->a->q + row * d, d, 1}, k_rows = {h->a->k + key * d, d, 1};
    const ari_bl_matrix dout_rows = {h->dout + row * values, values, 1}, v_rows = {h->a->v + key * values, values, 1};
    double *pr = c->pr + c->first_query * c->keys, *ds = c->ds + c->first_query * c->keys;
    c->visible = ari_bl_take(run, c->keys, 1, 1);
    c->bare = run->c->score_cap > 0.0 ? ari_bl_doubles(run, c->keys, 1) : NULL;
    AR_TRY(run->memory);
    AR_TRY(ari_bl_contract(run, pr, rows, c->keys, d, q_rows, k_rows, ARI_BL_PLAIN));
    AR_TRY(ari_bl_contract(run, ds, rows, c->keys, values, dout_rows, v_rows, ARI_BL_PLAIN));
    if (run->o->dropout > 0.0)
        ari_bl_drop(run, run->names->drop_probs, ds, ds, &region, run->c->max_positions);
    finish_columns(run, h, c);
    if (run->o->dropout > 0.0)
        ari_bl_drop(run, run->names->drop_probs, pr, pr, &region, run->c->max_positions);
    return AR_OK;
}

/* Computes dK and dV of KV head kv for some keys at a time: all terms of a sum are available at once. */
static ar_status back_by_keys(ari_bl_run *run, void *task_arg, size_t kv)
{
    const all_heads *h = task_arg;
    const size_t s = run->s, d = run->c->head_dim, members = members_of(run), first_head = kv * members;
    const size_t values = ar_config_value_dim(run->c);
    const ari_bl_matrix q_columns = {h->a->q + first_head * s * d, 1, d},
                        dout_columns = {h->dout + first_head * s * values, 1, values};
    for (size_t first_key = 0; first_key < s; first_key += KEYS) {
        ARI_BL_SCOPE(run);
        const size_t keys = s - first_key < KEYS ? s - first_key : KEYS, key = kv * s + first_key;
        double *pr = ari_bl_doubles(run, members * s, keys), *ds = ari_bl_doubles(run, members * s, keys);
        AR_TRY(run->memory);
        for (size_t member = 0; member < members; member++) {
            const size_t place = member * s * keys;
            columns c = {first_head + member, first_key,  keys, run->c->causal ? first_key : 0,
                         pr + place,          ds + place, NULL, NULL};
            AR_TRY(columns_of_head(run, h, &c));
        }
        const ari_bl_matrix ds_columns = {ds, 1, keys}, p_columns = {pr, 1, keys};
        AR_TRY(ari_bl_contract(run, h->dk + key * d, keys, d, members * s, ds_columns, q_columns, ARI_BL_SCALED));
        AR_TRY(ari_bl_contract(run, h->dv + key * values, keys, values, members * s, p_columns, dout_columns,
                               ARI_BL_SCALED));
    }
    ari_bl_keep_all(run, h->dk + kv * s * d, s * d);
    ari_bl_keep_all(run, h->dv + kv * s * values, s * values);
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

/* Adds the gradient of a sink's logit, -p*D, as a term of each row. A sink has no value, so the gradient of its
 * probability is 0. */
static ar_status sink_gradient(ari_bl_run *run, const double *sunk, const double *dot)
{
    ARI_BL_SCOPE(run);
    const size_t heads = run->c->heads, s = run->s;
    double *values = ari_bl_doubles(run, run->tokens, heads), *gradient = ari_bl_doubles(run, heads, 1);
    AR_TRY(run->memory);
    for (size_t head = 0; head < run->b * heads; head++)
        for (size_t query = 0; query < s; query++)
            values[(head / heads * s + query) * heads + head % heads] =
                ari_bl_branch(run, -(sunk[head * s + query] * dot[head * s + query]));
    const ari_bl_terms terms = {.values = values, .stream = true};
    AR_TRY(ari_bl_gradient(run, gradient, 1, heads, &terms));
    return ari_bl_emit_gradient(run, run->names->sinks, "", heads, 0, gradient);
}

static ar_status back_in_bands(ari_bl_run *run, all_heads *head_data)
{
    head_data->digests = take_digests(run);
    run->largest = NULL; /* the forward pass has already recorded the logits */
    AR_TRY(run->memory);
    AR_TRY(ari_bl_each(run, run->b * run->c->heads, back_by_queries, head_data));
    AR_TRY(emit_digests(run, run->names->probs, 'b', head_data->digests));
    if (head_data->a->sunk != NULL)
        AR_TRY(sink_gradient(run, head_data->a->sunk, head_data->dot));
    return ari_bl_each(run, run->b * run->c->kv_heads, back_by_keys, head_data);
}

static ar_status back_at_once(ari_bl_run *run, all_heads *head_data)
{
    const size_t heads = run->c->heads, s = run->s;
    head_data->dp = ari_bl_doubles(run, run->tokens * heads, s);
    head_data->ds = ari_bl_doubles(run, run->tokens * heads, s);
    AR_TRY(run->memory);
    AR_TRY(ari_bl_each(run, run->b * heads, dp_of_head, head_data));
    if (run->o->dropout > 0.0)
        AR_TRY(ari_bl_dropout(run, run->names->drop_probs, 0, head_data->dp, head_data->dp, heads, s));
    AR_TRY(ari_bl_each(run, run->b * heads, ds_of_head, head_data));
    AR_TRY(emit_probs(run, 'b', head_data->dp));
    if (head_data->a->sunk != NULL)
        AR_TRY(sink_gradient(run, head_data->a->sunk, head_data->dot));
    return ari_bl_each(run, run->b * run->c->kv_heads, gradients_of_kv_head, head_data);
}

ar_status ari_bl_attention_backward(ari_bl_run *run, double *dqkv, const double *dcontext, const ari_bl_params *p,
                                    const ari_bl_attention *a)
{
    ARI_BL_SCOPE(run);
    const size_t heads = run->c->heads, groups = run->c->kv_heads, d = run->c->head_dim;
    const size_t values = ar_config_value_dim(run->c);
    double *dout = ari_bl_doubles(run, run->tokens, heads * values), *dq = ari_bl_doubles(run, run->tokens, heads * d);
    double *dk = ari_bl_doubles(run, run->tokens, groups * d), *dv = ari_bl_doubles(run, run->tokens, groups * values);
    double *dot = ari_bl_doubles(run, run->tokens, heads);
    AR_TRY(run->memory);
    split_heads(run, dout, dcontext, heads * values, 0, heads, values);
    all_heads head_data = {.a = a, .p = p, .dout = dout, .dq = dq, .dk = dk, .dv = dv, .dot = dot};
    AR_TRY(keeps_probs(run) ? back_at_once(run, &head_data) : back_in_bands(run, &head_data));
    return finish_qkv(run, dqkv, dq, dk, dv, p->qk_norm, a->normed);
}
