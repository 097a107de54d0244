/* SPDX-License-Identifier: Apache-2.0 */
/* The terms of a step's time and memory (cost.c): the cost of one micro-batch for a rank in each part of a model, the
 * division of the parts among pipeline stages, and the reductions of data parallelism. A search computes each term once
 * for all layouts that share it. */
#pragma once

#include "verify/plan/time.h"

/* --- groups and links (time_link.c) ------------------------------------------------------------------------------- */

typedef enum ari_collective {
    ARI_MOVES_NOTHING,
    ARI_MOVES_ALL_REDUCE,
    ARI_MOVES_REDUCE_SCATTER,
    ARI_MOVES_ALL_GATHER,
    ARI_MOVES_BROADCAST,
    ARI_MOVES_ALL_TO_ALL,
    ARI_MOVES_MESSAGE /* a message to the next rank of a ring or a pipeline */
} ari_collective;

/* A group of ranks in a collective, and its position on the nodes. */
typedef struct ari_links {
    const ari_time_options *options;
    double ranks, node_ranks; /* number of members; number of members that share a node */
    bool inside, inter_node;
} ari_links;
/** Links of a group of a layout. */
ari_links ari_links_of(const ari_planned *p, const ari_time_options *o, ari_over group);
/** Returns the seconds of a collective of `elements` elements (full length) whose members all arrive at once. For an
 *  all-to-all they are the elements that all members together send to others. */
double ari_links_call(const ari_links *l, ari_collective kind, double elements, double element_bytes);
/** Returns the bytes that a member sends in a collective. */
double ari_links_sent(const ari_links *l, ari_collective kind, double elements, double element_bytes);
/** Seconds of a message between neighbours. */
double ari_links_send(const ari_links *l, double bytes);
/** Adds calls of one kind to a table of traffic (NULL: none). seconds: of all calls, without overlap. */
void ari_traffic_count(ari_traffic *table, ari_time_kind time_kind, const ari_links *l, ari_collective kind,
                       double calls, double bytes, double seconds);
/** Adds `times` times each row of `addend` to the row of the same call, group and link. */
void ari_traffic_add(ari_traffic *table, const ari_traffic *addend, double times);

/* --- a micro-batch ------------------------------------------------------------------------------------------------ */

/* Parts of a model: everything before the layers, a layer with an MLP, a layer with experts, everything after the
 * layers. */
typedef enum ari_model_part {
    ARI_PART_BEFORE,
    ARI_PART_DENSE,
    ARI_PART_EXPERTS,
    ARI_PART_AFTER,
    ARI_MODEL_PARTS
} ari_model_part;

enum { ARI_FORWARD, ARI_BACKWARD, ARI_PASSES };
/* Seconds of one micro-batch's pass through a part. */
typedef struct ari_pass_cost {
    double seconds[ARI_TIME_KINDS]; /* seconds that do not overlap with other work; products include attention */
    double attention;               /* attention's part of the products */
    double weights;                 /* the part of the products that computes weight gradients, which a pipeline may
                                       defer */
} ari_pass_cost;
typedef struct ari_part_cost {
    ari_pass_cost pass[ARI_PASSES];
    ari_pass_cost block;      /* the part of the forward pass that full recomputation repeats */
    double hidden;            /* seconds of communication overlapped with matmuls */
    ari_memory saved;         /* bytes saved for the backward pass */
    ari_memory deferred;      /* bytes needed by deferred weight gradients: inputs, and gradients of outputs */
    ari_memory blocks;        /* saved bytes of blocks; full recomputation saves only their input */
    double input, scores;     /* parts of the saved bytes: blocks' inputs, and what selective recomputation does not
                                 save */
    double workspace;         /* bytes of the largest operation's values in the backward pass, */
    double forward_workspace; /* the same in the forward pass */
    double parameters;        /* elements of this rank */
    double experts, matrices; /* parts of them: experts that have copies on other ranks than the rest, and parameters
                                 that Muon updates */
    double tensors, expert_tensors; /* number of weights and biases of linear layers; those of experts are counted
                                       separately */
    double frozen;                  /* elements without a gradient */
    double muon;                    /* seconds of Muon's products */
} ari_part_cost;
typedef struct ari_micro_cost {
    ari_part_cost part[ARI_MODEL_PARTS];
    double shared_table; /* elements of the embedding table if a pipeline has two copies of it; else 0 */
} ari_micro_cost;
/** Computes the cost of a micro-batch on the rank that computes longest. It depends only on tp, cp, sp, experts,
 *  overlap and the samples per micro-batch. traffic: NULL, or a table for each part. Errors: AR_ERR_UNSUPPORTED (the
 *  plan). */
