/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/verify.h"

#include <float.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "cli/options/args.h"
#include "cli/shared/progress.h"
#include "cli/verify/report.h"
#include "ref/core/atomic_file.h"
#include "ref/core/size.h"
#include "ref/io/json.h"
#include "verify/compare/report.h"
#include "verify/sketches/sketches.h"

ARI_OWNER(ar_verify_report, ar_verify_report_destroy)

typedef struct verify_values {
    ari_common common;
    ar_verify_options o; /* all options except the rule, its allowances, and the globs */
    const char *html;
    bool bits, normal, rounding, unexplained;
    size_t ulp;        /* SIZE_MAX: not given */
    double rtol, atol; /* negative: not given */
    ari_strings only, leave;
    size_t max_report;
} verify_values;

#define ARI_VALUES verify_values
static const ari_option options[] = {
    ARI_OPTION_SECTION("rule"),
    ARI_OPTION_FLAG("bits", bits, "the same is what has the same bits (the default)"),
    ARI_OPTION_SIZE("ulp", ulp, 0, 0, "N", "or what is at most N steps of the reference's dtype apart",
                    .details = "From -0 to +0 is one."),
    ARI_OPTION_DOUBLE("rtol", rtol, 0, DBL_MAX, "X", "or |other - reference| <= atol + rtol*|reference|"),
    ARI_OPTION_DOUBLE("atol", atol, 0, DBL_MAX, "Y", "the absolute part of it; one of the two that is not given is 0"),
    ARI_OPTION_FILE("sensitivity", o.allowed, "ALLOWED.safetensors",
                    "or what this file of grads --sensitivity allows each tensor"),
    ARI_OPTION_FLAG("rounding", rounding,
                    "or what rounding may change in REFERENCE's run, as capture(.., rounding=True) has measured it",
                    .details = "That is --sensitivity with allowed.safetensors in or beside REFERENCE."),
    ARI_OPTION_FLAG("normal", normal, "whether rounding explains the difference: each tensor's place among draws of it",
                    .details = "The draws are those of --sensitivity's file, else of allowed.safetensors in or beside "
                               "REFERENCE; without either a bound is derived."),
    ARI_OPTION_SECTION("mapping"),
    ARI_OPTION_FILE("map", o.map, "FILE", "how the files of OTHER make full tensors: names, shards, packing"),
    ARI_OPTION_FILE("reference-map", o.reference_map, "FILE", "the same for REFERENCE"),
    ARI_OPTION_SECTION("tensors"),
    ARI_OPTION_STRINGS("only", only, "GLOB[,GLOB]", "only tensors of these names; may be given several times"),
    ARI_OPTION_STRINGS("ignore", leave, "GLOB[,GLOB]", "no tensors of these names; may be given several times"),
    ARI_OPTION_FLAG(
        "common", o.common, "compare what both have; what only one has is left out and counted, not a difference",
        .details = "But a gradient is one, of a parameter that both have, in a step of which both have some."),
    ARI_OPTION_FLAG("all-matched", o.all_matched,
                    "a tensor that only one has is an error, and so is a rule of --map that matches none"),
    ARI_OPTION_SECTION("rule"),
    ARI_OPTION_FLAG("no-equal-nan", o.nan_differs, "NaN against NaN is a difference",
                    .details = "Otherwise it is the same, by --bits if the payloads are."),
    ARI_OPTION_SECTION("output"),
    ARI_OPTION_FILE("html", html, "FILE.html", "write the report as a page too, which needs no network",
                    .written = true),
    ARI_OPTION_SIZE("max-report", max_report, 0, 0, "N", "print at most N rows of a table (default 20)"),
    ARI_OPTION_FLAG("no-explain", unexplained, "do not look for the cause of a difference"),
    ARI_OPTION_SECTION("hints"),
    ARI_OPTION_INT("tp", o.tp, 1, 4096, "N",
                   "tensor-parallel ranks of OTHER's run, where its files do not tell: for the hints alone"),
    ARI_OPTION_INT("cp", o.cp, 1, 4096, "N", "its context-parallel ranks, for the hints alone"),
    ARI_OPTION_INT("dp", o.dp, 1, 4096, "N", "its data-parallel ranks, for the hints alone"),
    ARI_OPTION_SIZE("heads", o.heads, 1, 1e6, "H", "attention heads of the model, for the hints alone"),
    ARI_OPTION_SIZE("kv-heads", o.kv_heads, 1, 1e6, "K", "key/value heads of the model, for the hints alone"),
    {0},
};

