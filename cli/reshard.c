/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/reshard.h"

#include <stdlib.h>
#include <string.h>

#include "cli/options/args.h"
#include "cli/options/run.h"
#include "cli/shared/progress.h"
#include "cli/shared/table.h"
#include "ref/core/text.h"
#include "ref/io/json.h"
#include "ref/models/stages.h"

typedef struct reshard_values {
    ari_common common;
    ar_reshard_options o;
} reshard_values;

#define ARI_VALUES reshard_values
static const ari_option options[] = {
    ARI_OPTION_SECTION("output"),
    ARI_OPTION_FOLDER("out", o.out, "DIR",
                      "where it goes: a folder that is not there, is empty, or was begun by the same request"),
    ARI_OPTION_SECTION("layout"),
    ARI_OPTION_INT("tp", o.tp, 1, 65536, "N",
                   "tensor-parallel ranks (default 1; with all three 1, one Hugging Face folder)"),
    ARI_OPTION_INT("pp", o.pp, 1, 65536, "N", "pipeline ranks: the layers shared out evenly (default 1)",
                   .more = "As the ranks of a pipeline in train hold them: where the layers do not divide, stages in "
                           "the middle have one more. The embedding is on the first stage, final norm and LM head on "
                           "the last, tied weights on both."),
    ARI_OPTION_INT("virtual-stages", o.virtual_stages, 1, 256, "V",
                   "with --pp: stages that each rank holds, stage s being rank s mod pp's (default 1)"),
    ARI_OPTION_ROW(STAGES, "stages", o.stages, .value = "LIST",
                   .help = "with --pp: layers of each stage, as 3,5,4 (default: evenly)"),
    ARI_OPTION_INT("dp", o.dp, 1, 65536, "N",
                   "data-parallel ranks: rank (p, d, t) is p*dp*tp + d*tp + t; all of a group read one file (default "
                   "1)",
                   .more = "Only the ranks with d = 0 have a file."),
    ARI_OPTION_FLAG("dp-copies", o.dp_copies, "a file of its own for every data-parallel rank"),
    ARI_OPTION_SECTION("format"),
    ARI_OPTION_FLAG("embedding-hidden", o.embedding_hidden,
                    "split the embedding along the hidden dimension (default: along the vocabulary)"),
    ARI_OPTION_SIZE("pad-vocab", o.pad_vocab, 1, 1 << 20, "N",
                    "pad the vocabulary with rows of zeros to a multiple of N (default: as the config has it)",
                    .more = "Rows past the vocabulary of config.json are cut, with a note, when they are read."),
    ARI_OPTION_BYTES("shard-size", o.shard_bytes, 1, 9e15, "BYTES",
                     "merged: the most tensors of one file, as 5GB or 500MiB (default 5GB)",
                     .more = "More make shards with an index."),
    ARI_OPTION_SECTION("input"),
    ARI_OPTION_FILE("map", o.map, "FILE", "how the files of IN fit together, where they do not say"),
    ARI_OPTION_FILE("config", o.config, "FILE", "config.json, or a folder with one (default: the one in IN)",
                    .more = "Merging needs none."),
    ARI_OPTION_SECTION("checks"),
    ARI_OPTION_FLAG("strict", o.strict,
                    "refuse tensors that the config does not have, missing ones, and rows past the vocabulary",
                    .more = "They are otherwise noted; tensors that the config does not have are copied whole."),
    ARI_OPTION_FLAG("dry-run", o.dry_run, "say what would be written"),
    {0},
};

static const ari_positional positionals[] = {
    ARI_POSITIONAL("IN", FILE, o.in,
                   "a Hugging Face folder, a folder of per-rank files, or a checkpoint of anyrank train",
                   .required = true),
    {0},
};

/* --- what is told while it runs ----------------------------------------------------------------------------------- */

#define MOST_FILES 16 /* rows of the table */

typedef struct report {
    ari_progress progress; /* first: it is the library's user */
    const ar_reshard_options *o;
    ari_table table;
    size_t files;
    json_t *json_files, *notes;
} report;

static void on_note(void *user, const char *text)
{
    json_array_append_new(((report *)user)->notes, ari_json_text(text));
}

static void on_file(void *user, const ar_reshard_file *f)
{
    report *r = user;
    const char *state = r->o->dry_run ? "" : f->kept ? "kept" : "written";
    json_array_append_new(r->json_files,
                          json_pack("{s:s, s:I, s:I, s:b}", "file", f->name, "tensors", (json_int_t)f->tensors, "bytes",
                                    (json_int_t)f->bytes, "kept", (int)f->kept));
    if (r->files++ >= MOST_FILES)
        return;
    ari_table_row(&r->table, "%s\t%s\t%s\t%s", f->name, ARI_COUNT(f->tensors), ARI_BYTES(f->bytes), state);
}

/* --- the result --------------------------------------------------------------------------------------------------- */

