/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "anyrank/queue.h"
#include "gpu/cluster/nccl/comm.h"
#include "gpu/cluster/process/agree.h"
#include "gpu/native.h"
#include "ref/core/size.h"

ARI_OWNER(ar_queue, ar_queue_destroy)

/* Creation of communicators. All members meet through the store, which names a missing one. Then all enter NCCL,
 * which splits an existing communicator or makes one from the first member's id. NCCL has no timeout: the watcher
 * ends calls that never end. The last step is a call on the new communicator, so that no setup remains to run during
 * other calls. */

#define WORLD_ID UINT64_C(1)
/* Rendezvous of a group before its first collective. */
enum { MEET_PLACES = 0 };
#define MEET_ID UINT64_MAX

static const ari_comm_ops comm_ops;

/* --- a communicator ----------------------------------------------------------------------------------------------- */

static void free_comm(ari_nccl_comm *c)
{
    ari_nccl_world *w = c->world;
    pthread_mutex_lock(&w->lock);
    for (ari_nccl_comm **slot = &w->comms; *slot; slot = &(*slot)->next) {
        if (*slot == c) {
            *slot = c->next;
            break;
        }
    }
    for (int i = 0; c->message && i < 2 * c->base.size; i++)
        ari_flight_remove(&w->flight, c->message[i]);
    ari_flight_remove(&w->flight, c->group);
    pthread_mutex_unlock(&w->lock);
    w->device->ops->free(w->device, NULL, c->word);
    pthread_mutex_destroy(&c->use);
    free(c->message);
    free(c);
    ari_nccl_world_release(w);
}

/* Runs the first half of NCCL's shutdown, in which all members take part. If a member is missing, the other half is an
 * abort. */
static ar_status finalize(ari_nccl_comm *c)
{
    const ari_nccl *n = &c->world->nccl;
    pthread_mutex_lock(&c->use);
    ar_status st = ari_nccl_check_comm(c);
    if (st == AR_OK)
        st = ari_nccl_check(n, n->CommFinalize(c->comm), c->comm, "NCCL");
    pthread_mutex_unlock(&c->use);
    return st == AR_OK ? ari_nccl_settle(c, c->world->timeout_ns) : st;
}

static void nccl_destroy(ar_comm *base)
{
    ari_nccl_comm *c = (ari_nccl_comm *)base;
    ari_nccl_world *w = c->world;
    const ari_outcome outcome = ari_outcome_of(AR_ERR_ABORTED); /* the caller's message, in case of a cleanup after
                                                                   an error */
    ari_nccl_world_forget(w, c);                                /* its calls are done, so nothing is lost */
    const ar_status st = base->size > 1 ? finalize(c) : AR_OK;
    pthread_mutex_lock(&w->lock);
    c->let_go = true; /* the watcher no longer looks at it */
    pthread_mutex_unlock(&w->lock);
    pthread_mutex_lock(&c->use); /* the watcher may be aborting it right now */
    void *comm = atomic_exchange(&c->comm, NULL);
    if (comm)
        (void)(st == AR_OK ? w->nccl.CommDestroy(comm) : w->nccl.CommAbort(comm));
    pthread_mutex_unlock(&c->use);
    free_comm(c);
    (void)ari_outcome_status(&outcome);
}

/* Creates a communicator without NCCL's part. */
static ar_status new_comm(ari_nccl_comm **result, ari_nccl_world *w, uint64_t id, const int *rank, int n, int index)
{
    ari_nccl_comm *c = NULL;
    ar_status st = AR_OK;
    AR_TRY(ari_alloc_zero((void **)&c, 1, sizeof *c, "a communicator"));
    ari_comm_init(&c->base, &comm_ops, index, n);
    c->world = w;
    c->id = id;
    pthread_mutex_init(&c->use, NULL);
    atomic_fetch_add(&w->refs, 1);
    AR_TRY_TO(failed, st, ari_alloc_zero((void **)&c->message, 2 * (size_t)n, sizeof *c->message, "ranks of a group"));
    pthread_mutex_lock(&w->lock);
    st = ari_flight_add(&w->flight, &c->group, id, rank, n);
    if (st == AR_OK) {
        c->next = w->comms;
        w->comms = c;
    }
    pthread_mutex_unlock(&w->lock);
    AR_TRY_TO(failed, st, st);
    *result = c;
    return AR_OK;
failed:
    free_comm(c);
    return st;
}

