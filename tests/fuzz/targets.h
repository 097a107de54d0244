/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What libFuzzer drives (tests/fuzz/run.sh) and the tests replay (tests/io/io_fuzz_main.c): each target takes any bytes
 * as one of the files that others write, or as what comes over a connection. It reads them or refuses them with a
 * documented error, and then touches all of what was read, so that a wrong pointer or length meets the sanitizer. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#include "anyrank/config.h"
#include "anyrank/plan.h"
#include "ref/io/file.h"
#include "ref/io/safetensors.h"
#include "ref/io/safetensors_private.h"
#include "ref/models/plan_private.h"
#include "ref/pipeline/schedule_private.h"
#include "tests/support/temporary.h"
#include "verify/read/dump.h"
#include "verify/read/dump_private.h"
#include "verify/read/placement.h"

#define FUZZ_MAX_ELEMENTS 65536

static inline void fuzz_expect(bool holds, const char *what)
{
    if (holds)
        return;
    fprintf(stderr, "fuzz: %s: %s\n", what, ar_error_message());
    abort();
}

/* An error of the file, and one that says something. */
static inline void fuzz_expect_error(ar_status st)
{
    fuzz_expect(st == AR_ERR_FORMAT || st == AR_ERR_UNSUPPORTED || st == AR_ERR_OVERFLOW || st == AR_ERR_CONFIG ||
                    st == AR_ERR_DATA || st == AR_ERR_DTYPE || st == AR_ERR_SHAPE || st == AR_ERR_IO,
                "an undocumented error");
    fuzz_expect(ar_error_message()[0] != '\0', "an error without a message");
}

/* What a refusal of a safetensors file begins with, and a colon: the names of the format's own reader. */
static const char *const fuzz_rules[] = {
    "HeaderTooSmall", "HeaderTooLarge",    "InvalidHeaderLength", "InvalidHeader",   "InvalidHeaderDeserialization",
    "InvalidOffset",  "TensorInvalidInfo", "ValidationOverflow",  "MisalignedSlice", "MetadataIncompleteBuffer"};
enum { FUZZ_RULES = sizeof fuzz_rules / sizeof *fuzz_rules };

/* The number of the rule that the message names; FUZZ_RULES: none. */
static inline size_t fuzz_rule(void)
{
    size_t i = 0;
    for (; i < FUZZ_RULES; i++) {
        const size_t n = strlen(fuzz_rules[i]);
        if (strncmp(ar_error_message(), fuzz_rules[i], n) == 0 && ar_error_message()[n] == ':')
            break;
    }
    return i;
}

/* The input as a file without a folder. */
typedef struct fuzz_file {
    int fd;
    char path[32];
} fuzz_file;

static inline fuzz_file fuzz_file_of(const uint8_t *data, size_t size)
{
    fuzz_file f = {memfd_create("fuzz", MFD_CLOEXEC), ""};
    fuzz_expect(f.fd >= 0 && write(f.fd, data, size) == (ssize_t)size, "no memory for the input");
    snprintf(f.path, sizeof f.path, "/proc/self/fd/%d", f.fd);
    return f;
}

/* Folders of this process, in memory, gone with it. */
typedef struct fuzz_folder {
    char path[64];
    const char *files[3]; /* what is ever put into it */
} fuzz_folder;
static fuzz_folder fuzz_shards = {"", {"model.safetensors.index.json", "s1", "s2"}};
static fuzz_folder fuzz_ranks = {"", {"rank-0.safetensors", "rank-1.safetensors", "rank-1.safetensors"}};

