/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizer's state: Adam's moments, and what is made of them. */
#include <stdio.h>

#include "verify/diagnose/hypothesis.h"
#include "verify/dump/dump_private.h"

/* --- tensors of a step -------------------------------------------------------------------------------------------- */

ar_status ari_read_values(float **gives, const ar_dump_tensor *t, ari_arena *arena)
{
    AR_TRY(ARI_TAKE(gives, arena, t->count, t->name));
    return ar_dump_read_f32(t, 0, t->count, *gives);
}

const ar_dump_tensor *ari_tensor_of_step(const ar_dump *d, const char *stem, size_t n, const char *kind, int step)
{
    char name[512];
    const int length = step > 1 ? snprintf(name, sizeof name, "%.*s:%s@%d", (int)n, stem, kind, step)
                                : snprintf(name, sizeof name, "%.*s:%s", (int)n, stem, kind);
    return length > 0 && (size_t)length < sizeof name ? ari_find_readable(d, name) : NULL;
}

const ar_dump_tensor *ari_weight_before(const ar_dump *d, const char *stem, size_t n, int step)
{
    return step > 1 ? ari_tensor_of_step(d, stem, n, "new", step - 1) : ari_tensor_of_step(d, stem, n, "init", 1);
}

const ar_dump_tensor *ari_tensor_before(const ar_dump *d, const char *stem, char pass, int step)
{
    if (pass == 'n')
        return ari_weight_before(d, stem, strlen(stem), step);
    return pass == 'g' && step > 1 ? ari_tensor_of_step(d, stem, strlen(stem), "grad", step - 1) : NULL;
}

/* --- the optimizer's state ---------------------------------------------------------------------------------------- */

/* One parameter's tensors of a step, and its moments of the step before, of the reference and of the other dump in
 * turn. */
enum { BEFORE = 0, GRADIENT = 2, FIRST = 4, SECOND = 6, NEW = 8, FIRST_KEPT = 10, SECOND_KEPT = 12, TENSORS = 14 };
_Static_assert(TENSORS <= (int)ARI_MOST_BESIDE, "all are read at once");

/* Fits y = p a + q b: the other's values by the reference's, the excess of the other's moments, the other's first
 * moment by the reference's and its former value, each dump's moments by its gradient and their former values, and its
 * weight's loss by the moments and the weight. The last are times the root of the second moment, so that small
 * gradients, of which Adam's epsilon is a part, say nothing. */
enum {
    GRADIENTS,
    FIRSTS,
    SECONDS,
    FIRST_MOVED,
    SECOND_MOVED,
    MOMENTUM,
    OWN_FIRST,
    OWN_SECOND = OWN_FIRST + 2,
    STEP = OWN_SECOND + 2,
    RELATIONS = STEP + 2
};
typedef struct state {
    const ar_dump_tensor *tensor[TENSORS]; /* NULL: it is not there, and all zero in the relations */
    ari_fit fit[RELATIONS];
} state;

static void add_state(state *s, const double *x)
{
    const double *w = x + BEFORE, *g = x + GRADIENT, *m = x + FIRST, *v = x + SECOND, *now = x + NEW;
    const double *m0 = x + FIRST_KEPT, *v0 = x + SECOND_KEPT, root[] = {sqrt(v[0]), sqrt(v[1])};
    const double relation[RELATIONS][3] = {
        [GRADIENTS] = {g[1], g[0], 0.0},
        [FIRSTS] = {m[1], m[0], w[0]},
        [SECONDS] = {v[1], v[0], 0.0},
        [FIRST_MOVED] = {m[1] - m[0], g[0], w[0]},
        [SECOND_MOVED] = {v[1] - v[0], g[0] * g[0], v[0]},
        [MOMENTUM] = {m[1], m[0], m0[0]},
        [OWN_FIRST] = {m[0], g[0], m0[0]},
        [OWN_FIRST + 1] = {m[1], g[1], m0[1]},
        [OWN_SECOND] = {v[0], g[0] * g[0], v0[0]},
        [OWN_SECOND + 1] = {v[1], g[1] * g[1], v0[1]},
        [STEP] = {(w[0] - now[0]) * root[0], m[0], w[0] * root[0]},
        [STEP + 1] = {(w[1] - now[1]) * root[1], m[1], w[1] * root[1]},
    };
    for (int i = 0; i < RELATIONS; i++)
        ari_fit_add(&s->fit[i], relation[i][0], relation[i][1], relation[i][2]);
}

