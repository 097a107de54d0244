/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/context.h"

#include <math.h>
#include <stdlib.h>

#include "anyrank/arith.h"
#include "ref/core/float_bits.h"
#include "ref/core/queue_impl.h"
#include "ref/core/size.h"

ar_dtype ar_activations_of(ar_precision p)
{
    return p == AR_PRECISION_BF16 ? AR_BF16 : AR_F32;
}

ar_dtype ar_matrices_of(ar_precision p, ar_dtype storage)
{
    return p == AR_PRECISION_BF16 || storage == AR_BF16 ? AR_BF16 : AR_F32;
}

static ar_status check_storage(const ar_ctx_options *o)
{
    if (o->storage != 0 && o->storage != AR_F32 && o->storage != AR_BF16)
        return ar_error_set(AR_ERR_ARG, "parameters stored as %s, expected F32 or BF16", ar_dtype_name(o->storage));
    if (o->storage == AR_BF16 && o->numerics == AR_NUMERICS_EXACT)
        return ar_error_set(AR_ERR_ARG, "parameters stored as BF16 in exact numerics, whose weights and baseline are "
                                        "fp32: give F32, or native numerics");
    if (o->storage == AR_F32 && o->precision == AR_PRECISION_BF16)
        return ar_error_set(AR_ERR_ARG,
                            "parameters stored as F32 in precision bf16, which stores them in 16 bits: give "
                            "BF16, or precision f32 or tf32");
    return AR_OK;
}

const char *ar_recompute_name(ar_recompute r)
{
    static const char *const names[] = {"none", "selective", "full"};
    return (unsigned)r < AR_RECOMPUTES ? names[r] : "?";
}

const char *ar_precision_name(ar_precision p)
{
    static const char *const names[AR_PRECISION_COUNT] = {"f32", "tf32", "bf16"};
    return (unsigned)p < AR_PRECISION_COUNT ? names[p] : "unknown";
}

static ar_status check_precision(const ar_ctx_options *o)
{
    if ((unsigned)o->precision >= AR_PRECISION_COUNT)
        return ar_error_set(AR_ERR_ARG, "precision %d, expected 0 (f32) to %d", (int)o->precision,
                            AR_PRECISION_COUNT - 1);
    if (o->precision != AR_PRECISION_F32 && o->numerics == AR_NUMERICS_EXACT)
        return ar_error_set(
            AR_ERR_ARG,
            "precision %s in exact numerics, whose products are of fp32 numbers: give f32, or native numerics",
            ar_precision_name(o->precision));
    return AR_OK;
}

ar_status ar_loss_options_check(const ar_loss_options *o, const char *what)
{
    if (!(o->label_smoothing >= 0.0 && o->label_smoothing < 1.0))
        return ar_error_set(AR_ERR_ARG, "%s: a label smoothing of %g: a number from 0 to below 1", what,
                            o->label_smoothing);
    if (!(o->z_loss >= 0.0) || isinf(o->z_loss))
        return ar_error_set(AR_ERR_ARG, "%s: a z-loss of weight %g: a finite number from 0", what, o->z_loss);
    return AR_OK;
}

ar_status ar_ctx_create(ar_ctx **gives, const ar_ctx_options *o)
{
    if (!o->device)
        return ar_error_set(AR_ERR_ARG, "a context needs a device");
    if (!(o->dropout >= 0.0 && o->dropout < 1.0))
        return ar_error_set(AR_ERR_ARG, "dropout %g, expected a probability from 0 to less than 1", o->dropout);
    AR_TRY(ar_loss_options_check(&o->loss, "a context"));
    if (o->cp.inner && ar_comm_size(o->cp.inner) > 1 && !o->world)
        return ar_error_set(AR_ERR_ARG, "a context with inner context-parallel neighbours needs the world, of which "
                                        "groups of ranks with copies of a KV head are made");
    AR_TRY(check_storage(o));
    AR_TRY(check_precision(o));
    ar_ctx *c = calloc(1, sizeof *c);
    if (!c)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a context");
    c->device = o->device;
    c->arith = o->numerics == AR_NUMERICS_NATIVE ? ar_arith_native(o->precision) : ar_arith_exact();
    c->fault = o->fault;
    c->attempt = o->attempt;
    c->tap = o->tap;
    c->tap_user = o->tap_user;
    c->sp = o->sp;
    c->keep_gathered = o->keep_gathered;
    c->overlap = o->overlap > 1 ? o->overlap : 1;
    c->recompute = o->recompute;
    c->dropout = o->dropout;
    c->loss = o->loss;
    c->loss_scale = 1.0;
    c->activations = ar_activations_of(o->precision);
    c->matrices = ar_matrices_of(o->precision, o->storage);
    c->seed = o->seed;
    c->step = 1;
    c->owned.next = c->owned.prev = &c->owned;
    ar_status st = AR_OK;
    AR_TRY_TO(failed, st, o->device->ops->queue_create(o->device, &c->queue, AR_QUEUE_INLINE, "main"));
    AR_TRY_TO(failed, st, ar_comm_self(&c->self));
    c->tp = o->tp ? o->tp : c->self;
    c->dp = o->dp ? o->dp : c->self;
    c->cp = (ar_context_groups){.all = o->cp.all ? o->cp.all : c->self,
                                .ring = o->cp.ring ? o->cp.ring : c->self,
                                .inner = o->cp.inner ? o->cp.inner : c->self,
                                .zigzag = o->cp.zigzag};
    c->world = o->world ? o->world : c->tp;
    *gives = c;
    return AR_OK;
failed:
    ar_ctx_destroy(c);
    return st;
}

