/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "anyrank/activation.h"
#include "anyrank/safetensors.h"
#include "ref/io/safetensors_private.h"
#include "ref/models/family.h"
#include "ref/models/parallel_private.h"
#include "support/bits.h"
#include "support/layout_draw.h"
#include "support/plan_draw.h"
#include "tests/support/temporary.h"
#include "verify/bytes/bytes.h"
#include "verify/check/check_run.h"
#include "verify/run/run.h"

enum { MOST_MASK = LAYOUT_DRAW_BATCH * LAYOUT_DRAW_HEADS * LAYOUT_DRAW_SEQ * LAYOUT_DRAW_SEQ };

static ar_status judge_run(const ar_check_run *run, const char *weights, const char *gradients)
{
    const ar_first_difference *f = &run->first;
    if (run->error)
        return ar_error_set(AR_ERR_DATA, "%s", run->error);
    if (run->has_difference && run->result == AR_CHECK_DIFFERENT)
        return ar_error_set(AR_ERR_DATA,
                            "step %d %s, rank %d: %zu of %zu differ, first [%zu %zu %zu %zu] is %a, expected %a; %zu "
                            "of %zu tensors differ\npattern: %s\nhint: %s",
                            f->step, f->tensor, f->rank, f->elements_different, f->elements, f->index[0], f->index[1],
                            f->index[2], f->index[3], (double)f->actual, (double)f->reference, run->tensors_different,
                            run->tensors, f->pattern, f->hint);
    if (run->bytes_counted != run->bytes_predicted)
        return ar_error_set(AR_ERR_DATA, "%zu bytes counted, %zu predicted", (size_t)run->bytes_counted,
                            (size_t)run->bytes_predicted);
    if (!run->has_difference &&
        (strcmp(run->weights_hash, weights) != 0 || strcmp(run->gradients_hash, gradients) != 0))
        return ar_error_set(AR_ERR_DATA, "the hashes differ: weights %s, expected %s; gradients %s, expected %s",
                            run->weights_hash, weights, run->gradients_hash, gradients);
    /* Huge weights overflow: the same bits are vacuous. */
    if ((run->result != AR_CHECK_SAME && run->result != AR_CHECK_VACUOUS) || run->tensors == 0 ||
        run->memory_difference[0] || run->shape_difference[0])
        return ar_error_set(AR_ERR_DATA, "result %d after %zu tensors: %s%s%s", (int)run->result, run->tensors,
                            run->memory_difference, run->shape_difference, run->call_difference);
    return AR_OK;
}

static ar_status judge_losses(const float *actual, const double *expected, const ar_run *run)
{
    for (size_t i = 0; i < ari_run_steps(run); i++) {
        const float want = (float)expected[i];
        if (memcmp(&actual[i], &want, sizeof want) != 0)
            return ar_error_set(AR_ERR_DATA, "the loss of step %zu is %a, expected %a", i + 1, (double)actual[i],
                                expected[i]);
    }
    return AR_OK;
}

static const char *activation_name(ar_activation act)
{
    static const char *const names[] = {
        [AR_ACT_GELU_ERF] = "gelu", [AR_ACT_GELU_TANH] = "gelu_new", [AR_ACT_SILU] = "silu", [AR_ACT_RELU] = "relu"};
    return names[act];
}

static void write_factors(FILE *f, const char *key, const float *factor, size_t n)
{
    fprintf(f, ", \"%s\": [", key);
    for (size_t i = 0; i < n; i++)
        fprintf(f, "%s%.9g", i > 0 ? ", " : "", (double)factor[i]);
    fprintf(f, "]");
}

