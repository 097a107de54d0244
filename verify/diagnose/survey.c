/* SPDX-License-Identifier: Apache-2.0 */
/* The walk over a tensor's copies, the first look at them, and the ranks as a mesh: rank = dp_rank * tp + tp_rank. */
#include "verify/diagnose/case.h"

/* --- checks ------------------------------------------------------------------------------------------------------- */

static ar_status check_box(const ari_difference *d, int rank, size_t k)
{
    const ari_rank_copy *copy = &d->copy[rank];
    const ar_box *b = &copy->layout->box[k];
    for (int i = 0; i < d->ndim; i++) {
        if (b->global[i] > d->shape[i] || b->extent[i] > d->shape[i] - b->global[i] || b->local[i] > copy->shape[i] ||
            b->extent[i] > copy->shape[i] - b->local[i])
            return ar_error_set(
                AR_ERR_ARG,
                "%s: rank %d: box %zu holds %zu elements along dimension %d from %zu of %zu, local %zu of %zu: outside",
                d->name, rank, k, b->extent[i], i, b->global[i], d->shape[i], b->local[i], copy->shape[i]);
    }
    return AR_OK;
}

static ar_status check_copy(const ari_difference *d, int rank)
{
    const ari_rank_copy *copy = &d->copy[rank];
    const ar_layout *o = copy->layout;
    if (!o || o->ndim != d->ndim || copy->ndim != d->ndim || o->nbox > AR_MAX_BOXES)
        return ar_error_set(AR_ERR_ARG, "%s: rank %d: a layout of %d dimensions, expected %d", d->name, rank,
                            o ? o->ndim : -1, d->ndim);
    for (int i = 0; i < d->ndim; i++) {
        if (o->shape[i] != d->shape[i])
            return ar_error_set(AR_ERR_ARG, "%s: rank %d: the layout's dimension %d is %zu, expected %zu", d->name,
                                rank, i, o->shape[i], d->shape[i]);
    }
    for (size_t k = 0; k < o->nbox; k++)
        AR_TRY(check_box(d, rank, k));
    return AR_OK;
}

static ar_status init_grid(ari_grid *g, const ari_difference *d)
{
    if (!d->name || d->ndim < 0 || d->ndim > AR_MAX_DIMS || d->ranks < 1 || !d->copy || (d->ndim > 0 && !d->shape))
        return ar_error_set(AR_ERR_ARG, "pattern: %d dimensions on %d ranks are not a tensor", d->ndim, d->ranks);
    *g = (ari_grid){.d = d, .nd = d->ndim ? d->ndim : 1, .shape = {1, 1, 1, 1}, .rows = 1, .cols = 1, .count = 1};
    for (int i = 0; i < d->ndim; i++) {
        g->shape[i] = d->shape[i];
        AR_TRY(ari_mul_size(&g->count, g->count, d->shape[i]));
    }
    g->cols = g->shape[g->nd - 1];
    g->rows = g->cols ? g->count / g->cols : 0;
    for (int r = 0; r < d->ranks; r++)
        AR_TRY(check_copy(d, r));
    return AR_OK;
}

/* --- the walk ----------------------------------------------------------------------------------------------------- */

ari_run ari_runs_of(const ari_grid *g)
{
    return (ari_run){.g = g, .only = -1, .box = SIZE_MAX};
}

ari_run ari_runs_of_rank(const ari_grid *g, int rank)
{
    return (ari_run){.g = g, .rank = rank, .only = rank, .box = SIZE_MAX};
}

size_t ari_grid_index(const ari_grid *g, size_t index, int dim)
{
    for (int i = g->nd - 1; i > dim; i--)
        index /= g->shape[i];
    return index % g->shape[dim];
}

size_t ari_grid_inner(const ari_grid *g, int dim)
{
    return ari_volume(g->shape + dim + 1, g->nd - dim - 1);
}

