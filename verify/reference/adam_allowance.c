/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "ref/train/optimizer.h"
#include "ref/train/optimizer_private.h"
#include "verify/reference/sensitivity.h"

/* Effect on the quotient of the update's own dozen roundings, in the run and in the reference. */
static const double ROUNDINGS = 0x1p-20;

/* Derivation: m = (1-b1) sum b1^j g_j and v = (1-b2) sum b2^j g_j^2, where g_j is the gradient j steps ago. By the
 * Cauchy-Schwarz inequality m^2 <= (1-b1)^2 sum (b1^2/b2)^j * v/(1-b2). Bias correction divides m by 1-b1^t and v by
 * 1-b2^t. */
double ari_adam_reach(const ar_optimizer_options *o, int t)
{
    const double ratio = o->beta1 > 0.0 ? o->beta1 * o->beta1 / o->beta2 : 0.0;
    double sum = 1.0, power = 1.0;
    for (int j = 1; j < t && ratio > 0.0; j++) {
        power *= ratio;
        sum += power;
    }
    return (1.0 - o->beta1) / (1.0 - pow(o->beta1, t)) * sqrt((1.0 - pow(o->beta2, t)) / (1.0 - o->beta2) * sum);
}

/* State of one parameter element after some steps. */
typedef struct element {
    double square, doubt; /* second moments: of the gradients, and of the gradients' allowances */
    double extra;
} element;

/* State that all elements of one parameter share in a step. */
typedef struct adam_step {
    const ari_ref_tensor *grad, *new;
    const float *old; /* the weights before the step */
    double old_allowed;
    const uint8_t *rounds;
    double clip, clip_most; /* the clip factor, and its largest possible error in either direction */
    double decay, shrink;   /* weight decay as a term of the gradient (Adam) and as a factor of the weight (AdamW) */
    double beta2, bias2, eps, reach;
} adam_step;

/* The root of a second moment is a norm. Hence s, the root for the gradients, is off by at most d, the root for the
 * allowances. The first moment is off by at most reach/lr * d. The quotient m/(s + eps) is then off by at most 2
 * reach/lr * d/(s - d + eps), and in no case by more than 2 reach/lr. */
static void advance(element *e, const adam_step *s)
{
    for (size_t i = 0; i < s->new->count; i++, e++) {
        const double raw = (double)s->grad->values[i], gradient = s->clip * raw + s->decay * (double)s->old[i];
        const double off = (s->rounds[i] ? s->clip_most * s->grad->allowed : 0.0) +
                           (s->clip_most - s->clip) * fabs(raw) + s->decay * (s->old_allowed + e->extra);
        e->square = s->beta2 * e->square + (1.0 - s->beta2) * gradient * gradient;
        e->doubt = s->beta2 * e->doubt + (1.0 - s->beta2) * off * off;
        const double size = sqrt(e->square / s->bias2), doubt = sqrt(e->doubt / s->bias2);
        const double share = fmin(1.0, doubt / (fmax(size - doubt, 0.0) + s->eps));
        e->extra = s->shrink * e->extra + (share > 0.0 ? 2.0 * s->reach * share : 0.0);
    }
}

double ari_step_of_largest(const ari_ref_tensor *t)
{
    float largest = 0.0f;
    for (size_t k = 0; k < t->count; k++) {
        const float x = fabsf(t->values[k]);
        if (isfinite(x) && x > largest)
            largest = x;
    }
    return (double)(nextafterf(largest, INFINITY) - largest);
}

/* Effect of rounding to the matrices' storage format: half a step of the largest element. */
static double stored_off(const ari_ref_tensor *t, const ari_adam_case *c)
{
    const double steps = c->stored / 0x1p-24; /* roundoff relative to that of fp32 */
    return t->ndim == 2 && steps > 1.0 ? 0.5 * steps * ari_step_of_largest(t) : 0.0;
}

