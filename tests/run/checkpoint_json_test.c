/* SPDX-License-Identifier: Apache-2.0 */
#include "support/row.h"
#include "tests/support/temporary.h"
#include "tests/support/test.h"
#include "verify/run/checkpoint.h"

static const char hash[] = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
static const char other_hash[] = "fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210";

/* No two numbers are the same, and none is a default. */
static ar_checkpoint_state unusual(void)
{
    static const float loss[] = {3.25f, 0x1.fffffep-3f, 1e-45f};
    ar_checkpoint_state s =
        ROW(.model = "of \"mine\"", .step = 12, .optimizer_steps = 11, .steps = UINT64_C(1) << 40, .seed = UINT64_MAX,
            .optimizer =
                ROW(.kind = AR_OPTIMIZER_ADAM, .lr = 0.1, .momentum = 0.2, .nesterov = true, .beta1 = 0.3, .beta2 = 0.4,
                    .eps = 1.2345e-30, .weight_decay = 0.6, .schedule = AR_SCHEDULE_COSINE, .warmup_steps = 7,
                    .total_steps = 8, .min_lr = 0.09, .decay = AR_DECAY_MATRICES, .groups = 2),
            .clip = 1.1, .dropout = 0.12, .loss_options = {.label_smoothing = 0.13, .z_loss = 1e-4},
            .numerics = AR_NUMERICS_NATIVE, .precision = AR_PRECISION_TF32, .storage = AR_BF16, .loss_scale = 65536,
            .loss_scale_steps = 13, .loss_scale_static = true, .batch = 14, .seq = 15, .in_order = true,
            .packing = {.enabled = true, .separator = 18}, .data_hash = hash, .data_path = "a \"path\"/\xc3\xbc",
            .data_format = AR_DATA_U16, .data_tokens = 16, .loss = loss, .losses = 3);
    s.optimizer.group[0] = (ar_param_group){.glob = "*.bias", .lr_scale = 17, .weight_decay = 18};
    s.optimizer.group[1] = (ar_param_group){.glob = "*", .lr_scale = 0, .weight_decay = (double)NAN};
    return s;
}

/* r: where it stays, for parts of it point to others. */
static ar_status through_file(ari_checkpoint_read *r, const ar_checkpoint_state *s)
{
    SCOPED(temp_end) const temp_path file = temp_file("");
    ari_checkpoint_hashes h = {.optimizer = ""};
    memcpy(h.config, hash, sizeof hash);
    memcpy(h.weights, other_hash, sizeof other_hash);
    cr_assert_ok(ari_checkpoint_write_json(file.path, s, &h));
    return ari_checkpoint_read_json(r, file.path);
}

Test(checkpoint_json, everything_that_is_written_is_read)
{
    const ar_checkpoint_state want = unusual();
    SCOPED(ari_checkpoint_read_fini) ari_checkpoint_read r;
    cr_assert_ok(through_file(&r, &want));
    const ar_checkpoint_state *s = &r.state;
    const ar_optimizer_options *a = &want.optimizer, *b = &s->optimizer;
    cr_assert_str_eq(s->model, "of \"mine\"");
    cr_assert(s->step == 12 && s->optimizer_steps == 11 && s->steps == UINT64_C(1) << 40 && s->seed == UINT64_MAX);
    cr_assert(a->kind == b->kind && a->lr == b->lr && a->momentum == b->momentum && a->nesterov == b->nesterov);
    cr_assert(a->beta1 == b->beta1 && a->beta2 == b->beta2 && a->eps == b->eps && a->weight_decay == b->weight_decay);
    cr_assert(a->schedule == b->schedule && b->warmup_steps == 7 && b->total_steps == 8 && a->min_lr == b->min_lr);
    cr_assert(b->decay == AR_DECAY_MATRICES && b->groups == 2);
    cr_assert_str_eq(b->group[0].glob, "*.bias");
    cr_assert(b->group[0].lr_scale == 17 && b->group[0].weight_decay == 18);
    cr_assert_str_eq(b->group[1].glob, "*");
    cr_assert(b->group[1].lr_scale == 0 && isnan(b->group[1].weight_decay));
    cr_assert(s->clip == want.clip && s->dropout == want.dropout);
    cr_assert(s->loss_options.label_smoothing == 0.13 && s->loss_options.z_loss == 1e-4);
    cr_assert(s->numerics == AR_NUMERICS_NATIVE && s->precision == AR_PRECISION_TF32 && s->storage == AR_BF16);
    cr_assert(s->loss_scale == 65536 && s->loss_scale_steps == 13 && s->loss_scale_static);
    cr_assert(s->batch == 14 && s->seq == 15 && s->in_order && s->packing.enabled && s->packing.separator == 18);
    cr_assert_str_eq(s->data_hash, hash);
    cr_assert_str_eq(s->data_path, want.data_path);
    cr_assert(s->data_format == AR_DATA_U16 && s->data_tokens == 16);
    cr_assert_eq(s->losses, 3);
    cr_assert_eq(memcmp(s->loss, want.loss, 3 * sizeof *s->loss), 0);
    cr_assert_str_eq(r.hashes.config, hash);
    cr_assert_str_eq(r.hashes.weights, other_hash);
    cr_assert_str_eq(r.hashes.optimizer, "");
}

