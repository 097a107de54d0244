/* SPDX-License-Identifier: Apache-2.0 */
/* Compares the sketches of two runs: finds the tensors and steps that both have, and judges each pair. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/io/file.h"
#include "verify/compare/verify_impl.h"
#include "verify/read/dump_private.h"
#include "verify/sketches/proof.h"
#include "verify/sketches/sketches.h"

ARI_OWNER(ar_dump, ar_dump_close)

ar_status ari_is_sketched(bool *is_sketched, const char *folder)
{
    *is_sketched = false;
    return ari_is_folder(folder) ? ari_file_is_in(is_sketched, folder, "rank-00000.sketch") : AR_OK;
}

/* --- the tensors of a run ----------------------------------------------------------------------------------------- */

typedef struct listing {
    ari_sketched *tensor; /* [count] tensors, sorted by name */
    size_t count;
} listing;

typedef struct comparison {
    ari_sketch_report *report;
    const ar_verify_options *options;
    ar_dump *allowances; /* the allowances; NULL: the rule has none */
    double roundoff;     /* roundoff of the shortest float format in the runs, or of the format for which the
                            allowances were measured */
    listing side[2];
    int step;                /* the step whose largest gradient is known; 0: none */
    double largest_gradient; /* root mean square of that gradient, in the reference */
    int step_before;         /* the preceding step that both runs have; 0: none */
} comparison;

static int by_name(const void *a, const void *b)
{
    return strcmp(((const ari_sketched *)a)->name, ((const ari_sketched *)b)->name);
}

static ari_sketched *find(const listing *l, const char *name)
{
    const ari_sketched key = {.name = name};
    return l->count > 0 ? bsearch(&key, l->tensor, l->count, sizeof key, by_name) : NULL;
}

static ari_sketched of_run(const ar_sketch_tensor *t, size_t order)
{
    return (ari_sketched){.name = t->name,
                          .step = t->step,
                          .order = order,
                          .key = ari_order_of(t->name, NULL),
                          .sketch = &t->sketch,
                          .unjudged = t->by_run ? "" : t->left_out,
                          .left_out = t->by_run ? t->left_out : "",
                          .incomplete = t->incomplete,
                          .copies = t->differing_copies,
                          .differing_parts = t->differing_parts,
                          .differing = t->differing,
                          .tiny = t->tiny,
                          .samples = {t->samples[0], t->samples[1]}};
}

static ari_sketched of_dump(const ar_dump_tensor *t, const char *path)
{
    const ari_order_key key = ari_order_of(t->name, path);
    return (ari_sketched){.name = t->name,
                          .step = key.step,
                          .order = t->order,
                          .key = key,
                          .dumped = t,
                          .unjudged = "",
                          .left_out = "",
                          .differing = -1};
}

static ar_status side_open(comparison *c, int k, const char *path, const char *map)
{
    ari_sketch_report *r = c->report;
    listing *l = &c->side[k];
    bool sketched = false;
    AR_TRY(ari_is_sketched(&sketched, path));
    if (sketched)
        AR_TRY(ar_sketch_run_open(&r->run[k], path));
    else
        AR_TRY(ar_dump_open(&r->dump[k], path, &(ar_dump_options){.map = map}));
    l->count = sketched ? ar_sketch_run_count(r->run[k]) : ar_dump_count(r->dump[k]);
    if (l->count == 0)
        return ar_error_set(AR_ERR_NOT_FOUND, "%s: holds no tensors: there is nothing to compare", ARI_SHOW(path));
    AR_TRY(ARI_TAKE(&l->tensor, &r->arena, l->count, "names of tensors"));
    for (size_t i = 0; i < l->count; i++) {
        l->tensor[i] =
            sketched ? of_run(ar_sketch_run_tensor(r->run[k], i), i) : of_dump(ar_dump_at(r->dump[k], i), path);
        const ar_dtype t = sketched ? l->tensor[i].sketch->dtype : l->tensor[i].dumped->dtype;
        c->roundoff = fmax(c->roundoff, ari_roundoff_of(t));
    }
    return AR_OK;
}

