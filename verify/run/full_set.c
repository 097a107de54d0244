/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/run/full_set.h"
#include "anyrank/queue.h"
#include "anyrank/train.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/context/context.h"
#include "ref/core/atomic_file.h"
#include "ref/core/queue_impl.h"
#include "ref/core/size.h"
#include "ref/io/hash.h"
#include "ref/layers/parts.h"
#include "ref/numerics/bits.h"
#include "verify/run/process_run.h"

/* --- one tensor --------------------------------------------------------------------------------------------------- */
ar_status ari_full_tensor_init(ari_full_tensor *t, const char *name, int ndim, const size_t *shape)
{
    size_t count = 1;
    ARI_OWNED float *values = NULL;
    void *writer = NULL; /* zero bytes: no rank has written the element */
    if (strlen(name) >= sizeof t->name)
        return ar_error_set(AR_ERR_ARG, "a tensor's name has at most %zu bytes: '%s'", sizeof t->name - 1,
                            ARI_SHOW(name));
    for (int d = 0; d < ndim; d++)
        AR_TRY(ari_mul_size(&count, count, shape[d]));
    AR_TRY(ARI_ALLOC_ZERO(&values, count, name));
    AR_TRY(ari_alloc_zero(&writer, count, sizeof *t->writer, name));
    *t = (ari_full_tensor){.ndim = ndim, .count = count, .writer = writer};
    ARI_GIVE(&t->values, values);
    snprintf(t->name, sizeof t->name, "%s", name);
    for (int d = 0; d < ndim; d++)
        t->shape[d] = shape[d];
    return AR_OK;
}

void ari_full_tensor_fini(ari_full_tensor *t)
{
    free(t->values);
    free(t->writer);
    *t = (ari_full_tensor){.count = 0};
}

static ar_status check_count(const ari_full_tensor *t, const ar_layout *o)
{
    const size_t count = ari_layout_count(o);
    if (count == t->count)
        return AR_OK;
    return ar_error_set(AR_ERR_INTERNAL, "a rank reports %s of %zu elements, expected %zu", t->name, count, t->count);
}

struct write {
    ari_full_tensor *t;
    int rank;
};

/* Records the first clash: two ranks that both write an element are an error, and not a race. */
static void note_clash(ari_full_tensor *t, size_t index, int earlier, int rank)
{
    bool expected = false;
    if (!atomic_compare_exchange_strong(&t->clash, &expected, true))
        return;
    t->clash_at = index;
    t->clash_ranks[0] = earlier;
    t->clash_ranks[1] = rank;
}

static void write_run(void *user, const ari_box_run *r)
{
    const struct write *w = user;
    ari_full_tensor *t = w->t;
    for (size_t i = 0; i < r->count; i++) {
        const size_t index = r->full + i;
        unsigned short nobody = 0;
        if (index >= t->count)
            note_clash(t, index, w->rank, w->rank);
        else if (!atomic_compare_exchange_strong_explicit(&t->writer[index], &nobody, (unsigned short)(w->rank + 1),
                                                          memory_order_relaxed, memory_order_relaxed))
            note_clash(t, index, nobody - 1, w->rank);
        else
            t->values[index] = r->local[(ptrdiff_t)i * r->stride];
    }
}

ar_status ari_full_tensor_write(ari_full_tensor *t, int rank, const ar_tensor *local, const ar_layout *layout)
{
    struct write w = {t, rank};
    AR_TRY(check_count(t, layout));
    ari_for_each_run(local, layout, write_run, &w);
    return AR_OK;
}

struct comparison {
    const ari_full_tensor *t;
    size_t index; /* index of the first differing element; SIZE_MAX: none */
    float local_value;
};

static void compare_run(void *user, const ari_box_run *r)
{
    struct comparison *c = user;
    for (size_t i = 0; i < r->count && c->index == SIZE_MAX; i++) {
        const float local_value = r->local[(ptrdiff_t)i * r->stride];
        if (r->full + i < c->t->count && ari_bits32(c->t->values[r->full + i]) != ari_bits32(local_value)) {
            c->index = r->full + i;
            c->local_value = local_value;
        }
    }
}

/* Compares this rank's boxes bit for bit with the written values, after all ranks have written. */
static ar_status compare_copy(const ari_full_tensor *t, int rank, const ar_tensor *local, const ar_layout *layout)
{
    struct comparison c = {.t = t, .index = SIZE_MAX};
    AR_TRY(check_count(t, layout));
    ari_for_each_run(local, layout, compare_run, &c);
    if (c.index == SIZE_MAX)
        return AR_OK;
    const int writer = atomic_load(&t->writer[c.index]) - 1;
    if (writer < 0)
        return ar_error_set(AR_ERR_INTERNAL, "%s: no rank has written the first copy of element %zu", t->name, c.index);
    return ar_error_set(AR_ERR_DATA,
                        "%s: the copies of ranks %d and %d differ at element %zu: %.9g and %.9g (0x%08x, 0x%08x)",
                        t->name, writer, rank, c.index, (double)t->values[c.index], (double)c.local_value,
                        (unsigned)ari_bits32(t->values[c.index]), (unsigned)ari_bits32(c.local_value));
}

