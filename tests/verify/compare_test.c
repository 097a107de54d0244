/* SPDX-License-Identifier: Apache-2.0 */
/* The comparator must be able to say "different": one bit anywhere, a sign of zero, a NaN, a tensor that is not there,
 * an element that nobody holds or two ranks claim, in whatever pieces the ranks report it. */
#include "ref/core/tensor_private.h"
#include "tests/verify/support.h"
#include "verify/check/check_run.h"
#include "verify/check/compare.h"

enum { ROWS = 6, COLS = 4, COUNT = ROWS * COLS, RANKS = 2 };
static const size_t full_shape[2] = {ROWS, COLS};

/* A reference of one tensor "w" with values of their own, and its comparators. */
typedef struct fixture {
    ari_reference ref;
    ari_comparator rank[RANKS];
    float values[COUNT], wrong[COUNT]; /* wrong: the same, for a test to change */
} fixture;

static void fixture_init(fixture *f)
{
    double wide[COUNT];
    *f = (fixture){.ref = {0}};
    for (int i = 0; i < COUNT; i++)
        wide[i] = f->values[i] = f->wrong[i] = (float)(i + 1) * 0.25f;
    cr_assert_ok(ari_reference_emit(&f->ref, "w", 'f', 2, full_shape, wide));
    cr_assert_ok(ari_reference_finish(&f->ref));
    for (int r = 0; r < RANKS; r++)
        cr_assert_ok(ari_comparator_init(&f->rank[r], &f->ref, NULL));
}

static void fixture_fini(fixture *f)
{
    for (int r = 0; r < RANKS; r++)
        ari_comparator_fini(&f->rank[r]);
    ari_reference_fini(&f->ref);
}

static void tap(ari_comparator *c, const char *name, uint32_t step, const float *local, const ar_layout *layout)
{
    const size_t shape[2] = {ari_layout_local(layout, 0), ari_layout_local(layout, 1)};
    float copy[COUNT];
    ar_tensor t;
    memcpy(copy, local, shape[0] * shape[1] * sizeof *copy);
    cr_assert_ok(ar_tensor_view(&t, AR_F32, 2, shape, (ar_buf){copy}));
    const ar_tap_event e = {.name = name, .pass = 'f', .step = step, .local = &t, .layout = layout};
    cr_assert_ok(ari_comparator_tap(c, &e));
}

/* A rank reports rows [from, to) of the full values, as copy `replica` of `replicas`. */
static void tap_rows(ari_comparator *c, const float *full, size_t from, size_t to, int replica, int replicas)
{
    ar_layout o;
    cr_assert_ok(ari_layout_replicate(&o, 2, full_shape, replica, replicas));
    o.nbox = from < to;
    o.box[0].global[0] = from;
    o.box[0].extent[0] = to - from;
    tap(c, "w", 1, full + from * COLS, &o);
}

static ari_verdict verdict_of(const fixture *f)
{
    return ari_verdict_of(f->rank, RANKS, 0);
}

/* --- what the ranks report, piece by piece ------------------------------------------------------------------------ */

/* "0:2-4": rank 0 reports rows 2 and 3; "/1": as the second of two copies; "!": with the row's wrong elements. */
static const struct {
    const char *by;
    bool complete;
    size_t different, wrong[2]; /* elements */
    int rank;                   /* that is named */
    const char *pattern, *hint; /* of what is not complete; NULL: any */
} rows[] = {
    {.by = "0:0-3 1:3-6", .complete = true},
    {.by = "0:0-2 0:2-3 1:3-6", .complete = true},
    {.by = "0:2-3 0:0-2 1:3-6", .complete = true},
    {.by = "1:0-6", .complete = true}, /* rank 0 has no samples */
    {.by = "0:0-6/0 1:0-3/1 1:3-6/1", .complete = true},
    {.by = "0:0-6/0! 1:0-6/1!", .complete = true, .different = 2, .wrong = {7, 20}, .rank = 0},
    {.by = "0:0-6/0 1:0-6/1!", .complete = true, .different = 1, .wrong = {23, 23}, .rank = 1},
    {.by = "", .pattern = "the ranks did not report this tensor", .hint = "was not run"},
    {.by = "0:0-3 1:3-5", .pattern = "20 of 24 elements, in 1 copy", .hint = "belongs to no rank"},
    {.by = "0:0-6/0"},
    {.by = "1:0-6/1", .pattern = "24 of 48 elements, in 2 copies", .hint = "some ranks did not run"},
    {.by = "0:0-6/0 1:0-3/1"},
    {.by = "0:0-3 1:0-3"},
    {.by = "0:3-6 1:3-6", .pattern = "ranks 0 and 1 hold the same part", .hint = "do not form a mesh"},
    {.by = "0:0-2 0:0-2", .pattern = "rank 0 reported it more than once", .hint = "went through it twice"},
    {.by = "0:0-3 0:0-3 1:0-0"},
    {.by = "0:0-1 0:1-2 1:3-4 1:4-6"},
    {.by = "0:0-1 0:2-3 1:3-4 1:4-6"},
    {.by = "0:0-1 0:0-1 1:3-4 1:4-6"},
    {.by = "0:0-1 0:3-4 1:3-4 1:4-6"},
};

