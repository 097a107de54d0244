/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of a step's time: links, passes, sums over ranks. A search keeps the parts that layouts share. */
#pragma once

#include "verify/plan/time.h"

/* --- groups and links (time_link.c) ------------------------------------------------------------------------------- */

/* Ranks that call together, and how they lie on the nodes. */
typedef struct ari_links {
    const ari_time_options *o;
    double n, in_node; /* members; of them neighbours in a node */
    bool inside, between;
} ari_links;
/** Links of a group of the list of operations. */
ari_links ari_links_of(const ari_planned *p, const ari_time_options *o, ari_over g);
/** Whose time a group's calls are. */
ari_time_kind ari_time_kind_of(ari_over g);
/** Seconds of a collective of so many elements in full length, all members coming at once. */
double ari_links_call(const ari_links *l, ari_call_kind kind, double elements, double element_bytes);
/** A call's elements if every rank's part were as long as the longest, which decides. */
double ari_links_elements(const ari_op_call *call);
/** Bytes that a member sends in it. */
double ari_links_sent(const ari_links *l, ari_call_kind kind, double elements, double element_bytes);
/** Seconds of a message between neighbours. */
double ari_links_send(const ari_links *l, double bytes);

/* --- collectives overlapped by GEMMs (time_overlapped.c) ---------------------------------------------------------- */

/* A call that is cut into chunks, and the seconds of each and of the last. */
typedef struct ari_cut {
    ari_op_call call;
    double each, last;
} ari_cut;
ari_cut ari_cut_of(const ari_links *l, const ari_op_call *call, double element_bytes);
/** Seconds of all chunks, one after the other. */
double ari_cut_seconds(const ari_cut *c);

/* Gathers of the overlapped queue for which the main queue has yet to wait. */
typedef struct ari_prefetch {
    ari_cut chunks;
    bool waits, begun;
    double done; /* begun: seconds of the main queue's clock */
} ari_prefetch;
/* That queue. Of what a product takes in chunks each is enqueued when the product of the one before begins; what is
 * gathered again, for the gradients of weights of at most two layers at once, goes behind the last of them. */
enum { ARI_REGATHERS = 2 };
typedef struct ari_overlapped {
    double until; /* it has done what is enqueued */
    ari_prefetch next, regather[ARI_REGATHERS];
} ari_overlapped;
void ari_overlapped_gather(ari_overlapped *b, double now, const ari_cut *c, bool regather);
/* A product's seconds: of each of the chunks that are multiplied one by one, and of the last; whole: of both together. */
typedef struct ari_chunked {
    double each, last, whole;
} ari_chunked;
/** The chunks of the next product: what was gathered for it; NULL: it is multiplied at once. */
const ari_cut *ari_overlapped_next(const ari_overlapped *b);
/** When the main queue has multiplied what was gathered for it, if anything was, and has what it scattered (NULL:
 *  nothing) back. */
double ari_overlapped_multiply(ari_overlapped *b, double now, const ari_chunked *product, const ari_cut *scattered);
/** The share of the elements that chunk i has. */
double ari_cut_share(const ari_cut *c, size_t i);
/** When it has what was gathered again for the gradient of this role's weight; `now` if nothing was. */
double ari_overlapped_wait(ari_overlapped *b, double now, ari_role role);

/* --- passes (time_pass.c) ----------------------------------------------------------------------------------------- */

/* Seconds in a part of a model. */
typedef struct ari_cost {
    double products, attention;
    double over[ARI_TIME_KINDS]; /* of calls of the main queue */
    double recompute; /* of products and attention, those of what is computed again: by the list of operations */
    double weights;   /* of all of them, those of gradients of weights */
} ari_cost;
double ari_cost_sum(const ari_cost *c);
void ari_cost_add(ari_cost *to, const ari_cost *c, double times);

enum { ARI_GOES_FORWARD, ARI_GOES_BACKWARD, ARI_DIRECTIONS };
/* Kinds of micro-batches: in exact numerics the first by itself, those of one sample more, the others. */
enum { ARI_MICRO_KINDS = 3 };
/* Of a rank's micro-batches the mean, the last one, each kind. */
enum { ARI_OF_MEAN, ARI_OF_LAST, ARI_OF_EACH, ARI_OF_MICROS = ARI_OF_EACH + ARI_MICRO_KINDS };
typedef struct ari_passes {
    /* [sections + 1]; the last is of what blocks for further tokens, part of the section before, have of a layer */
    ari_cost *of[ARI_OF_MICROS][ARI_DIRECTIONS];
    int kinds, first[ARI_MICRO_KINDS];  /* from which micro-batch on each kind is */
    double hidden[ARI_MODEL_PARTS];     /* seconds of calls beside products, of a micro-batch */
    double parameters[ARI_MODEL_PARTS]; /* of this rank, of all layers */
    double experts[ARI_MODEL_PARTS];    /* of them, those of experts, where they have copies of their own */
    ari_traffic moved[ARI_MODEL_PARTS]; /* of a micro-batch */
    /* [blocks + 1][ARI_ROLES]: when the last backward pass has made a module's gradients, since its block began; behind
     * the blocks, of what is outside of them, since the pass began. */
    double *ready;
    double begun; /* when that pass came to the blocks */
    const ar_config *model;
    ari_walked blocks;
    size_t layers;
} ari_passes;
/** The caller ends it also after an error, as what is outside. */
AR_NODISCARD ar_status ari_passes_init(ari_passes *passes, const ari_planned *p, const ari_time_options *o);
void ari_passes_fini(ari_passes *passes);
/** When the last backward pass over the layers [first, first + layers) has made a parameter's gradient. */
double ari_passes_ready(const ari_passes *passes, const ari_op_param *param, size_t first, size_t layers);

