/* SPDX-License-Identifier: Apache-2.0 */
/* The reference of a check: the baseline's tensors of a model and a text. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/cluster/process/process_private.h"
#include "ref/core/clock.h"
#include "ref/core/os/os.h"
#include "ref/core/wait.h"
#include "ref/io/file.h"
#include "ref/numerics/philox.h"
#include "verify/check/check_run.h"
#include "verify/reference/sensitivity.h"
#include "verify/reference/sensitivity_private.h"
#include "verify/run/process_run.h"
#include "verify/writer/dump_ranks.h"

/* --- the error against binary64 ----------------------------------------------------------------------------------- */

/* Initial value of the largest error; every measured error is larger. */
enum { NOTHING_MEASURED = -1 };
/* A gradient that is zero in exact arithmetic, such as a key bias's, has no scale. In binary64 it is rounding far below
 * this value. */
static const double NO_SCALE = 1e-12;

/* Updates the largest error with a gradient's error relative to the tensor's largest element. The result is infinite if
 * exactly one value is not finite, and NaN if both contain NaN, since nothing is known then. */
static void add_error(double *error, const ari_ref_tensor *t, const double *values)
{
    double largest = 0.0, worst = 0.0, relative = 0.0;
    bool blind = false;
    for (size_t k = 0; k < t->count; k++) {
        const double wide = values[k], exact = (double)t->values[k];
        if (isnan(wide) && isnan(exact)) {
            blind = true;
            continue;
        }
        largest = fmax(largest, fabs(wide));
        if (wide != exact) /* fmax ignores NaN, and infinity minus infinity is NaN */
            worst = fmax(worst, isfinite(wide) && isfinite(exact) ? fabs(wide - exact) : (double)INFINITY);
    }
    if (worst > 0.0)
        relative = largest > NO_SCALE ? worst / largest : NOTHING_MEASURED;
    if (isinf(worst))
        *error = INFINITY;
    else if (blind && !isinf(*error))
        *error = NAN;
    else if (relative > *error) /* never over a NaN */
        *error = relative;
}

/* Hears the binary64 run beside the reference. */
typedef struct measuring {
    const ari_reference *ref;
    size_t heard; /* gradients of step 1 come first among gradients of the same name */
    double error; /* largest error in step 1 */
} measuring;

static ar_status measure_noise(void *user, const char *name, char pass, int ndim, const size_t *shape,
                               const double *values)
{
    measuring *m = user;
    (void)ndim, (void)shape;
    /* in execution order, as in the reference; later steps come after */
    const size_t i = m->heard++;
    if (i >= m->ref->count || m->ref->tensor[i].pass != pass || strcmp(m->ref->tensor[i].name, name) != 0)
        return ar_error_set(AR_ERR_INTERNAL, "the binary64 baseline emitted %s%s alone", name, ari_pass_suffix(pass));
    if (pass == 'g' && m->ref->tensor[i].step == 1) {
        add_error(&m->error, &m->ref->tensor[i], values);
        ari_reference_rest(&m->ref->tensor[i]);
    }
    return AR_OK;
}

/* --- the runs ----------------------------------------------------------------------------------------------------- */

typedef struct phase {
    const ar_check_options *o;
    const char *label;
} phase;

static bool report_progress(void *user, double fraction)
{
    const phase *p = user;
    if (p->o->progress)
        p->o->progress(p->o->progress_user, fraction, p->label);
    return true;
}

/* Options common to all runs of the baseline. */
static ar_baseline_options options_of(const ari_check_base *b, const ar_check_options *o, ari_reference *reference)
{
    ar_baseline_options baseline = ari_reference_options(&o->run, reference);
    baseline.weights = b->weights ? ari_weights_find : NULL;
    baseline.weights_user = b->weights;
    baseline.threads = ari_threads(o->run.threads);
    return baseline;
}

static ar_status run_exact(ari_check_base *b, const ar_check_options *o, double *losses)
{
    phase p = {o, "baseline, exact"};
    ar_baseline_options exact = options_of(b, o, &b->ref);
    exact.progress = report_progress;
    exact.progress_user = &p;
    AR_TRY(ar_baseline_run(&b->config, &exact, b->batch, losses));
    return ari_reference_finish(&b->ref);
}

