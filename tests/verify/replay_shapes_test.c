/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of shapes that few models have is computed again, so that a mistake of it has its name: part of each head is
 * turned, a window beside documents that share a row, sinks, capped scores, no positions; values of ranks that share
 * heads or tokens. Attention is computed here by plain loops. */
#include "tests/verify/replay_support.h"

enum { HEADS = 4, KV = 2, D = 6, Q = HEADS * D, K = KV * D, WINDOW = 4, RANKS = 3, CHUNK = S / RANKS };

/* turned, from: features of a head, and the first of them; documents: which token's one is a token's; dealt: heads of the
 * output from so many parts in turn; hops: that keys make around RANKS; ordered: 2 places of a zigzag are compared. */
typedef struct shape {
    size_t turned, from, window, documents, own, dealt, hops;
    bool sinks, late_cap, ordered;
    double cap;
} shape;

enum { NONE, TWO, AT_HALVES };

static size_t document_of(const shape *o, size_t token, size_t head)
{
    if (o->own)
        token = head / (HEADS / o->own) * (S / o->own) + token % (S / o->own);
    if (o->documents == TWO)
        return token >= 7 ? 2 : token >= 3 ? 1 : 0;
    return o->documents == AT_HALVES && token >= 5 ? 1 : 0;
}

/* Positions begin again with each of two documents, in the reference and here. */
static void turn(double *x, const float *of, size_t token, const shape *o)
{
    const size_t first = token >= 7 ? 7 : token >= 3 ? 3 : 0;
    const double position = (double)(o->documents || o->own ? token - first : token);
    for (size_t i = 0; i < D; i++)
        x[i] = (double)of[i];
    for (size_t i = 0; i < o->turned / 2; i++) {
        const double angle = position * pow(500.0, -2.0 * (double)i / (double)o->turned);
        double *a = &x[o->from + i], *b = a + o->turned / 2;
        const double was = *a;
        *a = was * cos(angle) - *b * sin(angle);
        *b = *b * cos(angle) + was * sin(angle);
    }
}

/* Where a token lies among the tokens of two places that have a first and a last chunk each. */
static size_t in_zigzag(size_t token)
{
    const size_t n = S / 4, chunk = token / n;
    return (chunk == 0 ? 0 : chunk == 3 ? 1 : chunk + 1) * n + token % n;
}

static bool sees(const shape *o, size_t at, size_t key, size_t head)
{
    const bool before = o->ordered ? in_zigzag(key) <= in_zigzag(at) : key <= at;
    const bool arrived = !o->hops || (at / CHUNK + RANKS - key / CHUNK) % RANKS < o->hops;
    return before && arrived && (!o->window || key + o->window > at) &&
           document_of(o, key, head) == document_of(o, at, head);
}

static double weight_of(const float *q, const float *k, size_t at, size_t key, size_t head, const shape *o)
{
    double x[D], y[D], sum = 0.0;
    if (!sees(o, at, key, head))
        return o->late_cap ? exp(-o->cap) : 0.0;
    turn(x, q, at, o);
    turn(y, k, key, o);
    for (size_t i = 0; i < D; i++)
        sum += 2.0 * x[i] * y[i] / sqrt((double)D);
    return exp(o->cap > 0.0 ? o->cap * tanh(sum / o->cap) : sum);
}

static void attend(float *out, const float *const x[3], size_t at, const float *w, const float *sinks, const shape *o)
{
    double context[Q] = {0.0};
    for (size_t h = 0; h < HEADS; h++) {
        const size_t kv = h / (HEADS / KV), part = o->dealt ? HEADS / o->dealt : HEADS;
        double sum = o->sinks ? exp((double)sinks[h]) : 0.0,
               *own = context + (o->dealt ? h % part * o->dealt + h / part : h) * D;
        for (size_t key = 0; key < S; key++) {
            const double e = weight_of(x[0] + at * Q + h * D, x[1] + key * K + kv * D, at, key, h, o);
            sum += e;
            for (size_t i = 0; i < D; i++)
                own[i] += e * (double)x[2][key * K + kv * D + i];
        }
        for (size_t i = 0; i < D; i++)
            own[i] /= sum;
    }
    for (size_t i = 0; i < H; i++) {
        double sum = 0.0;
        for (size_t k = 0; k < Q; k++)
            sum += context[k] * (double)w[i * Q + k];
        out[i] = (float)sum;
    }
}

static const char *cause_of(const shape *right, const shape *wrong)
{
    static char cause[64];
    made m = {.n = 0};
    const float *const x[3] = {put(&m, "layers.1.attn.q_proj:fwd", 3, B, S, Q),
                               put(&m, "layers.1.attn.k_proj:fwd", 3, B, S, K),
                               put(&m, "layers.1.attn.v_proj:fwd", 3, B, S, K)};
    const float *sinks = right->sinks ? put(&m, "layers.1.attn.sinks:init", 1, HEADS, 0, 0) : NULL;
    const float *w = put(&m, "layers.1.attn.o_proj.weight:init", 2, H, Q, 0);
    float *y = put(&m, "layers.1.attn.o_proj:fwd", 3, B, S, H), *z = other_of(&m);
    for (size_t row = 0; row < B * S; row++) {
        const size_t sample = row / S * S;
        const float *const of[] = {x[0] + sample * Q, x[1] + sample * K, x[2] + sample * K};
        attend(y + row * H, of, row % S, w, sinks, right);
        attend(z + row * H, of, row % S, w, sinks, wrong);
    }
    const ar_verify_row row = look(&m, 0.0);
    snprintf(cause, sizeof cause, "%s", row.evidence.cause);
    return cause;
}

Test(replay_shapes, a_mistake_is_named)
{
    static const struct {
        shape right, wrong;
        const char *cause;
    } cases[] = {
        {{.turned = 4, .window = WINDOW}, {.turned = 4, .from = 2, .window = WINDOW}, "rope_width"},
        {{.turned = 4}, {.turned = 4, .window = WINDOW}, "attention_window"},
        {{.turned = 4}, {.turned = 4, .hops = RANKS - 1}, "keys_masked"},
        {{.turned = 4, .window = 8}, {.turned = 4, .window = 8, .ordered = true}, "causal_mask"},
        {{.turned = 4, .window = WINDOW}, {.turned = 4, .window = WINDOW, .dealt = 2}, "slices_reordered"},
        {{.turned = 4, .documents = TWO}, {.turned = 4, .documents = AT_HALVES}, "document_boundaries"},
        {{.turned = 4, .window = WINDOW, .documents = TWO},
         {.turned = 4, .window = WINDOW, .documents = TWO, .own = 2},
         "document_boundaries"},
        {{.turned = 4, .window = WINDOW, .documents = TWO},
         {.turned = 4, .window = WINDOW, .own = 1},
         "attention_across_documents"},
        {{.turned = 0}, {.turned = D}, "rope_missing"},
        {{.turned = 0, .sinks = true, .cap = 1.5}, {.turned = 0, .cap = 1.5}, "sinks_missing"},
        {{.turned = 0, .sinks = true, .cap = 1.5},
         {.turned = 0, .sinks = true, .cap = 1.5, .late_cap = true},
         "causal_mask"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *c = cause_of(&cases[i].right, &cases[i].wrong);
        cr_expect_str_eq(c, cases[i].cause, "case %zu: %s", i, c);
    }
}
