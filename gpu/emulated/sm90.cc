/* SPDX-License-Identifier: Apache-2.0 */
/* The model of gpu/emulated/sm90.h. */
#include "gpu/emulated/sm90.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

namespace ari_emulated
{
namespace sm90
{

namespace
{

const uint32_t BASE = 1024; /* of a block's shared memory, as addresses have it */
const uint32_t BLOCKS_MOST = 4, FLOWS_MOST = BLOCKS_MOST * (1 + GROUPS), COPIES_MOST = 2 * STAGES * BLOCKS_MOST;
const size_t STACK = 256 << 10; /* of a flow: a warpgroup's sums are 96 KB */

struct barrier {
    uint32_t count, missing;
    int64_t bytes; /* expected and not there yet */
    uint32_t phase;
};

struct block_state {
    uint8_t shared[SHARED_BYTES];
    barrier full[STAGES], empty[STAGES];
};

struct copy_under_way {
    bool left;
    uint32_t to, bar, mask;
    box at;
};

enum class behaviour { mixed, late_copies, early_copies, eager_products, BEHAVIOURS };

} // namespace

const uint32_t GROUPS_OF_PRODUCTS = 2, PRODUCTS_OF_GROUP = STEP / MMA_TERMS;

struct flow {
    ucontext_t context;
    model *of;
    machine *self;
    uint32_t rank, group;
    const barrier *awaited; /* NULL: none */
    uint32_t parity;
    bool joining, done, fenced;
    product_under_way products[(GROUPS_OF_PRODUCTS + 1) * PRODUCTS_OF_GROUP];
    uint32_t enqueued, committed[GROUPS_OF_PRODUCTS + 1], groups; /* products of each group that is under way */
};

class model
{
  public:
    const work *w;
    const tensor *operand[2]; /* right, left */
    uint32_t index, clusters, flows, joining;
    uint64_t random;
    behaviour how;
    const char *fault;
    void (*body)(const void *arg, machine &m);
    const void *arg;
    ucontext_t scheduler;
    flow flow_of[FLOWS_MOST];
    copy_under_way copies[COPIES_MOST];
    uint32_t copy_count;
    block_state *blocks;

