/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_DIAGNOSE_EXPLAIN_IMPL_H
#define ARI_VERIFY_DIAGNOSE_EXPLAIN_IMPL_H

/* Inside the explanation: a tensor of two dumps as one rank that holds all of it, and the seekers. A seeker knows a
 * relation between the other's values and the reference's that needs no ranks: it looks, and either stays silent or
 * states a finding with a confidence, as the detectors of verify/diagnose/pattern_impl.h do. */
#include "verify/diagnose/explain.h"
#include "verify/diagnose/pattern_impl.h"

/* What the dumps tell of the run; 0: not told. */
typedef struct ari_facts {
    size_t heads, kv_heads, batch, seq;
    bool sp; /* ranks hold different positions between the tensor-parallel regions */
} ari_facts;
ari_facts ari_facts_of(const ari_explain_case *c);
/* The ids of the batch, where a dump has them; NULL. */
const ar_dump_tensor *ari_find_ids(const ari_explain_case *c);

typedef struct ari_whole {
    ari_case view; /* one rank that holds all: which elements differ */
    const float *ref, *val;
    size_t count;
    double absolute,
        relative;   /* what a relation may be off by, of rounding on both sides: absolute + relative*|value| */
    double max_ref; /* largest finite |reference| */
    bool inner;     /* a box of the tensor alone: sizes of heads and of packed parts do not apply */
    bool noisy;     /* elements that do not count as different differ in bits nevertheless */
    const ari_explain_case *known;
    ari_facts facts;
    const ar_dump_tensor *reference, *other;
    const char *path;           /* of the other dump, for passes of names */
    size_t start;               /* of the first element in the full tensor */
    const size_t *step;         /* of a sample of the tensor: which index of each dimension is taken; NULL: every one */
    const ar_dump_tensor *full; /* of which `reference` is a sample, or the same */
} ari_whole;

typedef ar_status (*ari_seeker)(ari_clue *f, const ari_whole *w);

/* Whether a value is what a relation says, but for rounding. */
static inline bool ari_holds(const ari_whole *w, float value, double expected)
{
    const double v = (double)value;
    if (isnan(v) || isnan(expected))
        return isnan(v) && isnan(expected);
    return v == expected || fabs(v - expected) <= w->absolute + (w->relative + 0x1p-21) * fabs(expected);
}

/* Whether a relation explains the differences: what it leaves is small beside them. Where all is within a few times
 * rounding, any relation holds to rounding. */
static inline bool ari_explains(const ari_whole *w, double worst_left)
{
    return !(worst_left > 0.2 * w->view.survey.total.max_difference);
}

/* Whether element i counts as different. */
static inline bool ari_off(const ari_whole *w, size_t i)
{
    return ari_survey_bit(&w->view.survey, i);
}

/* Sums over elements that differ (explain_factor.c). */
typedef struct ari_factor_sums {
    double vr, rr, vv;
    size_t n;
} ari_factor_sums;
static inline double ari_factor_of(const ari_factor_sums *s)
{
    return s->vr / s->rr;
}
static inline bool ari_is_near(double a, double b)
{
    return fabs(a - b) <= 2e-5 * fabs(b);
}
enum { ARI_MOST_RANKS = 64 };

/* --- words (explain_words.c) -------------------------------------------------------------------------------------- */

/* Elements of a head along a dimension; 0: no heads lie there, or their size is not known. */
size_t ari_head_size(const ari_whole *w, int dim);
/* Whether heads lie along a dimension, known or not. */
bool ari_has_heads(const ari_whole *w, int dim);
/* Parts packed one after the other along a dimension: "q", "k", "v"; "gate", "up"; returns how many, 0: none. `size`
 * of each in elements. */
int ari_packed(const ari_whole *w, int dim, const char *part[3], size_t size[3]);
/* The range of indices along a dimension that hold all differences. */
void ari_hull(const ari_whole *w, int dim, size_t *from, size_t *to);
/* Of [from, to) in n: the fewest even blocks of which it is one; 0: it is none. */
size_t ari_block_of(size_t n, size_t from, size_t to, size_t *which);
/* Appends what part of the tensor the differences are in: shard, heads, which of q|k|v; nothing if it is all of it. */
void ari_say_part(ari_text *t, const ari_whole *w);
/* "rows", "tokens", "ids". */
const char *ari_axis_name(const ari_whole *w, int dim, bool plural);
/* The pass of another tensor of the dumps. */
char ari_pass_of(const ari_whole *w, const char *name);
/* "bit for bit", or "to within 3.1e-06 of the largest value" for the largest that is off. */
void ari_say_exactness(ari_text *t, const ari_whole *w, double worst);

/* --- seekers ------------------------------------------------------------------------------------------------------ */

ar_status ari_seek_order(ari_clue *f, const ari_whole *w);      /* explain_order.c: slices in another place */
ar_status ari_seek_transposed(ari_clue *f, const ari_whole *w); /* explain_move.c: all of the data in another place */
ar_status ari_seek_shift(ari_clue *f, const ari_whole *w);
ar_status ari_seek_factor(ari_clue *f, const ari_whole *w); /* explain_factor.c: times a number */
ar_status ari_seek_scales(ari_clue *f, const ari_whole *w); /* explain_scales.c */
ar_status ari_seek_loss(ari_clue *f, const ari_whole *w);
ar_status ari_seek_bits(ari_clue *f, const ari_whole *w); /* explain_value.c: a function of each value */
ar_status ari_seek_precision(ari_clue *f, const ari_whole *w);
ar_status ari_seek_function(ari_clue *f, const ari_whole *w);
ar_status ari_seek_zero(ari_clue *f, const ari_whole *w);
ar_status ari_seek_dropped(ari_clue *f, const ari_whole *w); /* explain_drop.c */
ar_status ari_seek_rope(ari_clue *f, const ari_whole *w);    /* explain_rope.c */
ar_status ari_seek_added(ari_clue *f, const ari_whole *w);   /* explain_added.c: something was added */
ar_status ari_seek_other(ari_clue *f, const ari_whole *w);   /* explain_other.c: another tensor's values */
ar_status ari_seek_sum(ari_clue *f, const ari_whole *w);     /* another tensor added */
ar_status ari_seek_ids(ari_clue *f, const ari_whole *w);     /* explain_ids.c: rows of a vocabulary */
ar_status ari_seek_mask(ari_clue *f, const ari_whole *w);    /* explain_place.c: where, and how much */
ar_status ari_seek_share(ari_clue *f, const ari_whole *w);
ar_status ari_seek_norm(ari_clue *f, const ari_whole *w);
ar_status ari_seek_place(ari_clue *f, const ari_whole *w);
ar_status ari_seek_noise(ari_clue *f, const ari_whole *w);

/* --- ranks -------------------------------------------------------------------------------------------------------- */

/* explain_ranks.c: the copies of the ranks of a dump. */
typedef struct ari_rank_copies {
    int ranks, tp, dp;
    ari_rank_copy *copy; /* [ranks]; NULL: the dump is no ranks', or their parts are no copies of boxes */
    ar_layout *layout;   /* [ranks] */
    float *data;
} ari_rank_copies;
AR_NODISCARD ar_status ari_rank_copies_of(ari_rank_copies *out, const ar_dump_tensor *t, const ari_explain_case *c);
void ari_rank_copies_fini(ari_rank_copies *r);

#endif
