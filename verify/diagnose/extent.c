/* SPDX-License-Identifier: Apache-2.0 */
/* Reads dumps: a sample of a tensor, the copies of its ranks, and metadata of the run. */
#include <limits.h>
#include <stdlib.h>

#include "verify/diagnose/case.h"
#include "verify/dump/dump_private.h"

/* --- a sample ----------------------------------------------------------------------------------------------------- */

static size_t thinned(size_t n, size_t step)
{
    return n / step + (n % step != 0);
}

/* Elements that are left. */
static size_t count_left(const size_t *step, const ar_dump_tensor *t)
{
    size_t n = 1;
    for (int d = 0; d < t->ndim; d++)
        n *= thinned(t->shape[d], step[d]);
    return n;
}

void ari_sample_steps(size_t *step, const ar_dump_tensor *t, size_t most)
{
    for (int d = 0; d < t->ndim; d++)
        step[d] = 1;
    while (count_left(step, t) > most) {
        size_t largest = 0;
        for (int d = 0; d < t->ndim; d++)
            largest = thinned(t->shape[d], step[d]) > largest ? thinned(t->shape[d], step[d]) : largest;
        for (int d = 0; d < t->ndim; d++)
            step[d] *= thinned(t->shape[d], step[d]) == largest ? 2 : 1;
    }
}

/* The sampled elements of a box; false if there are none. */
static bool thin_box(ar_dump_box *to, const ar_dump_box *from, const size_t *step, int ndim)
{
    *to = *from;
    for (int d = 0; d < ndim; d++) {
        const size_t first = thinned(from->global[d], step[d]);
        const size_t end = thinned(from->global[d] + from->extent[d], step[d]);
        if (first >= end)
            return false;
        to->global[d] = first;
        to->extent[d] = end - first;
        to->at += (first * step[d] - from->global[d]) * from->stride[d];
        to->stride[d] = from->stride[d] * step[d];
    }
    return true;
}

/* A tensor of this shape with room for the boxes of another's parts, each to be made by `make`; false: it is empty. */
typedef bool (*make_box)(ar_dump_box *to, const ar_dump_box *from, const size_t *by, int ndim);

static ar_status make_boxes(ari_sample *s, const ar_dump_tensor *t, make_box make, const size_t *by, ari_arena *arena)
{
    size_t boxes = 0;
    for (size_t i = 0; i < t->parts; i++)
        boxes += t->part[i].boxes;
    AR_TRY(ARI_TAKE(&s->part, arena, t->parts, t->name));
    AR_TRY(ARI_TAKE(&s->box, arena, boxes, t->name));
    s->tensor.count = ari_volume(s->tensor.shape, t->ndim);
    s->tensor.whole = NULL;
    s->tensor.part = s->part;
    ar_dump_box *box = s->box;
    for (size_t i = 0; i < t->parts; i++) {
        s->part[i] = t->part[i];
        s->part[i].box = box;
        s->part[i].boxes = 0;
        for (size_t b = 0; b < t->part[i].boxes; b++)
            s->part[i].boxes += make(&box[s->part[i].boxes], &t->part[i].box[b], by, t->ndim);
        box += s->part[i].boxes;
    }
    return AR_OK;
}

ar_status ari_sample_init(ari_sample *s, const ar_dump_tensor *t, const size_t *step, ari_arena *arena)
{
    *s = (ari_sample){.tensor = *t};
    for (int d = 0; d < t->ndim; d++)
        s->tensor.shape[d] = thinned(t->shape[d], step[d]);
    return make_boxes(s, t, thin_box, step, arena);
}

static bool repeat_box(ar_dump_box *to, const ar_dump_box *from, const size_t *shape, int ndim)
{
    *to = *from;
    for (int d = 0; d < ndim; d++) {
        if (shape[d] == 0)
            continue;
        to->extent[d] = shape[d];
        to->stride[d] = 0;
    }
    return true;
}

ar_status ari_repeated_init(ari_sample *s, const ar_dump_tensor *t, const size_t *shape, ari_arena *arena)
{
    size_t times[AR_ST_MAX_DIMS] = {0}; /* 0: as it is */
    *s = (ari_sample){.tensor = *t};
    for (int d = 0; d < t->ndim; d++) {
        times[d] = t->shape[d] == 1 && shape[d] > 1 ? shape[d] : 0;
        s->tensor.shape[d] = times[d] ? times[d] : t->shape[d];
    }
    return make_boxes(s, t, repeat_box, times, arena);
}

