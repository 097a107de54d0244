/* SPDX-License-Identifier: Apache-2.0 */
/* Redistribution against its definition: whatever the placements, the whole tensor is the same before and after, forward
 * and backward, and <A x, y> = <x, A^T y>. Values are small integers, so that every sum is exact in every dtype. */
#include "anyrank/context.h"
#include "anyrank/redistribute.h"

#include "ref/placement/placement_private.h"
#include "support/rank_run.h"
#include "support/together.h"
#include "tests/placement/plain_placement.h"

typedef struct move_case {
    ar_mesh mesh;
    ar_redistribution r;
    ar_dtype dtype;
    long part[2][PLAIN_RANKS][PLAIN_MOST]; /* what came: forward, backward */
    size_t count[2][PLAIN_RANKS];
    uint64_t bytes[PLAIN_RANKS]; /* of the forward pass */
} move_case;
typedef struct move_list {
    move_case *item;
    size_t n, room;
} move_list;

/* The whole value, and the whole gradient. Never 0, and no two next to each other alike. */
static void fill_whole(long whole[PLAIN_MOST], bool gradient)
{
    for (int e = 0; e < PLAIN_MOST; e++)
        whole[e] = gradient ? 1 + (e * 11 + 5) % 19 : 1 + (e * 7) % 23;
}

static void encode(void *to, ar_dtype t, const long *from, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const float f = (float)from[i];
        uint32_t bits;
        memcpy(&bits, &f, sizeof bits);
        if (t == AR_F32)
            ((uint32_t *)to)[i] = bits;
        else if (t == AR_BF16)
            ((uint16_t *)to)[i] = (uint16_t)(bits >> 16);
        else if (t == AR_I32)
            ((int32_t *)to)[i] = (int32_t)from[i];
        else if (t == AR_I64)
            ((int64_t *)to)[i] = from[i];
        else
            ((int8_t *)to)[i] = (int8_t)from[i];
    }
}

static void decode(long *to, ar_dtype t, const void *from, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = t == AR_F32 ? ((const uint32_t *)from)[i] : 0;
        bits = t == AR_BF16 ? (uint32_t)((const uint16_t *)from)[i] << 16 : bits;
        float f;
        memcpy(&f, &bits, sizeof f);
        to[i] = t == AR_I32   ? ((const int32_t *)from)[i]
                : t == AR_I64 ? ((const int64_t *)from)[i]
                : t == AR_I8  ? ((const int8_t *)from)[i]
                              : (long)f;
    }
}

static uint64_t moved(const ar_mesh_groups *g)
{
    uint64_t sum = 0, read = 0, written = 0;
    for (int d = 0; d < g->mesh.ndim; d++) {
        ar_comm_counted(g->comm[d], &read, &written);
        sum += read + written;
    }
    return sum;
}

/* By a tensor that knows where it is. */
static ar_status move_placed(ar_ctx *ctx, const ar_mesh_groups *g, ar_tensor *y, const ar_tensor *x,
                             const ar_redistribution *r)
{
    ar_placed p = {.local = *x, .groups = g};
    memcpy(p.shape, r->shape, sizeof p.shape);
    memcpy(p.placement, r->src, sizeof p.placement);
    AR_TRY(ar_placed_redistribute(ctx, &p, &p, r->dst, "moved"));
    *y = p.local;
    return memcmp(p.placement, r->dst, (size_t)g->mesh.ndim * sizeof *p.placement) == 0
               ? AR_OK
               : ar_error_set(AR_ERR_INTERNAL, "it does not know where it is");
}

