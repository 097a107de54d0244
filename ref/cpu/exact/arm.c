/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/device.h"
#include "ref/cpu/exact/digits.h"

#if ARI_HAVE_ARM_PATHS
#include <arm_neon.h>

/* The exact paths of ARM64. A register tile is 8 rows by 12 columns, or as many as 32 registers hold with the
 * operands. */
/* The left panels of a slice, 256*320*8 bytes, stay in the second cache level while the right panels stream past them.
 * Each right panel, 30 KiB, stays in the first level. */
#define TILE_ROWS ((size_t)256)
#define TILE_COLS ((size_t)768)
#define SLICE ((size_t)320)
_Static_assert(SLICE <= ARI_DIGIT_SLICE && SLICE % ARI_DIGIT_CHUNK == 0, "a slice of digits");

/* The common part of the three paths. */
#define PATH_BY_PANELS ARI_PANEL_PATH, .rows = TILE_ROWS, .cols = TILE_COLS

/* --- digits: smmla, sdot ------------------------------------------------------------------------------------------ */

#define ROWS ((size_t)8)

/* Kernels for wide integers and for narrow integers. */
#define KERNEL(...)                                                                       \
    {                                                                                     \
        ARI_DIGIT_KERNEL(ROWS, __VA_ARGS__), ARI_PANEL_BLOCK(SLICE, TILE_ROWS, TILE_COLS) \
    }
#define KERNELS(cols, group, product)                                                                         \
    {                                                                                                         \
        KERNEL(cols, group, ARI_DIGIT_PLANES, product), KERNEL(cols, group, ARI_DIGIT_PLANES_NARROW, product) \
    }

/* SMMLA multiplies 2 rows of 8 terms by 2 rows of 8 and adds the 2x2 sums. */
#define SMMLA_COLS ((size_t)8)
#define SMMLA_GROUP ((size_t)8)

__attribute__((target("arch=armv8.2-a+i8mm"))) static void product_smmla(int32_t *sums, const int8_t *left,
                                                                         const int8_t *right, size_t terms)
{
    int32x4_t acc[ROWS / 2][SMMLA_COLS / 2];
#pragma GCC unroll 4
    for (size_t i = 0; i < ROWS / 2; i++)
#pragma GCC unroll 4
        for (size_t j = 0; j < SMMLA_COLS / 2; j++)
            acc[i][j] = vdupq_n_s32(0);
    for (size_t k = 0; k < terms; k += SMMLA_GROUP) {
        int8x16_t a[ROWS / 2], b[SMMLA_COLS / 2];
        for (size_t i = 0; i < ROWS / 2; i++)
            a[i] = vld1q_s8(left + i * 2 * SMMLA_GROUP);
        for (size_t j = 0; j < SMMLA_COLS / 2; j++)
            b[j] = vld1q_s8(right + j * 2 * SMMLA_GROUP);
        for (size_t i = 0; i < ROWS / 2; i++)
            for (size_t j = 0; j < SMMLA_COLS / 2; j++)
                acc[i][j] = vmmlaq_s32(acc[i][j], a[i], b[j]);
        left += ROWS * SMMLA_GROUP;
        right += SMMLA_COLS * SMMLA_GROUP;
    }
#pragma GCC unroll 4
    for (size_t i = 0; i < ROWS / 2; i++)
#pragma GCC unroll 4
        for (size_t j = 0; j < SMMLA_COLS / 2; j++) {
            vst1_s32(sums + 2 * i * SMMLA_COLS + 2 * j, vget_low_s32(acc[i][j]));
            vst1_s32(sums + (2 * i + 1) * SMMLA_COLS + 2 * j, vget_high_s32(acc[i][j]));
        }
}

static const ari_panel_kernel kernel_smmla[] = KERNELS(SMMLA_COLS, SMMLA_GROUP, product_smmla);

static bool supported_smmla(void)
{
    return ari_cpu_has("i8mm");
}

