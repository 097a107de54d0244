/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/diagnose/replay/loss.h"

#include <stdio.h>

#include "verify/diagnose/hypothesis.h"

enum { MOST_LOGITS = 1 << 24, MOST_PRODUCTS = 1 << 28, MOST_SCALED = 1 << 18 };

/* Finds a tensor outside the layers by its role, or the model's output, if it has a value per token. */
const ar_dump_tensor *ari_loss_tensor(const ari_case *c, const ar_dump *dump, char pass)
{
    static const ari_role roles[] = {ARI_LOGITS, ARI_NO_ROLE, ARI_HEAD_LOGITS, ARI_HEAD, ARI_FINAL_NORM};
    const ar_dump_tensor *t = NULL, *head = ari_replay_value(c, dump, ARI_HEAD, pass);
    for (size_t i = 0; i < (pass == 'f' ? 4 : 5) && !t; i++) {
        if (roles[i] != ARI_NO_ROLE) {
            t = ari_replay_value(c, dump, roles[i], pass);
            continue;
        }
        t = ari_tensor_of_step(dump, "output", strlen("output"), pass == 'f' ? "fwd" : "bwd", c->own.step);
        t = t && head && pass == 'f' && !ari_same_shape(t, head) ? NULL : t;
    }
    return t && t->ndim == 3 ? t : NULL;
}

/* A token that is no target leaves no gradient where the loss's gradient arrives first; further on attention gives it
 * one, so that of tensors that are not known by name the one with fewest is taken. */
static ar_status read_counts(ari_loss_side *s, const ari_losses *l, const ar_dump *dump)
{
    const ar_dump_tensor *named = ari_loss_tensor(l->c, dump, 'b');
    bool *own = NULL;
    AR_TRY(ARI_TAKE(&s->counts, l->c->arena, l->tokens, "targets"));
    AR_TRY(ARI_TAKE(&own, l->c->arena, l->tokens, "targets"));
    s->targets = l->samples * (l->seq - 1);
    for (size_t i = 0; i < l->tokens; i++)
        s->counts[i] = i % l->seq + 1 < l->seq;
    for (ari_walk w = ari_walk_of(dump, NULL, "b", l->c->own.step); ari_walk_next(&w);) {
        const ar_dump_tensor *t = w.t;
        size_t n = 0;
        if ((named && t != named) || t->ndim != 3 || t->shape[0] != l->samples || t->shape[1] != l->seq ||
            t->shape[2] == 0)
            continue;
        for (size_t k = 0; k < l->tokens; k++) {
            ari_fit f = {0};
            AR_TRY(ari_fit_read(&f, t, t, k * t->shape[2], t->shape[2]));
            own[k] = f.yy != 0.0;
            n += own[k];
        }
        if (n == 0 || (s->of_dump && n >= s->targets))
            continue;
        memcpy(s->counts, own, l->tokens * sizeof *own);
        s->gradient = t;
        s->of_dump = true;
        s->targets = n;
    }
    return AR_OK;
}

static void fill_lse(ari_loss_side *s, const ari_losses *l)
{
    for (size_t i = 0; i < l->tokens; i++) {
        const float *row = s->logits + i * l->vocabulary;
        /* In float: gcc 12 for aarch64 fails internally at a largest double of widened floats. */
        float top = -HUGE_VALF;
        double sum = 0.0;
        for (size_t k = 0; k < l->vocabulary; k++)
            top = fmaxf(top, row[k]);
        for (size_t k = 0; k < l->vocabulary; k++)
            sum += exp((double)row[k] - (double)top);
        s->lse[i] = (double)top + log(sum);
    }
}

static ar_status read_side(ari_loss_side *s, bool *held, ari_losses *l, const ar_dump *dump)
{
    const ar_dump_tensor *t = ari_loss_tensor(l->c, dump, 'f');
    *held = t && t->count > 0 && t->count <= MOST_LOGITS && t->shape[1] > 1 &&
            (l->tokens == 0 || (t->shape[0] == l->samples && t->shape[1] == l->seq && t->shape[2] == l->vocabulary));
    if (!*held)
        return AR_OK;
    l->samples = t->shape[0], l->seq = t->shape[1], l->vocabulary = t->shape[2];
    l->tokens = l->samples * l->seq;
    AR_TRY(ari_read_values(&s->logits, t, l->c->arena));
    AR_TRY(ARI_TAKE(&s->lse, l->c->arena, l->tokens, t->name));
    fill_lse(s, l);
    return read_counts(s, l, dump);
}

