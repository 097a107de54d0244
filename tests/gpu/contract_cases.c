/* SPDX-License-Identifier: Apache-2.0 */
/* The exact product and its parts. Quantised operands are the device's own: they are seen through products. */
#include <string.h>

#include "gpu/conformance.h"
#include "ref/numerics/integer_sum.h"

/* Some columns of a matrix times a power of two, some zero: what equilibration is for. */
static void scale_columns(device_pair *p, pair_tensor t)
{
    const size_t cols = t.at[0].shape[t.at[0].ndim - 1];
    for (size_t k = 0; k < cols && t.buf.host; k++) {
        const size_t what = pair_below(p, 6);
        const float factor = what == 0 ? 0.0f : (float)ari_pow2((int32_t)pair_below(p, 60) - 30);
        for (size_t i = k; i < pair_count(t) && what < 3; i += cols)
            *pair_element(t, i) *= factor;
    }
}

/* Exponents as another device, rank or part left them: flags among them. */
static pair_buf old_exponents(device_pair *p, const char *name, size_t n)
{
    const pair_buf b = pair_integers(p, name, PAIR_W32, n, -140, 260);
    for (size_t i = 0; i < n && b.host; i++) {
        const size_t what = pair_below(p, 8);
        if (what < 2)
            ((int32_t *)b.host)[i] = what == 0 ? ARI_EXP_ZERO : ARI_EXP_NONFINITE;
    }
    return b;
}

static const size_t matrices[][4] = {{1, 1, 1, 1},   {1, 1, 5, 33},  {1, 3, 40, 7},  {2, 3, 4, 16},
                                     {1, 1, 1, 700}, {1, 1, 700, 1}, {2, 2, 33, 65}, {1, 2, 3, 257}};
#define MATRICES (sizeof matrices / sizeof *matrices)

static void col_exponents_case(device_pair *p, const size_t shape[4], pair_layout layout, pair_values v, bool max_into)
{
    PAIR_CASE(p, "[%zu, %zu, %zu, %zu] %s, %s values%s", shape[0], shape[1], shape[2], shape[3],
              pair_layout_name(layout), pair_values_name(v), max_into ? ", max into" : "");
    const pair_tensor values = pair_input(p, "b", 4, shape, layout, v);
    scale_columns(p, values);
    const pair_tensor b = pair_stored(p, values);
    const size_t n = shape[0] * shape[1] * shape[3];
    const pair_buf c = max_into ? old_exponents(p, "c", n) : pair_words(p, "c", PAIR_W32, n);
    PAIR_RUN(p, col_exponents, c.at[s], &b.at[s], max_into);
}

static void row_exponents_case(device_pair *p, const size_t shape[4], pair_layout layout, pair_values v, int form)
{
    const int sign = form % 2 ? 1 : -1;
    const bool max_into = form & 2, scaled = form & 4;
    PAIR_CASE(p, "[%zu, %zu, %zu, %zu] %s, %s values, sign %d%s%s", shape[0], shape[1], shape[2], shape[3],
              pair_layout_name(layout), pair_values_name(v), sign, scaled ? ", scaled" : "",
              max_into ? ", max into" : "");
    const pair_tensor a = pair_stored(p, pair_input(p, "a", 4, shape, layout, v));
    const pair_buf c = scaled ? old_exponents(p, "c", shape[0] * shape[1] * shape[3]) : pair_none();
    const size_t n = shape[0] * shape[1] * shape[2];
    const pair_buf e = max_into ? old_exponents(p, "e", n) : pair_words(p, "e", PAIR_W32, n);
    PAIR_RUN(p, row_exponents, e.at[s], &a.at[s], ar_const(c.at[s]), sign, max_into, form & 8);
}

static const pair_values operand_values[] = {PAIR_ORDINARY, PAIR_WIDE,      PAIR_EACH_ROW, PAIR_SPECIAL, PAIR_ZERO,
                                             PAIR_LARGEST,  PAIR_SUBNORMAL, PAIR_TIES,     PAIR_ANY};
