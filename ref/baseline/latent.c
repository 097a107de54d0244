/* SPDX-License-Identifier: Apache-2.0 */
/* Projections of latent attention (DeepSeek-V2, arXiv:2405.04434, equations 9 to 19). For a token's x:
 *
 *   cq = Wqa x                    q = Wqb norm(cq), with d features per head
 *   ckv | kr = Wkva x             k | v = Wkvb norm(ckv), with d - r key features and a value per head
 *
 * Each head's key is k | kr, whose last r features all heads share. Without a rank q = Wq x. */
#include "anyrank/block.h"
#include "anyrank/config.h"
#include "ref/baseline/run.h"

#include <string.h>

/* Offsets of a token's numbers. */
typedef struct latent_form {
    size_t heads, d, r, v; /* d: features of a key, of which r are shared; v: features of a value */
    size_t qkv, up;        /* widths of q | k | v, and of k | v per head without the shared features */
} latent_form;

static latent_form form_of(const ar_config *c)
{
    const latent_form f = {.heads = c->heads, .d = c->head_dim, .r = c->latent.rope_dim, .v = c->latent.value_dim};
    return (latent_form){.heads = f.heads,
                         .d = f.d,
                         .r = f.r,
                         .v = f.v,
                         .qkv = f.heads * (2 * f.d + f.v),
                         .up = f.heads * (f.d - f.r + f.v)};
}

/* Loads the input's layer: the small matrices of both paths if queries have a low-rank projection, otherwise of one. */
static ar_status load_down(ari_bl_run *run, ari_bl_latent *l)
{
    const ar_config *c = run->c;
    const ari_bl_names *n = run->names;
    const size_t rank = c->latent.q_rank, low = c->latent.kv_rank + c->latent.rope_dim;
    const char *const joint_names[3] = {n->q_a, n->kv_a, NULL}, *const keys[3] = {n->kv_a, NULL, NULL};
    const size_t width[3] = {rank > 0 ? rank : low, low, 0};
    return ari_bl_load_linear(run, &l->down, c->hidden, rank > 0 ? joint_names : keys, width, c->qkv_bias);
}

static ar_status load_one(ari_bl_run *run, ari_bl_linear *l, const char *name, size_t in_features, size_t out)
{
    const char *const names[3] = {name, NULL, NULL};
    const size_t width[3] = {out, 0, 0};
    return ari_bl_load_linear(run, l, in_features, names, width, false);
}

static ar_status load_norm(ari_bl_run *run, ari_bl_norm *norm, const char *name, size_t width)
{
    AR_TRY(ari_bl_load_norm(run, norm, name, width, 1));
    norm->eps = 1e-6; /* fixed, whatever the config says of other norms */
    return AR_OK;
}

ar_status ari_bl_load_latent(ari_bl_run *run, ari_bl_latent *l)
{
    const ar_config *c = run->c;
    const ari_bl_names *n = run->names;
    const latent_form f = form_of(c);
    const size_t rank = c->latent.q_rank, low = c->latent.kv_rank;
    if (rank == 0)
        AR_TRY(load_one(run, &l->q, n->qkv_param[0], c->hidden, f.heads * f.d));
    AR_TRY(load_down(run, l));
    if (rank > 0) {
        AR_TRY(load_norm(run, &l->q_norm, n->q_norm, rank));
        AR_TRY(load_one(run, &l->q, n->q_b, rank, f.heads * f.d));
    }
    AR_TRY(load_norm(run, &l->kv_norm, n->kv_norm, low));
    return load_one(run, &l->kv, n->kv_b, low, f.up);
}

/* Computes y [tokens, l->out] and emits it part by part. */
static ar_status multiply(ari_bl_run *run, const ari_bl_linear *l, double *y, const double *x)
{
    AR_TRY(ari_bl_linear_forward(run, l, y, x, run->tokens));
    size_t first_col = 0;
    for (int p = 0; p < l->parts; first_col += l->width[p++])
        AR_TRY(ari_bl_emit_tokens(run, l->name[p], 'f', y, l->out, first_col, l->width[p]));
    return AR_OK;
}

