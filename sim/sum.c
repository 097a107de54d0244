/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/sum.h"
#include "ref/comm/comm_private.h"

ari_sum ari_sum_of(ari_wire *w, int end, bool is_full)
{
    return (ari_sum){.wire = w,
                     .kernel = ari_reduce_kernel(w->call->dtype, w->call->op),
                     .first_member = (end + 1) % w->n,
                     .last_member = is_full ? end : (end + w->n - 1) % w->n};
}

size_t ari_sum_piece_count(const ari_sum *s)
{
    return ARI_WIRE_PIECE_BYTES / s->wire->element;
}

/* Returns the input of member first_member + k as it arrives. */
static const void *input(const ari_sum *s, int k, size_t offset, size_t bytes, int place)
{
    const int n = s->wire->n, i = s->first_member + k < n ? s->first_member + k : s->first_member + k - n;
    const char *ptr = (const char *)ari_group_call(s->wire->group, i)->input.ptr + offset;
    return i == s->wire->self ? ptr : ari_wire_read(s->wire, i, ptr, bytes, place);
}

/* Three inputs at a time are added to the sum, so that it passes through the cache less often. */
bool ari_sum_piece(const ari_sum *s, void *out, size_t offset, size_t count)
{
    const int n = s->wire->n, ranks = (s->last_member + n - s->first_member) % n + 1;
    const size_t bytes = count * s->wire->element;
    _Alignas(64) char partial[ARI_WIRE_PIECE_BYTES];
    const void *sum = input(s, 0, offset, bytes, 0);
    if (!sum)
        return false;
    if (ranks == 1)
        ari_copy_bytes(out, sum, bytes);
    for (int k = 1; k < ranks;) {
        const int joining = k + 3 <= ranks ? 3 : 1;
        void *dst = k + joining == ranks ? out : partial;
        const void *addends[3] = {0};
        for (int j = 0; j < joining; j++) {
            addends[j] = input(s, k + j, offset, bytes, 1 + j);
            if (!addends[j])
                return false;
        }
        if (joining == 3)
            s->kernel.four(dst, sum, addends[0], addends[1], addends[2], count);
        else
            s->kernel.pair(dst, sum, addends[0], count);
        k += joining;
        sum = partial;
    }
    return true;
}

/* --- slices ------------------------------------------------------------------------------------------------------- */

/* Slice c of an all_reduce. */
typedef struct slice {
    ari_wire *wire;
    int c;
    size_t begin, end; /* range in bytes */
    bool past_cache;
} slice;

static slice slice_of(ari_wire *w, int c)
{
    size_t start, size;
    ari_comm_slice(w->call->count, w->n, c, &start, &size);
    return (slice){.wire = w,
                   .c = c,
                   .begin = start * w->element,
                   .end = (start + size) * w->element,
                   .past_cache = ari_stream_pays(w->call->count * w->element, w->n)};
}

/* Copies a sum to the outputs in pieces that any wire can transfer. */

/* Writes the complete sum to every output except the mover's, and to the mover's as well if the sum is stored
 * elsewhere. */
static bool hand_out(const slice *s, const char *sum, size_t offset, size_t bytes)
{
    ari_wire *w = s->wire;
    for (int k = 0; k < w->n; k++) {
        const int i = (w->self + k) % w->n;
        char *dst = (char *)ari_group_call(w->group, i)->out.ptr + offset;
        if (i != w->self && !ari_wire_put(w, i, dst, sum, bytes, s->past_cache))
            return false;
        if (i == w->self && dst != sum)
            ari_stream_bytes(dst, sum, bytes);
    }
    return true;
}

static bool move_pieces(const slice *s, size_t begin, size_t end)
{
    const ari_sum sum = ari_sum_of(s->wire, s->c, true);
    _Alignas(64) char result[ARI_WIRE_PIECE_BYTES];
    for (size_t offset = begin; offset < end; offset += sizeof result) {
        const size_t bytes = end - offset < sizeof result ? end - offset : sizeof result;
        char *dst = s->past_cache ? result : (char *)s->wire->call->out.ptr + offset;
        if (!ari_sum_piece(&sum, dst, offset, bytes / s->wire->element) || !hand_out(s, dst, offset, bytes))
            return false;
    }
    return true;
}

/* Moves the data in one call, where memory can be read and written in place. */

enum { CALL_BYTES = 1 << 15 }; /* bytes of a slice between two checks of the wire */

/* Runs the fused kernel as far as it applies and returns the offset at which it stopped. */
static size_t move_fused(const slice *s, const ari_fused *f, ari_fused_fn kernel, size_t offset)
{
    const size_t peer_count = (size_t)f->inputs - 1;
    for (;;) {
        const size_t limit = s->end - offset < CALL_BYTES ? s->end : offset + CALL_BYTES,
                     moved_bytes = kernel(f, offset, limit) - offset;
        if (moved_bytes == 0)
            return offset;
        ari_wire_account(s->wire, peer_count * moved_bytes, peer_count * moved_bytes);
        offset += moved_bytes;
    }
}

/* The kernel processes whole vectors and bypasses the cache from the start of a cache line on; the rest is moved in
 * pieces. */
static bool move_slice(const slice *s, ari_fused_fn kernel)
{
    const ari_wire *w = s->wire;
    const char *inputs[ARI_MAX_FUSED];
    char *out[ARI_MAX_FUSED];
    for (int k = 0; k < w->n; k++) {
        const ari_call *call = ari_group_call(w->group, (s->c + 1 + k) % w->n); /* the ring's order */
        inputs[k] = call->input.ptr;
        out[k] = call->out.ptr;
    }
    const ari_fused f = {.in = inputs, .out = out, .inputs = w->n, .outputs = w->n, .past_cache = s->past_cache};
    size_t head = 0;
    if (s->past_cache && (!ari_fused_head(&f, s->begin, w->element, &head) || head > s->end - s->begin))
        head = s->end - s->begin;
    return move_pieces(s, s->begin, s->begin + head) &&
           move_pieces(s, move_fused(s, &f, kernel, s->begin + head), s->end);
}

bool ari_slice_move(ari_wire *w, int c)
{
    const slice s = slice_of(w, c);
    const ari_fused_fn kernel = ari_fused_kernel(w->call->dtype, w->call->op);
    const bool fused = kernel && w->plain && w->n > 1 && w->n <= ARI_MAX_FUSED;
    const bool good = fused ? move_slice(&s, kernel) : move_pieces(&s, s.begin, s.end);
    if (s.past_cache)
        ari_stream_end();
    return good;
}
