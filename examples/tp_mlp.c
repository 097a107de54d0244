/* SPDX-License-Identifier: Apache-2.0 */
/* A tensor-parallel MLP, column-parallel -> GELU -> row-parallel: two simulated ranks compute the bits that one
 * computes. */
#include "anyrank/activation.h"
#include "anyrank/layers.h"
#include "anyrank/sim.h"
#include <stdio.h>
#include <string.h>

enum { HIDDEN = 4, FFN = 16, TENSORS = 10 };
static float whole[TENSORS][HIDDEN * FFN]; /* what one rank computes: activations and gradients, as they arise */
static size_t tensors[3], different[3]; /* seen, and elements with other bits: by one rank, by ranks 0 and 1 of two */

/* Called for every tensor that a rank completes. The layout says where the rank's part stands in the whole. */
static ar_status listen(void *user, const ar_tap_event *e)
{
    const ptrdiff_t me = (size_t *)user - tensors;
    float *const to = whole[tensors[me]++], *const part = (float *)e->local->data.ptr;
    const ar_box *box = &e->layout->box[0];
    const size_t last = (size_t)e->layout->ndim - 1, width = box->extent[last], row = last == 1 ? box->global[0] : 0;
    for (size_t i = 0; i < ar_tensor_count(e->local); i++) {
        float *place = &to[(row + i / width) * e->layout->shape[last] + box->global[last] + i % width];
        memcpy(place, &part[i], me == 0 ? sizeof *place : 0);
        different[me] += memcmp(place, &part[i], sizeof *place) != 0;
    }
    return AR_OK;
}

static ar_status step(ar_comm *world, void *first)
{
    const ar_mlp_options shape = {.hidden = HIDDEN, .ffn = FFN, .activation = AR_ACT_GELU_TANH, .bias = true};
    const size_t extents[] = {2, 1, HIDDEN};
    const float input[] = {1, -2, 3, 0.1f, -0.2f, 0.3f, 1e3f, -1e-3f};
    ar_ctx_options o = {.tp = world, .tap = listen, .tap_user = (size_t *)first + ar_comm_rank(world)};
    ar_ctx *ctx = NULL;
    ar_module *mlp = NULL;
    ar_saved *saved = NULL;
    ar_tensor x, y, dx;
    ar_status st = ar_device_cpu_create(&o.device, 1);
    AR_TRY_TO(done, st, ar_ctx_create(&ctx, &o));
    AR_TRY_TO(done, st, ar_saved_create(&saved));
    AR_TRY_TO(done, st, ar_mlp_create(&mlp, ctx, "mlp", &shape));
    AR_TRY_TO(done, st, ar_module_fresh(mlp, ctx, 42)); /* parts of the same matrices on any number of ranks */
    AR_TRY_TO(done, st, ar_ctx_tensor(ctx, &x, AR_F32, 3, extents));
    AR_TRY_TO(done, st, ar_ctx_upload(ctx, &x, input));
    AR_TRY_TO(done, st, ar_module_forward(mlp, ctx, saved, &y, &x, NULL));
    AR_TRY_TO(done, st, ar_module_backward(mlp, ctx, saved, &dx, &y, NULL)); /* the loss is |Y|^2/2, so dY = Y */
    AR_TRY_TO(done, st, ar_module_reduce_grads(mlp, ctx));                   /* complete now: reported */
done:
    ar_module_destroy(mlp);
    ar_saved_destroy(saved);
    ar_ctx_destroy(ctx);
    ar_device_destroy(o.device);
    return st;
}

int main(void)
{
    const bool ran = !ar_sim_run(1, NULL, step, &tensors[0], NULL) && !ar_sim_run(2, NULL, step, &tensors[1], NULL);
    const bool same = ran && different[1] + different[2] == 0 && tensors[1] == TENSORS && tensors[2] == TENSORS;
    printf("2 ranks and 1 rank: %s\n", same ? "the same bits in 10 tensors" : ran ? "other bits" : ar_error_message());
    return same ? 0 : 1;
}
