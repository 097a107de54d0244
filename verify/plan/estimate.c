/* SPDX-License-Identifier: Apache-2.0 */
/* Estimates the bytes allocated at each moment at which memory can peak; the peak is the largest value. Elements are
 * counted in binary64, in which no product of sizes overflows. tests/verify/estimate_test.c compares the figures with
 * measured ones. */
#include "verify/plan/estimate.h"

#include <math.h>
#include <stdint.h>

#include "anyrank/check.h"
#include "ref/core/axis.h"
#include "ref/core/os/threads.h"
#include "ref/core/size.h"
#include "ref/core/wait.h"
#include "ref/models/family.h"
#include "ref/models/model_private.h"
#include "ref/models/plan_private.h"
#include "verify/plan/planner.h"
#include "verify/run/run.h"

/* Bytes of one element of each type. */
static const double FLOAT = 4.0, DOUBLE = 8.0, INT = 4.0;
/* Minimum bytes per weight element on a rank in exact numerics: an fp32 weight and its gradient. */
static const double WEIGHT = 4.0 + 4.0;
/* Rows of a long sequence that a baseline thread processes at a time if it stores no probabilities; counts rows of
 * probabilities, scores and their gradients. */
static const double BANDS = 1024.0;
/* Factor for fragmentation, page tables and rounding of allocations. With several steps, tensors of one step also
 * occupy space that temporaries of the next step could use. */
static const double SLACK = 1.25, SLACK_OF_STEPS = 1.35;
/* Fraction of the ranks' memory that the allocator keeps after the ranks have ended, measured with glibc 2.36 in
 * November 2026 on the rows with dumps in tests/verify/estimate_test.c. */
static const double NOT_RETURNED = 0.4;
/* Memory of the program itself, and of a rank independent of the model's size: stacks, tiles, packing scratch, and
 * memory kept by the allocator for the thread. */
static const double PROGRAM_BYTES = 8e6, RANK_BYTES = 4e6;
/* Memory of a rank's thread and of its collectives' thread, whose stacks are mostly untouched. */
static const double RANK_THREADS = 2.0;
/* glibc's allocator reserves this much address space for each of at most eight threads per processor (HEAP_MAX_SIZE,
 * M_ARENA_MAX). */
static const double ARENA_BYTES = 64.0 * 1024.0 * 1024.0, PROCESSOR_ARENAS = 8.0;
/* Maximum numbers of tensors that the baseline emits per step: for a block with both passes and its parameters, and
 * outside of blocks. */
static const double BLOCK_TENSORS = 106.0, OUTER_TENSORS = 42.0;
/* The same for the parameters of an expert; each parameter emits at most four further values. */
static const double EXPERT_TENSORS = 15.0;

/* Elements of the tensors that the baseline emits: in one pass of a block, in one pass around the blocks, and of the
 * parameters. */
typedef struct reference_elements {
    double block, outer, parameters;
} reference_elements;

/* Numbers of elements of the whole model, or of one block where "block" is stated. */
typedef struct elements {
    double parameters, largest; /* all parameters; the largest weight matrix */
    double block_matrices;      /* weight matrices of a block */
    double replicated;          /* parameters replicated over tp, at most: norms, biases of row-parallel layers,
                                   positions */
    double table, widest;       /* the embedding table; the longest row of a weight in a block */
    double head;                /* the LM head's weight; 0 without a head */
    double tokens, hidden, q, kv, logits;
    double probs, pairs;    /* probabilities as reported, and as the baseline stores them */
    double middle;          /* elements per token in a block's MLP or experts that the baseline stores */
    double emitted, routed; /* emitted elements per token, and how many of them all tp ranks have */
    double experts;         /* experts per block, on average */
    double layers;
    reference_elements total, resident; /* all tensors of the reference, and those in memory: large tensors are on
                                           disk */
    double on_disk;                     /* size from which a tensor is stored on disk, in bytes */
    double tensors;                     /* tensors of all steps */
    double steps, states;               /* states: numbers that the optimizer keeps per weight */
    double extra; /* bytes per weight and step: the weight's allowance, the uncertainty of its update, and whether
                     its gradient is pure rounding */
    double noisy; /* number of noisy runs at the same time; 0: none */
    bool trains;
} elements;

