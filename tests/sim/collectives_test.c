/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/sim/batch.h"
#include "tests/support/small.h"
#include "tests/support/test.h"

/* Every collective against its definition, on every number of ranks, with every algorithm, bit for bit. Since all
 * algorithms are held to one definition, they also agree with each other. */
static const int world_sizes[] = {1, 2, 3, 4, 5, 7, 8};
static const ar_sim_algorithm algorithms[] = {AR_SIM_AUTO, AR_SIM_DIRECT, AR_SIM_RING, AR_SIM_LAST};
enum { WORLDS = 7, ALGORITHMS = 4, COUNTS = 7, MOST_CASES = 400 };

/* Runs all cases in worlds of n ranks, once with each algorithm, checks them, and frees them. */
static void run_and_check(batch *b, int n)
{
    char why[256] = "";
    for (int a = 0; a < ALGORITHMS; a++) {
        const ar_sim_options o = {.algorithm = algorithms[a]};
        reset_batch(b);
        const ar_status st = ar_sim_run(n, &o, run_batch, b, NULL);
        cr_assert_ok(st);
        for (size_t i = 0; i < b->n; i++)
            cr_assert(case_holds(&b->k[i], why, sizeof why), "algorithm %d case %zu: %s", a, i, why);
    }
    end_batch(b);
}

static size_t count_of(int which, int n)
{
    /* The last one is past the size below which one rank does all the work. */
    const size_t counts[COUNTS] = {0, 1, (size_t)n - 1, (size_t)n, (size_t)n + 1, 1000, 20011};
    return counts[which];
}

/* Three ways to share `count` elements: evenly, unevenly with empty parts, all with the last rank. */
static void share(coll_case *k, int way, size_t count)
{
    for (int r = 0; r < k->n; r++) {
        if (way == 0)
            k->counts[r] = count / (size_t)k->n;
        else if (way == 1)
            k->counts[r] = r % 3 == 1 ? 0 : count / (size_t)(r + 2) + (size_t)r;
        else
            k->counts[r] = r == k->n - 1 ? count : 0;
    }
}

static void add_case(batch *b, coll_case k)
{
    cr_assert_lt(b->n, MOST_CASES);
    b->k[b->n] = k;
    case_init(&b->k[b->n], 77 + b->n);
    b->n++;
}

/* What `add` makes, for every number of ranks, type and operation. */
static void sweep(void (*add)(batch *, coll_case, int which), ar_queue_kind queue, bool reduces)
{
    batch b = {.k = calloc(MOST_CASES, sizeof(coll_case)), .queue = queue};
    for (int run = 0; run < WORLDS * PLAIN_DTYPES; run++) {
        const int n = world_sizes[run % WORLDS];
        /* Each type with a part of the worlds, and each world with a part of the types. */
        const int part = by_scale(1, 6, queue == AR_QUEUE_THREAD ? 4 : reduces ? 3 : 2);
        const int diagonal = run / WORLDS + run % WORLDS;
        if (small_only() ? diagonal != WORLDS - 1 : diagonal % part != 0)
            continue;
        for (int which = 0; which < COUNTS; which++) {
            for (int op = 0; op < (reduces ? PLAIN_OPS : 1); op++) {
                /* The largest count is slow to define: with sums, and with one other operation in turn. */
                if (which == COUNTS - 1 && op != AR_SUM && op != run % PLAIN_OPS)
                    continue;
                add(&b, (coll_case){.dtype = plain_dtypes[run / WORLDS], .op = (ar_op)op, .n = n}, which);
            }
        }
        run_and_check(&b, n);
    }
    free(b.k);
}

static void add_all_reduce(batch *b, coll_case k, int which)
{
    k.kind = ALL_REDUCE;
    k.count = count_of(which, k.n);
    for (int in_place = 0; in_place < 2; in_place++) {
        k.in_place = in_place;
        add_case(b, k);
    }
}

static void add_with_counts(batch *b, coll_case k, int which)
{
    for (int variant = 0; variant < 6; variant++) {
        k.in_place = variant % 2;
        share(&k, variant / 2, count_of(which, k.n));
        add_case(b, k);
    }
}

static void add_reduce_scatter(batch *b, coll_case k, int which)
{
    k.kind = REDUCE_SCATTER;
    add_with_counts(b, k, which);
}

static void add_all_gather(batch *b, coll_case k, int which)
{
    k.kind = ALL_GATHER;
    add_with_counts(b, k, which);
}

static void add_broadcast(batch *b, coll_case k, int which)
{
    k.kind = BROADCAST;
    k.count = count_of(which, k.n);
    for (k.root = 0; k.root < k.n; k.root++)
        add_case(b, k);
}

