/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "mpi/mpi_impl.h"
#include "process/agree.h"
#include "ref/core/clock.h"
#include "ref/core/size.h"

/* Before data move, each member sends every other one what it calls, and compares what it receives: one short message
 * to each, so that every member knows who has not come, and finds the same disagreement as all others. */

/* Before the encoded call. The first ARI_MPI_FIRST_BYTES are a message, and the rest is another. */
typedef struct head {
    uint64_t bytes;   /* of all */
    uint64_t context; /* split: the first one that is free here */
} head;

typedef struct slot {
    char *bytes; /* at least ARI_MPI_FIRST_BYTES of room */
    size_t room;
    bool whole; /* the rest has been asked for, or there is none */
    ar_p2p *p2p;
} slot;

struct ari_mpi_meeting {
    ari_mpi *p;
    ari_member *m;
    int tag_out, tag_in;
    slot *slot;           /* [n]; the own one holds what is sent */
    MPI_Request *request; /* [3n]: receptions, first parts, rests */
    int *index;           /* [3n] */
};

void ari_mpi_meeting_destroy(ari_mpi_meeting *s)
{
    if (!s)
        return;
    for (int i = 0; s->slot && i < s->m->group->n; i++) {
        free(s->slot[i].bytes);
        free(s->slot[i].p2p);
    }
    free(s->slot);
    free(s->request);
    free(s->index);
    free(s);
}

ar_status ari_mpi_meeting_create(ari_mpi_meeting **gives, ari_mpi *p, ari_member *m, int tag_out, int tag_in)
{
    const size_t n = (size_t)m->group->n;
    ari_mpi_meeting *s = calloc(1, sizeof *s);
    if (!s)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a group of %zu ranks", n);
    *s = (ari_mpi_meeting){.p = p, .m = m, .tag_out = tag_out, .tag_in = tag_in};
    s->slot = calloc(n, sizeof *s->slot);
    s->request = calloc(3 * n, sizeof *s->request);
    s->index = calloc(3 * n, sizeof *s->index);
    bool good = s->slot && s->request && s->index;
    for (size_t i = 0; good && i < n; i++) {
        s->slot[i].room = ARI_MPI_FIRST_BYTES;
        s->slot[i].bytes = malloc(ARI_MPI_FIRST_BYTES);
        good = s->slot[i].bytes != NULL;
    }
    if (!good) {
        ari_mpi_meeting_destroy(s);
        return ar_error_set(AR_ERR_MEMORY, "no memory for a group of %zu ranks", n);
    }
    *gives = s;
    return AR_OK;
}

/* --- calls as messages -------------------------------------------------------------------------------------------- */

static ar_status make_room(slot *s, size_t bytes)
{
    if (bytes <= s->room)
        return AR_OK;
    if (bytes > INT32_MAX)
        return ar_error_set(AR_ERR_OVERFLOW, "a call of %zu bytes of counts, operations and tag; %d at most", bytes,
                            INT32_MAX);
    char *larger = realloc(s->bytes, bytes);
    if (!larger)
        return ar_error_set(AR_ERR_MEMORY, "no memory for %zu bytes of a call", bytes);
    s->bytes = larger;
    s->room = bytes;
    return AR_OK;
}

static ar_status write_call(slot *s, const ari_call *call, int n, int context)
{
    head h = {.context = (uint64_t)context};
    size_t bytes = 0;
    AR_TRY(ari_call_encoded_bytes(&bytes, call, n));
    AR_TRY(ari_add_size(&bytes, bytes, sizeof h));
    AR_TRY(make_room(s, bytes));
    h.bytes = bytes;
    memcpy(s->bytes, &h, sizeof h);
    ari_call_encode(s->bytes + sizeof h, call, n);
    return AR_OK;
}

static head head_of(const slot *s)
{
    head h;
    memcpy(&h, s->bytes, sizeof h);
    return h;
}

static ar_status read_call(slot *s, ari_call *call, int n)
{
    free(s->p2p);
    return ari_call_decode(call, &s->p2p, s->bytes + sizeof(head), (size_t)head_of(s).bytes - sizeof(head), n);
}

/* --- the meeting -------------------------------------------------------------------------------------------------- */

static ar_status send_to_all(ari_mpi_meeting *s)
{
    const ari_group *g = s->m->group;
    const slot *own = &s->slot[s->m->index];
    const size_t bytes = (size_t)head_of(own).bytes, first = bytes < ARI_MPI_FIRST_BYTES ? bytes : ARI_MPI_FIRST_BYTES;
    for (int k = 1; k < g->n; k++) {
        const int to = (s->m->index + k) % g->n;
        AR_TRY(ari_mpi_send(s->p, own->bytes, first, g->rank[to], s->tag_out, &s->request[g->n + to]));
        if (bytes > first)
            AR_TRY(ari_mpi_send(s->p, own->bytes + first, bytes - first, g->rank[to], s->tag_out,
                                &s->request[2 * g->n + to]));
    }
    return AR_OK;
}

static ar_status begin(ari_mpi_meeting *s)
{
    const ari_group *g = s->m->group;
    for (int i = 0; i < 3 * g->n; i++)
        s->request[i] = MPI_REQUEST_NULL;
    for (int i = 0; i < g->n; i++) {
        s->slot[i].whole = false;
        if (i != s->m->index)
            AR_TRY(ari_mpi_receive(s->p, s->slot[i].bytes, ARI_MPI_FIRST_BYTES, g->rank[i], s->tag_in, &s->request[i]));
    }
    return send_to_all(s);
}

