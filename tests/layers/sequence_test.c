/* SPDX-License-Identifier: Apache-2.0 */
/* Layers one after the other: what a rank hands on is what the next layer takes, and the whole has the bits of plain
 * layers without ranks. The reference is built from the definitions; the ranks' taps are compared with it. */
#include "anyrank/layers.h"
#include "support/bits.h"
#include "support/match.h"
#include "tests/layers/plain_linear.h"
#include "tests/support/test.h"

enum { LAYERS = 3, SAMPLES = 2, EACH = 5, TOKENS = SAMPLES * EACH, WIDEST = 24 };
/* column (stays sharded) -> row (takes it so) -> column (gathered) */
static const size_t width[LAYERS + 1] = {24, 20, 12, 8};
static const char *const layer_name[LAYERS] = {"a", "b", "c"};

typedef struct sequence {
    plain_linear layer[LAYERS];
    float w[LAYERS][WIDEST * WIDEST], b[LAYERS][WIDEST];
    float x[TOKENS * WIDEST], dy[TOKENS * WIDEST];
} sequence;

static void emit(ari_reference *r, const char *name, const char *part, char pass, int ndim, const size_t *shape,
                 const float *values)
{
    char path[32];
    double wide[TOKENS * WIDEST + WIDEST * WIDEST];
    size_t n = 1;
    for (int d = 0; d < ndim; d++)
        n *= shape[d];
    for (size_t i = 0; i < n; i++)
        wide[i] = (double)values[i];
    snprintf(path, sizeof path, "%s%s", name, part);
    cr_assert_ok(ari_reference_emit(r, path, pass, ndim, shape, wide));
}

/* Forward, then backward: each layer is computed twice, the second time with the dY that came back. */
static void compute(sequence *s, ari_reference *r)
{
    static const float nothing[TOKENS * WIDEST];
    fill_values(s->x, TOKENS * width[0], 1, 1.0);
    fill_values(s->dy, TOKENS * width[LAYERS], 2, 1.0);
    for (int i = 0; i < LAYERS; i++) {
        plain_linear *l = &s->layer[i];
        fill_values(s->w[i], width[i] * width[i + 1], 10 + (unsigned)i, 0.5);
        fill_values(s->b[i], width[i + 1], 20 + (unsigned)i, 0.5);
        *l = (plain_linear){.n = {SAMPLES, EACH, width[i], width[i + 1]}, .w = s->w[i], .b = s->b[i], .dy = nothing};
        l->x = i ? s->layer[i - 1].y : s->x;
        plain_linear_exact(l);
        emit(r, layer_name[i], "", 'f', 3, (size_t[]){SAMPLES, EACH, width[i + 1]}, l->y);
    }
    for (int i = LAYERS - 1; i >= 0; i--) {
        plain_linear again = s->layer[i];
        again.dy = i + 1 < LAYERS ? s->layer[i + 1].dx : s->dy;
        plain_linear_exact(&again);
        free(again.y); /* as before */
        again.y = s->layer[i].y;
        free(s->layer[i].dx);
        free(s->layer[i].dw);
        free(s->layer[i].db);
        s->layer[i] = again;
        emit(r, layer_name[i], "", 'b', 3, (size_t[]){SAMPLES, EACH, width[i]}, again.dx);
        emit(r, layer_name[i], ".weight", 'g', 2, (size_t[]){width[i + 1], width[i]}, again.dw);
        emit(r, layer_name[i], ".bias", 'g', 1, &width[i + 1], again.db);
    }
    cr_assert_ok(ari_reference_finish(r));
}

static ar_status pass_through(ar_ctx *ctx, const sequence *s, ar_module *const *m, ar_saved *saved)
{
    const size_t x_shape[3] = {SAMPLES, EACH, width[0]}, dy_shape[3] = {SAMPLES, EACH, width[LAYERS]};
    ar_tensor x, y, dx, dy;
    for (int i = 0; i < LAYERS; i++) {
        ar_param *p[2];
        ar_module_params(m[i], p, 2, true);
        AR_TRY(ar_param_set(p[0], ctx, s->w[i]));
        AR_TRY(ar_param_set(p[1], ctx, s->b[i]));
    }
    AR_TRY(rank_upload(ctx, &x, 3, x_shape, s->x));
    AR_TRY(rank_upload(ctx, &dy, 3, dy_shape, s->dy));
    for (int i = 0; i < LAYERS; i++) {
        AR_TRY(ar_module_forward(m[i], ctx, saved, &y, &x, NULL));
        x = y;
    }
    for (int i = LAYERS - 1; i >= 0; i--) {
        AR_TRY(ar_module_backward(m[i], ctx, saved, &dx, &dy, NULL));
        AR_TRY(ar_module_reduce_grads(m[i], ctx));
        dy = dx;
    }
    return AR_OK;
}

static ar_status run_sequence(ar_ctx *ctx, void *user)
{
    const ar_linear_options o = {.bias = true, .input_is_sharded = true},
                            gathered = {.bias = true, .gather_output = true};
    ar_module *m[LAYERS] = {NULL};
    ar_saved *saved = NULL;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ar_saved_create(&saved));
    AR_TRY_TO(done, st, ar_column_linear_create(&m[0], ctx, layer_name[0], width[0], width[1], &o));
    AR_TRY_TO(done, st, ar_row_linear_create(&m[1], ctx, layer_name[1], width[1], width[2], &o));
    AR_TRY_TO(done, st, ar_column_linear_create(&m[2], ctx, layer_name[2], width[2], width[3], &gathered));
    AR_TRY_TO(done, st, pass_through(ctx, user, m, saved));
done:
    for (int i = 0; i < LAYERS; i++)
        ar_module_destroy(m[i]);
    ar_saved_destroy(saved);
    return st;
}

Test(sequence, column_row_column_has_the_bits_of_plain_layers)
{
    static sequence s;
    SCOPED(ari_reference_fini) ari_reference r = {0};
    compute(&s, &r);
    for (int ranks = 1; ranks <= 4; ranks *= 2) {
        const rank_run_options o = {.ranks = ranks};
        cr_assert_ok(match_taps(&r, &o, run_sequence, &s, NULL));
    }
    for (int i = 0; i < LAYERS; i++)
        plain_linear_fini(&s.layer[i]);
}
