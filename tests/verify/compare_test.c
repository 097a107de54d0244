/* SPDX-License-Identifier: Apache-2.0 */
/* The comparator must be able to say "different": one bit anywhere, a sign of zero, a NaN, a tensor that is not there,
 * an element that nobody holds or two ranks claim. */
#include "tests/verify/compare_support.h"

#include "verify/check/check_run.h"

Test(compare, equal_shards_are_complete_and_the_same)
{
    SCOPED(fixture_fini) fixture f;
    fixture_init(&f);
    for (int r = 0; r < RANKS; r++)
        tap_rows(&f.rank[r], f.values, r, RANKS);
    const ari_verdict v = ari_verdict_of(f.rank, RANKS, 0);
    cr_expect(v.complete && v.different == 0 && v.rank == -1 && v.max_ulp == 0);
}

Test(compare, any_single_flipped_bit_is_found_with_its_place)
{
    for (size_t i = 0; i < COUNT; i++) {
        for (unsigned bit = 0; bit < 32; bit++) {
            SCOPED(fixture_fini) fixture f;
            float wrong[COUNT];
            uint32_t u = 0;
            fixture_init(&f);
            memcpy(wrong, f.values, sizeof wrong);
            memcpy(&u, &wrong[i], sizeof u);
            u ^= 1u << bit;
            memcpy(&wrong[i], &u, sizeof u);
            for (int r = 0; r < RANKS; r++)
                tap_rows(&f.rank[r], wrong, r, RANKS);
            const ari_verdict v = ari_verdict_of(f.rank, RANKS, 0);
            cr_assert(v.complete && v.different == 1 && v.first == i, "element %zu, bit %u", i, bit);
            cr_assert_eq(v.rank, (int)(i / (COUNT / RANKS)));
            cr_assert_eq(v.first_local, i % (COUNT / RANKS));
            cr_assert(memcmp(&v.actual, &wrong[i], sizeof v.actual) == 0 && v.max_ulp > 0);
        }
    }
}

Test(compare, the_lowest_index_and_of_copies_the_lowest_rank_is_told)
{
    SCOPED(fixture_fini) fixture f;
    float wrong[COUNT];
    fixture_init(&f);
    memcpy(wrong, f.values, sizeof wrong);
    wrong[7] = wrong[20] = 100.0f;
    for (int r = 0; r < RANKS; r++)
        tap_whole(&f.rank[r], wrong, r, RANKS);
    const ari_verdict v = ari_verdict_of(f.rank, RANKS, 0);
    cr_expect(v.complete && v.different == 2 && v.first == 7 && v.rank == 0);
}

Test(compare, a_copy_that_differs_is_found_though_the_first_copy_is_right)
{
    SCOPED(fixture_fini) fixture f;
    float wrong[COUNT];
    fixture_init(&f);
    memcpy(wrong, f.values, sizeof wrong);
    wrong[COUNT - 1] = -wrong[COUNT - 1];
    tap_whole(&f.rank[0], f.values, 0, RANKS);
    tap_whole(&f.rank[1], wrong, 1, RANKS);
    const ari_verdict v = ari_verdict_of(f.rank, RANKS, 0);
    cr_expect(v.complete && v.different == 1 && v.first == COUNT - 1 && v.rank == 1);
}

/* Rows [start, start + rows) of the full tensor, which lie from row `local` on in the rank's own. */
static ar_box rows_of(size_t start, size_t rows, size_t local)
{
    return (ar_box){.global = {start, 0}, .local = {local, 0}, .extent = {rows, COLS}};
}

Test(compare, the_lowest_index_is_told_though_the_rank_holds_it_behind_others)
{
    SCOPED(fixture_fini) fixture f;
    float own[COUNT];
    const ar_layout turned = {
        .ndim = 2, .shape = {ROWS, COLS}, .nbox = 2, .box = {rows_of(3, 3, 0), rows_of(0, 3, 3)}, .replicas = 1};
    fixture_init(&f);
    memcpy(own, f.values + COUNT / 2, sizeof own / 2);
    memcpy(own + COUNT / 2, f.values, sizeof own / 2);
    own[1] = own[COUNT / 2 + 5] = 100.0f; /* elements 13 and 5 of the full tensor */
    tap(&f.rank[0], "w", own, &turned);
    const ari_verdict v = ari_verdict_of(f.rank, 1, 0);
    cr_expect(v.complete && v.different == 2 && v.first == 5 && v.first_local == COUNT / 2 + 5, "first %zu, local %zu",
              v.first, v.first_local);
}

