/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_DUMP_DUMP_H
#define ARI_DUMP_DUMP_H

#include "anyrank/dump.h"
#include "dump/map.h"
#include "dump/npy.h"
#include "dump/placement.h"

/* How a dump is put together: files are opened and told their ranks (dump_files.c, file_ranks.c), what each holds of
 * which tensor is listed in pieces (dump_pieces.c), and the pieces of one name make a tensor (parts*.c). */

typedef struct ari_dump_file {
    char *path;
    const char *name; /* its last component, or what stands in for it */
    int rank;         /* -1: no rank's */
    const ar_st_file *st;
    ar_st_file *owned; /* NULL: the model's */
    ari_npy *npy;      /* without `st` */
    ar_st_entry array; /* its one array, whose elements `npy->box` finds */
    ari_placement placement;
    bool placed; /* it says itself where its tensors stand */
} ari_dump_file;

/* What one file holds of one tensor. */
typedef struct ari_piece {
    char *name;
    size_t file;
    int rank;
    const ar_st_entry *entry;
    bool told; /* a placement or a mapping says where it stands */
    int ndim;
    size_t shape[AR_ST_MAX_DIMS]; /* of the full tensor; where none is told, the end of the box */
    bool has_shape;
    size_t boxes;
    ar_dump_box *box;
    int replica, replicas; /* as told; 0 of 0: not told */
    bool more_copies;      /* of some boxes there are several copies of each number */
    bool partial;
    size_t term, terms; /* partial: which summand, of how many; terms 0: not known */
} ari_piece;

struct ar_dump {
    char *path;
    ar_st_model *model;
    ari_dump_file *file;
    size_t files, cap_files;
    bool whole;       /* of ar_dump_options */
    bool of_ranks;    /* files are ranks' */
    bool mapped;      /* and a mapping says which is whose */
    int ranks, world; /* world 0: not told */
    int *rank;        /* [ranks] ascending: those whose files there are */
    ar_dump_dim mesh[AR_DUMP_MAX_DIMS];
    size_t mesh_dims;
    ari_piece *piece; /* by name and rank */
    size_t pieces, cap_pieces;
    ar_dump_tensor *tensor; /* by name */
    size_t tensors;
    ar_dump_part *part; /* of all tensors, one after the other */
};

/** Opens the files of d->path. map: NULL or a mapping, which may say which files are whose. */
AR_NODISCARD ar_status ari_dump_open_files(ar_dump *d, const ari_map *map);
void ari_dump_close_file(ari_dump_file *f);
/** Entries of a file, whatever its format. */
size_t ari_dump_entries(const ari_dump_file *f);
const ar_st_entry *ari_dump_entry(const ari_dump_file *f, size_t i);

/** Tells the ranks of a folder's files by the mapping or their placements, or else by their names or their order, where
 *  they are ranks' at all; sorts them by rank. */
AR_NODISCARD ar_status ari_dump_tell_ranks(ar_dump *d, const ari_map *map);

/** Lists what the files hold, by name and rank. */
AR_NODISCARD ar_status ari_dump_list_pieces(ar_dump *d, const ari_map *map);
/** An empty piece of `name` at the end of d's list. */
AR_NODISCARD ar_status ari_piece_add(ari_piece **added, ar_dump *d, const char *name);
void ari_piece_sort(ari_piece *p, size_t n);
/** How many pieces from the first on have its name. */
size_t ari_piece_group(const ari_piece *p, size_t n);
/** Replaces the pieces by what a mapping makes of them: of what each file holds, where the mapping says whose file it
 *  is; else of full tensors. */
AR_NODISCARD ar_status ari_dump_map_pieces(ar_dump *d, const ari_map *map);
/** The full tensor of n pieces of one name, but for its parts. */
AR_NODISCARD ar_status ari_parts_shape(ar_dump_tensor *t, const ar_dump *d, const ari_piece *piece, size_t n);
void ari_piece_fini(ari_piece *p);
/** Makes one box of several that are the full tensor: packed blocks of a single rank. */
void ari_piece_join_boxes(ari_piece *p, int ndim, const size_t *shape, size_t count);

/** Makes the tensors of the pieces and checks that these cover them. */
AR_NODISCARD ar_status ari_dump_make_tensors(ar_dump *d);
/** Every element in one box, or in copies and summands as told; numbers the copies of the boxes. `piece` are the
 *  t->parts pieces of the tensor. */
AR_NODISCARD ar_status ari_parts_check(const ar_dump *d, const ar_dump_tensor *t, const ari_piece *piece);

/** Puts the names of the files' execution orders together: order of each tensor. */
AR_NODISCARD ar_status ari_dump_set_order(ar_dump *d);

#endif
