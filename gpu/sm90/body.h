/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The exact contraction for compute capability 9.0: a block has 128 x 128 results, whose int8 products are in registers
 * until they are added, with their weight, to the result's int64 in registers too; no plane of int32 is ever in memory.
 * One thread of the block's first warpgroup asks for the operands (TMA), in a ring of stages; two warpgroups multiply
 * (wgmma), 64 rows each.
 *
 * The body is a template over the machine M that it runs on: gpu/cuda/wgmma.h is the GPU, a thread of which runs it;
 * gpu/emulated/sm90.h a model, where one flow stands for a warpgroup. M has
 *     index(), clusters()      the cluster's number, and how many there are: it takes every so many tiles of its size
 *     rank()                   this block's number in it
 *     group(), producer()      the warpgroup: 0 the producer's, then the consumers'; whether this is the one producer
 *     shrink(), grow()         give registers away; take them
 *     base()                   of shared memory: an address as barriers and descriptors have it
 *     word(address)            an int32 there
 *     each(f)                  f(thread) for the threads of the group that this flow stands for
 *     fragment<T>              RESULTS numbers of each thread: at(thread, i)
 *     init(barrier, count), wait(barrier, parity), expect(barrier, bytes): mbarrier; expect also arrives
 *     release(barrier, mask)   each warp of the group arrives at this barrier of the blocks in the mask
 *     load(left, to, at, barrier, mask): a box, by TMA, to the same place in all blocks of the mask
 *     fence(), multiply(..), commit(), await<N>(): wgmma; hold(acc): its registers are as the program says
 *     join()                   all threads of the cluster meet */
#include "gpu/epilogue.h"
#include "gpu/sm90/layout.h"

#if defined(__CUDACC__)
#define ARI_UNROLLED _Pragma("unroll")
#else
#define ARI_UNROLLED
#endif

