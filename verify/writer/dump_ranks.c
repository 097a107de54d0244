/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/writer/dump_ranks.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <unistd.h>

#include "ref/core/queue_impl.h"
#include "ref/core/size.h"
#include "ref/io/file.h"
#include "ref/io/safetensors_private.h"
#include "ref/layers/batch_private.h"
#include "ref/models/parallel_private.h"
#include "ref/models/plan.h"
#include "verify/read/placement.h"
#include "verify/writer/dump_listener_private.h"

ar_status ari_dump_ranks_create(ari_dump_ranks *d, const ar_parallel *p, const ar_dump_listener_options *o)
{
    const int ranks = ar_parallel_world(p);
    *d = (ari_dump_ranks){.parallel = *p};
    AR_TRY(ARI_ALLOC_ZERO(&d->rank, (size_t)ranks, "listeners of the ranks"));
    AR_TRY(ARI_ALLOC_ZERO(&d->user, (size_t)ranks, "listeners of the ranks"));
    for (; d->ranks < ranks; d->ranks++) {
        AR_TRY(ar_dump_listener_create(&d->rank[d->ranks], o));
        d->user[d->ranks] = d->rank[d->ranks];
    }
    return AR_OK;
}

void ari_dump_ranks_fini(ari_dump_ranks *d)
{
    for (int r = 0; r < d->ranks; r++)
        ar_dump_listener_destroy(d->rank[r]);
    free(d->rank);
    free(d->user);
    *d = (ari_dump_ranks){.ranks = 0};
}

void ari_dump_ranks_clear(ari_dump_ranks *d)
{
    for (int r = 0; r < d->ranks; r++)
        ari_dump_listener_clear(d->rank[r]);
}

ar_status ari_tap_both(void *user, const ar_tap_event *event)
{
    const ari_tap_pair *p = user;
    AR_TRY(p->tap[0](p->user[0], event));
    return p->tap[1] ? p->tap[1](p->user[1], event) : AR_OK;
}

/* --- what is said beside ------------------------------------------------------------------------------------------ */

void ari_dump_fact(ari_dump_facts *f, const char *key, const char *value)
{
    if (!value)
        return;
    f->pair[2 * f->n] = key;
    f->pair[2 * f->n + 1] = value;
    f->n++;
}

size_t ari_dump_targets(const ar_batch *b)
{
    return b->input_ids ? ari_batch_targets(b) : 0;
}

ar_status ari_dump_facts_of(ari_dump_facts *f, const ar_config *c, const ar_run *run, const ar_batch *first_batch)
{
    *f = (ari_dump_facts){.config = c, .run = run};
    ari_dump_fact(f, "model", c->name);
    snprintf(f->heads, sizeof f->heads, "%zu", c->heads);
    snprintf(f->kv_heads, sizeof f->kv_heads, "%zu", c->kv_heads);
    snprintf(f->targets, sizeof f->targets, "%zu", ari_dump_targets(first_batch));
    ari_dump_fact(f, "num_attention_heads", f->heads);
    ari_dump_fact(f, "num_key_value_heads", f->kv_heads);
    ari_dump_fact(f, "targets", f->targets);
    ari_dump_fact(f, "numerics", run && run->numerics == AR_NUMERICS_NATIVE ? "native" : "exact");
    if (!run)
        return AR_OK;
    ari_parallel_text(f->layout, sizeof f->layout, &run->parallel);
    ari_dump_fact(f, "layout", f->layout);
    if (run->plan.rules > 0) {
        char hash[65];
        AR_TRY(ari_plan_hash(hash, &run->plan));
        snprintf(f->plan, sizeof f->plan, "%s, %zu rules, sha256 %s", ARI_SHOW(ari_plan_file(&run->plan)),
                 run->plan.rules, hash);
        ari_utf8_clean(f->plan); /* a file's name may be anything */
        ari_dump_fact(f, "plan", f->plan);
    }
    if (run->fault)
        ari_dump_fact(f, "fault", run->fault);
    return AR_OK;
}

ar_status ari_documents_text(char **out, const ar_batch *batch, size_t batches)
{
    size_t bytes = 0;
    *out = NULL;
    if (!batch->documents)
        return AR_OK;
    FILE *stream = open_memstream(out, &bytes);
    if (stream == NULL)
        return ar_error_set(AR_ERR_MEMORY, "no memory for the documents of a dump");
    for (size_t i = 0; i < batches * batch->batch; i++) {
        const ar_batch *b = &batch[i / batch->batch];
        fprintf(stream, "%s[0", i > 0 ? "," : "[");
        for (size_t position = 0, document_begin, end; position < b->seq; position = end) {
            ari_batch_document(b, i % batch->batch, position, &document_begin, &end);
            fprintf(stream, ",%zu", end);
        }
        fputc(']', stream);
    }
    fputc(']', stream);
    if (ari_text_closed(stream, out))
        return AR_OK;
    free(*out);
    *out = NULL;
    return ar_error_set(AR_ERR_MEMORY, "no memory for the documents of a dump");
}

