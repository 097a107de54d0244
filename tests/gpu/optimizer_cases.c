/* SPDX-License-Identifier: Apache-2.0 */
/* Updates of every kind of optimizer, at its first step and later. */
#include "gpu/conformance.h"
#include "ref/core/float_bits.h"
#include "ref/numerics/optimizer.h"

typedef struct kind_case {
    const char *name;
    ar_optimizer_kind kind;
    double momentum, weight_decay;
    bool nesterov;
} kind_case;

static ari_optimizer_constants constants(const kind_case *c, int steps)
{
    ar_optimizer_options o = {.kind = c->kind, .lr = 1e-2, .momentum = c->momentum, .nesterov = c->nesterov};
    o.beta1 = 0.9;
    o.beta2 = 0.95;
    o.eps = 1e-8;
    o.weight_decay = c->weight_decay;
    ari_optimizer_clock clock = {0, 0.0, 0.0};
    for (int i = 0; i < steps; i++)
        ari_optimizer_tick(&clock, &o);
    return ari_optimizer_constants_of(&clock, &o, 0.7, c->weight_decay);
}

static void step_case(device_pair *p, const kind_case *c, size_t n, pair_values v, int steps)
{
    PAIR_CASE(p, "%s, step %d, n %zu, %s values", c->name, steps, n, pair_values_name(v));
    const ari_optimizer_constants k = constants(c, steps);
    const bool adam = c->kind == AR_OPTIMIZER_ADAM || c->kind == AR_OPTIMIZER_ADAMW;
    const pair_buf w = pair_floats(p, "w", n, v), g = pair_floats(p, "g", n, v);
    const pair_buf m = adam || c->momentum > 0.0 ? pair_floats(p, "m", n, v) : pair_none();
    const pair_buf u = adam ? pair_floats(p, "v", n, v) : pair_none();
    for (size_t i = 0; i < n && u.host; i++) { /* a mean of squares, but for a few */
        float *x = (float *)u.host + i;
        *x = *x < 0.0f && i % 16 != 3 ? -*x : *x;
    }
    const bool kept = p->stored == AR_BF16 && pair_below(p, 3) != 0;
    const pair_buf master = kept ? pair_floats(p, "master", n, v) : pair_none();
    for (size_t i = 0; i < n && w.host && master.host; i++) { /* most weights are what the master rounds to, bf16 */
        float *own = (float *)w.host + i;
        const size_t what = pair_below(p, 3);
        *own = what == 2 ? *own : ari_f32_of_bf16(ari_bf16_of_f32(what == 0 ? ((float *)master.host)[i] : *own));
    }
    const pair_tensor weight = pair_stored(p, pair_view(w, 1, &n)), own = pair_view(g, 1, &n);
    const pair_tensor gradient = pair_below(p, 2) ? pair_stored(p, own) : own;
    PAIR_RUN(p, optimizer_step, &weight.at[s], master.at[s], m.at[s], u.at[s], &gradient.at[s], &k);
}

void optimizer_step_cases(device_pair *p)
{
    static const kind_case kinds[] = {{"SGD", AR_OPTIMIZER_SGD, 0.0, 0.0, false},
                                      {"SGD with decay", AR_OPTIMIZER_SGD, 0.0, 0.1, false},
                                      {"SGD with momentum", AR_OPTIMIZER_SGD, 0.9, 0.0, false},
                                      {"Nesterov's SGD with decay", AR_OPTIMIZER_SGD, 0.8, 0.1, true},
                                      {"Adam", AR_OPTIMIZER_ADAM, 0.0, 0.0, false},
                                      {"Adam with decay", AR_OPTIMIZER_ADAM, 0.0, 0.1, false},
                                      {"AdamW", AR_OPTIMIZER_ADAMW, 0.0, 0.1, false},
                                      {"AdamW without decay", AR_OPTIMIZER_ADAMW, 0.0, 0.0, false},
                                      {"Muon's momentum", AR_OPTIMIZER_MUON, 0.9, 0.0, true},
                                      {"Muon", AR_OPTIMIZER_MUON, 0.0, 0.1, false}};
    size_t turn = 0;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        for (int v = 0; v < PAIR_VALUE_KINDS; v++)
            for (int steps = 1; steps <= 3 && pair_goes_on(p); steps += 2)
                step_case(p, &kinds[i], pair_size(p, turn++ % 10), (pair_values)v, steps);
}
