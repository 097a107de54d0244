/* SPDX-License-Identifier: Apache-2.0 */
/* Internals of the baseline: one run, its memory, and the operations of a transformer as plain loops. Every tensor is a
 * row-major array of binary64. Where numerics.md says fl32, ari_bl_fl rounds (or does not, in the binary64 mode), so
 * the same code serves the three modes. Letters: b batch, s sequence, h hidden, d head size, H heads, G KV heads, V
 * vocabulary. */
#pragma once

#include <stdint.h>

#include "anyrank/baseline.h"
#include "anyrank/config.h"
#include "anyrank/rope.h"
#include "ref/core/size.h"
#include "ref/numerics/bits.h"

enum { ARI_BL_NAME_SIZE = 400 };

/* Names of parts within a module path (models.md). NULL: the architecture lacks the part. */
typedef struct ari_bl_names {
    const char *embed, *positions, *embedded; /* wte, wpe, and their sum */
    const char *blocks;                       /* blocks.N is the path of block N */
    const char *ln1, *ln2, *final_norm;
    const char *sinks;
    const char *attention_norm, *mlp_norm, *qk_norm[2]; /* norms of the outputs of attention and MLP; of queries and
                                                           keys */
    const char *head;                                   /* name of the LM head; NULL: none, and the loss is the sum
                                                           of the output */
    const char *qkv_param[3], *o_param, *fc_param[2], *down_param; /* qkv_param[1] NULL: q, k and v are one tensor;
                                                                      fc_param[1] NULL: no gate */
    const char *qkv[3], *rope[2], *probs, *context, *residual, *fc[2], *act;
    const char *q_a, *q_norm, *q_b, *kv_a, *kv_norm, *kv_b, *dshared; /* names in latent attention; dshared: backward
                                                                         only */
    const char *dqkv[3], *dattention, *dfc[2], *dmlp;                 /* backward only */
    const char *drop_embed, *drop_probs, *drop_attention, *drop_mlp;  /* dropout sites; drop_embed may be NULL */
    bool conv1d;                                                      /* weights of the blocks are stored [in, out] */
    bool by_head; /* a row of packed q, k and v groups them by head */
} ari_bl_names;

typedef struct ari_bl_memory ari_bl_memory;

/* Random errors instead of roundings: the stream of numerics.md section 7 and the position in it. ARI_BL_NOISE_READY
 * numbers are drawn at a time. */
enum { ARI_BL_NOISE_READY = 128 };
typedef struct ari_bl_noise {
    uint64_t key, used;
    ar_noise_units unit;
    double ready[ARI_BL_NOISE_READY];
} ari_bl_noise;

typedef struct ari_bl_training ari_bl_training;

/* One run. Borrows the caller's structs. */
typedef struct ari_bl_run {
    const ar_config *c;
    const ar_baseline_options *o;
    const ar_batch *batch; /* the batch of this step */
    const ari_bl_names *names;
    uint32_t step;             /* step number from 1, which dropout's masks depend on */
    ari_bl_noise *noise;       /* NULL: no noise */
    ari_bl_training *training; /* NULL: no weight is updated */
    size_t b, s, tokens;       /* tokens = b*s */
    char prefix[160];          /* path of the running module; "" for the model itself */
    size_t window;             /* keys further back than this are masked in the running block; 0: no window */
    double *largest;           /* largest logits of the running attention; NULL: not recorded */
    const ar_rope *rope;       /* RoPE of the running block */
    const struct ari_bl_seen *router_stats;
    double share;       /* weight of the current loss in the model's loss; 0: the whole loss */
    int threads;        /* threads that compute independent values */
    ari_bl_memory *top; /* everything allocated and not yet released, last first */
    ar_status memory;   /* error of a failed allocation, kept because the run ends with it */
} ari_bl_run;

/* --- memory: a stack ---------------------------------------------------------------------------------------------- */
/** Allocates rows*cols zeroed elements of `size` bytes. Returns NULL on failure and sets run->memory, which later
 *  successes do not reset, so that one AR_TRY(run->memory) checks several allocations. The memory lives until a
 *  release. */
void *ari_bl_take(ari_bl_run *run, size_t rows, size_t cols, size_t size);
/** ari_bl_take of binary64 values. */
double *ari_bl_doubles(ari_bl_run *run, size_t rows, size_t cols);
/** Frees everything taken since `mark` was the top. What an error return leaves is released by whoever releases next,
 *  at the latest by the end of the run. */
