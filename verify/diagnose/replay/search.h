/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* One search for everything that is computed again: which of some candidates gives the reference, and which the other
 * values? Candidates are a module's possible outputs for its inputs, tried in turn, or sums of the reference's tensors,
 * each with a factor. */
#include "verify/diagnose/replay/replay.h"

/* Puts candidate i of the set `of` (ari_probe_put). */
typedef void (*ari_put)(ari_probe *p, void *of, size_t i);
/** Candidate *base gives the reference best, and *other leaves least of what differs, *left of its squares; false: none
 *  gives the reference, or no other one the differences. */
bool ari_choose(size_t *base, size_t *other, double *left, ari_probe *p, ari_put put, void *of, size_t n);
/** Silu, gelu, its tanh form, relu, and others, of activation.c's names. */
double ari_activation_of(size_t function, double x);
/** The latter alone, where the base is known. */
bool ari_choose_other(size_t *other, double *left, ari_probe *p, ari_put put, void *of, size_t base, size_t n);

/** True if each of n things counts either zero times or the same number of times, above 1, and both occur: states
 *  dropout. A count of NaN says nothing. */
bool ari_dropped(ari_trace *t, ari_trace_kind kind, const double *count, size_t n);

/* --- sums --------------------------------------------------------------------------------------------------------- */

enum { ARI_MOST_VECTORS = ARI_MOST_NEAR + 5, ARI_MOST_TERMS = 3 };

/* Inner products of vectors, with which any few of them can be fitted to another. */
typedef struct ari_products {
    size_t n;
    double of[ARI_MOST_VECTORS][ARI_MOST_VECTORS];
} ari_products;
/** Adds one element of each of p->n vectors. */
void ari_products_add(ari_products *p, const double *x);

/* Tensors that a module may have read, and their rows of a probe's tokens. */
typedef struct ari_near {
    const ar_dump_tensor *of[ARI_MOST_NEAR];
    size_t n, width;
    float *x; /* [n][tokens][width] */
} ari_near;
/** Chooses the tensors of `width` features if n is 0, and reads them by name from a dump; those that it lacks are 0.
 *  Errors: those of reading, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_near_read(ari_near *near, const ari_probe *p, size_t width, const ar_dump *dump);
/** Adds feature i of token k, and behind them `more` other vectors that x has there. */
void ari_near_multiply(ari_products *out, const ari_near *near, size_t tokens, size_t k, size_t i, double *x,
                       size_t more);

/* The sum of some of the first vectors, each times a number. */
typedef struct ari_terms {
    size_t terms, of[ARI_MOST_TERMS];
    double times[ARI_MOST_TERMS], left; /* left: share of the squares */
} ari_terms;
/** Finds the sum of s->terms vectors s->of that is nearest to vector y in each of `groups`, each with a factor of its
 *  own if there are several: the first number is then 1 or -1. `with` may be added any number of times; SIZE_MAX: none.
 *  Fills the numbers and the residual; HUGE_VAL: no single solution, or contradictory groups. */
void ari_terms_fit(ari_terms *s, const ari_products *p, size_t groups, size_t y, size_t with);
/** Finds a sum of at most `most` of the first n vectors that leaves at most `allowed`: among those with the fewest
 *  terms the one that shares most terms with `like` (NULL: none), then the nearest. */
bool ari_terms_find(ari_terms *s, const ari_products *p, size_t groups, size_t y, size_t with, size_t n, size_t most,
                    double allowed, const ari_terms *like);
/** The number of terms of `a` in `b`. */
size_t ari_terms_shared(const ari_terms *a, const ari_terms *b);
/** States "1.4 layers.0:fwd + layers.1.attn:fwd". */
void ari_terms_say(ari_trace *t, const char *fact, const ari_terms *s, const ar_dump_tensor *const *near);
