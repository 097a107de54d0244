/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <jansson.h>

#include "anyrank/dump.h"
#include "ref/core/size.h"

/* A mapping file: how the tensors of files that say nothing of themselves make full tensors (pytorch.md). */
typedef struct ari_map ari_map;
typedef struct ari_map_rule ari_map_rule;

/** Reads and checks one. Gives. Errors: AR_ERR_IO, AR_ERR_FORMAT ("InvalidMapping: FILE: rule 3: key 'dim': ..."),
 *  AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_map_load(ari_map **gives, const char *path);
/** The same from text; `name` is for messages. */
AR_NODISCARD ar_status ari_map_parse(ari_map **gives, const char *text, size_t length, const char *name);
/** Accepts NULL. */
void ari_map_free(ari_map *m);
ARI_OWNER(ari_map, ari_map_free)

/** Which rank a file of the folder is: by the mapping's file pattern. *rank = -1: none, the file is left out. Several
 *  files may be one rank's. Errors: AR_ERR_FORMAT (coordinates outside the mesh). `name`: without the folder; with the
 *  folders between where the pattern has them ("mp_rank_{tp}/model.safetensors"). */
AR_NODISCARD ar_status ari_map_rank_of(const ari_map *m, const char *name, int *rank);

/* One file's part of one tensor. A mapping sets the fields down to `terms`. */
typedef struct ari_piece {
    char *name; /* of the full tensor */
    int ndim;
    size_t shape[AR_ST_MAX_DIMS]; /* of the full tensor; where none is told, the end of the box */
    bool has_shape;
    bool given; /* a placement or a mapping says where it stands */
    size_t boxes;
    ar_dump_box *box;
    bool partial;
    size_t term,
        terms; /* partial: which summand, by the dimensions of the mesh that it is summed over, of how many; terms
                           0: not known */
    size_t file;
    int rank;
    const ar_st_entry *entry;
    int replica, replicas; /* as told; 0 of 0: not told */
    size_t sample_rows;    /* rows along dimension 0 that each sample has; 0: not told */
    char *left_out;        /* why it is a part of no tensor; NULL: it is one */
    bool more_copies;      /* of some boxes there are several copies of each number */
} ari_piece;
/** The entry of this name in another rank's files; NULL where it has none. A split that is uneven is told by what each
 *  rank has. */
typedef const ar_st_entry *(*ari_map_peer)(void *user, int rank, const char *name);
/** Applies the first rule that matches an entry's name: one target, several (packed tensors under names of their own),
 *  or none (left out). An entry that no rule matches is whole, under its own name, or an error by 'unmatched'. rank -1:
 *  the file is no rank's. peer NULL: every rank has as much as this one. The targets are the mapping's. Errors:
 *  AR_ERR_FORMAT ("InvalidMapping: ...": the rule does not fit the entry's shape or the mesh), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_map_apply(ari_map *m, int rank, const ar_st_entry *entry, ari_map_peer peer, void *user,
                                     ari_piece **gives, size_t *n);
/** Which summand the rank at these coordinates has, of a sum over dimensions of the mesh, from bit 0. */
void ari_piece_set_term(ari_piece *p, const ar_mesh *mesh, const int *at, unsigned over);
/** The same of a tensor that is whole already: the rule's `shard` and `partial` are left out, the rest is applied. */
AR_NODISCARD ar_status ari_map_apply_to_whole(ari_map *m, int rank, const ar_st_entry *entry, ari_piece **gives,
                                              size_t *n);
/** True if the rule for this name on this rank places the tensor: `shard` or `partial`. *rule: it,
 *  for messages; NULL: there is none. */
bool ari_map_places(const ari_map *m, int rank, const char *name, const ari_map_rule **rule);
/** Sorts names. Returns one that is there twice; NULL where all differ. */
const char *ari_repeated_name(const char **name, size_t n);

/* --- what the files of the mapping share -------------------------------------------------------------------------- */
#define ARI_MAP_PATTERN 512  /* tokens of a glob, bytes of a name's pattern */
#define ARI_MAP_CAPTURES 8   /* '*' of a glob; numbers in braces of one */
#define ARI_MAP_NAME 16      /* bytes of a number's or a dimension's name */
#define ARI_MAP_BLOCKS 64    /* packed in one tensor */
#define ARI_MAP_RULES 4096   /* of a file */
#define ARI_MAP_BOXES 65536  /* of one tensor of one file */
#define ARI_MAP_TARGETS 4096 /* tensors that one is taken apart into */
#define ARI_MAP_MATCHED 4096 /* bytes of the longest name that a glob is held against */
#define ARI_MAP_RANKS 65536  /* of a mesh */

/* --- patterns of names (map_name.c) ------------------------------------------------------------------------------- */
typedef enum ari_map_token_kind { ARI_MAP_BYTE, ARI_MAP_ANY, ARI_MAP_STAR, ARI_MAP_NUMBER } ari_map_token_kind;
typedef struct ari_map_token {
    ari_map_token_kind kind;
    char byte;
    int number; /* which of the glob's */
} ari_map_token;
/* '*' any bytes, '?' one character, {name} all the digits that stand there, '\' before a byte: that byte itself. */
typedef struct ari_map_glob {
    ari_map_token *token;
    size_t tokens;
    int stars, numbers;
    char name[ARI_MAP_CAPTURES][ARI_MAP_NAME]; /* of numbers */
} ari_map_glob;
/* A glob's matches in a name. */
typedef struct ari_map_match {
    const char *text;
    size_t star[ARI_MAP_CAPTURES][2]; /* begin, end in the text */
    size_t number[ARI_MAP_CAPTURES];
} ari_map_match;
/** Compiles. *problem: what is wrong, static storage, with AR_ERR_FORMAT; AR_ERR_MEMORY sets the error itself. */
AR_NODISCARD ar_status ari_map_glob_compile(ari_map_glob *g, ari_arena *a, const char *text, const char **problem);
bool ari_map_glob_match(const ari_map_glob *g, const char *text, ari_map_match *m);
/** The length of the name of letters, digits and '_' at the start of `text`; 0 if it starts with a digit. */
size_t ari_map_name_length(const char *text);
/** The number that the glob has under this name; -1: none. */
int ari_map_number(const ari_map_glob *g, const char *name);

