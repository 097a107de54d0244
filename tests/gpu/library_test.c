/* SPDX-License-Identifier: Apache-2.0 */
/* Libraries that are loaded when they are needed: where they are looked for, on a tree of folders made for it. */
#include "gpu/library.h"
#include "tests/support/test.h"

#include <stdarg.h>

#include "ref/core/os/os.h"

#define FILE_NAME "libanyrank-is-not-here.so.7"
#define PACKAGES "/lib/python3.12/site-packages"

static const ari_library wanted = {"Wanted", "ANYRANK_WANTED", "the package", NULL, {FILE_NAME}};
static char root[] = "/tmp/anyrank-library-XXXXXX";

static const char *below_root(const char *place)
{
    static char path[512];
    snprintf(path, sizeof path, "%s%s", root, place);
    return path;
}

static void shell(const char *format, ...)
{
    char command[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(command, sizeof command, format, arguments);
    va_end(arguments);
    cr_assert_eq(system(command), 0, "%s", command);
}

/* A library that can be loaded, in a folder below the root; each is a file of its own, or they would be one. */
static void put(const char *folder)
{
    shell("mkdir -p %1$s%2$s && cp %3$s/tests/fake_nccl.so %1$s%2$s/" FILE_NAME, root, folder, TEST_BUILD_DIR);
}

/* Without what this machine's variables name. */
static void begin(void)
{
    static const char *const names[] = {"CUDA_HOME", "CUDA_PATH", "NCCL_HOME", "VIRTUAL_ENV", "CONDA_PREFIX", "HOME"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        unsetenv(names[i]);
    cr_assert_not_null(mkdtemp(root));
}

static void end(void)
{
    shell("rm -r %s", root);
}

static void expect_place(const ari_library *which, const char *folder)
{
    void *library = NULL;
    void (*version)(void) = NULL;
    char path[512];
    snprintf(path, sizeof path, "%s%s/" FILE_NAME, root, folder);
    cr_assert_ok(ari_library_open(&library, which));
    if (ARI_OS_LINUX)
        cr_expect_str_eq(ari_library_place(library), path);
    cr_expect(ari_library_find(library, "ncclGetVersion", &version));
    version = abort;
    cr_expect_not(ari_library_find(library, "anyrank_is_not_here", &version));
    cr_expect_null(version);
}

/* Refused, with each of these texts in the message; NULL ends them. */
static void expect_refused(const char *const *texts)
{
    void *library = &library;
    cr_assert_eq(ari_library_open(&library, &wanted), AR_ERR_UNSUPPORTED);
    cr_expect_null(library);
    for (; *texts; texts++)
        cr_expect_says(*texts);
}

/* From the last place to the first: each is chosen where all behind it have one too. */
Test(library, is_looked_for_in_one_order, .init = begin, .fini = end)
{
    static const char *const places[][3] = {
        {"HOME", "/home", "/home/.local" PACKAGES "/nvidia/nccl/lib"},
        {"VIRTUAL_ENV", "/venv", "/venv" PACKAGES "/torch/lib"},
        {"PATH", "/conda/bin:/usr/bin:/bin", "/conda" PACKAGES "/nvidia/cu13/lib"},
        {"NCCL_HOME", "/nccl", "/nccl/lib"},
        {"CUDA_PATH", "/toolkit", "/toolkit/targets/x86_64-linux/lib"},
        {"CUDA_HOME", "/cuda", "/cuda/lib64"},
    };
    ari_library built = wanted;
    shell("mkdir -p %1$s/conda/bin && echo > %1$s/conda/bin/python3 && chmod +x %1$s/conda/bin/python3", root);
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        put(places[i][2]);
        setenv(places[i][0], below_root(places[i][1]), 1);
        expect_place(&wanted, places[i][2]);
    }
    put("/built");
    built.built_with = below_root("/built/" FILE_NAME);
    expect_place(&built, "/built");
    put("/named");
    setenv("ANYRANK_WANTED", below_root("/named/" FILE_NAME), 1);
    expect_place(&built, "/named");
}

Test(library, of_the_python_that_a_link_on_the_path_leads_to, .init = begin, .fini = end)
{
    put("/real/local/lib/python3/dist-packages/nvidia/cublas/lib");
    shell("mkdir -p %1$s/real/bin %1$s/link/bin && echo > %1$s/real/bin/python3 && chmod +x %1$s/real/bin/python3 && "
          "ln -s ../../real/bin/python3 %1$s/link/bin/python3",
          root);
    setenv("PATH", below_root("/link/bin"), 1);
    expect_place(&wanted, "/real/local/lib/python3/dist-packages/nvidia/cublas/lib");
    setenv("PATH", "/usr/bin:/bin", 1);
}

Test(library, that_cannot_be_loaded_is_passed_over, .init = begin, .fini = end)
{
    shell("mkdir -p %1$s/cuda/lib64 && echo no library > %1$s/cuda/lib64/" FILE_NAME, root);
    setenv("CUDA_HOME", below_root("/cuda"), 1);
    expect_refused((const char *const[]){below_root("/cuda/lib64/" FILE_NAME ": "), NULL});
    put("/venv" PACKAGES "/nvidia/cu13/lib");
    setenv("VIRTUAL_ENV", below_root("/venv"), 1);
    expect_place(&wanted, "/venv" PACKAGES "/nvidia/cu13/lib");
}

Test(library, that_is_nowhere_is_an_error_with_all_places, .init = begin, .fini = end)
{
    setenv("CUDA_HOME", root, 1);
    setenv("HOME", "relative", 1);
    expect_refused((const char *const[]){"Wanted cannot be loaded: ", FILE_NAME ": ", "where the loader does", root,
                                         ", /usr/local/cuda, ", ", /usr/local", "install the package",
                                         "name the file by ANYRANK_WANTED", NULL});
    cr_expect_not(strstr(ar_error_message(), "relative"));
    cr_expect_not(strstr(ar_error_message(), "$"));
    setenv("CUDA_PATH", root, 1); /* the same place, which is named once */
    expect_refused((const char *const[]){root, NULL});
    cr_expect_not(strstr(strstr(ar_error_message(), root) + 1, root));
    unsetenv("CUDA_PATH");
    put("/cuda/lib64");
    setenv("CUDA_HOME", below_root("/cuda"), 1);
    setenv("ANYRANK_WANTED", "/nowhere/at.all", 1);
    expect_refused(
        (const char *const[]){"Wanted cannot be loaded: /nowhere/at.all: ", "ANYRANK_WANTED names it", NULL});
    setenv("ANYRANK_WANTED", "", 1);
    expect_place(&wanted, "/cuda/lib64");
}