/* --- entering NCCL ------------------------------------------------------------------------------------------------ */

/* The GPU is the calling thread's from then on. */
static ar_status choose_gpu(ari_nccl_world *w)
{
    return w->nccl.emulated_gpu ? AR_OK : ari_gpu_choose(w->device);
}

/* NCCL allocates memory besides the device's own. */
static ar_status prepare_to_enter(ari_nccl_world *w)
{
    AR_TRY(choose_gpu(w));
    return w->nccl.emulated_gpu ? AR_OK : ari_gpu_trim(w->device);
}

/* Joins by an id, for which the members meet once more. */
static ar_status enter_by_id(ari_nccl_comm *c)
{
    ari_nccl_world *w = c->world;
    const int n = c->base.size, r = c->base.rank;
    ari_nccl_config config = {.size = sizeof config, .magic = 0xcafebeef, .version = ARI_NCCL_OLDEST, .blocking = 0};
    ari_nccl_id id;
    ari_gather_result gathered;
    if (r == 0)
        AR_TRY(ari_nccl_check(&w->nccl, w->nccl.GetUniqueId(&id), NULL, "NCCL gives no id"));
    AR_TRY(ari_store_exchange(w->store, c->id, MEET_ID, c->group->rank, n, &id, r == 0 ? sizeof id : 0, &gathered));
    const bool is_complete = gathered.start[1] - gathered.start[0] == sizeof id;
    if (is_complete)
        memcpy(&id, gathered.at, sizeof id);
    free(gathered.memory);
    if (!is_complete)
        return ar_error_set(AR_ERR_INTERNAL, "rank %d gives no id of NCCL's", c->group->rank[0]);
    AR_TRY(prepare_to_enter(w));
    pthread_mutex_lock(&c->use);
    ar_status st = ari_nccl_world_status(w); /* after a failure no thread would abort it */
    if (st == AR_OK) {
        const int result = w->nccl.CommInitRankConfig(&c->created, n, id, r, &config);
        st = ari_nccl_check(&w->nccl, result, NULL, "NCCL cannot make a communicator");
    }
    atomic_store(&c->comm, st == AR_OK ? c->created : NULL);
    pthread_mutex_unlock(&c->use);
    return st == AR_OK ? ari_nccl_settle(c, 0) : st;
}

/* Splits the members' existing communicator, in which all members of `parent` take part; made NULL: for ranks in no
 * group or in one of their own. NCCL requires that nothing else is in progress there. The result is stored in `parent`,
 * which outlives NCCL's thread: `child` is freed as soon as an error is known. */
static ar_status enter_by_split(ari_nccl_comm *child, ari_nccl_comm *parent, int color)
{
    ari_nccl_world *w = parent->world;
    AR_TRY(ari_nccl_world_drain(w, parent));
    AR_TRY(prepare_to_enter(w));
    pthread_mutex_lock(&parent->use);
    ar_status st = ari_nccl_check_comm(parent);
    if (st == AR_OK) {
        const int result = w->nccl.CommSplit(parent->comm, child ? color : ARI_NCCL_NO_COLOR,
                                             child ? child->base.rank : 0, &parent->created, NULL);
        st = ari_nccl_check(&w->nccl, result, parent->comm, "NCCL cannot split a communicator");
    }
    pthread_mutex_unlock(&parent->use);
    if (st == AR_OK)
        st = ari_nccl_settle(parent, 0); /* the result is available then */
    if (st != AR_OK || !child)
        return st;
    pthread_mutex_lock(&child->use);
    atomic_store(&child->comm, parent->created);
    st = ari_nccl_world_status(w);
    pthread_mutex_unlock(&child->use); /* if the world has failed, nccl_destroy aborts it */
    return st == AR_OK ? ari_nccl_settle(child, 0) : st;
}

