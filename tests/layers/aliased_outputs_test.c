/* SPDX-License-Identifier: Apache-2.0 */
/* Every public function that makes a tensor of others, with its output in the place of each input: the same bits as
 * with another output, or a refusal. */
#include "anyrank/activation.h"
#include "anyrank/context.h"
#include "anyrank/layers.h"
#include "anyrank/module.h"
#include "anyrank/redistribute.h"
#include "ref/layers/param_private.h"
#include "support/rank_run.h"
#include "tests/support/test.h"

enum { N = 4, EACH = 2 * N * N, INPUTS = 3 }; /* a tensor is [2, N, N] */

typedef struct work {
    ar_ctx *ctx;
    ar_param weight, gain, offset; /* [N, N], [N], [N] */
    ar_module *module;
    ar_mesh_groups groups;
    ar_saved *saved;
    ar_tensor in[INPUTS]; /* in[1] is a vector if the case says so */
} work;

typedef ar_status (*region)(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x);
typedef struct aliased_case {
    const char *name;
    ar_status (*call)(work *w, ar_tensor *out, region of);
    int inputs;
    bool vector, refused;
    region of;
} aliased_case;

static ar_status call_region(work *w, ar_tensor *out, region of)
{
    return of(w->ctx, out, &w->in[0]);
}

static ar_status call_like(work *w, ar_tensor *out, region of)
{
    const float zero[EACH] = {0};
    (void)of;
    AR_TRY(ar_like(w->ctx, out, &w->in[0]));
    return ar_ctx_upload(w->ctx, out, zero);
}

static ar_status call_spread(work *w, ar_tensor *out, region of)
{
    (void)of;
    return ar_spread_rows(w->ctx, out, &w->in[1], &w->in[0]);
}

static ar_status call_add(work *w, ar_tensor *out, region of)
{
    (void)of;
    return ar_add(w->ctx, out, &w->in[0], &w->in[1]);
}

static ar_status call_mul(work *w, ar_tensor *out, region of)
{
    (void)of;
    return ar_mul(w->ctx, out, &w->in[0], &w->in[1]);
}

static ar_status call_contract(work *w, ar_tensor *out, region of)
{
    (void)of;
    return ar_contract(w->ctx, out, &w->in[0], &w->weight);
}

/* The gradient that a backward pass adds to decides too: it becomes the output if the output is right. */
static ar_status call_contract_gradient(work *w, ar_tensor *out, region of)
{
    ar_tensor g;
    (void)of;
    AR_TRY(ar_contract_backward(w->ctx, out, &w->in[0], &w->in[1], &w->weight));
    AR_TRY(ar_like(w->ctx, &g, &w->weight.value));
    AR_TRY(ar_param_grad_value(&w->weight, w->ctx, &g));
    *out = g;
    return AR_OK;
}

static ar_status call_contract_backward(work *w, ar_tensor *out, region of)
{
    (void)of;
    return ar_contract_backward(w->ctx, out, &w->in[0], &w->in[1], &w->weight);
}

static ar_status call_contract_all(work *w, ar_tensor *out, region of)
{
    ar_param *const both[] = {&w->weight, &w->weight};
    (void)of;
    return ar_contract_backward_all(w->ctx, out, w->in, &w->in[2], both, 2);
}

static ar_status call_act(work *w, ar_tensor *out, region of)
{
    (void)of;
    return ar_bias_act_forward(w->ctx, out, &w->in[0], &w->offset, AR_ACT_SILU);
}

static ar_status call_act_backward(work *w, ar_tensor *out, region of)
{
    (void)of;
    return ar_bias_act_backward(w->ctx, out, &w->in[0], &w->in[1], &w->offset, AR_ACT_SILU);
}

static ar_status call_norm(work *w, ar_tensor *out, region of)
{
    ar_norm_saved saved;
    (void)of;
    return ar_norm_forward(w->ctx, AR_NORM_LAYER, out, &saved, &w->in[0], &w->gain, &w->offset, 1e-5);
}

static ar_status call_norm_into_saved(work *w, ar_tensor *out, region of)
{
    ar_norm_saved saved;
    (void)of, (void)out;
    return ar_norm_forward(w->ctx, AR_NORM_LAYER, &saved.mean, &saved, &w->in[0], &w->gain, &w->offset, 1e-5);
}

