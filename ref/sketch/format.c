/* SPDX-License-Identifier: Apache-2.0 */
#include <jansson.h>
#include <math.h>
#include <string.h>

#include "anyrank/sketch.h"
#include "ref/core/float_bits.h"
#include "ref/core/size.h"
#include "ref/core/tensor_private.h"
#include "ref/core/text.h"
#include "ref/io/file.h"
#include "ref/io/json.h"

enum { WORDS = 12, MAGIC = 16, HEAD = 24, MOST_RANKS = 1 << 20 };
#define MOST_BYTES ((size_t)1 << 40) /* of a rank's file */

/* --- figures ------------------------------------------------------------------------------------------------------ */

/* What of a sketch is written: the blocks that are not zero, a bit for each, and the rows from the first that is not to
 * the last. A rank has few of both. */
typedef struct extent {
    uint64_t blocks;
    size_t written; /* blocks */
    size_t row, rows;
} extent;

static extent extent_of(const ar_sketch *s)
{
    extent e = {0};
    for (size_t i = 0; i < s->blocks * AR_SKETCH_BUCKETS; i++)
        e.blocks |= (uint64_t)(ari_bits64(s->bucket[i]) != 0) << i / AR_SKETCH_BUCKETS;
    for (size_t b = 0; b < s->blocks; b++)
        e.written += e.blocks >> b & 1;
    size_t end = s->rows;
    while (end > 0 && s->row_digest[end - 1] == 0)
        end--;
    while (e.row < end && s->row_digest[e.row] == 0)
        e.row++;
    e.rows = end - e.row;
    return e;
}

static size_t bytes_of(const extent *e)
{
    return (WORDS + e->written * AR_SKETCH_BUCKETS) * sizeof(uint64_t) + e->rows * sizeof(uint32_t);
}

size_t ar_sketch_bytes(const ar_sketch *s)
{
    const extent e = extent_of(s);
    return bytes_of(&e);
}

static void put(unsigned char *out, uint64_t x, int bytes)
{
    for (int i = 0; i < bytes; i++)
        out[i] = (unsigned char)(x >> 8 * i);
}

static uint64_t get(const unsigned char *data, int bytes)
{
    uint64_t x = 0;
    for (int i = 0; i < bytes; i++)
        x |= (uint64_t)data[i] << 8 * i;
    return x;
}

void ar_sketch_encode(unsigned char *out, const ar_sketch *s)
{
    const extent e = extent_of(s);
    const uint64_t word[WORDS] = {s->digest,
                                  s->count,
                                  s->zeros,
                                  s->nan,
                                  s->inf,
                                  s->first,
                                  s->last,
                                  ari_bits64(s->sum),
                                  ari_bits64(s->sum_squares),
                                  ari_bits64(s->max_abs),
                                  e.blocks,
                                  (uint64_t)e.row | (uint64_t)e.rows << 32};
    for (size_t i = 0; i < WORDS; i++, out += sizeof *word)
        put(out, word[i], sizeof *word);
    for (size_t i = 0; i < s->blocks * AR_SKETCH_BUCKETS; i++) {
        if (e.blocks >> i / AR_SKETCH_BUCKETS & 1) {
            put(out, ari_bits64(s->bucket[i]), sizeof(double));
            out += sizeof(double);
        }
    }
    for (size_t i = 0; i < e.rows; i++, out += sizeof(uint32_t))
        put(out, s->row_digest[e.row + i], sizeof(uint32_t));
}

ar_status ar_sketch_decode(ar_sketch *s, const unsigned char *data, size_t n, size_t *used)
{
    uint64_t word[WORDS] = {0};
    for (size_t i = 0; i < WORDS && (i + 1) * sizeof *word <= n; i++)
        word[i] = get(data + i * sizeof *word, sizeof *word);
    extent e = {.blocks = word[10], .row = (size_t)(word[11] & UINT32_MAX), .rows = (size_t)(word[11] >> 32)};
    for (size_t b = 0; b < s->blocks; b++)
        e.written += e.blocks >> b & 1;
    const bool beyond = s->blocks < 64 && e.blocks >> s->blocks != 0;
    if (n < WORDS * sizeof *word || beyond || e.row > s->rows || e.rows > s->rows - e.row || bytes_of(&e) > n)
        return ar_error_set(AR_ERR_FORMAT, "sketch: its figures end too early, or are of another tensor");
    *used = bytes_of(&e);
    data += sizeof word;
    s->digest = word[0];
    s->count = word[1];
    s->zeros = word[2];
    s->nan = word[3];
    s->inf = word[4];
    s->first = word[5];
    s->last = word[6];
    s->sum = ari_float64(word[7]);
    s->sum_squares = ari_float64(word[8]);
    s->max_abs = ari_float64(word[9]);
    for (size_t i = 0; i < s->blocks * AR_SKETCH_BUCKETS; i++) {
        const bool written = e.blocks >> i / AR_SKETCH_BUCKETS & 1;
        s->bucket[i] = written ? ari_float64(get(data, sizeof(double))) : 0.0;
        data += written ? sizeof(double) : 0;
    }
    for (size_t i = 0; i < e.rows; i++, data += sizeof(uint32_t))
        s->row_digest[e.row + i] = (uint32_t)get(data, sizeof(uint32_t));
    return AR_OK;
}

