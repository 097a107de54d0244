/* SPDX-License-Identifier: Apache-2.0 */
/* Plan of the buckets: which parameter is in which bucket at which offset. It depends only on the sizes of the
 * parameters. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/comm/comm_private.h"
#include "ref/core/axis.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/parts.h"
#include "ref/train/units.h"

/* Kinds of parameters that may share a bucket: of one unit and one storage type, reduced over the same groups, and with
 * equally many elements on every tensor-parallel rank or not; on request matrices separately. Each tensor-parallel rank
 * has a copy of a replicated parameter, and floats are added in an order that depends on the position in the bucket.
 * Next to a shard whose length differs between ranks, a copy would have different positions, and the copies different
 * bits. */
enum {
    KIND_BF16 = 1,
    KIND_SPREAD = 2,
    KIND_UNEVEN = 4,
    KIND_ENDS = 8,
    KIND_EXPERT = 16,
    KIND_MATRIX = 32,
    KIND_TABLE = 64,
    KINDS = 128
};

typedef struct candidate {
    ar_param *param;
    size_t registered; /* index in the list */
    size_t elements;
    size_t bytes; /* size on the tensor-parallel rank with the most elements, so that ranks agree on the order of
                     buckets */
    bool uneven;  /* true if tensor-parallel ranks have different numbers of elements */
    int unit;     /* unit, numbered in backward order, the root unit last */
    int kind;
    size_t bucket;
} candidate;

typedef struct draft {
    ari_arena arena;       /* memory of the plan's lists */
    candidate *candidates; /* [n] candidates in packing order */
    size_t n;
    size_t *last_index; /* [buckets] index in `candidates` of the last parameter of each bucket */
    size_t buckets;
} draft;

static bool is_spread(const ar_ddp *d, const ar_param *p)
{
    return p->spread && ar_comm_size(d->ctx->tp) > 1;
}

static bool is_at_ends(const ar_ddp *d, const ar_param *p)
{
    return p->ends && ar_comm_size(d->ctx->ends) > 1;
}

static int larger_first(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    ARI_ASCENDING(x->unit, y->unit);
    ARI_ASCENDING(y->bytes, x->bytes);
    return x->registered < y->registered ? -1 : x->registered > y->registered;
}

/* Returns the dimension that the ranks shard, which is the same on each rank; -1: none. A vocabulary of one row is
 * entire on one rank and empty on the others. */
static int shared_dim(const ar_layout *o, int parts)
{
    for (int i = 0; o->nbox > 0 && i < o->ndim; i++) {
        if (ari_layout_local(o, i) < o->shape[i])
            return i;
    }
    return parts > 1 && (o->nbox == 0 || o->shape[0] == 1) ? 0 : -1;
}

/* Computes the largest number of bytes over ranks, and whether all ranks have equally many. Parts differ only in the
 * vocabulary (dimension 0): the first rank has most rows, and the last ranks may have none. */
static ar_status measure_candidate(candidate *c, const ar_ddp *d, const ar_param *p)
{
    size_t *const n = &c->bytes;
    const ar_layout *o = &p->layout;
    const int tp = p->expert && ari_experts_unsplit(&d->ctx->layout) ? 1 : ar_comm_size(d->ctx->tp);
    const int parts = o->replicas > 0 && o->replicas < tp ? tp / o->replicas : 1;
    const int dim = shared_dim(o, parts);
    size_t start = 0, max_extent = 0;
    *n = 1;
    for (int i = 0; i < o->ndim; i++) {
        ari_split_uneven(o->shape[i], i == dim ? parts : 1, 0, &start, &max_extent);
        AR_TRY(ari_mul_size(n, *n, max_extent));
    }
    c->uneven = dim >= 0 && o->shape[dim] % (size_t)parts != 0;
    return ari_mul_size(n, *n, sizeof(float));
}