/* Sends a number to each peer and receives one from each, after the word: NCCL creates connections for such calls only
 * now. */
static ar_status call_all_peers(ari_nccl_comm *c, ar_queue *q)
{
    const size_t peers = (size_t)c->base.size - 1;
    ARI_OWNED ar_p2p *messages = NULL;
    AR_TRY(ari_alloc((void **)&messages, 2 * peers, sizeof *messages, "messages to peers"));
    for (size_t i = 0; i < peers; i++) {
        const int peer = (int)i < c->base.rank ? (int)i : (int)i + 1;
        messages[i] = (ar_p2p){.peer = peer, .send = true, .buf = c->word, .count = 1};
        messages[peers + i] = (ar_p2p){.peer = peer, .buf = {(int32_t *)c->word.ptr + 1 + i}, .count = 1};
    }
    const ari_call call = {
        .kind = ARI_EXCHANGE, .dtype = AR_I32, .p2p = messages, .count = 2 * peers, .queue = q, .tag = ""};
    AR_TRY(ari_nccl_enqueue(c, &call));
    return ar_queue_sync(q, 0);
}

/* Makes the first calls on a temporary stream, so that NCCL and CUDA create now what they would otherwise create at
 * first use. Here all members do so in the same order and nothing else waits. During another collective it could wait
 * for the GPU, whose kernel waits for a rank that waits for this one. */
static ar_status warm_up(ari_nccl_comm *c)
{
    ari_nccl_world *w = c->world;
    const ar_device_ops *dev = w->device->ops;
    const size_t bytes = (size_t)c->base.size * sizeof(int32_t);
    ARI_OWNED_BY(ar_queue_destroy) ar_queue *q = NULL;
    AR_TRY(dev->queue_create(w->device, &q, AR_QUEUE_INLINE, "nccl"));
    ari_queue_heed(q, w->failure);
    const ari_call sum = {.kind = ARI_BARRIER, .queue = q, .tag = ""};
    AR_TRY(dev->alloc(w->device, q, &c->word, bytes));
    AR_TRY(dev->zero(w->device, q, c->word, bytes));
    if (c->base.size > 1) {
        AR_TRY(ari_nccl_enqueue(c, &sum));
        AR_TRY(call_all_peers(c, q));
    }
    return ar_queue_sync(q, 0);
}

/* --- split -------------------------------------------------------------------------------------------------------- */

static ar_status make_split(ari_nccl_comm **result, ari_nccl_comm *c, const ari_call *call)
{
    ari_nccl_world *w = c->world;
    ari_calls calls;
    int *rank = NULL, index = 0;
    const uint64_t number = ++c->splits;
    if (c->base.size == 1) {
        if (call->color < 0)
            return AR_OK;
        AR_TRY(new_comm(result, w, ari_flight_id(c->id, number, 0), c->group->rank, 1, 0));
        return warm_up(*result);
    }
    AR_TRY(ari_calls_exchange(&calls, w->store, ari_flight_id(c->id, UINT64_MAX, UINT64_MAX), number, c->group->rank,
                              c->base.size, call));
    ar_status st = ari_alloc((void **)&rank, (size_t)c->base.size, sizeof *rank, "ranks of a group");
    if (st == AR_OK && call->color >= 0) {
        const int n = ari_group_members_of(&calls.group, call->color, rank);
        for (int i = 0; i < n; i++) {
            index = rank[i] == c->base.rank ? i : index;
            rank[i] = c->group->rank[rank[i]];
        }
        st = new_comm(result, w, ari_flight_id(c->id, number, (uint64_t)call->color + 1), rank, n, index);
    }
    ari_calls_fini(&calls);
    free(rank);
    ari_nccl_comm *child = st == AR_OK && *result && (*result)->base.size > 1 ? *result : NULL;
    if (st == AR_OK && w->nccl.CommSplit)
        st = enter_by_split(child, c, call->color);
    else if (st == AR_OK && child)
        st = enter_by_id(child);
    return st == AR_OK && *result ? warm_up(*result) : st;
}