static ar_status read_state(state *s, size_t from, size_t n)
{
    ari_beside b = ari_beside_of(s->tensor, TENSORS, from, n);
    while (ari_beside_next(&b))
        add_state(s, b.x);
    return b.status;
}

static void find_state(state *s, const ari_case *c)
{
    static const char *const kinds[] = {"", "grad", "m", "v", "new", "m", "v"};
    const char *stem = c->d->name;
    const int step = c->d->step;
    size_t count = 0;
    *s = (state){.tensor = {NULL}};
    for (int i = 0; i < TENSORS; i++) {
        const ar_dump *dump = i % 2 ? c->known->other : c->known->reference;
        const int at = i < FIRST_KEPT ? step : step - 1;
        const ar_dump_tensor *t = i < GRADIENT ? ari_weight_before(dump, stem, strlen(stem), step)
                                  : at > 0     ? ari_tensor_of_step(dump, stem, strlen(stem), kinds[i / 2], at)
                                               : NULL;
        count = t && count == 0 ? t->count : count;
        s->tensor[i] = t && t->count == count ? t : NULL;
    }
}

/* True if both dumps, or the reference alone for every second tensor, have the tensors from one on to another. */
static bool has_state(const state *s, int first, int end, int every)
{
    while (first < end && s->tensor[first])
        first += every;
    return first >= end;
}

/* --- the decay rates ---------------------------------------------------------------------------------------------- */

/* Adam's usual decay rates; the first four are the most usual. */
enum { USUAL = 30, MOST_USUAL = 4 };
static void usual_betas(double beta[2], size_t i)
{
    static const double first[] = {0.9, 0.95, 0.8, 0.85, 0.5}, second[] = {0.999, 0.95, 0.99, 0.98, 0.9, 0.9999};
    beta[0] = first[i / 6], beta[1] = second[i % 6];
}

/* Finds the decay rates: the share that the reference's moments keep of the step before or, if that is undetermined,
 * the rates that the run states. In step 1, m = (1 - beta1) x g and v = (1 - beta2) (x g)^2 for the clip factor x. */
static ar_status find_betas(double beta[2], state *s, const ari_case *c)
{
    const ari_difference *d = c->d;
    double by[2], kept[2];
    find_state(s, c);
    beta[0] = d->beta1, beta[1] = d->beta2;
    if (!has_state(s, GRADIENT, NEW, 2) || (d->step > 1 && !has_state(s, FIRST_KEPT, TENSORS, 2)))
        return AR_OK;
    AR_TRY(read_state(s, 0, s->tensor[GRADIENT]->count));
    if (!(ari_fit_two(&by[0], &kept[0], &s->fit[OWN_FIRST]) < ARI_FIT) ||
        !(ari_fit_two(&by[1], &kept[1], &s->fit[OWN_SECOND]) < ARI_FIT))
        return AR_OK;
    for (size_t i = 0, found = 0; d->step == 1 && i < USUAL && !found; i++) {
        double b[2];
        usual_betas(b, i);
        found = ari_is_near(by[1] / (by[0] * by[0]), (1.0 - b[1]) / ((1.0 - b[0]) * (1.0 - b[0])), ARI_KNOWN) &&
                by[0] / (1.0 - b[0]) <= 1.0 + ARI_KNOWN;
        if (found)
            beta[0] = b[0], beta[1] = b[1];
    }
    if (d->step != 1 && kept[0] > 0.0 && kept[0] < 1.0 && kept[1] > 0.0 && kept[1] < 1.0)
        beta[0] = kept[0], beta[1] = kept[1];
    return AR_OK;
}

/* sqrt(1 - beta2^t)/(1 - beta1^t): what Adam corrects its moments by at step t. */
static double correction(const double beta[2], int t)
{
    return sqrt(1.0 - pow(beta[1], t)) / (1.0 - pow(beta[0], t));
}

