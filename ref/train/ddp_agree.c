/* SPDX-License-Identifier: Apache-2.0 */
/* Agreement of the data-parallel ranks: on their parameters, and on which of them got a gradient. */
#include <stdio.h>
#include <string.h>

#include "ref/core/record.h"
#include "ref/core/text.h"
#include "ref/layers/parts.h"
#include "ref/numerics/philox.h"
#include "ref/train/faults.h"
#include "ref/train/units.h"

/* --- the parameters ----------------------------------------------------------------------------------------------- */

/* Hashes first, and where those differ, what differs. */
enum { TEXT = 224 }; /* whole words, as they travel */

/* All-gathers the ranks' messages, `each` bytes (whole words) of each, in rank order. Gives; free(). */
static ar_status exchange_messages(void **gives, ar_ctx *ctx, const void *own, size_t each)
{
    const size_t ranks = (size_t)ar_comm_size(ctx->dp), me = (size_t)ar_comm_rank(ctx->dp);
    const size_t words = each / sizeof(uint64_t);
    ARI_OWNED uint64_t *said = NULL;
    AR_TRY(ari_alloc_zero((void **)&said, ranks, each, "hashes of parameters"));
    memcpy(said + me * words, own, each);
    AR_TRY(ari_gather_words(ctx, ctx->dp, said, words, "parameters of data parallelism"));
    *gives = said;
    said = NULL;
    return AR_OK;
}

/* The name as expert-parallel ranks agree about it: without the numbers of experts. */
static void describe_name(ari_text *t, const ar_param *p)
{
    const char *of = p->expert ? strstr(p->name, ".experts.") : NULL;
    const size_t before = of ? (size_t)(of - p->name) + sizeof ".experts." - 1 : strlen(p->name);
    const char *after = p->name + before + strspn(p->name + before, of ? "0123456789" : "");
    ari_say(t, "%.*s%s%s [", (int)before, p->name, of ? "*" : "", after);
}

/* "a.weight [4, 8]", with all that must agree. unit: counted from the end; 0: the root unit. */
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

/* The options, then parameter 0, 1, ...: the text at place i, "nothing" behind the end. */
static void describe_at(char text[TEXT], const ar_ddp *d, size_t i)
{
    if (i == 0)
        describe_options(text, &d->options);
    else if (i <= d->n)
        describe_param(text, d->params[i - 1], d->units - d->unit_of[i - 1]);
    else
        snprintf(text, TEXT, "nothing");
}

/* The first place at which a rank differs from rank 0, and that rank. said: [ranks, n] hashes. */
static void first_difference(const uint64_t *said, size_t ranks, size_t n, size_t *at, size_t *rank)
{
    for (*at = 0; *at < n; (*at)++) {
        for (*rank = 1; *rank < ranks; (*rank)++) {
            if (said[*rank * n + *at] != said[*at])
                return;
        }
    }
    *rank = 1;
}

static ar_status name_difference(ar_ddp *d, size_t most)
{
    const size_t ranks = (size_t)ar_comm_size(d->ctx->dp), n = most + 1;
    ARI_OWNED uint64_t *own = NULL, *said = NULL;
    ARI_OWNED char *texts = NULL;
    char text[TEXT] = "";
    size_t at = 0, rank = 0;
    ar_status st = AR_OK;
    AR_TRY(ARI_ALLOC(&own, n, "hashes of parameters"));
    for (size_t i = 0; i < n; i++) {
        describe_at(text, d, i);
        own[i] = mix_text(ARI_FNV1A_BASIS, text);
    }
    AR_TRY(exchange_messages((void **)&said, d->ctx, own, n * sizeof *own));
    first_difference(said, ranks, n, &at, &rank);
    memset(text, 0, sizeof text);
    describe_at(text, d, at);
    AR_TRY(exchange_messages((void **)&texts, d->ctx, text, sizeof text));
    char what[48] = "the options";
    if (at > 0)
        snprintf(what, sizeof what, "parameter %zu", at - 1);
    st =
        ar_error_set(AR_ERR_MISMATCH, "%s: data-parallel ranks 0 and %zu disagree about %s: rank 0 has %s, rank %zu %s",
                     d->name, rank, what, texts, rank, texts + rank * sizeof text);
    return st;
}

