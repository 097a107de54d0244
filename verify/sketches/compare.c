/* SPDX-License-Identifier: Apache-2.0 */
#include <fnmatch.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/io/file.h"
#include "ref/io/json.h"
#include "verify/dumps/verify_impl.h"
#include "verify/sketches/sketches.h"

ARI_OWNER(ar_dump, ar_dump_close)

ar_status ari_is_sketched(bool *is, const char *folder)
{
    *is = false;
    return ari_is_folder(folder) ? ari_file_is_in(is, folder, "rank-00000.sketch") : AR_OK;
}

/* Adds the boxes of a part of which it has the first copy or, with `copies`, the others. */
static ar_status part_add(ar_sketch *s, const ar_dump_part *p, bool copies)
{
    for (size_t b = 0; b < p->boxes; b++) {
        if ((p->box[b].replica > 0) == copies)
            AR_TRY(ar_sketch_add(s, p->entry->data, &p->box[b]));
    }
    return AR_OK;
}

static bool same_boxes(const ar_dump_part *a, const ar_dump_part *b)
{
    bool same = a->boxes == b->boxes;
    for (size_t i = 0; i < a->boxes && same; i++)
        same = memcmp(a->box[i].global, b->box[i].global, sizeof a->box[i].global) == 0 &&
               memcmp(a->box[i].extent, b->box[i].extent, sizeof a->box[i].extent) == 0;
    return same;
}

/* The first rank that has another copy of a part than the part's first rank; -1: none. */
static ar_status differing_rank(int *rank, double *norm, const ar_dump_tensor *t)
{
    *rank = -1;
    for (size_t i = 1; i < t->parts && *rank < 0; i++) {
        size_t first = 0;
        while (first < i && !same_boxes(&t->part[first], &t->part[i]))
            first++;
        const bool summand = t->part[i].partial; /* whose copies are those of one summand, which is not told */
        if (first == i || summand || t->part[i].replica == 0 || t->part[first].replica > 0)
            continue;
        ARI_ENDED(ar_sketch_fini) ar_sketch a = {0};
        ARI_ENDED(ar_sketch_fini) ar_sketch b = {0};
        AR_TRY(ar_sketch_init(&a, t->dtype, t->ndim, t->shape));
        AR_TRY(ar_sketch_init(&b, t->dtype, t->ndim, t->shape));
        AR_TRY(part_add(&a, &t->part[first], false));
        AR_TRY(part_add(&b, &t->part[i], true));
        ar_sketch_difference d;
        AR_TRY(ar_sketch_compare(&d, &a, &b));
        *rank = a.digest != b.digest ? t->part[i].rank : -1;
        *norm = d.norm;
    }
    return AR_OK;
}

/* The sketch of a dump's tensor: the first copy of each part, summand by summand. */
static ar_status dump_sketch(ar_sketch *s, const ar_dump_tensor *t)
{
    AR_TRY(ar_sketch_init(s, t->dtype, t->ndim, t->shape));
    for (size_t i = 0; i < t->parts; i++) {
        const ar_dump_part *p = &t->part[i];
        ARI_ENDED(ar_sketch_fini) ar_sketch summand = {0};
        if (!p->partial) {
            AR_TRY(part_add(s, p, false));
            continue;
        }
        AR_TRY(ar_sketch_init(&summand, t->dtype, t->ndim, t->shape));
        AR_TRY(part_add(&summand, p, false));
        AR_TRY(ar_sketch_merge(s, &summand, i > 0));
    }
    return AR_OK;
}

/* A tensor of one side; NULL: it has none of this name. */
typedef struct side {
    const ar_sketch *sketch;
    const char *unjudged; /* why it cannot be compared; "": it can */
    int differing;
    double copy_norm;               /* of the differing copy less the first one */
    bool summed, left_out;          /* left_out: by the run itself, which says so */
    const ar_sketch_tensor *tensor; /* NULL: of a dump */
} side;

/* Tensors of a run by name. */
typedef struct by_name {
    const char *name;
    const ar_sketch_tensor *tensor;
    const ari_sketch_row *row; /* once it is compared; NULL: it is not, or cannot be */
} by_name;

