/* SPDX-License-Identifier: Apache-2.0 */
/* Compares a module's gradients with finite differences of its loss; check_module.h describes the method. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "anyrank/context.h"
#include "anyrank/loss.h"
#include "anyrank/param.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/loss.h"
#include "ref/layers/module_private.h"
#include "ref/layers/parts.h"
#include "ref/numerics/philox.h"
#include "verify/check/check_run.h"
#include "verify/gradcheck/gradcheck.h"

enum { STEPS = 8, ALL_USE = 9 };
static const double FIRST_STEP = 0.125;       /* first step, relative to the size of the moved values */
static const double ROUNDING = 0x1p-24;       /* unit roundoff of fp32 */
static const double TERM_ROUNDING = 4.0;      /* units by which the mean of the terms may be off */
static const double SAFETY = 4.0;             /* times the estimated error */
static const double GRADIENT_FLOOR = 0x1p-20; /* error that fp32 sums may cause in the gradient, relative to its size */
static const double RESOLVED = 0.1;    /* largest allowance of a meaningful probe, relative to the gradient's size */
static const double NO_SIZE = 0x1p-10; /* lower bound for the size of a gradient, relative to the largest gradient */

/* A tensor whose values are perturbed. */
typedef struct subject {
    ar_param *param; /* NULL: the input */
    size_t count;
    float *values, *moved; /* [count] */
    double *gradient;      /* [count] */
    double size;           /* root mean square of the values; 1 if all are 0 */
    double largest, norm;  /* of the gradient: max|g| and sqrt(sum g^2) */
    bool finite;
} subject;

typedef struct checking {
    const ar_module_case *c;
    const ar_check_module_options *o;
    ar_gradcheck_module_report *report;
    ar_batch batch;
    ar_ctx *ctx;
    ar_module *module;
    ar_loss *loss;
    ar_param **params;
    size_t n_params;
    ari_arena arena;
    subject *subjects; /* [n] parameters that require a gradient, then a numeric input */
    size_t n;
    double largest, norm; /* maxima over all subjects */
    double worst;         /* ratio of the error to the allowance */
} checking;

/* --- gradients ---------------------------------------------------------------------------------------------------- */

static void measure_subject(subject *s)
{
    double squares = 0.0, sum = 0.0;
    s->finite = true;
    for (size_t i = 0; i < s->count; i++) {
        squares += (double)s->values[i] * (double)s->values[i];
        sum += s->gradient[i] * s->gradient[i];
        s->largest = fmax(s->largest, fabs(s->gradient[i]));
        s->finite = s->finite && isfinite(s->gradient[i]);
    }
    s->size = squares > 0.0 ? sqrt(squares / (double)s->count) : 1.0;
    s->norm = sqrt(sum);
}

/* values: on the device; host: the input's values. */
static ar_status add_subject(checking *k, ar_param *p, const float *host, const ar_tensor *values, const ar_tensor *g)
{
    subject *s = &k->subjects[k->n++];
    *s = (subject){.param = p, .count = ar_tensor_count(g)};
    AR_TRY(ARI_TAKE(&s->values, &k->arena, s->count, "values of a gradcheck"));
    AR_TRY(ARI_TAKE(&s->moved, &k->arena, s->count, "values of a gradcheck"));
    AR_TRY(ARI_TAKE(&s->gradient, &k->arena, s->count, "gradients of a gradcheck"));
    if (host)
        memcpy(s->values, host, s->count * sizeof *s->values);
    else
        AR_TRY(ar_ctx_download(k->ctx, s->values, values));
    AR_TRY(ar_ctx_download(k->ctx, s->moved, g));
    for (size_t i = 0; i < s->count; i++)
        s->gradient[i] = (double)s->moved[i];
    measure_subject(s);
    k->largest = fmax(k->largest, s->largest);
    k->norm = fmax(k->norm, s->norm);
    return AR_OK;
}

static ar_status run_forward(checking *k, ar_saved *saved, ar_tensor *x)
{
    ar_tensor y;
    AR_TRY(ari_batch_input(k->ctx, x, &k->batch));
    AR_TRY(ar_module_forward(k->module, k->ctx, saved, &y, x, &k->batch));
    return ar_loss_forward(k->loss, k->ctx, saved, &y, &k->batch);
}