/* Counts the values in the middle of an MLP. For experts the baseline saves the rows that they receive and produce, and
 * emits the values of all of them and the sums. */
static void count_middle(elements *n, const ar_config *c)
{
    const ar_experts *e = &c->experts;
    const double s = ari_experts_share(c), values_per_mlp = c->gated ? 3.0 : 2.0, k = (double)e->per_token,
                 h = n->hidden;
    const double mlp = (1.0 - s) * values_per_mlp * (double)c->ffn, shared = s * values_per_mlp * (double)e->shared;
    n->experts = s * (double)e->n;
    n->routed = 2.0 * n->experts + 4.0 * s * h;
    n->middle = mlp + shared + s * k * (values_per_mlp * (double)e->ffn + 4.0 * h) + n->routed;
    n->emitted = mlp + shared + n->routed;
}

/* Returns the largest width of the MLPs or of an expert. */
static double widest_of(const ar_config *c)
{
    const ar_experts *e = &c->experts;
    const double experts = fmax((double)e->ffn, (double)e->shared), s = ari_experts_share(c);
    return s == 1.0 ? experts : s > 0.0 ? fmax(experts, (double)c->ffn) : (double)c->ffn;
}

/* Returns the number of a tensor's elements that are in memory. */
static double count_resident(const elements *n, double count)
{
    return count * FLOAT < n->on_disk ? count : 0.0;
}

static ar_status add_kept(void *user, const char *name, int ndim, const size_t *shape)
{
    elements *n = user;
    double count = 1.0;
    (void)name;
    for (int d = 0; d < ndim; d++)
        count *= (double)shape[d];
    n->resident.parameters += count_resident(n, count);
    return AR_OK;
}

/* Counts the elements that the baseline emits. */
static void count_reference(elements *n, const ari_estimate_case *run)
{
    const double t = n->tokens, h = n->hidden, rotated = run->config->rope.kind ? 1.0 : 0.0;
    const double of_mlp = count_resident(n, t * n->widest) > 0.0 ? n->emitted - n->routed : 0.0;
    n->total.block = t * (6.0 * h + (2.0 + rotated) * (n->q + n->kv) + n->emitted) + n->probs;
    n->resident.block = 6.0 * count_resident(n, t * h) +
                        (2.0 + rotated) * (count_resident(n, t * n->q) + count_resident(n, t * n->kv)) + t * n->routed +
                        t * of_mlp + count_resident(n, n->probs);
    if (run->run.dropout > 0.0) { /* probabilities in the forward pass, and two hidden states in both passes */
        n->total.block += t * 2.0 * h + n->probs / 2.0;
        n->resident.block += 2.0 * count_resident(n, t * h) + count_resident(n, n->probs) / 2.0;
    }
    n->total.outer = n->logits + 3.0 * t * h;
    n->resident.outer = count_resident(n, n->logits) + 3.0 * count_resident(n, t * h);
    n->total.parameters = n->parameters;
}

