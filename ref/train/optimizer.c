/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/train/optimizer.h"
#include "ref/record/ledger.h"

#include <fnmatch.h>
#include <math.h>
#include <stdlib.h>

#include "ref/context/context_private.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/param_private.h"
#include "ref/layers/parts.h"
#include "ref/train/faults.h"
#include "ref/train/optimizer_private.h"
#include "ref/train/train_private.h"

/* --- state -------------------------------------------------------------------------------------------------------- */

/* --- an update ---------------------------------------------------------------------------------------------------- */

ari_update_rule ari_update_rule_of(const ar_optimizer_options *o, const char *name, int ndim)
{
    const bool decays = o->decay == AR_DECAY_ALL || ndim == 2;
    ari_update_rule rule = {.lr_scale = 1.0, .weight_decay = decays ? o->weight_decay : 0.0};
    for (size_t i = o->groups; i-- > 0;) {
        const ar_param_group *group = &o->group[i];
        if (fnmatch(group->glob, name, 0) != 0)
            continue;
        rule.lr_scale = group->lr_scale;
        rule.weight_decay = isnan(group->weight_decay) ? rule.weight_decay : group->weight_decay;
        break;
    }
    return rule;
}

void ari_update_begin(ari_optimizer_clock *clock, const ar_optimizer_options *o, const ar_ctx *ctx)
{
    if (ari_faulty(ctx, "optimizer_counter_ahead") && clock->steps == 0) /* an update without gradients before */
        ari_optimizer_tick(clock, o);
    ari_optimizer_tick(clock, o);
}

ari_optimizer_constants ari_update_constants(const ari_optimizer_clock *clock, const ar_optimizer_options *o,
                                             const ar_param *p, const ar_ctx *ctx)
{
    ari_update_rule rule = ari_update_rule_of(o, p->name, p->layout.ndim);
    ari_optimizer_clock local_clock = *clock;
    ar_optimizer_options options = *o;
    ari_fault_update(&local_clock, &rule, o, p, ctx);
    options.kind = ari_update_kind(o, p);
    return ari_optimizer_constants_of(&local_clock, &options, rule.lr_scale, rule.weight_decay);
}

ar_status ari_update_apply(ar_ctx *ctx, const ari_update_part *part, const ar_tensor *g,
                           const ari_optimizer_constants *k)
{
    const ar_tensor w = ari_tensor_flat(part->master.ptr ? AR_BF16 : AR_F32, part->weight, ar_tensor_count(g));
    return ARI_KERNEL(ctx, optimizer_step, &w, part->master, part->m, part->v, g, k);
}

/* --- state -------------------------------------------------------------------------------------------------------- */

/* The n kinds of state that are kept: their names in PyTorch's state_dict, and the passes of their taps (0: none, for
 * the weight in higher precision). */
typedef struct kinds {
    int n;
    const char *name[3];
    char pass[3];
    ar_buf buf[3];
} kinds;

static void add_kind(kinds *k, const char *name, char pass, ar_buf buf)
{
    if (!buf.ptr)
        return;
    k->name[k->n] = name;
    k->pass[k->n] = pass;
    k->buf[k->n++] = buf;
}

static kinds kinds_of(const ari_update_part *part)
{
    kinds k = {0};
    add_kind(&k, part->v.ptr ? "exp_avg" : "momentum_buffer", 'm', part->m);
    add_kind(&k, "exp_avg_sq", 'v', part->v);
    add_kind(&k, "master", 0, part->master);
    return k;
}

static ar_status create_zero(ar_buf *out, size_t *bytes, ar_ctx *ctx, size_t count)
{
    size_t size = 0;
    AR_TRY(ari_mul_size(&size, count, sizeof(float)));
    AR_TRY(ari_add_size(bytes, *bytes, size));
    AR_TRY(ari_ctx_alloc(ctx, out, size));
    return ARI_KERNEL(ctx, zero, *out, size);
}

/* Fills the master copy, which equals the weights at first and later rounds to them. */
static ar_status fill_master(const ari_state *s, ar_ctx *ctx)
{
    const ar_param *p = s->param;
    const ar_tensor master = ari_tensor_flat(AR_F32, s->part.master, s->count);
    ar_tensor run = ari_tensor_flat(AR_BF16, p->value.data, s->count);
    if (s->is_full)
        return ARI_KERNEL(ctx, copy_strided, &master, &run);
    if (ari_value_is_shared(p)) { /* the elements of a shard */
        run.data = p->share->value;
        return ARI_KERNEL(ctx, copy_strided, &master, &run);
    }
    AR_TRY(ar_ctx_tensor(ctx, &run, AR_BF16, 1, &s->count));
    AR_TRY(ari_share_get(ctx, run.data, p, &p->value, s->start, s->count));
    AR_TRY(ARI_KERNEL(ctx, copy_strided, &master, &run));
    ar_ctx_release(ctx, &run);
    return AR_OK;
}

