/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/checkpoint.h"

#include <criterion/criterion.h>
#include <math.h>

#include "run/small_run.h"
#include "support/small.h"

TestSuite(checkpoint, .timeout = 60);

static char folder[64];
static char file[200];

static void begin(void)
{
    cr_assert(make_folder_in_memory(folder));
}

static void end(void)
{
    remove_all(folder);
}

static const char *in_folder(const char *name)
{
    snprintf(file, sizeof file, "%s/%s", folder, name);
    return file;
}

static bool says(const char *text)
{
    return strstr(ar_error_message(), text) != NULL;
}

static ar_checkpoint_writer *writer_of(size_t keep, bool fresh)
{
    const ar_checkpoint_options o = {.folder = folder, .keep = keep, .fresh = fresh};
    ar_checkpoint_writer *w = NULL;
    cr_assert_eq(ar_checkpoint_writer_create(&w, &o), AR_OK, "%s", ar_error_message());
    return w;
}

static ar_checkpoint *open_or_fail(const char *path)
{
    ar_checkpoint *c = NULL;
    cr_assert_eq(ar_checkpoint_open(&c, path), AR_OK, "%s", ar_error_message());
    return c;
}

static void run_or_fail(small_run *r, const char *what)
{
    cr_assert_eq(small_run_do(r), AR_OK, "%s: %s", what, ar_error_message());
}

/* Saves step 2 of a run of a tiny model. */
static void save_one(int model, const ar_parallel *parallel)
{
    small_run r = small_run_of(model);
    r.parallel = *parallel;
    r.last = 2;
    r.writer = writer_of(0, false);
    run_or_fail(&r, "save");
    ar_checkpoint_writer_destroy(r.writer);
}

static const ar_parallel one_rank = {.tp = 1};
static const ar_parallel layouts[] = {{.tp = 1}, {.tp = 3, .sp = true}, {.dp = 2, .tp = 2, .micro_batches = 2},
                                      {.dp = 3}, {.dp = 2, .zero = 1},  {.dp = 3, .tp = 2, .sp = true, .zero = 1}};
#define LAYOUTS (sizeof layouts / sizeof layouts[0])

