/* SPDX-License-Identifier: Apache-2.0 */
/* Runs a step's micro-batches through the stages of a pipeline's rank, in the order of the schedule. */
#include <stdlib.h>

#include "anyrank/queue.h"
#include "ref/comm/comm_private.h"
#include "ref/context/context_private.h"
#include "ref/core/queue_impl.h"
#include "ref/core/record.h"
#include "ref/layers/parts.h"
#include "ref/models/parallel_private.h"
#include "ref/pipeline/schedule_private.h"
#include "ref/record/ledger.h"
#include "ref/train/faults.h"
#include "ref/train/step.h"
#include "ref/train/units.h"

ARI_OWNER(ar_pipeline_schedule, ari_pipeline_schedule_destroy)

/* Directions in which values pass a stage. */
typedef enum direction { FORWARD, BACKWARD, DIRECTIONS } direction;
typedef struct flow {
    ar_tensor input, output; /* values from and for a neighbouring stage */
    ar_event *ready;         /* recorded when the input is there */
    ar_buf memory;           /* memory of the output until its send starts; afterwards it does not belong to the step */
} flow;

/* A micro-batch's slot in a stage. Memory of both its passes forms one lifetime. */
typedef struct slot {
    flow flow[DIRECTIONS];
    ar_saved *saved;       /* between the passes */
    ari_deferred deferred; /* state between the backward pass for the input and the one for the weights */
} slot;

/* Memory of a value that is being sent. */
typedef struct send_buffer {
    struct send_buffer *next;
    ar_buf memory;
    ar_event *sent;
} send_buffer;

typedef struct pipeline {
    const ari_trained *trained;
    ar_ctx *ctx;
    const ar_batch *micro;
    size_t n, max_batches; /* number of this rank's micro-batches, and of the data-parallel rank with the most */
    const ar_train_options *o;
    ar_train_result *result;
    const ari_neighbour *transfers;
    const ar_pp_operation *schedule; /* [count] */
    size_t count;
    slot *slots;       /* [stages of the rank, n] */
    send_buffer *sent; /* values being sent, and perhaps already received */
} pipeline;

static int own_stage(const pipeline *p, const ar_pp_operation *op)
{
    return op->stage / ar_comm_size(p->ctx->pipeline);
}

static size_t slot_of(const pipeline *p, const ar_pp_operation *op)
{
    return (size_t)own_stage(p, op) * p->n + (size_t)op->micro;
}

static bool is_last_stage(const pipeline *p, const ar_pp_operation *op)
{
    return op->stage + 1 == ar_comm_size(p->ctx->pipeline) * p->ctx->layout.virtual_stages;
}

/* --- transfers ---------------------------------------------------------------------------------------------------- */

static ari_transfer transfer_of(ar_pp_kind k)
{
    return k == AR_PP_SEND_ACTIVATION   ? ARI_SEND_ACTIVATION
           : k == AR_PP_RECV_ACTIVATION ? ARI_RECV_ACTIVATION
           : k == AR_PP_SEND_GRADIENT   ? ARI_SEND_GRADIENT
                                        : ARI_RECV_GRADIENT;
}

static const char *tag_of(ari_transfer w)
{
    return w == ARI_SEND_ACTIVATION || w == ARI_RECV_ACTIVATION ? "activation" : "gradient";
}

static char pass_of(ari_transfer w)
{
    return w == ARI_SEND_ACTIVATION || w == ARI_RECV_ACTIVATION ? 'f' : 'b';
}

static flow *flow_of(const pipeline *p, const ar_pp_operation *op, ari_transfer w)
{
    return &p->slots[slot_of(p, op)].flow[w == ARI_SEND_ACTIVATION || w == ARI_RECV_ACTIVATION ? FORWARD : BACKWARD];
}