static inline const char *fuzz_in(const fuzz_folder *folder, size_t file, char path[128])
{
    snprintf(path, 128, "%s/%s", folder->path, folder->files[file]);
    return path;
}
static inline void fuzz_remove_folders(void)
{
    const fuzz_folder *const folders[] = {&fuzz_shards, &fuzz_ranks};
    for (size_t k = 0; k < 2; k++) {
        if (folders[k]->path[0] != '\0')
            (void)remove_all(folders[k]->path);
    }
}
/* Whether it is new, and empty. */
static inline bool fuzz_make_folder(fuzz_folder *folder)
{
    if (folder->path[0] != '\0')
        return false;
    snprintf(folder->path, sizeof folder->path, "/dev/shm/anyrank-fuzz-XXXXXX");
    if (mkdtemp(folder->path) == NULL) {
        snprintf(folder->path, sizeof folder->path, "/tmp/anyrank-fuzz-XXXXXX");
        fuzz_expect(mkdtemp(folder->path) != NULL, "no folder");
    }
    atexit(fuzz_remove_folders);
    return true;
}
static inline void fuzz_put(const fuzz_folder *folder, size_t file, const void *data, size_t size)
{
    char path[128];
    FILE *f = fopen(fuzz_in(folder, file, path), "wb");
    fuzz_expect(f != NULL && fwrite(data, 1, size, f) == size && fclose(f) == 0, "cannot write");
}

/* Every byte, and every element as a number. */
static inline void fuzz_use_entry(const ar_st_entry *e)
{
    static double wide[256];
    static float narrow[256];
    volatile unsigned char sink = 0;
    for (size_t k = 0; k < e->bytes; k++)
        sink = ((const unsigned char *)e->data)[k];
    (void)sink;
    for (size_t at = 0; at < e->count && at < FUZZ_MAX_ELEMENTS; at += 256) {
        const size_t n = e->count - at < 256 ? e->count - at : 256;
        const char *data = (const char *)e->data + at * ar_dtype_bytes(e->dtype);
        const ar_status a = ari_values_to_f64(e->dtype, data, n, wide);
        const ar_status b = ari_values_to_f32(e->dtype, data, n, narrow);
        fuzz_expect(a == b && (a == AR_OK || a == AR_ERR_DTYPE), "a conversion failed");
    }
}

static inline int fuzz_safetensors(const uint8_t *data, size_t size)
{
    const fuzz_file file = fuzz_file_of(data, size);
    ar_st_file *f = NULL;
    ar_error_clear();
    const ar_status st = ari_st_open(&f, file.path);
    if (st != AR_OK)
        fuzz_expect(st == AR_ERR_UNSUPPORTED ||
                        (st == AR_ERR_FORMAT &&
                         (fuzz_rule() < FUZZ_RULES || strstr(ar_error_message(), "expected a safetensors file"))),
                    "an undocumented error");
    for (size_t i = 0; st == AR_OK && i < ari_st_tensor_count(f); i++) {
        fuzz_use_entry(ari_st_at(f, i));
        fuzz_expect(ari_st_find(f, ari_st_at(f, i)->name) == ari_st_at(f, i), "an entry is not found by its name");
    }
    if (st == AR_OK)
        (void)ari_st_metadata(f, "format");
    ari_st_close(f);
    close(file.fd);
    return 0;
}

/* The header alone, as of a file with 64 bytes of data: no system call, so many more inputs. */
static inline int fuzz_header(const uint8_t *data, size_t size)
{
    ari_st_header h;
    OWNED(free) char *text = malloc(size + 1);
    fuzz_expect(text != NULL, "no memory");
    memcpy(text, data, size);
    ar_error_clear();
    const ar_status st = ari_st_header_parse(&h, text, size, 64, "fuzz");
    if (st != AR_OK)
        fuzz_expect_error(st);
    for (size_t i = 0; st == AR_OK && i < h.n; i++)
        fuzz_expect(h.items[i].end <= 64 && h.items[i].entry.bytes == h.items[i].end - h.items[i].begin,
                    "an entry beyond the data");
    ari_st_header_free(&h);
    return 0;
}