static void report(fixture *f, const char *by, size_t held[RANKS])
{
    for (int rank, n = 0; *by; by += n + (by[n] == ' ')) {
        size_t from = 0, to = 0;
        cr_assert_eq(sscanf(by, "%d:%zu-%zu%n", &rank, &from, &to, &n), 3, "%s", by);
        const bool copies = by[n] == '/';
        const int replica = copies ? by[n + 1] - '0' : 0;
        n += copies ? 2 : 0;
        const bool wrong = by[n] == '!';
        n += wrong;
        tap_rows(&f->rank[rank], wrong ? f->wrong : f->values, from, to, replica, copies ? 2 : 1);
        held[rank] += to - from;
    }
}

Test(compare, what_is_not_reported_once_is_not_complete_and_the_first_wrong_element_is_named)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        SCOPED(fixture_fini) fixture f;
        size_t held[RANKS] = {0};
        ar_first_difference d = {.step = 1};
        fixture_init(&f);
        f.wrong[rows[i].wrong[0]] = f.wrong[rows[i].wrong[1]] = 100.0f;
        report(&f, rows[i].by, held);
        const ari_verdict v = verdict_of(&f);
        cr_expect(v.complete == rows[i].complete && v.different == rows[i].different, "%s: %zu differ", rows[i].by,
                  v.different);
        if (v.different > 0)
            cr_expect(v.first_index == rows[i].wrong[0] && v.rank == rows[i].rank, "%s: %zu of %d", rows[i].by,
                      v.first_index, v.rank);
        else
            cr_expect(v.rank == -1 && v.max_ulp == 0, "%s", rows[i].by);
        for (int r = 0; r < RANKS && v.complete; r++) /* joined to one part */
            cr_expect(held[r] == 0 ||
                          (f.rank[r].finding[0].shape[0] == held[r] && f.rank[r].finding[0].layout.nbox == 1),
                      "%s: rank %d", rows[i].by, r);
        if (!rows[i].pattern)
            continue;
        ari_explain_coverage(&d, f.rank, RANKS, 0);
        cr_expect(strstr(d.pattern, rows[i].pattern), "%s: no \"%s\" in \"%s\"", rows[i].by, rows[i].pattern,
                  d.pattern);
        cr_expect(strstr(d.hint, rows[i].hint), "%s: no \"%s\" in \"%s\"", rows[i].by, rows[i].hint, d.hint);
    }
}

static void end_arena(ari_arena *a)
{
    ari_arena_end(a, NULL);
}