/* y = the layer of the norm of columns [first_col, first_col + rank) of low [tokens, ld]. */
static ar_status path_forward(ari_bl_run *run, const ari_bl_linear *l, const ari_bl_norm *norm,
                              ari_bl_norm_saved *saved, double *y, const double *low, size_t ld, size_t first_col)
{
    double *c = ari_bl_doubles(run, run->tokens, l->in_features);
    AR_TRY(run->memory);
    for (size_t t = 0; t < run->tokens; t++)
        memcpy(c + t * l->in_features, low + t * ld + first_col, l->in_features * sizeof *c);
    AR_TRY(ari_bl_norm_forward(run, norm, saved, c));
    return multiply(run, l, y, saved->y);
}

/* A token's q | k | v. */
static void join(const latent_form *f, double *qkv, const double *q, const double *up, const double *shared)
{
    const size_t plain = f->d - f->r;
    double *k = qkv + f->heads * f->d, *v = k + f->heads * f->d;
    memcpy(qkv, q, f->heads * f->d * sizeof *q);
    for (size_t head = 0; head < f->heads; head++) {
        const double *head_kv = up + head * (plain + f->v);
        memcpy(k + head * f->d, head_kv, plain * sizeof *head_kv);
        memcpy(k + head * f->d + plain, shared, f->r * sizeof *shared);
        memcpy(v + head * f->v, head_kv + plain, f->v * sizeof *head_kv);
    }
}

