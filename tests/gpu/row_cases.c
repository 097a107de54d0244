/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels that work on whole rows: norms, rotary positions, softmax. */
#include <math.h>
#include <string.h>

#include "gpu/conformance.h"
#include "ref/numerics/scalar.h"

static const size_t widths[] = {1, 2, 3, 31, 32, 33, 128, 255, 256, 257, 513, 1000, 4097};
#define WIDTHS (sizeof widths / sizeof *widths)

static size_t width(device_pair *p, size_t i)
{
    return p->round > 0 ? 1 + pair_below(p, 1500) : widths[i];
}

static const char *norm_name(ar_norm_kind kind)
{
    return kind == AR_NORM_LAYER ? "LayerNorm" : "RMSNorm";
}

static void norm_forward_case(device_pair *p, ar_norm_kind kind, size_t rows, size_t h, double eps, bool in_place)
{
    const bool layer = kind == AR_NORM_LAYER, offset = layer && pair_below(p, 3) > 0;
    PAIR_CASE(p, "%s%s [%zu, %zu] eps %g%s", norm_name(kind), offset ? " with offset" : "", rows, h, eps,
              in_place ? ", in place" : "");
    const pair_buf x = pair_rows(p, "x", rows, h, PAIR_EACH_ROW), apart = pair_words(p, "y", PAIR_W32, rows * h);
    const pair_buf gamma = pair_floats(p, "gamma", h, PAIR_ORDINARY);
    const pair_buf beta = offset ? pair_floats(p, "beta", h, PAIR_ORDINARY) : pair_none();
    const pair_buf mean = layer ? pair_words(p, "mean", PAIR_F64_NAN, rows) : pair_none();
    const pair_buf rstd = pair_words(p, "rstd", PAIR_W32, rows);
    const size_t shape[2] = {rows, h};
    const pair_tensor from = pair_stored(p, pair_view(x, 2, shape)), other = pair_stored(p, pair_view(apart, 2, shape));
    PAIR_RUN(p, norm_forward, kind, in_place ? &from.at[s] : &other.at[s], mean.at[s], rstd.at[s], &from.at[s],
             ar_const(gamma.at[s]), ar_const(beta.at[s]), eps);
}

void norm_forward_cases(device_pair *p)
{
    static const double eps[] = {1e-5, 0.0, 1e-6};
    for (int kind = AR_NORM_LAYER; kind <= AR_NORM_RMS; kind++) {
        for (size_t i = 0; i < WIDTHS; i++)
            for (size_t rows = 1; rows <= 12 && pair_goes_on(p); rows += 11)
                norm_forward_case(p, (ar_norm_kind)kind, rows, width(p, i), eps[i % 3], pair_below(p, 3) == 0);
        norm_forward_case(p, (ar_norm_kind)kind, 0, 5, 1e-5, false);
    }
}

/* Where dx and the sum are, and which optional ones are left out. */
typedef enum norm_form { NORM_APART, NORM_IN_DY, NORM_IN_X, NORM_NO_SUM, NORM_NO_DGAMMA, NORM_FORMS } norm_form;

static void norm_backward_case(device_pair *p, ar_norm_kind kind, size_t rows, size_t h, norm_form form)
{
    const bool layer = kind == AR_NORM_LAYER, exact = pair_below(p, 2);
    const size_t shape[2] = {rows, h};
    PAIR_CASE(p, "%s [%zu, %zu] form %d, %s sums", norm_name(kind), rows, h, form, exact ? "exact" : "native");
    const pair_tensor x = pair_stored(p, pair_view(pair_rows(p, "x", rows, h, PAIR_CALM_ROWS), 2, shape));
    const pair_tensor dy = pair_stored(p, pair_view(pair_rows(p, "dy", rows, h, PAIR_CALM_ROWS), 2, shape));
    const pair_buf gamma = pair_floats(p, "gamma", h, PAIR_ORDINARY);
    const pair_tensor apart = pair_stored(p, pair_output(p, "dx", 2, shape, PAIR_ROW_MAJOR));
    const pair_tensor residual = pair_stored(p, pair_view(pair_rows(p, "residual", rows, h, PAIR_EACH_ROW), 2, shape));
    const pair_tensor own_sum = pair_stored(p, pair_output(p, "sum", 2, shape, PAIR_ROW_MAJOR));
    const pair_tensor sum = form == NORM_IN_DY ? residual : own_sum, dx = form == NORM_IN_DY  ? dy
                                                                          : form == NORM_IN_X ? x
                                                                                              : apart;
    const bool alone = form == NORM_NO_SUM;
    const pair_sum dgamma = form == NORM_NO_DGAMMA ? pair_no_sum() : pair_new_sum(p, "dgamma", h, exact);
    const pair_sum dbeta = layer ? pair_new_sum(p, "dbeta", h, exact) : pair_no_sum();
    const pair_buf rstd = pair_floats(p, "rstd", rows, rows > 20 ? PAIR_SPECIAL : PAIR_ORDINARY);
    const pair_buf mean = layer ? pair_zeros(p, "mean", PAIR_W64, rows) : pair_none();
    for (size_t i = 0; i < rows && mean.host; i++)
        ((double *)mean.host)[i] = (double)pair_value(p, PAIR_ORDINARY) * 0.9999999;
    PAIR_RUN(p, norm_backward, kind, &dx.at[s], alone ? NULL : &sum.at[s], &dy.at[s], &x.at[s], ar_const(mean.at[s]),
             ar_const(rstd.at[s]), ar_const(gamma.at[s]), alone ? NULL : &residual.at[s], &dgamma.at[s], &dbeta.at[s]);
}

