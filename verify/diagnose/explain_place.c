/* SPDX-License-Identifier: Apache-2.0 */
/* Where the differences are and how much of the reference is in them: what is left to say where no relation holds. */
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/explain_impl.h"
#include "verify/diagnose/order.h"

/* --- a mask ------------------------------------------------------------------------------------------------------- */

ar_status ari_seek_mask(ari_clue *f, const ari_whole *w)
{
    const ari_grid *g = &w->view.grid;
    const ari_tally *t = &w->view.survey.total;
    size_t after = 0;
    if (g->nd < 3 || g->shape[g->nd - 1] != g->shape[g->nd - 2] || t->gained < 4)
        return AR_OK;
    for (size_t i = 0; i < w->count; i++) {
        const size_t key = i % g->cols, query = i / g->cols % g->shape[g->nd - 2];
        if (ari_off(w, i) && w->ref[i] == 0.0f && fabs((double)w->val[i]) > g->d->noise && key > query)
            after++;
    }
    if (after < t->gained)
        return AR_OK;
    ari_text text = ari_find(f, ARI_TRACE + 7);
    ari_say(&text,
            "the causal mask is missing: all %zu elements that are zero in the reference and not here have a key "
            "after the query",
            after);
    return AR_OK;
}

/* --- how much of the reference ------------------------------------------------------------------------------------ */

/* Parts of a sum are not all of one size: a share of 1/n may be one of these. */
static void say_how_many(ari_text *t, const ari_whole *w, double share)
{
    const double low = fmax(2.0, floor(1.0 / (share * 1.4))), high = ceil(1.4 / share);
    const int known[] = {w->known->tp, w->known->dp};
    for (size_t i = 0; i < 2; i++) {
        if (known[i] > 1 && known[i] >= low && known[i] <= high) {
            ari_say(t, "what one of %d ranks contributes", known[i]);
            return;
        }
    }
    ari_say(t, "what one of some %.0f to %.0f ranks, samples or micro-batches contributes", low, high);
}

static void say_part(ari_clue *f, const ari_whole *w, double cosine, double share)
{
    const char pass = w->view.grid.d->pass;
    ari_text t = ari_find(f, ARI_STATISTIC + 7);
    ari_say(&t,
            "a partial sum: cosine with the reference %.2f, its share of it %.3g, and what is missing is orthogonal to "
            "it: ",
            cosine, share);
    say_how_many(&t, w, share);
    if (pass == 'g')
        ari_say(&t,
                "; a gradient of one rank's tokens or heads that was not reduced over tp or dp, or of one sample or "
                "micro-batch alone (leading dimensions not flattened, overwritten in place of added)");
    else
        ari_say(&t,
                pass == 'b'
                    ? "; a missing all-reduce (or reduce-scatter) over tp of a column-parallel layer's input gradient"
                    : "; a missing all-reduce (or reduce-scatter) over tp of a row-parallel layer's output");
}

/* v = r + part: a contribution that counts twice. */
static void say_twice(ari_clue *f, const ari_whole *w, double share)
{
    ari_text t = ari_find(f, ARI_STATISTIC + 6);
    ari_say(&t, "a contribution counted twice: the difference is %.3g of the reference and orthogonal to the rest: ",
            share);
    say_how_many(&t, w, share);
    ari_say(&t, " was added once more");
}

ar_status ari_seek_share(ari_clue *f, const ari_whole *w)
{
    const ari_survey *s = &w->view.survey;
    const ari_tally *t = &s->total;
    const double share = t->vr / t->rr, cosine = ari_cosine(t);
    if (t->different < 64 || t->nan > 0 || t->zero * 4 > t->different || !isfinite(cosine))
        return AR_OK;
    const double apart = (t->rr - 2.0 * t->vr + t->vv) / t->rr, along = (t->vr - t->rr) / t->rr;
    const bool all = t->kept * 20 <= t->held;
    const double within = share <= 0.62 ? 0.3 : 0.1; /* of a sum less a part, more is known */
    if (all && share >= 0.04 && share <= 0.9 && cosine > 0.15 && fabs(t->vv / t->vr - 1.0) <= within)
        say_part(f, w, cosine, share);
    else if (all && along >= 0.04 && along <= 0.62 && fabs(apart / along - 1.0) <= 0.3)
        say_twice(f, w, along);
    return AR_OK;
}