/* Runs the binary64 baseline, whose gradients of step 1 measure the exact baseline's error. */
static ar_status run_binary64(measuring *m, const ari_check_base *b, const ar_check_options *o, double *unused)
{
    phase p = {o, "baseline, binary64"};
    ar_baseline_options wide = options_of(b, o, NULL);
    wide.mode = AR_MODE_F64;
    wide.bf16 = false;
    wide.emit = measure_noise;
    wide.emit_user = m;
    wide.steps = 0;
    wide.progress = report_progress;
    wide.progress_user = &p;
    return ar_baseline_run(&b->config, &wide, b->batch, unused);
}

static ar_status allow_differences(ari_check_base *b, measuring *m, const ar_check_options *o)
{
    const ari_sensitivity_case sensitivity = {.sensitivity = ari_sensitivity_of_precision(o->run.precision),
                                              .config = &b->config,
                                              .batch = b->batch,
                                              .options = options_of(b, o, NULL),
                                              .heard = measure_noise,
                                              .heard_user = m,
                                              .threads = ari_threads(o->run.threads),
                                              .progress = o->progress,
                                              .progress_user = o->progress_user};
    return ari_sensitivity_allow(&b->ref, &sensitivity);
}

ar_status ari_check_baseline(ari_check_base *b, const ar_check_options *o)
{
    const size_t steps = ari_run_steps(&o->run);
    measuring m = {.ref = &b->ref, .error = NOTHING_MEASURED};
    ARI_OWNED double *losses = NULL;
    b->max_error_vs_f64 = NAN;
    AR_TRY(ARI_ALLOC_ZERO(&losses, steps, "losses"));
    AR_TRY(run_exact(b, o, losses));
    ari_memory_return();
    for (size_t i = 0; i < steps; i++)
        b->loss[i] = (float)losses[i];
    if (o->run.numerics == AR_NUMERICS_NATIVE)
        AR_TRY(allow_differences(b, &m, o));
    else if (!o->skip_f64)
        AR_TRY(run_binary64(&m, b, o, losses));
    ari_memory_return();
    if (!o->skip_f64 && !(m.error < 0.0))
        b->max_error_vs_f64 = m.error;
    return AR_OK;
}

/* --- where ranks are processes ------------------------------------------------------------------------------------ */

/* Process 0's work has no time limit, but the other processes' wait for its messages has one. */
#define WORD_NS UINT64_C(1000000000)
enum { AT_WORK = 1, AT_ITS_END = 2 };

typedef struct telling {
    const ar_check_options *check;
    uint64_t last_ns;
    ar_status st; /* status of the messages */
} telling;

static void tell_word(telling *t, int32_t word)
{
    if (t->st == AR_OK)
        t->st = ari_process_broadcast(t->check->run.process, &word, sizeof word);
    t->last_ns = ari_now_ns();
}

static void keep_telling(void *user, double fraction, const char *label)
{
    telling *t = user;
    if (ari_now_ns() - t->last_ns > WORD_NS)
        tell_word(t, AT_WORK);
    if (t->check->progress)
        t->check->progress(t->check->progress_user, fraction, label);
}

static ar_status run_and_tell(ari_check_base *b, const ar_check_options *o)
{
    telling t = {.check = o, .last_ns = ari_now_ns()};
    ar_check_options options = *o;
    options.progress = keep_telling;
    options.progress_user = &t;
    const ar_status st = ari_check_baseline(b, &options);
    if (t.st != AR_OK)
        return t.st;
    tell_word(&t, AT_ITS_END);
    return st != AR_OK ? st : t.st;
}

static ar_status hear(ar_process *p)
{
    int32_t word = AT_WORK;
    while (word == AT_WORK)
        AR_TRY(ari_process_broadcast(p, &word, sizeof word));
    return AR_OK;
}

/* Sends or receives one tensor: its description, its values, then its allowances. */
static ar_status share_tensor(ar_process *p, ari_ref_tensor *t)
{
    const bool is_root = ar_process_rank(p) == 0;
    ari_ref_tensor facts = *t;
    bool is_per_element = t->allowed_each != NULL;
    AR_TRY(ari_process_broadcast(p, &facts, sizeof facts));
    AR_TRY(ari_process_broadcast(p, &is_per_element, sizeof is_per_element));
    if (!is_root) {
        *t = facts;
        t->values = t->allowed_each = NULL;
        AR_TRY(ari_reference_allocate(t));
        if (is_per_element)
            AR_TRY(ARI_ALLOC(&t->allowed_each, t->count, t->name));
    }
    AR_TRY(ari_process_broadcast(p, t->values, t->count * sizeof *t->values));
    return is_per_element ? ari_process_broadcast(p, t->allowed_each, t->count * sizeof *t->allowed_each) : AR_OK;
}