ar_status ari_full_tensor_check(const ari_full_tensor *t)
{
    size_t written = 0;
    for (size_t i = 0; i < t->count; i++)
        written += atomic_load_explicit(&t->writer[i], memory_order_relaxed) != 0;
    if (written != t->count)
        return ar_error_set(AR_ERR_INTERNAL, "the ranks reported %zu of the %zu elements of %s", written, t->count,
                            t->name);
    if (!atomic_load(&t->clash))
        return AR_OK;
    char ranks_text[48] = ""; /* the ranks, if they are known */
    if (t->clash_ranks[0] != t->clash_ranks[1])
        snprintf(ranks_text, sizeof ranks_text, " by ranks %d and %d", t->clash_ranks[0], t->clash_ranks[1]);
    return ar_error_set(AR_ERR_INTERNAL,
                        "the ranks reported some of the %zu elements of %s more than once: element %zu%s", t->count,
                        t->name, t->clash_at, ranks_text);
}

ar_st_tensor ari_full_tensor_entry(const ari_full_tensor *t)
{
    ar_st_tensor e = {.name = t->name, .dtype = AR_F32, .ndim = t->ndim, .data = t->values};
    for (int d = 0; d < t->ndim; d++)
        e.shape[d] = t->shape[d];
    return e;
}

/* --- all of them -------------------------------------------------------------------------------------------------- */
/* One member's messages, in two rows. A rank that has reached the next agreement writes the other row, and cannot reach
 * the following agreement before all ranks have read this row. */
typedef struct member {
    ari_outcome outcomes[2];
    unsigned turn;
} member;

struct ari_full_set {
    pthread_mutex_t lock; /* protects the list's pointers and counts and `members`, but not the memory that they
                             point to */
    ari_full_tensor **list;
    size_t count, capacity;
    member *members; /* [ranks] members; NULL before the first agreement */
    int ranks;
    ar_process *process; /* NULL: the ranks are threads */
};

ar_status ari_full_set_create(ari_full_set **out, ar_process *p)
{
    ARI_OWNED ari_full_set *s = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&s, 1, "full tensors"));
    if (pthread_mutex_init(&s->lock, NULL) != 0)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a lock");
    s->process = p;
    ARI_GIVE(out, s);
    return AR_OK;
}

void ari_full_set_clear(ari_full_set *s)
{
    for (size_t i = 0; i < s->count; i++) {
        ari_full_tensor_fini(s->list[i]);
        free(s->list[i]);
    }
    s->count = 0;
}

void ari_full_set_destroy(ari_full_set *s)
{
    if (s == NULL)
        return;
    ari_full_set_clear(s);
    pthread_mutex_destroy(&s->lock);
    free(s->list);
    free(s->members);
    free(s);
}

/* --- agreement ---------------------------------------------------------------------------------------------------- */
static ar_status ensure_members(ari_full_set *s, int ranks)
{
    ar_status st = AR_OK;
    pthread_mutex_lock(&s->lock);
    if (s->members == NULL)
        st = ARI_ALLOC_ZERO(&s->members, (size_t)ranks, "what the ranks say");
    if (s->members != NULL && s->ranks == 0)
        s->ranks = ranks;
    pthread_mutex_unlock(&s->lock);
    if (st == AR_OK && s->ranks != ranks)
        st = ar_error_set(AR_ERR_ARG, "full tensors of %d ranks are used by %d", s->ranks, ranks);
    return st;
}

ar_status ari_full_set_agree(ari_full_set *s, ar_ctx *ctx, ar_status local_status)
{
    const int ranks = ar_comm_size(ctx->world), rank = ar_comm_rank(ctx->world);
    if (s->process)
        return ari_process_agree(s->process, local_status);
    AR_TRY(ensure_members(s, ranks));
    member *me = &s->members[rank];
    const unsigned row = me->turn++ % 2;
    me->outcomes[row] = ari_outcome_of(local_status);
    AR_TRY(ar_comm_barrier(ctx->world, ctx->queue, "full tensors"));
    AR_TRY(ar_queue_sync(ctx->queue, 0)); /* NCCL's barrier is on the stream */
    for (int r = 0; r < ranks; r++)
        AR_TRY(ari_outcome_status(&s->members[r].outcomes[row]));
    return AR_OK;
}

