/* SPDX-License-Identifier: Apache-2.0 */
/* Experts that ranks share out: who holds what, what moves over which link, and which layouts a search looks at. */
#include "anyrank/config.h"
#include "anyrank/queue.h"
#include "ref/core/lane.h"
#include "support/together.h"
#include "tests/planner/shapes.h"
#include "verify/plan/cost.h"
#include "verify/plan/search.h"

/* tp 2, pp 8, dp 8 of Mixtral 8x22B: NVIDIA's layout on 128 GPUs, with ep of the 8. */
static ari_planned planned_of(const ar_config *c, ari_choice choice, size_t batch)
{
    ari_planned base = shape_planned(c, 1, false, batch, 4096);
    base.flash = true;
    base.step.run.ddp.bucket_bytes = ARI_BUCKETS_USUAL;
    return ari_choice_planned(&base, &choice);
}

static ari_planned mixtral(const ar_config *c, int ep, int etp, int zero)
{
    return planned_of(c,
                      (ari_choice)ROW(.tp = 2, .pp = 8, .dp = 8, .ep = ep, .etp = etp, .zero = zero, .sp = true,
                                      .micro_batches = 32, .schedule = AR_PP_1F1B),
                      256);
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

/* Of the first of 8 stages: 7 layers and the embedding. */
static const double LAYER = 2.0 * 6144.0 * (6144.0 + 1024.0) / 2.0 + 2.0 * 6144.0 + 8.0 * 6144.0;
static const double OTHERS = 7.0 * LAYER + 32000.0 * 6144.0 / 2.0, EXPERT = 3.0 * 6144.0 * 16384.0;

static double states(const ari_memory *m)
{
    return m->bytes[ARI_MEMORY_WEIGHTS] + m->bytes[ARI_MEMORY_GRADIENTS] + m->bytes[ARI_MEMORY_MASTER] +
           m->bytes[ARI_MEMORY_OPTIMIZER];
}

/* A rank has its own experts alone, and shares what ZeRO divides of them with the ranks that have the same. */
CLAIM(experts_are_divided_by_ep_and_their_states_by_their_copies)
{
    const ar_config c = shape_bundled("mixtral-8x22b");
    for (int i = 0; i < 4 * 4 * 2; i++) {
        const int ep = 1 << i % 4, zero = i / 4 % 4, etp = i / 16;
        const double copies = (etp == 1 ? 16.0 : 8.0) / ep, experts = 7.0 * 8.0 / ep * EXPERT / (etp == 1 ? 1.0 : 2.0);
        const ari_planned p = mixtral(&c, ep, etp, zero);
        const ari_memory m = shape_memory(&p);
        const double shared = OTHERS / 8.0 + experts / copies, whole = OTHERS + experts;
        cr_assert_ok(ari_planned_check(&p));
        cr_expect_eq(m.bytes[ARI_MEMORY_WEIGHTS], 2.0 * (zero >= 3 ? shared : whole), "ep=%d etp=%d zero=%d: %.0f", ep,
                     etp, zero, m.bytes[ARI_MEMORY_WEIGHTS]);
        cr_expect_eq(m.bytes[ARI_MEMORY_GRADIENTS], 2.0 * (zero >= 2 ? shared : whole), "ep=%d etp=%d zero=%d", ep, etp,
                     zero);
        cr_expect_eq(m.bytes[ARI_MEMORY_MASTER], 4.0 * (zero >= 1 ? shared : whole), "ep=%d etp=%d zero=%d", ep, etp,
                     zero);
        cr_expect_eq(m.bytes[ARI_MEMORY_OPTIMIZER], 8.0 * (zero >= 1 ? shared : whole), "ep=%d etp=%d zero=%d", ep, etp,
                     zero);
    }
}

/* Megatron-LM's theoretical_memory_usage.py: 6 + 12/dp bytes a parameter, of them 2 more for fp32 gradients, of the
 * stage with the embedding; routers are left out there, and norms divided by tp. It knows no ep: each rank has all
 * experts. */
CLAIM(states_of_all_experts_are_what_megatron_says)
{
    const ar_config c = shape_bundled("mixtral-8x22b");
    const double h = 6144.0, layer = 2.0 * h * (16384.0 * 8.0 * 1.5 + 1.0) + 2.0 * h * h * (1.0 + 8.0 / 48.0);
    const double parameters = ((56.0 * layer + h) / 8.0 + 32000.0 * h) / 2.0;
    const ari_planned p = mixtral(&c, 1, 0, 1);
    const ari_memory m = shape_memory(&p);
    const double got = states(&m) + m.bytes[ARI_MEMORY_GRADIENTS], want = parameters * (6.0 + 12.0 / 8.0);
    cr_expect(fabs(got - want) < 1e-4 * want, "%.0f bytes, Megatron-LM's %.0f", got, want);
}

/* DeepSeek-V3's sizes but for its latent attention: three layers with an MLP, and 58 with 256 experts and a shared
 * one. */
static ar_config deepseek(void)
{
    ar_config c = shape_bundled("glm4-moe-demo");
    c.hidden = 7168;
    c.layers = 61;
    c.ffn = 18432;
    c.heads = c.kv_heads = 128;
    c.head_dim = 128;
    c.vocab = 129280;
    c.experts.n = 256;
    c.experts.per_token = 8;
    c.experts.ffn = c.experts.shared = 2048;
    c.dense[0] = 7;
    return c;
}

/* On 2,048 GPUs, the experts over 64 ranks and not over tp. Megatron-LM: 6 bytes a parameter and 12 more over the ranks
 * that have the same ones; of the experts those of the same ep rank. Routers and norms are a ten-thousandth. */
CLAIM(states_of_a_deepseek_are_what_megatron_says)
{
    const ar_config c = deepseek();
    const double h = 7168.0, f = 2048.0, heads = 128.0, d = 128.0, layers = 61.0, dense = 3.0, vocab = 129280.0;
    for (int zero = 0; zero <= 1; zero++) {
        ari_choice choice = ROW(.tp = 2, .pp = 1, .dp = 1024, .cp = 1, .ep = 64, .etp = 1, .sp = true,
                                .micro_batches = 1, .schedule = AR_PP_1F1B);
        choice.zero = zero;
        ari_planned p = planned_of(&c, choice, 1024);
        p.fp32_gradients = true;
        const ari_memory m = shape_memory(&p);
        const double attention = 4.0 * h * heads * d / 2.0, mlp = 3.0 * h * 18432.0 / 2.0, shared = 3.0 * h * f / 2.0;
        const double others = layers * attention + dense * mlp + (layers - dense) * (shared + 256.0 * h) + vocab * h;
        const double experts = (layers - dense) * 256.0 / 64.0 * 3.0 * h * f, copies = 2048.0 / 64.0;
        const double want =
            6.0 * (others + experts) + 12.0 * (zero ? others / 1024.0 + experts / copies : others + experts);
        cr_expect(fabs(states(&m) - want) < 1e-4 * want, "zero=%d: %.0f bytes, Megatron-LM's %.0f", zero, states(&m),
                  want);
    }
}

/* Whatever ep is: as if every expert had as many. */
CLAIM(a_layer_keeps_as_many_rows_as_its_tokens_have)
{
    const ar_config c = shape_bundled("mixtral-8x22b");
    const double h = 6144.0, rows = 2.0 * 4096.0, width = 16384.0;
    /* Of its own tokens the router's input, probabilities and what is combined; of all rows what experts take, gate, up
     * and their product. */
    const double cut = 2.0 * 4096.0 * h / 2.0 + 4.0 * 4096.0 * 8.0 / 2.0 + 2.0 * rows * h / 2.0 + 2.0 * rows * h +
                       3.0 * 2.0 * rows * width / 2.0;
    const double whole = cut - 2.0 * rows * h / 2.0; /* half of the rows, of twice the width */
    for (int ep = 1; ep <= 8; ep *= 2) {
        const ari_planned p = mixtral(&c, ep, 0, 1), q = mixtral(&c, ep, 1, 1);
        const ari_memory m = shape_memory(&p), n = shape_memory(&q);
        cr_expect_eq(m.bytes[ARI_MEMORY_MLP], 8.0 * 7.0 * cut, "ep=%d: %.0f", ep, m.bytes[ARI_MEMORY_MLP]);
        cr_expect_eq(n.bytes[ARI_MEMORY_MLP], 8.0 * 7.0 * whole, "ep=%d, etp=1: %.0f", ep, n.bytes[ARI_MEMORY_MLP]);
    }
}

/* --- time --------------------------------------------------------------------------------------------------------- */

static ari_time time_of(const ari_planned *p)
{
    ari_time_options o = {.fp32_sums = false};
    ari_time t;
    cr_assert_ok(ar_sim_cluster_parse(&o.cluster, "h100 flops=989T"));
    cr_assert_ok(ari_planned_check(p));
    cr_assert_ok(ari_time_of(&t, p, &o));
    return t;
}

static const ari_traffic_row *row_of(const ari_time *t, const char *call)
{
    for (int i = 0; i < t->traffic.n; i++) {
        if (t->traffic.row[i].time_kind == ARI_TIME_EP && strcmp(t->traffic.row[i].call, call) == 0)
            return &t->traffic.row[i];
    }
    return NULL;
}

/* Of the 2 x 4096 rows of a micro-batch all but those for the own experts go, and come back, in either pass: with
 * sequence parallelism each of tp's ranks sends those of its own tokens. Neighbours are in a node of 8. */
CLAIM(rows_go_over_the_links_of_their_group)
{
    const ar_config c = shape_bundled("mixtral-8x22b");
    for (int i = 0; i < 6; i++) {
        const int ep = 2 << i % 3, etp = i / 3;
        const ari_planned p = mixtral(&c, ep, etp, 1);
        const ari_time t = time_of(&p);
        const ari_traffic_row *all = row_of(&t, "all_to_all");
        const double calls = 4.0 * 7.0 * 32.0, message = 2.0 * 6144.0 * 2.0 * 4096.0 / 2.0 / ep;
        const double near = (etp == 1 ? ep : fmin(ep, 4)) - 1.0, far = ep - 1.0 - near;
        const double each = (far > 0.0 ? 9.6e-6 : 3.4e-6) + near * message / 450e9 + far * message / 50e9;
        cr_assert_not_null(all);
        cr_expect_eq(all->ranks, (double)ep);
        cr_expect_eq(all->inter_node, far > 0.0, "ep=%d etp=%d", ep, etp);
        cr_expect_eq(all->calls, calls);
        cr_expect_float_eq(all->bytes, calls * (ep - 1.0) * message, 1.0);
        cr_expect_float_eq(all->seconds, calls * each, 1e-9, "ep=%d etp=%d: %g s, by hand %g s", ep, etp, all->seconds,
                           calls * each);
        cr_expect_geq(t.seconds[ARI_TIME_EP], 0.999 * all->seconds);
    }
    const ari_planned p = mixtral(&c, 1, 0, 1);
    const ari_time t = time_of(&p);
    cr_expect_eq(t.seconds[ARI_TIME_EP], 0.0);
}

enum { EACH = 3000, MOST_SHARERS = 16 };

/* Every rank sends each other rank as many rows: *arg is the nanosecond in which rank 0 has them. */
static ar_status exchange_rows(ar_comm *c, void *arg)
{
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    float sent[MOST_SHARERS * EACH] = {0.0f}, got[MOST_SHARERS * EACH];
    size_t counts[MOST_SHARERS];
    for (int i = 0; i < MOST_SHARERS; i++)
        counts[i] = EACH;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "rows"));
    AR_TRY(ar_comm_all_to_all(c, q, (ar_buf){got}, (ar_cbuf){sent}, counts, counts, AR_F32, "rows"));
    AR_TRY(ar_queue_sync(q, 0));
    if (ar_comm_rank(c) == 0)
        *(uint64_t *)arg = ari_lane_self()->virtual_ns;
    return AR_OK;
}

