/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The machine of gpu/sm90/body.h as compute capability 9.0 has it: PTX that C++ has no name for. Sources: PTX ISA 8.7,
 * "Asynchronous Warpgroup Level Matrix Instructions", "mbarrier", "cp.async.bulk.tensor", "setmaxnreg",
 * "barrier.cluster", "mapa". For sm_90a alone. */
#include <cuda.h>

#include "gpu/sm90/body.h"

namespace ari_cuda
{
namespace sm90
{

const unsigned BLOCK_THREADS = (1 + GROUPS) * GROUP_THREADS;

/* Registers of a thread. The compiler is given 65536 / BLOCK_THREADS at most, in steps of 8: 168; the producer's group
 * leaves most of them to the others. */
const int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static_assert((PRODUCER_REGISTERS + GROUPS * CONSUMER_REGISTERS) * GROUP_THREADS <= 65536, "registers of a block");

class machine
{
  public:
    __device__ machine(const CUtensorMap *left_map, const CUtensorMap *right_map, int8_t *shared, uint32_t blocks)
        : left(left_map), right(right_map), memory(shared), cluster_size(blocks)
    {
    }

    __device__ uint32_t index() const
    {
        return blockIdx.x / cluster_size;
    }
    __device__ uint32_t clusters() const
    {
        return gridDim.x / cluster_size;
    }
    __device__ uint32_t rank() const
    {
        return blockIdx.x % cluster_size;
    }
    /* The same for all threads of a warp, which the compiler sees by the shuffle. */
    __device__ uint32_t group() const
    {
        return __shfl_sync(0xffffffffu, threadIdx.x / GROUP_THREADS, 0);
    }
    __device__ bool producer() const
    {
        return threadIdx.x == 0;
    }
    __device__ void shrink() const
    {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    }
    __device__ void grow() const
    {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    }
    __device__ uint32_t base() const
    {
        return static_cast<uint32_t>(__cvta_generic_to_shared(memory));
    }
    __device__ int32_t &word(uint32_t address) const
    {
        return *reinterpret_cast<int32_t *>(memory + (address - base()));
    }
    template <class F> __device__ void each(F f) const
    {
        f(threadIdx.x % GROUP_THREADS);
    }
    template <class T> struct fragment {
        T number[RESULTS];
        __device__ T &at(uint32_t, uint32_t i)
        {
            return number[i];
        }
    };

    /* --- barriers ------------------------------------------------------------------------------------------------- */

    __device__ void init(uint32_t barrier, uint32_t count) const
    {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    /* In CUTLASS's forms, here and in release: what passes over a barrier is a stage of shared memory between the
     * copies and the products of warpgroups, and neither goes through the caches that a fence of the cluster's scope
     * (.release.cluster: a MEMBAR of the whole GPU; .acquire.cluster: an L1 that forgets all) waits for. */
    __device__ void wait(uint32_t barrier, uint32_t parity) const
    {
        uint32_t over;
        do
            asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                         "selp.u32 %0, 1, 0, p;}"
                         : "=r"(over)
                         : "r"(barrier), "r"(parity)
                         : "memory");
        while (!over);
    }
    __device__ void expect(uint32_t barrier, uint32_t bytes) const
    {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    }
    /* Lane i of each warp arrives at block i's. */
    __device__ void release(uint32_t barrier, uint32_t mask) const
    {
        const uint32_t lane = threadIdx.x % 32;
        if (lane < 4 && (mask >> lane & 1))
            asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
                         "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(barrier),
                         "r"(lane)
                         : "memory");
        __syncwarp();
    }
    __device__ void load(bool is_left, uint32_t to, const box &at, uint32_t barrier, uint32_t mask) const
    {
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                     ".multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
                     "l"(is_left ? left : right), "r"(at.k), "r"(at.run), "r"(at.row), "r"(at.matrix), "r"(barrier),
                     "h"(static_cast<uint16_t>(mask))
                     : "memory");
    }
    __device__ void join() const
    {
        __syncwarp();
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }

    /* --- products ------------------------------------------------------------------------------------------------- */

    /* The compiler does not know that products write registers later than the instruction that names them: before the
     * first and after the last one it is told that they change here. */
    __device__ void hold(fragment<int32_t> &acc) const
    {
#pragma unroll
        for (uint32_t i = 0; i < RESULTS; i++)
            asm volatile("" : "+r"(acc.number[i])::"memory");
    }
    __device__ void fence() const
    {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    }
    __device__ void commit() const
    {
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    }
    template <int N> __device__ void await() const
    {
        asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
    }
    /* acc = the product of 64 rows and 128 rows of 32 terms, added to what it is or not. */
    __device__ void multiply(fragment<int32_t> &acc, uint64_t a, uint64_t b, bool add) const
    {
#define ARI_ACC(i) "+r"(acc.number[i])
        asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                     "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                     "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p;}"
                     : ARI_ACC(0), ARI_ACC(1), ARI_ACC(2), ARI_ACC(3), ARI_ACC(4), ARI_ACC(5), ARI_ACC(6), ARI_ACC(7),
                       ARI_ACC(8), ARI_ACC(9), ARI_ACC(10), ARI_ACC(11), ARI_ACC(12), ARI_ACC(13), ARI_ACC(14),
                       ARI_ACC(15), ARI_ACC(16), ARI_ACC(17), ARI_ACC(18), ARI_ACC(19), ARI_ACC(20), ARI_ACC(21),
                       ARI_ACC(22), ARI_ACC(23), ARI_ACC(24), ARI_ACC(25), ARI_ACC(26), ARI_ACC(27), ARI_ACC(28),
                       ARI_ACC(29), ARI_ACC(30), ARI_ACC(31), ARI_ACC(32), ARI_ACC(33), ARI_ACC(34), ARI_ACC(35),
                       ARI_ACC(36), ARI_ACC(37), ARI_ACC(38), ARI_ACC(39), ARI_ACC(40), ARI_ACC(41), ARI_ACC(42),
                       ARI_ACC(43), ARI_ACC(44), ARI_ACC(45), ARI_ACC(46), ARI_ACC(47), ARI_ACC(48), ARI_ACC(49),
                       ARI_ACC(50), ARI_ACC(51), ARI_ACC(52), ARI_ACC(53), ARI_ACC(54), ARI_ACC(55), ARI_ACC(56),
                       ARI_ACC(57), ARI_ACC(58), ARI_ACC(59), ARI_ACC(60), ARI_ACC(61), ARI_ACC(62), ARI_ACC(63)
                     : "l"(a), "l"(b), "r"(static_cast<uint32_t>(add)));
#undef ARI_ACC
    }

  private:
    const CUtensorMap *left, *right;
    int8_t *memory;
    uint32_t cluster_size;
};

} // namespace sm90
} // namespace ari_cuda
