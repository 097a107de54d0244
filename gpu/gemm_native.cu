/* SPDX-License-Identifier: Apache-2.0 */
/* Native contraction: a library's product of fp32, TF32 or bf16 numbers with fp32 sums. Operands that the library
 * cannot read in place are copied. */
#include "gpu/blas.h"
#include "gpu/kernels.h"
#include "ref/core/size.h"
#include "ref/core/tensor_private.h"

namespace ARI_GPU
{
namespace
{

const size_t CHUNK = 4096; /* elements of a line that a block of threads narrows */

/* Operand in the library's form: matrices with two strides, one of which a call uses. */
struct operand {
    ar_buf data;
    size_t batch[2];
    size_t ld, step[2]; /* elements */
    bool transposed;

    size_t matrix(size_t index) const
    {
        return index / batch[1] * step[0] + index % batch[1] * step[1];
    }
};

/* Returns true if rows of n elements are contiguous and `line` apart. *ld: their stride, at least n. */
bool lies_in_lines(size_t *ld, size_t lines, size_t n, ptrdiff_t line, ptrdiff_t along)
{
    if ((n > 1 && along != 1) || (lines > 1 && line < static_cast<ptrdiff_t>(n)))
        return false;
    *ld = lines > 1 ? static_cast<size_t>(line) : n;
    return true;
}

/* Returns a tensor as an operand if the library can read it in place. */
bool lies_ready(operand *o, const ar_tensor *t)
{
    const view<const float> v = view_of<const float>(t);
    o->data = t->data;
    for (int i = 0; i < 2; i++) {
        if (v.shape[i] > 1 && v.stride[i] < 0)
            return false;
        o->batch[i] = v.shape[i];
        o->step[i] = v.shape[i] > 1 ? static_cast<size_t>(v.stride[i]) : 0;
    }
    o->transposed = false;
    if (lies_in_lines(&o->ld, v.shape[2], v.shape[3], v.stride[2], v.stride[3]))
        return true;
    o->transposed = true;
    return lies_in_lines(&o->ld, v.shape[3], v.shape[2], v.stride[3], v.stride[2]);
}

/* Returns true if the matrices of a batch have a constant stride; *step: the stride. */
bool one_step(size_t *step, const operand &o)
{
    *step = o.batch[1] > 1 ? o.step[1] : o.step[0];
    return o.batch[0] == 1 || o.batch[1] == 1 || o.step[0] == o.batch[1] * o.step[1];
}

/* Memory like t's shape, contiguous, of elements of a dtype. */
ar_status take_like(scratch *memory, const ar_tensor *t, ar_dtype dtype)
{
    size_t count = ar_dtype_bytes(dtype);
    for (int i = 0; i < t->ndim; i++)
        AR_TRY(ari_mul_size(&count, count, t->shape[i]));
    return memory->allocate(count);
}

ar_status copy_of(ar_device *d, ar_queue *q, ar_tensor *out, scratch *memory, const ar_tensor *t, ar_dtype dtype,
                  bool with_values)
{
    AR_TRY(take_like(memory, t, dtype));
    AR_TRY(ar_tensor_view(out, dtype, t->ndim, t->shape, memory->buf()));
    return with_values ? copy_strided(d, q, out, t) : AR_OK;
}

/* Converts fp32 words that represent bf16 numbers to bf16, their upper halves: contiguous matrices in memory order; the
 * dimension with adjacent elements remains the last. */
ar_status narrowed(ar_device *d, ar_queue *q, operand *o, scratch *memory, const ar_tensor *t)
{
    const ar_tensor flipped = ari_tensor_transposed(t);
    const bool flip = t->stride[t->ndim - 1] != 1 && t->stride[t->ndim - 2] == 1;
    const view<const float> v = view_of<const float>(flip ? &flipped : t);
    const size_t n = v.shape[3], chunks = ceil_div(n, CHUNK);
    AR_TRY(take_like(memory, t, AR_BF16));
    const size_t matrix = v.shape[2] * n;
    *o = {memory->buf(), {v.shape[0], v.shape[1]}, n, {v.shape[1] * matrix, matrix}, flip};
    uint16_t *halves = dev<uint16_t>(memory->buf());
    return launch_blocks(d, q, v.rows() * chunks, n < CHUNK ? n : CHUNK, [=] ARI_ON_GPU(const block &b) {
        const size_t line = b.index / chunks, begin = b.index % chunks * CHUNK;
        const float *src = v.row(line);
        uint16_t *out = halves + line * n;
        b.each(n - begin < CHUNK ? n - begin : CHUNK, [&](size_t i) {
            const float x = src[static_cast<ptrdiff_t>(begin + i) * v.stride[3]];
            out[begin + i] = static_cast<uint16_t>(ari_bits32(x) >> 16);
        });
    });
}

/* Converts operand a or b to a form that the library supports. */
ar_status bring(ar_device *d, ar_queue *q, operand *o, scratch *memory, const ar_tensor *t, ar_precision operands)
{
    ar_tensor copied;
    const ar_dtype dtype = operands == AR_PRECISION_BF16 ? AR_BF16 : AR_F32;
    if (t->dtype != dtype && dtype == AR_BF16)
        return narrowed(d, q, o, memory, t);
    if (t->dtype == dtype && lies_ready(o, t))
        return AR_OK;
    AR_TRY(copy_of(d, q, &copied, memory, t, dtype, true));
    (void)lies_ready(o, &copied);
    return AR_OK;
}

/* Returns an operand's matrices from `first_matrix` on, `step` apart. */
blas_matrix matrices_of(const operand &o, size_t first_matrix, size_t step, size_t bytes)
{
    return {ar_buf_at(o.data, o.matrix(first_matrix) * bytes), o.ld, step, o.transposed};
}

/* Computes c (+)= a b^T for s.batch matrices, with as many matrices per call as are evenly spaced in every operand. */
ar_status multiply(ar_device *d, ar_queue *q, blas_shape s, const operand &c, const operand &a, const operand &b,
                   bool add, ar_precision operands, ar_dtype result)
{
    const size_t bytes = operands == AR_PRECISION_BF16 ? sizeof(uint16_t) : sizeof(float), matrices = s.batch;
    const size_t result_bytes = ar_dtype_bytes(result);
    size_t of_a = 0, of_b = 0, of_c = 0;
    const bool even = one_step(&of_a, a) && one_step(&of_b, b) && one_step(&of_c, c);
    const bool equal_batches = a.batch[1] == c.batch[1] && b.batch[1] == c.batch[1];
    if (!even) {
        of_a = a.step[1];
        of_b = b.step[1];
        of_c = c.step[1];
        s.batch = equal_batches ? c.batch[1] : 1;
    }
    for (size_t first_matrix = 0; first_matrix < matrices; first_matrix += s.batch)
        AR_TRY(blas_float(d, q, s, matrices_of(c, first_matrix, of_c, result_bytes),
                          matrices_of(a, first_matrix, of_a, bytes), matrices_of(b, first_matrix, of_b, bytes), add,
                          operands, result));
    return AR_OK;
}

/* Elements of any strides, set to zero. */
template <class T> ar_status clear(ar_device *d, ar_queue *q, const ar_tensor *c)
{
    const view<T> dst = view_of<T>(c);
    return launch_each(d, q, dst.count(), [=] ARI_ON_GPU(size_t i) { store(dst.locate(i), 0.0f); });
}

ar_status check_shapes(const view<float> &c, const view<const float> &a, const view<const float> &b)
{
    const bool fits = a.matrices() == c.matrices() && b.matrices() == c.matrices() && a.shape[2] == c.shape[2] &&
                      b.shape[2] == c.shape[3] && a.shape[3] == b.shape[3];
    if (fits)
        return AR_OK;
    return ar_error_set(AR_ERR_SHAPE, "gemm_f32: %zu x [%zu, %zu] times %zu x [%zu, %zu]^T into %zu x [%zu, %zu]",
                        a.matrices(), a.shape[2], a.shape[3], b.matrices(), b.shape[2], b.shape[3], c.matrices(),
                        c.shape[2], c.shape[3]);
}

} // namespace

ar_status gemm_f32(ar_device *d, ar_queue *q, const ar_tensor *c, const ar_tensor *a, const ar_tensor *b, bool add,
                   ar_precision operands)
{
    const view<float> result = view_of<float>(c);
    const view<const float> a_view = view_of<const float>(a);
    AR_TRY(check_shapes(result, a_view, view_of<const float>(b)));
    if (result.count() == 0)
        return AR_OK;
    if (a_view.shape[3] == 0)
        return add ? AR_OK : ARI_BY_DTYPE(c, clear)(d, q, c);
    scratch of_a(d, q), of_b(d, q), of_c(d, q);
    operand oa, ob, oc;
    ar_tensor copied;
    AR_TRY(bring(d, q, &oa, &of_a, a, operands));
    AR_TRY(bring(d, q, &ob, &of_b, b, operands));
    /* The library rounds only results of bf16 operands. */
    const ar_dtype type = c->dtype == AR_BF16 && operands == AR_PRECISION_BF16 ? AR_BF16 : AR_F32;
    const bool ready = c->dtype == type && lies_ready(&oc, c);
    if (!ready) {
        AR_TRY(copy_of(d, q, &copied, &of_c, c, type, add));
        (void)lies_ready(&oc, &copied);
    }
    blas_shape s = {result.shape[2], result.shape[3], a_view.shape[3], result.matrices()};
    if (oc.transposed) { /* c^T = b a^T */
        oc.transposed = false;
        s = {s.n, s.m, s.k, s.batch};
        AR_TRY(multiply(d, q, s, oc, ob, oa, add, operands, type));
    } else {
        AR_TRY(multiply(d, q, s, oc, oa, ob, add, operands, type));
    }
    return ready ? AR_OK : copy_strided(d, q, c, &copied);
}

} // namespace ARI_GPU