/* As many elements as there are, but row 2 twice and row 5 not at all. */
Test(compare, boxes_of_one_rank_that_overlap_are_not_the_whole)
{
    SCOPED(fixture_fini) fixture f;
    float own[COUNT];
    const ar_layout overlapping = {
        .ndim = 2, .shape = {ROWS, COLS}, .nbox = 2, .box = {rows_of(0, 3, 0), rows_of(2, 3, 3)}, .replicas = 1};
    fixture_init(&f);
    memcpy(own, f.values, sizeof own / 2);
    memcpy(own + COUNT / 2, f.values + (size_t)2 * COLS, sizeof own / 2);
    tap(&f.rank[0], "w", own, &overlapping);
    const ari_verdict v = ari_verdict_of(f.rank, 1, 0);
    cr_expect(!v.complete && v.different == 0);
}

/* What is hashed is the first copy, whoever reports last. */
Test(compare, the_hashed_copy_is_the_first_replicas)
{
    SCOPED(fixture_fini) fixture f;
    float kept[COUNT] = {0}, wrong[COUNT], *const gathered[] = {kept};
    fixture_init(&f);
    memcpy(wrong, f.values, sizeof wrong);
    wrong[3] = 100.0f;
    for (int r = 0; r < RANKS; r++) {
        ari_comparator_fini(&f.rank[r]);
        cr_assert_ok(ari_comparator_init(&f.rank[r], &f.ref, gathered));
    }
    tap_whole(&f.rank[0], f.values, 0, RANKS);
    tap_whole(&f.rank[1], wrong, 1, RANKS);
    cr_expect_eq(memcmp(kept, f.values, sizeof kept), 0);
}

Test(compare, what_no_rank_holds_is_incomplete)
{
    SCOPED(fixture_fini) fixture f;
    fixture_init(&f);
    tap_rows(&f.rank[0], f.values, 0, 3);
    tap_rows(&f.rank[1], f.values, 1, 3);
    cr_expect(!ari_verdict_of(f.rank, RANKS, 0).complete, "the last third was never reported");
}

Test(compare, a_rank_that_reports_nothing_is_incomplete)
{
    SCOPED(fixture_fini) fixture f;
    fixture_init(&f);
    tap_whole(&f.rank[0], f.values, 0, RANKS);
    cr_expect(!ari_verdict_of(f.rank, RANKS, 0).complete, "rank 1's copy was never compared");
}

Test(compare, one_part_claimed_twice_does_not_stand_for_the_other)
{
    SCOPED(fixture_fini) fixture f;
    fixture_init(&f);
    tap_rows(&f.rank[0], f.values, 0, RANKS);
    tap_rows(&f.rank[1], f.values, 0, RANKS);
    cr_expect(!ari_verdict_of(f.rank, RANKS, 0).complete, "nobody reported the last half");
}

Test(compare, one_rank_reporting_twice_does_not_stand_for_the_other)
{
    SCOPED(fixture_fini) fixture f;
    ar_layout nothing;
    fixture_init(&f);
    cr_assert_ok(ar_layout_shard(&nothing, 2, full_shape, 0, 1, RANKS));
    nothing.nbox = 0;
    tap_rows(&f.rank[0], f.values, 0, RANKS);
    tap_rows(&f.rank[0], f.values, 0, RANKS);
    tap(&f.rank[1], "w", f.values, &nothing);
    cr_expect(!ari_verdict_of(f.rank, RANKS, 0).complete, "nobody reported the last half");
}

static void exchange(int *a, int *b)
{
    const int x = *a;
    *a = *b;
    *b = x;
}

/* The next order of n numbers; false: this was the last. */
static bool next_order(int *a, int n)
{
    int i = n - 1, k = n - 1;
    while (i > 0 && a[i - 1] >= a[i])
        i--;
    if (i == 0)
        return false;
    while (a[k] <= a[i - 1])
        k--;
    exchange(&a[i - 1], &a[k]);
    for (k = n - 1; i < k; i++, k--)
        exchange(&a[i], &a[k]);
    return true;
}