/* The boxes of a box's samples. */
static size_t split_box(ar_dump_box *to, const ar_dump_box *from, size_t rows, const size_t *place)
{
    size_t n = 0;
    for (size_t row = from->global[0], end = row + from->extent[0]; row < end; n++) {
        const size_t next = (row / rows + 1) * rows < end ? (row / rows + 1) * rows : end;
        to[n] = *from;
        to[n].at = from->at + (row - from->global[0]) * from->stride[0];
        to[n].global[0] = place[row / rows] * rows + row % rows;
        to[n].extent[0] = next - row;
        row = next;
    }
    return n;
}

ar_status ari_reordered_init(ari_sample *s, const ar_dump_tensor *t, const size_t *place, ari_arena *arena)
{
    size_t boxes = 0;
    for (size_t i = 0; i < t->parts; i++)
        for (size_t b = 0; b < t->part[i].boxes; b++)
            boxes += t->part[i].box[b].extent[0] / t->sample_rows + 2;
    *s = (ari_sample){.tensor = *t};
    AR_TRY(ARI_TAKE(&s->part, arena, t->parts, t->name));
    AR_TRY(ARI_TAKE(&s->box, arena, boxes, t->name));
    s->tensor.whole = NULL;
    s->tensor.part = s->part;
    for (size_t i = 0, n = 0; i < t->parts; i++) {
        s->part[i] = t->part[i];
        s->part[i].box = &s->box[n];
        s->part[i].boxes = 0;
        for (size_t b = 0; b < t->part[i].boxes; b++) {
            const size_t some = split_box(&s->box[n], &t->part[i].box[b], t->sample_rows, place);
            s->part[i].boxes += some;
            n += some;
        }
    }
    return AR_OK;
}

/* --- copies of ranks ---------------------------------------------------------------------------------------------- */

enum { MOST_ELEMENTS = 1 << 23, MOST_RANKS = 4096 };

/* Parts of one rank are adjacent: a packed tensor may have a file for each box. */
static size_t parts_of_rank(const ar_dump_part *p, size_t parts)
{
    size_t n = 0;
    while (n < parts && p[n].rank == p->rank)
        n++;
    return n;
}

/* The layout of a rank's n parts and the shape of its local tensor; false if the boxes are too many or do not stack.
 * They follow one another along the dimension in which the last begins elsewhere than the first, else along dimension
 * 0, as in the rank's local tensor. */
static bool lay_out(ar_layout *o, size_t *shape, const ar_dump_tensor *t, const ar_dump_part *p, size_t n)
{
    int stack = t->ndim - 1;
    *o = (ar_layout){.ndim = t->ndim, .replica = n ? p->replica : 0, .replicas = n ? p->replicas : 0};
    memcpy(o->shape, t->shape, (size_t)t->ndim * sizeof *o->shape);
    for (size_t k = 0; k < n; k++) {
        for (size_t b = 0; b < p[k].boxes; b++, o->nbox++) {
            if (o->nbox == AR_MAX_BOXES)
                return false;
            memcpy(o->box[o->nbox].global, p[k].box[b].global, (size_t)t->ndim * sizeof *shape);
            memcpy(o->box[o->nbox].extent, p[k].box[b].extent, (size_t)t->ndim * sizeof *shape);
        }
    }
    const ar_box *first = o->box, *last = o->box + o->nbox - 1;
    if (o->nbox == 0 || t->ndim == 0)
        return true;
    while (stack > 0 && first->global[stack] == last->global[stack])
        stack--;
    memcpy(shape, first->extent, (size_t)t->ndim * sizeof *shape);
    shape[stack] = 0;
    for (ar_box *b = o->box; b <= last; b++) {
        b->local[stack] = shape[stack];
        shape[stack] += b->extent[stack];
        for (int dim = 0; dim < t->ndim; dim++) {
            if (dim != stack && b->extent[dim] != shape[dim])
                return false;
        }
    }
    return true;
}

/* Moves the parts' values, which ari_dump_part_f32 gives box by box, to their places in the local tensor. */
static ar_status read_parts(float *local, float *values, const ari_rank_copy *copy, const ar_dump_tensor *t,
                            const ar_dump_part *p, size_t parts)
{
    const ar_box *box = copy->layout->box;
    for (size_t k = 0; k < parts; k++) {
        const float *value = values;
        AR_TRY(ari_dump_part_f32(t, &p[k], values));
        for (const ar_box *end = box + p[k].boxes; box < end; box++) {
            for (size_t i = 0, n = ari_volume(box->extent, t->ndim); i < n; i++)
                local[ari_box_index(copy->shape, box->local, box->extent, t->ndim, i)] = *value++;
        }
    }
    return AR_OK;
}

