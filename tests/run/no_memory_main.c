/* SPDX-License-Identifier: Apache-2.0 */
/* Allocations that fail, one at a time and all from one on: what the library was asked for then succeeds in spite of it
 * or ends with AR_ERR_MEMORY and a message. Allocations of libraries that cannot bear it (jansson aborts, libgomp exits)
 * never fail. */
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>

#include "anyrank/grads.h"
#include "tests/support/temporary.h"
#include "verify/compare/report.h"
#include "verify/read/dump_private.h"

#if !defined __GLIBC__ || defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
int main(void)
{
    return puts("allocations cannot be made to fail here"), 77;
}
#else
extern void *__libc_malloc(size_t bytes), *__libc_calloc(size_t n, size_t size),
    *__libc_realloc(void *old, size_t bytes);

static atomic_long number, first, last; /* of allocations so far, and of those that fail; last 0: none */

static bool fails(void *caller)
{
    static const char *const others[] = {"jansson", "gomp", "blas", "blis"};
    const long at = last == 0 ? 0 : atomic_fetch_add(&number, 1) + 1;
    Dl_info from = {.dli_fname = NULL};
    if (at < first || at > last || at == 0)
        return false;
    for (size_t i = 0; dladdr(caller, &from) != 0 && i < sizeof others / sizeof *others; i++) {
        if (strstr(from.dli_fname, others[i]))
            return false;
    }
    errno = ENOMEM;
    return true;
}
#define FAILS fails(__builtin_return_address(0))

void *malloc(size_t bytes)
{
    return FAILS ? NULL : __libc_malloc(bytes);
}
void *calloc(size_t n, size_t size)
{
    return FAILS ? NULL : __libc_calloc(n, size);
}
void *realloc(void *old, size_t bytes)
{
    return FAILS ? NULL : __libc_realloc(old, bytes);
}

#define MODEL TEST_GOLDEN_DIR "/llama-gqa-tiny"
static char out[300]; /* in the folder of this run */

static ar_status open_dump(void)
{
    OWNED(ar_dump_close) ar_dump *d = NULL;
    double value = 0.0;
    AR_TRY(ar_dump_open(&d, MODEL, NULL));
    return ari_dump_read_f64(ar_dump_at(d, 0), 0, 1, &value);
}

static ar_status compare(void)
{
    OWNED(ar_verify_report_destroy) ar_verify_report *r = NULL;
    const ar_verify_options o = {.reference = MODEL, .other = MODEL "/train_final.safetensors", .threads = 1};
    AR_TRY(ar_verify(&r, &o));
    json_t *report = ari_verify_report_json(r), *rows = ari_verify_rows_json(r);
    const bool made = report && rows;
    json_decref(rows);
    json_decref(report);
    return made ? AR_OK : ar_error_set(AR_ERR_MEMORY, "no memory for a report");
}

static ar_status compute(void)
{
    ar_grads_result r;
    ar_grads_options o = {.input = MODEL "/batch.safetensors", .out = out, .per_rank = true};
    o.run = (ar_run){.model = MODEL, .parallel = {.tp = 2, .sp = true}, .threads = 1};
    return ar_grads(&r, &o);
}

static const struct {
    const char *name;
    ar_status (*ask)(void);
    long every; /* of its allocations one fails */
} all[] = {{"open_dump", open_dump, 1}, {"compare", compare, 37}, {"compute", compute, 211}};

/* Runs it with allocations [from, to] failing; to 0: none. Returns how many there were. */
static long run(size_t i, long from, long to, int *wrong)
{
    (void)remove_all(out);
    ar_error_clear();
    number = 0;
    first = from;
    last = to;
    const ar_status st = all[i].ask();
    last = 0;
    if (st == AR_OK || (st == AR_ERR_MEMORY && ar_error_message()[0] != '\0'))
        return number;
    (*wrong)++;
    fprintf(stderr, "%s, allocations %ld to %ld: %s: %s\n", all[i].name, from, to, ar_status_name(st),
            ar_error_message());
    return number;
}

int main(void)
{
    const long endless = 1L << 40;
    int wrong = 0;
    SCOPED(temp_end) const temp_path folder = temp_folder();
    snprintf(out, sizeof out, "%s/out", folder.path);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        (void)run(i, 0, 0, &wrong); /* what is made once */
        const long n = run(i, endless, endless, &wrong);
        for (long at = 1; at <= n; at += all[i].every) {
            (void)run(i, at, at, &wrong);
            (void)run(i, at, endless, &wrong);
        }
        printf("%s: %ld allocations\n", all[i].name, n);
    }
    return wrong == 0 ? 0 : 1;
}
#endif
