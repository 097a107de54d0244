/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/gradcheck/gradcheck.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/baseline/perturb.h"
#include "ref/core/size.h"
#include "ref/numerics/philox.h"
#include "verify/reference/tasks.h"

enum { SAMPLES = 2, POSITIONS = 16, DRAWS = 1000 };
enum {
    PAIRS = AR_GRADCHECK_STEPS + 1,
    RATIO = 4
}; /* an extrapolation uses the losses at its step and at RATIO times its step */
static const double LARGEST_STEP = 0.25;
static const double BOUND = 1e-6;                         /* allowed error of the best row */
static const double LOSS_ERROR = 4 * 0x1p-52;             /* error of a loss from rounding */
static const double NO_SCALE = 1e-12, OTHER_SCALE = 1e-2; /* relative to the model's largest gradient */

typedef struct parameter {
    char name[sizeof((ar_gradcheck){0}.worst_tensor)];
    size_t count, elements;
    float *values;
    double size;    /* root mean square of the values; 1 if all are 0 */
    double largest; /* largest |gradient|; infinity if some gradient is not finite */
    struct {
        size_t index;
        double gradient;
    } element[ARI_MAX_DRAWN];
} parameter;

typedef struct gradcheck {
    const ari_gradcheck_case *c;
    parameter *parameters; /* [n] */
    size_t n, capacity;
    ari_perturbation *moved; /* [elements][PAIRS][up, down] perturbations, the largest step first */
    size_t elements;
    ar_batch batch;
    size_t first_share; /* number of perturbations in the first thread's share; 0: there is only one share */
    atomic_bool stopped, failed;
} gradcheck;

/* --- which elements ----------------------------------------------------------------------------------------------- */

static void add_drawn(ari_drawn *d, size_t index)
{
    for (size_t i = 0; i < d->n; i++) {
        if (d->indices[i] == index)
            return;
    }
    d->indices[d->n++] = index;
}

void ari_draw_elements(ari_drawn *d, uint64_t key, size_t target_count, double low, const double *gradient,
                       size_t count)
{
    size_t place = 0;
    for (uint64_t i = 0; i < DRAWS && d->n < target_count; i++) {
        place = (size_t)(ari_random_unit(ari_random_u32(key, i, 0, (uint32_t)target_count)) * (double)count);
        if (low > 0.0 ? fabs(gradient[place]) > low : gradient[place] == 0.0)
            add_drawn(d, place);
    }
    for (size_t i = 0; i < count && d->n < target_count; i++) {
        const size_t index = (place + i) % count;
        if (low > 0.0 ? fabs(gradient[index]) > low : gradient[index] == 0.0)
            add_drawn(d, index);
    }
}

/* --- weights and gradients ---------------------------------------------------------------------------------------- */

static parameter *find_parameter(gradcheck *g, const char *name)
{
    for (size_t i = 0; i < g->n; i++)
        if (strcmp(g->parameters[i].name, name) == 0)
            return &g->parameters[i];
    return NULL;
}

static const float *weights(void *user, const char *name, size_t count)
{
    const parameter *p = find_parameter(user, name);
    return p && p->count == count ? p->values : NULL;
}

static ar_status add_parameter(gradcheck *g, const char *name, size_t count, const double *values)
{
    double squares = 0.0;
    AR_TRY(ARI_GROW(&g->parameters, &g->capacity, g->n, "parameters"));
    parameter *p = &g->parameters[g->n];
    *p = (parameter){.count = count};
    snprintf(p->name, sizeof p->name, "%s", name);
    AR_TRY(ARI_ALLOC(&p->values, count, name));
    g->n++;
    for (size_t k = 0; k < count; k++) {
        p->values[k] = (float)values[k];
        squares += values[k] * values[k];
    }
    p->size = squares > 0.0 ? sqrt(squares / (double)count) : 1.0;
    return AR_OK;
}

static void take_elements(parameter *p, const ari_drawn *d, const double *gradient)
{
    for (size_t i = 0; i < d->n; i++) {
        p->element[i].index = d->indices[i];
        p->element[i].gradient = gradient[d->indices[i]];
    }
    p->elements = d->n;
}

static ar_status add_gradient(gradcheck *g, const char *name, size_t count, const double *values)
{
    parameter *p = find_parameter(g, name);
    if (!p || p->count != count)
        return ar_error_set(AR_ERR_INTERNAL, "gradcheck: a gradient of '%s', which is no parameter of %zu elements",
                            name, count);
    for (size_t k = 0; k < count; k++) {
        if (!isfinite(values[k])) {
            p->largest = INFINITY;
            take_elements(p, &(ari_drawn){.n = 1, .indices = {k}}, values);
            return AR_OK;
        }
        p->largest = fmax(p->largest, fabs(values[k]));
    }
    const uint64_t key = ari_stream_key(g->c->seed, name);
    ari_drawn d = {0};
    if (p->largest > 0.0)
        ari_draw_elements(&d, key, ARI_DRAWN, ARI_DRAWN_SMALL * p->largest, values, count);
    ari_draw_elements(&d, key, d.n + 1, 0.0, values, count);
    take_elements(p, &d, values);
    return AR_OK;
}

