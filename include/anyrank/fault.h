/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_FAULT_H
#define ANYRANK_FAULT_H

#include "anyrank/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Mistakes that real systems have made, each of which can be switched on. name, what it does. */
#define AR_FAULT_TABLE(X)                                                                                       \
    X(column_dx_not_reduced, "the input gradient of a column-parallel layer is left partial")                   \
    X(row_bias_every_rank, "every rank adds the row-parallel bias before the reduction")                        \
    X(row_input_grad_not_gathered, "a row-parallel layer with replicated input returns only its slice of dX")   \
    X(heads_divided_twice, "the local head count is divided by the number of ranks again")                      \
    X(allreduce_aliases_input, "a row-parallel output is reduced into the buffer of the saved input")           \
    X(init_local_fan, "the initial scale comes from the shard's size")                                          \
    X(init_per_shard_seed, "every shard draws the values of the first one")                                     \
    X(vocab_target_off_by_shard, "the shard before takes the target at a shard's edge")                         \
    X(loss_parallel_no_max, "softmax denominators are combined without a common maximum")                       \
    X(embedding_edge_twice, "the first id of a shard is looked up by two shards")                               \
    X(weight_grad_leading_dims, "weight gradients use the first sample only: leading dimensions not flattened") \
    X(bias_grad_wrong_axis, "bias gradients are summed over features in place of tokens")                       \
    X(norm_backward_missing, "a norm inside a block returns no gradient: only the residual carries it")

typedef enum ar_fault {
    AR_FAULT_NONE,
#define AR_FAULT_ENUM(name, text) AR_FAULT_##name,
    AR_FAULT_TABLE(AR_FAULT_ENUM)
#undef AR_FAULT_ENUM
        AR_FAULT_COUNT
} ar_fault;

/** "column_dx_not_reduced"; "none" for AR_FAULT_NONE. Static storage. */
const char *ar_fault_name(ar_fault f);
/** One line of English. Static storage. */
const char *ar_fault_text(ar_fault f);
/** AR_ERR_NOT_FOUND, naming the nearest, if there is no such fault. */
AR_NODISCARD ar_status ar_fault_parse(ar_fault *f, const char *name);

#ifdef __cplusplus
}
#endif
#endif