static const ari_positional positionals[] = {
    ARI_POSITIONAL("REFERENCE", FILE, o.reference,
                   "a .safetensors or .npy file, a checkpoint's folder or index, or a folder with a file of each rank",
                   .required = true),
    ARI_POSITIONAL("OTHER", FILE, o.other, "the dump to compare with it", .required = true),
    {0},
};

/* --- values ------------------------------------------------------------------------------------------------------- */

static ar_status choose_rule(ar_verify_options *o, const verify_values *v)
{
    const bool by_ulp = v->ulp != SIZE_MAX, by_tolerance = v->rtol >= 0.0 || v->atol >= 0.0;
    if (v->bits + by_ulp + by_tolerance + (v->o.allowed != NULL) + v->rounding > 1)
        return ar_error_set(AR_ERR_ARG, "--bits, --ulp, --rtol with --atol, --sensitivity and --rounding each say what "
                                        "counts as the same: give one of them");
    if (v->rounding && !o->allowed)
        return ar_error_set(AR_ERR_NOT_FOUND,
                            "--rounding: there is no allowed.safetensors in or beside %s; capture(.., rounding=True) "
                            "writes one on one rank, and so does anyrank.rounding.measure",
                            ARI_SHOW(o->reference));
    if (v->normal && (v->bits || by_ulp || by_tolerance))
        return ar_error_set(AR_ERR_ARG,
                            "--normal judges by what rounding does, not by --bits, --ulp, --rtol or --atol");
    o->rule = by_ulp         ? AR_VERIFY_ULP
              : by_tolerance ? AR_VERIFY_TOLERANCE
              : o->allowed   ? AR_VERIFY_SENSITIVITY
              : v->normal    ? AR_VERIFY_TOLERANCE
                             : AR_VERIFY_BITS;
    o->ulp = by_ulp ? v->ulp : 0;
    o->rtol = v->rtol > 0.0 ? v->rtol : 0.0;
    o->atol = v->atol > 0.0 ? v->atol : 0.0;
    return AR_OK;
}

/* Globs of an option, each of whose values may be a list with commas. */
typedef struct globs {
    char *text; /* all values, with 0 bytes in place of commas */
    const char **glob;
    size_t n;
} globs;

static void globs_fini(globs *g)
{
    free(g->text);
    free(g->glob);
}

static ar_status globs_init(globs *g, const ari_strings *s, const char *option)
{
    size_t bytes = 1;
    for (size_t i = 0; i < s->n; i++)
        bytes += strlen(s->text[i]) + 1;
    AR_TRY(ari_alloc((void **)&g->text, bytes, 1, "globs"));
    AR_TRY(ari_alloc((void **)&g->glob, bytes, sizeof *g->glob, "globs"));
    char *dst = g->text;
    for (size_t i = 0; i < s->n; i++) {
        memcpy(dst, s->text[i], strlen(s->text[i]) + 1);
        for (char *cursor = dst; cursor; g->n++) {
            g->glob[g->n] = strsep(&cursor, ",");
            if (!g->glob[g->n][0])
                return ar_error_set(AR_ERR_ARG, "--%s '%s': an empty glob matches nothing", option,
                                    ARI_SHOW(s->text[i]));
        }
        dst += strlen(s->text[i]) + 1;
    }
    return AR_OK;
}

/* --- the run ------------------------------------------------------------------------------------------------------ */

/* Version of the JSON: increased when members are removed or change their meaning; 2 for "facts" and a row's
 * "considered". */
enum { VERIFY_SCHEMA = 2 };

/* Adds further results to the report's JSON. Takes ownership of the report; NULL if memory is short. */
static json_t *whole_json(json_t *report, const ar_verify_report *r, const ari_verify_cause *cause,
                          const ari_normal *normal)
{
    json_t *o = ari_json_begin("verify");
    json_object_set_new(o, "schema", json_integer(VERIFY_SCHEMA));
    if (normal)
        json_object_set_new(report, "normal", ari_normal_json(normal));
    ari_verify_cause_json(report, r, cause);
    return ari_json_merge(o, report);
}

static ar_status print_report(const verify_values *v, const ar_verify_report *r, const ari_verify_cause *cause,
                              const ari_normal *normal)
{
    if (!normal)
        return ari_verify_print(stdout, r, cause, v->max_report, v->html, "verify");
    AR_TRY(ari_verify_print_normal(stdout, normal));
    ari_verify_print_not_normal(stdout, normal, cause);
    if (v->html)
        printf("%s: the report as a page\n", ARI_SHOW(v->html));
    return AR_OK;
}