void norm_backward_cases(device_pair *p)
{
    for (int kind = AR_NORM_LAYER; kind <= AR_NORM_RMS; kind++) {
        for (size_t i = 0; i < WIDTHS; i++)
            for (int form = 0; form < NORM_FORMS && pair_goes_on(p); form++)
                norm_backward_case(p, (ar_norm_kind)kind, 1 + pair_below(p, 8), width(p, i), (norm_form)form);
        norm_backward_case(p, (ar_norm_kind)kind, 40, 33, NORM_APART);
        norm_backward_case(p, (ar_norm_kind)kind, 300, 100, NORM_IN_DY); /* more than one part, and block of rows */
        norm_backward_case(p, (ar_norm_kind)kind, 300, 257, NORM_NO_SUM);
        norm_backward_case(p, (ar_norm_kind)kind, 0, 33, NORM_APART);
    }
}

static void rope_tables_case(device_pair *p, size_t positions, size_t d, const ar_rope *rope)
{
    PAIR_CASE(p, "%zu positions, %zu of head size %zu, theta %g, kind %d", positions, ar_rope_dim(rope, d), d,
              rope->theta, (int)rope->kind);
    const pair_buf cos = pair_words(p, "cos", PAIR_W32, positions * (ar_rope_dim(rope, d) / 2));
    const pair_buf sin = pair_words(p, "sin", PAIR_W32, positions * (ar_rope_dim(rope, d) / 2));
    PAIR_RUN(p, rope_tables, cos.at[s], sin.at[s], positions, d, rope);
}

/* Both refuse it, with the same status. */
static void rope_tables_refuse(device_pair *p, size_t positions, size_t d, const ar_rope *rope)
{
    PAIR_CASE(p, "refused: %zu positions, head size %zu, theta %g, kind %d", positions, d, rope->theta,
              (int)rope->kind);
    const pair_buf cos = pair_words(p, "cos", PAIR_W32, 64), sin = pair_words(p, "sin", PAIR_W32, 64);
    for (int s = 0; s < 2 && pair_ready(p); s++) {
        const ar_status st =
            p->side[s]->ops->rope_tables(p->side[s], p->queue[s], cos.at[s], sin.at[s], positions, d, rope);
        if (st == AR_ERR_UNSUPPORTED)
            pair_ran(p, s, st);
        else if (st != AR_ERR_ARG)
            pair_ran(p, s, ar_error_set(AR_ERR_INTERNAL, "%s where AR_ERR_ARG was expected", ar_status_name(st)));
    }
}

