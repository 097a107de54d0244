/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/dump.h"

/* Private functions of anyrank/dump.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** If ranks have values or gradients of different lengths under a name, because each pads its samples to its own
 *  longest, the dump has no such tensor: writes two of the shapes to text and returns true; otherwise returns false. */
bool ari_dump_is_ragged(const ar_dump *d, const char *name, char text[160]);
/** Reads the elements as binary64 (exact except for I64 and U64, which are rounded) or as fp32 (rounded). Errors: as
 *  above; AR_ERR_DTYPE for complex numbers. */
AR_NODISCARD ar_status ari_dump_read_f64(const ar_dump_tensor *t, size_t start, size_t count, double *out);
/** Reads only one part, box after box, each row-major: as many elements as its boxes have. */
AR_NODISCARD ar_status ari_dump_part_f32(const ar_dump_tensor *t, const ar_dump_part *p, float *out);
/** Compares replicas by a rule. *drift: number of elements that differ only in bits, over all compared copies. Elements
 *  below one byte are compared by bits. */
AR_NODISCARD ar_status ari_dump_replicas_by(const ar_dump_tensor *t, ar_dump_differs differs, void *user, bool *found,
                                            ar_dump_disagreement *out, size_t *drift);

AR_END_DECLS