/* The part of the run's row inside its rank's box, if any. */
static bool find_run(ari_run *run)
{
    const ari_grid *g = run->g;
    const ari_rank_copy *copy = &g->d->copy[run->rank];
    const ar_box *b = &copy->layout->box[run->box];
    const int last = g->nd - 1;
    size_t stride = g->d->ndim ? copy->shape[last] : 1, rest = run->row;
    run->at = g->d->ndim ? b->local[last] : 0;
    run->col = g->d->ndim ? b->global[last] : 0;
    run->count = g->d->ndim ? b->extent[last] : 1;
    for (int i = last - 1; i >= 0; i--) {
        const size_t x = rest % g->shape[i];
        rest /= g->shape[i];
        if (x < b->global[i] || x - b->global[i] >= b->extent[i])
            return false;
        run->at += (b->local[i] + x - b->global[i]) * stride;
        stride *= copy->shape[i];
    }
    run->index = run->row * g->cols + run->col;
    if (run->count > 0) {
        run->ref = g->d->reference + run->index;
        run->value = copy->local + run->at;
    }
    return run->count > 0;
}

bool ari_runs_next(ari_run *run)
{
    const ari_difference *d = run->g->d;
    const int first = run->only < 0 ? 0 : run->only, end = run->only < 0 ? d->ranks : run->only + 1;
    run->box++; /* to 0 before the first */
    for (; run->row < run->g->rows; run->row++, run->rank = first) {
        for (; run->rank < end; run->rank++, run->box = 0) {
            for (; run->box < d->copy[run->rank].layout->nbox; run->box++) {
                if (find_run(run))
                    return true;
            }
        }
    }
    return false;
}

/* --- the survey --------------------------------------------------------------------------------------------------- */

int ari_by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void tally_one(ari_tally *t, float value, float ref, bool differs, double noise)
{
    const double v = (double)value, r = (double)ref, delta = fabs(v - r);
    t->held++;
    t->kept += !differs && ref != 0.0f;
    t->ss += differs ? 0.0 : r * r;
    if (!differs)
        return;
    t->different++;
    t->nan += isnan(value) && !isnan(ref);
    t->zero += (value == 0.0f || fabs(v) <= noise) && ref != 0.0f;
    t->gained += value != 0.0f && !(fabs(v) <= noise) && ref == 0.0f;
    t->vv += v * v;
    t->vr += v * r;
    t->rr += r * r;
    t->dd += (v - r) * (v - r);
    t->max_difference = delta > t->max_difference ? delta : t->max_difference;
    const double relative = delta / fabs(r);
    t->max_relative = relative > t->max_relative ? relative : t->max_relative;
}

static void survey_run(ari_survey *s, const ari_grid *g, const ari_run *run)
{
    ari_tally *own = &s->rank[run->rank];
    for (size_t i = 0; i < run->count; i++) {
        const size_t index = run->index + i;
        const double magnitude = fabs((double)run->ref[i]);
        s->max_reference = isfinite(magnitude) && magnitude > s->max_reference ? magnitude : s->max_reference;
        const bool differs = ari_run_differs(g, run, i);
        tally_one(own, run->value[i], run->ref[i], differs, g->d->noise);
        s->bits[index / 8] = (uint8_t)(s->bits[index / 8] | ((unsigned)differs << (index % 8)));
    }
}

/* An element of a row: its value on the first rank that holds it, whether others do, and whether theirs differ. */
typedef struct held_element {
    float first;
    bool held, shared, apart;
} held_element;

static void end_row(ari_survey *s, const ari_grid *g, held_element *row)
{
    for (size_t c = 0; c < g->cols; c++) {
        s->shared += row[c].shared;
        s->disagree += row[c].apart;
        row[c] = (held_element){0};
    }
}

static void count_hits(ari_survey *s, const ari_grid *g)
{
    size_t *columns = s->hits[g->nd - 1], combinations = 1;
    for (size_t row = 0; row < g->rows; row++) {
        size_t n = 0;
        for (size_t c = 0, i = row * g->cols; c < g->cols; c++, i++) {
            const bool off = ari_survey_bit(s, i);
            columns[c] += off;
            n += off;
        }
        for (int dim = 0; n > 0 && dim < g->nd - 1; dim++)
            s->hits[dim][ari_grid_index(g, row * g->cols, dim)] += n;
        s->different += n;
    }
    for (int dim = 0; dim < g->nd; dim++) {
        for (size_t i = 0; i < g->shape[dim]; i++)
            s->hit[dim] += s->hits[dim][i] > 0;
        combinations *= s->hit[dim];
    }
    s->product = combinations == s->different;
}

