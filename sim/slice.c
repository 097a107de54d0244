/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/slice.h"

#include "sim/fused.h"
#include "sim/sum.h"

typedef struct slice {
    ari_wire *wire;
    const ari_group *group;
    const ari_call *call;
    int c, n, mover;
    size_t element, at, end; /* in bytes */
    bool past_cache;
} slice;

static slice slice_of(ari_wire *w, int c)
{
    const ari_member *m = &w->mover->member;
    const ari_call *call = ari_group_call(m->group, m->index);
    slice s = {.wire = w,
               .group = m->group,
               .call = call,
               .c = c,
               .n = ari_group_size(m->group),
               .mover = m->index,
               .element = ar_dtype_bytes(call->dtype)};
    size_t start, size;
    ar_comm_slice(call->count, s.n, c, &start, &size);
    s.at = start * s.element;
    s.end = s.at + size * s.element;
    s.past_cache = ari_stream_pays(call->count * s.element, s.n);
    return s;
}

/* --- by pieces: what any wire can carry --------------------------------------------------------------------------- */

/* Writes what is complete to every output but the mover's own, and to that too where the sum lies elsewhere. */
static bool hand_out(const slice *s, const char *sum, size_t at, size_t bytes)
{
    for (int k = 0; k < s->n; k++) {
        const int i = s->mover + k < s->n ? s->mover + k : s->mover + k - s->n;
        char *to = (char *)ari_group_call(s->group, i)->out.ptr + at;
        if (i != s->mover && !ari_wire_put(s->wire, i, to, sum, bytes, s->past_cache))
            return false;
        if (i == s->mover && to != sum)
            ari_stream_bytes(to, sum, bytes);
    }
    return true;
}

static bool move_pieces(const slice *s, size_t from, size_t end)
{
    const ari_sum sum = ari_sum_of(s->wire, s->c);
    _Alignas(64) char result[ARI_WIRE_PIECE_BYTES];
    for (size_t at = from; at < end; at += sizeof result) {
        const size_t bytes = end - at < sizeof result ? end - at : sizeof result;
        char *to = s->past_cache ? result : (char *)s->call->out.ptr + at;
        if (!ari_sum_piece(&sum, to, at, bytes / s->element) || !hand_out(s, to, at, bytes))
            return false;
    }
    return true;
}

/* --- all at once: where memory is read and written where it lies -------------------------------------------------- */

enum { CALL_BYTES = 1 << 15 }; /* of the slice, between two looks at the wire */

/* As far as the kernel goes; returns where it stopped. */
static size_t move_fused(const slice *s, const ari_fused *f, ari_fused_fn kernel, size_t at)
{
    for (;;) {
        const size_t limit = s->end - at < CALL_BYTES ? s->end : at + CALL_BYTES, done = kernel(f, at, limit) - at;
        if (done == 0)
            return at;
        ari_wire_account(s->wire, (size_t)(s->n - 1) * done, (size_t)(s->n - 1) * done);
        at += done;
    }
}

/* The kernel takes whole vectors, past the cache from the beginning of a cache line on; pieces are the rest. */
static bool move_slice(const slice *s, ari_fused_fn kernel)
{
    const char *in[ARI_FUSED_MOST];
    char *out[ARI_FUSED_MOST];
    for (int k = 0; k < s->n; k++) {
        const int i = s->c + 1 + k; /* the ring's order */
        const ari_call *call = ari_group_call(s->group, i < s->n ? i : i - s->n);
        in[k] = call->in.ptr;
        out[k] = call->out.ptr;
    }
    const ari_fused f = {.in = in,
                         .out = out,
                         .inputs = s->n,
                         .outputs = s->n,
                         .divisor = s->call->op == AR_AVG ? s->n : 0,
                         .past_cache = s->past_cache};
    size_t head = 0;
    if (s->past_cache && (!ari_fused_head(&f, s->at, s->element, &head) || head > s->end - s->at))
        head = s->end - s->at;
    return move_pieces(s, s->at, s->at + head) && move_pieces(s, move_fused(s, &f, kernel, s->at + head), s->end);
}

bool ari_slice_move(ari_wire *w, int c)
{
    const slice s = slice_of(w, c);
    const ari_fused_fn kernel = ari_fused_kernel(s.call->dtype, s.call->op);
    const bool fused = kernel && w->plain && s.n > 1 && s.n <= ARI_FUSED_MOST;
    const bool good = fused ? move_slice(&s, kernel) : move_pieces(&s, s.at, s.end);
    if (s.past_cache)
        ari_stream_end();
    return good;
}