/* What a rope_type has besides its name and factor. */
static void write_scaling(FILE *f, const ar_config *c)
{
    const ar_rope *r = &c->rope;
    if (r->kind == AR_ROPE_LLAMA3)
        fprintf(f, ", \"low_freq_factor\": %g, \"high_freq_factor\": %g", r->low_freq_factor, r->high_freq_factor);
    if (r->kind == AR_ROPE_YARN)
        fprintf(f, ", \"beta_fast\": %g, \"beta_slow\": %g, \"truncate\": %s, \"mscale\": %g, \"mscale_all_dim\": %g",
                r->beta_fast, r->beta_slow, r->truncate ? "true" : "false", r->mscale, r->mscale_all_dim);
    if (r->kind == AR_ROPE_LONGROPE) {
        write_factors(f, "short_factor", r->short_factor, ar_rope_dim(r, c->head_dim) / 2);
        write_factors(f, "long_factor", r->long_factor, ar_rope_dim(r, c->head_dim) / 2);
    }
    if (r->kind >= AR_ROPE_YARN)
        fprintf(f, ", \"original_max_position_embeddings\": %zu", r->original_positions);
    if ((r->kind == AR_ROPE_YARN || r->kind == AR_ROPE_LONGROPE) && r->attention_factor > 0.0)
        fprintf(f, ", \"attention_factor\": %g", r->attention_factor);
}

/* Each scaling in one of its two spellings: that of transformers 5, and the older one. */
static void write_rope(FILE *f, const ar_config *c)
{
    if (c->rope.rotary_dim > 0) /* truncated to it */
        fprintf(f, "\"partial_rotary_factor\": %.17g, ", ((double)c->rope.rotary_dim + 0.25) / (double)c->head_dim);
    if (c->arch == AR_ARCH_PHI3 && c->rope.kind == AR_ROPE_LONGROPE)
        fprintf(f, "\"original_max_position_embeddings\": %zu, ", c->rope.original_positions);
    static const char *const names[] = {"", "default", "linear", "dynamic", "yarn", "llama3", "longrope"};
    const ar_rope *r = &c->rope;
    if (r->kind == AR_ROPE_LLAMA3 || r->kind == AR_ROPE_LONGROPE)
        fprintf(f, "\"rope_parameters\": {\"rope_theta\": %g, \"rope_type\": \"%s\"", r->theta, names[r->kind]);
    else
        fprintf(f, "\"rope_theta\": %g, \"rope_scaling\": {\"type\": \"%s\"", r->theta, names[r->kind]);
    if (r->kind > AR_ROPE_DEFAULT && r->kind != AR_ROPE_LONGROPE)
        fprintf(f, ", \"factor\": %g", r->factor);
    write_scaling(f, c);
    fprintf(f, "}, ");
}

static void write_qwen2_window(FILE *f, const ar_config *c)
{
    fprintf(f, "\"use_sliding_window\": %s, \"sliding_window\": %zu", c->window > 0 ? "true" : "false",
            c->window > 0 ? c->window : 7);
    if (c->full_attention[0] == 1) /* of two layers at most the first */
        fprintf(f, ", \"max_window_layers\": 1, ");
    else if (c->full_attention[0] == 0)
        fprintf(f, ", \"max_window_layers\": 0, ");
    for (size_t i = 0; c->full_attention[0] > 1 && i < c->layers; i++)
        fprintf(f, "%s\"%s\"%s", i == 0 ? ", \"layer_types\": [" : ", ",
                ar_config_window(c, i) > 0 ? "sliding_attention" : "full_attention", i + 1 == c->layers ? "], " : "");
}

static void write_form(FILE *f, const ar_config *c, layout_draw_form form)
{
    static const char *const types[] = {"llama", "qwen2", "mistral", "phi3"};
    fprintf(f, "{\"model_type\": \"%s\", ", types[form]);
    if (form == DRAW_LLAMA)
        fprintf(f, "\"attention_bias\": %s, \"mlp_bias\": %s, ", c->qkv_bias ? "true" : "false",
                c->mlp_bias ? "true" : "false");
    else if (form == DRAW_QWEN2)
        write_qwen2_window(f, c);
    else if (c->window > 0)
        fprintf(f, "\"sliding_window\": %zu, ", c->window);
    else
        fprintf(f, "\"sliding_window\": null, ");
}