static ar_status share_reference(ar_process *p, ari_reference *ref)
{
    const bool is_root = ar_process_rank(p) == 0;
    size_t count = ref->count;
    AR_TRY(ari_process_broadcast(p, &count, sizeof count));
    AR_TRY(ari_process_broadcast(p, &ref->step, sizeof ref->step));
    if (!is_root) {
        AR_TRY(ARI_ALLOC_ZERO(&ref->tensor, count, "the baseline's tensors"));
        ref->capacity = count;
    }
    for (size_t i = 0; i < count; i++) {
        ref->count = is_root ? count : i + 1;
        AR_TRY(share_tensor(p, &ref->tensor[i]));
    }
    return is_root ? AR_OK : ari_reference_finish(ref);
}

/* Runs the baseline on process 0 and sends its result to all processes. The others wait as long as process 0 reports
 * that it is working. */
static ar_status run_shared(ari_check_base *b, const ar_check_options *o)
{
    ar_process *p = o->run.process;
    AR_TRY(ari_process_agree(p, ar_process_rank(p) == 0 ? run_and_tell(b, o) : hear(p)));
    const ar_status st = share_reference(p, &b->ref);
    if (st == AR_ERR_MEMORY)
        return ari_process_give_up(p, st);
    AR_TRY(st);
    AR_TRY(ari_process_broadcast(p, b->loss, ari_run_steps(&o->run) * sizeof *b->loss));
    return ari_process_broadcast(p, &b->max_error_vs_f64, sizeof b->max_error_vs_f64);
}

/* --- the whole ---------------------------------------------------------------------------------------------------- */

ar_status ari_text_ids(int64_t **ids, size_t batch, size_t seq, size_t vocab, const char *text, uint64_t seed)
{
    size_t count = 0, length = 0;
    ARI_OWNED unsigned char *bytes = NULL;
    AR_TRY(ari_mul_size(&count, batch, seq));
    AR_TRY(ari_text_load(&bytes, &length, text));
    AR_TRY(ARI_ALLOC(ids, count, "token ids"));
    const size_t start = (size_t)((seed * 7919u) % length);
    for (size_t i = 0; i < count; i++)
        (*ids)[i] = (int64_t)(bytes[(start + i) % length] % vocab);
    return AR_OK;
}

/* Explains a baseline that ended at its gradient norm: names the first tensor that is not finite. */
static ar_status name_not_finite(ar_status ended, ari_reference *ref)
{
    if (ended != AR_ERR_DATA)
        return ended;
    ari_reference_find_vacuous(ref);
    if (!ref->vacuous.tensor[0])
        return ended;
    return ar_error_set(ended, "%s; the first tensor that is not finite is %s of step %d", ar_error_message(),
                        ref->vacuous.tensor, ref->vacuous.step);
}

ar_status ari_text_batches(int64_t **ids, ar_batch **batch, const ar_run *r, size_t vocab, const char *text)
{
    const size_t steps = ari_run_steps(r);
    size_t rows = 0;
    AR_TRY(ari_mul_size(&rows, steps, r->batch));
    AR_TRY(ari_text_ids(ids, rows, r->seq, vocab, text, r->seed));
    AR_TRY(ARI_ALLOC_ZERO(batch, steps, "batches"));
    for (size_t i = 0; i < steps; i++)
        (*batch)[i] = (ar_batch){.batch = r->batch, .seq = r->seq, .input_ids = *ids + i * r->batch * r->seq};
    return AR_OK;
}