/* --- taking ------------------------------------------------------------------------------------------------------- */
typedef struct pass {
    ari_full_set *set;
    ar_ctx *ctx;
    int rank;         /* the rank that holds the parts */
    bool compare;     /* true: compare with written copies; false: write first copies */
    size_t cursor;    /* index at which the search for the next name starts: all ranks report in the same order */
    ari_bytes *sends; /* for a process: buffer of the parts for process 0; NULL: this process has the set itself */
} pass;

/* Header of a part on its way to process 0. The packed values follow. */
typedef struct part {
    char name[sizeof((ari_full_tensor *)NULL)->name];
    bool state;
    ar_layout layout;
    int ndim;
    size_t shape[AR_MAX_DIMS]; /* shape of the rank's local tensor */
} part;

static ari_full_tensor *find_tensor(ari_full_set *s, size_t begin, const char *name, size_t *index)
{
    for (size_t i = 0; i < s->count; i++) {
        *index = (begin + i) % s->count;
        if (strcmp(s->list[*index]->name, name) == 0)
            return s->list[*index];
    }
    return NULL;
}

static ar_status add_tensor(ari_full_tensor **e, ari_full_set *s, const char *name, bool state, const ar_layout *layout)
{
    ARI_OWNED ari_full_tensor *tensor = NULL;
    AR_TRY(ARI_GROW(&s->list, &s->capacity, s->count, "the list of full tensors"));
    AR_TRY(ARI_ALLOC_ZERO(&tensor, 1, "a full tensor"));
    AR_TRY(ari_full_tensor_init(tensor, name, layout->ndim, layout->shape));
    tensor->state = state;
    *e = s->list[s->count++] = tensor;
    tensor = NULL;
    return AR_OK;
}

/* Host memory: into the set. */
static ar_status take_here(pass *p, const char *name, bool state, const ar_tensor *local, const ar_layout *layout)
{
    ari_full_set *s = p->set;
    size_t index = 0;
    ar_status st = AR_OK;
    pthread_mutex_lock(&s->lock);
    ari_full_tensor *e = find_tensor(s, p->cursor, name, &index);
    if (e == NULL) {
        index = s->count;
        st = add_tensor(&e, s, name, state, layout);
    }
    pthread_mutex_unlock(&s->lock);
    AR_TRY(st);
    p->cursor = index + 1;
    if (p->compare == (layout->replica == 0))
        return AR_OK;
    return p->compare ? compare_copy(e, p->rank, local, layout) : ari_full_tensor_write(e, p->rank, local, layout);
}

static ar_status send_part(pass *p, const char *name, bool state, const ar_tensor *local, const ar_layout *layout)
{
    part head = {.state = state, .layout = *layout, .ndim = local->ndim};
    const size_t count = ar_tensor_count(local);
    ARI_OWNED float *packed = NULL;
    if (strlen(name) >= sizeof head.name)
        return ar_error_set(AR_ERR_ARG, "%s: the name is too long", name);
    memcpy(head.name, name, strlen(name) + 1);
    memcpy(head.shape, local->shape, sizeof head.shape);
    AR_TRY(ARI_ALLOC(&packed, count, name));
    ar_status st = ari_bytes_put(p->sends, &head, sizeof head);
    if (st == AR_OK) {
        ari_pack_elements(packed, local);
        st = ari_bytes_put(p->sends, packed, count * sizeof *packed);
    }
    return st;
}

static ar_status gather_tensor(pass *p, const char *name, bool state, const ar_tensor *local, const ar_layout *layout)
{
    ar_tensor host_view;
    AR_TRY(ari_host_view(p->ctx, &host_view, local));
    const ar_status st = (p->sends ? send_part : take_here)(p, name, state, &host_view, layout);
    ari_host_view_end(&host_view, local);
    return st;
}

static ar_status take_state(void *user, const ar_param *p, const char *state, const ar_tensor *local,
                            const ar_layout *layout)
{
    char name[sizeof((ari_full_tensor *)NULL)->name];
    const int n = snprintf(name, sizeof name, "%s.%s", p->name, state);
    if (n < 0 || (size_t)n >= sizeof name)
        return ar_error_set(AR_ERR_ARG, "%s: no room for its state's name, '%s'", p->name, state);
    return gather_tensor(user, name, true, local, layout);
}

static ar_status take_all(pass *p, ar_param *const *params, size_t n, ar_optimizer *optimizer)
{
    for (size_t i = 0; i < n; i++) {
        ar_layout layout;
        ar_tensor value;
        AR_TRY(ari_value_begin(&value, &layout, p->ctx, params[i]));
        AR_TRY(gather_tensor(p, params[i]->name, false, &value, &layout));
        ari_value_end(&value, p->ctx, params[i]);
    }
    return optimizer == NULL ? AR_OK : ar_optimizer_save(optimizer, p->ctx, take_state, p);
}

