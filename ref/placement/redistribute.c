/* SPDX-License-Identifier: Apache-2.0 */
/* Redistributes a tensor from one list of placements to another, one mesh dimension at a time (steps.c). */
#include <stdlib.h>
#include <string.h>

#include "anyrank/redistribute.h"
#include "ref/context/context.h"
#include "ref/core/size.h"
#include "ref/core/tensor_private.h"
#include "ref/core/text.h"
#include "ref/placement/axis.h"
#include "ref/placement/placement_private.h"

/* --- axes --------------------------------------------------------------------------------------------------------- */

ari_axis ari_axis_of(int ndim, const size_t *shape, int dim, int parts)
{
    return (ari_axis){.before = ari_volume(shape, dim),
                      .extent = shape[dim],
                      .after = ari_volume(shape + dim + 1, ndim - dim - 1),
                      .parts = parts};
}

static size_t part_extent(const ari_axis *a, int part, size_t *start)
{
    size_t count = 0;
    ari_split_uneven(a->extent, a->parts, part, start, &count);
    return count;
}

/* Fills counts [parts] with the number of elements of each part, for a collective. */
static void axis_counts(size_t *counts, const ari_axis *a)
{
    size_t start = 0;
    for (int i = 0; i < a->parts; i++)
        counts[i] = a->before * part_extent(a, i, &start) * a->after;
}

/* A copy between the two orders. */
typedef struct orders {
    ar_buf full, packed;
    ar_dtype dtype;
    bool pack; /* true: from the full order to the packed order */
} orders;

/* Copies parts [first_part, first_part + n), which have equal extents, in one pass; packed memory begins with the first
 * of them. */
static ar_status copy_parts(ar_ctx *ctx, const orders *o, const ari_axis *a, int first_part, size_t n)
{
    size_t start = 0;
    const size_t part_length = part_extent(a, first_part, &start), row = part_length * a->after;
    if (n * a->before * row == 0)
        return AR_OK;
    const size_t width = ar_dtype_bytes(o->dtype);
    ar_tensor full = {.dtype = o->dtype,
                      .ndim = 3,
                      .shape = {n, a->before, row},
                      .stride = {(ptrdiff_t)row, (ptrdiff_t)(a->extent * a->after), 1},
                      .data = ar_buf_at(o->full, start * a->after * width)};
    ar_tensor packed = full;
    packed.stride[0] = (ptrdiff_t)(a->before * row);
    packed.stride[1] = (ptrdiff_t)row;
    packed.data = o->packed;
    return ARI_KERNEL(ctx, copy_strided, o->pack ? &packed : &full, o->pack ? &full : &packed);
}

/* Copies all parts: first all parts of full length in one pass, then a shorter one; the remaining parts are empty. */
static ar_status copy_all(ar_ctx *ctx, orders o, const ari_axis *a)
{
    size_t start = 0, part_length = part_extent(a, 0, &start);
    const size_t n = part_length > 0 ? a->extent / part_length : 0;
    AR_TRY(copy_parts(ctx, &o, a, 0, n));
    if (n == (size_t)a->parts)
        return AR_OK;
    o.packed = ar_buf_at(o.packed, n * a->before * part_length * a->after * ar_dtype_bytes(o.dtype));
    return copy_parts(ctx, &o, a, (int)n, 1);
}

static ar_buf read_only(ar_cbuf b)
{
    return (ar_buf){(void *)(uintptr_t)b.ptr};
}

ar_status ari_axis_pack(ar_ctx *ctx, ar_buf packed, ar_cbuf full, const ari_axis *a, ar_dtype t)
{
    return copy_all(ctx, (orders){read_only(full), packed, t, true}, a);
}

static ar_status axis_unpack(ar_ctx *ctx, ar_buf full, ar_cbuf packed, const ari_axis *a, ar_dtype t)
{
    return copy_all(ctx, (orders){full, read_only(packed), t, false}, a);
}

