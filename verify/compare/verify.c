/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/verify.h"

#include <ctype.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/clock.h"
#include "ref/core/size.h"
#include "ref/core/tensor_private.h"
#include "ref/core/text.h"
#include "ref/core/wait.h"
#include "ref/io/json.h"
#include "verify/compare/verify_impl.h"
#include "verify/compare/verify_private.h"
#include "verify/read/dump.h"

/* --- samples ------------------------------------------------------------------------------------------------------ */

/* The order of samples. A dump may record each step's samples as digests of the model's inputs. If both dumps have the
 * same samples in different order, because loaders distribute them to ranks differently, tensors with samples are read
 * in the reference's order. */

typedef struct numbered {
    long long digest;
    size_t place;
} numbered;

static int by_digest(const void *a, const void *b)
{
    const numbered *x = a, *y = b;
    ARI_ASCENDING(x->digest, y->digest);
    return x->place < y->place ? -1 : x->place > y->place;
}

static ar_status sort_digests(numbered **sorted, const json_t *list, ari_arena *arena)
{
    const size_t n = json_array_size(list);
    AR_TRY(ARI_TAKE(sorted, arena, n, "samples of a step"));
    for (size_t i = 0; i < n; i++)
        (*sorted)[i] = (numbered){json_integer_value(json_array_get(list, i)), i};
    qsort(*sorted, n, sizeof **sorted, by_digest);
    return AR_OK;
}

/* Fills s->place if the two lists have the same digests in different order. */
static ar_status compare_order(ari_sample_order *s, const json_t *reference, const json_t *candidate, ari_arena *arena)
{
    numbered *a = NULL, *b = NULL;
    const size_t n = json_array_size(reference);
    bool moved = false;
    if (n == 0 || json_array_size(candidate) != n)
        return AR_OK;
    AR_TRY(sort_digests(&a, reference, arena));
    AR_TRY(sort_digests(&b, candidate, arena));
    for (size_t i = 0; i < n; i++) {
        if (a[i].digest != b[i].digest)
            return AR_OK;
        moved = moved || a[i].place != b[i].place;
    }
    if (!moved)
        return AR_OK;
    AR_TRY(ARI_TAKE(&s->place, arena, n, "samples of a step"));
    for (size_t i = 0; i < n; i++)
        s->place[b[i].place] = a[i].place;
    s->samples = n;
    return AR_OK;
}

/* The steps whose samples are in different order. */
typedef struct sample_orders {
    ari_sample_order *step; /* [n] */
    size_t n;
} sample_orders;

static ar_status learn_orders(sample_orders *o, const json_t *reference, const json_t *candidate, ari_arena *arena)
{
    const char *step;
    json_t *list;
    AR_TRY(ARI_TAKE(&o->step, arena, json_object_size(reference), "orders of samples"));
    json_object_foreach((json_t *)(uintptr_t)reference, step, list)
    {
        ari_sample_order s = {.step = atoi(step)};
        AR_TRY(compare_order(&s, list, json_object_get(candidate, step), arena));
        if (s.place)
            o->step[o->n++] = s;
    }
    return AR_OK;
}

/* Reorders the other dump's samples to the reference's order. Errors: AR_ERR_FORMAT (a dump's sample digests are
 * invalid JSON), AR_ERR_MEMORY. */
static ar_status verify_samples(ari_verifying *v)
{
    ARI_ENDED(ari_arena_free) ari_arena arena = {NULL};
    json_t *samples[2] = {NULL, NULL};
    sample_orders orders = {NULL, 0};
    ar_status st = AR_OK;
    for (int k = 0; k < 2 && st == AR_OK; k++) {
        const char *text = ar_dump_metadata(v->dump[k], "anyrank.samples");
        if (text)
            st = ari_json_parse(&samples[k], text, strlen(text), ar_dump_path(v->dump[k]));
    }
    if (st == AR_OK && samples[0] && samples[1])
        st = learn_orders(&orders, samples[0], samples[1], &arena);
    json_decref(samples[0]);
    json_decref(samples[1]);
    return st == AR_OK ? ari_dump_reorder(v->dump[1], orders.step, orders.n) : st;
}

