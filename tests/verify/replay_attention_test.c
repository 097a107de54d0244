/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of two dumps that was computed with one mistake is named by computing it again, shapes that few models have
 * included: part of each head is turned, windows, documents that share a row, sinks, capped scores, a ring. Where an
 * input is missing or wrong, or there are two mistakes, there is no such answer. Attention is computed here by plain
 * loops. */
#include "support/together.h"
#include "tests/verify/two_dumps.h"

enum { HEADS = 6, KV = 2, D = 8, Q = HEADS * D, K = KV * D, RANKS = 3, CHUNK = S / RANKS };

typedef struct how {
    /* In the reference too, unless what follows says otherwise. */
    double base;                  /* of the angles; 0: 1e4 */
    int turned;                   /* features of a head that rotate; 0: all, -1: none */
    double cap;                   /* of scores; 0: none */
    size_t within;                /* a window; 0: none */
    bool alibi;                   /* instead of RoPE */
    bool documents, sinks, sharp; /* rows of documents; sinks; scores are twice as large */
    bool whole;                   /* no causal mask */
    size_t padding;               /* last keys that are unseen */
    /* In the other alone. */
    double theta, slower, scale; /* 0: `base`, 1 and 1, which is right; scale: of 1/sqrt(D) */
    double capped;               /* 0: `cap` */
    size_t ahead, window, start, restart;
    size_t from, blind;         /* so many keys from this one on are unseen */
    size_t hops, dealt;         /* that keys make around RANKS; heads from so many parts in turn */
    double slope;               /* times ALiBi's; 0: 1 */
    size_t series, shards;      /* heads that its slopes are for; shards that each have the first one's */
    size_t turns, first, wider; /* features that are turned, the first of them; what is added to `within` */
    bool unpadded, masked;      /* padding is seen after all; tokens see no later one after all */
    bool late, open;            /* a mask after the softmax; all keys of the other half are seen */
    bool zero;                  /* unseen keys have a score of 0, or of -cap */
    bool inverted;              /* hidden keys are seen, and they alone */
    bool tiled, plain_k, of_v, backward, cut, dropout, not_own, by_lane, bare, sinkless, neighbours, reversed,
        one_series;
    bool flat;                                      /* heads and tokens are not transposed back */
    enum { SAME, HALVES, OF_EACH_HALF, NONE } seen; /* the documents that the mask is of */
    /* What goes by the places of a ring of two. */
    enum {
        RING_NONE,
        RING_MASKED,
        RING_TURNED,
        RING_WIDE,
        RING_APART,
        RING_BASE_TWO,
        RING_AT_HOME,
        RING_RESTARTS
    } ring;
    bool zigzag;
    int offset;                /* of q's positions */
    bool silent;               /* what heads give is zero, */
    double times;              /* or a multiple; 0: 1 */
    size_t head, heads;        /* only these do what the fields say, 0: all, */
    const struct how *of_rest; /* and the rest this */
} how;

static double either(double x, double otherwise)
{
    return x > 0.0 ? x : otherwise;
}

/* --- places ------------------------------------------------------------------------------------------------------- */

/* Where a token lies in a ring of two; *order: in the ring's order. */
static size_t place_of(size_t token, const how *o, size_t *order)
{
    const size_t size = o->zigzag ? S / 4 : S / 2, chunk = token / size;
    const size_t place = o->zigzag && chunk >= 2 ? 3 - chunk : chunk;
    *order = place * (S / 2) + token % size + (o->zigzag && chunk >= 2 ? size : 0);
    return place;
}

static size_t in_order(size_t token, const how *o)
{
    size_t order;
    (void)place_of(token, o, &order);
    return order;
}

static bool is_foreign(size_t token, size_t other, const how *o)
{
    size_t unused;
    return place_of(token, o, &unused) != place_of(other, o, &unused);
}