static ar_status run_backward(checking *k, ar_saved *saved)
{
    const bool moved = k->batch.input != NULL; /* ids cannot be */
    ar_tensor x, dx, dy, g;
    AR_TRY(ar_loss_zero(k->loss, k->ctx));
    AR_TRY(ar_module_zero_grad(k->module, k->ctx));
    AR_TRY(run_forward(k, saved, &x));
    AR_TRY(ar_loss_backward(k->loss, k->ctx, saved, &dy, &k->batch));
    AR_TRY(ar_module_backward(k->module, k->ctx, saved, moved ? &dx : NULL, &dy, &k->batch));
    AR_TRY(ar_loss_value(k->loss, k->ctx, &k->report->loss, k->batch.targets));
    for (size_t i = 0; i < k->n_params; i++) {
        ar_param *p = k->params[i];
        if (!p->requires_grad)
            continue;
        AR_TRY(ar_ctx_tensor(k->ctx, &g, AR_F32, p->value.ndim, p->value.shape));
        AR_TRY(ar_param_grad_value(p, k->ctx, &g));
        AR_TRY(add_subject(k, p, NULL, &p->value, &g));
    }
    if (!moved)
        return AR_OK;
    if (ar_tensor_count(&dx) != ar_tensor_count(&x) || !ari_tensor_is_contiguous(&dx))
        return ar_error_set(AR_ERR_SHAPE, "%s: dx has %zu elements, expected the input's %zu, contiguous", k->c->name,
                            ar_tensor_count(&dx), ar_tensor_count(&x));
    return add_subject(k, NULL, k->batch.input, NULL, &dx);
}

static ar_status take_gradients(checking *k)
{
    ar_saved *saved = NULL;
    AR_TRY(ari_module_list(&k->params, &k->n_params, k->module));
    AR_TRY(ARI_TAKE(&k->subjects, &k->arena, k->n_params + 1, "tensors of a gradcheck"));
    AR_TRY(ar_saved_create(&saved));
    const ar_status st = run_backward(k, saved);
    ar_saved_destroy(saved);
    ar_ctx_end_step(k->ctx);
    return st;
}

/* --- differences -------------------------------------------------------------------------------------------------- */

/* A direction: one element, or all elements, each up or down. */
typedef struct probe {
    subject *s;
    bool is_full;
    size_t index; /* index of the single element */
    uint64_t key; /* key of the random directions */
} probe;

static double sign_of(const probe *p, size_t i)
{
    return ari_random_u32(p->key, i, 0, ALL_USE) & 1u ? 1.0 : -1.0;
}

/* Moves the values by `step` along the direction, and adds the loss's terms there. change: of the gradient's product
 * with the values. */
static ar_status add_terms_at(checking *k, const probe *p, double step, double *change)
{
    subject *s = p->s;
    ar_tensor x;
    memcpy(s->moved, s->values, s->count * sizeof *s->moved);
    *change = 0.0;
    for (size_t i = p->is_full ? 0 : p->index; i < (p->is_full ? s->count : p->index + 1); i++) {
        s->moved[i] = (float)((double)s->values[i] + step * (p->is_full ? sign_of(p, i) : 1.0));
        *change += s->gradient[i] * ((double)s->moved[i] - (double)s->values[i]);
    }
    if (s->param) {
        AR_TRY(ar_ctx_upload(k->ctx, &s->param->value, s->moved));
        s->param->version++;
    } else {
        k->batch.input = s->moved;
    }
    AR_TRY(run_forward(k, NULL, &x));
    ar_ctx_end_step(k->ctx);
    return AR_OK;
}

/* *change = L(w + step*v) - L(w), computed as one exact sum of the terms of both losses, and the gradient's prediction
 * of it. */
static ar_status change_of(checking *k, const probe *p, double step, double *change, double *predicted)
{
    double zero_change = 0.0;
    float measured = 0.0f;
    AR_TRY(ar_loss_zero(k->loss, k->ctx));
    AR_TRY(add_terms_at(k, p, step, predicted));
    ari_loss_subtract(k->loss, true);
    const ar_status st = add_terms_at(k, p, 0.0, &zero_change);
    ari_loss_subtract(k->loss, false);
    AR_TRY(st);
    AR_TRY(ar_loss_value(k->loss, k->ctx, &measured, k->batch.targets));
    ar_ctx_end_step(k->ctx);
    *change = (double)measured;
    return AR_OK;
}