/* Drops the last steps of a run that some ranks have not recorded, as happens when a run is killed. */
static ar_status drop_incomplete(comparison *c, int k, const char *path)
{
    listing *l = &c->side[k];
    ari_step_list *dropped = &c->report->incomplete[k];
    size_t complete_count = l->count;
    while (complete_count > 0 && l->tensor[complete_count - 1].incomplete)
        complete_count--;
    AR_TRY(ARI_TAKE(&dropped->step, &c->report->arena, l->count - complete_count, "steps"));
    for (size_t i = complete_count; i < l->count; i++) {
        if (dropped->count == 0 || dropped->step[dropped->count - 1] != l->tensor[i].step)
            dropped->step[dropped->count++] = l->tensor[i].step;
    }
    l->count = complete_count;
    if (complete_count > 0)
        return AR_OK;
    return ar_error_set(AR_ERR_NOT_FOUND, "%s: no step has a record of all %d ranks: there is nothing to compare",
                        ARI_SHOW(path), ar_sketch_run_ranks(c->report->run[k]));
}

/* Renames the other run's tensors to the reference's names if the names differ only by wrappers. */
static ar_status unwrap(comparison *c)
{
    ari_names names[2];
    ari_unwrapped unwrapped;
    for (int k = 0; k < 2; k++) {
        const char **name = NULL;
        AR_TRY(ARI_TAKE(&name, &c->report->arena, c->side[k].count, "names of tensors"));
        for (size_t i = 0; i < c->side[k].count; i++)
            name[i] = c->side[k].tensor[i].name;
        names[k] = (ari_names){name, c->side[k].count};
    }
    AR_TRY(ari_names_unwrap(&unwrapped, names, &c->report->arena));
    for (size_t i = 0; unwrapped.name != NULL && i < names[1].count; i++) {
        ari_sketched *t = &c->side[1].tensor[i];
        t->key = ari_order_of(unwrapped.name[i], t->dumped != NULL ? c->options->other : NULL);
        t->name = unwrapped.name[i];
    }
    c->report->renamed = unwrapped.renamed;
    memcpy(c->report->wrappers, unwrapped.wrappers, sizeof unwrapped.wrappers);
    for (int k = 0; k < 2; k++)
        qsort(c->side[k].tensor, c->side[k].count, sizeof *c->side[k].tensor, by_name);
    return AR_OK;
}

/* --- steps -------------------------------------------------------------------------------------------------------- */

static int ascending(const void *a, const void *b)
{
    const int x = *(const int *)a, y = *(const int *)b;
    return (x > y) - (x < y);
}

static ar_status steps_of(ari_step_list *s, const listing *l, ari_arena *arena)
{
    AR_TRY(ARI_TAKE(&s->step, arena, l->count, "steps"));
    for (size_t i = 0; i < l->count; i++)
        s->step[i] = l->tensor[i].step;
    qsort(s->step, l->count, sizeof *s->step, ascending);
    s->count = 0;
    for (size_t i = 0; i < l->count; i++) {
        if (s->count == 0 || s->step[s->count - 1] != s->step[i])
            s->step[s->count++] = s->step[i];
    }
    return AR_OK;
}

static bool has_step(const ari_step_list *s, int step)
{
    return s->count > 0 && bsearch(&step, s->step, s->count, sizeof step, ascending) != NULL;
}

static ar_status compare_steps(ari_step_list *step_lists, const comparison *c)
{
    ari_sketch_report *r = c->report;
    for (int k = 0; k < 2; k++) {
        AR_TRY(steps_of(&step_lists[k], &c->side[k], &r->arena));
        AR_TRY(ARI_TAKE(&r->alone[k].step, &r->arena, step_lists[k].count, "steps"));
    }
    for (int k = 0; k < 2; k++) {
        for (size_t i = 0; i < step_lists[k].count; i++) {
            if (has_step(&r->incomplete[1 - k], step_lists[k].step[i]))
                continue;
            if (!has_step(&step_lists[1 - k], step_lists[k].step[i]))
                r->alone[k].step[r->alone[k].count++] = step_lists[k].step[i];
            else
                r->common_steps += k == 0;
        }
    }
    if (r->common_steps == 0)
        return ar_error_set(AR_ERR_NOT_FOUND,
                            "the runs have no step in common: the reference has %d to %d, the other run %d to %d",
                            step_lists[0].step[0], step_lists[0].step[step_lists[0].count - 1], step_lists[1].step[0],
                            step_lists[1].step[step_lists[1].count - 1]);
    return AR_OK;
}

