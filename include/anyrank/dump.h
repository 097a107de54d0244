/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_DUMP_H
#define ANYRANK_DUMP_H

#include "anyrank/placement.h"
#include "anyrank/safetensors.h"

AR_BEGIN_DECLS

/* Tensors that somebody's run wrote down, whoever ran it: one file, a sharded checkpoint, or a folder with a file of
 * each rank, whose parts are put together by what the files or a mapping say (pytorch.md). Nothing is copied before
 * it is asked for. */

/** Elements of a file's tensor that are a box of the full one. Element (i0, i1, ..) of the box stands in the file's
 *  tensor at  at + i0*stride[0] + i1*stride[1] + ..  (row-major element numbers), so that a transposed weight, or one
 * of several that lie packed in it, is a box like any other. Parts with the same box hold copies of it; of a packed
 * tensor some boxes may have copies and others none (k and v of more ranks than there are heads of theirs). */
typedef struct ar_dump_box {
    size_t global[AR_ST_MAX_DIMS], extent[AR_ST_MAX_DIMS]; /* in the full tensor */
    size_t at;
    size_t stride[AR_ST_MAX_DIMS];
    int replica;  /* which copy of this box, of how many */
    int replicas; /* 1: the only one */
} ar_dump_box;

/** One file's part of a tensor. */
typedef struct ar_dump_part {
    int rank;                 /* -1: the file is no rank's */
    const char *file;         /* its path, borrowed */
    const ar_st_entry *entry; /* the file's own tensor */
    size_t boxes;
    const ar_dump_box *box;
    int replica;  /* which copy of these boxes, of how many: the lowest of its boxes' */
    int replicas; /* the largest of its boxes' */
    bool partial; /* the full value is the sum of such parts */
} ar_dump_part;

/** A full tensor. */
typedef struct ar_dump_tensor {
    const char *name;
    ar_dtype dtype;
    int ndim; /* 0 .. AR_ST_MAX_DIMS */
    size_t shape[AR_ST_MAX_DIMS];
    size_t count;
    size_t order;       /* its place in execution order, where the dump tells one; SIZE_MAX */
    size_t sample_rows; /* rows along dimension 0 that each sample has; 0: not told */
    size_t parts;       /* by rank */
    const ar_dump_part *part;
    const void *whole; /* all elements, row-major and not aligned, where one file has them so; NULL: put together by
                          ar_dump_read */
} ar_dump_tensor;

typedef struct ar_dump ar_dump;
typedef struct ar_dump_options {
    const char *map;  /* a mapping file: how the parts of files fit that it says the ranks of; else renames and the like
                        of full tensors. NULL: none */
    bool all_matched; /* a rule of the mapping that matches no tensor is an error */
} ar_dump_options;

/** Opens a dump and checks all of it but values. `path`:
 *    FILE.safetensors, FILE.npy, or a .json index of a sharded checkpoint;
 *    a folder with model.safetensors or model.safetensors.index.json, and optimizer.safetensors where there is one;
 *    a folder of .npy files, named by tensor;
 *    a folder of .safetensors files: of ranks, where two name the same tensor or say a placement; else one after the
 *    other, where no name stands twice.
 *  Every element of every tensor stands in exactly one part, or in as many copies as there are replicas.
 *  Gives; ar_dump_close. options NULL: none. Errors: AR_ERR_IO, AR_ERR_FORMAT and AR_ERR_DATA of the files
 * ("MissingShard: ...", "OverlappingShards: ...", "InvalidPlacement: ...", "InvalidMapping: ...", each with the tensor
 * and the ranks); AR_ERR_UNSUPPORTED, AR_ERR_OVERFLOW, AR_ERR_MEMORY. Memory: some hundred bytes a part; data stays in
 * the files. Threads: an open dump may be read by many. */
AR_NODISCARD ar_status ar_dump_open(ar_dump **out, const char *path, const ar_dump_options *o);
/** Accepts NULL. */
void ar_dump_close(ar_dump *d);
/** The path it was opened by; borrowed. */
const char *ar_dump_path(const ar_dump *d);
/** Tensors by name, in byte order. */
size_t ar_dump_count(const ar_dump *d);
const ar_dump_tensor *ar_dump_at(const ar_dump *d, size_t i);
/** NULL if there is none. */
const ar_dump_tensor *ar_dump_find(const ar_dump *d, const char *name);
/** Ranks whose files were found; 0: the dump is no rank's. */
int ar_dump_ranks(const ar_dump *d);
/** The mesh of its ranks, borrowed; of no dimensions: not told. */
const ar_mesh *ar_dump_mesh(const ar_dump *d);
/** A value of the files' __metadata__ that all of them agree on; NULL. */
const char *ar_dump_metadata(const ar_dump *d, const char *key);

/** Elements [start, start + count) of the full tensor, row-major, in the dump's own dtype, from the first copy; of
 *  partial parts the sum, in the order of ranks, added in binary64 and rounded once. Errors: AR_ERR_ARG (out of range),
 *  AR_ERR_DTYPE (a partial of a dtype that has no sum; fewer than 8 bits an element), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_dump_read(const ar_dump_tensor *t, size_t start, size_t count, void *out);
/** The same as binary64 (exact for all but I64 and U64, which are rounded) or fp32 (rounded). Errors: those;
 * AR_ERR_DTYPE for complex numbers. */
AR_NODISCARD ar_status ar_dump_read_f32(const ar_dump_tensor *t, size_t start, size_t count, float *out);

/** The first copy that differs in bits from the first one. */
typedef struct ar_dump_disagreement {
    const ar_dump_tensor *tensor;
    int ranks[2];    /* of the copies */
    size_t index;    /* of the lowest element, row-major in the full tensor */
    size_t elements; /* that differ between the two */
    size_t count;    /* elements of the part */
    double value[2];
} ar_dump_disagreement;
/** Compares the copies of every part of a tensor. *found: whether any differ; then *out is filled. */
AR_NODISCARD ar_status ar_dump_replicas(const ar_dump_tensor *t, bool *found, ar_dump_disagreement *out);

/** True if two elements of a tensor whose bytes differ (given as bytes) count as different. */
typedef bool (*ar_dump_differs)(void *user, const void *a, const void *b);

/* --- writing ------------------------------------------------------------------------------------------------------ */

/** A rank's tensor to write. Borrows. */
typedef struct ar_dump_value {
    const char *name;
    ar_dtype dtype;
    const ar_tensor *local;  /* host memory; any strides */
    const ar_layout *layout; /* where it stands in the full tensor; replica and replicas of it are written down too */
    const char *partial;     /* mesh dimension that it is to be summed over; NULL: complete */
} ar_dump_value;
typedef struct ar_dump_place {
    int rank, world;
    ar_mesh mesh;         /* of no dimensions: none is told */
    int at[AR_MESH_DIMS]; /* the rank's coordinates */
} ar_dump_place;
/** Writes one rank's part of a per-rank dump, folder/rank-00003.safetensors (pytorch.md), values in execution order;
 *  of tensors with several boxes the second ones into rank-00003-2.safetensors, and so on, so that PyTorch's
 * distributed checkpoint reader puts such a folder together too. Files of an earlier dump of this rank are replaced.
 * The folder must be there. metadata: n_meta pairs. Errors: those of ari_st_write, AR_ERR_ARG (a layout that is not the
 * tensor's, coordinates that are not of the mesh), those of ari_mesh_check; then nothing is changed. */
AR_NODISCARD ar_status ar_dump_write(const char *folder, const ar_dump_place *place, const ar_dump_value *values,
                                     size_t n, const char *const *metadata, size_t n_meta);

AR_END_DECLS
#endif
