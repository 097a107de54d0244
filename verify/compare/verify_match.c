/* SPDX-License-Identifier: Apache-2.0 */
#include <fnmatch.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/axis.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "verify/compare/verify_impl.h"
#include "verify/read/dump.h"
#include "verify/read/dump_private.h"

/* Matching of tensors: which are compared, in which order, and by which rule. */

/* A name of either dump. */
typedef struct found {
    const char *name;
    ari_sides sides;
    bool lost;         /* true if only one dump has the gradient although both have the parameter */
    size_t dump_order; /* position in the dump's recorded execution order; SIZE_MAX: none */
    ari_order_key key;
} found;

/* --- globs -------------------------------------------------------------------------------------------------------- */

static bool glob_means(const char *glob, const char *name)
{
    static const char input_prefix[] = "input.", outputs[] = ":fwd";
    const bool of_outputs = strstr(glob, outputs) && strncmp(glob, input_prefix, sizeof input_prefix - 2) != 0;
    return fnmatch(glob, name, 0) == 0 && !(of_outputs && strncmp(name, input_prefix, sizeof input_prefix - 1) == 0);
}

bool ari_any_glob_means(const char *const *globs, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++) {
        if (glob_means(globs[i], name))
            return true;
    }
    return false;
}

static bool any_names(const char *const *globs, size_t n, const found *f)
{
    for (int s = 0; s < 2; s++) {
        if (f->sides.tensors[s] && ari_any_glob_means(globs, n, f->sides.tensors[s]->name))
            return true;
    }
    return false;
}

static bool is_selected(const ar_verify_options *o, const found *f)
{
    return (o->only_count == 0 || any_names(o->only, o->only_count, f)) && !any_names(o->leave, o->leave_count, f);
}

ar_status ari_glob_unmatched(const char *option, const char *glob, const char *const *names, size_t count)
{
    const char *near = ari_nearest(glob, names, count);
    if (!near && count > 0)
        near = names[0];
    return ar_error_set(AR_ERR_NOT_FOUND, "%s '%s' matches none of the %zu tensor%s; there is, for example, %s", option,
                        ARI_SHOW(glob), count, ARI_PLURAL(count), near ? ARI_SHOW(near) : "nothing");
}

static ar_status check_globs(const char *const *globs, size_t n, const char *option, const found *entries, size_t count)
{
    for (size_t g = 0; g < n; g++) {
        size_t i = 0;
        while (i < count && !any_names(&globs[g], 1, &entries[i]))
            i++;
        if (i < count)
            continue;
        const char **names = NULL;
        AR_TRY(ARI_ALLOC(&names, count, "names"));
        for (size_t k = 0; k < count; k++)
            names[k] = entries[k].name;
        const ar_status st = ari_glob_unmatched(option, globs[g], names, count);
        free(names);
        return st;
    }
    return AR_OK;
}

/* --- names of both ------------------------------------------------------------------------------------------------ */

static void add_found(found *entries, size_t *n, const ari_verifying *v, const ar_dump_tensor *a,
                      const ar_dump_tensor *b)
{
    const ar_dump_tensor *t = a ? a : b;
    entries[(*n)++] = (found){.name = t->name,
                              .sides = {.tensors = {a, b}},
                              .dump_order = SIZE_MAX,
                              .key = ari_order_of(t->name, ar_dump_path(v->dump[a ? 0 : 1]))};
}

/* Reports names that only one dump has, if all names should match: a mapping or a prefix is wrong. */
static ar_status check_all_matched(const found *entries, size_t n)
{
    const char *first_name[2] = {NULL, NULL};
    size_t alone[2] = {0, 0};
    for (size_t i = 0; i < n; i++) {
        const int side = entries[i].sides.tensors[0] ? 0 : 1;
        if (entries[i].sides.tensors[1 - side])
            continue;
        first_name[side] = alone[side]++ == 0 ? entries[i].name : first_name[side];
    }
    if (alone[0] + alone[1] == 0)
        return AR_OK;
    const int side = alone[0] > 0 ? 0 : 1;
    return ar_error_set(
        AR_ERR_NOT_FOUND,
        "not all matched: %zu tensors are only in the reference and %zu only in the other; the %s alone "
        "has %s",
        alone[0], alone[1], side == 0 ? "reference" : "other", ARI_SHOW(first_name[side]));
}

