/* SPDX-License-Identifier: Apache-2.0 */
/* Vocabulary of module names: those of the families (ref/models/family.h), of Megatron and of Meta's Llama, and those
 * of values inside modules. The role of a name decides its position in a step and its name in hints. */
#pragma once

#include <stddef.h>

#include "anyrank/dump.h"
#include "ref/models/family.h"

/* Position of a module's run within its section. backward: the position of its ":bwd", which its parameters' gradients
 * follow directly. */
typedef struct ari_role_place {
    int forward, backward;
} ari_role_place;
/** Static storage. */
const ari_role_place *ari_role_place_of(ari_role role);

/** Returns the number of bytes at the end of a path of n bytes that match `suffix`, in which "*" stands for any number;
 *  0: no match. */
size_t ari_ending(const char *path, size_t n, const char *suffix);
/** The role of all that follows a layer's number, n bytes without ".weight" or ".bias". */
ari_role ari_role_in_layer(const char *path, size_t n);
/** Returns the role of a path before or after the layers, by its last components. */
ari_role ari_role_outside(const char *path, size_t n, ari_section section);

typedef struct ari_module_name {
    ari_role role;
    bool in_out; /* true if the weight is stored as [in, out] */
} ari_module_name;
/** Finds a name's module by the last components, wherever they are; n bytes, with or without ".weight" or ".bias". */
ari_module_name ari_module_of(const char *name, size_t n);

/* The identity of a dump's tensor and its position in a training step, derived from its name and its file's name
 * (models.md, pytorch.md). The names of Hugging Face's Llama and GPT-2, of Megatron and of this project's stack are
 * known; other names are ordered by their numbers. */

enum { ARI_AT_LAYERS = 1 };

/* The key borrows the name. Keys sort by step, pass within a step, part of the model, layer, module within a layer, and
 * name with embedded numbers compared as numbers. In the backward pass, parts, layers and modules run from the last to
 * the first. */
typedef struct ari_order_key {
    const char *name;
    size_t stem;                      /* bytes of the name without ":fwd" and "@2" */
    char pass;                        /* 'i' 'f' 'b' 'g' 'c' 'n' 'm' 'v' as in models.md; 'w' for weights; '?' if
                                         unknown */
    int step;                         /* step number from 1 */
    int phase, section, module, part; /* section: before the layers, ARI_AT_LAYERS, unknown, after the layers */
    long layer;
    bool further; /* true for a module that only a block for a further token has */
} ari_order_key;

/** Derives the key. `path`: the dump that contains the tensor, for names without a pass; NULL: unknown. */
ari_order_key ari_order_of(const char *name, const char *path);
/** Positions a key's layer. Blocks that predict further tokens are numbered after the layers but run after the head.
 *  First the function is called on all keys to find the number of layers (starting with LONG_MAX), then on each key
 *  with that number. */
long ari_order_layers(const ari_order_key *key, long layers);
void ari_order_further(ari_order_key *key, long layers);

/* A walk over a dump's tensors. */
typedef struct ari_walk {
    const ar_dump *dump;
    const char *path, *passes;
    int step;
    size_t next_index;
    const ar_dump_tensor *t;
    ari_order_key key;
} ari_walk;
/** Returns true if a relation can read the tensor's values: the tensor is not NULL and not empty, and its values are
 *  real and of whole bytes. */
bool ari_is_readable(const ar_dump_tensor *t);
/** Such a tensor by name; NULL, also if the dump is NULL. */
const ar_dump_tensor *ari_find_readable(const ar_dump *d, const char *name);
/** Begins a walk over readable tensors. path: as in ari_order_of, NULL: the dump's own; passes: "iw", NULL: any; step:
 *  0: any. A NULL dump has no tensors. */
ari_walk ari_walk_of(const ar_dump *dump, const char *path, const char *passes, int step);
/** Returns false if there are no more. */
bool ari_walk_next(ari_walk *w);

/** Below, at or above 0 as strcmp; 0 for equal names alone. */
int ari_order_compare(const ari_order_key *a, const ari_order_key *b);