#define OPERAND_VALUES (sizeof operand_values / sizeof *operand_values)

void col_exponents_cases(device_pair *p)
{
    for (size_t i = 0; i < MATRICES; i++)
        for (int layout = 0; layout < PAIR_LAYOUTS; layout++)
            for (size_t v = 0; v < OPERAND_VALUES && pair_goes_on(p); v++)
                col_exponents_case(p, matrices[i], (pair_layout)layout, operand_values[v], pair_below(p, 2));
}

void row_exponents_cases(device_pair *p)
{
    for (size_t i = 0; i < MATRICES; i++)
        for (int layout = 0; layout < PAIR_LAYOUTS; layout++)
            for (size_t v = 0; v < OPERAND_VALUES && pair_goes_on(p); v++)
                row_exponents_case(p, matrices[i], (pair_layout)layout, operand_values[v], (int)pair_below(p, 16));
}

/* C[m, n] = A[m, k] B[n, k]^T in a batch, from values to packed operands. */
typedef struct product {
    size_t batch, m, n, k;
    pair_values values;
    bool scale, narrow;
    pair_buf c, e, f;
    ar_packed *a[2], *b[2];
} product;

/* A matrix of the batch is packed at once, or in two parts along its rows or along k. */
static void pack_parts(device_pair *p, ar_packed *const to[2], pair_tensor t, pair_buf c, int sign, pair_buf e)
{
    const size_t rows = t.at[0].shape[1], k = t.at[0].shape[2], form = pair_below(p, 3), batch = t.at[0].shape[0];
    if (form == 1 && rows > 1) {
        for (size_t part = 0; part < 2; part++) {
            const size_t from = part * (rows / 2), n = part == 0 ? rows / 2 : rows - rows / 2;
            const ar_tensor at[2] = {ar_tensor_slice(&t.at[0], 1, from, n), ar_tensor_slice(&t.at[1], 1, from, n)};
            PAIR_RUN(p, pack, to[s], from, 0, &at[s], ar_const(c.at[s]), sign, ar_const(e.at[s]));
        }
    } else if (form == 2 && k > 1 && batch == 1) { /* c holds k columns a matrix: its second part begins further on */
        for (size_t part = 0; part < 2; part++) {
            const size_t from = part * (k / 3), n = part == 0 ? k / 3 : k - k / 3;
            const ar_tensor at[2] = {ar_tensor_slice(&t.at[0], 2, from, n), ar_tensor_slice(&t.at[1], 2, from, n)};
            PAIR_RUN(p, pack, to[s], 0, from, &at[s],
                     c.host ? ar_cbuf_at(ar_const(c.at[s]), from * 4) : ar_const(c.at[s]), sign, ar_const(e.at[s]));
        }
    } else {
        PAIR_RUN(p, pack, to[s], 0, 0, &t.at[s], ar_const(c.at[s]), sign, ar_const(e.at[s]));
    }
}

/* Every step before the product. */
static void prepare(device_pair *p, product *o)
{
    const size_t sa[3] = {o->batch, o->m, o->k}, sb[3] = {o->batch, o->n, o->k};
    const unsigned form = o->narrow ? AR_PACKED_NARROW : 0;
    const pair_tensor a =
        pair_stored(p, pair_input(p, "a", 3, sa, (pair_layout)pair_below(p, PAIR_LAYOUTS), o->values));
    const pair_tensor values = pair_input(p, "b", 3, sb, (pair_layout)pair_below(p, PAIR_LAYOUTS),
                                          o->values == PAIR_EACH_ROW ? PAIR_CALM_ROWS : o->values);
    if (o->values != PAIR_LARGEST)
        scale_columns(p, values);
    const pair_tensor b = pair_stored(p, values);
    o->c = o->scale ? pair_words(p, "c", PAIR_W32, o->batch * o->k) : pair_none();
    o->e = pair_words(p, "e", PAIR_W32, o->batch * o->m);
    o->f = pair_words(p, "f", PAIR_W32, o->batch * o->n);
    if (o->scale)
        PAIR_RUN(p, col_exponents, o->c.at[s], &b.at[s], false);
    PAIR_RUN(p, row_exponents, o->e.at[s], &a.at[s], ar_const(o->c.at[s]), 1, false, o->narrow);
    PAIR_RUN(p, row_exponents, o->f.at[s], &b.at[s], ar_const(o->c.at[s]), -1, false, o->narrow);
    PAIR_RUN(p, packed_create, &o->a[s], o->batch, o->m, o->k, AR_PACKED_LEFT | form);
    PAIR_RUN(p, packed_create, &o->b[s], o->batch, o->n, o->k, form);
    pack_parts(p, o->a, a, o->c, 1, o->e);
    pack_parts(p, o->b, b, o->c, -1, o->f);
}

