/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/comm/comm_impl.h"
#include "ref/comm/comm_private.h"
#include "ref/core/os/threads.h"
#include "tests/sim/batch.h"
#include "tests/support/test.h"

/* Bytes of other ranks' memory that each rank's thread reads and writes, against closed forms; D is the whole buffer,
 * D[r] rank r's part of it. Over all ranks they are the same in every algorithm:
 *   all_reduce 2(N-1)D;  reduce_scatter, all_gather, broadcast, reduce (N-1)D;  gather, scatter D - D[root];
 *   all_to_all, send and recv, exchange: what is sent to others. */
enum { MOST = 8 };

typedef struct counted_run {
    coll_case k;
    int times;
    moved moved[MOST];
    uint64_t calls[MOST], other_calls[MOST];
} counted_run;

/* The call by which each kind of case is known; a send_recv makes two. */
static const char *const kinds[] = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all",
                                    "broadcast",  "send",           "exchange",   "barrier"};

static ar_status run_case(ar_comm *c, void *arg)
{
    counted_run *run = arg;
    const int r = ar_comm_rank(c);
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "test"));
    ar_status st = AR_OK;
    for (int i = 0; i < run->times && st == AR_OK; i++)
        st = case_call(&run->k, c, q, "counted");
    ar_comm_counted(c, &run->moved[r].read, &run->moved[r].written);
    for (int i = 0; i < CASE_KINDS; i++) {
        if (i == (int)run->k.kind)
            run->calls[r] = ari_comm_calls(c, kinds[i]);
        else
            run->other_calls[r] += ari_comm_calls(c, kinds[i]);
    }
    if (run->k.kind == SEND_RECV)
        run->calls[r] += ari_comm_calls(c, "recv");
    else
        run->other_calls[r] += ari_comm_calls(c, "recv");
    run->other_calls[r] += ari_comm_calls(c, "no such kind");
    return st;
}

/* last, rank m having come last: m moves everything. */
static moved last_form(const coll_case *k, int r, int m)
{
    const size_t n = (size_t)k->n, whole = plain_before(k->counts, k->n), own = k->counts[m];
    const bool root = m == k->root, alone = k->n == 1;
    moved form;
    switch (k->kind) {
    case ALL_REDUCE:
        form = (moved){(n - 1) * k->count, (n - 1) * k->count};
        break;
    case REDUCE_SCATTER: /* the other ranks' sums lack their own inputs */
        form = (moved){(n - 1) * own + (alone ? 0 : n - 2) * (whole - own), whole - own};
        break;
    case ALL_GATHER:
        form = (moved){whole - own, (n - 1) * whole - (whole - own)};
        break;
    case BROADCAST:
        form = root ? (moved){0, (n - 1) * k->count} : (moved){k->count, (n - 2) * k->count};
        break;
    default:
        return direct_form(k, r);
    }
    return r == m ? form : (moved){0, 0};
}

static size_t total_form(const coll_case *k)
{
    size_t sum = 0;
    for (int r = 0; r < k->n; r++) {
        const moved form = direct_form(k, r);
        sum += form.read + form.written;
    }
    return sum;
}

static void run_counted(counted_run *run, case_kind kind, int n, size_t count, ar_sim_algorithm algorithm)
{
    *run = (counted_run){.k = {.kind = kind, .dtype = AR_F64, .op = AR_SUM, .n = n, .root = n / 2, .count = count},
                         .times = algorithm == AR_SIM_LAST ? 1 : 3};
    for (int p = 0; p < n; p++) {
        run->k.counts[p] = (count + (size_t)p) % 5 == 0 ? 0 : count / (size_t)n + (size_t)p;
        for (int q = 0; q < n; q++)
            run->k.sends[p][q] = kind == BARRIER ? 0 : (count + (size_t)(p + 3 * q)) % 11;
    }
    case_init(&run->k, 9);
    const ar_sim_options o = {.algorithm = algorithm};
    cr_assert_ok(ar_sim_run(n, &o, run_case, run, NULL));
    char why[256];
    cr_assert(case_holds(&run->k, why, sizeof why), "algorithm %d: %s", (int)algorithm, why);
}

/* The rank that came last is the one that moved anything. */
static int mover_of(const counted_run *run)
{
    int mover = 0;
    for (int r = 0; r < run->k.n; r++) {
        if (run->moved[r].read + run->moved[r].written > 0)
            mover = r;
    }
    return mover;
}

static void check_ranks(counted_run *run, ar_sim_algorithm algorithm)
{
    const coll_case *k = &run->k;
    const uint64_t unit = (uint64_t)run->times * plain_size(k->dtype);
    const int mover = mover_of(run);
    for (int r = 0; r < k->n; r++) {
        const moved form = algorithm == AR_SIM_RING   ? ring_form(k, r)
                           : algorithm == AR_SIM_LAST ? last_form(k, r, mover)
                                                      : direct_form(k, r);
        cr_assert_eq(run->moved[r].read, unit * form.read,
                     "%s N %d count %zu algorithm %d rank %d reads %llu, not %llu", case_names[k->kind], k->n, k->count,
                     (int)algorithm, r, (unsigned long long)run->moved[r].read, (unsigned long long)(unit * form.read));
        cr_assert_eq(run->moved[r].written, unit * form.written,
                     "%s N %d count %zu algorithm %d rank %d writes %llu, not %llu", case_names[k->kind], k->n,
                     k->count, (int)algorithm, r, (unsigned long long)run->moved[r].written,
                     (unsigned long long)(unit * form.written));
    }
}

