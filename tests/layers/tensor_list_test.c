/* SPDX-License-Identifier: Apache-2.0 */
/* Every rank reports the tensors of the hand-written lists, in their order (gradients of parameters and the loss: in
 * any), and those of each layer. That the baseline has no others every check holds. */
#include "ref/core/tensor_private.h"
#include "ref/layers/batch_private.h"
#include "ref/models/model_private.h"
#include "support/match.h"
#include "tests/support/tensor_lists.h"

enum { B = 2, S = 6, MOST = 192 };

typedef struct family {
    const tensor_list *list;
    const char *blocks;
    size_t block_init, block_fwd, block_bwd, block_grad; /* of each layer */
} family;

static const family families[] = {
    {&tensor_lists[0], "model.layers", 9, 16, 16, 9},
    {&tensor_lists[1], "transformer.h", 12, 13, 13, 12},
    {&tensor_lists[2], "layers", 12, 13, 13, 12},
    {&tensor_lists[3], "model.layers", 17, 22, 22, 17},
};

enum { FAMILIES = sizeof families / sizeof *families };

typedef struct report {
    size_t count;
    char name[MOST][96];
    char bad[120]; /* the first tensor that is not finite, or all zero where the rank holds something */
} report;

static ar_status note(report *r, const char *name, char pass, const float *values, size_t n, ptrdiff_t stride)
{
    if (r->count == MOST)
        return ar_error_set(AR_ERR_INTERNAL, "more than %d tensors", (int)MOST);
    snprintf(r->name[r->count], sizeof r->name[0], "%.80s%s", name, ari_pass_suffix(pass));
    bool finite = true, zero = true;
    for (size_t i = 0; i < n; i++) {
        finite = finite && isfinite(values[(ptrdiff_t)i * stride]);
        zero = zero && values[(ptrdiff_t)i * stride] == 0.0f;
    }
    if ((!finite || (n > 0 && zero)) && !r->bad[0])
        snprintf(r->bad, sizeof r->bad, "%.90s is %s", r->name[r->count], finite ? "all zero" : "not finite");
    r->count++;
    return AR_OK;
}

static ar_status note_tap(void *user, const ar_tap_event *e)
{
    /* Contiguous tensors only: a view's values stand in the tensor it views. */
    const bool whole = ari_tensor_is_contiguous(e->local);
    return note(user, e->name, e->pass, whole ? e->local->data.ptr : NULL, whole ? ar_tensor_count(e->local) : 0, 1);
}

static ar_status step(ar_ctx *ctx, void *user)
{
    const match_case *c = user;
    OWNED(ar_model_destroy) ar_model *m = NULL;
    OWNED(ar_saved_destroy) ar_saved *saved = NULL;
    float loss = 0.0f;
    AR_TRY(ar_saved_create(&saved));
    AR_TRY(ar_model_create(&m, ctx, &c->config, NULL));
    AR_TRY(ar_model_fresh(m, ctx, 7));
    AR_TRY(ari_model_forward(m, ctx, saved, &c->batch));
    AR_TRY(ari_model_loss(m, ctx, &loss, ari_batch_targets(&c->batch)));
    AR_TRY(ari_model_backward(m, ctx, saved, &c->batch));
    return ar_module_reduce_grads(ar_model_module(m), ctx);
}

/* Complete once all micro-batches and ranks have added to it, wherever that is. */
static bool comes_later(const char *name)
{
    return strcmp(strrchr(name, ':'), ":grad") == 0 || strcmp(name, "loss:fwd") == 0;
}

static size_t times(const report *r, const char *name)
{
    size_t n = 0;
    for (size_t i = 0; i < r->count; i++)
        n += strcmp(r->name[i], name) == 0;
    return n;
}

/* Each of the list once and nothing else; all but what comes later in the list's order. */
static void expect_list(const report *r, const tensor_list *list)
{
    listed_tensor want = {.list = list};
    size_t n = 0, at = 0;
    for (; next_listed(&want); n++) {
        char expected[208];
        snprintf(expected, sizeof expected, "%s%s", want.name, ari_pass_suffix(want.pass));
        cr_assert_eq(times(r, expected), 1, "%s is reported %zu times", expected, times(r, expected));
        if (comes_later(expected))
            continue;
        while (at < r->count && comes_later(r->name[at]))
            at++;
        cr_assert(at < r->count, "the reports end before %s", expected);
        cr_assert_str_eq(r->name[at], expected, "%s is reported where %s belongs", r->name[at], expected);
        at++;
    }
    cr_assert(r->count == n && n == list->tensors, "%zu tensors are reported, expected %zu", r->count, n);
    cr_assert_str_eq(r->bad, "", "%s", r->bad);
}

static match_case small_case(const family *f, size_t layers)
{
    static const int64_t ids[B * S] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 5};
    match_case c = {.config = match_config(f->list->arch, layers), .batch = {B, S, ids}};
    c.config.experts = f->list->experts;
    return c;
}

Test(tensor_list, the_model_reports_what_is_listed_on_every_rank)
{
    for (size_t i = 0; i < FAMILIES; i++) {
        for (int layout = 0; layout < 3; layout++) {
            const int tp = layout > 0 ? 2 : 1;
            static report r[2];
            void *user[2] = {&r[0], &r[1]};
            match_case c = small_case(&families[i], 1);
            memset(r, 0, sizeof r);
            const ar_run o = {.parallel = {.tp = tp, .sp = layout == 2}};
            cr_assert_ok(rank_run_heard(&o, note_tap, user, step, &c));
            for (int k = 0; k < tp; k++)
                expect_list(&r[k], families[i].list);
        }
    }
}

static size_t count_in(const report *r, const char *block, const char *suffix)
{
    size_t n = 0;
    const size_t length = strlen(block);
    for (size_t i = 0; i < r->count; i++) {
        const char *name = r->name[i];
        const bool inside = strncmp(name, block, length) == 0 && (name[length] == '.' || name[length] == ':');
        n += inside && strcmp(strrchr(name, ':'), suffix) == 0;
    }
    return n;
}

Test(tensor_list, every_layer_reports_the_same_number_of_tensors)
{
    for (size_t i = 0; i < FAMILIES; i++) {
        static report r;
        void *user[1] = {&r};
        const family *f = &families[i];
        match_case c = small_case(f, 2);
        memset(&r, 0, sizeof r);
        const ar_run o = {.parallel.tp = 1};
        cr_assert_ok(rank_run_heard(&o, note_tap, user, step, &c));
        const size_t per_layer = f->block_init + f->block_fwd + f->block_bwd + f->block_grad;
        cr_assert_eq(r.count, f->list->tensors + per_layer);
        for (int layer = 0; layer < 2; layer++) {
            char block[40];
            snprintf(block, sizeof block, "%s.%d", f->blocks, layer);
            cr_assert_eq(count_in(&r, block, ":init"), f->block_init, "%s", block);
            cr_assert_eq(count_in(&r, block, ":fwd"), f->block_fwd, "%s", block);
            cr_assert_eq(count_in(&r, block, ":bwd"), f->block_bwd, "%s", block);
            cr_assert_eq(count_in(&r, block, ":grad"), f->block_grad, "%s", block);
        }
    }
}