static ar_status nccl_split(ar_comm **result, ar_comm *base, int color, int key)
{
    ari_nccl_comm *c = (ari_nccl_comm *)base, *child = NULL;
    ari_nccl_world *w = c->world;
    const ari_call call = {.kind = ARI_SPLIT, .dtype = AR_U8, .color = color, .key = key, .tag = ""};
    ari_pending *p = NULL;
    AR_TRY(ari_nccl_world_status(w));
    AR_TRY(ari_nccl_world_enter(w, &p, c, c->group, &call));
    ar_status st = make_split(&child, c, &call);
    if (st == AR_OK)
        st = ari_nccl_world_enqueued(w, p, NULL);
    if (st == AR_OK) {
        *result = child ? &child->base : NULL;
        return AR_OK;
    }
    st = ari_nccl_failed(c, p, st);
    if (child)
        nccl_destroy(&child->base); /* its message, if any, describes the same failure */
    return st;
}

static ar_status nccl_error(const ar_comm *c, const char **message)
{
    *message = "";
    return ari_failure_get(((const ari_nccl_comm *)c)->world->failure, message);
}

static void nccl_abort(ar_comm *c, ar_status st, const char *why)
{
    ari_nccl_world *w = ((ari_nccl_comm *)c)->world;
    char text[1024];
    snprintf(text, sizeof text, "rank %d aborted: %s", w->rank, why);
    ari_nccl_world_end(w, st, text);
}

static const ari_comm_ops comm_ops = {
    .run = ari_nccl_run, .split = nccl_split, .error = nccl_error, .abort = nccl_abort, .destroy = nccl_destroy};

/* --- the world's own ---------------------------------------------------------------------------------------------- */

/* Location of a process. */
typedef struct place {
    char host[192]; /* name of the machine or container */
    char gpu[64];   /* the GPU's bus id */
    int32_t version, shares;
} place;

static void read_host(char *host, size_t size)
{
    char name[64] = "", boot[64] = "";
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (f && !fgets(boot, sizeof boot, f))
        boot[0] = '\0';
    if (f)
        fclose(f);
    if (gethostname(name, sizeof name - 1) != 0)
        name[0] = '\0';
    boot[strcspn(boot, "\n")] = '\0';
    snprintf(host, size, "%s %s", name, boot);
}

static ar_status read_place(place *local_place, ari_nccl_world *w, const ar_process *p)
{
    memset(local_place, 0, sizeof *local_place);
    read_host(local_place->host, sizeof local_place->host);
    local_place->version = w->nccl.version;
    local_place->shares = p->options.share_gpus;
    AR_TRY(choose_gpu(w));
    if (!w->nccl.emulated_gpu)
        return ari_gpu_bus_id(local_place->gpu, sizeof local_place->gpu);
    snprintf(local_place->gpu, sizeof local_place->gpu, "%s", w->nccl.emulated_gpu());
    return AR_OK;
}

static place place_of(const ari_gather_result *gathered, int i)
{
    place peer_place = {.host = ""};
    if (gathered->start[i + 1] - gathered->start[i] == sizeof peer_place)
        memcpy(&peer_place, gathered->at + gathered->start[i], sizeof peer_place);
    peer_place.host[sizeof peer_place.host - 1] = peer_place.gpu[sizeof peer_place.gpu - 1] = '\0';
    return peer_place;
}

