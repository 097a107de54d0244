/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "anyrank/safetensors.h"
#include "ref/core/size.h"
#include "verify/reference/sensitivity.h"

ar_status ari_allowances_add(ari_allowances *a, const char *name, double value)
{
    AR_TRY(ari_grow(&a->list, &a->capacity, a->count, sizeof *a->list, "allowances"));
    ari_allowance *one = &a->list[a->count];
    one->value = value;
    if ((size_t)snprintf(one->name, sizeof one->name, "%s", name) >= sizeof one->name)
        return ar_error_set(AR_ERR_ARG, "the name %s is longer than %zu bytes", name, sizeof one->name - 1);
    a->count++;
    return AR_OK;
}

ar_status ari_allowances_add_all(ari_allowances *a, const ari_reference *ref)
{
    for (size_t i = 0; i < ref->count; i++) {
        const ari_ref_tensor *t = &ref->tensor[i];
        char name[ARI_REFERENCE_NAME];
        double beside = 0.0;
        for (size_t k = 0; t->beside && k < t->count; k++)
            beside = fmax(beside, (double)t->beside[k]);
        ari_reference_name(name, t);
        AR_TRY(ari_allowances_add(a, name, t->allowed + beside));
    }
    return AR_OK;
}

void ari_allowances_fini(ari_allowances *a)
{
    free(a->list);
    *a = (ari_allowances){.list = NULL};
}

ar_status ari_allowances_write(const ari_allowances *a, const char *path, ar_sensitivity of, const char *hash)
{
    char seeds[16], safety[32];
    ar_st_tensor *tensor = NULL;
    AR_TRY(ari_alloc((void **)&tensor, a->count, sizeof *tensor, "tensors of a file"));
    for (size_t i = 0; i < a->count; i++)
        tensor[i] = (ar_st_tensor){.name = a->list[i].name, .dtype = AR_F64, .data = &a->list[i].value};
    snprintf(seeds, sizeof seeds, "%d", ARI_NOISE_SEEDS);
    snprintf(safety, sizeof safety, "%g", ARI_NOISE_SAFETY);
    const char *const metadata[] = {"format",
                                    "pt",
                                    "anyrank.allows",
                                    ar_sensitivity_name(of),
                                    "anyrank.seeds",
                                    seeds,
                                    "anyrank.safety",
                                    safety,
                                    "anyrank.reference",
                                    hash};
    const ar_status st = ar_st_write(path, tensor, a->count, metadata, sizeof metadata / sizeof *metadata / 2);
    free(tensor);
    return st;
}
