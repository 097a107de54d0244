/* SPDX-License-Identifier: Apache-2.0 */
#include "support/layout_draw.h"
#include "ref/core/batch_private.h"
#include "ref/core/optimizer_private.h"
#include "ref/models/parallel_private.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_RANKS = 32, MOST_STAGES = 8, MOST_CHUNKS = 9, MOST_POSITIONS = 11, SEEDS_APART = 1000003 };

/* A number in [0, n), from the middle of a linear congruential state. */
static size_t pick(uint64_t *state, size_t n)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (size_t)(*state >> 33) % n;
}

static bool coin(uint64_t *state)
{
    return pick(state, 2) == 1;
}

#define PICK(state, list) ((list)[pick((state), sizeof(list) / sizeof *(list))])

/* A ring, inner neighbours, or both. */
static void draw_context(ar_parallel *p, uint64_t *s)
{
    static const int rings[] = {1, 2, 2, 2, 3, 4, 4, 8}, inners[] = {1, 1, 1, 2, 2, 2, 3, 4};
    const int ring = PICK(s, rings);
    p->cp_inner = PICK(s, inners);
    p->cp = ring * p->cp_inner;
    p->zigzag = ring > 1 && coin(s);
}

/* What divides the length of a sequence. */
static size_t unit_of(const ar_parallel *p)
{
    const size_t unit = (size_t)(p->cp * (p->sp ? p->tp : 1)), chunks = (size_t)(2 * p->cp / p->cp_inner);
    return p->zigzag && unit % chunks != 0 ? 2 * unit : unit;
}

/* In chunks, of which the last may be shorter, of longer sequences. By numbers of its own, so that it changes nothing
 * else of a seed's draw. */
static void draw_overlap(layout_draw *d)
{
    ar_parallel *p = &d->run.parallel;
    uint64_t own = (d->seed + 1) * SEEDS_APART;
    const size_t unit = unit_of(p), most = LAYOUT_DRAW_SEQ / unit;
    pick(&own, 2);
    p->overlap = !p->sp || p->tp == 1 ? 1 : coin(&own) ? 2 + (int)pick(&own, 3) : 1 + (int)pick(&own, MOST_CHUNKS);
    if (p->overlap > 1 && most > 0)
        d->run.seq = unit * (1 + pick(&own, most < MOST_POSITIONS ? most : MOST_POSITIONS));
}

/* The layers of each stage: the first and the last may have none, since they have the embedding and the head. */
static void draw_stages(ar_stages *given, uint64_t *s, int stages, size_t *layers)
{
    *layers = 0;
    given->n = stages;
    for (int i = 0; i < stages; i++) {
        const bool ends = i == 0 || i + 1 == stages;
        given->layers[i] = (uint16_t)(ends ? pick(s, 3) : 1 + pick(s, 2));
        *layers += given->layers[i];
    }
    if (*layers == 0)
        *layers = given->layers[0] = 1;
}

/* A pipeline in three of four draws, of few layers, and how ZeRO shares out what the ranks of dp hold. By numbers of
 * its own, so that it changes nothing else. */
static void draw_pipeline(layout_draw *d, uint64_t *s)
{
    static const int ranks[] = {1, 2, 2, 2, 2, 3, 3, 4};
    ar_parallel *p = &d->run.parallel;
    p->pp = PICK(s, ranks);
    p->virtual_stages = 1;
    p->micro_batches = 1 + (int)pick(s, LAYOUT_DRAW_BATCH);
    p->zero = (int)pick(s, 4);
    p->dp *= pick(s, 4) == 0 ? 2 : 1;
    p->dp_replicate = p->zero > 0 && p->dp % 2 == 0 && pick(s, 3) == 0 ? 2 : 1;
    d->config.layers = 1 + pick(s, 3);
    if (p->pp == 1)
        return;
    p->forward_first = false;
    p->schedule = (ar_pp_schedule)pick(s, AR_PP_SCHEDULES);
    if (p->schedule == AR_PP_INTERLEAVED)
        p->virtual_stages = 2 + (int)pick(s, 2);
    const int stages = ari_parallel_stages(p);
    d->config.layers = (size_t)stages + pick(s, 3);
    if (pick(s, 3) == 0)
        draw_stages(&p->stages, s, stages, &d->config.layers);
}

