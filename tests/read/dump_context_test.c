/* SPDX-License-Identifier: Apache-2.0 */
/* Sequences whose positions lie over context-parallel ranks and, between the regions of tensor parallelism, over the
 * tensor-parallel ranks too: what a mapping says of them puts the positions where the ranks' own layout has them. */
#include "anyrank/dump.h"
#include "anyrank/parallel.h"
#include "read/folder.h"
#include "ref/placement/parallel_private.h"

TestSuite(dump_context, .init = folder_begin, .fini = folder_end);

enum { SAMPLES = 2, SEQ = 16, FEATURES = 4, ALL = SAMPLES * SEQ * FEATURES };

typedef struct context_case {
    ar_parallel layout;
    const char *rule; /* of the mapping */
    bool stream;      /* the positions lie over tp too, else the features */
} context_case;

#define ZIGZAG(axis) "[\"" axis "\",{\"dim\":1,\"zigzag\":true}]"

static const context_case cases[] = {
    {{.cp = 4}, "\"shard\":{\"cp\":1}", false},
    {{.cp = 4, .zigzag = true}, "\"shard\":{\"cp\":{\"dim\":1,\"zigzag\":true}}", false},
    {{.cp = 2, .tp = 2}, "\"shard\":{\"cp\":1,\"tp\":2}", false},
    {{.cp = 2, .zigzag = true, .tp = 2}, "\"shard\":[" ZIGZAG("cp") ",[\"tp\",2]]", false},
    {{.cp = 2, .tp = 4}, "\"shard\":[[\"cp\",1],[\"tp\",1]]", true},
    {{.cp = 2, .zigzag = true, .tp = 2}, "\"shard\":[" ZIGZAG("cp") ",[\"tp\",1]]", true},
    {{.cp = 4, .zigzag = true, .tp = 2}, "\"shard\":[" ZIGZAG("cp") ",[\"tp\",1]]", true},
    {{.cp = 2, .zigzag = true, .tp = 4}, "\"shard\":[" ZIGZAG("cp") ",[\"tp\",1]]", true},
    {{.cp = 4, .cp_inner = 2, .tp = 2}, "\"shard\":[[\"ring\",1],[\"inner\",1],[\"tp\",1]]", true},
    {{.cp = 4, .cp_inner = 2, .zigzag = true}, "\"shard\":[" ZIGZAG("ring") ",[\"inner\",1]]", false},
    {{.cp = 4, .cp_inner = 2, .zigzag = true, .tp = 2},
     "\"shard\":[" ZIGZAG("ring") ",[\"inner\",1],[\"tp\",2]]",
     false},
};

static int at_least_one(int n)
{
    return n > 0 ? n : 1;
}

/* What context-parallel rank c and tensor-parallel rank t hold of the numbers 0, 1, ... */
static size_t part_of(float *out, size_t shape[3], const context_case *c, int cp, int tp)
{
    const size_t parts = (size_t)at_least_one(c->layout.tp), features = c->stream ? FEATURES : FEATURES / parts;
    const size_t first = c->stream ? 0 : (size_t)tp * features;
    ar_positions own = ari_parallel_positions(&c->layout, SEQ, cp);
    size_t n = 0;
    if (c->stream)
        own = ari_positions_part(&own, (size_t)tp, parts);
    for (size_t b = 0; b < SAMPLES; b++) {
        for (size_t i = 0; i < ari_positions_count(&own); i++) {
            for (size_t f = 0; f < features; f++)
                out[n++] = (float)((b * SEQ + ari_positions_at(&own, i)) * FEATURES + first + f);
        }
    }
    shape[0] = SAMPLES;
    shape[1] = ari_positions_count(&own);
    shape[2] = features;
    return n;
}

static void put_ranks(const context_case *c)
{
    const int tp = at_least_one(c->layout.tp);
    for (int r = 0; r < at_least_one(c->layout.cp) * tp; r++) {
        float local[ALL];
        char file[32];
        size_t shape[3];
        cr_assert_gt(part_of(local, shape, c, r / tp, r % tp), 0);
        snprintf(file, sizeof file, "rank-%05d.safetensors", r);
        put_tensor(file, "x", 3, shape, local, NULL, NULL);
    }
}

static void put_mapping(const context_case *c)
{
    const int tp = at_least_one(c->layout.tp), inner = at_least_one(c->layout.cp_inner), cp = c->layout.cp;
    char text[512], axes[64];
    if (inner > 1)
        snprintf(axes, sizeof axes, "[\"ring\",%d],[\"inner\",%d]", cp / inner, inner);
    else
        snprintf(axes, sizeof axes, "[\"cp\",%d]", cp);
    snprintf(text, sizeof text,
             "{\"version\":1,\"mesh\":[[\"dp\",1],%s,[\"tp\",%d]],\"files\":\"rank-{rank}.safetensors\","
             "\"tensors\":[{\"match\":\"x\",%s}]}",
             axes, tp, c->rule);
    put_text("map.json", text);
}

Test(dump_context, mappings_put_positions_where_the_layout_has_them)
{
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        float all[ALL];
        ar_dump *d = NULL;
        put_ranks(&cases[k]);
        put_mapping(&cases[k]);
        const char *map = in_folder("map.json");
        cr_assert_eq(ar_dump_open(&d, folder, &(ar_dump_options){.map = map}), AR_OK, "case %zu: %s", k,
                     ar_error_message());
        const ar_dump_tensor *x = ar_dump_find(d, "x");
        cr_assert(x && x->count == ALL && x->shape[1] == SEQ && x->shape[2] == FEATURES, "case %zu", k);
        cr_assert_ok(ar_dump_read_f32(x, 0, ALL, all));
        for (size_t i = 0; i < ALL; i++)
            cr_assert_eq(all[i], (float)i, "case %zu, %s: element %zu is %g", k, cases[k].rule, i, (double)all[i]);
        ar_dump_close(d);
        folder_end();
        folder_begin();
    }
}
