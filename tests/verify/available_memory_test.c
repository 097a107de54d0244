/* SPDX-License-Identifier: Apache-2.0 */
/* How much memory a process may take, in made-up systems: folders with the files that Linux has. */
#include "planner/estimate.h"
#include "tests/support/test.h"

#include <ftw.h>
#include <sys/stat.h>

static char root[64];

static void make_root(void)
{
    snprintf(root, sizeof root, "/tmp/available-XXXXXX");
    cr_assert_not_null(mkdtemp(root));
}

static int remove_one(const char *path, const struct stat *s, int kind, struct FTW *at)
{
    (void)s, (void)kind, (void)at;
    return remove(path);
}

static void remove_root(void)
{
    nftw(root, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

TestSuite(available, .init = make_root, .fini = remove_root);

/* Writes root/path, and the folders on the way. */
static void put(const char *path, const char *text)
{
    char full[512];
    cr_assert(snprintf(full, sizeof full, "%s%s", root, path) < (int)sizeof full);
    for (char *at = full + strlen(root) + 1; (at = strchr(at, '/')) != NULL; at++) {
        *at = '\0';
        mkdir(full, 0700);
        *at = '/';
    }
    FILE *f = fopen(full, "w");
    cr_assert_not_null(f, "%s", full);
    fputs(text, f);
    fclose(f);
}

static const char meminfo[] = "MemTotal:        8000 kB\nMemFree:  10 kB\nMemAvailable:    5000 kB\n";
enum { SYSTEM = 5000 * 1024 };

static void expect(size_t bytes)
{
    const size_t found = ari_available_memory(root);
    cr_expect(found == bytes, "%zu, expected %zu", found, bytes);
}

Test(available, without_any_file_nothing_limits)
{
    expect(SIZE_MAX);
    put("/proc/meminfo", "MemTotal: 8000 kB\n");
    expect(SIZE_MAX);
}

Test(available, the_system_alone)
{
    put("/proc/meminfo", meminfo);
    expect(SYSTEM);
    put("/proc/self/cgroup", "0::/\n");
    expect(SYSTEM);
    put("/proc/self/cgroup", "nonsense\n:\n::\n\n");
    expect(SYSTEM);
}

Test(available, version_2_leaves_its_limit_less_what_is_in_use)
{
    put("/proc/meminfo", meminfo);
    put("/proc/self/cgroup", "0::/job\n");
    put("/sys/fs/cgroup/job/memory.max", "1000000\n");
    put("/sys/fs/cgroup/job/memory.current", "400000\n");
    expect(600000);
    put("/sys/fs/cgroup/job/memory.stat", "anon 300000\nactive_file 9\ninactive_file 50000\n");
    expect(650000);
    put("/sys/fs/cgroup/job/memory.stat", "anon 300000\ninactive_file 99999999\n");
    expect(1000000);
    put("/sys/fs/cgroup/job/memory.stat", "");
    put("/sys/fs/cgroup/job/memory.current", "1000001\n");
    expect(0);
    put("/sys/fs/cgroup/job/memory.max", "max\n");
    expect(SYSTEM);
}

Test(available, a_group_above_may_be_the_tighter_one)
{
    put("/proc/meminfo", meminfo);
    put("/proc/self/cgroup", "0::/outer/inner/job\n");
    put("/sys/fs/cgroup/outer/inner/job/memory.max", "3000000\n");
    put("/sys/fs/cgroup/outer/inner/job/memory.current", "100000\n");
    expect(2900000);
    put("/sys/fs/cgroup/outer/memory.max", "2000000\n");
    put("/sys/fs/cgroup/outer/memory.current", "500000\n");
    expect(1500000);
    put("/sys/fs/cgroup/outer/inner/memory.max", "max\n");
    put("/sys/fs/cgroup/memory.max", "1900000\n"); /* a container's own group */
    put("/sys/fs/cgroup/memory.current", "1800000\n");
    expect(100000);
}

Test(available, a_group_seen_from_another_namespace_is_the_mount)
{
    put("/proc/meminfo", meminfo);
    put("/proc/self/cgroup", "0::/../../elsewhere\n");
    put("/elsewhere/memory.max", "1\n"); /* outside the mount: not to be read */
    put("/sys/fs/cgroup/memory.max", "70000\n");
    expect(70000);
}

Test(available, version_1_and_both_versions_together)
{
    put("/proc/meminfo", meminfo);
    put("/proc/self/cgroup", "9:name=systemd:/\n5:cpu,memory:/host/job\n3:hugememory:/other\n0::/\n");
    put("/sys/fs/cgroup/memory/other/memory.limit_in_bytes", "5\n");             /* of no controller of that name */
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"); /* none, as version 1 says it */
    put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "123\n");
    expect(SYSTEM);
    put("/sys/fs/cgroup/memory/host/memory.limit_in_bytes", "800000\n");
    put("/sys/fs/cgroup/memory/host/memory.usage_in_bytes", "500000\n");
    put("/sys/fs/cgroup/memory/host/memory.stat", "inactive_file 1\ntotal_inactive_file 100000\n");
    expect(400000);
    put("/sys/fs/cgroup/unified/memory.max", "300000\n");
    expect(300000);
}

Test(available, a_limit_on_address_space_leaves_what_is_not_mapped)
{
    static const char head[] = "Limit                     Soft Limit           Hard Limit           Units     \n";
    char text[256];
    put("/proc/meminfo", meminfo);
    snprintf(text, sizeof text, "%sMax address space         unlimited            unlimited            bytes\n", head);
    put("/proc/self/limits", text);
    put("/proc/self/status", "Name:\tx\nVmPeak:\t    9000 kB\nVmSize:\t    1000 kB\n");
    cr_expect_eq(ari_available_space(root), SIZE_MAX);
    snprintf(text, sizeof text, "%sMax address space         2048000              unlimited            bytes\n", head);
    put("/proc/self/limits", text);
    cr_expect_eq(ari_available_space(root), 2048000 - 1000 * 1024);
    expect(SYSTEM); /* which holds fewer bytes than it maps */
    put("/proc/self/status", "VmSize:\t 3000 kB\n");
    cr_expect_eq(ari_available_space(root), 0);
}

/* The machine that runs this has some, and no more than it says itself. */
Test(available, in_earnest)
{
    const size_t here = ari_available_memory("");
    cr_expect(here > 0);
}
