/* SPDX-License-Identifier: Apache-2.0 */
/* anyrank bench block: transformer blocks, native and exact, and what their slots take. */
#include "bench/bench.h"
#include "cli/bench/bench.h"
#include "run/run.h"

enum { BLOCKS = 2, SIDES = 2, LINES = BLOCKS * SIDES };

/* A block in one of the numerics. */
typedef struct block_line {
    const char *block, *numerics;
    size_t batch, seq;
    ar_bench_block_row row;
} block_line;

#define ARI_ROW block_line
static const ari_field block_fields[] = {
    ARI_FIELD("block", "block", TEXT, block),
    ARI_FIELD("parameters", "parameters", COUNT, row.parameters),
    ARI_FIELD("numerics", "numerics", TEXT, numerics),
    ARI_FIELD("batch", "batch", COUNT, batch),
    ARI_FIELD("seq", "seq", COUNT, seq),
    ARI_FIELD("seconds", "time", SECONDS, row.time.seconds),
    ARI_FIELD("gflops", "GF/s", RATE, row.time.gflops),
    ARI_FIELD("gemm_fraction", "products", RATIO, row.time.gemm_fraction),
    ARI_FIELD("over_native", "of native", RATIO, row.time.over_first),
    ARI_FIELD("spread", "spread", SHARE, row.time.spread),
};
#undef ARI_ROW

typedef struct slot_line {
    const char *block, *numerics;
    ar_bench_slot_row row;
} slot_line;

#define ARI_ROW slot_line
static const ari_field slot_fields[] = {
    ARI_FIELD("block", "block", TEXT, block),      ARI_FIELD("numerics", "numerics", TEXT, numerics),
    ARI_FIELD("slot", "slot", TEXT, row.slot),     ARI_FIELD("part", "of it", TEXT, row.part),
    ARI_FIELD("calls", "calls", COUNT, row.calls), ARI_FIELD("seconds", "time", MILLISECONDS, row.seconds),
    ARI_FIELD("share", "share", SHARE, row.share), ARI_FIELD("bytes", "MB of tensors", MEGABYTES, row.bytes),
};
#undef ARI_ROW

/* Number i of the blocks to time: the model's, where one is given; NULL after the last. */
static const ar_config *block_at(const ari_bench_session *s, size_t i)
{
    return !s->v->model ? ari_bench_block_config(s->v->block_size == 1, i) : i == 0 ? &s->config : NULL;
}

/* lines: [LINES]. Gives how many. */
static ar_status time_blocks(ari_bench_session *s, block_line *lines, size_t *n)
{
    const ari_bench_options *v = s->v;
    ar_bench_block_options o = {.batch = v->r.run.batch ? v->r.run.batch : 2,
                                .seq = v->r.run.seq ? v->r.run.seq : 512,
                                .which = &s->device,
                                .precision = v->r.run.precision,
                                .threads = s->threads,
                                .repetitions = s->repetitions,
                                .profile = v->profile};
    for (*n = 0; (o.config = block_at(s, *n / SIDES)) && *n < LINES; *n += SIDES) {
        ar_bench_block_row rows[SIDES];
        ari_bench_progress(s, *n, LINES);
        AR_TRY(ari_bench_block(rows, &o));
        lines[*n] = (block_line){o.config->name, "native", o.batch, o.seq, rows[0]};
        lines[*n + 1] = (block_line){o.config->name, "exact", o.batch, o.seq, rows[1]};
    }
    return AR_OK;
}

ar_status ari_bench_run_block(ari_bench_session *s)
{
    block_line lines[LINES];
    slot_line slots[LINES * ARI_BENCH_SLOTS];
    char folder[512];
    size_t n = 0, n_slots = 0;
    if (s->v->model)
        AR_TRY(ari_run_config(&s->config, folder, sizeof folder, &(ar_run){.model = s->v->model}));
    AR_TRY(time_blocks(s, lines, &n));
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < lines[i].row.n_slots; k++)
            slots[n_slots++] = (slot_line){lines[i].block, lines[i].numerics, lines[i].row.slots[k]};
    s->more = s->v->profile ? ARI_ROWS(slot_fields, slots, n_slots) : NULL;
    s->more_key = "profile";
    return ari_bench_end(
        s, ARI_ROWS(block_fields, lines, n), s->threads,
        "\nOne transformer block forward and backward, %d thread%s; medians. 'products': time of its matrix "
        "products\nalone, by sgemm, over that of the block. 'of native': over the time of the native block. "
        "'spread': of the\ntimes, (largest - smallest)/median.\n%s",
        s->threads, s->threads == 1 ? "" : "s",
        s->v->profile
            ? "\nThe slots of the device's table in one more pass: 'of it': a part of a slot's calls; 'share': "
              "of the pass.\n\n"
            : "");
}