typedef struct names {
    by_name *list; /* [n], sorted */
    size_t n;
} names;

static ar_status names_init(names *all, const ar_sketch_run *run, ari_arena *arena)
{
    all->n = ar_sketch_run_count(run);
    AR_TRY(ARI_TAKE(&all->list, arena, all->n, "names of sketches"));
    for (size_t i = 0; i < all->n; i++)
        all->list[i] = (by_name){ar_sketch_run_tensor(run, i)->name, ar_sketch_run_tensor(run, i), NULL};
    if (all->n > 0)
        qsort(all->list, all->n, sizeof *all->list, ari_by_name);
    return AR_OK;
}

static by_name *names_find(const names *all, const char *name)
{
    const by_name key = {.name = name};
    return all->n == 0 ? NULL : bsearch(&key, all->list, all->n, sizeof key, ari_by_name);
}

static ar_status side_of(side *s, ari_sketch_report *r, int k, const names *all, const char *name)
{
    *s = (side){.unjudged = "", .differing = -1};
    if (r->run[k] != NULL) {
        const by_name *found = names_find(all, name);
        if (found != NULL)
            *s = (side){&found->tensor->sketch,
                        found->tensor->left_out,
                        found->tensor->differing,
                        found->tensor->copy_norm,
                        found->tensor->summed,
                        found->tensor->by_run,
                        found->tensor};
        return AR_OK;
    }
    const ar_dump_tensor *t = ar_dump_find(r->dump[k], name);
    if (t == NULL)
        return AR_OK;
    ar_sketch *made = &r->made[r->made_count++];
    ar_status st = dump_sketch(made, t);
    s->sketch = made;
    if (st == AR_OK)
        st = differing_rank(&s->differing, &s->copy_norm, t);
    for (size_t i = 0; i < t->parts; i++)
        s->summed = s->summed || t->part[i].partial;
    if (st == AR_ERR_DTYPE)
        s->unjudged = "its dtype has no sketch";
    return st == AR_ERR_DTYPE ? AR_OK : st;
}

/* What the rule allows an element, rtol times it besides, and the norm of the difference: elements that each differ by at
 * most rtol*|a| + e differ together by at most rtol*|a| + e*sqrt(n) in norm. */
static ar_status set_allowed(ari_sketch_row *row, const ar_verify_options *o, const ar_dump *allowances)
{
    const ar_sketch *a = row->side[0];
    row->each = o->atol;
    row->rtol = o->rtol;
    if (o->rule == AR_VERIFY_SENSITIVITY) {
        const ar_dump_tensor *t = ar_dump_find(allowances, row->name);
        float each = 0.0f;
        if (t == NULL || t->count != 1)
            return ar_error_set(AR_ERR_NOT_FOUND, "%s: allows %s nothing", o->allowed, row->name);
        AR_TRY(ar_dump_read_f32(t, 0, 1, &each));
        row->each = (double)each;
        row->rtol = 0.0;
    }
    row->allowed = row->rtol * sqrt(a->sum_squares) + row->each * sqrt((double)a->elements);
    return AR_OK;
}

/* Whether copies differ: in a bit, or by more than the rule allows. */
static bool copies_differ(const side *s, const ar_verify_options *o, double allowed)
{
    return s->differing >= 0 && (o->rule == AR_VERIFY_BITS || s->copy_norm > allowed);
}

/* Whether elements that are few differ by more than the rule: a bucket sums up a 32nd of a block's with random signs, and
 * errors of at most `each` that are independent come together to each times the root of their number. */
static bool off_in_bucket(const ari_sketch_row *row)
{
    const ar_sketch *a = row->side[0], *b = row->side[1];
    for (size_t block = 0; block < a->blocks; block++) {
        const size_t first = block * a->block, left = a->elements - first, n = left < a->block ? left : a->block;
        const double *x = a->bucket + block * AR_SKETCH_BUCKETS, *y = b->bucket + block * AR_SKETCH_BUCKETS;
        double squares = 0.0, most = 0.0;
        for (size_t i = 0; i < AR_SKETCH_BUCKETS; i++) {
            squares += x[i] * x[i];
            most = fmax(most, fabs(y[i] - x[i]));
        }
        const double root = sqrt(fmax(1.0, (double)n / AR_SKETCH_BUCKETS));
        if (most > row->each * root + row->rtol * sqrt(squares) + row->excused)
            return true;
    }
    return false;
}

