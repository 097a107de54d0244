/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/layers/experts/routes.h"
#include "ref/core/tensor_private.h"

#include <stdlib.h>
#include <string.h>

/* Routes of all expert-parallel ranks, in host memory, and the order that they define. */
typedef struct sorting {
    size_t ranks, me, k;
    size_t slots;                /* number of slots on each rank */
    size_t samples, own_samples; /* number of samples whose rows arrive here, and of samples of one rank */
    size_t first_expert;         /* first of this rank's experts, whose number is groups.n */
    int32_t *expert;             /* [ranks, slots] experts; NULL: the experts in turn */
    size_t experts;
    bool gathered; /* true if the tokens of all ranks arrive here */
    int64_t *place, *slot_of, *arrived, *departed;
    size_t *next_row; /* next row of each expert, or of each expert's samples */
    ari_arena *memory;
} sorting;

static bool has_peers(const ar_ctx *ctx)
{
    return ar_comm_size(ctx->ep) > 1;
}

/* The kernel returns -1 - i for a token whose logit i is NaN. */
static ar_status check_experts(const int32_t *expert, size_t slots, size_t k, const char *name)
{
    for (size_t i = 0; i < slots; i++) {
        if (expert[i] < 0)
            return ar_error_set(AR_ERR_DATA, "%s: expert %d's logit of token %zu is not a number", name, -1 - expert[i],
                                i / k);
    }
    return AR_OK;
}

/* Reads the chosen experts; a device without contents uses the known ones, or the experts in turn. sharer: index of the
 * rank among those with tokens of the same samples. */
static ar_status read_experts(sorting *s, ar_ctx *ctx, const ari_routing *routing, int sharer)
{
    if (ctx->device->hollow && !ctx->routes)
        return AR_OK;
    if (!s->expert)
        AR_TRY(ARI_TAKE(&s->expert, s->memory, s->ranks * s->slots, "the experts of tokens"));
    AR_TRY(ar_ctx_download(ctx, s->expert, routing->gathered_experts));
    if (ctx->device->hollow)
        AR_TRY(ctx->routes->read(ctx->routes->user, ctx, s->expert, routing->gathered_experts->shape, routing->name,
                                 sharer));
    return check_experts(s->expert, s->ranks * s->slots, s->k, routing->name);
}

/* Returns how many of the slots [first_slot, first_slot + count) belong to an expert if the experts come in turn, slot
 * i on all ranks belonging to expert i mod `experts`. */
static size_t count_in_turn(const sorting *s, size_t expert, size_t first_slot, size_t count)
{
    const size_t before = (first_slot + s->experts - 1 - expert) / s->experts;
    return (first_slot + count + s->experts - 1 - expert) / s->experts - before;
}

/* Sorts this rank's slots by expert, which are the rows that it sends. next_row: [experts + 1], zero. */
static void sort_sent(sorting *s)
{
    const size_t experts = s->experts;
    const int32_t *expert = s->expert + s->me * s->slots;
    for (size_t i = 0; i < s->slots; i++)
        s->next_row[expert[i] + 1]++;
    for (size_t e = 0; e < experts; e++)
        s->next_row[e + 1] += s->next_row[e];
    for (size_t i = 0; i < s->slots; i++) {
        const size_t row = s->next_row[expert[i]]++;
        s->place[i] = (int64_t)row;
        s->slot_of[row] = (int64_t)i;
    }
}

/* Finds the expert of slot i of rank r; returns false if the expert is on another rank. */
static bool comes_here(size_t *expert, const ari_routes *r, const sorting *s, size_t rank, size_t i)
{
    const size_t e = (size_t)s->expert[rank * s->slots + i];
    *expert = e - s->first_expert;
    return e >= s->first_expert && *expert < r->groups.n;
}

/* Returns the sample of a row among those of all ranks that send here: ranks that share a sequence have the same
 * samples. */
static size_t sample_of(const sorting *s, size_t rank, size_t i)
{
    const size_t sharers = s->ranks * s->own_samples / s->samples;
    return rank / sharers * s->own_samples + i / (s->slots / s->own_samples);
}