static void write_llama(FILE *f, const layout_draw *d)
{
    const ar_config *c = &d->config;
    write_form(f, c, d->form);
    write_rope(f, c);
    fprintf(f,
            "\"vocab_size\": %zu, \"hidden_size\": %zu, \"intermediate_size\": %zu, "
            "\"num_hidden_layers\": %zu, \"num_attention_heads\": %zu, \"num_key_value_heads\": %zu, "
            "\"head_dim\": %zu, \"hidden_act\": \"%s\", \"max_position_embeddings\": %zu, \"rms_norm_eps\": 1e-5, "
            "\"tie_word_embeddings\": %s, \"initializer_range\": 0.3}\n",
            c->vocab, c->hidden, c->ffn, c->layers, c->heads, c->kv_heads, c->head_dim, activation_name(c->activation),
            c->rope.kind == AR_ROPE_DYNAMIC ? c->rope.original_positions : c->max_positions,
            c->tied ? "true" : "false");
}

static void write_gpt2(FILE *f, const layout_draw *d)
{
    const ar_config *c = &d->config;
    fprintf(f,
            "{\"model_type\": \"gpt2\", \"vocab_size\": %zu, \"n_embd\": %zu, \"n_inner\": %zu, \"n_layer\": %zu, "
            "\"n_head\": %zu, \"n_positions\": %zu, \"activation_function\": \"%s\", \"tie_word_embeddings\": %s, "
            "\"initializer_range\": 0.3}\n",
            c->vocab, c->hidden, c->ffn, c->layers, c->heads, c->max_positions, activation_name(c->activation),
            c->tied ? "true" : "false");
}

static void write_stack(FILE *f, const layout_draw *d)
{
    const ar_config *c = &d->config;
    fprintf(f,
            "{\"model_type\": \"anyrank-stack\", \"vocab_size\": %zu, \"hidden_size\": %zu, "
            "\"intermediate_size\": %zu, \"num_hidden_layers\": %zu, \"num_attention_heads\": %zu, "
            "\"num_key_value_heads\": %zu, \"hidden_act\": \"%s\", \"max_position_embeddings\": %zu, "
            "\"causal\": %s, \"initializer_range\": 0.3}\n",
            c->vocab, c->hidden, c->ffn, c->layers, c->heads, c->kv_heads, activation_name(c->activation),
            c->max_positions, c->causal ? "true" : "false");
}

static ar_status write_config(const char *path, const layout_draw *d)
{
    static void (*const write[])(FILE *, const layout_draw *) = {[AR_ARCH_LLAMA] = write_llama,
                                                                 [AR_ARCH_GPT2] = write_gpt2,
                                                                 [AR_ARCH_STACK] = write_stack,
                                                                 [AR_ARCH_PHI3] = write_llama};
    FILE *f = fopen(path, "w");
    if (!f)
        return ar_error_set(AR_ERR_IO, "%s cannot be written", path);
    if (d->json[0])
        fputs(d->json, f);
    else
        write[d->config.arch](f, d);
    return fclose(f) == 0 ? AR_OK : ar_error_set(AR_ERR_IO, "%s cannot be written", path);
}

typedef struct written {
    const layout_draw *d;
    size_t n;
    ar_st_tensor tensor[2048];
    char name[2048][128];
} written;

static ar_status fill_tensor(void *user, const char *name, int ndim, const size_t *shape)
{
    written *w = user;
    ar_st_tensor *t = &w->tensor[w->n];
    const size_t count = ari_volume(shape, ndim);
    float *values = malloc((count + 1) * sizeof *values);
    if (!values || w->n == sizeof w->tensor / sizeof *w->tensor)
        return ar_error_set(AR_ERR_MEMORY, "no room for the weights of a draw");
    match_fill(values, count, (unsigned)w->d->run.seed, name, w->d->weights, 0.0);
    snprintf(w->name[w->n], sizeof w->name[0], "%s", name);
    *t = (ar_st_tensor){.name = w->name[w->n++], .dtype = AR_F32, .ndim = ndim, .data = values};
    memcpy(t->shape, shape, (size_t)ndim * sizeof *shape);
    return AR_OK;
}

