/* SPDX-License-Identifier: Apache-2.0 */
/* The folder that resharding writes to: one request at a time, and what an interrupted run has finished is kept; and
 * the small files that are taken along. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ref/core/atomic_file.h"
#include "ref/core/os/os.h"
#include "ref/core/text.h"
#include "ref/io/file.h"
#include "ref/io/json.h"
#include "verify/dump/reshard.h"

ARI_OWNER(ar_st_file, ar_st_close)

#define JOURNAL ".anyrank-reshard.json"
#define HIDDEN ".anyrank-"
#define INDEX ".index.json"

/* --- the request -------------------------------------------------------------------------------------------------- */

static void hash_text(ari_sha256 *h, const char *text)
{
    ari_sha256_update(h, text, strlen(text) + 1);
}

/* Identifies a file of the former run: reading all of it would take as long as writing. */
static ar_status hash_file_state(ari_sha256 *h, const char *path)
{
    struct stat s;
    char text[96];
    if (stat(path, &s) != 0)
        return ari_io_fail("find", path);
    const struct timespec modified = ari_modified(&s);
    snprintf(text, sizeof text, "%jd %jd.%09ld", (intmax_t)s.st_size, (intmax_t)modified.tv_sec, modified.tv_nsec);
    hash_text(h, text);
    return AR_OK;
}

static ar_status hash_tensor(ari_sha256 *h, const ar_dump_tensor *t)
{
    hash_text(h, t->name);
    hash_text(h, ar_dtype_name(t->dtype));
    ari_sha256_update(h, t->shape, (size_t)t->ndim * sizeof t->shape[0]);
    for (size_t i = 0; i < t->parts; i++) {
        AR_TRY(hash_file_state(h, t->part[i].file));
        ari_sha256_update(h, &t->part[i].rank, sizeof t->part[i].rank);
    }
    return AR_OK;
}

static ar_status hash_contents(ari_sha256 *h, const char *path)
{
    ARI_OWNED unsigned char *data = NULL;
    size_t bytes = 0;
    if (path)
        AR_TRY(ari_file_read(&data, &bytes, path, ARI_RS_SMALL_BYTES));
    ari_sha256_update(h, path ? (const void *)data : "", path ? bytes : 1);
    return AR_OK;
}

static ar_status hash_input(char hex[65], const ari_rs *r)
{
    ari_sha256 h;
    ari_sha256_init(&h);
    AR_TRY(hash_contents(&h, r->config_path));
    AR_TRY(hash_contents(&h, r->o->map));
    for (size_t i = 0; i < r->tensors; i++)
        AR_TRY(hash_tensor(&h, r->tensor[i].from));
    ari_sha256_final(&h, hex);
    return AR_OK;
}

static ar_status make_request(json_t **gives, const ari_rs *r)
{
    char input[65];
    const ar_reshard_options *o = r->o;
    AR_TRY(hash_input(input, r));
    char stages[ARI_STAGES_TEXT];
    ari_stages_text(stages, &r->layout.stages);
    *gives = json_pack("{s:s, s:i, s:i, s:i, s:i, s:s, s:b, s:b, s:I, s:I}", "input", input, "tp", r->layout.tp, "dp",
                       r->layout.dp, "pp", r->layout.pp, "virtual_stages", r->layout.virtual_stages, "stages", stages,
                       "dp_copies", (int)o->dp_copies, "embedding_hidden", (int)o->embedding_hidden, "pad_vocab",
                       (json_int_t)o->pad_vocab, "shard_bytes", (json_int_t)(r->merged ? o->shard_bytes : 0));
    return *gives ? AR_OK : ar_error_set(AR_ERR_MEMORY, "no memory for a request");
}

