/* SPDX-License-Identifier: Apache-2.0 */
/* The memory that a run is said to take, beside what GNU time measured: maximum resident set of
 *
 *     /usr/bin/time -f %M anyrank check MODEL --steps K --tp N --batch B --seq S [--skip-f64] [--dump FOLDER] ..
 *     /usr/bin/time -f %M anyrank grads MODEL --tp N --input IDS.safetensors --out FOLDER [--per-rank] ..  (rows "alone")
 *
 * of a Release build with gcc 12 and glibc 2.36 on two x86-64 cores; one measurement, or the larger of two, which differ
 * by up to 2% (the smallest model: 14%). Models other than the demos are a folder with the config.json below and fresh
 * weights, "file" one with weights too. The estimate is never below and at most 1.6 times that. */
#include <sys/resource.h>

#include "ref/models/model_private.h"
#include "ref/models/plan_private.h"
#include "support/row.h"
#include "tests/verify/support.h"
#include "verify/check/check_private.h"
#include "verify/check/compare.h"
#include "verify/plan/estimate.h"
#include "verify/reference/sensitivity.h"

#define GPT2_124M                                                                                                 \
    "{\"model_type\":\"gpt2\",\"vocab_size\":50257,\"n_embd\":768,\"n_head\":12,\"n_layer\":12,\"n_inner\":3072," \
    "\"n_positions\":1024,\"activation_function\":\"gelu_new\",\"layer_norm_epsilon\":1e-05,"                     \
    "\"tie_word_embeddings\":true,\"initializer_range\":0.02}"
#define TWO_BLOCKS(vocab, hidden, ffn, heads, kv)                                                              \
    "{\"model_type\":\"llama\",\"vocab_size\":" vocab ",\"hidden_size\":" hidden ",\"intermediate_size\":" ffn \
    ",\"num_hidden_layers\":2,\"num_attention_heads\":" heads ",\"num_key_value_heads\":" kv                   \
    ",\"hidden_act\":\"silu\",\"max_position_embeddings\":2048,\"rms_norm_eps\":1e-05,"                        \
    "\"tie_word_embeddings\":false,\"initializer_range\":0.02}"
#define WIDE TWO_BLOCKS("256", "1024", "4096", "8", "2")
#define MANY_TOKENS TWO_BLOCKS("32000", "128", "344", "4", "4")

typedef struct measured {
    const char *model; /* of the data directory, or JSON */
    int tp;            /* alone, or with: */
    ar_parallel parallel;
    size_t batch, seq;
    int steps;
    ar_optimizer_kind optimizer;
    ar_precision precision;
    bool f64, alone, row_column, native, dropout, sensitivity;
    ari_estimate_dump dump;
    bool merges;
    size_t bucket_bytes; /* 0: the command's choice */
    size_t kib;
} measured;

#define SIZE(samples, tokens) .batch = (samples), .seq = (tokens)
#define ADAMW(n) .steps = (n), .optimizer = AR_OPTIMIZER_ADAMW

