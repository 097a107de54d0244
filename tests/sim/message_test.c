/* SPDX-License-Identifier: Apache-2.0 */
#include <ctype.h>

#include "anyrank/queue.h"
#include "ref/comm/comm_private.h"
#include "tests/sim/fail_run.h"

/* failure-messages.tsv, of simulated-cluster.md, has what the library says: each way to fail is run here, on every
 * algorithm and kind of queue that it does not name itself, and its line must be in that file, word for word. */
enum { TABLE_BYTES = 32768, ROW_BYTES = 1024 };
#define TIMEOUT_NS (100 * MS)

/* What one rank calls. Fields that the kind does not use are zero. */
typedef struct call_spec {
    int kind; /* a case_kind, or one of the below */
    ar_dtype dtype;
    ar_op op;
    size_t count;
    int root; /* or peer */
    size_t counts[3], recv_counts[3];
    const char *tag; /* NULL: no call */
} call_spec;
/* Beside the kinds of plain.h: a half of a message, and a split. */
enum { ONE_SEND = CASE_KINDS, ONE_RECV, ONE_SPLIT };

typedef struct way_to_fail {
    const char *name;
    ar_status st;
    call_spec usual[2], odd[2]; /* of ranks 0 and 1; of rank 2. One call after the other */
    /* Instead of calls. */
    ar_status (*body)(ar_comm *world, ar_queue *q, fail_run *run, int r);
    int ranks;          /* 0: 3 */
    bool inline_only;   /* or the message is another one: of another rank that waits, too */
    ar_sim_fault fault; /* collective 0: none */
    bool verify;
    ar_sim_algorithm algorithm; /* AR_SIM_AUTO: each of them */
    const char *says;           /* not in the file, as another row is like it: what the line has; NULL: it is there */
} way_to_fail;

static ar_status begin_call(const call_spec *s, ar_comm *c, ar_queue *q, char *own)
{
    static char in[256];
    const ar_buf out = {own};
    const ar_cbuf from = {in};
    OWNED(ar_comm_destroy) ar_comm *g = NULL;
    switch (s->kind) {
    case ALL_REDUCE:
        return ar_comm_all_reduce(c, q, out, from, s->count, s->dtype, s->op, s->tag);
    case REDUCE_SCATTER:
        return ar_comm_reduce_scatter(c, q, out, from, s->counts, s->dtype, s->op, s->tag);
    case ALL_GATHER:
        return ar_comm_all_gather(c, q, out, from, s->counts, s->dtype, s->tag);
    case ALL_TO_ALL:
        return ar_comm_all_to_all(c, q, out, from, s->counts, s->recv_counts, s->dtype, s->tag);
    case BROADCAST:
        return ar_comm_broadcast(c, q, out, s->count, s->dtype, s->root, s->tag);
    case ONE_SEND:
        return ar_comm_send(c, q, from, s->count, s->dtype, s->root, s->tag);
    case ONE_RECV:
        return ar_comm_recv(c, q, out, s->count, s->dtype, s->root, s->tag);
    case ONE_SPLIT:
        return ar_comm_split(&g, c, 0, 0);
    case BARRIER:
        return ar_comm_barrier(c, q, s->tag);
    default:
        return AR_OK;
    }
}

static ar_status make_call(const call_spec *s, ar_comm *c, ar_queue *q)
{
    char own[256] = {0};
    const ar_status st = begin_call(s, c, q, own);
    const ar_status end = ar_queue_sync(q, 0); /* before `own` ends */
    return st == AR_OK ? end : st;
}

/* Rank r sends one element to the right and receives one from the left, but for what the rank is told. */
static ar_status exchange_odd(ar_comm *c, ar_queue *q, int r, size_t sends, size_t receives, size_t elements)
{
    float s = 0, d[2];
    const int n = ar_comm_size(c);
    const ar_p2p all[2] = {{(r + 1) % n, true, {&s}, 1}, {(r + n - 1) % n, false, {d}, elements}};
    const ar_status st = ar_comm_exchange(c, q, all + (sends ? 0 : 1), sends + receives, AR_F32, "edge");
    const ar_status end = ar_queue_sync(q, 0);
    return st == AR_OK ? end : st;
}