/* Steps 1 to 2 in each layout, steps 3 to 4 in the next but one: the bits of a run in one piece on one rank. */
static void expect_resumable(int model)
{
    small_run whole = small_run_of(model);
    whole.dropout = 0.1;
    run_or_fail(&whole, "the whole run");
    for (size_t i = 0; i < LAYOUTS; i++) {
        small_run first = small_run_of(model), second = small_run_of(model);
        char text[96];
        first.parallel = layouts[i];
        second.parallel = layouts[(i + 2) % LAYOUTS];
        first.dropout = second.dropout = 0.1;
        first.last = second.first = 2;
        ar_parallel_text(text, sizeof text, &first.parallel);
        begin();
        first.writer = writer_of(0, true);
        run_or_fail(&first, text);
        ar_checkpoint *c = open_or_fail(folder);
        cr_expect_str_eq(ar_checkpoint_weights_hash(c), first.hash, "%s", text);
        second.from = c;
        run_or_fail(&second, text);
        cr_expect_str_eq(second.hash, whole.hash, "%s, and then another layout", text);
        cr_expect_eq(memcmp(second.loss, whole.loss + 2, 2 * sizeof(float)), 0, "%s: losses", text);
        ar_checkpoint_close(c);
        ar_checkpoint_writer_destroy(first.writer);
        end();
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
    static const char *const names[] = {"model.safetensors", "optimizer.safetensors", "training.json"};
    unsigned char *want[3] = {NULL};
    size_t bytes[3] = {0};
    for (size_t i = 0; i < LAYOUTS; i++) {
        begin();
        save_one(TINY_LLAMA, &layouts[i]);
        for (size_t k = 0; k < 3; k++) {
            char name[64];
            struct stat info;
            snprintf(name, sizeof name, "latest/%s", names[k]);
            cr_assert_eq(stat(in_folder(name), &info), 0);
            const size_t n = (size_t)info.st_size;
            unsigned char *got = malloc(n);
            FILE *f = fopen(file, "r");
            cr_assert(got && f && fread(got, 1, n, f) == n);
            fclose(f);
            if (want[k] == NULL) {
                want[k] = got;
                bytes[k] = n;
                continue;
            }
            cr_assert(n == bytes[k] && memcmp(got, want[k], n) == 0, "layout %zu: %s", i, names[k]);
            free(got);
        }
        end();
    }
    for (size_t k = 0; k < 3; k++)
        free(want[k]);
}

Test(checkpoint, what_is_written_is_what_is_read)
{
    begin();
    small_run r = small_run_of(TINY_TIED);
    r.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_SGD);
    r.optimizer.momentum = 0.9;
    r.optimizer.groups = 1;
    snprintf(r.optimizer.group[0].glob, sizeof r.optimizer.group[0].glob, "*.norm*");
    r.optimizer.group[0].lr_scale = 0.1;
    r.optimizer.group[0].weight_decay = (double)NAN;
    r.last = 3;
    r.writer = writer_of(0, true);
    run_or_fail(&r, "save");
    ar_checkpoint *c = open_or_fail(folder);
    const ar_checkpoint_state *s = ar_checkpoint_state_of(c);
    cr_assert_eq(s->step, 3);
    cr_assert_eq(s->steps, 8);
    cr_assert_eq(s->seed, SMALL_SEED);
    cr_assert_eq(s->optimizer.kind, AR_OPTIMIZER_SGD);
    cr_assert(s->optimizer.lr == r.optimizer.lr && s->optimizer.momentum == 0.9 && s->clip == 1);
    cr_assert_eq(s->optimizer.groups, 1);
    cr_assert_str_eq(s->optimizer.group[0].glob, "*.norm*");
    cr_assert(s->optimizer.group[0].weight_decay != s->optimizer.group[0].weight_decay, "NaN");
    cr_assert_eq(s->losses, 3);
    cr_assert_eq(memcmp(s->loss, r.loss, sizeof(float[3])), 0);
    cr_assert_eq(s->data_format, AR_DATA_BYTES);
    cr_assert_null(s->data_path);
    cr_assert_eq(strncmp(s->data_hash, "00112233", 8), 0);
    cr_assert_str_eq(ar_checkpoint_weights_hash(c), r.hash);
    cr_assert(strstr(ar_checkpoint_path(c), "/step-00000003"), "%s", ar_checkpoint_path(c));
    cr_assert_str_eq(ar_checkpoint_written(r.writer), ar_checkpoint_path(c));
    cr_assert_not_null(ar_checkpoint_find(c, "model.norm.weight", 36));
    cr_assert_null(ar_checkpoint_find(c, "model.norm.weight", 35));
    ar_checkpoint_close(c);
    ar_checkpoint_writer_destroy(r.writer);
    end();
}

Test(checkpoint, the_config_is_copied_as_it_is)
{
    begin();
    char config[100], text[8] = "", path[300];
    snprintf(config, sizeof config, "%s-config.json", folder);
    FILE *f = fopen(config, "w");
    cr_assert(f && fputs("{ }\n", f) >= 0 && fclose(f) == 0);
    const ar_checkpoint_options o = {.folder = folder, .config = config};
    small_run r = small_run_of(TINY_TIED);
    r.last = 1;
    cr_assert_eq(ar_checkpoint_writer_create(&r.writer, &o), AR_OK, "%s", ar_error_message());
    unlink(config); /* it was read when the writer was made */
    run_or_fail(&r, "save");
    snprintf(path, sizeof path, "%s/config.json", ar_checkpoint_written(r.writer));
    f = fopen(path, "r");
    cr_assert(f && fgets(text, sizeof text, f) && fclose(f) == 0);
    cr_assert_str_eq(text, "{ }\n");
    ar_checkpoint_close(open_or_fail(folder));
    f = fopen(path, "w");
    cr_assert(f && fputs("{  }\n", f) >= 0 && fclose(f) == 0);
    ar_checkpoint *c = NULL;
    cr_assert_eq(ar_checkpoint_open(&c, folder), AR_ERR_DATA);
    cr_assert(says("config.json: damaged"), "%s", ar_error_message());
    ar_checkpoint_writer_destroy(r.writer);
    end();
}

