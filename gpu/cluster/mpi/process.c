/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/cluster/mpi/mpi_impl.h"
#include "ref/core/clock.h"
#include "ref/core/size.h"

/* This process among those that the launcher started, and the store through which all of them end together. */

static ari_mpi *mpi_of(ar_process *p)
{
    return (ari_mpi *)p;
}

/* --- the launcher ------------------------------------------------------------------------------------------------- */

#if defined(OPEN_MPI)
static const char library[] = "Open MPI", other_library[] = "MPICH";
static const char *const own_size[] = {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK"};
static const char other_size[] = "PMI_SIZE";
#else
static const char library[] = "MPICH", other_library[] = "Open MPI";
static const char *const own_size[] = {"PMI_SIZE", "PMI_RANK", "PMIX_RANK"};
static const char other_size[] = "OMPI_COMM_WORLD_SIZE";
#endif

bool ari_process_mpi_launched(void)
{
    for (size_t i = 0; i < sizeof own_size / sizeof *own_size; i++) {
        if (getenv(own_size[i]))
            return true;
    }
    return false;
}

/* Checks the launcher. Processes started by a different MPI's launcher, or by torchrun, do not find each other: each
 * one is alone. */
static ar_status check_launcher(int size)
{
    const char *launcher_size = getenv(other_size), *torch = getenv("WORLD_SIZE");
    if (size == 1 && torch && atoi(torch) > 1)
        return ar_error_set(
            AR_ERR_ARG, "WORLD_SIZE is %.12s, but MPI started this process alone: start the ranks by mpirun", torch);
    if (size > 1 || !launcher_size || atoi(launcher_size) <= 1)
        return AR_OK;
    return ar_error_set(AR_ERR_ARG,
                        "%s processes were started by the launcher of %s (%s=%.20s), but this build has %s: they do "
                        "not find each other; use the mpirun of %s",
                        launcher_size, other_library, other_size, launcher_size, library, library);
}

/* --- how all end -------------------------------------------------------------------------------------------------- */

/* After a failure: how long a process waits until the other processes have finished with MPI. */
#define GOODBYE_NS UINT64_C(2000000000)

static void mpi_abort(ar_process *base, ar_status st, const char *why)
{
    char line[768];
    snprintf(line, sizeof line, "rank %d failed with %s: %s", base->rank, ar_status_name(st), why);
    ari_mpi_fail(mpi_of(base), NULL, st, line);
}

static char *view(void *user)
{
    ari_mpi *p = user;
    pthread_mutex_lock(&p->lock);
    char *text = ari_flight_text(&p->flight, ari_now_ns());
    pthread_mutex_unlock(&p->lock);
    return text;
}

static void free_process(ari_mpi *p)
{
    ari_store_destroy(p->base.store);
    while (p->flight.groups)
        ari_flight_remove(&p->flight, p->flight.groups);
    pthread_rwlock_destroy(&p->calls);
    pthread_mutex_destroy(&p->turn);
    pthread_mutex_destroy(&p->lock);
    free(p);
}

/* After a failure, if processes do not answer or messages never arrive, MPI_Finalize might not return. */
static void mpi_destroy(ar_process *base)
{
    ari_mpi *p = mpi_of(base);
    const bool is_complete = ari_store_leave(base->store, GOODBYE_NS), failed = ari_mpi_status(p) != AR_OK;
    if (failed)
        ari_mpi_take_away(p);
    const bool in_order = (is_complete || !failed) && !atomic_load(&p->abandoned);
    ari_store_destroy(base->store);
    base->store = NULL;
    if (in_order)
        MPI_Comm_free(&p->data);
    if (p->owns_mpi) {
        if (!in_order)
            MPI_Abort(MPI_COMM_WORLD, 1);
        MPI_Finalize();
    }
    free_process(p);
}

/* --- beginning ---------------------------------------------------------------------------------------------------- */

static const ari_process_ops mpi_ops = {.abort = mpi_abort, .destroy = mpi_destroy};

static ar_status start_mpi(ari_mpi *p)
{
    int begun = 0, ended = 0, level = MPI_THREAD_SINGLE;
    MPI_Initialized(&begun);
    MPI_Finalized(&ended);
    if (ended)
        return ar_error_set(AR_ERR_UNSUPPORTED, "MPI has ended in this program, and begins only once");
    int rc = begun ? MPI_Query_thread(&level) : MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
    AR_TRY(ari_mpi_error(rc, begun ? "MPI_Query_thread" : "MPI_Init_thread"));
    p->owns_mpi = !begun;
    p->one_at_a_time = level < MPI_THREAD_MULTIPLE;
    return AR_OK;
}

static ar_status copy_world(MPI_Comm *comm)
{
    AR_TRY(ari_mpi_error(MPI_Comm_dup(MPI_COMM_WORLD, comm), "MPI_Comm_dup"));
    return ari_mpi_error(MPI_Comm_set_errhandler(*comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
}

static ar_status find_place(ari_mpi *p)
{
    static MPI_Comm control = MPI_COMM_NULL; /* until MPI ends, because a failure leaves messages in it */
    MPI_Comm machine;
    int *max_tag = NULL, is_set = 0;
    AR_TRY(ari_mpi_error(MPI_Comm_rank(MPI_COMM_WORLD, &p->base.rank), "MPI_Comm_rank"));
    AR_TRY(ari_mpi_error(MPI_Comm_size(MPI_COMM_WORLD, &p->base.size), "MPI_Comm_size"));
    AR_TRY(check_launcher(p->base.size));
    AR_TRY(ari_mpi_error(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine),
                         "MPI_Comm_split_type"));
    AR_TRY(ari_mpi_error(MPI_Comm_rank(machine, &p->base.local_rank), "MPI_Comm_rank"));
    AR_TRY(ari_mpi_error(MPI_Comm_free(&machine), "MPI_Comm_free"));
    AR_TRY(copy_world(&p->data));
    if (control == MPI_COMM_NULL)
        AR_TRY(copy_world(&control));
    p->control = control;
    AR_TRY(ari_mpi_error(MPI_Comm_get_attr(p->data, MPI_TAG_UB, (void *)&max_tag, &is_set), "MPI_Comm_get_attr"));
    p->last_context = (is_set ? *max_tag : 32767) / ARI_MPI_USES - 1;
    return AR_OK;
}

static ar_status join(ari_mpi *p)
{
    ari_link *link = NULL;
    AR_TRY(ari_mpi_link_create(&link, p));
    AR_TRY(ari_store_create(&p->base.store, link, p->base.options.timeout_ns));
    ari_store_watch(p->base.store, &(ari_watcher){.view = view, .user = p});
    return AR_OK;
}

ar_status ari_process_mpi_create(ar_process **result, const ar_process_options *o)
{
    ari_mpi *p = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&p, 1, "a process"));
    pthread_mutex_init(&p->turn, NULL); /* on Linux creating a lock cannot fail */
    pthread_mutex_init(&p->lock, NULL);
    pthread_rwlock_init(&p->calls, NULL);
    ari_flight_init(&p->flight);
    p->base = (ar_process){.ops = &mpi_ops, .options = *o, .comm = ari_mpi_comm_create};
    ar_status st = start_mpi(p);
    if (st == AR_OK)
        st = find_place(p);
    if (st == AR_OK)
        st = join(p);
    if (st == AR_OK) {
        *result = &p->base;
        return AR_OK;
    }
    if (p->owns_mpi)
        MPI_Finalize();
    free_process(p);
    return st;
}

/* --- the library -------------------------------------------------------------------------------------------------- */

/* Returns MPI's version up to the first comma or end of line, as in "Open MPI v4.1.4, package: .." or "MPICH
 * Version:\t4.0.2
 * ..". MPI need not be initialised. */
bool ari_mpi_describe(char *text, size_t size)
{
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    if (MPI_Get_library_version(version, &length) != MPI_SUCCESS) {
        snprintf(text, size, "it does not tell its version");
        return false;
    }
    version[strcspn(version, ",\n")] = '\0';
    for (char *tab = strchr(version, '\t'); tab; tab = strchr(tab, '\t'))
        *tab = ' ';
    snprintf(text, size, "%s", version);
    return true;
}