BODY(exchange_count)
{
    return exchange_odd(c, q, r, 1, 1, r == 2 ? 2 : 1);
}

BODY(exchange_without_receive)
{
    return exchange_odd(c, q, r, 1, r == 2 ? 0 : 1, 1);
}

BODY(exchange_without_send)
{
    return exchange_odd(c, q, r, r == 2 ? 0 : 1, 1, 1);
}

static ar_status sync_barrier(ar_comm *c, ar_queue *q, const char *tag)
{
    AR_TRY(ar_comm_barrier(c, q, tag));
    return ar_queue_sync(q, 0);
}

BODY(returns)
{
    return r == 1 ? AR_OK : sync_barrier(c, q, "step");
}

BODY(destroys)
{
    ar_comm *g = NULL;
    AR_TRY(ar_comm_split(&g, c, 0, r));
    ar_status st = r == 1 ? AR_OK : sync_barrier(g, q, "step");
    ar_comm_destroy(g);
    return st == AR_OK ? sync_barrier(c, q, "end") : st;
}

BODY(fails)
{
    return r == 1 ? ar_error_set(AR_ERR_IO, "the disk is full") : sync_barrier(c, q, "step");
}

BODY(aborts)
{
    if (r == 1)
        ari_comm_abort(c, AR_ERR_DATA, "the loss is NaN");
    return sync_barrier(c, q, "step");
}

static ar_status fail_task(void *arg)
{
    (void)arg;
    return ar_error_set(AR_ERR_DATA, "weights are NaN");
}

BODY(task_fails)
{
    if (r == 1)
        AR_TRY(ar_queue_host(q, fail_task, NULL));
    return sync_barrier(c, q, "step");
}

BODY(two_orders)
{
    ar_comm *tp = NULL, *dp = NULL;
    ar_status st = ar_comm_split(&tp, c, 0, r);
    if (st == AR_OK)
        st = ar_comm_split(&dp, c, 0, -r);
    if (st == AR_OK)
        st = sync_barrier(r == 0 ? tp : dp, q, r == 0 ? "tp" : "dp");
    if (st == AR_OK)
        st = sync_barrier(r == 0 ? dp : tp, q, r == 0 ? "dp" : "tp");
    ar_comm_destroy(tp);
    ar_comm_destroy(dp);
    return st;
}

/* Both send first: each waits for the other's recv. */
BODY(both_send)
{
    const call_spec first = {.kind = ONE_SEND, .dtype = AR_F32, .count = 4, .root = 1 - r, .tag = "act"};
    const call_spec then = {.kind = ONE_RECV, .dtype = AR_F32, .count = 4, .root = 1 - r, .tag = "act"};
    AR_TRY(make_call(&first, c, q));
    return make_call(&then, c, q);
}

/* Transfers whose numbers and bits are known: rank 1 takes {1, 2, 3, 4} from rank 0, then from rank 2. */
BODY(gather_fours)
{
    static const int32_t in[4] = {1, 2, 3, 4};
    static const size_t counts[3] = {4, 4, 4};
    int32_t out[12];
    const ar_status st = ar_comm_all_gather(c, q, (ar_buf){out}, (ar_cbuf){in}, counts, AR_I32, "layers.0");
    const ar_status end = ar_queue_sync(q, 0);
    return st == AR_OK ? end : st;
}

BODY(own_group)
{
    OWNED(ar_comm_destroy) ar_comm *g = NULL;
    AR_TRY(ar_comm_split(&g, c, r, 0));
    return sync_barrier(g, q, "own");
}

#define REDUCE_8                                     \
    {                                                \
        ALL_REDUCE, AR_F32, AR_SUM, 8, .tag = "grad" \
    }
#define BROADCAST_8                                  \
    {                                                \
        BROADCAST, AR_F32, .count = 8, .tag = "init" \
    }
#define FAULT(what, ...) .fault = {.kind = (what), .rank = 1, .collective = 1, __VA_ARGS__}