static void draw_parallel(layout_draw *d, uint64_t *s)
{
    static const int tps[] = {1, 1, 2, 2, 3, 4, 4, 4, 5, 6, 6, 8}, dps[] = {1, 1, 2, 2, 3, 4, 5};
    static const int few_tps[] = {1, 1, 2, 2, 3, 4}, few_dps[] = {1, 1, 2, 3};
    ar_parallel *p = &d->run.parallel;
    const bool context = d->kind != DRAW_TENSORS;
    p->tp = context ? PICK(s, few_tps) : PICK(s, tps);
    p->dp = context ? PICK(s, few_dps) : PICK(s, dps);
    p->cp = p->cp_inner = 1;
    p->micro_batches = 1 + (int)pick(s, 3);
    p->sp = pick(s, 5) < 3;
    p->keep_gathered = coin(s);
    p->forward_first = coin(s);
    d->run.batch = 1 + pick(s, LAYOUT_DRAW_BATCH);
    if (context && (d->kind == DRAW_CONTEXTS || pick(s, 3) == 0))
        draw_context(p, s);
    d->run.seq = p->sp || context ? unit_of(p) * (1 + pick(s, 3)) : 1 + pick(s, 12);
    draw_overlap(d);
}

/* Heads that the ranks and their inner neighbours can share: KV heads a multiple of them, or (replicas) a divisor. */
static void draw_heads(layout_draw *d, uint64_t *s)
{
    ar_config *c = &d->config;
    const size_t n = (size_t)(d->run.parallel.tp * d->run.parallel.cp_inner);
    c->kv_heads = n * (n < 4 ? 1 + pick(s, 2) : 1);
    c->heads = c->kv_heads * (c->arch == AR_ARCH_GPT2 || n > 4 ? 1 : 1 + pick(s, 3));
    if (c->arch == AR_ARCH_GPT2 || pick(s, 4) == 0)
        return;
    size_t kv = 1 + pick(s, n);
    while (n % kv != 0)
        kv--;
    c->kv_heads = kv;
}

/* Layers with and without a window, which is mostly shorter than the sequence. */
static void draw_window(layout_draw *d, uint64_t *s)
{
    ar_config *c = &d->config;
    c->window = coin(s) ? 1 + pick(s, d->run.seq) : 0;
    c->full_attention[0] = c->window > 0 && coin(s) ? pick(s, 4) : 0;
}

/* A first context so short that some waves are kept, some blended and some slowed, and mostly shorter than a sequence.
 * Numbers that a file has as they are. */
static void draw_rope(layout_draw *d, uint64_t *s)
{
    static const struct {
        double factor, low, high;
        size_t n;
    } scalings[] = {{8.0, 1.0, 4.0, 40}, {2.0, 0.5, 3.0, 300}, {32.0, 1.0, 1.25, 64}};
    static const ar_rope_kind kinds[] = {AR_ROPE_LLAMA3, AR_ROPE_DYNAMIC, AR_ROPE_YARN, AR_ROPE_LONGROPE};
    ar_rope *r = &d->config.rope;
    const size_t kind = pick(s, 3), like = kind == 2 ? pick(s, 3) : 0;
    uint64_t own = d->seed + 77; /* the other draws do not depend on how many numbers a kind has */
    r->kind = kind == 2 ? PICK(&own, kinds) : kind == 1 ? AR_ROPE_LINEAR : AR_ROPE_DEFAULT;
    r->factor = r->kind == AR_ROPE_LINEAR ? 4.0 : scalings[like].factor;
    r->low_freq_factor = scalings[like].low;
    r->high_freq_factor = scalings[like].high;
    r->original_positions = r->kind == AR_ROPE_LLAMA3 ? scalings[like].n : 2 + pick(&own, d->run.seq);
    r->beta_fast = 2.0;
    r->beta_slow = coin(&own) ? 0.5 : 0.125;
    r->truncate = coin(&own);
    r->mscale = coin(&own) ? 1.5 : 0.0;
    r->mscale_all_dim = coin(&own) ? 0.5 : 0.0;
    r->attention_factor = pick(&own, 3) == 0 ? 1.25 : 0.0;
    for (size_t i = 0; i < d->config.head_dim / 2; i++) {
        r->short_factor[i] = 1.0f + 0.125f * (float)pick(&own, 8);
        r->long_factor[i] = 2.0f + 0.25f * (float)pick(&own, 40);
    }
    if (r->kind == AR_ROPE_DYNAMIC && ar_rope_dim(r, d->config.head_dim) <= 2)
        r->kind = AR_ROPE_YARN;
}

