/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_DIAGNOSE_PATTERN_IMPL_H
#define ARI_VERIFY_DIAGNOSE_PATTERN_IMPL_H

/* Inside the pattern engine: one walk over the data that all parts share, what a first walk found (the survey), and the
 * detectors. A detector knows one trace; it looks, and either stays silent or states a finding with a confidence. */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "ref/core/text.h"
#include "verify/diagnose/pattern.h"

/* --- the walk ----------------------------------------------------------------------------------------------------- */

/* The full tensor as rows of its last dimension; ndim 0 is one row of one element. */
typedef struct ari_grid {
    const ari_difference *d;
    int nd; /* at least 1 */
    size_t shape[AR_MAX_DIMS];
    size_t rows, cols, count;
} ari_grid;

/* Consecutive elements of one row that one rank holds in one box. */
typedef struct ari_run {
    int rank;
    size_t box, row, col, count;
    size_t index; /* of the first element, in the full tensor */
    size_t at;    /* of the first element, in the local tensor */
    const float *ref, *value;
} ari_run;

/* Rows from first to last, in a row the ranks, of a rank the boxes: one order, whatever the shape. */
typedef struct ari_runs {
    const ari_grid *g;
    int rank, only; /* only: this rank's runs alone; -1: all */
    size_t row, box;
} ari_runs;

ari_runs ari_runs_of(const ari_grid *g);
ari_runs ari_runs_of_rank(const ari_grid *g, int rank);
bool ari_runs_next(ari_runs *it, ari_run *run);

/* Index along dimension `dim` (0 .. nd-1) of element `index` of the full tensor. */
size_t ari_grid_index(const ari_grid *g, size_t index, int dim);

static inline bool ari_same_bits(float a, float b)
{
    uint32_t x, y;
    memcpy(&x, &a, sizeof x);
    memcpy(&y, &b, sizeof y);
    return x == y;
}

/* Whether element i of a run differs: other bits, and further away than allowed. */
static inline bool ari_run_differs(const ari_grid *g, const ari_run *run, size_t i)
{
    if (ari_same_bits(run->ref[i], run->value[i]))
        return false;
    const ari_difference *d = g->d;
    const double allowed = d->allowed + (d->beside ? (double)d->beside[run->index + i] : 0.0);
    return !(allowed > 0.0) || !(fabs((double)run->value[i] - (double)run->ref[i]) <= allowed);
}

/* --- the survey --------------------------------------------------------------------------------------------------- */

/* Counts and sums over the elements that differ, but for `held` and `kept`. */
typedef struct ari_tally {
    size_t held, different;
    size_t kept;   /* no difference, and the reference is not zero (a zero can be right by accident) */
    size_t nan;    /* NaN where the reference has none */
    size_t zero;   /* zero where the reference is not */
    size_t gained; /* not zero where the reference is */
    size_t coarse; /* 13 low mantissa bits zero, within 2^-7 of the reference: a value that was stored in 16 bits */
    double vv, vr, rr, dd; /* sums of value^2, value*reference, reference^2, (value-reference)^2 */
    double max_difference, max_relative;
} ari_tally;

typedef struct ari_survey {
    size_t different;  /* elements of the full tensor that differ on some rank */
    size_t shared;     /* elements that several ranks hold */
    size_t disagree;   /* of those, where the copies differ from each other */
    bool whole;        /* every rank holds every element */
    bool product;      /* the different elements are all combinations of an index set per dimension */
    int wrong_ranks;   /* ranks with a difference */
    int holding_ranks; /* ranks that hold anything but zeros that are right: those say nothing */
    double max_reference;
    size_t *hits[AR_MAX_DIMS]; /* [shape[dim]]: how many different elements have this index */
    size_t hit[AR_MAX_DIMS];   /* how many indices of a dimension have any */
    uint8_t *bits;             /* one bit an element: differs */
    ari_tally total, *rank;    /* [ranks] */
} ari_survey;