/* As verify judges a tensor of which each element is within the rule (verify/dumps/verify_scan.c, "a factor"): the best
 * factor is off by more than errors that are independent, or a rounding that all elements share, explain. The estimate's
 * own error is that of as many sums as there are buckets. */
static bool off_by_factor(const ari_sketch_row *row, double roundoff, double rtol)
{
    static const double deviations = 8.0, systematic = 64.0 * 0x1p-24, most_rest = 0.25;
    enum { LEAST_ELEMENTS = 16 };
    const ar_sketch *a = row->side[0];
    const char *kind = strrchr(row->name, ':');
    const bool judged =
        kind != NULL && strchr("fbgmv", kind[1]) != NULL && kind[2] != 'u' && a->elements >= LEAST_ELEMENTS;
    if (!judged || !(a->sum_squares > 0.0) || !isfinite(row->d.factor))
        return false;
    const double off = fabs(row->d.factor - 1.0), rest = row->d.factor_left * row->d.norm / row->d.norm_a;
    const double count = fmin(a->sum_squares / (a->max_abs * a->max_abs), (double)(a->blocks * AR_SKETCH_BUCKETS));
    const double allowed = fmax(fmax(deviations * rest / sqrt(count), roundoff + systematic), rtol);
    return rest <= most_rest && off > allowed;
}

/* The row of the same stem, of this kind and step; NULL: none was compared. */
static const ari_sketch_row *row_find(const names *all, const char *name, const char *kind, int step)
{
    const int stem = (int)(strrchr(name, ':') - name);
    char wanted[512];
    const int n = step > 1 ? snprintf(wanted, sizeof wanted, "%.*s:%s@%d", stem, name, kind, step)
                           : snprintf(wanted, sizeof wanted, "%.*s:%s", stem, name, kind);
    const by_name *found = n > 0 && (size_t)n < sizeof wanted ? names_find(all, wanted) : NULL;
    return found != NULL ? found->row : NULL;
}

/* Whether b's step is a's times a factor, which signs that rounding has turned are not: they leave a rest that is larger
 * than what they take from the factor. */
static bool is_scaled_step(const ari_sketch_row *before, const ari_sketch_row *after)
{
    const double *from[2], *to[2];
    double aa = 0.0, ab = 0.0, bb = 0.0;
    for (int k = 0; k < 2; k++) {
        from[k] = before->side[k]->bucket;
        to[k] = after->side[k]->bucket;
    }
    for (size_t i = 0; i < after->side[0]->blocks * AR_SKETCH_BUCKETS; i++) {
        const double a = to[0][i] - from[0][i], b = to[1][i] - from[1][i];
        aa += a * a;
        ab += a * b;
        bb += b * b;
    }
    const double off = aa > 0.0 ? ab / aa - 1.0 : 0.0, rest = aa > 0.0 ? bb / aa - (1.0 + off) * (1.0 + off) : 0.0;
    return rest < 0.25 * off * off;
}

/* The norm by which new weights may differ as optimizers divide by the size of the gradient: an element whose gradient
 * is off by a part y of it moves by min(2, 2y) of its step besides. Tiny elements may be off by all of it. Of the others
 * let d be the norm of the gradients' difference, in parts of theirs, and elements as dense near zero as at their root
 * mean square: the steps' squares sum up to at most the whole step's times the mean of min(2, 2d/z)^2 over z, which is
 * 8 d. Of gradients that are rounding alone. */
