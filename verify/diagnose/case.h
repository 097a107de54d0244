/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Inside the diagnosis: one walk over the data that all parts share, what a first walk found (the survey), traces and
 * the measures that find them. */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "anyrank/cause.h"
#include "ref/core/text.h"
#include "verify/diagnose/diagnose.h"
#include "verify/diagnose/roles.h"

/* --- the walk ----------------------------------------------------------------------------------------------------- */

/* The full tensor as rows of its last dimension; ndim 0 is one row of one element. */
typedef struct ari_grid {
    const ari_difference *d;
    int nd; /* at least 1 */
    size_t shape[AR_MAX_DIMS];
    size_t rows, cols, count;
} ari_grid;

/* Consecutive elements of one row that one rank holds in one box; and the walk over them, rows from first to last, in a
 * row the ranks, of a rank the boxes: one order, whatever the shape. */
typedef struct ari_run {
    const ari_grid *g;
    int rank, only; /* only: this rank's runs alone; -1: all */
    size_t box, row, col, count;
    size_t index; /* of the first element, in the full tensor */
    size_t at;    /* of the first element, in the local tensor */
    const float *ref, *value;
} ari_run;

/* Before the first: for (ari_run run = ari_runs_of(g); ari_runs_next(&run);) */
ari_run ari_runs_of(const ari_grid *g);
ari_run ari_runs_of_rank(const ari_grid *g, int rank);
bool ari_runs_next(ari_run *run);

/* Index along dimension `dim` (0 .. nd-1) of element `index` of the full tensor. */
size_t ari_grid_index(const ari_grid *g, size_t index, int dim);
/* The tensor's index of element i of a box with this extent at `from`. */
static inline size_t ari_box_index(const size_t *shape, const size_t *from, const size_t *extent, int ndim, size_t i)
{
    size_t at = 0, stride = 1;
    for (int dim = ndim - 1; dim >= 0; dim--) {
        at += (from[dim] + i % extent[dim]) * stride;
        i /= extent[dim];
        stride *= shape[dim];
    }
    return at;
}
/* Contiguous elements for each index of a dimension. */
size_t ari_grid_inner(const ari_grid *g, int dim);

static inline bool ari_same_bits(float a, float b)
{
    uint32_t x, y;
    memcpy(&x, &a, sizeof x);
    memcpy(&y, &b, sizeof y);
    return x == y;
}

/* True if element i of a run differs: other bits, and further apart than allowed. */
static inline bool ari_run_differs(const ari_grid *g, const ari_run *run, size_t i)
{
    if (ari_same_bits(run->ref[i], run->value[i]))
        return false;
    const ari_difference *d = g->d;
    const double allowed = d->allowed + (d->beside ? (double)d->beside[run->index + i] : 0.0);
    return !(allowed > 0.0) || !(fabs((double)run->value[i] - (double)run->ref[i]) <= allowed);
}

static inline bool ari_run_is_wrong(const ari_grid *g, const ari_run *run)
{
    size_t i = 0;
    while (i < run->count && !ari_run_differs(g, run, i))
        i++;
    return i < run->count;
}

/* --- the survey --------------------------------------------------------------------------------------------------- */

/* Counts and sums over the elements that differ, but for `held` and `kept`. */
typedef struct ari_tally {
    size_t held, different;
    size_t kept;           /* no difference, and the reference is not zero (a zero can be right by accident) */
    size_t nan;            /* NaN where the reference has none */
    size_t zero;           /* zero where the reference is not */
    size_t gained;         /* not zero where the reference is */
    double vv, vr, rr, dd; /* sums of value^2, value*reference, reference^2, (value-reference)^2 */
    double ss;             /* of reference^2 where there is no difference */
    double max_difference, max_relative;
} ari_tally;

