/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/tensor.h"
#include "anyrank/verify.h"
#include "ref/core/axis.h"
#include "ref/core/size.h"

/* Reports where a tensor differs from its reference and what leaves such a trace: measures look at the values, the
 * layouts, the name and the pass, and at nothing else; one table (causes.c, causes.md) gives each trace's cause. */

typedef struct ari_diagnosis {
    char pattern[256]; /* where: how many elements, of which ranks, samples, tokens, features; what they look like */
    char hint[512];    /* the cause's sentence, with its numbers */
    ar_evidence evidence;
} ari_diagnosis;

/* --- the copies of N ranks ---------------------------------------------------------------------------------------- */

/* One rank's part: contiguous, row-major in the local shape. */
typedef struct ari_rank_copy {
    const float *local; /* NULL is fine where the layout has no element */
    size_t shape[AR_MAX_DIMS];
    int ndim;
    const ar_layout *layout; /* all ranks': of the full tensor's shape, or of one other of the same count, [b, s, H, d]
                                for [b, s, H*d] */
} ari_rank_copy;

/* One parameter's right gradient: the sum of its squares, and of those that all ranks of a stage with each
 * tensor-parallel coordinate hold. */
typedef struct ari_gradient {
    const char *name; /* models.md, without the pass */
    int ndim;
    double square;
    const double *held; /* [tp] */
} ari_gradient;

/* Fields from `allowed` on may be left zero: what is not known is not used. */
typedef struct ari_difference {
    const char *name;    /* models.md, without the pass: "model.layers.3.mlp.down_proj" */
    char pass;           /* 'i' initial, 'f' forward, 'b' backward, 'g' gradient of a parameter, 'c' clipping, 'n' new
                            weights, 'w' weights of no known step, '?' not known */
    int ndim;            /* 0 .. AR_MAX_DIMS */
    const size_t *shape; /* [ndim], of the full tensor */
    const float *reference;       /* the full tensor, row-major */
    int ranks;                    /* N >= 1 */
    const ari_rank_copy *copy;    /* [ranks] */
    double allowed;               /* largest |difference| that is none; 0: equal bits or different */
    double noise;                 /* largest |value| that rounding makes of a zero */
    const float *beside;          /* allowed in addition, for each element; NULL: nothing */
    int step;                     /* 1, 2, .. */
    ari_ranks mesh;               /* the layout; all 0: not known, all ranks are taken for tensor-parallel ones */
    int first_rank;               /* what `copy` begins with */
    bool pipeline;                /* whose copies may be those of one pipeline rank (ari_narrow_to_stage) */
    int micro_batches;            /* of each rank; 0: one */
    bool forward_first;           /* all micro-batches go forward before the first goes back */
    bool recomputed;              /* the backward pass computes forward passes of blocks, or of attentions, again */
    bool sp;                      /* positions are spread over tp between the tensor-parallel regions */
    size_t batch, seq;            /* of the run */
    const int64_t *ids;           /* [batch, seq] of this step, or NULL */
    const int32_t *documents;     /* [batch, seq] of this step, or NULL: each row is one document */
    size_t head_dim;              /* of a tensor whose features are heads side by side */
    const float *before;          /* of new weights: the reference's before the step, or NULL */
    const float *last;            /* of a gradient: the reference's of the step before, or NULL */
    const ari_gradient *gradient; /* [gradients] of a gradient norm: those of the step, all right; NULL: not known */
    size_t gradients;
    const ar_dump *dump; /* the reference's tensors, this one (dump_tensor) among them; NULL: not known */
    const ar_dump_tensor *dump_tensor;
    const ar_dump *gradients_here; /* this run's own gradients, by the names of `dump`; NULL: not known */
    double beta1, beta2;           /* of Adam; both 0: another optimizer */
    bool zero;                     /* each dp rank updates its share of the weights */
    bool gathers;                  /* and they are gathered for each use */
    bool exact;                    /* sums have the same bits in any order: no difference is rounding */
    bool unsteady;                 /* another run of the same layout had other values */
    bool hidden;                   /* the only rank represents a run whose ranks are unknown */
} ari_difference;

/** Fills *out; texts that do not fit end in "...". The same input gives the same text.
 *  Memory:  borrows `given` until return; needs about count/8 bytes, 20 bytes a column and 8 bytes an index of each
 *           dimension, and up to 16 bytes an element of one sample and 8 of one rank's copy.
 *  Errors:  AR_ERR_ARG (a layout that is not the tensor's, a box outside it, no ranks), AR_ERR_OVERFLOW, AR_ERR_MEMORY.
 *           On error *out is untouched.
 *  Threads: safe. */
AR_NODISCARD ar_status ari_diagnose(ari_diagnosis *out, const ari_difference *given);

/* --- a tensor of two dumps ---------------------------------------------------------------------------------------- */

/* Adam divides a gradient by its own size: if a gradient is rounding, its weight moves by a whole step either way. The
 * difference of two runs' gradients bounds that of their weights (numerics.md, section 7), whatever the decay rates of
 * the moments: with y the largest |other - reference|/|reference| of an element's gradients so far, each step separates
 * it by at most 2 R min(1, y/(1 - y)), where R is the most that any weight moved in that step. */