static ar_status set_excused(ari_sketch_row *row, const names *all, int last_step)
{
    const char *kind = strrchr(row->name, ':'), *number = strrchr(row->name, '@');
    const int step = number != NULL ? (int)strtol(number + 1, NULL, 10) : 1;
    if (kind == NULL || strncmp(kind, ":new", 4) != 0)
        return AR_OK;
    const ari_sketch_row *gradient = row_find(all, row->name, "grad", step),
                         *before = row_find(all, row->name, step > 1 ? "new" : "init", step > 1 ? step - 1 : 1),
                         *earlier = before != NULL ? before : row_find(all, row->name, "new", last_step);
    row->excused = earlier != NULL ? earlier->excused : 0.0;
    if (row->d.same_bits || gradient == NULL || before == NULL || gradient->state != AR_VERIFY_SAME ||
        is_scaled_step(before, row))
        return AR_OK;
    ar_sketch_difference moved;
    AR_TRY(ar_sketch_compare(&moved, before->side[0], row->side[0]));
    const double part = gradient->d.norm_a > 0.0 ? fmin(gradient->d.norm / gradient->d.norm_a, 0.5) : 0.0;
    const double tiny = (double)gradient->tiny / (double)row->side[0]->elements;
    row->excused += moved.norm * (1.0 + 3.0 * moved.norm_error) * sqrt(8.0 * part + 4.0 * fmin(tiny, 1.0));
    return AR_OK;
}

/* Whether values differ by more than the rule allows, and new weights besides by what their gradients excuse. */
static void judge_values(ari_sketch_row *row, double roundoff)
{
    const ar_sketch *a = row->side[0], *b = row->side[1];
    row->allowed += row->excused;
    if (a->nan != b->nan || a->inf != b->inf || row->d.norm * (1.0 - 3.0 * row->d.norm_error) > row->allowed ||
        off_in_bucket(row) || off_by_factor(row, roundoff, row->rtol))
        row->state = AR_VERIFY_DIFFERENT;
}

static ar_status judge_pair(ari_sketch_row *row, const side *s, const ar_verify_options *o, const ar_dump *allowances,
                            const names *all, const ari_sketch_report *r)
{
    const ar_sketch *a = s[0].sketch, *b = s[1].sketch;
    row->side[0] = a;
    row->side[1] = b;
    row->differing = s[1].differing >= 0 ? s[1].differing : s[0].differing;
    row->unjudged = s[0].unjudged[0] != '\0' ? s[0].unjudged : s[1].unjudged;
    if (row->unjudged[0] != '\0')
        return AR_OK;
    if (a == NULL || b == NULL) {
        row->state = a != NULL ? AR_VERIFY_MISSING : AR_VERIFY_UNEXPECTED;
        return AR_OK;
    }
    if (a->ndim != b->ndim || memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) != 0) {
        row->state = AR_VERIFY_SHAPE;
        return AR_OK;
    }
    AR_TRY(ar_sketch_compare(&row->d, a, b));
    row->first = row->d.block * a->block;
    row->elements = a->elements - row->first < a->block ? a->elements - row->first : a->block;
    row->d.same_bits = row->d.same_bits && !s[0].summed && !s[1].summed;
    AR_TRY(set_allowed(row, o, allowances));
    const bool bits = o->rule == AR_VERIFY_BITS;
    if (!bits)
        AR_TRY(set_excused(row, all, r->last_step));
    if (bits && (s[0].summed || s[1].summed))
        row->unjudged = "it is a sum over ranks, whose bits a sketch does not have";
    else if (bits && a->dtype != b->dtype)
        row->state = AR_VERIFY_DTYPE;
    else if (copies_differ(&s[0], o, row->allowed) || copies_differ(&s[1], o, row->allowed))
        row->state = AR_VERIFY_REPLICAS;
    else if (bits && !row->d.same_bits)
        row->state = AR_VERIFY_DIFFERENT;
    else if (!row->d.same_bits)
        judge_values(row, r->roundoff);
    return AR_OK;
}

/* Whether an activation's rows are samples that one run has in another order than the other. */
static bool is_reordered(const side *s, const char *name)
{
    const char *kind = strrchr(name, ':');
    const ar_sketch_tensor *a = s[0].tensor, *b = s[1].tensor;
    return a != NULL && b != NULL && kind != NULL && strncmp(kind + 2, "wd", 2) == 0 && a->sketch.ndim > 0 &&
           a->samples[0] != b->samples[0] && a->samples[1] == b->samples[1] && a->samples[1] != 0;
}

