/* SPDX-License-Identifier: Apache-2.0 */
/* The gradient norm, clipping and the optimizers of numerics.md sections 4 and 6, written independently and with
 * ari_bl_fl, so that the same code serves the three number modes. */
#include "anyrank/config.h"
#include "ref/baseline/run.h"

#include <fnmatch.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ref/numerics/elementary.h"

/* Maximum numbers of parameters. A block has at most two branches with two norms each, four linear layers of three
 * parts with a weight and a bias each, three weights and biases per expert, two parameters of the router, and four of a
 * shared expert. A block for a further token has three more norms and a matrix. Outside of the blocks there are two
 * tables, a norm and a head: fewer than in one more block. */
enum { BLOCK_PARAMETERS = 35, ROUTER_PARAMETERS = 6, EXPERT_PARAMETERS = 6 };

/* --- the list ----------------------------------------------------------------------------------------------------- */

ar_status ari_bl_training_open(ari_bl_run *run)
{
    ari_bl_training *t = ari_bl_take(run, 1, 1, sizeof *t);
    ari_bl_trained *blocks =
        ari_bl_take(run, ar_config_blocks(run->c) + 1,
                    BLOCK_PARAMETERS + ROUTER_PARAMETERS + EXPERT_PARAMETERS * run->c->experts.n, sizeof *blocks);
    AR_TRY(run->memory);
    t->params = blocks;
    run->training = t;
    return AR_OK;
}

void ari_bl_training_add(ari_bl_run *run, const char *part, size_t rows, size_t cols, double *data, size_t row,
                         size_t col)
{
    if (run->training == NULL)
        return;
    ari_bl_trained *p = &run->training->params[run->training->n++];
    *p = (ari_bl_trained){.rows = rows, .cols = cols, .data = data, .row = row, .col = col};
    ari_bl_name(run, p->name, part);
}

void ari_bl_training_cut(ari_bl_run *run, int blocks, const size_t block[3])
{
    if (run->training == NULL)
        return;
    ari_bl_trained *p = &run->training->params[run->training->n - 1];
    while (!p->matrix)
        p--;
    p->blocks = blocks;
    memcpy(p->block, block, sizeof p->block);
}

static bool is_weight_of(const ari_bl_run *run, const ari_bl_trained *t, const char *module)
{
    char part[200], name[ARI_BL_NAME_SIZE];
    snprintf(part, sizeof part, "%s.weight", module);
    ari_bl_name(run, name, part);
    return strcmp(t->name, name) == 0;
}

ar_status ari_bl_training_clip(ari_bl_run *run, ari_bl_params *p, size_t first_param)
{
    const ar_config *c = run->c;
    size_t end = 0, first_output = 0;
    if (run->training == NULL || !(run->o->optimizer.qk_clip > 0.0))
        return AR_OK;
    p->largest = ari_bl_doubles(run, run->c->kv_heads, 1);
    AR_TRY(run->memory);
    for (size_t i = 0; i < run->c->kv_heads; i++)
        p->largest[i] = -INFINITY;
    for (size_t i = first_param; i < run->training->n; i++) {
        ari_bl_trained *t = &run->training->params[i];
        if (c->latent.kv_rank > 0) { /* for several stacked matrices, those that produce heads: q, then k | v head by
                                        head */
            const bool keys = is_weight_of(run, t, run->names->kv_b);
            if (!keys && !is_weight_of(run, t, c->latent.q_rank > 0 ? run->names->q_b : run->names->qkv_param[0]))
                continue;
            first_output = keys ? c->heads * c->head_dim : 0;
        } else if (t->cols > 0) { /* the bias belongs to the preceding weight */
            first_output = end;
            end += run->names->conv1d ? t->cols : t->rows;
        }
        t->largest = p->largest;
        t->first_output = first_output;
    }
    return AR_OK;
}

/* Elements of a row of the Hugging Face shape. */
static size_t width_of(const ari_bl_trained *p)
{
    return p->cols > 0 ? p->cols : 1;
}

static bool is_by_muon(const ari_bl_run *run, const ari_bl_trained *p)
{
    return run->o->optimizer.kind == AR_OPTIMIZER_MUON && p->matrix;
}

