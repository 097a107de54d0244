/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "cli/options/args.h"
#include "cli/shared/table.h"
#include "cli/verify/report.h"
#include "verify/sketches/sketches.h"

static const char *const states[] = {"same", "DIFFERENT", "SHAPE", "DTYPE", "MISSING", "UNEXPECTED", "COPIES"};

/* The difference in parts of the reference's size; infinite where that is 0. */
static double share_of(const ari_sketch_row *row)
{
    return row->d.norm_a > 0.0 ? row->d.norm / row->d.norm_a : row->d.norm > 0.0 ? (double)INFINITY : 0.0;
}

static bool is_factor(const ar_sketch_difference *d)
{
    return d->factor_left < 0.1 && fabs(d->factor - 1.0) > 1e-9;
}

/* What the first tensor that differs has: the size of the difference, its factor, its place. */
static void print_first(FILE *to, const ari_sketch_row *row)
{
    const ar_sketch_difference *d = &row->d;
    fprintf(to, "%s: ", ARI_SHOW(row->name));
    if (row->state == AR_VERIFY_MISSING || row->state == AR_VERIFY_UNEXPECTED) {
        fprintf(to, "only %s has it\n", row->state == AR_VERIFY_MISSING ? "the reference" : "the other run");
        return;
    }
    if (row->state == AR_VERIFY_SHAPE || row->state == AR_VERIFY_DTYPE) {
        fprintf(to, "%s %s in the reference, %s %s in the other run\n", ar_dtype_name(row->side[0]->dtype),
                ARI_SHOW_SHAPE(row->side[0]->ndim, row->side[0]->shape), ar_dtype_name(row->side[1]->dtype),
                ARI_SHOW_SHAPE(row->side[1]->ndim, row->side[1]->shape));
        return;
    }
    if (row->state == AR_VERIFY_REPLICAS)
        fprintf(to, "rank %d has another copy than the ranks before it", row->differing);
    else
        fprintf(to, "off by %.3g %% of its size", 100.0 * (is_factor(d) ? fabs(d->factor - 1.0) : share_of(row)));
    if (is_factor(d))
        fprintf(to, ", as a whole the reference times %.6g", d->factor);
    fprintf(to, "\n  where      %zu of %zu blocks of elements, most in [%zu, %zu), %.3g %% of it", d->blocks,
            row->side[0]->blocks, row->first, row->first + row->elements, 100.0 * d->block_share);
    if (d->rows > 0)
        fprintf(to, "; %zu of %zu groups of %zu rows, the first from row %zu on", d->rows, row->side[0]->rows,
                row->side[0]->row / row->side[0]->shape[row->side[0]->ndim - 1],
                d->row * (row->side[0]->row / row->side[0]->shape[row->side[0]->ndim - 1]));
    fprintf(to, "\n  estimated  from 32 sums a block, with a standard deviation of %.2g %%\n", 100.0 * d->norm_error);
    fprintf(
        to,
        "  in full    anyrank.capture(model, FOLDER, only=[\"%.*s\"], steps={%d}) in both runs, then anyrank verify\n",
        (int)strcspn(row->name, "@"), ARI_SHOW(row->name), row->step);
}

static ar_status print_rows(FILE *to, const ari_sketch_report *r, size_t most)
{
    static const ari_column columns[] = {{"tensor", ARI_LEFT},  {"", ARI_LEFT},         {"dtype, shape", ARI_LEFT},
                                         {"off by", ARI_RIGHT}, {"allowed", ARI_RIGHT}, {"factor", ARI_RIGHT},
                                         {"blocks", ARI_RIGHT}};
    ari_table t = ARI_TABLE(columns);
    size_t n = 0;
    for (size_t i = 0; i < r->rows; i++) {
        const ari_sketch_row *row = &r->row[i];
        const ar_sketch *s = row->side[0] != NULL ? row->side[0] : row->side[1];
        if (row->state == AR_VERIFY_SAME || n++ >= most)
            continue;
        ari_table_row(&t, "%s\t%s\t%s %s", ARI_SHOW(row->name), states[row->state], ar_dtype_name(s->dtype),
                      ARI_SHOW_SHAPE(s->ndim, s->shape));
        if (row->state == AR_VERIFY_DIFFERENT || row->state == AR_VERIFY_REPLICAS)
            ari_table_row(&t, "%.3g\t%.2g\t%.6g\t%zu", share_of(row),
                          row->d.norm_a > 0.0 ? row->allowed / row->d.norm_a : 0.0, row->d.factor, row->d.blocks);
        else
            ari_table_row(&t, "\t\t\t");
    }
    if (n > 0 && most > 0)
        fprintf(to, "\ntensors that differ, in execution order, in parts of their size:\n");
    const ar_status st = ari_table_end(&t, n > 0 && most > 0 ? to : NULL, 2);
    if (n > most)
        fprintf(to, "  .. and %zu more (--max-report %zu prints all)\n", n - most, n);
    return st;
}

ar_status ari_verify_sketches(int *exit_code, const ar_verify_options *o, const ari_common *common, size_t most)
{
    ARI_ENDED(ari_sketch_report_fini) ari_sketch_report r = {0};
    AR_TRY(ari_sketches_compare(&r, o));
    *exit_code = r.different == 0 && r.unjudged == 0 ? ARI_EXIT_SAME : ARI_EXIT_DIFFERENT;
    if (ari_wants_text(common)) {
        if (r.first < r.rows)
            print_first(stdout, &r.row[r.first]);
        AR_TRY(print_rows(stdout, &r, most));
        for (size_t i = 0, n = 0; i < r.rows; i++) {
            if (r.row[i].unjudged[0] != '\0' && n++ < most)
                printf("  not compared: %s: %s\n", ARI_SHOW(r.row[i].name), r.row[i].unjudged);
        }
        if (r.left_out > r.reordered)
            printf("  left out: %zu tensors that a run says have no place in a full one\n", r.left_out - r.reordered);
        if (r.reordered > 0)
            printf("  left out: %zu activations, as the runs have the same samples in other orders\n", r.reordered);
        if (r.different > 0)
            printf("different: %zu of %zu tensors, by their sketches\n", r.different, r.rows);
        else
            printf("%s: %zu tensors, by their sketches\n", r.unjudged > 0 ? "cannot judge" : "same",
                   r.rows - r.unjudged);
    }
    json_t *report = common->json ? ari_sketch_report_json(&r, o) : NULL;
    return common->json ? ari_json_end(ari_json_whole(ari_json_begin("verify"), report), common) : AR_OK;
}
