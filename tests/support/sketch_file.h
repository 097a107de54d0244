/* SPDX-License-Identifier: Apache-2.0 */
/* Writes files of sketches (sketch.h) into the test's folder (folder.h), tensor by tensor. */
#pragma once

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "anyrank/sketch.h"
#include "ref/io/file.h"
#include "tests/support/folder.h"

/* A part of a tensor that a rank holds: rows [row, row + rows) of a full tensor of `shape`; all of it where rows is 0. */
typedef struct sketch_part {
    const char *name;
    ar_dtype dtype;
    int ndim;
    size_t shape[2];
    const void *values; /* of the part alone, row-major */
    size_t row, rows;
    const char *part, *term; /* NULL: "all" or by the rows, "" */
    size_t tiny;
    const char *left_out; /* NULL: "" */
} sketch_part;

/* Digests of the samples of records that are written from now on: in their order, and in any; 0: not known. */
static json_int_t sketch_samples[2];

/* A record that is being written: a step of a rank. */
typedef struct sketch_record {
    json_t *text, *tensors;
    unsigned char *figures;
    size_t bytes;
} sketch_record;

static inline sketch_record sketch_record_begin(int rank, int world, int step)
{
    sketch_record r = {.tensors = json_array()};
    r.text = json_pack("{si si si s[] s[II] so}", "step", step, "rank", rank, "world", world, "mesh", "samples",
                       sketch_samples[0], sketch_samples[1], "tensors", r.tensors);
    cr_assert_not_null(r.text);
    return r;
}

static inline void sketch_record_add(sketch_record *r, const sketch_part *p)
{
    ar_sketch s;
    ar_dump_box box = {.extent = {p->shape[0], p->shape[1]}, .stride = {1}, .replicas = 1};
    char part[64];
    if (p->ndim > 1) {
        box.stride[0] = p->shape[1];
        box.stride[1] = 1;
    }
    if (p->rows > 0) {
        box.global[0] = p->row;
        box.extent[0] = p->rows;
    }
    snprintf(part, sizeof part, "%zu+%zu", p->row, p->rows);
    cr_assert_ok(ar_sketch_init(&s, p->dtype, p->ndim, p->shape));
    if (p->left_out == NULL)
        cr_assert_ok(ar_sketch_add(&s, p->values, &box));
    json_t *shape = json_array();
    for (int d = 0; d < p->ndim; d++)
        json_array_append_new(shape, json_integer((json_int_t)p->shape[d]));
    json_array_append_new(
        r->tensors, json_pack("{ss ss so ss ss sI ss}", "name", p->name, "dtype", ar_dtype_name(p->dtype), "shape",
                              shape, "part", p->part != NULL ? p->part : part, "term", p->term != NULL ? p->term : "",
                              "tiny", (json_int_t)p->tiny, "left_out", p->left_out != NULL ? p->left_out : ""));
    const size_t bytes = ar_sketch_bytes(&s);
    r->figures = realloc(r->figures, r->bytes + bytes);
    ar_sketch_encode(r->figures + r->bytes, &s);
    r->bytes += bytes;
    ar_sketch_fini(&s);
}

static inline void word_write(unsigned char *out, uint64_t word)
{
    for (int i = 0; i < 8; i++)
        out[i] = (unsigned char)(word >> 8 * i);
}

/* Appends the record to RUN/rank-NNNNN.sketch in the test's folder, which is made where it is not there. */
static inline void sketch_record_end(sketch_record *r, const char *run, int rank)
{
    char path[256], *text = json_dumps(r->text, JSON_COMPACT);
    const size_t n = strlen(text), rest = 8 + n + r->bytes;
    OWNED(free) unsigned char *data = malloc(16 + rest);
    word_write(data, rest);
    word_write(data + 16, n);
    memcpy(data + 24, text, n);
    if (r->bytes > 0)
        memcpy(data + 24 + n, r->figures, r->bytes);
    word_write(data + 8, ar_sketch_hash(data + 16, rest));
    cr_assert_ok(ari_folder_make(in_folder(run)));
    snprintf(path, sizeof path, "%s/rank-%05d.sketch", in_folder(run), rank);
    FILE *file = fopen(path, "ab");
    cr_assert_not_null(file);
    if (ftell(file) == 0)
        cr_assert_eq(fwrite(AR_SKETCH_MAGIC, 1, 16, file), 16u);
    cr_assert_eq(fwrite(data, 1, 16 + rest, file), 16 + rest);
    cr_assert_eq(fclose(file), 0);
    free(text);
    free(r->figures);
    json_decref(r->text);
    *r = (sketch_record){0};
}

/* A step of a rank with n parts. */
static inline void write_sketches(const char *run, int rank, int world, int step, const sketch_part *parts, size_t n)
{
    sketch_record r = sketch_record_begin(rank, world, step);
    for (size_t i = 0; i < n; i++)
        sketch_record_add(&r, &parts[i]);
    sketch_record_end(&r, run, rank);
}
