/* SPDX-License-Identifier: Apache-2.0 */
/* The collectives of a recorded run beside those of the list of operations, one by one; and its products. */
#include "verify/check/check_run.h"

#include <stdio.h>
#include <string.h>

#include "ref/comm/call.h"
#include "ref/core/axis.h"
#include "ref/core/record.h"
#include "verify/lint/flow.h"

const char *const ari_call_causes[ARI_CALL_CAUSES] = {[ARI_CALL_REPEATED] = "collective_repeated",
                                                      [ARI_CALL_ADDED] = "collective_added",
                                                      [ARI_CALL_LEFT_OUT] = "collective_left_out"};

/* A rank's recorded calls, and the progress of their comparison. */
typedef struct rank_trace {
    const ari_step_case *c;
    int rank;
    ari_trace_lane lane[ARI_CALL_QUEUES];
    size_t next[ARI_CALL_QUEUES];
    bool later; /* than the first step */
    double multiply_adds;
    char last[ARI_CALL_QUEUES][320]; /* the call before, which was as listed */
    const char *cause;               /* of the first difference */
} rank_trace;

/* Calls that combine or move values between different ranks; a split of groups moves none. */
static const ari_record *next_call(rank_trace *t, int lane)
{
    while (t->next[lane] < t->lane[lane].count) {
        const ari_record *r = &t->lane[lane].records[t->next[lane]++];
        if (r->kind == ARI_RECORD_COLLECTIVE && r->op_kind != ARI_SPLIT && r->ranks > 1)
            return r;
    }
    return NULL;
}

/* A hop of a ring: the count is of messages, and its name says besides the layer what arrives. */
static bool is_hop(const ari_record *r)
{
    return r->op_kind == ARI_EXCHANGE && strstr(r->name, ": hop ") != NULL;
}

static void describe_call(char *text, size_t cap, const ari_record *r)
{
    if (!r) {
        snprintf(text, cap, "nothing more");
        return;
    }
    const size_t elements = is_hop(r) ? (size_t)r->bytes_read / ar_dtype_bytes(r->dtype) : r->count;
    const int named = (int)(is_hop(r) ? strstr(r->name, ": hop ") - r->name : (ptrdiff_t)strlen(r->name));
    snprintf(text, cap, "%s of %d ranks, %zu %s, '%.*s'", ari_kind_name((ari_kind)r->op_kind), r->ranks, elements,
             ar_dtype_name(r->dtype), named, r->name);
}

/* The number of consecutive calls with this text from here on. */
static size_t count_alike(rank_trace *t, int lane, const char *text)
{
    char other[320];
    for (size_t n = 0;; n++) {
        describe_call(other, sizeof other, next_call(t, lane));
        if (strcmp(other, text) != 0)
            return n;
    }
}

/* True if a call with this text comes later. */
static bool comes_later(rank_trace *t, int lane, const char *text)
{
    char other[320];
    const ari_record *r = next_call(t, lane);
    for (; r; r = next_call(t, lane)) {
        describe_call(other, sizeof other, r);
        if (strcmp(other, text) == 0)
            return true;
    }
    return false;
}

static ar_status say_difference(rank_trace *t, const ari_operation *op, int lane, const char *listed,
                                const char *recorded)
{
    if (strcmp(recorded, t->last[lane]) == 0) {
        t->cause = ari_call_causes[ARI_CALL_REPEATED];
        return ar_error_set(AR_ERR_DATA,
                            "rank %d: %s is made %zu times more than the layout has it: its result was "
                            "there already, and each time costs what the first one did",
                            t->rank, recorded, 1 + count_alike(t, lane, recorded));
    }
    t->cause = ari_call_causes[comes_later(t, lane, listed) ? ARI_CALL_ADDED : ARI_CALL_LEFT_OUT];
    char layer[32] = "outside the blocks";
    if (op->layer != ARI_NO_LAYER)
        snprintf(layer, sizeof layer, "layer %zu", op->layer);
    return ar_error_set(AR_ERR_DATA, "rank %d, %s, %s: the layout has %s, the run %s", t->rank, layer,
                        ari_operation_name(op->kind), listed, recorded);
}