/* The token with the same index in the own place. */
static size_t at_home(size_t at, size_t key, const how *o)
{
    size_t token = 0;
    while (is_foreign(at, token, o) || in_order(token, o) % (S / 2) != in_order(key, o) % (S / 2))
        token++;
    return token;
}

/* The first token of a token's document. */
static size_t document_at(size_t token)
{
    return token >= 7 ? 7 : token >= 3 ? 3 : 0;
}

static size_t seen_document_of(const how *o, size_t token, size_t head)
{
    if (o->seen == SAME)
        return document_at(token);
    if (o->seen == OF_EACH_HALF) /* each half of the heads has those of a half of the tokens */
        return document_at(head / (HEADS / 2) * (S / 2) + token % (S / 2));
    return o->seen == HALVES && token >= 5;
}

static bool sees(size_t at, size_t key, size_t head, const how *o)
{
    const size_t window = o->ring == RING_WIDE && is_foreign(at, key, o) ? 0 : o->within;
    if (o->open && key / (S / 2) != at / (S / 2))
        return true;
    if (key + o->padding >= S && !o->unpadded)
        return false;
    return (o->whole && !o->masked   ? true
            : o->ring == RING_MASKED ? in_order(key, o) <= in_order(at, o)
                                     : key <= at + o->ahead) &&
           (!o->hops || (at / CHUNK + RANKS - key / CHUNK) % RANKS < o->hops) &&
           (!o->documents || seen_document_of(o, key, head) == seen_document_of(o, at, head)) &&
           !(o->not_own && key == at && at > 0) && !(key >= o->from && key < o->from + o->blind) &&
           (!window || key + window + o->wider > at) && (!o->window || key + o->window > at) && key >= o->start &&
           !(o->cut && at >= 6 && key < 6);
}

/* --- attention ---------------------------------------------------------------------------------------------------- */

static void turn(double *x, const float *from, size_t token, int offset, const how *o)
{
    const size_t position = o->restart                 ? token % o->restart
                            : o->ring == RING_TURNED   ? in_order(token, o)
                            : o->ring == RING_RESTARTS ? in_order(token, o) % (S / 2)
                            : o->documents             ? token - document_at(token)
                                                       : token;
    const size_t turned = o->alibi || o->turned < 0 ? 0 : o->turned ? (size_t)o->turned : D;
    const size_t n = o->turns ? o->turns : turned;
    for (size_t i = 0; i < D; i++)
        x[i] = (double)from[i];
    for (size_t i = o->first; i < o->first + n / 2; i++) {
        const double theta = either(o->theta, either(o->base, 1e4));
        const double angle = ((double)position + offset) * pow(theta, -2.0 * (double)(i - o->first) / (double)n) /
                             either(o->slower, 1.0);
        const double sine = o->backward ? -sin(angle) : sin(angle);
        const size_t a = o->neighbours ? 2 * i : i, b = o->neighbours ? a + 1 : i + n / 2;
        x[a] = (double)from[a] * cos(angle) - (double)from[b] * sine;
        x[b] = (double)from[b] * cos(angle) + (double)from[a] * sine;
    }
}

/* Of a number of heads that is no power of 2, those after the largest power below it have every second slope of the
 * series for twice as many. */
static double slope_of(size_t head, const how *o)
{
    const double own = (double)(head % (HEADS / (o->shards ? o->shards : 1)));
    const double size = either(fabs(o->slope), 1.0) * (o->slope < 0.0 ? -1.0 : 1.0);
    const double n = o->series ? (double)o->series : HEADS, power = o->one_series ? n : exp2(floor(log2(n)));
    return o->alibi && !o->bare ? size * exp2(-8.0 / power * (own < power ? own + 1.0 : own - power + 0.5)) : 0.0;
}

static double score_of(const float *q, const float *k, size_t at, size_t key, const how *o)
{
    double x[D], y[D], sum = 0.0;
    turn(x, q, at, o->offset, o);
    turn(y, k, key, 0, o);
    for (size_t i = 0; i < D; i++)
        sum += x[i] * (o->plain_k ? (double)k[i] : y[i]);
    sum *= either(o->scale, 1.0) * (o->sharp ? 2.0 : 1.0) / sqrt((double)D);
    const double cap = either(o->capped, o->cap);
    return cap > 0.0 && !o->bare ? cap * tanh(sum / cap) : sum;
}