static void destroy_packed(device_pair *p, product *o)
{
    for (int s = 0; s < 2; s++) {
        p->side[s]->ops->packed_destroy(p->side[s], p->queue[s], o->a[s]);
        p->side[s]->ops->packed_destroy(p->side[s], p->queue[s], o->b[s]);
    }
}

/* Shapes around the tiles of tensor cores, lengths around those of digits' sums and of limbs. */
static const size_t sizes[][3] = {{1, 1, 1},      {3, 5, 15},    {16, 16, 16},   {17, 33, 17},   {64, 40, 100},
                                  {5, 130, 31},   {130, 3, 33},  {2, 3, 8191},   {3, 2, 8192},   {4, 4, 10000},
                                  {33, 20, 257},  {1, 64, 128},  {2, 2, 16384},  {8, 8, 1},      {63, 129, 131},
                                  {200, 65, 63},  {127, 1, 127}, {3, 128, 4096}, {890, 300, 16}, {2, 1, 131071},
                                  {1, 2, 131072}, {2, 2, 140000}};
#define SIZES (sizeof sizes / sizeof *sizes)

static void every_product(device_pair *p, void (*one)(device_pair *, product *))
{
    for (size_t i = 0; i < SIZES; i++)
        for (size_t v = 0; v < OPERAND_VALUES && pair_goes_on(p); v++) {
            const bool random = p->round > 0 && i < 7;
            product o = {.m = random ? 1 + pair_below(p, 70) : sizes[i][0],
                         .n = random ? 1 + pair_below(p, 70) : sizes[i][1],
                         .k = random ? 1 + pair_below(p, 300) : sizes[i][2],
                         .values = operand_values[v],
                         .scale = pair_below(p, 4) != 0,
                         .narrow = pair_below(p, 3) == 0};
            o.batch = o.k > 1000 ? 1 : 1 + pair_below(p, 3);
            const size_t seldom = o.k > 20000 || o.m > 500 ? OPERAND_VALUES
                                  : o.k > 1000             ? 4
                                                           : 1; /* one kind of values in so many */
            if (v % seldom != (i + (size_t)p->round) % seldom || (p->small && o.k > 9000))
                continue;
            one(p, &o);
        }
}

static void begin_product(device_pair *p, const product *o, const char *more)
{
    pair_begin(p, "%zu x [%zu, %zu, %zu], %s values%s%s%s", o->batch, o->m, o->n, o->k, pair_values_name(o->values),
               o->scale ? "" : ", no scale", o->narrow ? ", narrow" : "", more);
}

static void end_product(device_pair *p, product *o)
{
    pair_end(p);
    destroy_packed(p, o);
}

