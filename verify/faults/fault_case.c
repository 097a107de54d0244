/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/faults/fault_case.h"

#include <string.h>

#include "ref/core/fault_private.h"
#include "ref/core/size.h"
#include "ref/models/family.h"
#include "ref/models/parallel_private.h"
#include "ref/models/plan_private.h"
#include "verify/run/run.h"

/* A step has 96 tokens. 24 positions divide by 2, 3, 4 and 8; 4 samples on 3 ranks are 2, 1 and 1, and 3 samples in 2
 * micro-batches are 2 and 1, so that means over unequal numbers of tokens differ. */
enum { BATCH = 4, SEQ = 24 };
/* Size that gives these models about ten buckets. */
#define BUCKET_BYTES ((size_t)1 << 20)
#define ONE_EACH SIZE_MAX

/* Conditions under which a fault has an effect: X(name, true if the run meets the condition, message if not). The first
 * unmet condition is reported. */
#define OF(what) "is a mistake of " what ", which this model has not"
#define NEEDS_TABLE(X)                                                                                                \
    X(UPDATE, r->steps > 0,                                                                                           \
      "acts after the backward pass, in clipping or in the update: give a check steps of at least 1")                 \
    X(STEPS, r->steps > 1, "acts from the second step on: give a check steps of at least 2")                          \
    X(DROPOUT, r->dropout > 0.0, "is a mistake of dropout: give a check dropout")                                     \
    X(MODULE, false, "shows in a module, not in a model: a check runs one")                                           \
    X(FRESH, fresh, "is a mistake of fresh weights, and these are read: give a MODEL without weights")                \
    X(TIED, c->tied, OF("tied embeddings"))                                                                           \
    X(POSITIONS, c->learned_positions, OF("learned positions"))                                                       \
    X(ANY_POSITIONS, c->learned_positions || c->rope.kind != AR_ROPE_NONE, OF("positions"))                           \
    X(PACKED, ari_part_path(ari_family_of(c->arch), ARI_QKV) && !ari_family_of(c->arch)->by_head,                     \
      OF("a fused q|k|v, block after block"))                                                                         \
    X(BIAS, row_bias || c->qkv_bias, OF("biases"))                                                                    \
    X(ROW_BIAS, row_bias, OF("the biases of row-parallel layers"))                                                    \
    X(DRAWN_COPIES,                                                                                                   \
      c->learned_positions || row_bias || c->experts.n > 0 || c->latent.kv_rank > 0 || (size_t)p->tp > c->kv_heads,   \
      "acts where ranks draw copies of a parameter, of which this run has none: give tp above the model's KV heads")  \
    X(PADDED, (c->hidden & (c->hidden - 1)) != 0,                                                                     \
      "acts where a norm's rows are padded: give a model whose width is no power of two")                             \
    X(LATENT, c->latent.kv_rank > 0, OF("latent attention"))                                                          \
    X(SINKS, c->sinks, OF("attention's sinks"))                                                                       \
    X(MTP, c->mtp > 0, OF("multi-token prediction"))                                                                  \
    X(EXPERTS, c->experts.n > 0, OF("experts"))                                                                       \
    X(NORMALISED, c->experts.n > 0 && c->experts.normalised, OF("experts' weights that are normalised"))              \
    X(BIAS_UPDATE, c->experts.scores.groups > 0 && r->loss.router.bias_update > 0.0,                                  \
      "is a mistake of the update of a router's bias: give a model of sigmoids and router-bias-update")               \
    X(BALANCE, ar_config_balance(c, &r->loss) != AR_BALANCE_NONE,                                                     \
      "is a mistake of experts that are balanced: give balance")                                                      \
    X(OTHERS, c->experts.per_token < c->experts.n,                                                                    \
      "acts where a token leaves experts out, and this model's go to all")                                            \
    X(PARTS, dp || cp || micro || (sp && ari_experts_unsplit(p)),                                                     \
      "acts where a batch has several parts: give dp, cp or micro-batches of at least 2")                             \
    X(ROUTER_Z, c->experts.n > 0 && r->loss.router.z_loss > 0.0,                                                      \
      "is a mistake of a router's z-loss: give router-z-loss")                                                        \
    X(CUT_EXPERTS, tp && !ari_experts_unsplit(p),                                                                     \
      "acts where tensor-parallel ranks share an expert's width: give tp of at least 2, and not etp 1")               \
    X(EP, p->ep > 1, "acts between expert-parallel ranks: give ep of at least 2")                                     \
    X(NO_ZERO, p->zero == 0, "acts where gradients are not shared out: give no zero")                                 \
    X(WHOLE_GRADIENTS, p->zero < 2, "acts where every rank has whole gradients: give zero of at most 1")              \
    X(DOCUMENTS, documents, "is a mistake of packed documents: give an input with cu_seqlens")                        \
    X(TP, tp, "acts between tensor-parallel ranks: give tp of at least 2")                                            \
    X(DP, dp || cp, "acts between data-parallel ranks: give dp of at least 2")                                        \
    X(SHARDS, tp || p->pp > 1 || p->zero > 0 || p->ep > 1,                                                            \
      "acts between ranks that hold shards of parameters: give tp, pp or ep of at least 2")                           \
    X(OTHER_PARAMETERS, tp || p->pp > 1 || (p->ep > 1 && p->ep < ari_extent(p, ari_expert_axes(p))),                  \
      "acts where other ranks have other parameters: give tp or pp of at least 2")                                    \
    X(SEVERAL_IN_BUCKET, r->ddp.bucket_bytes > 0,                                                                     \
      "acts where a bucket has several gradients: give larger buckets (bucket-bytes)")                                \
    X(WIDER_WORLD, dp || cp || p->pp > 1,                                                                             \
      "acts where the world is wider than a tensor-parallel group: give dp, cp or pp of at least 2")                  \
    X(HOLDERS, tp || dp || cp, "acts between ranks that hold copies of a parameter: give tp, cp or dp of at least 2") \
    X(NO_SAMPLE, batch < samples, "acts where a rank has no sample: give a batch below dp")                           \
    X(NO_LAST_SAMPLE, batch < (p->forward_first ? samples : pieces),                                                  \
      "acts where a rank's last micro-batch has no sample: give a batch below dp times micro-batches")                \
    X(TARGETS, ari_part_path(ari_family_of(c->arch), ARI_HEAD),                                                       \
      "is a mistake of a mean over targets, which this model's loss is not")                                          \
    X(UNLIKE_RANKS, cp || documents || batch % samples > 0,                                                           \
      "acts where ranks have unlike numbers of targets: give a batch that dp does not divide, or documents")          \
    X(UNLIKE_MICRO, documents || batch % pieces > 0,                                                                  \
      "acts where micro-batches have unlike numbers of targets: give a batch that dp times micro-batches do not "     \
      "divide, or documents")                                                                                         \
    X(UNEVEN_VOCABULARY, tp && c->vocab % (size_t)p->tp != 0,                                                         \
      "acts where tp does not divide the vocabulary: give a tp of at least 2 that does not")                          \
    X(NO_SP, !sp, "acts where every tensor-parallel rank has all tokens: give no sp")                                 \
    X(SP, sp, "is a mistake of sequence parallelism: give tp of at least 2 and sp")                                   \
    X(KV_COPIES, (size_t)ari_at_least_one(p->tp) > c->kv_heads,                                                       \
      "is about copies of KV heads, of which this run has none: give tp above the model's KV heads")                  \
    X(CP, cp, "acts between context-parallel ranks: give cp of at least 2")                                           \
    X(TAIL, seq % turns > 0, "acts where 2 cp does not divide the positions: give another seq")                       \
    X(RING, ring, "acts in a ring of context-parallel ranks: give cp above cp-inner")                                 \
    X(GATHERS, ring || sp,                                                                                            \
      "acts where tokens of several ranks are put together: give cp above cp-inner, or tp and sp")                    \
    X(NO_PP, p->pp <= 1, "acts where a rank has the whole model: give no pp")                                         \
    X(PP, p->pp > 1, "acts in a pipeline: give pp of at least 2")                                                     \
    X(ZERO_BUBBLE, p->pp > 1 && p->schedule == AR_PP_ZERO_BUBBLE,                                                     \
      "is a mistake of zero bubble: give pp of at least 2 and schedule-pp zero-bubble")                               \
    X(ADAM, kind == AR_OPTIMIZER_ADAM || kind == AR_OPTIMIZER_ADAMW,                                                  \
      "is a mistake of Adam: give optimizer adam or adamw")                                                           \
    X(MUON, kind == AR_OPTIMIZER_MUON, "is a mistake of Muon: give optimizer muon")                                   \
    X(DECAY, r->optimizer.weight_decay > 0.0, "is a mistake of weight decay: give weight-decay")                      \
    X(SAMPLES, r->batch == 0 || batch > pieces,                                                                       \
      "acts where a micro-batch has several samples on a rank: give a larger batch")                                  \
    X(ZERO, (dp || cp) && p->zero > 0,                                                                                \
      "acts where the optimizer's states are shared out: give dp of at least 2 and zero")                             \
    X(ZERO_3, (dp || cp) && p->zero > 2, "acts where weights are shared out: give dp of at least 2 and zero 3")       \
    X(WHOLE_WEIGHTS, (dp || cp) && (p->zero == 1 || p->zero == 2),                                                    \
      "acts where updated shares are gathered: give dp of at least 2 and zero 1 or 2")                                \
    X(MICRO, micro, "acts between micro-batches: give at least 2 micro-batches")                                      \
    X(FORWARD_FIRST, micro && p->forward_first,                                                                       \
      "needs one micro-batch's forward pass before another's backward pass: give at least 2 micro-batches and "       \
      "forward-first")                                                                                                \
    X(RECOMPUTE, p->recompute.part != AR_RECOMPUTE_NONE,                                                              \
      "is a mistake of recomputation: give recompute selective or full")                                              \
    X(ROW_COLUMN, order == AR_MLP_ROW_COLUMN,                                                                         \
      "is a mistake of an MLP that is split by rows first: give the MLP order row-column")                            \
    X(BUCKETS, dp || cp || sp || (p->pp > 1 && c->tied),                                                              \
      "acts where ranks sum gradients in buckets: give dp of at least 2, or tp of at least 2 and sp")
