/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_MPI_MPI_IMPL_H
#define ARI_MPI_MPI_IMPL_H

#include <mpi.h>
#include <pthread.h>
#include <stdatomic.h>

#include "mpi/process.h"
#include "ref/comm/rendezvous_impl.h"

/* Ranks as MPI processes. Shared by the files of this folder alone: process.c (what the launcher started), wire.c
 * (calls of MPI, and waiting), control.c (how a failure ends all processes), meeting.c (what the ranks of a group
 * call), comm.c, ring.c and direct.c (what moves).
 *
 * - Every call of MPI returns at once: who waits polls, so that a failure anywhere, a timeout or an abort ends every
 *   wait, and communicators do not wait for each other.
 * - All data go through one MPI communicator. An ar_comm is a context: a number that no two communicators of a process
 *   share, and with it some tags. So making and destroying one needs nothing collective of MPI, which might not return.
 * - Each process mirrors the world: groups, and what each member called, filled in as it is received. Reports and
 *   comparisons are those of the simulator. */

typedef struct ari_mpi_control ari_mpi_control;

typedef struct ari_mpi {
    ar_process base; /* first */
    MPI_Comm data, control;
    bool owns_mpi;        /* MPI was initialised here, and ends here */
    bool one_at_a_time;   /* the library takes calls of one thread at a time */
    pthread_mutex_t turn; /* whose turn it is then */
    int last_context;     /* the largest that this MPI has tags for */
    atomic_int next_context;
    ari_world *world;
    ari_member host; /* of the group of all: what is moved for the host, in reports */
    ari_mpi_control *control_of;
    atomic_bool abandoned; /* requests that no peer will answer are left behind */
    /* Held for each call of MPI; for writing to close: what was left behind reads and writes memory that is about to be
     * freed, in whichever call a peer's late answer comes. So there are no more calls. */
    pthread_rwlock_t calls;
    bool closed;
} ari_mpi;

/* What a context's tags are for. */
typedef enum ari_mpi_use {
    ARI_MPI_CALL,     /* what a member calls */
    ARI_MPI_DATA,     /* of a collective */
    ARI_MPI_SENDER,   /* what the sender of a message calls */
    ARI_MPI_RECEIVER, /* what its receiver calls */
    ARI_MPI_MESSAGE,  /* the data of a message */
    ARI_MPI_SPLIT,
    ARI_MPI_HOST,
    ARI_MPI_USES
} ari_mpi_use;
static inline int ari_mpi_tag(int context, ari_mpi_use use)
{
    return context * ARI_MPI_USES + (int)use;
}

/* --- wire.c ------------------------------------------------------------------------------------------------------- */

/** Most of the first message with which a member sends its call, which is short everywhere. */
enum { ARI_MPI_FIRST_BYTES = 512 };
/** Longest message: counts of MPI are int, and each one that arrives shows that something moves. */
enum { ARI_MPI_PIECE_BYTES = 1 << 26 };

/* All give AR_ERR_IO, with MPI's words, where MPI fails. `bytes` fits an int. */
AR_NODISCARD ar_status ari_mpi_send(ari_mpi *p, const void *from, size_t bytes, int rank, int tag, MPI_Request *gives);
AR_NODISCARD ar_status ari_mpi_receive(ari_mpi *p, void *to, size_t bytes, int rank, int tag, MPI_Request *gives);
/** *ended: how many of the requests have ended by now, which are MPI_REQUEST_NULL from then on; MPI_UNDEFINED: all had
 *  before. index [n]: which. */
AR_NODISCARD ar_status ari_mpi_test(ari_mpi *p, MPI_Request *requests, int n, int *ended, int *index);
/** The requests of a call that failed: receptions are cancelled, and what is under way gets a moment to end. Where it
 *  does not, MPI is called no more. */
void ari_mpi_drop(ari_mpi *p, MPI_Request *requests, int n);

/** Before a call of MPI; false: there are to be no more. Where true: ari_mpi_leave after it. */
AR_NODISCARD bool ari_mpi_enter(ari_mpi *p);
void ari_mpi_leave(ari_mpi *p);
ar_status ari_mpi_error(int rc, const char *what);

typedef struct ari_mpi_wait {
    unsigned turns;
    uint64_t start_ns; /* since nothing has moved; 0: not looked yet */
    uint64_t waited_ns;
} ari_mpi_wait;
typedef enum ari_mpi_turn_end { ARI_MPI_GO_ON, ARI_MPI_LATE, ARI_MPI_FAILED } ari_mpi_turn_end;
/** One turn of a wait in which nothing moved: receives what other processes send, and gives the core away more and more. */
AR_NODISCARD ari_mpi_turn_end ari_mpi_turn(ari_mpi *p, ari_mpi_wait *w);

