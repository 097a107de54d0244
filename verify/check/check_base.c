/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/check/check_base.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "ref/core/clock.h"
#include "ref/core/size.h"
#include "sim/plan/bytes.h"
#include "verify/check/baseline_share.h"
#include "verify/check/check_baseline.h"
#include "verify/check/check_run.h"
#include "verify/check/text_batch.h"
#include "verify/writer/dump_ranks.h"

static bool is_not_finite(float x)
{
    return !isfinite(x);
}

/* A baseline that ends at its gradients' norm: says with which tensor of what it had computed that began. */
static ar_status name_not_finite(ar_status ended, const ari_reference *ref)
{
    const ari_ref_tensor *t = ended == AR_ERR_DATA ? ari_reference_first_with(ref, is_not_finite) : NULL;
    char message[512];
    if (!t)
        return ended;
    snprintf(message, sizeof message, "%s", ar_error_message());
    return ar_error_set(ended, "%s; the first tensor that is not finite is %s%s of step %d", message, t->name,
                        ari_pass_suffix(t->pass), t->step);
}

/* Consecutive pieces of the text, one global batch a step. Gives both; free(). */
static ar_status make_batches(int64_t **ids, ar_batch **batch, const ar_check_options *o, size_t vocab)
{
    const size_t steps = ari_run_steps(&o->run);
    size_t rows = 0;
    AR_TRY(ari_mul_size(&rows, steps, o->run.batch));
    AR_TRY(ari_text_ids(ids, rows, o->run.seq, vocab, o->text, o->run.seed));
    AR_TRY(ari_alloc_zero((void **)batch, steps, sizeof **batch, "batches"));
    for (size_t i = 0; i < steps; i++)
        (*batch)[i] =
            (ar_batch){.batch = o->run.batch, .seq = o->run.seq, .input_ids = *ids + i * o->run.batch * o->run.seq};
    return AR_OK;
}

ar_status ari_check_base_init(ari_check_base *b, const ar_check_options *o, const ar_config *c, const char *folder)
{
    *b = (ari_check_base){.config = *c};
    AR_TRY(ari_weights_load(&b->weights, c, folder));
    AR_TRY(ari_alloc_zero((void **)&b->loss, ari_run_steps(&o->run), sizeof *b->loss, "losses"));
    AR_TRY(make_batches(&b->ids, &b->batch, o, c->vocab));
    const uint64_t start = ari_now_ns();
    const ari_baseline_case baseline = {.check = o, .config = &b->config, .weights = b->weights, .batch = b->batch};
    ar_status (*run)(ari_reference *, float *, double *, const ari_baseline_case *) =
        o->run.process ? ari_check_baseline_shared : ari_check_baseline;
    AR_TRY(name_not_finite(run(&b->ref, b->loss, &b->max_error_vs_f64, &baseline), &b->ref));
    b->seconds = (double)(ari_now_ns() - start) * 1e-9;
    return AR_OK;
}

void ari_check_base_fini(ari_check_base *b)
{
    ari_reference_fini(&b->ref);
    ari_weights_destroy(b->weights);
    free(b->loss);
    free(b->batch);
    free(b->ids);
    *b = (ari_check_base){.weights = NULL};
}

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
        if (run->result >= AR_CHECK_DIFFERENT)
            break;
    }
    return AR_OK;
}

/* A run that failed has reported some tensors of some ranks: nothing that could be put together. */
static ar_status write_dump(ar_check_run *run, const ari_check_base *b, const ar_check_options *o,
                            const ari_dump_ranks *dump)
{
    ari_dump_facts facts;
    char layout[96];
    if (run->reports)
        return AR_OK;
    ari_dump_layout_name(layout, sizeof layout, &dump->parallel);
    const int n = snprintf(run->dump, sizeof run->dump, "%s/%s", o->dump, layout);
    if (n < 0 || (size_t)n >= sizeof run->dump)
        return ar_error_set(AR_ERR_ARG, "%s: the path is too long", o->dump);
    ari_dump_facts_of(&facts, &b->config, &dump->parallel, o->run.numerics, o->run.fault);
    return ari_dump_ranks_write(dump, run->dump, &facts);
}

ar_status ari_check_base_run(ar_check_run *run, const ari_check_base *b, const ar_check_options *o,
                             const ar_parallel *p)
{
    ari_cluster_options cluster = {.run = o->run,
                                   .config = &b->config,
                                   .batch = b->batch,
                                   .weights = b->weights ? ari_weights_find : NULL,
                                   .weights_user = b->weights};
    cluster.run.parallel = *p;
    const ari_traffic_case traffic = {.run = cluster.run, .config = &b->config};
    *run = (ar_check_run){.parallel = *p};
    AR_TRY(ari_traffic_bytes(&run->bytes_predicted, &traffic));
    ari_dump_ranks dump = {.ranks = 0};
    ar_status st = AR_OK;
    if (o->dump) {
        AR_TRY_TO(done, st, ari_dump_ranks_create(&dump, p, NULL));
        cluster.tap = ar_dump_listener_tap;
        cluster.tap_user = dump.user;
    }
    AR_TRY_TO(done, st, run_schedules(run, &b->ref, &cluster, o->run.sim.schedule_seed, o->schedules, &dump));
    if (o->dump)
        st = write_dump(run, b, o, &dump);
done:
    ari_dump_ranks_fini(&dump);
    return st;
}
