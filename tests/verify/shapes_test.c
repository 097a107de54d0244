/* SPDX-License-Identifier: Apache-2.0 */
/* A rank that holds another part of a tensor than a dry run of the layout has is found, also where every value is
 * right. */
#include "tests/verify/support.h"

#include "verify/check/check_run.h"

enum { BATCH = 3, SEQ = 8, RANKS = 4 };
static const int64_t ids[BATCH * SEQ] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4};

/* What the ranks of a layout have found, and the layout. */
typedef struct held {
    ar_config config;
    ar_batch batch;
    ari_reference ref;
    ari_cluster_options o;
    ari_comparator rank[RANKS];
} held;

static void held_init(held *h, const char *json, ar_parallel p)
{
    void *user[RANKS];
    ari_cluster_result result;
    *h = (held){.config = config_of(json), .batch = {.batch = BATCH, .seq = SEQ, .input_ids = ids}};
    h->ref = reference_of(&h->config, &h->batch);
    for (int r = 0; r < RANKS; r++) {
        cr_assert_ok(ari_comparator_init(&h->rank[r], &h->ref, NULL));
        user[r] = &h->rank[r];
    }
    h->o = cluster_of(&h->config, &h->batch, 1);
    h->o.run.parallel = p;
    h->o.tap = ari_comparator_tap;
    h->o.tap_user = user;
    cr_assert_ok(ari_cluster_run(&result, &h->o));
    free(result.loss);
}

static void held_fini(held *h)
{
    for (int r = 0; r < RANKS; r++)
        ari_comparator_fini(&h->rank[r]);
    ari_reference_fini(&h->ref);
}

static ar_check_run compared(const held *h)
{
    ar_check_run run = {.parallel = h->o.run.parallel};
    const ar_rank_memory counted[RANKS] = {0};
    cr_assert_ok(ari_check_memory(&run, h->rank, &h->o, counted));
    return run;
}

/* In the third a rank has no sample. */
static const ar_parallel layouts[] = {{.tp = 4},
                                      {.tp = 2, .dp = 2, .sp = true},
                                      {.tp = 1, .dp = 4},
                                      {.tp = 2, .dp = 2, .micro_batches = 2},
                                      {.tp = 4, .sp = true, .micro_batches = 3}};

/* Of all tensors that a rank reports, in every pass. */
Test(shapes, of_all_tensors_that_ranks_report_are_the_layouts)
{
    static const char *const models[] = {LLAMA(31, 32, 36, 2, 8, 4, 4, false), GPT2(31, 24, 36, 2, 8),
                                         STACK(31, 24, 36, 2, 8, 4)};
    for (size_t m = 0; m < sizeof models / sizeof *models; m++) {
        for (size_t k = 0; k < sizeof layouts / sizeof *layouts; k++) {
            SCOPED(held_fini) held h;
            size_t reported = 0;
            held_init(&h, models[m], layouts[k]);
            for (size_t i = 0; i < RANKS * h.ref.count; i++)
                reported += h.rank[i % RANKS].finding[i / RANKS].is_reported;
            const ar_check_run run = compared(&h);
            cr_expect_eq(run.shapes, reported, "model %zu, layout %zu", m, k);
            cr_expect_gt(reported, RANKS * h.ref.count / 2);
            cr_expect_str_eq(run.shape_difference, "");
        }
    }
}

Test(shapes, of_another_layout_are_a_difference)
{
    SCOPED(held_fini) held h;
    held_init(&h, LLAMA(31, 32, 36, 2, 8, 4, 4, false), (ar_parallel){.tp = 4, .dp = 1});
    h.o.run.parallel.sp = true;
    cr_expect_str_eq(compared(&h).shape_difference,
                     "rank 0 holds [3, 8, 32] of model.embed_tokens:fwd, the layout has [3, 2, 32] there");
    h.o.run.parallel = (ar_parallel){.tp = 2, .dp = 2};
    cr_expect(strstr(compared(&h).shape_difference, "rank 0 holds ["));
}

Test(shapes, of_one_rank_are_a_difference)
{
    SCOPED(held_fini) held h;
    held_init(&h, STACK(31, 24, 36, 2, 8, 4), (ar_parallel){.tp = 4});
    const size_t i = ari_reference_find(&h.ref, "layers.1.attn.wq.weight", 'i');
    cr_assert(i < h.ref.count);
    h.rank[2].finding[i].shape[0]++;
    cr_expect_str_eq(compared(&h).shape_difference,
                     "rank 2 holds [7, 24] of layers.1.attn.wq.weight:init, the layout has [6, 24] there");
    h.rank[2].finding[i].is_reported = false;
    cr_expect_str_eq(compared(&h).shape_difference,
                     "rank 2 holds [] of layers.1.attn.wq.weight:init, the layout has [6, 24] there");
}

/* Of the last step's, and none where they differ. */
Test(shapes, outputs_have_a_hash)
{
    static const ar_parallel p = {.tp = 2};
    char first[65] = "";
    OWNED(end_folder) char *folder = new_model(LLAMA(31, 32, 36, 2, 8, 4, 4, false));
    for (int faulty = 0; faulty < 2; faulty++) {
        ar_check_options o = check_layouts(folder, &p, 1, 2, 4);
        o.run.steps = 2;
        o.run.fault = faulty ? "column_dx_not_reduced" : NULL;
        o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
        OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
        cr_expect_eq(strlen(r->outputs_hash), 64);
        cr_expect_str_eq(r->run[0].outputs_hash, faulty ? "" : r->outputs_hash);
        cr_expect(!faulty || strcmp(r->outputs_hash, first) == 0);
        memcpy(first, r->outputs_hash, sizeof first);
    }
}
