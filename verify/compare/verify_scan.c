/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/float_bits.h"
#include "ref/core/size.h"
#include "verify/compare/report.h"
#include "verify/compare/verify_impl.h"
#include "verify/read/dump_private.h"
#include "verify/read/modules.h"

/* --- whole tensors ------------------------------------------------------------------------------------------------ */

/* Facts that the elements of a tensor show only together: a common factor, and an allowance as large as the tensor. */

/* Returns the roundoff of the shortest format among the compared tensors, or of the arithmetic for which the allowances
 * were measured. A run in mixed precision rounds to that format. */
static double verify_roundoff(const ari_verifying *v)
{
    double max_roundoff = ari_roundoff_allowed(v->report->allows);
    for (size_t i = 0; i < 2 * v->pairs; i++)
        max_roundoff = fmax(max_roundoff, ari_roundoff_of(v->pair[i / 2].format[i % 2].dtype));
    return max_roundoff;
}

/* --- a factor ----------------------------------------------------------------------------------------------------- */

/* The best factor s = <a,b>/<a,a> of b = a + d is off by <a,d>/<a,a>. Independent errors d of relative size r make the
 * factor off by r/sqrt(n), where n = (sum a^2)^2 / sum a^4 is the effective number of elements, at least sum a^2 / max
 * a^2. r is the difference that remains after applying the factor. In 24,000 tensors of correct runs
 * (tests/pytorch/trial.py) the factor was off by at most 5.3 of these deviations whenever it was off by more than
 * SYSTEMATIC. */
static const double DEVIATIONS = 8.0;
/* Error that all elements share: one rounding of the run's format, and the error of fp32 sums. In correct runs the
 * factor was off by at most 24 fp32 roundings where its deviation does not explain it. */
static const double SYSTEMATIC = 64.0 * 0x1p-24;
/* A tensor whose error is above a quarter after its factor is removed has no factor. A few elements say little about
 * their errors. */
static const double REST = 0.25;
enum { LEAST_ELEMENTS = 16 };

/* Returns true if a common factor is meaningful. A factor on weights is their decay, which is judged by elements.
 * Outputs of weights that rounding moved have errors that are not independent. */
static bool has_factor(const ari_pair *pair)
{
    const ar_verify_row *r = pair->row;
    const bool moved = pair->doubt && r->elements_doubted > 0 && !strchr("gmv", r->pass);
    return pair->sums && !moved && strchr("fbgmv", r->pass) && pair->format[0].is_float &&
           r->elements >= LEAST_ELEMENTS && r->rms_reference > 0.0 && r->max_reference > 0.0 && isfinite(r->scale);
}

/* A gradient that is zero except for rounding, such as that of a bias before a norm, differs by its full size. A sum of
 * 2^16 terms that cancel leaves 256 roundings of the terms' size, which is the largest gradient of the step. With fewer
 * bits, where sums are accumulated in more bits, it leaves a 64th of that size. */
static const double ROUNDINGS = 256.0, MOST_ROUNDED = 0x1p-6;

/* Sets *only to true if the reference's gradient or moment is no larger than rounding leaves of zero. Then no number is
 * its factor, and exact zeros are equally correct. */
static ar_status is_only_rounding(bool *only, ari_verifying *v, const ar_verify_row *r)
{
    static const char passes[] = "bgmv";
    const char *pass = strchr(passes, r->pass);
    const double part = fmin(ROUNDINGS * v->roundoff, MOST_ROUNDED);
    *only = false;
    if (!pass)
        return AR_OK;
    if (v->largest_step != r->step)
        v->largest_step = r->step, memset(v->largest, 0, sizeof v->largest);
    double *largest = &v->largest[pass - passes];
    if (*largest == 0.0)
        AR_TRY(ari_largest_rms(largest, v->dump[0], (char[]){r->pass, '\0'}, r->step));
    const double size = r->rms_reference * fmax(1.0, fabs(r->scale)); /* the larger root mean square of the two */
    *only = size <= (r->pass == 'v' ? part * part : part) * *largest;
    return AR_OK;
}

/* Judges all elements of a pair together by their factor. */
static ar_status verify_judge_factor(ari_verifying *v, const ari_pair *pair)
{
    ar_verify_row *r = pair->row;
    const bool by_amount = v->o->rule == AR_VERIFY_TOLERANCE || v->o->rule == AR_VERIFY_SENSITIVITY;
    bool only_rounding = false;
    if (!by_amount || pair->rule.rule == AR_VERIFY_BITS || r->state != AR_VERIFY_SAME || !has_factor(pair))
        return AR_OK;
    const double off = fabs(r->scale - 1.0), relative_rms = r->rms / r->rms_reference;
    const double rest = sqrt(fmax(relative_rms * relative_rms - off * off, 0.0));
    const double part = r->rms_reference / r->max_reference, count = (double)r->elements * part * part;
    const double errors = DEVIATIONS * rest / sqrt(count);
    r->factor_allowed = fmax(fmax(errors, v->roundoff + SYSTEMATIC), pair->rule.rtol);
    const double allowed = fmax(fmax(errors, v->roundoff_of_tensors + SYSTEMATIC), pair->rule.rtol);
    r->excused_by_reduction = rest <= REST && off > allowed && off <= r->factor_allowed;
    if (rest > REST || !(off > r->factor_allowed))
        return AR_OK;
    AR_TRY(is_only_rounding(&only_rounding, v, r));
    if (only_rounding) {
        r->factor_allowed = 0.0;
        return AR_OK;
    }
    r->state = AR_VERIFY_DIFFERENT;
    r->off_by_factor = true;
    r->elements_different = r->elements;
    r->ratio = off / r->factor_allowed;
    return AR_OK;
}

