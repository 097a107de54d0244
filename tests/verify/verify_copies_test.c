/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/verify.h"
#include "dump/folder.h"

TestSuite(verify_copies, .timeout = 60, .init = folder_begin, .fini = folder_end);

/* Shards that nothing says are shards: copies that differ, of another shape than the reference. */
Test(verify_copies, that_differ_and_have_another_shape_are_reported)
{
    const size_t four[] = {4}, two[] = {2};
    const float x[] = {1, 2, 3, 4};
    char reference[256];
    snprintf(reference, sizeof reference, "%s", put_tensor(".reference.safetensors", "a", 1, four, x, NULL, NULL));
    put_tensor("rank-0.safetensors", "a", 1, two, x, NULL, NULL);
    put_tensor("rank-1.safetensors", "a", 1, two, x + 2, NULL, NULL);
    ar_verify_report *r = NULL;
    const ar_verify_options o = {.reference = reference, .other = folder};
    cr_assert_eq(ar_verify(&r, &o), AR_OK, "%s", ar_error_message());
    cr_expect_not(r->same);
    cr_expect_eq(r->row[0].state, AR_VERIFY_REPLICAS);
    ar_verify_report_destroy(r);
}
