/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_DEVICE_H
#define ANYRANK_DEVICE_H

#include "anyrank/batch.h"
#include "anyrank/block.h"
#include "anyrank/queue.h"
#include "anyrank/rope.h"
#include "anyrank/tensor.h"

AR_BEGIN_DECLS

/* A device: memory and compute kernels for one rank. It knows neither groups of ranks nor the choice of numerics. Its
 * function table is ar_device_ops. Every kernel is enqueued on q; the CPU runs it at once and accepts inline queues
 * only.
 *
 * Conventions of the kernels below. Matrices are ar_tensor views of 2 to 4 dimensions: the last two are rows and
 * columns, the others batch dimensions; "batch" is the product of the latter, in row-major order. Strides are arbitrary
 * unless a comment says "contiguous". Activations and gradients are F32 or, in native numerics, BF16; the tensors of a
 * call have one dtype unless a comment says otherwise. Kernels compute in fp32 and round results that are stored as
 * BF16 once, to nearest, ties to even. fl32 is rounding to fp32; exp32, act32 and sigmoid32 are fp32 functions of
 * ref/numerics. A row sum is the fixed-point sum of numerics.md, section 4. "Terms" of a product are the addends of its
 * sums over k. An exponent of a set of numbers x is the smallest integer e with |x| < 2^e for all x; AR_EXP_ZERO if all
 * are zero, AR_EXP_NONFINITE if one is NaN or infinite; exponents of sets combine by integer max. Arrays of exponents
 * are int32 and contiguous. numerics.md explains all this. */
#define AR_EXP_ZERO INT32_MIN
#define AR_EXP_NONFINITE INT32_MAX

typedef struct ar_device ar_device;
struct ari_optimizer_constants; /* constants of an optimizer step: ref/numerics/optimizer.h */

/* A packed matrix operand of exact products: [batch, rows, k] signed integers in the device's own format, of 26 bits,
 * or of 16 bits ("narrow") for bf16 numbers. */
typedef struct ar_packed ar_packed;
/* Flags of a packed operand. */
enum ar_packed_form {
    AR_PACKED_LEFT = 1,  /* it is operand A of products, not B */
    AR_PACKED_NARROW = 2 /* 15 bits and a sign, for products of bf16 numbers */
};

/* A block of attention scores. The scores of a rank form matrices [b, kv_heads], each [group * rows, seq]: row r
 * belongs to query position r mod rows of query head r / rows in the KV head's group; a column is a key position. The
 * block `part` is contiguous in memory, [matrices, rows, cols]. Kernels that need whole rows take blocks with all
 * visible keys. */
typedef struct ar_scores {
    size_t kv_heads, group, rows, seq; /* group: query heads per KV head; rows: query positions; seq: key positions */
    ar_part part;                      /* the block within the matrices */
} ar_scores;

/* A band of a matrix product: row r has the range [first, end) = edges[r mod rows]. of_terms false: only columns in the
 * range are needed in the result. of_terms true: row r of A is zero outside of the range. */
typedef struct ar_band {
    const int32_t *edges; /* host memory, [rows, 2]: first, end */
    size_t rows;
    bool of_terms;
} ar_band;

/* A product's terms divided into n runs, each rounded separately: run i is [first + cut[i], first + cut[i + 1]). */
typedef struct ar_runs {
    size_t n, first;
    const size_t *cut; /* host memory, [n + 1] */
} ar_runs;

/* An attention mask; a key must pass all of its parts. */
typedef struct ar_mask {
    ar_cbuf visible;               /* int32 [b, rows, 2]: each query sees keys [first, end) at most */
    ar_cbuf padding;               /* u8 [b, seq]: 0 masks the key; ptr NULL: none */
    ar_cbuf additive;              /* f32 [mask_batch, mask_heads, rows, seq], added to scores, -inf masks; ptr NULL:
                                      none */
    size_t mask_batch, mask_heads; /* b or 1; number of query heads of all ranks, or 1 */
    size_t head_start;             /* index of this rank's first query head among those of all ranks */
} ar_mask;

/* Dropout of a rank's part of a value. Element (i_0, i_1, ..) of the part has number first + sum of i_d * stride[d] in
 * the full value; it is dropped if its random bits, from the counter-based generator (ref/numerics/philox.h) with
 * `key`, `step` and this number, are below `threshold`. The last stride is 1. */
typedef struct ar_dropout {
    uint64_t key;
    uint32_t step, threshold;
    float scale; /* factor of kept elements: 1/(1 - probability) */
    uint64_t first, stride[AR_MAX_DIMS];
} ar_dropout;

/* The accumulator of a sum over rows, [n], such as a bias gradient, to which a kernel adds its terms. Exact numerics:
 * the order-independent accumulator (see below) t u8 [n] and hl int64 [2n]. Native numerics: f32 [n], added in the
 * order of the rows. The buffers of the other kind are NULL; if all are NULL no sum is computed. */