/* Some of the models that Phi-3 could be become it: packed parameters, of which no rank has copies of a KV head, and
 * heads of which a part turns. */
static void draw_packed(layout_draw *d)
{
    ar_config *c = &d->config;
    uint64_t own = d->seed + 78;
    const bool as_file = !d->by_check || d->form == DRAW_MISTRAL;
    if (c->arch != AR_ARCH_LLAMA || c->kv_heads % (size_t)d->run.parallel.tp != 0 || c->mlp_bias || !as_file ||
        coin(&own))
        return;
    c->arch = AR_ARCH_PHI3;
    d->form = DRAW_PHI3;
    if (!c->rope.kind)
        return;
    if (d->by_check && c->rope.kind != AR_ROPE_DEFAULT)
        c->rope.kind = AR_ROPE_LONGROPE;
    if (c->rope.kind != AR_ROPE_DYNAMIC && c->head_dim > 2 && coin(&own))
        c->rope.rotary_dim = 2 * (1 + pick(&own, c->head_dim / 2 - 1));
    for (size_t i = ar_rope_dim(&c->rope, c->head_dim) / 2; i < AR_ROPE_PAIRS; i++)
        c->rope.short_factor[i] = c->rope.long_factor[i] = 0.0f;
}

/* Of a model whose longest sequence is known: dynamic is for sequences up to factor times as long as the file says, and
 * longrope's factor may follow from both. */
static void fit_rope(ar_config *c, size_t seq)
{
    ar_rope *r = &c->rope;
    if (r->kind == AR_ROPE_LONGROPE)
        r->factor = (double)c->max_positions / (double)r->original_positions;
    while (r->kind == AR_ROPE_DYNAMIC && r->original_positions * (size_t)r->factor < seq)
        r->factor *= 2.0;
    if (r->kind == AR_ROPE_DYNAMIC)
        c->max_positions = r->original_positions * (size_t)r->factor;
}

/* What Qwen2 and Mistral fix in Llama's form, and the windows that only they have. */
static void draw_form(layout_draw *d, uint64_t *s)
{
    ar_config *c = &d->config;
    d->form = (layout_draw_form)pick(s, 3);
    if (d->form == DRAW_LLAMA)
        return;
    draw_window(d, s);
    c->qkv_bias = d->form == DRAW_QWEN2;
    c->out_bias = c->mlp_bias = false;
    if (d->form == DRAW_MISTRAL)
        c->full_attention[0] = 0;
}

