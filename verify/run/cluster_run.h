/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/model.h"
#include "anyrank/run.h"
#include "anyrank/train.h"
#include "ref/context/context.h"
#include "ref/core/size.h"

ARI_OWNER(ar_device, ar_device_destroy)
ARI_OWNER(ar_trace, ar_trace_destroy)

/* Training steps of a model on N simulated ranks. */
typedef struct ari_cluster_options {
    ar_run run; /* the run's options; model, batch and seq are not used. steps 0: no optimizer. With a cluster and no
                   trace, the run makes its own trace */
    const ar_config *config;
    const ar_batch *batch;                                 /* [max(steps, 1)] global batches */
    const float *(*weights)(void *, const char *, size_t); /* returns a weight's values, as for ari_model_set; NULL:
                                                              fresh weights */
    void *weights_user;
    uint64_t attempt;               /* number of this run among equal runs, from 0 */
    bool forward_only;              /* neither a DDP object nor an optimizer */
    bool faulty;                    /* for a dry run: the fault of `run` is injected */
    bool dry;                       /* a run on a device without contents: parameters have no values, and `tap`
                                       reports zeros */
    const ari_known_routes *routes; /* token counts of the experts in a dry run; NULL: all experts get equally many
                                       rows */
    ar_tap_fn tap;                  /* NULL: no listener */
    void **tap_user;                /* [world] */
    ar_rank_memory *memory;         /* [world], written if the run succeeds; NULL: not requested */
    const ar_module_case *module;   /* the module to train in place of the config's model; its batches are in
                                       `batch`. NULL: the config's model */
    struct ari_ledger *ledger;      /* the ledger of a dry run, for its operations and collectives; NULL: not wanted */
    bool each_alone;                /* for a module: without ZeRO there is no DDP object, and each gradient is
                                       reduced separately */
    /* A rank's work instead of the model's step: NULL, or called on every rank. */
    ar_status (*body)(void *user, ar_ctx *ctx);
    void *body_user;
} ari_cluster_options;

#define ARI_COLLECTIVE_KINDS 7
extern const char *const ari_collective_kind[ARI_COLLECTIVE_KINDS];

typedef struct ari_cluster_result {
    float *loss;    /* [max(steps, 1)] losses of rank 0 */
    uint64_t bytes; /* moved between ranks, all ranks together, each byte once */
    uint64_t bytes_per_rank_max;
    ari_routed routed;
    uint64_t calls[ARI_COLLECTIVE_KINDS]; /* calls of rank 0 */
    double seconds;
    bool has_predicted; /* true for a run with a cluster */
    ar_trace_summary predicted;
    ar_sim_rank_report *reports; /* [world] reports of the ranks if a run with threads failed, otherwise NULL */
} ari_cluster_result;

static inline void ari_cluster_result_fini(ari_cluster_result *result)
{
    free(result->loss);
    free(result->reports);
}
/** Errors: the first rank's, with the table of ranks in ar_error_message. */
AR_NODISCARD ar_status ari_cluster_run(ari_cluster_result *result, const ari_cluster_options *o);

typedef struct ari_dry_memory {
    ar_rank_memory rank;
    size_t stored[ARI_USES]; /* of the stored values; the rest belongs to units */
    uint64_t bytes;          /* bytes that it sends, in all steps together */
    ari_routed routed;
} ari_dry_memory;

/** Computes the memory of one rank by a dry run of one step, or of all steps for a module and if routes are known: no
 *  rank runs, no weight is drawn, no value is computed, and no memory of the model's size is allocated. The fault is
 *  ignored unless o->faulty is set.
 *  If o->dry is set already, o->tap listens to the dry run, otherwise only to the real run.
 *  like: device whose operands and blocks are counted; NULL: the CPU device. Errors: those of a running rank, except
 *  those that depend on values. */
AR_NODISCARD ar_status ari_cluster_dry(ari_dry_memory *m, const ari_cluster_options *o, int rank,
                                       const ar_device *like);

/* One rank's part of a model, the data-parallel object for its parameters, and the optimizer. A training step is
 * ar_train_step on these three. */
typedef struct ari_trainer {
    ar_model *model; /* the model to which the next two fields belong; NULL: they belong to a user's module */
    ar_module *module;
    ar_loss *loss;
    ar_param **params; /* [n] all parameters in the order of their first use */
    size_t n;
    ar_ddp *ddp;             /* NULL: forward only */
    ar_optimizer *optimizer; /* NULL: no optimizer */
    ar_train_options step;   /* options of ar_train_step */
} ari_trainer;

/** Creates model, loss and optimizer by run, config, weights and forward_only of the options. Collective over the
 *  groups of the context, which must outlive them. After an error everything is destroyed and *t is empty. Errors:
 *  those of the parts. */
AR_NODISCARD ar_status ari_trainer_create(ari_trainer *t, ar_ctx *ctx, const ari_cluster_options *o);
/** Destroys a trainer; also accepts an empty one. */
void ari_trainer_destroy(ari_trainer *t);
/** ar_module_train_step. */
AR_NODISCARD ar_status ari_trainer_step(ar_train_result *result, ari_trainer *t, ar_ctx *ctx, const ar_batch *global,
                                        uint32_t step);

/* --- modules (module_run.c) --------------------------------------------------------------------------------------- */

/** Errors: AR_ERR_ARG (a case without name, build or batch). */
AR_NODISCARD ar_status ari_module_case_check(const ar_module_case *c);
/** Returns the batches of all n steps. Release *out with free(). Errors: those of the case, AR_ERR_ARG. */
AR_NODISCARD ar_status ari_module_batches(ar_batch **out, const ar_module_case *c, size_t n);
/** Builds the module and the loss of a case, and gives the parameters their first values. On error both
 *  are NULL. */
AR_NODISCARD ar_status ari_module_build(const ar_module_case *c, uint64_t seed, ar_ctx *ctx, ar_module **module,
                                        ar_loss **loss);

/** Builds a case's whole module on one rank and a device without contents, and calls fn with its parameters. Errors:
 *  those of the case and of fn. */
AR_NODISCARD ar_status ari_module_look(const ar_module_case *c, const ar_run *run,
                                       ar_status (*fn)(void *user, ar_param *const *params, size_t n), void *user);

/* Distinguishes the uses of a module that is called twice in one forward pass and so reports each name twice. The
 * second report of a value from the same position is passed on as "name (use 2)". Micro-batches of a rank have
 * different positions. */
typedef struct ari_use_names {
    ar_tap_fn tap; /* previous listener; NULL: none */
    void *tap_user;
    struct ari_use_name *names; /* [count] names reported in the current step */
    size_t count, capacity;
    uint32_t step;
} ari_use_names;
/** Makes ctx report through these names. ctx borrows them until ari_use_names_end. */
void ari_use_names_begin(ari_use_names *n, ar_ctx *ctx);
void ari_use_names_end(ari_use_names *n, ar_ctx *ctx);