/* Adds to rows [expert, sample], at index e * width + k, the number of rows of each expert and sample. */
static void count_runs(size_t *rows, size_t width, const ari_routes *r, const sorting *s)
{
    const size_t slots_per_sample = s->own_samples > 0 ? s->slots / s->own_samples : 1; /* slots of a sample */
    size_t e = 0;
    for (size_t rank = 0; rank < s->ranks; rank++) {
        for (size_t i = 0; i < s->slots && s->expert; i++) {
            if (comes_here(&e, r, s, rank, i))
                rows[e * width + sample_of(s, rank, i)]++;
        }
        for (size_t i = 0; i < s->slots && !s->expert; i += slots_per_sample) {
            for (e = 0; e < r->groups.n; e++)
                rows[e * width + sample_of(s, rank, i)] +=
                    count_in_turn(s, s->first_expert + e, rank * s->slots + i, slots_per_sample);
        }
    }
}

/* Counts the rows of each expert, and of these each sample's. */
static void count_rows(ari_routes *r, const sorting *s)
{
    const size_t n = r->groups.n, width = s->samples + 1;
    count_runs(r->sample + 1, width, r, s);
    for (size_t e = 0; e < n; e++) {
        for (size_t k = 0; k < s->samples; k++)
            r->sample[e * width + k + 1] += r->sample[e * width + k];
        r->first_row[e + 1] = r->first_row[e] + r->sample[e * width + s->samples];
    }
    r->rows = r->first_row[n];
}

/* Sorts the rows of one rank, which begin at `row_offset` in the order of expert and slot in which they were sent.
 * start: [experts + 1]. Returns their number. */
static size_t sort_rank(const ari_routes *r, sorting *s, size_t rank, size_t row_offset, size_t *start)
{
    size_t e = 0;
    memset(start, 0, (r->groups.n + 1) * sizeof *start);
    for (size_t i = 0; i < s->slots; i++) {
        if (comes_here(&e, r, s, rank, i))
            start[e + 1]++;
    }
    for (e = 0; e < r->groups.n; e++)
        start[e + 1] += start[e];
    const size_t rows = start[r->groups.n];
    for (size_t i = 0; i < s->slots; i++) {
        if (!comes_here(&e, r, s, rank, i))
            continue;
        const size_t run = e * (s->samples + 1) + sample_of(s, rank, i);
        const size_t row = r->first_row[e] + r->sample[run] + s->next_row[run]++,
                     received_row = row_offset + start[e]++;
        s->arrived[row] = (int64_t)(s->gathered ? rank * s->slots + i : received_row);
        s->departed[received_row] = (int64_t)row;
    }
    return rows;
}

static ar_status sort_received(const ari_routes *r, sorting *s)
{
    size_t *start = NULL, row_offset = 0;
    AR_TRY(ARI_TAKE(&start, s->memory, r->groups.n + 1, "received rows"));
    for (size_t rank = 0; rank < s->ranks; rank++)
        row_offset += sort_rank(r, s, rank, row_offset, start);
    return AR_OK;
}

static void count_moved(ari_routes *r, const sorting *s)
{
    size_t e = 0;
    for (size_t rank = 0; rank < s->ranks; rank++) {
        for (size_t i = 0; i < s->slots && s->expert; i++)
            r->receives[rank] += comes_here(&e, r, s, rank, i);
        for (e = 0; e < r->groups.n && !s->expert; e++)
            r->receives[rank] += count_in_turn(s, s->first_expert + e, rank * s->slots, s->slots);
    }
    for (size_t i = 0; i < s->slots && s->expert; i++)
        r->sends[(size_t)s->expert[s->me * s->slots + i] / r->groups.n]++;
    for (e = 0; e < s->experts && !s->expert; e++)
        r->sends[e / r->groups.n] += count_in_turn(s, e, s->me * s->slots, s->slots);
}

