/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <jansson.h>

#include "anyrank/dump.h"
#include "ref/core/size.h"

/* A mapping file: how the tensors of files that say nothing of themselves make full tensors (pytorch.md). Names, which
 * dimension a dimension of the mesh divides, and how packed tensors are cut; all else numpy does before. */
#define ARI_MAP_STARS 8     /* of a glob */
#define ARI_MAP_NAME 16     /* bytes of a number's or a dimension's name */
#define ARI_MAP_BLOCKS 64   /* packed in one tensor */
#define ARI_MAP_BOXES 65536 /* of one tensor of one file */
#define ARI_MAP_RANKS 65536 /* of a mesh */

typedef struct ari_map_split {
    int mesh;    /* which dimension of the mesh divides .. */
    int dim;     /* .. which of the tensor; negative: from the end */
    bool zigzag; /* of 2n pieces, rank i has the i-th from either end */
} ari_map_split;
typedef struct ari_map_rule {
    size_t number;     /* from 1, for messages */
    const char *match; /* a glob: '*' any bytes, '?' one character, '\' before a byte: that byte */
    bool leave;
    const char *rename; /* NULL: the name stays */
    ari_map_split split[AR_MESH_DIMS];
    size_t splits;
    unsigned partial; /* dimensions of the mesh to sum over, from bit 0 */
    int dim;          /* that blocks are counted along; INT_MAX: not told */
    size_t block[ARI_MAP_BLOCKS];
    size_t blocks;
    bool straight;                    /* 'blocks' is null: what may look packed is cut straight across */
    const char *into[ARI_MAP_BLOCKS]; /* NULL: that block is left out */
    size_t intos;
    size_t groups;  /* 0: not told */
    int shape_dims; /* 0: not told */
    size_t shape[AR_ST_MAX_DIMS];
    bool shape_given[AR_ST_MAX_DIMS];
} ari_map_rule;
typedef struct ari_map {
    json_t *root;    /* owns all texts, but for the name */
    ari_arena arena; /* owns everything else, and what is made of tensors */
    char *name;
    ar_mesh mesh; /* of no dimensions: not told */
    int ranks;
    const char *files; /* a glob that says which rank a file is, with {tp} for digits; NULL: the files are no rank's */
    int number[AR_MESH_DIMS + 1]; /* [numbers] in its braces: dimensions of the mesh; AR_MESH_DIMS: the rank */
    int numbers;
    bool all_ruled; /* a tensor that no rule matches is an error; else it stays whole */
    int depth;      /* how many folders deep the files are: the slashes in their glob */
    ari_map_rule *rule;
    size_t rules;
} ari_map;

/** Reads and checks a mapping file. The caller owns *out. Errors: AR_ERR_IO, AR_ERR_FORMAT ("InvalidMapping: FILE: rule
 *  3: key 'dim': ..."), AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_map_load(ari_map **out, const char *path);
/** The same from text; `name` is for messages. */
AR_NODISCARD ar_status ari_map_parse(ari_map **out, const char *text, size_t length, const char *name);
/** Accepts NULL. */
void ari_map_free(ari_map *m);
ARI_OWNER(ari_map, ari_map_free)
/** "InvalidMapping: FILE: rule 3 ('glob'): ..."; rule NULL: of the whole file. */
ar_status ari_map_bad(const ari_map *m, const ari_map_rule *r, const char *format, ...) AR_PRINTF(3, 4);

/* --- names -------------------------------------------------------------------------------------------------------- */
/* A glob's matches in a name. */
typedef struct ari_map_match {
    const char *text;
    size_t star[ARI_MAP_STARS][2]; /* begin, end in the text */
    size_t number[AR_MESH_DIMS + 1];
} ari_map_match;
/** Matches a glob that was checked when its file was read. Every '*' takes as little as it can. */
bool ari_map_glob_match(const char *glob, const char *text, ari_map_match *m);
/** Fills a pattern that was checked: '*' is the glob's next one. */
AR_NODISCARD ar_status ari_map_fill(char **filled_name, ari_arena *a, const char *pattern, const ari_map_match *m);
/** Finds the rank of a file in the folder. *rank = -1: none, and the file is left out. Several files may belong to one
 *  rank. `name`: without the folder, or with the inner folders if the glob has them ("mp_rank_{tp}/model.safetensors").
 *  Errors: AR_ERR_FORMAT (coordinates outside the mesh). */
AR_NODISCARD ar_status ari_map_rank_of(const ari_map *m, const char *name, int *rank);

/* --- tensors ------------------------------------------------------------------------------------------------------ */
typedef struct ari_piece ari_piece; /* a file's part of a tensor (dump.h) */
/** Sets which summand the rank at these coordinates has in a sum over dimensions of the mesh, from bit 0. */
void ari_piece_set_term(ari_piece *p, const ar_mesh *mesh, const int *coords, unsigned summed_dims);

/* A file's tensor that a mapping is applied to. */
typedef struct ari_map_source {
    int rank; /* -1: the file is no rank's */
    const ar_st_entry *entry;
    bool is_full; /* the tensor is whole already: the rule's `shard` and `partial` are left out */
} ari_map_source;
/** Applies the first rule that matches an entry's name: one target, several (packed tensors with their own names), or
 *  none (left out). An entry without a matching rule is full, under its own name, or an error, as 'unmatched' says. The
 *  mapping owns the targets. Errors: AR_ERR_FORMAT ("InvalidMapping: ...": the rule does not fit the entry's shape or
 *  the mesh), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_map_apply(ari_map *m, const ari_map_source *source, ari_piece **out, size_t *n);
/** The rule for this name if it places the tensor, by `shard` or `partial`; else NULL. */
const ari_map_rule *ari_map_places(const ari_map *m, const char *name);
/** Sorts names. Returns a name that occurs twice; NULL if all differ. */
const char *ari_repeated_name(const char **name, size_t n);
