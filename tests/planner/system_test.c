/* SPDX-License-Identifier: Apache-2.0 */
/* Production systems: the layouts that a search looks at for one, its flags, and its account of memory. */
#include "verify/plan/search.h"

#include "support/together.h"
#include "tests/planner/shapes.h"

enum { MEGATRON, TORCHTITAN, DEEPSPEED, COMPOSER, ANYRANK };

static ari_choice choice_of(int tp, int cp, int pp, int dp, int zero)
{
    return (ari_choice){.tp = tp,
                        .cp = cp,
                        .pp = pp,
                        .dp = dp,
                        .cp_inner = 1,
                        .ep = 1,
                        .zero = zero,
                        .dp_replicate = 1,
                        .micro_batches = 1,
                        .virtual_stages = 1,
                        .schedule = AR_PP_1F1B};
}

CLAIM(systems_lack_what_they_cannot_do)
{
    ari_choice bubble = choice_of(1, 1, 2, 4, 1), interleaved = bubble, heads = choice_of(1, 4, 1, 2, 3),
               hybrid = heads;
    bubble.schedule = AR_PP_ZERO_BUBBLE;
    interleaved.schedule = AR_PP_INTERLEAVED;
    heads.cp_inner = 4;
    hybrid = choice_of(1, 1, 1, 8, 3);
    hybrid.dp_replicate = 2;
    const struct {
        ari_choice choice;
        unsigned lack; /* bits of the systems that do */
    } cases[] = {
        {choice_of(8, 1, 1, 1, 0), 1 << COMPOSER},
        {choice_of(1, 1, 1, 8, 0), 1 << TORCHTITAN | 1 << COMPOSER},
        {choice_of(1, 1, 1, 8, 1), 1 << TORCHTITAN | 1 << COMPOSER},
        {choice_of(1, 1, 1, 8, 2), 1 << MEGATRON},
        {choice_of(1, 1, 1, 8, 3), 1 << MEGATRON},
        {choice_of(1, 1, 2, 4, 2), 1 << MEGATRON | 1 << DEEPSPEED | 1 << COMPOSER},
        {choice_of(1, 4, 1, 2, 3), 1 << MEGATRON | 1 << DEEPSPEED | 1 << COMPOSER},
        {choice_of(1, 4, 1, 2, 1), 1 << TORCHTITAN | 1 << DEEPSPEED | 1 << COMPOSER},
        {heads, 1 << MEGATRON | 1 << TORCHTITAN | 1 << COMPOSER},
        {hybrid, 1 << MEGATRON | 1 << DEEPSPEED},
        {bubble, 1 << MEGATRON | 1 << TORCHTITAN | 1 << DEEPSPEED | 1 << COMPOSER},
        {interleaved, 1 << TORCHTITAN | 1 << DEEPSPEED | 1 << COMPOSER},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cr_expect_null(ari_system_lacks(&(ari_search){.system = 0}, &cases[i].choice));
        for (int k = 0; ari_system_names[k]; k++)
            cr_expect_eq(ari_system_lacks(&(ari_search){.system = k + 1}, &cases[i].choice) != NULL,
                         cases[i].lack >> k & 1, "case %zu, %s", i, ari_system_names[k]);
    }
}

/* A search for a system lists what it can do, and all of that. */
CLAIM(searches_for_a_system_leave_out_what_it_lacks)
{
    const ar_config c = shape_bundled("llama-demo");
    size_t legal[2 + ANYRANK] = {0};
    for (int i = 0; i < 2 + ANYRANK; i++) {
        ari_search s = {.base = shape_planned(&c, 1, false, 8, 64), .ranks = 4, .sp = -1, .zero = -1, .recompute = -1};
        ari_ranking r;
        s.schedule = -1;
        s.every = true;
        s.system = i;
        cr_assert_ok(ar_sim_cluster_parse(&s.time.cluster, "h100"));
        cr_assert_ok(ari_search_run(&r, &s));
        for (size_t k = 0; k < r.n; k++)
            cr_expect(r.layout[k].legal != AR_OK || !ari_system_lacks(&s, &r.layout[k].choice));
        legal[i] = r.legal;
        ari_ranking_fini(&r);
    }
    cr_expect_eq(legal[0], legal[1 + ANYRANK]);
    for (int i = MEGATRON; i < ANYRANK; i++)
        cr_expect(legal[1 + i] > 0 && legal[1 + i] < legal[0] / 2, "%s: %zu of %zu", ari_system_names[i], legal[1 + i],
                  legal[0]);
}

