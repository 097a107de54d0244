/* SPDX-License-Identifier: Apache-2.0 */
/* The data-parallel object: hooks, the order of buckets, the ends of a step. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "anyrank/arith.h"
#include "anyrank/module.h"
#include "ref/context/context_private.h"
#include "ref/core/queue_private.h"
#include "ref/core/record.h"
#include "ref/core/text.h"
#include "ref/layers/param_private.h"
#include "ref/layers/parts.h"
#include "ref/numerics/philox.h"
#include "ref/record/ledger.h"
#include "ref/train/ddp.h"
#include "ref/train/ddp_private.h"
#include "ref/train/faults.h"
#include "ref/train/units.h"

/* --- agreement of ranks ------------------------------------------------------------------------------------------- */

/* Agreement among data-parallel ranks about their parameters and about which parameters received a gradient. */

/* --- the parameters ----------------------------------------------------------------------------------------------- */

/* Compares hashes first; if they differ, compares descriptions. */
enum { TEXT = 224 }; /* length of a description, a whole number of words */

/* All-gathers a message of `message_bytes` bytes (whole words) from each rank, in rank order. The caller releases the
 * result with free(). */
static ar_status exchange_messages(void **out, ar_ctx *ctx, const void *message, size_t message_bytes)
{
    const size_t ranks = (size_t)ar_comm_size(ctx->dp), me = (size_t)ar_comm_rank(ctx->dp);
    const size_t words = message_bytes / sizeof(uint64_t);
    ARI_OWNED uint64_t *messages = NULL;
    AR_TRY(ari_alloc_zero((void **)&messages, ranks, message_bytes, "hashes of parameters"));
    memcpy(messages + me * words, message, message_bytes);
    AR_TRY(ari_gather_words(ctx, ctx->dp, messages, words, "parameters of data parallelism"));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_AGREEMENT, .name = ""));
    *out = messages;
    messages = NULL;
    return AR_OK;
}

/* Appends a name as expert-parallel ranks agree about it: without the experts' numbers. */
static void describe_name(ari_text *t, const ar_param *p)
{
    const char *marker = p->expert ? strstr(p->name, ".experts.") : NULL;
    const size_t before = marker ? (size_t)(marker - p->name) + sizeof ".experts." - 1 : strlen(p->name);
    const char *after = p->name + before + strspn(p->name + before, marker ? "0123456789" : "");
    ari_say(t, "%.*s%s%s [", (int)before, p->name, marker ? "*" : "", after);
}

/* Writes "a.weight [4, 8]" with everything that must agree. unit: counted from the end; 0: the root unit. */
static void describe_param(char text[TEXT], const ar_param *p, int unit)
{
    ari_text t = ari_plain_text_in(text, TEXT);
    describe_name(&t, p);
    for (int i = 0; i < p->value.ndim; i++)
        ari_say(&t, "%s%zu", i > 0 ? ", " : "", p->value.shape[i]);
    ari_say(&t, "] %s%s%s%s", ar_dtype_name(p->value.dtype), p->transposed ? ", transposed" : "",
            p->spread ? ", spread" : "", p->requires_grad ? "" : ", frozen");
    if (unit > 0)
        ari_say(&t, ", of the unit %d from the end", unit);
}

static uint64_t mix_text(uint64_t hash, const char *text)
{
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * ARI_FNV1A_PRIME;
    return (hash ^ '\n') * ARI_FNV1A_PRIME;
}

static void describe_options(char text[TEXT], const ar_ddp_options *o)
{
    snprintf(text, TEXT, "buckets of %zu bytes, %s, %s, %s%s, ZeRO stage %d", o->bucket_bytes,
             o->mode == AR_BUCKETS_EAGER ? "eager" : "overlapped",
             o->order == AR_BUCKETS_BY_SIZE ? "by size" : "in reverse order", o->mean ? "mean" : "sum",
             o->find_unused ? ", unused parameters are looked for" : "", o->zero);
}