Test(checkpoint, an_older_one_goes_when_the_newer_one_is_there)
{
    begin();
    char names[300];
    small_run r = small_run_of(TINY_TIED);
    r.every_step = true;
    r.writer = writer_of(2, true);
    run_or_fail(&r, "four steps");
    cr_assert_str_eq(names_in(names, sizeof names, folder), "latest step-00000003 step-00000004 ");
    FILE *f = fopen(in_folder("step-00000003/notes.txt"), "w");
    cr_assert(f && fclose(f) == 0);
    cr_assert_eq(mkdir(in_folder("step-00000099"), 0777), 0, "a later step is not older");
    cr_assert_eq(mkdir(in_folder("step-2"), 0777), 0, "no name of ours");
    ar_checkpoint *c = open_or_fail(folder);
    small_run more = small_run_of(TINY_TIED);
    more.from = c;
    more.first = 4;
    more.last = 6;
    more.every_step = true;
    more.writer = r.writer;
    run_or_fail(&more, "two more");
    cr_assert_str_eq(names_in(names, sizeof names, folder),
                     "latest step-00000003 step-00000005 step-00000006 step-00000099 step-2 ");
    ar_checkpoint_close(c);
    ar_checkpoint_writer_destroy(r.writer);
    end();
}

Test(checkpoint, a_new_run_does_not_write_into_another_runs_folder)
{
    begin();
    save_one(TINY_TIED, &one_rank);
    const ar_checkpoint_options o = {.folder = folder, .fresh = true};
    ar_checkpoint_writer *w = NULL, *second = NULL;
    cr_assert_eq(ar_checkpoint_writer_create(&w, &o), AR_ERR_ARG);
    cr_assert(says("step-00000002; resume it"), "%s", ar_error_message());
    w = writer_of(0, false);
    const ar_checkpoint_options same = {.folder = folder};
    cr_assert_eq(ar_checkpoint_writer_create(&second, &same), AR_ERR_IO);
    cr_assert(says("another process"), "%s", ar_error_message());
    ar_checkpoint_writer_destroy(w);
    end();
}

Test(checkpoint, one_of_the_same_step_is_replaced_but_not_with_notes_in_it)
{
    begin();
    char names[300];
    save_one(TINY_TIED, &one_rank);
    save_one(TINY_LLAMA, &one_rank);
    cr_assert_str_eq(names_in(names, sizeof names, folder), "latest step-00000002 ");
    ar_checkpoint *c = open_or_fail(folder);
    cr_assert_not_null(ar_checkpoint_find(c, "lm_head.weight", 257 * 48), "the second one's");
    ar_checkpoint_close(c);
    FILE *f = fopen(in_folder("latest/notes.txt"), "w");
    cr_assert(f && fclose(f) == 0);
    small_run r = small_run_of(TINY_TIED);
    r.last = 2;
    r.writer = writer_of(0, false);
    cr_assert_eq(small_run_do(&r), AR_ERR_IO);
    cr_assert(says("step-00000002: is in the way"), "%s", ar_error_message());
    ar_checkpoint_writer_destroy(r.writer);
    cr_assert_eq(access(in_folder("latest/notes.txt"), F_OK), 0);
    ar_checkpoint_close(open_or_fail(folder));
    end();
}

/* --- copies that differ ------------------------------------------------------------------------------------------- */
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
    begin();
    char names[100];
    small_run r = small_run_of(TINY_LLAMA);
    r.parallel = parallel;
    r.last = 1;
    r.before_save = change_a_copy;
    r.writer = writer_of(0, true);
    cr_assert_eq(small_run_do(&r), AR_ERR_DATA);
    cr_assert(says("model.norm.weight: the copies of ranks") && says(ranks) && says("element 7"), "%s",
              ar_error_message());
    cr_assert_eq(r.saved, AR_ERR_DATA, "rank 0 is told too");
    cr_assert_str_eq(names_in(names, sizeof names, folder), "");
    ar_checkpoint_writer_destroy(r.writer);
    end();
}

