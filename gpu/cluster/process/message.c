/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "gpu/cluster/process/server.h"

/* A message that claims to be longer is not ours. */
#define LONGEST_MESSAGE ((uint64_t)1 << 40)
enum { MAGIC = 0x616e7972 };

ari_hello ari_hello_of(const ari_store_options *o)
{
    ari_hello h = {.rank = (uint32_t)o->rank, .size = (uint32_t)o->size, .job = o->job};
    char host[64] = "";
    if (gethostname(host, sizeof host - 1) != 0 || !host[0])
        snprintf(host, sizeof host, "an unknown host");
    snprintf(h.name, sizeof h.name, "process %ld on %s", (long)getpid(), host);
    return h;
}

ari_message_head ari_message_head_of(ari_message kind, size_t bytes)
{
    return (ari_message_head){.magic = MAGIC, .kind = (uint32_t)kind, .bytes = bytes};
}

ari_net_end ari_message_write(int fd, ari_message kind, const void *a, size_t a_bytes, const void *b, size_t b_bytes,
                              const ari_net_limit *l)
{
    const ari_message_head head = ari_message_head_of(kind, a_bytes + b_bytes);
    ari_net_end end = ari_net_write(fd, &head, sizeof head, l);
    if (end == ARI_NET_OK)
        end = ari_net_write(fd, a, a_bytes, l);
    if (end == ARI_NET_OK)
        end = ari_net_write(fd, b, b_bytes, l);
    return end;
}

ari_net_end ari_message_read(int fd, ari_message_head *head, char **gives, const ari_net_limit *l)
{
    *gives = NULL;
    const ari_net_end end = ari_net_read(fd, head, sizeof *head, l);
    if (end != ARI_NET_OK)
        return end;
    const bool fits = head->magic == MAGIC && head->bytes <= LONGEST_MESSAGE;
    char *bytes = fits ? malloc((size_t)head->bytes + 1) : NULL;
    if (!bytes) {
        errno = fits ? ENOMEM : EBADMSG;
        return ARI_NET_GONE;
    }
    bytes[head->bytes] = '\0';
    const ari_net_end rest = ari_net_read(fd, bytes, (size_t)head->bytes, l);
    if (rest == ARI_NET_OK)
        *gives = bytes;
    else
        free(bytes);
    return rest;
}
