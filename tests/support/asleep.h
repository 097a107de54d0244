/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <dirent.h>
#include <unistd.h>

#include "ref/core/clock.h"
#include "tests/support/test.h"

/* Whether the other threads of this process sleep, and how often they wake: what a wait costs, told without a clock
 * that a busy machine would turn. Known where the system keeps /proc/self/task. */

typedef struct thread_look {
    uint64_t threads, asleep, wakes; /* all but the caller's; how often they slept so far */
} thread_look;

static inline void look_at_thread(thread_look *look, const char *tid)
{
    static const char key[] = "\nvoluntary_ctxt_switches:";
    char path[300], text[4096] = "";
    snprintf(path, sizeof path, "/proc/self/task/%s/status", tid);
    FILE *f = fopen(path, "r");
    if (!f)
        return; /* it has ended meanwhile */
    text[fread(text, 1, sizeof text - 1, f)] = '\0';
    fclose(f);
    const char *state = strstr(text, "\nState:\t"), *wakes = strstr(text, key);
    if (!state || !wakes)
        return;
    look->threads++;
    look->asleep += state[strlen("\nState:\t")] == 'S';
    look->wakes += strtoull(wakes + strlen(key), NULL, 10);
}

/** False: the system does not tell. */
static inline bool look_at_others(thread_look *look)
{
    char own[32];
    snprintf(own, sizeof own, "%d", (int)gettid());
    *look = (thread_look){0};
    DIR *d = opendir("/proc/self/task");
    if (!d)
        return false;
    for (struct dirent *e; (e = readdir(d));) {
        if (e->d_name[0] != '.' && strcmp(e->d_name, own) != 0)
            look_at_thread(look, e->d_name);
    }
    closedir(d);
    return look->threads > 0;
}

/** Waits for the others to fall asleep, which they never do if they spin or yield, and counts how often they wake from
 *  then on: no more than twice a second each. A few may be awake at any moment. "" or what is wrong. */
static inline const char *others_stay_asleep(void)
{
    static char wrong[160];
    thread_look first, then;
    int looks = 0;
    do {
        usleep(1000);
        if (!look_at_others(&first))
            return "";
        if (++looks == 20000)
            return "they do not sleep";
    } while (4 * first.asleep < 3 * first.threads);
    const uint64_t start = ari_now_ns();
    usleep(200000);
    if (!look_at_others(&then))
        return "";
    const double seconds = (double)(ari_now_ns() - start) * 1e-9, most = (double)then.threads * (2 + 2 * seconds);
    const double wakes = (double)(then.wakes - first.wakes);
    snprintf(wrong, sizeof wrong, "%.0f wakes of %llu threads in %.2f s", wakes, (unsigned long long)then.threads,
             seconds);
    return wakes <= most ? "" : wrong;
}
