/* SPDX-License-Identifier: Apache-2.0 */
/* Twenty AdamW steps against losses and final weights that PyTorch computed in fp32 on a CPU.
 *
 * Losses: two fp32 computations of a loss of 4 to 6, in other orders, differ by some units of 2^-23 of it; what training
 * adds is below it as long as the weights agree. Measured 3.4e-7.
 *
 * Weights: Adam's step is lr*m/sqrt(v), of the order of lr = 1e-3 however small the gradient is. A gradient whose
 * relative error is e moves a weight by about e*lr a step, 20 steps by 20*e*lr at most. Gradients below some 1e-7 of
 * their tensor's largest are PyTorch's rounding, so there e is of order 1; such elements are rare and their moments
 * carry a history: no element is off by more than a twentieth of lr, almost all by rounding alone; an update
 * that is wrong in one term (a bias correction, one step's decay) is off by lr*1e-1 and more in many elements, which
 * the mean difference shows: 2e-7 allowed, 20 steps of e = 1e-5.
 *
 * The gradient of a key's bias is zero in exact arithmetic, since softmax ignores a shift of all scores of a query. It
 * is noise in both programs, and Adam makes steps of lr out of it: exempt by name, and held to what 20 steps can do. */
#include "ref/io/safetensors_private.h"
#include "tests/baseline/support.h"
#include "tests/support/small.h"

#include <jansson.h>

enum { STEPS = 20, BATCH = 2, SEQ = 32, IDS = STEPS * BATCH * SEQ };

#define LOSS_BOUND 1e-6
#define WEIGHT_BOUND 5e-5
#define MEAN_BOUND 2e-7
#define MOST_BOUND 1e-6    /* of all but a few elements of a tensor, */
#define OUTSIDE_BOUND 2e-3 /* this share of them, in exact numerics; measured 1e-3 */
#define NOISE_BOUND 1e-7   /* of a key bias's gradient */

typedef struct golden {
    ar_config config;
    ar_optimizer_options optimizer;
    double loss[STEPS];
    int64_t ids[IDS];
    ar_batch batch[STEPS];
} golden;

static double number(const json_t *of, const char *key)
{
    const json_t *at = json_object_get(of, key);
    cr_assert(json_is_number(at), "train.json: no number '%s'", key);
    return json_number_value(at);
}

/* Of a run of Muon what AdamW's has not. */
static void load_muon(ar_optimizer_options *o, const json_t *muon)
{
    o->kind = AR_OPTIMIZER_MUON;
    o->nesterov = true;
    o->momentum = number(muon, "momentum");
    o->match_rms = strcmp(json_string_value(json_object_get(muon, "adjust_lr_fn")), "match_rms_adamw") == 0;
}

/* first: "train" or "muon", with which the names of the run's files begin. */
static void load_golden(golden *g, const char *folder, const char *first)
{
    char path[600], batches[100];
    snprintf(path, sizeof path, "%s/%s", TEST_GOLDEN_DIR, folder);
    cr_assert_ok(ar_config_load(&g->config, path));
    snprintf(path, sizeof path, "%s/%s/%s.json", TEST_GOLDEN_DIR, folder, first);
    snprintf(batches, sizeof batches, "%s_batches.safetensors", first);
    json_t *train = json_load_file(path, 0, NULL);
    cr_assert_not_null(train);
    const json_t *betas = json_object_get(train, "betas"), *losses = json_object_get(train, "losses");
    cr_assert(json_array_size(betas) == 2 && json_array_size(losses) == STEPS);
    g->optimizer = (ar_optimizer_options){.kind = AR_OPTIMIZER_ADAMW,
                                          .lr = number(train, "lr"),
                                          .beta1 = json_number_value(json_array_get(betas, 0)),
                                          .beta2 = json_number_value(json_array_get(betas, 1)),
                                          .eps = number(train, "eps"),
                                          .weight_decay = number(train, "weight_decay")};
    if (strcmp(json_string_value(json_object_get(train, "optimizer")), "AdamW") != 0)
        load_muon(&g->optimizer, train);
    for (size_t i = 0; i < STEPS; i++)
        g->loss[i] = json_number_value(json_array_get(losses, i));
    json_decref(train);
    OWNED(ari_st_close) ar_st_file *file = open_golden(folder, batches);
    const ar_st_entry *e = ari_st_find(file, "input_ids");
    cr_assert(e != NULL && e->ndim == 3 && e->shape[1] == BATCH && e->shape[2] == SEQ && e->count == IDS);
    cr_assert_ok(ari_st_to_i64(e, g->ids));
    for (size_t i = 0; i < STEPS; i++)
        g->batch[i] = (ar_batch){.batch = BATCH, .seq = SEQ, .input_ids = g->ids + i * BATCH * SEQ};
}

