/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "cli/options/args.h"
#include "cli/shared/table.h"
#include "cli/verify/report.h"
#include "verify/sketches/sketches.h"

static const char *const states[] = {"same", "DIFFERENT", "SHAPE", "DTYPE", "MISSING", "UNEXPECTED", "COPIES"};

/* Returns the difference relative to the reference's size; infinite if that is 0. */
static double share_of(const ari_sketch_row *row)
{
    return row->d.norm_a > 0.0 ? row->d.norm / row->d.norm_a : row->d.norm > 0.0 ? (double)INFINITY : 0.0;
}

static bool is_factor(const ar_sketch_difference *d)
{
    return d->factor_left < 0.1 && fabs(d->factor - 1.0) > 1e-9;
}

/* Prints the blocks and rows in which two tensors differ. */
static void print_place(FILE *out, const ari_sketch_row *row)
{
    const ar_sketch_difference *d = &row->d;
    const ar_sketch *a = row->side[0]->sketch;
    fprintf(out, "\n  where      %zu of %zu blocks of elements, most in [%zu, %zu), %.3g %% of it", d->blocks,
            a->blocks, row->first_element, row->first_element + row->elements, 100.0 * d->block_share);
    if (d->rows > 0) {
        const size_t rows = a->row / a->shape[a->ndim - 1];
        fprintf(out, "; %zu of %zu groups of %zu rows, the first from row %zu on", d->rows, a->rows, rows,
                d->row * rows);
    }
    fprintf(out, "\n  estimated  from 32 sums a block, with a standard deviation of %.2g %%\n", 100.0 * d->norm_error);
}

static void print_values(FILE *out, const ari_sketch_row *row)
{
    const ar_sketch_difference *d = &row->d;
    const ar_sketch *const side[] = {row->side[0]->sketch, row->side[1]->sketch};
    if (row->state == AR_VERIFY_REPLICAS) {
        const ar_sketch_difference *copies = &row->copies_d;
        fprintf(out, "rank %d has another copy than rank %d, off by %.3g %% of its size\n", row->copies->rank,
                row->copies->first_rank,
                copies->norm_a > 0.0 ? 100.0 * copies->norm / copies->norm_a : (double)INFINITY);
        return;
    }
    if (side[0]->nan != side[1]->nan || side[0]->inf != side[1]->inf)
        fprintf(out,
                "%" PRIu64 " NaN and %" PRIu64 " infinities in the reference, %" PRIu64 " and %" PRIu64
                " in the other run",
                side[0]->nan, side[0]->inf, side[1]->nan, side[1]->inf);
    else if (side[0]->places != side[1]->places && !side[0]->summed && !side[1]->summed)
        fprintf(out, "NaN or infinities at other places, or of the other sign, than in the reference");
    else
        fprintf(out, "off by %.3g %% of its size", 100.0 * (is_factor(d) ? fabs(d->factor - 1.0) : share_of(row)));
    if (is_factor(d))
        fprintf(out, ", as a whole the reference times %.6g", d->factor);
    print_place(out, row);
}

/* Prints the first tensor that differs: the size of the difference, its factor and its location. */
static void print_first(FILE *out, const ari_sketch_row *row)
{
    fprintf(out, "%s: ", ARI_SHOW(row->name));
    if (row->state == AR_VERIFY_MISSING || row->state == AR_VERIFY_UNEXPECTED) {
        const char *run = row->state == AR_VERIFY_MISSING ? "the reference" : "the other run";
        fprintf(out, "only %s has %s\n", run,
                row->lost_gradient ? "this gradient, though both train the parameter" : "it");
        return;
    }
    if (row->state == AR_VERIFY_SHAPE || row->state == AR_VERIFY_DTYPE) {
        const ar_sketch *a = row->side[0]->sketch, *b = row->side[1]->sketch;
        fprintf(out, "%s %s in the reference, %s %s in the other run\n", ar_dtype_name(a->dtype),
                ARI_SHOW_SHAPE(a->ndim, a->shape), ar_dtype_name(b->dtype), ARI_SHOW_SHAPE(b->ndim, b->shape));
        return;
    }
    print_values(out, row);
    fprintf(
        out,
        "  in full    anyrank.capture(model, FOLDER, only=[\"%.*s\"], steps={%d}) in both runs, then anyrank verify\n",
        (int)strcspn(row->name, "@"), ARI_SHOW(row->name), row->step);
}

