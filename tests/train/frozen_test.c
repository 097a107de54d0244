/* SPDX-License-Identifier: Apache-2.0 */
/* Training with parameters that are frozen, all along or in some steps, and with gradients that are not finite on one
 * rank: the ranks do together what one would. */
#include "anyrank/context.h"
#include "anyrank/gradients.h"
#include "anyrank/train.h"
#include "recorded.h"
#include "ref/context/context.h"
#include "ref/core/param_private.h"
#include "ref/layers/parts.h"

enum { B = 3, S = 4, STEPS = 3, RANKS = 8, TEXT = 400 };
static const int64_t ids[B * S] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 3};

typedef struct job {
    ar_config config;
    ar_parallel parallel;
    ar_ddp_options ddp;
    double clip;
    bool verify;
    const char *all_along;      /* part of the names of those that are frozen before anything is made; NULL: none */
    const char *in_step[STEPS]; /* and in one step */
    int poisoned;               /* data-parallel rank that adds a NaN to its gradients; -1: none */
    ar_status status[RANKS];
    char text[RANKS][TEXT];
    uint64_t versions[RANKS]; /* changes of weights in all steps */
} job;

typedef struct trained {
    ar_model *model;
    ar_param **params;
    size_t n;
    ar_ddp *ddp;
    ar_optimizer *optimizer;
    ar_gradients *gradients;
} trained;

static void freeze(const trained *t, const char *part, bool frozen)
{
    for (size_t i = 0; part && i < t->n; i++) {
        if (strstr(t->params[i]->name, part))
            t->params[i]->requires_grad = !frozen;
    }
}

/* Stands before the data-parallel object's hook. user: the context. */
static ar_status poison(void *user, ar_param *p)
{
    ar_ctx *ctx = user;
    const ar_tensor matrix = ari_param_matrix(p);
    const size_t columns = matrix.shape[matrix.ndim - 1], shape[2] = {ar_tensor_count(&p->value) / columns, columns};
    ar_tensor terms;
    if (!strstr(p->name, "norm.weight"))
        return AR_OK;
    AR_TRY(ar_ctx_tensor(ctx, &terms, AR_F32, 2, shape));
    AR_TRY(ar_ctx_device(ctx)->ops->fill(ctx->device, ctx->queue, &terms, NAN));
    return ar_ctx_arith(ctx)->grad_rows(ctx, p, &terms, (ar_cbuf){NULL});
}

static ar_status make(trained *t, ar_ctx *ctx, const job *j)
{
    ar_optimizer_options o = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    ar_ddp_options ddp = j->ddp;
    o.lr = 0.05;
    ddp.zero = j->parallel.zero;
    AR_TRY(ar_model_create(&t->model, ctx, &j->config, NULL));
    AR_TRY(ar_model_fresh(t->model, ctx, 5));
    AR_TRY(ari_module_list(&t->params, &t->n, ar_model_module(t->model)));
    freeze(t, j->all_along, true);
    for (size_t i = 0; i < t->n && j->poisoned == ar_comm_rank(ar_ctx_dp(ctx)); i++)
        AR_TRY(ar_param_add_hook(t->params[i], (ar_param_hook){poison, ctx}));
    AR_TRY(ar_ddp_create(&t->ddp, ctx, ar_model_module(t->model), &ddp));
    AR_TRY(ar_gradients_create(&t->gradients, ctx, t->params, t->n));
    return ddp.zero ? ar_optimizer_create_sharded(&t->optimizer, ctx, t->ddp, &o)
                    : ar_optimizer_create(&t->optimizer, ctx, t->params, t->n, &o);
}

static uint64_t versions_of(const trained *t)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < t->n; i++)
        sum += t->params[i]->version;
    return sum;
}

/* A step's error is a result: every rank gets one, and all go on to the end. */
static ar_status train(const trained *t, ar_ctx *ctx, job *j)
{
    const int r = ar_comm_rank(ar_ctx_dp(ctx)) * ar_comm_size(ar_ctx_tp(ctx)) + ar_comm_rank(ar_ctx_tp(ctx));
    const ar_train_options o = {
        .parallel = j->parallel, .clip = j->clip, .ddp = t->ddp, .verify = j->verify ? t->gradients : NULL};
    const ar_batch batch = {.batch = B, .seq = S, .input_ids = ids};
    const uint64_t versions = versions_of(t);
    for (uint32_t step = 1; step <= STEPS && j->status[r] == AR_OK; step++) {
        ar_train_result result;
        freeze(t, j->in_step[step - 1], true);
        j->status[r] = ar_train_step(&result, t->model, ctx, t->optimizer, &batch, step, &o);
        freeze(t, j->in_step[step - 1], false);
    }
    snprintf(j->text[r], TEXT, "%s", j->status[r] == AR_OK ? "" : ar_error_message());
    j->versions[r] = versions_of(t) - versions;
    return AR_OK;
}