/* The step whose Adam correction would make the update `factor` times the expected; 0: none. */
static int corrected_as(const double beta[2], int step, double factor)
{
    enum { AHEAD = 4 };
    for (int t = 1; beta[0] > 0.0 && beta[1] > 0.0 && t <= step + AHEAD; t++) {
        if (t != step && ari_is_near(factor, correction(beta, t) / correction(beta, step), 2.0 * ARI_KNOWN))
            return t;
    }
    return 0;
}

ar_status ari_name_update(ari_trace *t, const ari_case *c, double factor)
{
    const int step = c->d->step;
    double beta[2];
    state s;
    AR_TRY(find_betas(beta, &s, c));
    /* A first step of SGD with momentum is the gradient, with Nesterov's the gradient and as much of it as the momentum
     * keeps; Adam's second moment says that it is no SGD. */
    const bool adam = beta[1] > 0.0 && step > 0, sgd = step == 1 && s.tensor[FIRST + 1] && !s.tensor[SECOND + 1];
    const double first = 1.0 - pow(beta[0], step), second = sqrt(1.0 - pow(beta[1], step));
    const double momentum = fmax(factor, 1.0 / factor) - 1.0, sign = factor < 1.0 ? -1.0 : 1.0;
    const int as = corrected_as(beta, step, factor);
    const struct {
        bool may;
        double factor;
        ari_properties flags;
        const char *moments, *rule; /* that were not corrected */
    } means[] = {{as > 0, factor, ARI_IF(OF_STEP), "", ""},
                 {fabs(factor) < ARI_FIT, factor, ARI_IF(ZERO), "", ""},
                 {true, -1.0, ARI_IF(NEGATIVE), "", ""},
                 {adam, first / second, ARI_IF(OF_BEFORE), "moments were", "(1 - beta1^t)/sqrt(1 - beta2^t)"},
                 {adam, 1.0 / second, ARI_IF(OF_BEFORE), "second moment was", "1/sqrt(1 - beta2^t)"},
                 {adam, first, ARI_IF(OF_BEFORE), "first moment was", "1 - beta1^t"},
                 {sgd, pow(1.9, sign), ARI_IF(TWICE), "", ""},
                 {sgd, pow(1.95, sign), ARI_IF(TWICE), "", ""},
                 {sgd, pow(1.99, sign), ARI_IF(TWICE), "", ""},
                 {true, factor, 0, "", ""}};
    size_t i = 0;
    while (i + 1 < sizeof means / sizeof *means && (!means[i].may || !ari_is_near(factor, means[i].factor, ARI_KNOWN)))
        i++;
    t->flags |= means[i].flags;
    ARI_FACTS(t, {"moments", .text = means[i].moments}, {"rule", .text = means[i].rule},
              {"momentum", .number = momentum}, {"as", .count = (size_t)as}, {"step", .count = (size_t)step});
    return AR_OK;
}

/* --- Adam's epsilon ----------------------------------------------------------------------------------------------- */

/* For two updates that a root divides, s is the other, l, over 1 + eps/root or, if epsilon is inside the root, over
 * sqrt(1 + eps/root^2): (l - s) root is eps s, and (l^2 - s^2) root^2 is eps s^2. [k]: the dump whose update is s. */
typedef struct epsilons {
    ari_fit beside[2], inside[2], plain[2];
    double
        decay; /* part of the weight that is in both updates besides; of the first two fits what is not known of it */
} epsilons;

static void add_epsilon(epsilons *e, double w, const double now[2], double root)
{
    for (int k = 0; k < 2; k++) {
        const double s = w - now[k] - e->decay * w, l = w - now[1 - k] - e->decay * w;
        ari_fit_add(&e->beside[k], (l - s) * root, s, w);
        ari_fit_add(&e->inside[k], (l * l - s * s) * root * root, s * s, 0.0);
        ari_fit_add(&e->plain[k], l - s, s, w);
    }
}