/* What a head takes from each key, and 0 from unseen ones; sink: what joins the sum. */
static void weigh(double weight[S], const float *q, const float *k, double sink, size_t h, size_t at, const how *o)
{
    double sum[2] = {sink}, share[2], all = 0.0;
    size_t unused;
    for (size_t key = 0; key < S; key++) {
        const bool seen = sees(at, key, h, o) != o->inverted;
        weight[key] = !seen && o->zero
                          ? exp(-o->cap)
                          : exp(score_of(q, k + key * K, at, key, o) - slope_of(h, o) * ((double)at - (double)key));
        weight[key] = seen || o->zero || o->late ? weight[key] : 0.0;
        sum[o->ring >= RING_APART && o->ring <= RING_AT_HOME ? place_of(key, o, &unused) : 0] += weight[key];
        weight[key] = seen || o->zero ? weight[key] : 0.0;
    }
    for (size_t p = 0; p < 2; p++) {
        share[p] = sum[p] == 0.0              ? 0.0
                   : o->ring == RING_APART    ? 1.0
                   : o->ring == RING_BASE_TWO ? exp2(log(sum[p]))
                                              : sum[p];
        all += share[p];
    }
    for (size_t key = 0; key < S; key++) {
        const size_t p = o->ring >= RING_APART && o->ring <= RING_AT_HOME ? place_of(key, o, &unused) : 0;
        weight[key] *= sum[p] > 0.0 ? share[p] / sum[p] / all : 0.0;
    }
}

/* out = attention of one sample's token, through the weight [H, Q]. */
static void attend(float *out, const float *const x[3], size_t row, const float *w, const float *sinks, const how *all)
{
    double context[Q] = {0.0}, weight[S];
    for (size_t slot = 0; slot < HEADS; slot++) {
        const how *o = all->heads && slot - all->head >= all->heads ? all->of_rest : all;
        const size_t h = o->flat ? (row * HEADS + slot) / S : slot, at = o->flat ? (row * HEADS + slot) % S : row;
        const size_t kv = o->tiled ? h % KV : h / (HEADS / KV), part = o->dealt ? HEADS / o->dealt : HEADS;
        const size_t to = o->dealt ? slot % part * o->dealt + slot / part : slot;
        double *own = context + (o->reversed ? HEADS - 1 - to : to) * D;
        weigh(weight, x[0] + at * Q + h * D, x[1] + kv * D, sinks && !o->sinkless ? exp((double)sinks[h]) : 0.0, h, at,
              o);
        for (size_t key = 0; key < S; key++) {
            const double m = !o->dropout ? 1.0 : (3 * at + 5 * h + key) % 4 == 0 ? 0.0 : 4.0 / 3.0;
            const float *from = x[2] + (o->ring == RING_AT_HOME ? at_home(at, key, o) : key) * K + kv * D;
            double value[D];
            turn(value, from, key, 0, o);
            for (size_t i = 0; i < D; i++)
                *(o->by_lane ? &context[i * HEADS + slot] : &own[i]) += m * (o->silent ? 0.0 : either(o->times, 1.0)) *
                                                                        weight[key] *
                                                                        (o->of_v ? value[i] : (double)from[i]);
        }
    }
    multiply(out, w, context, H, Q);
}

/* Names of q, k, v, sinks, the output's weight, the output. */
typedef const char *const names[6];
static names metas = {"layers.1.attention.wq:fwd",         "layers.1.attention.wk:fwd",
                      "layers.1.attention.wv:fwd",         "layers.1.attention.sinks:init",
                      "layers.1.attention.wo.weight:init", "layers.1.attention.wo:fwd"};