/* --- the folder --------------------------------------------------------------------------------------------------- */

static ar_status write_all(const ari_dump_ranks *d, const char *folder, const ari_dump_facts *f)
{
    for (int r = 0; r < d->ranks; r++) {
        const ar_dump_place place = ar_dump_place_of(&d->parallel, r);
        AR_TRY(ar_dump_listener_write(d->rank[r], folder, &place, f->pair, f->n));
    }
    return ari_dump_model_write(folder, f->config, f->run);
}

/* Creates an empty folder next to the folder that it will replace. Its name is fixed, so that the next run reuses
 * the folder of a killed run. *lock is an open lock file that no other process holds; it is closed when the process
 * ends. */
static ar_status make_beside(char *path, size_t cap, int *lock, const char *folder)
{
    bool exists = false;
    const int n = snprintf(path, cap, "%s.new", folder);
    if (n < 0 || (size_t)n >= cap)
        return ar_error_set(AR_ERR_ARG, "%s: the path is too long", ARI_SHOW(folder));
    AR_TRY(ari_folder_make(path));
    *lock = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (*lock < 0)
        return ari_io_fail("open the folder", path);
    if (flock(*lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        return ar_error_set(AR_ERR_IO, "%s: another process writes there", ARI_SHOW(path));
    return ari_dump_folder_clear(&exists, path);
}

/* Removes the folder after a failure. The failure's message is kept. */
static ar_status discard(const char *folder, ar_status st)
{
    const ari_outcome failed = ari_outcome_of(st);
    return ari_dump_folder_remove(folder) == AR_OK ? st : ari_outcome_status(&failed);
}

ar_status ari_dump_ranks_write(const ari_dump_ranks *d, const char *folder, const ari_dump_facts *f)
{
    char staging_folder[1024];
    int lock = -1;
    ar_status st = AR_OK;
    AR_TRY(ari_dump_folder_check(folder));
    AR_TRY_TO(done, st, make_beside(staging_folder, sizeof staging_folder, &lock, folder));
    AR_TRY_TO(failed, st, write_all(d, staging_folder, f));
    AR_TRY_TO(failed, st, ari_dump_folder_remove(folder));
    if (rename(staging_folder, folder) == 0)
        goto done;
    st = ari_io_fail("rename the folder", staging_folder);
failed:
    st = discard(staging_folder, st);
done:
    if (lock >= 0)
        close(lock);
    return st;
}

/* --- the reference ------------------------------------------------------------------------------------------------ */

ar_status ari_dump_order_text(char **out, const char **names, size_t n)
{
    const ari_placement p = {.rank = -1, .order = (char **)(uintptr_t)names, .ordered = n};
    return ari_placement_text(NULL, out, &p);
}

typedef char tensor_name[ARI_REFERENCE_NAME];

ar_status ari_dump_reference_write(const ari_reference *r, const char *path, const ari_dump_facts *f)
{
    tensor_name *name = NULL;
    const char **order = NULL;
    ar_st_tensor *tensor = NULL;
    ARI_ENDED(ari_arena_free) ari_arena arena = {NULL};
    ARI_OWNED char *text = NULL;
    AR_TRY(ARI_TAKE(&name, &arena, r->count, "names of a dump"));
    AR_TRY(ARI_TAKE(&order, &arena, r->count, "names of a dump"));
    AR_TRY(ARI_TAKE(&tensor, &arena, r->count, "tensors of a dump"));
    for (size_t i = 0; i < r->count; i++) {
        const ari_ref_tensor *t = &r->tensor[i];
        (void)ari_dump_name(name[i], t->name, t->pass, (uint32_t)t->step); /* a reference's names fit */
        order[i] = name[i];
        tensor[i] = ari_reference_entry(t, name[i]);
    }
    AR_TRY(ari_entries_as_stored(&arena, tensor, r->count));
    AR_TRY(ari_dump_order_text(&text, order, r->count));
    ari_dump_facts facts = *f;
    ari_dump_fact(&facts, "format", "pt");
    ari_dump_fact(&facts, ARI_DUMP_PLACEMENT, text);
    return ari_st_write(path, tensor, r->count, facts.pair, facts.n);
}