static bool is_along(const ar_mesh *mesh, int dim, int extent)
{
    const char *name = ari_layout_axes[extent].name;
    return strncmp(mesh->dim[dim].name, name, strlen(name)) == 0;
}

/* The extent that a dimension of a mesh lies along: that of the one within it, or one further out; -1: none. */
static int extent_of(const ar_mesh *mesh, int dim)
{
    const int stages = is_along(mesh, 0, ARI_LAYOUT_PP);
    int extent = ARI_LAYOUT_AXES - 1;
    for (int i = mesh->ndim - 1; i >= dim; i--) {
        while (extent >= 0 && !(extent == ARI_LAYOUT_DP ? i >= stages : is_along(mesh, i, extent)))
            extent--;
    }
    return extent;
}

void ari_mesh_of(ari_ranks *mesh, const ar_dump *d)
{
    const ar_mesh *told = d ? ar_dump_mesh(d) : NULL;
    for (int i = 0; i < ARI_LAYOUT_AXES && told && told->ndim > 0; i++) {
        int ranks = 1;
        for (int dim = 0; dim < told->ndim; dim++)
            ranks *= extent_of(told, dim) == i ? told->dim[dim].size : 1;
        ari_ranks_set(mesh, ari_layout_axes[i].axes, ranks);
    }
}

char *ari_extent_text(char out[ARI_AXES_TEXT], const ar_dump *d, int extent)
{
    const ar_mesh *told = d ? ar_dump_mesh(d) : NULL;
    ari_text text = ari_text_in(out, ARI_AXES_TEXT);
    for (int dim = 0; told && dim < told->ndim; dim++) {
        if (told->dim[dim].size > 1 && extent_of(told, dim) == extent)
            ari_say(&text, "%s%s", text.used == 0 ? "" : " and ", told->dim[dim].name);
    }
    if (text.used == 0)
        ari_say(&text, "%s", ari_layout_axes[extent].name);
    return out;
}

/* Takes the case's mesh if the dump names none; ranks that it does not count lie along dp. */
static void find_mesh(ari_rank_copies *r, const ari_explain_case *c)
{
    int *const dp = &r->mesh.along[ARI_AXIS_DP];
    r->mesh = c->mesh;
    ari_mesh_of(&r->mesh, c->other);
    const int tp = r->mesh.along[ARI_AXIS_TP];
    const int shared = tp * ari_at_least_one(ari_ranks_along(&r->mesh, ARI_CUTS_POSITIONS));
    if (tp > 0 && *dp == 0 && r->ranks % shared == 0)
        *dp = r->ranks / shared;
    if (shared * *dp > 0 && r->ranks % (shared * *dp) == 0)
        r->mesh.along[ARI_AXIS_PP] = r->ranks / (shared * *dp);
    else
        r->mesh = (ari_ranks){{0}};
}

ar_status ari_rank_copies_of(ari_rank_copies *out, const ar_dump_tensor *t, const ari_explain_case *c, ari_arena *arena)
{
    const ar_dump_part *p = t->part, *end = p + t->parts;
    const int last = t->parts > 1 ? end[-1].rank + 1 : 0,
              all_ranks = last > 0 && c->other ? ar_dump_ranks(c->other) : 0;
    const int ranks = all_ranks > last ? all_ranks : last; /* the last may hold none of an expert's */
    size_t elements = 0, most = 0, n;
    ari_rank_copy *all = NULL;
    ar_layout *layout = NULL;
    float *local = NULL, *values = NULL;
    *out = (ari_rank_copies){.ranks = 0};
    if (t->ndim > AR_MAX_DIMS || ranks < 2 || ranks > MOST_RANKS || p->partial)
        return AR_OK;
    AR_TRY(ARI_TAKE(&all, arena, (size_t)ranks, t->name));
    AR_TRY(ARI_TAKE(&layout, arena, (size_t)ranks, t->name));
    for (int rank = 0; rank < ranks; rank++) {
        ari_rank_copy *copy = &all[rank];
        *copy = (ari_rank_copy){.layout = &layout[rank], .ndim = t->ndim};
        n = p < end && p->rank == rank ? parts_of_rank(p, (size_t)(end - p)) : 0;
        if (!lay_out(&layout[rank], copy->shape, t, p, n))
            return AR_OK;
        const size_t own = copy->layout->nbox > 0 ? ari_volume(copy->shape, t->ndim) : 0;
        elements += own;
        most = own > most ? own : most;
        p += n;
    }
    if (p < end || elements > MOST_ELEMENTS) /* ranks in no order, or too much */
        return AR_OK;
    AR_TRY(ARI_TAKE(&local, arena, elements, t->name));
    AR_TRY(ARI_TAKE(&values, arena, most, t->name));
    for (p = t->part; p < end; p += n) {
        ari_rank_copy *copy = &all[p->rank];
        n = parts_of_rank(p, (size_t)(end - p));
        copy->local = local;
        if (copy->layout->nbox == 0)
            continue;
        AR_TRY(read_parts(local, values, copy, t, p, n));
        local += ari_volume(copy->shape, t->ndim);
    }
    *out = (ari_rank_copies){.ranks = ranks, .copy = all};
    find_mesh(out, c);
    return AR_OK;
}

