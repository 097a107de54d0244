/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_DUMP_DUMP_H
#define ARI_DUMP_DUMP_H

#include "anyrank/dump.h"
#include "dump/placement.h"

/* How a dump is put together: files are opened and told their ranks (dump_files.c, dump_ranks.c), what each holds of
 * which tensor is listed in pieces (dump_pieces.c), and the pieces of one name make a tensor (parts*.c). */

typedef struct ari_dump_file {
    char *path;
    const char *name; /* its last component, or what stands in for it */
    int rank;         /* -1: no rank's */
    const ar_st_file *st;
    ar_st_file *owned; /* NULL: the model's */
    ar_st_entry array; /* without `st`: the one entry of a .npy */
    void *array_owner; /* what holds its memory */
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
    bool of_ranks;    /* files are ranks' */
    int ranks, world; /* world 0: not told */
    int *rank;        /* [ranks] ascending: those whose files there are */
    ar_dump_dim mesh[AR_DUMP_MAX_DIMS];
    size_t mesh_dims;
    ari_piece *piece; /* sorted by name; empty once the tensors are made */
    size_t pieces, cap_pieces;
    ar_dump_tensor *tensor; /* by name */
    size_t tensors;
    ar_dump_part *part; /* tensor after tensor */
    size_t parts;
};

/** Opens the files of d->path and tells their ranks. */
AR_NODISCARD ar_status ari_dump_open_files(ar_dump *d);
void ari_dump_close_file(ari_dump_file *f);
/** Entries of a file, whatever its format. */
size_t ari_dump_entries(const ari_dump_file *f);
const ar_st_entry *ari_dump_entry(const ari_dump_file *f, size_t i);

/** Tells the ranks of a folder's files by their placements, or else by their names or their order, where they are
 *  ranks' at all. */
AR_NODISCARD ar_status ari_dump_tell_ranks(ar_dump *d);

/** Lists what the files hold. map: NULL or a mapping file. */
AR_NODISCARD ar_status ari_dump_list_pieces(ar_dump *d, const char *map);
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
