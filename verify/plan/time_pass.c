/* SPDX-License-Identifier: Apache-2.0 */
/* The passes of a rank: products and the collectives within them, by part of the model. */
#include <math.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/placement/parallel_private.h"
#include "verify/plan/time_impl.h"

typedef struct walk {
    const ari_planned *p;
    const ari_time_options *o;
    ari_rates rates;
    ari_passes *to;
    ari_links links[ARI_OVER_COPIES + 1]; /* of each group */
    double seen;                          /* share of the scores that flash attention computes */
    double hop, hops;      /* production: bytes of keys and values that go round beside the attention that follows */
    ari_stage all;         /* layers */
    double layers_a_visit; /* layers that a visited block stands for */
    double clock;          /* in the pass: of the part so far */
    double began;          /* when the block did */
    double micros;         /* of the rank */
    ari_overlapped overlapped;
    double block; /* seconds of it so far */
    size_t micro, layer;
    int each; /* kind of the micro-batch */
    ari_operation_pass pass;
    ar_pp_kind part;
    bool behind, counting;
} walk;

double ari_cost_sum(const ari_cost *c)
{
    double sum = c->products + c->attention;
    for (int k = 0; k < ARI_TIME_KINDS; k++)
        sum += c->over[k];
    return sum + c->recompute;
}

void ari_cost_add(ari_cost *to, const ari_cost *c, double times)
{
    to->products += times * c->products;
    to->attention += times * c->attention;
    for (int k = 0; k < ARI_TIME_KINDS; k++)
        to->over[k] += times * c->over[k];
    to->recompute += times * c->recompute;
    to->weights += times * c->weights;
}

/* The pairs of a key and one of this rank's queries that no mask hides, over all layers: those that flash attention
 * computes. The last place of a ring has at least as many as any other. */
static double seen_scores(const ari_planned *p)
{
    const ar_config *c = p->step.config;
    const ar_parallel *layout = &p->step.run.parallel;
    const size_t places = ari_axis_ranks(layout, ARI_AXIS_RING);
    const ar_positions own = ari_positions_ring(places, layout->zigzag, p->step.run.seq, places - 1);
    const double s = (double)p->step.run.seq;
    double sum = 0.0;
    if (!c->causal)
        return 1.0;
    for (size_t i = 0; i < c->layers; i++) {
        for (int run = 0; run < 2; run++)
            sum += ari_keys_seen(own.first[run], own.count[run], ar_config_window(c, i));
    }
    return sum / (double)c->layers / (s * (double)ari_positions_count(&own));
}

/* --- a pass ------------------------------------------------------------------------------------------------------- */

/* Forward the part before the blocks comes first, backward that after them. */
static ari_model_part part_of(const walk *w, const ari_operation *op)
{
    if (op->layer != ARI_NO_LAYER)
        return ARI_PART_BLOCKS;
    return w->behind == (op->pass == ARI_PASS_FORWARD) ? ARI_PART_AFTER : ARI_PART_BEFORE;
}

/* Micro-batches that all go forward first come back in reverse. */
static bool reverse(const walk *w)
{
    const ar_parallel *layout = &w->p->step.run.parallel;
    return layout->forward_first && layout->micro_batches > 1;
}

/* True if the micro-batch is the last to go backward. */
static bool ends(const walk *w, const ari_operation *op)
{
    return !reverse(w) || op->micro == 0;
}

static void begin_pass(walk *w, const ari_operation *op)
{
    ari_passes *to = w->to;
    w->pass = op->pass;
    w->micro = op->micro;
    w->counting = op->counting;
    w->part = op->part;
    w->clock = w->block = 0.0;
    w->overlapped = (ari_overlapped){.until = 0.0};
    w->layer = ARI_NO_LAYER;
    w->behind = false;
    for (size_t i = 0; i < to->blocks.n + 2 && ends(w, op); i++)
        to->of[ARI_OF_LAST][op->pass == ARI_PASS_BACKWARD][i] = (ari_cost){.products = 0.0};
    w->each = 0;
    while (w->each < to->kinds && to->first[w->each] != (int)op->micro)
        w->each++;
    if (w->each == to->kinds && to->kinds < ARI_MICRO_KINDS)
        to->first[to->kinds++] = (int)op->micro;
}

