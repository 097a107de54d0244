/* SPDX-License-Identifier: Apache-2.0 */
#include <signal.h>

#include "ref/comm/comm_private.h"
#include "sim/sim_private.h"
#include "tests/sim/soak_world.h"
#include "tests/support/small.h"

/* Thousands of worlds in which something goes wrong: each ends in the right result or in a report that fits what was
 * done to it, all ranks say the same, and no thread is left. A program of its own, so that it runs
 * under the thread and address sanitizers. usage: soak [first seed [worlds]] */

enum { WORLDS = 200, WORLDS_EXTENDED = 2500 };

typedef struct soak {
    int bad, repeated, explored, threads;
} soak;

static char hang_text[64];

static void say_hang(int signal)
{
    (void)signal;
    const ssize_t rc = write(STDOUT_FILENO, hang_text, sizeof hang_text);
    _exit(rc < 0 ? 3 : 2);
}

static void watch_for_hang(uint64_t seed)
{
    memset(hang_text, ' ', sizeof hang_text);
    const int n = snprintf(hang_text, sizeof hang_text, "seed %llu hangs", (unsigned long long)seed);
    hang_text[n] = ' ';
    hang_text[sizeof hang_text - 1] = '\n';
    alarm(900); /* many times what a world takes on a busy machine */
}

static int count_threads(void)
{
    FILE *f = fopen("/proc/self/status", "r");
    char line[128];
    int n = -1;
    while (f && n < 0 && fgets(line, sizeof line, f)) {
        if (sscanf(line, "Threads: %d", &n) != 1)
            n = -1;
    }
    if (f)
        fclose(f);
    return n;
}

/* A thread that was joined may be counted for a moment longer. */
static bool threads_are(int want)
{
    for (int i = 0; i < 1000 && count_threads() != want; i++)
        usleep(1000);
    return count_threads() == want;
}

/* Whether `rank` is among "0-3, 8". */
static bool is_listed(const char *list, int rank)
{
    while (*list >= '0' && *list <= '9') {
        char *end = NULL;
        const long first = strtol(list, &end, 10);
        const long last = *end == '-' ? strtol(end + 1, &end, 10) : first;
        if (rank >= first && rank <= last)
            return true;
        list = end + strspn(end, ", ");
    }
    return false;
}

/* The rank that the line begins with; -1: none. */
static int named_first(const char *line)
{
    int rank = -1;
    return sscanf(line, "rank %d ", &rank) == 1 ? rank : -1;
}

/* Whether the rank waited in a collective itself, so that another one is to blame for its absence. */
static bool waits_itself(const soak_world *w, const ar_sim_rank_report *reports, const char *list)
{
    for (int r = 0; r < w->w.n; r++) {
        if (is_listed(list, r) && strchr(reports[r].current, '#'))
            return true;
    }
    return false;
}

static bool timeout_fits(const soak_world *w, const ar_sim_fault *f, const char *line,
                         const ar_sim_rank_report *reports)
{
    if (f->kind == AR_SIM_STALL && strstr(line, " stands still "))
        return named_first(line) == f->rank;
    const char *list = strstr(line, ", for rank");
    if (!list || !strstr(line, " waited "))
        return false;
    list += strcspn(list, "0123456789");
    return is_listed(list, f->rank) || waits_itself(w, reports, list);
}

static bool fault_fits(const soak_world *w, const ar_sim_fault *f, ar_status st, const char *line,
                       const ar_sim_rank_report *reports)
{
    int receiver = -1, sender = -1;
    unsigned long long transfer = 0;
    switch (f->kind) {
    case AR_SIM_KILL:
        return st == AR_ERR_ABORTED && strstr(line, " was killed ") && named_first(line) == f->rank;
    case AR_SIM_CORRUPT:
    case AR_SIM_DROP:
    case AR_SIM_DUPLICATE:
        return st == AR_ERR_DATA && w->w.options.verify_transfers &&
               sscanf(line, "rank %d, transfer %llu from rank %d", &receiver, &transfer, &sender) == 3 &&
               (receiver == f->rank || sender == f->rank) &&
               transfer == f->transfer + (f->kind == AR_SIM_DUPLICATE ? 1 : 0);
    default:
        return st == AR_ERR_TIMEOUT && timeout_fits(w, f, line, reports);
    }
}

