/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/dump/reshard.h"

#include <stdlib.h>
#include <string.h>

#include "ref/core/atomic_file.h"
#include "ref/core/clock.h"
#include "ref/io/file.h"
#include "verify/dump/dump.h"

ARI_OWNER(ar_st_writer, ar_st_writer_discard)

#define CHUNK_BYTES ((size_t)8 << 20)

/* --- moving elements: from where the input has them to where the output does, some megabytes at a time ------------ */

/* Copies what two boxes of a tensor have in common: `from`, of what is at `data`, and `to`, all of it at buffer,
 * row-major. Rows of the input past `rows` are not taken. */
static void copy_common(char *buffer, const ar_dump_box *to, const char *data, const ar_dump_box *from,
                        const ari_rs_tensor *t, bool mapped)
{
    const size_t width = ar_dtype_bytes(t->from->dtype);
    ar_dump_tensor target = {.dtype = t->from->dtype, .ndim = t->ndim, .count = 1};
    ar_dump_box taken = *from, both;
    size_t last = 0; /* element, counted from the first */
    const size_t left = t->rows > from->global[0] ? t->rows - from->global[0] : 0;
    if (t->ndim > 0 && from->extent[0] > left)
        taken.extent[0] = left;
    if (!ari_dump_box_cut(&both, &taken, t->ndim, to->global, to->extent))
        return;
    for (int d = 0; d < t->ndim; d++) {
        both.global[d] -= to->global[d];
        last += (both.extent[d] - 1) * from->stride[d];
        target.shape[d] = to->extent[d];
        target.count *= to->extent[d];
    }
    ari_dump_copy_box(buffer, &target, data, &both, 0, target.count);
    if (mapped)
        ari_pages_drop(data + both.at * width, (last + 1) * width);
}

/* sum: of partial parts, row-major; NULL: the parts are copied. */
static void copy_into(char *buffer, const ar_dump_box *to, const ari_rs_tensor *t, const char *sum)
{
    const ar_dump_tensor *from = t->from;
    if (sum) {
        ar_dump_box all = {.at = 0};
        memcpy(all.extent, from->shape, sizeof all.extent);
        ari_row_major(all.stride, from->ndim, from->shape);
        copy_common(buffer, to, sum, &all, t, false);
        return;
    }
    for (size_t i = 0; i < from->parts; i++) {
        for (size_t k = 0; k < from->part[i].boxes && from->part[i].replica == 0; k++)
            copy_common(buffer, to, from->part[i].entry->data, &from->part[i].box[k], t, true);
    }
}

typedef struct sink {
    ari_rs *r;
    ar_st_writer *writer;
    size_t index; /* of the tensor in the file */
    ari_sha256 *hash;
    char *buffer;
    size_t capacity;
} sink;

static ar_status put(sink *s, const void *data, size_t bytes)
{
    ari_sha256_update(s->hash, data, bytes);
    return ar_st_writer_put(s->writer, s->index, data, bytes);
}

static ar_status need_bytes(sink *s, size_t bytes)
{
    if (bytes <= s->capacity)
        return AR_OK;
    free(s->buffer);
    s->buffer = NULL;
    s->capacity = 0;
    AR_TRY(ari_alloc((void **)&s->buffer, bytes, 1, "a piece of a tensor"));
    s->capacity = bytes;
    return AR_OK;
}

static ar_status copy_rows(sink *s, const ari_rs_item *item, const char *sum)
{
    const int ndim = item->tensor->ndim;
    const size_t rows = ndim > 0 ? item->box.extent[0] : 1, row_bytes = item->bytes / rows;
    const size_t step = row_bytes < CHUNK_BYTES ? CHUNK_BYTES / row_bytes : 1;
    const bool padded = ndim > 0 && item->tensor->shape[0] > item->tensor->rows;
    AR_TRY(need_bytes(s, (step < rows ? step : rows) * row_bytes));
    for (size_t first = 0; first < rows; first += step) {
        const size_t n = rows - first < step ? rows - first : step;
        if (padded && s->buffer)
            memset(s->buffer, 0, n * row_bytes);
        ar_dump_box part = item->box;
        if (ndim > 0) {
            part.global[0] += first;
            part.extent[0] = n;
        }
        copy_into(s->buffer, &part, item->tensor, sum);
        AR_TRY(put(s, s->buffer, n * row_bytes));
        ari_rs_progress(s->r, n * row_bytes, item->tensor->from->name);
    }
    return AR_OK;
}

/* All bytes as they are: elements smaller than a byte are not taken apart. */
static ar_status copy_bytes(sink *s, const ari_rs_item *item)
{
    const ar_dump_tensor *from = item->tensor->from;
    if (!from->whole)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "tensor '%s': %s has elements of less than a byte, whose parts are not put together",
                            ARI_SHOW(from->name), ar_dtype_name(from->dtype));
    for (size_t at = 0; at < item->bytes; at += CHUNK_BYTES) {
        const size_t n = item->bytes - at < CHUNK_BYTES ? item->bytes - at : CHUNK_BYTES;
        AR_TRY(put(s, (const char *)from->whole + at, n));
        ari_pages_drop((const char *)from->whole + at, n);
        ari_rs_progress(s->r, n, from->name);
    }
    return AR_OK;
}

