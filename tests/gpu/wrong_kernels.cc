/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/wrong_kernels.h"

#include "gpu/blas.h"
#include "gpu/kernels.h"

namespace ari_emulated
{
namespace
{

const size_t N = 64; /* words that a block works on */

int64_t *words_of(ar_buf x)
{
    return dev<int64_t>(x);
}

/* --- threads that meet -------------------------------------------------------------------------------------------- */

ar_status neighbour_in_one_member(ar_device *d, ar_queue *q, ar_buf x)
{
    int64_t *w = words_of(x);
    return launch_blocks(d, q, 1, N, [=](const block &b) { b.each(N, [&](size_t i) { w[i] = w[(i + 1) % N] + 1; }); });
}

ar_status neighbour_in_the_next_member(ar_device *d, ar_queue *q, ar_buf x)
{
    int64_t *w = words_of(x);
    return launch_blocks(d, q, 1, N, [=](const block &b) {
        ARI_SHARED(int64_t, seen, [N]);
        b.each(N, [&](size_t i) { seen[i] = w[(i + 1) % N] + 1; });
        b.each(N, [&](size_t i) { w[i] = seen[N - 1 - i]; });
    });
}

/* block::each with no barrier at its ends, as if it had been dropped. */
template <class F> void each_without_barrier(const block &b, size_t n, F f)
{
    for (size_t i = b.threads ? b.threads->self : 0; i < n; i += b.threads ? b.threads->count : 1)
        f(i);
}

ar_status dropped_barrier(ar_device *d, ar_queue *q, ar_buf x)
{
    int64_t *w = words_of(x);
    return launch_blocks(d, q, 1, N, [=](const block &b) {
        ARI_SHARED(int64_t, seen, [N]);
        each_without_barrier(b, N, [&](size_t i) { seen[i] = static_cast<int64_t>(i); });
        each_without_barrier(b, N, [&](size_t i) { w[i] = seen[N - 1 - i]; });
    });
}

ar_status shared_memory_of_the_block_before(ar_device *d, ar_queue *q, ar_buf x)
{
    int64_t *w = words_of(x);
    return launch_blocks(d, q, 8, N, [=](const block &b) {
        ARI_SHARED(int64_t, seen, [N]);
        b.each(N, [&](size_t i) { seen[i] = static_cast<int64_t>(b.index + i); });
        b.each(N, [&](size_t i) { w[b.index * N + i] = seen[N - 1 - i]; });
    });
}

ar_status word_outside_the_members(ar_device *d, ar_queue *q, ar_buf x)
{
    int64_t *w = words_of(x);
    return launch_blocks(d, q, 1, N, [=](const block &b) { w[b.index] = 1; });
}

ar_status sum_of_words_being_written(ar_device *d, ar_queue *q, ar_buf x)
{
    int64_t *w = words_of(x);
    return launch_blocks(d, q, 1, N, [=](const block &b) {
        const uint64_t sum = b.sum(N, [&](size_t i) {
            w[i] = 1;
            return static_cast<uint64_t>(w[N - 1 - i]);
        });
        b.each(1, [&](size_t) { w[N] = static_cast<int64_t>(sum); });
    });
}

ar_status sum_of_written_words(ar_device *d, ar_queue *q, ar_buf x)
{
    int64_t *w = words_of(x);
    return launch_blocks(d, q, 3, N, [=](const block &b) {
        b.each(N, [&](size_t i) { w[i] = static_cast<int64_t>(i); });
        const uint64_t sum = b.sum(N, [&](size_t i) { return static_cast<uint64_t>(w[N - 1 - i]); });
        const int32_t top = b.max(N, [&](size_t i) { return static_cast<int32_t>(w[N - 1 - i]); });
        b.each(1, [&](size_t) { w[N] = static_cast<int64_t>(sum) + top; });
    });
}

ar_status elements_of_one_word(ar_device *d, ar_queue *q, ar_buf x)
{
    int64_t *w = words_of(x);
    return launch_each(d, q, N, [=](size_t i) { w[i / 2] = 1; });
}

ar_status element_of_a_neighbour(ar_device *d, ar_queue *q, ar_buf x)
{
    int64_t *w = words_of(x);
    return launch_each(d, q, N, [=](size_t i) { w[i] = w[i ^ 1] + 1; });
}

ar_status elements_apart(ar_device *d, ar_queue *q, ar_buf x)
{
    int64_t *w = words_of(x);
    AR_TRY(launch_each(d, q, N, [=](size_t i) { w[N + i] = w[i ^ 1] + 1; }));
    return launch_each(d, q, N, [=](size_t i) { w[i] = w[N + (i ^ 1)] + 1; });
}

ar_status addition_that_is_not_atomic(ar_device *d, ar_queue *q, ar_buf x)
{
    int64_t *w = words_of(x);
    return launch_each(d, q, N, [=](size_t i) { w[0] += static_cast<int64_t>(i); });
}

ar_status atomic_addition(ar_device *d, ar_queue *q, ar_buf x)
{
    int64_t *w = words_of(x);
    int32_t *top = reinterpret_cast<int32_t *>(w + 1);
    return launch_each(d, q, N, [=](size_t i) {
        atomic_add(w, static_cast<int64_t>(i));
        atomic_max(top, static_cast<int32_t>(i));
    });
}

#define KERNEL(name, races) \
    {                       \
#name, races, name  \
    }
const wrong_kernel kernels[] = {
    KERNEL(neighbour_in_one_member, true),
    KERNEL(neighbour_in_the_next_member, false),
    KERNEL(dropped_barrier, true),
    KERNEL(shared_memory_of_the_block_before, false),
    KERNEL(word_outside_the_members, true),
    KERNEL(sum_of_words_being_written, true),
    KERNEL(sum_of_written_words, false),
    KERNEL(elements_of_one_word, true),
    KERNEL(element_of_a_neighbour, true),
    KERNEL(elements_apart, false),
    KERNEL(addition_that_is_not_atomic, true),
    KERNEL(atomic_addition, false),
};

/* --- products that break the library's rules ---------------------------------------------------------------------- */

const wrong_product products[] = {
    {"a product that keeps them", AR_OK, "", 3, 8, 32, 2, 48, 32, 8, 160, 0, 1},
    {"k that is no multiple of 16", AR_ERR_INTERNAL, "of 20 terms", 3, 8, 20, 1, 32, 32, 8, 0, 0, 1},
    {"rows of a at odd places", AR_ERR_INTERNAL, "ld 8, 40 and 32", 3, 8, 32, 1, 40, 32, 8, 0, 0, 1},
    {"rows of b at odd places", AR_ERR_INTERNAL, "ld 8, 32 and 36", 3, 8, 32, 1, 32, 36, 8, 0, 0, 1},
    {"matrices at odd places", AR_ERR_INTERNAL, "steps 104", 3, 8, 32, 2, 32, 32, 8, 104, 0, 1},
    {"an odd address", AR_ERR_INTERNAL, "address", 3, 8, 32, 1, 32, 32, 8, 0, 8, 1},
    {"three columns", AR_ERR_INTERNAL, "[3, 3]", 3, 3, 32, 1, 32, 32, 8, 0, 0, 1},
    {"rows of the result at odd places", AR_ERR_INTERNAL, "ld 10", 3, 8, 32, 1, 32, 32, 10, 0, 0, 1},
    {"rows that overlap", AR_ERR_INTERNAL, "less than a row", 3, 8, 32, 1, 16, 32, 8, 0, 0, 1},
    {"the largest sum", AR_OK, "", 1, 4, 131056, 1, 131056, 131056, 4, 0, 0, -128},
    {"a sum past int32", AR_ERR_INTERNAL, "2147483648", 1, 4, 131072, 1, 131072, 131072, 4, 0, 0, -128},
};

} // namespace
} // namespace ari_emulated