static bool mistake_fits(const soak_world *w, ar_status st, const char *line, const ar_sim_rank_report *reports)
{
    int a = -1, b = -1;
    if (w->mistake == NO_MISTAKE)
        return false;
    if (w->mistake == TOO_LATE)
        return st == AR_ERR_TIMEOUT && timeout_fits(w, &(ar_sim_fault){.rank = w->w.mistaken}, line, reports);
    if (st == AR_ERR_MISMATCH && sscanf(line, "ranks %d and %d ", &a, &b) == 2)
        return w->mistake > ABORT && (a == w->w.mistaken || b == w->w.mistaken);
    if (named_first(line) != w->w.mistaken)
        return false;
    if (w->mistake == RETURN_OK)
        return st == AR_ERR_MISMATCH && strstr(line, " returned while rank ");
    if (w->mistake == RETURN_ERROR)
        return st == AR_ERR_DATA && strstr(line, " failed with AR_ERR_DATA: returns on purpose");
    if (w->mistake == TASK_FAILS) /* its own words are the rank's, or its queue's */
        return st == AR_ERR_DATA && strstr(line, ": a task failed on purpose");
    return w->mistake == ABORT && st == AR_ERR_IO && strstr(line, " aborted: aborts on purpose");
}

/* Whether what the world says fits something that was done to it. */
static bool report_fits(const soak_world *w, ar_status st, const char *line, const ar_sim_rank_report *reports)
{
    bool fits = mistake_fits(w, st, line, reports);
    for (size_t i = 0; i < w->w.options.fault_count; i++)
        fits = fits || fault_fits(w, &w->fault[i], st, line, reports);
    return fits;
}

/* The rank fails of its own accord, whatever happens to the world meanwhile. */
static bool fails_alone(const soak_world *w, int r)
{
    return (w->mistake == RETURN_ERROR || w->mistake == TASK_FAILS) && r == w->w.mistaken;
}

/* Every rank that failed says what the world says; the one that failed by itself says its own. */
static bool all_say_it(const soak_world *w, const char *line)
{
    for (int r = 0; r < w->w.n; r++) {
        if (w->st[r] != AR_OK && !fails_alone(w, r) && !strstr(w->message[r], line))
            return false;
    }
    return true;
}

/* Something was done that cannot go unnoticed. */
static bool must_fail(const soak_world *w)
{
    bool must = w->mistake != NO_MISTAKE;
    for (size_t i = 0; i < w->w.options.fault_count; i++) {
        const ar_sim_fault *f = &w->fault[i];
        const bool ends = ((f->kind == AR_SIM_STALL || f->kind == AR_SIM_KILL) && f->transfer == 0);
        must = must || (ends && f->collective <= soak_collectives(w, f->rank));
    }
    return must;
}

static bool may_be_wrong(const soak_world *w)
{
    bool may = false;
    for (size_t i = 0; i < w->w.options.fault_count; i++) {
        const ar_sim_fault_kind k = w->fault[i].kind;
        may = may || k == AR_SIM_CORRUPT || k == AR_SIM_DROP || k == AR_SIM_DUPLICATE;
    }
    return may && !w->w.options.verify_transfers;
}

/* Runs the world and judges it: what is not as it should be is in `why`. */
static ar_status run_once(const soak *s, soak_world *w, char *why, size_t size)
{
    ar_sim_rank_report reports[SOAK_RANKS] = {0};
    char line[768];
    world_each(&w->w, visit_reset, NULL);
    memset(w->st, 0, sizeof w->st);
    const ar_status st = ar_sim_run(w->w.n, &w->w.options, soak_rank, w, reports);
    snprintf(line, sizeof line, "%.*s", (int)strcspn(ar_error_message(), "\n"), st == AR_OK ? "" : ar_error_message());
    why[0] = '\0';
    if (!threads_are(s->threads)) {
        snprintf(why, size, "%d threads are left of %d", count_threads(), s->threads);
    } else if (st == AR_OK) {
        world_each(&w->w, visit_holds, why);
        if (must_fail(w))
            snprintf(why, size, "nothing was told");
        else if (may_be_wrong(w))
            why[0] = '\0';
    } else if (!report_fits(w, st, line, reports)) {
        snprintf(why, size, "the report does not fit: %s", ar_error_message());
    } else if (!all_say_it(w, line)) {
        snprintf(why, size, "not every rank says: %s", line);
    }
    return st;
}