static ar_status rank_main(void *user, ar_ctx *ctx)
{
    trained t = {0};
    ar_status st = make(&t, ctx, user);
    if (st == AR_OK)
        st = train(&t, ctx, user);
    ar_optimizer_destroy(t.optimizer);
    ar_gradients_destroy(t.gradients);
    ar_ddp_destroy(t.ddp);
    free(t.params);
    ar_model_destroy(t.model);
    return st;
}

/* --- the claims --------------------------------------------------------------------------------------------------- */

static const ar_parallel layouts[] = {
    {.dp = 2},
    {.tp = 2, .dp = 2, .zero = 1, .sp = true},
    {.dp = 3, .zero = 2},
    {.dp = 2, .zero = 3},
    {.tp = 2, .dp = 4, .micro_batches = 1},
    {.micro_batches = 3},
    {.tp = 4}, /* more ranks than KV heads */
};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

static bool is_frozen(void *user, const char *name, int step)
{
    const job *j = user;
    return (j->all_along && strstr(name, j->all_along)) || (j->in_step[step - 1] && strstr(name, j->in_step[step - 1]));
}

/* What is frozen before anything is made is nothing that an optimizer knows. */
static bool is_no_optimizers(void *user, const char *name, char pass)
{
    const job *j = user;
    return strchr("nmv", pass) && j->all_along && strstr(name, j->all_along);
}

/* The independent program, with the same parameters frozen in the same steps. */
static void expect_the_baseline(const recorded *whole, job *j)
{
    const ar_batch batch = {.batch = B, .seq = S, .input_ids = ids}, batches[STEPS] = {batch, batch, batch};
    ari_cluster_options o = {
        .config = &j->config, .batch = batches, .run.steps = STEPS, .run.seed = 5, .run.clip = j->clip};
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o.run.optimizer.lr = 0.05;
    expect_the_baselines_bits(&(baseline_run){.r = whole, .frozen = is_frozen, .unlisted = is_no_optimizers, .user = j},
                              &o);
}

/* Gives the one rank's run; recorded_free. */
static recorded *expect_the_same(job *j)
{
    static const ar_ddp_options buckets[] = {{.bucket_bytes = 500},
                                             {.bucket_bytes = 0, .mode = AR_BUCKETS_EAGER},
                                             {.bucket_bytes = 1 << 20, .find_unused = true}};
    const ari_cluster_options o = {.config = &j->config, .body = rank_main, .body_user = j};
    j->poisoned = -1;
    j->verify = true;
    j->parallel = (ar_parallel){.tp = 1};
    recorded *whole = record(&o);
    cr_expect_eq(j->status[0], AR_OK, "%s", j->text[0]);
    expect_the_baseline(whole, j);
    for (size_t i = 0; i < LAYOUTS; i++) {
        j->parallel = layouts[i];
        j->ddp = buckets[i % 3];
        memset(j->status, 0, sizeof j->status);
        expect_one_ranks_bits(whole, &o, &layouts[i]);
        for (int r = 0; r < ar_parallel_world(&layouts[i]); r++)
            cr_expect_eq(j->status[r], AR_OK, "layout %zu, rank %d: %s", i, r, j->text[r]);
    }
    return whole;
}

/* Whether every weight whose name has `part` is, after `step`, what it was before. */
static bool stood_still(const recorded *r, const char *part, int step)
{
    size_t found = 0;
    for (size_t i = 0; i < r->of.count; i++) {
        const ari_ref_tensor *now = &r->of.tensor[i];
        if (now->pass != 'n' || now->step != step || !strstr(now->name, part))
            continue;
        const ari_ref_tensor *before =
            step > 1 ? recorded_find(r, now->name, 'n', step - 1) : recorded_find(r, now->name, 'i', 1);
        found++;
        if (!before || memcmp(now->values, before->values, now->count * sizeof(float)) != 0)
            return false;
    }
    return found > 0;
}

