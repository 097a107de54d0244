/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated device's memory: what a host or a kernel does to it that a GPU would not allow. */
#include <pthread.h>
#include <signal.h>

#include "anyrank/device.h"
#include "gpu/device_private.h"
#include "ref/core/tensor_private.h"
#include "tests/support/test.h"

#if defined(ARI_SANITIZED)
#define NOT_SANITIZED .disabled = true /* the memory is the C library's there, so that its borders are watched */
#else
#define NOT_SANITIZED .disabled = false
#endif

typedef struct gpu {
    ar_device *device;
    ar_queue *queue;
} gpu;

static gpu open_gpu(void)
{
    gpu g;
    cr_assert_ok(ari_device_emulated_create(&g.device));
    cr_assert_ok(g.device->ops->queue_create(g.device, &g.queue, AR_QUEUE_INLINE, "main"));
    return g;
}

static void close_gpu(gpu g)
{
    ar_queue_destroy(g.queue);
    ar_device_destroy(g.device);
}

static ar_buf taken(gpu g, size_t bytes)
{
    ar_buf b = {NULL};
    cr_assert_ok(g.device->ops->alloc(g.device, g.queue, &b, bytes));
    return b;
}

Test(emulated_memory, cannot_be_read_by_the_host, .signal = SIGSEGV, NOT_SANITIZED)
{
    const gpu g = open_gpu();
    const volatile char *at = taken(g, 64).ptr;
    exit(at[0]); /* not reached */
}

Test(emulated_memory, cannot_be_written_by_the_host, .signal = SIGSEGV, NOT_SANITIZED)
{
    const gpu g = open_gpu();
    memset(taken(g, 64).ptr, 0, 64);
}

static ar_status add(gpu g, ar_buf y, ar_buf a, ar_buf b, size_t n)
{
    const ar_tensor to = ari_tensor_flat(AR_F32, y, n), left = ari_tensor_flat(AR_F32, a, n);
    const ar_tensor right = ari_tensor_flat(AR_F32, b, n);
    return g.device->ops->add(g.device, g.queue, &to, &left, &right);
}

Test(emulated_memory, holds_no_zeros_at_first_nor_what_was_there)
{
    const gpu g = open_gpu();
    const size_t sizes[] = {1, 63, 64, 65, 4096, 3 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int again = 0; again < 2; again++) {
            const ar_buf b = taken(g, sizes[i]);
            unsigned char first = 0, last = 0;
            cr_assert_eq((uintptr_t)b.ptr % 64, 0);
            cr_assert_ok(g.device->ops->copy(g.device, g.queue, (ar_buf){&first}, ar_const(b), 1));
            cr_assert_ok(
                g.device->ops->copy(g.device, g.queue, (ar_buf){&last}, ar_const(ar_buf_at(b, sizes[i] - 1)), 1));
            cr_assert(first == 0xa5 && (last == 0xa5 || sizes[i] > (1 << 20)), "%zu bytes", sizes[i]);
            cr_assert_ok(g.device->ops->zero(g.device, g.queue, b, sizes[i]));
            g.device->ops->free(g.device, g.queue, b);
        }
    }
    close_gpu(g);
}

Test(emulated_memory, an_address_of_the_host_is_an_error_of_the_device, NOT_SANITIZED)
{
    const gpu g = open_gpu();
    float host[2] = {1, 2};
    const ar_buf b = taken(g, 8);
    cr_assert_refused(add(g, b, b, (ar_buf){host}, 2), AR_ERR_DEVICE, "an address of the host");
    cr_assert_eq(g.device->ops->zero(g.device, g.queue, (ar_buf){host}, 8), AR_ERR_DEVICE);
    cr_assert(host[0] == 1 && host[1] == 2);
    cr_assert_ok(add(g, b, b, b, 2));
    g.device->ops->free(g.device, g.queue, b);
    close_gpu(g);
}

