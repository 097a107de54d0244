/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "ref/comm/comm_impl.h"
#include "ref/core/size.h"
#include "ref/dry/dry.h"

static ar_status dry_run(ar_comm *c, const ari_call *call)
{
    (void)c, (void)call;
    return AR_OK;
}

static ar_status dry_split(ar_comm **gives, ar_comm *c, int color, int key)
{
    (void)gives, (void)c, (void)color, (void)key;
    return ar_error_set(AR_ERR_UNSUPPORTED, "a rank without peers does not know which of them give its color: join");
}

static ar_status dry_join(ar_comm **gives, ar_comm *c, int rank, int size)
{
    (void)c;
    return ari_dry_comm_create(gives, rank, size);
}

static ar_status dry_error(const ar_comm *c, const char **message)
{
    (void)c;
    *message = "";
    return AR_OK;
}

/* Nobody waits for this rank. */
static void dry_abort(ar_comm *c, ar_status st, const char *why)
{
    (void)c, (void)st, (void)why;
}

static void dry_destroy(ar_comm *c)
{
    free(c);
}

ar_status ari_dry_comm_create(ar_comm **gives, int rank, int size)
{
    static const ari_comm_ops ops = {.run = dry_run,
                                     .split = dry_split,
                                     .join = dry_join,
                                     .error = dry_error,
                                     .abort = dry_abort,
                                     .destroy = dry_destroy};
    AR_TRY(ari_alloc_zero((void **)gives, 1, sizeof **gives, "a communicator"));
    ari_comm_init(*gives, &ops, rank, size);
    return AR_OK;
}
