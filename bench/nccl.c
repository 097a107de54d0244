/* SPDX-License-Identifier: Apache-2.0 */
/* all_reduce through ar_comm over NCCL, beside ncclAllReduce called directly, as nccl-tests does: in the same
 * processes, on the same stream, with a communicator of its own; blocks of calls of both in turn, and the medians.
 *
 *   ANYRANK_NCCL_ID_FILE=/tmp/id torchrun --no-python --nproc-per-node 2 build/cuda/bench/nccl [--repetitions R]
 * [--share]
 *
 * or by srun or mpirun (clusters.md). --share: several processes on one GPU (right for correctness, not for speed).
 * What ar_comm does more: it notes the call and where its stream is done with it, for the report if it never is. */
#include <stdio.h>
#include <stdlib.h>

#include "anyrank/comm.h"
#include "anyrank/process.h"
#include "anyrank/queue.h"
#include "bench/harness.h"
#include "gpu/cluster/nccl/nccl.h"
#include "gpu/cluster/process/process_private.h"
#include "gpu/device_private.h"
#include "gpu/native.h"

#define BLOCK_SECONDS 0.01
#define MOST_BYTES ((size_t)1 << 28)

typedef struct bench {
    ar_process *process;
    ar_device *device;
    ar_queue *queue;
    ar_comm *comm;
    ari_nccl nccl;
    void *direct, *stream; /* NCCL's own communicator, the queue's stream */
    ari_nccl_emulated_stream emulated;
    ar_buf input, out;
    size_t count;
    int calls; /* of a block */
} bench;

static void need(const bench *b, ar_status st)
{
    if (st == AR_OK)
        return;
    fprintf(stderr, "nccl: %s\n", ar_error_message());
    if (b->process)
        ari_process_abort(b->process, st, ar_error_message());
    exit(1);
}

static ar_status call_directly(const bench *b)
{
    return ari_nccl_check(
        &b->nccl,
        b->nccl.AllReduce(b->input.ptr, b->out.ptr, b->count, ARI_NCCL_F32, ARI_NCCL_SUM, b->direct, b->stream),
        b->direct, "ncclAllReduce");
}

static ar_status call_own(const bench *b)
{
    return ar_comm_all_reduce(b->comm, b->queue, b->out, ar_const(b->input), b->count, AR_F32, AR_SUM, "bench");
}

/* Seconds of a call, the slowest rank's. */
static double time_block(const bench *b, bool direct, int calls)
{
    need(b, ar_comm_barrier(b->comm, b->queue, "bench"));
    const double begin = ari_bench_seconds();
    for (int i = 0; i < calls; i++)
        need(b, direct ? call_directly(b) : call_own(b));
    need(b, ar_queue_sync(b->queue, 0));
    const double local_seconds = (ari_bench_seconds() - begin) / calls;
    double *gathered = NULL, took = local_seconds;
    need(b, ari_process_gather(b->process, (void **)&gathered, NULL, &local_seconds, sizeof local_seconds));
    for (int r = 0; gathered && r < ari_process_size(b->process); r++)
        took = gathered[r] > took ? gathered[r] : took;
    free(gathered);
    need(b, ari_process_broadcast(b->process, &took, sizeof took));
    return took;
}

enum { DIRECT, OWN, SIDES };

static ar_status repetition(void *user, double times[SIDES])
{
    const bench *b = user;
    times[DIRECT] = time_block(b, true, b->calls);
    times[OWN] = time_block(b, false, b->calls);
    return AR_OK;
}

