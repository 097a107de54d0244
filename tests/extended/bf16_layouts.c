/* SPDX-License-Identifier: Apache-2.0 */
/* 150 random layouts of random small models with activations and matrices of 16 bits, and 150 whose ranks share
 * sequences: each is within what rounding to bf16 can do, with the predicted bytes; with a sum left out that the layout
 * needs each is outside. ANYRANK_TEST_SEED and ANYRANK_TEST_DRAWS ask for others. */
#include "ref/core/fault_private.h"
#include "support/layout_draw.h"
#include "tests/support/scoped.h"

enum { DRAWS = 150, FIRST_SEED = 7000 };

static uint64_t asked(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

/* A mistake that no rounding hides, where this layout can have it. */
static const char *fault_of(const ar_parallel *p)
{
    return p->dp > 1 ? "dp_group_missing" : p->tp > 1 ? "column_dx_not_reduced" : NULL;
}

static int judge(const layout_draw *d, const char *fault, double *worst)
{
    OWNED(ar_check_report_destroy) ar_check_report *r = NULL;
    char text[LAYOUT_DRAW_TEXT];
    const ar_status st = layout_draw_check(&r, d, AR_PRECISION_BF16, fault);
    const ar_check_run *run = st == AR_OK ? &r->run[0] : NULL;
    const ar_check_result wanted = !fault ? AR_CHECK_SAME : AR_CHECK_DIFFERENT;
    const bool right = run && (run->result == wanted || run->result == AR_CHECK_VACUOUS) &&
                       (fault || run->bytes_counted == run->bytes_predicted);
    if (run && !fault && run->max_ratio > *worst)
        *worst = run->max_ratio;
    if (!right) {
        layout_draw_text(text, sizeof text, d);
        printf("%s\n  %s: %s, worst of allowed %g in %s, %llu bytes of %llu\n", text, fault,
               run ? run->error ? run->error : "result" : ar_error_message(), run ? run->max_ratio : 0.0,
               run ? run->ratio_tensor : "-", run ? (unsigned long long)run->bytes_counted : 0,
               run ? (unsigned long long)run->bytes_predicted : 0);
    }
    return !right;
}

/* Weights of 0.3 give some draws probabilities of 0 and 1; a clip of 0 leaves the norm out. Of the draws those count
 * that are made for a whole check: the others' models need not have a file. */
static int run(uint64_t first, int draws, bool context)
{
    int failures = 0, faulty = 0;
    double worst = 0.0;
    for (int i = 0; i < draws; first++) {
        layout_draw d;
        layout_draw_make(&d, context ? DRAW_CONTEXTS : DRAW_TENSORS, first);
        if (!d.by_check)
            continue;
        i++;
        const char *fault = fault_of(&d.run.parallel);
        failures += judge(&d, NULL, &worst);
        if (fault) {
            faulty++;
            failures += judge(&d, fault, &worst);
        }
        fflush(stdout);
    }
    printf("%d draws%s, %d of them also with a fault: %d failures, worst of allowed %g\n", draws,
           context ? " of shared sequences" : "", faulty, failures, worst);
    return failures;
}

int main(void)
{
    const uint64_t first = asked("ANYRANK_TEST_SEED", FIRST_SEED);
    const int draws = (int)asked("ANYRANK_TEST_DRAWS", DRAWS);
    return run(first, draws, false) + run(first, draws, true) == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
