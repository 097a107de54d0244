/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_DIAGNOSE_ORDER_H
#define ARI_VERIFY_DIAGNOSE_ORDER_H

#include <stddef.h>

/* What a dump's tensor is and when in a training step it is made, as far as its name and its file's name tell
 * (docs/names.md, docs/dumps.md). Names of Hugging Face's Llama and GPT-2, of Megatron and of this project's stack are
 * known; others stand where their numbers put them. */

/* Borrows the name. Smaller keys come first: steps, passes of a step, parts of the model, layers, modules of a layer,
 * names with numbers compared as numbers. Backward, parts, layers and modules run from the last to the first. */
typedef struct ari_order_key {
    const char *name;
    size_t stem; /* bytes of the name without ":fwd" and "@2" */
    char pass;   /* 'i' 'f' 'b' 'g' 'c' 'n' 'm' 'v' as in docs/names.md; 'w' weights; '?' not known */
    int step;    /* 1, 2, .. */
    int phase, section, module, part;
    long layer;
} ari_order_key;

/** `path`: the dump the tensor is from, for names that do not say their pass; NULL: not known. */
ari_order_key ari_order_of(const char *name, const char *path);
/** Below, at or above 0 as strcmp; 0 for equal names alone. */
int ari_order_compare(const ari_order_key *a, const ari_order_key *b);

#endif
