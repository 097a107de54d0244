/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_DUMP_MAP_H
#define ARI_DUMP_MAP_H

#include "anyrank/dump.h"

/* A mapping file: how the tensors of files that say nothing of themselves make full tensors (docs/dumps.md). */
typedef struct ari_map ari_map;

/** Reads and checks one. Gives. Errors: AR_ERR_IO, AR_ERR_FORMAT ("InvalidMapping: FILE: rule 3: key 'dim': ..."),
 *  AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_map_load(ari_map **gives, const char *path);
/** The same from text; `name` is for messages. */
AR_NODISCARD ar_status ari_map_parse(ari_map **gives, const char *text, size_t length, const char *name);
/** Accepts NULL. */
void ari_map_free(ari_map *m);

/** The mesh, outermost first; 0 dimensions: not told. Borrowed. */
size_t ari_map_mesh(const ari_map *m, const ar_dump_dim **dims);
/** Whether the mapping says which rank a file is; without, the files are no rank's. */
bool ari_map_has_ranks(const ari_map *m);
/** Which rank a file of the folder is: by the mapping's file pattern. *rank = -1: none, the file is left out. Several
 *  files may be one rank's. Errors: AR_ERR_FORMAT (coordinates outside the mesh). `name`: without the folder; with the
 *  folders between where the pattern has them ("mp_rank_{tp}/model.safetensors"). */
AR_NODISCARD ar_status ari_map_rank_of(const ari_map *m, const char *name, int *rank);
/** How many folders deep the pattern's files lie: the slashes in it. */
int ari_map_depth(const ari_map *m);

/** What one tensor of one file is part of. */
typedef struct ari_map_target {
    char *name; /* of the full tensor */
    int ndim;
    size_t shape[AR_ST_MAX_DIMS];
    size_t boxes;
    ar_dump_box *box;
    bool partial;
    size_t term, terms; /* partial: which summand, by the dimensions of the mesh that it is summed over, of how many */
} ari_map_target;
/** The entry of this name in another rank's files; NULL where it has none. A split that is uneven is told by what each
 *  rank has. */
typedef const ar_st_entry *(*ari_map_peer)(void *user, int rank, const char *name);
/** Applies the first rule that matches an entry's name: one target, several (packed tensors under names of their own),
 *  or none (left out). An entry that no rule matches is whole, under its own name. rank -1: the file is no rank's.
 *  peer NULL: every rank has as much as this one. Gives the targets; ari_map_targets_free. Errors: AR_ERR_FORMAT
 * ("InvalidMapping: ...": the rule does not fit the entry's shape or the mesh), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_map_apply(const ari_map *m, int rank, const ar_st_entry *entry, ari_map_peer peer,
                                     void *user, ari_map_target **gives, size_t *n);
void ari_map_targets_free(ari_map_target *t, size_t n);

#endif
