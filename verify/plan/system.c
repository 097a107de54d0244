/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/plan/search.h"

#include "ref/core/schedule_private.h"
#include "ref/core/size.h"
#include "ref/core/text.h"

const char *const ari_system_names[] = {"megatron", "torchtitan", "deepspeed", "composer", "anyrank", NULL};

typedef void flags_of(ari_text *t, const ari_planned *p, int samples);
static flags_of megatron, torchtitan, deepspeed, composer, anyrank;

typedef struct ari_system {
    flags_of *flags;
    unsigned zero, schedules; /* bit sets: supported ZeRO stages and pipeline schedules */
    bool fp32_gradients;
    bool ring, heads, replicas;            /* support for cp as a ring, cp as an exchange of heads, and ZeRO within
                                              replicas */
    bool shared_stages;                    /* ZeRO-2 and -3 in a pipeline */
    bool fp32_sums, late_gathers, flash_2; /* as in ari_time_options */
    bool alone;                            /* neither tp nor cp, nor a pipeline */
} ari_system;

enum { INTERLEAVING = 1 << AR_PP_1F1B | 1 << AR_PP_INTERLEAVED, EVERY_SCHEDULE = (1 << AR_PP_SCHEDULES) - 1 };

/* Sources: Megatron-LM reduces bf16 gradients in fp32 (--accumulate-allreduce-grads-in-fp32, implied by --bf16).
 * torchtitan's FSDP2 shards all state, and its training.mixed_precision_reduce is fp32, as is Composer's with
 * mixed_precision=DEFAULT. Composer's FSDP prefetches by BACKWARD_POST and was published with Triton's flash attention
 * or the second version. DeepSpeed's pipelines support at most ZeRO-1, and its sequence parallelism exchanges heads. */
static const ari_system systems[] = {
    {.flags = megatron, .zero = 0x3, INTERLEAVING, .fp32_gradients = true, .ring = true, .heads = true},
    {.flags = torchtitan,
     .zero = 0xc,
     INTERLEAVING,
     .ring = true,
     .replicas = true,
     .shared_stages = true,
     .fp32_sums = true},
    {.flags = deepspeed, .zero = 0xf, 1 << AR_PP_1F1B, .heads = true},
    {.flags = composer,
     .zero = 0xc,
     .replicas = true,
     .fp32_sums = true,
     .late_gathers = true,
     .flash_2 = true,
     .alone = true},
    {.flags = anyrank,
     .zero = 0xf,
     EVERY_SCHEDULE,
     .ring = true,
     .heads = true,
     .replicas = true,
     .shared_stages = true},
};

/* Fraction of a GPU's memory used by its context, NCCL's buffers and fragmentation: 4.8 GB of 80. */
static const double RESERVED = 0.06;
/* Chunks of Transformer Engine's overlap of tp collectives with matmuls, in systems that are timed by shapes. */
enum { USUAL_CHUNKS = 4 };

void ari_search_account(ari_search *s, int system)
{
    ar_parallel *layout = &s->base.step.run.parallel;
    s->system = system + 1;
    if (s->time.cluster.gpu == 0)
        return;
    s->base.fp32_gradients = system < 0 || systems[system].fp32_gradients;
    s->time.fp32_sums = system >= 0 && systems[system].fp32_sums;
    s->time.late_gathers = system >= 0 && systems[system].late_gathers;
    s->time.flash_2 = system >= 0 && systems[system].flash_2;
    s->base.reserve = RESERVED * s->time.cluster.memory_bytes;
    s->chunks = layout->overlap <= 0;
    layout->overlap = layout->overlap > 0 ? layout->overlap : USUAL_CHUNKS;
}

