/* SPDX-License-Identifier: Apache-2.0 */
/* What each rank says of its parameters, gathered over the tensor-parallel and then the data-parallel group. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/context.h"
#include "ref/core/size.h"
#include "ref/layers/share.h"
#include "ref/numerics/philox.h"
#include "ref/train/gradients.h"

const char *const ari_state_name[ARI_STATES] = {"exp_avg", "exp_avg_sq", "momentum_buffer", "master"};

_Static_assert(sizeof(ari_said) % sizeof(uint64_t) == 0 && sizeof(ari_said_header) % sizeof(uint64_t) == 0,
               "what is said travels as words");

/* The values of a tensor of this rank, on the host. Gives; free(). */
static ar_status values_of(float **gives, ar_ctx *ctx, const ar_tensor *t)
{
    float *values = NULL;
    AR_TRY(ari_alloc((void **)&values, ar_tensor_count(t), sizeof *values, "copies to compare"));
    const ar_status st = ar_ctx_download_floats(ctx, values, t);
    if (st != AR_OK) {
        free(values);
        return st;
    }
    *gives = values;
    return AR_OK;
}

/* What the elements of a tensor that lie in the boxes of `layout` are: each in its place, boxes one after another. */
typedef struct elements {
    uint64_t hash;
    size_t bad; /* not finite */
    float first_bad;
    bool nonzero;
} elements;

static void look_at_run(void *user, const ari_box_run *r)
{
    elements *e = user;
    e->hash = ari_hash_values(e->hash, r->local, r->count);
    for (size_t i = 0; i < r->count; i++) {
        e->nonzero = e->nonzero || r->local[i] != 0.0f;
        if (!isfinite(r->local[i]) && e->bad++ == 0)
            e->first_bad = r->local[i];
    }
}

/* Nothing of a layout without boxes: its place stays 0. */
static ar_status look_at(elements *e, ari_copy *c, ar_ctx *ctx, const ar_tensor *local, const ar_layout *layout)
{
    float *values = NULL;
    *e = (elements){.hash = ARI_FNV1A_BASIS};
    if (layout->nbox == 0 || ar_tensor_count(local) == 0)
        return AR_OK;
    AR_TRY(values_of(&values, ctx, local));
    ar_tensor host = *local; /* contiguous, or it could not have been copied */
    host.dtype = AR_F32;
    host.data.ptr = values;
    ari_for_each_run(&host, layout, look_at_run, e);
    free(values);
    *c = (ari_copy){ari_place_of(layout), e->hash};
    return AR_OK;
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

/* Of the elements whose gradient is complete here: all, or a share of them. */
static ar_status ask_gradient(ari_said *s, ar_ctx *ctx, const ar_param *p)
{
    ar_layout own = p->layout;
    ar_tensor t;
    elements e;
    if (p->own_count < ar_tensor_count(&p->value))
        AR_TRY(ari_share_layout(&own, p, p->own_start, p->own_count));
    AR_TRY(ar_ctx_tensor(ctx, &t, AR_F32, p->value.ndim, p->value.shape));
    ar_status st = ar_param_grad_value(p, ctx, &t);
    if (st == AR_OK)
        st = look_at(&e, &s->copy[ARI_COPY_GRADIENT], ctx, &t, &own);
    ar_ctx_release(ctx, &t);
    AR_TRY(st);
    s->flags |= e.nonzero ? ARI_SAID_NONZERO : 0;
    s->bad = e.bad;
    memcpy(&s->first_bad, &e.first_bad, sizeof e.first_bad);
    return AR_OK;
}

/* --- optimizer state ---------------------------------------------------------------------------------------------- */

typedef struct state_job {
    const ar_gradients *g;
    ari_said *row; /* [n] */
} state_job;

static ar_status say_state(void *user, const ar_param *p, const char *state, const ar_tensor *local,
                           const ar_layout *layout)
{
    const state_job *j = user;
    size_t i = 0;
    int k = 0;
    while (i < j->g->n && j->g->params[i] != p)
        i++;
    while (k < ARI_STATES && strcmp(ari_state_name[k], state) != 0)
        k++;
    if (k == ARI_STATES)
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s: optimizer state '%s' cannot be compared", p->name, state);
    if (i == j->g->n)
        return AR_OK;
    ari_copy one = {0, 0}, *c = &j->row[i].copy[ARI_COPY_STATE + k];
    elements e;
    AR_TRY(look_at(&e, &one, j->g->ctx, local, layout));
    /* A share may come in several pieces. */
    *c = c->place == 0 ? one : (ari_copy){ari_hash_word(c->place, one.place), ari_hash_word(c->hash, one.hash)};
    return AR_OK;
}

/* ------------------------------------------------------------------------------------------------------------------ */

static ar_status ask_param(ari_said *s, ar_ctx *ctx, const ar_param *p, const ar_gradients_verify_options *o)
{
    const bool holds = ar_tensor_count(&p->value) > 0;
    elements e;
    s->name = ari_fnv1a(p->name);
    s->flags = (holds ? ARI_SAID_HOLDS : 0) | (p->requires_grad ? ARI_SAID_TRAINABLE : 0) |
               (p->has_grad ? ARI_SAID_GRADIENT : 0);
    if (o->values)
        AR_TRY(look_at(&e, &s->copy[ARI_COPY_VALUE], ctx, &p->value, &p->layout));
    return o->gradients && holds && p->requires_grad && p->has_grad ? ask_gradient(s, ctx, p) : AR_OK;
}

static ar_status ask_own(uint64_t *words, const ar_gradients *g, const ar_gradients_verify_options *o)
{
    const ar_ctx *ctx = g->ctx;
    ari_said_header *h = (ari_said_header *)words;
    ari_said *row = (ari_said *)(h + 1);
    h->rank = (uint64_t)ar_comm_rank(ctx->dp) * (uint64_t)ar_comm_size(ctx->tp) + (uint64_t)ar_comm_rank(ctx->tp);
    h->steps = o->optimizer ? ar_optimizer_steps(o->optimizer) : 0;
    for (size_t i = 0; i < g->n; i++)
        AR_TRY(ask_param(&row[i], g->ctx, g->params[i], o));
    state_job job = {g, row};
    return o->optimizer ? ar_optimizer_save(o->optimizer, g->ctx, say_state, &job) : AR_OK;
}

ar_status ari_gradients_ask(ari_said_table *gives, const ar_gradients *g, const ar_gradients_verify_options *o)
{
    const ar_ctx *ctx = g->ctx;
    const size_t tp = (size_t)ar_comm_size(ctx->tp), dp = (size_t)ar_comm_size(ctx->dp);
    const size_t tp_rank = (size_t)ar_comm_rank(ctx->tp), dp_rank = (size_t)ar_comm_rank(ctx->dp);
    const size_t words = (sizeof(ari_said_header) + g->n * sizeof(ari_said)) / sizeof(uint64_t);
    uint64_t *all = NULL;
    ar_status st = AR_OK;
    AR_TRY_TO(failed, st, ari_alloc_zero((void **)&all, dp * tp * words, sizeof *all, "what the ranks say"));
    uint64_t *const group = all + dp_rank * tp * words;
    AR_TRY_TO(failed, st, ask_own(group + tp_rank * words, g, o));
    AR_TRY_TO(failed, st, ari_gather_words(g->ctx, ctx->tp, group, words, "gradients:verify"));
    AR_TRY_TO(failed, st, ari_gather_words(g->ctx, ctx->dp, all, tp * words, "gradients:verify"));
    *gives = (ari_said_table){all, dp * tp, g->n, words};
    return AR_OK;
failed:
    free(all);
    return st;
}