/* --- outside of the passes (time_step.c) -------------------------------------------------------------------------- */

/* Ranks of a pipeline that call together: the first and the last, all, all one after the other from the last one on. */
typedef enum ari_across { ARI_ACROSS_NONE, ARI_ACROSS_ENDS, ARI_ACROSS_ALL, ARI_ACROSS_CHAIN } ari_across;
/* A call after the passes, or products. */
typedef struct ari_outside_call {
    ari_op_param last; /* of a bucket: the gradient that completes it; layer: which of the rank's */
    double seconds;
    ari_across across;
    bool bucket, overlapped, after; /* after: when all buckets are summed */
} ari_outside_call;
/* Work of a pipeline rank outside the passes. */
typedef struct ari_outside_rank {
    ari_outside_call *call; /* [n] in their order */
    size_t n, room;         /* room: 0 where they are those of a rank that does the same */
    double before;          /* seconds before the passes */
    double sums;            /* of buckets */
    double stages;          /* of the others, over the ranks of a pipeline */
    ari_traffic moved;
} ari_outside_rank;
typedef struct ari_outside {
    ari_outside_rank *rank; /* [n] */
    size_t n;
    int virtual_stages; /* of its layout */
} ari_outside;
/** other: that of a layout that differs from p in its virtual stages alone, which is to live as long; NULL: none is
 *  known. */
AR_NODISCARD ar_status ari_outside_init(ari_outside *s, const ari_planned *p, const ari_time_options *o,
                                        const ari_outside *other);
void ari_outside_fini(ari_outside *s);

/* --- stages and ranks (time.c, time_sums.c) ----------------------------------------------------------------------- */

/* The last backward pass of a stage. */
typedef struct ari_last_pass {
    size_t first, layers;
    double begin, length; /* seconds since the step began, or without a pipeline since this pass did */
    double scale;         /* seconds there for one of this pass alone: of the weights' gradients they may be fewer */
    double absent;        /* seconds before the last block that only the last stage has: head and final norm */
} ari_last_pass;

typedef struct ari_span {
    double begin, end;
} ari_span;

enum { ARI_RECOMPUTED = ARI_DIRECTIONS };
typedef struct ari_composed {
    const ari_planned *p;
    const ari_time_options *o;
    const ari_passes *passes;
    const ari_outside *outside;
    const ar_pipeline_schedule *schedule;
    double alone; /* seconds of the schedule without transfers; 0: not known */
    ari_time *t;
    double beside;                             /* seconds of weights and gradients on their way that products hide */
    double micro;                              /* micro-batches */
    double recomputed_share;                   /* of the layers, by formula; 0: nothing */
    bool recomputes_blocks, recomputes_scores; /* of what is computed again: blocks, or only scores */
    ari_span last[AR_MAX_STAGES];     /* of a pipeline's stage: its last pass that makes gradients of weights */
    double ends[AR_MAX_STAGES];       /* of its ranks, seconds since the first began */
    double end;                       /* of the last one's last pass */
    const ari_last_pass *pass;        /* [stages] */
    double layer[ARI_RECOMPUTED + 1]; /* seconds of its last pass; and before that of its forward pass again */
    double gather[ARI_MODEL_PARTS], scatter[ARI_MODEL_PARTS]; /* ZeRO-3: of a block, or of what is outside */
} ari_composed;
/** Time that recomputation adds to a section's pass of one of ARI_OF_*: forward once more, communication included. */
ari_cost ari_composed_again(const ari_composed *c, int micro, size_t section);
/** Adds what follows the passes; busy: seconds of the rank that has most to do in them. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_composed_sums(ari_composed *c, double busy);

/* --- together (time.c) -------------------------------------------------------------------------------------------- */

/** The case of the list of operations for a rank of a pipeline; *config as below. */
ari_step_case ari_time_rank_case(const ari_planned *p, const ari_time_options *o);
/** The case for all layers, which ari_time_compose shares out to stages. *config is p's, and is borrowed. */
ari_step_case ari_time_case(const ari_planned *p, const ari_time_options *o, const ar_config *config);
/** Bytes of an element of an operation's call. */
double ari_time_element(const ari_time_options *o, const ari_operation *op, const ari_op_call *call);
/** schedule: the layout's (ari_parallel_schedule). alone: as below; 0: it is not
 *  known. Errors: AR_ERR_OVERFLOW, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_time_compose(ari_time *t, const ari_planned *p, const ari_time_options *o,
                                        const ari_passes *passes, const ari_outside *outside,
                                        const ar_pipeline_schedule *schedule, double alone);
/** Seconds of a pipeline's schedule without transfers. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_time_alone(double *seconds, const ari_planned *p, const ari_time_options *o,
                                      const ari_passes *passes, const ar_pipeline_schedule *schedule);
/** Seconds that a step takes at least, without going through the schedule of a pipeline: a rank can begin when the ranks
 *  before it have gone forward, what it has done last still goes back to them, and a micro-batch goes through all stages
 *  and back. */
double ari_time_least(const ari_planned *p, const ari_time_options *o, const ari_passes *passes);
/** A row of one kind of call. */
void ari_traffic_count(ari_traffic *m, ari_time_kind over, const char *call, const ari_links *l, double calls,
                       double bytes, double seconds);
/** Adds `times` of all rows of `from`, each to that of the same call, group and link. */
void ari_traffic_add(ari_traffic *to, const ari_traffic *from, double times);
