/* SPDX-License-Identifier: Apache-2.0 */
/* What moves inside the attention between context-parallel ranks: heads against positions, and keys and values round
 * the ring. Every number says which tensor, sample, head, position and feature it belongs to. */
#include "ref/comm/comm_private.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/attention/context_parallel.h"
#include "ref/layers/parts.h"
#include "ref/placement/parallel_private.h"
#include "support/rank_run.h"
#include "tests/support/test.h"

enum { BATCH = 2, WIDTH = 3, MOST_RANKS = 12 };

typedef struct moving_case {
    int cp, inner;
    bool zigzag;
    size_t seq, heads, kv_heads;
} moving_case;

typedef struct moving_job {
    moving_case c;
    uint64_t read[MOST_RANKS], hops[MOST_RANKS];
} moving_job;

static float number_of(size_t tensor, size_t sample, size_t head, size_t position, size_t feature)
{
    return (float)((((tensor * BATCH + sample) * 16 + head) * 64 + position) * WIDTH + feature + 1);
}

/* The numbers of heads [head, head + heads) and of these positions, [b, heads, positions, d]. Gives; free(). */
static float *numbers(size_t tensor, size_t head, size_t heads, const ar_positions *p, size_t *count)
{
    const size_t rows = ari_positions_count(p);
    float *x = malloc((BATCH * heads * rows * WIDTH + 1) * sizeof *x);
    *count = 0;
    for (size_t i = 0; x && i < BATCH * heads * rows * WIDTH; i++) {
        const size_t d = i % WIDTH, row = i / WIDTH % rows, h = i / WIDTH / rows % heads, b = i / WIDTH / rows / heads;
        x[(*count)++] = number_of(tensor, b, head + h, ari_positions_at(p, row), d);
    }
    return x;
}

static ar_status fresh(ar_ctx *ctx, ar_tensor *t, size_t tensor, size_t head, size_t heads, const ar_positions *p)
{
    const size_t shape[4] = {BATCH, heads, ari_positions_count(p), WIDTH};
    size_t count = 0;
    OWNED(free) float *x = numbers(tensor, head, heads, p, &count);
    return x ? rank_upload(ctx, t, 4, shape, x) : AR_ERR_MEMORY;
}

/* AR_ERR_DATA unless t has these heads and positions, and no others. */
static ar_status expect(ar_ctx *ctx, const ar_tensor *t, size_t tensor, size_t head, size_t heads,
                        const ar_positions *p)
{
    const size_t shape[4] = {BATCH, heads, ari_positions_count(p), WIDTH};
    size_t count = 0;
    OWNED(free)
    float *expected = numbers(tensor, head, heads, p, &count), *actual = malloc((count + 1) * sizeof *actual);
    ar_status st = expected && actual ? AR_OK : AR_ERR_MEMORY;
    if (st == AR_OK && (t->ndim != 4 || memcmp(t->shape, shape, sizeof shape) != 0 || !ari_tensor_is_contiguous(t)))
        st = ar_error_set(AR_ERR_DATA, "tensor %zu: shape [%zu, %zu, %zu, %zu]", tensor, t->shape[0], t->shape[1],
                          t->shape[2], t->shape[3]);
    if (st == AR_OK)
        st = ar_ctx_download(ctx, actual, t);
    if (st == AR_OK && memcmp(actual, expected, count * sizeof *actual) != 0)
        st = ar_error_set(AR_ERR_DATA, "tensor %zu: another number", tensor);
    return st;
}

/* Ruins what copy `own` of a head has for neighbours to whom another copy sends it. */
static ar_status ruin_other_copies(ar_ctx *ctx, const ar_tensor *x, size_t own, size_t inner, size_t copies)
{
    const size_t rows = x->shape[2] / inner;
    for (size_t i = 0; i < inner; i++) {
        const ar_tensor of_i = ar_tensor_slice(x, 2, i * rows, rows);
        const float wrong = -1.0f;
        ar_tensor number;
        const size_t shape[4] = {1, 1, 1, 1};
        if (i % copies == own % copies)
            continue;
        AR_TRY(rank_upload(ctx, &number, 4, shape, &wrong));
        memset(number.stride, 0, sizeof number.stride);
        memcpy(number.shape, of_i.shape, sizeof number.shape);
        AR_TRY(ARI_KERNEL(ctx, copy_strided, &of_i, &number));
    }
    return AR_OK;
}

