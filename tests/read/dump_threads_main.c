/* SPDX-License-Identifier: Apache-2.0 */
/* Many threads read one open dump, whole tensors and pieces, sums and copies: the same values as one alone. */
#include <pthread.h>

#include "ref/core/tensor_private.h"
#include "tests/support/temporary.h"
#include "verify/read/dump_private.h"

enum { RANKS = 4, ROWS = 64, COLUMNS = 48, COUNT = ROWS * COLUMNS, THREADS = 8 };

static const ar_dump *dump;
static int failures;

static void must(ar_status st)
{
    if (st == AR_OK)
        return;
    fprintf(stderr, "%s\n", ar_error_message());
    exit(1);
}

static void write_rank(const char *folder, int rank)
{
    static float x[COUNT];
    const size_t shape[] = {ROWS, COLUMNS}, part[] = {ROWS, COLUMNS / RANKS};
    const ar_dump_place place = {.rank = rank, .world = RANKS, .mesh = {1, {{"tp", RANKS}}}, .coords = {rank}};
    ar_layout columns, copy, term;
    ar_tensor shard, whole;
    for (int i = 0; i < COUNT; i++)
        x[i] = (float)i;
    must(ar_layout_shard(&columns, 2, shape, 1, rank, RANKS));
    must(ari_layout_replicate(&copy, 2, shape, rank, RANKS));
    must(ari_layout_replicate(&term, 2, shape, 0, 1));
    must(ar_tensor_view(&shard, AR_F32, 2, part, (ar_buf){x + rank}));
    must(ar_tensor_view(&whole, AR_F32, 2, shape, (ar_buf){x}));
    const ar_dump_value v[] = {{"columns", AR_F32, &shard, &columns, NULL},
                               {"copy", AR_F32, &whole, &copy, NULL},
                               {"sum", AR_F32, &whole, &term, "tp"}};
    must(ar_dump_write(folder, &place, v, 3, NULL, 0));
}

static double expected(size_t tensor, size_t i)
{
    if (tensor != 0)
        return tensor == 1 ? (double)i : (double)(RANKS * i);
    const size_t row = i / COLUMNS, column = i % COLUMNS, width = COLUMNS / RANKS;
    return (double)(column / width + row * width + column % width);
}

static void *read_all(void *user)
{
    const size_t first = (size_t)(uintptr_t)user;
    double x[COUNT];
    for (size_t k = 0; k < ar_dump_count(dump); k++)
        for (size_t start = 0; start < COUNT; start += 97 + first) {
            const ar_dump_tensor *t = ar_dump_at(dump, (k + first) % ar_dump_count(dump));
            const size_t n = COUNT - start < 97 + first ? COUNT - start : 97 + first;
            bool found = false;
            ar_dump_disagreement unused;
            bool right = ari_dump_read_f64(t, start, n, x) == AR_OK && ar_dump_replicas(t, &found, &unused) == AR_OK;
            for (size_t i = 0; i < n && right; i++)
                right = x[i] == expected((k + first) % ar_dump_count(dump), start + i);
            if (!right || found)
                __atomic_fetch_add(&failures, 1, __ATOMIC_RELAXED);
        }
    return NULL;
}

int main(void)
{
    SCOPED(temp_end) const temp_path folder = temp_folder();
    pthread_t thread[THREADS];
    ar_dump *d = NULL;
    for (int r = 0; r < RANKS; r++)
        write_rank(folder.path, r);
    must(ar_dump_open(&d, folder.path, NULL));
    dump = d;
    for (int i = 0; i < THREADS; i++)
        if (pthread_create(&thread[i], NULL, read_all, (void *)(uintptr_t)i) != 0)
            return 1;
    for (int i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    ar_dump_close(d);
    if (failures > 0)
        fprintf(stderr, "%d reads gave other values\n", failures);
    return failures > 0;
}