void ari_bl_release(ari_bl_run *run, const ari_bl_memory *mark);
/** Begins a scope: memory taken from here on is released at the end of the block. */
#define ARI_BL_SCOPE(run) ARI_ENDED(ari_bl_scope_end) const ari_bl_scope ari_bl_scope_ = {(run), (run)->top}
typedef struct {
    ari_bl_run *run;
    const ari_bl_memory *mark;
} ari_bl_scope;
void ari_bl_scope_end(const ari_bl_scope *s);

/* --- rounding and emission ---------------------------------------------------------------------------------------- */
/** The next ARI_BL_NOISE_READY numbers. */
void ari_bl_noise_refill(ari_bl_noise *noise);
/** A number in (-1, 1), and one of mean 0 and variance 1 between -3.5 and 3.5. */
static inline double ari_bl_noise_uniform(ari_bl_noise *noise)
{
    const uint64_t index = noise->used % ARI_BL_NOISE_READY;
    if (index == 0)
        ari_bl_noise_refill(noise);
    noise->used++;
    return noise->ready[index];
}
double ari_bl_noise_normal(ari_bl_noise *noise);

/* The only rounding, at three places: `inner` within an operation, `branch` where a result between two products is
 * stored, `stream` where any other result is stored. It is fl32 of numerics.md in the exact and fp32 modes. In binary64
 * it is the identity, or with noise adds an error of the size for that place. NaN is canonical. */
enum { ARI_BL_INNER, ARI_BL_BRANCH, ARI_BL_STREAM, ARI_BL_PRODUCT };
static inline double ari_bl_round(const ari_bl_run *run, double x, int place)
{
    if (x != x)
        return (double)ari_nan32();
    if (run->o->mode != AR_MODE_F64)
        return (double)(float)x;
    if (run->noise == NULL)
        return x;
    const ar_noise_units *u = &run->noise->unit;
    const double unit = place == ARI_BL_INNER    ? u->inner
                        : place == ARI_BL_BRANCH ? u->branch
                        : place == ARI_BL_STREAM ? u->stream
                                                 : u->product;
    return x + x * unit * ari_bl_noise_uniform(run->noise);
}
static inline double ari_bl_fl(const ari_bl_run *run, double x)
{
    return ari_bl_round(run, x, ARI_BL_INNER);
}
static inline double ari_bl_branch(const ari_bl_run *run, double x)
{
    return ari_bl_round(run, x, ARI_BL_BRANCH);
}
static inline double ari_bl_stream(const ari_bl_run *run, double x)
{
    return ari_bl_round(run, x, ARI_BL_STREAM);
}
/** Returns x as it is stored between two operations: rounded again to bf16 if the run stores bf16. */
static inline double ari_bl_keep(const ari_bl_run *run, double x)
{
    return run->o->bf16 ? (double)ari_f32_of_bf16(ari_bf16_of_f32((float)x)) : x;
}
/** Does the same for x[0..n). */
void ari_bl_keep_all(const ari_bl_run *run, double *x, size_t n);
/** Returns a config's value, or one derived from it, as a run stores it: fp32 except in the binary64 mode. */
static inline double ari_bl_stored(const ari_bl_run *run, double x)
{
    return run->o->mode == AR_MODE_F64 ? x : (double)(float)x;
}
/** Rounds x[0..n) to a format with unit round-off `unit`: each value gets an error unless it is a number of the
 *  format. */
void ari_bl_shorten(ari_bl_noise *noise, double *x, size_t n, double unit);
/** Writes "prefix.part", the full name of a tensor; either may be "". */
void ari_bl_name(const ari_bl_run *run, char name[ARI_BL_NAME_SIZE], const char *part);
/** Emits values under prefix.part (either may be ""). */
AR_NODISCARD ar_status ari_bl_emit(ari_bl_run *run, const char *part, char pass, int ndim, const size_t *shape,
                                   const double *values);
/** Emits columns [first_col, first_col + features) of x [tokens, ld] as [b, s, features]. */
AR_NODISCARD ar_status ari_bl_emit_tokens(ari_bl_run *run, const char *part, char pass, const double *x, size_t ld,
                                          size_t first_col, size_t features);

/* --- threads ------------------------------------------------------------------------------------------------------ */
/** Calls task(copy of the run, arg, i) for i = 0 .. n-1; each result value is written by exactly one call. A copy has
 *  its own memory, which is released after its tasks. If random errors are drawn, all calls run in order. */
AR_NODISCARD ar_status ari_bl_each(ari_bl_run *run, size_t n, ar_status (*task)(ari_bl_run *, void *, size_t),
                                   void *arg);

