/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/verify.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/atomic_file.h"
#include "ref/core/clock.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/core/wait.h"
#include "verify/dumps/report.h"
#include "verify/dumps/verify_impl.h"

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
                          other = {.map = o->map, .all_matched = o->all_matched};
    AR_TRY(ar_dump_open(&v->dump[0], o->reference, &reference));
    AR_TRY(ar_dump_open(&v->dump[1], o->other, &other));
    if (o->rule == AR_VERIFY_SENSITIVITY)
        return ar_dump_open(&v->allowed, o->allowed, NULL);
    return AR_OK;
}

/* --- totals ------------------------------------------------------------------------------------------------------- */

/* Differences have a size, or they are of another kind and come after those that have: dtypes, shapes, copies. */
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

/* Which of two rows is worse; equally bad ones in execution order. */
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
    r->first_different = r->first;
    r->same = r->explained = r->first == SIZE_MAX;
    for (size_t i = 0; i < v->pairs; i++) {
        for (int k = 0; k < 2; k++)
            r->bytes += v->pair[i].side[k]->count * ar_dtype_bits(v->pair[i].side[k]->dtype) / 8;
    }
    AR_TRY(rank_rows(r, &v->arena));
    if (r->different > 0)
        r->worst = r->worst_order[0];
    return AR_OK;
}

/* --- the report --------------------------------------------------------------------------------------------------- */

static ar_status begin_report(ari_verifying *v)
{
    const ar_verify_options *o = v->o;
    AR_TRY(ARI_ALLOC_ZERO(&v->report, 1, "a report"));
    ar_verify_report *r = v->report;
    r->rule = o->rule;
    r->ulp = o->ulp;
    r->rtol = o->rtol;
    r->atol = o->atol;
    char *reference = strdup(o->reference), *other = strdup(o->other);
    r->reference = reference;
    r->other = other;
    if (!reference || !other)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a report");
    const char *allows = v->allowed ? ar_dump_metadata(v->allowed, "anyrank.allows") : NULL;
    ari_printable(r->allows, sizeof r->allows, allows ? allows : "");
    for (int k = 0; k < 2; k++) {
        const char *unwritten = ar_dump_metadata(v->dump[k], "anyrank.left_out");
        ari_printable(r->unwritten[k], sizeof r->unwritten[k], unwritten ? unwritten : "");
    }
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
    AR_TRY(ari_verify_unstack(v));
    AR_TRY(ari_verify_samples(v));
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

ar_status ar_verify_compare(ar_verify_report **gives, const ar_verify_options *o)
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
    *gives = r;
    return AR_OK;
}

ar_status ar_verify_explain(ar_verify_report *r)
{
    if (!r)
        return ar_error_set(AR_ERR_ARG, "ar_verify_explain: no report");
    if (r->explained)
        return AR_OK;
    if (!r->comparison)
        return ar_error_set(AR_ERR_ARG, "ar_verify_explain: a report is explained once");
    const uint64_t start_ns = ari_now_ns();
    const ar_status st = ari_verify_explain_rows(r->comparison);
    comparison_end(r->comparison);
    r->comparison = NULL;
    r->explained = st == AR_OK;
    r->seconds += (double)(ari_now_ns() - start_ns) / 1e9;
    return st;
}

ar_status ar_verify(ar_verify_report **gives, const ar_verify_options *o)
{
    ar_verify_report *r = NULL;
    AR_TRY(ar_verify_compare(&r, o));
    const ar_status st = ar_verify_explain(r);
    if (st == AR_OK)
        *gives = r;
    else
        ar_verify_report_destroy(r);
    return st;
}

/* Frees text that the report owns and its readers see as const. */
static void free_text(const char *text)
{
    char *own = NULL;
    memcpy(&own, &text, sizeof own);
    free(own);
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