/* --- labels from each token's gradient ---------------------------------------------------------------------------- */

/* The gradient of the head's input is s (p - 1_y) W; finds the row y that fits best and returns the share of its
 * squares that is left. g = p W, of each shard of the vocabulary. */
static double best_row(size_t *y, const ari_losses *l, const ari_loss_side *s, const float *w, const float *d,
                       const double *g, size_t width)
{
    const size_t shards = s->shards > 0 ? s->shards : 1;
    double least = 1.0, times;
    for (size_t k = 0; k < l->vocabulary; k++) {
        const double *own = g + k * shards / l->vocabulary * width;
        ari_fit f = {0};
        for (size_t i = 0; i < width; i++)
            ari_fit_add(&f, (double)d[i], own[i] - (double)w[k * width + i], 0.0);
        const double left = ari_fit_one(&times, &f);
        *y = times > 0.0 && left < least ? k : *y;
        least = times > 0.0 ? fmin(left, least) : least;
    }
    return least;
}

/* Finds the label of each token that counts; *held: all fit their gradients. */
static ar_status find_labels(size_t *label, bool *held, const ari_losses *l, ari_loss_side *s, const float *w,
                             const ar_dump_tensor *t)
{
    const size_t width = t->shape[2], shards = s->shards > 0 ? s->shards : 1;
    float *d = NULL;
    double *g = NULL;
    AR_TRY(ARI_TAKE(&d, l->c->arena, width, t->name));
    AR_TRY(ARI_TAKE(&g, l->c->arena, shards * width, t->name));
    for (size_t token = 0; token < l->tokens && *held; token++) {
        if (!s->counts[token])
            continue;
        AR_TRY(ar_dump_read_f32(t, token * width, width, d));
        for (size_t i = 0; i < shards * width; i++)
            g[i] = 0.0;
        for (size_t k = 0; k < l->vocabulary; k++) {
            const double p = exp((double)s->logits[token * l->vocabulary + k] - s->lse[token]);
            double *own = g + k * shards / l->vocabulary * width;
            for (size_t i = 0; i < width; i++)
                own[i] += p * (double)w[k * width + i];
        }
        s->left = fmax(s->left, best_row(&label[token], l, s, w, d, g, width));
        *held = s->left <= ARI_REPLAY_MISTAKE;
    }
    return AR_OK;
}

static ar_status read_labels(ari_loss_side *s, const ari_losses *l, const ar_dump *dump)
{
    const ar_dump_tensor *t = ari_replay_value(l->c, dump, ARI_HEAD, 'b'),
                         *w = ari_replay_parameter(l->c, ARI_HEAD, ".weight");
    float *data = NULL;
    bool held = true;
    w = w ? w : ari_replay_parameter(l->c, ARI_TOKENS, ".weight"); /* tied */
    if (!s->of_dump || !t || !w || t->ndim != 3 || w->ndim != 2 || w->shape[0] != l->vocabulary ||
        w->shape[1] != t->shape[2] || t->count != l->tokens * t->shape[2] ||
        l->tokens > MOST_PRODUCTS / l->vocabulary / (t->shape[2] + 1))
        return AR_OK;
    AR_TRY(ARI_TAKE(&s->label, l->c->arena, l->tokens, w->name));
    ARI_ARENA_SCOPE(l->c->arena);
    AR_TRY(ari_read_values(&data, w, l->c->arena));
    AR_TRY(find_labels(s->label, &held, l, s, data, t));
    s->label = held ? s->label : NULL;
    return AR_OK;
}

/* --- labels by other gradients ------------------------------------------------------------------------------------ */

/* Reads the other's labels; *same: they are the reference's. */
static ar_status read_labels_again(bool *same, ari_losses *l)
{
    const ari_loss_side *ref = &l->of[0];
    ari_loss_side *other = &l->of[1];
    other->label = NULL;
    other->left = 0.0;
    AR_TRY(read_labels(other, l, l->c->known->other));
    *same = other->label != NULL;
    for (size_t i = 0; *same && i < l->tokens; i++)
        *same = ref->counts[i] == other->counts[i] && (!ref->counts[i] || ref->label[i] == other->label[i]);
    return AR_OK;
}

ar_status ari_loss_shards_find(ari_losses *l)
{
    const size_t tp = (size_t)ari_ranks_along(&l->c->known->mesh, ARI_CUTS_FEATURES);
    bool same = false;
    if (!l->of[0].label || l->of[1].label || tp < 2 || l->vocabulary % tp != 0)
        return AR_OK;
    l->of[1].shards = tp;
    AR_TRY(read_labels_again(&same, l));
    l->of[1].shards = same ? tp : 0;
    return AR_OK;
}

