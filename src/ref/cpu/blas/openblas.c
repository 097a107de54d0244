/* SPDX-License-Identifier: Apache-2.0 */
/* -DANYRANK_BLAS=openblas: its threads, and which of its kernels run. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>
#include <sys/mman.h>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "ref/cpu/blas/openblas.h"
#include "ref/cpu/blas/vendor.h"
#include "ref/cpu/device.h"

/* It has a buffer for each call that runs, two for each of MAX_THREADS threads, its own threads' among them. It prints a
 * warning where calls need more, and ends the process 512 later; where no memory is left for a buffer it tries for
 * ever. So a call waits for another's end if there cannot be one more. The first is made when the library is loaded. */
#define BUFFER ((size_t)1 << 28) /* twice that of x86-64 */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t left;
    long inside, buffers, most;
} calls = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 1, 0};

static long most_calls(void)
{
    const char *at = strstr(openblas_get_config(), "MAX_THREADS=");
    const long threads = at ? strtol(at + strlen("MAX_THREADS="), NULL, 10) : 25;
    const long most = 2 * threads - openblas_get_num_threads();
    return most > 1 ? most : 1;
}

static bool has_room(void)
{
    void *room = mmap(NULL, BUFFER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return room != MAP_FAILED && munmap(room, BUFFER) == 0;
}

/* Built with threads of its own it has one setting for the process: at 1 a call neither wakes nor waits for another
 * thread. Built with OpenMP it asks OpenMP at every call for the number of this thread's team, in which it also
 * ignores its own setting; that of the caller, who may be a user's thread, is put back. */
int ari_blas_alone(void)
{
    int before = 1;
    pthread_mutex_lock(&calls.lock);
    if (calls.most == 0)
        calls.most = most_calls();
    if (openblas_get_parallel() != OPENMP && openblas_get_num_threads() != 1)
        openblas_set_num_threads(1);
    while (calls.inside == calls.buffers && (calls.buffers == calls.most || !has_room()))
        pthread_cond_wait(&calls.left, &calls.lock);
    if (++calls.inside > calls.buffers)
        calls.buffers = calls.inside;
    pthread_mutex_unlock(&calls.lock);
#if defined(_OPENMP)
    if (openblas_get_parallel() == OPENMP) {
        before = omp_get_max_threads();
        if (before != 1)
            omp_set_num_threads(1);
    }
#endif
    return before;
}

void ari_blas_together(int threads)
{
#if defined(_OPENMP)
    if (threads != 1)
        omp_set_num_threads(threads);
#endif
    (void)threads;
    pthread_mutex_lock(&calls.lock);
    calls.inside--;
    pthread_cond_signal(&calls.left);
    pthread_mutex_unlock(&calls.lock);
}

/* It knows new processors, and reads OPENBLAS_CORETYPE when it is loaded. */
void ari_blas_start(void)
{
}

ar_status ari_blas_check(void)
{
    const char *problem = openblas_problem();
    return problem ? ar_error_set(AR_ERR_UNSUPPORTED, "cpu device: OpenBLAS %s", problem) : AR_OK;
}

/* What OpenBLAS calls the kernels that this processor can run, where those of `core` are of one without AVX2: a
 * version that is older than a processor takes it for an old one, and multiplies at a fifth of the speed. NULL: none. */
static const char *newer_core(const char *core)
{
    static const char *const old[] = {"Prescott", "Core2",        "Penryn",    "Dunnington", "Nehalem",     "Atom",
                                      "Opteron",  "Opteron_SSE3", "Barcelona", "Bobcat",     "Sandybridge", "Generic"};
    for (size_t i = 0; i < sizeof old / sizeof *old; i++) {
        if (strcasecmp(core, old[i]) == 0)
            return ari_cpu_has("avx512f avx512bw avx512dq avx512vl") ? "SkylakeX"
                   : ari_cpu_has("avx2 fma")                         ? "Haswell"
                                                                     : NULL;
    }
    return NULL;
}

void ari_blas_describe(ar_cpu_info *out)
{
    static const char *const threads[] = {[NO_THREADS] = "no threads", [PTHREADS] = "pthreads", [OPENMP] = "OpenMP"};
    const char *set = getenv("OPENBLAS_CORETYPE");
    const int parallel = openblas_get_parallel();
    char version[24] = "of unknown version";
    (void)sscanf(openblas_get_config(), "OpenBLAS %23s", version);
    (void)snprintf(out->blas, sizeof out->blas, "OpenBLAS");
    (void)snprintf(out->blas_version, sizeof out->blas_version, "%.12s (%s)", version,
                   parallel >= NO_THREADS && parallel <= OPENMP ? threads[parallel] : "unknown threads");
    (void)snprintf(out->blas_kernels, sizeof out->blas_kernels, "%s", openblas_get_corename());
    char own[48] = "OpenBLAS's own choice";
    if (set && *set)
        (void)snprintf(own, sizeof own, "OPENBLAS_CORETYPE=%.16s is set", set);
    const char *newer = newer_core(openblas_get_corename());
    (void)snprintf(out->blas_reason, sizeof out->blas_reason, "%s%s%.9s", own,
                   newer ? "; this processor has more: OPENBLAS_CORETYPE=" : "", newer ? newer : "");
}
