/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_WATCH_H
#define ARI_CLI_WATCH_H

#include <jansson.h>
#include <stdio.h>

#include "anyrank/parallel.h"
#include "anyrank/sim.h"
#include "cli/options/args.h"
#include "cli/report/table.h"

/* How runs are watched: recorded in files, and timed as on another cluster. The same for every subcommand that runs a
 * simulated one. */
typedef struct ari_watch_values {
    const char *trace, *timeline, *cluster; /* NULL: not given */
} ari_watch_values;

extern const ari_option ari_watch_options[]; /* of an ari_watch_values */

typedef struct ari_watch {
    ari_watch_values values;
    ar_trace *trace; /* NULL: nothing is recorded */
    bool timed;      /* there is a cluster */
    ar_sim_cluster cluster;
} ari_watch;

/** Whether a file is asked for, which holds one run. */
bool ari_watch_records(const ari_watch_values *v);
/** Gives what a run needs; ari_watch_fini in every case. Refuses a cluster that makes no sense. Errors: AR_ERR_ARG,
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_watch_begin(ari_watch *w, const ari_watch_values *v);
/** The cluster for the run's options; NULL: none. */
const ar_sim_cluster *ari_watch_cluster(const ari_watch *w);
/** Writes the files, by the cluster's clock where there is one. Model and layout head the page. Nothing where none is
 *  asked for. Errors: AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_watch_write(const ari_watch *w, const char *model, const ar_parallel *p, size_t batch);
/** "trace.json: the run, for ui.perfetto.dev", one line a file. */
void ari_watch_print(FILE *to, const ari_watch *w);
/** A table of predicted times: the line above it, a row for each run (s NULL: it came to no end). */
ari_table ari_predicted_begin(FILE *to, const ari_watch *w);
void ari_predicted_row(ari_table *t, const ar_parallel *p, size_t batch, const ar_trace_summary *s);
/** The table of one run. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_predicted_print(FILE *to, const ari_watch *w, const ar_parallel *p, size_t batch,
                                           const ar_trace_summary *s);
/** Adds "cluster", "trace" and "timeline" to a result, as far as they were given. */
void ari_watch_json(json_t *result, const ari_watch *w);
void ari_watch_fini(ari_watch *w);

/** What virtual time says of a run, for JSON. Gives; NULL without memory. */
json_t *ari_predicted_json(const ar_trace_summary *s);

#endif
