/* SPDX-License-Identifier: Apache-2.0 */
/* A random small model, layout and training run, all legal; and the check that the ranks have the baseline's bits. */
#pragma once

#include <stdio.h>

#include "anyrank/check.h"
#include "support/match.h"

enum { LAYOUT_DRAW_BATCH = 6, LAYOUT_DRAW_SEQ = 32, LAYOUT_DRAW_HEADS = 16, LAYOUT_DRAW_STEPS = 2 };
enum { LAYOUT_DRAW_RANKS = 64, LAYOUT_DRAW_TEXT = 900 }; /* of a draw in one line */
enum { LAYOUT_DRAW_TOKENS = LAYOUT_DRAW_BATCH * LAYOUT_DRAW_SEQ, LAYOUT_DRAW_FAMILIES = 24 };
enum { LAYOUT_DRAW_EXPERTS = 10 }; /* families with experts */

/* Which labels are left out: single tokens; whole samples too, so that a rank or a micro-batch may have none; all of
 * the first step. */
typedef enum layout_draw_ignored { DRAW_IGNORED_TOKENS, DRAW_IGNORED_SAMPLES, DRAW_IGNORED_STEP } layout_draw_ignored;

/* Whose config.json a model of Llama's form has. */
typedef enum layout_draw_form { DRAW_LLAMA, DRAW_QWEN2, DRAW_MISTRAL, DRAW_PHI3 } layout_draw_form;

/* What ranks share out: samples and tensors; also the sequence; also the layers, and the weights themselves. Families: a
 * file of each family in turn, all of it, over numbers of ranks that divide little; experts: of those that have them. */
typedef enum layout_draw_kind {
    DRAW_TENSORS,
    DRAW_CONTEXTS,
    DRAW_STAGES,
    DRAW_FAMILIES,
    DRAW_EXPERTS
} layout_draw_kind;

typedef struct layout_draw {
    uint64_t seed; /* with the kind makes the same draw again */
    layout_draw_kind kind;
    ar_config config;
    layout_draw_form form;
    char json[800]; /* the file of a family; "": it is written from `config` */
    ar_run run;     /* of a model named "draw", in exact numerics; its seed is that of the weights */
    /* Through ar_check, with a config file and text; else training steps on batches with labels and masks. */
    bool by_check;
    bool given;         /* weights that no fresh parameter would hold, of a check in a file */
    match_draw weights; /* given ones */
    bool labels, padding, additive, mask_per_sample, mask_per_head;
    bool packed, positions; /* rows of several documents; positions of the batch's own */
    layout_draw_ignored ignored;
    size_t documents; /* of a check: in each sequence, at most */
    size_t more_rows; /* of a check: rows of padding in the layout's batch */
} layout_draw;

/** The draw of a seed. Draws that are not legal are drawn again. */
void layout_draw_make(layout_draw *d, layout_draw_kind kind, uint64_t seed);
/** Puts the seed's family, its file and its ranks into a draw. */
void layout_family_draw(layout_draw *d, uint64_t *seed);
/** Puts experts in the place of the MLPs of some layers, or of all, where the model and its plan allow that: for lists of
 *  operations, for its family has no names of them. */
void layout_draw_add_experts(layout_draw *d, uint64_t seed);
/** Gives every second draw a plan with parts split in any way, where that is legal. */
AR_NODISCARD ar_status layout_draw_add_plan(layout_draw *d, uint64_t *seed);
/** Adds what only a check draws: losses of routers, documents, rows of padding, layers given by stage where a file says
 *  how many there are. By numbers of its own; nothing of the latter where that is not legal. */
void layout_draw_add_more(layout_draw *d);
/** All of it in one line. */
void layout_draw_text(char *out, size_t cap, const layout_draw *d);
/** A check of the draw's model under its layout, with the losses and batches of the command: exact, or below fp32
 *  native. Gives; ar_check_report_destroy. */
AR_NODISCARD ar_status layout_draw_check(ar_check_report **gives, const layout_draw *d, ar_precision precision,
                                         const char *fault);
/** AR_OK: same tensors, hashes, losses and predicted bytes. Errors: AR_ERR_DATA with what differs first, or what
 * stopped the run. */
AR_NODISCARD ar_status layout_draw_run(const layout_draw *d);

/* How many of a number of draws have each thing that layout_draw_count.c names, and how many ranks. */
enum { LAYOUT_DRAW_FEATURES = 80 };
typedef struct layout_histogram {
    int draws, has[LAYOUT_DRAW_FEATURES], ranks[LAYOUT_DRAW_RANKS + 1];
} layout_histogram;
void layout_histogram_add(layout_histogram *h, const layout_draw *d);
/** Whether they have as much of each thing as draws of the kind are to have. */
bool layout_histogram_covers(const layout_histogram *h, layout_draw_kind kind);

/** Runs `draws` draws of a kind from seed `first`, or what the environment asks for: ANYRANK_TEST_SEED, the first seed,
 *  and ANYRANK_TEST_DRAWS, all in bf16 (ANYRANK_TEST_BF16) or on a device (ANYRANK_TEST_DEVICE). Each failure is one paragraph on `to`, which says how to run its draw alone; then the
 *  histogram. Returns the number of failures; one more where the draws were not asked for and do not cover enough. */
int layout_draws_run(layout_draw_kind kind, uint64_t first, int draws, FILE *to);
