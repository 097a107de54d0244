/* SPDX-License-Identifier: Apache-2.0 */
/* Published figures of training runs, against the planner's formulas. Rates and layouts are the publications'; what does
 * not fit stays in the table, as unexplained. docs/evidence/planner.tsv has the same rows. */
#include <stdarg.h>

#include "anyrank/config.h"
#include "ref/io/file.h"
#include "ref/models/model_private.h"
#include "ref/models/parallel_private.h"
#include "support/together.h"
#include "tests/planner/counted.h"
#include "tests/planner/shapes.h"

/* A bundled name; or a form and its sizes. */
typedef struct shape {
    const char *bundled;
    size_t layers, hidden, ffn, heads, kv_heads, vocab; /* ffn 0: GPT's */
} shape;

static ar_config config_of(const shape *s)
{
    if (s->bundled)
        return shape_bundled(s->bundled);
    return s->ffn ? shape_llama(s->layers, s->hidden, s->ffn, s->heads, s->kv_heads, s->vocab)
                  : shape_gpt(s->layers, s->hidden, s->heads, s->vocab);
}

/* Whether planner.tsv has this row of a table. */
static void expect_row(const char *format, ...)
{
    char row[256];
    OWNED(free) unsigned char *page = NULL;
    size_t length = 0;
    va_list values;
    va_start(values, format);
    vsnprintf(row, sizeof row, format, values);
    va_end(values);
    cr_assert_ok(ari_file_read(&page, &length, TEST_SOURCE_DIR "/docs/evidence/planner.tsv", 1 << 20));
    cr_expect_not_null(strstr((const char *)page, row), "docs/evidence/planner.tsv lacks: %s", row);
}

/* --- throughput --------------------------------------------------------------------------------------------------- */

#define BUNDLED(name) ROW(.bundled = name)
#define SHAPE(...) ROW(NULL, __VA_ARGS__)

static const struct {
    const char *source;
    shape model;
    size_t seq;
    double tokens, teraflops; /* a second of a GPU, as printed */
    ari_flops_convention convention;
    const char *verdict; /* "fits", or "unexplained" */
} throughput[] = {
    {"NeMo 24.12, Llama3-8B", BUNDLED("llama-3-8b"), 8192, 12273, 711, ARI_FLOPS_PARAMETERS, "fits"},
    {"NeMo 24.12, Llama3-70B", BUNDLED("llama-3-70b"), 8192, 1524, 734, ARI_FLOPS_PARAMETERS, "fits"},
    {"NeMo 24.12, Llama2-7B", SHAPE(32, 4096, 11008, 32, 32, 32000), 4096, 16934, 780, ARI_FLOPS_PARAMETERS, "fits"},
    {"NeMo 24.12, Llama2-13B", SHAPE(40, 5120, 13824, 40, 40, 32000), 4096, 8715, 760, ARI_FLOPS_PARAMETERS, "fits"},
    {"NeMo 24.12, Llama2-70B", SHAPE(80, 8192, 28672, 64, 8, 32000), 4096, 1728, 768, ARI_FLOPS_PARAMETERS, "fits"},
    {"NeMo 24.12, GPT3-5B", SHAPE(24, 4096, 0, 32, 32, 51200), 2048, 23406, 765, ARI_FLOPS_PRODUCTS, "fits"},
    {"NeMo 24.12, GPT3-20B", SHAPE(44, 6144, 0, 48, 48, 51200), 2048, 5851, 750, ARI_FLOPS_PRODUCTS, "fits"},
    {"NeMo 24.12, GPT3-175B, 128 GPUs", BUNDLED("gpt3-175b"), 2048, 716, 771, ARI_FLOPS_PRODUCTS, "fits"},
    {"NeMo 24.12, GPT3-175B, 512 GPUs", BUNDLED("gpt3-175b"), 2048, 825, 888, ARI_FLOPS_PRODUCTS, "fits"},
    {"Megatron Bridge 25.11, Llama3-8B", BUNDLED("llama-3-8b"), 8192, 14451, 744, ARI_FLOPS_CAUSAL, "fits"},
    {"Megatron Bridge 25.11, Llama3-70B", BUNDLED("llama-3-70b"), 8192, 1602, 719, ARI_FLOPS_CAUSAL, "fits"},
    {"Megatron Bridge 25.11, Llama3.1-405B", BUNDLED("llama-3.1-405b"), 8192, 292, 737, ARI_FLOPS_CAUSAL, "fits"},
    {"Megatron Bridge 26.06, Llama3.1-405B", BUNDLED("llama-3.1-405b"), 8192, 326, 822, ARI_FLOPS_CAUSAL, "fits"},
    {"torchtitan, A100, Llama3-8B", BUNDLED("llama-3-8b"), 8192, 2904, 177.2, ARI_FLOPS_TABLES, "fits"},
    {"torchtitan, A100, Llama3-8B, compiled", BUNDLED("llama-3-8b"), 8192, 2973, 181.6, ARI_FLOPS_TABLES, "fits"},
    {"torchtitan, A100, Llama3-70B", BUNDLED("llama-3-70b"), 8192, 331, 161.3, ARI_FLOPS_TABLES, "fits"},
    {"torchtitan, H100, Llama3-405B", BUNDLED("llama-3.1-405b"), 8192, 109, 286.8, ARI_FLOPS_TABLES, "fits"},
    {"Megatron Bridge 26.04.01, Llama3-70B", BUNDLED("llama-3-70b"), 8192, 1664, 731, ARI_FLOPS_CAUSAL, "unexplained"},
};

