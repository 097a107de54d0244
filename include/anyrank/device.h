/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_DEVICE_H
#define ANYRANK_DEVICE_H

#include "anyrank/batch.h"
#include "anyrank/comm.h"
#include "anyrank/config.h"
#include "anyrank/queue.h"
#include "anyrank/tensor.h"

AR_BEGIN_DECLS

/* A device: memory and leaf kernels. It knows no group of ranks and no choice of numerics. Every kernel is enqueued on
 * `q` (the CPU runs it at once; it takes inline queues only).
 *
 * Matrices are ar_tensor views of 2 to 4 dimensions: the last two are rows and columns, the ones before are batch
 * dimensions, "batch" below is their product in row-major order. Strides are free unless a slot says "contiguous".
 * Activations, their gradients and what is added up of them are F32 or, in native numerics, BF16: the tensors of a call
 * have one dtype, unless a slot says otherwise. Kernels compute in fp32, as if they had been given these numbers in
 * fp32, and round what they store as BF16 once, to nearest, ties to even. Arrays of exponents are int32 and contiguous.
 * Exponents: the smallest integer e with |x| < 2^e for all x of a group; AR_EXP_ZERO where all are zero,
 * AR_EXP_NONFINITE where one is NaN or infinite; so they combine by integer max. Element-wise definitions stand once,
 * in ref/numerics; numerics.md explains them. */
#define AR_EXP_ZERO INT32_MIN
#define AR_EXP_NONFINITE INT32_MAX

typedef struct ar_device ar_device;
struct ari_optimizer_constants; /* what the updates of one step share: ref/numerics/optimizer.h */

/* Quantised rows in the device's own form: [batch, rows, k] of 26-bit signed integers, or 16-bit ones (narrow). */
typedef struct ar_packed ar_packed;
enum ar_packed_form {
    AR_PACKED_LEFT = 1,  /* the A of gemm_i64 and gemm_round */
    AR_PACKED_NARROW = 2 /* of 15 bits and a sign, for products of bf16 numbers */
};

/* A block of attention's scores. All scores of a rank are the matrices [b, kv_heads], each [group * rows, seq]: row r
 * is query r mod rows, of query head r / rows of the KV head's group, and a column is a key, by its position. The part
 * lies contiguous in memory, [matrices, rows, cols]; where a slot needs what belongs to whole rows, all keys that its
 * queries see are in it. */
typedef struct ar_scores {
    size_t kv_heads, group, rows, seq;
    ar_part part;
} ar_scores;

/* The band of a product: row r is limited to the range [first, end) of row r mod rows. A range of columns: the rest of
 * the result does not matter. A range of terms: A is zero elsewhere. */
typedef struct ar_band {
    const int32_t *edges; /* of the host: [rows, 2], first and end */
    size_t rows;
    bool of_terms;
} ar_band;

/* Run i of a product's terms is [first + cut[i], first + cut[i + 1]), of the host. */
typedef struct ar_runs {
    size_t n, first;
    const size_t *cut; /* [n + 1] */
} ar_runs;

/* Which keys the queries see. */
typedef struct ar_mask {
    ar_cbuf visible;               /* int32 [b, rows, 2]: keys [first, end), of which the others may mask some */
    ar_cbuf padding;               /* u8 [b, seq], 0 = masked key; ptr NULL: none */
    ar_cbuf additive;              /* f32 [mask_batch, mask_heads, rows, seq]; ptr NULL: none; -inf = masked */
    size_t mask_batch, mask_heads; /* b or 1; ALL query heads or 1 */
    size_t head_start;             /* global number of local head 0 */
} ar_mask;

/* Which elements of a local value dropout drops: element (i_0, i_1, ..) is number first + sum of i_d * stride[d] of the
 * full value, whose bits are those of the stream `key` in step `step` (ref/numerics/philox.h). The last stride is 1. */
typedef struct ar_dropout {
    uint64_t key;
    uint32_t step, threshold; /* dropped where the bits are below it */
    float scale;              /* of what is kept */
    uint64_t first, stride[AR_MAX_DIMS];
} ar_dropout;

/* The sum over rows of a parameter of one row, [n], to which a kernel adds the terms that it makes: an
 * order-independent accumulator, t u8 [n] and hl int64 [2n] (all H, then all L), narrow or not, or f32 [n], to which it
 * adds in the order of the rows. The other has ptr NULL; if both do, no sum is wanted. */
typedef struct ar_row_sum {
    ar_buf t, hl;
    bool narrow;
    ar_buf f32;
} ar_row_sum;