ar_status ari_axis_take(ar_ctx *ctx, ar_buf block, ar_cbuf full, const ari_axis *a, int part, ar_dtype t)
{
    return copy_parts(ctx, &(orders){read_only(full), block, t, true}, a, part, 1);
}

ar_status ari_axis_put(ar_ctx *ctx, ar_buf full, ar_cbuf block, const ari_axis *a, int part, ar_dtype t)
{
    return copy_parts(ctx, &(orders){full, read_only(block), t, false}, a, part, 1);
}

ar_dtype ari_moved_as(ar_dtype t)
{
    static const ar_dtype by_width[] = {[1] = AR_U8, [2] = AR_BF16, [4] = AR_I32, [8] = AR_I64};
    return t == AR_F32 ? AR_F32 : by_width[ar_dtype_bytes(t)];
}

ar_status ari_axis_gather(ar_ctx *ctx, ar_comm *group, ar_buf full, ar_cbuf block, const ari_axis *a, ar_dtype t,
                          const char *tag)
{
    const bool in_order = a->before == 1;
    ARI_OWNED size_t *counts = NULL;
    ar_buf packed = full;
    if (!in_order)
        AR_TRY(ari_step_alloc(ctx, &packed, a->before * a->extent * a->after * ar_dtype_bytes(t)));
    AR_TRY(ARI_ALLOC(&counts, (size_t)a->parts, "sizes of the ranks' parts"));
    axis_counts(counts, a);
    AR_TRY(ar_comm_all_gather(group, ctx->queue, packed, block, counts, ari_moved_as(t), tag));
    if (in_order)
        return AR_OK;
    AR_TRY(axis_unpack(ctx, full, ar_const(packed), a, t));
    ari_step_free(ctx, packed);
    return AR_OK;
}

/* --- redistribute ------------------------------------------------------------------------------------------------- */

/* The value during a redistribution, in memory of the step (at first the caller's). It consists of numbers of one dtype
 * or, between the first and last sum of F32 terms, is a bucket of the arithmetic, whose arrays move in the same way. */
typedef struct value {
    ar_buf data;
    size_t extent[AR_MAX_DIMS], count; /* extents of this rank's part */
    int arrays;
    ar_bucket_array array[AR_BUCKET_ARRAYS];
} value;

typedef struct walk {
    ar_ctx *ctx;
    const ar_mesh_groups *groups;
    const ar_redistribution *r;
    const ar_arith_ops *sums; /* arithmetic of the sum for F32 terms; NULL: the value consists of numbers */
    ar_dtype dtype;
    const char *tag;
    ar_placement current[AR_MESH_DIMS];
} walk;

/* A step along one mesh dimension: the ranks of its group and the extents of their combined value. */
typedef struct joint {
    walk *w;
    const ar_redistribution_step *step;
    ar_comm *group;
    int ranks, rank;
    size_t full_extent[AR_MAX_DIMS]; /* extents of the part that a rank with the whole dimension has */
    size_t *counts;                  /* [2 ranks] element counts for a collective */
} joint;

/* --- values ------------------------------------------------------------------------------------------------------- */

static ar_buf array_of(const value *v, int i)
{
    return ar_buf_at(v->data, v->array[i].offset * v->count);
}

/* Memory for a value of another extent, in the form of `like`. */
static ar_status new_value(const walk *w, value *v, const value *like, const size_t *extent)
{
    *v = *like;
    v->data.ptr = NULL;
    v->count = 1;
    for (int d = 0; d < w->r->ndim; d++) {
        v->extent[d] = extent[d];
        AR_TRY(ari_mul_size(&v->count, v->count, extent[d]));
    }
    size_t bytes = 0;
    AR_TRY(ari_mul_size(&bytes, v->count, 3 * sizeof(int64_t))); /* an upper bound for every form, so sizes below do
                                                                    not overflow */
    bytes = v->arrays > 1 ? w->sums->bucket_bytes(v->count, AR_F32) : v->count * ar_dtype_bytes(w->dtype);
    return ari_step_alloc(w->ctx, &v->data, bytes);
}