static void found_epsilon(ari_trace *t, const epsilons *e, const char *root)
{
    const int k = e->plain[1].aa < e->plain[0].aa;
    double beside, inside, none;
    const double plain = ari_fit_two(&none, &none, &e->plain[k]), left = ari_fit_two(&beside, &none, &e->beside[k]),
                 left_inside = ari_fit_one(&inside, &e->inside[k]);
    const bool is_inside = left_inside < left;
    const double eps = is_inside ? inside : beside, least = is_inside ? left_inside : left;
    if (!(least < ARI_KNOWN) || !(least < 0.01 * plain) || !(eps > 0.0))
        return;
    ARI_FINDING(t, ARI_FOUND_EPSILON, is_inside ? ARI_IF(ROOT) : 0, {"epsilon", .number = eps}, {"root", .text = root},
                {"where", .text = k == 1 ? "here" : "in the reference"});
}

/* The first step of Adam moves a weight by lr*g/(|g| + eps), and by a decay. */
ar_status ari_measure_epsilon(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->d;
    const ar_dump_tensor *grad = ari_tensor_of_step(c->known->reference, d->name, strlen(d->name), "grad", d->step);
    epsilons e = {.decay = 0.0};
    double *g = NULL;
    if (d->step != 1 || !grad || c->step || grad->count != c->full->count)
        return AR_OK;
    AR_TRY(ARI_TAKE(&g, c->arena, c->count, grad->name));
    AR_TRY(ari_dump_read_f64(grad, c->start, c->count, g));
    for (size_t i = 0; i < c->count; i++) {
        if (ari_off(c, i))
            add_epsilon(&e, (double)d->before[i], (const double[]){(double)c->ref[i], (double)c->val[i]}, fabs(g[i]));
    }
    found_epsilon(t, &e, "|gradient| (of the gradient before clipping)");
    return AR_OK;
}

/* --- moments that are others -------------------------------------------------------------------------------------- */

static bool has_equal_gradients(const state *s)
{
    double factor;
    return ari_fit_one(&factor, &s->fit[GRADIENTS]) < ARI_FIT && ari_is_near(factor, 1.0, ARI_KNOWN);
}

/* The moments' own factors. */
static ar_status found_moments(ari_trace *t, const ari_case *c, double first, double second)
{
    double beta[2] = {0.0, 0.0};
    state s;
    if (c->d->step == 1)
        AR_TRY(find_betas(beta, &s, c));
    ari_trace_set(t, ARI_FOUND_STATE, 0);
    if (ari_is_near(second, first * first, 2.0 * ARI_KNOWN)) {
        ari_name_number(t, first, ARI_SEEN, 0);
        t->flags = ARI_IF(OF_GRADIENT) | (t->flags & (ARI_IF(POWER) | ARI_IF(NEGATIVE)));
    } else if (beta[1] > 0.0 && ari_is_near(first, 1.0 + beta[0], ARI_KNOWN) &&
               ari_is_near(second, 1.0 + beta[1], ARI_KNOWN)) {
        t->flags = ARI_IF(TWICE);
    }
    ARI_FACTS(t, {"first", .number = first}, {"second", .number = second});
    return AR_OK;
}

/* Moments that have a history: what each step adds to them is the gradient times a number, and its square times that
 * number's; where these alone differ, so does the number. */
static void found_moved(ari_trace *t, const ari_fit *moved)
{
    double by[2];
    for (int j = 0; j < 2; j++) {
        double besides;
        if (!(ari_fit_two(&by[j], &besides, &moved[j]) < ARI_FIT) ||
            fabs(besides) * sqrt(moved[j].bb / moved[j].yy) > ARI_KNOWN)
            return;
    }
    if (!(by[0] * by[1] > 0.0))
        return;
    ARI_FINDING(t, ARI_FOUND_STATE, ARI_IF(OF_GRADIENT) | ARI_IF(OF_STEP), {"first", .number = by[0]},
                {"second", .number = by[1]});
}

/* True if a moment is its gradient, or its square, times a number: it begins anew in this step. */
static bool begins(const ari_fit *own)
{
    double by;
    return ari_fit_one(&by, own) < ARI_FIT;
}

/* True if the other's moment begins anew, and the reference's is far from that. */
static bool is_lost(const ari_fit own[2])
{
    double by;
    return begins(&own[1]) && ari_fit_one(&by, &own[0]) > ARI_KNOWN;
}

/* Compares the other's first moment and gradient with a parameter's of the reference: with one history, the excess of
 * the moment is a multiple of the gradient's. */