/* --- rows --------------------------------------------------------------------------------------------------------- */

static bool is_selected(const ar_verify_options *o, const char *name)
{
    return (o->only_count == 0 || ari_any_glob_means(o->only, o->only_count, name)) &&
           !ari_any_glob_means(o->leave, o->leave_count, name);
}

/* A glob that matches nothing is a slip of the pen. */
static ar_status check_globs(const ari_sketch_report *r, const char *const *globs, size_t n, const char *option)
{
    for (size_t g = 0; g < n; g++) {
        bool matches = false;
        for (size_t i = 0; i < r->rows && !matches; i++)
            matches = ari_any_glob_means(&globs[g], 1, r->row[i].name);
        if (matches)
            continue;
        const char **names = NULL;
        AR_TRY(ARI_ALLOC(&names, r->rows, "names"));
        for (size_t i = 0; i < r->rows; i++)
            names[i] = r->row[i].name;
        const ar_status st = ari_glob_unmatched(option, globs[g], names, r->rows);
        free(names);
        return st;
    }
    return AR_OK;
}

static void row_add(ari_sketch_report *r, ari_sketched *a, ari_sketched *b)
{
    const ari_sketched *t = a != NULL ? a : b;
    r->row[r->rows++] = (ari_sketch_row){
        .name = t->name, .step = t->step, .key = t->key, .unjudged = "", .differing = -1, .side = {a, b}};
}

/* Adds a row for each name that at least one run has in a common step. */
static ar_status join(const comparison *c, const ari_step_list *steps)
{
    ari_sketch_report *r = c->report;
    const listing *const l[2] = {&c->side[0], &c->side[1]};
    AR_TRY(ARI_TAKE(&r->row, &r->arena, l[0]->count + l[1]->count, "rows"));
    for (size_t i = 0, k = 0; i < l[0]->count || k < l[1]->count;) {
        ari_sketched *a = i < l[0]->count ? &l[0]->tensor[i] : NULL;
        ari_sketched *b = k < l[1]->count ? &l[1]->tensor[k] : NULL;
        const int order = a == NULL ? 1 : b == NULL ? -1 : strcmp(a->name, b->name);
        const int step = order <= 0 ? a->step : b->step;
        const bool is_count = (order <= 0 ? a : b)->key.pass == 'k'; /* a counter of steps, which sketches do not
                                                                        have */
        if (!is_count && has_step(&steps[0], step) && has_step(&steps[1], step))
            row_add(r, order <= 0 ? a : NULL, order >= 0 ? b : NULL);
        i += order <= 0;
        k += order >= 0;
    }
    return AR_OK;
}

/* Compares by step, then by the reference's recorded order, or by the other run's order if the reference is a dump
 * without order. Rows that only the other run has come last. */
static int by_execution(const void *a, const void *b)
{
    const ari_sketch_row *const row[2] = {a, b};
    size_t order[2];
    for (int i = 0; i < 2; i++) {
        const ari_sketched *reference = row[i]->side[0], *candidate = row[i]->side[1];
        const bool captured = candidate != NULL && candidate->dumped == NULL;
        order[i] = reference != NULL && reference->dumped == NULL ? reference->order
                   : reference != NULL && captured                ? candidate->order
                   : reference != NULL                            ? SIZE_MAX - 1
                                                                  : SIZE_MAX;
    }
    ARI_ASCENDING(row[0]->step, row[1]->step);
    ARI_ASCENDING(order[0], order[1]);
    return ari_order_compare(&row[0]->key, &row[1]->key);
}

static bool is_parameter_of(const ari_order_key *gradient, const ari_order_key *key)
{
    return key->pass != '\0' && strchr("ginw", key->pass) != NULL && key->stem == gradient->stem &&
           memcmp(key->name, gradient->name, key->stem) == 0;
}

/* The sketch of a side, made if the run is a dump. */
static ar_status sketch_side(ari_sketch_report *r, ari_sketched *t)
{
    if (t == NULL || t->dumped == NULL || t->sketch != NULL || t->unjudged[0] != '\0')
        return AR_OK;
    return ari_dump_sketch(t, r, t->dumped);
}

