/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/test.h"
#include "verify/read/dump.h"

OWNER(ari_map, ari_map_free)

/* --- ranks that hold lists of numbers ----------------------------------------------------------------------------- */
#define MAX_PARTS 16
typedef struct part {
    int rank;
    ar_st_entry entry;
    int data[64]; /* which element of the full tensor each one is; -1: of none, to be dropped */
} part;
typedef struct world {
    part part[MAX_PARTS];
    size_t n;
    char map[400];
} world;

static ari_map *parse(const char *text)
{
    ari_map *m = NULL;
    cr_assert_ok(ari_map_parse(&m, text, strlen(text), "m.json"));
    return m;
}

/* A mapping of one rule. mesh: pairs; NULL: the files are no ranks'. rule: NULL where there is none. */
static void set_map(world *w, const char *mesh, const char *rule)
{
    char ranks[100] = "";
    if (mesh != NULL)
        snprintf(ranks, sizeof ranks, ",\"mesh\":[%s],\"files\":\"r{rank}\"", mesh);
    snprintf(w->map, sizeof w->map, "{\"version\":1%s%s%s%s}", ranks, rule ? ",\"tensors\":[{" : "", rule ? rule : "",
             rule ? "}]" : "");
}

/* What ranks hold, as "0[2,1]: 0 2; 1: 1 3": ranks, shapes where they are not one dimension of all, and numbers. */
static void hold(world *w, const char *name, const char *parts)
{
    char *at = (char *)(uintptr_t)parts;
    while (*at != '\0') {
        part *p = &w->part[w->n++];
        size_t n = 0;
        p->rank = (int)strtol(at, &at, 10);
        p->entry = (ar_st_entry){.name = name, .dtype = AR_I32, .ndim = 1, .data = p->data};
        const bool shaped = *at == '[';
        if (shaped) {
            p->entry.shape[0] = strtoul(at + 1, &at, 10);
            if (*at == ',') {
                p->entry.ndim = 2;
                p->entry.shape[1] = strtoul(at + 1, &at, 10);
            }
            at++;
        }
        for (at++; *at == ' '; n++)
            p->data[n] = (int)strtol(at, &at, 10);
        at += *at == ';' ? 2 : 0;
        if (!shaped)
            p->entry.shape[0] = n;
        cr_assert_eq(n, p->entry.shape[0] * (p->entry.ndim == 2 ? p->entry.shape[1] : 1), "%s", parts);
        p->entry.count = n;
        p->entry.bytes = 4 * n;
    }
}

/* The full tensor `name` put together: seen[i] counts the parts that hold element i, whose number must be i. */
typedef struct full {
    char name[32];
    int ndim;
    size_t shape[4], count;
    int seen[256];
    int term_seen[8];
    bool partial;
    size_t terms;
} full;

static void put_box(full *f, const ar_dump_box *b, const part *p)
{
    const size_t n = ari_volume(b->extent, f->ndim);
    size_t index[4] = {0};
    cr_expect_gt(n, 0, "an empty box");
    for (size_t i = 0; i < n; i++) {
        size_t rest = i, at = b->offset, to = 0;
        for (int d = f->ndim - 1; d >= 0; d--) {
            index[d] = rest % b->extent[d];
            rest /= b->extent[d];
        }
        for (int d = 0; d < f->ndim; d++) {
            at += index[d] * b->stride[d];
            to = to * f->shape[d] + b->global[d] + index[d];
            cr_assert_lt(b->global[d] + index[d], f->shape[d]);
        }
        cr_assert_lt(at, p->entry.count);
        cr_expect_eq(p->data[at], (int)to, "%s of rank %d: element %zu is %d, placed as %zu", f->name, p->rank, at,
                     p->data[at], to);
        f->seen[to]++;
    }
}

static size_t gather(const world *w, full *f, size_t room)
{
    OWNED(ari_map_free) ari_map *m = parse(w->map);
    size_t found = 0;
    memset(f, 0, room * sizeof *f);
    for (size_t i = 0; i < w->n; i++) {
        ari_piece *t = NULL;
        size_t n = 0;
        cr_assert_ok(ari_map_apply(m, &(ari_map_source){.rank = w->part[i].rank, .entry = &w->part[i].entry}, &t, &n));
        for (size_t k = 0; k < n; k++) {
            size_t j = 0;
            while (j < found && strcmp(f[j].name, t[k].name) != 0)
                j++;
            cr_assert_lt(j, room);
            if (j == found) {
                snprintf(f[j].name, sizeof f[j].name, "%s", t[k].name);
                f[j].ndim = t[k].ndim;
                memcpy(f[j].shape, t[k].shape, sizeof f[j].shape);
                f[j].count = ari_volume(t[k].shape, t[k].ndim);
                found++;
            }
            cr_expect_eq(memcmp(f[j].shape, t[k].shape, sizeof f[j].shape), 0, "%s: ranks tell other shapes",
                         t[k].name);
            f[j].partial = t[k].partial;
            f[j].terms = t[k].terms;
            f[j].term_seen[t[k].term]++;
            for (size_t b = 0; b < t[k].boxes; b++)
                put_box(&f[j], &t[k].box[b], &w->part[i]);
        }
    }
    return found;
}

