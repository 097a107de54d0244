/* SPDX-License-Identifier: Apache-2.0 */
/* Which elements of a parameter a rank holds: shares of it, and whether copies are copies. */
#include "ref/layers/share.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ref/context/context.h"
#include "ref/core/size.h"
#include "ref/layers/parts.h"
#include "ref/numerics/philox.h"

static size_t product(int n, const size_t *extent)
{
    size_t count = 1;
    for (int d = 0; d < n; d++)
        count *= extent[d];
    return count;
}

/* The list of boxes on its way; the dimensions before `dim` are fixed at `at`. */
typedef struct cutter {
    ari_run_box *out;
    size_t n;
    int ndim;
    const size_t *shape;
    size_t at[AR_MAX_DIMS];
} cutter;

/* Rows [first, first + count) of dimension `dim`, whole. */
static void add_rows(cutter *c, int dim, size_t first, size_t count)
{
    ari_run_box *b = &c->out[c->n++];
    *b = (ari_run_box){{0}, {0}};
    for (int d = 0; d < c->ndim; d++) {
        b->origin[d] = d < dim ? c->at[d] : 0;
        b->extent[d] = d < dim ? 1 : c->shape[d];
    }
    b->origin[dim] = first;
    b->extent[dim] = count;
}

/* [start, end) of what the fixed dimensions leave. */
static void cut(cutter *c, int dim, size_t start, size_t end)
{
    const size_t row = product(c->ndim - dim - 1, c->shape + dim + 1);
    const size_t first = start / row + (start % row != 0), last = end / row; /* whole rows [first, last) */
    if (last < first) {                                                      /* within one row */
        c->at[dim] = last;
        cut(c, dim + 1, start - last * row, end - last * row);
        return;
    }
    if (start % row != 0) {
        c->at[dim] = first - 1;
        cut(c, dim + 1, start % row, row);
    }
    if (first < last)
        add_rows(c, dim, first, last - first);
    if (end % row != 0) {
        c->at[dim] = last;
        cut(c, dim + 1, 0, end % row);
    }
}

size_t ari_run_boxes(ari_run_box *out, int ndim, const size_t *shape, size_t start, size_t count)
{
    cutter c = {.out = out, .ndim = ndim, .shape = shape};
    if (count == 0)
        return 0;
    if (ndim == 0) {
        out[0] = (ari_run_box){{0}, {0}};
        return 1;
    }
    cut(&c, 0, start, start + count);
    return c.n;
}

/* --- in the Hugging Face shape ------------------------------------------------------------------------------------ */

/* The matrix's box in the value's own order of dimensions. */
static ari_run_box stored(const ar_param *p, const ari_run_box *b)
{
    const int rows = p->value.ndim - 2, cols = p->value.ndim - 1;
    ari_run_box s = *b;
    if (!p->transposed)
        return s;
    s.origin[rows] = b->origin[cols];
    s.origin[cols] = b->origin[rows];
    s.extent[rows] = b->extent[cols];
    s.extent[cols] = b->extent[rows];
    return s;
}

/* What a box of the local tensor and one of the parameter's have in common; false: nothing. */
static bool common(ar_box *out, const ari_run_box *b, const ar_box *held, int ndim)
{
    *out = (ar_box){{0}, {0}, {0}};
    for (int d = 0; d < ndim; d++) {
        if (!ari_overlap(&out->local[d], &out->extent[d], b->origin[d], b->extent[d], held->local[d], held->extent[d]))
            return false;
        out->global[d] = held->global[d] + (out->local[d] - held->local[d]);
    }
    return true;
}

/* Every rank of a group holds what this tensor-parallel group shares out; the first of a pipeline's two ends has the
 * first copy. */
static void add_copies(ar_layout *o, const ar_comm *over)
{
    o->replica += o->replicas * ar_comm_rank(over);
    o->replicas *= ar_comm_size(over);
}

ar_status ari_share_layout(ar_layout *o, const ar_param *p, const ar_ctx *ctx, size_t start, size_t count)
{
    ari_run_box run[ARI_RUN_BOXES];
    const ar_tensor matrix = ar_param_matrix(p);
    const size_t n = ari_run_boxes(run, matrix.ndim, matrix.shape, start, count);
    *o = p->layout;
    o->nbox = 0;
    add_copies(o, ctx->replicate);
    if (p->ends)
        add_copies(o, ctx->ends);
    for (size_t i = 0; i < n; i++) {
        const ari_run_box b = stored(p, &run[i]);
        for (size_t k = 0; k < p->layout.nbox; k++) {
            ar_box box;
            if (!common(&box, &b, &p->layout.box[k], o->ndim))
                continue;
            if (o->nbox == AR_MAX_BOXES)
                return ar_error_set(AR_ERR_UNSUPPORTED, "%s: a share of it is more than %d boxes", p->name,
                                    AR_MAX_BOXES);
            o->box[o->nbox++] = box;
        }
    }
    return AR_OK;
}

