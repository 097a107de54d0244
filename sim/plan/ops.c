/* SPDX-License-Identifier: Apache-2.0 */
/* Names of operations, collectives and queues, and properties of a single one of them. */
#include "sim/plan/ops.h"

#include "ref/core/size.h"

const char *ari_operation_name(ari_operation_kind k)
{
    static const char *const names[] = {
#define ARI_OPERATION_NAME(name, text) text,
        ARI_OPERATION_TABLE(ARI_OPERATION_NAME)
#undef ARI_OPERATION_NAME
    };
    return (unsigned)k < ARI_OPERATION_KINDS ? names[k] : "?";
}

const char *ari_call_name(ari_call_kind k)
{
    static const char *const names[] = {[ARI_CALL_ALL_REDUCE] = "all_reduce",
                                        [ARI_CALL_REDUCE_SCATTER] = "reduce_scatter",
                                        [ARI_CALL_ALL_GATHER] = "all_gather",
                                        [ARI_CALL_BROADCAST] = "broadcast",
                                        [ARI_CALL_ALL_TO_ALL] = "all_to_all",
                                        [ARI_CALL_EXCHANGE] = "exchange",
                                        [ARI_CALL_SEND] = "send",
                                        [ARI_CALL_RECV] = "recv"};
    return (unsigned)k < sizeof names / sizeof *names ? names[k] : "?";
}

const char *ari_call_queue_name(ari_call_queue q)
{
    static const char *const names[ARI_CALL_QUEUES] = {[ARI_ON_MAIN] = "main",
                                                       [ARI_ON_BUCKETS] = "buckets",
                                                       [ARI_ON_TP] = "tp",
                                                       [ARI_ON_WEIGHTS] = "weights",
                                                       [ARI_ON_SEND_ACTIVATION] = "send activations",
                                                       [ARI_ON_RECV_ACTIVATION] = "recv activations",
                                                       [ARI_ON_SEND_GRADIENT] = "send gradients",
                                                       [ARI_ON_RECV_GRADIENT] = "recv gradients"};
    return (unsigned)q < sizeof names / sizeof *names ? names[q] : "?";
}

size_t ari_axis_ranks(const ar_parallel *p, int axis)
{
    return (size_t)ari_extent(p, 1u << axis);
}

const char *ari_operation_pass_name(ari_operation_pass p)
{
    static const char *const names[] = {[ARI_PASS_START] = "start",
                                        [ARI_PASS_FORWARD] = "forward",
                                        [ARI_PASS_BACKWARD] = "backward",
                                        [ARI_PASS_STEP] = "step"};
    return (unsigned)p < sizeof names / sizeof *names ? names[p] : "?";
}

bool ari_step_recomputes(const ari_step_case *c, size_t layer)
{
    const ar_recomputation *r = &c->run.parallel.recompute;
    return r->what != AR_RECOMPUTE_NONE && layer != ARI_NO_LAYER && layer % (size_t)ari_at_least_one(r->every) == 0;
}

unsigned ari_op_parts(const ari_op_value *v)
{
    static const unsigned parts[ARI_ROLES] = {
        [ARI_Q] = 1, [ARI_K] = 2, [ARI_V] = 4, [ARI_GATE] = 1, [ARI_UP] = 6, [ARI_KV_A_NORM] = 3, [ARI_K_SHARED] = 4};
    return parts[v->role] > 0 ? parts[v->role] : 7;
}

double ari_op_elements(const ari_op_value *v)
{
    double n = v->experts > 0 ? (double)v->experts : 1.0;
    for (int d = 0; d < v->ndim; d++)
        n *= (double)v->local[d];
    return n;
}

size_t ari_call_chunks(const ari_op_call *call)
{
    return call->chunk > 0 ? (call->elements - 1) / call->chunk + 1 : 1;
}

size_t ari_call_chunk(const ari_op_call *call, size_t i)
{
    const size_t before = i * call->chunk;
    return call->elements - before < call->chunk ? call->elements - before : call->chunk;
}

ar_status ari_call_bytes(size_t *bytes, const ari_op_call *call)
{
    const size_t others = call->ranks - 1, passed[] = {[ARI_CALL_ALL_REDUCE] = 2 * others,
                                                       [ARI_CALL_REDUCE_SCATTER] = others,
                                                       [ARI_CALL_ALL_GATHER] = others,
                                                       [ARI_CALL_BROADCAST] = others,
                                                       [ARI_CALL_ALL_TO_ALL] = 1,
                                                       [ARI_CALL_EXCHANGE] = call->ranks,
                                                       [ARI_CALL_SEND] = 1,
                                                       [ARI_CALL_RECV] = 0};
    size_t product = 0;
    AR_TRY(ari_mul_size(&product, call->elements, ar_dtype_bytes(call->dtype)));
    AR_TRY(ari_mul_size(&product, product, call->repeats));
    return ari_mul_size(bytes, product, passed[call->kind]);
}