/* Some; queries beside keys and values: of KV heads with copies, the first rank alone counts the part in the input's
 * gradient and makes an operand anew that the others have kept; a tied weight in both of its places; all. */
Test(frozen, those_of_one_step_stand_still_in_it_and_no_others)
{
    static job j;
    static const struct {
        ar_arch arch;
        size_t layers;
        double clip;
        const char *in_step[3];
        struct {
            const char *part;
            int step; /* -n: in step n it does not stand still */
        } still[3];
    } cases[] = {
        {AR_ARCH_LLAMA, 2, 0.5, {NULL, "0.mlp", NULL}, {{"0.mlp", 2}, {"0.mlp", -3}, {"1.mlp", -2}}},
        {AR_ARCH_LLAMA, 1, 0.5, {NULL, "q_proj", "k_proj"}, {{"q_proj", 2}, {"k_proj", -2}, {"k_proj", 3}}},
        {AR_ARCH_GPT2, 1, 0.0, {"wte", NULL, "wte"}, {{"wte", 1}, {"wte", -2}, {"wte", 3}}},
        {AR_ARCH_STACK, 1, 0.5, {NULL, "", NULL}, {{"", -1}, {"", 2}, {"", -3}}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        j = (job){.config = match_config(cases[i].arch, cases[i].layers), .clip = cases[i].clip};
        memcpy(j.in_step, cases[i].in_step, sizeof cases[i].in_step);
        j.config.tied = j.config.tied || cases[i].arch == AR_ARCH_GPT2;
        OWNED(recorded_free) recorded *r = expect_the_same(&j);
        for (size_t k = 0; k < 3; k++) {
            const int step = cases[i].still[k].step;
            cr_expect_eq(stood_still(r, cases[i].still[k].part, abs(step)), step > 0, "case %zu: %s in step %d", i,
                         cases[i].still[k].part, abs(step));
        }
    }
}

Test(frozen, those_frozen_before_have_neither_bucket_nor_state)
{
    static job j;
    j = (job){.config = match_config(AR_ARCH_LLAMA, 1), .clip = 0.5, .all_along = "self_attn"};
    recorded *r = expect_the_same(&j);
    cr_expect_null(recorded_find(r, "model.layers.0.self_attn.q_proj.weight", 'n', 1));
    recorded_free(r);
    j = (job){.config = match_config(AR_ARCH_LLAMA, 1), .all_along = ""};
    r = expect_the_same(&j);
    cr_expect_eq(j.versions[0], 0);
    recorded_free(r);
    j = (job){.config = match_config(AR_ARCH_LLAMA, 1), .clip = 0.5, .all_along = "embed_tokens"}; /* the first one */
    recorded_free(expect_the_same(&j));
}

/* --- gradients that are not finite -------------------------------------------------------------------------------- */

static void expect_one_text(double clip, bool verify, ar_status st, const char *says)
{
    for (size_t i = 0; i < 4; i++) {
        static job j;
        j = (job){.config = match_config(AR_ARCH_LLAMA, 1), .parallel = layouts[i], .clip = clip, .verify = verify};
        j.poisoned = 1;
        j.ddp.bucket_bytes = 300;
        j.ddp.mode = i % 2 == 0 ? AR_BUCKETS_OVERLAP : AR_BUCKETS_EAGER;
        const ari_cluster_options o = {
            .run.parallel = layouts[i], .run.threads = 1, .body = rank_main, .body_user = &j};
        ari_cluster_result result;
        cr_assert_ok(ari_cluster_run(&result, &o));
        free(result.loss);
        for (int r = 0; r < ar_parallel_world(&layouts[i]); r++) {
            cr_expect_eq(j.status[r], st, "layout %zu, rank %d: %s", i, r, j.text[r]);
            cr_expect(strstr(j.text[r], says), "layout %zu, rank %d: %s", i, r, j.text[r]);
            cr_expect_str_eq(j.text[r], j.text[0]);
            cr_expect_eq(j.versions[r], 0, "layout %zu, rank %d", i, r);
        }
    }
}

Test(frozen, a_nan_of_one_rank_ends_a_clipped_step_on_all_before_any_weight_changes)
{
    expect_one_text(1.0, false, AR_ERR_DATA, "the gradient norm is not finite at step 1; no weight was changed");
}

Test(frozen, without_clipping_a_verified_step_names_the_parameter)
{
    expect_one_text(0.0, true, AR_ERR_DATA, "model.layers.0.input_layernorm.weight: ");
}