/* After a block that stands for several layers the clock goes over the others too. */
static void enter_block(walk *w, const ari_operation *op)
{
    if (op->pass != w->pass || op->micro != w->micro || op->counting != w->counting || op->part != w->part)
        begin_pass(w, op);
    if (op->layer == w->layer)
        return;
    if (w->layer != ARI_NO_LAYER)
        w->clock += (w->layers_a_visit - 1.0) * w->block;
    else if (op->pass == ARI_PASS_BACKWARD && ends(w, op))
        w->to->begun = w->clock;
    w->behind = op->layer == ARI_NO_LAYER; /* the queue beside has done what the blocks gave it */
    w->block = 0.0;
    w->began = w->clock;
    w->layer = op->layer;
    if (op->layer != ARI_NO_LAYER)
        w->layers_a_visit = ari_stage_times(&w->to->blocks, &w->all, op->layer);
}

/* A gradient is ready when the module that its parameter belongs to has gone backward: roles are in the order of a
 * block. */
static ari_role module_of(ari_role role)
{
    const bool attention = role > ARI_NORM1 && role<ARI_ATTENTION, mlp = role> ARI_NORM2 && role < ARI_MLP;
    return attention ? ARI_ATTENTION : mlp ? ARI_MLP : role;
}

/* layer: a block, or ARI_NO_LAYER. */
static size_t ready_at(const ari_passes *to, size_t layer, ari_role role)
{
    return (layer == ARI_NO_LAYER ? to->blocks.n : layer) * ARI_ROLES + module_of(role);
}

/* --- what an operation takes -------------------------------------------------------------------------------------- */

static bool is_production(const walk *w)
{
    return w->o->cost_model == ARI_COST_PRODUCTION;
}

static const ari_gpu_moves moves_of[ARI_OPERATION_KINDS] = {
#define ARI_MOVES_OF(name, forward, backward) [ARI_OPERATION_##name] = ARI_GPU_MOVES_##name,
    ARI_GPU_MOVES_TABLE(ARI_MOVES_OF)
#undef ARI_MOVES_OF
};
/* For each score that is stored: scaling, mask, softmax and dropout. */
static const double of_score[ARI_DIRECTIONS] = {7, 9};

/* So does what a backward pass computes again. */
static bool goes_forward(const ari_operation *op)
{
    return op->pass == ARI_PASS_FORWARD || op->recomputed;
}

/* Own: the products that a run makes. Production: flash attention skips what is masked, and computes the scores once
 * more in its backward pass, five products instead of four (Dao 2023, arXiv:2307.08691); without it all scores are
 * computed. */
static double attention_seconds(const walk *w, const ari_operation *op)
{
    const bool forward = goes_forward(op);
    const ari_op_value *context = forward ? &op->output[0] : &op->input[0];
    const double products = forward ? 2.0 : w->p->flash ? 5.0 : 4.0, head = (double)w->p->step.config->head_dim;
    const double own = (double)context->local[1], all = (double)context->shape[1];
    const double pairs = ari_op_elements(context) * all * (w->p->flash ? w->seen : 1.0);
    ari_gpu_scores s = {2.0 * products * pairs, own, head, !forward, w->o->flash_2};
    if (!is_production(w))
        s.flops = 2.0 * op->multiply_adds;
    if (w->rates.gpu && is_production(w) &&
        !w->p->flash) { /* two products of each head, forward and for each gradient, and what passes over its scores */
        const double heads = ari_op_elements(context) / own / head;
        const ari_gpu_product scores = {heads, own, all, head, false}, sums = {heads, own, head, all, false};
        return (forward ? 1.0 : 2.0) * (ari_rates_product(&w->rates, &scores) + ari_rates_product(&w->rates, &sums)) +
               ari_rates_moves(&w->rates, of_score[!forward] * pairs / head);
    }
    return ari_rates_scores(&w->rates, &s);
}

/* Of the experts whose rows for a gradient come to one rank, those that come to the rank with most: a block of rows is an
 * expert's of a sample. */
