/* SPDX-License-Identifier: Apache-2.0 */
/* Recognises files of other programs by their first bytes. */
#include <dirent.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "anyrank/safetensors.h"
#include "ref/core/text.h"
#include "ref/io/file.h"
#include "ref/io/safetensors_private.h"

#define SAVE_NUMPY "from safetensors.numpy import save_file; "
#define SAVE_TORCH "from safetensors.torch import save_file; "
#define TO_TOKENS ".astype('<u4').tofile('tokens.u32')"

/* A file format and how to convert it. `tensors` and `tokens` are lines of Python, or "-m" with a module and its
 * arguments; @ stands for the file's path. */
typedef struct kind {
    const char *description;
    const char *magic;
    size_t bytes;        /* length of the magic bytes */
    const char *tensors; /* writes tensors.safetensors */
    const char *tokens;  /* writes tokens.u32 */
} kind;

enum { NPY, NPZ, TORCH, DISTCP, OLD_TORCH, ZIP, GGUF, HDF5, ARROW, PARQUET, GZIP, ZSTD, SAFETENSORS, KINDS };

/* Magic bytes of formats that are refused. A magic below four bytes would refuse valid tokens. GGUF's includes the
 * upper bytes of its version, which no text has. The magic of an old torch.save is the pickled number at its start. */
static const kind kinds[KINDS] = {
    [NPY] = {"a NumPy array (.npy)", "\x93NUMPY", 6,
             "import numpy as np; " SAVE_NUMPY "save_file({'NAME': np.load('@')}, 'tensors.safetensors')",
             "import numpy as np; np.load('@').ravel()" TO_TOKENS},
    [NPZ] = {"an archive of NumPy arrays (.npz)", "PK\x03\x04", 4,
             "import numpy as np; " SAVE_NUMPY "save_file(dict(np.load('@')), 'tensors.safetensors')",
             "import numpy as np; np.load('@')['NAME'].ravel()" TO_TOKENS},
    [TORCH] = {"a file of torch.save", "PK\x03\x04", 4,
               "import torch; " SAVE_TORCH "save_file({k: v.clone() for k, v in torch.load('@', map_location='cpu', "
               "weights_only=True).items()}, 'tensors.safetensors')",
               "import torch; torch.load('@').flatten().numpy()" TO_TOKENS},
    [DISTCP] = {"a part of a checkpoint of torch.distributed.checkpoint, which is its whole folder", "PK\x03\x04", 4,
                NULL, NULL},
    [OLD_TORCH] = {"a file of torch.save", "\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20j\xa8P\x19", 14, NULL, NULL},
    [ZIP] = {"a zip archive", "PK\x03\x04", 4, NULL, NULL},
    [GGUF] = {"a GGUF file", "GGUF", 4,
              "from transformers import AutoModelForCausalLM as M; M.from_pretrained('.', "
              "gguf_file='#').save_pretrained('OUT')",
              NULL},
    [HDF5] = {"an HDF5 file", "\x89HDF\r\n\x1a\n", 8,
              "import h5py; " SAVE_NUMPY
              "f = h5py.File('@'); save_file({k: f[k][()] for k in f}, 'tensors.safetensors')",
              "import h5py; h5py.File('@')['NAME'][()].ravel()" TO_TOKENS},
    [ARROW] = {"an Arrow file", "ARROW1\0", 7, NULL, NULL},
    [PARQUET] = {"a Parquet file", "PAR1\x15", 5, NULL,
                 "import numpy as np, pandas as pd; np.concatenate(pd.read_parquet('@')['input_ids'])" TO_TOKENS},
    [GZIP] = {"compressed by gzip", "\x1f\x8b\x08", 3, NULL, NULL},
    [ZSTD] = {"compressed by zstd", "\x28\xb5\x2f\xfd", 4, NULL, NULL},
    [SAFETENSORS] = {"a safetensors file", "", 0, NULL, NULL}, /* the length of a header, and the header */
};

/* True if the bytes contain a word. */
static bool holds(const unsigned char *head, size_t n, const char *word)
{
    const size_t m = strlen(word);
    for (size_t i = 0; i + m <= n; i++) {
        if (memcmp(head + i, word, m) == 0)
            return true;
    }
    return false;
}

