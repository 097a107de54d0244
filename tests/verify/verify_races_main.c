/* SPDX-License-Identifier: Apache-2.0 */
/* Comparing with several threads, for ThreadSanitizer: a large tensor of several blocks and many small ones, some of
 * them different. Exit status 0 if four threads report what one does. */
#include "anyrank/verify.h"
#include "verify/verify_support.h"

enum { SMALL = 40, LARGE = 1 << 20, NAME = 32 };

typedef struct tensors {
    char name[SMALL + 1][NAME];
    ar_st_tensor entry[SMALL + 1];
    float *data;
} tensors;

static void fill(tensors *t, size_t large, bool changed)
{
    t->data = calloc(large + SMALL, sizeof *t->data);
    if (!t->data)
        abort();
    for (size_t i = 0; i < large + SMALL; i++)
        t->data[i] = (float)(i % 1000) * 0.5f;
    for (size_t i = 0; changed && i < large; i += 100003)
        t->data[i] += 1.0f;
    for (size_t i = 0; changed && i < SMALL; i += 7)
        t->data[large + i] = NAN;
    for (size_t i = 0; i <= SMALL; i++) {
        snprintf(t->name[i], NAME, "t.%zu", i);
        t->entry[i] = vector_of(t->name[i], AR_F32, i < SMALL ? 1 : large, t->data + (i < SMALL ? large + i : 0));
    }
}

static ar_verify_report *verify(const two_files *f, int threads)
{
    ar_verify_report *r = NULL;
    const ar_verify_options o = {.reference = f->reference, .other = f->other, .threads = threads};
    if (ar_verify(&r, &o) != AR_OK)
        fprintf(stderr, "%s\n", ar_error_message());
    return r;
}

static bool agree(const ar_verify_report *a, const ar_verify_report *b)
{
    if (a->rows != b->rows || a->different != b->different || a->elements_different != b->elements_different)
        return false;
    for (size_t i = 0; i < a->rows; i++) {
        const ar_verify_row *x = &a->row[i], *y = &b->row[i];
        if (x->state != y->state || x->first.index != y->first.index || x->worst.index != y->worst.index ||
            x->rms != y->rms || x->scale != y->scale || x->nan[1] != y->nan[1])
            return false;
    }
    return true;
}

int main(void)
{
    const size_t large = LARGE + 1000; /* two blocks */
    SCOPED(two_files_end) const two_files f = two_files_make();
    tensors a, b;
    fill(&a, large, false);
    fill(&b, large, true);
    write_tensors(f.reference, a.entry, SMALL + 1);
    write_tensors(f.other, b.entry, SMALL + 1);
    OWNED(ar_verify_report_destroy) ar_verify_report *one = verify(&f, 1), *four = verify(&f, 4);
    const bool ok = one && four && agree(one, four) && one->different == 7;
    if (!ok)
        fprintf(stderr, "four threads do not report what one does\n");
    free(a.data);
    free(b.data);
    return ok ? 0 : 1;
}
