/* SPDX-License-Identifier: Apache-2.0 */
/* A check for people: one row a layout, and what a run differs in. */
#include "cli/check/check.h"

#include <math.h>
#include <string.h>

#include "cli/shared/command.h"
#include "cli/shared/table.h"
#include "ref/core/fault_private.h"
#include "ref/core/text.h"
#include "ref/io/hash.h"
#include "ref/models/parallel_private.h"
#include "ref/models/stages.h"
#include "sim/sim_private.h"
#include "verify/run/run.h"

ar_check_result ari_check_worst(const ari_checked *checked, size_t n)
{
    ar_check_result worst = AR_CHECK_SAME;
    for (size_t i = 0; i < n; i++) {
        const ar_check_report *r = checked[i].report;
        const bool failed = r->has_gradcheck && !r->gradcheck.ok;
        worst = r->result > worst ? r->result : worst;
        worst = failed && worst < AR_CHECK_DIFFERENT ? AR_CHECK_DIFFERENT : worst;
    }
    return worst;
}

#define LAYOUT_OF(u, r) ARI_LAYOUT(&(u)->parallel, (r)->batch + (r)->padding)

/* --- above the table ---------------------------------------------------------------------------------------------- */

/* "5.929705 5.801244 5.703311", or the first two and the last. */
static void print_losses(FILE *to, const float *loss, int n)
{
    enum { MOST_SHOWN = 4 };
    for (int i = 0; i < n; i++) {
        if (n <= MOST_SHOWN || i < 2 || i + 1 == n)
            fprintf(to, " %.6f", (double)loss[i]);
        else if (i == 2)
            fprintf(to, " ..");
    }
}

static void print_notes(FILE *to, const ari_checked *c)
{
    const ar_check_report *r = c->report;
    ari_dropout_note(to, &r->config, &c->run);
    if (r->kinks > 0)
        fprintf(to, "note: %s argument%s of relu may be on either side of 0, by the allowance: so may the slope\n",
                ARI_COUNT(r->kinks), ARI_PLURAL(r->kinks));
    const char *scores = ari_scores_note(r->seq, r->numerics);
    if (scores)
        fprintf(to, "note: %s\n", scores);
    if (r->config.vocab < 256)
        fprintf(to, "note: bytes of the text are taken modulo the vocabulary of %zu\n", r->config.vocab);
}

static void print_head(FILE *to, const ari_checked *c)
{
    const ar_check_report *r = c->report;
    fprintf(to, "\n%s: %s parameters (%s), %zu sequence%s of %zu token%s, ", r->config.name, ARI_COUNT(r->parameters),
            r->fresh ? "fresh weights" : "weights of the folder", r->batch, ARI_PLURAL(r->batch), r->seq,
            ARI_PLURAL(r->seq));
    if (r->documents > 1)
        fprintf(to, "up to %zu documents in each, ", r->documents);
    if (r->padding > 0)
        fprintf(to, "%zu row%s of padding in each layout, ", r->padding, ARI_PLURAL(r->padding));
    if (r->steps > 0)
        fprintf(to, "%d step%s of ", r->steps, ARI_PLURAL(r->steps));
    ari_step_print(to, &c->run);
    fprintf(to, ", %s numerics", ari_numerics_names[r->numerics]);
    ari_storage_print(to, r->precision, 0);
    fprintf(to, "\n");
    ari_plan_print(to, &c->run.plan);
    fprintf(to, "baseline on one rank, independent code: loss");
    print_losses(to, r->loss, r->steps > 1 ? r->steps : 1);
    fprintf(to, ", %s", ARI_SECONDS(r->baseline_seconds));
    if (!isnan(r->max_error_vs_f64))
        fprintf(to, "; worst error against binary64 %.1e of a gradient's largest element", r->max_error_vs_f64);
    fprintf(to, "\n");
    ari_ranks_print(to, &c->run, r->runs == 1 ? ar_parallel_world(&r->run[0].parallel) : 0);
    print_notes(to, c);
}