/* In one piece, or row by row, forward or in reverse. */
Test(compare, any_single_flipped_bit_is_found_with_its_place_and_its_copy_is_whole)
{
    for (size_t i = 0; i < COUNT; i++) {
        for (unsigned bit = 0; bit < 32; bit++) {
            SCOPED(fixture_fini) fixture f;
            SCOPED(end_arena) ari_arena arena = {NULL};
            float *copy = NULL;
            uint32_t u = 0;
            fixture_init(&f);
            memcpy(&u, &f.wrong[i], sizeof u);
            u ^= 1u << bit;
            memcpy(&f.wrong[i], &u, sizeof u);
            const size_t pieces = bit % 3 == 0 ? 1 : 3, owner = i / (COUNT / RANKS);
            for (size_t k = 0; k < pieces; k++) {
                const size_t row = bit % 3 == 1 ? 2 - k : k;
                for (size_t r = 0; r < RANKS; r++)
                    tap_rows(&f.rank[r], f.wrong, 3 * r + row, 3 * r + row + 3 / pieces, 0, 1);
            }
            const ari_verdict v = verdict_of(&f);
            cr_assert(v.complete && v.different == 1 && v.first_index == i, "element %zu, bit %u", i, bit);
            cr_assert_eq(v.rank, (int)owner);
            cr_assert_eq(v.first_local, i % (COUNT / RANKS), "element %zu, bit %u: local %zu", i, bit, v.first_local);
            cr_assert(memcmp(&v.actual, &f.wrong[i], sizeof v.actual) == 0 && v.max_ulp > 0);
            cr_assert_ok(ari_comparator_copy(&copy, &f.rank[owner], 0, &arena));
            cr_assert_eq(memcmp(copy, f.wrong + owner * COUNT / RANKS, sizeof f.wrong / RANKS), 0, "element %zu", i);
        }
    }
}

/* Rows [start, start + count) of the full tensor, which lie from row `local` on in the rank's own. */
static ar_box rows_of(size_t start, size_t count, size_t local)
{
    return (ar_box){.global = {start, 0}, .local = {local, 0}, .extent = {count, COLS}};
}

/* A rank that holds the halves the other way round; and one with as many elements as there are, but row 2 twice and row
 * 5 not at all. */
Test(compare, boxes_of_one_rank_are_told_apart_by_the_places_they_have_in_the_whole)
{
    for (int overlap = 0; overlap < 2; overlap++) {
        SCOPED(fixture_fini) fixture f;
        float own[COUNT];
        const ar_box first = rows_of(overlap ? 0 : 3, 3, 0), second = rows_of(overlap ? 2 : 0, 3, 3);
        const ar_layout o = {.ndim = 2, .shape = {ROWS, COLS}, .nbox = 2, .box = {first, second}, .replicas = 1};
        fixture_init(&f);
        memcpy(own, f.values + first.global[0] * COLS, sizeof own / 2);
        memcpy(own + COUNT / 2, f.values + second.global[0] * COLS, sizeof own / 2);
        if (!overlap)
            own[1] = own[COUNT / 2 + 5] = 100.0f; /* elements 13 and 5 of the full tensor */
        tap(&f.rank[0], "w", 1, own, &o);
        const ari_verdict v = ari_verdict_of(f.rank, 1, 0);
        cr_expect(v.complete == !overlap && v.different == (overlap ? 0 : 2), "overlap %d", overlap);
        cr_expect(overlap || (v.first_index == 5 && v.first_local == COUNT / 2 + 5), "%zu, local %zu", v.first_index,
                  v.first_local);
    }
}

/* What is hashed is the first copy, whoever reports last. */
Test(compare, the_hashed_copy_is_the_first_replicas)
{
    SCOPED(fixture_fini) fixture f;
    float *kept[] = {NULL};
    bool wanted[] = {true};
    fixture_init(&f);
    ari_run_tensors own = {&f.ref, wanted, kept};
    f.wrong[3] = 100.0f;
    for (int r = 0; r < RANKS; r++) {
        ari_comparator_fini(&f.rank[r]);
        cr_assert_ok(ari_comparator_init(&f.rank[r], &f.ref, &own));
        tap_rows(&f.rank[r], r == 0 ? f.values : f.wrong, 0, ROWS, r, RANKS);
    }
    cr_expect_null(kept[0], "every bit of the first replica's is the reference's");
    ari_comparator_fini(&f.rank[0]);
    cr_assert_ok(ari_comparator_init(&f.rank[0], &f.ref, &own));
    tap_rows(&f.rank[0], f.wrong, 0, ROWS, 0, RANKS);
    cr_assert_not_null(kept[0]);
    cr_expect_eq(memcmp(kept[0], f.wrong, sizeof f.wrong), 0);
    ari_run_tensors_fini(&own);
}