/* Marks gradients that only one run has as lost, if both runs have the parameter and some gradients in the step. An
 * all-zero gradient counts as missing. */
static ar_status find_lost_gradients(ari_sketch_report *r)
{
    for (size_t i = 0; i < r->rows; i++) {
        ari_sketch_row *row = &r->row[i];
        ari_sketched *t = row->side[0] != NULL ? row->side[0] : row->side[1];
        bool has_peers = false, has_parameter = false;
        if (row->key.pass != 'g' || (row->side[0] != NULL && row->side[1] != NULL))
            continue;
        for (size_t k = 0; k < r->rows && !(has_peers && has_parameter); k++) {
            const ari_sketch_row *shared_row = &r->row[k];
            if (shared_row->side[0] == NULL || shared_row->side[1] == NULL)
                continue;
            has_peers = has_peers || (shared_row->key.pass == 'g' && shared_row->step == row->step);
            has_parameter = has_parameter || is_parameter_of(&row->key, &shared_row->key);
        }
        if (!has_peers || !has_parameter)
            continue;
        AR_TRY(sketch_side(r, t));
        row->lost_gradient = t->sketch != NULL && (t->sketch->max_abs > 0.0 || t->sketch->nan + t->sketch->inf > 0);
    }
    return AR_OK;
}

/* Selects the rows that the options ask for, in execution order. */
static ar_status select_rows(const comparison *c)
{
    const ar_verify_options *o = c->options;
    ari_sketch_report *r = c->report;
    const size_t total_rows = r->rows;
    AR_TRY(check_globs(r, o->only, o->only_count, "only"));
    AR_TRY(check_globs(r, o->leave, o->leave_count, "ignore"));
    AR_TRY(find_lost_gradients(r));
    size_t kept_rows = 0;
    for (size_t i = 0; i < total_rows; i++) {
        const ari_sketch_row *row = &r->row[i];
        const bool is_shared = row->side[0] != NULL && row->side[1] != NULL;
        if (!is_selected(o, row->name))
            continue;
        if (is_shared || row->lost_gradient || !(o->common || ari_is_optional(&row->key)))
            r->row[kept_rows++] = *row;
        else
            r->skipped[row->side[0] != NULL ? 0 : 1]++;
    }
    r->rows = kept_rows;
    if (kept_rows == 0 && r->skipped[0] + r->skipped[1] > 0)
        return ar_error_set(AR_ERR_NOT_FOUND,
                            "no tensor stands in both runs: %zu only in the reference, %zu only in the other",
                            r->skipped[0], r->skipped[1]);
    if (kept_rows == 0)
        return ar_error_set(AR_ERR_NOT_FOUND, "only and ignore leave none of the %zu tensors to compare", total_rows);
    qsort(r->row, kept_rows, sizeof *r->row, by_execution);
    return AR_OK;
}

/* --- a row -------------------------------------------------------------------------------------------------------- */

/* Returns the row for the same parameter with this kind and step if its values were compared, otherwise NULL. */
static const ari_sketch_row *row_of(const comparison *c, const ari_sketch_row *row, const char *kind, int step)
{
    char name[512];
    const int stem = (int)row->key.stem;
    const int n = step > 1 ? snprintf(name, sizeof name, "%.*s:%s@%d", stem, row->name, kind, step)
                           : snprintf(name, sizeof name, "%.*s:%s", stem, row->name, kind);
    const ari_sketched *t = n > 0 && (size_t)n < sizeof name ? find(&c->side[0], name) : NULL;
    const ari_sketch_row *found = t != NULL ? t->row : NULL;
    const bool compared = found != NULL && found->side[1] != NULL && !found->left_out && found->unjudged[0] == '\0' &&
                          found->state != AR_VERIFY_SHAPE;
    return compared ? found : NULL;
}

/* Returns the root mean square of the largest gradient so far in the row's step. */
static double largest_gradient(const ari_sketch_report *r, const ari_sketch_row *row)
{
    double largest = 0.0;
    for (const ari_sketch_row *g = row; g-- > r->row && g->step == row->step;) {
        if (g->key.pass == 'g' && g->side[0] != NULL && g->side[1] != NULL && g->d.norm_a > 0.0 &&
            isfinite(g->d.norm_a))
            largest = fmax(largest, g->d.norm_a / sqrt((double)g->side[0]->sketch->elements));
    }
    return largest;
}

