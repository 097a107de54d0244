/* SPDX-License-Identifier: Apache-2.0 */
/* Transformer block and its backward pass: r = x + attention(norm1(x)), y = r + mlp(norm2(r)); with a parallel residual
 * y = r + mlp(norm2(x)) or y = r + mlp(norm1(x)). Norms apply to the inputs of attention and MLP, to their outputs, or
 * to both. */
#include "anyrank/activation.h"
#include "anyrank/config.h"
#include "ref/baseline/run.h"

#include <math.h>
#include <stdio.h>

#include "ref/numerics/activation.h"
#include "ref/numerics/elementary.h"

static void enter_block(ari_bl_run *run, size_t layer)
{
    static const ar_rope no_rope = {.kind = AR_ROPE_NONE};
    snprintf(run->prefix, sizeof run->prefix, "%s.%zu", run->names->blocks, layer);
    run->window = ar_config_window(run->c, layer);
    run->rope = ar_config_turns(run->c, layer) ? ar_config_layer_rope(run->c, layer) : &no_rope;
}

static void leave_block(ari_bl_run *run)
{
    run->prefix[0] = '\0';
}

static double act(const ari_bl_run *run, double x)
{
    const ar_activation kind = run->c->activation;
    return run->o->mode == AR_MODE_F64 ? ari_bl_branch(run, ari_act64(kind, x)) : (double)ari_act32(kind, (float)x);
}

/* Returns true if the factor of a gate's activation is limited: `up`, or for GPT-OSS 1 + up with up limited to [-7,
 * 7]. */
static bool is_limited(const ari_bl_run *run, double up)
{
    return run->c->activation == AR_ACT_CLAMPED && fabs(up) > 7.0;
}

static double up_of(const ari_bl_run *run, double up)
{
    const double limited = is_limited(run, up) ? copysign(7.0, up) : up;
    return run->c->activation == AR_ACT_CLAMPED ? ari_bl_fl(run, limited + 1.0) : up;
}

/* Returns the slope at x for element i; nearer to a kink than `doubt` it is the slope that the options choose. */
static double dact(const ari_bl_run *run, double x, double doubt, size_t i)
{
    const ar_activation kind = run->c->activation;
    if (run->o->mode != AR_MODE_F64)
        return (double)ari_dact32(kind, (float)x);
    return ari_bl_branch(run, fabs(x) <= doubt ? run->o->kink_slope(run->o->emit_user, i) : ari_dact64(kind, x));
}

/* Returns the uncertainty about the argument of relu, the only activation with a jump in its slope; negative: none. */
static double kink_doubt(const ari_bl_run *run)
{
    char argument[ARI_BL_NAME_SIZE], gradient[ARI_BL_NAME_SIZE];
    if (run->o->kink == NULL || run->c->activation != AR_ACT_RELU)
        return -1.0;
    ari_bl_name(run, argument, run->names->fc[0]);
    ari_bl_name(run, gradient, run->names->dfc[0]);
    return run->o->kink(run->o->emit_user, argument, gradient, (int)run->step);
}

static void add_rows(const ari_bl_run *run, double *y, const double *a, const double *b)
{
    for (size_t i = 0; i < run->tokens * run->c->hidden; i++)
        y[i] = ari_bl_keep(run, ari_bl_stream(run, a[i] + b[i]));
}

/* Scales the output of attention or MLP before it is added to the residual, or its gradient. y may be x. */
static void scale_rows(const ari_bl_run *run, double *y, const double *x)
{
    const double factor = ari_bl_stored(run, run->c->branch_scale);
    for (size_t i = 0; i < run->tokens * run->c->hidden; i++)
        y[i] = ari_bl_keep(run, ari_bl_branch(run, x[i] * factor));
}

/* Rows of an MLP's activation: f features each; if gated, 2f at first. */
typedef struct activation {
    double *out, *dfc;
    const double *fc, *dout;
    size_t f;
    double doubt;
} activation;

/* flatten: compiles all called functions for each instruction set too. */
ARI_SIMD __attribute__((flatten)) static void activate_row(const ari_bl_run *run, double *out, const double *fc,
                                                           size_t f)
{
    for (size_t i = 0; i < f; i++) {
        const double a = act(run, fc[i]);
        out[i] = ari_bl_keep(run, run->c->gated ? ari_bl_branch(run, a * up_of(run, fc[f + i])) : a);
    }
}