namespace ARI_GPU
{
namespace sm90
{

/* The first term, run, row and matrix of a box. */
struct box {
    uint32_t k, run, row, matrix;
};

/* Loads this block's share of both operands of each chunk. The ring goes on from tile to tile: the next one's first
 * chunks are loaded while the results of this one are written. */
template <class M> ARI_ON_GPU inline void produce(M &m, const work &w, const place &p, ring &r)
{
    const cluster &shape = w.shape;
    const uint32_t a_mask = shape.row_mask(p.rank), b_mask = shape.col_mask(p.rank);
    const uint32_t a_rows = TILE / shape.cols, a_share = p.rank % shape.cols * a_rows;
    const uint32_t b_rows = TILE / shape.rows, b_share = p.rank / shape.cols * b_rows;
    const auto plane = [&](const weighted_product &product, const span &s, uint32_t matrix) {
        for (uint32_t i = 0; i < product.count; i++)
            for (uint32_t step = s.from; step < s.to; step++) {
                const uint32_t full = m.base() + FULL_OFFSET + r.stage * 8, to = m.base() + r.stage * STAGE_BYTES;
                const uint32_t a = s.block * w.runs + product.a + i, b = s.block * w.runs + product.b + i;
                m.wait(m.base() + EMPTY_OFFSET + r.stage * 8, r.parity ^ 1);
                m.expect(full, STAGE_BYTES);
                m.load(true, to + a_share * STEP, box{w.term + step * STEP, a, p.row + a_share, matrix}, full, a_mask);
                m.load(false, to + OPERAND_BYTES + b_share * STEP,
                       box{w.term + step * STEP, b, p.col + b_share, matrix}, full, b_mask);
                r.next();
            }
    };
    for (uint32_t matrix = p.matrix; matrix < p.matrix + p.count; matrix++)
        walk(
            w, [&](const weighted_product &product, const span &s) { plane(product, s, matrix); }, [](bool) {});
}

/* A warpgroup's sums of one matrix. */
template <class M> class sums
{
  public:
    ARI_ON_GPU sums(M &machine, const cluster &shape, uint32_t rank)
        : m(machine), mask(shape.row_mask(rank) | shape.col_mask(rank)), group(machine.group() - 1), r{0, 0},
          carried(false)
    {
    }

    /* In 40 bits and more, and what is above them. */
    ARI_ON_GPU void of_matrix(const work &w)
    {
        carried = false;
        m.each([&](uint32_t t) { ARI_UNROLLED for (uint32_t i = 0; i < RESULTS; i++) total.at(t, i) = 0; });
        walk(
            w,
            [&](const weighted_product &p, const span &s) {
                multiply(p.count * (s.to - s.from));
                add(p);
            },
            [&](bool more) {
                if (more)
                    carry();
            });
        m.each([&](uint32_t t) {
            ARI_UNROLLED for (uint32_t i = 0; i < RESULTS; i++) acc.at(t, i) =
                carried ? m.word(m.base() + park_offset(group, t, i)) : 0;
        });
    }

    /* f(thread, first): PARKED results of a thread, from number `first` on, are parked. */
    template <class F> ARI_ON_GPU void in_parts(F f)
    {
        ARI_UNROLLED for (uint32_t first = 0; first < RESULTS; first += PARKED)
        {
            m.each([&](uint32_t t) {
                ARI_UNROLLED for (uint32_t i = 0; i < PARKED; i++)
                {
                    const int64_t s = total.at(t, first + i);
                    m.word(m.base() + park_offset(group, t, i)) = static_cast<int32_t>(s);
                    m.word(m.base() + park_offset(group, t, PARKED + i)) = static_cast<int32_t>(s >> 32);
                    m.word(m.base() + park_offset(group, t, 2 * PARKED + i)) = acc.at(t, first + i);
                }
                f(t, first);
            });
        }
    }

    /* A parked result: carry*2^40 + high*2^32 + low. */
    ARI_ON_GPU wide_sum parked(uint32_t t, uint32_t i) const
    {
        const int32_t low = m.word(m.base() + park_offset(group, t, i));
        const int64_t high = m.word(m.base() + park_offset(group, t, PARKED + i));
        const int64_t above = m.word(m.base() + park_offset(group, t, 2 * PARKED + i));
        return {above * 256 + high, static_cast<int64_t>(static_cast<uint32_t>(low))};
    }

  private:
    M &m;
    const uint32_t mask, group;
    ring r;
    bool carried;
    typename M::template fragment<int32_t> acc;   /* a plane; at the end the carries */
    typename M::template fragment<int64_t> total; /* modulo 2^64 */

    /* The products of the stage that the ring is at. */
    ARI_ON_GPU void begin(bool first)
    {
        const uint32_t a = m.base() + r.stage * STAGE_BYTES + group * GROUP_ROWS * STEP;
        const uint32_t b = m.base() + r.stage * STAGE_BYTES + OPERAND_BYTES;
        m.wait(m.base() + FULL_OFFSET + r.stage * 8, r.parity);
        m.fence();
        ARI_UNROLLED for (uint32_t k = 0; k < STEP; k += MMA_TERMS)
            m.multiply(acc, descriptor(a + k), descriptor(b + k), !first || k > 0);
        m.commit();
    }

    /* acc = a plane of so many chunks, one at least. A stage is given back while the next is multiplied. */
    ARI_ON_GPU void multiply(uint32_t chunks)
    {
        m.hold(acc);
        begin(true);
        for (uint32_t chunk = 1; chunk < chunks; chunk++) {
            const uint32_t read = r.stage;
            r.next();
            begin(false);
            m.template await<1>();
            m.release(m.base() + EMPTY_OFFSET + read * 8, mask);
        }
        m.template await<0>();
        m.hold(acc);
        m.release(m.base() + EMPTY_OFFSET + r.stage * 8, mask);
        r.next();
    }

    ARI_ON_GPU void add(const weighted_product &p)
    {
        m.each([&](uint32_t t) {
            ARI_UNROLLED for (uint32_t i = 0; i < RESULTS; i++)
            {
                const uint64_t low = static_cast<uint64_t>(static_cast<int64_t>(acc.at(t, i)) * p.low);
                const uint32_t high = static_cast<uint32_t>(acc.at(t, i)) * static_cast<uint32_t>(p.high);
                total.at(t, i) = static_cast<int64_t>(static_cast<uint64_t>(total.at(t, i)) + low +
                                                      (static_cast<uint64_t>(high) << 32));
            }
        });
    }

    ARI_ON_GPU void carry()
    {
        m.each([&](uint32_t t) {
            ARI_UNROLLED for (uint32_t i = 0; i < RESULTS; i++)
            {
                int32_t &word = m.word(m.base() + park_offset(group, t, i));
                const int64_t s = total.at(t, i);
                word = (carried ? word : 0) + static_cast<int32_t>(s >> CARRY_BITS);
                total.at(t, i) = s & ((1ll << CARRY_BITS) - 1);
            }
        });
        carried = true;
    }
};

/* Position of a thread's result i. */
struct element {
    uint32_t row, col;
    bool inside;

