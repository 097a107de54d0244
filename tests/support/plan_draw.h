/* SPDX-License-Identifier: Apache-2.0 */
/* Random plans that fit a model, as the text of a file: each part split in one of the ways that it can be, each layer by
 * itself. */
#ifndef TESTS_SUPPORT_PLAN_DRAW_H
#define TESTS_SUPPORT_PLAN_DRAW_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "anyrank/config.h"

enum { PLAN_DRAW_TEXT = 4096 };

/* Globs of an architecture's parts; those of a block begin with "layers" or "h", a dot and its number. */
typedef struct plan_draw_names {
    const char *tokens, *blocks, *qkv, *out, *first, *second, *norms, *head;
} plan_draw_names;

static const plan_draw_names plan_draw_names_of[] = {
    [AR_ARCH_LLAMA] = {"embed_tokens", "model.layers", "self_attn.[qkv]_proj", "self_attn.o_proj", "mlp.[gu]*_proj",
                       "mlp.down_proj", "*norm", "lm_head"},
    [AR_ARCH_GPT2] = {"wte", "transformer.h", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "*ln_?",
                      "lm_head"},
    [AR_ARCH_STACK] = {"embed", "layers", "attn.w[qkv]", "attn.wo", "mlp.w1", "mlp.w2", "*.ln?", NULL}};

/* 0 .. n-1 (splitmix64). */
static inline unsigned plan_draw_below(uint64_t *seed, unsigned n)
{
    uint64_t z = *seed += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (unsigned)((z ^ (z >> 31)) % n);
}

static inline void plan_draw_rule(char *text, const char *block, size_t layer, const char *part, const char *style,
                                  const char *more)
{
    size_t used = 0;
    while (text[used])
        used++;
    const bool first = text[used - 1] == '[';
    if (block)
        snprintf(text + used, PLAN_DRAW_TEXT - used, "%s{\"modules\": \"%s.%zu.%s\", \"style\": \"%s\"%s}",
                 first ? "" : ", ", block, layer, part, style, more);
    else
        snprintf(text + used, PLAN_DRAW_TEXT - used, "%s{\"modules\": \"%s\", \"style\": \"%s\"%s}", first ? "" : ", ",
                 part, style, more);
}

static inline void plan_draw_block(char *text, uint64_t *seed, const plan_draw_names *n, size_t layer)
{
    static const char *const mlp[][2] = {{"colwise", "rowwise"}, {"rowwise", "colwise"}, {"replicate", "replicate"}};
    const unsigned order = plan_draw_below(seed, 3);
    if (plan_draw_below(seed, 2)) {
        plan_draw_rule(text, n->blocks, layer, n->qkv, "colwise", "");
        plan_draw_rule(text, n->blocks, layer, n->out, "rowwise", "");
    }
    plan_draw_rule(text, n->blocks, layer, n->first, mlp[order][0], "");
    plan_draw_rule(text, n->blocks, layer, n->second, mlp[order][1], "");
}

/** sequence: whether norms are in that style. */
static inline void plan_draw(char text[PLAN_DRAW_TEXT], uint64_t *seed, const ar_config *c, bool sequence)
{
    static const char *const tables[] = {"replicate", "vocab", "hidden"};
    const plan_draw_names *n = &plan_draw_names_of[c->arch];
    const unsigned tokens = plan_draw_below(seed, c->tied ? 2 : 3), head = c->tied ? tokens : plan_draw_below(seed, 2);
    snprintf(text, PLAN_DRAW_TEXT, "{\"rules\": [");
    plan_draw_rule(text, NULL, 0, n->tokens, tables[tokens], "");
    if (n->head)
        plan_draw_rule(text, NULL, 0, n->head, tables[head],
                       head == 1 && plan_draw_below(seed, 2) ? ", \"output\": \"R\"" : "");
    if (sequence)
        plan_draw_rule(text, NULL, 0, n->norms, "sequence", "");
    for (size_t i = 0; i < c->layers; i++)
        plan_draw_block(text, seed, n, i);
    size_t used = 0;
    while (text[used])
        used++;
    snprintf(text + used, PLAN_DRAW_TEXT - used, "]}");
}

#endif