/* What the architecture's file can say. */
static void draw_usual(layout_draw *d, uint64_t *s)
{
    ar_config *c = &d->config;
    const bool bias = coin(s);
    c->activation = (ar_activation)pick(s, AR_ACT_NONE);
    if (c->arch == AR_ARCH_LLAMA) {
        c->qkv_bias = c->out_bias = bias;
        c->mlp_bias = coin(s);
        c->head_dim = 2 * (1 + pick(s, 4));
        c->hidden = 1 + pick(s, 30);
        c->tied = coin(s);
        c->rope.theta = coin(s) ? 10000.0 : 500000.0;
        draw_rope(d, s);
        draw_form(d, s);
    } else {
        c->head_dim = 1 + pick(s, 5);
        c->hidden = c->heads * c->head_dim;
        c->tied = c->arch == AR_ARCH_GPT2 && coin(s);
        c->causal = c->arch == AR_ARCH_GPT2 || coin(s);
    }
}

/* Combinations that no file has, and batches with labels and masks. */
static void draw_unusual(layout_draw *d, uint64_t *s)
{
    ar_config *c = &d->config;
    c->activation = (ar_activation)pick(s, AR_ACT_NONE);
    const bool turns = c->arch == AR_ARCH_GPT2 ? false : coin(s);
    c->head_dim = turns ? 2 * (1 + pick(s, 3)) : 1 + pick(s, 6);
    c->rope.theta = coin(s) ? 100.0 : 10000.0;
    draw_rope(d, s);
    c->rope.kind = turns ? c->rope.kind : AR_ROPE_NONE;
    draw_window(d, s);
    c->hidden = 1 + pick(s, 30);
    c->norm = coin(s) ? AR_NORM_RMS : AR_NORM_LAYER;
    c->qkv_bias = coin(s);
    c->out_bias = coin(s);
    c->mlp_bias = coin(s);
    c->causal = coin(s);
    c->tied = c->arch != AR_ARCH_STACK && coin(s);
    uint64_t apart = *s; /* what follows is drawn as it was before there were these */
    if (c->arch == AR_ARCH_LLAMA && pick(&apart, 3) > 0)
        c->arch = coin(&apart) ? AR_ARCH_QWEN3 : AR_ARCH_OLMO2;
    match_draw_norms(c, pick(&apart, (size_t)1 << 30));
    d->given = coin(s);
    d->weights = d->given && pick(s, 8) == 0 ? MATCH_HUGE : MATCH_USUAL;
    d->labels = coin(s);
    d->ignored = d->labels ? (layout_draw_ignored)pick(s, 3) : DRAW_IGNORED_TOKENS;
    d->padding = coin(s);
    d->additive = pick(s, 3) == 0;
    d->mask_per_sample = coin(s);
    d->mask_per_head = coin(s);
    d->packed = d->kind != DRAW_TENSORS && pick(s, 4) > 0; /* of half of the draws */
    d->positions = d->kind != DRAW_TENSORS && pick(s, 3) == 0;
}

static void draw_model(layout_draw *d, uint64_t *s)
{
    static const size_t vocabularies[] = {2, 3, 5, 7, 13, 16, 31, 64, 97, 127};
    enum { LONG_SUM = 8200 }; /* terms of a sum that takes two int64 */
    ar_config *c = &d->config;
    *c = match_config((ar_arch)pick(s, 3), 1 + pick(s, 2));
    draw_heads(d, s);
    d->by_check = coin(s);
    if (d->by_check)
        draw_usual(d, s);
    else
        draw_unusual(d, s);
    draw_packed(d);
    const size_t tp = (size_t)d->run.parallel.tp;
    d->run.plan.mlp_order = pick(s, 3) == 0 ? AR_MLP_ROW_COLUMN : AR_MLP_COLUMN_ROW;
    if (d->run.plan.mlp_order == AR_MLP_ROW_COLUMN && c->hidden % tp != 0) {
        c->hidden = tp * (1 + pick(s, 4));
        if (d->by_check && c->arch != AR_ARCH_LLAMA &&
            c->arch != AR_ARCH_PHI3) /* hidden is heads * head_dim, and tp divides the heads */
            c->hidden = c->heads * c->head_dim;
    }
    c->ffn = tp * (1 + pick(s, 6));
    c->vocab = pick(s, 40) == 0 ? LONG_SUM : PICK(s, vocabularies);
    c->max_positions = d->run.seq + pick(s, 3);
    fit_rope(c, d->run.seq);
    c->initializer_range = 0.3;
}

