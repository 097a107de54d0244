/* SPDX-License-Identifier: Apache-2.0 */
/* Every collective over the processes that mpirun has started, against its definition, on the host and in the emulated
 * device's memory. tests/mpi/mpi_test.py starts it. Exit status 0: all were right; 77: there is no MPI in this build.
 *
 *     mpirun -n 4 collectives [large]    large: one message of more than 2^31 bytes instead */
#include "anyrank/comm.h"
#include "gpu/cluster/process/process_private.h"
#include "gpu/device_private.h"
#include "ref/core/queue_private.h"
#include "tests/sim/batch.h"

#define REQUIRE(call)                                                                                        \
    do {                                                                                                     \
        const ar_status st_ = (call);                                                                        \
        if (st_ != AR_OK) {                                                                                  \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, ar_status_name(st_), ar_error_message()); \
            _Exit(1);                                                                                        \
        }                                                                                                    \
    } while (0)

enum { LANES = 3, ROUNDS = 8, ELEMENTS = 1000 };

typedef struct lane {
    ar_comm *c;
    ar_queue *q;
    coll_case k[ROUNDS];
} lane;

static void lane_begin(lane *l, ar_comm *c, int key, uint64_t seed)
{
    REQUIRE(ar_comm_split(&l->c, c, 0, key));
    REQUIRE(ar_queue_create(&l->q, AR_QUEUE_THREAD, "lane"));
    for (int i = 0; i < ROUNDS; i++) {
        draw_case(&l->k[i], &seed, ar_comm_size(c), ELEMENTS);
        case_init(&l->k[i], seed);
    }
}

static void lane_end(lane *l)
{
    REQUIRE(ar_queue_sync(l->q, 0));
    for (int i = 0; i < ROUNDS; i++) {
        REQUIRE(expect_right(&l->k[i], ar_comm_rank(l->c)));
        case_fini(&l->k[i]);
    }
    ar_queue_destroy(l->q);
    ar_comm_destroy(l->c);
}

/* Each on a thread of its own, begun in another order on each rank. */
static void at_once(ar_comm *c)
{
    static lane lanes[LANES];
    const int r = ar_comm_rank(c);
    for (int i = 0; i < LANES; i++)
        lane_begin(&lanes[i], c, i == 1 ? -r : 0, (uint64_t)(1000 + i));
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < LANES; i++) {
            const lane *l = &lanes[(i + r) % LANES];
            REQUIRE(case_call(&l->k[round], l->c, l->q, "lane"));
        }
    }
    for (int i = 0; i < LANES; i++)
        lane_end(&lanes[i]);
}

/* A thread of a rank splits while others do: each group has messages of its own all the same. */
static ar_status split_and_call(void *arg, ar_queue *on)
{
    const lane *l = arg;
    for (int i = 0; i < ROUNDS; i++) {
        ar_comm *part = NULL;
        AR_TRY(ar_comm_split(&part, l->c, 1, 0));
        const ar_status st = case_call(&l->k[i], part, on, "part");
        ar_comm_destroy(part);
        AR_TRY(st);
    }
    return AR_OK;
}

static void splits_at_once(ar_comm *c)
{
    static lane lanes[LANES];
    for (int i = 0; i < LANES; i++)
        lane_begin(&lanes[i], c, 0, (uint64_t)(2000 + i));
    for (int i = 0; i < LANES; i++) {
        lane *l = &lanes[(i + ar_comm_rank(c)) % LANES];
        REQUIRE(ari_queue_chain(l->q, split_and_call, l));
    }
    for (int i = 0; i < LANES; i++)
        lane_end(&lanes[i]);
}

static ar_queue *queue_on(ar_device *d, ar_queue_kind kind)
{
    ar_queue *q = NULL;
    REQUIRE(d ? d->ops->queue_create(d, &q, kind, "cases") : ar_queue_create(&q, kind, "cases"));
    return q;
}

/* d: where the data lie; NULL: on the host. */
static void all_kinds(ar_process *p, ar_device *d)
{
    OWNED(ar_comm_destroy) ar_comm *c = NULL;
    OWNED(ar_queue_destroy) ar_queue *q = queue_on(d, AR_QUEUE_INLINE), *thread = queue_on(d, AR_QUEUE_THREAD);
    REQUIRE(ar_process_comm(&c, p, d));
    REQUIRE(check_groups(c, STRAIGHT, d, q, thread));
    at_once(c);
    splits_at_once(c);
    if (ar_comm_rank(c) == 0)
        printf("%d collectives and more at once %s: as they are defined\n", WORLD_CASES + GROUP_CASES,
               d ? "on the emulated device" : "on the host");
}