/* *off: allowance of the weights that the next step updates. Stored weights are rounded in addition. */
static ar_status keep_allowance(double *off, ari_ref_tensor *t, const element *e, const adam_step *s,
                                const ari_adam_case *c)
{
    *off = s->shrink * s->old_allowed + 2.0 * ari_step_of_largest(t) + ROUNDINGS * s->reach;
    /* QK-Clip multiplies biases by a factor that depends on other tensors, which may be off too. */
    if (t->ndim == 1 && c->optimizer->qk_clip > 0.0)
        *off = fmax(*off, t->allowed);
    t->allowed = *off + stored_off(t, c);
    if (!t->allowed_each) /* an array exists if the gradients' allowances have changed since */
        AR_TRY(ARI_ALLOC(&t->allowed_each, t->count, t->name));
    for (size_t i = 0; i < t->count; i++)
        t->allowed_each[i] = (float)e[i].extra;
    return AR_OK;
}

/* Step t of a parameter. */
static adam_step begin_step(const ari_reference *ref, const ari_adam_case *c, const ari_ref_tensor *parameter, int t)
{
    const ar_optimizer_options *o = c->optimizer;
    const ari_update_rule rule = ari_update_rule_of(o, parameter->name, parameter->ndim);
    const double lr = ari_optimizer_lr(o, (uint64_t)t) * rule.lr_scale;
    const bool decoupled = o->kind != AR_OPTIMIZER_ADAM;
    const size_t norm_index = ari_reference_find_in(ref, "grad_norm", 'c', t);
    adam_step s = {.clip = 1.0,
                   .clip_most = 1.0,
                   .decay = decoupled ? 0.0 : rule.weight_decay,
                   .shrink = decoupled ? fabs(1.0 - lr * rule.weight_decay) : 1.0,
                   .beta2 = o->beta2,
                   .bias2 = 1.0 - pow(o->beta2, t),
                   .eps = o->eps,
                   .reach = lr * ari_adam_reach(o, t)};
    if (norm_index < ref->count) {
        const double norm = (double)ref->tensor[norm_index].values[0] + 1e-6;
        s.clip = fmin(1.0, c->clip / norm);
        /* A smaller norm increases the clip factor by more than a larger norm decreases it, but not beyond 1. */
        s.clip_most = fmin(1.0, c->clip / fmax(norm - ref->tensor[norm_index].allowed, 1e-6));
        s.clip_most =
            fmax(s.clip_most, s.clip + fmax(0.0, s.clip - c->clip / (norm + ref->tensor[norm_index].allowed)));
    }
    return s;
}

static ar_status allow_parameter(ari_reference *ref, const ari_ref_tensor *initial, const ari_adam_case *c)
{
    const float *old = initial->values;
    double old_allowed = stored_off(initial, c); /* apart from this rounding, the initial values are exact */
    ARI_OWNED element *e = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&e, initial->count, initial->name));
    for (int t = 1; t <= c->steps; t++) {
        const size_t grad = ari_reference_find_in(ref, initial->name, 'g', t),
                     new = ari_reference_find_in(ref, initial->name, 'n', t);
        if (grad == ref->count || new == ref->count)
            break;
        adam_step s = begin_step(ref, c, initial, t);
        s.grad = &ref->tensor[grad];
        s.new = &ref->tensor[new];
        s.rounds = c->rounds[grad];
        s.old = old;
        s.old_allowed = old_allowed;
        advance(e, &s);
        AR_TRY(keep_allowance(&old_allowed, &ref->tensor[new], e, &s, c));
        old = ref->tensor[new].values;
    }
    return AR_OK;
}

/* Returns true if Adam updates the parameter. Muon keeps no second moment for the parameters that it updates itself. */
static bool is_by_adam(const ari_reference *ref, const ari_adam_case *c, const char *name)
{
    return c->optimizer->kind != AR_OPTIMIZER_MUON || ari_reference_find_in(ref, name, 'v', 1) < ref->count;
}

ar_status ari_adam_allow(ari_reference *ref, const ari_adam_case *c)
{
    if (c->optimizer->kind == AR_OPTIMIZER_SGD)
        return AR_OK;
    for (size_t i = 0; i < ref->count; i++) {
        if (ref->tensor[i].pass == 'i' && is_by_adam(ref, c, ref->tensor[i].name))
            AR_TRY(allow_parameter(ref, &ref->tensor[i], c));
    }
    return AR_OK;
}
