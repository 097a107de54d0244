/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses the device by its name and its variant by the environment, and says why a device is missing. */
#include <stdlib.h>
#include <string.h>

#include "gpu/device_private.h"
#include "gpu/native.h"
#include "ref/core/names.h"
#include "ref/core/text.h"

ar_status ari_device_choice_parse(ar_device_choice *c, const char *text)
{
    const char *colon = strchr(text, ':');
    const size_t length = colon ? (size_t)(colon - text) : strlen(text);
    for (int i = 0; i < AR_DEVICE_KINDS; i++) {
        const char *name = ari_device_kind_names[i];
        if (strlen(name) != length || strncmp(text, name, length) != 0)
            continue;
        char *end = NULL;
        const long index = colon ? strtol(colon + 1, &end, 10) : i == AR_DEVICE_CUDA ? AR_GPU_EACH : 0;
        if (colon && (i != AR_DEVICE_CUDA || end == colon + 1 || *end || index < 0 || index > 1023))
            break;
        *c = (ar_device_choice){(ar_device_kind)i, (int)index};
        return AR_OK;
    }
    return ar_error_set(
        AR_ERR_ARG, "device '%.40s': cpu, cuda (a GPU for each rank, if there are as many), cuda:N (GPU N) or emulated",
        text);
}

ar_status ar_device_create(ar_device **result, const ar_device_choice *which, int threads)
{
    switch (which->kind) {
    case AR_DEVICE_CUDA:
        return ari_device_cuda_create(result, ari_gpu_index(which));
    case AR_DEVICE_EMULATED:
        return ari_device_emulated_create(result);
    case AR_DEVICE_CPU:
    case AR_DEVICE_KINDS:
        break;
    }
    return ar_device_cpu_create(result, threads);
}

int ari_gpu_index(const ar_device_choice *c)
{
    return c->index == AR_GPU_EACH ? 0 : c->index;
}

void ar_device_destroy(ar_device *d)
{
    if (d)
        d->ops->destroy(d);
}

/* Sets *which to the index of the word that an environment variable holds; -1 if the variable is not set. */
static ar_status choose(int *which, const char *variable, const char *first, const char *second)
{
    const char *set = getenv(variable);
    *which = -1;
    if (!set || set[0] == '\0')
        return AR_OK;
    if (strcmp(set, first) != 0 && strcmp(set, second) != 0)
        return ar_error_set(AR_ERR_ARG, "%s is '%.40s', expected '%s' or '%s'", variable, set, first, second);
    *which = strcmp(set, first) != 0;
    return AR_OK;
}

ar_status ari_sgemm_choose(bool *pedantic)
{
    int which;
    AR_TRY(choose(&which, ARI_SGEMM_VARIABLE, "default", "pedantic"));
    *pedantic = which == 1;
    return AR_OK;
}

static ar_status choose_rows(size_t *rows)
{
    const char *set = getenv(ARI_IMMA_ROWS_VARIABLE);
    if (!set || set[0] == '\0')
        return AR_OK;
    uint64_t n = 0;
    const char *end = NULL;
    if (!ari_natural(&n, set, &end) || *end || n > UINT64_C(1) << 31)
        return ar_error_set(AR_ERR_ARG, "%s is '%.40s', expected a number of rows up to 2^31", ARI_IMMA_ROWS_VARIABLE,
                            set);
    *rows = (size_t)n;
    return AR_OK;
}

ar_status ari_imma_choose(ari_imma *imma)
{
    int which;
    AR_TRY(choose(&which, ARI_IMMA_VARIABLE, "imma16", "imma10"));
    *imma = (ari_imma){which < 0 ? ARI_IMMA_AUTO : which == 0 ? ARI_IMMA_16 : ARI_IMMA_10, 0};
    return choose_rows(&imma->min_rows);
}

/* "13.0" of 13000. */
#define VERSION "%d.%d"
#define NUMBERS(version) (version) / 1000, (version) % 1000 / 10

ar_status ari_gpu_why_none(const ari_gpu_machine *m)
{
    if (m->driver == 0 && m->loaded)
        return ar_error_set(AR_ERR_UNSUPPORTED, "the NVIDIA driver is loaded, but its library, libcuda.so.1, is not "
                                                "found: a container must be started with the GPU (docker --gpus all)");
    if (m->driver == 0)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "this machine has no NVIDIA driver (this build needs one for CUDA " VERSION " or newer)",
                            NUMBERS(m->runtime));
    if (m->code == ARI_CUDA_INSUFFICIENT_DRIVER)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "the NVIDIA driver is for CUDA " VERSION ", and this build needs one for " VERSION
                            ": update the driver, or build with the toolkit of CUDA " VERSION,
                            NUMBERS(m->driver), NUMBERS(m->runtime), NUMBERS(m->driver));
    if (m->code == ARI_CUDA_NO_DEVICE || m->code == 0)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "the NVIDIA driver shows no GPU to this process (CUDA_VISIBLE_DEVICES may hide them)");
    return ar_error_set(AR_ERR_UNSUPPORTED, "the NVIDIA driver does not work: %s (%s)", m->text, m->name);
}
