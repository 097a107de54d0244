/* SPDX-License-Identifier: Apache-2.0 */
/* Searches the layouts for a number of ranks: which are legal, which fit in memory, and which take the least time. */
#pragma once

#include "ref/core/axis.h"
#include "verify/plan/time.h"

enum { ARI_MAX_GPUS = 1 << 20, ARI_REASON = 240 };

/** The product of all extents. Errors: AR_ERR_ARG (negative extents, more than ARI_MAX_GPUS). */
AR_NODISCARD ar_status ari_planned_world(int *ranks, const ari_planned *p);
/** Checks that a model can be split by this layout (ari_parallel_check), with at least one sample per data-parallel
 *  rank. Errors: AR_ERR_ARG, AR_ERR_INDIVISIBLE, AR_ERR_UNSUPPORTED (the plan); each names the dimension, its size and
 *  a divisor of it. */
AR_NODISCARD ar_status ari_planned_check(const ari_planned *p);
/** True if an error is a verdict on a layout, rather than a failure of the machine. */
bool ari_is_verdict(ar_status st);

/* The extents of a layout in the order in which layouts are searched and listed: indices of ari_layout_axes. */
extern const int ari_planned_axes[ARI_LAYOUT_AXES];

/* A layout, compactly. */
typedef struct ari_choice {
    union {
        int extent[ARI_LAYOUT_AXES]; /* extents in the order of ari_planned_axes */
        struct {
            int tp, cp, pp, dp;
        };
    };
    int cp_inner; /* number of neighbours among the cp ranks that exchange heads for positions */
    int ep;       /* number of neighbours among the dp * cp ranks that share the experts; with etp 1 among dp * cp *
                     tp ranks */
    int etp;      /* as in ar_parallel */
    int zero, dp_replicate, micro_batches;
    int overlap;             /* chunks of tp's collectives overlapped with matmuls; 0: the base's */
    int virtual_stages;      /* virtual stages of each pipeline rank */
    ar_pp_schedule schedule; /* schedule of a pipeline */
    bool sp, zigzag;
    ar_recompute recompute;
} ari_choice;
/** The choice of a layout whose extents are at least 1. */
ari_choice ari_choice_of(const ar_parallel *p);
#define ARI_CHOICE_TEXT (24 * ARI_LAYOUT_AXES)
/** Writes the first n extents as "tp=8 cp=1 pp=4 dp=2" with the given separator. Returns `out`. */
char *ari_choice_text(char out[ARI_CHOICE_TEXT], const ari_choice *c, int n, const char *separator);
/** base with this layout. */
ari_planned ari_choice_planned(const ari_planned *base, const ari_choice *c);

/* A request for layouts. An extent of 0 means all values, -1 the remaining ranks. */
typedef struct ari_search {
    ari_planned base; /* model, batch, sequence, flash, and everything else that is not part of the layout */
    int ranks;
    ari_choice fixed;
    int sp, zero, recompute,
        schedule; /* used instead of those of `fixed`; zigzag: causal rings use it where possible */
    int system;   /* the system that will run the layouts: ari_system_names[system - 1] (system.h); 0: any */
    ari_time_options time;
    bool first_only; /* true if only the first layout matters, and not its cost breakdown */
    bool chunks;     /* use the number of chunks of tp's collectives that is best for the first layout */
    bool every;      /* true: list all layouts, including impossible ones; false: list the best of each mesh */
    void (*progress)(void *user, double fraction, const char *label); /* NULL: no progress */
    void *user;
} ari_search;

typedef struct ari_candidate {
    ari_choice choice;
    ar_status legal;    /* AR_OK, or why not */
    const char *reason; /* reason for the ranking in words, or "" */
    double seconds;     /* seconds of a step */
    const char *bound;  /* what bounds the step (ari_bound_of); static storage */
    double bytes;       /* a rank's memory in the production account */
    bool fits;
    bool has_faster; /* true if a faster layout of the same mesh exists that differs from published runs */
} ari_candidate;

typedef struct ari_ranking {
    ari_candidate *layout; /* [n]: layouts that fit by seconds, then the others by bytes, then impossible ones */
    size_t n, room;
    size_t meshes, layouts, legal; /* numbers of meshes and of layouts that were searched, and of legal layouts */
    size_t fitting;                /* number of fitting layouts in the list */
    size_t equal; /* number of layouts at the top that are too close to the fastest to order by time; they come first
                     with the simplest one leading; 0: ordered by seconds only */
    ari_candidate fastest; /* the fastest legal layout, whether or not it fits */
    bool has_fastest;
    char **why; /* [whys] reasons */
    size_t whys, why_room;
    char refused[ARI_REASON]; /* why the first illegal layout is illegal */
    double memory_bytes;      /* memory of a rank; 0: no limit */
} ari_ranking;
/** Errors: AR_ERR_ARG (ranks), AR_ERR_OVERFLOW, AR_ERR_MEMORY, AR_ERR_UNSUPPORTED (the plan). ari_ranking_fini in every
 *  case. */
