/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/os/os.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#if ARI_OS_LINUX
#include <dlfcn.h>
#include <link.h>
#include <malloc.h>
#include <sched.h>
#include <signal.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#elif ARI_OS_DARWIN
#include <mach-o/dyld.h>
#endif

#include "ref/core/clock.h"
#include "ref/core/os/threads.h"

/* --- threads ------------------------------------------------------------------------------------------------------ */

int ari_thread_create(pthread_t *thread, void *(*run)(void *), void *user)
{
    pthread_attr_t attributes;
    int rc = pthread_attr_init(&attributes);
    if (rc != 0)
        return rc;
    rc = pthread_attr_setstacksize(&attributes, ARI_STACK_BYTES);
    rc = rc == 0 ? pthread_create(thread, &attributes, run, user) : rc;
    pthread_attr_destroy(&attributes);
    return rc;
}

int ari_cores(void)
{
#if ARI_OS_LINUX
    cpu_set_t mask;
    if (sched_getaffinity(0, sizeof mask, &mask) == 0 && CPU_COUNT(&mask) > 0)
        return CPU_COUNT(&mask);
#endif
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int)online : 1;
}

int ari_this_core(void)
{
#if ARI_OS_LINUX
    const int core = sched_getcpu();
    return core > 0 ? core : 0;
#else
    return 0;
#endif
}

void ari_begin_on_core(int i)
{
#if ARI_OS_LINUX
    cpu_set_t mask, core_mask;
    if (sched_getaffinity(0, sizeof mask, &mask) != 0 || CPU_COUNT(&mask) < 2)
        return;
    size_t core = 0;
    for (int remaining = i % CPU_COUNT(&mask); remaining > 0 || !CPU_ISSET(core, &mask); core++)
        remaining -= CPU_ISSET(core, &mask) != 0;
    CPU_ZERO(&core_mask);
    CPU_SET(core, &core_mask);
    if (sched_setaffinity(0, sizeof core_mask, &core_mask) == 0)
        (void)sched_setaffinity(0, sizeof mask, &mask);
#else
    (void)i;
#endif
}

#if ARI_OS_LINUX
bool ari_semaphore_init(ari_semaphore *s)
{
    return sem_init(s, 0, 0) == 0;
}

void ari_semaphore_fini(ari_semaphore *s)
{
    sem_destroy(s);
}

void ari_semaphore_post(ari_semaphore *s)
{
    sem_post(s);
}

void ari_semaphore_wait(ari_semaphore *s)
{
    while (sem_wait(s) != 0) {
        /* interrupted by a signal: continue waiting */
    }
}
#else
bool ari_semaphore_init(ari_semaphore *s)
{
    s->count = 0;
    if (pthread_mutex_init(&s->lock, NULL) != 0)
        return false;
    if (pthread_cond_init(&s->raised, NULL) == 0)
        return true;
    pthread_mutex_destroy(&s->lock);
    return false;
}

void ari_semaphore_fini(ari_semaphore *s)
{
    pthread_cond_destroy(&s->raised);
    pthread_mutex_destroy(&s->lock);
}

void ari_semaphore_post(ari_semaphore *s)
{
    pthread_mutex_lock(&s->lock);
    s->count++;
    pthread_cond_signal(&s->raised);
    pthread_mutex_unlock(&s->lock);
}

void ari_semaphore_wait(ari_semaphore *s)
{
    pthread_mutex_lock(&s->lock);
    while (s->count == 0)
        pthread_cond_wait(&s->raised, &s->lock);
    s->count--;
    pthread_mutex_unlock(&s->lock);
}
#endif

int ari_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attr;
    int rc = pthread_condattr_init(&attr);
    if (rc != 0)
        return rc;
#if ARI_OS_LINUX
    rc = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
#endif
    if (rc == 0)
        rc = pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
    return rc;
}