/* Each tensor with its shape, how often each of its elements is held, and of how many terms it is the sum. */
static void tell(char *text, size_t size, const world *w)
{
    full f[4];
    size_t at = 0;
    const size_t found = gather(w, f, 4);
    for (size_t i = 0; i < found; i++) {
        at += (size_t)snprintf(text + at, size - at, "%s%s", i > 0 ? ", " : "", f[i].name);
        for (int d = 0; d < f[i].ndim; d++)
            at += (size_t)snprintf(text + at, size - at, "%c%zu", d == 0 ? '[' : 'x', f[i].shape[d]);
        at += (size_t)snprintf(text + at, size - at, "] ");
        for (size_t k = 0; k < f[i].count; k++)
            at += (size_t)snprintf(text + at, size - at, "%d", f[i].seen[k]);
        cr_expect_eq(f[i].partial, f[i].terms > 1, "%s", text);
        if (f[i].partial)
            at += (size_t)snprintf(text + at, size - at, " of %zu terms", f[i].terms);
        for (size_t k = 0; k < f[i].terms && f[i].partial; k++)
            cr_expect_eq(f[i].term_seen[k], (int)(w->n / f[i].terms), "%s: term %zu is that of %d ranks", text, k,
                         f[i].term_seen[k]);
    }
}

#define TP(n) "[\"tp\"," #n "]"
#define PP "[\"pp\",2]"
#define DP2_TP2 "[\"dp\",2],[\"tp\",2]"
#define ROWS "\"match\":\"*\",\"shard\":{\"tp\":0}"
#define QKV "\"match\":\"*.qkv.weight\",\"into\":[\"*.q.weight\",\"*.k.weight\",\"*.v.weight\"],"
#define CUT QKV "\"shard\":{\"tp\":0},"

