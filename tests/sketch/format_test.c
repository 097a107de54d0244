/* SPDX-License-Identifier: Apache-2.0 */
/* Files of sketches: what ranks append adds up to the full tensors, whatever was cut off or changed is refused or left
 * out. */
#include "anyrank/sketch.h"
#include "ref/io/file.h"
#include "tests/support/folder.h"
#include "tests/support/fuzz.h"
#include "tests/support/test.h"

enum { ROWS = 6, COLUMNS = 40 };

static void append(unsigned char *out, size_t *used, const char *text, const ar_sketch *s)
{
    const size_t n = strlen(text), bytes = s != NULL ? ar_sketch_bytes(s) : 0, rest = 8 + n + bytes;
    unsigned char *body = out + *used + 16;
    for (int i = 0; i < 8; i++) {
        out[*used + (size_t)i] = (unsigned char)(rest >> 8 * i);
        body[i] = (unsigned char)(n >> 8 * i);
    }
    memcpy(body + 8, text, n);
    if (s != NULL)
        ar_sketch_encode(body + 8 + n, s);
    const uint64_t hash = ar_sketch_hash(body, rest);
    for (int i = 0; i < 8; i++)
        out[*used + 8 + (size_t)i] = (unsigned char)(hash >> 8 * i);
    *used += 16 + rest;
}

/* Rank r's file of two ranks: a step with its half of the rows of "x", or all of them as a copy. */
static size_t rank_file(unsigned char *out, int rank, const char *part, const float *x, size_t first, size_t rows)
{
    char text[512];
    ar_sketch s;
    const ar_dump_box box = {.global = {first, 0}, .extent = {rows, COLUMNS}, .stride = {COLUMNS, 1}, .replicas = 1};
    cr_assert_ok(ar_sketch_init(&s, AR_F32, 2, (size_t[]){ROWS, COLUMNS}));
    cr_assert_ok(ar_sketch_add(&s, x + first * COLUMNS, &box));
    snprintf(text, sizeof text,
             "{\"step\": 1, \"rank\": %d, \"world\": 2, \"mesh\": [[\"tp\", 2]], \"tensors\": [{\"name\": \"x:fwd\", "
             "\"dtype\": \"F32\", \"shape\": [%d, %d], \"part\": \"%s\", \"term\": \"\"}]}",
             rank, ROWS, COLUMNS, part);
    size_t used = 16;
    memcpy(out, AR_SKETCH_MAGIC, 16);
    append(out, &used, text, &s);
    ar_sketch_fini(&s);
    return used;
}

static void write_rank(int rank, const unsigned char *data, size_t n)
{
    cr_assert_ok(ari_file_write(in_folder(rank ? "rank-00001.sketch" : "rank-00000.sketch"), data, n));
}

static void fill(float *x)
{
    for (int i = 0; i < ROWS * COLUMNS; i++)
        x[i] = (float)(i % 7) - 2.5f;
}

TestSuite(sketch_format, .init = folder_begin, .fini = folder_end);

Test(sketch_format, ranks_parts_add_up_and_copies_are_compared)
{
    float x[ROWS * COLUMNS], y[ROWS * COLUMNS];
    unsigned char file[2][8192];
    fill(x);
    fill(y);
    y[5] = 1e-3f;
    for (int copies = 0; copies < 2; copies++) {
        for (int rank = 0; rank < 2; rank++) {
            const size_t n = copies ? rank_file(file[rank], rank, "all", rank ? y : x, 0, ROWS)
                                    : rank_file(file[rank], rank, rank ? "low" : "high", x, rank ? 3 : 0, 3);
            write_rank(rank, file[rank], n);
        }
        ar_sketch_run *run = NULL;
        cr_assert_ok(ar_sketch_run_open(&run, folder));
        cr_assert_eq(ar_sketch_run_count(run), 1);
        const ar_sketch_tensor *t = ar_sketch_run_tensor(run, 0);
        cr_expect_str_eq(t->name, "x:fwd");
        cr_expect_str_eq(t->left_out, "");
        cr_expect(t->copies == 1 + copies && t->differing == (copies ? 1 : -1), "%d copies, %d", t->copies,
                  t->differing);
        ar_sketch whole;
        const ar_dump_box box = {.extent = {ROWS, COLUMNS}, .stride = {COLUMNS, 1}, .replicas = 1};
        cr_assert_ok(ar_sketch_init(&whole, AR_F32, 2, (size_t[]){ROWS, COLUMNS}));
        cr_assert_ok(ar_sketch_add(&whole, x, &box));
        ar_sketch_difference d;
        cr_assert_ok(ar_sketch_compare(&d, &whole, &t->sketch));
        cr_expect(d.same_bits && d.norm < 1e-12);
        ar_sketch_fini(&whole);
        ar_sketch_run_close(run);
    }
}