static ar_status copy_value(const joint *j, const value *dst, const value *src)
{
    for (int i = 0; i < src->arrays; i++)
        AR_TRY(ARI_KERNEL(j->w->ctx, copy, array_of(dst, i), ar_const(array_of(src, i)),
                          src->count * ar_dtype_bytes(src->array[i].dtype)));
    return AR_OK;
}

static ar_status zero_value(const joint *j, const value *v)
{
    for (int i = 0; i < v->arrays; i++)
        AR_TRY(ARI_KERNEL(j->w->ctx, zero, array_of(v, i), v->count * ar_dtype_bytes(v->array[i].dtype)));
    return AR_OK;
}

/* Converts numbers to the arithmetic's form of a sum. `input` is unchanged. */
static ar_status open_sum(const walk *w, value *out, const value *input)
{
    value form = {.arrays = w->sums->bucket_arrays};
    memcpy(form.array, w->sums->bucket_array, sizeof form.array);
    AR_TRY(new_value(w, out, &form, input->extent));
    return w->sums->bucket_put(w->ctx, w->ctx->queue, out->data, ar_const(input->data), input->count, AR_F32);
}

static ar_status close_sum(const walk *w, value *out, const value *input)
{
    const value form = {.arrays = 1, .array = {{0, w->dtype}}};
    AR_TRY(new_value(w, out, &form, input->extent));
    return w->sums->bucket_take(w->ctx, w->ctx->queue, out->data, ar_const(input->data), input->count, 0, input->count,
                                AR_F32);
}

/* --- collectives of one array ------------------------------------------------------------------------------------- */

static ari_axis axis_of(const joint *j, ar_placement shard, const size_t *extent)
{
    const int ndim = j->w->r->ndim;
    return ari_axis_of(ndim, extent, shard.dim < 0 ? shard.dim + ndim : shard.dim, j->ranks);
}

/* Gets memory for all parts of an axis in packed order: `unpacked` itself if its order is the same. */
static ar_status packed_room(const joint *j, ar_buf *packed, ar_buf unpacked, const ari_axis *a, ar_dtype t)
{
    *packed = unpacked;
    return a->before == 1 ? AR_OK
                          : ari_step_alloc(j->w->ctx, packed, a->before * a->extent * a->after * ar_dtype_bytes(t));
}

static void end_room(const joint *j, ar_buf packed, ar_buf unpacked)
{
    if (packed.ptr != unpacked.ptr)
        ari_step_free(j->w->ctx, packed);
}

static ar_status pack_parts(const joint *j, ar_buf *packed, ar_buf full, const ari_axis *a, ar_dtype t)
{
    AR_TRY(packed_room(j, packed, full, a, t));
    return packed->ptr == full.ptr ? AR_OK : ari_axis_pack(j->w->ctx, *packed, ar_const(full), a, t);
}

/* Sends every rank its part of `src` along `send_axis`, and joins the received parts along `get`. */
static ar_status exchange_parts(const joint *j, ar_buf dst, const ari_axis *get, ar_buf src, const ari_axis *send_axis,
                                ar_dtype t)
{
    ar_buf send_buf, got;
    AR_TRY(pack_parts(j, &send_buf, src, send_axis, t));
    AR_TRY(packed_room(j, &got, dst, get, t));
    axis_counts(j->counts, send_axis);
    axis_counts(j->counts + j->ranks, get);
    AR_TRY(ar_comm_all_to_all(j->group, j->w->ctx->queue, got, ar_const(send_buf), j->counts, j->counts + j->ranks,
                              ari_moved_as(t), j->w->tag));
    end_room(j, send_buf, src);
    if (got.ptr != dst.ptr)
        AR_TRY(axis_unpack(j->w->ctx, dst, ar_const(got), get, t));
    end_room(j, got, dst);
    return AR_OK;
}

/* --- the moves ---------------------------------------------------------------------------------------------------- */

static ar_op op_of(const joint *j)
{
    return j->step->src.kind == AR_PARTIAL_MAX ? AR_MAX : AR_SUM;
}