CLAIM(an_all_to_all_takes_as_long_as_in_virtual_time)
{
    const ar_config c = shape_bundled("mixtral-8x22b");
    ari_time_options o = {.fp32_sums = false};
    cr_assert_ok(ar_sim_cluster_parse(&o.cluster, "8x inside=3.4us:450GB/s between=9.6us:50GB/s flops=989T"));
    for (int i = 0; i < 4 * 3; i++) {
        const int ep = 2 << i % 4, nodes = 1 << i / 4;
        ari_planned p = shape_planned(&c, 1, false, 16, 4096);
        uint64_t ns = 0;
        if (ep % nodes != 0)
            continue;
        p.step.run.parallel = (ar_parallel){.dp = ep, .ep = ep};
        o.cluster.ranks_per_node = ep / nodes;
        const ari_links l = ari_links_of(&p, &o, ARI_OVER_EP);
        const double want = ari_links_call(&l, ARI_MOVES_ALL_TO_ALL, (double)EACH * ep * (ep - 1), sizeof(float));
        cr_assert_ok(ar_sim_run(ep, &(ar_sim_options){.cluster = &o.cluster}, exchange_rows, &ns, NULL));
        cr_expect(fabs(1e-9 * (double)ns - want) <= 1e-9, "ep=%d on %d nodes: virtual time %g s, planned %g s", ep,
                  nodes, 1e-9 * (double)ns, want);
    }
}

