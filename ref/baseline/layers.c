/* SPDX-License-Identifier: Apache-2.0 */
/* Linear layers and norms, forward, backward and gradients. */
#include "anyrank/block.h"
#include "ref/baseline/run.h"

#include <math.h>

/* --- y = x*W^T + bias --------------------------------------------------------------------------------------------- */

ar_status ari_bl_linear_forward(ari_bl_run *run, const ari_bl_linear *l, double *y, const double *x, size_t rows)
{
    const ari_bl_matrix a = {x, l->in_features, 1}, b = {l->weight, l->in_features, 1};
    AR_TRY(ari_bl_contract(run, y, rows, l->out, l->in_features, a, b, ARI_BL_SCALED | ARI_BL_WEIGHT));
    ari_bl_keep_all(run, y, rows * l->out);
    if (l->bias != NULL)
        for (size_t t = 0; t < rows; t++)
            for (size_t i = 0; i < l->out; i++)
                y[t * l->out + i] = ari_bl_keep(run, ari_bl_branch(run, y[t * l->out + i] + l->bias[i]));
    return AR_OK;
}

/* Computes dx = dy*W, one contraction over the outputs of all parts. */
ar_status ari_bl_linear_backward(ari_bl_run *run, const ari_bl_linear *l, double *dx, const double *dy, size_t rows)
{
    const ari_bl_matrix a = {dy, l->out, 1}, b = {l->weight, 1, l->in_features};
    AR_TRY(ari_bl_contract(run, dx, rows, l->in_features, l->out, a, b,
                           ARI_BL_SCALED | ARI_BL_WEIGHT | (l->peaked ? ARI_BL_PEAKED : 0)));
    ari_bl_keep_all(run, dx, rows * l->in_features);
    return AR_OK;
}

/* Computes dW = dy^T*x for outputs [first_output, first_output + width), and emits it in the parameter's shape. */
static ar_status weight_gradient(ari_bl_run *run, const ari_bl_linear *l, int p, size_t first_output, const double *dy,
                                 const double *x, const size_t *sample_begin)
{
    const size_t in_features = l->in_features, width = l->width[p];
    double *dw = ari_bl_doubles(run, width, in_features);
    AR_TRY(run->memory);
    const ari_bl_terms terms = {.dy = dy + first_output, .ld = l->out, .x = x, .sample_begin = sample_begin};
    AR_TRY(ari_bl_gradient(run, dw, width, in_features, &terms));
    if (!l->conv1d)
        return ari_bl_emit_gradient(run, l->name[p], "weight", width, in_features, dw);
    double *turned = ari_bl_doubles(run, in_features, width);
    AR_TRY(run->memory);
    for (size_t o = 0; o < width; o++)
        for (size_t i = 0; i < in_features; i++)
            turned[i * width + o] = dw[o * in_features + i];
    return ari_bl_emit_gradient(run, l->name[p], "weight", in_features, width, turned);
}

ar_status ari_bl_linear_gradients(ari_bl_run *run, const ari_bl_linear *l, const double *dy, const double *x,
                                  const size_t *sample_begin)
{
    ARI_BL_SCOPE(run);
    double *dbias = ari_bl_doubles(run, l->out, 1);
    AR_TRY(run->memory);
    if (l->bias != NULL) {
        const ari_bl_terms terms = {.values = dy, .sample_begin = sample_begin};
        AR_TRY(ari_bl_gradient(run, dbias, 1, l->out, &terms));
    }
    size_t first_output = 0;
    for (int p = 0; p < l->parts; p++) {
        const ari_bl_memory *part_mark = run->top;
        AR_TRY(weight_gradient(run, l, p, first_output, dy, x, sample_begin));
        if (l->bias != NULL)
            AR_TRY(ari_bl_emit_gradient(run, l->name[p], "bias", l->width[p], 0, dbias + first_output));
        first_output += l->width[p];
        ari_bl_release(run, part_mark);
    }
    return AR_OK;
}

/* --- norms: numerics.md section 4 ---------------------------------------------------------------------------- */

/* A norm's factor for feature i. */
static double gain(const ari_bl_run *run, const ari_bl_norm *norm, size_t i)
{
    return run->c->norm_plus_one ? ari_bl_fl(run, 1.0 + norm->weight[i]) : norm->weight[i];
}

/* Normalises one row: d = x - mean for LayerNorm, d = x for RMSNorm. `work` has space for h values. */
static void norm_row(const ari_bl_run *run, const ari_bl_norm *norm, double *y, double *xhat, double *rstd,
                     const double *x, double *work)
{
    const size_t h = norm->width;
    const double width = (double)h;
    const bool centred = run->c->norm == AR_NORM_LAYER;
    const double mean = centred ? ari_bl_row_sum(run, x, h) / width : 0.0;
    for (size_t i = 0; i < h; i++) {
        xhat[i] = centred ? ari_bl_fl(run, x[i] - mean) : x[i];
        work[i] = xhat[i] * xhat[i];
    }
    *rstd = ari_bl_fl(run, 1.0 / sqrt(ari_bl_row_sum(run, work, h) / width + norm->eps));
    for (size_t i = 0; i < h; i++) {
        xhat[i] = ari_bl_stream(run, xhat[i] * *rstd);
        y[i] = ari_bl_stream(run, xhat[i] * gain(run, norm, i));
        if (norm->bias != NULL)
            y[i] = ari_bl_stream(run, y[i] + norm->bias[i]);
        y[i] = ari_bl_keep(run, y[i]);
    }
}

