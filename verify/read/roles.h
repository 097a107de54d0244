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

/** The bytes at the end of a path of n bytes that are `suffix`, in which "*" is any number; 0: it ends otherwise. */
size_t ari_ending(const char *path, size_t n, const char *suffix);
/** The role of all that follows a layer's number, n bytes without ".weight" or ".bias". */
ari_role ari_role_in_layer(const char *path, size_t n);
/** The role of a path outside of layers, before or after them, by its last components. */
ari_role ari_role_outside(const char *path, size_t n, ari_section section);

typedef struct ari_module_name {
    ari_role role;
    bool in_out; /* its weight is stored [in, out] */
} ari_module_name;
/** A name's module by the last components, wherever it is; n bytes, with or without ".weight" or ".bias". */
ari_module_name ari_module_of(const char *name, size_t n);

/* Identity of a dump's tensor and its place in a training step, as far as its name and its file's name show them
 * (models.md, pytorch.md). The names of Hugging Face's Llama and GPT-2, of Megatron and of this project's stack are
 * known; others are placed by their numbers. */

enum { ARI_AT_LAYERS = 1 };

/* Borrows the name. Smaller keys come first: steps, passes of a step, parts of the model, layers, modules of a layer,
 * names with numbers compared as numbers. Backward, parts, layers and modules run from the last to the first. */
typedef struct ari_order_key {
    const char *name;
    size_t stem;                      /* bytes of the name without ":fwd" and "@2" */
    char pass;                        /* 'i' 'f' 'b' 'g' 'c' 'n' 'm' 'v' as in models.md; 'w' weights; '?' not known */
    int step;                         /* 1, 2, .. */
    int phase, section, module, part; /* section: before the layers, ARI_AT_LAYERS, unknown, after the layers */
    long layer;
    bool further; /* what only a block for a further token has */
} ari_order_key;

/** `path`: the dump the tensor is from, for names without a pass; NULL: unknown. */
ari_order_key ari_order_of(const char *name, const char *path);
/** Blocks for further tokens have the numbers after the layers', and run after the head: of a dump's keys, first each
 *  finds how many layers there are (LONG_MAX before), then each is placed by that. */
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
/** True if a relation can read the tensor's values: it is not NULL, has any, and they are real and of whole bytes. */
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
