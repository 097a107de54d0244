/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Facts about a loss from two dumps: logits, ids, tokens that count, and the gradient of each. */
#include "verify/diagnose/replay/replay.h"

/* Label smoothing e and z-loss c (anyrank/batch.h, ar_loss_options), and what they may be off by. */
enum { ARI_SMOOTHING, ARI_Z_LOSS, ARI_LOSS_EXTRAS };
typedef struct ari_loss_extra {
    bool known;
    double is[ARI_LOSS_EXTRAS], unsure[ARI_LOSS_EXTRAS];
} ari_loss_extra;

/* One dump's side of the loss. The cross-entropy of token i against id j is lse[i] less its logit of j. */
typedef struct ari_loss_side {
    float *logits;                  /* [samples, seq, vocabulary] */
    double *lse;                    /* [samples, seq] */
    bool *counts;                   /* [samples, seq]: the loss depends on this token's logits */
    bool of_dump;                   /* a dump shows it; else these are all tokens but each sample's last */
    const ar_dump_tensor *gradient; /* which shows it */
    size_t targets;
    size_t *label; /* [samples, seq]: the label by the gradient of a token that counts; NULL: unknown */
    double left;   /* of those gradients, the largest share that their labels leave */
    size_t shards; /* of the vocabulary, of which that gradient has the label's alone; 0: it has all */
    double value;  /* the loss; NAN: it is not looked at */
    ari_loss_extra options;
} ari_loss_side;

typedef struct ari_losses {
    const ari_case *c;
    size_t samples, seq, vocabulary, tokens;
    size_t *ids;         /* [samples, seq] */
    double *weight;      /* [samples, seq]: a token's gradient as a multiple of the reference's; NULL: it is none */
    ari_loss_side of[2]; /* the reference, the other */
} ari_losses;

/** Reads both dumps; *held: their loss can be computed again. Without another dump the reference's values are the
 *  other's too, as for a loss that differs first. Errors: those of reading, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_losses_read(ari_losses *l, bool *held, bool of_loss);
/** The value of logits (pass 'f') that the loss is of, or the gradient (pass 'b') that is next to it; NULL: none. */
const ar_dump_tensor *ari_loss_tensor(const ari_case *c, const ar_dump *dump, char pass);

/** Sets the other's shards if its labels are the reference's by gradients of their shards alone. Errors: those of
 *  reading, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_loss_shards_find(ari_losses *l);
/** What the other's logits are multiplied by before the loss, if its value and the labels of its gradients say so; 0:
 *  nothing. Overwrites its logits. Errors: those of reading, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_loss_scale_find(double *times, ari_losses *l);

/** Compares labels, and which tokens count, by the gradients of both dumps; names the ranks whose are others. Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_loss_labels_compare(ari_trace *t, const ari_losses *l);
/** Finds samples, or labels, that count more or less than in the reference. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_loss_weights_compare(ari_trace *t, const ari_losses *l);

static inline double ari_loss_entropy(const ari_losses *l, const ari_loss_side *s, size_t token, size_t id)
{
    return s->lse[token] - (double)s->logits[token * l->vocabulary + id];
}

/** Reads e and c from a side's gradient of logits. Errors: those of reading, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_loss_extra_read(ari_loss_side *s, const ari_losses *l, const ar_dump *dump);
/** The same from the loss itself, whose labels are the next ids; tests that both agree. */
void ari_loss_extra_fit(ari_loss_side *s, const ari_losses *l);
/** Tests whether the other's z-loss is of all tokens, where the reference's is of the targets. */
void ari_loss_extra_of_all(ari_trace *t, const ari_losses *l);
/** Compares the other's e and c with the reference's. */
void ari_loss_extra_compare(ari_trace *t, ari_losses *l);
/** The same of a classifier of few classes. Errors: those of reading, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_loss_classes_compare(ari_trace *t, const ari_case *c);
