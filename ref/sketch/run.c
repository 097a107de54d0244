/* SPDX-License-Identifier: Apache-2.0 */
/* A run of sketches: the records of all ranks' files, put together into full tensors. */
#include <jansson.h>
#include <limits.h>
#include <math.h>
#include <string.h>

#include "anyrank/sketch.h"
#include "ref/core/size.h"
#include "ref/core/tensor_private.h"
#include "ref/core/text.h"
#include "ref/io/file.h"
#include "ref/io/json.h"

enum { MAGIC = 16, HEAD = 24, MOST_RANKS = 1 << 20, MOST_KEY = 1024 };
#define MOST_BYTES ((size_t)1 << 40) /* Maximum size of a rank's file. */
#define MAGIC_STEM "anyrank sketch " /* First bytes of every version of the format. */

/* Figures in a rank's file. */
typedef struct figures {
    int rank;
    size_t offset, bytes;
} figures;

/* The first copy of a part of a tensor's summand. */
typedef struct piece {
    figures figures;
    uint64_t digest;
    int copies;       /* number of ranks that have a copy */
    size_t differing; /* index among the tensor's differing copies; SIZE_MAX: all copies are equal */
    double distance;  /* norm of the differing copy less the first */
} piece;

struct ar_sketch_run {
    ari_arena arena;
    const char *folder;
    json_t *steps; /* {step: number of ranks with a record of it} */
    json_t *index; /* {"step name": {"tensor": number, "pieces": {"part term": number}, "terms": {term: elements}}} */
    ar_sketch_tensor *tensor;
    ar_sketch_copies **differing_copies; /* [count] lists of differing copies by tensor, which may grow */
    size_t *differing_room;              /* [count] */
    size_t count, tensor_room, copies_room, sizes_room;
    piece *piece;
    size_t pieces, piece_room;
    int ranks; /* number of ranks; 0: no record has been read */
};

/* A record of a rank's file. */
typedef struct record {
    const char *path;
    size_t number; /* number from 1 */
    json_t *text;
    const unsigned char *figures;
    size_t bytes, offset; /* size of all figures; their offset in the file */
    int rank, step;
    size_t entry; /* index of the tensor being read */
} record;

static ar_status no_memory(void)
{
    return ar_error_set(AR_ERR_MEMORY, "no memory for a run of sketches");
}

static ar_status wrong(const record *r, const char *problem)
{
    return ar_error_set(AR_ERR_FORMAT, "%s: record %zu: %s", ARI_SHOW(r->path), r->number, problem);
}

static uint64_t word_read(const unsigned char *data)
{
    uint64_t x = 0;
    for (int i = 0; i < 8; i++)
        x |= (uint64_t)data[i] << 8 * i;
    return x;
}

static ar_status path_of(char **path, const char *folder, int rank)
{
    char name[64];
    snprintf(name, sizeof name, "rank-%05d.sketch", rank);
    bool exists = false;
    AR_TRY(ari_file_is_in(&exists, folder, name));
    if (!exists)
        return ar_error_set(AR_ERR_NOT_FOUND, "%s: has no %s", ARI_SHOW(folder), name);
    return ari_file_path(path, folder, name);
}

/* --- a record's tensors ------------------------------------------------------------------------------------------- */

/* Creates the empty sketch that a tensor's entry describes. */
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
    ar_status st = ari_dtype_parse(&t, dtype);
    if (st == AR_OK)
        st = ar_sketch_init(s, t, (int)ndim, shape);
    if (st == AR_ERR_DTYPE || st == AR_ERR_OVERFLOW)
        return wrong(r, "a tensor whose \"dtype\" has no sketches, or whose \"shape\" has more than 2^64 elements");
    return st;
}

/* Adds a tensor that no earlier rank had, and its entry in the index. */
static ar_status tensor_add(ar_sketch_run *run, json_t **slot, const record *r, const json_t *entry, const char *key)
{
    AR_TRY(ARI_GROW_IN(&run->arena, &run->tensor, &run->tensor_room, run->count, "a run's sketches"));
    AR_TRY(ARI_GROW_IN(&run->arena, &run->differing_copies, &run->copies_room, run->count, "a run's copies"));
    AR_TRY(ARI_GROW_IN(&run->arena, &run->differing_room, &run->sizes_room, run->count, "a run's copies"));
    ar_sketch_tensor *t = &run->tensor[run->count];
    *t = (ar_sketch_tensor){.step = r->step, .order = r->entry, .differing = -1, .left_out = ""};
    run->differing_copies[run->count] = NULL;
    run->differing_room[run->count] = 0;
    char *name = NULL;
    AR_TRY(ari_arena_text(&run->arena, &name, json_string_value(json_object_get(entry, "name")), "a tensor's name"));
    t->name = name;
    for (size_t i = 0; i < 2; i++)
        t->samples[i] = (uint32_t)json_integer_value(json_array_get(json_object_get(r->text, "samples"), i));
    AR_TRY(sketch_of(&t->sketch, r, entry));
    *slot = json_pack("{sI s{} s{}}", "tensor", (json_int_t)run->count++, "pieces", "terms");
    return *slot != NULL && json_object_set_new(run->index, key, *slot) == 0 ? AR_OK : no_memory();
}

