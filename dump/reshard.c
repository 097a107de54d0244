/* SPDX-License-Identifier: Apache-2.0 */
#include "dump/reshard.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/clock.h"
#include "ref/core/out.h"
#include "ref/core/size.h"
#include "ref/io/file.h"

/* --- what is told ------------------------------------------------------------------------------------------------- */

#define NOTE 1024

void ari_rs_note(const ari_rs *r, const char *format, ...)
{
    char text[NOTE];
    va_list args;
    if (!r->o->note)
        return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    r->o->note(r->o->user, text);
}

ar_status ari_rs_remark(const ari_rs *r, const char *format, ...)
{
    char text[NOTE];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (r->o->strict)
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s", text);
    ari_rs_note(r, "%s", text);
    return AR_OK;
}

void ari_rs_progress(ari_rs *r, size_t bytes, const char *what)
{
    r->done += bytes;
    if (r->o->progress)
        r->o->progress(r->o->user, r->bytes > 0 ? (double)r->done / (double)r->bytes : 1.0, what);
}

/* --- one file ----------------------------------------------------------------------------------------------------- */

static ar_status open_writer(ar_st_writer **w, const ari_rs_folder *d, const ari_rs_file *f, const ari_rs_item *item,
                             size_t n, const ari_rs_metadata *m)
{
    ar_st_tensor *list = NULL;
    char *path = NULL;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&list, n, sizeof *list, "the tensors of a file"));
    AR_TRY_TO(done, st, ari_file_path(&path, d->path, f->name));
    for (size_t i = 0; i < n; i++) {
        list[i] = (ar_st_tensor){
            .name = item[i].tensor->from->name, .dtype = item[i].tensor->from->dtype, .ndim = item[i].tensor->ndim};
        memcpy(list[i].shape, item[i].box.extent, sizeof list[i].shape);
    }
    st = ar_st_writer_open(w, path, list, n, m->pair, m->pairs);
done:
    free(list);
    free(path);
    return st;
}

static ar_status write_file(ari_rs_folder *d, ari_rs *r, const ari_rs_file *f, const ari_rs_item *item, size_t n,
                            const ari_rs_metadata *m)
{
    ari_sha256 hash = {NULL};
    ar_st_writer *w = NULL;
    ar_status st = AR_OK;
    char hex[65];
    AR_TRY(ari_sha256_init(&hash));
    AR_TRY_TO(done, st, open_writer(&w, d, f, item, n, m));
    AR_TRY_TO(done, st, ari_rs_copy(r, w, item, n, &hash));
    AR_TRY_TO(done, st, ari_sha256_final(&hash, hex));
    st = ar_st_writer_commit(w);
    w = NULL;
    if (st == AR_OK)
        st = ari_rs_folder_add(d, f, hex);
done:
    ar_st_writer_discard(w);
    ari_sha256_drop(&hash);
    return st;
}

static ar_status make_file(ari_rs_folder *d, ari_rs *r, const ari_rs_file *f, ar_reshard_result *result)
{
    ari_rs_metadata m = {.pairs = 0};
    ari_rs_item *item = NULL;
    size_t n = 0;
    bool kept = false;
    ar_status st = AR_OK;
    AR_TRY(ari_rs_items(&item, &n, r, f));
    if (!r->o->dry_run) {
        AR_TRY_TO(done, st, ari_rs_metadata_of(&m, r, f, item, n));
        AR_TRY_TO(done, st, ari_rs_folder_kept(&kept, d, r, f, item, n, &m));
        if (kept)
            ari_rs_progress(r, f->bytes, f->name);
        else
            AR_TRY_TO(done, st, write_file(d, r, f, item, n, &m));
    }
    result->files++;
    result->files_kept += kept;
    result->bytes += f->bytes;
    const ar_reshard_file told = {.name = f->name, .tensors = n, .bytes = f->bytes, .kept = kept};
    if (r->o->file)
        r->o->file(r->o->user, &told);
done:
    ari_rs_metadata_free(&m);
    free(item);
    return st;
}