static const way_to_fail ways[] = {
    {"another kind", AR_ERR_MISMATCH, .usual = {REDUCE_8},
     .odd = {{ALL_GATHER, AR_F32, .counts = {8, 8, 8}, .tag = "grad"}}},
    {"another dtype", AR_ERR_MISMATCH, .usual = {REDUCE_8}, .odd = {{ALL_REDUCE, AR_BF16, AR_SUM, 8, .tag = "grad"}}},
    {"another operation", AR_ERR_MISMATCH, .usual = {REDUCE_8},
     .odd = {{ALL_REDUCE, AR_F32, AR_MAX, 8, .tag = "grad"}}},
    {"another count", AR_ERR_MISMATCH, .usual = {REDUCE_8}, .odd = {{ALL_REDUCE, AR_F32, AR_SUM, 7, .tag = "grad"}}},
    {"another root", AR_ERR_MISMATCH, .usual = {BROADCAST_8},
     .odd = {{BROADCAST, AR_F32, .count = 8, .root = 2, .tag = "init"}}},
    {"counts of a reduce-scatter", AR_ERR_MISMATCH,
     .usual = {{REDUCE_SCATTER, AR_F32, AR_SUM, .counts = {4, 4, 4}, .tag = "grad"}},
     .odd = {{REDUCE_SCATTER, AR_F32, AR_SUM, .counts = {4, 5, 3}, .tag = "grad"}}},
    {"counts of an all-gather", AR_ERR_MISMATCH, .usual = {{ALL_GATHER, AR_F32, .counts = {4, 4, 4}, .tag = "weight"}},
     .odd = {{ALL_GATHER, AR_F32, .counts = {4, 4, 5}, .tag = "weight"}}},
    {"what one sends and another expects", AR_ERR_MISMATCH,
     .usual = {{ALL_TO_ALL, AR_F32, .counts = {2, 2, 2}, .recv_counts = {2, 2, 2}, .tag = "tokens"}},
     .odd = {{ALL_TO_ALL, AR_F32, .counts = {2, 2, 2}, .recv_counts = {1, 2, 2}, .tag = "tokens"}}},
    {"count of a message of an exchange", AR_ERR_MISMATCH, .body = exchange_count},
    {"a send of an exchange without a receive", AR_ERR_MISMATCH, .body = exchange_without_receive},
    {"a receive of an exchange without a send", AR_ERR_MISMATCH, .body = exchange_without_send},
    {"count of a message", AR_ERR_MISMATCH, .usual = {{ONE_SEND, AR_F32, .count = 4, .root = 1, .tag = "act"}},
     .odd = {{ONE_RECV, AR_F32, .count = 5, .root = 0, .tag = "act"}}, .ranks = 2},
    {"dtype of a message", AR_ERR_MISMATCH, .usual = {{ONE_SEND, AR_F32, .count = 4, .root = 1, .tag = "act"}},
     .odd = {{ONE_RECV, AR_BF16, .count = 4, .root = 0, .tag = "act"}}, .ranks = 2},
    {"a split that not all call", AR_ERR_MISMATCH, .usual = {{ONE_SPLIT, .tag = ""}},
     .odd = {{BARRIER, .tag = "step"}}},
    {"another order, seen by the kinds", AR_ERR_MISMATCH, .usual = {REDUCE_8, BROADCAST_8},
     .odd = {BROADCAST_8, REDUCE_8}},
    {"another order, seen by the tags alone", AR_ERR_MISMATCH,
     .usual = {{ALL_REDUCE, AR_F32, AR_SUM, 8, .tag = "layers.0"}, {ALL_REDUCE, AR_F32, AR_SUM, 8, .tag = "layers.1"}},
     .odd = {{ALL_REDUCE, AR_F32, AR_SUM, 8, .tag = "layers.1"}, {ALL_REDUCE, AR_F32, AR_SUM, 8, .tag = "layers.0"}}},
    {"a rank returned", AR_ERR_MISMATCH, .body = returns, .ranks = 2},
    {"a rank destroyed its communicator", AR_ERR_MISMATCH, .body = destroys, .ranks = 2},
    {"a rank failed", AR_ERR_IO, .body = fails},
    {"a rank aborted", AR_ERR_DATA, .body = aborts},
    {"a task before the collective failed", AR_ERR_DATA, .body = task_fails, .inline_only = true},
    {"a rank does not come", AR_ERR_TIMEOUT, .body = gather_fours, .ranks = 2, FAULT(AR_SIM_DELAY, .ns = 3600000 * MS)},
    {"two groups in opposite orders", AR_ERR_TIMEOUT, .inline_only = true, .body = two_orders, .ranks = 2},
    {"two sends without a receive", AR_ERR_TIMEOUT, .inline_only = true, .body = both_send, .ranks = 2},
    {"a rank stalls before a collective", AR_ERR_TIMEOUT, .ranks = 2, .body = gather_fours,
     FAULT(AR_SIM_STALL, .transfer = 0)},
    {"a rank stalls in the middle", AR_ERR_TIMEOUT, .inline_only = true, .body = gather_fours,
     FAULT(AR_SIM_STALL, .transfer = 1), .algorithm = AR_SIM_DIRECT},
    {"a rank stalls, and nobody waits for it", AR_ERR_TIMEOUT, .body = own_group,
     .fault = {.kind = AR_SIM_STALL, .rank = 1, .collective = 2}},
    {"a rank is killed before a collective", AR_ERR_ABORTED, .body = gather_fours, FAULT(AR_SIM_KILL, .transfer = 0)},
    {"a rank is killed in the middle", AR_ERR_ABORTED, .body = gather_fours, FAULT(AR_SIM_KILL, .transfer = 1),
     .algorithm = AR_SIM_DIRECT},
    {"a bit arrives inverted", AR_ERR_DATA, .body = gather_fours, FAULT(AR_SIM_CORRUPT, .transfer = 1, .bit = 65),
     .verify = true, .algorithm = AR_SIM_DIRECT},
    {"a transfer is dropped", AR_ERR_DATA, .body = gather_fours, FAULT(AR_SIM_DROP, .transfer = 1), .verify = true,
     .algorithm = AR_SIM_DIRECT},
    {"a transfer is duplicated", AR_ERR_DATA, .body = gather_fours, FAULT(AR_SIM_DUPLICATE, .transfer = 0),
     .verify = true, .algorithm = AR_SIM_DIRECT},
    {"reduce-scatter and another operation", AR_ERR_MISMATCH,
     .usual = {{REDUCE_SCATTER, AR_F32, AR_MIN, .counts = {4, 4, 4}, .tag = "grad"}},
     .odd = {{REDUCE_SCATTER, AR_F32, AR_MAX, .counts = {4, 4, 4}, .tag = "grad"}},
     .says = "operation min against max"},
    {"more expected than is sent", AR_ERR_MISMATCH,
     .usual = {{ALL_TO_ALL, AR_F32, .counts = {2, 2, 2}, .recv_counts = {2, 2, 2}, .tag = "tokens"}},
     .odd = {{ALL_TO_ALL, AR_F32, .counts = {2, 2, 2}, .recv_counts = {2, 3, 2}, .tag = "tokens"}},
     .says = "rank 1 sends 2 elements to rank 2, which expects 3"},
    {"a message from the later rank", AR_ERR_MISMATCH,
     .usual = {{ONE_RECV, AR_I32, .count = 5, .root = 1, .tag = "act"}},
     .odd = {{ONE_SEND, AR_F32, .count = 5, .root = 0, .tag = "act"}}, .ranks = 2,
     .says = "rank 1 sends 5 elements of F32 to rank 0, which expects 5 of I32"},
};
enum { WAYS = sizeof ways / sizeof *ways };