static ar_status norm_backward(work *w, ar_tensor *dx, ar_tensor *sum)
{
    ar_norm_saved saved;
    ar_tensor y;
    AR_TRY(ar_norm_forward(w->ctx, AR_NORM_LAYER, &y, &saved, &w->in[1], &w->gain, &w->offset, 1e-5));
    return ar_norm_backward(w->ctx, AR_NORM_LAYER, dx, sum, &w->in[0], &w->in[1], &saved, &w->gain, &w->offset,
                            &w->in[2]);
}

static ar_status call_norm_dx(work *w, ar_tensor *out, region of)
{
    ar_tensor sum;
    (void)of;
    return norm_backward(w, out, &sum);
}

static ar_status call_norm_sum(work *w, ar_tensor *out, region of)
{
    ar_tensor dx;
    (void)of;
    return norm_backward(w, &dx, out);
}

static ar_status call_norm_one_output(work *w, ar_tensor *out, region of)
{
    (void)of;
    return norm_backward(w, out, out);
}

static ar_status call_module(work *w, ar_tensor *out, region of)
{
    (void)of;
    return ar_module_forward(w->module, w->ctx, NULL, out, &w->in[0], NULL);
}

static ar_status call_module_backward(work *w, ar_tensor *out, region of)
{
    ar_tensor y;
    (void)of;
    AR_TRY(ar_module_forward(w->module, w->ctx, w->saved, &y, &w->in[1], NULL));
    return ar_module_backward(w->module, w->ctx, w->saved, out, &w->in[0], NULL);
}

static ar_status call_redistribute(work *w, ar_tensor *out, region of)
{
    const size_t ranks = (size_t)ar_comm_size(ar_ctx_tp(w->ctx));
    const ar_redistribution r = {
        .ndim = 3, .shape = {2, N, N * ranks}, .src = {{AR_SHARD, 2}}, .dst = {{AR_REPLICATE, 0}}};
    (void)of;
    return ar_redistribute(w->ctx, &w->groups, out, &w->in[0], &r, "gather");
}

