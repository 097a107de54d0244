/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_DIAGNOSE_EXPLAIN_SLICES_H
#define ARI_VERIFY_DIAGNOSE_EXPLAIN_SLICES_H

#include "verify/diagnose/explain_impl.h"

enum { ARI_AXIS_ROWS = -1 }; /* all dimensions but the last as one */

/* Slices along a dimension, and of which slice of the reference each has the values. */
typedef struct ari_axis {
    int dim;              /* or ARI_AXIS_ROWS */
    size_t n;             /* slices */
    size_t inner;         /* elements of a slice that lie side by side */
    size_t size;          /* elements of a slice */
    size_t *from;         /* [n]: its own index where it is right; n: no slice of the reference */
    bool *wrong;          /* [n] */
    bool *plain;          /* [n]: one value alone, or next to nothing: it proves nothing */
    size_t wrongs, moved; /* slices: that differ; that are another one and not plain */
    size_t lost;          /* that are none */
    double worst;         /* largest difference from the slice they are */
} ari_axis;

/** States by what rule slices moved, if it is one, and what does that (explain_rule.c). */
void ari_name_order(ari_clue *f, const ari_whole *w, const ari_axis *a);

#endif
