/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/dump.h"
#include "verify/read/map.h"
#include "verify/read/placement.h"

/* --- files of NumPy ----------------------------------------------------------------------------------------------- */
/* NumPy's .npy, versions 1.0 to 3.0: one array a file. */
typedef struct ari_npy {
    ar_st_entry entry; /* the array. Named by the file, without folder and ".npy" */
    bool fortran;      /* the first index runs fastest in the file; `box` says where its elements are */
    ar_dump_box box;   /* the whole array */
    void *map;
    size_t map_bytes;
} ari_npy;

/** Maps and checks a file; hostile input is safe. Release it with ari_npy_close. Errors: AR_ERR_IO; AR_ERR_FORMAT
 *  ("InvalidNpy: FILE: ..."); AR_ERR_UNSUPPORTED (big-endian numbers, dtypes that safetensors lacks, more than
 *  AR_ST_MAX_DIMS dimensions; the message says what to write instead); AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_npy_open(ari_npy **out, const char *path);
/** Accepts NULL. */
void ari_npy_close(ari_npy *f);

/* One file's part of one tensor. A mapping sets the fields down to `terms`. */
struct ari_piece {
    char *name; /* of the full tensor */
    int ndim;
    size_t shape[AR_ST_MAX_DIMS]; /* shape of the full tensor, or the end of the box if unknown */
    bool has_shape;
    bool is_placed; /* a placement or a mapping gives its position */
    size_t boxes;
    ar_dump_box *box;
    bool partial;
    size_t term,
        terms; /* partial: index of the summand, by the mesh dimensions that are summed over, and number of summands;
                  0: unknown */
    size_t file;
    int rank;
    const ar_st_entry *entry;
    int replica, replicas; /* as told; 0 of 0: not told */
    size_t sample_rows;    /* rows along dimension 0 that each sample has; 0: not told */
    char *left_out;        /* why it is a part of no tensor; NULL: it is one */
    bool more_copies;      /* of some boxes there are several copies of each number */
};

/* --- a dump ------------------------------------------------------------------------------------------------------- */
/* Stages of reading a dump: files are opened and their ranks found (dump_files.c), their tensors listed in pieces, by
 * placement or mapping (dump_pieces.c), and the pieces of one name combined into a tensor (parts.c). */

typedef struct ari_dump_file {
    char *path;
    const char *name; /* its last component, or what stands in for it */
    int rank;         /* -1: no rank's */
    const ar_st_file *st;
    ar_st_file *owned; /* NULL: the model's */
    ari_npy *npy;      /* without `st`: its one array, whose elements `npy->box` finds */
    ari_placement placement;
    bool placed; /* the file records where its tensors are */
} ari_dump_file;

/* Parts of no tensor: those that the capture left out, or that ranks have in other lengths. */
typedef struct ari_ragged {
    const char *name;
    const ari_piece *piece; /* one that is not as the first of its name */
} ari_ragged;

struct ar_dump {
    char *path;
    ar_st_model *model;
    ari_dump_file *file;
    size_t files, cap_files;
    bool all_matched; /* of ar_dump_options */
    bool of_ranks;    /* files are ranks' */
    bool mapped;      /* and a mapping says which is whose */
    int ranks, world; /* world 0: not told */
    int *rank;        /* [ranks] ascending: those whose files there are */
    ar_mesh mesh;
    ari_piece *piece; /* by name and rank */
    size_t pieces, cap_pieces;
    ar_dump_tensor *tensor; /* by name */
    size_t tensors;
    ari_ragged *ragged; /* [raggeds] by name */
    size_t raggeds;
    ar_dump_part *part; /* of all tensors, one after the other */
    ari_arena arena;    /* of all lists, names and boxes */
};

/** Opens the files of d->path. map: NULL, or a mapping, which may assign files to ranks. Finds the rank of each file by
 *  the mapping or its placements, otherwise by name or order, if they are ranks' files at all. Sorts them by rank. */
AR_NODISCARD ar_status ari_dump_open_files(ar_dump *d, const ari_map *map);
void ari_dump_close_file(ari_dump_file *f);
/** Entries of a file, whatever its format. */
size_t ari_dump_entries(const ari_dump_file *f);
const ar_st_entry *ari_dump_entry(const ari_dump_file *f, size_t i);