static ar_status activate(ari_bl_run *run, void *task_arg, size_t t)
{
    const activation *a = task_arg;
    activate_row(run, a->out + t * a->f, a->fc + t * a->f * (run->c->gated ? 2 : 1), a->f);
    return AR_OK;
}

ar_status ari_bl_activate(ari_bl_run *run, double *out, const double *fc, size_t rows, size_t f)
{
    activation a = {.out = out, .fc = fc, .f = f};
    return ari_bl_each(run, rows, activate, &a);
}

/* `first_element`: the number of the row's first element. */
ARI_SIMD __attribute__((flatten)) static void activate_row_backward(const ari_bl_run *run, double *dfc,
                                                                    const double *dout, const double *fc, size_t f,
                                                                    double doubt, size_t first_element)
{
    for (size_t i = 0; i < f; i++) {
        const double dy = dout[i], x = fc[i];
        if (run->c->gated) {
            const double up = fc[f + i], dgate = ari_bl_branch(run, dy * up_of(run, up));
            dfc[i] = ari_bl_keep(run, ari_bl_branch(run, dgate * dact(run, x, doubt, first_element + i)));
            dfc[f + i] = is_limited(run, up) ? 0.0 : ari_bl_keep(run, ari_bl_branch(run, dy * act(run, x)));
        } else {
            dfc[i] = ari_bl_keep(run, ari_bl_branch(run, dy * dact(run, x, doubt, first_element + i)));
        }
    }
}

static ar_status activate_backward(ari_bl_run *run, void *task_arg, size_t t)
{
    const activation *a = task_arg;
    const size_t ld = a->f * (run->c->gated ? 2 : 1);
    activate_row_backward(run, a->dfc + t * ld, a->dout + t * a->f, a->fc + t * ld, a->f, a->doubt, t * a->f);
    return AR_OK;
}

ar_status ari_bl_activate_backward(ari_bl_run *run, double *dfc, const double *dout, const double *fc, size_t rows,
                                   size_t f, double doubt)
{
    activation a = {.dfc = dfc, .dout = dout, .fc = fc, .f = f, .doubt = doubt};
    return ari_bl_each(run, rows, activate_backward, &a);
}

/* Emits gate and up, or fc: the columns of [tokens, 2F] or [tokens, F] under their names. */
static ar_status emit_fc(ari_bl_run *run, const char *const names[2], char pass, const double *fc)
{
    const size_t f = run->c->ffn, ld = run->c->gated ? 2 * f : f;
    AR_TRY(ari_bl_emit_tokens(run, names[0], pass, fc, ld, 0, f));
    return run->c->gated ? ari_bl_emit_tokens(run, names[1], pass, fc, ld, f, f) : AR_OK;
}

/* Turns a branch's output into its contribution to the residual: normalised, scaled, then dropped out, as the config
 * says. In place. */
static ar_status branch_output(ari_bl_run *run, const ari_bl_norm *norm, ari_bl_norm_saved *saved, const char *site,
                               double *branch)
{
    const size_t h = run->c->hidden;
    if (run->c->norm_place != AR_NORM_BEFORE) {
        AR_TRY(ari_bl_norm_forward(run, norm, saved, branch));
        for (size_t i = 0; i < run->tokens * h; i++)
            branch[i] = saved->y[i];
    }
    if (run->c->branch_scale > 0.0)
        scale_rows(run, branch, branch);
    return run->o->dropout > 0.0 ? ari_bl_dropout(run, site, 'f', branch, branch, 0, h) : AR_OK;
}

static ar_status mlp_forward(ari_bl_run *run, const ari_bl_mlp *mlp, ari_bl_mlp_saved *saved, double *y,
                             const double *x)
{
    const ari_bl_names *names = run->names;
    const size_t f = run->c->ffn, h = run->c->hidden;
    saved->fc = ari_bl_doubles(run, run->tokens, mlp->fc.out);
    saved->act = ari_bl_doubles(run, run->tokens, f);
    AR_TRY(run->memory);
    AR_TRY(ari_bl_linear_forward(run, &mlp->fc, saved->fc, x, run->tokens));
    AR_TRY(emit_fc(run, names->fc, 'f', saved->fc));
    AR_TRY(ari_bl_activate(run, saved->act, saved->fc, run->tokens, f));
    AR_TRY(ari_bl_emit_tokens(run, names->act, 'f', saved->act, f, 0, f));
    AR_TRY(ari_bl_linear_forward(run, &mlp->down, y, saved->act, run->tokens));
    return ari_bl_emit_tokens(run, names->down_param, 'f', y, h, 0, h);
}

