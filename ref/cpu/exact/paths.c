/* SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/clock.h"
#include "ref/core/size.h"
#include "ref/cpu/device.h"
#include "ref/cpu/kernels.h"

/* Which way of making exact sums a device takes (gemm.h). Paths of one family do the same with other instructions, and
 * the first that the processor has is the fastest of them. Which family is faster depends on the processor: that is
 * measured, and expected to be in this order (16-bit digits take 6 to 8 % less time than IFMA on a Zen 5). */
typedef struct entry {
    const ari_exact_path *path;
    enum { TILES, PAIRS, OFFSETS, DIGITS, WORDS, HALVES } family;
} entry;

static const entry entries[] = {
#if ARI_HAVE_X86_PATHS
    {&ari_exact_amx, TILES},       {&ari_exact_avx512vnni, PAIRS}, {&ari_exact_avxvnni, PAIRS},
    {&ari_exact_avx2, PAIRS},      {&ari_exact_ifma, OFFSETS},
#endif
#if ARI_HAVE_ARM_PATHS
    {&ari_exact_smmla, DIGITS},    {&ari_exact_sdot, DIGITS},      {&ari_exact_neon, WORDS},
#endif
    {&ari_exact_portable, HALVES}, /* last: every processor has it, and anything else is faster */
};
#define PATHS (sizeof entries / sizeof entries[0])

const ari_exact_path *ari_exact_path_at(size_t i)
{
    return i < PATHS ? entries[i].path : NULL;
}

/* The first of each family that is here; the last only if there is nothing else. Returns how many. */
static size_t candidates(const ari_exact_path *out[PATHS])
{
    size_t n = 0;
    for (size_t i = 0; i < PATHS; i++) {
        bool of_family = i == PATHS - 1 && n > 0;
        for (size_t j = 0; j < i; j++)
            of_family |= entries[j].family == entries[i].family && entries[j].path->supported();
        if (!of_family && entries[i].path->supported())
            out[n++] = entries[i].path;
    }
    return n;
}

/* --- a contest ---------------------------------------------------------------------------------------------------- */

/* A product of about 3 ms, from packed operands to int64: small ones are mostly packing. Without zeros, which some
 * processors multiply with less power. A thread's processor time, the least of ROUNDS in turns. */
enum { ROWS = 256, COLS = 512, TERMS = 768, ROUNDS = 3 };
/* A path has to be this much faster than one before it in the list, which else remains: near a draw another run of the
 * program would choose the other. One of some sums only more: the speed of AMX's products has two states, and the
 * contest sees one of them. */
static const double CLEARLY = 1.05, FAR = 1.25;
/* Multiplications that take five times as long as the contest, some 20 ms: most commands are over before. */
#define WORTH (UINT64_C(1) << 32)

/* A device with one path, whose memory is there from its first product on. */
typedef struct trial {
    ari_cpu_device device;
    double ns; /* the least */
} trial;

typedef struct contest {
    trial trial[PATHS];
    size_t n;
    ar_packed a, b;
    int32_t *integers;
    int64_t *sums;
} contest;

static ar_status contest_init(contest *c, const ari_exact_path *const *path, size_t n)
{
    enum { OPERANDS = (ROWS + COLS) * TERMS };
    void *memory[2] = {NULL};
    *c = (contest){.n = n};
    for (size_t i = 0; i < n; i++) {
        c->trial[i] = (trial){{*ari_cpu_form(), .exact = {path[i], path[i], ""}}, 1e18};
        ari_pool_init(&c->trial[i].device.pool);
    }
    AR_TRY(ari_alloc(&memory[0], OPERANDS, sizeof *c->integers, "a trial of exact paths"));
    c->integers = memory[0];
    AR_TRY(ari_alloc(&memory[1], (size_t)ROWS * COLS, sizeof *c->sums, "a trial of exact paths"));
    c->sums = memory[1];
    for (uint32_t i = 0; i < OPERANDS; i++)
        c->integers[i] = (int32_t)(i * 2654435769u >> 7) - ARI_QUANTISED_MAX / 2;
    c->a = (ar_packed){.batch = 1, .rows = ROWS, .k = TERMS, .ld = TERMS, .q = c->integers};
    c->b = (ar_packed){.batch = 1, .rows = COLS, .k = TERMS, .ld = TERMS, .q = c->integers + (size_t)ROWS * TERMS};
    return AR_OK;
}

static void contest_fini(contest *c)
{
    free(c->integers);
    free(c->sums);
    for (size_t i = 0; i < c->n; i++)
        ari_pool_fini(&c->trial[i].device.pool);
}

static ar_status hold(contest *c)
{
    for (size_t i = 0; i < c->n * ROUNDS; i++) {
        trial *t = &c->trial[i % c->n];
        const uint64_t start = ari_thread_ns();
        AR_TRY(ari_cpu_gemm_i64(&t->device.base, NULL, (ar_buf){c->sums}, &c->a, &c->b, 1, false));
        const double ns = (double)(ari_thread_ns() - start);
        t->ns = ns < t->ns ? ns : t->ns;
    }
    return AR_OK;
}