ar_status ari_ddp_agree(ar_ddp *d)
{
    const size_t ranks = (size_t)ar_comm_size(d->ctx->dp);
    ARI_OWNED uint64_t *said = NULL;
    uint64_t own[2] = {ARI_FNV1A_BASIS, d->n};
    size_t most = 0;
    bool differ = false;
    char text[TEXT];
    if (ranks == 1)
        return AR_OK;
    for (size_t i = 0; i <= d->n; i++) {
        describe_at(text, d, i);
        own[0] = mix_text(own[0], text);
    }
    AR_TRY(exchange_messages((void **)&said, d->ctx, own, sizeof own));
    for (size_t r = 0; r < ranks; r++) {
        differ = differ || memcmp(said + 2 * r, said, sizeof own) != 0;
        most = said[2 * r + 1] > most ? (size_t)said[2 * r + 1] : most;
    }
    return differ ? name_difference(d, most) : AR_OK;
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

static ar_status combine_messages(void *arg, ar_queue *on)
{
    const ar_ddp *d = arg;
    ar_device *device = d->ctx->device;
    const ar_buf host = {d->used};
    ari_span_begin("used parameters");
    ar_status st = device->ops->copy(device, on, d->used_device, ar_const(host), d->trained);
    if (st == AR_OK)
        st = ar_comm_all_reduce(ari_ddp_group(d, ARI_OVER_DP), on, d->used_device, ar_const(d->used_device), d->trained,
                                AR_U8, AR_MAX, "used parameters");
    if (st == AR_OK)
        st = device->ops->copy(device, on, host, ar_const(d->used_device), d->trained);
    if (st == AR_OK)
        st = ar_queue_sync(on, 0); /* the host reads them */
    return ari_span_end(st);
}

static ar_status combine_or_fail(void *arg, ar_queue *on)
{
    return ari_ddp_fail_in_flight(arg, combine_messages(arg, on));
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

/* True if an optimizer is to use the gradient. Without find_unused a rank without samples has received the others'
 * gradients, if there are others. */
static bool has_gradient(const ar_ddp *d, size_t i)
{
    if (!d->options.find_unused)
        return d->bucketed[i]->has_grad || d->buckets[d->slots[i].bucket].moves;
    if (d->ctx->device->hollow) /* no peer has answered */
        return true;
    return d->used[i] || d->bucketed[i]->has_grad || ar_faulty(d->ctx, AR_FAULT_unused_set_empty);
}

void ari_ddp_complete(ar_ddp *d, bool mean)
{
    const ar_ctx *ctx = d->ctx;
    mean = mean || ar_faulty(ctx, AR_FAULT_dp_averaged_again);
    const int ranks = ar_comm_size(ar_faulty(ctx, AR_FAULT_mean_divides_by_world) ? ctx->world : ctx->dp);
    for (size_t i = 0; i < d->trained; i++) {
        ar_param *p = d->bucketed[i];
        if (!p->requires_grad)
            continue;
        p->has_grad = has_gradient(d, i);
        p->grad_scale = (mean ? 1.0f / (float)ranks : 1.0f) * ari_fault_gradient_times(ctx, p);
    }
    d->unused_count = 0;
    for (size_t i = 0; d->options.find_unused && i < d->n && d->unused_count < d->trained; i++) {
        if (is_missing(d->params[i]))
            d->unused[d->unused_count++] = d->params[i]->name;
    }
    for (size_t i = 0; i < d->count; i++)
        d->buckets[i].info.state = AR_BUCKET_REDUCED;
}