/* Writes entry i of the description: the options, then parameter 0, 1, ...; "nothing" beyond the end. */
static void describe_at(char text[TEXT], const ar_ddp *d, size_t i)
{
    if (i == 0)
        describe_options(text, &d->options);
    else if (i <= d->n)
        describe_param(text, d->params[i - 1], d->units - d->unit_of[i - 1]);
    else
        snprintf(text, TEXT, "nothing");
}

/* Finds the first entry at which some rank differs from rank 0, and that rank. hashes: [ranks, n]. */
static void first_difference(const uint64_t *hashes, size_t ranks, size_t n, size_t *position, size_t *rank)
{
    for (*position = 0; *position < n; (*position)++) {
        for (*rank = 1; *rank < ranks; (*rank)++) {
            if (hashes[*rank * n + *position] != hashes[*position])
                return;
        }
    }
    *rank = 1;
}

static ar_status name_difference(ar_ddp *d, size_t max_params)
{
    const size_t ranks = (size_t)ar_comm_size(d->ctx->dp), n = max_params + 1;
    ARI_OWNED uint64_t *local_hashes = NULL, *hashes = NULL;
    ARI_OWNED char *texts = NULL;
    char text[TEXT] = "";
    size_t position = 0, rank = 0;
    ar_status st = AR_OK;
    AR_TRY(ARI_ALLOC(&local_hashes, n, "hashes of parameters"));
    for (size_t i = 0; i < n; i++) {
        describe_at(text, d, i);
        local_hashes[i] = mix_text(ARI_FNV1A_BASIS, text);
    }
    AR_TRY(exchange_messages((void **)&hashes, d->ctx, local_hashes, n * sizeof *local_hashes));
    first_difference(hashes, ranks, n, &position, &rank);
    memset(text, 0, sizeof text);
    describe_at(text, d, position);
    AR_TRY(exchange_messages((void **)&texts, d->ctx, text, sizeof text));
    char subject[48] = "the options";
    if (position > 0)
        snprintf(subject, sizeof subject, "parameter %zu", position - 1);
    st =
        ar_error_set(AR_ERR_MISMATCH, "%s: data-parallel ranks 0 and %zu disagree about %s: rank 0 has %s, rank %zu %s",
                     d->name, rank, subject, texts, rank, texts + rank * sizeof text);
    return st;
}

/* Checks that all data-parallel ranks wrap the same parameters with the same options. Collective over them. Errors:
 * AR_ERR_MISMATCH, with the same message on all ranks. */
static ar_status ddp_agree(ar_ddp *d)
{
    const size_t ranks = (size_t)ar_comm_size(d->ctx->dp);
    ARI_OWNED uint64_t *messages = NULL;
    uint64_t message[2] = {ARI_FNV1A_BASIS, d->n};
    size_t max_params = 0;
    bool differ = false;
    char text[TEXT];
    if (ranks == 1)
        return AR_OK;
    for (size_t i = 0; i <= d->n; i++) {
        describe_at(text, d, i);
        message[0] = mix_text(message[0], text);
    }
    AR_TRY(exchange_messages((void **)&messages, d->ctx, message, sizeof message));
    for (size_t r = 0; r < ranks; r++) {
        differ = differ || memcmp(messages + 2 * r, messages, sizeof message) != 0;
        max_params = messages[2 * r + 1] > max_params ? (size_t)messages[2 * r + 1] : max_params;
    }
    return differ ? name_difference(d, max_params) : AR_OK;
}

/* --- which got a gradient, on this rank and on any ---------------------------------------------------------------- */

static bool is_missing(const ar_param *p)
{
    return p->requires_grad && !p->has_grad;
}

/* "a, b, c and 4 more". */
static void list_missing(const ar_ddp *d, size_t missing, char *text, size_t size)
{
    size_t shown = 0;
    ari_text t = ari_plain_text_in(text, size);
    for (size_t i = 0; i < d->n && shown < 4; i++) {
        if (is_missing(d->params[i]))
            ari_say(&t, "%s%s", shown++ > 0 ? ", " : "", d->params[i]->name);
    }
    if (missing > shown)
        ari_say(&t, " and %zu more", missing - shown);
}