/* --- sums: numerics.md sections 2, 3 and 4 ------------------------------------------------------------------- */
/* A matrix by strides: element (i, k) is data[i*row + k*col]. */
typedef struct ari_bl_matrix {
    const double *data;
    size_t row, col;
} ari_bl_matrix;
/* Flags of a product: ARI_BL_SCALED equilibrates (step 0); ARI_BL_WEIGHT multiplies by a parameter; ARI_BL_PEAKED by
 * gradients of logits. */
enum { ARI_BL_PLAIN = 0, ARI_BL_SCALED = 1, ARI_BL_WEIGHT = 2, ARI_BL_PEAKED = 4 };
/** Computes c[i,j] = round(sum over k of a(i,k)*b(j,k)); c [m, n] row-major. */
AR_NODISCARD ar_status ari_bl_contract(ari_bl_run *run, double *c, size_t m, size_t n, size_t k, ari_bl_matrix a,
                                       ari_bl_matrix b, int flags);
/* Rows of a panel. Products that are computed tile by tile have their operands as panels of 16 adjacent rows, [k][16],
 * the last one padded with zeros. Elements are what the mode multiplies: integers with a unit per row, fp32, or
 * binary64. */
enum { ARI_BL_PANEL = 16 };
static inline size_t ari_bl_panels(size_t n)
{
    return (n + ARI_BL_PANEL - 1) / ARI_BL_PANEL;
}
typedef struct ari_bl_product {
    const ari_bl_run *run;
    size_t m, n, k;
    ari_bl_matrix matrix_a, matrix_b;
    int flags;
    int32_t *exponent;       /* [k] exponents from step 0 */
    void *a, *b;             /* panels */
    double *unit_a, *unit_b; /* scales [m] and [n] */
    double *c;
} ari_bl_product;
/** Opens a product without random errors. */
AR_NODISCARD ar_status ari_bl_product_open(ari_bl_run *run, ari_bl_product *p, size_t m, size_t n, size_t k,
                                           ari_bl_matrix a, ari_bl_matrix b, int flags);
/** Rows 16i.. and columns 16j.. of C, rounded. */
void ari_bl_product_tile(const ari_bl_product *p, double c[ARI_BL_PANEL][ARI_BL_PANEL], size_t i, size_t j);
/** Returns the sum of x[0..n) as defined in section 4, in binary64. */
double ari_bl_row_sum(const ari_bl_run *run, const double *x, size_t n);
/** Does the same with a known exponent: |x| < 2^e for all x. */
double ari_bl_row_sum_below(const ari_bl_run *run, const double *x, size_t n, int32_t e);

/* Sums over samples and tokens of unknown number, one for each element of a gradient. */
typedef struct ari_bl_sums {
    const ari_bl_run *run;
    size_t n;       /* sums */
    int place;      /* position among the roundings of the additions */
    int bits;       /* exact mode: bits of a slice of |v|*2^149 */
    int64_t *slice; /* [slices, n] sums of each slice, with v's sign */
    int64_t *top;   /* exact mode: the highest slice that was nonzero in any value; NONFINITE_TOP: some value was NaN
                       or infinite */
    double *plain;  /* sums in the other modes */
} ari_bl_sums;
/** matrix: the sums are a matrix's gradient, which may be stored as bf16. */
AR_NODISCARD ar_status ari_bl_sums_open(ari_bl_run *run, ari_bl_sums *sums, size_t n, bool matrix);
/** Adds v[0..n) to the sums first_sum, first_sum + 1, .. */
void ari_bl_sums_add(const ari_bl_sums *sums, size_t first_sum, const double *v, size_t n);
double ari_bl_sums_value(const ari_bl_sums *sums, size_t i);

/* Terms of a gradient [rows, cols]; either source may be absent. */
typedef struct ari_bl_terms {
    const double *dy; /* [tokens, ld] or NULL: row r adds, per sample, the contraction over tokens with column r of
                         dy */
    size_t ld;        /*   with */
    const double *x;  /* [tokens, cols] */
    const size_t *sample_begin;      /* [b+1] sample i has rows [sample_begin[i], sample_begin[i+1]); NULL: all
                                        tokens together */
    const double *values;            /* [tokens, cols] or NULL: values of each token, added to row row_of[token] */
    size_t per_token;                /* number of rows of values per token that are all added to row 0; 0: one row
                                        per token */
    const size_t *row_of;            /* [tokens] row for each token; NULL: row 0 */
    bool stream;                     /* true for a parameter that is not part of any product */
    const struct ari_bl_terms *next; /* further terms; NULL: none */
} ari_bl_terms;
/** gradient [rows, cols] over all samples and tokens of the batch. */
AR_NODISCARD ar_status ari_bl_gradient(ari_bl_run *run, double *gradient, size_t rows, size_t cols,
                                       const ari_bl_terms *terms);

