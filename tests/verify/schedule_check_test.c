/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of steps whose learning rate and decay change from step to step and from parameter to parameter: product and
 * baseline resolve them each on its own. */
#include "tests/verify/support.h"

static const ar_parallel layouts[] = {
    {.tp = 1}, {.tp = 4, .sp = true}, {.dp = 3, .tp = 2}, {.dp = 2, .micro_batches = 2}, {.dp = 2, .tp = 3, .zero = 1},
};
enum { LAYOUTS = sizeof layouts / sizeof *layouts, BATCH = 3, SEQ = 12, STEPS = 4 };

typedef struct fixture {
    char folder[64];
    ar_check_options o;
} fixture;

static void tear_down(fixture *f)
{
    remove_folder(f->folder);
}

static void set_up(fixture *f, int model, ar_optimizer_kind kind)
{
    make_folder(f->folder);
    write_file(f->folder, "config.json", tiny_models[model]);
    const size_t n = small_only() ? 2 : LAYOUTS; /* the last ones have all kinds */
    f->o = check_layouts(f->folder, layouts + LAYOUTS - n, n, BATCH, SEQ);
    f->o.run.steps = STEPS;
    f->o.run.clip = 0.5;
    f->o.skip_f64 = true;
    f->o.run.optimizer = ar_optimizer_defaults(kind);
    f->o.run.optimizer.lr = 0.02;
    f->o.run.optimizer.weight_decay = 0.3;
}

/* Everything at once. */
static void refine(ar_optimizer_options *o)
{
    o->schedule = AR_SCHEDULE_COSINE;
    o->warmup_steps = 2;
    o->total_steps = STEPS;
    o->min_lr = 0.001;
    o->decay = AR_DECAY_MATRICES;
    o->groups = 3;
    o->group[0] = (ar_param_group){.glob = "*.weight", .lr_scale = 0.3, .weight_decay = (double)NAN};
    o->group[1] = (ar_param_group){.glob = "*.0.*", .lr_scale = 1.7, .weight_decay = 0.11};
    o->group[2] = (ar_param_group){.glob = "*attn*", .lr_scale = 2.0, .weight_decay = 0.7};
}

static void hash_of(char hash[65], ar_check_options *o)
{
    OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(o);
    expect_same(r, "schedule");
    memcpy(hash, r->weights_hash, 65);
}

Test(schedule_check, all_of_it_has_the_baselines_bits_in_every_layout)
{
    static const struct {
        int model;
        ar_optimizer_kind kind;
    } cases[] = {{TINY_LLAMA, AR_OPTIMIZER_ADAMW}, {TINY_GPT2, AR_OPTIMIZER_ADAM}, {TINY_STACK, AR_OPTIMIZER_SGD}};
    for (size_t i = 0; i < (small_only() ? 1 : sizeof cases / sizeof *cases); i++) {
        char plain[65], refined[65];
        SCOPED(tear_down) fixture f;
        set_up(&f, cases[i].model, cases[i].kind);
        if (cases[i].kind == AR_OPTIMIZER_SGD)
            f.o.run.optimizer.momentum = 0.9;
        const ar_optimizer_options before = f.o.run.optimizer;
        refine(&f.o.run.optimizer);
        hash_of(refined, &f.o);
        f.o.run.optimizer = before;
        f.o.layouts = 1;
        hash_of(plain, &f.o);
        cr_expect_str_neq(plain, refined);
    }
}

Test(schedule_check, native_runs_are_within_the_allowance)
{
    SCOPED(tear_down) fixture f;
    set_up(&f, TINY_LLAMA, AR_OPTIMIZER_ADAMW);
    refine(&f.o.run.optimizer);
    f.o.run.numerics = AR_NUMERICS_NATIVE;
    OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&f.o);
    cr_expect_eq(r->result, AR_CHECK_SAME);
}