/* --- an allowance that says nothing ------------------------------------------------------------------------------- */

/* Largest plausible allowances. An allowance is 8 times what rounding changed (rounding.py). In fp32, allowances of
 * correct steps are at most 7e-5 of a tensor's largest element (bench/rounding_allowances.py). If rounding changes an
 * element by 1/64 of the largest, something amplifies it: a quantiser with steps of that size, or a selection by value.
 * With fewer bits, deep gradients of correct steps reach 5.5 times the largest element, and experts that receive other
 * tokens 14 times; 8 means an element became a different one. */
static const double MOST_OF_F32 = 0.125, MOST_OF_FEWER = 8.0;
/* A tensor that is zero except for rounding does not indicate amplification: its allowance is negligible compared with
 * the largest of its kind. */
static const double OF_KIND = 0x1p-7;

/* Returns true before the first update: Adam legitimately amplifies rounding in new weights and everything computed
 * from them. */
static bool is_before_update(const ar_verify_row *r)
{
    return r->step <= 1 && r->elements > 1 && strchr("fbg", r->pass);
}

/* Finds allowances that do not measure rounding. If the file does not say for which arithmetic they were measured, they
 * are the user's numbers. */
static void verify_find_unjudged(const ari_verifying *v)
{
    if (!v->report->allows[0])
        return;
    const double limit = v->roundoff > 0x1p-24 ? MOST_OF_FEWER : MOST_OF_F32;
    double largest[128] = {0.0}; /* largest values by pass */
    for (const ari_pair *p = v->pair; p < v->pair + v->pairs; p++)
        largest[p->row->pass & 127] = fmax(largest[p->row->pass & 127], p->row->max_reference);
    for (const ari_pair *p = v->pair; p < v->pair + v->pairs; p++) {
        ar_verify_row *r = p->row;
        r->unjudged = p->sums && is_before_update(r) && r->state == AR_VERIFY_SAME && r->max_reference > 0.0 &&
                      p->rule.atol > limit * r->max_reference &&
                      p->rule.atol > OF_KIND * limit * largest[r->pass & 127];
        v->report->unjudged += r->unjudged;
    }
}

/* --- excuses ------------------------------------------------------------------------------------------------------ */

/* Gradients that excuse new weights: those that are compared and whose difference is rounding. */

/* A gradient is correct if its difference is at most this fraction of its root mean square: then only its smallest
 * elements are rounding. Correct runs have 1e-6 in fp32 and a few hundredths in bf16; a missing all-reduce has about
 * 1. */
static const double RIGHT_PART = 0.125;
/* In correct runs gradients excuse at most 1 % of the new weights (tests/pytorch/trial.py). With a missing all-reduce
 * whose gradients are within a tolerance they excuse more than half: then nothing of the update was compared. */
static const double EXCUSED_PART = 0.125;
static const double FEW_EXCUSED = 64.0; /* Number of weights that may be a whole small module and do not show a
                                           fraction. */

/* Returns the pair of a reference's tensor; NULL: the tensor is not compared. */
static const ari_pair *ari_pair_of(const ari_verifying *v, const ar_dump_tensor *reference)
{
    for (size_t i = 0; reference && i < v->pairs; i++) {
        if (v->pair[i].side[0] == reference)
            return &v->pair[i];
    }
    return NULL;
}

/* Sets *rounding to true if the gradient's difference is rounding. A gradient outside the rule is a finding of its own,
 * and the weights are its consequence. An allowance of --sensitivity was measured as rounding; a tolerance is an
 * arbitrary number. */
static ar_status is_rounding(bool *rounding, const ari_verifying *v, const ari_pair *gradient, ari_step_size *size)
{
    const ar_verify_row *r = gradient->row;
    const bool is_accepted = r->state == AR_VERIFY_SAME || (r->state == AR_VERIFY_DIFFERENT && ari_is_by_rounding(r));
    *rounding = is_accepted && (v->o->rule == AR_VERIFY_SENSITIVITY || r->rms <= RIGHT_PART * r->rms_reference);
    if (*rounding || !is_accepted)
        return AR_OK;
    if (size->gradient < 0.0)
        AR_TRY(ari_largest_rms(&size->gradient, v->dump[0], "g", r->step));
    *rounding = r->rms <= ROUNDINGS * v->roundoff * size->gradient;
    return AR_OK;
}

/* Allows a weight with an orthogonalised update to be off by up to the largest step, if the inputs of the update are
 * the same, in addition to its earlier error. */
