/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/tensor_private.h"
#include "ref/io/hash.h"
#include "ref/io/json.h"
#include "ref/io/safetensors.h"

/* --- layout of the data ------------------------------------------------------------------------------------------- */

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "safetensors data is little-endian and used in place");
_Static_assert(sizeof(size_t) == 8, "sizes of the format are 64-bit");

bool ari_st_count(uint64_t *count, int ndim, const size_t *shape)
{
    uint64_t n = 1;
    for (int i = 0; i < ndim; i++)
        if (__builtin_mul_overflow(n, (uint64_t)shape[i], &n))
            return false;
    *count = n;
    return true;
}

ar_status ari_st_tensor_bytes(size_t *bytes, const ar_st_tensor *t)
{
    const char *name = t->name == NULL ? "(no name)" : t->name;
    uint64_t count = 0, bits = 0;
    if (t->name == NULL)
        return ar_error_set(AR_ERR_ARG, "a tensor has no name");
    if (!ari_utf8_valid(name, strlen(name)) || strcmp(name, ARI_ST_METADATA) == 0)
        return ar_error_set(AR_ERR_ARG, "tensor '%s': a name must be UTF-8 and not " ARI_ST_METADATA, ARI_SHOW(name));
    if (t->ndim < 0 || t->ndim > AR_ST_MAX_DIMS)
        return ar_error_set(AR_ERR_ARG, "tensor '%s' has %d dimensions, expected 0 to %d", ARI_SHOW(name), t->ndim,
                            AR_ST_MAX_DIMS);
    const size_t width = ari_dtype_bits(t->dtype);
    if (width == 0)
        return ar_error_set(AR_ERR_ARG, "tensor '%s' has the unknown dtype %d", ARI_SHOW(name), (int)t->dtype);
    if (!ari_st_count(&count, t->ndim, t->shape) || __builtin_mul_overflow(count, (uint64_t)width, &bits))
        return ar_error_set(AR_ERR_OVERFLOW, "tensor '%s': its size overflows 64 bits", ARI_SHOW(name));
    if (bits % 8 != 0)
        return ar_error_set(AR_ERR_ARG, "tensor '%s': its elements do not fill whole bytes", ARI_SHOW(name));
    *bytes = (size_t)(bits / 8);
    return AR_OK;
}

ar_status ari_st_sort(const ar_st_tensor **order, const ar_st_tensor *tensors, size_t n, const char *prefix)
{
    for (size_t i = 0; i < n; i++)
        order[i] = &tensors[i];
    ARI_SORT(order, n, ari_by_name_of);
    for (size_t i = 1; i < n; i++)
        if (strcmp(order[i - 1]->name, order[i]->name) == 0)
            return ar_error_set(AR_ERR_ARG, "%stensor '%s' is there twice", prefix, ARI_SHOW(order[i]->name));
    return AR_OK;
}

/* --- their hash --------------------------------------------------------------------------------------------------- */

static ar_status hash_one(ari_sha256 *s, const ar_st_tensor *t)
{
    size_t bytes = 0;
    AR_TRY(ari_st_tensor_bytes(&bytes, t));
    if (bytes > 0 && t->data == NULL)
        return ar_error_set(AR_ERR_ARG, "tensors_hash: tensor '%s' has no data", ARI_SHOW(t->name));
    const char *dtype = ar_dtype_name(t->dtype);
    const char *shape = ARI_SHOW_SHAPE(t->ndim, t->shape);
    ari_sha256_update(s, t->name, strlen(t->name) + 1);
    ari_sha256_update(s, dtype, strlen(dtype) + 1);
    ari_sha256_update(s, shape, strlen(shape) + 1);
    ari_sha256_update(s, t->data, bytes);
    return AR_OK;
}

