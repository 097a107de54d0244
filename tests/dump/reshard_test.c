/* SPDX-License-Identifier: Apache-2.0 */
/* Resharding by the library: tensors of unusual shapes and dtypes, sums of partial parts, what is told on the way. */

#include <limits.h>

#include "anyrank/reshard.h"
#include "ref/io/file.h"
#include "tests/support/folder.h"

static const char config[] = "{\"model_type\": \"llama\", \"vocab_size\": 6, \"hidden_size\": 4, "
                             "\"intermediate_size\": 8, \"num_hidden_layers\": 1, \"num_attention_heads\": 2, "
                             "\"num_key_value_heads\": 2, \"tie_word_embeddings\": true}";

TestSuite(reshard, .init = folder_begin, .fini = folder_end);

static void write_text(const char *path, const char *text)
{
    cr_assert_ok(ari_file_write(path, text, strlen(text)));
}

typedef struct told {
    char notes[2048];
    double last;
    bool falls;
    size_t files, tensors;
} told;

static void on_note(void *user, const char *text)
{
    told *t = user;
    const size_t n = strlen(t->notes);
    snprintf(t->notes + n, sizeof t->notes - n, "%s\n", text);
}

static void on_progress(void *user, double fraction, const char *what)
{
    told *t = user;
    (void)what;
    t->falls = t->falls || fraction < t->last;
    t->last = fraction;
}

static void on_file(void *user, const ar_reshard_file *f)
{
    told *t = user;
    t->files++;
    t->tensors += f->tensors;
}

static ar_reshard_options request(const char *in, const char *out, told *t)
{
    return (ar_reshard_options){
        .in = in, .out = out, .note = on_note, .progress = on_progress, .file = on_file, .user = t};
}

Test(reshard, unusual_tensors_go_there_and_back)
{
    static const unsigned char bytes[256] = {1, 2, 3, 250, 251, 252};
    static const ar_st_tensor tensors[] = {
        {"f4", AR_F4, 2, {3, 4}, bytes},        {"scalar", AR_F64, 0, {0}, bytes},
        {"empty", AR_BF16, 3, {2, 0, 5}, NULL}, {"six", AR_U8, 6, {1, 2, 3, 2, 1, 2}, bytes},
        {"complex", AR_C64, 1, {3}, bytes},     {"model.norm.weight.step", AR_I64, 0, {0}, bytes}};
    static const char *const metadata[] = {"format", "pt"};
    told t = {.last = 0}, back = {.last = 0};
    ar_reshard_result r;
    cr_assert_eq(mkdir(in_folder("in"), 0777), 0);
    write_text(in_folder("in/config.json"), config);
    cr_assert_ok(ar_st_write(in_folder("in/model.safetensors"), tensors, 6, metadata, 1));
    ar_reshard_options o = request(in_folder("in"), in_folder("ranks"), &t);
    o.tp = o.pp = 1;
    o.dp = 2;
    o.dp_copies = true;
    cr_assert_ok(ar_reshard(&r, &o));
    cr_expect_eq(r.tensors, 6u);
    cr_expect_eq(r.files, 2u);
    cr_expect_eq(r.bytes, 2 * (6u + 8 + 0 + 24 + 24 + 8));
    cr_expect_eq(r.largest_tensor, 24u);
    cr_expect(strstr(t.notes, "3 tensors that the config does not have, copied whole: 'complex', 'f4', 'six'"), "%s",
              t.notes);
    cr_expect(!t.falls && t.last == 1.0, "progress ends at %g", t.last);
    o = request(in_folder("ranks"), in_folder("out"), &back);
    cr_assert_ok(ar_reshard(&r, &o));
    cr_expect_eq(back.files, 2u); /* the scalar that belongs to a parameter is the optimizer's */
    cr_expect_eq(back.tensors, 6u);
    OWNED(ar_st_close) ar_st_file *f = NULL;
    cr_assert_ok(ar_st_open(&f, in_folder("out/model.safetensors")));
    for (int i = 0; i < 5; i++) {
        const ar_st_entry *e = ar_st_find(f, tensors[i].name);
        cr_assert_not_null(e, "%s", tensors[i].name);
        cr_expect(e->dtype == tensors[i].dtype && e->ndim == tensors[i].ndim);
        cr_expect_arr_eq(e->data, bytes, e->bytes, "%s", e->name);
    }
}

