/* SPDX-License-Identifier: Apache-2.0 */
#include "support/device_pair.h"
#include "anyrank/queue.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/float_bits.h"
#include "ref/core/size.h"
#include "ref/numerics/bits.h"

#define GUARD ((size_t)64) /* bytes before and after each buffer */
#define POISON 0xffe5a5a5u
#define SHOWN 4 /* differences of a slot that are printed */

ar_status pair_open(device_pair *p, const ar_device_choice *reference, const ar_device_choice *other, int threads)
{
    ar_status st = AR_OK;
    const ar_device_choice *which[2] = {reference, other};
    *p = (device_pair){.state = 1};
    for (int s = 0; s < 2; s++) {
        AR_TRY_TO(failed, st, ar_device_create(&p->side[s], which[s], s == 0 ? 1 : threads));
        AR_TRY_TO(failed, st, p->side[s]->ops->queue_create(p->side[s], &p->queue[s], AR_QUEUE_INLINE, "conformance"));
    }
    return AR_OK;
failed:
    pair_close(p);
    return st;
}

void pair_close(device_pair *p)
{
    for (int s = 0; s < 2; s++) {
        ar_queue_destroy(p->queue[s]);
        ar_device_destroy(p->side[s]);
        p->queue[s] = NULL;
        p->side[s] = NULL;
    }
}

const char *pair_values_name(pair_values v)
{
    static const char *const names[] = {"ordinary", "wide", "special", "any", "equal",    "zero",     "subnormal",
                                        "largest",  "ties", "squares", "",    "each row", "calm rows"};
    return names[v];
}

const char *pair_layout_name(pair_layout l)
{
    static const char *const names[] = {"row-major", "padded", "spaced", "swapped", "gaps", "heads", "reversed"};
    return names[l];
}