static inline bool ari_survey_bit(const ari_survey *s, size_t index)
{
    return ((unsigned)s->bits[index / 8] >> (index % 8)) & 1u;
}

/* Of the angle between values and reference, over the elements that differ; NaN if either is all zero. */
double ari_cosine(const ari_tally *t);

ar_status ari_grid_init(ari_grid *g, const ari_difference *d);
ar_status ari_survey_init(ari_survey *s, const ari_grid *g);
void ari_survey_fini(ari_survey *s);

/* --- the mesh ----------------------------------------------------------------------------------------------------- */

/* Ranks along tp and dp; where the layout is not known or is none, all along tp. */
int ari_tp_of(const ari_difference *d);
int ari_dp_of(const ari_difference *d);

typedef enum ari_over { ARI_OVER_TP, ARI_OVER_DP, ARI_OVER_BOTH } ari_over;
/* "tp", "dp", "tp and dp". */
const char *ari_over_name(ari_over over);
/* Along which groups copies of one part differ from each other. */
ari_over ari_apart_over(const ari_difference *d);
/* Groups of a kind, and whether a rank is in group `key` of them: of the tensor-parallel ones the key is the dp rank,
 * of the data-parallel ones the tp rank; both: one group of all ranks. */
int ari_groups(const ari_difference *d, ari_over over);
bool ari_in_group(const ari_difference *d, int rank, ari_over over, int key);

/* What ari_one_group made. */
typedef struct ari_group_view {
    ar_layout *layout;
    ari_rank_copy *copy; /* NULL: nothing was made */
    size_t shape[AR_MAX_DIMS];
} ari_group_view;
/* The difference as the tensor-parallel group of `rank` sees it: its ranks alone, of an activation its samples alone.
 * Leaves view->copy NULL where there is one group only, or the group's ranks hold unlike samples. Errors:
 * AR_ERR_MEMORY. */
ar_status ari_one_group(ari_difference *out, ari_group_view *view, const ari_difference *d, int rank);
void ari_group_view_fini(ari_group_view *view);

/* --- text --------------------------------------------------------------------------------------------------------- */

/* "rank 2", "ranks 1, 3", "ranks 0..3"; `in` says of each rank whether it is meant. */
void ari_say_ranks(ari_text *t, int ranks, bool (*in)(const void *, int), const void *user);
/* "token 17", "tokens 3..9", "samples 1 onward", "features 0..3, 8..11, ..."; indices with hits along a dimension. */
void ari_say_indices(ari_text *t, const ari_grid *g, const ari_survey *s, int dim);
/* What an index along `dim` is called: "token"; plural: "tokens". */
const char *ari_dim_name(const ari_grid *g, int dim, bool plural);
/* The line that says where; `value` is what the elements look like, "" if nothing is to be said. */
void ari_say_where(ari_text *t, const ari_grid *g, const ari_survey *s, const char *value);

/* Whether the name, or its last path component, contains `part` (lower case). */
bool ari_name_has(const ari_difference *d, const char *part);
bool ari_leaf_has(const ari_difference *d, const char *part);
bool ari_is_norm(const ari_difference *d);
/* Whether it is the output, the weight or the bias of a row-parallel layer. */
bool ari_is_row_parallel(const ari_difference *d);
bool ari_is_embedding(const ari_difference *d);
/* Whether the last dimension of this activation is heads side by side. */
bool ari_is_by_heads(const ari_difference *d);

/* --- detectors ---------------------------------------------------------------------------------------------------- */

/* How much a finding says: the most specific one is told. Two of a kind: the first in the table of pattern.c. */
enum ari_confidence {
    ARI_SILENT = 0,
    ARI_LAST_RESORT = 10, /* nothing but the pass and the name */
    ARI_PLACE = 30,       /* where it is suggests a cause */
    ARI_STATISTIC = 40,   /* a number computed over all elements does */
    ARI_SHAPE = 60,       /* a structure in the values, several causes possible */
    ARI_TRACE = 80,       /* the trace of one kind of mistake */
    ARI_IDENTITY = 90     /* an equation with the reference that holds element by element */
};

