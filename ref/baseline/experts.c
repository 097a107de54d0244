/* SPDX-License-Identifier: Apache-2.0 */
/* Experts in an MLP's place. With z = x*W^T of the router, p = softmax(z) over the E experts and K the k experts with
 * the largest z, the lower number where two are equal:
 *
 *     y = sum over j in K, ascending, of w_j*expert_j(x)      w_j = p_j, or normalised p_j / sum over K of p
 *       + sigmoid(x*v^T)*shared(x)                             where there is a shared expert
 *
 * or, of a router of sigmoids (DeepSeek-V3, arXiv:2412.19437), with a = sigmoid(z) and c = a + bias, K the k experts
 * with the largest c of those in the `kept` groups whose two largest c have the largest sum:
 *
 *     w_j = scale*(a_j / (sum over K of a + 1e-20)), or scale*a_j      and the shared expert may have no gate.
 *
 * (Shazeer et al. 2017, arXiv:1701.06538; Mixtral, Jiang et al. 2024, arXiv:2401.04088; Qwen2-MoE in
 * modeling_qwen2_moe.py). Every addition and product of a line is rounded once. */
#include "anyrank/config.h"
#include "ref/baseline/run.h"

#include <stdio.h>

#include "ref/numerics/elementary.h"

enum { PART_SIZE = 120 };

/* --- parameters --------------------------------------------------------------------------------------------------- */

/* Below the block. */
static const char *path_of(const ari_bl_run *run)
{
    return run->c->experts.w123 ? "block_sparse_moe" : "mlp";
}

/* Returns the path of a part of the experts ("mlp.gate"), or (below not "") of one expert ("mlp.experts.3.up_proj"); it
 * lives as long as the parameters. */
static const char *part_name(ari_bl_run *run, const char *below, const char *part)
{
    char *name = ari_bl_take(run, 1, PART_SIZE, 1);
    if (name != NULL)
        snprintf(name, PART_SIZE, "%s.%s%s%s", path_of(run), below, below[0] != '\0' ? "." : "", part);
    return name;
}

static ar_status load_one(ari_bl_run *run, ari_bl_linear *l, size_t out, const char *part)
{
    const char *const name[3] = {part_name(run, "", part), NULL, NULL};
    const size_t width[3] = {out, 0, 0};
    const size_t before = run->training != NULL ? run->training->n : 0;
    AR_TRY(run->memory);
    AR_TRY(ari_bl_load_linear(run, l, run->c->hidden, name, width, run->c->experts.bias));
    if (run->training != NULL)
        run->training->params[before].matrix = false;
    return AR_OK;
}

/* An expert: gate | up and down, of width f. */
static ar_status load_expert(ari_bl_run *run, ari_bl_mlp *mlp, const char *below, const char *const parts[3], size_t f)
{
    const char *const fc[3] = {part_name(run, below, parts[0]), part_name(run, below, parts[1]), NULL};
    const char *const down[3] = {part_name(run, below, parts[2]), NULL, NULL};
    const size_t fc_width[3] = {f, f, 0}, down_width[3] = {run->c->hidden, 0, 0};
    AR_TRY(run->memory);
    AR_TRY(ari_bl_load_linear(run, &mlp->fc, run->c->hidden, fc, fc_width, run->c->experts.bias));
    return ari_bl_load_linear(run, &mlp->down, f, down, down_width, run->c->experts.bias);
}

static const char *router_name(const ari_bl_run *run)
{
    return run->c->arch == AR_ARCH_GPT_OSS ? "router" : "gate";
}

static const char *shared_name(const ari_bl_run *run)
{
    return run->c->experts.ungated ? "shared_experts" : "shared_expert";
}