static size_t qkv_width(const ar_config *c)
{
    return (c->heads + c->kv_heads) * c->head_dim + c->kv_heads * ar_config_value_dim(c);
}

/* Reorders rows [head][q, k, v] to [q | k | v], head after head, or back, in place. */
static ar_status regroup(ari_bl_run *run, double *rows, bool back)
{
    const size_t heads = run->c->heads, d = run->c->head_dim, width = 3 * heads * d;
    double *row = ari_bl_doubles(run, width, 1);
    AR_TRY(run->memory);
    for (size_t t = 0; t < run->tokens; t++, rows += width) {
        for (size_t i = 0; i < width; i++)
            row[i] = rows[i];
        for (size_t i = 0; i < width; i++) {
            const size_t which = i / (heads * d), head = i / d % heads, interleaved = (head * 3 + which) * d + i % d;
            rows[back ? interleaved : i] = row[back ? i : interleaved];
        }
    }
    return AR_OK;
}

ar_status ari_bl_block_forward(ari_bl_run *run, size_t layer, const ari_bl_params *p, ari_bl_block *saved,
                               const double *x)
{
    enter_block(run, layer);
    const ari_bl_names *names = run->names;
    const size_t h = run->c->hidden;
    saved->y = ari_bl_doubles(run, run->tokens, h);
    saved->attention_x = x;
    if (run->c->norm_place != AR_NORM_AFTER) {
        AR_TRY(ari_bl_norm_forward(run, &p->ln1, &saved->n1, x));
        saved->attention_x = saved->n1.y;
    }
    double *qkv = ari_bl_doubles(run, run->tokens, qkv_width(run->c));
    double *branch = ari_bl_doubles(run, run->tokens, h), *r = ari_bl_doubles(run, run->tokens, h);
    AR_TRY(run->memory);

    AR_TRY(run->c->latent.kv_rank > 0 ? ari_bl_latent_forward(run, &p->latent, &saved->latent, qkv, saved->attention_x)
                                      : ari_bl_linear_forward(run, &p->qkv, qkv, saved->attention_x, run->tokens));
    if (names->by_head)
        AR_TRY(regroup(run, qkv, false));
    AR_TRY(ari_bl_attention_forward(run, &saved->attention, p, qkv));
    AR_TRY(ari_bl_linear_forward(run, &p->o, branch, saved->attention.context, run->tokens));
    AR_TRY(ari_bl_emit_tokens(run, names->o_param, 'f', branch, h, 0, h));
    AR_TRY(branch_output(run, &p->attention_norm, &saved->attention_norm, names->drop_attention, branch));
    add_rows(run, r, x, branch);
    if (run->c->residual == AR_RESIDUAL_IN_TURN)
        AR_TRY(ari_bl_emit_tokens(run, names->residual, 'f', r, h, 0, h));

    if (run->c->residual == AR_RESIDUAL_PARALLEL_ONE_NORM) {
        saved->mlp_x = saved->attention_x;
    } else {
        saved->mlp_x = run->c->residual == AR_RESIDUAL_PARALLEL ? x : r;
        if (run->c->norm_place != AR_NORM_AFTER) {
            AR_TRY(ari_bl_norm_forward(run, &p->ln2, &saved->n2, saved->mlp_x));
            saved->mlp_x = saved->n2.y;
        }
    }
    if (p->experts.mlps != NULL)
        AR_TRY(ari_bl_experts_forward(run, &p->experts, &saved->routed, branch, saved->mlp_x));
    else
        AR_TRY(mlp_forward(run, &p->mlp, &saved->mlp, branch, saved->mlp_x));
    AR_TRY(branch_output(run, &p->mlp_norm, &saved->mlp_norm, names->drop_mlp, branch));
    add_rows(run, saved->y, r, branch);
    AR_TRY(ari_bl_emit_tokens(run, "", 'f', saved->y, h, 0, h));
    leave_block(run);
    return AR_OK;
}