void rope_tables_cases(device_pair *p)
{
    static const size_t sizes[] = {2, 6, 64, 128, 96};
    static const size_t positions[] = {0, 1, 31, 33, 300};
    static const double thetas[] = {10000.0, 500000.0, 1000000.0, 7.5};
    ar_rope plain = {.kind = AR_ROPE_DEFAULT, .theta = 10000.0};
    for (size_t i = 0; i < 5; i++)
        for (int kind = AR_ROPE_DEFAULT; kind <= AR_ROPE_LONGROPE && pair_goes_on(p); kind++) {
            ar_rope rope = {.kind = (ar_rope_kind)kind,
                            .theta = thetas[pair_below(p, 4)],
                            .factor = 1.0 + (double)pair_below(p, 8),
                            .low_freq_factor = 0.5,
                            .high_freq_factor = 2.0 + (double)pair_below(p, 3),
                            .beta_fast = 16.0,
                            .beta_slow = 0.5 + (double)pair_below(p, 2),
                            .truncate = pair_below(p, 2) == 0,
                            .original_positions = 16 + pair_below(p, 300)};
            const size_t n = p->round > 0 ? pair_below(p, 500) : positions[kind % 5];
            rope.rotary_dim = pair_below(p, 3) == 0 ? 2 + 2 * pair_below(p, sizes[i] / 2) : 0;
            if (kind == AR_ROPE_DYNAMIC && ar_rope_dim(&rope, sizes[i]) <= 2)
                continue;
            for (size_t k = 0; k < sizes[i] / 2; k++)
                rope.short_factor[k] = rope.long_factor[k] = 1.0f + (float)pair_below(p, 100) * 0.37f;
            rope_tables_case(p, n, sizes[i], &rope);
        }
    rope_tables_case(p, 100000, 4, &plain);
    rope_tables_refuse(p, 4, 7, &plain);
    rope_tables_refuse(p, (size_t)1 << 21, 8, &plain);
    rope_tables_refuse(p, 4, 8, &(ar_rope){.kind = AR_ROPE_LINEAR, .theta = 10000.0});
    rope_tables_refuse(p, 4, 8, &(ar_rope){.kind = AR_ROPE_DEFAULT, .theta = -1.0});
}

static void rope_case(device_pair *p, const size_t shape[4], pair_layout to, pair_layout from, int direction,
                      bool in_place)
{
    PAIR_CASE(p, "[%zu, %zu, %zu, %zu] %s from %s, direction %d%s", shape[0], shape[1], shape[2], shape[3],
              pair_layout_name(to), pair_layout_name(from), direction, in_place ? ", in place" : "");
    const pair_tensor x = pair_stored(p, pair_input(p, "x", 4, shape, from, PAIR_EACH_ROW));
    const pair_tensor y = pair_stored(p, pair_output(p, "y", 4, shape, to));
    const size_t half = shape[3] / 2;
    const pair_buf cos = pair_rows(p, "cos", shape[1], half, PAIR_ORDINARY);
    const pair_buf sin = pair_rows(p, "sin", shape[1], half, PAIR_ORDINARY);
    PAIR_RUN(p, rope, in_place ? &x.at[s] : &y.at[s], &x.at[s], ar_const(cos.at[s]), ar_const(sin.at[s]), direction);
}

void rope_cases(device_pair *p)
{
    static const size_t shapes[][4] = {{1, 1, 1, 2},   {2, 7, 3, 6}, {1, 33, 2, 64},
                                       {3, 4, 5, 128}, {2, 0, 3, 4}, {1, 5, 1, 96}};
    static const pair_layout layouts[] = {PAIR_ROW_MAJOR, PAIR_PADDED, PAIR_HEADS, PAIR_REVERSED};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (size_t to = 0; to < 4; to++)
            for (size_t from = 0; from < 4 && pair_goes_on(p); from++)
                rope_case(p, shapes[i], layouts[to], layouts[from], (i + to + from) % 2 ? 1 : -1,
                          pair_below(p, 3) == 0);
}

typedef struct attention {
    size_t b, heads, s, head_start, all_heads, window;
    int which; /* bit 0 causal, bit 1 padding, bit 2 an additive mask, bit 3 of one batch, bit 4 of one head */
} attention;

typedef struct masks {
    pair_buf visible, padding, additive;
    ar_mask at[2];
    ar_scores block;
} masks;

/* All scores, or some rows of some matrices; with `any` some keys too. */
static ar_scores draw_block(device_pair *p, const attention *o, bool any)
{
    const size_t group = o->heads % 2 == 0 ? o->heads / 2 : 1, kv = o->heads / group, rows = group * o->s;
    ar_scores b = {.kv_heads = kv, .group = group, .rows = o->s, .seq = o->s, .part = {0, o->b * kv, 0, rows, 0, o->s}};
    ar_part *part = &b.part;
    if (pair_below(p, 3) == 0 || o->s == 0)
        return b;
    part->matrix = pair_below(p, part->matrices);
    part->matrices -= part->matrix;
    part->row = pair_below(p, rows);
    part->rows = 1 + pair_below(p, rows - part->row);
    if (any) {
        part->col = pair_below(p, o->s);
        part->cols = 1 + pair_below(p, o->s - part->col);
    }
    return b;
}

