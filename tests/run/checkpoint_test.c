/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/models/parallel_private.h"
#include "support/small.h"
#include "tests/run/checkpoint_frame.h"
#include "verify/run/checkpoint_private.h"

TestSuite(checkpoint, .init = begin, .fini = end);

static const ar_parallel layouts[] = {{.tp = 1},
                                      {.tp = 3, .sp = true},
                                      {.pp = 2, .dp = 2, .tp = 2, .zero = 1, .micro_batches = 2},
                                      {.dp = 2, .tp = 2, .micro_batches = 2},
                                      {.dp = 3},
                                      {.pp = 2, .micro_batches = 4},
                                      {.dp = 2, .zero = 3},
                                      {.pp = 2, .dp = 4, .zero = 3, .dp_replicate = 2, .micro_batches = 2},
                                      {.dp = 3, .tp = 2, .sp = true, .zero = 1},
                                      {.dp = 4, .zero = 2, .micro_batches = 2}};
#define LAYOUTS (sizeof layouts / sizeof layouts[0])

/* Steps 1 to 2 in each layout, steps 3 to 4 in the next but one: the bits of a run in one piece on one rank. */
static void expect_resumable(int model)
{
    small_run whole = small_run_of(model);
    whole.run.dropout = 0.1;
    run_or_fail(&whole, "the whole run");
    for (size_t i = 0; i < LAYOUTS; i++) {
        small_run first = small_run_of(model), second = small_run_of(model);
        char text[96];
        first.run.parallel = layouts[i];
        second.run.parallel = layouts[(i + 2) % LAYOUTS];
        first.run.dropout = second.run.dropout = 0.1;
        first.last = second.first = 2;
        ari_parallel_text(text, sizeof text, &first.run.parallel);
        first.writer = writer_of(0, true);
        run_or_fail(&first, text);
        ar_checkpoint *c = open_or_fail();
        cr_expect_str_eq(ari_checkpoint_weights_hash(c), first.hash, "%s", text);
        second.from = c;
        run_or_fail(&second, text);
        cr_expect_str_eq(second.hash, whole.hash, "%s, and then another layout", text);
        cr_expect_eq(memcmp(second.loss, whole.loss + 2, 2 * sizeof(float)), 0, "%s: losses", text);
        ar_checkpoint_close(c);
        ar_checkpoint_writer_destroy(first.writer);
        end();
        begin();
    }
}

Test(checkpoint, a_run_goes_on_under_any_layout_with_the_same_bits)
{
    expect_resumable(TINY_LLAMA);
    if (!small_only())
        expect_resumable(TINY_GPT2);
}

/* The files that two layouts write differ in nothing. */
Test(checkpoint, files_do_not_depend_on_the_layout)
{
    static const char *const names[] = {"latest/model.safetensors", "latest/optimizer.safetensors",
                                        "latest/training.json"};
    unsigned char *want[3] = {NULL};
    size_t bytes[3] = {0};
    for (size_t i = 0; i < LAYOUTS; i++) {
        save_one(TINY_LLAMA, layouts[i]);
        for (size_t k = 0; k < 3; k++) {
            OWNED(free) unsigned char *got = NULL;
            size_t n = 0;
            cr_assert_ok(ari_file_read(&got, &n, in_folder(names[k]), 1 << 24));
            cr_assert(i == 0 || (n == bytes[k] && memcmp(got, want[k], n) == 0), "layout %zu: %s", i, names[k]);
            if (i > 0)
                continue;
            want[k] = got;
            bytes[k] = n;
            got = NULL;
        }
        end();
        begin();
    }
    for (size_t k = 0; k < 3; k++)
        free(want[k]);
}

Test(checkpoint, what_is_written_is_what_is_read)
{
    small_run r = small_run_of(TINY_TIED);
    r.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_SGD);
    r.run.optimizer.momentum = 0.9;
    r.run.optimizer.groups = 1;
    snprintf(r.run.optimizer.group[0].glob, sizeof r.run.optimizer.group[0].glob, "*.norm*");
    r.run.optimizer.group[0].lr_scale = 0.1;
    r.run.optimizer.group[0].weight_decay = (double)NAN;
    r.last = 3;
    r.writer = writer_of(0, true);
    run_or_fail(&r, "save");
    OWNED(ar_checkpoint_close) ar_checkpoint *c = open_or_fail();
    const ar_checkpoint_state *s = ar_checkpoint_state_of(c);
    cr_assert_eq(s->step, 3);
    cr_assert_eq(s->steps, 8);
    cr_assert_eq(s->seed, SMALL_SEED);
    cr_assert_eq(s->optimizer.kind, AR_OPTIMIZER_SGD);
    cr_assert(s->optimizer.lr == r.run.optimizer.lr && s->optimizer.momentum == 0.9 && s->clip == 1);
    cr_assert_eq(s->optimizer.groups, 1);
    cr_assert_str_eq(s->optimizer.group[0].glob, "*.norm*");
    cr_assert(s->optimizer.group[0].weight_decay != s->optimizer.group[0].weight_decay, "NaN");
    cr_assert_eq(s->losses, 3);
    cr_assert_eq(memcmp(s->loss, r.loss, sizeof(float[3])), 0);
    cr_assert_eq(s->data_format, AR_DATA_BYTES);
    cr_assert_null(s->data_path);
    cr_assert_eq(strncmp(s->data_hash, "00112233", 8), 0);
    cr_assert_str_eq(ari_checkpoint_weights_hash(c), r.hash);
    cr_assert(strstr(ari_checkpoint_path(c), "/step-00000003"), "%s", ari_checkpoint_path(c));
    cr_assert_str_eq(ari_checkpoint_written(r.writer), ari_checkpoint_path(c));
    cr_assert_not_null(ari_checkpoint_find(c, "model.norm.weight", 36));
    cr_assert_null(ari_checkpoint_find(c, "model.norm.weight", 35));
    ar_checkpoint_writer_destroy(r.writer);
}