/* Computes the gradient of a branch's output from the gradient of its contribution to the residual. */
static ar_status branch_gradient(ari_bl_run *run, const ari_bl_norm *norm, const ari_bl_norm_saved *saved,
                                 const char *site, const double **dbranch, const double *dy)
{
    *dbranch = dy;
    if (run->o->dropout > 0.0) {
        double *dropped = ari_bl_doubles(run, run->tokens, run->c->hidden);
        AR_TRY(run->memory);
        *dbranch = dropped;
        AR_TRY(ari_bl_dropout(run, site, 'b', dropped, dy, 0, run->c->hidden));
        ari_bl_keep_all(run, dropped, run->tokens * run->c->hidden);
    }
    if (run->c->branch_scale > 0.0) {
        double *scaled = ari_bl_doubles(run, run->tokens, run->c->hidden);
        AR_TRY(run->memory);
        scale_rows(run, scaled, *dbranch);
        *dbranch = scaled;
    }
    if (run->c->norm_place == AR_NORM_BEFORE)
        return AR_OK;
    double *dmade = ari_bl_doubles(run, run->tokens, run->c->hidden);
    const double *dnormed = *dbranch;
    AR_TRY(run->memory);
    *dbranch = dmade;
    AR_TRY(ari_bl_norm_backward(run, norm, dmade, NULL, NULL, dnormed, saved));
    return ari_bl_norm_gradients(run, norm, dnormed, saved);
}

/* Computes dx = dy + the gradient through a branch. din: gradient of the branch's input, which is x or x normalised. */
static ar_status add_branch(ari_bl_run *run, const ari_bl_norm *norm, const ari_bl_norm_saved *saved, double *dx,
                            const double *dy, const double *din)
{
    if (run->c->norm_place == AR_NORM_AFTER) {
        add_rows(run, dx, dy, din);
        return AR_OK;
    }
    double *dbranch = ari_bl_doubles(run, run->tokens, run->c->hidden);
    AR_TRY(run->memory);
    AR_TRY(ari_bl_norm_backward(run, norm, dbranch, dx, dy, din, saved));
    return ari_bl_norm_gradients(run, norm, din, saved);
}

static ar_status mlp_backward(ari_bl_run *run, const ari_bl_mlp *mlp, double *dx, const double *dy,
                              const ari_bl_mlp_saved *saved, const double *x)
{
    const ari_bl_names *names = run->names;
    const size_t h = run->c->hidden, f = run->c->ffn;
    double *dact_out = ari_bl_doubles(run, run->tokens, f), *dfc = ari_bl_doubles(run, run->tokens, mlp->fc.out);
    AR_TRY(run->memory);
    AR_TRY(ari_bl_linear_backward(run, &mlp->down, dact_out, dy, run->tokens));
    AR_TRY(ari_bl_emit_tokens(run, names->down_param, 'b', dact_out, f, 0, f));
    AR_TRY(ari_bl_linear_gradients(run, &mlp->down, dy, saved->act, NULL));
    AR_TRY(ari_bl_activate_backward(run, dfc, dact_out, saved->fc, run->tokens, f, kink_doubt(run)));
    AR_TRY(emit_fc(run, names->dfc, 'b', dfc));
    AR_TRY(ari_bl_linear_backward(run, &mlp->fc, dx, dfc, run->tokens));
    AR_TRY(ari_bl_emit_tokens(run, names->dmlp, 'b', dx, h, 0, h));
    return ari_bl_linear_gradients(run, &mlp->fc, dfc, x, NULL);
}

/* The gradient of the MLP's or the experts' input. */
static ar_status mlp_branch_backward(ari_bl_run *run, const ari_bl_params *p, double *din, const double *dy,
                                     const ari_bl_block *saved)
{
    const double *dmade;
    AR_TRY(branch_gradient(run, &p->mlp_norm, &saved->mlp_norm, run->names->drop_mlp, &dmade, dy));
    if (p->experts.mlps != NULL)
        return ari_bl_experts_backward(run, &p->experts, din, dmade, &saved->routed, saved->mlp_x);
    return mlp_backward(run, &p->mlp, din, dmade, &saved->mlp, saved->mlp_x);
}

