/* SPDX-License-Identifier: Apache-2.0 */
#include "read/folder.h"
#include "verify/read/placement.h"

typedef struct malformed {
    const char *dcp, *own, *says;
} malformed;

#define OWN(rest) "{\"version\":1," rest "}"
#define TENSOR(rest) OWN("\"tensors\":{\"a\":{" rest "}}")
#define BOX(global, local, extent) "{\"global\":" global ",\"local\":" local ",\"extent\":" extent "}"

static const malformed texts[] = {
    {"{", NULL, "DCP_SHARDING_INFO: not JSON"},
    {"[]", NULL, "DCP_SHARDING_INFO: has to be an object"},
    {"{\"a\":[0]}", NULL, "tensor 'a': 'saved_offsets' has to be an array"},
    {"{\"a\":{\"saved_offsets\":[-1]}}", NULL, "no integer from 0"},
    {"{\"a\":{\"saved_offsets\":[1.0]}}", NULL, "no integer from 0"},
    {"{\"a\":{\"saved_offsets\":[9223372036854775808]}}", NULL, "not JSON"},
    {"{\"a\":{\"saved_offsets\":[0,0,0,0,0,0,0,0,0]}}", NULL, "at most 8"},
    {"{\"a\":{\"saved_offsets\":[0]},\"a\":{\"saved_offsets\":[1]}}", NULL, "duplicate object key"},
    {NULL, "3", "not JSON"},
    {NULL, "[]", "ANYRANK_PLACEMENT: has to be an object"},
    {NULL, "{}", "'version' has to be 1"},
    {NULL, "{\"version\":2}", "'version' has to be 1"},
    {NULL, OWN("\"ranks\":1"), "unknown key 'ranks'"},
    {NULL, OWN("\"rank\":-1"), "'rank' has to be an integer from 0"},
    {NULL, OWN("\"rank\":2147483648"), "'rank' has to be an integer from 0"},
    {NULL, OWN("\"rank\":2,\"world\":2"), "rank 2 of 2; they count from 0"},
    {NULL, OWN("\"world\":0"), "'world' has to be an integer from 1"},
    {NULL, OWN("\"mesh\":3"), "'mesh' has to be an array"},
    {NULL, OWN("\"mesh\":[[\"tp\"]]"), "'mesh' has to be pairs"},
    {NULL, OWN("\"mesh\":[[\"tp\",0]]"), "'mesh' has to be pairs"},
    {NULL, OWN("\"mesh\":[[\"a name of 16 byte\",2]]"), "'mesh' has to be pairs"},
    {NULL, OWN("\"mesh\":[[\"tp\",2],[\"tp\",2]]"), "two dimensions of 'mesh' have the same name"},
    {NULL, OWN("\"mesh\":[[\"a\",1],[\"b\",1],[\"c\",1],[\"d\",1],[\"e\",1],[\"f\",1],[\"g\",1]]"), "at most 6"},
    {NULL, OWN("\"world\":3,\"mesh\":[[\"tp\",2]]"), "a mesh of 2 ranks in a world of 3"},
    {NULL, OWN("\"mesh\":[[\"a\",2147483647],[\"b\",2147483647],[\"c\",2147483647]]"), "a mesh of"},
    {NULL, OWN("\"mesh\":[[\"tp\",2]],\"at\":[2]"), "coordinate 2 along 'tp', which has 2"},
    {NULL, OWN("\"mesh\":[[\"tp\",2]],\"at\":[0,0]"), "'at' has to be an array"},
    {NULL, OWN("\"order\":\"a\""), "'order' has to be an array of names"},
    {NULL, OWN("\"order\":[1]"), "'order' has to be an array of names"},
    {NULL, OWN("\"tensors\":[]"), "'tensors' has to be an object"},
    {NULL, OWN("\"tensors\":{\"a\":3}"), "tensor 'a': has to be an object"},
    {NULL, TENSOR("\"shpae\":[1]"), "unknown key 'shpae'"},
    {NULL, TENSOR("\"shape\":[-1]"), "no integer from 0"},
    {NULL, TENSOR("\"boxes\":[]"), "one box or more"},
    {NULL, TENSOR("\"boxes\":[3]"), "a box has to be an object"},
    {NULL, TENSOR("\"boxes\":[{\"global\":[0]}]"), "'local' has to be an array"},
    {NULL, TENSOR("\"shape\":[4,4],\"boxes\":[" BOX("[0]", "[0]", "[1]") "]"),
     "'global' has to be an array of as many"},
    {NULL, TENSOR("\"replica\":2,\"replicas\":2"), "replica 2 of 2; they count from 0"},
    {NULL, TENSOR("\"replica\":1"), "replica 1 of 0"},
    {NULL, TENSOR("\"replicas\":0"), "'replicas' has to be an integer from 1"},
    {NULL, TENSOR("\"partial\":3"), "'partial' has to be the name"},
    {NULL, OWN("\"mesh\":[[\"tp\",2]],\"tensors\":{\"a\":{\"partial\":\"dp\"}}"), "partial over 'dp'"},
};

