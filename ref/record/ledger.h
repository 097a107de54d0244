/* SPDX-License-Identifier: Apache-2.0 */
/* Placements of a rank's values over the tensor-parallel ranks, as the operations that make them say, and what the
 * operations that take them need: a lint judges it, and a context that checks placements refuses what does not fit. A
 * value is known by its memory. Whole values are R and I alike, shards S(-1) and S(-2). */
#pragma once

#include "anyrank/context.h"
#include "anyrank/placement.h"

/* How an operation looks at what it takes. */
typedef enum ari_ledger_kind {
    ARI_LEDGER_TAKES,       /* placed as `needs` */
    ARI_LEDGER_ELEMENTWISE, /* as it comes, by a function that is not linear */
    ARI_LEDGER_ALONG,       /* all features of a row together */
    ARI_LEDGER_ADDS,        /* two values, element by element */
    ARI_LEDGER_MULTIPLIES,
    ARI_LEDGER_GRADIENT /* rows are added up to the gradient of a parameter; needs: what makes it complete */
} ari_ledger_kind;

/* An operation. A placement that is not known is that of an opaque value. */
typedef struct ari_ledger_value {
    bool known;
    ar_placement at;
    int ndim;
    size_t shape[AR_MAX_DIMS];
} ari_ledger_value;
typedef struct ari_ledger_record {
    char name[128];        /* module, or parameter */
    const char *operation; /* static storage */
    char pass;             /* 'f', 'b' */
    ari_ledger_kind kind;
    ari_ledger_value in[2], out; /* in[1]: of two values */
    ar_placement needs;
    uint64_t bytes; /* that this rank sends until the next operation */
} ari_ledger_record;

/* A collective of more than one rank, as the rank called it. */
typedef struct ari_ledger_call {
    unsigned kind; /* ari_kind (ref/comm/call.h) */
    ar_dtype dtype;
    int ranks;      /* of the group */
    size_t count;   /* elements of the call: of a v-form, of all ranks together; of an all-to-all 0 */
    uint64_t bytes; /* that this rank sends */
    char tag[160], queue[24];
} ari_ledger_call;

typedef struct ari_ledger {
    bool strict; /* a value that is not placed as declared ends the pass */
    const char *module;
    char pass;
    uint64_t sent; /* until the last operation */
    struct ari_ledger_memory *value;
    size_t values, value_room;
    ari_ledger_record *record; /* [records]; none where it is strict */
    size_t records, record_room;
    size_t first;          /* record of the rank that runs */
    ari_ledger_call *call; /* [calls], in the order of the calls; none where it is strict */
    size_t calls, call_room;
} ari_ledger;
/** c writes into it from now on; l must outlive the context. NULL: nothing. */
void ari_ledger_use(ar_ctx *c, ari_ledger *l);
/** From now on a value of c that is not placed as declared ends the pass. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_ledger_check(ar_ctx *c);
/** Frees what it holds. */
void ari_ledger_fini(ari_ledger *f);
struct ari_call;
/** Adds a collective of `ranks` ranks in which this rank sends so many bytes. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_ledger_call_add(ari_ledger *l, const struct ari_call *call, int ranks, uint64_t bytes);

/* The innermost module that runs, and its pass. */
typedef struct ari_ledger_place {
    const char *module;
    char pass;
} ari_ledger_place;
ari_ledger_place ari_ledger_enter(ar_ctx *c, const char *module, char pass);
void ari_ledger_leave(ar_ctx *c, ari_ledger_place outer);

/* All below do nothing in a context that does not watch, or of one tensor-parallel rank. name NULL: the module that runs.
 * Errors: AR_ERR_DATA (strict: names module, rank and both placements), AR_ERR_MEMORY. */

/** y (NULL: none), placed as `makes`, of an x that has to be placed as `needs`. */
AR_NODISCARD ar_status ari_ledger_takes(ar_ctx *c, const char *name, const char *operation, const ar_tensor *x,
                                        ar_placement needs, const ar_tensor *y, ar_placement makes);
/** y is placed so, as the operation before has said. */
AR_NODISCARD ar_status ari_ledger_made(ar_ctx *c, const ar_tensor *y, ar_placement at);
/** y (NULL: none) placed as x, and b (NULL: none), are. */
AR_NODISCARD ar_status ari_ledger_rows(ar_ctx *c, const char *operation, ari_ledger_kind kind, const ar_tensor *x,
                                       const ar_tensor *b, const ar_tensor *y);
/** Rows of terms go into the gradient of a parameter of this name. */
AR_NODISCARD ar_status ari_ledger_gradient(ar_ctx *c, const char *name, const ar_tensor *terms, ar_placement needs);
/** t is reported as placed so: it is, where nothing else is known. */
AR_NODISCARD ar_status ari_ledger_declares(ar_ctx *c, const char *name, const ar_tensor *t, ar_placement as);
