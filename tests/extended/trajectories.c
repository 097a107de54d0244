/* SPDX-License-Identifier: Apache-2.0 */
/* 200 AdamW steps with warm-up, clipping and dropout on real text, of a Llama and a GPT-2: the baseline's weights,
 * those of every layout here, and those of runs that were interrupted at step 57 under one layout and resumed under
 * another. Exit status 0: one hash for each model. Argument: another number of steps (at least 3). */

#include "ref/core/clock.h"
#include "ref/models/parallel_private.h"
#include "support/trajectory.h"
#include "tests/support/temporary.h"

#define STEPS 200
#define STOP 57

static const trajectory_layout layouts[] = {
    {{.tp = 1}, 0, AR_BUCKETS_EAGER},
    {{.micro_batches = 3}, AR_BUCKET_BYTES, AR_BUCKETS_OVERLAP},
    {{.tp = 2}, AR_BUCKET_BYTES, AR_BUCKETS_OVERLAP},
    {{.tp = 2, .sp = true}, AR_BUCKET_BYTES, AR_BUCKETS_OVERLAP},
    {{.tp = 4, .sp = true, .keep_gathered = true}, AR_BUCKET_BYTES, AR_BUCKETS_OVERLAP},
    {{.dp = 2}, 0, AR_BUCKETS_OVERLAP},
    {{.dp = 2, .micro_batches = 2}, 20000, AR_BUCKETS_EAGER},
    {{.dp = 3, .micro_batches = 2, .forward_first = true}, 20000, AR_BUCKETS_OVERLAP},
    {{.dp = 4}, 20000, AR_BUCKETS_OVERLAP}, /* 6 samples: 2, 2, 1, 1 */
    {{.dp = 2, .zero = 1}, AR_BUCKET_BYTES, AR_BUCKETS_OVERLAP},
    {{.dp = 5, .zero = 1}, 20000, AR_BUCKETS_EAGER},
    {{.dp = 2, .tp = 2}, 50000, AR_BUCKETS_OVERLAP},
    {{.dp = 2, .tp = 2, .sp = true, .zero = 1, .micro_batches = 2}, 20000, AR_BUCKETS_OVERLAP},
    {{.dp = 7, .zero = 1}, 20000, AR_BUCKETS_OVERLAP}, /* more ranks than samples */
    {{.dp = 3, .tp = 4, .sp = true, .zero = 1}, 30000, AR_BUCKETS_OVERLAP},
    {{.dp = 2, .tp = 2, .sp = true, .micro_batches = 2, .recompute = {AR_RECOMPUTE_SELECTIVE, 1}},
     20000,
     AR_BUCKETS_OVERLAP},
    {{.dp = 3, .zero = 1, .recompute = {AR_RECOMPUTE_FULL, 2}}, 20000, AR_BUCKETS_OVERLAP},
    {{.pp = 2, .tp = 2, .micro_batches = 2}, 20000, AR_BUCKETS_OVERLAP},
    {{.pp = 2, .dp = 2, .zero = 2, .micro_batches = 3, .schedule = AR_PP_ZERO_BUBBLE}, 10000, AR_BUCKETS_OVERLAP},
    {{.pp = 2, .dp = 2, .cp = 2, .tp = 2, .zero = 3, .schedule = AR_PP_GPIPE}, 10000, AR_BUCKETS_OVERLAP},
    {{.cp = 2}, AR_BUCKET_BYTES, AR_BUCKETS_OVERLAP},
    {{.cp = 4, .zigzag = true}, 20000, AR_BUCKETS_EAGER},
    {{.cp = 3, .micro_batches = 2}, 0, AR_BUCKETS_OVERLAP},
    {{.cp = 2, .cp_inner = 2}, 20000, AR_BUCKETS_OVERLAP},
    {{.cp = 4, .cp_inner = 4, .micro_batches = 3}, 20000, AR_BUCKETS_OVERLAP},
    {{.cp = 4, .cp_inner = 2, .zigzag = true, .zero = 1}, 20000, AR_BUCKETS_OVERLAP},
    {{.cp = 6, .zigzag = true, .micro_batches = 2, .forward_first = true}, 20000, AR_BUCKETS_EAGER},
    {{.cp = 2, .tp = 2, .sp = true}, 50000, AR_BUCKETS_OVERLAP},
    {{.cp = 2, .cp_inner = 2, .tp = 2, .sp = true, .zero = 1}, 20000, AR_BUCKETS_OVERLAP},
    {{.cp = 2, .dp = 5, .zero = 1}, 20000, AR_BUCKETS_OVERLAP},
    {{.cp = 3, .zigzag = true, .tp = 2, .sp = true, .dp = 2}, 30000, AR_BUCKETS_OVERLAP},
    {{.cp = 4, .cp_inner = 2, .tp = 2, .dp = 2, .sp = true, .zero = 1, .micro_batches = 2}, 0, AR_BUCKETS_OVERLAP},
};
#define LAYOUTS (sizeof layouts / sizeof *layouts)

