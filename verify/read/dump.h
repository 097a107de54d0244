/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/dump.h"
#include "verify/read/map.h"
#include "verify/read/placement.h"

/* --- files of NumPy ----------------------------------------------------------------------------------------------- */
/* A NumPy .npy file, versions 1.0 to 3.0, with one array. */
typedef struct ari_npy {
    ar_st_entry entry; /* the array. Named by the file, without folder and ".npy" */
    bool fortran;      /* the first index runs fastest in the file; `box` says where its elements are */
    ar_dump_box box;   /* box of the whole array */
    void *map;
    size_t map_bytes;
} ari_npy;

/** Maps and checks a file; hostile input is safe. Release it with ari_npy_close. Errors: AR_ERR_IO; AR_ERR_FORMAT
 *  ("InvalidNpy: FILE: ..."); AR_ERR_UNSUPPORTED (big-endian numbers, dtypes that safetensors lacks, more than
 *  AR_ST_MAX_DIMS dimensions; the message says what to write instead); AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_npy_open(ari_npy **out, const char *path);
/** Accepts NULL. */
void ari_npy_close(ari_npy *f);

/* One file's part of one tensor. A mapping sets the fields up to and including `terms`. */
struct ari_piece {
    char *name; /* name of the full tensor */
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
    int replica, replicas; /* number of this replica and of all replicas; 0 of 0: unknown */
    size_t sample_rows;    /* rows along dimension 0 of each sample; 0: unknown */
    char *left_out;        /* reason why the piece belongs to no tensor; NULL: it belongs to one */
    bool more_copies;      /* true if some boxes have several copies with the same number */
};

/* --- a dump ------------------------------------------------------------------------------------------------------- */
/* A file of a dump. A dump is read in stages: files are opened and their ranks found (dump_files.c), their tensors are
 * listed as pieces by placement or mapping (dump_pieces.c), and pieces with equal names are combined into a tensor
 * (parts.c). */

typedef struct ari_dump_file {
    char *path;
    const char *name; /* the file name's last component, or a substitute for it */
    int rank;         /* -1: no rank's */
    const ar_st_file *st;
    ar_st_file *owned; /* NULL: the model's */
    ari_npy *npy;      /* the array of a file without `st`; `npy->box` locates its elements */
    ari_placement placement;
    bool placed; /* the file records where its tensors are */
} ari_dump_file;

/* A name whose pieces form no tensor: the capture left it out, or ranks have different lengths. */
typedef struct ari_ragged {
    const char *name;
    const ari_piece *piece; /* a piece that differs from the first of its name */
} ari_ragged;

struct ar_dump {
    char *path;
    ar_st_model *model;
    ari_dump_file *file;
    size_t files, cap_files;
    bool all_matched; /* from ar_dump_options */
    bool of_ranks;    /* files are ranks' */
    bool mapped;      /* true if a mapping assigns files to ranks */
    int ranks, world; /* number of ranks with files, and of all ranks; world 0: unknown */
    int *rank;        /* [ranks] ranks with files, ascending */
    ar_mesh mesh;
    ari_piece *piece; /* pieces sorted by name and rank */
    size_t pieces, cap_pieces;
    ar_dump_tensor *tensor; /* tensors sorted by name */
    size_t tensors;
    ari_ragged *ragged; /* [raggeds] sorted by name */
    size_t raggeds;
    ar_dump_part *part; /* parts of all tensors, one tensor after the other */
    ari_arena arena;    /* memory of all lists, names and boxes */
};

/** Opens the files of d->path. map: NULL, or a mapping, which may assign files to ranks. Finds the rank of each file by
 *  the mapping or its placements, otherwise by name or order, if they are ranks' files at all. Sorts them by rank. */
AR_NODISCARD ar_status ari_dump_open_files(ar_dump *d, const ari_map *map);
void ari_dump_close_file(ari_dump_file *f);
/** Returns the number of a file's entries in any format. */
size_t ari_dump_entries(const ari_dump_file *f);
const ar_st_entry *ari_dump_entry(const ari_dump_file *f, size_t i);