/* A norm of independent rows. */
typedef struct norm_rows {
    const ari_bl_norm *norm;
    const ari_bl_norm_saved *saved;
    const double *x, *dy;
    double *dx;
} norm_rows;

static ar_status forward_row(ari_bl_run *run, void *arg, size_t t)
{
    ARI_BL_SCOPE(run);
    const norm_rows *r = arg;
    const size_t h = r->norm->width;
    double *work = ari_bl_doubles(run, 1, h);
    AR_TRY(run->memory);
    norm_row(run, r->norm, r->saved->y + t * h, r->saved->xhat + t * h, r->saved->rstd + t, r->x + t * h, work);
    return AR_OK;
}

ar_status ari_bl_norm_forward(ari_bl_run *run, const ari_bl_norm *norm, ari_bl_norm_saved *saved, const double *x)
{
    const size_t h = norm->width, rows = run->tokens * norm->per_token, features = h * norm->per_token;
    saved->y = ari_bl_doubles(run, rows, h);
    saved->xhat = ari_bl_doubles(run, rows, h);
    saved->rstd = ari_bl_doubles(run, rows, 1);
    AR_TRY(run->memory);
    norm_rows args = {.norm = norm, .saved = saved, .x = x};
    AR_TRY(ari_bl_each(run, rows, forward_row, &args));
    return ari_bl_emit_tokens(run, norm->name, 'f', saved->y, features, 0, features);
}

/* Computes dx = ((g - a) - xhat*b)*rstd with g = dy*gamma, a = S(g)/h (0 for RMSNorm), b = S(g*xhat)/h. */
static ar_status backward_row(ari_bl_run *run, void *arg, size_t t)
{
    ARI_BL_SCOPE(run);
    const norm_rows *r = arg;
    const size_t h = r->norm->width;
    const double *xhat = r->saved->xhat + t * h;
    double *g = ari_bl_doubles(run, 2, h), *work = g + h;
    AR_TRY(run->memory);
    for (size_t i = 0; i < h; i++) {
        g[i] = ari_bl_stream(run, r->dy[t * h + i] * gain(run, r->norm, i));
        work[i] = g[i] * xhat[i];
    }
    const double a = run->c->norm == AR_NORM_LAYER ? ari_bl_row_sum(run, g, h) / (double)h : 0.0;
    const double b = ari_bl_row_sum(run, work, h) / (double)h;
    for (size_t i = 0; i < h; i++)
        r->dx[t * h + i] = ari_bl_stream(run, ((g[i] - a) - xhat[i] * b) * r->saved->rstd[t]);
    return AR_OK;
}

/* sum: if given, residual + dx, added before dx is stored. */
ar_status ari_bl_norm_backward(ari_bl_run *run, const ari_bl_norm *norm, double *dx, double *sum,
                               const double *residual, const double *dy, const ari_bl_norm_saved *saved)
{
    const size_t h = norm->width, rows = run->tokens * norm->per_token, features = h * norm->per_token;
    norm_rows args = {.norm = norm, .saved = saved, .dy = dy, .dx = dx};
    AR_TRY(ari_bl_each(run, rows, backward_row, &args));
    for (size_t i = 0; sum != NULL && i < rows * h; i++)
        sum[i] = ari_bl_keep(run, ari_bl_stream(run, residual[i] + dx[i]));
    ari_bl_keep_all(run, dx, rows * h);
    return ari_bl_emit_tokens(run, norm->name, 'b', dx, features, 0, features);
}

/* Sums the gradients of gamma, with terms fl32(dy*xhat) per token, and of beta, with terms dy. */
ar_status ari_bl_norm_gradients(ari_bl_run *run, const ari_bl_norm *norm, const double *dy,
                                const ari_bl_norm_saved *saved)
{
    const size_t h = norm->width, rows = run->tokens * norm->per_token;
    ARI_BL_SCOPE(run);
    double *values = ari_bl_doubles(run, rows, h), *gradient = ari_bl_doubles(run, 1, h);
    AR_TRY(run->memory);
    for (size_t i = 0; i < rows * h; i++)
        values[i] = ari_bl_stream(run, dy[i] * saved->xhat[i]);
    ari_bl_terms terms = {.values = values, .per_token = norm->per_token, .stream = true};
    AR_TRY(ari_bl_gradient(run, gradient, 1, h, &terms));
    AR_TRY(ari_bl_emit_gradient(run, norm->name, "weight", h, 0, gradient));
    if (norm->bias != NULL) {
        terms.values = dy;
        AR_TRY(ari_bl_gradient(run, gradient, 1, h, &terms));
        AR_TRY(ari_bl_emit_gradient(run, norm->name, "bias", h, 0, gradient));
    }
    return AR_OK;
}