/* --- all of it ---------------------------------------------------------------------------------------------------- */

static ar_status refuse_copies(const ar_dump_disagreement *x)
{
    return ar_error_set(
        AR_ERR_DATA,
        "tensor '%s': the copies of ranks %d and %d differ in %zu of %zu elements, first at element %zu: %.9g and %.9g",
        ARI_SHOW(x->tensor->name), x->ranks[0], x->ranks[1], x->elements, x->count, x->index, x->value[0], x->value[1]);
}

/* Of copies one is taken: which one must not matter. */
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
            ari_rs_drop(t->part[k].entry->data, t->part[k].entry->bytes);
        if (found)
            return refuse_copies(&x);
    }
    return AR_OK;
}

/* The index of a sharded model, once all of its files are there. */
static ar_status write_index(const ari_rs *r)
{
    ar_st_tensor *list = NULL;
    size_t n = 0;
    if (r->shards < 2)
        return AR_OK;
    for (size_t s = 0; s < r->shards; s++)
        n += r->file[s].tensors;
    AR_TRY(ari_alloc_zero((void **)&list, n, sizeof *list, "the list of tensors"));
    for (size_t i = 0; i < n; i++) {
        list[i] =
            (ar_st_tensor){.name = r->list[i]->from->name, .dtype = r->list[i]->from->dtype, .ndim = r->list[i]->ndim};
        memcpy(list[i].shape, r->list[i]->shape, sizeof list[i].shape);
    }
    const ar_status st = ar_st_write_index(r->o->out, list, n, r->shard, r->shards);
    free(list);
    return st;
}

static ar_status write_all(ari_rs *r, ar_reshard_result *result)
{
    ari_rs_folder d = {.fd = -1};
    ar_status st = AR_OK;
    if (!r->o->dry_run) {
        AR_TRY_TO(done, st, ari_rs_folder_begin(&d, r));
        AR_TRY_TO(done, st, compare_copies(r));
    }
    for (size_t k = 0; k < r->files; k++)
        AR_TRY_TO(done, st, make_file(&d, r, &r->file[k], result));
    if (!r->o->dry_run) {
        if (r->merged)
            AR_TRY_TO(done, st, write_index(r));
        st = ari_rs_copy_small(&d, r, &result->copied);
    }
done:
    ari_rs_folder_end(&d);
    return st;
}

static ar_status run(ari_rs *r, ar_reshard_result *result)
{
    AR_TRY(ari_rs_open(r));
    AR_TRY(ari_rs_plan(r));
    result->tensors = r->tensors;
    for (size_t i = 0; i < r->tensors; i++) {
        if (r->tensor[i].bytes > result->largest_tensor)
            result->largest_tensor = r->tensor[i].bytes;
    }
    if (r->dp > 1 && !r->o->dp_copies)
        ari_rs_note(
            r, "dp=%d: the ranks of a data-parallel group hold the same, so only those of coordinate 0 have a file",
            r->dp);
    return write_all(r, result);
}

ar_status ar_reshard(ar_reshard_result *result, const ar_reshard_options *o)
{
    const uint64_t start = ari_now_ns();
    ari_rs r = {.o = o, .tp = ari_at_least_one(o->tp), .dp = ari_at_least_one(o->dp), .pp = ari_at_least_one(o->pp)};
    r.merged = r.tp == 1 && r.dp == 1 && r.pp == 1;
    *result = (ar_reshard_result){.files = 0};
    if (!o->in || (!o->out && !o->dry_run))
        return ar_error_set(AR_ERR_ARG, "reshard: an input and an output are needed");
    if (o->tp < 0 || o->dp < 0 || o->pp < 0)
        return ar_error_set(AR_ERR_ARG, "tp=%d, dp=%d, pp=%d: extents are at least 1", o->tp, o->dp, o->pp);
    const ar_status st = run(&r, result);
    ari_rs_close(&r);
    result->seconds = (double)(ari_now_ns() - start) * 1e-9;
    return st;
}