/* Returns the kind of a file that begins with these bytes; KINDS: not in the list. A zip is recognised by the name of
 * its first member and its own name. */
static int kind_of(const unsigned char *head, size_t n, const char *path, ari_requested requested)
{
    int found = 0;
    if (requested != ARI_WANT_TENSORS && n > 10 && memcmp(head + 4, "\0\0\0\0{\"", 6) == 0)
        return SAFETENSORS;
    while (found < SAFETENSORS && (n < kinds[found].bytes || memcmp(head, kinds[found].magic, kinds[found].bytes) != 0))
        found++;
    if (found == SAFETENSORS)
        return KINDS;
    if (found == NPZ && ari_ends_in(path, ".distcp"))
        return DISTCP;
    if (found == NPZ && !ari_ends_in(path, ".npz") && !holds(head, n, ".npy"))
        return ari_ends_in(path, ".zip") && !holds(head, n, ".pkl") ? ZIP : TORCH;
    if (found == GGUF && (n < 8 || head[4] > 9 || head[5] != 0 || head[6] != 0 || head[7] != 0))
        return KINDS;
    if (found == GZIP && requested == ARI_WANT_TOKENS)
        return KINDS;
    return found;
}

/* Writes "; this converts it: ..", with the path for each @ and the name for each # in the lines; "" without lines. */
static void unsupported_format_conversion(char out[ARI_FORMAT_CONVERSION], const char *lines, const char *path,
                                          const char *name)
{
    size_t n = 0;
    out[0] = '\0';
    const bool is_module = lines && strncmp(lines, "-m ", 3) == 0;
    if (lines)
        n = (size_t)snprintf(out, ARI_FORMAT_CONVERSION, "; this converts it:\n  python3 %s", is_module ? "" : "-c \"");
    for (const char *c = lines; c && *c && n < ARI_FORMAT_CONVERSION - 2; c++) {
        if (*c == '@' || *c == '#')
            n += (size_t)snprintf(out + n, ARI_FORMAT_CONVERSION - n, "%s", ARI_SHOW(*c == '@' ? path : name));
        else
            n += (size_t)snprintf(out + n, ARI_FORMAT_CONVERSION - n, "%c", *c);
    }
    if (lines && !is_module && n < ARI_FORMAT_CONVERSION - 1)
        snprintf(out + n, ARI_FORMAT_CONVERSION - n, "\"");
}

ar_status ari_unsupported_format_check(const char *path, const void *head, size_t n, ari_requested requested)
{
    static const char *const expected[] = {"a safetensors file", "tokens: bytes, u16, u32 or a safetensors file",
                                           "text"};
    const int found = kind_of(head, n, path, requested);
    if (found == KINDS)
        return AR_OK;
    const kind *k = &kinds[found == OLD_TORCH ? TORCH : found];
    const char *lines = requested == ARI_WANT_TENSORS ? k->tensors : requested == ARI_WANT_TOKENS ? k->tokens : NULL;
    char convert[ARI_FORMAT_CONVERSION];
    unsupported_format_conversion(convert, lines, path, path);
    return ar_error_set(AR_ERR_FORMAT, "%s: is %s, expected %s%s", ARI_SHOW(path), k->description, expected[requested],
                        convert);
}

ar_status ari_unsupported_format_check_file(int fd, size_t bytes, const char *path, ari_requested requested)
{
    unsigned char head[ARI_FORMAT_HEAD];
    const size_t n = bytes < sizeof head ? bytes : sizeof head;
    AR_TRY(ari_file_pread(fd, head, n, 0, path));
    return ari_unsupported_format_check(path, head, n, requested);
}

ar_status ari_file_read_text(unsigned char **out, size_t *length, const char *path, size_t limit)
{
    AR_TRY(ari_file_read(out, length, path, limit));
    const ar_status st =
        ari_unsupported_format_check(path, *out, *length < ARI_FORMAT_HEAD ? *length : ARI_FORMAT_HEAD, ARI_WANT_TEXT);
    if (st != AR_OK) {
        free(*out);
        *out = NULL;
    }
    return st;
}