/* --- parameters --------------------------------------------------------------------------------------------------- */
typedef struct ari_bl_norm {
    const char *name;
    size_t width, per_token; /* elements of a row; rows per token: 1, or the number of heads */
    double eps;
    const double *weight, *bias; /* [width]; bias NULL for RMSNorm */
} ari_bl_norm;
/* A linear layer with one input and up to three parameter tensors stacked along the outputs: q|k|v, gate|up. */
typedef struct ari_bl_linear {
    size_t in_features, out; /* out: all parts together */
    int parts;
    const char *name[3];
    size_t width[3];             /* outputs of each part */
    bool conv1d;                 /* the parameter is stored [in, out] */
    bool peaked;                 /* true if its outputs are logits */
    const double *weight, *bias; /* weight [out, in]; bias [out] or NULL */
} ari_bl_linear;
/* MLP: fc (gate | up if gated) and down. */
typedef struct ari_bl_mlp {
    ari_bl_linear fc, down;
} ari_bl_mlp;
/* Results of the last forward pass of a layer's router, for its losses; all layers form a list. */
typedef struct ari_bl_seen {
    const struct ari_bl_seen *next;
    double *count, *p;                  /* [E] tokens of each expert, and the sum of their p */
    const struct ari_bl_routed *routed; /* valid until it is released */
    double value;                       /* losses of this layer only */
} ari_bl_seen;
typedef struct ari_bl_experts {
    ari_bl_linear gate; /* the router, [E, h] */
    ari_bl_mlp *mlps;   /* [E]; NULL: the layer has an MLP */
    ari_bl_mlp shared;
    ari_bl_linear shared_gate; /* [1, h]; for a shared expert with a gate */
    double *bias;              /* [E] bias by which a sigmoid router chooses, otherwise NULL */
    int64_t *tokens;           /* [E] number of tokens of each expert in the last forward pass; NULL without a bias */
    ari_bl_seen *router_stats;
} ari_bl_experts;
/* Latent attention: to low ranks, norms, to heads. */
typedef struct ari_bl_latent {
    ari_bl_linear down, q, kv; /* down: kv_a, and q_a if queries have a low-rank projection */
    ari_bl_norm q_norm, kv_norm;
} ari_bl_latent;
typedef struct ari_bl_params {
    ari_bl_norm ln1, ln2, attention_norm, mlp_norm, qk_norm[2]; /* the norms that the config has */
    ari_bl_linear qkv, o;                                       /* qkv: unused in latent attention */
    const double *sinks;                                        /* [H]; NULL: no sinks */
    double *largest; /* [KV heads] for QK-Clip, the largest logit in this step; NULL: not requested */
    ari_bl_latent latent;
    ari_bl_mlp mlp;
    ari_bl_experts experts;
} ari_bl_params;

const ari_bl_names *ari_bl_names_of(ar_arch arch);
/** Loads or creates the parameter prefix.part with HF shape [rows, cols] (cols = 0: a vector), and emits it. */
AR_NODISCARD ar_status ari_bl_parameter(ari_bl_run *run, double **values, const char *part, size_t rows, size_t cols,
                                        ar_init_scheme scheme, size_t fan_in, size_t fan_out);
AR_NODISCARD ar_status ari_bl_load_norm(ari_bl_run *run, ari_bl_norm *norm, const char *name, size_t width,
                                        size_t per_token);
/** name: up to three parts stacked along the outputs; biases only with with_bias. */
AR_NODISCARD ar_status ari_bl_load_linear(ari_bl_run *run, ari_bl_linear *l, size_t in_features,
                                          const char *const name[3], const size_t width[3], bool with_bias);
AR_NODISCARD ar_status ari_bl_load_block(ari_bl_run *run, ari_bl_params *p, size_t layer);
AR_NODISCARD ar_status ari_bl_load_experts(ari_bl_run *run, ari_bl_experts *e);
/** Emits the gradient of prefix.name[.weight|.bias]. */
AR_NODISCARD ar_status ari_bl_emit_gradient(ari_bl_run *run, const char *name, const char *kind, size_t rows,
                                            size_t cols, const double *gradient);