/* Who waits, where: for reports. */
typedef struct ari_mpi_place {
    ari_mpi *p;
    ari_member *member;
    const ari_call *call;
    const char *where; /* "in", "in the middle of" */
} ari_mpi_place;
/** Ends the world: this member waits for these members of its group, for too long. members [n]: ranks afterwards. */
void ari_mpi_late(const ari_mpi_place *at, uint64_t waited_ns, int *members, int n);
/** Ends the world with the error that has just been set, in the middle of a call. */
void ari_mpi_broken(const ari_mpi_place *at, ar_status st);
/** Waits for all requests; member[i]: of the group, whom request i needs. An error: the world has ended, and the
 *  requests are dropped. */
AR_NODISCARD ar_status ari_mpi_await(const ari_mpi_place *at, MPI_Request *requests, const int *member, int n);

/* --- control.c ---------------------------------------------------------------------------------------------------- */

AR_NODISCARD ar_status ari_mpi_control_create(ari_mpi *p);
/** Notifies the others that this process ends, and waits for the same from them, or for a failure and then not for
 *  long. True: all have; then no process waits in vain in MPI_Finalize. */
bool ari_mpi_control_goodbye(ari_mpi *p);
void ari_mpi_control_destroy(ari_mpi *p);
/** Receives what has come, sends what is due. Any thread. */
void ari_mpi_control_turn(ari_mpi *p);
/** Whether a process has failed, as far as it is known here. */
bool ari_mpi_control_has_failed(const ari_mpi *p);
/** Until the world has ended here: soon, as it has failed. */
void ari_mpi_control_finish(ari_mpi *p);
/** Ends the world; `with`: its ranks get `st`, as this one does; NULL: others AR_ERR_ABORTED. Returns when all that
 *  answer know. */
void ari_mpi_control_fail(ari_mpi *p, const ari_group *with, ar_status st, const char *line);
/** Since when it is known that this rank will call nothing more; 0: it may. */
uint64_t ari_mpi_control_returned_ns(const ari_mpi *p, int rank);

/* --- meeting.c ---------------------------------------------------------------------------------------------------- */

/* What the members of a group call, one collective after the other. */
typedef struct ari_mpi_meeting ari_mpi_meeting;
/** Of member m's group. tag_out: of what this member sends; tag_in: of what it receives. */
AR_NODISCARD ar_status ari_mpi_meeting_create(ari_mpi_meeting **gives, ari_mpi *p, ari_member *m, int tag_out,
                                              int tag_in);
void ari_mpi_meeting_destroy(ari_mpi_meeting *s);
/** Returns when all members have come with the same call. Errors: as ari_member_enter; then this member is out. */
AR_NODISCARD ar_status ari_mpi_meet(ari_mpi_meeting *s, const ari_call *call);
/** What members sent with the call that was agreed upon last: the largest context that is the first one free. */
int ari_mpi_meeting_context(const ari_mpi_meeting *s);
/** This member is out of the call. */
void ari_mpi_part(ari_mpi_meeting *s, bool finished);

/* --- comm.c ------------------------------------------------------------------------------------------------------- */

typedef struct ari_mpi_channel ari_mpi_channel;

typedef struct ari_mpi_comm {
    ar_comm base; /* first */
    ari_mpi *p;
    int context;
    ari_member member;
    ari_mpi_meeting *meeting;
    void *scratch; /* grows */
    size_t scratch_bytes;
    pthread_mutex_t lock; /* of the channels: several queues of a rank may ask at once */
    ari_mpi_channel *channels;
} ari_mpi_comm;

/** Slot comm of the process. */
AR_NODISCARD ar_status ari_mpi_comm_create(ar_comm **gives, ar_process *p, ar_device *d);
AR_NODISCARD ar_status ari_mpi_reserve(ari_mpi_comm *c, size_t bytes);

/* --- what moves, once the call is agreed upon --------------------------------------------------------------------- */

/** Bytes that a ring receives into, beside the output. */
size_t ari_mpi_ring_scratch(const ari_mpi_comm *c, const ari_call *call);
AR_NODISCARD ar_status ari_mpi_ring(ari_mpi_comm *c, const ari_call *call);
/** What goes from its source to its target at once. at->call is what reports name; moved: counts, or NULL. An error: the
 *  world has ended. */
AR_NODISCARD ar_status ari_mpi_direct(const ari_mpi_place *at, int tag, const ari_call *call, ari_moved *moved);

#endif
