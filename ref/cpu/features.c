/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "ref/core/os/threads.h"
#include "ref/core/text.h"
#include "ref/cpu/blas/blas.h"
#include "ref/cpu/device.h"
#include "ref/cpu/device_private.h"

/* --- what it can do ----------------------------------------------------------------------------------------------- */

typedef struct feature {
    const char *name;
    bool is_present;
} feature;

enum { FEATURES = 12 };

#if defined(__x86_64__)
/* Returns bit `bit` of a word (0: EAX .. 3: EDX) of cpuid leaf 7, for features that __builtin_cpu_supports of gcc 12
 * and clang 14 does not know. */
static bool leaf7(unsigned int subleaf, int word, int bit)
{
    unsigned int words[4] = {0};
    return __get_cpuid_count(7, subleaf, &words[0], &words[1], &words[2], &words[3]) && (words[word] >> bit & 1);
}

static size_t list_features(feature out[FEATURES])
{
    __builtin_cpu_init();
    const feature table[] = {
        {"avx2", __builtin_cpu_supports("avx2")},
        {"fma", __builtin_cpu_supports("fma")},
        {"avx_vnni", __builtin_cpu_supports("avx2") && leaf7(1, 0, 4)},
        {"avx512f", __builtin_cpu_supports("avx512f")},
        {"avx512dq", __builtin_cpu_supports("avx512dq")},
        {"avx512bw", __builtin_cpu_supports("avx512bw")},
        {"avx512vl", __builtin_cpu_supports("avx512vl")},
        {"avx512_vnni", __builtin_cpu_supports("avx512vnni")},
        {"avx512vbmi", __builtin_cpu_supports("avx512vbmi")},
        {"amx_int8", leaf7(0, 3, 25)},
    };
    _Static_assert(sizeof table <= sizeof(feature[FEATURES]), "FEATURES is too small");
    memcpy(out, table, sizeof table);
    return sizeof table / sizeof table[0];
}
#elif defined(__aarch64__)
#if defined(__linux__)
/* Returns bit `bit` of the first or second word in which the kernel reports features for programs. */
static bool granted(int word, int bit)
{
    return getauxval(word == 1 ? AT_HWCAP : AT_HWCAP2) >> bit & 1;
}
#define GRANTED(word, bit, apple) granted(word, bit)
#elif defined(__APPLE__)
static bool granted(const char *name)
{
    int yes = 0;
    size_t bytes = sizeof yes;
    return sysctlbyname(name, &yes, &bytes, NULL, 0) == 0 && yes == 1;
}
#define GRANTED(word, bit, apple) granted("hw.optional." apple)
#endif

static size_t list_features(feature out[FEATURES])
{
    const feature table[] = {
        {"asimd", true}, /* every 64-bit ARM processor has this */
        {"asimddp", GRANTED(1, 20, "arm.FEAT_DotProd")},
        {"i8mm", GRANTED(2, 13, "arm.FEAT_I8MM")},
        {"bf16", GRANTED(2, 14, "arm.FEAT_BF16")},
        {"sve", GRANTED(1, 22, "arm.FEAT_SVE")},
        {"sve2", GRANTED(2, 1, "arm.FEAT_SVE2")},
    };
    memcpy(out, table, sizeof table);
    return sizeof table / sizeof table[0];
}
#else
static size_t list_features(feature out[FEATURES])
{
    (void)out;
    return 0;
}
#endif

bool ari_cpu_has(const char *names)
{
    feature table[FEATURES];
    const size_t n = list_features(table);
    while (*names != '\0') {
        const size_t length = strcspn(names, " ");
        size_t i = 0;
        while (i < n && !(strlen(table[i].name) == length && memcmp(table[i].name, names, length) == 0))
            i++;
        if (i == n || !table[i].is_present)
            return false;
        names += length + strspn(names + length, " ");
    }
    return true;
}

/* Writes the features that the processor has, separated by spaces. */
static void tell_features(char *out, size_t cap)
{
    feature table[FEATURES];
    const size_t n = list_features(table);
    ari_text t = ari_plain_text_in(out, cap);
    for (size_t i = 0; i < n; i++) {
        if (table[i].is_present)
            ari_say(&t, "%s%s", t.used > 0 ? " " : "", table[i].name);
    }
}

/* --- what it is called -------------------------------------------------------------------------------------------- */

