/* SPDX-License-Identifier: Apache-2.0 */
/* Architecture as a value: the parts of a model with parameters, one table for each family (family.c). Names, shapes,
 * the default plan, placement and the order of tensors in reports are read from it. A new family is a new table; a new
 * kind of part also needs a row in the table of roles. The baseline and the byte formulas have their own tables. */
#pragma once

#include "anyrank/arch.h"
#include "anyrank/plan.h"
#include "anyrank/tensor.h"
#include "ref/core/role.h"

/* Forms of a part's parameters. */
typedef enum ari_form {
    ARI_FORM_TABLE,  /* a weight [rows, hidden] */
    ARI_FORM_BUFFER, /* [out], without a further name */
    ARI_FORM_HEADS,  /* a trained vector that is divided like the heads */
    ARI_FORM_NORM,   /* a norm's weight [hidden], and for LayerNorm a bias */
    ARI_FORM_LINEAR  /* a weight [out, in], or [in, out] if the family transposes, and a bias [out] if the config has
                        one */
} ari_form;
/* Extents of shapes, named by what they count. */
typedef enum ari_shape_extent {
    ARI_NO_EXTENT,
    ARI_HIDDEN,
    ARI_TWICE_HIDDEN,
    ARI_FFN,
    ARI_VOCABULARY,
    ARI_POSITION_ROWS,
    ARI_QUERY_HEADS,
    ARI_KV_HEADS,
    ARI_VALUE_HEADS, /* values for as many heads as there are query heads */
    ARI_QUERY_RANK,  /* rank of the queries in latent attention */
    ARI_KEY_RANK,
    ARI_KEY_LATENTS,     /* the rank, and the key features that all heads share */
    ARI_KEY_VALUE_HEADS, /* for each head the remaining key features, and a value */
    ARI_NORMED_QUERIES,  /* the features of a head, or those of all heads */
    ARI_NORMED_KEYS,
    ARI_PACKED_HEADS, /* q | k | v */
    ARI_PACKED_FFN,   /* gate | up */
    ARI_HEAD_COUNT,
    ARI_EXPERT_COUNT,
    ARI_EXPERT_FFN,
    ARI_SHARED_FFN,
    ARI_ONE
} ari_shape_extent;

/* The parameters of a role, which are the same in every family. */
typedef struct ari_part_kind {
    ari_form form;
    ar_style style; /* style in the default plan */
    ari_shape_extent out, in_extent;
} ari_part_kind;
/** The kind of a role with parameters. Static storage. */
const ari_part_kind *ari_part_kind_of(ari_role role);

typedef struct ari_family_part {
    ari_role role;
    const char
        *path; /* Hugging Face's path below the block's: "self_attn.q_proj". A parameter adds ".weight" or ".bias".
                  "*" stands for an expert's number */
} ari_family_part;

typedef struct ari_family {
    const char *blocks;          /* "model.layers", to which a block's name adds ".N" */
    const char *attention, *mlp; /* names of a block's modules: "self_attn" */
    const char *embedded;        /* name under which the first block's input is tapped */
    const char *prefix;          /* prefix that files may omit from all names; NULL: none */
    const char *older_head;      /* name of the head in files of transformers 4; NULL: none */
    bool transposed;             /* linear layers store [in, out] */
    bool by_head;                /* a packed q, k and v groups them by head */
    bool shared_experts;         /* true if the expert for all tokens has this name */
    bool interleaved;            /* true if files store the experts' weights as [E, in, out], with alternating
                                    columns of gate and up */
    ari_family_part part[32];    /* parts in order of first use, the three of an expert together; terminated by a
                                    NULL path */
} ari_family;
/** Static storage. */
const ari_family *ari_family_of(ar_arch arch);
/** Checks that a value from a user's program is a valid ar_arch. Errors: AR_ERR_ARG. */
AR_NODISCARD ar_status ari_arch_expect(ar_arch arch);
/** Checks a config that no file reader has checked: no divisor is 0, and every enumeration has a valid value. Errors:
 *  AR_ERR_ARG. */
AR_NODISCARD ar_status ari_config_expect(const ar_config *c);
/** Returns family i; NULL after the last. */
const ari_family *ari_family_at(size_t i);

/** Returns true if a model with this config has this part of its family, with its own parameters. */
bool ari_part_present(const ar_config *c, ari_role role);
/** Returns the same for a layer, which has either an MLP or experts. */
bool ari_part_in_layer(const ar_config *c, ari_role role, size_t layer);
/** Returns true for the parts of an MLP that is not an expert. */
bool ari_is_mlp_part(ari_role role);
/** Returns true for the parts that a layer with experts has instead of an MLP. */
bool ari_is_of_experts(ari_role role);
/** Writes a part's path with an expert's number in place of "*". */
void ari_expert_path(char *out, size_t cap, const char *path, size_t expert);
/** Returns true if a tensor of that name has no gradient. */
bool ari_is_buffer_name(const char *name);
/** Returns the path of a family's part; NULL: it has none. */
const char *ari_part_path(const ari_family *f, ari_role role);

/** Gets value i that the layers of any family report, relative to a block: the module and the value's name ("self_attn"
 *  and "probs"; "": the module's output), and its role. Returns false if i is out of range. */
bool ari_family_value(const char **module, const char **leaf, ari_role *role, const ari_family *f, size_t i);
/** Writes the full path of a role's module or value, "model.layers.3.self_attn.q_proj". layer: text of the block's
 *  number, unused outside of blocks. "" for a role without a name. */
void ari_role_path(char *out, size_t cap, ar_arch arch, const char *layer, ari_role role);

/** Calls visit(user, name, ndim, shape) for every parameter of a config in the order of first use, with Hugging Face
 *  names and shapes. The first status other than AR_OK ends the walk and is returned. */
AR_NODISCARD ar_status ari_param_list(const ar_config *c,
                                      ar_status (*visit)(void *user, const char *name, int ndim, const size_t *shape),
                                      void *user);
