/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/options/run.h"

#include "ref/io/json.h"
#include "sim/sim_private.h"

#define ARI_VALUES ari_watch_values
const ari_option ari_watch_options[] = {
    ARI_OPTION_SECTION("output"),
    ARI_OPTION_FILE("trace", trace, "FILE.json", "record the run for Perfetto (ui.perfetto.dev); one run only",
                    .details = "It has a process for each rank, its modules and collectives, arrows between ranks, and "
                               "bytes in flight. python -m anyrank.page FILE.json makes a page of it for any browser.",
                    .written = true),
    ARI_OPTION_SECTION("cluster"),
    ARI_OPTION_STRING("cluster", cluster, "SPEC",
                      "tell what the run would take on that cluster, and record by its clock: h100, b200, or words as "
                      "'8x inside=2us:300GB/s between=5us:25GB/s flops=400T'",
                      .choices = ar_sim_cluster_names,
                      .details = "Where that time goes is told too. The words are: ranks of a node, latency and rate "
                                 "inside a node and between nodes, and the rate at which one rank computes."),
    {0},
};
#undef ARI_VALUES

ar_status ari_watch_begin(ari_watch *w, const ari_watch_values *v)
{
    *w = (ari_watch){.values = *v};
    if (v->cluster)
        AR_TRY(ar_sim_cluster_parse(&w->cluster, v->cluster));
    w->timed = v->cluster != NULL;
    return v->trace ? ar_trace_create(&w->trace) : AR_OK;
}

void ari_watch_run(ar_run *run, const ari_watch *w)
{
    run->sim.cluster = w->timed ? &w->cluster : NULL;
    run->sim.trace = w->trace;
}

ar_status ari_watch_write(const ari_watch *w, const char *model, const ar_parallel *p, size_t batch)
{
    const ar_trace_clock clock = w->timed ? AR_TRACE_VIRTUAL : AR_TRACE_REAL;
    char title[256];
    snprintf(title, sizeof title, "%s, %s", model, ARI_LAYOUT(p, batch));
    return w->values.trace ? ar_trace_write_json(w->trace, clock, title, w->values.trace) : AR_OK;
}

void ari_watch_print(FILE *out, const ari_watch *w)
{
    const char *clock = w->timed ? "by the cluster's clock" : "by this machine's clock";
    if (w->values.trace)
        fprintf(out, "%s: the run %s; open it at ui.perfetto.dev\n", w->values.trace, clock);
}

ari_table ari_predicted_begin(FILE *out, const ari_watch *w)
{
    static const ari_column columns[] = {
        {"layout", ARI_LEFT},   {"time", ARI_RIGHT},         {"computing", ARI_RIGHT}, {"communicating", ARI_RIGHT},
        {"exposed", ARI_RIGHT}, {"critical path", ARI_LEFT}, {"most of it", ARI_LEFT}};
    char text[256];
    ari_sim_cluster_describe(&w->cluster, text, sizeof text);
    fprintf(out, "\n  predicted on a cluster %s\n", text);
    return (ari_table)ARI_TABLE(columns);
}

/* "31 % computing, 69 % communicating" */
static void path_cell(ari_table *t, const ar_trace_summary *s)
{
    const double total_seconds = s->seconds > 0 ? s->seconds : 1;
    const double compute = 100 * s->path_compute / total_seconds,
                 communication = 100 * s->path_communication / total_seconds;
    const double wait = 100 * s->path_wait / total_seconds;
    if (wait >= 0.5)
        ari_table_cell(t, "%.0f %% computing, %.0f %% communicating, %.0f %% waiting", compute, communication, wait);
    else
        ari_table_cell(t, "%.0f %% computing, %.0f %% communicating", compute, communication);
}

void ari_predicted_row(ari_table *t, const ar_parallel *p, size_t batch, const ar_trace_summary *s)
{
    ari_table_cell(t, "%s", ARI_LAYOUT(p, batch));
    if (!s) {
        ari_table_row(t, "-\t-\t-\t-\t-\t-");
        return;
    }
    ari_table_row(t, "%s\t%s\t%s\t%s", ARI_SECONDS(s->seconds), ARI_SECONDS(s->compute), ARI_SECONDS(s->communication),
                  ARI_SECONDS(s->exposed));
    path_cell(t, s);
    if (s->parts > 0)
        ari_table_cell(t, "%s, %s on rank %d", s->longest[0].what, ARI_SECONDS(s->longest[0].seconds),
                       s->longest[0].rank);
    else
        ari_table_cell(t, "-");
}

ar_status ari_predicted_print(FILE *out, const ari_watch *w, const ar_parallel *p, size_t batch,
                              const ar_trace_summary *s)
{
    ari_table t = ari_predicted_begin(out, w);
    ari_predicted_row(&t, p, batch, s);
    return ari_table_end(&t, out, 2);
}

void ari_watch_json(json_t *result, const ari_watch *w)
{
    char text[256];
    ari_sim_cluster_describe(&w->cluster, text, sizeof text);
    if (w->timed)
        json_object_set_new(result, "cluster", ari_json_text(text));
    if (w->values.trace)
        json_object_set_new(result, "trace", ari_json_text(w->values.trace));
}

void ari_watch_fini(ari_watch *w)
{
    ar_trace_destroy(w->trace);
    w->trace = NULL;
}

json_t *ari_predicted_json(const ar_trace_summary *s)
{
    json_t *longest = json_array();
    for (size_t i = 0; i < s->parts; i++)
        json_array_append_new(longest,
                              json_pack("{s:o, s:i, s:o}", "what", ari_json_text(s->longest[i].what), "rank",
                                        s->longest[i].rank, "seconds", ari_json_number(s->longest[i].seconds)));
    json_t *path =
        json_pack("{s:o, s:o, s:o, s:o}", "compute", ari_json_number(s->path_compute), "communication",
                  ari_json_number(s->path_communication), "wait", ari_json_number(s->path_wait), "longest", longest);
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:I, s:I, s:o}", "seconds", ari_json_number(s->seconds), "compute",
                     ari_json_number(s->compute), "communication", ari_json_number(s->communication), "exposed",
                     ari_json_number(s->exposed), "overlap", ari_json_number(s->overlap), "bytes", (json_int_t)s->bytes,
                     "collectives", (json_int_t)s->collectives, "critical_path", path);
}
