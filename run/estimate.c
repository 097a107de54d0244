/* SPDX-License-Identifier: Apache-2.0 */
/* What is alive at each of the moments where memory can peak; the peak is the largest of them. Elements are counted in
 * binary64, where no product of sizes wraps and nothing here needs the last digit. tests/verify/estimate_test.c holds
 * the figures to measured ones. */
#include "run/estimate.h"

#include <math.h>
#include <stdint.h>

#include "anyrank/check.h"
#include "anyrank/model.h"
#include "ref/core/size.h"
#include "ref/core/wait.h"
#include "ref/models/family.h"
#include "run/run.h"

/* Bytes of one element. */
static const double FLOAT = 4.0, DOUBLE = 8.0, INT = 4.0;
/* A rank's own: an accumulator of 17 bytes (t, h, l) and the weight packed as integers in both orientations. */
static const double ACCUMULATOR = 17.0, KEPT_OPERANDS = 8.0;
/* In a bucket of gradients: an accumulator and the index that all ranks agree on. */
static const double BUCKETED = 18.0;
/* The baseline sums a gradient over bands of this many rows: nine slices, a top and a product for each element. */
static const double BAND_ROWS = 256.0, BAND_BYTES = 9.0 * 8.0 + 1.0 + 8.0;
/* Freed pieces between others that live on, page tables, what an allocation is rounded up to; with steps, tensors of
 * one lie where temporaries of the next would. */
static const double SLACK = 1.15, SLACK_OF_STEPS = 1.3;
/* Of the ranks' memory, what the allocator still holds when they have ended: measured with glibc 2.36 in November 2026,
 * on the rows with dumps of tests/verify/estimate_test.c. */
static const double NOT_RETURNED = 0.4;
/* The program itself, and what a rank takes whatever the model's size: stacks, tiles, packing scratch. */
static const double PROGRAM_BYTES = 8e6, RANK_BYTES = 1e6;
/* Tensors that the baseline emits in a step: at most this many in a block of both passes and its parameters, and around
 * them. */
static const double BLOCK_TENSORS = 106.0, OUTER_TENSORS = 42.0;

/* Numbers of elements, of the whole model unless "block" says one block. */
typedef struct elements {
    double parameters, largest; /* largest: of one weight matrix */
    double block_matrices;      /* weight matrices of a block */
    double replicated;          /* over tp, at most: norms, the biases of row-parallel layers, positions */
    double table, widest;       /* the embedding; the widest row of a block's weight */
    double head;                /* of the LM head's weight; 0 without one */
    double tokens, hidden, q, kv, ffn, fc, logits, probs;
    double layers;
    double block_reference; /* what the baseline emits in one pass of a block */
    double outer_reference; /* and around the blocks */
    double tensors;         /* of all steps */
    double steps, states;   /* states: numbers of an optimizer for each weight */
    double beside; /* bytes of each weight and step: an allowance of its own, how far its update is in doubt, and
                      whether its gradient rounds */
    double noisy;  /* runs with errors at once; 0: none */
    bool trains;
} elements;

/* What a layout makes of them. */
typedef struct split {
    double tp, dp, ranks;
    bool zero;         /* each of the dp ranks keeps its part of the optimizer's state */
    double at_once;    /* share of the batch that goes through a rank at once: micro-batches */
    double whole;      /* hidden states kept on each of the tp ranks, in copies of all tokens */
    double middles;    /* copies of an MLP's middle over all blocks: one of a block, or one on each rank of it */
    double attentions; /* of an attention's heads, likewise */
    double logits;     /* of the logits: one, or one on each rank */
    double copied;     /* elements of matrices that the tp ranks have more than once */
    bool whole_middle; /* somewhere the latter */
    bool sp;
} split;

static double largest_of(double a, double b)
{
    return a > b ? a : b;
}

static bool by_features(ar_placement p)
{
    return p.kind == AR_SHARD && p.dim == -1;
}

static bool is_whole(const ar_linear_split *s)
{
    return s->style == AR_STYLE_REPLICATE;
}

/* The widths, besides the hidden one, of a block's matrices that every tp rank has all of. */
static double block_copied(const elements *n, const ar_block_split *s)
{
    return is_whole(&s->attention.first) * (n->q + 2.0 * n->kv) + is_whole(&s->attention.second) * n->q +
           is_whole(&s->mlp.first) * n->fc + is_whole(&s->mlp.second) * n->ffn;
}