bool ari_rank_is_right(const ari_survey *s, size_t rank)
{
    const ari_tally *t = &s->rank[rank];
    return t->different == 0 && (t->kept > 0 || (t->held > 0 && s->max_reference == 0.0));
}

static void summarise(ari_survey *s, const ari_grid *g)
{
    ari_tally *t = &s->total;
    s->whole = true;
    for (int r = 0; r < g->d->ranks; r++) {
        const ari_tally *of = &s->rank[r];
        t->held += of->held, t->different += of->different, t->kept += of->kept;
        t->nan += of->nan, t->zero += of->zero, t->gained += of->gained;
        t->vv += of->vv, t->vr += of->vr, t->rr += of->rr, t->dd += of->dd, t->ss += of->ss;
        t->max_difference = fmax(t->max_difference, of->max_difference);
        t->max_relative = fmax(t->max_relative, of->max_relative);
        s->wrong_ranks += of->different > 0;
        s->holding_ranks += of->different > 0 || ari_rank_is_right(s, (size_t)r);
        s->whole = s->whole && of->held == g->count;
    }
    count_hits(s, g);
}

static ar_status init_survey(ari_survey *s, const ari_grid *g, ari_arena *arena)
{
    held_element *row = NULL; /* of one rank alone none has copies */
    size_t current = 0;
    *s = (ari_survey){0};
    AR_TRY(ARI_TAKE(&s->bits, arena, g->count / 8 + 1, g->d->name));
    AR_TRY(ARI_TAKE(&s->rank, arena, (size_t)g->d->ranks, g->d->name));
    for (int i = 0; i < g->nd; i++)
        AR_TRY(ARI_TAKE(&s->hits[i], arena, g->shape[i], g->d->name));
    if (g->d->ranks > 1)
        AR_TRY(ARI_TAKE(&row, arena, g->cols, g->d->name));
    for (ari_run run = ari_runs_of(g); ari_runs_next(&run); current = run.row) {
        if (row && run.row != current)
            end_row(s, g, row);
        for (size_t i = 0; row && i < run.count; i++) {
            held_element *e = &row[run.col + i];
            e->shared = e->held;
            e->apart |= e->held && !ari_same_bits(e->first, run.value[i]);
            e->first = e->held ? e->first : run.value[i];
            e->held = true;
        }
        survey_run(s, g, &run);
    }
    if (row)
        end_row(s, g, row);
    summarise(s, g);
    return AR_OK;
}

ar_status ari_case_init(ari_case *c, const ari_difference *d)
{
    AR_TRY(init_grid(&c->grid, d));
    c->d = d;
    c->role = ari_module_of(d->name, strlen(d->name)).role;
    c->is = ari_name_is(d->name);
    if (c->grid.count == 1 && strcmp(d->name, "output") == 0) /* of a model that returns its loss alone */
        c->is |= ARI_IS_LOSS;
    c->own = c->reference ? ari_order_of(c->reference->name, c->path) : (ari_order_key){.name = NULL};
    return init_survey(&c->survey, &c->grid, c->arena);
}

/* --- the mesh ----------------------------------------------------------------------------------------------------- */

/* The ranks along each axis, at least one; all along tp where the layout is not that of so many ranks. */
static ari_ranks mesh_of(const ari_difference *d)
{
    const bool told = d->mesh.along[ARI_AXIS_TP] > 0 && d->mesh.along[ARI_AXIS_DP] > 0;
    ari_ranks mesh = d->mesh;
    int world = 1;
    for (int i = 0; i < ARI_PLACED_AXES; i++) {
        mesh.along[i] = ari_at_least_one(mesh.along[i]);
        world *= mesh.along[i];
    }
    for (int i = 0; i < ARI_PLACED_AXES && !(told && world == d->ranks); i++)
        mesh.along[i] = i == ARI_AXIS_TP ? ari_at_least_one(d->ranks) : 1;
    return mesh;
}