/* The loss of the reference's labels with its logits times x. */
static double scaled_loss(const ari_losses *l, double x)
{
    const ari_loss_side *s = &l->of[0];
    double loss = 0.0;
    for (size_t i = 0; i < l->tokens; i++) {
        const float *row = s->logits + i * l->vocabulary;
        double sum = 0.0;
        for (size_t k = 0; s->counts[i] && k < l->vocabulary; k++)
            sum += exp(x * ((double)row[k] - (double)row[s->label[i]]));
        loss += s->counts[i] ? log(sum) / (double)s->targets : 0.0;
    }
    return loss;
}

/* The loss is convex in the scale, so that two scales may have one value: gradients choose, of which the right one
 * leaves far less than no scale. */
ar_status ari_loss_scale_find(double *times, ari_losses *l)
{
    static const double least = 0.05, most = 20.0, step = 1.1;
    static const double far_less = 1.0 / 7.0;
    const ari_loss_side *ref = &l->of[0], *other = &l->of[1];
    const double without = other->left;
    double is = 1.0;
    *times = 0.0;
    if (!ref->label || l->tokens * l->vocabulary > MOST_SCALED ||
        !ari_is_near(ref->value, scaled_loss(l, 1.0), ARI_SEEN))
        return AR_OK;
    for (double x = least, above = scaled_loss(l, x) - other->value; x < most && *times == 0.0; x *= step) {
        const double next = scaled_loss(l, x * step) - other->value, low_is_above = above;
        double low = x, high = x * step;
        bool same = false;
        above = next;
        if ((low_is_above > 0.0) == (next > 0.0))
            continue;
        for (int i = 0; i < 30; i++) {
            const double mid = sqrt(low * high);
            *((scaled_loss(l, mid) > other->value) == (low_is_above > 0.0) ? &low : &high) = mid;
        }
        for (size_t i = 0; i < l->tokens * l->vocabulary; i++)
            other->logits[i] = (float)((double)other->logits[i] * (low / is));
        is = low;
        fill_lse(&l->of[1], l);
        AR_TRY(read_labels_again(&same, l));
        *times = same && other->left <= far_less * without ? low : 0.0;
    }
    return AR_OK;
}

/* --- both dumps --------------------------------------------------------------------------------------------------- */

/* Reads the weight of each token's gradient relative to the reference's, if all point the reference's way. */
static ar_status read_weights(ari_losses *l)
{
    const ar_dump_tensor *a = l->of[0].gradient, *b = a ? ari_find_readable(l->c->known->other, a->name) : NULL;
    bool held = b && b->count == a->count && a->shape[0] == l->samples && a->shape[1] == l->seq;
    if (!held)
        return AR_OK;
    AR_TRY(ARI_TAKE(&l->weight, l->c->arena, l->tokens, a->name));
    for (size_t i = 0; i < l->tokens && held; i++) {
        ari_fit f = {0};
        l->weight[i] = 0.0;
        AR_TRY(ari_fit_read(&f, b, a, i * a->shape[2], a->shape[2]));
        held = (f.aa > 0.0) == (f.yy > 0.0) && (f.aa == 0.0 || ari_fit_one(&l->weight[i], &f) <= ARI_FIT);
    }
    l->weight = held ? l->weight : NULL;
    return AR_OK;
}

ar_status ari_losses_read(ari_losses *l, bool *held, bool of_loss)
{
    const ari_case *c = l->c;
    /* If the loss is the first difference, the reference's logits are the other's too. */
    const ar_dump *dumps[2] = {c->known->reference, c->known->other ? c->known->other : c->known->reference};
    for (int k = 0; k < 2 && *held; k++) {
        ari_loss_side *s = &l->of[k];
        s->value = !of_loss ? (double)NAN : k == 0 ? (double)c->ref[0] : (double)c->val[0];
        AR_TRY(read_side(s, held, l, dumps[k]));
        if (!*held || !c->known->other)
            continue;
        AR_TRY(ari_loss_extra_read(s, l, dumps[k]));
        AR_TRY(read_labels(s, l, dumps[k]));
    }
    if (*held)
        AR_TRY(ari_replay_ids(&l->ids, c, l->tokens));
    for (size_t i = 0; l->ids && i < l->tokens; i++)
        *held = *held && l->ids[i] < l->vocabulary;
    if (*held && c->known->other)
        AR_TRY(read_weights(l));
    return AR_OK;
}
