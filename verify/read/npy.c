/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/read/dump.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ref/io/file.h"
#include "ref/io/safetensors.h"

ARI_OWNER(ari_npy, ari_npy_close)

/* The magic, two bytes of version, then the header's length in 2 bytes (version 1) or 4. */
#define MAGIC "\x93NUMPY"
#define MAGIC_BYTES ((size_t)6)
/* NumPy itself reads no more than 10000 characters from strangers; a plain array needs some 120. */
#define MAX_HEADER ((size_t)65536)

static ar_status bad(const char *path, const char *problem)
{
    return ar_error_set(AR_ERR_FORMAT, "InvalidNpy: %s: %s", ARI_SHOW(path), problem);
}

static ar_status bad_at(const char *path, size_t offset, const char *problem)
{
    return ar_error_set(AR_ERR_FORMAT, "InvalidNpy: %s: header byte %zu: %s", ARI_SHOW(path), offset, problem);
}

/* --- the header: a literal of a Python dict ----------------------------------------------------------------------- */
typedef struct literal {
    const char *text; /* the text, terminated by a 0 byte, which cannot occur in a token */
    size_t length, offset;
    const char *path;
} literal;

static void skip_space(literal *l)
{
    while (l->offset < l->length && strchr(" \t\r\n", l->text[l->offset]) != NULL && l->text[l->offset] != '\0')
        l->offset++;
}

static bool take_char(literal *l, char c)
{
    skip_space(l);
    if (l->offset >= l->length || l->text[l->offset] != c)
        return false;
    l->offset++;
    return true;
}

static bool take_word(literal *l, const char *word)
{
    const size_t n = strlen(word);
    skip_space(l);
    if (l->length - l->offset < n || memcmp(l->text + l->offset, word, n) != 0)
        return false;
    l->offset += n;
    return true;
}

/* Reads a string in single or double quotes. NumPy's strings contain no escapes. */
static ar_status take_string(literal *l, char *out, size_t cap)
{
    skip_space(l);
    const char quote = l->offset < l->length ? l->text[l->offset] : '\0';
    if (quote != '\'' && quote != '"')
        return bad_at(l->path, l->offset, "expected a string in quotes");
    const size_t begin = ++l->offset;
    while (l->offset < l->length && l->text[l->offset] != quote && l->text[l->offset] != '\\' &&
           isprint((unsigned char)l->text[l->offset]))
        l->offset++;
    if (l->offset >= l->length || l->text[l->offset] != quote || l->offset - begin >= cap)
        return bad_at(l->path, l->offset, "a string that does not end, or is too long");
    snprintf(out, cap, "%.*s", (int)(l->offset - begin), l->text + begin);
    l->offset++;
    return AR_OK;
}

static ar_status take_extent(literal *l, size_t *out)
{
    size_t n = 0;
    skip_space(l);
    const size_t begin = l->offset;
    for (; l->offset < l->length && isdigit((unsigned char)l->text[l->offset]); l->offset++)
        if (__builtin_mul_overflow(n, (size_t)10, &n) ||
            __builtin_add_overflow(n, (size_t)(l->text[l->offset] - '0'), &n))
            return bad_at(l->path, begin, "an extent beyond 64 bits");
    if (l->offset == begin)
        return bad_at(l->path, begin, "expected an extent, a plain number");
    *out = n;
    return AR_OK;
}

/* "()", "(3,)", "(3, 4)", "(3, 4,)"; but "(3)" is no tuple. */
static ar_status take_shape(literal *l, ar_st_entry *e)
{
    if (!take_char(l, '('))
        return bad_at(l->path, l->offset, "expected a tuple as shape");
    bool comma = true;
    for (e->ndim = 0; !take_char(l, ')'); e->ndim++) {
        size_t extent = 0;
        if (!comma)
            return bad_at(l->path, l->offset, "expected ',' or ')' in shape");
        AR_TRY(take_extent(l, &extent));
        if (e->ndim == AR_ST_MAX_DIMS)
            return ar_error_set(AR_ERR_UNSUPPORTED, "%s: has more than %d dimensions", ARI_SHOW(l->path),
                                AR_ST_MAX_DIMS);
        e->shape[e->ndim] = extent;
        comma = take_char(l, ',');
    }
    return e->ndim == 1 && !comma ? bad_at(l->path, l->offset, "shape '(n)' is no tuple, expected '(n,)'") : AR_OK;
}

typedef enum key { DESCR, FORTRAN_ORDER, SHAPE, KEYS } key;