/* --- experts ------------------------------------------------------------------------------------------------------ */

/* Matches a model with experts as transformers names it in memory (from version 5) with the names in Hugging Face's
 * files. In memory the experts of a layer are two parameters, mlp.experts.gate_up_proj [E, 2F, h] and down_proj [E, h,
 * F]; Mixtral's block_sparse_moe is called mlp too; and inputs of router and experts have one row per token, [b*s, ..].
 * Experts with biases are GPT-OSS's, [E, h, 2F] with alternating gate and up. */

#define MIXTRAL ".block_sparse_moe"
#define EXPERTS ".experts."
enum { GATE, UP, DOWN, PARTS, ALONE = PARTS, NAME = 160 };

/* A name in one dump without pass and step, and the name that the other dump may have for it. */
typedef struct other_name {
    char name[NAME], dump_name[NAME];
    const ar_dump_tensor *t; /* the first tensor with this name */
    int part;                /* part of an expert; ALONE: the tensor itself */
    size_t expert;
    bool is_moe; /* a value of the router or of the experts */
} other_name;

typedef struct other_names {
    other_name *list; /* sorted by name */
    size_t n, capacity;
    const ar_dump *dump, *peer_dump; /* the dump with these names, and the dump whose tensors may have the other
                                        names */
    bool biased;                     /* true if experts have biases */
} other_names;

/* --- names -------------------------------------------------------------------------------------------------------- */

/* Parses an expert's name: "5.w3.weight" is expert 5's UP. *rest: the text after it, such as ".exp_avg". */
static bool read_expert(const char *text, size_t *expert, int *part, const char **rest)
{
    static const char *const leaves[3][PARTS] = {{"gate_proj.weight", "up_proj.weight", "down_proj.weight"},
                                                 {"w1.weight", "w3.weight", "w2.weight"},
                                                 {"gate_proj.bias", "up_proj.bias", "down_proj.bias"}};
    char *end;
    if (!isdigit((unsigned char)*text))
        return false;
    *expert = strtoul(text, &end, 10);
    for (int i = 0; i < 3 * PARTS && *end == '.'; i++) {
        const char *leaf = leaves[i / PARTS][i % PARTS];
        *part = i % PARTS;
        *rest = end + 1 + strlen(leaf);
        if (strncmp(end + 1, leaf, strlen(leaf)) == 0 && (**rest == '\0' || **rest == '.'))
            return true;
    }
    return false;
}

/* True for the path of a router, of experts, or of a shared expert and its gate, below an MLP's. */
static bool is_within(const char *name)
{
    const char *match = strstr(name, ".mlp.");
    const char *module = match ? match + strlen(".mlp.") : "";
    return strcmp(module, "gate") == 0 || strcmp(module, "experts") == 0 ||
           strncmp(module, "shared_expert", strlen("shared_expert")) == 0;
}

/* Writes the name with "mlp" instead of Mixtral's module. Returns false if the name is too long. */
static bool plain_name(char *out, size_t cap, const char *name)
{
    const char *match = strstr(name, MIXTRAL);
    const int n = match ? snprintf(out, cap, "%.*s.mlp%s", (int)(match - name), name, match + strlen(MIXTRAL))
                        : snprintf(out, cap, "%s", name);
    return n >= 0 && (size_t)n < cap;
}

/* Names a tensor as part of stacked experts, or as a whole. Returns false if it has no other name or the name is too
 * long. */
