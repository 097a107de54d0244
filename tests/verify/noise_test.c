/* SPDX-License-Identifier: Apache-2.0 */
/* Mere noise, of any size, on any tensor, has no cause but rounding. */
#include "ref/core/tensor_private.h"
#include "tests/support/test.h"
#include "verify/diagnose/diagnose.h"

enum { ROWS = 5000, MOST = 2048 };

static uint64_t state = 12345;

static double uniform(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 11) * 0x1p-53;
}

static double normal(void)
{
    return sqrt(-2.0 * log(uniform() + 0x1p-54)) * cos(6.283185307179586 * uniform());
}

static bool is_no_cause(const char *cause)
{
    static const char *const none[] = {"unknown", "rounding", "low_precision"};
    for (size_t i = 0; i < 3; i++) {
        if (strcmp(cause, none[i]) == 0)
            return true;
    }
    return false;
}

Test(noise, has_no_cause)
{
    static const char *const names[] = {"model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj",
                                        "model.layers.0.input_layernorm", "model.embed_tokens", "lm_head"};
    static const double sizes[] = {1e-7, 1e-6, 1e-5, 1e-3, 1e-2};
    static float reference[MOST], copy[MOST];
    size_t named = 0;
    for (size_t row = 0; row < ROWS; row++) {
        const int ndim = 1 + (int)(uniform() * 3.0);
        size_t shape[AR_MAX_DIMS] = {0}, count = 1;
        for (int d = 0; d < ndim; d++) {
            shape[d] = 4 + (size_t)(uniform() * (ndim == 1 ? 60.0 : 8.0));
            count *= shape[d];
        }
        const double size = sizes[row % 5];
        for (size_t i = 0; i < count; i++) {
            reference[i] = (float)normal();
            copy[i] = (float)((double)reference[i] + size * normal());
        }
        ar_layout layout;
        cr_assert_ok(ari_layout_replicate(&layout, ndim, shape, 0, 1));
        ari_rank_copy own = {.local = copy, .ndim = ndim, .layout = &layout};
        memcpy(own.shape, shape, sizeof shape);
        const ari_difference d = {.name = names[row / 5 % 5],
                                  .pass = "fbgnm"[row / 25 % 5],
                                  .ndim = ndim,
                                  .shape = shape,
                                  .reference = reference,
                                  .ranks = 1,
                                  .copy = &own,
                                  .step = 1,
                                  .batch = 4,
                                  .seq = 8};
        ari_diagnosis found;
        cr_assert_ok(ari_diagnose(&found, &d));
        if (!is_no_cause(found.evidence.cause) && named++ < 20)
            cr_log_warn("row %zu, size %g, %s:%c: %s: %s", row, size, d.name, d.pass, found.evidence.cause, found.hint);
    }
    cr_expect_eq(named, 0, "%zu rows have a cause", named);
}
