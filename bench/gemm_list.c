/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/harness.h"
#include "ref/core/size.h"
#include "ref/models/family.h"

static void add_shape(ari_gemm_list *list, ari_gemm_shape shape)
{
    if (list->n == ARI_GEMM_LIST_MAX)
        return;
    shape.times = 1;
    list->shape[list->n++] = shape;
}

/* `parts` layers side by side on one input, weights [out, in] or (transposed) [in, out]: Y, dX and dW. */
static void add_linear(ari_gemm_list *list, size_t tokens, size_t in, size_t out, size_t parts, bool transposed)
{
    for (size_t i = 0; i < parts; i++) {
        add_shape(list, (ari_gemm_shape){.batch = 1, .m = tokens, .n = out, .k = in, .b_transposed = transposed});
        add_shape(list, (ari_gemm_shape){
                            .batch = 1, .m = tokens, .n = in, .k = out, .b_transposed = !transposed, .add = i > 0});
        add_shape(
            list,
            (ari_gemm_shape){
                .batch = 1, .m = out, .n = in, .k = tokens, .a_transposed = true, .b_transposed = true, .add = true});
    }
}

/* Scores, P V, dP, dQ, dK, dV of every head of every sequence; the query heads of a KV head's group are rows of one
 * matrix. */
static void add_attention(ari_gemm_list *list, const ar_config *c, size_t batch, size_t s)
{
    const size_t matrices = batch * c->kv_heads, rows = c->heads / c->kv_heads * s, d = c->head_dim;
    for (int i = 0; i < 2; i++)
        add_shape(list, (ari_gemm_shape){.batch = matrices, .m = rows, .n = s, .k = d});
    for (int i = 0; i < 2; i++)
        add_shape(list, (ari_gemm_shape){.batch = matrices, .m = rows, .n = d, .k = s, .b_transposed = true});
    for (int i = 0; i < 2; i++)
        add_shape(list, (ari_gemm_shape){
                            .batch = matrices, .m = s, .n = d, .k = rows, .a_transposed = true, .b_transposed = true});
}

static ar_status allocate(ari_gemm_list *list)
{
    ar_buf *const at[3] = {&list->a, &list->b, &list->c};
    size_t largest[3] = {0};
    for (size_t i = 0; i < list->n; i++) {
        const ari_gemm_shape *s = &list->shape[i];
        const size_t extents[3][2] = {{s->m, s->k}, {s->n, s->k}, {s->m, s->n}};
        for (size_t k = 0; k < 3; k++) {
            size_t size = 0;
            AR_TRY(ari_mul_size(&size, s->batch, extents[k][0]));
            AR_TRY(ari_mul_size(&size, size, extents[k][1]));
            largest[k] = size > largest[k] ? size : largest[k];
        }
    }
    for (size_t k = 0; k < 3; k++)
        AR_TRY(ari_bench_values(list->on, at[k], largest[k], k + 1));
    return AR_OK;
}

static void add_mlp(ari_gemm_list *list, const ar_config *c, size_t tokens, size_t ffn, bool transposed)
{
    add_linear(list, tokens, c->hidden, ffn, c->gated ? 2 : 1, transposed);
    add_linear(list, tokens, ffn, c->hidden, 1, transposed);
}

static void add_experts(ari_gemm_list *list, const ar_config *c, size_t tokens)
{
    const ar_experts *e = &c->experts;
    add_linear(list, tokens, c->hidden, e->n, 1, false);
    if (e->shared > 0) {
        add_mlp(list, c, tokens, e->shared, false);
        add_linear(list, tokens, c->hidden, 1, 1, false);
    }
    const size_t from = list->n;
    add_mlp(list, c, (tokens * e->per_token + e->n - 1) / e->n, e->ffn, false);
    for (size_t i = from; i < list->n; i++)
        list->shape[i].times = e->n;
}

static ar_status add_block(ari_gemm_list *list, const ar_config *config, size_t batch, size_t seq)
{
    const bool fused = ari_family_of(config->arch)->transposed;
    const size_t h = config->hidden, q = config->heads * config->head_dim, kv = config->kv_heads * config->head_dim;
    size_t tokens = 0;
    AR_TRY(ari_mul_size(&tokens, batch, seq));
    if (fused) {
        add_linear(list, tokens, h, q + 2 * kv, 1, true);
    } else {
        add_linear(list, tokens, h, q, 1, false);
        add_linear(list, tokens, h, kv, 2, false);
    }
    add_attention(list, config, batch, seq);
    add_linear(list, tokens, q, h, 1, fused);
    if (ar_config_has_experts(config, 0))
        add_experts(list, config, tokens);
    else
        add_mlp(list, config, tokens, config->ffn, fused);
    return AR_OK;
}

ar_status ari_gemm_list_create(ari_gemm_list *list, ari_bench_device *on, const ar_config *config, size_t batch,
                               size_t seq)
{
    *list = (ari_gemm_list){.on = on};
    AR_TRY(add_block(list, config, batch, seq));
    return allocate(list);
}

static ar_tensor matrices(ar_buf memory, size_t batch, size_t rows, size_t cols, bool transposed)
{
    return (ar_tensor){
        .dtype = AR_F32,
        .ndim = 3,
        .shape = {batch, rows, cols},
        .stride = {(ptrdiff_t)(rows * cols), transposed ? 1 : (ptrdiff_t)cols, transposed ? (ptrdiff_t)rows : 1},
        .data = memory};
}

static ar_status run_shape(const ari_gemm_list *list, const ari_gemm_shape *s)
{
    const ar_tensor a = matrices(list->a, s->batch, s->m, s->k, s->a_transposed);
    const ar_tensor b = matrices(list->b, s->batch, s->n, s->k, s->b_transposed);
    const ar_tensor c = matrices(list->c, s->batch, s->m, s->n, false);
    return list->on->d->ops->gemm_f32(list->on->d, list->on->q, &c, &a, &b, s->add, AR_PRECISION_F32);
}

ar_status ari_gemm_list_run(const ari_gemm_list *list, double *seconds)
{
    double start = 0.0, end = 0.0;
    AR_TRY(ari_bench_clock(list->on, &start));
    for (size_t i = 0; i < list->n; i++)
        for (size_t k = 0; k < list->shape[i].times; k++)
            AR_TRY(run_shape(list, &list->shape[i]));
    AR_TRY(ari_bench_clock(list->on, &end));
    *seconds = end - start;
    return AR_OK;
}

double ari_gemm_list_operations(const ari_gemm_list *list)
{
    double sum = 0.0;
    for (size_t i = 0; i < list->n; i++) {
        const ari_gemm_shape *s = &list->shape[i];
        sum += 2.0 * (double)s->times * (double)s->batch * (double)s->m * (double)s->n * (double)s->k;
    }
    return sum;
}