/* Joins the two lists, which are sorted by name. */
static size_t join_names(found *entries, const ari_verifying *v)
{
    const size_t na = ar_dump_count(v->dump[0]), nb = ar_dump_count(v->dump[1]);
    size_t i = 0, k = 0, n = 0;
    while (i < na || k < nb) {
        const ar_dump_tensor *a = i < na ? ar_dump_at(v->dump[0], i) : NULL;
        const ar_dump_tensor *b = k < nb ? ar_dump_at(v->dump[1], k) : NULL;
        const int order = !a ? 1 : !b ? -1 : strcmp(a->name, b->name);
        add_found(entries, &n, v, order <= 0 ? a : NULL, order >= 0 ? b : NULL);
        i += order <= 0;
        k += order >= 0;
    }
    return n;
}

/* Compares pass, step and stem, then the name to distinguish equal keys. */
static int by_meaning(const void *a, const void *b)
{
    const ari_order_key *x = &((const found *)a)->key, *y = &((const found *)b)->key;
    ARI_ASCENDING(x->pass, y->pass);
    ARI_ASCENDING(x->step, y->step);
    const int order = memcmp(x->name, y->name, x->stem < y->stem ? x->stem : y->stem);
    if (order)
        return order;
    return x->stem != y->stem ? (x->stem < y->stem ? -1 : 1) : strcmp(x->name, y->name);
}

static bool same_meaning(const found *a, const found *b)
{
    return a->key.pass == b->key.pass && a->key.pass != '?' && a->key.step == b->key.step &&
           a->key.stem == b->key.stem && memcmp(a->key.name, b->key.name, a->key.stem) == 0;
}

/* Pairs a tensor that has different names on the two sides, such as "x.weight" in a file of gradients and
 * "x.weight:grad" in a dump of ranks, unless a third name makes the pair ambiguous. The pair has the reference's name.
 * Returns the new number of entries. */
static size_t join_by_meaning(found *entries, size_t n)
{
    size_t kept_count = 0;
    qsort(entries, n, sizeof *entries, by_meaning);
    for (size_t i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && same_meaning(&entries[i], &entries[end]);)
            end++;
        found *a = &entries[i], *b = &entries[i + 1];
        if (end - i == 2 && !a->sides.tensors[1] != !b->sides.tensors[1] &&
            !a->sides.tensors[0] != !b->sides.tensors[0]) {
            found joined = a->sides.tensors[0] ? *a : *b;
            joined.sides.tensors[1] = a->sides.tensors[0] ? b->sides.tensors[1] : a->sides.tensors[1];
            entries[kept_count++] = joined;
            continue;
        }
        for (size_t k = i; k < end; k++)
            entries[kept_count++] = entries[k];
    }
    return kept_count;
}

ar_status ari_verify_name_by_meaning(ari_verifying *v)
{
    const size_t n = ar_dump_count(v->dump[1]);
    ARI_ENDED(ari_arena_free) ari_arena arena = {NULL};
    found *entries = NULL;
    const char **name = NULL;
    bool renamed = false;
    AR_TRY(ARI_TAKE(&entries, &arena, ar_dump_count(v->dump[0]) + n, "names of tensors"));
    AR_TRY(ARI_TAKE(&name, &arena, n, "names of tensors"));
    for (size_t i = 0; i < n; i++)
        name[i] = ar_dump_at(v->dump[1], i)->name;
    const size_t kept_count = join_by_meaning(entries, join_names(entries, v));
    for (size_t i = 0; i < kept_count; i++) {
        const ari_sides *s = &entries[i].sides;
        if (!s->tensors[0] || !s->tensors[1] || strcmp(s->tensors[0]->name, s->tensors[1]->name) == 0)
            continue;
        size_t place = 0;
        ARI_BISECT(place, n, k, strcmp(ar_dump_at(v->dump[1], k)->name, s->tensors[1]->name) < 0)
        name[place] = s->tensors[0]->name;
        renamed = true;
    }
    return renamed ? ari_dump_rename(v->dump[1], name) : AR_OK;
}

static bool is_in_both(const found *f)
{
    return f->sides.tensors[0] && f->sides.tensors[1];
}

static bool same_parameter(const ari_order_key *a, const ari_order_key *b)
{
    return a->stem == b->stem && memcmp(a->name, b->name, a->stem) == 0;
}

/* Finds parameters of both dumps that have a gradient in only one of them, in a step in which both dumps have
 * gradients. A zero gradient counts as none, because an expert without tokens has one. */