enum { ARI_DOUBT_STEPS = 64 };
typedef struct ari_doubt {
    const ar_dump_tensor *grad[ARI_DOUBT_STEPS][2]; /* of the reference, of the other */
    double reach[ARI_DOUBT_STEPS];                  /* R */
    int steps;
    /* Of an output of a later step: |db_j|, and |dw_j| times the size of the input in parts of that of the output's row,
     * of the weights that it is made with; NULL: none. And what is explained of tensors before it, of all elements. */
    double *bias, *weight; /* [width] */
    double *row;           /* [rows] sizes */
    double all, most;      /* most: of an element, by the weights */
    size_t width;          /* 0: of weights */
} ari_doubt;
/** The reference's R of a step; 0 if it lacks the weights before or after it. Errors: those of reading. */
AR_NODISCARD ar_status ari_doubt_reach(double *reach, const ar_dump *reference, int step);
/** The largest root mean square of a gradient of the reference in a step; 0: it has none. Errors: those of reading. */
AR_NODISCARD ar_status ari_doubt_gradient(double *rms, const ar_dump *reference, int step);
/** Of an output y = W x + b of a later step, whose weights are those of both dumps before it; NULL: none. In the arena.
 *  Errors: those of reading; AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_doubt_output(ari_doubt *d, const ar_dump_tensor *output, const ar_dump_tensor *const *weight,
                                        const ar_dump_tensor *const *bias, ari_arena *arena);
/** beside[i]: the amount that element start + i may be off because of what is known. Errors: those of reading. */
AR_NODISCARD ar_status ari_doubt_read(double *beside, const ari_doubt *d, size_t start, size_t n);
/** A tensor of a step by what its name begins with, n bytes, and its kind ("grad"); NULL. */
const ar_dump_tensor *ari_tensor_of_step(const ar_dump *d, const char *stem, size_t n, const char *kind, int step);
/** A parameter before the step; NULL. */
const ar_dump_tensor *ari_weight_before(const ar_dump *d, const char *stem, size_t n, int step);
/** Of new weights what they were, of a gradient that of the step before; NULL. */
const ar_dump_tensor *ari_tensor_before(const ar_dump *d, const char *stem, char pass, int step);

/** For qsort: of doubles, the smallest first. */
int ari_by_value(const void *a, const void *b);

/** True if two tensors have the same shape. */
bool ari_same_shape(const ar_dump_tensor *a, const ar_dump_tensor *b);

/* Context of the tensor. All fields may be left zero. */
typedef struct ari_explain_case {
    const ar_dump *reference, *other; /* for values that are another tensor's; NULL: the tensor alone */
    double atol, rtol;                /* an element may differ by atol + rtol*|reference| without being different; both
                                         0: equal bits or different */
    ari_ranks mesh;                   /* of the other run; 0: not known */
    size_t heads, kv_heads;           /* of the model; 0: not known */
    const ari_doubt *doubt;           /* of new weights; NULL: none */
    const ar_verify_facts *facts;     /* what ari_facts_of gives for the same dumps; NULL: to be found again */
} ari_explain_case;
/** The count that was divided by, if the factor is that of another one than the targets; 0: of none, or of one that a
 *  factor cannot tell. */
size_t ari_counted_of(double factor, size_t targets);
/** Goes through both dumps; facts that follow from their rows are left 0. */
ar_verify_facts ari_facts_of(const ari_explain_case *c);

/* A tensor with more elements than the first is sampled, at up to twice the second. */
#define ARI_EXPLAIN_ELEMENTS ((size_t)1 << 22)
#define ARI_EXPLAIN_SAMPLED ((size_t)1 << 20)

/* Every n-th index of a tensor's dimensions as a tensor. Blocks, heads, shards and their order are preserved, only
 * smaller, and so is every rank's part: its box is that of the sampled elements in it. */
typedef struct ari_sample {
    ar_dump_tensor tensor;
    ar_dump_part *part;
    ar_dump_box *box;
} ari_sample;
/* The step along each dimension (1: every index) that leaves at most `most` elements. The largest dimensions are
 * thinned first, equal ones together, by powers of two. */
void ari_sample_steps(size_t *step, const ar_dump_tensor *t, size_t most);
/* Borrows the tensor, which has parts. In the arena. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_sample_init(ari_sample *s, const ar_dump_tensor *t, const size_t *step, ari_arena *arena);
/* The tensor with its dimensions of one index repeated until it has this shape. In the arena. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_repeated_init(ari_sample *s, const ar_dump_tensor *t, const size_t *shape, ari_arena *arena);

/* The tensor with its samples, t->sample_rows rows along dimension 0 each, in another order: sample i becomes sample
 * place[i]. In the arena. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_reordered_init(ari_sample *s, const ar_dump_tensor *t, const size_t *place,
                                          ari_arena *arena);

/** The ranks of a dump's mesh: dimensions are recognised by the beginnings of their names, from the innermost on; the
 *  outermost may be a pipeline's, and all others are of samples. Unchanged if the dump states no mesh. */
void ari_mesh_of(ari_ranks *mesh, const ar_dump *d);

/** Fills row->pattern, row->hint and row->evidence. Of the row it reads name, pass, step and first. Where the other
 *  dump is of ranks, their parts are looked at one by one; where it is whole, its layout is found from the data. The
 *  same tensors give the same texts.
 *  Memory: up to 40 bytes an element of at most ARI_EXPLAIN_ELEMENTS, and 16 for those of all ranks; 80 bytes for each
 *          class of elements that is fitted: an index of a dimension, a row, or a shard of a row. Of larger tensors
 *          a sample of every dimension's indices is looked at, which shows blocks, heads and shards, and a stretch of
 *          rows around the first difference, which shows neighbours; what says more is reported, and the text says
 *          which.
 *  Errors: AR_ERR_ARG (other shapes: there is nothing to compare), AR_ERR_MEMORY, those of ar_dump_read_f32. On error
 *          the row is untouched.
 *  Threads: safe for other rows. */
AR_NODISCARD ar_status ari_explain(ar_verify_row *row, const ar_dump_tensor *reference, const ar_dump_tensor *other,
                                   const ari_explain_case *c);