static ar_status print_gradcheck(FILE *to, const ar_gradcheck *g)
{
    static const ari_column columns[] = {
        {"step size", ARI_RIGHT}, {"worst relative error", ARI_RIGHT}, {"in", ARI_LEFT}};
    ari_table t = ARI_TABLE(columns);
    fprintf(to,
            "gradcheck: the binary64 baseline against central differences, on %zu sequence%s of %zu token%s; %zu "
            "element%s of %zu parameter%s\n",
            g->batch, ARI_PLURAL(g->batch), g->seq, ARI_PLURAL(g->seq), g->elements, ARI_PLURAL(g->elements),
            g->parameters, ARI_PLURAL(g->parameters));
    for (size_t i = 0; i < g->rows; i++) {
        ari_table_row(&t, "%.0e\t%.1e\t%s%s", g->row[i].step, g->row[i].max_relative_error, g->row[i].worst_tensor,
                      i == g->best ? "  (best)" : "");
    }
    return ari_table_end(&t, to, 2);
}

/* --- the table ---------------------------------------------------------------------------------------------------- */

static const char *result_text(const ar_check_report *r, const ar_check_run *u)
{
    if (u->result == AR_CHECK_ERROR)
        return "ERROR";
    if (u->result == AR_CHECK_DIFFERENT)
        return "DIFFERENT";
    if (u->result == AR_CHECK_VACUOUS)
        return "VACUOUS";
    if (u->result == AR_CHECK_MISPREDICTED)
        return "prediction wrong";
    return r->numerics == AR_NUMERICS_NATIVE ? "within" : "same bits";
}

static ar_status print_rows(FILE *to, const ar_check_report *r)
{
    const bool native = r->numerics == AR_NUMERICS_NATIVE;
    const ari_column columns[] = {{"layout", ARI_LEFT},
                                  {"tensors", ARI_RIGHT},
                                  {"elements", ARI_RIGHT},
                                  {native ? "outside" : "different", ARI_RIGHT},
                                  {native ? "worst of allowed" : "worst ulp", ARI_RIGHT},
                                  {"bytes moved", ARI_RIGHT},
                                  {"predicted", ARI_RIGHT},
                                  {native ? "worst in" : "gradients", ARI_LEFT},
                                  {"time", ARI_RIGHT},
                                  {"result", ARI_LEFT}};
    ari_table t = ARI_TABLE(columns);
    for (size_t i = 0; i < r->runs; i++) {
        const ar_check_run *u = &r->run[i];
        ari_table_row(&t, "%s\t%zu\t%s\t%s", LAYOUT_OF(u, r), u->tensors, ARI_COUNT(u->elements),
                      ARI_COUNT(u->elements_different));
        if (native)
            ari_table_cell(&t, "%.3g", u->max_ratio);
        else
            ari_table_cell(&t, "%s", ARI_COUNT(u->max_ulp));
        ari_table_row(&t, "%s\t%s\t%.*s\t%s\t%s", ARI_COUNT(u->bytes_counted),
                      u->bytes_counted == u->bytes_predicted ? "the same" : ARI_COUNT(u->bytes_predicted),
                      native ? (int)sizeof u->ratio_tensor : 12, native ? u->ratio_tensor : u->gradients_hash,
                      ARI_SECONDS(u->seconds), result_text(r, u));
    }
    return ari_table_end(&t, to, 2);
}

/* Nobody should read the traffic of exact sums as that of a run in bf16. */
static void print_bf16(FILE *to, const ar_check_report *r)
{
    double least = (double)INFINITY, most = 0.0;
    for (size_t i = 0; i < r->runs; i++) {
        const ar_check_run *u = &r->run[i];
        const double times = u->bytes_bf16 > 0 ? (double)u->bytes_predicted / (double)u->bytes_bf16 : 0.0;
        most = fmax(most, times);
        least = times > 0.0 ? fmin(least, times) : least;
    }
    if (r->numerics == AR_NUMERICS_NATIVE || !(most > 0.0))
        return;
    fprintf(to, "  bytes moved are those of exact sums; a run in bf16 moves ");
    if (r->runs == 1)
        fprintf(to, "%s, %.1f times less\n", ARI_COUNT(r->run[0].bytes_bf16), most);
    else
        fprintf(to, "%.1f to %.1f times less\n", least, most);
}