void ar_ctx_destroy(ar_ctx *c)
{
    if (!c)
        return;
    ar_ctx_end_step(c);
    ari_communication *const both[] = {&c->communication, &c->beside};
    for (int i = 0; i < 2; i++) {
        ar_queue_destroy(both[i]->queue); /* first: what it runs uses the groups */
        ar_comm_destroy(both[i]->dp);
        ar_comm_destroy(both[i]->tp);
    }
    for (int i = 0; i < 2; i++)
        ar_comm_destroy(c->replicas[i].comm);
    ar_comm_destroy(c->self);
    ar_queue_destroy(c->queue);
    free(c);
}

static void release(ar_ctx *c, ari_owned *o)
{
    o->prev->next = o->next;
    o->next->prev = o->prev;
    ari_step_gave(c, o->bytes);
    if (o->destroy)
        o->destroy(c, o->buf.ptr);
    else
        c->device->ops->free(c->device, o->buf);
    free(o);
}

void ar_ctx_end_step(ar_ctx *c)
{
    /* A step that has failed may have left collectives under way, whose memory this is. */
    if (c->beside.queue && c->owned.next != &c->owned) {
        const ari_outcome kept = ari_outcome_of(AR_ERR_ABORTED);
        if (ar_queue_sync(c->beside.queue, 0) != AR_OK)
            (void)ari_outcome_status(&kept); /* the step's own message stays */
    }
    /* The newest first: objects may refer to older ones. */
    for (ari_owned *o = c->owned.next, *next = NULL; o != &c->owned; o = next) {
        next = o->next;
        release(c, o);
    }
}

static ar_status own(ar_ctx *c, ar_buf buf, size_t bytes, void (*destroy)(ar_ctx *, void *))
{
    ari_owned *o = malloc(sizeof *o);
    if (!o)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a record of the step");
    *o = (ari_owned){
        .next = c->owned.next, .prev = &c->owned, .number = ++c->given, .buf = buf, .bytes = bytes, .destroy = destroy};
    o->next->prev = o;
    c->owned.next = o;
    ari_step_took(c, bytes);
    return AR_OK;
}

ar_status ari_step_alloc(ar_ctx *c, ar_buf *gives, size_t bytes)
{
    ar_buf b = {NULL};
    AR_TRY(c->device->ops->alloc(c->device, &b, bytes ? bytes : 1));
    const ar_status st = own(c, b, bytes, NULL);
    if (st != AR_OK) {
        c->device->ops->free(c->device, b);
        return st;
    }
    *gives = b;
    return AR_OK;
}

ar_status ari_step_own(ar_ctx *c, void *object, void (*destroy)(ar_ctx *c, void *object))
{
    const ar_buf b = {object};
    const ar_status st = own(c, b, 0, destroy);
    if (st != AR_OK)
        destroy(c, object);
    return st;
}

void ari_step_disown(ar_ctx *c, void *object)
{
    for (ari_owned *o = object ? c->owned.next : &c->owned; o != &c->owned; o = o->next) {
        if (o->buf.ptr == object) {
            release(c, o);
            return;
        }
    }
}

static bool holds(const ari_owned *o, const ar_tensor *t)
{
    const char *begin = o->buf.ptr, *at = t ? t->data.ptr : NULL;
    return at && !o->destroy && at >= begin && at < begin + (o->bytes ? o->bytes : 1);
}