/* Starts a receive, whose memory exists from here on. */
static ar_status start_receive(pipeline *p, const ar_pp_operation *op)
{
    const ari_transfer w = transfer_of(op->kind);
    const ari_neighbour *sender = &p->transfers[w];
    ar_ctx *ctx = p->ctx;
    flow *f = flow_of(p, op, w);
    AR_TRY(ari_stage_between(p->trained->module, ctx, &f->input, &p->micro[op->micro]));
    AR_TRY(ar_event_create(&f->ready));
    AR_TRY(ari_queue_follow(sender->queue, ctx->queue, f->ready));
    AR_TRY(ar_comm_recv(sender->comm, sender->queue, f->input.data, ar_tensor_count(&f->input), f->input.dtype, 0,
                        tag_of(w)));
    const ar_placement stream = ari_placed_stream(ctx);
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_RECEIVE, .name = tag_of(w), .out = {&f->input}, .output_placement = &stream,
                    .pass = pass_of(w)));
    return ar_event_record(f->ready, sender->queue);
}

/* Waits until the input of the next pass is ready. */
static ar_status wait_for_input(const pipeline *p, flow *f)
{
    if (!f->ready)
        return AR_OK;
    AR_TRY(ar_queue_wait(p->ctx->queue, f->ready));
    ar_event_destroy(f->ready);
    f->ready = NULL;
    return AR_OK;
}

static void free_send_buffer(pipeline *p, send_buffer *s)
{
    ari_ctx_free(p->ctx, s->memory);
    ar_event_destroy(s->sent);
    free(s);
}

/* Frees the memory of received values; wait: waits for all sends first. */
static ar_status free_received(pipeline *p, bool wait)
{
    for (send_buffer **cursor = &p->sent; *cursor;) {
        send_buffer *s = *cursor;
        bool received = true;
        AR_TRY(wait ? ar_queue_wait(p->ctx->queue, s->sent) : ar_event_test(s->sent, &received));
        if (!received) {
            cursor = &s->next;
            continue;
        }
        *cursor = s->next;
        free_send_buffer(p, s);
    }
    return AR_OK;
}

/* Starts a send. A rank does not wait for its sends, or two ranks that send before they receive could wait for each
 * other. */
static ar_status start_send(pipeline *p, const ar_pp_operation *op)
{
    const ari_transfer w = transfer_of(op->kind);
    const ari_neighbour *receiver = &p->transfers[w];
    flow *f = flow_of(p, op, w);
    send_buffer *s = NULL;
    AR_TRY(free_received(p, false));
    AR_TRY(ARI_ALLOC_ZERO(&s, 1, "what is sent"));
    *s = (send_buffer){.next = p->sent, .memory = f->memory};
    f->memory = (ar_buf){NULL};
    p->sent = s;
    AR_TRY(ar_event_create(&s->sent));
    AR_TRY(ari_queue_follow(receiver->queue, p->ctx->queue, s->sent));
    AR_TRY(ar_comm_send(receiver->comm, receiver->queue, ar_const(f->output.data), ar_tensor_count(&f->output),
                        f->output.dtype, 1, tag_of(w)));
    AR_TRY(ARI_NOTE(p->ctx, .kind = ARI_LEDGER_SEND, .name = tag_of(w), .input = {&f->output}, .pass = pass_of(w)));
    return ar_event_record(s->sent, receiver->queue);
}

/* --- passes ------------------------------------------------------------------------------------------------------- */

static ar_status run_forward(pipeline *p, const ar_pp_operation *op, slot *s, int life)
{
    flow *f = &s->flow[FORWARD];
    AR_TRY(wait_for_input(p, f));
    AR_TRY(ar_saved_create(&s->saved));
    AR_TRY(ari_stage_forward(p->trained->module, p->trained->loss, p->ctx, s->saved, own_stage(p, op), &f->output,
                             &f->input, &p->micro[op->micro]));
    if (!is_last_stage(p, op))
        AR_TRY(ari_step_take_out(p->ctx, &f->memory, &f->output));
    ari_step_stored(p->ctx, &p->result->stored_bytes);
    if (p->o->forward_only)
        ari_step_end_life(p->ctx, life);
    return AR_OK;
}

