/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "ref/io/json.h"
#include "ref/io/safetensors.h"
#include "ref/io/safetensors_private.h"

ar_status ari_st_shard_plan(size_t *shard, size_t *shards, const ar_st_tensor *tensors, size_t n, size_t shard_bytes)
{
    size_t in_shard = 0, now = 0;
    if (shard_bytes == 0)
        return ar_error_set(AR_ERR_ARG, "files of at most 0 bytes hold no tensors, expected at least 1");
    for (size_t i = 0; i < n; i++) {
        size_t bytes = 0;
        AR_TRY(ari_st_tensor_bytes(&bytes, &tensors[i]));
        if (in_shard > 0 && (in_shard > shard_bytes || bytes > shard_bytes - in_shard)) {
            now++;
            in_shard = 0;
        }
        AR_TRY(ari_add_size(&in_shard, in_shard, bytes));
        shard[i] = now;
    }
    *shards = now + 1;
    return AR_OK;
}

const char *ari_st_shard_name(char name[AR_ST_SHARD_NAME], size_t shard, size_t shards)
{
    if (shards <= 1)
        snprintf(name, AR_ST_SHARD_NAME, ARI_ST_SINGLE);
    else
        snprintf(name, AR_ST_SHARD_NAME, "model-%05zu-of-%05zu.safetensors", shard + 1, shards);
    return name;
}

/* Readers take model.safetensors where both are there, and would never see the shards. */
static ar_status check_single(const char *folder)
{
    struct stat info;
    ARI_OWNED char *path = NULL;
    AR_TRY(ari_file_path(&path, folder, ARI_ST_SINGLE));
    const bool there = lstat(path, &info) == 0;
    return there ? ar_error_set(AR_ERR_ARG,
                                "%s: has " ARI_ST_SINGLE
                                ", which readers take in place of an index: write to another folder, or remove it",
                                ARI_SHOW(folder))
                 : AR_OK;
}

static ar_status no_memory(const char *folder)
{
    return ar_error_set(AR_ERR_MEMORY, "%s: no memory for its index", ARI_SHOW(folder));
}

/* Takes a count as JSON's integers do. */
static json_t *integer(size_t n)
{
    return n > INT64_MAX ? NULL : json_integer((json_int_t)n);
}

/* weight_map, in the order of names, as the official tools sort it. */
static ar_status fill_map(json_t *map, const ar_st_tensor **sorted, size_t n, const ar_st_tensor *tensors,
                          const size_t *shard, size_t shards, const char *folder)
{
    AR_TRY(ari_st_sort(sorted, tensors, n, ""));
    for (size_t i = 0; i < n; i++) {
        char file[AR_ST_SHARD_NAME];
        ari_st_shard_name(file, shard[sorted[i] - tensors], shards);
        if (json_object_set_new(map, sorted[i]->name, json_string(file)) != 0)
            return no_memory(folder);
    }
    return AR_OK;
}

static ar_status save_index(const char *folder, json_t *map, size_t total)
{
    ARI_OWNED char *path = NULL;
    json_auto_t *root = json_object(), *metadata = json_object();
    const bool whole = json_object_set_new(metadata, "total_size", integer(total)) == 0 &&
                       json_object_set(root, "metadata", metadata) == 0 &&
                       json_object_set(root, "weight_map", map) == 0;
    AR_TRY(ari_file_path(&path, folder, ARI_ST_INDEX));
    return whole ? ari_json_save(root, path) : no_memory(folder);
}

ar_status ari_st_write_index(const char *folder, const ar_st_tensor *tensors, size_t n, const size_t *shard,
                             size_t shards)
{
    size_t total = 0;
    AR_TRY(check_single(folder));
    json_auto_t *map = json_object();
    ARI_OWNED const ar_st_tensor **sorted = calloc(n + 1, sizeof(const ar_st_tensor *));
    if (sorted == NULL || map == NULL)
        return no_memory(folder);
    for (size_t i = 0; i < n; i++) {
        size_t bytes = 0;
        AR_TRY(ari_st_tensor_bytes(&bytes, &tensors[i]));
        AR_TRY(ari_add_size(&total, total, bytes));
    }
    AR_TRY(fill_map(map, sorted, n, tensors, shard, shards, folder));
    return save_index(folder, map, total);
}