enum {
    NEEDS_NOTHING,
#define NUMBER(name, holds, text) NEEDS_##name,
    NEEDS_TABLE(NUMBER)
#undef NUMBER
        NEEDS_COUNT
};

#define LLAMA .run.model = "llama-demo"
#define GPT2 \
    .run.model = "gpt2-demo" /* a model with biases, learned positions, a tied head, and a width that is no power of
                                two */
#define MIXTRAL .run.model = "mixtral-demo", .routed = true /* normalised */
/* Models with routing weights that are not normalised, a shared expert, and experts that no token chooses. */
/* A router of sigmoids: a bias, groups, a factor. */
#define GLM_MOE .run.model = "glm4-moe-demo", .routed = true
#define DEEPSEEK .run.model = "deepseek-demo", .routed = true /* latent attention */
#define GPT_OSS .run.model = "gpt-oss-demo", .routed = true
#define FURTHER .run.model = "mtp-demo"
#define MOVED .run.loss.router.bias_update = 0.001
#define MODULE .run.model = "module", .module = true
#define NO_CLIP .run.clip = -1
#define TP(n) .run.parallel.tp = (n)
#define SP(n) .run.parallel = {.tp = (n), .sp = true}
#define MUON .run.optimizer.kind = AR_OPTIMIZER_MUON
#define DP(n) .run.parallel.dp = (n)
#define DP_TP(d, t) .run.parallel = {.dp = (d), .tp = (t)}
#define CP(n) .run.parallel.cp = (n)
#define ZIGZAG(n) .run.parallel = {.cp = (n), .zigzag = true}
#define RECOMPUTED .run.parallel = {.tp = 2, .recompute = {AR_RECOMPUTE_FULL, 1}}
#define PP(n, micro) .run.parallel = {.pp = (n), .micro_batches = (micro)}
#define ZERO_BUBBLE(d, micro) \
    .run.parallel = {.pp = 2, .dp = (d), .schedule = AR_PP_ZERO_BUBBLE, .micro_batches = (micro)}