/** Lists the pieces of the files' tensors, or what a mapping makes of them, by name and rank. */
AR_NODISCARD ar_status ari_dump_list_pieces(ar_dump *d, ari_map *map);
/** The number of pieces from the first on that have its name. */
size_t ari_piece_group(const ari_piece *p, size_t n);
/** The full tensor of n pieces of one name, but for its parts. */
AR_NODISCARD ar_status ari_parts_shape(ar_dump_tensor *t, const ar_dump *d, const ari_piece *piece, size_t n);

/** Makes the tensors of the pieces and checks that these cover them. */
AR_NODISCARD ar_status ari_dump_make_tensors(ar_dump *d);

/** Renames every tensor to name[ar_dump_count(d)], in the order of ar_dump_at, and sorts by name again. Copies the
 *  names. They must be distinct. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_dump_rename(ar_dump *d, const char *const *name);

/* Box of a tensor that becomes a tensor of its own. */
typedef struct ari_tensor_cut {
    char name[200];
    size_t start[AR_ST_MAX_DIMS], extent[AR_ST_MAX_DIMS]; /* in the tensor */
    int drop;                                             /* number of leading dimensions of extent 1 to drop */
    size_t fold;  /* splits the first remaining dimension in two, of which the second has this extent; 0: no split */
    size_t every; /* takes every n-th element of the last dimension, starting with the first; 0: all */
    bool turned;  /* transposes the remaining two dimensions */
} ari_tensor_cut;
typedef struct ari_tensor_cuts {
    ari_arena *arena;
    ari_tensor_cut *cut;
    size_t n, capacity;
} ari_tensor_cuts;
/** Adds to `cuts`, which is empty, all that a tensor is to become; nothing: it stays. */
typedef ar_status (*ari_tensor_cuts_of)(void *user, const ar_dump_tensor *t, ari_tensor_cuts *cuts);
/** Adds one that is all of a tensor, under this name. Errors: AR_ERR_MEMORY, AR_ERR_OVERFLOW (the name is longer). */
AR_NODISCARD ar_status ari_tensor_cuts_add(ari_tensor_cuts *cuts, const ar_dump_tensor *t, const char *name,
                                           const char *rest);
/** It becomes, of a tensor of ndim dimensions that holds all experts of a layer, one expert's `rows` rows from `row`
 *  on; or (every not 0) the transpose of every `every`-th of its last dimension from `row` on. */
void ari_tensor_cut_expert(ari_tensor_cut *c, int ndim, size_t expert, size_t row, size_t rows, size_t every);
/** Replaces tensors by what they become. A tensor stays if a rank's part cannot be split that way. Names must differ.
 *  Errors: AR_ERR_MEMORY, those of cuts_of. */
AR_NODISCARD ar_status ari_dump_split(ar_dump *d, ari_tensor_cuts_of cuts_of, void *user);

/* A step's samples in another order: sample i becomes sample place[i]. */
typedef struct ari_sample_order {
    int step;
    size_t samples;
    size_t *place; /* [samples] */
} ari_sample_order;
/** Reorders the samples of activations and their gradients in some steps; the dump records the rows of each sample. A
 *  tensor is reordered once, by the first order of its step. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_dump_reorder(ar_dump *d, const ari_sample_order *order, size_t orders);

/* --- reading boxes ------------------------------------------------------------------------------------------------ */
/* Elements that lie next to each other in the full tensor. */
typedef struct ari_dump_run {
    const char *data; /* the first of them in the file */
    size_t step;      /* from one to the next there, in bytes */
    size_t full;      /* the first's number in the full tensor, row-major */
    size_t count;
} ari_dump_run;

/** Calls f for every run of a box's elements among [start, start + count) of the full tensor, in ascending order. A
 *  status other than AR_OK ends it and is returned. The dtype has whole bytes. */
AR_NODISCARD ar_status ari_dump_each_run(const ar_dump_tensor *t, const ar_dump_part *p, const ar_dump_box *b,
                                         size_t start, size_t count,
                                         ar_status (*f)(void *user, const ari_dump_run *run), void *user);
/** The first of a box's elements if they lie in the file without gaps, in the full tensor's order; else NULL. */
const char *ari_dump_box_data(const ar_dump_tensor *t, const ar_dump_part *p, const ar_dump_box *b);
/** Copies a run's elements of `bytes` bytes each, closely packed. */
void ari_dump_copy_run(void *out, const ari_dump_run *run, size_t bytes);
/** Copies a box's elements among [start, start + count) of the full tensor from `data`, the file's tensor, to their
 *  place in `out`, which begins with element `start`. Only dtype and shape of t are used. */
void ari_dump_copy_box(char *out, const ar_dump_tensor *t, const char *data, const ar_dump_box *b, size_t start,
                       size_t count);
