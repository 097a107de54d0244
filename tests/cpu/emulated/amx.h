/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/float_bits.h"

/* The tile instructions of ref/cpu/exact/amx.c in plain C, written from the pseudocode of Intel's Architecture
 * Instruction Set Extensions Programming Reference and under the names of its Intrinsics Guide: tests run that file by
 * them on any processor. What the processor refuses (#GP, #UD) ends the program. */

/* A thread's tiles and their shapes. */
typedef struct emulated_tiles {
    int configured;
    uint16_t row_bytes[8];
    uint8_t rows[8];
    uint8_t byte[8][16][64];
} emulated_tiles;

static _Thread_local emulated_tiles emulated;

static inline void emulated_require(int condition)
{
    if (!condition)
        abort();
}

/* LDTILECFG, palette 1: byte 0 is the palette, byte 1 the row to resume at, bytes 16 to 47 are row lengths of 16 bits,
 * bytes 48 to 63 numbers of rows, both of 8 tiles and 0 for those that are not there. Tiles become zero. Stricter than the
 * processor: whoever had tiles has released them, since a thread that keeps them takes longer to switch. */
static inline void _tile_loadconfig(const void *from)
{
    const uint8_t *bytes = from;
    emulated_require(!emulated.configured);
    memset(&emulated, 0, sizeof emulated);
    emulated_require(bytes[0] == 1 && bytes[1] == 0);
    for (size_t i = 2; i < 16; i++)
        emulated_require(bytes[i] == 0);
    for (size_t tile = 0; tile < 16; tile++) {
        const unsigned int length = bytes[16 + 2 * tile] + 256u * bytes[17 + 2 * tile], rows = bytes[48 + tile];
        emulated_require(tile < 8 ? length <= 64 && rows <= 16 && (length == 0) == (rows == 0)
                                  : length == 0 && rows == 0);
        if (tile < 8) {
            emulated.row_bytes[tile] = (uint16_t)length;
            emulated.rows[tile] = (uint8_t)rows;
        }
    }
    emulated.configured = 1;
}

static inline void _tile_release(void)
{
    memset(&emulated, 0, sizeof emulated);
}

static inline void emulated_require_tile(int tile)
{
    emulated_require(emulated.configured && tile >= 0 && tile < 8 && emulated.rows[tile] > 0);
}

static inline void _tile_zero(int tile)
{
    emulated_require_tile(tile);
    memset(emulated.byte[tile], 0, sizeof emulated.byte[tile]);
}

/* What a row or tile has beyond its shape becomes zero. */
static inline void _tile_loadd(int tile, const void *from, size_t stride)
{
    _tile_zero(tile);
    for (size_t row = 0; row < emulated.rows[tile]; row++)
        memcpy(emulated.byte[tile][row], (const char *)from + row * stride, emulated.row_bytes[tile]);
}

static inline void _tile_stored(int tile, void *to, size_t stride)
{
    emulated_require_tile(tile);
    for (size_t row = 0; row < emulated.rows[tile]; row++)
        memcpy((char *)to + row * stride, emulated.byte[tile][row], emulated.row_bytes[tile]);
}

/* sums[m][n] += over k, the 4 products of bytes 4k to 4k + 3 of row m of a with bytes 4n to 4n + 3 of row k of b, modulo
 * 2^32, for all 16 rows, columns and k: a tile is zero beyond its shape. */
ARI_SIMD static void emulated_dot_tile(uint32_t sums[16][16], int8_t a[16][64], int8_t b[16][64])
{
    for (size_t k = 0; k < 16; k++) {
        int32_t wide[4][16];
        for (size_t n = 0; n < 16; n++)
            for (size_t i = 0; i < 4; i++)
                wide[i][n] = b[k][4 * n + i];
        for (size_t m = 0; m < 16; m++) {
            const int32_t a0 = a[m][4 * k], a1 = a[m][4 * k + 1], a2 = a[m][4 * k + 2], a3 = a[m][4 * k + 3];
            if ((a0 | a1 | a2 | a3) == 0)
                continue; /* tests have few rows: most are padding */
            for (size_t n = 0; n < 16; n++)
                sums[m][n] += (uint32_t)(a0 * wide[0][n] + a1 * wide[1][n] + a2 * wide[2][n] + a3 * wide[3][n]);
        }
    }
}

/* TDPBSSD: sum.row[m].dword[n] += over k, the 4 products of a.row[m].dword[k]'s int8 with b.row[k].dword[n]'s. */
static inline void _tile_dpbssd(int sum, int a, int b)
{
    emulated_require_tile(sum);
    emulated_require_tile(a);
    emulated_require_tile(b);
    emulated_require(sum != a && sum != b && a != b && emulated.rows[sum] == emulated.rows[a] &&
                     emulated.row_bytes[sum] == emulated.row_bytes[b] &&
                     emulated.row_bytes[a] == 4 * emulated.rows[b] && emulated.row_bytes[sum] % 4 == 0);
    uint32_t sums[16][16];
    int8_t left[16][64], right[16][64];
    memcpy(sums, emulated.byte[sum], sizeof sums);
    memcpy(left, emulated.byte[a], sizeof left);
    memcpy(right, emulated.byte[b], sizeof right);
    emulated_dot_tile(sums, left, right);
    memcpy(emulated.byte[sum], sums, sizeof sums);
}
