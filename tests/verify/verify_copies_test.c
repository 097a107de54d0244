/* SPDX-License-Identifier: Apache-2.0 */
#include "dump/folder.h"

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
            cr_assert_ok(ar_st_write(path, t, 2, NULL, 0));
        }
        OWNED(ar_verify_report_destroy) ar_verify_report *r = NULL;
        char reference[256];
        snprintf(reference, sizeof reference, "%s/%s", folder, files[0]);
        const ar_verify_options o = {.reference = reference, .other = folder};
        cr_assert_ok(ar_verify(&r, &o));
        cr_expect(r->same == (k == 0) && r->routed == (k == 0) && r->compared == 1 + k, "%s", names[k]);
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