uint64_t pair_random(device_pair *p)
{
    uint64_t z = (p->state += 0x9e3779b97f4a7c15u); /* splitmix64 */
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

size_t pair_below(device_pair *p, size_t n)
{
    return (size_t)(pair_random(p) % n);
}

size_t pair_size(device_pair *p, size_t i)
{
    static const size_t sizes[] = {0, 1, 2, 31, 32, 33, 63, 255, 256, 257, 1000, 4099};
    if (i >= sizeof sizes / sizeof *sizes - (p->small ? 2 : 0))
        return SIZE_MAX;
    return p->round == 0 ? sizes[i] : pair_below(p, p->small ? 300 : 3000);
}

static float special_value(uint64_t r)
{
    static const uint32_t specials[] = {0x7fc00000u, 0xffc12345u, 0x7f800001u, 0x7fffffffu, 0x7f800000u, 0xff800000u,
                                        0x00000000u, 0x80000000u, 0x00000001u, 0x80000001u, 0x007fffffu, 0x807fffffu,
                                        0x00800000u, 0x80800000u, 0x7f7fffffu, 0xff7fffffu, 0x3f800000u, 0xbf800000u};
    return ari_float32(specials[r % (sizeof specials / sizeof *specials)]);
}

/* An exponent from `low` on, of `count` ones, and any sign and fraction. */
static float with_exponent(uint64_t r, uint32_t low, uint32_t count)
{
    return ari_float32((uint32_t)(r & 0x807fffffu) | (low + (uint32_t)(r >> 32) % count) << 23);
}

float pair_value(device_pair *p, pair_values v)
{
    const uint64_t r = pair_random(p);
    const float ordinary = (float)((int64_t)(r >> 11) - ((int64_t)1 << 52)) * 0x1p-50f;
    switch (v) {
    case PAIR_WIDE:
        return r % 37 == 0 ? special_value(6 + r % 12) : with_exponent(r, 0, 255);
    case PAIR_SPECIAL:
        return r % 6 == 0 ? special_value(pair_random(p)) : ordinary;
    case PAIR_ANY:
        return ari_float32((uint32_t)r);
    case PAIR_ZERO:
        return ari_float32((uint32_t)r & 0x80000000u);
    case PAIR_SUBNORMAL:
        return ari_float32((uint32_t)r & 0x807fffffu);
    case PAIR_LARGEST:
        return ari_float32(((uint32_t)r & 0x80000000u) | 0x7f7fffffu);
    case PAIR_TIES: {
        /* The bit below the last of 8, or of 11, bits of significand, then at most one more, or all below it. */
        const uint32_t half = (r >> 40) % 2 ? 0x8000u : 0x1000u, below = (r >> 41) % 3 == 0 ? 1u : 0u;
        const uint32_t bits = ((uint32_t)r & ~(2u * half - 1u)) | (half + below - ((r >> 44) % 4 == 0 ? 1u : 0u));
        return (bits & 0x7f800000u) == 0x7f800000u ? ari_float32(bits & 0xbfffffffu) : ari_float32(bits);
    }
    case PAIR_SQUARES:
        return with_exponent(r, 67, 120);
    default:
        return ordinary;
    }
}

/* One value after the other, or for PAIR_EQUAL the first of them each time. */
static void fill_floats(device_pair *p, float *x, size_t n, pair_values v)
{
    const float first = pair_value(p, v);
    for (size_t i = 0; i < n; i++)
        x[i] = v == PAIR_EQUAL ? first : pair_value(p, v);
}

static pair_values kind_of_row(device_pair *p, size_t row, pair_values v)
{
    if (v == PAIR_EACH_ROW)
        return (pair_values)((row + pair_below(p, 2)) % PAIR_VALUE_KINDS);
    if (v == PAIR_CALM_ROWS)
        return row % 3 == 2 ? (pair_values)pair_below(p, PAIR_VALUE_KINDS) : PAIR_ORDINARY;
    return v;
}

static size_t element_bytes(pair_kind k)
{
    static const size_t bytes[PAIR_KINDS] = {1, 2, 4, 8, 4, 8, 16};
    return bytes[k];
}

static void fail(device_pair *p, ar_status st)
{
    if (p->status == AR_OK)
        p->status = st;
}

pair_buf pair_none(void)
{
    return (pair_buf){.host = NULL};
}

/* Memory on both sides and its image, poisoned. In every other case elements begin a few of their own size after a
 * multiple of 64 bytes, else there. */
static pair_buf new_buffer(device_pair *p, const char *name, pair_kind kind, size_t count, bool output)
{
    if (p->status != AR_OK || p->buffers == PAIR_BUFFERS) {
        fail(p, ar_error_set(AR_ERR_INTERNAL, "more than %d buffers", PAIR_BUFFERS));
        return pair_none();
    }
    pair_memory *m = &p->memory[p->buffers++];
    const size_t size = element_bytes(kind);
    const size_t skew = p->skewed ? pair_below(p, 4) * (size > 8 ? 8 : size) : 0;
    *m = (pair_memory){.kind = kind, .output = output, .count = count, .front = GUARD + skew};
    snprintf(m->name, sizeof m->name, "%s", name);
    m->bytes = (m->front + count * size + GUARD + 3) / 4 * 4;
    m->host = malloc(m->bytes);
    if (!m->host)
        abort();
    for (size_t i = 0; i < m->bytes; i += 4)
        memcpy(m->host + i, &(uint32_t){POISON}, 4);
    pair_buf b = {.host = m->host + m->front};
    for (int s = 0; s < 2; s++) {
        const ar_status st = p->side[s]->ops->alloc(p->side[s], p->queue[s], &m->base[s], m->bytes);
        if (st != AR_OK)
            fail(p, st);
        b.at[s] = st == AR_OK ? ar_buf_at(m->base[s], m->front) : (ar_buf){NULL};
    }
    return b;
}

pair_buf pair_words(device_pair *p, const char *name, pair_kind kind, size_t count)
{
    return new_buffer(p, name, kind, count, true);
}

pair_buf pair_rows(device_pair *p, const char *name, size_t rows, size_t cols, pair_values v)
{
    const pair_buf b = new_buffer(p, name, PAIR_W32, rows * cols, false);
    for (size_t r = 0; r < rows && b.host; r++)
        fill_floats(p, (float *)b.host + r * cols, cols, kind_of_row(p, r, v));
    return b;
}

pair_buf pair_floats(device_pair *p, const char *name, size_t n, pair_values v)
{
    return pair_rows(p, name, 1, n, v);
}

pair_buf pair_zeros(device_pair *p, const char *name, pair_kind kind, size_t count)
{
    const pair_buf b = new_buffer(p, name, kind, count, true);
    if (b.host)
        memset(b.host, 0, count * element_bytes(kind));
    return b;
}

pair_buf pair_integers(device_pair *p, const char *name, pair_kind kind, size_t count, int64_t low, uint64_t n)
{
    const pair_buf b = new_buffer(p, name, kind, count, false);
    for (size_t i = 0; i < count && b.host; i++) {
        const int64_t v = (int64_t)((uint64_t)low + pair_random(p) % n);
        if (kind == PAIR_W64)
            ((int64_t *)b.host)[i] = v;
        else
            ((int32_t *)b.host)[i] = (int32_t)v;
    }
    return b;
}

pair_buf pair_bytes(device_pair *p, const char *name, size_t count, unsigned ones_of_eight)
{
    const pair_buf b = new_buffer(p, name, PAIR_W8, count, false);
    for (size_t i = 0; i < count && b.host; i++)
        ((uint8_t *)b.host)[i] = (uint8_t)(pair_random(p) % 8 < ones_of_eight);
    return b;
}

/* Strides of a layout, where the view begins in its buffer, and how many elements the buffer has. */
typedef struct placed {
    ptrdiff_t stride[AR_MAX_DIMS];
    size_t begin, elements;
} placed;

/* Gives dimension d the next stride outwards: `step` elements for everything inside it. */
static void place_dimension(placed *o, const size_t *shape, int d, size_t gap)
{
    o->stride[d] = (ptrdiff_t)o->elements;
    o->elements = shape[d] * o->elements + gap;
}

static placed place(int ndim, const size_t *shape, pair_layout layout)
{
    placed o = {.elements = 1};
    const int last = ndim - 1;
    const bool swapped = ndim >= 2 && (layout == PAIR_SWAPPED || layout == PAIR_GAPS);
    if (layout == PAIR_GAPS)
        o.elements = 2;
    const size_t gap = layout == PAIR_PADDED || layout == PAIR_GAPS ? 3 : layout == PAIR_SPACED ? 8 : 0;
    place_dimension(&o, shape, swapped ? last - 1 : last, gap);
    if (swapped)
        place_dimension(&o, shape, last, 0);
    if (layout == PAIR_HEADS && ndim == 4) {
        place_dimension(&o, shape, 1, 0);
        place_dimension(&o, shape, 2, 0);
        place_dimension(&o, shape, 0, 0);
        return o;
    }
    for (int d = swapped ? last - 2 : last - 1; d >= 0; d--)
        place_dimension(&o, shape, d, layout == PAIR_PADDED ? 1 : 0);
    if (layout == PAIR_REVERSED && shape[0] > 0) {
        o.begin = (shape[0] - 1) * (size_t)o.stride[0];
        o.stride[0] = -o.stride[0];
    }
    return o;
}

static pair_tensor placed_view(pair_buf b, ar_dtype t, int ndim, const size_t *shape, const placed *o)
{
    pair_tensor v = {.buf = b};
    for (int s = 0; s < 2; s++) {
        v.at[s] = (ar_tensor){.dtype = t, .ndim = ndim, .data = ar_buf_at(b.at[s], o->begin * ar_dtype_bytes(t))};
        for (int d = 0; d < ndim; d++) {
            v.at[s].shape[d] = shape[d];
            v.at[s].stride[d] = o->stride[d];
        }
    }
    return v;
}

/* Where element i, in row-major order, lies in the buffer. */
static size_t element_at(int ndim, const size_t *shape, const placed *o, size_t i)
{
    ptrdiff_t at = (ptrdiff_t)o->begin;
    for (int d = ndim - 1; d >= 0; d--) {
        at += (ptrdiff_t)(i % shape[d]) * o->stride[d];
        i /= shape[d];
    }
    return (size_t)at;
}

pair_tensor pair_output(device_pair *p, const char *name, int ndim, const size_t *shape, pair_layout layout)
{
    return pair_typed(p, name, AR_F32, ndim, shape, layout, false);
}

pair_tensor pair_typed(device_pair *p, const char *name, ar_dtype t, int ndim, const size_t *shape, pair_layout layout,
                       bool random)
{
    const placed o = place(ndim, shape, layout);
    static const pair_kind by_width[] = {[1] = PAIR_W8, [2] = PAIR_W16, [4] = PAIR_W32, [8] = PAIR_W64};
    const size_t width = ar_dtype_bytes(t);
    const pair_buf b = new_buffer(p, name, by_width[width], o.elements, !random);
    for (size_t i = 0; i < o.elements && random && b.host; i++)
        memcpy((char *)b.host + i * width, &(uint64_t){pair_random(p)}, width);
    return placed_view(b, t, ndim, shape, &o);
}

pair_tensor pair_input(device_pair *p, const char *name, int ndim, const size_t *shape, pair_layout layout,
                       pair_values v)
{
    const placed o = place(ndim, shape, layout);
    const pair_buf b = new_buffer(p, name, PAIR_W32, o.elements, false);
    const size_t cols = shape[ndim - 1], n = ari_volume(shape, ndim);
    float *row = calloc(cols + 1, sizeof *row);
    if (!row)
        abort();
    for (size_t i = 0; i < n && b.host; i++) {
        if (i % cols == 0)
            fill_floats(p, row, cols, kind_of_row(p, i / cols, v));
        ((float *)b.host)[element_at(ndim, shape, &o, i)] = row[i % cols];
    }
    free(row);
    return placed_view(b, AR_F32, ndim, shape, &o);
}

pair_tensor pair_view(pair_buf b, int ndim, const size_t *shape)
{
    const placed o = place(ndim, shape, PAIR_ROW_MAJOR);
    return placed_view(b, AR_F32, ndim, shape, &o);
}

pair_tensor pair_stored(device_pair *p, pair_tensor v)
{
    const pair_memory *from = NULL;
    for (int i = 0; i < p->buffers; i++)
        from = p->memory[i].host + p->memory[i].front == v.buf.host ? &p->memory[i] : from;
    if (p->stored != AR_BF16 || !from || p->status != AR_OK)
        return v;
    const size_t n = strlen(p->text);
    if (!strstr(p->text, ", BF16"))
        snprintf(p->text + n, sizeof p->text - n, ", BF16");
    const size_t begin = (size_t)((const char *)v.at[0].data.ptr - (const char *)v.buf.at[0].ptr) / sizeof(float);
    pair_tensor to = v;
    to.buf = new_buffer(p, from->name, PAIR_W16, from->count, from->output);
    for (size_t i = 0; i < from->count && to.buf.host && !from->output; i++) {
        float *x = (float *)v.buf.host + i;
        const uint16_t half = ari_bf16_of_f32(*x);
        ((uint16_t *)to.buf.host)[i] = half;
        *x = ari_f32_of_bf16(half);
    }
    for (int s = 0; s < 2; s++) {
        to.at[s].dtype = AR_BF16;
        to.at[s].data = ar_buf_at(to.buf.at[s], begin * sizeof(uint16_t));
    }
    return to;
}

size_t pair_count(pair_tensor v)
{
    return ar_tensor_count(&v.at[0]);
}

/* Where element i of a view lies in its buffer, in elements. */
static size_t place_in_buffer(const pair_tensor *v, size_t i)
{
    const ar_tensor *t = &v->at[0];
    ptrdiff_t at = ((const char *)t->data.ptr - (const char *)v->buf.at[0].ptr) / (ptrdiff_t)ar_dtype_bytes(t->dtype);
    for (int d = t->ndim - 1; d >= 0; d--) {
        at += (ptrdiff_t)(i % t->shape[d]) * t->stride[d];
        i /= t->shape[d];
    }
    return (size_t)at;
}

float *pair_element(pair_tensor v, size_t i)
{
    return (float *)v.buf.host + place_in_buffer(&v, i);
}

void pair_within(device_pair *p, pair_tensor v, const double *expected, const double *bound)
{
    for (int i = 0; i < p->buffers; i++) {
        pair_memory *m = &p->memory[i];
        if (m->host + m->front != v.buf.host)
            continue;
        m->expected = calloc(m->count + 1, sizeof *m->expected);
        m->bound = calloc(m->count + 1, sizeof *m->bound);
        if (!m->expected || !m->bound)
            abort();
        for (size_t k = 0; k < m->count; k++)
            m->bound[k] = -1.0; /* no element of the view */
        for (size_t k = 0; k < pair_count(v); k++) {
            m->expected[place_in_buffer(&v, k)] = expected[k];
            m->bound[place_in_buffer(&v, k)] = bound[k];
        }
    }
}

device_pair *pair_begin(device_pair *p, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(p->text, sizeof p->text, format, list);
    va_end(list);
    p->status = AR_OK;
    p->uploaded = false;
    p->buffers = 0;
    p->skewed = pair_below(p, 2) == 0;
    p->stored = pair_below(p, 3) == 0 ? AR_BF16 : AR_F32;
    return p;
}

bool pair_goes_on(const device_pair *p)
{
    return !p->tally.missing && p->reported < SHOWN && !(p->spoil && p->tally.differing > 0);
}

static const char *name_of(const device_pair *p, int side)
{
    return p->side[side]->ops->name;
}

bool pair_ready(device_pair *p)
{
    for (int i = 0; i < p->buffers && !p->uploaded; i++)
        for (int s = 0; s < 2 && p->status == AR_OK; s++) {
            const pair_memory *m = &p->memory[i];
            fail(p, p->side[s]->ops->copy(p->side[s], p->queue[s], m->base[s], (ar_cbuf){m->host}, m->bytes));
        }
    p->uploaded = true;
    return p->status == AR_OK;
}

void pair_ran(device_pair *p, int side, ar_status st)
{
    if (st == AR_OK)
        return;
    if (side == 1 && st == AR_ERR_UNSUPPORTED) {
        p->tally.missing = true;
    } else {
        p->tally.failures++;
        p->reported++;
        printf("%s, %s: %s gives %s: %s\n", p->slot, p->text, name_of(p, side), ar_status_name(st), ar_error_message());
    }
    fail(p, st);
}

/* What both sides hold now. Gives; free. */
static bool download(device_pair *p, const pair_memory *m, unsigned char *got[2])
{
    for (int s = 0; s < 2; s++) {
        got[s] = malloc(m->bytes);
        if (!got[s])
            abort();
        ar_status st = p->side[s]->ops->copy(p->side[s], p->queue[s], (ar_buf){got[s]}, ar_const(m->base[s]), m->bytes);
        if (st == AR_OK)
            st = ar_queue_sync(p->queue[s], 0);
        if (st != AR_OK)
            pair_ran(p, s, st);
    }
    return p->status == AR_OK;
}

static bool is_nan_of(pair_kind k, const void *x)
{
    uint64_t u = 0;
    memcpy(&u, x, element_bytes(k) > 8 ? 8 : element_bytes(k));
    switch (k) {
    case PAIR_F32_NAN:
        return (u & 0x7fffffffu) > 0x7f800000u;
    case PAIR_F64_NAN:
        return (u & 0x7fffffffffffffffu) > 0x7ff0000000000000u;
    default:
        return false;
    }
}

static bool same_limbs(const void *a, const void *b)
{
    uint64_t x[2], y[2];
    memcpy(x, a, sizeof x);
    memcpy(y, b, sizeof y);
    for (int i = 0; i < 2; i++) {
        uint64_t *v = i == 0 ? x : y;
        v[0] += (v[1] >> 32) | (v[1] >> 63 ? 0xffffffff00000000u : 0u);
        v[1] &= 0xffffffffu;
    }
    return x[0] == y[0] && x[1] == y[1];
}

static bool lies_within(const pair_memory *m, size_t i, const unsigned char *x)
{
    float v;
    uint16_t half;
    memcpy(&half, x, sizeof half);
    if (m->kind == PAIR_W16)
        v = ari_f32_of_bf16(half);
    else
        memcpy(&v, x, sizeof v);
    if (isnan(m->expected[i]))
        return isnan(v);
    return fabs((double)v - m->expected[i]) <= m->bound[i];
}

static bool same_element(const pair_memory *m, size_t i, unsigned char *const got[2])
{
    const size_t size = element_bytes(m->kind), at = m->front + i * size;
    if (m->expected && m->bound[i] >= 0.0)
        return lies_within(m, i, got[0] + at) && lies_within(m, i, got[1] + at);
    if (memcmp(got[0] + at, got[1] + at, size) == 0)
        return true;
    if (m->kind == PAIR_LIMBS)
        return same_limbs(got[0] + at, got[1] + at);
    return is_nan_of(m->kind, got[0] + at) && is_nan_of(m->kind, got[1] + at);
}

static void print_bits(const pair_memory *m, size_t i, const unsigned char *got)
{
    const size_t size = element_bytes(m->kind) > 8 ? 8 : element_bytes(m->kind);
    for (size_t part = 0; part < element_bytes(m->kind); part += size) {
        uint64_t u = 0;
        memcpy(&u, got + m->front + i * element_bytes(m->kind) + part, size);
        printf(" 0x%0*" PRIx64, (int)size * 2, u);
    }
}

static void report(device_pair *p, const pair_memory *m, size_t first, size_t differing, unsigned char *const got[2])
{
    if (p->spoil || p->reported++ >= SHOWN)
        return;
    printf("%s, %s: %s[%zu] of %zu:", p->slot, p->text, m->name, first, m->count);
    for (int s = 0; s < 2; s++) {
        printf(" %s", name_of(p, s));
        print_bits(m, first, got[s]);
    }
    if (m->expected)
        printf(", expected %.9g within %.3g", m->expected[first], m->bound[first]);
    printf("; %zu differ\n", differing);
}

/* Bytes outside the elements: nobody may write there. */
static void compare_guards(device_pair *p, const pair_memory *m, unsigned char *const got[2])
{
    const size_t end = m->front + m->count * element_bytes(m->kind);
    for (size_t i = 0; i < m->bytes; i++) {
        if (i == m->front)
            i = end;
        for (int s = 0; s < 2 && i < m->bytes; s++)
            if (got[s][i] != m->host[i]) {
                p->tally.failures++;
                p->reported++;
                printf("%s, %s: %s wrote outside %s, %td bytes from its beginning (it has %zu)\n", p->slot, p->text,
                       name_of(p, s), m->name, (ptrdiff_t)i - (ptrdiff_t)m->front, end - m->front);
                return;
            }
    }
}

/* Flips a bit of an element in the middle, the next one that is not a NaN; which bit, so that any comparison must see
 * it. True if there was one. */
static bool spoil(const pair_memory *m, unsigned char *got)
{
    const size_t size = element_bytes(m->kind);
    for (size_t i = 0; i < m->count; i++) {
        const size_t at = (m->count / 2 + i) % m->count;
        const bool bounded = m->expected && m->bound[at] >= 0.0;
        unsigned char *x = got + m->front + at * size;
        if (is_nan_of(m->kind, x) || (bounded && isnan(m->expected[at])))
            continue;
        x[bounded ? 3 : 0] ^= bounded ? 0x40 : 1;
        return true;
    }
    return false;
}

/* Counted are the words of what was to be written; what was only read is compared too. */
static void compare(device_pair *p, const pair_memory *m, bool written, unsigned char *const got[2])
{
    size_t differing = 0, first = 0;
    compare_guards(p, m, got);
    if (m->expected || memcmp(got[0], got[1], m->bytes) != 0)
        for (size_t i = m->count; i-- > 0;)
            if (!same_element(m, i, got)) {
                differing++;
                first = i;
            }
    p->tally.words += written ? m->count : 0;
    p->tally.differing += differing;
    if (differing > 0)
        report(p, m, first, differing, got);
}

void pair_end(device_pair *p)
{
    bool spoiled = !p->spoil;
    pair_ready(p);
    for (int i = 0; i < p->buffers; i++) {
        pair_memory *m = &p->memory[i];
        unsigned char *got[2] = {NULL, NULL};
        if (p->status == AR_OK && download(p, m, got)) {
            const bool written = m->output || memcmp(got[0], m->host, m->bytes) != 0;
            spoiled = spoiled || (written && spoil(m, got[1]));
            compare(p, m, written, got);
        }
        for (int s = 0; s < 2; s++) {
            p->side[s]->ops->free(p->side[s], p->queue[s], m->base[s]);
            free(got[s]);
        }
        free(m->host);
        free(m->expected);
        free(m->bound);
    }
    if (p->status != AR_OK && !p->tally.missing && p->reported == 0) {
        p->tally.failures++;
        p->reported++;
        printf("%s, %s: %s\n", p->slot, p->text, ar_error_message());
    }
    p->buffers = 0;
    p->tally.cases++;
}