static ar_status found_history(ari_trace *t, const state *s, const ari_case *c)
{
    const ar_dump *dump = c->known->reference;
    const int step = c->d->step;
    for (ari_walk w = ari_walk_of(dump, c->path, "m", step); t->kind == ARI_FOUND_NOTHING && ari_walk_next(&w);) {
        const ar_dump_tensor *m = w.t, *g = ari_tensor_of_step(dump, m->name, w.key.stem, "grad", step);
        if (strncmp(m->name, c->d->name, w.key.stem) == 0 || !g || !ari_same_shape(m, c->full) ||
            !ari_same_shape(g, c->full))
            continue;
        const ar_dump_tensor *const beside[] = {s->tensor[FIRST + 1], s->tensor[GRADIENT + 1], m, g};
        ari_fit f = {0};
        ari_beside b = ari_beside_of(beside, 4, c->start, c->count);
        while (ari_beside_next(&b))
            ari_fit_add(&f, b.x[0] - b.x[2], b.x[1] - b.x[3], 0.0);
        AR_TRY(b.status);
        if (!begins(&f))
            continue;
        ari_trace_set(t, ARI_FOUND_STATE, ARI_IF(EXCHANGED));
        ari_words(t, "other", "%.*s", (int)w.key.stem, m->name);
    }
    return AR_OK;
}

/* --- steps with the right moments --------------------------------------------------------------------------------- */

/* In the dump of moments that have a history, a first step is one of Adam's later ones, whose number is unknown here.
 * If it is corrected as the first, that number was not loaded with them. */
static void name_forgotten(ari_trace *t, double factor)
{
    enum { STEPS = 16 };
    for (size_t i = 0; i < MOST_USUAL * STEPS && !(t->flags & ARI_IF(OF_STEP)); i++) {
        const int step = 2 + (int)(i % STEPS);
        double beta[2];
        usual_betas(beta, i / STEPS);
        if (!ari_is_near(factor, correction(beta, 1) / correction(beta, step), ARI_SEEN))
            continue;
        t->flags = ARI_IF(OF_STEP);
        ARI_FACTS(t, {"as", .count = 1}, {"step", .count = (size_t)step});
    }
}

/* The state is the reference's, the update is not. */
static ar_status found_step(ari_trace *t, const ari_case *c, const state *s)
{
    double rate[2], decay[2];
    if (!(ari_fit_two(&rate[0], &decay[0], &s->fit[STEP]) < 10.0 * ARI_FIT))
        return AR_OK;
    if (!(ari_fit_two(&rate[1], &decay[1], &s->fit[STEP + 1]) < 10.0 * ARI_FIT)) {
        epsilons e = {.decay = decay[0]};
        ari_beside b = ari_beside_of(s->tensor, TENSORS, c->start, c->count);
        while (ari_beside_next(&b))
            add_epsilon(&e, b.x[BEFORE], &b.x[NEW], sqrt(b.x[SECOND]));
        AR_TRY(b.status);
        found_epsilon(t, &e, "the root of the second moment");
        return AR_OK;
    }
    const double factor = rate[1] / rate[0], least = ARI_KNOWN * fmax(fabs(decay[0]), fabs(decay[1]));
    const bool decays = fabs(decay[0]) > ARI_FIT, same_decay = fabs(decay[1] - decay[0]) <= fmax(least, ARI_FIT);
    const bool same_rate = ari_is_near(factor, 1.0, ARI_SEEN);
    if (same_rate && !same_decay) {
        ari_trace_set(t, ARI_FOUND_STATE, ARI_IF(OF_BEFORE));
    } else if (!same_rate && decays && ari_is_near(decay[1] / decay[0], factor, 10.0 * ARI_KNOWN)) {
        const bool none = fabs(factor) < ARI_FIT;
        ari_trace_set(t, none ? ARI_FOUND_UPDATE : ARI_FOUND_STATE, none ? ARI_IF(ZERO) : ARI_IF(ALL));
    } else if (!same_rate && same_decay) {
        ari_trace_set(t, ARI_FOUND_UPDATE, 0);
        AR_TRY(ari_name_update(t, c, factor));
        if (decays && c->d->step == 1 && !begins(&s->fit[OWN_FIRST])) /* the rate is the same, as the decay is */
            name_forgotten(t, factor);
    }
    ARI_FACTS(t, {"factor", .number = factor}, {"decay", .number = decay[0]}, {"other_decay", .number = decay[1]});
    return AR_OK;
}

