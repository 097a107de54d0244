/* SPDX-License-Identifier: Apache-2.0 */
/* Which layouts are legal, how they are ranked, and the closed forms of what no run shows. */
#include "anyrank/config.h"
#include "ref/core/schedule_private.h"
#include "support/together.h"
#include "tests/planner/shapes.h"
#include "verify/plan/cost.h"
#include "verify/plan/search.h"

static ari_planned planned_of(const ar_config *c, size_t batch, size_t seq)
{
    return (ari_planned){.step = {.config = c,
                                  .run = {.batch = batch,
                                          .seq = seq,
                                          .steps = 1,
                                          .optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW),
                                          .ddp.bucket_bytes = ARI_BUCKETS_USUAL}},
                         .flash = true};
}

static ari_time_options on(const char *cluster)
{
    ari_time_options o = {.fp32_sums = false};
    cr_assert_ok(ar_sim_cluster_parse(&o.cluster, cluster));
    return o;
}

static ari_time time_of(const ari_planned *p, const ari_time_options *o)
{
    ari_time t;
    cr_assert_ok(ari_planned_check(p));
    cr_assert_ok(ari_time_of(&t, p, o));
    return t;
}

static ari_time time_of_choice(const ar_config *c, size_t batch, size_t seq, ari_choice choice,
                               const ari_time_options *o)
{
    const ari_planned base = planned_of(c, batch, seq), p = ari_choice_planned(&base, &choice);
    return time_of(&p, o);
}

static double sent(const ari_time *t, ari_time_kind over)
{
    double bytes = 0.0;
    for (int i = 0; i < t->traffic.n; i++)
        bytes += t->traffic.row[i].time_kind == over ? t->traffic.row[i].bytes : 0.0;
    return bytes;
}

/* --- axes --------------------------------------------------------------------------------------------------------- */

CLAIM(a_choice_has_each_extent_under_its_name)
{
    const ari_choice c = ari_choice_of(&(ar_parallel){.tp = 2, .cp = 3, .pp = 5, .dp = 7});
    const ari_planned base = {.flash = true}, p = ari_choice_planned(&base, &c);
    char text[ARI_CHOICE_TEXT];
    cr_expect(c.tp == 2 && c.cp == 3 && c.pp == 5 && c.dp == 7);
    cr_expect_str_eq(ari_choice_text(text, &c, ARI_LAYOUT_AXES, ", "), "tp=2, cp=3, pp=5, dp=7");
    for (int i = 0; i < ARI_LAYOUT_AXES; i++)
        cr_expect_eq(ari_layout_extent(&p.step.run.parallel, ari_planned_axes[i]), c.extent[i]);
}

/* --- legality ----------------------------------------------------------------------------------------------------- */

CLAIM(what_cannot_be_split_is_refused_by_its_name)
{
    const ar_config c = shape_bundled("llama-3-8b"); /* 32 heads, 8 KV heads, 32 layers */
    static const struct {
        ari_choice choice;
        const char *says;
    } wrong[] = {
        {{.tp = 3}, "query heads = 32 cannot be split over tp=3"},
        {{.tp = 64}, "more than the 32 query heads"},
        {{.cp = 3}, "8192 cannot be split over cp=3"},
        {{.pp = 33}, "32 layers cannot be split over 33 stages"},
        {{.pp = 4, .virtual_stages = 9, .schedule = AR_PP_INTERLEAVED}, "cannot be split over 36 stages"},
        {{.pp = 4, .virtual_stages = 2}, "several stages of a rank take turns in interleaved"},
        {{.pp = 4, .schedule = AR_PP_INTERLEAVED}, "give virtual stages of at least 2"},
        {{.virtual_stages = 2}, "give a pp of at least 2"},
        {{.dp = 32}, "a batch of 16 has no sample for each of dp=32"},
        {{.dp = 4, .zero = 2, .dp_replicate = 3}, "dp=4 is not 3 groups"},
        {{.micro_batches = 17}, "17 micro-batches"},
        {{.zero = 1}, "there is one"},
        {{.dp = 2, .zero = 4}, "zero=4: a stage from 0 to 3"},
        {{.pp = -1}, "an extent of -1 ranks"},
        {{.tp = 1 << 15, .dp = 1 << 15}, "are more than"},
    };
    const ari_planned base = planned_of(&c, 16, 8192);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const ari_planned p = ari_choice_planned(&base, &wrong[i].choice);
        cr_expect_neq(ari_planned_check(&p), AR_OK, "%s", wrong[i].says);
        cr_expect_says(wrong[i].says);
    }
    const ari_choice right = ROW(.tp = 8, .cp = 2, .pp = 2, .dp = 2, .virtual_stages = 2, .schedule = AR_PP_INTERLEAVED,
                                 .micro_batches = 8, .sp = true, .zero = 3);
    const ari_planned p = ari_choice_planned(&base, &right);
    cr_expect_ok(ari_planned_check(&p));
}