static bool name_other(other_name *o, const ar_dump_tensor *t, const char *path)
{
    char name[NAME];
    const char *rest = "";
    const size_t stem = ari_order_of(t->name, path).stem;
    *o = (other_name){.t = t, .part = ALONE};
    if (stem >= sizeof o->dump_name)
        return false;
    memcpy(o->dump_name, t->name, stem);
    if (!plain_name(name, sizeof name, o->dump_name))
        return false;
    const char *match = strstr(name, EXPERTS);
    if (match && read_expert(match + strlen(EXPERTS), &o->expert, &o->part, &rest)) {
        const int n = snprintf(o->name, sizeof o->name, "%.*s%s%s%s", (int)(match + strlen(EXPERTS) - name), name,
                               o->part == DOWN ? "down_proj" : "gate_up_proj", t->ndim == 1 ? "_bias" : "", rest);
        return n >= 0 && (size_t)n < sizeof o->name;
    }
    o->part = ALONE;
    o->is_moe = is_within(name);
    memcpy(o->name, name, sizeof name);
    return o->is_moe || strcmp(name, o->dump_name) != 0;
}

static int by_other_name(const void *a, const void *b)
{
    const other_name *x = a, *y = b;
    const int order = strcmp(x->name, y->name);
    return order ? order : strcmp(x->dump_name, y->dump_name);
}

/* Lists each name once, however many passes and steps have it. */
static ar_status list_others(other_names *o)
{
    const char *path = ar_dump_path(o->dump);
    size_t kept_count = 0;
    for (size_t i = 0; i < ar_dump_count(o->dump); i++) {
        AR_TRY(ARI_GROW(&o->list, &o->capacity, o->n, "names of tensors"));
        o->n += name_other(&o->list[o->n], ar_dump_at(o->dump, i), path);
    }
    ARI_SORT(o->list, o->n, by_other_name);
    for (size_t i = 0; i < o->n; i++) {
        if (kept_count == 0 || by_other_name(&o->list[kept_count - 1], &o->list[i]) != 0)
            o->list[kept_count++] = o->list[i];
        o->biased = o->biased || (o->list[i].part != ALONE && o->list[i].t->ndim == 1);
    }
    o->n = kept_count;
    return AR_OK;
}

/* --- tensors ------------------------------------------------------------------------------------------------------ */

/* Returns true if t, which stacks all experts of a layer, has the shape for this expert's part. */
static bool fits_expert(const ar_dump_tensor *t, const other_name *o, bool turned)
{
    const size_t rows = o->t->shape[0] * (o->part == DOWN ? 1 : 2);
    return o->part != ALONE && o->expert < t->shape[0] && t->ndim == o->t->ndim + 1 &&
           t->shape[turned ? 2 : 1] == rows && (t->ndim == 2 || t->shape[turned ? 1 : 2] == o->t->shape[1]);
}

/* Adds a cut under the other dump's name with t's pass and step, unless a tensor with that name already exists. */
static ar_status add_cut(ari_tensor_cuts *cuts, bool *added, const other_names *names, const ar_dump_tensor *t,
                         const other_name *o)
{
    const size_t stem = ari_order_of(t->name, ar_dump_path(names->peer_dump)).stem;
    const char *suffix = t->name + stem;
    AR_TRY(ari_tensor_cuts_add(cuts, t, o->dump_name, suffix));
    const char *name = cuts->cut[cuts->n - 1].name;
    *added = strcmp(name, t->name) == 0 || !ar_dump_find(names->peer_dump, name);
    cuts->n -= !*added;
    return AR_OK;
}

/* Cuts t into its experts. The names must include every expert of t exactly once. */
static ar_status cut_experts(ari_tensor_cuts *cuts, const other_names *names, const ar_dump_tensor *t,
                             const other_name *experts, size_t n)
{
    const size_t per_expert = experts->part == DOWN ? 1 : 2;
    bool is_complete = t->ndim > 1 && n == per_expert * t->shape[0];
    for (size_t i = 0; i < n && is_complete; i++)
        is_complete = fits_expert(t, &experts[i], names->biased && t->ndim == 3);
    for (size_t i = 0; i < n && is_complete; i++) {
        AR_TRY(add_cut(cuts, &is_complete, names, t, &experts[i]));
        const size_t rows = experts[i].t->shape[0], row = experts[i].part == UP ? (names->biased ? 1 : rows) : 0;
        if (is_complete)
            ari_tensor_cut_expert(&cuts->cut[cuts->n - 1], t->ndim, experts[i].expert, row, rows,
                                  names->biased ? per_expert : 0);
    }
    cuts->n = is_complete ? cuts->n : 0;
    return AR_OK;
}

