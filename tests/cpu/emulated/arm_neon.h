/* SPDX-License-Identifier: Apache-2.0 */
/* What `#include <arm_neon.h>` of ref/cpu/exact/arm.c finds in the tests' own build of it: this folder is searched before
 * the compiler's. */
#include "tests/cpu/emulated/neon.h"
