/* SPDX-License-Identifier: Apache-2.0 */
/* Compares a run with fault-free dry runs of its ranks: memory, shapes of reported tensors, and collectives. */
#include <stdio.h>
#include <string.h>

#include "ref/comm/call.h"
#include "ref/core/axis.h"
#include "ref/core/record.h"
#include "ref/core/text.h"
#include "verify/check/check_run.h"

/* --- routes ------------------------------------------------------------------------------------------------------- */

/* Routes for the dry runs: the baseline's, if ranks choose experts as the baseline does. */
typedef struct dry_routes {
    ari_step_case step;
    ari_routed_rank rank;
    ari_known_routes routes;
} dry_routes;

/* Gives *o's dry runs the baseline's routes. */
static void use_routes(dry_routes *r, ari_cluster_options *o, const ari_reference *ref)
{
    r->step = (ari_step_case){.run = o->run, .config = o->config};
    r->rank = (ari_routed_rank){.ref = ref, .c = &r->step};
    r->routes = (ari_known_routes){ari_check_read_routes, &r->rank};
    o->routes = &r->routes;
}

static bool has_experts(const ari_cluster_options *o)
{
    return !o->module && o->config && o->config->experts.n > 0;
}

/* --- shapes ------------------------------------------------------------------------------------------------------- */

/* Shape of a rank's part of a tensor; rows of several micro-batches are added up. */
typedef struct dry_shape {
    bool reported;
    int ndim;
    size_t shape[AR_MAX_DIMS];
} dry_shape;

typedef struct dry_shapes {
    const ari_reference *ref;
    dry_shape *tensor; /* [ref->count] */
} dry_shapes;

static ar_status keep_shape(void *user, const ar_tap_event *e)
{
    const dry_shapes *s = user;
    const size_t i = ari_reference_find_in(s->ref, e->name, e->pass, (int)e->step);
    if (i == s->ref->count)
        return AR_OK;
    dry_shape *t = &s->tensor[i];
    if (t->reported && t->ndim > 0) {
        t->shape[0] += e->local->shape[0];
        return AR_OK;
    }
    *t = (dry_shape){.reported = true, .ndim = e->local->ndim};
    memcpy(t->shape, e->local->shape, sizeof t->shape);
    return AR_OK;
}

/* Compares the shapes of a rank's tensors in the run with those in its dry run. */
static void compare_shapes(ar_check_run *run, const dry_shapes *s, int rank, const ari_finding *found)
{
    for (size_t i = 0; i < s->ref->count; i++) {
        const dry_shape *t = &s->tensor[i];
        const ari_finding *f = &found[i];
        if (!t->reported || f->misshapen)
            continue;
        run->shapes++;
        if ((f->is_reported && ari_same_extents(f->ndim, f->shape, t->ndim, t->shape)) || run->shape_difference[0])
            continue;
        snprintf(run->shape_difference, sizeof run->shape_difference,
                 "rank %d holds %s of %s%s, the layout has %s there", rank,
                 ARI_SHOW_INDEX(f->is_reported ? f->ndim : 0, f->shape), s->ref->tensor[i].name,
                 ari_pass_suffix(s->ref->tensor[i].pass), ARI_SHOW_INDEX(t->ndim, t->shape));
    }
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

void ari_memory_raise(ar_rank_memory *most, const ar_rank_memory *m)
{
#define RAISE(field, json, title) most->field = m->field > most->field ? m->field : most->field;
    AR_RANK_MEMORY_TABLE(RAISE)
#undef RAISE
}

static void compare_memory(ar_check_run *run, int rank, const ar_rank_memory *counted, const ar_rank_memory *predicted)
{
#define COMPARE(field, json, title)                                                                                    \
    if (!run->memory_difference[0] && counted->field != predicted->field)                                              \
        snprintf(run->memory_difference, sizeof run->memory_difference,                                                \
                 "memory of rank %d, %s: %zu bytes are counted, the layout predicts %zu", rank, title, counted->field, \
                 predicted->field);
    AR_RANK_MEMORY_TABLE(COMPARE)
#undef COMPARE
}

/* Returns true if a dry run predicts the run's shapes. It does not for a body that is not a model, batches of different
 * sizes, or a batch's masks, positions and documents. */
static bool is_predicted(const ari_cluster_options *o)
{
    bool plain = !o->body;
    if (o->module) /* a dry run of a module has the batches themselves */
        return true;
    for (size_t i = 0; plain && i < ari_run_steps(&o->run); i++) {
        const ar_batch *b = &o->batch[i];
        plain = b->batch == o->batch->batch && b->seq == o->batch->seq && !b->padding_mask && !b->additive_mask &&
                !b->position_ids && !b->documents;
    }
    return plain;
}

/* Compares one rank's dry run with its counted and reported figures. has_known_routes: the dry run uses the run's
 * experts. */
static ar_status check_rank(ar_check_run *run, const ari_cluster_options *o, const ari_comparator *rank, int r,
                            dry_shapes *shapes, const ar_rank_memory *counted, const ar_device *like,
                            bool has_known_routes)
{
    ari_cluster_options options = *o;
    ari_dry_memory dry;
    ARI_OWNED void **user = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&user, (size_t)r + 1, "listeners"));
    user[r] = shapes;
    options.dry = o->tap != NULL;
    options.tap = o->tap ? keep_shape : NULL;
    options.tap_user = user;
    memset(shapes->tensor, 0, shapes->ref->count * sizeof *shapes->tensor);
    AR_TRY(ari_cluster_dry(&dry, &options, r, like));
    ari_memory_raise(&run->memory_predicted, &dry.rank);
    if (has_known_routes)
        compare_memory(run, r, counted, &dry.rank);
    if (has_known_routes && !o->module && shapes->ref->padding == 0) /* a module's shapes may depend on the layout */
        compare_shapes(run, shapes, r, rank->finding);
    if (o->module && dry.routed.rows + dry.routed.gradients > 0)
        run->has_memory_predicted = false;
    else if (o->module)
        run->bytes_predicted += dry.bytes;
    return AR_OK;
}