static ar_status excuse_orthogonal(ari_uncertainty *d, const ari_pair *pair, const ari_verifying *v, const char *name,
                                   size_t stem)
{
    const int step = pair->row->step;
    const ari_pair *before = ari_pair_of(v, ari_weight_before(v->dump[0], name, stem, step));
    const ar_dump_tensor *gradient = ari_tensor_of_step(v->dump[0], name, stem, "grad", step);
    if (!ari_is_orthogonalised(v, name, stem) || !before || d->steps == 0 || d->grad[d->steps - 1][0] != gradient)
        return AR_OK;
    const ari_update u = {.before = {before->side[0], before->side[1]},
                          .after = {pair->side[0], pair->side[1]},
                          .gradient = gradient,
                          .moment = ari_tensor_of_step(v->dump[0], name, stem, "m", step)};
    bool is_equal = false;
    AR_TRY(ari_is_same_orthogonal(&is_equal, &u));
    if (!is_equal)
        return AR_OK;
    d->uniform = 2.0 * d->reach[d->steps - 1];
    memcpy(d->before, before->side, sizeof d->before);
    return AR_OK;
}

/* Sets pair->doubt of new weights from their gradients, if the gradients are compared and differ only by rounding.
 * sizes: [ARI_UNCERTAINTY_STEPS]. Errors: those of reading, AR_ERR_MEMORY. */
static ar_status excuse_weight(ari_pair *pair, ari_verifying *v, ari_step_size *sizes)
{
    const ar_verify_row *r = pair->row;
    const size_t stem = ari_order_of(r->name, NULL).stem;
    ari_uncertainty d = {.steps = 0};
    for (int step = 1; step <= r->step; step++) {
        const ari_pair *g = ari_pair_of(v, ari_tensor_of_step(v->dump[0], r->name, stem, "grad", step));
        ari_step_size *size = &sizes[step - 1];
        bool rounding = false;
        if (g && g->sums && g->side[0]->count == pair->side[0]->count)
            AR_TRY(is_rounding(&rounding, v, g, size));
        if (!rounding)
            continue;
        if (size->reach < 0.0)
            AR_TRY(ari_uncertainty_reach(&size->reach, v->dump[0], step));
        for (int k = 0; k < 2; k++)
            d.grad[d.steps][k] = g->side[k];
        d.reach[d.steps++] = size->reach;
    }
    AR_TRY(excuse_orthogonal(&d, pair, v, r->name, stem));
    if (d.steps == 0)
        return AR_OK;
    AR_TRY(ARI_TAKE(&pair->doubt, &v->arena, 1, r->name));
    *pair->doubt = d;
    return AR_OK;
}

/* Sets pair->doubt of a moment from the differences of its gradient and of the previous moment, if that gradient is
 * compared and differs by rounding. Errors: those of reading, AR_ERR_MEMORY. */
static ar_status excuse_moment(ari_pair *pair, ari_verifying *v, ari_step_size *sizes)
{
    const ar_verify_row *r = pair->row;
    const size_t stem = ari_order_of(r->name, NULL).stem;
    const char kind[] = {r->pass, '\0'};
    const ari_pair *g = ari_pair_of(v, ari_tensor_of_step(v->dump[0], r->name, stem, "grad", r->step));
    const ari_pair *before = NULL;
    bool rounding = false;
    if (r->step > 1)
        before = ari_pair_of(v, ari_tensor_of_step(v->dump[0], r->name, stem, kind, r->step - 1));
    if (g && g->sums && g->side[0]->count == pair->side[0]->count)
        AR_TRY(is_rounding(&rounding, v, g, &sizes[r->step - 1]));
    if (!rounding)
        return AR_OK;
    ari_uncertainty d = {
        .uniform = pair->doubt ? pair->doubt->uniform : 0.0, .moment = pair->side[0], .squared = r->pass == 'v'};
    memcpy(d.added, g->side, sizeof d.added);
    if (before && before->side[0]->count == pair->side[0]->count)
        memcpy(d.before, before->side, sizeof d.before);
    AR_TRY(ARI_TAKE(&pair->doubt, &v->arena, 1, r->name));
    *pair->doubt = d;
    return AR_OK;
}

/* Returns true if gradients excuse so many new weights that nothing of the update was compared, although they should
 * not. */
static bool verify_excuses_too_many(ari_verifying *v)
{
    double excused = 0.0, total = 0.0;
    for (const ari_pair *p = v->pair; p < v->pair + v->pairs; p++) {
        if (p->doubt && p->doubt->uniform > 0.0)
            continue;
        total += p->row->pass == 'n' ? (double)p->numbers : 0.0;
        excused += p->row->pass == 'n' ? (double)p->tally.doubted : 0.0;
    }
    v->many_excused = excused > FEW_EXCUSED && excused > EXCUSED_PART * total;
    /* If gradients are reduced in 16 bits, rounding moves every weight. */
    return v->reduced == 0.0 && v->many_excused;
}

/* --- verify scan -------------------------------------------------------------------------------------------------- */

/* The passes over the data. */

typedef struct pass {
    ari_verifying *v;
    ari_scratch *scratch; /* [threads] */
    ari_pair **pair;      /* [pairs] of the current pass */
    size_t *task_offset;  /* [pairs + 1] number of tasks before each pair */
    size_t pairs;
    ari_step_size size[ARI_UNCERTAINTY_STEPS];
    pthread_mutex_t *lock;        /* guards tallies and maps */
    double progress_begin, share; /* range of the progress */
    const char *label;
} pass;

/* --- scratch ------------------------------------------------------------------------------------------------------ */