/* Collects the update that produced a row of new weights. Returns false if some tensor of the update was not compared
 * or differs. */
static bool update_of(ari_sketch_update *u, comparison *c, const ari_sketch_row *row)
{
    const ari_sketch_row *gradient = row_of(c, row, "grad", row->step);
    const ari_sketch_row *before = row->step > 1 ? row_of(c, row, "new", row->step - 1) : row_of(c, row, "init", 1);
    if (gradient == NULL || before == NULL || gradient->state != AR_VERIFY_SAME)
        return false;
    if (c->step != row->step) {
        c->step = row->step;
        c->largest_gradient = largest_gradient(c->report, row);
    }
    *u = (ari_sketch_update){
        .gradient = gradient->side[0]->sketch, .gradients = &gradient->d, .largest_gradient = c->largest_gradient};
    for (int k = 0; k < 2; k++) {
        u->before[k] = before->side[k]->sketch;
        u->after[k] = row->side[k]->sketch;
        u->tiny = gradient->side[k]->tiny > u->tiny ? gradient->side[k]->tiny : u->tiny;
    }
    return true;
}

/* Adds the differences that an earlier step excuses in a weight: those of the last previous step that both runs
 * have. */
static void add_earlier(ari_sketch_row *row, const comparison *c)
{
    const ari_sketch_row *earlier = c->step_before > 0 ? row_of(c, row, "new", c->step_before) : NULL;
    if (earlier == NULL)
        return;
    row->allowed.excused = earlier->allowed.excused;
    row->allowed.excused_blocks = earlier->allowed.excused_blocks;
}

static ar_status set_allowance(ari_sketch_row *row, const comparison *c)
{
    const ar_verify_options *o = c->options;
    const bool listed = o->rule == AR_VERIFY_SENSITIVITY;
    row->allowed = (ari_sketch_allowance){.atol = o->atol, .rtol = listed ? 0.0 : o->rtol, .roundoff = c->roundoff};
    if (!listed || ari_is_exact(row->side[0]->sketch, row->side[1]->sketch))
        return AR_OK; /* integers are exact under every rule */
    return ari_allowance_read(&row->allowed.atol, c->allowances, o->allowed, row->name, row->name);
}

/* Judges copies of a part that differ by more than the rule allows; the other run's copies if it has such copies. */
static ar_status judge_copies(ari_sketch_row *row, const comparison *c, const ari_sketched *t)
{
    for (size_t i = 0; i < t->differing_parts; i++) {
        const ar_sketch_copies *copies = &t->copies[i];
        ari_sketch_allowance allowed = {.atol = row->allowed.atol, .rtol = row->allowed.rtol};
        ar_sketch_difference d;
        const char *why = "";
        bool differ = true;
        AR_TRY(ar_sketch_compare(&d, &copies->original, &copies->copy));
        if (c->options->rule != AR_VERIFY_BITS)
            ari_sketch_judge(&differ, &why, &allowed, &copies->original, &copies->copy, &d);
        if (!differ && why[0] == '\0') /* differing bits are a difference even if their size is unknown */
            continue;
        row->copies = copies;
        row->copies_d = d;
        row->differing = copies->rank;
        return AR_OK;
    }
    return AR_OK;
}

static ar_status judge_bits(ari_sketch_row *row, const ar_sketch *a, const ar_sketch *b)
{
    if (a->summed || b->summed)
        row->unjudged = "it is a sum over ranks, whose bits a sketch does not have";
    else if (a->dtype != b->dtype)
        row->state = AR_VERIFY_DTYPE;
    else if (!row->d.same_bits)
        row->state = AR_VERIFY_DIFFERENT;
    return AR_OK;
}

