/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_ABI_H
#define ANYRANK_ABI_H

#include <stddef.h>
#include <stdint.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

/* The C interface of the shared library libanyrank_abi for other languages; the library exports these symbols only.
 * Functions take opaque handles, sizes and UTF-8 text, so that no struct layout can change under a caller. Python's
 * package calls them through ctypes.
 *
 * Functions that return int return an ar_status (anyrank/status.h): 0 on success, negative on failure. Functions that
 * return a pointer return NULL on failure. After a failure ar_abi_error returns the message.
 * Threads: many threads may read one handle at once; each thread has its own error message. */

#if defined(__GNUC__)
#define AR_ABI_EXPORT __attribute__((visibility("default")))
#else
#define AR_ABI_EXPORT
#endif

/** Version number of this interface. It changes when a function is removed or changes its meaning. */
#define AR_ABI_NUMBER 1
/** Returns the AR_ABI_NUMBER that the loaded library was built with. */
AR_ABI_EXPORT int ar_abi_number(void);
/** Returns the project's version, such as "0.3.0". Static storage. */
AR_ABI_EXPORT const char *ar_abi_version(void);
/** Returns the message of the calling thread's last failure, "" if there was none. Valid until its next failure. */
AR_ABI_EXPORT const char *ar_abi_error(void);
/** Frees a string that a function of this header allocated. Accepts NULL. */
AR_ABI_EXPORT void ar_abi_free(char *text);

/* --- dumps -------------------------------------------------------------------------------------------------------- */

/* A dump: named tensors that a training run wrote to files. A tensor may be sharded over the files of several ranks;
 * functions here present the full tensor. anyrank/dump.h has the C interface with all details. */
typedef struct ar_dump ar_abi_dump;
typedef struct ar_dump_tensor ar_abi_tensor; /* a tensor of an open dump; valid until the dump is closed */

/** Opens a dump: a safetensors or .npy file, a sharded checkpoint, or a folder with one file for each rank
 *  (ar_dump_open lists the forms). mapping_file: path of a file that says how the ranks' parts form full tensors
 *  (pytorch.md); NULL: none. The caller closes *out with ar_abi_dump_close. Errors: those of ar_dump_open; AR_ERR_ARG
 *  (out or path is NULL). */
AR_ABI_EXPORT int ar_abi_dump_open(ar_abi_dump **out, const char *path, const char *mapping_file);
/** Gives tensors of the other dump the reference's names and parts, as `anyrank verify` compares them: without the names
 *  of wrappers ("module."), experts one by one if one of the dumps has a layer's experts in one tensor, samples in the
 *  reference's order; samples that were put in order once stay so. Invalidates earlier ar_abi_tensor pointers of both
 *  dumps. Errors: AR_ERR_FORMAT (a dump says of its samples what is no JSON), AR_ERR_MEMORY. */
AR_ABI_EXPORT int ar_abi_dump_align(ar_abi_dump *reference, ar_abi_dump *other);
/** Closes a dump and invalidates all of its ar_abi_tensor pointers. Accepts NULL. */
AR_ABI_EXPORT void ar_abi_dump_close(ar_abi_dump *dump);
/** Returns JSON text about the dump: {"path": "..", "tensors": 47, "ranks": 4, "mesh": [["dp", 2], ["tp", 2]]}. ranks
 *  is 0 if the files belong to no rank; mesh is [] if the files do not record the device mesh. The caller frees the
 *  text with ar_abi_free. Returns NULL if out of memory. */
AR_ABI_EXPORT char *ar_abi_dump_json(const ar_abi_dump *dump);
/** Returns the value of `key` in the safetensors __metadata__ of the dump's files, valid until the dump is closed.
 *  Returns NULL if no file has the key or the files disagree about its value. */
AR_ABI_EXPORT const char *ar_abi_dump_metadata(const ar_abi_dump *dump, const char *key);
/** Returns the number of tensors in the dump. */
AR_ABI_EXPORT size_t ar_abi_dump_count(const ar_abi_dump *dump);
/** Returns tensor number `index` when tensors are sorted by the bytes of their names; NULL if index >= the count. */
AR_ABI_EXPORT const ar_abi_tensor *ar_abi_dump_at(const ar_abi_dump *dump, size_t index);
/** Returns the tensor called `name`; NULL if the dump has no such tensor. */
AR_ABI_EXPORT const ar_abi_tensor *ar_abi_dump_find(const ar_abi_dump *dump, const char *name);