static void print_hash(FILE *to, const char *of, const char *hash, size_t ended, size_t other, const ar_check_report *r)
{
    if (other == 0)
        fprintf(to, "  %s: one hash, %.12s, on one rank and in %s\n", of, hash,
                r->runs == 1 ? "this layout" : "every layout");
    else
        fprintf(to, "  %s: hash %.12s on one rank, another in %zu of %zu run%s\n", of, hash, other, ended,
                ARI_PLURAL(ended));
}

/* States whether all runs end with the baseline's outputs and weights. */
static void print_hashes(FILE *to, const ar_check_report *r)
{
    size_t ended = 0, outputs = 0, weights = 0;
    for (size_t i = 0; i < r->runs; i++) {
        ended += r->run[i].error == NULL;
        outputs += r->run[i].error == NULL && strcmp(r->run[i].outputs_hash, r->outputs_hash) != 0;
        weights += r->run[i].error == NULL && strcmp(r->run[i].weights_hash, r->weights_hash) != 0;
    }
    if (r->numerics == AR_NUMERICS_NATIVE || ended == 0)
        return;
    print_hash(to, r->steps > 1 ? "outputs of the last step" : "outputs", r->outputs_hash, ended, outputs, r);
    print_hash(to, r->steps == 0 ? "initial weights" : "weights after the last step", r->weights_hash, ended, weights,
               r);
}

/* With the memory of a rank: what it holds. */
static void print_shapes(FILE *to, const ar_check_report *r)
{
    for (size_t i = 0; i < r->runs; i++) {
        const ar_check_run *u = &r->run[i];
        if (u->shapes > 0 && !u->shape_difference[0])
            fprintf(to, "  %s: all %s parts of tensors have the layout's shapes\n", LAYOUT_OF(u, r),
                    ARI_COUNT(u->shapes));
    }
}

/* Each number once where it is the predicted one. */
static ar_status print_memory(FILE *to, const ari_checked *c)
{
    const ar_check_report *r = c->report;
    static const ari_column columns[] = {{"memory of a rank", ARI_LEFT},
#define COLUMN(field, json, title) {title, ARI_RIGHT},
                                         AR_RANK_MEMORY_TABLE(COLUMN)
#undef COLUMN
    };
    ari_table t = ARI_TABLE(columns);
    for (size_t i = 0; i < r->runs; i++) {
        const ar_check_run *u = &r->run[i];
        ari_table_cell(&t, "%s", LAYOUT_OF(u, r));
#define CELL(field, json, title) ari_table_cell(&t, "%s", ARI_BYTES(u->memory.field));
        AR_RANK_MEMORY_TABLE(CELL)
#undef CELL
        if (!u->has_memory_predicted)
            continue;
        ari_table_cell(&t, "  predicted");
#define CELL(field, json, title) \
    ari_table_cell(&t, "%s",     \
                   u->memory.field == u->memory_predicted.field ? "the same" : ARI_BYTES(u->memory_predicted.field));
        AR_RANK_MEMORY_TABLE(CELL)
#undef CELL
    }
    fprintf(to, "\n");
    return ari_table_end(&t, to, 2);
}

static ar_status print_predicted(FILE *to, const ari_checked *c)
{
    const ar_check_report *r = c->report;
    ari_table t = ari_predicted_begin(to, c->watch);
    for (size_t i = 0; i < r->runs; i++)
        ari_predicted_row(&t, &r->run[i].parallel, r->batch + r->padding,
                          r->run[i].has_predicted ? &r->run[i].predicted : NULL);
    return ari_table_end(&t, to, 2);
}