static bool is_wanted(const ar_verify_options *o, const char *name)
{
    bool wanted = o->only_count == 0;
    for (size_t i = 0; i < o->only_count && !wanted; i++)
        wanted = fnmatch(o->only[i], name, 0) == 0;
    for (size_t i = 0; i < o->leave_count && wanted; i++)
        wanted = fnmatch(o->leave[i], name, 0) != 0;
    return wanted;
}

/* Whether a run of sketches has a step; a dump has those that it has. */
static bool has_step(const ar_sketch_run *run, int step)
{
    if (run == NULL)
        return true;
    for (size_t i = 0; i < ar_sketch_run_count(run); i++) {
        if (ar_sketch_run_tensor(run, i)->step == step)
            return true;
    }
    return false;
}

/* Rows of the tensors of run k that are wanted; of those of the second run only what the first one has not. */
static ar_status add_rows(ari_sketch_report *r, const ar_verify_options *o, const ar_dump *allowances, const names *all,
                          int k)
{
    int step = 0;
    bool common = false;
    for (size_t i = 0; r->run[k] != NULL && i < ar_sketch_run_count(r->run[k]); i++) {
        const ar_sketch_tensor *t = ar_sketch_run_tensor(r->run[k], i);
        if (common && t->step != step)
            r->last_step = step;
        if (i == 0 || t->step != step)
            common = has_step(r->run[1 - k], t->step);
        step = t->step;
        if (!common || !is_wanted(o, t->name))
            continue;
        ari_sketch_row row = {.name = t->name, .step = t->step, .unjudged = "", .differing = -1};
        side s[2];
        AR_TRY(side_of(&s[0], r, 0, &all[0], t->name));
        AR_TRY(side_of(&s[1], r, 1, &all[1], t->name));
        if (k == 1 && s[0].sketch != NULL && r->run[0] != NULL)
            continue;
        if (o->common && (s[0].sketch == NULL || s[1].sketch == NULL))
            continue;
        for (int run = 0; run < 2; run++)
            row.tiny = s[run].tensor != NULL && s[run].tensor->tiny > row.tiny ? s[run].tensor->tiny : row.tiny;
        const bool reordered = is_reordered(s, t->name);
        if (reordered || s[0].left_out || s[1].left_out) {
            r->left_out++;
            r->reordered += reordered;
            continue;
        }
        AR_TRY(judge_pair(&row, s, o, allowances, &all[k], r));
        r->different += row.state != AR_VERIFY_SAME;
        r->unjudged += row.unjudged[0] != '\0';
        r->row[r->rows] = row;
        by_name *found = names_find(&all[k], t->name);
        if (found != NULL && row.side[0] != NULL && row.side[1] != NULL && row.unjudged[0] == '\0')
            found->row = &r->row[r->rows];
        r->rows++;
    }
    return AR_OK;
}

ar_status ari_sketches_compare(ari_sketch_report *r, const ar_verify_options *o)
{
    const char *const path[2] = {o->reference, o->other}, *const map[2] = {o->reference_map, o->map};
    names all[2] = {{0}, {0}};
    ARI_OWNED_BY(ar_dump_close) ar_dump *allowances = NULL;
    *r = (ari_sketch_report){0};
    if (o->rule == AR_VERIFY_ULP)
        return ar_error_set(AR_ERR_UNSUPPORTED, "--ulp needs elements, and sketches have none: use --rtol with --atol");
    if (o->rule == AR_VERIFY_SENSITIVITY)
        AR_TRY(ar_dump_open(&allowances, o->allowed, NULL));
    for (int k = 0; k < 2; k++) {
        bool sketched = false;
        AR_TRY(ari_is_sketched(&sketched, path[k]));
        if (sketched) {
            AR_TRY(ar_sketch_run_open(&r->run[k], path[k]));
            AR_TRY(names_init(&all[k], r->run[k], &r->arena));
        } else {
            AR_TRY(ar_dump_open(&r->dump[k], path[k], &(ar_dump_options){.map = map[k]}));
        }
    }
    const char *allows = allowances != NULL ? ar_dump_metadata(allowances, "anyrank.allows") : NULL;
    r->roundoff = allows != NULL ? ari_roundoff_allowed(allows) : 0.0;
    for (int k = 0; k < 2; k++) {
        for (size_t i = 0; r->run[k] != NULL && i < ar_sketch_run_count(r->run[k]); i++)
            r->roundoff = fmax(r->roundoff, ari_roundoff_of(ar_sketch_run_tensor(r->run[k], i)->sketch.dtype));
        for (size_t i = 0; r->dump[k] != NULL && i < ar_dump_count(r->dump[k]); i++)
            r->roundoff = fmax(r->roundoff, ari_roundoff_of(ar_dump_at(r->dump[k], i)->dtype));
    }
    AR_TRY(ARI_TAKE(&r->row, &r->arena, all[0].n + all[1].n, "rows"));
    AR_TRY(ARI_TAKE(&r->made, &r->arena, all[0].n + all[1].n, "sketches of a dump"));
    for (int k = 0; k < 2; k++)
        AR_TRY(add_rows(r, o, allowances, all, k));
    for (r->first = 0; r->first < r->rows && r->row[r->first].state == AR_VERIFY_SAME;)
        r->first++;
    return AR_OK;
}