/* --- training: numerics.md section 6 ------------------------------------------------------------------------- */
/* A parameter that is updated. Element (r, c) of its Hugging Face shape is data[r*row + c*col]. */
typedef struct ari_bl_trained {
    char name[ARI_BL_NAME_SIZE];
    size_t rows, cols; /* cols 0: a vector */
    double *data;
    size_t row, col;
    double *gradient, *m, *v; /* row-major in that shape; m and v are NULL if the optimizer has no such moments */
    double *master;           /* row-major in that shape: the updated value if the weight is its bf16 copy; else NULL */
    double lr, weight_decay;  /* values in this step */
    bool matrix;              /* true if Muon updates it: a linear layer's weight, but not a router or a shared
                                 expert's gate */
    int blocks;               /* Muon: number of these outputs that form a matrix each; 0: all form one matrix */
    size_t block[3];
    bool frozen;         /* true if frozen in this step */
    double *largest;     /* for QK-Clip: logits of the layer that has these outputs of q | k | v, */
    size_t first_output; /* from this output on; NULL: the parameter is not clipped */
    int64_t *tokens;     /* [rows] for a router's bias, tokens of each expert in the step; otherwise NULL */
} ari_bl_trained;
struct ari_bl_training {
    ari_bl_trained *params; /* [n] in order of first use */
    size_t n;
    double beta1_t, beta2_t; /* beta^step */
};
/** Makes the run keep a list of parameters. Called before they are loaded. */
AR_NODISCARD ar_status ari_bl_training_open(ari_bl_run *run);
/** Adds prefix.part to the list if training is recorded. */
void ari_bl_training_add(ari_bl_run *run, const char *part, size_t rows, size_t cols, double *data, size_t row,
                         size_t col);
/** Divides the last matrix added into several stacked matrices. */
void ari_bl_training_cut(ari_bl_run *run, int blocks, const size_t block[3]);
/** Applies QK-Clip to the parameters of q, k and v, which begin at `first_param`. */
AR_NODISCARD ar_status ari_bl_training_clip(ari_bl_run *run, ari_bl_params *p, size_t first_param);
/** Allocates gradients and moments, after the last parameter. */
AR_NODISCARD ar_status ari_bl_training_take(ari_bl_run *run);
/** True if a parameter of the running module is frozen in this step. */
bool ari_bl_is_frozen(const ari_bl_run *run, const char *part);
/** Keeps a gradient for the update, if there is a list; gradient NULL: the parameter is frozen. */
AR_NODISCARD ar_status ari_bl_training_keep(ari_bl_run *run, const char *part, const double *gradient);
/** Updates a matrix from its gradient and momentum by Muon. p->lr and p->weight_decay are the step's. */
AR_NODISCARD ar_status ari_bl_muon(ari_bl_run *run, const ari_bl_trained *p);
/** Clips (emitting the norm) and updates every parameter; emits the new values. */
AR_NODISCARD ar_status ari_bl_training_update(ari_bl_run *run);

/* --- layers ------------------------------------------------------------------------------------------------------- */
/** Computes y [rows, cols] = x with the elements of the dropout site prefix.part dropped and the others scaled; y may
 *  be x. Rows are tokens, or with heads > 0 the queries of [b, heads, s] with keys as columns. Emitted unless pass is
 *  0. */
AR_NODISCARD ar_status ari_bl_dropout(ari_bl_run *run, const char *part, char pass, double *y, const double *x,
                                      size_t heads, size_t cols);
/* Rows [row, row + rows) and columns [col, col + cols) of a matrix. */
typedef struct ari_bl_region {
    size_t row, rows, col, cols;
} ari_bl_region;
/** Does the same for a region y, x with rows of `features` elements, without emitting it. */
void ari_bl_drop(const ari_bl_run *run, const char *part, double *y, const double *x, const ari_bl_region *region,
                 size_t features);
/** Forward pass of a linear layer for `rows` rows: all tokens, or an expert's. */
AR_NODISCARD ar_status ari_bl_linear_forward(ari_bl_run *run, const ari_bl_linear *l, double *y, const double *x,
                                             size_t rows);
AR_NODISCARD ar_status ari_bl_linear_backward(ari_bl_run *run, const ari_bl_linear *l, double *dx, const double *dy,
                                              size_t rows);
/** Sums and emits the gradients of weights and biases, part by part. sample_begin: as in ari_bl_terms, for layers
 *  without a bias; NULL: all tokens together. */
AR_NODISCARD ar_status ari_bl_linear_gradients(ari_bl_run *run, const ari_bl_linear *l, const double *dy,
                                               const double *x, const size_t *sample_begin);

/* Saved values of a norm: rows are those of all tokens, width is the norm's. */
typedef struct ari_bl_norm_saved {
    double *y, *xhat, *rstd; /* y and xhat [rows, width], rstd [rows] */
} ari_bl_norm_saved;
AR_NODISCARD ar_status ari_bl_norm_forward(ari_bl_run *run, const ari_bl_norm *norm, ari_bl_norm_saved *saved,
                                           const double *x);