static names hugging_faces = {"layers.1.attn.q_proj:fwd",         "layers.1.attn.k_proj:fwd",
                              "layers.1.attn.v_proj:fwd",         "layers.1.attn.sinks:init",
                              "layers.1.attn.o_proj.weight:init", "layers.1.attn.o_proj:fwd"};

static made attention(const how *o, names name)
{
    made m = {.n = 0};
    const how right = {.base = o->base,
                       .turned = o->turned,
                       .cap = o->cap,
                       .within = o->within,
                       .alibi = o->alibi,
                       .documents = o->documents,
                       .whole = o->whole,
                       .padding = o->padding,
                       .sharp = o->sharp};
    how wrong = *o;
    wrong.of_rest = &right;
    const float *const x[3] = {put(&m, name[0], 3, B, S, Q), put(&m, name[1], 3, B, S, K),
                               put(&m, name[2], 3, B, S, K)};
    const float *sinks = o->sinks ? put(&m, name[3], 1, HEADS, 0, 0) : NULL;
    const float *w = put(&m, name[4], 2, H, Q, 0);
    float *y = put_tokens(&m, name[5]), *z = other_of(&m);
    for (size_t row = 0; row < B * S; row++) {
        const size_t sample = row / S * S;
        const float *const of[] = {x[0] + sample * Q, x[1] + sample * K, x[2] + sample * K};
        attend(y + row * H, of, row % S, w, sinks, &right);
        attend(z + row * H, of, row % S, w, sinks, &wrong);
    }
    return m;
}