static void gemm_i64_case(device_pair *p, product *o)
{
    const int limbs = (o->k > ARI_CONTRACT_BLOCK && !o->narrow) || pair_below(p, 2) ? 2 : 1;
    const size_t n = o->batch * o->m * o->n;
    begin_product(p, o, limbs == 1 ? ", one limb" : ", two limbs");
    const pair_buf sums = pair_words(p, "s", limbs == 1 ? PAIR_W64 : PAIR_LIMBS, n);
    const pair_buf added = pair_zeros(p, "added", limbs == 1 ? PAIR_W64 : PAIR_LIMBS, n);
    for (size_t i = 0; i < n * (size_t)limbs && added.host; i++)
        ((int64_t *)added.host)[i] = (int64_t)pair_random(p) >> 20;
    prepare(p, o);
    PAIR_RUN(p, gemm_i64, sums.at[s], o->a[s], o->b[s], limbs, false);
    PAIR_RUN(p, gemm_i64, added.at[s], o->a[s], o->b[s], limbs, true);
    end_product(p, o);
}

PAIR_CASES(gemm_i64, every_product)

static void gemm_round_case(device_pair *p, product *o)
{
    static const pair_layout layouts[] = {PAIR_ROW_MAJOR, PAIR_PADDED, PAIR_REVERSED};
    const bool bias = o->batch == 1 && pair_below(p, 2);
    const ar_activation act = o->batch == 1 ? (ar_activation)pair_below(p, AR_ACT_NONE + 1) : AR_ACT_NONE;
    const size_t shape[3] = {o->batch, o->m, o->n}, *from = o->batch == 1 ? shape + 1 : shape;
    const int ndim = o->batch == 1 ? 2 : 3;
    begin_product(p, o, bias ? ", bias" : "");
    const pair_tensor y = pair_output(p, "y", ndim, from, layouts[pair_below(p, 3)]);
    const pair_tensor z = pair_output(p, "z", ndim, from, layouts[pair_below(p, 3)]);
    const pair_buf b = bias ? pair_floats(p, "bias", o->n, PAIR_ORDINARY) : pair_none();
    const bool with_z = act != AR_ACT_NONE || pair_below(p, 2);
    prepare(p, o);
    PAIR_RUN(p, gemm_round, &y.at[s], o->a[s], o->b[s], ar_const(o->e.at[s]), ar_const(o->f.at[s]), ar_const(b.at[s]),
             act, with_z ? &z.at[s] : NULL, NULL);
    end_product(p, o);
}

#define BAND_ROWS 90

/* Elements [first, end) of row `row` of every matrix become those of `zeros`. */
static void clear_run(device_pair *p, pair_tensor y, pair_tensor zeros, size_t row, size_t first, size_t end)
{
    if (first >= end)
        return;
    for (int side = 0; side < 2; side++) {
        const ar_tensor row_to = ar_tensor_slice(&y.at[side], 1, row, 1),
                        to = ar_tensor_slice(&row_to, 2, first, end - first);
        const ar_tensor from = ar_tensor_slice(&zeros.at[side], 2, first, end - first);
        if (p->status == AR_OK)
            pair_ran(p, side, p->side[side]->ops->copy_strided(p->side[side], p->queue[side], &to, &from));
    }
}

/* A band of columns, beside which anything may be, or of terms, beside which A is zero. rows of A: one period of the band
 * or two. */
