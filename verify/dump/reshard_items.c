/* SPDX-License-Identifier: Apache-2.0 */
/* The files of resharding's output, and which boxes of which tensors each holds. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/atomic_file.h"
#include "verify/dump/reshard.h"

#define SHARD_BYTES ((size_t)5000000000) /* as Hugging Face has it */

/* --- items -------------------------------------------------------------------------------------------------------- */

/* All of the file's tensor, row-major. */
static void set_box(ari_rs_item *i, const size_t *global, const size_t *extent)
{
    for (int d = 0; d < i->tensor->ndim; d++) {
        i->box.global[d] = global[d];
        i->box.extent[d] = extent[d];
    }
    ari_row_major(i->box.stride, i->tensor->ndim, extent);
}

static void whole_item(ari_rs_item *i, int replica, int replicas)
{
    static const size_t zero[AR_ST_MAX_DIMS];
    i->bytes = i->tensor->bytes;
    i->replica = replica;
    i->replicas = replicas;
    i->boxes = 1;
    set_box(i, zero, i->tensor->shape);
}

/* Box number k of a layout, where it has so many. */
static ar_status split_item(ari_rs_item *i, const ar_layout *o, size_t k)
{
    const size_t bits = ar_dtype_bits(i->tensor->from->dtype);
    ari_boxes boxes;
    if (bits % 8 != 0)
        return ar_error_set(AR_ERR_UNSUPPORTED, "tensor '%s': %s has elements of %zu bits, which are not split",
                            ARI_SHOW(i->tensor->from->name), ar_dtype_name(i->tensor->from->dtype), bits);
    ari_boxes_of(&boxes, o);
    i->replica = o->replica;
    i->replicas = o->replicas;
    i->boxes = boxes.n;
    if (k >= boxes.n)
        return AR_OK;
    i->bytes = ari_volume(boxes.box[k].extent, o->ndim) * (bits / 8); /* at most those of the full tensor */
    set_box(i, boxes.box[k].global, boxes.box[k].extent);
    return AR_OK;
}

/* Which of the pipeline ranks that hold the tensor this is, and how many do; *here: whether it is one of them. */
static void holders_of(const ari_rs *r, const ari_rs_tensor *t, int rank, bool *here, int *place, int *holders)
{
    const int own = ari_place_along(&r->ranks, rank, ARI_CUTS_LAYERS);
    *place = *holders = 0;
    *here = false;
    for (int i = 0; i < ari_ranks_along(&r->ranks, ARI_CUTS_LAYERS); i++) {
        const bool held = t->known               ? ari_placing_staged(&t->placing, &r->layout, r->config.layers, i)
                          : t->layer != SIZE_MAX ? ari_stage_rank_of_layer(&r->layout, r->config.layers, t->layer) == i
                                                 : true;
        if (i == own) {
            *here = held;
            *place = *holders;
        }
        *holders += held;
    }
}

/* *here: whether the rank has something of it in this file. Copies are numbered as the ranks are. */
static ar_status rank_item(ari_rs_item *i, bool *here, const ari_rs *r, const ari_rs_file *f, const ari_rs_tensor *t)
{
    const int dp = r->o->dp_copies ? r->layout.dp : 1, tp_rank = ari_place_along(&r->ranks, f->rank, ARI_CUTS_FEATURES);
    int place = 0, holders = 1;
    *i = (ari_rs_item){.tensor = t};
    holders_of(r, t, f->rank, here, &place, &holders);
    if (!*here)
        return AR_OK;
    if (t->known && r->layout.tp > 1) {
        ar_layout o;
        AR_TRY(ari_placing_layout(&o, &t->placing, t->from->name, r->layout.tp, tp_rank));
        if (o.nbox == 1 && o.replicas == r->layout.tp)
            whole_item(i, o.replica, o.replicas);
        else
            AR_TRY(split_item(i, &o, f->box));
    } else {
        whole_item(i, tp_rank, r->layout.tp);
    }
    i->replica += (place * dp + ari_place_along(&r->ranks, f->rank, ARI_CUTS_SAMPLES)) * i->replicas;
    i->replicas *= holders * dp;
    *here = i->boxes > f->box;
    return AR_OK;
}

