/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/io/hash.h"
#include "ref/io/safetensors_private.h"
#include "support/together.h"

/* The published examples of FIPS 180-4: messages of 24, 0, 448, 896 and 8 million bits. */
static const struct {
    const char *text, *digest;
    size_t times;
} published[] = {
    {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", 1},
    {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", 1},
    {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
     "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1", 1},
    {"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu",
     "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1", 1},
    {"a", "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0", 1000000},
};

/* Every way to do a block is tried, not only the one that this processor would be given. */
static ari_sha256 begun(int way)
{
    ari_sha256 s;
    ari_sha256_init(&s);
    s.blocks = way == 0 ? ari_sha256_blocks_portable : ari_sha256_fastest();
    return s;
}

CLAIM(sha256_gives_the_standards_digests)
{
    char hex[65];
    for (size_t i = 0; i < sizeof published / sizeof *published; i++)
        for (int way = 0; way < 2; way++) {
            ari_sha256 s = begun(way);
            for (size_t k = 0; k < published[i].times; k++)
                ari_sha256_update(&s, published[i].text, strlen(published[i].text));
            ari_sha256_final(&s, hex);
            cr_expect_str_eq(hex, published[i].digest, "example %zu, way %d", i, way);
        }
    ari_sha256_of(hex, NULL, 0);
    cr_expect_str_eq(hex, published[1].digest);
}

/* The digest of the digests of one message of each length, in pieces of 1 to 200 bytes; computed apart by
 *   whole = hashlib.sha256()
 *   for n in range(600):
 *       whole.update(hashlib.sha256(bytes((i * 37 + n * 11 + i // 64) % 256 for i in range(n))).hexdigest().encode()) */
#define ALL_LENGTHS "3be60d3d6e945f03c4e378d7d7f590335aa87d4c8232d71b03d0068520bc1cf4"

CLAIM(sha256_of_every_length_is_pythons)
{
    unsigned char message[600];
    char hex[65];
    for (int way = 0; way < 2; way++) {
        ari_sha256 whole = begun(way);
        for (size_t n = 0; n < sizeof message; n++) {
            ari_sha256 s = begun(way);
            for (size_t i = 0; i < n; i++)
                message[i] = (unsigned char)(i * 37 + n * 11 + i / 64);
            for (size_t at = 0, piece; at < n; at += piece) {
                piece = 1 + (at * 31 + n) % 200;
                piece = piece < n - at ? piece : n - at;
                ari_sha256_update(&s, message + at, piece);
            }
            ari_sha256_final(&s, hex);
            ari_sha256_update(&whole, hex, 64);
        }
        ari_sha256_final(&whole, hex);
        cr_expect_str_eq(hex, ALL_LENGTHS, "way %d", way);
    }
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

CLAIM(tensors_hash_is_the_documented_one_in_any_order)
{
    static const int orders[][4] = {{0, 1, 2, 3}, {3, 2, 1, 0}, {1, 3, 0, 2}};
    for (size_t i = 0; i < 3; i++) {
        ar_st_tensor t[4];
        char hex[65];
        for (size_t k = 0; k < 4; k++)
            t[k] = four[orders[i][k]];
        cr_assert_ok(ari_tensors_hash(hex, t, 4));
        cr_expect_str_eq(hex, FOUR);
    }
}

CLAIM(any_change_gives_another_hash)
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
        cr_assert_ok(ari_tensors_hash(hex, t, 4));
        cr_expect_str_neq(hex, FOUR, "%d", i);
    }
    cr_assert_ok(ari_tensors_hash(hex, four, 3));
    cr_expect_str_neq(hex, FOUR);
}

/* Computed apart, with Python's hashlib, from the file's header and bytes. */
CLAIM(golden_weights_have_their_hash)
{
    OWNED(ari_st_close) ar_st_file *f = NULL;
    ar_st_tensor t[21];
    char hex[65];
    cr_assert_ok(ari_st_open(&f, TEST_GOLDEN_DIR "/llama-gqa-tiny/model.safetensors"));
    cr_assert_eq(ari_st_tensor_count(f), 21);
    for (size_t i = 0; i < 21; i++) {
        const ar_st_entry *e = ari_st_at(f, i);
        t[i] = (ar_st_tensor){.name = e->name, .dtype = e->dtype, .ndim = e->ndim, .data = e->data};
        memcpy(t[i].shape, e->shape, sizeof e->shape);
    }
    cr_assert_ok(ari_tensors_hash(hex, t, 21));
    cr_expect_str_eq(hex, "6564386ced1c646e677ea4df90727a4a82b1d78722191a558f1aa288c922c7e5");
}

CLAIM(what_has_no_hash_is_an_error)
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

EVERY_CLAIM(hash)
