/* SPDX-License-Identifier: Apache-2.0 */
#include "io/st_bytes.h"
#include "ref/io/file.h"
#include "ref/io/hash.h"
#include "ref/io/json.h"
#include "tests/support/test.h"

/* The text is frozen: losses and hashes that were published with it must stay reproducible. */
Test(text, the_bundled_text_is_the_frozen_one)
{
    OWNED(free) unsigned char *text = NULL;
    size_t n = 0;
    char hex[65];
    setenv("ANYRANK_DATA", TEST_DATA_DIR, 1);
    cr_assert_ok(ari_text_load(&text, &n, NULL));
    ari_sha256_of(hex, text, n);
    cr_expect_str_eq(hex, "71cc656f41249615f6629872499d7faac6c77e2d103debba48e7d0c6071810ad");
    cr_expect_gt(n, 24000);
    cr_expect(ari_utf8_valid((const char *)text, n));
}

/* Tokens from 128 up must be met early and often, or no test would touch the upper half of a vocabulary of 256. */
Test(text, byte_0x80_occurs_early_and_throughout)
{
    OWNED(free) unsigned char *text = NULL;
    size_t n = 0, last = 0, seen = 0;
    setenv("ANYRANK_DATA", TEST_DATA_DIR, 1);
    cr_assert_ok(ari_text_load(&text, &n, NULL));
    for (size_t i = 0; i < n; i++) {
        if (text[i] != 0x80)
            continue;
        cr_expect_lt(i - last, 600);
        last = i;
        seen++;
    }
    cr_expect_lt(n - last, 600);
    cr_expect_gt(seen, n / 300);
}

Test(text, any_file_will_do_unless_it_is_empty_or_none)
{
    unsigned char *text = NULL;
    size_t n = 0;
    const mem_file some = mem_file_of("\0\xff\n", 3), none = mem_file_of("", 0);
    cr_assert_ok(ari_text_load(&text, &n, some.path));
    cr_expect(n == 3 && memcmp(text, "\0\xff\n", 3) == 0);
    free(text);
    text = NULL;
    cr_expect_eq(ari_text_load(&text, &n, none.path), AR_ERR_DATA);
    cr_expect_eq(ari_text_load(&text, &n, "/no/such/text"), AR_ERR_IO);
    cr_expect_eq(ari_text_load(&text, &n, "/"), AR_ERR_IO);
    setenv("ANYRANK_DATA", "/no/such/folder", 1);
    cr_expect_refused(ari_text_load(&text, &n, NULL), AR_ERR_NOT_FOUND, "no text.txt in '/no/such/folder'");
    cr_expect_null(text);
}
