/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/test.h"
#include "verify/read/dump.h"

#define RULE(rule) "{\"version\":1,\"mesh\":[[\"dp\",2],[\"tp\",4]],\"files\":\"r{rank}\",\"tensors\":[" rule "]}"

Test(map_errors, a_malformed_mapping_names_the_file_and_the_rule)
{
    static const struct {
        const char *text, *problem;
    } cases[] = {
        {"", "not JSON"},
        {"[]", "expected an object"},
        {"{}", "key 'version': expected 1"},
        {"{\"version\":2}", "key 'version': expected 1"},
        {"{\"version\":1,\"tensor\":[]}", "unknown key 'tensor', did you mean 'tensors'?"},
        {"{\"version\":1,\"hidden_size\":64}", "unknown key 'hidden_size'; known are version, "},
        {"{\"version\":1,\"version\":1}", "duplicate"},
        {"{\"version\":1,\"mesh\":[]}", "key 'mesh': expected 1 to 6"},
        {"{\"version\":1,\"mesh\":[[\"tp\"]]}", "dimension 1"},
        {"{\"version\":1,\"mesh\":[[\"rank\",2]]}", "not 'rank'"},
        {"{\"version\":1,\"mesh\":[[\"a b\",2]]}", "letters, digits"},
        {"{\"version\":1,\"mesh\":[[\"tp\",0]]}", "'tp': expected a size"},
        {"{\"version\":1,\"mesh\":[[\"tp\",2.0]]}", "'tp': expected a size"},
        {"{\"version\":1,\"mesh\":[[\"tp\",65536],[\"dp\",2]]}", "'dp': expected a size"},
        {"{\"version\":1,\"mesh\":[[\"tp\",2],[\"tp\",2]]}", "'tp' is there twice"},
        {"{\"version\":1,\"files\":\"r{rank}\"}", "needs the 'mesh'"},
        {"{\"version\":1,\"mesh\":[[\"tp\",2]],\"files\":7}", "is no string"},
        {"{\"version\":1,\"mesh\":[[\"tp\",2]],\"files\":\"r\"}", "dimension 'tp' of the mesh is missing"},
        {"{\"version\":1,\"mesh\":[[\"tp\",2]],\"files\":\"r{dp}\"}", "'{dp}' is neither"},
        {"{\"version\":1,\"mesh\":[[\"tp\",2]],\"files\":\"r{tp\"}", "a brace that begins no number"},
        {"{\"version\":1,\"mesh\":[[\"tp\",2]],\"files\":\"r{tp}{tp}\"}", "there twice"},
        {"{\"version\":1,\"tensors\":{}}", "key 'tensors': expected a list"},
        {RULE("7"), "rule 1 (''): expected an object"},
        {RULE("{\"match\":\"a\"},{}"), "rule 2 (''): key 'match': is no string"},
        {RULE("{\"match\":7}"), "key 'match': is no string"},
        {RULE("{\"match\":\"a\\\\\"}"), "ends in a single"},
        {RULE("{\"match\":\"*********\"}"), "more '*'"},
        {RULE("{\"match\":\"a\",\"shards\":{}}"), "rule 1 ('a'): unknown key 'shards', did you mean 'shard'?"},
        {RULE("{\"match\":\"a\",\"shard\":0}"), "key 'shard': expected an object"},
        {RULE("{\"match\":\"a\",\"shard\":{\"pp\":0}}"), "'pp' is no dimension of the mesh"},
        {RULE("{\"match\":\"a\",\"shard\":{\"tp\":8}}"), "an integer from -8 to 7"},
        {RULE("{\"match\":\"a\",\"shard\":{\"tp\":\"0\"}}"), "an integer from -8 to 7"},
        {RULE("{\"match\":\"a\",\"shard\":[[\"tp\",0],[\"tp\",1]]}"), "'tp' is there twice"},
        {RULE("{\"match\":\"a\",\"shard\":[[\"tp\"]]}"), "expected pairs"},
        {RULE("{\"match\":\"a\",\"shard\":{\"tp\":{\"dim\":0,\"zag\":true}}}"), "unknown key 'zag'"},
        {RULE("{\"match\":\"a\",\"shard\":{\"tp\":{\"dim\":0,\"zigzag\":1}}}"), "expected true or false"},
        {RULE("{\"match\":\"a\",\"shard\":{\"tp\":{}}}"), "an integer from -8 to 7"},
        {RULE("{\"match\":\"a\",\"blocks\":[]}"), "key 'blocks': expected a list"},
        {RULE("{\"match\":\"a\",\"blocks\":[0]}"), "an integer from 1"},
        {RULE("{\"match\":\"a\",\"groups\":2,\"blocks\":[1]}"), "'into' to take them apart"},
        {RULE("{\"match\":\"a\",\"blocks\":[1,1],\"into\":[\"q\"]}"), "has 1 names, 'blocks' has 2"},
        {RULE("{\"match\":\"a\",\"blocks\":[1],\"into\":[7]}"), "expected names, or null"},
        {RULE("{\"match\":\"a\",\"rename\":\"*\"}"), "has more '*' than the glob"},
        {RULE("{\"match\":\"a\",\"rename\":\"{n}\"}"), "a number in braces, which only 'files' has"},
        {RULE("{\"match\":\"a.{n}\"}"), "a number in braces, which only 'files' has"},
        {RULE("{\"match\":\"a\",\"rename\":7}"), "rule 1 ('a'): key 'rename' is"},
        {RULE("{\"match\":\"a\",\"rename\":\"b\",\"blocks\":[1],\"into\":[\"c\"]}"), "give one of them"},
        {RULE("{\"match\":\"a\",\"leave\":1}"), "rule 1 ('a'): key 'leave' is"},
        {RULE("{\"match\":\"a\",\"groups\":0}"), "rule 1 ('a'): key 'groups' is 0, expected an integer from 1"},
        {RULE("{\"match\":\"a\",\"transpose\":true}"), "unknown key 'transpose'; known are match, leave, rename, "},
        {RULE("{\"match\":\"a\",\"shape\":4}"), "key 'shape': expected a list"},
        {RULE("{\"match\":\"a\",\"shape\":[-1]}"), "an integer from 0"},
        {RULE("{\"match\":\"a\",\"partial\":3}"), "key 'partial'"},
        {RULE("{\"match\":\"a\",\"partial\":\"ep\"}"), "'ep' is no dimension"},
        {RULE("{\"match\":\"a\",\"partial\":\"tp\",\"shard\":{\"tp\":0}}"), "cannot both divide"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ari_map *m = NULL;
        ar_error_clear();
        cr_expect_eq(ari_map_parse(&m, cases[i].text, strlen(cases[i].text), "m.json"), AR_ERR_FORMAT, "%s",
                     cases[i].text);
        cr_expect(strncmp(ar_error_message(), "InvalidMapping: m.json: ", 24) == 0 &&
                      strstr(ar_error_message(), cases[i].problem) != NULL,
                  "%s: %s", cases[i].text, ar_error_message());
        cr_expect_null(m);
    }
    ari_map *m = NULL;
    cr_expect_eq(ari_map_load(&m, "/nowhere/map.json"), AR_ERR_IO);
}

Test(map_errors, a_rule_that_does_not_fit_names_the_tensor_and_the_rank)
{
    static const struct {
        const char *rule, *problem;
        int rank;
    } cases[] = {
        {"{\"match\":\"*\",\"shard\":{\"tp\":2}}",
         "rule 1 ('*'): tensor 'w' of rank 1: has 2 dimensions, none of them is 2", 1},
        {"{\"match\":\"*\",\"shard\":{\"tp\":-3}}", "none of them is -3", 1},
        {"{\"match\":\"*\",\"shard\":{\"tp\":0}}", "no rank's", -1},
        {"{\"match\":\"*\",\"partial\":\"tp\"}", "no rank's", -1},
        {"{\"match\":\"*\",\"blocks\":[1,1],\"into\":[\"q\",\"k\"],\"dim\":2}", "none of them is 2", 1},
        {"{\"match\":\"*\",\"blocks\":[2,3],\"into\":[\"q\",\"k\"]}", "not 1 times blocks of 5", 1},
        {"{\"match\":\"*\",\"blocks\":[1,1],\"into\":[\"q\",\"q\"]}", "two tensors of one name, 'q'", 1},
        {"{\"match\":\"*\",\"blocks\":[1,1],\"into\":[\"q\",\"k\"],\"shape\":[6,null]}", "'into' takes apart", 1},
        {"{\"match\":\"*\",\"blocks\":[1,1],\"groups\":4,\"into\":[\"q\",\"k\"]}", "not 4 times", 1},
        {"{\"match\":\"*\",\"shard\":{\"tp\":0},\"blocks\":[3,1]}",
         "block 0 of dimension 0 is 18, which 4 ranks of 'tp'", 1},
        {"{\"match\":\"*\",\"shard\":{\"tp\":1},\"blocks\":[5,2]}", "the 16 of dimension 1 do not divide", 1},
        {"{\"match\":\"*\",\"shape\":[6]}", "has 2 dimensions, the rule's shape has 1", 1},
        {"{\"match\":\"*\",\"shape\":[7,null]}", "has 6 in dimension 0, by the rule it would have 6 of 7", 1},
        {"{\"match\":\"*\",\"shard\":{\"tp\":0},\"shape\":[30,null]}", "by the rule it would have 8 of 30", 1},
        {"{\"match\":\"*\",\"shard\":{\"tp\":{\"dim\":0,\"zigzag\":true}}}", "", 1},
    };
    static const int data[24] = {0};
    const ar_st_entry e = {
        .name = "w", .dtype = AR_I32, .ndim = 2, .shape = {6, 4}, .count = 24, .bytes = 96, .data = data};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[512];
        ari_piece *t = NULL;
        size_t n = 0;
        snprintf(text, sizeof text, RULE("%s"), cases[i].rule);
        ari_map *m = NULL;
        cr_assert_ok(ari_map_parse(&m, text, strlen(text), "m.json"));
        ar_error_clear();
        const bool wrong = cases[i].problem[0] != '\0';
        cr_expect_eq(ari_map_apply(m, &(ari_map_source){.rank = cases[i].rank, .entry = &e}, &t, &n),
                     wrong ? AR_ERR_FORMAT : AR_OK, "%s", cases[i].rule);
        cr_expect_says(cases[i].problem);
        ari_map_free(m);
    }
}