static ar_status judge_values(ari_sketch_row *row, comparison *c, const ar_sketch *a, const ar_sketch *b)
{
    ari_sketch_update update;
    bool differ = false;
    const bool is_update = row->key.pass == 'n' && update_of(&update, c, row);
    if (row->key.pass == 'n')
        add_earlier(row, c);
    if (is_update && !row->d.same_bits)
        AR_TRY(ari_sketch_excuse(&row->allowed, &update));
    ari_sketch_judge(&differ, &row->unjudged, &row->allowed, a, b, &row->d);
    if (!differ && row->key.pass != '\0' && strchr("fbgmv", row->key.pass) != NULL)
        differ = ari_sketch_factor_differs(&row->allowed, a, &row->d);
    if (!differ && is_update && !row->d.same_bits && row->allowed.excused > 0.0)
        differ = ari_sketch_update_is_lost(&row->allowed, &update);
    row->state = differ ? AR_VERIFY_DIFFERENT : AR_VERIFY_SAME;
    return AR_OK;
}

/* Returns true if two shapes have the same elements in the same order: adjacent dimensions of one are merged in the
 * other. */
static bool merge_into_each_other(const ar_sketch *a, const ar_sketch *b)
{
    int i = 0, k = 0;
    while (i < a->ndim && k < b->ndim) {
        size_t x = a->shape[i++], y = b->shape[k++];
        const bool first_is_larger = x > y;
        while (x > y && k < b->ndim && first_is_larger)
            y *= b->shape[k++];
        while (y > x && i < a->ndim && !first_is_larger)
            x *= a->shape[i++];
        if (x != y)
            return false;
    }
    return i == a->ndim && k == b->ndim;
}

/* Reshapes the other run's sketch if the reference has two dimensions where the other run has their product. Rows of
 * different lengths have no common digests. The sketch is borrowed and must not be freed. */
static bool reshape(ar_sketch *out, const ari_sketch_row *row)
{
    const ar_sketch *a = row->side[0]->sketch, *b = row->side[1]->sketch;
    *out = *b;
    const bool equal = a->ndim == b->ndim && memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0;
    if (equal || (row->key.pass != 'f' && row->key.pass != 'b') || !merge_into_each_other(a, b))
        return equal;
    out->ndim = a->ndim;
    memcpy(out->shape, a->shape, sizeof a->shape);
    out->rows = a->row == b->row ? b->rows : 0;
    return true;
}

/* Judges a tensor that both runs have; b is in a's shape. */
static ar_status judge_pair(ari_sketch_row *row, comparison *c, const ar_sketch *b)
{
    const ar_sketch *a = row->side[0]->sketch;
    AR_TRY(ar_sketch_compare(&row->d, a, b));
    row->first_element = row->d.block * a->block;
    row->elements = a->elements - row->first_element < a->block ? a->elements - row->first_element : a->block;
    AR_TRY(set_allowance(row, c));
    for (int k = 0; k < 2; k++)
        AR_TRY(judge_copies(row, c, row->side[k]));
    AR_TRY(c->options->rule == AR_VERIFY_BITS ? judge_bits(row, a, b) : judge_values(row, c, a, b));
    if (row->copies != NULL)
        row->state = AR_VERIFY_REPLICAS;
    return AR_OK;
}

/* Returns true if an activation's rows are samples that the two runs have in a different order. */
static bool is_reordered(const ari_sketch_row *row)
{
    const ari_sketched *a = row->side[0], *b = row->side[1];
    return (row->key.pass == 'f' || row->key.pass == 'b') && a->sketch != NULL && a->sketch->ndim > 0 &&
           a->samples[0] != b->samples[0] && a->samples[1] == b->samples[1] && a->samples[1] != 0;
}

/* Returns true if this dump leaves out a tensor of the other side because its ranks have different lengths of it. */
static bool is_left_out_of(const ar_dump *d, const char *name)
{
    char why[160];
    return d != NULL && ari_dump_is_ragged(d, name, why);
}

