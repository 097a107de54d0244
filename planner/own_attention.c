/* SPDX-License-Identifier: Apache-2.0 */
/* What attention takes and keeps. Queries, keys and values head by head stay for the backward pass, with maximum and sum
 * of every row of scores; scores exist a block at a time (ref/layers/attention/blocks.h), unless somebody listens to
 * them. Between ranks that share a sequence heads are exchanged for positions, and keys and values of all positions are
 * there while a layer attends. */
#include "planner/own.h"

#include <stdlib.h>

#include "anyrank/device.h"
#include "anyrank/parallel.h"
#include "ref/core/size.h"
#include "ref/layers/attention/blocks.h"

static const double WORD = 4.0, LONG = 8.0;

/* An attention on this rank: as it is projected, and as it attends. Bytes of q, k and v on both sides of the exchange are
 * q, and k0 and k each; `all` those of keys or of values of all positions. */
typedef struct heads {
    size_t batch, rows, seq, dim, heads, kv, group;
    size_t inner, ring;
    double matrices, q, k0, k, all;
} heads;

/* context: as this rank attends; split: its heads are those of a tensor-parallel rank. */
static heads heads_of(const ari_account *a, const ari_op_value *context)
{
    const ar_config *c = a->config;
    const size_t ranks = ari_account_is_shard(context, 2) ? a->tp : 1;
    heads h = {.batch = context->local[0], .rows = context->local[1], .seq = context->shape[1], .dim = c->head_dim};
    h.inner = ari_axis_ranks(&a->c->run.parallel, ARI_AXIS_INNER);
    h.ring = ari_axis_ranks(&a->c->run.parallel, ARI_AXIS_RING);
    h.heads = context->local[2] / c->head_dim;
    const size_t kv0 = c->kv_heads > ranks ? c->kv_heads / ranks : 1;
    h.kv = kv0 > h.inner ? kv0 / h.inner : 1;
    h.group = h.heads / h.kv;
    h.matrices = (double)(h.batch * h.kv);
    const double token = a->word * (double)h.batch * (double)h.dim;
    h.q = token * (double)(h.rows * h.heads);
    h.k0 = token * (double)(h.rows / h.inner * kv0);
    h.k = token * (double)(h.rows * h.kv);
    h.all = token * (double)(h.seq * h.kv);
    return h;
}

static void take(ari_account *a, double bytes)
{
    ari_account_take(a, ARI_MEMORY_WORKSPACE, bytes);
}

static void give(ari_account *a, double bytes)
{
    ari_account_give(a, ARI_MEMORY_WORKSPACE, bytes);
}

/* --- norms of queries and keys ------------------------------------------------------------------------------------ */

bool ari_account_is_qk_norm(ari_role role)
{
    return role == ARI_Q_NORM || role == ARI_K_NORM;
}

/* What is there besides while queries or keys are normalised. */
static double beside_qk(const ari_account *a, ari_role role)
{
    return (a->pass == ARI_PASS_BACKWARD && !a->again) || role == ARI_K_NORM ? a->queries : 0.0;
}

/* A rank's part, laid out by itself, then the parts of all, of which one of each head's copies is taken. All of it ends
 * but the last, which the norm takes. */
void ari_account_qk_gather(ari_account *a, const ari_operation *op)
{
    const double own = ari_account_bytes(&op->input[0]), all = ari_account_bytes(&op->output[0]);
    if (op->calls == 0) /* back to the own heads: a view */
        return;
    const double gathered = own * (double)op->call[0].ranks;
    const bool arranged = op->input[0].local[0] * op->input[0].local[1] != 1;
    const double beside = beside_qk(a, op->role);
    take(a, beside + own + gathered);
    ari_account_touch(a, arranged ? gathered : 0.0);
    give(a, own);
    ari_account_touch(a, gathered != all ? all : 0.0);
    give(a, beside + gathered);
}

/* What is normalised stays with the scales of its rows. The result is there until it has been rotated: of queries beside
 * their layout by heads, of keys beside both. */