/* The seeds that decided which rank goes on, and those that make a run go wrong. */
static void print_schedules(FILE *to, const ar_check_report *r)
{
    for (size_t i = 0; i < r->runs && r->run[0].schedules > 0; i++) {
        const ar_check_run *u = &r->run[i];
        const unsigned long long last = u->schedule_seed, first = last - (u->schedules - 1);
        if (u->result >= AR_CHECK_DIFFERENT)
            fprintf(to, "  %s: not the same under schedule %llu; --schedule %llu replays it\n", LAYOUT_OF(u, r), last,
                    last);
        else
            fprintf(to, "  %s: the same under schedules %llu to %llu\n", LAYOUT_OF(u, r), first, last);
    }
}

/* --- what a run differs in ---------------------------------------------------------------------------------------- */

static const char *pass_text(const char *pass)
{
    static const char *const texts[][2] = {{"init", "initial values"},
                                           {"forward", "forward pass"},
                                           {"backward", "backward pass"},
                                           {"clip", "clipping"},
                                           {"update", "update of the weights"}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        if (strcmp(pass, texts[i][0]) == 0)
            return texts[i][1];
    }
    return pass;
}

static void print_difference(FILE *to, const ar_check_report *r, const ar_check_run *u)
{
    const ar_first_difference *f = &u->first;
    const bool native = r->numerics == AR_NUMERICS_NATIVE;
    fprintf(to, "\n  %s: the first tensor that %s is %s\n", LAYOUT_OF(u, r),
            native ? "differs by more than is allowed" : "differs", f->tensor);
    fprintf(to, "    where     step %d, %s", f->step, pass_text(f->pass));
    if (f->layer >= 0)
        fprintf(to, ", layer %d", f->layer);
    if (f->rank >= 0) {
        char rank[AR_RANK_TEXT];
        ari_parallel_rank_text(rank, &u->parallel, r->config.layers, f->rank);
        fprintf(to, "; element %s = %s of %s\n", ARI_SHOW_INDEX(f->ndim, f->index),
                ARI_SHOW_INDEX(f->local_ndim, f->local_index), rank);
        fprintf(to, "    values    %.9g on one rank, %.9g here (%s ulp)\n", (double)f->reference, (double)f->actual,
                ARI_COUNT(f->ulp));
    } else {
        fprintf(to, "\n");
    }
    fprintf(to, "    how many  %s of %s elements; ", ARI_COUNT(f->elements_different), ARI_COUNT(f->elements));
    if (u->error)
        fprintf(to, "the run ended before all tensors were compared\n");
    else
        fprintf(to, "%zu of %zu tensors differ in all\n", u->tensors_different, u->tensors);
    if (f->pattern[0])
        fprintf(to, "    pattern   %s\n", f->pattern);
    if (f->hint[0])
        fprintf(to, "    hint      %s\n", f->hint);
    if (ari_cause_known(f->cause))
        fprintf(to, "    cause     %s\n", f->cause);
    if (f->look[0])
        fprintf(to, "    look at   %s\n", f->look);
    if (f->unexplained[0])
        fprintf(to, "    no cause  %s\n", f->unexplained);
}

/* Prints a layout's message, and the coordinates of the ranks that it names. */
static void print_named(FILE *to, const char *margin, const char *layout, const char *message, const ar_check_run *u,
                        const ar_check_report *r)
{
    char text[2048];
    ari_name_ranks(text, sizeof text, message, &u->parallel, r->config.layers);
    fprintf(to, "%s%s%s%s\n", margin, layout, layout[0] ? ": " : "", text);
}

static const char *equality_of(const ar_check_report *r)
{
    return r->numerics == AR_NUMERICS_NATIVE ? "within the allowance" : "bits equal";
}