/* The index of a folder with the shards s1 (tensors a, b) and s2 (c). */
static inline int fuzz_index(const uint8_t *data, size_t size)
{
    static const ar_st_tensor t[] = {{.name = "a", .dtype = AR_U8, .ndim = 1, .shape = {1}, .data = "1"},
                                     {.name = "b", .dtype = AR_U8, .ndim = 1, .shape = {1}, .data = "2"},
                                     {.name = "c", .dtype = AR_U8, .ndim = 1, .shape = {1}, .data = "3"}};
    char path[128];
    if (fuzz_make_folder(&fuzz_shards)) {
        fuzz_expect(ari_st_write(fuzz_in(&fuzz_shards, 1, path), t, 2, NULL, 0) == AR_OK, "cannot write s1");
        fuzz_expect(ari_st_write(fuzz_in(&fuzz_shards, 2, path), t + 2, 1, NULL, 0) == AR_OK, "cannot write s2");
    }
    fuzz_put(&fuzz_shards, 0, data, size);
    OWNED(ari_st_model_close) ar_st_model *m = NULL;
    ar_error_clear();
    const ar_status st = ari_st_model_open(&m, fuzz_shards.path);
    if (st != AR_OK)
        fuzz_expect_error(st);
    for (size_t i = 0; st == AR_OK && i < ari_st_model_count(m); i++)
        fuzz_expect(ari_st_model_find(m, ari_st_model_at(m, i)->name) == ari_st_model_at(m, i),
                    "not found by its name");
    return 0;
}

static inline int fuzz_config(const uint8_t *data, size_t size)
{
    ar_config c;
    ar_error_clear();
    const ar_status st = ar_config_parse(&c, (const char *)data, size, "fuzz");
    if (st != AR_OK)
        fuzz_expect((st == AR_ERR_CONFIG || st == AR_ERR_FORMAT) && ar_error_message()[0], "an undocumented error");
    else
        fuzz_expect(c.kv_heads > 0 && c.heads % c.kv_heads == 0 && c.head_dim > 0 && c.layers > 0 && c.vocab > 0 &&
                        c.ffn > 0 && c.hidden > 0 && c.max_positions > 0 &&
                        (!c.rope.kind || ar_rope_dim(&c.rope, c.head_dim) % 2 == 0) &&
                        memchr(c.name, 0, sizeof c.name) != NULL,
                    "an inconsistent config was accepted");
    for (size_t i = 0; st == AR_OK && i < c.unknown_keys && i < AR_CONFIG_NOTES; i++)
        fuzz_expect(memchr(c.unknown[i], 0, sizeof c.unknown[i]) != NULL, "the name of an unknown key has no end");
    return 0;
}

/* What was read is asked of a model: it fits or is refused. */
static inline int fuzz_plan(const uint8_t *data, size_t size)
{
    static const ar_config c = {.arch = AR_ARCH_LLAMA, .name = "fuzz", .layers = 2, .hidden = 8, .final_norm = true};
    SCOPED(ar_plan_fini) ar_plan p = {0};
    ar_error_clear();
    const ar_status st = ar_plan_parse(&p, (const char *)data, size, "fuzz");
    if (st != AR_OK) {
        fuzz_expect_error(st);
        return 0;
    }
    for (int sequence = 0; sequence < 2; sequence++) {
        ar_error_clear();
        const ar_status fits = ari_plan_check(&p, &c, sequence);
        if (fits != AR_OK && fits != AR_ERR_NOT_FOUND && fits != AR_ERR_ARG)
            fuzz_expect_error(fits);
        fuzz_expect(fits == AR_OK || ar_error_message()[0] != '\0', "an error without a message");
    }
    return 0;
}

/* What was read is copied and gone through: it is legal, or was refused. */
static inline int fuzz_schedule(const uint8_t *data, size_t size)
{
    static const ar_pp_times times[AR_MAX_STAGES];
    static ar_pp_run run;
    const ar_pp_operation *lists[AR_MAX_STAGES];
    size_t counts[AR_MAX_STAGES];
    OWNED(ari_pipeline_schedule_destroy) ar_pipeline_schedule *s = NULL, *copy = NULL;
    ar_error_clear();
    const ar_status st = ari_pipeline_schedule_parse(&s, (const char *)data, size, "fuzz");
    if (st != AR_OK) {
        fuzz_expect_error(st);
        return 0;
    }
    const ar_pipeline_shape shape = ari_pipeline_schedule_shape(s);
    for (int r = 0; r < shape.ranks; r++)
        lists[r] = ari_pipeline_schedule_rank(s, r, &counts[r]);
    fuzz_expect(ari_pipeline_schedule_from_lists(&copy, shape, lists, counts) == AR_OK, "what was read is refused");
    fuzz_expect(ari_pipeline_schedule_run(&run, copy, times, NULL, NULL) == AR_OK, "a schedule comes to no end");
    return 0;
}