#define SHARED_OUT(d, stage, micro) .run.parallel = {.dp = (d), .zero = (stage), .micro_batches = (micro)}
#define BALANCED(form) .run.loss.router = {AR_BALANCE_##form, 0.5, 0.0}
#define EP(d, n) .run.parallel = {.dp = (d), .ep = (n)}
#define MICRO(n) .run.parallel = {.tp = 1, .micro_batches = (n)}

/* The cases. Defaults: tp=2, 4 x 24 tokens, one step, clip 1, no dropout, buckets of 1 MiB. */
static const ari_fault_case cases[] = {
    {"column_dx_not_reduced", LLAMA, .requirements = {NEEDS_TP}},
    {"row_bias_every_rank", GPT2, .requirements = {NEEDS_TP, NEEDS_ROW_BIAS}},
    {"row_input_grad_not_gathered", GPT2, .order = AR_MLP_ROW_COLUMN,
     .requirements = {NEEDS_TP, NEEDS_ROW_COLUMN, NEEDS_NO_SP}},
    {"heads_divided_twice", LLAMA, .requirements = {NEEDS_TP}},
    {"allreduce_aliases_input", LLAMA, .requirements = {NEEDS_TP}},
    {"init_local_fan", LLAMA, .requirements = {NEEDS_TP, NEEDS_FRESH}},
    {"init_per_shard_seed", LLAMA, .requirements = {NEEDS_TP, NEEDS_FRESH}},
    {"vocab_target_off_by_shard", LLAMA, TP(8),
     .requirements = {NEEDS_TP, NEEDS_TARGETS}}, /* a shard begins with the space */
    {"loss_parallel_no_max", LLAMA, .requirements = {NEEDS_TP, NEEDS_TARGETS}},
    {"embedding_edge_twice", LLAMA, TP(8), .requirements = {NEEDS_TP}},
    {"weight_grad_leading_dims", LLAMA, .requirements = {NEEDS_SAMPLES}},
    {"bias_grad_wrong_axis", GPT2, .requirements = {NEEDS_BIAS}},
    {"norm_backward_missing", GPT2},
    {"sp_norm_grad_local", LLAMA, SP(2), .requirements = {NEEDS_SP}},
    {"sp_row_bias_grad_local", GPT2, SP(2), .requirements = {NEEDS_SP, NEEDS_ROW_BIAS}},
    {"sp_position_grad_local", GPT2, SP(2), .requirements = {NEEDS_SP, NEEDS_POSITIONS}},
    {"kv_replica_grad_local", LLAMA, TP(4), .requirements = {NEEDS_KV_COPIES}}, /* two KV heads */
    {"kv_replica_wrong_head", LLAMA, TP(4), .requirements = {NEEDS_KV_COPIES}},
    {"dropout_same_mask_in_shard", LLAMA, .run.dropout = 0.1, .requirements = {NEEDS_DROPOUT, NEEDS_TP}},
    {"dropout_different_mask_in_replica", GPT2, .run.dropout = 0.1,
     .requirements = {NEEDS_DROPOUT, NEEDS_TP, NEEDS_NO_SP}},
    {"dp_mean_of_means", LLAMA, DP(3), .requirements = {NEEDS_DP, NEEDS_TARGETS, NEEDS_UNLIKE_RANKS}},
    {"dp_sum_of_local_means", LLAMA, DP(2), .requirements = {NEEDS_DP, NEEDS_TARGETS}},
    {"dp_group_missing", LLAMA, DP(2), .requirements = {NEEDS_DP, NEEDS_WHOLE_GRADIENTS}},
    {"dp_broadcast_over_world", LLAMA, DP_TP(2, 2), .requirements = {NEEDS_DP, NEEDS_OTHER_PARAMETERS}},
    {"accum_mean_of_means", LLAMA, MICRO(2), .run.batch = 3,
     .requirements = {NEEDS_MICRO, NEEDS_TARGETS, NEEDS_UNLIKE_MICRO}},
    {"saved_input_overwritten", LLAMA, .run.parallel = {.tp = 1, .micro_batches = 2, .forward_first = true},
     .requirements = {NEEDS_FORWARD_FIRST}},
    {"embedding_tied_once", GPT2, .requirements = {NEEDS_TIED, NEEDS_NO_PP}},
    {"tied_weight_untied", GPT2, .requirements = {NEEDS_TIED}},
    {"gradnorm_counts_replicas", GPT2, .requirements = {NEEDS_UPDATE, NEEDS_TP}},
    {"gradnorm_local_clip", GPT2, .requirements = {NEEDS_UPDATE, NEEDS_SHARDS}},
    {"group_wrong_stride", LLAMA, DP_TP(2, 2), .requirements = {NEEDS_DP, NEEDS_TP}},
    {"world_rank_in_group", LLAMA, DP_TP(2, 2), .requirements = {NEEDS_WIDER_WORLD}},
    {"positions_local", GPT2, SP(2), .requirements = {NEEDS_GATHERS, NEEDS_POSITIONS}},
    {"silent_truncation", GPT2, TP(3), NO_CLIP,
     .requirements = {NEEDS_UNEVEN_VOCABULARY}}, /* 256 ids; the gradient norm is NaN */
    {"gate_up_interleaved_wrong", GPT2, .requirements = {NEEDS_TP, NEEDS_PACKED}},
    {"norm_padded_lanes", GPT2, .requirements = {NEEDS_PADDED}},
    {"bias_added_twice", GPT2, .requirements = {NEEDS_BIAS}},
    {"row_bias_partial_grad", GPT2, .requirements = {NEEDS_TP, NEEDS_ROW_BIAS}},
    {"init_replica_differs", GPT2, .requirements = {NEEDS_TP, NEEDS_FRESH, NEEDS_DRAWN_COPIES}},
    {"gather_batch_order", LLAMA, SP(2), .requirements = {NEEDS_SP, NEEDS_SAMPLES}},
    {"collective_order_swapped", GPT2, DP(2), .run.ddp.bucket_bytes = ONE_EACH,
     .requirements = {NEEDS_DP, NEEDS_WHOLE_GRADIENTS}}, /* the last two parameters are alike */
    {"collective_size_mismatch", LLAMA, .requirements = {NEEDS_TP, NEEDS_TARGETS}},
    {"collective_dtype_mismatch", LLAMA, DP(2), .requirements = {NEEDS_DP}},
    {"bucket_first_ready", LLAMA, DP(2),
     .requirements = {NEEDS_BUCKETS, NEEDS_WHOLE_GRADIENTS, NEEDS_SEVERAL_IN_BUCKET}},
    {"bucket_reduced_twice", LLAMA, DP(2), .requirements = {NEEDS_BUCKETS}},
    {"bucket_not_packed", LLAMA, DP(2), .requirements = {NEEDS_BUCKETS}},
    {"bucket_stale_done", LLAMA, DP(2), .run.steps = 2,
     .requirements = {NEEDS_STEPS, NEEDS_BUCKETS, NEEDS_WHOLE_GRADIENTS}},
    {"step_before_copy_back", LLAMA, DP(2), .requirements = {NEEDS_BUCKETS, NEEDS_WHOLE_GRADIENTS}},
    {"comm_before_producer", LLAMA, DP(2), .requirements = {NEEDS_BUCKETS, NEEDS_WHOLE_GRADIENTS}},
    {"stale_activation_reuse", LLAMA, DP(2), .requirements = {NEEDS_BUCKETS}},
    {"unused_skips_collective", LLAMA, DP(3), .run.batch = 2, .requirements = {NEEDS_DP, NEEDS_NO_SAMPLE}},
    {"unused_set_empty", MODULE, DP(2), .run.ddp = {.find_unused = true}, .requirements = {NEEDS_MODULE}},
    {"unused_in_last_micro_batch", LLAMA, DP(3), .run.batch = 2,
     .requirements = {NEEDS_DP, NEEDS_NO_LAST_SAMPLE, NEEDS_WHOLE_GRADIENTS}},
    {"zero_gather_missing", LLAMA, .run.parallel = {.dp = 2, .zero = 1},
     .requirements = {NEEDS_UPDATE, NEEDS_WHOLE_WEIGHTS}},
    {"zero_shards_misaligned", LLAMA, .run.parallel = {.dp = 2, .zero = 1}, .requirements = {NEEDS_UPDATE, NEEDS_ZERO}},
    {"accum_last_only", LLAMA, MICRO(2), .requirements = {NEEDS_MICRO}},
    {"zero_grad_not_recursive", LLAMA, .run.steps = 2, .requirements = {NEEDS_STEPS, NEEDS_WHOLE_GRADIENTS}},
    {"gradnorm_first_rank_only", LLAMA, .requirements = {NEEDS_UPDATE, NEEDS_TP}},
    {"gradnorm_mean_of_ranks", LLAMA, .requirements = {NEEDS_UPDATE, NEEDS_TP}},
    {"adam_step_not_synced", LLAMA, DP(2), .requirements = {NEEDS_UPDATE, NEEDS_ADAM, NEEDS_HOLDERS}},
    {"optimizer_counter_ahead", LLAMA, .requirements = {NEEDS_UPDATE, NEEDS_ADAM}},
    {"weight_decay_on_shard_only", LLAMA, DP(2), .requirements = {NEEDS_UPDATE, NEEDS_DECAY, NEEDS_HOLDERS}},
    {"muon_of_shards", LLAMA, MUON, .requirements = {NEEDS_UPDATE, NEEDS_TP, NEEDS_MUON, NEEDS_NO_ZERO}},
    {"muon_padding_rows", .run.model = "stack-demo", MUON, .requirements = {NEEDS_UPDATE, NEEDS_MUON}},
    {"norm_fp16_store", LLAMA, .in_f32 = true},
    {"ring_backward_first_kv", LLAMA, CP(2), .requirements = {NEEDS_RING}},
    {"ring_kv_grad_local", LLAMA, CP(2), .requirements = {NEEDS_RING}},
    {"cp_tail_dropped", LLAMA, CP(8), .requirements = {NEEDS_CP, NEEDS_TAIL}}, /* 24 positions are not a multiple of
                                                                                  16 */
    {"cp_targets_whole", LLAMA, CP(2), .requirements = {NEEDS_CP, NEEDS_TARGETS}},
    {"labels_after_cut", LLAMA, CP(2), .requirements = {NEEDS_CP, NEEDS_TARGETS}},
    {"allgather_token_order", LLAMA, ZIGZAG(2), .requirements = {NEEDS_GATHERS}},
    {"attention_over_documents", LLAMA, CP(2), .documents = 4, .requirements = {NEEDS_DOCUMENTS}},
    {"positions_over_documents", LLAMA, CP(2), .documents = 4, .requirements = {NEEDS_DOCUMENTS, NEEDS_ANY_POSITIONS}},
    {"recompute_new_dropout_mask", LLAMA, RECOMPUTED, .run.dropout = 0.1,
     .requirements = {NEEDS_DROPOUT, NEEDS_RECOMPUTE}},
    {"qkv_gathered_three_times", LLAMA, SP(2), .requirements = {NEEDS_SP}},
    {"collective_not_differentiable", LLAMA, SP(2), .requirements = {NEEDS_SP}},
    {"unordered_param_grad", LLAMA},
    {"dp_averaged_again", LLAMA, DP(2), .requirements = {NEEDS_DP}},
    {"accum_divided_each_time", LLAMA, MICRO(2), .requirements = {NEEDS_MICRO}},
    {"pp_sum_loss", LLAMA, PP(2, 2), .requirements = {NEEDS_PP, NEEDS_TARGETS}},
    {"pp_stage_divides", LLAMA, PP(4, 2), .requirements = {NEEDS_PP, NEEDS_MICRO}},
    {"pp_layers_local", LLAMA, PP(2, 2), .requirements = {NEEDS_PP}},
    {"pp_loss_last_micro_batch", LLAMA, PP(2, 2), .requirements = {NEEDS_PP, NEEDS_MICRO}},
    {"pp_tied_not_summed", GPT2, PP(2, 2), .requirements = {NEEDS_TIED, NEEDS_PP}},
    {"zb_tied_counted_twice", GPT2, ZERO_BUBBLE(1, 2), .requirements = {NEEDS_TIED, NEEDS_ZERO_BUBBLE}},
    {"zero_stale_weights", LLAMA, SHARED_OUT(2, 3, 1), .run.steps = 2, .requirements = {NEEDS_STEPS, NEEDS_ZERO_3}},
    {"router_weights_not_normalised", MIXTRAL, .requirements = {NEEDS_NORMALISED}},
    {"router_weights_detached", MIXTRAL, .requirements = {NEEDS_EXPERTS}},
    {"router_bias_own_counts", GLM_MOE, MOVED, DP(2),
     .requirements = {NEEDS_UPDATE, NEEDS_BIAS_UPDATE, NEEDS_BUCKETS, NEEDS_OTHERS}},
    {"router_bias_counts_bf16", GLM_MOE, MOVED, DP(2), .run.batch = 48, /* 288 tokens per expert on average */
     .in_f32 = true, .requirements = {NEEDS_UPDATE, NEEDS_BIAS_UPDATE, NEEDS_OTHERS}},
    {"router_bias_counts_plain", GLM_MOE, MOVED, .requirements = {NEEDS_UPDATE, NEEDS_BIAS_UPDATE, NEEDS_OTHERS}},
    {"balance_detached", MIXTRAL, BALANCED(BATCH), .requirements = {NEEDS_BALANCE, NEEDS_OTHERS}},
    {"balance_divided_by_dp", MIXTRAL, BALANCED(BATCH), DP(2), .requirements = {NEEDS_BALANCE, NEEDS_DP, NEEDS_OTHERS}},
    {"router_z_loss_of_micro_batch", MIXTRAL, .run.loss.router.z_loss = 0.1, .run.parallel = {.dp = 2},
     .requirements = {NEEDS_ROUTER_Z, NEEDS_PARTS}},
    {"router_grad_local", MIXTRAL, .requirements = {NEEDS_EXPERTS, NEEDS_CUT_EXPERTS}},
    {"latent_key_grad_local", DEEPSEEK, .requirements = {NEEDS_LATENT, NEEDS_TP}},
    {"sp_latent_key_grad_summed", DEEPSEEK, SP(2), .requirements = {NEEDS_LATENT, NEEDS_SP}},
    {"latent_grads_summed_again", DEEPSEEK, .requirements = {NEEDS_LATENT, NEEDS_TP}},
    {"sinks_left_out", GPT_OSS, .requirements = {NEEDS_SINKS}},
    {"mtp_mean_over_all", FURTHER, DP(2), .requirements = {NEEDS_MTP}},
    {"experts_not_reduced", MIXTRAL, .requirements = {NEEDS_EXPERTS, NEEDS_CUT_EXPERTS}},
    {"experts_dx_not_reduced", MIXTRAL, .requirements = {NEEDS_EXPERTS, NEEDS_CUT_EXPERTS}},
    {"gradnorm_without_experts", MIXTRAL, .requirements = {NEEDS_UPDATE, NEEDS_EXPERTS}},
    {"ep_outputs_not_returned", MIXTRAL, EP(2, 2), .requirements = {NEEDS_EP}},
    {"ep_grads_times_ep", MIXTRAL, EP(4, 2), .requirements = {NEEDS_EP}},
};