uint64_t ar_sketch_hash(const unsigned char *data, size_t n)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < n; i += 8)
        hash = (hash ^ get(data + i, n - i < 8 ? (int)(n - i) : 8)) * UINT64_C(0x100000001b3);
    return hash;
}

/* --- a run -------------------------------------------------------------------------------------------------------- */

struct ar_sketch_run {
    ari_arena arena;
    json_t *steps; /* {step: ranks that have its record} */
    json_t *index; /* {"step name": {"tensor": number, "held": {"part term": [digest, rank, copies]}, "term": text}} */
    ar_sketch_tensor *tensor;
    size_t count, room;
    int ranks; /* 0: no record has been read */
};

/* A record of a rank's file. */
typedef struct record {
    const char *path;
    size_t number; /* from 1 */
    json_t *text;
    const unsigned char *figures;
    size_t bytes;
    int rank, step;
    size_t entry; /* which of its tensors is read now */
} record;

static ar_status wrong(const record *r, const char *what)
{
    return ar_error_set(AR_ERR_FORMAT, "%s: record %zu: %s", r->path, r->number, what);
}

/* The empty sketch that a tensor's entry describes. */
static ar_status sketch_of(ar_sketch *s, const record *r, const json_t *entry)
{
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    const json_t *extents = json_object_get(entry, "shape");
    const size_t ndim = json_array_size(extents);
    size_t shape[AR_ST_MAX_DIMS];
    ar_dtype t;
    if (dtype == NULL || !json_is_array(extents) || ndim > AR_ST_MAX_DIMS)
        return wrong(r, "a tensor without \"dtype\", or without a \"shape\" of at most 8 dimensions");
    for (size_t d = 0; d < ndim; d++) {
        const json_t *n = json_array_get(extents, d);
        if (!json_is_integer(n) || json_integer_value(n) < 0)
            return wrong(r, "a tensor whose \"shape\" is no list of sizes");
        shape[d] = (size_t)json_integer_value(n);
    }
    AR_TRY(ari_dtype_parse(&t, dtype));
    return ar_sketch_init(s, t, (int)ndim, shape);
}

/* Adds a tensor that no earlier rank had, and its entry in the index. */
static ar_status tensor_add(ar_sketch_run *run, json_t **slot, const record *r, const json_t *entry, const char *key)
{
    AR_TRY(ARI_GROW_IN(&run->arena, &run->tensor, &run->room, run->count, "a run's sketches"));
    ar_sketch_tensor *t = &run->tensor[run->count];
    *t = (ar_sketch_tensor){.step = r->step, .order = r->entry, .differing = -1, .left_out = ""};
    char *name = NULL;
    AR_TRY(ari_arena_text(&run->arena, &name, json_string_value(json_object_get(entry, "name")), "a tensor's name"));
    t->name = name;
    for (size_t i = 0; i < 2; i++)
        t->samples[i] = (uint32_t)json_integer_value(json_array_get(json_object_get(r->text, "samples"), i));
    AR_TRY(sketch_of(&t->sketch, r, entry));
    *slot = json_pack("{sI s{} ss}", "tensor", (json_int_t)run->count++, "held", "term",
                      json_string_value(json_object_get(entry, "term")));
    if (*slot == NULL || json_object_set_new(run->index, key, *slot) != 0)
        return ar_error_set(AR_ERR_MEMORY, "no memory for the sketches of a run");
    return AR_OK;
}

/* Adds what a rank has to its tensor: other elements, another summand, or a copy, whose digest is held against the
 * first one's. */
