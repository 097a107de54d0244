/* SPDX-License-Identifier: Apache-2.0 */
/* What the dumps say of the run beside the tensor: heads, samples, positions, ids. */
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/explain_impl.h"
#include "verify/diagnose/order.h"
#include "verify/diagnose/roles.h"

/* A forward value of a tensor that has heads, or positions. */
static void learn(ari_facts *f, size_t *q, size_t *k, const ar_dump_tensor *t, const ari_order_key *key)
{
    const ari_role role = ari_module_of(t->name, key->stem).role;
    if (key->pass != 'f' || t->ndim < 3 || t->count == 0)
        return;
    if (t->ndim == 4 && role == ARI_PROBS)
        f->heads = t->shape[1];
    if (t->ndim != 3)
        return;
    if (f->seq == 0) {
        f->batch = t->shape[0];
        f->seq = t->shape[1];
    }
    if (role == ARI_Q || role == ARI_Q_HEADS || role == ARI_Q_ROPE)
        *q = t->shape[2];
    if (role == ARI_K || role == ARI_K_HEADS || role == ARI_K_ROPE)
        *k = t->shape[2];
}

/* Whether ranks hold different positions of a forward value. */
static bool shares_positions(const ar_dump_tensor *t, const ari_order_key *key)
{
    if (key->pass != 'f' || t->ndim != 3 || t->parts < 2 || t->part[0].boxes == 0)
        return false;
    const ar_dump_box *b = &t->part[0].box[0];
    return b->extent[1] < t->shape[1] && b->extent[2] == t->shape[2];
}

ari_facts ari_facts_of(const ari_explain_case *c)
{
    ari_facts f = {0};
    size_t q = 0, k = 0;
    const ar_dump *dumps[] = {c->reference, c->other};
    for (size_t d = 0; d < 2; d++) {
        for (size_t i = 0; dumps[d] && i < ar_dump_count(dumps[d]); i++) {
            const ar_dump_tensor *t = ar_dump_at(dumps[d], i);
            const ari_order_key key = ari_order_of(t->name, ar_dump_path(dumps[d]));
            if (d == 0)
                learn(&f, &q, &k, t, &key);
            else
                f.sp = f.sp || shares_positions(t, &key);
        }
    }
    if (f.heads > 0 && q > 0 && k > 0 && q % f.heads == 0 && k % (q / f.heads) == 0)
        f.kv_heads = k / (q / f.heads);
    f.heads = c->heads ? c->heads : f.heads;
    f.kv_heads = c->kv_heads ? c->kv_heads : f.kv_heads ? f.kv_heads : f.heads;
    return f;
}

const ar_dump_tensor *ari_find_ids(const ari_explain_case *c)
{
    static const char *const names[] = {"input_ids", "ids", "tokens", "input_ids:fwd"};
    const ar_dump *dumps[] = {c->reference, c->other};
    for (size_t k = 0; k < 8; k++) {
        const ar_dump_tensor *t = dumps[k % 2] ? ar_dump_find(dumps[k % 2], names[k / 2]) : NULL;
        if (t && t->count > 1 && t->ndim > 0)
            return t;
    }
    return NULL;
}