static ar_status scratch_init(ari_scratch *s, ari_arena *arena)
{
    for (int k = 0; k < 2; k++) {
        AR_TRY(ari_arena_take(arena, (void **)&s->side[k].space, ARI_CHUNK, 8, "a chunk of a tensor"));
        AR_TRY(ARI_TAKE(&s->side[k].value, arena, ARI_CHUNK, "a chunk of a tensor"));
    }
    AR_TRY(ARI_TAKE(&s->difference, arena, ARI_CHUNK, "a chunk of differences"));
    AR_TRY(ARI_TAKE(&s->steps, arena, ARI_CHUNK, "a chunk of differences"));
    AR_TRY(ARI_TAKE(&s->shown, arena, ARI_CHUNK, "a chunk of differences"));
    AR_TRY(ARI_TAKE(&s->extra, arena, ARI_CHUNK, "a chunk of differences"));
    return ARI_TAKE(&s->map, arena, (size_t)ARI_MAP_ROWS * ARI_MAP_COLS, "a map of differences");
}

/* --- copies ------------------------------------------------------------------------------------------------------- */

void ari_verify_progress(const ari_verifying *v, double fraction, const char *label)
{
    if (v->o->progress)
        v->o->progress(v->o->progress_user, fraction, label);
}

bool ari_is_one_sided(const ar_verify_row *r)
{
    return r->state == AR_VERIFY_MISSING || r->state == AR_VERIFY_UNEXPECTED;
}

static bool has_copies(const ar_dump_tensor *t)
{
    for (size_t i = 0; t && i < t->parts; i++) {
        if (t->part[i].replicas > 1)
            return true;
    }
    return false;
}

static void tell_copies(ar_verify_row *r, const ar_dump_disagreement *d, bool in_reference)
{
    /* A tensor that the other dump lacks is reported as missing, whatever its copies are. */
    if (!ari_is_one_sided(r))
        r->state = AR_VERIFY_REPLICAS;
    r->copies_differ = true;
    r->in_reference = in_reference;
    memcpy(r->ranks, d->ranks, sizeof r->ranks);
    r->first = r->worst = (ar_verify_element){d->index, {d->value[0], d->value[1]}};
    r->elements_different = r->bits_different = d->elements;
}

/* The rule for copies on one side of a pair. */
typedef struct copies_rule {
    const ari_pair *pair;
    ari_format format;
} copies_rule;

static bool copies_differ(void *user, const void *a, const void *b)
{
    const copies_rule *r = user;
    return ari_elements_differ(r->pair, &r->format, a, b);
}

static ar_status copies_task(void *user, size_t task, int worker)
{
    const pass *p = user;
    const ari_sides *s = &p->v->sides[task];
    ar_verify_row *row = &p->v->report->row[task];
    copies_rule rule = {.pair = s->pair};
    const bool by_rule = rule.pair && p->v->o->rule != AR_VERIFY_BITS;
    (void)worker;
    for (int k = 0; k < 2; k++) {
        bool found = false;
        ar_dump_disagreement d;
        if (!has_copies(s->tensors[k]))
            continue;
        size_t drift = 0;
        rule.format = ari_format_of(s->tensors[k]->dtype);
        AR_TRY(ari_dump_replicas_by(s->tensors[k], by_rule ? copies_differ : NULL, &rule, &found, &d, &drift));
        row->drift += drift;
        if (found) {
            tell_copies(row, &d, k == 0);
            return AR_OK;
        }
    }
    return AR_OK;
}

/* --- bytes -------------------------------------------------------------------------------------------------------- */

/* Returns the pair of a task and the index of its block. */
static ari_pair *pair_of(const pass *p, size_t task, size_t *block)
{
    size_t low = 0, high = p->pairs;
    while (high - low > 1) {
        const size_t middle = low + (high - low) / 2;
        if (p->task_offset[middle] <= task)
            low = middle;
        else
            high = middle;
    }
    *block = task - p->task_offset[low];
    return p->pair[low];
}

typedef struct range {
    size_t begin, end;
} range;

static range block_range(const ari_pair *pair, size_t block)
{
    const size_t begin = block * ARI_SCAN_BLOCK, rest = pair->numbers - begin;
    return (range){begin, begin + (rest < ARI_SCAN_BLOCK ? rest : ARI_SCAN_BLOCK)};
}

static size_t chunk_of(range r, size_t offset)
{
    return r.end - offset < ARI_CHUNK ? r.end - offset : ARI_CHUNK;
}

static void release_block(const ari_pair *pair, range r)
{
    for (int k = 0; k < 2; k++)
        ari_release(pair->side[k], &pair->format[k], r.begin, r.end - r.begin);
}

static ar_status bytes_task(void *user, size_t task, int worker)
{
    const pass *p = user;
    ari_scratch *s = &p->scratch[worker];
    size_t block = 0, nan = 0, inf = 0;
    ari_pair *pair = pair_of(p, task, &block);
    const ari_format *f = &pair->format[0];
    const range r = block_range(pair, block);
    for (size_t offset = r.begin; offset < r.end && !atomic_load_explicit(&pair->unequal, memory_order_relaxed);
         offset += ARI_CHUNK) {
        const size_t n = chunk_of(r, offset);
        for (int k = 0; k < 2; k++)
            AR_TRY(ari_chunk_raw(&s->side[k], pair->side[k], f, offset, n));
        if (memcmp(s->side[0].raw, s->side[1].raw, ari_raw_bytes(f, n)) != 0)
            atomic_store_explicit(&pair->unequal, true, memory_order_relaxed);
        ari_count_special(f, s->side[0].raw, n, &nan, &inf);
    }
    release_block(pair, r);
    if (nan + inf > 0) {
        pthread_mutex_lock(p->lock);
        for (int k = 0; k < 2; k++) {
            pair->tally.nan[k] += nan;
            pair->tally.inf[k] += inf;
        }
        pthread_mutex_unlock(p->lock);
    }
    return AR_OK;
}