/* Reads a piece's first copy again from its file. */
static ar_status piece_read(ar_sketch *s, const ar_sketch_run *run, const piece *p, const ar_sketch *like)
{
    ARI_OWNED char *path = NULL;
    ARI_OWNED unsigned char *data = NULL;
    ARI_ENDED(ari_file_close) int fd = -1;
    size_t length = 0, used = 0;
    AR_TRY(path_of(&path, run->folder, p->figures.rank));
    AR_TRY(ARI_ALLOC(&data, p->figures.bytes, "a copy's figures"));
    AR_TRY(ari_file_open(&fd, &length, path));
    AR_TRY(ari_file_pread(fd, data, p->figures.bytes, p->figures.offset, path));
    AR_TRY(ar_sketch_init(s, like->dtype, like->ndim, like->shape));
    return ar_sketch_decode(s, data, p->figures.bytes, &used);
}

/* Handles a copy whose digest differs from the first copy's. For each part, the copy furthest from the first is
 * kept. */
static ar_status copy_differs(ar_sketch_run *run, size_t tensor, piece *p, int rank, ar_sketch *copy)
{
    ar_sketch_tensor *t = &run->tensor[tensor];
    ARI_ENDED(ar_sketch_fini) ar_sketch original = {0};
    ar_sketch_difference d;
    AR_TRY(piece_read(&original, run, p, copy));
    AR_TRY(ar_sketch_compare(&d, &original, copy));
    t->differing = t->differing < 0 ? rank : t->differing;
    if (p->differing != SIZE_MAX && !(d.norm > p->distance))
        return AR_OK;
    ar_sketch_copies **list = &run->differing_copies[tensor];
    if (p->differing == SIZE_MAX) {
        AR_TRY(ARI_GROW_IN(&run->arena, list, &run->differing_room[tensor], t->differing_parts, "copies that differ"));
        p->differing = t->differing_parts++;
        t->differing_copies = *list;
    } else {
        ar_sketch_fini(&(*list)[p->differing].original);
        ar_sketch_fini(&(*list)[p->differing].copy);
    }
    (*list)[p->differing] = (ar_sketch_copies){p->figures.rank, rank, original, *copy};
    p->distance = d.norm;
    original = (ar_sketch){0}; /* both belong to the list now */
    *copy = (ar_sketch){0};
    return AR_OK;
}

/* Adds a rank's piece to its tensor: other elements, another summand, or a copy, which is compared with the first
 * one. */
static ar_status piece_add(ar_sketch_run *run, json_t *slot, const record *r, const json_t *entry, ar_sketch *s,
                           const figures *place)
{
    const size_t tensor = (size_t)json_integer_value(json_object_get(slot, "tensor"));
    ar_sketch_tensor *t = &run->tensor[tensor];
    const char *part = json_string_value(json_object_get(entry, "part"));
    const char *term = json_string_value(json_object_get(entry, "term"));
    char key[MOST_KEY];
    if ((size_t)snprintf(key, sizeof key, "%s %s", part, term) >= sizeof key)
        return wrong(r, "a \"part\" of more than 1,000 bytes");
    json_t *pieces = json_object_get(slot, "pieces"), *terms = json_object_get(slot, "terms");
    const json_t *piece_index = json_object_get(pieces, key);
    if (piece_index != NULL) {
        piece *p = &run->piece[json_integer_value(piece_index)];
        p->copies++;
        t->copies = p->copies > t->copies ? p->copies : t->copies;
        return p->digest == s->digest ? AR_OK : copy_differs(run, tensor, p, r->rank, s);
    }
    t->copies = t->copies > 0 ? t->copies : 1;
    AR_TRY(ARI_GROW_IN(&run->arena, &run->piece, &run->piece_room, run->pieces, "parts of sketches"));
    run->piece[run->pieces] = (piece){*place, s->digest, 1, SIZE_MAX, 0.0};
    const json_int_t elements = json_integer_value(json_object_get(terms, term)) + (json_int_t)s->count;
    if (json_object_set_new(pieces, key, json_integer((json_int_t)run->pieces++)) != 0 ||
        json_object_set_new(terms, term, json_integer(elements)) != 0)
        return no_memory();
    t->tiny += (size_t)json_integer_value(json_object_get(entry, "tiny"));
    return ar_sketch_merge(&t->sketch, s, json_object_size(terms) > 1);
}

