/* SPDX-License-Identifier: Apache-2.0 */
/* Finds out why a run differs: runs the layout again, writes the ranks and the reference as dumps, and asks
 * anyrank.explain to compare them. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ref/io/file.h"
#include "verify/check/check_run.h"
#include "verify/compare/report.h"
#include "verify/explain/explain.h"
#include "verify/reference/sensitivity.h"
#include "verify/reference/sensitivity_private.h"
#include "verify/writer/dump_ranks.h"

ARI_OWNER(ar_verify_report, ar_verify_report_destroy)

enum { PATH = 600 };

/* A folder of temporary files: the reference's dump, its allowances, and the ranks' folder. */
typedef struct evidence {
    char folder[PATH], reference[PATH], allowed[PATH], ranks[PATH];
} evidence;

static void evidence_fini(evidence *e)
{
    bool is_removed = false;
    if (e->folder[0] && ari_dump_folder_remove(e->ranks) == AR_OK && ari_dump_check_folder_clear(e->folder) == AR_OK)
        is_removed = rmdir(e->folder) == 0;
    (void)is_removed; /* files that another program has put there are kept */
}

static ar_status evidence_init(evidence *e)
{
    AR_TRY(ari_folder_make_temporary(e->folder, sizeof e->folder, "anyrank-check"));
    AR_TRY(ari_folder_path(e->reference, sizeof e->reference, e->folder, ARI_DUMP_REFERENCE));
    AR_TRY(ari_folder_path(e->allowed, sizeof e->allowed, e->folder, ARI_DUMP_ALLOWED));
    return ari_folder_path(e->ranks, sizeof e->ranks, e->folder, "ranks");
}

/* --- the dumps ---------------------------------------------------------------------------------------------------- */

/* facts: describe the run; for a module all fields except the name are zero. */
static ar_status write_reference(const evidence *e, const ari_reference *ref, const ari_cluster_options *o,
                                 const ar_config *config)
{
    ari_dump_facts facts;
    ar_run reference_run = o->run;
    reference_run.parallel = (ar_parallel){.tp = 1};
    reference_run.fault = NULL;
    AR_TRY(ari_dump_facts_of(&facts, config, NULL, o->batch));
    AR_TRY(ari_dump_reference_write(ref, e->reference, &facts));
    AR_TRY(ari_dump_model_write(e->folder, config, &reference_run));
    if (o->run.numerics != AR_NUMERICS_NATIVE)
        return AR_OK;
    return ari_allowances_write(ref, NULL, 0, e->allowed, ari_sensitivity_of_precision(o->run.precision), "");
}

static ar_status write_ranks(const evidence *e, const ari_dump_ranks *ranks, const ari_cluster_options *o,
                             const ar_config *config)
{
    ari_dump_facts facts;
    ar_run run = o->run;
    run.fault = NULL; /* the injected fault must be found from the values and not revealed */
    AR_TRY(ari_dump_facts_of(&facts, config, &run, o->batch));
    return ari_dump_ranks_write(ranks, e->ranks, &facts);
}

/* --- the question ------------------------------------------------------------------------------------------------- */

static void take_text(char *out, size_t cap, const json_t *answer, const char *key)
{
    const char *text = json_string_value(json_object_get(answer, key));
    snprintf(out, cap, "%s", text ? text : "");
}

/* A tensor of a later place in the step may say more than the first. */
static void take_answer(ar_first_difference *f, const json_t *answer)
{
    char tensor[sizeof f->tensor], hint[sizeof f->hint];
    take_text(tensor, sizeof tensor, answer, "tensor");
    take_text(hint, sizeof hint, answer, "hint");
    take_text(f->pattern, sizeof f->pattern, answer, "pattern");
    take_text(f->cause, sizeof f->cause, answer, "cause");
    take_text(f->look, sizeof f->look, answer, "look");
    tensor[strcspn(tensor, "@")] = '\0'; /* removes the step, which f->tensor does not contain */
    const bool is_other_tensor = hint[0] && strcmp(tensor, f->tensor) != 0;
    snprintf(f->hint, sizeof f->hint, "%.170s%s%.330s", is_other_tensor ? tensor : "", is_other_tensor ? ": " : "",
             hint);
}