static ar_status copy_item(sink *s, const ari_rs_item *item)
{
    const ar_dump_tensor *from = item->tensor->from;
    ARI_OWNED char *sum = NULL;
    ar_status st = AR_OK;
    if (item->bytes == 0)
        return AR_OK;
    if (ar_dtype_bytes(from->dtype) == 0)
        return copy_bytes(s, item);
    if (item->tensor->partial) {
        AR_TRY(ari_alloc((void **)&sum, from->count + 1, ar_dtype_bytes(from->dtype), from->name));
        st = ar_dump_read(from, 0, from->count, sum);
    }
    if (st == AR_OK)
        st = copy_rows(s, item, sum);
    return st;
}

/* Writes the data of the items, in their order, and hashes it on the way. */
static ar_status copy_items(ari_rs *r, ar_st_writer *w, const ari_rs_contents *c, ari_sha256 *hash)
{
    sink s = {.r = r, .writer = w, .hash = hash};
    ar_status st = AR_OK;
    for (; s.index < c->n && st == AR_OK; s.index++)
        st = copy_item(&s, &c->item[s.index]);
    free(s.buffer);
    return st;
}

/* --- one file ----------------------------------------------------------------------------------------------------- */

static ar_status open_writer(ar_st_writer **w, const ari_rs_folder *d, ari_rs_contents *c)
{
    ar_st_tensor *list = NULL;
    char *path = NULL;
    AR_TRY(ARI_TAKE(&list, &c->arena, c->n, "the tensors of a file"));
    AR_TRY(ari_arena_path(&c->arena, &path, d->path, c->file->name));
    for (size_t i = 0; i < c->n; i++)
        list[i] = ari_rs_described(c->item[i].tensor, c->item[i].box.extent);
    return ar_st_writer_open(w, path, list, c->n, c->pair, c->pairs);
}

static ar_status write_file(ari_rs_folder *d, ari_rs *r, ari_rs_contents *c)
{
    ari_sha256 hash;
    ARI_OWNED_BY(ar_st_writer_discard) ar_st_writer *w = NULL;
    char hex[65];
    ari_sha256_init(&hash);
    AR_TRY(open_writer(&w, d, c));
    AR_TRY(copy_items(r, w, c, &hash));
    ari_sha256_final(&hash, hex);
    const ar_status st = ar_st_writer_commit(w);
    w = NULL;
    AR_TRY(st);
    return ari_rs_folder_add(d, c->file, hex);
}

static ar_status make_file(ari_rs_folder *d, ari_rs *r, const ari_rs_file *f, ar_reshard_result *result)
{
    ARI_ENDED(ari_rs_contents_free) ari_rs_contents c;
    bool kept = false;
    AR_TRY(ari_rs_contents_make(&c, r, f));
    if (!r->o->dry_run)
        AR_TRY(ari_rs_folder_kept(&kept, d, r, &c));
    if (kept)
        ari_rs_progress(r, f->bytes, f->name);
    else if (!r->o->dry_run)
        AR_TRY(write_file(d, r, &c));
    result->files++;
    result->files_kept += kept;
    result->bytes += f->bytes;
    const ar_reshard_file result_file = {.name = f->name, .tensors = f->items, .bytes = f->bytes, .kept = kept};
    if (r->o->file)
        r->o->file(r->o->user, &result_file);
    return AR_OK;
}

/* --- all of it ---------------------------------------------------------------------------------------------------- */

static ar_status refuse_copies(const ar_dump_disagreement *x)
{
    return ar_error_set(
        AR_ERR_DATA,
        "tensor '%s': the copies of ranks %d and %d differ in %zu of %zu elements, first at element %zu: %.9g and %.9g",
        ARI_SHOW(x->tensor->name), x->ranks[0], x->ranks[1], x->elements, x->count, x->index, x->value[0], x->value[1]);
}

/* One of several copies is taken, so all must be equal. */
static ar_status compare_copies(ari_rs *r)
{
    for (size_t i = 0; i < r->tensors; i++) {
        const ar_dump_tensor *t = r->tensor[i].from;
        ar_dump_disagreement x;
        bool found = false;
        if (t->parts < 2)
            continue;
        ari_rs_progress(r, 0, t->name);
        AR_TRY(ar_dump_replicas(t, &found, &x));
        for (size_t k = 0; k < t->parts; k++)
            ari_pages_drop(t->part[k].entry->data, t->part[k].entry->bytes);
        if (found)
            return refuse_copies(&x);
    }
    return AR_OK;
}

/* The index of a sharded model, once all of its files are there. */
static ar_status write_index(ari_rs *r)
{
    ar_st_tensor *list = NULL;
    size_t n = 0;
    if (r->shards < 2)
        return AR_OK;
    for (size_t s = 0; s < r->shards; s++)
        n += r->file[s].tensors;
    AR_TRY(ARI_TAKE(&list, &r->arena, n, "the list of tensors"));
    for (size_t i = 0; i < n; i++)
        list[i] = ari_rs_described(r->list[i], r->list[i]->shape);
    return ar_st_write_index(r->o->out, list, n, r->shard, r->shards);
}

