/* SPDX-License-Identifier: Apache-2.0 */
#include "read/folder.h"
#include "verify/read/dump_private.h"

TestSuite(dump_dcp, .init = folder_begin, .fini = folder_end);

/* tests/golden/dcp.py: DTensors of 4 processes; element i of every tensor is i, but the scalar is 7. */
Test(dump_dcp, what_pytorch_saved_is_put_together)
{
    static const struct {
        const char *name;
        ar_dtype dtype;
        size_t count, parts;
    } expected[] = {{"both", AR_F32, 48, 4},  {"columns", AR_BF16, 48, 2}, {"copies", AR_F16, 4, 1},
                    {"empty", AR_F32, 3, 2},  {"plain", AR_F32, 3, 1},     {"rows", AR_F32, 48, 2},
                    {"scalar", AR_F32, 1, 1}, {"twice", AR_F32, 18, 4},    {"uneven", AR_I64, 15, 2}};
    OWNED(ar_dump_close) ar_dump *d = NULL;
    double x[64];
    cr_assert_ok(ar_dump_open(&d, TEST_GOLDEN_DIR "/dcp-tiny", NULL));
    cr_expect_eq(ar_dump_ranks(d), 4);
    cr_assert_eq(ar_dump_count(d), sizeof expected / sizeof *expected);
    for (size_t k = 0; k < ar_dump_count(d); k++) {
        const ar_dump_tensor *t = ar_dump_at(d, k);
        cr_expect_str_eq(t->name, expected[k].name);
        cr_expect_eq(t->dtype, expected[k].dtype);
        cr_expect_eq(t->parts, expected[k].parts, "%s: %zu", t->name, t->parts);
        cr_assert_eq(t->count, expected[k].count);
        cr_assert_ok(ari_dump_read_f64(t, 0, t->count, x));
        for (size_t i = 0; i < t->count; i++)
            cr_expect_eq(x[i], t->ndim == 0 ? 7 : (double)i, "%s, element %zu", t->name, i);
    }
}

/* PyTorch's writer of Hugging Face files lets the ranks write one file by default: the last one's part is left. */
Test(dump_dcp, a_part_that_should_be_whole_is_refused_wherever_it_lies)
{
    static const char index[] = "{\"metadata\": {}, \"weight_map\": {\"w\": \"model-00001-of-00001.safetensors\"}}";
    static const char *const files[] = {"shard-00001-model-00001-of-00001.safetensors",
                                        "model-00001-of-00001.safetensors", "model.safetensors"};
    const size_t shape[] = {2, 2};
    const float x[] = {1, 2, 3, 4};
    for (int i = 0; i < 3; i++) {
        for (int rest = 0; rest < 2; rest++) { /* with the offset 0 the file is whole */
            const char *dcp = rest ? "{\"w\": {\"saved_offsets\": [2, 0]}}" : "{\"w\": {\"saved_offsets\": [0, 0]}}";
            put_tensor(files[i], "w", 2, shape, x, dcp, NULL);
            if (i == 1)
                put_text("model.safetensors.index.json", index);
            OWNED(ar_dump_close) ar_dump *d = NULL;
            cr_expect_eq(ar_dump_open(&d, folder, NULL), rest ? AR_ERR_FORMAT : AR_OK, "%s: %s", files[i],
                         ar_error_message());
            cr_expect(!rest || strstr(ar_error_message(), "no rank holds [0:2, 0:2]"), "%s: %s", files[i],
                      ar_error_message());
        }
        folder_end();
        folder_begin();
    }
}
