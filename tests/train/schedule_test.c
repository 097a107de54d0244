/* SPDX-License-Identifier: Apache-2.0 */
/* Learning-rate schedules, decay rules and parameter groups: their values, their rules, and PyTorch 1.13's weights. */
#include "anyrank/context.h"
#include "anyrank/train.h"
#include "ref/core/optimizer_private.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/param_private.h"
#include "ref/train/optimizer.h"
#include "ref/train/optimizer_private.h"
#include "support/rank_run.h"
#include "support/together.h"

static ar_optimizer_options cosine(double lr, uint64_t warmup, uint64_t total, double min_lr)
{
    ar_optimizer_options o = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o.lr = lr;
    o.schedule = AR_SCHEDULE_COSINE;
    o.warmup_steps = warmup;
    o.total_steps = total;
    o.min_lr = min_lr;
    return o;
}

/* --- values ------------------------------------------------------------------------------------------------------- */

CLAIM(a_constant_one_is_the_learning_rate_itself)
{
    const ar_optimizer_options o = ar_optimizer_defaults(AR_OPTIMIZER_ADAM);
    for (uint64_t t = 1; t < 1000; t++)
        cr_assert_eq(ari_optimizer_lr(&o, t), 1e-3);
}

CLAIM(a_warm_up_is_linear_and_ends_at_the_learning_rate)
{
    ar_optimizer_options o = ar_optimizer_defaults(AR_OPTIMIZER_SGD);
    o.lr = 0.5;
    o.warmup_steps = 8;
    for (uint64_t t = 1; t <= 8; t++)
        cr_expect_eq(ari_optimizer_lr(&o, t), (double)t / 16.0);
    cr_expect_eq(ari_optimizer_lr(&o, 9), 0.5);
    cr_expect_eq(ari_optimizer_lr(&o, UINT64_C(1) << 40), 0.5);
}

CLAIM(a_cosine_begins_at_the_learning_rate_is_halfway_in_the_middle_and_stays_at_its_end)
{
    const ar_optimizer_options o = cosine(1.0, 4, 20, 0.25);
    cr_expect_eq(ari_optimizer_lr(&o, 3), 0.75);
    cr_expect_eq(ari_optimizer_lr(&o, 4), 1.0);
    cr_expect_eq(ari_optimizer_lr(&o, 12), 0.625);
    cr_expect_eq(ari_optimizer_lr(&o, 20), 0.25);
    cr_expect_eq(ari_optimizer_lr(&o, UINT64_MAX), 0.25);
    for (uint64_t t = 5; t <= 20; t++)
        cr_expect_lt(ari_optimizer_lr(&o, t), ari_optimizer_lr(&o, t - 1));
}

/* CosineAnnealingLR._get_closed_form_lr of PyTorch 1.13. A cosine, a quotient and five more operations: a few units in
 * the last place. */
CLAIM(a_cosine_has_pytorchs_values)
{
    static const double expected[] = {0.00075,
                                      0.0015,
                                      0.0022500000000000003,
                                      0.003,
                                      0.002973099392564523,
                                      0.0028934313455158014,
                                      0.0027640574572235636,
                                      0.0025899494936611664,
                                      0.002377798326227443,
                                      0.002135756805311126,
                                      0.00187312645082258,
                                      0.0016,
                                      0.0013268735491774207,
                                      0.0010642431946888745,
                                      0.0008222016737725572,
                                      0.0006100505063388336,
                                      0.0004359425427764365,
                                      0.00030656865448419856,
                                      0.0002269006074354774,
                                      0.0002,
                                      0.0002,
                                      0.0002};
    const ar_optimizer_options o = cosine(0.003, 4, 20, 0.0002);
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        const double got = ari_optimizer_lr(&o, i + 1);
        cr_expect(fabs(got - expected[i]) <= 0x1p-49 * expected[i], "step %zu: %.17g, not %.17g", i + 1, got,
                  expected[i]);
    }
}

CLAIM(a_warm_up_may_be_all_of_it_and_a_rate_of_0_stays_0)
{
    const ar_optimizer_options all = cosine(1.0, 4, 4, 0.5), none = cosine(0.0, 0, 4, 0.0);
    cr_expect_eq(ari_optimizer_lr(&all, 3), 0.75);
    cr_expect_eq(ari_optimizer_lr(&all, 4), 0.5);
    for (uint64_t t = 1; t < 6; t++)
        cr_expect_eq(ari_optimizer_lr(&none, t), 0.0);
}

/* --- rules -------------------------------------------------------------------------------------------------------- */

static void expect_rule(const ar_optimizer_options *o, const char *name, int ndim, double lr_scale, double decay)
{
    const ari_update_rule rule = ari_update_rule_of(o, name, ndim);
    cr_expect(rule.lr_scale == lr_scale && rule.weight_decay == decay, "%s: %g and %g", name, rule.lr_scale,
              rule.weight_decay);
}

