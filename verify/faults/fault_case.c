/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/faults/fault_case.h"

#include <stdlib.h>
#include <string.h>

#include "anyrank/model.h"
#include "ref/core/size.h"
#include "run/run.h"
#include "verify/faults/fault_module.h"

/* 96 tokens a step. 24 positions divide by 2, 3, 4 and 8; 4 samples over 3 ranks are 2, 1 and 1, and 3 samples in 2
 * micro-batches 2 and 1: means over unlike numbers of tokens differ. */
enum { BATCH = 4, SEQ = 24 };
/* Some ten buckets of these models. */
#define BUCKET_BYTES ((size_t)1 << 20)
#define ONE_EACH SIZE_MAX

#define LLAMA .run.model = "llama-demo"
#define GPT2 .run.model = "gpt2-demo" /* biases, learned positions, a tied head, a width that is no power of two */
#define MODULE .run.model = "module", .module = true
#define NO_CLIP .run.clip = -1
#define TP(n) .run.parallel.tp = (n)
#define SP(n) .run.parallel = {.tp = (n), .sp = true}
#define DP(n) .run.parallel.dp = (n)
#define DP_TP(d, t) .run.parallel = {.dp = (d), .tp = (t)}
#define MICRO(n) .run.parallel = {.tp = 1, .micro_batches = (n)}

/* Of what is not written: tp=2, 4 x 24 tokens, one step, clip 1, no dropout, buckets of 1 MiB. */
static const ari_fault_case cases[] = {
    {AR_FAULT_column_dx_not_reduced, LLAMA},
    {AR_FAULT_row_bias_every_rank, GPT2},
    {AR_FAULT_row_input_grad_not_gathered, GPT2, .order = AR_MLP_ROW_COLUMN},
    {AR_FAULT_heads_divided_twice, LLAMA},
    {AR_FAULT_allreduce_aliases_input, LLAMA},
    {AR_FAULT_init_local_fan, LLAMA},
    {AR_FAULT_init_per_shard_seed, LLAMA},
    {AR_FAULT_vocab_target_off_by_shard, LLAMA, TP(8)}, /* a shard begins with the space */
    {AR_FAULT_loss_parallel_no_max, LLAMA},
    {AR_FAULT_embedding_edge_twice, LLAMA, TP(8)},
    {AR_FAULT_weight_grad_leading_dims, LLAMA},
    {AR_FAULT_bias_grad_wrong_axis, GPT2},
    {AR_FAULT_norm_backward_missing, GPT2},
    {AR_FAULT_sp_norm_grad_local, LLAMA, SP(2)},
    {AR_FAULT_sp_row_bias_grad_local, GPT2, SP(2)},
    {AR_FAULT_sp_position_grad_local, GPT2, SP(2)},
    {AR_FAULT_kv_replica_grad_local, LLAMA, TP(4)}, /* two KV heads */
    {AR_FAULT_kv_replica_wrong_head, LLAMA, TP(4)},
    {AR_FAULT_dropout_same_mask_in_shard, LLAMA, .run.dropout = 0.1},
    {AR_FAULT_dropout_different_mask_in_replica, GPT2, .run.dropout = 0.1},
    {AR_FAULT_dp_mean_of_means, LLAMA, DP(3)},
    {AR_FAULT_dp_sum_of_local_means, LLAMA, DP(2)},
    {AR_FAULT_dp_group_missing, LLAMA, DP(2)},
    {AR_FAULT_dp_broadcast_over_world, LLAMA, DP_TP(2, 2)},
    {AR_FAULT_accum_mean_of_means, LLAMA, MICRO(2), .run.batch = 3},
    {AR_FAULT_saved_input_overwritten, LLAMA, .run.parallel = {.tp = 1, .micro_batches = 2, .forward_first = true}},
    {AR_FAULT_embedding_tied_once, GPT2},
    {AR_FAULT_gradnorm_counts_replicas, GPT2},
    {AR_FAULT_gradnorm_local_clip, GPT2},
    {AR_FAULT_group_wrong_stride, LLAMA, DP_TP(2, 2)},
    {AR_FAULT_world_rank_in_group, LLAMA, DP_TP(2, 2)},
    {AR_FAULT_positions_local, GPT2, SP(2)},
    {AR_FAULT_silent_truncation, GPT2, TP(3), NO_CLIP}, /* 256 ids; the gradients' norm is no number */
    {AR_FAULT_gate_up_interleaved_wrong, GPT2},
    {AR_FAULT_norm_padded_lanes, GPT2},
    {AR_FAULT_bias_added_twice, GPT2},
    {AR_FAULT_row_bias_partial_grad, GPT2},
    {AR_FAULT_init_replica_differs, GPT2},
    {AR_FAULT_gather_batch_order, LLAMA, SP(2)},
    {AR_FAULT_collective_order_swapped, GPT2, DP(2),
     .run.ddp.bucket_bytes = ONE_EACH}, /* the last two parameters are alike */
    {AR_FAULT_collective_size_mismatch, LLAMA},
    {AR_FAULT_collective_dtype_mismatch, LLAMA, DP(2)},
    {AR_FAULT_bucket_first_ready, LLAMA, DP(2)},
    {AR_FAULT_bucket_reduced_twice, LLAMA, DP(2)},
    {AR_FAULT_bucket_not_packed, LLAMA, DP(2)},
    {AR_FAULT_bucket_stale_done, LLAMA, DP(2), .run.steps = 2},
    {AR_FAULT_step_before_copy_back, LLAMA, DP(2)},
    {AR_FAULT_comm_before_producer, LLAMA, DP(2)},
    {AR_FAULT_stale_activation_reuse, LLAMA, DP(2)},
    {AR_FAULT_unused_skips_collective, LLAMA, DP(3), .run.batch = 2},
    {AR_FAULT_unused_set_empty, MODULE, DP(2), .run.ddp = {.find_unused = true}},
    {AR_FAULT_unused_in_last_micro_batch, LLAMA, DP(3), .run.batch = 2},
    {AR_FAULT_tied_reduced_at_first_use, GPT2, DP(2)},
    {AR_FAULT_mean_divides_by_world, MODULE, DP_TP(2, 2), .run.ddp = {.find_unused = true, .op = AR_AVG}},
    {AR_FAULT_dp_init_differs, LLAMA, DP(2)},
    {AR_FAULT_zero_gather_missing, LLAMA, .run.parallel = {.dp = 2, .zero = 1}},
    {AR_FAULT_zero_shards_misaligned, LLAMA, .run.parallel = {.dp = 2, .zero = 1}},
    {AR_FAULT_accum_last_only, LLAMA, MICRO(2)},
    {AR_FAULT_accum_sum_of_means, LLAMA, MICRO(2), .run.batch = 3},
    {AR_FAULT_zero_grad_not_recursive, LLAMA, .run.steps = 2},
    {AR_FAULT_gradnorm_first_rank_only, LLAMA},
    {AR_FAULT_adam_step_not_synced, LLAMA, DP(2)},
    {AR_FAULT_optimizer_counter_ahead, LLAMA},
    {AR_FAULT_weight_decay_on_shard_only, LLAMA, DP(2)},
    {AR_FAULT_norm_fp16_store, LLAMA},
};

