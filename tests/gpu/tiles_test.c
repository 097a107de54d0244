/* SPDX-License-Identifier: Apache-2.0 */
/* How results are cut into tiles: every element in one tile, and processors kept busy. */
#include "gpu/tiles/plan.h"

#include "support/together.h"

/* As gpu/cuda/blas.cu would describe one H200, whose cache has 50 MiB, and one A100 (40 MiB). */
static const ari_tile_machine h200 = {132, 128, 256, (size_t)75 << 19, (size_t)384 << 20};
static const ari_tile_machine a100 = {108, 128, 256, (size_t)30 << 20, (size_t)384 << 20};

/* Products of the blocks that are measured, h 4096 and ffn 11008, batch 2 x seq 1024: forward and dX over all tokens,
 * dW over those of a sample. */
typedef struct shape {
    const char *name;
    size_t batch, m, n, k;
} shape;
static const shape shapes[] = {{"4096 cubed", 1, 4096, 4096, 4096}, {"qkv", 1, 2048, 12288, 4096},
                               {"o", 1, 2048, 4096, 4096},          {"gate and up", 1, 2048, 22016, 4096},
                               {"gate", 1, 2048, 11008, 4096},      {"down", 1, 2048, 4096, 11008},
                               {"dX qkv", 1, 2048, 4096, 12288},    {"dX gate and up", 1, 2048, 4096, 22016},
                               {"dX down", 1, 2048, 11008, 4096},   {"dW qkv", 2, 12288, 4096, 1024},
                               {"dW o", 2, 4096, 4096, 1024},       {"dW gate", 2, 11008, 4096, 1024},
                               {"dW down", 2, 4096, 11008, 1024},   {"dW down, batch 8", 8, 4096, 11008, 1024},
                               {"LM head", 1, 2048, 128256, 4096},  {"scores", 64, 1024, 1024, 128},
                               {"P V", 64, 1024, 128, 1024},        {"small", 1, 64, 288, 288}};
#define SHAPES (sizeof shapes / sizeof *shapes)

static ari_tile_work work_of(const shape *s)
{
    const bool ten = s->k >= 512;
    return (ari_tile_work){.batch = s->batch,
                           .m = s->m,
                           .n = s->n,
                           .terms = s->k,
                           .blocks = 1,
                           .planes = ten ? 10 : 7,
                           .runs = ten ? 10 : 16,
                           .is_uniform = ten,
                           .one_result = strncmp(s->name, "dW", 2) == 0};
}

/* Tiles of whole rows, as many as fit the planes: what there was before. */
static ari_tiling whole_rows(const ari_tile_work *w, const ari_tile_machine *m)
{
    const size_t row = w->planes * w->n * 4, most = m->plane_bytes / row, down = (w->m + most - 1) / most;
    const size_t even = (w->m + down - 1) / down, whole = (even + 127) / 128 * 128;
    const size_t fit = m->plane_bytes / (row * w->m);
    if (fit > 0)
        return (ari_tiling){.matrices = fit < w->batch ? fit : w->batch, .rows = w->m, .cols = w->n};
    return (ari_tiling){.matrices = 1, .rows = whole <= most ? whole : even, .cols = w->n};
}

/* The fall that this is for: 410 rows of 22,016 columns keep two processors of three busy. Prints all of them. */
CLAIM(keeps_processors_busy)
{
    printf("%-18s %31s %31s\n", "", "tiles of whole rows, share", "tiles by waves, share, planes");
    for (size_t i = 0; i < SHAPES; i++) {
        const ari_tile_work w = work_of(&shapes[i]);
        const ari_tiling before = whole_rows(&w, &h200), t = ari_plan_tiles(&w, &h200);
        const double old = ari_tiling_share(&w, &h200, &before), share = ari_tiling_share(&w, &h200, &t);
        printf("%-18s %2zu x %5zu x %6zu  %.2f %2zu x %5zu x %6zu  %.2f  %3zu MiB%s\n", shapes[i].name, before.matrices,
               before.rows, before.cols, old, t.matrices, t.rows, t.cols, share,
               t.matrices * t.rows * t.cols * 4 * w.planes >> 20, t.together ? ", one call" : "");
        cr_assert(w.m < 128 || share > 0.85, "%s: %.2f", shapes[i].name, share);
        cr_assert(!w.one_result || t.matrices == w.batch, "%s: %zu samples of %zu", shapes[i].name, t.matrices,
                  w.batch);
        cr_assert(share > old - 0.1, "%s: %.2f, was %.2f", shapes[i].name, share, old);
    }
}

