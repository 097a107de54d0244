/* SPDX-License-Identifier: Apache-2.0 */
/* Dropout: numerics.md section 5. What is dropped depends on the site's name, the step and the element's place in
 * the longest sequence that the model holds. */
#include "ref/baseline/run.h"

#include "ref/numerics/philox.h"

/* As it is stored; y itself is not rounded to that yet. */
static ar_status emit_stored(ari_bl_run *run, const char *part, char pass, const double *y, size_t cols)
{
    ARI_BL_SCOPE(run);
    double *stored = ari_bl_doubles(run, run->tokens, cols);
    AR_TRY(run->memory);
    for (size_t i = 0; i < run->tokens * cols; i++)
        stored[i] = ari_bl_keep(run, y[i]);
    return ari_bl_emit_tokens(run, part, pass, stored, cols, 0, cols);
}

ar_status ari_bl_dropout(ari_bl_run *run, const char *part, char pass, double *y, const double *x, size_t heads,
                         size_t cols)
{
    char name[ARI_BL_NAME_SIZE];
    ari_bl_name(run, name, part);
    const size_t rows = heads > 0 ? run->tokens * heads : run->tokens;
    const uint64_t longest = run->c->max_positions, features = heads > 0 ? longest : cols;
    const uint64_t key = ari_stream_key(run->o->seed, name);
    const uint32_t threshold = ari_dropout_threshold(run->o->dropout);
    const double scale = ari_bl_fl(run, 1.0 / (1.0 - run->o->dropout));
    for (size_t row = 0; row < rows; row++)
        for (size_t i = 0; i < cols; i++) {
            const uint64_t index = (row / run->s * longest + row % run->s) * features + i;
            const bool keep = ari_dropout_keep(key, index, run->step, threshold);
            y[row * cols + i] = keep ? ari_bl_branch(run, x[row * cols + i] * scale) : 0.0;
        }
    if (pass == 0)
        return AR_OK;
    const size_t shape[4] = {run->b, heads, run->s, cols};
    return heads > 0 ? ari_bl_emit(run, part, pass, 4, shape, y) : emit_stored(run, part, pass, y, cols);
}
