/* SPDX-License-Identifier: Apache-2.0 */
/* Writes and compares dumps of ranks: a tensor-parallel MLP on one rank and on two, the second of which has read
 * another input. `anyrank verify one two` reports the same as the calls below. */
#define _POSIX_C_SOURCE 200809L /* mkdtemp */
#include "anyrank/activation.h"
#include "anyrank/dump_listener.h"
#include "anyrank/layers.h"
#include "anyrank/sim.h"
#include "anyrank/verify.h"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { HIDDEN = 4 };
typedef struct run {
    char folder[64]; /* of the dump */
    ar_parallel parallel;
    bool other_input; /* a mistake: the last rank's */
} run;

static ar_status forward_backward(ar_ctx *ctx, bool other_input)
{
    const ar_mlp_options shape = {.hidden = HIDDEN, .ffn = 16, .activation = AR_ACT_GELU_TANH, .bias = true};
    const size_t extents[] = {2, 1, HIDDEN};
    const float input[] = {1, -2, 3, 0.1f, -0.2f, other_input ? 0.4f : 0.3f, 1e3f, -1e-3f};
    ar_module *mlp = NULL;
    ar_saved *saved = NULL;
    ar_tensor x, y, dx;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ar_saved_create(&saved));
    AR_TRY_TO(done, st, ar_mlp_create(&mlp, ctx, "mlp", &shape));
    AR_TRY_TO(done, st, ar_module_fresh(mlp, ctx, 42));
    AR_TRY_TO(done, st, ar_ctx_tensor(ctx, &x, AR_F32, 3, extents));
    AR_TRY_TO(done, st, ar_ctx_upload(ctx, &x, input));
    AR_TRY_TO(done, st, ar_module_forward(mlp, ctx, saved, &y, &x, NULL));
    AR_TRY_TO(done, st, ar_module_backward(mlp, ctx, saved, &dx, &y, NULL));
    AR_TRY_TO(done, st, ar_module_reduce_grads(mlp, ctx));
done:
    ar_module_destroy(mlp);
    ar_saved_destroy(saved);
    return st;
}

static ar_status rank_main(ar_comm *world, void *user)
{
    const run *r = (const run *)user;
    const int rank = ar_comm_rank(world);
    const ar_dump_place place = ar_dump_place_of(&r->parallel, rank);
    ar_dump_listener *listener = NULL;
    ar_ctx *ctx = NULL;
    ar_ctx_options o = {.tp = world, .tap = ar_dump_listener_tap};
    ar_status st = ar_device_cpu_create(&o.device, 1);
    AR_TRY_TO(done, st, ar_dump_listener_create(&listener, NULL));
    o.tap_user = listener;
    AR_TRY_TO(done, st, ar_ctx_create(&ctx, &o));
    AR_TRY_TO(done, st, forward_backward(ctx, r->other_input && rank + 1 == ar_comm_size(world)));
    AR_TRY_TO(done, st, ar_dump_listener_write(listener, r->folder, &place, NULL, 0));
done:
    ar_dump_listener_destroy(listener);
    ar_ctx_destroy(ctx);
    ar_device_destroy(o.device);
    return st;
}

/* A run's dump, in a new folder. */
static ar_status dump(run *r)
{
    snprintf(r->folder, sizeof r->folder, "/tmp/anyrank-example-XXXXXX");
    if (!mkdtemp(r->folder))
        return ar_error_set(AR_ERR_IO, "no folder in /tmp");
    return ar_sim_run(r->parallel.tp, NULL, rank_main, r, NULL);
}

int main(void)
{
    run runs[] = {{.parallel = {.tp = 1}}, {.parallel = {.tp = 2}, .other_input = true}};
    ar_verify_report *report = NULL;
    const ar_verify_options o = {.reference = runs[0].folder, .other = runs[1].folder};
    const bool ran = !dump(&runs[0]) && !dump(&runs[1]) && !ar_verify(&report, &o);
    const bool found = ran && !report->same && report->first < report->rows;
    if (found)
        printf("first: %s, %zu of %zu elements\n", report->row[report->first].name,
               report->row[report->first].elements_different, report->row[report->first].elements);
    else
        printf("%s\n", ran ? "the same" : ar_error_message());
    ar_verify_report_destroy(report);
    for (int i = 0; i < 3; i++) { /* rank 0 of one, ranks 0 and 1 of two */
        char file[128];
        snprintf(file, sizeof file, "%s/rank-%05d.safetensors", runs[i > 0].folder, i == 2);
        unlink(file);
    }
    return rmdir(runs[0].folder) + rmdir(runs[1].folder) == 0 && found ? 0 : 1;
}
