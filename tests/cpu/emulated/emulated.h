/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/device.h"
#include "ref/cpu/gemm.h"

/** The exact paths as the library has them, but for their instructions, which are emulated in plain C: every machine runs
 *  every line of them. NULL from the end of the list on. */
const ari_exact_path *test_emulated_path_at(size_t i);
/** The one of this name; NULL: it has no instructions of its own (portable). */
const ari_exact_path *test_emulated_path(const char *name);

/** Gives a CPU device this path. */
void test_take_path(ar_device *d, const ari_exact_path *path);