typedef struct ar_row_sum {
    ar_buf t, hl;
    bool narrow; /* format of t and hl */
    ar_buf f32;
} ar_row_sum;

/* How a mixture-of-experts router chooses experts (ar_route_scores in config.h). */
typedef struct ar_route_rule {
    size_t k;            /* experts of a token */
    ar_cbuf bias;        /* f32 [E]: scores are sigmoids, plus bias for the choice only; ptr NULL: softmax */
    size_t groups, kept; /* groups of E/groups experts; kept*E/groups >= k. Several groups of sigmoid scores: E/groups
                            >= 2 */
    bool normalised;     /* a token's weights are divided by the sum of its chosen scores */
    float scale;         /* factor of the weights; 1 for normalised softmax weights */
} ar_route_rule;

/* Number format of the operands of native matrix products. */
typedef enum ar_precision {
    AR_PRECISION_F32,
    AR_PRECISION_TF32, /* significands of 11 bits */
    AR_PRECISION_BF16,
    AR_PRECISION_COUNT
} ar_precision;

/* The function table of a kind of device. */
typedef struct ar_device_ops {
    const char *name;  /* "cpu", "cuda", "emulated" */
    bool host_reaches; /* the host can access the device's memory directly; false: only through `copy` */

    /* Creates a queue on this device, as ar_queue_create; the caller destroys *out before the device. */
    ar_status (*queue_create)(ar_device *d, ar_queue **out, ar_queue_kind kind, const char *name);
    /* Frees the device. */
    void (*destroy)(ar_device *d);

    /* --- memory --------------------------------------------------------------------------------------------------- */
    /* Allocates 64-byte aligned memory with undefined contents, in the order of q, an inline queue of the device: work
     * that is enqueued on q between alloc and free may use it. Another queue may use it after waiting for an event
     * recorded on q after alloc, and q must wait for that queue before free. Errors: AR_ERR_MEMORY; AR_ERR_ARG (not an
     * inline queue of the device; kernels check this too). */
    ar_status (*alloc)(ar_device *d, ar_queue *q, ar_buf *out, size_t bytes);
    /* Frees memory in the order of q. If q is NULL or not an inline queue of the device, the host first waits for all
     * queues of d. Ignores a NULL pointer. */
    void (*free)(ar_device *d, ar_queue *q, ar_buf b);
    /* Copies bytes within device memory, or from or to host memory. Host memory as source is borrowed until return; as
     * destination it is valid after waiting for q. */
    ar_status (*copy)(ar_device *d, ar_queue *q, ar_buf dst, ar_cbuf src, size_t bytes);
    /* Sets bytes to zero. */
    ar_status (*zero)(ar_device *d, ar_queue *q, ar_buf dst, size_t bytes);
    /* Copies src to dst element by element: same shape, any strides, no overlap; one dtype of whole bytes, or a
     * conversion between F32 and BF16, rounded to nearest, ties to even. */
    ar_status (*copy_strided)(ar_device *d, ar_queue *q, const ar_tensor *dst, const ar_tensor *src);

    /* --- native matrix product ------------------------------------------------------------------------------------ */
    /* Computes c[..,m,n] = a[..,m,k] b[..,n,k]^T (add: plus the old c), each F32 or BF16, accumulated in fp32 and
     * rounded once at the end. Values of a and b are representable in the format `operands`, so that a device may use
     * its hardware products for that format. */
    ar_status (*gemm_f32)(ar_device *d, ar_queue *q, const ar_tensor *c, const ar_tensor *a, const ar_tensor *b,
                          bool add, ar_precision operands);
    /* Computes in one pass y[i,j] = fl32(y[i,j] + bias[j]) in place and z = act32(y), from y as stored (AR_ACT_NONE: z
     * is not written). y, z contiguous [rows, cols]; bias f32 [cols], ptr NULL: none. */
    ar_status (*bias_act)(ar_device *d, ar_queue *q, const ar_tensor *y, ar_cbuf bias, ar_activation act,
                          const ar_tensor *z);

    /* --- exact matrix product: pack the operands as integers, multiply, round ------------------------------------- */
    /* Computes exponents of columns: c[batch, k] = exponent of b[.., :, k]. max_into: maximum with the old c. */
    ar_status (*col_exponents)(ar_device *d, ar_queue *q, ar_buf c, const ar_tensor *b, bool max_into);
    /* Computes exponents of rows: e[batch, rows] = exponent over k of a[i,k]*2^(sign*c[k]), sign +1 for operand A, -1
     * for operand B; c ptr NULL: no scaling. Columns with c = AR_EXP_ZERO are skipped, except that a non-finite a there
     * still flags its row; c = AR_EXP_NONFINITE counts as 0. max_into: maximum with the old e (parts along k). narrow:
     * for a narrow operand, 10 + the smallest integer e with |x| < (1 - 2^-8 - 2^-16)*2^e. */
    ar_status (*row_exponents)(ar_device *d, ar_queue *q, ar_buf e, const ar_tensor *a, ar_cbuf c, int sign,
                               bool max_into, bool narrow);
    /* Allocates a packed operand [batch, rows, k] in the order of q, like alloc. form: flags of ar_packed_form. The
     * operands of a product must both be narrow, or neither. */
    ar_status (*packed_create)(ar_device *d, ar_queue *q, ar_packed **out, size_t batch, size_t rows, size_t k,
                               unsigned form);
    /* Creates a packed operand that is a block of `full`, sharing its memory if the device can. `full` must outlive it
     * and may not be packed again. */
    ar_status (*packed_part)(ar_device *d, ar_queue *q, ar_packed **out, const ar_packed *full, const ar_part *part);
    /* Frees a packed operand in the order of q. Accepts NULL. */
    void (*packed_destroy)(ar_device *d, ar_queue *q, ar_packed *p);
    /* Returns the bytes of device memory that a packed operand has allocated. */
    size_t (*packed_bytes)(const ar_packed *p);
    /* Computes in advance the bytes that packed_create with these arguments would allocate; with part not NULL those of
     * packed_part of the result. Errors: AR_ERR_OVERFLOW. */
    ar_status (*packed_room)(const ar_device *d, size_t *bytes, size_t batch, size_t rows, size_t k, unsigned form,
                             const ar_part *part);
    /* Packs a into rows [row_at, row_at + a's rows) and columns [k_at, k_at + a's k) of p: element [row_at + i, k_at +
     * k] = rint(a[i,k]*2^(sign*c[k] + 25 - e[row_at + i])), clamped to +-(2^25 - 1), if narrow to +-32639; 0 if e or c
     * is AR_EXP_ZERO, or e is AR_EXP_NONFINITE. e [batch, all rows of p]; c [batch, a's k], ptr NULL: no scaling. */
    ar_status (*pack)(ar_device *d, ar_queue *q, ar_packed *p, size_t row_at, size_t k_at, const ar_tensor *a,
                      ar_cbuf c, int sign, ar_cbuf e);
    /* Computes s[batch, m, n] = the exact integer sums over k of products of packed a and b. limbs 1: one int64 per
     * element, which needs k <= 8191 unless narrow. limbs 2: two int64 per element, hi and lo, with the sum hi*2^32 +
     * lo; they are the sums of S_b >> 32 and S_b & 0xffffffff over blocks b of at most 8191 terms, which the device
     * chooses. add: adds to the old s. */
    ar_status (*gemm_i64)(ar_device *d, ar_queue *q, ar_buf s, const ar_packed *a, const ar_packed *b, int limbs,
                          bool add);
    /* Computes y[batch, m, n] = the product of packed a and b rounded once to fp32, without storing the integers; e
     * [batch, m] and f [batch, n] are the row exponents of a and b. y and z have stride 1 along n and arbitrary other
     * strides. bias [n], act and z as in bias_act, with batch 1. band: y is undefined outside of it; NULL: all of y. */
    ar_status (*gemm_round)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_packed *a, const ar_packed *b,
                            ar_cbuf e, ar_cbuf f, ar_cbuf bias, ar_activation act, const ar_tensor *z,
                            const ar_band *band);
    /* Adds products to [m, n] elements of an order-independent accumulator (see below), t u8 and hl int64, where L
     * begins `low` elements after H (m*n, or more if these are some rows of a larger accumulator). Each matrix of the
     * batch, or with runs each run of the terms of a single matrix, is rounded as by gemm_round with its own exponents
     * e, f, and then added. At least one run is not empty. fresh: the accumulator counts as zero before. */
    ar_status (*gemm_acc)(ar_device *d, ar_queue *q, ar_buf t, ar_buf hl, size_t low, bool narrow, const ar_packed *a,
                          const ar_packed *b, ar_cbuf e, ar_cbuf f, const ar_runs *runs, bool fresh);
    /* Rounds integer sums of gemm_i64 with row exponents e [m], f [n]: y[i], fp32 [count], contiguous, is the value of
     * element start + i of the row-major [m, n] matrix of sums; s points to element `start`. */
    ar_status (*round_i64)(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf s, int limbs, size_t start, size_t count,
                           size_t n, ar_cbuf e, ar_cbuf f);

    /* --- the order-independent accumulator ------------------------------------------------------------------------ */
    /* A sum of fp32 numbers whose bits do not depend on their order (numerics.md, section 3). Its state for n elements
     * is t u8 [n], an exponent, and hl int64 [2n], the integer sums H of all elements, then the integer sums L. narrow:
     * a format with slices of 13 bits whose value is rounded to bf16. */
    /* Adds row r of terms [.., cols], a 2-D fp32 view, to row row_of[r] of an accumulator [rows_in_acc, cols]. row_of
     * int64, negative: skip the row; ptr NULL: row r if rows_in_acc > 1, else row 0. */
    ar_status (*acc_add)(ar_device *d, ar_queue *q, ar_buf t, ar_buf hl, bool narrow, size_t rows_in_acc,
                         const ar_tensor *terms, ar_cbuf row_of);
    /* Rounds the first elements of an accumulator of n elements to y, an fp32 view, in row-major order of y's shape. */
    ar_status (*acc_value)(ar_device *d, ar_queue *q, const ar_tensor *y, ar_cbuf t, ar_cbuf hl, size_t n, bool narrow);
    /* Sets an accumulator t, h, l [n] to x, fp32 [n], contiguous (narrow: rounded to bf16); -0 becomes +0; infinities remain. */
    ar_status (*acc_put)(ar_device *d, ar_queue *q, ar_buf t, ar_buf h, ar_buf l, ar_cbuf x, size_t n, bool narrow);
    /* Packs an accumulator t, h, l [n] for communication in `width` bytes per element, packed [n, width]: t and then
     * the lowest (width - 1)/2 bytes each of h and l; width 5, 6 or 8, narrow only: h and l with equally many bits above
     * five bits of t; width 4: the rounded sum in fp32. */
    ar_status (*states_narrow)(ar_device *d, ar_queue *q, ar_buf packed, ar_cbuf t, ar_cbuf h, ar_cbuf l, size_t n,
                               size_t width, bool narrow);
    /* Adds all ranks' packed accumulators, received [ranks, n, width], to t, h, l [n]. */
    ar_status (*states_merge)(ar_device *d, ar_queue *q, ar_buf t, ar_buf h, ar_buf l, ar_cbuf received, size_t ranks,
                              size_t n, size_t width, bool narrow);
    /* For native numerics: fp32 sums acc[row_of[r]] += terms[r] in row order; arguments as for acc_add. */
    ar_status (*sum_rows_f32)(ar_device *d, ar_queue *q, ar_buf acc, size_t rows_in_acc, const ar_tensor *terms,
                              ar_cbuf row_of);

    /* --- element-wise kernels: contiguous tensors of equal size --------------------------------------------------- */
    /* Sum y = fl32(a + b), product y = fl32(a * b); y may be a or b. */
    ar_status (*add)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *a, const ar_tensor *b);
    ar_status (*mul)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *a, const ar_tensor *b);
    /* Sets all elements of y to value. */
    ar_status (*fill)(ar_device *d, ar_queue *q, const ar_tensor *y, float value);
    /* Soft cap: y = fl32(cap*tanh(fl32(x*scale)/cap)), cap > 0; y may be x. */
    ar_status (*softcap)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, float scale, double cap);
    /* Backward of softcap: dx = fl32(fl32(dy*(1 - t*t))*scale), t = tanh(fl32(x*scale)/cap); +0 where dy is 0, even if
     * x is undefined there. dx may be dy or x. */
    ar_status (*softcap_backward)(ar_device *d, ar_queue *q, const ar_tensor *dx, const ar_tensor *dy,
                                  const ar_tensor *x, float scale, double cap);
    /* Backward of an activation: dx = fl32(dy * act'(x)); adds dx's rows, as stored, to dbias. dx may be dy or x. */
    ar_status (*act_backward)(ar_device *d, ar_queue *q, const ar_tensor *dx, const ar_tensor *dy, const ar_tensor *x,
                              ar_activation act, const ar_row_sum *dbias);
    /* Gated activation: y = fl32(act(gate)*up), 2-D views with contiguous columns and arbitrary row strides. */
    ar_status (*gated_forward)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *gate,
                               const ar_tensor *up, ar_activation act);
    /* Backward of gated_forward: dgate = fl32(fl32(dy*up)*act'(gate)), dup = fl32(dy*act(gate)), and adds the rows of
     * each to dgate_bias and dup_bias. dgate may be gate, dup may be up, either may be dy. */
    ar_status (*gated_backward)(ar_device *d, ar_queue *q, const ar_tensor *dgate, const ar_tensor *dup,
                                const ar_tensor *dy, const ar_tensor *gate, const ar_tensor *up, ar_activation act,
                                const ar_row_sum *dgate_bias, const ar_row_sum *dup_bias);

    /* Dropout: y = fl32(x*scale) for kept elements, +0 for dropped ones (y NULL: not written), and sum = fl32(residual
     * + y) if residual is not NULL. y may be x, sum may be residual. */
    ar_status (*dropout)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *sum, const ar_tensor *x,
                         const ar_tensor *residual, const ar_dropout *which);

    /* --- norms ---------------------------------------------------------------------------------------------------- */
    /* Norm over the last dimension of x, y [.., h], contiguous. gamma f32 [h]; beta f32 [h], ptr NULL: none, as for
     * RMSNorm. Saves mean f64 [rows] (LayerNorm only) and rstd f32 [rows] for the backward pass. */
    ar_status (*norm_forward)(ar_device *d, ar_queue *q, ar_norm_kind kind, const ar_tensor *y, ar_buf mean,
                              ar_buf rstd, const ar_tensor *x, ar_cbuf gamma, ar_cbuf beta, double eps);
    /* Backward of norm_forward in one pass: dx; sum = fl32(residual + dx) if residual is not NULL; adds fl32(dy*xhat)
     * and dy of all rows to dgamma and dbeta. Tensors are contiguous. dx may be dy or x, sum may be residual. */
    ar_status (*norm_backward)(ar_device *d, ar_queue *q, ar_norm_kind kind, const ar_tensor *dx, const ar_tensor *sum,
                               const ar_tensor *dy, const ar_tensor *x, ar_cbuf mean, ar_cbuf rstd, ar_cbuf gamma,
                               const ar_tensor *residual, const ar_row_sum *dgamma, const ar_row_sum *dbeta);

    /* --- attention ------------------------------------------------------------------------------------------------ */
    /* Computes RoPE tables cos, sin [positions, n/2], fp32, for the n rotated features of a head, times the attention
     * factor. LongRoPE uses the short factors, dynamic NTK the given theta. */
    ar_status (*rope_tables)(ar_device *d, ar_queue *q, ar_buf cos, ar_buf sin, size_t positions, size_t head_dim,
                             const ar_rope *rope);
    /* Applies RoPE: rotates x to y, views [b, s, heads, d] with d contiguous; y may be x. Sequence index s uses row s
     * of the tables. direction: +1 forward, -1 backward (sin negated). */
    ar_status (*rope)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, ar_cbuf cos, ar_cbuf sin,
                      int direction);
    /* Softmax of a block of scores; probs may be the same memory. s = fl32(score*scale) + additive mask; m = row
     * maximum over visible keys; p = exp32(fl32(s - m)); l = row sum of p; probs = fl32(p/l). Masked keys give
     * +0, and a row without visible keys is +0. A visible NaN score makes the row NaN. max (int32) and sum (f64), [b,
     * kv_heads, group * rows], are row statistics: m as an integer that sorts like m (INT32_MIN: no visible key,
     * INT32_MAX: not finite), and l (undefined in these two cases). known false: they are computed and written; true:
     * they are read, and the block need not contain all keys. sinks f32 [kv_heads * group], ptr NULL: none: the logit
     * of an extra key per head, which counts in m and l only and is not masked. */
    ar_status (*softmax_forward)(ar_device *d, ar_queue *q, ar_buf probs, ar_cbuf scores, ar_cbuf sinks, ar_buf max,
                                 ar_buf sum, bool known, float scale, const ar_scores *block, const ar_mask *mask);
    /* Backward of softmax_forward: D = row sum of probs*dprobs; ds = fl32(fl32(probs*(dprobs - D))*scale), +0 for
     * masked keys, at which dprobs is set to +0 first. ds may be dprobs. dot (f64) [b, kv_heads, group * rows] is D:
     * written, or if `known` read. */
    ar_status (*softmax_backward)(ar_device *d, ar_queue *q, ar_buf ds, ar_cbuf probs, ar_buf dprobs, ar_buf dot,
                                  bool known, float scale, const ar_scores *block, const ar_mask *mask);
    /* Gradients of sinks for every row: terms [b, rows, heads], f32, any strides = fl32(-p*D), computed in binary64,
     * with p = fl32(exp32(fl32(sink - m))/l); +0 for rows without visible keys, NaN for rows that are not finite. max,
     * sum and dot as above, [b, heads, rows]. */
    ar_status (*sinks_backward)(ar_device *d, ar_queue *q, const ar_tensor *terms, ar_cbuf sinks, ar_cbuf max,
                                ar_cbuf sum, ar_cbuf dot);

    /* --- experts -------------------------------------------------------------------------------------------------- */
    /* n tokens, E experts, k experts per token, 0 < k <= E. Slot t*k + j is the j-th expert of token t. Rows of slots
     * may be permuted: place[i] (int64) is the row of slot i. Tensors are contiguous; p, weight and g are f32 even if
     * activations are BF16; expert is int32.
     *
     * Routes tokens by the logits z [.., E]:
     *   scores   softmax: p [n, E] = softmax of each row of z, choice value c = z; sigmoids (DeepSeek-V3; rule->bias is
     *            set): p = sigmoid(z), c = fl32(p + bias)
     *   groups   of several groups of consecutive experts the `kept` ones with the largest scores remain; a group's
     *   score
     *            is fl32(x + y) of its two largest c, x >= y, for softmax x (DeepSeek-V2)
     *   choice   expert [n, k] = the k remaining experts with the largest c, in ascending order. Ties, here and between
     *            groups, go to the lower number; -0 equals +0
     *   weights  weight [n, k] = fl32(scale*p), normalised: fl32(scale*fl32(p/s)), s = sum of the token's k p in slot
     *            order, rounded after each addition, for sigmoids fl32(s + 1e-20)
     *   lse      softmax only: lse [n] = fl32(m + log l), m the largest z, l the softmax's denominator; ptr NULL: none
     * If c[i] is NaN, or not finite with sigmoids (i the first such expert), expert is -1 - i in all slots of the row
     * and weight, for softmax also p and lse, NaN. An infinite z with softmax makes p, weight and lse NaN, but not the
     * choice. groups <= AR_ROUTE_GROUPS. */
    ar_status (*route)(ar_device *d, ar_queue *q, ar_buf p, ar_buf expert, ar_buf weight, ar_buf lse,
                       const ar_tensor *z, const ar_route_rule *rule);
    /* Backward of route: dz [.., E] from g [n, k], the gradient of the weights w. Sums over a token's k chosen experts
     * start at +0 and are rounded after each addition.
     *   softmax   v = w if normalised, else p; h = fl32(scale*g); r = sum of fl32(v*h); dz = fl32(v*fl32(h - r)) for
     *             chosen experts, for others +0 if normalised, else fl32(p*-r)
     *   sigmoids  t = fl32(p / fl32(s + 1e-20)); r = sum of fl32(t*g) if normalised, else 0; dz = fl32(fl32(w*fl32(1 -
     *             p))*fl32(g - r)) for chosen experts, +0 for others */
    ar_status (*route_backward)(ar_device *d, ar_queue *q, const ar_tensor *dz, ar_cbuf g, ar_cbuf p, ar_cbuf expert,
                                ar_cbuf weight, const ar_route_rule *rule);
    /* Adds the gradients of the router's auxiliary losses (ar_router_losses) to dz [.., E], except for rows with
     * valid[t] (u8 [n], ptr NULL: all rows are valid) 0. Balancing loss: fl32(p*fl32(c - r)) with the coefficients c =
     * balance[t / tokens, :] (f32 [n / tokens, E], ptr NULL: no such loss), r = sum over E of fl32(p*c), from +0,
     * rounded after each addition. Then the z-loss: fl32(p*fl32(z*lse)), z*lse in binary64, lse from route (ptr NULL:
     * no z-loss). Each is added in fp32 and rounded. */
    ar_status (*route_losses)(ar_device *d, ar_queue *q, const ar_tensor *dz, ar_cbuf p, ar_cbuf balance, size_t tokens,
                              ar_cbuf lse, double z, ar_cbuf valid);
    /* Computes the auxiliary losses of each row, terms f32 [n] = r + fl32(z*lse*lse), the latter in binary64 from left
     * to right, from p [n, E] and arguments as for route_losses; +0 for rows that are not valid. */
    ar_status (*route_terms)(ar_device *d, ar_queue *q, ar_buf terms, const ar_tensor *p, ar_cbuf balance,
                             size_t tokens, ar_cbuf lse, double z, ar_cbuf valid);
    /* Combines the outputs of a token's experts: y[t, :] = the sum over j, ascending, of rows[place[t*k + j], :], each
     * times weight[t*k + j] and rounded unless weight.ptr is NULL; in fp32, rounded after each addition. */
    ar_status (*combine_rows)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *rows, ar_cbuf weight,
                              ar_cbuf place, size_t k);
    /* Gradient of combine_rows' weights: g[t*k + j] = fl32(row sum over c of dy[t, c]*rows[place[t*k + j], c]). */
    ar_status (*dot_rows)(ar_device *d, ar_queue *q, ar_buf g, const ar_tensor *dy, const ar_tensor *rows,
                          ar_cbuf place, size_t k);
    /* Adds a gated expert: y[t, :] = fl32(y[t, :] + fl32(s*x[t, :])), s = sigmoid32(logit[t]); logit [.., 1]. */
    ar_status (*add_gated)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, const ar_tensor *logit);
    /* Backward of add_gated: dx[t, :] = fl32(s*dy[t, :]); dlogit[t] = fl32(D*(s*(1 - s))), computed in binary64, D =
     * fl32(row sum of dy*x). dx may be dy or x. */
    ar_status (*add_gated_backward)(ar_device *d, ar_queue *q, const ar_tensor *dx, const ar_tensor *dlogit,
                                    const ar_tensor *dy, const ar_tensor *x, const ar_tensor *logit);

    /* --- embedding and loss --------------------------------------------------------------------------------------- */
    /* Maps n token ids to rows of a vocabulary shard: row_of[t] = ids[t] - start if in [0, count), else -1. */
    ar_status (*rows_in_range)(ar_device *d, ar_queue *q, ar_buf row_of, ar_cbuf ids, size_t n, int64_t start,
                               int64_t count);
    /* Gathers rows: y[t, :] = w[i / k, :] with i = row_of[t], times weight[i] and rounded unless weight.ptr is NULL
     * (then bits are copied); zero bits if i < 0. y [.., cols] contiguous, n rows; w 2-D with contiguous columns. */
    ar_status (*gather_rows)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *w, ar_cbuf row_of,
                             ar_cbuf weight, size_t k);
    /* Vocabulary-parallel cross-entropy. logits [.., v_local], contiguous, n rows t; v is the size of the full
     * vocabulary; the caller reduces key, sum and bits over the shards. Computes key[t] int32 = the row's largest local
     * logit as an integer that sorts like it (INT32_MIN if v_local is 0). */
    ar_status (*ce_max)(ar_device *d, ar_queue *q, ar_buf key, const ar_tensor *logits);
    /* Computes sum[t] int64 = row sum of exp32(fl32(x - m)), m = value of key[t]; 0 for a NaN key. */
    ar_status (*ce_sum)(ar_device *d, ar_queue *q, ar_buf sum, const ar_tensor *logits, ar_cbuf key, size_t v);
    /* Computes sum[t] int64 = row sum of the logits relative to the exponent e[t] int32 (row_exponents, maximum over
     * all shards), 0 if e[t] is AR_EXP_NONFINITE. Label smoothing needs it for the mean logit. */
    ar_status (*ce_logits)(ar_device *d, ar_queue *q, ar_buf sum, const ar_tensor *logits, ar_cbuf e, size_t v);
    /* Gets the target's logit: bits[t] int32 = bit pattern of logits[t, row_of[t]] as fp32, 0 if row_of[t] < 0. */
    ar_status (*ce_target)(ar_device *d, ar_queue *q, ar_buf bits, const ar_tensor *logits, ar_cbuf row_of);
    /* Computes terms[t] fp32 = the token's loss (ar_loss_options) with lse = m + log l from key (m), sum (l) and bits
     * (target's logit) of all shards; +0 if valid[t] (u8) is 0. e, logits: exponents and sums of ce_logits over all
     * shards; ptr NULL without label smoothing. */
    ar_status (*ce_terms)(ar_device *d, ar_queue *q, ar_buf terms, ar_cbuf key, ar_cbuf sum, ar_cbuf bits,
                          ar_cbuf valid, ar_cbuf e, ar_cbuf logits, const ar_loss_options *o, size_t n, size_t v);
    /* Backward: dlogits[t, j] = fl32(fl32(p*weight - label)/targets), p = fl32(exp32(fl32(x - m))/l), weight = 1 +
     * 2*c*lse, label = (1 - e)*(j == row_of[t]) + e/v, with c, e of ar_loss_options; +0 if valid[t] or targets is 0.
     * dlogits may be logits. */
    ar_status (*ce_backward)(ar_device *d, ar_queue *q, const ar_tensor *dlogits, const ar_tensor *logits, ar_cbuf key,
                             ar_cbuf sum, ar_cbuf row_of, ar_cbuf valid, const ar_loss_options *o, double targets,
                             size_t v);

    /* --- gradients and weights: contiguous tensors ---------------------------------------------------------------- */
    /* Adds the squared norm of g as integers to sums, int64 [2]: the sums over g's elements of s >> 30 and s & (2^30 -
     * 1), s = rint((g*2^-e)^2*2^60), where e (int32 [1]) is at least the exponent of g; adds nothing if e is
     * AR_EXP_ZERO or AR_EXP_NONFINITE. */
    ar_status (*sum_squares)(ar_device *d, ar_queue *q, ar_buf sums, const ar_tensor *g, ar_cbuf e);
    /* Scales: y = fl32(x*factor); y may be x. */
    ar_status (*scale)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, float factor);
    /* Rounds: y = x rounded to significands of `bits` bits (1 < bits < 24; bf16: 8, TF32: 11), ties to even, with
     * fp32's exponent range. Same shape, any strides; y may be x. */
    ar_status (*round_bits)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, int bits);
    /* Updates weights w and moments (f32) from the gradient g by one optimizer step with constants k: m for SGD with
     * momentum, m and v for Adam and AdamW; unused moments have ptr NULL. If w is BF16, master (f32 [n]) holds the fp32
     * weights: the step updates master and rounds it to w; elements of w that differ from the rounded master were set
     * by the caller and are copied to master first. No buffers may overlap. */
    ar_status (*optimizer_step)(ar_device *d, ar_queue *q, const ar_tensor *w, ar_buf master, ar_buf m, ar_buf v,
                                const ar_tensor *g, const struct ari_optimizer_constants *k);
} ar_device_ops;
/* The names of all functions of ar_device_ops, for macros: X(name). */
/* clang-format off */
#define AR_DEVICE_SLOTS(X)                                                                               \
    X(queue_create) X(destroy) X(alloc) X(free) X(copy) X(zero) X(copy_strided)                          \
    X(gemm_f32) X(bias_act) X(col_exponents) X(row_exponents) X(packed_create) X(packed_part) X(packed_destroy) \
    X(packed_bytes) X(packed_room) X(pack) X(gemm_i64) X(gemm_round) X(gemm_acc) X(round_i64) X(acc_add) \
    X(acc_value) X(acc_put) X(states_narrow) X(states_merge) X(sum_rows_f32) X(add) X(mul) X(fill) X(softcap) X(softcap_backward)       \
    X(act_backward) X(gated_forward) X(gated_backward) X(dropout) X(norm_forward) X(norm_backward)       \
    X(rope_tables) X(rope) X(softmax_forward) X(softmax_backward) X(sinks_backward) X(route) X(route_backward)           \
    X(route_losses) X(route_terms)                                                                       \
    X(combine_rows) X(dot_rows) X(add_gated) X(add_gated_backward)      \
    X(rows_in_range) X(gather_rows)                                                                      \
    X(ce_max) X(ce_sum) X(ce_logits) X(ce_target) X(ce_terms) X(ce_backward) X(sum_squares) X(scale) \
    X(round_bits) X(optimizer_step)