Test(emulated_memory, a_queue_that_is_no_stream_of_it_is_refused)
{
    const gpu g = open_gpu();
    ar_queue *plain = NULL, *thread = NULL;
    const ar_buf b = taken(g, 8);
    cr_assert_ok(ar_queue_create(&plain, AR_QUEUE_INLINE, "plain"));
    cr_assert_ok(g.device->ops->queue_create(g.device, &thread, AR_QUEUE_THREAD, "thread"));
    cr_assert_eq(g.device->ops->zero(g.device, plain, b, 8), AR_ERR_ARG);
    cr_assert_eq(g.device->ops->zero(g.device, thread, b, 8), AR_ERR_ARG);
    g.device->ops->free(g.device, g.queue, b);
    ar_queue_destroy(thread);
    ar_queue_destroy(plain);
    close_gpu(g);
}

Test(emulated_memory, running_out_says_what_was_asked_and_what_is_free)
{
    setenv("ANYRANK_EMULATED_MEMORY", "8", 1);
    const gpu g = open_gpu();
    ar_buf held = taken(g, 5 << 20), more = {NULL};
    cr_assert_refused(g.device->ops->alloc(g.device, g.queue, &more, 4 << 20), AR_ERR_MEMORY,
                      "4194304 bytes asked for");
    cr_assert_says("of 8388608 free");
    cr_assert_eq(g.device->ops->alloc(g.device, g.queue, &more, SIZE_MAX), AR_ERR_MEMORY);
    g.device->ops->free(g.device, g.queue, held);
    for (size_t size = 1000; size < 7 << 20; size += size / 3) { /* of many sizes, one after the other */
        held = taken(g, size);
        g.device->ops->free(g.device, g.queue, held);
    }
    close_gpu(g);
}

Test(emulated_memory, a_limit_that_is_none_is_refused)
{
    ar_device *d = NULL;
    setenv("ANYRANK_EMULATED_MEMORY", "much", 1);
    cr_assert_refused(ari_device_emulated_create(&d), AR_ERR_ARG, "ANYRANK_EMULATED_MEMORY is 'much'");
}

Test(emulated_memory, an_order_that_is_none_is_refused)
{
    ar_device *d = NULL;
    setenv("ANYRANK_EMULATED_ORDER", "sideways", 1);
    cr_assert_refused(ari_device_emulated_create(&d), AR_ERR_ARG, "forward, backward or threads");
}

/* Two blocks of the smallest size at a time, and one of any, which is let go while they are held. */
static void *take_and_give(void *arg)
{
    const gpu g = open_gpu();
    const size_t seed = (size_t)arg;
    for (size_t i = 0; i < 2000; i++) {
        const uint64_t want[2] = {i ^ seed << 32, ~(i ^ seed << 32)};
        uint64_t got[2] = {0, 0};
        const ar_buf other = taken(g, (i * 37 + seed * 101) % 5000), here[2] = {taken(g, 8), taken(g, 8)};
        for (size_t j = 0; j < 2; j++)
            cr_assert_ok(g.device->ops->copy(g.device, g.queue, here[j], (ar_cbuf){&want[j]}, 8));
        g.device->ops->free(g.device, g.queue, other);
        for (size_t j = 0; j < 2; j++) {
            cr_assert_ok(g.device->ops->copy(g.device, g.queue, (ar_buf){&got[j]}, ar_const(here[j]), 8));
            g.device->ops->free(g.device, g.queue, here[j]);
        }
        if (memcmp(got, want, sizeof got) != 0)
            return arg; /* a block was handed out twice */
    }
    close_gpu(g);
    return NULL;
}

Test(emulated_memory, threads_never_hold_the_same_block)
{
    pthread_t threads[4];
    for (size_t i = 0; i < 4; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, take_and_give, (void *)(i + 1)), 0);
    for (size_t i = 0; i < 4; i++) {
        void *failed = NULL;
        pthread_join(threads[i], &failed);
        cr_assert_eq(failed, NULL, "thread %zu", (size_t)failed);
    }
}
