/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/logprobs.h"

#include <math.h>
#include <stdio.h>

#include "cli/options/args.h"
#include "cli/options/run.h"
#include "cli/options/transport.h"
#include "cli/shared/progress.h"
#include "cli/shared/table.h"
#include "ref/core/text.h"
#include "ref/io/json.h"

typedef struct logprobs_values {
    ari_common common;
    ar_logprobs_options o; /* but for the run */
    ari_run_values r;
    int arithmetic;
} logprobs_values;

#define ARI_VALUES logprobs_values
static const ari_option options[] = {
    ARI_OPTION_SECTION("data"),
    ARI_OPTION_FILE("rollout", o.side[AR_LOGPROBS_ROLLOUT], "FILE.json",
                    "tokens and log-probabilities of the engine that sampled: JSON, JSON Lines, or a response of "
                    "vLLM's or SGLang's server",
                    .more = "A record is {\"tokens\": [..], \"logprobs\": [null, ..]}, or has \"prompt_ids\" and "
                            "\"response_ids\" with the response's \"logprobs\". vLLM is to be asked for "
                            "return_token_ids, SGLang for logprob_start_len 0."),
    ARI_OPTION_FILE("trainer", o.side[AR_LOGPROBS_TRAINER], "FILE.json",
                    "the same of the trainer, for the same tokens"),
    ARI_OPTION_FILE("input", o.input, "FILE", "tokens alone: such records, or input_ids as 'anyrank grads' reads them",
                    .more =
                        "Not needed with --rollout or --trainer. Of .safetensors, attention_mask and cu_seqlens say "
                        "where sequences are; each is computed at its own length, without padding."),
    ARI_OPTION_FOLDER(
        "other", o.other, "DIR",
        "a model folder whose weights a side may have used in place of the model's: an earlier step's; its config is "
        "not looked at"),
    ARI_OPTION_ENUM("arithmetic", arithmetic, ari_sensitivity_names,
                    "in which the sides compute, for what rounding may do: f32, tf32, bf16 (mixed precision), "
                    "bf16-pure, f16, f16-pure (default bf16-pure)"),
    ARI_OPTION_DOUBLE("within", o.within, 1e-30, 1e6, "X", "what a side may be off, in place of what rounding makes"),
    ARI_OPTION_SECTION("output"),
    ARI_OPTION_FILE("out", o.out, "FILE.jsonl", "tokens, log-probabilities and entropies, a line for each sequence",
                    .written = true),
    ARI_OPTION_SIZE("top", o.top, 1, 1000, "K", "the K most likely tokens of each place, in --out"),
    ARI_OPTION_GROUP(ari_plan_options, r),
    ARI_LAYOUT_OPTIONS("tensor-parallel ranks (default 1)",
                       "exact: the same bits in every layout; native: fp32 (default exact)"),
    ARI_PRECISION_OPTION,
    ARI_OPTION_FLAG("binary64", o.binary64,
                    "the numbers in binary64 throughout, by plain loops on one rank: slow, and within 1e-6 of any "
                    "other program's binary64",
                    .more = "They are the same for every batch and packing; there is no layout."),
    ARI_OPTION_GROUP(ari_step_layout_options, r),
    ARI_OPTION_GROUP(ari_pipeline_options, r),
    {0},
};

ARI_MODEL_POSITIONAL(ARI_MODEL_FOLDER, false);

static json_t *place_json(const ar_logprobs_place *p)
{
    return json_pack("{s:I, s:I, s:I, s:o, s:o}", "sequence", (json_int_t)p->sequence, "place", (json_int_t)p->at,
                     "token", (json_int_t)p->token, "given", ari_json_number(p->given), "model",
                     ari_json_number(p->reference));
}

static json_t *side_json(const ar_logprobs_side *s)
{
    json_t *o = json_object(), *worst = json_array();
    for (size_t i = 0; i < s->places; i++)
        json_array_append_new(worst, place_json(&s->place[i]));
    json_object_set_new(o, "off", json_boolean(s->off));
    json_object_set_new(o, "tokens", json_integer((json_int_t)s->tokens));
    json_object_set_new(o, "rms", ari_json_number(s->rms));
    json_object_set_new(o, "mean", ari_json_number(s->mean));
    json_object_set_new(o, "largest", ari_json_number(s->worst));
    json_object_set_new(o, "share_off", ari_json_number(s->share_off));
    json_object_set_new(o, "cause", s->cause ? json_string(s->cause) : json_null());
    json_object_set_new(o, "says", s->cause ? json_string(s->says) : json_null());
    json_object_set_new(o, "look_at", s->look_at ? json_string(s->look_at) : json_null());
    json_object_set_new(o, "explained", s->cause ? ari_json_number(s->explained) : json_null());
    json_object_set_new(o, "worst", worst);
    return o;
}

