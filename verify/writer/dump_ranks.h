/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/arch.h"
#include "anyrank/dump_listener.h"
#include "anyrank/run.h"
#include "ref/core/text.h"
#include "verify/reference/reference.h"

/* --- folders (dump_folder.c) -------------------------------------------------------------------------------------- */

/* Folders that a dump may replace: only those of an earlier dump; all others belong to the user and stay. */

/** "FOLDER/NAME". Errors: AR_ERR_ARG (too long). */
AR_NODISCARD ar_status ari_folder_path(char *path, size_t cap, const char *folder, const char *name);

/** Refuses a folder that holds anything other than the files of an earlier dump of ranks. A missing folder is accepted.
 *  Errors: AR_ERR_IO (names the obstacle). */
AR_NODISCARD ar_status ari_dump_folder_check(const char *folder);
/** Removes the files of an earlier dump of ranks. *exists: whether the folder exists. Errors: as above. */
AR_NODISCARD ar_status ari_dump_folder_clear(bool *exists, const char *folder);
/** Removes the folder too. A missing folder is no error. Errors: as above. */
AR_NODISCARD ar_status ari_dump_folder_remove(const char *folder);

/* Folder of a check: a file of the reference, a file of allowances, and a folder of ranks for each layout. */
#define ARI_DUMP_REFERENCE "reference.safetensors"
#define ARI_DUMP_ALLOWED "allowed.safetensors"
/* Name of the file beside the tensors that describes the run (dump_model.c). */
#define ARI_DUMP_MODEL "model.json"
/** Refuses a folder that holds anything other than an earlier check's dump, and a disk without about `bytes` bytes of
 *  space if there is no dump yet. A missing folder is accepted. Errors: AR_ERR_IO. */
AR_NODISCARD ar_status ari_dump_check_folder_check(const char *folder, size_t bytes);
/** Creates the folder, and removes the files of an earlier check. Errors: those of ari_dump_check_folder_check. */
AR_NODISCARD ar_status ari_dump_check_folder_clear(const char *folder);

/* --- ranks -------------------------------------------------------------------------------------------------------- */

/* One listener for each rank of a run. Their values are written as a folder with a file for each rank. */
typedef struct ari_dump_ranks {
    ar_parallel parallel;
    ar_dump_listener **rank; /* [ranks] */
    void **user;             /* [ranks]: the same listeners as user pointers of the taps */
    int ranks;
} ari_dump_ranks;

AR_NODISCARD ar_status ari_dump_ranks_create(ari_dump_ranks *d, const ar_parallel *p,
                                             const ar_dump_listener_options *o);
void ari_dump_ranks_fini(ari_dump_ranks *d);
/** Discards all reported values. */
void ari_dump_ranks_clear(ari_dump_ranks *d);

/* Position of new rows relative to the recorded ones: in every box directly after them, directly before them, or
 * neither. A rank that runs micro-batches reports a tensor once for each; these are parts of one tensor whose adjacent
 * rows are merged. */
typedef enum ari_side { ARI_SEPARATE, ARI_AFTER, ARI_BEFORE } ari_side;
/** Returns true if both are parts of the same copy of one tensor with at least one dimension. */
bool ari_same_tensor(const ar_layout *a, const ar_layout *b);
/** Returns the side on which `addend` can be joined. rows: rows of the local tensors, which the boxes must span. */
ari_side ari_side_of(const ar_layout *have, size_t had_rows, const ar_layout *addend, size_t rows);
/** Merges the two parts into one; `side` is not ARI_SEPARATE. */
void ari_join_rows(ar_layout *have, const ar_layout *addend, ari_side side);

/* Two listeners for one rank; the second tap may be NULL. */
typedef struct ari_tap_pair {
    ar_tap_fn tap[2];
    void *user[2];
} ari_tap_pair;
/** Reports an event to both listeners. Has the type ar_tap_fn; user: the ari_tap_pair. */
AR_NODISCARD ar_status ari_tap_both(void *user, const ar_tap_event *event);

/* Facts of a run as pairs for the files' __metadata__. */
typedef struct ari_dump_facts {
    char layout[96], heads[24], kv_heads[24], targets[24], plan[ARI_PRINTABLE + 128];
    const char *pair[2 * 11];
    size_t n;
    const ar_config *config; /* all zero if the run is a block */
    const ar_run *run;       /* NULL: of full tensors */
} ari_dump_facts;
/** Adds a pair; there is space for eleven. A NULL value is left out. The strings are borrowed. */
void ari_dump_fact(ari_dump_facts *f, const char *key, const char *value);
/** Returns the number of targets of a batch; 0 for a block, which has no tokens. */
size_t ari_dump_targets(const ar_batch *b);
/** Collects the model's name and heads, the first batch's number of targets, and the run's numerics, layout, plan
 *  and fault. run NULL: full tensors in exact numerics. The result borrows and must not be copied. Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_dump_facts_of(ari_dump_facts *f, const ar_config *c, const ar_run *run,
                                         const ar_batch *first_batch);

/** Writes a run's config, layout, optimizer, seed, steps and numerics to model.json in an existing folder. A file that
 *  no dump has written is left unchanged. Errors: AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_dump_model_write(const char *folder, const ar_config *c, const ar_run *r);
/** True if a dump has written this file. */
bool ari_dump_model_is(const char *path);

/** Returns the boundaries of the documents in every row of these batches as JSON: "[[0,5,14],[0,14]]"; NULL if the
 *  first row has none. Release *out with free(). Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_documents_text(char **out, const ar_batch *batch, size_t batches);

/** Writes all ranks' files and model.json to a new folder, which then replaces `folder`: a folder never holds ranks of
 *  two runs. Its parent must exist. Errors: those of ar_dump_write, AR_ERR_IO; `folder` is then unchanged or gone. */
AR_NODISCARD ar_status ari_dump_ranks_write(const ari_dump_ranks *d, const char *folder, const ari_dump_facts *f);

/** Returns the text of ANYRANK_PLACEMENT for a file of full tensors: names in execution order. Release *out with
 *  free(). Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_dump_order_text(char **out, const char **names, size_t n);
/** Writes the reference's tensors as one file in execution order. Errors: those of ari_st_write. */
AR_NODISCARD ar_status ari_dump_reference_write(const ari_reference *r, const char *path, const ari_dump_facts *f);