static const struct {
    const char *what, *mesh, *rule, *tensor, *parts, *full;
} held[] = {
    /* splits */
    {"rows", TP(2), ROWS, "w", "0[1,3]: 0 1 2; 1[1,3]: 3 4 5", "w[2x3] 111111"},
    {"columns", TP(2), "\"match\":\"*\",\"shard\":{\"tp\":-1}", "w", "0[2,1]: 0 2; 1[2,1]: 1 3", "w[2x2] 1111"},
    /* 7 rows over 4 ranks are 2, 2, 2, 1 as torch cuts them, over 5 they are 2, 2, 2, 1, 0. */
    {"a shape places shards that are uneven", TP(4), ROWS ",\"shape\":[7]", "w", "0: 0 1; 1: 2 3; 2: 4 5; 3: 6",
     "w[7] 1111111"},
    {"and of which some are empty", TP(5), ROWS ",\"shape\":[7]", "w",
     "0: 0 1; 1: 2 3; 2: 4 5; 3: 6; 4[0]:", "w[7] 1111111"},
    {"two dimensions of the mesh divide two", DP2_TP2, "\"match\":\"*\",\"shard\":{\"tp\":1,\"dp\":0}", "w",
     "0[1,2]: 0 1; 1[1,2]: 2 3; 2[1,2]: 4 5; 3[1,2]: 6 7", "w[2x4] 11111111"},
    {"two divide one, as an object the mesh's outermost first", DP2_TP2,
     "\"match\":\"*\",\"shard\":{\"tp\":0,\"dp\":0}", "w", "0: 0 1; 1: 2 3; 2: 4 5; 3: 6 7", "w[8] 11111111"},
    {"two divide one, as a list in its order", DP2_TP2, "\"match\":\"*\",\"shard\":[[\"tp\",0],[\"dp\",0]]", "w",
     "0: 0 1; 1: 4 5; 2: 2 3; 3: 6 7", "w[8] 11111111"},
    {"zigzag takes a piece from either end", TP(2), "\"match\":\"*\",\"shard\":{\"tp\":{\"dim\":0,\"zigzag\":true}}",
     "w", "0: 0 1 6 7; 1: 2 3 4 5", "w[8] 11111111"},
    {"what no rule names is a copy on each rank", DP2_TP2, NULL, "norm", "0: 0 1 2; 1: 0 1 2; 2: 0 1 2; 3: 0 1 2",
     "norm[3] 444"},
    /* packed tensors */
    {"blocks are divided each by itself", TP(2), ROWS ",\"blocks\":[1,1]", "w13", "0: 0 1 4 5; 1: 2 3 6 7",
     "w13[8] 11111111"},
    {"blocks of unequal size too", TP(2), ROWS ",\"blocks\":[2,1,1]", "qkv", "0: 0 1 4 6; 1: 2 3 5 7",
     "qkv[8] 11111111"},
    {"parts get names of their own", TP(2), CUT "\"blocks\":[2,1,1]", "l.qkv.weight", "0: 0 1 0 0; 1: 2 3 1 1",
     "l.q.weight[4] 1111, l.k.weight[2] 11, l.v.weight[2] 11"},
    {"parts of columns of a whole one", NULL, QKV "\"dim\":-1,\"blocks\":[1,1,1]", "l.qkv.weight",
     "-1[2,3]: 0 0 0 1 1 1", "l.q.weight[2x1] 11, l.k.weight[2x1] 11, l.v.weight[2x1] 11"},
    /* Megatron: for each of 2 key heads its 2 query heads, then key, then value; each head of 2 rows. */
    {"interleaved heads are taken apart", TP(2), CUT "\"blocks\":[2,1,1],\"groups\":2", "l.qkv.weight",
     "0: 0 1 2 3 0 1 0 1; 1: 4 5 6 7 2 3 2 3", "l.q.weight[8] 11111111, l.k.weight[4] 1111, l.v.weight[4] 1111"},
    {"of more ranks than groups one ends within a group", TP(4), CUT "\"blocks\":[2,1,1],\"groups\":2", "l.qkv.weight",
     "0: 0 1 2 3; 1: 0 1 0 1; 2: 4 5 6 7; 3: 2 3 2 3",
     "l.q.weight[8] 11111111, l.k.weight[4] 1111, l.v.weight[4] 1111"},
    {"packed tensors that are cut across are put back", TP(2), CUT "\"groups\":1,\"blocks\":[2,1,1]", "l.qkv.weight",
     "0: 0 1 2 3; 1: 0 1 0 1", "l.q.weight[4] 1111, l.k.weight[2] 11, l.v.weight[2] 11"},
    {"two dimensions of the mesh divide zigzag pieces", DP2_TP2,
     "\"match\":\"*\",\"shard\":[[\"dp\",{\"dim\":0,\"zigzag\":true}],[\"tp\",0]]", "w",
     "0: 0 1; 1: 6 7; 2: 2 3; 3: 4 5", "w[8] 11111111"},
    /* shapes */
    {"rows beyond the shape are dropped", TP(4), ROWS ",\"shape\":[3]", "embed", "0: 0; 1: 1; 2: 2; 3: -1",
     "embed[3] 111"},
    {"partial sums tell which summand a rank has", DP2_TP2, "\"match\":\"*\",\"partial\":\"tp\"", "y",
     "0: 0 1; 1: 0 1; 2: 0 1; 3: 0 1", "y[2] 44 of 2 terms"},
    {"summands over two dimensions", "[\"dp\",2],[\"tp\",3]", "\"match\":\"*\",\"partial\":[\"dp\",\"tp\"]", "y",
     "0: 0 1; 1: 0 1; 2: 0 1; 3: 0 1; 4: 0 1; 5: 0 1", "y[2] 66 of 6 terms"},
};

Test(map, what_ranks_hold_makes_full_tensors)
{
    for (size_t i = 0; i < sizeof held / sizeof *held; i++) {
        char text[256];
        world w = {.n = 0};
        set_map(&w, held[i].mesh, held[i].rule);
        hold(&w, held[i].tensor, held[i].parts);
        tell(text, sizeof text, &w);
        cr_expect_str_eq(text, held[i].full, "%s: %s", held[i].what, text);
    }
}

