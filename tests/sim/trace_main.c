/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "anyrank/comm.h"
#include "anyrank/queue.h"
#include "anyrank/sim.h"
#include "ref/core/record.h"
#include "tests/support/temporary.h"

/* Traces of real runs, by both clocks, handed to trace_check.py with a list of what each must hold. A program of its own, so that it runs under the sanitizers. usage: trace_main [FOLDER], which then keeps the
 * files. */

extern char **environ;

enum { QUEUES = 2, IN_FLIGHT = 6, LARGE = 40000, MOST_RANKS = 8 };
/* Everything that a careless writer would let through: quotes, a backslash, control characters, the end of a script,
 * UTF-8, and bytes that are none. */
static const char ODD[] = "\"q\" \\ \t\x01\x7f </script><!-- \xc3\xa9\xe4\xb8\x96\xf0\x9f\x98\x80 \xff\xc0\x80";

typedef enum failure { NONE, LEAVES, DISAGREES } failure;

typedef struct trace_case {
    const char *name;
    int ranks;
    ar_sim_algorithm algorithm;
    failure failure; /* of rank 1, before or in the last collective */
    bool free;       /* moving takes no virtual time: collectives end when the last one comes */
} trace_case;

/* What the ranks did, and so what the trace must hold. */
typedef struct done {
    const trace_case *c;
    int collectives[MOST_RANKS], spans[MOST_RANKS]; /* each written by its rank's main thread */
} done;

typedef struct rank_state {
    ar_comm *world, *sub, *side[QUEUES];
    ar_queue *main, *queue[QUEUES];
    ar_event *event;
    float *in, *out, *side_in[QUEUES], *side_out[QUEUES];
    int n, r;
    done *d;
} rank_state;

static void begin(rank_state *s, const char *name)
{
    ar_trace_begin(name);
    s->d->spans[s->r]++;
}

static ar_status counted(rank_state *s, ar_status st)
{
    s->d->collectives[s->r] += st == AR_OK;
    return st;
}

static ar_status every_kind(rank_state *s)
{
    const size_t n = (size_t)s->n;
    size_t counts[MOST_RANKS];
    const ar_buf out = {s->out};
    const ar_cbuf in = {s->in};
    for (int i = 0; i < s->n; i++)
        counts[i] = 100 + (size_t)i;
    begin(s, "every kind");
    AR_TRY(counted(s, ar_comm_all_reduce(s->world, s->main, out, in, 1000, AR_F32, AR_SUM, ODD)));
    AR_TRY(counted(s, ar_comm_all_reduce(s->world, s->main, out, in, LARGE, AR_F32, AR_MAX, "large")));
    AR_TRY(counted(s, ar_comm_reduce_scatter(s->world, s->main, out, in, counts, AR_F32, AR_SUM, "scattered")));
    AR_TRY(counted(s, ar_comm_all_gather(s->world, s->main, out, in, counts, AR_F32, "gathered")));
    ar_trace_work(1e6 * (double)(s->r + 1));
    AR_TRY(counted(s, ar_comm_broadcast(s->world, s->main, out, 5000, AR_F32, s->n - 1, "weights")));
    for (int i = 0; i < s->n; i++)
        counts[i] = 10;
    AR_TRY(counted(s, ar_comm_all_to_all(s->world, s->main, out, in, counts, counts, AR_F32, "tokens")));
    AR_TRY(counted(s, ar_comm_all_reduce(s->sub, s->main, out, in, 20000, AR_F32, AR_SUM, "of every other rank")));
    AR_TRY(counted(s, ar_comm_barrier(s->world, s->main, "")));
    if (n > 1 && s->r == 0)
        AR_TRY(counted(s, ar_comm_send(s->world, s->main, in, 2000, AR_F32, 1, "activations")));
    if (n > 1 && s->r == 1)
        AR_TRY(counted(s, ar_comm_recv(s->world, s->main, out, 2000, AR_F32, 0, "activations")));
    ar_trace_end();
    return AR_OK;
}

/* Two queues with a communicator each, while the main thread computes. */
static ar_status beside(rank_state *s)
{
    for (int i = 0; i < IN_FLIGHT; i++) {
        begin(s, i % 2 ? "layers.1.mlp:bwd" : "layers.0.attn:bwd");
        ar_trace_work(2e6);
        for (int k = 0; k < QUEUES; k++)
            AR_TRY(counted(s, ar_comm_all_reduce(s->side[k], s->queue[k], (ar_buf){s->side_out[k]},
                                                 (ar_cbuf){s->side_in[k]}, LARGE, AR_F32, AR_SUM, "gradients")));
        begin(s, "inner");
        ar_trace_work(1e5);
        ar_trace_end();
        ar_trace_end();
    }
    AR_TRY(ar_event_record(s->event, s->queue[0]));
    AR_TRY(ar_queue_wait(s->main, s->event));
    return ar_queue_sync(s->queue[1], 0);
}