static ar_status find_lost_gradients(found *entries, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        found *f = &entries[i];
        bool has_gradients = false, has_parameter = false, zero = true;
        if (f->key.pass != 'g' || is_in_both(f))
            continue;
        for (size_t k = 0; k < n && !(has_gradients && has_parameter); k++) {
            const ari_order_key *key = &entries[k].key;
            if (!is_in_both(&entries[k]) || !key->pass || !strchr("ginw", key->pass))
                continue;
            has_gradients = has_gradients || (key->pass == 'g' && key->step == f->key.step);
            has_parameter = has_parameter || same_parameter(key, &f->key);
        }
        if (has_gradients && has_parameter)
            AR_TRY(ari_is_zero(&zero, f->sides.tensors[0] ? f->sides.tensors[0] : f->sides.tensors[1]));
        f->lost = !zero;
    }
    return AR_OK;
}

/* Returns true if the dump's ranks are pipeline stages. A rank knows only the order of its own stages; the order among
 * stages follows from names. */
static bool of_stages(const ar_dump *d)
{
    const ar_mesh *m = ar_dump_mesh(d);
    for (int i = 0; i < m->ndim; i++) {
        if (strcmp(m->dim[i].name, ari_layout_axes[ARI_LAYOUT_PP].name) == 0 && m->dim[i].size > 1)
            return true;
    }
    return false;
}

/* Takes the execution order from the first dump that states one. */
static void take_given_order(const ari_verifying *v, found *entries, size_t n)
{
    for (int s = 0; s < 2; s++) {
        bool tells = false;
        for (size_t i = 0; i < ar_dump_count(v->dump[s]) && !of_stages(v->dump[s]); i++)
            tells = tells || ar_dump_at(v->dump[s], i)->order != SIZE_MAX;
        for (size_t i = 0; tells && i < n; i++)
            entries[i].dump_order = entries[i].key.pass == 'k'    ? 0
                                    : entries[i].sides.tensors[s] ? entries[i].sides.tensors[s]->order
                                                                  : SIZE_MAX;
        if (tells)
            return;
    }
}

static int by_execution(const void *a, const void *b)
{
    const found *x = a, *y = b;
    ARI_ASCENDING(x->dump_order, y->dump_order);
    return ari_order_compare(&x->key, &y->key);
}

/* --- rows --------------------------------------------------------------------------------------------------------- */

/* Computes the shape that a row reports: complex numbers are pairs of F32 along a last dimension of 2. */
static int shape_of(size_t *shape, const ar_dump_tensor *t)
{
    memcpy(shape, t->shape, sizeof t->shape);
    if (t->dtype != AR_C64)
        return t->ndim;
    if (t->ndim < AR_ST_MAX_DIMS) {
        shape[t->ndim] = 2;
        return t->ndim + 1;
    }
    shape[t->ndim - 1] *= 2;
    return t->ndim;
}

static void describe_row(ar_verify_row *r, const ari_sides *s)
{
    const ar_dump_tensor *a = s->tensors[0] ? s->tensors[0] : s->tensors[1],
                         *b = s->tensors[1] ? s->tensors[1] : s->tensors[0];
    r->dtype = a->dtype;
    r->other_dtype = b->dtype;
    r->ndim = shape_of(r->shape, a);
    r->other_ndim = shape_of(r->other_shape, b);
    r->elements = a->count * (a->dtype == AR_C64 ? 2 : 1);
    r->map.matrix_cols = r->ndim > 0 ? r->shape[r->ndim - 1] : 1;
    r->map.matrix_rows = r->map.matrix_cols > 0 ? r->elements / r->map.matrix_cols : 0;
    r->ranks[0] = r->ranks[1] = -1;
    r->cosine = (double)NAN;
    r->state = !s->tensors[0] ? AR_VERIFY_UNEXPECTED : !s->tensors[1] ? AR_VERIFY_MISSING : AR_VERIFY_SAME;
}

static void decide_state(ar_verify_row *r, const ari_sides *s, ar_verify_rule rule)
{
    const ar_dump_tensor *a = s->tensors[0], *b = s->tensors[1];
    const bool by_bits = rule == AR_VERIFY_BITS || rule == AR_VERIFY_ULP;
    if (r->state != AR_VERIFY_SAME)
        return;
    if (!ari_same_shape(a, b))
        r->state = AR_VERIFY_SHAPE;
    else if (a->dtype != b->dtype && (by_bits || a->dtype == AR_C64 || b->dtype == AR_C64))
        r->state = AR_VERIFY_DTYPE; /* a complex number cannot be compared with a real number */
}