static int host_moves(ar_process *p)
{
    const int r = ar_process_rank(p), n = ari_process_size(p);
    char word[16] = "nothing", own[64];
    if (r == 0)
        snprintf(word, sizeof word, "from zero");
    REQUIRE(ari_process_broadcast(p, word, sizeof word));
    const size_t length = (size_t)r * 7;
    memset(own, 'a' + r, sizeof own);
    void *all = NULL;
    size_t sizes[64];
    REQUIRE(ari_process_gather(p, &all, sizes, own, length));
    int wrong = strcmp(word, "from zero") != 0 || (r != 0 && all != NULL);
    const char *at = all;
    for (int i = 0; r == 0 && i < n; i++) {
        wrong += sizes[i] != (size_t)i * 7;
        for (size_t k = 0; k < sizes[i]; k++)
            wrong += *at++ != 'a' + i;
    }
    free(all);
    const int local = ari_process_local_rank(p);
    REQUIRE(ari_process_gather(p, &all, sizes, &local, sizeof local));
    if (r == 0) {
        int machines = 0;
        for (int i = 0; i < n; i++)
            machines += ((const int *)all)[i] == 0;
        printf("%d processes on %d machine%s\n", n, machines, machines == 1 ? "" : "s");
    }
    free(all);
    if (wrong)
        fprintf(stderr, "rank %d: a broadcast or a gather for the host gave something else\n", r);
    return wrong;
}

static int large(ar_process *p)
{
    const size_t count = ((size_t)1 << 31) + 4097;
    const int r = ar_process_rank(p);
    unsigned char *bytes = malloc(count);
    ar_comm *c = NULL;
    ar_queue *q = NULL;
    if (!bytes)
        return 1;
    REQUIRE(ar_process_comm(&c, p, NULL));
    REQUIRE(ar_queue_create(&q, AR_QUEUE_INLINE, "main"));
    for (size_t i = 0; i < count; i++)
        bytes[i] = (unsigned char)(r == 0 ? i * 7 + i / 256 : 1);
    if (r == 0)
        REQUIRE(ar_comm_send(c, q, (ar_cbuf){bytes}, count, AR_U8, 1, "large"));
    else if (r == 1)
        REQUIRE(ar_comm_recv(c, q, (ar_buf){bytes}, count, AR_U8, 0, "large"));
    int wrong = 0;
    for (size_t i = 0; r < 2 && i < count; i++)
        wrong += bytes[i] != (unsigned char)(i * 7 + i / 256);
    for (size_t i = 0; i < count; i++)
        bytes[i] = (unsigned char)(i % 13);
    REQUIRE(ar_comm_all_reduce(c, q, (ar_buf){bytes}, (ar_cbuf){bytes}, count, AR_U8, AR_SUM, "large"));
    for (size_t i = 0; i < count; i++)
        wrong += bytes[i] != (unsigned char)(i % 13 * (size_t)ari_process_size(p));
    ar_queue_destroy(q);
    ar_comm_destroy(c);
    free(bytes);
    if (wrong)
        fprintf(stderr, "rank %d: %d wrong bytes of %zu\n", r, wrong, count);
    return wrong;
}

static void on_device(ar_process *p)
{
    OWNED(ar_device_destroy) ar_device *d = NULL;
    const ar_status st = ari_device_emulated_create(&d);
    if (st == AR_ERR_UNSUPPORTED)
        return;
    REQUIRE(st);
    all_kinds(p, d);
}

int main(int argc, char **argv)
{
    OWNED(ar_process_destroy) ar_process *p = NULL;
    const ar_process_options o = {.transport = AR_TRANSPORT_MPI};
    const ar_status st = ar_process_create(&p, &o);
    if (st == AR_ERR_UNSUPPORTED) {
        printf("%s\n", ar_error_message());
        return 77;
    }
    REQUIRE(st);
    int wrong = host_moves(p);
    if (argc > 1 && strcmp(argv[1], "large") == 0) {
        wrong += large(p);
    } else {
        all_kinds(p, NULL);
        on_device(p);
    }
    return wrong != 0;
}
