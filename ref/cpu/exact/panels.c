/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/exact/panels.h"

#include <string.h>

#include "ref/core/size.h"

/* Panels of an operand's slice, block after block. */
typedef struct panels {
    char *data;
    size_t rows;  /* rows of all panels */
    size_t bytes; /* bytes of one term in a row */
} panels;

typedef struct workspace {
    int64_t *sums; /* [rows rounded up to whole register tiles, ld] */
    size_t ld;
    panels left, right;
    size_t words;
} workspace;

/* Words of panels. */
static size_t words_of(const ari_panel_kernel *kernel, const panels *p, size_t slice)
{
    const size_t terms = slice + ari_ceil_div(slice, kernel->block) * kernel->head;
    return ari_round_up8(ari_ceil_div(p->rows * terms * p->bytes, sizeof(int64_t)));
}

/* Returns the workspace for a tile of `rows` rows and `cols` columns. */
static workspace workspace_at(const ari_tile_plan *p, void *words, size_t rows, size_t cols)
{
    const ari_panel_kernel *kernel = p->kernel;
    workspace w = {.sums = words,
                   .ld = p->parts ? kernel->near_cols : ari_sums_ld(p),
                   .left = {NULL, ari_round_up(rows, kernel->rows), kernel->left_bytes},
                   .right = {NULL, ari_round_up(cols, kernel->lanes), kernel->right_bytes}};
    const size_t sum_rows = p->parts ? ari_smaller(w.left.rows, kernel->near_rows) : w.left.rows;
    const size_t sums = ari_round_up8(sum_rows * w.ld), left_words = words_of(kernel, &w.left, p->slice);
    w.words = sums + left_words + words_of(kernel, &w.right, p->slice);
    if (words) {
        w.left.data = (char *)(w.sums + sums);
        w.right.data = (char *)(w.sums + sums + left_words);
    }
    return w;
}

/* Divides K into slices of nearly equal length, because a short last slice would read and write the sums as often as a
 * long one. */
void ari_panels_plan(const ari_panel_kernel *kernel, ari_tile_plan *p, size_t k)
{
    const size_t slices = ari_ceil_div(k, kernel->slice);
    const size_t step = kernel->block < kernel->slice ? kernel->block : kernel->step;
    p->slice = slices > 0 ? ari_round_up(ari_ceil_div(k, slices), step) : 0;
    p->kernel = kernel;
    p->direct = p->direct && kernel->rounds;
    p->parts = p->direct && slices == 1;
    p->path = workspace_at(p, NULL, p->tile_rows, p->tile_cols).words;
}

/* Returns the panel that begins at row `row`, of the block of `terms` terms from term k of the slice on. */
static char *panel_at(const ari_panel_kernel *kernel, const panels *p, size_t row, size_t k, size_t terms)
{
    const size_t before = k / kernel->block * (kernel->head + kernel->block) * p->rows;
    return p->data + (before + (kernel->head + ari_round_up(terms, kernel->step)) * row) * p->bytes;
}

/* Packs every row panel of a slice, block after block. */
static void pack_panels(const ari_panel_kernel *kernel, const panels *dst, ari_panel_pack *pack, size_t rows_each,
                        const ari_panel_rows *src, size_t terms)
{
    for (size_t i = 0; i < src->rows; i += rows_each)
        for (size_t k = 0; k < terms; k += kernel->block) {
            const size_t n = ari_smaller(terms - k, kernel->block);
            const ari_panel_rows s = {ari_panel_rows_at(src, i, k), src->width, src->ld,
                                      ari_smaller(src->rows - i, rows_each)};
            pack(kernel, panel_at(kernel, dst, i, k, n), &s, n);
        }
}

static void pack_slice(const workspace *w, const ari_tile *t, size_t k, size_t terms)
{
    const ari_panel_kernel *kernel = t->plan->kernel;
    const size_t width = ari_packed_width(t->plan->narrow);
    const ari_panel_rows left = {ari_packed_at(t->a, t->matrix, t->row, k), width, t->a->ld, t->rows};
    const ari_panel_rows right = {ari_packed_at(t->b, t->matrix, t->col, k), width, t->b->ld, t->cols};
    pack_panels(kernel, &w->left, kernel->pack_left, kernel->rows, &left, terms);
    pack_panels(kernel, &w->right, kernel->pack_right, kernel->cols, &right, terms);
}

static void multiply_column(const ari_panel_kernel *kernel, ari_register_tile r, size_t tiles)
{
    if (kernel->multiply_column) {
        kernel->multiply_column(kernel, &r, tiles);
        return;
    }
    for (size_t i = 0; i < tiles; i++, r.sums += kernel->rows * r.ld) {
        kernel->multiply(kernel, &r);
        r.left_panel = (const char *)r.left_panel + (kernel->head + r.terms) * kernel->rows * kernel->left_bytes;
    }
}

/* The sums are complete with this block. */
static void round_into(ari_register_tile *r, const ari_tile *t, size_t row, size_t col)
{
    const ari_tile_result *result = &t->result;
    if (result->y)
        r->result = (ari_tile_result){result->y + row * result->ld + col, result->ld, result->row + row};
    r->scale = t->scale + col;
    r->rows = t->rows - row;
    r->inside = t->cols - col;
}

/* Multiplies the part of the tile from row i0 and column j0 on. add: its first block is added to existing sums;
 * is_last: it belongs to the last slice. */
static void multiply_part(const workspace *w, const ari_tile *t, size_t i0, size_t j0, size_t terms,
                          ari_register_tile r, bool is_last)
{
    const ari_panel_kernel *kernel = t->plan->kernel;
    const size_t rows = ari_smaller(t->rows, i0 + kernel->near_rows),
                 cols = ari_smaller(t->cols, j0 + kernel->near_cols);
    for (size_t k = 0; k < terms; k += kernel->block, r.add = true) {
        const size_t n = ari_smaller(terms - k, kernel->block);
        r.terms = ari_round_up(n, kernel->step);
        r.used = n;
        r.left_panel = panel_at(kernel, &w->left, i0, k, n);
        for (size_t j = j0; j < cols; j += kernel->cols) {
            r.right_panel = panel_at(kernel, &w->right, j, k, n);
            r.cols = ari_smaller(w->right.rows - j, kernel->cols);
            r.sums = w->sums + (t->plan->parts ? j - j0 : i0 * r.ld + j);
            if (is_last && k + kernel->block >= terms)
                round_into(&r, t, i0, j);
            multiply_column(kernel, r, (rows - i0 + kernel->rows - 1) / kernel->rows);
        }
    }
}

void ari_panels_sum(const ari_tile *t, size_t begin, size_t end)
{
    const ari_panel_kernel *kernel = t->plan->kernel;
    const workspace w = workspace_at(t->plan, t->words, t->rows, t->cols);
    ari_register_tile r = {.blocks = (end - begin + kernel->block - 1) / kernel->block, .ld = w.ld};
    if (begin == end)
        memset(w.sums, 0, t->rows * r.ld * sizeof *w.sums);
    for (size_t k = begin; k < end; k += t->plan->slice) {
        const size_t terms = ari_smaller(end - k, t->plan->slice);
        r.add = k > begin;
        pack_slice(&w, t, k, terms);
        for (size_t i = 0; i < t->rows; i += kernel->near_rows)
            for (size_t j = 0; j < t->cols; j += kernel->near_cols)
                multiply_part(&w, t, i, j, terms, r, k + terms == end);
    }
}