/* --- the run ------------------------------------------------------------------------------------------------------ */

/* A forward value of a tensor that has heads, or positions. */
static void learn(ar_verify_facts *f, size_t *q, size_t *k, const ar_dump_tensor *t, const ari_order_key *key)
{
    const ari_role role = ari_module_of(t->name, key->stem).role;
    if (key->pass != 'f' || t->ndim < 3 || t->count == 0)
        return;
    if (t->ndim == 4 && role == ARI_PROBS)
        f->heads = t->shape[1];
    if (t->ndim != 3)
        return;
    if (f->seq == 0) {
        f->batch = t->shape[0];
        f->seq = t->shape[1];
    }
    if (role == ARI_Q || role == ARI_Q_HEADS || role == ARI_Q_ROPE)
        *q = t->shape[2];
    if (role == ARI_K || role == ARI_K_HEADS || role == ARI_K_ROPE)
        *k = t->shape[2];
}

/* True if the ranks of a tensor-parallel group hold different positions of a forward value, within those of one
 * context-parallel rank. */
static bool shares_positions(const ar_dump_tensor *t, const ari_order_key *key, size_t ranks)
{
    size_t held = 0;
    if (key->pass != 'f' || t->ndim != 3 || t->parts < 2 || t->part[0].boxes == 0)
        return false;
    const ar_dump_part *p = &t->part[0];
    for (size_t i = 0; i < p->boxes; i++)
        held += p->box[i].global[0] == p->box[0].global[0] ? p->box[i].extent[1] : 0;
    return held * ranks < t->shape[1] && p->box[0].extent[2] == t->shape[2];
}

/* A number of a dump's metadata; 0: none, or not a number. */
static int number_of(const ar_dump *d, const char *key)
{
    const char *text = d ? ar_dump_metadata(d, key) : NULL;
    const long n = text ? strtol(text, NULL, 10) : 0;
    return n > 0 && n <= INT_MAX ? (int)n : 0;
}

size_t ari_counted_of(double factor, size_t targets)
{
    static const double unsure = 1e-6, most = 1e6; /* a fp32 loss's rounding, of which an integer is clear */
    const double n = (double)targets / factor, whole = rint(n);
    const bool held = whole >= 1.0 && n < most && fabs(n - whole) <= fmin(unsure * n, 0.01);
    return held && whole != (double)targets ? (size_t)whole : 0;
}

static bool is_exact(const ar_dump *d)
{
    const char *numerics = d ? ar_dump_metadata(d, "numerics") : NULL;
    return numerics && strcmp(numerics, "exact") == 0;
}

ar_verify_facts ari_facts_of(const ari_explain_case *c)
{
    if (c->facts)
        return *c->facts;
    ar_verify_facts f = {.micro_batches = number_of(c->other, "micro_batches"),
                         .targets = (size_t)number_of(c->reference, "targets"),
                         .exact_numerics = is_exact(c->reference) && is_exact(c->other)};
    size_t q = 0, k = 0;
    const ar_dump *dumps[] = {c->reference, c->other};
    ari_ranks mesh = c->mesh;
    ari_mesh_of(&mesh, c->other);
    const size_t shared = (size_t)ari_at_least_one(ari_ranks_along(&mesh, ARI_CUTS_POSITIONS));
    for (size_t d = 0; d < 2; d++) {
        for (ari_walk w = ari_walk_of(dumps[d], NULL, NULL, 0); ari_walk_next(&w);) {
            if (d == 0)
                learn(&f, &q, &k, w.t, &w.key);
            else
                f.sp = f.sp || shares_positions(w.t, &w.key, shared);
        }
    }
    if (f.heads > 0 && q > 0 && k > 0 && q % f.heads == 0 && k % (q / f.heads) == 0)
        f.kv_heads = k / (q / f.heads);
    const ar_dump_tensor *ids = ari_find_ids(c);
    if (ids && ids->ndim == 2 && ids->shape[0] == f.seq && ids->shape[1] == f.batch) { /* activations are [s, b, h] */
        f.batch = ids->shape[0];
        f.seq = ids->shape[1];
    }
    f.dp = mesh.along[ARI_AXIS_DP];
    f.heads = c->heads ? c->heads : f.heads;
    f.kv_heads = c->kv_heads ? c->kv_heads : f.kv_heads ? f.kv_heads : f.heads;
    return f;
}