/* As micro-batches come that a schedule takes in an order of its own. */
Test(compare, rows_reported_in_any_order_are_one_part)
{
    int order[ROWS] = {0, 1, 2, 3, 4, 5}, orders = 0;
    do {
        fixture f;
        float wrong[COUNT], *copy = NULL;
        fixture_init(&f);
        memcpy(wrong, f.values, sizeof wrong);
        wrong[13] = wrong[22] = 100.0f;
        for (int k = 0; k < ROWS; k++) {
            cr_assert_eq(k > 0 && ari_verdict_of(f.rank, 1, 0).complete, false);
            tap_rows(&f.rank[0], wrong, order[k], ROWS);
        }
        const ari_verdict v = ari_verdict_of(f.rank, 1, 0);
        cr_assert(v.complete && v.different == 2 && v.first == 13 && v.first_local == 13 && v.rank == 0);
        cr_assert_ok(ari_comparator_copy(&copy, &f.rank[0], 0));
        cr_assert_eq(memcmp(copy, wrong, sizeof wrong), 0);
        free(copy);
        fixture_fini(&f);
        orders++;
    } while (next_order(order, ROWS));
    cr_expect_eq(orders, 720);
}

Test(compare, a_tensor_that_the_reference_lacks_is_kept_by_name)
{
    SCOPED(fixture_fini) fixture f;
    ar_layout o;
    fixture_init(&f);
    cr_assert_ok(ar_layout_replicate(&o, 2, full_shape, 0, 1));
    tap(&f.rank[1], "v", f.values, &o);
    cr_expect_str_eq(f.rank[1].unexpected, "v:fwd, which the baseline does not have");
    cr_expect_str_eq(f.rank[0].unexpected, "");
}

Test(compare, zeros_of_either_sign_differ_and_nans_do_not_hide)
{
    SCOPED(fixture_fini) fixture f;
    float wrong[COUNT];
    fixture_init(&f);
    memcpy(wrong, f.values, sizeof wrong);
    f.ref.tensor[0].values[3] = 0.0f;
    wrong[3] = -0.0f;
    wrong[5] = NAN;
    for (int r = 0; r < RANKS; r++)
        tap_whole(&f.rank[r], wrong, r, RANKS);
    const ari_verdict v = ari_verdict_of(f.rank, RANKS, 0);
    cr_expect(v.different == 2 && v.first == 3 && signbit(v.actual), "%zu different", v.different);
    cr_expect_eq(v.max_ulp, UINT32_MAX);
}