ar_status ari_state_create(ari_state *s, size_t *bytes, ar_ctx *ctx, const ar_optimizer_options *o)
{
    const ar_param *p = s->param;
    const ar_optimizer_kind kind = ari_update_kind(o, p);
    const bool adam = kind == AR_OPTIMIZER_ADAM || kind == AR_OPTIMIZER_ADAMW;
    if (kind != AR_OPTIMIZER_SGD || o->momentum != 0.0)
        AR_TRY(create_zero(&s->part.m, bytes, ctx, s->count));
    if (adam)
        AR_TRY(create_zero(&s->part.v, bytes, ctx, s->count));
    if (p->value.dtype != AR_BF16)
        return AR_OK;
    AR_TRY(create_zero(&s->part.master, bytes, ctx, s->count));
    return fill_master(s, ctx);
}

static void state_destroy(ari_state *s, ar_device *d)
{
    d->ops->free(d, NULL, s->part.m);
    d->ops->free(d, NULL, s->part.v);
    d->ops->free(d, NULL, s->part.master);
    s->part = (ari_update_part){{NULL}, {NULL}, {NULL}, {NULL}};
}

ar_status ari_state_begin(ar_tensor *local, const ari_state *s, ar_ctx *ctx, ar_buf state, bool filled)
{
    const ar_tensor *value = &s->param->value;
    if (s->is_full)
        return ar_tensor_view(local, AR_F32, value->ndim, value->shape, state);
    AR_TRY(ar_ctx_tensor(ctx, local, AR_F32, value->ndim, value->shape));
    return filled ? ari_share_put(ctx, ar_const(state), s->param, local, s->start, s->count) : AR_OK;
}

ar_status ari_state_end(ar_tensor *local, const ari_state *s, ar_ctx *ctx, ar_buf state, bool is_stored)
{
    if (s->is_full)
        return AR_OK;
    const ar_status st = is_stored ? ari_share_get(ctx, state, s->param, local, s->start, s->count) : AR_OK;
    ar_ctx_release(ctx, local);
    return st;
}

static ar_status save_kind(const ari_state *s, ar_ctx *ctx, const char *name, ar_buf buf, const ar_layout *layout,
                           ar_optimizer_state_fn emit, void *user)
{
    ar_tensor local;
    AR_TRY(ari_state_begin(&local, s, ctx, buf, true));
    AR_TRY(emit(user, s->param, name, &local, layout));
    return ari_state_end(&local, s, ctx, buf, false);
}

ar_status ari_state_layout(ar_layout *o, const ari_state *s, ar_ctx *ctx)
{
    if (!s->is_full)
        return ari_share_layout(o, s->param, ctx, s->start, s->count);
    *o = ari_full_layout(s->param, ctx);
    return AR_OK;
}

/* Calls emit for each kind of state, with its position in the Hugging Face shape. Errors: those of emit. */
static ar_status state_save(const ari_state *s, ar_ctx *ctx, ar_optimizer_state_fn emit, void *user)
{
    const kinds k = kinds_of(&s->part);
    ar_layout layout;
    AR_TRY(ari_state_layout(&layout, s, ctx));
    for (int i = 0; i < k.n; i++)
        AR_TRY(save_kind(s, ctx, k.name[i], k.buf[i], &layout, emit, user));
    return AR_OK;
}

typedef struct tap_to {
    ar_ctx *ctx;
    char pass;
} tap_to;

static ar_status tap_kind(void *user, const ar_param *p, const char *state, const ar_tensor *local,
                          const ar_layout *layout)
{
    const tap_to *t = user;
    (void)state;
    return ari_tap(t->ctx, p->name, t->pass, local, layout);
}

ar_status ari_state_tap(const ari_state *s, ar_ctx *ctx)
{
    const kinds k = kinds_of(&s->part);
    if (!ari_tapped(ctx))
        return AR_OK;
    ar_layout layout;
    AR_TRY(ari_state_layout(&layout, s, ctx));
    for (int i = 0; i < k.n; i++) {
        tap_to tap = {ctx, k.pass[i]};
        if (tap.pass)
            AR_TRY(save_kind(s, ctx, k.name[i], k.buf[i], &layout, tap_kind, &tap));
    }
    return AR_OK;
}

static ar_status load_kind(const ari_state *s, ar_ctx *ctx, const char *name, ar_buf buf, const float *full)
{
    ARI_OWNED float *host = NULL;
    ar_tensor local;
    AR_TRY(ARI_ALLOC(&host, ar_tensor_count(&s->param->value) + 1, name));
    ari_layout_take(host, &s->param->value, &s->param->layout, full);
    AR_TRY(ari_state_begin(&local, s, ctx, buf, false));
    AR_TRY(ar_ctx_upload(ctx, &local, host));
    return ari_state_end(&local, s, ctx, buf, true);
}

