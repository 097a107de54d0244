/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

#include "ref/core/os/os.h"
#include "ref/io/file.h"
#include "tests/support/folder.h"

#define CHUNK ((size_t)1 << 20)
#define CHUNKS 64

/* Stands before the C library's: true hides /proc from the writer, which then takes a file with a name. */
static bool proc_is_hidden;

int access(const char *path, int mode)
{
    if (proc_is_hidden && strncmp(path, "/proc/", 6) == 0) {
        errno = ENOENT;
        return -1;
    }
    return faccessat(AT_FDCWD, path, mode, 0);
}

TestSuite(file, .init = folder_begin, .fini = folder_end);

static void expect_files(size_t files, size_t temporary)
{
    size_t hidden = 0;
    const size_t n = count_files(&hidden);
    cr_expect_eq(n, files, "%zu entries, expected %zu", n, files);
    cr_expect_eq(hidden, temporary, "%zu temporary files, expected %zu", hidden, temporary);
}

static void expect_text(const char *path, const char *text)
{
    OWNED(free) unsigned char *bytes = NULL;
    size_t n = 0;
    cr_assert_ok(ari_file_read(&bytes, &n, path, CHUNK * CHUNKS));
    cr_expect(n == strlen(text) && memcmp(bytes, text, n) == 0, "%s", path);
}

static bool has_unnamed_files(void)
{
#if ARI_OS_LINUX
    const int fd = open(folder, O_WRONLY | O_TMPFILE | O_CLOEXEC, 0600);
    if (fd >= 0)
        close(fd);
    return fd >= 0;
#else
    return false;
#endif
}

/* Writes, says so once, and never commits. Exits with 1 where it cannot even begin. */
_Noreturn static void write_for_ever(const char *path, int ready)
{
    static const char chunk[CHUNK] = {1};
    ari_atomic_file *o = NULL;
    signal(SIGTERM, SIG_DFL);
    if (ari_atomic_file_create(&o, path) != AR_OK)
        _exit(1);
    for (int i = 0; i < CHUNKS; i++) {
        if (ari_atomic_file_write(o, chunk, CHUNK) != AR_OK || (i == 0 && write(ready, "r", 1) != 1))
            _exit(1);
    }
    for (;;)
        pause();
}

static void kill_a_writer(const char *path, int number)
{
    int ends[2];
    char byte = 0;
    cr_assert_eq(pipe(ends), 0);
    const pid_t child = fork();
    cr_assert_geq(child, 0);
    if (child == 0)
        write_for_ever(path, ends[1]);
    close(ends[1]);
    cr_assert_eq(read(ends[0], &byte, 1), 1);
    close(ends[0]);
    cr_assert_eq(kill(child, number), 0);
    int status = 0;
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFSIGNALED(status) && WTERMSIG(status) == number, "status %d", status);
}

Test(file, a_killed_writer_leaves_nothing_and_what_was_there)
{
    static const int numbers[] = {SIGTERM, SIGKILL};
    const char *path = in_folder("x");
    if (!has_unnamed_files())
        cr_skip("no unnamed files here");
    for (size_t i = 0; i < 2; i++) {
        kill_a_writer(path, numbers[i]);
        expect_files(0, 0);
    }
    cr_assert_ok(ari_file_write(path, "old", 3));
    kill_a_writer(path, SIGTERM);
    expect_files(1, 0);
    expect_text(path, "old");
}