static ar_status piece_add(ar_sketch_tensor *t, json_t *slot, const record *r, const json_t *entry, const ar_sketch *s)
{
    const char *part = json_string_value(json_object_get(entry, "part"));
    const char *term = json_string_value(json_object_get(entry, "term"));
    char key[1024];
    if ((size_t)snprintf(key, sizeof key, "%s %s", part, term) >= sizeof key)
        return wrong(r, "a \"part\" of more than 1,000 bytes");
    json_t *held = json_object_get(slot, "held"), *first = json_object_get(held, key);
    if (first != NULL) {
        json_t *copies = json_array_get(first, 1);
        const int n = (int)json_integer_value(copies) + 1;
        (void)json_integer_set(copies, n);
        t->copies = n > t->copies ? n : t->copies;
        if ((uint64_t)json_integer_value(json_array_get(first, 0)) == s->digest || t->differing >= 0)
            return AR_OK;
        ar_sketch_difference d = {.norm = (double)NAN};
        t->differing = r->rank;
        if (json_object_size(held) == 1) /* the first copy is all that has been added */
            AR_TRY(ar_sketch_compare(&d, &t->sketch, s));
        t->copy_norm = d.norm;
        return AR_OK;
    }
    t->copies = t->copies > 0 ? t->copies : 1;
    if (json_object_set_new(held, key, json_pack("[Ii]", (json_int_t)s->digest, 1)) != 0)
        return ar_error_set(AR_ERR_MEMORY, "no memory for the sketches of a run");
    t->tiny += (size_t)json_integer_value(json_object_get(entry, "tiny"));
    const bool summand = strcmp(term, json_string_value(json_object_get(slot, "term"))) != 0;
    t->summed = t->summed || summand;
    return ar_sketch_merge(&t->sketch, s, summand);
}

static ar_status entry_read(ar_sketch_run *run, const record *r, const json_t *entry, size_t *offset)
{
    const char *name = json_string_value(json_object_get(entry, "name"));
    const char *left_out = json_string_value(json_object_get(entry, "left_out"));
    if (name == NULL || !json_is_string(json_object_get(entry, "part")) ||
        !json_is_string(json_object_get(entry, "term")))
        return wrong(r, "a tensor without \"name\", \"part\" or \"term\"");
    ARI_ENDED(ar_sketch_fini) ar_sketch s = {0};
    AR_TRY(sketch_of(&s, r, entry));
    size_t bytes = 0;
    if (ar_sketch_decode(&s, r->figures + *offset, r->bytes - *offset, &bytes) != AR_OK)
        return wrong(r, "its figures end too early, or are of another tensor");
    *offset += bytes;
    char key[1024];
    if ((size_t)snprintf(key, sizeof key, "%d %s", r->step, name) >= sizeof key)
        return wrong(r, "a \"name\" of more than 1,000 bytes");
    json_t *slot = json_object_get(run->index, key);
    if (slot == NULL)
        AR_TRY(tensor_add(run, &slot, r, entry, key));
    ar_sketch_tensor *t = &run->tensor[json_integer_value(json_object_get(slot, "tensor"))];
    if (t->sketch.dtype != s.dtype || t->sketch.ndim != s.ndim ||
        memcmp(t->sketch.shape, s.shape, (size_t)s.ndim * sizeof *s.shape) != 0)
        left_out = "ranks have tensors of other shapes or types under its name";
    if (left_out != NULL && left_out[0] != '\0' && t->left_out[0] == '\0') {
        char *copy = NULL;
        AR_TRY(ari_arena_text(&run->arena, &copy, left_out, "a reason"));
        t->left_out = copy;
        t->by_run = true;
    }
    return t->left_out[0] != '\0' ? AR_OK : piece_add(t, slot, r, entry, &s);
}

static ar_status record_read(ar_sketch_run *run, record *r, int rank)
{
    const json_t *step = json_object_get(r->text, "step"), *world = json_object_get(r->text, "world"),
                 *tensors = json_object_get(r->text, "tensors"), *own = json_object_get(r->text, "rank");
    if (!json_is_integer(step) || !json_is_integer(world) || !json_is_integer(own) || !json_is_array(tensors))
        return wrong(r, "\"step\", \"rank\", \"world\" or \"tensors\" is missing");
    if (json_integer_value(own) != rank || json_integer_value(world) <= rank || json_integer_value(world) > MOST_RANKS)
        return wrong(r, "its \"rank\" is not the file's, or not below its \"world\"");
    r->rank = rank;
    r->step = (int)json_integer_value(step);
    run->ranks = run->ranks > 0 ? run->ranks : (int)json_integer_value(world);
    if (run->ranks != json_integer_value(world))
        return wrong(r, "its \"world\" is another than that of an earlier record");
    size_t offset = 0;
    json_t *entry;
    json_array_foreach(tensors, r->entry, entry) AR_TRY(entry_read(run, r, entry, &offset));
    char key[32];
    snprintf(key, sizeof key, "%d", r->step);
    const json_int_t had = json_integer_value(json_object_get(run->steps, key));
    return json_object_set_new(run->steps, key, json_integer(had + 1)) == 0
               ? AR_OK
               : ar_error_set(AR_ERR_MEMORY, "no memory for the steps of a run");
}