AR_NODISCARD ar_status ari_search_run(ari_ranking *r, const ari_search *s);
void ari_ranking_fini(ari_ranking *r);

/* Fraction by which a layout may be slower than the fastest and still count as equal. */
#define ARI_EQUAL 0.05
/* Properties that few users would choose without a reason. */
typedef enum ari_unusual {
    ARI_UNUSUAL_CP = 1,
    ARI_UNUSUAL_TP = 2,
    ARI_UNUSUAL_NODES = 4,
    ARI_UNUSUAL_TOKENS = 8,
    ARI_UNUSUAL_ZERO = 16
} ari_unusual;
/** Returns bits for unusual properties: cp with sequences of at most 8,192; tp below 8 for a model of 70 billion
 *  parameters on GPUs of 80 GB; tp over several nodes; micro-batches below 1,024 tokens per rank; ZeRO-3 in a pipeline,
 *  which gathers its weights for every micro-batch. */
unsigned ari_unusual_of(const ari_search *s, const ari_choice *c);
/** Parameters of the model of a search. */
double ari_search_parameters(const ari_search *s);
/** Returns true if a layout is close to a published run of a model with about as many parameters, or if no such run
 *  is known. Close means that at most one axis differs: tp, cp, pp and virtual stages by more than a factor of two,
 *  ZeRO beyond its first stage, or zero bubble. Other layouts are ranked first only if they are more than ARI_EQUAL
 *  faster. */
bool ari_choice_is_published(const ari_choice *c, double parameters);
/** Orders layouts whose times are equal within the known accuracy, if the GPU is known: those similar to published runs
 *  first, and among these the simplest. r: ranked by seconds. Errors: those of ari_time_of. */
AR_NODISCARD ar_status ari_ranking_prefer(ari_ranking *r, const ari_search *s);
enum { ARI_WHY_LINES = 7, ARI_WHY_TEXT = 320 };
/** Writes why the first layout of a ranking is first: where its time is spent, what the next one loses, and what its
 *  unusual properties gain; "" ends the lines. Errors: those of ari_time_of. */
AR_NODISCARD ar_status ari_ranking_why(char lines[ARI_WHY_LINES][ARI_WHY_TEXT], const ari_search *s,
                                       const ari_ranking *r);

/* Throughput of a step that takes the given number of seconds. */
typedef struct ari_throughput {
    double tokens; /* a second, all ranks together */
    double mfu, hfu;
    ari_flops_convention convention;
} ari_throughput;
/** Errors: AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_throughput_of(ari_throughput *w, const ari_planned *p, const ari_time_options *o,
                                         double seconds);

/** Writes one or two sentences: what bounds the step, and what would change that. t, m: time and memory of the layout
 *  with production's cost model; faster: the fastest legal layout if it does not fit, otherwise NULL. Truncates to
 *  size. */
void ari_advice(char *text, size_t size, const ari_planned *p, const ari_time *t, const ari_memory *m,
                const ari_candidate *faster, double memory_bytes);
/** Names the largest part of a step besides matrix products: "computation", "tp", "bubble", ... */
const char *ari_bound_of(const ari_time *t);

/* A layout in depth. */
typedef struct ari_depth {
    ari_planned planned;
    ari_candidate found;
    ari_time time;
    ari_memory memory, own_memory; /* own_memory: of what this version runs */
    ari_throughput throughput;
    bool has_own;
    char advice[400], flags[800]; /* flags: command line for the search's system */
} ari_depth;
/** Computes details of a layout for the model, batch and cluster of a search, for the first layout only without its
 *  own. faster: as in ari_advice. Errors: those of ari_planned_check, AR_ERR_OVERFLOW, AR_ERR_MEMORY,
 *  AR_ERR_UNSUPPORTED (the plan). */
AR_NODISCARD ar_status ari_depth_of(ari_depth *d, const ari_search *s, const ari_choice *c,
                                    const ari_candidate *faster);

/* --- systems (system.c) ------------------------------------------------------------------------------------------- */

/* Production systems: which parts of a layout each supports, and with which flags. */

extern const char *const ari_system_names[]; /* "megatron", ..; ends with NULL */

/** Applies the settings of a search's system and cluster: -1 or an index of ari_system_names; fp32 gradients if the
 *  system sums them so, a reserve of a named GPU's memory, and tp's collectives in chunks overlapped with matmuls. */
void ari_search_account(ari_search *s, int system);
/** Returns a feature of the layout that the search's system lacks, such as "that stage of ZeRO", or NULL. Static
 *  storage. */
const char *ari_system_lacks(const ari_search *s, const ari_choice *c);
/** Writes the options to paste into the system's command, after its name; "" without a system. Truncates to size. */
void ari_system_flags(char *text, size_t size, const ari_search *s, const ari_planned *p);