static ar_status count_elements(elements *n, const ari_estimate_case *run)
{
    const ar_config *c = run->config;
    const bool has_head = ari_part_path(ari_family_of(c->arch), ARI_HEAD) != NULL;
    size_t parameters = 0;
    AR_TRY(ari_config_parameters(c, &parameters));
    const double heads = (double)c->heads, d = (double)c->head_dim, h = (double)c->hidden;
    *n = (elements){.parameters = (double)parameters,
                    .hidden = h,
                    .layers = (double)ar_config_blocks(c),
                    .on_disk = (double)run->bytes_on_disk};
    n->trains = run->run.steps > 0;
    n->steps = (double)ari_run_steps(&run->run);
    n->states = n->trains ? ari_optimizer_states(&run->run.optimizer) : 0.0;
    n->extra = run->run.numerics == AR_NUMERICS_NATIVE && !run->alone && n->states > 1.0 ? FLOAT + 1.0 : 0.0;
    if (n->extra > 0.0 && run->run.precision != AR_PRECISION_F32)
        n->extra += FLOAT;
    if (run->noise_runs > 0)
        n->noisy = fmin(ari_threads(run->run.threads), run->noise_runs);
    n->tokens = (double)run->run.batch * (double)run->run.seq;
    n->q = heads * d;
    n->kv = (double)c->kv_heads * d;
    count_middle(n, c);
    n->replicated =
        h * ((6.0 + n->experts) * n->layers + 2.0 + (c->learned_positions ? (double)c->max_positions : 0.0));
    n->probs = n->pairs = n->tokens * (double)run->run.seq * heads;
    if (run->run.seq > AR_SCORES_WHOLE) {
        n->probs = 2.0 * n->tokens * heads;
        n->pairs = run->noise_runs > 0 ? n->pairs : BANDS * (double)run->run.seq * ari_threads(run->run.threads);
    }
    n->logits = has_head ? n->tokens * (double)c->vocab * (1.0 + (double)c->mtp) : 0.0;
    n->table = (double)c->vocab * h;
    n->head = has_head ? n->table : 0.0;
    n->widest = fmax(h, fmax(widest_of(c), n->q));
    n->block_matrices = ari_attention_matrices(c) + ari_mlp_matrices(c, true) / n->layers;
    n->largest = h * fmax(fmax(widest_of(c), (double)c->vocab), n->q + (c->gated ? 0.0 : 2.0 * n->kv));
    count_reference(n, run);
    n->tensors = n->steps * (n->layers * (BLOCK_TENSORS + n->experts * EXPERT_TENSORS) + OUTER_TENSORS);
    return ari_param_list(c, add_kept, n);
}

/* Returns the bytes of the reference's forward and backward tensors in one step. */
static double activation_bytes(const elements *n, const reference_elements *r)
{
    return FLOAT * 2.0 * (n->layers * r->block + r->outer);
}

/* Returns the bytes for all steps, with initial weights, gradients, new weights and the optimizer's state. */
static double reference_bytes(const elements *n, const reference_elements *r)
{
    const double weights = FLOAT * (n->trains ? 2.0 + n->states : 1.0) * r->parameters + n->extra * n->parameters;
    return n->steps * (activation_bytes(n, r) + weights) + FLOAT * r->parameters;
}

/* Returns the peak of the exact baseline. It keeps weights and a forward pass in binary64 and frees a block after its
 * backward pass. At the start of the backward pass the whole forward pass is allocated; at its end the reference
 * contains every gradient. When it trains, it also keeps gradients and the optimizer's state. */
static double baseline_bytes(const elements *n, const ari_estimate_case *run)
{
    const double h = n->tokens * n->hidden, q = n->tokens * n->q, kv = n->tokens * n->kv;
    const double block = DOUBLE * (7.0 * h + 3.0 * q + 4.0 * kv + n->tokens * n->middle + n->pairs);
    const double outer_bytes = DOUBLE * (3.0 * h + n->logits);
    const double attention = 6.0 * q + 4.0 * kv + 2.0 * n->pairs, mlp = n->tokens * n->middle;
    const double back = DOUBLE * (4.0 * h + fmax(attention, mlp));
    /* A gradient, a weight as integers; both operands of a product. */
    const double gradient = (DOUBLE + INT) * n->largest + INT * 2.0 * n->tokens * n->widest;
    const double common = outer_bytes + back + gradient + DOUBLE * n->parameters;
    const double trained = n->trains ? DOUBLE * (1.0 + n->states) * n->parameters : 0.0;
    /* When the last step's backward pass starts, its backward tensors and later tensors do not exist yet. */
    const double forward =
        reference_bytes(n, &n->resident) - activation_bytes(n, &n->resident) / 2.0 - FLOAT * n->resident.parameters;
    const double turn = common + trained + forward + n->layers * block,
                 end = common + reference_bytes(n, &n->resident) + block;
    const double exact = fmax(turn, end + trained);
    /* The binary64 baseline runs while the whole reference exists. To measure rounding it keeps as much again, and
     * several runs are concurrent. */
    const double wide = end + (n->layers - 1.0) * block;
    const double run_bytes = common + trained + n->layers * block,
                 noisy = 2.0 * reference_bytes(n, &n->resident) + n->noisy * run_bytes;
    return fmax(exact, n->noisy > 0.0 ? noisy : run->f64 ? wide : 0.0);
}