/* The bias gets no gradient. */
static ar_status load_bias(ari_bl_run *run, ari_bl_experts *e)
{
    const size_t n = run->c->experts.n;
    const char *name = part_name(run, run->c->experts.w123 ? "" : "gate", "e_score_correction_bias");
    AR_TRY(run->memory);
    AR_TRY(ari_bl_parameter(run, &e->bias, name, n, 0, AR_INIT_UNIFORM_BIAS, n, n));
    e->tokens = ari_bl_take(run, n, 1, sizeof *e->tokens);
    AR_TRY(run->memory);
    ari_bl_training_add(run, name, n, 0, e->bias, 1, 1);
    if (run->training != NULL)
        run->training->params[run->training->n - 1].tokens = e->tokens;
    return AR_OK;
}

ar_status ari_bl_load_experts(ari_bl_run *run, ari_bl_experts *e)
{
    static const char *const parts[3] = {"gate_proj", "up_proj", "down_proj"}, *const w123[3] = {"w1", "w3", "w2"};
    const ar_experts *x = &run->c->experts;
    AR_TRY(ari_bl_balance_load(run, e));
    AR_TRY(load_one(run, &e->gate, x->n, router_name(run)));
    if (x->scores.groups > 0 && !x->scores.softmax)
        AR_TRY(load_bias(run, e));
    e->mlps = ari_bl_take(run, x->n, 1, sizeof *e->mlps);
    AR_TRY(run->memory);
    for (size_t i = 0; i < x->n; i++) {
        char below[32];
        snprintf(below, sizeof below, "experts.%zu", i);
        AR_TRY(load_expert(run, &e->mlps[i], below, x->w123 ? w123 : parts, x->ffn));
    }
    if (x->shared == 0)
        return AR_OK;
    AR_TRY(load_expert(run, &e->shared, shared_name(run), parts, x->shared));
    return x->ungated ? AR_OK : load_one(run, &e->shared_gate, 1, "shared_expert_gate");
}

/* Emits [tokens, features] under the experts' path; part "": the experts' output. */
static ar_status emit(ari_bl_run *run, const char *part, char pass, const double *x, size_t ld, size_t first_col,
                      size_t features)
{
    char name[PART_SIZE];
    snprintf(name, sizeof name, "%s%s%s", path_of(run), part[0] != '\0' ? "." : "", part);
    return ari_bl_emit_tokens(run, name, pass, x, ld, first_col, features);
}

/* --- routing ------------------------------------------------------------------------------------------------------ */

/* Numbers the rows: sorted by expert and then by token, so that the rows of a sample are together. */
static void sort_rows(const ari_bl_run *run, ari_bl_routed *r)
{
    const size_t k = run->c->experts.per_token, n = run->c->experts.n;
    for (size_t i = 0; i < run->tokens * k; i++)
        r->expert_begin[r->expert[i] + 1]++;
    for (size_t e = 0; e < n; e++)
        r->expert_begin[e + 1] += r->expert_begin[e];
    for (size_t e = 0; e < n; e++) {
        size_t *sample_begin = r->sample_begin + e * (run->b + 1), rows = 0;
        for (size_t t = 0; t < run->tokens; t++)
            for (size_t j = 0; j < k; j++)
                if (r->expert[t * k + j] == e) {
                    r->place[t * k + j] = r->expert_begin[e] + rows++;
                    sample_begin[t / run->s + 1] = rows;
                }
        for (size_t sample = 0; sample < run->b; sample++) /* a sample without rows ends where the previous one does */
            if (sample_begin[sample + 1] < sample_begin[sample])
                sample_begin[sample + 1] = sample_begin[sample];
    }
}

/* Emits a value of each slot as [tokens, E], with 0 for experts that the token does not use. */
static ar_status emit_slots(ari_bl_run *run, const char *part, char pass, const ari_bl_routed *r, const double *value)
{
    const size_t k = run->c->experts.per_token, n = run->c->experts.n;
    ARI_BL_SCOPE(run);
    double *dense = ari_bl_doubles(run, run->tokens, n);
    AR_TRY(run->memory);
    for (size_t i = 0; i < run->tokens * k; i++)
        dense[i / k * n + r->expert[i]] = value[i];
    return emit(run, part, pass, dense, n, 0, n);
}