static void print_world(const soak_world *w)
{
    printf("seed %llu: N %d, algorithm %d, verify %d, explore %d, timeout %.3f s, mistake %s of rank %d in op %d\n",
           (unsigned long long)w->w.seed, w->w.n, (int)w->w.options.algorithm, w->w.options.verify_transfers,
           w->w.options.explore, (double)w->w.options.timeout_ns * 1e-9, mistake_names[w->mistake], w->w.mistaken,
           w->w.mistaken_op);
    for (size_t i = 0; i < w->w.options.fault_count; i++) {
        char text[128];
        ari_sim_fault_describe(&w->fault[i], text, sizeof text);
        printf("  %s\n", text);
    }
    for (int r = 0; r < w->w.n; r++)
        printf("  rank %d: %s %s\n", r, ar_status_name(w->st[r]), w->message[r]);
}

static void soak_one(soak *s, soak_world *w, uint64_t seed)
{
    static char why[4096];
    draw_soak(w, seed);
    watch_for_hang(seed);
    s->explored += w->w.options.explore;
    ar_status st = run_once(s, w, why, sizeof why);
    /* A short timeout on a busy machine may miss a rank that is merely slow: then a longer one must not. */
    for (int i = 0; i < 2 && why[0] && st == AR_ERR_TIMEOUT && w->w.options.timeout_ns > 0 && !w->w.options.explore;
         i++) {
        s->repeated++;
        w->w.options.timeout_ns *= 8;
        st = run_once(s, w, why, sizeof why);
    }
    s->bad += why[0] != '\0';
    if (why[0]) {
        print_world(w);
        printf("  %s\n", why);
    }
    world_each(&w->w, visit_fini, NULL);
}

/* A failure elsewhere while a group is in the middle of a collective: nobody may leave it half-way, since what a rank
 * frees after its error is still read by the others. The sanitizers see it if one does. */
static ar_status reduce_until_the_end(ar_comm *g)
{
    enum { COUNT = 6000 };
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "soak"));
    ar_status st = AR_OK;
    while (st == AR_OK) {
        OWNED(free) float *in = calloc(COUNT, sizeof *in), *out = calloc(COUNT, sizeof *out);
        st = in && out ? ar_comm_all_reduce(g, q, (ar_buf){out}, (ar_cbuf){in}, COUNT, AR_F32, AR_SUM, "until the end")
                       : ar_error_set(AR_ERR_MEMORY, "no memory");
    }
    return st;
}

static ar_status abort_while_others_reduce(ar_comm *c, void *arg)
{
    const int r = ar_comm_rank(c);
    OWNED(ar_comm_destroy) ar_comm *g = NULL;
    AR_TRY(ar_comm_split(&g, c, r == 3, r));
    ar_status st = AR_OK;
    if (r == 3) {
        usleep((useconds_t) * (const uint64_t *)arg);
        ari_comm_abort(c, AR_ERR_IO, "on purpose");
    } else {
        st = reduce_until_the_end(g);
    }
    return st;
}

static int abort_many_times(uint64_t first)
{
    int bad = 0;
    for (uint64_t i = 0; i < 200; i++) {
        uint64_t delay_us = plain_hash(first + i) % 2000;
        watch_for_hang(first + i);
        const ar_sim_options o = {.algorithm = (ar_sim_algorithm)(i % 4)};
        bad += ar_sim_run(4, &o, abort_while_others_reduce, &delay_us, NULL) != AR_ERR_IO;
    }
    printf("aborts in the middle: %d of 200 wrong\n", bad);
    return bad;
}

static ar_status nothing(ar_comm *c, void *arg)
{
    (void)c;
    (void)arg;
    return AR_OK;
}

int main(int argc, char **argv)
{
    const uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    const uint64_t worlds = argc > 2 ? strtoul(argv[2], NULL, 0) : (uint64_t)by_scale(WORLDS, WORLDS, WORLDS_EXTENDED);
    /* After a first world: a sanitizer's own thread is there from then on. */
    soak s = {.threads = ar_sim_run(2, NULL, nothing, NULL, NULL) == AR_OK ? count_threads() : -1};
    OWNED(free) soak_world *w = malloc(sizeof *w);
    if (!w)
        return 1;
    signal(SIGALRM, say_hang);
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("seeds %llu to %llu\n", (unsigned long long)first, (unsigned long long)(first + worlds - 1));
    for (uint64_t seed = first; seed < first + worlds; seed++)
        soak_one(&s, w, seed);
    printf("%d of them under a deterministic schedule, %d repeated with a longer timeout, %d wrong\n", s.explored,
           s.repeated, s.bad);
    return s.bad + abort_many_times(first) == 0 ? 0 : 1;
}