ar_status ari_random_documents(int32_t **document_ids, ar_batch *batch, size_t batches, size_t max_documents,
                               uint64_t seed)
{
    const uint64_t key = ari_stream_key(seed, "documents");
    const size_t rows = batch->batch, seq = batch->seq;
    size_t count = 0;
    if (max_documents > seq)
        return ar_error_set(AR_ERR_ARG,
                            "%zu documents in a sequence of %zu tokens: each has at least one; use at most %zu",
                            max_documents, seq, seq);
    AR_TRY(ari_mul_size(&count, batches * rows, seq));
    AR_TRY(ARI_ALLOC_ZERO(document_ids, count, "documents"));
    for (size_t row = 0; row < batches * rows; row++) {
        int32_t *documents = *document_ids + row * seq;
        const uint32_t step = (uint32_t)(row / rows);
        const size_t cuts = ari_random_u32(key, row % rows, step, 0) % max_documents;
        for (uint32_t cut = 0; seq > 1 && cut < cuts; cut++) /* cuts may coincide, which gives fewer documents */
            documents[1 + ari_random_u32(key, row % rows, step, cut + 1) % (seq - 1)] = 1;
        for (size_t i = 1; i < seq; i++)
            documents[i] += documents[i - 1];
        batch[row / rows].documents = *document_ids + row / rows * rows * seq;
    }
    return AR_OK;
}

/* Pads the ranks' batches by repeating rows without targets. Copies use the same random numbers as their originals, so
 * a value that is finite in the original is finite in the copy, and unused rows put no NaN into sums. */
static ar_status pad_batches(ari_check_base *b, const ar_check_options *o)
{
    const size_t steps = ari_run_steps(&o->run), seq = o->run.seq, rows = o->run.batch + o->padding;
    size_t count = 0;
    AR_TRY(ari_mul_size(&count, rows * steps, seq));
    AR_TRY(ARI_ALLOC_ZERO(&b->padded, steps, "batches"));
    AR_TRY(ari_alloc_zero((void **)&b->padded_ids, count, 2 * sizeof *b->padded_ids, "padded batches"));
    if (b->documents)
        AR_TRY(ARI_ALLOC_ZERO(&b->padded_documents, count, "padded batches"));
    for (size_t padded_row = 0; padded_row < rows * steps; padded_row++) {
        const size_t row = padded_row % rows, src_offset = row % o->run.batch * seq;
        const ar_batch *src_batch = &b->batch[padded_row / rows];
        int64_t *ids = b->padded_ids + padded_row * seq, *labels = ids + count;
        int32_t *documents = b->documents ? b->padded_documents + padded_row * seq : NULL;
        for (size_t i = 0; i < seq; i++) {
            ids[i] = src_batch->input_ids[src_offset + i];
            labels[i] = row < o->run.batch ? ids[i] : AR_IGNORE_INDEX;
            if (documents)
                documents[i] = src_batch->documents[src_offset + i];
        }
        if (row == 0)
            b->padded[padded_row / rows] = (ar_batch){.batch = rows,
                                                      .seq = seq,
                                                      .input_ids = ids,
                                                      .labels = labels,
                                                      .documents = documents,
                                                      .distinct = o->run.batch};
    }
    b->ref.padding = o->padding;
    return AR_OK;
}

ar_status ari_check_base_init(ari_check_base *b, const ar_check_options *o, const ar_config *c, const char *folder)
{
    *b = (ari_check_base){.config = *c};
    AR_TRY(ari_weights_load(&b->weights, c, folder));
    AR_TRY(ARI_ALLOC_ZERO(&b->loss, ari_run_steps(&o->run), "losses"));
    AR_TRY(ari_text_batches(&b->ids, &b->batch, &o->run, c->vocab, o->text));
    if (o->documents > 1)
        AR_TRY(ari_random_documents(&b->documents, b->batch, ari_run_steps(&o->run), o->documents, o->run.seed));
    AR_TRY(ari_documents_text(&b->documents_text, b->batch, ari_run_steps(&o->run)));
    const uint64_t start = ari_now_ns();
    AR_TRY(name_not_finite(o->run.process ? run_shared(b, o) : ari_check_baseline(b, o), &b->ref));
    b->seconds = (double)(ari_now_ns() - start) * 1e-9;
    return o->padding > 0 ? pad_batches(b, o) : AR_OK;
}

void ari_check_base_fini(ari_check_base *b)
{
    ari_reference_fini(&b->ref);
    ari_weights_destroy(b->weights);
    free(b->loss);
    free(b->batch);
    free(b->padded);
    free(b->padded_ids);
    free(b->padded_documents);
    free(b->documents_text);
    free(b->documents);
    free(b->ids);
    *b = (ari_check_base){.weights = NULL};
}