void ari_account_qk_norm(ari_account *a, const ari_operation *op)
{
    const double x = ari_account_bytes(&op->input[0]), gain = ari_account_gain(a, op);
    const double ranks = a->config->qk_norm == AR_QK_NORM_WIDTH && op->input[0].copies == 1 ? (double)a->tp : 1.0;
    const double own = op->made.kind == AR_SHARD ? x : x / ranks; /* at least: copies of a head take as much */
    ari_account_take(a, ARI_MEMORY_ATTENTION, x + ari_account_norm_rows(op));
    if (op->role == ARI_Q_NORM)
        a->queries = own;
    const double laid = beside_qk(a, op->role) + own;
    ari_account_touch(a, x + (gain > laid ? gain : laid));
}

/* In place, of a copy. */
void ari_account_qk_norm_backward(ari_account *a, const ari_operation *op)
{
    const double x = ari_account_bytes(&op->input[0]);
    ari_account_touch(a, beside_qk(a, op->role) + x + ari_account_gain(a, op));
    ari_account_give(a, ARI_MEMORY_ATTENTION, x + ari_account_norm_rows(op));
}

/* --- between ranks ------------------------------------------------------------------------------------------------ */

/* n values of so many bytes are replaced by others, packed on both sides: what is sent and received. */
static void exchange(ari_account *a, const heads *h, ari_memory_kind kind, int n, const double *from, const double *to,
                     double packed)
{
    if (h->inner == 1)
        return;
    take(a, packed);
    for (int i = 0; i < n; i++) {
        ari_account_give(a, kind, from[i]);
        ari_account_take(a, kind, to[i]);
    }
    ari_account_touch(a, packed);
    give(a, packed);
}

/* Keys and values of all places, beside those of one place that arrive while others leave. */
static void gather(ari_account *a, const heads *h)
{
    const double sides = h->ring > 2 ? 2.0 : 1.0;
    if (h->ring == 1)
        return;
    take(a, 2.0 * h->all);
    ari_account_touch(a, 2.0 * sides * h->k);
}

static void release(ari_account *a, const heads *h)
{
    give(a, h->ring == 1 ? 0.0 : 2.0 * h->all);
}

/* --- operands and blocks ------------------------------------------------------------------------------------------ */

/* Integers of `matrices` [rows, k] with an exponent of each row, or of k where they are scaled; native: a view. */
static double operand(const ari_account *a, const heads *h, double rows, double k, bool scaled)
{
    return a->exact ? WORD * h->matrices * (rows * (1.0 + k) + (scaled ? k : 0.0)) : 0.0;
}

/* A block, and the most that any has of each. */
typedef struct block {
    double scores, rows, keys; /* numbers: of all; of rows and keys of its matrices */
    double piece;              /* scores of keys that one place of the ring has in a run */
} block;

static double piece_of(const ari_account *a, const heads *h, const ar_part *at)
{
    const ar_parallel places = {.cp = (int)h->ring, .zigzag = a->c->run.parallel.zigzag};
    size_t most = 0;
    for (int place = 0; place < (int)h->ring; place++) {
        const ar_positions p = ar_parallel_positions(&places, h->seq, place);
        for (int run = 0; run < 2; run++) {
            const size_t first = p.first[run] > at->col ? p.first[run] : at->col;
            const size_t last = p.first[run] + p.count[run], end = at->col + at->cols;
            const size_t stop = last < end ? last : end;
            most = stop > first && stop - first > most ? stop - first : most;
        }
    }
    return (double)(most * at->rows * at->matrices);
}

static block block_at(const ari_account *a, const heads *h, const ar_part *at)
{
    return (block){.scores = (double)(at->matrices * at->rows * at->cols),
                   .rows = (double)(at->matrices * at->rows),
                   .keys = (double)(at->matrices * at->cols),
                   .piece = piece_of(a, h, at)};
}