/* Checks that either every parameter of a bucket received a gradient on this rank or none did. Errors: AR_ERR_DATA,
 * naming the parameters without one. */
static ar_status ddp_check_all_used(const ar_ddp *d)
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

static ar_status combine_messages(void *arg, ar_queue *queue)
{
    const ar_ddp *d = arg;
    ar_device *device = d->ctx->device;
    const ar_buf host = {d->used};
    ari_span_begin("used parameters");
    ar_status st = device->ops->copy(device, queue, d->used_device, ar_const(host), d->trained);
    if (st == AR_OK)
        st = ar_comm_all_reduce(ari_ddp_group(d, ARI_OVER_DP), queue, d->used_device, ar_const(d->used_device),
                                d->trained, AR_U8, AR_MAX, "used parameters");
    if (st == AR_OK)
        st = ARI_NOTE(d->ctx, .kind = ARI_LEDGER_UNUSED, .name = "", .pass = 's');
    if (st == AR_OK)
        st = device->ops->copy(device, queue, host, ar_const(d->used_device), d->trained);
    if (st == AR_OK)
        st = ar_queue_sync(queue, 0); /* wait, since the host reads the flags */
    return ari_span_end(st);
}

static ar_status combine_or_fail(void *arg, ar_queue *queue)
{
    return ari_ddp_fail_in_flight(arg, combine_messages(arg, queue));
}

/* Marks what got a gradient here, and with find_unused and peers enqueues the agreement. */
static ar_status ddp_agree_used(ar_ddp *d)
{
    for (size_t i = 0; i < d->trained; i++)
        d->used[i] = d->bucketed[i]->has_grad && !ari_fault_left_out(&d->slots[i]);
    if (!d->used_device.ptr)
        return AR_OK;
    if (!d->communication)
        return combine_or_fail(d, d->ctx->queue);
    return ari_queue_chain(d->communication->queue, combine_or_fail, d);
}

/* Returns true if an optimizer should use the gradient. Without find_unused, a rank without samples has received the
 * other ranks' gradients, if there are any. */
static bool has_gradient(const ar_ddp *d, size_t i)
{
    if (!d->options.find_unused)
        return d->bucketed[i]->has_grad || d->buckets[d->slots[i].bucket].moves;
    if (d->ctx->device->hollow) /* no peer has answered */
        return true;
    return d->used[i] || d->bucketed[i]->has_grad || ari_faulty(d->ctx, "unused_set_empty");
}

void ari_ddp_complete(ar_ddp *d)
{
    const ar_ctx *ctx = d->ctx;
    const bool mean = d->options.mean || ari_faulty(ctx, "dp_averaged_again");
    const float mean_scale = mean ? 1.0f / (float)ar_comm_size(ctx->dp) : 1.0f;
    for (size_t i = 0; i < d->trained; i++) {
        ar_param *p = d->bucketed[i];
        if (!p->requires_grad)
            continue;
        p->has_grad = has_gradient(d, i);
        const bool times_ep = p->expert && ari_faulty(ctx, "ep_grads_times_ep");
        p->grad_scale = mean_scale * (times_ep ? (float)ar_comm_size(ctx->ep) : 1.0f);
    }
    d->unused_count = 0;
    for (size_t i = 0; d->options.find_unused && i < d->n && d->unused_count < d->trained; i++) {
        if (is_missing(d->params[i]))
            d->unused[d->unused_count++] = d->params[i]->name;
    }
    for (size_t i = 0; i < d->count; i++)
        d->buckets[i].info.state = AR_BUCKET_REDUCED;
}

/* --- ddp ---------------------------------------------------------------------------------------------------------- */

ARI_OWNER(ar_ddp, ar_ddp_destroy)

ar_ddp_options ar_ddp_defaults(void)
{
    return (ar_ddp_options){.bucket_bytes = AR_BUCKET_BYTES};
}