/* Reduces a bucket of this rank in place. counts: sizes of the parts, as in bucket_reduce. */
static ar_status reduce_bucket(const joint *j, const value *v, const size_t *counts)
{
    const walk *w = j->w;
    ar_buf scratch;
    AR_TRY(ari_step_alloc(w->ctx, &scratch, w->sums->bucket_room(v->count, AR_F32, j->group, counts)));
    AR_TRY(w->sums->bucket_reduce(w->ctx, w->ctx->queue, v->data, scratch, v->count, AR_F32, j->group, counts, NULL,
                                  w->tag));
    ari_step_free(w->ctx, scratch);
    return AR_OK;
}

static ar_status all_reduce(const joint *j, value *out, value *input)
{
    const walk *w = j->w;
    if (input->arrays > 1) {
        *out = *input;
        return reduce_bucket(j, input, NULL);
    }
    AR_TRY(new_value(w, out, input, input->extent));
    return ar_comm_all_reduce(j->group, w->ctx->queue, out->data, ar_const(input->data), input->count, w->dtype,
                              op_of(j), w->tag);
}

/* Orders the bucket's terms by the ranks' parts and reduces them; this rank's part of the result is complete. */
static ar_status scatter_bucket(const joint *j, value *out, value *input, const ari_axis *a)
{
    const walk *w = j->w;
    value packed = *input;
    size_t start = 0;
    if (a->before != 1) {
        AR_TRY(new_value(w, &packed, input, input->extent));
        for (int i = 0; i < input->arrays; i++)
            AR_TRY(ari_axis_pack(w->ctx, array_of(&packed, i), ar_const(array_of(input, i)), a, input->array[i].dtype));
    }
    AR_TRY(reduce_bucket(j, &packed, j->counts));
    for (int i = 0; i < j->rank; i++)
        start += j->counts[i];
    for (int i = 0; i < input->arrays; i++) {
        const size_t width = ar_dtype_bytes(input->array[i].dtype);
        AR_TRY(ARI_KERNEL(w->ctx, copy, array_of(out, i), ar_const(ar_buf_at(array_of(&packed, i), start * width)),
                          out->count * width));
    }
    end_room(j, packed.data, input->data);
    return AR_OK;
}

static ar_status reduce_scatter(const joint *j, value *out, value *input)
{
    const walk *w = j->w;
    const ari_axis a = axis_of(j, j->step->dst, j->full_extent);
    ar_buf packed;
    axis_counts(j->counts, &a);
    if (input->arrays > 1)
        return scatter_bucket(j, out, input, &a);
    AR_TRY(pack_parts(j, &packed, input->data, &a, w->dtype));
    AR_TRY(ar_comm_reduce_scatter(j->group, w->ctx->queue, out->data, ar_const(packed), j->counts, w->dtype, op_of(j),
                                  w->tag));
    end_room(j, packed, input->data);
    return AR_OK;
}

/* Moves one array without a reduction. */
static ar_status move_array(const joint *j, value *out, value *input, int i)
{
    ar_ctx *ctx = j->w->ctx;
    const ar_redistribution_step *s = j->step;
    const ar_dtype t = input->array[i].dtype;
    const ar_buf dst = array_of(out, i), src = array_of(input, i);
    const ari_axis a = axis_of(j, s->move == AR_MOVE_SLICE ? s->dst : s->src, j->full_extent);
    if (s->move == AR_MOVE_SLICE)
        return ari_axis_take(ctx, dst, ar_const(src), &a, j->rank, t);
    if (s->move == AR_MOVE_ALL_GATHER)
        return ari_axis_gather(ctx, j->group, dst, ar_const(src), &a, t, j->w->tag);
    if (s->move == AR_MOVE_PAD)
        return ari_axis_put(ctx, dst, ar_const(src), &a, j->rank, t);
    const ari_axis send_axis = axis_of(j, s->dst, input->extent), get = axis_of(j, s->src, out->extent);
    return exchange_parts(j, dst, &get, src, &send_axis, t);
}