/* Queries, keys and values to all positions of the place and back. */
static ar_status exchange_rank(ar_ctx *ctx, void *user)
{
    moving_job *j = user;
    const moving_case *c = &j->c;
    const size_t inner = (size_t)c->inner, neighbour = (size_t)ar_comm_rank(ctx->inner);
    const size_t heads[3] = {c->heads, c->kv_heads, c->kv_heads};
    const ar_positions own = ari_local_positions(ctx, c->seq, false);
    const ar_positions place = ari_ring_positions(ctx, c->seq, ar_comm_rank(ctx->ring));
    ar_tensor x[3];
    for (size_t t = 0; t < 3; t++)
        AR_TRY(fresh(ctx, &x[t], t, 0, heads[t], &own));
    AR_TRY(ari_heads_scatter(ctx, x, heads, 3, "apart"));
    for (size_t t = 0; t < 3; t++) {
        const ari_head_share share = ari_head_share_of(heads[t], inner, neighbour);
        AR_TRY(expect(ctx, &x[t], t, share.first_head, share.count, &place));
        AR_TRY(ruin_other_copies(ctx, &x[t], neighbour, inner, share.copies));
    }
    AR_TRY(ari_heads_together(ctx, x, heads, 3, "together"));
    for (size_t t = 0; t < 3; t++)
        AR_TRY(expect(ctx, &x[t], t, 0, heads[t], &own));
    return AR_OK;
}

/* Keys and values of this place to those of all positions; own ones stay what they are. */
static ar_status ring_rank(ar_ctx *ctx, void *user)
{
    moving_job *j = user;
    const int rank = ar_comm_rank(ctx->world), place = ar_comm_rank(ctx->ring);
    const ar_positions own = ari_ring_positions(ctx, j->c.seq, place), whole = ari_positions_full(j->c.seq);
    uint64_t written = 0;
    SCOPED(ari_ring_transfers_fini) ari_ring_transfers hops = {0};
    ar_tensor kv[2], all[2];
    AR_TRY(ari_ring_transfers_init(&hops, ctx, "attn"));
    for (size_t t = 0; t < 2; t++)
        AR_TRY(fresh(ctx, &kv[t], t, 0, j->c.kv_heads, &own));
    AR_TRY(ari_ring_gather(ctx, all, kv, j->c.seq, &hops));
    for (size_t t = 0; t < 2; t++) {
        AR_TRY(expect(ctx, &all[t], t, 0, j->c.kv_heads, &whole));
        AR_TRY(expect(ctx, &kv[t], t, 0, j->c.kv_heads, &own));
    }
    ari_ring_release(ctx, all, kv);
    ar_comm_counted(ctx->ring, &j->read[rank], &written);
    j->read[rank] += written;
    j->hops[rank] = ar_comm_size(ctx->ring) > 1 ? ari_comm_calls(ctx->ring, "exchange") : 0;
    return AR_OK;
}

static void run(moving_job *j, rank_fn fn)
{
    const moving_case *c = &j->c;
    const ar_run o = {.parallel = {.cp = c->cp, .cp_inner = c->inner, .zigzag = c->zigzag}};
    cr_assert_eq(rank_run(&o, fn, j), AR_OK, "cp=%d inner=%d zigzag=%d seq=%zu heads=%zu kv=%zu: %s", c->cp, c->inner,
                 c->zigzag, c->seq, c->heads, c->kv_heads, ar_error_message());
}

Test(context_parallel, heads_go_apart_and_come_together_with_and_without_copies)
{
    static const moving_case cases[] = {
        {.cp = 1, .inner = 1, .seq = 5, .heads = 3, .kv_heads = 1},
        {.cp = 2, .inner = 2, .seq = 6, .heads = 4, .kv_heads = 2},
        {.cp = 4, .inner = 4, .seq = 8, .heads = 8, .kv_heads = 2}, /* two copies of each KV head */
        {.cp = 3, .inner = 3, .seq = 9, .heads = 6, .kv_heads = 1}, /* all of them copies */
        {.cp = 4, .inner = 2, .seq = 16, .heads = 6, .kv_heads = 2, .zigzag = true},
        {.cp = 12, .inner = 6, .seq = 48, .heads = 12, .kv_heads = 3, .zigzag = true},
        {.cp = 12, .inner = 4, .seq = 24, .heads = 8, .kv_heads = 8},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        static moving_job j;
        j = (moving_job){.c = cases[i]};
        run(&j, exchange_rank);
    }
}

Test(context_parallel, keys_and_values_of_all_places_lie_in_the_order_of_positions)
{
    static const int rings[] = {1, 2, 3, 4, 7};
    for (size_t i = 0; i < 2 * sizeof rings / sizeof *rings; i++) {
        static moving_job j;
        const int n = rings[i / 2], inner = n <= 4 ? 1 + (int)(i % 3) : 1;
        const size_t seq = (size_t)(2 * n * inner);
        j = (moving_job){.c = {.cp = n * inner, .inner = inner, .zigzag = i % 2 == 1, .seq = seq, .kv_heads = 2}};
        run(&j, ring_rank);
        for (int r = 0; r < n * inner; r++) {
            const size_t hop = 2 * BATCH * 2 * (seq / (size_t)n) * WIDTH * sizeof(float);
            cr_assert_eq(j.hops[r], (uint64_t)n - 1, "rank %d of %d: %llu hops", r, n, (unsigned long long)j.hops[r]);
            cr_assert_eq(j.read[r], ((uint64_t)n - 1) * hop, "rank %d of %d: %llu bytes", r, n,
                         (unsigned long long)j.read[r]);
        }
    }
}