/* --- hooks -------------------------------------------------------------------------------------------------------- */

/* Enqueues the next bucket: pack, reduce, copy back. */
static ar_status launch_bucket(ar_ddp *d)
{
    ar_ctx *ctx = d->ctx;
    ari_bucket *b = &d->buckets[ari_fault_turn(ctx, d->next_bucket, d->count)];
    AR_TRY(ari_ddp_hook(d, b, true));
    b->info.state = AR_BUCKET_IN_FLIGHT;
    d->next_bucket++;
    if (d->options.zero) /* set now, because zeroing makes the full gradient available again */
        ari_bucket_share(b);
    if (!d->communication) {
        AR_TRY(ari_bucket_run(b, ctx->queue));
        b->info.state = AR_BUCKET_REDUCED;
        return ar_event_record(b->info.reduced, ctx->queue);
    }
    if (b->info.index > 0 && d->step.even && !ctx->fault) /* otherwise reduced gradients would wait in memory that
                                                             values no longer need */
        AR_TRY(ar_event_sync(d->buckets[b->info.index - 1].info.reduced, 0));
    AR_TRY(ar_event_record(b->produced, ctx->queue));
    AR_TRY(ar_queue_wait(d->communication->queue, b->produced));
    AR_TRY(ari_queue_chain(d->communication->queue, ari_bucket_run, b));
    return ar_event_record(b->info.reduced, d->communication->queue);
}

static ar_status launch_ready(ar_ddp *d)
{
    while (d->next_bucket < d->count && d->buckets[d->next_bucket].info.ready == d->buckets[d->next_bucket].info.params)
        AR_TRY(launch_bucket(d));
    return AR_OK;
}

static ar_status refuse_late(const ar_ddp *d, const ari_ddp_slot *s)
{
    if (ari_faulty(d->ctx, "bucket_stale_done"))
        return AR_OK;
    return ar_error_set(AR_ERR_ARG,
                        "%s: the gradient of %s changed after bucket %zu was reduced: a second backward pass. Call "
                        "ar_ddp_set_sync(false) before all but the last one of a step",
                        d->name, s->param->name, s->bucket);
}

static ar_status make_ready(ar_ddp *d, ari_ddp_slot *s)
{
    ari_bucket *b = &d->buckets[s->bucket];
    if (d->stage >= 2) /* units are */
        return AR_OK;
    if (b->info.state != AR_BUCKET_FILLING && (d->sync || !d->waited))
        return refuse_late(d, s);
    if (!d->sync || s->ready)
        return AR_OK;
    s->ready = true;
    b->info.ready++;
    AR_TRY(ari_fault_pack_early(d, s));
    return d->options.mode == AR_BUCKETS_EAGER || ari_fault_waits_for_the_end(d) ? AR_OK : launch_ready(d);
}

static ar_status ready(void *user, ar_param *p)
{
    (void)p;
    ari_ddp_slot *s = user;
    ar_ddp *d = s->ddp;
    return ari_ddp_fail(d, make_ready(d, s));
}

/* Returns the parameter's slot in a bucket of whichever data-parallel object has the parameter, or NULL. */
static const ari_ddp_slot *slot_of(const ar_param *p)
{
    for (int h = 0; h < p->hooks; h++) {
        if (p->hook[h].ready == ready)
            return p->hook[h].user;
    }
    return NULL;
}

ar_status ari_ddp_check_step(const ar_ddp *d, const ar_ctx *ctx, ar_param *const *params, size_t n)
{
    if (d && d->ctx != ctx)
        return ar_error_set(AR_ERR_ARG, "%s: a training step in another context than that of its buckets", d->name);
    for (size_t i = 0; i < n; i++) {
        const ari_ddp_slot *s = slot_of(params[i]);
        if (!params[i]->requires_grad || (s ? s->ddp : NULL) == d)
            continue;
        if (!d)
            return ar_error_set(AR_ERR_ARG,
                                "%s is in the buckets of %s, which would sum its gradient too: give it to the step",
                                params[i]->name, s->ddp->name);
        return ar_error_set(AR_ERR_ARG,
                            "%s does not hold %s, whose gradient would stay this rank's part of the sum: give it all "
                            "parameters of the model that require a gradient",
                            d->name, params[i]->name);
    }
    return AR_OK;
}

