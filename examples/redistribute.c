/* SPDX-License-Identifier: Apache-2.0 */
/* Six ranks as a mesh of 2 x 3 move a matrix from one placement to others and back: every rank checks its part. */
#include "anyrank/redistribute.h"
#include "anyrank/sim.h"
#include <stdio.h>

enum { ROWS = 5, COLS = 4, RANKS = 6 };

/* A part that came, against `times` the whole matrix, whose element [i, j] is 10 i + j. */
static ar_status check(ar_ctx *ctx, const ar_mesh_groups *g, const ar_placement *p, const ar_tensor *part, float times)
{
    float value[ROWS * COLS];
    size_t start[2], extent[2];
    AR_TRY(ar_placements_region(start, extent, &g->mesh, g->coords, p, 2, (const size_t[]){ROWS, COLS}, true));
    AR_TRY(ar_ctx_download(ctx, value, part));
    for (size_t i = 0; i < extent[0] * extent[1]; i++) {
        const size_t row = start[0] + i / extent[1], col = start[1] + i % extent[1];
        if (value[i] != times * (float)(10 * row + col))
            return ar_error_set(AR_ERR_DATA, "element [%zu, %zu] is %g", row, col, (double)value[i]);
    }
    return AR_OK;
}

/* Every rank begins with its part of the matrix; what came goes back as if it were a gradient. */
static ar_status there_and_back(ar_ctx *ctx, const ar_mesh_groups *g, const char *from, const char *to, float there,
                                float back)
{
    ar_redistribution r = {.ndim = 2, .shape = {ROWS, COLS}}, b;
    size_t start[2], extent[2];
    float value[ROWS * COLS];
    ar_tensor x, y, dx;
    AR_TRY(ar_placements_parse(r.src, g->mesh.ndim, from));
    AR_TRY(ar_placements_parse(r.dst, g->mesh.ndim, to));
    AR_TRY(ar_placements_region(start, extent, &g->mesh, g->coords, r.src, 2, r.shape, true));
    for (size_t i = 0; i < extent[0] * extent[1]; i++)
        value[i] = (float)(10 * (start[0] + i / extent[1]) + start[1] + i % extent[1]);
    AR_TRY(ar_ctx_tensor(ctx, &x, AR_F32, 2, extent));
    AR_TRY(ar_ctx_upload(ctx, &x, value));
    AR_TRY(ar_redistribute(ctx, g, &y, &x, &r, "there"));
    AR_TRY(check(ctx, g, r.dst, &y, there));
    AR_TRY(ar_redistribution_backward(&b, &g->mesh, &r));
    AR_TRY(ar_redistribute(ctx, g, &dx, &y, &b, "and back"));
    return check(ctx, g, b.dst, &dx, back);
}

static ar_status rank(ar_comm *world, void *arg)
{
    const ar_mesh mesh = {2, {{"dp", 2}, {"tp", 3}}};
    uint64_t *const moved = (uint64_t *)arg + ar_comm_rank(world);
    ar_mesh_groups g = {.mesh = {0}};
    ar_ctx_options o = {0};
    ar_ctx *ctx = NULL;
    ar_status st = ar_device_cpu_create(&o.device, 1);
    AR_TRY_TO(done, st, st);
    AR_TRY_TO(done, st, ar_ctx_create(&ctx, &o));
    AR_TRY_TO(done, st, ar_mesh_groups_init(&g, &mesh, world));
    AR_TRY_TO(done, st, there_and_back(ctx, &g, "[R, S(0)]", "[R, S(1)]", 1, 1)); /* an all-to-all over tp */
    AR_TRY_TO(done, st, there_and_back(ctx, &g, "[S(0), S(0)]", "[I, I]", 1, 1)); /* two all-gathers */
    /* Six equal terms. The gradient of R is a term again, and there are two of them. */
    AR_TRY_TO(done, st, there_and_back(ctx, &g, "[P(sum), P(sum)]", "[R, S(1)]", 6, 12));
    for (int d = 0; d < mesh.ndim; d++) {
        uint64_t read = 0, written = 0;
        ar_comm_counted(g.comm[d], &read, &written);
        *moved += read + written;
    }
done:
    ar_mesh_groups_fini(&g);
    ar_ctx_destroy(ctx);
    ar_device_destroy(o.device);
    return st;
}

int main(void)
{
    uint64_t moved[RANKS] = {0}, all = 0;
    if (ar_sim_run(RANKS, NULL, rank, moved, NULL) != AR_OK) {
        printf("%s\n", ar_error_message());
        return 1;
    }
    for (int r = 0; r < RANKS; r++)
        all += moved[r];
    printf("every part is right; %llu bytes moved\n", (unsigned long long)all);
    return 0;
}