/* The records of a rank's file, up to the last whole one. */
static ar_status file_read(ar_sketch_run *run, const char *path, int rank)
{
    ARI_OWNED unsigned char *data = NULL;
    size_t bytes = 0;
    AR_TRY(ari_file_read(&data, &bytes, path, MOST_BYTES));
    if (bytes < MAGIC || memcmp(data, AR_SKETCH_MAGIC, MAGIC) != 0)
        return ar_error_set(AR_ERR_FORMAT, "%s: does not begin with \"" AR_SKETCH_MAGIC "\"", path);
    record r = {.path = path};
    for (size_t offset = MAGIC; bytes - offset >= HEAD;) {
        const uint64_t rest = get(data + offset, 8), text = get(data + offset + 16, 8);
        const unsigned char *body = data + offset + 16;
        r.number++;
        if (rest > bytes - offset - 16)
            break; /* the run was killed while it wrote */
        if (rest < 8 || text > rest - 8 || ar_sketch_hash(body, (size_t)rest) != get(data + offset + 8, 8)) {
            if (offset + 16 + rest == bytes)
                break;
            return wrong(&r, "its hash is another: the file was changed, or its disk is broken");
        }
        AR_TRY(ari_json_parse(&r.text, (const char *)body + 8, (size_t)text, path));
        r.figures = body + 8 + text;
        r.bytes = (size_t)(rest - 8 - text);
        const ar_status st = record_read(run, &r, rank);
        json_decref(r.text);
        AR_TRY(st);
        offset += 16 + (size_t)rest;
    }
    return AR_OK;
}

/* Reasons why a tensor cannot be compared that only all ranks together show. */
static ar_status judge(ar_sketch_run *run)
{
    for (size_t i = 0; i < run->count; i++) {
        ar_sketch_tensor *t = &run->tensor[i];
        char step[32], why[128] = "";
        snprintf(step, sizeof step, "%d", t->step);
        const json_int_t ranks = json_integer_value(json_object_get(run->steps, step));
        if (t->left_out[0] != '\0')
            continue;
        if (ranks < run->ranks)
            snprintf(why, sizeof why, "%d of %d ranks have step %d", (int)ranks, run->ranks, t->step);
        else if (!t->summed && t->sketch.count != t->sketch.elements)
            snprintf(why, sizeof why, "the ranks have %zu of %zu elements", (size_t)t->sketch.count,
                     t->sketch.elements);
        char *copy = NULL;
        AR_TRY(ari_arena_text(&run->arena, &copy, why, "a reason"));
        t->left_out = copy;
    }
    return AR_OK;
}

static int in_order(const void *a, const void *b)
{
    const ar_sketch_tensor *x = a, *y = b;
    return x->step != y->step ? (x->step > y->step) - (x->step < y->step)
                              : (x->order > y->order) - (x->order < y->order);
}

ar_status ar_sketch_run_open(ar_sketch_run **out, const char *folder)
{
    *out = NULL;
    ar_sketch_run *run = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&run, 1, "a run of sketches"));
    run->steps = json_object();
    run->index = json_object();
    ar_status st = run->steps != NULL && run->index != NULL
                       ? AR_OK
                       : ar_error_set(AR_ERR_MEMORY, "no memory for a run of sketches");
    for (int rank = 0; st == AR_OK && (rank == 0 || rank < run->ranks); rank++) {
        char name[64];
        bool there = false;
        ARI_OWNED char *path = NULL;
        snprintf(name, sizeof name, "rank-%05d.sketch", rank);
        st = ari_file_is_in(&there, folder, name);
        if (st == AR_OK && !there)
            st = ar_error_set(AR_ERR_NOT_FOUND, "%s: has no %s", folder, name);
        if (st == AR_OK)
            st = ari_file_path(&path, folder, name);
        if (st == AR_OK)
            st = file_read(run, path, rank);
    }
    if (st == AR_OK)
        st = judge(run);
    if (st != AR_OK) {
        ar_sketch_run_close(run);
        return st;
    }
    if (run->count > 0)
        qsort(run->tensor, run->count, sizeof *run->tensor, in_order);
    *out = run;
    return AR_OK;
}

void ar_sketch_run_close(ar_sketch_run *run)
{
    if (run == NULL)
        return;
    for (size_t i = 0; i < run->count; i++)
        ar_sketch_fini(&run->tensor[i].sketch);
    json_decref(run->steps);
    json_decref(run->index);
    ari_arena_free(&run->arena);
    free(run);
}

size_t ar_sketch_run_count(const ar_sketch_run *run)
{
    return run->count;
}

const ar_sketch_tensor *ar_sketch_run_tensor(const ar_sketch_run *run, size_t index)
{
    return index < run->count ? &run->tensor[index] : NULL;
}

int ar_sketch_run_ranks(const ar_sketch_run *run)
{
    return run->ranks;
}
