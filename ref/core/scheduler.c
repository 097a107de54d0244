/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/scheduler.h"

#include <stddef.h>

ar_status ari_scheduler_create(ari_scheduler **gives, uint64_t seed)
{
    (void)seed;
    *gives = NULL;
    return ar_error_set(AR_ERR_UNSUPPORTED, "deterministic schedules: not in this version");
}
void ari_scheduler_destroy(ari_scheduler *s)
{
    (void)s;
}
void ari_scheduler_choices(const ari_scheduler *s, uint64_t *choices, uint64_t *hash)
{
    (void)s;
    *choices = *hash = 0;
}
ar_status ari_turn_create(ari_turn **gives, ari_scheduler *s)
{
    (void)s;
    *gives = NULL;
    return AR_OK;
}
void ari_turn_destroy(ari_turn *t)
{
    (void)t;
}
void ari_turn_enter(ari_turn *t)
{
    (void)t;
}
void ari_turn_leave(ari_turn *t)
{
    (void)t;
}
void ari_turn_yield(ari_turn *t)
{
    (void)t;
}
void ari_turn_wait(ari_turn *t, const _Atomic uint64_t *word, uint64_t seen, const _Atomic uint64_t *other,
                   uint64_t other_seen, uint64_t deadline_ns)
{
    (void)t;
    (void)word;
    (void)seen;
    (void)other;
    (void)other_seen;
    (void)deadline_ns;
}
void ari_turn_join(ari_turn *t, const ari_turn *ends)
{
    (void)t;
    (void)ends;
}
uint64_t ari_turn_now_ns(const ari_turn *t)
{
    (void)t;
    return 0;
}