static ar_status compare_call(rank_trace *t, const ari_operation *op, const ari_op_call *call, size_t expert,
                              size_t chunk)
{
    const int lane = (int)call->queue;
    char tag[200], listed[320], recorded[320];
    ari_operation_tag(tag, sizeof tag, t->c->config, op, call, expert);
    /* An all-to-all has a count for each rank, and its record none: the bytes of a run are compared elsewhere. */
    const size_t elements = call->kind == ARI_CALL_ALL_TO_ALL ? 0 : ari_call_chunk(call, chunk);
    snprintf(listed, sizeof listed, "%s of %zu ranks, %zu %s, '%s'", ari_call_name(call->kind), call->ranks, elements,
             ar_dtype_name(call->dtype), tag);
    describe_call(recorded, sizeof recorded, next_call(t, lane));
    if (strcmp(listed, recorded) != 0)
        return say_difference(t, op, lane, listed, recorded);
    snprintf(t->last[lane], sizeof t->last[lane], "%s", recorded);
    return AR_OK;
}

static ar_status compare_operation(void *user, const ari_operation *op)
{
    rank_trace *t = user;
    if (op->pass == ARI_PASS_START && t->later)
        return AR_OK;
    for (int i = 0; i < op->calls; i++) {
        const ari_op_call *call = &op->call[i];
        const size_t chunks = ari_call_chunks(call);
        for (size_t k = 0; k < call->repeats * chunks; k++)
            AR_TRY(compare_call(t, op, call, k / chunks, k % chunks));
    }
    t->multiply_adds += op->multiply_adds;
    return AR_OK;
}

static ar_status compare_end(rank_trace *t, bool timed)
{
    double flops = 0.0;
    for (int i = 0; i < ARI_CALL_QUEUES; i++) {
        char left[320];
        const ari_record *r = next_call(t, i);
        describe_call(left, sizeof left, r);
        t->cause = !r ? NULL : ari_call_causes[strcmp(left, t->last[i]) == 0 ? ARI_CALL_REPEATED : ARI_CALL_ADDED];
        if (r)
            return ar_error_set(AR_ERR_DATA, "rank %d: the layout's calls end, the run has %s", t->rank, left);
        for (size_t k = 0; k < t->lane[i].count; k++)
            flops += t->lane[i].records[k].flops;
    }
    const bool routed = ari_experts_routed(&t->c->run.parallel); /* products of as many rows as come */
    if (timed && !routed && flops != 2.0 * t->multiply_adds)
        return ar_error_set(AR_ERR_DATA, "rank %d: %.0f multiply-adds are listed, the run's products are %.0f flops",
                            t->rank, t->multiply_adds, flops);
    return AR_OK;
}

/* The tracks of a rank are its main thread and its queues, by their names. */
static ari_call_queue queue_of(const ari_trace_lane *lane)
{
    if (lane->track == 0)
        return ARI_ON_MAIN;
    for (int q = ARI_ON_TP; q < ARI_CALL_QUEUES; q++) {
        if (strcmp(lane->name, ari_call_queue_name((ari_call_queue)q)) == 0)
            return (ari_call_queue)q;
    }
    return ARI_ON_BUCKETS;
}

static ar_status compare_rank(rank_trace *r, const ari_step_case *c, const ar_trace *t)
{
    const uint64_t steps = c->run.steps > 0 ? c->run.steps : 1;
    for (size_t i = 0; i < ari_trace_lanes(t); i++) {
        const ari_trace_lane lane = ari_trace_lane_at(t, i);
        if (lane.rank == r->rank)
            r->lane[queue_of(&lane)] = lane;
    }
    for (uint64_t s = 0; s < steps; s++) {
        r->later = s > 0;
        AR_TRY(ari_operations(c, ARI_OPS_STEP, r->rank, compare_operation, r));
    }
    return compare_end(r, ari_trace_is_virtual(t));
}

ar_status ari_recorded_calls(const char **cause, const ari_step_case *c, const ar_trace *t)
{
    ar_status st = AR_OK;
    *cause = NULL;
    for (int rank = 0; st == AR_OK && rank < ar_parallel_world(&c->run.parallel); rank++) {
        rank_trace r = {.c = c, .rank = rank};
        st = compare_rank(&r, c, t);
        *cause = r.cause;
    }
    return st;
}
