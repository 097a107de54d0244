/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "anyrank/config.h"
#include "ref/core/text.h"

/* The tokens of a text are bytes, and two blocks have a boundary. */
enum { LEAST_VOCABULARY = 256, LEAST_LAYERS = 2, LEAST_HEAD = 2 };

static size_t gcd(size_t a, size_t b)
{
    while (b != 0) {
        const size_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static size_t rounded(size_t n, size_t by)
{
    return n / by + (n % by >= by - by / 2);
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* What is nearest to `wanted` among the numbers that have the same divisors in common with `heads` as x has. A tp is a
 * divisor of the heads, so it divides the one if and only if it divides the other. */
static size_t same_divisors(size_t x, size_t wanted, size_t heads)
{
    const size_t common = gcd(x, heads), others = heads / common, k = larger(rounded(wanted, common), 1);
    for (size_t away = 0;; away++) { /* k = 1 would do, and some k above within `others` */
        if (k > away && gcd(k - away, others) == 1)
            return (k - away) * common;
        if (gcd(k + away, others) == 1)
            return (k + away) * common;
    }
}

/* Layer i of the fewer ones is like one of the more, the first like the first and the last like the last. */
static void shrink_windows(ar_config *c, const ar_config *from)
{
    if (from->window == 0)
        return;
    for (size_t i = 0; i < sizeof c->full_attention / sizeof *c->full_attention; i++)
        c->full_attention[i] = 0;
    for (size_t i = 0; i < AR_CONFIG_LAYER_BITS; i++) {
        const size_t at = i < c->layers ? i : c->layers - 1;
        const size_t like = c->layers > 1 ? at * (from->layers - 1) / (c->layers - 1) : 0;
        if (ar_config_window(from, like) == 0)
            c->full_attention[i / 64] |= (uint64_t)1 << (i % 64);
    }
}

static void describe(ar_config *c, const ar_config *from, size_t n)
{
    snprintf(c->shrunk, sizeof c->shrunk,
             "%s shrunk to 1/%zu: %zu of %zu layers, hidden %zu of %zu, heads of %zu of %zu, MLP %zu of %zu, "
             "vocabulary %zu of %zu; %zu heads (%zu KV) as before, fresh weights",
             from->name, n, c->layers, from->layers, c->hidden, from->hidden, c->head_dim, from->head_dim, c->ffn,
             from->ffn, c->vocab, from->vocab, c->heads, c->kv_heads);
    snprintf(c->name, sizeof c->name, "%.*s at 1/%zu", (int)sizeof c->name - 28, from->name, n);
}

ar_status ar_config_shrink(ar_config *c, size_t n)
{
    const ar_config from = *c;
    if (n == 0)
        return ar_error_set(AR_ERR_ARG, "%s: cannot be shrunk to 1/0", c->name);
    if (n == 1)
        return AR_OK;
    if (n > from.head_dim / LEAST_HEAD)
        return ar_error_set(AR_ERR_ARG,
                            "%s: cannot be shrunk to 1/%zu: its heads have %zu features and keep at least %d; take at "
                            "most 1/%zu",
                            c->name, n, from.head_dim, LEAST_HEAD, larger(from.head_dim / LEAST_HEAD, 1));
    c->head_dim = larger(2 * rounded(from.head_dim, 2 * n), LEAST_HEAD); /* rotary positions turn pairs */
    c->hidden = from.hidden == from.heads * from.head_dim
                    ? c->heads * c->head_dim
                    : same_divisors(from.hidden, rounded(from.hidden, n), c->heads);
    c->ffn = same_divisors(from.ffn, rounded(from.ffn, n), c->heads);
    if (from.vocab > LEAST_VOCABULARY)
        c->vocab = same_divisors(from.vocab, larger(rounded(from.vocab, n), LEAST_VOCABULARY), c->heads);
    if (from.layers > LEAST_LAYERS)
        c->layers = larger(rounded(from.layers, n), LEAST_LAYERS);
    shrink_windows(c, &from);
    describe(c, &from, n);
    return AR_OK;
}
