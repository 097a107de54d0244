/* SPDX-License-Identifier: Apache-2.0 */
/* The gradient manager: what it finds, on which ranks, and that every rank comes to the same verdict. */
#include "anyrank/context.h"
#include "anyrank/gradients.h"
#include "ref/core/param_private.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/param_private.h"
#include "ref/train/gradients_private.h"
#include "support/rank_run.h"
#include "support/row.h"
#include "tests/support/test.h"

/* A matrix cut by rows, a vector that all tensor-parallel ranks hold, one whose gradient's terms they share out, and
 * rows of which the last ranks may hold none. */
enum { SHARDED, REPLICATED, PARTIAL, UNEVEN, PARAMS, MOST_RANKS = 8, TEXT = 1500 };
static const char *const names[PARAMS] = {"sharded", "replicated", "partial", "uneven"};

typedef struct job job;
/* What a rank does to itself. `mine`: the rank is one of those that the case names. */
typedef ar_status (*act_fn)(ar_ctx *ctx, job *j, ar_param *p, bool mine);
struct job {
    int tp, dp;
    unsigned ranks;       /* bit r: rank dp rank * tp + tp rank */
    int param;            /* that is not as the others */
    float element;        /* its new or added one */
    act_fn before, after; /* the gradients are synchronised; NULL: nothing */
    bool unsynced;
    ar_optimizer *optimizer[MOST_RANKS];
    ar_gradients_verify_options ask;
    ar_status status[MOST_RANKS];
    ar_verdict verdict[MOST_RANKS];
    char text[MOST_RANKS][TEXT];
};

static int world_rank(const ar_ctx *ctx, const job *j)
{
    return ar_comm_rank(ar_ctx_dp(ctx)) * j->tp + ar_comm_rank(ar_ctx_tp(ctx));
}

static ar_status make(ar_ctx *ctx, ar_param p[PARAMS])
{
    const size_t matrix[2] = {8, 3}, vector = 5, rows[2] = {5, 2};
    const int r = (int)rank_of(ctx), n = (int)ranks_of(ctx);
    ar_layout layout;
    AR_TRY(ar_layout_shard(&layout, 2, matrix, 0, r, n));
    AR_TRY(ar_param_init(&p[SHARDED], ctx, names[SHARDED], &layout, true));
    AR_TRY(ari_layout_replicate(&layout, 1, &vector, r, n));
    AR_TRY(ar_param_init(&p[REPLICATED], ctx, names[REPLICATED], &layout, false));
    AR_TRY(ar_param_init(&p[PARTIAL], ctx, names[PARTIAL], &layout, false));
    p[PARTIAL].spread = true;
    AR_TRY(ari_layout_shard_uneven(&layout, 2, rows, 0, r, n));
    AR_TRY(ar_param_init(&p[UNEVEN], ctx, names[UNEVEN], &layout, false));
    for (int i = 0; i < PARAMS; i++) {
        p[i].init = AR_INIT_NORMAL;
        p[i].init_range = 1.0;
        AR_TRY(ari_param_fresh(&p[i], ctx, 7));
    }
    return AR_OK;
}

/* Adds `first` to the gradient's first element, and `others` to the others. */
static ar_status add(ar_ctx *ctx, ar_param *p, float first, float others)
{
    float host[24];
    int64_t row[24];
    const ar_tensor matrix = ari_param_matrix(p);
    const size_t n = ar_tensor_count(&p->value);
    ar_tensor terms, rows;
    if (n == 0)
        return AR_OK;
    const size_t columns = matrix.shape[matrix.ndim - 1], shape[2] = {n / columns, columns};
    for (size_t i = 0; i < n; i++)
        host[i] = i == 0 ? first : others;
    for (size_t i = 0; i < shape[0]; i++)
        row[i] = (int64_t)i;
    AR_TRY(rank_upload(ctx, &terms, 2, shape, host));
    AR_TRY(ar_ctx_tensor(ctx, &rows, AR_I64, 1, shape));
    AR_TRY(ar_ctx_upload(ctx, &rows, row));
    return ar_ctx_arith(ctx)->grad_rows(ctx, p, &terms, p->value.ndim > 1 ? ar_const(rows.data) : (ar_cbuf){NULL});
}

static ar_status add_element(ar_ctx *ctx, job *j, ar_param *p, bool mine)
{
    return mine ? add(ctx, &p[j->param], j->element, 0.0f) : AR_OK;
}

static ar_status set_value(ar_ctx *ctx, job *j, ar_param *p, bool mine)
{
    const size_t one = 1;
    ar_tensor t;
    AR_TRY(ar_tensor_view(&t, AR_F32, 1, &one, p[j->param].value.data));
    return mine ? ar_ctx_upload(ctx, &t, &j->element) : AR_OK;
}