void ari_step_release_since(ar_ctx *c, uint64_t mark, const ar_tensor *kept)
{
    ari_owned *newer = &c->owned; /* what stays of those at hand: an object may end older things with it */
    while (newer->next != &c->owned && newer->next->number > mark) {
        if (holds(newer->next, kept))
            newer = newer->next;
        else
            release(c, newer->next);
    }
}

void ari_step_free(ar_ctx *c, ar_buf b)
{
    ari_step_disown(c, b.ptr);
}

ar_status ari_queue_follow(ar_queue *q, ar_queue *of, ar_event *e)
{
    if (q == of)
        return AR_OK;
    AR_TRY(ar_event_record(e, of));
    return ar_queue_wait(q, e);
}

ar_comm *ar_ctx_tp(const ar_ctx *c)
{
    return c->tp;
}

ar_comm *ar_ctx_dp(const ar_ctx *c)
{
    return c->dp;
}

int ar_ctx_data_rank(const ar_ctx *c)
{
    return ar_comm_rank(c->dp) / ar_comm_size(c->cp.all);
}

ar_status ari_ctx_replicas(ar_ctx *c, ar_comm **group, int kv_heads, bool over_tp)
{
    ari_replica_group *made = &c->replicas[over_tp];
    const int inner = ar_comm_size(c->cp.inner), tp = ar_comm_size(c->tp), r = ar_comm_rank(c->tp);
    const int n = (over_tp ? tp : 1) * inner, place = (over_tp ? r : 0) * inner + ar_comm_rank(c->cp.inner);
    /* Those that share the heads: of one place of the ring of one data-parallel rank. */
    const int shared = ar_ctx_data_rank(c) * ar_comm_size(c->cp.ring) + ar_comm_rank(c->cp.ring);
    const int team = over_tp ? shared : shared * tp + r;
    if (made->heads == 0) {
        AR_TRY(ar_comm_split(&made->comm, inner > 1 ? c->world : c->tp,
                             (inner > 1 ? team * kv_heads : 0) + place * kv_heads / n, place));
        made->heads = kv_heads;
    }
    if (made->heads != kv_heads)
        return ar_error_set(AR_ERR_UNSUPPORTED, "replicas of %d KV heads and of %d in one context", made->heads,
                            kv_heads);
    *group = made->comm;
    return AR_OK;
}

ar_status ari_ctx_communication(ar_ctx *c, const ari_communication **borrows, bool tp)
{
    ari_communication *m = &c->communication;
    if (tp && !m->tp)
        AR_TRY(ar_comm_split(&m->tp, c->tp, 0, ar_comm_rank(c->tp)));
    if (ar_comm_size(c->dp) > 1 && !m->dp)
        AR_TRY(ar_comm_split(&m->dp, c->dp, 0, ar_comm_rank(c->dp)));
    if (!m->queue)
        AR_TRY(c->device->ops->queue_create(c->device, &m->queue, AR_QUEUE_THREAD, "communication"));
    *borrows = m;
    return AR_OK;
}

ar_status ari_ctx_beside(ar_ctx *c, const ari_communication **borrows)
{
    ari_communication *m = &c->beside;
    if (!m->tp)
        AR_TRY(ar_comm_split(&m->tp, c->tp, 0, ar_comm_rank(c->tp)));
    if (!m->queue)
        AR_TRY(c->device->ops->queue_create(c->device, &m->queue, AR_QUEUE_THREAD, "tp"));
    *borrows = m;
    return AR_OK;
}

void ar_ctx_begin_step(ar_ctx *c, uint32_t step)
{
    c->step = step;
}

/* The groups that the context's collectives go through, each once. */
#define GROUPS 10
static int groups_of(const ar_ctx *c, const ar_comm *group[GROUPS])
{
    const ar_comm *const all[GROUPS] = {c->tp,
                                        c->dp,
                                        c->cp.all,
                                        c->cp.ring,
                                        c->cp.inner,
                                        c->replicas[0].comm,
                                        c->replicas[1].comm,
                                        c->communication.tp,
                                        c->communication.dp,
                                        c->beside.tp};
    int n = 0;
    for (int i = 0; i < GROUPS; i++) {
        int seen = 0;
        while (seen < n && group[seen] != all[i])
            seen++;
        if (all[i] && seen == n)
            group[n++] = all[i];
    }
    return n;
}