/* The copies that a product of scores, which are fp32, with activations makes. */
static double rounded(const ari_account *a, double scores, double right)
{
    return ari_account_copied(a, AR_F32, scores) + ari_account_copied(a, a->activations, right);
}

/* A block as the left operand of its product with so many numbers. */
static double as_left(const ari_account *a, const block *b, double scores, double right)
{
    return a->exact ? WORD * (scores + (right > 0.0 ? b->rows : 0.0)) : rounded(a, scores, right);
}

/* What a block takes in its turn, in the three loops. Scores that become probabilities, and with dropout those that it
 * leaves, then also their gradients, twice where somebody listens. The last loop has the only block as it is, and makes
 * each of several again. */
typedef enum loop { FORWARD, MEASURE, ADD, AGAIN, LOOPS } loop;

static double block_bytes(const ari_account *a, const heads *h, const block *b, loop in)
{
    const double d = (double)h->dim, of_scores = rounded(a, 0.0, (b->rows + b->keys) * d);
    const double probs = WORD * b->scores, bare = in == FORWARD || a->config->score_cap == 0.0 ? 0.0 : probs;
    const double kept = a->c->run.dropout > 0.0 ? 2.0 * probs : probs;
    const double beside = in == FORWARD ? 0.0 : probs, twice = in == MEASURE && a->c->tapped ? probs : 0.0;
    const double values = in >= ADD ? (a->exact ? WORD * b->piece : rounded(a, b->piece, b->rows * d))
                                    : as_left(a, b, b->scores, b->keys * d);
    const double made =
        in == FORWARD ? probs + of_scores : kept + bare + beside + (of_scores > twice ? of_scores : twice);
    const double used = kept + beside + values;
    return in == ADD || used > made ? used : made;
}

static void see_block(ari_account_blocks *to, const ari_account *a, const heads *h, const block *b)
{
    for (int in = FORWARD; in < LOOPS; in++) {
        const double bytes = block_bytes(a, h, b, (loop)in);
        to->most[in] = bytes > to->most[in] ? bytes : to->most[in];
    }
    to->last = WORD * b->scores * (a->c->run.dropout > 0.0 ? 3.0 : 2.0);
}

/* Beyond so many queries nobody counts blocks: the highest of one that no device could hold more of, with all keys. */
enum { MOST_QUERIES = 1 << 20 };

/* All samples, and all heads, see alike: blocks of the first ones, unless they are of whole matrices. */
static ar_status walk_blocks(ari_account_blocks *to, const ari_account *a, const heads *h, const ari_order *order)
{
    ari_keys *visible = NULL;
    AR_TRY(ari_alloc((void **)&visible, h->rows, sizeof *visible, "the keys that queries see"));
    for (size_t i = 0; i < h->rows; i++)
        visible[i] = ari_order_keys(order, ar_positions_at(&order->rows, i));
    ari_score_blocks blocks =
        ari_score_blocks_of(order, visible, h->batch, h->kv, h->group, AR_CPU_BLOCK_BYTES / sizeof(float), h->ring > 1);
    size_t alike = blocks.whole ? 1 : blocks.samples * blocks.kv_heads * blocks.group, n = 0;
    to->whole = blocks.whole;
    if (!blocks.whole)
        blocks.samples = blocks.kv_heads = blocks.group = 1;
    for (ar_part at = {0}; ari_next_block(&blocks, &at); n++) {
        const size_t left = blocks.samples * blocks.kv_heads - at.matrix, last = (left - 1) % at.matrices + 1;
        block b = block_at(a, h, &at);
        see_block(to, a, h, &b);
        if (!blocks.whole)
            continue;
        alike = (left - 1) / at.matrices + 1;
        n = 1;
        at.matrices = last; /* those between are like the first one */
        b = block_at(a, h, &at);
        see_block(to, a, h, &b);
        break;
    }
    to->several = n * alike > 1;
    free(visible);
    return AR_OK;
}