/* Gathers [ranks, tokens, n] from each rank's [tokens, n]. */
static ar_status gather(ar_ctx *ctx, ar_tensor *gathered, const ar_tensor *local, const char *tag)
{
    const size_t shape[3] = {(size_t)ar_comm_size(ctx->ep), local->shape[0], local->shape[1]};
    ARI_OWNED size_t *counts = NULL;
    AR_TRY(ar_ctx_tensor(ctx, gathered, local->dtype, 3, shape));
    AR_TRY(ari_equal_counts(&counts, ctx->ep, ar_tensor_count(local)));
    const ar_status st =
        ar_comm_all_gather(ctx->ep, ctx->queue, gathered->data, ar_const(local->data), counts, local->dtype, tag);
    return st;
}

ar_status ari_routes_gather(ar_ctx *ctx, ar_tensor *gathered, ar_tensor *expert, const char *tag)
{
    const size_t shape[3] = {1, expert->shape[0], expert->shape[1]};
    if (!has_peers(ctx))
        return ar_tensor_view(gathered, AR_I32, 3, shape, expert->data);
    AR_TRY(gather(ctx, gathered, expert, tag));
    ar_ctx_release(ctx, expert);
    return AR_OK;
}

ar_tensor ari_routes_local(const ar_ctx *ctx, const ar_tensor *gathered)
{
    const ar_tensor local = ar_tensor_slice(gathered, 0, (size_t)ar_comm_rank(ctx->ep), 1);
    return ari_tensor_rows(&local);
}

ar_status ari_routes_as_numbers(ar_ctx *ctx, ar_tensor *y, const ar_tensor *expert, const ar_tensor *value,
                                size_t experts, const ar_tensor *x)
{
    const size_t n = ar_tensor_count(expert), k = expert->shape[1], width = value ? experts : k;
    ar_tensor like = *x;
    ARI_OWNED int32_t *chosen = NULL;
    ARI_OWNED float *numbers = NULL, *values = NULL;
    like.shape[x->ndim - 1] = width;
    AR_TRY(ar_ctx_tensor(ctx, y, AR_F32, like.ndim, like.shape));
    AR_TRY(ARI_ALLOC(&chosen, n, "the experts of tokens"));
    AR_TRY(ARI_ALLOC(&values, n, "the experts of tokens"));
    AR_TRY(ARI_ALLOC_ZERO(&numbers, ar_tensor_count(y), "the experts of tokens"));
    AR_TRY(ar_ctx_download(ctx, chosen, expert));
    if (value)
        AR_TRY(ar_ctx_download(ctx, values, value));
    for (size_t i = 0; i < n; i++) {
        if (!value)
            numbers[i] = (float)chosen[i];
        else if (chosen[i] >= 0) /* check_experts reports negative experts */
            numbers[i / k * width + (size_t)chosen[i]] = values[i];
    }
    return ar_ctx_upload_floats(ctx, y, numbers, ar_tensor_count(y));
}

/* --- making ------------------------------------------------------------------------------------------------------- */

static ar_status make_sent(ari_routes *r, sorting *s, ar_ctx *ctx, const ari_routing *routing)
{
    AR_TRY(read_experts(s, ctx, routing, ar_comm_rank(ctx->expert_sequence)));
    AR_TRY(ARI_TAKE(&s->place, s->memory, s->slots, "rows of experts"));
    AR_TRY(ARI_TAKE(&s->slot_of, s->memory, s->slots, "slots of tokens"));
    AR_TRY(ARI_TAKE(&s->next_row, s->memory, routing->experts + 1, "rows of experts"));
    if (s->expert)
        sort_sent(s);
    AR_TRY(ari_numbers(ctx, &r->place, AR_I64, s->slots, s->place));
    return ari_numbers(ctx, &r->slot_of, AR_I64, s->slots, s->slot_of);
}

static ar_status make_groups(ari_routes *r, const sorting *s)
{
    const size_t n = r->groups.n;
    AR_TRY(ARI_TAKE(&r->first_row, &r->memory, n + 1, "rows of experts"));
    AR_TRY(ARI_TAKE(&r->sample, &r->memory, n * (s->samples + 1), "rows of samples"));
    count_rows(r, s);
    r->groups.first = r->first_row;
    r->groups.sample = r->sample;
    return AR_OK;
}