/* Precision of a native product's operands. */
/* How a router chooses. */
typedef struct ar_route_rule {
    size_t k;            /* experts of a token */
    ar_cbuf bias;        /* f32 [E]: of sigmoids, added to them for the choice alone; ptr NULL: of a softmax */
    size_t groups, kept; /* of E/groups experts each, two or more if several of sigmoids; kept*E/groups >= k */
    bool normalised;     /* a token's weights are divided by the sum of their scores */
    float scale;         /* and multiplied by this; 1 where a softmax's are normalised */
} ar_route_rule;

typedef enum ar_precision {
    AR_PRECISION_F32,
    AR_PRECISION_TF32, /* numbers of 11 bits of significand */
    AR_PRECISION_BF16, /* bf16 numbers */
    AR_PRECISION_COUNT
} ar_precision;

typedef struct ar_device_ops {
    const char *name;  /* "cpu", "cuda", "emulated" */
    bool host_reaches; /* the host may read and write the device's memory; where not, `copy` is the only way */

    /* A queue whose work this device does in order: see ar_queue_create. Gives; ar_queue_destroy, before the device. */
    ar_status (*queue_create)(ar_device *d, ar_queue **out, ar_queue_kind kind, const char *name);
    void (*destroy)(ar_device *d);

    /* --- memory --------------------------------------------------------------------------------------------------- */
    /* Memory is taken and given back in the order of q, an inline queue of the device: what is enqueued there from now
     * on may use it, until it is freed. Another queue may use it after an event that was recorded on q since, and q
     * waits for that queue before it is freed. What q is still to do with it is done before the memory is taken again.
     * 64-byte aligned, contents undefined. Errors: AR_ERR_MEMORY; AR_ERR_ARG (another queue, as a kernel's). */
    ar_status (*alloc)(ar_device *d, ar_queue *q, ar_buf *out, size_t bytes);
    /* q NULL, where none is at hand: the host waits for all queues of d first. The same where q is no inline queue of
     * the device. b NULL: nothing. */
    void (*free)(ar_device *d, ar_queue *q, ar_buf b);
    /* Also from and to the host: what is copied from there is borrowed until return; what is copied to there has come
     * when the queue is waited for. */
    ar_status (*copy)(ar_device *d, ar_queue *q, ar_buf dst, ar_cbuf src, size_t bytes);
    ar_status (*zero)(ar_device *d, ar_queue *q, ar_buf dst, size_t bytes);
    /* dst = src, element by element; one dtype (of whole bytes), or F32 and BF16: rounded to nearest, ties to even,
     * where dst is BF16. One shape, any strides, no overlap. */
    ar_status (*copy_strided)(ar_device *d, ar_queue *q, const ar_tensor *dst, const ar_tensor *src);

    /* --- contraction, native: c[..,m,n] (+)= a[..,m,k] b[..,n,k]^T, F32 or BF16 each, summed in fp32 ------------ */
    /* Rounded once, when all terms (and c) are added up. fp32 words of a and b hold numbers of `operands` alone, whose
     * products are exact in fp32: a device may multiply them so. */
    ar_status (*gemm_f32)(ar_device *d, ar_queue *q, const ar_tensor *c, const ar_tensor *a, const ar_tensor *b,
                          bool add, ar_precision operands);
    /* y[i,j] = fl32(y[i,j] + bias[j]), then act (AR_ACT_NONE: z is not written) z = act32(y), of y as it is stored.
     * y, z contiguous [rows, cols]; bias f32, ptr NULL: none. One pass. */
    ar_status (*bias_act)(ar_device *d, ar_queue *q, const ar_tensor *y, ar_cbuf bias, ar_activation act,
                          const ar_tensor *z);

    /* --- contraction, exact --------------------------------------------------------------------------------------- */
    /* c[batch, k] = exponent over rows j of b[.., j, k]. max_into: the maximum with what c holds. */
    ar_status (*col_exponents)(ar_device *d, ar_queue *q, ar_buf c, const ar_tensor *b, bool max_into);
    /* e[batch, rows] = exponent over k of a[i,k]*2^(sign*c[k]); c ptr NULL: no scaling. sign = +1 (operand A): columns
     * with c = AR_EXP_ZERO take no part, though a non-finite a there still flags its row; c = AR_EXP_NONFINITE counts
     * as 0. sign = -1 (operand B): likewise. max_into: the maximum with what e holds (parts concatenated along k).
     * narrow: of a narrow operand, 10 + the smallest integer e with |x| < (1 - 2^-8 - 2^-16)*2^e. */
    ar_status (*row_exponents)(ar_device *d, ar_queue *q, ar_buf e, const ar_tensor *a, ar_cbuf c, int sign,
                               bool max_into, bool narrow);
    /* Storage for [batch, rows, k], taken and given back like alloc's. form: of ar_packed_form; both operands of a
     * product are narrow, or none is. */
    ar_status (*packed_create)(ar_device *d, ar_queue *q, ar_packed **out, size_t batch, size_t rows, size_t k,
                               unsigned form);
    /* Part of what was packed, for the products below; `whole` is not packed again, and outlives it. It shares its
     * memory where the device can. */
    ar_status (*packed_part)(ar_device *d, ar_queue *q, ar_packed **out, const ar_packed *full, const ar_part *part);
    void (*packed_destroy)(ar_device *d, ar_queue *q, ar_packed *p); /* p NULL: nothing */
    size_t (*packed_bytes)(const ar_packed *p); /* of the device's memory that it takes for itself */
    /* The same before it is made: of packed_create, or (part not NULL, inside of it) of packed_part of that. Errors:
     * AR_ERR_OVERFLOW. */
    ar_status (*packed_room)(const ar_device *d, size_t *bytes, size_t batch, size_t rows, size_t k, unsigned form,
                             const ar_part *part);
    /* q[i, k_at + k] = clamp(rint(a[i,k]*2^(sign*c[k] + 25 - e[i])), +-(2^25 - 1), of a narrow operand +-32639), 0 where
     * e or c says all zero or e says non-finite. Rows [row_at, row_at + a's rows), columns [k_at, k_at + a's k). e: [batch, ALL rows of p]; c:
     * [batch, k of a] or NULL. */
    ar_status (*pack)(ar_device *d, ar_queue *q, ar_packed *p, size_t row_at, size_t k_at, const ar_tensor *a,
                      ar_cbuf c, int sign, ar_cbuf e);
    /* s[batch, m, n] = exact integer sums over k of qA*qB. limbs = 1: one int64 an element, k <= 8191 unless narrow; limbs = 2: two,
     * side by side, the sums of S_b >> 32 and of S_b & 0xffffffff over blocks b of the terms, which each device cuts
     * for itself, at most one for every 8191 terms begun: the sum is the first times 2^32 plus the second. add: to what
     * s holds. */
    ar_status (*gemm_i64)(ar_device *d, ar_queue *q, ar_buf s, const ar_packed *a, const ar_packed *b, int limbs,
                          bool add);
    /* y[batch, m, n] = the contraction rounded once to fp32, without storing the integers: e [batch, m], f [batch, n].
     * y: rows are contiguous runs of n (stride 1 along n), other strides free. Then bias [n] (fl32(y + bias)) and act
     * into z (same shape and strides rules) as in bias_act; batch 1 for those. band: NULL, all; else the device may
     * leave out what is outside of it: those elements of y are undefined. */
    ar_status (*gemm_round)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_packed *a, const ar_packed *b,
                            ar_cbuf e, ar_cbuf f, ar_cbuf bias, ar_activation act, const ar_tensor *z,
                            const ar_band *band);
    /* Every matrix of the batch (runs NULL), or every run of the terms of one, rounded as by gemm_round with exponents
     * of its own, is added to [m, n] of an accumulator: t u8, and H and L in hl, int64, where L begins `low` after H (m*n,
     * or more where these are some of its rows). Runs without terms add nothing; one has some. fresh: to zeros, whatever
     * these hold. */
    ar_status (*gemm_acc)(ar_device *d, ar_queue *q, ar_buf t, ar_buf hl, size_t low, bool narrow, const ar_packed *a,
                          const ar_packed *b, ar_cbuf e, ar_cbuf f, const ar_runs *runs, bool fresh);
    /* y[i] (fp32, contiguous, count elements) = rounded value of elements [start, start + count) of the row-major [m,
     * n] matrix of sums; s points at the first of them. */
    ar_status (*round_i64)(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf s, int limbs, size_t start, size_t count,
                           size_t n, ar_cbuf e, ar_cbuf f);

    /* --- the order-independent accumulator: t u8 [n], hl int64 [2n] (all H, then all L) --------------------------- */
    /* narrow: of slices of 13 bits, and the value is rounded to bf16. */
    /* Adds terms[r, 0..cols) to row row_of[r] (int64, negative: skip; ptr NULL: r itself if rows_in_acc > 1, else row
     * 0) of an accumulator of [rows_in_acc, cols]. terms: 2-D fp32 view, any strides. */
    ar_status (*acc_add)(ar_device *d, ar_queue *q, ar_buf t, ar_buf hl, bool narrow, size_t rows_in_acc,
                         const ar_tensor *terms, ar_cbuf row_of);
    /* Raises each element to t_new[i] >= t[i]. */
    ar_status (*acc_raise)(ar_device *d, ar_queue *q, ar_buf t, ar_buf hl, ar_cbuf t_new, size_t n);
    /* y = value of as many elements as it has, at most n, the first ones; y: fp32 view in row-major order of its shape,
     * any strides. n: where L begins. */
    ar_status (*acc_value)(ar_device *d, ar_queue *q, const ar_tensor *y, ar_cbuf t, ar_cbuf hl, size_t n, bool narrow);
    /* t, hl: states whose values are x, fp32 [n], contiguous (narrow: rounded to bf16); -0 becomes +0, an infinity stays
     * one. */
    ar_status (*acc_put)(ar_device *d, ar_queue *q, ar_buf t, ar_buf hl, ar_cbuf x, size_t n, bool narrow);
    /* packed [n, width] = narrow states t, h, l [n]: t, then the lowest bytes of h and of l, (width - 1)/2 each; width 5, 6, 8:
     * h and l of as many bits each above five bits of t; width 4: the sum, fp32. */
    ar_status (*states_narrow)(ar_device *d, ar_queue *q, ar_buf packed, ar_cbuf t, ar_cbuf h, ar_cbuf l, size_t n,
                               size_t width);
    /* t, h, l [n] are merged with the states of received [ranks, n, width]. */
    ar_status (*states_merge)(ar_device *d, ar_queue *q, ar_buf t, ar_buf h, ar_buf l, ar_cbuf received, size_t ranks,
                              size_t n, size_t width);
    /* fp32 sums for native numerics: acc_f32[row_of[r]] += terms[r] in row order; the same conventions as acc_add. */
    ar_status (*sum_rows_f32)(ar_device *d, ar_queue *q, ar_buf acc, size_t rows_in_acc, const ar_tensor *terms,
                              ar_cbuf row_of);

    /* --- element-wise: contiguous, of one number of elements ------------------------------------------------------ */
    /* y = fl32(a + b), y = fl32(a * b), all of one dtype; y may be a or b */
    ar_status (*add)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *a, const ar_tensor *b);
    ar_status (*mul)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *a, const ar_tensor *b);
    ar_status (*fill)(ar_device *d, ar_queue *q, const ar_tensor *y, float value);
    /* y = fl32(cap*tanh(fl32(x*scale)/cap)), cap > 0; y may be x */
    ar_status (*softcap)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, float scale, double cap);
    /* dx = fl32(fl32(dy*(1 - t*t))*scale), t that tanh of x; +0 where dy is 0, also of an x that is undefined. dx may
     * be dy or x. */
    ar_status (*softcap_backward)(ar_device *d, ar_queue *q, const ar_tensor *dx, const ar_tensor *dy,
                                  const ar_tensor *x, float scale, double cap);
    /* dx = fl32(dy * act'(x)), and dbias[j] += dx[.., j], as it is stored, over all rows, in one pass. Contiguous, of
     * one shape; dx may be dy or x. */
    ar_status (*act_backward)(ar_device *d, ar_queue *q, const ar_tensor *dx, const ar_tensor *dy, const ar_tensor *x,
                              ar_activation act, const ar_row_sum *dbias);
    /* 2-D views (rows may be strided, columns contiguous): y = fl32(act(gate)*up) */
    ar_status (*gated_forward)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *gate,
                               const ar_tensor *up, ar_activation act);
    /* Likewise, dgate = fl32(fl32(dy*up)*act'(gate)), dup = fl32(dy*act(gate)), and the sums of their rows. dgate may
     * be gate, dup may be up, either may be dy. */
    ar_status (*gated_backward)(ar_device *d, ar_queue *q, const ar_tensor *dgate, const ar_tensor *dup,
                                const ar_tensor *dy, const ar_tensor *gate, const ar_tensor *up, ar_activation act,
                                const ar_row_sum *dgate_bias, const ar_row_sum *dup_bias);

    /* y = fl32(x*scale) where the element is kept, +0 where it is dropped; sum = fl32(residual + y) in the same pass if
     * residual is given (NULL: sum is not written). y NULL: not written. Contiguous, of one shape; y may be x, sum may
     * be residual. */
    ar_status (*dropout)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *sum, const ar_tensor *x,
                         const ar_tensor *residual, const ar_dropout *which);

    /* --- norms: x, y [.., h] contiguous, a row along the last dimension. gamma, beta f32 [h]. mean f64 [rows]
     * (LayerNorm only) and rstd f32 [rows] are saved --------------------------------------------------------------- */
    ar_status (*norm_forward)(ar_device *d, ar_queue *q, ar_norm_kind kind, const ar_tensor *y, ar_buf mean,
                              ar_buf rstd, const ar_tensor *x, ar_cbuf gamma, ar_cbuf beta,
                              double eps); /* beta NULL: none, as of RMS */
    /* dx = the norm's own gradient; sum = fl32(residual + dx) if residual is given (NULL: sum is not written); over all
     * rows dgamma[j] += fl32(dy*xhat), dbeta[j] += dy. One pass. Tensors contiguous, of one number of elements; h is
     * x's last extent. dx may be dy or x, sum may be residual. */
    ar_status (*norm_backward)(ar_device *d, ar_queue *q, ar_norm_kind kind, const ar_tensor *dx, const ar_tensor *sum,
                               const ar_tensor *dy, const ar_tensor *x, ar_cbuf mean, ar_cbuf rstd, ar_cbuf gamma,
                               const ar_tensor *residual, const ar_row_sum *dgamma, const ar_row_sum *dbeta);

    /* --- attention ------------------------------------------------------------------------------------------------ */
    /* cos, sin [positions, n/2] fp32 of the n features of a head that turn, times the attention factor. Of longrope the
     * short factors, of dynamic theta as it is. */
    ar_status (*rope_tables)(ar_device *d, ar_queue *q, ar_buf cos, ar_buf sin, size_t positions, size_t head_dim,
                             const ar_rope *rope);
    /* y, x: views [b, s, heads, d] (d contiguous), y may have other strides than x, or be x. direction +1 forward, -1
     * backward (sin negated). Position of row s is s. */
    ar_status (*rope)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, ar_cbuf cos, ar_cbuf sin,
                      int direction);
    /* probs from a block of scores (may be the same memory): s = fl32(score*scale), + additive mask; m = row max over
     * visible keys; p = exp32(fl32(s - m)); l = row sum of seq terms, exponent 1; fl32(p/l). Masked +0; no visible key:
     * all +0. A NaN score among the visible ones makes the row NaN. max (int32) and sum (f64) [b, kv_heads, group *
     * rows]: of each row the order-preserving key of m (INT32_MIN: no visible key, INT32_MAX: one that is not finite)
     * and l (undefined with those two): written, or (known) read, and then the block may have some of the keys only.
     * sinks f32 [kv_heads * group] (ptr NULL: none): the logit of one more key for each head, in m and, as one more
     * term, in l alone; no additive mask moves it. */
    ar_status (*softmax_forward)(ar_device *d, ar_queue *q, ar_buf probs, ar_cbuf scores, ar_cbuf sinks, ar_buf max,
                                 ar_buf sum, bool known, float scale, const ar_scores *block, const ar_mask *mask);
    /* D = row sum of seq terms probs*dprobs; ds = fl32(fl32(probs*(dprobs - D))*scale), masked +0. dprobs at masked
     * keys is set to +0 in place first. ds may be dprobs only if the caller no longer needs dprobs. dot (f64) [b,
     * kv_heads, group * rows]: D, written, or (known) read, as above. */
    ar_status (*softmax_backward)(ar_device *d, ar_queue *q, ar_buf ds, ar_cbuf probs, ar_buf dprobs, ar_buf dot,
                                  bool known, float scale, const ar_scores *block, const ar_mask *mask);
    /* terms [b, rows, heads], f32, any strides = fl32(-p*D) in binary64 with p = fl32(exp32(fl32(sink - m))/l): the
     * gradient of a head's sink, of every row; of one without a visible key +0, of one that is not finite NaN. max,
     * sum and dot as above, [b, heads, rows]. */
    ar_status (*sinks_backward)(ar_device *d, ar_queue *q, const ar_tensor *terms, ar_cbuf sinks, ar_cbuf max,
                                ar_cbuf sum, ar_cbuf dot);

    /* --- experts: n tokens, E experts, k slots a token, 0 < k <= E ------------------------------------------------ */
    /* Slot i = t*k + j is token t's j-th expert. Rows of slots are in an order of the caller's: place[i] is the row of
     * slot i, slot_of[r] the slot of row r. Tensors are contiguous; p, weight, g and value are f32 whatever the
     * activations are, expert int32 in [0, E), place and slot_of int64. */
    /* Of a softmax, p [n, E] = that of each row of z [.., E] as softmax_forward has it, nothing masked, and it chooses by
     * c = z; of sigmoids (DeepSeek-V3) p = sigmoid(z) and c = fl32(p + bias). Of several groups of consecutive experts
     * each has the score fl32(x + y), x >= y its two largest c, of a softmax (DeepSeek-V2) x; the `kept` groups of the
     * largest score stay, the lower number where two are equal, and of their experts, ascending in expert [n, k], the k
     * of the largest c, the lower number where two are equal (-0 is +0). weight [n, k] = fl32(scale*p), or (normalised)
     * fl32(scale*fl32(p / s)): s the sum of their p in slot order, each step rounded, of sigmoids fl32(that + 1e-20). A
     * row of which c[i] is a NaN, or of sigmoids no finite number, i the first: expert is -1 - i in all slots, weight is
     * NaN. Of a softmax p is NaN then, and p and weight of a row with an infinity, whose experts are chosen as others
     * are. lse [n], f32 (ptr NULL: not wanted; of a softmax alone): fl32(m + log l), m the largest z, l the softmax's
     * denominator; NaN where p is. groups <= AR_ROUTE_GROUPS. */
    ar_status (*route)(ar_device *d, ar_queue *q, ar_buf p, ar_buf expert, ar_buf weight, ar_buf lse,
                       const ar_tensor *z, const ar_route_rule *rule);
    /* dz [.., E] from g [n, k], the weights' gradient; sums are over a row's experts, from +0, each step rounded. Of a
     * softmax with v = w (normalised), else p, and h = fl32(scale*g): r = the sum of fl32(v*h), dz = fl32(v*fl32(h - r))
     * of those, of the others +0 (normalised), else fl32(p*-r). Of sigmoids with t = fl32(p / fl32(s + 1e-20)): r = the
     * sum of fl32(t*g), or 0 where they are not normalised, dz = fl32(fl32(w*fl32(1 - p))*fl32(g - r)) of those, of the
     * others +0. */
    ar_status (*route_backward)(ar_device *d, ar_queue *q, const ar_tensor *dz, ar_cbuf g, ar_cbuf p, ar_cbuf expert,
                                ar_cbuf weight, const ar_route_rule *rule);
    /* dz [.., E] += the gradients of the router's own losses, but of rows whose valid (u8 [n], ptr NULL: all) is 0. The
     * balance: of row t with c = balance[t / tokens, :] (f32 [n / tokens, E], ptr NULL: none) fl32(p*fl32(c - r)), r = the
     * sum over E of fl32(p*c), from +0, each step rounded. Then, with lse of route (ptr NULL: none), the z-loss:
     * fl32(p*fl32(z*lse)), z*lse in binary64. Each is added in fp32 and rounded. */
    ar_status (*route_losses)(ar_device *d, ar_queue *q, const ar_tensor *dz, ar_cbuf p, ar_cbuf balance, size_t tokens,
                              ar_cbuf lse, double z, ar_cbuf valid);
    /* terms [n], f32: what these losses of each row are, of p [n, E]: r, plus fl32(z*lse*lse), computed in binary64 from
     * left to right; +0 of rows that are not valid. */
    ar_status (*route_terms)(ar_device *d, ar_queue *q, ar_buf terms, const ar_tensor *p, ar_cbuf balance,
                             size_t tokens, ar_cbuf lse, double z, ar_cbuf valid);
    /* y[t, :] = the sum over j, ascending, of rows[place[t*k + j], :], or (weight not NULL) of fl32(weight[t*k + j] *
     * that), in fp32 from the first term on, each step rounded. */
    ar_status (*combine_rows)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *rows, ar_cbuf weight,
                              ar_cbuf place, size_t k);
    /* g[t*k + j] = fl32(row sum of the products dy[t, c]*rows[place[t*k + j], c]), as D of softmax_backward is one. */
    ar_status (*dot_rows)(ar_device *d, ar_queue *q, ar_buf g, const ar_tensor *dy, const ar_tensor *rows,
                          ar_cbuf place, size_t k);
    /* y[t, :] = fl32(y[t, :] + fl32(s*x[t, :])), s = sigmoid32(logit[t]); logit [.., 1] */
    ar_status (*add_gated)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, const ar_tensor *logit);
    /* dx[t, :] = fl32(s*dy[t, :]); dlogit[t] = fl32(D*(s*(1 - s))) in binary64, D = fl32(row sum of the products dy*x).
     * dx may be dy or x. */
    ar_status (*add_gated_backward)(ar_device *d, ar_queue *q, const ar_tensor *dx, const ar_tensor *dlogit,
                                    const ar_tensor *dy, const ar_tensor *x, const ar_tensor *logit);

    /* --- embedding and loss --------------------------------------------------------------------------------------- */
    /* row_of[t] = ids[t] - start if ids[t] in [start, start + count), else -1 */
    ar_status (*rows_in_range)(ar_device *d, ar_queue *q, ar_buf row_of, ar_cbuf ids, size_t n, int64_t start,
                               int64_t count);
    /* y[t, :] ([.., cols] contiguous, row t of n) = w[i / k, :], i = row_of[t], or (weight not NULL) fl32(weight[i] *
     * that); all zero bits where i < 0. Without weights it copies bits. w: 2-D view with contiguous columns, of y's
     * dtype. */
    ar_status (*gather_rows)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *w, ar_cbuf row_of,
                             ar_cbuf weight, size_t k);
    /* Vocab-parallel cross-entropy. logits: [.., v_local] contiguous, row t of n. v: the whole vocabulary's size.
     * key[t] int32 = order-preserving key of the largest local logit (INT32_MIN where v_local = 0). */
    ar_status (*ce_max)(ar_device *d, ar_queue *q, ar_buf key, const ar_tensor *logits);
    /* sum[t] int64 = row sum, exponent 1, of exp32(fl32(x - m)), m = value of key[t]; +0 for a NaN key. */
    ar_status (*ce_sum)(ar_device *d, ar_queue *q, ar_buf sum, const ar_tensor *logits, ar_cbuf key, size_t v);
    /* sum[t] int64 = row sum of the logits, of the exponent e[t] int32 (row_exponents, the maximum over all shards), 0
     * where that says non-finite. For their mean, which label smoothing needs. */
    ar_status (*ce_logits)(ar_device *d, ar_queue *q, ar_buf sum, const ar_tensor *logits, ar_cbuf e, size_t v);
    /* bits[t] int32 = bit pattern of logits[t, row_of[t]] as fp32, 0 where row_of[t] < 0 */
    ar_status (*ce_target)(ar_device *d, ar_queue *q, ar_buf bits, const ar_tensor *logits, ar_cbuf row_of);
    /* terms[t] fp32 = the loss of ar_loss_options, lse = m + log l; +0 where valid[t] (u8) is 0. e, logits: exponents
     * and sums of ce_logits, over all shards; ptr NULL without label smoothing. */
    ar_status (*ce_terms)(ar_device *d, ar_queue *q, ar_buf terms, ar_cbuf key, ar_cbuf sum, ar_cbuf bits,
                          ar_cbuf valid, ar_cbuf e, ar_cbuf logits, const ar_loss_options *o, size_t n, size_t v);
    /* dlogits[t, j] = fl32(fl32(p*weight - label)/targets), p = fl32(exp/l), weight = 1 + 2*c*lse, label = (1 - e)*(j
     * == row_of[t]) + e/v; +0 where valid[t] is 0 or targets is 0. dlogits may be logits. */
    ar_status (*ce_backward)(ar_device *d, ar_queue *q, const ar_tensor *dlogits, const ar_tensor *logits, ar_cbuf key,
                             ar_cbuf sum, ar_cbuf row_of, ar_cbuf valid, const ar_loss_options *o, double targets,
                             size_t v);

    /* --- gradients and weights: contiguous ------------------------------------------------------------------------ */
    /* sums (int64 [2]) += the sums over g of q >> 30 and of q & (2^30 - 1), q = rint((g*2^-e)^2*2^60), e (int32 [1])
     * at least the exponent of g; nothing where e says all zero or non-finite. */
    ar_status (*sum_squares)(ar_device *d, ar_queue *q, ar_buf sums, const ar_tensor *g, ar_cbuf e);
    /* y = fl32(x*factor); y may be x */
    ar_status (*scale)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, float factor);
    /* y = x rounded to the nearest number of `bits` bits of significand (1 < bits < 24; bf16: 8, TF32: 11), ties to
     * even; the exponents are fp32's. One shape, any strides; y may be x. */
    ar_status (*round_bits)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, int bits);
    /* One step of w from its gradient g, and of the moments (f32): m where SGD has a momentum, m and v for Adam and
     * AdamW; a moment that the kind does not have: ptr NULL. master (f32 [n]), if w is BF16 and a copy of it: the step
     * updates master, and w is master rounded. An element of w that differs from rounded master was set since, and is
     * copied to master first. No two may overlap. */
    ar_status (*optimizer_step)(ar_device *d, ar_queue *q, const ar_tensor *w, ar_buf master, ar_buf m, ar_buf v,
                                const ar_tensor *g, const struct ari_optimizer_constants *k);
} ar_device_ops;
/* The functions of that table by name, for macros. */
/* clang-format off */
#define AR_DEVICE_SLOTS(X)                                                                               \
    X(queue_create) X(destroy) X(alloc) X(free) X(copy) X(zero) X(copy_strided)                          \
    X(gemm_f32) X(bias_act) X(col_exponents) X(row_exponents) X(packed_create) X(packed_part) X(packed_destroy) \
    X(packed_bytes) X(packed_room) X(pack) X(gemm_i64) X(gemm_round) X(gemm_acc) X(round_i64) X(acc_add) \
    X(acc_raise) X(acc_value) X(acc_put) X(states_narrow) X(states_merge) X(sum_rows_f32) X(add) X(mul) X(fill) X(softcap) X(softcap_backward)       \
    X(act_backward) X(gated_forward) X(gated_backward) X(dropout) X(norm_forward) X(norm_backward)       \
    X(rope_tables) X(rope) X(softmax_forward) X(softmax_backward) X(sinks_backward) X(route) X(route_backward)           \
    X(route_losses) X(route_terms)                                                                       \
    X(combine_rows) X(dot_rows) X(add_gated) X(add_gated_backward)      \
    X(rows_in_range) X(gather_rows)                                                                      \
    X(ce_max) X(ce_sum) X(ce_logits) X(ce_target) X(ce_terms) X(ce_backward) X(sum_squares) X(scale) \
    X(round_bits) X(optimizer_step)
