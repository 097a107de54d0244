/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/parallel.h"
#include "ref/models/family.h"

/* A parameter's placement over tensor-parallel ranks and pipeline stages, derived from the config and its name alone.
 * Plain data, the same for all ranks. */
typedef struct ari_placing {
    int ndim;
    size_t shape[AR_MAX_DIMS];
    int dim;          /* split along it; -1: whole on every rank */
    int blocks;       /* that lie one after the other there, each split by itself: 3 for q|k|v, 2 for gate|up, else 1 */
    size_t block[3];  /* their extents, where there are several */
    size_t heads;     /* of which each block consists, or a multiple of them, and which stay whole; 0: it has none */
    bool copied;      /* where there are more ranks than heads, neighbouring ranks hold copies of one */
    bool uneven;      /* the vocabulary: parts of ceil(n / ranks) */
    bool vocabulary;  /* dimension 0 is the vocabulary, split or not */
    bool first, last; /* the first, the last stage of a pipeline holds it */
    size_t layer;     /* its layer's stage does; SIZE_MAX: it is in none */
} ari_placing;

/** Placement of a parameter of ari_param_list. embedding_hidden: the embedding is split along the hidden dimension. */
void ari_placing_of(ari_placing *p, const ar_config *c, const char *name, int ndim, const size_t *shape,
                    bool embedding_hidden);
/** The part of rank `rank` of `tp`. `name` is for messages. Errors: AR_ERR_INDIVISIBLE, AR_ERR_ARG. */
AR_NODISCARD ar_status ari_placing_layout(ar_layout *o, const ari_placing *p, const char *name, int tp, int rank);
/** True if the rank at `place` of the pipeline holds it, in a model with so many layers. parallel: accepted by
 *  ari_stages_check. */
bool ari_placing_staged(const ari_placing *p, const ar_parallel *parallel, size_t layers, int place);
/** The layer that a name below the blocks' path belongs to, parameter or not; SIZE_MAX: none. */
size_t ari_layer_of_name(const ar_config *c, const char *name);

/* A parameter's place in the model, by its name. */
typedef struct ari_param_place {
    const ari_family_part *part; /* static storage */
    size_t layer;                /* SIZE_MAX: in none */
    size_t expert;               /* 0 where there are none */
    const char *rest, *kind;     /* of the name: below the layer; and "weight" or "bias" */
} ari_param_place;

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