static ar_status other_request(const char *folder, const json_t *old, json_t *now)
{
    const char *key;
    json_t *value;
    json_object_foreach(now, key, value)
    {
        const json_t *was = json_object_get(old, key);
        if (was && json_equal(was, value))
            continue;
        if (json_is_integer(was) && json_is_integer(value))
            return ar_error_set(AR_ERR_ARG,
                                "%s: was begun with %s=%" JSON_INTEGER_FORMAT ", now it is %" JSON_INTEGER_FORMAT
                                "; give another folder",
                                ARI_SHOW(folder), key, json_integer_value(was), json_integer_value(value));
        if (strcmp(key, "input") == 0)
            return ar_error_set(AR_ERR_ARG,
                                "%s: was begun with another input, or that has changed since; give another folder",
                                ARI_SHOW(folder));
        return ar_error_set(AR_ERR_ARG, "%s: was begun with another choice of %s; give another folder",
                            ARI_SHOW(folder), key);
    }
    return AR_OK;
}

/* --- the journal -------------------------------------------------------------------------------------------------- */

static ar_status new_journal(ari_rs_folder *d, json_t *request)
{
    d->journal =
        json_pack("{s:s, s:i, s:O, s:{}}", "format", "anyrank reshard", "version", 1, "request", request, "files");
    if (!d->journal)
        return ar_error_set(AR_ERR_MEMORY, "%s: no memory for its journal", ARI_SHOW(d->path));
    return ari_json_save(d->journal, d->journal_path);
}

static ar_status take_up_journal(ari_rs_folder *d, json_t *request)
{
    AR_TRY(ari_json_load(&d->journal, d->journal_path));
    const ari_json_at at = {d->journal, d->journal_path, AR_ERR_FORMAT};
    const json_t *old, *files;
    if (!json_is_object(d->journal))
        return ar_error_set(AR_ERR_FORMAT, "%s: expected an object", ARI_SHOW(d->journal_path));
    AR_TRY(ari_json_object(&at, "request", &old));
    AR_TRY(ari_json_object(&at, "files", &files));
    return other_request(d->path, old, request);
}

/* --- the folder --------------------------------------------------------------------------------------------------- */

