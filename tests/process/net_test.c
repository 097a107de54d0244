/* SPDX-License-Identifier: Apache-2.0 */
#include <unistd.h>

#include "gpu/cluster/process/net.h"
#include "ref/core/clock.h"
#include "tests/support/test.h"

Test(net, of_several_hosts_the_one_that_listens_is_found)
{
    int listener = -1, fd = -1, port = 0;
    cr_assert_ok(ari_net_listen(&listener, &port, "127.0.0.1", 0));
    const uint64_t deadline = ari_now_ns() + UINT64_C(600000000000);
    cr_expect_ok(ari_net_connect(&fd, "127.0.0.2,127.0.0.3,127.0.0.1", port, deadline));
    close(fd);
    close(listener);
}

Test(net, own_hosts_are_not_the_loopback)
{
    char hosts[512];
    ari_net_own_hosts(hosts, sizeof hosts);
    cr_expect(hosts[0]);
    cr_expect_null(strstr(hosts, "127.0.0.1"), "%s", hosts);
    cr_expect_null(strstr(hosts, "::1,"), "%s", hosts);
}
