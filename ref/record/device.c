/* SPDX-License-Identifier: Apache-2.0 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/queue_impl.h"
#include "ref/core/size.h"
#include "ref/core/tensor_private.h"
#include "ref/cpu/device.h"
#include "ref/record/dry.h"

/* Address range that no process has mapped, so that reading it ends the process. */
#define FIRST ((uintptr_t)1 << 62)
#define LAST ((uintptr_t)3 << 62)

typedef struct dry_device {
    ar_device base;
    const ar_device *like;
    ari_ledger *ledger;     /* ledger that records copies; NULL: none */
    uintptr_t next_address; /* address */
} dry_device;

/* --- queues ------------------------------------------------------------------------------------------------------- */

/* Marks on streams: callers must still ask the device, although nothing is ever in flight. */
static ar_status stream_mark(ari_stream *s, ari_mark **m)
{
    if (*m)
        return AR_OK;
    AR_TRY(ARI_ALLOC(m, 1, "a mark"));
    **m = (ari_mark){s->ops};
    return AR_OK;
}

static ar_status stream_wait(ari_stream *s, const ari_mark *m)
{
    (void)s, (void)m;
    return AR_OK;
}

static ar_status stream_await(const ari_mark *m, uint64_t timeout_ns)
{
    (void)m, (void)timeout_ns;
    return AR_OK;
}

static ar_status stream_poll(const ari_mark *m, bool *is_done)
{
    (void)m;
    *is_done = true;
    return AR_OK;
}

static void mark_destroy(ari_mark *m)
{
    free(m);
}

static void stream_destroy(ari_stream *s)
{
    free(s);
}

