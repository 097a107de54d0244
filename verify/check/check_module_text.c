/* SPDX-License-Identifier: Apache-2.0 */
/* The reports of a module's checks in words. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "anyrank/check_module.h"

typedef struct words {
    char *text;
    size_t cap, used;
} words;

AR_PRINTF(2, 3) static void say(words *w, const char *format, ...)
{
    va_list args;
    if (w->used >= w->cap)
        return;
    va_start(args, format);
    const int n = vsnprintf(w->text + w->used, w->cap - w->used, format, args);
    va_end(args);
    w->used += n > 0 ? (size_t)n : 0;
}

static void say_index(words *w, int ndim, const size_t *index)
{
    say(w, "[");
    for (int d = 0; d < ndim; d++)
        say(w, d > 0 ? ", %zu" : "%zu", index[d]);
    say(w, "]");
}

static void say_difference(words *w, const ar_first_difference *f)
{
    say(w, "    first in step %d, %s: %s", f->step, f->pass, f->tensor);
    if (f->rank >= 0) {
        say_index(w, f->ndim, f->index);
        say(w, ", on rank %d ", f->rank);
        say_index(w, f->local_ndim, f->local_index);
        say(w, ": %.9g, on one rank %.9g; %zu of %zu elements differ", (double)f->actual, (double)f->reference,
            f->elements_different, f->elements);
    }
    say(w, "\n");
    if (f->pattern[0])
        say(w, "    where: %s\n", f->pattern);
    if (f->hint[0])
        say(w, "    looks like: %s\n", f->hint);
}

static void say_run(words *w, const ar_check_run *run)
{
    char layout[96];
    ar_parallel_text(layout, sizeof layout, &run->parallel);
    if (run->result == AR_CHECK_SAME)
        say(w, "  %-28s the same bits in all %zu tensors\n", layout, run->tensors);
    else if (run->result == AR_CHECK_VACUOUS)
        say(w, "  %-28s VACUOUS: the same bits, and they say nothing\n", layout);
    else if (run->result == AR_CHECK_DIFFERENT)
        say(w, "  %-28s DIFFERENT: %zu of %zu tensors\n", layout, run->tensors_different, run->tensors);
    else
        say(w, "  %-28s ERROR: %.*s\n", layout, (int)strcspn(run->error, "\n"), run->error);
    if (run->has_difference)
        say_difference(w, &run->first);
}

void ar_check_module_text(const ar_check_module_report *r, char *text, size_t cap)
{
    words w = {text, cap, 0};
    if (cap > 0)
        text[0] = '\0';
    say(&w, "%s: %zu parameters, %zu samples, ", r->name, r->parameters, r->batch);
    if (r->steps > 0)
        say(&w, "%d training step%s", r->steps, r->steps == 1 ? "" : "s");
    else
        say(&w, "one forward and backward pass");
    say(&w, "; compared bit for bit with one rank:\n");
    for (size_t i = 0; i < r->runs; i++)
        say_run(&w, &r->run[i]);
    if (r->vacuous.tensor[0])
        say(&w, "  on one rank already, %s of step %d is %g in %zu of %zu elements: nothing after it says anything\n",
            r->vacuous.tensor, r->vacuous.step, (double)r->vacuous.value, r->vacuous.elements_empty,
            r->vacuous.elements);
    say(&w, "  (One rank is this same code: whether its mathematics is right, a gradcheck tells.)\n");
}

void ar_gradcheck_module_text(const ar_gradcheck_module_report *r, char *text, size_t cap)
{
    words w = {text, cap, 0};
    if (cap > 0)
        text[0] = '\0';
    say(&w, "%s: gradients against differences of the loss (%.6g), %zu samples, %zu directions: %s\n", r->name,
        (double)r->loss, r->batch, r->probes,
        r->ok          ? "they agree"
        : r->wrong > 0 ? "THEY DISAGREE"
                       : "TOO FEW COULD BE RESOLVED");
    for (size_t i = 0; i < r->tensors; i++) {
        const ar_gradcheck_tensor *t = &r->tensor[i];
        say(&w, "  %-28s |g| up to %-9.3g error %.1e of it, %.1e allowed%s", t->name, t->largest, t->error, t->allowed,
            t->wrong > 0 ? "  WRONG" : "");
        if (t->unresolved > 0)
            say(&w, "  (%zu of %zu unresolved)", t->unresolved, t->probes);
        say(&w, "\n");
    }
    say(&w, "  (Allowed is 4 times the error that the differences show to have by themselves, and fp32's rounding.)\n");
}
