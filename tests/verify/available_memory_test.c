/* SPDX-License-Identifier: Apache-2.0 */
/* How much memory a process may take, in made-up systems: folders with the files that Linux has. */
#include "ref/io/file.h"
#include "tests/support/folder.h"
#include "verify/plan/estimate.h"

TestSuite(available, .init = folder_begin, .fini = folder_end);

/* Writes a file below the folder, and the folders on the way. */
static void put(const char *path, const char *text)
{
    char full[512];
    cr_assert(snprintf(full, sizeof full, "%s%s", folder, path) < (int)sizeof full);
    for (char *at = full + strlen(folder) + 1; (at = strchr(at, '/')) != NULL; at++) {
        *at = '\0';
        mkdir(full, 0700);
        *at = '/';
    }
    cr_assert_ok(ari_file_write(full, text, strlen(text)));
}

static const char meminfo[] = "MemTotal:        8000 kB\nMemFree:  10 kB\nMemAvailable:    5000 kB\n";
#define SYSTEM ((size_t)5000 * 1024)
#define SAME ((size_t)1) /* nothing is asked before the next file */

/* What is written, one after the other, and what is available then. */
typedef struct step {
    const char *path, *text;
    size_t bytes;
} step;

static void expect_steps(const step *s, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        put(s[i].path, s[i].text);
        const size_t found = s[i].bytes == SAME ? SAME : ari_available_memory(folder);
        cr_expect(found == s[i].bytes, "after %s: %zu, expected %zu", s[i].path, found, s[i].bytes);
    }
}
#define STEPS(...) expect_steps((const step[]){__VA_ARGS__}, sizeof((const step[]){__VA_ARGS__}) / sizeof(step))

Test(available, without_any_file_nothing_limits_and_then_the_system_does)
{
    cr_expect_eq(ari_available_memory(folder), SIZE_MAX);
    STEPS({"/proc/meminfo", "MemTotal: 8000 kB\n", SIZE_MAX}, {"/proc/meminfo", meminfo, SYSTEM},
          {"/proc/self/cgroup", "0::/\n", SYSTEM}, {"/proc/self/cgroup", "nonsense\n:\n::\n\n", SYSTEM});
}

#define JOB "/sys/fs/cgroup/job/memory."
Test(available, version_2_leaves_its_limit_less_what_is_in_use)
{
    STEPS({"/proc/meminfo", meminfo, SYSTEM}, {"/proc/self/cgroup", "0::/job\n", SYSTEM},
          {JOB "max", "1000000\n", SAME}, {JOB "current", "400000\n", 600000},
          {JOB "stat", "anon 300000\nactive_file 9\ninactive_file 50000\n", 650000},
          {JOB "stat", "anon 300000\ninactive_file 99999999\n", 1000000}, {JOB "stat", "", SAME},
          {JOB "current", "1000001\n", 0}, {JOB "max", "max\n", SYSTEM});
}

/* At last that of a container's own. */
Test(available, a_group_above_may_be_the_tighter_one)
{
    STEPS({"/proc/meminfo", meminfo, SYSTEM}, {"/proc/self/cgroup", "0::/outer/inner/job\n", SYSTEM},
          {"/sys/fs/cgroup/outer/inner/job/memory.max", "3000000\n", SAME},
          {"/sys/fs/cgroup/outer/inner/job/memory.current", "100000\n", 2900000},
          {"/sys/fs/cgroup/outer/memory.max", "2000000\n", SAME},
          {"/sys/fs/cgroup/outer/memory.current", "500000\n", 1500000},
          {"/sys/fs/cgroup/outer/inner/memory.max", "max\n", 1500000}, {"/sys/fs/cgroup/memory.max", "1900000\n", SAME},
          {"/sys/fs/cgroup/memory.current", "1800000\n", 100000});
}

/* What is outside the mount is not read. */
Test(available, a_group_seen_from_another_namespace_is_the_mount)
{
    STEPS({"/proc/meminfo", meminfo, SYSTEM}, {"/proc/self/cgroup", "0::/../../elsewhere\n", SYSTEM},
          {"/elsewhere/memory.max", "1\n", SYSTEM}, {"/sys/fs/cgroup/memory.max", "70000\n", 70000});
}

/* "hugememory" is no controller of that name; the first limit is none, as version 1 says it. */
Test(available, version_1_and_both_versions_together)
{
    STEPS({"/proc/meminfo", meminfo, SYSTEM},
          {"/proc/self/cgroup", "9:name=systemd:/\n5:cpu,memory:/host/job\n3:hugememory:/other\n0::/\n", SYSTEM},
          {"/sys/fs/cgroup/memory/other/memory.limit_in_bytes", "5\n", SYSTEM},
          {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n", SYSTEM},
          {"/sys/fs/cgroup/memory/memory.usage_in_bytes", "123\n", SYSTEM},
          {"/sys/fs/cgroup/memory/host/memory.limit_in_bytes", "800000\n", SAME},
          {"/sys/fs/cgroup/memory/host/memory.usage_in_bytes", "500000\n", SAME},
          {"/sys/fs/cgroup/memory/host/memory.stat", "inactive_file 1\ntotal_inactive_file 100000\n", 400000},
          {"/sys/fs/cgroup/unified/memory.max", "300000\n", 300000});
}

Test(available, a_limit_on_address_space_leaves_what_is_not_mapped)
{
    static const char head[] = "Limit                     Soft Limit           Hard Limit           Units     \n";
    char text[256];
    put("/proc/meminfo", meminfo);
    snprintf(text, sizeof text, "%sMax address space         unlimited            unlimited            bytes\n", head);
    put("/proc/self/limits", text);
    put("/proc/self/status", "Name:\tx\nVmPeak:\t    9000 kB\nVmSize:\t    1000 kB\n");
    cr_expect_eq(ari_available_space(folder), SIZE_MAX);
    snprintf(text, sizeof text, "%sMax address space         2048000              unlimited            bytes\n", head);
    put("/proc/self/limits", text);
    cr_expect_eq(ari_available_space(folder), 2048000 - 1000 * 1024);
    cr_expect_eq(ari_available_memory(folder), SYSTEM, "which holds fewer bytes than it maps");
    put("/proc/self/status", "VmSize:\t 3000 kB\n");
    cr_expect_eq(ari_available_space(folder), 0);
}

/* The machine that runs this has some, and no more than it says itself. */
Test(available, in_earnest)
{
    cr_expect_gt(ari_available_memory(""), 0);
}
