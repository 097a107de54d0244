/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "ref/cpu/device.h"

typedef struct feature {
    const char *name;
    bool here;
} feature;

enum { FEATURES = 12 };

#if defined(__x86_64__)
/* Bit `bit` of a word (0: EAX .. 3: EDX) of leaf 7: what __builtin_cpu_supports of gcc 12 and clang 14 cannot name. */
static bool leaf7(unsigned int subleaf, int word, int bit)
{
    unsigned int words[4] = {0};
    return __get_cpuid_count(7, subleaf, &words[0], &words[1], &words[2], &words[3]) && (words[word] >> bit & 1);
}

static size_t look(feature out[FEATURES])
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
        {"avx512ifma", __builtin_cpu_supports("avx512ifma")},
        {"avx512_vnni", __builtin_cpu_supports("avx512vnni")},
        {"amx_int8", leaf7(0, 3, 25)},
    };
    _Static_assert(sizeof table <= sizeof(feature[FEATURES]), "FEATURES is too small");
    memcpy(out, table, sizeof table);
    return sizeof table / sizeof table[0];
}
#else
static size_t look(feature out[FEATURES])
{
    (void)out;
    return 0;
}
#endif

bool ari_cpu_has(const char *names)
{
    feature table[FEATURES];
    const size_t n = look(table);
    while (*names != '\0') {
        const size_t length = strcspn(names, " ");
        size_t i = 0;
        while (i < n && !(strlen(table[i].name) == length && memcmp(table[i].name, names, length) == 0))
            i++;
        if (i == n || !table[i].here)
            return false;
        names += length + strspn(names + length, " ");
    }
    return true;
}

void ari_cpu_features(char *out, size_t cap)
{
    feature table[FEATURES];
    const size_t n = look(table);
    out[0] = '\0';
    for (size_t i = 0; i < n; i++) {
        const size_t used = strlen(out);
        if (table[i].here)
            (void)snprintf(out + used, cap - used, "%s%s", used > 0 ? " " : "", table[i].name);
    }
}