static void expect_packed(const char *name, const char *rule, bool refused)
{
    char matched[200];
    world w = {.n = 0};
    snprintf(matched, sizeof matched, "\"match\":\"*\",%s", rule);
    set_map(&w, TP(2), matched);
    hold(&w, name, "0: 0 1; 1: 2 3");
    OWNED(ari_map_free) ari_map *m = parse(w.map);
    ari_piece *t = NULL;
    size_t n = 0;
    cr_expect_eq(ari_map_apply(m, &(ari_map_source){.rank = 1, .entry = &w.part[1].entry}, &t, &n),
                 refused ? AR_ERR_FORMAT : AR_OK, "%s, %s: %s", name, rule, refused ? "" : ar_error_message());
    if (refused) {
        char begin[200];
        snprintf(begin, sizeof begin, "InvalidMapping: m.json: rule 1 ('*'): tensor '%s' of rank 1: looks like", name);
        cr_expect_eq(strncmp(ar_error_message(), begin, strlen(begin)), 0, "%s", ar_error_message());
        cr_expect_says("\"blocks\": [1, 1, 1], or \"blocks\": null");
    }
}

/* As anyrank.capture refuses it: without the sizes one cut would give rank 0 all of q and a part of k. */
Test(map, a_packed_tensor_that_is_cut_without_its_sizes_is_refused)
{
    static const char *const cut = "\"shard\":{\"tp\":0}";
    static const char *const packed[] = {
        "h.0.attn.c_attn.weight", "h.0.attn.c_attn.bias:grad", "l.0.qkv_proj.weight", "Wqkv.weight@2",
        "attn.in_proj_weight",    "mlp.gate_up_proj:fwd",      "layers.0.qkv"};
    for (size_t i = 0; i < sizeof packed / sizeof *packed; i++) {
        expect_packed(packed[i], cut, true);
        expect_packed(packed[i], "\"shard\":{\"tp\":0},\"blocks\":[1,1]", false);
        expect_packed(packed[i], "\"shard\":{\"tp\":0},\"blocks\":null", false);
    }
    static const char *const other[] = {"h.0.attn.c_proj.weight", "c_attn.lora.down.weight", "h.0.attn.c_attn:bwd",
                                        "h.0.attn.c_attn:bwd@1",  "l.linear_qkv.weight",     "xqkv.weight"};
    for (size_t i = 0; i < sizeof other / sizeof *other; i++)
        expect_packed(other[i], cut, false);
    expect_packed("x.weight", "\"shard\":{\"tp\":0},\"rename\":\"h.0.attn.c_attn.weight\"", true);
    expect_packed("c_attn.weight", "\"rename\":\"*\"", false); /* not cut */
}

Test(map, a_scalar_is_one_box)
{
    static const int one = 7;
    const ar_st_entry e = {.name = "loss", .dtype = AR_I32, .ndim = 0, .count = 1, .bytes = 4, .data = &one};
    OWNED(ari_map_free) ari_map *m = parse("{\"version\":1}");
    ari_piece *t = NULL;
    size_t n = 0;
    cr_assert_ok(ari_map_apply(m, &(ari_map_source){.rank = -1, .entry = &e}, &t, &n));
    cr_expect(n == 1 && t->ndim == 0 && t->boxes == 1 && t->box->offset == 0);
}

/* --- names -------------------------------------------------------------------------------------------------------- */
/* The name that an entry gets on a rank of a mesh of 2 x 2; "" where it is left out. */
static void expect_name(const char *rules, int rank, const char *name, const char *expected)
{
    char text[1024];
    static const int zero = 0;
    const ar_st_entry e = {.name = name, .dtype = AR_I32, .ndim = 0, .count = 1, .bytes = 4, .data = &zero};
    snprintf(text, sizeof text,
             "{\"version\":1,\"mesh\":[[\"pp\",2],[\"tp\",2]],\"files\":\"r{rank}\",\"tensors\":[%s]}", rules);
    OWNED(ari_map_free) ari_map *m = parse(text);
    ari_piece *t = NULL;
    size_t n = 0;
    cr_assert_ok(ari_map_apply(m, &(ari_map_source){.rank = rank, .entry = &e}, &t, &n));
    cr_expect_str_eq(n == 0 ? "" : t->name, expected);
}

Test(map, captures_go_into_the_new_name)
{
    expect_name("{\"match\":\"*.c_fc.*\",\"rename\":\"*.fc1.*\"}", 0, "h.0.c_fc.weight", "h.0.fc1.weight");
    expect_name("{\"match\":\"layers.*.mlp.*\",\"rename\":\"h.*.*\"}", 0, "layers.3.mlp.w.b", "h.3.w.b");
    expect_name("{\"match\":\"*\",\"rename\":\"x.*\"}", 0, "", "x.");
    expect_name("{\"match\":\"a?c\",\"rename\":\"y\"}", 0,
                "a\xc3\xa9"
                "c",
                "y");
    expect_name("{\"match\":\"a?c\",\"rename\":\"y\"}", 0, "ac", "ac");
    expect_name("{\"match\":\"a\\\\*c\",\"rename\":\"\\\\{y\\\\*\"}", 0, "a*c", "{y*");
    expect_name("{\"match\":\"a\\\\*c\",\"rename\":\"y\"}", 0, "abc", "abc");
    expect_name("{\"match\":\"*ab*ab\",\"rename\":\"*|*\"}", 0, "xabababab", "x|abab");
}