static void add_pairs(batch *b, coll_case k, int which)
{
    const size_t count = count_of(which, k.n) / (which == COUNTS - 1 ? 10 : 1);
    for (int p = 0; p < k.n; p++) {
        for (int q = 0; q < k.n; q++)
            k.sends[p][q] = count == 0 || (p + 2 * q) % 5 == 3 ? 0 : (count + (size_t)(3 * p + 7 * q)) % (count + 2);
    }
    k.kind = ALL_TO_ALL;
    add_case(b, k);
    k.kind = SEND_RECV;
    add_case(b, k);
    k.kind = EXCHANGE;
    add_case(b, k);
}

static void add_everything(batch *b, coll_case k, int which)
{
    k.op = (ar_op)((which + (int)k.dtype) % PLAIN_OPS);
    k.special = true;
    add_all_reduce(b, k, which);
    add_reduce_scatter(b, k, which);
    add_all_gather(b, k, which);
    add_pairs(b, k, which);
    k.root = k.n / 2;
    k.count = count_of(which, k.n);
    share(&k, which % 3, k.count);
    k.kind = BROADCAST;
    add_case(b, k);
    k.kind = BARRIER;
    add_case(b, k);
}

/* Uneven and empty parts, every root, in place and not. */
Test(collectives, each_is_its_definition_bit_for_bit)
{
    static void (*const reductions[])(batch *, coll_case, int) = {add_all_reduce, add_reduce_scatter};
    static void (*const others[])(batch *, coll_case, int) = {add_all_gather, add_broadcast, add_pairs};
    for (size_t i = 0; i < sizeof reductions / sizeof *reductions; i++)
        sweep(reductions[i], AR_QUEUE_INLINE, true);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        sweep(others[i], AR_QUEUE_INLINE, false);
}

Test(collectives, on_a_thread_queue_they_give_the_same_bits)
{
    sweep(add_everything, AR_QUEUE_THREAD, false);
}

/* --- the checks themselves ---------------------------------------------------------------------------------------- */

Test(collectives, the_order_of_ranks_shows_in_the_data)
{
    /* If the order of additions did not matter for these inputs, the tests above could not see a wrong one. */
    float x[8], forward, backward;
    int differing = 0;
    for (size_t i = 0; i < 100; i++) {
        for (int r = 0; r < 8; r++) {
            float all[100];
            plain_fill(all, AR_F32, 77, r, 100);
            x[r] = all[i];
        }
        forward = x[1] + x[2];
        backward = x[0] + x[1];
        for (int s = 3; s <= 8; s++) {
            forward += x[s % 8];
            backward += x[s - 1];
        }
        differing += first_difference(&forward, &backward, sizeof forward) >= 0;
    }
    cr_assert(differing > 20, "only %d of 100 sums depend on the order", differing);
}

Test(collectives, the_checker_rejects_one_flipped_bit_anywhere)
{
    SCOPED(case_fini) coll_case k = {.kind = ALL_REDUCE, .dtype = AR_F32, .op = AR_SUM, .n = 3, .count = 5};
    batch b = {.k = &k, .n = 1};
    char why[256];
    case_init(&k, 1);
    const ar_sim_options o = {.algorithm = AR_SIM_DIRECT};
    cr_assert_ok(ar_sim_run(3, &o, run_batch, &b, NULL));
    cr_assert(case_holds(&k, why, sizeof why), "%s", why);
    for (int r = 0; r < 3; r++) {
        for (size_t bit = 0; bit < (GUARD + 20 + GUARD) * 8; bit++) {
            k.store[r][bit / 8] ^= (unsigned char)(1u << bit % 8);
            cr_assert(!case_holds(&k, why, sizeof why), "rank %d bit %zu of the output or its guards", r, bit);
            k.store[r][bit / 8] ^= (unsigned char)(1u << bit % 8);
        }
        k.in[r][7] ^= 1;
        cr_assert(!case_holds(&k, why, sizeof why), "rank %d: a changed input", r);
        k.in[r][7] ^= 1;
    }
}

static ar_status sum_ranks(ar_comm *c, void *arg)
{
    int64_t *sums = arg;
    const int r = ar_comm_rank(c);
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "test"));
    ar_status st = AR_OK;
    int64_t x[100];
    for (int round = 0; round < by_scale(4, 20, 20) && st == AR_OK; round++) {
        for (int i = 0; i < 100; i++)
            x[i] = (int64_t)r * 1000 + i + round;
        st = ar_comm_all_reduce(c, q, (ar_buf){x}, (ar_cbuf){x}, 100, AR_I64, AR_SUM, "many");
    }
    sums[r] = x[99];
    return st;
}

Test(collectives, far_more_ranks_than_cores_complete)
{
    for (int algorithm = 0; algorithm < ALGORITHMS; algorithm++) {
        int64_t sums[64] = {0};
        const ar_sim_options o = {.algorithm = algorithms[algorithm]};
        cr_assert_ok(ar_sim_run(64, &o, sum_ranks, sums, NULL));
        for (int r = 0; r < 64; r++)
            cr_assert_eq(sums[r], 63 * 64 / 2 * 1000 + 64 * (99 + by_scale(4, 20, 20) - 1));
    }
}