Test(checkpoint, copies_that_differ_are_named_and_never_saved)
{
    expect_divergence((ar_parallel){.dp = 3}, "0 and 2");
    expect_divergence((ar_parallel){.tp = 4}, "0 and 3");
    expect_divergence((ar_parallel){.dp = 2, .tp = 2, .zero = 1}, "0 and 3");
}

/* --- what is not right -------------------------------------------------------------------------------------------- */
static ar_status load_into(int model, const ar_optimizer_options *optimizer)
{
    ar_checkpoint *c = open_or_fail(folder);
    small_run r = small_run_of(model);
    r.from = c;
    r.first = r.last = 2;
    if (optimizer)
        r.optimizer = *optimizer;
    const ar_status st = small_run_do(&r);
    ar_checkpoint_close(c);
    return st;
}

Test(checkpoint, another_model_or_optimizer_is_refused_by_the_tensors_name)
{
    begin();
    save_one(TINY_LLAMA, &one_rank);
    cr_assert_eq(load_into(TINY_GPT2, NULL), AR_ERR_NOT_FOUND);
    cr_assert(says("'transformer.wte.weight' is missing"), "%s", ar_error_message());
    cr_assert_eq(load_into(TINY_TIED, NULL), AR_ERR_SHAPE);
    cr_assert(says("'model.embed_tokens.weight' has shape [257,48], the model makes it [257,36]"), "%s",
              ar_error_message());
    ar_optimizer_options sgd = ar_optimizer_defaults(AR_OPTIMIZER_SGD);
    sgd.momentum = 0.5;
    cr_assert_eq(load_into(TINY_LLAMA, &sgd), AR_ERR_NOT_FOUND);
    cr_assert(says("momentum_buffer"), "%s", ar_error_message());
    end();
}

Test(checkpoint, weights_without_state_do_not_resume_a_run)
{
    begin();
    small_run r = small_run_of(TINY_TIED);
    r.last = 1;
    r.weights_only = true;
    r.writer = writer_of(0, true);
    run_or_fail(&r, "save");
    ar_checkpoint *c = open_or_fail(folder);
    small_run again = small_run_of(TINY_TIED);
    again.from = c;
    cr_assert_eq(small_run_do(&again), AR_ERR_NOT_FOUND);
    cr_assert(says("no optimizer state"), "%s", ar_error_message());
    ar_checkpoint_close(c);
    ar_checkpoint_writer_destroy(r.writer);
    end();
}

Test(checkpoint, a_folder_without_one_is_told_apart_from_none)
{
    begin();
    ar_checkpoint *c = NULL;
    cr_assert_eq(ar_checkpoint_open(&c, "/nonexistent"), AR_ERR_IO);
    cr_assert_eq(ar_checkpoint_open(&c, folder), AR_ERR_NOT_FOUND);
    cr_assert(says("is no checkpoint"), "%s", ar_error_message());
    cr_assert_eq(symlink("step-00000001", in_folder("latest")), 0);
    cr_assert_eq(ar_checkpoint_open(&c, folder), AR_ERR_NOT_FOUND, "it leads nowhere");
    cr_assert_eq(ar_checkpoint_open(&c, ""), AR_ERR_ARG);
    end();
}

/* Changes one byte of a file, or cuts it there. */
static void damage(const char *name, long at, bool cut)
{
    FILE *f = fopen(in_folder(name), "r+");
    cr_assert_not_null(f);
    cr_assert_eq(fseek(f, at, at < 0 ? SEEK_END : SEEK_SET), 0);
    const long where = ftell(f);
    if (cut) {
        cr_assert_eq(ftruncate(fileno(f), where), 0);
    } else {
        const int c = fgetc(f);
        fseek(f, where, SEEK_SET);
        cr_assert_eq(fputc(c ^ 1, f), c ^ 1);
    }
    cr_assert_eq(fclose(f), 0);
}