static const measured table[] = {
    {.model = "gpt2-demo", .tp = 1, SIZE(8, 64), .kib = 163584},
    {.model = "gpt2-demo", .tp = 4, SIZE(8, 64), .kib = 187092},
    {.model = "gpt2-demo", .tp = 12, SIZE(8, 64), .f64 = true, .kib = 299052},
    {.model = "llama-demo", .tp = 2, SIZE(8, 64), .f64 = true, .kib = 211312},
    {.model = "stack-demo", .tp = 4, SIZE(8, 64), .kib = 67988},
    {.model = "stack-demo", .tp = 1, SIZE(2, 512), .f64 = true, .kib = 228140},
    {.model = "gpt2-demo", .tp = 4, SIZE(8, 128), .row_column = true, .kib = 433680},
    {.model = "gpt2-demo", .tp = 12, SIZE(8, 64), .row_column = true, .kib = 589432},
    {.model = "llama-demo", .tp = 2, SIZE(2, 256), .kib = 223152},
    {.model = "gpt2-demo", .tp = 6, SIZE(32, 16), .kib = 221048},
    {.model = "gpt2-demo", .tp = 4, SIZE(1, 1024), .kib = 850736},
    {.model = "gpt2-demo", .tp = 12, SIZE(2, 512), .kib = 557640},
    {.model = "gpt2-demo", .tp = 1, SIZE(8, 512), .kib = 1965360},
    {.model = "gpt2-demo", .tp = 4, SIZE(8, 512), .kib = 1965708},
    {.model = MANY_TOKENS, .tp = 2, SIZE(4, 128), .kib = 343940},
    {.model = MANY_TOKENS, .tp = 4, SIZE(4, 128), .f64 = true, .kib = 421620},
    {.model = WIDE, .tp = 2, SIZE(2, 64), .kib = 590080},
    {.model = WIDE, .tp = 2, SIZE(2, 64), .kib = 711092}, /* file */
    {.model = GPT2_124M, .tp = 4, SIZE(1, 32), .kib = 2542236},
    {.model = GPT2_124M, .tp = 1, SIZE(1, 32), .kib = 2225632},
    {.model = GPT2_124M, .tp = 1, SIZE(1, 32), .f64 = true, .kib = 2225824},
    {.model = "gpt2-demo", .tp = 4, SIZE(8, 512), .alone = true, .kib = 747152},
    {.model = WIDE, .tp = 2, SIZE(2, 64), .alone = true, .kib = 747308},
    {.model = WIDE, .tp = 2, SIZE(2, 64), .alone = true, .kib = 868232}, /* file */
    {.model = "gpt2-demo", .parallel = {.tp = 4, .sp = true}, SIZE(8, 64), .kib = 208280},
    {.model = "gpt2-demo", .parallel = {.tp = 12, .sp = true}, SIZE(8, 48), .kib = 353452},
    {.model = "gpt2-demo", .parallel = {.dp = 2}, SIZE(8, 64), .kib = 184600},
    {.model = "gpt2-demo", .parallel = {.pp = 4, .dp = 2}, SIZE(8, 64), ADAMW(1), .kib = 378732},
    {.model = "llama-demo", .parallel = {.pp = 2, .micro_batches = 4}, SIZE(8, 64), ADAMW(1), .kib = 256308},
    {.model = "gpt2-demo", .parallel = {.dp = 4}, SIZE(8, 64), .kib = 291172},
    {.model = "gpt2-demo", .parallel = {.dp = 8}, SIZE(8, 64), .kib = 465156},
    {.model = "gpt2-demo", .parallel = {.dp = 4, .tp = 2, .sp = true}, SIZE(8, 64), .kib = 380956},
    {.model = "gpt2-demo", .parallel = {.micro_batches = 4}, SIZE(8, 64), .kib = 163652},
    ROW(.model = "gpt2-demo", .parallel = {.dp = 2, .micro_batches = 2, .forward_first = true}, SIZE(8, 64),
        .kib = 250028),
    {.model = "gpt2-demo", .tp = 4, SIZE(8, 64), ADAMW(1), .kib = 236820},
    {.model = "gpt2-demo", .tp = 4, SIZE(8, 64), ADAMW(3), .kib = 389280},
    {.model = "gpt2-demo", .tp = 4, SIZE(8, 64), .steps = 3, .optimizer = AR_OPTIMIZER_SGD, .kib = 308624},
    {.model = "gpt2-demo", .parallel = {.dp = 4}, SIZE(8, 64), ADAMW(3), .kib = 522600},
    {.model = "gpt2-demo", .parallel = {.dp = 4, .zero = 1}, SIZE(8, 64), ADAMW(3), .kib = 481080},
    {.model = "gpt2-demo", .parallel = {.dp = 2, .tp = 2, .zero = 1}, SIZE(8, 64), ADAMW(3), .kib = 425868},
    ROW(.model = "gpt2-demo", .parallel = {.dp = 8, .zero = 1}, SIZE(8, 64), ADAMW(3), .bucket_bytes = AR_BUCKET_BYTES,
        .kib = 1522728),
    ROW(.model = "gpt2-demo", .parallel = {.dp = 2, .tp = 3, .sp = true}, SIZE(8, 48), .dropout = true, ADAMW(3),
        .kib = 490432),
    {.model = "gpt2-demo", .tp = 4, SIZE(8, 64), .native = true, ADAMW(2), .kib = 767096},
    {.model = "gpt2-demo", .tp = 4, SIZE(8, 64), .alone = true, .sensitivity = true, .kib = 427692},
    {.model = "llama-demo", .parallel = {.tp = 8, .sp = true}, SIZE(8, 64), .kib = 248620},
    ROW(.model = "llama-demo", .parallel = {.dp = 2, .tp = 4, .sp = true, .keep_gathered = true}, SIZE(8, 64), ADAMW(2),
        .kib = 598660),
    {.model = WIDE, .tp = 2, SIZE(2, 64), ADAMW(1), .kib = 1075736},
    {.model = WIDE, .tp = 2, SIZE(2, 64), ADAMW(2), .kib = 1129560},
    {.model = WIDE, .parallel = {.dp = 2}, SIZE(2, 64), .kib = 1363240},
    {.model = MANY_TOKENS, .tp = 2, SIZE(4, 128), ADAMW(2), .kib = 574356},
    {.model = MANY_TOKENS, .parallel = {.tp = 2, .dp = 2, .sp = true}, SIZE(4, 128), .kib = 647584},
    {.model = "gpt2-demo", .tp = 4, SIZE(8, 32), ADAMW(8), .kib = 665648},
    {.model = "llama-demo", .tp = 2, SIZE(8, 64), ADAMW(3), .kib = 433356},
    {.model = "stack-demo", .parallel = {.tp = 4, .dp = 2, .sp = true}, SIZE(8, 128), ADAMW(3), .kib = 180540},
    {.model = "stack-demo", .tp = 2, SIZE(2, 256), .native = true, .kib = 200024},
    {.model = "gpt2-demo", .tp = 4, SIZE(8, 64), .dropout = true, .kib = 202724},
    {.model = "gpt2-demo", .parallel = {.tp = 4, .sp = true}, SIZE(4, 512), .kib = 1005716},
    {.model = "gpt2-demo", .parallel = {.micro_batches = 8}, SIZE(8, 256), .kib = 684872},
    {.model = "gpt2-demo", .tp = 4, SIZE(8, 64), .alone = true, .dump = ARI_DUMPS_RESULTS, .kib = 160076},
    {.model = "gpt2-demo", .tp = 4, SIZE(8, 64), .alone = true, .dump = ARI_DUMPS_FIRST, .merges = true, .kib = 333740},
    {.model = "gpt2-demo", .tp = 4, SIZE(8, 128), .alone = true, .dump = ARI_DUMPS_ALL, .merges = true, .kib = 803744},
    ROW(.model = "llama-demo", .parallel = {.dp = 2, .tp = 2}, SIZE(8, 64), .alone = true, .dump = ARI_DUMPS_ALL,
        .merges = true, .kib = 584196),
    {.model = "gpt2-demo", .tp = 4, SIZE(8, 64), ADAMW(2), .dump = ARI_DUMPS_ALL, .kib = 642932},
    ROW(.model = "llama-demo", .parallel = {.dp = 2, .tp = 2, .zero = 1}, SIZE(8, 64), ADAMW(1), .dump = ARI_DUMPS_ALL,
        .kib = 531252),
    {.model = "llama-demo", .parallel = {.tp = 8, .sp = true}, SIZE(8, 64), .dump = ARI_DUMPS_ALL, .kib = 345888},
};