/* Computes e(h), and c(h), half the difference of the right-hand and left-hand slopes. */
static ar_status error_at(checking *k, const probe *p, double h, double *error, double *corner)
{
    double right = 0.0, left = 0.0, up = 0.0, down = 0.0;
    AR_TRY(change_of(k, p, h, &right, &up));
    AR_TRY(change_of(k, p, -h, &left, &down));
    *error = ((right - left) - (up - down)) / (2.0 * h);
    *corner = (right + left) / (2.0 * h);
    return AR_OK;
}

static ar_status restore(checking *k, const subject *s)
{
    if (!s->param) {
        k->batch.input = s->values;
        return AR_OK;
    }
    s->param->version++;
    return ar_ctx_upload(k->ctx, &s->param->value, s->values);
}

/* Bounds the contribution to e of kinks of the loss at steps up to h[from]. For a smooth loss c is proportional to h:
 * c(h) = 2c(h/2) up to terms in h^3, so the difference vanishes. */
static double corners(const double *c, size_t begin)
{
    double max_deviation = 0.0;
    for (size_t i = begin; i + 1 < STEPS; i++)
        max_deviation = fmax(max_deviation, fabs(c[i] - 2.0 * c[i + 1]));
    return max_deviation + fabs(c[STEPS - 1]);
}

/* Finds the entry of the tableau with the smallest error estimate. */
static void extrapolate(const double *e, const double *c, const double *h, double noise, double *value,
                        double *estimate)
{
    double a[STEPS][STEPS];
    *value = e[0];
    *estimate = (double)INFINITY;
    for (size_t i = 0; i < STEPS; i++) {
        double power = 1.0;
        a[i][0] = e[i];
        for (size_t j = 1; j <= i; j++) {
            power *= 4.0;
            a[i][j] = (power * a[i][j - 1] - a[i - 1][j - 1]) / (power - 1.0);
            const double delta = fmax(fabs(a[i][j] - a[i][j - 1]), fabs(a[i][j] - a[i - 1][j - 1]));
            const double total_error = delta + noise / h[i] + corners(c, i - j);
            if (!(total_error < *estimate))
                continue;
            *estimate = total_error;
            *value = a[i][j];
        }
    }
}

static void judge(checking *k, ar_gradcheck_tensor *t, const probe *p, double error, double estimate)
{
    const double largest = p->is_full ? k->norm : k->largest, subject_size = p->is_full ? p->s->norm : p->s->largest;
    const double size = fmax(fmax(subject_size, NO_SIZE * largest), (double)FLT_MIN);
    const double allowed = SAFETY * estimate + GRADIENT_FLOOR * size, ratio = fabs(error) / allowed;
    const bool wrong = !(fabs(error) <= allowed);
    t->probes++;
    t->wrong += wrong;
    t->unresolved += !wrong && allowed > RESOLVED * size;
    const double before = t->allowed > 0.0 ? t->error / t->allowed : -1.0;
    if (ratio > before || ratio != ratio) {
        t->error = fabs(error) / size;
        t->allowed = allowed / size;
    }
    if (ratio > k->worst || ratio != ratio) {
        k->worst = ratio;
        k->report->worst = (size_t)(t - k->report->tensor);
    }
}

static ar_status try_probe(checking *k, ar_gradcheck_tensor *t, const probe *p)
{
    const double size = p->is_full ? p->s->size : fmax(p->s->size, fabs((double)p->s->values[p->index]));
    double h[STEPS], e[STEPS], c[STEPS], value = 0.0, estimate = 0.0, step = FIRST_STEP * size;
    for (size_t i = 0; i < STEPS; i++, step *= 0.5) {
        h[i] = step;
        AR_TRY(error_at(k, p, step, &e[i], &c[i]));
    }
    extrapolate(e, c, h, TERM_ROUNDING * ROUNDING * fabs((double)k->report->loss), &value, &estimate);
    judge(k, t, p, value, estimate);
    return restore(k, p->s);
}