/** Lists the pieces of the files' tensors, or what a mapping makes of them, by name and rank. */
AR_NODISCARD ar_status ari_dump_list_pieces(ar_dump *d, ari_map *map);
/** Returns how many pieces from the first on have its name. */
size_t ari_piece_group(const ari_piece *p, size_t n);
/** Computes the full tensor of n pieces of one name, without its parts. */
AR_NODISCARD ar_status ari_parts_shape(ar_dump_tensor *t, const ar_dump *d, const ari_piece *piece, size_t n);

/** Builds tensors from the pieces and checks that the pieces cover them. */
AR_NODISCARD ar_status ari_dump_make_tensors(ar_dump *d);

/** Renames every tensor to name[ar_dump_count(d)], in the order of ar_dump_at, and sorts by name again. Copies the
 *  names. They must be distinct. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_dump_rename(ar_dump *d, const char *const *name);

/* Box of a tensor that becomes a tensor of its own. */
typedef struct ari_tensor_cut {
    char name[200];
    size_t start[AR_ST_MAX_DIMS], extent[AR_ST_MAX_DIMS]; /* range in the tensor */
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
/** Fills the empty list `cuts` with the tensors that replace a tensor; an empty list keeps the tensor. */
typedef ar_status (*ari_tensor_cuts_of)(void *user, const ar_dump_tensor *t, ari_tensor_cuts *cuts);
/** Adds a cut that is the whole tensor under this name. Errors: AR_ERR_MEMORY, AR_ERR_OVERFLOW (the name is too
 *  long). */
AR_NODISCARD ar_status ari_tensor_cuts_add(ari_tensor_cuts *cuts, const ar_dump_tensor *t, const char *name,
                                           const char *rest);
/** Selects one expert's `rows` rows from `row` on in a tensor of ndim dimensions with all experts of a layer. If
 *  `every` is not 0, selects the transpose of every `every`-th column from `row` on. */
void ari_tensor_cut_expert(ari_tensor_cut *c, int ndim, size_t expert, size_t row, size_t rows, size_t every);
/** Replaces tensors by what they become. A tensor stays if a rank's part cannot be split that way. Names must differ.
 *  Errors: AR_ERR_MEMORY, those of cuts_of. */
AR_NODISCARD ar_status ari_dump_split(ar_dump *d, ari_tensor_cuts_of cuts_of, void *user);

/* A reordering of a step's samples: sample i becomes sample place[i]. */
typedef struct ari_sample_order {
    int step;
    size_t samples;
    size_t *place; /* [samples] */
} ari_sample_order;
/** Reorders the samples of activations and their gradients in some steps; the dump records the rows of each sample. A
 *  tensor is reordered once, by the first order of its step. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_dump_reorder(ar_dump *d, const ari_sample_order *order, size_t orders);

/* --- reading boxes ------------------------------------------------------------------------------------------------ */
/* Elements that are contiguous in the full tensor. */
typedef struct ari_dump_run {
    const char *data; /* the first element in the file */
    size_t step;      /* distance of elements in the file, in bytes */
    size_t full;      /* the first's number in the full tensor, row-major */
    size_t count;
} ari_dump_run;

/** Calls f for each run of a box's elements within [start, start + count) of the full tensor, in ascending order. The
 *  first status other than AR_OK ends the loop and is returned. The dtype must have whole bytes. */
AR_NODISCARD ar_status ari_dump_each_run(const ar_dump_tensor *t, const ar_dump_part *p, const ar_dump_box *b,
                                         size_t start, size_t count,
                                         ar_status (*f)(void *user, const ari_dump_run *run), void *user);
/** Returns the first of a box's elements if they are contiguous in the file in the full tensor's order, otherwise
 *  NULL. */
const char *ari_dump_box_data(const ar_dump_tensor *t, const ar_dump_part *p, const ar_dump_box *b);
/** Copies a run's elements of `bytes` bytes each, closely packed. */
void ari_dump_copy_run(void *out, const ari_dump_run *run, size_t bytes);
/** Copies a box's elements among [start, start + count) of the full tensor from `data`, the file's tensor, to their
 *  place in `out`, which begins with element `start`. Only dtype and shape of t are used. */
void ari_dump_copy_box(char *out, const ar_dump_tensor *t, const char *data, const ar_dump_box *b, size_t start,
                       size_t count);