/* Makes the runs of all ranks with tokens of the same samples from known routes, for a device without contents. */
static ar_status make_known(ari_routes *r, sorting *s, ar_ctx *ctx, const ari_routing *routing)
{
    const size_t sharers = (size_t)ar_comm_size(ctx->expert_sequence), runs = r->groups.n * s->samples;
    if (!ctx->device->hollow || sharers == 1)
        return AR_OK;
    AR_TRY(ARI_TAKE(&r->known_rows, &r->memory, sharers * runs, "rows of samples"));
    r->groups.known = r->known_rows;
    for (size_t i = 0; i < sharers; i++) {
        AR_TRY(read_experts(s, ctx, routing, (int)i));
        count_runs(r->known_rows + i * runs, s->samples, r, s);
    }
    return AR_OK;
}

static ar_status make_moved(ari_routes *r, sorting *s, ar_ctx *ctx)
{
    AR_TRY(ARI_TAKE(&r->sends, &r->memory, s->ranks, "rows to send"));
    AR_TRY(ARI_TAKE(&r->receives, &r->memory, s->ranks, "rows to receive"));
    count_moved(r, s);
    AR_TRY(ARI_TAKE(&s->next_row, s->memory, r->groups.n * (s->samples + 1), "rows of samples"));
    AR_TRY(ARI_TAKE(&s->arrived, s->memory, r->rows, "received rows"));
    AR_TRY(ARI_TAKE(&s->departed, s->memory, r->rows, "received rows"));
    if (s->expert)
        AR_TRY(sort_received(r, s));
    AR_TRY(ari_numbers(ctx, &r->arrived, AR_I64, r->rows, s->arrived));
    return ari_numbers(ctx, &r->departed, AR_I64, r->rows, s->departed);
}

ar_status ari_routes_make(ari_routes *r, ar_ctx *ctx, const ari_routing *routing)
{
    const size_t ranks = (size_t)ar_comm_size(ctx->ep);
    const size_t sample_ranks = (size_t)(ari_extent(&ctx->layout, ari_expert_axes(&ctx->layout)) / ctx->layout.dp);
    const size_t sharers = ranks < sample_ranks
                               ? ranks
                               : sample_ranks, /* the ranks among them that have tokens of one sample */
        tokens = routing->gathered_experts->shape[1];
    ARI_ENDED(ari_arena_free) ari_arena memory = {0};
    sorting s = {.memory = &memory,
                 .ranks = ranks,
                 .me = (size_t)ar_comm_rank(ctx->ep),
                 .k = routing->gathered_experts->shape[2],
                 .experts = routing->experts,
                 .slots = tokens * routing->gathered_experts->shape[2],
                 .samples = ranks > 1 ? ranks / sharers * routing->samples : routing->samples,
                 .own_samples = routing->samples,
                 .gathered = ctx->layout.dispatch == AR_DISPATCH_ALL_GATHER,
                 .first_expert = routing->experts / ranks * (size_t)ar_comm_rank(ctx->ep)};
    *r = (ari_routes){.k = s.k,
                      .groups = {.n = routing->experts / ranks,
                                 .samples = s.samples,
                                 .longest = tokens / routing->samples * sample_ranks,
                                 .comm = ctx->expert_sequence}};
    AR_TRY(make_sent(r, &s, ctx, routing));
    AR_TRY(make_groups(r, &s));
    if (has_peers(ctx))
        AR_TRY(make_moved(r, &s, ctx));
    return make_known(r, &s, ctx, routing);
}

void ari_routes_end(ari_routes *r, ar_ctx *ctx)
{
    ARI_RELEASE(ctx, &r->departed, &r->arrived, &r->slot_of, &r->place);
    ari_arena_free(&r->memory);
}

/* --- moving rows -------------------------------------------------------------------------------------------------- */