/* clang-format on */

/** An instance: its table, how many threads of the host a kernel may use, and how many bytes of a value that several
 *  kernels pass on to each other are worked on at a time: its cache holds a few such pieces. Hollow: its memory has no
 *  contents and its kernels do nothing (ref/dry); thin: nor does it want all pieces of a value, but those that need
 *  most memory. Of one rank; ranks may share a GPU. */
struct ar_device {
    const ar_device_ops *ops;
    int threads;
    size_t block_bytes;
    bool hollow, thin;
};

/* The CPU device's block_bytes. A second cache level alone would hold too few rows to be worth their packing: measured
 * at sequences of 4,096. */
#define AR_CPU_BLOCK_BYTES ((size_t)2 << 20)

typedef enum ar_device_kind {
    AR_DEVICE_CPU,
    AR_DEVICE_CUDA,
    AR_DEVICE_EMULATED, /* the CUDA device's own kernels, compiled for the host: slow, and needs no GPU */
    AR_DEVICE_KINDS
} ar_device_kind;
/* Which device. */
typedef struct ar_device_choice {
    ar_device_kind kind;
    int index; /* of the GPU, as CUDA counts them; AR_GPU_EACH; other kinds: 0 */
} ar_device_choice;
/* Index of a device choice for several ranks that are threads: rank r takes GPU r, and NCCL connects the ranks, where
 * the machine has as many GPUs and NCCL; else all ranks share GPU 0. */