static double experts_here(const ari_operation *op, double experts)
{
    double here = experts;
    for (int i = 0; i < op->calls; i++) {
        const ari_op_call *call = &op->call[i];
        if (call->routed && call->kind == ARI_CALL_ALL_TO_ALL && call->row > 0)
            here = fmin(here, ceil((double)call->elements / (double)call->row / (double)call->ranks));
    }
    return here;
}

/* A product of all its parts side by side; of experts one for each, own: one after the other.
 * share: of its rows. */
static double product_seconds(const walk *w, const ari_operation *op, double share)
{
    const bool gradient = op->kind == ARI_OPERATION_WEIGHT_GRADIENT, forward = goes_forward(op);
    const ari_op_value *weight = gradient ? &op->output[0] : &op->weight[0];
    const double in = (double)weight->local[1], all = fmax(1.0, (double)weight->experts);
    const double experts = gradient && !is_production(w) ? experts_here(op, all) : all;
    if (op->role == ARI_K_SHARED && op->pass == ARI_PASS_BACKWARD && !forward && !is_production(w)) { /* times ones */
        const size_t *k = op->output[2].local, heads = op->input[1].local[2] / w->p->step.config->head_dim;
        const ari_gpu_product sum = {(double)k[0], (double)(k[1] * k[2]), 1.0, (double)heads, false};
        return ari_rates_product(&w->rates, &sum);
    }
    if (op->multiply_adds == 0.0)
        return 0.0;
    double out = gradient ? (double)weight->local[0] : 0.0;
    for (int i = 0; i < op->weights && !gradient; i++)
        out += (double)op->weight[i].local[0];
    const double tokens = share * op->multiply_adds / (in * out * experts), at_once = is_production(w) ? experts : 1.0;
    const ari_gpu_product p = gradient  ? (ari_gpu_product){at_once, out, in, tokens, true}
                              : forward ? (ari_gpu_product){at_once, tokens, out, in, false}
                                        : (ari_gpu_product){at_once, tokens, in, out, false};
    return experts / at_once * ari_rates_product(&w->rates, &p);
}

/* A kernel bound by memory. A gradient that two operations make is added up by the residual. */
static double moves_seconds(const walk *w, const ari_operation *op)
{
    const bool forward = goes_forward(op);
    const bool made = forward && op->kind != ARI_OPERATION_LOSS;
    const int n = made ? op->outputs : op->inputs;
    const ari_op_value *values = made ? op->output : op->input;
    double elements = 0.0;
    for (int i = 0; i < n; i++)
        elements += ari_op_elements(&values[i]);
    return ari_rates_kernel(&w->rates, moves_of[op->kind], !forward, elements);
}

/* Ring attention (Liu et al. 2023, arXiv:2310.01889): keys and values go round beside the scores of those before,
 * backward with their gradients. */
static void hide_ring(walk *w, const ari_operation *op, ari_cost *c, double times, ari_traffic *moved, double *hidden)
{
    const ari_links *l = &w->links[ARI_OVER_RING];
    const double bytes = w->hop * (op->pass == ARI_PASS_BACKWARD ? 2.0 : 1.0), send = ari_links_send(l, bytes);
    if (w->hops == 0.0)
        return;
    c->over[ARI_TIME_CP] = w->hops * fmax(0.0, send - c->attention / l->n);
    *hidden += times * (w->hops * send - c->over[ARI_TIME_CP]);
    ari_traffic_count(moved, ARI_TIME_CP, "send", l, times * w->hops, times * w->hops * bytes, times * w->hops * send);
    w->hops = 0.0;
}

/* Time of an operation's calls besides its GEMMs: collectives of the main queue; those that a pass makes only while
 * weights are new; chunked scatters of its product. */
typedef struct called {
    double over[ARI_TIME_KINDS]; /* seconds */
    double fresh, overlapped;    /* overlapped: of the queue overlapped with the main one */
    ari_cut scattered;
    bool scatters;
} called;

static void call_beside(walk *w, const ari_operation *op, const ari_op_call *call, called *c)
{
    const ari_cut chunks = ari_cut_of(&w->links[call->over], call, ari_time_element(w->o, op, call));
    c->overlapped += ari_cut_seconds(&chunks);
    if (op->kind == ARI_OPERATION_PRODUCT) {
        c->scattered = chunks;
        c->scatters = true;
    } else {
        ari_overlapped_gather(&w->overlapped, w->clock, &chunks, op->regathered);
    }
}

