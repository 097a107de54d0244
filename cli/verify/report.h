/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <jansson.h>
#include <stdio.h>

#include "anyrank/verify.h"
#include "cli/options/args.h"
#include "verify/compare/normal.h"

/* --- the cause (explain.c) ---------------------------------------------------------------------------------------- */

/* The explanation of a report by anyrank.explain. */
typedef struct ari_verify_cause {
    json_t *answer;    /* the answer, whose fields python/anyrank/explain/answers.py lists; NULL: none */
    char failure[400]; /* why there is no answer; "": none was requested */
} ari_verify_cause;
/** Asks for the cause of a report's first difference if `explain`, and writes the report as a page if `page` is a path.
 *  report: its JSON. The caller ends it with ari_verify_cause_fini, also after an error. Errors: AR_ERR_MEMORY,
 *  AR_ERR_IO, AR_ERR_UNSUPPORTED (a page is requested, and Python or numpy is missing). */
AR_NODISCARD ar_status ari_verify_ask(ari_verify_cause *cause, const ar_verify_report *r, const ar_verify_options *o,
                                      const json_t *report, const char *page, bool explain);
/** Adds the cause to the report's JSON, which then has the fields of "verify --json". */
void ari_verify_cause_json(json_t *report, const ar_verify_report *r, const ari_verify_cause *cause);
void ari_verify_cause_fini(ari_verify_cause *cause);

/* --- sketches (sketches.c) ---------------------------------------------------------------------------------------- */

/** Compares two runs of which at least one has sketches instead of tensors, and prints the report. max_report: rows of
 *  a table. Errors: those of ari_sketches_compare. */
AR_NODISCARD ar_status ari_verify_sketches(int *exit_code, const ar_verify_options *o, const ari_common *common,
                                           size_t max_report);

/* --- for people (report.c, normal.c) ------------------------------------------------------------------------------ */

/** Prints the answer, or why there is none. */
void ari_verify_print_cause(FILE *to, const ari_verify_cause *cause);
/** Prints the whole report: the first tensor that differs and its cause, tables of at most `most` rows, and in the
 *  last line the result after `label`, such as "verify". page: path of the report's page; NULL: none. Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_verify_print(FILE *to, const ar_verify_report *r, const ari_verify_cause *cause, size_t most,
                                        const char *page, const char *label);
/** Prints the answer to --normal, what it is based on, and the ten most unusual tensors. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_verify_print_normal(FILE *out, const ari_normal *n);
/** The explanation of the first that differs, if the difference is not normal. */
void ari_verify_print_not_normal(FILE *out, const ari_normal *n, const ari_verify_cause *cause);
