/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Declarations shared by all kernel files. */
#include "gpu/kernel.h"
#include "gpu/native.h"
#include "gpu/profile/profile.h"
#include "ref/numerics/divisor.h"
#include "ref/numerics/scalar.h"

namespace ARI_GPU
{

/* --- slots -------------------------------------------------------------------------------------------------------- */

/* Slots of the device's table. Each is a function of this namespace with the type that ar_device_ops gives it. Slots
 * for memory and queues are defined in the runtime, the others in the files of their kernels. */
template <class F> struct pointed;
template <class F> struct pointed<F *> {
    typedef F type;
};
#define ARI_DECLARE_SLOT(slot) pointed<decltype(ar_device_ops::slot)>::type slot;
AR_DEVICE_SLOTS(ARI_DECLARE_SLOT)
#undef ARI_DECLARE_SLOT

/* Returns the table with every slot set. */
inline ar_device_ops table_of(const char *name)
{
    ar_device_ops o = {};
    o.name = name;
    o.host_reaches = false;
#define ARI_FILL_SLOT(slot) o.slot = slot;
    AR_DEVICE_SLOTS(ARI_FILL_SLOT)
    return o;
}

/* --- the device's own -------------------------------------------------------------------------------------------- */

/* Returns the environment's choice at the time when the device was created. */
ari_imma imma_of(const ar_device *d);

/* Memory for a kernel on one queue, released with the variable. */
class scratch
{
  public:
    scratch(ar_device *device, ar_queue *queue) : d(device), q(queue), b{nullptr}
    {
    }
    ~scratch()
    {
        ARI_GPU::free(d, q, b);
    }
    scratch(const scratch &) = delete;
    scratch &operator=(const scratch &) = delete;
    /* Allocates the memory; to be called once. Errors: AR_ERR_MEMORY. */
    ar_status allocate(size_t bytes)
    {
        return alloc(d, q, &b, bytes);
    }
    ar_buf buf() const
    {
        return b;
    }

  private:
    ar_device *d;
    ar_queue *q;
    ar_buf b;
};

/* A part of a slot, from here to the end of the variable's scope, for the device's profile (gpu/profile/profile.h). */
class timed_part
{
  public:
    timed_part(ar_device *device, ar_queue *queue, const char *name)
        : d(device), q(queue), begun(ari_profile_part(device, queue, name))
    {
    }
    ~timed_part()
    {
        ari_profile_part_end(d, q, begun);
    }
    timed_part(const timed_part &) = delete;
    timed_part &operator=(const timed_part &) = delete;