    ARI_ON_GPU element(const work &w, const place &p, uint32_t group, uint32_t thread, uint32_t i)
        : row(p.row + group * GROUP_ROWS + fragment_row(thread, i)), col(p.col + fragment_col(thread, i)),
          inside(row < w.row_end && col < w.col_end)
    {
    }
};

/* Passes the sums to OUT. */
template <class M, class OUT>
ARI_ON_GPU inline void finish(sums<M> &s, const work &w, const place &p, uint32_t group, uint32_t matrix,
                              const OUT &out)
{
    s.in_parts([&](uint32_t t, uint32_t first) {
        for (uint32_t i = 0; i < PARKED; i++) {
            const element e(w, p, group, t, first + i);
            if (e.inside)
                out(w.x, matrix, e.row, e.col, s.parked(t, i));
        }
    });
}

/* States of several elements are under way at a time: each is a read of memory that the next write must not wait for.
 * */
template <class M>
ARI_ON_GPU inline void finish(sums<M> &s, const work &w, const place &p, uint32_t group, uint32_t matrix,
                              const accumulator_out &out)
{
    const uint32_t together = 4;
    s.in_parts([&](uint32_t t, uint32_t first) {
        for (uint32_t from = 0; from < PARKED; from += together) {
            accumulator_state states[together];
            ARI_UNROLLED for (uint32_t i = 0; i < together; i++)
            {
                const element e(w, p, group, t, first + from + i);
                states[i] = e.inside ? out.load(w.x, e.row, e.col) : accumulator_state{};
            }
            ARI_UNROLLED for (uint32_t i = 0; i < together; i++)
            {
                const element e(w, p, group, t, first + from + i);
                if (!e.inside)
                    continue;
                out.add(&states[i], w.x, matrix, e.row, e.col, s.parked(t, from + i));
                out.store(w.x, e.row, e.col, states[i]);
            }
        }
    });
}

template <class M, class OUT>
ARI_ON_GPU inline void consume(M &m, const work &w, const place &p, sums<M> &s, const OUT &out)
{
    for (uint32_t matrix = p.matrix; matrix < p.matrix + p.count; matrix++) {
        s.of_matrix(w);
        finish(s, w, p, m.group() - 1, matrix, out);
    }
}

template <class M, class OUT> ARI_ON_GPU inline void run(M &m, const work &w, const OUT &out)
{
    if (m.producer())
        for (uint32_t stage = 0; stage < STAGES; stage++) {
            m.init(m.base() + FULL_OFFSET + stage * 8, 1);
            m.init(m.base() + EMPTY_OFFSET + stage * 8, w.shape.readers());
        }
    m.join();
    if (m.group() == 0) {
        m.shrink();
        ring r = {0, 0};
        if (m.producer())
            for (uint32_t tile = m.index(); tile < w.clusters; tile += m.clusters())
                produce(m, w, place_of(w, tile, m.rank()), r);
    } else {
        m.grow();
        sums<M> s(m, w.shape, m.rank());
        for (uint32_t tile = m.index(); tile < w.clusters; tile += m.clusters())
            consume(m, w, place_of(w, tile, m.rank()), s, out);
    }
    m.join(); /* a block's barriers are there until the others have arrived at them for the last time */
}

/* True if one block computes all matrices of a result, which add to one accumulator. */
template <class OUT> struct is_serial {
    static const bool value = false;
};
template <> struct is_serial<accumulator_out> {
    static const bool value = true;
};

} // namespace sm90
} // namespace ARI_GPU