Test(map, the_first_rule_that_matches_applies)
{
    const char *rules = "{\"match\":\"*.inv_freq\",\"leave\":true},{\"match\":\"head\",\"rename\":\"lm_head\"},"
                        "{\"match\":\"*\",\"rename\":\"rest.*\"}";
    expect_name(rules, 0, "rope.inv_freq", "");
    expect_name(rules, 0, "head", "lm_head");
    expect_name(rules, 2, "w", "rest.w");
}

Test(map, a_files_name_tells_the_rank)
{
    static const struct {
        const char *files, *name;
        int rank;
    } cases[] = {
        {"mp_rank_{tp}_{dp}.safetensors", "mp_rank_01_001.safetensors", 4},
        {"mp_rank_{tp}_{dp}.safetensors", "mp_rank_01_001.bin", -1},
        {"mp_rank_{tp}_{dp}.safetensors", "mp_rank_x_001.safetensors", -1},
        {"rank-{rank}.safetensors", "rank-00005.safetensors", 5},
        {"*tp{tp}-*dp{dp}*", "step10-tp2-and-dp0.x", 2},
        {"dp{dp}/tp{tp}.safetensors", "dp1/tp0.safetensors", 3},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[256];
        int rank = -2;
        snprintf(text, sizeof text, "{\"version\":1,\"mesh\":[[\"dp\",2],[\"tp\",3]],\"files\":\"%s\"}",
                 cases[i].files);
        OWNED(ari_map_free) ari_map *m = parse(text);
        cr_assert_ok(ari_map_rank_of(m, cases[i].name, &rank));
        cr_expect_eq(rank, cases[i].rank, "%s: %d", cases[i].name, rank);
        cr_expect(m->files && m->depth == (i == 5));
    }
    OWNED(ari_map_free) ari_map *m = parse("{\"version\":1,\"mesh\":[[\"dp\",2],[\"tp\",3]],\"files\":\"{dp}-{tp}\"}");
    int rank = 0;
    cr_expect_eq(ari_map_rank_of(m, "0-3", &rank), AR_ERR_FORMAT);
    cr_expect_str_eq(ar_error_message(), "InvalidMapping: m.json: file '0-3' has tp 3, the mesh has 3 of it");
}

Test(map, a_name_that_no_rule_matches_is_an_error_where_the_mapping_says_so)
{
    static const float data[6] = {0};
    const ar_st_entry e = {
        .name = "y", .dtype = AR_F32, .ndim = 2, .shape = {2, 3}, .count = 6, .bytes = 24, .data = data};
    static const struct {
        const char *keys;
        bool error;
    } rules[] = {{"\"tensors\":[{\"match\":\"x\"}]", false},
                 {"\"tensors\":[{\"match\":\"x\"}],\"unmatched\":\"error\"", true},
                 {"\"tensors\":[{\"match\":\"x\"}],\"unmatched\":\"whole\"", false},
                 {"\"tensors\":[{\"match\":\"x\"},{\"match\":\"*\",\"leave\":true}],\"unmatched\":\"error\"", false}};
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        char text[256];
        ari_piece *t = NULL;
        size_t n = 0;
        snprintf(text, sizeof text, "{\"version\":1,\"mesh\":[[\"tp\",2]],%s}", rules[i].keys);
        OWNED(ari_map_free) ari_map *m = parse(text);
        cr_expect_eq(ari_map_apply(m, &(ari_map_source){.rank = 1, .entry = &e}, &t, &n),
                     rules[i].error ? AR_ERR_FORMAT : AR_OK, "%s", text);
        if (rules[i].error)
            cr_expect_says("tensor 'y' of rank 1: no rule matches it");
    }
    ari_map *m = NULL;
    const char bad[] = "{\"version\":1,\"unmatched\":true}";
    cr_expect_refused(ari_map_parse(&m, bad, strlen(bad), "m.json"), AR_ERR_FORMAT,
                      "key 'unmatched': expected \"error\" or \"whole\"");
}