CLAIM(printed_rates_are_those_of_their_convention)
{
    for (size_t i = 0; i < sizeof throughput / sizeof *throughput; i++) {
        const ar_config c = config_of(&throughput[i].model);
        double flops = 0.0;
        cr_assert_ok(ari_flops_token(&flops, &c, throughput[i].seq, throughput[i].convention, AR_RECOMPUTE_NONE));
        const double rate = flops * throughput[i].tokens * 1e-12, error = rate / throughput[i].teraflops - 1.0;
        cr_expect_str_eq(fabs(error) <= 0.005 ? "fits" : "unexplained", throughput[i].verdict, "%s: %.1f",
                         throughput[i].source, rate);
        expect_row("%s\t%zu\t%.0f\t%g\t%.1f\t%d\t%+.1f %%\t%s\n", throughput[i].source, throughput[i].seq,
                   throughput[i].tokens, throughput[i].teraflops, rate, (int)throughput[i].convention + 1,
                   100.0 * error, throughput[i].verdict);
    }
}

/* Table 5 of Korthikanti et al. 2022: A100 of 312 teraflops, s = 2048, sequence parallelism and selective
 * recomputation. */
static const struct {
    const char *model;
    double gpus, batch, seconds, mfu, hfu; /* percent; hfu 0: not printed */
    double ratio;                          /* HFU / MFU by formula: (1 + s/3h + V/12hL) / (1 + s/6h + V/12hL) */
} korthikanti[] = {
    {"gpt-22b", 8, 4, 1.10, 41.5, 43.7, 1.052},       {"gpt3-175b", 64, 64, 13.75, 51.4, 52.8, 1.027},
    {"gpt-530b", 280, 280, 37.83, 56.0, 57.0, 1.016}, {"gpt-530b", 2240, 2240, 39.15, 54.2, 0, 1.016},
    {"gpt-1t", 512, 512, 71.49, 56.3, 57.0, 1.013},
};

