/* SPDX-License-Identifier: Apache-2.0 */
/* Output of the benchmarks while they run and at their end. */
#include <stdarg.h>
#include <stdio.h>

#include "bench/bench.h"
#include "ref/io/json.h"

void ari_bench_progress(ari_bench_session *s, size_t done, size_t all)
{
    char what[32];
    snprintf(what, sizeof what, "bench %s", s->v->what);
    ari_progress_update(&s->progress, (double)done / (double)all, what);
}

ar_status ari_bench_end(ari_bench_session *s, const ari_rows *r, int threads, const char *words, ...)
{
    const ari_bench_options *v = s->v;
    ar_cpu_info cpu;
    ar_cpu_info_get(&cpu);
    ari_progress_end(&s->progress);
    if (ari_wants_text(&v->common)) {
        va_list args;
        AR_TRY(ari_rows_print(r, stdout, 0));
        va_start(args, words);
        vprintf(words, args);
        va_end(args);
        if (s->more)
            AR_TRY(ari_rows_print(s->more, stdout, 0));
        printf("\n%s: %s\n%s %s, kernels %s: %s\n", cpu.cpu, cpu.features, cpu.blas, cpu.blas_version, cpu.blas_kernels,
               cpu.blas_reason);
    }
    json_t *o = ari_json_begin("bench");
    json_object_set_new(o, "what", json_string(v->what));
    ari_device_json(o, &s->device);
    json_object_set_new(o, "machine",
                        json_pack("{s:s, s:s, s:s, s:s, s:s}", "cpu", cpu.cpu, "features", cpu.features, "blas",
                                  cpu.blas, "kernels", cpu.blas_kernels, "reason", cpu.blas_reason));
    if (threads > 0)
        json_object_set_new(o, "threads", json_integer(threads));
    if (s->more)
        json_object_set_new(o, s->more_key, ari_rows_json(s->more));
    return ari_json_end(ari_json_whole(o, json_pack("{s:o}", "rows", ari_rows_json(r))), &v->common);
}