static ar_status check_subject(checking *k, subject *s)
{
    ar_gradcheck_tensor *t = &k->report->tensor[k->report->tensors++];
    snprintf(t->name, sizeof t->name, "%s", s->param ? s->param->name : "input");
    t->count = s->count;
    t->largest = s->largest;
    if (!s->finite) {
        t->probes = t->wrong = 1;
        t->error = (double)INFINITY;
        return AR_OK;
    }
    const uint64_t key = ari_stream_key(k->o->run.seed, t->name);
    ari_drawn d = {0};
    if (s->largest > 0.0)
        ari_draw_elements(&d, key, ARI_DRAWN, ARI_DRAWN_SMALL * s->largest, s->gradient, s->count);
    ari_draw_elements(&d, key, s->largest > 0.0 ? d.n + 1 : ARI_MAX_DRAWN, 0.0, s->gradient, s->count);
    for (size_t i = 0; i < d.n; i++)
        AR_TRY(try_probe(k, t, &(probe){.s = s, .index = d.indices[i]}));
    return s->count > 0 ? try_probe(k, t, &(probe){.s = s, .is_full = true, .key = key}) : AR_OK;
}

/* --- the check ---------------------------------------------------------------------------------------------------- */

static void sum_up(ar_gradcheck_module_report *r)
{
    for (size_t i = 0; i < r->tensors; i++) {
        r->probes += r->tensor[i].probes;
        r->wrong += r->tensor[i].wrong;
        r->unresolved += r->tensor[i].unresolved;
    }
    r->ok = r->wrong == 0 && r->unresolved * 4 <= r->probes;
}

static void fini(checking *k)
{
    ari_arena_end(&k->arena, NULL);
    free(k->params);
    ar_loss_destroy(k->loss);
    ar_module_destroy(k->module);
}

/* Allocates the report and its tensors in one block. */
static ar_status make_room(ar_gradcheck_module_report **r, checking *k)
{
    const size_t bytes = sizeof **r + k->n * sizeof *(*r)->tensor;
    ar_gradcheck_module_report *larger = realloc(k->report, bytes);
    if (!larger)
        return ar_error_set(AR_ERR_MEMORY, "no memory for %zu results", k->n);
    larger->tensor = (ar_gradcheck_tensor *)(larger + 1);
    memset(larger->tensor, 0, k->n * sizeof *larger->tensor);
    *r = k->report = larger;
    return AR_OK;
}

static ar_status rank_body(void *user, ar_ctx *ctx)
{
    checking *k = user;
    ar_gradcheck_module_report *r = k->report;
    ar_status st = AR_OK;
    k->ctx = ctx;
    AR_TRY(ari_module_build(k->c, k->o->run.seed, ctx, &k->module, &k->loss));
    k->batch.global_batch = k->batch.batch;
    k->batch.first_sample = 0;
    AR_TRY_TO(done, st, ar_loss_targets(&k->batch.targets, k->loss, ctx, &k->batch));
    AR_TRY_TO(done, st, take_gradients(k));
    AR_TRY_TO(done, st, make_room(&r, k));
    for (size_t i = 0; i < k->n; i++)
        AR_TRY_TO(done, st, check_subject(k, &k->subjects[i]));
    sum_up(r);
done:
    fini(k);
    return st;
}

ar_status ar_gradcheck_module(ar_gradcheck_module_report **out, const ar_module_case *c,
                              const ar_check_module_options *o)
{
    ar_gradcheck_module_report *r = NULL;
    ARI_ENDED(ari_cluster_result_fini) ari_cluster_result result = {0};
    AR_TRY(ari_module_case_check(c));
    AR_TRY(ari_module_run_check(&o->run, c->name));
    if (o->run.loss.router.balance != AR_BALANCE_NONE || o->run.loss.router.z_loss > 0.0)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "%s: the gradcheck of a module takes differences of its own loss: leave those of routers "
                            "out",
                            c->name);
    AR_TRY(ARI_ALLOC_ZERO(&r, 1, "a report"));
    snprintf(r->name, sizeof r->name, "%s", c->name);
    checking k = {.c = c, .o = o, .report = r};
    ar_status st = c->batch(c->user, 1, &k.batch);
    r->batch = k.batch.batch;
    const ari_cluster_options cluster = {.batch = &k.batch,
                                         .run.dropout = o->run.dropout,
                                         .run.loss = o->run.loss,
                                         .run.seed = o->run.seed,
                                         .run.numerics = AR_NUMERICS_EXACT,
                                         .run.device = o->run.device,
                                         .run.threads = o->run.threads,
                                         .run.sim = {.timeout_ns = o->run.sim.timeout_ns},
                                         .run.fault = o->run.fault,
                                         .body = rank_body,
                                         .body_user = &k};
    if (st == AR_OK)
        st = ari_cluster_run(&result, &cluster);
    if (st == AR_OK)
        *out = k.report;
    else
        free(k.report);
    return st;
}
