/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_DUMP_H
#define ANYRANK_DUMP_H

#include "anyrank/placement.h"
#include "anyrank/safetensors.h"

AR_BEGIN_DECLS

/* A dump: tensors that a training run of any program wrote to files: a single file, a sharded checkpoint, or a folder
 * with a file for each rank. Full tensors are assembled from the ranks' parts as metadata in the files or a mapping
 * file says (pytorch.md). Data are read only on demand. */

/** A box (hyperrectangle) of the full tensor that a file's tensor holds: elements [global, global + extent) in each
 *  dimension. Element (i0, i1, ..) of the box has number  offset + i0*stride[0] + i1*stride[1] + ..  in the file's
 *  tensor, counted row-major, so that boxes describe transposed and packed weights too. Parts with the same box are copies
 *  (replicas) of it. In a packed tensor some boxes may have copies and others not. */
typedef struct ar_dump_box {
    size_t global[AR_ST_MAX_DIMS], extent[AR_ST_MAX_DIMS];
    size_t offset;
    size_t stride[AR_ST_MAX_DIMS];
    int replica;  /* number of this copy, 0 .. replicas - 1 */
    int replicas; /* number of copies of this box */
} ar_dump_box;

/** The part of a full tensor that one file holds. */
typedef struct ar_dump_part {
    int rank;                 /* the rank that wrote the file; -1: the file belongs to no rank */
    const char *file;         /* path of the file; owned by the dump */
    const ar_st_entry *entry; /* the file's tensor */
    size_t boxes;             /* number of boxes */
    const ar_dump_box *box;   /* [boxes] */
    int replica;              /* lowest `replica` of its boxes */
    int replicas;             /* largest `replicas` of its boxes */
    bool partial;             /* a partial sum: the full value is the sum of such parts */
} ar_dump_part;

/** A full tensor of a dump. */
typedef struct ar_dump_tensor {
    const char *name;
    ar_dtype dtype;
    int ndim; /* 0 .. AR_ST_MAX_DIMS */
    size_t shape[AR_ST_MAX_DIMS];
    size_t count;             /* number of elements */
    size_t order;             /* position in the run's execution order; SIZE_MAX: not recorded */
    size_t sample_rows;       /* rows along dimension 0 of each sample; 0: not recorded */
    bool reordered;           /* its samples are in another order here than in the files */
    size_t parts;             /* number of parts */
    const ar_dump_part *part; /* [parts], by rank */
    const void *whole;        /* all elements, row-major, unaligned, if one file has them so; else NULL */
} ar_dump_tensor;

typedef struct ar_dump ar_dump; /* an open dump */
/** Options of ar_dump_open. */
typedef struct ar_dump_options {
    const char *map;  /* mapping file (pytorch.md): says how the ranks' parts form full tensors, and renames or
                         transposes full tensors. NULL: none */
    bool all_matched; /* a rule of the mapping file that matches no tensor is an error */
} ar_dump_options;

/** Opens a dump and checks everything but the values: each element of each tensor must be in exactly one part, or in
 *  one part of each replica. path is one of
 *    FILE.safetensors, FILE.npy, or the .json index of a sharded checkpoint;
 *    a folder with model.safetensors or model.safetensors.index.json, and optionally optimizer.safetensors;
 *    a folder of .npy files, each named after its tensor;
 *    a folder of .safetensors files: one per rank if two contain the same tensor or files record placements; else a
 *    collection of different tensors.
 *  options NULL: none. The caller closes *out with ar_dump_close. Errors: AR_ERR_IO, AR_ERR_FORMAT, AR_ERR_DATA (the
 *  message begins with "MissingShard: ", "OverlappingShards: ", "InvalidPlacement: " or "InvalidMapping: " and names
 *  tensor and ranks); AR_ERR_UNSUPPORTED, AR_ERR_OVERFLOW, AR_ERR_MEMORY. Memory: some hundred bytes per part. Threads:
 *  many threads may read an open dump. */