static ar_status pass(ar_ctx *ctx, const ar_mesh_groups *g, move_case *c, const ar_redistribution *r, int back)
{
    const int rank = ar_comm_rank(ar_ctx_tp(ctx));
    long whole[PLAIN_MOST], part[PLAIN_MOST] = {0};
    uint64_t raw[PLAIN_MOST];
    size_t extent[AR_MAX_DIMS], before, after, peak;
    ar_tensor x, y;
    fill_whole(whole, back);
    encode(raw, c->dtype, part, plain_part(part, &c->mesh, rank, r->src, r->ndim, r->shape, whole));
    AR_TRY(ar_placements_region(NULL, extent, &g->mesh, g->coords, r->src, r->ndim, r->shape, true));
    AR_TRY(ar_ctx_tensor(ctx, &x, c->dtype, r->ndim, extent));
    AR_TRY(ar_ctx_upload(ctx, &x, raw));
    ar_ctx_memory(ctx, &before, &peak);
    AR_TRY(back ? move_placed(ctx, g, &y, &x, r) : ar_redistribute(ctx, g, &y, &x, r, "moved"));
    ar_ctx_memory(ctx, &after, &peak);
    if (after != before + ar_tensor_count(&y) * ar_dtype_bytes(y.dtype))
        return ar_error_set(AR_ERR_INTERNAL, "%zu bytes became %zu: x stays, and y alone comes", before, after);
    AR_TRY(ar_placements_region(NULL, extent, &g->mesh, g->coords, r->dst, r->ndim, r->shape, true));
    for (int d = 0; d < r->ndim; d++) {
        if (y.ndim != r->ndim || y.shape[d] != extent[d])
            return ar_error_set(AR_ERR_SHAPE, "the part has another shape than its placement says");
    }
    AR_TRY(ar_ctx_download(ctx, raw, &y));
    c->count[back][rank] = ar_tensor_count(&y);
    decode(c->part[back][rank], y.dtype, raw, c->count[back][rank]);
    return AR_OK;
}

static bool linear(const move_case *c)
{
    return !plain_lists(&c->mesh, c->r.src, AR_PARTIAL_MAX) && !plain_lists(&c->mesh, c->r.dst, AR_PARTIAL_MAX);
}

static ar_status all_cases(ar_ctx *ctx, void *user)
{
    const move_list *list = user;
    const int rank = ar_comm_rank(ar_ctx_tp(ctx));
    SCOPED(ar_mesh_groups_fini) ar_mesh_groups g;
    ar_status st = ar_mesh_groups_init(&g, &list->item[0].mesh, ar_ctx_tp(ctx));
    for (size_t i = 0; i < list->n && st == AR_OK; i++) {
        move_case *c = &list->item[i];
        ar_redistribution back;
        const uint64_t before = moved(&g);
        st = pass(ctx, &g, c, &c->r, 0);
        c->bytes[rank] = moved(&g) - before;
        if (st == AR_OK && linear(c))
            st = ar_redistribution_backward(&back, &g.mesh, &c->r);
        if (st == AR_OK && linear(c))
            st = pass(ctx, &g, c, &back, 1);
        ar_ctx_end_step(ctx);
    }
    return st;
}

static const char *described(const move_case *c)
{
    static char text[300];
    char from[96], to[96];
    snprintf(text, sizeof text, "%s [%zu, %zu, %zu] on %d x %d x %d ranks: %s to %s", ar_dtype_name(c->dtype),
             c->r.shape[0], c->r.shape[1], c->r.shape[2], c->mesh.dim[0].size, c->mesh.dim[1].size, c->mesh.dim[2].size,
             ari_placements_text(from, sizeof from, c->r.src, c->mesh.ndim),
             ari_placements_text(to, sizeof to, c->r.dst, c->mesh.ndim));
    return text;
}