/* ZeRO-2 and -3 move parameters of experts over those that have the same: where each is there once, nothing. */
CLAIM(gradients_of_experts_are_summed_over_their_copies)
{
    const ar_config c = shape_bundled("mixtral-8x22b");
    for (int zero = 1; zero <= 3; zero++) {
        double bytes[2] = {0.0};
        for (int k = 0; k < 2; k++) {
            const ari_planned p = mixtral(&c, k ? 8 : 4, 0, zero);
            const ari_time t = time_of(&p);
            for (int i = 0; i < t.traffic.n; i++)
                bytes[k] += t.traffic.row[i].time_kind == ARI_TIME_DP && t.traffic.row[i].calls > 4
                                ? t.traffic.row[i].bytes
                                : 0;
        }
        const double times = zero == 3 ? 3.0 * 32.0 : zero == 2 ? 1.0 + 32.0 : 2.0; /* scattered, gathered */
        const double experts = times * 2.0 * 7.0 * 2.0 * EXPERT / 2.0 * (1.0 / 2.0);
        cr_expect(fabs(bytes[0] - bytes[1] - experts) < 1e-3 * experts, "zero=%d: %g bytes more, by hand %g", zero,
                  bytes[0] - bytes[1], experts);
    }
}

/* --- published layouts -------------------------------------------------------------------------------------------- */