AR_NODISCARD ar_status ari_bl_norm_backward(ari_bl_run *run, const ari_bl_norm *norm, double *dx, double *sum,
                                            const double *residual, const double *dy, const ari_bl_norm_saved *saved);
AR_NODISCARD ar_status ari_bl_norm_gradients(ari_bl_run *run, const ari_bl_norm *norm, const double *dy,
                                             const ari_bl_norm_saved *saved);

typedef struct ari_bl_attention {
    ari_bl_norm_saved normed[2]; /* queries and keys if they are normalised */
    double *q, *k, *v;           /* head by head and rotated: [b, H, s, d], [b, G, s, d], [b, G, s, d] */
    double *probs;               /* [b, H, s, s]; NULL: recomputed in bands */
    double *dropped;             /* [b, H, s, s]: probs after dropout, or probs itself without dropout */
    double *bare;                /* [b, H, s, s]: scores before the cap; NULL: no cap */
    double *max_logit, *sum;     /* [b, H, s] largest logit of each row, and the sum of the exponentials */
    double *context;             /* [tokens, H*d] */
    double *sunk;                /* [b, H, s]: probabilities of the sinks; NULL: no sinks */
} ari_bl_attention;
/** Computes attention. qkv [tokens, (H + 2G)*d]: q|k|v, in latent attention with values of another width; p: its norms
 *  of queries and keys and its sinks are used. Emits q, k, v, the norms, q_rope, k_rope, probs, context. */
AR_NODISCARD ar_status ari_bl_attention_forward(ari_bl_run *run, ari_bl_attention *saved, const ari_bl_params *p,
                                                const double *qkv);
/** Computes dqkv from dcontext [tokens, H*d]; emits probs, q_rope, k_rope, the norms and their gradients, v, q, k. */
AR_NODISCARD ar_status ari_bl_attention_backward(ari_bl_run *run, double *dqkv, const double *dcontext,
                                                 const ari_bl_params *p, const ari_bl_attention *saved);

/* Inputs and normalised values of latent attention's low-rank paths. */
typedef struct ari_bl_latent_saved {
    ari_bl_norm_saved q_norm, kv_norm;
} ari_bl_latent_saved;
AR_NODISCARD ar_status ari_bl_load_latent(ari_bl_run *run, ari_bl_latent *l);
/** q|k|v [tokens, ..] of x [tokens, h]. */
AR_NODISCARD ar_status ari_bl_latent_forward(ari_bl_run *run, const ari_bl_latent *l, ari_bl_latent_saved *saved,
                                             double *qkv, const double *x);
/** Computes dx from dqkv; sums and emits the gradients. */
AR_NODISCARD ar_status ari_bl_latent_backward(ari_bl_run *run, const ari_bl_latent *l, double *dx, const double *dqkv,
                                              const ari_bl_latent_saved *saved, const double *x);

/** Rotates queries or keys [b, heads, s, d] by their positions in place; direction -1 is the backward pass. */
void ari_bl_rotate(ari_bl_run *run, double *x, size_t heads, double direction);

/** Computes c*tanh(x/c), and dy times its slope at x, which is +0 for a dy of zero. Not rounded. */
double ari_bl_cap(double x, double c);
double ari_bl_uncap(double dy, double x, double c);
/** Computes p[0..n) = softmax of x over the elements with visible[i] (NULL: all), +0 elsewhere, and all +0 if none is
 *  visible. *m and *l are the maximum and the sum of the exponentials. */
void ari_bl_softmax(const ari_bl_run *run, double *p, const double *x, const uint8_t *visible, size_t n, double *m,
                    double *l);

/* Activations of an MLP: [rows, gate | up or F], [rows, F], and its output [rows, h]. */
typedef struct ari_bl_mlp_saved {
    double *fc, *act, *y;
} ari_bl_mlp_saved;
/* Computes out [rows, F] from fc [rows, F], or act(gate)*up from gate | up [rows, 2F]. */
AR_NODISCARD ar_status ari_bl_activate(ari_bl_run *run, double *out, const double *fc, size_t rows, size_t f);
/* Computes dfc from dout: dfc = dout*act'(fc), or dgate = (dout*up)*act'(gate) and dup = dout*act(gate). doubt:
 * uncertainty of the argument of a function with a kink; negative: none. */
AR_NODISCARD ar_status ari_bl_activate_backward(ari_bl_run *run, double *dfc, const double *dout, const double *fc,
                                                size_t rows, size_t f, double doubt);