static void check_case(move_case *c)
{
    static long x[PLAIN_RANKS][PLAIN_MOST], y[PLAIN_RANKS][PLAIN_MOST];
    long whole[2][PLAIN_MOST];
    ar_placement gradient_of_to[AR_MESH_DIMS], gradient_of_from[AR_MESH_DIMS];
    size_t nx[PLAIN_RANKS];
    fill_whole(whole[0], false);
    fill_whole(whole[1], true);
    cr_assert(plain_is_whole(&c->mesh, c->r.dst, c->r.ndim, c->r.shape, whole[0], c->part[0], c->count[0]),
              "%s: the tensor has changed", described(c));
    if (!linear(c))
        return;
    for (int d = 0; d < c->mesh.ndim; d++) {
        cr_assert_ok(ari_placement_gradient(&gradient_of_to[d], c->r.dst[d]));
        cr_assert_ok(ari_placement_gradient(&gradient_of_from[d], c->r.src[d]));
    }
    cr_assert(plain_is_whole(&c->mesh, gradient_of_from, c->r.ndim, c->r.shape, whole[1], c->part[1], c->count[1]),
              "%s: the gradient has changed", described(c));
    for (int r = 0; r < plain_world(&c->mesh); r++) {
        nx[r] = plain_part(x[r], &c->mesh, r, c->r.src, c->r.ndim, c->r.shape, whole[0]);
        const size_t ny = plain_part(y[r], &c->mesh, r, gradient_of_to, c->r.ndim, c->r.shape, whole[1]);
        cr_assert(ny == c->count[0][r] && nx[r] == c->count[1][r], "%s", described(c));
    }
    const long left = plain_inner(&c->mesh, c->r.dst, c->part[0], y, c->count[0]);
    const long right = plain_inner(&c->mesh, c->r.src, x, c->part[1], nx);
    cr_assert_eq(left, right, "%s: <Ax, y> = %ld, <x, A'y> = %ld", described(c), left, right);
    cr_assert(left != 0 || plain_count(c->r.ndim, c->r.shape) == 0, "%s: these values show nothing", described(c));
}

static void run_list(const move_list *list, ar_numerics numerics)
{
    const ar_run o = {.parallel.tp = plain_world(&list->item[0].mesh), .numerics = numerics};
    cr_assert_ok(rank_run(&o, all_cases, (void *)(uintptr_t)list));
    for (size_t i = 0; i < list->n; i++)
        check_case(&list->item[i]);
}

enum { KINDS = 7 };
static const ar_placement kinds[KINDS] = {{AR_REPLICATE, 0}, {AR_INVARIANT, 0},   {AR_SHARD, 0},      {AR_SHARD, 1},
                                          {AR_SHARD, -1},    {AR_PARTIAL_SUM, 0}, {AR_PARTIAL_MAX, 0}};

static bool mixes(const ar_mesh *m, const ar_placement *p)
{
    return plain_lists(m, p, AR_PARTIAL_SUM) && plain_lists(m, p, AR_PARTIAL_MAX);
}

static void add_case(move_list *list, const ar_mesh *mesh, const ar_redistribution *r, ar_dtype dtype)
{
    if (mixes(mesh, r->src) || mixes(mesh, r->dst))
        return;
    if (list->n == list->room) {
        list->room = list->room ? 2 * list->room : 64;
        list->item = realloc(list->item, list->room * sizeof *list->item);
        cr_assert_not_null(list->item);
    }
    list->item[list->n++] = (move_case){.mesh = *mesh, .r = *r, .dtype = dtype};
}

static ar_redistribution pair(const size_t *shape, size_t from, size_t to)
{
    ar_redistribution r = {.ndim = 3, .src = {kinds[from]}, .dst = {kinds[to]}};
    memcpy(r.shape, shape, 3 * sizeof *shape);
    return r;
}

/* Whether neither the value nor its gradient is ever reduced: any dtype of whole bytes then. */
static bool only_moves(ar_placement p)
{
    return p.kind == AR_SHARD || p.kind == AR_INVARIANT;
}

