/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/estimate.h"

#include <stdint.h>
#include <stdio.h>

#include "anyrank/model.h"
#include "ref/core/size.h"

/* MemAvailable, or where the system does not tell it "no limit known". */
static size_t available_memory(void)
{
    size_t kib = 0;
    char line[128];
    FILE *f = fopen("/proc/meminfo", "r");
    if (!f)
        return SIZE_MAX;
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, "MemAvailable: %zu kB", &kib) == 1)
            break;
    }
    fclose(f);
    return kib ? kib * 1024 : SIZE_MAX;
}

static ar_status add_product(size_t *sum, size_t a, size_t b, size_t c)
{
    size_t p = 0;
    AR_TRY(ari_mul_size(&p, a, b));
    AR_TRY(ari_mul_size(&p, p, c));
    return ari_add_size(sum, *sum, p);
}

/* Activations that one forward keeps: values of hidden width, of the MLP's, of the heads, and the probabilities. */
static ar_status activation_elements(size_t *out, const ar_config *c, size_t batch, size_t seq)
{
    size_t tokens = 0, block = 0, total = 0;
    AR_TRY(ari_mul_size(&tokens, batch, seq));
    AR_TRY(add_product(&block, tokens, c->hidden, 7));
    AR_TRY(add_product(&block, tokens, c->ffn, c->gated ? 4 : 3));
    AR_TRY(add_product(&block, tokens, (c->heads + c->kv_heads) * c->head_dim, 4));
    size_t pairs = 0;
    AR_TRY(ari_mul_size(&pairs, tokens, seq));
    AR_TRY(add_product(&block, pairs, c->heads, 2));
    AR_TRY(add_product(&total, block, c->layers, 1));
    AR_TRY(add_product(&total, tokens, c->vocab, 3));
    AR_TRY(add_product(&total, tokens, c->hidden, 6));
    *out = total;
    return AR_OK;
}

/* Baseline in binary64, reference, gathered run; weight, accumulator, kept operands. */
enum { BYTES_PER_PARAMETER = 8 + 8 + 72 / 4 + 3 * 4 + 41 };

ar_status ari_estimate_layers(const ar_config *c)
{
    size_t bytes = 0;
    ari_estimate e = {.available = available_memory()};
    AR_TRY(add_product(&bytes, c->hidden, c->ffn, 2));
    AR_TRY(add_product(&bytes, c->hidden, c->heads * c->head_dim, 2));
    AR_TRY(add_product(&e.bytes, bytes, c->layers, BYTES_PER_PARAMETER));
    return ari_estimate_fits(&e);
}

ar_status ari_estimate_check(ari_estimate *e, const ar_config *c, size_t batch, size_t seq, int largest_tp,
                             size_t layouts)
{
    size_t params = 0, activations = 0, bytes = 0, tokens = 0;
    AR_TRY(ar_config_parameters(c, &params));
    AR_TRY(activation_elements(&activations, c, batch, seq));
    AR_TRY(ari_mul_size(&tokens, batch, seq));
    AR_TRY(add_product(&bytes, params, BYTES_PER_PARAMETER, 1));
    AR_TRY(add_product(&bytes, activations, 2 * 8 + 2 * 4, 1));
    AR_TRY(add_product(&bytes, activations, 3 * 4, (size_t)(largest_tp < 4 ? largest_tp : 4)));
    const double pairs = (double)tokens * (double)seq * (double)(c->heads * c->head_dim) * (double)c->layers;
    *e = (ari_estimate){.bytes = bytes, .available = available_memory()};
    e->macs = 3.0 * (double)params * (double)tokens + 6.0 * pairs;
    /* The baseline runs twice (exact and binary64) at about 1e9 multiply-adds a second; a layout is far faster. */
    e->seconds = e->macs * 1e-9 * (2.0 + 0.15 * (double)layouts);
    return AR_OK;
}

ar_status ari_estimate_fits(const ari_estimate *e)
{
    if (e->bytes > e->available)
        return ar_error_set(AR_ERR_ARG,
                            "this would take about %.1f GB of memory and %.1f GB are free; take a smaller model, "
                            "--batch or --seq",
                            (double)e->bytes * 1e-9, (double)e->available * 1e-9);
    return AR_OK;
}