ar_layout ari_whole_layout(const ar_param *p, const ar_ctx *ctx)
{
    ar_layout o = p->layout;
    add_copies(&o, ctx->dp);
    if (p->ends)
        add_copies(&o, ctx->ends);
    return o;
}

size_t ari_layout_count(const ar_layout *o)
{
    return product(o->ndim, o->shape);
}

struct taker {
    float *local;
    const float *full;
};

static void take_run(void *user, const ari_box_run *r)
{
    const struct taker *t = user;
    memcpy(t->local + r->local_index, t->full + r->full, r->count * sizeof(float));
}

void ari_layout_take(float *host, const ar_tensor *local, const ar_layout *o, const float *full)
{
    struct taker t = {host, full};
    ari_for_each_run(local, o, take_run, &t);
}

/* --- in memory ---------------------------------------------------------------------------------------------------- */

/* One box of the matrix, and the same elements in a run. */
static ar_status views(ar_tensor *box, ar_tensor *flat, const ar_tensor *matrix, const ari_run_box *b, ar_buf run)
{
    *box = *matrix;
    for (int d = 0; d < matrix->ndim; d++)
        *box = ar_tensor_slice(box, d, b->origin[d], b->extent[d]);
    return ar_tensor_view(flat, matrix->dtype, matrix->ndim, box->shape, run);
}

static ar_status move(ar_ctx *ctx, ar_buf run, const ar_param *p, const ar_tensor *value, size_t start, size_t count,
                      bool get)
{
    ari_run_box box[ARI_RUN_BOXES];
    const ar_tensor matrix = p->transposed ? ar_tensor_transposed(value) : *value;
    const size_t n = ari_run_boxes(box, matrix.ndim, matrix.shape, start, count);
    size_t done = 0;
    for (size_t i = 0; i < n; i++) {
        ar_tensor part, flat;
        AR_TRY(views(&part, &flat, &matrix, &box[i], ar_buf_at(run, done * ar_dtype_bytes(value->dtype))));
        AR_TRY(ARI_KERNEL(ctx, copy_strided, get ? &flat : &part, get ? &part : &flat));
        done += ar_tensor_count(&flat);
    }
    return AR_OK;
}

ar_status ari_share_get(ar_ctx *ctx, ar_buf run, const ar_param *p, const ar_tensor *value, size_t start, size_t count)
{
    return move(ctx, run, p, value, start, count, true);
}

ar_status ari_share_put(ar_ctx *ctx, ar_cbuf run, const ar_param *p, const ar_tensor *value, size_t start, size_t count)
{
    return move(ctx, (ar_buf){(void *)(uintptr_t)run.ptr}, p, value, start, count, false);
}

ar_status ari_value_begin(ar_tensor *t, ar_layout *o, ar_ctx *ctx, const ar_param *p)
{
    const ar_param_share *s = p->share;
    *t = p->value;
    *o = ari_whole_layout(p, ctx);
    if (!ari_value_is_shared(p))
        return AR_OK;
    AR_TRY(ari_share_layout(o, p, ctx, s->start, s->count));
    AR_TRY(ar_ctx_tensor(ctx, t, p->value.dtype, p->value.ndim, p->value.shape));
    return ari_share_put(ctx, ar_const(s->value), p, t, s->start, s->count);
}

void ari_value_end(ar_tensor *t, ar_ctx *ctx, const ar_param *p)
{
    if (ari_value_is_shared(p))
        ar_ctx_release(ctx, t);
}

ar_status ari_value_tap(const ar_param *p, ar_ctx *ctx, char pass)
{
    ar_tensor t;
    ar_layout o;
    if (!ar_tapped(ctx))
        return AR_OK;
    AR_TRY(ari_value_begin(&t, &o, ctx, p));
    AR_TRY(ar_tap(ctx, p->name, pass, &t, &o));
    ari_value_end(&t, ctx, p);
    return AR_OK;
}

/* --- copies ------------------------------------------------------------------------------------------------------- */

/* Each rank hashes its own copy, all compare the hashes. */

uint64_t ari_hash_word(uint64_t hash, uint64_t word)
{
    return (hash ^ word) * ARI_FNV1A_PRIME;
}

uint64_t ari_place_of(const ar_layout *o)
{
    uint64_t hash = ARI_FNV1A_BASIS;
    for (size_t k = 0; k < o->nbox; k++) {
        for (int d = 0; d < o->ndim; d++) {
            hash = ari_hash_word(hash, o->box[k].global[d]);
            hash = ari_hash_word(hash, o->box[k].extent[d]);
        }
    }
    return hash;
}

