/* SPDX-License-Identifier: Apache-2.0 */
/* Where parameters lie, told without a model, against the parameters of models that are made. */
#include <dirent.h>

#include "ref/models/placement.h"
#include "ref/models/stages.h"
#include "support/rank_run.h"
#include "tests/support/test.h"

typedef struct search {
    const ar_config *config;
    const char *name;
    bool embedding_hidden, found;
    ari_placing placing;
} search;

static ar_status find_name(void *user, const char *name, int ndim, const size_t *shape)
{
    search *s = user;
    if (strcmp(name, s->name) == 0)
        ari_placing_of(&s->placing, s->config, name, ndim, shape, s->embedding_hidden);
    s->found = s->found || strcmp(name, s->name) == 0;
    return AR_OK;
}

static search search_for(const ar_config *c, const char *name, bool embedding_hidden)
{
    search s = {.config = c, .name = name, .embedding_hidden = embedding_hidden};
    cr_assert_ok(ari_param_list(c, find_name, &s));
    cr_assert(s.found, "%s has no '%s'", c->name, name);
    return s;
}

/* The layout that is told of a parameter by its name. */
static ar_status placement_of(ar_layout *o, const ar_config *c, const char *name, int tp, int rank, bool hidden)
{
    const search s = search_for(c, name, hidden);
    return ari_placing_layout(o, &s.placing, name, tp, rank);
}

static bool same_layout(const ar_layout *a, const ar_layout *b)
{
    bool same = a->ndim == b->ndim && a->nbox == b->nbox && a->replica == b->replica && a->replicas == b->replicas &&
                memcmp(a->shape, b->shape, sizeof a->shape) == 0;
    for (size_t k = 0; same && k < a->nbox; k++)
        same = memcmp(&a->box[k], &b->box[k], sizeof a->box[k]) == 0;
    return same;
}

static ar_status compare_params(ar_ctx *ctx, const ar_config *c, ar_param *const *params, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        ar_layout told;
        AR_TRY(placement_of(&told, c, params[i]->name, (int)ranks_of(ctx), (int)rank_of(ctx), false));
        if (!same_layout(&told, &params[i]->layout))
            return ar_error_set(AR_ERR_DATA, "%s at tp=%zu: rank %zu is told another layout", params[i]->name,
                                ranks_of(ctx), rank_of(ctx));
    }
    return AR_OK;
}

static ar_status on_rank(ar_ctx *ctx, void *user)
{
    const ar_config *c = user;
    ar_param *params[512];
    OWNED(ar_model_destroy) ar_model *m = NULL;
    AR_TRY(ar_model_create(&m, ctx, c, NULL));
    const size_t n = ar_module_params(ar_model_module(m), params, 512, false);
    return n <= 512 ? compare_params(ctx, c, params, n) : AR_ERR_ARG;
}

/* Returns how many layouts there are. */
static int compare_config(const ar_config *c, int most)
{
    const ar_plan plan = {0};
    int legal = 0;
    for (int tp = 1; tp <= most; tp++) {
        const ar_run o = {.parallel.tp = tp};
        if (ar_config_check_tp(c, tp, &plan) != AR_OK)
            continue;
        legal++;
        cr_expect_eq(rank_run(&o, on_rank, (void *)(uintptr_t)c), AR_OK, "%s, tp=%d: %s", c->name, tp,
                     ar_error_message());
    }
    return legal;
}

static int compare_folder(const char *root)
{
    int models = 0;
    DIR *d = opendir(root);
    cr_assert_not_null(d, "%s", root);
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        char path[1024];
        FILE *f;
        ar_config c;
        snprintf(path, sizeof path, "%s/%s/config.json", root, e->d_name);
        if (e->d_name[0] == '.' || (f = fopen(path, "r")) == NULL)
            continue;
        fclose(f);
        cr_assert_ok(ar_config_load(&c, path));
        if (c.hidden > 1024) /* of a large model only the shapes are bundled: its weights are no test's to make */
            continue;
        cr_expect_gt(compare_config(&c, 8), 1, "%s", path);
        models++;
    }
    closedir(d);
    return models;
}

Test(reshard_placement, bundled_models_lie_as_their_layers_have_them)
{
    cr_expect_geq(compare_folder(TEST_DATA_DIR), 3);
}

Test(reshard_placement, golden_models_lie_as_their_layers_have_them)
{
    cr_expect_geq(compare_folder(TEST_GOLDEN_DIR), 3);
}

/* 16 ranks: copies of KV heads, a vocabulary that does not divide and one of fewer ids than ranks, layers of three
 * kinds. */
static const ar_config odd = {.arch = AR_ARCH_LLAMA,
                              .name = "odd",
                              .vocab = 257,
                              .hidden = 24,
                              .layers = 2,
                              .heads = 16,
                              .kv_heads = 2,
                              .head_dim = 6,
                              .ffn = 48,
                              .max_positions = 32,
                              .activation = AR_ACT_SILU,
                              .gated = true,
                              .norm = AR_NORM_RMS,
                              .norm_eps = 1e-6,
                              .rope = {.kind = AR_ROPE_DEFAULT, .theta = 10000.0},
                              .qkv_bias = true,
                              .final_norm = true,
                              .causal = true,
                              .initializer_range = 0.02};

Test(reshard_placement, more_ranks_than_kv_heads_and_an_uneven_vocabulary_lie_as_the_layers_have_them)
{
    ar_config c = odd;
    cr_expect_eq(compare_config(&c, 16), 5);
    c.vocab = 9;
    c.mlp_bias = c.out_bias = true;
    cr_expect_eq(compare_config(&c, 16), 5);
    c.tied = true;
    c.kv_heads = 1;
    cr_expect_eq(compare_config(&c, 8), 4);
}