ar_status ari_bl_training_take(ari_bl_run *run)
{
    const ar_optimizer_options *o = &run->o->optimizer;
    for (size_t i = 0; i < run->training->n; i++) {
        ari_bl_trained *p = &run->training->params[i];
        p->gradient = ari_bl_doubles(run, p->rows, width_of(p));
        if (p->tokens != NULL)
            continue;
        const bool by_muon = is_by_muon(run, p), sgd = o->kind == AR_OPTIMIZER_SGD;
        if (!sgd || o->momentum != 0.0)
            p->m = ari_bl_doubles(run, p->rows, width_of(p));
        if (!sgd && !by_muon)
            p->v = ari_bl_doubles(run, p->rows, width_of(p));
        if (run->o->bf16 && p->cols > 0)
            p->master = ari_bl_doubles(run, p->rows, p->cols);
        AR_TRY(run->memory);
        for (size_t k = 0; p->master != NULL && k < p->rows * p->cols; k++)
            p->master[k] = p->data[k / p->cols * p->row + k % p->cols * p->col];
    }
    return AR_OK;
}

/* part: relative to the running module. */
bool ari_bl_is_frozen(const ari_bl_run *run, const char *part)
{
    char name[ARI_BL_NAME_SIZE];
    ari_bl_name(run, name, part);
    return run->o->frozen != NULL && run->o->frozen(run->o->emit_user, name, (int)run->step);
}

ar_status ari_bl_training_keep(ari_bl_run *run, const char *part, const double *gradient)
{
    char name[ARI_BL_NAME_SIZE];
    if (run->training == NULL)
        return AR_OK;
    ari_bl_name(run, name, part);
    for (size_t i = 0; i < run->training->n; i++) {
        ari_bl_trained *p = &run->training->params[i];
        if (strcmp(p->name, name) == 0) {
            p->frozen = gradient == NULL;
            if (p->frozen) /* zeros add nothing to the norm */
                memset(p->gradient, 0, p->rows * width_of(p) * sizeof *p->gradient);
            else
                memcpy(p->gradient, gradient, p->rows * width_of(p) * sizeof *gradient);
            return AR_OK;
        }
    }
    return ar_error_set(AR_ERR_INTERNAL, "baseline: a gradient of '%s', which is no parameter", name);
}

/* --- clipping ----------------------------------------------------------------------------------------------------- */

/* Computes one integer q = rint((g*2^-e)^2*2^60) per element, and sums its upper part and its lower 30 bits
 * separately. */
static double exact_norm(const ari_bl_training *t)
{
    int32_t e = ARI_EXP_ZERO;
    for (size_t i = 0; i < t->n; i++)
        for (size_t k = 0; k < t->params[i].rows * width_of(&t->params[i]); k++) {
            const int32_t of_g = ari_exponent64(t->params[i].gradient[k]);
            e = of_g > e ? of_g : e;
        }
    if (e == ARI_EXP_ZERO)
        return 0.0;
    if (e == ARI_EXP_NONFINITE)
        return (double)ari_nan32();
    int64_t high = 0, low = 0;
    for (size_t i = 0; i < t->n; i++)
        for (size_t k = 0; k < t->params[i].rows * width_of(&t->params[i]); k++) {
            const double g = ari_scale2(t->params[i].gradient[k], -e);
            const int64_t q = (int64_t)ari_rint(g * g * 0x1p60);
            high += q >> 30;
            low += q & ((1 << 30) - 1);
        }
    return (double)(float)ari_scale2(sqrt((double)high * 0x1p-30 + (double)low * 0x1p-60), e);
}

static double plain_norm(const ari_bl_run *run)
{
    const ari_bl_training *t = run->training;
    double sum = 0.0;
    for (size_t i = 0; i < t->n; i++)
        for (size_t k = 0; k < t->params[i].rows * width_of(&t->params[i]); k++) {
            const double g = t->params[i].gradient[k];
            sum = ari_bl_fl(run, sum + ari_bl_fl(run, g * g));
        }
    return ari_bl_fl(run, sqrt(sum));
}