static bool tell(const char *what, const char *hash, const char *expected, double seconds)
{
    const bool same = strcmp(hash, expected) == 0;
    printf("  %-66s %.12s  %6.1f s  %s\n", what, hash, seconds, same ? "same bits" : "OTHER BITS");
    fflush(stdout);
    return same;
}

static ar_status interrupted(bool *same, const ar_training_options *o, const char *expected, size_t first, size_t then)
{
    SCOPED(temp_end) const temp_path folder = temp_folder();
    char name[2][64], what[160], hash[65];
    const uint64_t start = ari_now_ns(), stop = o->run.steps > STOP ? STOP : o->run.steps / 2;
    ari_parallel_text(name[0], sizeof name[0], &layouts[first].parallel);
    ari_parallel_text(name[1], sizeof name[1], &layouts[then].parallel);
    snprintf(what, sizeof what, "%s to step %llu, %s on", name[0], (unsigned long long)stop, name[1]);
    AR_TRY(trajectory_resumed(hash, o, &layouts[first], stop, &layouts[then], folder.path));
    *same = tell(what, hash, expected, 1e-9 * (double)(ari_now_ns() - start)) && *same;
    return AR_OK;
}

static ar_status model(bool *same, const char *type, uint64_t steps)
{
    const ar_training_options o = trajectory_options(trajectory_model(type, 2), steps);
    char expected[65], hash[65], name[64];
    float loss = 0.0f;
    uint64_t start = ari_now_ns();
    AR_TRY(trajectory_baseline(expected, &loss, &o));
    printf("%s, %llu steps; the baseline's last loss is %.4f\n", type, (unsigned long long)steps, (double)loss);
    tell("baseline", expected, expected, 1e-9 * (double)(ari_now_ns() - start));
    for (size_t i = 0; i < LAYOUTS; i++) {
        start = ari_now_ns();
        ari_parallel_text(name, sizeof name, &layouts[i].parallel);
        AR_TRY(trajectory_run(hash, NULL, &o, &layouts[i]));
        *same = tell(name, hash, expected, 1e-9 * (double)(ari_now_ns() - start)) && *same;
    }
    AR_TRY(interrupted(same, &o, expected, 12, 1));
    AR_TRY(interrupted(same, &o, expected, 0, 14));
    AR_TRY(interrupted(same, &o, expected, 9, 6));
    return interrupted(same, &o, expected, 23, 28);
}

int main(int argc, char **argv)
{
    const uint64_t steps = argc > 1 ? strtoull(argv[1], NULL, 10) : STEPS;
    bool same = true;
    if (steps < 3) {
        fprintf(stderr, "usage: trajectories [STEPS]: at least 3\n");
        return 2;
    }
    if (model(&same, "llama", steps) != AR_OK || model(&same, "gpt2", steps) != AR_OK) {
        fprintf(stderr, "trajectories: %s\n", ar_error_message());
        return EXIT_FAILURE;
    }
    printf("%s\n", same ? "one hash for each model: the same bits in every layout" : "SOME DIFFER");
    return same ? EXIT_SUCCESS : EXIT_FAILURE;
}