void ari_sketch_report_fini(ari_sketch_report *r)
{
    for (size_t i = 0; i < r->made_count; i++)
        ar_sketch_fini(&r->made[i]);
    for (int k = 0; k < 2; k++) {
        ar_sketch_run_close(r->run[k]);
        ar_dump_close(r->dump[k]);
    }
    ari_arena_free(&r->arena);
    *r = (ari_sketch_report){0};
}

static const char *const states[] = {"same", "different", "shape", "dtype", "missing", "unexpected", "replicas"};

static json_t *row_json(const ari_sketch_row *row)
{
    const ar_sketch *a = row->side[0] != NULL ? row->side[0] : row->side[1];
    json_t *o = json_pack("{ss si ss ss si}", "tensor", row->name, "step", row->step, "state", states[row->state],
                          "unjudged", row->unjudged, "differing_rank", row->differing);
    if (o == NULL || row->side[0] == NULL || row->side[1] == NULL || row->state == AR_VERIFY_SHAPE)
        return o;
    const ar_sketch_difference *d = &row->d;
    json_object_set_new(o, "shape", ari_json_sizes(a->shape, (size_t)a->ndim));
    json_object_set_new(o, "norm", ari_json_number(d->norm));
    json_object_set_new(o, "norm_error", ari_json_number(d->norm_error));
    json_object_set_new(o, "norm_reference", ari_json_number(d->norm_a));
    json_object_set_new(o, "allowed", ari_json_number(row->allowed));
    json_object_set_new(o, "factor", ari_json_number(d->factor));
    json_object_set_new(o, "factor_left", ari_json_number(d->factor_left));
    json_object_set_new(o, "blocks", json_integer((json_int_t)d->blocks));
    json_object_set_new(o, "block",
                        json_pack("[II]", (json_int_t)row->first, (json_int_t)(row->first + row->elements)));
    json_object_set_new(o, "block_share", ari_json_number(d->block_share));
    json_object_set_new(o, "rows", json_integer((json_int_t)d->rows));
    return o;
}

json_t *ari_sketch_report_json(const ari_sketch_report *r, const ar_verify_options *o)
{
    json_t *rows = json_array(), *first = json_null();
    for (size_t i = 0; i < r->rows && rows != NULL; i++) {
        if (r->row[i].state != AR_VERIFY_SAME || r->row[i].unjudged[0] != '\0')
            json_array_append_new(rows, row_json(&r->row[i]));
    }
    if (r->first < r->rows)
        first = row_json(&r->row[r->first]);
    return json_pack("{ss ss ss sb sI sI sI sI sI so so}", "result",
                     r->different > 0  ? "different"
                     : r->unjudged > 0 ? "unjudged"
                                       : "same",
                     "reference", o->reference, "other", o->other, "sketches", 1, "tensors", (json_int_t)r->rows,
                     "tensors_different", (json_int_t)r->different, "tensors_unjudged", (json_int_t)r->unjudged,
                     "tensors_left_out", (json_int_t)r->left_out, "tensors_reordered", (json_int_t)r->reordered,
                     "first", first, "rows", rows);
}