AR_NODISCARD ar_status ari_micro_cost_of(ari_micro_cost *m, const ari_planned *p, const ari_time_options *o,
                                         ari_traffic traffic[ARI_MODEL_PARTS]);

/* --- a pipeline --------------------------------------------------------------------------------------------------- */

/* Number of times each part occurs on a rank, or in a stage. */
typedef struct ari_part_counts {
    double count[ARI_MODEL_PARTS];
} ari_part_counts;
/* Consecutive ranks of a pipeline with the same number of each part. */
typedef struct ari_rank_class {
    int first_rank, last_rank;   /* ranks */
    ari_part_counts rank, stage; /* parts of each rank; parts of the rank's first stage, whose backward pass comes
                                    last */
    ari_part_counts before;      /* parts of all ranks before the first */
} ari_rank_class;
typedef struct ari_pipeline {
    int ranks, stages; /* number of ranks; stages of each rank */
    ar_pp_schedule schedule;
    size_t classes;
    ari_rank_class rank_class[AR_MAX_STAGES];
    ari_part_counts model;
} ari_pipeline;
/** Computes the stages of a layout. They depend only on pp, virtual stages and given stages. */
void ari_pipeline_of(ari_pipeline *l, const ari_planned *p);

/* --- a step ------------------------------------------------------------------------------------------------------- */

/* Sums of gradients of a rank of the pipeline among the ranks of data parallelism. */
typedef struct ari_sync {
    double sums, last_bucket;             /* seconds for reducing all buckets, and the last bucket */
    double buckets;                       /* number */
    double gathers;                       /* seconds for gathering updated weights */
    double unit_gather;                   /* ZeRO-3: seconds for gathering a block's weights, */
    double unit_scatter;                  /* and for reducing the block's gradients */
    double end_gather[2], end_scatter[2]; /* of the parts before and after the blocks */
    double numbers, stage_numbers;        /* the loss and the norm of gradients, over data and tp, over stages */
    bool shares_links[2];                 /* buckets wait while tp, and ep, use their kind of link */
    double shares, expert_shares;         /* number of ranks that shard the optimizer's state */
    ari_links pipeline_links;             /* links to the next rank of the pipeline */
} ari_sync;
/** Computes the reductions of a class of ranks; traffic: NULL, or a table to which they are added. The result depends
 *  on ZeRO and replicas, but not on the number of micro-batches. */
ari_sync ari_sync_of(const ari_planned *p, const ari_time_options *o, const ari_micro_cost *m, const ari_pipeline *l,
                     size_t rank_class, ari_traffic *traffic);
/** Computes the time of a step. sync: [l->classes]. traffic: NULL, or the traffic of a micro-batch in each part; then
 *  t->traffic is its total plus all other traffic of the step, otherwise it is left empty. */
void ari_step_time(ari_time *t, const ari_planned *p, const ari_time_options *o, const ari_micro_cost *m,
                   const ari_pipeline *l, const ari_sync *sync, const ari_traffic traffic[ARI_MODEL_PARTS]);
/** Computes the memory of the rank that needs most. */
void ari_step_memory(ari_memory *memory, const ari_planned *p, const ari_micro_cost *m, const ari_pipeline *l);