AR_NODISCARD ar_status ar_dump_open(ar_dump **out, const char *path, const ar_dump_options *o);
/** Closes a dump; pointers obtained from it become invalid. Accepts NULL. */
void ar_dump_close(ar_dump *dump);
/** Returns the path that the dump was opened with. */
const char *ar_dump_path(const ar_dump *dump);
/** Returns the number of tensors. */
size_t ar_dump_count(const ar_dump *dump);
/** Returns tensor number `index` when tensors are sorted by the bytes of their names. */
const ar_dump_tensor *ar_dump_at(const ar_dump *dump, size_t index);
/** Returns the tensor called `name`; NULL if there is none. */
const ar_dump_tensor *ar_dump_find(const ar_dump *dump, const char *name);
/** Returns the number of ranks whose files were found; 0 if files belong to no rank. */
int ar_dump_ranks(const ar_dump *dump);
/** Returns the device mesh of the ranks; it has no dimensions if the files do not record it. */
const ar_mesh *ar_dump_mesh(const ar_dump *dump);
/** Returns the value of `key` in the files' safetensors __metadata__; NULL if it is missing or files disagree. */
const char *ar_dump_metadata(const ar_dump *dump, const char *key);

/** Reads elements [start, start + count) of a full tensor, row-major, in its own dtype, to out. Of copies the first is
 *  read; partial sums are added in rank order in binary64 and rounded once. Errors: AR_ERR_ARG (out of range),
 *  AR_ERR_DTYPE (partial sums of a dtype that cannot be added; fewer than 8 bits per element), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_dump_read(const ar_dump_tensor *t, size_t start, size_t count, void *out);
/** Reads elements [start, start + count) as ar_dump_read does, converted to fp32 with rounding. Errors: those of
 *  ar_dump_read, AR_ERR_DTYPE (complex numbers). */
AR_NODISCARD ar_status ar_dump_read_f32(const ar_dump_tensor *t, size_t start, size_t count, float *out);

/** Two copies of a part of a tensor whose bits differ: the first copy, and the first one unequal to it. */
typedef struct ar_dump_disagreement {
    const ar_dump_tensor *tensor; /* the tensor that they are copies of */
    int ranks[2];                 /* ranks that hold the two copies */
    size_t index;                 /* lowest differing element, row-major in the full tensor */
    size_t elements;              /* number of differing elements */
    size_t count;                 /* elements of the part */
    double value[2];              /* values of the two copies at `index` */
} ar_dump_disagreement;
/** Compares the copies of every part of a tensor bit by bit. *found becomes true if some differ, and *out then
 *  describes the first difference. Errors: those of ar_dump_read. */
AR_NODISCARD ar_status ar_dump_replicas(const ar_dump_tensor *t, bool *found, ar_dump_disagreement *out);

/** Callback that decides if two elements, given by pointers to their differing bytes a and b, count as different. */
typedef bool (*ar_dump_differs)(void *user, const void *a, const void *b);

/* --- writing ------------------------------------------------------------------------------------------------------ */

/** A rank's part of a tensor, to be written. All pointers are borrowed. */
typedef struct ar_dump_value {
    const char *name;
    ar_dtype dtype;
    const ar_tensor *local;  /* host memory; any strides */
    const ar_layout *layout; /* its elements of the full tensor; written with replica numbers */
    const char *partial;     /* mesh dimension over whose ranks the value is a partial sum; NULL: not partial */
} ar_dump_value;
/** The place of a rank among the ranks that write a dump. */
typedef struct ar_dump_place {
    int rank, world;          /* number of the rank; number of ranks */
    ar_mesh mesh;             /* device mesh; no dimensions: not recorded */
    int coords[AR_MESH_DIMS]; /* the rank's coordinates in the mesh */
} ar_dump_place;
/** Writes one rank's part of a dump, values [n] in execution order, to rank-00003.safetensors (for rank 3) in an
 *  existing folder (pytorch.md). Of tensors with several boxes the second boxes go to rank-00003-2.safetensors and so
 *  on, a form that PyTorch's distributed checkpoint reader can assemble. The rank's files of an earlier dump are
 *  replaced. metadata: n_meta key-value pairs, [2*n_meta]. Errors: AR_ERR_ARG (invalid names, a layout that does not
 *  fit the tensor, coordinates outside of the mesh, an invalid mesh), AR_ERR_INDIVISIBLE (the mesh does not have
 *  `world` ranks), AR_ERR_OVERFLOW, AR_ERR_IO; on error nothing is changed. */
AR_NODISCARD ar_status ar_dump_write(const char *folder, const ar_dump_place *place, const ar_dump_value *values,
                                     size_t n, const char *const *metadata, size_t n_meta);

AR_END_DECLS
#endif
