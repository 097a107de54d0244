/* SPDX-License-Identifier: Apache-2.0 */
#include "dump/map.h"
#include "tests/support/test.h"

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
    const char *map;
} world;

static ari_map *parse(const char *text)
{
    ari_map *m = NULL;
    cr_assert_ok(ari_map_parse(&m, text, strlen(text), "m.json"));
    return m;
}

/* Rank's tensor [rows, cols] (cols 0: one dimension) of the given numbers. */
static void hold(world *w, int rank, const char *name, size_t rows, size_t cols, const int *numbers)
{
    part *p = &w->part[w->n++];
    const size_t count = rows * (cols == 0 ? 1 : cols);
    p->rank = rank;
    p->entry = (ar_st_entry){.name = name,
                             .dtype = AR_I32,
                             .ndim = cols == 0 ? 1 : 2,
                             .shape = {rows, cols},
                             .count = count,
                             .bytes = 4 * count,
                             .data = p->data};
    memcpy(p->data, numbers, 4 * count);
}
#define HOLD(w, rank, name, ...)                                             \
    do {                                                                     \
        const int list_[] = {__VA_ARGS__};                                   \
        hold((w), (rank), (name), sizeof list_ / sizeof list_[0], 0, list_); \
    } while (0)

static const ar_st_entry *find(void *user, int rank, const char *name)
{
    const world *w = user;
    for (size_t i = 0; i < w->n; i++)
        if (w->part[i].rank == rank && strcmp(w->part[i].entry.name, name) == 0)
            return &w->part[i].entry;
    return NULL;
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
    size_t index[4] = {0}, n = 1;
    for (int d = 0; d < f->ndim; d++)
        n *= b->extent[d];
    cr_expect_gt(n, 0, "an empty box");
    for (size_t i = 0; i < n; i++) {
        size_t rest = i, at = b->at, to = 0;
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
        cr_assert_ok(ari_map_apply(m, w->part[i].rank, &w->part[i].entry, find, (void *)(uintptr_t)w, &t, &n));
        for (size_t k = 0; k < n; k++) {
            size_t j = 0;
            while (j < found && strcmp(f[j].name, t[k].name) != 0)
                j++;
            cr_assert_lt(j, room);
            if (j == found) {
                snprintf(f[j].name, sizeof f[j].name, "%s", t[k].name);
                f[j].ndim = t[k].ndim;
                memcpy(f[j].shape, t[k].shape, sizeof f[j].shape);
                f[j].count = 1;
                for (int d = 0; d < t[k].ndim; d++)
                    f[j].count *= t[k].shape[d];
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
        ari_pieces_free(t, n);
    }
    return found;
}

/* One tensor comes of it, of this many elements, each held `copies` times. */
static void expect_whole(const world *w, const char *name, size_t count, int copies)
{
    full f[1];
    cr_assert_eq(gather(w, f, 1), 1);
    cr_expect_str_eq(f[0].name, name);
    cr_assert_eq(f[0].count, count, "%zu", f[0].count);
    for (size_t i = 0; i < count; i++)
        cr_expect_eq(f[0].seen[i], copies, "%s: element %zu is held %d times", name, i, f[0].seen[i]);
}

#define TP(n) "{\"version\":1,\"mesh\":[[\"tp\"," #n "]],\"files\":\"r{tp}\",\"tensors\":[{\"match\":\"*\","

/* --- splits ------------------------------------------------------------------------------------------------------- */
Test(map, rows_and_columns_are_put_back)
{
    world rows = {.map = TP(2) "\"shard\":{\"tp\":0}}]}"}, columns = {.map = TP(2) "\"shard\":{\"tp\":-1}}]}"};
    hold(&rows, 0, "w", 1, 3, (int[]){0, 1, 2});
    hold(&rows, 1, "w", 1, 3, (int[]){3, 4, 5});
    expect_whole(&rows, "w", 6, 1);
    hold(&columns, 0, "w", 2, 1, (int[]){0, 2});
    hold(&columns, 1, "w", 2, 1, (int[]){1, 3});
    expect_whole(&columns, "w", 4, 1);
}

Test(map, uneven_shards_stand_where_the_others_end)
{
    world chunk = {.map = TP(4) "\"shard\":{\"tp\":0}}]}"}, other = {.map = TP(3) "\"shard\":{\"tp\":0}}]}"};
    HOLD(&chunk, 0, "w", 0, 1, 2);
    HOLD(&chunk, 1, "w", 3, 4, 5);
    HOLD(&chunk, 2, "w", 6);
    hold(&chunk, 3, "w", 0, 0, (int[]){0});
    expect_whole(&chunk, "w", 7, 1);
    HOLD(&other, 0, "w", 0);
    HOLD(&other, 1, "w", 1, 2, 3);
    HOLD(&other, 2, "w", 4, 5);
    expect_whole(&other, "w", 6, 1);
}

/* 7 rows over 4 ranks are 2, 2, 2, 1 as torch cuts them: without ranks 1 and 2, rank 3's only row is the last. */
Test(map, a_shape_places_shards_where_others_are_missing)
{
    full f[1];
    world w = {.map = TP(4) "\"shard\":{\"tp\":0},\"shape\":[7]}]}"};
    HOLD(&w, 0, "w", 0, 1);
    HOLD(&w, 3, "w", 6);
    cr_assert_eq(gather(&w, f, 1), 1);
    cr_expect_eq(f[0].count, 7);
    cr_expect(f[0].seen[0] == 1 && f[0].seen[1] == 1 && f[0].seen[2] == 0 && f[0].seen[5] == 0 && f[0].seen[6] == 1);
}

#define MESH22 "{\"version\":1,\"mesh\":[[\"dp\",2],[\"tp\",2]],\"files\":\"r{rank}\",\"tensors\":[{\"match\":\"*\","

Test(map, two_dimensions_of_the_mesh_divide_two_of_the_tensor)
{
    world w = {.map = MESH22 "\"shard\":{\"tp\":1,\"dp\":0}}]}"};
    hold(&w, 0, "w", 1, 2, (int[]){0, 1});
    hold(&w, 1, "w", 1, 2, (int[]){2, 3});
    hold(&w, 2, "w", 1, 2, (int[]){4, 5});
    hold(&w, 3, "w", 1, 2, (int[]){6, 7});
    expect_whole(&w, "w", 8, 1);
}

/* As an object the mesh's outermost dimension divides first; as a list, in the order of the list. */
Test(map, two_dimensions_of_the_mesh_divide_one_of_the_tensor_in_order)
{
    world mesh = {.map = MESH22 "\"shard\":{\"tp\":0,\"dp\":0}}]}"};
    world list = {.map = MESH22 "\"shard\":[[\"tp\",0],[\"dp\",0]]}]}"};
    HOLD(&mesh, 0, "w", 0, 1);
    HOLD(&mesh, 1, "w", 2);
    HOLD(&mesh, 2, "w", 3, 4);
    HOLD(&mesh, 3, "w", 5);
    expect_whole(&mesh, "w", 6, 1);
    HOLD(&list, 0, "w", 0, 1);
    HOLD(&list, 1, "w", 3, 4);
    HOLD(&list, 2, "w", 2);
    HOLD(&list, 3, "w", 5);
    expect_whole(&list, "w", 6, 1);
}

Test(map, zigzag_takes_a_piece_from_either_end)
{
    world w = {.map = TP(2) "\"shard\":{\"tp\":{\"dim\":0,\"zigzag\":true}}}]}"};
    HOLD(&w, 0, "x", 0, 1, 6, 7);
    HOLD(&w, 1, "x", 2, 3, 4, 5);
    expect_whole(&w, "x", 8, 1);
}

Test(map, what_no_rule_names_is_a_copy_on_each_rank)
{
    full f[1];
    world w = {.map = "{\"version\":1,\"mesh\":[[\"dp\",2],[\"tp\",2]],\"files\":\"r{rank}\"}"};
    for (int r = 0; r < 4; r++)
        HOLD(&w, r, "norm", 0, 1, 2);
    cr_assert_eq(gather(&w, f, 1), 1);
    cr_expect(f[0].count == 3 && f[0].seen[0] == 4 && !f[0].partial && f[0].terms == 1);
}

/* --- packed tensors ----------------------------------------------------------------------------------------------- */
Test(map, blocks_are_divided_each_by_itself)
{
    world w = {.map = TP(2) "\"shard\":{\"tp\":0},\"blocks\":[1,1]}]}"};
    HOLD(&w, 0, "w13", 0, 1, 4, 5);
    HOLD(&w, 1, "w13", 2, 3, 6, 7);
    expect_whole(&w, "w13", 8, 1);
}

Test(map, uneven_blocks_are_cut_as_torch_cuts_or_evenly)
{
    world chunk = {.map = TP(3) "\"shard\":{\"tp\":0},\"blocks\":[1,1]}]}"};
    world even = {.map = TP(3) "\"shard\":{\"tp\":0},\"blocks\":[4,4]}]}"};
    HOLD(&chunk, 0, "w", 0, 1, 4, 5);
    HOLD(&chunk, 1, "w", 2, 3, 6, 7);
    hold(&chunk, 2, "w", 0, 0, (int[]){0});
    expect_whole(&chunk, "w", 8, 1);
    HOLD(&even, 0, "w", 0, 1, 4, 5);
    HOLD(&even, 1, "w", 2, 6);
    HOLD(&even, 2, "w", 3, 7);
    expect_whole(&even, "w", 8, 1);
}

/* 4 query heads, 2 key heads, 2 value heads, of 2 rows each. */
Test(map, blocks_of_unequal_size_keep_their_heads_whole)
{
    world w = {.map = TP(2) "\"shard\":{\"tp\":0},\"blocks\":[4,2,2],\"unit\":2}]}"};
    HOLD(&w, 0, "qkv", 0, 1, 2, 3, 8, 9, 12, 13);
    HOLD(&w, 1, "qkv", 4, 5, 6, 7, 10, 11, 14, 15);
    expect_whole(&w, "qkv", 16, 1);
}

Test(map, heads_fewer_than_ranks_are_held_by_several)
{
    full f[1];
    world w = {.map = TP(4) "\"shard\":{\"tp\":0},\"blocks\":[4,2],\"unit\":1}]}"};
    HOLD(&w, 0, "qk", 0, 4);
    HOLD(&w, 1, "qk", 1, 4);
    HOLD(&w, 2, "qk", 2, 5);
    HOLD(&w, 3, "qk", 3, 5);
    cr_assert_eq(gather(&w, f, 1), 1);
    for (size_t i = 0; i < 6; i++)
        cr_expect_eq(f[0].seen[i], i < 4 ? 1 : 2);
    world alone = {.map = TP(4) "\"shard\":{\"tp\":0},\"blocks\":[2],\"unit\":2}]}"};
    HOLD(&alone, 0, "k", 0, 1);
    HOLD(&alone, 1, "k", 0, 1);
    HOLD(&alone, 2, "k", 2, 3);
    HOLD(&alone, 3, "k", 2, 3);
    expect_whole(&alone, "k", 4, 2);
}

static void expect_three(const world *w, size_t q, size_t k, size_t v)
{
    static const char *const names[] = {"l.q.weight", "l.k.weight", "l.v.weight"};
    const size_t counts[] = {q, k, v};
    full f[3];
    cr_assert_eq(gather(w, f, 3), 3);
    for (size_t i = 0; i < 3; i++) {
        cr_expect_str_eq(f[i].name, names[i]);
        cr_assert_eq(f[i].count, counts[i]);
        for (size_t e = 0; e < counts[i]; e++)
            cr_expect_eq(f[i].seen[e], 1, "%s %zu", names[i], e);
    }
}

#define INTO "\"into\":[\"*.q.weight\",\"*.k.weight\",\"*.v.weight\"]"
#define QKV(n) "{\"version\":1,\"mesh\":[[\"tp\"," #n "]],\"files\":\"r{tp}\",\"tensors\":[{\"match\":\"*.qkv.weight\","

Test(map, packed_tensors_are_taken_apart_under_names_of_their_own)
{
    world w = {.map = QKV(2) "\"shard\":{\"tp\":0},\"blocks\":[2,1,1]," INTO "}]}"};
    HOLD(&w, 0, "l.qkv.weight", 0, 1, 0, 0);
    HOLD(&w, 1, "l.qkv.weight", 2, 3, 1, 1);
    expect_three(&w, 4, 2, 2);
    world whole = {.map = "{\"version\":1,\"tensors\":[{\"match\":\"*.qkv.weight\",\"dim\":-1,\"blocks\":[1,1,1]," INTO
                          ",\"transpose\":true}]}"};
    hold(&whole, -1, "l.qkv.weight", 2, 3, (int[]){0, 0, 0, 1, 1, 1});
    expect_three(&whole, 2, 2, 2);
}

static void expect_packed(const char *name, const char *rule, bool refused)
{
    char text[400];
    snprintf(text, sizeof text, TP(2) "%s}]}", rule);
    world w = {.map = text};
    HOLD(&w, 0, name, 0, 1);
    HOLD(&w, 1, name, 2, 3);
    OWNED(ari_map_free) ari_map *m = parse(w.map);
    ari_piece *t = NULL;
    size_t n = 0;
    cr_expect_eq(ari_map_apply(m, 1, &w.part[1].entry, find, &w, &t, &n), refused ? AR_ERR_FORMAT : AR_OK, "%s, %s: %s",
                 name, rule, refused ? "" : ar_error_message());
    if (refused) {
        char begin[200];
        snprintf(begin, sizeof begin, "InvalidMapping: m.json: rule 1 ('*'): tensor '%s' of rank 1: looks like", name);
        cr_expect_eq(strncmp(ar_error_message(), begin, strlen(begin)), 0, "%s", ar_error_message());
        cr_expect_says("\"blocks\": [1, 1, 1], or \"blocks\": null");
    }
    ari_pieces_free(t, n);
}

/* As anyrank.capture refuses it: without the sizes one cut would give rank 0 all of q and a part of k. */
Test(map, a_packed_tensor_that_is_cut_without_its_sizes_is_refused)
{
    static const char *const cut = "\"shard\":{\"tp\":0}", *const worded = "\"dims\":\"h[tp]\"";
    static const char *const packed[] = {
        "h.0.attn.c_attn.weight", "h.0.attn.c_attn.bias:grad", "l.0.qkv_proj.weight", "Wqkv.weight@2",
        "attn.in_proj_weight",    "mlp.gate_up_proj:fwd",      "layers.0.qkv"};
    for (size_t i = 0; i < sizeof packed / sizeof *packed; i++) {
        expect_packed(packed[i], cut, true);
        expect_packed(packed[i], worded, true);
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

/* Megatron: for each of 2 key heads its 2 query heads, then key, then value; each head of 2 rows. */
Test(map, interleaved_heads_are_taken_apart)
{
    world two = {.map = QKV(2) "\"shard\":{\"tp\":0},\"blocks\":[2,1,1],\"groups\":2,\"unit\":2," INTO "}]}"};
    HOLD(&two, 0, "l.qkv.weight", 0, 1, 2, 3, 0, 1, 0, 1);
    HOLD(&two, 1, "l.qkv.weight", 4, 5, 6, 7, 2, 3, 2, 3);
    expect_three(&two, 8, 4, 4);
    world four = {.map = QKV(4) "\"shard\":{\"tp\":0},\"blocks\":[2,1,1],\"groups\":2," INTO "}]}"};
    HOLD(&four, 0, "l.qkv.weight", 0, 1, 2, 3); /* more ranks than groups: a rank ends within one */
    HOLD(&four, 1, "l.qkv.weight", 0, 1, 0, 1);
    HOLD(&four, 2, "l.qkv.weight", 4, 5, 6, 7);
    HOLD(&four, 3, "l.qkv.weight", 2, 3, 2, 3);
    expect_three(&four, 8, 4, 4);
}

Test(map, packed_tensors_that_are_cut_across_are_put_back)
{
    world w = {.map = QKV(2) "\"shard\":{\"tp\":0},\"per_block\":false,\"blocks\":[2,1,1]," INTO "}]}"};
    HOLD(&w, 0, "l.qkv.weight", 0, 1, 2, 3);
    HOLD(&w, 1, "l.qkv.weight", 0, 1, 0, 1);
    expect_three(&w, 4, 2, 2);
}

Test(map, a_stack_of_layers_is_taken_apart_by_index)
{
    full f[4];
    world w = {.map = "{\"version\":1,\"mesh\":[[\"pp\",2]],\"files\":\"s{pp}\",\"tensors\":[{\"match\":\"layers.*\","
                      "\"shard\":{\"pp\":0},\"unstack\":\"h.{index}.*\"}]}"};
    hold(&w, 0, "layers.w", 2, 2, (int[]){0, 1, 0, 1});
    hold(&w, 1, "layers.w", 2, 2, (int[]){0, 1, 0, 1});
    cr_assert_eq(gather(&w, f, 4), 4);
    for (size_t i = 0; i < 4; i++) {
        char name[16];
        snprintf(name, sizeof name, "h.%zu.w", i);
        cr_expect_str_eq(f[i].name, name);
        cr_expect(f[i].ndim == 1 && f[i].count == 2 && f[i].seen[0] == 1 && f[i].seen[1] == 1);
    }
}

/* Layers 0 and 3 on the first stage, 1 and 2 on the second. */
Test(map, a_stack_in_several_pieces_is_taken_apart_by_index)
{
    full f[4];
    world w = {.map = "{\"version\":1,\"mesh\":[[\"pp\",2]],\"files\":\"s{pp}\",\"tensors\":[{\"match\":\"*\","
                      "\"shard\":{\"pp\":{\"dim\":1,\"zigzag\":true}},\"dim\":1,\"unstack\":\"{index}\"}]}"};
    hold(&w, 0, "w", 2, 2, (int[]){0, 0, 1, 1}); /* [row][layer] */
    hold(&w, 1, "w", 2, 2, (int[]){0, 0, 1, 1});
    cr_assert_eq(gather(&w, f, 4), 4);
    static const char *const names[] = {"0", "3", "1", "2"};
    for (size_t i = 0; i < 4; i++) {
        cr_expect_str_eq(f[i].name, names[i]);
        cr_expect(f[i].count == 2 && f[i].seen[0] == 1 && f[i].seen[1] == 1);
    }
    OWNED(ari_map_free) ari_map *m = parse(w.map);
    ari_piece *t = NULL;
    size_t n = 0;
    cr_assert_ok(ari_map_apply(m, 0, &w.part[0].entry, find, &w, &t, &n));
    cr_expect(n == 2 && t[0].box->at == 0 && t[1].box->at == 1 && t[1].box->stride[0] == 2);
    ari_pieces_free(t, n);
}

/* --- shapes ------------------------------------------------------------------------------------------------------- */
Test(map, a_transposed_tensor_is_turned_round)
{
    world w = {.map = TP(2) "\"shard\":{\"tp\":1},\"transpose\":true}]}"};
    hold(&w, 0, "w", 2, 2, (int[]){0, 2, 1, 3}); /* full: 4 rows of 2, here as columns */
    hold(&w, 1, "w", 2, 2, (int[]){4, 6, 5, 7});
    expect_whole(&w, "w", 8, 1);
    world same = {.map = TP(2) "\"shard\":{\"tp\":1},\"permute\":[1,0]}]}"};
    memcpy(same.part, w.part, sizeof w.part);
    same.n = w.n;
    for (size_t i = 0; i < same.n; i++)
        same.part[i].entry.data = same.part[i].data;
    expect_whole(&same, "w", 8, 1);
}

Test(map, dimensions_are_permuted_as_the_list_says)
{
    static const int data[24] = {0};
    const ar_st_entry e = {
        .name = "x", .dtype = AR_I32, .ndim = 3, .shape = {2, 3, 4}, .count = 24, .bytes = 96, .data = data};
    OWNED(ari_map_free) ari_map *m = parse("{\"version\":1,\"tensors\":[{\"match\":\"x\",\"permute\":[2,0,1]}]}");
    ari_piece *t = NULL;
    size_t n = 0;
    cr_assert_ok(ari_map_apply(m, -1, &e, NULL, NULL, &t, &n));
    cr_assert_eq(n, 1);
    cr_expect(t->shape[0] == 4 && t->shape[1] == 2 && t->shape[2] == 3 && !t->partial);
    cr_expect(t->box->stride[0] == 1 && t->box->stride[1] == 12 && t->box->stride[2] == 4);
    ari_pieces_free(t, n);
}

Test(map, rows_beyond_the_shape_are_dropped)
{
    world w = {.map = TP(4) "\"shard\":{\"tp\":0},\"shape\":[3]}]}"};
    HOLD(&w, 0, "embed", 0);
    HOLD(&w, 1, "embed", 1);
    HOLD(&w, 2, "embed", 2);
    HOLD(&w, 3, "embed", -1);
    expect_whole(&w, "embed", 3, 1);
}

Test(map, a_scalar_is_one_box)
{
    static const int one = 7;
    const ar_st_entry e = {.name = "loss", .dtype = AR_I32, .ndim = 0, .count = 1, .bytes = 4, .data = &one};
    OWNED(ari_map_free) ari_map *m = parse("{\"version\":1}");
    ari_piece *t = NULL;
    size_t n = 0;
    cr_assert_ok(ari_map_apply(m, -1, &e, NULL, NULL, &t, &n));
    cr_expect(n == 1 && t->ndim == 0 && t->boxes == 1 && t->box->at == 0);
    ari_pieces_free(t, n);
}

Test(map, partial_sums_tell_which_summand_a_rank_has)
{
    full f[1];
    world w = {.map = MESH22 "\"partial\":\"tp\"}]}"};
    for (int r = 0; r < 4; r++)
        HOLD(&w, r, "y", 0, 1);
    cr_assert_eq(gather(&w, f, 1), 1);
    cr_expect(f[0].partial && f[0].terms == 2 && f[0].term_seen[0] == 2 && f[0].term_seen[1] == 2);
    world over_two = {.map = "{\"version\":1,\"mesh\":[[\"dp\",2],[\"tp\",3]],\"files\":\"r{rank}\",\"tensors\":["
                             "{\"match\":\"*\",\"partial\":[\"dp\",\"tp\"]}]}"};
    for (int r = 0; r < 6; r++)
        HOLD(&over_two, r, "y", 0, 1);
    cr_assert_eq(gather(&over_two, f, 1), 1);
    cr_expect(f[0].partial && f[0].terms == 6);
    for (size_t i = 0; i < 6; i++)
        cr_expect_eq(f[0].term_seen[i], 1, "term %zu is that of %d ranks", i, f[0].term_seen[i]);
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
    cr_assert_ok(ari_map_apply(m, rank, &e, NULL, NULL, &t, &n));
    cr_expect_str_eq(n == 0 ? "" : t->name, expected);
    ari_pieces_free(t, n);
}

Test(map, captures_go_into_the_new_name)
{
    expect_name("{\"match\":\"*.c_fc.*\",\"rename\":\"*.fc1.*\"}", 0, "h.0.c_fc.weight", "h.0.fc1.weight");
    expect_name("{\"match\":\"a.*.b.*\",\"rename\":\"{*2}/{*1}\"}", 0, "a.x.b.y.z", "y.z/x");
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

Test(map, layers_of_a_stage_are_renumbered)
{
    const char *rule = "{\"match\":\"layers.{n}.*\",\"rename\":\"model.layers.{n + pp * 4}.*\"}";
    expect_name(rule, 0, "layers.3.w", "model.layers.3.w");
    expect_name(rule, 2, "layers.3.w", "model.layers.7.w");
    expect_name(rule, 3, "layers.012.w", "model.layers.16.w");
    expect_name(rule, 3, "layers.x.w", "layers.x.w");
    expect_name("{\"match\":\"{c}.{n}\",\"rename\":\"{(c * 2 + pp) * (1+1) + n % 3 - rank / 3}\"}", 3, "5.8", "23");
}

Test(map, the_first_rule_that_matches_at_the_rank_applies)
{
    const char *rules =
        "{\"match\":\"*.inv_freq\",\"leave\":true},{\"match\":\"head\",\"at\":{\"pp\":1},\"leave\":true},"
        "{\"match\":\"head\",\"at\":{\"pp\":[0],\"tp\":[0,1]},\"rename\":\"lm_head\"},"
        "{\"match\":\"*\",\"rename\":\"rest.*\"}";
    expect_name(rules, 0, "rope.inv_freq", "");
    expect_name(rules, 0, "head", "lm_head");
    expect_name(rules, 2, "head", "");
    expect_name(rules, 2, "w", "rest.w");
    expect_name(rules, 1, "head", "lm_head"); /* the second of the list */
    expect_name("{\"match\":\"w\",\"at\":{\"tp\":[1]},\"rename\":\"v\"}", 2, "w", "w");
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
        cr_expect(m->has_files && m->depth == (i == 5));
    }
    OWNED(ari_map_free) ari_map *m = parse("{\"version\":1,\"mesh\":[[\"dp\",2],[\"tp\",3]],\"files\":\"{dp}-{tp}\"}");
    int rank = 0;
    cr_expect_eq(ari_map_rank_of(m, "0-3", &rank), AR_ERR_FORMAT);
    cr_expect_str_eq(ar_error_message(), "InvalidMapping: m.json: file '0-3' has tp 3, the mesh has 3 of it");
}

Test(map, zigzag_pieces_that_differ_are_refused)
{
    world w = {.map = TP(2) "\"shard\":{\"tp\":{\"dim\":0,\"zigzag\":true}}}]}"};
    HOLD(&w, 0, "x", 0, 1);
    HOLD(&w, 1, "x", 2, 3, 4, 5);
    OWNED(ari_map_free) ari_map *m = parse(w.map);
    ari_piece *t = NULL;
    size_t n = 0;
    cr_expect_refused(ari_map_apply(m, 0, &w.part[0].entry, find, &w, &t, &n), AR_ERR_FORMAT,
                      "zigzag pieces are all of one even extent");
}
