/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_PARALLEL_H
#define ANYRANK_PARALLEL_H

#include "anyrank/batch.h"
#include "anyrank/context.h"
#include "anyrank/plan.h"
#include "anyrank/schedule.h"

AR_BEGIN_DECLS

/** The split of a training step over W = pp * dp * cp * tp ranks: tp ranks are neighbours, the groups of them that
 *  share a sequence come next, and the ranks of a pipeline are furthest apart. Plain data; an extent of 0 counts as 1,
 *  so that {.tp = 4} is a layout. */
typedef struct ar_parallel {
    int tp;       /* tensor-parallel ranks */
    int dp;       /* data-parallel ranks: each holds some samples of the global batch */
    int cp;       /* context-parallel ranks: each holds seq/cp positions of every sequence, in all layers */
    int cp_inner; /* so many neighbours among them exchange heads for positions, so that in attention each has
                           fewer heads and all the neighbours' positions (all-to-all: Jacobs et al. 2023,
                           arXiv:2309.14509); the cp/cp_inner groups of such neighbours pass keys and values on in a
                           ring (Liu et al. 2023, arXiv:2310.01889). 1: the ring alone; cp: the all-to-all alone */
    bool zigzag;  /* a place r of a ring of R has the chunks r and 2R-1-r of 2R, so that causal attention gives
                           every place as much to do; false: the r-th of R */
    int ep;       /* expert-parallel ranks: of the dp * cp ranks so many neighbours share out the experts of each layer
                           between them, in equal runs, and send each other tokens; the dp * cp / ep groups of such
                           neighbours hold copies of all experts */
    int etp; /* tensor-parallel ranks that each expert is cut over. 0: all of tp; 1, with sp: none, each of them has
                           experts of its own for its own positions, so that ep counts the tp * dp * cp ranks */
    ar_dispatch dispatch; /* between expert-parallel ranks */
    int pp; /* pipeline ranks: each holds some of the layers, the first also the embedding, the last the head */
    int virtual_stages;      /* parts of the layers that each of them holds: stage s of the pp * virtual_stages is rank
                           s mod pp's (interleaving: Narayanan et al. 2021, arXiv:2104.04473) */
    ar_stages stages;        /* layers of each stage */
    ar_pp_schedule schedule; /* in which order they go through the micro-batches */
    const ar_pipeline_schedule *own_schedule; /* in place of it; borrowed; NULL: none */
    int micro_batches;                        /* each rank goes through its samples in so many pieces */
    bool sp;            /* sequence parallelism: between the tensor-parallel regions each of the tp ranks holds seq/tp
                           positions of every sequence; nothing changes with tp = 1 */
    bool keep_gathered; /* sp: a column-parallel layer keeps its gathered input for the backward pass; false: it keeps
                           its own positions and gathers again (less memory, more bytes) */
    int overlap;        /* sp: collectives along the tokens beside a linear layer's product go in so many chunks of
                           positions, each beside the product of the one before it (forward: gather, then multiply;
                           multiply, then reduce-scatter); the last may be shorter. 1: one after the other */
    ar_recomputation recompute;
    int zero;           /* stage of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054). 1: each of the dp * cp ranks keeps
                           its share of the optimizer state and updates its share of the weights; 2: it also keeps its
                           share alone of the gradients, 3: and of the weights, which are gathered block by block; 0:
                           each does all */
    int dp_replicate;   /* with zero: the dp ranks are so many groups of neighbours, each of which shares out what zero
                           does not keep whole (hybrid sharding: Zhao et al. 2023, arXiv:2304.11277, section 3.2.2) */
    bool forward_first; /* all micro-batches go forward before the first goes backward, in reverse order; false: each
                           goes forward and backward before the next */
} ar_parallel;

/** The number of ranks, pp * dp * cp * tp, of a layout that ari_parallel_check accepts. */
int ar_parallel_world(const ar_parallel *p);

/** Coordinates of a rank: rank = ((pp * the layout's dp + dp) * the layout's cp + cp) * the layout's tp + tp. */
typedef struct ar_parallel_rank {
    int pp, dp, cp, tp;
} ar_parallel_rank;

#define AR_RANK_TEXT 256

/** A rank's groups, as ar_ctx_options takes them. Owned. */
typedef struct ar_parallel_groups {
    ar_comm *tp, *dp;
    ar_comm *shard, *replicate; /* NULL where nothing is replicated */
    ar_context_groups cp;       /* NULL where nobody shares a sequence */
    ar_expert_groups ep;        /* NULL where no rank has experts of its own */
    ar_context_pipeline pp;     /* NULL without a pipeline */
} ar_parallel_groups;
/** Splits them off the world, whose ranks are those of the layout. Collective over it. ar_parallel_groups_end, in every
 *  case and before the world ends. Errors: AR_ERR_ARG (another number of ranks, an inner extent that does not divide
 *  cp), what the communicator gives. */
AR_NODISCARD ar_status ar_parallel_groups_begin(ar_parallel_groups *out, ar_comm *world, const ar_parallel *p);
/** A context of these options is in these groups, which it borrows. */
void ar_parallel_groups_use(ar_ctx_options *options, const ar_parallel_groups *groups);
/** Accepts what is all NULL. */
void ar_parallel_groups_end(ar_parallel_groups *groups);

/** Positions of a sequence in the order in which a rank keeps them: runs of consecutive ones, the empty ones last. */
typedef struct ar_positions {
    size_t first[2], count[2];
} ar_positions;

AR_END_DECLS
#endif