static void band_case(device_pair *p, int form, bool of_terms, size_t periods)
{
    static int32_t edges[BAND_ROWS][2];
    const size_t n = 131;
    product o = {.batch = 2, .m = periods * BAND_ROWS, .n = n, .k = of_terms ? n : 20, .values = PAIR_ORDINARY};
    const size_t sa[3] = {o.batch, o.m, o.k}, sb[3] = {o.batch, o.n, o.k}, sy[3] = {o.batch, o.m, o.n},
                 sz[3] = {o.batch, 1, n};
    const ar_band band = {edges[0], BAND_ROWS, of_terms};
    begin_product(p, &o, of_terms ? ", a band of terms" : ", a band of columns");
    for (size_t i = 0; i < BAND_ROWS; i++) { /* causal; windows of the last ones; nothing at all, or anything */
        const size_t some = pair_below(p, n + 1), more = pair_below(p, n + 1);
        edges[i][0] = (int32_t)(form == 0 ? 0 : form == 1 ? (i < 7 ? 0 : i - 7) : some);
        edges[i][1] = (int32_t)(form < 2 ? i + 1 : i < 40 ? 0 : i < 80 ? some + more / 30 : more);
    }
    const pair_tensor a = pair_input(p, "a", 3, sa, PAIR_ROW_MAJOR, o.values),
                      b = pair_input(p, "b", 3, sb, PAIR_PADDED, o.values);
    for (size_t i = 0; i < o.batch * o.m * o.k && a.buf.host && of_terms; i++) {
        const int32_t *row = edges[i / o.k % BAND_ROWS], k = (int32_t)(i % o.k);
        if (k < row[0] || k >= row[1])
            *pair_element(a, i) = 0.0f;
    }
    const pair_tensor y = pair_output(p, "y", 3, sy, PAIR_ROW_MAJOR),
                      zeros = pair_input(p, "zeros", 3, sz, PAIR_ROW_MAJOR, PAIR_ZERO);
    o.e = pair_words(p, "e", PAIR_W32, o.batch * o.m);
    o.f = pair_words(p, "f", PAIR_W32, o.batch * o.n);
    PAIR_RUN(p, row_exponents, o.e.at[s], &a.at[s], (ar_cbuf){NULL}, 1, false, false);
    PAIR_RUN(p, row_exponents, o.f.at[s], &b.at[s], (ar_cbuf){NULL}, -1, false, false);
    PAIR_RUN(p, packed_create, &o.a[s], o.batch, o.m, o.k, true);
    PAIR_RUN(p, packed_create, &o.b[s], o.batch, o.n, o.k, false);
    pack_parts(p, o.a, a, (pair_buf){.host = NULL}, 1, o.e);
    pack_parts(p, o.b, b, (pair_buf){.host = NULL}, -1, o.f);
    PAIR_RUN(p, gemm_round, &y.at[s], o.a[s], o.b[s], ar_const(o.e.at[s]), ar_const(o.f.at[s]), (ar_cbuf){NULL},
             AR_ACT_NONE, NULL, &band);
    for (size_t i = 0; i < o.m && !of_terms; i++) {
        const int32_t *row = edges[i % BAND_ROWS];
        clear_run(p, y, zeros, i, 0, row[0] < row[1] ? (size_t)row[0] : n);
        clear_run(p, y, zeros, i, row[0] < row[1] ? (size_t)row[1] : n, n);
    }
    end_product(p, &o);
}

/* Results of more than one tile of planes on the host (gpu/blas.h): rows or columns of one matrix, or both, and several
 * matrices. */
static void several_tiles(device_pair *p, void (*one)(device_pair *, product *))
{
    static const size_t results[][3] = {{1, 203, 390}, {1, 20, 2001}, {1, 2001, 20}, {5, 90, 91}, {3, 150, 150}};
    for (size_t i = 0; i < sizeof results / sizeof *results; i++) {
        product o = {.batch = results[i][0], .m = results[i][1], .n = results[i][2], .k = 5, .values = PAIR_ORDINARY};
        o.scale = true;
        one(p, &o);
    }
}

/* The same on a GPU. */
static void large_results(device_pair *p, void (*one)(device_pair *, product *))
{
    product o = {.batch = 1, .m = 2500, .n = 8300, .k = 5, .values = PAIR_ORDINARY, .scale = true};
    one(p, &o);
    o = (product){.batch = 60, .m = 400, .n = 600, .k = 3, .values = PAIR_ORDINARY, .scale = true};
    one(p, &o);
}

void gemm_round_cases(device_pair *p)
{
    every_product(p, gemm_round_case);
    for (int i = 0; i < 12 && pair_goes_on(p); i++)
        band_case(p, i % 3, i / 3 % 2, 1 + (size_t)i / 6);
    if (p->round == 0 && pair_goes_on(p))
        several_tiles(p, gemm_round_case);
    if (p->round == 1 && !p->small && pair_goes_on(p))
        large_results(p, gemm_round_case);
}