/* Any extents at all: a verdict, and of what is legal a time and a memory that are numbers. */
CLAIM(no_extents_break_it)
{
    static const int extents[] = {-2147483647, -1, 0, 1, 2, 3, 4, 5, 8, 16, 1 << 20, 2147483647};
    enum { EXTENTS = sizeof extents / sizeof *extents, DRAWS = 3000 };
    const ar_config c = shape_bundled("llama-demo");
    const ari_planned base = planned_of(&c, 16, 64);
    const ari_time_options o = on("h100");
    uint64_t state = 12345;
    int legal = 0;
    for (int i = 0; i < DRAWS; i++) {
        int e[8];
        for (int k = 0; k < 8; k++) {
            state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            e[k] = extents[i % 3 == 0 ? (state >> 33) % EXTENTS : 2 + (state >> 33) % 6];
        }
        const ari_choice d =
            ROW(.tp = e[0], .cp = e[1], .pp = e[2], .dp = e[3], .zero = e[4], .micro_batches = e[5],
                .virtual_stages = e[6], .dp_replicate = e[6] > 2 && e[4] > 0 ? 2 : 1, .sp = e[7] & 1,
                .schedule = (ar_pp_schedule)(e[7] >> 3 & 3), .recompute = (ar_recompute)((e[7] & 7) % 3));
        const ari_planned p = ari_choice_planned(&base, &d);
        if (ari_planned_check(&p) != AR_OK)
            continue;
        ari_memory m;
        const ari_time t = time_of(&p, &o);
        cr_assert_ok(ari_memory_production(&m, &p));
        cr_expect(isfinite(ari_time_step(&t)) && ari_time_step(&t) > 0.0 && isfinite(ari_memory_sum(&m)), "draw %d", i);
        for (int k = 0; k < ARI_TIME_KINDS; k++)
            cr_expect(t.seconds[k] >= 0.0, "draw %d: %s is %g s", i, ari_time_name((ari_time_kind)k), t.seconds[k]);
        legal++;
    }
    cr_expect_gt(legal, 20);
}

/* --- ranking ------------------------------------------------------------------------------------------------------ */

static ari_ranking ranking_of(const ar_config *c, int ranks, size_t batch, const char *cluster, bool every,
                              ari_choice fixed)
{
    const ari_search s = ROW(.base = planned_of(c, batch, 4096), .ranks = ranks, .sp = -1, .zero = -1, .recompute = -1,
                             .time = on(cluster), .every = every, .fixed = fixed);
    ari_ranking r;
    cr_assert_ok(ari_search_run(&r, &s));
    return r;
}

static bool same_mesh(const ari_choice *a, const ari_choice *b)
{
    return a->tp == b->tp && a->cp == b->cp && a->pp == b->pp && a->dp == b->dp;
}

static void rank_and_plan_alone(const char *model, size_t batch, ari_choice fixed)
{
    const ar_config c = shape_bundled(model);
    const ari_planned base = planned_of(&c, batch, 4096);
    const ari_time_options o = on("h100");
    SCOPED(ari_ranking_fini) ari_ranking r = ranking_of(&c, 12, batch, "h100", true, fixed);
    size_t legal = 0, refused = 0;
    for (size_t i = 0; i < r.n; i++) {
        const ari_candidate *f = &r.layout[i];
        const ari_planned p = ari_choice_planned(&base, &f->choice);
        refused += f->legal != AR_OK;
        cr_expect_eq(f->choice.tp * f->choice.cp * f->choice.pp * f->choice.dp, 12);
        cr_expect_eq(ari_planned_check(&p) == AR_OK, f->legal == AR_OK, "%zu: %s", i, f->reason);
        cr_expect_eq(f->reason[0] != '\0', f->legal != AR_OK);
        if (f->legal != AR_OK)
            continue;
        cr_expect_eq(refused, 0u, "illegal layouts come last");
        if (legal++ % 7 == 0) {
            const ari_time t = time_of(&p, &o);
            cr_expect_eq(f->seconds, ari_time_step(&t), "%zu: %.17g s, alone %.17g s", i, f->seconds,
                         ari_time_step(&t));
        }
    }
    cr_expect(legal == r.legal && legal > 100 && refused > 0, "%zu legal, %zu refused", legal, refused);
}

