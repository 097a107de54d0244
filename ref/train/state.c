/* SPDX-License-Identifier: Apache-2.0 */

#include <fnmatch.h>
#include <math.h>

#include "ref/layers/parts.h"
#include "ref/train/faults.h"

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
    ari_fault_clock(clock, o, ctx);
    ari_optimizer_tick(clock, o);
}

ari_optimizer_constants ari_update_constants(const ari_optimizer_clock *clock, const ar_optimizer_options *o,
                                             const ar_param *p, const ar_ctx *ctx)
{
    ari_update_rule rule = ari_update_rule_of(o, p->name, p->layout.ndim);
    ari_optimizer_clock own = *clock;
    ar_optimizer_options options = *o;
    ari_fault_update(&own, &rule, o, p, ctx);
    options.kind = ari_update_kind(o, p);
    return ari_optimizer_constants_of(&own, &options, rule.lr_scale, rule.weight_decay);
}

ar_status ari_update_apply(ar_ctx *ctx, const ari_update_part *part, const ar_tensor *g,
                           const ari_optimizer_constants *k)
{
    const ar_tensor w = ar_tensor_flat(part->master.ptr ? AR_BF16 : AR_F32, part->weight, ar_tensor_count(g));
    return ARI_KERNEL(ctx, optimizer_step, &w, part->master, part->m, part->v, g, k);
}

/* --- state -------------------------------------------------------------------------------------------------------- */

/* The kinds of state under their names in PyTorch's state_dict, and the passes of their taps (0: none, it is the weight
 * in more digits); n of them are kept. */
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

static ar_status create_zero(ar_buf *gives, size_t *bytes, ar_ctx *ctx, size_t count)
{
    size_t size = 0;
    AR_TRY(ari_mul_size(&size, count, sizeof(float)));
    AR_TRY(ari_add_size(bytes, *bytes, size));
    AR_TRY(ari_ctx_alloc(ctx, gives, size));
    return ARI_KERNEL(ctx, zero, *gives, size);
}

/* The master copy is what the weights round: at first the same numbers. */
static ar_status fill_master(const ari_state *s, ar_ctx *ctx)
{
    const ar_param *p = s->param;
    const ar_tensor master = ar_tensor_flat(AR_F32, s->part.master, s->count);
    ar_tensor run = ar_tensor_flat(AR_BF16, p->value.data, s->count);
    if (s->whole)
        return ARI_KERNEL(ctx, copy_strided, &master, &run);
    if (ari_value_is_shared(p)) { /* the same elements */
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

void ari_state_destroy(ari_state *s, ar_device *d)
{
    d->ops->free(d, NULL, s->part.m);
    d->ops->free(d, NULL, s->part.v);
    d->ops->free(d, NULL, s->part.master);
    s->part = (ari_update_part){{NULL}, {NULL}, {NULL}, {NULL}};
}

ar_status ari_state_begin(ar_tensor *local, const ari_state *s, ar_ctx *ctx, ar_buf state, bool filled)
{
    const ar_tensor *value = &s->param->value;
    if (s->whole)
        return ar_tensor_view(local, AR_F32, value->ndim, value->shape, state);
    AR_TRY(ar_ctx_tensor(ctx, local, AR_F32, value->ndim, value->shape));
    return filled ? ari_share_put(ctx, ar_const(state), s->param, local, s->start, s->count) : AR_OK;
}

ar_status ari_state_end(ar_tensor *local, const ari_state *s, ar_ctx *ctx, ar_buf state, bool taken)
{
    if (s->whole)
        return AR_OK;
    const ar_status st = taken ? ari_share_get(ctx, state, s->param, local, s->start, s->count) : AR_OK;
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
    if (!s->whole)
        return ari_share_layout(o, s->param, ctx, s->start, s->count);
    *o = ari_whole_layout(s->param, ctx);
    return AR_OK;
}

ar_status ari_state_save(const ari_state *s, ar_ctx *ctx, ar_optimizer_state_fn emit, void *user)
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
    return ar_tap(t->ctx, p->name, t->pass, local, layout);
}

ar_status ari_state_tap(const ari_state *s, ar_ctx *ctx)
{
    const kinds k = kinds_of(&s->part);
    if (!ar_tapped(ctx))
        return AR_OK;
    ar_layout layout;
    AR_TRY(ari_state_layout(&layout, s, ctx));
    for (int i = 0; i < k.n; i++) {
        tap_to to = {ctx, k.pass[i]};
        if (to.pass)
            AR_TRY(save_kind(s, ctx, k.name[i], k.buf[i], &layout, tap_kind, &to));
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

ar_status ari_state_load(const ari_state *s, ar_ctx *ctx, ari_state_find find, void *user)
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
    const bool across = p->transposed && s->whole; /* a share's elements are in the order of the layer's matrix */
    const size_t rows = p->value.ndim == 1 ? 1 : p->value.shape[1], inputs = p->transposed ? p->value.shape[0] : rows;
    const ar_tensor w = ar_tensor_flat(p->value.dtype, part->weight, s->count);
    const ar_tensor t = part->master.ptr ? ar_tensor_flat(AR_F32, part->master, s->count) : w;
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
