/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A row of a table whose fields have names: as many of them on a line as fit. */
#define ROW(...)    \
    {               \
        __VA_ARGS__ \
    }