static struct timespec timespec_of(uint64_t ns)
{
    return (struct timespec){.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
}

int ari_cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t deadline_ns)
{
    /* some systems refuse times beyond a signed 32-bit number of seconds; a day suffices, since callers loop */
    const uint64_t day_ns = 86400u * (uint64_t)1000000000u;
    const uint64_t now_ns = ari_now_ns(), latest = now_ns + day_ns;
    const uint64_t until = deadline_ns < latest ? deadline_ns : latest;
#if ARI_OS_LINUX
    const struct timespec t = timespec_of(until);
    return pthread_cond_timedwait(cond, lock, &t);
#elif ARI_OS_DARWIN
    const struct timespec t = timespec_of(until > now_ns ? until - now_ns : 0);
    return pthread_cond_timedwait_relative_np(cond, lock, &t);
#else
    /* In wall-clock time: if the clock changes while a thread waits, the end of the wait moves. */
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    const struct timespec t = timespec_of((uint64_t)wall.tv_sec * 1000000000u + (uint64_t)wall.tv_nsec +
                                          (until > now_ns ? until - now_ns : 0));
    return pthread_cond_timedwait(cond, lock, &t);
#endif
}

/* --- the running program ------------------------------------------------------------------------------------------ */

bool ari_program_path(char *path, size_t cap)
{
#if ARI_OS_LINUX
    const ssize_t length = readlink("/proc/self/exe", path, cap);
    if (length <= 0 || (size_t)length >= cap) /* without /proc */
        return false;
    path[length] = '\0';
    return true;
#elif ARI_OS_DARWIN
    char called[PATH_MAX], resolved[PATH_MAX];
    uint32_t size = sizeof called;
    if (_NSGetExecutablePath(called, &size) != 0 || realpath(called, resolved) == NULL)
        return false;
    return (size_t)snprintf(path, cap, "%s", resolved) < cap;
#else
    (void)path, (void)cap;
    return false;
#endif
}

/* Finds a path by which the running program can be started again; on Linux also after the file has been replaced. */
static bool find_program(char *path, size_t cap)
{
#if ARI_OS_LINUX
    /* without /proc the path is the one given by the caller, whose file may have been replaced meanwhile */
    snprintf(path, cap, "/proc/%ld/exe", (long)getpid());
    const char *file = access(path, X_OK) == 0 ? path : (const char *)(uintptr_t)getauxval(AT_EXECFN);
    return file == path || (size_t)snprintf(path, cap, "%s", file) < cap;
#else
    return ari_program_path(path, cap);
#endif
}

void ari_threads_sleep(char **argv)
{
    const bool chosen = getenv("OMP_WAIT_POLICY") != NULL || getenv("GOMP_SPINCOUNT") != NULL;
    char program[PATH_MAX];
    if (!chosen && setenv("OMP_WAIT_POLICY", "passive", 0) == 0 && setenv("GOMP_SPINCOUNT", "4000", 0) == 0 &&
        setenv("OMP_STACKSIZE", "8M", 0) == 0 && setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1", 0) == 0 &&
        find_program(program, sizeof program))
        execv(program, argv);
    errno = 0;
}

void ari_end_with_parent(void)
{
#if ARI_OS_LINUX
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
}

const char *ari_library_place(void *library)
{
#if ARI_OS_LINUX
    struct link_map *map = NULL;
    return dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map ? map->l_name : "?";
#else
    (void)library;
    return "?";
#endif
}

/* --- files -------------------------------------------------------------------------------------------------------- */

#if ARI_OS_LINUX
/* Path under which the kernel shows an open file and which can be linked to. */
typedef struct self_path {
    char text[32];
} self_path;

static self_path path_of_fd(int fd)
{
    self_path p;
    snprintf(p.text, sizeof p.text, "/proc/self/fd/%d", fd);
    return p;
}

int ari_unnamed_open(const char *folder)
{
    const int fd = open(folder, O_WRONLY | O_TMPFILE | O_CLOEXEC, 0666);
    if (fd < 0)
        return -1;
    const self_path self = path_of_fd(fd);
    if (access(self.text, F_OK) == 0)
        return fd;
    close(fd);
    return -1;
}

bool ari_unnamed_link(int fd, const char *name)
{
    const self_path self = path_of_fd(fd);
    return linkat(AT_FDCWD, self.text, AT_FDCWD, name, AT_SYMLINK_FOLLOW) == 0;
}

int ari_scratch_open(void)
{
    return memfd_create("anyrank", 0);
}

void ari_memory_return_large(void)
{
#if defined(__GLIBC__)
    (void)mallopt(M_MMAP_THRESHOLD, 8 << 20);
    (void)mallopt(M_TRIM_THRESHOLD, 16 << 20);
#endif
}

void ari_memory_return(void)
{
#if defined(__GLIBC__)
    (void)malloc_trim(0);
#endif
}