static ar_status leave_out(ar_sketch_run *run, ar_sketch_tensor *t, const char *why)
{
    char *reason = NULL;
    if (t->left_out[0] != '\0' || why == NULL || why[0] == '\0')
        return AR_OK;
    AR_TRY(ari_arena_text(&run->arena, &reason, why, "a reason"));
    t->left_out = reason;
    return AR_OK;
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
    const figures place = {r->rank, r->offset + *offset, bytes};
    *offset += bytes;
    char key[MOST_KEY];
    if ((size_t)snprintf(key, sizeof key, "%d %s", r->step, name) >= sizeof key)
        return wrong(r, "a \"name\" of more than 1,000 bytes");
    json_t *slot = json_object_get(run->index, key);
    if (slot == NULL)
        AR_TRY(tensor_add(run, &slot, r, entry, key));
    ar_sketch_tensor *t = &run->tensor[json_integer_value(json_object_get(slot, "tensor"))];
    if (t->sketch.dtype != s.dtype || t->sketch.ndim != s.ndim ||
        memcmp(t->sketch.shape, s.shape, (size_t)s.ndim * sizeof *s.shape) != 0)
        left_out = "ranks have tensors of other shapes or types under its name";
    t->by_run = t->by_run || (left_out != NULL && left_out[0] != '\0');
    AR_TRY(leave_out(run, t, left_out));
    return t->left_out[0] != '\0' ? AR_OK : piece_add(run, slot, r, entry, &s, &place);
}

/* --- files -------------------------------------------------------------------------------------------------------- */

static ar_status record_read(ar_sketch_run *run, record *r, int rank)
{
    const json_t *step = json_object_get(r->text, "step"), *world = json_object_get(r->text, "world"),
                 *tensors = json_object_get(r->text, "tensors"), *rank_said = json_object_get(r->text, "rank");
    if (!json_is_integer(step) || !json_is_integer(world) || !json_is_integer(rank_said) || !json_is_array(tensors))
        return wrong(r, "\"step\", \"rank\", \"world\" or \"tensors\" is missing");
    if (json_integer_value(rank_said) != rank || json_integer_value(world) <= rank ||
        json_integer_value(world) > MOST_RANKS)
        return wrong(r, "its \"rank\" is not the file's, or not below its \"world\"");
    if (json_integer_value(step) < 1 || json_integer_value(step) > INT_MAX)
        return wrong(r, "its \"step\" is no number from 1 on");
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
    const json_int_t ranks = json_integer_value(json_object_get(run->steps, key));
    return json_object_set_new(run->steps, key, json_integer(ranks + 1)) == 0 ? AR_OK : no_memory();
}

/* Checks that a rank has one record of a step. An equal second record is skipped. step_hashes: {step: hash of its
 * record}. */
static ar_status check_repeated(bool *repeated, json_t *step_hashes, const record *r, uint64_t hash)
{
    char key[32];
    const json_int_t step = json_integer_value(json_object_get(r->text, "step"));
    snprintf(key, sizeof key, "%lld", (long long)step);
    const json_t *earlier_hash = json_object_get(step_hashes, key);
    *repeated = earlier_hash != NULL;
    if (earlier_hash == NULL)
        return json_object_set_new(step_hashes, key, json_integer((json_int_t)hash)) == 0 ? AR_OK : no_memory();
    if ((uint64_t)json_integer_value(earlier_hash) == hash)
        return AR_OK;
    return ar_error_set(AR_ERR_FORMAT,
                        "%s: record %zu: step %lld is there twice, with other contents; capture each "
                        "run into a folder of its own",
                        ARI_SHOW(r->path), r->number, (long long)step);
}

static ar_status check_magic(const unsigned char *data, size_t bytes, const char *path)
{
    const size_t stem = sizeof MAGIC_STEM - 1;
    if (bytes >= MAGIC && memcmp(data, AR_SKETCH_MAGIC, MAGIC) == 0)
        return AR_OK;
    if (bytes >= MAGIC && memcmp(data, MAGIC_STEM, stem) == 0 && data[stem] >= '0' && data[stem] <= '9')
        return ar_error_set(AR_ERR_FORMAT,
                            "%s: sketches of format %c, and this version of anyrank reads format %c: capture the run "
                            "again with this version",
                            ARI_SHOW(path), data[stem], AR_SKETCH_MAGIC[stem]);
    return ar_error_set(AR_ERR_FORMAT, "%s: does not begin with \"" AR_SKETCH_MAGIC "\"", ARI_SHOW(path));
}

