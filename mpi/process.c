/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "mpi/mpi_impl.h"
#include "ref/core/size.h"

/* The process among those that the launcher started, and what is moved for the host. */

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

/* The launcher of another MPI starts processes that do not find each other: each is alone. */
static ar_status check_launcher(int size)
{
    const char *other = getenv(other_size);
    if (size > 1 || !other || atoi(other) <= 1)
        return AR_OK;
    return ar_error_set(AR_ERR_ARG,
                        "%s processes were started by the launcher of %s (%s=%.20s), but this build has %s: they do "
                        "not find each other; use the mpirun of %s",
                        other, other_library, other_size, other, library, library);
}

/* --- what is moved for the host ----------------------------------------------------------------------------------- */

static ar_status move(const ari_mpi_place *at, const ari_call *call)
{
    return ari_mpi_direct(at, ari_mpi_tag(0, ARI_MPI_HOST), call, NULL);
}

static ar_status begin_host(ari_mpi *p, const ari_call *call)
{
    if (ari_mpi_control_has_failed(p)) {
        ari_mpi_control_finish(p);
        return ari_world_echo(p->world, p->base.rank, NULL);
    }
    p->host.seq++;
    atomic_store(&p->host.in, 1);
    ari_world_begin(&p->host, call);
    return AR_OK;
}

static ar_status end_host(ari_mpi *p, ar_status st)
{
    ari_world_end(&p->host, st == AR_OK);
    atomic_store(&p->host.in, 0);
    return st == AR_OK ? AR_OK : ari_world_echo(p->world, p->base.rank, NULL);
}

static ar_status check_size(const ari_mpi_place *at, uint64_t expected, uint64_t actual)
{
    if (expected == actual)
        return AR_OK;
    const ar_status st = ar_error_set(AR_ERR_MISMATCH, "rank 0 gives %llu bytes where %llu are expected",
                                      (unsigned long long)actual, (unsigned long long)expected);
    ari_mpi_broken(at, st);
    return st;
}

static ar_status mpi_broadcast(ar_process *base, void *bytes, size_t n)
{
    ari_mpi *p = mpi_of(base);
    uint64_t size = n;
    const ari_call call = {
        .kind = ARI_BROADCAST, .dtype = AR_U8, .count = n, .in = {bytes}, .out = {bytes}, .tag = "for the host"};
    const ari_call sizes = {.kind = ARI_BROADCAST, .dtype = AR_I64, .count = 1, .in = {&size}, .out = {&size}};
    const ari_mpi_place at = {p, &p->host, &call, "in"};
    AR_TRY(begin_host(p, &call));
    ar_status st = move(&at, &sizes);
    if (st == AR_OK)
        st = check_size(&at, n, size);
    if (st == AR_OK)
        st = move(&at, &call);
    return end_host(p, st);
}

/* Room for all on process 0, which knows all sizes. */
static ar_status alloc_all(const ari_mpi_place *at, void **all, const size_t *sizes)
{
    size_t total = 0;
    ar_status st = AR_OK;
    for (int i = 0; st == AR_OK && i < at->p->base.size; i++)
        st = ari_add_size(&total, total, sizes[i]);
    if (st == AR_OK)
        st = ari_alloc(all, total, 1, "what processes give");
    if (st != AR_OK)
        ari_mpi_broken(at, st);
    return st;
}

static ar_status mpi_gather(ar_process *base, void **gives, size_t *sizes, const void *bytes, size_t n)
{
    ari_mpi *p = mpi_of(base);
    const size_t ranks = (size_t)base->size;
    size_t *counts = NULL; /* what this process knows of them; all of them, on process 0; as many ones */
    void *all = NULL;
    AR_TRY(ari_alloc_zero((void **)&counts, 3 * ranks, sizeof *counts, "sizes of processes"));
    size_t *const each = counts + ranks, *const ones = each + ranks;
    counts[base->rank] = n;
    for (size_t i = 0; i < ranks; i++)
        ones[i] = 1;
    const ari_call call = {.kind = ARI_GATHER, .dtype = AR_U8, .counts = counts, .tag = "for the host"};
    const ari_call first = {.kind = ARI_GATHER, .dtype = AR_I64, .counts = ones, .in = {&n}, .out = {each}};
    const ari_mpi_place at = {p, &p->host, &call, "in"};
    ar_status st = begin_host(p, &call);
    if (st != AR_OK)
        goto done;
    st = move(&at, &first);
    if (st == AR_OK && base->rank == 0)
        st = alloc_all(&at, &all, each);
    if (st == AR_OK) {
        const ari_call rest = {
            .kind = ARI_GATHER, .dtype = AR_U8, .counts = base->rank == 0 ? each : counts, .in = {bytes}, .out = {all}};
        st = move(&at, &rest);
    }
    st = end_host(p, st);
done:
    if (sizes && base->rank == 0 && st == AR_OK)
        memcpy(sizes, each, ranks * sizeof *sizes);
    if (st == AR_OK)
        *gives = all;
    else
        free(all);
    free(counts);
    return st;
}