/* As micro-batches come that a schedule takes in an order of its own. */
Test(compare, rows_reported_in_any_order_are_one_part)
{
    for (size_t number = 0; number < 720; number++) { /* of the orders of six */
        SCOPED(fixture_fini) fixture f;
        SCOPED(end_arena) ari_arena arena = {NULL};
        float *copy = NULL;
        size_t order[ROWS] = {0, 1, 2, 3, 4, 5}, rest = number;
        fixture_init(&f);
        f.wrong[13] = f.wrong[22] = 100.0f;
        for (size_t k = 0; k < ROWS; rest /= ROWS - k, k++) {
            const size_t other = k + rest % (ROWS - k), row = order[other];
            order[other] = order[k];
            cr_assert_eq(k > 0 && ari_verdict_of(f.rank, 1, 0).complete, false);
            tap_rows(&f.rank[0], f.wrong, row, row + 1, 0, 1);
        }
        const ari_verdict v = ari_verdict_of(f.rank, 1, 0);
        cr_assert(v.complete && v.different == 2 && v.first_index == 13 && v.first_local == 13 && v.rank == 0,
                  "order %zu", number);
        cr_assert_ok(ari_comparator_copy(&copy, &f.rank[0], 0, &arena));
        cr_assert_eq(memcmp(copy, f.wrong, sizeof f.wrong), 0, "order %zu", number);
    }
}

Test(compare, what_the_reference_lacks_or_has_in_another_shape_is_kept_by_name)
{
    SCOPED(fixture_fini) fixture f;
    ar_first_difference d = {.step = 1};
    ar_layout whole, narrow;
    fixture_init(&f);
    cr_assert_ok(ari_layout_replicate(&whole, 2, full_shape, 0, 1));
    cr_assert_ok(ari_layout_replicate(&narrow, 2, (const size_t[]){ROWS, COLS / RANKS}, 0, 1));
    tap(&f.rank[1], "v", 1, f.values, &whole);
    cr_expect_str_eq(f.rank[1].unexpected, "v:fwd, which the baseline does not have");
    cr_expect_str_eq(f.rank[0].unexpected, "");
    for (int r = 0; r < RANKS; r++)
        tap(&f.rank[r], "w", 1, f.values, &narrow);
    cr_expect_str_eq(f.rank[0].unexpected, "w:fwd with shape [6,2], which on one rank has [6,4]");
    cr_expect(!verdict_of(&f).complete);
    ari_explain_coverage(&d, f.rank, RANKS, 0);
    cr_expect(strstr(d.pattern, "on 2 of 2 ranks its shape is [6,2], on one rank [6,4]"), "%s", d.pattern);
    cr_expect(strstr(d.hint, "depends on the number of ranks"), "%s", d.hint);
}

/* A rank may come to a later tensor first: the backward pass of one micro-batch is before the forward pass of the
 * next. */
Test(compare, copies_are_kept_of_the_first_tensors_in_execution_order_whatever_comes_first)
{
    enum { TENSORS = 7 };
    SCOPED(ari_reference_fini) ari_reference ref = {0};
    SCOPED(ari_comparator_fini) ari_comparator c;
    const double wide[COUNT] = {0.0};
    ar_layout o;
    char name[16];
    for (int i = 0; i < TENSORS; i++) {
        snprintf(name, sizeof name, "w%d", i);
        cr_assert_ok(ari_reference_emit(&ref, name, 'f', 2, full_shape, wide));
    }
    cr_assert_ok(ari_reference_finish(&ref));
    cr_assert_ok(ari_comparator_init(&c, &ref, NULL));
    cr_assert_ok(ari_layout_replicate(&o, 2, full_shape, 0, 1));
    for (int i = TENSORS - 1; i >= 0; i--) {
        float wrong[COUNT];
        for (int k = 0; k < COUNT; k++)
            wrong[k] = (float)(i + 1);
        snprintf(name, sizeof name, "w%d", i);
        tap(&c, name, 1, wrong, &o);
    }
    for (size_t i = 0; i < TENSORS; i++) {
        SCOPED(end_arena) ari_arena arena = {NULL};
        float *copy = NULL;
        cr_assert_eq(ari_comparator_copy(&copy, &c, i, &arena), i < ARI_SAVED_COPIES ? AR_OK : AR_ERR_NOT_FOUND,
                     "tensor %zu", i);
        cr_expect(!copy || (copy[0] == (float)(i + 1) && copy[COUNT - 1] == (float)(i + 1)), "tensor %zu", i);
    }
}