/* Reads the records in a rank's file, up to the last complete record. */
static ar_status records_read(ar_sketch_run *run, const unsigned char *data, size_t bytes, const char *path, int rank,
                              json_t *step_hashes)
{
    record r = {.path = path};
    for (size_t offset = MAGIC; bytes - offset >= HEAD;) {
        const uint64_t rest = word_read(data + offset), hash = word_read(data + offset + 8),
                       text = word_read(data + offset + 16);
        const unsigned char *body = data + offset + 16;
        r.number++;
        if (rest > bytes - offset - 16)
            break; /* the run was killed while writing this record */
        if (rest < 8 || text > rest - 8 || ar_sketch_hash(body, (size_t)rest) != hash) {
            if (offset + 16 + rest == bytes)
                break;
            return wrong(&r, "its hash is another: the file was changed, or its disk is broken");
        }
        AR_TRY(ari_json_parse(&r.text, (const char *)body + 8, (size_t)text, path));
        r.figures = body + 8 + text;
        r.offset = (size_t)(r.figures - data);
        r.bytes = (size_t)(rest - 8 - text);
        bool repeated = false;
        ar_status st = check_repeated(&repeated, step_hashes, &r, hash);
        if (st == AR_OK && !repeated)
            st = record_read(run, &r, rank);
        json_decref(r.text);
        AR_TRY(st);
        offset += 16 + (size_t)rest;
    }
    return AR_OK;
}

static ar_status file_read(ar_sketch_run *run, int rank)
{
    ARI_OWNED char *path = NULL;
    ARI_OWNED unsigned char *data = NULL;
    size_t bytes = 0;
    AR_TRY(path_of(&path, run->folder, rank));
    AR_TRY(ari_file_read(&data, &bytes, path, MOST_BYTES));
    AR_TRY(check_magic(data, bytes, path));
    json_t *step_hashes = json_object();
    const ar_status st = step_hashes != NULL ? records_read(run, data, bytes, path, rank, step_hashes) : no_memory();
    json_decref(step_hashes);
    return st;
}

/* Reasons why a tensor cannot be compared that only all ranks together show. */
static ar_status check_complete(ar_sketch_run *run)
{
    const char *key;
    json_t *slot;
    json_object_foreach(run->index, key, slot)
    {
        ar_sketch_tensor *t = &run->tensor[json_integer_value(json_object_get(slot, "tensor"))];
        char step[32], why[128] = "";
        snprintf(step, sizeof step, "%d", t->step);
        const int ranks = (int)json_integer_value(json_object_get(run->steps, step));
        t->incomplete = ranks < run->ranks;
        if (t->incomplete)
            snprintf(why, sizeof why, "%d of %d ranks have step %d", ranks, run->ranks, t->step);
        const char *term;
        json_t *elements;
        json_object_foreach(json_object_get(slot, "terms"), term, elements)
        {
            const size_t n = (size_t)json_integer_value(elements);
            if (why[0] == '\0' && n != t->sketch.elements)
                snprintf(why, sizeof why, "the ranks have %zu of %zu elements%s", n, t->sketch.elements,
                         t->sketch.summed ? " of a summand" : "");
        }
        AR_TRY(leave_out(run, t, why));
    }
    return AR_OK;
}

static int by_step_and_order(const void *a, const void *b)
{
    const ar_sketch_tensor *x = a, *y = b;
    return x->step != y->step ? (x->step > y->step) - (x->step < y->step)
                              : (x->order > y->order) - (x->order < y->order);
}

static ar_status read_all(ar_sketch_run *run)
{
    for (int rank = 0; rank == 0 || rank < run->ranks; rank++)
        AR_TRY(file_read(run, rank));
    AR_TRY(check_complete(run));
    if (run->count > 0)
        qsort(run->tensor, run->count, sizeof *run->tensor, by_step_and_order);
    return AR_OK;
}

ar_status ar_sketch_run_open(ar_sketch_run **out, const char *folder)
{
    *out = NULL;
    ar_sketch_run *run = NULL;
    char *path = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&run, 1, "a run of sketches"));
    run->steps = json_object();
    run->index = json_object();
    ar_status st =
        run->steps != NULL && run->index != NULL ? ari_arena_text(&run->arena, &path, folder, "a path") : no_memory();
    run->folder = path;
    if (st == AR_OK)
        st = read_all(run);
    if (st != AR_OK) {
        ar_sketch_run_close(run);
        return st;
    }
    *out = run;
    return AR_OK;
}

void ar_sketch_run_close(ar_sketch_run *run)
{
    if (run == NULL)
        return;
    for (size_t i = 0; i < run->count; i++) {
        ar_sketch_tensor *t = &run->tensor[i];
        ar_sketch_fini(&t->sketch);
        for (size_t k = 0; k < t->differing_parts; k++) {
            ar_sketch copies[2] = {t->differing_copies[k].original, t->differing_copies[k].copy};
            ar_sketch_fini(&copies[0]);
            ar_sketch_fini(&copies[1]);
        }
    }
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