CLAIM(matrices_alone_decay_where_the_rule_says_so)
{
    ar_optimizer_options o = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    expect_rule(&o, "model.norm.weight", 1, 1.0, 0.01);
    o.decay = AR_DECAY_MATRICES;
    expect_rule(&o, "model.norm.weight", 1, 1.0, 0.0);
    expect_rule(&o, "lm_head.weight", 2, 1.0, 0.01);
}

CLAIM(the_last_group_that_matches_counts_and_a_star_matches_dots)
{
    ar_optimizer_options o = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o.decay = AR_DECAY_MATRICES;
    o.groups = 3;
    o.group[0] = (ar_param_group){.glob = "model.*.weight", .lr_scale = 0.5, .weight_decay = 0.25};
    o.group[1] = (ar_param_group){.glob = "*norm*", .lr_scale = 2.0, .weight_decay = (double)NAN};
    o.group[2] = (ar_param_group){.glob = "*.k_proj.bias", .lr_scale = 0.0, .weight_decay = 1.0};
    expect_rule(&o, "model.layers.0.mlp.up_proj.weight", 2, 0.5, 0.25);
    expect_rule(&o, "model.layers.0.input_layernorm.weight", 1, 2.0, 0.0); /* what the rule says of a vector */
    expect_rule(&o, "model.layers.0.self_attn.k_proj.bias", 1, 0.0, 1.0);
    expect_rule(&o, "lm_head.weight", 2, 1.0, 0.01);
}

enum { STEPS = 7 };
/* After each step of torch.optim.AdamW (PyTorch 1.13, foreach=False), lr 0.02, betas 0.9 and 0.99: a matrix with decay
 * 0.5, a bias with half the rate and decay 0.25, a norm with none; LambdaLR with a warm-up of 2 steps and a cosine of 6
 * to a tenth. */
static const float pytorchs[STEPS][8] = {{0x1.03d70ap-1f, -0x1.e8f5c2p-3f, 0x1.f851ecp-1f, 0x1.133334p-3f,
                                          0x1.023d70p-1f, -0x1.00f5c2p+0f, 0x1.028f5cp+0f, 0x1.fd70a4p+0f},
                                         {0x1.f64122p-2f, -0x1.c4850ap-3f, 0x1.f792a4p-1f, 0x1.0e4ad0p-3f,
                                          0x1.01532ep-1f, -0x1.01250ap+0f, 0x1.052e94p+0f, 0x1.fdb5a0p+0f},
                                         {0x1.f3f93ep-2f, -0x1.bc76c4p-3f, 0x1.f6ce4ep-1f, 0x1.1e93b6p-3f,
                                          0x1.031866p-1f, -0x1.01a030p+0f, 0x1.03ebc4p+0f, 0x1.fd7d7ap+0f},
                                         {0x1.f162e6p-2f, -0x1.b19b7cp-3f, 0x1.f3d1e8p-1f, 0x1.2834dcp-3f,
                                          0x1.0423c6p-1f, -0x1.0125d6p+0f, 0x1.03d67ep+0f, 0x1.fc43a2p+0f},
                                         {0x1.ee79c6p-2f, -0x1.ae21c0p-3f, 0x1.f33682p-1f, 0x1.283ed2p-3f,
                                          0x1.041466p-1f, -0x1.00ecbep+0f, 0x1.039b9cp+0f, 0x1.fc0818p+0f},
                                         {0x1.eda8e6p-2f, -0x1.ae2cbap-3f, 0x1.f2ddfep-1f, 0x1.292c24p-3f,
                                          0x1.042ae6p-1f, -0x1.00e450p+0f, 0x1.03b220p+0f, 0x1.fbdfd6p+0f},
                                         {0x1.ec9c48p-2f, -0x1.ada6bcp-3f, 0x1.f23104p-1f, 0x1.29c032p-3f,
                                          0x1.043644p-1f, -0x1.00cd72p+0f, 0x1.03cb54p+0f, 0x1.fbe656p+0f}};

typedef struct job {
    float weights[STEPS][8];
} job;

static ar_status init(ar_param *p, ar_ctx *ctx, const char *name, int ndim, const float *values)
{
    static const size_t shape[2] = {2, 2};
    ar_layout layout;
    AR_TRY(ari_layout_replicate(&layout, ndim, shape, 0, 1));
    AR_TRY(ar_param_init(p, ctx, name, &layout, false));
    return ar_param_set(p, ctx, values);
}

static ar_status add_gradient(ar_param *p, ar_ctx *ctx, size_t step, size_t k)
{
    float values[4];
    for (size_t i = 0; i < ar_tensor_count(&p->value); i++)
        values[i] = ((float)((i * 5 + step * 3 + k * 7) % 8) - 3.5f) / 8.0f;
    AR_TRY(ari_param_zero_grad(p, ctx));
    return rank_add_gradient(ctx, p, values);
}

