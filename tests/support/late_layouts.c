/* SPDX-License-Identifier: Apache-2.0 */
#include "support/late_layouts.h"

#include <stdlib.h>
#include <string.h>

#include "anyrank/check.h"
#include "ref/models/parallel_private.h"
#include "support/trajectory.h"

enum { STEPS = 2 };

/* Small buckets, so that several are under way. */
#define BYTES 6000

/* A table that is tied lies on both ends of a pipeline; four layers are four stages. Native numerics have the bits of the
 * same layout with streams that are not late. */
enum { LLAMA, GPT2, FOUR_LAYERS, NATIVE };

static const struct {
    trajectory_layout layout;
    int model;
} layouts[] = {
    {{{.tp = 2, .micro_batches = 2}, BYTES, AR_BUCKETS_OVERLAP}, LLAMA},
    {{{.tp = 4, .sp = true, .overlap = 3}, BYTES, AR_BUCKETS_OVERLAP}, LLAMA},
    {{{.tp = 2, .sp = true, .overlap = 2, .keep_gathered = true}, BYTES, AR_BUCKETS_OVERLAP}, GPT2},
    {{{.dp = 2, .micro_batches = 2}, BYTES, AR_BUCKETS_OVERLAP}, GPT2},
    {{{.dp = 3, .micro_batches = 2, .forward_first = true}, BYTES, AR_BUCKETS_EAGER}, LLAMA},
    {{{.dp = 3, .zero = 1}, BYTES, AR_BUCKETS_OVERLAP}, LLAMA},
    {{{.dp = 2, .zero = 2, .micro_batches = 2}, BYTES, AR_BUCKETS_OVERLAP}, LLAMA},
    {{{.dp = 3, .zero = 3}, BYTES, AR_BUCKETS_OVERLAP}, GPT2},
    {{{.dp = 4, .zero = 3, .dp_replicate = 2}, BYTES, AR_BUCKETS_OVERLAP}, LLAMA},
    {{{.dp = 2, .tp = 2, .sp = true, .zero = 3, .micro_batches = 2, .recompute = {AR_RECOMPUTE_FULL, 1}},
      BYTES,
      AR_BUCKETS_OVERLAP},
     LLAMA},
    {{{.dp = 2, .tp = 2, .sp = true, .overlap = 2, .zero = 2}, BYTES, AR_BUCKETS_OVERLAP}, NATIVE},
    {{{.pp = 2, .schedule = AR_PP_1F1B, .micro_batches = 3}, BYTES, AR_BUCKETS_OVERLAP}, GPT2},
    {{{.pp = 2, .schedule = AR_PP_ZERO_BUBBLE, .micro_batches = 3, .tp = 2}, BYTES, AR_BUCKETS_OVERLAP}, LLAMA},
    {{{.pp = 2, .schedule = AR_PP_INTERLEAVED, .virtual_stages = 2, .micro_batches = 2, .dp = 2, .zero = 2},
      BYTES,
      AR_BUCKETS_OVERLAP},
     FOUR_LAYERS},
    {{{.pp = 2, .schedule = AR_PP_GPIPE, .micro_batches = 2, .dp = 2, .zero = 3}, BYTES, AR_BUCKETS_OVERLAP}, GPT2},
    {{{.cp = 2, .micro_batches = 2}, BYTES, AR_BUCKETS_OVERLAP}, LLAMA},
    {{{.cp = 4, .zigzag = true}, BYTES, AR_BUCKETS_EAGER}, GPT2},
    {{{.cp = 4, .cp_inner = 2, .zigzag = true, .zero = 1}, BYTES, AR_BUCKETS_OVERLAP}, LLAMA},
    {{{.cp = 2, .cp_inner = 2, .tp = 2, .sp = true, .overlap = 2, .zero = 2}, BYTES, AR_BUCKETS_OVERLAP}, LLAMA},
};

enum { LAYOUTS = sizeof layouts / sizeof *layouts };

typedef struct outcome {
    char hash[65];
    float loss;
} outcome;

