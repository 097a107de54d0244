/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/verify.h"
#include "read/folder.h"
#include "ref/io/safetensors_private.h"
#include "tests/support/noise.h"

TestSuite(verify_copies, .init = folder_begin, .fini = folder_end);

/* Shards that nothing says are shards: copies that differ, of another shape than the reference. */
Test(verify_copies, that_differ_and_have_another_shape_are_reported)
{
    const size_t four[] = {4}, two[] = {2};
    const float x[] = {1, 2, 3, 4};
    char reference[256];
    snprintf(reference, sizeof reference, "%s", put_tensor(".reference.safetensors", "a", 1, four, x, NULL, NULL));
    put_tensor("rank-0.safetensors", "a", 1, two, x, NULL, NULL);
    put_tensor("rank-1.safetensors", "a", 1, two, x + 2, NULL, NULL);
    OWNED(ar_verify_report_destroy) ar_verify_report *r = NULL;
    const ar_verify_options o = {.reference = reference, .other = folder};
    cr_assert_ok(ar_verify(&r, &o));
    cr_expect_not(r->same);
    cr_expect_eq(r->row[0].state, AR_VERIFY_REPLICAS);
}

/* Rows of tokens that a router sends to experts: each rank has those of its own samples. */
Test(verify_copies, of_routed_tokens_are_not_compared)
{
    const char *const names[] = {"layers.0.experts.act_fn:fwd", "layers.0.experts:fwd"};
    const float x[] = {1, 2, 3, 4, 5, 6, 7, 8};
    for (size_t k = 0; k < 2; k++) {
        const char *const files[] = {".reference.safetensors", "rank-0.safetensors", "rank-1.safetensors"};
        for (size_t f = 0; f < 3; f++) {
            char path[256];
            const ar_st_tensor t[] = {
                {.name = names[k], .dtype = AR_F32, .ndim = 2, .shape = {f ? 2 : 4, 2}, .data = x + f},
                {.name = "layers.0:fwd", .dtype = AR_F32, .ndim = 1, .shape = {8}, .data = x}};
            snprintf(path, sizeof path, "%s/%s", folder, files[f]);
            cr_assert_ok(ari_st_write(path, t, 2, NULL, 0));
        }
        OWNED(ar_verify_report_destroy) ar_verify_report *r = NULL;
        char reference[256];
        snprintf(reference, sizeof reference, "%s/%s", folder, files[0]);
        const ar_verify_options o = {.reference = reference, .other = folder};
        cr_assert_ok(ar_verify(&r, &o));
        cr_expect(r->same == (k == 0) && r->routed == (k == 0) && r->compared == 1 + k, "%s", names[k]);
    }
}

/* A file of a run of so many micro-batches, with `rows` rows of one tensor that begin with `first`, and one of another. */
static void write_rows(const char *file, const char *name, size_t rows, float first, const char *micro_batches)
{
    char path[256];
    const float x[] = {first, 2, 3, 4, 5, 6, 7, 8};
    const char *const metadata[] = {"micro_batches", micro_batches};
    const ar_st_tensor t[] = {{.name = name, .dtype = AR_F32, .ndim = 2, .shape = {rows, 2}, .data = x},
                              {.name = "layers.0:fwd", .dtype = AR_F32, .ndim = 1, .shape = {7}, .data = x + 1}};
    snprintf(path, sizeof path, "%s/%s", folder, file);
    cr_assert_ok(ari_st_write(path, t, 2, metadata, 1));
}

/* The micro-batches of one rank are shares of the batch as ranks are: with as many of them, or with all rows, tensors are
 * compared, and a parameter always is. */
Test(verify_copies, of_routed_tokens_of_micro_batches_are_not_compared)
{
    static const char files[][16] = {"one.safetensors", "two.safetensors"}, routed[] = "layers.0.experts.act_fn:bwd";
    static const struct {
        const char *name, *micro_batches[2];
        size_t rows[2];
        float first[2];
        size_t routed;
        bool same;
    } cases[] = {{routed, {"1", "4"}, {4, 1}, {1, 1}, 1, true},
                 {routed, {"4", "1"}, {1, 4}, {1, 1}, 1, true},
                 {routed, {"4", "4"}, {4, 1}, {1, 1}, 0, false},
                 {routed, {"4", "1"}, {4, 1}, {1, 1}, 0, false},
                 {routed, {"1", "4"}, {4, 4}, {1, 1}, 0, true},
                 {routed, {"1", "4"}, {4, 4}, {1, 9}, 0, false},
                 {routed, {"4", "1"}, {4, 4}, {1, 9}, 0, false},
                 {"layers.0.experts.down_proj:grad", {"1", "4"}, {4, 1}, {1, 1}, 0, false},
                 {"layers.0.experts.down_proj:new", {"1", "4"}, {4, 1}, {1, 1}, 0, false}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        char path[2][300];
        for (int s = 0; s < 2; s++) {
            write_rows(files[s], cases[k].name, cases[k].rows[s], cases[k].first[s], cases[k].micro_batches[s]);
            snprintf(path[s], sizeof path[s], "%s/%s", folder, files[s]);
        }
        OWNED(ar_verify_report_destroy) ar_verify_report *r = NULL;
        const ar_verify_options o = {.reference = path[0], .other = path[1]};
        cr_assert_ok(ar_verify(&r, &o));
        cr_expect(r->same == cases[k].same && r->routed == cases[k].routed, "case %zu: %zu routed", k, r->routed);
    }
}

