/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_GPU_KERNEL_HOST_H
#define ARI_GPU_KERNEL_HOST_H

/* gpu/kernel.h for a C++ compiler: grids and blocks are loops. */
#include <stdint.h>

#include "anyrank/device.h"

#define ARI_GPU ari_emulated
#define ARI_KERNEL inline
#define ARI_SHARED

namespace ari_emulated
{

/* Before a launch. Errors: AR_ERR_DEVICE, an address that dev<>() was given since the last launch of this thread is no
 * device memory: what a GPU would call an illegal address. *backward: the order of the loops. */
ar_status enter(ar_device *d, ar_queue *q, bool *backward);

/* Where the host may reach the device's memory at this address: kernels alone know. NULL stays NULL. */
void *reach(const void *device_address);

/* A buffer's memory as a kernel sees it. */
template <class T> T *dev(ar_buf b)
{
    return static_cast<T *>(reach(b.ptr));
}
template <class T> const T *dev(ar_cbuf b)
{
    return static_cast<const T *>(reach(b.ptr));
}

class block
{
  public:
    size_t index;
    bool backward;

    template <class F> void each(size_t n, F f) const
    {
        for (size_t i = 0; i < n; i++)
            f(backward ? n - 1 - i : i);
    }
    template <class F> uint64_t sum(size_t n, F f) const
    {
        uint64_t s = 0;
        for (size_t i = 0; i < n; i++)
            s += static_cast<uint64_t>(f(backward ? n - 1 - i : i));
        return s;
    }
    template <class F> int32_t max(size_t n, F f) const
    {
        int32_t m = INT32_MIN;
        for (size_t i = 0; i < n; i++) {
            const int32_t v = f(backward ? n - 1 - i : i);
            m = v > m ? v : m;
        }
        return m;
    }
};

inline void atomic_add(int64_t *to, int64_t v)
{
    *to = static_cast<int64_t>(static_cast<uint64_t>(*to) + static_cast<uint64_t>(v));
}
inline void atomic_max(int32_t *to, int32_t v)
{
    *to = v > *to ? v : *to;
}

/* Whether this thread's launch has met what it must not. */
inline thread_local bool faulted = false;

inline void fault()
{
    faulted = true;
}
inline ar_status launched()
{
    const bool wrong = faulted;
    faulted = false;
    return wrong ? ar_error_set(AR_ERR_DEVICE, "a kernel was given an index that is out of range") : AR_OK;
}

template <class F> ar_status launch_each(ar_device *d, ar_queue *q, size_t n, const F &f)
{
    bool backward;
    AR_TRY(enter(d, q, &backward));
    for (size_t i = 0; i < n; i++)
        f(backward ? n - 1 - i : i);
    return launched();
}

template <class F> ar_status launch_blocks(ar_device *d, ar_queue *q, size_t n, size_t width, const F &f)
{
    bool backward;
    (void)width;
    AR_TRY(enter(d, q, &backward));
    for (size_t i = 0; i < n; i++)
        f(block{backward ? n - 1 - i : i, backward});
    return launched();
}

} // namespace ari_emulated

#endif