/* Checks parameters that now require a gradient: outside of all buckets they would keep only this rank's terms. */
static ar_status check_thawed(const ar_ddp *d)
{
    for (size_t i = 0; i < d->n; i++) {
        if (d->params[i]->requires_grad && !slot_of(d->params[i]))
            return ar_error_set(AR_ERR_ARG,
                                "%s: %s requires a gradient, but did not when the buckets were made: make the object "
                                "anew after changing requires_grad",
                                d->name, d->params[i]->name);
    }
    return AR_OK;
}

static ar_status add_hooks(ar_ddp *d)
{
    for (size_t i = 0; i < d->trained; i++) {
        ar_param *p = d->slots[i].param;
        if (slot_of(p))
            return ar_error_set(AR_ERR_ARG, "%s: %s belongs to another data-parallel object", d->name, p->name);
        AR_TRY(ar_param_add_hook(p, (ar_param_hook){ready, &d->slots[i]}));
    }
    return AR_OK;
}

/* --- creation ----------------------------------------------------------------------------------------------------- */

static ar_status check_options(const ar_ddp_options *o)
{
    if (o->mode != AR_BUCKETS_OVERLAP && o->mode != AR_BUCKETS_EAGER)
        return ar_error_set(AR_ERR_ARG, "bucket mode %d, expected overlap or eager", (int)o->mode);
    if (o->order != AR_BUCKETS_REVERSE && o->order != AR_BUCKETS_BY_SIZE)
        return ar_error_set(AR_ERR_ARG, "bucket order %d, expected reverse or by size", (int)o->order);
    if (o->zero < 0 || o->zero > 3)
        return ar_error_set(AR_ERR_ARG, "ZeRO stage %d, expected 0 to 3", o->zero);
    if (o->units > INT_MAX - 1 || (o->units > 0 && !o->unit))
        return ar_error_set(AR_ERR_ARG, "%zu units, which are not given", o->units);
    return AR_OK;
}

static ar_status check_params(const ar_ddp *d)
{
    for (size_t i = 0; i < d->n; i++) {
        const ar_param *p = d->params[i];
        for (size_t k = 0; k < i; k++) {
            if (d->params[k] == p)
                return ar_error_set(AR_ERR_ARG, "%s is given the parameter %s twice", d->name, p->name);
        }
        if (p->value.dtype != AR_F32 && p->value.dtype != AR_BF16)
            return ar_error_set(AR_ERR_DTYPE, "%s: the parameter %s is stored as %s, expected f32 or bf16", d->name,
                                p->name, ar_dtype_name(p->value.dtype));
    }
    return AR_OK;
}

/* Gets the queue for buckets and duplicates the groups over which they are reduced. */
static ar_status borrow_queue(ar_ddp *d)
{
    bool spread = false, tied = false, experts = false;
    for (size_t i = 0; i < d->count; i++) {
        experts = experts || (d->buckets[i].expert && ar_comm_size(d->ctx->edp) > 1);
        spread = spread || d->buckets[i].info.spread;
        tied = tied || d->buckets[i].info.ends;
    }
    if (d->options.mode != AR_BUCKETS_OVERLAP || !(spread || tied || experts || ari_ddp_has_peers(d)))
        return AR_OK;
    return ari_ctx_communication(d->ctx, &d->communication, spread, tied);
}

