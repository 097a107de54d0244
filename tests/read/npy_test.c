/* SPDX-License-Identifier: Apache-2.0 */
#include "io/st_bytes.h"
#include "tests/support/test.h"
#include "verify/read/dump.h"

OWNER(ari_npy, ari_npy_close)

/* A file of `version` with this header and `data` bytes 0, 1, 2, ... */
static mem_file npy_of(unsigned version, const char *header, size_t data)
{
    unsigned char bytes[1024] = "\x93NUMPY";
    const size_t n = strlen(header), width = version == 1 ? 2 : 4, start = 8 + width + n;
    bytes[6] = (unsigned char)version;
    bytes[8] = (unsigned char)n;
    bytes[9] = (unsigned char)(n >> 8);
    memcpy(bytes + 8 + width, header, n);
    for (size_t i = 0; i < data; i++)
        bytes[start + i] = (unsigned char)i;
    return mem_file_of(bytes, start + data);
}

static ar_status try_open(mem_file m, ari_npy **f)
{
    *f = NULL;
    ar_error_clear();
    const ar_status st = ari_npy_open(f, m.path);
    close(m.fd);
    return st;
}

Test(npy, an_array_is_read_in_every_version)
{
    for (unsigned version = 1; version <= 3; version++) {
        OWNED(ari_npy_close) ari_npy *f = NULL;
        const mem_file m =
            npy_of(version, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }          \n", 24);
        cr_assert_ok(try_open(m, &f));
        cr_expect(f->entry.dtype == AR_F32 && f->entry.ndim == 2);
        cr_expect(f->entry.count == 6 && f->entry.bytes == 24 && f->entry.shape[0] == 2 && f->entry.shape[1] == 3);
        cr_expect(f->box.offset == 0 && f->box.extent[0] == 2 && f->box.stride[0] == 3 && f->box.stride[1] == 1);
        cr_expect_eq(((const unsigned char *)f->entry.data)[23], 23);
    }
}

Test(npy, fortran_order_is_the_transpose)
{
    OWNED(ari_npy_close) ari_npy *f = NULL;
    cr_assert_ok(try_open(npy_of(1, "{'descr': '|u1', 'fortran_order': True, 'shape': (2, 3, 4)}", 24), &f));
    cr_expect(f->entry.shape[0] == 2 && f->entry.shape[1] == 3 && f->entry.shape[2] == 4 && f->box.extent[0] == 2 &&
              f->box.extent[2] == 4);
    cr_expect(f->box.stride[0] == 1 && f->box.stride[1] == 2 && f->box.stride[2] == 6);
}

Test(npy, every_dtype_has_its_size)
{
    static const struct {
        const char *descr;
        ar_dtype dtype;
    } cases[] = {{"|b1", AR_BOOL}, {"|i1", AR_I8},  {"|u1", AR_U8},  {"<i2", AR_I16}, {"<u2", AR_U16},
                 {"<i4", AR_I32},  {"<u4", AR_U32}, {"<i8", AR_I64}, {"<u8", AR_U64}, {"<f2", AR_F16},
                 {"<f4", AR_F32},  {"<f8", AR_F64}, {"<c8", AR_C64}, {"=f4", AR_F32}, {">u1", AR_U8}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char header[128];
        OWNED(ari_npy_close) ari_npy *f = NULL;
        snprintf(header, sizeof header, "{\"shape\":(5,),\"descr\":\"%s\",\"fortran_order\":False}", cases[i].descr);
        cr_assert_ok(try_open(npy_of(2, header, 5 * ar_dtype_bytes(cases[i].dtype)), &f));
        cr_expect(f->entry.dtype == cases[i].dtype && f->entry.count == 5);
    }
}

Test(npy, a_scalar_and_an_empty_array_are_arrays)
{
    OWNED(ari_npy_close) ari_npy *f = NULL;
    cr_assert_ok(try_open(npy_of(1, "{'descr': '<f8', 'fortran_order': False, 'shape': ()}", 8), &f));
    cr_expect(f->entry.ndim == 0 && f->entry.count == 1);
    ari_npy_close(f);
    cr_assert_ok(try_open(npy_of(1, "{'descr': '<f8', 'fortran_order': True, 'shape': (3, 0)}", 0), &f));
    cr_expect(f->entry.ndim == 2 && f->entry.count == 0 && f->box.extent[0] == 3 && f->box.extent[1] == 0);
}

