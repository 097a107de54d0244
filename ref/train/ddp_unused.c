/* SPDX-License-Identifier: Apache-2.0 */
/* Which parameters got a gradient: on this rank, and on any. */
#include <stdio.h>

#include "ref/core/span.h"
#include "ref/train/ddp.h"
#include "ref/train/faults.h"

static bool is_missing(const ar_param *p)
{
    return p->requires_grad && !p->has_grad;
}

/* "a, b, c and 4 more". */
static void list_missing(const ar_ddp *d, size_t missing, char *text, size_t size)
{
    size_t shown = 0, used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < d->n && shown < 4 && used < size; i++) {
        if (!is_missing(d->params[i]))
            continue;
        const int n = snprintf(text + used, size - used, "%s%s", shown > 0 ? ", " : "", d->params[i]->name);
        used += n > 0 ? (size_t)n : 0;
        shown++;
    }
    if (missing > shown && used < size)
        snprintf(text + used, size - used, " and %zu more", missing - shown);
}

ar_status ari_ddp_check_all_used(const ar_ddp *d)
{
    size_t missing = 0, required = 0;
    for (size_t i = 0; i < d->trained; i++) {
        missing += is_missing(d->bucketed[i]);
        required += d->bucketed[i]->requires_grad;
    }
    if (missing == 0 || missing == required)
        return AR_OK;
    char names[600];
    list_missing(d, missing, names, sizeof names);
    return ar_error_set(AR_ERR_DATA,
                        "%s: data-parallel rank %d has no gradient for %zu of %zu parameters: %s. Leave them out "
                        "(requires_grad), or turn find_unused on",
                        d->name, ar_comm_rank(d->ctx->dp), missing, required, names);
}

static ar_status combine(void *arg, ar_queue *on)
{
    const ar_ddp *d = arg;
    ar_device *device = d->ctx->device;
    const ar_buf host = {d->used};
    ari_span_begin("used parameters");
    ar_status st = device->ops->copy(device, on, d->used_device, ar_const(host), d->trained);
    if (st == AR_OK)
        st = ar_comm_all_reduce(ari_ddp_dp(d), on, d->used_device, ar_const(d->used_device), d->trained, AR_U8, AR_MAX,
                                "used parameters");
    if (st == AR_OK)
        st = device->ops->copy(device, on, host, ar_const(d->used_device), d->trained);
    if (st == AR_OK)
        st = ar_queue_sync(on, 0); /* the host reads them */
    return ari_span_end(st);
}

static ar_status combine_or_fail(void *arg, ar_queue *on)
{
    return ari_ddp_fail_in_flight(arg, combine(arg, on));
}

ar_status ari_ddp_agree_used(ar_ddp *d)
{
    for (size_t i = 0; i < d->trained; i++)
        d->used[i] = d->bucketed[i]->has_grad && !ari_fault_left_out(&d->slots[i]);
    if (!d->used_device.ptr)
        return AR_OK;
    if (!d->communication)
        return combine_or_fail(d, d->ctx->queue);
    return ar_queue_chain(d->communication->queue, combine_or_fail, d);
}

/* Whether an optimizer shall look at the gradient. Without find_unused a rank without samples has heard of the others'
 * gradients, if there are others. */
static bool has_gradient(const ar_ddp *d, size_t i)
{
    if (!d->options.find_unused)
        return d->bucketed[i]->has_grad || d->buckets[d->slots[i].bucket].moves;
    return d->used[i] || d->bucketed[i]->has_grad || ar_faulty(d->ctx, AR_FAULT_unused_set_empty);
}

void ari_ddp_complete(ar_ddp *d, ar_op op)
{
    const ar_ctx *ctx = d->ctx;
    const int ranks = ar_comm_size(ar_faulty(ctx, AR_FAULT_mean_divides_by_world) ? ctx->world : ctx->dp);
    for (size_t i = 0; i < d->trained; i++) {
        ar_param *p = d->bucketed[i];
        if (!p->requires_grad)
            continue;
        p->has_grad = has_gradient(d, i);
        p->grad_scale = op == AR_AVG ? 1.0f / (float)ranks : 1.0f;
    }
    d->unused_count = 0;
    for (size_t i = 0; d->options.find_unused && i < d->n && d->unused_count < d->trained; i++) {
        if (is_missing(d->params[i]))
            d->unused[d->unused_count++] = d->params[i]->name;
    }
    for (size_t i = 0; i < d->count; i++)
        d->buckets[i].info.state = AR_BUCKET_REDUCED;
}