/* True if under the plan every rank makes the middle of some block's MLP. */
static ar_status has_whole_middle(bool *is_unsharded, const ar_parallel *p, const ari_estimate_case *run)
{
    const bool sequence = ari_plan_by_tokens(&run->run.plan, ari_at_least_one(p->tp), p->sp);
    *is_unsharded = false;
    for (size_t layer = 0; layer < ar_config_blocks(run->config) && !*is_unsharded; layer++) {
        ar_block_split block;
        AR_TRY(ari_plan_block(&run->run.plan, run->config, layer, sequence, &block));
        *is_unsharded = block.mlp.first.output.kind != AR_SHARD;
    }
    return AR_OK;
}

/* Adds the bytes that ranks store for a dump. A replicated value counts once for each rank that has it. */
static ar_status dump_bytes(double *bytes, const elements *n, const ar_parallel *p, const ari_estimate_case *run)
{
    const double tp = ari_at_least_one(p->tp), holders = ari_extent(p, ARI_CUTS_DATA); /* ranks that hold the same
                                                                                          parameters */
    const double extra_copies = run->dump == ARI_DUMPS_FIRST ? 0.0 : tp - 1.0;         /* copies beside the first */
    const double groups = run->dump == ARI_DUMPS_FIRST ? 1.0 : holders;
    const double hidden = p->sp && tp > 1.0 ? 0.0 : n->tokens * n->hidden, middle = n->tokens * n->emitted;
    bool whole_middle = false;
    AR_TRY(has_whole_middle(&whole_middle, p, run));
    const double in_block = 6.0 * hidden + 4.0 * n->tokens * n->kv + (whole_middle ? middle : n->tokens * n->routed);
    const double block = n->total.block + extra_copies * in_block;
    const double activations = 2.0 * (n->layers * block + n->total.outer + extra_copies * 3.0 * hidden);
    const double outputs = n->logits + (1.0 + extra_copies) * (n->layers + 1.0) * n->tokens * n->hidden;
    const bool at_both_ends = (run->config->tied || run->config->mtp > 0) && ari_extent(p, ARI_CUTS_LAYERS) > 1 &&
                              run->dump != ARI_DUMPS_FIRST;
    const double weights = n->parameters + (at_both_ends ? n->table : 0.0) +
                           extra_copies * (n->replicated + 2.0 * n->layers * n->hidden * n->kv);
    const double per_step = (run->dump == ARI_DUMPS_RESULTS ? outputs : activations) +
                            groups * (p->zero > 0 ? 1.0 / holders : 1.0) * (1.0 + n->states) * weights +
                            (n->trains ? groups * weights : 0.0);
    *bytes = run->dump == ARI_DUMPS_NOTHING ? 0.0 : FLOAT * (n->steps * per_step + groups * weights);
    return AR_OK;
}

/* Returns the bytes of the full tensors and of the table of each element's owner after the ranks have ended. The ranks'
 * outputs are still allocated. */
static double merged_bytes(const elements *n)
{
    const double activations = 2.0 * (n->layers * n->total.block + n->total.outer);
    const double outputs = n->logits + (n->layers + 1.0) * n->tokens * n->hidden;
    return (FLOAT + 2.0) * (activations + (3.0 + n->states) * n->parameters + outputs);
}

/* Estimates the bytes of the ranks. For sizes whose dry run would take long, the estimate is about twice the 16-bit
 * account. */
static ar_status ranks_bytes(double *bytes, const ari_planned *p)
{
    ari_memory rank_memory;
    if (ari_planned_quick(p))
        return ari_memory_own_all(bytes, p);
    AR_TRY(ari_memory_production(&rank_memory, p));
    *bytes = 2.0 * ar_parallel_world(&p->step.run.parallel) * ari_memory_sum(&rank_memory);
    return AR_OK;
}