/* Whole matrices, or sides of whole parts; planes that fit. */
static void check_tiling(const ari_tile_work *w, const ari_tile_machine *m)
{
    const ari_tiling t = ari_plan_tiles(w, m);
    const size_t bytes = t.matrices * t.rows * t.cols * w->planes * w->blocks * 4;
    const bool one_part = t.matrices == 1 && t.rows <= m->part_rows && t.cols <= m->part_cols;
    cr_assert(t.matrices >= 1 && t.matrices <= w->batch, "%zu of %zu matrices", t.matrices, w->batch);
    cr_assert(t.rows >= 1 && (t.rows == w->m || (t.rows < w->m && t.rows % m->part_rows == 0)), "%zu of %zu rows",
              t.rows, w->m);
    cr_assert(t.cols >= 1 && (t.cols == w->n || (t.cols < w->n && t.cols % m->part_cols == 0)), "%zu of %zu columns",
              t.cols, w->n);
    cr_assert(bytes <= m->plane_bytes || one_part, "[%zu, %zu, %zu]: planes of %zu bytes", w->batch, w->m, w->n, bytes);
    cr_assert(w->is_uniform || !t.together);
}

CLAIM(fits_every_result)
{
    static const size_t sides[] = {1, 4, 100, 128, 132, 1000, 4096, 30000, 300000}, batches[] = {1, 2, 3, 40, 1000};
    static const ari_tile_machine host = {4, 32, 32, 1 << 20, 1 << 20};
    const ari_tile_machine *const machines[] = {&h200, &a100, &host};
    for (size_t i = 0; i < 9 * 9 * 5 * 3; i++) {
        const size_t terms = i % 4 == 0 ? 0 : i % 4 == 1 ? 16 : i % 4 == 2 ? 4096 : 131056;
        ari_tile_work w = {.batch = batches[i / 81 % 5], .m = sides[i / 9 % 9], .n = sides[i % 9]};
        w.terms = terms;
        w.blocks = terms == 0 ? 0 : 1 + i % 3;
        w.planes = i % 2 ? 10 : 7;
        w.runs = i % 2 ? 10 : 16;
        w.is_uniform = i % 2;
        w.one_result = i % 5 == 0;
        check_tiling(&w, machines[i / 405]);
    }
}

/* A part's planes alone are too large: terms in many blocks. */
CLAIM(has_a_tile_for_a_part_that_does_not_fit)
{
    const ari_tile_work w = {.batch = 2, .m = 500, .n = 600, .terms = 131056, .blocks = 1000, .planes = 7, .runs = 16};
    const ari_tiling t = ari_plan_tiles(&w, &h200);
    cr_assert(t.matrices == 1 && t.rows == 128 && t.cols == 256);
}

#define ROWS 1024

static size_t area_of(const ari_tile_work *w, const ar_band *band)
{
    size_t area = 0, row = 0;
    for (ari_tile_part p = {0}; ari_band_next(&p, w, &h200, band); row = p.row + p.rows) {
        cr_assert(p.row >= row && p.row + p.rows <= w->m && p.col + p.cols <= w->n && p.term + p.terms <= w->terms);
        cr_assert(p.col % 16 == 0 && p.cols % 4 == 0 && p.term % 16 == 0 && p.terms % 16 == 0);
        for (size_t i = p.row; i < p.row + p.rows && band && (w->is_uniform || !band->of_terms); i++) {
            const int32_t *edges = band->edges + 2 * (i % band->rows);
            const size_t first = band->of_terms ? p.term : p.col, n = band->of_terms ? p.terms : p.cols;
            cr_assert((size_t)edges[0] >= first && (size_t)edges[1] <= first + n, "row %zu", i);
        }
        area += p.rows * p.cols * p.terms / 16;
    }
    return area;
}

CLAIM(leaves_out_what_is_beside_a_band)
{
    static int32_t causal[ROWS][2], window[ROWS][2], all[ROWS][2];
    ari_tile_work w = {.batch = 64, .m = ROWS, .n = ROWS, .terms = 128, .blocks = 1, .planes = 7, .runs = 16};
    const size_t whole = ROWS * ROWS * 8;
    for (int32_t i = 0; i < ROWS; i++) {
        causal[i][1] = window[i][1] = i + 1;
        window[i][0] = i < 99 ? 0 : i - 99;
        all[i][1] = ROWS;
    }
    cr_expect_eq(area_of(&w, NULL), whole);
    cr_expect_eq(area_of(&w, &(ar_band){all[0], ROWS, false}), whole);
    cr_expect_eq(area_of(&w, &(ar_band){causal[0], ROWS, false}), whole / 8 * 5);
    cr_expect_lt(area_of(&w, &(ar_band){window[0], ROWS, false}), whole / 8 * 3);
    cr_expect_eq(area_of(&w, &(ar_band){causal[0], ROWS, true}), whole, "windows of several runs have all terms");
    w.m = 3 * ROWS; /* three heads */
    cr_expect_eq(area_of(&w, &(ar_band){causal[0], ROWS, false}), 3 * (whole / 8 * 5));
    w = (ari_tile_work){.batch = 64, .m = ROWS, .n = 128, .terms = ROWS, .blocks = 1, .planes = 10, .runs = 10};
    w.is_uniform = true;
    cr_expect_eq(area_of(&w, &(ar_band){causal[0], ROWS, true}), whole / 8 * 5);
}

EVERY_CLAIM(tiles)