BODY(calls_of_way)
{
    const way_to_fail *w = &ways[run->variant];
    const call_spec *calls = r == (w->ranks ? w->ranks : 3) - 1 ? w->odd : w->usual;
    for (int i = 0; i < 2; i++) {
        if (calls[i].tag)
            AR_TRY(make_call(&calls[i], c, q));
    }
    return AR_OK;
}

/* "waited 0.104 s" and the like become "waited 0.100 s": how long it was is the machine's business. */
static void normalise_times(char *line)
{
    for (char *at = strstr(line, " waited "); at; at = strstr(at, " waited ")) {
        at += strlen(" waited ");
        char *fraction = strchr(at, '.');
        if (fraction && isdigit((unsigned char)fraction[1]))
            memcpy(fraction + 2, "00", 2);
    }
}

static char *read_failures(void)
{
    static char text[1 << 17];
    FILE *f = fopen(TEST_SOURCE_DIR "/docs/design/failure-messages.tsv", "r");
    cr_assert(f, "docs/design/failure-messages.tsv cannot be read");
    const size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = '\0';
    return text;
}

static void run_way(int v, ar_sim_algorithm algorithm, ar_queue_kind queue, char *row)
{
    const way_to_fail *w = &ways[v];
    const int n = w->ranks ? w->ranks : 3;
    const ar_sim_options o = {.algorithm = algorithm,
                              .timeout_ns = w->st == AR_ERR_TIMEOUT ? TIMEOUT_NS : 0,
                              .faults = &w->fault,
                              .fault_count = w->fault.collective ? 1 : 0,
                              .verify_transfers = w->verify,
                              /* No time passes, and the rank that waits longest is the same one every time. */
                              .explore = w->st == AR_ERR_TIMEOUT || w->body == destroys,
                              .schedule_seed = 1};
    fail_run run = {.body = w->body ? w->body : calls_of_way, .variant = v, .queue = queue};
    char line[768];
    cr_assert_eq(run_with(&run, n, &o, NULL), w->st, "%s: %s", w->name, ar_error_message());
    snprintf(line, sizeof line, "%.*s", (int)strcspn(ar_error_message(), "\n"), ar_error_message());
    for (int r = 0; r < n; r++) {
        const bool own = strstr(line, run.message[r]) != NULL; /* "" where it returned in time */
        cr_assert(own || strstr(run.message[r], line), "%s: rank %d says '%s', the world '%s'", w->name, r,
                  run.message[r], line);
        /* All ranks of calls that do not fit each other have the error; in the bodies some may have ended before. */
        cr_assert(w->body || run.st[r] == AR_ERR_MISMATCH, "%s: rank %d: %s", w->name, r, run.message[r]);
    }
    normalise_times(line);
    snprintf(row, ROW_BYTES, "%s\t%s\t%s\n", w->name, ar_status_name(w->st), line);
}

