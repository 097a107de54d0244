/* SPDX-License-Identifier: Apache-2.0 */
/* Runs that end in the middle of a backward pass while buckets are in flight: a rank fails, dies or stands still. All
 * ranks end with one report, soon, and leave nothing behind (a plain main, for what the sanitizers see of it). */
#include <stdio.h>

#include "anyrank/context.h"
#include "sim/sim_private.h"
#include "support/match.h"
#include "support/small.h"
#include "tests/support/scoped.h"
#include "verify/run/cluster_run.h"

enum { B = 4, S = 4, RANKS = 4 };
#define SECOND UINT64_C(1000000000)
static const int64_t ids[B * S] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 3, 2, 1, 5, 4};
static const ar_batch batches[2] = {{.batch = B, .seq = S, .input_ids = ids}, {.batch = B, .seq = S, .input_ids = ids}};

typedef struct job {
    ari_cluster_options trainer;
    size_t fails_at; /* rank 1's gradient of this parameter, in the second step; SIZE_MAX: none */
} job;

typedef struct failing {
    const char *name; /* NULL: not yet */
} failing;

static ar_status fail(void *user, ar_param *p)
{
    const failing *f = user;
    return f->name ? ar_error_set(AR_ERR_DATA, "the gradient of %s cannot be made", p->name) : AR_OK;
}

static ar_status train(void *user, ar_ctx *ctx)
{
    const job *j = user;
    SCOPED(ari_trainer_destroy) ari_trainer t = {0};
    ar_train_result result;
    failing f = {NULL};
    AR_TRY(ari_trainer_create(&t, ctx, &j->trainer));
    if (j->fails_at < t.n && ar_comm_rank(ar_ctx_dp(ctx)) == 1)
        AR_TRY(ar_param_add_hook(t.params[j->fails_at], (ar_param_hook){fail, &f}));
    AR_TRY(ar_train_step(&result, t.model, ctx, t.optimizer, &batches[0], 1, &t.step));
    f.name = "now";
    return ar_train_step(&result, t.model, ctx, t.optimizer, &batches[1], 2, &t.step);
}

/* Whether the run ends with `expected`, says so, and has a report of every rank; 1 if not. */
static int expect(job *j, const ari_cluster_options *o, const char *what, ar_status expected, const char *says)
{
    ari_cluster_result result = {0};
    const ar_status st = ari_cluster_run(&result, o);
    int wrong = st != expected || !strstr(ar_error_message(), says) || !result.reports;
    for (int r = 0; r < RANKS && result.reports; r++)
        wrong |= result.reports[r].rank != r || strcmp(result.reports[r].status, "AR_OK") == 0;
    if (wrong)
        fprintf(stderr, "%s, parameter %zu: %s, expected %s and '%s'; the message:\n%s\n", what, j->fails_at,
                ar_status_name(st), ar_status_name(expected), says, ar_error_message());
    free(result.loss);
    free(result.reports);
    return wrong;
}

static int fail_everywhere(job *j, ari_cluster_options o)
{
    const size_t steps = (size_t)by_scale(3, 2, 1);
    int wrong = 0;
    for (j->fails_at = 0; j->fails_at < 12; j->fails_at += steps)
        wrong += expect(j, &o, "a failing hook", AR_ERR_DATA, "cannot be made");
    j->fails_at = SIZE_MAX;
    return wrong;
}

static int kill_everywhere(job *j, ari_cluster_options o)
{
    const uint64_t steps = (uint64_t)by_scale(7, 3, 1);
    int wrong = 0;
    for (uint64_t n = 1; n <= 70; n += steps) {
        const ar_sim_fault fault = {.kind = AR_SIM_KILL, .rank = 2, .collective = n};
        char what[64];
        o.run.sim.faults = &fault;
        o.run.sim.fault_count = 1;
        ari_sim_fault_describe(&fault, what, sizeof what);
        wrong += expect(j, &o, what, AR_ERR_ABORTED, "rank 2 was killed");
    }
    return wrong;
}

static int stall_in_buckets(job *j, ari_cluster_options o)
{
    int wrong = 0;
    o.run.sim.timeout_ns = SECOND / 10;
    for (uint64_t n = 40; n <= 60; n += 20) {
        const ar_sim_fault fault = {.kind = AR_SIM_STALL, .rank = 1, .collective = n};
        o.run.sim.faults = &fault;
        o.run.sim.fault_count = 1;
        wrong += expect(j, &o, "a rank that stands still", AR_ERR_TIMEOUT, "");
    }
    return wrong;
}

/* Element 0 of what rank 3 receives first. Of a count below the number of ranks it may receive nothing, and which
 * collective is a rank's n-th depends on which of its queues is first: so some of them, until enough have been hit. */
static int corrupt_in_buckets(ari_cluster_options o)
{
    int wrong = 0, caught = 0;
    o.run.sim.verify_transfers = true;
    for (uint64_t n = 40; n <= 70 && caught < 3; n++) {
        const ar_sim_fault fault = {.kind = AR_SIM_CORRUPT, .rank = 3, .collective = n, .bit = 5};
        ari_cluster_result result = {0};
        o.run.sim.faults = &fault;
        o.run.sim.fault_count = 1;
        const ar_status st = ari_cluster_run(&result, &o);
        free(result.loss);
        free(result.reports);
        caught += st == AR_ERR_DATA && strstr(ar_error_message(), "rank 3, transfer 0");
        wrong += st != AR_OK && st != AR_ERR_DATA;
    }
    if (wrong > 0 || caught < 3)
        fprintf(stderr, "of transfers with a wrong bit %d are caught, %d end otherwise: %s\n", caught, wrong,
                ar_error_message());
    return wrong + (caught < 3);
}

int main(void)
{
    static const ar_bucket_mode modes[] = {AR_BUCKETS_OVERLAP, AR_BUCKETS_EAGER};
    const ar_config config = match_config(AR_ARCH_LLAMA, 1);
    const ar_parallel layouts[] = {{.dp = 4}, {.tp = 2, .dp = 2, .sp = true}};
    int wrong = 0;
    for (size_t i = 0; i < 4; i++) {
        job j = {.fails_at = SIZE_MAX};
        j.trainer = (ari_cluster_options){.config = &config,
                                          .run.steps = 2,
                                          .run.parallel = layouts[i / 2],
                                          .run.ddp = {.bucket_bytes = 300, .mode = modes[i % 2]},
                                          .run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW),
                                          .run.seed = 3};
        const ari_cluster_options o = {.config = &config,
                                       .run.parallel = layouts[i / 2],
                                       .run.threads = 1,
                                       .run.sim = {.timeout_ns = 60 * SECOND},
                                       .body = train,
                                       .body_user = &j};
        ari_cluster_result fine;
        if (ari_cluster_run(&fine, &o) != AR_OK) {
            fprintf(stderr, "a run in which nothing fails: %s\n", ar_error_message());
            return EXIT_FAILURE;
        }
        free(fine.loss);
        wrong += fail_everywhere(&j, o) + kill_everywhere(&j, o) + stall_in_buckets(&j, o) + corrupt_in_buckets(o);
    }
    return wrong == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