static ar_status clip(ari_bl_run *run)
{
    const double norm = run->o->mode == AR_MODE_EXACT ? exact_norm(run->training) : plain_norm(run);
    AR_TRY(ari_bl_emit(run, "grad_norm", 'c', 0, NULL, &norm));
    if (ari_exponent64(norm) == ARI_EXP_NONFINITE)
        return ar_error_set(AR_ERR_DATA, "baseline: the gradient norm of step %u is %g: expected a finite one to clip",
                            (unsigned)run->step, norm);
    const double ratio = run->o->clip / (norm + 1e-6);
    const double factor = ari_bl_fl(run, ratio < 1.0 ? ratio : 1.0);
    for (size_t i = 0; i < run->training->n; i++) {
        const ari_bl_trained *p = &run->training->params[i];
        for (size_t k = 0; k < p->rows * width_of(p); k++)
            p->gradient[k] = ari_bl_fl(run, p->gradient[k] * factor);
    }
    return AR_OK;
}

/* --- optimizers --------------------------------------------------------------------------------------------------- */

/* Returns the step's learning rate before a group's scale: rising to lr during warm-up, then constant or decaying along
 * half a cosine to min_lr. */
static double rate_of_step(const ari_bl_run *run)
{
    const ar_optimizer_options *o = &run->o->optimizer;
    const double step = (double)run->step, warm = (double)o->warmup_steps, total = (double)o->total_steps;
    if (step < warm)
        return step / warm * o->lr;
    if (o->schedule != AR_SCHEDULE_COSINE || o->lr == 0.0)
        return o->lr;
    const double end = o->min_lr / o->lr;
    if (step >= total)
        return end * o->lr;
    const double turned = 3.141592653589793 * (step - warm) / (total - warm);
    return (end + (1.0 - end) * (ari_cos64(turned) + 1.0) / 2.0) * o->lr;
}

/* Derives one parameter's options from the step, the decay rule and the groups. */
static void begin_parameter(const ari_bl_run *run, ari_bl_trained *p)
{
    const ar_optimizer_options *o = &run->o->optimizer;
    double scale = 1.0, decay = o->weight_decay;
    if (o->decay == AR_DECAY_MATRICES && p->cols == 0)
        decay = 0.0;
    const double ruled = decay;
    for (size_t i = 0; i < o->groups; i++)
        if (fnmatch(o->group[i].glob, p->name, 0) == 0) {
            scale = o->group[i].lr_scale;
            decay = isnan(o->group[i].weight_decay) ? ruled : o->group[i].weight_decay;
        }
    p->lr = rate_of_step(run) * scale;
    p->weight_decay = decay;
}

/* Factors of one update that come from the options, rounded as the mode requires. */
typedef struct factors {
    double momentum, lr, decay, rest1, rest2, beta2, eps, step_size, root2;
} factors;

static factors factors_of(const ari_bl_run *run, const ari_bl_trained *p)
{
    const ar_optimizer_options *o = &run->o->optimizer;
    const ari_bl_training *t = run->training;
    factors f = {.momentum = ari_bl_fl(run, o->momentum), .lr = ari_bl_fl(run, p->lr)};
    f.decay = ari_bl_fl(run, p->weight_decay);
    if (o->kind == AR_OPTIMIZER_SGD)
        return f;
    f.rest1 = ari_bl_fl(run, 1.0 - o->beta1);
    f.rest2 = ari_bl_fl(run, 1.0 - o->beta2);
    f.beta2 = ari_bl_fl(run, o->beta2);
    f.eps = ari_bl_fl(run, o->eps);
    f.step_size = ari_bl_fl(run, p->lr / (1.0 - t->beta1_t));
    f.root2 = ari_bl_fl(run, sqrt(1.0 - t->beta2_t));
    if (o->kind != AR_OPTIMIZER_ADAM)
        f.decay = ari_bl_fl(run, 1.0 - p->lr * p->weight_decay);
    return f;
}

/* m = g in the first step, later momentum*m + g; w = w - lr*m, or with Nesterov w - lr*(g + momentum*m). */
static inline void sgd(const ari_bl_run *run, const ari_bl_trained *p, const factors *f, double *w, double *m, double g)
{
    if (p->weight_decay != 0.0)
        g = ari_bl_fl(run, g + ari_bl_fl(run, f->decay * *w));
    double step = g;
    if (m != NULL) {
        *m = run->step == 1 ? g : ari_bl_fl(run, ari_bl_fl(run, f->momentum * *m) + g);
        step = run->o->optimizer.nesterov ? ari_bl_fl(run, g + ari_bl_fl(run, f->momentum * *m)) : *m;
    }
    *w = ari_bl_fl(run, *w - ari_bl_fl(run, f->lr * step));
}