/* --- statistics --------------------------------------------------------------------------------------------------- */

static void merge_map(ar_verify_map *dst, const float *src)
{
    for (size_t y = 0; y < dst->rows; y++) {
        for (size_t x = 0; x < dst->cols; x++) {
            float *cell = &dst->cell[y * dst->cols + x];
            const float src_cell = src[y * ARI_MAP_COLS + x];
            *cell = src_cell > *cell ? src_cell : *cell;
        }
    }
}

static ar_status stats_task(void *user, size_t task, int worker)
{
    const pass *p = user;
    ari_scratch *s = &p->scratch[worker];
    size_t block = 0;
    ari_pair *pair = pair_of(p, task, &block);
    const range r = block_range(pair, block);
    ari_deviation tally;
    ari_scaled_sums sums = {0};
    ari_deviation_init(&tally);
    memset(s->map, 0, (size_t)ARI_MAP_ROWS * ARI_MAP_COLS * sizeof *s->map);
    for (size_t offset = r.begin; offset < r.end; offset += ARI_CHUNK)
        AR_TRY(ari_chunk_stats(pair, s, offset, chunk_of(r, offset), &tally, &sums));
    release_block(pair, r);
    pair->sums[block] = sums;
    pthread_mutex_lock(p->lock);
    ari_deviation_add(&pair->tally, &tally);
    merge_map(&pair->row->map, s->map);
    pthread_mutex_unlock(p->lock);
    return AR_OK;
}

static ar_status prepare_stats(ari_pair *pair, ari_arena *arena)
{
    ar_verify_map *m = &pair->row->map;
    ari_deviation_init(&pair->tally);
    m->rows = m->matrix_rows < ARI_MAP_ROWS ? m->matrix_rows : ARI_MAP_ROWS;
    m->cols = m->matrix_cols < ARI_MAP_COLS ? m->matrix_cols : ARI_MAP_COLS;
    AR_TRY(ARI_ALLOC_ZERO(&m->cell, m->rows * m->cols, "a map of differences"));
    return ARI_TAKE(&pair->sums, arena, pair->blocks, "sums over a tensor");
}

/* --- what becomes of it ------------------------------------------------------------------------------------------- */

/* Returns the rank whose part contains an element, in the copy that is compared. */
static int rank_of_element(const ar_dump_tensor *t, size_t index)
{
    size_t coords[AR_ST_MAX_DIMS];
    ari_coordinates(coords, index, t->ndim, t->shape);
    for (size_t i = 0; i < t->parts; i++) {
        for (size_t b = 0; b < t->part[i].boxes; b++) {
            const ar_dump_box *box = &t->part[i].box[b];
            int d = 0;
            while (d < t->ndim && coords[d] >= box->global[d] && coords[d] - box->global[d] < box->extent[d])
                d++;
            if (d == t->ndim && box->replica == 0)
                return t->part[i].rank;
        }
    }
    return -1;
}

static double scaled_root(ari_scaled s)
{
    const int odd = s.exponent % 2;
    return ldexp(sqrt(ldexp(s.sum, odd)), (s.exponent - odd) / 2);
}

static double scaled_ratio(ari_scaled a, ari_scaled b)
{
    return ldexp(a.sum / b.sum, a.exponent - b.exponent);
}

static void fill_sums(ar_verify_row *r, const ari_pair *pair)
{
    ari_scaled_sums s = {0};
    const double finite = (double)pair->tally.finite;
    for (size_t b = 0; b < pair->blocks; b++)
        ari_scaled_sums_add(&s, &pair->sums[b]);
    if (finite > 0.0) {
        r->rms = scaled_root(s.dd) / sqrt(finite);
        r->rms_reference = scaled_root(s.aa) / sqrt(finite);
    }
    if (s.aa.sum > 0.0)
        r->scale = scaled_ratio(s.ab, s.aa);
    if (s.aa.sum > 0.0 && s.bb.sum > 0.0) {
        const ari_scaled lengths = {sqrt(s.aa.sum) * sqrt(s.bb.sum), (s.aa.exponent + s.bb.exponent) / 2};
        r->cosine = fmax(-1.0, fmin(1.0, scaled_ratio(s.ab, lengths)));
    }
}

/* Finishes the map of differences. Without a tolerance, differences are relative to the tensor's size. */
static void finish_map(const ari_pair *pair)
{
    ar_verify_row *r = pair->row;
    if (r->state == AR_VERIFY_SAME) {
        free(r->map.cell);
        r->map.cell = NULL;
        return;
    }
    for (size_t i = 0; pair->rule.rule == AR_VERIFY_BITS && r->rms_reference > 0.0 && i < r->map.rows * r->map.cols;
         i++)
        r->map.cell[i] = (float)((double)r->map.cell[i] / r->rms_reference);
}