uint64_t ari_hash_values(uint64_t hash, const float *v, size_t n)
{
    static const uint32_t quiet_nan = 0x7fc00000u;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = quiet_nan;
        if (!isnan(v[i]))
            memcpy(&bits, &v[i], sizeof bits);
        hash = ari_hash_word(hash, bits);
    }
    return hash;
}

ar_status ari_gather_words(ar_ctx *ctx, ar_comm *over, uint64_t *all, size_t words, const char *tag)
{
    const size_t ranks = (size_t)ar_comm_size(over), me = (size_t)ar_comm_rank(over);
    const size_t shape[2] = {ranks, words};
    size_t *counts = NULL;
    ar_tensor t = {.data = {NULL}};
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ari_equal_counts(&counts, over, words));
    AR_TRY_TO(done, st, ar_ctx_tensor(ctx, &t, AR_I64, 2, shape));
    AR_TRY_TO(done, st, ar_ctx_upload(ctx, &t, all));
    AR_TRY_TO(done, st,
              ar_comm_all_gather(over, ctx->queue, t.data, ar_cbuf_at(ar_const(t.data), me * words * sizeof *all),
                                 counts, AR_I64, tag));
    AR_TRY_TO(done, st, ar_ctx_download(ctx, all, &t));
done:
    ar_ctx_release(ctx, &t);
    free(counts);
    return st;
}

/* Of what this rank has of the value between its uses, one element after the other. */
static ar_status hash_value(uint64_t *hash, ar_ctx *ctx, const ar_param *p)
{
    const ar_param_share *s = p->share;
    const ar_tensor held = ari_value_is_shared(p) ? ar_tensor_flat(p->value.dtype, s->value, s->count) : p->value;
    const size_t n = ar_tensor_count(&held);
    float *values = NULL;
    AR_TRY(ari_alloc((void **)&values, n, sizeof *values, p->name));
    const ar_status st = ar_ctx_download_floats(ctx, values, &held);
    if (st == AR_OK)
        *hash = ari_hash_values(ARI_FNV1A_BASIS, values, n);
    free(values);
    return st;
}

/* What a rank says of one parameter; place 0: it holds the only copy. */
typedef struct copy {
    uint64_t place, hash;
} copy;

/* The nearest rank below r that holds a copy of the same elements, r where there is none. column: what each rank says
 * of one parameter, n apart. */
static size_t copy_below(const copy *column, size_t n, size_t r)
{
    for (size_t other = r; column[r * n].place != 0 && other-- > 0;) {
        if (column[other * n].place == column[r * n].place)
            return other;
    }
    return r;
}

/* said: [ranks, n]. */
static ar_status compare(const copy *said, ar_param *const *params, size_t n, size_t ranks)
{
    for (size_t i = 0; i < n; i++) {
        const copy *column = said + i;
        for (size_t r = 1; r < ranks; r++) {
            const size_t other = copy_below(column, n, r);
            if (column[other * n].hash != column[r * n].hash)
                return ar_error_set(AR_ERR_DATA, "%s: the copies of tensor-parallel ranks %zu and %zu differ",
                                    params[i]->name, other, r);
        }
    }
    return AR_OK;
}

/* Of a tied weight, whose copies at the two ends of a pipeline have the same parts. */
static ar_status compare_ends(const ar_param *p, ar_ctx *ctx)
{
    ar_comm *ends = ctx->ends;
    uint64_t said[2] = {0, 0};
    AR_TRY(hash_value(&said[ar_comm_rank(ends)], ctx, p));
    AR_TRY(ari_gather_words(ctx, ends, said, 1, "replicas"));
    if (said[0] != said[1])
        return ar_error_set(AR_ERR_DATA, "%s: the copies of the first and the last stage differ", p->name);
    return AR_OK;
}

ar_status ar_params_check_replicas(ar_param *const *params, size_t n, ar_ctx *ctx)
{
    const size_t ranks = (size_t)ar_comm_size(ctx->tp), me = (size_t)ar_comm_rank(ctx->tp);
    copy *said = NULL; /* [ranks, n] */
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&said, ranks * n, sizeof *said, "hashes of parameters"));
    for (size_t i = 0; i < n; i++) {
        if (params[i]->layout.replicas == 1)
            continue;
        said[me * n + i].place = ari_place_of(&params[i]->layout);
        AR_TRY_TO(done, st, hash_value(&said[me * n + i].hash, ctx, params[i]));
    }
    AR_TRY_TO(done, st, ari_gather_words(ctx, ctx->tp, (uint64_t *)said, 2 * n, "replicas"));
    for (size_t i = 0; i < n; i++) {
        if (params[i]->ends && ar_comm_size(ctx->ends) > 1)
            AR_TRY_TO(done, st, compare_ends(params[i], ctx));
    }
    AR_TRY_TO(done, st, compare(said, params, n, ranks));
done:
    free(said);
    return st;
}
