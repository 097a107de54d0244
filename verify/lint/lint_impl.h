/* SPDX-License-Identifier: Apache-2.0 */
/* State of the walk through a record. */
#pragma once

#include "verify/lint/lint.h"

/* A value with its placement and whether an operation or a report has declared it. */
typedef struct ari_lint_value {
    ari_lint_type type;
    bool is_known, is_produced;
    size_t receive; /* 1 + index of the operation that receives the value, until it has arrived */
    size_t maker;   /* 1 + index of the layer's product that made the value, if its partial sums have not been
                       reduced */
} ari_lint_value;

typedef struct ari_lint_param {
    ari_lint_type type;
    bool broadcast, used, judged, gathered;
    int uses, gradients;            /* counted over the passes of all micro-batches */
    bool partial[ARI_LINT_AXES];    /* true if ranks along the axis hold partial sums of the parameter's gradient */
    unsigned summed[ARI_LINT_AXES]; /* groups that have reduced them: one bit for each ari_over */
} ari_lint_param;

/* A value that is being sent from one stage to another. */
typedef struct ari_lint_message {
    char pass;
    size_t src_rank, dst_rank; /* ranks of records */
    ari_lint_type type;
    size_t count; /* elements */
} ari_lint_message;

typedef struct ari_lint_rank {
    const ari_ledger *ledger;
    size_t next_op;          /* operation */
    ari_lint_value *value;   /* [ledger->ids + 1] values by id */
    ari_lint_param *param;   /* [ledger->params] */
    ari_lint_type tokens;    /* type of the last value that went to the experts, as which it returns */
    bool updated;            /* true after the optimizer has changed the weights */
    int losses;              /* number of losses' forward passes minus backward passes */
    ari_lint_placed *placed; /* [ledger->operations]; NULL: not requested */
} ari_lint_rank;

typedef struct ari_lint_walk {
    const ari_lint_layout *layout;
    ar_lint_report *report;
    size_t room;
    ari_lint_rank *rank; /* [ranks] */
    size_t ranks, current_rank;
    ari_lint_message *message; /* [messages] in the order in which they were sent */
    size_t messages, message_room;
    size_t *layer_rank; /* [layers]: 1 + the rank that has the layer; 0: none yet */
    size_t layers;
} ari_lint_walk;

static inline size_t ari_lint_size(const ari_lint_walk *w, int axis)
{
    return w->layout->size[axis];
}

static inline ari_lint_rank *ari_lint_walked(const ari_lint_walk *w)
{
    return &w->rank[w->current_rank];
}

static inline ari_lint_value *ari_lint_value_of(const ari_lint_walk *w, const ari_ledger_value *v)
{
    return &ari_lint_walked(w)->value[v->id];
}

static inline bool ari_lint_is_known(const ari_lint_walk *w, const ari_ledger_value *v)
{
    return v->id > 0 && ari_lint_value_of(w, v)->is_known;
}

/* --- findings (lint_find.c) --------------------------------------------------------------------------------------- */

/** Adds a finding at an operation, or merges it with the same finding in another layer, micro-batch or stage. Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_lint_find(ari_lint_walk *w, const ari_ledger_operation *op, int axis,
                                     const ari_lint_verdict *v);
/** Records a finding with its own sentence. */
AR_NODISCARD ar_status ari_lint_find_in_words(ari_lint_walk *w, const ari_ledger_operation *op, int axis,
                                              ar_lint_rule rule, const char *actual, const char *required,
                                              const char *repair);

/* --- operations (lint_kinds.c) ------------------------------------------------------------------------------------ */

/** Receives the messages that an operation's inputs wait for. Returns false if one has not been sent yet. */
bool ari_lint_await_inputs(ari_lint_walk *w, const ari_ledger_operation *op);
/** True if a call's ranks differ along an axis. */
bool ari_lint_goes_along(const ari_lint_walk *w, const ari_ledger_call *call, int axis);
/** Returns the axis along which a parameter has copies; ARI_LINT_NO_AXIS: none. */
int ari_lint_copies_axis(const ari_lint_walk *w, const ari_ledger_param *p);
/** Checks an operation by the rule of its kind, and derives the placements of its outputs. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_lint_operation(ari_lint_walk *w, const ari_ledger_operation *op);
