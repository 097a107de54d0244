/* SPDX-License-Identifier: Apache-2.0 */
/* Folders of other programs, by the names in them. */
#include <dirent.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "anyrank/safetensors.h"
#include "ref/core/text.h"
#include "ref/io/file.h"

/* In `lines` @ is the folder and # the file in it. by_content: the name alone says too little, the file must begin as
 * one of the list. */
typedef struct named {
    const char *pattern, *what, *lines;
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

/* The first pattern that fits decides. */
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
    /* Files that transformers' Trainer keeps next to the weights are no weights. */
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
static const named ranks = {"*.safetensors", "a rank's part of a model: anyrank reshard puts the ranks' parts together",
                            NULL, false};

/* A safetensors file of any name with parameters in it. Gradients have their names too: those that this program writes
 * are left out, as is what is no safetensors file. */
static const named *named_safetensors(const char *folder, const char *name)
{
    ar_st_file *f = NULL;
    ARI_OWNED char *path = NULL;
    const named *found = NULL;
    if (strcmp(name, "grads.safetensors") == 0 || strcmp(name, "allowed.safetensors") == 0 ||
        ari_file_path(&path, folder, name) != AR_OK)
        return NULL;
    if (ar_st_open(&f, path) == AR_OK) {
        for (size_t i = 0; !found && i < ar_st_count(f); i++) {
            if (ari_ends_in(ar_st_at(f, i)->name, ".weight"))
                found = ar_st_metadata(f, "ANYRANK_PLACEMENT") ? &ranks : &shards;
        }
        ar_st_close(f);
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
            return names[i].what && (!names[i].by_content || begins_as_listed(folder, name)) ? &names[i] : NULL;
    }
    return ari_ends_in(name, ".safetensors") ? named_safetensors(folder, name) : NULL;
}

/* more: other files of this kind. A line for one file would then take it, perhaps one rank's part, for all of them. */
static ar_status refuse_named(const char *folder, const char *name, size_t more, const named *found)
{
    char convert[ARI_FORMAT_CONVERSION], count[40] = "";
    const bool parts = more > 0 && found->lines && strchr(found->lines, '#');
    ari_unsupported_format_conversion(convert, parts ? NULL : found->lines, folder, name);
    if (parts)
        snprintf(count, sizeof count, " and %zu more like it", more);
    return ar_error_set(
        AR_ERR_FORMAT,
        "%s: holds %s%s, %s; weights are read from model.safetensors, or from shards with "
        "model.safetensors.index.json%s",
        ARI_SHOW(folder), ARI_SHOW(name), count, found->what,
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
    const char *name = NULL; /* the first that is found */
    size_t more = 0;
    bool reads = false;
    for (int i = 0; i < n; i++) {
        reads = reads || strcmp(list[i]->d_name, "model.safetensors") == 0 ||
                strcmp(list[i]->d_name, "model.safetensors.index.json") == 0;
        const named *one = named_of(folder, list[i]->d_name);
        more += found && one == found;
        name = found ? name : list[i]->d_name;
        found = found ? found : one;
    }
    if (found && !reads)
        st = refuse_named(folder, name, more, found);
    for (int i = 0; i < n; i++)
        free(list[i]);
    return st;
}
