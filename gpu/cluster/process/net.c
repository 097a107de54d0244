/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/cluster/process/net.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "ref/core/clock.h"
#include "ref/core/text.h"

/* Between two tries to reach a process that is not there yet. */
enum { RETRY_MS = 50, BACKLOG = 1024 };
/* Longest try of one address before the next one has its turn. */
#define TRY_NS UINT64_C(3000000000)
/* A host that loses its power sends nothing: after this silence, three probes of five seconds each. */
enum { KEEPALIVE_IDLE_S = 15, KEEPALIVE_EVERY_S = 5, KEEPALIVE_PROBES = 3 };

#if defined(__APPLE__)
#define TCP_KEEPIDLE TCP_KEEPALIVE
#endif

/* Options of which none is needed for what is sent to arrive. */
static void set_options(int fd)
{
    const int on = 1, idle = KEEPALIVE_IDLE_S, every = KEEPALIVE_EVERY_S, probes = KEEPALIVE_PROBES;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every, sizeof every);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

static bool set_nonblocking(int fd)
{
    const int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0 && fcntl(fd, F_SETFD, FD_CLOEXEC) == 0;
}

static bool is_loopback(const struct sockaddr *a)
{
    if (a->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)(const void *)a)->sin_addr.s_addr) >> 24 == 127;
    return a->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)a)->sin6_addr);
}

static void put_port(struct sockaddr *a, int port)
{
    if (a->sa_family == AF_INET6)
        ((struct sockaddr_in6 *)(void *)a)->sin6_port = htons((uint16_t)port);
    else
        ((struct sockaddr_in *)(void *)a)->sin_port = htons((uint16_t)port);
}

static int port_of(const struct sockaddr_storage *a)
{
    const bool six = a->ss_family == AF_INET6;
    return ntohs(six ? ((const struct sockaddr_in6 *)(const void *)a)->sin6_port
                     : ((const struct sockaddr_in *)(const void *)a)->sin_port);
}

/* --- listening ---------------------------------------------------------------------------------------------------- */

/* 0: `host` means no loopback address. */
static socklen_t loopback_of(struct sockaddr_storage *at, const char *host)
{
    struct addrinfo *found = NULL, hints = {.ai_socktype = SOCK_STREAM};
    socklen_t length = 0;
    memset(at, 0, sizeof *at);
    if (getaddrinfo(host, NULL, &hints, &found) == 0 && is_loopback(found->ai_addr)) {
        memcpy(at, found->ai_addr, found->ai_addrlen);
        length = found->ai_addrlen;
    }
    if (found)
        freeaddrinfo(found);
    return length;
}

bool ari_net_is_loopback(const char *host)
{
    struct sockaddr_storage at;
    return loopback_of(&at, host) > 0;
}