/* Megatron-LM's ranks tell those with other experts only how many rows each gets, not the experts of each token, and
 * with sequence parallelism each sends its own tokens, or their rows, which the tp ranks then gather. */
static double call_elements(const walk *w, const ari_op_call *call)
{
    const ar_parallel *layout = &w->p->step.run.parallel;
    const bool cut = layout->sp && !ari_experts_whole(layout);
    const double n = ari_links_elements(call), tp = cut ? ari_at_least_one(layout->tp) : 1.0;
    if (!is_production(w) || call->over != ARI_OVER_EP)
        return n;
    return call->dtype == AR_I32 ? (double)(w->p->step.config->experts.n * call->ranks) : n / tp;
}

/* Calls of one micro-batch. In production, traffic of the ring is hidden. */
static called add_calls(walk *w, const ari_operation *op, double times, ari_traffic *moved)
{
    called c = {.fresh = 0.0};
    for (int i = 0; i < op->calls; i++) {
        const ari_op_call *call = &op->call[i];
        const ari_links *l = &w->links[call->over];
        const ari_time_kind kind = ari_time_kind_of(call->over);
        const double n = call_elements(w, call), width = ari_time_element(w->o, op, call);
        const double repeats = (double)call->repeats, calls = times * repeats * (double)ari_call_chunks(call);
        const double before = c.overlapped;
        double seconds = repeats * ari_links_call(l, call->kind, n, width);
        if (is_production(w) && call->over == ARI_OVER_RING) {
            w->hop = call->kind == ARI_CALL_EXCHANGE ? n * width : w->hop;
            w->hops = call->kind == ARI_CALL_EXCHANGE ? repeats : w->hops;
            continue;
        }
        if (call->queue == ARI_ON_TP &&
            !(w->rates.gpu && is_production(w) && l->between)) { /* such overlap copies within a node */
            call_beside(w, op, call, &c);
            seconds = c.overlapped - before;
        } else {
            c.over[kind] += seconds;
            c.fresh += call->often == ARI_EACH_VERSION ? seconds : 0.0;
        }
        ari_traffic_count(moved, kind, ari_call_name(call->kind), l, calls,
                          times * repeats * ari_links_sent(l, call->kind, n, width), times * seconds);
    }
    return c;
}

/* In chunks if what it takes was gathered in chunks, or what it makes is scattered so. */
static ari_chunked chunked_product(const walk *w, const ari_operation *op, const called *calls)
{
    const ari_cut *cut = calls->scatters ? &calls->scattered : ari_overlapped_next(&w->overlapped);
    const size_t n = op->kind == ARI_OPERATION_PRODUCT && cut ? ari_call_chunks(&cut->call) : 1;
    ari_chunked p = {.last = product_seconds(w, op, n > 1 ? ari_cut_share(cut, n - 1) : 1.0)};
    p.each = n > 1 ? product_seconds(w, op, ari_cut_share(cut, 0)) : 0.0;
    p.whole = (double)(n - 1) * p.each + p.last;
    return p;
}

/* Seconds in which the main queue has nothing to do but wait for the one beside it. */
static double waiting(walk *w, const ari_operation *op, bool gradient, const called *calls, const ari_chunked *product)
{
    double begin = w->clock - (reverse(w) ? calls->fresh : 0.0);
    for (int k = 0; k < ARI_TIME_KINDS; k++)
        begin += calls->over[k];
    if (gradient)
        return ari_overlapped_wait(&w->overlapped, w->clock, op->role) - w->clock;
    if (op->kind != ARI_OPERATION_PRODUCT)
        return 0.0;
    const double end =
        ari_overlapped_multiply(&w->overlapped, begin, product, calls->scatters ? &calls->scattered : NULL);
    return fmax(0.0, end - begin - product->whole); /* sums of clocks are rounded */
}

/* Every layer is gone through. */
static bool each_layer(const ari_walked *b)
{
    return b->n > 1 && !b->by_experts;
}