/* --- the place alone ---------------------------------------------------------------------------------------------- */

static void say_inside(ari_text *t, const ari_whole *w)
{
    const ari_tally *all = &w->view.survey.total;
    if (isfinite(ari_cosine(all)))
        ari_say(t, " (there: cosine with the reference %.3f, size %.3g of it)", ari_cosine(all),
                sqrt(all->vv / all->rr));
}

/* Whether [from, to) lies in one of the packed parts. */
static bool is_packed_part(const ari_whole *w, int dim, size_t from, size_t to)
{
    const char *part[3];
    size_t size[3], start = 0;
    const int parts = ari_packed(w, dim, part, size);
    for (int i = 0; i < parts; start += size[i++]) {
        if (from >= start && to <= start + size[i])
            return true;
    }
    return false;
}

ar_status ari_seek_place(ari_clue *f, const ari_whole *w)
{
    const ari_grid *g = &w->view.grid;
    for (int dim = 0; dim < g->nd; dim++) {
        const size_t n = g->shape[dim];
        size_t from, to, which = 0;
        ari_hull(w, dim, &from, &to);
        const size_t blocks = ari_block_of(n, from, to, &which), head = ari_head_size(w, dim);
        const bool heads = head > 0 && from % head == 0 && to % head == 0 && to - from < n;
        if (to - from == n || to - from < 2 || w->view.survey.hit[dim] * 10 <= (to - from) * 9 ||
            (!heads && !is_packed_part(w, dim, from, to) && (blocks == 0 || blocks > 64)) || n < 2)
            continue;
        ari_text t = ari_find(f, ARI_PLACE + 9);
        if (blocks > 1)
            ari_say(&t, "only shard %zu of %zu along dimension %d differs", which, blocks, dim);
        else
            ari_say(&t, "only %s %zu..%zu of %zu differ", ari_axis_name(w, dim, true), from, to - 1, n);
        ari_say_part(&t, w);
        ari_say(&t,
                "; all others are right, so look at what one rank%s had there: its weights, its inputs, or data that "
                "was not there yet",
                heads ? " (or one head)" : "");
        say_inside(&t, w);
        return AR_OK;
    }
    return AR_OK;
}

/* --- the norm of all gradients ------------------------------------------------------------------------------------ */

enum { CHUNK = 4096, MOST_SUMMED = 1 << 26 };

/* The root of the sum of squares of the other dump's gradients of a step, and whether any of them is not the
 * reference's; 0 where the dump has none, or too many to add up here. */
static ar_status norm_of_gradients(double *norm, bool *differ, const ari_whole *w, int step)
{
    float x[CHUNK], y[CHUNK];
    double sum = 0.0;
    size_t elements = 0;
    *norm = 0.0;
    *differ = false;
    for (size_t i = 0; i < ar_dump_count(w->known->other); i++) {
        const ar_dump_tensor *t = ar_dump_at(w->known->other, i), *r = ar_dump_find(w->known->reference, t->name);
        const ari_order_key key = ari_order_of(t->name, w->path);
        if (key.pass != 'g' || key.step != step)
            continue;
        elements += t->count;
        if (!r || r->count != t->count || elements > MOST_SUMMED)
            return AR_OK;
        for (size_t at = 0; at < t->count; at += CHUNK) {
            const size_t n = t->count - at < CHUNK ? t->count - at : CHUNK;
            AR_TRY(ar_dump_read_f32(t, at, n, x));
            AR_TRY(ar_dump_read_f32(r, at, n, y));
            for (size_t k = 0; k < n; k++)
                sum += (double)x[k] * (double)x[k];
            *differ = *differ || memcmp(x, y, n * sizeof *x) != 0;
        }
    }
    *norm = sqrt(sum);
    return AR_OK;
}