static ar_status create(rank_state *s)
{
    s->in = calloc(LARGE, sizeof *s->in);
    s->out = calloc(LARGE, sizeof *s->out);
    AR_TRY(ar_queue_create(&s->main, AR_QUEUE_INLINE, "main"));
    AR_TRY(ar_event_create(&s->event));
    AR_TRY(counted(s, ar_comm_split(&s->sub, s->world, s->r % 2, 0)));
    for (int k = 0; k < QUEUES; k++) {
        s->side_in[k] = calloc(LARGE, sizeof *s->side_in[k]);
        s->side_out[k] = calloc(LARGE, sizeof *s->side_out[k]);
        AR_TRY(ar_queue_create(&s->queue[k], AR_QUEUE_THREAD, k ? "gradients" : "weights \"k\""));
        AR_TRY(counted(s, ar_comm_split(&s->side[k], s->world, 0, 0)));
        if (!s->side_in[k] || !s->side_out[k])
            return ar_error_set(AR_ERR_MEMORY, "no memory for rank %d", s->r);
    }
    return s->in && s->out ? AR_OK : ar_error_set(AR_ERR_MEMORY, "no memory for rank %d", s->r);
}

static void destroy(rank_state *s)
{
    for (int k = 0; k < QUEUES; k++) {
        ar_queue_destroy(s->queue[k]);
        ar_comm_destroy(s->side[k]);
        free(s->side_in[k]);
        free(s->side_out[k]);
    }
    ar_event_destroy(s->event);
    ar_comm_destroy(s->sub);
    ar_queue_destroy(s->main);
    free(s->in);
    free(s->out);
}

/* A failing run leaves its spans open: the trace must close them. */
static ar_status work(ar_comm *world, void *arg)
{
    rank_state s = {.world = world, .n = ar_comm_size(world), .r = ar_comm_rank(world), .d = arg};
    begin(&s, ODD);
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, create(&s));
    AR_TRY_TO(done, st, every_kind(&s));
    AR_TRY_TO(done, st, beside(&s));
    const failure fails = s.r == 1 ? s.d->c->failure : NONE;
    if (fails == LEAVES)
        AR_TRY_TO(done, st, ar_error_set(AR_ERR_DATA, "rank 1 has had enough"));
    AR_TRY_TO(done, st,
              counted(&s, ar_comm_all_reduce(s.world, s.main, (ar_buf){s.out}, (ar_cbuf){s.in},
                                             fails == DISAGREES ? 65 : 64, AR_F32, AR_SUM, "the last one")));
done:
    destroy(&s);
    if (st == AR_OK)
        ar_trace_end();
    return st;
}

static int complain(const char *what)
{
    fprintf(stderr, "trace_main: %s: %s\n", what, ar_error_message());
    return 1;
}

static void list_case(FILE *list, const trace_case *c, const char *clock, const done *d, bool cut)
{
    static const char *const failures[] = {"", "leaves", "disagrees"};
    fprintf(
        list,
        "{\"name\":\"%s-%s\",\"clock\":\"%s\",\"ranks\":%d,\"fails\":\"%s\",\"cut\":%s,\"free\":%s,\"collectives\":[",
        c->name, clock, clock, c->ranks, failures[c->failure], cut ? "true" : "false", c->free ? "true" : "false");
    for (int r = 0; r < c->ranks; r++)
        fprintf(list, "%s%d", r ? "," : "", d->collectives[r]);
    fprintf(list, "],\"spans\":[");
    for (int r = 0; r < c->ranks; r++)
        fprintf(list, "%s%d", r ? "," : "", d->spans[r]);
    fprintf(list, "]}\n");
}

static int write_files(const ar_trace *t, const trace_case *c, const char *folder, FILE *list, const done *d, bool cut)
{
    static const char *const clocks[] = {"real", "virtual"};
    char path[512];
    for (int k = AR_TRACE_REAL; k <= (ari_trace_is_virtual(t) ? AR_TRACE_VIRTUAL : AR_TRACE_REAL); k++) {
        snprintf(path, sizeof path, "%s/%s-%s.json", folder, c->name, clocks[k]);
        if (ar_trace_write_json(t, (ar_trace_clock)k, ODD, path) != AR_OK)
            return complain(path);
        list_case(list, c, clocks[k], d, cut);
    }
    return 0;
}

