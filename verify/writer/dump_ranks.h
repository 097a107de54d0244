/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_WRITER_DUMP_RANKS_H
#define ARI_VERIFY_WRITER_DUMP_RANKS_H

#include "anyrank/config.h"
#include "anyrank/dump_listener.h"
#include "verify/reference/reference.h"
#include "verify/writer/dump_folder.h"

/* A listener for each rank of a run, and what they kept as a folder of ranks' files. */
typedef struct ari_dump_ranks {
    ar_parallel parallel;
    ar_dump_listener **rank; /* [ranks] */
    void **user;             /* [ranks]: the same, as taps see them */
    int ranks;
} ari_dump_ranks;

AR_NODISCARD ar_status ari_dump_ranks_create(ari_dump_ranks *d, const ar_parallel *p,
                                             const ar_dump_listener_options *o);
void ari_dump_ranks_fini(ari_dump_ranks *d);
/** Forgets what was reported. */
void ari_dump_ranks_clear(ari_dump_ranks *d);

/* What a dump says of the run beside its tensors: pairs for the files' __metadata__. */
typedef struct ari_dump_facts {
    char layout[96], heads[24], kv_heads[24];
    const char *pair[2 * 8];
    size_t n;
} ari_dump_facts;
/** Adds a pair; at most eight have room. Borrows. */
void ari_dump_fact(ari_dump_facts *f, const char *key, const char *value);
/** The model's name and heads; p NULL: no layout, the tensors are full. Borrows the name; do not copy. */
void ari_dump_facts_of(ari_dump_facts *f, const ar_config *c, const ar_parallel *p, ar_numerics numerics,
                       ar_fault fault);

/** Writes all ranks' files to a folder beside, which then takes the place of `folder`: a folder never holds ranks of
 * two runs. Its parent is there. Errors: those of ar_dump_write, AR_ERR_IO; `folder` is as it was, or gone. */
AR_NODISCARD ar_status ari_dump_ranks_write(const ari_dump_ranks *d, const char *folder, const ari_dump_facts *f);

/** The text of ANYRANK_PLACEMENT for a file of full tensors: names in execution order. Gives; free(). Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_dump_order_text(char **gives, const char *const *names, size_t n);
/** Writes the reference's tensors as one file, in execution order. Errors: those of ar_st_write. */
AR_NODISCARD ar_status ari_dump_reference_write(const ari_reference *r, const char *path, const ari_dump_facts *f);

#endif