/* like: the source of the ranks' operands and blocks; NULL: the CPU device. Activations of experts that ranks share
 * depend on the routes. So do a GPU's operands, whose parts are copies where an expert's rows begin inside a tile. Both
 * are compared only if the routes are the baseline's, otherwise they are not predicted. */
static ar_status check_ranks(ar_check_run *run, const ari_comparator *ranks, const ari_cluster_options *o,
                             const ar_rank_memory *counted, const ar_device *like)
{
    const ari_reference *ref = ranks[0].reference;
    const bool exact = o->run.numerics == AR_NUMERICS_EXACT;
    const bool shared = exact && ari_expert_sequence(&o->run.parallel) > 1;
    const bool routed = has_experts(o) && (ari_experts_routed(&o->run.parallel) || shared || like);
    const bool has_known_routes = !routed || (exact && run->tensors_different == 0);
    dry_routes routes;
    ari_cluster_options options = *o;
    ARI_OWNED dry_shape *tensor = NULL;
    AR_TRY(ARI_ALLOC(&tensor, ref->count, "shapes of a rank"));
    dry_shapes shapes = {ref, tensor};
    options.routes = NULL;
    if (routed && has_known_routes)
        use_routes(&routes, &options, ref);
    for (int r = 0; r < ar_parallel_world(&o->run.parallel); r++) {
        routes.rank.rank = r;
        ari_memory_raise(&run->memory, &counted[r]);
        if (run->has_memory_predicted)
            AR_TRY(check_rank(run, &options, &ranks[r], r, &shapes, &counted[r], like, has_known_routes));
    }
    if (!has_known_routes && run->has_memory_predicted)
        run->unpredicted = "the routes of tokens decide what a rank has of experts, and rounding or a difference may "
                           "send a token to another one than on one rank";
    else if (!run->has_memory_predicted)
        run->unpredicted = o->module
                               ? "a module's tokens are routed to experts, and no dry run knows where"
                               : "batches of several sizes, masks, positions and packed documents have no dry run";
    run->has_memory_predicted = run->has_memory_predicted && has_known_routes;
    return AR_OK;
}

ar_status ari_check_memory(ar_check_run *run, const ari_comparator *ranks, const ari_cluster_options *o,
                           const ar_rank_memory *counted)
{
    ARI_OWNED_BY(ar_device_destroy) ar_device *like = NULL;
    run->has_memory_predicted = is_predicted(o);
    if (run->has_memory_predicted && o->run.device.kind != AR_DEVICE_CPU)
        AR_TRY(ar_device_create(&like, &o->run.device, 1));
    return check_ranks(run, ranks, o, counted, like);
}

/* --- collectives -------------------------------------------------------------------------------------------------- */

const char *const ari_call_causes[ARI_CALL_CAUSES] = {[ARI_CALL_REPEATED] = "collective_repeated",
                                                      [ARI_CALL_ADDED] = "collective_added",
                                                      [ARI_CALL_LEFT_OUT] = "collective_left_out"};

enum { CALL_TEXT = 320 };

/* A collective of a run or of a dry run. */
typedef struct described_call {
    ari_kind kind;
    int ranks;
    size_t count;   /* elements */
    uint64_t bytes; /* bytes that the rank moves */
    ar_dtype dtype;
    const char *tag;
} described_call;

/* Describes a call. A hop of a ring counts messages, and its tag says which message arrives; the text has the number of
 * elements and the layer's name. */
static void describe_call(char text[CALL_TEXT], const described_call *c)
{
    const char *hop = c->kind == ARI_EXCHANGE ? strstr(c->tag, ": hop ") : NULL;
    snprintf(text, CALL_TEXT, "%s of %d ranks, %zu %s, '%.*s'", ari_kind_name(c->kind), c->ranks,
             hop ? (size_t)c->bytes / ar_dtype_bytes(c->dtype) : c->count, ar_dtype_name(c->dtype),
             (int)(hop ? hop - c->tag : (ptrdiff_t)strlen(c->tag)), c->tag);
}

