/* SPDX-License-Identifier: Apache-2.0 */
/* `anyrank bugs --run --numerics native`: what is left of each fault beside rounding. */
#include <math.h>

#include "cli/bugs_run.h"
#include "cli/table.h"

enum { FAULTS = AR_FAULT_COUNT - 1 };

/* What of a fault shows in a native run. */
typedef enum trace { OUTSIDE, BYTES, ERROR, BELOW, MODULE, TRACES } trace;
static const char *const trace_names[TRACES] = {"outside", "only the bytes", "ends in an error", "below rounding",
                                                "module: exact"};

static trace trace_of(const ari_bug_run *r)
{
    if (r->at.module)
        return MODULE;
    if (r->error[0])
        return ERROR;
    if (r->first.tensor[0])
        return OUTSIDE;
    return r->caught ? BYTES : BELOW;
}

bool ari_bugs_clean(const ari_bug_run *run)
{
    for (int i = 0; i < FAULTS; i++)
        if (run[i].clean != AR_CHECK_SAME)
            return false;
    return true;
}

static void ratio_cell(ari_table *t, double ratio)
{
    ari_table_cell(t, isinf(ratio) ? "no number" : ratio < 1e4 ? "%.3g" : "%.0e", ratio);
}

static ar_status add_rows(ari_table *t, const ari_bug_run *run, size_t count[TRACES])
{
    char text[256];
    for (int i = 0; i < FAULTS; i++) {
        const ari_bug_run *r = &run[i];
        const trace left = trace_of(r);
        count[left]++;
        ari_table_cell(t, "%s", ar_fault_name(r->fault));
        ari_table_cell(t, "%s", ari_bug_case_text(text, sizeof text, &r->at));
        ratio_cell(t, r->ratio_clean);
        ratio_cell(t, r->ratio);
        ari_table_cell(t, "%s", left == OUTSIDE ? r->first.tensor : "");
        ari_table_cell(t, "%s", r->clean != AR_CHECK_SAME ? "OUTSIDE WITHOUT IT" : trace_names[left]);
    }
    return AR_OK;
}

ar_status ari_bugs_print_native(FILE *to, const ari_bug_run *run, ar_precision precision)
{
    static const ari_column columns[] = {{"fault", ARI_LEFT},    {"model and layout", ARI_LEFT}, {"without", ARI_RIGHT},
                                         {"with it", ARI_RIGHT}, {"first outside", ARI_LEFT},    {"shows", ARI_LEFT}};
    size_t count[TRACES] = {0};
    double worst = 0.0;
    ari_table *t = NULL;
    AR_TRY(ari_table_create(&t, columns, sizeof columns / sizeof *columns));
    ar_status st = add_rows(t, run, count);
    if (st == AR_OK)
        st = ari_table_print(t, to, 0);
    ari_table_destroy(t);
    for (int i = 0; i < FAULTS; i++)
        worst = run[i].at.module ? worst : fmax(worst, run[i].ratio_clean);
    fprintf(
        to,
        "\nwithout, with it: the worst difference of a tensor, of what rounding of products in %s may make. Weights\n"
        "after Adam count where they are outside.\n"
        "\nbugs: of %d faults %zu leave the allowance, %zu end the run in an error, %zu show in the bytes alone, %zu "
        "are\nsmaller than rounding, %zu run in exact numerics alone; without a fault the worst is %.3g of what is "
        "allowed\n",
        ar_precision_name(precision), (int)FAULTS, count[OUTSIDE], count[ERROR], count[BYTES], count[BELOW],
        count[MODULE], worst);
    return st;
}
