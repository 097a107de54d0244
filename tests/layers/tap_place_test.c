/* SPDX-License-Identifier: Apache-2.0 */
/* Where a tap says that its value stands: samples at their place in the global batch, positions and features at
 * theirs. */
#include "anyrank/layers.h"
#include "ref/layers/parts.h"
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

static ar_status tap_all(ar_ctx *ctx, void *user)
{
    const size_t own[3] = {2, 2, 6}, all[3] = {2, 4, 6}, heads[4] = {2, 3, 4, 4}, matrix[2] = {2, 6};
    ar_tensor t;
    (void)user;
    ar_ctx_place(ctx, &rows);
    AR_TRY(ar_ctx_tensor(ctx, &t, AR_F32, 3, own));
    AR_TRY(ari_tap_tokens(ctx, "tokens", NULL, 'f', &t));
    AR_TRY(ar_ctx_tensor(ctx, &t, AR_F32, 3, all));
    AR_TRY(ari_tap_whole(ctx, "whole", NULL, 'b', &t));
    AR_TRY(ari_tap_copies(ctx, "features", NULL, 'f', &t, 2, 12, 1));
    AR_TRY(ar_ctx_tensor(ctx, &t, AR_F32, 4, heads));
    AR_TRY(ari_tap_copies(ctx, "heads", NULL, 'f', &t, 1, 6, 1));
    AR_TRY(ar_ctx_tensor(ctx, &t, AR_F32, 2, matrix));
    AR_TRY(ari_tap_whole(ctx, "matrix", NULL, 'f', &t));
    ar_ctx_place(ctx, NULL);
    AR_TRY(ar_ctx_tensor(ctx, &t, AR_F32, 3, all));
    return ari_tap_whole(ctx, "alone", NULL, 'f', &t);
}

Test(tap_place, samples_positions_and_features_stand_at_their_places)
{
    heard h[2] = {{0}, {0}};
    void *user[2] = {&h[0], &h[1]};
    const rank_run_options o = {.ranks = 2, .sp = true, .tap = hear, .tap_user = user};
    cr_assert_ok(rank_run(&o, tap_all, NULL));
    for (size_t r = 0; r < 2; r++) {
        const int copy = (int)r;
        expect_box(&h[r], "tokens:f",
                   &(ar_layout){3, {5, 4, 6}, 1, {{.global = {3, 2 * r, 0}, .extent = {2, 2, 6}}}, 0, 1});
        expect_box(&h[r], "whole:b",
                   &(ar_layout){3, {5, 4, 6}, 1, {{.global = {3, 0, 0}, .extent = {2, 4, 6}}}, copy, 2});
        expect_box(&h[r], "features:f",
                   &(ar_layout){3, {5, 4, 12}, 1, {{.global = {3, 0, 6 * r}, .extent = {2, 4, 6}}}, 0, 1});
        expect_box(&h[r], "heads:f",
                   &(ar_layout){4, {5, 6, 4, 4}, 1, {{.global = {3, 3 * r, 0, 0}, .extent = {2, 3, 4, 4}}}, 0, 1});
        expect_box(&h[r], "matrix:f", &(ar_layout){2, {5, 6}, 1, {{.global = {3, 0}, .extent = {2, 6}}}, copy, 2});
        expect_box(&h[r], "alone:f",
                   &(ar_layout){3, {2, 4, 6}, 1, {{.global = {0, 0, 0}, .extent = {2, 4, 6}}}, copy, 2});
    }
}

static const ar_batch eight = {.batch = 2, .seq = 8, .global_batch = 5, .first_sample = 3};

/* Of 8 positions a rank of two has 4, and with sequence parallelism over two half of them. */
static ar_status tap_context(ar_ctx *ctx, void *user)
{
    const size_t own[3] = {2, 2, 6}, all[3] = {2, 4, 6}, probs[4] = {2, 1, 4, 8};
    const ar_positions queries = ari_own_positions(ctx, 8, false);
    ar_tensor t;
    (void)user;
    ar_ctx_place(ctx, &eight);
    AR_TRY(ar_ctx_tensor(ctx, &t, AR_F32, 3, own));
    AR_TRY(ari_tap_tokens(ctx, "tokens", NULL, 'f', &t));
    AR_TRY(ar_ctx_tensor(ctx, &t, AR_F32, 3, all));
    AR_TRY(ari_tap_copies(ctx, "features", NULL, 'f', &t, 2, 12, 1));
    AR_TRY(ar_ctx_tensor(ctx, &t, AR_F32, 4, probs));
    return ari_tap_queries(ctx, "probs", NULL, 'f', &t, 2, rank_of(ctx), 1, &queries);
}

/* Rank c of the two has chunks c and 3-c of four. */
Test(tap_place, zigzag_positions_stand_at_their_places)
{
    heard h[4] = {{0}, {0}, {0}, {0}};
    void *user[4] = {&h[0], &h[1], &h[2], &h[3]};
    const rank_run_options o = {.ranks = 4, .cp = 2, .zigzag = true, .sp = true, .tap = hear, .tap_user = user};
    cr_assert_ok(rank_run(&o, tap_context, NULL));
    for (size_t rank = 0; rank < 4; rank++) {
        const size_t c = rank / 2, r = rank % 2, first = 2 * c, second = 2 * (3 - c);
        expect_box(&h[rank], "tokens:f",
                   &(ar_layout){3, {5, 8, 6}, 1, {{.global = {3, r ? second : first, 0}, .extent = {2, 2, 6}}}, 0, 1});
        expect_box(&h[rank], "features:f",
                   &(ar_layout){3,
                                {5, 8, 12},
                                2,
                                {{.global = {3, first, 6 * r}, .extent = {2, 2, 6}},
                                 {.global = {3, second, 6 * r}, .local = {0, 2, 0}, .extent = {2, 2, 6}}},
                                0,
                                1});
        expect_box(&h[rank], "probs:f",
                   &(ar_layout){4,
                                {5, 2, 8, 8},
                                2,
                                {{.global = {3, r, first, 0}, .extent = {2, 1, 2, 8}},
                                 {.global = {3, r, second, 0}, .local = {0, 0, 2, 0}, .extent = {2, 1, 2, 8}}},
                                0,
                                1});
    }
}

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
    ar_ctx_place(ctx, NULL);
    AR_TRY(ar_module_backward(norm, ctx, saved, &dx, &x, &rows));
    return ar_module_reduce_grads(norm, ctx);
}

Test(tap_place, a_module_places_what_it_taps_by_the_batch_it_is_given)
{
    heard h[2] = {{0}, {0}};
    void *user[2] = {&h[0], &h[1]};
    const rank_run_options o = {.ranks = 2, .sp = true, .tap = hear, .tap_user = user};
    cr_assert_ok(rank_run(&o, norm_step, NULL));
    for (size_t r = 0; r < 2; r++) {
        const ar_layout own = {3, {5, 4, 6}, 1, {{.global = {3, 2 * r, 0}, .extent = {2, 2, 6}}}, 0, 1};
        expect_box(&h[r], "n:f", &own);
        expect_box(&h[r], "n:b", &own);
        expect_box(&h[r], "n.weight:g", &(ar_layout){1, {6}, 1, {{.global = {0}, .extent = {6}}}, (int)r, 2});
    }
}