Test(reshard, a_sum_of_parts_is_made_whole_and_told)
{
    const size_t shape[1] = {3};
    cr_assert_eq(mkdir(in_folder("in"), 0777), 0);
    for (int rank = 0; rank < 2; rank++) {
        float part[3] = {1.0f + (float)rank, 2.0f, -3.0f * (float)rank};
        ar_tensor local;
        ar_layout layout;
        cr_assert_ok(ar_tensor_view(&local, AR_F32, 1, shape, (ar_buf){part}));
        cr_assert_ok(ar_layout_replicate(&layout, 1, shape, 0, 1));
        const ar_dump_value value = {"w", AR_F32, &local, &layout, "tp"};
        const ar_dump_place place = {.rank = rank, .world = 2, .mesh = {1, {{"tp", 2}}}, .at = {rank}};
        cr_assert_ok(ar_dump_write(in_folder("in"), &place, &value, 1, NULL, 0));
    }
    told t = {.last = 0};
    ar_reshard_result r;
    OWNED(ar_st_close) ar_st_file *f = NULL;
    const ar_reshard_options o = request(in_folder("in"), in_folder("out"), &t);
    cr_assert_ok(ar_reshard(&r, &o));
    cr_expect_str_eq(t.notes, "1 tensor summed over the ranks' parts: 'w'\n");
    cr_assert_ok(ar_st_open(&f, in_folder("out/model.safetensors")));
    const float sum[3] = {3.0f, 4.0f, -3.0f};
    cr_expect_arr_eq(ar_st_find(f, "w")->data, sum, sizeof sum);
}

/* [3, 4, 4] in four parts of [3, 2, 2]: no two dimensions can be walked as one. */
Test(reshard, parts_of_three_dimensions_are_put_together)
{
    const size_t full[3] = {3, 4, 4}, part[3] = {3, 2, 2};
    cr_assert_eq(mkdir(in_folder("in"), 0777), 0);
    for (int rank = 0; rank < 4; rank++) {
        const size_t row = (size_t)rank / 2 * 2, column = (size_t)rank % 2 * 2;
        float value[12];
        for (size_t i = 0; i < 12; i++) {
            const size_t element = i / 4 * 16 + (row + i / 2 % 2) * 4 + column + i % 2;
            value[i] = (float)element;
        }
        ar_tensor local;
        ar_layout layout = {.ndim = 3, .shape = {3, 4, 4}, .nbox = 1, .replicas = 1};
        layout.box[0] = (ar_box){.global = {0, row, column}, .extent = {3, 2, 2}};
        cr_assert_ok(ar_tensor_view(&local, AR_F32, 3, part, (ar_buf){value}));
        const ar_dump_value one = {"w", AR_F32, &local, &layout, NULL};
        const ar_dump_place place = {.rank = rank, .world = 4};
        cr_assert_ok(ar_dump_write(in_folder("in"), &place, &one, 1, NULL, 0));
    }
    told t = {.last = 0};
    ar_reshard_result r;
    OWNED(ar_st_close) ar_st_file *f = NULL;
    const ar_reshard_options o = request(in_folder("in"), in_folder("out"), &t);
    cr_assert_ok(ar_reshard(&r, &o));
    cr_assert_ok(ar_st_open(&f, in_folder("out/model.safetensors")));
    const ar_st_entry *w = ar_st_find(f, "w");
    cr_assert(w && w->count == 48 && memcmp(w->shape, full, sizeof full) == 0);
    for (size_t i = 0; i < 48; i++) {
        float value;
        memcpy(&value, (const char *)w->data + i * sizeof value, sizeof value);
        cr_expect_eq(value, (float)i, "element %zu is %g", i, (double)value);
    }
}

Test(reshard, a_transposed_and_packed_dump_becomes_the_configs_layout)
{
    /* [in, out] in the files, rows interleaved over two ranks by the mapping's box: the boxes have strides */
    static const unsigned char a[4] = {0, 2, 4, 6}, b[4] = {1, 3, 5, 7};
    static const char *const map =
        "{\"version\": 1, \"mesh\": [[\"tp\", 2]], \"files\": \"part{tp}.safetensors\", \"tensors\": [{\"match\": "
        "\"t\", \"shard\": {\"tp\": 0}, \"transpose\": true, \"rename\": \"w\"}]}";
    const ar_st_tensor one = {"t", AR_U8, 2, {2, 2}, a}, two = {"t", AR_U8, 2, {2, 2}, b};
    cr_assert_eq(mkdir(in_folder("in"), 0777), 0);
    cr_assert_ok(ar_st_write(in_folder("in/part0.safetensors"), &one, 1, NULL, 0));
    cr_assert_ok(ar_st_write(in_folder("in/part1.safetensors"), &two, 1, NULL, 0));
    write_text(in_folder("map.json"), map);
    told t = {.last = 0};
    ar_reshard_result r;
    OWNED(ar_st_close) ar_st_file *f = NULL;
    ar_reshard_options o = request(in_folder("in"), in_folder("out"), &t);
    o.map = in_folder("map.json");
    cr_assert_ok(ar_reshard(&r, &o));
    cr_assert_ok(ar_st_open(&f, in_folder("out/model.safetensors")));
    const ar_st_entry *w = ar_st_find(f, "w");
    cr_assert_not_null(w);
    cr_expect_eq(w->count, 8u);
    OWNED(ar_dump_close) ar_dump *d = NULL;
    const ar_dump_options with = {.map = o.map};
    unsigned char full[8];
    cr_assert_ok(ar_dump_open(&d, in_folder("in"), &with));
    cr_assert_ok(ar_dump_read(ar_dump_find(d, "w"), 0, 8, full));
    cr_expect_arr_eq(w->data, full, 8);
}