/* --- steps and allowances ----------------------------------------------------------------------------------------- */

Test(compare, a_report_of_a_step_is_compared_with_that_steps_tensor)
{
    SCOPED(fixture_fini) fixture f;
    double later[COUNT];
    ar_layout o;
    fixture_init(&f);
    for (int i = 0; i < COUNT; i++)
        later[i] = f.wrong[i] = -1.0f - (float)i;
    ari_reference_begin(&f.ref, 2);
    free(f.ref.by_name);
    cr_assert_ok(ari_reference_emit(&f.ref, "w", 'f', 2, full_shape, later));
    cr_assert_ok(ari_reference_finish(&f.ref));
    for (int r = 0; r < RANKS; r++) {
        ari_comparator_fini(&f.rank[r]);
        cr_assert_ok(ari_comparator_init(&f.rank[r], &f.ref, NULL));
    }
    cr_assert_ok(ari_layout_replicate(&o, 2, full_shape, 0, 1));
    for (uint32_t step = 1; step <= 3; step++)
        tap(&f.rank[0], "w", step, step == 1 ? f.values : f.wrong, &o);
    for (size_t i = 0; i < 2; i++) {
        const ari_verdict v = ari_verdict_of(f.rank, RANKS, i);
        cr_expect(v.complete && v.different == 0, "step %zu", i + 1);
    }
    cr_expect_str_eq(f.rank[0].unexpected, "w:fwd, which the baseline does not have", "the baseline has no third step");
}

/* 0.25 is allowed: 0.125 away is a ratio of a half, 0.5 away one of two, and of NaN there is none. */
Test(compare, differences_up_to_what_is_allowed_are_none_and_their_ratio_is_told)
{
    for (int far = 0; far < 2; far++) {
        SCOPED(fixture_fini) fixture f;
        fixture_init(&f);
        f.ref.tensor[0].allowed = 0.25;
        f.wrong[9] += 0.125f;
        f.wrong[11] -= far ? 0.5f : 0.0f;
        f.wrong[15] = far ? NAN : f.wrong[15];
        for (int r = 0; r < RANKS; r++)
            tap_rows(&f.rank[r], r == far ? f.wrong : f.values, 0, ROWS, r, RANKS);
        const ari_verdict v = verdict_of(&f);
        cr_expect(v.complete && v.different == (far ? 2 : 0), "%zu", v.different);
        cr_expect(far ? v.first_index == 11 && v.rank == 1 && isinf(v.max_ratio) : v.max_ratio == 0.5, "%g",
                  v.max_ratio);
    }
}

Test(compare, zeros_of_either_sign_differ_and_nans_do_not_hide)
{
    SCOPED(fixture_fini) fixture f;
    fixture_init(&f);
    f.ref.tensor[0].values[3] = 0.0f;
    f.wrong[3] = -0.0f;
    f.wrong[5] = NAN;
    for (int r = 0; r < RANKS; r++)
        tap_rows(&f.rank[r], f.wrong, 0, ROWS, r, RANKS);
    const ari_verdict v = verdict_of(&f);
    cr_expect(v.different == 2 && v.first_index == 3 && signbit(v.actual), "%zu different", v.different);
    cr_expect_eq(v.max_ulp, UINT32_MAX);
}

