/* SPDX-License-Identifier: Apache-2.0 */
/* What parts of a tensor are called: heads, q|k|v, shards. */
#include "verify/diagnose/explain_impl.h"
#include "verify/diagnose/order.h"
#include "verify/diagnose/roles.h"

static bool is_parameter(const ari_whole *w)
{
    return w->view.grid.d->pass != 'f' && w->view.grid.d->pass != 'b';
}

/* --- heads -------------------------------------------------------------------------------------------------------- */

/* The dimension along which a module's outputs lie (inputs: the other one), -1 where there is none. */
static int feature_dim(const ari_whole *w, bool inputs)
{
    const ari_difference *d = w->view.grid.d;
    if (!is_parameter(w))
        return d->ndim - 1;
    if (d->ndim == 2)
        return (int)ari_module_within(d->name).in_out ^ (int)inputs;
    return d->ndim == 1 && !inputs ? 0 : -1;
}

typedef enum head_kind { NO_HEADS, QUERY_HEADS, KEY_HEADS, PACKED_HEADS } head_kind;

/* Whose heads a module's outputs are, or of the attention's output layer its inputs. */
static head_kind heads_of(ari_role role)
{
    switch (role) {
    case ARI_Q:
    case ARI_Q_HEADS:
    case ARI_Q_ROPE:
    case ARI_CONTEXT:
    case ARI_OUT:
        return QUERY_HEADS;
    case ARI_K:
    case ARI_V:
    case ARI_K_HEADS:
    case ARI_V_HEADS:
    case ARI_K_ROPE:
        return KEY_HEADS;
    case ARI_QKV:
        return PACKED_HEADS;
    default:
        return NO_HEADS;
    }
}

static head_kind heads_along(const ari_whole *w, int dim)
{
    const ari_difference *d = w->view.grid.d;
    const ari_role role = ari_module_within(d->name).role;
    const bool parameter = is_parameter(w);
    if (dim != feature_dim(w, role == ARI_OUT))
        return NO_HEADS;
    if (role == ARI_OUT && (d->pass == 'f' || (parameter && d->ndim != 2)))
        return NO_HEADS;
    if (role == ARI_QKV && !parameter && d->pass != 'f')
        return NO_HEADS;
    /* "q_proj:bwd" is the gradient of its input, which has no heads. */
    if (!parameter && d->pass == 'b' && role != ARI_OUT && strstr(d->name, "_proj"))
        return NO_HEADS;
    return heads_of(role);
}

bool ari_has_heads(const ari_whole *w, int dim)
{
    return heads_along(w, dim) != NO_HEADS;
}

size_t ari_head_size(const ari_whole *w, int dim)
{
    const size_t n = w->view.grid.shape[dim], heads = w->facts.heads, kv = w->facts.kv_heads;
    const head_kind kind = heads_along(w, dim);
    const size_t all = kind == QUERY_HEADS ? heads : kind == KEY_HEADS ? kv : kind == PACKED_HEADS ? heads + 2 * kv : 0;
    return all > 0 && n % all == 0 && !w->inner ? n / all : 0;
}

int ari_packed(const ari_whole *w, int dim, const char *part[3], size_t size[3])
{
    const ari_difference *d = w->view.grid.d;
    const ari_role role = ari_module_within(d->name).role;
    const size_t n = w->view.grid.shape[dim], head = ari_head_size(w, dim);
    const bool qkv = role == ARI_QKV;
    if (w->inner || dim != feature_dim(w, false) || (!is_parameter(w) && d->pass != 'f'))
        return 0;
    if (qkv && head > 0) {
        size[0] = head * w->facts.heads;
        size[1] = size[2] = head * w->facts.kv_heads;
    } else if (qkv && n % 3 == 0) {
        size[0] = size[1] = size[2] = n / 3;
    } else if (role == ARI_GATE_UP && n % 2 == 0) {
        part[0] = "gate", part[1] = "up";
        size[0] = size[1] = n / 2;
        return 2;
    } else {
        return 0;
    }
    part[0] = "q", part[1] = "k", part[2] = "v";
    return 3;
}

/* --- parts of a dimension ----------------------------------------------------------------------------------------- */

void ari_hull(const ari_whole *w, int dim, size_t *from, size_t *to)
{
    const size_t *hits = w->view.survey.hits[dim], n = w->view.grid.shape[dim];
    *from = 0;
    *to = n;
    while (*from < n && hits[*from] == 0)
        (*from)++;
    while (*to > *from && hits[*to - 1] == 0)
        (*to)--;
}

size_t ari_block_of(size_t n, size_t from, size_t to, size_t *which)
{
    const size_t size = to - from;
    if (size == 0 || size == n || n % size != 0 || from % size != 0)
        return 0;
    *which = from / size;
    return n / size;
}

const char *ari_axis_name(const ari_whole *w, int dim, bool plural)
{
    return ari_dim_name(&w->view.grid, dim, plural);
}

static bool say_packed(ari_text *t, const ari_whole *w, int dim, size_t *from, size_t *to, size_t *n)
{
    const char *part[3];
    size_t size[3], start = 0;
    const int parts = ari_packed(w, dim, part, size);
    for (int i = 0; i < parts; start += size[i++]) {
        if (*from < start || *to > start + size[i])
            continue;
        ari_say(t, "; that is %s%s of %s", *to - *from == size[i] ? "" : "within ", part[i],
                parts == 3 ? "q|k|v" : "gate|up");
        *from -= start;
        *to -= start;
        *n = size[i];
        return true;
    }
    return false;
}

static void say_block(ari_text *t, const ari_whole *w, int dim)
{
    size_t from, to, which = 0, n = w->view.grid.shape[dim];
    ari_hull(w, dim, &from, &to);
    if (n < 2 || to - from == n || to == from || w->view.survey.hit[dim] * 10 < (to - from) * 9)
        return;
    const char *part[3];
    size_t size[3];
    const bool is_packed = ari_packed(w, dim, part, size) > 0, packed = say_packed(t, w, dim, &from, &to, &n);
    const size_t blocks = ari_block_of(n, from, to, &which), head = ari_head_size(w, dim);
    if (head > 0 && (packed || !is_packed) && from % head == 0 && to % head == 0 && to - from < n) {
        ari_say(t, to - from == head ? "; head %zu" : "; heads %zu", from / head);
        if (to - from > head)
            ari_say(t, "..%zu", to / head - 1);
        ari_say(t, " of %zu", n / head);
    }
    if (blocks > 1 && blocks <= 64 && (to - from > 1 || blocks <= 8))
        ari_say(t, "; shard %zu of %zu%s%s (from 0)", which, blocks, packed ? "" : " of the ",
                packed ? "" : ari_axis_name(w, dim, true));
}

void ari_say_part(ari_text *t, const ari_whole *w)
{
    for (int dim = 0; dim < w->view.grid.nd; dim++)
        say_block(t, w, dim);
}

void ari_say_exactness(ari_text *t, const ari_whole *w, double worst)
{
    if (worst == 0.0)
        ari_say(t, "bit for bit");
    else
        ari_say(t, "to within %.1e of the largest value", worst / w->max_ref);
}

char ari_pass_of(const ari_whole *w, const char *name)
{
    return ari_order_of(name, w->path).pass;
}