/* clang-format on */

/** A device of one rank; several ranks may use the same GPU. */
struct ar_device {
    const ar_device_ops *ops; /* its functions */
    int threads;              /* host threads that a kernel may use */
    size_t block_bytes; /* layers process values in blocks of this size if several kernels work on them in turn, so that
                           a few blocks fit into the device's cache */
    bool hollow;        /* a device for dry runs (ref/record): its memory has no contents, and kernels do nothing */
    bool thin;          /* with hollow: layers need run only those blocks of a value that use the most memory */
};

/* block_bytes of the CPU device, measured at sequences of 4,096: blocks that fit into the second-level cache alone
 * would have too few rows to be worth packing. */
#define AR_CPU_BLOCK_BYTES ((size_t)2 << 20)

/* Kind of device. */
typedef enum ar_device_kind {
    AR_DEVICE_CPU,
    AR_DEVICE_CUDA,
    AR_DEVICE_EMULATED, /* the CUDA kernels compiled for the host: slow, needs no GPU */
    AR_DEVICE_KINDS
} ar_device_kind;
/* Selects a device. */
typedef struct ar_device_choice {
    ar_device_kind kind;
    int index; /* CUDA's number of the GPU, or AR_GPU_EACH; 0 for other kinds */
} ar_device_choice;
/* Index for several ranks that are threads: rank r uses GPU r, and NCCL connects the ranks, if the machine has as many
 * GPUs and NCCL; else all ranks share GPU 0. */