#define SHAPE .base = 500.0, .sharp = true
static const struct {
    how o;
    const char *cause;
} cases[] = {
    {{.scale = 2.3}, "softmax_scale"},
    {{.theta = 5e5}, "rope_theta"},
    {{.theta = 3e3}, "rope_theta"},
    {{.slower = 4.0}, "rope_theta"},
    {{.backward = true}, "rope_direction"},
    {{.plain_k = true}, "rope_missing"},
    {{.neighbours = true}, "rope_pairing"},
    {{.restart = 5}, "rope_restarts"},
    {{.offset = 1}, "rope_offset"},
    {{.offset = -3}, "rope_offset"},
    {{.ahead = 1}, "causal_mask"},
    {{.ahead = S}, "causal_mask_missing"},
    {{.not_own = true}, "causal_mask"},
    {{.of_v = true}, "rope_on_values"},
    {{.theta = 10.0}, "rope_theta"}, /* 1e4 to the power of a head's share of the width */
    {{.by_lane = true}, "dimension_flattened"},
    {{.cap = 0.4, .bare = true}, "softcap"},
    {{.cap = 0.4, .capped = 0.7}, "softcap"},
    {{.cap = 0.4, .within = 5, .scale = 0.7}, "softmax_scale"},
    {{.window = 4}, "attention_window"},
    {{.start = 2}, "keys_masked"},
    {{.from = 5, .blind = 3}, "keys_masked"},
    {{.cut = true}, "attention_across_documents"},
    {{.tiled = true}, "wrong_kv_head"},
    {{.reversed = true}, "reversed"},
    {{.dropout = true}, "dropout"},
    {{.scale = 2.3, .turned = D / 2}, "softmax_scale"},
    {{.backward = true, .turned = D / 2}, "rope_direction"},
    {{.turns = D / 2}, "rope_width"},
    {{.within = 4, .wider = 1}, "attention_window"},
    {{.late = true}, "mask_after_softmax"},
    {{.zero = true}, "causal_mask"},
    {{.inverted = true}, "mask_inverted"},
    {{.within = 5, .inverted = true}, "mask_inverted"},
    {{.open = true}, "causal_mask_missing"},
    {{.whole = true, .masked = true}, "causal_mask"},
    {{.whole = true, .from = S - 3, .blind = 3}, "keys_masked"},
    {{.alibi = true, .slope = -1.0}, "alibi_slopes"},
    {{.alibi = true, .slope = 1.7}, "alibi_slopes"},
    {{.alibi = true, .series = 2 * HEADS}, "alibi_slopes"},
    {{.alibi = true, .shards = 2}, "alibi_slopes"},
    {{.alibi = true, .scale = 2.0}, "softmax_scale"},
    {{.ring = RING_APART}, "softmax_of_own_keys"},
    {{.ring = RING_APART, .zigzag = true}, "softmax_of_own_keys"},
    {{.ring = RING_BASE_TWO}, "softmax_of_own_keys"},
    {{.ring = RING_AT_HOME, .zigzag = true}, "ring_own_keys"},
    {{.ring = RING_MASKED, .zigzag = true}, "causal_mask"},
    {{.ring = RING_TURNED, .zigzag = true}, "zigzag_positions"},
    {{.ring = RING_RESTARTS, .zigzag = true}, "rope_restarts"},
    {{.turned = -1, .whole = true, .padding = 3, .unpadded = true}, "keys_masked"},
    {{.whole = true, .padding = 2, .unpadded = true}, "keys_masked"},
    {{.whole = true, .padding = 4, .scale = 2.3}, "softmax_scale"},
    {{.ring = RING_WIDE, .within = 5}, "attention_window"},
    {{.flat = true}, "heads_and_tokens_exchanged"},
    {{.cap = 0.4, .within = 5, .bare = true}, "softcap"},
    {{SHAPE, .turned = 4, .within = 4, .first = D - 4}, "rope_width"},
    {{SHAPE, .turned = 4, .window = 4}, "attention_window"},
    {{SHAPE, .turned = 4, .hops = RANKS - 1}, "keys_masked"},
    {{SHAPE, .turned = 4, .within = 8, .ring = RING_MASKED, .zigzag = true}, "causal_mask"},
    {{SHAPE, .turned = 4, .within = 4, .dealt = 2}, "slices_reordered"},
    {{SHAPE, .turned = 4, .documents = true, .seen = HALVES}, "document_boundaries"},
    {{SHAPE, .turned = 4, .within = 4, .documents = true, .seen = OF_EACH_HALF}, "document_boundaries"},
    {{SHAPE, .turned = 4, .within = 4, .documents = true, .seen = NONE}, "attention_across_documents"},
    {{SHAPE, .turned = -1, .turns = D}, "rope_missing"},
    {{SHAPE, .turned = -1, .cap = 1.5, .sinks = true, .sinkless = true}, "sinks_missing"},
    {{SHAPE, .turned = -1, .cap = 1.5, .sinks = true, .zero = true}, "causal_mask"},
};

CLAIM(one_mistake_of_attention_is_named)
{
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        made m = attention(&cases[k].o, cases[k].o.sharp ? hugging_faces : metas);
        expect_cause(&m, cases[k].cause, NULL, k);
    }
}

CLAIM(slopes_that_are_left_out_or_of_another_series_are_told)
{
    for (size_t k = 0; k < 2; k++) {
        made m = attention(&(how){.alibi = true, .bare = k == 0, .one_series = k == 1}, metas);
        expect_cause(&m, "alibi_slopes", k ? "one series, or two" : "no ALiBi bias", k);
    }
}

/* Ranks have three heads each, or one. */
CLAIM(a_mistake_of_some_heads_is_named_with_them)
{
    static const struct {
        how o;
        const char *cause, *words;
    } some[] = {
        {{.offset = 1, .head = 3, .heads = 3}, "rope_offset", "in heads 3 to 5 of 6 alone, those of one rank"},
        {{.ahead = S, .head = 0, .heads = 3}, "causal_mask_missing", "in heads 0 to 2 of 6 alone"},
        {{.scale = 2.3, .head = 3, .heads = 3}, "softmax_scale", "in heads 3 to 5 of 6 alone"},
        {{.alibi = true, .slope = 1.7, .head = 3, .heads = 3}, "alibi_slopes", "in heads 3 to 5 of 6 alone"},
        {{.silent = true, .head = 3, .heads = 3}, "heads_missing", "in heads 3 to 5 of 6 alone"},
        {{.silent = true, .head = 1, .heads = 1}, "heads_missing", "in head 1 of 6 alone"},
        {{.times = 2.0, .head = 3, .heads = 1}, "heads_scaled", "give times 2; in head 3 of 6 alone"},
    };
    for (size_t k = 0; k < sizeof some / sizeof *some; k++) {
        made m = attention(&some[k].o, metas);
        expect_cause_on(2, &m, some[k].cause, some[k].words, k);
    }
    made m = attention(&(how){.offset = 1, .head = 3, .heads = 1}, metas);
    expect_cause_on(HEADS, &m, "rope_offset", "in head 3 of 6 alone", sizeof some / sizeof *some);
}