/* The gradient that one side's optimizer got is cut element by element: its first moment is its gradient, cut at a
 * limit, times a number. */
static ar_status found_cut(ari_trace *t, const state *s, const ari_case *c)
{
    for (int k = 0; k < 2; k++) {
        const ar_dump_tensor *const beside[] = {s->tensor[FIRST + k], s->tensor[GRADIENT + k]};
        double by = 0.0, most = 0.0, worst = 0.0; /* largest moment over gradient, largest moment, its deviation */
        size_t at_limit = 0, less = 0;            /* how many are at the limit, and below it */
        ari_beside b = ari_beside_of(beside, 2, c->start, c->count);
        while (ari_beside_next(&b)) {
            by = b.x[1] != 0.0 ? fmax(by, b.x[0] / b.x[1]) : by;
            most = fmax(most, fabs(b.x[0]));
        }
        AR_TRY(b.status);
        b = ari_beside_of(beside, 2, c->start, c->count);
        while (ari_beside_next(&b)) {
            const double g = by * b.x[1];
            worst = fmax(worst, fabs(b.x[0] - copysign(fmin(fabs(g), most), g)));
            at_limit += fabs(g) > (1.0 + ARI_KNOWN) * most;
            less += fabs(g) < (1.0 - ARI_KNOWN) * most;
        }
        AR_TRY(b.status);
        if (at_limit < 4 || less == 0 || !(worst <= ARI_KNOWN * most))
            continue;
        ARI_FINDING(t, ARI_FOUND_STATE, ARI_IF(OF_GRADIENT) | ARI_IF(CUT), {"limit", .number = most / by},
                    {"cut", .count = at_limit}, {"where", .text = k == 0 ? "in the reference" : "here"});
        return AR_OK;
    }
    return AR_OK;
}

/* With equal gradients, explains the moments or, if they are equal too, the step. */
static ar_status compare_states(ari_trace *t, const state *s, const ari_case *c)
{
    double none, by[2], decay;
    if (!has_equal_gradients(s))
        return AR_OK;
    if (c->d->step == 1)
        AR_TRY(found_cut(t, s, c));
    if (t->kind != ARI_FOUND_NOTHING)
        return AR_OK;
    const ari_fit *own = &s->fit[OWN_FIRST];
    if (s->tensor[FIRST + 1] && own[1].yy == 0.0) {
        ari_trace_set(t, ARI_FOUND_STATE, ARI_IF(OF_GRADIENT) | ARI_IF(ZERO));
        return AR_OK;
    }
    const bool first = ari_fit_two(&by[0], &decay, &s->fit[FIRSTS]) < ARI_FIT;
    const bool second = ari_fit_two(&by[1], &none, &s->fit[SECONDS]) < ARI_FIT;
    const bool lost = !first || !second, lost_first = lost && is_lost(&s->fit[OWN_FIRST]),
               lost_second = lost && is_lost(&s->fit[OWN_SECOND]);
    if (lost_first || lost_second) {
        ARI_FINDING(t, ARI_FOUND_STATE, ARI_IF(LAST),
                    {"lost", .text = !lost_second  ? "first moment is"
                                     : !lost_first ? "second moment is"
                                                   : "moments are"});
    }
    if (!first && t->kind == ARI_FOUND_NOTHING)
        found_moved(t, &s->fit[FIRST_MOVED]);
    if (!first && t->kind == ARI_FOUND_NOTHING)
        AR_TRY(found_history(t, s, c));
    const ari_tally *all = &c->survey.total; /* zeros of a rank are no other gradient */
    if (!first && t->kind == ARI_FOUND_NOTHING && c->d->step == 1 && begins(&own[0]) &&
        2 * all->zero < all->different && ari_fit_one(&none, &own[1]) > 0.5) {
        ARI_FINDING(t, ARI_FOUND_STATE, ARI_IF(OF_GRADIENT) | ARI_IF(FOREIGN),
                    {"cosine", .number = own[1].ya / sqrt(own[1].aa * own[1].yy)});
    }
    if (!first || t->kind != ARI_FOUND_NOTHING)
        return AR_OK;
    if (fabs(decay * sqrt(s->fit[FIRSTS].bb / s->fit[FIRSTS].yy)) > ARI_KNOWN) { /* part of the moment is the weight */
        ARI_FINDING(t, ARI_FOUND_STATE, ARI_IF(OF_WEIGHT), {"first", .number = by[0]}, {"decay", .number = decay});
        return AR_OK;
    }
    if (!second)
        return AR_OK;
    if (!ari_is_near(by[0], 1.0, 2.0 * ARI_SEEN) || !ari_is_near(by[1], 1.0, 4.0 * ARI_SEEN))
        return found_moments(t, c, by[0], by[1]);
    return found_step(t, c, s);
}

