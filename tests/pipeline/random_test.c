/* SPDX-License-Identifier: Apache-2.0 */
/* Random schedules, legal ones and ones with a change in one place, against rules of the tests' own: what they let pass
 * is taken, and nothing else. */
#include "ref/core/scheduler.h"
#include "ref/pipeline/schedule_private.h"
#include "tests/support/test.h"

enum { RANKS = 4, PARTS = 2, MICRO = 4, STAGES = RANKS * PARTS, MOST = PARTS * MICRO * 3 + 1, CASES = 10000 };

typedef struct lists {
    ar_pipeline_shape shape;
    ar_pp_operation of[RANKS][MOST];
    size_t count[RANKS];
} lists;

static size_t below(uint64_t *seed, size_t n)
{
    return (size_t)(ari_splitmix(seed) % n);
}

/* What has been done: of each stage and micro-batch, how often each kind. */
typedef struct done {
    int of[STAGES][MICRO][AR_PP_KINDS];
} done;

static bool went_back(const done *d, int stage, int micro)
{
    return d->of[stage][micro][AR_PP_BACKWARD] || d->of[stage][micro][AR_PP_BACKWARD_INPUT];
}

/* Whether an operation can be done now: data comes from the stage before, gradients from the one after. */
static bool can(const done *d, const ar_pipeline_shape *s, const ar_pp_operation *o)
{
    const int *own = d->of[o->stage][o->micro];
    switch (o->kind) {
    case AR_PP_FORWARD:
        return o->stage == 0 || d->of[o->stage - 1][o->micro][AR_PP_FORWARD];
    case AR_PP_BACKWARD:
    case AR_PP_BACKWARD_INPUT:
        return own[AR_PP_FORWARD] && (o->stage + 1 == s->stages || went_back(d, o->stage + 1, o->micro));
    default:
        return own[AR_PP_BACKWARD_INPUT];
    }
}

/* Whether all ranks come to their ends, with every operation once. */
static bool is_legal(const lists *l)
{
    done d;
    size_t at[RANKS] = {0};
    memset(&d, 0, sizeof d);
    for (bool moved = true; moved;) {
        moved = false;
        for (int r = 0; r < l->shape.ranks; r++) {
            const ar_pp_operation *o = &l->of[r][at[r]];
            if (at[r] == l->count[r] || o->stage % l->shape.ranks != r || !can(&d, &l->shape, o))
                continue;
            d.of[o->stage][o->micro][o->kind]++;
            at[r]++;
            moved = true;
        }
    }
    for (int r = 0; r < l->shape.ranks; r++)
        if (at[r] < l->count[r])
            return false;
    for (int s = 0; s < l->shape.stages; s++)
        for (int m = 0; m < l->shape.micro_batches; m++) {
            const int *n = d.of[s][m], whole = n[AR_PP_BACKWARD], input = n[AR_PP_BACKWARD_INPUT],
                      weight = n[AR_PP_BACKWARD_WEIGHT];
            if (n[AR_PP_FORWARD] != 1 ||
                !((whole == 1 && input + weight == 0) || (whole == 0 && input == 1 && weight == 1)))
                return false;
        }
    return true;
}

static bool is_wanted(const done *d, const ar_pp_operation *o, bool parted)
{
    const int *n = d->of[o->stage][o->micro];
    return !n[o->kind] && (o->kind == AR_PP_FORWARD || parted == (o->kind != AR_PP_BACKWARD));
}

/* Ranks do at random what they can do. */
static void draw(lists *l, uint64_t *seed)
{
    done d;
    const int ranks = 1 + (int)below(seed, RANKS), parts = 1 + (int)below(seed, PARTS),
              micro = 1 + (int)below(seed, MICRO);
    const uint64_t parted = ari_splitmix(seed); /* bit: the backward pass of that micro-batch is I and W */
    memset(&d, 0, sizeof d);
    *l = (lists){.shape = {ranks, ranks * parts, micro}};
    for (int left = 1; left > 0;) {
        ar_pp_operation ready[STAGES * MICRO * 4];
        left = 0;
        for (int s = 0; s < l->shape.stages; s++)
            for (int m = 0; m < micro; m++)
                for (int k = AR_PP_FORWARD; k <= AR_PP_BACKWARD_WEIGHT; k++) {
                    const ar_pp_operation o = {(ar_pp_kind)k, s, m};
                    if (is_wanted(&d, &o, parted >> (s * MICRO + m) & 1) && can(&d, &l->shape, &o))
                        ready[left++] = o;
                }
        if (left == 0)
            return;
        const ar_pp_operation o = ready[below(seed, (size_t)left)];
        const int r = o.stage % ranks;
        l->of[r][l->count[r]++] = o;
        d.of[o.stage][o.micro][o.kind]++;
    }
}

/* Two operations of a rank trade places, one becomes another, is there twice, or is not. */
static void change(lists *l, uint64_t *seed)
{
    const size_t r = below(seed, (size_t)l->shape.ranks), n = l->count[r], i = below(seed, n), k = below(seed, n);
    ar_pp_operation *at = l->of[r], old = at[i];
    switch (below(seed, 6)) {
    case 0:
        at[i].kind = (ar_pp_kind)below(seed, AR_PP_BACKWARD_WEIGHT + 1);
        return;
    case 1:
        at[i].stage = (int)below(seed, (size_t)l->shape.stages);
        return;
    case 2:
        at[l->count[r]++] = at[k];
        return;
    case 3:
        at[i] = at[--l->count[r]];
        return;
    default:
        at[i] = at[k];
        at[k] = old;
    }
}

static bool is_taken(const lists *l)
{
    const ar_pp_operation *of[RANKS];
    OWNED(ari_pipeline_schedule_destroy) ar_pipeline_schedule *s = NULL;
    for (int r = 0; r < l->shape.ranks; r++)
        of[r] = l->of[r];
    const ar_status st = ari_pipeline_schedule_from_lists(&s, l->shape, of, l->count);
    cr_assert(st == AR_OK || (st == AR_ERR_FORMAT && ar_error_message()[0] != '\0'), "%s", ar_error_message());
    return st == AR_OK;
}

Test(pipeline_random, exactly_the_legal_schedules_are_taken)
{
    size_t legal = 0;
    for (uint64_t seed = 1; seed <= CASES; seed++) {
        uint64_t state = seed;
        lists l;
        draw(&l, &state);
        cr_assert(is_legal(&l) && is_taken(&l), "seed %zu: %s", (size_t)seed, ar_error_message());
        change(&l, &state);
        const bool expected = is_legal(&l);
        legal += expected;
        cr_assert_eq(is_taken(&l), expected, "seed %zu, after a change: %s", (size_t)seed,
                     expected ? ar_error_message() : "is taken");
    }
    cr_expect(legal > CASES / 10 && legal < CASES / 2, "%zu of %d changes stay legal", legal, CASES);
}