static void plan_smmla(ari_tile_plan *p, size_t k)
{
    ari_panels_plan(&kernel_smmla[p->narrow], p, k);
}

const ari_exact_path ari_exact_smmla = {
    PATH_BY_PANELS,         .name = "smmla",   .requirement = "SMMLA (I8MM)", .supported = supported_smmla,
    .col_step = SMMLA_COLS, .plan = plan_smmla};

/* SDOT multiplies the 4 terms of each of 4 columns by the 4 of one row and adds the 4 sums. */
#define SDOT_COLS ((size_t)12)
#define SDOT_GROUP ((size_t)4)
#define SDOT_ROW(half, lane)                   \
    for (size_t j = 0; j < SDOT_COLS / 4; j++) \
    acc[4 * (half) + (lane)][j] = vdotq_laneq_s32(acc[4 * (half) + (lane)][j], b[j], a[half], lane)

__attribute__((target("arch=armv8.2-a+dotprod"))) static void product_sdot(int32_t *sums, const int8_t *left,
                                                                           const int8_t *right, size_t terms)
{
    int32x4_t acc[ROWS][SDOT_COLS / 4];
#pragma GCC unroll 8
    for (size_t i = 0; i < ROWS; i++)
#pragma GCC unroll 3
        for (size_t j = 0; j < SDOT_COLS / 4; j++)
            acc[i][j] = vdupq_n_s32(0);
    for (size_t k = 0; k < terms; k += SDOT_GROUP) {
        int8x16_t a[ROWS / 4], b[SDOT_COLS / 4];
        for (size_t i = 0; i < ROWS / 4; i++)
            a[i] = vld1q_s8(left + i * 4 * SDOT_GROUP);
        for (size_t j = 0; j < SDOT_COLS / 4; j++)
            b[j] = vld1q_s8(right + j * 4 * SDOT_GROUP);
        for (size_t half = 0; half < ROWS / 4; half++) {
            SDOT_ROW(half, 0);
            SDOT_ROW(half, 1);
            SDOT_ROW(half, 2);
            SDOT_ROW(half, 3);
        }
        left += ROWS * SDOT_GROUP;
        right += SDOT_COLS * SDOT_GROUP;
    }
#pragma GCC unroll 8
    for (size_t i = 0; i < ROWS; i++)
#pragma GCC unroll 3
        for (size_t j = 0; j < SDOT_COLS / 4; j++)
            vst1q_s32(sums + i * SDOT_COLS + 4 * j, acc[i][j]);
}

static const ari_panel_kernel kernel_sdot[] = KERNELS(SDOT_COLS, SDOT_GROUP, product_sdot);

static bool supported_sdot(void)
{
    return ari_cpu_has("asimddp");
}

static void plan_sdot(ari_tile_plan *p, size_t k)
{
    ari_panels_plan(&kernel_sdot[p->narrow], p, k);
}

const ari_exact_path ari_exact_sdot = {
    PATH_BY_PANELS,        .name = "sdot",   .requirement = "SDOT (DotProd)", .supported = supported_sdot,
    .col_step = SDOT_COLS, .plan = plan_sdot};

/* --- plain NEON --------------------------------------------------------------------------------------------------- */

/* SMLAL multiplies 2 int32 by one int32 and adds the products to 2 int64. It multiplies the integers themselves, half
 * as many terms as an instruction of `sgemm` (FMLA: 4), without digits and without folding. All alternatives cost more
 * instructions, counted in FMLAs of the same product: int8 digits with SMULL and SADALP take 16.6 for ten products (for
 * sums of two digits, int16 holds only a single product); three products of two 13-bit digits in int16 with SMLAL take
 * 3.0 plus folding; binary64 takes 4.0. Narrow integers gain nothing either: int32 holds 256 terms only if one factor
 * has 8 bits, and two such products take 2.0. */