static void draw_training(layout_draw *d, uint64_t *s)
{
    static const double rates[] = {0.1, 0.25, 0.5, 0.9}, norms[] = {1e-3, 0.05, 1.0, 100.0};
    d->run.steps = pick(s, LAYOUT_DRAW_STEPS + 1);
    d->run.dropout = coin(s) ? PICK(s, rates) : 0.0;
    d->run.clip = d->run.steps > 0 && d->weights != MATCH_HUGE && coin(s) ? PICK(s, norms) : 0.0;
    d->run.optimizer = ar_optimizer_defaults((ar_optimizer_kind)pick(s, 3));
    d->run.optimizer.lr = coin(s) ? 0.01 : 0.3;
    if (d->run.optimizer.kind == AR_OPTIMIZER_SGD) {
        d->run.optimizer.momentum = coin(s) ? 0.9 : 0.0;
        d->run.optimizer.nesterov = d->run.optimizer.momentum > 0.0 && coin(s);
    } else if (coin(s)) {
        d->run.optimizer.beta1 = 0.5;
        d->run.optimizer.beta2 = 0.95;
        d->run.optimizer.eps = 1e-3;
    }
    d->run.optimizer.weight_decay = coin(s) ? 0.1 : 0.0;
    d->run.threads = coin(s) ? 1 : 4;
    d->run.sim.algorithm = coin(s) ? AR_SIM_RING : AR_SIM_DIRECT;
    d->run.seed = pick(s, 1u << 30);
    if (d->run.optimizer.kind == AR_OPTIMIZER_ADAMW && d->run.seed % 2 == 0) {
        d->run.optimizer.kind = AR_OPTIMIZER_MUON;
        d->run.optimizer.momentum = d->run.seed % 4 == 0 ? 0.95 : 0.5;
        d->run.optimizer.nesterov = d->run.seed % 8 < 4;
        d->run.optimizer.match_rms = d->run.seed % 16 >= 8;
        d->run.optimizer.shards = d->run.seed / 64 % 2;
    }
}

/* How gradients are summed over dp: a bucket for each parameter, some of a few parameters, or one for all. */
static void draw_ddp(layout_draw *d, uint64_t *s)
{
    static const size_t capacities[] = {0, 64, 1000, 20000, AR_BUCKET_BYTES};
    d->run.parallel.zero = coin(s) ? 1 : 0;
    d->run.ddp = ar_ddp_defaults();
    d->run.ddp.bucket_bytes = PICK(s, capacities);
    d->run.ddp.mode = coin(s) ? AR_BUCKETS_EAGER : AR_BUCKETS_OVERLAP;
    d->run.ddp.order = coin(s) ? AR_BUCKETS_BY_SIZE : AR_BUCKETS_REVERSE;
    d->run.ddp.find_unused = pick(s, 4) == 0;
}

/* Learning rates and decays that change from step to step and from parameter to parameter. */
static void draw_rates(layout_draw *d, uint64_t *s)
{
    static const char *const globs[] = {"*", "*att*", "*.0.*", "*weight"};
    ar_optimizer_options *o = &d->run.optimizer;
    const uint64_t steps = d->run.steps > 0 ? (uint64_t)d->run.steps : 1;
    o->schedule = coin(s) ? AR_SCHEDULE_COSINE : AR_SCHEDULE_CONSTANT;
    o->total_steps = steps;
    o->warmup_steps = coin(s) ? pick(s, steps + 1) : 0;
    o->min_lr = o->schedule == AR_SCHEDULE_COSINE && coin(s) ? 0.25 * o->lr : 0.0;
    o->decay = coin(s) ? AR_DECAY_MATRICES : AR_DECAY_ALL;
    o->groups = pick(s, 3);
    for (size_t i = 0; i < o->groups; i++) {
        o->group[i] = (ar_param_group){.lr_scale = coin(s) ? 0.5 : 1.0, .weight_decay = coin(s) ? 0.2 : (double)NAN};
        snprintf(o->group[i].glob, sizeof o->group[i].glob, "%s", PICK(s, globs));
    }
}