static int listen_at(struct sockaddr_storage *at, socklen_t length, int port)
{
    errno = EADDRNOTAVAIL;
    if (length == 0)
        return -1;
    const int on = 1, off = 0;
    const int fd = socket(at->ss_family, SOCK_STREAM, 0);
    if (fd < 0)
        return -1;
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (at->ss_family == AF_INET6)
        (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    put_port((struct sockaddr *)at, port);
    if (bind(fd, (struct sockaddr *)at, length) == 0 && listen(fd, BACKLOG) == 0 && set_nonblocking(fd))
        return fd;
    const int error = errno;
    close(fd);
    errno = error;
    return -1;
}

/* An address that is all zero takes all there are, one of IPv6 those of IPv4 too. */
static int listen_everywhere(struct sockaddr_storage *at, int port)
{
    memset(at, 0, sizeof *at);
    at->ss_family = AF_INET6;
    const int fd = listen_at(at, sizeof(struct sockaddr_in6), port);
    if (fd >= 0 || errno == EADDRINUSE || errno == EACCES)
        return fd;
    memset(at, 0, sizeof *at); /* a kernel without IPv6 */
    at->ss_family = AF_INET;
    return listen_at(at, sizeof(struct sockaddr_in), port);
}

ar_status ari_net_listen(int *gives, int *port, const char *host, int wanted)
{
    struct sockaddr_storage at;
    socklen_t length = sizeof at;
    const int fd = host ? listen_at(&at, loopback_of(&at, host), wanted) : listen_everywhere(&at, wanted);
    if (fd < 0)
        return ar_error_set(AR_ERR_IO,
                            "cannot listen on port %d: %s: process 0 listens there for the others; another port: "
                            "ANYRANK_PORT, the same for all processes%s",
                            wanted, strerror(errno),
                            errno == EADDRINUSE ? " (another job may have it, or another process has rank 0 as well)"
                                                : "");
    if (getsockname(fd, (struct sockaddr *)&at, &length) != 0) {
        close(fd);
        return ar_error_set(AR_ERR_IO, "cannot tell the port listened on: %s", strerror(errno));
    }
    *gives = fd;
    *port = port_of(&at);
    return AR_OK;
}

int ari_net_accept(int listener)
{
    const int fd = accept(listener, NULL, NULL);
    if (fd < 0)
        return -1;
    if (!set_nonblocking(fd)) {
        close(fd);
        return -1;
    }
    set_options(fd);
    return fd;
}

/* --- connecting --------------------------------------------------------------------------------------------------- */

static int poll_ms(uint64_t now_ns, uint64_t deadline_ns)
{
    if (now_ns >= deadline_ns)
        return 0;
    const uint64_t ms = (deadline_ns - now_ns) / 1000000 + 1;
    return ms > 1000000 ? 1000000 : (int)ms;
}

/* One address. -1: the reason is in errno. */
static int connect_to(const struct addrinfo *a, int port, uint64_t deadline_ns)
{
    const int fd = socket(a->ai_family, SOCK_STREAM, 0);
    if (fd < 0)
        return -1;
    struct sockaddr_storage to;
    memset(&to, 0, sizeof to);
    memcpy(&to, a->ai_addr, a->ai_addrlen);
    put_port((struct sockaddr *)&to, port);
    int error = 0;
    if (!set_nonblocking(fd))
        error = errno;
    else if (connect(fd, (struct sockaddr *)&to, a->ai_addrlen) != 0)
        error = errno;
    if (error == EINPROGRESS) {
        struct pollfd p = {.fd = fd, .events = POLLOUT};
        socklen_t length = sizeof error;
        const int ready = poll(&p, 1, poll_ms(ari_now_ns(), deadline_ns));
        if (ready <= 0 || getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0)
            error = ETIMEDOUT;
    }
    if (error == 0) {
        set_options(fd);
        return fd;
    }
    close(fd);
    errno = error;
    return -1;
}

static int connect_any(const struct addrinfo *list, int port, uint64_t deadline_ns)
{
    int error = ENOENT;
    for (const struct addrinfo *a = list; a; a = a->ai_next) {
        if (a->ai_family != AF_INET && a->ai_family != AF_INET6)
            continue;
        const int fd = connect_to(a, port, deadline_ns);
        if (fd >= 0)
            return fd;
        error = errno;
    }
    errno = error;
    return -1;
}

/* -1: why not; *known: it has an address, or may have one later, for name servers come up late too. */
static int connect_to_host(const char *host, int port, uint64_t deadline_ns, bool *known, char *why, size_t size)
{
    const uint64_t soon = ari_deadline_ns(ari_now_ns(), TRY_NS);
    struct addrinfo *list = NULL, hints = {.ai_socktype = SOCK_STREAM};
    const int rc = getaddrinfo(host, NULL, &hints, &list);
    *known = *known || rc == 0 || rc == EAI_AGAIN;
    if (rc != 0) {
        snprintf(why, size, "%s", gai_strerror(rc));
        return -1;
    }
    const int fd = connect_any(list, port, soon < deadline_ns ? soon : deadline_ns);
    snprintf(why, size, "%s", strerror(errno));
    freeaddrinfo(list);
    return fd;
}

ar_status ari_net_connect(int *gives, const char *hosts, int port, uint64_t deadline_ns)
{
    const uint64_t start = ari_now_ns();
    char host[256], why[160] = "";
    for (;;) {
        bool known = false;
        for (const char *at = hosts; *at; at += strcspn(at, ","), at += *at == ',') {
            snprintf(host, sizeof host, "%.*s", (int)strcspn(at, ","), at);
            *gives = connect_to_host(host, port, deadline_ns, &known, why, sizeof why);
            if (*gives >= 0)
                return AR_OK;
        }
        const uint64_t now = ari_now_ns();
        if (!known)
            return ar_error_set(AR_ERR_IO, "MASTER_ADDR '%.128s': %s", hosts, why);
        if (now >= deadline_ns)
            return ar_error_set(AR_ERR_TIMEOUT, "process 0 did not answer at %.128s, port %d, for %.1f s: %s", hosts,
                                port, (double)(now - start) * 1e-9, why);
        (void)poll(NULL, 0, RETRY_MS);
    }
}

static bool reaches_others(const struct ifaddrs *i)
{
    const struct sockaddr *a = i->ifa_addr;
    if (!a || !(i->ifa_flags & IFF_UP) || is_loopback(a))
        return false;
    return a->sa_family == AF_INET ||
           (a->sa_family == AF_INET6 &&
            !IN6_IS_ADDR_LINKLOCAL(&((const struct sockaddr_in6 *)(const void *)a)->sin6_addr));
}

void ari_net_own_hosts(char *hosts, size_t size)
{
    struct ifaddrs *list = NULL;
    ari_text to = ari_plain_text_in(hosts, size);
    char host[256] = "";
    if (gethostname(host, sizeof host - 1) == 0)
        ari_say(&to, "%s", host);
    for (const struct ifaddrs *i = getifaddrs(&list) == 0 ? list : NULL; i; i = i->ifa_next) {
        if (!reaches_others(i))
            continue;
        const socklen_t length =
            i->ifa_addr->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
        if (getnameinfo(i->ifa_addr, length, host, sizeof host, NULL, 0, NI_NUMERICHOST) == 0)
            ari_say(&to, "%s%s", to.used > 0 ? "," : "", host);
    }
    if (list)
        freeifaddrs(list);
}

ar_status ari_net_pair(int fds[2])
{
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, fds) != 0)
        return ar_error_set(AR_ERR_IO, "no pair of sockets: %s", strerror(errno));
    if (set_nonblocking(fds[0]) && set_nonblocking(fds[1]))
        return AR_OK;
    const ar_status st = ar_error_set(AR_ERR_IO, "no pair of sockets: %s", strerror(errno));
    for (int i = 0; i < 2; i++) {
        close(fds[i]);
        fds[i] = -1;
    }
    return st;
}

