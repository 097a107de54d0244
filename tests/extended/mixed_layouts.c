/* SPDX-License-Identifier: Apache-2.0 */
/* Meshes of up to 64 ranks that mix dp, cp, pp, tp, sp and ZeRO, each under four schedules: five AdamW steps with
 * clipping and dropout, of a Llama and of a GPT-2, whose tied table both ends of a pipeline hold. Every tensor is
 * compared; the table has each layout's hash of the weights and its bytes. Exit status 0: one hash for each model, the
 * baseline's, and the predicted bytes. */
#include <stdlib.h>
#include <string.h>

#include "anyrank/check.h"
#include "support/layout_draw.h"

enum { STEPS = 5, BATCH = 8, SEQ = 16, FORMS = 4 };

/* Extents alone. */
static const ar_parallel meshes[] = {
    {.pp = 2},
    {.pp = 4},
    {.pp = 2, .tp = 2},
    {.pp = 2, .dp = 2},
    {.pp = 2, .cp = 2},
    {.pp = 3, .dp = 3},
    {.pp = 2, .dp = 2, .tp = 2},
    {.pp = 4, .dp = 2, .tp = 2},
    {.pp = 2, .dp = 4, .tp = 2},
    {.pp = 2, .cp = 4, .cp_inner = 2, .tp = 2},
    {.pp = 2, .dp = 2, .cp = 2, .tp = 2},
    {.pp = 4, .dp = 2, .cp = 2, .tp = 2},
    {.pp = 2, .dp = 4, .cp = 2, .tp = 2},
    {.pp = 4, .dp = 8},
    {.pp = 4, .dp = 4, .cp = 2, .tp = 2},
    {.pp = 4, .dp = 2, .cp = 2, .tp = 4},
};
enum { MESHES = sizeof meshes / sizeof *meshes, LAYOUTS = MESHES * FORMS };

/* The i-th mesh under a schedule, with a stage of ZeRO, numbers of micro-batches, sequence parallelism, collectives in
 * chunks and recomputation that take turns. */
static ar_parallel layout_of(size_t i, size_t form)
{
    static const ar_stages uneven = {.n = 4, .layers = {1, 3, 4, 0}};
    ar_parallel p = meshes[i];
    const size_t most = p.dp > 1 ? BATCH / (size_t)p.dp : BATCH;
    p.schedule = (ar_pp_schedule)form;
    p.virtual_stages = p.schedule == AR_PP_INTERLEAVED ? 2 : 1;
    p.micro_batches = 1 + (int)((i + 2 * form) % most);
    p.zero = (int)((i + form) % 4);
    p.sp = p.tp > 1 && (i + form) % 2 == 0;
    p.overlap = p.sp ? 1 + (int)(i % 3) : 1;
    p.zigzag = p.cp > p.cp_inner && form % 2 == 0;
    p.recompute = (ar_recomputation){(ar_recompute)((i + form) % AR_RECOMPUTES), 1};
    if (ar_parallel_stages(&p) == uneven.n && form == AR_PP_1F1B)
        p.stages = uneven;
    return p;
}

static void print_run(const ar_check_run *r, bool same)
{
    char layout[160];
    ar_parallel_text(layout, sizeof layout, &r->parallel);
    printf("  %2d ranks  %-86s %.12s %12zu bytes, %12zu predicted, %6.1f s  %s\n", ar_parallel_world(&r->parallel),
           layout, r->weights_hash, (size_t)r->bytes_counted, (size_t)r->bytes_predicted, r->seconds,
           same ? "same bits" : "OTHERS");
    if (r->error || r->has_difference)
        printf("    %s%s %s\n", r->error ? r->error : r->first.tensor, r->error ? "" : ":",
               r->error ? "" : r->first.pattern);
    if (r->call_difference[0] || r->memory_difference[0])
        printf("    %s %s\n", r->call_difference, r->memory_difference);
}

static ar_status check_model(bool *same, const char *model)
{
    ar_parallel layouts[LAYOUTS];
    ar_check_report *r = NULL;
    for (size_t i = 0; i < LAYOUTS; i++)
        layouts[i] = layout_of(i / FORMS, i % FORMS);
    ar_check_options o = {.run.model = model,
                          .run.batch = BATCH,
                          .run.seq = SEQ,
                          .run.steps = STEPS,
                          .run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW),
                          .run.clip = 1.0,
                          .run.dropout = 0.1,
                          .run.ddp = ar_ddp_defaults(),
                          .run.sim.timeout_ns = UINT64_C(300000000000),
                          .parallel = layouts,
                          .layouts = LAYOUTS,
                          .strict_predictions = true,
                          .skip_f64 = true};
    o.run.ddp.bucket_bytes = 10000;
    AR_TRY(ar_check(&r, &o));
    printf("%s: %d steps, %zu tensors of %zu elements, the baseline's weights %.12s\n", model, r->steps, r->tensors,
           r->elements, r->weights_hash);
    for (size_t i = 0; i < r->runs; i++) {
        const ar_check_run *run = &r->run[i];
        const bool ok = run->result == AR_CHECK_SAME && strcmp(run->weights_hash, r->weights_hash) == 0 &&
                        run->bytes_counted == run->bytes_predicted;
        print_run(run, ok);
        *same = *same && ok;
    }
    ar_check_report_destroy(r);
    return AR_OK;
}

/* Eight layers, of widths that four ranks can share. */
static const char *const configs[] = {
    "{\"model_type\": \"llama\", \"vocab_size\": 256, \"hidden_size\": 32, \"intermediate_size\": 48,"
    " \"num_hidden_layers\": 8, \"num_attention_heads\": 8, \"num_key_value_heads\": 4, \"hidden_act\": \"silu\","
    " \"max_position_embeddings\": 16, \"rms_norm_eps\": 1e-5, \"tie_word_embeddings\": false}\n",
    "{\"model_type\": \"gpt2\", \"vocab_size\": 256, \"n_embd\": 32, \"n_layer\": 8, \"n_head\": 8, \"n_positions\": 16,"
    " \"activation_function\": \"gelu_new\", \"layer_norm_epsilon\": 1e-5}\n",
};

int main(void)
{
    bool same = true;
    for (size_t m = 0; m < sizeof configs / sizeof *configs; m++) {
        const char *path = m == 0 ? TEST_BUILD_DIR "/mixed-llama.json" : TEST_BUILD_DIR "/mixed-gpt2.json";
        FILE *f = fopen(path, "w");
        if (!f || fputs(configs[m], f) < 0 || fclose(f) != 0) {
            fprintf(stderr, "mixed_layouts: %s cannot be written\n", path);
            return EXIT_FAILURE;
        }
        if (check_model(&same, path) != AR_OK) {
            fprintf(stderr, "mixed_layouts: %s\n", ar_error_message());
            return EXIT_FAILURE;
        }
    }
    printf("%d layouts of each model: %s\n", (int)LAYOUTS,
           same ? "one hash for each model, the baseline's, and the predicted bytes" : "SOME DIFFER");
    return same ? EXIT_SUCCESS : EXIT_FAILURE;
}