const wrong_kernel *wrong_kernels(size_t *count)
{
    *count = sizeof ari_emulated::kernels / sizeof *ari_emulated::kernels;
    return ari_emulated::kernels;
}

const wrong_product *wrong_products(size_t *count)
{
    *count = sizeof ari_emulated::products / sizeof *ari_emulated::products;
    return ari_emulated::products;
}

ar_status wrong_product_run(const wrong_product *p, ar_device *d, ar_queue *q, ar_buf operands, ar_buf result)
{
    using namespace ari_emulated;
    const size_t right = (p->first + p->batch * p->m * p->ld_a + p->step_a + 63) / 64 * 64;
    const size_t bytes = right + p->n * p->ld_b;
    int8_t *all = dev<int8_t>(operands);
    const int8_t value = static_cast<int8_t>(p->value);
    AR_TRY(launch_each(d, q, bytes, [=](size_t i) { all[i] = value; }));
    const blas_matrix a = {ar_buf_at(operands, p->first), p->ld_a, p->step_a, false};
    const blas_matrix b = {ar_buf_at(operands, right), p->ld_b, 0, false};
    const blas_matrix c = {result, p->ld_c, p->m * p->ld_c, false};
    return blas_int8(d, q, {p->m, p->n, p->k, p->batch}, c, a, b);
}
