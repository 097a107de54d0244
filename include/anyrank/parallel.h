/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_PARALLEL_H
#define ANYRANK_PARALLEL_H

#include "anyrank/context.h"
#include "anyrank/schedule.h"

AR_BEGIN_DECLS

/** A parallel layout: how a training step is distributed over W = pp * dp * cp * tp ranks. Rank numbers run fastest
 *  over tp, then cp, dp, and pp (ar_parallel_rank). Plain data; an extent of 0 counts as 1, so that {.tp = 4} is a
 *  layout. */
typedef struct ar_parallel {
    int tp;       /* tensor-parallel ranks */
    int dp;       /* data-parallel ranks: each has some samples of the global batch */
    int cp;       /* context-parallel ranks: each has seq/cp positions of every sequence, in all layers */
    int cp_inner; /* how context-parallel attention communicates: each cp_inner adjacent ranks use an all-to-all that
                     exchanges heads for positions (Jacobs et al. 2023, arXiv:2309.14509); the cp/cp_inner groups of
                     them pass keys and values around a ring (Liu et al. 2023, arXiv:2310.01889). 1: ring only; cp:
                     all-to-all only */
    bool zigzag;  /* member r of a ring of R has the chunks r and 2R-1-r of 2R chunks of a sequence, which balances
                     causal attention; false: chunk r of R */
    int ep;       /* expert-parallel ranks: each ep adjacent ranks of the dp * cp ranks hold equal runs of every layer's
                     experts and send each other tokens; the dp * cp / ep groups of them hold copies of all experts */
    int etp;      /* tensor-parallel ranks that each expert is sharded over. 0: all tp ranks; 1 (needs sp): experts are
                     not sharded, the tp ranks are expert-parallel for their own positions, and ep counts adjacent ranks
                     of the tp * dp * cp ranks */
    ar_dispatch dispatch; /* collective that sends tokens to experts */
    int pp; /* pipeline ranks: each holds some layers, the first also the embedding, the last also the LM head */
    int virtual_stages;      /* stages of each pipeline rank: stage s of pp * virtual_stages is on rank s mod pp
                                (interleaving: Narayanan et al. 2021, arXiv:2104.04473) */
    ar_stages stages;        /* number of layers of each stage */
    ar_pp_schedule schedule; /* order in which pipeline ranks process micro-batches */
    const ar_pipeline_schedule *own_schedule; /* a user's schedule that replaces `schedule`; borrowed; NULL: none */
    int micro_batches;                        /* number of micro-batches into which each rank splits its samples */
    bool sp;            /* sequence parallelism (Korthikanti et al. 2022): outside of the tensor-parallel layers each tp
                           rank has seq/tp positions of every sequence; no effect if tp is 1 */
    bool keep_gathered; /* with sp: a column-parallel layer saves its all-gathered input for the backward pass; false:
                           it saves its own positions and gathers again (less memory, more communication) */
    int overlap;        /* with sp: a linear layer's all-gather or reduce-scatter is split into this many chunks of
                           positions (the last may be shorter), each overlapped with the matrix product of another
                           chunk. 1: no overlap */
    ar_recomputation recompute; /* activation recomputation */
    int zero;           /* ZeRO stage (Rajbhandari et al. 2020, arXiv:1910.02054) over the dp * cp ranks. 1: shards the
                           optimizer state; 2: also the gradients; 3: also the weights, which are gathered block by
                           block; 0: none */
    int dp_replicate;   /* with zero: the dp ranks form this many groups of adjacent ranks, and ZeRO shards within each
                           group (hybrid sharding: Zhao et al. 2023, arXiv:2304.11277, section 3.2.2) */
    bool forward_first; /* without pipeline: the forward passes of all micro-batches run before the backward passes,
                           which run in reverse order; false: each micro-batch's backward pass follows its forward
                           pass */
} ar_parallel;

/** Returns the number of ranks of a valid layout: pp * dp * cp * tp. */
int ar_parallel_world(const ar_parallel *p);

/** Coordinates of a rank in a layout p: rank = ((pp * p.dp + dp) * p.cp + cp) * p.tp + tp. */
typedef struct ar_parallel_rank {
    int pp, dp, cp, tp; /* index along each parallel dimension */
} ar_parallel_rank;

#define AR_RANK_TEXT 256 /* bytes of a rank's description in messages, with the final 0 */

/** The communicators of a rank for all groups of a layout, with the meanings that they have in ar_ctx_options. The
 *  struct owns them. */
typedef struct ar_parallel_groups {
    ar_comm *tp, *dp;
    ar_comm *shard, *replicate; /* NULL without dp_replicate */
    ar_context_groups cp;       /* communicators NULL without context parallelism */
    ar_expert_groups ep;        /* communicators NULL without expert parallelism */
    ar_context_pipeline pp;     /* communicators NULL without a pipeline */
} ar_parallel_groups;
/** Creates the groups of layout p by splitting `world`, whose size is the layout's number of ranks. Collective over
 *  world. The caller releases *out with ar_parallel_groups_end before it destroys world, also after an error. Errors:
 *  AR_ERR_ARG (another number of ranks, cp_inner does not divide cp), those of the communicator. */
AR_NODISCARD ar_status ar_parallel_groups_begin(ar_parallel_groups *out, ar_comm *world, const ar_parallel *p);
/** Sets the communicators in context options to these groups. A context created from the options borrows them. */
void ar_parallel_groups_use(ar_ctx_options *options, const ar_parallel_groups *groups);
/** Destroys the communicators of the groups. Accepts a struct of NULLs. */
void ar_parallel_groups_end(ar_parallel_groups *groups);

/** The positions of a sequence that a context-parallel rank holds, in the order in which it stores them: up to two runs
 *  [first, first + count); an empty run comes last. */
typedef struct ar_positions {
    size_t first[2], count[2];
} ar_positions;

AR_END_DECLS
#endif