/* Whom a rank shares its KV head with. */
typedef struct replica_job {
    int tp, inner, kv_heads, ring, dp;
    bool over_tp;
    int size[MOST_RANKS], sum[MOST_RANKS]; /* of the group, and of the world's numbers of its ranks */
} replica_job;

static ar_status replica_rank(ar_ctx *ctx, void *user)
{
    replica_job *j = user;
    const int rank = ar_comm_rank(ctx->world);
    int32_t sum = rank;
    ar_comm *group = NULL;
    AR_TRY(ari_ctx_replicas(ctx, &group, j->kv_heads, j->over_tp));
    AR_TRY(ari_combine(ctx, group, &sum, 1, AR_I32, AR_SUM, "ranks"));
    j->size[rank] = ar_comm_size(group);
    j->sum[rank] = sum;
    return AR_OK;
}

static int head_of(const replica_job *j, int rank)
{
    const int cp = j->inner * j->ring, tp_rank = j->over_tp ? rank % j->tp : 0, inner = rank / j->tp % cp % j->inner;
    return (tp_rank * j->inner + inner) * j->kv_heads / ((j->over_tp ? j->tp : 1) * j->inner);
}

/* Ranks of one place of the ring of one data-parallel rank; of one tensor-parallel rank where that has all heads. */
static bool work_together(const replica_job *j, int a, int b)
{
    const int place = j->tp * j->inner;
    return a / place == b / place && head_of(j, a) == head_of(j, b) && (j->over_tp || a % j->tp == b % j->tp);
}

Test(context_parallel, copies_of_a_kv_head_are_a_group_of_tensor_parallel_ranks_and_their_neighbours)
{
    static const replica_job cases[] = {
        {.tp = 4, .inner = 1, .kv_heads = 2, .ring = 1, .dp = 2, .over_tp = true},
        {.tp = 2, .inner = 2, .kv_heads = 1, .ring = 2, .dp = 1, .over_tp = true},
        {.tp = 2, .inner = 3, .kv_heads = 2, .ring = 1, .dp = 2, .over_tp = true},
        {.tp = 2, .inner = 2, .kv_heads = 2, .ring = 2, .dp = 1, .over_tp = true},
        {.tp = 2, .inner = 2, .kv_heads = 1, .ring = 2, .dp = 1, .over_tp = false},
        {.tp = 1, .inner = 4, .kv_heads = 2, .ring = 1, .dp = 3, .over_tp = true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        static replica_job j;
        j = cases[i];
        const int ranks = j.tp * j.inner * j.ring * j.dp;
        const ar_run o = {.parallel = {.tp = j.tp, .dp = j.dp, .cp = j.inner * j.ring, .cp_inner = j.inner}};
        cr_assert_eq(rank_run(&o, replica_rank, &j), AR_OK, "case %zu: %s", i, ar_error_message());
        for (int r = 0; r < ranks; r++) {
            int size = 0, sum = 0;
            for (int other = 0; other < ranks; other++) {
                size += work_together(&j, r, other);
                sum += work_together(&j, r, other) ? other : 0;
            }
            cr_assert_eq(j.size[r], size, "case %zu, rank %d: %d ranks, not %d", i, r, j.size[r], size);
            cr_assert_eq(j.sum[r], sum, "case %zu, rank %d: other ranks", i, r);
        }
    }
}

static ar_status tags_rank(ar_ctx *ctx, void *user)
{
    const bool *zigzag = user;
    ari_ring_transfers hops;
    AR_TRY(ari_ring_transfers_init(&hops, ctx, "layers.0.attn"));
    const char *const straight = "layers.0.attn: hop 2 of 3, chunk 3";
    const char *const folded = "layers.0.attn: hop 2 of 3, chunks 3 and 4";
    const bool right = ar_comm_rank(ctx->world) != 1 || strcmp(hops.tag[1], *zigzag ? folded : straight) == 0;
    const ar_status st = right ? AR_OK : ar_error_set(AR_ERR_DATA, "'%s'", hops.tag[1]);
    ari_ring_transfers_fini(&hops);
    return st;
}

Test(context_parallel, a_hop_is_called_by_the_chunks_that_arrive)
{
    for (int i = 0; i < 2; i++) {
        bool zigzag = i == 1;
        const ar_run o = {.parallel = {.cp = 4, .zigzag = zigzag}};
        cr_assert_ok(rank_run(&o, tags_rank, &zigzag));
    }
}
