/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "anyrank/status.h"

/* Sockets between processes. Every wait has a limit, and ends where `wake_fd` (-1: none) can be read. */
typedef enum ari_net_end {
    ARI_NET_OK,
    ARI_NET_TIMEOUT, /* nothing moved for so long */
    ARI_NET_WOKEN,
    ARI_NET_GONE /* closed, or the network's own error, which is in errno; 0: closed */
} ari_net_end;

typedef struct ari_net_limit {
    uint64_t idle_ns; /* longest time without a byte */
    int wake_fd;
    uint64_t deadline_ns; /* of all bytes; 0: none */
} ari_net_limit;

/** True if no other machine can reach a listener at the address that `host` means. */
bool ari_net_is_loopback(const char *host);
/** Listens on port `wanted` of `host`, which is a loopback address; NULL: of all addresses, IPv6 and IPv4. 0: any port
 *  that is free. Gives the socket; close(). Errors: AR_ERR_IO, saying what to set. */
AR_NODISCARD ar_status ari_net_listen(int *gives, int *port, const char *host, int wanted);
/** The next connection, ready for use; -1: there is none now. */
int ari_net_accept(int listener);
/** Tries until the deadline: the other side may come later. host: a name or address, or several, "a,b", which are tried
 *  in turn. Gives; close(). Errors: AR_ERR_IO (no such name, the network), AR_ERR_TIMEOUT. */
AR_NODISCARD ar_status ari_net_connect(int *gives, const char *host, int port, uint64_t deadline_ns);
/** The names and addresses of this machine, the loopback's not among them, as ari_net_connect takes them. */
void ari_net_own_hosts(char *hosts, size_t size);
/** Two ends of a connection inside the process. Errors: AR_ERR_IO. */
AR_NODISCARD ar_status ari_net_pair(int fds[2]);

ari_net_end ari_net_read(int fd, void *to, size_t n, const ari_net_limit *l);
ari_net_end ari_net_write(int fd, const void *from, size_t n, const ari_net_limit *l);
/** Says that nothing more comes, and reads what is under way until the other end closes or the deadline: so what was
 *  written last arrives. fd < 0: nothing. */
void ari_net_close(int fd, uint64_t deadline_ns);
#define ARI_NET_LAST_NS UINT64_C(200000000)
