/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/parallel.h"
#include "ref/models/family.h"

/** Returns the layer that a name below the blocks' path belongs to, parameter or not; SIZE_MAX: none. */
size_t ari_layer_of_name(const ar_config *c, const char *name);

/* Alternative names of the parameters of a layer with experts, which transformers has in memory from version 5 on, and
 * in files saved with save_original_format=False. The MLP is called "mlp" in every family, and all experts of a layer
 * form two parameters: mlp.experts.gate_up_proj [E, 2F, h], with each expert's gate before its up, and
 * mlp.experts.down_proj [E, h, F]. GPT-OSS has [E, h, 2F], gate and up in alternating columns, and [E, F, h], with
 * mlp.experts.gate_up_proj_bias [E, 2F] and down_proj_bias [E, h]. */
typedef struct ari_stacked {
    char name[160];
    int ndim; /* number of dimensions: one more than the parameter's, or the same if only the name differs */
    size_t shape[3];
    size_t expert, row; /* with one more dimension: the parameter begins at [expert, row, 0] */
    size_t step[2];     /* nonzero: element [i, j] is i*step[0] + j*step[1] after element `row` of the expert's
                           matrix */
} ari_stacked;

/** Writes the alternative path of a role's module or value in such a layer, for example
 *  "model.layers.3.mlp.experts.gate_up_proj" for an expert's gate. layer: as in ari_role_path. Returns false if it has
 *  no alternative path. */
bool ari_stacked_path(char *out, size_t cap, ar_arch arch, const char *layer, ari_role role);
/** Finds the alternative name of a parameter with this name and shape, and its position there. Returns false if it has
 *  none. */
bool ari_stacked_of(ari_stacked *s, const ar_config *c, const char *name, int ndim, const size_t *shape);
