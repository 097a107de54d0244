/* SPDX-License-Identifier: Apache-2.0 */

#include "ref/core/tensor_private.h"
#include "ref/cpu/row_sum.h"
#include "ref/cpu/storage.h"

/* Experts: choosing them, moving rows to them and back, and adding the shared expert. Formulas: numerics.md,
 * "Experts". */

/* --- routing ------------------------------------------------------------------------------------------------------ */

/* Inserts an expert into the list of the k most preferred of *count experts, in order; of equal scores the later expert
 * comes last. */
static void put_in_order(int32_t *expert, size_t *count, const float *z, size_t i, size_t k)
{
    size_t pos = *count < k ? (*count)++ : k;
    for (; pos > 0 && ari_route_prefers(z[i], i, z[expert[pos - 1]], (size_t)expert[pos - 1]); pos--)
        if (pos < k)
            expert[pos] = expert[pos - 1];
    if (pos < k)
        expert[pos] = (int32_t)i;
}

static void sort_experts(int32_t *expert, size_t k)
{
    for (size_t j = 1; j < k; j++)
        for (size_t pos = j; pos > 0 && expert[pos - 1] > expert[pos]; pos--) {
            const int32_t larger = expert[pos - 1];
            expert[pos - 1] = expert[pos];
            expert[pos] = larger;
        }
}

/* The sum of a group's two largest scores, or of a softmax the largest. */
static float group_score(const float *c, size_t n, bool softmax)
{
    float largest = c[0], second = -INFINITY;
    for (size_t i = 1; i < n; i++) {
        if (c[i] > largest) {
            second = largest;
            largest = c[i];
        } else if (c[i] > second) {
            second = c[i];
        }
    }
    return softmax ? largest : largest + second;
}

/* Chooses the k experts that the row prefers among the selected groups, ascending. */
static void choose(int32_t *expert, const float *c, size_t n, const ar_route_rule *rule)
{
    const size_t group_size = n / rule->groups;
    float score[AR_ROUTE_GROUPS] = {0.0f};
    int32_t group[AR_ROUTE_GROUPS];
    size_t group_count = 0, count = 0;
    for (size_t g = 0; g < rule->groups && rule->groups > 1; g++)
        score[g] = group_score(c + g * group_size, group_size, !rule->bias.ptr);
    for (size_t g = 0; g < rule->groups; g++)
        put_in_order(group, &group_count, score, g, rule->kept);
    sort_experts(group, group_count);
    for (size_t g = 0; g < group_count; g++)
        for (size_t i = (size_t)group[g] * group_size; i < ((size_t)group[g] + 1) * group_size; i++)
            put_in_order(expert, &count, c, i, rule->k);
    sort_experts(expert, rule->k);
}

/* p may be z. Returns the logarithm of the denominator. */
ARI_ROW_KERNEL float softmax_of(float *p, const float *z, size_t n)
{
    const int32_t top = ari_row_largest_key(z, n), bits = ari_rowsum_bits(n);
    const float max = ari_key32_value(top);
    const double step = ari_row_step(1, bits); /* every term is at most exp(0) = 1 */
    uint64_t sum = 0;
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++) {
        const float e = ari_softmax_exp(z[j], max);
        sum += ari_row_biased((double)e, step);
        p[j] = e;
    }
    const double l = ari_row_value(sum, n, top == INT32_MAX ? ARI_EXP_NONFINITE : 1, bits);
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++)
        p[j] = ari_softmax_p(p[j], l);
    return ari_route_lse(max, l);
}

/* Returns the index of the first score that makes a choice impossible; n: there is none. */
static size_t first_lost(const float *c, size_t n, bool softmax)
{
    size_t j = 0;
    while (j < n && !(softmax ? c[j] != c[j] : ari_route_is_lost(c[j])))
        j++;
    return j;
}

/* Returns the divisor of the chosen experts' scores if their weights are normalised. */
static float divisor_of(const float *a, const int32_t *expert, const ar_route_rule *rule)
{
    float sum = a[expert[0]];
    for (size_t j = 1; j < rule->k; j++)
        sum = ari_add32(sum, a[expert[j]]);
    return rule->bias.ptr ? ari_route_divisor(sum) : sum;
}