static void fill_row(const ari_pair *pair)
{
    const ari_deviation *t = &pair->tally;
    ar_verify_row *r = pair->row;
    const bool copies = r->state == AR_VERIFY_REPLICAS;
    memcpy(r->nan, t->nan, sizeof r->nan);
    memcpy(r->inf, t->inf, sizeof r->inf);
    if (!pair->sums)
        return; /* equal bytes need no further comparison */
    r->max_abs = t->max_abs;
    r->max_rel = t->max_rel > 0.0 || !t->from_zero ? t->max_rel : (double)INFINITY;
    r->max_reference = t->max_reference;
    r->max_ulp = t->max_ulp;
    r->allowed = t->allowed;
    r->ratio = t->worst_ratio > 0.0 ? t->worst_ratio : 0.0;
    memcpy(r->ulp_bins, t->ulp_bins, sizeof r->ulp_bins);
    fill_sums(r, pair);
    if (!copies) {
        r->state = t->different > 0 ? AR_VERIFY_DIFFERENT : AR_VERIFY_SAME;
        r->off_by_factor = false;
        r->elements_different = t->different;
        r->bits_different = t->bits_different;
        r->elements_doubted = t->doubted;
        r->worst = t->worst.index == SIZE_MAX ? (ar_verify_element){0} : t->worst;
        r->first = t->first_element.index == SIZE_MAX ? r->worst : t->first_element;
        if (r->state == AR_VERIFY_DIFFERENT && pair->side[1]->dtype != AR_C64)
            r->ranks[0] = rank_of_element(pair->side[1], r->first.index);
    }
}

/* --- all of it ---------------------------------------------------------------------------------------------------- */

static void tell_progress(void *user, size_t done_tasks)
{
    const pass *p = user;
    const size_t total_tasks = p->task_offset[p->pairs];
    ari_verify_progress(
        p->v, p->progress_begin + p->share * (double)done_tasks / (double)(total_tasks ? total_tasks : 1), p->label);
}

/* Returns true for weights after a step that are outside their tolerance, which differences of their gradients may
 * explain. */
static bool may_be_doubted(const ari_pair *pair)
{
    const ar_verify_row *r = pair->row;
    return r->pass == 'n' && r->step <= ARI_UNCERTAINTY_STEPS && pair->tally.different > 0 && pair->format[0].is_float;
}

static bool may_allow(const ari_verifying *v)
{
    return v->o->rule == AR_VERIFY_TOLERANCE || v->o->rule == AR_VERIFY_SENSITIVITY;
}

static void add_pair(pass *p, ari_pair *pair)
{
    p->pair[p->pairs++] = pair;
    p->task_offset[p->pairs] = p->task_offset[p->pairs - 1] + pair->blocks;
}

/* A pair is measured again by another rule. */
static void add_again(pass *p, ari_pair *pair)
{
    ari_deviation_init(&pair->tally);
    memset(pair->row->map.cell, 0, pair->row->map.rows * pair->row->map.cols * sizeof *pair->row->map.cell);
    add_pair(p, pair);
}

/* Selects gradients, and moments and norms computed from them, that ranks reduce in another format. */
static ar_status choose_reduced(pass *p, size_t *tasks)
{
    p->pairs = 0;
    for (size_t i = 0; i < p->v->pairs; i++) {
        ari_pair *pair = &p->v->pair[i];
        if (pair->format[0].parts == 1 && pair->sums)
            AR_TRY(ari_excuse_reduced(pair, p->v));
        if (pair->doubt)
            add_again(p, pair);
    }
    *tasks = p->task_offset[p->pairs];
    return AR_OK;
}

/* Selects tensors to compare again by other rules: weights that their gradients may excuse, and 16-bit moments where
 * the reference's have 32 bits. */
static ar_status choose_again(pass *p, size_t *tasks)
{
    ari_verifying *v = p->v;
    bool short_moments = false;
    for (size_t i = 0; i < ARI_UNCERTAINTY_STEPS; i++)
        p->size[i] = (ari_step_size){-1.0, -1.0};
    p->pairs = 0;
    AR_TRY(ari_verify_find_short_moments(&short_moments, v));
    for (size_t i = 0; i < v->pairs; i++) {
        ari_pair *pair = &v->pair[i];
        const bool moment = pair->row->pass == 'm' || pair->row->pass == 'v';
        if (pair->format[0].parts > 1 || !pair->sums)
            continue;
        if (may_be_doubted(pair))
            AR_TRY(excuse_weight(pair, v, p->size));
        if (moment && short_moments)
            pair->rule.rule = AR_VERIFY_BITS;
        if ((pair->doubt && pair->row->pass == 'n') || (moment && short_moments))
            add_again(p, pair);
    }
    *tasks = p->task_offset[p->pairs];
    return AR_OK;
}

/* Weights are judged by the rule alone if too many were excused. */
static size_t choose_unexcused(pass *p)
{
    p->pairs = 0;
    if (!verify_excuses_too_many(p->v))
        return 0;
    for (size_t i = 0; i < p->v->pairs; i++) {
        ari_pair *pair = &p->v->pair[i];
        if (!pair->doubt || pair->row->pass != 'n')
            continue;
        pair->doubt = NULL;
        add_again(p, pair);
    }
    return p->task_offset[p->pairs];
}