/* A killed run leaves a part of its last record: the steps before it are read. */
Test(sketch_format, what_is_cut_off_is_left_out_and_what_is_changed_is_refused)
{
    float x[ROWS * COLUMNS];
    unsigned char file[2][16384];
    size_t n[2];
    fill(x);
    for (int rank = 0; rank < 2; rank++)
        n[rank] = rank_file(file[rank], rank, "all", x, 0, ROWS);
    write_rank(1, file[1], n[1]);
    for (size_t cut = 0; cut < n[0] - 16; cut += 97) { /* a second record, and what is left of it */
        memcpy(file[0] + n[0], file[0] + 16, n[0] - 16);
        write_rank(0, file[0], n[0] + cut);
        ar_sketch_run *run = NULL;
        cr_assert_ok(ar_sketch_run_open(&run, folder));
        cr_expect_eq(ar_sketch_run_count(run), 1);
        cr_expect_str_eq(ar_sketch_run_tensor(run, 0)->left_out, "");
        ar_sketch_run_close(run);
    }
    ar_sketch_run *run = NULL;
    file[0][n[0] / 2] ^= 1; /* not in the last record */
    write_rank(0, file[0], 2 * n[0] - 16);
    cr_expect_refused(ar_sketch_run_open(&run, folder), AR_ERR_FORMAT, "record 1: its hash is another");
    file[0][3] ^= 1;
    write_rank(0, file[0], n[0]);
    cr_expect_refused(ar_sketch_run_open(&run, folder), AR_ERR_FORMAT, "does not begin with \"anyrank sketch 2\"");
    file[0][3] ^= 1;
    file[0][15] = '1';
    write_rank(0, file[0], n[0]);
    cr_expect_refused(ar_sketch_run_open(&run, folder), AR_ERR_FORMAT,
                      "of format 1, and this version of anyrank reads");
    cr_assert_eq(remove(in_folder("rank-00001.sketch")), 0);
    n[0] = rank_file(file[0], 0, "all", x, 0, ROWS);
    write_rank(0, file[0], n[0]);
    cr_expect_refused(ar_sketch_run_open(&run, folder), AR_ERR_NOT_FOUND, "has no rank-00001.sketch");
    cr_expect_null(run);
}