Test(checkpoint, damage_anywhere_is_found_when_it_is_opened)
{
    static const struct {
        const char *name;
        long at;
        bool cut;
        ar_status status;
        const char *says;
    } cases[] = {
        {"latest/model.safetensors", -5, false, AR_ERR_DATA, "model.safetensors: damaged"},
        {"latest/optimizer.safetensors", -5, false, AR_ERR_DATA, "optimizer.safetensors: damaged"},
        {"latest/model.safetensors", -5, true, AR_ERR_FORMAT, "MetadataIncompleteBuffer"},
        {"latest/model.safetensors", 0, true, AR_ERR_FORMAT, "HeaderTooSmall"},
        {"latest/training.json", 0, true, AR_ERR_FORMAT, "not JSON"},
        {"latest/training.json", -100, true, AR_ERR_FORMAT, "not JSON"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ar_checkpoint *c = NULL;
        begin();
        save_one(TINY_TIED, &one_rank);
        damage(cases[i].name, cases[i].at, cases[i].cut);
        cr_expect_eq(ar_checkpoint_open(&c, folder), cases[i].status, "case %zu: %s", i, ar_error_message());
        cr_expect(says(cases[i].says), "case %zu: %s", i, ar_error_message());
        end();
    }
}

/* Another learning rate would still be a learning rate. */
Test(checkpoint, a_digit_of_the_state_cannot_change_unseen)
{
    begin();
    save_one(TINY_TIED, &one_rank);
    char text[8192] = "";
    FILE *f = fopen(in_folder("latest/training.json"), "r+");
    cr_assert_not_null(f);
    cr_assert(fread(text, 1, sizeof text - 1, f) > 0);
    char *lr = strstr(text, "\"lr\": 0.01");
    cr_assert_not_null(lr);
    fseek(f, lr - text + 9, SEEK_SET);
    cr_assert_eq(fputc('2', f), '2');
    cr_assert_eq(fclose(f), 0);
    ar_checkpoint *c = NULL;
    cr_assert_eq(ar_checkpoint_open(&c, folder), AR_ERR_DATA);
    cr_assert(says("training.json: damaged"), "%s", ar_error_message());
    end();
}

/* As a kill leaves it: a folder that has not got its name, another that is being removed, a link not yet in place. */
Test(checkpoint, what_a_killed_process_left_is_not_read_and_goes_with_the_next_writer)
{
    static const char *const left[] = {".anyrank-new/model.safetensors", ".anyrank-old/training.json"};
    char names[300];
    begin();
    save_one(TINY_TIED, &one_rank);
    cr_assert(mkdir(in_folder(".anyrank-new"), 0777) == 0 && mkdir(in_folder(".anyrank-old"), 0777) == 0);
    for (size_t i = 0; i < 2; i++) {
        FILE *f = fopen(in_folder(left[i]), "w");
        cr_assert(f && fputs("half of it", f) >= 0 && fclose(f) == 0);
    }
    cr_assert_eq(symlink("step-00000003", in_folder(".anyrank-latest")), 0);
    ar_checkpoint *c = open_or_fail(folder);
    cr_assert_eq(ar_checkpoint_state_of(c)->step, 2);
    ar_checkpoint_close(c);
    ar_checkpoint_writer_destroy(writer_of(0, false));
    cr_assert_str_eq(names_in(names, sizeof names, folder), "latest step-00000002 ");
    ar_checkpoint_close(open_or_fail(folder));
    end();
}

Test(checkpoint, a_missing_file_is_named)
{
    begin();
    save_one(TINY_TIED, &one_rank);
    cr_assert_eq(unlink(in_folder("latest/optimizer.safetensors")), 0);
    ar_checkpoint *c = NULL;
    cr_assert_eq(ar_checkpoint_open(&c, folder), AR_ERR_IO);
    cr_assert(says("optimizer.safetensors"), "%s", ar_error_message());
    end();
}

Test(checkpoint, a_tensor_that_the_model_does_not_have_is_named)
{
    begin();
    save_one(TINY_LLAMA, &one_rank);
    ar_checkpoint *c = open_or_fail(folder);
    small_run r = small_run_of(TINY_LLAMA);
    r.config.tied = true;
    r.from = c;
    cr_assert_eq(small_run_do(&r), AR_ERR_FORMAT);
    cr_assert(says("tensor 'lm_head.weight' is in the weights, but the model has none"), "%s", ar_error_message());
    ar_checkpoint_close(c);
    end();
}