/* Of Megatron-LM's README of experts (MCore 0.8), and of Liu et al. 2025 (arXiv:2504.14960), which does not cut
 * experts over tp: each is legal and fits, in the account that leaves out fp32 gradients and fragmentation. */
CLAIM(published_layouts_are_legal_and_fit)
{
    ar_config small = shape_llama(32, 4096, 14336, 32, 8, 32000), large = shape_bundled("mixtral-8x22b");
    small.experts = (ar_experts){.n = 8, .per_token = 2, .ffn = 14336, .normalised = true};
    const struct {
        const ar_config *config;
        ari_choice choice;
    } published[] = {
        {&small, ROW(.tp = 1, .pp = 4, .dp = 16, .ep = 8, .virtual_stages = 8, .micro_batches = 16)},
        {&large, ROW(.tp = 4, .pp = 8, .dp = 4, .ep = 2, .virtual_stages = 7, .micro_batches = 64)},
        {&large, ROW(.tp = 2, .pp = 8, .dp = 8, .ep = 8, .virtual_stages = 7, .micro_batches = 32)},
        {&large, ROW(.tp = 2, .pp = 8, .dp = 8, .ep = 8, .etp = 1, .virtual_stages = 7, .micro_batches = 32)},
    };
    double seconds[4];
    for (int i = 0; i < 4; i++) {
        ari_choice choice = published[i].choice;
        choice.zero = 1;
        choice.sp = choice.tp > 1;
        choice.schedule = AR_PP_INTERLEAVED;
        const ari_planned p = planned_of(published[i].config, choice, 256);
        const ari_time t = time_of(&p);
        const ari_memory m = shape_memory(&p);
        cr_expect_leq(ari_memory_sum(&m), 80e9, "layout %d: %g GB", i, ari_memory_sum(&m) * 1e-9);
        seconds[i] = ari_time_step(&t);
    }
    cr_expect_lt(seconds[3], seconds[2]); /* the paper's point: rows stay in a node */
    cr_expect_lt(seconds[3], seconds[1]);
}