Test(sketch_format, records_of_other_forms_are_refused)
{
    static const char *const texts[][2] = {
        {"{", "expected"},
        {"{\"step\": 1}", "is missing"},
        {"{\"step\": 1, \"rank\": 1, \"world\": 2, \"tensors\": []}", "not the file's"},
        {"{\"step\": 1, \"rank\": 0, \"world\": 1, \"tensors\": [{}]}", "without \"name\""},
        {"{\"step\": 1, \"rank\": 0, \"world\": 1, \"tensors\": [{\"name\": \"x:fwd\", \"part\": \"\", \"term\": \"\"}]}",
         "without \"dtype\""},
        {"{\"step\": 1, \"rank\": 0, \"world\": 1, \"tensors\": [{\"name\": \"x:fwd\", \"part\": \"\", \"term\": \"\", "
         "\"dtype\": \"F32\", \"shape\": [-1]}]}",
         "no list of sizes"},
        {"{\"step\": 1, \"rank\": 0, \"world\": 1, \"tensors\": [{\"name\": \"x:fwd\", \"part\": \"\", \"term\": \"\", "
         "\"dtype\": \"F4\", \"shape\": [2]}]}",
         "\"dtype\" has no sketches"},
        {"{\"step\": 1, \"rank\": 0, \"world\": 1, \"tensors\": [{\"name\": \"x:fwd\", \"part\": \"\", \"term\": \"\", "
         "\"dtype\": \"F32\", \"shape\": [2]}]}",
         "end too early"},
        {"{\"step\": 1, \"rank\": 0, \"world\": 1, \"tensors\": [{\"name\": \"x:fwd\", \"part\": \"\", \"term\": \"\", "
         "\"dtype\": \"F32\", \"shape\": [4294967296, 4294967296]}]}",
         "more than 2^64 elements"},
        {"{\"step\": 4294967297, \"rank\": 0, \"world\": 1, \"tensors\": []}", "no number from 1 on"}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        unsigned char file[2048];
        size_t used = 16;
        memcpy(file, AR_SKETCH_MAGIC, 16);
        append(file, &used, texts[i][0], NULL);
        append(file, &used, "{}", NULL);
        write_rank(0, file, used);
        ar_sketch_run *run = NULL;
        cr_expect(ar_sketch_run_open(&run, folder) != AR_OK && error_says(texts[i][1]), "%zu: %s", i,
                  ar_error_message());
    }
}

/* A second record of a step is skipped if it is the first one's, else refused. */
Test(sketch_format, a_step_that_a_rank_has_twice_counts_once_or_is_refused)
{
    float x[ROWS * COLUMNS], y[ROWS * COLUMNS];
    unsigned char file[16384], other[8192];
    fill(x);
    fill(y);
    y[3] += 1.0f;
    const size_t n = rank_file(file, 0, "all", x, 0, ROWS), m = rank_file(other, 0, "all", y, 0, ROWS);
    unsigned char copy[8192];
    write_rank(1, copy, rank_file(copy, 1, "all", x, 0, ROWS));
    memcpy(file + n, file + 16, n - 16);
    write_rank(0, file, 2 * n - 16);
    ar_sketch_run *run = NULL;
    cr_assert_ok(ar_sketch_run_open(&run, folder));
    cr_expect_eq(ar_sketch_run_tensor(run, 0)->copies, 2);
    ar_sketch_run_close(run);
    memcpy(file + n, other + 16, m - 16);
    write_rank(0, file, n + m - 16);
    cr_expect_refused(ar_sketch_run_open(&run, folder), AR_ERR_FORMAT, "record 2: step 1 is there twice");
}

