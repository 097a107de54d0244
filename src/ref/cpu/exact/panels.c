/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/exact/panels.h"

#include <string.h>

#define WORD sizeof(int64_t)

static size_t round_up(size_t n, size_t step)
{
    return (n + step - 1) / step * step;
}

typedef struct workspace {
    int64_t *sums; /* [rows to whole register tiles, sums_ld] */
    char *left;    /* panels, one after the other */
    char *right;
    size_t words;
} workspace;

static workspace workspace_at(const ari_tile_plan *p, void *words)
{
    const ari_panel_kernel *kernel = p->kernel;
    const size_t rows = round_up(p->tile_rows, kernel->rows), cols = round_up(p->tile_cols, kernel->cols);
    const size_t sums = rows * ari_sums_ld(p);
    const size_t left = ari_round_up8(rows / kernel->rows * kernel->left * p->slice / WORD);
    const size_t right = ari_round_up8(cols / kernel->cols * kernel->right * p->slice / WORD);
    workspace w = {.sums = words, .words = sums + left + right};
    if (words) {
        w.left = (char *)(w.sums + sums);
        w.right = (char *)(w.sums + sums + left);
    }
    return w;
}

/* Slices of nearly equal length: a short last one would cost as many reads and writes of the sums as a long one. */
void ari_panels_plan(const ari_panel_kernel *kernel, ari_tile_plan *p, size_t k)
{
    const size_t slices = (k + kernel->slice - 1) / kernel->slice;
    p->slice = slices > 0 ? round_up((k + slices - 1) / slices, kernel->step) : 0;
    p->kernel = kernel;
    p->path = ari_round_up8(workspace_at(p, NULL).words);
}

static ari_panel_rows rows_of(const ar_packed *p, size_t at, size_t row, size_t rows, size_t most, size_t k)
{
    return (ari_panel_rows){ari_packed_at(p, at, row, k), p->ld, rows < most ? rows : most};
}

static void pack_slice(const workspace *w, const ari_tile *t, size_t k, size_t terms)
{
    const ari_panel_kernel *kernel = t->plan->kernel;
    const size_t whole = round_up(terms, kernel->step);
    for (size_t i = 0; i < t->rows; i += kernel->rows) {
        const ari_panel_rows s = rows_of(t->a, t->at, t->row + i, t->rows - i, kernel->rows, k);
        kernel->pack_left(kernel, w->left + i / kernel->rows * kernel->left * whole, &s, terms);
    }
    for (size_t j = 0; j < t->cols; j += kernel->cols) {
        const ari_panel_rows s = rows_of(t->b, t->at, t->col + j, t->cols - j, kernel->cols, k);
        kernel->pack_right(kernel, w->right + j / kernel->cols * kernel->right * whole, &s, terms);
    }
}

static void multiply_slice(const workspace *w, const ari_tile *t, size_t terms, bool add)
{
    const ari_panel_kernel *kernel = t->plan->kernel;
    const size_t whole = round_up(terms, kernel->step);
    for (size_t j = 0; j < t->cols; j += kernel->cols)
        for (size_t i = 0; i < t->rows; i += kernel->rows) {
            const ari_register_tile r = {.left = w->left + i / kernel->rows * kernel->left * whole,
                                         .right = w->right + j / kernel->cols * kernel->right * whole,
                                         .terms = whole,
                                         .sums = w->sums + i * ari_sums_ld(t->plan) + j,
                                         .ld = ari_sums_ld(t->plan),
                                         .add = add};
            kernel->multiply(kernel, &r);
        }
}

void ari_panels_sum(const ari_tile *t, size_t from, size_t to)
{
    const workspace w = workspace_at(t->plan, t->words);
    if (from == to)
        memset(w.sums, 0, t->rows * ari_sums_ld(t->plan) * sizeof *w.sums);
    for (size_t k = from; k < to; k += t->plan->slice) {
        const size_t terms = to - k < t->plan->slice ? to - k : t->plan->slice;
        pack_slice(&w, t, k, terms);
        multiply_slice(&w, t, terms, k > from);
    }
}
