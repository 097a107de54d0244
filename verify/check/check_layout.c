/* SPDX-License-Identifier: Apache-2.0 */
/* One layout of a check: under as many schedules as are asked for, again where a difference asks for it, with its
 * dump. */
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "verify/check/check_run.h"
#include "verify/dump/dump.h"
#include "verify/writer/dump_ranks.h"

/* One layout, under as many schedules as are asked for: until one run is not the same. The dump is the last one's. */
static ar_status run_schedules(ar_check_run *run, const ari_reference *ref, ari_cluster_options *o, uint64_t first,
                               uint64_t schedules, ari_dump_ranks *dump)
{
    const uint64_t predicted = run->bytes_predicted;
    o->run.sim.explore = schedules > 0;
    for (uint64_t k = 0; k < (schedules > 0 ? schedules : 1); k++) {
        ari_check_run_fini(run);
        ari_dump_ranks_clear(dump);
        run->bytes_predicted = predicted;
        o->run.sim.schedule_seed = first + k;
        AR_TRY(ari_check_run(run, ref, o));
        run->schedules = schedules > 0 ? k + 1 : 0;
        run->schedule_seed = o->run.sim.schedule_seed;
        if (run->result != AR_CHECK_SAME && run->result != AR_CHECK_VACUOUS)
            break;
    }
    return AR_OK;
}

/* A difference as small as rounding: the exact numerics have none, so the layout runs once more, to see whether the
 * values are the same again. */
static ar_status run_again(ar_check_run *run, const ari_reference *ref, const ari_cluster_options *o,
                           ari_dump_ranks *dump)
{
    const ar_first_difference earlier = run->first;
    const uint64_t predicted = run->bytes_predicted;
    ari_cluster_options again = *o;
    if (!run->has_difference || run->error || o->run.numerics == AR_NUMERICS_NATIVE || o->run.sim.explore ||
        o->run.sim.trace || !earlier.evidence.cause || strcmp(earlier.evidence.cause, "small_change") != 0)
        return AR_OK;
    again.attempt++;
    ari_check_run_fini(run);
    ari_dump_ranks_clear(dump);
    run->bytes_predicted = predicted;
    return ari_check_run_after(run, ref, &again, &earlier);
}

/* Other bytes, and all values right: the same run with its collectives recorded says which is another one. */
static ar_status explain_bytes(ar_check_run *run, const ari_cluster_options *o)
{
    const ari_step_case listed = {
        .run = o->run, .config = o->config, .repeats = o->batch->documents || o->batch->position_ids};
    ari_cluster_options again = *o;
    ARI_ENDED(ari_cluster_result_fini) ari_cluster_result result = {0};
    ARI_OWNED_BY(ar_trace_destroy) ar_trace *own = NULL;
    if (run->error || run->tensors_different > 0 || run->bytes_counted == run->bytes_predicted || o->run.process)
        return AR_OK;
    again.tap = NULL;
    if (!o->run.sim.trace) {
        AR_TRY(ar_trace_create(&own));
        again.run.sim.trace = own;
        AR_TRY(ari_cluster_run(&result, &again));
    }
    const ar_status st = ari_recorded_calls(&run->call_cause, &listed, again.run.sim.trace);
    if (st != AR_ERR_DATA)
        return st;
    snprintf(run->call_difference, sizeof run->call_difference, "%s", ar_error_message());
    return AR_OK;
}

/* "tp2-sp", "dp2-tp2-zero1", "tp1": ar_parallel_text as a file's name. */
static void layout_name(char *out, size_t cap, const ar_parallel *p)
{
    char text[96];
    size_t n = 0;
    ar_parallel_text(text, sizeof text, p);
    for (const char *c = text; *c && n + 1 < cap; c++) {
        if (isalnum((unsigned char)*c) || *c == '-')
            out[n++] = *c;
        else if (*c == ' ' || *c == ',')
            out[n++] = '-';
    }
    if (cap > 0)
        out[n] = '\0';
}

/* A run that failed has reported some tensors of some ranks: nothing that could be put together. */
static ar_status write_dump(ar_check_run *run, const ari_check_base *b, const ar_check_options *o,
                            const ari_dump_ranks *dump)
{
    ari_dump_facts facts;
    char layout[96];
    if (run->reports)
        return AR_OK;
    layout_name(layout, sizeof layout, &dump->parallel);
    AR_TRY(ari_folder_path(run->dump, sizeof run->dump, o->dump, layout));
    ar_run of = o->run;
    of.parallel = dump->parallel;
    AR_TRY(ari_dump_facts_of(&facts, &b->config, &of, b->batch));
    ari_dump_fact(&facts, "cu_seqlens", b->documents_text);
    return ari_dump_ranks_write(dump, run->dump, &facts);
}

static ar_status traffic_in_bf16(uint64_t *bytes, const ari_step_case *exact)
{
    ari_step_case c = *exact;
    c.run.numerics = AR_NUMERICS_NATIVE;
    c.run.precision = AR_PRECISION_BF16;
    return ari_traffic_bytes(bytes, &c);
}

ar_status ari_check_base_run(ar_check_run *run, const ari_check_base *b, const ar_check_options *o,
                             const ar_parallel *p)
{
    ari_cluster_options cluster = {.run = o->run,
                                   .config = &b->config,
                                   .batch = b->padded ? b->padded : b->batch,
                                   .weights = b->weights ? ari_weights_find : NULL,
                                   .weights_user = b->weights};
    cluster.run.parallel = *p;
    cluster.run.batch += o->padding;
    ari_routed routed = {0, 0};
    const ari_step_case traffic = {
        .run = cluster.run, .config = &b->config, .routed = &routed, .repeats = b->documents};
    *run = (ar_check_run){.parallel = *p};
    if (o->run.numerics == AR_NUMERICS_EXACT) /* else ranks may route otherwise than the baseline, by rounding */
        AR_TRY(ari_check_routed(&routed, &b->ref, &traffic));
    AR_TRY(ari_traffic_bytes(&run->bytes_predicted, &traffic));
    ARI_ENDED(ari_dump_ranks_fini) ari_dump_ranks dump = {.ranks = 0};
    if (o->dump) {
        AR_TRY(ari_dump_ranks_create(&dump, p, NULL));
        cluster.tap = ar_dump_listener_tap;
        cluster.tap_user = dump.user;
    }
    AR_TRY(run_schedules(run, &b->ref, &cluster, o->run.sim.schedule_seed, o->schedules, &dump));
    AR_TRY(run_again(run, &b->ref, &cluster, &dump));
    AR_TRY(explain_bytes(run, &cluster));
    AR_TRY(traffic_in_bf16(&run->bytes_bf16, &traffic));
    return o->dump ? write_dump(run, b, o, &dump) : AR_OK;
}