/* --- the choice --------------------------------------------------------------------------------------------------- */

static struct {
    pthread_once_t once;
    ari_exact_choice choice;
    char why[192];
} fastest = {.once = PTHREAD_ONCE_INIT};

static const ari_exact_path *path_of(const contest *c, size_t i)
{
    return c->trial[i].device.exact.path;
}

/* The fastest of those for all sums, or for some of them, in place of the one that is `best` already; n: none. */
static size_t faster(const contest *c, size_t best, bool some, double by)
{
    for (size_t i = 0; i < c->n; i++)
        if ((path_of(c, i)->least_terms > 0) == some && (best == c->n || c->trial[i].ns * by < c->trial[best].ns))
            best = i;
    return best;
}

static void choose_measured(const contest *c)
{
    const size_t brief = faster(c, c->n, false, CLEARLY), best = faster(c, brief, true, FAR);
    size_t used = (size_t)snprintf(fastest.why, sizeof fastest.why, "measured:");
    const char *between = "";
    for (size_t i = 0; i < c->n; i++)
        if (i != best && used < sizeof fastest.why) {
            used += (size_t)snprintf(fastest.why + used, sizeof fastest.why - used, "%s %.2f times as fast as %s",
                                     between, c->trial[i].ns / c->trial[best].ns, path_of(c, i)->name);
            between = ",";
        }
    const ari_exact_path *path = path_of(c, best), *others = path_of(c, brief < c->n ? brief : best);
    if (others != path && used < sizeof fastest.why)
        (void)snprintf(fastest.why + used, sizeof fastest.why - used, "; %s where sums have fewer than %zu terms",
                       others->name, path->least_terms);
    fastest.choice = (ari_exact_choice){path, others, fastest.why};
}

static void find_fastest(void)
{
    const ari_exact_path *path[PATHS];
    contest c;
    const size_t n = candidates(path);
    fastest.choice = (ari_exact_choice){path[n - 1], path[n - 1], fastest.why};
    if (n == 1) {
        (void)snprintf(fastest.why, sizeof fastest.why, "the fastest of this build that the processor has");
        return;
    }
    if (contest_init(&c, path, n) == AR_OK && hold(&c) == AR_OK)
        choose_measured(&c);
    else
        (void)snprintf(fastest.why, sizeof fastest.why, "not measured: out of memory");
    contest_fini(&c);
}

static ar_status unknown_path(const char *set)
{
    char names[160] = "";
    for (size_t i = 0; i < PATHS; i++) {
        const size_t used = strlen(names);
        (void)snprintf(names + used, sizeof names - used, "%s%s",
                       i == 0           ? ""
                       : i + 1 == PATHS ? " or "
                                        : ", ",
                       entries[i].path->name);
    }
    return ar_error_set(AR_ERR_ARG, "cpu device: %s is '%.40s', expected %s", ARI_EXACT_VARIABLE, set, names);
}

ar_status ari_exact_forced(ari_exact_choice *choice)
{
    const char *set = getenv(ARI_EXACT_VARIABLE);
    size_t i = 0;
    *choice = (ari_exact_choice){.path = NULL};
    if (!set || set[0] == '\0')
        return AR_OK;
    while (i < PATHS && strcmp(set, entries[i].path->name) != 0)
        i++;
    if (i == PATHS)
        return unknown_path(set);
    if (!entries[i].path->supported())
        return ar_error_set(AR_ERR_UNSUPPORTED, "cpu device: %s is '%s', and this processor has no %s",
                            ARI_EXACT_VARIABLE, set, entries[i].path->needs);
    *choice = (ari_exact_choice){entries[i].path, entries[i].path, ARI_EXACT_VARIABLE " is set"};
    return AR_OK;
}

ar_status ari_exact_choose(ari_exact_choice *choice)
{
    AR_TRY(ari_exact_forced(choice));
    if (choice->path)
        return AR_OK;
    (void)pthread_once(&fastest.once, find_fastest);
    *choice = fastest.choice;
    return AR_OK;
}

static struct {
    pthread_once_t once;
    ari_exact_choice choice;
} likely = {.once = PTHREAD_ONCE_INIT};

/* The first of those for all sums. */
static void find_likely(void)
{
    const ari_exact_path *path[PATHS];
    size_t i = candidates(path);
    while (i-- > 0)
        if (path[i]->least_terms == 0)
            likely.choice = (ari_exact_choice){path[i], path[i], "likely"};
}

ari_exact_choice ari_exact_likely(uint64_t multiplications)
{
    static _Atomic uint64_t done;
    const bool measured = atomic_load_explicit(&done, memory_order_relaxed) >= WORTH;
    (void)pthread_once(measured ? &fastest.once : &likely.once, measured ? find_fastest : find_likely);
    if (!measured)
        (void)atomic_fetch_add_explicit(&done, multiplications, memory_order_relaxed);
    return measured ? fastest.choice : likely.choice;
}
