/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of a rank of anyrank between steps, by its parameters and buckets in the list alone: a second account besides
 * the dry run's, which shares nothing with the code that allocates the memory. */
#include <math.h>

#include "ref/core/size.h"
#include "verify/plan/planner.h"

static const double FLOAT = 4.0;
/* An accumulator (t, H, L), also in a bucket; and at most between ranks, of bf16 numbers fewer bytes. */
static const double ACCUMULATOR = 17.0, SENT = 17.0, NARROW_SENT = 13.0;

typedef struct held {
    const ari_step_case *c;
    ari_memory *m;
    bool exact;
    int zero;
    double states;   /* of the optimizer, numbers an element */
    bool shares;     /* of them each data-parallel rank has a part: by bucket */
    bool replicas;   /* and others have the same */
    double exchange; /* the largest sum of a bucket between ranks, in bytes */
} held;

static double bytes_of(const ari_op_value *v)
{
    return ari_op_elements(v) * (double)ar_dtype_bytes(v->dtype);
}

/* of: what all of them are like. */
static void add_state(held *h, double n, ar_dtype storage, const ari_op_param *of)
{
    const bool momentum = ari_op_by_muon(h->c, of->role, of->bias);
    h->m->of[ARI_MEMORY_OPTIMIZER] += FLOAT * (momentum ? fmin(1.0, h->states) : h->states) * n;
    if (storage == AR_BF16 && h->c->run.steps > 0)
        h->m->of[ARI_MEMORY_MASTER] += FLOAT * n;
}

static ar_status add_param(void *user, size_t layer, const ari_op_value *v)
{
    held *h = user;
    const double n = ari_op_elements(v);
    const bool frozen = v->role == ARI_ROUTER_BIAS; /* whole on each rank, and in no bucket */
    if (h->zero < 3 || frozen)
        h->m->of[ARI_MEMORY_WEIGHTS] += bytes_of(v);
    if (frozen)
        return AR_OK;
    if (!h->c->forward_only && h->zero < 2)
        h->m->of[ARI_MEMORY_GRADIENTS] += h->exact ? ACCUMULATOR * n : bytes_of(v);
    if (!h->shares)
        add_state(h, n, v->dtype, &(ari_op_param){layer, v->role, v->bias});
    return AR_OK;
}

/* A rank has the states that it sends, and those that others send of its share. */
static double exchanged(const ari_op_call *c, ar_dtype storage)
{
    const double n = (double)(c->elements / c->row), ranks = (double)c->ranks;
    return (n + (ranks - 2.0) * ceil(n / ranks)) * (storage == AR_BF16 ? NARROW_SENT : SENT);
}

/* One that is moved has memory of its own, and with replicas one for the own slice. ZeRO-2 keeps that alone, of
 * gradients, ZeRO-3 of weights too. */
static ar_status add_bucket(void *user, const ari_operation *op)
{
    held *h = user;
    const ari_op_value *all = &op->input[0], *own = &op->output[0];
    const double n = ari_op_elements(all), share = ari_op_elements(own);
    const double each = h->exact ? ACCUMULATOR : (double)ar_dtype_bytes(all->dtype);
    if (h->zero >= 2)
        h->m->of[ARI_MEMORY_GRADIENTS] += each * share;
    else if (op->calls > 0)
        h->m->of[ARI_MEMORY_BUCKETS] += each * (n + (h->replicas ? share : 0.0));
    for (int i = 0; i < op->calls; i++) {
        if (op->call[i].kind == ARI_CALL_ALL_TO_ALL)
            h->exchange = fmax(h->exchange, exchanged(&op->call[i], all->dtype));
    }
    if (h->zero == 3)
        h->m->of[ARI_MEMORY_WEIGHTS] += bytes_of(own);
    if (h->shares)
        add_state(h, share, all->dtype, &(ari_op_param){op->layer, op->role, own->bias});
    return AR_OK;
}

ar_status ari_memory_states(ari_memory *m, const ari_step_case *c, int rank)
{
    const ar_parallel *p = &c->run.parallel;
    held h = {.c = c, .m = m, .exact = c->run.numerics == AR_NUMERICS_EXACT, .zero = c->forward_only ? 0 : p->zero};
    h.states = c->run.steps > 0 ? ari_optimizer_states(&c->run.optimizer) : 0.0;
    h.shares = p->zero > 0;
    h.replicas = h.shares && ari_at_least_one(p->dp_replicate) > 1;
    if (ari_at_least_one(p->dp) * ari_at_least_one(p->cp) == ari_at_least_one(p->dp_replicate))
        h.zero = h.shares; /* nobody to share with */
    *m = (ari_memory){{0}};
    AR_TRY(ari_operations_params(c, rank, add_param, &h));
    if (!c->forward_only)
        AR_TRY(ari_operations(c, ARI_OPS_BUCKETS, rank, add_bucket, &h));
    m->of[ARI_MEMORY_BUCKETS] += h.exchange;
    return AR_OK;
}