/* --- the rule of one tensor --------------------------------------------------------------------------------------- */

ar_status ari_allowance_read(double *allowed, const ar_dump *allowances, const char *path, const char *name,
                             const char *other_name)
{
    const ar_dump_tensor *t = ar_dump_find(allowances, name);
    if (!t)
        t = ar_dump_find(allowances, other_name);
    if (!t)
        return ar_error_set(AR_ERR_NOT_FOUND,
                            "%s: says nothing of %s; 'anyrank grads' with sensitivity writes an allowance for every "
                            "tensor it dumps (ignore leaves one out of the comparison)",
                            ARI_SHOW(path), ARI_SHOW(name));
    if (t->count != 1)
        return ar_error_set(AR_ERR_FORMAT, "%s: %s has %zu elements; an allowance is one number", ARI_SHOW(path),
                            ARI_SHOW(name), t->count);
    AR_TRY(ari_dump_read_f64(t, 0, 1, allowed));
    if (!(*allowed >= 0.0) || isinf(*allowed)) /* an infinite or NaN allowance would accept any difference, as for
                                                  --rtol and --atol */
        return ar_error_set(AR_ERR_DATA, "%s: %s is allowed to differ by %g; expected a finite number of 0 or more",
                            ARI_SHOW(path), ARI_SHOW(name), *allowed);
    return AR_OK;
}

static ar_status make_pair(ari_verifying *v, ar_verify_row *row, ari_sides *s)
{
    const ar_verify_options *o = v->o;
    ari_pair *p = &v->pair[v->pairs++];
    s->pair = p;
    *p = (ari_pair){.row = row, .rule = {o->rule, o->ulp, o->rtol, o->atol, o->nan_differs}};
    for (int k = 0; k < 2; k++) {
        p->side[k] = s->tensors[k];
        p->format[k] = ari_format_of(s->tensors[k]->dtype);
    }
    const bool has_bool = row->dtype == AR_BOOL || row->other_dtype == AR_BOOL;
    const bool has_integers = !p->format[0].is_float || !p->format[1].is_float;
    if (has_integers || o->rule == AR_VERIFY_SENSITIVITY)
        p->rule.rtol = p->rule.atol = 0.0; /* ids, indices and counts have no rounding, so no tolerance applies */
    p->rule.ulp = has_bool ? 0 : p->rule.ulp;
    if (!has_integers && o->rule == AR_VERIFY_SENSITIVITY)
        AR_TRY(ari_allowance_read(&p->rule.atol, v->allowed, o->allowed, s->tensors[0]->name, s->tensors[1]->name));
    p->numbers = row->elements;
    p->blocks = (p->numbers + ARI_SCAN_BLOCK - 1) / ARI_SCAN_BLOCK;
    ari_deviation_init(&p->tally);
    atomic_init(&p->unequal, row->dtype != row->other_dtype || o->nan_differs);
    return AR_OK;
}

/* Repeats a forward value that one side stores once for all samples, such as positions or a rotary table. */
static ar_status repeat_side(ari_verifying *v, ari_sides *s, char pass)
{
    int which = -1;
    if (pass != 'f' || !s->tensors[0] || !s->tensors[1] || ari_same_shape(s->tensors[0], s->tensors[1]))
        return AR_OK;
    AR_TRY(ari_verify_repeats(&which, s->tensors[0], s->tensors[1]));
    if (which < 0)
        return AR_OK;
    ari_repeated *repeated = NULL; /* the side with a dimension of extent 1, repeated to the other's shape */
    AR_TRY(ARI_TAKE(&repeated, &v->arena, 1, "pairs of tensors"));
    AR_TRY(ari_repeated_init(repeated, s->tensors[which], s->tensors[1 - which]->shape, &v->arena));
    s->tensors[which] = &repeated->tensor;
    return AR_OK;
}

/* Matches outputs and gradients of modules if one run has a product dimension where the other run has two dimensions,
 * for example heads and head size: [b, s, h d] with [b, s, h, d] or [b, h, s, d]. Parameters keep the shape that their
 * program gives them. */
