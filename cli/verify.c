/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/verify.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "cli/command.h"
#include "cli/main.h"
#include "cli/progress.h"
#include "cli/verify_report.h"
#include "ref/core/out.h"
#include "ref/core/size.h"

typedef struct verify_values {
    ari_common common;
    const char *reference, *other, *map, *reference_map, *allowed, *html;
    bool bits, no_equal_nan, only_common;
    size_t ulp;        /* SIZE_MAX: not given */
    double rtol, atol; /* below 0: not given */
    ari_strings only, leave;
    int tp, dp;
    size_t heads, kv_heads, max_report;
} verify_values;

static const ari_option options[] = {
    {.name = "bits",
     .kind = ARI_OPT_FLAG,
     .at = offsetof(verify_values, bits),
     .help = "the same is what has the same bits (the default)"},
    {.name = "ulp",
     .kind = ARI_OPT_SIZE,
     .at = offsetof(verify_values, ulp),
     .value = "N",
     .help = "or what is at most N steps of the reference's dtype apart",
     .more = "From -0 to +0 is one."},
    {.name = "rtol",
     .kind = ARI_OPT_DOUBLE,
     .at = offsetof(verify_values, rtol),
     .max = DBL_MAX,
     .value = "X",
     .help = "or |other - reference| <= atol + rtol*|reference|"},
    {.name = "atol",
     .kind = ARI_OPT_DOUBLE,
     .at = offsetof(verify_values, atol),
     .max = DBL_MAX,
     .value = "Y",
     .help = "the absolute part of it; one of the two that is not given is 0"},
    {.name = "sensitivity",
     .kind = ARI_OPT_FILE,
     .at = offsetof(verify_values, allowed),
     .value = "ALLOWED.safetensors",
     .help = "or what this file of grads --sensitivity allows each tensor"},
    {.name = "map",
     .kind = ARI_OPT_FILE,
     .at = offsetof(verify_values, map),
     .value = "FILE",
     .help = "how the files of OTHER make full tensors: shards, packing, transposition, names"},
    {.name = "reference-map",
     .kind = ARI_OPT_FILE,
     .at = offsetof(verify_values, reference_map),
     .value = "FILE",
     .help = "the same for REFERENCE"},
    {.name = "only",
     .kind = ARI_OPT_STRINGS,
     .at = offsetof(verify_values, only),
     .value = "GLOB[,GLOB]",
     .help = "only tensors of these names; may be given several times"},
    {.name = "ignore",
     .kind = ARI_OPT_STRINGS,
     .at = offsetof(verify_values, leave),
     .value = "GLOB[,GLOB]",
     .help = "no tensors of these names; may be given several times"},
    {.name = "common",
     .kind = ARI_OPT_FLAG,
     .at = offsetof(verify_values, only_common),
     .help = "compare what both have; what only one has is left out and counted, not a difference"},
    {.name = "no-equal-nan",
     .kind = ARI_OPT_FLAG,
     .at = offsetof(verify_values, no_equal_nan),
     .help = "NaN against NaN is a difference",
     .more = "Otherwise it is the same, by --bits if the payloads are."},
    {.name = "html",
     .kind = ARI_OPT_FILE,
     .at = offsetof(verify_values, html),
     .value = "FILE.html",
     .help = "write the report as a page too, which needs no network"},
    {.name = "max-report",
     .kind = ARI_OPT_SIZE,
     .at = offsetof(verify_values, max_report),
     .value = "N",
     .help = "print at most N rows of a table (default 20)"},
    {.name = "tp",
     .kind = ARI_OPT_INT,
     .at = offsetof(verify_values, tp),
     .min = 1,
     .max = 4096,
     .value = "N",
     .help = "tensor-parallel ranks of OTHER's run, where its files do not tell: for the hints alone"},
    {.name = "dp",
     .kind = ARI_OPT_INT,
     .at = offsetof(verify_values, dp),
     .min = 1,
     .max = 4096,
     .value = "N",
     .help = "its data-parallel ranks, for the hints alone"},
    {.name = "heads",
     .kind = ARI_OPT_SIZE,
     .at = offsetof(verify_values, heads),
     .min = 1,
     .max = 1e6,
     .value = "H",
     .help = "attention heads of the model, for the hints alone"},
    {.name = "kv-heads",
     .kind = ARI_OPT_SIZE,
     .at = offsetof(verify_values, kv_heads),
     .min = 1,
     .max = 1e6,
     .value = "K",
     .help = "key/value heads of the model, for the hints alone"},
    {0},
};

static const ari_positional positionals[] = {
    {.name = "REFERENCE",
     .at = offsetof(verify_values, reference),
     .required = true,
     .help = "a .safetensors or .npy file, a checkpoint's folder or index, or a folder with a file of each rank",
     .kind = ARI_OPT_FILE},
    {.name = "OTHER",
     .at = offsetof(verify_values, other),
     .required = true,
     .help = "the dump to compare with it",
     .kind = ARI_OPT_FILE},
    {0},
};

const ari_args_spec ari_verify_spec = {
    .command = "verify",
    .summary = "Compares two dumps of tensors, and says where they part and what kind of mistake does that.",
    .example = "anyrank verify reference.safetensors run/ranks\nanyrank verify torch/grads.safetensors "
               "results/grads.safetensors --sensitivity results/allowed.safetensors\nanyrank verify a.safetensors "
               "b.safetensors --rtol 1e-5 --atol 1e-6 --only 'model.layers.0.*'",
    .options = options,
    .positionals = positionals,
    .common_at = offsetof(verify_values, common),
};

/* --- values ------------------------------------------------------------------------------------------------------- */