static ar_status lock_folder(ari_rs_folder *d)
{
    d->fd = open(d->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (d->fd < 0)
        return ari_io_fail("open the folder", d->path);
    if (flock(d->fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        return ar_error_set(AR_ERR_ARG, "%s: another process writes there", ARI_SHOW(d->path));
    return AR_OK;
}

static bool is_link(const ari_rs_folder *d, const char *name)
{
    struct stat s;
    return fstatat(d->fd, name, &s, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(s.st_mode);
}

/* The first name that is not a former run's, and the first link, through which a file of somewhere else would be
 * written; what a killed run left half written goes. Where the file system has unnamed files there is nothing of the
 * kind. */
static ar_status look_around(const ari_rs_folder *d, char *other, char *link, size_t cap)
{
    DIR *list = opendir(d->path);
    other[0] = link[0] = '\0';
    if (!list)
        return ari_io_fail("list", d->path);
    for (const struct dirent *e; (e = readdir(list)) != NULL;) {
        const bool ours = strncmp(e->d_name, HIDDEN, strlen(HIDDEN)) == 0;
        if (ours && ari_ends_in(e->d_name, ".tmp"))
            (void)unlinkat(d->fd, e->d_name, 0);
        else if (!ours && strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 && other[0] == '\0')
            snprintf(other, cap, "%s", e->d_name);
        if (link[0] == '\0' && is_link(d, e->d_name))
            snprintf(link, cap, "%s", e->d_name);
    }
    closedir(list);
    return AR_OK;
}

static ar_status refuse_input(const char *out, const ari_rs *r)
{
    ARI_OWNED char *to = realpath(out, NULL);
    ARI_OWNED char *from = realpath(r->folder, NULL);
    const bool same = to && from && strcmp(to, from) == 0;
    return same ? ar_error_set(AR_ERR_ARG, "%s: the output's folder is the input's; give another", ARI_SHOW(out))
                : AR_OK;
}

static ar_status begin_folder(ari_rs_folder *d, const ari_rs *r, json_t *request)
{
    char other[256], link[256];
    AR_TRY(ari_folder_make(d->path));
    AR_TRY(refuse_input(d->path, r));
    AR_TRY(lock_folder(d));
    AR_TRY(look_around(d, other, link, sizeof other));
    if (link[0] != '\0')
        return ar_error_set(AR_ERR_ARG, "%s: holds a link ('%s'), and what it leads to would be written; remove it",
                            ARI_SHOW(d->path), ARI_SHOW(link));
    if (access(d->journal_path, F_OK) == 0)
        return take_up_journal(d, request);
    if (other[0] != '\0')
        return ar_error_set(AR_ERR_ARG, "%s: holds files already ('%s'); give an empty folder", ARI_SHOW(d->path),
                            ARI_SHOW(other));
    return new_journal(d, request);
}

ar_status ari_rs_folder_begin(ari_rs_folder *d, ari_rs *r)
{
    json_auto_t *request = NULL;
    *d = (ari_rs_folder){.path = r->o->out, .fd = -1, .arena = &r->arena};
    AR_TRY(ari_arena_path(d->arena, &d->journal_path, d->path, JOURNAL));
    AR_TRY(make_request(&request, r));
    return begin_folder(d, r, request);
}

void ari_rs_folder_end(ari_rs_folder *d)
{
    json_decref(d->journal);
    if (d->fd >= 0)
        close(d->fd);
}

/* --- finished files ----------------------------------------------------------------------------------------------- */

/* True if an open file's header is the expected one. */
static bool same_header(const ar_st_file *st, const ari_rs_contents *c)
{
    bool same = ar_st_count(st) == c->n;
    for (size_t i = 0; same && i < c->pairs; i++) {
        const char *value = ar_st_metadata(st, c->pair[2 * i]);
        same = value && strcmp(value, c->pair[2 * i + 1]) == 0;
    }
    for (size_t i = 0; same && i < c->n; i++) {
        const ar_dump_tensor *from = c->item[i].tensor->from;
        const ar_st_entry *e = ar_st_find(st, from->name);
        same = e && e->dtype == from->dtype && e->ndim == from->ndim &&
               memcmp(e->shape, c->item[i].box.extent, (size_t)e->ndim * sizeof *e->shape) == 0;
    }
    return same;
}

static void hash_data(char hex[65], ari_rs *r, const ar_st_file *st, const ari_rs_contents *c)
{
    const size_t step = (size_t)8 << 20;
    ari_sha256 h;
    ari_sha256_init(&h);
    for (size_t i = 0; i < c->n; i++) {
        const ar_st_entry *e = ar_st_find(st, c->item[i].tensor->from->name);
        for (size_t at = 0; at < e->bytes; at += step) {
            const size_t bytes = e->bytes - at < step ? e->bytes - at : step;
            ari_sha256_update(&h, (const char *)e->data + at, bytes);
            ari_pages_drop((const char *)e->data + at, bytes);
            ari_rs_progress(r, 0, e->name);
        }
    }
    ari_sha256_final(&h, hex);
}

ar_status ari_rs_folder_kept(bool *kept, ari_rs_folder *d, ari_rs *r, const ari_rs_contents *c)
{
    const char *wanted = json_string_value(json_object_get(json_object_get(d->journal, "files"), c->file->name));
    char *path = NULL, hex[65] = "";
    ARI_OWNED_BY(ar_st_close) ar_st_file *file = NULL;
    *kept = false;
    if (!wanted)
        return AR_OK;
    AR_TRY(ari_arena_path(d->arena, &path, d->path, c->file->name));
    const ar_status st = ar_st_open(&file, path);
    if (st == AR_OK && same_header(file, c))
        hash_data(hex, r, file, c);
    *kept = st == AR_OK && strcmp(hex, wanted) == 0;
    return st == AR_ERR_MEMORY ? st : AR_OK; /* whatever else is wrong with it, it is written again */
}

ar_status ari_rs_folder_add(ari_rs_folder *d, const ari_rs_file *f, const char hash[65])
{
    if (json_object_set_new(json_object_get(d->journal, "files"), f->name, json_string(hash)) != 0)
        return ar_error_set(AR_ERR_MEMORY, "%s: no memory for its journal", ARI_SHOW(d->path));
    return ari_json_save(d->journal, d->journal_path);
}

/* --- what is taken along: config.json, tokenizer.json, .. --------------------------------------------------------- */

/* Tensors in any format, and indexes of them, are not taken along: the output has its own. */
static bool is_weights(const char *name)
{
    static const char *const endings[] = {".safetensors", INDEX,     ".npy",  ".npz",     ".bin", ".pt",  ".pth",
                                          ".ckpt",        ".distcp", ".gguf", ".msgpack", ".h5",  ".onnx"};
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        if (ari_ends_in(name, endings[i]))
            return true;
    }
    return false;
}

static ar_status copy_file(const ari_rs_folder *d, const char *from, const char *name)
{
    ARI_OWNED unsigned char *data = NULL;
    size_t bytes = 0;
    char *to = NULL;
    AR_TRY(ari_arena_path(d->arena, &to, d->path, name));
    AR_TRY(ari_file_read(&data, &bytes, from, ARI_RS_SMALL_BYTES));
    return ari_file_write(to, data, bytes);
}

/* True if the input's tensors came from a file of this name. */
static bool was_read(const ari_rs *r, const char *name)
{
    for (size_t i = 0; i < r->tensors; i++) {
        for (size_t k = 0; k < r->tensor[i].from->parts; k++) {
            const char *file = r->tensor[i].from->part[k].file, *slash = strrchr(file, '/');
            if (strcmp(slash ? slash + 1 : file, name) == 0)
                return true;
        }
    }
    return false;
}

static void note_left(const ari_rs *r, const char *name)
{
    if (!ari_ends_in(name, INDEX) && !was_read(r, name))
        (void)ari_rs_note(r, false, "not read and not taken along, for the model's tensors are in other files: %s",
                          ARI_SHOW(name));
}

static ar_status copy_beside(const ari_rs_folder *d, const ari_rs *r, const char *name, size_t *copied)
{
    char *from = NULL;
    struct stat s;
    if (name[0] == '.')
        return AR_OK;
    AR_TRY(ari_arena_path(d->arena, &from, r->folder, name));
    if (stat(from, &s) != 0 || !S_ISREG(s.st_mode))
        return AR_OK;
    if (is_weights(name)) {
        note_left(r, name);
    } else if ((size_t)s.st_size > ARI_RS_SMALL_BYTES) {
        (void)ari_rs_note(r, false, "not taken along, for its size: %s", ARI_SHOW(name));
    } else {
        AR_TRY(copy_file(d, from, name));
        ++*copied;
    }
    return AR_OK;
}

ar_status ari_rs_copy_small(ari_rs_folder *d, const ari_rs *r, size_t *copied)
{
    ar_status st = AR_OK;
    *copied = 0;
    if (ari_is_folder(r->o->in)) {
        DIR *list = opendir(r->folder);
        if (!list)
            return ari_io_fail("list", r->folder);
        for (const struct dirent *e; st == AR_OK && (e = readdir(list)) != NULL;)
            st = copy_beside(d, r, e->d_name, copied);
        closedir(list);
    }
    if (st == AR_OK && r->config_path && r->has_config) {
        bool beside = false;
        AR_TRY(ari_file_is_in(&beside, d->path, "config.json"));
        *copied += !beside;
        if (r->o->config || !beside)
            st = copy_file(d, r->config_path, "config.json");
    }
    return st;
}