static ar_status write_weights(const char *folder, const layout_draw *d)
{
    char path[128];
    OWNED(free) written *w = calloc(1, sizeof *w);
    if (!w)
        return ar_error_set(AR_ERR_MEMORY, "no memory for weights");
    w->d = d;
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    ar_status st = ari_param_list(&d->config, fill_tensor, w);
    if (st == AR_OK)
        st = ari_st_write(path, w->tensor, w->n, NULL, 0);
    for (size_t i = 0; i < w->n; i++)
        free((void *)(uintptr_t)w->tensor[i].data);
    return st;
}

static ar_status write_model(const char *folder, const layout_draw *d)
{
    char path[128];
    snprintf(path, sizeof path, "%s/config.json", folder);
    AR_TRY(write_config(path, d));
    return d->given ? write_weights(folder, d) : AR_OK;
}

static bool same_rope(const ar_rope *a, const ar_rope *b)
{
    const bool original = b->kind >= AR_ROPE_DYNAMIC, yarn = b->kind == AR_ROPE_YARN,
               lists = b->kind == AR_ROPE_LONGROPE;
    return a->kind == b->kind && (!b->kind || a->theta == b->theta) && a->rotary_dim == b->rotary_dim &&
           (b->kind <= AR_ROPE_DEFAULT || a->factor == b->factor) &&
           (!original || a->original_positions == b->original_positions) &&
           (b->kind != AR_ROPE_LLAMA3 ||
            (a->low_freq_factor == b->low_freq_factor && a->high_freq_factor == b->high_freq_factor)) &&
           ((!yarn && !lists) || a->attention_factor == b->attention_factor) &&
           (!yarn || (a->beta_slow == b->beta_slow && a->truncate == b->truncate && a->mscale == b->mscale)) &&
           (!lists || (memcmp(a->short_factor, b->short_factor, sizeof a->short_factor) == 0 &&
                       memcmp(a->long_factor, b->long_factor, sizeof a->long_factor) == 0));
}

/* What was read from the file is what was drawn. */
static ar_status judge_config(const ar_config *read, const ar_config *drawn)
{
    bool same = read->qkv_bias == drawn->qkv_bias && read->out_bias == drawn->out_bias &&
                read->mlp_bias == drawn->mlp_bias && read->tied == drawn->tied && read->unknown_keys == 0;
    same = same && read->mtp == drawn->mtp;
    same = same && same_rope(&read->rope, &drawn->rope) && read->max_positions == drawn->max_positions;
    for (size_t i = 0; i < drawn->layers; i++)
        same = same && ar_config_window(read, i) == ar_config_window(drawn, i);
    return same ? AR_OK : ar_error_set(AR_ERR_DATA, "the file was read as another model than was written");
}

static ar_status judge_report(const ar_check_report *r, const layout_draw *d)
{
    double losses[LAYOUT_DRAW_STEPS] = {0};
    if (r->runs != 1)
        return ar_error_set(AR_ERR_DATA, "%zu runs in place of one", r->runs);
    for (size_t i = 0; i < ari_run_steps(&d->run); i++)
        losses[i] = (double)r->loss[i];
    AR_TRY(judge_config(&r->config, &d->config));
    AR_TRY(judge_run(&r->run[0], r->weights_hash, r->gradients_hash));
    if (r->run[0].tensors != r->tensors || r->run[0].elements != r->elements)
        return ar_error_set(AR_ERR_DATA, "%zu of %zu tensors compared", r->run[0].tensors, r->tensors);
    return judge_losses(r->run[0].loss, losses, &d->run);
}