Test(npy, malformed_headers_are_refused)
{
    static const struct {
        const char *header, *problem;
        size_t data;
    } cases[] = {
        {"", "expected a dict", 4},
        {"{'descr': '<f4', 'fortran_order': False}", "no 'shape'", 4},
        {"{'fortran_order': False, 'shape': ()}", "no 'descr'", 4},
        {"{'descr': '<f4', 'shape': ()}", "no 'fortran_order'", 4},
        {"{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': ()}", "one of them twice", 4},
        {"{'descr': '<f4', 'order': 1, 'fortran_order': False, 'shape': ()}", "a key other than", 4},
        {"{'descr': '<f4', 'fortran_order': 0, 'shape': ()}", "neither True nor False", 4},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (1)}", "is no tuple", 4},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': [1]}", "expected a tuple", 4},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}", "expected an extent", 4},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (1 1)}", "expected ',' or ')'", 4},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (,)}", "expected an extent", 4},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (18446744073709551616,)}", "beyond 64 bits", 4},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 4)}", "overflows 64 bits", 4},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", "4 bytes of data, expected 8", 4},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", "9 bytes of data, expected 8", 9},
        {"{'descr': '<f4' 'fortran_order': False, 'shape': ()}", "expected ',' or '}'", 4},
        {"{'descr' '<f4', 'fortran_order': False, 'shape': ()}", "expected ':'", 4},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': ()} x", "something follows", 4},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': ()", "expected ',' or '}'", 4},
        {"{'descr': '<f4, 'fortran_order': False, 'shape': ()}", "expected ',' or '}'", 4},
        {"{'descr': '<f", "does not end", 4},
        {"{'descr': 'a string that is much too long', 'fortran_order': False, 'shape': ()}", "too long", 4},
        {"{'descr': '\\x3cf4', 'fortran_order': False, 'shape': ()}", "does not end", 4},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ari_npy *f = NULL;
        cr_expect_eq(try_open(npy_of(1, cases[i].header, cases[i].data), &f), AR_ERR_FORMAT, "%s", cases[i].header);
        cr_expect(names_rule("InvalidNpy") && strstr(ar_error_message(), cases[i].problem) != NULL, "%s: %s",
                  cases[i].header, ar_error_message());
    }
}

Test(npy, what_no_tensor_can_be_says_what_to_write)
{
    static const struct {
        const char *descr, *advice;
    } cases[] = {{"'>f4'", "astype('<f4')"}, {"'|V2'", "bfloat16"},       {"'|O'", "expected b1"},
                 {"'<U5'", "expected b1"},   {"'<c16'", "expected b1"},   {"'<f16'", "expected b1"},
                 {"'f'", "expected b1"},     {"[('a', '<f4')]", "field"}, {"''", "expected b1"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char header[128];
        ari_npy *f = NULL;
        snprintf(header, sizeof header, "{'descr': %s, 'fortran_order': False, 'shape': (1,)}", cases[i].descr);
        cr_expect_refused(try_open(npy_of(1, header, 4), &f), AR_ERR_UNSUPPORTED, cases[i].advice);
    }
    ari_npy *f = NULL;
    const char *nine = "{'descr': '|u1', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1,1,1)}";
    cr_expect_eq(try_open(npy_of(1, nine, 1), &f), AR_ERR_UNSUPPORTED);
}

Test(npy, files_that_are_cut_or_not_npy_are_refused)
{
    static const char header[] = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}";
    unsigned char bytes[128] = "\x93NUMPY\x01";
    ari_npy *f = NULL;
    bytes[8] = sizeof header - 1;
    memcpy(bytes + 10, header, sizeof header - 1);
    const size_t whole = 10 + sizeof header - 1 + 4;
    cr_assert_ok(try_open(mem_file_of(bytes, whole), &f));
    ari_npy_close(f);
    for (size_t n = 0; n < whole; n++) {
        cr_expect_eq(try_open(mem_file_of(bytes, n), &f), AR_ERR_FORMAT, "%zu bytes", n);
        cr_expect(names_rule("InvalidNpy"), "%s", ar_error_message());
    }
    bytes[6] = 4;
    cr_expect_eq(try_open(mem_file_of(bytes, whole), &f), AR_ERR_FORMAT);
    bytes[0] = 'N';
    cr_expect_eq(try_open(mem_file_of(bytes, whole), &f), AR_ERR_FORMAT);
    const unsigned char claims[16] = "\x93NUMPY\x02\0\xff\xff\xff\xff{}"; /* a header of 4 GiB */
    cr_expect_eq(try_open(mem_file_of(claims, 16), &f), AR_ERR_FORMAT);
    cr_expect_eq(ari_npy_open(&f, "/nowhere/x.npy"), AR_ERR_IO);
}
