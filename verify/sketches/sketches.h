/* SPDX-License-Identifier: Apache-2.0 */
/* Runs of which one has sketches in place of tensors: the other may have sketches too, or is sketched as it is read. */
#pragma once

#include <jansson.h>

#include "anyrank/sketch.h"
#include "anyrank/verify.h"

/* One tensor. */
typedef struct ari_sketch_row {
    const char *name;
    int step;
    ar_verify_state state;
    const char *unjudged;     /* why nothing can be said; "": it can */
    int differing;            /* a rank whose copy differs from the first, of OTHER; -1: none */
    ar_sketch_difference d;   /* of tensors of one shape */
    double allowed;           /* of the norm of the difference */
    double each, rtol;        /* of an element: an amount, and a part of it */
    double excused;           /* of new weights: what their gradients so far explain of the norm */
    size_t tiny;              /* elements of a gradient that may be rounding alone */
    size_t first, elements;   /* the block that differs most */
    const ar_sketch *side[2]; /* NULL: that run has no such tensor */
} ari_sketch_row;

typedef struct ari_sketch_report {
    ari_sketch_row *row; /* [rows] in the reference's order */
    size_t rows, different, unjudged;
    size_t left_out;  /* tensors that a run has written of itself as not comparable, or whose samples are reordered */
    size_t reordered; /* of these: activations of samples that come in another order */
    size_t first;     /* the first row that differs; rows: none */
    double roundoff;  /* the largest of the runs' formats */
    int last_step;    /* that was compared before the one that is compared now; 0: none */
    ari_arena arena;
    ar_sketch *made; /* [made_count] of a dump's tensors */
    size_t made_count;
    ar_sketch_run *run[2]; /* NULL: a dump */
    ar_dump *dump[2];      /* NULL: sketches */
} ari_sketch_report;

/** True if a folder has sketches. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_is_sketched(bool *is, const char *folder);
/** Compares two runs of which one at least is sketched, by the options' rule: bits by digests, or the norm of the
 *  difference against that of what the rule allows each element; three standard deviations of the estimate are in favour
 *  of "same". Errors: those of opening; AR_ERR_UNSUPPORTED (the rule of steps, and draws, which need elements).
 *  ari_sketch_report_fini in any case. */
AR_NODISCARD ar_status ari_sketches_compare(ari_sketch_report *r, const ar_verify_options *o);
void ari_sketch_report_fini(ari_sketch_report *r);
/** The report for programs: verify.md lists the fields. For the caller to json_decref; NULL without memory. */
json_t *ari_sketch_report_json(const ari_sketch_report *r, const ar_verify_options *o);