/* Collects the parameters of a unit, in reverse order of registration. */
static ar_status collect_unit(draft *f, const ar_ddp *d, int unit)
{
    for (size_t i = d->n; i-- > 0;) {
        ar_param *p = d->params[i];
        candidate c = {.param = p,
                       .registered = i,
                       .elements = ar_tensor_count(&p->value),
                       .unit = unit == d->units ? unit : d->units - 1 - unit};
        if (!p->requires_grad || d->unit_of[i] != unit)
            continue;
        const bool half = p->value.dtype == AR_BF16;
        AR_TRY(measure_candidate(&c, d, p));
        c.kind = (c.uneven ? KIND_UNEVEN : 0) | (is_spread(d, p) ? KIND_SPREAD : 0) |
                 (is_at_ends(d, p) ? KIND_ENDS : 0) | (p->expert ? KIND_EXPERT : 0) | (half ? KIND_BF16 : 0) |
                 (half && p->adds >= AR_ADDS_BY_POSITION ? KIND_TABLE : 0) |
                 (d->options.matrices_apart && p->matrix ? KIND_MATRIX : 0);
        f->candidates[f->n++] = c;
    }
    return AR_OK;
}

static ar_status collect_candidates(draft *f, const ar_ddp *d)
{
    AR_TRY(ARI_TAKE(&f->candidates, &f->arena, d->n, "parameters of buckets"));
    AR_TRY(ARI_TAKE(&f->last_index, &f->arena, d->n, "buckets"));
    for (int unit = d->units; unit-- > 0;)
        AR_TRY(collect_unit(f, d, unit));
    AR_TRY(collect_unit(f, d, d->units));
    if (d->options.order == AR_BUCKETS_BY_SIZE)
        qsort(f->candidates, f->n, sizeof *f->candidates, larger_first);
    return AR_OK;
}

/* Packs by next fit, separately for each kind: one bucket of each kind is open at a time, within a unit. */
static void pack_candidates(draft *f, size_t capacity)
{
    size_t open[KINDS], filled[KINDS];
    bool any[KINDS] = {false};
    for (size_t i = 0; i < f->n; i++) {
        candidate *c = &f->candidates[i];
        const int k = c->kind;
        if (i > 0 && c->unit != f->candidates[i - 1].unit)
            memset(any, 0, sizeof any);
        const bool fits = any[k] && capacity > 0 && filled[k] <= capacity && c->bytes <= capacity - filled[k];
        if (!fits) {
            any[k] = true;
            open[k] = f->buckets++;
            filled[k] = 0;
        }
        filled[k] += c->bytes;
        c->bucket = open[k];
        f->last_index[c->bucket] = i;
    }
}

static int earlier_done(const void *a, const void *b)
{
    const size_t x = *(const size_t *)a, y = *(const size_t *)b;
    return x < y ? -1 : x > y;
}

/* Numbers buckets in the order in which packing completes them, so that a bucket waiting for the very last parameter
 * does not delay others. Buckets that a pipeline's first stage must also complete come last. */
static void number_buckets(draft *f)
{
    for (size_t b = 0; b < f->buckets; b++)
        f->last_index[b] += f->candidates[f->last_index[b]].kind & KIND_ENDS ? f->n : 0;
    qsort(f->last_index, f->buckets, sizeof *f->last_index, earlier_done);
    for (size_t b = 0; b < f->buckets; b++)
        f->last_index[b] %= f->n;
}

static void init_bucket(ar_ddp *d, ari_bucket *b, const candidate *head)
{
    const size_t option = d->options.bucket_bytes;
    b->ddp = d;
    b->info.index = (size_t)(b - d->buckets);
    b->info.spread = is_spread(d, head->param);
    b->info.ends = is_at_ends(d, head->param);
    b->info.storage = head->param->value.dtype;
    b->info.capacity = head->bytes > option ? head->bytes : option;
    b->expert = head->param->expert;
    b->moves = ar_comm_size(ari_ctx_data(d->ctx, b->expert)) > 1 || b->info.spread || b->info.ends || d->stage >= 2;
    snprintf(b->tag, sizeof b->tag, "bucket %zu: %s", b->info.index, head->param->name);
}