/* The official library's order of data in a file. */
static int compare_items(const void *a, const void *b)
{
    const ar_dump_tensor *x = ((const ari_rs_item *)a)->tensor->from, *y = ((const ari_rs_item *)b)->tensor->from;
    ARI_ASCENDING(y->dtype, x->dtype);
    return strcmp(x->name, y->name);
}

static ar_status list_items(ari_rs_item **gives, size_t *n, ari_arena *a, const ari_rs *r, const ari_rs_file *f)
{
    const size_t most = f->tensor ? f->tensors : r->tensors;
    ari_rs_item *list = NULL;
    AR_TRY(ARI_TAKE(&list, a, most, "the tensors of a file"));
    *n = 0;
    for (size_t k = 0; k < most; k++) {
        bool here = true;
        if (f->tensor) {
            list[*n] = (ari_rs_item){.tensor = f->tensor[k]};
            whole_item(&list[*n], 0, 1);
        } else {
            AR_TRY(rank_item(&list[*n], &here, r, f, &r->tensor[k]));
        }
        *n += here;
    }
    qsort(list, *n, sizeof *list, compare_items);
    *gives = list;
    return AR_OK;
}

/* --- files -------------------------------------------------------------------------------------------------------- */

/* As many files as the rank has boxes of any tensor, one at least. */
static ar_status plan_rank(ari_rs *r, size_t *capacity, int rank)
{
    ari_rs_file f = {.rank = rank};
    size_t boxes = 1;
    for (size_t k = 0; k < r->tensors; k++) {
        ari_rs_item item;
        bool here;
        AR_TRY(rank_item(&item, &here, r, &f, &r->tensor[k]));
        boxes = here && item.boxes > boxes ? item.boxes : boxes;
    }
    for (f.box = 0; f.box < boxes; f.box++) {
        AR_TRY(ARI_GROW_IN(&r->arena, &r->file, capacity, r->files, "the list of files"));
        ari_rank_file_name(f.name, f.rank, f.box);
        r->file[r->files++] = f;
    }
    return AR_OK;
}

static ar_status plan_ranks(ari_rs *r)
{
    size_t capacity = 0;
    for (int rank = 0; rank < ari_ranks_along(&r->ranks, ARI_ALL_AXES); rank++) {
        if (r->o->dp_copies || ari_place_along(&r->ranks, rank, ARI_CUTS_SAMPLES) == 0)
            AR_TRY(plan_rank(r, &capacity, rank));
    }
    return AR_OK;
}

/* Models in their order of use, the optimizer's state behind them. Returns how many are the model's. */
static size_t list_merged(ari_rs *r)
{
    size_t model = 0, n;
    for (size_t k = 0; k < r->tensors; k++) {
        if (!r->tensor[k].state)
            r->list[model++] = &r->tensor[k];
    }
    n = model;
    for (size_t k = 0; k < r->tensors; k++) {
        if (r->tensor[k].state)
            r->list[n++] = &r->tensor[k];
    }
    return model;
}

static void add_merged(ari_rs *r, const char *name, size_t from, size_t tensors)
{
    ari_rs_file *f = &r->file[r->files++];
    *f = (ari_rs_file){.tensor = r->list + from, .tensors = tensors};
    snprintf(f->name, sizeof f->name, "%s", name);
}

static ar_status plan_shards(ari_rs *r, size_t model)
{
    ar_st_tensor *t = NULL;
    AR_TRY(ARI_TAKE(&t, &r->arena, model, "the list of tensors"));
    for (size_t k = 0; k < model; k++)
        t[k] = ari_rs_described(r->list[k], r->list[k]->shape);
    const size_t limit = r->o->shard_bytes > 0 ? r->o->shard_bytes : SHARD_BYTES;
    return ar_st_shard_plan(r->shard, &r->shards, t, model, limit);
}

