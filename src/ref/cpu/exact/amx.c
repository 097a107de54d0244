/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/device.h"
#include "ref/cpu/exact/digits.h"

#if ARI_HAVE_X86_PATHS
#include <immintrin.h>
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* The ten products of digits with Intel's AMX. TDPBSSD multiplies a tile of 16 rows by 64 terms with one of 64 terms by
 * 16 columns, in which 4 terms of a column are side by side, and adds the products to 16 by 16 int32. A register tile
 * is two of them by two: of the eight tiles four are sums, two are of the left panel and two of the right. */
#define AMX __attribute__((target("amx-tile,amx-int8")))

#define TILE ((size_t)16) /* rows of a tile, and columns of int32 */
#define DEPTH ((size_t)64)
#define GROUP ((size_t)4)
#define SIDE (2 * TILE)

/* The left panels of a slice, 384*448*8 bytes, stay in the second cache level. Packing costs about as much as the
 * products of a tile, so that tiles are large. */
#define TILE_ROWS ((size_t)384)
#define TILE_COLS ((size_t)1024)
_Static_assert(ARI_DIGIT_SLICE % DEPTH == 0, "whole steps");

/* All tiles have 16 rows of 64 bytes. The layout is the processor's. */
typedef struct tile_configuration {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_configuration;

static const tile_configuration configuration = {
    .palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

AMX static void begin(void)
{
    _tile_loadconfig(&configuration);
}

AMX static void end(void)
{
    _tile_release();
}

AMX static void product(int32_t *sums, const int8_t *left, const int8_t *right, size_t terms)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (size_t k = 0; k < terms; k += DEPTH) {
        _tile_loadd(4, left, DEPTH);
        _tile_loadd(5, left + TILE * DEPTH, DEPTH);
        _tile_loadd(6, right, SIDE * GROUP);
        _tile_loadd(7, right + TILE * GROUP, SIDE * GROUP);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
        left += SIDE * DEPTH;
        right += SIDE * DEPTH;
    }
    _tile_stored(0, sums, SIDE * sizeof *sums);
    _tile_stored(1, sums + TILE, SIDE * sizeof *sums);
    _tile_stored(2, sums + TILE * SIDE, SIDE * sizeof *sums);
    _tile_stored(3, sums + TILE * SIDE + TILE, SIDE * sizeof *sums);
}

/* The processor has them, and Linux lets this process use them: their registers are large, so that a process must ask.
 * Asking again changes nothing. */
static bool is_supported(void)
{
#if defined(__x86_64__) && defined(__linux__)
    const long request_permission = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM of <asm/prctl.h>, a bit of XCR0 */
    return ari_cpu_has("amx_int8") && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}

static const ari_panel_kernel kernel = {
    ARI_DIGIT_KERNEL(SIDE, SIDE), .step = DEPTH,      .slice = ARI_DIGIT_SLICE, .left_group = DEPTH,
    .right_group = GROUP,         .product = product, .begin = begin,           .end = end};
_Static_assert(SIDE *SIDE <= ARI_DIGIT_TILE, "sums of a register tile");

static void plan_tile(ari_tile_plan *p, size_t k)
{
    ari_panels_plan(&kernel, p, k);
}

const ari_exact_path ari_exact_amx = {ARI_PANEL_PATH,
                                      .name = "amx",
                                      .needs = "AMX-INT8, or the system refuses it",
                                      .supported = is_supported,
                                      .rows = TILE_ROWS,
                                      .cols = TILE_COLS,
                                      .col_step = SIDE,
                                      .plan = plan_tile};
#endif
