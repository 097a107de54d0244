/* SPDX-License-Identifier: Apache-2.0 */
/* Libraries that are loaded when they are needed. */
#include "gpu/library.h"

#include <criterion/criterion.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

static const char *const nowhere = "libanyrank-is-not-here.so.7";

Test(library, loads_the_first_that_there_is)
{
    const char *const names[] = {nowhere, "libm.so.6", nowhere, NULL};
    double (*root)(double) = NULL;
    void *library = ari_library_load(names);
    cr_assert_not_null(library, "%s", dlerror());
    cr_assert(ari_library_find(library, "sqrt", &root));
    cr_assert_eq(root(9.0), 3.0);
}

Test(library, says_what_is_missing)
{
    const char *const names[] = {nowhere, NULL}, *const some[] = {"libm.so.6", NULL};
    void (*function)(void) = abort;
    cr_assert_null(ari_library_load(names));
    cr_assert_not_null(strstr(dlerror(), nowhere));
    cr_assert_not(ari_library_find(ari_library_load(some), "anyrank_is_not_here", &function));
    cr_assert_null(function);
}