/* Routes of tokens, and their experts' results. The k slots of a token are its experts in ascending order; row
 * place[t*k + j] of the experts' activations is slot j of token t. Rows are sorted by expert, then by token. */
typedef struct ari_bl_routed {
    double *p;            /* [tokens, E] the router's softmax, or sigmoids */
    double *lse;          /* [tokens] logarithm of the softmax's denominator */
    size_t *expert;       /* [tokens, k] */
    double *weight;       /* [tokens, k] */
    size_t *place;        /* [tokens, k] */
    size_t *expert_begin; /* [E+1] first row of each expert */
    size_t *sample_begin; /* [E, b+1]: index at which each sample's rows begin */
    double *x;            /* [tokens*k, h] */
    ari_bl_mlp_saved experts, shared;
    double *share; /* [tokens] sigmoid of the shared expert's gate */
} ari_bl_routed;
/** Routes token t of r: computes p, experts and weights from its logits z [E]. bias: for a router of sigmoids, else
 *  NULL. work: [2, E]. */
void ari_bl_route_token(const ari_bl_run *run, const double *bias, const ari_bl_routed *r, size_t t, const double *z,
                        double *work);
/** dz [tokens, E] from g [tokens, k], the gradients of the weights. dz is zero. */
void ari_bl_router_gradient(const ari_bl_run *run, double *dz, const double *g, const ari_bl_routed *r);
double ari_bl_sigmoid(const ari_bl_run *run, double x);
/** y [tokens, h] = sum over the slots of weight*expert(x), and the shared expert. */
AR_NODISCARD ar_status ari_bl_experts_forward(ari_bl_run *run, const ari_bl_experts *e, ari_bl_routed *saved, double *y,
                                              const double *x);
/** Computes dx [tokens, h] from dy; sums and emits the gradients. */
AR_NODISCARD ar_status ari_bl_experts_backward(ari_bl_run *run, const ari_bl_experts *e, double *dx, const double *dy,
                                               const ari_bl_routed *saved, const double *x);

/* Loads the routers' losses; does nothing if there are none. */
AR_NODISCARD ar_status ari_bl_balance_load(ari_bl_run *run, ari_bl_experts *e);
/** Records the values from which the layer's losses are computed. */
AR_NODISCARD ar_status ari_bl_balance_forward(ari_bl_run *run, const ari_bl_experts *e, const ari_bl_routed *r);
/** Adds the balance losses of all layers, from their last forward passes, to *loss. */
AR_NODISCARD ar_status ari_bl_balance_add(ari_bl_run *run, double *loss);
/** Adds their gradient to dz [tokens, E], after all layers' forward passes. */
AR_NODISCARD ar_status ari_bl_balance_backward(ari_bl_run *run, double *dz, const ari_bl_routed *r);

/* Saved activations of a block. */
typedef struct ari_bl_block {
    ari_bl_norm_saved n1, n2, attention_norm, mlp_norm;
    ari_bl_latent_saved latent;
    ari_bl_attention attention;
    const double *attention_x, *mlp_x; /* [tokens, h] inputs of attention and MLP */
    ari_bl_mlp_saved mlp;
    ari_bl_routed routed;
    double *y; /* [tokens, h] the output */
} ari_bl_block;
/** Block `layer` on x [tokens, h]. */
AR_NODISCARD ar_status ari_bl_block_forward(ari_bl_run *run, size_t layer, const ari_bl_params *p, ari_bl_block *saved,
                                            const double *x);
/** Computes dx [tokens, h] from dy; dx may be dy. */
AR_NODISCARD ar_status ari_bl_block_backward(ari_bl_run *run, size_t layer, const ari_bl_params *p, double *dx,
                                             const double *dy, const ari_bl_block *saved);

/* --- checks of the caller's input --------------------------------------------------------------------------------- */
AR_NODISCARD ar_status ari_bl_check(const ar_config *c, const ar_baseline_options *o, const ar_batch *batch);
AR_NODISCARD ar_status ari_bl_check_batch(const ar_config *c, const ar_baseline_options *o, const ar_batch *batch);
AR_NODISCARD ar_status ari_bl_check_tokens(const ar_config *c, const ar_batch *batch);
/** True if tokens t and u of a sample belong to different documents. */
bool ari_bl_in_different_documents(const ar_batch *batch, size_t sample, size_t t, size_t u);
/** Returns the position of token t of a sample: the batch's, or the number of tokens before t in its document. */
size_t ari_bl_position(const ar_batch *batch, size_t sample, size_t t);
/** Target of sample `row` at `position`: a token id, or AR_IGNORE_INDEX. */
int64_t ari_bl_target(const ar_batch *batch, size_t row, size_t position);

