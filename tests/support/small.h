/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdlib.h>

/* Whether small models stand for the bundled ones, and fewer cases and seeds for many: under a sanitizer, where these
 * take a minute a test. */
static inline bool small_only(void)
{
    return getenv("ANYRANK_TEST_SMALL") != NULL;
}

/* How many cases, or every how many of them: under a sanitizer, in every ./test, and in ./test --extended, which runs
 * all there are. */
static inline int by_scale(int sanitized, int usual, int extended)
{
    return small_only() ? sanitized : getenv("ANYRANK_TEST_EXTENDED") != NULL ? extended : usual;
}
