/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints of something else, damaged ones, and what a killed process left. */
#include "anyrank/checkpoint.h"
#include "anyrank/train.h"
#include "tests/run/checkpoint_frame.h"
#include "verify/run/checkpoint.h"

TestSuite(checkpoint_refusals, .init = begin, .fini = end);

static ar_status load_into(int model, const ar_optimizer_options *optimizer)
{
    OWNED(ar_checkpoint_close) ar_checkpoint *c = open_or_fail();
    small_run r = small_run_of(model);
    r.from = c;
    r.first = r.last = 2;
    if (optimizer)
        r.run.optimizer = *optimizer;
    return small_run_do(&r);
}

Test(checkpoint_refusals, another_model_or_optimizer_is_refused_by_the_tensors_name)
{
    save_one(TINY_LLAMA, (ar_parallel){.tp = 1});
    cr_assert_refused(load_into(TINY_GPT2, NULL), AR_ERR_NOT_FOUND, "'transformer.wte.weight' is missing");
    cr_assert_refused(load_into(TINY_TIED, NULL), AR_ERR_SHAPE,
                      "'model.embed_tokens.weight' has shape [257,48], the model makes it [257,36]");
    ar_optimizer_options sgd = ar_optimizer_defaults(AR_OPTIMIZER_SGD);
    sgd.momentum = 0.5;
    cr_assert_refused(load_into(TINY_LLAMA, &sgd), AR_ERR_NOT_FOUND, "momentum_buffer");
}

Test(checkpoint_refusals, weights_without_state_do_not_resume_a_run)
{
    small_run r = small_run_of(TINY_TIED);
    r.last = 1;
    r.weights_only = true;
    r.writer = writer_of(0, true);
    run_or_fail(&r, "save");
    OWNED(ar_checkpoint_close) ar_checkpoint *c = open_or_fail();
    small_run again = small_run_of(TINY_TIED);
    again.from = c;
    cr_assert_refused(small_run_do(&again), AR_ERR_NOT_FOUND, "no optimizer state");
    ar_checkpoint_writer_destroy(r.writer);
}

Test(checkpoint_refusals, a_folder_without_one_is_told_apart_from_none)
{
    ar_checkpoint *c = NULL;
    cr_assert_eq(ar_checkpoint_open(&c, "/nonexistent"), AR_ERR_IO);
    cr_assert_refused(ar_checkpoint_open(&c, folder), AR_ERR_NOT_FOUND, "is no checkpoint");
    cr_assert_eq(symlink("step-00000001", in_folder("latest")), 0);
    cr_assert_eq(ar_checkpoint_open(&c, folder), AR_ERR_NOT_FOUND, "it leads nowhere");
    cr_assert_eq(ar_checkpoint_open(&c, ""), AR_ERR_ARG);
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

Test(checkpoint_refusals, damage_anywhere_is_found_when_it_is_opened)
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
        save_one(TINY_TIED, (ar_parallel){.tp = 1});
        damage(cases[i].name, cases[i].at, cases[i].cut);
        cr_expect_eq(ar_checkpoint_open(&c, folder), cases[i].status, "case %zu: %s", i, ar_error_message());
        cr_expect(error_says(cases[i].says), "case %zu: %s", i, ar_error_message());
        end();
        begin();
    }
}

/* Another learning rate would still be a learning rate. */
Test(checkpoint_refusals, a_digit_of_the_state_cannot_change_unseen)
{
    save_one(TINY_TIED, (ar_parallel){.tp = 1});
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
    cr_assert_refused(ar_checkpoint_open(&c, folder), AR_ERR_DATA, "training.json: damaged");
}

/* As a kill leaves it: a folder that has not got its name, another that is being removed, a link not yet in place. */
Test(checkpoint_refusals, what_a_killed_process_left_is_not_read_and_goes_with_the_next_writer)
{
    save_one(TINY_TIED, (ar_parallel){.tp = 1});
    cr_assert(mkdir(in_folder(".anyrank-new"), 0777) == 0 && mkdir(in_folder(".anyrank-old"), 0777) == 0);
    write_in(".anyrank-new/model.safetensors", "half of it");
    write_in(".anyrank-old/training.json", "half of it");
    cr_assert_eq(symlink("step-00000003", in_folder(".anyrank-latest")), 0);
    OWNED(ar_checkpoint_close) ar_checkpoint *c = open_or_fail();
    cr_assert_eq(ar_checkpoint_state_of(c)->step, 2);
    ar_checkpoint_writer_destroy(writer_of(0, false));
    expect_names("latest step-00000002 ");
    ar_checkpoint_close(open_or_fail());
}

Test(checkpoint_refusals, a_missing_file_is_named)
{
    save_one(TINY_TIED, (ar_parallel){.tp = 1});
    cr_assert_eq(unlink(in_folder("latest/optimizer.safetensors")), 0);
    ar_checkpoint *c = NULL;
    cr_assert_refused(ar_checkpoint_open(&c, folder), AR_ERR_IO, "optimizer.safetensors");
}

Test(checkpoint_refusals, a_tensor_that_the_model_does_not_have_is_named)
{
    save_one(TINY_LLAMA, (ar_parallel){.tp = 1});
    OWNED(ar_checkpoint_close) ar_checkpoint *c = open_or_fail();
    small_run r = small_run_of(TINY_LLAMA);
    r.config.tied = true;
    r.from = c;
    cr_assert_refused(small_run_do(&r), AR_ERR_FORMAT,
                      "tensor 'lm_head.weight' is in the weights, but the model has none");
    ar_error_clear();
    cr_assert_refused(ari_checkpoint_check_names(c, &r.config), AR_ERR_FORMAT,
                      "tensor 'lm_head.weight' is in the weights, but the model has none");
    r.config.tied = false;
    cr_assert_ok(ari_checkpoint_check_names(c, &r.config));
}