/* The experts of the slots, [tokens, k], as numbers. */
static ar_status emit_chosen(ari_bl_run *run, const ari_bl_routed *r)
{
    const size_t k = run->c->experts.per_token;
    ARI_BL_SCOPE(run);
    double *expert_ids = ari_bl_doubles(run, run->tokens, k);
    AR_TRY(run->memory);
    for (size_t i = 0; i < run->tokens * k; i++)
        expert_ids[i] = (double)r->expert[i];
    return emit(run, "routes", 'f', expert_ids, k, 0, k);
}

/* Counts the tokens that are not padding. */
static void count_tokens(const ari_bl_run *run, int64_t *tokens, const size_t *expert)
{
    const size_t k = run->c->experts.per_token;
    for (size_t i = 0; i < run->c->experts.n; i++)
        tokens[i] = 0;
    for (size_t i = 0; i < run->tokens * k; i++)
        tokens[expert[i]] += run->batch->padding_mask == NULL || run->batch->padding_mask[i / k] != 0;
}

static ar_status route(ari_bl_run *run, const ari_bl_experts *e, ari_bl_routed *r, const double *x)
{
    const size_t k = run->c->experts.per_token, n = run->c->experts.n;
    r->p = ari_bl_doubles(run, run->tokens, n);
    r->lse = ari_bl_doubles(run, run->tokens, 1);
    r->weight = ari_bl_doubles(run, run->tokens, k);
    r->expert = ari_bl_take(run, run->tokens, k, sizeof *r->expert);
    r->place = ari_bl_take(run, run->tokens, k, sizeof *r->place);
    r->expert_begin = ari_bl_take(run, n + 1, 1, sizeof *r->expert_begin);
    r->sample_begin = ari_bl_take(run, n, run->b + 1, sizeof *r->sample_begin);
    double *z = ari_bl_doubles(run, run->tokens, n), *work = ari_bl_doubles(run, 2, n);
    AR_TRY(run->memory);
    AR_TRY(ari_bl_linear_forward(run, &e->gate, z, x, run->tokens));
    AR_TRY(emit(run, router_name(run), 'f', z, n, 0, n));
    for (size_t t = 0; t < run->tokens; t++) {
        for (size_t i = 0; i < n; i++)
            if (z[t * n + i] != z[t * n + i])
                return ar_error_set(AR_ERR_DATA, "baseline: %s.%s: expert %zu's logit of token %zu is not a number",
                                    run->prefix, e->gate.name[0], i, t);
        ari_bl_route_token(run, e->bias, r, t, z + t * n, work);
    }
    if (e->tokens != NULL)
        count_tokens(run, e->tokens, r->expert);
    sort_rows(run, r);
    AR_TRY(emit_chosen(run, r));
    return emit_slots(run, "weights", 'f', r, r->weight);
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

/* Scatters rows: row place[i] of the experts' input, or of a gradient, becomes scale[i]*x of token i / k. */
static void spread(const ari_bl_run *run, double *rows, const double *x, const ari_bl_routed *r, const double *scale)
{
    const size_t k = run->c->experts.per_token, h = run->c->hidden;
    for (size_t i = 0; i < run->tokens * k; i++)
        for (size_t c = 0; c < h; c++) {
            const double value = x[i / k * h + c];
            rows[r->place[i] * h + c] = ari_bl_keep(run, scale != NULL ? ari_bl_branch(run, scale[i] * value) : value);
        }
}

/* y [tokens, h] = the rows of each token's slots, in their order, times scale. */
static void combine(const ari_bl_run *run, double *y, const double *rows, const ari_bl_routed *r, const double *scale)
{
    const size_t k = run->c->experts.per_token, h = run->c->hidden;
    for (size_t i = 0; i < run->tokens * k; i++)
        for (size_t c = 0; c < h; c++) {
            const double value = rows[r->place[i] * h + c];
            const double term = scale != NULL ? ari_bl_branch(run, scale[i] * value) : value;
            double *sum = &y[i / k * h + c];
            *sum = i % k == 0 ? term : ari_bl_branch(run, *sum + term);
        }
    ari_bl_keep_all(run, y, run->tokens * h);
}

static ar_status take_mlp(ari_bl_run *run, ari_bl_mlp_saved *saved, size_t rows, size_t f)
{
    saved->fc = ari_bl_doubles(run, rows, 2 * f);
    saved->act = ari_bl_doubles(run, rows, f);
    saved->y = ari_bl_doubles(run, rows, run->c->hidden);
    return saved->fc == NULL || saved->act == NULL || saved->y == NULL ? run->memory : AR_OK;
}

/* Rows [first_row, first_row + rows) of saved, from x, whose first row is theirs. */
static ar_status expert_forward(ari_bl_run *run, const ari_bl_mlp *mlp, const ari_bl_mlp_saved *saved, const double *x,
                                size_t first_row, size_t rows)
{
    const size_t f = mlp->down.in_features;
    double *fc = saved->fc + first_row * 2 * f, *activated = saved->act + first_row * f;
    AR_TRY(ari_bl_linear_forward(run, &mlp->fc, fc, x, rows));
    AR_TRY(ari_bl_activate(run, activated, fc, rows, f));
    return ari_bl_linear_forward(run, &mlp->down, saved->y + first_row * run->c->hidden, activated, rows);
}

/* Emits a value of the shared expert. */
static ar_status emit_of_shared(ari_bl_run *run, const char *part, char pass, const double *x, size_t ld,
                                size_t first_col, size_t features)
{
    char name[PART_SIZE / 2];
    snprintf(name, sizeof name, "%s%s", shared_name(run), part);
    return emit(run, name, pass, x, ld, first_col, features);
}

/* y += sigmoid(x*v^T)*shared(x), or shared(x). */
static ar_status shared_forward(ari_bl_run *run, const ari_bl_experts *e, ari_bl_routed *r, double *y, const double *x)
{
    const size_t f = run->c->experts.shared, h = run->c->hidden;
    double *logit = ari_bl_doubles(run, run->tokens, 1);
    r->share = ari_bl_doubles(run, run->tokens, 1);
    AR_TRY(run->memory);
    AR_TRY(take_mlp(run, &r->shared, run->tokens, f));
    AR_TRY(expert_forward(run, &e->shared, &r->shared, x, 0, run->tokens));
    AR_TRY(emit_of_shared(run, ".gate_proj", 'f', r->shared.fc, 2 * f, 0, f));
    AR_TRY(emit_of_shared(run, ".up_proj", 'f', r->shared.fc, 2 * f, f, f));
    AR_TRY(emit_of_shared(run, ".act", 'f', r->shared.act, f, 0, f));
    AR_TRY(emit_of_shared(run, ".down_proj", 'f', r->shared.y, h, 0, h));
    for (size_t i = 0; i < run->tokens * h && run->c->experts.ungated; i++)
        y[i] = ari_bl_keep(run, ari_bl_branch(run, y[i] + r->shared.y[i]));
    if (run->c->experts.ungated)
        return AR_OK;
    AR_TRY(ari_bl_linear_forward(run, &e->shared_gate, logit, x, run->tokens));
    AR_TRY(emit(run, "shared_expert_gate", 'f', logit, 1, 0, 1));
    for (size_t t = 0; t < run->tokens; t++) {
        r->share[t] = ari_bl_sigmoid(run, logit[t]);
        for (size_t c = 0; c < h; c++)
            y[t * h + c] = ari_bl_branch(run, y[t * h + c] + ari_bl_branch(run, r->share[t] * r->shared.y[t * h + c]));
    }
    ari_bl_keep_all(run, y, run->tokens * h);
    return AR_OK;
}

ar_status ari_bl_experts_forward(ari_bl_run *run, const ari_bl_experts *e, ari_bl_routed *saved, double *y,
                                 const double *x)
{
    const ar_experts *config = &run->c->experts;
    const size_t h = run->c->hidden, rows = run->tokens * config->per_token;
    AR_TRY(route(run, e, saved, x));
    AR_TRY(ari_bl_balance_forward(run, e, saved));
    saved->x = ari_bl_doubles(run, rows, h);
    AR_TRY(run->memory);
    AR_TRY(take_mlp(run, &saved->experts, rows, config->ffn));
    spread(run, saved->x, x, saved, NULL);
    for (size_t i = 0; i < config->n; i++) {
        const size_t first_row = saved->expert_begin[i], n = saved->expert_begin[i + 1] - first_row;
        AR_TRY(expert_forward(run, &e->mlps[i], &saved->experts, saved->x + first_row * h, first_row, n));
    }
    combine(run, y, saved->experts.y, saved, saved->weight);
    AR_TRY(emit(run, "experts", 'f', y, h, 0, h));
    if (config->shared > 0)
        AR_TRY(shared_forward(run, e, saved, y, x));
    return emit(run, "", 'f', y, h, 0, h);
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

/* Emits the values between the matrices of the shared expert. */
static ar_status emit_shared(ari_bl_run *run, const double *dact, const double *dfc, size_t f)
{
    AR_TRY(emit_of_shared(run, ".down_proj", 'b', dact, f, 0, f));
    AR_TRY(emit_of_shared(run, ".gate", 'b', dfc, 2 * f, 0, f));
    return emit_of_shared(run, ".up", 'b', dfc, 2 * f, f, f);
}

/* Computes dx of rows [first_row, first_row + rows) from dy; both begin with these rows. sample_begin: as in
 * ari_bl_terms; NULL: the shared expert. */
static ar_status expert_backward(ari_bl_run *run, const ari_bl_mlp *mlp, double *dx, const double *dy,
                                 const ari_bl_mlp_saved *saved, const double *x, size_t first_row, size_t rows,
                                 const size_t *sample_begin)
{
    ARI_BL_SCOPE(run);
    const size_t f = mlp->down.in_features;
    double *dact = ari_bl_doubles(run, rows, f), *dfc = ari_bl_doubles(run, rows, 2 * f);
    AR_TRY(run->memory);
    AR_TRY(ari_bl_linear_backward(run, &mlp->down, dact, dy, rows));
    AR_TRY(ari_bl_linear_gradients(run, &mlp->down, dy, saved->act + first_row * f, sample_begin));
    AR_TRY(ari_bl_activate_backward(run, dfc, dact, saved->fc + first_row * 2 * f, rows, f, -1.0));
    if (sample_begin == NULL)
        AR_TRY(emit_shared(run, dact, dfc, f));
    AR_TRY(ari_bl_linear_backward(run, &mlp->fc, dx, dfc, rows));
    return ari_bl_linear_gradients(run, &mlp->fc, dfc, x, sample_begin);
}

/* Returns the dot product of a and b, with the terms summed as section 4 of numerics.md says. work: [n]. */
static double dot(const ari_bl_run *run, const double *a, const double *b, size_t n, double *work)
{
    for (size_t i = 0; i < n; i++)
        work[i] = a[i] * b[i];
    return ari_bl_branch(run, ari_bl_row_sum(run, work, n));
}

static void add(const ari_bl_run *run, double *dx, const double *addend)
{
    for (size_t i = 0; i < run->tokens * run->c->hidden; i++)
        dx[i] = ari_bl_keep(run, ari_bl_branch(run, dx[i] + addend[i]));
}

/* Adds the gradient through the shared expert and through its gate to dx. work: [h]. */
static ar_status shared_backward(ari_bl_run *run, const ari_bl_experts *e, double *dx, const double *dy,
                                 const ari_bl_routed *r, const double *x, double *work)
{
    const size_t h = run->c->hidden;
    double *dshared = ari_bl_doubles(run, run->tokens, h), *dlogit = ari_bl_doubles(run, run->tokens, 1);
    double *dx_part = ari_bl_doubles(run, run->tokens, h);
    AR_TRY(run->memory);
    for (size_t t = 0; t < run->tokens && !run->c->experts.ungated; t++) {
        const double share = r->share[t], dshare = dot(run, dy + t * h, r->shared.y + t * h, h, work);
        dlogit[t] = ari_bl_keep(run, ari_bl_branch(run, dshare * (share * (1.0 - share))));
        for (size_t c = 0; c < h; c++)
            dshared[t * h + c] = ari_bl_keep(run, ari_bl_branch(run, share * dy[t * h + c]));
    }
    AR_TRY(expert_backward(run, &e->shared, dx_part, run->c->experts.ungated ? dy : dshared, &r->shared, x, 0,
                           run->tokens, NULL));
    AR_TRY(emit_of_shared(run, "", 'b', dx_part, h, 0, h));
    add(run, dx, dx_part);
    if (run->c->experts.ungated)
        return AR_OK;
    AR_TRY(ari_bl_linear_backward(run, &e->shared_gate, dx_part, dlogit, run->tokens));
    AR_TRY(emit(run, "shared_expert_gate", 'b', dx_part, h, 0, h));
    AR_TRY(ari_bl_linear_gradients(run, &e->shared_gate, dlogit, x, NULL));
    add(run, dx, dx_part);
    return AR_OK;
}

/* dx += the gradient through the router. */
static ar_status router_backward(ari_bl_run *run, const ari_bl_experts *e, double *dx, const double *g,
                                 const ari_bl_routed *r, const double *x)
{
    const size_t n = run->c->experts.n, h = run->c->hidden;
    double *dz = ari_bl_doubles(run, run->tokens, n), *dx_part = ari_bl_doubles(run, run->tokens, h);
    AR_TRY(run->memory);
    AR_TRY(emit_slots(run, "weights", 'b', r, g));
    ari_bl_router_gradient(run, dz, g, r);
    ari_bl_keep_all(run, dz, run->tokens * n);
    AR_TRY(ari_bl_balance_backward(run, dz, r));
    ari_bl_keep_all(run, dz, run->tokens * n);
    AR_TRY(emit(run, "logits", 'b', dz, n, 0, n));
    AR_TRY(ari_bl_linear_backward(run, &e->gate, dx_part, dz, run->tokens));
    AR_TRY(emit(run, router_name(run), 'b', dx_part, h, 0, h));
    AR_TRY(ari_bl_linear_gradients(run, &e->gate, dz, x, NULL));
    add(run, dx, dx_part);
    return AR_OK;
}

ar_status ari_bl_experts_backward(ari_bl_run *run, const ari_bl_experts *e, double *dx, const double *dy,
                                  const ari_bl_routed *saved, const double *x)
{
    const ar_experts *config = &run->c->experts;
    ARI_BL_SCOPE(run);
    const size_t h = run->c->hidden, k = config->per_token;
    double *dmade = ari_bl_doubles(run, run->tokens * k, h), *drows = ari_bl_doubles(run, run->tokens * k, h);
    double *g = ari_bl_doubles(run, run->tokens, k), *work = ari_bl_doubles(run, 1, h);
    AR_TRY(run->memory);
    for (size_t i = 0; i < run->tokens * k; i++)
        g[i] = dot(run, dy + i / k * h, saved->experts.y + saved->place[i] * h, h, work);
    spread(run, dmade, dy, saved, saved->weight);
    for (size_t i = 0; i < config->n; i++) {
        const size_t first_row = saved->expert_begin[i], n = saved->expert_begin[i + 1] - first_row;
        AR_TRY(expert_backward(run, &e->mlps[i], drows + first_row * h, dmade + first_row * h, &saved->experts,
                               saved->x + first_row * h, first_row, n, saved->sample_begin + i * (run->b + 1)));
    }
    combine(run, dx, drows, saved, NULL);
    AR_TRY(emit(run, "experts", 'b', dx, h, 0, h));
    if (config->shared > 0)
        AR_TRY(shared_backward(run, e, dx, dy, saved, x, work));
    AR_TRY(router_backward(run, e, dx, g, saved, x));
    return emit(run, "", 'b', dx, h, 0, h);
}