const char *ari_system_lacks(const ari_search *search, const ari_choice *c)
{
    const ari_system *s = search->system == 0 ? NULL : &systems[search->system - 1];
    const int inner = ari_at_least_one(c->cp_inner);
    if (!s)
        return NULL;
    if (!(s->zero >> c->zero & 1) && (c->zero > 0 || c->dp * c->cp > 1))
        return c->zero == 0 ? "data parallelism without ZeRO" : "that stage of ZeRO";
    if (s->alone && c->tp * c->cp * c->pp > 1)
        return "tp, cp or a pipeline";
    if (c->pp > 1 && !(s->schedules >> c->schedule & 1))
        return "that schedule of a pipeline";
    if (c->pp > 1 && c->zero > 1 && !s->shared_stages)
        return "ZeRO-2 or -3 in a pipeline";
    if (c->cp > inner && !s->ring)
        return "a ring of cp";
    if (inner > 1 && !s->heads)
        return "cp that exchanges heads";
    return c->dp_replicate > 1 && !s->replicas ? "replicas that share out" : NULL;
}

/* --- flags -------------------------------------------------------------------------------------------------------- */

/* Appends a name followed by a number, or nothing for the usual value 1. */
static void say_above_one(ari_text *t, const char *name, int n)
{
    if (n > 1)
        ari_say(t, " --%s%d", name, n);
}

static void megatron(ari_text *t, const ari_planned *p, int samples)
{
    const ar_run *run = &p->step.run;
    const ar_parallel *l = &run->parallel;
    const int inner = ari_at_least_one(l->cp_inner), ring = ari_at_least_one(l->cp) / inner;
    say_above_one(t, "tensor-model-parallel-size ", l->tp);
    ari_say(t, "%s", l->sp ? " --sequence-parallel" : "");
    ari_say(t, "%s", ari_planned_overlap(p) > 1 ? " --tp-comm-overlap" : "");
    say_above_one(t, "pipeline-model-parallel-size ", l->pp);
    say_above_one(t, "num-virtual-stages-per-pipeline-rank ", l->virtual_stages);
    say_above_one(t, "context-parallel-size ", l->cp);
    if (inner > 1 && ring > 1)
        ari_say(t, " --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes %d %d", inner, ring);
    else if (inner > 1)
        ari_say(t, " --cp-comm-type a2a");
    say_above_one(t, "expert-model-parallel-size ", l->ep);
    ari_say(t, "%s", ari_experts_unsplit(l) && l->ep > 1 ? " --expert-tensor-parallel-size 1" : "");
    ari_say(t, "%s", l->zero > 0 ? " --use-distributed-optimizer --overlap-param-gather" : "");
    ari_say(t, " --overlap-grad-reduce --bf16 --micro-batch-size %d --global-batch-size %zu --seq-length %zu", samples,
            run->batch, run->seq);
    if (l->recompute.part == AR_RECOMPUTE_FULL)
        ari_say(t, " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1");
    else if (l->recompute.part == AR_RECOMPUTE_SELECTIVE)
        ari_say(t, " --recompute-granularity selective");
}

static void torchtitan(ari_text *t, const ari_planned *p, int samples)
{
    static const char *const schedules[] = {[AR_PP_1F1B] = "1F1B", [AR_PP_INTERLEAVED] = "Interleaved1F1B"};
    const ar_run *run = &p->step.run;
    const ar_parallel *l = &run->parallel;
    const int replicas = ari_at_least_one(l->dp_replicate), per_rank = samples * ari_at_least_one(l->micro_batches);
    ari_say(t, " --parallelism.data_parallel_shard_degree=%d", ari_at_least_one(l->dp) / replicas);
    say_above_one(t, "parallelism.data_parallel_replicate_degree=", replicas);
    say_above_one(t, "parallelism.tensor_parallel_degree=", l->tp);
    say_above_one(t, "parallelism.context_parallel_degree=", l->cp);
    say_above_one(t, "parallelism.expert_parallel_degree=", l->ep);
    say_above_one(t, "parallelism.pipeline_parallel_degree=", l->pp);
    if (l->pp > 1)
        ari_say(t, " --parallelism.pipeline_parallel_schedule=%s --parallelism.pipeline_parallel_microbatch_size=%d",
                schedules[l->schedule], samples);
    ari_say(t, " --parallelism.fsdp_reshard_after_forward=%s", l->zero > 2 ? "always" : "never");
    ari_say(t, " --training.local_batch_size=%d --training.global_batch_size=%zu --training.seq_len=%zu",
            l->pp > 1 ? per_rank : samples, run->batch, run->seq);
    ari_say(t, " --activation_checkpoint.mode=%s",
            l->recompute.part == AR_RECOMPUTE_FULL        ? "full"
            : l->recompute.part == AR_RECOMPUTE_SELECTIVE ? "selective"
                                                          : "none");
}