/* Of GPT-2's fused bias [3h] the middle third. */
static bool is_key_bias(const golden *g, const char *name, size_t i)
{
    const size_t h = g->config.hidden;
    return strstr(name, "attn.c_attn.bias") != NULL && i >= h && i < 2 * h;
}

/* right: whether the update was PyTorch's; another one is outside the bound of the mean. most: the share of a tensor's
 * elements that may be outside of rounding. */
static void check_weights(const golden *g, const tape *t, const ar_st_file *final, const char *mode, bool right,
                          double most)
{
    double worst = 0.0, sum = 0.0, worst_exempt = 0.0;
    size_t elements = 0, exempt = 0;
    for (size_t n = 0; n < ari_st_tensor_count(final); n++) {
        const ar_st_entry *e = ari_st_at(final, n);
        const taped *w = tape_find_step(t, e->name, 'n', STEPS), *before = tape_find_step(t, e->name, 'i', 1);
        const taped *grad = tape_find_step(t, e->name, 'g', STEPS);
        cr_assert_eq(w->count, e->count);
        cr_assert_neq(memcmp(w->values, before->values, w->count * sizeof(double)), 0, "%s did not move", e->name);
        size_t outside = 0;
        for (size_t i = 0; i < w->count; i++) {
            const double off = fabs(w->values[i] - entry_value(e, i));
            if (is_key_bias(g, e->name, i)) {
                cr_expect_lt(fabs(grad->values[i]), NOISE_BOUND, "%s[%zu]", e->name, i);
                cr_expect_leq(off, STEPS * g->optimizer.lr, "%s[%zu]", e->name, i);
                worst_exempt = fmax(worst_exempt, off);
                exempt++;
                continue;
            }
            cr_expect(off < WEIGHT_BOUND || !right, "%s, %s[%zu]: off by %.3g", mode, e->name, i, off);
            worst = fmax(worst, off);
            sum += off;
            elements++;
            outside += off > MOST_BOUND;
        }
        cr_expect((double)outside <= most * (double)e->count || !right, "%s, %s: %zu elements are outside of rounding",
                  mode, e->name, outside);
    }
    const double mean = sum / (double)elements;
    cr_expect_eq(mean < MEAN_BOUND, right, "%s: off by %.3g in the mean", mode, mean);
    fprintf(stderr,
            "%s: %zu weights, off by %.3g at most (allowed %.3g), %.3g in the mean (allowed %.3g); %zu key "
            "biases, %.3g (allowed %.3g)\n",
            mode, elements, worst, WEIGHT_BOUND, mean, MEAN_BOUND, exempt, worst_exempt, STEPS * g->optimizer.lr);
    cr_assert_eq(exempt, g->config.arch == AR_ARCH_GPT2 ? g->config.layers * g->config.hidden : 0);
}

/* Keeps the initial weights and what the last step made. */
static ar_status keep_ends(void *user, const char *name, char pass, int ndim, const size_t *shape, const double *values)
{
    const tape *t = user;
    const bool wanted = pass == 'i' || (t->step == STEPS && (pass == 'n' || pass == 'g'));
    return wanted ? tape_emit(user, name, pass, ndim, shape, values) : AR_OK;
}

