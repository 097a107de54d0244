/* SPDX-License-Identifier: Apache-2.0 */
/* SGLang's notation of dimensions says what `shard` and `partial` say, and a bad spelling is pointed at. */
#include "dump/map.h"
#include "tests/support/test.h"

OWNER(ari_map, ari_map_free)

#define RULE \
    "{\"version\":1,\"mesh\":[[\"dp\",1],[\"cp\",2],[\"tp\",2]],\"files\":\"r{rank}\",\"tensors\":[{\"match\":\"*\",%s}]}"

static ar_status try_rule(ari_map **m, const char *keys)
{
    char text[1024];
    snprintf(text, sizeof text, RULE, keys);
    ar_error_clear();
    return ari_map_parse(m, text, strlen(text), "m.json");
}

static ari_map *parse(const char *keys)
{
    ari_map *m = NULL;
    cr_assert_eq(try_rule(&m, keys), AR_OK, "%s: %s", keys, ar_error_message());
    return m;
}

Test(map_dims, each_spelling_is_a_shard_and_a_partial)
{
    static const char *const cases[][2] = {
        {"b s h", ""},
        {"b s h[tp]", "\"shard\":[[\"tp\",2]]"},
        {"  b   s[cp:zigzag] h[tp] ", "\"shard\":[[\"cp\",{\"dim\":1,\"zigzag\":true}],[\"tp\",2]]"},
        {"t[cp:natural,tp:sharded] h", "\"shard\":[[\"cp\",0],[\"tp\",0]]"},
        {"t[tp,cp:zigzag+sharded] h", "\"shard\":[[\"tp\",0],[\"cp\",{\"dim\":0,\"zigzag\":true}]]"},
        {"t h[tp:partial]", "\"partial\":\"tp\""},
        {"s[cp] h[tp:partial]", "\"shard\":{\"cp\":0},\"partial\":[\"tp\"]"},
        {"b (heads*d_1)[tp] # cp:replicated dp:replicated", "\"shard\":{\"tp\":1}"},
        {"t#tp:replicated", ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char keys[256];
        snprintf(keys, sizeof keys, "\"dims\":\"%s\"", cases[i][0]);
        OWNED(ari_map_free) ari_map *m = parse(keys), *as = parse(cases[i][1][0] ? cases[i][1] : "\"note\":0");
        const ari_map_rule *a = m->rule, *b = as->rule;
        cr_expect_eq(a->splits, b->splits, "%s", cases[i][0]);
        for (size_t k = 0; k < a->splits; k++)
            cr_expect(a->split[k].mesh == b->split[k].mesh && a->split[k].dim == b->split[k].dim &&
                          a->split[k].zigzag == b->split[k].zigzag,
                      "%s: split %zu", cases[i][0], k);
        cr_expect_eq(a->partial, b->partial, "%s", cases[i][0]);
    }
}

Test(map_dims, a_bad_spelling_is_pointed_at)
{
    static const struct {
        const char *dims, *problem;
    } cases[] = {
        {"", "character 1, at its end: expected a word"},
        {"  # tp:replicated", "character 3, at '#': expected a word"},
        {"b s h(tp)", "character 6, at '(': expected a space"},
        {"b s h[]", "character 7, at ']': expected a dimension of the mesh"},
        {"b s h[ep]", "character 7, at 'e': expected a dimension of the mesh"},
        {"b h[tp", "character 7, at its end: expected ',' or ']'"},
        {"b h[tp cp]", "character 7, at ' ': expected ',' or ']'"},
        {"b h[tp,]", "character 8, at ']': expected a dimension of the mesh"},
        {"b h[tp:]", "character 8, at ']': expected zigzag, natural, partial or sharded"},
        {"b h[tp:zigzg]", "character 8, at 'z': expected zigzag"},
        {"b h[tp:zigzag+]", "character 15, at ']': expected zigzag"},
        {"b h[tp:zigzag+natural]", "character 15, at 'n': the order is given twice"},
        {"b h[tp:zigzag+partial]", "character 15, at 'p': a summand"},
        {"b h[tp:partial+partial]", "character 16, at 'p': given twice"},
        {"b[tp] h[tp]", "character 9, at 't': 'tp' is there twice"},
        {"b[tp,tp:partial] h", "character 6, at 't': 'tp' is there twice"},
        {"b s b", "character 5, at 'b': the name 'b' is there twice"},
        {"(b*b)", "character 4, at 'b': the name 'b' is there twice"},
        {"(b)", "character 3, at ')': expected '*'"},
        {"(b*c", "character 5, at its end: expected '*' or ')'"},
        {"(b*)", "character 4, at ')': expected the name"},
        {"b 2", "character 3, at '2': expected the name"},
        {"b 1[tp]", "character 4, at '[': expected a space"},
        {"b -", "character 3, at '-': expected the name"},
        {"a b c d e f g h i", "character 17, at 'i': more than 8 dimensions"},
        {"h[tp] # tp:replicated", "character 9, at 't': 'tp' cannot both divide"},
        {"h # tp", "character 7, at its end: expected ':replicated'"},
        {"h # dp:=moe_dp", "character 5, at 'd': 'dp:=GROUP' is not supported here"},
        {"h # tp:replicated dp:=attn_dp", "character 19, at 'd': 'dp:=GROUP' is not supported here"},
        {"h # tp:replicatedx", "character 18, at 'x': expected a space"},
        {"h # ep:replicated", "character 5, at 'e': expected a dimension of the mesh"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char keys[256];
        ari_map *m = NULL;
        snprintf(keys, sizeof keys, "\"dims\":\"%s\"", cases[i].dims);
        cr_expect_eq(try_rule(&m, keys), AR_ERR_FORMAT, "%s", cases[i].dims);
        cr_expect(strstr(ar_error_message(), "rule 1 ('*'): key 'dims': ") &&
                      strstr(ar_error_message(), cases[i].problem),
                  "%s: expected %s: %s", cases[i].dims, cases[i].problem, ar_error_message());
        cr_expect_null(m);
    }
}

Test(map_dims, says_it_once_and_as_text)
{
    static const char *const cases[][2] = {
        {"\"dims\":7", "expected a string"},
        {"\"dims\":\"h\",\"shard\":{\"tp\":0}", "give it or them"},
        {"\"dims\":\"h\",\"partial\":\"tp\"", "give it or them"},
        {"\"dims\":\"1 h\",\"unstack\":\"x{index}\"", "a dimension 1 is left out"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ari_map *m = NULL;
        cr_expect_refused(try_rule(&m, cases[i][0]), AR_ERR_FORMAT, cases[i][1]);
    }
}

Test(map_dims, a_name_that_no_rule_matches_is_an_error_where_a_rule_has_dims)
{
    static const float data[6] = {0};
    const ar_st_entry e = {
        .name = "y", .dtype = AR_F32, .ndim = 2, .shape = {2, 3}, .count = 6, .bytes = 24, .data = data};
    static const struct {
        const char *keys;
        bool error;
    } cases[] = {{"\"tensors\":[{\"match\":\"x\",\"dims\":\"a b\"}]", true},
                 {"\"tensors\":[{\"match\":\"x\"}]", false},
                 {"\"tensors\":[{\"match\":\"x\"}],\"unmatched\":\"error\"", true},
                 {"\"tensors\":[{\"match\":\"x\",\"dims\":\"a b\"}],\"unmatched\":\"whole\"", false},
                 {"\"tensors\":[{\"match\":\"x\",\"dims\":\"a b\"},{\"match\":\"*\",\"leave\":true}]", false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[256];
        OWNED(ari_map_free) ari_map *m = NULL;
        ari_piece *t = NULL;
        size_t n = 0;
        snprintf(text, sizeof text, "{\"version\":1,\"mesh\":[[\"tp\",2]],%s}", cases[i].keys);
        cr_assert_ok(ari_map_parse(&m, text, strlen(text), "m.json"));
        cr_expect_eq(ari_map_apply(m, 1, &e, NULL, NULL, &t, &n), cases[i].error ? AR_ERR_FORMAT : AR_OK, "%s", text);
        cr_expect(!cases[i].error || strstr(ar_error_message(), "tensor 'y' of rank 1: no rule matches it"), "%s",
                  ar_error_message());
        ari_pieces_free(t, n);
    }
    ari_map *m = NULL;
    const char bad[] = "{\"version\":1,\"unmatched\":true}";
    cr_expect_refused(ari_map_parse(&m, bad, strlen(bad), "m.json"), AR_ERR_FORMAT,
                      "key 'unmatched': expected \"error\" or \"whole\"");
}

/* What rank 3 (cp 1, tp 1) of [2, 1, 3] holds of the full tensor [4, 6]. */
Test(map_dims, a_dimension_1_is_left_out)
{
    static const float data[6] = {0};
    const ar_st_entry e = {
        .name = "x", .dtype = AR_F32, .ndim = 3, .shape = {2, 1, 3}, .count = 6, .bytes = 24, .data = data};
    ari_map *m = parse("\"dims\":\"t[cp] 1 h[tp]\"");
    ari_piece *t = NULL;
    size_t n = 0;
    cr_assert_ok(ari_map_apply(m, 3, &e, NULL, NULL, &t, &n));
    cr_assert(n == 1 && t->ndim == 2 && t->boxes == 1);
    cr_expect(t->shape[0] == 4 && t->shape[1] == 6 && t->box->global[0] == 2 && t->box->global[1] == 3);
    cr_expect(t->box->extent[0] == 2 && t->box->extent[1] == 3 && t->box->stride[0] == 3 && t->box->stride[1] == 1);
    ari_pieces_free(t, n);
    ari_map_free(m);
    m = parse("\"dims\":\"1 t h[tp]\"");
    cr_expect_refused(ari_map_apply(m, 3, &e, NULL, NULL, &t, &n), AR_ERR_FORMAT,
                      "has 2 elements in dimension 0, by 'dims' it has 1");
    ari_map_free(m);
    m = parse("\"dims\":\"t h\"");
    cr_expect_refused(ari_map_apply(m, 3, &e, NULL, NULL, &t, &n), AR_ERR_FORMAT,
                      "has 3 dimensions, 'dims' has words for 2");
    ari_map_free(m);
}