Test(message, the_table_of_failures_is_what_the_library_says)
{
    static char table[TABLE_BYTES];
    const char *text = read_failures();
    size_t used = 0, found = 0, rows = 0, wanted = 0;
    for (int v = 0; v < WAYS; v++) {
        char row[ROW_BYTES] = "", again[ROW_BYTES];
        for (int a = AR_SIM_AUTO; a <= AR_SIM_LAST; a++) {
            if (ways[v].algorithm != AR_SIM_AUTO && a != (int)ways[v].algorithm)
                continue;
            for (int kind = 0; kind < (ways[v].inline_only ? 1 : 2); kind++) {
                run_way(v, (ar_sim_algorithm)a, (ar_queue_kind)kind, again);
                cr_assert(row[0] == '\0' || strcmp(row, again) == 0, "algorithm %d, queue %d: %snot %s", a, kind, again,
                          row);
                memcpy(row, again, sizeof row);
            }
        }
        if (ways[v].says) {
            cr_assert(strstr(row, ways[v].says), "'%s' is not in: %s", ways[v].says, row);
            continue;
        }
        wanted++;
        found += strstr(text, row) != NULL;
        used += (size_t)snprintf(table + used, sizeof table - used, "%s", row);
    }
    for (const char *at = strstr(text, "\tAR_ERR"); at; at = strstr(at + 1, "\tAR_ERR"))
        rows++;
    if (found != wanted || rows != wanted)
        fputs(table, stderr); /* longer than an assertion's message may be */
    cr_assert(found == wanted && rows == wanted,
              "%zu rows, %zu of them right; the %zu that must be there are printed above", rows, found, wanted);
}
