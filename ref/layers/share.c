/* SPDX-License-Identifier: Apache-2.0 */
/* Shares: the elements of a parameter that a rank holds. */

#include <string.h>

#include "ref/context/context_private.h"
#include "ref/core/param_private.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/parts.h"

/* A list of boxes under construction; the dimensions before `dim` are fixed at `origin`. */
typedef struct cutter {
    ari_run_box *out;
    size_t n;
    int ndim;
    const size_t *shape;
    size_t origin[AR_MAX_DIMS];
} cutter;

/* Adds rows [first_row, first_row + count) of dimension `dim` as whole rows. */
static void add_rows(cutter *c, int dim, size_t first_row, size_t count)
{
    ari_run_box *b = &c->out[c->n++];
    *b = (ari_run_box){{0}, {0}};
    for (int d = 0; d < c->ndim; d++) {
        b->origin[d] = d < dim ? c->origin[d] : 0;
        b->extent[d] = d < dim ? 1 : c->shape[d];
    }
    b->origin[dim] = first_row;
    b->extent[dim] = count;
}

/* Adds [start, end) of the dimensions that are not fixed. */
static void cut(cutter *c, int dim, size_t start, size_t end)
{
    const size_t row = ari_volume(c->shape + dim + 1, c->ndim - dim - 1);
    const size_t first_row = start / row + (start % row != 0), end_row = end / row; /* the whole rows */
    if (end_row < first_row) {                                                      /* the elements lie within one
                                                                                       row */
        c->origin[dim] = end_row;
        cut(c, dim + 1, start - end_row * row, end - end_row * row);
        return;
    }
    if (start % row != 0) {
        c->origin[dim] = first_row - 1;
        cut(c, dim + 1, start % row, row);
    }
    if (first_row < end_row)
        add_rows(c, dim, first_row, end_row - first_row);
    if (end % row != 0) {
        c->origin[dim] = end_row;
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

/* Intersects a box of the local tensor with a box of the parameter. Returns false if the intersection is empty. */
static bool common(ar_box *out, const ari_run_box *b, const ar_box *param_box, int ndim)
{
    *out = (ar_box){{0}, {0}, {0}};
    for (int d = 0; d < ndim; d++) {
        if (!ari_overlap(&out->local[d], &out->extent[d], b->origin[d], b->extent[d], param_box->local[d],
                         param_box->extent[d]))
            return false;
        out->global[d] = param_box->global[d] + (out->local[d] - param_box->local[d]);
    }
    return true;
}

/* Adds copies: every rank of a group holds what this tensor-parallel group shards; of a pipeline's two ends the first
 * one has the first copy. */
static void add_copies(ar_layout *o, const ar_comm *group)
{
    o->replica += o->replicas * ar_comm_rank(group);
    o->replicas *= ar_comm_size(group);
}

ar_status ari_share_layout(ar_layout *o, const ar_param *p, const ar_ctx *ctx, size_t start, size_t count)
{
    ari_run_box run[ARI_RUN_BOXES];
    const ar_tensor matrix = ari_param_matrix(p);
    const size_t n = ari_run_boxes(run, matrix.ndim, matrix.shape, start, count);
    *o = p->layout;
    o->nbox = 0;
    add_copies(o, ari_ctx_replicate(ctx, p->expert));
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

ar_layout ari_full_layout(const ar_param *p, const ar_ctx *ctx)
{
    ar_layout o = p->layout;
    add_copies(&o, ari_ctx_data(ctx, p->expert));
    if (p->ends)
        add_copies(&o, ctx->ends);
    return o;
}

size_t ari_layout_count(const ar_layout *o)
{
    return ari_volume(o->shape, o->ndim);
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

/* Views a box of the matrix and the same elements in a run. */
static ar_status views(ar_tensor *box, ar_tensor *flat, const ar_tensor *matrix, const ari_run_box *b, ar_buf run)
{
    *box = *matrix;
    for (int d = 0; d < matrix->ndim; d++)
        *box = ar_tensor_slice(box, d, b->origin[d], b->extent[d]);
    return ar_tensor_view(flat, matrix->dtype, matrix->ndim, box->shape, run);
}

static ar_status move_run(ar_ctx *ctx, ar_buf run, const ar_param *p, const ar_tensor *value, size_t start,
                          size_t count, bool get)
{
    ari_run_box box[ARI_RUN_BOXES];
    const ar_tensor matrix = p->transposed ? ari_tensor_transposed(value) : *value;
    const size_t n = ari_run_boxes(box, matrix.ndim, matrix.shape, start, count);
    size_t offset = 0;
    for (size_t i = 0; i < n; i++) {
        ar_tensor part, flat;
        AR_TRY(views(&part, &flat, &matrix, &box[i], ar_buf_at(run, offset * ar_dtype_bytes(value->dtype))));
        AR_TRY(ARI_KERNEL(ctx, copy_strided, get ? &flat : &part, get ? &part : &flat));
        offset += ar_tensor_count(&flat);
    }
    return AR_OK;
}

ar_status ari_share_get(ar_ctx *ctx, ar_buf run, const ar_param *p, const ar_tensor *value, size_t start, size_t count)
{
    return move_run(ctx, run, p, value, start, count, true);
}

ar_status ari_share_put(ar_ctx *ctx, ar_cbuf run, const ar_param *p, const ar_tensor *value, size_t start, size_t count)
{
    return move_run(ctx, (ar_buf){(void *)(uintptr_t)run.ptr}, p, value, start, count, false);
}

ar_status ari_value_begin(ar_tensor *t, ar_layout *o, ar_ctx *ctx, const ar_param *p)
{
    const ar_param_share *s = p->share;
    *t = p->value;
    *o = ari_full_layout(p, ctx);
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
    if (!ari_tapped(ctx))
        return AR_OK;
    AR_TRY(ari_value_begin(&t, &o, ctx, p));
    AR_TRY(ari_tap(ctx, p->name, pass, &t, &o));
    ari_value_end(&t, ctx, p);
    return AR_OK;
}