#define AR_GPU_EACH (-1)
/** A device; threads: of the host, for a kernel of the CPU device. Gives; ar_device_destroy. Errors: those of
 *  ar_device_cpu_create and ari_device_cuda_create; AR_ERR_UNSUPPORTED: this build has no such device, and why. */
AR_NODISCARD ar_status ar_device_create(ar_device **out, const ar_device_choice *which, int threads);

/* A GPU, for `anyrank info`. */
typedef struct ar_gpu_info {
    char name[96];
    int major, minor; /* compute capability */
    int processors;
    size_t memory, free_memory;
} ar_gpu_info;

/** The CPU device, with `threads` threads a kernel (a rank's share of the cores). Gives; ar_device_destroy.
 *  Its exact products take the fastest path that CPUID offers, or the one that the environment variable
 *  ANYRANK_EXACT_PATH ("portable", "avx2", ...) names: the same bits either way.
 *  Errors: AR_ERR_ARG (threads < 1, another value of that variable), AR_ERR_UNSUPPORTED (a path that this processor
 *  lacks; an OpenBLAS that cannot be used, dependencies.md), AR_ERR_DATA (flush-to-zero is on in this thread),
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_device_cpu_create(ar_device **out, int threads);
void ar_device_destroy(ar_device *d);

/** Processor and libraries of the CPU device, for `anyrank info`. */
typedef struct ar_cpu_info {
    char cpu[64];           /* "AMD EPYC 9B45", "Arm Neoverse N1" */
    char features[128];     /* "avx2 fma avx_vnni avx512f avx512_vnni": names of /proc/cpuinfo */
    char blas[32];          /* the library that multiplies: "BLIS", "OpenBLAS", or "CBLAS" */
    char blas_version[32];  /* "0.9.0" */
    char blas_kernels[32];  /* as the library calls them: "skx", "SkylakeX", ... */
    char blas_reason[112];  /* why these */
    char exact_path[32];    /* "portable", "avx2", ...; "refused": ANYRANK_EXACT_PATH asks for what is not there */
    char exact_reason[192]; /* why this one, or what refused it */
    int cores;
} ar_cpu_info;

AR_END_DECLS
#endif