/* Copies this rank's elements from full tensors. Errors: AR_ERR_NOT_FOUND. */
static ar_status state_load(const ari_state *s, ar_ctx *ctx, ari_state_find find, void *user)
{
    const kinds k = kinds_of(&s->part);
    const size_t count = ari_layout_count(&s->param->layout);
    for (int i = 0; i < k.n; i++) {
        const float *full = find(user, s->param->name, k.name[i], count);
        if (!full)
            return ar_error_set(AR_ERR_NOT_FOUND, "the optimizer's state holds no %s of %s with %zu elements",
                                k.name[i], s->param->name, count);
        AR_TRY(load_kind(s, ctx, k.name[i], k.buf[i], full));
    }
    return AR_OK;
}

ar_status ari_update_clip(ar_ctx *ctx, const ari_state *s, const ari_update_part *part)
{
    const ar_param *p = s->param;
    const bool across = p->transposed && s->is_full; /* a share's elements are in the order of the layer's matrix */
    const size_t rows = p->value.ndim == 1 ? 1 : p->value.shape[1], inputs = p->transposed ? p->value.shape[0] : rows;
    const ar_tensor w = ari_tensor_flat(p->value.dtype, part->weight, s->count);
    const ar_tensor t = part->master.ptr ? ari_tensor_flat(AR_F32, part->master, s->count) : w;
    ARI_OWNED float *host = NULL;
    if (!p->clip || s->count == 0 || ctx->device->hollow)
        return AR_OK;
    AR_TRY(ARI_ALLOC(&host, s->count, p->name));
    AR_TRY(ar_ctx_download(ctx, host, &t));
    for (size_t i = 0; i < s->count; i++)
        host[i] *= p->clip[across ? i % rows : (s->start + i) / inputs];
    AR_TRY(ar_ctx_upload(ctx, &t, host));
    return part->master.ptr ? ARI_KERNEL(ctx, copy_strided, &w, &t) : AR_OK;
}

/* --- optimizer ---------------------------------------------------------------------------------------------------- */

ARI_OWNER(ar_optimizer, ar_optimizer_destroy)

static ar_status add_param(ar_optimizer *o, ar_ctx *ctx, ar_param *p)
{
    for (size_t i = 0; i < o->n; i++) {
        if (o->states[i].param == p)
            return ar_error_set(AR_ERR_ARG, "an optimizer is given the parameter %s twice", p->name);
    }
    ari_state *s = &o->states[o->n++]; /* counted first, so that destroy frees a partly built state */
    *s = (ari_state){.param = p, .is_full = true, .count = ar_tensor_count(&p->value)};
    return ari_state_create(s, &o->bytes, ctx, &o->options);
}

static ar_status create_optimizer(ar_optimizer **out, ar_ctx *ctx, const ar_optimizer_options *o)
{
    AR_TRY(ari_optimizer_check(o));
    AR_TRY(ARI_ALLOC_ZERO(out, 1, "an optimizer"));
    (*out)->options = *o;
    (*out)->device = ctx->device;
    return AR_OK;
}

ar_status ar_optimizer_create(ar_optimizer **out, ar_ctx *ctx, ar_param *const *params, size_t n,
                              const ar_optimizer_options *o)
{
    ARI_OWNED_BY(ar_optimizer_destroy) ar_optimizer *optimizer = NULL;
    AR_TRY(create_optimizer(&optimizer, ctx, o));
    AR_TRY(ARI_ALLOC(&optimizer->states, n, "an optimizer's parameters"));
    for (size_t i = 0; i < n; i++) {
        if (params[i]->requires_grad)
            AR_TRY(add_param(optimizer, ctx, params[i]));
    }
    ARI_GIVE(out, optimizer);
    return AR_OK;
}

ar_status ar_optimizer_create_sharded(ar_optimizer **out, ar_ctx *ctx, ar_ddp *ddp, const ar_optimizer_options *o)
{
    ARI_OWNED_BY(ar_optimizer_destroy) ar_optimizer *optimizer = NULL;
    AR_TRY(create_optimizer(&optimizer, ctx, o));
    optimizer->ddp = ddp;
    AR_TRY(ari_zero_init(optimizer, ctx));
    ARI_GIVE(out, optimizer);
    return AR_OK;
}

void ar_optimizer_destroy(ar_optimizer *o)
{
    if (!o)
        return;
    for (size_t i = 0; i < o->n; i++)
        state_destroy(&o->states[i], o->device);
    free(o->states);
    free(o);
}

