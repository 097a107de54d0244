/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_ABI_H
#define ANYRANK_ABI_H

#include <stddef.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

/* The interface of libanyrank_abi for other languages: functions of opaque handles, sizes and UTF-8 text, with no type
 * that a later version could change. Python's package calls them by ctypes. The shared library has these symbols alone.
 *
 * Functions that can fail return a status of anyrank/status.h, 0 or negative, or NULL; ar_abi_error has the message.
 * Threads: a handle may be read by many threads; messages belong to the thread whose call failed. */

#if defined(__GNUC__)
#define AR_ABI_EXPORT __attribute__((visibility("default")))
#else
#define AR_ABI_EXPORT
#endif

/** The number of this interface: it changes when a function is removed or means something else. */
#define AR_ABI_NUMBER 1
AR_ABI_EXPORT int ar_abi_number(void);
/** "0.2.0": the project's version. Static storage. */
AR_ABI_EXPORT const char *ar_abi_version(void);
/** The message of this thread's last failure, "" if there was none; valid until the next one. */
AR_ABI_EXPORT const char *ar_abi_error(void);
/** Frees a text that a function of this header gave. Accepts NULL. */
AR_ABI_EXPORT void ar_abi_free(char *text);

/* --- dumps -------------------------------------------------------------------------------------------------------- */

typedef struct ar_dump ar_abi_dump;
typedef struct ar_dump_tensor ar_abi_tensor; /* borrowed from its dump */

/** Opens a file, sharded checkpoint or folder of ranks (ar_dump_open says which). map: a mapping file; NULL: none.
 *  Gives; ar_abi_dump_close. Errors: those of ar_dump_open; AR_ERR_ARG (gives or path is NULL). */
AR_ABI_EXPORT int ar_abi_dump_open(ar_abi_dump **out, const char *path, const char *map);
/** Ends every tensor of it. Accepts NULL. */
AR_ABI_EXPORT void ar_abi_dump_close(ar_abi_dump *d);
/** {"path": "..", "tensors": 47, "ranks": 4, "mesh": [["dp", 2], ["tp", 2]]}; ranks 0: the dump is no rank's; mesh []:
 *  not told. Gives; ar_abi_free. NULL: no memory. */
AR_ABI_EXPORT char *ar_abi_dump_json(const ar_abi_dump *d);
/** A value of the files' __metadata__ that all of them agree on, borrowed; NULL: there is none. */
AR_ABI_EXPORT const char *ar_abi_dump_metadata(const ar_abi_dump *d, const char *key);
/** Tensors in byte order of their names. NULL: i is out of range. */
AR_ABI_EXPORT size_t ar_abi_dump_count(const ar_abi_dump *d);
AR_ABI_EXPORT const ar_abi_tensor *ar_abi_dump_at(const ar_abi_dump *d, size_t i);
/** NULL: there is none of that name. */
AR_ABI_EXPORT const ar_abi_tensor *ar_abi_dump_find(const ar_abi_dump *d, const char *name);

/** Borrowed. */
AR_ABI_EXPORT const char *ar_abi_tensor_name(const ar_abi_tensor *t);
/** Its place in execution order; SIZE_MAX: the dump does not say. */
AR_ABI_EXPORT size_t ar_abi_tensor_order(const ar_abi_tensor *t);
/** Bytes of all its elements, as ar_abi_tensor_read writes them; 0 also where an element has less than a byte. */
AR_ABI_EXPORT size_t ar_abi_tensor_bytes(const ar_abi_tensor *t);
/** {"name": "..", "dtype": "F32", "shape": [4, 2], "parts": [{"rank": 0, "file": "..", "replica": 0, "replicas": 2,
 *  "partial": false, "boxes": [{"global": [0, 0], "extent": [2, 2]}]}, ..]}; rank null: the file is no rank's. Gives;
 *  ar_abi_free. NULL: no memory. */
AR_ABI_EXPORT char *ar_abi_tensor_json(const ar_abi_tensor *t);
/** All elements of the full tensor, row-major, in its own dtype, from the first copy of each part; of partial parts the
 *  sum. bytes: of out, ar_abi_tensor_bytes. Errors: AR_ERR_ARG (another number of bytes), those of ar_dump_read. */
AR_ABI_EXPORT int ar_abi_tensor_read(const ar_abi_tensor *t, void *out, size_t bytes);
/** Compares the copies of every part. *out: "null" where all have the same bits, else {"ranks": [0, 1], "index": 5,
 *  "elements": 3, "count": 64, "values": [1.0, 2.0]}: the two ranks, the lowest element (row-major in the full tensor)
 *  and how many elements of the part's `count` differ. Gives; ar_abi_free. Errors: those of ar_dump_replicas. */
AR_ABI_EXPORT int ar_abi_tensor_replicas(const ar_abi_tensor *t, char **out);

AR_END_DECLS
#endif