static void deepspeed(ari_text *t, const ari_planned *p, int samples)
{
    const ar_run *run = &p->step.run;
    const ar_parallel *l = &run->parallel;
    say_above_one(t, "tensor-model-parallel-size ", l->tp);
    say_above_one(t, "pipeline-model-parallel-size ", l->pp);
    say_above_one(t, "ds-sequence-parallel-size ", l->cp);
    ari_say(t, "%s", l->recompute.part == AR_RECOMPUTE_FULL ? " --checkpoint-activations" : "");
    ari_say(t,
            " with {\"train_batch_size\": %zu, \"train_micro_batch_size_per_gpu\": %d, \"bf16\": {\"enabled\": true}, "
            "\"zero_optimization\": {\"stage\": %d}}",
            run->batch, samples, l->zero);
}

/* Writes the options as in llm-foundry's YAML file of a run. */
static void composer(ari_text *t, const ari_planned *p, int samples)
{
    const ar_run *run = &p->step.run;
    const ar_parallel *l = &run->parallel;
    ari_say(t, " precision: amp_bf16, global_train_batch_size: %zu, device_train_microbatch_size: %d, max_seq_len: %zu",
            run->batch, samples, run->seq);
    ari_say(t, ", fsdp_config: {sharding_strategy: %s, mixed_precision: DEFAULT, activation_checkpointing: %s}",
            ari_at_least_one(l->dp_replicate) > 1 ? "HYBRID_SHARD"
            : l->zero > 2                         ? "FULL_SHARD"
                                                  : "SHARD_GRAD_OP",
            l->recompute.part == AR_RECOMPUTE_FULL ? "true" : "false");
}

static void anyrank(ari_text *t, const ari_planned *p, int samples)
{
    const ar_run *run = &p->step.run;
    const ar_parallel *l = &run->parallel;
    (void)samples;
    for (int i = 0; i < ARI_LAYOUT_AXES; i++) {
        const ari_layout_axis *axis = &ari_layout_axes[ari_planned_axes[i]];
        const int n = ari_layout_as_given(l, ari_planned_axes[i]);
        if (n > 1)
            ari_say(t, " --%s %d", axis->name, n);
    }
    ari_say(t, "%s", l->sp ? " --sp" : "");
    say_above_one(t, "overlap ", ari_planned_overlap(p));
    say_above_one(t, "cp-inner ", l->cp_inner);
    ari_say(t, "%s", l->zigzag ? " --zigzag" : "");
    say_above_one(t, "ep ", l->ep);
    if (l->etp == 1)
        ari_say(t, " --etp 1");
    if (l->pp > 1)
        ari_say(t, " --schedule-pp %s", ari_pp_schedule_name(l->schedule));
    say_above_one(t, "virtual-stages ", l->virtual_stages);
    if (l->zero > 0)
        ari_say(t, " --zero %d", l->zero);
    say_above_one(t, "dp-replicate ", l->dp_replicate);
    say_above_one(t, "micro-batches ", l->micro_batches);
    if (l->recompute.part != AR_RECOMPUTE_NONE)
        ari_say(t, " --recompute %s", l->recompute.part == AR_RECOMPUTE_FULL ? "full" : "selective");
    ari_say(t, " --batch %zu --seq %zu", run->batch, run->seq);
}

void ari_system_flags(char *text, size_t size, const ari_search *s, const ari_planned *p)
{
    const ar_run *run = &p->step.run;
    const size_t dp = (size_t)ari_at_least_one(run->parallel.dp), samples = (run->batch + dp - 1) / dp;
    ari_text t = ari_text_in(text, size);
    text[0] = '\0';
    if (s->system == 0)
        return;
    ari_say(&t, "%s:", ari_system_names[s->system - 1]);
    systems[s->system - 1].flags(&t, p, (int)(samples / (size_t)ari_at_least_one(run->parallel.micro_batches)));
}