static bool is_off(const ar_logprobs_result *r)
{
    return r->side[AR_LOGPROBS_TRAINER].off || r->side[AR_LOGPROBS_ROLLOUT].off;
}

static const char *numerics_of(const logprobs_values *v, const ar_run *run)
{
    return v->o.binary64 ? "binary64" : ari_numerics_names[run->numerics];
}

static json_t *as_json(const ar_logprobs_result *r, const logprobs_values *v, const ar_run *run)
{
    json_t *o = ari_json_begin("logprobs");
    json_object_set_new(o, "result", json_string(is_off(r) ? "different" : "same"));
    json_object_set_new(o, "numerics", json_string(numerics_of(v, run)));
    json_object_set_new(o, "precision", json_string(v->o.binary64 ? "f64" : ar_precision_name(run->precision)));
    json_object_set_new(o, "layout", ari_layout_json(&run->parallel, 1, ari_layout_of_run));
    json_object_set_new(o, "weights", json_string(r->fresh ? "fresh" : "folder"));
    json_object_set_new(o, "sequences", json_integer((json_int_t)r->sequences));
    json_object_set_new(o, "tokens", json_integer((json_int_t)r->tokens));
    json_object_set_new(o, "mean_logprob", ari_json_number(r->mean));
    json_object_set_new(o, "mean_entropy", ari_json_number(r->entropy));
    json_object_set_new(o, "hash", json_string(r->hash));
    json_object_set_new(o, "seconds", ari_json_number(r->seconds));
    if (r->rounding_rms > 0.0)
        json_object_set_new(o, "rounding",
                            json_pack("{s:s, s:o, s:o}", "arithmetic", ari_sensitivity_names[v->arithmetic], "rms",
                                      ari_json_number(r->rounding_rms), "largest", ari_json_number(r->rounding_worst)));
    for (int k = 0; k < AR_LOGPROBS_SIDES; k++)
        json_object_set_new(o, ar_logprobs_side_name[k], r->side[k].tokens ? side_json(&r->side[k]) : json_null());
    return ari_json_whole(o, json_pack("{s:o}", "notes", ari_config_notes(NULL, &r->config)));
}

static ar_status print_sides(const ar_logprobs_result *r)
{
    static const ari_column columns[] = {{"", ARI_LEFT},      {"tokens", ARI_RIGHT}, {"off by (rms)", ARI_RIGHT},
                                         {"mean", ARI_RIGHT}, {"most", ARI_RIGHT},   {"", ARI_LEFT}};
    ari_table t = ARI_TABLE(columns);
    for (int k = 0; k < AR_LOGPROBS_SIDES; k++) {
        const ar_logprobs_side *s = &r->side[k];
        if (s->tokens)
            ari_table_row(&t, "%s\t%zu\t%.3g\t%+.3g\t%.3g\t%s%s%s", ar_logprobs_side_name[k], s->tokens, s->rms,
                          s->mean, s->worst, s->off ? "OFF" : "as the model, but for rounding",
                          !s->off && s->cause ? ": " : "", !s->off && s->cause ? s->says : "");
    }
    return ari_table_end(&t, stdout, 0);
}

static ar_status print_worst(const ar_logprobs_side *s, const char *name)
{
    const ari_column columns[] = {
        {"sequence", ARI_RIGHT}, {"place", ARI_RIGHT}, {"token", ARI_RIGHT}, {"model", ARI_RIGHT}, {name, ARI_RIGHT}};
    ari_table t = ARI_TABLE(columns);
    for (size_t i = 0; i < s->places; i++)
        ari_table_row(&t, "%zu\t%zu\t%lld\t%.6g\t%.6g", s->place[i].sequence, s->place[i].at,
                      (long long)s->place[i].token, s->place[i].reference, s->place[i].given);
    return ari_table_end(&t, stdout, 2);
}

static ar_status print_off(const ar_logprobs_side *s, const char *name)
{
    printf("\n%s is off: %s: %s", name, s->cause ? s->cause : "unknown",
           s->cause ? s->says : "its numbers are not finite");
    if (s->cause && s->look_at)
        printf(" (%.1f %% of the difference)\n  look at: %s", 100.0 * s->explained, s->look_at);
    printf("\n");
    return print_worst(s, name);
}

