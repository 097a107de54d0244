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

typedef struct host_moves {
    ari_mpi_place at;
    MPI_Request *request;
    int *member;
    int n, most;
    ar_status st;
} host_moves;

static ar_status more(host_moves *h)
{
    if (h->n < h->most)
        return AR_OK;
    const int most = h->most ? 2 * h->most : 16;
    MPI_Request *request = realloc(h->request, (size_t)most * sizeof *request);
    h->request = request ? request : h->request;
    int *member = realloc(h->member, (size_t)most * sizeof *member);
    h->member = member ? member : h->member;
    if (!request || !member)
        return ar_error_set(AR_ERR_MEMORY, "no memory for %d requests of MPI", most);
    h->most = most;
    return AR_OK;
}

static ar_status move_piece(host_moves *h, bool send, int rank, char *at, size_t bytes)
{
    const int tag = ari_mpi_tag(0, ARI_MPI_HOST);
    AR_TRY(more(h));
    MPI_Request *r = &h->request[h->n];
    AR_TRY(send ? ari_mpi_send(h->at.p, at, bytes, rank, tag, r) : ari_mpi_receive(h->at.p, at, bytes, rank, tag, r));
    h->member[h->n++] = rank;
    return AR_OK;
}

/* The first error stays in h->st. */
static void move(host_moves *h, bool send, int rank, const void *bytes, size_t n)
{
    for (size_t done = 0; h->st == AR_OK && done < n; done += ARI_MPI_PIECE_BYTES) {
        const size_t rest = n - done, now = rest < ARI_MPI_PIECE_BYTES ? rest : ARI_MPI_PIECE_BYTES;
        h->st = move_piece(h, send, rank, (char *)(uintptr_t)bytes + done, now);
    }
}

static void await_moves(host_moves *h)
{
    if (h->st != AR_OK) {
        ari_mpi_broken(&h->at, h->st);
        ari_mpi_drop(h->at.p, h->request, h->n);
        return;
    }
    h->st = ari_mpi_await(&h->at, h->request, h->member, h->n);
    h->n = 0;
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

static ar_status end_host(host_moves *h)
{
    ari_mpi *p = h->at.p;
    free(h->request);
    free(h->member);
    ari_world_end(&p->host, h->st == AR_OK);
    atomic_store(&p->host.in, 0);
    return h->st == AR_OK ? AR_OK : ari_world_echo(p->world, p->base.rank, NULL);
}

static ar_status check_sizes(host_moves *h, uint64_t expected, uint64_t actual, int from)
{
    if (h->st != AR_OK || expected == actual)
        return h->st;
    h->st = ar_error_set(AR_ERR_MISMATCH, "rank %d gives %llu bytes where %llu are expected", from,
                         (unsigned long long)actual, (unsigned long long)expected);
    ari_mpi_broken(&h->at, h->st);
    return h->st;
}

static ar_status mpi_broadcast(ar_process *base, void *bytes, size_t n)
{
    ari_mpi *p = mpi_of(base);
    const ari_call call = {.kind = ARI_BROADCAST, .dtype = AR_U8, .count = n, .tag = "for the host"};
    host_moves h = {.at = {p, &p->host, &call, "in"}};
    uint64_t size = n;
    AR_TRY(begin_host(p, &call));
    for (int i = 1; base->rank == 0 && i < base->size; i++) {
        move(&h, true, i, &size, sizeof size);
        move(&h, true, i, bytes, n);
    }
    if (base->rank != 0) {
        move(&h, false, 0, &size, sizeof size);
        await_moves(&h);
        if (check_sizes(&h, n, size, 0) == AR_OK)
            move(&h, false, 0, bytes, n);
    }
    if (h.st == AR_OK)
        await_moves(&h);
    return end_host(&h);
}

static ar_status check_total(host_moves *h, const uint64_t *each, int n, size_t *total)
{
    *total = 0;
    for (int i = 0; h->st == AR_OK && i < n; i++) {
        h->st = ari_add_size(total, *total, (size_t)each[i]);
        if (h->st != AR_OK)
            ari_mpi_broken(&h->at, h->st);
    }
    return h->st;
}

static ar_status gather_here(host_moves *h, void **gives, size_t *sizes, const void *bytes, size_t n, uint64_t *each)
{
    const int size = h->at.p->base.size;
    size_t total = 0;
    each[0] = n;
    for (int i = 1; i < size; i++)
        move(h, false, i, &each[i], sizeof *each);
    if (h->st == AR_OK)
        await_moves(h);
    AR_TRY(check_total(h, each, size, &total));
    void *all = NULL;
    h->st = ari_alloc(&all, total, 1, "what processes give");
    if (h->st != AR_OK) {
        ari_mpi_broken(&h->at, h->st);
        return h->st;
    }
    ari_copy_bytes(all, bytes, n);
    size_t at = n;
    for (int i = 1; i < size; at += (size_t)each[i++])
        move(h, false, i, (char *)all + at, (size_t)each[i]);
    await_moves(h);
    for (int i = 0; sizes && i < size; i++)
        sizes[i] = (size_t)each[i];
    if (h->st == AR_OK)
        *gives = all;
    else
        free(all);
    return h->st;
}

static ar_status mpi_gather(ar_process *base, void **gives, size_t *sizes, const void *bytes, size_t n)
{
    ari_mpi *p = mpi_of(base);
    uint64_t own = n, *each = NULL;
    size_t *counts = NULL;
    AR_TRY(ari_alloc_zero((void **)&counts, (size_t)base->size, sizeof *counts + sizeof *each, "sizes of processes"));
    each = (uint64_t *)(counts + base->size);
    counts[base->rank] = n;
    const ari_call call = {.kind = ARI_GATHER, .dtype = AR_U8, .counts = counts, .tag = "for the host"};
    host_moves h = {.at = {p, &p->host, &call, "in"}};
    const ar_status st = begin_host(p, &call);
    if (st != AR_OK) {
        free(counts);
        return st;
    }
    if (base->rank == 0) {
        (void)gather_here(&h, gives, sizes, bytes, n, each);
    } else {
        move(&h, true, 0, &own, sizeof own);
        move(&h, true, 0, bytes, n);
        await_moves(&h);
    }
    const ar_status ended = end_host(&h);
    free(counts);
    return ended;
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