static ar_status choose_rule(ar_verify_options *o, const verify_values *v)
{
    const bool by_ulp = v->ulp != SIZE_MAX, by_tolerance = v->rtol >= 0.0 || v->atol >= 0.0;
    if (v->bits + by_ulp + by_tolerance + (v->allowed != NULL) > 1)
        return ar_error_set(
            AR_ERR_ARG,
            "--bits, --ulp, --rtol with --atol, and --sensitivity each say what counts as the same: give one of them");
    o->rule = by_ulp         ? AR_VERIFY_ULP
              : by_tolerance ? AR_VERIFY_TOLERANCE
              : v->allowed   ? AR_VERIFY_SENSITIVITY
                             : AR_VERIFY_BITS;
    o->ulp = by_ulp ? v->ulp : 0;
    o->rtol = v->rtol > 0.0 ? v->rtol : 0.0;
    o->atol = v->atol > 0.0 ? v->atol : 0.0;
    o->allowed = v->allowed;
    return AR_OK;
}

static bool same_file(const char *a, const char *b)
{
    struct stat x, y;
    return a && b && stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* What is read is not written over: the one of two names that was meant for a dump is easily in the other's place. */
static ar_status keep_inputs(const verify_values *v, const char *option, const char *path)
{
    const char *const inputs[] = {v->reference, v->other, v->map, v->reference_map, v->allowed};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++) {
        if (same_file(inputs[i], path))
            return ar_error_set(AR_ERR_ARG, "%s %s: that is %s, which is read; give the name of another file", option,
                                ARI_SHOW(path), ARI_SHOW(inputs[i]));
    }
    return AR_OK;
}

static ar_status check_files(const verify_values *v)
{
    AR_TRY(keep_inputs(v, "--json", v->common.json));
    AR_TRY(keep_inputs(v, "--html", v->html));
    AR_TRY(ari_args_check_paths("json", v->common.json, "html", v->html));
    AR_TRY(ari_args_check_path("html", v->html));
    return v->html ? ari_out_check(v->html) : AR_OK;
}

/* Globs of an option, each of whose values may be a list with commas. */
typedef struct globs {
    char *text; /* all values, ended where commas and ends were */
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
    char *to = g->text;
    for (size_t i = 0; i < s->n; i++) {
        memcpy(to, s->text[i], strlen(s->text[i]) + 1);
        for (char *next = to; next; g->n++) {
            g->glob[g->n] = strsep(&next, ",");
            if (!g->glob[g->n][0])
                return ar_error_set(AR_ERR_ARG, "--%s '%s': an empty glob matches nothing", option,
                                    ARI_SHOW(s->text[i]));
        }
        to += strlen(s->text[i]) + 1;
    }
    return AR_OK;
}

/* --- the run ------------------------------------------------------------------------------------------------------ */

static void show_progress(void *user, double fraction, const char *what)
{
    ari_progress_update(user, fraction, what);
}

static ar_status write_results(const verify_values *v, const ar_verify_report *r)
{
    if (v->html)
        AR_TRY(ar_verify_html(r, v->html));
    if (ari_wants_text(&v->common))
        AR_TRY(ari_verify_print(stdout, r, v->max_report));
    if (v->html && ari_wants_text(&v->common))
        printf("%s: the report as a page\n", ARI_SHOW(v->html));
    if (ari_wants_text(&v->common))
        ari_verify_print_verdict(stdout, r);
    return v->common.json ? ari_json_end(ari_verify_json(r), &v->common) : AR_OK;
}

static ar_status compare(ar_verify_report **gives, const verify_values *v, ar_verify_options *o)
{
    ari_progress progress;
    ari_progress_begin(&progress, v->common.quiet);
    o->progress = show_progress;
    o->progress_user = &progress;
    const ar_status st = ar_verify(gives, o);
    ari_progress_end(&progress);
    return st;
}

static ar_status run(const verify_values *v, bool *same)
{
    ar_verify_options o = {.reference = v->reference,
                           .other = v->other,
                           .map = v->map,
                           .reference_map = v->reference_map,
                           .common = v->only_common,
                           .nan_differs = v->no_equal_nan,
                           .tp = v->tp,
                           .dp = v->dp,
                           .heads = v->heads,
                           .kv_heads = v->kv_heads,
                           .threads = v->common.threads};
    globs only = {0}, leave = {0};
    ar_verify_report *r = NULL;
    ar_status st = AR_OK;
    AR_TRY(choose_rule(&o, v));
    AR_TRY(check_files(v));
    AR_TRY_TO(done, st, globs_init(&only, &v->only, "only"));
    AR_TRY_TO(done, st, globs_init(&leave, &v->leave, "ignore"));
    o.only = only.glob;
    o.only_count = only.n;
    o.leave = leave.glob;
    o.leave_count = leave.n;
    AR_TRY_TO(done, st, compare(&r, v, &o));
    AR_TRY_TO(done, st, write_results(v, r));
    *same = r->same;
done:
    ar_verify_report_destroy(r);
    globs_fini(&leave);
    globs_fini(&only);
    return st;
}

int ari_command_verify(int argc, char **argv)
{
    verify_values v = {.ulp = SIZE_MAX, .rtol = -1.0, .atol = -1.0, .max_report = 20};
    int exit_code = ARI_EXIT_SAME;
    bool same = false;
    if (!ari_args_begin(&ari_verify_spec, argc, argv, &v, &exit_code))
        return exit_code;
    const ar_status st = run(&v, &same);
    if (st != AR_OK) {
        ari_print_error("verify", st);
        return ari_exit_code(st);
    }
    return same ? ARI_EXIT_SAME : ARI_EXIT_DIFFERENT;
}