ar_status ari_tensors_hash(char hex[65], const ar_st_tensor *tensors, size_t n)
{
    ari_sha256 s;
    ARI_OWNED const ar_st_tensor **order = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&order, n, "names to sort"));
    for (size_t i = 0; i < n; i++) {
        if (tensors[i].name == NULL)
            AR_TRY(ar_error_set(AR_ERR_ARG, "tensors_hash: tensor %zu has no name", i));
    }
    AR_TRY(ari_st_sort(order, tensors, n, "tensors_hash: "));
    ari_sha256_init(&s);
    for (size_t i = 0; i < n; i++)
        AR_TRY(hash_one(&s, order[i]));
    ari_sha256_final(&s, hex);
    return AR_OK;
}

/* --- of a file ---------------------------------------------------------------------------------------------------- */

static ar_status refuse_layout(const char *rule, const char *path, const ari_st_item *item, const char *problem)
{
    const char *shape = ARI_SHOW_SHAPE(item->entry.ndim, item->entry.shape);
    return ar_error_set(AR_ERR_FORMAT, "%s: %s: tensor '%s' %s %s [%" PRIu64 ", %" PRIu64 "): %s", rule, ARI_SHOW(path),
                        ARI_SHOW(item->entry.name), ar_dtype_name(item->entry.dtype), shape, item->begin, item->end,
                        problem);
}

/* Checks one entry, given the end of the previous one, in the order of the official library's checks. */
static ar_status check_item(ari_st_item *item, uint64_t previous_end, const char *path)
{
    char problem[128];
    uint64_t count = 0, bits = 0;
    if (item->begin != previous_end || item->end < item->begin) {
        snprintf(problem, sizeof problem, "expected it to begin at %" PRIu64 " and not to end before", previous_end);
        return refuse_layout("InvalidOffset", path, item, problem);
    }
    if (!ari_st_count(&count, item->entry.ndim, item->entry.shape) ||
        __builtin_mul_overflow(count, (uint64_t)ari_dtype_bits(item->entry.dtype), &bits))
        return refuse_layout("ValidationOverflow", path, item, "its size overflows 64 bits");
    if (bits % 8 != 0)
        return refuse_layout("MisalignedSlice", path, item, "its elements do not fill whole bytes");
    if (item->end - item->begin != bits / 8) {
        snprintf(problem, sizeof problem, "has %" PRIu64 " bytes, expected %" PRIu64, item->end - item->begin,
                 bits / 8);
        return refuse_layout("TensorInvalidInfo", path, item, problem);
    }
    item->entry.count = (size_t)count;
    item->entry.bytes = (size_t)(bits / 8);
    return AR_OK;
}

static int compare_offsets(const void *a, const void *b)
{
    const ari_st_item *x = *(const ari_st_item *const *)a;
    const ari_st_item *y = *(const ari_st_item *const *)b;
    ARI_ASCENDING(x->begin, y->begin);
    ARI_ASCENDING(x->end, y->end);
    return x < y ? -1 : x > y; /* equal ranges: a stable order gives the same message every time */
}

/* The rules about offsets, sizes and the end of the file, once the JSON is read. */
static ar_status st_header_validate(ari_st_header *h, uint64_t data_bytes, const char *path)
{
    ARI_OWNED ari_st_item **order = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&order, h->n, "a file's header"));
    for (size_t i = 0; i < h->n; i++)
        order[i] = &h->items[i];
    ARI_SORT(order, h->n, compare_offsets);
    uint64_t end = 0;
    for (size_t i = 0; i < h->n; i++) {
        AR_TRY(check_item(order[i], end, path));
        end = order[i]->end;
    }
    if (end != data_bytes)
        return ar_error_set(AR_ERR_FORMAT,
                            "MetadataIncompleteBuffer: %s: the tensors end at byte %" PRIu64
                            " of the data, the file at %" PRIu64,
                            ARI_SHOW(path), end, data_bytes);
    return AR_OK;
}

/* --- safetensors header ------------------------------------------------------------------------------------------- */

#define RULE "InvalidHeaderDeserialization"

/* --- the pieces of a large object --------------------------------------------------------------------------------- */

