/* SPDX-License-Identifier: Apache-2.0 */
/* Random plans that fit a model, as the text of a file: each part split in any of the ways that it can be, with what has
 * to be declared and some of what need not be, each layer by itself. Or wrong ones, which run: something is declared
 * that has the shape of what is there. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "anyrank/config.h"

enum { PLAN_DRAW_TEXT = 16384 };

/* What of the layout a plan depends on, and whether it is to be wrong somewhere. */
typedef struct plan_draw_options {
    bool sp, wrong;
} plan_draw_options;

/** 0 .. n-1 (splitmix64). */
unsigned plan_draw_below(uint64_t *seed, unsigned n);
/** Whether plans can be drawn for a family: not where norms of what branches make have to be in sequence style, nor where
 *  an MLP's place has experts. */
bool plan_draw_knows(const ar_config *c);
/** The parts have to divide by the ranks as a tensor-parallel model's have to; KV heads too, or the plan is refused. */
void plan_draw(char text[PLAN_DRAW_TEXT], uint64_t *seed, const ar_config *c, plan_draw_options o);
