/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of a step's time: links, passes, sums over ranks. A search keeps the parts that layouts share. */
#ifndef ARI_PLANNER_TIME_IMPL_H
#define ARI_PLANNER_TIME_IMPL_H

#include "planner/time.h"

/* --- groups and links (time_link.c) ------------------------------------------------------------------------------- */

/* Ranks that call together, and how they lie on the nodes. */
typedef struct ari_links {
    const ari_time_options *o;
    double n, in_node; /* members; of them neighbours in a node */
    bool inside, between;
} ari_links;
/** Links of a group of the list of operations. */
ari_links ari_links_of(const ari_planned *p, const ari_time_options *o, ari_over g);
/** Links among the ranks that share out under ZeRO, and among those with the same share of several replicas. */
ari_links ari_links_of_shares(const ari_planned *p, const ari_time_options *o);
ari_links ari_links_of_replicas(const ari_planned *p, const ari_time_options *o);
/** Whose time a group's calls are. */
ari_time_kind ari_time_kind_of(ari_over g);
/** Seconds of a collective of so many elements in full length, all members coming at once. */
double ari_links_call(const ari_links *l, ari_call_kind kind, double elements, double element_bytes);
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

/* The parts of a model, and seconds in them. */
typedef enum ari_model_part { ARI_PART_BEFORE, ARI_PART_BLOCKS, ARI_PART_AFTER, ARI_MODEL_PARTS } ari_model_part;
typedef struct ari_cost {
    double products, attention;
    double over[ARI_TIME_KINDS]; /* of calls of the main queue */
    double recompute; /* of products and attention, those of what is computed again: by the list of operations */
    double weights;   /* of all of them, those of gradients of weights */
} ari_cost;
double ari_cost_sum(const ari_cost *c);
void ari_cost_add(ari_cost *to, const ari_cost *c, double times);

enum { ARI_GOES_FORWARD, ARI_GOES_BACKWARD, ARI_DIRECTIONS };
typedef struct ari_passes {
    ari_cost mean[ARI_DIRECTIONS][ARI_MODEL_PARTS]; /* of a rank's micro-batches; of all layers */
    ari_cost last[ARI_DIRECTIONS][ARI_MODEL_PARTS]; /* of the last micro-batch */
    double hidden[ARI_MODEL_PARTS];                 /* seconds of calls beside products, of a micro-batch */
    double parameters[ARI_MODEL_PARTS];             /* of this rank, of all layers */
    double experts[ARI_MODEL_PARTS];                /* of them, those of experts, where they have copies of their own */
    ari_traffic moved[ARI_MODEL_PARTS];             /* of a micro-batch */
    /* [blocks + 1][ARI_ROLES]: when the last backward pass has made a module's gradients, since its block began; behind
     * the blocks, of what is outside of them, since the pass began. */
    double *ready;
    double begun; /* when that pass came to the blocks */
    const ar_config *model;
    ari_walked blocks;
    size_t layers;
} ari_passes;
AR_NODISCARD ar_status ari_passes_init(ari_passes *passes, const ari_planned *p, const ari_time_options *o);
void ari_passes_fini(ari_passes *passes);
/** Seconds of a micro-batch's passes through all layers. */
double ari_passes_seconds(const ari_passes *passes);
/** When the last backward pass over the layers [first, first + layers) has made a parameter's gradient. */
double ari_passes_ready(const ari_passes *passes, const ari_op_param *param, size_t first, size_t layers);

/* --- what ZeRO-3 gathers and scatters together (time_unit.c) ------------------------------------------------------ */

/* A unit's weights that ranks share out, and those among which they do: of experts those with the same ones. */
enum { ARI_OF_ALL, ARI_OF_EXPERTS, ARI_SHARED_OUT };
typedef struct ari_shared_unit {
    ari_links links[ARI_SHARED_OUT], copies[ARI_SHARED_OUT]; /* copies: those with the same shares */
    double n[ARI_SHARED_OUT];
    double sum_width; /* bytes of a gradient on its way */
} ari_shared_unit;
/** That of a part of the model: a block, or what is outside. */
ari_shared_unit ari_shared_unit_of(const ari_planned *p, const ari_time_options *o, const ari_passes *passes, int part);
/** Seconds of a collective of them, an all-reduce being that of its shares over the ranks that have the same ones; counts
 *  so many of it, unless moved is NULL. */