/* A second batch is added to what the first one left, then two runs of one matrix. */
static void gemm_acc_case(device_pair *p, product *o)
{
    begin_product(p, o, "");
    const size_t n = o->m * o->n, low = n + pair_below(p, 9);
    const pair_buf t = pair_words(p, "t", PAIR_W8, n), hl = pair_words(p, "hl", PAIR_W64, low + n);
    const pair_buf e = old_exponents(p, "e of runs", 2 * o->m), f = old_exponents(p, "f of runs", 2 * o->n);
    const size_t first = o->k / 5, cut[3] = {0, o->k / 3, o->k - first};
    const ar_runs runs = {2, first, cut};
    const bool narrow = pair_below(p, 2) != 0;
    prepare(p, o);
    for (int twice = 0; twice < 2; twice++)
        PAIR_RUN(p, gemm_acc, t.at[s], hl.at[s], low, narrow, o->a[s], o->b[s], ar_const(o->e.at[s]),
                 ar_const(o->f.at[s]), NULL, twice == 0);
    if (o->batch == 1)
        PAIR_RUN(p, gemm_acc, t.at[s], hl.at[s], low, narrow, o->a[s], o->b[s], ar_const(e.at[s]), ar_const(f.at[s]),
                 &runs, false);
    end_product(p, o);
}

void gemm_acc_cases(device_pair *p)
{
    every_product(p, gemm_acc_case);
    if (p->round == 0 && pair_goes_on(p))
        several_tiles(p, gemm_acc_case);
    if (p->round == 1 && !p->small && pair_goes_on(p))
        large_results(p, gemm_acc_case);
}

/* Every quantised element of A, as the product with the unit matrix: q times 2^24. */
static void pack_case(device_pair *p, product *o)
{
    if (o->k > 400)
        return;
    o->n = o->k;
    begin_product(p, o, ", by the unit matrix");
    const size_t sa[3] = {o->batch, o->m, o->k}, unit[3] = {o->batch, o->k, o->k};
    const int sign = pair_below(p, 2) ? 1 : -1;
    const pair_tensor a = pair_input(p, "a", 3, sa, (pair_layout)pair_below(p, PAIR_LAYOUTS), o->values);
    const pair_tensor b = pair_input(p, "unit", 3, unit, PAIR_ROW_MAJOR, PAIR_ZERO);
    for (size_t i = 0; i < o->batch * o->k && b.buf.host; i++)
        *pair_element(b, i * o->k + i % o->k) = 1.0f;
    o->c = o->scale ? old_exponents(p, "c", o->batch * o->k) : pair_none();
    o->e = pair_words(p, "e", PAIR_W32, o->batch * o->m);
    o->f = pair_integers(p, "f", PAIR_W32, o->batch * o->k, 1, 1);
    const pair_buf sums = pair_words(p, "s", PAIR_W64, o->batch * o->m * o->k);
    PAIR_RUN(p, row_exponents, o->e.at[s], &a.at[s], ar_const(o->c.at[s]), sign, false, false);
    PAIR_RUN(p, packed_create, &o->a[s], o->batch, o->m, o->k, true);
    PAIR_RUN(p, packed_create, &o->b[s], o->batch, o->k, o->k, false);
    pack_parts(p, o->a, a, o->c, sign, o->e);
    PAIR_RUN(p, pack, o->b[s], 0, 0, &b.at[s], (ar_cbuf){NULL}, -1, ar_const(o->f.at[s]));
    PAIR_RUN(p, gemm_i64, sums.at[s], o->a[s], o->b[s], 1, false);
    end_product(p, o);
}

PAIR_CASES(pack, every_product)