static ar_status count_split(split *s, const elements *n, const ari_estimate_case *run, const ar_parallel *p)
{
    const double pieces = p->forward_first ? 1.0 : ari_at_least_one(p->micro_batches), kept = 8.0 * n->layers + 6.0;
    *s = (split){
        .tp = ari_at_least_one(p->tp), .dp = ari_at_least_one(p->dp), .zero = p->zero > 0, .sp = p->sp && p->tp > 1};
    s->ranks = s->tp * s->dp;
    const double samples = ceil((double)run->run.batch / s->dp);
    const double at_work = s->dp < (double)run->run.batch ? s->dp : (double)run->run.batch; /* of the dp ranks */
    s->at_once = ceil(samples / pieces) * at_work / (double)run->run.batch;
    /* Shared sequences: a part of what is kept; the inputs gathered for a block's two halves are kept or go again. */
    s->whole = s->sp ? kept / s->tp + 6.0 + (p->keep_gathered ? 2.0 * n->layers + 1.0 : 0.0) : kept;
    const bool sequence = ar_plan_by_tokens(&run->run.plan, ari_at_least_one(p->tp), p->sp);
    for (size_t layer = 0; layer < run->config->layers; layer++) {
        ar_block_split block;
        AR_TRY(ar_plan_block(&run->run.plan, run->config, layer, sequence, &block));
        const bool whole = !by_features(block.mlp.first.to) && s->tp > 1.0;
        s->attentions += by_features(block.attention.first.to) ? 1.0 : s->tp;
        s->copied += (s->tp - 1.0) * n->hidden * block_copied(n, &block);
        s->middles += whole ? s->tp : 1.0;
        s->whole_middle = s->whole_middle || whole;
    }
    ar_outer_split outer;
    AR_TRY(ar_plan_outer(&run->run.plan, run->config, sequence, &outer));
    const bool head = n->head > 0.0 && !run->config->tied && is_whole(&outer.head);
    s->copied += (s->tp - 1.0) * n->table * ((outer.tokens == AR_EMBEDDING_WHOLE) + head);
    s->logits = by_features(outer.head.to) ? 1.0 : s->tp;
    return AR_OK;
}

static double states_of(const ar_optimizer_options *o)
{
    return o->kind == AR_OPTIMIZER_SGD ? (o->momentum != 0.0 ? 1.0 : 0.0) : 2.0;
}

static ar_status count_elements(elements *n, const ari_estimate_case *run)
{
    const ar_config *c = run->config;
    const bool has_head = ari_part_path(ari_family_of(c->arch), ARI_HEAD) != NULL;
    size_t parameters = 0;
    AR_TRY(ar_config_parameters(c, &parameters));
    const double heads = (double)c->heads, d = (double)c->head_dim, h = (double)c->hidden;
    *n = (elements){.parameters = (double)parameters, .hidden = h, .layers = (double)c->layers};
    n->trains = run->run.steps > 0;
    n->steps = (double)ari_run_steps(&run->run);
    n->replicated = h * (6.0 * n->layers + 2.0 + (c->learned_positions ? (double)c->max_positions : 0.0));
    n->states = n->trains ? states_of(&run->run.optimizer) : 0.0;
    n->beside = run->run.numerics == AR_NUMERICS_NATIVE && !run->alone && n->states > 1.0 ? FLOAT + 1.0 : 0.0;
    if (n->beside > 0.0 && run->run.precision != AR_PRECISION_F32)
        n->beside += FLOAT;
    if (run->noise_runs > 0)
        n->noisy = fmin(ari_threads(run->run.threads), run->noise_runs);
    n->tokens = (double)run->run.batch * (double)run->run.seq;
    n->q = heads * d;
    n->kv = (double)c->kv_heads * d;
    n->ffn = (double)c->ffn;
    n->fc = c->gated ? 2.0 * n->ffn : n->ffn;
    n->probs = n->tokens * (double)run->run.seq * heads;
    n->logits = has_head ? n->tokens * (double)c->vocab : 0.0;
    n->table = (double)c->vocab * h;
    n->head = has_head ? n->table : 0.0;
    n->widest = largest_of(h, largest_of(n->ffn, n->q));
    n->block_matrices = h * (2.0 * n->q + 2.0 * n->kv + n->fc + n->ffn);
    n->largest = h * largest_of(largest_of(n->ffn, (double)c->vocab), n->q + (c->gated ? 0.0 : 2.0 * n->kv));
    const double rotated = c->rope ? n->q + n->kv : 0.0;
    n->block_reference = n->tokens * (6.0 * h + 2.0 * n->q + 2.0 * n->kv + rotated + n->fc + n->ffn) + n->probs;
    if (run->run.dropout > 0.0) /* of the probabilities forward, of two hidden states both ways */
        n->block_reference += n->tokens * 2.0 * h + n->probs / 2.0;
    n->outer_reference = n->logits + 3.0 * n->tokens * h;
    n->tensors = n->steps * (n->layers * BLOCK_TENSORS + OUTER_TENSORS);
    return AR_OK;
}