/* QK-Clip, at a bound that most logits are above, some, or none; norms of q and k undo it. */
static void draw_qk_clip(layout_draw *d)
{
    static const double bounds[] = {0.0, 0.02, 0.3, 1e6};
    if (d->run.optimizer.kind == AR_OPTIMIZER_MUON && d->config.qk_norm == AR_QK_NORM_NONE)
        d->run.optimizer.qk_clip = bounds[d->run.seed / 16 % 4];
}

/* Of a model with logits. */
static void draw_loss(layout_draw *d, uint64_t *s)
{
    static const double shares[] = {0.01, 0.1, 0.5, 0.99}, weights[] = {1e-4, 0.02, 3.0};
    const bool smoothed = coin(s), squared = coin(s);
    if (d->config.arch != AR_ARCH_STACK)
        d->run.loss = (ar_loss_options){.label_smoothing = smoothed ? PICK(s, shares) : 0.0,
                                        .z_loss = squared ? PICK(s, weights) : 0.0};
}

/* What routers add to the loss, and move. */
static void draw_router(layout_draw *d)
{
    static const double weights[] = {1e-4, 0.02, 3.0};
    uint64_t own = (d->seed + 5) * SEEDS_APART;
    ar_router_losses *r = &d->run.loss.router;
    pick(&own, 2);
    r->bias_update = ar_config_router_bias(&d->config) && coin(&own) ? PICK(&own, weights) : 0.0;
    if (d->config.experts.n == 0 || d->config.experts.scores.groups > 0)
        return;
    r->balance = (ar_balance)pick(&own, AR_BALANCES);
    r->balance_weight = r->balance != AR_BALANCE_NONE ? PICK(&own, weights) : 0.0;
    r->z_loss = coin(&own) ? PICK(&own, weights) : 0.0;
}

/* Every second draw has given weights, of any kind. A norm that is not finite cannot be clipped. */
static void draw_weights(layout_draw *d)
{
    uint64_t own = (d->seed + 7) * SEEDS_APART;
    pick(&own, 2);
    if (coin(&own))
        return;
    d->given = true;
    d->weights = (match_draw)pick(&own, MATCH_DRAWS);
    const bool refused = d->config.experts.n > 0; /* tokens whose router's logits are not numbers */
    if (refused && (d->weights == MATCH_HUGE || d->weights == MATCH_LARGEST || d->weights == MATCH_MIXED))
        d->weights = MATCH_TIES;
    if (d->weights == MATCH_HUGE || d->weights == MATCH_LARGEST || d->weights == MATCH_MIXED)
        d->run.clip = 0.0;
}

static bool is_legal(layout_draw *d)
{
    const int ranks = ar_parallel_world(&d->run.parallel),
              most = d->kind == DRAW_STAGES ? LAYOUT_DRAW_RANKS : MOST_RANKS;
    return ranks <= most && d->run.seq <= LAYOUT_DRAW_SEQ && d->run.batch * d->run.seq <= LAYOUT_DRAW_TOKENS &&
           d->config.heads <= LAYOUT_DRAW_HEADS && (ranks > 1 || d->kind == DRAW_TENSORS) &&
           ari_parallel_check(&d->run.parallel, &d->config, &d->run.plan, d->run.batch, d->run.seq) == AR_OK;
}

/* Rows of padding would count in losses of routers, in what they choose, and in dropout before these. */
static bool may_pad(const layout_draw *d)
{
    const ar_config *c = &d->config;
    const bool counted = c->experts.n > 0 || d->run.optimizer.qk_clip > 0.0;
    return c->arch != AR_ARCH_STACK && !ar_config_router_losses(c, &d->run.loss) &&
           d->run.loss.router.bias_update == 0.0 && (d->run.dropout == 0.0 || !counted);
}