/* Adds the bytes of one layout: the ranks' memory, a checkpoint's weights, and the memory for gathering results. */
static ar_status layout_bytes(double *bytes, const elements *n, const ar_parallel *p, const ari_estimate_case *run)
{
    ari_planned planned = {.step = {.run = run->run, .config = run->config, .tapped = true}};
    planned.step.run.parallel = *p;
    AR_TRY(ranks_bytes(bytes, &planned));
    *bytes += FLOAT * n->parameters;
    /* Full weights for their hash, state too for a checkpoint, and whose each element is. */
    if (run->alone && n->trains)
        *bytes += (FLOAT + 2.0) * (1.0 + (run->saves ? n->states : 0.0)) * n->parameters;
    else if (run->alone) /* gradients, logits and the hidden states between blocks, and whether each is there */
        *bytes += (FLOAT + 1.0) * (n->parameters + n->logits + (n->layers + 1.0) * n->tokens * n->hidden);
    else
        *bytes += reference_bytes(n, &n->resident) +
                  n->tensors *
                      ((double)run->bytes_per_tensor + (double)ar_parallel_world(p) * (double)run->bytes_per_finding);
    return AR_OK;
}

/* --- time --------------------------------------------------------------------------------------------------------- */

/* Measured in November 2026 on two x86-64 cores with AVX-512; the models were not written down. */
static const double EXACT_RATE = 1.9e9, BINARY64_RATE = 3.4e9; /* multiply-adds of the baseline per second on one
                                                                  core */
static const double NOISY_RATE = 2.3e9;                        /* the same with a random error for every rounding */
static const double LAYOUT_RATE = 8e9;                         /* rate of a layout, over all ranks together */
static const double GRADCHECK_RATE = 5e9;                      /* rate of finite differences on two threads */
/* Seconds per weight of one run: 50 ns to draw it, the rest for its gradient, the first access to its memory, and its
 * hash. */
static const double PARAMETER_SECONDS = 90e-9;
static const double VALUE_SECONDS = 20e-9; /* seconds per activation, for elementwise functions and the comparison */

/* Returns the seconds of central differences: two elements per parameter, eight step sizes in both directions, on 2 x
 * 16 tokens, each of which repeats about half of the forward pass. */
static double gradcheck_seconds(const elements *n)
{
    const double parameters = n->layers * (12.0 + 3.0 * n->experts) + 4.0;
    return parameters * 2.0 * AR_GRADCHECK_STEPS * 2.0 * 32.0 * n->parameters / 2.0 / GRADCHECK_RATE;
}

/* Returns the seconds of a run. macs: multiply-adds of one step. */
static double seconds_of(const elements *n, double macs, const ari_estimate_case *run)
{
    const double values = 2.0 * (n->layers * n->total.block + n->total.outer);
    const double tensors = VALUE_SECONDS * values, weights = PARAMETER_SECONDS * n->parameters;
    double seconds = 0.0;
    for (size_t i = 0; i < run->layouts; i++)
        seconds += n->steps * (macs / LAYOUT_RATE + tensors + ari_extent(&run->parallel[i], ARI_CUTS_DATA) * weights);
    if (run->alone)
        return seconds;
    seconds += n->steps * (macs / EXACT_RATE + tensors + weights);
    if (n->noisy > 0.0)
        seconds += n->steps * (macs / BINARY64_RATE + tensors + weights +
                               run->noise_runs / n->noisy * (macs / NOISY_RATE + tensors + weights));
    else if (run->f64)
        seconds += macs / BINARY64_RATE + tensors + weights;
    return seconds + (run->gradcheck ? gradcheck_seconds(n) : 0.0);
}

/* --- address space ------------------------------------------------------------------------------------------------ */

