/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of verify/ share: small model folders, checks that must run, files of results. */
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include "anyrank/baseline.h"
#include "ref/io/file.h"
#include "ref/io/safetensors_private.h"
#include "ref/models/parallel_private.h"
#include "ref/models/plan_private.h"
#include "tests/support/small.h"
#include "tests/support/test.h"
#include "tests/verify/tiny.h"
#include "verify/reference/reference.h"
#include "verify/run/cluster_run.h"

/* A new folder below the system's for temporary files; remove_folder takes it away again. */
static inline void make_folder(char path[64])
{
    snprintf(path, 64, "/tmp/anyrank-verify-XXXXXX");
    cr_assert_not_null(mkdtemp(path));
}

static inline void remove_folder(const char *path)
{
    static const char *const files[] = {"config.json",       "outputs.safetensors", "grads.safetensors",
                                        "block.safetensors", "allowed.safetensors", "text",
                                        "model.json"};
    char file[600];
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        snprintf(file, sizeof file, "%s/%s", path, files[i]);
        unlink(file);
    }
    cr_expect_eq(rmdir(path), 0, "%s holds a file that no test expects", path);
}

static inline void write_file(const char *at, const char *name, const char *text)
{
    char path[600];
    snprintf(path, sizeof path, "%s/%s", at, name);
    cr_assert_ok(ari_file_write(path, text, strlen(text)));
}

static inline ar_st_file *open_in(const char *at, const char *name)
{
    char path[700];
    ar_st_file *f = NULL;
    snprintf(path, sizeof path, "%s/%s", at, name);
    cr_assert_ok(ari_st_open(&f, path));
    return f;
}

/* Of the caller, who ends it with OWNED(end_folder). */
static inline char *new_folder(void)
{
    char *path = malloc(64);
    cr_assert_not_null(path);
    make_folder(path);
    return path;
}

/* With this config.json. */
static inline char *new_model(const char *json)
{
    char *path = new_folder();
    write_file(path, "config.json", json);
    return path;
}

static inline void end_folder(char *path)
{
    remove_folder(path);
    free(path);
}
OWNER(char, end_folder)

static inline ar_config config_of(const char *json)
{
    ar_config c;
    cr_assert_ok(ar_config_parse(&c, json, strlen(json), "tiny"));
    return c;
}

/* What the baseline has in the exact numerics. Of the caller. */
static inline ari_reference reference_of(const ar_config *c, const ar_batch *batch)
{
    ari_reference r = {0};
    const ar_baseline_options b = {.mode = AR_MODE_EXACT, .emit = ari_reference_emit, .emit_user = &r};
    cr_assert_ok(ar_baseline_run(c, &b, batch, &r.loss));
    cr_assert_ok(ari_reference_finish(&r));
    return r;
}

/* A run of them, once, on some tensor-parallel ranks. */
static inline ari_cluster_options cluster_of(const ar_config *c, const ar_batch *batch, int tp)
{
    return (ari_cluster_options){
        .config = c, .batch = batch, .run = {.parallel = {.tp = tp}, .threads = 1, .sim.timeout_ns = 60000000000u}};
}

/* The default plan, or the one that splits every MLP the other way. */
static inline ar_plan plan_of(ar_arch arch, ar_mlp_order order)
{
    ar_plan plan = {0};
    if (order != AR_MLP_COLUMN_ROW)
        cr_assert_ok(ari_plan_add_mlp_order(&plan, arch, order));
    return plan;
}

/* Checks of one model in several layouts. */
static inline ar_check_options check_layouts(const char *model, const ar_parallel *parallel, size_t layouts,
                                             size_t batch, size_t seq)
{
    return (ar_check_options){.run.model = model,
                              .parallel = parallel,
                              .layouts = layouts,
                              .run.batch = batch,
                              .run.seq = seq,
                              .run.threads = 1,
                              .run.sim.timeout_ns = 120000000000u,
                              .strict_predictions = true,
                              .skip_f64 = true};
}

/* Checks of one model on several numbers of tensor-parallel ranks. The layouts last until the next call. */
static inline ar_check_options check_of(const char *model, const int *tp, size_t layouts, size_t batch, size_t seq)
{
    static ar_parallel parallel[32];
    cr_assert(layouts <= sizeof parallel / sizeof *parallel);
    for (size_t i = 0; i < layouts; i++)
        parallel[i] = (ar_parallel){.tp = tp[i]};
    return check_layouts(model, parallel, layouts, batch, seq);
}

static inline ar_check_report *check_or_fail(const ar_check_options *o)
{
    ar_check_report *r = NULL;
    cr_assert_ok(ar_check(&r, o));
    cr_assert_eq(r->runs, o->layouts);
    return r;
}

static inline const char *first_of(const ar_check_run *run)
{
    return run->error ? run->error : run->has_difference ? run->first.tensor : "no tensor";
}

/* Every run of the report has the baseline's bits, losses, hashes and predicted bytes. */
static inline void expect_same(const ar_check_report *r, const char *what)
{
    const size_t losses = r->steps > 1 ? (size_t)r->steps : 1;
    const ar_check_result best = r->vacuous.tensor[0] ? AR_CHECK_VACUOUS : AR_CHECK_SAME; /* a token, no target */
    for (size_t i = 0; i < r->runs; i++) {
        const ar_check_run *run = &r->run[i];
        char layout[96];
        ari_parallel_text(layout, sizeof layout, &run->parallel);
        cr_expect_eq(run->result, best, "%s, %s: %s", what, layout, first_of(run));
        cr_expect(run->tensors_different == 0, "%s, %s: %s", what, layout, first_of(run));
        cr_expect(!run->memory_difference[0] && !run->shape_difference[0], "%s, %s: %s%s", what, layout,
                  run->memory_difference, run->shape_difference);
        cr_expect_eq(run->bytes_counted, run->bytes_predicted, "%s, %s: %zu bytes counted, %zu predicted", what, layout,
                     (size_t)run->bytes_counted, (size_t)run->bytes_predicted);
        cr_expect_str_eq(run->weights_hash, r->weights_hash, "%s, %s", what, layout);
        cr_expect_str_eq(run->gradients_hash, r->gradients_hash, "%s, %s", what, layout);
        cr_expect(run->loss && memcmp(run->loss, r->loss, losses * sizeof *r->loss) == 0, "%s, %s: losses differ", what,
                  layout);
        cr_expect(run->tensors == r->tensors && run->tensors > 0 && run->elements == r->elements);
    }
    cr_expect_eq(r->result, best);
    cr_expect(ar_check_passes(r, r->result) == (best == AR_CHECK_SAME));
    cr_expect(!r->vacuous.tensor[0] || r->seq == 1 || r->config.vocab == 1, "%s: %s is vacuous", what,
              r->vacuous.tensor);
}