void layout_draw_add_more(layout_draw *d)
{
    uint64_t own = (d->seed + 3) * SEEDS_APART;
    const layout_draw before = *d;
    ar_parallel *p = &d->run.parallel;
    pick(&own, 2);
    if (!d->by_check)
        return;
    draw_router(d);
    if (coin(&own) && coin(&own))
        d->documents = 1 + pick(&own, d->run.seq < 4 ? d->run.seq : 4);
    if (coin(&own) && may_pad(d))
        d->more_rows = 1 + pick(&own, 3);
    const bool given = d->json[0] != '\0' && p->pp > 1 && coin(&own);
    for (int tries = given ? 30 : 0; tries > 0; tries--) {
        size_t layers = 0;
        draw_stages(&p->stages, &own, ari_parallel_stages(p), &layers);
        if (layers == d->config.layers)
            break;
        p->stages.n = 0;
    }
    if (ari_parallel_check(p, &d->config, &d->run.plan, d->run.batch + d->more_rows, d->run.seq) != AR_OK) {
        *d = before;
        ar_error_clear();
    }
}

void layout_draw_make(layout_draw *d, layout_draw_kind kind, uint64_t seed)
{
    uint64_t state = seed * SEEDS_APART, again = ~state * SEEDS_APART, stages = again ^ state;
    const bool bf16 = (again >> 40) % 3 == 0;
    pick(&state, 2);
    for (int i = 0; i < 3; i++) { /* neighbours' first numbers are alike */
        pick(&again, 2);
        pick(&stages, 2);
    }
    do {
        *d = (layout_draw){.seed = seed, .kind = kind, .run = {.model = "draw", .sim.timeout_ns = 120000000000u}};
        draw_parallel(d, &state);
        draw_model(d, &state);
        draw_training(d, &state);
        draw_ddp(d, &state);
        draw_rates(d, &state);
        draw_loss(d, &state);
        d->run.parallel.recompute.part =
            coin(&again) ? (ar_recompute)(1 + pick(&again, AR_RECOMPUTES - 1)) : AR_RECOMPUTE_NONE;
        d->run.parallel.recompute.every = 1 + (int)pick(&again, 2);
        if (kind == DRAW_STAGES)
            draw_pipeline(d, &stages);
        if (kind == DRAW_FAMILIES || kind == DRAW_EXPERTS)
            layout_family_draw(d, &stages);
    } while (!is_legal(d));
    d->run.precision = bf16 ? AR_PRECISION_BF16 : AR_PRECISION_F32;
    draw_qk_clip(d);
    draw_weights(d);
    ar_error_clear();
}

void layout_draw_add_experts(layout_draw *d, uint64_t seed)
{
    const ar_config *c = &d->config;
    const bool fits = c->gated && c->arch != AR_ARCH_PHI3 && !c->mlp_bias && d->run.plan.rules == 0;
    const size_t tp = d->run.parallel.tp > 1 ? (size_t)d->run.parallel.tp : 1, n = 2 + seed % 5;
    if (!fits || d->run.plan.mlp_order != AR_MLP_COLUMN_ROW)
        return;
    d->config.experts = (ar_experts){
        .n = n, .per_token = 1 + seed % n, .ffn = 2 * tp, .shared = seed % 2 * 3 * tp, .normalised = seed % 3 > 0};
    d->config.dense[0] = seed % 4;
}