/** Returns the tensor's name, valid until the dump is closed. */
AR_ABI_EXPORT const char *ar_abi_tensor_name(const ar_abi_tensor *tensor);
/** Returns the tensor's position in the run's execution order; SIZE_MAX if the dump does not record an order. */
AR_ABI_EXPORT size_t ar_abi_tensor_order(const ar_abi_tensor *tensor);
/** Returns the number of bytes that ar_abi_tensor_read writes; 0 if it is empty or its dtype has less than 8 bits. */
AR_ABI_EXPORT size_t ar_abi_tensor_bytes(const ar_abi_tensor *tensor);
/** Returns JSON text about a tensor and the part of it that each file holds: {"name": "..", "dtype": "F32", "shape":
 *  [4, 2], "parts": [{"rank": 0, "file": "..", "replica": 0, "replicas": 2, "partial": false, "boxes": [{"global": [0,
 *  0], "extent": [2, 2]}]}, ..]}. rank is null if the file belongs to no rank; partial: the full value is the sum of
 *  such parts. The caller frees the text with ar_abi_free. Returns NULL if out of memory. */
AR_ABI_EXPORT char *ar_abi_tensor_json(const ar_abi_tensor *tensor);
/** Writes all elements of the full tensor to out[0, bytes), row-major, in the tensor's own dtype. Where ranks hold
 *  copies of a part, the first copy is read; partial parts are summed. Errors: AR_ERR_ARG (bytes is not
 *  ar_abi_tensor_bytes), those of ar_dump_read. */
AR_ABI_EXPORT int ar_abi_tensor_read(const ar_abi_tensor *tensor, void *out, size_t bytes);
/** Writes the elements of part number `part` of ar_abi_tensor_json's list to out[0, count) as fp32: the part's boxes one
 *  after the other, each row-major. count: the elements of all its boxes. Errors: AR_ERR_ARG (no such part, another
 *  count), those of ar_dump_read_f32. */
AR_ABI_EXPORT int ar_abi_tensor_read_part(const ar_abi_tensor *tensor, size_t part, float *out, size_t count);
/** Compares the ranks' copies (replicas) of every part of a tensor bit by bit. *out becomes the JSON text "null" if all
 *  copies are equal, else {"ranks": [0, 1], "index": 5, "elements": 3, "count": 64, "values": [1.0, 2.0]}: two ranks
 *  whose copies differ, the lowest differing element (row-major in the full tensor), how many of the part's `count`
 *  elements differ, both values at `index`. The caller frees *out with ar_abi_free. Errors: those of
 *  ar_dump_replicas. */
AR_ABI_EXPORT int ar_abi_tensor_replicas(const ar_abi_tensor *tensor, char **out);

/* --- sketches ----------------------------------------------------------------------------------------------------- */

/* What stands for a tensor whose parts ranks have: anyrank/sketch.h has all figures and the form of their files. */
typedef struct ar_sketch ar_abi_sketch;

/** Starts the sketch of a full tensor: a safetensors dtype ("F32"), ndim extents. The caller destroys *out. Errors:
 *  AR_ERR_DTYPE (it has no sketch), AR_ERR_SHAPE (more than 8 dimensions), AR_ERR_OVERFLOW, AR_ERR_MEMORY. */
AR_ABI_EXPORT int ar_abi_sketch_create(ar_abi_sketch **out, const char *dtype, size_t ndim, const size_t *shape);
AR_ABI_EXPORT void ar_abi_sketch_destroy(ar_abi_sketch *sketch);
/** Adds elements [global, global + extent) of the full tensor. Element (i0, i1, ..) of them is number
 *  first + i0*stride[0] + i1*stride[1] + .. of `values`. Errors: AR_ERR_SHAPE (out of the tensor). */
AR_ABI_EXPORT int ar_abi_sketch_add(ar_abi_sketch *sketch, const void *values, size_t first, const size_t *stride,
                                    const size_t *global, const size_t *extent);
/** Adds the sketch of other elements of the same tensor. Errors: AR_ERR_SHAPE, AR_ERR_DTYPE. */
AR_ABI_EXPORT int ar_abi_sketch_merge(ar_abi_sketch *sketch, const ar_abi_sketch *part);
/** Bytes of its figures as a file has them, and these. Hash: of a record (ar_sketch_hash). */
AR_ABI_EXPORT size_t ar_abi_sketch_bytes(const ar_abi_sketch *sketch);
AR_ABI_EXPORT void ar_abi_sketch_encode(const ar_abi_sketch *sketch, unsigned char *out);
/** Replaces the figures by those of n bytes. Errors: AR_ERR_FORMAT (they are too few, or of another tensor). */
AR_ABI_EXPORT int ar_abi_sketch_decode(ar_abi_sketch *sketch, const unsigned char *data, size_t n);
AR_ABI_EXPORT uint64_t ar_abi_sketch_hash(const unsigned char *data, size_t n);
/** JSON of a folder of sketches: {"ranks": 2, "tensors": [{"name": "x:grad@3", "step": 3, "dtype": "F32", "shape": [..],
 *  "digest": "16 hex digits", "zeros", "nan", "inf", "sum", "sum_squares", "max_abs", "summed": false, "copies": 2,
 *  "differing": -1, "left_out": ""}, ..]}. The caller frees it. NULL: those of ar_sketch_run_open. */
AR_ABI_EXPORT char *ar_abi_sketches_json(const char *folder);

AR_END_DECLS
#endif