/* --- folders ------------------------------------------------------------------------------------------------------ */

/* Folders of other programs, recognised by the names in them. */

/* In `lines`, @ is the folder and # the file in it. by_content: the name is ambiguous, so the file must begin like a
 * kind in the list. */
typedef struct named {
    const char *pattern, *description, *lines;
    bool by_content;
} named;
#define BY_NAME(pattern, ...)       \
    {                               \
        pattern, __VA_ARGS__, false \
    }

#define SAVE_MODEL(more) \
    "from transformers import AutoModelForCausalLM as M; M.from_pretrained('@'" more ").save_pretrained('OUT')"
#define ADAPTER                                                                                     \
    "an adapter without the model that it adapts",                                                  \
        "from peft import AutoPeftModelForCausalLM as M; M.from_pretrained('@').merge_and_unload()" \
        ".save_pretrained('OUT')"
#define BY_ANYRANK "-m anyrank.convert '@' OUT   (--full: into OUT/model.safetensors, not a file of each rank)"
#define DEEPSPEED "a checkpoint of DeepSpeed", BY_ANYRANK
#define MEGATRON "a checkpoint of Megatron", BY_ANYRANK
#define DCP "a checkpoint of torch.distributed.checkpoint", BY_ANYRANK

/* The first matching pattern is used. */
static const named names[] = {
    BY_NAME("adapter_model*", ADAPTER),
    BY_NAME("pytorch_model*.bin*", "weights in PyTorch's format", SAVE_MODEL("")),
    BY_NAME(".metadata", DCP),
    BY_NAME("*.distcp", DCP),
    BY_NAME("latest_checkpointed_iteration.txt", MEGATRON),
    BY_NAME("iter_[0-9]*", MEGATRON),
    BY_NAME("global_step[0-9]*", DEEPSPEED),
    BY_NAME("*zero_pp_rank_*", DEEPSPEED),
    BY_NAME("mp_rank_*_model_states.pt", DEEPSPEED),
    BY_NAME("mp_rank_[0-9]*", MEGATRON),
    BY_NAME("*___rank=*.pt", "a dump of SGLang", BY_ANYRANK),
    BY_NAME("*.gguf", "weights in GGUF's format", SAVE_MODEL(", gguf_file='#'")),
    BY_NAME("tf_model*.h5", "weights of TensorFlow", SAVE_MODEL(", from_tf=True")),
    BY_NAME("model.ckpt*", "weights of TensorFlow", SAVE_MODEL(", from_tf=True")),
    BY_NAME("flax_model*.msgpack", "weights of Flax", SAVE_MODEL(", from_flax=True")),
    BY_NAME("consolidated*", "weights under their authors' names: transformers has a script that converts them", NULL),
    /* Files that transformers' Trainer stores next to the weights and that are no weights. */
    BY_NAME("training_args.bin", NULL, NULL),
    BY_NAME("optimizer*.pt", NULL, NULL),
    BY_NAME("optimizer*.bin", NULL, NULL),
    BY_NAME("scheduler*.pt", NULL, NULL),
    BY_NAME("scaler*.pt", NULL, NULL),
    BY_NAME("rng_state*", NULL, NULL),
    {"*.pt", "a file of torch.save",
     "import torch; from safetensors.torch import save_file; save_file({k: v.clone() for k, v in torch.load('@/#', "
     "map_location='cpu', weights_only=True).items()}, '@/model.safetensors')",
     true},
    {"*.pth", "a file of torch.save", NULL, true},
    {"*.ckpt", "a file of torch.save", NULL, true},
    {"*.bin", "a file of torch.save", SAVE_MODEL(""), true},
    {"*.npz", "an archive of NumPy arrays", NULL, true},
    {"*.h5", "an HDF5 file", NULL, true},
};
#define NAMES (sizeof names / sizeof names[0])

static const named shards = {
    "*.safetensors",
    "tensors of a model in a file that is not model.safetensors, and in no model.safetensors.index.json",
    "import glob; from safetensors.torch import load_file, save_file; t = [i for f in "
    "glob.glob('@/*.safetensors') for i in load_file(f).items()]; assert len(t) == len(dict(t)), 'parts of ranks'; "
    "save_file(dict(t), '@/model.safetensors')",
    false};
