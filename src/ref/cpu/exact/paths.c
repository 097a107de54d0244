/* SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/clock.h"
#include "ref/core/size.h"
#include "ref/cpu/device.h"

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

/* Sums that take about 50 us each, of operands that are packed as those of a large product are; a thread's processor
 * time, the least of ROUNDS in turns. */
enum { EXTENT = 96, TERMS = 256, ROUNDS = 7 };
/* A path has to be this much faster than one before it in the list, which else remains: near a draw another run of the
 * program would choose the other. */
static const double CLEARLY = 1.05;

/* An EXTENT by EXTENT product of zeros by one path; ns: of the fastest so far. */
typedef struct trial {
    ari_tile_plan plan;
    ari_tile tile;
    void *words;
    double ns;
} trial;

static ar_status trial_init(trial *t, const ari_exact_path *path, const ar_packed *operand)
{
    enum { LINE = 64 };
    *t = (trial){.plan = {.tile_rows = EXTENT, .tile_cols = EXTENT}, .ns = 1e18};
    path->plan(&t->plan, TERMS);
    AR_TRY(ari_alloc(&t->words, t->plan.path * sizeof(double) + LINE, 1, "a trial of an exact path"));
    t->tile = (ari_tile){.rows = EXTENT,
                         .cols = EXTENT,
                         .a = operand,
                         .b = operand,
                         .plan = &t->plan,
                         .words = (char *)t->words + (LINE - (uintptr_t)t->words % LINE) % LINE};
    return AR_OK;
}

static void trial_run(trial *t, const ari_exact_path *path)
{
    const uint64_t start = ari_thread_ns();
    path->sum(&t->tile, 0, TERMS);
    const double ns = (double)(ari_thread_ns() - start);
    t->ns = ns < t->ns ? ns : t->ns;
}

static ar_status contest(trial *trials, const ari_exact_path *const *path, size_t n)
{
    ar_status st = AR_OK;
    void *zeros = NULL;
    AR_TRY(ari_alloc_zero(&zeros, (size_t)EXTENT * TERMS, sizeof(int32_t), "a trial of exact paths"));
    const ar_packed operand = {
        .batch = 1, .rows = EXTENT, .k = TERMS, .ld = TERMS, .step = (size_t)EXTENT * TERMS, .q = zeros};
    for (size_t i = 0; i < n; i++)
        AR_TRY_TO(done, st, trial_init(&trials[i], path[i], &operand));
    for (int round = 0; round < ROUNDS; round++)
        for (size_t i = 0; i < n; i++)
            trial_run(&trials[i], path[i]);
done:
    for (size_t i = 0; i < n; i++)
        free(trials[i].words);
    free(zeros);
    return st;
}

/* --- the choice --------------------------------------------------------------------------------------------------- */

static struct {
    pthread_once_t once;
    const ari_exact_path *path;
    char why[128];
} fastest = {.once = PTHREAD_ONCE_INIT};

static void choose_measured(const ari_exact_path *const *path, const trial *trials, size_t n)
{
    size_t best = 0;
    for (size_t i = 1; i < n; i++)
        if (trials[i].ns * CLEARLY < trials[best].ns)
            best = i;
    size_t used = (size_t)snprintf(fastest.why, sizeof fastest.why, "measured:");
    const char *between = "";
    for (size_t i = 0; i < n; i++)
        if (i != best && used < sizeof fastest.why) {
            used += (size_t)snprintf(fastest.why + used, sizeof fastest.why - used, "%s %.2f times as fast as %s",
                                     between, trials[i].ns / trials[best].ns, path[i]->name);
            between = ",";
        }
    fastest.path = path[best];
}

static void find_fastest(void)
{
    const ari_exact_path *path[PATHS];
    trial trials[PATHS] = {{.words = NULL}};
    const size_t n = candidates(path);
    fastest.path = path[0];
    if (n == 1)
        (void)snprintf(fastest.why, sizeof fastest.why, "the fastest of this build that the processor has");
    else if (contest(trials, path, n) == AR_OK)
        choose_measured(path, trials, n);
    else
        (void)snprintf(fastest.why, sizeof fastest.why, "not measured: out of memory");
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

ar_status ari_exact_choose(const ari_exact_path **path, const char **why)
{
    const char *set = getenv(ARI_EXACT_VARIABLE);
    if (!set || set[0] == '\0') {
        (void)pthread_once(&fastest.once, find_fastest);
        *path = fastest.path;
        *why = fastest.why;
        return AR_OK;
    }
    size_t i = 0;
    while (i < PATHS && strcmp(set, entries[i].path->name) != 0)
        i++;
    if (i == PATHS)
        return unknown_path(set);
    if (!entries[i].path->supported())
        return ar_error_set(AR_ERR_UNSUPPORTED, "cpu device: %s is '%s', and this processor has no %s",
                            ARI_EXACT_VARIABLE, set, entries[i].path->needs);
    *path = entries[i].path;
    *why = ARI_EXACT_VARIABLE " is set";
    return AR_OK;
}