/* An operand that is made and packed again, with other values: what was there before shows nowhere. */
void packed_create_cases(device_pair *p)
{
    for (size_t i = 0; i < 8 && pair_goes_on(p); i++) {
        product o = {.batch = 1 + i % 3, .m = 5, .n = 7, .k = 20 + i, .values = PAIR_LARGEST, .scale = false};
        begin_product(p, &o, ", packed twice");
        const pair_buf sums = pair_words(p, "s", PAIR_W64, o.batch * o.m * o.n);
        prepare(p, &o);
        const pair_tensor again =
            pair_input(p, "again", 3, (const size_t[]){o.batch, o.m, o.k}, PAIR_ROW_MAJOR, PAIR_ORDINARY);
        if (p->status == AR_OK) { /* made after the first kernels: uploaded by hand */
            pair_memory *m = &p->memory[p->buffers - 1];
            for (int s = 0; s < 2; s++)
                pair_ran(p, s,
                         p->side[s]->ops->copy(p->side[s], p->queue[s], m->base[s], (ar_cbuf){m->host}, m->bytes));
        }
        PAIR_RUN(p, row_exponents, o.e.at[s], &again.at[s], (ar_cbuf){NULL}, 1, false, false);
        PAIR_RUN(p, pack, o.a[s], 0, 0, &again.at[s], (ar_cbuf){NULL}, 1, ar_const(o.e.at[s]));
        PAIR_RUN(p, gemm_i64, sums.at[s], o.a[s], o.b[s], 1, false);
        end_product(p, &o);
    }
}

/* Part of both operands, with the same terms. */
static void packed_part_case(device_pair *p, product *o)
{
    const size_t m = pair_below(p, o->m), n = pair_below(p, o->n) / (pair_below(p, 2) ? 4 : 1) * 4 % (o->n + 1);
    const size_t k = pair_below(p, 3) ? pair_below(p, o->k) : 0, matrix = pair_below(p, o->batch);
    ar_part left = {matrix, o->batch - matrix, m, 1 + pair_below(p, o->m - m), k, o->k - k}, right = left;
    right.row = n < o->n ? n : 0;
    right.rows = 1 + pair_below(p, o->n - right.row);
    if (k > 0)
        left.cols = right.cols = 1 + pair_below(p, o->k - k);
    product part = {.batch = left.matrices};
    begin_product(p, o, ", a part");
    const pair_buf sums = pair_words(p, "s", PAIR_LIMBS, left.matrices * left.rows * right.rows);
    prepare(p, o);
    PAIR_RUN(p, packed_part, &part.a[s], o->a[s], &left);
    PAIR_RUN(p, packed_part, &part.b[s], o->b[s], &right);
    PAIR_RUN(p, gemm_i64, sums.at[s], part.a[s], part.b[s], 2, false);
    end_product(p, &part);
    destroy_packed(p, o);
}

PAIR_CASES(packed_part, every_product)

/* NULL is accepted; hundreds of them, of all sizes, one after the other. */
void packed_destroy_cases(device_pair *p)
{
    PAIR_CASE(p, "200 operands, one after the other");
    const pair_buf y = pair_words(p, "y", PAIR_W32, 16);
    for (int i = 0; i < 200; i++) {
        product o = {.batch = 1};
        PAIR_RUN(p, packed_create, &o.a[s], 1 + (size_t)i % 3, (size_t)i, (size_t)(i * 7 % 50), (unsigned)i % 4u);
        destroy_packed(p, &o); /* its other operands are NULL */
    }
    PAIR_RUN(p, zero, y.at[s], 64);
}

/* What packed_room said before is what packed_bytes says now. part NULL: of all of it. */
static void expect_room(device_pair *p, int s, const ar_packed *made, size_t batch, size_t rows, size_t k,
                        unsigned form, const ar_part *part)
{
    const ar_device_ops *ops = p->side[s]->ops;
    size_t room = 0;
    pair_ran(p, s, ops->packed_room(p->side[s], &room, batch, rows, k, form, part));
    if (p->status == AR_OK && room != ops->packed_bytes(made))
        pair_ran(p, s,
                 ar_error_set(AR_ERR_INTERNAL, "%s of [%zu, %zu, %zu] takes %zu bytes, expected %zu",
                              part ? "a part" : "all", batch, rows, k, ops->packed_bytes(made), room));
}