ari_fault_case ari_fault_case_of(ar_fault fault)
{
    size_t i = 0;
    while (i + 1 < sizeof cases / sizeof *cases && cases[i].fault != fault)
        i++;
    ari_fault_case c = cases[i];
    const bool split = c.run.parallel.tp || c.run.parallel.dp;
    c.run.parallel.tp = split ? c.run.parallel.tp : 2;
    c.run.batch = c.run.batch ? c.run.batch : BATCH;
    c.run.seq = SEQ;
    c.run.steps = c.run.steps ? c.run.steps : 1;
    c.run.clip = c.run.clip < 0.0 ? 0.0 : 1.0;
    c.run.ddp.bucket_bytes = c.run.ddp.bucket_bytes == ONE_EACH ? 0 : BUCKET_BYTES;
    return c;
}

bool ari_fault_case_alike(const ari_fault_case *a, const ari_fault_case *b)
{
    const ar_parallel *p = &a->run.parallel, *q = &b->run.parallel;
    return strcmp(a->run.model, b->run.model) == 0 && p->tp == q->tp && p->dp == q->dp &&
           p->micro_batches == q->micro_batches && p->sp == q->sp && p->keep_gathered == q->keep_gathered &&
           p->forward_first == q->forward_first && a->order == b->order && a->run.batch == b->run.batch &&
           a->run.seq == b->run.seq && a->run.steps == b->run.steps && a->run.clip == b->run.clip &&
           a->run.dropout == b->run.dropout && p->zero == q->zero &&
           a->run.ddp.bucket_bytes == b->run.ddp.bucket_bytes && a->run.ddp.mode == b->run.ddp.mode &&
           a->run.ddp.find_unused == b->run.ddp.find_unused && a->run.ddp.op == b->run.ddp.op;
}