/* m = m + (1 - beta1)*(g - m); v = beta2*v + (1 - beta2)*g*g;
 * w = w - lr/(1 - beta1^t) * m/(sqrt(v)/sqrt(1 - beta2^t) + eps). */
static inline void adam(const ari_bl_run *run, const ari_bl_trained *p, const factors *f, double *w, double *m,
                        double *v, double g)
{
    if (run->o->optimizer.kind != AR_OPTIMIZER_ADAM)
        *w = ari_bl_fl(run, *w * f->decay);
    else if (p->weight_decay != 0.0)
        g = ari_bl_fl(run, g + ari_bl_fl(run, f->decay * *w));
    *m = ari_bl_fl(run, *m + ari_bl_fl(run, f->rest1 * ari_bl_fl(run, g - *m)));
    *v = ari_bl_fl(run, ari_bl_fl(run, f->beta2 * *v) + ari_bl_fl(run, ari_bl_fl(run, f->rest2 * g) * g));
    const double root = ari_bl_fl(run, ari_bl_fl(run, sqrt(*v)) / f->root2);
    const double ratio = ari_bl_fl(run, *m / ari_bl_fl(run, root + f->eps));
    *w = ari_bl_fl(run, *w - ari_bl_fl(run, f->step_size * ratio));
}

typedef struct update {
    const ari_bl_trained *p;
    factors f;
} update;

static ar_status update_row(ari_bl_run *run, void *arg, size_t r)
{
    const update *u = arg;
    const ari_bl_trained *p = u->p;
    for (size_t c = 0, i = r * width_of(p); c < width_of(p); c++, i++) {
        double *stored = &p->data[r * p->row + c * p->col], *w = p->master != NULL ? p->master + i : stored;
        if (run->o->optimizer.kind == AR_OPTIMIZER_SGD)
            sgd(run, p, &u->f, w, p->m != NULL ? p->m + i : NULL, p->gradient[i]);
        else
            adam(run, p, &u->f, w, p->m + i, p->v + i, p->gradient[i]);
        *stored = p->master != NULL ? ari_bl_keep(run, *w) : *w;
    }
    return AR_OK;
}

static ar_status update_weight(ari_bl_run *run, ari_bl_trained *p)
{
    begin_parameter(run, p);
    if (is_by_muon(run, p))
        return ari_bl_muon(run, p);
    update u = {p, factors_of(run, p)};
    return ari_bl_each(run, p->rows, update_row, &u);
}

/* Returns the clipping factor in latent attention: sqrt(bound/S) for features without positions, bound/S for a query's
 * features with positions. A key's last r features are shared by all heads and are not clipped. */
static double clip_latent(const ari_bl_run *run, const ari_bl_trained *p, size_t output, double bound)
{
    const ar_config *c = run->c;
    const size_t d = c->head_dim, queries = c->heads * d, plain = d - c->latent.rope_dim;
    const size_t head_width = output < queries ? d : plain + c->latent.value_dim;
    const size_t local_output = output < queries ? output : output - queries;
    const double ratio = bound / p->largest[local_output / head_width];
    if (!(p->largest[local_output / head_width] > bound) || (output >= queries && local_output % head_width >= plain))
        return 1.0;
    return ari_bl_fl(run, local_output % head_width < plain ? sqrt(ratio) : ratio);
}

/* Returns the factor of an output of q | k | v: sqrt(bound/S) of its KV head if S is above the bound, otherwise 1. */
static double clip_of(const ari_bl_run *run, const ari_bl_trained *p, size_t output)
{
    const ar_config *c = run->c;
    const size_t d = c->head_dim, heads = c->heads, groups = c->kv_heads;
    const double bound = run->o->optimizer.qk_clip;
    if (c->latent.kv_rank > 0)
        return clip_latent(run, p, output, bound);
    size_t group = output / d < heads ? output / d / (heads / groups) : output / d - heads;
    if (run->names->by_head)
        group = output / d % 3 == 2 ? groups : output / d / 3;
    return group < groups && p->largest[group] > bound ? ari_bl_fl(run, sqrt(bound / p->largest[group])) : 1.0;
}

