/* SPDX-License-Identifier: Apache-2.0 */
/* The check of the baseline's undefined symbols passes on this build, and fails on an object that calls something else.
 * Exit status 77 skips: no nm or no compiler here. */
#include "tests/support/temporary.h"

static int run(const char *command)
{
    const int status = system(command);
    return status == -1 ? -1 : WEXITSTATUS(status);
}

static int check(const char *folder)
{
    char command[1200];
    snprintf(command, sizeof command, "'%s/scripts/check_baseline_symbols.sh' '%s'", TEST_SOURCE_DIR, folder);
    return run(command);
}

int main(void)
{
    SCOPED(temp_end) const temp_path folder = temp_folder();
    char command[400];
    if (run("command -v nm >/dev/null && command -v cc >/dev/null") != 0)
        return 77;
    if (check(TEST_BUILD_DIR) != 0) {
        fprintf(stderr, "the baseline calls something that it must not\n");
        return 1;
    }
    snprintf(command, sizeof command,
             "mkdir -p %s/CMakeFiles/ref/baseline && echo 'void bli_dgemm(void); void f(void) { bli_dgemm(); }' | "
             "cc -xc -c -o %s/CMakeFiles/ref/baseline/f.o -",
             folder.path, folder.path);
    const int made = run(command), rejected = check(folder.path);
    if (made != 0 || rejected != 1) {
        fprintf(stderr, "made %d, rejected %d: expected 0 and 1\n", made, rejected);
        return 1;
    }
    return 0;
}