/* Both ways of writing must look the same to who reads the folder before and after. */
static void new_and_old_files(size_t temporary)
{
    static const char *const texts[] = {"first", "second, over the first"};
    const char *path = in_folder("x");
    const mode_t before = umask(027);
    for (size_t i = 0; i < 2; i++) {
        ari_atomic_file *o = NULL;
        cr_assert_ok(ari_atomic_file_create(&o, path));
        cr_assert_ok(ari_atomic_file_write(o, texts[i], strlen(texts[i])));
        expect_files(i + temporary, temporary);
        cr_assert_ok(ari_atomic_file_commit(o));
        ari_atomic_file_discard(o);
        expect_files(1, 0);
        expect_text(path, texts[i]);
        struct stat info;
        cr_expect(stat(path, &info) == 0 && (info.st_mode & 0777) == 0640 && info.st_nlink == 1, "%o", info.st_mode);
    }
    umask(before);
    ari_atomic_file *o = NULL;
    cr_assert_ok(ari_atomic_file_create(&o, path));
    cr_assert_ok(ari_atomic_file_write(o, "no", 2));
    ari_atomic_file_discard(o);
    expect_files(1, 0);
    expect_text(path, texts[1]);
    unlink(path);
}

Test(file, unnamed_and_named_files_end_alike)
{
    new_and_old_files(has_unnamed_files() ? 0 : 1);
    proc_is_hidden = true;
    new_and_old_files(1);
}

/* A name without a folder is one in the current folder. */
Test(file, a_bare_name_is_written_here)
{
    cr_assert_eq(chdir(folder), 0);
    cr_expect_ok(ari_file_write("x", "here", 4));
    cr_expect_ok(ari_file_write("x", "again", 5));
    expect_files(1, 0);
    expect_text("x", "again");
    cr_assert_eq(symlink("nowhere", "dangling"), 0);
    cr_expect_eq(ari_file_write("dangling", "file", 4), AR_ERR_IO);
    struct stat info;
    cr_expect(lstat("dangling", &info) == 0 && S_ISLNK(info.st_mode)); /* the link is somebody's */
}

/* A crashed process of the same number may have left the first names. */
Test(file, temporary_names_that_are_taken_are_passed_over)
{
    char taken[2][128];
    const char *path = in_folder("x");
    for (int i = 0; i < 2; i++) {
        snprintf(taken[i], sizeof taken[i], "%s/.anyrank-%ld-%d.tmp", folder, (long)getpid(), i);
        const int fd = open(taken[i], O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        cr_assert_geq(fd, 0);
        close(fd);
    }
    for (int hidden = 0; hidden < 2; hidden++) {
        proc_is_hidden = hidden == 1;
        for (int i = 0; i < 2; i++)
            cr_expect_ok(ari_file_write(path, "text", 4));
        expect_files(3, 2);
        expect_text(path, "text");
        unlink(path);
    }
}

Test(file, files_that_belong_together_come_together)
{
    static const char *const names[] = {"a", "b"};
    const char *const path[] = {in_folder("a"), in_folder("b")};
    for (int hidden = 0; hidden < 2; hidden++) {
        ari_atomic_file *list[3] = {NULL};
        proc_is_hidden = hidden == 1;
        for (int i = 0; i < 2; i++) {
            cr_assert_ok(ari_file_write(path[i], "old", 3));
            cr_assert_ok(ari_atomic_file_create(&list[2 * i], path[i]));
            cr_assert_ok(ari_atomic_file_write(list[2 * i], names[i], 1));
        }
        for (int i = 0; i < 2; i++)
            expect_text(path[i], "old");
        cr_assert_ok(ari_atomic_file_commit_all(list, 3));
        for (int i = 0; i < 2; i++)
            expect_text(path[i], names[i]);
        expect_files(2, 0);
    }
}

Test(file, a_folder_comes_with_those_it_is_in)
{
    const char *const path = in_folder("a/b/c"), *const file = in_folder("a/file");
    for (int again = 0; again < 2; again++)
        cr_assert_ok(ari_folder_make(path));
    cr_expect(ari_is_folder(path));
    cr_assert_ok(ari_file_write(file, "text", 4));
    cr_expect_eq(ari_folder_make(file), AR_ERR_IO);
    cr_expect_eq(ari_folder_make(in_folder("a/file/b")), AR_ERR_IO);
    cr_expect_eq(ari_folder_make(""), AR_ERR_IO);
    expect_text(file, "text");
}