/* The reference's forward and backward tensors of one step. */
static double activation_bytes(const elements *n)
{
    return FLOAT * 2.0 * (n->layers * n->block_reference + n->outer_reference);
}

/* And of all steps, with initial weights, gradients, new weights and the optimizer's state. */
static double reference_bytes(const elements *n)
{
    const double each = activation_bytes(n) + (FLOAT * (n->trains ? 2.0 + n->states : 1.0) + n->beside) * n->parameters;
    return n->steps * each + FLOAT * n->parameters;
}

/* The exact baseline keeps weights and a forward pass in binary64, and frees a block once it is back through it. As it
 * turns round at the last block all of the forward pass is alive; at its end every gradient is in the reference. Where
 * it trains, it keeps gradients and the optimizer's state too. */
static double baseline_bytes(const elements *n, const ari_estimate_case *run)
{
    const double h = n->tokens * n->hidden, q = n->tokens * n->q, kv = n->tokens * n->kv;
    const double block = DOUBLE * (7.0 * h + 3.0 * q + 4.0 * kv + n->tokens * (n->fc + n->ffn) + n->probs);
    const double around = DOUBLE * (3.0 * h + n->logits);
    const double attention = 6.0 * q + 4.0 * kv + 2.0 * n->probs, mlp = n->tokens * (n->fc + n->ffn);
    const double back = DOUBLE * (4.0 * h + largest_of(attention, mlp));
    /* A gradient, the same transposed, and one operand as integers; a band's sums. */
    const double gradient = (2.0 * DOUBLE + INT) * n->largest + BAND_ROWS * n->widest * BAND_BYTES;
    const double common = around + back + gradient + DOUBLE * n->parameters;
    const double trained = n->trains ? DOUBLE * (1.0 + n->states) * n->parameters : 0.0;
    /* At the last step's turn, its backward tensors and what follows them are not there yet. */
    const double forward = reference_bytes(n) - activation_bytes(n) / 2.0 - FLOAT * n->parameters;
    const double turn = common + trained + forward + n->layers * block, end = common + reference_bytes(n) + block;
    const double exact = largest_of(turn, end + trained);
    /* The binary64 one finds the whole reference there; to measure rounding it runs as long, and keeps as much again.
     * Then several run at once. */
    const double wide = end + (n->layers - 1.0) * block;
    const double own = common + trained + n->layers * block, noisy = 2.0 * reference_bytes(n) + n->noisy * own;
    return largest_of(exact, n->noisy > 0.0 ? noisy : run->f64 ? wide : 0.0);
}

/* Activations of all ranks at once: hidden ones on each, the others split between them. */
static double step_bytes(const elements *n, const split *s)
{
    const double h = n->tokens * n->hidden, q = n->tokens * n->q, kv = n->tokens * n->kv;
    const double middle = n->tokens * n->fc, copies = s->whole_middle ? s->tp : 1.0;
    const double each = s->tp * s->whole * h; /* kept on every rank */
    const double shared = s->attentions * (3.0 * (q + kv) + n->probs) + 2.0 * s->middles * middle; /* kept once */
    const double heads = s->attentions > n->layers ? s->tp : 1.0;
    const double back =
        3.0 * heads * n->probs + 8.0 * largest_of(copies * n->tokens * n->ffn, heads * q); /* of a block on its way */
    /* Partial sums of two limbs under way: three of hidden width, or one of a middle. */
    const double sums = s->tp * 4.0 * largest_of(3.0 * h, s->whole_middle ? middle : 0.0);
    return s->at_once * FLOAT * (each + shared + 3.0 * s->logits * n->logits + back + sums);
}