static void weigh(float *weight, const float *a, const int32_t *expert, const ar_route_rule *rule)
{
    const float divisor = divisor_of(a, expert, rule);
    for (size_t j = 0; j < rule->k; j++)
        weight[j] = ari_route_scaled(a[expert[j]], divisor, rule->scale, rule->normalised);
}

/** Slot route. p holds the scores for the choice while the experts are chosen. */
ar_status ari_cpu_route(ar_device *d, ARI_AT_ONCE, ar_buf p, ar_buf expert, ar_buf weight, ar_buf lse,
                        const ar_tensor *z, const ar_route_rule *rule)
{
    const ar_tensor logits = ari_tensor_rows(z);
    const size_t n = logits.shape[0], experts = logits.shape[1], k = rule->k;
    const float *bias = rule->bias.ptr;
    ARI_PARALLEL_FOR (t, n, d, n * experts * 8) {
        float *row = (float *)p.ptr + t * experts, *w = (float *)weight.ptr + t * k;
        int32_t *chosen = (int32_t *)expert.ptr + t * k;
        const float *x = ari_run_load(&logits, (ptrdiff_t)(t * experts), experts, row);
        for (size_t i = 0; i < experts && bias; i++)
            row[i] = ari_route_score(ari_sigmoid32(x[i]), bias[i]);
        const float *c = bias ? row : x;
        const size_t lost = first_lost(c, experts, !bias);
        if (lost == experts)
            choose(chosen, c, experts, rule);
        if (bias)
            x = ari_run_load(&logits, (ptrdiff_t)(t * experts), experts, row);
        for (size_t i = 0; i < experts && bias; i++)
            row[i] = ari_sigmoid32(x[i]);
        const float of_row = bias ? 0.0f : softmax_of(row, x, experts);
        if (lse.ptr)
            ((float *)lse.ptr)[t] = of_row;
        if (lost == experts)
            weigh(w, row, chosen, rule);
        for (size_t j = 0; j < k && lost < experts; j++) {
            chosen[j] = -1 - (int32_t)lost;
            w[j] = ari_nan32();
        }
    }
    return AR_OK;
}

/* A row's chosen experts, in the gradient. */
typedef struct chosen_row {
    const float *a, *g, *w; /* all scores [experts]; scores of the chosen experts [k] */
    const int32_t *expert;
    float divisor, r; /* r: sum of the shares' slopes */
} chosen_row;

/* Returns the contribution to r of the token's j-th expert, and its slope. */
static float share_of_slot(const chosen_row *c, size_t j, const ar_route_rule *rule)
{
    const float a = c->a[c->expert[j]];
    if (rule->bias.ptr)
        return ari_route_weight(a, c->divisor);
    return rule->normalised ? c->w[j] : a;
}

static float slope_of_slot(const chosen_row *c, size_t j, const ar_route_rule *rule)
{
    return rule->bias.ptr ? c->g[j] : ari_mul32(c->g[j], rule->scale);
}

/* The gradients of n logits from number `first_logit` on. */
static void route_gradient(float *dz, size_t first_logit, size_t n, const chosen_row *c, const ar_route_rule *rule)
{
    const bool is_dense = !rule->bias.ptr && !rule->normalised;
    for (size_t i = 0; i < n; i++)
        dz[i] = is_dense ? ari_mul32(c->a[first_logit + i], -c->r) : 0.0f;
    for (size_t j = 0; j < rule->k; j++) {
        const size_t i = (size_t)c->expert[j] - first_logit; /* wraps around beyond n if it is below `first_logit` */
        if (i < n && rule->bias.ptr)
            dz[i] = ari_route_dscore(c->w[j], c->a[c->expert[j]], c->g[j], c->r);
        else if (i < n)
            dz[i] = ari_route_dlogit(share_of_slot(c, j, rule), slope_of_slot(c, j, rule), c->r);
    }
}