Test(reshard, nothing_is_written_through_a_link)
{
    static const float norm[] = {1, 2, 3, 4};
    static const ar_st_tensor tensor = {"model.norm.weight", AR_F32, 1, {4}, norm};
    told t = {.last = 0};
    ar_reshard_result r;
    OWNED(ar_st_close) ar_st_file *f = NULL;
    cr_assert_eq(mkdir(in_folder("in"), 0777), 0);
    write_text(in_folder("in/config.json"), config);
    cr_assert_ok(ar_st_write(in_folder("in/model.safetensors"), &tensor, 1, NULL, 0));
    ar_reshard_options o = request(in_folder("in"), in_folder("out"), &t);
    o.tp = 2;
    cr_assert_ok(ar_reshard(&r, &o));
    cr_assert_eq(unlink(in_folder("out/rank-00000.safetensors")), 0);
    cr_assert_eq(symlink(in_folder("in/model.safetensors"), in_folder("out/rank-00000.safetensors")), 0);
    o = request(in_folder("in"), in_folder("out"), &t);
    o.tp = 2;
    cr_expect_refused(ar_reshard(&r, &o), AR_ERR_ARG, "holds a link ('rank-00000.safetensors')");
    cr_assert_ok(ar_st_open(&f, in_folder("in/model.safetensors")));
    cr_expect_null(ar_st_metadata(f, "ANYRANK_PLACEMENT"), "the input is a rank's file now");
}

Test(reshard, an_input_without_tensors_is_none)
{
    told t = {.last = 0};
    ar_reshard_result r;
    cr_assert_eq(mkdir(in_folder("in"), 0777), 0);
    cr_assert_ok(ar_st_write(in_folder("in/model.safetensors"), NULL, 0, NULL, 0));
    const ar_reshard_options o = request(in_folder("in"), in_folder("out"), &t);
    cr_expect_refused(ar_reshard(&r, &o), AR_ERR_DATA, "none of its files holds a tensor");
    cr_expect_eq(access(in_folder("out"), F_OK), -1, "a folder of nothing was made");
}

Test(reshard, sizes_that_no_output_has_are_refused_at_once)
{
    told t = {.last = 0};
    ar_reshard_result r;
    const ar_reshard_options none = request("none", in_folder("out"), &t);
    const struct {
        int tp, dp, pp;
        size_t pad;
        const char *says;
    } rows[] = {{.pp = -1, .says = "extents are at least 1"},
                {.tp = INT_MAX, .dp = INT_MAX, .pp = INT_MAX, .says = "more than 65536 ranks"},
                {.tp = 65536, .pp = 65536, .says = "more than 65536 ranks"}, /* of whose product an int has 0 */
                {.pad = SIZE_MAX, .says = "of at most 1048576"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        ar_reshard_options o = none;
        o.tp = rows[i].tp, o.dp = rows[i].dp, o.pp = rows[i].pp, o.pad_vocab = rows[i].pad;
        cr_expect_refused(ar_reshard(&r, &o), AR_ERR_ARG, rows[i].says);
    }
}

Test(reshard, a_journal_of_anybodys_is_read_with_care)
{
    static const char *const journals[] = {"", "[]", "{}", "{\"request\": {}, \"files\": []}",
                                           "{\"request\": {\"tp\": \"x\"}, \"files\": {}}"};
    const ar_st_tensor one = {"t", AR_U8, 1, {2}, "ab"};
    ar_reshard_result r;
    told t = {.last = 0};
    cr_assert_ok(ar_st_write(in_folder("in.safetensors"), &one, 1, NULL, 0));
    cr_assert_eq(mkdir(in_folder("out"), 0777), 0);
    for (size_t i = 0; i < sizeof journals / sizeof *journals; i++) {
        const ar_reshard_options o = request(in_folder("in.safetensors"), in_folder("out"), &t);
        write_text(in_folder("out/.anyrank-reshard.json"), journals[i]);
        const ar_status st = ar_reshard(&r, &o);
        cr_expect(st == AR_ERR_FORMAT || st == AR_ERR_ARG, "journal %zu: %s", i, ar_error_message());
    }
}
