/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A hypothesis states what the other tensor is: the reference times 2, another rank's shard, the rows of the step
 * before. A measure (case.h) generates those of one kind and fits their numbers; one engine compares the values that
 * each expects with the actual ones, by one rule of rounding, and computes how much of the differences it explains. */
#include "verify/diagnose/case.h"

typedef struct ari_hypothesis ari_hypothesis;
struct ari_hypothesis {
    /* The expected value of element i of a run; NAN: unspecified. */
    double (*expect)(const ari_hypothesis *h, const ari_run *run, size_t i);
    const ari_case *c;
    const void *of;       /* further input of the generator */
    double factor;        /* what the reference's own rounding is multiplied by in what is expected; 0: by one */
    double beside;        /* what rounding of the sums that are expected adds to the case's allowance */
    size_t may_miss;      /* different elements that may deviate before the engine gives up */
    bool differs_only;    /* speaks of elements that differ alone, whatever `expect` gives for others */
    ari_trace_kind kind;  /* of the trace under which a near miss is noted (ari_consider); 0: it is not */
    ari_properties flags; /* of that trace */
};

/* Residual of a hypothesis. */
typedef struct ari_residual {
    size_t held;   /* elements that differ and are as expected */
    size_t missed; /* that differ and are not, or of which nothing is said */
    size_t broken; /* that do not differ, where something else is expected */
    double worst;  /* largest |value - expected| of those held */
    double left;   /* sum of (value - expected)^2 over what differs; where nothing is said, of (value - reference)^2 */
    double all;    /* sum of (value - reference)^2 over what differs */
} ari_residual;

/** Over all copies; ends early, with missed > may_miss, if too many deviate. */
ari_residual ari_residual_of(const ari_hypothesis *h);
/** True if every difference is as expected, nothing else is contradicted, and the residual is small compared to the
 *  differences: if all differences are a few roundings, any hypothesis holds. */
bool ari_explains_all(const ari_residual *r, const ari_case *c);
/** Both in one; *r may be NULL. */
bool ari_holds_all(ari_residual *r, const ari_hypothesis *h);
/** An `expect`: `of` has the full tensor's values, floats. */
double ari_expect_values(const ari_hypothesis *h, const ari_run *run, size_t i);
/** States how much of the differences the trace explains. */
void ari_explained(ari_trace *t, const ari_residual *r);

/* --- least squares ------------------------------------------------------------------------------------------------ */

/* A fit that leaves more than this share of the squares has failed: fp32 sums leave far less. */
#define ARI_FIT 1e-6
/* The factor of an update is known to a thousandth, as the weights' rounding hides the rest; that of moments, and a
 * part of a gradient, to a tenth of that. */
#define ARI_KNOWN 1e-3
#define ARI_SEEN 1e-4
/* The share of squares that a fit may leave if its terms are recomputed from rounded values. */
#define ARI_UNFITTED 1e-4

/* y = p*a + q*b. */
typedef struct ari_fit {
    double yy, ya, yb, aa, ab, bb;
    size_t n;
} ari_fit;

static inline void ari_fit_add(ari_fit *f, double y, double a, double b)
{
    f->yy += y * y, f->ya += y * a, f->yb += y * b, f->aa += a * a, f->ab += a * b, f->bb += b * b;
    f->n++;
}

/** The fit of the values by the reference, over the elements that differ. */
static inline ari_fit ari_fit_of(const ari_tally *t)
{
    return (ari_fit){.yy = t->vv, .ya = t->vr, .aa = t->rr, .n = t->different};
}

/** By a alone; returns the share of y's squares that is left, NaN where there is nothing to fit. */
double ari_fit_one(double *p, const ari_fit *f);
/** By both; where a and b are one direction, or b adds nothing, by a alone with *q 0. */
double ari_fit_two(double *p, double *q, const ari_fit *f);
/** Six standard errors of p of ari_fit_one, relative to it: what noise leaves unknown of a fitted factor. */
double ari_fit_unsure(const ari_fit *f);
/** True if y is a times a number, up to the rounding of y and, scaled by the number, of a: the residual's squares are
 *  little more than those of sums in another order and the case's allowance. */
bool ari_is_multiple(const ari_case *c, const ari_fit *f);
/** Least squares in n numbers: adds an element of y to the normal equations m, [n + 1][n + 1] and zero at first: the
 *  products of its n terms and, last, of y. x holds them. */
void ari_equations_add(double *m, const double *x, size_t n);
/** Overwrites m; returns what is left of y's squares, HUGE_VAL: the equations do not determine some number. */
double ari_equations_solve(double *number, double *m, size_t n);
/** Adds elements [from, from + n) of two tensors: y of the one, a of the other. Errors: those of reading. */
AR_NODISCARD ar_status ari_fit_read(ari_fit *f, const ar_dump_tensor *y, const ar_dump_tensor *a, size_t from,
                                    size_t n);

/* --- tensors side by side ----------------------------------------------------------------------------------------- */

enum { ARI_MOST_BESIDE = 14, ARI_BESIDE_AT_ONCE = 512 };
/* A walk over elements [from, from + n) of up to ARI_MOST_BESIDE tensors; of one that is NULL all are 0. */
typedef struct ari_beside {
    const ar_dump_tensor *const *tensor;
    int tensors;
    size_t from, n;
    size_t at;                 /* of the n, which element it is */
    double x[ARI_MOST_BESIDE]; /* x[k] of the k-th tensor */
    ar_status status;          /* of reading, which ends the walk where it fails */
    double read[ARI_MOST_BESIDE][ARI_BESIDE_AT_ONCE];
} ari_beside;
/** Before the first: ari_beside b = ari_beside_of(..); while (ari_beside_next(&b)) .. AR_TRY(b.status); */
ari_beside ari_beside_of(const ar_dump_tensor *const *tensor, int tensors, size_t from, size_t n);
bool ari_beside_next(ari_beside *b);

/* --- shared by measures ------------------------------------------------------------------------------------------- */

/* Names a factor that no size of the run explains, by properties and the fact "name": a power of 2, an integer (the
 * fact "n"), its root, the inverse of one, a fraction of small numbers or of the targets (0: not known); `apart` is the
 * uncertainty. */
void ari_name_number(ari_trace *t, double factor, double apart, size_t targets);

/* The number of elements for which `is` holds, if they are scattered: clustered along no dimension beyond chance; else
 * 0. */
size_t ari_scattered(const ari_case *c, bool (*is)(const ari_case *c, size_t i));

/* Finds a tensor of the dumps of which the n numbers are a multiple, and the factor; NULL: none. If n is the case's
 * number of elements, tensors of its shape are searched. Errors: AR_ERR_MEMORY, those of reading. */
AR_NODISCARD ar_status ari_find_multiple(const ar_dump_tensor **found, double *factor, const ari_case *c,
                                         const double *wanted, size_t n);

/* Names the factor of an update by a property and the facts "as" and "step". Errors: those of reading. */
AR_NODISCARD ar_status ari_name_update(ari_trace *t, const ari_case *c, double factor);

/* A single value's range over the ranks; returns their mean. */
double ari_value_range(double *low, double *high, const ari_case *c);