CLAIM(utilisations_are_those_of_korthikanti_et_al)
{
    for (size_t i = 0; i < sizeof korthikanti / sizeof *korthikanti; i++) {
        const ar_config c = shape_bundled(korthikanti[i].model);
        double model = 0.0, hardware = 0.0;
        cr_assert_ok(ari_flops_token(&model, &c, 2048, ARI_FLOPS_PRODUCTS, AR_RECOMPUTE_NONE));
        cr_assert_ok(ari_flops_token(&hardware, &c, 2048, ARI_FLOPS_PRODUCTS, AR_RECOMPUTE_SELECTIVE));
        const double h = (double)c.hidden, layers = (double)c.layers, tokens = korthikanti[i].batch * 2048.0;
        const double formula = 72.0 * layers * h * h * (1.0 + 2048.0 / (6.0 * h) + 51200.0 / (12.0 * h * layers));
        cr_expect_float_eq(model / formula, 1.0, 1e-12, "%s: %.17g", c.name, model / formula);
        cr_expect_eq(round(hardware / model * 1000.0) / 1000.0, korthikanti[i].ratio, "%s: %.5f", c.name,
                     hardware / model);
        const double peak = korthikanti[i].seconds * korthikanti[i].gpus * 312e12;
        const double mfu = model * tokens / peak, hfu = hardware * tokens / peak;
        cr_expect_lt(fabs(100.0 * mfu - korthikanti[i].mfu), 0.5, "%s: %.2f", c.name, 100.0 * mfu);
        cr_expect(korthikanti[i].hfu == 0.0 || fabs(100.0 * hfu - korthikanti[i].hfu) < 0.5, "%s: %.2f", c.name,
                  100.0 * hfu);
        expect_row("%s\t%.0f\t%.0f\t%.2f\t%.1f\t%.2f\t%.1f\t%.2f\t%.3f\n", c.name, korthikanti[i].gpus,
                   korthikanti[i].batch, korthikanti[i].seconds, korthikanti[i].mfu, 100.0 * mfu, korthikanti[i].hfu,
                   100.0 * hfu, korthikanti[i].ratio);
    }
}

/* The GEMMs that are timed are the formula's, whatever the model and the layout. */
CLAIM(timed_products_are_the_formulas)
{
    static const int tp[] = {1, 4, 8};
    for (size_t i = 0; ari_model_names[i]; i++) {
        const ar_config c = shape_bundled(ari_model_names[i]);
        for (size_t k = 0; k < sizeof tp / sizeof *tp; k++) {
            const ari_planned p = shape_planned(&c, c.heads % (size_t)tp[k] == 0 ? tp[k] : 1, true, 2, 64);
            double formula = 0.0, model = 0.0, hardware = 0.0;
            cr_assert_ok(ari_flops_token(&formula, &c, 64, ARI_FLOPS_PRODUCTS, AR_RECOMPUTE_NONE));
            flops_counted(&model, &hardware, &p);
            cr_expect_float_eq(model / formula, 1.0, 1e-9, "%s: %.17g", c.name, model / formula);
            cr_expect_geq(hardware, model * (1.0 - 1e-12));
        }
    }
}

/* Copies of KV heads compute their products again; recomputation the blocks' forward pass, or attention's. */
CLAIM(hardware_counts_copies_and_recomputation)
{
    const ar_config c = shape_bundled("llama-3-8b");
    const double h = 4096.0, kv = 1024.0, s = 512.0, layers = 32.0;
    ari_planned p = shape_planned(&c, 1, false, 1, 512);
    double model = 0.0, hardware = 0.0, blocks = 0.0, all = 0.0;
    flops_counted(&model, &hardware, &p);
    cr_expect_eq(hardware, model);
    p.step.run.parallel.recompute.part = AR_RECOMPUTE_SELECTIVE;
    flops_counted(&model, &hardware, &p);
    cr_expect_float_eq(hardware - model, 4.0 * layers * s * h, 1.0);
    p.step.run.parallel.recompute.part = AR_RECOMPUTE_FULL;
    flops_counted(&model, &hardware, &p);
    cr_assert_ok(ari_flops_token(&blocks, &c, 512, ARI_FLOPS_PRODUCTS, AR_RECOMPUTE_FULL));
    cr_assert_ok(ari_flops_token(&all, &c, 512, ARI_FLOPS_PRODUCTS, AR_RECOMPUTE_NONE));
    cr_expect_float_eq((hardware - model) / (blocks - all), 1.0, 1e-9);
    /* 4 copies of each KV head, on the rank that computes most. */
    p = shape_planned(&c, 32, true, 1, 512);
    flops_counted(&model, &hardware, &p);
    cr_expect_float_eq((hardware - model) / (3.0 * 2.0 * 2.0 * 3.0 * layers * h * kv), 1.0, 1e-9);
}