void packed_room_cases(device_pair *p)
{
    PAIR_CASE(p, "operands and parts of them, of few terms and of many");
    const pair_buf y = pair_words(p, "y", PAIR_W32, 16);
    for (int i = 0; i < 60 && p->status == AR_OK; i++) {
        const size_t rows = 1 + pair_below(p, 20), k = 1 + pair_below(p, i % 10 ? 60 : 9000);
        ar_part at = {.matrix = pair_below(p, 2), .matrices = 1, .row = pair_below(p, rows), .col = pair_below(p, k)};
        product whole = {.batch = 2}, part = {.batch = 1};
        at.rows = 1 + pair_below(p, rows - at.row);
        at.col = i % 2 ? 0 : at.col;
        at.cols = i % 2 ? k : 1 + pair_below(p, k - at.col);
        const unsigned form = (unsigned)i % 4;
        PAIR_RUN(p, packed_create, &whole.a[s], 2, rows, k, form);
        PAIR_RUN(p, packed_part, &part.a[s], whole.a[s], &at);
        for (int s = 0; s < 2 && p->status == AR_OK; s++) {
            expect_room(p, s, whole.a[s], 2, rows, k, form, NULL);
            expect_room(p, s, part.a[s], 2, rows, k, form, &at);
        }
        destroy_packed(p, &part);
        destroy_packed(p, &whole);
    }
    PAIR_RUN(p, zero, y.at[s], 64);
}

/* Each device has a form of its own: a byte or more a term, and of twice the matrices twice the bytes. */
void packed_bytes_cases(device_pair *p)
{
    PAIR_CASE(p, "operands of one matrix and of two");
    const pair_buf y = pair_words(p, "y", PAIR_W32, 16);
    for (int i = 0; i < 20; i++) {
        const size_t rows = (size_t)i, k = (size_t)(i * 7 % 50);
        product o = {.batch = 1};
        PAIR_RUN(p, packed_create, &o.a[s], 1, rows, k, (unsigned)i % 4u);
        PAIR_RUN(p, packed_create, &o.b[s], 2, rows, k, (unsigned)i % 4u);
        for (int s = 0; s < 2 && p->status == AR_OK; s++) {
            const ar_device_ops *ops = p->side[s]->ops;
            const size_t one = ops->packed_bytes(o.a[s]), two = ops->packed_bytes(o.b[s]);
            if (one < rows * k || two != 2 * one)
                pair_ran(
                    p, s,
                    ar_error_set(AR_ERR_INTERNAL, "[%zu, %zu] takes %zu bytes, two of them %zu", rows, k, one, two));
        }
        destroy_packed(p, &o);
    }
    PAIR_RUN(p, zero, y.at[s], 64);
}

static void round_i64_case(device_pair *p, size_t m, size_t n, int limbs)
{
    const size_t start = pair_below(p, m * n), count = pair_below(p, m * n - start + 1);
    PAIR_CASE(p, "elements %zu + %zu of [%zu, %zu], %d limbs", start, count, m, n, limbs);
    const pair_buf y = pair_words(p, "y", PAIR_W32, count);
    const pair_buf sums = pair_zeros(p, "s", PAIR_W64, count * (size_t)limbs);
    for (size_t i = 0; i < count * (size_t)limbs && sums.host; i++) {
        const int64_t any = (int64_t)pair_random(p) >> pair_below(p, 64);
        ((int64_t *)sums.host)[i] = limbs == 2 ? any >> 12 : any;
    }
    const pair_buf e = old_exponents(p, "e", m), f = old_exponents(p, "f", n);
    PAIR_RUN(p, round_i64, y.at[s], ar_const(sums.at[s]), limbs, start, count, n, ar_const(e.at[s]), ar_const(f.at[s]));
}

void round_i64_cases(device_pair *p)
{
    static const size_t shapes[][2] = {{1, 1}, {1, 300}, {300, 1}, {7, 33}, {33, 64}, {20, 257}};
    for (int i = 0; i < 48 && pair_goes_on(p); i++)
        round_i64_case(p, shapes[i % 6][0], shapes[i % 6][1], 1 + i / 6 % 2);
}