static ar_status reshape_side(ari_verifying *v, ari_sides *s, const char *name, char pass)
{
    ar_verify_report *r = v->report;
    bool fits = false;
    if ((pass != 'f' && pass != 'b') || strncmp(name, "input.", 6) == 0 || !s->tensors[0] || !s->tensors[1] ||
        ari_same_shape(s->tensors[0], s->tensors[1]))
        return AR_OK;
    const ar_dump_tensor *originals[2] = {s->tensors[0], s->tensors[1]};
    const int fewer = originals[1]->ndim < originals[0]->ndim; /* the side whose dimensions are split, if its parts
                                                                  allow that */
    for (int i = 0; i < 2 && !fits; i++) {
        const int k = i == 0 ? fewer : 1 - fewer;
        ari_repeated *reshaped = NULL;
        AR_TRY(ARI_TAKE(&reshaped, &v->arena, 1, "pairs of tensors"));
        AR_TRY(ari_reshaped_init(&fits, reshaped, originals[k], originals[1 - k], &v->arena));
        s->tensors[k] = fits ? &reshaped->tensor : originals[k];
    }
    if (fits && r->reshaped++ == 0)
        snprintf(r->reshaped_first, sizeof r->reshaped_first, "%.140s, %s and %s", name,
                 ARI_SHOW_SHAPE(originals[0]->ndim, originals[0]->shape),
                 ARI_SHOW_SHAPE(originals[1]->ndim, originals[1]->shape));
    return AR_OK;
}

static ar_status make_rows(ari_verifying *v, const found *entries, size_t n)
{
    ar_verify_report *r = v->report;
    AR_TRY(ARI_ALLOC_ZERO(&r->row, n, "rows"));
    AR_TRY(ARI_TAKE(&v->sides, &v->arena, n, "rows"));
    AR_TRY(ARI_TAKE(&v->pair, &v->arena, n, "pairs of tensors"));
    for (size_t i = 0; i < n; i++) {
        ar_verify_row *row = &r->row[r->rows++];
        v->sides[i] = entries[i].sides;
        row->name = strdup(entries[i].name); /* the report outlives the dumps */
        if (!row->name)
            return ar_error_set(AR_ERR_MEMORY, "no memory for names of tensors");
        row->pass = entries[i].key.pass;
        row->step = entries[i].key.step;
        row->order = i;
        row->lost_gradient = entries[i].lost;
        r->lost_gradients += entries[i].lost;
        AR_TRY(repeat_side(v, &v->sides[i], row->pass));
        AR_TRY(reshape_side(v, &v->sides[i], row->name, row->pass));
        r->reordered += v->sides[i].tensors[0] && v->sides[i].tensors[1] && v->sides[i].tensors[1]->reordered;
        describe_row(row, &v->sides[i]);
        decide_state(row, &v->sides[i], v->o->rule);
        if (row->state == AR_VERIFY_SAME)
            AR_TRY(make_pair(v, row, &v->sides[i]));
    }
    return AR_OK;
}

/* Returns true for a model's inputs, its buffers and the number of steps. They are compared only if both dumps have
 * them: a layout may need more of them, and not every program writes them. */
bool ari_is_optional(const ari_order_key *key)
{
    return key->pass == 'u' || key->pass == 'k' || (key->pass == 'f' && strncmp(key->name, "input.", 6) == 0);
}

/* Returns true for such a tensor; the first one is reported. */
static bool is_ragged(const ari_verifying *v, const char *name)
{
    ar_verify_report *r = v->report;
    char text[160];
    if (!ari_dump_is_ragged(v->dump[0], name, text) && !ari_dump_is_ragged(v->dump[1], name, text))
        return false;
    if (r->ragged++ == 0)
        snprintf(r->ragged_first, sizeof r->ragged_first, "%.100s, %s", name, text);
    return true;
}

/* Returns true for a pipeline's run, whose outermost mesh dimension is the stages. */
static bool has_stages(const ar_dump *d)
{
    const char *name = ari_layout_axes[ARI_LAYOUT_PP].name;
    const ar_mesh *m = ar_dump_mesh(d);
    return m && m->ndim > 0 && m->dim[0].size > 1 && strncmp(m->dim[0].name, name, strlen(name)) == 0;
}

/* Returns true for a repeated call of a module that only one dump has, if the other dump is a pipeline's without a
 * first call in a single tensor: several stages call the module, and each counts only its calls. */