ari_fault_case ari_fault_case_of(const char *fault)
{
    size_t i = 0;
    while (i + 1 < sizeof cases / sizeof *cases && !ari_fault_is(fault, cases[i].fault))
        i++;
    ari_fault_case c = cases[i];
    const bool split = c.run.parallel.tp || c.run.parallel.dp || c.run.parallel.cp || c.run.parallel.pp;
    c.run.parallel.tp = split ? c.run.parallel.tp : 2;
    c.run.batch = c.run.batch ? c.run.batch : BATCH;
    c.run.seq = SEQ;
    const bool muon = c.run.optimizer.kind == AR_OPTIMIZER_MUON;
    c.run.optimizer = ar_optimizer_defaults(muon ? AR_OPTIMIZER_MUON : AR_OPTIMIZER_ADAMW);
    c.run.steps = c.run.steps ? c.run.steps : 1;
    c.run.clip = c.run.clip < 0.0 ? 0.0 : 1.0;
    c.run.ddp.bucket_bytes = c.run.ddp.bucket_bytes == ONE_EACH ? 0 : BUCKET_BYTES;
    return c;
}

static bool same_base(const ari_fault_case *a, const ari_fault_case *b)
{
    const ar_router_losses *p = &a->run.loss.router, *q = &b->run.loss.router;
    return strcmp(a->run.model, b->run.model) == 0 && a->run.batch == b->run.batch && a->run.seq == b->run.seq &&
           a->documents == b->documents && a->run.steps == b->run.steps && a->run.clip == b->run.clip &&
           a->run.optimizer.kind == b->run.optimizer.kind && a->run.dropout == b->run.dropout &&
           a->in_f32 == b->in_f32 && p->balance == q->balance && p->balance_weight == q->balance_weight &&
           p->z_loss == q->z_loss && p->bias_update == q->bias_update;
}