/* --- bytes -------------------------------------------------------------------------------------------------------- */

static ari_net_end await(int fd, short events, const ari_net_limit *l)
{
    struct pollfd p[2] = {{.fd = fd, .events = events}, {.fd = l->wake_fd, .events = POLLIN}};
    const uint64_t idle = ari_deadline_ns(ari_now_ns(), l->idle_ns);
    const uint64_t deadline = l->deadline_ns > 0 && l->deadline_ns < idle ? l->deadline_ns : idle;
    for (;;) {
        const int ready = poll(p, l->wake_fd >= 0 ? 2 : 1, poll_ms(ari_now_ns(), deadline));
        if (ready > 0 && p[0].revents) /* first: what has come counts, whatever else happened */
            return ARI_NET_OK;
        if (ready > 0)
            return ARI_NET_WOKEN;
        if (ready < 0 && errno != EINTR)
            return ARI_NET_GONE;
        if (ari_now_ns() >= deadline)
            return ARI_NET_TIMEOUT;
    }
}

static bool may_try_again(ssize_t n)
{
    return n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
}

/* events: POLLIN reads, POLLOUT writes. */
static ari_net_end transfer(int fd, char *at, size_t n, short events, const ari_net_limit *l)
{
    for (size_t done = 0; done < n;) {
        const ssize_t moved =
            events == POLLIN ? recv(fd, at + done, n - done, 0) : send(fd, at + done, n - done, MSG_NOSIGNAL);
        if (moved > 0) {
            done += (size_t)moved;
        } else if (may_try_again(moved)) {
            const ari_net_end end = await(fd, events, l);
            if (end != ARI_NET_OK)
                return end;
        } else {
            errno = moved == 0 ? 0 : errno;
            return ARI_NET_GONE;
        }
    }
    return ARI_NET_OK;
}

ari_net_end ari_net_read(int fd, void *to, size_t n, const ari_net_limit *l)
{
    return transfer(fd, to, n, POLLIN, l);
}

ari_net_end ari_net_write(int fd, const void *from, size_t n, const ari_net_limit *l)
{
    return transfer(fd, (char *)(uintptr_t)from, n, POLLOUT, l);
}

void ari_net_close(int fd, uint64_t deadline_ns)
{
    char rest[4096];
    if (fd < 0)
        return;
    /* Closed with something unread, a connection is reset, and what was written last is lost. */
    if (shutdown(fd, SHUT_WR) == 0) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        while (poll(&p, 1, poll_ms(ari_now_ns(), deadline_ns)) > 0 && recv(fd, rest, sizeof rest, 0) > 0) {
        }
    }
    close(fd);
}
