/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/sim.h"
#include "ref/comm/comm_private.h"
#include "ref/core/reduce.h"
#include "sim/sum.h"
#include "tests/support/test.h"

/* Sums of all ranks' inputs that are held in registers and written to all outputs: the bits of the ring's order,
 * whatever the length, the places of the buffers, and who does which slice. */
enum { MOST = 9, ROOM = 5000 };

static uint64_t draw(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *state >> 33;
}

/* Numbers whose sums are rounded, of both signs. */
static void fill(ar_dtype t, void *to, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++) {
        const int64_t x = (int64_t)draw(&seed) - ((int64_t)1 << 30);
        if (t == AR_F32)
            ((float *)to)[i] = (float)x * 0.001f;
        else if (t == AR_F64)
            ((double *)to)[i] = (double)x * 0.1;
        else if (t == AR_I32)
            ((int32_t *)to)[i] = (int32_t)((uint32_t)x * 3u);
        else
            ((int64_t *)to)[i] = x * ((int64_t)1 << 33);
    }
}

typedef struct kernel_case {
    ar_dtype dtype;
    ar_op op;
    int n;
    bool in_place;
    size_t at, end, shift; /* bytes; shift: of the outputs beside a cache line */
} kernel_case;

/* Output bytes [at, stop) are the sums, one input after the other; the others are what they were. */
static void check_kernel(const kernel_case *k)
{
    static _Alignas(64) char in[MOST][ROOM], apart[MOST][ROOM], expected[ROOM], before[MOST][ROOM];
    const char *from[MOST];
    char *to[MOST];
    const ari_reduce reduce = ari_reduce_kernel(k->dtype, k->op);
    const size_t element = ar_dtype_bytes(k->dtype), count = ROOM / element - k->shift / element;
    for (int i = 0; i < k->n; i++) {
        fill(k->dtype, in[i] + k->shift, count, (uint64_t)i + 1);
        memset(apart[i], 0x5a, ROOM);
        from[i] = in[i] + k->shift;
        to[i] = (k->in_place ? in[i] : apart[i]) + k->shift;
        memcpy(before[i], k->in_place ? in[i] : apart[i], ROOM);
    }
    memcpy(expected, from[0], count * element);
    for (int i = 1; i < k->n; i++)
        reduce.pair(expected, expected, from[i], count);
    for (int past = 0; past < 2; past++) {
        ari_fused f = {.in = from, .out = to, .inputs = k->n, .outputs = k->n};
        size_t head = 0, start = k->at;
        if (past && (!ari_fused_head(&f, k->at, element, &head) || k->at + head > k->end || k->in_place))
            return;
        f.past_cache = past;
        start += head;
        const size_t stop = ari_fused_kernel(k->dtype, k->op)(&f, start, k->end);
        ari_stream_end();
        cr_assert(stop <= k->end && k->end - stop < 64 && (stop - start) % element == 0);
        for (int i = 0; i < k->n; i++) {
            cr_assert_eq(memcmp(to[i] + start, expected + start, stop - start), 0, "%s n %d at %zu end %zu",
                         ar_dtype_name(k->dtype), k->n, k->at, k->end);
            cr_assert_eq(memcmp(to[i], before[i] + k->shift, start), 0);
            cr_assert_eq(memcmp(to[i] + stop, before[i] + k->shift + stop, count * element - stop), 0);
            if (!k->in_place)
                memset(apart[i], 0x5a, ROOM);
        }
    }
}

Test(slice, a_block_is_the_sum_of_all_inputs_in_order_wherever_it_lies)
{
    static const ar_dtype dtypes[] = {AR_F32, AR_F64, AR_I32, AR_I64};
    static const size_t lengths[] = {0, 8, 56, 64, 136, 504, 512, 576, 1024, 1544, 4096, 4840};
    for (size_t t = 0; t < sizeof dtypes / sizeof *dtypes; t++)
        for (int n = 1; n <= MOST; n += n < 3 ? 1 : 3)
            for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
                for (size_t at = 0; at <= 72; at += 24)
                    for (int way = 0; way < 4; way++)
                        check_kernel(&(kernel_case){.dtype = dtypes[t],
                                                    .n = n,
                                                    .in_place = way % 2,
                                                    .at = at,
                                                    .end = at + lengths[i],
                                                    .shift = way < 2 ? 0 : 8});
}

Test(slice, outputs_that_lie_differently_to_cache_lines_have_no_common_head)
{
    static _Alignas(64) char memory[4][256];
    char *out[] = {memory[0] + 4, memory[1] + 68, memory[2] + 8};
    ari_fused f = {.out = out, .outputs = 2};
    size_t head = 0;
    cr_assert(ari_fused_head(&f, 0, 4, &head));
    cr_assert_eq(head, 60);
    cr_assert(ari_fused_head(&f, 60, 4, &head));
    cr_assert_eq(head, 0);
    cr_assert(!ari_fused_head(&f, 0, 8, &head), "a line begins within an element");
    f.outputs = 3;
    cr_assert(!ari_fused_head(&f, 0, 4, &head));
}