static ar_status move_value(const joint *j, value *out, value *input)
{
    if (j->step->move == AR_MOVE_ALL_REDUCE)
        return all_reduce(j, out, input);
    size_t extent[AR_MAX_DIMS];
    AR_TRY(ar_placements_region(NULL, extent, &j->w->groups->mesh, j->w->groups->coords, j->w->current, j->w->r->ndim,
                                j->w->r->shape, true));
    AR_TRY(new_value(j->w, out, input, extent));
    if (j->step->move == AR_MOVE_REDUCE_SCATTER)
        return reduce_scatter(j, out, input);
    if (j->step->move == AR_MOVE_FIRST)
        return j->rank == 0 ? copy_value(j, out, input) : zero_value(j, out);
    if (j->step->move == AR_MOVE_PAD)
        AR_TRY(zero_value(j, out));
    for (int i = 0; i < input->arrays; i++)
        AR_TRY(move_array(j, out, input, i));
    return AR_OK;
}

/* --- the walk ----------------------------------------------------------------------------------------------------- */

static bool sums(const ar_redistribution_step *s)
{
    return s->src.kind == AR_PARTIAL_SUM;
}

static ar_status take_step(walk *w, value *out, value *input, const ar_redistribution_step *s)
{
    joint j = {.w = w, .step = s, .group = w->groups->comm[s->dim]};
    j.ranks = ar_comm_size(j.group);
    j.rank = ar_comm_rank(j.group);
    w->current[s->dim] = (ar_placement){0};
    AR_TRY(ar_placements_region(NULL, j.full_extent, &w->groups->mesh, w->groups->coords, w->current, w->r->ndim,
                                w->r->shape, true));
    w->current[s->dim] = s->dst;
    AR_TRY(ARI_ALLOC(&j.counts, 2 * (size_t)j.ranks, "sizes of the ranks' parts"));
    const ar_status st = move_value(&j, out, input);
    free(j.counts);
    return st;
}

/* The value becomes `next_value`. Memory of the caller's x stays. */
static void replace(const walk *w, value *v, const value *next_value, const ar_tensor *x)
{
    if (v->data.ptr != next_value->data.ptr && v->data.ptr != x->data.ptr)
        ari_step_free(w->ctx, v->data);
    *v = *next_value;
}

static ar_status take_steps(walk *w, value *v, const ar_tensor *x, const ar_redistribution_step *steps, size_t n)
{
    size_t remaining_sums = 0; /* number of sums by accumulators that are still to come */
    value next_value;
    for (size_t i = 0; i < n; i++)
        remaining_sums += w->sums && sums(&steps[i]);
    for (size_t i = 0; i < n; i++) {
        const bool sum = w->sums && sums(&steps[i]);
        if (sum && v->arrays == 1) {
            AR_TRY(open_sum(w, &next_value, v));
            replace(w, v, &next_value, x);
        }
        AR_TRY(take_step(w, &next_value, v, &steps[i]));
        replace(w, v, &next_value, x);
        remaining_sums -= sum;
        if (sum && remaining_sums == 0) {
            AR_TRY(close_sum(w, &next_value, v));
            replace(w, v, &next_value, x);
        }
    }
    return AR_OK;
}

/* --- what is refused ---------------------------------------------------------------------------------------------- */

static ar_status check_part(const walk *w, const ar_tensor *x, const char *tag)
{
    size_t extent[AR_MAX_DIMS];
    char placement_text[96];
    AR_TRY(ar_placements_region(NULL, extent, &w->groups->mesh, w->groups->coords, w->r->src, w->r->ndim, w->r->shape,
                                true));
    bool fits = x->ndim == w->r->ndim && ari_tensor_is_contiguous(x);
    for (int d = 0; fits && d < x->ndim; d++)
        fits = x->shape[d] == extent[d];
    if (fits)
        return AR_OK;
    return ar_error_set(AR_ERR_SHAPE, "%s: x is %s%s; the part by %s is %s, contiguous",
                        ARI_SHOW(tag ? tag : "redistribute"), ARI_SHOW_SHAPE(x->ndim, x->shape),
                        ari_tensor_is_contiguous(x) ? "" : ", not contiguous",
                        ari_placements_text(placement_text, sizeof placement_text, w->r->src, w->groups->mesh.ndim),
                        ARI_SHOW_SHAPE(w->r->ndim, extent));
}

