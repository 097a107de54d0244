/* SPDX-License-Identifier: Apache-2.0 */
/* What a data-parallel object tells of itself. */
#include "ref/train/ddp.h"

const char *ar_ddp_name(const ar_ddp *d)
{
    return d->name;
}

ar_module *ar_ddp_module(const ar_ddp *d)
{
    return d->module;
}

ar_comm *ar_ddp_group(const ar_ddp *d)
{
    return d->ctx->dp;
}

size_t ar_ddp_params(const ar_ddp *d, ar_param **out, size_t cap)
{
    for (size_t i = 0; i < d->n && i < cap; i++)
        out[i] = d->params[i];
    return d->n;
}

ar_ddp_options ar_ddp_options_of(const ar_ddp *d)
{
    return d->options;
}

size_t ar_ddp_unused(const ar_ddp *d, const char **out, size_t cap)
{
    for (size_t i = 0; i < d->unused_count && i < cap; i++)
        out[i] = d->unused[i];
    return d->unused_count;
}

size_t ar_ddp_buckets(const ar_ddp *d)
{
    return d->count;
}

ar_bucket_info ar_ddp_bucket(const ar_ddp *d, size_t i)
{
    return d->buckets[i].info;
}

size_t ar_ddp_bytes(const ar_ddp *d)
{
    size_t bytes = 0;
    for (size_t i = 0; i < d->count; i++)
        bytes += d->buckets[i].info.storage_bytes;
    return bytes;
}
