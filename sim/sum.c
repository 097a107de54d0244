/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/sum.h"

static ari_sum sum_to(ari_wire *w, int end, int last, bool finishes)
{
    const ari_group *g = w->mover->member.group;
    const ari_call *call = ari_group_call(g, w->mover->member.index);
    return (ari_sum){.wire = w,
                     .group = g,
                     .kernel = ari_reduce_kernel(call->dtype, call->op),
                     .element = ar_dtype_bytes(call->dtype),
                     .first = (end + 1) % ari_group_size(g),
                     .last = last,
                     .finishes = finishes};
}

ari_sum ari_sum_of(ari_wire *w, int last)
{
    return sum_to(w, last, last, true);
}

ari_sum ari_sum_before(ari_wire *w, int last)
{
    const int n = ari_group_size(w->mover->member.group);
    return sum_to(w, last, (last + n - 1) % n, false);
}

size_t ari_sum_piece_count(const ari_sum *s)
{
    return ARI_WIRE_PIECE_BYTES / s->element;
}

/* Member first + k's input, as it arrives. */
static const void *input(const ari_sum *s, int k, size_t at, size_t bytes, int place)
{
    const int n = ari_group_size(s->group), i = s->first + k < n ? s->first + k : s->first + k - n;
    const char *ptr = (const char *)ari_group_call(s->group, i)->in.ptr + at;
    return i == s->wire->mover->member.index ? ptr : ari_wire_read(s->wire, i, ptr, bytes, place);
}

/* Three inputs at a time join the sum, so that it passes through the cache less often. */
bool ari_sum_piece(const ari_sum *s, void *out, size_t at, size_t count)
{
    const int n = ari_group_size(s->group), ranks = (s->last + n - s->first) % n + 1;
    const size_t bytes = count * s->element;
    _Alignas(64) char partial[ARI_WIRE_PIECE_BYTES];
    const void *sum = input(s, 0, at, bytes, 0);
    if (!sum)
        return false;
    if (ranks == 1)
        ari_copy_bytes(out, sum, bytes);
    for (int k = 1; k < ranks;) {
        const int joining = k + 3 <= ranks ? 3 : 1;
        void *to = k + joining == ranks ? out : partial;
        const void *next[3] = {0};
        for (int j = 0; j < joining; j++) {
            next[j] = input(s, k + j, at, bytes, 1 + j);
            if (!next[j])
                return false;
        }
        if (joining == 3)
            s->kernel.four(to, sum, next[0], next[1], next[2], count);
        else
            s->kernel.two(to, sum, next[0], count);
        k += joining;
        sum = partial;
    }
    if (s->finishes && n > 1 && s->kernel.finish)
        s->kernel.finish(out, count, n);
    return true;
}
