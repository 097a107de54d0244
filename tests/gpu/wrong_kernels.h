/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Kernels and products with one fault each, which the emulated device is to find, and their like without it. */
#include "anyrank/device.h"

AR_BEGIN_DECLS

typedef struct wrong_kernel {
    const char *name;
    bool races;                                            /* two of its threads meet in one word */
    ar_status (*run)(ar_device *d, ar_queue *q, ar_buf x); /* x: WRONG_WORDS int64 */
} wrong_kernel;
enum { WRONG_WORDS = 4096 };
const wrong_kernel *wrong_kernels(size_t *count);

typedef struct wrong_product {
    const char *name;
    ar_status expected;
    const char *says; /* a part of the message; "" of AR_OK */
    size_t m, n, k, batch;
    size_t ld_a, ld_b, ld_c, step_a, first; /* first: bytes from the operands' memory to a */
    int value;                              /* of all operands */
} wrong_product;
const wrong_product *wrong_products(size_t *count);
ar_status wrong_product_run(const wrong_product *p, ar_device *d, ar_queue *q, ar_buf operands, ar_buf result);

AR_END_DECLS