const ar_dump_tensor *ari_find_ids(const ari_explain_case *c)
{
    static const char *const names[] = {"input_ids", "ids", "tokens", "input_ids:fwd"};
    const ar_dump *dumps[] = {c->reference, c->other};
    for (size_t k = 0; k < 8; k++) {
        const ar_dump_tensor *t = ari_find_readable(dumps[k % 2], names[k / 2]);
        if (t && t->count > 1 && t->ndim > 0)
            return t;
    }
    return NULL;
}

/* --- documents ---------------------------------------------------------------------------------------------------- */

/* Rows [first, first + rows) of "[[0,5,14],[0,14], ..]", where documents begin and the last one ends. */
static bool read_ends(int32_t *documents, const char *text, size_t first, size_t rows, size_t seq)
{
    size_t row = 0, last = 0;
    int32_t document = -1;
    for (const char *p = text + strspn(text, " ["); *p && row < first + rows;) {
        char *end = NULL;
        const unsigned long long at = strtoull(p, &end, 10);
        if (end == p || at > seq || (document < 0 ? at != 0 : at <= last))
            return false;
        for (size_t i = last; row >= first && i < at; i++)
            documents[(row - first) * seq + i] = document;
        document++;
        last = (size_t)at;
        p = end + strspn(end, " ,");
        if (*p != ']')
            continue;
        if (last != seq)
            return false;
        p += strspn(p, " ],[");
        row++;
        last = 0;
        document = -1;
    }
    return row == first + rows;
}

/* Positions that do not go on begin a document. */
static ar_status read_positions(int32_t *documents, bool *any, const ar_dump_tensor *t, size_t rows, size_t seq,
                                ari_arena *arena)
{
    double *position = NULL;
    AR_TRY(ARI_TAKE(&position, arena, seq, t->name));
    for (size_t row = 0; row < rows; row++) {
        AR_TRY(ari_dump_read_f64(t, t->count == seq ? 0 : row * seq, seq, position));
        documents[row * seq] = 0;
        for (size_t i = 1; i < seq; i++) {
            const bool begins = !(position[i] > position[i - 1]);
            documents[row * seq + i] = documents[row * seq + i - 1] + begins;
            *any = *any || begins;
        }
    }
    return AR_OK;
}

ar_status ari_find_documents(int32_t **gives, const ari_explain_case *c, size_t rows, size_t seq, int step,
                             ari_arena *arena)
{
    static const char *const names[] = {"position_ids", "position_ids:fwd"};
    const ar_dump *dumps[] = {c->reference, c->other};
    bool any = false;
    size_t count = 0;
    ar_status st = AR_OK;
    *gives = NULL;
    if (rows == 0 || seq < 2 || step < 1 || ari_mul_size(&count, rows, seq) != AR_OK)
        return AR_OK;
    int32_t *documents = NULL;
    AR_TRY(ARI_TAKE(&documents, arena, count, "documents"));
    for (size_t k = 0; k < 2 && !any; k++) {
        const char *text = dumps[k] ? ar_dump_metadata(dumps[k], "cu_seqlens") : NULL;
        any = text && read_ends(documents, text, ((size_t)step - 1) * rows, rows, seq);
    }
    for (size_t k = 0; k < 4 && !any && st == AR_OK; k++) {
        const ar_dump_tensor *t = ari_find_readable(dumps[k / 2], names[k % 2]);
        if (t && t->ndim > 0 && (t->count == count || t->count == seq))
            st = read_positions(documents, &any, t, rows, seq, arena);
    }
    *gives = any && st == AR_OK ? documents : NULL;
    return st == AR_ERR_DTYPE ? AR_OK : st;
}