static void check_update(const char *folder, const char *first, ar_number_mode mode, const char *mode_name,
                         double decay)
{
    static tape t;
    static golden g;
    double loss[STEPS], worst = 0.0;
    char last[100];
    snprintf(last, sizeof last, "%s_final.safetensors", first);
    load_golden(&g, folder, first);
    g.optimizer.weight_decay *= decay;
    ar_st_file *weights = open_golden(folder, "model.safetensors"), *final = open_golden(folder, last);
    given initial = {.file = weights};
    const ar_baseline_options o = {.mode = mode,
                                   .weights = given_weight,
                                   .weights_user = &initial,
                                   .emit = keep_ends,
                                   .emit_user = &t,
                                   .begin_step = tape_begin,
                                   .steps = STEPS,
                                   .optimizer = g.optimizer};
    cr_assert_ok(ar_baseline_run(&g.config, &o, g.batch, loss));
    for (size_t i = 0; i < STEPS; i++) {
        const double off = fabs(loss[i] - g.loss[i]) / g.loss[i];
        cr_expect(off < LOSS_BOUND || decay != 1.0, "%s, %s: loss of step %zu is %.9g, expected %.9g", folder,
                  mode_name, i + 1, loss[i], g.loss[i]);
        worst = fmax(worst, off);
    }
    cr_assert_lt(loss[STEPS - 1], 0.8 * loss[0], "it learns");
    fprintf(stderr, "%s, %s: losses off by %.3g of themselves (allowed %.3g)\n", folder, mode_name, worst, LOSS_BOUND);
    check_weights(&g, &t, final, mode_name, decay == 1.0, mode == AR_MODE_EXACT ? OUTSIDE_BOUND : 1.0);
    tape_clear(&t);
    given_clear(&initial);
    ari_st_close(weights);
    ari_st_close(final);
}

static void check_training(const char *folder, ar_number_mode mode, const char *mode_name)
{
    check_update(folder, "train", mode, mode_name, 1.0);
}

Test(baseline_training_golden, another_decay_is_outside_the_bounds)
{
    check_update("gpt2-tiny", "train", AR_MODE_FP32, "a decay of a tenth more", 1.1);
}

Test(baseline_training_golden, gpt2_tiny_trains_as_pytorch_does)
{
    check_training("gpt2-tiny", AR_MODE_EXACT, "exact");
    if (small_only())
        return;
    check_training("gpt2-tiny", AR_MODE_FP32, "fp32");
    check_training("gpt2-tiny", AR_MODE_F64, "binary64");
}

/* No token is near enough to another expert to go there (tests/golden/make_golden.py). */
Test(baseline_training_golden, models_with_experts_train_as_pytorch_does)
{
    check_training("experts/qwen2moe-tiny", AR_MODE_EXACT, "exact");
    if (small_only())
        return;
    check_training("experts/mixtral-tiny", AR_MODE_FP32, "fp32");
    check_training("experts/mixtral-tiny", AR_MODE_F64, "binary64");
}

Test(baseline_training_golden, llama_gqa_tiny_trains_as_pytorch_does)
{
    check_training("llama-gqa-tiny", AR_MODE_FP32, "fp32");
    if (small_only())
        return;
    check_training("llama-gqa-tiny", AR_MODE_EXACT, "exact");
    check_training("llama-gqa-tiny", AR_MODE_F64, "binary64");
}

/* torch.optim.Muon in fp32, with q, k, v, gate, up and each expert as matrices of their own (make_golden.py). */
Test(baseline_training_golden, muon_trains_experts_and_packed_weights_as_pytorch_does)
{
    check_update("phi3-tiny", "muon", AR_MODE_EXACT, "exact", 1.0);
    check_update("experts/mixtral-tiny", "muon", AR_MODE_FP32, "fp32", 1.0);
    check_update("experts/mixtral-tiny", "muon", AR_MODE_F64, "binary64", 1.0);
}
