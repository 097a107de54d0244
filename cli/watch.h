/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_WATCH_H
#define ARI_CLI_WATCH_H

#include <jansson.h>
#include <stdio.h>

#include "anyrank/sim.h"
#include "cli/args.h"
#include "cli/table.h"

/* How runs are watched: recorded in files, and timed as on another cluster. The same for every subcommand that runs a
 * simulated one. */
typedef struct ari_watch_values {
    const char *trace, *timeline, *cluster; /* NULL: not given */
} ari_watch_values;

extern const char *const ari_cluster_names[]; /* those that completions offer */

#define ARI_WATCH_AT(values, field) (offsetof(values, watch) + offsetof(ari_watch_values, field))

/* Rows of an option table; `values` is the subcommand's struct, with an ari_watch_values called `watch`. */
#define ARI_WATCH_OPTIONS(values)                                                                                    \
    {.name = "trace",                                                                                                \
     .kind = ARI_OPT_FILE,                                                                                           \
     .at = ARI_WATCH_AT(values, trace),                                                                              \
     .value = "FILE",                                                                                                \
     .help = "record the run for Perfetto (ui.perfetto.dev); one run only",                                          \
     .more =                                                                                                         \
         "It has a process for each rank, its modules and collectives, arrows between ranks, and bytes in flight."}, \
        {.name = "timeline",                                                                                         \
         .kind = ARI_OPT_FILE,                                                                                       \
         .at = ARI_WATCH_AT(values, timeline),                                                                       \
         .value = "FILE.html",                                                                                       \
         .help = "the same as a page of its own, for any browser, without a network"},                               \
    {                                                                                                                \
        .name = "cluster", .kind = ARI_OPT_STRING, .at = ARI_WATCH_AT(values, cluster), .value = "SPEC",             \
        .help = "tell what the run would take on that cluster, and record by its clock: h100, a100, or words as "    \
                "'8x inside=2us:300GB/s between=5us:25GB/s flops=400T'",                                             \
        .more = "Where that time goes is told too. The words are: ranks of a node, latency and rate inside a node "  \
                "and between nodes, and the rate at which one rank computes.",                                       \
        .choices = ari_cluster_names                                                                                 \
    }

typedef struct ari_watch {
    ari_watch_values values;
    ar_trace *trace; /* NULL: nothing is recorded */
    bool timed;      /* there is a cluster */
    ar_sim_cluster cluster;
} ari_watch;

/** Whether a file is asked for, which holds one run. */
bool ari_watch_records(const ari_watch_values *v);
/** Refuses files that cannot be written, that would replace each other or the --json one, and clusters that make no
 *  sense: before long work. Gives what a run needs; ari_watch_fini in every case. Errors: AR_ERR_ARG, AR_ERR_IO,
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_watch_begin(ari_watch *w, const ari_watch_values *v, const ari_common *common);
/** The cluster for the run's options; NULL: none. */
const ar_sim_cluster *ari_watch_cluster(const ari_watch *w);
/** Writes the files, by the cluster's clock where there is one. `title` heads the page. Nothing where none is asked
 *  for. Errors: AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_watch_write(const ari_watch *w, const char *title);
/** "trace.json: the run, for ui.perfetto.dev", one line a file. */
void ari_watch_print(FILE *to, const ari_watch *w);
/** A table of predicted times, headed by the cluster: begin, a row for each run (s NULL: it came to no end), and
 *  ari_table_print. Gives. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_predicted_begin(ari_table **gives, FILE *to, const ari_watch *w);
void ari_predicted_row(ari_table *t, const char *layout, const ar_trace_summary *s);
/** Adds "cluster", "trace" and "timeline" to a result, as far as they were given. */
void ari_watch_json(json_t *result, const ari_watch *w);
void ari_watch_fini(ari_watch *w);

/** What virtual time says of a run, for JSON. Gives; NULL without memory. */
json_t *ari_predicted_json(const ar_trace_summary *s);

#endif