/* It is read when the writer is made. */
Test(checkpoint, the_config_is_copied_as_it_is)
{
    char config[64], text[8] = "";
    OWNED(ar_checkpoint_writer_destroy) ar_checkpoint_writer *w = NULL;
    ar_checkpoint *c = NULL;
    write_in("config.json", "{ }\n");
    snprintf(config, sizeof config, "%s", file);
    const ar_checkpoint_options o = {.folder = folder, .config = config};
    small_run r = small_run_of(TINY_TIED);
    r.last = 1;
    cr_assert_ok(ar_checkpoint_writer_create(&w, &o));
    unlink(config);
    r.writer = w;
    run_or_fail(&r, "save");
    FILE *f = fopen(in_folder("latest/config.json"), "r");
    cr_assert(f && fgets(text, sizeof text, f) && fclose(f) == 0);
    cr_assert_str_eq(text, "{ }\n");
    ar_checkpoint_close(open_or_fail());
    write_in("latest/config.json", "{  }\n");
    cr_assert_refused(ar_checkpoint_open(&c, folder), AR_ERR_DATA, "config.json: damaged");
}

Test(checkpoint, an_older_one_goes_when_the_newer_one_is_there)
{
    small_run r = small_run_of(TINY_TIED);
    r.every_step = true;
    r.writer = writer_of(2, true);
    run_or_fail(&r, "four steps");
    expect_names("latest step-00000003 step-00000004 ");
    write_in("step-00000003/notes.txt", "");
    cr_assert_eq(mkdir(in_folder("step-00000099"), 0777), 0, "a later step is not older");
    cr_assert_eq(mkdir(in_folder("step-2"), 0777), 0, "no name of ours");
    OWNED(ar_checkpoint_close) ar_checkpoint *c = open_or_fail();
    small_run more = small_run_of(TINY_TIED);
    more.from = c;
    more.first = 4;
    more.last = 6;
    more.every_step = true;
    more.writer = r.writer;
    run_or_fail(&more, "two more");
    expect_names("latest step-00000003 step-00000005 step-00000006 step-00000099 step-2 ");
    ar_checkpoint_writer_destroy(r.writer);
}

Test(checkpoint, a_new_run_does_not_write_into_another_runs_folder)
{
    save_one(TINY_TIED, (ar_parallel){.tp = 1});
    const ar_checkpoint_options o = {.folder = folder, .fresh = true};
    ar_checkpoint_writer *w = NULL, *second = NULL;
    cr_assert_refused(ar_checkpoint_writer_create(&w, &o), AR_ERR_ARG, "step-00000002; resume it");
    w = writer_of(0, false);
    const ar_checkpoint_options same = {.folder = folder};
    cr_assert_refused(ar_checkpoint_writer_create(&second, &same), AR_ERR_IO, "another process");
    ar_checkpoint_writer_destroy(w);
}

Test(checkpoint, one_of_the_same_step_is_replaced_but_not_with_notes_in_it)
{
    save_one(TINY_TIED, (ar_parallel){.tp = 1});
    save_one(TINY_LLAMA, (ar_parallel){.tp = 1});
    expect_names("latest step-00000002 ");
    OWNED(ar_checkpoint_close) ar_checkpoint *c = open_or_fail();
    cr_assert_not_null(ari_checkpoint_find(c, "lm_head.weight", 257 * 48), "the second one's");
    write_in("latest/notes.txt", "");
    small_run r = small_run_of(TINY_TIED);
    r.last = 2;
    r.writer = writer_of(0, false);
    cr_assert_refused(small_run_do(&r), AR_ERR_IO, "step-00000002: is in the way");
    ar_checkpoint_writer_destroy(r.writer);
    cr_assert_eq(access(in_folder("latest/notes.txt"), F_OK), 0);
    ar_checkpoint_close(open_or_fail());
}

/* The last bit of one element of the last rank's copy of a norm's weight. */
static ar_status change_a_copy(ar_ctx *ctx, ar_param **params, size_t n)
{
    if (ar_comm_rank(ctx->world) != ar_comm_size(ctx->world) - 1)
        return AR_OK;
    for (size_t i = 0; i < n; i++) {
        if (strcmp(params[i]->name, "model.norm.weight") == 0)
            ((uint32_t *)params[i]->value.data.ptr)[7] ^= 1;
    }
    return AR_OK;
}

static void expect_divergence(ar_parallel parallel, const char *ranks)
{
    small_run r = small_run_of(TINY_LLAMA);
    r.run.parallel = parallel;
    r.last = 1;
    r.before_save = change_a_copy;
    r.writer = writer_of(0, true);
    cr_assert_eq(small_run_do(&r), AR_ERR_DATA);
    cr_assert(error_says("model.norm.weight: the copies of ranks") && error_says(ranks) && error_says("element 7"),
              "%s", ar_error_message());
    cr_assert_eq(r.saved, AR_ERR_DATA, "rank 0 is told too");
    expect_names("");
    ar_checkpoint_writer_destroy(r.writer);
}

Test(checkpoint, copies_that_differ_are_named_and_never_saved)
{
    expect_divergence((ar_parallel){.dp = 3}, "0 and 2");
    expect_divergence((ar_parallel){.tp = 4}, "0 and 3");
    expect_divergence((ar_parallel){.dp = 2, .tp = 2, .zero = 1}, "0 and 3");
}
