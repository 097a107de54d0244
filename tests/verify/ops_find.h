/* SPDX-License-Identifier: Apache-2.0 */
/* Operations of the list of a step, and what is expected of their values. */
#pragma once

#include "sim/plan/ops.h"
#include "tests/verify/support.h"

static inline ari_step_case case_of(const ar_config *c, ar_parallel parallel, size_t batch, size_t seq,
                                    ar_numerics numerics)
{
    return (ari_step_case){.config = c,
                           .run = {.parallel = parallel, .batch = batch, .seq = seq, .numerics = numerics}};
}

/* The operations of a kind and pass in one layer, ARI_NO_LAYER for those outside of the blocks; of any role if none is
 * given. */
enum { MOST_FOUND = 4 };
typedef struct found {
    ari_operation_kind kind;
    ari_operation_pass pass;
    ari_role role;
    size_t layer;
    int n;
    ari_operation op[MOST_FOUND];
} found;

static inline ar_status found_add(void *user, const ari_operation *op)
{
    found *f = user;
    if (op->kind == f->kind && op->pass == f->pass && op->layer == f->layer &&
        (f->role == ARI_NO_ROLE || op->role == f->role) && f->n < MOST_FOUND)
        f->op[f->n++] = *op;
    return AR_OK;
}

static inline found found_on(int rank, const ari_step_case *c, ari_operation_kind kind, ari_operation_pass pass,
                             ari_role role, size_t layer)
{
    found f = {.kind = kind, .pass = pass, .role = role, .layer = layer};
    cr_assert_ok(ari_operations(c, ARI_OPS_STEP, rank, found_add, &f));
    return f;
}

/* Those of the first block on the first rank. */
static inline found all_of(const ari_step_case *c, ari_operation_kind kind, ari_operation_pass pass)
{
    return found_on(0, c, kind, pass, ARI_NO_ROLE, 0);
}

static inline ari_operation the_only(const ari_step_case *c, ari_operation_kind kind, ari_operation_pass pass,
                                     ari_role role, size_t layer)
{
    const found f = found_on(0, c, kind, pass, role, layer);
    cr_assert_eq(f.n, 1, "%d operations '%s'", f.n, ari_operation_name(kind));
    return f.op[0];
}

static inline void expect_local(const char *what, int line, const ari_op_value *v, int ndim, const size_t *shape)
{
    cr_expect_eq(v->ndim, ndim, "line %d: %s", line, what);
    for (int d = 0; d < ndim; d++)
        cr_expect_eq(v->local[d], shape[d], "line %d: dimension %d of %s is %zu, expected %zu", line, d, what,
                     v->local[d], shape[d]);
}
#define LOCAL(value, ...)                                                                             \
    expect_local(#value, __LINE__, &(value), (int)(sizeof((size_t[]){__VA_ARGS__}) / sizeof(size_t)), \
                 (size_t[]){__VA_ARGS__})