bool ari_fault_case_equal(const ari_fault_case *a, const ari_fault_case *b)
{
    char layout[2][160];
    const ar_ddp_options *d = &a->run.ddp, *e = &b->run.ddp;
    ari_parallel_text(layout[0], sizeof layout[0], &a->run.parallel);
    ari_parallel_text(layout[1], sizeof layout[1], &b->run.parallel);
    return same_base(a, b) && a->order == b->order && strcmp(layout[0], layout[1]) == 0 &&
           d->bucket_bytes == e->bucket_bytes && d->mode == e->mode && d->find_unused == e->find_unused;
}

ar_status ari_fault_case_load(ar_config *c, ar_plan *plan, const ari_fault_case *f)
{
    char folder[512];
    AR_TRY(ari_run_config(c, folder, sizeof folder, &f->run));
    *plan = (ar_plan){0};
    return f->order == AR_MLP_COLUMN_ROW ? AR_OK : ari_plan_add_mlp_order(plan, c->arch, f->order);
}

/* --- what a fault needs ------------------------------------------------------------------------------------------- */

/* A batch or length of 0 is not known yet and satisfies any condition. */
ar_status ari_fault_case_check(const ar_run *r, ar_mlp_order order, const ar_config *c, bool fresh, bool documents)
{
    const ar_parallel *p = &r->parallel;
    const bool cp = p->cp > 1, ring = cp && p->cp > ari_at_least_one(p->cp_inner), micro = p->micro_batches > 1;
    const bool tp = p->tp > 1, dp = p->dp > 1, sp = tp && p->sp, row_bias = c->out_bias || c->mlp_bias;
    const size_t batch = r->batch ? r->batch : 1, seq = r->seq ? r->seq : 1,
                 turns = 2 * (size_t)ari_at_least_one(p->cp);
    const size_t samples = (size_t)ari_extent(p, ARI_CUTS_SAMPLES),
                 pieces = samples * (size_t)(micro ? p->micro_batches : 1);
    const ar_optimizer_kind kind = r->optimizer.kind;
    const struct {
        bool holds;
        const char *text;
    } need[] = {{true, NULL},
#define NEED(name, holds, text) {holds, text},
                NEEDS_TABLE(NEED)};
#undef NEED
    if (!r->fault)
        return AR_OK;
    const ari_fault_case fault_case = ari_fault_case_of(r->fault);
    size_t i = 0;
    while (i < NEEDS_COUNT &&
           (need[i].holds || !memchr(fault_case.requirements, (int)i, sizeof fault_case.requirements)))
        i++;
    return i < NEEDS_COUNT ? ar_error_set(AR_ERR_ARG, "fault %s %s", r->fault, need[i].text) : AR_OK;
}