/* Returns true if t has samples and tokens merged into one dimension that are separate in the other dump; the number of
 * features is that of another pass. */
static bool is_folded(const ar_dump_tensor *t, const ar_dump_tensor *unfolded)
{
    return t->ndim > 0 && unfolded->ndim == t->ndim + 1 && t->count > 0 &&
           t->shape[0] == unfolded->shape[0] * unfolded->shape[1];
}

static ar_status cut_alone(ari_tensor_cuts *cuts, const other_names *names, const ar_dump_tensor *t,
                           const other_name *o)
{
    const bool folded = o->is_moe && is_folded(t, o->t);
    bool added = false;
    if (!folded && strcmp(o->name, o->dump_name) == 0)
        return AR_OK;
    AR_TRY(add_cut(cuts, &added, names, t, o));
    if (added)
        cuts->cut[0].fold = folded ? o->t->shape[1] : 0;
    return AR_OK;
}

static ar_status cuts_of(void *user, const ar_dump_tensor *t, ari_tensor_cuts *cuts)
{
    const other_names *names = user;
    const size_t stem = ari_order_of(t->name, ar_dump_path(names->peer_dump)).stem;
    size_t begin = 0, n = 0; /* the first name that is not before the stem */
    ARI_BISECT(begin, names->n, i, strncmp(names->list[i].name, t->name, stem) < 0)
    while (begin + n < names->n && strlen(names->list[begin + n].name) == stem &&
           memcmp(names->list[begin + n].name, t->name, stem) == 0)
        n++;
    if (n == 0)
        return AR_OK;
    if (names->list[begin].part != ALONE)
        return cut_experts(cuts, names, t, &names->list[begin], n);
    return n == 1 ? cut_alone(cuts, names, t, &names->list[begin]) : AR_OK;
}

/* Gives tensors of a model with experts the names and shapes of the other dump: one tensor per expert's parameter where
 * a dump stacks a layer's experts, and separate samples. Errors: AR_ERR_MEMORY. */
static ar_status verify_unstack(ari_verifying *v)
{
    for (int k = 0; k < 2; k++) {
        other_names o = {.dump = v->dump[k], .peer_dump = v->dump[1 - k]};
        ar_status st = list_others(&o);
        if (st == AR_OK && o.n > 0)
            st = ari_dump_split(v->dump[1 - k], cuts_of, &o);
        free(o.list);
        AR_TRY(st);
    }
    return AR_OK;
}

ar_status ari_verify_align(ar_dump *reference, ar_dump *candidate)
{
    ar_verify_report report = {.same = false};
    ari_verifying v = {.dump = {reference, candidate}, .report = &report};
    AR_TRY(ari_verify_unwrap(&v));
    AR_TRY(verify_unstack(&v));
    AR_TRY(verify_samples(&v));
    return ari_verify_name_by_meaning(&v);
}

/* --- verify ------------------------------------------------------------------------------------------------------- */

enum { MOST_THREADS = 16 }; /* memory hands out no more to more threads */

/* --- options ------------------------------------------------------------------------------------------------------ */

static ar_status check_tolerance(const char *name, double x)
{
    if (!(x >= 0.0) || isinf(x))
        return ar_error_set(AR_ERR_ARG, "%s %g: expected a finite number of 0 or more", name, x);
    return AR_OK;
}

static ar_status check_options(const ar_verify_options *o)
{
    if (!o->reference || !o->other)
        return ar_error_set(AR_ERR_ARG, "two dumps are compared: a reference and another one");
    AR_TRY(ari_check_choice("rule", (int)o->rule, AR_VERIFY_SENSITIVITY + 1));
    if (o->rule == AR_VERIFY_SENSITIVITY && !o->allowed)
        return ar_error_set(AR_ERR_ARG, "the rule of sensitivity needs a file that says what is allowed");
    if (o->common && o->all_matched)
        return ar_error_set(AR_ERR_ARG,
                            "common leaves out what only one dump has, all_matched refuses it: give one of them");
    if (o->rule != AR_VERIFY_TOLERANCE)
        return AR_OK;
    AR_TRY(check_tolerance("rtol", o->rtol));
    return check_tolerance("atol", o->atol);
}

