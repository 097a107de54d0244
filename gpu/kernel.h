/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Kernels are written once for two compilers: nvcc, which builds the CUDA device, and the C++ compiler, which builds
 * the emulated device: the same arithmetic without a GPU. A file of kernels includes this header
 * and is in namespace ARI_GPU, which is ari_cuda or ari_emulated, so that one library may hold both.
 *
 * A kernel is a lambda that captures by value what it is given (numbers, pointers that dev<>() made of buffers), or a
 * struct with such an operator():
 *
 *     launch_each(d, q, n, [=] ARI_ON_GPU(size_t i) { .. })             for each i of [0, n), in no order
 *     launch_blocks(d, q, n, w, [=] ARI_ON_GPU(const block &b) { .. })  for each b.index of [0, n), in no order, by the
 *                                                                       threads of one block together
 *
 * It uses no more of CUDA than that. What the threads of a block do together they do through the block's members, each
 * of which begins and ends with all of them, and what one has written before the end of a member the others see after:
 *
 *     b.each(n, f)  f(i) for each i of [0, n), in no order
 *     b.sum(n, f)   the sum of f(i), uint64_t, modulo 2^64: integers, so that no order changes it
 *     b.max(n, f)   the largest f(i), int32_t; INT32_MIN of none
 *
 * Outside the members all threads of a block do the same: a variable set there is each thread's own copy of one value,
 * and a global address is not written there. ARI_SHARED(float, x, [8]) is one array, perhaps of structs, of the block's
 * own: a kernel has at most one. Sums across blocks: atomic_add and atomic_max, of integers. dot_bytes(sum, a, b): sum
 * + the products of the four signed bytes of one word with those of another, which a GPU does at once. There are no
 * sums of floats whose order is not written down. fault(): what the kernel was given is what it must not be, which the
 * host could not see; the device fails with AR_ERR_DEVICE, a GPU for good.
 *
 * The emulated device runs i and b.index upwards, or downwards where ANYRANK_EMULATED_ORDER is "backward": a kernel
 * that depends on an order gives other bits. Where it is "threads", the 16 threads of a block, or N in "threads:N",
 * each run the kernel, as on a GPU: one that relies on another's variables gives other bits, and where they part the
 * device fails. In a build with ThreadSanitizer they are threads to it: it finds two of them that meet in one word with
 * no barrier between, and elements of launch_each that do. */

#include <stddef.h>

/* N adjacent elements, at most 16 bytes: load_whole<N>(p) and store_whole(p, x) move them at once; p must be a multiple
 * of their size. */
template <class T, size_t N> struct alignas(N * sizeof(T)) ari_lanes {
    T lane[N];
};

#if defined(__CUDACC__)
#include "gpu/cuda/kernel.h"
#else
#include "gpu/emulated/kernel.h"
#endif