CLAIM(parameters_of_llama_3_are_the_published_and_those_of_one_rank_of_any_model)
{
    static const struct {
        const char *model;
        size_t parameters;
    } llama[] = {{"llama-3-8b", 8030261248}, {"llama-3-70b", 70553706496}, {"llama-3.1-405b", 405853388800}};
    for (size_t i = 0; ari_model_names[i]; i++) {
        const ar_config c = shape_bundled(ari_model_names[i]);
        const ari_planned p = shape_planned(&c, 1, false, 1, 128);
        size_t n = 0;
        cr_assert_ok(ari_config_parameters(&c, &n));
        cr_expect_eq(shape_memory(&p).bytes[ARI_MEMORY_WEIGHTS], 2.0 * (double)n, "%s", c.name);
        for (size_t k = 0; k < sizeof llama / sizeof *llama; k++)
            cr_expect(strcmp(llama[k].model, ari_model_names[i]) != 0 || n == llama[k].parameters, "%s: %zu", c.name,
                      n);
    }
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

/* arXiv:2412.19437: 671 B, of which a token meets 37 B; section 3.2: 2048 GPUs, pp 16, ep 64, ZeRO-1. */
CLAIM(parameters_of_deepseek_v3_are_the_published_and_its_layout_is_legal)
{
    const ar_config c = shape_bundled("deepseek-v3");
    const ar_parallel published = {.dp = 128, .ep = 64, .pp = 16, .zero = 1, .micro_batches = 120},
                      uneven = {.dp = 96, .ep = 48};
    cr_assert_ok(ari_parallel_check(&published, &c, &(ar_plan){.rules = 0}, 15360, 4096));
    cr_expect_eq(ar_parallel_world(&published), 2048);
    cr_expect_eq(ari_parallel_check(&uneven, &c, &(ar_plan){.rules = 0}, 15360, 4096), AR_ERR_INDIVISIBLE);
    size_t all = 0;
    cr_assert_ok(ari_config_parameters(&c, &all));
    cr_expect_eq(all, 671026419200u, "%zu", all);
    const double others = ari_mlp_matrices(&c, false) - ari_mlp_matrices(&c, true), met = (double)all - others;
    cr_expect_eq(met, 37552297472.0, "%.0f", met);
    cr_expect_eq(ari_attention_matrices(&c), 187105280.0, "%.0f", ari_attention_matrices(&c));
}

/* openai/gpt-oss's model card: 116.83 B and 20.91 B. */
CLAIM(parameters_of_gpt_oss_are_the_published)
{
    size_t all = 0;
    const ar_config large = shape_bundled("gpt-oss-120b"), small = shape_bundled("gpt-oss-20b");
    cr_assert_ok(ari_config_parameters(&large, &all));
    cr_expect_eq(all, 116829156672u, "%zu", all);
    cr_assert_ok(ari_config_parameters(&small, &all));
    cr_expect_eq(all, 20914757184u, "%zu", all);
}

/* torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: GiB at the peak, on H100 of 96 GB. A peak also holds what the
 * account leaves out (planner.md), so it is the difference to the row before that is compared: within a tenth, or
 * where neither layout should have more, within a hundredth of the peak. */
static const struct {
    const char *model, *layout;
    int dp, cp, tp, pp, chunks;
    size_t batch, seq; /* of a dp rank */
    ar_recompute recompute;
    double gib;
    const char *verdict; /* of the difference: "first" of a group, "fits", "equal" or "unexplained" */
} peaks[] = {
    {"llama-3-8b", "dp=8", 8, 1, 1, 1, 1, 2, 8192, AR_RECOMPUTE_SELECTIVE, 82.4, "first"},
    {"llama-3-8b", "dp=128", 128, 1, 1, 1, 1, 2, 8192, AR_RECOMPUTE_SELECTIVE, 67.0, "fits"},
    {"llama-3-8b", "dp=8, compiled", 8, 1, 1, 1, 1, 2, 8192, AR_RECOMPUTE_SELECTIVE, 77.0, "first"},
    {"llama-3-8b", "dp=128, compiled", 128, 1, 1, 1, 1, 2, 8192, AR_RECOMPUTE_SELECTIVE, 62.0, "fits"},
    {"llama-3-8b", "dp=8, float8", 8, 1, 1, 1, 1, 2, 8192, AR_RECOMPUTE_SELECTIVE, 76.8, "first"},
    {"llama-3-8b", "dp=128, float8", 128, 1, 1, 1, 1, 2, 8192, AR_RECOMPUTE_SELECTIVE, 61.8, "fits"},
    {"llama-3-8b", "dp=8", 8, 1, 1, 1, 1, 1, 32768, AR_RECOMPUTE_FULL, 83.9, "first"},
    {"llama-3-8b", "dp=4 cp=2", 4, 2, 1, 1, 1, 1, 65536, AR_RECOMPUTE_FULL, 84.2, "equal"},
    {"llama-3-8b", "dp=2 cp=4", 2, 4, 1, 1, 1, 1, 131072, AR_RECOMPUTE_FULL, 84.0, "equal"},
    {"llama-3-8b", "dp=1 cp=8", 1, 8, 1, 1, 1, 1, 262144, AR_RECOMPUTE_FULL, 84.5, "equal"},
    {"llama-3-70b", "dp=32 tp=8, float8", 32, 1, 8, 1, 1, 16, 8192, AR_RECOMPUTE_FULL, 71.9, "first"},
    {"llama-3-70b", "dp=32 tp=8, float8, asynchronous tp", 32, 1, 8, 1, 1, 16, 8192, AR_RECOMPUTE_FULL, 67.6,
     "unexplained"},
    {"llama-3.1-405b", "dp=8 tp=8 pp=8, 1F1B", 8, 1, 8, 8, 1, 32, 8192, AR_RECOMPUTE_FULL, 82.5, "first"},
    {"llama-3.1-405b", "dp=8 tp=8 pp=8, interleaved", 8, 1, 8, 8, 2, 32, 8192, AR_RECOMPUTE_FULL, 72.7, "unexplained"},
    {"llama-3.1-405b", "dp=8 tp=8 pp=8", 8, 1, 8, 8, 1, 8, 32768, AR_RECOMPUTE_FULL, 75.3, "first"},
    {"llama-3.1-405b", "dp=4 cp=2 tp=8 pp=8", 4, 2, 8, 8, 1, 8, 65536, AR_RECOMPUTE_FULL, 75.9, "equal"},
    {"llama-3.1-405b", "dp=2 cp=4 tp=8 pp=8", 2, 4, 8, 8, 1, 8, 131072, AR_RECOMPUTE_FULL, 77.1, "unexplained"},
    {"llama-3.1-405b", "dp=1 cp=8 tp=8 pp=8", 1, 8, 8, 8, 1, 8, 262144, AR_RECOMPUTE_FULL, 84.9, "unexplained"},
};

static double predicted_gib(size_t i)
{
    const ar_config c = shape_bundled(peaks[i].model);
    ari_planned p = shape_planned(&c, peaks[i].tp, true, peaks[i].batch * (size_t)peaks[i].dp, peaks[i].seq);
    p.step.run.parallel.dp = peaks[i].dp;
    p.step.run.parallel.zero = 3;
    p.step.run.parallel.micro_batches = peaks[i].pp > 1 ? (int)peaks[i].batch : 1;
    p.step.run.parallel.cp = peaks[i].cp;
    p.step.run.parallel.pp = peaks[i].pp;
    p.step.run.parallel.virtual_stages = peaks[i].chunks;
    p.step.run.parallel.schedule = peaks[i].chunks > 1 ? AR_PP_INTERLEAVED : AR_PP_1F1B;
    p.step.run.parallel.recompute.part = peaks[i].recompute;
    p.flash = true;
    const ari_memory m = shape_memory(&p);
    return ari_memory_sum(&m) / 0x1p30;
}

CLAIM(peaks_of_torchtitan_differ_as_their_layouts_do)
{
    double before = 0.0;
    for (size_t i = 0; i < sizeof peaks / sizeof *peaks; i++) {
        const double here = predicted_gib(i), change = i > 0 ? peaks[i].gib - peaks[i - 1].gib : 0.0;
        const char *verdict = "unexplained";
        if (fabs(here - before - change) <= 0.1 * fabs(change))
            verdict = "fits";
        else if (here == before && fabs(change) <= 0.01 * peaks[i].gib)
            verdict = "equal";
        cr_expect_str_eq(strcmp(peaks[i].verdict, "first") == 0 ? "first" : verdict, peaks[i].verdict,
                         "row %zu: %+.2f GiB, printed %+.2f", i, here - before, change);
        if (strcmp(peaks[i].verdict, "first") == 0)
            expect_row("%s\t%s\t%zu x %zu\t%.1f\t%.1f\t-\t-\t-\n", peaks[i].model, peaks[i].layout, peaks[i].batch,
                       peaks[i].seq, peaks[i].gib, here);
        else
            expect_row("%s\t%s\t%zu x %zu\t%.1f\t%.1f\t%+.1f\t%+.1f\t%s\n", peaks[i].model, peaks[i].layout,
                       peaks[i].batch, peaks[i].seq, peaks[i].gib, here, change, here - before, verdict);
        before = here;
    }
}

/* GiB of Llama 3 8B by kind; peaks as above. */
CLAIM(memory_of_llama_3_8b)
{
    static const ari_memory_kind columns[] = {
        ARI_MEMORY_WEIGHTS, ARI_MEMORY_GRADIENTS, ARI_MEMORY_MASTER, ARI_MEMORY_OPTIMIZER, ARI_MEMORY_ATTENTION,
        ARI_MEMORY_MLP,     ARI_MEMORY_BETWEEN,   ARI_MEMORY_OUTER,  ARI_MEMORY_LOGITS,    ARI_MEMORY_WORKSPACE};
    static const struct {
        const char *layout;
        int tp, dp, zero;
        bool sp;
        size_t batch, seq; /* of a dp rank */
        ar_recompute recompute;
        const char *printed;
    } rows[] = {
        {"tp=1", 1, 1, 0, false, 1, 8192, AR_RECOMPUTE_NONE, "-"},
        {"tp=8", 8, 1, 0, false, 1, 8192, AR_RECOMPUTE_NONE, "-"},
        {"tp=8 sp", 8, 1, 0, true, 1, 8192, AR_RECOMPUTE_NONE, "-"},
        {"tp=8 sp, full", 8, 1, 0, true, 1, 8192, AR_RECOMPUTE_FULL, "-"},
        {"dp=8 zero=1", 1, 8, 1, false, 1, 8192, AR_RECOMPUTE_NONE, "-"},
        {"dp=8 zero=2", 1, 8, 2, false, 1, 8192, AR_RECOMPUTE_NONE, "-"},
        {"dp=8 zero=3", 1, 8, 3, false, 1, 8192, AR_RECOMPUTE_NONE, "-"},
        {"dp=8 zero=3", 1, 8, 3, false, 2, 8192, AR_RECOMPUTE_NONE, "82.4, selective"},
        {"dp=8 zero=3, full", 1, 8, 3, false, 2, 8192, AR_RECOMPUTE_FULL, "82.4, selective"},
        {"dp=128 zero=3", 1, 128, 3, false, 2, 8192, AR_RECOMPUTE_NONE, "67.0, selective"},
        {"dp=128 zero=3, full", 1, 128, 3, false, 2, 8192, AR_RECOMPUTE_FULL, "67.0, selective"},
        {"dp=8 zero=3, full", 1, 8, 3, false, 1, 32768, AR_RECOMPUTE_FULL, "83.9, full"},
    };
    const ar_config c = shape_bundled("llama-3-8b");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        ari_planned p = shape_planned(&c, rows[i].tp, rows[i].sp, rows[i].batch * (size_t)rows[i].dp, rows[i].seq);
        p.step.run.parallel.dp = rows[i].dp;
        p.step.run.parallel.zero = rows[i].zero;
        p.step.run.parallel.recompute.part = rows[i].recompute;
        p.flash = true;
        const ari_memory m = shape_memory(&p);
        char cells[256] = "";
        for (size_t k = 0, n = 0; k < sizeof columns / sizeof *columns; k++)
            n += (size_t)snprintf(cells + n, sizeof cells - n, "%.1f\t", m.bytes[columns[k]] / 0x1p30);
        expect_row("%s\t%zu x %zu\t%s%.1f\t%s\n", rows[i].layout, rows[i].batch, rows[i].seq, cells,
                   ari_memory_sum(&m) / 0x1p30, rows[i].printed);
    }
}