/* A tensor that a rank leaves out, one that has a step which another rank lacks, and one of which a part is missing. */
Test(sketch_format, what_cannot_be_compared_has_its_reason)
{
    float x[ROWS * COLUMNS];
    unsigned char file[2][16384];
    size_t n[2];
    fill(x);
    for (int rank = 0; rank < 2; rank++)
        n[rank] = rank_file(file[rank], rank, "high", x, 0, 3);
    append(
        file[0], &n[0],
        "{\"step\": 2, \"rank\": 0, \"world\": 2, \"tensors\": [{\"name\": \"s:fwd@2\", \"dtype\": \"F32\", \"shape\": [0], "
        "\"part\": \"\", \"term\": \"\"}, {\"name\": \"y:fwd@2\", \"dtype\": \"F32\", \"shape\": [0], \"part\": \"\", "
        "\"term\": \"\", \"left_out\": \"no place\"}]}",
        NULL);
    const size_t head = n[0]; /* the figures of two empty tensors belong into the record */
    n[0] = rank_file(file[0], 0, "high", x, 0, 3);
    ar_sketch none;
    cr_assert_ok(ar_sketch_init(&none, AR_F32, 1, (size_t[]){0}));
    unsigned char figures[2][128];
    const size_t bytes = ar_sketch_bytes(&none);
    cr_assert(bytes <= sizeof figures[0] && head > n[0]);
    const size_t rest = head - n[0] - 16 + 2 * bytes;
    unsigned char *record = file[0] + n[0];
    for (int k = 0; k < 2; k++) {
        ar_sketch_encode(figures[k], &none);
        memcpy(file[0] + head + (size_t)k * bytes, figures[k], bytes);
    }
    const uint64_t hash = ar_sketch_hash(record + 16, rest);
    for (int i = 0; i < 8; i++) {
        record[i] = (unsigned char)(rest >> 8 * i);
        record[8 + i] = (unsigned char)(hash >> 8 * i);
    }
    ar_sketch_fini(&none);
    write_rank(0, file[0], n[0] + 16 + rest);
    write_rank(1, file[1], n[1]);
    ar_sketch_run *run = NULL;
    cr_assert_ok(ar_sketch_run_open(&run, folder));
    cr_assert_eq(ar_sketch_run_count(run), 3);
    const ar_sketch_tensor *t[3] = {ar_sketch_run_tensor(run, 0), ar_sketch_run_tensor(run, 1),
                                    ar_sketch_run_tensor(run, 2)};
    cr_expect(strcmp(t[0]->left_out, "the ranks have 120 of 240 elements") == 0 && !t[0]->by_run, "%s", t[0]->left_out);
    cr_expect(strcmp(t[1]->left_out, "1 of 2 ranks have step 2") == 0 && !t[1]->by_run, "%s", t[1]->left_out);
    cr_expect(strcmp(t[2]->left_out, "no place") == 0 && t[2]->by_run, "%s", t[2]->left_out);
    ar_sketch_run_close(run);
}

/* Bytes of a valid file that are changed, cut or written twice, with a hash that fits: an error or a run, and no fault that
 * a sanitizer sees. */
Test(sketch_format, changed_files_are_read_or_refused, .timeout = 120)
{
    float x[ROWS * COLUMNS];
    fuzz_input valid = fuzz_input_of(16384), changed = fuzz_input_of(16384);
    fill(x);
    valid.n = rank_file(valid.bytes, 0, "all", x, 0, ROWS);
    write_rank(1, valid.bytes, rank_file(valid.bytes, 1, "all", x, 0, ROWS));
    valid.n = rank_file(valid.bytes, 0, "all", x, 0, ROWS);
    uint64_t seed = 1;
    size_t read = 0;
    for (int round = 0; round < 3000; round++) {
        fuzz_copy(&changed, &valid);
        for (size_t k = fuzz_below(&seed, 4); k-- > 0;)
            changed.bytes[32 + fuzz_below(&seed, changed.n - 32)] = (unsigned char)fuzz_below(&seed, 256);
        if (fuzz_below(&seed, 4) == 0)
            changed.n = 32 + fuzz_below(&seed, changed.n - 32);
        if (fuzz_below(&seed, 4) == 0)
            fuzz_splice(&changed, 40 + fuzz_below(&seed, 200), fuzz_below(&seed, 8), "-1e99[{", fuzz_below(&seed, 8));
        const size_t rest = changed.n - 32;
        const uint64_t hash = ar_sketch_hash(changed.bytes + 32, rest);
        for (int i = 0; i < 8; i++) {
            changed.bytes[16 + i] = (unsigned char)(rest >> 8 * i);
            changed.bytes[24 + i] = (unsigned char)(hash >> 8 * i);
        }
        write_rank(0, changed.bytes, changed.n);
        ar_sketch_run *run = NULL;
        read += ar_sketch_run_open(&run, folder) == AR_OK;
        ar_sketch_run_close(run);
    }
    cr_expect(read > 100 && read < 2900, "%zu of 3,000 are read", read);
    free(valid.bytes);
    free(changed.bytes);
}