/** Slot route_backward. */
ar_status ari_cpu_route_backward(ar_device *d, ARI_AT_ONCE, const ar_tensor *dz, ar_cbuf g, ar_cbuf p, ar_cbuf expert,
                                 ar_cbuf weight, const ar_route_rule *rule)
{
    const ar_tensor logits = ari_tensor_rows(dz);
    const size_t n = logits.shape[0], experts = logits.shape[1], k = rule->k;
    const bool sums = rule->normalised || !rule->bias.ptr;
    ARI_PARALLEL_FOR (t, n, d, n * experts) {
        chosen_row c = {.a = (const float *)p.ptr + t * experts,
                        .g = (const float *)g.ptr + t * k,
                        .w = (const float *)weight.ptr + t * k,
                        .expert = (const int32_t *)expert.ptr + t * k};
        float scratch[ARI_BLOCK];
        c.divisor = divisor_of(c.a, c.expert, rule);
        for (size_t j = 0; j < k && sums; j++)
            c.r = ari_add32(c.r, ari_mul32(share_of_slot(&c, j, rule), slope_of_slot(&c, j, rule)));
        for (size_t first_logit = 0, count; first_logit < experts; first_logit += count) {
            const ptrdiff_t offset = (ptrdiff_t)(t * experts + first_logit);
            float *out = ari_run_at(&logits, offset, scratch);
            count = ari_block_length(experts, first_logit / ARI_BLOCK);
            route_gradient(out, first_logit, count, &c, rule);
            ari_run_store(&logits, offset, count, out);
        }
    }
    return AR_OK;
}

/* --- losses of routers -------------------------------------------------------------------------------------------- */

/* Adds loss gradients for n experts of a row; c NULL: no balance loss; z: factor of p in the z-loss, 0: none. */
static void add_losses(float *dz, const float *p, const float *c, float r, bool has_z, float z, size_t n)
{
    for (size_t i = 0; i < n && c; i++)
        dz[i] = ari_add32(dz[i], ari_route_dlogit(p[i], c[i], r));
    for (size_t i = 0; i < n && has_z; i++)
        dz[i] = ari_add32(dz[i], ari_mul32(p[i], z));
}

/** Slot route_terms. */
ar_status ari_cpu_route_terms(ar_device *d, ARI_AT_ONCE, ar_buf terms, const ar_tensor *p, ar_cbuf balance,
                              size_t tokens, ar_cbuf lse, double z, ar_cbuf valid)
{
    const size_t n = p->shape[0], experts = p->shape[1];
    const uint8_t *counts = valid.ptr;
    float *out = terms.ptr;
    ARI_PARALLEL_FOR (t, n, d, n * experts) {
        const float *row = (const float *)p->data.ptr + t * experts;
        const float *c = balance.ptr ? (const float *)balance.ptr + t / tokens * experts : NULL;
        out[t] = 0.0f;
        if (counts && !counts[t])
            continue;
        out[t] = ari_route_balance(row, c, experts);
        if (lse.ptr)
            out[t] = ari_add32(out[t], ari_route_z_term(z, ((const float *)lse.ptr)[t]));
    }
    return AR_OK;
}

/** Slot route_losses. */
ar_status ari_cpu_route_losses(ar_device *d, ARI_AT_ONCE, const ar_tensor *dz, ar_cbuf p, ar_cbuf balance,
                               size_t tokens, ar_cbuf lse, double z, ar_cbuf valid)
{
    const ar_tensor logits = ari_tensor_rows(dz);
    const size_t n = logits.shape[0], experts = logits.shape[1];
    const uint8_t *counts = valid.ptr;
    ARI_PARALLEL_FOR (t, n, d, n * experts) {
        const float *row = (const float *)p.ptr + t * experts;
        const float *c = balance.ptr ? (const float *)balance.ptr + t / tokens * experts : NULL;
        const float of_z = lse.ptr ? ari_route_z(z, ((const float *)lse.ptr)[t]) : 0.0f;
        const float r = ari_route_balance(row, c, experts);
        float scratch[ARI_BLOCK];
        for (size_t first_logit = 0, count; first_logit < experts && (!counts || counts[t]); first_logit += count) {
            const ptrdiff_t offset = (ptrdiff_t)(t * experts + first_logit);
            float *out = ari_run_at(&logits, offset, scratch);
            count = ari_block_length(experts, first_logit / ARI_BLOCK);
            ari_run_load(&logits, offset, count, scratch);
            add_losses(out, row + first_logit, c ? c + first_logit : NULL, r, lse.ptr != NULL, of_z, count);
            ari_run_store(&logits, offset, count, out);
        }
    }
    return AR_OK;
}

/* --- rows -------------------------------------------------------------------------------------------------------- */