static ar_status run_backward(pipeline *p, const ar_pp_operation *op, slot *s, int life)
{
    const int pieces = ari_at_least_one(p->o->parallel.micro_batches);
    flow *f = &s->flow[BACKWARD];
    AR_TRY(ari_fault_accumulated(p->trained->params, p->trained->n, p->ctx, pieces));
    AR_TRY(wait_for_input(p, f));
    if (!is_last_stage(p, op) && ari_faulty(p->ctx, "pp_stage_divides"))
        AR_TRY(ARI_KERNEL(p->ctx, scale, &f->input, &f->input, 1.0f / (float)pieces));
    AR_TRY(ari_ddp_begin_backward(p->o->ddp, own_stage(p, op), false));
    p->ctx->deferred = op->kind == AR_PP_BACKWARD_INPUT ? &s->deferred : NULL;
    const ar_status st = ari_stage_backward(p->trained->module, p->trained->loss, p->ctx, s->saved, own_stage(p, op),
                                            &f->output, &f->input, &p->micro[op->micro]);
    p->ctx->deferred = NULL;
    AR_TRY(st);
    if (op->kind == AR_PP_BACKWARD)
        AR_TRY(ari_ddp_end_backward(p->o->ddp, own_stage(p, op)));
    if (op->stage > 0)
        AR_TRY(ari_step_take_out(p->ctx, &f->memory, &f->output));
    ar_saved_destroy(s->saved);
    s->saved = NULL;
    ari_step_end_life(p->ctx, life);
    return AR_OK;
}

static ar_status run_backward_weight(pipeline *p, const ar_pp_operation *op, slot *s, int life)
{
    ari_ctx_place_batch(p->ctx, &p->micro[op->micro]);
    AR_TRY(ari_ddp_begin_backward(p->o->ddp, own_stage(p, op), true));
    AR_TRY(ari_deferred_run(p->ctx, &s->deferred));
    AR_TRY(ari_ddp_end_backward(p->o->ddp, own_stage(p, op)));
    ari_step_end_life(p->ctx, life);
    return AR_OK;
}

static bool ends_backward(ar_pp_kind k)
{
    return k == AR_PP_BACKWARD || k == AR_PP_BACKWARD_WEIGHT;
}

/* True if the stage of operation i gets gradients after it. */
static bool goes_back_again(const pipeline *p, size_t i)
{
    for (size_t k = i + 1; k < p->count; k++) {
        const ar_pp_operation *op = &p->schedule[k];
        if (op->stage == p->schedule[i].stage && ends_backward(op->kind) && (size_t)op->micro < p->n)
            return true;
    }
    return false;
}

static ar_status run_pass(pipeline *p, size_t i)
{
    static const char *const passes[AR_PP_KINDS] = {[AR_PP_FORWARD] = "fwd",
                                                    [AR_PP_BACKWARD] = "bwd",
                                                    [AR_PP_BACKWARD_INPUT] = "bwd_input",
                                                    [AR_PP_BACKWARD_WEIGHT] = "bwd_weight"};
    const ar_pp_operation *op = &p->schedule[i];
    const int life = p->ctx->life;
    slot *s = &p->slots[slot_of(p, op)];
    if (p->o->ddp && ends_backward(op->kind))
        ar_ddp_set_sync(p->o->ddp, !goes_back_again(p, i));
    ari_span_begin("stage %d micro-batch %d:%s", op->stage, op->micro, passes[op->kind]);
    return ari_span_end(op->kind == AR_PP_FORWARD           ? run_forward(p, op, s, life)
                        : op->kind == AR_PP_BACKWARD_WEIGHT ? run_backward_weight(p, op, s, life)
                                                            : run_backward(p, op, s, life));
}

/* --- the schedule ------------------------------------------------------------------------------------------------- */

static bool is_skipped(const pipeline *p, const ar_pp_operation *op)
{
    const bool is_forward =
        op->kind == AR_PP_FORWARD || op->kind == AR_PP_SEND_ACTIVATION || op->kind == AR_PP_RECV_ACTIVATION;
    return (size_t)op->micro >= p->n || (p->o->forward_only && !is_forward);
}

/* Fails an operation. The peers are waiting for messages that will not arrive. A failure of a peer has already been
 * reported. */
static ar_status fail_operation(const pipeline *p, const ar_pp_operation *op, ar_status st)
{
    if (st != AR_ERR_ABORTED) {
        const ari_outcome found = ari_outcome_of(st);
        ar_error_set(st, "stage %d, micro-batch %d, %s: %s", op->stage, op->micro, ari_pp_kind_name(op->kind),
                     found.message);
    }
    ari_comm_abort(p->ctx->world, st, ar_error_message());
    return st;
}