static ar_status init_ddp(ar_ddp *d)
{
    AR_TRY(check_params(d));
    AR_TRY(ari_units_init(d));
    AR_TRY(ddp_agree(d));
    AR_TRY(ari_buckets_plan(d));
    AR_TRY(ARI_TAKE(&d->used, &d->lists, d->trained, "used parameters"));
    AR_TRY(ARI_TAKE(&d->unused, &d->lists, d->trained, "names of unused parameters"));
    AR_TRY(ari_buckets_alloc(d));
    AR_TRY(borrow_queue(d));
    AR_TRY(add_hooks(d));
    for (size_t i = 0; i < d->trained && d->options.hook && d->options.hook_state; i++)
        AR_TRY(ARI_TAKE(&d->slots[i].state, &d->lists, ar_tensor_count(&d->slots[i].param->value), "a hook's state"));
    if (!d->options.keep_weights)
        AR_TRY(ar_ddp_broadcast_parameters(d));
    return ari_weights_share(d);
}

/* Takes over `params`. */
static ar_status create_ddp(ar_ddp **out, ar_ctx *ctx, const char *name, ar_module *module, ar_param **params, size_t n,
                            const ar_ddp_options *o)
{
    ARI_OWNED_BY(ar_ddp_destroy) ar_ddp *d = NULL;
    ar_status st = check_options(o);
    if (st == AR_OK)
        st = ari_ddp_check_hook(ctx, o);
    if (st == AR_OK)
        st = ARI_ALLOC_ZERO(&d, 1, "a data-parallel object");
    if (st != AR_OK) {
        free(params);
        return st;
    }
    d->ctx = ctx;
    d->module = module;
    d->options = *o;
    d->params = params;
    d->n = n;
    d->sync = true;
    snprintf(d->name, sizeof d->name, "%s", name && name[0] ? name : "ddp");
    AR_TRY(ar_module_init(&d->base, &ari_ddp_ops, d->name, AR_HELD_UNKNOWN));
    d->stage = o->zero > 1 && ar_comm_size(ctx->shard) == 1 ? 1 : o->zero;
    ari_span_begin("%s: data parallelism", d->name);
    AR_TRY(ari_span_end(init_ddp(d)));
    d->options.unit = NULL; /* memory of the caller, which must not be used any more */
    d->options.units = 0;
    ARI_GIVE(out, d);
    return AR_OK;
}

ar_status ar_ddp_create_params(ar_ddp **out, ar_ctx *ctx, const char *name, ar_param *const *params, size_t n,
                               const ar_ddp_options *o)
{
    ar_param **param_list = NULL;
    AR_TRY(ARI_ALLOC(&param_list, n, "a list of parameters"));
    if (n > 0)
        memcpy(param_list, params, n * sizeof *param_list);
    return create_ddp(out, ctx, name, NULL, param_list, n, o);
}

ar_status ar_ddp_create(ar_ddp **out, ar_ctx *ctx, ar_module *module, const ar_ddp_options *o)
{
    ar_param **param_list = NULL;
    size_t n = 0;
    ar_ddp_options options = *o;
    ARI_OWNED ar_unit *units = NULL;
    if (!module)
        return ar_error_set(AR_ERR_ARG, "data parallelism of a module that is NULL");
    if (o->zero >= 2 && o->units == 0) {
        options.units = ari_sequential_units(module, NULL, 0, &options.root_stage);
        AR_TRY(ARI_ALLOC(&units, options.units, "units"));
        ari_sequential_units(module, units, options.units, &options.root_stage);
        options.unit = units;
    }
    AR_TRY(ari_module_list(&param_list, &n, module));
    return create_ddp(out, ctx, module->name, module, param_list, n, &options);
}

/* Waits for reductions that a step left in flight when it ended early. */
static ar_status finish_launched(ar_ddp *d)
{
    const ar_status gathered = d->gathers ? ar_queue_sync(d->gathers->queue, 0) : AR_OK;
    ar_status reduced = AR_OK;
    if (d->communication && (d->next_bucket > 0 || d->stage >= 2) && !d->waited)
        reduced = ar_queue_sync(d->communication->queue, 0);
    return gathered != AR_OK ? gathered : reduced;
}