double ari_shared_unit_call(ari_traffic *moved, const ari_shared_unit *u, ari_call_kind kind, double times);

/* --- stages (time_stages.c) --------------------------------------------------------------------------------------- */

typedef struct ari_span {
    double begin, end;
} ari_span;
typedef struct ari_stages_run {
    int ranks;
    double end;                   /* of the last rank's last pass, in seconds since the first began */
    ari_span last[AR_MAX_STAGES]; /* of each stage: of the last pass that makes gradients of weights */
} ari_stages_run;
/** A pipeline's ranks through a schedule whose stages take `times` for a micro-batch. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_stages_run_of(ari_stages_run *out, const ar_pipeline_schedule *s, const ar_pp_times *times);

/* --- outside of the passes (time_step.c) -------------------------------------------------------------------------- */

typedef struct ari_bucket_cost {
    ari_op_param last;
    double seconds;
    bool overlapped;
} ari_bucket_cost;
/* Work of a pipeline rank outside the passes. */
typedef struct ari_outside_rank {
    ari_bucket_cost *bucket; /* [n] in the order of their sums */
    size_t n, room;
    double before, loss, after; /* seconds of the main queue: before the passes, after them, after the buckets */
    double stages;              /* of these, over the ranks of a pipeline */
    ari_traffic moved;
} ari_outside_rank;
typedef struct ari_outside {
    ari_outside_rank *rank; /* [n] */
    size_t n;
    int virtual_stages; /* of its layout */
} ari_outside;
/** other: that of a layout that differs from p in its virtual stages alone; NULL: none is known. */
AR_NODISCARD ar_status ari_outside_init(ari_outside *s, const ari_planned *p, const ari_time_options *o,
                                        const ari_outside *other);
void ari_outside_fini(ari_outside *s);

/* --- together (time.c) -------------------------------------------------------------------------------------------- */

/** The case of the list of operations for a rank of a pipeline; *config as below. */
ari_step_case ari_time_rank_case(const ari_planned *p, const ari_time_options *o);
/** The case for all layers, which ari_time_compose shares out to stages. *config is p's, and is borrowed. */
ari_step_case ari_time_case(const ari_planned *p, const ari_time_options *o, const ar_config *config);
/** Bytes of an element of an operation's call. */
double ari_time_element(const ari_time_options *o, const ari_operation *op, const ari_op_call *call);
/** schedule: the layout's (ar_parallel_schedule). alone: as below; 0: it is not known. Errors: AR_ERR_OVERFLOW, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_time_compose(ari_time *t, const ari_planned *p, const ari_time_options *o,
                                        const ari_passes *passes, const ari_outside *outside,
                                        const ar_pipeline_schedule *schedule, double alone);
/** Seconds of a pipeline's schedule without transfers. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_time_alone(double *seconds, const ari_planned *p, const ari_time_options *o,
                                      const ari_passes *passes, const ar_pipeline_schedule *schedule);
/* Seconds that a step takes at least, without going through the schedule of a pipeline. */
typedef struct ari_time_bounds {
    double passes; /* a rank can begin when the ranks before it have gone forward, and what it has done last still goes
                      back to them */
    double step;   /* a micro-batch goes through all stages and back; and with_sums the first rank's gradients are
                      summed and its weights gathered, in one bucket, beside its last backward pass */
} ari_time_bounds;
/** alone: as above; 0: it is not known. passes: of so many micro-batches; without sums it may be a number that divides
 *  p's: of more, each only adds latencies and rounds up. */
ari_time_bounds ari_time_least(const ari_planned *p, const ari_time_options *o, const ari_passes *passes, int micros,
                               bool with_sums, double alone);
/** A row of one kind of call. */
void ari_traffic_count(ari_traffic *m, ari_time_kind over, const char *call, const ari_links *l, double calls,
                       double bytes, double seconds);
/** Adds `times` of all rows of `from`, each to that of the same call, group and link. */
void ari_traffic_add(ari_traffic *to, const ari_traffic *from, double times);

#endif