/* --- the search --------------------------------------------------------------------------------------------------- */

static ari_ranking ranking_of(const ar_config *c, ari_choice fixed, bool every)
{
    ari_search s = {.base = shape_planned(c, 1, false, 8, 64), .ranks = 8, .sp = -1, .zero = -1, .recompute = -1};
    ari_ranking r;
    s.schedule = -1;
    s.base.flash = true;
    s.base.step.run.ddp.bucket_bytes = ARI_BUCKETS_USUAL;
    s.fixed = fixed;
    s.every = every;
    cr_assert_ok(ar_sim_cluster_parse(&s.time.cluster, "h100"));
    cr_assert_ok(ari_search_run(&r, &s));
    return r;
}

/* Every ep that a mesh can have is tried, with experts cut over tp and not; models without experts have one. */
CLAIM(searches_go_over_every_ep)
{
    const ar_config experts = shape_bundled("mixtral-demo"), none = shape_bundled("llama-demo");
    SCOPED(ari_ranking_fini) ari_ranking all = ranking_of(&experts, (ari_choice){0}, true);
    SCOPED(ari_ranking_fini) ari_ranking dense = ranking_of(&none, (ari_choice){0}, true);
    SCOPED(ari_ranking_fini) ari_ranking given = ranking_of(&experts, (ari_choice){.ep = 4, .etp = 1}, false);
    bool seen[2][9] = {{false}};
    for (size_t i = 0; i < all.n; i++) {
        const ari_choice *a = &all.layout[i].choice;
        seen[a->etp == 1][a->ep] = seen[a->etp == 1][a->ep] || all.layout[i].legal == AR_OK;
        cr_expect(a->etp != 1 || (a->tp > 1 && a->sp));
    }
    for (int ep = 1; ep <= 8; ep *= 2)
        cr_expect(seen[0][ep] && seen[1][ep], "ep=%d", ep);
    for (size_t i = 0; i < dense.n; i++)
        cr_expect(dense.layout[i].choice.ep == 1 && dense.layout[i].choice.etp == 0);
    cr_expect_gt(given.n, 2u);
    for (size_t i = 0; i < given.n; i++)
        cr_expect(given.layout[i].choice.ep == 4 && given.layout[i].choice.etp == 1);
    SCOPED(ari_ranking_fini) ari_ranking refused = ranking_of(&none, (ari_choice){.ep = 2}, false);
    cr_expect(refused.legal == 0 && strstr(refused.refused, "ep=2 shares out experts"), "%s", refused.refused);
}

EVERY_CLAIM(experts)