/* --- rules (map_rule.c) ------------------------------------------------------------------------------------------- */
typedef struct ari_map_split {
    int mesh;    /* which dimension of the mesh divides .. */
    int dim;     /* .. which of the tensor; negative: from the end */
    bool zigzag; /* of 2n pieces, rank i has the i-th from either end */
} ari_map_split;
struct ari_map_rule {
    size_t number; /* from 1, for messages */
    const char *match;
    ari_map_glob glob;
    bool leave;
    const char *rename;    /* NULL: the name stays */
    bool at[AR_MESH_DIMS]; /* holds only where the coordinate is one of .. */
    const json_t *at_list[AR_MESH_DIMS];
    ari_map_split split[AR_MESH_DIMS];
    size_t splits;
    unsigned partial; /* dimensions of the mesh that it is to be summed over, from bit 0 */
    int dim;          /* that blocks and index are counted along; INT_MAX: not told */
    size_t block[ARI_MAP_BLOCKS];
    size_t blocks;
    bool straight;                    /* 'blocks' is null: what may look packed is cut straight across */
    const char *into[ARI_MAP_BLOCKS]; /* NULL: that block is left out */
    size_t intos;
    size_t unit, groups; /* 0: not told */
    bool per_block;      /* the first split of the dimension divides every block by itself */
    const char *unstack; /* names of the tensors, one for each index; NULL */
    int shape_dims;      /* 0: not told */
    size_t shape[AR_ST_MAX_DIMS];
    bool shape_given[AR_ST_MAX_DIMS];
    bool transpose;
    int permuted; /* dimensions that permute tells; 0: none */
    int permute[AR_ST_MAX_DIMS];
};

struct ari_map {
    json_t *root;    /* owns all texts, but for the name */
    ari_arena arena; /* of the rest, and of what is made of tensors */
    char *name;
    ar_mesh mesh; /* of no dimensions: not told */
    int ranks;
    bool has_files; /* the mapping says which rank a file is; without, the files are no rank's */
    ari_map_glob files;
    bool all_ruled; /* a tensor that no rule matches is an error; else it stays whole */
    int depth;      /* how many folders deep the pattern's files are: the slashes in it */
    ari_map_rule *rule;
    size_t rules;
};

/** "InvalidMapping: FILE: rule 3 ('glob'): ..."; rule NULL: of the whole file. */
ar_status ari_map_bad(const ari_map *m, const ari_map_rule *r, const char *format, ...) AR_PRINTF(3, 4);
/** Reads rule `number`, from 1. Errors: as ari_map_parse. */
AR_NODISCARD ar_status ari_map_rule_parse(ari_map *m, ari_map_rule *r, size_t number, const json_t *object);
/** Refuses keys that are none of these, with a "did you mean". */
AR_NODISCARD ar_status ari_map_check_keys(const ari_map *m, const ari_map_rule *r, const json_t *object,
                                          const char *const *keys, size_t n);

/* --- places (map_runs.c) ------------------------------------------------------------------------------------------ */
/* count elements of a dimension, from `local` of the file's tensor on, stand from `full` of the full one on. */
typedef struct ari_map_run {
    size_t local, full, count;
} ari_map_run;
typedef struct ari_map_runs {
    ari_map_run *run;
    size_t n, capacity;
} ari_map_runs;
/* One tensor of one file, and the rule it falls under. */
typedef struct ari_map_place {
    const ari_map *m;
    ari_arena *arena; /* the mapping's */
    const ari_map_rule *r;
    const ar_st_entry *entry;
    int rank;
    int at[AR_MESH_DIMS];
    ari_map_match match;
    ari_map_peer peer;
    void *user;
} ari_map_place;
/** Fills a pattern: '*' is the glob's next one, {*2} its second one, {expression} a number computed from captured
 *  numbers, coordinates, {rank}, {index} of a tensor that is taken apart and integers with + - * / % and brackets. With
 *  p->entry NULL nothing is filled, the pattern is only checked. Errors: as ari_map_glob_compile. */
AR_NODISCARD ar_status ari_map_fill(char **gives, const char *pattern, const ari_map_place *p, size_t index,
                                    const char **problem);
/** "InvalidMapping: FILE: rule 3 ('glob'): tensor 'x' of rank 1: ...". */
ar_status ari_map_misfit(const ari_map_place *p, const char *format, ...) AR_PRINTF(2, 3);
/** The places of dimension `dim`'s elements in the full tensor, in ascending order of `local`, and the full number.
 *  Errors: AR_ERR_FORMAT, AR_ERR_OVERFLOW, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_map_runs_of(const ari_map_place *p, int dim, ari_map_runs *runs, size_t *full);
AR_NODISCARD ar_status ari_map_runs_add(const ari_map_place *p, ari_map_runs *runs, size_t local, size_t full,
                                        size_t count);
/** Which dimension blocks are counted along. Errors: AR_ERR_FORMAT. */
AR_NODISCARD ar_status ari_map_block_dim(const ari_map_place *p, int *dim);
/** Elements of block k, of a packed dimension of `full` ones. Errors: AR_ERR_FORMAT (they do not fill it). */
AR_NODISCARD ar_status ari_map_block_size(const ari_map_place *p, size_t full, size_t k, size_t *out);