#define NEON_ROWS ((size_t)4)
#define NEON_COLS ((size_t)12)

static inline int32_t integer_at(const ari_panel_rows *s, size_t row, size_t k)
{
    const void *q = ari_panel_rows_at(s, row, k);
    return s->width == sizeof(int16_t) ? *(const int16_t *)q : *(const int32_t *)q;
}

static inline void pack_words(int32_t *panel, const ari_panel_rows *s, size_t terms, const size_t rows)
{
    for (size_t i = 0; i < rows; i++)
        for (size_t k = 0; k < terms; k++)
            panel[k * rows + i] = i < s->rows ? integer_at(s, i, k) : 0;
}

static void pack_left_neon(const ari_panel_kernel *kernel, void *panel, const ari_panel_rows *s, size_t terms)
{
    (void)kernel;
    pack_words(panel, s, terms, NEON_ROWS);
}

static void pack_right_neon(const ari_panel_kernel *kernel, void *panel, const ari_panel_rows *s, size_t terms)
{
    (void)kernel;
    pack_words(panel, s, terms, NEON_COLS);
}

#define SMLAL_ROW(acc, lane)                                                               \
    for (size_t j = 0; j < NEON_COLS / 4; j++) {                                           \
        acc[lane][2 * j] = vmlal_laneq_s32(acc[lane][2 * j], vget_low_s32(b[j]), a, lane); \
        acc[lane][2 * j + 1] = vmlal_high_laneq_s32(acc[lane][2 * j + 1], b[j], a, lane);  \
    }

static void multiply_neon(const ari_panel_kernel *kernel, const ari_register_tile *r)
{
    (void)kernel;
    int64x2_t acc[NEON_ROWS][NEON_COLS / 2];
    const int32_t *left = r->left_panel, *right = r->right_panel;
#pragma GCC unroll 4
    for (size_t i = 0; i < NEON_ROWS; i++)
#pragma GCC unroll 6
        for (size_t j = 0; j < NEON_COLS / 2; j++)
            acc[i][j] = r->add ? vld1q_s64(r->sums + i * r->ld + 2 * j) : vdupq_n_s64(0);
    for (size_t k = 0; k < r->terms; k++) {
        const int32x4_t a = vld1q_s32(left);
        int32x4_t b[NEON_COLS / 4];
        for (size_t j = 0; j < NEON_COLS / 4; j++)
            b[j] = vld1q_s32(right + 4 * j);
        SMLAL_ROW(acc, 0)
        SMLAL_ROW(acc, 1)
        SMLAL_ROW(acc, 2)
        SMLAL_ROW(acc, 3)
        left += NEON_ROWS;
        right += NEON_COLS;
    }
#pragma GCC unroll 4
    for (size_t i = 0; i < NEON_ROWS; i++)
#pragma GCC unroll 6
        for (size_t j = 0; j < NEON_COLS / 2; j++)
            vst1q_s64(r->sums + i * r->ld + 2 * j, acc[i][j]);
}

static const ari_panel_kernel kernel_neon = {.rows = NEON_ROWS,
                                             .cols = NEON_COLS,
                                             .lanes = NEON_COLS,
                                             .left_bytes = sizeof(int32_t),
                                             .right_bytes = sizeof(int32_t),
                                             .step = 1,
                                             ARI_PANEL_BLOCK(SLICE, TILE_ROWS, TILE_COLS),
                                             .pack_left = pack_left_neon,
                                             .pack_right = pack_right_neon,
                                             .multiply = multiply_neon};

static bool every_processor(void)
{
    return true;
}

static void plan_neon(ari_tile_plan *p, size_t k)
{
    ari_panels_plan(&kernel_neon, p, k);
}

const ari_exact_path ari_exact_neon = {
    PATH_BY_PANELS,        .name = "neon",   .requirement = "Advanced SIMD", .supported = every_processor,
    .col_step = NEON_COLS, .plan = plan_neon};
#endif