static void load(ar_config *c, const char *model)
{
    char path[600];
    if (model[0] == '{')
        cr_assert_ok(ar_config_parse(c, model, strlen(model), "test"));
    else
        cr_assert(snprintf(path, sizeof path, "%s/%s", TEST_DATA_DIR, model) < (int)sizeof path &&
                      ar_config_load(c, path) == AR_OK,
                  "%s", ar_error_message());
}

static ari_estimate estimate_of(const measured *m)
{
    ar_config c;
    ar_plan plan = {0};
    ari_estimate e = {0};
    load(&c, m->model);
    if (m->row_column)
        cr_assert_ok(ari_plan_add_mlp_order(&plan, c.arch, AR_MLP_ROW_COLUMN));
    ar_parallel parallel = m->parallel;
    if (m->tp > 0)
        parallel.tp = m->tp;
    const size_t usual = m->alone ? AR_BUCKET_BYTES : ari_check_default_bucket_bytes(&c);
    const ari_estimate_case run =
        ROW(.config = &c, .parallel = &parallel, .layouts = 1,
            .run = {.plan = plan,
                    .batch = m->batch,
                    .seq = m->seq,
                    .steps = (uint64_t)m->steps,
                    .optimizer = ar_optimizer_defaults(m->optimizer),
                    .numerics = m->native ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT,
                    .precision = m->precision,
                    .dropout = m->dropout ? 0.1 : 0.0,
                    .ddp.bucket_bytes = m->bucket_bytes ? m->bucket_bytes : usual,
                    .threads = 2},
            .f64 = m->f64, .alone = m->alone,
            .noise_runs = m->sensitivity || (m->native && !m->alone) ? ARI_NOISE_SEEDS : 0,
            .bytes_per_tensor = sizeof(ari_ref_tensor), .bytes_per_finding = sizeof(ari_finding),
            .bytes_on_disk = ARI_REFERENCE_LARGE, .dump = m->dump, .merges = m->merges);
    cr_assert_ok(ari_estimate_check(&e, &run));
    return e;
}