static ar_status emit(void *user, const char *name, char pass, int ndim, const size_t *shape, const double *values)
{
    const size_t count = ari_volume(shape, ndim);
    return pass == 'i'   ? add_parameter(user, name, count, values)
           : pass == 'g' ? add_gradient(user, name, count, values)
                         : AR_OK;
}

static ar_status take_gradients(gradcheck *g)
{
    const ari_gradcheck_case *c = g->c;
    const ar_baseline_options o = {.mode = AR_MODE_F64,
                                   .seed = c->seed,
                                   .weights = c->weights,
                                   .weights_user = c->weights_user,
                                   .loss = c->loss,
                                   .emit = emit,
                                   .emit_user = g};
    double loss;
    return (c->gradients ? c->gradients : ar_baseline_run)(c->config, &o, &g->batch, &loss);
}

/* --- differences -------------------------------------------------------------------------------------------------- */

static ar_status plan_moves(gradcheck *g)
{
    size_t n = 0;
    for (size_t i = 0; i < g->n; i++)
        g->elements += g->parameters[i].elements;
    AR_TRY(ari_mul_size(&n, g->elements, 2 * PAIRS));
    AR_TRY(ARI_ALLOC(&g->moved, n, "perturbations"));
    ari_perturbation *m = g->moved;
    for (size_t i = 0; i < g->n; i++)
        for (size_t e = 0; e < g->parameters[i].elements; e++) {
            const parameter *p = &g->parameters[i];
            const size_t index = p->element[e].index;
            double step_size = LARGEST_STEP * fmax(p->size, fabs((double)p->values[index]));
            for (size_t pair = 0; pair < PAIRS; pair++, step_size /= RATIO) {
                *m++ = (ari_perturbation){.name = p->name, .element = index, .delta = step_size};
                *m++ = (ari_perturbation){.name = p->name, .element = index, .delta = -step_size};
            }
        }
    return AR_OK;
}

/* The perturbations that one thread computes. */
typedef struct share {
    gradcheck *g;
    bool reports; /* true for the thread that reports to the caller */
} share;

static bool report_progress(void *user, double fraction)
{
    const share *s = user;
    const ari_gradcheck_case *c = s->g->c;
    if (s->reports && c->progress && !c->progress(c->progress_user, fraction))
        atomic_store(&s->g->stopped, true);
    return !atomic_load(&s->g->stopped);
}

static ar_status work(void *user, size_t task, int worker)
{
    gradcheck *g = user;
    share s = {.g = g, .reports = worker == 0};
    const size_t share_begin = task == 0 ? 0 : g->first_share,
                 share_end = task == 0 && g->first_share > 0 ? g->first_share : g->elements * 2 * PAIRS;
    const ar_baseline_options o = {.mode = AR_MODE_F64,
                                   .weights = weights,
                                   .weights_user = g,
                                   .loss = g->c->loss,
                                   .progress = report_progress,
                                   .progress_user = &s};
    const ar_status st =
        ari_baseline_perturb(g->c->config, &o, &g->batch, g->moved + share_begin, share_end - share_begin);
    if (st == AR_ERR_ABORTED && atomic_load(&g->failed)) /* aborted by the other share's failure, which is the one to
                                                            report */
        return AR_OK;
    if (st != AR_OK && st != AR_ERR_ABORTED)
        atomic_store(&g->failed, true);
    if (st != AR_OK)
        atomic_store(&g->stopped, true);
    return st;
}

/* A loss costs the blocks from the moved weight on: the first 3 in 10 cost as much as the rest. */
static ar_status take_differences(gradcheck *g)
{
    g->first_share = g->c->threads > 1 ? g->elements * 2 * PAIRS / 10 * 3 : 0;
    const ari_tasks t = {g->first_share > 0 ? 2 : 1, g->c->threads > 1 ? 2 : 1, work, g, NULL};
    return ari_tasks_run(&t);
}

/* --- the table ---------------------------------------------------------------------------------------------------- */

static double slope_of(const ari_perturbation *pair)
{
    return (pair[0].loss - pair[1].loss) / (pair[0].value - pair[1].value);
}

/* Returns how much the rounding of two losses may change the difference. */
static double noise_of(const ari_perturbation *pair)
{
    return LOSS_ERROR * fmax(fabs(pair[0].loss), fabs(pair[1].loss)) / fabs(pair[0].value - pair[1].value);
}