static ar_status print_result(const ar_logprobs_result *r, const logprobs_values *v, const ar_run *run)
{
    const ar_logprobs_side *trainer = &r->side[AR_LOGPROBS_TRAINER], *rollout = &r->side[AR_LOGPROBS_ROLLOUT];
    const char *verdict = trainer->off && rollout->off ? "both are off"
                          : trainer->off               ? "the trainer is off"
                          : rollout->off               ? "the rollout is off"
                                                       : "no side is off";
    if (trainer->tokens || rollout->tokens) {
        printf("%s\n\n", verdict);
        AR_TRY(print_sides(r));
        if (r->rounding_rms > 0.0)
            printf("rounding in %s makes %.3g (rms), %.3g at most\n", ari_sensitivity_names[v->arithmetic],
                   r->rounding_rms, r->rounding_worst);
        for (int k = 0; k < AR_LOGPROBS_SIDES; k++) {
            if (r->side[k].off)
                AR_TRY(print_off(&r->side[k], ar_logprobs_side_name[k]));
        }
        printf("\n");
    }
    printf("%zu token%s of %zu sequence%s (%s): log-probability %.6g, entropy %.6g in the mean\n", r->tokens,
           ARI_PLURAL(r->tokens), r->sequences, ARI_PLURAL(r->sequences),
           r->fresh ? "fresh weights" : "weights of the folder", r->mean, r->entropy);
    if (v->o.out)
        printf("%s\n", ARI_SHOW(v->o.out));
    ari_plan_print(stdout, &run->plan);
    ari_ranks_print(stdout, run, ar_parallel_world(&run->parallel));
    printf("%s, %s; hash %s\n", numerics_of(v, run), ARI_LAYOUT(&run->parallel, 1), r->hash);
    return AR_OK;
}

static ar_status run_it(const logprobs_values *v, ar_run *run, int *exit_code)
{
    ar_logprobs_result r;
    ar_logprobs_options o = v->o;
    ari_progress progress;
    AR_TRY(ari_layout_load(&v->r, run));
    o.run = *run;
    o.run.seed = v->common.seed;
    o.of = (ar_sensitivity)v->arithmetic;
    ari_progress_begin(&progress, &v->common);
    o.progress = ari_progress_show;
    o.progress_user = &progress;
    const ar_status st = ar_logprobs(&r, &o);
    ari_progress_end(&progress);
    if (!v->common.quiet)
        json_decref(ari_config_notes(stderr, &r.config));
    if (!v->common.quiet && st == AR_OK && r.fresh)
        fprintf(stderr,
                "note: %s has no weights: they are random, drawn from --seed, and the log-probabilities those of an "
                "untrained model, from which a trained model's trainer and rollout are far\n",
                ARI_SHOW(r.config.name));
    AR_TRY(st);
    if (ari_wants_text(&v->common))
        AR_TRY(print_result(&r, v, run));
    *exit_code = is_off(&r) ? ARI_EXIT_DIFFERENT : ARI_EXIT_SAME;
    return v->common.json ? ari_json_end(as_json(&r, v, run), &v->common) : AR_OK;
}

static const logprobs_values defaults = {.r = {.timeout = 60.0, .run.ddp.bucket_bytes = ARI_NOT_GIVEN},
                                         .arithmetic = AR_SENSITIVITY_BF16_PURE};

static ar_status run_logprobs(void *values, int *exit_code)
{
    const logprobs_values *v = values;
    AR_TRY(ari_layout_check(&v->r));
    if (!v->r.run.model)
        return ar_error_set(AR_ERR_ARG, "give a MODEL");
    if (!v->o.input && !v->o.side[0] && !v->o.side[1])
        return ar_error_set(AR_ERR_ARG, "give --rollout FILE, --trainer FILE, or --input FILE: the tokens are there");
    if (v->o.top > 0 && !v->o.out)
        return ar_error_set(AR_ERR_ARG, "--top goes with --out FILE, where the most likely tokens are written");
    const struct {
        bool given;
        const char *says;
    } of_sides[] = {{v->o.other != NULL, "--other goes with --rollout or --trainer, whose weights it may be"},
                    {v->o.within > 0.0, "--within goes with --rollout or --trainer, which it judges"},
                    {v->arithmetic != defaults.arithmetic, "--arithmetic is that of --rollout or --trainer: give one"}};
    for (size_t i = 0; i < sizeof of_sides / sizeof *of_sides && !v->o.side[0] && !v->o.side[1]; i++) {
        if (of_sides[i].given)
            return ar_error_set(AR_ERR_ARG, "%s", of_sides[i].says);
    }
    ARI_ENDED(ari_layout_unload) ar_run run = ari_run_of(&v->r, &v->common);
    return run_it(v, &run, exit_code);
}

const ari_args_spec ari_logprobs_spec = {
    .command = "logprobs",
    .summary = "Computes log-probabilities of given tokens, and says whose are off: the trainer's or the rollout's.",
    .example = "anyrank logprobs MODEL --rollout vllm.json --trainer trainer.jsonl\n"
               "anyrank logprobs MODEL --rollout sglang.json --other checkpoint-100\n"
               "anyrank logprobs MODEL --input tokens.jsonl --out logprobs.jsonl --top 5 --tp 2",
    .options = options,
    .positionals = positionals,
    .size = sizeof(logprobs_values),
    .defaults = &defaults,
    .run = run_logprobs,
};