ar_status ari_bl_latent_forward(ari_bl_run *run, const ari_bl_latent *l, ari_bl_latent_saved *saved, double *qkv,
                                const double *x)
{
    const latent_form f = form_of(run->c);
    const size_t rank = run->c->latent.q_rank, width = l->down.out;
    double *q = ari_bl_doubles(run, run->tokens, f.heads * f.d), *low = ari_bl_doubles(run, run->tokens, width);
    double *up = ari_bl_doubles(run, run->tokens, f.up);
    AR_TRY(run->memory);
    if (rank == 0)
        AR_TRY(multiply(run, &l->q, q, x));
    AR_TRY(multiply(run, &l->down, low, x));
    if (rank > 0)
        AR_TRY(path_forward(run, &l->q, &l->q_norm, &saved->q_norm, q, low, width, 0));
    AR_TRY(path_forward(run, &l->kv, &l->kv_norm, &saved->kv_norm, up, low, width, rank));
    for (size_t t = 0; t < run->tokens; t++)
        join(&f, qkv + t * f.qkv, q + t * f.heads * f.d, up + t * f.up, low + (t + 1) * width - f.r);
    return AR_OK;
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

/* Computes columns [first_col, first_col + rank) of dlow [tokens, ld] from dy, the gradient of the output of the layer
 * after the norm. */
static ar_status path_backward(ari_bl_run *run, const ari_bl_linear *l, const ari_bl_norm *norm, double *dlow,
                               size_t ld, size_t first_col, const double *dy, const ari_bl_norm_saved *saved)
{
    double *dnormed = ari_bl_doubles(run, run->tokens, l->in_features),
           *dc = ari_bl_doubles(run, run->tokens, l->in_features);
    AR_TRY(run->memory);
    AR_TRY(ari_bl_linear_backward(run, l, dnormed, dy, run->tokens));
    AR_TRY(ari_bl_emit_tokens(run, l->name[0], 'b', dnormed, l->in_features, 0, l->in_features));
    AR_TRY(ari_bl_linear_gradients(run, l, dy, saved->y, NULL));
    AR_TRY(ari_bl_norm_backward(run, norm, dc, NULL, NULL, dnormed, saved));
    AR_TRY(ari_bl_norm_gradients(run, norm, dnormed, saved));
    for (size_t t = 0; t < run->tokens; t++)
        memcpy(dlow + t * ld + first_col, dc + t * l->in_features, l->in_features * sizeof *dc);
    return AR_OK;
}

/* Computes dshared [tokens, r], a sum over all heads: a contraction with ones. */
static ar_status shared_gradient(ari_bl_run *run, const latent_form *f, double *dshared, const double *dqkv)
{
    double *ones = ari_bl_doubles(run, f->heads, 1);
    AR_TRY(run->memory);
    for (size_t head = 0; head < f->heads; head++)
        ones[head] = 1.0;
    for (size_t t = 0; t < run->tokens; t++) {
        const double *k = dqkv + t * f->qkv + f->heads * f->d;
        const ari_bl_matrix rows = {k + (f->d - f->r), 1, f->d}, ones_row = {ones, f->heads, 1};
        AR_TRY(ari_bl_contract(run, dshared + t * f->r, f->r, 1, f->heads, rows, ones_row, ARI_BL_PLAIN));
    }
    ari_bl_keep_all(run, dshared, run->tokens * f->r);
    return ari_bl_emit_tokens(run, run->names->dshared, 'b', dshared, f->r, 0, f->r);
}

/* Computes columns of dlow from the gradients of keys and values. */
static ar_status keys_backward(ari_bl_run *run, const ari_bl_latent *l, double *dlow, const double *dqkv,
                               const ari_bl_latent_saved *saved)
{
    const latent_form f = form_of(run->c);
    const size_t plain = f.d - f.r, width = l->down.out;
    double *dup = ari_bl_doubles(run, run->tokens, f.up), *dshared = ari_bl_doubles(run, run->tokens, f.r);
    AR_TRY(run->memory);
    for (size_t t = 0; t < run->tokens; t++)
        for (size_t head = 0; head < f.heads; head++) {
            const double *k = dqkv + t * f.qkv + (f.heads + head) * f.d;
            const double *v = dqkv + t * f.qkv + 2 * f.heads * f.d + head * f.v;
            double *dhead_kv = dup + t * f.up + head * (plain + f.v);
            memcpy(dhead_kv, k, plain * sizeof *dhead_kv);
            memcpy(dhead_kv + plain, v, f.v * sizeof *dhead_kv);
        }
    AR_TRY(shared_gradient(run, &f, dshared, dqkv));
    for (size_t t = 0; t < run->tokens; t++)
        memcpy(dlow + (t + 1) * width - f.r, dshared + t * f.r, f.r * sizeof *dshared);
    return path_backward(run, &l->kv, &l->kv_norm, dlow, width, run->c->latent.q_rank, dup, &saved->kv_norm);
}

ar_status ari_bl_latent_backward(ari_bl_run *run, const ari_bl_latent *l, double *dx, const double *dqkv,
                                 const ari_bl_latent_saved *saved, const double *x)
{
    const latent_form f = form_of(run->c);
    ARI_BL_SCOPE(run);
    const size_t h = run->c->hidden, rank = run->c->latent.q_rank, features = f.heads * f.d, width = l->down.out;
    double *dq = ari_bl_doubles(run, run->tokens, features), *dlow = ari_bl_doubles(run, run->tokens, width);
    double *dx_part = ari_bl_doubles(run, run->tokens, h);
    AR_TRY(run->memory);
    for (size_t t = 0; t < run->tokens; t++)
        memcpy(dq + t * features, dqkv + t * f.qkv, features * sizeof *dq);
    AR_TRY(keys_backward(run, l, dlow, dqkv, saved));
    if (rank > 0)
        AR_TRY(path_backward(run, &l->q, &l->q_norm, dlow, width, 0, dq, &saved->q_norm));
    AR_TRY(ari_bl_linear_backward(run, &l->down, dx, dlow, run->tokens));
    if (rank == 0)
        AR_TRY(ari_bl_linear_backward(run, &l->q, dx_part, dq, run->tokens));
    for (size_t i = 0; rank == 0 && i < run->tokens * h; i++)
        dx[i] = ari_bl_keep(run, ari_bl_stream(run, dx[i] + dx_part[i]));
    AR_TRY(ari_bl_emit_tokens(run, run->names->dattention, 'b', dx, h, 0, h));
    if (rank == 0)
        AR_TRY(ari_bl_linear_gradients(run, &l->q, dq, x, NULL));
    return ari_bl_linear_gradients(run, &l->down, dlow, x, NULL);
}