static void print_layout(const ar_reshard_options *o)
{
    char stages[ARI_STAGES_TEXT];
    if (o->tp == 1 && o->dp == 1 && o->pp == 1)
        printf("merged");
    else
        printf("tp=%d", o->tp);
    if (o->dp > 1)
        printf(" dp=%d", o->dp);
    if (o->pp > 1)
        printf(" pp=%d", o->pp);
    if (o->virtual_stages > 1)
        printf(" (%d stages each)", o->virtual_stages);
    ari_stages_text(stages, &o->stages);
    if (o->stages.n > 0)
        printf(" stages=%s", stages);
}

static void print_result(const report *r, const ar_reshard_result *result)
{
    const ar_reshard_options *o = r->o;
    size_t i;
    json_t *note;
    if (r->files > MOST_FILES)
        printf("  .. and %zu more\n", r->files - MOST_FILES);
    json_array_foreach(r->notes, i, note) printf("note: %s\n", json_string_value(note));
    printf("%s%s tensors, ", o->dry_run ? "would write " : "", ARI_COUNT(result->tensors));
    print_layout(o);
    printf(": %s in %s file%s", ARI_BYTES(result->bytes), ARI_COUNT(result->files), ARI_PLURAL(result->files));
    if (result->files_kept > 0)
        printf(" (%s kept of a former run)", ARI_COUNT(result->files_kept));
    if (!o->dry_run)
        printf(", in %s: %s", ARI_SECONDS(result->seconds), ARI_SHOW(o->out));
    printf("\n");
}

static json_t *as_json(const report *r, const ar_reshard_result *result)
{
    const ar_reshard_options *o = r->o;
    json_t *rest =
        json_pack("{s:s, s:{s:i, s:i, s:i, s:i, s:o}, s:I, s:I, s:I, s:I, s:I, s:o, s:o*, s:O, s:O}", "result",
                  o->dry_run ? "dry run" : "written", "layout", "tp", o->tp, "dp", o->dp, "pp", o->pp, "virtual_stages",
                  o->virtual_stages, "stages", ari_stages_json(&o->stages), "tensors", (json_int_t)result->tensors,
                  "bytes", (json_int_t)result->bytes, "largest_tensor_bytes", (json_int_t)result->largest_tensor,
                  "files_kept", (json_int_t)result->files_kept, "files_copied", (json_int_t)result->copied, "seconds",
                  ari_json_number(result->seconds), "out", o->out ? ari_json_text(o->out) : NULL, "notes", r->notes,
                  "files", r->json_files);
    return ari_json_whole(ari_json_begin("reshard"), rest);
}

static ar_status run_reshard(void *values, int *exit_code)
{
    const reshard_values *v = values;
    (void)exit_code;
    static const ari_column columns[] = {
        {"file", ARI_LEFT}, {"tensors", ARI_RIGHT}, {"bytes", ARI_RIGHT}, {"", ARI_LEFT}};
    report r = {.o = &v->o, .table = ARI_TABLE(columns), .json_files = json_array(), .notes = json_array()};
    ar_reshard_result result;
    const bool text = ari_wants_text(&v->common);
    if (!v->o.out && !v->o.dry_run)
        return ar_error_set(AR_ERR_ARG, "--out DIR is missing: it says where the files go");
    ar_reshard_options o = v->o;
    o.progress = ari_progress_show;
    o.note = on_note;
    o.file = on_file;
    o.user = &r;
    ari_progress_begin(&r.progress, &v->common);
    ar_status st = ar_reshard(&result, &o);
    if (st == AR_ERR_NOT_FOUND) /* a config */
        st = ar_error_set(st, "%s; give --config FILE", ar_error_message());
    ari_progress_end(&r.progress);
    const ar_status printed = ari_table_end(&r.table, text && st == AR_OK ? stdout : NULL, 2);
    st = st == AR_OK ? printed : st;
    if (text && st == AR_OK)
        print_result(&r, &result);
    if (st == AR_OK)
        st = ari_json_end(as_json(&r, &result), &v->common);
    json_decref(r.json_files);
    json_decref(r.notes);
    return st;
}

static const reshard_values defaults = {.o = {.tp = 1, .dp = 1, .pp = 1, .virtual_stages = 1}};

const ari_args_spec ari_reshard_spec = {
    .command = "reshard",
    .summary = "Splits a checkpoint over ranks, merges it, or both at once; bits are copied, never computed.",
    .example = "anyrank reshard MODEL --tp 4 --out MODEL-tp4\nanyrank reshard MODEL-tp4 --out MODEL-merged\n"
               "anyrank reshard MODEL-tp4 --tp 2 --pp 2 --out MODEL-tp2-pp2",
    .options = options,
    .positionals = positionals,
    .size = sizeof(reshard_values),
    .defaults = &defaults,
    .run = run_reshard,
};