  private:
    ar_device *d;
    ar_queue *q;
    void *begun;
};

/* --- elements ----------------------------------------------------------------------------------------------------- */

/* Values are in memory as fp32 or as bf16; every kernel computes in fp32. */
struct bf16 {
    uint16_t bits;
};
ARI_ON_GPU inline float load(float x)
{
    return x;
}
ARI_ON_GPU inline float load(bf16 x)
{
    return ari_f32_of_bf16(x.bits);
}
/* Stores x, rounded to nearest, ties to even. */
ARI_ON_GPU inline void store(float *dst, float x)
{
    *dst = x;
}
ARI_ON_GPU inline void store(bf16 *dst, float x)
{
    dst->bits = ari_bf16_of_f32(x);
}

/* Calls f<float> or f<bf16> according to a tensor's dtype. These are functions because a kernel may not be defined in a
 * generic lambda. */
#define ARI_BY_DTYPE(tensor, f) ((tensor)->dtype == AR_BF16 ? f<bf16> : f<float>)

/* Defines a slot by its kernel for elements T, those of `tensor`; the kernel's body follows. `names`: the parameters
 * after the queue, in parentheses. */
#define ARI_FOR_DTYPES(slot, tensor, names, ...)                                     \
    template <class T> ar_status slot##_of(ar_device *d, ar_queue *q, __VA_ARGS__);  \
    ar_status slot(ar_device *d, ar_queue *q, __VA_ARGS__)                           \
    {                                                                                \
        return ARI_BY_DTYPE(tensor, slot##_of)(d, q, ARI_WITHOUT_PARENTHESES names); \
    }                                                                                \
    template <class T> ar_status slot##_of(ar_device *d, ar_queue *q, __VA_ARGS__)
#define ARI_WITHOUT_PARENTHESES(...) __VA_ARGS__

template <class T> using four = ari_lanes<T, 4>;

template <class T> ARI_ON_GPU bool lies_whole(const T *p, size_t n)
{
    return n >= 4 && reinterpret_cast<uintptr_t>(p) % alignof(four<T>) == 0;
}
/* Loads the first n elements and 0 for the others. */
template <class T> ARI_ON_GPU four<T> load_four(const T *src, size_t n)
{
    four<T> x = {{0, 0, 0, 0}};
    if (lies_whole(src, n))
        return load_whole<4>(src);
    for (size_t i = 0; i < 4; i++)
        if (i < n)
            x.lane[i] = src[i];
    return x;
}
template <class T> ARI_ON_GPU void store_four(T *dst, const four<T> &x, size_t n)
{
    if (lies_whole(dst, n)) {
        store_whole(dst, x);
        return;
    }
    for (size_t i = 0; i < 4; i++)
        if (i < n)
            dst[i] = x.lane[i];
}

/* --- tensors ------------------------------------------------------------------------------------------------------ */

/* View of an ar_tensor for a kernel: pointer to reachable memory and four dimensions, padded in front with extent 1. T
 * is const if the kernel only reads. */

/* The index of one element in each dimension. */
struct place {
    ptrdiff_t index[AR_MAX_DIMS];
};

template <class T> struct view {
    T *data;
    size_t shape[AR_MAX_DIMS];
    ptrdiff_t stride[AR_MAX_DIMS];    /* elements */
    ari_divisor divisor[AR_MAX_DIMS]; /* the shape */

    /* Number of elements, of rows (every dimension but the last), of matrices (every one but the last two). */
    size_t count() const
    {
        return rows() * shape[3];
    }
    size_t rows() const
    {
        return matrices() * shape[2];
    }
    size_t matrices() const
    {
        return shape[0] * shape[1];
    }
    /* The address of element i, in row-major order of the shape. */
    ARI_ON_GPU T *locate(size_t i) const
    {
        return locate(unravel(i));
    }
    /* Does the same in two steps, so that views of one shape share the divisions. The outermost dimension needs
     * none. */
    ARI_ON_GPU place unravel(size_t i) const
    {
        place p;
        for (int k = AR_MAX_DIMS - 1; k > 0; k--) {
            const size_t outer = ari_divide(&divisor[k], &i);
            p.index[k] = static_cast<ptrdiff_t>(i);
            i = outer;
        }
        p.index[0] = static_cast<ptrdiff_t>(i);
        return p;
    }
    ARI_ON_GPU T *locate(const place &p) const
    {
        return data + p.index[0] * stride[0] + p.index[1] * stride[1] + p.index[2] * stride[2] + p.index[3] * stride[3];
    }
    /* The first element of row r, and of matrix m. */
    ARI_ON_GPU T *row(size_t r) const
    {
        const size_t m = ari_divide(&divisor[2], &r);
        return matrix(m) + static_cast<ptrdiff_t>(r) * stride[2];
    }
    ARI_ON_GPU T *matrix(size_t m) const
    {
        const size_t outer = ari_divide(&divisor[1], &m);
        return data + static_cast<ptrdiff_t>(outer) * stride[0] + static_cast<ptrdiff_t>(m) * stride[1];
    }
};

/* The view of a tensor whose elements are T (const T). */
template <class T> view<T> view_of(const ar_tensor *t)
{
    const int missing = AR_MAX_DIMS - t->ndim;
    view<T> v = {dev<T>(t->data), {1, 1, 1, 1}, {0, 0, 0, 0}, {}};
    for (int i = 0; i < t->ndim; i++) {
        v.shape[missing + i] = t->shape[i];
        v.stride[missing + i] = t->stride[i];
    }
    for (int k = 0; k < AR_MAX_DIMS; k++)
        v.divisor[k] = ari_divisor_of(v.shape[k]);
    return v;
}

inline size_t ceil_div(size_t a, size_t b)
{
    return a / b + (a % b != 0);
}

} // namespace ARI_GPU