static const named ranks = {
    "*.safetensors", "a rank's part of a model: python3 -m anyrank.convert merges the ranks' parts", NULL, false};

/* Finds a safetensors file of any name with parameters. Gradients have parameters' names too: files that this program
 * writes are skipped, and so are files that are not safetensors. */
static const named *named_safetensors(const char *folder, const char *name)
{
    ar_st_file *f = NULL;
    ARI_OWNED char *path = NULL;
    const named *found = NULL;
    if (strcmp(name, "grads.safetensors") == 0 || strcmp(name, "allowed.safetensors") == 0 ||
        ari_file_path(&path, folder, name) != AR_OK)
        return NULL;
    if (ari_st_open(&f, path) == AR_OK) {
        for (size_t i = 0; !found && i < ari_st_tensor_count(f); i++) {
            if (ari_ends_in(ari_st_at(f, i)->name, ".weight"))
                found = ari_st_metadata(f, "ANYRANK_PLACEMENT") ? &ranks : &shards;
        }
        ari_st_close(f);
    } else if (fnmatch("model*", name, 0) == 0) {
        found = &shards;
    }
    ar_error_clear();
    return found;
}

static bool begins_as_listed(const char *folder, const char *name)
{
    ARI_OWNED char *path = NULL;
    ARI_ENDED(ari_file_close) int fd = -1;
    size_t bytes = 0;
    ar_status st = ari_file_path(&path, folder, name);
    if (st == AR_OK)
        st = ari_file_open(&fd, &bytes, path);
    if (st == AR_OK)
        st = ari_unsupported_format_check_file(fd, bytes, path, ARI_WANT_TENSORS);
    ar_error_clear();
    return st == AR_ERR_FORMAT;
}

static const named *named_of(const char *folder, const char *name)
{
    for (size_t i = 0; i < NAMES; i++) {
        if (fnmatch(names[i].pattern, name, 0) == 0)
            return names[i].description && (!names[i].by_content || begins_as_listed(folder, name)) ? &names[i] : NULL;
    }
    return ari_ends_in(name, ".safetensors") ? named_safetensors(folder, name) : NULL;
}

/* extra_count: number of further files of this kind. A command for one file would otherwise use it, perhaps one rank's
 * part, instead of all files. */
static ar_status refuse_named(const char *folder, const char *name, size_t extra_count, const named *found)
{
    char convert[ARI_FORMAT_CONVERSION], count[40] = "";
    const bool parts = extra_count > 0 && found->lines && strchr(found->lines, '#');
    unsupported_format_conversion(convert, parts ? NULL : found->lines, folder, name);
    if (parts)
        snprintf(count, sizeof count, " and %zu more like it", extra_count);
    return ar_error_set(
        AR_ERR_FORMAT,
        "%s: holds %s%s, %s; weights are read from model.safetensors, or from shards with "
        "model.safetensors.index.json%s",
        ARI_SHOW(folder), ARI_SHOW(name), count, found->description,
        parts ? "; each may be one rank's part: save whole tensors, or save with torch.distributed.checkpoint, whose "
                "folders python3 -m anyrank.convert reads"
              : convert);
}

ar_status ari_unsupported_format_check_folder(const char *folder)
{
    ARI_OWNED struct dirent **list = NULL;
    const int n = scandir(folder, &list, NULL, alphasort);
    ar_status st = n < 0 ? ari_io_fail("list", folder) : AR_OK;
    const named *found = NULL;
    const char *name = NULL; /* the first name found */
    size_t extra_count = 0;
    bool reads = false;
    for (int i = 0; i < n; i++) {
        reads = reads || strcmp(list[i]->d_name, "model.safetensors") == 0 ||
                strcmp(list[i]->d_name, "model.safetensors.index.json") == 0;
        const named *match = named_of(folder, list[i]->d_name);
        extra_count += found && match == found;
        name = found ? name : list[i]->d_name;
        found = found ? found : match;
    }
    if (found && !reads)
        st = refuse_named(folder, name, extra_count, found);
    for (int i = 0; i < n; i++)
        free(list[i]);
    return st;
}