/* The calls of one queue of a rank: recorded in the run, and expected from the dry run. */
typedef struct queue_calls {
    const ari_trace_lane *lane;
    const ari_ledger *ledger;
    size_t recorded, expected; /* indices of the next calls */
} queue_calls;

static bool is_move(const ari_record *r)
{
    return r->kind == ARI_RECORD_COLLECTIVE && r->op_kind != ARI_SPLIT && r->ranks > 1;
}

/* Describes the run's next call; returns false at the end, which the text then says. */
static bool next_recorded(queue_calls *q, char text[CALL_TEXT])
{
    while (q->recorded < q->lane->count) {
        const ari_record *r = &q->lane->records[q->recorded++];
        if (!is_move(r))
            continue;
        describe_call(text,
                      &(described_call){(ari_kind)r->op_kind, r->ranks, r->count, r->bytes_read, r->dtype, r->name});
        return true;
    }
    snprintf(text, CALL_TEXT, "nothing more");
    return false;
}

/* The rank's thread is the queue "main" of a dry run. */
static bool is_queue_of(const ari_trace_lane *lane, const ari_ledger_call *c)
{
    return strcmp(lane->track == 0 ? "main" : lane->name, c->queue) == 0;
}

static bool next_expected(queue_calls *q, char text[CALL_TEXT])
{
    while (q->expected < q->ledger->calls) {
        const ari_ledger_call *c = &q->ledger->call[q->expected++];
        if (!is_queue_of(q->lane, c))
            continue;
        describe_call(text, &(described_call){(ari_kind)c->kind, c->ranks, c->count, c->bytes, c->dtype, c->tag});
        return true;
    }
    snprintf(text, CALL_TEXT, "nothing more");
    return false;
}

/* Counts how many of the run's next calls have the description `text`. */
static size_t count_alike(queue_calls q, const char *text)
{
    char recorded[CALL_TEXT];
    size_t n = 0;
    while (next_recorded(&q, recorded) && strcmp(recorded, text) == 0)
        n++;
    return n;
}

static bool comes_later(queue_calls q, const char *text)
{
    char recorded[CALL_TEXT];
    while (next_recorded(&q, recorded)) {
        if (strcmp(recorded, text) == 0)
            return true;
    }
    return false;
}

/* Compares the calls of a queue. Errors: AR_ERR_DATA at the first difference, with its cause. */
static ar_status compare_queue(const char **cause, int rank, queue_calls q)
{
    char expected[CALL_TEXT] = "", recorded[CALL_TEXT] = "", before[CALL_TEXT] = "";
    do {
        memcpy(before, expected, sizeof before);
        const bool expects = next_expected(&q, expected), records = next_recorded(&q, recorded);
        if (!expects && !records)
            return AR_OK;
    } while (strcmp(expected, recorded) == 0);
    if (strcmp(recorded, before) == 0) {
        *cause = ari_call_causes[ARI_CALL_REPEATED];
        return ar_error_set(AR_ERR_DATA,
                            "rank %d: %s is made %zu times more than the layout has it: its result was there already, "
                            "and each time costs what the first one did",
                            rank, recorded, 1 + count_alike(q, recorded));
    }
    const bool added = strcmp(expected, "nothing more") == 0 || comes_later(q, expected);
    *cause = ari_call_causes[added ? ARI_CALL_ADDED : ARI_CALL_LEFT_OUT];
    return ar_error_set(AR_ERR_DATA, "rank %d: the layout has %s, the run %s", rank, expected, recorded);
}

/* Compares every queue of a rank. */
static ar_status compare_calls(const char **cause, const ar_trace *t, const ari_ledger *ledger, int rank)
{
    for (size_t i = 0; i < ari_trace_lanes(t); i++) {
        const ari_trace_lane lane = ari_trace_lane_at(t, i);
        if (lane.rank == rank)
            AR_TRY(compare_queue(cause, rank, (queue_calls){.lane = &lane, .ledger = ledger}));
    }
    return AR_OK;
}

ar_status ari_recorded_calls(const char **cause, const ari_reference *ref, const ari_cluster_options *o,
                             const ar_trace *t)
{
    ari_cluster_options options = *o;
    dry_routes routes;
    *cause = NULL;
    options.routes = NULL;
    if (ref && has_experts(o))
        use_routes(&routes, &options, ref);
    for (int rank = 0; rank < ar_parallel_world(&o->run.parallel); rank++) {
        ARI_ENDED(ari_ledger_fini) ari_ledger ledger = {.pass = 's'};
        ari_dry_memory unused;
        routes.rank.rank = rank;
        options.ledger = &ledger;
        AR_TRY(ari_cluster_dry(&unused, &options, rank, NULL));
        AR_TRY(compare_calls(cause, t, &ledger, rank));
    }
    return AR_OK;
}