/* The gradient in the layout of the value, in the memory of `room`. */
static ar_status gradient_of(ar_tensor *g, ar_ctx *ctx, const ar_param *p, const ar_tensor *scratch, float scale)
{
    AR_TRY(ar_tensor_view(g, AR_F32, p->value.ndim, p->value.shape, scratch->data));
    AR_TRY(ar_param_grad_value(p, ctx, g));
    if (scale == 1.0f)
        return AR_OK;
    return ARI_KERNEL(ctx, scale, g, g, scale);
}

static ar_status step_all(ar_optimizer *o, ar_ctx *ctx, const ar_tensor *scratch, float scale)
{
    ari_update_begin(&o->clock, &o->options, ctx);
    for (size_t i = 0; i < o->n; i++) {
        const ari_state *s = &o->states[i];
        ar_tensor g;
        if (!ari_is_updated(s->param))
            continue;
        AR_TRY(gradient_of(&g, ctx, s->param, scratch, scale));
        s->param->version++;
        const ari_optimizer_constants k = ari_update_constants(&o->clock, &o->options, s->param, ctx);
        ari_update_part part = s->part;
        part.weight = s->param->value.data;
        AR_TRY(ari_update_kind(&o->options, s->param) == AR_OPTIMIZER_MUON ? ari_muon_step(o, ctx, s->param, s, &g)
                                                                           : ari_update_apply(ctx, &part, &g, &k));
        AR_TRY(ari_update_clip(ctx, s, &part));
    }
    return AR_OK;
}

static size_t largest(const ar_optimizer *o)
{
    size_t max_count = 0;
    for (size_t i = 0; i < o->n; i++) {
        const size_t count = ar_tensor_count(&o->states[i].param->value);
        max_count = count > max_count ? count : max_count;
    }
    return max_count;
}

/* Refuses a gradient of which this rank has only a shard, since ranks would get different weights. */
static ar_status check_whole(const ar_optimizer *o)
{
    for (size_t i = 0; i < o->n; i++) {
        const ar_param *p = o->states[i].param;
        if (ari_is_updated(p) && p->sharded)
            return ar_error_set(AR_ERR_ARG,
                                "%s: the data-parallel ranks share out its gradient (ZeRO), but not this optimizer: "
                                "make it with ar_optimizer_create_sharded",
                                p->name);
    }
    return AR_OK;
}

ar_status ar_optimizer_step(ar_optimizer *o, ar_ctx *ctx, float scale)
{
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_UPDATE, .name = ""));
    if (o->ddp)
        return ari_zero_step(o, ctx, scale);
    AR_TRY(check_whole(o));
    const size_t max_count = largest(o);
    ar_tensor scratch; /* allocated before the first weight changes, so that no allocation can fail later */
    AR_TRY(ar_ctx_tensor(ctx, &scratch, AR_F32, 1, &max_count));
    const ar_status st = step_all(o, ctx, &scratch, scale);
    ar_ctx_release(ctx, &scratch);
    AR_TRY(st);
    for (size_t i = 0; i < o->n; i++) {
        AR_TRY(ari_param_tap(o->states[i].param, ctx, 'n', &o->states[i].param->value));
        AR_TRY(ari_state_tap(&o->states[i], ctx));
    }
    return AR_OK;
}

ar_status ar_optimizer_save(ar_optimizer *o, ar_ctx *ctx, ar_optimizer_state_fn emit, void *user)
{
    for (size_t i = 0; i < o->n; i++)
        AR_TRY(state_save(&o->states[i], ctx, emit, user));
    return AR_OK;
}

/* Computes the optimizer's clock after `steps` steps by multiplying step by step. Errors: AR_ERR_ARG for more than
 * UINT32_MAX steps, which is the largest step count of a training run. */
static ar_status clock_after(ari_optimizer_clock *clock, const ar_optimizer_options *o, uint64_t steps)
{
    if (steps > UINT32_MAX)
        return ar_error_set(AR_ERR_ARG, "an optimizer after %llu steps, expected at most %lu",
                            (unsigned long long)steps, (unsigned long)UINT32_MAX);
    *clock = (ari_optimizer_clock){0};
    for (uint64_t t = 0; t < steps; t++)
        ari_optimizer_tick(clock, o);
    return AR_OK;
}

ar_status ar_optimizer_load(ar_optimizer *o, ar_ctx *ctx, uint64_t steps,
                            const float *(*find)(void *user, const char *param, const char *state, size_t count),
                            void *user)
{
    AR_TRY(clock_after(&o->clock, &o->options, steps));
    for (size_t i = 0; i < o->n; i++)
        AR_TRY(state_load(&o->states[i], ctx, find, user));
    return AR_OK;
}

uint64_t ari_optimizer_steps(const ar_optimizer *o)
{
    return o->clock.steps;
}

size_t ari_optimizer_bytes(const ar_optimizer *o)
{
    return o->bytes;
}