/* Combines two central differences (Richardson), which leaves a truncation error of the order of step^4. Returns the
 * error relative to the gradient, or to the largest error that rounding of the losses could cause: a small gradient's
 * difference is lost in that rounding. */
static double error_of(const ari_perturbation *wide, double gradient, double scale)
{
    const double square = RATIO * RATIO;
    const double slope = (square * slope_of(wide + 2) - slope_of(wide)) / (square - 1.0);
    const double noise = (square * noise_of(wide + 2) + noise_of(wide)) / (square - 1.0);
    const double error = fabs(slope - gradient);
    if (error == 0.0)
        return 0.0;
    const double relative = error / fmax(fmax(fabs(gradient), scale), noise / BOUND);
    return isfinite(relative) ? relative : (double)INFINITY;
}

static void add_error(ar_gradcheck_row *row, const char *name, double error)
{
    if (error < row->max_relative_error || (error == row->max_relative_error && row->worst_tensor[0] != '\0'))
        return;
    row->max_relative_error = error;
    snprintf(row->worst_tensor, sizeof row->worst_tensor, "%s", name);
}

static void fill_table(ar_gradcheck *out, const gradcheck *g)
{
    const ari_perturbation *wide = g->moved;
    double largest = 0.0;
    for (size_t i = 0; i < g->n; i++)
        largest = fmax(largest, g->parameters[i].largest);
    for (size_t i = 0; i < g->n; i++) {
        const parameter *p = &g->parameters[i];
        const double scale = ARI_DRAWN_SMALL * (p->largest < NO_SCALE * largest ? OTHER_SCALE * largest : p->largest);
        for (size_t e = 0; e < p->elements; e++)
            for (size_t pair = 0; pair < PAIRS; pair++, wide += 2)
                if (pair < AR_GRADCHECK_STEPS)
                    add_error(&out->row[pair], p->name, error_of(wide, p->element[e].gradient, scale));
    }
}

static void finish(ar_gradcheck *out, const gradcheck *g)
{
    double step = LARGEST_STEP / RATIO;
    *out = (ar_gradcheck){.batch = g->batch.batch,
                          .seq = g->batch.seq,
                          .elements = g->elements,
                          .parameters = g->n,
                          .rows = AR_GRADCHECK_STEPS};
    fill_table(out, g);
    for (size_t i = 0; i < out->rows; i++, step /= RATIO) {
        out->row[i].step = step;
        if (out->row[i].max_relative_error < out->row[out->best].max_relative_error)
            out->best = i;
    }
    out->max_relative_error = out->row[out->best].max_relative_error;
    memcpy(out->worst_tensor, out->row[out->best].worst_tensor, sizeof out->worst_tensor);
    out->ok = out->max_relative_error < BOUND;
}

/* --- the check ---------------------------------------------------------------------------------------------------- */

/* Replaces a pad by another token. The loss depends on a pad's embedding, but by definition a pad contributes nothing
 * to the gradient. */
static int64_t unpadded(const ar_config *c, int64_t id)
{
    return c->pads && id == (int64_t)c->pad_id ? (int64_t)((c->pad_id + 1) % c->vocab) : id;
}

static ar_status shrink(gradcheck *g, int64_t *ids, int32_t *documents)
{
    const ar_batch *b = g->c->batch;
    g->batch = (ar_batch){.batch = b->batch < SAMPLES ? b->batch : SAMPLES,
                          .seq = b->seq < POSITIONS ? b->seq : POSITIONS,
                          .input_ids = ids,
                          .documents = b->documents ? documents : NULL};
    if (!b->input_ids)
        return ar_error_set(AR_ERR_ARG, "gradcheck: input_ids is NULL");
    if (g->batch.seq > g->c->config->max_positions)
        g->batch.seq = g->c->config->max_positions;
    for (size_t i = 0; i < g->batch.batch * g->batch.seq; i++) {
        const size_t src_index = i / g->batch.seq * b->seq + i % g->batch.seq;
        ids[i] = unpadded(g->c->config, b->input_ids[src_index]);
        documents[i] = b->documents ? b->documents[src_index] : 0;
    }
    return AR_OK;
}

static void end(const gradcheck *g)
{
    for (size_t i = 0; i < g->n; i++)
        free(g->parameters[i].values);
    free(g->parameters);
    free(g->moved);
}

ar_status ari_gradcheck(ar_gradcheck *out, const ari_gradcheck_case *c)
{
    int64_t ids[SAMPLES * POSITIONS];
    int32_t documents[SAMPLES * POSITIONS];
    ARI_ENDED(end) gradcheck g = {.c = c};
    AR_TRY(shrink(&g, ids, documents));
    AR_TRY(take_gradients(&g));
    AR_TRY(plan_moves(&g));
    AR_TRY(take_differences(&g));
    finish(out, &g);
    return AR_OK;
}
