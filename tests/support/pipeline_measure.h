/* SPDX-License-Identifier: Apache-2.0 */
/* Pipelines of equal stages run in virtual time, and what the papers' closed forms say of them. Computation is slow
 * beside transfers, and the model has blocks alone, so that no stage has an embedding or a head. */
#pragma once

#include "anyrank/activation.h"
#include "anyrank/config.h"
#include "tests/support/test.h"
#include "verify/run/cluster_run.h"

enum { PIPELINE_RANKS = 4, PIPELINE_MOST_MICRO = 16, PIPELINE_LAYERS = 16 };
enum { PIPELINE_SEQ = 4, PIPELINE_HIDDEN = 32, PIPELINE_FFN = 512, PIPELINE_KINDS = 4, PIPELINE_CASES = 24 };

typedef struct pipeline_case {
    ar_pp_schedule schedule;
    int ranks, each, micro_batches; /* each: virtual stages of a rank */
} pipeline_case;
typedef struct pipeline_measured {
    double bubble;               /* time in which ranks wait, as a share of that in which they compute */
    double kept[PIPELINE_RANKS]; /* bytes of activations of each rank */
} pipeline_measured;

/* p = 2, 4; m = 4, 8, 16; every schedule. */
static inline pipeline_case pipeline_case_of(int i)
{
    const int kind = i % PIPELINE_KINDS;
    return (pipeline_case){.schedule = (ar_pp_schedule)kind,
                           .ranks = i / PIPELINE_KINDS % 2 ? 4 : 2,
                           .each = kind == AR_PP_INTERLEAVED ? 2 : 1,
                           .micro_batches = 4 << i / PIPELINE_KINDS / 2};
}

/* Bytes are small beside those of blocks where stages only hand values on: what a rank has received ahead is left out
 * of the formulas. */
static inline void pipeline_measure(pipeline_measured *m, const pipeline_case *c)
{
    static const ar_sim_cluster slow = {.inside = {1e-9, 1e15}, .flops = 1e6};
    const ar_config config = {.arch = AR_ARCH_STACK,
                              .layers = PIPELINE_LAYERS,
                              .hidden = PIPELINE_HIDDEN,
                              .ffn = PIPELINE_FFN,
                              .heads = 2,
                              .kv_heads = 2,
                              .head_dim = PIPELINE_HIDDEN / 2,
                              .vocab = 8,
                              .activation = AR_ACT_GELU_TANH,
                              .norm_eps = 1e-5,
                              .causal = true,
                              .max_positions = PIPELINE_SEQ,
                              .initializer_range = 0.02};
    static const int64_t ids[PIPELINE_MOST_MICRO * PIPELINE_SEQ] = {1, 2, 3};
    const ar_batch batch = {.batch = (size_t)c->micro_batches, .seq = PIPELINE_SEQ, .input_ids = ids};
    ar_rank_memory memory[PIPELINE_RANKS];
    ari_cluster_result result;
    const ari_cluster_options o = {.run = {.parallel = {.pp = c->ranks,
                                                        .virtual_stages = c->each,
                                                        .schedule = c->schedule,
                                                        .micro_batches = c->micro_batches},
                                           .numerics = AR_NUMERICS_NATIVE,
                                           .threads = 1,
                                           .sim = {.cluster = &slow, .timeout_ns = UINT64_C(60000000000)}},
                                   .config = &config,
                                   .batch = &batch,
                                   .memory = memory};
    cr_assert_ok(ari_cluster_run(&result, &o));
    free(result.loss);
    m->bubble = result.predicted.seconds / result.predicted.compute - 1.0;
    for (int r = 0; r < c->ranks; r++)
        m->kept[r] = (double)memory[r].stored;
}

/* Multiply-adds of a micro-batch in all blocks, forward: of products with weights, whose two gradients take as many
 * each, and of attention, of which each of its two products has two gradients. A causal query sees half of the keys. */
static inline void pipeline_work(double *linear, double *attention)
{
    const double h = PIPELINE_HIDDEN, f = PIPELINE_FFN, s = PIPELINE_SEQ;
    *linear = PIPELINE_LAYERS * s * (4.0 * h * h + 2.0 * h * f);
    *attention = PIPELINE_LAYERS * 2.0 * h * s * (s + 1.0) / 2.0;
}

/* Share of the computing time: (p - 1) / (m v) of equal stages (Narayanan et al. 2021, arXiv:2104.04473, section 2.2),
 * in ZB-H1 (p - 1) (F + I - W) / (m (F + I + W)) (Qi et al. 2023, arXiv:2401.10241, table 2). */
static inline double pipeline_bubble(const pipeline_case *c)
{
    double linear = 0.0, attention = 0.0;
    pipeline_work(&linear, &attention);
    const double plain = (c->ranks - 1.0) / (c->micro_batches * c->each);
    const double f = linear + attention, i = linear + 2.0 * attention, w = linear;
    return c->schedule == AR_PP_ZERO_BUBBLE ? plain * (f + i - w) / (f + i + w) : plain;
}

/* What rank r keeps, of activations of a micro-batch in all of its stages (one), and of inputs and gradients of their
 * products (late): p - r micro-batches in 1F1B, and r whose weights' gradients follow later in ZB-H1; of v stages those
 * of 2(p - r - 1) + (v - 1)p + 1 passes. */
static inline double pipeline_kept(const pipeline_case *c, int r, double one, double late)
{
    const int p = c->ranks, m = c->micro_batches, v = c->each;
    const int passes = 2 * (p - r - 1) + (v - 1) * p + 1, ahead = p - r < m ? p - r : m;
    switch (c->schedule) {
    case AR_PP_GPIPE:
        return m * one;
    case AR_PP_INTERLEAVED:
        return (passes < v * m ? passes : v * m) * one / v;
    case AR_PP_ZERO_BUBBLE:
        return ahead * one + (m - ahead < r ? m - ahead : r) * late;
    default:
        return ahead * one;
    }
}

/* fp32, of the layers of a rank: q, k and v have one input, as gate and up would. */
static inline double pipeline_late(const pipeline_case *c)
{
    const double h = PIPELINE_HIDDEN, f = PIPELINE_FFN;
    const double inputs = h + h + h + f, gradients = 3.0 * h + h + f + h;
    return 4.0 * PIPELINE_SEQ * PIPELINE_LAYERS / c->ranks * (inputs + gradients);
}
