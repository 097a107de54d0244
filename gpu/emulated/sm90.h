/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The machine of gpu/sm90/body.h as a model: what the instructions do to shared memory, barriers and accumulators, said
 * once more, by PTX's own figures and not by the functions of layout.h. One cluster at a time. A flow stands for a
 * producer or for a whole warpgroup; flows take turns, and copies and products, which are asynchronous, happen now,
 * later or as late as they may, as a number drawn at random says: a stage that is read before it is full, or written
 * before it has been read, gives other bits. What no GPU would accept, or wait for for ever, is a fault of the
 * kernel's. */
#include "gpu/sm90/body.h"

namespace ari_emulated
{
namespace sm90
{

class model;

/* State of a flow, and its enqueued products. */
struct product_under_way {
    int32_t (*acc)[RESULTS];
    uint64_t a, b;
    bool add;
};

struct flow;

/* The model as the body sees it. */
class machine
{
  public:
    machine(model *of, flow *self) : cluster_model(of), own(self)
    {
    }
    uint32_t index() const;
    uint32_t clusters() const;
    uint32_t rank() const;
    uint32_t group() const;
    bool producer() const
    {
        return group() == 0;
    }
    void shrink() const
    {
    }
    void grow() const
    {
    }
    uint32_t base() const;
    int32_t &word(uint32_t address) const;
    template <class F> void each(F f) const
    {
        for (uint32_t t = 0; t < GROUP_THREADS; t++)
            f(t);
    }
    template <class T> struct fragment {
        T number[GROUP_THREADS][RESULTS];
        T &at(uint32_t thread, uint32_t i)
        {
            return number[thread][i];
        }
    };
    void init(uint32_t barrier, uint32_t count) const;
    void wait(uint32_t barrier, uint32_t parity) const;
    void expect(uint32_t barrier, uint32_t bytes) const;
    void release(uint32_t barrier, uint32_t mask) const;
    void load(bool left, uint32_t to, const box &at, uint32_t barrier, uint32_t mask) const;
    void hold(fragment<int32_t> &) const
    {
    }
    void fence() const;
    void multiply(fragment<int32_t> &acc, uint64_t a, uint64_t b, bool add) const;
    void commit() const;
    template <int N> void await() const
    {
        finish_products(N);
    }
    void join() const;

  private:
    model *cluster_model;
    flow *own;

    void finish_products(int pending) const;
};

/* Runs cluster number `index` of `clusters`: body(arg, machine) in every flow. Sets the launch's fault, after a line to
 * stderr that says what it is, where the body does what it must not. */
void run_cluster(const work &w, const tensor &left, const tensor &right, uint32_t index, uint32_t clusters,
                 void (*body)(const void *arg, machine &m), const void *arg);

} // namespace sm90
} // namespace ari_emulated