Test(estimate, counts_what_updates_in_doubt_take_where_products_have_fewer_bits)
{
    measured m = ROW(.model = "llama-demo", .tp = 1, .batch = 2, .seq = 8, .steps = 3, .native = true,
                     .optimizer = AR_OPTIMIZER_ADAMW);
    ar_config c;
    size_t parameters = 0;
    load(&c, m.model);
    cr_assert_ok(ari_config_parameters(&c, &parameters));
    const ari_estimate usual = estimate_of(&m);
    m.precision = AR_PRECISION_BF16;
    cr_expect_geq(estimate_of(&m).bytes, usual.bytes + 3 * parameters * sizeof(float));
}

Test(estimate, is_between_the_measured_peak_and_sixteen_tenths_of_it)
{
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        const measured *m = &table[i];
        const double ratio = (double)estimate_of(m).bytes / ((double)m->kib * 1024.0);
        cr_expect(ratio >= 1.0 && ratio <= 1.6, "row %zu (tp=%d, %zu x %zu): %.3f of the measured peak", i, m->tp,
                  m->batch, m->seq, ratio);
    }
}

Test(estimate, grows_with_what_is_run)
{
    /* Long sequences: here the binary64 baseline is the peak. */
    measured m = {.model = "stack-demo", .tp = 1, .batch = 2, .seq = 512};
    const ari_estimate exact = estimate_of(&m);
    m.f64 = true;
    const ari_estimate both = estimate_of(&m);
    cr_expect(both.bytes > exact.bytes && both.seconds > exact.seconds && both.macs == exact.macs);
    m.alone = true;
    const ari_estimate alone = estimate_of(&m);
    cr_expect(alone.bytes < exact.bytes && alone.seconds < exact.seconds);
    cr_expect(exact.macs > 0.0 && exact.seconds > 0.0 && exact.available > 0);
}

Test(estimate, counts_multiply_adds_by_hand)
{
    /* Two blocks of h 128, q 128, kv 64, F 344 on 3 x 5 tokens: 3 passes over the matrices and 6 attention products. */
    const measured m = {.model = "stack-demo", .tp = 1, .batch = 3, .seq = 5};
    const double matrices = 128.0 * (128 + 64 + 64) + 128.0 * 128 + 2.0 * 128 * 344;
    cr_expect_eq(estimate_of(&m).macs, 2.0 * (3.0 * 15 * matrices + 6.0 * 15 * 5 * 128));
}

Test(estimate, says_what_does_not_fit)
{
    ari_estimate e = {.bytes = 3000000000u, .available = 3000000000u};
    cr_expect_ok(ari_estimate_fits(&e));
    e.available--;
    cr_expect_eq(ari_estimate_fits(&e), AR_ERR_ARG);
    cr_expect(error_says("3.0 GB") && error_says("fewer steps") && error_says("ranks"), "%s", ar_error_message());
    e = (ari_estimate){.space = 5000000, .available_space = 4000000};
    cr_expect_eq(ari_estimate_fits(&e), AR_ERR_ARG);
    cr_expect(error_says("5.0 MB of address space") && error_says("4.0 MB are free"), "%s", ar_error_message());
}

/* Two threads a rank, each with a stack; the allocator's part depends on the processors. */
Test(estimate, threads_reserve_address_space)
{
    const measured one = {.model = "gpt2-demo", .tp = 1, .batch = 8, .seq = 64};
    const measured many = {.model = "gpt2-demo", .parallel = {.dp = 8}, .batch = 8, .seq = 64};
    const ari_estimate a = estimate_of(&one), b = estimate_of(&many);
    struct rlimit stack;
    cr_assert_eq(getrlimit(RLIMIT_STACK, &stack), 0);
    const double each = stack.rlim_cur == RLIM_INFINITY ? 2e6 : (double)stack.rlim_cur;
    cr_expect_geq((double)(a.space - a.bytes), 2.0 * each);
    cr_expect_geq((double)(b.space - b.bytes) - (double)(a.space - a.bytes), 14.0 * each);
}

Test(estimate, refuses_absurd_sizes)
{
    ar_config c;
    ari_estimate e;
    load(&c, "stack-demo");
    cr_expect_ok(ari_estimate_layers(&c));
    const ar_parallel one = {.tp = 1};
    const ari_estimate_case run =
        ROW(.config = &c, .run.batch = (size_t)1 << 40, .run.seq = (size_t)1 << 40, .parallel = &one, .layouts = 1);
    cr_expect_eq(ari_estimate_check(&e, &run), AR_ERR_OVERFLOW);
    c.layers = (size_t)1 << 40; /* at once: not one layer after the other */
    cr_expect_eq(ari_estimate_layers(&c), AR_ERR_ARG);
    c.layers = SIZE_MAX;
    cr_expect_eq(ari_estimate_layers(&c), AR_ERR_OVERFLOW);
}
