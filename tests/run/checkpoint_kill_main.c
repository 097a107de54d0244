/* SPDX-License-Identifier: Apache-2.0 */
/* Saves that do not come to their end: on a full disk, and in a process that is killed at any moment. What was there
 * before is there afterwards, whole, and nothing else is left. Argument: [number of kills]. */
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

#include "anyrank/checkpoint.h"
#include "anyrank/train.h"
#include "ref/core/clock.h"
#include "run/small_run.h"
#include "support/small.h"

static int failures;

static void expect(bool holds, const char *what)
{
    if (holds)
        return;
    fprintf(stderr, "%s (last error: %s)\n", what, ar_error_message());
    failures++;
}

static ar_checkpoint_writer *writer_of(const char *folder, size_t keep)
{
    const ar_checkpoint_options o = {.folder = folder, .max_checkpoints = keep};
    ar_checkpoint_writer *w = NULL;
    if (ar_checkpoint_writer_create(&w, &o) != AR_OK) {
        expect(false, "no writer");
        exit(1);
    }
    return w;
}

/* The step of the newest checkpoint; it must be whole. */
static uint64_t newest(const char *folder)
{
    OWNED(ar_checkpoint_close) ar_checkpoint *c = NULL;
    if (ar_checkpoint_open(&c, folder) != AR_OK) {
        expect(false, "no readable checkpoint");
        return 0;
    }
    const uint64_t step = ar_checkpoint_state_of(c)->step;
    return step;
}

static void limit_files(rlim_t bytes)
{
    struct rlimit limit;
    getrlimit(RLIMIT_FSIZE, &limit);
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
}

/* A limit on the size of a file is a disk that is full after so many bytes: each of the files is the one that fails. */
static void fill_the_disk(const char *folder)
{
    static const rlim_t sizes[] = {100, 5000, 40000, 100000, 200000};
    char before[300], after[300];
    small_run r = small_run_of(TINY_TIED);
    r.run.parallel = (ar_parallel){.dp = 2, .tp = 2, .zero = 1};
    r.last = 1;
    r.writer = writer_of(folder, 0);
    expect(small_run_do(&r) == AR_OK, "the first checkpoint was not written");
    names_in(before, sizeof before, folder);
    signal(SIGXFSZ, SIG_IGN);
    int failed = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        r.last = 2;
        r.saved = AR_OK;
        limit_files(sizes[i]);
        const ar_status st = small_run_do(&r);
        limit_files(RLIM_INFINITY);
        failed += st == AR_ERR_IO;
        expect(st == AR_OK || (st == AR_ERR_IO && strstr(ar_error_message(), "cannot write") != NULL),
               "a full disk is another error");
        expect(r.saved == st, "the ranks were told differently");
        if (st != AR_OK)
            expect(strcmp(names_in(after, sizeof after, folder), before) == 0, "a failed save left something");
        expect(newest(folder) == (st == AR_OK ? 2 : 1), "another checkpoint than the last whole one");
    }
    expect(failed >= 3, "the disk was never full");
    r.last = 3;
    expect(small_run_do(&r) == AR_OK && newest(folder) == 3, "the writer does not go on after a full disk");
    ar_checkpoint_writer_destroy(r.writer);
}

/* Saves until it is killed: step 1 again and again, which replaces what `latest` names, then steps 1 to 5, of which
 * every save also removes an older one. */
static void save_for_ever(const char *folder)
{
    for (int i = 0;; i++) {
        small_run r = small_run_of(TINY_TIED);
        r.every_step = true;
        r.last = i % 4 == 3 ? 5 : 1;
        r.writer = writer_of(folder, 2);
        if (small_run_do(&r) != AR_OK)
            _exit(1);
        ar_checkpoint_writer_destroy(r.writer);
    }
}

/* How long the five steps take, on this machine and under this sanitizer. */
static uint64_t round_ns(const char *folder)
{
    const uint64_t start = ari_now_ns();
    small_run r = small_run_of(TINY_TIED);
    r.every_step = true;
    r.last = 5;
    r.writer = writer_of(folder, 2);
    expect(small_run_do(&r) == AR_OK, "the first checkpoints were not written");
    ar_checkpoint_writer_destroy(r.writer);
    return ari_now_ns() - start;
}

static void wait_ns(uint64_t ns)
{
    const struct timespec t = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
    nanosleep(&t, NULL);
}

/* Kills a process that saves, a little later each time. */
static void kill_in_the_middle(const char *folder, int kills)
{
    const uint64_t whole = round_ns(folder);
    int half_written = 0;
    for (int i = 0; i < kills; i++) {
        char names[300];
        int status = 0;
        fflush(NULL);
        const pid_t pid = fork();
        if (pid == 0)
            save_for_ever(folder);
        wait_ns(2 * whole * (uint64_t)(i + 1) / (uint64_t)kills);
        kill(pid, SIGKILL);
        expect(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status), "the process ended before it was killed");
        expect(newest(folder) > 0, "a kill cost the last checkpoint");
        half_written += strstr(names_in(names, sizeof names, folder), ".anyrank") != NULL;
    }
    printf("%d kills, %d in the middle of a checkpoint\n", kills, half_written);
    expect(half_written > 0 || kills < 100, "no kill hit a save");
    char names[300];
    ar_checkpoint_writer_destroy(writer_of(folder, 2));
    expect(strstr(names_in(names, sizeof names, folder), ".anyrank") == NULL,
           "a new writer left what was half written");
    expect(newest(folder) > 0, "a new writer cost the last checkpoint");
}

int main(int argc, char **argv)
{
    char memory[64], disk[] = "/tmp/anyrank-full-XXXXXX";
    if (!make_folder_in_memory(memory) || !mkdtemp(disk))
        return 1;
    kill_in_the_middle(memory, argc > 1                          ? atoi(argv[1])
                               : small_only()                    ? 10
                               : getenv("ANYRANK_TEST_EXTENDED") ? 400
                                                                 : 30);
    remove_all(memory);
    fill_the_disk(disk);
    remove_all(disk);
    return failures ? 1 : 0;
}
