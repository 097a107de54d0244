/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/check/compare.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ref/context/context.h"
#include "ref/core/text.h"
#include "ref/layers/parts.h"
#include "ref/numerics/bits.h"
#include "verify/run/process_run.h"
#include "verify/writer/dump_ranks.h"

/* Floats in order as integers: -0 and +0 are neighbours. */
static int64_t ordered(float x)
{
    const uint32_t u = ari_bits32(x);
    return u & 0x80000000u ? -(int64_t)(u & 0x7fffffffu) - 1 : (int64_t)u;
}

uint64_t ari_ulp_distance(float a, float b)
{
    if (ari_bits32(a) == ari_bits32(b))
        return 0;
    if (a != a || b != b)
        return UINT32_MAX;
    const int64_t d = ordered(a) - ordered(b);
    return (uint64_t)(d < 0 ? -d : d);
}

ar_status ari_run_tensors_init(ari_run_tensors *v, const ari_reference *reference, ari_arena *arena)
{
    *v = (ari_run_tensors){.reference = reference};
    AR_TRY(ARI_TAKE(&v->requested, arena, reference->count, "a run's values"));
    AR_TRY(ARI_TAKE(&v->values, arena, reference->count, "a run's values"));
    for (size_t i = 0; i < reference->count; i++)
        v->requested[i] = ari_reference_is_weight(reference, i) || ari_reference_is_gradient(reference, i);
    return AR_OK;
}

void ari_run_tensors_fini(ari_run_tensors *v)
{
    for (size_t i = 0; v->values && i < v->reference->count; i++)
        free(v->values[i]);
}

/* Returns a tensor's values in the run, initially equal to the reference's. The first rank that needs them allocates
 * them. NULL: memory is short. */