/* --- runs --------------------------------------------------------------------------------------------------------- */

bool ari_fault_case_is_exact(const ari_fault_case *f, ar_precision precision)
{
    return f->module || (f->routed && precision != AR_PRECISION_F32);
}

static ar_check_options options_of(const ari_fault_bases *bases, const ari_fault_case *f, const char *fault)
{
    ar_check_options o = {.run = ari_fault_run_of(f, fault, bases->threads, bases->seed),
                          .documents = f->documents,
                          .explain = bases->explain,
                          .skip_f64 = true};
    const bool exact = bases->numerics == AR_NUMERICS_EXACT;
    if (exact ? !f->module && !f->in_f32 : !ari_fault_case_is_exact(f, bases->precision)) {
        o.run.numerics = bases->numerics;
        o.run.precision = bases->precision;
    }
    return o;
}

/* Returns the case's base. If none exists, the base that has been unused for longest is replaced. */
static ar_status base_of(const ari_check_base **out, ari_fault_bases *bases, const ari_fault_case *f)
{
    ari_fault_base *b = bases->base;
    size_t i = 0;
    while (i < ARI_FAULT_BASES && !(b[i].used > 0 && same_base(&b[i].fault_case, f)))
        i++;
    if (i == ARI_FAULT_BASES) {
        char folder[512];
        ar_config c;
        const ar_check_options o = options_of(bases, f, NULL);
        i = 0;
        for (size_t k = 1; k < ARI_FAULT_BASES; k++)
            i = b[k].used < b[i].used ? k : i;
        ari_check_base_fini(&b[i].base);
        b[i] = (ari_fault_base){.fault_case = *f};
        AR_TRY(ari_run_config(&c, folder, sizeof folder, &f->run));
        AR_TRY(ari_check_base_init(&b[i].base, &o, &c, folder));
    }
    b[i].used = ++bases->uses;
    *out = &b[i].base;
    return AR_OK;
}

ar_status ari_fault_case_run(ar_check_run *run, ari_fault_bases *bases, const ari_fault_case *f, const char *fault)
{
    const ari_check_base *base = NULL;
    ar_check_options o = options_of(bases, f, fault);
    *run = (ar_check_run){.parallel = f->run.parallel};
    if (f->module) {
        ar_check_report *r = NULL;
        AR_TRY(ari_fault_module_check(&r, f, fault, bases));
        *run = r->run[0];
        r->run[0] = (ar_check_run){.error = NULL};
        ar_check_report_destroy(r);
        return AR_OK;
    }
    AR_TRY(base_of(&base, bases, f));
    if (f->order != AR_MLP_COLUMN_ROW)
        AR_TRY(ari_plan_add_mlp_order(&o.run.plan, base->config.arch, f->order));
    return ari_check_base_run(run, base, &o, &f->run.parallel);
}

void ari_fault_bases_fini(ari_fault_bases *bases)
{
    for (size_t i = 0; i < ARI_FAULT_BASES; i++)
        ari_check_base_fini(&bases->base[i].base);
    *bases = (ari_fault_bases){.uses = 0};
}
