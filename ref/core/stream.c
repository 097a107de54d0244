/* SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "ref/core/queue_impl.h"
#include "ref/core/size.h"
#include "ref/core/status_private.h"

void ari_mark_destroy(ari_mark *m)
{
    if (m)
        m->ops->mark_destroy(m);
}

ar_status ari_stream_sync(ari_stream *s, uint64_t timeout_ns)
{
    ari_mark *end = NULL;
    AR_TRY(s->ops->mark(s, &end));
    const ar_status st = s->ops->await(end, timeout_ns);
    ari_mark_destroy(end);
    return st;
}

/* --- failures from outside ---------------------------------------------------------------------------------------- */

ari_outcome ari_outcome_of(ar_status st)
{
    ari_outcome o = {.status = st};
    snprintf(o.message, sizeof o.message, "%s", st == AR_OK ? "" : ar_error_message());
    return o;
}

ar_status ari_outcome_status(const ari_outcome *o)
{
    return o->status == AR_OK ? AR_OK : ar_error_set(o->status, "%s", o->message);
}

struct ari_failure {
    atomic_int refs;
    pthread_mutex_t lock;  /* taken by those who set the error */
    _Atomic(ar_status) st; /* stored after `message` */
    char *message;         /* NULL: memory was short */
};

ar_status ari_failure_create(ari_failure **out)
{
    ARI_OWNED ari_failure *f = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&f, 1, "a failure to come"));
    atomic_init(&f->refs, 1);
    atomic_init(&f->st, AR_OK);
    if (pthread_mutex_init(&f->lock, NULL) != 0)
        return ar_error_set(AR_ERR_MEMORY, "no lock for a failure to come");
    ARI_GIVE(out, f);
    return AR_OK;
}

ari_failure *ari_failure_keep(ari_failure *f)
{
    atomic_fetch_add(&f->refs, 1);
    return f;
}

void ari_failure_release(ari_failure *f)
{
    if (!f || atomic_fetch_sub(&f->refs, 1) != 1)
        return;
    pthread_mutex_destroy(&f->lock);
    free(f->message);
    free(f);
}

void ari_failure_set(ari_failure *f, ar_status st, const char *message)
{
    pthread_mutex_lock(&f->lock);
    if (atomic_load(&f->st) == AR_OK) {
        f->message = strdup(message);
        atomic_store(&f->st, st);
    }
    pthread_mutex_unlock(&f->lock);
}

ar_status ari_failure_get(const ari_failure *f, const char **message)
{
    const ar_status st = atomic_load(&f->st);
    if (st != AR_OK)
        *message = f->message ? f->message : ari_status_text(st);
    return st;
}