static bool is_uncounted_call(const ari_verifying *v, const found *f)
{
    char first_call[200], why[160];
    const ar_dump *peer_dump = v->dump[f->sides.tensors[0] ? 1 : 0];
    const char *call = strstr(f->name, ".call"), *number = call ? call + strlen(".call") : NULL;
    const size_t digits = number ? strspn(number, "0123456789") : 0;
    if (digits == 0 || number[digits] != ':' || is_in_both(f))
        return false;
    snprintf(first_call, sizeof first_call, "%.*s%s", (int)(call - f->name), f->name, number + digits);
    return has_stages(peer_dump) && ari_dump_is_ragged(peer_dump, first_call, why) && is_ragged(v, first_call);
}

/* Returns true if the model gets equally many tokens in a batch of another shape, for example because each rank packs
 * its samples into one row. Activations of that step then have other shapes and no corresponding elements. */
static bool is_repacked(const found *entries, size_t n, const found *f, const ari_sides **input_sides)
{
    const ari_sides *s = &f->sides;
    if (!s->tensors[0] || !s->tensors[1] || !strchr("fb", f->key.pass) || ari_same_shape(s->tensors[0], s->tensors[1]))
        return false;
    for (size_t i = 0; i < n; i++) {
        *input_sides = &entries[i].sides;
        if (entries[i].key.step == f->key.step && strncmp(entries[i].name, "input.", 6) == 0 &&
            (*input_sides)->tensors[0] && (*input_sides)->tensors[1] &&
            (*input_sides)->tensors[0]->count == (*input_sides)->tensors[1]->count &&
            !ari_same_shape((*input_sides)->tensors[0], (*input_sides)->tensors[1]))
            return true;
    }
    return false;
}

/* Takes such activations out of the list, and reports the first. */
static size_t drop_repacked(ar_verify_report *r, found *entries, size_t n, ari_arena *arena, ar_status *st)
{
    bool *drop = NULL;
    size_t kept_count = 0;
    *st = ARI_TAKE(&drop, arena, n, "names of tensors");
    for (size_t i = 0; i < n && *st == AR_OK; i++) {
        const ari_sides *input_sides = NULL;
        drop[i] = is_repacked(entries, n, &entries[i], &input_sides);
        if (drop[i] && r->ragged++ == 0)
            snprintf(r->ragged_first, sizeof r->ragged_first,
                     "%.100s, as many tokens are given in another shape: %s, %s", entries[i].name,
                     ARI_SHOW_SHAPE(input_sides->tensors[0]->ndim, input_sides->tensors[0]->shape),
                     ARI_SHOW_SHAPE(input_sides->tensors[1]->ndim, input_sides->tensors[1]->shape));
    }
    for (size_t i = 0; i < n && *st == AR_OK; i++) {
        if (!drop[i])
            entries[kept_count++] = entries[i];
    }
    return kept_count;
}

/* Names that are ragged in both dumps are no tensor of either. */
static void count_ragged(const ari_verifying *v)
{
    const ar_verify_options *o = v->o;
    const ar_dump *d = v->dump[0];
    char text[160];
    for (size_t i = 0; i < d->raggeds; i++) {
        const char *name = d->ragged[i].name;
        if (ari_dump_is_ragged(v->dump[1], name, text) && !ari_any_glob_means(o->leave, o->leave_count, name) &&
            (o->only_count == 0 || ari_any_glob_means(o->only, o->only_count, name)))
            (void)is_ragged(v, name);
    }
}

static long micro_batches_of(const ar_dump *d)
{
    const char *text = ar_dump_metadata(d, "micro_batches");
    return text ? strtol(text, NULL, 10) : 1;
}

/* Returns true if each file has the whole tensor. */
static bool has_whole_parts(const ar_dump_tensor *t)
{
    for (size_t i = 0; i < t->parts; i++) {
        if (t->part[i].boxes != 1 || memcmp(t->part[i].box->extent, t->shape, (size_t)t->ndim * sizeof *t->shape) != 0)
            return false;
    }
    return true;
}

/* Returns true for rows within an expert. They are the tokens that the router sends to it, sorted by expert. Each rank
 * and micro-batch has the rows of its own samples, and neither dump says which rows of a larger batch these are. The
 * experts' output has a row for each token and is compared. */
