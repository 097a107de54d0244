/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/stream.h"

#include <stddef.h>

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