void ar_ddp_destroy(ar_ddp *d)
{
    if (!d)
        return;
    const ar_status st = finish_launched(d);
    (void)st; /* the failure has been reported to whoever waits for the step */
    for (size_t i = 0; i < d->trained; i++) {
        ar_param *p = d->slots[i].param;
        ar_param_remove_hook(p, (ar_param_hook){ready, &d->slots[i]});
        p->share = p->share == &d->slots[i].share ? NULL : p->share;
    }
    ari_units_free(d);
    ari_buckets_free(d);
    ari_arena_free(&d->lists);
    free(d->params);
    free(d);
}

/* --- a step ------------------------------------------------------------------------------------------------------- */

ar_status ar_ddp_broadcast_parameters(ar_ddp *d)
{
    return ari_params_broadcast(d->params, d->n, d->ctx);
}

/* Zeroes the gradients. With the fault of not reaching a module's children, gradients of a list are left to the
 * caller. */
static ar_status zero_gradients(ar_ddp *d)
{
    if (d->module)
        return ar_module_zero_grad(d->module, d->ctx);
    for (size_t i = 0; i < d->n && !ari_faulty(d->ctx, "zero_grad_not_recursive"); i++)
        AR_TRY(ari_param_zero_grad(d->params[i], d->ctx));
    return AR_OK;
}

/* Resets all buckets to "filling", as ar_ddp_start requires. */
static void reset_buckets(ar_ddp *d)
{
    for (size_t i = 0; i < d->trained; i++)
        d->slots[i].ready = d->slots[i].packed = false;
    for (size_t i = 0; i < d->count; i++) {
        d->buckets[i].info.state = AR_BUCKET_FILLING;
        d->buckets[i].info.ready = 0;
    }
    d->next_bucket = 0;
}

ar_status ar_ddp_start(ar_ddp *d)
{
    AR_TRY(check_thawed(d));
    AR_TRY(finish_launched(d));
    AR_TRY(zero_gradients(d));
    d->step = (ari_ddp_step){0};
    d->sync = true;
    d->unused_count = 0;
    if (ari_faulty(d->ctx, "bucket_stale_done") && d->waited)
        return AR_OK;
    d->waited = false;
    reset_buckets(d);
    AR_TRY(ari_ddp_fail(d, ari_units_start(d)));
    return ari_fault_pack_before_backward(d);
}

void ar_ddp_set_sync(ar_ddp *d, bool sync)
{
    d->sync = sync;
}

static ar_status check_by_hand(const ar_ddp *d)
{
    return d->stage < 2
               ? AR_OK
               : ar_error_set(AR_ERR_ARG,
                              "%s: with ZeRO stage %d units are reduced as they go backward, and the rest when "
                              "ar_ddp_wait or ar_ddp_reduce_gradients is called",
                              d->name, d->stage);
}

static ar_status check_bucket(const ar_ddp *d, size_t i)
{
    return i < d->count
               ? AR_OK
               : ar_error_set(AR_ERR_ARG, "%s: bucket %zu of %zu: buckets are numbered from 0", d->name, i, d->count);
}

static ar_status launch_before(ar_ddp *d, size_t end)
{
    AR_TRY(check_by_hand(d));
    while (d->next_bucket < end)
        AR_TRY(ari_ddp_fail(d, launch_bucket(d)));
    return AR_OK;
}

ar_status ar_ddp_reduce_bucket(ar_ddp *d, size_t i)
{
    AR_TRY(check_bucket(d, i));
    return launch_before(d, i + 1);
}

ar_status ar_ddp_reduce_all(ar_ddp *d)
{
    return launch_before(d, d->count);
}

ar_status ar_ddp_wait_bucket(ar_ddp *d, size_t i)
{
    AR_TRY(check_bucket(d, i));
    AR_TRY(check_by_hand(d));
    ari_bucket *b = &d->buckets[i];
    if (b->info.state == AR_BUCKET_FILLING)
        return ar_error_set(AR_ERR_ARG,
                            "%s: bucket %zu has not been launched (%zu of its %zu gradients are ready): call "
                            "ar_ddp_reduce_bucket first",
                            d->name, i, b->info.ready, b->info.params);
    AR_TRY(ari_ddp_fail(d, ar_event_sync(b->info.reduced, 0)));
    b->info.state = AR_BUCKET_REDUCED;
    return AR_OK;
}

