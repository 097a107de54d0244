/* SPDX-License-Identifier: Apache-2.0 */
/* Dropout: numerics.md section 5. The dropped elements depend on the site's name, the step and the element's position
 * in the longest sequence that the model supports. */
#include "ref/baseline/run.h"

#include "ref/numerics/philox.h"

/* Emits y rounded to its storage type; y itself is not rounded yet. */
static ar_status emit_stored(ari_bl_run *run, const char *part, char pass, const double *y, size_t cols)
{
    ARI_BL_SCOPE(run);
    double *stored = ari_bl_doubles(run, run->tokens, cols);
    AR_TRY(run->memory);
    for (size_t i = 0; i < run->tokens * cols; i++)
        stored[i] = ari_bl_keep(run, y[i]);
    return ari_bl_emit_tokens(run, part, pass, stored, cols, 0, cols);
}

void ari_bl_drop(const ari_bl_run *run, const char *part, double *y, const double *x, const ari_bl_region *region,
                 size_t features)
{
    char name[ARI_BL_NAME_SIZE];
    ari_bl_name(run, name, part);
    const uint64_t longest = run->c->max_positions, key = ari_stream_key(run->o->seed, name);
    const uint32_t threshold = ari_dropout_threshold(run->o->dropout);
    const double scale = ari_bl_fl(run, 1.0 / (1.0 - run->o->dropout));
    for (size_t r = 0; r < region->rows; r++)
        for (size_t i = 0; i < region->cols; i++) {
            const size_t row = region->row + r, element = r * region->cols + i;
            const uint64_t index = (row / run->s * longest + row % run->s) * features + region->col + i;
            const bool is_kept = ari_dropout_keep(key, index, run->step, threshold);
            y[element] = is_kept ? ari_bl_branch(run, x[element] * scale) : 0.0;
        }
}

ar_status ari_bl_dropout(ari_bl_run *run, const char *part, char pass, double *y, const double *x, size_t heads,
                         size_t cols)
{
    const ari_bl_region region = {0, heads > 0 ? run->tokens * heads : run->tokens, 0, cols};
    const size_t shape[4] = {run->b, heads, run->s, cols};
    ari_bl_drop(run, part, y, x, &region, heads > 0 ? run->c->max_positions : cols);
    if (pass == 0)
        return AR_OK;
    return heads > 0 ? ari_bl_emit(run, part, pass, 4, shape, y) : emit_stored(run, part, pass, y, cols);
}