/* Splits a large JSON object into its members without building a tree, so that a 100 MB header costs memory for its
 * content and not for its JSON tree. Each piece is then checked by the JSON parser: the scanner only finds where a
 * piece ends and never reads past `length`. */
typedef struct scan {
    const char *text;
    size_t length, pos;
    int max_depth;       /* brackets inside a value */
    const char *problem; /* what is wrong at `pos`, or NULL; static storage */
} scan;

typedef struct slice {
    size_t begin, end;  /* range [begin, end) of the text */
    bool negative_zero; /* true if the text contains the integer -0, which the parser would read as 0 */
} slice;

static bool fail_scan(scan *s, const char *problem)
{
    s->problem = problem;
    return false;
}

/* Returns the byte under the cursor; 0 at the end. A literal 0 byte never occurs in JSON, so the two need no
 * distinction. */
static char peek(const scan *s)
{
    return s->pos < s->length ? s->text[s->pos] : '\0';
}

static void skip_space(scan *s)
{
    while (peek(s) == ' ' || peek(s) == '\t' || peek(s) == '\n' || peek(s) == '\r')
        s->pos++;
}

static bool skip_string(scan *s)
{
    for (s->pos++; s->pos < s->length; s->pos++) {
        if (s->text[s->pos] == '\\') {
            s->pos++;
        } else if (s->text[s->pos] == '"') {
            s->pos++;
            return true;
        }
    }
    s->pos = s->length;
    return fail_scan(s, "a string has no end");
}

/* Returns true at a minus sign that begins the integer -0. -0.5 and -0e0 are reals, which have a negative zero. */
static bool at_negative_zero(const scan *s)
{
    if (peek(s) != '-' || s->pos + 1 >= s->length || s->text[s->pos + 1] != '0')
        return false;
    const char next_char = s->pos + 2 < s->length ? s->text[s->pos + 2] : '\0';
    return next_char != '.' && next_char != 'e' && next_char != 'E';
}

/* Skips a number or a word, the only tokens apart from strings and brackets. `previous` keeps 1e-0 from being taken for
 * -0. */
static void skip_plain(scan *s, bool *negative_zero)
{
    if (at_negative_zero(s))
        *negative_zero = true;
    for (char c = peek(s); s->pos < s->length; s->pos++, c = peek(s)) {
        if (c == ',' || c == ':' || c == '"' || c == '[' || c == ']' || c == '{' || c == '}' || c == ' ' || c == '\t' ||
            c == '\n' || c == '\r')
            return;
    }
}

static bool skip_value(scan *s, slice *value)
{
    int depth = 0;
    value->begin = s->pos;
    value->negative_zero = false;
    do {
        const char c = peek(s);
        if (c == '"') {
            if (!skip_string(s))
                return false;
        } else if (c == '{' || c == '[') {
            if (++depth > s->max_depth)
                return fail_scan(s, "nested too deeply");
            s->pos++;
        } else if (c == '}' || c == ']') {
            if (--depth < 0)
                return fail_scan(s, "expected a value");
            s->pos++;
        } else if (c == ',' || c == ':') {
            if (depth == 0)
                return fail_scan(s, "expected a value");
            s->pos++;
        } else {
            skip_plain(s, &value->negative_zero);
        }
        value->end = s->pos;
        skip_space(s);
    } while (depth > 0 && s->pos < s->length);
    if (depth > 0)
        return fail_scan(s, "ends inside a value");
    return value->end > value->begin || fail_scan(s, "expected a value");
}

/* Skips white space and the opening brace. Returns false, with a problem, if there is none. */
static bool scan_begin(scan *s)
{
    skip_space(s);
    if (s->pos >= s->length)
        return fail_scan(s, "there is no JSON");
    if (peek(s) != '{')
        return fail_scan(s, "expected '{'");
    s->pos++;
    return true;
}

/* The next member's key (quotes included) and value. False at the closing brace, which is skipped, or with a problem.
 * `is_first` is true for the first call. */