/* A box lies within the full tensor and within the entry. */
static inline void fuzz_check_box(const ar_dump_box *b, int ndim, const size_t *shape, const ar_st_entry *e)
{
    size_t last = b->offset;
    bool empty = false;
    for (int d = 0; d < ndim; d++) {
        fuzz_expect(b->extent[d] <= shape[d] && b->global[d] <= shape[d] - b->extent[d], "a box outside the tensor");
        empty = empty || b->extent[d] == 0;
        last += b->extent[d] == 0 ? 0 : (b->extent[d] - 1) * b->stride[d];
    }
    fuzz_expect(empty || last < e->count, "a box outside the file's tensor");
}

static const ar_st_entry fuzz_entries[] = {
    {.name = "layers.0.qkv.weight", .dtype = AR_F32, .ndim = 2, .shape = {12, 8}, .count = 96, .bytes = 384},
    {.name = "layers.11.mlp.w13", .dtype = AR_BF16, .ndim = 3, .shape = {2, 3, 5}, .count = 30, .bytes = 60},
    {.name = "norm", .dtype = AR_F32, .ndim = 1, .shape = {7}, .count = 7, .bytes = 28},
    {.name = "loss", .dtype = AR_F64, .count = 1, .bytes = 8},
    {.name = "none", .dtype = AR_U8, .ndim = 2, .shape = {0, 1 << 30}},
};
#define FUZZ_ENTRIES (sizeof fuzz_entries / sizeof fuzz_entries[0])

static inline void fuzz_apply(ari_map *m, const ari_map_source *source)
{
    ari_piece *t = NULL;
    size_t n = 0;
    ar_error_clear();
    const ar_status st = ari_map_apply(m, source, &t, &n);
    if (st != AR_OK)
        fuzz_expect_error(st);
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < t[i].boxes; k++)
            fuzz_check_box(&t[i].box[k], t[i].ndim, t[i].shape, source->entry);
}

static inline int fuzz_map(const uint8_t *data, size_t size)
{
    static const char *const files[] = {"rank-0.safetensors", "mp_rank_01_002.safetensors", "dp1/tp0", "x"};
    ari_map *m = NULL;
    ar_error_clear();
    const ar_status st = ari_map_parse(&m, (const char *)data, size, "fuzz");
    if (st != AR_OK) {
        fuzz_expect_error(st);
        return 0;
    }
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        int rank = -1;
        ar_error_clear();
        const ar_status found = ari_map_rank_of(m, files[i], &rank);
        if (found != AR_OK)
            fuzz_expect_error(found);
    }
    for (size_t i = 0; i < FUZZ_ENTRIES; i++) {
        for (int rank = -1; rank < 4; rank++) {
            fuzz_apply(m, &(ari_map_source){.rank = rank, .entry = &fuzz_entries[i]});
            fuzz_apply(m, &(ari_map_source){.rank = rank, .entry = &fuzz_entries[i], .is_full = true});
        }
    }
    ari_map_free(m);
    return 0;
}

/* Two texts, the second from the first line on that is "---". */
static inline int fuzz_placement(const uint8_t *data, size_t size)
{
    char *text = calloc(size + 1, 1), *own = NULL;
    ari_placement p;
    fuzz_expect(text != NULL, "no memory");
    memcpy(text, data, size);
    own = strstr(text, "\n---\n");
    if (own != NULL) {
        *own = '\0';
        own += 5;
    }
    ar_error_clear();
    const ar_status st = ari_placement_parse(&p, text[0] == '\0' ? NULL : text, own, "fuzz");
    if (st != AR_OK)
        fuzz_expect_error(st);
    for (size_t i = 0; st == AR_OK && i < p.tensors; i++)
        for (size_t k = 0; k < FUZZ_ENTRIES; k++) {
            ar_dump_box *box = NULL;
            size_t boxes = 0;
            ar_error_clear();
            const ar_status fits = ari_placed_resolve(&box, &boxes, &p.arena, &p.tensor[i], &fuzz_entries[k], "fuzz");
            if (fits != AR_OK)
                fuzz_expect_error(fits);
            for (size_t b = 0; fits == AR_OK && p.tensor[i].has_shape && b < boxes; b++)
                fuzz_check_box(&box[b], p.tensor[i].ndim, p.tensor[i].shape, &fuzz_entries[k]);
        }
    ari_placement_fini(&p);
    free(text);
    return 0;
}

