/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/verify.h"
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