static void note_gradient(walk *w, const ari_operation *op, ari_model_part part, double layers)
{
    const ari_op_value *g = &op->output[0];
    const double since = op->layer == ARI_NO_LAYER || each_layer(&w->to->blocks) ? 0.0 : w->began;
    const bool first_half = op->part == AR_PP_BACKWARD_INPUT, second_half = op->part == AR_PP_BACKWARD_WEIGHT;
    for (ari_role role = 0; role <= g->role && ends(w, op); role++) {
        if (role == g->role || (second_half && ari_op_builder_is_norm(role))) /* told of behind those deferred before */
            w->to->ready[ready_at(w->to, op->layer, role)] = first_half ? HUGE_VAL : w->clock - since;
    }
    const double n = op->micro == 0 ? layers * ari_op_elements(g) : 0.0; /* each micro-batch makes all */
    w->to->parameters[part] += n;
    w->to->experts[part] += ari_experts_apart(&w->p->step.run.parallel) && ari_is_expert_part(g->role) ? n : 0.0;
}

static void add_cost(walk *w, const ari_operation *op, size_t section, ari_cost c, double times, double fresh)
{
    const bool backward = op->pass == ARI_PASS_BACKWARD;
    ari_cost_add(&w->to->of[ARI_OF_MEAN][backward][section], &c, times);
    ari_cost_add(&w->to->of[ARI_OF_EACH + w->each][backward][section], &c, 1.0);
    c.over[ARI_TIME_TP] -= fresh;
    ari_cost_add(&w->to->of[ARI_OF_LAST][backward][section], &c, ends(w, op) && !op->counting ? 1.0 : 0.0);
}

static ar_status visit_operation(void *user, const ari_operation *op)
{
    walk *w = user;
    ari_passes *to = w->to;
    ari_operation after; /* a block for a further token, as what comes after the layers */
    const bool further = op->layer != ARI_NO_LAYER && ari_outside_layers(&to->blocks.config, op->layer);
    if (further) {
        after = *op;
        after.layer = ARI_NO_LAYER;
        op = &after;
    }
    const bool backward = op->pass == ARI_PASS_BACKWARD;
    ari_cost c = {.products = 0.0};
    if (op->pass != ARI_PASS_FORWARD && !backward)
        return AR_OK;
    enter_block(w, op);
    const ari_model_part part = part_of(w, op);
    const bool gradient = op->kind == ARI_OPERATION_WEIGHT_GRADIENT;
    const double layers = part == ARI_PART_BLOCKS ? w->layers_a_visit : 1.0;
    const double times = layers * ((double)op->times / w->micros); /* of all micro-batches, by their mean */
    if (op->kind == ARI_OPERATION_ATTENTION) {
        c.attention = attention_seconds(w, op);
        hide_ring(w, op, &c, times, &to->moved[part], &to->hidden[part]);
    }
    const called calls = add_calls(w, op, times, &to->moved[part]);
    ari_chunked product = {.whole = 0.0};
    if (op->kind != ARI_OPERATION_ATTENTION) {
        product = chunked_product(w, op, &calls);
        c.products = product.whole;
        c.over[ARI_TIME_MEMORY] = moves_seconds(w, op);
    }
    const double waits = waiting(w, op, gradient, &calls, &product);
    to->hidden[part] += times * (calls.overlapped - waits);
    if (op->recomputed)
        c = (ari_cost){.recompute = c.products + c.attention + (is_production(w) ? 0.0 : c.over[ARI_TIME_MEMORY])};
    for (int k = 0; k < ARI_TIME_KINDS; k++)
        c.over[k] += calls.over[k];
    c.over[ARI_TIME_TP] += waits;
    const bool later = op->part == AR_PP_BACKWARD ? gradient && !ari_is_expert_part(op->role) /* which do not wait */
                                                  : op->part == AR_PP_BACKWARD_WEIGHT;
    c.weights = later ? ari_cost_sum(&c) : 0.0;
    const size_t section = part == ARI_PART_BLOCKS ? op->layer : to->blocks.n + (part == ARI_PART_AFTER);
    const double fresh = reverse(w) ? calls.fresh : 0.0; /* those of the first to come back */
    add_cost(w, op, section, c, times / layers, fresh);
    if (further && ari_section_of(op->role) == ARI_IN_BLOCKS && !ari_is_mtp_part(op->role))
        add_cost(w, op, to->blocks.n + 2, c, times, fresh);
    c.over[ARI_TIME_TP] -= fresh;
    w->clock += ari_cost_sum(&c);
    w->block += part == ARI_PART_BLOCKS ? ari_cost_sum(&c) : 0.0;
    if (gradient)
        note_gradient(w, op, part, layers);
    return AR_OK;
}