/* All pairs along one dimension; every pair in fp32, and in one of the other dtypes in turn. */
static void add_pairs(move_list *list, int ranks, bool native)
{
    static const size_t shapes[][3] = {{3, 5, 2}, {2, 8, 3}, {8, 1, 8}, {0, 4, 1}};
    static const ar_dtype others[2][3] = {{AR_I32, AR_I64, AR_I8}, {AR_BF16, AR_I32, AR_I8}};
    const ar_mesh mesh = {1, {{"tp", ranks}}};
    for (size_t s = 0; s < 4; s++) {
        for (size_t i = 0; i < KINDS * KINDS; i++) {
            const ar_redistribution r = pair(shapes[s], i / KINDS, i % KINDS);
            const bool reduced = !only_moves(r.src[0]) || !only_moves(r.dst[0]);
            const ar_dtype other = others[native][(i + s + (size_t)ranks) % 3];
            add_case(list, &mesh, &r, AR_F32);
            add_case(list, &mesh, &r, other == AR_I8 && reduced ? AR_I32 : other);
        }
    }
}

/* --- bytes: the table of parallelism.md ----------------------------------------------------------------------- */

static size_t staying(const move_case *c)
{
    size_t n = 0;
    for (size_t e = 0; e < plain_count(3, c->r.shape); e++) {
        for (int r = 0; r < c->mesh.dim[0].size; r++)
            n += plain_has(&c->mesh, &r, c->r.src, 3, c->r.shape, e) &&
                 plain_has(&c->mesh, &r, c->r.dst, 3, c->r.shape, e);
    }
    return n;
}

static uint64_t expected_bytes(const move_case *c, bool native)
{
    const ar_placement_kind from = c->r.src[0].kind, to = c->r.dst[0].kind;
    const size_t n = plain_count(3, c->r.shape), width = ar_dtype_bytes(c->dtype);
    const size_t links = (size_t)c->mesh.dim[0].size - 1;
    const bool accumulated = from == AR_PARTIAL_SUM && c->dtype == AR_F32 && !native;
    if (from == AR_SHARD && to == AR_SHARD)
        return (n - staying(c)) * width;
    if (from == AR_SHARD)
        return to == AR_PARTIAL_SUM ? 0 : links * n * width;
    if (from < AR_PARTIAL_SUM || from == to)
        return 0;
    if (to == AR_SHARD)
        return links * n * (accumulated ? 17 : width);
    return 2 * links * n * (accumulated ? 17 : width);
}

static void check_pairs(int ranks, bool native)
{
    move_list list = {NULL, 0, 0};
    add_pairs(&list, ranks, native);
    run_list(&list, native ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT);
    for (size_t i = 0; i < list.n; i++) {
        uint64_t bytes = 0;
        for (int r = 0; r < ranks; r++)
            bytes += list.item[i].bytes[r];
        const uint64_t want = expected_bytes(&list.item[i], native);
        cr_assert_eq(bytes, want, "%s: %llu bytes moved, expected %llu", described(&list.item[i]),
                     (unsigned long long)bytes, (unsigned long long)want);
    }
    free(list.item);
}

CLAIM(every_pair_on_1_to_8_ranks_keeps_the_tensor_and_moves_the_tables_bytes)
{
    for (int ranks = 1; ranks <= 8; ranks++)
        check_pairs(ranks, false);
}

CLAIM(every_pair_in_native_numerics_keeps_the_tensor_and_moves_the_tables_bytes)
{
    for (int ranks = 1; ranks <= 8; ranks += ranks == 4 ? 4 : 1)
        check_pairs(ranks, true);
}

/* --- several dimensions of the mesh ------------------------------------------------------------------------------- */

CLAIM(every_pair_of_lists_on_two_axes_keeps_the_tensor)
{
    static const ar_mesh meshes[] = {{2, {{"dp", 2}, {"tp", 3}}}, {2, {{"dp", 3}, {"tp", 2}}}};
    static const size_t shapes[][3] = {{5, 3, 2}, {4, 7, 1}};
    for (size_t m = 0; m < 2; m++) {
        move_list list = {NULL, 0, 0};
        for (size_t i = 0; i < KINDS * KINDS * KINDS * KINDS; i++) {
            ar_redistribution r = pair(shapes[m], i % KINDS, i / KINDS % KINDS);
            r.src[1] = kinds[i / KINDS / KINDS % KINDS];
            r.dst[1] = kinds[i / KINDS / KINDS / KINDS];
            add_case(&list, &meshes[m], &r, i % 5 == 0 ? AR_I64 : AR_F32);
        }
        run_list(&list, m == 0 ? AR_NUMERICS_EXACT : AR_NUMERICS_NATIVE);
        free(list.item);
    }
}