#if defined(__x86_64__)
/* Writes the processor's name: the brand on x86, the core on ARM, "unknown" elsewhere. */
static void tell_name(char *out, size_t cap)
{
    (void)snprintf(out, cap, "unknown");
    unsigned int words[12];
    if (__get_cpuid_max(0x80000000u, NULL) < 0x80000004u)
        return;
    for (unsigned int i = 0; i < 3; i++)
        (void)__get_cpuid(0x80000002u + i, &words[4 * i], &words[4 * i + 1], &words[4 * i + 2], &words[4 * i + 3]);
    char brand[sizeof words + 1] = {0};
    memcpy(brand, words, sizeof words);
    const char *start = brand + strspn(brand, " ");
    size_t length = strlen(start);
    while (length > 0 && start[length - 1] == ' ')
        length--;
    (void)snprintf(out, cap, "%.*s", (int)length, start);
}
#elif defined(__APPLE__)
static void tell_name(char *out, size_t cap)
{
    size_t bytes = cap;
    if (sysctlbyname("machdep.cpu.brand_string", out, &bytes, NULL, 0) != 0)
        (void)snprintf(out, cap, "unknown");
}
#elif defined(__aarch64__) && defined(__linux__)
/* Implementer and part of MIDR_EL1, with names from util-linux's lscpu (sys-utils/lscpu-arm.c). */
typedef struct core {
    unsigned int implementer, part;
    const char *name;
} core;

static const core cores[] = {
    {0x41, 0xd03, "Arm Cortex-A53"},
    {0x41, 0xd04, "Arm Cortex-A35"},
    {0x41, 0xd05, "Arm Cortex-A55"},
    {0x41, 0xd07, "Arm Cortex-A57"},
    {0x41, 0xd08, "Arm Cortex-A72"},
    {0x41, 0xd09, "Arm Cortex-A73"},
    {0x41, 0xd0a, "Arm Cortex-A75"},
    {0x41, 0xd0b, "Arm Cortex-A76"},
    {0x41, 0xd0c, "Arm Neoverse N1"},
    {0x41, 0xd0d, "Arm Cortex-A77"},
    {0x41, 0xd40, "Arm Neoverse V1"},
    {0x41, 0xd41, "Arm Cortex-A78"},
    {0x41, 0xd44, "Arm Cortex-X1"},
    {0x41, 0xd46, "Arm Cortex-A510"},
    {0x41, 0xd47, "Arm Cortex-A710"},
    {0x41, 0xd48, "Arm Cortex-X2"},
    {0x41, 0xd49, "Arm Neoverse N2"},
    {0x41, 0xd4d, "Arm Cortex-A715"},
    {0x41, 0xd4e, "Arm Cortex-X3"},
    {0x41, 0xd4f, "Arm Neoverse V2"},
    {0x41, 0xd80, "Arm Cortex-A520"},
    {0x41, 0xd81, "Arm Cortex-A720"},
    {0x41, 0xd82, "Arm Cortex-X4"},
    {0x41, 0xd84, "Arm Neoverse V3"},
    {0x41, 0xd8e, "Arm Neoverse N3"},
    {0x43, 0x0af, "Cavium ThunderX2"},
    {0x46, 0x001, "Fujitsu A64FX"},
    {0x48, 0xd01, "HiSilicon TSV110"},
    {0x51, 0x001, "Qualcomm Oryon"},
    {0x61, 0x022, "Apple M1 (Icestorm)"},
    {0x61, 0x023, "Apple M1 (Firestorm)"},
    {0x61, 0x032, "Apple M2 (Blizzard)"},
    {0x61, 0x033, "Apple M2 (Avalanche)"},
    {0xc0, 0xac3, "Ampere-1"},
    {0xc0, 0xac4, "Ampere-1a"},
    {0x00, 0x051, "a virtual one of qemu"},
};

/* Writes the name of the calling core; a machine may have several kinds. Programs may read the register if bit 11 of
 * the kernel's first word is set. */
static void tell_name(char *out, size_t cap)
{
    uint64_t midr = 0;
    (void)snprintf(out, cap, "unknown");
    if (!granted(1, 11))
        return;
    __asm__("mrs %0, MIDR_EL1" : "=r"(midr));
    const unsigned int implementer = midr >> 24 & 0xff, part = midr >> 4 & 0xfff;
    (void)snprintf(out, cap, "ARM implementer %#x, part %#x", implementer, part);
    for (size_t i = 0; i < sizeof cores / sizeof cores[0]; i++)
        if (cores[i].implementer == implementer && cores[i].part == part)
            (void)snprintf(out, cap, "%s", cores[i].name);
}
#else
static void tell_name(char *out, size_t cap)
{
    (void)snprintf(out, cap, "unknown");
}
#endif

/* --- for `anyrank info` ------------------------------------------------------------------------------------------- */

void ari_cpu_select_kernels(void)
{
    ari_blas_start();
}

void ari_cpu_info_get(ar_cpu_info *out)
{
    memset(out, 0, sizeof *out);
    tell_name(out->cpu, sizeof out->cpu);
    tell_features(out->features, sizeof out->features);
    ari_blas_describe(out);
    ari_exact_choice exact;
    const bool refused = ari_exact_choose(&exact) != AR_OK;
    (void)snprintf(out->exact_path, sizeof out->exact_path, "%s", refused ? "refused" : exact.path->name);
    (void)snprintf(out->exact_reason, sizeof out->exact_reason, "%s", refused ? ar_error_message() : exact.why);
    ari_utf8_clean(out->blas_reason); /* these quote environment variables, and may be truncated */
    ari_utf8_clean(out->exact_reason);
    out->cores = ari_cores();
}