static bool scan_member(scan *s, bool is_first, slice *key, slice *value)
{
    skip_space(s);
    if (peek(s) == '}') {
        s->pos++;
        return false;
    }
    if (!is_first) {
        if (peek(s) != ',')
            return fail_scan(s, s->pos >= s->length ? "ends inside an object" : "expected ',' or '}'");
        s->pos++;
        skip_space(s);
    }
    if (peek(s) != '"')
        return fail_scan(s, s->pos >= s->length ? "ends inside an object" : "expected a key in quotes");
    key->begin = s->pos;
    key->negative_zero = false;
    if (!skip_string(s))
        return false;
    key->end = s->pos;
    skip_space(s);
    if (peek(s) != ':')
        return fail_scan(s, "expected ':'");
    s->pos++;
    skip_space(s);
    if (s->pos >= s->length)
        return fail_scan(s, "ends inside an object");
    return skip_value(s, value);
}

/* True if only white space is left. */
static bool scan_at_end(scan *s)
{
    skip_space(s);
    return s->pos >= s->length;
}

/* --- reading one -------------------------------------------------------------------------------------------------- */

/* State for reading one header. */
typedef struct reader {
    ari_st_header *h;
    const char *text;
    const char *path;
} reader;

static ar_status refuse_header(const reader *r, size_t offset, const char *problem)
{
    return ar_error_set(AR_ERR_FORMAT, RULE ": %s: header byte %zu: %s", ARI_SHOW(r->path), offset, ARI_SHOW(problem));
}

static ar_status no_memory(const reader *r)
{
    return ar_error_set(AR_ERR_MEMORY, "%s: no memory for its header", ARI_SHOW(r->path));
}

/* Parses one piece of the header with the real parser. */
static ar_status parse_slice(const reader *r, const slice *piece, json_t **out)
{
    json_error_t error = {.line = -1};
    *out =
        json_loadb(r->text + piece->begin, piece->end - piece->begin, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &error);
    if (*out != NULL)
        return AR_OK;
    if (ari_json_no_memory(&error))
        return no_memory(r);
    return refuse_header(r, piece->begin + (size_t)(error.position > 0 ? error.position : 0), error.text);
}

static ar_status parse_string(const reader *r, const slice *piece, const char *problem, char **out)
{
    json_t *value = NULL;
    AR_TRY(parse_slice(r, piece, &value));
    ar_status st = AR_OK;
    if (!json_is_string(value))
        st = refuse_header(r, piece->begin, problem);
    else if ((*out = strdup(json_string_value(value))) == NULL)
        st = no_memory(r);
    json_decref(value);
    return st;
}

/* --- __metadata__ ------------------------------------------------------------------------------------------------- */
static ar_status add_metadata(const reader *r, const slice *key, const slice *value)
{
    ari_st_header *h = r->h;
    if (h->n_metadata == ARI_ST_MAX_METADATA)
        return refuse_header(r, key->begin, "too many keys in " ARI_ST_METADATA);
    if (ari_grow(&h->metadata, &h->cap_metadata, h->n_metadata, 2 * sizeof *h->metadata, "metadata") != AR_OK)
        return no_memory(r);
    char **pair = h->metadata + 2 * h->n_metadata;
    pair[0] = pair[1] = NULL;
    h->n_metadata++; /* incremented before the strings exist: the header frees those that do */
    AR_TRY(parse_string(r, key, "expected a key", &pair[0]));
    return parse_string(r, value, "a value of " ARI_ST_METADATA " is not a string", &pair[1]);
}