static ar_status take_value(literal *l, key k, ari_npy *f, char descr[16])
{
    switch (k) {
    case DESCR:
        if (take_char(l, '['))
            return ar_error_set(AR_ERR_UNSUPPORTED,
                                "%s: is an array of records: write each field as an array of its own",
                                ARI_SHOW(l->path));
        return take_string(l, descr, 16);
    case FORTRAN_ORDER:
        f->fortran = take_word(l, "True");
        return f->fortran || take_word(l, "False")
                   ? AR_OK
                   : bad_at(l->path, l->offset, "fortran_order is neither True nor False");
    default:
        return take_shape(l, &f->entry);
    }
}

static ar_status parse_header(literal *l, ari_npy *f, char descr[16])
{
    static const char *const names[KEYS] = {"descr", "fortran_order", "shape"};
    bool has_key[KEYS] = {false}, comma = true;
    if (!take_char(l, '{'))
        return bad_at(l->path, l->offset, "expected a dict, '{'");
    while (!take_char(l, '}')) {
        char name[16];
        if (!comma)
            return bad_at(l->path, l->offset, "expected ',' or '}'");
        const size_t begin = l->offset;
        AR_TRY(take_string(l, name, sizeof name));
        const size_t k = ari_word_of(name, names, KEYS);
        if (k == KEYS || has_key[k])
            return bad_at(l->path, begin, "a key other than descr, fortran_order and shape, or one of them twice");
        has_key[k] = true;
        if (!take_char(l, ':'))
            return bad_at(l->path, l->offset, "expected ':'");
        AR_TRY(take_value(l, (key)k, f, descr));
        comma = take_char(l, ',');
    }
    skip_space(l);
    if (l->offset != l->length)
        return bad_at(l->path, l->offset, "something follows the dict");
    for (size_t k = 0; k < KEYS; k++)
        if (!has_key[k])
            return ar_error_set(AR_ERR_FORMAT, "InvalidNpy: %s: the header has no '%s'", ARI_SHOW(l->path), names[k]);
    return AR_OK;
}

/* --- the dtype ---------------------------------------------------------------------------------------------------- */
static ar_status read_dtype(ar_dtype *out, const char *descr, const char *path)
{
    static const struct {
        const char *code;
        ar_dtype dtype;
    } codes[] = {{"b1", AR_BOOL}, {"i1", AR_I8},  {"u1", AR_U8},  {"i2", AR_I16}, {"u2", AR_U16},
                 {"i4", AR_I32},  {"u4", AR_U32}, {"i8", AR_I64}, {"u8", AR_U64}, {"f2", AR_F16},
                 {"f4", AR_F32},  {"f8", AR_F64}, {"c8", AR_C64}};
    const bool ordered = descr[0] != '\0' && strchr("<>|=", descr[0]) != NULL;
    const char *code = descr + ordered;
    size_t i = 0;
    while (i < sizeof codes / sizeof codes[0] && strcmp(codes[i].code, code) != 0)
        i++;
    if (code[0] == 'V') /* NumPy writes 'V' for dtypes that it does not know, such as bfloat16 */
        return ar_error_set(
            AR_ERR_UNSUPPORTED,
            "%s: dtype '%s' is raw bytes to NumPy (of bfloat16?): write array.astype('<f4') or safetensors",
            ARI_SHOW(path), ARI_SHOW(descr));
    if (i == sizeof codes / sizeof codes[0])
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "%s: dtype '%s', expected b1, i1 to i8, u1 to u8, f2, f4, f8 or c8, little-endian",
                            ARI_SHOW(path), ARI_SHOW(descr));
    if (descr[0] == '>' && ar_dtype_bytes(codes[i].dtype) > 1)
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s: dtype '%s' is big-endian: write array.astype('<%s')",
                            ARI_SHOW(path), ARI_SHOW(descr), code);
    *out = codes[i].dtype;
    return AR_OK;
}

/* --- the file ----------------------------------------------------------------------------------------------------- */
/* Reads the header and finds the start of the data. The file is read and not mapped, so that a file that shrinks
 * meanwhile gives an error. */