static void check_total(counted_run *run, ar_sim_algorithm algorithm)
{
    const coll_case *k = &run->k;
    uint64_t total = 0;
    for (int r = 0; r < k->n; r++)
        total += run->moved[r].read + run->moved[r].written;
    const uint64_t form = (uint64_t)run->times * plain_size(k->dtype) * total_form(k);
    cr_assert_eq(total, form, "%s N %d count %zu algorithm %d: %llu bytes, %llu expected", case_names[k->kind], k->n,
                 k->count, (int)algorithm, (unsigned long long)total, (unsigned long long)form);
    const uint64_t made = (uint64_t)run->times * (k->kind == SEND_RECV ? 2 * (uint64_t)(k->n - 1) : 1);
    for (int r = 0; r < k->n; r++) {
        cr_assert_eq(run->calls[r], made);
        cr_assert_eq(run->other_calls[r], 0);
    }
}

static const size_t counts[] = {0, 1, 7, 1000, 10007};

static void check_all(ar_sim_algorithm algorithm)
{
    static counted_run run;
    for (int n = 1; n <= MOST; n++) {
        for (int kind = 0; kind < CASE_KINDS; kind++) {
            for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
                run_counted(&run, (case_kind)kind, n, counts[i], algorithm);
                check_total(&run, algorithm);
                if (algorithm != AR_SIM_AUTO)
                    check_ranks(&run, algorithm);
                case_fini(&run.k);
            }
        }
    }
}

Test(counted, direct_counts_each_rank_with_what_it_needs)
{
    check_all(AR_SIM_DIRECT);
}

Test(counted, ring_counts_each_rank_with_what_its_left_neighbour_has)
{
    check_all(AR_SIM_RING);
}

Test(counted, last_counts_the_mover_with_the_rings_total)
{
    check_all(AR_SIM_LAST);
}

Test(counted, the_automatic_choice_counts_the_same_total_whatever_it_chose)
{
    check_all(AR_SIM_AUTO);
}

typedef struct split_bytes {
    uint64_t world[4], group[4];
} split_bytes;

static ar_status reduce_in_group(ar_comm *c, void *arg)
{
    split_bytes *b = arg;
    const int r = ar_comm_rank(c);
    OWNED(ar_comm_destroy) ar_comm *g = NULL;
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    float x[6] = {0};
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "test"));
    ar_status st = ar_comm_split(&g, c, r % 2, r);
    if (st == AR_OK)
        st = ar_comm_all_reduce(g, q, (ar_buf){x}, (ar_cbuf){x}, 6, AR_F32, AR_SUM, "group");
    if (st == AR_OK) {
        uint64_t read, written;
        ar_comm_counted(c, &read, &written);
        b->world[r] = read + written;
        ar_comm_counted(g, &read, &written);
        b->group[r] = read + written;
    }
    return st;
}

Test(counted, a_group_counts_its_own_bytes)
{
    split_bytes b = {{0}, {0}};
    const ar_sim_options o = {.algorithm = AR_SIM_DIRECT};
    cr_assert_ok(ar_sim_run(4, &o, reduce_in_group, &b, NULL));
    for (int r = 0; r < 4; r++) {
        cr_assert_eq(b.world[r], 0);
        cr_assert_eq(b.group[r], 24); /* reads 12 and writes 12 of its partner's */
    }
}

/* How many of three ranks moved anything in one all-reduce of so many bytes. */
static int movers(size_t size, const ar_sim_options *o)
{
    static counted_run run;
    run = (counted_run){.k = {.kind = ALL_REDUCE, .dtype = AR_F32, .n = 3, .count = size / 4}, .times = 1};
    case_init(&run.k, 9);
    cr_assert_ok(ar_sim_run(3, o, run_case, &run, NULL));
    case_fini(&run.k);
    int n = 0;
    for (int r = 0; r < 3; r++)
        n += run.moved[r].read > 0;
    return n;
}

Test(counted, short_messages_are_moved_by_one_rank_and_long_ones_by_all_that_have_a_core)
{
    const ar_sim_options choose = {.algorithm = AR_SIM_AUTO};
    const ar_sim_options direct = {.algorithm = AR_SIM_DIRECT}, last = {.algorithm = AR_SIM_LAST};
    cr_assert_eq(movers(1 << 10, &choose), 1);
    cr_assert(movers(1 << 20, &choose) == 3 || ari_cores() < 3);
    cr_assert_eq(movers(1 << 10, &direct), 3);
    cr_assert_eq(movers(1 << 20, &last), 1);
}

Test(counted, the_algorithm_is_chosen_where_none_is_given)
{
    cr_assert_eq(movers(1 << 10, NULL), 1);
    cr_assert(movers(1 << 20, NULL) == 3 || ari_cores() < 3);
}