/* What meshes share of each other, of batches that ranks and micro-batches divide or not, is what each has. */
CLAIM(ranks_every_layout_as_it_is_planned_alone)
{
    rank_and_plan_alone("llama-3-8b", 12, (ari_choice){0});
    rank_and_plan_alone("llama-3-8b", 20, (ari_choice){.tp = 2});
    rank_and_plan_alone("glm4-moe-demo", 24, (ari_choice){.cp = 2});
}

CLAIM(the_best_of_each_mesh_is_the_fastest_that_fits)
{
    const ar_config c = shape_bundled("llama-3-8b");
    SCOPED(ari_ranking_fini) ari_ranking best = ranking_of(&c, 8, 16, "h100 memory=18GB", false, (ari_choice){0});
    SCOPED(ari_ranking_fini) ari_ranking all = ranking_of(&c, 8, 16, "h100 memory=18GB", true, (ari_choice){0});
    for (size_t i = 0; i < best.n; i++) {
        const ari_candidate *f = &best.layout[i];
        for (size_t k = 0; k < all.n && all.layout[k].legal == AR_OK; k++) {
            const ari_candidate *g = &all.layout[k];
            if (!same_mesh(&f->choice, &g->choice))
                continue;
            cr_expect(!g->fits || (f->fits && f->seconds <= g->seconds), "a mesh of tp=%d pp=%d: %g s, better %g s",
                      f->choice.tp, f->choice.pp, f->seconds, g->seconds);
        }
        if (i > 0 && best.layout[i - 1].fits && f->fits)
            cr_expect_leq(best.layout[i - 1].seconds, f->seconds);
    }
    cr_expect(best.fitting > 0 && best.fitting < best.n, "%zu of %zu fit", best.fitting, best.n);
    cr_expect_eq(best.legal, all.legal);
}

/* Experts and replicas, chunks of overlapped collectives, slow links between nodes, more micro-batches than stages, a
 * batch that dp does not divide. */