Test(compare, ulp_distance_counts_steps_across_zero)
{
    const float tiny = 0x1p-149f;
    const struct {
        float a, b;
        uint32_t steps;
    } pairs[] = {{1.0f, 1.0f, 0},           {1.0f, 0x1.000002p+0f, 1}, {2.0f, 1.0f, 1u << 23},
                 {1.0f, 0x1.fffffep-1f, 1}, {0.0f, -0.0f, 1},          {0.0f, tiny, 1},
                 {-0.0f, -tiny, 1},         {tiny, -tiny, 3},          {-INFINITY, INFINITY, 2u * 0x7f800000u + 1u},
                 {NAN, 1.0f, UINT32_MAX},   {1.0f, NAN, UINT32_MAX},   {NAN, NAN, 0},
                 {NAN, -NAN, UINT32_MAX}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        cr_expect_eq(ari_ulp_distance(pairs[i].a, pairs[i].b), pairs[i].steps, "%g, %g", (double)pairs[i].a,
                     (double)pairs[i].b);
}

/* --- the same in whole runs --------------------------------------------------------------------------------------- */

enum { BATCH = 2, SEQ = 5 };
static const int64_t ids[BATCH * SEQ] = {3, 1, 256, 128, 5, 9, 129, 6, 64, 3};

typedef struct whole_run {
    ar_config config;
    ar_batch batch;
    ari_reference ref;
    ari_cluster_options cluster;
    uint64_t predicted;
} whole_run;

static void whole_run_init(whole_run *w, const char *json, int tp)
{
    *w = (whole_run){.config = config_of(json), .batch = {.batch = BATCH, .seq = SEQ, .input_ids = ids}};
    w->ref = reference_of(&w->config, &w->batch);
    w->cluster = cluster_of(&w->config, &w->batch, tp);
    SCOPED(ari_check_run_fini) ar_check_run first = {0};
    cr_assert_ok(ari_check_run(&first, &w->ref, &w->cluster));
    cr_assert(first.tensors_different == 0 && !first.error);
    w->predicted = first.bytes_counted;
}

static void whole_run_fini(whole_run *w)
{
    ari_reference_fini(&w->ref);
}

static ar_check_run run_of(const whole_run *w)
{
    ar_check_run run = {.bytes_predicted = w->predicted};
    cr_assert_ok(ari_check_run(&run, &w->ref, &w->cluster));
    return run;
}

static size_t flat_index(const ar_first_difference *f, const ari_ref_tensor *t)
{
    size_t flat = 0;
    for (int d = 0; d < t->ndim; d++)
        flat = flat * t->shape[d] + f->index[d];
    return flat;
}

/* Flips the lowest bit of one element of each reference tensor in turn: that tensor alone must differ, there. */
static void flip_each(const char *json, int tp)
{
    SCOPED(whole_run_fini) whole_run w;
    whole_run_init(&w, json, tp);
    for (size_t i = 0; i < w.ref.count; i += (size_t)by_scale(3, 2, 1)) {
        ari_ref_tensor *t = &w.ref.tensor[i];
        const size_t at = i * 2654435761u % t->count;
        uint32_t u = 0;
        char name[200];
        memcpy(&u, &t->values[at], sizeof u);
        u ^= 1u;
        memcpy(&t->values[at], &u, sizeof u);
        SCOPED(ari_check_run_fini) ar_check_run run = run_of(&w);
        snprintf(name, sizeof name, "%s%s", t->name, ari_pass_suffix(t->pass));
        cr_expect(run.result == AR_CHECK_DIFFERENT && run.tensors_different == 1 && run.elements_different == 1,
                  "%s: %zu tensors, %zu elements", name, run.tensors_different, run.elements_different);
        cr_expect_str_eq(run.first.tensor, name);
        cr_expect_eq(flat_index(&run.first, t), at, "%s", name);
        cr_expect(run.first.ulp == 1 && run.max_ulp == 1 && run.first.elements_different == 1, "%s", name);
        cr_expect(run.first.reference == t->values[at] && run.first.rank >= 0 && run.first.rank < tp);
        u ^= 1u;
        memcpy(&t->values[at], &u, sizeof u);
    }
}

Test(compare, one_flipped_bit_of_any_tensor_is_that_tensors_alone)
{
    flip_each(tiny_models[TINY_LLAMA], 3);
    if (small_only())
        return;
    flip_each(tiny_models[TINY_GPT2], 2);
    flip_each(tiny_models[TINY_STACK], 2);
}

static void flip(whole_run *w, const char *name, char pass, size_t at)
{
    const size_t i = ari_reference_find(&w->ref, name, pass);
    cr_assert(i < w->ref.count && at < w->ref.tensor[i].count, "%s", name);
    float *v = &w->ref.tensor[i].values[at];
    *v = *v == 0.0f ? 1.0f : -*v;
}

static void expect_owner(const char *json, int tp, const char *name, char pass, size_t at, int rank, size_t local)
{
    SCOPED(whole_run_fini) whole_run w;
    whole_run_init(&w, json, tp);
    flip(&w, name, pass, at);
    SCOPED(ari_check_run_fini) ar_check_run run = run_of(&w);
    const ar_first_difference *f = &run.first;
    cr_expect_eq(f->rank, rank, "%s[%zu]: rank %d, expected %d", name, at, f->rank, rank);
    cr_expect_eq(f->local_index[f->local_ndim - 1], local, "%s[%zu]: local index %zu, expected %zu", name, at,
                 f->local_index[f->local_ndim - 1], local);
}

/* Owners by hand, for the models of tiny.h: 24 query and 12 KV heads of 4, ffn 72, hidden 48, 257 ids. */
Test(compare, the_owner_is_the_rank_that_holds_the_element)
{
    const char *llama = tiny_models[TINY_LLAMA], *gpt2 = tiny_models[TINY_GPT2];
    expect_owner(llama, 3, "model.layers.1.mlp.act", 'f', 71, 2, 23);             /* column-parallel: 24 a rank */
    expect_owner(llama, 3, "model.layers.1.mlp.down_proj", 'f', 47, 0, 47);       /* replicated */
    expect_owner(llama, 3, "model.layers.0.self_attn.q_proj", 'f', 64, 2, 0);     /* 96 features, 32 a rank */
    expect_owner(llama, 3, "model.layers.0.self_attn.k_rope", 'f', 16, 1, 0);     /* 48 features, head 4 is rank 1's */
    expect_owner(llama, 3, "model.layers.1.mlp.down_proj.weight", 'g', 48, 2, 0); /* [48, 72], columns split */
    expect_owner(llama, 3, "model.layers.1.mlp.up_proj.weight", 'g', 24 * 48, 1, 0);
    expect_owner(llama, 3, "lm_head", 'f', 86, 1, 0); /* 257 ids in parts of 86 */
    expect_owner(llama, 3, "lm_head.weight", 'i', 256 * 48 + 1, 2, 1);
    expect_owner(llama, 3, "model.norm.weight", 'g', 5, 0, 5);
    expect_owner(gpt2, 2, "transformer.h.1.attn.c_attn.bias", 'g', 48 + 24, 1, 24); /* q|k|v packed: 24 of each */
    expect_owner(gpt2, 2, "transformer.h.1.attn.c_attn.weight", 'g', 24, 1, 0);     /* [in, out] */
    expect_owner(gpt2, 2, "transformer.h.0.mlp.c_proj.weight", 'g', 48 * 48, 1, 0); /* [in, out], rows split */
}

/* Lanes of padding change nothing where the width is a power of two, but they take memory. */
Test(compare, equal_values_in_other_memory_or_with_other_bytes_than_predicted_are_a_wrong_prediction)
{
    SCOPED(whole_run_fini) whole_run w;
    whole_run_init(&w, STACK(257, 64, 84, 1, 16, 8), 2);
    SCOPED(ari_check_run_fini) ar_check_run right = run_of(&w);
    cr_expect_eq(right.result, AR_CHECK_SAME, "%s", right.memory_difference);
    cr_expect_eq(memcmp(&right.memory, &right.memory_predicted, sizeof right.memory), 0);
    w.cluster.run.fault = "norm_padded_lanes";
    SCOPED(ari_check_run_fini) ar_check_run run = run_of(&w);
    cr_expect(run.result == AR_CHECK_MISPREDICTED && run.tensors_different == 0 && !run.has_difference);
    cr_expect(strstr(run.memory_difference, "rank 0") && strstr(run.memory_difference, "kept for backward"), "%s",
              run.memory_difference);
    w.cluster.run.fault = NULL;
    w.predicted++;
    SCOPED(ari_check_run_fini) ar_check_run bytes = run_of(&w);
    cr_expect(bytes.result == AR_CHECK_MISPREDICTED && bytes.tensors_different == 0 && !bytes.has_difference);
    const ar_check_report strict = {.strict_predictions = true}, lenient = {.strict_predictions = false};
    cr_expect(ar_check_passes(&lenient, bytes.result) && !ar_check_passes(&strict, bytes.result));
}

/* On the CPU, and on a device whose operands have another form. */
Test(compare, a_rank_that_holds_a_byte_more_for_a_moment_is_told)
{
    static const ar_device_kind kinds[] = {AR_DEVICE_CPU, AR_DEVICE_EMULATED};
    SCOPED(whole_run_fini) whole_run w;
    ari_comparator rank[2];
    whole_run_init(&w, tiny_models[TINY_STACK], 2);
    for (int r = 0; r < 2; r++)
        cr_assert_ok(ari_comparator_init(&rank[r], &w.ref, NULL));
    for (int i = 0; i < 2; i++) {
        OWNED(ar_device_destroy) ar_device *like = NULL;
        ar_rank_memory counted[2];
        if (ar_device_create(&like, &(ar_device_choice){.kind = kinds[i]}, 1) == AR_ERR_UNSUPPORTED)
            continue;
        for (int r = 0; r < 2; r++) {
            ari_dry_memory dry;
            cr_assert_ok(ari_cluster_dry(&dry, &w.cluster, r, like));
            counted[r] = dry.rank;
        }
        w.cluster.run.device.kind = kinds[i];
        for (int more = 0; more < 2; more++) {
            ar_check_run run = {.bytes_predicted = 0};
            counted[1].peak += (size_t)more;
            cr_assert_ok(ari_check_memory(&run, rank, &w.cluster, counted));
            cr_expect_eq(strstr(run.memory_difference, "memory of rank 1, most of a step") != NULL, more == 1, "%s",
                         run.memory_difference);
        }
    }
    for (int r = 0; r < 2; r++)
        ari_comparator_fini(&rank[r]);
}

/* Activations of experts that ranks share out are of as many rows as the baseline's routes send there, in each step. */
Test(compare, memory_of_shared_experts_is_predicted_by_the_baselines_routes)
{
    static const ar_parallel layouts[] = {
        {.dp = 2, .ep = 2},
        {.dp = 2, .cp = 2, .ep = 4, .micro_batches = 2, .zigzag = true},
        {.dp = 4, .ep = 2, .zero = 3},
        {.dp = 4, .ep = 2, .dispatch = AR_DISPATCH_ALL_GATHER, .zero = 2, .dp_replicate = 2},
        {.tp = 2, .sp = true, .dp = 2, .ep = 4, .etp = 1},
        {.pp = 2, .dp = 2, .ep = 2, .micro_batches = 2, .recompute.part = AR_RECOMPUTE_FULL}};
    ar_check_options o = check_layouts("mixtral-demo", layouts, sizeof layouts / sizeof *layouts, 8, 16);
    o.run.steps = 2;
    OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
    expect_same(r, "experts");
    for (size_t i = 0; i < r->runs; i++)
        cr_expect(r->run[i].has_memory_predicted &&
                      memcmp(&r->run[i].memory, &r->run[i].memory_predicted, sizeof r->run[i].memory) == 0,
                  "layout %zu: %zu bytes kept, %zu predicted", i, r->run[i].memory.stored,
                  r->run[i].memory_predicted.stored);
}

Test(compare, a_tensor_that_no_rank_reports_is_a_difference)
{
    SCOPED(whole_run_fini) whole_run w;
    const double extra = 1.0;
    whole_run_init(&w, tiny_models[TINY_STACK], 2);
    free(w.ref.by_name);
    cr_assert_ok(ari_reference_emit(&w.ref, "model.nobody", 'f', 0, NULL, &extra));
    cr_assert_ok(ari_reference_finish(&w.ref));
    SCOPED(ari_check_run_fini) ar_check_run run = run_of(&w);
    cr_expect(run.result == AR_CHECK_DIFFERENT && run.tensors_different == 1 && !run.error);
    cr_expect_str_eq(run.first.tensor, "model.nobody:fwd");
    cr_expect(strstr(run.first.pattern, "did not report"), "%s", run.first.pattern);
}

Test(compare, a_tensor_that_only_the_ranks_report_is_an_error)
{
    SCOPED(whole_run_fini) whole_run w;
    whole_run_init(&w, tiny_models[TINY_STACK], 2);
    const size_t i = ari_reference_find(&w.ref, "layers.1.mlp.act", 'f');
    cr_assert(i < w.ref.count);
    w.ref.tensor[i].name[0] = 'L';
    free(w.ref.by_name);
    cr_assert_ok(ari_reference_finish(&w.ref));
    SCOPED(ari_check_run_fini) ar_check_run run = run_of(&w);
    cr_expect_eq(run.result, AR_CHECK_ERROR);
    cr_expect(run.error && strstr(run.error, "layers.1.mlp.act:fwd"), "%s", run.error);
}
