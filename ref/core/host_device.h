/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CORE_HOST_DEVICE_H
#define ARI_CORE_HOST_DEVICE_H

/* Definitions that the C compiler and nvcc compile alike: for the host, and for a GPU where nvcc does. */
#if defined(__CUDACC__)
#define ARI_FN static __host__ __device__ inline
#else
#define ARI_FN static inline
#endif

#endif