static ar_status read_header(int fd, size_t bytes, const char *path, ari_npy *f, size_t *start)
{
    unsigned char prefix[MAGIC_BYTES + 6] = {0};
    char descr[16] = "";
    if (bytes < MAGIC_BYTES + 4)
        return bad(path, "is shorter than a header");
    AR_TRY(ari_file_pread(fd, prefix, bytes < sizeof prefix ? bytes : sizeof prefix, 0, path));
    if (memcmp(prefix, MAGIC, MAGIC_BYTES) != 0)
        return bad(path, "does not begin as a .npy file");
    const unsigned major = prefix[MAGIC_BYTES], minor = prefix[MAGIC_BYTES + 1];
    if (major < 1 || major > 3 || minor != 0)
        return ar_error_set(AR_ERR_FORMAT, "InvalidNpy: %s: version %u.%u, expected 1.0, 2.0 or 3.0", ARI_SHOW(path),
                            major, minor);
    const unsigned char *size = prefix + MAGIC_BYTES + 2;
    const size_t width = major == 1 ? 2 : 4;
    size_t length = 0;
    for (size_t i = 0; i < width; i++)
        length |= (size_t)size[i] << (8 * i);
    *start = MAGIC_BYTES + 2 + width;
    if (*start > bytes || length > bytes - *start)
        return bad(path, "the header is longer than the file");
    if (length > MAX_HEADER)
        return ar_error_set(AR_ERR_FORMAT, "InvalidNpy: %s: a header of %zu bytes, at most %zu are read",
                            ARI_SHOW(path), length, MAX_HEADER);
    ARI_OWNED char *text = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&text, length + 1, "a file's header"));
    AR_TRY(ari_file_pread(fd, text, length, *start, path));
    *start += length;
    literal l = {text, length, 0, path};
    AR_TRY(parse_header(&l, f, descr));
    return read_dtype(&f->entry.dtype, descr, path);
}

/* The box of the array: in Fortran order the first index runs fastest. */
static ar_status lay_out(ari_npy *f, size_t data_bytes, const char *path)
{
    uint64_t count = 0, expected_bytes = 0;
    ar_st_entry *e = &f->entry;
    if (!ari_st_count(&count, e->ndim, e->shape) ||
        __builtin_mul_overflow(count, (uint64_t)ar_dtype_bytes(e->dtype), &expected_bytes))
        return bad(path, "the size of its array overflows 64 bits");
    if (expected_bytes != data_bytes)
        return ar_error_set(AR_ERR_FORMAT, "InvalidNpy: %s: has %zu bytes of data, expected %zu", ARI_SHOW(path),
                            data_bytes, (size_t)expected_bytes);
    e->count = (size_t)count;
    e->bytes = data_bytes;
    size_t stride = 1;
    for (int i = 0; i < e->ndim; i++) {
        const int d = f->fortran ? i : e->ndim - 1 - i; /* from the fastest dimension on */
        f->box.extent[d] = e->shape[d];
        f->box.stride[d] = stride;
        stride *= count == 0 ? 1 : e->shape[d]; /* at most count */
    }
    return AR_OK;
}

static ar_status map_file(ari_npy *f, int fd, size_t bytes, size_t start, const char *path)
{
    void *map = NULL;
    AR_TRY(ari_file_map(&map, fd, bytes, path));
    f->map = map;
    f->map_bytes = bytes;
    f->entry.data = (const char *)map + start;
    f->entry.mapped = true;
    return AR_OK;
}

static ar_status name_entry(ari_npy *f, const char *path)
{
    const char *slash = strrchr(path, '/'), *name = slash == NULL ? path : slash + 1;
    const size_t n = strlen(name), cut = n > 4 && strcmp(name + n - 4, ".npy") == 0 ? 4 : 0;
    f->entry.name = strndup(name, n - cut);
    return f->entry.name != NULL ? AR_OK : ar_error_set(AR_ERR_MEMORY, "%s: no memory for its name", ARI_SHOW(path));
}

ar_status ari_npy_open(ari_npy **out, const char *path)
{
    ARI_ENDED(ari_file_close) int fd = -1;
    size_t bytes = 0, start = 0;
    ARI_OWNED_BY(ari_npy_close) ari_npy *f = NULL;
    AR_TRY(ari_file_open(&fd, &bytes, path));
    AR_TRY(ARI_ALLOC_ZERO(&f, 1, "a file"));
    AR_TRY(read_header(fd, bytes, path, f, &start));
    AR_TRY(lay_out(f, bytes - start, path));
    AR_TRY(name_entry(f, path));
    AR_TRY(map_file(f, fd, bytes, start, path));
    ARI_GIVE(out, f);
    return AR_OK;
}

void ari_npy_close(ari_npy *f)
{
    if (f == NULL)
        return;
    if (f->map != NULL)
        munmap(f->map, f->map_bytes);
    free((void *)(uintptr_t)f->entry.name);
    free(f);
}