/* Once for layers and micro-batches that are alike. */
static ar_status find_blocks(ari_account *a, const heads *h, size_t layer)
{
    const ar_parallel places = {.cp = (int)h->ring, .zigzag = a->c->run.parallel.zigzag};
    const ari_order order = {.rows = ar_parallel_positions(&places, h->seq, (int)(a->cp_rank / h->inner)),
                             .seq = h->seq,
                             .causal = a->config->causal,
                             .window = ar_config_window(a->config, layer)};
    ari_account_blocks *to = &a->blocks;
    if (to->samples == h->batch && to->window == order.window && to->heads == h->heads)
        return AR_OK;
    *to = (ari_account_blocks){.samples = h->batch, .window = order.window, .heads = h->heads};
    if (h->rows <= MOST_QUERIES)
        return walk_blocks(to, a, h, &order);
    to->several = true;
    const ar_part high = {.matrices = 1, .rows = ARI_BLOCK_ROWS, .cols = h->seq};
    const block b = block_at(a, h, &high);
    see_block(to, a, h, &b);
    return AR_OK;
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

/* The keys that each query sees, and maximum and sum of its scores. */
static double row_bytes(const heads *h)
{
    return (double)(h->batch * h->rows) * (LONG + (double)h->heads * (WORD + LONG));
}

/* All scores, where somebody listens: probabilities, and with dropout what it leaves of them. */
static double heard(const ari_account *a, const heads *h, bool dropped)
{
    return a->c->tapped && !a->again
               ? (dropped ? 2.0 : 1.0) * WORD * (double)(h->batch * h->heads * h->rows) * (double)h->seq
               : 0.0;
}

ar_status ari_account_attend(ari_account *a, const ari_operation *op)
{
    const heads h = heads_of(a, &op->output[0]);
    const double rows = (double)(h.group * h.rows), d = (double)h.dim, s = (double)h.seq;
    const double operands = operand(a, &h, s, d, false) + operand(a, &h, rows, d, false) + operand(a, &h, d, s, true);
    AR_TRY(find_blocks(a, &h, op->layer));
    ari_account_take(a, ARI_MEMORY_ATTENTION, h.q + 2.0 * h.k0);
    ari_account_finish(a, &a->x);
    if (a->c->tapped && !a->again && a->config->rope.kind)
        ari_account_touch(a, h.q);
    exchange(a, &h, ARI_MEMORY_ATTENTION, 3, (double[]){h.q, h.k0, h.k0}, (double[]){h.q, h.k, h.k}, h.q + 2.0 * h.k);
    gather(a, &h);
    ari_account_take(a, ARI_MEMORY_ATTENTION, row_bytes(&h));
    take(a, h.q);
    take(a, operands);
    ari_account_touch(a, heard(a, &h, a->c->run.dropout > 0.0) + a->blocks.most[FORWARD]);
    give(a, operands);
    release(a, &h);
    exchange(a, &h, ARI_MEMORY_WORKSPACE, 1, &h.q, &h.q, h.q);
    ari_account_take(a, ARI_MEMORY_ATTENTION, h.q);
    give(a, h.q);
    a->x = (ari_account_value){h.q, ARI_MEMORY_ATTENTION, false};
    a->gathered = false;
    return AR_OK;
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

/* dK's and dV's sums over queries: an operand of the queries with the exponents of all keys' rows, then the sums; native
 * the fp32 ones at once. */
typedef struct key_sums {
    double begun, sums, own, shared; /* bytes: at first; of the sums; of those of the own positions; of the own copy */
    double sent;                     /* native: of the rounded sums of all positions, where others get theirs */
    bool copies;                     /* of the KV heads */
} key_sums;

static key_sums key_sums_of(const ari_account *a, const heads *h, const ari_operation *op)
{
    const double d = (double)h->dim, s = (double)h->seq, n = h->matrices * s * d;
    const size_t terms = a->config->heads / a->config->kv_heads * h->seq, own = (size_t)n / h->ring;
    const double each = LONG * (double)ari_sum_limbs(terms);
    key_sums k = {.begun =
                      operand(a, h, d, (double)(h->group * h->rows), true) + WORD * (a->exact ? h->matrices * s : n),
                  .sums = a->exact ? each * n : 0.0,
                  .own = a->exact && h->ring > 1 ? each * (double)own : 0.0,
                  .sent = !a->exact && h->ring > 1 && a->activations != AR_F32 ? a->word * n : 0.0};
    for (int i = 0; i < op->calls && a->exact; i++) {
        const size_t ranks = op->call[i].ranks, rank = (a->tp_rank * h->inner + a->cp_rank % h->inner) % ranks;
        k.copies = k.copies || op->call[i].over == ARI_OVER_COPIES;
        if (op->call[i].over == ARI_OVER_COPIES)
            k.shared = each * (double)(own / ranks + (rank < own % ranks));
    }
    return k;
}

/* Reduced to the own positions, then among copies; the parts that went in end when theirs are there. */
static void end_sums(ari_account *a, const heads *h, const key_sums *k)
{
    double left = k->sums;
    take(a, h->k);
    ari_account_touch(a, k->sent);
    take(a, k->own);
    if (k->own > 0.0) {
        give(a, left);
        left = k->own;
    }
    take(a, k->shared);
    give(a, left + k->shared + k->begun);
}

/* Two loops over the blocks: dQ and the exponents of dK and dV, then their sums. What is the only block stays. Blocks of
 * whole matrices have all terms: one loop. */
static void go_back(ari_account *a, const key_sums *k)
{
    if (a->blocks.whole && !k->copies) {
        take(a, 2.0 * k->sums);
        ari_account_touch(a, a->blocks.most[MEASURE]);
        ari_account_touch(a, a->blocks.most[ADD]);
        return;
    }
    ari_account_touch(a, a->blocks.most[MEASURE]);
    take(a, a->blocks.last);
    take(a, 2.0 * k->sums);
    give(a, a->blocks.last);
    ari_account_touch(a, a->blocks.most[a->blocks.several ? AGAIN : ADD]);
}

ar_status ari_account_attend_backward(ari_account *a, const ari_operation *op)
{
    const heads h = heads_of(a, &op->input[0]);
    const key_sums k = key_sums_of(a, &h, op);
    const double rows = (double)(h.group * h.rows), d = (double)h.dim, s = (double)h.seq, made = h.q + 2.0 * h.k0;
    const double operands =
        2.0 * operand(a, &h, s, d, false) + 2.0 * operand(a, &h, rows, d, false) + operand(a, &h, d, s, true);
    const double beside = heard(a, &h, false), dot = LONG * (double)(h.batch * h.heads * h.rows);
    AR_TRY(find_blocks(a, &h, op->layer));
    take(a, h.q);
    exchange(a, &h, ARI_MEMORY_WORKSPACE, 1, &h.q, &h.q, h.q);
    gather(a, &h);
    take(a, h.q + operands + 2.0 * k.begun + beside + dot);
    go_back(a, &k);
    give(a, dot + operands + beside);
    end_sums(a, &h, &k);
    end_sums(a, &h, &k);
    ari_account_give(a, ARI_MEMORY_ATTENTION, row_bytes(&h));
    release(a, &h);
    give(a, h.q);
    ari_account_give(a, ARI_MEMORY_ATTENTION, h.q + 2.0 * h.k);
    exchange(a, &h, ARI_MEMORY_WORKSPACE, 3, (double[]){h.q, h.k, h.k}, (double[]){h.q, h.k0, h.k0}, made);
    take(a, made);
    if (a->c->tapped)
        ari_account_touch(a, h.q);
    give(a, made);
    a->queries = made + a->x.bytes;
    ari_account_finish(a, &a->x);
    a->x = (ari_account_value){made, ARI_MEMORY_WORKSPACE, false};
    return AR_OK;
}