static ar_status judge_row(ari_sketch_row *row, comparison *c)
{
    const ari_sketched *a = row->side[0], *b = row->side[1];
    ar_sketch reshaped;
    for (int k = 0; k < 2; k++) {
        ari_sketched *t = row->side[k];
        AR_TRY(sketch_side(c->report, t));
        row->left_out = row->left_out || (t == NULL && is_left_out_of(c->report->dump[k], row->name));
        if (t == NULL)
            continue;
        row->differing = t->differing >= 0 ? t->differing : row->differing;
        row->left_out = row->left_out || t->left_out[0] != '\0';
        row->unjudged = row->unjudged[0] != '\0' ? row->unjudged : t->unjudged;
    }
    row->reordered = a != NULL && b != NULL && is_reordered(row);
    row->left_out = row->left_out || row->reordered;
    if (row->left_out || row->unjudged[0] != '\0')
        return AR_OK;
    if (a == NULL || b == NULL)
        row->state = a != NULL ? AR_VERIFY_MISSING : AR_VERIFY_UNEXPECTED;
    else if (!reshape(&reshaped, row))
        row->state = AR_VERIFY_SHAPE;
    else
        AR_TRY(judge_pair(row, c, &reshaped));
    return AR_OK;
}

/* --- the report --------------------------------------------------------------------------------------------------- */

/* Counts the rows, and moves rows that were left out to the end. */
static ar_status count_rows(ari_sketch_report *r)
{
    r->first_row = r->rows;
    for (size_t i = 0; i < r->rows; i++) {
        const ari_sketch_row *row = &r->row[i];
        const bool differs = row->state != AR_VERIFY_SAME;
        r->left_out += row->left_out;
        r->reordered += row->reordered;
        r->unjudged += !row->left_out && row->unjudged[0] != '\0';
        r->different += differs;
        if (differs && (r->first_row == r->rows || (row->lost_gradient && !r->row[r->first_row].lost_gradient)))
            r->first_row = i;
    }
    r->compared = r->rows - r->left_out - r->unjudged;
    if (r->compared == 0 && r->unjudged == 0)
        return ar_error_set(AR_ERR_NOT_FOUND,
                            "nothing was compared: all %zu tensors are left out, as a run says that they have no place "
                            "in a full tensor, or has its samples in another order",
                            r->rows);
    return AR_OK;
}

static ar_status compare(comparison *c)
{
    const ar_verify_options *o = c->options;
    ari_sketch_report *r = c->report;
    const char *const path[2] = {o->reference, o->other}, *const map[2] = {o->reference_map, o->map};
    ari_step_list steps[2];
    const char *allows = c->allowances != NULL ? ar_dump_metadata(c->allowances, "anyrank.allows") : NULL;
    c->roundoff = allows != NULL ? ari_roundoff_allowed(allows) : 0.0;
    for (int k = 0; k < 2; k++) {
        AR_TRY(side_open(c, k, path[k], map[k]));
        AR_TRY(drop_incomplete(c, k, path[k]));
    }
    AR_TRY(unwrap(c));
    AR_TRY(compare_steps(steps, c));
    AR_TRY(join(c, steps));
    AR_TRY(select_rows(c));
    for (size_t i = 0; i < r->rows; i++) {
        ari_sketch_row *row = &r->row[i];
        if (i > 0 && row->step != r->row[i - 1].step)
            c->step_before = r->row[i - 1].step;
        if (row->side[0] != NULL)
            row->side[0]->row = row;
        AR_TRY(judge_row(row, c));
    }
    AR_TRY(count_rows(r));
    return r->different == 0 && r->unjudged == 0 ? ari_sketches_refuse_dead(r, o) : AR_OK;
}

ar_status ari_sketches_compare(ari_sketch_report *r, const ar_verify_options *o)
{
    comparison c = {.report = r, .options = o};
    ARI_OWNED_BY(ar_dump_close) ar_dump *allowances = NULL;
    *r = (ari_sketch_report){0};
    if (o->rule == AR_VERIFY_ULP)
        return ar_error_set(AR_ERR_UNSUPPORTED, "--ulp needs elements, and sketches have none: use --rtol with --atol");
    if (o->rule == AR_VERIFY_SENSITIVITY)
        AR_TRY(ar_dump_open(&allowances, o->allowed, NULL));
    c.allowances = allowances;
    return compare(&c);
}

void ari_sketch_report_fini(ari_sketch_report *r)
{
    for (size_t i = 0; i < r->made_count; i++)
        ar_sketch_fini(&r->sketches[i]);
    for (int k = 0; k < 2; k++) {
        ar_sketch_run_close(r->run[k]);
        ar_dump_close(r->dump[k]);
    }
    ari_arena_free(&r->arena);
    *r = (ari_sketch_report){0};
}
