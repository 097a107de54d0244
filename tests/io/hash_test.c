/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "ref/io/hash.h"
#include "support/together.h"

TestSuite(hash, .timeout = 300);

/* FIPS 180-4's examples: "abc", nothing, a million times "a". */
static void sha256_gives_the_standards_digests(void)
{
    ari_sha256 s;
    char hex[65];
    cr_assert_eq(ari_sha256_init(&s), AR_OK);
    cr_assert_eq(ari_sha256_update(&s, "a", 1), AR_OK);
    cr_assert_eq(ari_sha256_update(&s, NULL, 0), AR_OK);
    cr_assert_eq(ari_sha256_update(&s, "bc", 2), AR_OK);
    cr_assert_eq(ari_sha256_final(&s, hex), AR_OK);
    cr_expect_str_eq(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    cr_assert_eq(ari_sha256_init(&s), AR_OK);
    for (int i = 0; i < 1000000; i++)
        cr_assert_eq(ari_sha256_update(&s, "a", 1), AR_OK);
    cr_assert_eq(ari_sha256_final(&s, hex), AR_OK);
    cr_expect_str_eq(hex, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    ari_sha256_drop(&s);
    cr_assert_eq(ari_tensors_hash(hex, NULL, 0), AR_OK);
    cr_expect_str_eq(hex, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

static const float b[4] = {1, 2, 3, 4};
static const int64_t a = -5;
static const ar_st_tensor four[4] = {{.name = "b", .dtype = AR_F32, .ndim = 2, .shape = {2, 2}, .data = b},
                                     {.name = "a", .dtype = AR_I64, .ndim = 0, .data = &a},
                                     {.name = "a.b", .dtype = AR_U8, .ndim = 1, .shape = {3}, .data = "xyz"},
                                     {.name = "\xe2\x80\x94", .dtype = AR_BF16, .ndim = 2, .shape = {0, 7}}};

/* Computed apart, with Python's hashlib: sha256 over, for each name in byte order, name + "\0" + dtype + "\0" + shape +
 * "\0" + data, where data is struct.pack("<q", -5), "xyz", struct.pack("<4f", 1, 2, 3, 4) and nothing. */
#define FOUR "001559c22c7d123e367739ef6fc2bacc58c44a1d714de8f27c7719df313db398"

static void tensors_hash_is_the_documented_one_in_any_order(void)
{
    static const int orders[][4] = {{0, 1, 2, 3}, {3, 2, 1, 0}, {1, 3, 0, 2}};
    for (size_t i = 0; i < 3; i++) {
        ar_st_tensor t[4];
        char hex[65];
        for (size_t k = 0; k < 4; k++)
            t[k] = four[orders[i][k]];
        cr_assert_eq(ari_tensors_hash(hex, t, 4), AR_OK, "%s", ar_error_message());
        cr_expect_str_eq(hex, FOUR);
    }
}

static void any_change_gives_another_hash(void)
{
    static const float other[4] = {1, 2, 3, 0x1.000002p+2f};
    char hex[65];
    for (int i = 0; i < 5; i++) {
        ar_st_tensor t[4];
        memcpy(t, four, sizeof t);
        if (i == 0)
            t[0].data = other;
        else if (i == 1)
            t[0].ndim = 1, t[0].shape[0] = 4;
        else if (i == 2)
            t[0].name = "c";
        else if (i == 3)
            t[0].dtype = AR_I32;
        else
            t[3].shape[1] = 8;
        cr_assert_eq(ari_tensors_hash(hex, t, 4), AR_OK, "%s", ar_error_message());
        cr_expect_str_neq(hex, FOUR, "%d", i);
    }
    cr_assert_eq(ari_tensors_hash(hex, four, 3), AR_OK);
    cr_expect_str_neq(hex, FOUR);
}

/* Computed apart, with Python's hashlib, from the file's header and bytes. */
static void golden_weights_have_their_hash(void)
{
    ar_st_file *f = NULL;
    ar_st_tensor t[21];
    char hex[65];
    cr_assert_eq(ar_st_open(&f, TEST_GOLDEN_DIR "/llama-gqa-tiny/model.safetensors"), AR_OK, "%s", ar_error_message());
    cr_assert_eq(ar_st_count(f), 21);
    for (size_t i = 0; i < 21; i++) {
        const ar_st_entry *e = ar_st_at(f, i);
        t[i] = (ar_st_tensor){.name = e->name, .dtype = e->dtype, .ndim = e->ndim, .data = e->data};
        memcpy(t[i].shape, e->shape, sizeof e->shape);
    }
    cr_assert_eq(ari_tensors_hash(hex, t, 21), AR_OK);
    cr_expect_str_eq(hex, "6564386ced1c646e677ea4df90727a4a82b1d78722191a558f1aa288c922c7e5");
    ar_st_close(f);
}

static void what_has_no_hash_is_an_error(void)
{
    char hex[65] = "untouched";
    ar_st_tensor t[2] = {four[0], four[0]};
    cr_expect_eq(ari_tensors_hash(hex, t, 2), AR_ERR_ARG);
    t[1].name = NULL;
    cr_expect_eq(ari_tensors_hash(hex, t, 2), AR_ERR_ARG);
    t[1] = four[1];
    t[1].data = NULL;
    cr_expect_eq(ari_tensors_hash(hex, t, 2), AR_ERR_ARG);
    t[1] = four[0];
    t[1].name = "z", t[1].shape[0] = t[1].shape[1] = (size_t)1 << 40;
    cr_expect_eq(ari_tensors_hash(hex, t, 2), AR_ERR_OVERFLOW);
    cr_expect_str_eq(hex, "untouched");
}

Test(hash, every_claim)
{
    TOGETHER(sha256_gives_the_standards_digests, tensors_hash_is_the_documented_one_in_any_order,
             any_change_gives_another_hash, golden_weights_have_their_hash, what_has_no_hash_is_an_error);
}