/* Selects the pairs for a pass: all that are not known to differ, or all that are known to differ. */
static size_t choose_pairs(pass *p, bool unequal)
{
    p->pairs = 0;
    p->task_offset[0] = 0;
    for (size_t i = 0; i < p->v->pairs; i++) {
        if (atomic_load(&p->v->pair[i].unequal) == unequal)
            add_pair(p, &p->v->pair[i]);
    }
    return p->task_offset[p->pairs];
}

static ar_status run_pass(pass *p, size_t tasks, ari_task_fn run, double progress_begin, double share,
                          const char *label)
{
    p->progress_begin = progress_begin;
    p->share = share;
    p->label = label;
    const ari_tasks t = {tasks, p->v->threads, run, p, tell_progress};
    return ari_tasks_run(&t);
}

/* The statistics of the pairs chosen, and what their rows say then. */
static ar_status measure(pass *p, size_t tasks, double progress_begin, double share)
{
    AR_TRY(run_pass(p, tasks, stats_task, progress_begin, share, "measuring differences"));
    for (size_t i = 0; i < p->pairs; i++) {
        fill_row(p->pair[i]);
        AR_TRY(verify_judge_factor(p->v, p->pair[i]));
    }
    return AR_OK;
}

/* Returns a weight of a tensor's module before its step in both dumps; NULL: the weight is not compared. */
static const ar_dump_tensor *const *weight_of(const ari_verifying *v, const ar_verify_row *r, const char *kind)
{
    char name[512];
    const int n = snprintf(name, sizeof name, "%.*s.%s", (int)ari_order_of(r->name, NULL).stem, r->name, kind);
    const ar_dump_tensor *t = n < (int)sizeof name ? ari_weight_before(v->dump[0], name, (size_t)n, r->step) : NULL;
    const ari_pair *pair = ari_pair_of(v, t);
    return pair ? pair->side : NULL;
}

static bool is_of_later_pass(const ari_pair *pair)
{
    return pair->row->pass && strchr("fbg", pair->row->pass) && pair->row->step > 1 && pair->format[0].is_float &&
           pair->format[0].parts == 1;
}

/* Differences in a step that weights explain, relative to the tensor's largest value; those of outputs and of gradients
 * of inputs relative to their root mean square. Also the last output of a module with weights, which modules without
 * weights pass on, such as heads that are split from it. */
typedef struct {
    double part, of_outputs, of_inputs, handed_on;
} shown_doubt;

/* A parameter's gradient is a sum over samples of products of an output and an output's gradient. Each term has the
 * errors of both factors, and the sum's largest element may be off by this many deviations. */
static const double MOST_DEVIATIONS = 6.0; /* a normal number is past six once in 10^9 */

static double shown_of(const shown_doubt *shown, const ari_pair *pair, bool alone)
{
    const double products = MOST_DEVIATIONS * (shown->of_outputs + shown->of_inputs) * pair->row->rms_reference;
    return fmax(shown->part * pair->tally.max_reference, pair->row->pass == 'g' ? products
                                                         : alone                ? shown->handed_on
                                                                                : 0.0);
}

static void show_doubt(shown_doubt *shown, const ari_pair *pair, bool alone, double max_doubt)
{
    const ar_verify_row *r = pair->row;
    if (r->pass == 'g')
        return; /* in its step only the update uses it */
    double *share = r->pass == 'f' ? &shown->of_outputs : &shown->of_inputs;
    if (pair->tally.max_reference > 0.0)
        shown->part = fmax(shown->part, max_doubt / pair->tally.max_reference);
    if (r->rms_reference > 0.0)
        *share = fmax(*share, max_doubt / r->rms_reference);
    shown->handed_on = alone ? shown->handed_on : max_doubt;
}

/* Adds the part of this tensor's difference that its weights explain. If the tensor is outside its tolerance, it is
 * judged again with that part added. */
static ar_status doubt_output(pass *p, ari_pair *pair, shown_doubt *shown, const ari_module_classes classes[2])
{
    ari_verifying *v = p->v;
    const ar_verify_row *r = pair->row;
    const ar_dump_tensor *const *weight = weight_of(v, r, "weight"), *const *bias = weight_of(v, r, "bias");
    const bool alone = r->pass == 'f' && !weight && !bias;
    const double reduced = pair->doubt ? pair->doubt->uniform : 0.0; /* uncertainty of a gradient */
    ari_uncertainty d = {.uniform = reduced + shown_of(shown, pair, alone)};
    const size_t stem = ari_order_of(r->name, NULL).stem;
    const char *name = ari_module_class_of(&classes[0], r->name, stem);
    name = name ? name : ari_module_class_of(&classes[1], r->name, stem);
    AR_TRY(ari_uncertainty_output(&d, pair->side[0], weight, bias, name, &v->arena));
    double max_doubt = fmin(d.max_element, pair->tally.max_abs);
    if (pair->tally.different > 0) {
        AR_TRY(ARI_TAKE(&pair->doubt, &v->arena, 1, r->name));
        *pair->doubt = d;
        p->pairs = 0;
        add_again(p, pair);
        AR_TRY(measure(p, pair->blocks, 0.95, 0.0));
        max_doubt = pair->tally.max_abs;
    }
    show_doubt(shown, pair, alone, max_doubt);
    return AR_OK;
}