/* Appends c to bucket b at place `slot_index` of the lists of all buckets. */
static ar_status append_candidate(ar_ddp *d, ari_bucket *b, const candidate *c, size_t slot_index)
{
    if (b->info.params == 0) {
        init_bucket(d, b, c);
        b->slot = d->slots + slot_index;
        b->info.param = d->bucketed + slot_index;
        b->info.offset = d->offsets + slot_index;
    }
    d->slots[slot_index] = (ari_ddp_slot){.ddp = d, .param = c->param, .bucket = b->info.index};
    d->bucketed[slot_index] = c->param;
    d->offsets[slot_index] = b->info.elements;
    b->info.params++;
    AR_TRY(ari_add_size(&b->info.bytes, b->info.bytes, c->elements * sizeof(float)));
    return ari_add_size(&b->info.elements, b->info.elements, c->elements);
}

/* Buckets are added in the order of their index. */
static void add_to_unit(ar_ddp *d, ari_bucket *b)
{
    size_t i = 0;
    while (d->params[i] != b->info.param[0])
        i++;
    ari_unit *u = &d->unit[d->unit_of[i]];
    u->bucket = u->buckets == 0 ? b : u->bucket; /* buckets of a unit are consecutive */
    u->buckets++;
    u->slots += b->info.params;
}

static ar_status fill_buckets(ar_ddp *d, const draft *f)
{
    AR_TRY(ARI_TAKE(&d->slots, &d->lists, f->n, "parameters of buckets"));
    AR_TRY(ARI_TAKE(&d->bucketed, &d->lists, f->n, "parameters of buckets"));
    AR_TRY(ARI_TAKE(&d->offsets, &d->lists, f->n, "offsets in buckets"));
    AR_TRY(ARI_TAKE(&d->buckets, &d->lists, f->buckets, "buckets"));
    d->count = f->buckets;
    for (size_t i = 0; i < d->count; i++) {
        const size_t draft_bucket = f->candidates[f->last_index[i]].bucket;
        for (size_t k = 0; k <= f->last_index[i]; k++) {
            if (f->candidates[k].bucket == draft_bucket)
                AR_TRY(append_candidate(d, &d->buckets[i], &f->candidates[k], d->trained++));
        }
        add_to_unit(d, &d->buckets[i]);
    }
    return AR_OK;
}

/* ZeRO: the slices of each bucket, and this rank's. */
static ar_status share_out(ar_ddp *d)
{
    const int shard = ar_comm_size(d->ctx->shard), copies = ar_comm_size(d->ctx->expert_shard);
    const size_t max_ranks = (size_t)(shard > copies ? shard : copies);
    size_t total = 0, start = 0;
    AR_TRY(ari_mul_size(&total, d->count, max_ranks));
    AR_TRY(ARI_TAKE(&d->all_counts, &d->lists, total, "shares of buckets"));
    for (size_t i = 0; i < d->count; i++) {
        ari_bucket *b = &d->buckets[i];
        const ar_comm *group = ari_ctx_shard(d->ctx, b->expert);
        const int n = ar_comm_size(group);
        size_t *counts = d->all_counts + i * max_ranks;
        for (int r = 0; r < n; r++)
            ari_comm_slice(b->info.elements, n, r, &start, &counts[r]);
        ari_comm_slice(b->info.elements, n, ar_comm_rank(group), &b->info.own_start, &b->info.own_count);
        b->shares = counts;
        b->counts = n > 1 ? counts : NULL;
    }
    return AR_OK;
}

static void end_draft(draft *f)
{
    ari_arena_free(&f->arena);
}

ar_status ari_buckets_plan(ar_ddp *d)
{
    ARI_ENDED(end_draft) draft f = {.n = 0};
    AR_TRY(collect_candidates(&f, d));
    pack_candidates(&f, d->options.bucket_bytes);
    number_buckets(&f);
    AR_TRY(fill_buckets(d, &f));
    for (size_t i = 0; i < d->count; i++)
        d->buckets[i].info.own_count = d->buckets[i].info.elements;
    return d->options.zero ? share_out(d) : AR_OK;
}
