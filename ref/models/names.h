/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_MODELS_NAMES_H
#define ARI_MODELS_NAMES_H

#include "anyrank/config.h"

/* Hugging Face paths of what stands outside the blocks; NULL: the architecture has none. A parameter adds ".weight" or
 * ".bias". */
typedef struct ari_outer_names {
    const char *token;    /* embedding */
    const char *position; /* learned positions */
    const char *embedded; /* what the first block gets: under this name it is tapped */
    const char *blocks;   /* "model.layers", to which a block adds ".N" */
    const char *final_norm;
    const char *head;
} ari_outer_names;

/** Static storage. */
const ari_outer_names *ari_outer_names_of(ar_arch arch);

/* The same inside a block: modules below its path, and their weights below theirs. */
typedef struct ari_block_names {
    const char *norm1, *norm2;
    const char *attention; /* "self_attn" */
    const char *q, *k, *v; /* k, v NULL: q names one parameter for all three */
    const char *out;
    const char *mlp;                 /* "mlp" */
    const char *first, *up, *second; /* up NULL: not gated */
} ari_block_names;

/** Static storage. */
const ari_block_names *ari_block_names_of(ar_arch arch);

#endif