static ar_status dry_queue_create(ar_device *d, ar_queue **out, ar_queue_kind kind, const char *name)
{
    static const ari_stream_ops ops = {.mark = stream_mark,
                                       .wait = stream_wait,
                                       .await = stream_await,
                                       .poll = stream_poll,
                                       .mark_destroy = mark_destroy,
                                       .destroy = stream_destroy};
    ari_stream *s = NULL;
    (void)kind;
    AR_TRY(ARI_ALLOC(&s, 1, "a stream"));
    *s = (ari_stream){.ops = &ops, .device = d};
    const ar_status st = ari_queue_create_on(out, AR_QUEUE_INLINE, name, s);
    if (st != AR_OK)
        free(s);
    return st;
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

/* Allocates a new address, also after memory was freed, since a value is identified by its address. */
static ar_status dry_alloc(ar_device *device, ar_queue *q, ar_buf *out, size_t bytes)
{
    dry_device *d = (dry_device *)device;
    const size_t unit = 64;
    (void)q;
    if (bytes > LAST - d->next_address - 2 * unit)
        return ar_error_set(AR_ERR_OVERFLOW, "%zu bytes more than there are addresses", bytes);
    out->ptr = (void *)d->next_address;
    d->next_address += (bytes / unit + 1) * unit;
    return AR_OK;
}

static void dry_free(ar_device *d, ar_queue *q, ar_buf b)
{
    (void)d, (void)q, (void)b;
}

/* Copies to the host. */
static ar_status dry_copy(ar_device *d, ar_queue *q, ar_buf dst, ar_cbuf src, size_t bytes)
{
    ari_ledger *ledger = ((dry_device *)d)->ledger;
    (void)q;
    if ((uintptr_t)dst.ptr < FIRST && bytes > 0)
        memset(dst.ptr, 0, bytes);
    return ledger && (uintptr_t)dst.ptr >= FIRST ? ari_ledger_copy(ledger, dst.ptr, bytes, src.ptr) : AR_OK;
}

static void dry_destroy(ar_device *d)
{
    free(d);
}

/* --- operands ----------------------------------------------------------------------------------------------------- */

/* An ar_packed of this device. */
typedef struct packed {
    size_t batch, rows, k, bytes;
} packed;

static ar_status give_packed(ar_packed **out, packed form)
{
    void *memory = NULL;
    AR_TRY(ari_alloc(&memory, 1, sizeof form, "a packed operand"));
    *(packed *)memory = form;
    *out = memory;
    return AR_OK;
}

static const packed *packed_of(const ar_packed *p)
{
    return (const packed *)(const void *)p;
}

static ar_status dry_packed_create(ar_device *d, ar_queue *q, ar_packed **out, size_t batch, size_t rows, size_t k,
                                   unsigned form_of)
{
    const ar_device *like = ((const dry_device *)d)->like;
    packed form = {.batch = batch, .rows = rows, .k = k};
    (void)q;
    AR_TRY(like->ops->packed_room(like, &form.bytes, batch, rows, k, form_of, NULL));
    return give_packed(out, form);
}

static ar_status dry_packed_part(ar_device *d, ar_queue *q, ar_packed **out, const ar_packed *full, const ar_part *part)
{
    const ar_device *like = ((const dry_device *)d)->like;
    const packed *full_form = packed_of(full);
    packed form = {.batch = part->matrices, .rows = part->rows, .k = part->cols};
    (void)q;
    AR_TRY(ari_part_check(part, full_form->batch, full_form->rows, full_form->k, "packed_part"));
    AR_TRY(like->ops->packed_room(like, &form.bytes, full_form->batch, full_form->rows, full_form->k, 0, part));
    return give_packed(out, form);
}

static void dry_packed_destroy(ar_device *d, ar_queue *q, ar_packed *p)
{
    (void)d, (void)q;
    free(p);
}

static size_t dry_packed_bytes(const ar_packed *p)
{
    return packed_of(p)->bytes;
}

static ar_status dry_packed_room(const ar_device *d, size_t *bytes, size_t batch, size_t rows, size_t k, unsigned form,
                                 const ar_part *part)
{
    const ar_device *like = ((const dry_device *)d)->like;
    return like->ops->packed_room(like, bytes, batch, rows, k, form, part);
}

/* --- kernels ------------------------------------------------------------------------------------------------------ */

/* A slot that does nothing. C requires names for its arguments. */
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define NOTHING(slot, ...)                                                   \
    static ar_status dry_##slot(ar_device *device, ar_queue *q, __VA_ARGS__) \
    {                                                                        \
        return AR_OK;                                                        \
    }
typedef const ar_tensor *tensor;
typedef const ar_row_sum *row_sum;
typedef const struct ari_optimizer_constants *constants;

NOTHING(zero, ar_buf dst, size_t bytes)
NOTHING(gemm_f32, tensor c, tensor a, tensor b, bool add, ar_precision operands)
NOTHING(bias_act, tensor y, ar_cbuf bias, ar_activation act, tensor z)
NOTHING(col_exponents, ar_buf c, tensor b, bool max_into)
NOTHING(row_exponents, ar_buf e, tensor a, ar_cbuf c, int sign, bool max_into, bool narrow)
NOTHING(pack, ar_packed *p, size_t row_at, size_t k_at, tensor a, ar_cbuf c, int sign, ar_cbuf e)
NOTHING(gemm_i64, ar_buf s, const ar_packed *a, const ar_packed *b, int limbs, bool add)
NOTHING(gemm_round, tensor y, const ar_packed *a, const ar_packed *b, ar_cbuf e, ar_cbuf f, ar_cbuf bias,
        ar_activation act, tensor z, const ar_band *band)
NOTHING(gemm_acc, ar_buf t, ar_buf hl, size_t low, bool narrow, const ar_packed *a, const ar_packed *b, ar_cbuf e,
        ar_cbuf f, const ar_runs *runs, bool fresh)
NOTHING(round_i64, ar_buf y, ar_cbuf s, int limbs, size_t start, size_t count, size_t n, ar_cbuf e, ar_cbuf f)
NOTHING(acc_add, ar_buf t, ar_buf hl, bool narrow, size_t rows, tensor terms, ar_cbuf row_of)
NOTHING(acc_value, tensor y, ar_cbuf t, ar_cbuf hl, size_t n, bool narrow)
NOTHING(acc_put, ar_buf t, ar_buf h, ar_buf l, ar_cbuf x, size_t n, bool narrow)
NOTHING(states_narrow, ar_buf dst, ar_cbuf t, ar_cbuf h, ar_cbuf l, size_t n, size_t width, bool narrow)
NOTHING(states_merge, ar_buf t, ar_buf h, ar_buf l, ar_cbuf src, size_t ranks, size_t n, size_t width, bool narrow)
NOTHING(sum_rows_f32, ar_buf acc, size_t rows, tensor terms, ar_cbuf row_of)
NOTHING(add, tensor y, tensor a, tensor b)
NOTHING(mul, tensor y, tensor a, tensor b)
NOTHING(fill, tensor y, float value)
NOTHING(act_backward, tensor dx, tensor dy, tensor x, ar_activation act, row_sum dbias)
NOTHING(gated_forward, tensor y, tensor gate, tensor up, ar_activation act)
NOTHING(gated_backward, tensor dgate, tensor dup, tensor dy, tensor gate, tensor up, ar_activation act,
        row_sum dgate_bias, row_sum dup_bias)
NOTHING(dropout, tensor y, tensor sum, tensor x, tensor residual, const ar_dropout *which)
NOTHING(norm_forward, ar_norm_kind kind, tensor y, ar_buf mean, ar_buf rstd, tensor x, ar_cbuf gamma, ar_cbuf beta,
        double eps)
NOTHING(norm_backward, ar_norm_kind kind, tensor dx, tensor sum, tensor dy, tensor x, ar_cbuf mean, ar_cbuf rstd,
        ar_cbuf gamma, tensor residual, row_sum dgamma, row_sum dbeta)
NOTHING(rope_tables, ar_buf cos, ar_buf sin, size_t positions, size_t head_dim, const ar_rope *rope)
NOTHING(rope, tensor y, tensor x, ar_cbuf cos, ar_cbuf sin, int direction)
NOTHING(softmax_forward, ar_buf probs, ar_cbuf scores, ar_cbuf sinks, ar_buf max, ar_buf sum, bool has_stats,
        float scale, const ar_scores *block, const ar_mask *mask)
NOTHING(softmax_backward, ar_buf ds, ar_cbuf probs, ar_buf dprobs, ar_buf dot, bool has_stats, float scale,
        const ar_scores *block, const ar_mask *mask)
NOTHING(sinks_backward, tensor terms, ar_cbuf sinks, ar_cbuf max, ar_cbuf sum, ar_cbuf dot)
NOTHING(route, ar_buf p, ar_buf expert, ar_buf weight, ar_buf lse, tensor z, const ar_route_rule *rule)
NOTHING(route_backward, tensor dz, ar_cbuf g, ar_cbuf p, ar_cbuf expert, ar_cbuf weight, const ar_route_rule *rule)
NOTHING(route_losses, tensor dz, ar_cbuf p, ar_cbuf balance, size_t tokens, ar_cbuf lse, double z, ar_cbuf valid)
NOTHING(route_terms, ar_buf terms, tensor p, ar_cbuf balance, size_t tokens, ar_cbuf lse, double z, ar_cbuf valid)
NOTHING(combine_rows, tensor y, tensor rows, ar_cbuf weight, ar_cbuf place, size_t k)
NOTHING(dot_rows, ar_buf g, tensor dy, tensor rows, ar_cbuf place, size_t k)
NOTHING(add_gated, tensor y, tensor x, tensor logit)
NOTHING(add_gated_backward, tensor dx, tensor dlogit, tensor dy, tensor x, tensor logit)
NOTHING(rows_in_range, ar_buf row_of, ar_cbuf ids, size_t n, int64_t start, int64_t count)
NOTHING(gather_rows, tensor y, tensor w, ar_cbuf row_of, ar_cbuf weight, size_t k)
NOTHING(ce_max, ar_buf key, tensor logits)
NOTHING(ce_sum, ar_buf sum, tensor logits, ar_cbuf key, size_t v)
NOTHING(ce_logits, ar_buf sum, tensor logits, ar_cbuf e, size_t v)
NOTHING(ce_target, ar_buf bits, tensor logits, ar_cbuf row_of)
NOTHING(ce_terms, ar_buf terms, ar_cbuf key, ar_cbuf sum, ar_cbuf bits, ar_cbuf valid, ar_cbuf e, ar_cbuf logits,
        const ar_loss_options *o, size_t n, size_t v)
NOTHING(ce_backward, tensor dlogits, tensor logits, ar_cbuf key, ar_cbuf sum, ar_cbuf row_of, ar_cbuf valid,
        const ar_loss_options *o, double targets, size_t v)
NOTHING(sum_squares, ar_buf sums, tensor g, ar_cbuf e)
NOTHING(round_bits, tensor y, tensor x, int bits)
NOTHING(optimizer_step, tensor w, ar_buf master, ar_buf m, ar_buf v, tensor g, constants k)

/* Values that keep their contents, or become functions of their elements that no operation records. */
static ar_status copy_value(ar_device *device, const ar_tensor *dst, const ar_tensor *src)
{
    ari_ledger *ledger = ((dry_device *)device)->ledger;
    return ledger ? ari_ledger_copy(ledger, dst->data.ptr, ari_tensor_span(dst), src->data.ptr) : AR_OK;
}

static ar_status dry_copy_strided(ar_device *device, ar_queue *q, tensor dst, tensor src)
{
    return copy_value(device, dst, src);
}

static ar_status dry_softcap(ar_device *device, ar_queue *q, tensor y, tensor x, float scale, double cap)
{
    return copy_value(device, y, x);
}

static ar_status dry_softcap_backward(ar_device *device, ar_queue *q, tensor dx, tensor dy, tensor x, float scale,
                                      double cap)
{
    return copy_value(device, dx, dy);
}

static ar_status dry_scale(ar_device *device, ar_queue *q, tensor y, tensor x, float factor)
{
    return copy_value(device, y, x);
}

/* --- the device --------------------------------------------------------------------------------------------------- */

ar_status ari_dry_device_create(ar_device **out, const ar_device *like, ari_ledger *ledger)
{
#define SLOT(slot) .slot = dry_##slot,
    static const ar_device_ops reached = {.name = "dry", .host_reaches = true, AR_DEVICE_SLOTS(SLOT)};
    static const ar_device_ops separate = {.name = "dry", .host_reaches = false, AR_DEVICE_SLOTS(SLOT)};
#undef SLOT
    dry_device *d = NULL;
    like = like ? like : ari_cpu_form();
    AR_TRY(ARI_ALLOC(&d, 1, "a device"));
    *d = (dry_device){.base = {.ops = like->ops->host_reaches ? &reached : &separate,
                               .threads = 1,
                               .block_bytes = like->block_bytes,
                               .hollow = true,
                               .thin = like->ops->host_reaches},
                      .like = like,
                      .ledger = ledger && !ledger->strict ? ledger : NULL,
                      .next_address = FIRST};
    *out = &d->base;
    return AR_OK;
}
