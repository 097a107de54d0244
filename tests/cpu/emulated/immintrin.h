/* SPDX-License-Identifier: Apache-2.0 */
/* What `#include <immintrin.h>` of the library's sources finds in the tests' own build of them: this folder is searched
 * before the compiler's. */
#include "tests/cpu/emulated/amx.h"
#include "tests/cpu/emulated/avx.h"