/* A message of member i has come: its first part, or its rest. */
static ar_status arrived(ari_mpi_meeting *s, int i)
{
    slot *from = &s->slot[i];
    const size_t bytes = (size_t)head_of(from).bytes;
    if (!from->whole && bytes > ARI_MPI_FIRST_BYTES) {
        from->whole = true;
        AR_TRY(make_room(from, bytes));
        return ari_mpi_receive(s->p, from->bytes + ARI_MPI_FIRST_BYTES, bytes - ARI_MPI_FIRST_BYTES,
                               s->m->group->rank[i], s->tag_in, &s->request[i]);
    }
    from->whole = true;
    atomic_store(&s->m->group->slot[i].entered, s->m->seq);
    return read_call(from, &s->m->group->slot[i].call, s->m->group->n);
}

static void fail_late(ari_mpi_meeting *s, const ari_call *call, uint64_t waited_ns)
{
    const ari_group *g = s->m->group;
    const ari_mpi_place at = {s->p, s->m, call, "in"};
    int n = 0;
    for (int i = 0; i < g->n; i++) {
        if (atomic_load(&g->slot[i].entered) < s->m->seq)
            s->index[n++] = i;
    }
    ari_mpi_late(&at, waited_ns, s->index, n);
}

/* What a rank called before it returned may be on its way still. */
#define WAY_OUT_NS UINT64_C(200000000)

/* Ends the world if a member that has not come never will. */
static bool look_for_returned(ari_mpi_meeting *s, const ari_call *call)
{
    const ari_group *g = s->m->group;
    for (int i = 0; i < g->n; i++) {
        const uint64_t since = ari_mpi_control_returned_ns(s->p, g->rank[i]);
        if (since == 0 || atomic_load(&g->slot[i].entered) >= s->m->seq || ari_now_ns() - since < WAY_OUT_NS)
            continue;
        char what[384], why[768];
        ari_member_describe(s->m, call, what, sizeof what);
        snprintf(why, sizeof why, "rank %d returned while rank %d waits for it in %s", g->rank[i], s->m->rank, what);
        ari_mpi_control_fail(s->p, g, AR_ERR_MISMATCH, why);
        return true;
    }
    return false;
}

static ar_status receive_all(ari_mpi_meeting *s, const ari_call *call)
{
    const int n = s->m->group->n;
    ari_mpi_wait w = {0};
    for (;;) {
        int ended = 0;
        AR_TRY(ari_mpi_test(s->p, s->request, 3 * n, &ended, s->index));
        if (ended == MPI_UNDEFINED)
            return AR_OK;
        for (int i = 0; i < ended; i++) {
            if (s->index[i] < n)
                AR_TRY(arrived(s, s->index[i]));
        }
        if (ended > 0) {
            w.turns = 0;
            continue;
        }
        const ari_mpi_turn_end end = ari_mpi_turn(s->p, &w);
        if (end == ARI_MPI_LATE)
            fail_late(s, call, w.waited_ns);
        if (end != ARI_MPI_GO_ON || (w.start_ns && look_for_returned(s, call)))
            return AR_ERR_ABORTED;
    }
}

static ar_status compare(ari_mpi_meeting *s)
{
    char why[768];
    if (ari_calls_compare(s->m->group, why, sizeof why) == AR_OK)
        return AR_OK;
    ari_mpi_control_fail(s->p, s->m->group, AR_ERR_MISMATCH, why);
    return AR_ERR_ABORTED;
}

int ari_mpi_meeting_context(const ari_mpi_meeting *s)
{
    uint64_t most = 0;
    for (int i = 0; i < s->m->group->n; i++) {
        const uint64_t context = head_of(&s->slot[i]).context;
        most = context > most ? context : most;
    }
    return (int)most;
}

void ari_mpi_part(ari_mpi_meeting *s, bool finished)
{
    ari_world_end(s->m, finished);
    atomic_store(&s->m->in, 0);
}

static ar_status used_twice(ari_mpi_meeting *s, const ari_call *call)
{
    char text[160], why[768];
    ari_call_describe(call, s->m->group->n, text, sizeof text);
    snprintf(why, sizeof why, "rank %d calls %s while another of its threads is in a call of the same communicator",
             s->m->rank, text);
    ari_mpi_control_fail(s->p, NULL, AR_ERR_ARG, why);
    return ari_world_echo(s->p->world, s->m->rank, NULL);
}

ar_status ari_mpi_meet(ari_mpi_meeting *s, const ari_call *call)
{
    ari_member *m = s->m;
    const ari_mpi_place at = {s->p, m, call, "in"};
    if (ari_mpi_control_has_failed(s->p)) {
        ari_mpi_control_finish(s->p);
        return ari_world_echo(s->p->world, m->rank, NULL);
    }
    if (atomic_exchange(&m->in, 1) != 0)
        return used_twice(s, call);
    const ar_status written = write_call(&s->slot[m->index], call, m->group->n, atomic_load(&s->p->next_context));
    if (written != AR_OK) {
        atomic_store(&m->in, 0);
        return written;
    }
    m->seq++;
    m->group->slot[m->index].call = *call;
    m->group->slot[m->index].call.on = NULL; /* whose memory it is does not matter to others */
    atomic_store(&m->group->slot[m->index].entered, m->seq);
    ari_world_begin(m, call);
    ar_status st = begin(s);
    if (st == AR_OK)
        st = receive_all(s, call);
    if (st == AR_OK)
        st = compare(s);
    if (st == AR_OK)
        return AR_OK;
    if (st != AR_ERR_ABORTED)
        ari_mpi_broken(&at, st);
    ari_mpi_drop(s->p, s->request, 3 * m->group->n);
    ari_mpi_part(s, false);
    return ari_world_echo(s->p->world, m->rank, NULL);
}
