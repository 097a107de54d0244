/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What nearly every file of Criterion's tests includes and asks. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "anyrank/status.h"
#include "tests/support/scoped.h"

/* A call that succeeds, or says why not. */
#define cr_assert_ok(call) cr_assert_eq(call, AR_OK, "%s", ar_error_message())
#define cr_expect_ok(call) cr_expect_eq(call, AR_OK, "%s", ar_error_message())

static inline bool error_says(const char *words)
{
    return strstr(ar_error_message(), words) != NULL;
}
#define cr_assert_says(words) cr_assert(error_says(words), "'%s' is not in: %s", words, ar_error_message())
#define cr_expect_says(words) cr_expect(error_says(words), "'%s' is not in: %s", words, ar_error_message())

/* A call that fails so, with these words in its message. */
#define cr_assert_refused(call, status, words)                \
    do {                                                      \
        cr_assert_eq(call, status, "not refused: %s", words); \
        cr_assert_says(words);                                \
    } while (0)
#define cr_expect_refused(call, status, words)                \
    do {                                                      \
        cr_expect_eq(call, status, "not refused: %s", words); \
        cr_expect_says(words);                                \
    } while (0)