ar_status ari_fault_case_load(ar_config *c, ar_plan *plan, const ari_fault_case *f)
{
    char folder[512];
    AR_TRY(ari_run_config(c, folder, sizeof folder, f->run.model));
    *plan = (ar_plan){0};
    return f->order == AR_MLP_COLUMN_ROW ? AR_OK : ar_plan_add_mlp_order(plan, c->arch, f->order);
}

/* --- runs --------------------------------------------------------------------------------------------------------- */

typedef struct ari_fault_base {
    ari_fault_case of;
    ari_check_base base;
} ari_fault_base;

static ar_check_options options_of(const ari_fault_bases *bases, const ari_fault_case *f, ar_fault fault)
{
    ar_check_options o = {.run = f->run, .skip_f64 = true};
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o.run.seed = bases->seed;
    o.run.numerics = bases->numerics;
    o.run.precision = bases->precision;
    o.run.fault = fault;
    o.run.threads = bases->threads;
    return o;
}

static bool same_base(const ari_fault_case *a, const ari_fault_case *b)
{
    return strcmp(a->run.model, b->run.model) == 0 && a->run.batch == b->run.batch && a->run.seq == b->run.seq &&
           a->run.steps == b->run.steps && a->run.clip == b->run.clip && a->run.dropout == b->run.dropout;
}

static void destroy(ari_fault_base *b)
{
    if (b)
        ari_check_base_fini(&b->base);
    free(b);
}

/* Moves the i-th to the front. */
static void use(ari_fault_bases *bases, size_t i)
{
    ari_fault_base *b = bases->base[i];
    memmove(&bases->base[1], &bases->base[0], i * sizeof(ari_fault_base *));
    bases->base[0] = b;
}

static ar_status make(ari_fault_base **gives, const ari_fault_bases *bases, const ari_fault_case *f)
{
    char folder[512];
    ar_config c;
    ari_fault_base *b = NULL;
    const ar_check_options o = options_of(bases, f, AR_FAULT_NONE);
    AR_TRY(ari_run_config(&c, folder, sizeof folder, f->run.model));
    AR_TRY(ari_alloc_zero((void **)&b, 1, sizeof *b, "a baseline"));
    b->of = *f;
    const ar_status st = ari_check_base_init(&b->base, &o, &c, folder);
    if (st == AR_OK)
        *gives = b;
    else
        destroy(b);
    return st;
}

static ar_status base_of(const ari_check_base **gives, ari_fault_bases *bases, const ari_fault_case *f)
{
    size_t i = 0;
    while (i < ARI_FAULT_BASES && bases->base[i] && !same_base(&bases->base[i]->of, f))
        i++;
    if (i == ARI_FAULT_BASES) {
        destroy(bases->base[--i]);
        bases->base[i] = NULL;
    }
    if (!bases->base[i])
        AR_TRY(make(&bases->base[i], bases, f));
    use(bases, i);
    *gives = &bases->base[0]->base;
    return AR_OK;
}

static ar_status run_module(ar_check_run *run, const ari_fault_bases *bases, const ari_fault_case *f, ar_fault fault)
{
    ar_check_module_report *r = NULL;
    AR_TRY(ari_fault_module_check(&r, f, fault, bases->threads, bases->seed));
    *run = r->run[0];
    r->run[0] = (ar_check_run){.error = NULL};
    ar_check_module_report_destroy(r);
    return AR_OK;
}

ar_status ari_fault_case_run(ar_check_run *run, ari_fault_bases *bases, const ari_fault_case *f, ar_fault fault)
{
    const ari_check_base *base = NULL;
    ar_check_options o = options_of(bases, f, fault);
    *run = (ar_check_run){.parallel = f->run.parallel};
    if (f->module)
        return run_module(run, bases, f, fault);
    AR_TRY(base_of(&base, bases, f));
    if (f->order != AR_MLP_COLUMN_ROW)
        AR_TRY(ar_plan_add_mlp_order(&o.run.plan, base->config.arch, f->order));
    return ari_check_base_run(run, base, &o, &f->run.parallel);
}

void ari_fault_bases_fini(ari_fault_bases *bases)
{
    for (size_t i = 0; i < ARI_FAULT_BASES; i++)
        destroy(bases->base[i]);
    *bases = (ari_fault_bases){.base = {NULL}};
}