int ari_along(const ari_difference *d, ari_axes axes)
{
    const ari_ranks mesh = mesh_of(d);
    return ari_ranks_along(&mesh, axes);
}

ari_properties ari_of_axis(int extent)
{
    static const ari_properties of[ARI_LAYOUT_AXES] = {[ARI_LAYOUT_PP] = ARI_IF(STAGES),
                                                       [ARI_LAYOUT_DP] = ARI_IF(OF_DP),
                                                       [ARI_LAYOUT_CP] = ARI_IF(OF_CP),
                                                       [ARI_LAYOUT_TP] = ARI_IF(OF_TP)};
    return of[extent];
}

char *ari_axes_text(char out[ARI_AXES_TEXT], const ari_case *c, ari_axes axes, const char *before_last)
{
    char name[ARI_AXES_TEXT];
    ari_text t = ari_text_in(out, ARI_AXES_TEXT);
    if (!axes)
        ari_say(&t, "no ranks");
    for (int i = ARI_LAYOUT_AXES - 1; i >= 0 && axes; i--) {
        if (!(axes & ari_layout_axes[i].axes))
            continue;
        axes &= ~ari_layout_axes[i].axes;
        ari_say(&t, "%s%s", t.used == 0 ? "" : axes ? ", " : before_last, ari_extent_text(name, c->known->other, i));
    }
    return out;
}

/* --- the ranks of one pipeline rank alone ------------------------------------------------------------------------- */

void ari_narrow_to_stage(ari_difference *d)
{
    const int stages = ari_along(d, ARI_CUTS_LAYERS), ranks = stages > 1 ? d->ranks / stages : 0;
    int holder = -1;
    d->pipeline = ranks > 0;
    for (int r = 0; ranks > 0 && r < d->ranks; r++) {
        if (d->copy[r].layout->nbox == 0)
            continue;
        if (holder >= 0 && holder != r / ranks)
            return;
        holder = r / ranks;
    }
    if (holder < 0)
        return;
    d->copy += holder * ranks;
    d->first_rank += holder * ranks;
    d->ranks = ranks;
    d->mesh.along[ARI_AXIS_PP] = 1;
}

/* --- along which groups copies differ ----------------------------------------------------------------------------- */

static bool same_boxes(const ar_layout *a, const ar_layout *b)
{
    if (a->nbox != b->nbox)
        return false;
    for (size_t k = 0; k < a->nbox; k++) {
        if (memcmp(a->box[k].global, b->box[k].global, (size_t)a->ndim * sizeof *a->box[k].global) != 0 ||
            memcmp(a->box[k].extent, b->box[k].extent, (size_t)a->ndim * sizeof *a->box[k].extent) != 0)
            return false;
    }
    return a->nbox > 0;
}

/* The one extent of the layout along which two ranks differ; 0: several. */
static ari_axes axis_between(const ari_ranks *mesh, int a, int b)
{
    ari_axes over = 0;
    int extents = 0;
    for (int i = 0; i < ARI_LAYOUT_AXES; i++) {
        const ari_axes axes = ari_layout_axes[i].axes;
        if (ari_place_along(mesh, a, axes) != ari_place_along(mesh, b, axes)) {
            over = axes;
            extents++;
        }
    }
    return extents == 1 ? over : 0;
}

ari_axes ari_apart_over(const ari_difference *d)
{
    const ari_ranks mesh = mesh_of(d);
    ari_axes apart = 0;
    for (int a = 0; a < d->ranks; a++) {
        for (int b = 0; b < a; b++) {
            const ari_axes over = axis_between(&mesh, a, b);
            if (!over || !same_boxes(d->copy[a].layout, d->copy[b].layout) ||
                memcmp(d->copy[a].local, d->copy[b].local,
                       ari_volume(d->copy[a].shape, d->copy[a].ndim) * sizeof(float)) == 0)
                continue;
            apart |= over;
        }
    }
    for (int i = ARI_LAYOUT_AXES - 1; i >= 0 && !apart; i--) /* the innermost there is */
        apart = ari_ranks_along(&mesh, ari_layout_axes[i].axes) > 1 ? ari_layout_axes[i].axes : 0;
    return apart ? apart : ARI_CUTS_FEATURES;
}