/* Prints predictions for the model and layout that did not come true. */
static void print_mispredicted(FILE *to, const ar_check_report *r, const ar_check_run *u)
{
    char head[160];
    if (u->result == AR_CHECK_MISPREDICTED)
        snprintf(head, sizeof head, "%s: %s; prediction wrong", LAYOUT_OF(u, r), equality_of(r));
    else
        snprintf(head, sizeof head, "%s", LAYOUT_OF(u, r));
    if (!u->error && u->bytes_counted != u->bytes_predicted)
        fprintf(to,
                "\n  %s: %s bytes were moved between ranks, the layout predicts %s: a collective is missing or one too "
                "many\n",
                head, ARI_COUNT(u->bytes_counted), ARI_COUNT(u->bytes_predicted));
    if (u->call_difference[0])
        print_named(to, "    ", "", u->call_difference, u, r);
    if (u->memory_difference[0])
        print_named(to, "\n  ", head, u->memory_difference, u, r);
    if (u->shape_difference[0])
        print_named(to, "\n  ", head, u->shape_difference, u, r);
}

/* What passes --strict-predictions for lack of a prediction has not been checked by it. */
static void print_unpredicted(FILE *to, const ar_check_report *r)
{
    const char *last = NULL;
    for (size_t i = 0; r->strict_predictions && i < r->runs; i++) {
        const ar_check_run *u = &r->run[i];
        if (!u->unpredicted || u->error)
            continue;
        fprintf(to, "note: --strict-predictions cannot check memory and shapes of %s", LAYOUT_OF(u, r));
        fprintf(to, "%s%s\n", u->unpredicted == last ? ": as above" : ": ",
                u->unpredicted == last ? "" : u->unpredicted);
        last = u->unpredicted;
    }
}

static void print_vacuous(FILE *to, const ar_check_vacuous *v)
{
    if (!v->tensor[0])
        return;
    fprintf(to, "\n  on one rank already: the first tensor that holds a NaN or an infinity is %s\n", v->tensor);
    fprintf(to, "    where     step %d, %s; ", v->step, pass_text(v->pass));
    if (v->ndim > 0)
        fprintf(to, "element %s", ARI_SHOW_INDEX(v->ndim, v->index));
    fprintf(to, "%sis %g\n    how many  %s of %s elements; %zu tensor%s in all\n", v->ndim > 0 ? " " : "it ",
            (double)v->value, ARI_COUNT(v->elements_empty), ARI_COUNT(v->elements), v->tensors, ARI_PLURAL(v->tensors));
    fprintf(to, "    hint      what is computed from it is NaN whoever computes it: equal bits say nothing from there "
                "on. Look at the weights and the\n              config (an epsilon of 0, weights that overflow, a "
                "learning rate that diverges, a batch without targets)\n");
}

static void print_dump(FILE *to, const ar_check_report *r)
{
    if (!r->dump[0])
        return;
    fprintf(to, "dump: %s\n", r->dump);
    for (size_t i = 0; i < r->runs; i++) {
        if (r->run[i].dump[0])
            fprintf(to, "      %s\n", r->run[i].dump);
    }
}

ar_status ari_check_print(FILE *to, const ari_checked *c, bool memory)
{
    const ar_check_report *r = c->report;
    print_head(to, c);
    if (r->has_gradcheck)
        AR_TRY(print_gradcheck(to, &r->gradcheck));
    AR_TRY(print_rows(to, r));
    print_bf16(to, r);
    print_hashes(to, r);
    print_schedules(to, r);
    if (memory)
        AR_TRY(print_memory(to, c));
    if (memory)
        print_shapes(to, r);
    if (c->watch->timed)
        AR_TRY(print_predicted(to, c));
    print_unpredicted(to, r);
    print_dump(to, r);
    print_vacuous(to, &r->vacuous);
    for (size_t i = 0; i < r->runs; i++) {
        const ar_check_run *u = &r->run[i];
        if (u->error)
            fprintf(to, "\n  %s: the run ended in an error\n%s\n", LAYOUT_OF(u, r), u->error);
        if (u->has_difference)
            print_difference(to, r, u);
        print_mispredicted(to, r, u);
    }
    fflush(to);
    return AR_OK;
}

/* --- the verdict -------------------------------------------------------------------------------------------------- */