static int run_case(const trace_case *c, const char *folder, FILE *list)
{
    const ar_sim_cluster cluster = {
        .ranks_per_node = 2, .inside = {2e-6, 100e9}, .between = {10e-6, 12.5e9}, .flops = 50e9};
    const ar_sim_cluster free_cluster = {.inside = {0, 1e18}, .between = {0, 1e18}, .flops = 50e9};
    OWNED(ar_trace_destroy) ar_trace *t = NULL;
    done d = {.c = c};
    if (ar_trace_create(&t) != AR_OK)
        return complain(c->name);
    const ar_sim_options o = {.algorithm = c->algorithm, .trace = t, .cluster = c->free ? &free_cluster : &cluster};
    const ar_status st = ar_sim_run(c->ranks, &o, work, &d, NULL);
    const int rc =
        (st != AR_OK) == (c->failure != NONE) ? write_files(t, c, folder, list, &d, false) : complain(c->name);
    return rc;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
static int run_cut(const char *folder, FILE *list)
{
    (void)folder;
    (void)list;
    return 0; /* a sanitizer's own memory does not fit under a limit */
}
#else
static ar_status fill_memory(ar_comm *world, void *arg)
{
    const struct rlimit *before = arg;
    struct rlimit low = *before;
    (void)world;
    FILE *f = fopen("/proc/self/statm", "re");
    unsigned long pages = 0;
    if (!f || fscanf(f, "%lu", &pages) != 1)
        return ar_error_set(AR_ERR_IO, "no /proc/self/statm");
    fclose(f);
    low.rlim_cur = pages * (unsigned long)sysconf(_SC_PAGESIZE) + ((rlim_t)6 << 20);
    if (setrlimit(RLIMIT_AS, &low) != 0)
        return ar_error_set(AR_ERR_IO, "no limit");
    for (int i = 0; i < 400000; i++) {
        ar_trace_begin("one of many");
        ar_trace_end();
    }
    return setrlimit(RLIMIT_AS, before) == 0 ? AR_OK : ar_error_set(AR_ERR_IO, "no limit");
}

static int run_cut(const char *folder, FILE *list)
{
    struct rlimit before;
    OWNED(ar_trace_destroy) ar_trace *t = NULL;
    const trace_case c = {.name = "cut", .ranks = 1};
    const done d = {.c = &c, .spans = {-1}};
    if (getrlimit(RLIMIT_AS, &before) != 0 || ar_trace_create(&t) != AR_OK)
        return complain("cut");
    const ar_sim_options o = {.trace = t};
    int rc = ar_sim_run(1, &o, fill_memory, &before, NULL) == AR_OK ? 0 : complain("cut");
    if (rc == 0)
        rc = write_files(t, &c, folder, list, &d, true);
    return rc;
}
#endif

/* What cannot be written is refused, and leaves no file. */
static int refusals(const char *folder)
{
    char path[512];
    OWNED(ar_trace_destroy) ar_trace *t = NULL;
    if (ar_trace_create(&t) != AR_OK)
        return complain("create");
    snprintf(path, sizeof path, "%s/none.json", folder);
    int rc = ar_trace_write_json(t, AR_TRACE_VIRTUAL, "", path) != AR_ERR_ARG;
    rc |= ar_trace_write_json(t, (ar_trace_clock)7, "", path) != AR_ERR_ARG;
    rc |= ar_trace_write_json(NULL, AR_TRACE_REAL, "", path) != AR_ERR_ARG;
    rc |= access(path, F_OK) == 0;
    rc |= ar_trace_write_json(t, AR_TRACE_REAL, NULL, "/nowhere/at/all.json") != AR_ERR_IO;
    rc |= ar_trace_write_json(t, AR_TRACE_REAL, NULL, "/dev/full") != AR_ERR_IO;
    return rc ? complain("a refusal") : 0;
}

/* 77: no python3. */
static int check(const char *folder)
{
    char script[512], *const arguments[] = {(char[]){"python3"}, script, (char[512]){0}, NULL};
    snprintf(script, sizeof script, "%s/tests/sim/trace_check.py", TEST_SOURCE_DIR);
    snprintf(arguments[2], 512, "%s", folder);
    pid_t child;
    int status = 0;
    const int rc = posix_spawnp(&child, "python3", NULL, NULL, arguments, environ);
    if (rc == ENOENT)
        return 77;
    if (rc != 0 || waitpid(child, &status, 0) != child)
        return 1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

int main(int argc, char **argv)
{
    static const trace_case cases[] = {{"one", 1, AR_SIM_AUTO, NONE, false},
                                       {"two-ring", 2, AR_SIM_RING, NONE, false},
                                       {"two-last", 2, AR_SIM_LAST, NONE, false},
                                       {"four", 4, AR_SIM_AUTO, NONE, false},
                                       {"four-ring", 4, AR_SIM_RING, NONE, false},
                                       {"eight-direct", 8, AR_SIM_DIRECT, NONE, false},
                                       {"eight-last", 8, AR_SIM_LAST, NONE, false},
                                       {"four-leaves", 4, AR_SIM_AUTO, LEAVES, false},
                                       {"four-disagree", 4, AR_SIM_AUTO, DISAGREES, false},
                                       {"four-free", 4, AR_SIM_AUTO, NONE, true}};
    char temporary[] = "/tmp/anyrank-trace-XXXXXX", path[512];
    const char *folder = argc > 1 ? argv[1] : mkdtemp(temporary);
    if (!folder)
        return complain("no folder");
    snprintf(path, sizeof path, "%s/list", folder);
    FILE *list = fopen(path, "we");
    int rc = list ? refusals(folder) : complain(path);
    for (size_t i = 0; rc == 0 && i < sizeof cases / sizeof *cases; i++)
        rc = run_case(&cases[i], folder, list);
    if (rc == 0)
        rc = run_cut(folder, list);
    if (list && fclose(list) != 0)
        rc = complain(path);
    if (rc == 0)
        rc = check(folder);
    if (argc <= 1)
        (void)remove_all(folder);
    return rc;
}