bool ari_in_group(const ari_difference *d, int rank, ari_axes over, int key)
{
    const ari_ranks mesh = mesh_of(d);
    return ari_place_along(&mesh, rank, ARI_ALL_AXES & ~over) == key;
}

int ari_groups(const ari_difference *d, ari_axes over)
{
    return ari_along(d, ARI_ALL_AXES & ~over);
}

/* --- the ranks of one data-parallel rank alone -------------------------------------------------------------------- */

/* The samples that a group holds, the same on each of its ranks; false where they are not. */
static bool samples_of(const ari_difference *d, int first, int ranks, size_t *start, size_t *count)
{
    bool any = false;
    for (int r = first; r < first + ranks; r++) {
        const ar_layout *o = d->copy[r].layout;
        for (size_t k = 0; k < o->nbox; k++) {
            if (any && (o->box[k].global[0] != *start || o->box[k].extent[0] != *count))
                return false;
            *start = o->box[k].global[0];
            *count = o->box[k].extent[0];
            any = true;
        }
    }
    return any && *count > 0;
}

/* True if the groups have shares of a parameter's gradient (ZeRO), so that no group has all of it. */
static bool is_shared_out(const ari_difference *d, int ranks)
{
    for (int r = ranks; r < d->ranks; r++) {
        const ar_layout *a = d->copy[r % ranks].layout, *b = d->copy[r].layout;
        if (a->nbox + b->nbox > 0 && !same_boxes(a, b))
            return true;
    }
    return false;
}

/* Copies over dp become those of the group: dp groups number theirs one after the other. */
static void renumber(ar_layout *o, int dp)
{
    if (o->replicas % dp != 0)
        return;
    o->replicas /= dp;
    o->replica %= o->replicas;
}

ar_status ari_one_group(ari_difference *out, bool *seen, const ari_difference *d, int rank, ari_arena *arena)
{
    const int dp = ari_along(d, ARI_CUTS_SAMPLES), ranks = ari_along(d, ARI_CUTS_FEATURES | ARI_CUTS_POSITIONS);
    const int first = rank / ranks * ranks;
    const bool activation = ari_is_activation(d) && d->ndim >= 3;
    size_t start = 0, count = 0, *shape = NULL;
    ar_layout *layout = NULL;
    ari_rank_copy *copy = NULL;
    *seen = false;
    if (dp < 2 || ari_along(d, ARI_CUTS_LAYERS) > 1 || (activation && !samples_of(d, first, ranks, &start, &count)) ||
        (d->pass == 'g' && is_shared_out(d, ranks)))
        return AR_OK;
    AR_TRY(ARI_TAKE(&layout, arena, (size_t)ranks, "layouts of a group"));
    AR_TRY(ARI_TAKE(&copy, arena, (size_t)ranks, "copies of a group"));
    AR_TRY(ARI_TAKE(&shape, arena, AR_MAX_DIMS, "a shape"));
    *seen = true;
    *out = *d;
    for (int i = 0; i < d->ndim; i++)
        shape[i] = d->shape[i];
    const size_t inner = activation ? ari_volume(d->shape + 1, d->ndim - 1) : 1;
    if (activation) {
        shape[0] = out->batch = count;
        out->reference = d->reference + start * inner;
        out->ids = d->ids ? d->ids + start * d->seq : NULL;
        out->documents = d->documents ? d->documents + start * d->seq : NULL;
    }
    for (int r = 0; r < ranks; r++) {
        copy[r] = d->copy[first + r];
        layout[r] = *d->copy[first + r].layout;
        copy[r].layout = &layout[r];
        for (size_t k = 0; activation && k < layout[r].nbox; k++)
            layout[r].box[k].global[0] -= start;
        if (activation)
            layout[r].shape[0] = count;
        else
            renumber(&layout[r], dp);
    }
    out->shape = shape;
    out->copy = copy;
    out->ranks = ranks;
    out->mesh = mesh_of(d);
    out->mesh.along[ARI_AXIS_DP] = 1;
    return AR_OK;
}