static ar_training_options options_of(int model)
{
    const char *path = trajectory_model(model == GPT2 ? "gpt2" : "llama", model == FOUR_LAYERS ? 4 : 2);
    ar_training_options o = trajectory_options(path, STEPS);
    o.run.seq = 8;
    o.run.numerics = model == NATIVE ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT;
    return o;
}

/* Of devices that are made from here on. */
static const char *choose(uint64_t seed)
{
    static char streams[48];
    snprintf(streams, sizeof streams, "%s:%llu", seed % 2 ? "late" : "latest", (unsigned long long)seed);
    setenv("ANYRANK_EMULATED_STREAMS", streams, 1);
    return streams;
}

static bool is_same(size_t i, uint64_t seed, const outcome *expected)
{
    char text[160];
    outcome got = {"", 0};
    ar_training_options o = options_of(layouts[i].model);
    ari_parallel_text(text, sizeof text, &layouts[i].layout.parallel);
    const char *streams = choose(seed);
    o.run.device.kind = AR_DEVICE_EMULATED;
    if (trajectory_run(got.hash, &got.loss, &o, &layouts[i].layout) != AR_OK) {
        printf("%s, %s: %s\n", text, streams, ar_error_message());
        return false;
    }
    const bool same = strcmp(got.hash, expected->hash) == 0 && memcmp(&got.loss, &expected->loss, sizeof got.loss) == 0;
    if (!same)
        printf("%s, %s: weights %.12s and a loss of %.9g, not %.12s and %.9g\n", text, streams, got.hash,
               (double)got.loss, expected->hash, (double)expected->loss);
    return same;
}

/* Of layout i. */
static ar_status expect(outcome *e, size_t i)
{
    const bool native = layouts[i].model == NATIVE;
    const trajectory_layout alone = {{.tp = 1}, 0, AR_BUCKETS_EAGER};
    ar_training_options o = options_of(layouts[i].model);
    setenv("ANYRANK_EMULATED_STREAMS", "eager", 1);
    o.run.device.kind = native ? AR_DEVICE_EMULATED : AR_DEVICE_CPU;
    return trajectory_run(e->hash, &e->loss, &o, native ? &layouts[i].layout : &alone);
}

size_t late_layouts_run(uint64_t first, uint64_t seeds)
{
    outcome expected[LAYOUTS];
    size_t wrong = 0;
    for (size_t i = 0; i < LAYOUTS; i++)
        if (expect(&expected[i], i) != AR_OK) {
            printf("what late streams are compared with: %s\n", ar_error_message());
            return 1;
        }
    for (uint64_t seed = first; seed < first + seeds; seed++)
        for (size_t i = 0; i < LAYOUTS; i++)
            wrong += !is_same(i, seed, &expected[i]);
    printf("%llu seeds of late streams, %d kinds of layout: %zu of %llu runs have other bits\n",
           (unsigned long long)seeds, (int)LAYOUTS, wrong, (unsigned long long)(seeds * LAYOUTS));
    return wrong;
}

size_t late_layouts_check(uint64_t seed)
{
    static const ar_parallel some[] = {{.dp = 2, .tp = 2, .sp = true, .overlap = 2, .zero = 3},
                                       {.pp = 2, .schedule = AR_PP_1F1B, .micro_batches = 2, .tp = 2},
                                       {.cp = 2, .dp = 2, .zero = 1, .micro_batches = 2}};
    const ar_training_options like = options_of(LLAMA);
    ar_check_options o = {.run = like.run,
                          .parallel = some,
                          .layouts = sizeof some / sizeof *some,
                          .strict_predictions = true,
                          .skip_f64 = true};
    ar_check_report *r = NULL;
    size_t wrong = 0;
    const char *streams = choose(seed);
    o.run.device.kind = AR_DEVICE_EMULATED;
    o.run.ddp.bucket_bytes = BYTES;
    if (ar_check(&r, &o) != AR_OK) {
        printf("check, %s: %s\n", streams, ar_error_message());
        return o.layouts;
    }
    for (size_t i = 0; i < r->runs; i++)
        wrong += r->run[i].result != AR_CHECK_SAME;
    printf("check, %s: %zu of %zu layouts have other bits\n", streams, wrong, r->runs);
    ar_check_report_destroy(r);
    return wrong;
}
