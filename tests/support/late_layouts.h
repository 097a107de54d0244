/* SPDX-License-Identifier: Apache-2.0 */
/* Training on the emulated device with late streams, under every kind of layout: what is enqueued on streams that wait
 * for each other, by all that makes them wait. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/** Two AdamW steps of each kind under each seed, late for odd ones, else latest. Prints what differs, and the counts.
 *  The number of runs whose weights or loss are not those of one rank on the CPU; in native
 *  numerics, of streams that are not late. */
size_t late_layouts_run(uint64_t first, uint64_t seeds);
/** A check of three layouts under a seed, which compares every tensor with the baseline: it waits far more often, and
 *  elsewhere. Prints what differs. The number of layouts that do. */
size_t late_layouts_check(uint64_t seed);
