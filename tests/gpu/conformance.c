/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/conformance.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "gpu/device_private.h"
#include "gpu/native.h"
#include "gpu/report/device_private.h"
#include "ref/core/device_private.h"
#include "ref/cpu/device_private.h"
#include "support/small.h"

#define EXIT_SKIPPED 77

#define SLOT(name) {#name, offsetof(ar_device_ops, name), name##_cases},
static const struct {
    const char *name;
    size_t offset; /* in ar_device_ops */
    void (*cases)(device_pair *p);
} slots[] = {AR_DEVICE_SLOTS(SLOT)}; /* in the order of the table */
#define SLOTS (sizeof slots / sizeof *slots)

typedef struct request {
    ar_device_choice device;
    const char *slot; /* NULL: all */
    const char *spoil;
    uint64_t seed;
    int rounds;
    bool first_pass_only, small;
} request;

static int usage(const char *what)
{
    fprintf(stderr,
            "%s\nusage: [cpu|emulated|cuda[:N]] [--slot NAME] [--break NAME] [--seed S] [--rounds R] "
            "[--passes all|first] [--small] | --list\n",
            what);
    return 2;
}

static bool known_slot(const char *name)
{
    for (size_t i = 0; i < SLOTS; i++)
        if (strcmp(slots[i].name, name) == 0)
            return true;
    return false;
}

static bool parse_number(const char *text, uint64_t *number)
{
    char *end = NULL;
    *number = strtoull(text, &end, 10);
    return text[0] >= '0' && text[0] <= '9' && *end == '\0';
}

/* 0, or the exit status. */
static int parse(request *r, int argc, char **argv, const char *device)
{
    if (ari_device_choice_parse(&r->device, device) != AR_OK)
        return usage(ar_error_message());
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        uint64_t number = 0;
        if (strncmp(argv[i], "--", 2) != 0) {
            if (ari_device_choice_parse(&r->device, argv[i]) != AR_OK)
                return usage(ar_error_message());
            continue;
        }
        if (strcmp(argv[i], "--small") == 0) {
            r->small = true;
            continue;
        }
        if (strcmp(argv[i], "--slot") == 0 && known_slot(value))
            r->slot = value;
        else if (strcmp(argv[i], "--break") == 0 && known_slot(value))
            r->spoil = value;
        else if (strcmp(argv[i], "--seed") == 0 && parse_number(value, &number))
            r->seed = number;
        else if (strcmp(argv[i], "--rounds") == 0 && parse_number(value, &number) && number > 0 && number < 1000000)
            r->rounds = (int)number;
        else if (strcmp(argv[i], "--passes") == 0 && (strcmp(value, "all") == 0 || strcmp(value, "first") == 0))
            r->first_pass_only = value[0] == 'f';
        else
            return usage("not understood: an option, its value, or the name of a slot");
        i++;
    }
    return 0;
}

/* The settings of a pass: in which order the emulated device does what a GPU does at once, how digits are multiplied, and
 * below how many rows not by the library. A device reads them when it is made. */
typedef struct pass {
    const char *order, *path, *min_rows;
} pass;
#if defined(__SANITIZE_THREAD__) /* which looks at a block's threads, whatever the bits */
static const pass passes[] = {{"threads:4", "imma10", "17"}};
#elif defined(ARI_SANITIZED) /* where "threads" is "forward" */
static const pass passes[] = {{"forward", "imma16", "0"}, {"backward", "imma10", "17"}};
#else
static const pass passes[] = {{"forward", "imma16", "0"},     {"threads", "imma10", "17"},
                              {"backward", "imma10", "0"},    {"threads:32", "imma16", "17"},
                              {"threads:64", "imma10", "17"}, {"threads:256", "imma10", "17"}};
#endif
#define PASSES (sizeof passes / sizeof *passes)
enum { USUAL_PASSES = 3 }; /* a GPU's blocks, of 32 threads and more, are for ./test --extended */

static void set_pass(const pass *with)
{
    if (setenv("ANYRANK_EMULATED_ORDER", with->order, 1) != 0 || setenv(ARI_IMMA_VARIABLE, with->path, 1) != 0 ||
        setenv(ARI_IMMA_ROWS_VARIABLE, with->min_rows, 1) != 0)
        abort();
}

static void add_tally(pair_tally *to, const pair_tally *from)
{
    to->cases += from->cases;
    to->words += from->words;
    to->differing += from->differing;
    to->failures += from->failures;
    to->missing = to->missing || from->missing;
}

static uint64_t seed_of(uint64_t seed, size_t slot, int round)
{
    return seed * 0x9e3779b97f4a7c15u + slot * 0xbf58476d1ce4e5b9u + (uint64_t)round * 0x94d049bb133111ebu + 1;
}

/* One slot's cases; what they gave is added to *tally. */
static void run_slot(device_pair *p, size_t i, const request *r, bool spoil, pair_tally *tally)
{
    p->slot = slots[i].name;
    p->spoil = spoil;
    p->reported = 0;
    p->small = r->small;
    p->tally = (pair_tally){.cases = 0};
    for (p->round = 0; p->round < r->rounds && pair_goes_on(p); p->round++) {
        p->state = seed_of(r->seed, i, p->round);
        slots[i].cases(p);
    }
    add_tally(tally, &p->tally);
}

