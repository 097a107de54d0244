/* SPDX-License-Identifier: Apache-2.0 */
/* The planner's queue beside the main one against closed forms by hand: K chunks of t_a and t_g take
 * t_a + (K-1) max(t_a, t_g) + t_g where they are gathered, and the same with the two exchanged where they are
 * scattered. */
#include "support/together.h"
#include "verify/plan/time_impl.h"

/* Two ranks, links of a byte a second without latency: a collective of 2n elements of t bytes takes n*t seconds. */
static const ari_time_options slow = {.cluster = {.inside = {0.0, 1.0}, .flops = 1.0}};
static const ari_links two = {.o = &slow, .n = 2.0, .in_node = 2.0, .inside = true};

/* Of n positions in chunks of `each`, a position in `seconds`. */
static ari_cut cut_of(ari_call_kind kind, size_t n, size_t each, double seconds, ari_role role)
{
    const ari_op_call call = {
        .kind = kind, .ranks = 2, .elements = 2 * n, .chunk = 2 * each, .queue = ARI_ON_TP, .repeats = 1, .role = role};
    return ari_cut_of(&two, &call, seconds);
}

/* n positions in chunks of `each`, a position in t seconds. */
static ari_chunked product_of(size_t n, size_t each, double t)
{
    const size_t before = (n - 1) / each * each;
    return (ari_chunked){t * (double)each, t * (double)(n - before), t * (double)n};
}

static double gathered(size_t n, size_t each, double t_a, double t_g)
{
    const ari_cut c = cut_of(ARI_CALL_ALL_GATHER, n, each, t_a, ARI_Q);
    ari_overlapped b = {.until = 0.0};
    ari_overlapped_gather(&b, 0.0, &c, false);
    const ari_chunked p = product_of(n, each, t_g);
    return ari_overlapped_multiply(&b, 0.0, &p, NULL);
}

static double scattered(size_t n, size_t each, double t_s, double t_g)
{
    const ari_cut c = cut_of(ARI_CALL_REDUCE_SCATTER, n, each, t_s, ARI_OUT);
    ari_overlapped b = {.until = 0.0};
    const ari_chunked p = product_of(n, each, t_g);
    return ari_overlapped_multiply(&b, 0.0, &p, &c);
}

CLAIM(four_chunks_of_two_and_three_take_fourteen)
{
    cr_expect_float_eq(gathered(4, 1, 2.0, 3.0), 14.0, 1e-9);
    cr_expect_float_eq(gathered(4, 1, 3.0, 2.0), 14.0, 1e-9);
    cr_expect_float_eq(scattered(4, 1, 2.0, 3.0), 14.0, 1e-9);
    cr_expect_float_eq(scattered(4, 1, 3.0, 2.0), 14.0, 1e-9);
}

/* With a last chunk of the share r: max(t_g, r t_a) while it comes, then r t_g. */
static double closed_form(double k, double first, double second, double r)
{
    return k < 2.0 ? first + second : first + (k - 2.0) * fmax(first, second) + fmax(second, r * first) + r * second;
}

CLAIM(chunks_are_as_the_closed_form_has_them)
{
    enum { POSITIONS = 23 };
    static const double ratios[][2] = {{1.0, 1.0}, {1.0, 3.0}, {3.0, 1.0}, {0.5, 0.4}, {1e-3, 7.0}};
    for (size_t i = 0; i < sizeof ratios / sizeof *ratios; i++) {
        const double a = ratios[i][0], g = ratios[i][1];
        for (size_t k = 1; k <= 9; k++) {
            const size_t each = (POSITIONS + k - 1) / k, n = (POSITIONS + each - 1) / each;
            const double r = (double)(POSITIONS - (n - 1) * each) / (double)each, e = (double)each;
            const double in = closed_form((double)n, e * a, e * g, r), out = closed_form((double)n, e * g, e * a, r);
            const double got_in = gathered(POSITIONS, each, a, g), got_out = scattered(POSITIONS, each, a, g);
            cr_expect_float_eq(got_in, in, 1e-9 * in, "K = %zu, gathered: %g, expected %g", k, got_in, in);
            cr_expect_float_eq(got_out, out, 1e-9 * out, "K = %zu, scattered: %g, expected %g", k, got_out, out);
        }
    }
}

/* An input for the gradients of the layer that follows comes behind the last of four chunks. With t_a = 2, t_g = 3 the
 * third product begins at 2 + 2 * 3 = 8, and the last chunk with it: until 10; the input takes 5 more. */
CLAIM(what_is_gathered_again_comes_behind_the_last_chunk)
{
    const ari_cut dy = cut_of(ARI_CALL_ALL_GATHER, 4, 1, 2.0, ARI_OUT),
                  x = cut_of(ARI_CALL_ALL_GATHER, 5, 5, 1.0, ARI_Q);
    ari_overlapped b = {.until = 0.0};
    ari_overlapped_gather(&b, 0.0, &dy, false);
    ari_overlapped_gather(&b, 0.0, &x, true);
    const ari_chunked p = product_of(4, 1, 3.0);
    const double made = ari_overlapped_multiply(&b, 0.0, &p, NULL);
    const double other = ari_overlapped_wait(&b, made, ARI_OUT), own = ari_overlapped_wait(&b, other, ARI_Q);
    cr_expect_float_eq(made, 14.0, 1e-9);
    cr_expect_float_eq(other, 14.0, 1e-9);
    cr_expect_float_eq(own, 8.0 + 2.0 + 5.0, 1e-9);
}

/* Nothing goes before it: the first chunk of what is scattered waits for it. */
CLAIM(the_queue_does_one_thing_after_the_other)
{
    const ari_cut x = cut_of(ARI_CALL_ALL_GATHER, 5, 5, 2.0, ARI_HEAD),
                  dx = cut_of(ARI_CALL_REDUCE_SCATTER, 2, 1, 1.0, ARI_HEAD);
    ari_overlapped b = {.until = 0.0};
    ari_overlapped_gather(&b, 100.0, &x, true); /* until 110 */
    const ari_chunked p = product_of(2, 1, 3.0);
    const double end = ari_overlapped_multiply(&b, 100.0, &p, &dx);
    cr_expect_float_eq(end, 112.0, 1e-9);
    const double there = ari_overlapped_wait(&b, end, ARI_HEAD);
    cr_expect_float_eq(there, 112.0, 1e-9);
}

EVERY_CLAIM(overlapped)
