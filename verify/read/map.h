/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <jansson.h>

#include "anyrank/dump.h"
#include "ref/core/size.h"

/* A mapping file: describes how tensors of files without metadata form full tensors (pytorch.md). It maps names, says
 * which tensor dimension each mesh dimension divides, and how packed tensors are cut. Anything else is left to numpy
 * beforehand. */
#define ARI_MAP_STARS 8     /* stars in a glob */
#define ARI_MAP_NAME 16     /* bytes of a number's or a dimension's name */
#define ARI_MAP_BLOCKS 64   /* blocks packed in one tensor */
#define ARI_MAP_BOXES 65536 /* boxes of one tensor in one file */
#define ARI_MAP_RANKS 65536 /* ranks in a mesh */

typedef struct ari_map_split {
    int mesh;    /* index of the dividing mesh dimension */
    int dim;     /* the divided tensor dimension; negative: counted from the end */
    bool zigzag; /* true: the dimension is cut into 2n pieces, and rank i has the i-th piece from either end */
} ari_map_split;
typedef struct ari_map_rule {
    size_t number;     /* number of the rule from 1, for messages */
    const char *match; /* glob: '*' matches any bytes, '?' one character, '\' escapes a byte */
    bool leave;
    const char *rename; /* NULL: the name stays */
    ari_map_split split[AR_MESH_DIMS];
    size_t splits;
    unsigned partial; /* dimensions of the mesh to sum over, from bit 0 */
    int dim;          /* dimension along which blocks are counted; INT_MAX: not given */
    size_t block[ARI_MAP_BLOCKS];
    size_t blocks;
    bool straight;                    /* true if 'blocks' is null: the tensor is divided as a whole although its name
                                         suggests packed blocks */
    const char *into[ARI_MAP_BLOCKS]; /* names of the blocks' tensors; NULL: the block is left out */
    size_t intos;
    size_t groups;  /* number of groups; 0: not given */
    int shape_dims; /* number of dimensions in `shape`; 0: not given */
    size_t shape[AR_ST_MAX_DIMS];
    bool shape_given[AR_ST_MAX_DIMS];
} ari_map_rule;
typedef struct ari_map {
    json_t *root;    /* the parsed JSON, which owns all texts except the name */
    ari_arena arena; /* owns everything else, and what is made of tensors */
    char *name;
    ar_mesh mesh; /* the mesh; no dimensions: not given */
    int ranks;
    const char *files; /* glob that shows a file's rank, with {tp} for digits; NULL: files do not belong to ranks */
    int number[AR_MESH_DIMS + 1]; /* [numbers] mesh dimension of each number in braces; AR_MESH_DIMS: the rank */
    int numbers;
    bool all_ruled; /* true: a tensor that matches no rule is an error; false: it stays whole */
    int depth;      /* depth of the files' folders: the number of slashes in their glob */
    ari_map_rule *rule;
    size_t rules;
} ari_map;

/** Reads and checks a mapping file. The caller owns *out. Errors: AR_ERR_IO, AR_ERR_FORMAT ("InvalidMapping: FILE: rule
 *  3: key 'dim': ..."), AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_map_load(ari_map **out, const char *path);
/** Parses a mapping from text; `name` is used in messages. */
AR_NODISCARD ar_status ari_map_parse(ari_map **out, const char *text, size_t length, const char *name);
/** Accepts NULL. */
void ari_map_free(ari_map *m);
ARI_OWNER(ari_map, ari_map_free)
/** Sets the error "InvalidMapping: FILE: rule 3 ('glob'): ..."; rule NULL: the error concerns the whole file. */
ar_status ari_map_bad(const ari_map *m, const ari_map_rule *r, const char *format, ...) AR_PRINTF(3, 4);

/* --- names -------------------------------------------------------------------------------------------------------- */
/* A glob's matches in a name. */
typedef struct ari_map_match {
    const char *text;
    size_t star[ARI_MAP_STARS][2]; /* begin, end in the text */
    size_t number[AR_MESH_DIMS + 1];
} ari_map_match;
/** Matches a glob that was checked when its file was read. Every '*' matches as few bytes as possible. */
bool ari_map_glob_match(const char *glob, const char *text, ari_map_match *m);
/** Fills in a checked pattern: each '*' is replaced by the text that the glob's next '*' matched. */
AR_NODISCARD ar_status ari_map_fill(char **filled_name, ari_arena *a, const char *pattern, const ari_map_match *m);
/** Finds the rank of a file in the folder. *rank = -1: none, and the file is left out. Several files may belong to one
 *  rank. `name`: without the folder, or with the inner folders if the glob has them ("mp_rank_{tp}/model.safetensors").
 *  Errors: AR_ERR_FORMAT (coordinates outside the mesh). */
AR_NODISCARD ar_status ari_map_rank_of(const ari_map *m, const char *name, int *rank);

/* --- tensors ------------------------------------------------------------------------------------------------------ */
typedef struct ari_piece ari_piece; /* a file's part of a tensor (dump.h) */
/** Sets which summand the rank at these coordinates has in a sum over dimensions of the mesh, from bit 0. */
void ari_piece_set_term(ari_piece *p, const ar_mesh *mesh, const int *coords, unsigned summed_dims);

/* A file's tensor to which a mapping is applied. */
typedef struct ari_map_source {
    int rank; /* -1: the file is no rank's */
    const ar_st_entry *entry;
    bool is_full; /* true if the tensor is already whole: the rule's `shard` and `partial` are ignored */
} ari_map_source;
/** Applies the first rule that matches an entry's name: one target, several (packed tensors with their own names), or
 *  none (left out). An entry without a matching rule is full, under its own name, or an error, as 'unmatched' says. The
 *  mapping owns the targets. Errors: AR_ERR_FORMAT ("InvalidMapping: ...": the rule does not fit the entry's shape or
 *  the mesh), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_map_apply(ari_map *m, const ari_map_source *source, ari_piece **out, size_t *n);
/** Returns the rule that places this name by `shard` or `partial`, or NULL. */
const ari_map_rule *ari_map_places(const ari_map *m, const char *name);
/** Sorts names. Returns a name that occurs twice; NULL if all differ. */
const char *ari_repeated_name(const char **name, size_t n);