/* What the rows see by order. */
static pair_buf new_visible(device_pair *p, const attention *o)
{
    const pair_buf v = pair_zeros(p, "visible", PAIR_W32, 2 * o->b * o->s);
    for (size_t i = 0; i < o->b * o->s && v.host; i++) {
        const size_t query = i % o->s;
        ((int32_t *)v.host)[2 * i] = (int32_t)(o->window > 0 && query >= o->window ? query - o->window + 1 : 0);
        ((int32_t *)v.host)[2 * i + 1] = (int32_t)(o->which & 1 ? query + 1 : o->s);
    }
    return v;
}

static masks new_masks(device_pair *p, const attention *o, bool any_keys)
{
    masks m = {.visible = new_visible(p, o),
               .padding = pair_none(),
               .additive = pair_none(),
               .block = draw_block(p, o, any_keys)};
    const size_t batch = o->which & 8 ? 1 : o->b, heads = o->which & 16 ? 1 : o->all_heads;
    if (o->which & 2) {
        m.padding = pair_bytes(p, "padding", o->b * o->s, 6);
        for (size_t i = 0; i < o->s / 2 && m.padding.host; i++) /* with causality some queries see nothing */
            ((uint8_t *)m.padding.host)[i] = 0;
    }
    if (o->which & 4) {
        const size_t n = batch * heads * o->s * o->s;
        m.additive = pair_floats(p, "additive", n, PAIR_ORDINARY);
        for (size_t i = 0; i < n && m.additive.host; i++)
            if (pair_below(p, 5) == 0)
                ((float *)m.additive.host)[i] = -INFINITY;
    }
    for (int s = 0; s < 2; s++)
        m.at[s] = (ar_mask){.visible = ar_const(m.visible.at[s]),
                            .padding = ar_const(m.padding.at[s]),
                            .additive = ar_const(m.additive.at[s]),
                            .mask_batch = o->which & 4 ? batch : 0,
                            .mask_heads = o->which & 4 ? heads : 0,
                            .head_start = o->head_start};
    return m;
}

static void begin_attention(device_pair *p, const attention *o, bool in_place)
{
    pair_begin(p, "b %zu, heads %zu from %zu of %zu, s %zu, window %zu,%s%s%s%s%s%s", o->b, o->heads, o->head_start,
               o->all_heads, o->s, o->window, o->which & 1 ? " causal" : "", o->which & 2 ? " padding" : "",
               o->which & 4 ? " additive" : "", o->which & 8 ? " of one batch" : "",
               o->which & 16 ? " of one head" : "", in_place ? " in place" : "");
}

/* Rows of a block's scores. */
static size_t rows_of(const masks *m)
{
    return m->block.part.matrices * m->block.part.rows;
}

/* Maxima that rows may have, and sums that go with them. */
static void known_rows(device_pair *p, pair_buf max, pair_buf sum, size_t rows)
{
    for (size_t i = 0; i < rows && max.host && sum.host; i++) {
        const size_t kind = pair_below(p, 8);
        ((int32_t *)max.host)[i] = kind == 0   ? INT32_MIN
                                   : kind == 1 ? INT32_MAX
                                               : ari_key32(pair_value(p, PAIR_ORDINARY));
        ((double *)sum.host)[i] = 1.0 + (double)pair_below(p, 1000) / 7.0;
    }
}

static void softmax_forward_case(device_pair *p, const attention *o)
{
    const bool in_place = pair_below(p, 3) == 0, known = pair_below(p, 2);
    const size_t all = o->b * o->heads * o->s;
    const float scale = ari_softmax_scale(16);
    begin_attention(p, o, in_place);
    const masks m = new_masks(p, o, known);
    const size_t n = rows_of(&m) * m.block.part.cols;
    const pair_buf max = pair_zeros(p, "max", PAIR_W32, all), sum = pair_zeros(p, "sum", PAIR_W64, all);
    const pair_values values = known ? PAIR_ORDINARY : PAIR_CALM_ROWS; /* a row that has NaN is known to have it */
    const pair_buf logits = pair_rows(p, "sinks", 1, o->heads, PAIR_ORDINARY);
    const bool sunk = pair_below(p, 2);
    const pair_buf scores = pair_rows(p, "scores", rows_of(&m), m.block.part.cols, values);
    const pair_buf apart = pair_words(p, "probs", PAIR_W32, n), probs = in_place ? scores : apart;
    if (known)
        known_rows(p, max, sum, all);
    PAIR_RUN(p, softmax_forward, probs.at[s], ar_const(scores.at[s]), sunk ? ar_const(logits.at[s]) : (ar_cbuf){NULL},
             max.at[s], sum.at[s], known, scale, &m.block, &m.at[s]);
    pair_end(p);
}