static inline int fuzz_npy(const uint8_t *data, size_t size)
{
    const fuzz_file file = fuzz_file_of(data, size);
    ari_npy *f = NULL;
    ar_error_clear();
    const ar_status st = ari_npy_open(&f, file.path);
    if (st != AR_OK)
        fuzz_expect_error(st);
    else {
        fuzz_use_entry(&f->entry);
        fuzz_check_box(&f->box, f->entry.ndim, f->entry.shape, &f->entry);
    }
    ari_npy_close(f);
    close(file.fd);
    return 0;
}

/* The header of rank 0's file, with 64 bytes of data, in a folder of two ranks. */
static inline int fuzz_dump(const uint8_t *data, size_t size)
{
    static const char own[] =
        "{\"version\":1,\"rank\":1,\"world\":2,\"mesh\":[[\"tp\",2]],\"at\":[1],\"tensors\":{\"w\":"
        "{\"shape\":[4,2],\"boxes\":[{\"global\":[2,0],\"local\":[0,0],\"extent\":[2,2]}]}}}";
    static const char *const meta[] = {ARI_DUMP_PLACEMENT, own};
    static const float w[4] = {1, 2, 3, 4};
    const ar_st_tensor t[] = {{.name = "norm", .dtype = AR_F32, .ndim = 1, .shape = {4}, .data = w},
                              {.name = "w", .dtype = AR_F32, .ndim = 2, .shape = {2, 2}, .data = w}};
    char path[128];
    if (fuzz_make_folder(&fuzz_ranks))
        fuzz_expect(ari_st_write(fuzz_in(&fuzz_ranks, 1, path), t, 2, meta, 1) == AR_OK, "cannot write rank 1");
    char *file = calloc(1, 8 + size + 64);
    const uint64_t length = size;
    fuzz_expect(file != NULL, "no memory");
    memcpy(file, &length, 8);
    memcpy(file + 8, data, size);
    fuzz_put(&fuzz_ranks, 0, file, 8 + size + 64);
    free(file);
    OWNED(ar_dump_close) ar_dump *d = NULL;
    ar_error_clear();
    const ar_status st = ar_dump_open(&d, fuzz_ranks.path, NULL);
    if (st != AR_OK)
        fuzz_expect_error(st);
    for (size_t i = 0; st == AR_OK && i < ar_dump_count(d); i++) {
        static double values[1024];
        bool found = false;
        ar_dump_disagreement which;
        const ar_dump_tensor *full = ar_dump_at(d, i);
        const size_t n = full->count < 1024 ? full->count : 1024;
        ar_error_clear();
        ar_status read = ari_dump_read_f64(full, full->count - n, n, values);
        if (read != AR_OK)
            fuzz_expect_error(read);
        if (full->count <= FUZZ_MAX_ELEMENTS && (read = ar_dump_replicas(full, &found, &which)) != AR_OK)
            fuzz_expect_error(read);
        fuzz_expect(ar_dump_find(d, full->name) == full, "a tensor is not found by its name");
    }
    return 0;
}

typedef struct fuzz_target {
    const char *name;
    int (*run)(const uint8_t *data, size_t size);
} fuzz_target;
static const fuzz_target fuzz_targets[] = {{"safetensors", fuzz_safetensors},
                                           {"header", fuzz_header},
                                           {"index", fuzz_index},
                                           {"config", fuzz_config},
                                           {"plan", fuzz_plan},
                                           {"schedule", fuzz_schedule},
                                           {"map", fuzz_map},
                                           {"placement", fuzz_placement},
                                           {"npy", fuzz_npy},
                                           {"dump", fuzz_dump}};
#define FUZZ_TARGETS (sizeof fuzz_targets / sizeof fuzz_targets[0])
