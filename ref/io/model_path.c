/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "anyrank/config.h"
#include "ref/core/nearest.h"
#include "ref/io/file.h"

static const char *const bundled[] = {"llama-demo", "gpt2-demo", "stack-demo"};
#define BUNDLED (sizeof bundled / sizeof bundled[0])

static ar_status put(char *out, size_t cap, const char *folder, const char *name)
{
    const int n = snprintf(out, cap, "%s%s%s", folder, folder[0] == '\0' ? "" : "/", name);
    if (n < 0 || (size_t)n >= cap)
        return ar_error_set(AR_ERR_ARG, "model '%s': its path does not fit in %zu bytes", ARI_SHOW(name), cap);
    return AR_OK;
}

ar_status ar_model_path(char *out, size_t cap, const char *model)
{
    struct stat info;
    if (out == NULL || cap == 0 || model == NULL || model[0] == '\0')
        return ar_error_set(AR_ERR_ARG, "the model's name is missing");
    if (stat(model, &info) == 0)
        return put(out, cap, "", model);
    for (size_t i = 0; i < BUNDLED; i++) {
        if (strcmp(model, bundled[i]) != 0)
            continue;
        AR_TRY(put(out, cap, ar_data_dir(), model));
        if (stat(out, &info) == 0)
            return AR_OK;
        return ar_error_set(AR_ERR_NOT_FOUND,
                            "model '%s' is bundled but not in the data directory '%s' (ANYRANK_DATA sets another)",
                            model, ARI_SHOW(ar_data_dir()));
    }
    const char *near = ari_nearest(model, bundled, BUNDLED);
    return ar_error_set(
        AR_ERR_NOT_FOUND,
        "model '%s': no such folder or file; bundled models are llama-demo, gpt2-demo, stack-demo%s%s%s",
        ARI_SHOW(model), near == NULL ? "" : "; did you mean '", near == NULL ? "" : near, near == NULL ? "" : "'?");
}