static void mpi_abort(ar_process *base, ar_status st, const char *why)
{
    char line[768];
    snprintf(line, sizeof line, "rank %d failed with %s: %s", base->rank, ar_status_name(st), why);
    ari_mpi_control_fail(mpi_of(base), NULL, st, line);
}

/* --- beginning and end -------------------------------------------------------------------------------------------- */

static void free_process(ari_mpi *p)
{
    if (p->world)
        ari_world_destroy(p->world);
    pthread_rwlock_destroy(&p->calls);
    pthread_mutex_destroy(&p->turn);
    free(p);
}

/* After a failure, with processes that do not answer or messages that never arrive, MPI_Finalize might not return. */
static void mpi_destroy(ar_process *base)
{
    ari_mpi *p = mpi_of(base);
    const bool all = ari_mpi_control_goodbye(p), in_order = all && !atomic_load(&p->abandoned);
    ari_mpi_control_destroy(p);
    if (in_order) {
        MPI_Comm_free(&p->control);
        MPI_Comm_free(&p->data);
    }
    if (p->owns_mpi) {
        if (!in_order)
            MPI_Abort(MPI_COMM_WORLD, 1);
        MPI_Finalize();
    }
    free_process(p);
}

static const ari_process_ops mpi_ops = {
    .name = "mpi", .broadcast = mpi_broadcast, .gather = mpi_gather, .abort = mpi_abort, .destroy = mpi_destroy};

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

static ar_status find_place(ari_mpi *p)
{
    MPI_Comm machine;
    int *most = NULL, known = 0;
    AR_TRY(ari_mpi_error(MPI_Comm_rank(MPI_COMM_WORLD, &p->base.rank), "MPI_Comm_rank"));
    AR_TRY(ari_mpi_error(MPI_Comm_size(MPI_COMM_WORLD, &p->base.size), "MPI_Comm_size"));
    AR_TRY(check_launcher(p->base.size));
    AR_TRY(ari_mpi_error(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine),
                         "MPI_Comm_split_type"));
    AR_TRY(ari_mpi_error(MPI_Comm_rank(machine, &p->base.local_rank), "MPI_Comm_rank"));
    AR_TRY(ari_mpi_error(MPI_Comm_free(&machine), "MPI_Comm_free"));
    AR_TRY(ari_mpi_error(MPI_Comm_dup(MPI_COMM_WORLD, &p->data), "MPI_Comm_dup"));
    AR_TRY(ari_mpi_error(MPI_Comm_dup(MPI_COMM_WORLD, &p->control), "MPI_Comm_dup"));
    AR_TRY(ari_mpi_error(MPI_Comm_set_errhandler(p->data, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler"));
    AR_TRY(ari_mpi_error(MPI_Comm_set_errhandler(p->control, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler"));
    AR_TRY(ari_mpi_error(MPI_Comm_get_attr(p->data, MPI_TAG_UB, (void *)&most, &known), "MPI_Comm_get_attr"));
    p->last_context = (known ? *most : 32767) / ARI_MPI_USES - 1;
    return AR_OK;
}

static ar_status make_world(ari_mpi *p)
{
    AR_TRY(ari_world_create(&p->world, p->base.size, p->base.options.timeout_ns, NULL));
    ari_member_init(&p->host, ari_world_group(p->world), p->base.rank);
    return ari_mpi_control_create(p);
}

ar_status ari_process_mpi_create(ar_process **gives, const ar_process_options *o)
{
    ari_mpi *p = calloc(1, sizeof *p);
    const bool locks = p && pthread_mutex_init(&p->turn, NULL) == 0;
    if (!locks || pthread_rwlock_init(&p->calls, NULL) != 0) {
        if (locks)
            pthread_mutex_destroy(&p->turn);
        free(p);
        return ar_error_set(AR_ERR_MEMORY, "no memory for a process");
    }
    p->base = (ar_process){.ops = &mpi_ops, .options = *o, .comm = ari_mpi_comm_create};
    atomic_init(&p->next_context, 1);
    ar_status st = start_mpi(p);
    if (st == AR_OK)
        st = find_place(p);
    if (st == AR_OK)
        st = make_world(p);
    if (st != AR_OK) {
        ari_mpi_control_destroy(p);
        if (p->owns_mpi)
            MPI_Finalize();
        free_process(p);
        return st;
    }
    *gives = &p->base;
    return AR_OK;
}

/* --- the library -------------------------------------------------------------------------------------------------- */

/* "Open MPI v4.1.4, package: ..", "MPICH Version:\t4.0.2\n..": up to the first comma or end of line. MPI need not be
 * initialised for that. */
bool ari_mpi_describe(char *text, size_t size)
{
    char all[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    if (MPI_Get_library_version(all, &length) != MPI_SUCCESS) {
        snprintf(text, size, "it does not tell its version");
        return false;
    }
    all[strcspn(all, ",\n")] = '\0';
    for (char *tab = strchr(all, '\t'); tab; tab = strchr(tab, '\t'))
        *tab = ' ';
    snprintf(text, size, "%s", all);
    return true;
}