Test(slice, what_has_no_kernel_says_so)
{
    cr_assert_null(ari_fused_kernel(AR_F32, AR_MAX));
    cr_assert_null(ari_fused_kernel(AR_BF16, AR_SUM));
    cr_assert_null(ari_fused_kernel(AR_U8, AR_SUM));
}

typedef struct run {
    ar_dtype dtype;
    ar_op op;
    size_t count;
    bool in_place;
    char *in[MOST], *out[MOST];
    uint64_t moved[MOST];
} run;

static ar_status reduce_all(ar_comm *c, void *arg)
{
    run *u = arg;
    const int r = ar_comm_rank(c);
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "test"));
    const ar_cbuf in = {u->in_place ? u->out[r] : u->in[r]};
    const ar_status st = ar_comm_all_reduce(c, q, (ar_buf){u->out[r]}, in, u->count, u->dtype, u->op, "sum");
    uint64_t read = 0, written = 0;
    ar_comm_counted(c, &read, &written);
    u->moved[r] = read + written;
    return st;
}

/* spread: elements between the places of two ranks' buffers beside a cache line. */
static void check_all_reduce(run *u, ar_sim_algorithm algorithm, int n, size_t spread)
{
    const size_t element = ar_dtype_bytes(u->dtype), bytes = u->count * element;
    char *memory[2 * MOST], *expected = malloc(bytes);
    for (int i = 0; i < 2 * n; i++) {
        memory[i] = aligned_alloc(64, (bytes + 64 * MOST + 63) / 64 * 64);
        cr_assert_not_null(memory[i]);
    }
    for (int r = 0; r < n; r++) {
        u->in[r] = memory[2 * r] + element;
        u->out[r] = memory[2 * r + 1] + (size_t)r * spread * element;
        fill(u->dtype, u->in[r], u->count, (uint64_t)r + 7);
        memcpy(u->out[r], u->in[r], bytes);
    }
    const ari_reduce kernel = ari_reduce_kernel(u->dtype, u->op);
    for (int c = 0; c < n; c++) {
        size_t start, size;
        ari_comm_slice(u->count, n, c, &start, &size);
        memcpy(expected + start * element, u->in[(c + 1) % n] + start * element, size * element);
        for (int k = 2; k <= n; k++)
            kernel.pair(expected + start * element, expected + start * element, u->in[(c + k) % n] + start * element,
                        size);
    }
    const ar_sim_options o = {.algorithm = algorithm};
    cr_assert_ok(ar_sim_run(n, &o, reduce_all, u, NULL));
    uint64_t moved = 0;
    for (int r = 0; r < n; r++) {
        cr_assert_eq(memcmp(u->out[r], expected, bytes), 0, "rank %d of %d, %zu %s, algorithm %d, spread %zu", r, n,
                     u->count, ar_dtype_name(u->dtype), (int)algorithm, spread);
        moved += u->moved[r];
    }
    cr_assert_eq(moved, 2 * (uint64_t)(n - 1) * bytes);
    for (int i = 0; i < 2 * n; i++)
        free(memory[i]);
    free(expected);
}

Test(slice, whoever_does_them_all_slices_have_the_rings_bits_and_bytes)
{
    static const size_t counts[] = {3, 1000, 4099, 40961};
    static const ar_dtype dtypes[] = {AR_F32, AR_F64, AR_I32, AR_I64};
    for (int n = 1; n <= MOST; n += n < 3 ? 1 : 2)
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
            for (size_t t = 0; t < sizeof dtypes / sizeof *dtypes; t++)
                for (int a = AR_SIM_AUTO; a <= AR_SIM_LAST; a++) {
                    run u = {.dtype = dtypes[t], .op = AR_SUM, .count = counts[i], .in_place = i % 2};
                    check_all_reduce(&u, (ar_sim_algorithm)a, n, i % 2);
                }
}

Test(slice, sums_past_the_cache_have_the_rings_bits_wherever_the_outputs_lie)
{
    for (int n = 2; n <= 3; n++)
        for (int a = AR_SIM_AUTO; a <= AR_SIM_RING; a++)
            for (size_t spread = 0; spread < 2; spread++) {
                run u = {
                    .dtype = AR_F32, .op = AR_SUM, .count = ((size_t)24 << 20) / 4 / (size_t)n + 5, .in_place = spread};
                cr_assert(ari_stream_pays(4 * u.count, n));
                check_all_reduce(&u, (ar_sim_algorithm)a, n, spread);
            }
}