/* --- all passes --------------------------------------------------------------------------------------------------- */

/* The rank that computes longest: the last place of a causal ring sees most keys. Of another, where a window leaves out
 * the keys far before, the first one does, or with zigzag again the last, which has the middle of the sequence. */
static int busiest(const ari_step_case *c)
{
    const ar_parallel *p = &c->run.parallel;
    return !c->config->causal && !p->zigzag
               ? 0
               : (ari_extent(p, ARI_CUTS_POSITIONS) - 1) * ari_extent(p, ARI_CUTS_FEATURES);
}

static ar_status alloc_sections(ari_passes *to, size_t n)
{
    ari_cost *costs = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&costs, ARI_OF_MICROS * ARI_DIRECTIONS * n, "times of sections"));
    for (size_t i = 0; i < ARI_OF_MICROS * ARI_DIRECTIONS; i++)
        (&to->of[0][0])[i] = costs + i * n;
    return ARI_ALLOC_ZERO(&to->ready, (n - 2) * ARI_ROLES, "times of gradients");
}

ar_status ari_passes_init(ari_passes *passes, const ari_planned *p, const ari_time_options *o)
{
    ari_step_case c = ari_time_case(p, o, p->step.config);
    *passes = (ari_passes){.layers = p->step.config->layers,
                           .model = p->step.config,
                           .blocks = ari_walked_of(&c, o->cost_model == ARI_COST_PRODUCTION)};
    c.config = &passes->blocks.config;
    walk w = {.p = p,
              .o = o,
              .rates = ari_time_rates(o),
              .to = passes,
              .seen = seen_scores(p),
              .micros = ari_at_least_one(p->step.run.parallel.micro_batches),
              .pass = ARI_PASS_START};
    w.all = ari_stage_of_layers(&passes->blocks, passes->model, 0, passes->layers);
    for (int g = 0; g <= ARI_OVER_COPIES; g++)
        w.links[g] = ari_links_of(p, o, (ari_over)g);
    AR_TRY(alloc_sections(passes, passes->blocks.n + 3));
    return ari_operations(&c, ARI_OPS_PASSES, busiest(&c), visit_operation, &w);
}

void ari_passes_fini(ari_passes *passes)
{
    free(passes->ready);
    free(passes->of[0][0]);
    *passes = (ari_passes){.kinds = 0};
}

/* Sum over layers of what is known of the section of each. */
static double sum_of_layers(const ari_passes *passes, const ari_cost *of, size_t first, size_t layers)
{
    const ari_walked *b = &passes->blocks;
    const ari_stage s = ari_stage_of_layers(b, passes->model, first, layers);
    double sum = 0.0;
    for (size_t k = 0; k < b->n; k++)
        sum += ari_stage_times(b, &s, k) * ari_cost_sum(&of[k]);
    return sum;
}

/* Of the layers, which go backward from the last to the first, those behind a stage's last one are not its own. */
double ari_passes_ready(const ari_passes *passes, const ari_op_param *param, size_t first, size_t layers)
{
    const bool outside = ari_outside_layers(passes->model, param->layer);
    const size_t block = outside ? ARI_NO_LAYER : ari_walked_block(&passes->blocks, passes->model, param->layer);
    const double at = passes->ready[ready_at(passes, block, param->role)];
    const ari_cost *last = passes->of[ARI_OF_LAST][ARI_GOES_BACKWARD];
    const bool before = outside && ari_section_of(param->role) == ARI_BEFORE_BLOCKS;
    const double behind = sum_of_layers(passes, last, first + layers, passes->layers - first - layers);
    if (!outside && each_layer(&passes->blocks))
        return at - behind;
    if (!outside)
        return passes->begun + sum_of_layers(passes, last, param->layer + 1, first + layers - 1 - param->layer) + at;
    return before ? at - behind - sum_of_layers(passes, last, 0, first) : at;
}
