/* SPDX-License-Identifier: Apache-2.0 */
/* Where a module's taps say that their values stand: by the batch that it is given. Where models' do is held by every
 * comparison with the baseline. */
#include "anyrank/layers.h"
#include "ref/context/context_private.h"
#include "support/rank_run.h"
#include "tests/support/test.h"

enum { MOST = 8 };

/* The last layout under each name. */
typedef struct heard {
    size_t count;
    struct {
        char name[40];
        ar_layout layout;
    } tap[MOST];
} heard;

static ar_status hear(void *user, const ar_tap_event *e)
{
    heard *h = user;
    if (h->count == MOST)
        return AR_ERR_INTERNAL;
    snprintf(h->tap[h->count].name, sizeof h->tap[0].name, "%s:%c", e->name, e->pass);
    h->tap[h->count++].layout = *e->layout;
    return AR_OK;
}

static void expect_box(const heard *h, const char *name, const ar_layout *expected)
{
    for (size_t i = 0; i < h->count; i++) {
        const ar_layout *o = &h->tap[i].layout;
        if (strcmp(h->tap[i].name, name) != 0)
            continue;
        cr_assert_eq(o->ndim, expected->ndim);
        cr_assert_eq(o->nbox, expected->nbox, "%s has %zu boxes", name, o->nbox);
        for (int k = 0; k < o->ndim * (int)o->nbox; k++) {
            const int d = k % o->ndim;
            const ar_box *box = &o->box[k / o->ndim], *wanted = &expected->box[k / o->ndim];
            cr_assert_eq(o->shape[d], expected->shape[d], "%s is %zu long along %d", name, o->shape[d], d);
            cr_assert_eq(box->global[d], wanted->global[d], "%s begins at %zu along %d", name, box->global[d], d);
            cr_assert_eq(box->local[d], wanted->local[d], "%s lies at %zu along %d", name, box->local[d], d);
            cr_assert_eq(box->extent[d], wanted->extent[d], "%s extends %zu along %d", name, box->extent[d], d);
        }
        cr_assert_eq(o->replica, expected->replica, "%s is copy %d", name, o->replica);
        cr_assert_eq(o->replicas, expected->replicas);
        return;
    }
    cr_assert_fail("no tap %s", name);
}

/* Rows 3 and 4 of five, 4 positions, 6 features. */
static const ar_batch rows = {.batch = 2, .seq = 4, .global_batch = 5, .first_sample = 3};

static ar_status norm_step(ar_ctx *ctx, void *user)
{
    static const float zeros[2 * 2 * 6];
    const size_t own[3] = {2, 2, 6};
    (void)user;
    OWNED(ar_module_destroy) ar_module *norm = NULL;
    OWNED(ar_saved_destroy) ar_saved *saved = NULL;
    ar_tensor x, y, dx;
    AR_TRY(ar_norm_create(&norm, ctx, "n", AR_NORM_LAYER, 6, 1e-5));
    AR_TRY(ar_saved_create(&saved));
    AR_TRY(ar_module_fresh(norm, ctx, 1));
    AR_TRY(rank_upload(ctx, &x, 3, own, zeros));
    AR_TRY(ar_module_forward(norm, ctx, saved, &y, &x, &rows));
    ari_ctx_place_batch(ctx, NULL);
    AR_TRY(ar_module_backward(norm, ctx, saved, &dx, &x, &rows));
    return ar_module_reduce_grads(norm, ctx);
}

Test(tap_place, a_module_places_what_it_taps_by_the_batch_it_is_given)
{
    heard h[2] = {{0}, {0}};
    void *user[2] = {&h[0], &h[1]};
    const ar_run o = {.parallel = {.tp = 2, .sp = true}};
    cr_assert_ok(rank_run_heard(&o, hear, user, norm_step, NULL));
    for (size_t r = 0; r < 2; r++) {
        const ar_layout own = {3, {5, 4, 6}, 1, {{.global = {3, 2 * r, 0}, .extent = {2, 2, 6}}}, 0, 1};
        expect_box(&h[r], "n:f", &own);
        expect_box(&h[r], "n:b", &own);
        expect_box(&h[r], "n.weight:g", &(ar_layout){1, {6}, 1, {{.global = {0}, .extent = {6}}}, (int)r, 2});
    }
}