CLAIM(drawn_lists_on_three_axes_keep_the_tensor)
{
    const ar_mesh mesh = {3, {{"a", 2}, {"b", 2}, {"c", 2}}};
    move_list list = {NULL, 0, 0};
    uint64_t state = 20;
    for (int i = 0; i < 600; i++) {
        ar_redistribution r = pair((const size_t[]){5, 4, 3}, 0, 0);
        for (int d = 0; d < 3; d++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            r.src[d] = kinds[(state >> 33) % KINDS];
            r.dst[d] = kinds[(state >> 43) % KINDS];
        }
        add_case(&list, &mesh, &r, AR_F32);
    }
    cr_assert_gt(list.n, 300);
    run_list(&list, AR_NUMERICS_EXACT);
    free(list.item);
}

CLAIM(steps_come_in_the_documented_order)
{
    static const char *const moves[AR_MOVES] = {[AR_MOVE_SLICE] = "slice",
                                                [AR_MOVE_REDUCE_SCATTER] = "reduce-scatter",
                                                [AR_MOVE_ALL_REDUCE] = "all-reduce",
                                                [AR_MOVE_ALL_TO_ALL] = "all-to-all",
                                                [AR_MOVE_ALL_GATHER] = "all-gather",
                                                [AR_MOVE_FIRST] = "first",
                                                [AR_MOVE_PAD] = "pad"};
    static const struct {
        const char *from, *to, *steps;
    } cases[] = {
        {"[R, R]", "[R, I]", ""},
        {"[S(0), R]", "[R, S(1)]", "slice tp, all-gather dp"},
        {"[S(0), S(0)]", "[R, R]", "all-gather tp, all-gather dp"},
        {"[S(0), S(0)]", "[R, S(0)]", "all-gather tp, all-gather dp, slice tp"},
        {"[R, S(0)]", "[S(0), S(0)]", "all-gather tp, slice dp, slice tp"},
        {"[P(sum), P(sum)]", "[R, S(1)]", "reduce-scatter tp, all-reduce dp"},
        {"[P(sum), S(1)]", "[S(-1), R]", "all-gather tp, reduce-scatter dp"},
        {"[S(0), S(1)]", "[S(1), S(0)]", "all-gather tp, all-to-all dp, slice tp"},
        {"[P(max), R]", "[P(sum), R]", "all-reduce dp, first dp"},
        {"[S(0), R]", "[P(sum), P(sum)]", "first tp, pad dp"},
        {"[S(1), R]", "[P(max), R]", "all-gather dp"},
    };
    const ar_mesh mesh = {2, {{"dp", 2}, {"tp", 3}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ar_redistribution r = {.ndim = 2, .shape = {6, 6}};
        ar_redistribution_step step[AR_REDISTRIBUTION_STEPS];
        size_t n = 0;
        char text[200] = "";
        cr_assert_ok(ar_placements_parse(r.src, 2, cases[i].from));
        cr_assert_ok(ar_placements_parse(r.dst, 2, cases[i].to));
        cr_assert_ok(ari_redistribution_steps(step, &n, &mesh, &r));
        for (size_t k = 0; k < n; k++)
            snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s %s", k ? ", " : "", moves[step[k].move],
                     mesh.dim[step[k].dim].name);
        cr_assert_str_eq(text, cases[i].steps, "%s to %s", cases[i].from, cases[i].to);
    }
}

EVERY_CLAIM(redistribute)