/* SGD's momentum, which has no second moment, from m, which both kept alike: the reference adds s, 1 - d of which are
 * counted here, so that k m + (1 - d) s is 1 - d times the reference's k m + s, and d k times m. Of one batch again and
 * again the two are nearly one direction, which the moments' own precision still tells apart. */
static void compare_momentum(ari_trace *t, const state *s)
{
    const ari_fit *f = &s->fit[MOMENTUM];
    const double determinant = f->aa * f->bb - f->ab * f->ab, taken = (f->ya * f->bb - f->yb * f->ab) / determinant,
                 more = (f->yb * f->aa - f->ya * f->ab) / determinant, kept = more / (1.0 - taken);
    const double square =
        f->yy + taken * (taken * f->aa - 2.0 * f->ya) + more * (more * f->bb - 2.0 * f->yb + 2.0 * taken * f->ab);
    const double unsure = 6.0 * sqrt(fmax(square, 0.0) / (double)f->n * f->aa / determinant);
    if (!has_equal_gradients(s) || !(unsure < 10.0 * ARI_KNOWN * fabs(more)) ||
        !(taken > 0.0 && taken < 1.0 && kept > 0.0 && kept < 1.0))
        return;
    ARI_FINDING(t, ARI_FOUND_STATE, ARI_IF(AVERAGE), {"kept", .number = kept}, {"taken", .number = taken},
                {"dampening", .number = 1.0 - taken});
}

/* SGD's first momentum is its gradient and, with weight decay, a part of the weight. */
static ar_status compare_first_momentum(ari_trace *t, const state *s, const ari_case *c)
{
    const ari_fit *f = &s->fit[FIRSTS];
    double by, decay;
    if (!has_equal_gradients(s))
        return AR_OK;
    AR_TRY(found_cut(t, s, c));
    if (t->kind != ARI_FOUND_NOTHING || !(ari_fit_two(&by, &decay, f) < ARI_FIT) || !ari_is_near(by, 1.0, ARI_KNOWN) ||
        !(fabs(decay) * sqrt(f->bb / f->yy) > ARI_SEEN))
        return AR_OK;
    ARI_FINDING(t, ARI_FOUND_STATE, ARI_IF(OF_WEIGHT) | ARI_IF(AVERAGE), {"part", .number = fabs(decay)},
                {"sign", .text = decay > 0.0 ? "plus" : "less"});
    return AR_OK;
}

/* A sample is left to the stretch, which is looked at too. */
ar_status ari_measure_state(ari_trace *t, const ari_case *c)
{
    state s;
    find_state(&s, c);
    const bool adam = has_state(&s, BEFORE, FIRST_KEPT, 1);
    const bool first = c->d->step == 1,
               sgd = !s.tensor[SECOND] && has_state(&s, GRADIENT, SECOND, 1) &&
                     (first ? has_state(&s, BEFORE, GRADIENT, 1) : has_state(&s, FIRST_KEPT, SECOND_KEPT, 1));
    if (!c->known->other || c->step || c->count < 8 || !(adam || sgd) || s.tensor[GRADIENT]->count != c->full->count)
        return AR_OK;
    AR_TRY(read_state(&s, c->start, c->count));
    if (adam)
        return compare_states(t, &s, c);
    if (!first)
        compare_momentum(t, &s);
    else
        AR_TRY(compare_first_momentum(t, &s, c));
    return AR_OK;
}