/* Runs a pass for a micro-batch that only other data-parallel ranks have, for the collectives that they share. */
static ar_status run_absent(pipeline *p, const ar_pp_operation *op)
{
    const int stage = own_stage(p, op);
    ar_ddp *d = p->o->ddp;
    ari_deferred nothing = {0};
    if (!d || (size_t)op->micro >= p->max_batches)
        return AR_OK;
    if (op->kind == AR_PP_FORWARD)
        return ari_ddp_absent_forward(d, stage);
    if (p->o->forward_only || op->kind > AR_PP_BACKWARD_WEIGHT)
        return AR_OK;
    if (op->kind == AR_PP_BACKWARD_WEIGHT) {
        AR_TRY(ari_ddp_begin_backward(d, stage, true));
        return ari_ddp_end_backward(d, stage);
    }
    p->ctx->deferred = op->kind == AR_PP_BACKWARD_INPUT ? &nothing : NULL;
    const ar_status st = ari_ddp_absent_backward(d, stage);
    p->ctx->deferred = NULL;
    AR_TRY(st);
    return op->kind == AR_PP_BACKWARD ? ari_ddp_end_backward(d, stage) : AR_OK;
}

static ar_status run_operation(pipeline *p, size_t i)
{
    const ar_pp_operation *op = &p->schedule[i];
    const bool skipped = is_skipped(p, op);
    p->ctx->life = skipped ? 0 : 1 + (int)slot_of(p, op);
    if (skipped)
        return run_absent(p, op);
    if (op->kind <= AR_PP_BACKWARD_WEIGHT)
        return run_pass(p, i);
    return op->kind == AR_PP_SEND_ACTIVATION || op->kind == AR_PP_SEND_GRADIENT ? start_send(p, op)
                                                                                : start_receive(p, op);
}

static ar_status run_schedule(pipeline *p)
{
    for (size_t i = 0; i < p->count; i++) {
        const ar_status st = run_operation(p, i);
        if (st != AR_OK)
            return fail_operation(p, &p->schedule[i], st);
    }
    return free_received(p, true);
}

static void destroy_pipeline(pipeline *p)
{
    p->ctx->life = 0;
    for (int w = 0; p->transfers && w < ARI_TRANSFERS; w++)
        ari_queue_drain(p->transfers[w].queue);
    while (p->sent) {
        send_buffer *s = p->sent;
        p->sent = s->next;
        free_send_buffer(p, s);
    }
    for (size_t i = 0; p->slots && i < (size_t)p->ctx->layout.virtual_stages * p->n; i++) {
        slot *s = &p->slots[i];
        for (int d = 0; d < DIRECTIONS; d++) {
            ari_ctx_free(p->ctx, s->flow[d].memory);
            ar_event_destroy(s->flow[d].ready);
        }
        ari_deferred_drop(p->ctx, &s->deferred);
        ar_saved_destroy(s->saved);
    }
    free(p->slots);
}

ar_status ari_pipeline_run(const ari_trained *trained, ar_ctx *ctx, const ar_batch *micro, size_t n, size_t max_batches,
                           const ar_train_options *o, ar_train_result *result)
{
    ARI_OWNED_BY(ari_pipeline_schedule_destroy) ar_pipeline_schedule *schedule = NULL;
    ARI_ENDED(destroy_pipeline)
    pipeline p = {
        .trained = trained, .ctx = ctx, .micro = micro, .n = n, .max_batches = max_batches, .o = o, .result = result};
    AR_TRY(ari_parallel_schedule(&schedule, &o->parallel));
    p.schedule = ari_pipeline_schedule_rank(schedule, ar_comm_rank(ctx->pipeline), &p.count);
    AR_TRY(ari_ctx_transfers(ctx, &p.transfers));
    AR_TRY(ARI_ALLOC_ZERO(&p.slots, (size_t)ctx->layout.virtual_stages * n, "micro-batches in stages"));
    return run_schedule(&p);
}