static ar_status forget(ar_ctx *ctx, job *j, ar_param *p, bool mine)
{
    return mine ? ari_param_zero_grad(&p[j->param], ctx) : AR_OK;
}

static ar_status freeze(ar_ctx *ctx, job *j, ar_param *p, bool mine)
{
    (void)ctx;
    p[j->param].requires_grad = !mine;
    return AR_OK;
}

/* A gradient of zeros: there, and nothing in it. */
static ar_status add_zeros(ar_ctx *ctx, job *j, ar_param *p, bool mine)
{
    AR_TRY(forget(ctx, j, p, mine));
    return mine ? add(ctx, &p[j->param], 0.0f, 0.0f) : AR_OK;
}

static ar_status update(ar_ctx *ctx, job *j, ar_param *p, bool mine)
{
    const ar_optimizer_options o = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    ar_param *const one = &p[j->param];
    ar_optimizer **optimizer = &j->optimizer[world_rank(ctx, j)];
    AR_TRY(ar_optimizer_create(optimizer, ctx, &one, 1, &o));
    return ar_optimizer_step(*optimizer, ctx, mine ? 2.0f : 1.0f);
}

/* One step more, in which no parameter has a gradient. */
static ar_status step_ahead(ar_ctx *ctx, job *j, ar_param *p, bool mine)
{
    AR_TRY(update(ctx, j, p, false));
    AR_TRY(forget(ctx, j, p, mine));
    return mine ? ar_optimizer_step(j->optimizer[world_rank(ctx, j)], ctx, 1.0f) : AR_OK;
}

static void tell(job *j, int r)
{
    const ar_verdict *v = &j->verdict[r];
    for (size_t i = 0; i < v->findings; i++) {
        const size_t used = strlen(j->text[r]);
        char one[400];
        ari_finding_text(one, sizeof one, &v->finding[i]);
        snprintf(j->text[r] + used, TEXT - used, "%s%s%s", used > 0 ? "\n" : "",
                 v->finding[i].warning ? "warning: " : "", one);
    }
}

static ar_status go(ar_ctx *ctx, job *j, ar_param *p, ar_gradients *g)
{
    const int r = world_rank(ctx, j);
    const bool mine = (j->ranks >> r & 1u) != 0;
    AR_TRY(ar_gradients_zero(g));
    for (int i = 0; i < PARAMS; i++)
        AR_TRY(add(ctx, &p[i], 1.5f, -0.25f));
    AR_TRY(j->before ? j->before(ctx, j, p, mine) : AR_OK);
    AR_TRY(j->unsynced ? AR_OK : ar_gradients_sync(g, NULL));
    AR_TRY(j->after ? j->after(ctx, j, p, mine) : AR_OK);
    ar_gradients_verify_options ask = j->ask;
    ask.optimizer = j->optimizer[r];
    j->status[r] = ar_gradients_verify(g, &j->verdict[r], &ask);
    if (j->status[r] == AR_OK)
        tell(j, r);
    else
        snprintf(j->text[r], TEXT, "%s", ar_error_message());
    return AR_OK;
}

static ar_status rank_main(ar_ctx *ctx, void *user)
{
    job *j = user;
    SCOPED(rank_params_end) rank_params p;
    OWNED(ar_gradients_destroy) ar_gradients *g = NULL;
    rank_params_begin(&p);
    AR_TRY(make(ctx, p.at));
    AR_TRY(ar_gradients_create(&g, ctx, p.all, PARAMS));
    const ar_status st = go(ctx, j, p.at, g);
    ar_optimizer_destroy(j->optimizer[world_rank(ctx, j)]);
    return st;
}

static void run(job *j, ar_numerics numerics)
{
    const ar_run o = {.parallel = {.tp = j->tp, .dp = j->dp}, .numerics = numerics};
    cr_assert_ok(rank_run(&o, rank_main, j));
}

static const ar_gradients_verify_options everything = {.gradients = true, .values = true};

/* --- gradients ---------------------------------------------------------------------------------------------------- */

Test(gradients, synchronised_gradients_have_no_finding_on_any_mesh)
{
    static const int meshes[][2] = {{1, 1}, {2, 1}, {1, 2}, {4, 1}, {1, 3}, {2, 2}, {4, 2}};
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
        job j = {.tp = meshes[i][0], .dp = meshes[i][1], .ask = everything, .after = update, .param = SHARDED};
        run(&j, AR_NUMERICS_EXACT);
        for (int r = 0; r < j.tp * j.dp; r++) {
            cr_expect_eq(j.status[r], AR_OK, "%s", j.text[r]);
            cr_expect(j.verdict[r].ok && j.verdict[r].findings == 0, "tp=%d dp=%d rank %d: %s", j.tp, j.dp, r,
                      j.text[r]);
        }
    }
}

