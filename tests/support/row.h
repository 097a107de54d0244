/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_SUPPORT_ROW_H
#define TESTS_SUPPORT_ROW_H

/* A row of a table whose fields have names: as many of them on a line as fit. */
#define ROW(...)    \
    {               \
        __VA_ARGS__ \
    }

#endif