#define REGION(name)                                                            \
    {#name, call_region, .inputs = 1, .of = ar_##name},                         \
    {                                                                           \
#name "_backward", call_region, .inputs = 1, .of = ar_##name##_backward \
    }
static const aliased_case cases[] = {
    {"like", call_like, .inputs = 1},
    {"spread_rows", call_spread, .inputs = 2, .vector = true},
    {"add", call_add, .inputs = 2},
    {"mul", call_mul, .inputs = 2},
    {"contract", call_contract, .inputs = 1},
    {"contract_backward", call_contract_backward, .inputs = 2},
    {"contract_backward's gradient", call_contract_gradient, .inputs = 2},
    {"contract_backward_all", call_contract_all, .inputs = 3},
    {"bias_act_forward", call_act, .inputs = 1, .refused = true},
    {"bias_act_backward", call_act_backward, .inputs = 2},
    {"norm_forward", call_norm, .inputs = 1},
    {"norm_forward into saved", call_norm_into_saved, .inputs = 1, .refused = true},
    {"norm_backward's dx", call_norm_dx, .inputs = 3},
    {"norm_backward's sum", call_norm_sum, .inputs = 3},
    {"norm_backward's one output", call_norm_one_output, .inputs = 1, .refused = true},
    {"module_forward", call_module, .inputs = 1},
    {"module_backward", call_module_backward, .inputs = 1},
    {"redistribute", call_redistribute, .inputs = 1},
    REGION(copy_to_region),
    REGION(reduce_from_region),
    REGION(gather_from_region),
    REGION(scatter_to_region),
    REGION(gather_tokens),
    REGION(scatter_tokens),
    REGION(enter_region),
    REGION(leave_region),
};
enum { CASES = sizeof cases / sizeof *cases };

/* Of each rank and case: the first input whose place the output cannot take, else -1. */
typedef struct results {
    int wrong[2][CASES];
} results;

static ar_status fill_inputs(work *w, const aliased_case *c)
{
    const size_t shape[] = {2, N, N}, vector[] = {N};
    for (size_t k = 0; k < INPUTS; k++) {
        float x[EACH];
        for (size_t i = 0; i < EACH; i++)
            x[i] = (float)((i * 7 + k * 5 + 3 * rank_of(w->ctx)) % 11) - 4.5f;
        const bool flat = k == 1 && c->vector;
        AR_TRY(rank_upload(w->ctx, &w->in[k], flat ? 1 : 3, flat ? vector : shape, x));
    }
    return AR_OK;
}

/* The case with its output in the place of input k, or with one of its own (k < 0), into `values`. */
static ar_status run_case(work *w, const aliased_case *c, int k, float *values, size_t *count)
{
    ar_tensor own;
    ar_tensor *out = k < 0 ? &own : &w->in[k];
    AR_TRY(ari_param_zero_grad(&w->weight, w->ctx));
    AR_TRY(fill_inputs(w, c));
    AR_TRY(c->call(w, out, c->of));
    *count = ar_tensor_count(out);
    return ar_ctx_download(w->ctx, values, out);
}

static ar_status try_case(int *wrong, work *w, const aliased_case *c)
{
    float expected[2 * EACH], got[2 * EACH];
    size_t n = 0, same = 0;
    *wrong = -1;
    if (!c->refused)
        AR_TRY(run_case(w, c, -1, expected, &n));
    for (int k = 0; k < c->inputs; k++) {
        const ar_status st = run_case(w, c, k, got, &same);
        if (!c->refused)
            AR_TRY(st);
        const bool right = c->refused ? st == AR_ERR_ARG : same == n && memcmp(got, expected, n * sizeof *got) == 0;
        *wrong = !right && *wrong < 0 ? k : *wrong;
    }
    ar_error_clear();
    return AR_OK;
}

static ar_status set_up(work *w)
{
    const size_t matrix[] = {N, N}, vector[] = {N};
    AR_TRY(ar_param_init_whole(&w->weight, w->ctx, "m", "weight", 2, matrix, AR_INIT_NORMAL));
    AR_TRY(ar_param_init_whole(&w->gain, w->ctx, "m", "gain", 1, vector, AR_INIT_ONES));
    AR_TRY(ar_param_init_whole(&w->offset, w->ctx, "m", "offset", 1, vector, AR_INIT_ONES));
    AR_TRY(ari_param_fresh(&w->weight, w->ctx, 1));
    AR_TRY(ar_activation_create(&w->module, w->ctx, "act", AR_ACT_SILU, AR_HELD_UNKNOWN));
    AR_TRY(ar_saved_create(&w->saved));
    const ar_mesh mesh = {1, {{"tp", ar_comm_size(ar_ctx_tp(w->ctx))}}};
    return ar_mesh_groups_init(&w->groups, &mesh, ar_ctx_tp(w->ctx));
}

static ar_status all_cases(ar_ctx *ctx, void *user)
{
    results *r = user;
    work w = {.ctx = ctx};
    ar_status st = set_up(&w);
    for (size_t i = 0; i < CASES && st == AR_OK; i++)
        st = try_case(&r->wrong[rank_of(ctx)][i], &w, &cases[i]);
    ar_mesh_groups_fini(&w.groups);
    ar_saved_destroy(w.saved);
    ar_module_destroy(w.module);
    ar_param_fini(&w.offset);
    ar_param_fini(&w.gain);
    ar_param_fini(&w.weight);
    return st;
}

Test(aliased_outputs, take_the_place_of_every_input_or_are_refused)
{
    for (int ranks = 1; ranks <= 2; ranks++) {
        results r = {{{0}}};
        const ar_run o = {.parallel.tp = ranks};
        cr_assert_eq(rank_run(&o, all_cases, &r), AR_OK, "%s", ar_error_message());
        for (int rank = 0; rank < ranks; rank++) {
            for (size_t i = 0; i < CASES; i++)
                cr_expect_eq(r.wrong[rank][i], -1, "%s on rank %d of %d: its output in the place of input %d",
                             cases[i].name, rank, ranks, r.wrong[rank][i]);
        }
    }
}