CLAIM(the_best_of_each_mesh_is_the_best_of_all_its_layouts)
{
    static const struct {
        const char *model, *cluster;
        int ranks, overlap;
        size_t batch;
        bool no_flash;
        ari_choice fixed;
    } rows[] = {
        {"mixtral-demo", "2x inside=2us:100GB/s between=20us:2GB/s flops=1T memory=3MB", 8, 0, 16, false, {.tp = 0}},
        {"llama-demo", "2x inside=2us:100GB/s between=20us:2GB/s flops=1T memory=2MB", 16, 4, 32, false, {.tp = 0}},
        {"llama-3-8b", "h100", 8, 4, 48, false, {.cp = 1}},
        {"llama-3-8b", "a100 memory=30GB", 16, 3, 36, false, {.cp = 1, .tp = 4}},
        {"mixtral-demo", "h100 memory=3MB", 8, 4, 16, false, {.cp = 1}},
        {"llama-demo", "4x inside=2us:10GB/s between=9us:1GB/s flops=10T", 8, 0, 24, true, {.pp = 2}},
        {"gpt2-demo", "inside=1us:1GB/s flops=1T memory=4MB", 12, 0, 30, true, {.tp = 0}},
        {"glm4-moe-demo", "h100 memory=4MB", 8, 0, 16, false, {.cp = 1}},
        {"llama-3-8b", "inside=1us:10GB/s flops=1T", 8, 0, 32, false, {.tp = 1}},
        {"llama-3-8b", "8x inside=5us:450GB/s between=5us:50GB/s flops=989T memory=40GB", 16, 0, 32, false, {.tp = 2}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const ar_config c = shape_bundled(rows[i].model);
        ari_search s = ROW(.base = planned_of(&c, rows[i].batch, 64), .ranks = rows[i].ranks, .sp = -1, .zero = -1,
                           .recompute = -1, .schedule = -1, .time = on(rows[i].cluster), .fixed = rows[i].fixed);
        SCOPED(ari_ranking_fini) ari_ranking best = {0};
        SCOPED(ari_ranking_fini) ari_ranking all = {0};
        s.base.flash = !rows[i].no_flash;
        s.base.step.run.parallel.overlap = rows[i].overlap;
        cr_assert_ok(ari_search_run(&best, &s));
        s.every = true;
        cr_assert_ok(ari_search_run(&all, &s));
        for (size_t j = 0; j < best.n; j++) {
            size_t k = 0;
            while (k < all.n && !same_mesh(&best.layout[j].choice, &all.layout[k].choice))
                k++;
            cr_assert_lt(k, all.n);
            for (size_t other = k; other < all.fitting; other++) /* equal ones are not in the order of seconds */
                k = same_mesh(&best.layout[j].choice, &all.layout[other].choice) &&
                            all.layout[other].seconds < all.layout[k].seconds
                        ? other
                        : k;
            cr_expect_eq(best.layout[j].fits, all.layout[k].fits, "%s: tp=%d pp=%d", c.name, best.layout[j].choice.tp,
                         best.layout[j].choice.pp);
            cr_expect(
                !all.layout[k].fits || best.layout[j].has_faster || best.layout[j].seconds == all.layout[k].seconds,
                "%s: tp=%d cp=%d pp=%d: %.17g s, %.17g", c.name, best.layout[j].choice.tp, best.layout[j].choice.cp,
                best.layout[j].choice.pp, best.layout[j].seconds, all.layout[k].seconds);
        }
        cr_expect_eq(best.fastest.seconds, all.fastest.seconds);
    }
}

/* Of four ranks a ring, two pairs of neighbours in a ring of two, and four neighbours: rings of causal attention go
 * zig-zag. What is asked for is fixed. */
CLAIM(context_parallel_ranks_are_joined_in_every_way)
{
    const ar_config c = shape_bundled("llama-3-8b");
    for (int inner = 0; inner <= 4; inner += 2) {
        size_t of[5] = {0};
        SCOPED(ari_ranking_fini)
        ari_ranking r = ranking_of(&c, 4, 4, "h100", true, (ari_choice){.cp = 4, .cp_inner = inner});
        for (size_t i = 0; i < r.n; i++) {
            const ari_choice *found = &r.layout[i].choice;
            of[found->cp_inner]++;
            cr_expect_eq(found->zigzag, found->cp_inner < 4);
        }
        for (int k = 1; k <= 4; k++)
            cr_expect_eq(of[k] > 0, inner == 0 ? k != 3 : k == inner, "--cp-inner %d: %zu layouts of %d", inner, of[k],
                         k);
    }
}

/* The last quarter of the queries sees s(s+1)/2 - 3s/4(3s/4+1)/2 keys, a zig-zag one an equal share of s(s+1)/2; in
 * seven products of every head, two forward and five backward. */
CLAIM(a_ring_without_zigzag_waits_for_its_last_place)
{
    const ar_config c = shape_bundled("llama-3-8b"); /* 32 layers, 32 heads of 128 */
    ari_planned p = planned_of(&c, 1, 4096);
    const ari_time_options o = on("inside=1us:100GB/s flops=1T");
    p.flash = true;
    p.step.run.parallel.cp = 4;
    const double straight = time_of(&p, &o).seconds[ARI_TIME_PRODUCTS];
    p.step.run.parallel.zigzag = true;
    const double zigzag = time_of(&p, &o).seconds[ARI_TIME_PRODUCTS];
    const double all = 4096.0 * 4097.0 / 2.0, last = all - 3072.0 * 3073.0 / 2.0;
    const double want = 2.0 * 7.0 * 32.0 * 32.0 * 128.0 * (last - all / 4.0) / 1e12;
    cr_expect(fabs((straight - zigzag) / want - 1.0) < 1e-9, "%.9g s, expected %.9g", straight - zigzag, want);
}

/* --- closed forms ------------------------------------------------------------------------------------------------- */

/* 2(N-1)a + 2(N-1)/N D/b of the founding documents' message: 64 MiB, 5 us a step. */
CLAIM(an_all_reduce_takes_its_closed_form)
{
    const ar_config c = shape_bundled("stack-4.8b");
    static const struct {
        int ranks;
        const char *cluster;
        double us;
    } cases[] = {{8, "inside=5us:450GB/s flops=1T", 330.98},
                 {16, "8x inside=5us:450GB/s between=5us:50GB/s flops=1T", 2666.58}};
    for (size_t i = 0; i < 2; i++) {
        const ari_time_options o = on(cases[i].cluster);
        ari_planned p = planned_of(&c, 1, 16);
        p.step.run.parallel.tp = cases[i].ranks;
        const ari_links l = ari_links_of(&p, &o, ARI_OVER_TP);
        const double us = ari_links_call(&l, ARI_MOVES_ALL_REDUCE, 33554432, 2) * 1e6;
        cr_expect(fabs(us - cases[i].us) < 0.005, "%d ranks: %.4f us", cases[i].ranks, us);
    }
    ari_time_options o = on("8x inside=5us:450GB/s between=5us:50GB/s flops=1T");
    ari_planned p = planned_of(&c, 1, 16);
    p.step.run.parallel.tp = 16;
    o.hierarchical = true;
    const ari_links l = ari_links_of(&p, &o, ARI_OVER_TP);
    const double d = 67108864, by_hand = 2 * 7 * (5e-6 + d / 8 / 450e9) + 2 * 1 * (5e-6 + d / 16 / 50e9);
    cr_expect(fabs(ari_links_call(&l, ARI_MOVES_ALL_REDUCE, 33554432, 2) / by_hand - 1.0) < 1e-12);
}

/* What a rank sends for a layer of b 2, s 4096, h 4096 over tp=8, in elements of 16 bits: forward 4 all-reduces'
 * halves, backward as many, and with sp two more gathers. */
CLAIM(a_layer_moves_what_the_founding_documents_count)
{
    static const double elements[] = {234881024, 293601280};
    ar_config c = shape_bundled("stack-4.8b");
    const ari_time_options o = on("h100");
    double bytes[2][2];
    for (int sp = 0; sp < 2; sp++) {
        for (size_t layers = 1; layers <= 2; layers++) {
            c.layers = layers;
            ari_planned p = planned_of(&c, 2, 4096);
            p.step.run.parallel = (ar_parallel){.tp = 8, .sp = sp};
            const ari_time t = time_of(&p, &o);
            bytes[sp][layers - 1] = sent(&t, ARI_TIME_TP);
        }
        const double layer = bytes[sp][1] - bytes[sp][0];
        cr_expect_eq(layer, 2 * elements[sp], "%s: %.0f elements", sp ? "sp" : "tp", layer / 2);
    }
}

/* Without transfers: (p - 1) / m of the rest, by as many stages as a rank takes turns with; in zero bubble W fills a
 * part of it, less than all. */
CLAIM(a_pipeline_of_equal_stages_waits_as_its_formula_says)
{
    static const struct {
        ar_pp_schedule schedule;
        int each;
    } rows[] = {
        {AR_PP_GPIPE, 1}, {AR_PP_1F1B, 1}, {AR_PP_INTERLEAVED, 2}, {AR_PP_INTERLEAVED, 4}, {AR_PP_ZERO_BUBBLE, 1}};
    const ar_config c = shape_bundled("stack-4.8b"); /* 32 layers, no head */
    const ari_time_options o = on("inside=0s:inf flops=1T");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const ari_choice choice = {
            .pp = 4, .micro_batches = 8, .virtual_stages = rows[i].each, .schedule = rows[i].schedule};
        const ari_time t = time_of_choice(&c, 8, 64, choice, &o);
        const double share = t.seconds[ARI_TIME_BUBBLE] / t.seconds[ARI_TIME_PRODUCTS],
                     plain = 3.0 / (8 * rows[i].each);
        if (rows[i].schedule == AR_PP_ZERO_BUBBLE)
            cr_expect(share > 0.25 * plain && share < 0.5 * plain, "%.15g", share);
        else
            cr_expect(fabs(share - plain) < 1e-12, "%s x %d: %.15g", ari_pp_schedule_name(rows[i].schedule),
                      rows[i].each, share);
        cr_expect_eq(t.seconds[ARI_TIME_PP], 0.0);
    }
}