/* y [rows, h] = rows of x in another order. */
static ar_status reorder(ar_ctx *ctx, ar_tensor *y, ar_tensor *x, const ar_tensor *row_of)
{
    AR_TRY(ari_take_rows(ctx, y, x, row_of, (ar_cbuf){NULL}, 1));
    ar_ctx_release(ctx, x);
    return AR_OK;
}

/* Exchanges rows: y [rows, h] = the rows of x that the other ranks have for this one. */
static ar_status exchange(ar_ctx *ctx, ar_tensor *y, ar_tensor *x, size_t rows, const size_t *sends,
                          const size_t *receives, const char *tag)
{
    const size_t h = x->shape[1], ranks = (size_t)ar_comm_size(ctx->ep);
    ARI_OWNED size_t *counts = NULL; /* numbers of rows to send and to receive */
    AR_TRY(ari_new_rows(ctx, y, x->dtype, rows, h));
    AR_TRY(ARI_ALLOC(&counts, 2 * ranks, "elements to exchange"));
    for (size_t r = 0; r < ranks; r++) {
        counts[r] = sends[r] * h;
        ctx->routed.rows += r == (size_t)ar_comm_rank(ctx->ep) ? 0 : sends[r];
        counts[ranks + r] = receives[r] * h;
    }
    const ar_status st =
        ar_comm_all_to_all(ctx->ep, ctx->queue, y->data, ar_const(x->data), counts, counts + ranks, x->dtype, tag);
    ar_ctx_release(ctx, x);
    return st;
}

/* Gathers all tokens with their weights, whether or not an expert of this rank is chosen. */
static ar_status gather_tokens(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const ar_tensor *weight,
                               const ari_routes *r, const char *tag)
{
    ar_tensor tokens, weights = {.ndim = 0};
    AR_TRY(gather(ctx, &tokens, x, tag));
    if (weight)
        AR_TRY(gather(ctx, &weights, weight, tag));
    const ar_tensor gathered_rows = ari_tensor_rows(&tokens);
    AR_TRY(ari_take_rows(ctx, y, &gathered_rows, &r->arrived, ar_const(weights.data), r->k));
    ARI_RELEASE(ctx, &weights, &tokens);
    return AR_OK;
}

ar_status ari_routes_send(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const ar_tensor *weight, const ari_routes *r,
                          const char *tag)
{
    const ar_tensor x_rows = ari_tensor_rows(x);
    ar_tensor sent, received;
    if (has_peers(ctx) && ctx->layout.dispatch == AR_DISPATCH_ALL_GATHER)
        return gather_tokens(ctx, y, &x_rows, weight, r, tag);
    AR_TRY(ari_take_rows(ctx, &sent, &x_rows, &r->slot_of, weight ? ar_const(weight->data) : (ar_cbuf){NULL}, r->k));
    *y = sent;
    if (!has_peers(ctx))
        return AR_OK;
    AR_TRY(exchange(ctx, &received, &sent, r->rows, r->sends, r->receives, tag));
    return reorder(ctx, y, &received, &r->arrived);
}

ar_status ari_routes_return(ar_ctx *ctx, ar_tensor *y, ar_tensor *x, const ari_routes *r, const char *tag)
{
    ar_tensor sent;
    *y = *x;
    if (!has_peers(ctx))
        return AR_OK;
    AR_TRY(reorder(ctx, &sent, x, &r->departed));
    return exchange(ctx, y, &sent, r->place.shape[0], r->receives, r->sends, tag);
}

ar_status ari_routes_combine(ar_ctx *ctx, ar_tensor *y, const ar_tensor *rows, const ar_tensor *weight,
                             const ari_routes *r, const ar_tensor *x)
{
    const ar_cbuf w = weight ? ar_const(weight->data) : (ar_cbuf){NULL};
    AR_TRY(ari_like(ctx, y, x, x->shape[x->ndim - 1]));
    return ARI_KERNEL(ctx, combine_rows, y, rows, w, ar_const(r->place.data), r->k);
}