/* Returns the address space that threads reserve in addition to used memory. */
static double reserved_bytes(double ranks)
{
    const double threads = RANK_THREADS * ranks;
    return threads * ARI_STACK_BYTES + fmin(threads, PROCESSOR_ARENAS * ari_cores()) * ARENA_BYTES;
}

/* --- the whole ---------------------------------------------------------------------------------------------------- */

static ar_status as_bytes(size_t *bytes, double count)
{
    if (!(count < 0x1p62))
        return ar_error_set(AR_ERR_OVERFLOW, "this would take about %.3g GB of memory", count * 1e-9);
    *bytes = (size_t)count;
    return AR_OK;
}

/* A loop over this many layers or features of a head takes negligible time. */
enum { FEW = 1 << 14 };

ar_status ari_estimate_layers(const ar_config *c)
{
    ari_estimate e = {.available = ari_available_memory(""), .available_space = SIZE_MAX};
    const double q = (double)c->heads * (double)c->head_dim;
    const double matrices = 2.0 * (double)c->hidden * ((double)c->ffn + q) * (double)c->layers;
    if (c->layers <= FEW && c->head_dim <= FEW)
        return AR_OK;
    AR_TRY(as_bytes(&e.bytes, matrices * WEIGHT));
    return ari_estimate_fits(&e);
}

ar_status ari_estimate_check(ari_estimate *e, const ari_estimate_case *run)
{
    elements n;
    ari_estimate r = {.available = ari_available_memory(""), .available_space = ari_available_space("")};
    AR_TRY(count_elements(&n, run));
    double peak_bytes = run->alone && run->noise_runs == 0 ? 0.0 : baseline_bytes(&n, run), ranks = 1.0;
    double written = run->alone ? 0.0 : reference_bytes(&n, &n.total);
    for (size_t i = 0; i < run->layouts; i++) {
        const ar_parallel *p = &run->parallel[i];
        double layout = 0.0, dumped_bytes = 0.0;
        AR_TRY(layout_bytes(&layout, &n, p, run));
        AR_TRY(dump_bytes(&dumped_bytes, &n, p, run));
        written += dumped_bytes;
        const double merged = run->merges ? merged_bytes(&n) + NOT_RETURNED * layout : 0.0;
        peak_bytes = fmax(peak_bytes, dumped_bytes + fmax(layout, merged));
        ranks = fmax(ranks, ar_parallel_world(p));
    }
    AR_TRY(as_bytes(&r.bytes, (n.trains ? SLACK_OF_STEPS : SLACK) * peak_bytes + PROGRAM_BYTES + ranks * RANK_BYTES));
    AR_TRY(as_bytes(&r.space, (double)r.bytes + reserved_bytes(run->run.process ? 1.0 : ranks)));
    AR_TRY(as_bytes(&r.written, run->dump == ARI_DUMPS_NOTHING ? 0.0 : written));
    const double pairs = n.tokens * (double)run->run.seq * n.q;
    const double macs = 3.0 * n.tokens * (n.layers * n.block_matrices + n.head) + 6.0 * n.layers * pairs;
    r.macs = n.steps * macs;
    r.seconds = seconds_of(&n, macs, run);
    *e = r;
    return AR_OK;
}

static ar_status expect_room(size_t bytes, size_t available, const char *resource, const char *advice)
{
    static const double giga = 1e9, mega = 1e6;
    const bool few = (double)available < giga;
    const double unit = few ? mega : giga;
    if (bytes <= available)
        return AR_OK;
    return ar_error_set(AR_ERR_ARG, "this would take about %.1f %s of %s and %.1f %s are free; take %s",
                        (double)bytes / unit, few ? "MB" : "GB", resource, (double)available / unit, few ? "MB" : "GB",
                        advice);
}

ar_status ari_estimate_fits(const ari_estimate *e)
{
    AR_TRY(expect_room(e->bytes, e->available, "memory",
                       "a smaller model, batch or sequence, fewer steps or fewer ranks, or shrink the model (scale "
                       "1/N)"));
    return expect_room(e->space, e->available_space, "address space, most of it reserved for the ranks' threads,",
                       "fewer ranks, or raise the limit (ulimit -v)");
}
