/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <jansson.h>

#include "cli/options/args.h"
#include "verify/faults/fault_case.h"

/* A result of `anyrank bugs --run`: a fault in the case in which it has an effect, and the same case without it. */
typedef struct ari_bug_run {
    const char *fault;
    ari_fault_case fault_case;
    ar_check_result clean; /* result of the case without the fault */
    double ratio_clean;    /* in native numerics: the largest ratio to the allowance without the fault */
    ar_check_run faulty;   /* the faulty run, whose error has one line */
    double seconds;
    bool has_curve, curve_ended; /* curve_ended: false if an error ended the 20 steps */
    ari_fault_curve curve;
} ari_bug_run;

/** Writes the fault's case: "llama-demo tp=2 sp". Returns `text`. */
const char *ari_bugs_case_text(char *text, size_t size, const ari_fault_case *c);
/** Returns true if each of n faults is caught and each clean run is the same. */
bool ari_bugs_well(const ari_bug_run *run, int n);
/** The table of the native numerics. */
AR_NODISCARD ar_status ari_bugs_print_native(FILE *to, const ari_bug_run *run, int n, ar_precision precision);
AR_NODISCARD ar_status ari_bugs_print(FILE *to, const ari_bug_run *run, int n, bool curves);
/** Returns an array with an object for each fault, a new reference; NULL if memory is short. */
json_t *ari_bugs_json(const ari_bug_run *run, int n);