static void model_text(char *out, size_t cap, const ar_config *c)
{
    static const char *const archs[] = {"llama",      "gpt2",     "stack",     "qwen3",     "olmo2",
                                        "phi3",       "mixtral",  "qwen2_moe", "qwen3_moe", "glm4_moe",
                                        "starcoder2", "deepseek", "glm4",      "gpt_oss",   "gpt_neox"};
    const ar_experts *e = &c->experts;
    if ((size_t)c->arch >= sizeof archs / sizeof *archs)
        abort(); /* the program's own mistake: an architecture without a name here */
    snprintf(
        out, cap,
        "%s L %zu h %zu heads %zu/%zu d %zu ffn %zu V %zu positions %zu act %d norm %d rope %d of %zu (%g %g %g %zu) causal "
        "%d window %zu but %d tied %d bias %d%d%d place %d qk %d plus %d caps %g %g scalar %g scale %g experts %zu of %zu (%zu, %zu) normalised %d but %d",
        archs[c->arch], c->layers, c->hidden, c->heads, c->kv_heads, c->head_dim, c->ffn, c->vocab, c->max_positions,
        (int)c->activation, (int)c->norm, (int)c->rope.kind, c->rope.rotary_dim, c->rope.factor,
        c->rope.low_freq_factor, c->rope.high_freq_factor, c->rope.original_positions, c->causal, c->window,
        (int)c->full_attention[0], c->tied, c->qkv_bias, c->out_bias, c->mlp_bias, (int)c->norm_place, (int)c->qk_norm,
        c->norm_plus_one, c->score_cap, c->logit_cap, c->query_scalar, c->embed_scale, e->per_token, e->n, e->ffn,
        e->shared, e->normalised, (int)c->dense[0]);
}

void layout_draw_text(char *out, size_t cap, const layout_draw *d)
{
    const ar_optimizer_options *o = &d->run.optimizer;
    static const char *const weights[MATCH_DRAWS] = {"",       " huge",      " largest", " ties",
                                                     " zeros", " subnormal", " mixed"};
    char layout[160], model[500];
    ari_parallel_text(layout, sizeof layout, &d->run.parallel);
    model_text(model, sizeof model, &d->config);
    const int used = snprintf(out, cap, "%s, %s, %s order %d, b %zu s %zu, weights %llu%s%s%s, threads %d, %s", layout,
                              d->by_check ? "check" : "steps", model, (int)d->run.plan.mlp_order, d->run.batch,
                              d->run.seq, (unsigned long long)d->run.seed, d->given ? " given" : "",
                              weights[d->weights], d->run.precision == AR_PRECISION_BF16 ? " bf16" : "", d->run.threads,
                              d->run.sim.algorithm == AR_SIM_RING ? "ring" : "direct");
    if (used < 0 || (size_t)used >= cap)
        return;
    snprintf(
        out + used, cap - (size_t)used,
        ", buckets of %zu %s%s%s, steps %d %s lr %g momentum %g%s%s qk-clip %g decay %g betas %g %g, clip %g, dropout %g, "
        "smoothing %g z-loss %g, balance %s %g router z-loss %g bias %g, %s warm-up %d decay of %s, %zu groups, labels %d padding %d additive %d (%d %d) packed %d positions %d documents %zu more rows %zu",
        d->run.ddp.bucket_bytes, d->run.ddp.mode == AR_BUCKETS_EAGER ? "eager" : "overlap",
        d->run.ddp.order == AR_BUCKETS_BY_SIZE ? " by size" : "", d->run.ddp.find_unused ? " find unused" : "",
        (int)d->run.steps, ari_optimizer_name(o->kind), o->lr, o->momentum, o->nesterov ? " nesterov" : "",
        o->shards ? " shards" : "", o->qk_clip, o->weight_decay, o->beta1, o->beta2, d->run.clip, d->run.dropout,
        d->run.loss.label_smoothing, d->run.loss.z_loss, ari_balance_name(d->run.loss.router.balance),
        d->run.loss.router.balance_weight, d->run.loss.router.z_loss, d->run.loss.router.bias_update,
        ari_schedule_name(o->schedule), (int)o->warmup_steps, o->decay == AR_DECAY_MATRICES ? "matrices" : "all",
        o->groups, d->labels, d->padding, d->additive, d->mask_per_sample, d->mask_per_head, d->packed, d->positions,
        d->documents, d->more_rows);
}