/* Whether every pointer of the table is among the slots. */
static bool table_is_covered(void)
{
    bool covered = true;
    for (size_t at = offsetof(ar_device_ops, queue_create); at < sizeof(ar_device_ops); at += sizeof(void *)) {
        bool found = false;
        for (size_t i = 0; i < SLOTS; i++)
            found = found || slots[i].offset == at;
        if (!found)
            printf("the slot %zu bytes into ar_device_ops has no cases\n", at);
        covered = covered && found;
    }
    return covered;
}

/* One bit of the other device's output is flipped in the cases of a slot: true if they say so. */
static bool sees_a_broken_bit(device_pair *p, size_t i, const request *r)
{
    const request once = {.seed = r->seed, .rounds = 1, .small = r->small};
    pair_tally tally = {.cases = 0};
    run_slot(p, i, &once, true, &tally);
    if (tally.differing == 0 && !tally.missing)
        printf("%s: a flipped bit of the other device's output was not seen\n", slots[i].name);
    return tally.differing > 0;
}

typedef struct sums {
    pair_tally slot[SLOTS];
    size_t broken, seen; /* slots spoiled on purpose */
} sums;

static ar_status run_pass(const request *r, const pass *with, bool last, sums *all)
{
    device_pair p;
    const ar_device_choice cpu = {AR_DEVICE_CPU, 0};
    set_pass(with);
    AR_TRY(pair_open(&p, &cpu, &r->device, 2));
    for (size_t i = 0; i < SLOTS; i++) {
        if (r->slot && strcmp(r->slot, slots[i].name) != 0)
            continue;
        const bool spoil = r->spoil && strcmp(r->spoil, slots[i].name) == 0;
        run_slot(&p, i, r, spoil, &all->slot[i]);
        fflush(stdout);
        if (!last || r->spoil || small_only() || all->slot[i].missing)
            continue; /* a sanitizer's run is not for what is compared */
        all->broken++;
        all->seen += sees_a_broken_bit(&p, i, r);
    }
    pair_close(&p);
    return AR_OK;
}

static const char *verdict(const pair_tally *t)
{
    return t->missing ? "missing" : t->cases == 0 ? "NO CASE" : t->differing + t->failures > 0 ? "DIFFERS" : "ok";
}

/* The table and the closing line. True if all is well. */
static bool print_summary(const request *r, const sums *all, bool covered)
{
    pair_tally total = {.cases = 0};
    size_t count = 0, missing = 0, without = 0;
    printf("%-18s %8s %12s %10s  %s\n", "slot", "cases", "words", "differing", "");
    for (size_t i = 0; i < SLOTS; i++) {
        const pair_tally *t = &all->slot[i];
        if (r->slot && strcmp(r->slot, slots[i].name) != 0)
            continue;
        printf("%-18s %8" PRIu64 " %12" PRIu64 " %10" PRIu64 "  %s%s\n", slots[i].name, t->cases, t->words,
               t->differing, verdict(t), strcmp(slots[i].name, "gemm_f32") == 0 ? " (within a bound)" : "");
        add_tally(&total, t);
        missing += t->missing;
        without += t->cases == 0;
        count++;
    }
    printf("cpu and %s: %zu slots, %" PRIu64 " cases, %" PRIu64 " words compared, %" PRIu64 " differ",
           ari_device_kind_name(r->device.kind), count, total.cases, total.words, total.differing);
    if (total.failures > 0)
        printf(", %" PRIu64 " failures", total.failures);
    if (missing + without > 0)
        printf(", %zu missing", missing + without);
    if (all->broken > 0)
        printf("; %zu of %zu slots broken on purpose were caught", all->seen, all->broken);
    printf("\n");
    char refused[600];
    if (ari_gpu_refused_products(refused, sizeof refused) > 0)
        printf("int8 products that the library refused, done by a kernel: %s\n", refused);
    return covered && total.differing + total.failures + missing + without == 0 && all->seen == all->broken;
}

int conformance_run(int argc, char **argv, const char *device)
{
    static sums all;
    request r = {.seed = 1, .rounds = 1, .small = small_only()};
    if (argc == 2 && strcmp(argv[1], "--list") == 0) {
        for (size_t i = 0; i < SLOTS; i++)
            puts(slots[i].name);
        return 0;
    }
    const int bad = parse(&r, argc, argv, device);
    if (bad != 0)
        return bad;
    ari_cpu_select_kernels();
    const size_t passes_here = by_scale(1, 1, 0) && PASSES > USUAL_PASSES ? USUAL_PASSES : PASSES;
    const size_t count = r.first_pass_only ? 1 : passes_here;
    /* The other orders show what depends on the order, which needs no large shapes. */
    const bool small_later = r.small || by_scale(true, true, false);
    for (size_t i = 0; i < count; i++, r.small = small_later)
        if (run_pass(&r, &passes[i], i + 1 == count, &all) != AR_OK) {
            printf("no device %s: %s\n", ari_device_kind_name(r.device.kind), ar_error_message());
            return EXIT_SKIPPED;
        }
    return print_summary(&r, &all, table_is_covered()) ? 0 : 1;
}
