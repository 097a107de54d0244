/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_BUGS_H
#define ARI_CLI_BUGS_H

#include <jansson.h>

#include "cli/options/args.h"
#include "verify/faults/fault_case.h"

/* `anyrank bugs --run`: each fault in the case in which it matters, and the same case without it. */
typedef struct ari_bug_run {
    ar_fault fault;
    ari_fault_case at;
    ar_check_result clean; /* of the case without the fault */
    bool caught;
    double ratio_clean, ratio; /* in the native numerics: the worst of allowed, without the fault and with it */
    char ratio_tensor[176];    /* with it */
    ar_first_difference first; /* with tensor "": the run ended in an error, or only its bytes differ */
    uint64_t bytes_counted, bytes_predicted;
    char call_difference[448]; /* where only the bytes differ: which collective */
    const char *call_cause;
    char error[256]; /* the first line; "" if there is none */
    double seconds;
    bool has_curve, curve_ended; /* curve_ended: false where an error ended the 20 steps */
    ari_fault_curve curve;
} ari_bug_run;

/** Whether each is caught, and each clean run the same. */
bool ari_bugs_well(const ari_bug_run *run);
/** Whether each clean run of the native numerics is within the allowance: a mistake may be smaller than rounding. */
bool ari_bugs_clean(const ari_bug_run *run);
/** The table of the native numerics. */
AR_NODISCARD ar_status ari_bugs_print_native(FILE *to, const ari_bug_run *run, ar_precision precision);
AR_NODISCARD ar_status ari_bugs_print(FILE *to, const ari_bug_run *run, bool curves);
/** An array of objects, one a fault. Gives; NULL without memory. */
json_t *ari_bugs_json(const ari_bug_run *run);

#endif
