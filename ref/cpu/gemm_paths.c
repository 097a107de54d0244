/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/gemm_paths.h"

#include <stdlib.h>
#include <string.h>

#include "ref/cpu/contract_kernels.h"
#include "ref/cpu/gemm_tiles.h"

/* The compiler's support routine also asks whether the operating system saves the 512-bit registers. */
static bool have_ifma(void)
{
#if ARI_HAVE_IFMA
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512ifma");
#else
    return false;
#endif
}

ar_status ari_exact_choose(ari_exact_choice *choice)
{
    const bool ifma = have_ifma();
    *choice = ifma ? ARI_EXACT_IFMA : ARI_EXACT_PORTABLE;
    const char *set = getenv(ARI_EXACT_VARIABLE);
    if (!set || set[0] == '\0')
        return AR_OK;
    const bool wants_ifma = strcmp(set, "ifma") == 0;
    if (!wants_ifma && strcmp(set, "portable") != 0)
        return ar_error_set(AR_ERR_ARG, "cpu device: %s is '%.40s', expected 'portable' or 'ifma'", ARI_EXACT_VARIABLE,
                            set);
    if (wants_ifma && !ifma)
        return ar_error_set(AR_ERR_UNSUPPORTED, "cpu device: %s is 'ifma', and this processor has no AVX-512 IFMA",
                            ARI_EXACT_VARIABLE);
    *choice = wants_ifma ? ARI_EXACT_IFMA : ARI_EXACT_PORTABLE;
    return AR_OK;
}

const char *ari_exact_name(ari_exact_choice choice)
{
    return choice == ARI_EXACT_IFMA ? "ifma" : "portable";
}

void ari_exact_fill(ar_device_ops *ops, ari_exact_choice choice)
{
    ops->gemm_i64 = ari_cpu_gemm_i64;
    ops->gemm_round = ari_cpu_gemm_round;
    ops->gemm_acc = ari_cpu_gemm_acc;
#if ARI_HAVE_IFMA
    if (choice == ARI_EXACT_IFMA) {
        ops->gemm_i64 = ari_cpu_gemm_i64_ifma;
        ops->gemm_round = ari_cpu_gemm_round_ifma;
        ops->gemm_acc = ari_cpu_gemm_acc_ifma;
    }
#else
    (void)choice;
#endif
}