/* Gradients on their way between ranks: all of them over dp; over tp those of replicated parameters whose terms
 * sequence parallelism spreads. A bucket's bytes do not depend on how many there are. */
static double bucket_bytes(const elements *n, const split *s)
{
    return BUCKETED * (s->dp > 1.0 ? s->dp * n->parameters : s->sp ? s->tp * n->replicated : 0.0);
}

/* An update of shares, when activations are gone: a bucket's weights, in which there may be all, and the gradient of a
 * share. */
static double update_bytes(const elements *n, const split *s)
{
    return s->zero && n->trains ? FLOAT * (s->dp + 1.0) * n->parameters : 0.0;
}

/* What the ranks keep to write it. A replicated value is there once for each rank that has it. */
static double dump_bytes(const elements *n, const split *s, const ari_estimate_case *run)
{
    const double others = run->dump == ARI_DUMPS_FIRST ? 0.0 : s->tp - 1.0; /* copies beside the first */
    const double groups = run->dump == ARI_DUMPS_FIRST ? 1.0 : s->dp;
    const double hidden = s->sp ? 0.0 : n->tokens * n->hidden, middle = n->tokens * (n->fc + n->ffn);
    const double in_block = 6.0 * hidden + 4.0 * n->tokens * n->kv + (s->whole_middle ? middle : 0.0);
    const double block = n->block_reference + others * in_block;
    const double activations = 2.0 * (n->layers * block + n->outer_reference + others * 3.0 * hidden);
    const double outputs = n->logits + (1.0 + others) * (n->layers + 1.0) * n->tokens * n->hidden;
    const double weights = n->parameters + others * (n->replicated + 2.0 * n->layers * n->hidden * n->kv);
    const double each = (run->dump == ARI_DUMPS_RESULTS ? outputs : activations) +
                        groups * (s->zero ? 1.0 / s->dp : 1.0) * (1.0 + n->states) * weights +
                        (n->trains ? groups * weights : 0.0);
    return run->dump == ARI_DUMPS_NOTHING ? 0.0 : FLOAT * (n->steps * each + groups * weights);
}

/* Full tensors of what was kept, and whose each element is: when the ranks have ended. Their outputs are there too. */
static double merged_bytes(const elements *n)
{
    const double activations = 2.0 * (n->layers * n->block_reference + n->outer_reference);
    const double outputs = n->logits + (n->layers + 1.0) * n->tokens * n->hidden;
    return (FLOAT + 2.0) * (activations + (3.0 + n->states) * n->parameters + outputs);
}

/* One layout: weights, gradients, kept operands and the optimizer's state once over the ranks of a tensor-parallel
 * group (what they replicate is small), a checkpoint's weights beside them, and one gradient's value and product under
 * way. */
static double layout_bytes(const elements *n, const split *s, const ari_estimate_case *run)
{
    const double checkpoint = FLOAT;
    const double group = FLOAT + ACCUMULATOR + KEPT_OPERANDS + FLOAT * n->states / (s->zero ? s->dp : 1.0);
    const double own =
        (s->dp * group + checkpoint) * n->parameters + s->dp * (group * s->copied + 2.0 * FLOAT * n->largest);
    const double ranks = own + bucket_bytes(n, s) + largest_of(step_bytes(n, s), update_bytes(n, s));
    /* Full weights for their hash, state too for a checkpoint, and whose each element is. */
    if (run->alone && n->trains)
        return ranks + (FLOAT + 2.0) * (1.0 + (run->saves ? n->states : 0.0)) * n->parameters;
    if (run->alone) /* gradients, logits and the hidden states between blocks, and whether each is there */
        return ranks + (FLOAT + 1.0) * (n->parameters + n->logits + (n->layers + 1.0) * n->tokens * n->hidden);
    const double findings = n->tensors * ((double)run->bytes_per_tensor + s->ranks * (double)run->bytes_per_finding);
    /* Beside the reference's, final weights and gradients are gathered from the ranks. */
    return ranks + reference_bytes(n) + 2.0 * FLOAT * n->parameters + findings;
}

/* --- time --------------------------------------------------------------------------------------------------------- */