/* Under GPipe only those are exposed with which the pipeline fills and drains, p - 1 each way. Under 1F1B a rank also
 * waits for the gradient of what it sent, because it holds no more micro-batches than make up for the passes of
 * others. */
CLAIM(transfers_between_stages_are_hidden_as_far_as_the_schedule_lets_them)
{
    const ar_config c = shape_bundled("stack-4.8b");
    const ari_time_options o = on("inside=1ms:1GB/s flops=1T");
    double exposed[2];
    for (int gpipe = 0; gpipe < 2; gpipe++) {
        const ari_choice choice = {.pp = 4, .micro_batches = 32, .schedule = gpipe ? AR_PP_GPIPE : AR_PP_1F1B};
        const ari_time t = time_of_choice(&c, 32, 64, choice, &o);
        double sends = 0.0, others = 0.0; /* the loss goes to all ranks */
        for (int i = 0; i < t.traffic.n; i++) {
            const ari_traffic_row *row = &t.traffic.row[i];
            const bool send = strcmp(row->call, "send") == 0;
            sends += send ? row->seconds : 0.0;
            others += row->time_kind == ARI_TIME_PP && !send ? row->seconds : 0.0;
        }
        exposed[gpipe] = t.seconds[ARI_TIME_PP] - others;
        cr_expect(fabs(exposed[gpipe] + t.hidden - sends) < 1e-9 * sends);
        if (gpipe)
            cr_expect(fabs(exposed[1] - 6.0 / 64.0 * sends) < 1e-9 * sends, "%g of %g", exposed[1], sends);
    }
    cr_expect_gt(exposed[0], exposed[1]);
}