/* The communicator refuses a dtype that has no reduction at all. */
static ar_status check_sum(ar_dtype t, const ar_arith_ops *arith)
{
    if (t == AR_U8)
        return ar_error_set(AR_ERR_DTYPE, "P(sum) of U8 would wrap at 256; make the terms I32 or I64");
    if (t == AR_F32 || t == AR_I32 || t == AR_I64 || arith->bucket_arrays == 0)
        return AR_OK;
    return ar_error_set(AR_ERR_DTYPE,
                        "P(sum) of %s in exact numerics, whose order-independent accumulator takes F32: make the terms "
                        "F32, or use native numerics",
                        ar_dtype_name(t));
}

ar_status ari_redistribute(ar_ctx *ctx, const ar_mesh_groups *g, ar_tensor *y, const ar_tensor *x,
                           const ar_redistribution *r, const ar_arith_ops *arith, const char *tag)
{
    ar_redistribution_step step[AR_REDISTRIBUTION_STEPS];
    size_t n = 0;
    walk w = {.ctx = ctx, .groups = g, .r = r, .dtype = x->dtype, .tag = tag};
    w.sums = x->dtype == AR_F32 && arith->bucket_arrays > 0 ? arith : NULL;
    memcpy(w.current, r->src, sizeof w.current);
    AR_TRY(ari_redistribution_steps(step, &n, &g->mesh, r));
    AR_TRY(check_part(&w, x, tag));
    if (ar_dtype_bytes(x->dtype) == 0)
        return ar_error_set(AR_ERR_DTYPE, "%s: elements of %s are less than a byte",
                            ARI_SHOW(tag ? tag : "redistribute"), ar_dtype_name(x->dtype));
    for (size_t i = 0; i < n; i++) {
        if (sums(&step[i]))
            AR_TRY(check_sum(x->dtype, arith));
    }
    value v = {.data = x->data, .count = ar_tensor_count(x), .arrays = 1, .array = {{0, x->dtype}}};
    memcpy(v.extent, x->shape, sizeof v.extent);
    AR_TRY(take_steps(&w, &v, x, step, n));
    if (v.data.ptr == x->data.ptr) {
        value copy;
        AR_TRY(new_value(&w, &copy, &v, v.extent));
        AR_TRY(ARI_KERNEL(ctx, copy, copy.data, ar_const(x->data), v.count * ar_dtype_bytes(x->dtype)));
        v = copy;
    }
    return ar_tensor_view(y, x->dtype, r->ndim, v.extent, v.data);
}

ar_status ar_redistribute(ar_ctx *ctx, const ar_mesh_groups *g, ar_tensor *y, const ar_tensor *x,
                          const ar_redistribution *r, const char *tag)
{
    const ar_tensor input = *x; /* y may be x */
    return ari_redistribute(ctx, g, y, &input, r, ctx->arith, tag);
}

ar_status ar_placed_redistribute(ar_ctx *ctx, ar_placed *y, const ar_placed *x, const ar_placement *to_placements,
                                 const char *tag)
{
    const size_t n = (size_t)x->groups->mesh.ndim;
    ar_redistribution r = {.ndim = x->local.ndim};
    ar_placed moved = *x;
    memcpy(r.shape, x->shape, sizeof r.shape);
    memcpy(r.src, x->placement, n * sizeof *to_placements);
    memcpy(r.dst, to_placements, n * sizeof *to_placements);
    memcpy(moved.placement, to_placements, n * sizeof *to_placements);
    AR_TRY(ar_redistribute(ctx, x->groups, &moved.local, &x->local, &r, tag));
    *y = moved;
    return AR_OK;
}
