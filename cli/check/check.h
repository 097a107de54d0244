/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <jansson.h>
#include <stdio.h>

#include "anyrank/check.h"
#include "cli/options/args.h"
#include "cli/options/run.h"
#include "cli/options/transport.h"

/* Options of `anyrank check`. */
typedef struct ari_check_values {
    ari_common common;
    ar_check_options o; /* all options except the run */
    ari_run_values r;
    ari_transport_values transport;
    ari_watch_values watch;
    const char *schedule, *net_fault; /* NULL: not given */
    int sweep, steps;                 /* -1: not given */
    bool list_tensors, memory;
} ari_check_values;

/** The check itself. */
ar_status ari_command_check(void *values, int *exit_code);

/* A model's report, and the request that it answers. */
typedef struct ari_checked {
    ar_check_report *report;
    ar_run run;  /* owns its files, which ari_layout_unload releases */
    bool module; /* only bytes are counted */
    const ari_watch *watch;
    bool has_net_fault;
    ar_sim_fault net_fault;
} ari_checked;

/** Returns the worst result of all runs; a failed comparison with finite differences counts as a difference. */
ar_check_result ari_check_worst(const ari_checked *checked, size_t n);
/** Computes one hash of all models' outputs, gradients and weights: SHA-256 over the digits of the three hashes, model
 *  after model. Returns false in native numerics, and if a run differs, because there are several hashes then. */
bool ari_check_hash(char hex[65], const ari_checked *checked, size_t n);
/** Prints the table of one model and the differences of its runs. memory: also prints a table of each rank's memory.
 *  Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_check_print(FILE *to, const ari_checked *c, bool memory);
/** The last lines: the hash and the key fact. */
void ari_check_print_verdict(FILE *to, const ari_checked *checked, size_t n, const char *fault);
/** Returns the stable JSON of the whole check, a new reference; NULL if memory is short. */
json_t *ari_check_json(const ari_checked *checked, size_t n);