static ar_status ask(ar_first_difference *f, const evidence *e, bool native)
{
    ARI_OWNED_BY(ar_verify_report_destroy) ar_verify_report *r = NULL;
    const ar_verify_options options = {.reference = e->reference,
                                       .other = e->ranks,
                                       .rule = native ? AR_VERIFY_SENSITIVITY : AR_VERIFY_BITS,
                                       .allowed = native ? e->allowed : NULL};
    json_auto_t *answer = NULL;
    AR_TRY(ar_verify(&r, &options));
    json_auto_t *request = json_pack("{s:o}", "report", ari_verify_report_json(r));
    AR_TRY(ari_explain(&answer, f->unexplained, sizeof f->unexplained, request));
    if (json_object_get(answer, "error"))
        take_text(f->unexplained, sizeof f->unexplained, answer, "error");
    else if (answer)
        take_answer(f, answer);
    return AR_OK;
}

/* --- the run ------------------------------------------------------------------------------------------------------ */

/* True if two equal runs have the same first difference. */
static bool same_difference(const ar_first_difference *a, const ar_first_difference *b)
{
    return a->step == b->step && strcmp(a->tensor, b->tensor) == 0 && a->rank == b->rank &&
           memcmp(a->index, b->index, sizeof a->index) == 0 && memcmp(&a->actual, &b->actual, sizeof a->actual) == 0 &&
           a->elements_different == b->elements_different;
}

static void tell_unsteady(ar_first_difference *f)
{
    snprintf(f->cause, sizeof f->cause, "unordered_sum");
    snprintf(f->hint, sizeof f->hint,
             "the same run has other values the second time, which exact numerics never has: values are read before "
             "they are written, or a sum takes its terms in the order in which ranks come");
    snprintf(f->look, sizeof f->look, "buffers that are reused before a transfer ends; waits on collectives");
}

/* Writes the ranks' dump of a repeated run, unless the run ends in an error. */
static ar_status run_again(ar_check_run *repeat, ari_dump_ranks *ranks, const ari_reference *ref,
                           const ari_cluster_options *options)
{
    ari_cluster_options o = *options;
    AR_TRY(ari_dump_ranks_create(ranks, &o.run.parallel, NULL));
    o.tap = ar_dump_listener_tap;
    o.tap_user = ranks->user;
    o.attempt++;
    o.run.sim.trace = NULL;
    return ari_check_run(repeat, ref, &o);
}

ar_status ari_check_explain(ar_check_run *run, const ari_reference *ref, const ari_cluster_options *o)
{
    static const ar_config no_model = {.name = ""};
    const ar_config *config = o->config ? o->config : &no_model;
    const bool native = o->run.numerics == AR_NUMERICS_NATIVE;
    ari_cluster_options options = *o;
    ARI_ENDED(evidence_fini) evidence e = {.folder = ""};
    ARI_ENDED(ari_check_run_fini) ar_check_run repeat = {.parallel = run->parallel};
    ARI_ENDED(ari_dump_ranks_fini) ari_dump_ranks ranks = {.ranks = 0};
    if (!run->has_difference || run->first.hint[0] || run->error)
        return AR_OK;
    if (o->run.process) {
        snprintf(run->first.unexplained, sizeof run->first.unexplained,
                 "ranks that are processes are not dumped; the same layout with ranks as threads tells the cause");
        return AR_OK;
    }
    AR_TRY(run_again(&repeat, &ranks, ref, &options));
    if (!repeat.has_difference || repeat.error || (!native && !same_difference(&run->first, &repeat.first))) {
        tell_unsteady(&run->first);
        return AR_OK;
    }
    AR_TRY(evidence_init(&e));
    AR_TRY(write_reference(&e, ref, o, config));
    AR_TRY(write_ranks(&e, &ranks, o, config));
    return ask(&run->first, &e, native);
}