/* Returns true for moments and new weights computed from gradients that were not known to be the same in the first
 * comparison. */
static bool is_of_update(const ari_pair *pair)
{
    const ar_verify_row *r = pair->row;
    return r->pass && strchr("nmv", r->pass) && r->step <= ARI_UNCERTAINTY_STEPS && pair->rule.rule != AR_VERIFY_BITS &&
           pair->format[0].is_float && pair->format[0].parts == 1;
}

static ar_status doubt_update(pass *p, ari_pair *pair)
{
    ari_verifying *v = p->v;
    const bool weight = pair->row->pass == 'n', unexcused = v->many_excused && v->reduced == 0.0;
    if (weight && unexcused)
        return AR_OK;
    AR_TRY(weight ? excuse_weight(pair, v, p->size) : excuse_moment(pair, v, p->size));
    if (!pair->doubt)
        return AR_OK;
    p->pairs = 0;
    add_again(p, pair);
    return measure(p, pair->blocks, 0.95, 0.0);
}

/* Judges again all tensors in execution order up to the first unexplained difference: outputs and gradients of later
 * steps that depend on weights moved by rounding, and moments and next weights that depend on such gradients. */
static ar_status doubt_consequences(pass *p)
{
    shown_doubt shown = {.part = 0.0};
    ari_module_classes classes[2] = {{NULL, 0}, {NULL, 0}};
    size_t outside = 0;
    for (size_t i = 0; i < p->v->pairs; i++)
        outside +=
            (is_of_later_pass(&p->v->pair[i]) || is_of_update(&p->v->pair[i])) && p->v->pair[i].tally.different > 0;
    for (int k = 0; k < 2 && outside > 0; k++)
        AR_TRY(ari_module_classes_read(&classes[k], p->v->dump[k], &p->v->arena));
    for (size_t i = 0; i < p->v->pairs && outside > 0; i++) {
        ari_pair *pair = &p->v->pair[i];
        const bool output = is_of_later_pass(pair), update = is_of_update(pair) && pair->tally.different > 0;
        const bool judged = pair->sums && pair->row->state != AR_VERIFY_REPLICAS;
        if (i > 0 && pair->row->step != pair[-1].row->step)
            shown = (shown_doubt){.part = 0.0};
        outside -= (output || update) && pair->tally.different > 0;
        if (output && judged)
            AR_TRY(doubt_output(p, pair, &shown, classes));
        else if (update && judged)
            AR_TRY(doubt_update(p, pair));
        if (pair->row->state != AR_VERIFY_SAME)
            return AR_OK;
    }
    return AR_OK;
}

static ar_status passes(pass *p)
{
    ari_verifying *v = p->v;
    v->roundoff_of_tensors = verify_roundoff(v);
    v->roundoff = fmax(v->roundoff_of_tensors, v->reduced);
    ari_verify_progress(v, 0.0, "copies");
    const ari_tasks copies = {v->report->rows, v->threads, copies_task, p, NULL};
    AR_TRY(ari_tasks_run(&copies));
    AR_TRY(ari_verify_furthest_copies(v));
    size_t tasks = choose_pairs(p, false);
    AR_TRY(run_pass(p, tasks, bytes_task, 0.05, 0.5, "comparing"));
    tasks = choose_pairs(p, true);
    for (size_t i = 0; i < p->pairs; i++)
        AR_TRY(prepare_stats(p->pair[i], &v->arena));
    AR_TRY(measure(p, tasks, 0.55, 0.4));
    if (may_allow(v)) {
        AR_TRY(choose_reduced(p, &tasks));
        AR_TRY(measure(p, tasks, 0.95, 0.0));
        AR_TRY(choose_again(p, &tasks));
        AR_TRY(measure(p, tasks, 0.95, 0.0));
        AR_TRY(measure(p, choose_unexcused(p), 0.95, 0.0));
        AR_TRY(doubt_consequences(p));
        AR_TRY(measure(p, choose_unexcused(p), 0.95, 0.0));
    }
    ari_find_excused_by_reduction(v);
    verify_find_unjudged(v);
    for (size_t i = 0; i < v->pairs; i++) {
        if (!v->pair[i].sums)
            fill_row(&v->pair[i]);
        finish_map(&v->pair[i]);
    }
    return AR_OK;
}

static ar_status scan(pass *p, ari_arena *arena)
{
    const size_t pairs = p->v->pairs, threads = (size_t)p->v->threads;
    AR_TRY(ARI_TAKE(&p->scratch, arena, threads, "scratch"));
    for (size_t i = 0; i < threads; i++)
        AR_TRY(scratch_init(&p->scratch[i], arena));
    AR_TRY(ARI_TAKE(&p->pair, arena, pairs, "pairs of tensors"));
    AR_TRY(ARI_TAKE(&p->task_offset, arena, pairs + 1, "pairs of tensors"));
    return passes(p);
}

ar_status ari_verify_scan(ari_verifying *v)
{
    ARI_ENDED(pthread_mutex_destroy) pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    ARI_ENDED(ari_arena_free) ari_arena arena = {NULL};
    return scan(&(pass){.v = v, .lock = &lock}, &arena);
}