typedef struct found_case {
    const char *what, *text; /* nothing but warnings: the verdict is right */
    job j;
} found_case;

/* On 2 x 2 ranks, in either arithmetic. */
static void expect_found(const found_case *c)
{
    for (int numerics = AR_NUMERICS_EXACT; numerics <= AR_NUMERICS_NATIVE; numerics++) {
        job one = c->j;
        one.tp = one.dp = 2;
        run(&one, (ar_numerics)numerics);
        for (int r = 0; r < 4; r++) {
            cr_expect_eq(one.status[r], AR_OK, "%s, rank %d: %s", c->what, r, one.text[r]);
            cr_expect_str_eq(one.text[r], c->text, "%s, rank %d: '%s' in place of '%s'", c->what, r, one.text[r],
                             c->text);
            cr_expect_eq(one.verdict[r].ok, !c->text[0] || strncmp(c->text, "warning: ", 9) == 0, "%s, rank %d",
                         c->what, r);
            cr_expect_eq(one.verdict[r].findings, one.verdict[r].errors + one.verdict[r].warnings, "%s", c->what);
        }
    }
}

#define EVERYTHING .ask = {.gradients = true, .values = true}
#define MAY_BE_UNUSED .ask = {.gradients = true, .values = true, .allow_unused = true}
#define GRADIENTS .ask = {.gradients = true}
static const found_case found_cases[] = {
    /* missing, not finite, zero */
    ROW("a gradient that one rank lacks", "replicated: no gradient on rank 3",
        {EVERYTHING, .before = forget, .param = REPLICATED, .ranks = 8, .unsynced = true}),
    ROW("one that all ranks lack", "partial: no gradient on ranks 0-3",
        {EVERYTHING, .before = forget, .param = PARTIAL, .ranks = 15, .unsynced = true}),
    ROW("one that all ranks lack, and may", "warning: partial: no gradient on ranks 0-3",
        {MAY_BE_UNUSED, .before = forget, .param = PARTIAL, .ranks = 15, .unsynced = true}),
    ROW("one that may be unused and one rank used: the others must have got it", "partial: no gradient on ranks 0-2",
        {MAY_BE_UNUSED, .before = forget, .param = PARTIAL, .ranks = 7, .unsynced = true}),
    ROW("not finite on one rank",
        "sharded: 1 element of the gradient not finite on rank 2, the first nan\n"
        "sharded: the gradient of rank 2 differs from that of rank 0",
        {GRADIENTS, .after = add_element, .param = SHARDED, .element = NAN, .ranks = 4}),
    ROW("a NaN that reaches all copies through the sum",
        "replicated: 4 elements of the gradient not finite on ranks 0-3, the first nan",
        {EVERYTHING, .before = add_element, .param = REPLICATED, .element = NAN, .ranks = 3}),
    ROW("zero everywhere", "warning: sharded: the gradient is zero everywhere",
        {EVERYTHING, .before = add_zeros, .param = SHARDED, .ranks = 15}),
    ROW("zero on tensor-parallel rank 0 of both groups", "",
        {EVERYTHING, .before = add_zeros, .param = SHARDED, .ranks = 5}),
    /* frozen */
    ROW("frozen everywhere, whatever is there", "",
        {EVERYTHING, .before = freeze, .after = add_element, .param = REPLICATED, .element = NAN, .ranks = 15}),
    ROW("frozen on some ranks only", "partial: requires no gradient on ranks 1-2, but elsewhere",
        {EVERYTHING, .after = freeze, .param = PARTIAL, .ranks = 6}),
    /* copies: those that differ from most; where none has most, from the lowest rank's */
    ROW("the first of four copies", "replicated: the gradient of rank 0 differs from that of rank 1",
        {GRADIENTS, .after = add_element, .param = REPLICATED, .element = 0.5f, .ranks = 1}),
    ROW("the third of four copies", "replicated: the gradient of rank 2 differs from that of rank 0",
        {GRADIENTS, .after = add_element, .param = REPLICATED, .element = 0.5f, .ranks = 4}),
    ROW("two of four copies", "replicated: the gradient of ranks 2-3 differs from that of rank 0",
        {GRADIENTS, .after = add_element, .param = REPLICATED, .element = 0.5f, .ranks = 12}),
    ROW("one of two copies of a half", "sharded: the gradient of rank 2 differs from that of rank 0",
        {GRADIENTS, .after = add_element, .param = SHARDED, .element = 0.5f, .ranks = 1}),
    ROW("a value", "uneven: the copy of rank 3 differs from that of rank 1",
        {EVERYTHING, .after = set_value, .param = UNEVEN, .element = 3.0f, .ranks = 8}),
    ROW("a value that nobody asks for", "",
        {GRADIENTS, .after = set_value, .param = UNEVEN, .element = 3.0f, .ranks = 8}),
    ROW("the optimizer's state",
        "replicated: exp_avg of rank 1 differs from that of rank 0\n"
        "replicated: exp_avg_sq of rank 1 differs from that of rank 0",
        {.after = update, .param = REPLICATED, .ranks = 2}),
    ROW("an optimizer that is a step ahead", "the optimizer of rank 2 is at step 2, not where that of rank 0 is",
        {.ask = {.values = true}, .after = step_ahead, .param = REPLICATED, .ranks = 4}),
};