ar_status ari_seek_norm(ari_clue *f, const ari_whole *w)
{
    const double v = (double)w->val[0];
    double norm = 0.0;
    bool differ = false;
    if (w->view.grid.d->pass != 'c' || w->count != 1 || !isfinite(v) || !w->known->other || !w->known->reference)
        return AR_OK;
    AR_TRY(norm_of_gradients(&norm, &differ, w, w->view.grid.d->step));
    if (!differ || !(fabs(norm - v) <= 1e-4 * v))
        return AR_OK;
    ari_text t = ari_find(f, ARI_IDENTITY + 5);
    ari_say(&t,
            "this is the norm of the gradients of its own dump, %.6g, which differ from the reference's already: the "
            "norm itself is computed right",
            norm);
    return AR_OK;
}

/* --- nothing but noise -------------------------------------------------------------------------------------------- */

/* The largest root mean square of the differences over any slice of any dimension, against that of all. */
static ar_status concentration(double *out, const ari_whole *w)
{
    const ari_grid *g = &w->view.grid;
    const double all = w->view.survey.total.dd / (double)w->count;
    *out = 0.0;
    for (int dim = 0; dim < g->nd; dim++) {
        size_t inner = 1;
        double *sum = NULL;
        for (int i = dim + 1; i < g->nd; i++)
            inner *= g->shape[i];
        const size_t n = g->shape[dim], size = w->count / n;
        if (n < 2 || size < 16)
            continue;
        AR_TRY(ari_alloc_zero((void **)&sum, n, sizeof *sum, g->d->name));
        for (size_t i = 0; i < w->count; i++) {
            const double apart = (double)w->val[i] - (double)w->ref[i];
            sum[i / inner % n] += apart * apart / (double)size;
        }
        for (size_t k = 0; k < n; k++)
            *out = fmax(*out, sum[k] / all);
        free(sum);
    }
    return AR_OK;
}

/* Whether the differences are large beside the update, of which weights are but a small part. */
static bool is_of_update(const ari_whole *w)
{
    const float *before = w->view.grid.d->before;
    double moved = 0.0;
    if (w->view.grid.d->pass != 'n' || !before)
        return w->view.grid.d->pass == 'n';
    for (size_t i = 0; i < w->count; i++) {
        const double by = (double)w->ref[i] - (double)before[i];
        moved += by * by;
    }
    return w->view.survey.total.dd > 1e-3 * moved;
}

ar_status ari_seek_noise(ari_clue *f, const ari_whole *w)
{
    const ari_tally *t = &w->view.survey.total;
    const double size = sqrt(t->dd / t->rr), along = t->vr / t->rr - 1.0;
    double peak = 0.0;
    if (t->nan > 0 || t->different < 64 || (t->different * 2 < w->count && !w->noisy) || !(size < 0.03) ||
        !(fabs(along) * sqrt((double)t->different) < 8.0 * size))
        return AR_OK;
    if (is_of_update(w))
        return AR_OK;
    AR_TRY(concentration(&peak, w));
    if (!(peak < 12.0))
        return AR_OK;
    ari_text t2 = ari_find(f, ARI_STATISTIC - 4);
    ari_say(&t2,
            "rounding of low precision, perhaps: the difference is %.1e of the values, spread evenly and unrelated to "
            "them, the size that %s arithmetic leaves; a sensitivity file says what is honest",
            size,
            size < 3e-5     ? "long sums of fp32"
            : size < 1.5e-3 ? "tf32 or fp16"
                            : "bf16");
    return AR_OK;
}