static bool is_routed(const ari_verifying *v, const found *f)
{
    const ar_dump_tensor *a = f->sides.tensors[0], *b = f->sides.tensors[1];
    const char *experts = strstr(f->name, "experts.");
    const bool is_expert =
        experts && (experts == f->name || experts[-1] == '.') && f->key.pass && strchr("fb", f->key.pass);
    if (!is_expert || !a || !b || a->ndim < 2 || a->ndim != b->ndim || a->shape[0] == b->shape[0])
        return false;
    const int fewer = a->shape[0] > b->shape[0]; /* the side with fewer rows */
    const bool of_ranks = f->sides.tensors[fewer]->parts > 1;
    const bool of_micro_batches = micro_batches_of(v->dump[fewer]) > micro_batches_of(v->dump[1 - fewer]);
    return (of_ranks || of_micro_batches) && has_whole_parts(f->sides.tensors[fewer]) &&
           memcmp(a->shape + 1, b->shape + 1, (size_t)(a->ndim - 1) * sizeof *a->shape) == 0;
}

static ar_status select_rows(ari_verifying *v, found *entries)
{
    const ar_verify_options *o = v->o;
    const size_t n = join_by_meaning(entries, join_names(entries, v));
    size_t kept_count = 0;
    long layers = LONG_MAX;
    AR_TRY(check_globs(o->only, o->only_count, "only", entries, n));
    AR_TRY(check_globs(o->leave, o->leave_count, "ignore", entries, n));
    AR_TRY(find_lost_gradients(entries, n));
    take_given_order(v, entries, n);
    count_ragged(v);
    for (size_t i = 0; i < n; i++)
        layers = ari_order_layers(&entries[i].key, layers);
    for (size_t i = 0; i < n; i++)
        ari_order_further(&entries[i].key, layers);
    for (size_t i = 0; i < n; i++) {
        if (!is_selected(o, &entries[i]))
            continue;
        if (is_ragged(v, entries[i].name) || is_uncounted_call(v, &entries[i]))
            continue;
        if (is_routed(v, &entries[i])) {
            v->report->routed++;
            continue;
        }
        if (is_in_both(&entries[i]) || entries[i].lost || !(o->common || ari_is_optional(&entries[i].key)))
            entries[kept_count++] = entries[i];
        else
            v->report->left_out[entries[i].sides.tensors[0] ? 0 : 1]++;
    }
    ar_status st;
    kept_count = drop_repacked(v->report, entries, kept_count, &v->arena, &st);
    AR_TRY(st);
    if (o->all_matched)
        AR_TRY(check_all_matched(entries, kept_count));
    const size_t *left_out = v->report->left_out;
    if (kept_count == 0 && left_out[0] + left_out[1] > 0)
        return ar_error_set(AR_ERR_NOT_FOUND,
                            "no tensor stands in both dumps: %zu only in the reference, %zu only in the other; "
                            "give a map that says which is which",
                            left_out[0], left_out[1]);
    if (kept_count == 0)
        return ar_error_set(AR_ERR_NOT_FOUND, "only and ignore leave none of the %zu tensors to compare", n);
    qsort(entries, kept_count, sizeof *entries, by_execution);
    return make_rows(v, entries, kept_count);
}

ar_status ari_verify_match(ari_verifying *v)
{
    found *entries = NULL;
    size_t max_entries = 0;
    for (int s = 0; s < 2; s++) {
        if (ar_dump_count(v->dump[s]) == 0)
            return ar_error_set(AR_ERR_NOT_FOUND, "%s: holds no tensors: there is nothing to compare",
                                ARI_SHOW(ar_dump_path(v->dump[s])));
    }
    AR_TRY(ari_add_size(&max_entries, ar_dump_count(v->dump[0]), ar_dump_count(v->dump[1])));
    AR_TRY(ARI_TAKE(&entries, &v->arena, max_entries, "names of tensors"));
    return select_rows(v, entries);
}

/* Puts a gradient that only one dump has first, unless some difference of the same step precedes it. The gradient's
 * position in the execution order is known only if the dump that states the order has it. */
void ari_verify_begin_with_lost(ar_verify_report *r)
{
    const ar_verify_row *first_row = &r->row[r->first];
    for (size_t i = 0; i < r->rows; i++) {
        const ar_verify_row *row = &r->row[i];
        const bool follows = ari_is_one_sided(first_row) || i < r->first || row->step < first_row->step ||
                             (row->step == first_row->step && first_row->pass && strchr("cnmv", first_row->pass));
        if (row->lost_gradient && follows) {
            r->first = i;
            return;
        }
    }
}