static ar_status run_comparison(int *exit_code, const verify_values *v, ar_verify_options *o)
{
    ARI_OWNED_BY(ar_verify_report_destroy) ar_verify_report *r = NULL;
    ARI_ENDED(ari_normal_fini) ari_normal judged = {0};
    ARI_ENDED(ari_verify_cause_fini) ari_verify_cause cause = {.answer = NULL};
    ARI_ENDED(ari_progress_end) ari_progress progress;
    const ari_normal *normal = v->normal ? &judged : NULL;
    ari_progress_begin(&progress, &v->common);
    o->progress = ari_progress_show;
    o->progress_user = &progress;
    const ar_status st = ar_verify(&r, o);
    ari_progress_clear(&progress);
    AR_TRY(st);
    if (normal)
        AR_TRY(ari_normal_judge(&judged, r, o->allowed));
    *exit_code = (normal ? judged.normal : r->same && r->unjudged == 0) ? ARI_EXIT_SAME : ARI_EXIT_DIFFERENT;
    json_auto_t *report = ari_verify_report_json(r);
    const bool explain = !v->unexplained && !r->same;
    if (explain || v->html)
        AR_TRY(ari_verify_ask(&cause, r, o, report, v->html, explain));
    ari_progress_end(&progress);
    if (ari_prints_text(&v->common))
        AR_TRY(print_report(v, r, &cause, normal));
    return v->common.json ? ari_json_end(whole_json(json_incref(report), r, &cause, normal), &v->common) : AR_OK;
}

/* Refuses options that need elements, which sketches do not have. */
static ar_status check_sketched(const verify_values *v, const bool *sketched)
{
    const struct {
        const char *name;
        bool is_set;
    } needing[] = {
        {"--html", v->html != NULL},
        {"--normal", v->normal},
        {"--no-equal-nan", v->o.nan_differs},
        {"--all-matched", v->o.all_matched},
        {"--map", sketched[1] && v->o.map != NULL},
        {"--reference-map", sketched[0] && v->o.reference_map != NULL},
        {"--tp, --cp, --dp, --heads and --kv-heads", v->o.tp || v->o.cp || v->o.dp || v->o.heads || v->o.kv_heads}};
    for (size_t i = 0; i < sizeof needing / sizeof *needing; i++) {
        if (needing[i].is_set)
            return ar_error_set(AR_ERR_UNSUPPORTED,
                                "%s: one of the runs has sketches in place of tensors: compare dumps, or leave it out",
                                needing[i].name);
    }
    return AR_OK;
}

static ar_status run_verify(void *values, int *exit_code)
{
    const verify_values *v = values;
    ar_verify_options o = v->o;
    ARI_ENDED(globs_fini) globs only = {0}, leave = {0};
    char draws[PATH_MAX];
    o.threads = v->common.threads;
    if ((v->normal || v->rounding) && !o.allowed && ari_normal_find_draws(draws, sizeof draws, o.reference))
        o.allowed = draws;
    AR_TRY(choose_rule(&o, v));
    AR_TRY(globs_init(&only, &v->only, "only"));
    AR_TRY(globs_init(&leave, &v->leave, "ignore"));
    o.only = only.glob;
    o.only_count = only.n;
    o.leave = leave.glob;
    o.leave_count = leave.n;
    bool sketched[2] = {false, false};
    AR_TRY(ari_is_sketched(&sketched[0], o.reference));
    AR_TRY(ari_is_sketched(&sketched[1], o.other));
    if (sketched[0] || sketched[1]) {
        AR_TRY(check_sketched(v, sketched));
        return ari_verify_sketches(exit_code, &o, &v->common, v->max_report);
    }
    return run_comparison(exit_code, v, &o);
}

static const verify_values defaults = {.ulp = SIZE_MAX, .rtol = -1.0, .atol = -1.0, .max_report = 20};

const ari_args_spec ari_verify_spec = {
    .command = "verify",
    .summary = "Compares two dumps of tensors, and says where they part and what kind of mistake does that.",
    .example = "anyrank verify reference.safetensors run/ranks\nanyrank verify torch/grads.safetensors "
               "results/grads.safetensors --sensitivity results/allowed.safetensors\nanyrank verify a.safetensors "
               "b.safetensors --rtol 1e-5 --atol 1e-6 --only 'model.layers.0.*'\nanyrank verify --normal one/dump "
               "eight/dump --sensitivity allowed.safetensors",
    .options = options,
    .positionals = positionals,
    .size = sizeof(verify_values),
    .defaults = &defaults,
    .run = run_verify,
};