ARI_ROW_KERNEL void scale_loop(float *y, float s, const float *x, size_t n)
{
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++)
        y[j] = ari_mul32(s, x[j]);
}

ARI_ROW_KERNEL void add_loop(float *y, const float *x, size_t n)
{
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++)
        y[j] = ari_add32(y[j], x[j]);
}

ARI_ROW_KERNEL void add_scaled_loop(float *y, float s, const float *x, size_t n)
{
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++)
        y[j] = ari_add_gated32(y[j], s, x[j]);
}

/** Slot gather_rows. */
ar_status ari_cpu_gather_rows(ar_device *d, ARI_AT_ONCE, const ar_tensor *y, const ar_tensor *w, ar_cbuf row_of,
                              ar_cbuf weight, size_t k)
{
    const size_t n = ari_tensor_rows(y).shape[0], cols = w->shape[1], width = ar_dtype_bytes(w->dtype);
    const int64_t *rows = row_of.ptr;
    const float *weights = weight.ptr;
    ARI_PARALLEL_FOR (t, n, d, n * cols) {
        const int64_t row = rows[t];
        const ptrdiff_t src_offset = row < 0 ? 0 : row / (int64_t)k * w->stride[0];
        if (row < 0)
            memset((char *)y->data.ptr + t * cols * width, 0, cols * width);
        else if (!weights)
            memcpy((char *)y->data.ptr + t * cols * width, (const char *)w->data.ptr + src_offset * (ptrdiff_t)width,
                   cols * width);
        for (size_t first_col = 0, count; first_col < cols && weights && row >= 0; first_col += count) {
            const ptrdiff_t offset = (ptrdiff_t)(t * cols + first_col);
            float scratch[2][ARI_BLOCK], *out = ari_run_at(y, offset, scratch[0]);
            count = ari_block_length(cols, first_col / ARI_BLOCK);
            scale_loop(out, weights[row], ari_run_load(w, src_offset + (ptrdiff_t)first_col, count, scratch[1]), count);
            ari_run_store(y, offset, count, out);
        }
    }
    return AR_OK;
}

/* Computes y += x or s*x; the first term overwrites y. */
static void add_term(float *y, bool is_first, const float *s, const float *x, size_t n)
{
    if (is_first && s)
        scale_loop(y, *s, x, n);
    else if (is_first)
        memcpy(y, x, n * sizeof *y);
    else if (s)
        add_scaled_loop(y, *s, x, n);
    else
        add_loop(y, x, n);
}

/** Slot combine_rows. */
ar_status ari_cpu_combine_rows(ar_device *d, ARI_AT_ONCE, const ar_tensor *y, const ar_tensor *rows, ar_cbuf weight,
                               ar_cbuf place, size_t k)
{
    const ar_tensor tokens = ari_tensor_rows(y);
    const size_t n = tokens.shape[0], cols = tokens.shape[1];
    const int64_t *places = place.ptr;
    const float *weights = weight.ptr;
    ARI_PARALLEL_FOR (t, n, d, n * cols * k) {
        for (size_t first_col = 0, count; first_col < cols; first_col += count) {
            const ptrdiff_t offset = (ptrdiff_t)(t * cols + first_col);
            float scratch[2][ARI_BLOCK], *out = ari_run_at(y, offset, scratch[0]);
            count = ari_block_length(cols, first_col / ARI_BLOCK);
            for (size_t i = t * k; i < (t + 1) * k; i++) {
                const ptrdiff_t term = (ptrdiff_t)((size_t)places[i] * cols + first_col);
                add_term(out, i == t * k, weights ? &weights[i] : NULL, ari_run_load(rows, term, count, scratch[1]),
                         count);
            }
            ari_run_store(y, offset, count, out);
        }
    }
    return AR_OK;
}

ARI_ROW_KERNEL uint64_t product_top(const float *a, const float *b, size_t n)
{
    return ari_row_product_top(a, b, n);
}

ARI_ROW_KERNEL uint64_t product_integer(const float *a, const float *b, size_t n, int32_t e, int32_t p)
{
    return ari_row_product_integer(a, b, n, e, p);
}