static int by_name(const void *a, const void *b)
{
    const ari_full_tensor *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

/* Checks tensors in the order of their names, so that the first incomplete tensor does not depend on timing. */
static ar_status check_all(const ari_full_set *s)
{
    ARI_SORT(s->list, s->count, by_name);
    for (size_t i = 0; i < s->count; i++)
        AR_TRY(ari_full_tensor_check(s->list[i]));
    return AR_OK;
}

static ar_status check_world(const ar_ctx *ctx)
{
    const int world = ar_comm_size(ctx->world);
    const int expected = ari_extent(&ctx->layout, ARI_ALL_AXES);
    if (world > ARI_FULL_MAX_RANKS)
        return ar_error_set(AR_ERR_UNSUPPORTED, "full tensors of %d ranks, at most %d are supported", world,
                            ARI_FULL_MAX_RANKS);
    if (world != expected)
        return ar_error_set(AR_ERR_ARG, "the context's world has %d ranks, expected %d, those of its groups", world,
                            expected);
    return AR_OK;
}

/* --- ranks that are processes ------------------------------------------------------------------------------------- */
/* Writes one rank's parts to the set, on process 0. */
static ar_status take_parts(void *user, int rank, ari_bytes *b)
{
    pass p = *(const pass *)user;
    p.rank = rank;
    while (b->count > 0) {
        part head;
        ar_tensor local;
        ARI_OWNED float *values = NULL;
        AR_TRY(ari_bytes_take(b, &head, sizeof head));
        head.name[sizeof head.name - 1] = '\0';
        AR_TRY(ar_tensor_view(&local, AR_F32, head.ndim, head.shape, (ar_buf){NULL}));
        AR_TRY(ARI_ALLOC(&values, ar_tensor_count(&local), head.name));
        local.data.ptr = values;
        AR_TRY(ari_bytes_take(b, values, ar_tensor_count(&local) * sizeof *values));
        AR_TRY(take_here(&p, head.name, head.state, &local, &head.layout));
    }
    return AR_OK;
}

/* All first copies are written before any further copy is compared with them. */
static ar_status take_from_processes(ari_full_set *s, ar_ctx *ctx, ar_param *const *params, size_t n,
                                     ar_optimizer *optimizer)
{
    ARI_ENDED(ari_bytes_fini) ari_bytes local_bytes = {.count = 0};
    pass p = {.set = s, .ctx = ctx, .sends = &local_bytes};
    ar_status st = ari_process_agree(s->process, take_all(&p, params, n, optimizer));
    p.sends = NULL;
    for (int compare = 0; compare < 2 && st == AR_OK; compare++) {
        p.compare = compare != 0;
        st = ari_process_collect(s->process, &local_bytes, take_parts, &p);
    }
    return st;
}

ar_status ari_full_set_take(ari_full_set *s, ar_ctx *ctx, ar_param *const *params, size_t n, ar_optimizer *optimizer)
{
    const int rank = ar_comm_rank(ctx->world);
    AR_TRY(check_world(ctx));
    if (rank == 0)
        ari_full_set_clear(s);
    if (s->process) {
        AR_TRY(take_from_processes(s, ctx, params, n, optimizer));
    } else {
        pass write = {.set = s, .ctx = ctx, .rank = rank},
             compare = {.set = s, .ctx = ctx, .rank = rank, .compare = true};
        AR_TRY(ari_full_set_agree(s, ctx, AR_OK));
        AR_TRY(ari_full_set_agree(s, ctx, take_all(&write, params, n, optimizer)));
        AR_TRY(ari_full_set_agree(s, ctx, take_all(&compare, params, n, optimizer)));
    }
    return ari_full_set_agree(s, ctx, rank == 0 ? check_all(s) : AR_OK);
}

/* --- what was taken ----------------------------------------------------------------------------------------------- */
ar_status ari_full_set_entries(const ari_full_set *s, bool state, ar_st_tensor **out, size_t *n)
{
    ar_st_tensor *list = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&list, s->count, "a list of full tensors"));
    *n = 0;
    for (size_t i = 0; i < s->count; i++) {
        if (s->list[i]->state == state)
            list[(*n)++] = ari_full_tensor_entry(s->list[i]);
    }
    *out = list;
    return AR_OK;
}

ar_status ari_full_set_hash(const ari_full_set *s, char hex[65])
{
    ARI_OWNED ar_st_tensor *list = NULL;
    size_t n = 0;
    AR_TRY(ari_full_set_entries(s, false, &list, &n));
    return ari_tensors_hash(hex, list, n);
}