/* None of what computing attention again says. */
static void expect_no_replay(made *m, size_t number)
{
    static const char *const of_attention[] = {"!softmax_scale", "!rope_theta", "!causal_mask", "!attention_window",
                                               "!keys_masked"};
    const ar_verify_row row = look(m, (ari_explain_case){ONE_RANK});
    for (size_t i = 0; i < sizeof of_attention / sizeof *of_attention; i++)
        expect_row(&row, of_attention[i], NULL, number);
}

/* Three heads of six that begin at the second: no rank's, and no single one. */
CLAIM(a_mistake_of_other_heads_gives_no_answer)
{
    made m = attention(&(how){.scale = 3.0, .head = 1, .heads = 3}, metas);
    expect_no_replay(&m, 0);
}

CLAIM(an_input_that_no_dump_has_gives_no_answer)
{
    names without = {metas[0], "layers.1.other:fwd", metas[2], metas[3], metas[4], metas[5]};
    made m = attention(&(how){.scale = 3.0}, without);
    expect_no_replay(&m, 0);
}

/* The output has a mistake of its own, but what arrives is off by as much already. */
CLAIM(an_input_that_is_wrong_itself_gives_no_answer)
{
    for (size_t wrong = 0; wrong < 3; wrong++) {
        made m = attention(&(how){.scale = 3.0}, metas);
        for (size_t i = 0; i < count_of(&m.tensor[1][wrong]); i++)
            data_of(&m, 1, wrong)[i] *= 1.5f;
        expect_no_replay(&m, wrong);
    }
}

CLAIM(two_mistakes_at_once_give_no_answer_of_one)
{
    made m = attention(&(how){.scale = 3.0, .tiled = true, .backward = true}, metas);
    expect_no_replay(&m, 0);
}

CLAIM(attention_of_names_that_say_nothing_is_found_by_widths)
{
    names nothing = {"layers.1.mix.a:fwd", "layers.1.mix.b:fwd",         "layers.1.mix.c:fwd",
                     "layers.1.mix.s",     "layers.1.mix.d.weight:init", "layers.1.mix.d:fwd"};
    made m = attention(&(how){.scale = 3.0}, nothing);
    expect_cause(&m, "softmax_scale", NULL, 0);
}

CLAIM(the_first_layer_is_one)
{
    names first = {"layers.0.mix.a:fwd", "layers.0.mix.b:fwd",         "layers.0.mix.c:fwd",
                   "layers.0.mix.s",     "layers.0.mix.d.weight:init", "layers.0.mix.d:fwd"};
    made m = attention(&(how){.scale = 3.0}, first);
    expect_cause(&m, "softmax_scale", NULL, 0);
}

CLAIM(a_mistake_is_named_in_bf16_noise)
{
    made m = attention(&(how){.ahead = 1}, metas);
    for (size_t i = 0; i < B * S * H; i++)
        other_of(&m)[i] *= 1.0f + 0x1p-9f * noise(i);
    const ar_verify_row row = look(&m, (ari_explain_case){ONE_RANK, .rtol = 0x1p-8});
    expect_row(&row, "causal_mask", NULL, 0);
}

EVERY_CLAIM(replay_attention)