static ar_status open_dumps(ari_verifying *v)
{
    const ar_verify_options *o = v->o;
    const ar_dump_options reference = {.map = o->reference_map, .all_matched = o->all_matched},
                          candidate = {.map = o->map, .all_matched = o->all_matched};
    AR_TRY(ar_dump_open(&v->dump[0], o->reference, &reference));
    AR_TRY(ar_dump_open(&v->dump[1], o->other, &candidate));
    if (o->rule == AR_VERIFY_SENSITIVITY)
        return ar_dump_open(&v->allowed, o->allowed, NULL);
    return AR_OK;
}

/* --- totals ------------------------------------------------------------------------------------------------------- */

/* Returns the size of a difference for sorting; differences of dtype, shape or copies have no size and come last. */
static double badness(const ar_verify_row *r, bool by_ratio)
{
    if (r->state != AR_VERIFY_DIFFERENT)
        return -1.0;
    if (by_ratio && !isinf(r->ratio))
        return r->ratio;
    const size_t odd = r->nan[0] + r->nan[1] + r->inf[0] + r->inf[1];
    if (odd > 0 && (r->nan[0] != r->nan[1] || r->inf[0] != r->inf[1]))
        return INFINITY;
    return r->rms_reference > 0.0 ? r->max_abs / r->rms_reference : r->max_abs;
}

/* Order of rows, the worst first; equally bad rows are in execution order. */
typedef struct ranked {
    size_t row;
    bool infinite;
    double badness;
} ranked;

static int by_badness(const void *a, const void *b)
{
    const ranked *x = a, *y = b;
    ARI_ASCENDING(y->infinite, x->infinite);
    ARI_ASCENDING(y->badness, x->badness);
    return x->row < y->row ? -1 : x->row > y->row;
}

static ar_status rank_rows(ar_verify_report *r, ari_arena *arena)
{
    ranked *list = NULL;
    size_t n = 0;
    AR_TRY(ARI_TAKE(&list, arena, r->different, "rows that differ"));
    AR_TRY(ARI_ALLOC(&r->worst_order, r->different, "rows that differ"));
    for (size_t i = 0; i < r->rows; i++) {
        const ar_verify_row *row = &r->row[i];
        if (row->state == AR_VERIFY_SAME || ari_is_one_sided(row))
            continue;
        const bool by_ratio = r->rule != AR_VERIFY_BITS;
        list[n++] =
            (ranked){i, row->state == AR_VERIFY_DIFFERENT && by_ratio && isinf(row->ratio), badness(row, by_ratio)};
    }
    qsort(list, n, sizeof *list, by_badness);
    for (size_t i = 0; i < n; i++)
        r->worst_order[i] = list[i].row;
    return AR_OK;
}

static ar_status count_rows(ari_verifying *v)
{
    ar_verify_report *r = v->report;
    r->first = r->worst = SIZE_MAX;
    for (size_t i = 0; i < r->rows; i++) {
        const ar_verify_row *row = &r->row[i];
        r->missing += row->state == AR_VERIFY_MISSING;
        r->unexpected += row->state == AR_VERIFY_UNEXPECTED;
        if (ari_is_one_sided(row))
            continue;
        const bool differs = row->state != AR_VERIFY_SAME;
        r->drift += row->drift > 0;
        r->elements_doubted += row->elements_doubted;
        r->compared++;
        r->different += differs;
        r->elements += row->elements;
        r->elements_different += row->elements_different;
        if (differs && r->first == SIZE_MAX)
            r->first = i;
    }
    for (size_t i = 0; r->first == SIZE_MAX && i < r->rows; i++) {
        if (r->row[i].state != AR_VERIFY_SAME)
            r->first = i;
    }
    r->same = r->first == SIZE_MAX;
    if (!r->same)
        ari_verify_begin_with_lost(r);
    for (size_t i = 0; i < v->pairs; i++) {
        for (int k = 0; k < 2; k++)
            r->bytes += v->pair[i].side[k]->count * ari_dtype_bits(v->pair[i].side[k]->dtype) / 8;
    }
    AR_TRY(rank_rows(r, &v->arena));
    if (r->different > 0)
        r->worst = r->worst_order[0];
    return AR_OK;
}

