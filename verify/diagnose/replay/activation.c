/* SPDX-License-Identifier: Apache-2.0 */
/* An MLP computed again from what its first layers give: its activation function, and which of gate and up it is of. */
#include "verify/diagnose/replay/search.h"

double ari_activation_of(size_t function, double x)
{
    const double root_of_half = 0.7071067811865476;
    switch (function) {
    case 0:
        return x / (1.0 + exp(-x));
    case 1:
        return 0.5 * x * (1.0 + erf(x * root_of_half));
    case 2:
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
    case 3:
        return x > 0.0 ? x : 0.0;
    case 4:
        return 1.0 / (1.0 + exp(-x));
    case 5:
        return x / (1.0 + exp(-1.702 * x));
    case 6:
        return x > 0.0 ? x * x : 0.0;
    case 7:
        return tanh(x);
    default:
        return x;
    }
}
static const char *const function_names[] = {
    "silu", "gelu", "gelu's tanh form", "relu", "sigmoid", "quick gelu", "squared relu", "tanh", "no function"};
enum { FUNCTIONS = sizeof function_names / sizeof *function_names };

typedef struct mlp {
    ari_probe p;
    float *x[2];     /* gate, up, [seq][width]; where one layer gives both, or there is no gate, x[0] alone */
    size_t width[2]; /* of their rows */
    size_t n;        /* features after the function */
    bool gated;
    double *hidden; /* [n] */
} mlp;

/* The features of gate (0) or up (1) of a token. */
static const float *row_of(const mlp *m, size_t which, size_t token)
{
    return m->x[1] ? m->x[which] + token * m->n : m->x[0] + token * m->width[0] + which * m->n;
}

/* Candidates: each function of gate, then each of up times gate. */
static void put_function(ari_probe *p, void *of, size_t candidate)
{
    mlp *m = of;
    const bool exchanged = candidate >= FUNCTIONS;
    for (size_t k = 0; k < p->tokens; k++) {
        const float *x = row_of(m, exchanged, p->token[k]), *by = m->gated ? row_of(m, !exchanged, p->token[k]) : NULL;
        for (size_t i = 0; i < m->n; i++)
            m->hidden[i] = ari_activation_of(candidate % FUNCTIONS, (double)x[i]) * (by ? (double)by[i] : 1.0);
        ari_probe_put(p, k, m->hidden);
    }
}

static void find_function(ari_trace *t, mlp *m)
{
    size_t base, other;
    double left;
    if (!ari_choose(&base, &other, &left, &m->p, put_function, m, (m->gated ? 2 : 1) * (size_t)FUNCTIONS))
        return;
    ARI_FINDING(t, ARI_FOUND_ACTIVATION, base / FUNCTIONS != other / FUNCTIONS ? ARI_IF(EXCHANGED) : 0,
                {"function", .text = function_names[other % FUNCTIONS]},
                {"wanted", .text = function_names[base % FUNCTIONS]}, {"left", .number = left});
}

/* Tries these inputs, and leaves to find_function whether their function is the reference; `up` may be NULL. */
static ar_status try_inputs(ari_trace *t, mlp *m, const ar_dump_tensor *gate, const ar_dump_tensor *up)
{
    const ar_dump_tensor *const from[] = {gate, up};
    bool held = true;
    for (size_t i = 0; i < 2; i++) {
        m->x[i] = NULL;
        if (from[i] && held)
            AR_TRY(ari_probe_read_input(&m->x[i], &m->width[i], &held, &m->p, from[i]));
        held = held && (!from[i] || m->width[i] == m->n || (!up && m->width[i] == 2 * m->n));
    }
    const bool readable = gate && held;
    m->gated = readable && (up || m->width[0] != m->n);
    if (readable)
        find_function(t, m);
    return AR_OK;
}

/* Tries the function's inputs by their names. */
static ar_status try_named(ari_trace *t, mlp *m)
{
    static const ari_role roles[] = {ARI_GATE, ARI_UP, ARI_FIRST, ARI_GATE_UP};
    const ar_dump_tensor *x[4];
    for (size_t i = 0; i < 4; i++)
        x[i] = ari_replay_input(m->p.c, roles[i]);
    const bool two = x[0] && x[1];
    return try_inputs(t, m, two ? x[0] : x[2] ? x[2] : x[3] ? x[3] : x[1], two ? x[1] : NULL);
}

static ar_status try_once(ari_trace *t, mlp *m, const ar_dump_tensor *gate, const ar_dump_tensor *up)
{
    ARI_ARENA_SCOPE(m->p.c->arena);
    return try_inputs(t, m, gate, up);
}

/* The same by widths, if names do not show it: one value, two, or one that holds both. */
static ar_status try_near(ari_trace *t, mlp *m)
{
    const ar_dump_tensor *near[ARI_MOST_NEAR];
    for (size_t parts = 1; parts <= 2; parts++) {
        const size_t n = ari_replay_near(near, m->p.c, parts * m->n);
        for (size_t i = 0; i < n && t->kind == ARI_FOUND_NOTHING; i++) {
            AR_TRY(try_once(t, m, near[i], NULL));
            for (size_t k = 0; k < n && parts == 1 && t->kind == ARI_FOUND_NOTHING; k++) {
                if (k != i)
                    AR_TRY(try_once(t, m, near[i], near[k]));
            }
        }
    }
    return AR_OK;
}

ar_status ari_measure_activation(ari_trace *t, const ari_case *c)
{
    const bool inside = c->role == ARI_ACTIVATION, named = inside || c->role == ARI_DOWN || c->role == ARI_MLP;
    mlp m = {.hidden = NULL};
    bool held = true;
    if (!ari_may_replay(c) || (!named && c->role != ARI_NO_ROLE))
        return AR_OK;
    ari_probe_choose(&m.p, c);
    if (!inside)
        AR_TRY(ari_probe_read_layer(&m.p, &held, named ? ARI_DOWN : ARI_NO_ROLE));
    m.n = inside ? c->grid.cols : m.p.in;
    if (!held)
        return AR_OK;
    AR_TRY(ARI_TAKE(&m.hidden, c->arena, m.n, "hidden features"));
    AR_TRY(named ? try_named(t, &m) : try_near(t, &m));
    if (t->kind == ARI_FOUND_NOTHING && inside && m.gated) { /* a module of the function alone */
        m.gated = false;
        find_function(t, &m);
    }
    return AR_OK;
}