/* Sinks of several heads, terms in any layout, and rows that have no sum. */
static void sinks_backward_case(device_pair *p, size_t b, size_t rows, size_t heads)
{
    const size_t n = b * heads * rows, shape[3] = {b, rows, heads};
    PAIR_CASE(p, "[%zu, %zu, %zu]", b, rows, heads);
    const pair_buf sinks = pair_floats(p, "sinks", heads, PAIR_ORDINARY);
    const pair_buf max = pair_zeros(p, "max", PAIR_W32, n), sum = pair_zeros(p, "sum", PAIR_W64, n);
    const pair_buf dot = pair_zeros(p, "dot", PAIR_W64, n);
    const pair_tensor terms = pair_output(p, "terms", 3, shape, (pair_layout)pair_below(p, PAIR_HEADS));
    known_rows(p, max, sum, n);
    for (size_t i = 0; i < n && dot.host; i++)
        ((double *)dot.host)[i] = (double)pair_value(p, PAIR_ORDINARY) / 3.0;
    PAIR_RUN(p, sinks_backward, &terms.at[s], ar_const(sinks.at[s]), ar_const(max.at[s]), ar_const(sum.at[s]),
             ar_const(dot.at[s]));
}

void sinks_backward_cases(device_pair *p)
{
    size_t rows;
    for (size_t i = 0; (rows = pair_size(p, i)) != SIZE_MAX && pair_goes_on(p); i++)
        sinks_backward_case(p, 1 + pair_below(p, 3), rows, 1 + pair_below(p, 5));
}

static void softmax_backward_case(device_pair *p, const attention *o)
{
    const bool in_place = pair_below(p, 3) == 0, known = pair_below(p, 2);
    const size_t all = o->b * o->heads * o->s;
    begin_attention(p, o, in_place);
    const masks m = new_masks(p, o, known);
    const size_t cols = m.block.part.cols;
    const pair_buf dot = pair_zeros(p, "dot", PAIR_W64, all);
    const pair_buf probs = pair_rows(p, "probs", rows_of(&m), cols, PAIR_CALM_ROWS);
    const pair_buf dprobs = pair_rows(p, "dprobs", rows_of(&m), cols, PAIR_CALM_ROWS);
    const pair_buf apart = pair_words(p, "ds", PAIR_W32, rows_of(&m) * cols), ds = in_place ? dprobs : apart;
    for (size_t i = 0; i < all && known && dot.host; i++)
        ((double *)dot.host)[i] = (double)pair_value(p, PAIR_ORDINARY) / 3.0;
    PAIR_RUN(p, softmax_backward, ds.at[s], ar_const(probs.at[s]), dprobs.at[s], dot.at[s], known, 0.25f, &m.block,
             &m.at[s]);
    pair_end(p);
}

static void every_mask(device_pair *p, void (*one)(device_pair *, const attention *))
{
    static const attention shapes[] = {{1, 1, 1, 0, 1, 0, 0},  {2, 3, 3, 0, 3, 0, 0},    {2, 2, 7, 1, 4, 3, 0},
                                       {1, 2, 33, 2, 4, 0, 0}, {2, 1, 65, 1, 2, 40, 0},  {1, 2, 33, 2, 4, 1, 0},
                                       {1, 1, 9, 0, 1, 9, 0},  {1, 1, 9, 0, 1, 1000, 0}, {2, 2, 16, 0, 2, 0, 0}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int which = 0; which < 32 && pair_goes_on(p); which++) {
            if (which >= 8 && !(which & 4))
                continue;
            attention o = shapes[i];
            o.which = which;
            if (p->round > 0)
                o.s = 1 + pair_below(p, 80);
            one(p, &o);
        }
    one(p, &(attention){1, 2, 0, 0, 2, 0, 0});
    one(p, &(attention){1, 1, 300, 0, 1, 0, 1});
}

PAIR_CASES(softmax_forward, every_mask)

PAIR_CASES(softmax_backward, every_mask)