static ar_status read_metadata(const reader *r, const slice *piece)
{
    const size_t length = piece->end - piece->begin;
    if (length == 4 && memcmp(r->text + piece->begin, "null", 4) == 0)
        return AR_OK;
    scan s = {r->text, piece->end, piece->begin, ARI_ST_MAX_DEPTH, NULL};
    slice key, value;
    if (!scan_begin(&s))
        return refuse_header(r, piece->begin, ARI_ST_METADATA " is not an object");
    for (bool is_first = true; scan_member(&s, is_first, &key, &value); is_first = false)
        AR_TRY(add_metadata(r, &key, &value));
    if (s.problem != NULL)
        return refuse_header(r, s.pos, s.problem);
    if (!scan_at_end(&s))
        return refuse_header(r, s.pos, "something follows " ARI_ST_METADATA);
    ari_st_header *h = r->h;
    if (h->n_metadata > 1)
        qsort(h->metadata, h->n_metadata, 2 * sizeof *h->metadata, ari_by_name);
    for (size_t i = 1; i < h->n_metadata; i++)
        if (strcmp(h->metadata[2 * i - 2], h->metadata[2 * i]) == 0)
            return ar_error_set(AR_ERR_FORMAT, RULE ": %s: duplicate key '%s' in " ARI_ST_METADATA, ARI_SHOW(r->path),
                                ARI_SHOW(h->metadata[2 * i]));
    return AR_OK;
}

/* --- one tensor --------------------------------------------------------------------------------------------------- */
static ar_status bad_field(const reader *r, const char *name, const char *problem)
{
    return ar_error_set(AR_ERR_FORMAT, RULE ": %s: tensor '%s': %s", ARI_SHOW(r->path), ARI_SHOW(name), problem);
}

/* Element i of an array, as a count. */
static ar_status read_count(const reader *r, const char *name, const json_t *array, size_t i, const char *problem,
                            uint64_t *out)
{
    const json_t *value = json_array_get(array, i);
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return bad_field(r, name, problem);
    *out = (uint64_t)json_integer_value(value);
    return AR_OK;
}

static ar_status read_shape(const reader *r, ar_st_entry *e, const json_t *shape)
{
    if (!json_is_array(shape))
        return bad_field(r, e->name, shape == NULL ? "field shape is missing" : "field shape is not an array");
    const size_t ndim = json_array_size(shape);
    if (ndim > AR_ST_MAX_DIMS)
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s: tensor '%s' has %zu dimensions, at most %d are supported",
                            ARI_SHOW(r->path), ARI_SHOW(e->name), ndim, AR_ST_MAX_DIMS);
    e->ndim = (int)ndim;
    for (size_t i = 0; i < ndim; i++) {
        uint64_t extent = 0;
        AR_TRY(read_count(r, e->name, shape, i, "an extent in shape is not an integer from 0 to 2^63-1", &extent));
        e->shape[i] = (size_t)extent;
    }
    return AR_OK;
}

static ar_status read_fields(const reader *r, ari_st_item *item, const json_t *fields)
{
    ar_st_entry *e = &item->entry;
    if (!json_is_object(fields))
        return bad_field(r, e->name, "its description is not an object");
    const json_t *dtype = json_object_get(fields, "dtype");
    if (!json_is_string(dtype))
        return bad_field(r, e->name, dtype == NULL ? "field dtype is missing" : "field dtype is not a string");
    if (ari_dtype_parse(&e->dtype, json_string_value(dtype)) != AR_OK)
        return ar_error_set(AR_ERR_FORMAT, RULE ": %s: tensor '%s': unknown dtype '%s'", ARI_SHOW(r->path),
                            ARI_SHOW(e->name), ARI_SHOW(json_string_value(dtype)));
    AR_TRY(read_shape(r, e, json_object_get(fields, "shape")));
    const json_t *offsets = json_object_get(fields, "data_offsets");
    if (offsets == NULL)
        return bad_field(r, e->name, "field data_offsets is missing");
    if (!json_is_array(offsets) || json_array_size(offsets) != 2)
        return bad_field(r, e->name, "field data_offsets is not an array of two integers");
    const char *problem = "an offset in data_offsets is not an integer from 0 to 2^63-1";
    AR_TRY(read_count(r, e->name, offsets, 0, problem, &item->begin));
    return read_count(r, e->name, offsets, 1, problem, &item->end);
}