bool ari_check_hash(char hex[65], const ari_checked *checked, size_t n)
{
    ari_sha256 h;
    ari_sha256_init(&h);
    for (size_t i = 0; i < n; i++) {
        const ar_check_report *r = checked[i].report;
        if (r->numerics == AR_NUMERICS_NATIVE || r->result > AR_CHECK_MISPREDICTED || !r->outputs_hash[0])
            return false;
        ari_sha256_update(&h, r->outputs_hash, strlen(r->outputs_hash));
        ari_sha256_update(&h, r->gradients_hash, strlen(r->gradients_hash));
        ari_sha256_update(&h, r->weights_hash, strlen(r->weights_hash));
    }
    ari_sha256_final(&h, hex);
    return true;
}

/* All runs of all models. */
typedef struct totals {
    size_t runs, mispredicted, vacuous, different, errors;
    double max_ratio;
    const char *vacuous_from, *ratio_tensor; /* NULL: none */
    const ar_gradcheck *failed;              /* NULL: none */
} totals;

static totals count_checks(const ari_checked *checked, size_t n)
{
    totals t = {.ratio_tensor = ""};
    for (size_t i = 0; i < n; i++) {
        const ar_check_report *r = checked[i].report;
        if (r->vacuous.tensor[0])
            t.vacuous_from = r->vacuous.tensor;
        if (r->has_gradcheck && !r->gradcheck.ok)
            t.failed = &r->gradcheck;
        for (size_t k = 0; k < r->runs; k++) {
            const ar_check_run *u = &r->run[k];
            t.runs++;
            t.mispredicted += u->result == AR_CHECK_MISPREDICTED;
            t.vacuous += u->result == AR_CHECK_VACUOUS;
            t.different += u->result == AR_CHECK_DIFFERENT;
            t.errors += u->result == AR_CHECK_ERROR;
            if (u->max_ratio > t.max_ratio) {
                t.max_ratio = u->max_ratio;
                t.ratio_tensor = u->ratio_tensor;
            }
        }
    }
    return t;
}

void ari_check_print_verdict(FILE *to, const ari_checked *checked, size_t n, const char *fault)
{
    const totals t = count_checks(checked, n);
    char hash[65];
    const bool native = checked[0].report->numerics == AR_NUMERICS_NATIVE;
    const char *plural = ARI_PLURAL(t.runs);
    const bool changed = t.mispredicted + t.different + t.errors > 0;
    fprintf(to, "\n");
    if (fault)
        fprintf(to, "injected: %s (%s)\n", fault, ari_fault_text(fault));
    if (checked[0].has_net_fault) {
        char what[128];
        ari_sim_fault_describe(&checked[0].net_fault, what, sizeof what);
        fprintf(to, "transport: %s%s\n", what, changed ? "" : "; it changed nothing here");
    }
    if (ari_check_hash(hash, checked, n))
        fprintf(to, "hash of outputs, gradients and weights: %s, the same on every machine\n", hash);
    if (t.failed)
        fprintf(to, "gradcheck: FAILED, relative error %.1e in %s at the best step size\n",
                t.failed->max_relative_error, t.failed->worst_tensor);
    if (t.errors)
        fprintf(to, "check: %zu of %zu run%s ended in an ERROR, %zu DIFFERENT\n", t.errors, t.runs, plural,
                t.different);
    else if (t.different)
        fprintf(to, "check: DIFFERENT in %zu of %zu run%s\n", t.different, t.runs, plural);
    else if (t.vacuous)
        fprintf(to, "check: VACUOUS in %zu of %zu run%s: no numbers from %s on\n", t.vacuous, t.runs, plural,
                t.vacuous_from);
    else if (t.mispredicted)
        fprintf(to, "check: %s; prediction wrong in %zu of %zu run%s\n", equality_of(checked[0].report), t.mispredicted,
                t.runs, plural);
    else if (native)
        fprintf(to,
                "check: within the allowance in %zu run%s: the worst difference is %.3g of what is allowed, in %s\n",
                t.runs, plural, t.max_ratio, t.ratio_tensor);
    else if (t.runs == 1)
        fprintf(to, "check: the same bits: every tensor equals the one-rank baseline\n");
    else
        fprintf(to, "check: the same bits in all %zu runs: every tensor of every layout equals the one-rank baseline\n",
                t.runs);
}