ar_status layout_draw_add_plan(layout_draw *d, uint64_t *seed)
{
    char text[PLAN_DRAW_TEXT];
    ar_plan plan, unused = d->run.plan;
    if (!plan_draw_knows(&d->config))
        return AR_OK;
    plan_draw(text, seed, &d->config, (plan_draw_options){.sp = d->run.parallel.sp && d->run.parallel.tp > 1});
    AR_TRY(ar_plan_parse(&plan, text, strlen(text), "drawn"));
    if (plan_draw_below(seed, 2) &&
        ari_parallel_check(&d->run.parallel, &d->config, &plan, d->run.batch, d->run.seq) == AR_OK)
        d->run.plan = plan;
    else
        unused = plan;
    ar_plan_fini(&unused);
    return AR_OK;
}

ar_status layout_draw_check(ar_check_report **gives, const layout_draw *d, ar_precision precision, const char *fault)
{
    SCOPED(temp_end) const temp_path folder = temp_folder();
    AR_TRY(write_model(folder.path, d));
    ar_check_options o = {.run = d->run,
                          .parallel = &d->run.parallel,
                          .layouts = 1,
                          .documents = d->documents,
                          .padding = d->more_rows,
                          .strict_predictions = true,
                          .skip_f64 = true};
    o.run.model = folder.path;
    if (precision != AR_PRECISION_F32) {
        o.run.numerics = AR_NUMERICS_NATIVE;
        o.run.precision = precision;
    }
    o.run.fault = fault;
    o.run.parallel = (ar_parallel){.tp = 0};
    return ar_check(gives, &o);
}

static ar_status run_check(const layout_draw *d)
{
    OWNED(ar_check_report_destroy) ar_check_report *r = NULL;
    AR_TRY(layout_draw_check(&r, d, AR_PRECISION_F32, NULL));
    return judge_report(r, d);
}

typedef struct step_data {
    ar_batch batch;
    int64_t ids[LAYOUT_DRAW_TOKENS], labels[LAYOUT_DRAW_TOKENS];
    int64_t positions[LAYOUT_DRAW_TOKENS];
    int32_t documents[LAYOUT_DRAW_TOKENS];
    uint8_t padding[LAYOUT_DRAW_TOKENS];
    float additive[MOST_MASK];
} step_data;