typedef struct ari_survey {
    size_t different;  /* elements of the full tensor that differ on some rank */
    size_t shared;     /* elements that several ranks hold */
    size_t disagree;   /* of those, where the copies differ from each other */
    bool whole;        /* every rank holds every element */
    bool product;      /* the different elements are all combinations of an index set per dimension */
    int wrong_ranks;   /* ranks with a difference */
    int holding_ranks; /* ranks with a difference, and those that are right */
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

/* The cosine between values and reference over the elements that differ; NaN if either is all zero. */
double ari_cosine(const ari_tally *t);

/* --- the case ----------------------------------------------------------------------------------------------------- */

/* The ids of the batch, where a dump has them; NULL. */
const ar_dump_tensor *ari_find_ids(const ari_explain_case *c);

/* The document of each of a step's positions [rows, seq], if a dump's metadata (cu_seqlens) or position_ids give a row
 * several; else NULL. In the arena. Errors: AR_ERR_MEMORY, those of reading. */
AR_NODISCARD ar_status ari_find_documents(int32_t **gives, const ari_explain_case *c, size_t rows, size_t seq, int step,
                                          ari_arena *arena);
/* All elements of a tensor. In the arena. Errors: AR_ERR_MEMORY, those of ar_dump_read_f32. */
AR_NODISCARD ar_status ari_read_values(float **gives, const ar_dump_tensor *t, ari_arena *arena);

typedef struct ari_case {
    const ari_difference *d;
    ari_grid grid; /* of d */
    ari_survey survey;
    ari_arena *arena; /* a look's memory; what a measure takes ends with the measure */
    /* The tolerance of a relation, for rounding on both sides: absolute + relative*|value|. */
    double absolute, relative;
    /* One full copy, or that of one rank which may stand for a run whose ranks are unknown; NULL when the copies of
     * several ranks are compared. */
    const float *ref, *val;
    size_t count;
    double max_ref;          /* largest finite |reference| */
    bool inner;              /* a box of the tensor alone: sizes of heads and of packed parts do not apply */
    bool noisy;              /* elements that do not count as different differ in bits nevertheless */
    ar_evidence *considered; /* notes what hypotheses explain; NULL: not noted */
    /* Values of the dumps' tensors; known is never NULL. */
    const ari_explain_case *known;
    ar_verify_facts facts;
    const ar_dump_tensor *reference, *other;
    const char *path;           /* of the other dump, for passes of names */
    ari_order_key own;          /* of `reference`, if there is one */
    ari_role role;              /* of the tensor's module */
    unsigned is;                /* ARI_IS_ bits of its name */
    size_t start;               /* of the first element in the full tensor */
    const size_t *step;         /* of a sample of the tensor: which index of each dimension is taken; NULL: every one */
    const ar_dump_tensor *full; /* of which `reference` is a sample, or the same */
} ari_case;

/* Fills d to survey, own, role and is; the case has its arena, reference and path. Memory in the arena. Errors: those of
 * ari_diagnose. */
AR_NODISCARD ar_status ari_case_init(ari_case *c, const ari_difference *d);

/* fp32 sums in another order differ by some millionths of the largest element, sums of thousands of terms by at most 64
 * units in its last place. An fp32 mean of similar terms, such as a loss, is known better. */
#define ARI_SUMS 1e-5
#define ARI_LONG_SUMS 0x1p-18
#define ARI_OF_A_MEAN 2e-6
/* A value computed by a relation, and the relation's own numbers, are rounded a few times. */
#define ARI_ROUNDINGS 0x1p-21

/* True if a value obeys a relation up to rounding and an absolute tolerance; up to the case's. */
static inline bool ari_holds_within(const ari_case *c, double v, double expected, double absolute)
{
    if (!isfinite(v) || !isfinite(expected))
        return v == expected || (isnan(v) && isnan(expected));
    return fabs(v - expected) <= absolute + (c->relative + ARI_ROUNDINGS) * fabs(expected);
}
static inline bool ari_holds(const ari_case *c, float value, double expected)
{
    return ari_holds_within(c, (double)value, expected, c->absolute);
}

/* True if element i counts as different. */
static inline bool ari_off(const ari_case *c, size_t i)
{
    return ari_survey_bit(&c->survey, i);
}

static inline bool ari_row_differs(const ari_case *c, size_t row)
{
    size_t i = row * c->grid.cols;
    const size_t end = i + c->grid.cols;
    while (i < end && !ari_off(c, i))
        i++;
    return i < end;
}

static inline bool ari_is_near(double a, double b, double relative)
{
    return fabs(a - b) <= relative * fabs(b);
}

static inline bool ari_is_activation(const ari_difference *d)
{
    return d->pass == 'f' || d->pass == 'b';
}

enum { ARI_MOST_RANKS = 64 }; /* that are guessed where they are not seen */

/* A trace is a measure's finding, apart from its wording: a kind, properties and numbers. The table of causes has a row
 * for each trace that is a sign of a cause, and the sentence that the numbers fill. */

/* --- traces ------------------------------------------------------------------------------------------------------- */

/* Kinds of traces. */
/* clang-format off */
#define ARI_KINDS(X) \
    X(ACCUMULATED) X(ACTIVATION) X(ANYTHING) X(ATTENTION) X(AUXILIARY) X(BATCH_ROWS) X(BIAS_AXIS) X(BITS) X(BORDERS) X(CALLS) \
    X(CHOICE) X(CONSTANT_ADDED) X(COUNTS) X(FURTHER_USES) X(SCORES) X(CURVE) X(DECAY) X(DOCUMENTS) X(DROPOUT) \
    X(FILLED) X(FIRST_SAMPLE) X(FUNCTION) X(GRADIENT) X(GRID) X(GROUP) X(HEADS_MOVED) X(INTERLEAVED) X(LAST) \
    X(LATER_TOKENS) X(LEFT_OVER) X(LINEAR) X(LOOKUP) X(LOSS) X(LOSS_OPTIONS) X(MASK) X(MEAN) X(MEANS) X(MIXTURE) \
    X(MUON) X(NAN) X(NOISE) X(NORM) X(NORM_AGAIN) X(OTHER_TENSOR) X(OWN_BLOCK) X(OWN_PART) X(PADDING) X(POOLED) X(POSITIONS) \
    X(PRECISION) X(RANKS_WRONG) X(EDGE_ROWS) X(EPSILON) X(EXTREME) X(EXCHANGED) X(EXPERTS) X(FACTOR) X(RANK_FACTORS) \
    X(RANK_MAJOR) X(REORDERED) X(REPEATED) X(REVERSED) X(ROPE) X(ROTATED) X(ROUNDING) X(ROUTER) X(ROUTES) \
    X(ROWS_ZERO) X(ROW_SHARD_FACTORS) X(SCATTER) X(SHARDS) X(SHARDS_ADDED) X(SHARD_FACTORS) \
    X(SHARD_WRONG) X(SHARE) X(SHARED_EXPERT) X(SHARED_TENSOR) X(SHARE_UPDATE) X(SHIFTED) X(SHIFTED_SLICES) \
    X(SLICE_FACTORS) X(STATE) X(STATISTIC) X(SUM) X(TABLE_ADDED) X(TAIL) X(TARGETS) X(TENSOR_ADDED) X(TRANSPOSED) \
    X(UNGIVEN) X(UNSTEADY) X(UPDATE) X(VECTOR_ADDED) X(WORLD_RANK) X(ZERO) X(ZERO_BLOCK) X(ZIGZAG)
/* clang-format on */
#define ARI_KIND(name) ARI_FOUND_##name,
typedef enum ari_trace_kind { ARI_FOUND_NOTHING, ARI_KINDS(ARI_KIND) } ari_trace_kind;

/* Properties: those of the run and the tensor, which every trace has, then those that measures add. The latter are
 * explained where they are set. */
/* clang-format off */
#define ARI_PROPERTIES(X) \
    X(SEEN) X(HIDDEN) X(DP) X(TP) X(SP) X(APART) X(EQUAL) X(LONE) X(MICRO) X(LATER) X(BATCH) X(MATRIX) X(FINITE) \
    X(ALL) X(ALONE) X(AVERAGE) X(BLOCKS) X(CAUSAL) X(COUNT) X(CUT) X(EVERYWHERE) X(EXCHANGED) X(FEATURES) \
    X(DOCUMENTS) X(FOREIGN) X(FRACTION) X(GATHERED) X(HEADS) X(IDS) X(INVERSE) X(LAST) X(LOG) X(NAMED) X(NEGATIVE) \
    X(OF_BEFORE) X(OF_DP) X(OF_EP) X(OF_GRADIENT) X(OF_INPUT) X(OF_LAYER) X(OF_MICRO) X(OF_MODULE) X(OF_CP) \
    X(OF_SHARDS) X(OF_STEP) X(OF_THETA) X(OF_TP) X(OF_WEIGHT) X(ONE) X(PACKED) X(PADDED) X(PAIRS) X(PERHAPS) \
    X(POWER) X(RECOMPUTED) X(ROOT) X(ROWS) X(SAME) X(SAMPLES) X(SHIFT) X(SOME) X(STAGES) X(TOKENS) X(TWICE) X(ZERO)
/* clang-format on */
#define ARI_PROPERTY(name) ARI_AT_##name,
enum { ARI_PROPERTIES(ARI_PROPERTY) ARI_PROPERTY_COUNT };
__extension__ typedef unsigned __int128 ari_properties; /* a bit each */
_Static_assert(ARI_PROPERTY_COUNT <= 8 * sizeof(ari_properties), "a property is a bit of ari_properties");
#define ARI_IF(name) ((ari_properties)1 << ARI_AT_##name)

enum { ARI_MOST_FACTS = 24 };

/* A number, or some words, that the sentence needs. */
typedef struct ari_fact {
    const char *name; /* static storage */
    enum { ARI_FACT_NUMBER, ARI_FACT_INTEGER, ARI_FACT_TEXT } is;
    double number;
    char text[192];
} ari_fact;

typedef struct ari_cause ari_cause;
typedef struct ari_trace {
    ari_trace_kind kind;
    ari_properties flags;
    int penalty;        /* what the cause's confidence is lowered by */
    bool weighed;       /* it is known how much is left: */
    double unexplained; /* share of the differences' squares that is left */
    size_t facts;
    ari_fact fact[ARI_MOST_FACTS];
    /* By ari_match_cause. */
    const ari_cause *cause;
    int confidence;
    char looks[128], hint[512];
    ar_evidence evidence;
} ari_trace;

/* A fact as it is stated: words, else a count, else a number. */
typedef struct ari_statement {
    const char *name, *text;
    size_t count;
    double number;
} ari_statement;

/* States what was found; facts follow. */
void ari_trace_set(ari_trace *t, ari_trace_kind kind, ari_properties flags);
/* Takes it back. */
void ari_trace_clear(ari_trace *t);
/* Facts, of which the last has no name: ARI_FACTS(t, {"n", .count = ranks}, {"low", .number = low}). */
void ari_facts(ari_trace *t, const ari_statement *facts);
#define ARI_FACTS(t, ...) ari_facts(t, (const ari_statement[]){__VA_ARGS__, {.name = NULL}})
/* Both. */
#define ARI_FINDING(t, kind, flags, ...) (ari_trace_set(t, kind, flags), ARI_FACTS(t, __VA_ARGS__))
void ari_words(ari_trace *t, const char *name, const char *format, ...) AR_PRINTF(3, 4);
/* Words that the caller appends to. */
ari_text ari_list(ari_trace *t, const char *name);
/* A number's value; 0 if it was not stated. */
double ari_value(const ari_trace *t, const char *name);

/* --- causes ------------------------------------------------------------------------------------------------------- */

/* Specificity of a cause: the most specific one is reported, and between two of a kind the first measure's. */
enum ari_confidence {
    ARI_SILENT = 0,
    ARI_LAST_RESORT = 10, /* nothing but the pass and the name */
    ARI_PLACE = 30,       /* its place suggests a cause */
    ARI_STATISTIC = 40,   /* a number computed over all elements does */
    ARI_SHAPE = 60,       /* a structure in the values, several causes possible */
    ARI_TRACE = 80,       /* the trace of one kind of fault */
    ARI_IDENTITY = 90     /* an equation with the reference that holds element by element */
};

/* A row of the table. A trace's cause is the first row of its kind whose conditions it meets. Rows without an
 * identifier add to the sentence: those without a kind to the row before them, those with one to every row of the
 * kind; one of no pass begins a section of causes.md, which the table is printed as. A row over ranks, which a run
 * of one cannot be wrong in, is `without` LONE. */
struct ari_cause {
    const char *id; /* causes.md; "unknown": the values fit no known cause */
    ari_trace_kind kind;
    int confidence;
    const char *passes; /* letters of passes, "^" first: all others; NULL: any */
    unsigned is;        /* ARI_IS_ bits of the name, one of them; 0: any */
    ari_properties needs, without;
    const char *looks; /* what the elements look like, for the pattern; of a section its title */
    const char *text;  /* {name} is a fact, {name:.3g} a number in another form; after a newline, what to look at */
};

/** The trace's cause; fills the last fields of the trace. */
void ari_match_cause(ari_trace *t, const ari_case *c);
/** Notes the share of the differences' squares that a hypothesis leaves, true or not, under the cause of such a trace.
 *  A hypothesis that explains less than ARI_NEAR was never near. */
#define ARI_NEAR 0.25
void ari_consider(const ari_case *c, ari_trace_kind kind, ari_properties flags, double left);
/** Adds the hypotheses considered to the evidence; for an unknown cause the sentence names the two with the smallest
 *  residuals. */
void ari_say_considered(ari_text *why, ar_evidence *e, const ar_evidence *considered);
const ari_cause *ari_causes_of_numbers(size_t *n), *ari_causes_of_step(size_t *n), *ari_causes_of_again(size_t *n),
    *ari_causes_of_experts(size_t *n), *ari_causes_of_places(size_t *n);
/** Row i of the table, which is those five; NULL: it has fewer. */
const ari_cause *ari_cause_at(size_t i);

/* --- the mesh ----------------------------------------------------------------------------------------------------- */

/* Number of ranks along these axes; all along tp if the layout is unknown or there is none. */
int ari_along(const ari_difference *d, ari_axes axes);
/* Narrows the difference to the ranks of the only pipeline rank that holds the tensor. */
void ari_narrow_to_stage(ari_difference *d);

/* True if the other run is known to be of one rank, apart from pipeline stages of which one alone has this tensor: no
 * cause over ranks is reported then. */
static inline bool ari_is_alone(const ari_case *c)
{
    return ari_ranks_along(&c->known->mesh, ARI_ALL_AXES & ~(ari_axes)ARI_CUTS_LAYERS) == 1 &&
           ari_along(c->d, ARI_CUTS_LAYERS) == 1;
}

/* Properties for a factor or a sum over the ranks of an extent of a layout (ari_layout_axes). */
ari_properties ari_of_axis(int extent);
#define ARI_AXES_TEXT 96
/* An extent of a layout by the dimensions of the dump's mesh that lie along it: "ep", "dp and ep"; "dp" if it names
 * none. Returns `out`. */
char *ari_extent_text(char out[ARI_AXES_TEXT], const ar_dump *d, int extent);
/* "tp", "tp and dp" with " and " before the last; "no ranks". Returns `out`. */
char *ari_axes_text(char out[ARI_AXES_TEXT], const ari_case *c, ari_axes axes, const char *before_last);
/* Along which axes a sum may be shared out: those of n ranks, else of several, as far as they are known. */
ari_axes ari_axes_of_ranks(const ari_case *c, int n);
/* Along which axes copies of one part differ from each other. */
ari_axes ari_apart_over(const ari_difference *d);
/* Groups of ranks that differ along these axes alone, and whether a rank is in group `key` of them: the place along the
 * other axes, the innermost last. */
int ari_groups(const ari_difference *d, ari_axes over);
bool ari_in_group(const ari_difference *d, int rank, ari_axes over, int key);

/* The difference as seen by the ranks that have the samples of `rank`: these ranks alone and, of an activation, their
 * samples alone. *seen false: there is a single data-parallel rank, or its ranks hold different samples. In the arena.
 * Errors: AR_ERR_MEMORY. */
ar_status ari_one_group(ari_difference *out, bool *seen, const ari_difference *d, int rank, ari_arena *arena);

/* --- what is read of a dump (extent.c) ---------------------------------------------------------------------------- */

/* The copies of the ranks of a dump. */
typedef struct ari_rank_copies {
    int ranks;
    ari_ranks mesh;
    ari_rank_copy *copy; /* [ranks]; NULL: the dump is no ranks', or their parts are no copies of boxes */
} ari_rank_copies;
/* In the arena. */
AR_NODISCARD ar_status ari_rank_copies_of(ari_rank_copies *out, const ar_dump_tensor *t, const ari_explain_case *c,
                                          ari_arena *arena);

/* --- words -------------------------------------------------------------------------------------------------------- */

/* True if a rank has no difference and holds more than right zeros, which say nothing unless all of the reference is
 * zero. */
bool ari_rank_is_right(const ari_survey *s, size_t rank);
/* "rank 2", "ranks 1, 3", "ranks 0..3": those with a difference, those that hold anything and have none, or with NaN. */
typedef enum ari_ranks_that { ARI_RANKS_WRONG, ARI_RANKS_RIGHT, ARI_RANKS_WITH_NAN } ari_ranks_that;
void ari_say_ranks(ari_text *t, const ari_case *c, ari_ranks_that which);
/* "token 17", "tokens 3..9", "samples 1 onward", "features 0..3, 8..11, ..."; indices with hits along a dimension. */
void ari_say_indices(ari_text *t, const ari_case *c, int dim);
/* The name of an index along `dim`: "token"; plural: "tokens". */
const char *ari_dim_name(const ari_grid *g, int dim, bool plural);
/* The first document, counted from 0 in every row, with a difference; -1 where none has one, or each row is one. */
int ari_first_document(const ari_case *c);
/* Writes the line that locates the differences; `looks` describes the elements, "" does not. */
void ari_say_where(ari_text *t, const ari_case *c, const char *looks);
/* Appends what part of the tensor the differences are in: shard, heads, which of q|k|v; nothing if it is all of it. */
void ari_say_part(ari_text *t, const ari_case *c);
/* "bit for bit", or "to within 0.0031 of the largest value" for the largest that is off. */
void ari_say_exactness(ari_trace *t, const ari_case *c, double worst);

/* True if two names differ in their numbers alone: one module in several layers. */
bool ari_alike_but_for_numbers(const char *x, size_t nx, const char *y, size_t ny);
/* True for a parameter's bias. */
bool ari_is_bias(const ari_difference *d);
/* True if the last dimension of this activation is heads side by side. */
bool ari_is_by_heads(const ari_difference *d);
/* Elements of a head along a dimension; 0: no heads, or of unknown size. */
size_t ari_head_size(const ari_case *c, int dim);
/* True if a dimension consists of heads, of known size or not. */
bool ari_has_heads(const ari_case *c, int dim);
/* Parts packed one after the other along a dimension: "q", "k", "v"; "gate", "up"; returns how many, 0: none. `size`
 * of each in elements. */
int ari_packed(const ari_case *c, int dim, const char *part[3], size_t size[3]);
/* The part that holds [from, to); returns the number of parts, 0: none holds it. */
int ari_packed_part(const ari_case *c, int dim, size_t from, size_t to, const char **name, size_t *start, size_t *size);
/* The range of indices along a dimension that hold all differences. */
void ari_bounding_range(const ari_case *c, int dim, size_t *from, size_t *to);
/* The fewest even blocks of n of which [from, to) is one; 0: none. */
size_t ari_block_of(size_t n, size_t from, size_t to, size_t *which);

/* --- measures ----------------------------------------------------------------------------------------------------- */

/* Looks for the traces of one kind or of a few; *t is unchanged if there are none. Errors: AR_ERR_MEMORY,
 * AR_ERR_OVERFLOW, those of reading a dump. */
typedef ar_status (*ari_measure)(ari_trace *t, const ari_case *c);

/* Copies of ranks; the same where no one copy of all shows it as well; all of a tensor in one copy; a box of a
 * tensor. */
enum { ARI_ON_RANKS = 1, ARI_ON_VALUES = 2, ARI_ON_WHOLE = 4, ARI_ON_BOX = 8 };

/* Requirements of a measure, which is skipped for cases without them. */
enum {
    ARI_NEEDS_NUMBERS = 1, /* no NaN where the reference has none */
    ARI_NEEDS_VALUES = 2,  /* one copy of all */
    ARI_NEEDS_ALL = 4,     /* of the tensor: no sample, stretch or box */
    ARI_NEEDS_DUMP = 8,    /* the reference's other tensors */
    ARI_NEEDS_BEFORE = 16, /* the weights before the step */
    ARI_NEEDS_APART = 32,  /* copies that differ from each other */
    ARI_NEEDS_TENSOR = ARI_NEEDS_NUMBERS | ARI_NEEDS_VALUES | ARI_NEEDS_ALL,
    ARI_NEEDS_WEIGHTS = ARI_NEEDS_ALL | ARI_NEEDS_DUMP, /* of the module, as they are */
    ARI_NEEDS_REPLAY = ARI_NEEDS_TENSOR | ARI_NEEDS_WEIGHTS
};

/* Every ari_measure_ with the highest confidence of its findings, the view and the passes (NULL: any) that it looks at,
 * the fewest different elements, and its other requirements. A finding of that confidence cannot be surpassed by later
 * measures. Of two findings of equal confidence the first here is reported. */
#define ARI_MEASURES(M)                                                                                      \
    M(further_uses, ARI_IDENTITY + 9, ARI_ON_WHOLE, "g", 0, ARI_NEEDS_DUMP)                                  \
    M(shared_expert, ARI_IDENTITY + 9, ARI_ON_WHOLE, "f", 0, ARI_NEEDS_TENSOR | ARI_NEEDS_DUMP)              \
    M(function, ARI_IDENTITY + 9, ARI_ON_WHOLE, NULL, 4, ARI_NEEDS_NUMBERS)                                  \
    M(curve, ARI_IDENTITY + 9, ARI_ON_WHOLE, "f", 0, ARI_NEEDS_TENSOR | ARI_NEEDS_DUMP)                      \
    M(empty_expert, ARI_IDENTITY + 9, ARI_ON_WHOLE, "g", 0, ARI_NEEDS_DUMP)                                  \
    M(state, ARI_IDENTITY + 10, ARI_ON_WHOLE, "nmv", 0, ARI_NEEDS_NUMBERS | ARI_NEEDS_DUMP)                  \
    M(other, ARI_IDENTITY + 9, ARI_ON_WHOLE, NULL, 0, ARI_NEEDS_DUMP)                                        \
    M(scores, ARI_IDENTITY + 9, ARI_ON_WHOLE, "fb", 0, ARI_NEEDS_TENSOR | ARI_NEEDS_DUMP)                    \
    M(counts, ARI_IDENTITY + 9, ARI_ON_RANKS | ARI_ON_WHOLE, "n", 0, ARI_NEEDS_NUMBERS | ARI_NEEDS_DUMP)     \
    M(routes, ARI_IDENTITY + 9, ARI_ON_WHOLE, "b", 0, ARI_NEEDS_TENSOR | ARI_NEEDS_DUMP)                     \
    M(experts, ARI_IDENTITY + 8, ARI_ON_WHOLE, "f", 0, ARI_NEEDS_REPLAY)                                     \
    M(shares, ARI_IDENTITY + 8, ARI_ON_WHOLE, "f", 0, ARI_NEEDS_TENSOR | ARI_NEEDS_DUMP)                     \
    M(muon, ARI_IDENTITY + 8, ARI_ON_RANKS | ARI_ON_WHOLE, "n", 16, ARI_NEEDS_DUMP | ARI_NEEDS_BEFORE)       \
    M(order, ARI_IDENTITY + 8, ARI_ON_WHOLE | ARI_ON_BOX, NULL, 0, 0)                                        \
    M(transposed, ARI_IDENTITY + 8, ARI_ON_WHOLE | ARI_ON_BOX, NULL, 0, 0)                                   \
    M(bits, ARI_IDENTITY + 7, ARI_ON_WHOLE, NULL, 0, 0)                                                      \
    M(positions, ARI_IDENTITY + 6, ARI_ON_WHOLE, "fb", 0, ARI_NEEDS_TENSOR)                                  \
    M(normed, ARI_IDENTITY + 6, ARI_ON_VALUES | ARI_ON_WHOLE, "f", 0, ARI_NEEDS_NUMBERS | ARI_NEEDS_WEIGHTS) \
    M(detached, ARI_IDENTITY + 6, ARI_ON_WHOLE, "b", 0, ARI_NEEDS_REPLAY)                                    \
    M(attention, ARI_IDENTITY + 6, ARI_ON_WHOLE, "f", 0, ARI_NEEDS_TENSOR | ARI_NEEDS_DUMP)                  \
    M(activation, ARI_IDENTITY + 6, ARI_ON_WHOLE, "f", 0, ARI_NEEDS_REPLAY)                                  \
    M(sums, ARI_IDENTITY + 6, ARI_ON_WHOLE, "f", 0, ARI_NEEDS_REPLAY)                                        \
    M(pooled, ARI_IDENTITY + 6, ARI_ON_WHOLE, "f", 16, ARI_NEEDS_REPLAY)                                     \
    M(lookup, ARI_IDENTITY + 6, ARI_ON_WHOLE, "f", 0, ARI_NEEDS_VALUES | ARI_NEEDS_WEIGHTS)                  \
    M(rotary, ARI_IDENTITY + 6, ARI_ON_WHOLE, "f", 0, ARI_NEEDS_TENSOR)                                      \
    M(targets, ARI_IDENTITY + 6, ARI_ON_WHOLE, "fb", 0, ARI_NEEDS_VALUES | ARI_NEEDS_DUMP)                   \
    M(own_block, ARI_IDENTITY + 5, ARI_ON_RANKS, NULL, 0, 0)                                                 \
    M(shards, ARI_IDENTITY + 5, ARI_ON_RANKS, NULL, 0, 0)                                                    \
    M(shards_added, ARI_IDENTITY + 5, ARI_ON_RANKS | ARI_ON_WHOLE, "g", 64, ARI_NEEDS_NUMBERS)               \
    M(experts_added, ARI_IDENTITY + 5, ARI_ON_WHOLE, "g", 64, ARI_NEEDS_TENSOR | ARI_NEEDS_DUMP)             \
    M(group, ARI_IDENTITY + 5, ARI_ON_RANKS, NULL, 64, ARI_NEEDS_NUMBERS)                                    \
    M(norm, ARI_IDENTITY + 5, ARI_ON_RANKS | ARI_ON_WHOLE, "c", 0, ARI_NEEDS_NUMBERS)                        \
    M(factor, ARI_IDENTITY + 5, ARI_ON_RANKS | ARI_ON_WHOLE, NULL, 0, 0)                                     \
    M(packed, ARI_IDENTITY + 4, ARI_ON_WHOLE, "iw", 0, ARI_NEEDS_TENSOR | ARI_NEEDS_DUMP)                    \
    M(last, ARI_IDENTITY + 4, ARI_ON_VALUES | ARI_ON_WHOLE, "g", 8, ARI_NEEDS_NUMBERS)                       \
    M(share_update, ARI_IDENTITY + 4, ARI_ON_RANKS, "n", 0, ARI_NEEDS_NUMBERS | ARI_NEEDS_BEFORE)            \
    M(added, ARI_IDENTITY + 4, ARI_ON_VALUES | ARI_ON_WHOLE, NULL, 0, ARI_NEEDS_NUMBERS)                     \
    M(means, ARI_IDENTITY + 3, ARI_ON_RANKS | ARI_ON_WHOLE, NULL, 0, ARI_NEEDS_NUMBERS)                      \
    M(accumulated, ARI_IDENTITY + 3, ARI_ON_WHOLE, "g", 0, ARI_NEEDS_TENSOR | ARI_NEEDS_DUMP)                \
    M(auxiliary, ARI_IDENTITY + 3, ARI_ON_WHOLE, "bg", 0, ARI_NEEDS_REPLAY)                                  \
    M(dropped, ARI_IDENTITY + 3, ARI_ON_WHOLE, NULL, 0, ARI_NEEDS_NUMBERS)                                   \
    M(precision, ARI_IDENTITY + 3, ARI_ON_VALUES | ARI_ON_WHOLE, NULL, 0, ARI_NEEDS_NUMBERS)                 \
    M(scales, ARI_IDENTITY + 3, ARI_ON_VALUES | ARI_ON_WHOLE, NULL, 0, ARI_NEEDS_NUMBERS)                    \
    M(sum, ARI_IDENTITY + 2, ARI_ON_RANKS, NULL, 0, ARI_NEEDS_NUMBERS | ARI_NEEDS_APART)                     \
    M(rope, ARI_IDENTITY + 2, ARI_ON_WHOLE, "fb", 16, ARI_NEEDS_NUMBERS)                                     \
    M(shift, ARI_IDENTITY + 2, ARI_ON_WHOLE | ARI_ON_BOX, NULL, 0, 0)                                        \
    M(loss, ARI_IDENTITY + 1, ARI_ON_RANKS | ARI_ON_WHOLE, NULL, 0, ARI_NEEDS_NUMBERS)                       \
    M(batch_norm, ARI_IDENTITY + 1, ARI_ON_WHOLE, "f", 64, ARI_NEEDS_TENSOR)                                 \
    M(statistic, ARI_IDENTITY + 1, ARI_ON_VALUES | ARI_ON_WHOLE, "f", 0, 0)                                  \
    M(added_tensor, ARI_IDENTITY + 1, ARI_ON_WHOLE, NULL, 0, ARI_NEEDS_NUMBERS | ARI_NEEDS_DUMP)             \
    M(epsilon, ARI_IDENTITY, ARI_ON_WHOLE, "n", 64, ARI_NEEDS_NUMBERS | ARI_NEEDS_VALUES | ARI_NEEDS_BEFORE) \
    M(ids, ARI_TRACE + 8, ARI_ON_VALUES | ARI_ON_WHOLE, NULL, 0, 0)                                          \
    M(tail, ARI_TRACE + 8, ARI_ON_VALUES | ARI_ON_WHOLE, NULL, 0, 0)                                         \
    M(mask, ARI_TRACE + 7, ARI_ON_VALUES | ARI_ON_WHOLE, NULL, 0, 0)                                         \
    M(bias, ARI_TRACE + 5, ARI_ON_VALUES | ARI_ON_WHOLE, "g", 0, 0)                                          \
    M(decay, ARI_TRACE + 3, ARI_ON_VALUES | ARI_ON_WHOLE, "n", 8, ARI_NEEDS_NUMBERS | ARI_NEEDS_BEFORE)      \
    M(block_of_zeros, ARI_TRACE + 3, ARI_ON_WHOLE, NULL, 0, 0)                                               \
    M(update, ARI_TRACE - 1, ARI_ON_VALUES | ARI_ON_WHOLE, "n", 4, ARI_NEEDS_NUMBERS | ARI_NEEDS_BEFORE)     \
    M(one_step, ARI_TRACE - 1, ARI_ON_WHOLE, "i", 16, ARI_NEEDS_TENSOR)                                      \
    M(world_rank, ARI_TRACE - 4, ARI_ON_RANKS, NULL, 0, 0)                                                   \
    M(zero, ARI_TRACE - 5, ARI_ON_RANKS | ARI_ON_WHOLE, NULL, 0, 0)                                          \
    M(ungiven, ARI_SHAPE + 5, ARI_ON_WHOLE, "b", 64, ARI_NEEDS_TENSOR | ARI_NEEDS_DUMP)                      \
    M(borders, ARI_SHAPE + 1, ARI_ON_VALUES | ARI_ON_WHOLE, "fb", 8, ARI_NEEDS_NUMBERS)                      \
    M(nan, ARI_SHAPE, ARI_ON_VALUES | ARI_ON_WHOLE, NULL, 0, 0)                                              \
    M(own_part, ARI_SHAPE - 9, ARI_ON_RANKS, "g", 0, ARI_NEEDS_NUMBERS | ARI_NEEDS_APART)                    \
    M(place, ARI_SHAPE - 10, ARI_ON_RANKS | ARI_ON_WHOLE, NULL, 0, 0)                                        \
    M(extreme, ARI_STATISTIC + 9, ARI_ON_RANKS | ARI_ON_WHOLE, "fbg", 0, ARI_NEEDS_NUMBERS)                  \
    M(share, ARI_STATISTIC + 7, ARI_ON_WHOLE, NULL, 0, ARI_NEEDS_NUMBERS)                                    \
    M(scatter, ARI_STATISTIC + 6, ARI_ON_RANKS, NULL, 0, 0)                                                  \
    M(gradient, ARI_STATISTIC + 5, ARI_ON_VALUES | ARI_ON_WHOLE, "g", 0, 0)                                  \
    M(noise, ARI_STATISTIC - 4, ARI_ON_WHOLE, NULL, 0, ARI_NEEDS_NUMBERS)                                    \
    M(anything, ARI_LAST_RESORT, ARI_ON_RANKS | ARI_ON_WHOLE, NULL, 0, 0)
#define ARI_MEASURE(name, ...) ar_status ari_measure_##name(ari_trace *t, const ari_case *c);
ARI_MEASURES(ARI_MEASURE)

/* --- looking (diagnose.c) ----------------------------------------------------------------------------------------- */

/* A tensor, or a box of it, in one copy: the one rank of a run whose ranks are not seen. */
typedef struct ari_view {
    float *ref, *val, *beside, *earlier;
    double *doubt; /* what the gradients explain of each element; NULL: nothing */
    size_t shape[AR_MAX_DIMS];
    char name[256]; /* without suffixes */
    ar_layout layout;
    ari_rank_copy copy;
    ari_difference d;
    size_t first_row, rows; /* the stretch that is looked at, in rows of the full tensor; rows 0: all of it */
    ari_case c;
} ari_view;
/* Fills the rest of d, the case and its survey from shape, d.ndim, c.ref, c.val and c.arena. */
AR_NODISCARD ar_status ari_view_survey(ari_view *v);

/* The best trace of a tensor in one copy, or of copies of ranks; cause NULL: none. Errors: those of the measures. */
AR_NODISCARD ar_status ari_look_at_whole(ari_trace *best, const ari_case *c);
AR_NODISCARD ar_status ari_look_at_ranks(ari_trace *best, const ari_case *c);
/* The ranks' finding is reported if it is about as sure, since it names ranks; not for zeros that all ranks share, nor
 * for a factor of what one copy shows to be computed another way, which is surer than any factor. */
static inline bool ari_ranks_say_more(const ari_trace *ranks, const ari_trace *whole, const ari_case *c)
{
    const bool alike = ranks->kind == ARI_FOUND_ZERO && c->survey.disagree == 0 && c->survey.whole;
    const bool known = (ranks->kind == ARI_FOUND_FACTOR || ranks->kind == ARI_FOUND_MEANS) &&
                       whole->kind != ARI_FOUND_FACTOR && whole->confidence > ARI_IDENTITY + 5;
    return ranks->confidence > 0 && ranks->confidence + (alike || known ? 0 : 10) >= whole->confidence;
}

#ifdef ARI_CAUSE_ROWS /* how rows are written */
#define ANY NULL
#define K(name) ARI_FOUND_##name
#define IF ARI_IF
#define LOOK "\n"
/* clang-format off */
#define SECTION(title) {NULL, K(NOTHING), 0, "", 0, 0, 0, title, ""}
#define ALWAYS(kind, passes, needs, without, text) {NULL, kind, 0, passes, 0, needs, without, "", text}
#define ALSO(...) ALWAYS(K(NOTHING), __VA_ARGS__)
/* clang-format on */
#define ARI_CAUSES(name)                             \
    const ari_cause *ari_causes_of_##name(size_t *n) \
    {                                                \
        *n = sizeof rows / sizeof *rows;             \
        return rows;                                 \
    }
#endif
