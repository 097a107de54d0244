/* SPDX-License-Identifier: Apache-2.0 */
/* What stands beside the tensors of resharding's input and is taken along: config.json, tokenizer.json, .. */
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "dump/reshard.h"
#include "ref/core/ends_in.h"
#include "ref/core/out.h"
#include "ref/io/file.h"

#define INDEX ".index.json"

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
    unsigned char *data = NULL;
    size_t bytes = 0;
    char *to = NULL;
    AR_TRY(ari_file_read(&data, &bytes, from, ARI_RS_SMALL_BYTES));
    ar_status st = ari_file_path(&to, d->path, name);
    if (st == AR_OK)
        st = ari_file_write(to, data, bytes);
    free(to);
    free(data);
    return st;
}

/* Whether the input's tensors came from a file of this name. */
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
        ari_rs_note(r, "not read and not taken along, for the model's tensors are in other files: %s", ARI_SHOW(name));
}

static ar_status copy_beside(const ari_rs_folder *d, const ari_rs *r, const char *name, size_t *copied)
{
    char *from = NULL;
    struct stat s;
    ar_status st = AR_OK;
    if (name[0] == '.')
        return AR_OK;
    AR_TRY(ari_file_path(&from, r->folder, name));
    if (stat(from, &s) == 0 && S_ISREG(s.st_mode)) {
        if (is_weights(name))
            note_left(r, name);
        else if ((size_t)s.st_size > ARI_RS_SMALL_BYTES)
            ari_rs_note(r, "not taken along, for its size: %s", ARI_SHOW(name));
        else if ((st = copy_file(d, from, name)) == AR_OK)
            ++*copied;
    }
    free(from);
    return st;
}

ar_status ari_rs_copy_small(ari_rs_folder *d, const ari_rs *r, size_t *copied)
{
    ar_status st = AR_OK;
    struct stat s;
    *copied = 0;
    if (stat(r->o->in, &s) == 0 && S_ISDIR(s.st_mode)) {
        DIR *list = opendir(r->folder);
        if (!list)
            return ari_out_fail("list", r->folder);
        for (const struct dirent *e; st == AR_OK && (e = readdir(list)) != NULL;)
            st = copy_beside(d, r, e->d_name, copied);
        closedir(list);
    }
    if (st == AR_OK && r->config_path && r->has_config) {
        char *beside = NULL;
        AR_TRY(ari_file_path(&beside, d->path, "config.json"));
        if (r->o->config || access(beside, F_OK) != 0) {
            *copied += access(beside, F_OK) != 0;
            st = copy_file(d, r->config_path, "config.json");
        }
        free(beside);
    }
    return st;
}