ar_status ari_ddp_check_used(const ar_ddp *d)
{
    if (d->options.find_unused)
        return AR_OK;
    const ar_status st = ddp_check_all_used(d);
    return ari_ddp_has_peers(d) ? ari_ddp_fail_in_flight(d, st) : st;
}

static ar_status finish_reduction(ar_ddp *d)
{
    if (d->waited)
        return AR_OK;
    AR_TRY(ari_ddp_check_used(d));
    AR_TRY(d->stage >= 2 ? ari_units_finish(d) : ar_ddp_reduce_all(d));
    if (d->options.find_unused)
        AR_TRY(ddp_agree_used(d));
    if (d->communication)
        AR_TRY(ar_queue_sync(d->communication->queue, 0));
    ari_ddp_complete(d);
    d->waited = true;
    for (size_t i = 0; i < d->count; i++)
        AR_TRY(ari_ddp_hook(d, &d->buckets[i], false));
    return AR_OK;
}

ar_status ar_ddp_wait(ar_ddp *d)
{
    ari_span_begin("wait for gradients");
    return ari_span_end(ari_ddp_fail(d, finish_reduction(d)));
}

ar_status ar_ddp_reduce_gradients(ar_ddp *d)
{
    if (d->next_bucket > 0)
        return ar_error_set(AR_ERR_ARG,
                            "%s: %zu of %zu buckets are reduced already: call ar_ddp_set_sync(false) before the "
                            "backward passes, and ar_ddp_start between two reductions",
                            d->name, d->next_bucket, d->count);
    return ari_ddp_fail(d, finish_reduction(d));
}

/* --- queries ------------------------------------------------------------------------------------------------------ */

const char *ar_ddp_name(const ar_ddp *d)
{
    return d->name;
}

ar_ddp_options ari_ddp_options_of(const ar_ddp *d)
{
    return d->options;
}

size_t ar_ddp_unused(const ar_ddp *d, const char **out, size_t cap)
{
    for (size_t i = 0; i < d->unused_count && i < cap; i++)
        out[i] = d->unused[i];
    return d->unused_count;
}

size_t ar_ddp_buckets(const ar_ddp *d)
{
    return d->count;
}

ar_bucket_info ari_ddp_bucket(const ar_ddp *d, size_t i)
{
    return d->buckets[i].info;
}

ar_status ar_ddp_bucket(const ar_ddp *d, size_t i, ar_bucket_info *info)
{
    AR_TRY(check_bucket(d, i));
    *info = d->buckets[i].info;
    return AR_OK;
}

ar_status ar_ddp_bucket_index(const ar_ddp *d, const ar_param *p, size_t *index)
{
    const ari_ddp_slot *s = slot_of(p);
    if (!s || s->ddp != d)
        return ar_error_set(AR_ERR_NOT_FOUND, "%s: %s is in no bucket: the object does not hold it, or it was frozen",
                            d->name, p->name);
    *index = s->bucket;
    return AR_OK;
}

size_t ari_ddp_bytes(const ar_ddp *d)
{
    return d->storage_bytes + d->shard_bytes + d->exchange_bytes;
}

size_t ari_ddp_open_bytes(const ar_ddp *d)
{
    const ar_arith_ops *arith = d->ctx->arith;
    size_t total_bytes = 0, peak_bytes = 0, before = 0;
    if (!arith->grad_complete || d->stage >= 2)
        return 0;
    for (size_t i = 0; i < d->count; i++) {
        const ar_bucket_info *b = &d->buckets[i].info;
        const size_t extra_bytes = arith->bucket_bytes(b->elements, b->storage) - b->elements * sizeof(float);
        total_bytes += extra_bytes;
        peak_bytes = ari_larger(peak_bytes, before + extra_bytes);
        before = extra_bytes;
    }
    return d->step.passes > 1 || !d->step.even ? total_bytes : peak_bytes;
}