static ar_status print_rows(FILE *out, const ari_sketch_report *r, size_t max_report)
{
    static const ari_column columns[] = {{"tensor", ARI_LEFT},  {"", ARI_LEFT},         {"dtype, shape", ARI_LEFT},
                                         {"off by", ARI_RIGHT}, {"allowed", ARI_RIGHT}, {"factor", ARI_RIGHT},
                                         {"blocks", ARI_RIGHT}};
    ari_table t = ARI_TABLE(columns);
    size_t n = 0;
    for (size_t i = 0; i < r->rows; i++) {
        const ari_sketch_row *row = &r->row[i];
        const ari_sketched *side = row->side[0] != NULL ? row->side[0] : row->side[1];
        if (row->state == AR_VERIFY_SAME || n++ >= max_report)
            continue;
        ari_table_row(&t, "%s\t%s\t%s %s", ARI_SHOW(row->name), states[row->state], ar_dtype_name(side->sketch->dtype),
                      ARI_SHOW_SHAPE(side->sketch->ndim, side->sketch->shape));
        if (row->state == AR_VERIFY_DIFFERENT || row->state == AR_VERIFY_REPLICAS)
            ari_table_row(&t, "%.3g\t%.2g\t%.6g\t%zu", share_of(row),
                          row->d.norm_a > 0.0 ? row->allowed.norm / row->d.norm_a : 0.0, row->d.factor, row->d.blocks);
        else
            ari_table_row(&t, "\t\t\t");
    }
    if (n > 0 && max_report > 0)
        fprintf(out, "\ntensors that differ, in execution order, in parts of their size:\n");
    const ar_status st = ari_table_end(&t, n > 0 && max_report > 0 ? out : NULL, 2);
    if (n > max_report)
        fprintf(out, "  .. and %zu more (--max-report %zu prints all)\n", n - max_report, n);
    return st;
}

/* Prints "not compared: 3 steps that only the reference has: 5, 6, 7". */
static void print_steps(FILE *out, const ari_step_list *steps, const char *which)
{
    enum { MOST = 8 };
    if (steps->count == 0)
        return;
    fprintf(out, "  not compared: %zu step%s that %s:", steps->count, ARI_PLURAL(steps->count), which);
    for (size_t i = 0; i < steps->count && i < MOST; i++)
        fprintf(out, "%s %d", i > 0 ? "," : "", steps->step[i]);
    fprintf(out, "%s\n", steps->count > MOST ? ", .." : "");
}

static void print_notes(FILE *out, const ari_sketch_report *r, size_t max_report)
{
    size_t n = 0;
    for (size_t i = 0; i < r->rows; i++) {
        const ari_sketch_row *row = &r->row[i];
        if (row->unjudged[0] != '\0' && !row->left_out && n++ < max_report)
            fprintf(out, "  not compared: %s: %s\n", ARI_SHOW(row->name), row->unjudged);
    }
    if (n > max_report)
        fprintf(out, "  .. and %zu more that were not compared\n", n - max_report);
    print_steps(out, &r->alone[0], "only the reference has");
    print_steps(out, &r->alone[1], "only the other run has");
    print_steps(out, &r->incomplete[0], "some ranks of the reference have no record of");
    print_steps(out, &r->incomplete[1], "some ranks of the other run have no record of");
    if (r->renamed > 0)
        fprintf(out, "  matched without wrappers: %zu tensors (%s%s%s)\n", r->renamed, ARI_SHOW(r->wrappers[0]),
                r->wrappers[0][0] != '\0' && r->wrappers[1][0] != '\0' ? "; " : "", ARI_SHOW(r->wrappers[1]));
    if (r->skipped[0] + r->skipped[1] > 0)
        fprintf(out, "  not compared: %zu tensor%s only in the reference, %zu only in the other run\n", r->skipped[0],
                ARI_PLURAL(r->skipped[0]), r->skipped[1]);
    if (r->left_out > r->reordered)
        fprintf(out, "  left out: %zu tensors that a run says have no place in a full one\n",
                r->left_out - r->reordered);
    if (r->reordered > 0)
        fprintf(out, "  left out: %zu activations, as the runs have the same samples in other orders\n", r->reordered);
}

ar_status ari_verify_sketches(int *exit_code, const ar_verify_options *o, const ari_common *common, size_t max_report)
{
    ARI_ENDED(ari_sketch_report_fini) ari_sketch_report r = {0};
    AR_TRY(ari_sketches_compare(&r, o));
    *exit_code = r.different == 0 && r.unjudged == 0 ? ARI_EXIT_SAME : ARI_EXIT_DIFFERENT;
    if (ari_prints_text(common)) {
        if (r.first_row < r.rows)
            print_first(stdout, &r.row[r.first_row]);
        AR_TRY(print_rows(stdout, &r, max_report));
        print_notes(stdout, &r, max_report);
        if (r.different > 0)
            printf("different: %zu of %zu tensors, by their sketches\n", r.different, r.rows - r.left_out);
        else
            printf("%s: %zu tensors in %zu step%s, by their sketches\n", r.unjudged > 0 ? "cannot judge" : "same",
                   r.compared, r.common_steps, ARI_PLURAL(r.common_steps));
    }
    json_t *report = common->json ? ari_sketch_report_json(&r, o) : NULL;
    return common->json ? ari_json_end(ari_json_merge(ari_json_begin("verify"), report), common) : AR_OK;
}
