/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>
#include <time.h>

/* Features beyond POSIX, implemented for Linux, for Darwin, or with POSIX alone as closely as possible. dependencies.md
 * lists the few other places that distinguish these systems. A build with ANYRANK_POSIX_ONLY uses the POSIX version
 * everywhere, so that it is tested. */
#if defined(__linux__) && !defined(ARI_POSIX_ONLY)
#define ARI_OS_LINUX 1
#else
#define ARI_OS_LINUX 0
#endif
#if defined(__APPLE__) && !defined(ARI_POSIX_ONLY)
#define ARI_OS_DARWIN 1
#else
#define ARI_OS_DARWIN 0
#endif

#ifdef __cplusplus
extern "C" {
#endif

/** Returns the path of the running program, links resolved, ending with 0. Returns false if it is unknown. */
bool ari_program_path(char *path, size_t cap);
/** Chooses how OpenMP's threads wait, and other settings that are read before main begins. Spinning threads on shared
 *  cores prevent the awaited thread from running, and a check then takes several times as long. A sleeping thread needs
 *  about 50 us to wake up, longer than many kernels of a block; gcc's runtime first spins for about 100 us, and not at
 *  all with more threads than cores. OpenMP's stacks would otherwise be as small as `ulimit -s`. glibc's large arrays
 *  use huge pages if the system offers them on request, which saves a quarter of the system time of a large check.
 *  Since main is too late for these settings, a program that calls this first restarts itself once with them; settings
 *  made by the user are kept. If the restart fails, the program continues unchanged. */
void ari_threads_sleep(char **argv);

/** Lets a child process end when the thread that forked it does, where the system supports that. */
void ari_end_with_parent(void);

/** Returns the path of a library that dlopen opened, borrowed from it; "?" if unknown. */
const char *ari_library_place(void *library);

/** Opens a file for writing without a name in the folder, which vanishes with the process. -1 if the system has no such
 *  files, or cannot name them later. */
int ari_unnamed_open(const char *folder);
/** Gives an unnamed file a name, which must be free. Returns false and sets errno on failure. */
bool ari_unnamed_link(int fd, const char *name);
/** Opens a file for reading and writing that is in no folder and invisible to other processes. -1: impossible. */
int ari_scratch_open(void);

/** Makes the C library return memory of several MB to the system as soon as it is freed, and free memory at the end of
 *  the heap, if the library supports that. */
void ari_memory_return_large(void);
/** Returns all free memory to the system now: between two unrelated parts of a run. */
void ari_memory_return(void);

/** Allocates zeros, on Linux in an unnamed file in the folder TMPDIR or /var/tmp, of which only used pages take memory.
 *  NULL: no space. */
void *ari_disk_array_create(size_t bytes);
/** Marks pages as currently unused, so that they need no memory. */
void ari_disk_array_rest(void *array, size_t bytes);
void ari_disk_array_destroy(void *array, size_t bytes);

/** Renames a folder below the open folder `dir_fd` to a name that is free. Returns 0, or -1 with errno. */
int ari_rename_new(int dir_fd, const char *src, const char *dst);
/** Exchanges the names of two folders: in one step on Linux and Darwin; with POSIX alone in three steps, during which b
 *  is missing for a moment. Returns 0, or -1 with errno. */
int ari_rename_exchange(int dir_fd, const char *a, const char *b);

/** Returns when the file was last written. */
static inline struct timespec ari_modified(const struct stat *s)
{
#if defined(__APPLE__)
    return s->st_mtimespec;
#else
    return s->st_mtim;
#endif
}

/** qsort_r of POSIX 2024. `compare` must not sort by itself. */
void ari_sort(void *base, size_t n, size_t size, int (*compare)(const void *a, const void *b, void *user), void *user);

#ifdef __cplusplus
}
#endif