Test(placement, malformed_texts_are_named_errors)
{
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        SCOPED(ari_placement_fini) ari_placement p;
        cr_expect_eq(ari_placement_parse(&p, texts[i].dcp, texts[i].own, "FILE"), AR_ERR_FORMAT, "text %zu", i);
        cr_expect_eq(strncmp(ar_error_message(), "InvalidPlacement: FILE: ", 24), 0, "%s", ar_error_message());
        cr_expect_not_null(strstr(ar_error_message(), texts[i].says), "expected '%s' in: %s", texts[i].says,
                           ar_error_message());
    }
}

/* Of a tensor that is [2,3] in the file. */
static const malformed misfits[] = {
    {"{\"a\":{\"saved_offsets\":[0]}}", NULL, "another number of dimensions"},
    {"{\"b\":{\"saved_offsets\":[0]}}", NULL, "places tensor 'b', which it does not hold"},
    {NULL, TENSOR("\"shape\":[6]"), "another number of dimensions"},
    {NULL, TENSOR("\"shape\":[2,2]"), "a box reaches beyond the full tensor"},
    {"{\"a\":{\"saved_offsets\":[1,0]}}", TENSOR("\"shape\":[2,3]"), "a box reaches beyond the full tensor"},
    {NULL, TENSOR("\"boxes\":[" BOX("[0,0]", "[0,0]", "[3,3]") "]"), "a box reaches beyond it"},
    {NULL, TENSOR("\"boxes\":[" BOX("[0,0]", "[1,0]", "[2,3]") "]"), "a box reaches beyond it"},
    {NULL, TENSOR("\"boxes\":[" BOX("[0,0]", "[9223372036854775807,0]", "[2,3]") "]"), "a box reaches beyond it"},
    {NULL, TENSOR("\"boxes\":[" BOX("[0,0]", "[0,0]", "[1,3]") "]"), "its boxes have fewer elements"},
    {NULL, TENSOR("\"boxes\":[" BOX("[0,0]", "[0,0]", "[2,3]") "," BOX("[2,0]", "[0,0]", "[1,3]") "]"),
     "its boxes overlap in the file"},
    {NULL, TENSOR("\"boxes\":[" BOX("[0,0]", "[0,0]", "[1,3]") "," BOX("[0,0]", "[1,0]", "[1,3]") "]"),
     "both hold [0:1, 0:3], twice in one file"},
};

Test(placement, texts_that_do_not_fit_the_tensor_are_named_errors, .init = folder_begin, .fini = folder_end)
{
    const size_t shape[] = {2, 3};
    const float x[6] = {0};
    for (size_t i = 0; i < sizeof misfits / sizeof *misfits; i++) {
        put_tensor("r.safetensors", "a", 2, shape, x, misfits[i].dcp, misfits[i].own);
        expect_error(AR_ERR_FORMAT, i + 1 < sizeof misfits / sizeof *misfits ? "InvalidPlacement: " : "Overlapping",
                     misfits[i].says);
    }
}

Test(placement, what_is_written_is_read_again)
{
    ari_placed t[] = {
        {.name = (char *)(uintptr_t) "a", .ndim = 2, .shape = {8, 6}, .offset = {4, 0}, .replica = 1, .replicas = 3},
        {.name = (char *)(uintptr_t) "b \"\\ \xc3\xa9", .partial = true, .partial_over = 5}};
    const ari_placement out = {.rank = 5,
                               .world = 24,
                               .mesh = {3, {{"dp", 2}, {"cp", 3}, {"tp", 4}}},
                               .coords = {0, 1, 1},
                               .tensor = t,
                               .tensors = 2};
    OWNED(free) char *dcp = NULL, *own = NULL;
    SCOPED(ari_placement_fini) ari_placement in;
    cr_assert_ok(ari_placement_text(&dcp, &own, &out));
    cr_assert_ok(ari_placement_parse(&in, dcp, own, "FILE"));
    cr_expect(in.rank == 5 && in.world == 24 && in.mesh.ndim == 3 && in.has_at && in.coords[2] == 1);
    cr_expect_eq(memcmp(&in.mesh, &out.mesh, sizeof in.mesh), 0);
    const ari_placed *a = ari_placement_find(&in, "a"), *b = ari_placement_find(&in, t[1].name);
    cr_assert(a != NULL && b != NULL);
    cr_expect(a->ndim == 2 && a->has_shape && a->shape[0] == 8 && a->offset[0] == 4);
    cr_expect(a->replica == 1 && a->replicas == 3 && !a->partial);
    cr_expect(b->ndim == 0 && b->partial && b->partial_over == 5);
    cr_expect_null(ari_placement_find(&in, "c"));
}
