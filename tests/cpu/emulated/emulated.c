/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cpu/emulated/emulated.h"

#include <string.h>

#include "ref/cpu/device.h"

extern const ari_exact_path emulated_exact_amx;
extern const ari_exact_path emulated_exact_avx512vnni, emulated_exact_avxvnni, emulated_exact_avx2;
extern const ari_exact_path emulated_exact_smmla, emulated_exact_sdot, emulated_exact_neon;

static const ari_exact_path *const emulated[] = {
    &emulated_exact_amx,   &emulated_exact_avx512vnni, &emulated_exact_avxvnni, &emulated_exact_avx2,
    &emulated_exact_smmla, &emulated_exact_sdot,       &emulated_exact_neon};

const ari_exact_path *test_emulated_path_at(size_t i)
{
    return i < sizeof emulated / sizeof emulated[0] ? emulated[i] : NULL;
}

const ari_exact_path *test_emulated_path(const char *name)
{
    const ari_exact_path *path = NULL;
    for (size_t i = 0; (path = test_emulated_path_at(i)) && strcmp(path->name, name) != 0; i++) {
    }
    return path;
}

void test_take_path(ar_device *d, const ari_exact_path *path)
{
    ((ari_cpu_device *)d)->exact = (ari_exact_choice){.path = path, .brief = path};
}