static ar_status add_tensor(const reader *r, char *name, const slice *value)
{
    ari_st_header *h = r->h;
    if (ARI_GROW(&h->items, &h->cap, h->n, "tensors") != AR_OK) { /* bounded by the header's bytes */
        free(name);
        return no_memory(r);
    }
    ari_st_item *item = &h->items[h->n++];
    memset(item, 0, sizeof *item);
    item->entry.name = name; /* the header owns the name from here on */
    if (value->end - value->begin > ARI_ST_MAX_DESCRIPTION)
        return ar_error_set(AR_ERR_FORMAT,
                            RULE ": %s: tensor '%s': its description has %zu bytes, at most %zu are read",
                            ARI_SHOW(r->path), ARI_SHOW(name), value->end - value->begin, ARI_ST_MAX_DESCRIPTION);
    if (value->negative_zero)
        return bad_field(r, name, "-0 is not a size");
    json_auto_t *fields = NULL;
    AR_TRY(parse_slice(r, value, &fields));
    return read_fields(r, item, fields);
}

/* --- the whole header --------------------------------------------------------------------------------------------- */
static ar_status read_members(const reader *r, size_t length)
{
    scan s = {r->text, length, 0, ARI_ST_MAX_DEPTH, NULL};
    slice key, value;
    bool metadata_seen = false;
    if (!scan_begin(&s))
        return refuse_header(r, s.pos, s.problem);
    for (bool is_first = true; scan_member(&s, is_first, &key, &value); is_first = false) {
        char *name = NULL;
        AR_TRY(parse_string(r, &key, "expected a name", &name));
        if (strcmp(name, ARI_ST_METADATA) != 0) {
            AR_TRY(add_tensor(r, name, &value));
            continue;
        }
        free(name);
        if (metadata_seen)
            return refuse_header(r, key.begin, "a second " ARI_ST_METADATA);
        metadata_seen = true;
        AR_TRY(read_metadata(r, &value));
    }
    if (s.problem != NULL)
        return refuse_header(r, s.pos, s.problem);
    return scan_at_end(&s) ? AR_OK : refuse_header(r, s.pos, "something follows the closing brace");
}

/* Refuses equal names. The format forbids them, although the official library lets the last one win. */
static ar_status index_names(const reader *r)
{
    ari_st_header *h = r->h;
    h->by_name = calloc(h->n + 1, sizeof(ari_st_item *));
    if (h->by_name == NULL)
        return no_memory(r);
    for (size_t i = 0; i < h->n; i++)
        h->by_name[i] = &h->items[i];
    ARI_SORT(h->by_name, h->n, ari_by_name_of);
    for (size_t i = 1; i < h->n; i++)
        if (strcmp(h->by_name[i - 1]->entry.name, h->by_name[i]->entry.name) == 0)
            return bad_field(r, h->by_name[i]->entry.name, "duplicate name");
    return AR_OK;
}

ar_status ari_st_header_parse(ari_st_header *h, const char *text, size_t length, uint64_t data_bytes, const char *path)
{
    const reader r = {h, text, path};
    memset(h, 0, sizeof *h);
    if (!ari_utf8_valid(text, length))
        return ar_error_set(AR_ERR_FORMAT, "InvalidHeader: %s: the header is not UTF-8", ARI_SHOW(path));
    AR_TRY(read_members(&r, length));
    AR_TRY(index_names(&r));
    return st_header_validate(h, data_bytes, path);
}

void ari_st_header_free(ari_st_header *h)
{
    for (size_t i = 0; i < h->n; i++)
        free((void *)(uintptr_t)h->items[i].entry.name);
    for (size_t i = 0; i < 2 * h->n_metadata; i++)
        free(h->metadata[i]);
    free(h->items);
    free(h->by_name);
    free(h->metadata);
    memset(h, 0, sizeof *h);
}