Test(checkpoint_json, a_loss_that_makes_no_sense_is_an_error_of_the_file)
{
    static const ar_loss_options wrong[] = {{.label_smoothing = 1.0},
                                            {.label_smoothing = -0.5},
                                            {.label_smoothing = (double)NAN},
                                            {.z_loss = -1e-9},
                                            {.z_loss = (double)INFINITY},
                                            {.z_loss = (double)NAN},
                                            {.router = {AR_BALANCE_BATCH, -1.0, 0.0}},
                                            {.router = {AR_BALANCE_BATCH, (double)INFINITY, 0.0}},
                                            {.router.z_loss = -0.1},
                                            {.router.z_loss = (double)NAN}};
    ar_checkpoint_state s = unusual();
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        SCOPED(ari_checkpoint_read_fini) ari_checkpoint_read r;
        s.loss_options = wrong[i];
        cr_expect_refused(through_file(&r, &s), AR_ERR_FORMAT, "key 'loss': cross-entropy: a ");
    }
}

Test(checkpoint_json, losses_that_json_has_no_number_for_are_kept)
{
    const float loss[] = {INFINITY, -INFINITY, NAN};
    ar_checkpoint_state s = unusual();
    s.loss = loss;
    SCOPED(ari_checkpoint_read_fini) ari_checkpoint_read r;
    cr_assert_ok(through_file(&r, &s));
    cr_assert(r.state.loss[0] == INFINITY && r.state.loss[1] == -INFINITY && isnan(r.state.loss[2]));
}

Test(checkpoint_json, a_path_that_is_no_text_does_not_make_the_file_unreadable)
{
    ar_checkpoint_state s = unusual();
    s.data_path = "data\xff.bin";
    ari_checkpoint_read r;
    cr_assert_ok(through_file(&r, &s));
    cr_assert_str_eq(r.state.data_path, "data?.bin");
    ari_checkpoint_read_fini(&r);
    s.data_hash = NULL;
    cr_assert_ok(through_file(&r, &s));
    cr_assert(r.state.data_hash == NULL && r.state.data_path == NULL);
    ari_checkpoint_read_fini(&r);
}

Test(checkpoint_json, of_more_losses_than_fit_the_last_stay)
{
    const size_t n = AR_CHECKPOINT_LOSSES + 5;
    OWNED(free) float *loss = calloc(n, sizeof *loss);
    cr_assert_not_null(loss);
    loss[4] = 4;
    loss[5] = 5;
    loss[n - 1] = 1;
    ar_checkpoint_state s = unusual();
    s.step = n;
    s.loss = loss;
    s.losses = n;
    SCOPED(ari_checkpoint_read_fini) ari_checkpoint_read r;
    cr_assert_ok(through_file(&r, &s));
    cr_assert_eq(r.state.losses, AR_CHECKPOINT_LOSSES);
    cr_assert(r.state.loss[0] == 5 && r.state.loss[AR_CHECKPOINT_LOSSES - 1] == 1);
}

Test(checkpoint_json, another_version_or_another_file_is_told)
{
    static const struct {
        const char *text, *says;
    } cases[] = {{"{\"format\":\"anyrank checkpoint\",\"version\":2}", "has version 2, this program reads version 1"},
                 {"{\"format\":\"pt\"}", "key 'format' is 'pt', expected 'anyrank checkpoint'"},
                 {"{\"version\":1}", "key 'format' is missing"},
                 {"[1]", "expected a JSON object"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        SCOPED(temp_end) const temp_path file = temp_bytes("", cases[i].text, strlen(cases[i].text));
        SCOPED(ari_checkpoint_read_fini) ari_checkpoint_read r;
        cr_expect_refused(ari_checkpoint_read_json(&r, file.path), AR_ERR_FORMAT, cases[i].says);
    }
}