/* fl32(row sum of the products) of row i of a and row j of b. */
static float dot(const ar_tensor *a, size_t i, const ar_tensor *b, size_t j, size_t cols)
{
    float scratch[2][ARI_BLOCK];
    const size_t left = i * cols, right = j * cols, blocks = ari_blocks_of(cols);
    const int32_t p = ari_rowsum_bits(cols);
    int32_t e = ARI_EXP_ZERO;
    uint64_t top = 0, sum = 0;
    for (size_t pass = 0; pass < 2 * blocks; pass++) {
        const size_t begin = pass % blocks * ARI_BLOCK, n = ari_block_length(cols, pass % blocks);
        const float *x = ari_run_load(a, (ptrdiff_t)(left + begin), n, scratch[0]);
        const float *y = ari_run_load(b, (ptrdiff_t)(right + begin), n, scratch[1]);
        if (pass == blocks)
            e = ari_exponent64(ari_float64(top));
        if (pass < blocks) {
            const uint64_t found = product_top(x, y, n);
            top = found > top ? found : top;
        } else {
            sum += product_integer(x, y, n, e, p);
        }
    }
    return ari_round32(ari_row_value(sum, cols, e, p));
}

/** Slot dot_rows. */
ar_status ari_cpu_dot_rows(ar_device *d, ARI_AT_ONCE, ar_buf g, const ar_tensor *dy, const ar_tensor *rows,
                           ar_cbuf place, size_t k)
{
    const ar_tensor tokens = ari_tensor_rows(dy);
    const size_t slots = tokens.shape[0] * k, cols = tokens.shape[1];
    float *out = g.ptr;
    const int64_t *places = place.ptr;
    ARI_PARALLEL_FOR (i, slots, d, slots * cols)
        out[i] = dot(dy, i / k, rows, (size_t)places[i], cols);
    return AR_OK;
}

/* --- an expert of all tokens -------------------------------------------------------------------------------------- */

static float share_of(const ar_tensor *logit, size_t t)
{
    return ari_sigmoid32(ari_value_at(logit, (ptrdiff_t)t));
}

/** Slot add_gated. */
ar_status ari_cpu_add_gated(ar_device *d, ARI_AT_ONCE, const ar_tensor *y, const ar_tensor *x, const ar_tensor *logit)
{
    const ar_tensor rows = ari_tensor_rows(y);
    const size_t n = rows.shape[0], cols = rows.shape[1];
    ARI_PARALLEL_FOR (t, n, d, n * cols) {
        const float s = share_of(logit, t);
        for (size_t first_col = 0, count; first_col < cols; first_col += count) {
            const ptrdiff_t offset = (ptrdiff_t)(t * cols + first_col);
            float scratch[2][ARI_BLOCK], *out = ari_run_at(y, offset, scratch[0]);
            count = ari_block_length(cols, first_col / ARI_BLOCK);
            ari_run_load(y, offset, count, scratch[0]);
            add_scaled_loop(out, s, ari_run_load(x, offset, count, scratch[1]), count);
            ari_run_store(y, offset, count, out);
        }
    }
    return AR_OK;
}

/** Slot add_gated_backward. */
ar_status ari_cpu_add_gated_backward(ar_device *d, ARI_AT_ONCE, const ar_tensor *dx, const ar_tensor *dlogit,
                                     const ar_tensor *dy, const ar_tensor *x, const ar_tensor *logit)
{
    const ar_tensor rows = ari_tensor_rows(dy);
    const size_t n = rows.shape[0], cols = rows.shape[1];
    ARI_PARALLEL_FOR (t, n, d, n * cols * 2) {
        const float s = share_of(logit, t);
        float slope_room, *slope = ari_run_at(dlogit, (ptrdiff_t)t, &slope_room);
        *slope = ari_dsigmoid32(dot(dy, t, x, t, cols), s);
        ari_run_store(dlogit, (ptrdiff_t)t, 1, slope);
        for (size_t first_col = 0, count; first_col < cols; first_col += count) {
            const ptrdiff_t offset = (ptrdiff_t)(t * cols + first_col);
            float scratch[2][ARI_BLOCK], *out = ari_run_at(dx, offset, scratch[0]);
            count = ari_block_length(cols, first_col / ARI_BLOCK);
            scale_loop(out, s, ari_run_load(dy, offset, count, scratch[1]), count);
            ari_run_store(dx, offset, count, out);
        }
    }
    return AR_OK;
}