/* NCCL accepts two processes on one GPU only if they seem to be on different hosts, and then connects them through the
 * loopback interface. */
static void pretend_hosts(const ari_nccl_world *w, bool one_host)
{
    char id[64];
    snprintf(id, sizeof id, "anyrank-%d-%ld", w->rank, (long)getpid());
    setenv("NCCL_HOSTID", id, 0);
    if (one_host)
        setenv("NCCL_SOCKET_IFNAME", "lo", 0);
}

static ar_status compare_places(const ari_nccl_world *w, const ari_gather_result *gathered)
{
    bool shared = false, one_host = true;
    const place zero = place_of(gathered, 0);
    for (int a = 0; a < w->size; a++) {
        const place x = place_of(gathered, a);
        one_host = one_host && strcmp(x.host, zero.host) == 0;
        if (x.version != zero.version)
            return ar_error_set(AR_ERR_ARG, "rank 0 has NCCL %d and rank %d has NCCL %d: all processes need the same",
                                zero.version, a, x.version);
        for (int b = a + 1; b < w->size; b++) {
            const place y = place_of(gathered, b);
            if (strcmp(x.host, y.host) != 0 || strcmp(x.gpu, y.gpu) != 0)
                continue;
            shared = true;
            if (!x.shares || !y.shares)
                return ar_error_set(AR_ERR_ARG,
                                    "ranks %d and %d are both on the GPU %s of %.*s: start one process for each GPU, "
                                    "or say that they are to share it",
                                    a, b, x.gpu, (int)strcspn(x.host, " "), x.host);
        }
    }
    if (shared)
        pretend_hosts(w, one_host);
    return AR_OK;
}

static ar_status compare_all(ari_nccl_world *w, const ar_process *p, const int *rank)
{
    place local_place;
    ari_gather_result gathered;
    const ar_status read_status = read_place(&local_place, w, p);
    if (read_status != AR_OK) /* otherwise the other ranks would wait */
        return ari_nccl_world_fail(w, read_status);
    AR_TRY(ari_store_exchange(w->store, WORLD_ID, MEET_PLACES, rank, w->size, &local_place, sizeof local_place,
                              &gathered));
    const ar_status st = compare_places(w, &gathered);
    free(gathered.memory);
    return st;
}

static ar_status make_world(ari_nccl_comm **result, ari_nccl_world *w, const ar_process *p)
{
    const ari_call call = {.kind = ARI_SPLIT, .dtype = AR_U8, .tag = "the world"};
    ARI_OWNED int *rank = NULL;
    ari_pending *begun = NULL;
    AR_TRY(ari_alloc((void **)&rank, (size_t)w->size, sizeof *rank, "ranks"));
    for (int i = 0; i < w->size; i++)
        rank[i] = i;
    AR_TRY(new_comm(result, w, WORLD_ID, rank, w->size, w->rank));
    AR_TRY(ari_nccl_world_enter(w, &begun, *result, (*result)->group, &call));
    if (w->size > 1) {
        AR_TRY(compare_all(w, p, rank));
        AR_TRY(enter_by_id(*result));
    }
    AR_TRY(warm_up(*result));
    return ari_nccl_world_enqueued(w, begun, NULL);
}

ar_status ari_nccl_comm_create(ar_comm **result, ar_process *p, ar_device *d)
{
    ari_nccl_world *w = NULL;
    ari_nccl_comm *c = NULL;
    ar_status st = ari_nccl_world_create(&w, p, d);
    if (st == AR_OK)
        st = make_world(&c, w, p);
    if (st == AR_OK) {
        *result = &c->base;
        ari_nccl_world_release(w);
        return AR_OK;
    }
    const ari_outcome outcome = ari_outcome_of(st);
    if (ari_store_status(p->store) == AR_OK)
        ari_store_fail(p->store, st, outcome.message);
    if (c)
        nccl_destroy(&c->base);
    ari_nccl_world_release(w);
    return ari_outcome_status(&outcome);
}