Test(gradients, what_is_wrong_is_found_with_its_ranks)
{
    for (size_t i = 0; i < sizeof found_cases / sizeof *found_cases; i++)
        expect_found(&found_cases[i]);
}

Test(gradients, ranks_without_elements_need_no_gradient)
{
    job j = {.tp = 4, .dp = 1, .ask = everything}; /* 5 rows: 2, 2, 1 and none */
    run(&j, AR_NUMERICS_EXACT);
    cr_expect(j.verdict[3].ok, "%s", j.text[3]);
}

/* --- lists, verdicts ---------------------------------------------------------------------------------------------- */

static ar_status other_list(ar_ctx *ctx, job *j, ar_param *p, bool mine)
{
    (void)ctx;
    if (mine)
        snprintf(p[j->param].name, sizeof p->name, "another");
    return AR_OK;
}

Test(gradients, lists_that_differ_are_an_error_on_every_rank)
{
    job j = {.tp = 2, .dp = 2, .ask = everything, .after = other_list, .param = PARTIAL, .ranks = 8};
    run(&j, AR_NUMERICS_EXACT);
    for (int r = 0; r < 4; r++) {
        cr_expect_eq(j.status[r], AR_ERR_MISMATCH, "rank %d", r);
        cr_expect(strstr(j.text[r], "parameter 2 of 4 is another one on rank 3 than on rank 0"), "%s", j.text[r]);
    }
}

static ar_status look(ar_ctx *ctx, void *user)
{
    SCOPED(rank_params_end) rank_params p;
    ar_param *const twice[2] = {&p.at[0], &p.at[0]};
    ar_param *trainable[PARAMS] = {NULL};
    (void)user;
    OWNED(ar_gradients_destroy) ar_gradients *g = NULL;
    OWNED(ar_gradients_destroy) ar_gradients *none = NULL;
    ar_verdict v = {0};
    rank_params_begin(&p);
    AR_TRY(make(ctx, p.at));
    p.at[REPLICATED].requires_grad = false;
    AR_TRY(ar_gradients_create(&g, ctx, p.all, PARAMS));
    if (ari_gradients_trainable(g, trainable, PARAMS) != 3 || trainable[1] != &p.at[PARTIAL])
        return ar_error_set(AR_ERR_INTERNAL, "the list of trainable parameters");
    AR_TRY(ar_gradients_create(&none, ctx, NULL, 0));
    AR_TRY(ar_gradients_sync(none, NULL));
    AR_TRY(ar_gradients_verify(none, &v, &everything));
    AR_TRY(ar_verdict_status(&v));
    ar_gradients_destroy(none);
    none = NULL;
    return ar_gradients_create(&none, ctx, twice, 2) == AR_ERR_ARG ? AR_OK
                                                                   : ar_error_set(AR_ERR_INTERNAL, "a parameter twice");
}

Test(gradients, frozen_parameters_and_empty_lists_are_fine)
{
    const ar_run alone = {.parallel.tp = 1}, both = {.parallel.tp = 2};
    cr_assert_ok(rank_run(&alone, look, NULL));
    cr_assert_ok(rank_run(&both, look, NULL));
}

Test(gradients, a_verdict_becomes_a_status_that_names_the_first_error)
{
    const ar_finding found[] = {
        {.kind = AR_FOUND_ZERO, .warning = true, .param = "a"},
        {.kind = AR_FOUND_MISSING, .param = "b", .ranks = 3, .rank = {1, 2, 5}},
        {.kind = AR_FOUND_STATE, .param = "c", .state = "exp_avg", .ranks = 1, .rank = {4}, .against = 0},
    };
    ar_verdict v = {.errors = 2, .warnings = 1, .findings = 3, .finding = found};
    cr_expect_refused(ar_verdict_status(&v), AR_ERR_DATA, "b: no gradient on ranks 1-2, 5 (and 1 more)");
    v = (ar_verdict){.ok = true, .warnings = 1, .findings = 1, .finding = found};
    cr_expect_ok(ar_verdict_status(&v));
}