static void measure(bench *b, ari_bench *out)
{
    ARI_ENDED(ari_bench_series_destroy) ari_bench_series s = {0};
    (void)time_block(b, true, 3); /* connections are made by the first calls of each size */
    const double call_seconds = time_block(b, false, 3);
    b->calls = call_seconds < BLOCK_SECONDS ? (int)(BLOCK_SECONDS / call_seconds) : 1;
    need(b, ari_bench_repeat(&s, SIDES, out->repetitions, 0, repetition, b));
    const ari_bench_stat ratio = ari_bench_ratio_of(&s, OWN, DIRECT);
    need(b,
         ari_bench_add(out, "rows",
                       json_pack("{s:i, s:I, s:f, s:f, s:f, s:f}", "ranks", ari_process_size(b->process), "bytes",
                                 (json_int_t)(b->count * sizeof(float)), "nccl_seconds",
                                 ari_bench_times_of(&s, DIRECT).median, "seconds", ari_bench_times_of(&s, OWN).median,
                                 "over_nccl", ratio.median, "spread", ratio.spread)));
}

/* The same group as the communicator's, in NCCL's own hands. */
static void connect_directly(bench *b)
{
    ari_nccl_id id = {.internal = ""};
    if (ar_process_rank(b->process) == 0)
        need(b, ari_nccl_check(&b->nccl, b->nccl.GetUniqueId(&id), NULL, "ncclGetUniqueId"));
    need(b, ari_process_broadcast(b->process, &id, sizeof id));
    b->emulated = (ari_nccl_emulated_stream){b->device, b->queue};
    b->stream = &b->emulated;
    if (!b->nccl.emulated_gpu)
        need(b, ari_gpu_native_stream(b->device, b->queue, &b->stream));
    need(b, ari_nccl_check(&b->nccl,
                           b->nccl.CommInitRankConfig(&b->direct, ari_process_size(b->process), id,
                                                      ar_process_rank(b->process), NULL),
                           NULL, "ncclCommInitRankConfig"));
}

static void begin(bench *b, bool share)
{
    const ar_process_options o = {.transport = AR_TRANSPORT_NCCL, .share_gpus = share};
    const int gpus = ari_gpu_count();
    need(b, ari_nccl_load(&b->nccl));
    need(b, ar_process_create(&b->process, &o));
    const int gpu =
        o.share_gpus && gpus > 0 ? ari_process_local_rank(b->process) % gpus : ari_process_local_rank(b->process);
    need(b, b->nccl.emulated_gpu ? ari_device_emulated_create(&b->device) : ari_device_cuda_create(&b->device, gpu));
    need(b, b->device->ops->queue_create(b->device, &b->queue, AR_QUEUE_INLINE, "bench"));
    need(b, ar_process_comm(&b->comm, b->process, b->device));
    need(b, b->device->ops->alloc(b->device, b->queue, &b->input, MOST_BYTES));
    need(b, b->device->ops->alloc(b->device, b->queue, &b->out, MOST_BYTES));
    need(b, b->device->ops->zero(b->device, b->queue, b->input, MOST_BYTES));
    connect_directly(b);
}

int main(int argc, char **argv)
{
    bool share = false;
    const ari_bench_option options[] = {{"share", "several processes on one GPU", .flag = &share}};
    ari_bench out = {.name = "nccl", .device.kind = AR_DEVICE_CUDA, .threads = 1, .repetitions = 21};
    bench b = {.process = NULL};
    (void)argc;
    ari_bench_begin(&out, argv, options, 1);
    begin(&b, share);
    /* The library that stands in for NCCL is no transport to measure: it shows that this program works. */
    const size_t max_bytes = b.nccl.emulated_gpu ? (size_t)1 << 16 : MOST_BYTES;
    for (size_t bytes = 8; bytes <= max_bytes;
         bytes = bytes < max_bytes && bytes * 8 > max_bytes ? max_bytes : bytes * 8) {
        b.count = bytes / sizeof(float);
        measure(&b, &out);
        if (bytes == max_bytes)
            break;
    }
    const bool is_root = ar_process_rank(b.process) == 0;
    (void)b.nccl.CommDestroy(b.direct);
    b.device->ops->free(b.device, b.queue, b.input);
    b.device->ops->free(b.device, b.queue, b.out);
    ar_comm_destroy(b.comm);
    ar_queue_destroy(b.queue);
    ar_device_destroy(b.device);
    ar_process_destroy(b.process);
    if (!is_root)
        json_decref(out.result);
    return is_root ? ari_bench_end(&out, AR_OK) : 0;
}