typedef struct ari_clue {
    int confidence;
    char value[128]; /* for the pattern: what the elements look like */
    char hint[512];
} ari_clue;

typedef struct ari_case {
    ari_grid grid;
    ari_survey survey;
} ari_case;

/* Leaves f as it is where it has nothing to say. Errors: AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
typedef ar_status (*ari_detector)(ari_clue *f, const ari_case *c);

/* States a finding; the hint follows with ari_say on what it returns. */
ari_text ari_find(ari_clue *f, int confidence);

/* The best of all detectors, also within one tensor-parallel group. Errors: AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
ar_status ari_best_finding(ari_clue *best, const ari_case *c);

/* pattern_replica.c: copies that should be equal */
ar_status ari_detect_sum(ari_clue *f, const ari_case *c);
ar_status ari_detect_gather(ari_clue *f, const ari_case *c);
ar_status ari_detect_drift(ari_clue *f, const ari_case *c);
/* pattern_shard.c: the right values in the wrong place */
ar_status ari_detect_repeat(ari_clue *f, const ari_case *c);
ar_status ari_detect_order(ari_clue *f, const ari_case *c);
ar_status ari_detect_tail(ari_clue *f, const ari_case *c);
/* pattern_value.c: a relation of each value with its reference */
ar_status ari_detect_nan(ari_clue *f, const ari_case *c);
ar_status ari_detect_factor(ari_clue *f, const ari_case *c);
ar_status ari_detect_zero(ari_clue *f, const ari_case *c);
ar_status ari_detect_mask(ari_clue *f, const ari_case *c);
ar_status ari_detect_rounding(ari_clue *f, const ari_case *c);
/* pattern_vector.c: a difference that repeats from token to token */
ar_status ari_detect_vector(ari_clue *f, const ari_case *c);
ar_status ari_detect_row_factor(ari_clue *f, const ari_case *c);
/* pattern_gradient.c: how much of the reference is in a gradient */
ar_status ari_detect_bias(ari_clue *f, const ari_case *c);
ar_status ari_detect_gradient(ari_clue *f, const ari_case *c);
/* pattern_layout.c: what the layout suggests */
ar_status ari_detect_means(ari_clue *f, const ari_case *c);
ar_status ari_detect_clip(ari_clue *f, const ari_case *c);
ar_status ari_detect_scatter(ari_clue *f, const ari_case *c);
ar_status ari_detect_world_rank(ari_clue *f, const ari_case *c);
/* pattern_last.c: gradients beside those of the step before */
ar_status ari_detect_last(ari_clue *f, const ari_case *c);
/* pattern_update.c: new weights beside the ones before */
ar_status ari_detect_update(ari_clue *f, const ari_case *c);
ar_status ari_detect_decay(ari_clue *f, const ari_case *c);
ar_status ari_detect_share(ari_clue *f, const ari_case *c);
/* pattern_tokens.c: tokens in another order, rows of ids, statistics of a norm */
ar_status ari_detect_tokens(ari_clue *f, const ari_case *c);
ar_status ari_detect_tied(ari_clue *f, const ari_case *c);
ar_status ari_detect_statistic(ari_clue *f, const ari_case *c);
ar_status ari_detect_truncation(ari_clue *f, const ari_case *c);
/* pattern_part.c: what a loss, an embedding, a place suggest */
ar_status ari_detect_loss(ari_clue *f, const ari_case *c);
ar_status ari_detect_rows(ari_clue *f, const ari_case *c);
ar_status ari_detect_place(ari_clue *f, const ari_case *c);
ar_status ari_detect_anything(ari_clue *f, const ari_case *c);

#endif