Test(reshard_placement, the_embedding_can_be_split_along_the_hidden_dimension)
{
    ar_layout o;
    cr_assert_ok(placement_of(&o, &odd, "model.embed_tokens.weight", 4, 1, true));
    cr_expect_eq(o.nbox, 1u);
    cr_expect_eq(o.box[0].global[0], 0u);
    cr_expect_eq(o.box[0].extent[0], 257u);
    cr_expect_eq(o.box[0].global[1], 6u);
    cr_expect_eq(o.box[0].extent[1], 6u);
    cr_assert_ok(placement_of(&o, &odd, "lm_head.weight", 4, 1, true));
    cr_expect_eq(o.box[0].global[0], 65u);
    cr_expect_eq(o.box[0].extent[1], 24u);
    cr_expect_eq(placement_of(&o, &odd, "model.embed_tokens.weight", 7, 1, true), AR_ERR_INDIVISIBLE);
}

Test(reshard_placement, what_cannot_be_split_is_named)
{
    ar_layout o;
    cr_expect_refused(placement_of(&o, &odd, "model.layers.1.self_attn.k_proj.weight", 3, 0, false), AR_ERR_INDIVISIBLE,
                      "model.layers.1.self_attn.k_proj.weight: dimension 0 of 12 is 2 heads");
    /* 48 = 16 heads of 3 divides by 24 where the heads do not */
    ar_config c = odd;
    c.head_dim = 3;
    cr_expect_refused(placement_of(&o, &c, "model.layers.1.self_attn.o_proj.weight", 24, 0, false), AR_ERR_INDIVISIBLE,
                      "dimension 1 of 48 is 16 heads");
    cr_expect_refused(placement_of(&o, &odd, "model.layers.0.mlp.up_proj.weight", 5, 0, false), AR_ERR_INDIVISIBLE,
                      "model.layers.0.mlp.up_proj.weight: dimension 0 of 48 cannot be split over tp=5");
    cr_expect_eq(placement_of(&o, &odd, "model.norm.weight", 2, 2, false), AR_ERR_ARG);
}

static void expect_ranks(const ar_config *c, const char *name, const ar_parallel *p, const char *held)
{
    for (int r = 0; r < p->pp; r++) {
        const search s = search_for(c, name, false);
        cr_assert_ok(ari_stages_check(p, c));
        const bool here = ari_placing_staged(&s.placing, p, c->layers, r);
        cr_expect_eq(here, held[r] == '1', "%s, rank %d of %d", name, r, p->pp);
    }
}

Test(reshard_placement, stages_take_layers_as_a_model_does)
{
    ar_config c = odd;
    const ar_parallel three = {.pp = 3}, one = {.pp = 1};
    c.layers = 8; /* 3, 3, 2: of two left over the first has one, and the second */
    expect_ranks(&c, "model.layers.2.mlp.up_proj.weight", &three, "100");
    expect_ranks(&c, "model.layers.3.mlp.up_proj.weight", &three, "010");
    expect_ranks(&c, "model.layers.5.self_attn.k_proj.bias", &three, "010");
    expect_ranks(&c, "model.layers.6.input_layernorm.weight", &three, "001");
    expect_ranks(&c, "model.embed_tokens.weight", &three, "100");
    expect_ranks(&c, "model.norm.weight", &three, "001");
    expect_ranks(&c, "lm_head.weight", &three, "001");
    c.tied = true;
    expect_ranks(&c, "model.embed_tokens.weight", &three, "101");
    expect_ranks(&c, "model.embed_tokens.weight", &one, "1");
    c.layers = 7; /* 2, 3, 2 */
    expect_ranks(&c, "model.layers.2.mlp.up_proj.weight", &three, "010");
    expect_ranks(&c, "model.layers.4.mlp.up_proj.weight", &three, "010");
}

Test(reshard_placement, stages_of_one_rank_and_layers_that_are_given)
{
    ar_config c = odd;
    c.layers = 8;
    const ar_parallel turns = {.pp = 2, .virtual_stages = 2, .schedule = AR_PP_INTERLEAVED}; /* 2, 2, 2, 2 */
    expect_ranks(&c, "model.layers.1.mlp.up_proj.weight", &turns, "10");
    expect_ranks(&c, "model.layers.2.mlp.up_proj.weight", &turns, "01");
    expect_ranks(&c, "model.layers.4.mlp.up_proj.weight", &turns, "10");
    expect_ranks(&c, "model.layers.7.mlp.up_proj.weight", &turns, "01");
    const ar_parallel given = {.pp = 3, .stages = {3, {0, 7, 1}}};
    expect_ranks(&c, "model.layers.0.mlp.up_proj.weight", &given, "010");
    expect_ranks(&c, "model.layers.6.mlp.up_proj.weight", &given, "010");
    expect_ranks(&c, "model.layers.7.mlp.up_proj.weight", &given, "001");
    expect_ranks(&c, "model.embed_tokens.weight", &given, "100");
}

Test(reshard_placement, stages_that_no_model_has)
{
    ar_config c = odd;
    c.layers = 8;
    cr_expect_refused(ari_stages_check(&(ar_parallel){.pp = 9}, &c), AR_ERR_INDIVISIBLE, "8 layers");
    const ar_parallel short_of = {.pp = 3, .stages = {3, {3, 2, 2}}};
    cr_expect_refused(ari_stages_check(&short_of, &c), AR_ERR_ARG, "are 7; the model has 8");
}
