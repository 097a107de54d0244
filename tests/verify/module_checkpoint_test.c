/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints of a run of a module of one's own: it goes on under any layout with the bits of a run in one piece, and
 * what is not its checkpoint is refused before a rank runs. */
#include "support/folder.h"
#include "support/own_lm.h"
#include "verify/run/checkpoint_private.h"
#include "verify/run/training_private.h"

TestSuite(module_checkpoint, .init = folder_begin, .fini = folder_end);

enum { ALL = 4 };

static ar_training_options options(const ar_module_case *c, const ar_parallel *layout)
{
    ar_training_options o = ar_training_defaults();
    o.module = c;
    o.run.steps = ALL;
    o.run.dropout = 0.1;
    o.run.parallel = *layout;
    o.run.threads = 1;
    return o;
}

/* Two steps under one layout, each saved, the others under another. */
static ar_training_report *train_in_two(const ar_module_case *c, const ar_parallel *first, const ar_parallel *second)
{
    OWNED(ar_training_report_destroy) ar_training_report *half = NULL;
    OWNED(ar_checkpoint_close) ar_checkpoint *from = NULL;
    ar_training_report *r = NULL;
    ar_training_options o = options(c, first);
    o.save = in_folder("run");
    o.save_every = 1;
    o.stop_after = 2;
    cr_assert_ok(ar_train_run(&half, &o));
    cr_expect_eq(half->end, AR_TRAINING_STOPPED);
    cr_assert_ok(ar_checkpoint_open(&from, o.save));
    cr_expect_str_eq(ari_checkpoint_weights_hash(from), half->weights_hash);
    o = options(c, second);
    ari_training_resume(&o, from);
    cr_assert_ok(ar_train_run(&r, &o));
    cr_expect_str_empty(r->note);
    return r;
}

Test(module_checkpoint, a_run_goes_on_under_any_layout_with_the_same_bits)
{
    static const ar_parallel layouts[] = {{.dp = 2, .zero = 3},
                                          {.tp = 2, .sp = true, .cp = 2, .zigzag = true},
                                          {.pp = 2, .dp = 2, .zero = 1, .micro_batches = 2},
                                          {0},
                                          {.dp = 2, .tp = 2, .sp = true, .zero = 2},
                                          {.pp = 3, .micro_batches = 4, .schedule = AR_PP_ZERO_BUBBLE}};
    enum { LAYOUTS = sizeof layouts / sizeof *layouts };
    const own_lm lm = {.tied = true};
    const ar_module_case c = own_lm_case(&lm);
    const ar_training_options o = options(&c, &(ar_parallel){0});
    OWNED(ar_training_report_destroy) ar_training_report *whole = NULL;
    cr_assert_ok(ar_train_run(&whole, &o));
    for (size_t i = 0; i < LAYOUTS; i++) {
        OWNED(ar_training_report_destroy)
        ar_training_report *r = train_in_two(&c, &layouts[i], &layouts[(i + 1) % LAYOUTS]);
        cr_expect(r->resumed_steps == 2 && r->steps == ALL);
        cr_expect_str_eq(r->weights_hash, whole->weights_hash, "layout %zu", i);
        cr_expect_eq(memcmp(r->loss, whole->loss, ALL * sizeof *r->loss), 0, "layout %zu", i);
        cr_expect(!r->bytes_differ, "layout %zu: %s", i, r->message);
        folder_end();
        folder_begin();
    }
}

static ar_status resume(const ar_module_case *c, ar_parallel layout)
{
    OWNED(ar_training_report_destroy) ar_training_report *r = NULL;
    OWNED(ar_checkpoint_close) ar_checkpoint *from = NULL;
    ar_training_options o = options(c, &layout);
    AR_TRY(ar_checkpoint_open(&from, in_folder("run")));
    ari_training_resume(&o, from);
    o.module = c;
    return ar_train_run(&r, &o);
}

/* Saves two of four steps. */
static ar_status save(const ar_module_case *c)
{
    OWNED(ar_training_report_destroy) ar_training_report *r = NULL;
    ar_training_options o = options(c, &(ar_parallel){.tp = 2});
    o.save = in_folder("run");
    o.stop_after = 2;
    return ar_train_run(&r, &o);
}

Test(module_checkpoint, one_of_another_module_is_refused_by_the_tensors_name)
{
    const own_lm tied = {.tied = true}, apart = {.tied = false};
    const ar_module_case one = own_lm_case(&tied), other = own_lm_case(&apart);
    cr_assert_ok(save(&one));
    cr_expect_eq(resume(&other, (ar_parallel){.tp = 2}), AR_ERR_NOT_FOUND);
    cr_expect_says("tensor 'logits.weight' is missing from the weights");
    cr_expect_eq(resume(NULL, (ar_parallel){.tp = 2}), AR_ERR_ARG);
    cr_expect_says("is of a module of one's own, 'own lm': it goes on with that module");
    folder_end();
    folder_begin();
    cr_assert_ok(save(&other));
    cr_expect_eq(resume(&one, (ar_parallel){.pp = 2}), AR_ERR_FORMAT); /* no rank has all the names */
    cr_expect_says("tensor 'logits.weight' is in the weights, but the model has none of that name");
}

Test(module_checkpoint, a_damaged_one_is_refused_and_a_folder_in_use_is_not_overwritten)
{
    const own_lm lm = {.tied = true};
    const ar_module_case c = own_lm_case(&lm);
    struct stat info;
    cr_assert_ok(save(&c));
    cr_expect_eq(save(&c), AR_ERR_ARG);
    cr_expect_says("checkpoint");
    cr_assert_eq(stat(in_folder("run/latest/model.safetensors"), &info), 0);
    cr_assert_eq(truncate(in_folder("run/latest/model.safetensors"), info.st_size - 1), 0);
    cr_expect_neq(resume(&c, (ar_parallel){.dp = 2}), AR_OK);
    cr_expect_says("model.safetensors");
}

/* Before the second step: what is in the way of its checkpoint. */
static void put_file(void *user, const ar_training_step *s)
{
    FILE *f = s->step == 1 ? fopen(in_folder("step-00000002"), "w") : NULL;
    (void)user;
    if (f)
        fclose(f);
}

static void count_failures(void *failures, const ar_training_save *s)
{
    *(int *)failures += s->error != NULL;
}

/* A save that fails does not end the run, and leaves nothing. */
Test(module_checkpoint, a_save_that_fails_leaves_no_half_of_one)
{
    const own_lm lm = {.tied = true};
    const ar_module_case c = own_lm_case(&lm);
    OWNED(ar_training_report_destroy) ar_training_report *r = NULL;
    ar_training_options o = options(&c, &(ar_parallel){.dp = 2});
    int failures = 0;
    o.save = folder;
    o.save_every = 2;
    o.listener = (ar_training_listener){.step = put_file, .save = count_failures, .user = &failures};
    cr_assert_ok(ar_train_run(&r, &o));
    cr_expect_eq(failures, 1);
    cr_expect(r->end == AR_TRAINING_DONE && !r->save_failed);
    cr_expect_not_null(strstr(r->checkpoint, "step-00000004"), "%s", r->checkpoint);
    size_t hidden = 0;
    cr_expect_eq(count_files(&hidden), 3u); /* the file, step 4, latest */
    cr_expect_eq(hidden, 0u);
}
