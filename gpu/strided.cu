/* SPDX-License-Identifier: Apache-2.0 */
/* Copies between views of any strides, and selections of rows. They copy bits. */
#include "gpu/kernels.h"

namespace ARI_GPU
{

/* Stores x in *dst: the same bits, or the same value in another type. */
template <class T> ARI_ON_GPU void store_value(T *dst, T x)
{
    *dst = x;
}
ARI_ON_GPU inline void store_value(bf16 *dst, float x)
{
    store(dst, x);
}
ARI_ON_GPU inline void store_value(float *dst, bf16 x)
{
    *dst = load(x);
}

/* Returns the dimension with the closest elements: the smallest non-zero stride among dimensions of more than one
 * element; -1: none. */
template <class T> int densest(const view<T> &v)
{
    int dimension = -1;
    for (int k = AR_MAX_DIMS - 1; k >= 0; k--) {
        const ptrdiff_t s = v.stride[k] < 0 ? -v.stride[k] : v.stride[k];
        const ptrdiff_t min_stride = dimension < 0             ? 0
                                     : v.stride[dimension] < 0 ? -v.stride[dimension]
                                                               : v.stride[dimension];
        if (v.shape[k] > 1 && s != 0 && (dimension < 0 || s < min_stride))
            dimension = k;
    }
    return dimension;
}

template <class T> void swap_dimensions(view<T> *v, int a, int b)
{
    const view<T> original = *v;
    v->shape[a] = original.shape[b];
    v->stride[a] = original.stride[b];
    v->divisor[a] = original.divisor[b];
    v->shape[b] = original.shape[a];
    v->stride[b] = original.stride[a];
    v->divisor[b] = original.divisor[a];
}

/* Copies where the source is dense along another dimension (2) than the destination (3). A block moves a square tile
 * through shared memory, reading and writing whole lines. The tile's rows are one longer than the square, so that its
 * columns fall into different banks too. */
template <class T, class F>
ar_status copy_tiles(ar_device *d, ar_queue *q, const view<T> &dst_view, const view<const F> &src_view)
{
    constexpr size_t side = 32;
    const size_t down = ceil_div(dst_view.shape[2], side), across = ceil_div(dst_view.shape[3], side);
    const ari_divisor by_down = ari_divisor_of(down), by_across = ari_divisor_of(across);
    return launch_blocks(d, q, dst_view.matrices() * down * across, side * side, [=] ARI_ON_GPU(const block &b) {
        ARI_SHARED(F, tile, [side][side + 1]);
        size_t tile_column = b.index, line = ari_divide(&by_across, &tile_column);
        const size_t matrix = ari_divide(&by_down, &line), row = line * side, col = tile_column * side;
        const size_t rows = dst_view.shape[2] - row, cols = dst_view.shape[3] - col;
        const F *tile_src = src_view.matrix(matrix) + static_cast<ptrdiff_t>(row) * src_view.stride[2] +
                            static_cast<ptrdiff_t>(col) * src_view.stride[3];
        T *out = dst_view.matrix(matrix) + static_cast<ptrdiff_t>(row) * dst_view.stride[2] +
                 static_cast<ptrdiff_t>(col) * dst_view.stride[3];
        b.each(side * side, [&](size_t i) {
            const size_t c = i / side, r = i % side;
            if (r < rows && c < cols)
                tile[r][c] = tile_src[static_cast<ptrdiff_t>(r) * src_view.stride[2] +
                                      static_cast<ptrdiff_t>(c) * src_view.stride[3]];
        });
        b.each(side * side, [&](size_t i) {
            const size_t r = i / side, c = i % side;
            if (r < rows && c < cols)
                store_value(out + static_cast<ptrdiff_t>(r) * dst_view.stride[2] +
                                static_cast<ptrdiff_t>(c) * dst_view.stride[3],
                            tile[r][c]);
        });
    });
}

template <class T, class F>
ar_status copy_elements(ar_device *d, ar_queue *q, const ar_tensor *dst, const ar_tensor *src)
{
    const size_t worth = 8; /* a shorter side leaves most of a tile's lines empty */
    view<T> dst_view = view_of<T>(dst);
    view<const F> src_view = view_of<const F>(src);
    const int dst_dim = densest(dst_view);
    if (dst_dim >= 0) {
        swap_dimensions(&dst_view, dst_dim, 3);
        swap_dimensions(&src_view, dst_dim, 3);
    }
    const int src_dim = densest(src_view);
    if (src_dim < 0 || src_dim == 3 || dst_view.shape[src_dim] < worth || dst_view.shape[3] < worth)
        return launch_each(d, q, dst_view.count(), [=] ARI_ON_GPU(size_t i) {
            const place p = dst_view.unravel(i); /* neighbours of a row of the destination by neighbouring threads */
            store_value(dst_view.locate(p), *src_view.locate(p));
        });
    swap_dimensions(&dst_view, src_dim, 2);
    swap_dimensions(&src_view, src_dim, 2);
    return copy_tiles(d, q, dst_view, src_view);
}

ar_status copy_strided(ar_device *d, ar_queue *q, const ar_tensor *dst, const ar_tensor *src)
{
    const size_t width = ar_dtype_bytes(dst->dtype);
    if (dst->dtype == AR_BF16 && src->dtype == AR_F32)
        return copy_elements<bf16, float>(d, q, dst, src);
    if (dst->dtype == AR_F32 && src->dtype == AR_BF16)
        return copy_elements<float, bf16>(d, q, dst, src);
    switch (width == ar_dtype_bytes(src->dtype) ? width : 0) {
    case 1:
        return copy_elements<uint8_t, uint8_t>(d, q, dst, src);
    case 2:
        return copy_elements<uint16_t, uint16_t>(d, q, dst, src);
    case 4:
        return copy_elements<uint32_t, uint32_t>(d, q, dst, src);
    case 8:
        return copy_elements<uint64_t, uint64_t>(d, q, dst, src);
    default:
        return ar_error_set(AR_ERR_DTYPE,
                            "copy_strided: %s from %s, expected one dtype of whole bytes, or F32 and BF16",
                            ar_dtype_name(dst->dtype), ar_dtype_name(src->dtype));
    }
}

/* --- rows --------------------------------------------------------------------------------------------------------- */

ar_status rows_in_range(ar_device *d, ar_queue *q, ar_buf row_of, ar_cbuf ids, size_t n, int64_t start, int64_t count)
{
    const uint64_t first_row = static_cast<uint64_t>(start), rows = static_cast<uint64_t>(count);
    return launch_each(d, q, n, [=, row_of = dev<int64_t>(row_of), ids = dev<int64_t>(ids)] ARI_ON_GPU(size_t i) {
        /* in uint64_t no difference overflows, and an id below start becomes larger than any count */
        const uint64_t row = static_cast<uint64_t>(ids[i]) - first_row;
        row_of[i] = row < rows ? static_cast<int64_t>(row) : -1;
    });
}

} // namespace ARI_GPU