/* Measured in November 2026 on two x86-64 cores with AVX-512; the models were not written down. */
static const double EXACT_RATE = 1.9e9, BINARY64_RATE = 3.4e9; /* of the baseline, multiply-adds a second on one core */
static const double NOISY_RATE = 2.3e9;                        /* with an error drawn for every rounding */
static const double LAYOUT_RATE = 8e9;                         /* of a layout, all ranks together */
static const double GRADCHECK_RATE = 5e9;                      /* of central differences, on two threads */
/* A weight of one run: 50 ns to draw it, the rest for its gradient, its memory's first touch and its hash. */
static const double PARAMETER_SECONDS = 90e-9;
static const double VALUE_SECONDS = 20e-9; /* an activation: functions of one value, comparison */

/* Central differences: each of two elements of a parameter, eight sizes of a step, up and down, on 2 x 16 tokens, where
 * about half of the forward pass runs again. */
static double gradcheck_seconds(const elements *n)
{
    const double parameters = n->layers * 12.0 + 4.0;
    return parameters * 2.0 * AR_GRADCHECK_STEPS * 2.0 * 32.0 * n->parameters / 2.0 / GRADCHECK_RATE;
}

/* macs: of one step. */
static double seconds_of(const elements *n, double macs, const ari_estimate_case *run)
{
    const double values = 2.0 * (n->layers * n->block_reference + n->outer_reference);
    const double tensors = VALUE_SECONDS * values, weights = PARAMETER_SECONDS * n->parameters;
    double seconds = 0.0;
    for (size_t i = 0; i < run->layouts; i++)
        seconds += n->steps * (macs / LAYOUT_RATE + tensors + ari_at_least_one(run->parallel[i].dp) * weights);
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

/* --- the whole ---------------------------------------------------------------------------------------------------- */

static ar_status as_bytes(size_t *bytes, double count)
{
    if (!(count < 0x1p62))
        return ar_error_set(AR_ERR_OVERFLOW, "this would take about %.3g GB of memory", count * 1e-9);
    *bytes = (size_t)count;
    return AR_OK;
}

ar_status ari_estimate_layers(const ar_config *c)
{
    ari_estimate e = {.available = ari_available_memory()};
    const double q = (double)c->heads * (double)c->head_dim;
    const double matrices = 2.0 * (double)c->hidden * ((double)c->ffn + q) * (double)c->layers;
    AR_TRY(as_bytes(&e.bytes, matrices * (FLOAT + ACCUMULATOR + KEPT_OPERANDS)));
    return ari_estimate_fits(&e);
}

ar_status ari_estimate_check(ari_estimate *e, const ari_estimate_case *run)
{
    elements n;
    ari_estimate r = {.available = ari_available_memory()};
    AR_TRY(count_elements(&n, run));
    double most = run->alone && run->noise_runs == 0 ? 0.0 : baseline_bytes(&n, run), ranks = 1.0;
    for (size_t i = 0; i < run->layouts; i++) {
        split s;
        AR_TRY(count_split(&s, &n, run, &run->parallel[i]));
        const double layout = layout_bytes(&n, &s, run), kept = dump_bytes(&n, &s, run);
        const double merged = run->merges ? merged_bytes(&n) + NOT_RETURNED * layout : 0.0;
        most = largest_of(most, kept + largest_of(layout, merged));
        ranks = largest_of(ranks, s.ranks);
    }
    AR_TRY(as_bytes(&r.bytes, (n.trains ? SLACK_OF_STEPS : SLACK) * most + PROGRAM_BYTES + ranks * RANK_BYTES));
    const double pairs = n.tokens * (double)run->run.seq * n.q;
    const double macs = 3.0 * n.tokens * (n.layers * n.block_matrices + n.head) + 6.0 * n.layers * pairs;
    r.macs = n.steps * macs;
    r.seconds = seconds_of(&n, macs, run);
    *e = r;
    return AR_OK;
}

static const double GIGABYTE = 1e9;

ar_status ari_estimate_fits(const ari_estimate *e)
{
    const bool mega = (double)e->available < GIGABYTE;
    const double unit = mega ? GIGABYTE * 1e-3 : GIGABYTE;
    if (e->bytes > e->available)
        return ar_error_set(AR_ERR_ARG,
                            "this would take about %.1f %s of memory and %.1f %s are free; take a smaller model, batch "
                            "or sequence, fewer steps or fewer ranks, or shrink the model with --scale 1/N",
                            (double)e->bytes / unit, mega ? "MB" : "GB", (double)e->available / unit,
                            mega ? "MB" : "GB");
    return AR_OK;
}