/* The gradient of the attention's input. */
static ar_status attention_branch_backward(ari_bl_run *run, const ari_bl_params *p, double *din, const double *dy,
                                           const ari_bl_block *saved)
{
    const ari_bl_names *names = run->names;
    const size_t h = run->c->hidden;
    double *dcontext = ari_bl_doubles(run, run->tokens, p->o.in_features),
           *dqkv = ari_bl_doubles(run, run->tokens, qkv_width(run->c));
    AR_TRY(run->memory);
    const double *dout;
    AR_TRY(branch_gradient(run, &p->attention_norm, &saved->attention_norm, names->drop_attention, &dout, dy));
    AR_TRY(ari_bl_linear_backward(run, &p->o, dcontext, dout, run->tokens));
    AR_TRY(ari_bl_emit_tokens(run, names->o_param, 'b', dcontext, p->o.in_features, 0, p->o.in_features));
    AR_TRY(ari_bl_linear_gradients(run, &p->o, dout, saved->attention.context, NULL));
    AR_TRY(ari_bl_attention_backward(run, dqkv, dcontext, p, &saved->attention));
    if (run->c->latent.kv_rank > 0)
        return ari_bl_latent_backward(run, &p->latent, din, dqkv, &saved->latent, saved->attention_x);
    if (names->by_head)
        AR_TRY(regroup(run, dqkv, true));
    AR_TRY(ari_bl_linear_backward(run, &p->qkv, din, dqkv, run->tokens));
    AR_TRY(ari_bl_emit_tokens(run, names->dattention, 'b', din, h, 0, h));
    return ari_bl_linear_gradients(run, &p->qkv, dqkv, saved->attention_x, NULL);
}

/* Backward for r = x + attention, y = r + MLP of r: dr = dy + the gradient through the MLP, dx = dr + the gradient of
 * dr through attention. */
static ar_status backward_in_turn(ari_bl_run *run, const ari_bl_params *p, double *dx, const double *dy,
                                  const ari_bl_block *saved, double *din, double *dr)
{
    const size_t h = run->c->hidden;
    AR_TRY(mlp_branch_backward(run, p, din, dy, saved));
    AR_TRY(add_branch(run, &p->ln2, &saved->n2, dr, dy, din));
    AR_TRY(ari_bl_emit_tokens(run, run->names->residual, 'b', dr, h, 0, h));
    AR_TRY(attention_branch_backward(run, p, din, dr, saved));
    return add_branch(run, &p->ln1, &saved->n1, dx, dr, din);
}

/* Backward pass of y = x + attention of x + MLP of x: dx = (dy + through the MLP) + through attention, both of dy. With
 * one shared norm it is dy + the sum of both through the norm. */
static ar_status backward_parallel(ari_bl_run *run, const ari_bl_params *p, double *dx, const double *dy,
                                   const ari_bl_block *saved, double *din, double *dr)
{
    AR_TRY(mlp_branch_backward(run, p, din, dy, saved));
    if (run->c->residual == AR_RESIDUAL_PARALLEL) {
        AR_TRY(add_branch(run, &p->ln2, &saved->n2, dr, dy, din));
        AR_TRY(attention_branch_backward(run, p, din, dy, saved));
        return add_branch(run, &p->ln1, &saved->n1, dx, dr, din);
    }
    AR_TRY(attention_branch_backward(run, p, dr, dy, saved));
    add_rows(run, din, dr, din);
    return add_branch(run, &p->ln1, &saved->n1, dx, dy, din);
}

ar_status ari_bl_block_backward(ari_bl_run *run, size_t layer, const ari_bl_params *p, double *dx, const double *dy,
                                const ari_bl_block *saved)
{
    enter_block(run, layer);
    const ari_bl_memory *mark = run->top;
    const size_t h = run->c->hidden;
    double *din = ari_bl_doubles(run, run->tokens, h), *dr = ari_bl_doubles(run, run->tokens, h);
    AR_TRY(run->memory);
    AR_TRY((run->c->residual == AR_RESIDUAL_IN_TURN ? backward_in_turn : backward_parallel)(run, p, dx, dy, saved, din,
                                                                                            dr));
    AR_TRY(ari_bl_emit_tokens(run, "", 'b', dx, h, 0, h));
    ari_bl_release(run, mark);
    leave_block(run);
    return AR_OK;
}