Test(compare, ulp_distance_counts_steps_across_zero)
{
    const float tiny = 0x1p-149f, one = 1.0f;
    cr_expect_eq(ari_ulp_distance(one, one), 0);
    cr_expect_eq(ari_ulp_distance(one, 0x1.000002p+0f), 1);
    cr_expect_eq(ari_ulp_distance(one, 0x1.fffffep-1f), 1);
    cr_expect_eq(ari_ulp_distance(2.0f, one), 1u << 23);
    cr_expect_eq(ari_ulp_distance(0.0f, -0.0f), 1);
    cr_expect_eq(ari_ulp_distance(0.0f, tiny), 1);
    cr_expect_eq(ari_ulp_distance(-0.0f, -tiny), 1);
    cr_expect_eq(ari_ulp_distance(tiny, -tiny), 3);
    cr_expect_eq(ari_ulp_distance(-INFINITY, INFINITY), 2u * 0x7f800000u + 1u);
    cr_expect_eq(ari_ulp_distance(NAN, one), UINT32_MAX);
    cr_expect_eq(ari_ulp_distance(one, NAN), UINT32_MAX);
    cr_expect_eq(ari_ulp_distance(NAN, NAN), 0);
    cr_expect_eq(ari_ulp_distance(NAN, -NAN), UINT32_MAX);
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
    w->cluster = (ari_cluster_options){.config = &w->config,
                                       .run.parallel = {.tp = tp},
                                       .batch = &w->batch,
                                       .run.threads = 1,
                                       .run.sim = {.timeout_ns = 60000000000u}};
    SCOPED(ari_check_run_fini) ar_check_run first = {0};
    cr_assert_ok(ari_check_run(&first, &w->ref, &w->cluster));
    cr_assert(first.tensors_different == 0 && !first.error);
    w->predicted = first.bytes_counted;
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
    whole_run w;
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
    ari_reference_fini(&w.ref);
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
    whole_run w;
    whole_run_init(&w, json, tp);
    flip(&w, name, pass, at);
    SCOPED(ari_check_run_fini) ar_check_run run = run_of(&w);
    const ar_first_difference *f = &run.first;
    cr_expect_eq(f->rank, rank, "%s[%zu]: rank %d, expected %d", name, at, f->rank, rank);
    cr_expect_eq(f->local_index[f->local_ndim - 1], local, "%s[%zu]: local index %zu, expected %zu", name, at,
                 f->local_index[f->local_ndim - 1], local);
    ari_reference_fini(&w.ref);
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
Test(compare, equal_values_in_other_memory_than_predicted_are_a_wrong_prediction)
{
    whole_run w;
    whole_run_init(&w, STACK(257, 64, 84, 1, 16, 8), 2);
    SCOPED(ari_check_run_fini) ar_check_run right = run_of(&w);
    cr_expect_eq(right.result, AR_CHECK_SAME, "%s", right.memory_difference);
    cr_expect_eq(memcmp(&right.memory, &right.memory_predicted, sizeof right.memory), 0);
    w.cluster.run.fault = AR_FAULT_norm_padded_lanes;
    SCOPED(ari_check_run_fini) ar_check_run run = run_of(&w);
    cr_expect(run.result == AR_CHECK_MISPREDICTED && run.tensors_different == 0 && !run.has_difference);
    cr_expect(strstr(run.memory_difference, "rank 0") && strstr(run.memory_difference, "kept for backward"), "%s",
              run.memory_difference);
    ari_reference_fini(&w.ref);
}

/* On the CPU, and on a device whose operands have another form. */
Test(compare, a_rank_that_holds_a_byte_more_for_a_moment_is_told)
{
    static const ar_device_kind kinds[] = {AR_DEVICE_CPU, AR_DEVICE_EMULATED};
    whole_run w;
    whole_run_init(&w, tiny_models[TINY_STACK], 2);
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
            cr_assert_ok(ari_check_memory(&run, &w.cluster, counted));
            cr_expect_eq(strstr(run.memory_difference, "memory of rank 1, most of a step") != NULL, more == 1, "%s",
                         run.memory_difference);
        }
    }
    ari_reference_fini(&w.ref);
}

Test(compare, a_tensor_that_no_rank_reports_is_a_difference)
{
    whole_run w;
    const double extra = 1.0;
    whole_run_init(&w, tiny_models[TINY_STACK], 2);
    free(w.ref.by_name);
    cr_assert_ok(ari_reference_emit(&w.ref, "model.nobody", 'f', 0, NULL, &extra));
    cr_assert_ok(ari_reference_finish(&w.ref));
    SCOPED(ari_check_run_fini) ar_check_run run = run_of(&w);
    cr_expect(run.result == AR_CHECK_DIFFERENT && run.tensors_different == 1 && !run.error);
    cr_expect_str_eq(run.first.tensor, "model.nobody:fwd");
    cr_expect(strstr(run.first.pattern, "did not report"), "%s", run.first.pattern);
    ari_reference_fini(&w.ref);
}

Test(compare, a_tensor_that_only_the_ranks_report_is_an_error)
{
    whole_run w;
    whole_run_init(&w, tiny_models[TINY_STACK], 2);
    const size_t i = ari_reference_find(&w.ref, "layers.1.mlp.act", 'f');
    cr_assert(i < w.ref.count);
    w.ref.tensor[i].name[0] = 'L';
    free(w.ref.by_name);
    cr_assert_ok(ari_reference_finish(&w.ref));
    SCOPED(ari_check_run_fini) ar_check_run run = run_of(&w);
    cr_expect_eq(run.result, AR_CHECK_ERROR);
    cr_expect(run.error && strstr(run.error, "layers.1.mlp.act:fwd"), "%s", run.error);
    ari_reference_fini(&w.ref);
}

Test(compare, equal_values_with_other_bytes_than_predicted_are_a_wrong_prediction)
{
    whole_run w;
    whole_run_init(&w, tiny_models[TINY_GPT2], 2);
    SCOPED(ari_check_run_fini) ar_check_run right = run_of(&w);
    cr_expect_eq(right.result, AR_CHECK_SAME);
    w.predicted++;
    SCOPED(ari_check_run_fini) ar_check_run run = run_of(&w);
    cr_expect(run.result == AR_CHECK_MISPREDICTED && run.tensors_different == 0 && !run.has_difference);
    ari_reference_fini(&w.ref);
}