static uint64_t next(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

static void ignore_sample(step_data *t, const layout_draw *d, size_t sample)
{
    for (size_t i = 0; i < d->run.seq; i++)
        t->labels[sample * d->run.seq + i] = AR_IGNORE_INDEX;
}

/* Rows of documents of a few places each, and positions in no order. */
static void fill_places(step_data *t, const layout_draw *d, uint64_t seed)
{
    uint64_t state = ~seed;
    for (size_t i = 0; i < d->run.batch * d->run.seq; i++) {
        const bool begins = next(&state) % 4 == 0;
        t->documents[i] = i % d->run.seq == 0 ? 0 : t->documents[i - 1] + begins;
        t->positions[i] = (int64_t)(next(&state) % d->config.max_positions);
    }
    t->batch.documents = d->packed ? t->documents : NULL;
    t->batch.position_ids = d->positions ? t->positions : NULL;
}

static void fill_step(step_data *t, const layout_draw *d, uint64_t seed)
{
    uint64_t state = seed;
    t->batch = (ar_batch){.batch = d->run.batch, .seq = d->run.seq, .input_ids = t->ids};
    for (size_t i = 0; i < LAYOUT_DRAW_TOKENS; i++) {
        t->ids[i] = (int64_t)(next(&state) % d->config.vocab);
        t->labels[i] = next(&state) % 4 == 0 ? AR_IGNORE_INDEX : (int64_t)(next(&state) % d->config.vocab);
        t->padding[i] = next(&state) % 3 > 0;
    }
    for (size_t sample = 0; sample < d->run.batch; sample++) {
        if (d->ignored == DRAW_IGNORED_STEP ? seed == d->run.seed
                                            : d->ignored == DRAW_IGNORED_SAMPLES && next(&state) % 2 == 0)
            ignore_sample(t, d, sample);
    }
    t->batch.labels = d->labels ? t->labels : NULL;
    t->batch.padding_mask = d->padding ? t->padding : NULL;
    fill_places(t, d, seed);
    if (!d->additive)
        return;
    t->batch.additive_mask = t->additive;
    t->batch.mask_batch = d->mask_per_sample ? d->run.batch : 1;
    t->batch.mask_heads = d->mask_per_head ? d->config.heads : 1;
    fill_values(t->additive, MOST_MASK, (unsigned)(seed % 1000), 4.0);
    for (size_t i = 0; i < MOST_MASK; i++)
        t->additive[i] = next(&state) % 5 == 0 ? -INFINITY : t->additive[i];
}

static ar_status run_reference(ari_reference *ref, double *losses, const layout_draw *d, const ar_batch *batches,
                               match_weights *w)
{
    ar_baseline_options o = ari_reference_options(&d->run, ref);
    o.weights = d->given ? match_weights_make : NULL;
    o.weights_user = w;
    AR_TRY(ar_baseline_run(&d->config, &o, batches, losses));
    return ari_reference_finish(ref);
}

static ar_status compare_steps(const layout_draw *d, const ari_reference *ref, const double *losses,
                               const ar_batch *batches, match_weights *w)
{
    SCOPED(ari_check_run_fini) ar_check_run run = {0};
    char weights[65], gradients[65];
    ar_sim_cluster timed; /* so that products are recorded */
    OWNED(ar_trace_destroy) ar_trace *trace = NULL;
    AR_TRY(ar_sim_cluster_parse(&timed, "inside=1us:1GB/s flops=1G"));
    AR_TRY(ar_trace_create(&trace));
    ari_cluster_options o = {.config = &d->config,
                             .run = d->run,
                             .batch = batches,
                             .weights = d->given ? match_weights_find : NULL,
                             .weights_user = w};
    o.run.model = NULL;
    o.run.sim.trace = trace;
    o.run.sim.cluster = &timed;
    const ari_step_case step = {.run = o.run, .config = &d->config, .repeats = d->packed || d->positions};
    const ari_step_case moved = {.run = o.run, .config = &d->config, .repeats = step.repeats};
    AR_TRY(ari_bytes_predict(&run.bytes_predicted, &moved));
    AR_TRY(ari_check_run(&run, ref, &o));
    AR_TRY(ari_reference_hashes(weights, gradients, ref, NULL));
    AR_TRY(judge_run(&run, weights, gradients));
    AR_TRY(judge_losses(run.loss, losses, &d->run));
    return ari_recorded_calls(&(const char *){NULL}, ref, &o, trace);
}

static ar_status run_steps(const layout_draw *d)
{
    SCOPED(match_weights_fini)
    match_weights w = {.seed = (unsigned)d->run.seed, .draw = d->weights};
    SCOPED(ari_reference_fini) ari_reference ref = {0};
    double losses[LAYOUT_DRAW_STEPS] = {0};
    ar_batch batches[LAYOUT_DRAW_STEPS];
    OWNED(free) step_data *data = calloc(LAYOUT_DRAW_STEPS, sizeof *data);
    if (!data)
        return ar_error_set(AR_ERR_MEMORY, "no memory for batches");
    for (int i = 0; i < LAYOUT_DRAW_STEPS; i++) {
        fill_step(&data[i], d, d->run.seed + (uint64_t)i);
        batches[i] = data[i].batch;
    }
    AR_TRY(run_reference(&ref, losses, d, batches, &w));
    return compare_steps(d, &ref, losses, batches, &w);
}

ar_status layout_draw_run(const layout_draw *d)
{
    return d->by_check ? run_check(d) : run_steps(d);
}
