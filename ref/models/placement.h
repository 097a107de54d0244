/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/parallel.h"
#include "ref/models/family.h"

/** The layer that a name below the blocks' path belongs to, parameter or not; SIZE_MAX: none. */
size_t ari_layer_of_name(const ar_config *c, const char *name);

/* Other names of the parameters of a layer with experts: those that transformers from version 5 on has in memory, and in
 * files that were saved so (save_original_format=False). Its MLP is "mlp" in every family, and all experts of a layer
 * are two parameters, mlp.experts.gate_up_proj [E, 2F, h], of which each expert's gate is before its up, and
 * mlp.experts.down_proj [E, h, F]. GPT-OSS's are [E, h, 2F], gate and up column by column, and [E, F, h], with
 * mlp.experts.gate_up_proj_bias [E, 2F] and down_proj_bias [E, h]. */
typedef struct ari_stacked {
    char name[160];
    int ndim; /* one more than the parameter's, or as many: the parameter by another name */
    size_t shape[3];
    size_t expert, row; /* of one more: the parameter begins at [expert, row, 0] */
    size_t step[2];     /* not 0: its element [i, j] is i*step[0] + j*step[1] after element `row` of the expert's */
} ari_stacked;

/** The path of a role's module or value in such a layer by these names, "model.layers.3.mlp.experts.gate_up_proj" of an
 *  expert's gate, for which the roles' own path has another. layer: as of ari_role_path. False: it has no other. */
bool ari_stacked_path(char *out, size_t cap, ar_arch arch, const char *layer, ari_role role);
/** The other name of a parameter of this name and shape, and where it is there. False: it has none. */
bool ari_stacked_of(ari_stacked *s, const ar_config *c, const char *name, int ndim, const size_t *shape);
