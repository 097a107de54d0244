/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>

#include "gpu/nccl/control_impl.h"

ari_net_end ari_word_write(int fd, ari_word word, const void *a, size_t a_bytes, const void *b, size_t b_bytes,
                           const ari_net_limit *l)
{
    const ari_word_head head = {.word = (uint32_t)word, .bytes = a_bytes + b_bytes};
    ari_net_end end = ari_net_write(fd, &head, sizeof head, l);
    if (end == ARI_NET_OK)
        end = ari_net_write(fd, a, a_bytes, l);
    if (end == ARI_NET_OK)
        end = ari_net_write(fd, b, b_bytes, l);
    return end;
}

ari_net_end ari_word_read(int fd, ari_word_head *head, char **gives, const ari_net_limit *l)
{
    *gives = NULL;
    const ari_net_end end = ari_net_read(fd, head, sizeof *head, l);
    if (end != ARI_NET_OK)
        return end;
    if (head->bytes > ARI_WORD_MOST) {
        errno = EBADMSG;
        return ARI_NET_GONE;
    }
    char *bytes = malloc((size_t)head->bytes + 1);
    if (!bytes) {
        errno = ENOMEM;
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