static int disk_file(void)
{
    const char *set = getenv("TMPDIR"), *folder = set && set[0] ? set : "/var/tmp";
    char name[PATH_MAX];
    if ((size_t)snprintf(name, sizeof name, "%s/anyrank-XXXXXX", folder) >= sizeof name)
        return -1;
    const int fd = mkstemp(name);
    if (fd >= 0)
        unlink(name);
    return fd;
}

void *ari_disk_array_create(size_t bytes)
{
    const int fd = disk_file();
    /* reserves the space now, because a full disk would later raise a signal */
    const bool scratch = fd >= 0 && bytes > 0 && posix_fallocate(fd, 0, (off_t)bytes) == 0;
    void *array = scratch ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (fd >= 0)
        close(fd);
    return array == MAP_FAILED ? NULL : array;
}

void ari_disk_array_rest(void *array, size_t bytes)
{
    (void)madvise(array, bytes, MADV_DONTNEED); /* for a shared mapping: the written data stay in the file */
}

void ari_disk_array_destroy(void *array, size_t bytes)
{
    (void)munmap(array, bytes);
}
#else
int ari_unnamed_open(const char *folder)
{
    (void)folder;
    return -1;
}

bool ari_unnamed_link(int fd, const char *name)
{
    (void)fd, (void)name;
    errno = ENOTSUP;
    return false;
}

void ari_memory_return_large(void)
{
}

void ari_memory_return(void)
{
}

void *ari_disk_array_create(size_t bytes)
{
    (void)bytes;
    return NULL;
}

void ari_disk_array_rest(void *array, size_t bytes)
{
    (void)array, (void)bytes;
}

void ari_disk_array_destroy(void *array, size_t bytes)
{
    (void)array, (void)bytes;
}

int ari_scratch_open(void)
{
    FILE *f = tmpfile();
    const int fd = f ? dup(fileno(f)) : -1;
    if (f)
        fclose(f);
    return fd;
}
#endif

int ari_rename_new(int dir_fd, const char *src, const char *dst)
{
#if ARI_OS_LINUX
    return renameat2(dir_fd, src, dir_fd, dst, RENAME_NOREPLACE);
#elif ARI_OS_DARWIN
    return renameatx_np(dir_fd, src, dir_fd, dst, RENAME_EXCL);
#else
    struct stat s;
    if (fstatat(dir_fd, dst, &s, AT_SYMLINK_NOFOLLOW) != 0)
        return renameat(dir_fd, src, dir_fd, dst); /* a folder with files that has taken the name meanwhile is not
                                                      replaced */
    errno = EEXIST;
    return -1;
#endif
}

int ari_rename_exchange(int dir_fd, const char *a, const char *b)
{
#if ARI_OS_LINUX
    return renameat2(dir_fd, a, dir_fd, b, RENAME_EXCHANGE);
#elif ARI_OS_DARWIN
    return renameatx_np(dir_fd, a, dir_fd, b, RENAME_SWAP);
#else
    char between[PATH_MAX];
    if ((size_t)snprintf(between, sizeof between, "%s.exchanged", a) >= sizeof between) {
        errno = ENAMETOOLONG;
        return -1;
    }
    if (renameat(dir_fd, b, dir_fd, between) != 0)
        return -1;
    if (renameat(dir_fd, a, dir_fd, b) == 0)
        return renameat(dir_fd, between, dir_fd, a);
    const int error = errno;
    (void)renameat(dir_fd, between, dir_fd, b);
    errno = error;
    return -1;
#endif
}

/* --- sorting ------------------------------------------------------------------------------------------------------ */

#if ARI_OS_LINUX
void ari_sort(void *base, size_t n, size_t size, int (*compare)(const void *a, const void *b, void *user), void *user)
{
    qsort_r(base, n, size, compare, user);
}
#else
static _Thread_local struct {
    int (*compare)(const void *a, const void *b, void *user);
    void *user;
} sorting;

static int compare_two(const void *a, const void *b)
{
    return sorting.compare(a, b, sorting.user);
}

void ari_sort(void *base, size_t n, size_t size, int (*compare)(const void *a, const void *b, void *user), void *user)
{
    sorting.compare = compare;
    sorting.user = user;
    qsort(base, n, size, compare_two);
}
#endif
