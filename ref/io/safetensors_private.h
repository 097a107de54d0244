/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/safetensors.h"

/* Private functions of anyrank/safetensors.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Maps and validates a safetensors file. Every rule of the format is checked before the function returns, and hostile
 *  input is safe. Errors: AR_ERR_IO; AR_ERR_FORMAT, whose message begins with the rule's name ("HeaderTooLarge: ..."),
 *  followed by the path and the tensor, or says that the file has another format; AR_ERR_UNSUPPORTED (more than
 *  AR_ST_MAX_DIMS dimensions); AR_ERR_MEMORY. Duplicate names and keys, which the format forbids and its official
 *  library accepts, are refused, as are names that contain a NUL. Memory use is a small multiple of the header's size.
 *  The file must not shrink while it is open, or reading its data raises SIGBUS. The caller closes *out with
 *  ari_st_close. Threads: many threads may read an open file. */
AR_NODISCARD ar_status ari_st_open(ar_st_file **out, const char *path);
/** Closes a file. Accepts NULL. */
void ari_st_close(ar_st_file *f);
/** Returns the number of tensors in a file. */
size_t ari_st_tensor_count(const ar_st_file *f);
/** Entry i in the order of the header; NULL out of range. */
const ar_st_entry *ari_st_at(const ar_st_file *f, size_t i);
/** Finds a tensor by name; NULL if there is none. */
const ar_st_entry *ari_st_find(const ar_st_file *f, const char *name);
/** Returns the value of `key` in __metadata__; NULL if there is none. */
const char *ari_st_metadata(const ar_st_file *f, const char *key);
AR_NODISCARD ar_status ari_st_model_open(ar_st_model **out, const char *folder);
void ari_st_model_close(ar_st_model *m);
size_t ari_st_model_count(const ar_st_model *m);
const ar_st_entry *ari_st_model_at(const ar_st_model *m, size_t i);
const ar_st_entry *ari_st_model_find(const ar_st_model *m, const char *name);
/** Copies an entry to fp32, converting F64 (rounded), F16, BF16, F32. Errors: AR_ERR_DTYPE (another dtype, named). */
AR_NODISCARD ar_status ari_st_to_f32(const ar_st_entry *e, float *out);
/** Converts an entry of any integer dtype or BOOL to int64. Errors: AR_ERR_DTYPE; AR_ERR_DATA (a U64 above 2^63-1). */
AR_NODISCARD ar_status ari_st_to_i64(const ar_st_entry *e, int64_t *out);
/** Converts `count` elements of `dtype` at any alignment to binary64, exactly except for I64 and U64, which are
 *  rounded once. BOOL gives its byte; F8_E4M3 has no infinities; F8_E8M0 is a power of two. Errors: AR_ERR_DTYPE
 *  (C64, F4, F6). */
AR_NODISCARD ar_status ari_values_to_f64(ar_dtype dtype, const void *data, size_t count, double *out);
/** Converts values to fp32, rounded once if fp32 lacks the value. */
AR_NODISCARD ar_status ari_values_to_f32(ar_dtype dtype, const void *data, size_t count, float *out);
/** Binary64 values as F64, F32, F16 or BF16, at any alignment, each rounded once. Errors: AR_ERR_DTYPE (another). */
AR_NODISCARD ar_status ari_values_of_f64(ar_dtype dtype, const double *values, size_t count, void *out);
/** Writes a file as the official library does: __metadata__ first, entries sorted by alignment (descending) then name,
 *  header padded with spaces to 8 bytes. Until it is complete the file has no name, or a temporary one in the same
 *  folder if the file system has no unnamed files, so a half-written file never appears. metadata: n_meta pairs key,
 *  value, written in their order. Errors: AR_ERR_ARG (a NULL, repeated or ill-formed name or key, an unknown dtype,
 *  missing data), AR_ERR_OVERFLOW, AR_ERR_IO (nothing is left behind). */
AR_NODISCARD ar_status ari_st_write(const char *path, const ar_st_tensor *tensors, size_t n,
                                    const char *const *metadata, size_t n_meta);

AR_END_DECLS
