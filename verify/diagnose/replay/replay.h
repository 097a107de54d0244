/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A module computed again from the inputs and weights that the dumps hold: first as the reference has it, to learn what
 * names do not show (heads, rotary base, activation), then with one fault at a time. The fault that gives the other
 * dump's values is the cause. If an input is missing, or the reference is not reproduced, there is no answer. */
#include "verify/diagnose/case.h"

/** True for a value [b, s, width] small enough to be computed again. */
bool ari_may_replay(const ari_case *c);
/** True for values of scores [b, heads, s, s], equally small. */
bool ari_are_scores(const ari_case *c);
/** The first tensor of a role in a layer, as a key of any pass has it; NULL: none. */
const ar_dump_tensor *ari_find_role(ari_walk w, ari_role role, long layer);
/** The reference's forward value of a role in this tensor's layer and step; NULL: none. */
const ar_dump_tensor *ari_replay_input(const ari_case *c, ari_role role);
/** p = softmax(z) of n elements, which may be the same; returns the logarithm of the sum of exp(z). */
double ari_softmax(double *p, const double *z, size_t n);
/** Whether what differs in the gradient of a router's logits, which are z, is that of a loss of its own. Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_replay_balance(ari_trace *t, const ari_case *c, const float *z);
/** The values of one of the reference's tensors (NULL: it has none), `count` of them; *held stays true if it has them,
 *  and the other dump, if it has them, the same. Errors: AR_ERR_MEMORY, those of reading. */
AR_NODISCARD ar_status ari_right_rows(float **gives, bool *held, const ari_case *c, size_t count,
                                      const ar_dump_tensor *t);
/** The same of a role in this tensor's layer and step. */
AR_NODISCARD ar_status ari_replay_rows(float **gives, bool *held, const ari_case *c, size_t count, ari_role role,
                                       char pass);
/** ari_replay_input of either dump and of any pass. */
const ar_dump_tensor *ari_replay_value(const ari_case *c, const ar_dump *dump, ari_role role, char pass);
/** The reference's forward values of the parts of this tensor's module, or of the attention whose output it is, unless
 *  names show that they come after the scores; returns their number. */
size_t ari_replay_parts(const ar_dump_tensor **part, size_t most, const ari_case *c);
/** The numbers of attention's sinks, a score of each head: its parameter of one dimension that is no layer's;
 *  NULL: none. */
const ar_dump_tensor *ari_replay_sinks(const ari_case *c);
/** The weights before this tensor's step; the initial ones, which are also those of a file of weights, if a dump has no
 *  others. */
ari_walk ari_replay_weights(const ari_case *c, const ar_dump *dump);
/** The parameter of a role (ARI_NO_ROLE: the case's own module) in this tensor's layer, of kind ".weight" or ".bias", from either dump, since a reference of activations alone has no
 *  parameters. NULL: none. */
const ar_dump_tensor *ari_replay_parameter(const ari_case *c, ari_role role, const char *kind);

/** The reference's forward values of `width` features (or of several heads side by side that have as many each) that
 *  the case's module may have read: those of its layer and the one before, then those outside of layers; returns how
 *  many. */
enum { ARI_MOST_NEAR = 32 };
size_t ari_replay_near(const ar_dump_tensor *near[ARI_MOST_NEAR], const ari_case *c, size_t width);

/** Gives a norm's own gain and shift [cols], 1 and 0 if it has none; *found: a dump has its gain as it was in this
 *  step. Errors: AR_ERR_MEMORY, those of reading. */
AR_NODISCARD ar_status ari_norm_parameters(float **gain, float **shift, bool *found, const ari_case *c);

/** The place of a ring of n that has a position, in a zigzag or in contiguous chunks; *index: among the place's own. */
size_t ari_place_in_ring(size_t *index, size_t seq, size_t n, bool zigzag, size_t at);

/* A table that rows are looked up in. */
typedef struct ari_lookup_table {
    float *at; /* [rows, cols]; NULL: no dump has it, or the search would take long */
    size_t rows, cols;
} ari_lookup_table;
/** Reads the weight of a role (none: the module's own) for lookups. Errors: those of reading, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_lookup_table_read(ari_lookup_table *table, const ari_case *c, ari_role role, size_t lookups);
/** Which row this is, bit for bit; table->rows: none. */
size_t ari_lookup_table_row(const ari_lookup_table *table, const float *row);
/** The batch's n ids, from the rows of the embedding that the reference looked up; NULL: unknown. */
AR_NODISCARD ar_status ari_replay_ids(size_t **gives, const ari_case *c, size_t n);

enum { ARI_PROBE_TOKENS = 10, ARI_PROBE_FEATURES = 64, ARI_PROBE_WIDTH = 1 << 16, ARI_PROBE_ELEMENTS = 1 << 20 };

/* Some tokens and features of the first sample that differs: a fault shows in all of them. */
typedef struct ari_probe {
    const ari_case *c;
    size_t sample, seq;
    size_t heads;                           /* of scores; 0: these are no scores */
    size_t token[ARI_PROBE_TOKENS], tokens; /* in the sample; the first one is the first that differs */
    const float *ref[ARI_PROBE_TOKENS], *val[ARI_PROBE_TOKENS]; /* their rows, of scores the first head's */
    size_t out[ARI_PROBE_FEATURES], outs;
    size_t in;       /* features that the last linear layer reads */
    float *w, *bias; /* [outs][in], [outs]; NULL: there is no last layer */
    double base[ARI_PROBE_TOKENS * ARI_PROBE_FEATURES], is[ARI_PROBE_TOKENS * ARI_PROBE_FEATURES];
} ari_probe;

/** Chooses tokens and features. */
void ari_probe_choose(ari_probe *p, const ari_case *c);
/** Chooses rows of a module that makes each output row of one input row: the first that differ, in any sample and rank.
 *  */
void ari_probe_choose_rows(ari_probe *p, const ari_case *c);
/** Reads the last layer's rows; *held: a dump has its weight. Errors: those of reading, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_probe_read_layer(ari_probe *p, bool *held, ari_role role);
/** Rows of a forward value [b, s, ..] that belong to the probe's sample, as [s][*width]; *held: it has such rows, and
 *  the other dump's are right. */
AR_NODISCARD ar_status ari_probe_read_input(float **gives, size_t *width, bool *held, const ari_probe *p,
                                            const ar_dump_tensor *t);
/** Sets what token k's features become where the last layer reads x. */
void ari_probe_put(ari_probe *p, size_t k, const double *x);
/** True if the rows put are the reference; if they leave less of the reference's squares than `least`, that becomes the
 *  residual, and the rows the base. */
bool ari_probe_try_base(ari_probe *p, double *least);
/** The residual's squares if the rows put replace the base; relative to the reference's squares if they are to be the
 *  base. NaN is skipped. */
double ari_probe_left(const ari_probe *p, bool of_base);

/* The reference is reproduced to 1 % in bf16 and much better in fp32. The right fault leaves at most a seventh of the
 * difference: others of the same module leave most of it. */
#define ARI_REPLAY_BASE 3e-4
#define ARI_REPLAY_EXACT 1e-8
#define ARI_REPLAY_CAPPED 1e-6 /* more than this is no rounding of fp32: a cap of scores may leave little */
#define ARI_REPLAY_MISTAKE 0.02