static ar_status write_all(ari_rs *r, ar_reshard_result *result)
{
    ARI_ENDED(ari_rs_folder_end) ari_rs_folder d = {.fd = -1};
    if (!r->o->dry_run) {
        AR_TRY(ari_rs_folder_begin(&d, r));
        AR_TRY(compare_copies(r));
    }
    for (size_t k = 0; k < r->files; k++)
        AR_TRY(make_file(&d, r, &r->file[k], result));
    if (r->o->dry_run)
        return AR_OK;
    if (r->merged)
        AR_TRY(write_index(r));
    return ari_rs_copy_small(&d, r, &result->copied);
}

static ar_status run_reshard(ari_rs *r, ar_reshard_result *result)
{
    AR_TRY(ari_rs_open(r));
    AR_TRY(ari_rs_plan(r));
    if (r->tensors == 0)
        return ar_error_set(AR_ERR_DATA, "%s: none of its files holds a tensor; expected those of a model's weights",
                            ARI_SHOW(r->o->in));
    result->tensors = r->tensors;
    for (size_t i = 0; i < r->tensors; i++) {
        if (r->tensor[i].bytes > result->largest_tensor)
            result->largest_tensor = r->tensor[i].bytes;
    }
    if (r->layout.dp > 1 && !r->o->dp_copies)
        (void)ari_rs_note(
            r, false,
            "dp=%d: the ranks of a data-parallel group hold the same, so only those of coordinate 0 have a file",
            r->layout.dp);
    return write_all(r, result);
}

#define MAX_RANKS 65536
#define MAX_PAD ((size_t)1 << 20)
static ar_status check_extents(const ar_reshard_options *o, const ar_parallel *p)
{
    const size_t model = (size_t)p->tp * (size_t)p->pp;
    if (o->tp < 0 || o->dp < 0 || o->pp < 0 || o->virtual_stages < 0)
        return ar_error_set(AR_ERR_ARG, "tp=%d, dp=%d, pp=%d, virtual stages=%d: extents are at least 1", o->tp, o->dp,
                            o->pp, o->virtual_stages);
    if (model > MAX_RANKS || model * (size_t)p->dp > MAX_RANKS)
        return ar_error_set(AR_ERR_ARG, "tp=%d, dp=%d, pp=%d: more than %d ranks", p->tp, p->dp, p->pp, MAX_RANKS);
    if (o->pad_vocab > MAX_PAD)
        return ar_error_set(AR_ERR_ARG, "a vocabulary padded to a multiple of %zu: of at most %zu", o->pad_vocab,
                            MAX_PAD);
    return AR_OK;
}

/* Refuses what the layout would leave without any effect. */
static ar_status check_use(const ari_rs *r)
{
    const ar_reshard_options *o = r->o;
    if (r->layout.pp == 1 && (r->layout.virtual_stages > 1 || o->stages.n > 0))
        return ar_error_set(AR_ERR_ARG, "%s without a pipeline: give a pp of at least 2",
                            o->stages.n > 0 ? "layers of stages" : "virtual stages");
    if (r->layout.dp == 1 && o->dp_copies)
        return ar_error_set(AR_ERR_ARG, "copies of data-parallel ranks without any: give a dp of at least 2");
    if (r->layout.tp == 1 && o->embedding_hidden)
        return ar_error_set(AR_ERR_ARG, "an embedding split along the hidden dimension without ranks that split it: "
                                        "give a tp of at least 2");
    if (!r->merged && o->shard_bytes > 0)
        return ar_error_set(AR_ERR_ARG,
                            "a largest file of %zu bytes is that of a merged checkpoint, and a rank has one "
                            "file: give no shard size, or no layout",
                            o->shard_bytes);
    return AR_OK;
}

ar_status ar_reshard(ar_reshard_result *result, const ar_reshard_options *o)
{
    const uint64_t start = ari_now_ns();
    ari_rs r = {.o = o,
                .layout = {.tp = ari_at_least_one(o->tp),
                           .dp = ari_at_least_one(o->dp),
                           .pp = ari_at_least_one(o->pp),
                           .virtual_stages = ari_at_least_one(o->virtual_stages),
                           .stages = o->stages,
                           .schedule = o->virtual_stages > 1 ? AR_PP_INTERLEAVED : AR_PP_1F1B}};
    *result = (ar_reshard_result){.files = 0};
    if (!o->in || (!o->out && !o->dry_run))
        return ar_error_set(AR_ERR_ARG, "reshard: an input and an output are needed");
    AR_TRY(check_extents(o, &r.layout));
    r.ranks = ari_ranks_of(&r.layout);
    r.merged = ari_extent(&r.layout, ARI_ALL_AXES) == 1;
    AR_TRY(check_use(&r));
    const ar_status st = run_reshard(&r, result);
    ari_rs_close(&r);
    result->seconds = (double)(ari_now_ns() - start) * 1e-9;
    return st;
}