    uint32_t below(uint32_t n)
    {
        random = random * 6364136223846793005u + 1442695040888963407u;
        return static_cast<uint32_t>((random >> 33) % n);
    }
    void fail(const char *what)
    {
        if (!fault)
            fault = what;
    }
    /* The flow's turn is over. One that belongs to a failed cluster never has another. */
    void pause(flow *f)
    {
        (void)swapcontext(&f->context, &scheduler);
    }
    barrier *barrier_at(uint32_t rank, uint32_t address);
    void arrive(barrier *b, uint32_t count, int64_t bytes);
    void copy(const copy_under_way &c);
    void multiply(const flow &f, const product_under_way &p);
    bool runnable(const flow &f) const;
    bool take_turn();
    void check_end();
};

/* --- shared memory and barriers ----------------------------------------------------------------------------------- */

barrier *model::barrier_at(uint32_t rank, uint32_t address)
{
    const uint32_t at = address - BASE;
    block_state &b = blocks[rank];
    if (at % 8 == 0 && at >= FULL_OFFSET && at < FULL_OFFSET + STAGES * 8)
        return &b.full[(at - FULL_OFFSET) / 8];
    if (at % 8 == 0 && at >= EMPTY_OFFSET && at < EMPTY_OFFSET + STAGES * 8)
        return &b.empty[(at - EMPTY_OFFSET) / 8];
    fail("an address that is no barrier's");
    return &b.full[0];
}

/* A phase ends when nobody is missing and all bytes are there; it may be that the bytes come first. */
void model::arrive(barrier *b, uint32_t count, int64_t bytes)
{
    if (count > b->missing)
        return fail("more arrivals at a barrier than it counts");
    b->missing -= count;
    b->bytes += bytes;
    if (b->bytes >= 1 << 20 || b->bytes <= -(1 << 20))
        return fail("a barrier's bytes leave their range");
    if (b->missing == 0 && b->bytes == 0) {
        b->phase ^= 1;
        b->missing = b->count;
    }
}

/* TMA: a box of STEP terms of box_rows rows, zero outside the tensor, in 16-byte chunks whose number is exchanged by
 * bits 7 to 9 of the address. */
void model::copy(const copy_under_way &c)
{
    const tensor &t = *operand[c.left];
    if (c.to % 1024 != 0 || c.to < BASE || c.to - BASE + t.box_rows * STEP > PARK_OFFSET)
        return fail("a copy to where no stage is");
    if (c.at.run >= t.extent[1] || c.at.matrix >= t.extent[3])
        return fail("a copy of a run, or a matrix, that is not there");
    for (uint32_t rank = 0; rank < flows / (1 + GROUPS); rank++) {
        if (!(c.mask >> rank & 1))
            continue;
        for (uint32_t row = 0; row < t.box_rows; row++)
            for (uint32_t chunk = 0; chunk < STEP / 16; chunk++) {
                const uint32_t to = c.to + row * STEP + chunk * 16, k = c.at.k + chunk * 16;
                uint8_t *there = blocks[rank].shared + ((to ^ ((to >> 7 & 7) << 4)) - BASE);
                memset(there, 0, 16);
                if (c.at.row + row < t.extent[2] && k < t.extent[0])
                    memcpy(there,
                           t.data + c.at.matrix * t.stride[2] + (c.at.row + row) * t.stride[1] +
                               c.at.run * t.stride[0] + k,
                           t.extent[0] - k < 16 ? t.extent[0] - k : 16);
            }
        arrive(barrier_at(rank, c.bar), 0, -static_cast<int64_t>(t.box_rows) * STEP);
    }
}

/* --- products ----------------------------------------------------------------------------------------------------- */

/* Rows of MMA_TERMS terms, widened: those with a term that is not zero. */
struct operand_rows {
    int16_t terms[TILE][MMA_TERMS];
    uint32_t row[TILE], count;
};

/* As a descriptor has them. Gives what is wrong with it, or NULL. */
ARI_HOT static const char *read_rows(operand_rows *to, uint32_t rows, const uint8_t *shared, uint64_t d)
{
    const uint32_t start = static_cast<uint32_t>(d & 0x3fff) * 16, eight = static_cast<uint32_t>(d >> 32 & 0x3fff) * 16;
    const uint32_t last = start + (rows - 1) / 8 * eight + 7 * 128 + MMA_TERMS;
    if (d >> 62 != 1 || (d >> 49 & 7) != 0 || start % 128 > 128 - MMA_TERMS)
        return "a descriptor of another layout";
    if (start < BASE || last > BASE + PARK_OFFSET)
        return "a descriptor of what is no stage";
    to->count = 0;
    for (uint32_t row = 0; row < rows; row++) {
        uint64_t words[MMA_TERMS / 8];
        int8_t bytes[MMA_TERMS];
        for (uint32_t chunk = 0; chunk < MMA_TERMS / 16; chunk++) {
            const uint32_t at = start + row / 8 * eight + row % 8 * 128 + chunk * 16;
            memcpy(words + chunk * 2, shared + ((at ^ ((at >> 7 & 7) << 4)) - BASE), 16);
        }
        if (!(words[0] | words[1] | words[2] | words[3]))
            continue;
        memcpy(bytes, words, sizeof bytes);
        for (uint32_t k = 0; k < MMA_TERMS; k++)
            to->terms[to->count][k] = bytes[k];
        to->row[to->count++] = row;
    }
    return nullptr;
}

/* One row of a with rows of b. */
ARI_HOT static void multiply_row(int32_t *sums, const int16_t *a, const operand_rows *b)
{
    for (uint32_t col = 0; col < b->count; col++) {
        int32_t s = 0;
        for (uint32_t k = 0; k < MMA_TERMS; k++)
            s += a[k] * b->terms[col][k];
        sums[col] = s;
    }
}

/* wgmma.mma_async.m64n128k32.s32.s8.s8. Thread t of the warpgroup holds, as number v, the result in row t/4%8 +
 * 16*(t/32) + 8*(v/2%2) and column 2*(t%4) + v%2 + 8*(v/4). */
void model::multiply(const flow &f, const product_under_way &p)
{
    operand_rows a, b;
    int32_t sums[TILE];
    const uint8_t *shared = blocks[f.rank].shared;
    const char *wrong = read_rows(&a, GROUP_ROWS, shared, p.a);
    if (!wrong)
        wrong = read_rows(&b, TILE, shared, p.b);
    if (wrong)
        return fail(wrong);
    if (!p.add)
        memset(p.acc, 0, GROUP_THREADS * sizeof *p.acc);
    for (uint32_t i = 0; i < a.count; i++) {
        const uint32_t row = a.row[i], t = row / 16 * 32 + row % 8 * 4, v = row / 8 % 2 * 2;
        multiply_row(sums, a.terms[i], &b);
        for (uint32_t j = 0; j < b.count; j++) {
            const uint32_t col = b.row[j];
            p.acc[t + col % 8 / 2][v + col / 8 * 4 + col % 2] += sums[j];
        }
    }
}

/* --- whose turn it is --------------------------------------------------------------------------------------------- */

bool model::runnable(const flow &f) const
{
    return !f.done && !f.joining && (!f.awaited || f.awaited->phase != f.parity);
}

/* Whose turn begins: makecontext passes ints alone. */
static thread_local flow *starting;

/* One flow's turn, or one copy. False: none can be. */
bool model::take_turn()
{
    uint32_t ready[FLOWS_MOST], n = 0;
    for (uint32_t i = 0; i < flows; i++)
        if (runnable(flow_of[i]))
            ready[n++] = i;
    const bool copies_now = copy_count > 0 && (n == 0 || how == behaviour::early_copies ||
                                               (how != behaviour::late_copies && below(2) == 0));
    if (copies_now) {
        const uint32_t i = below(copy_count);
        const copy_under_way c = copies[i];
        copies[i] = copies[--copy_count];
        copy(c);
        return true;
    }
    if (n == 0)
        return false;
    flow &f = flow_of[ready[below(n)]];
    f.awaited = nullptr;
    starting = &f;
    (void)swapcontext(&scheduler, &f.context);
    return true;
}

void model::check_end()
{
    for (uint32_t i = 0; i < flows; i++)
        if (!flow_of[i].done)
            fail("its blocks wait for ever");
        else if (flow_of[i].groups != 0 || flow_of[i].enqueued != 0)
            fail("products that nobody waited for");
    if (copy_count != 0)
        fail("copies that nobody waited for");
}

static void run_flow(void)
{
    flow *f = starting;
    model *m = f->of;
    m->body(m->arg, *f->self);
    f->done = true;
    m->pause(f);
}

static void begin_flow(model *m, uint32_t i, machine *self, char *stack)
{
    flow *f = &m->flow_of[i];
    f->of = m;
    f->self = self;
    f->rank = i / (1 + GROUPS);
    f->group = i % (1 + GROUPS);
    (void)getcontext(&f->context);
    f->context.uc_stack.ss_sp = stack;
    f->context.uc_stack.ss_size = STACK;
    f->context.uc_link = nullptr;
    makecontext(&f->context, run_flow, 0);
}

void run_cluster(const work &w, const tensor &left, const tensor &right, uint32_t index, uint32_t clusters,
                 void (*body)(const void *arg, machine &m), const void *arg)
{
    const uint32_t size = w.shape.size(), flows = size * (1 + GROUPS);
    model *m = static_cast<model *>(calloc(1, sizeof *m));
    block_state *blocks = static_cast<block_state *>(malloc(size * sizeof *blocks));
    char *stacks = static_cast<char *>(malloc(flows * STACK));
    if (m && blocks && stacks) {
        memset(blocks, 0x5a, size * sizeof *blocks); /* junk, as a block finds it */
        m->w = &w;
        m->operand[0] = &right;
        m->operand[1] = &left;
        m->index = index;
        m->clusters = clusters;
        m->flows = flows;
        m->random = w.x.m * 0x9e3779b97f4a7c15u + w.x.n * 0xc2b2ae3d27d4eb4fu + w.steps * 31 + index;
        m->how = static_cast<behaviour>(m->below(static_cast<uint32_t>(behaviour::BEHAVIOURS)));
        m->body = body;
        m->arg = arg;
        m->blocks = blocks;
        machine *selves = static_cast<machine *>(malloc(flows * sizeof *selves));
        for (uint32_t i = 0; selves && i < flows; i++) {
            selves[i] = machine(m, &m->flow_of[i]);
            begin_flow(m, i, &selves[i], stacks + i * STACK);
        }
        while (selves && !m->fault && m->take_turn()) {
        }
        m->check_end();
        ::free(selves);
    }
    const char *why = !m || !blocks || !stacks ? "no memory for its model" : m->fault;
    if (why) {
        fprintf(stderr, "the model of compute capability 9.0, cluster %u of a contraction: %s\n", index, why);
        fault();
    }
    ::free(stacks);
    ::free(blocks);
    ::free(m);
}

/* --- what the body calls ------------------------------------------------------------------------------------------ */

uint32_t machine::index() const
{
    return cluster_model->index;
}

uint32_t machine::clusters() const
{
    return cluster_model->clusters;
}

uint32_t machine::rank() const
{
    return own->rank;
}

uint32_t machine::group() const
{
    return own->group;
}

uint32_t machine::base() const
{
    return BASE;
}

int32_t &machine::word(uint32_t address) const
{
    uint32_t at = address - BASE;
    if (at % 4 != 0 || at < PARK_OFFSET || at > PARK_OFFSET + PARK_BYTES - 4) {
        cluster_model->fail("a word outside the area of parked results");
        at = PARK_OFFSET;
    }
    return *reinterpret_cast<int32_t *>(cluster_model->blocks[own->rank].shared + at);
}

void machine::init(uint32_t barrier_address, uint32_t count) const
{
    *cluster_model->barrier_at(own->rank, barrier_address) = {count, count, 0, 0};
}

/* Over when the phase of this parity is; at first, when the one before the first is asked for. */
void machine::wait(uint32_t barrier_address, uint32_t parity) const
{
    own->awaited = cluster_model->barrier_at(own->rank, barrier_address);
    own->parity = parity;
    cluster_model->pause(own);
}

void machine::expect(uint32_t barrier_address, uint32_t bytes) const
{
    cluster_model->arrive(cluster_model->barrier_at(own->rank, barrier_address), 1, bytes);
}

void machine::release(uint32_t barrier_address, uint32_t mask) const
{
    for (uint32_t rank = 0; rank < cluster_model->flows / (1 + GROUPS); rank++)
        if (mask >> rank & 1 && cluster_model->flow_of[rank * (1 + GROUPS) + own->group].done)
            cluster_model->fail("an arrival at a block that has ended");
        else if (mask >> rank & 1)
            cluster_model->arrive(cluster_model->barrier_at(rank, barrier_address), GROUP_WARPS, 0);
    cluster_model->pause(own);
}

void machine::load(bool left, uint32_t to, const box &at, uint32_t barrier_address, uint32_t mask) const
{
    if (cluster_model->copy_count == COPIES_MOST)
        return cluster_model->fail("more copies under way than stages can take");
    cluster_model->copies[cluster_model->copy_count++] = {left, to, barrier_address, mask, at};
}

void machine::fence() const
{
    own->fenced = true;
}

void machine::multiply(fragment<int32_t> &acc, uint64_t a, uint64_t b, bool add) const
{
    if (!own->fenced || own->enqueued == PRODUCTS_OF_GROUP || own->groups > GROUPS_OF_PRODUCTS)
        return cluster_model->fail("a product without a fence before it, or too many");
    uint32_t before = 0;
    for (uint32_t g = 0; g < own->groups; g++)
        before += own->committed[g];
    own->products[before + own->enqueued++] = {acc.number, a, b, add};
}

void machine::commit() const
{
    own->committed[own->groups++] = own->enqueued;
    own->enqueued = 0;
    own->fenced = false;
    if (cluster_model->how == behaviour::eager_products)
        finish_products(0); /* then `await` finds none */
}

void machine::finish_products(int pending) const
{
    while (own->groups > static_cast<uint32_t>(pending)) {
        for (uint32_t i = 0; i < own->committed[0]; i++)
            cluster_model->multiply(*own, own->products[i]);
        memmove(own->products, own->products + own->committed[0],
                sizeof own->products - own->committed[0] * sizeof *own->products);
        memmove(own->committed, own->committed + 1, sizeof own->committed - sizeof *own->committed);
        own->groups--;
    }
}

/* All flows of the cluster. */
void machine::join() const
{
    model *m = cluster_model;
    own->joining = true;
    if (++m->joining == m->flows) {
        m->joining = 0;
        for (uint32_t i = 0; i < m->flows; i++)
            m->flow_of[i].joining = false;
    }
    m->pause(own);
}

} // namespace sm90
} // namespace ari_emulated