/* --- a whole model: its parameters, and what one pass over it keeps ----------------------------------------------- */

typedef struct ari_bl_model {
    const double *embed;     /* [V, h] */
    const double *positions; /* [max_positions, h] or NULL */
    ari_bl_params *block;    /* one per layer */
    ari_bl_norm final_norm;  /* final norm if the config has one */
    ari_bl_linear head;      /* LM head; its weight is the embedding if they are tied */
    size_t *ids;             /* [tokens] rows of the embedding */
    double *head_x;          /* [tokens, h] the head's input, or the stack's output */
    double *dlogits;         /* [tokens, V] first the logits, then their gradient */
    double *bare;            /* [tokens, V]: logits before the cap, if there is a cap */
    double *dx;              /* [tokens, h] the gradient during the backward pass */
    struct ari_bl_mtp *mtp;  /* one per further token */
} ari_bl_model;

/* A further token's block; `model`: the shifted ids, the head's input, logits and gradients, as in a model. */
typedef struct ari_bl_mtp {
    size_t layer;
    ari_bl_norm tokens_norm, entered_norm, made_norm;
    ari_bl_linear joined;
    ari_bl_params block;
    ari_bl_model model;
    ar_batch batch;
    ari_bl_norm_saved tokens, entered, output;
    double *concat; /* [tokens, 2h] */
    ari_bl_block saved;
} ari_bl_mtp;
AR_NODISCARD ar_status ari_bl_load_mtp(ari_bl_run *run, ari_bl_model *m);
/** Allocates what lives through a pass. */
AR_NODISCARD ar_status ari_bl_take_mtp(ari_bl_run *run, ari_bl_model *m);
/** Runs all depths from m->head_x, and adds their part of the loss to *loss. */
AR_NODISCARD ar_status ari_bl_mtp_forward(ari_bl_run *run, ari_bl_model *m, double *loss);
/** Computes dx [tokens, h] of m->head_x without the head's gradient; sums and emits the blocks' gradients. */
AR_NODISCARD ar_status ari_bl_mtp_backward(ari_bl_run *run, const ari_bl_model *m, double *dx);

/** Initialises a run from the caller's arguments, checked, with nothing loaded. Call ari_bl_release(run, NULL) in any
 *  case. */
AR_NODISCARD ar_status ari_bl_begin(ari_bl_run *run, const ar_config *c, const ar_baseline_options *o,
                                    const ar_batch *batch);
/** Begins step 1, 2, .. with a batch that has been checked. */
AR_NODISCARD ar_status ari_bl_enter_step(ari_bl_run *run, const ar_batch *batch, uint32_t step);
/** Loads or makes all parameters, in the order of their first use. */
AR_NODISCARD ar_status ari_bl_load_model(ari_bl_run *run, ari_bl_model *m);
/** Allocates buffers that live through a whole pass. */
AR_NODISCARD ar_status ari_bl_take_buffers(ari_bl_run *run, ari_bl_model *m);
/** Computes the final norm (if any) and the loss, and unless forward_only their backward pass: m->dx is then the
 *  gradient of x, the last block's output. */
AR_NODISCARD ar_status ari_bl_end(ari_bl_run *run, ari_bl_model *m, const double *x, double *loss);
/** Computes x [tokens, h], rows of the embedding plus learned positions, and emits it. */
AR_NODISCARD ar_status ari_bl_embed(ari_bl_run *run, const ari_bl_model *m, double *x);
/** Computes gradients of the embedding (if tied, of both uses) and of the learned positions from m->dx, which dropout
 *  overwrites, and emits them. */
AR_NODISCARD ar_status ari_bl_embed_gradients(ari_bl_run *run, const ari_bl_model *m);
/** Logits and their loss from m->head_x; m->dlogits is left holding the gradient of the logits. */
AR_NODISCARD ar_status ari_bl_logits(ari_bl_run *run, ari_bl_model *m, double *loss);
/** Does the same for the model, with the losses of further tokens and of routers; emits them. */
AR_NODISCARD ar_status ari_bl_loss_forward(ari_bl_run *run, ari_bl_model *m, double *loss);
/** Computes dx [tokens, h] of m->head_x and emits it. */
AR_NODISCARD ar_status ari_bl_loss_backward(ari_bl_run *run, const ari_bl_model *m, double *dx);
/** Computes the untied head's gradient over all its uses. */
AR_NODISCARD ar_status ari_bl_head_gradient(ari_bl_run *run, const ari_bl_model *m);