void ar_ctx_counted(const ar_ctx *c, uint64_t *bytes_read, uint64_t *bytes_written)
{
    const ar_comm *group[GROUPS];
    const int n = groups_of(c, group);
    *bytes_read = *bytes_written = 0;
    for (int i = 0; i < n; i++) {
        uint64_t read = 0, written = 0;
        ar_comm_counted(group[i], &read, &written);
        *bytes_read += read;
        *bytes_written += written;
    }
}

uint64_t ar_ctx_calls(const ar_ctx *c, const char *kind)
{
    const ar_comm *group[GROUPS];
    const int n = groups_of(c, group);
    uint64_t calls = 0;
    for (int i = 0; i < n; i++)
        calls += ar_comm_size(group[i]) > 1 ? ar_comm_calls(group[i], kind) : 0;
    return calls;
}

void ar_ctx_place(ar_ctx *c, const ar_batch *batch)
{
    c->first_sample = batch && batch->global_batch > 0 ? batch->first_sample : 0;
    c->samples = batch ? batch->global_batch : 0;
}

ar_device *ar_ctx_device(const ar_ctx *c)
{
    return c->device;
}

ar_dtype ar_ctx_activations(const ar_ctx *c)
{
    return c->activations;
}

ar_queue *ar_ctx_queue(const ar_ctx *c)
{
    return c->queue;
}

const ar_arith_ops *ar_ctx_arith(const ar_ctx *c)
{
    return c->arith;
}

ar_status ar_ctx_tensor(ar_ctx *c, ar_tensor *t, ar_dtype dtype, int ndim, const size_t *shape)
{
    ar_tensor view;
    AR_TRY(ar_tensor_view(&view, dtype, ndim, shape, (ar_buf){NULL}));
    AR_TRY(ari_step_alloc(c, &view.data, ar_tensor_count(&view) * ar_dtype_bytes(dtype)));
    *t = view;
    return AR_OK;
}

void ar_ctx_release(ar_ctx *c, ar_tensor *t)
{
    ari_step_free(c, t->data);
    t->data.ptr = NULL;
}

ar_status ar_ctx_upload(ar_ctx *c, const ar_tensor *t, const void *host)
{
    return c->device->ops->copy(c->device, c->queue, t->data, (ar_cbuf){host},
                                ar_tensor_count(t) * ar_dtype_bytes(t->dtype));
}

ar_status ar_ctx_download(ar_ctx *c, void *host, const ar_tensor *t)
{
    AR_TRY(c->device->ops->copy(c->device, c->queue, (ar_buf){host}, ar_const(t->data),
                                ar_tensor_count(t) * ar_dtype_bytes(t->dtype)));
    return ar_queue_sync(c->queue, 0);
}

/* --- 16-bit numbers as the host has them --------------------------------------------------------------------------- */

static void widen(float *to, const uint16_t *from, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = ari_f32_of_bf16(from[i]);
}

static void narrow(uint16_t *to, const float *from, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = ari_bf16_of_f32(from[i]);
}

static ar_status check_floats(const ar_tensor *t)
{
    return t->dtype == AR_F32 || t->dtype == AR_BF16
               ? AR_OK
               : ar_error_set(AR_ERR_DTYPE, "fp32 numbers of the host for a tensor of %s, expected F32 or BF16",
                              ar_dtype_name(t->dtype));
}

ar_status ar_ctx_upload_floats(ar_ctx *c, const ar_tensor *t, const float *host)
{
    const size_t n = ar_tensor_count(t);
    uint16_t *rounded = NULL;
    AR_TRY(check_floats(t));
    if (t->dtype == AR_F32)
        return ar_ctx_upload(c, t, host);
    AR_TRY(ari_alloc((void **)&rounded, n, sizeof *rounded, "numbers of 16 bits"));
    narrow(rounded, host, n);
    const ar_status st = ar_ctx_upload(c, t, rounded);
    free(rounded);
    return st;
}

ar_status ar_ctx_download_floats(ar_ctx *c, float *host, const ar_tensor *t)
{
    const size_t n = ar_tensor_count(t);
    uint16_t *stored = NULL;
    AR_TRY(check_floats(t));
    if (t->dtype == AR_F32)
        return ar_ctx_download(c, host, t);
    AR_TRY(ari_alloc((void **)&stored, n, sizeof *stored, "numbers of 16 bits"));
    const ar_status st = ar_ctx_download(c, stored, t);
    if (st == AR_OK)
        widen(host, stored, n);
    free(stored);
    return st;
}

void ar_ctx_memory(const ar_ctx *c, size_t *now, size_t *peak)
{
    *now = c->bytes_now;
    *peak = c->bytes_peak;
}

