/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/config.h"
#include "ref/io/config_private.h"
#include "ref/io/file.h"
#include "tests/support/test.h"

Test(model_path, a_folder_or_file_stays_as_it_is)
{
    char out[512];
    cr_expect_ok(ar_model_path(out, sizeof out, TEST_GOLDEN_DIR "/gpt2-tiny"));
    cr_expect_str_eq(out, TEST_GOLDEN_DIR "/gpt2-tiny");
    cr_expect_ok(ar_model_path(out, sizeof out, TEST_GOLDEN_DIR "/gpt2-tiny/config.json"));
    cr_expect_str_eq(out, TEST_GOLDEN_DIR "/gpt2-tiny/config.json");
}

Test(model_path, bundled_names_lie_in_the_data_directory)
{
    char out[512], want[512];
    ar_config c;
    unsetenv("ANYRANK_DATA"); /* this program is of the build tree, so: that of the sources */
    cr_expect_str_eq(ari_data_dir(), TEST_DATA_DIR);
    setenv("ANYRANK_DATA", "", 1); /* set but empty: as if it were not set */
    cr_expect_str_eq(ari_data_dir(), TEST_DATA_DIR);
    setenv("ANYRANK_DATA", TEST_DATA_DIR, 1);
    cr_expect_str_eq(ari_data_dir(), TEST_DATA_DIR);
    for (const char *const *name = ari_model_names; *name; name++) {
        snprintf(want, sizeof want, "%s/%s", TEST_DATA_DIR, *name);
        cr_expect_ok(ar_model_path(out, sizeof out, *name));
        cr_expect_str_eq(out, want);
        cr_expect_ok(ar_config_load(&c, out));
        cr_expect_str_eq(c.name, *name);
        cr_expect_eq(c.unknown_keys, 0, "%s: %s", *name, c.unknown[0]);
    }
}

Test(model_path, what_is_not_there_is_not_found_with_a_hint)
{
    char out[512];
    setenv("ANYRANK_DATA", TEST_DATA_DIR, 1);
    cr_expect_refused(ar_model_path(out, sizeof out, "lama-demo"), AR_ERR_NOT_FOUND,
                      "llama-demo, gpt2-demo, stack-demo, mixtral-demo, ");
    cr_expect_says("qwen3-235b-a22b, deepseek-v3, gpt-oss-20b, gpt-oss-120b; did you mean 'llama-demo'?");
    cr_expect_refused(ar_model_path(out, sizeof out, "gtp2-demo"), AR_ERR_NOT_FOUND, "did you mean 'gpt2-demo'?");
    cr_expect_eq(ar_model_path(out, sizeof out, "/no/such/model"), AR_ERR_NOT_FOUND);
    cr_expect_null(strstr(ar_error_message(), "did you mean"), "%s", ar_error_message());
    setenv("ANYRANK_DATA", "/no/such/folder", 1);
    cr_expect_refused(ar_model_path(out, sizeof out, "gpt2-demo"), AR_ERR_NOT_FOUND, "/no/such/folder");
    cr_expect_eq(ar_model_path(out, 5, TEST_GOLDEN_DIR), AR_ERR_ARG);
    cr_expect_eq(ar_model_path(out, sizeof out, ""), AR_ERR_ARG);
    cr_expect_eq(ar_model_path(out, sizeof out, NULL), AR_ERR_ARG);
}