static float *own_values(ari_run_tensors *v, size_t tensor)
{
    const ari_ref_tensor *t = &v->reference->tensor[tensor];
    float *existing = __atomic_load_n(&v->values[tensor], __ATOMIC_ACQUIRE);
    float *created = existing ? NULL : malloc(t->count * sizeof *created);
    if (!created)
        return existing;
    memcpy(created, t->values, t->count * sizeof *created);
    if (__atomic_compare_exchange_n(&v->values[tensor], &existing, created, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return created;
    free(created);
    return existing;
}

ar_status ari_comparator_init(ari_comparator *c, const ari_reference *reference, ari_run_tensors *run_values)
{
    *c = (ari_comparator){.reference = reference, .run_values = run_values};
    return ARI_ALLOC_ZERO(&c->finding, reference->count, "findings");
}

void ari_comparator_fini(ari_comparator *c)
{
    for (size_t i = 0; i < c->kept_count; i++)
        free(c->kept_copies[i].local);
    for (ari_waiting_report *w = c->waiting, *next_report; w; w = next_report) {
        next_report = w->next;
        free(w);
    }
    free(c->finding);
    *c = (ari_comparator){0};
}

typedef struct comparing {
    ari_finding *finding;
    const float *reference;
    double allowed;
    const float *allowed_each;   /* NULL: nothing */
    ari_run_tensors *run_values; /* NULL: not wanted, or not this rank's to write */
    size_t tensor;               /* index of the tensor in the reference */
    ar_status *status;           /* of allocated values */
    size_t before;               /* number of elements of earlier reports that precede this one in the local tensor */
} comparing;

/* Returns |difference| divided by the allowance; infinity if only one value is a number, or the allowance is 0. */
static double ratio_of(float actual, float expected, double allowed)
{
    if (actual == expected || (actual != actual && expected != expected))
        return 0.0;
    const double difference = fabs((double)actual - (double)expected);
    return isfinite(difference) ? difference / allowed : (double)INFINITY;
}

static void compare_run(void *user, const ari_box_run *r)
{
    const comparing *c = user;
    ari_finding *f = c->finding;
    f->covered += r->count;
    float *values = NULL;
    if (r->stride == 1 && memcmp(r->local, c->reference + r->full, r->count * sizeof(float)) == 0)
        return;
    for (size_t i = 0; i < r->count; i++) {
        const float expected = c->reference[r->full + i];
        float actual = r->local[(ptrdiff_t)i * r->stride];
        if (ari_bits32(actual) == ari_bits32(expected))
            continue;
        values = values || !c->run_values ? values : own_values(c->run_values, c->tensor);
        if (values) /* atomic, because two ranks may write the same part by mistake, which is a finding and must not
                       be a race */
            __atomic_store(&values[r->full + i], &actual, __ATOMIC_RELAXED);
        else if (c->run_values)
            *c->status = AR_ERR_MEMORY;
        if (c->allowed > 0.0) {
            const double extra = c->allowed_each ? (double)c->allowed_each[r->full + i] : 0.0;
            const double ratio = ratio_of(actual, expected, c->allowed + extra);
            f->max_ratio = ratio > f->max_ratio ? ratio : f->max_ratio;
            if (ratio <= 1.0)
                continue;
        }
        const uint64_t ulp = ari_ulp_distance(actual, expected);
        f->max_ulp = ulp > f->max_ulp ? ulp : f->max_ulp;
        if (f->different == 0 || r->full + i < f->first_index) {
            f->first_index = r->full + i;
            f->first_local = c->before + r->local_index + i;
            f->actual = actual;
        }
        f->different++;
    }
}

/* --- reports of one tensor that become one part ------------------------------------------------------------------- */

size_t ari_finding_count(const ari_finding *f)
{
    return f->is_reported ? ari_volume(f->shape, f->ndim) : 0;
}

/* Returns where a report's rows are: directly after the existing rows, directly before them, or neither. */
static ari_side side_of(const ari_finding *f, const ar_layout *o, const ar_tensor *t)
{
    return f->ndim == t->ndim && ari_same_tensor(&f->layout, o) ? ari_side_of(&f->layout, f->shape[0], o, t->shape[0])
                                                                : ARI_SEPARATE;
}

static void join_finding(ari_finding *f, const ar_layout *o, const ar_tensor *t, ari_side side)
{
    ari_join_rows(&f->layout, o, side);
    f->shape[0] += t->shape[0];
    if (side == ARI_BEFORE)
        f->first_local += ar_tensor_count(t);
}

static void first_report(ari_finding *f, const ar_layout *o, const ar_tensor *t)
{
    f->is_reported = true;
    f->layout = *o;
    f->ndim = t->ndim;
    memcpy(f->shape, t->shape, sizeof f->shape);
}

/* --- copies that are kept ----------------------------------------------------------------------------------------- */

/* A copy between a full tensor and one rank's packed parts of it. */
typedef struct moving {
    float *full, *packed;
    bool to_full;
} moving;

static void move_run(void *user, const ari_box_run *r)
{
    const moving *m = user;
    float *full = m->full + r->full, *packed = m->packed + r->local_index;
    for (size_t i = 0; i < r->count; i++)
        *(m->to_full ? &full[i] : &packed[i]) = m->to_full ? packed[i] : full[i];
}

static ar_status move_boxes(const ari_finding *f, float *full, float *packed, bool to_full)
{
    ar_tensor view;
    moving m = {full, packed, to_full};
    AR_TRY(ar_tensor_view(&view, AR_F32, f->ndim, f->shape, (ar_buf){packed}));
    ari_for_each_run(&view, &f->layout, move_run, &m);
    return AR_OK;
}

/* Returns the tensor's index among the stored copies; kept_count: not stored. */
static size_t find_kept(const ari_comparator *c, size_t tensor)
{
    size_t i = 0;
    while (i < c->kept_count && c->kept_copies[i].tensor != tensor)
        i++;
    return i;
}

/* Returns a slot for a tensor: a free one, or that of the last stored tensor in execution order if it comes after this
 * tensor. A tensor that lost its slot is not stored again, since all stored tensors precede it. */
static ari_saved_tensor *slot_for(ari_comparator *c, size_t tensor)
{
    if (c->kept_count < ARI_SAVED_COPIES) {
        c->kept_copies[c->kept_count] = (ari_saved_tensor){.tensor = tensor};
        return &c->kept_copies[c->kept_count++];
    }
    ari_saved_tensor *last_slot = &c->kept_copies[0];
    for (size_t i = 1; i < c->kept_count; i++)
        last_slot = c->kept_copies[i].tensor > last_slot->tensor ? &c->kept_copies[i] : last_slot;
    if (last_slot->tensor < tensor)
        return NULL;
    free(last_slot->local);
    *last_slot = (ari_saved_tensor){.tensor = tensor};
    return last_slot;
}

/* Stores the part of a finding after a report: its earlier `had` elements (stored, or equal to the reference), with the
 * new rows after or before them. */
static ar_status keep_report(ari_comparator *c, size_t tensor, const ari_finding *had, size_t had_count,
                             const ar_tensor *t, ari_side side)
{
    const size_t count = ar_tensor_count(t);
    const size_t slot = find_kept(c, tensor);
    ari_saved_tensor *k = slot < c->kept_count ? &c->kept_copies[slot] : slot_for(c, tensor);
    float *stacked = NULL;
    if (!k)
        return AR_OK;
    AR_TRY(ARI_ALLOC(&stacked, had_count + count, "a copy of a tensor that differs"));
    float *earlier = stacked + (side == ARI_BEFORE ? count : 0),
          *incoming = stacked + (side == ARI_BEFORE ? 0 : had_count);
    ar_status st = AR_OK;
    if (k->local)
        memcpy(earlier, k->local, had_count * sizeof *stacked);
    else if (had_count > 0)
        st = move_boxes(had, c->reference->tensor[tensor].values, earlier, false);
    ari_pack_elements(incoming, t);
    free(k->local);
    k->local = stacked;
    return st;
}

/* --- the tap ------------------------------------------------------------------------------------------------------ */

static ar_status add_report(ari_comparator *c, size_t i, const ar_layout *o, const ar_tensor *t, ari_side side)
{
    const ari_ref_tensor *reference = &c->reference->tensor[i];
    ari_finding *f = &c->finding[i];
    const ari_finding had = *f;
    const size_t had_count = ari_finding_count(&had);
    if (had.is_reported)
        join_finding(f, o, t, side);
    else
        first_report(f, o, t);
    ar_status st = AR_OK;
    comparing user = {f,
                      reference->values,
                      reference->allowed,
                      reference->allowed_each,
                      c->run_values && c->run_values->requested[i] && o->replica == 0 ? c->run_values : NULL,
                      i,
                      &st,
                      side == ARI_AFTER ? had_count : 0};
    ari_for_each_run(t, o, compare_run, &user);
    ari_reference_rest(reference);
    if (st != AR_OK)
        return ar_error_set(st, "no memory for the values of %s", reference->name);
    return f->different > 0 ? keep_report(c, i, &had, had_count, t, side) : AR_OK;
}

static ar_status let_wait(ari_comparator *c, size_t i, const ar_layout *o, const ar_tensor *t)
{
    ARI_OWNED ari_waiting_report *w = NULL;
    AR_TRY(ari_alloc_zero((void **)&w, 1, sizeof *w + ar_tensor_count(t) * sizeof *w->values,
                          "a report that waits for others"));
    AR_TRY(ar_tensor_view(&w->local, AR_F32, t->ndim, t->shape, (ar_buf){w->values}));
    ari_pack_elements(w->values, t);
    w->next = c->waiting;
    w->tensor = i;
    w->layout = *o;
    ARI_GIVE(&c->waiting, w);
    return AR_OK;
}

/* Adds the waiting reports that can now be joined. */
static ar_status add_waiting(ari_comparator *c, size_t i)
{
    ari_finding *f = &c->finding[i];
    f->broken = false;
    for (ari_waiting_report **link = &c->waiting; *link;) {
        ari_waiting_report *w = *link;
        const ari_side side = w->tensor == i ? side_of(f, &w->layout, &w->local) : ARI_SEPARATE;
        if (side == ARI_SEPARATE) {
            f->broken |= w->tensor == i;
            link = &w->next;
            continue;
        }
        *link = w->next;
        const ar_status st = add_report(c, i, &w->layout, &w->local, side);
        free(w);
        AR_TRY(st);
        f->broken = false;
        link = &c->waiting; /* another report may now be joinable */
    }
    return AR_OK;
}

static ar_status take_report(ari_comparator *c, size_t i, const ar_tap_event *e)
{
    ari_finding *f = &c->finding[i];
    const ari_side side = f->is_reported ? side_of(f, e->layout, e->local) : ARI_AFTER;
    if (side == ARI_SEPARATE) {
        f->broken = true;
        return let_wait(c, i, e->layout, e->local);
    }
    AR_TRY(add_report(c, i, e->layout, e->local, side));
    return f->broken ? add_waiting(c, i) : AR_OK;
}

/* Notes a report that cannot be compared with tensor i; reference->count: no tensor has that name. */
static void leave_out(ari_comparator *c, size_t i, const ar_tap_event *e)
{
    const bool is_known = i < c->reference->count, misshapen = is_known && e->local->dtype == AR_F32;
    if (misshapen && !c->finding[i].is_reported) {
        c->finding[i].misshapen = true;
        c->finding[i].layout = *e->layout;
    }
    if (c->unexpected[0])
        return;
    ari_text why = ari_text_in(c->unexpected, sizeof c->unexpected);
    ari_say(&why, "%.120s%s", e->name, ari_pass_suffix(e->pass));
    if (misshapen)
        ari_say(&why, " with shape %s, which on one rank has %s", ARI_SHOW_SHAPE(e->layout->ndim, e->layout->shape),
                ARI_SHOW_SHAPE(c->reference->tensor[i].ndim, c->reference->tensor[i].shape));
    else
        ari_say(&why, is_known ? " in another format than fp32" : ", which the baseline does not have");
}

/* Removes padding rows from a report; `rows` is the number of real rows. Returns false if none are left. */
static bool leave_out_padding(ar_layout *o, ar_tensor *local, size_t rows)
{
    size_t local_rows = 0;
    for (size_t i = 0; i < o->nbox; i++) {
        ar_box *b = &o->box[i];
        const size_t remaining = rows > b->global[0] ? rows - b->global[0] : 0;
        b->extent[0] = b->extent[0] < remaining ? b->extent[0] : remaining;
        local_rows = b->local[0] + b->extent[0] > local_rows ? b->local[0] + b->extent[0] : local_rows;
    }
    o->shape[0] = rows;
    local->shape[0] = local_rows;
    return local_rows > 0;
}

ar_status ari_comparator_tap(void *user, const ar_tap_event *e)
{
    ari_comparator *c = user;
    const size_t i = ari_reference_find_in(c->reference, e->name, e->pass, (int)e->step);
    const bool activation = strchr("fb", e->pass) && e->layout->ndim > 0 && i < c->reference->count;
    if (activation && e->layout->shape[0] == c->reference->tensor[i].shape[0] + c->reference->padding &&
        c->reference->padding > 0) {
        ar_layout unpadded_layout = *e->layout;
        ar_tensor local = *e->local;
        ar_tap_event rest = *e;
        rest.layout = &unpadded_layout;
        rest.local = &local;
        return leave_out_padding(&unpadded_layout, &local, c->reference->tensor[i].shape[0]) ? take_report(c, i, &rest)
                                                                                             : AR_OK;
    }
    if (i < c->reference->count && ari_layout_count(e->layout) == c->reference->tensor[i].count &&
        e->local->dtype == AR_F32)
        return take_report(c, i, e);
    leave_out(c, i, e);
    return AR_OK;
}

/* --- what all ranks say ------------------------------------------------------------------------------------------- */

static bool overlap(const ar_box *a, const ar_box *b, int ndim)
{
    for (int d = 0; d < ndim; d++) {
        if (a->global[d] + a->extent[d] <= b->global[d] || b->global[d] + b->extent[d] <= a->global[d])
            return false;
    }
    return true;
}

/* Returns true if no element is in two boxes of a and b; for a layout with itself, in two of its boxes. */
static bool are_disjoint(const ar_layout *a, const ar_layout *b)
{
    if (a->ndim != b->ndim || memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) != 0)
        return false;
    for (size_t i = 0; i < a->nbox; i++) {
        for (size_t k = a == b ? i + 1 : 0; k < b->nbox; k++) {
            if (overlap(&a->box[i], &b->box[k], a->ndim))
                return false;
        }
    }
    return true;
}

/* Returns true if, for every replica, its ranks cover the tensor's `count` elements exactly once. A count alone would
 * accept two ranks with the same part. */
static bool covers_once(const ari_comparator *ranks, int n, size_t tensor, size_t count)
{
    size_t covered = 0;
    int replicas = 0;
    for (int r = 0; r < n; r++) {
        const ari_finding *f = &ranks[r].finding[tensor];
        if (!f->is_reported)
            continue;
        replicas = replicas ? replicas : f->layout.replicas;
        if (f->broken || f->layout.replicas != replicas || f->layout.replica < 0 || f->layout.replica >= replicas)
            return false;
        covered += f->covered;
        for (int peer = 0; peer <= r; peer++) {
            const ari_finding *o = &ranks[peer].finding[tensor];
            if (o->is_reported && o->layout.replica == f->layout.replica && !are_disjoint(&o->layout, &f->layout))
                return false;
        }
    }
    /* no element occurs twice within a replica, so this sum is reached only if every replica is complete */
    return replicas > 0 && covered == count * (size_t)replicas;
}

/* Counts the elements that differ in one replica, over all ranks that hold parts of it. */
static size_t different_in(const ari_comparator *ranks, int n, size_t tensor, int replica)
{
    size_t different = 0;
    for (int r = 0; r < n; r++) {
        const ari_finding *f = &ranks[r].finding[tensor];
        different += f->layout.replica == replica ? f->different : 0;
    }
    return different;
}

ari_verdict ari_verdict_of(const ari_comparator *ranks, int n, size_t tensor)
{
    ari_verdict v = {.rank = -1};
    for (int r = 0; r < n; r++) {
        const ari_finding *f = &ranks[r].finding[tensor];
        v.max_ulp = f->max_ulp > v.max_ulp ? f->max_ulp : v.max_ulp;
        v.max_ratio = f->max_ratio > v.max_ratio ? f->max_ratio : v.max_ratio;
        if (f->different == 0)
            continue;
        const size_t different = different_in(ranks, n, tensor, f->layout.replica);
        v.different = different > v.different ? different : v.different;
        if (v.rank < 0 || f->first_index < v.first_index) {
            v.first_index = f->first_index;
            v.first_local = f->first_local;
            v.actual = f->actual;
            v.rank = r;
        }
    }
    v.complete = covers_once(ranks, n, tensor, ranks[0].reference->tensor[tensor].count);
    return v;
}

ar_status ari_run_tensors_finish(ari_run_tensors *v, const ari_comparator *ranks, int n)
{
    for (size_t i = 0; i < v->reference->count; i++) {
        if (!v->requested[i] || covers_once(ranks, n, i, v->reference->tensor[i].count))
            continue;
        free(v->values[i]);
        v->values[i] = NULL;
        AR_TRY(ARI_ALLOC_ZERO(&v->values[i], v->reference->tensor[i].count, "a run's values"));
    }
    return AR_OK;
}

ar_status ari_comparator_copy(float **out, const ari_comparator *c, size_t tensor, ari_arena *arena)
{
    const ari_finding *f = &c->finding[tensor];
    const size_t count = ari_finding_count(f);
    const size_t slot = find_kept(c, tensor);
    if (f->different > 0 && slot == c->kept_count)
        return ar_error_set(AR_ERR_NOT_FOUND, "no copy of tensor %zu was kept", tensor);
    AR_TRY(ARI_TAKE(out, arena, count, "a copy of a tensor"));
    if (slot < c->kept_count)
        memcpy(*out, c->kept_copies[slot].local, count * sizeof(float));
    else if (count > 0)
        return move_boxes(f, c->reference->tensor[tensor].values, *out, false);
    return AR_OK;
}

/* --- where each rank is a process --------------------------------------------------------------------------------- */

/* Returns true if this rank holds the first copy of a requested tensor, which supplies the run's values. */
static bool gives_values(const ari_comparator *c, const ari_run_tensors *run_values, size_t tensor)
{
    const ari_finding *f = &c->finding[tensor];
    return run_values->requested[tensor] && f->is_reported && !f->broken && f->layout.replica == 0;
}

/* Transfers a rank's findings from its process (send) to process 0. */
static ar_status transfer(ari_bytes *b, void *data, size_t n, bool send)
{
    return send ? ari_bytes_put(b, data, n) : ari_bytes_take(b, data, n);
}

/* Transfers the values of a tensor in which an element of the rank differs. */
static ar_status transfer_values(ari_bytes *b, const ari_comparator *c, ari_run_tensors *run_values, bool send)
{
    for (size_t i = 0; i < c->reference->count; i++) {
        const ari_finding *f = &c->finding[i];
        const size_t count = ari_finding_count(f);
        ARI_OWNED float *packed = NULL;
        bool differs = send && run_values->values[i];
        if (!gives_values(c, run_values, i))
            continue;
        AR_TRY(transfer(b, &differs, sizeof differs, send));
        if (!differs)
            continue;
        float *values = own_values(run_values, i);
        AR_TRY(ARI_ALLOC_ZERO(&packed, count, "a run's values"));
        if (!values)
            return ar_error_set(AR_ERR_MEMORY, "no memory for the values of %s", c->reference->tensor[i].name);
        if (send)
            AR_TRY(move_boxes(f, values, packed, false));
        AR_TRY(transfer(b, packed, count * sizeof *packed, send));
        if (!send)
            AR_TRY(move_boxes(f, values, packed, true));
    }
    return AR_OK;
}

static ar_status transfer_kept(ari_bytes *b, ari_comparator *c, bool send)
{
    size_t n = c->kept_count;
    AR_TRY(transfer(b, &n, sizeof n, send));
    if (n > ARI_SAVED_COPIES)
        return ar_error_set(AR_ERR_INTERNAL, "a process sent %zu copies of tensors, at most %d are kept", n,
                            ARI_SAVED_COPIES);
    for (size_t i = 0; i < n; i++) {
        ari_saved_tensor *k = &c->kept_copies[i];
        AR_TRY(transfer(b, &k->tensor, sizeof k->tensor, send));
        if (k->tensor >= c->reference->count)
            return ar_error_set(AR_ERR_INTERNAL, "a process sent a copy of tensor %zu of %zu", k->tensor,
                                c->reference->count);
        const size_t count = ari_finding_count(&c->finding[k->tensor]);
        if (!send) {
            AR_TRY(ARI_ALLOC(&k->local, count, "a copy of a tensor that differs"));
            c->kept_count = i + 1;
        }
        AR_TRY(transfer(b, k->local, count * sizeof *k->local, send));
    }
    return AR_OK;
}

static ar_status transfer_all(ari_bytes *b, ari_comparator *c, ari_run_tensors *run_values, bool send)
{
    AR_TRY(transfer(b, c->finding, c->reference->count * sizeof *c->finding, send));
    AR_TRY(transfer(b, c->unexpected, sizeof c->unexpected, send));
    AR_TRY(transfer_kept(b, c, send));
    return transfer_values(b, c, run_values, send);
}

typedef struct receiving {
    ari_comparator *ranks;
    ari_run_tensors *run_values;
} receiving;

static ar_status take_findings(void *user, int rank, ari_bytes *b)
{
    const receiving *r = user;
    if (rank == 0) /* process 0 has its own data already */
        return AR_OK;
    return transfer_all(b, &r->ranks[rank], r->run_values, false);
}

ar_status ari_comparators_collect(ar_process *p, ari_comparator *ranks, int n, ari_run_tensors *values)
{
    const int rank = ar_process_rank(p);
    receiving r = {ranks, values};
    ari_bytes payload = {.count = 0};
    ar_status st = AR_OK;
    if (rank > 0 && rank < n)
        st = transfer_all(&payload, &ranks[rank], values, true);
    st = ari_process_agree(p, st);
    if (st == AR_OK)
        st = ari_process_collect(p, &payload, take_findings, &r);
    ari_bytes_fini(&payload);
    return st;
}