ar_status ar_tap(ar_ctx *c, const char *name, char pass, const ar_tensor *local, const ar_layout *layout)
{
    if (!c->tap)
        return AR_OK;
    ar_tensor view;
    AR_TRY(ari_host_view(c, &view, local));
    const ar_tap_event event = {.name = name, .pass = pass, .step = c->step, .local = &view, .layout = layout};
    const ar_status st = c->tap(c->tap_user, &event);
    ari_host_view_end(&view, local);
    return st;
}

bool ar_tapped(const ar_ctx *c)
{
    return c->tap != NULL;
}

bool ar_faulty(const ar_ctx *c, ar_fault fault)
{
    return c->fault == fault;
}

/* --- tensors as the host reads them ---------------------------------------------------------------------------------- */

static ar_status get(ar_ctx *c, void *host, const ar_tensor *t)
{
    return t->dtype == AR_BF16 ? ar_ctx_download_floats(c, host, t) : ar_ctx_download(c, host, t);
}

static ar_status download(ar_ctx *c, void *host, const ar_tensor *t)
{
    ar_tensor packed;
    if (c->device->ops->host_reaches) {
        ari_pack_elements(host, t);
        return AR_OK;
    }
    if (ar_tensor_is_contiguous(t))
        return get(c, host, t);
    AR_TRY(ar_ctx_tensor(c, &packed, t->dtype, t->ndim, t->shape));
    ar_status st = c->device->ops->copy_strided(c->device, c->queue, &packed, t);
    if (st == AR_OK)
        st = get(c, host, &packed);
    ar_ctx_release(c, &packed);
    return st;
}

ar_status ari_host_view(ar_ctx *c, ar_tensor *view, const ar_tensor *t)
{
    const ar_dtype seen = t->dtype == AR_BF16 ? AR_F32 : t->dtype;
    void *host = NULL;
    *view = *t;
    if (c->device->ops->host_reaches && seen == t->dtype)
        return AR_OK;
    AR_TRY(ari_alloc(&host, ar_tensor_count(t), ar_dtype_bytes(seen), "a tensor's values on the host"));
    ar_status st = ar_tensor_view(view, seen, t->ndim, t->shape, (ar_buf){host});
    if (st == AR_OK)
        st = download(c, host, t);
    if (st != AR_OK)
        free(host);
    return st;
}

void ari_host_view_end(ar_tensor *view, const ar_tensor *t)
{
    if (view->data.ptr != t->data.ptr)
        free(view->data.ptr);
}

void ari_pack_elements(float *to, const ar_tensor *t)
{
    const size_t count = ar_tensor_count(t);
    for (size_t i = 0; i < count; i++) {
        size_t at[AR_MAX_DIMS];
        ptrdiff_t offset = 0;
        ari_coordinates(at, i, t->ndim, t->shape);
        for (int d = 0; d < t->ndim; d++)
            offset += (ptrdiff_t)at[d] * t->stride[d];
        to[i] = t->dtype == AR_BF16 ? ari_f32_of_bf16(((const uint16_t *)t->data.ptr)[offset])
                                    : ((const float *)t->data.ptr)[offset];
    }
}

void ari_for_each_run(const ar_tensor *local, const ar_layout *o, void (*f)(void *user, const ari_box_run *run),
                      void *user)
{
    const int nd = o->ndim;
    for (size_t k = 0; k < o->nbox; k++) {
        const ar_box *b = &o->box[k];
        size_t runs = 1;
        for (int d = 0; d + 1 < nd; d++)
            runs *= b->extent[d];
        const size_t width = nd > 0 ? b->extent[nd - 1] : 1;
        for (size_t i = 0; i < runs && width > 0; i++) {
            size_t rest = i, full = 0, full_stride = 1, index = 0, index_stride = 1;
            ptrdiff_t offset = 0;
            for (int d = nd - 1; d >= 0; d--) {
                const size_t x = d == nd - 1 ? 0 : rest % b->extent[d];
                rest = d == nd - 1 ? rest : rest / b->extent[d];
                full += (b->global[d] + x) * full_stride;
                index += (b->local[d] + x) * index_stride;
                offset += (ptrdiff_t)(b->local[d] + x) * local->stride[d];
                full_stride *= o->shape[d];
                index_stride *= local->shape[d];
            }
            const ari_box_run run = {(const float *)local->data.ptr + offset, nd > 0 ? local->stride[nd - 1] : 1, width,
                                     full, index};
            f(user, &run);
        }
    }
}