/* --- layouts ------------------------------------------------------------------------------------------------------ */

/* Llama 3's three (arXiv:2407.21783, table 4): 16 M tokens a step on 8,192 and 16,384 GPUs, of which each has fewer a
 * second than those of the layout before. */
CLAIM(layouts_of_llama_3_405b_are_legal_and_in_order)
{
    static const struct {
        int tp, cp, pp, dp;
        size_t seq, batch; /* of a dp rank */
    } layouts[] = {{8, 1, 16, 64, 8192, 32}, {8, 1, 16, 128, 8192, 16}, {8, 16, 16, 8, 131072, 16}};
    const ar_config c = shape_bundled("llama-3.1-405b");
    ari_time_options options = {.fp32_sums = false};
    cr_assert_ok(ar_sim_cluster_parse(&options.cluster, "h100"));
    double before = 0.0;
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        const size_t batch = layouts[i].batch * (size_t)layouts[i].dp;
        ari_planned p = shape_planned(&c, layouts[i].tp, true, batch, layouts[i].seq);
        p.step.run.parallel.dp = layouts[i].dp;
        p.step.run.parallel.cp = layouts[i].cp;
        p.step.run.parallel.zigzag = layouts[i].cp > 1;
        p.step.run.parallel.micro_batches = (int)layouts[i].batch;
        cr_expect_ok(ar_run_check(&p.step.run, &c));
        cr_expect_eq(layouts[i].seq * batch, (size_t)1 << 24, "tokens of a step");
        p.step.run.parallel.zero = 2;
        p.step.run.parallel.pp = layouts[i].pp;
        p.flash = true;
        const ari_memory m = shape_memory(&p);
        const double states = m.bytes[ARI_MEMORY_WEIGHTS] + m.bytes[ARI_MEMORY_GRADIENTS] + m.bytes[ARI_MEMORY_MASTER] +
                              m.bytes[ARI_MEMORY_OPTIMIZER];
        /* The second stage, of 8 layers: an eighth of each, gradients and what follows divided over dp and cp. */
        const double block = 2.0 * 16384.0 * 16384.0 + 2.0 * 16384.0 * 1024.0 + 3.0 * 16384.0 * 53248.0;
        const double n = 8.0 * (block / 8.0 + 2.0 * 16384.0);
        cr_expect_eq(states, 2.0 * n + 14.0 * ceil(n / (layouts[i].dp * layouts[i].cp)), "%.0f", states);
        ari_time t;
        cr_assert_ok(ari_time_of(&t, &p, &options));
        const double ranks = layouts[i].tp * layouts[i].cp * layouts[i].pp * layouts[i].dp;
        const double tokens = 0x1p24 / ari_time_step(&t) / ranks;
        cr_expect(i == 0 || tokens < before, "layout %zu: %.1f tokens a second of a GPU", i, tokens);
        before = tokens;
    }
}

EVERY_CLAIM(rows)