/* tp inside nodes and dp between them never meet on a link. */
CLAIM(links_that_are_shared_take_longer_and_hierarchies_less)
{
    const ar_config c = shape_bundled("llama-3-8b");
    const ari_choice choice = {.tp = 4, .dp = 8, .sp = true};
    double seconds[2][2]; /* links as they are, and shared */
    for (int nodes = 0; nodes < 2; nodes++) {
        ari_time_options o =
            on(nodes ? "4x inside=1us:40GB/s between=1us:40GB/s flops=989T" : "inside=1us:40GB/s flops=989T");
        for (int shared = 0; shared < 2; shared++) {
            o.shared_links = shared;
            const ari_time t = time_of_choice(&c, 8, 512, choice, &o);
            seconds[shared][nodes] = ari_time_step(&t);
        }
    }
    cr_expect_gt(seconds[1][0], seconds[0][0]);
    cr_expect_eq(seconds[1][1], seconds[0][1]);
    ari_time_options o = on("8x inside=1us:400GB/s between=1us:40GB/s flops=989T");
    const ari_time flat = time_of_choice(&c, 8, 512, choice, &o);
    o.hierarchical = true;
    const ari_time tiered = time_of_choice(&c, 8, 512, choice, &o);
    cr_expect_lt(tiered.seconds[ARI_TIME_DP], flat.seconds[ARI_TIME_DP]);
    cr_expect_eq(tiered.seconds[ARI_TIME_TP], flat.seconds[ARI_TIME_TP]);
}

CLAIM(zero_3_moves_half_as_much_again_and_full_recomputation_a_third_more)
{
    const ar_config c = shape_bundled("llama-3-8b");
    const ari_time_options o = on("h100");
    ari_choice choice = {.dp = 8, .zero = 1};
    const ari_time one = time_of_choice(&c, 8, 4096, choice, &o);
    choice.zero = 3;
    const ari_time three = time_of_choice(&c, 8, 4096, choice, &o);
    const double share = sent(&three, ARI_TIME_DP) / sent(&one, ARI_TIME_DP);
    cr_expect(fabs(share - 1.5) < 1e-4, "%.6f", share); /* beside weights the loss, the norm and the targets */
    choice.recompute = AR_RECOMPUTE_FULL;
    const ari_time full = time_of_choice(&c, 8, 4096, choice, &o);
    cr_expect(full.seconds[ARI_TIME_RECOMPUTE] > 0.28 * full.seconds[ARI_TIME_PRODUCTS] &&
              full.seconds[ARI_TIME_RECOMPUTE] < full.seconds[ARI_TIME_PRODUCTS] / 3.0);
    cr_expect_eq(full.seconds[ARI_TIME_PRODUCTS], three.seconds[ARI_TIME_PRODUCTS]);
}

EVERY_CLAIM(planner_search)