static ar_status steps(ar_ctx *ctx, job *j, ar_optimizer *o, ar_param *const *p)
{
    for (size_t t = 1; t <= STEPS; t++) {
        size_t at = 0;
        for (size_t k = 0; k < 3; k++)
            AR_TRY(add_gradient(p[k], ctx, t, k));
        AR_TRY(ar_optimizer_step(o, ctx, 1.0f));
        for (size_t k = 0; k < 3; at += ar_tensor_count(&p[k++]->value))
            AR_TRY(ar_ctx_download(ctx, j->weights[t - 1] + at, &p[k]->value));
        ar_ctx_end_step(ctx);
    }
    return AR_OK;
}

static ar_status train(ar_ctx *ctx, void *user)
{
    static const float w[] = {0.5f, -0.25f, 1.0f, 0.125f}, b[] = {0.5f, -1.0f}, n[] = {1.0f, 2.0f};
    ar_optimizer_options options = cosine(0.02, 2, 6, 0.002);
    SCOPED(ar_param_fini) ar_param matrix = {0}, bias = {0}, norm = {0};
    ar_param *const all[] = {&matrix, &bias, &norm};
    OWNED(ar_optimizer_destroy) ar_optimizer *o = NULL;
    options.beta2 = 0.99;
    options.weight_decay = 0.5;
    options.decay = AR_DECAY_MATRICES;
    options.groups = 1;
    options.group[0] = (ar_param_group){.glob = "*.bias", .lr_scale = 0.5, .weight_decay = 0.25};
    AR_TRY(init(&matrix, ctx, "layer.weight", 2, w));
    AR_TRY(init(&bias, ctx, "layer.bias", 1, b));
    AR_TRY(init(&norm, ctx, "norm.weight", 1, n));
    AR_TRY(ar_optimizer_create(&o, ctx, all, 3, &options));
    return steps(ctx, user, o, all);
}

/* PyTorch holds lr and decay in binary64 as here; its sqrt and divisions are fp32's, its multiply-adds may be fused: a
 * few units in the last place after seven steps, where another rate or decay is off by thousands. */
CLAIM(groups_and_schedule_have_pytorchs_weights)
{
    job j;
    const ar_run o = {.parallel.tp = 1, .numerics = AR_NUMERICS_EXACT};
    cr_assert_ok(rank_run(&o, train, &j));
    for (size_t t = 0; t < STEPS; t++)
        for (size_t i = 0; i < 8; i++)
            cr_expect(fabsf(j.weights[t][i] - pytorchs[t][i]) <= 0x1p-22f * fabsf(pytorchs[t][i]),
                      "step %zu, weight %zu: %a, not %a", t + 1, i, (double)j.weights[t][i], (double)pytorchs[t][i]);
}

/* --- refusals ----------------------------------------------------------------------------------------------------- */

static void expect_refused(const ar_optimizer_options *o, const char *text)
{
    cr_expect_refused(ari_optimizer_check(o), AR_ERR_ARG, text);
}

CLAIM(one_that_makes_no_sense_is_refused_by_name)
{
    ar_optimizer_options o = cosine(0.1, 5, 4, 0.0);
    expect_refused(&o, "warmup_steps is 5, expected at most total_steps, 4");
    o = cosine(0.1, 0, 0, 0.0);
    expect_refused(&o, "total_steps is 0");
    o = cosine(0.1, 0, 4, 0.2);
    expect_refused(&o, "min_lr is 0.2, expected at least 0 and at most lr");
    o.min_lr = (double)NAN;
    expect_refused(&o, "min_lr");
    o.schedule = AR_SCHEDULE_CONSTANT;
    o.min_lr = 0.1;
    expect_refused(&o, "min_lr is 0.1, expected 0 with a constant schedule");
    o.schedule = (ar_schedule)2;
    expect_refused(&o, "schedule 2");
}

CLAIM(groups_that_make_no_sense_are_refused_by_name)
{
    ar_optimizer_options o = ar_optimizer_defaults(AR_OPTIMIZER_ADAM);
    o.groups = AR_PARAM_GROUPS + 1;
    expect_refused(&o, "9 parameter groups, expected at most 8");
    o.groups = 1;
    expect_refused(&o, "group 0 is empty");
    memset(o.group[0].glob, 'x', sizeof o.group[0].glob);
    expect_refused(&o, "group 0 is not ended by a 0");
    o.group[0] = (ar_param_group){.glob = "*", .lr_scale = -1.0};
    expect_refused(&o, "lr_scale of group '*' is -1");
    o.group[0] = (ar_param_group){.glob = "*", .weight_decay = (double)INFINITY};
    expect_refused(&o, "weight_decay of group '*' is inf");
    o.group[0] = (ar_param_group){.glob = "*", .weight_decay = (double)NAN};
    cr_expect_ok(ari_optimizer_check(&o));
    o.decay = (ar_decay)2;
    expect_refused(&o, "decay rule 2");
}

CLAIM(names_are_those_of_the_command_line)
{
    cr_expect_str_eq(ari_schedule_name(AR_SCHEDULE_CONSTANT), "constant");
    cr_expect_str_eq(ari_schedule_name(AR_SCHEDULE_COSINE), "cosine");
    cr_expect_str_eq(ari_schedule_name((ar_schedule)7), "?");
}

EVERY_CLAIM(schedule)