static ar_status plan_merged(ari_rs *r)
{
    AR_TRY(ARI_TAKE(&r->list, &r->arena, r->tensors, "the list of tensors"));
    AR_TRY(ARI_TAKE(&r->shard, &r->arena, r->tensors, "the list of tensors"));
    const size_t model = list_merged(r);
    if (model > 0)
        AR_TRY(plan_shards(r, model));
    AR_TRY(ARI_TAKE(&r->file, &r->arena, r->shards + 1, "the list of files"));
    for (size_t s = 0, from = 0; s < r->shards; s++) {
        char name[AR_ST_SHARD_NAME];
        size_t to = from;
        while (to < model && r->shard[to] == s)
            to++;
        add_merged(r, ar_st_shard_name(name, s, r->shards), from, to - from);
        from = to;
    }
    if (model < r->tensors)
        add_merged(r, ARI_DUMP_STATE, model, r->tensors - model);
    return AR_OK;
}

ar_status ari_rs_plan(ari_rs *r)
{
    AR_TRY(r->merged ? plan_merged(r) : plan_ranks(r));
    for (size_t k = 0; k < r->files; k++) {
        ARI_ARENA_SCOPE(&r->arena);
        ari_rs_item *item = NULL;
        ari_rs_file *f = &r->file[k];
        AR_TRY(list_items(&item, &f->items, &r->arena, r, f));
        for (size_t i = 0; i < f->items; i++)
            f->bytes += item[i].bytes; /* of parts of tensors that files hold */
        AR_TRY(ari_add_size(&r->bytes, r->bytes, f->bytes));
    }
    return AR_OK;
}

/* --- what a file says of itself ----------------------------------------------------------------------------------- */

static void place(ari_placed *p, const ari_rs_item *i)
{
    *p = (ari_placed){.name = (char *)(uintptr_t)i->tensor->from->name,
                      .ndim = i->tensor->ndim,
                      .has_shape = true,
                      .replica = i->replica,
                      .replicas = i->replicas};
    memcpy(p->shape, i->tensor->shape, sizeof p->shape);
    memcpy(p->offset, i->box.global, sizeof p->offset);
}

static int compare_uses(const void *a, const void *b)
{
    const ari_rs_tensor *x = (*(const ari_rs_item *const *)a)->tensor, *y = (*(const ari_rs_item *const *)b)->tensor;
    return x < y ? -1 : x > y; /* r->tensor is in this order */
}

static ar_status placement_texts(ari_rs_contents *c, const ari_rs *r)
{
    const ari_rs_file *f = c->file;
    const size_t n = c->n;
    ari_placement p = {.rank = f->rank,
                       .world = ari_ranks_along(&r->ranks, ARI_ALL_AXES),
                       .tensors = n,
                       .ordered = f->box == 0 ? n : 0};
    const ari_rs_item **by_use = NULL;
    ari_layout_mesh(&p.mesh, p.at, &r->layout, f->rank, ARI_CUTS_FEATURES);
    AR_TRY(ARI_TAKE(&by_use, &c->arena, n, "the tensors of a file"));
    AR_TRY(ARI_TAKE(&p.tensor, &c->arena, n, "the tensors of a file"));
    AR_TRY(ARI_TAKE(&p.order, &c->arena, n, "the tensors of a file"));
    for (size_t i = 0; i < n; i++) {
        place(&p.tensor[i], &c->item[i]);
        by_use[i] = &c->item[i];
    }
    qsort(by_use, n, sizeof *by_use, compare_uses);
    for (size_t i = 0; i < n; i++)
        p.order[i] = (char *)(uintptr_t)by_use[i]->tensor->from->name;
    return ari_placement_text(&c->owned[0], &c->owned[1], &p);
}

ar_status ari_rs_contents_make(ari_rs_contents *c, const ari_rs *r, const ari_rs_file *f)
{
    const char *format = ar_dump_metadata(r->dump, "format");
    *c = (ari_rs_contents){.file = f};
    AR_TRY(list_items(&c->item, &c->n, &c->arena, r, f));
    if (r->o->dry_run)
        return AR_OK;
    if (!r->merged) {
        AR_TRY(placement_texts(c, r));
        ari_rank_metadata(c->pair, c->owned);
        c->pairs = ARI_RANK_METADATA;
    }
    if (format) {
        c->pair[2 * c->pairs] = "format";
        c->pair[2 * c->pairs + 1] = format;
        c->pairs++;
    }
    return AR_OK;
}

void ari_rs_contents_free(ari_rs_contents *c)
{
    free(c->owned[0]);
    free(c->owned[1]);
    ari_arena_end(&c->arena, NULL);
}