/* A tensor that one of the dumps lacks is missing or unexpected, and its copies differ besides. */
Test(verify_copies, that_differ_of_a_tensor_that_one_dump_lacks_are_reported)
{
    const size_t four[] = {4};
    const float x[] = {1, 2, 3, 4}, y[] = {1, 2, 5, 6};
    char other[256];
    snprintf(other, sizeof other, "%s", put_tensor(".other.safetensors", "b", 1, four, x, NULL, NULL));
    put_tensor("rank-0.safetensors", "a", 1, four, x, NULL, NULL);
    put_tensor("rank-1.safetensors", "a", 1, four, y, NULL, NULL);
    for (int swapped = 0; swapped < 2; swapped++) {
        OWNED(ar_verify_report_destroy) ar_verify_report *r = NULL;
        const ar_verify_options o = {.reference = swapped ? other : folder, .other = swapped ? folder : other};
        cr_assert_ok(ar_verify(&r, &o));
        cr_expect(!r->same && r->rows == 2 && r->compared == 0 && r->missing == 1 && r->unexpected == 1);
        const ar_verify_row *a = &r->row[strcmp(r->row[0].name, "a") == 0 ? 0 : 1];
        cr_expect_eq(a->state, swapped ? AR_VERIFY_UNEXPECTED : AR_VERIFY_MISSING);
        cr_expect(a->copies_differ && a->in_reference == !swapped && a->ranks[0] == 0 && a->ranks[1] == 1);
        cr_expect(a->first.index == 2 && a->elements_different == 2 && a->first.value[0] == 3.0 &&
                  a->first.value[1] == 5.0);
    }
}

/* Copies that a tolerance takes for the same, as they are near each other, and of which the second is too far from the
 * reference. */
Test(verify_copies, the_one_furthest_from_the_reference_decides)
{
    const size_t four[] = {4};
    const float x[] = {1, 2, 3, 4}, near[] = {1, 2, 3.9f, 4}, far[] = {1, 2, 4.5f, 4};
    char reference[256];
    snprintf(reference, sizeof reference, "%s", put_tensor(".reference.safetensors", "a", 1, four, x, NULL, NULL));
    put_tensor("rank-0.safetensors", "a", 1, four, near, NULL, NULL);
    put_tensor("rank-1.safetensors", "a", 1, four, far, NULL, NULL);
    OWNED(ar_verify_report_destroy) ar_verify_report *r = NULL;
    const ar_verify_options o = {.reference = reference, .other = folder, .rule = AR_VERIFY_TOLERANCE, .atol = 1.0};
    cr_assert_ok(ar_verify(&r, &o));
    const ar_verify_row *a = &r->row[0];
    cr_expect(!r->same && a->state == AR_VERIFY_DIFFERENT && a->drift == 1, "state %d", a->state);
    cr_expect(a->ratio == 1.5 && a->max_abs == 1.5 && a->worst.value[1] == 4.5 && a->ranks[0] == 1, "%g on rank %d",
              a->ratio, a->ranks[0]);
}

/* A copy that is off by rounding, beyond the rule, hides another that is wrong: the row has the latter's figures, is no
 * rounding and stays the first. */
Test(verify_copies, of_which_one_is_wrong_are_not_passed_over_as_rounding)
{
    enum { N = 64 };
    static const ar_verify_options rules[] = {{.rule = AR_VERIFY_BITS}, {.rule = AR_VERIFY_TOLERANCE, .atol = 1e-9}};
    char path[3][256];
    for (int f = 0; f < 3; f++) {
        float y[N], z[N];
        for (size_t i = 0; i < N; i++) {
            y[i] = (1.0f + noise(i)) * (f ? 1.0f + 0x1p-22f : 1.0f) + (f == 2 && i >= N / 2 ? 0.25f * noise(i + N) : 0);
            z[i] = noise(i + 2 * N) + (f ? 0.5f : 0.0f);
        }
        const ar_st_tensor t[] = {
            {.name = "layers.0.mlp.down_proj:fwd", .dtype = AR_F32, .ndim = 3, .shape = {2, 4, 8}, .data = y},
            {.name = "layers.1:fwd", .dtype = AR_F32, .ndim = 3, .shape = {2, 4, 8}, .data = z}};
        snprintf(path[f], sizeof path[f], "%s/%srank-%d.safetensors", folder, f ? "" : ".", f);
        cr_assert_ok(ari_st_write(path[f], t, 2, NULL, 0));
    }
    for (size_t i = 0; i < 2; i++) {
        OWNED(ar_verify_report_destroy) ar_verify_report *r = NULL;
        ar_verify_options o = rules[i];
        o.reference = path[0];
        o.other = folder;
        cr_assert_ok(ar_verify(&r, &o));
        const ar_verify_row *down = &r->row[0];
        cr_expect(r->first == 0 && down->state == AR_VERIFY_REPLICAS, "first %zu", r->first);
        cr_expect(down->max_abs > 0.01, "%g", down->max_abs);
    }
}
