/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/check/baseline_share.h"

#include <stdlib.h>

#include "ref/core/clock.h"
#include "ref/core/size.h"
#include "run/process_run.h"

/* The others' wait for a word of process 0 has a limit, and its work has none. */
#define WORD_NS UINT64_C(1000000000)
enum { AT_WORK = 1, AT_ITS_END = 2 };

/* --- process 0 ---------------------------------------------------------------------------------------------------- */

typedef struct telling {
    const ar_check_options *check;
    uint64_t last_ns;
    ar_status st; /* of telling */
} telling;

static void tell(telling *t, int32_t word)
{
    if (t->st == AR_OK)
        t->st = ar_process_broadcast(t->check->run.process, &word, sizeof word);
    t->last_ns = ari_now_ns();
}

static void progress(void *user, double fraction, const char *what)
{
    telling *t = user;
    if (ari_now_ns() - t->last_ns > WORD_NS)
        tell(t, AT_WORK);
    if (t->check->progress)
        t->check->progress(t->check->progress_user, fraction, what);
}

static ar_status run_and_tell(ari_reference *ref, float *loss, double *max_error, const ari_baseline_case *c)
{
    telling t = {.check = c->check, .last_ns = ari_now_ns()};
    ar_check_options options = *c->check;
    options.progress = progress;
    options.progress_user = &t;
    ari_baseline_case told = *c;
    told.check = &options;
    const ar_status st = ari_check_baseline(ref, loss, max_error, &told);
    if (t.st != AR_OK)
        return t.st;
    tell(&t, AT_ITS_END);
    return st != AR_OK ? st : t.st;
}

/* --- the others --------------------------------------------------------------------------------------------------- */

static ar_status hear(ar_process *p)
{
    int32_t word = AT_WORK;
    while (word == AT_WORK)
        AR_TRY(ar_process_broadcast(p, &word, sizeof word));
    return AR_OK;
}

/* One tensor: its facts, then its values, then what is allowed beside. */
static ar_status share_tensor(ar_process *p, ari_ref_tensor *t)
{
    const bool first = ar_process_rank(p) == 0;
    ari_ref_tensor facts = *t;
    bool beside = t->beside != NULL;
    AR_TRY(ar_process_broadcast(p, &facts, sizeof facts));
    AR_TRY(ar_process_broadcast(p, &beside, sizeof beside));
    if (!first) {
        *t = facts;
        t->values = t->beside = NULL;
        AR_TRY(ari_alloc((void **)&t->values, t->count, sizeof *t->values, t->name));
        if (beside)
            AR_TRY(ari_alloc((void **)&t->beside, t->count, sizeof *t->beside, t->name));
    }
    AR_TRY(ar_process_broadcast(p, t->values, t->count * sizeof *t->values));
    return beside ? ar_process_broadcast(p, t->beside, t->count * sizeof *t->beside) : AR_OK;
}

static ar_status share_reference(ar_process *p, ari_reference *ref)
{
    const bool first = ar_process_rank(p) == 0;
    size_t count = ref->count;
    AR_TRY(ar_process_broadcast(p, &count, sizeof count));
    AR_TRY(ar_process_broadcast(p, &ref->step, sizeof ref->step));
    if (!first) {
        AR_TRY(ari_alloc_zero((void **)&ref->tensor, count, sizeof *ref->tensor, "the baseline's tensors"));
        ref->capacity = count;
    }
    for (size_t i = 0; i < count; i++) {
        ref->count = first ? count : i + 1;
        AR_TRY(share_tensor(p, &ref->tensor[i]));
    }
    return first ? AR_OK : ari_reference_finish(ref);
}

ar_status ari_check_baseline_shared(ari_reference *ref, float *loss, double *max_error, const ari_baseline_case *c)
{
    ar_process *p = c->check->run.process;
    const bool first = ar_process_rank(p) == 0;
    AR_TRY(ari_process_agree(p, first ? run_and_tell(ref, loss, max_error, c) : hear(p)));
    const ar_status st = share_reference(p, ref);
    if (st == AR_ERR_MEMORY)
        return ari_process_give_up(p, st);
    AR_TRY(st);
    AR_TRY(ar_process_broadcast(p, loss, ari_run_steps(&c->check->run) * sizeof *loss));
    return ar_process_broadcast(p, max_error, sizeof *max_error);
}
