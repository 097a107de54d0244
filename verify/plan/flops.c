/* SPDX-License-Identifier: Apache-2.0 */
/* Counts the floating-point operations of a training step by the formulas that published figures use. */
#include "anyrank/config.h"
#include "ref/core/size.h"
#include "ref/models/family.h"
#include "ref/models/model_private.h"
#include "verify/plan/planner.h"

const char *ari_flops_formula(ari_flops_convention k)
{
    static const char *const formulas[] = {
#define ARI_FLOPS_FORMULA(name, text) [ARI_FLOPS_##name] = text,
        ARI_FLOPS_TABLE(ARI_FLOPS_FORMULA)
#undef ARI_FLOPS_FORMULA
    };
    return formulas[k];
}

/* A matrix-vector product takes two operations per element, and a step has three such products: forward, gradient of
 * the input, and gradient of the weight. */
static const double STEP = 6.0;

/* Numbers of parameters. */
typedef struct counts {
    double matrices; /* elements of all blocks' matrices; of experts, those that one token uses */
    double vectors;  /* elements of norms and biases, in all blocks and the final norm */
    double table;    /* V h for an embedding if the model has a head of V h, otherwise 0 */
} counts;

static ar_status counts_of(counts *n, const ar_config *c)
{
    const bool head = ari_part_path(ari_family_of(c->arch), ARI_HEAD) != NULL;
    const double h = (double)c->hidden, table = (double)c->vocab * h;
    size_t parameters = 0;
    AR_TRY(ari_config_parameters(c, &parameters));
    const double joined = 2.0 * h * h * (double)c->mtp; /* matrices of blocks for further tokens */
    const double attention = (double)ar_config_blocks(c) * ari_attention_matrices(c) + joined;
    n->matrices = attention + ari_mlp_matrices(c, true);
    n->table = head ? table : 0.0;
    const double positions = c->learned_positions ? (double)c->max_positions * h : 0.0;
    n->vectors = (double)parameters - attention - ari_mlp_matrices(c, false) - table * (head && !c->tied ? 2.0 : 1.0) -
                 positions;
    return AR_OK;
}

/* Returns the keys per query, summed over layers. Causal masking halves them, which the formula's factor includes. A
 * window w leaves w s - w^2/2 of a sequence's s^2/2. */
static double keys_of(const ar_config *c, size_t seq, bool causal)
{
    const double s = (double)seq;
    double sum = 0.0;
    if (!causal || c->window == 0)
        return (double)ar_config_blocks(c) * s;
    for (size_t i = 0; i < ar_config_blocks(c); i++) {
        const size_t window = ar_config_window(c, i);
        const double w = window > 0 && window < seq ? (double)window : s;
        sum += 2.0 * w - w * w / s;
    }
    return sum;
}

ar_status ari_flops_token(double *flops, const ar_config *c, size_t seq, ari_flops_convention k, ar_recompute recompute)
{
    counts n;
    AR_TRY(counts_of(&n, c));
    const bool causal = k == ARI_FLOPS_CAUSAL;
    const double mean_dim =
        (double)(c->head_dim + ar_config_value_dim(c)) / 2.0; /* for a product over keys, and one over values */
    const double pairs = keys_of(c, seq, causal) * (double)c->heads * mean_dim;
    const double attention = (causal ? STEP : 2.0 * STEP) * pairs;
    const double blocks = STEP * (n.matrices + (k == ARI_FLOPS_PRODUCTS ? 0.0 : n.vectors)) + attention;
    const double recomputed = recompute == AR_RECOMPUTE_FULL        ? blocks / 3.0
                              : recompute == AR_RECOMPUTE_SELECTIVE ? attention
                                                                    : 0.0;
    *flops = blocks + STEP * n.table * ((k == ARI_FLOPS_TABLES ? 2.0 : 1.0) + (double)c->mtp) + recomputed;
    return AR_OK;
}