CLAIM(flags_say_the_layout)
{
    const ar_config c = shape_bundled("llama-3-70b");
    ari_choice choice = choice_of(4, 2, 4, 2, 1);
    choice.sp = choice.zigzag = true;
    choice.virtual_stages = 5;
    choice.schedule = AR_PP_INTERLEAVED;
    choice.micro_batches = 64;
    ari_planned base = shape_planned(&c, 1, false, 128, 8192);
    base.step.run.parallel.overlap = 4;
    ari_planned p = ari_choice_planned(&base, &choice);
    char text[800];
    ari_system_flags(text, sizeof text, &(ari_search){.system = MEGATRON + 1}, &p);
    cr_expect_str_eq(text,
                     "megatron: --tensor-model-parallel-size 4 --sequence-parallel --tp-comm-overlap"
                     " --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 5"
                     " --context-parallel-size 2 --use-distributed-optimizer --overlap-param-gather"
                     " --overlap-grad-reduce --bf16 --micro-batch-size 1 --global-batch-size 128 --seq-length 8192");
    ari_system_flags(text, sizeof text, &(ari_search){.system = ANYRANK + 1}, &p);
    cr_expect_str_eq(text, "anyrank: --tp 4 --cp 2 --pp 4 --dp 2 --sp --overlap 4 --zigzag --schedule-pp interleaved"
                           " --virtual-stages 5 --zero 1 --micro-batches 64 --batch 128 --seq 8192");
    choice = choice_of(2, 1, 1, 32, 3);
    choice.sp = true;
    choice.micro_batches = 4;
    choice.recompute = AR_RECOMPUTE_FULL;
    p = ari_choice_planned(&base, &choice);
    ari_system_flags(text, sizeof text, &(ari_search){.system = TORCHTITAN + 1}, &p);
    cr_expect_str_eq(text,
                     "torchtitan: --parallelism.data_parallel_shard_degree=32 --parallelism.tensor_parallel_degree=2"
                     " --parallelism.fsdp_reshard_after_forward=always --training.local_batch_size=1"
                     " --training.global_batch_size=128 --training.seq_len=8192"
                     " --activation_checkpoint.mode=full");
    ari_system_flags(text, sizeof text, &(ari_search){.system = DEEPSPEED + 1}, &p);
    cr_expect_not_null(strstr(text, "\"train_micro_batch_size_per_gpu\": 1, \"bf16\": {\"enabled\": true}, "
                                    "\"zero_optimization\": {\"stage\": 3}}"));
    ari_system_flags(text, sizeof text, &(ari_search){.system = COMPOSER + 1}, &p);
    cr_expect_str_eq(text,
                     "composer: precision: amp_bf16, global_train_batch_size: 128, device_train_microbatch_size: 1,"
                     " max_seq_len: 8192, fsdp_config: {sharding_strategy: FULL_SHARD, mixed_precision: DEFAULT,"
                     " activation_checkpointing: true}");
}

/* Of ZeRO-3 on a node: Composer's gathers come late, and its gradients go in fp32, as torchtitan's do. A gather that
 * nothing hides takes no processors from products, as 12 % of it did. */
CLAIM(systems_gather_and_sum_in_their_own_way)
{
    const ar_config c = shape_bundled("llama-3-8b");
    const ari_choice choice = choice_of(1, 1, 1, 8, 3);
    ari_search s = {.base = shape_planned(&c, 1, false, 8, 8192)};
    ari_time t[3];
    double scattered[3];
    s.base.flash = true;
    for (int i = 0; i < 3; i++) {
        cr_assert_ok(ar_sim_cluster_parse(&s.time.cluster, "h100"));
        ari_search_account(&s, i == 0 ? -1 : i == 1 ? TORCHTITAN : COMPOSER);
        s.time.flash_2 = false;
        const ari_planned p = ari_choice_planned(&s.base, &choice);
        cr_assert_ok(ari_time_of(&t[i], &p, &s.time));
        for (int k = 0; k < t[i].traffic.n; k++)
            scattered[i] =
                strcmp(t[i].traffic.row[k].call, "reduce_scatter") == 0 ? t[i].traffic.row[k].bytes : scattered[i];
    }
    const double late = t[1].hidden - t[2].hidden, exposed = t[2].seconds[ARI_TIME_DP] - t[1].seconds[ARI_TIME_DP];
    cr_expect_eq(scattered[1], 2.0 * scattered[0]);
    cr_expect_eq(scattered[2], scattered[1]);
    cr_expect(late > 0.0 && fabs(exposed - (1.0 - 0.12) * late) < 1e-9, "%g s late, %g s more", late, exposed);
}

/* Megatron-LM's documentation of its distributed optimizer: 18 bytes a parameter without it, 6 + 12/d with it. */
CLAIM(gradients_in_fp32_take_two_bytes_more)
{
    const ar_config c = shape_bundled("llama-3-8b");
    const double n = 8030261248.0;
    for (int zero = 0; zero <= 3; zero++) {
        ari_planned p = shape_planned(&c, 1, false, 8, 128);
        p.step.run.parallel.dp = 8;
        p.step.run.parallel.zero = zero;
        const ari_memory half = shape_memory(&p);
        p.fp32_gradients = true;
        p.reserve = 4.8e9;
        const ari_memory m = shape_memory(&p);
        const double more = zero < 2 ? 2.0 * n : 0.0;
        cr_expect_eq(m.bytes[ARI_MEMORY_GRADIENTS] - half.bytes[ARI_MEMORY_GRADIENTS], more, "zero=%d", zero);
        cr_expect_eq(ari_memory_sum(&m) - ari_memory_sum(&half), more + 4.8e9, "zero=%d", zero);
        if (zero == 1)
            cr_expect_eq(m.bytes[ARI_MEMORY_WEIGHTS] + m.bytes[ARI_MEMORY_GRADIENTS] + m.bytes[ARI_MEMORY_MASTER] +
                             m.bytes[ARI_MEMORY_OPTIMIZER],
                         n * (6.0 + 12.0 / 8.0));
    }
}

EVERY_CLAIM(system)