#define AR_GPU_EACH (-1)
/** Creates a device. threads: host threads for a kernel of the CPU device. The caller releases *out with
 *  ar_device_destroy. Errors: AR_ERR_UNSUPPORTED (this build has no such device; the message says why), those of
 *  ar_device_cpu_create and of CUDA. */
AR_NODISCARD ar_status ar_device_create(ar_device **out, const ar_device_choice *choice, int threads);

/* Description of a GPU, for the command `anyrank info`. */
typedef struct ar_gpu_info {
    char name[96];    /* the vendor's name of the model */
    int major, minor; /* compute capability */
    int processors;   /* streaming multiprocessors */
    size_t memory;    /* bytes */
} ar_gpu_info;

/** Creates a CPU device whose kernels use `threads` threads (a rank's share of the cores). The caller releases *out
 *  with ar_device_destroy. Exact matrix products use the fastest code path that the processor supports, or the one
 *  named by the environment variable ANYRANK_EXACT_PATH ("portable", "avx2", ..); all give the same bits.
 *  Errors: AR_ERR_ARG (threads < 1, an unknown path in that variable), AR_ERR_UNSUPPORTED (the processor lacks the
 *  path; the OpenBLAS library cannot be used, dependencies.md), AR_ERR_DATA (flush-to-zero is on in this thread),
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_device_cpu_create(ar_device **out, int threads);
/** Frees a device. */
void ar_device_destroy(ar_device *device);

/** Description of the processor and libraries of the CPU device, for the command `anyrank info`. */
typedef struct ar_cpu_info {
    char cpu[64];           /* "AMD EPYC 9B45", "Arm Neoverse N1" */
    char features[128];     /* supported extensions, named as in /proc/cpuinfo: "avx2 fma avx_vnni avx512f" */
    char blas[32];          /* library of native matrix products: "BLIS", "OpenBLAS" or "CBLAS" */
    char blas_version[32];  /* "0.9.0" */
    char blas_kernels[32];  /* the library's name of the kernels it uses: "skx", "SkylakeX", .. */
    char blas_reason[112];  /* why it uses these */
    char exact_path[32];    /* code path of exact products: "portable", "avx2", ..; "refused": not available */
    char exact_reason[192]; /* why it is used, or why it was refused */
    int cores;              /* number of cores */
} ar_cpu_info;

AR_END_DECLS
#endif