static void clip_heads(const ari_bl_run *run, const ari_bl_trained *p)
{
    for (size_t r = 0; p->largest != NULL && r < p->rows; r++)
        for (size_t c = 0; c < width_of(p); c++) {
            const double clip = clip_of(run, p, p->first_output + (run->names->conv1d && p->cols > 0 ? c : r));
            double *stored = &p->data[r * p->row + c * p->col],
                   *w = p->master != NULL ? p->master + r * width_of(p) + c : stored;
            *w = ari_bl_fl(run, *w * clip);
            *stored = p->master != NULL ? ari_bl_keep(run, *w) : *w;
        }
}

/* b_i += u*sign(sum n - E*n_i). */
static void update_bias(const ari_bl_run *run, const ari_bl_trained *p)
{
    const double u = ari_bl_fl(run, run->o->loss.router.bias_update);
    int64_t sum = 0;
    for (size_t i = 0; i < p->rows; i++)
        sum += p->tokens[i];
    for (size_t i = 0; i < p->rows; i++) {
        const int64_t scaled_count = (int64_t)p->rows * p->tokens[i];
        p->data[i] = ari_bl_fl(run, p->data[i] + (scaled_count < sum   ? u
                                                  : scaled_count > sum ? -u
                                                                       : 0.0)); /* turns -0 into 0 */
    }
}

/* Moves the weights as far as their update is in doubt, or less. */
static void disturb(const ari_bl_run *run, const ari_bl_trained *p)
{
    const size_t width = width_of(p);
    if (run->noise == NULL || run->o->doubt == NULL)
        return;
    const float *doubt = run->o->doubt(run->o->emit_user, p->name, (int)run->step, p->rows * width);
    for (size_t i = 0; doubt != NULL && i < p->rows * width; i++)
        p->data[i / width * p->row + i % width * p->col] += (double)doubt[i] * ari_bl_noise_uniform(run->noise);
}

/* Emits the new value and the moments that produced it. */
static ar_status emit_new(ari_bl_run *run, const ari_bl_trained *p)
{
    if (run->o->emit == NULL)
        return AR_OK;
    const ari_bl_memory *mark = run->top;
    const size_t shape[2] = {p->rows, p->cols}, width = width_of(p);
    double *values = ari_bl_doubles(run, p->rows, width);
    AR_TRY(run->memory);
    for (size_t r = 0; r < p->rows; r++)
        for (size_t c = 0; c < width; c++)
            values[r * width + c] = p->data[r * p->row + c * p->col];
    const int ndim = p->cols > 0 ? 2 : 1;
    AR_TRY(ari_bl_emit(run, p->name, 'n', ndim, shape, values));
    ari_bl_release(run, mark);
    if (p->m != NULL)
        AR_TRY(ari_bl_emit(run, p->name, 'm', ndim, shape, p->m));
    if (p->v != NULL)
        AR_TRY(ari_bl_emit(run, p->name, 'v', ndim, shape, p->v));
    return AR_OK;
}

ar_status ari_bl_training_update(ari_bl_run *run)
{
    ari_bl_training *t = run->training;
    if (run->o->clip > 0.0)
        AR_TRY(clip(run));
    t->beta1_t = run->step == 1 ? run->o->optimizer.beta1 : t->beta1_t * run->o->optimizer.beta1;
    t->beta2_t = run->step == 1 ? run->o->optimizer.beta2 : t->beta2_t * run->o->optimizer.beta2;
    for (size_t i = 0; i < t->n; i++) {
        if (t->params[i].tokens != NULL) {
            if (run->o->loss.router.bias_update > 0.0)
                update_bias(run, &t->params[i]);
        } else if (!t->params[i].frozen) {
            AR_TRY(update_weight(run, &t->params[i]));
            clip_heads(run, &t->params[i]);
            disturb(run, &t->params[i]);
        }
        AR_TRY(emit_new(run, &t->params[i]));
    }
    for (size_t i = 0; i < t->n; i++)
        for (size_t k = 0; t->params[i].largest != NULL && k < run->c->kv_heads; k++)
            t->params[i].largest[k] = -INFINITY;
    return AR_OK;
}