/* --- the report --------------------------------------------------------------------------------------------------- */

static bool is_exact(const ar_dump *d)
{
    const char *numerics = ar_dump_metadata(d, "numerics");
    return numerics && strcmp(numerics, "exact") == 0;
}

static ar_status begin_report(ari_verifying *v)
{
    const ar_verify_options *o = v->o;
    AR_TRY(ARI_ALLOC_ZERO(&v->report, 1, "a report"));
    ar_verify_report *r = v->report;
    r->rule = o->rule;
    r->ulp = o->ulp;
    r->rtol = o->rtol;
    r->atol = o->atol;
    char *reference = strdup(o->reference), *candidate = strdup(o->other);
    r->reference = reference;
    r->other = candidate;
    if (!reference || !candidate)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a report");
    const char *allows = v->allowed ? ar_dump_metadata(v->allowed, "anyrank.allows") : NULL;
    ari_printable(r->allows, sizeof r->allows, allows ? allows : "");
    for (int k = 0; k < 2; k++) {
        const char *unwritten = ar_dump_metadata(v->dump[k], "anyrank.left_out");
        ari_printable(r->unwritten[k], sizeof r->unwritten[k], unwritten ? unwritten : "");
    }
    r->exact_numerics = is_exact(v->dump[0]) && is_exact(v->dump[1]);
    r->ranks = ar_dump_ranks(v->dump[1]);
    r->mesh = *ar_dump_mesh(v->dump[1]);
    return AR_OK;
}

static ar_status run_comparison(ari_verifying *v)
{
    const uint64_t start_ns = ari_now_ns();
    AR_TRY(open_dumps(v));
    AR_TRY(begin_report(v));
    AR_TRY(ari_verify_unwrap(v));
    AR_TRY(verify_unstack(v));
    AR_TRY(verify_samples(v));
    AR_TRY(ari_verify_formats(v));
    AR_TRY(ari_verify_match(v));
    AR_TRY(ari_verify_scan(v));
    AR_TRY(count_rows(v));
    AR_TRY(ari_verify_refuse_dead(v));
    v->report->seconds = (double)(ari_now_ns() - start_ns) / 1e9;
    return AR_OK;
}

static void comparison_end(ari_verifying *v)
{
    if (!v)
        return;
    ari_arena_end(&v->arena, NULL);
    ar_dump_close(v->allowed);
    ar_dump_close(v->dump[1]);
    ar_dump_close(v->dump[0]);
    free(v);
}

ar_status ar_verify(ar_verify_report **out, const ar_verify_options *o)
{
    AR_TRY(check_options(o));
    const int threads = ari_threads(o->threads);
    ari_verifying *v = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&v, 1, "a comparison"));
    v->options = *o;
    v->o = &v->options;
    v->threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    const ar_status st = run_comparison(v);
    ar_verify_report *r = v->report;
    if (st != AR_OK || r->same) {
        comparison_end(v);
        v = NULL;
    }
    if (st != AR_OK) {
        ar_verify_report_destroy(r);
        return st;
    }
    r->comparison = v;
    *out = r;
    return AR_OK;
}

/* Frees text that the report owns and readers see as const. */
static void free_text(const char *text)
{
    char *writable = NULL;
    memcpy(&writable, &text, sizeof writable);
    free(writable);
}

void ar_verify_report_destroy(ar_verify_report *r)
{
    if (!r)
        return;
    comparison_end(r->comparison);
    for (size_t i = 0; i < r->rows; i++) {
        free_text(r->row[i].name);
        free(r->row[i].map.cell);
    }
    free(r->row);
    free(r->worst_order);
    free_text(r->reference);
    free_text(r->other);
    free(r);
}
