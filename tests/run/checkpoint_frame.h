/* SPDX-License-Identifier: Apache-2.0 */
/* A folder in memory for the checkpoints of tiny runs: TestSuite(NAME, .init = begin, .fini = end). */
#pragma once

#include "anyrank/checkpoint.h"
#include "anyrank/train.h"
#include "ref/io/file.h"
#include "run/small_run.h"
#include "tests/support/test.h"

static char folder[64];
static char file[200];

static inline void begin(void)
{
    cr_assert(make_folder_in_memory(folder));
}

static inline void end(void)
{
    remove_all(folder);
}

static inline const char *in_folder(const char *name)
{
    snprintf(file, sizeof file, "%s/%s", folder, name);
    return file;
}

static inline void write_in(const char *name, const char *text)
{
    cr_assert_ok(ari_file_write(in_folder(name), text, strlen(text)));
}

static inline void expect_names(const char *want)
{
    char names[300];
    cr_assert_str_eq(names_in(names, sizeof names, folder), want);
}

OWNER(ar_checkpoint_writer, ar_checkpoint_writer_destroy)

static inline ar_checkpoint_writer *writer_of(size_t keep, bool fresh)
{
    const ar_checkpoint_options o = {.folder = folder, .max_checkpoints = keep, .fresh = fresh};
    ar_checkpoint_writer *w = NULL;
    cr_assert_ok(ar_checkpoint_writer_create(&w, &o));
    return w;
}

static inline ar_checkpoint *open_or_fail(void)
{
    ar_checkpoint *c = NULL;
    cr_assert_ok(ar_checkpoint_open(&c, folder));
    return c;
}

static inline void run_or_fail(small_run *r, const char *what)
{
    cr_assert_eq(small_run_do(r), AR_OK, "%s: %s", what, ar_error_message());
}

/* Saves step 2 of a run of a tiny model. */
static inline void save_one(int model, ar_parallel parallel)
{
    small_run r = small_run_of(model);
    r.run.parallel = parallel;
    r.last = 2;
    r.writer = writer_of(0, false);
    run_or_fail(&r, "save");
    ar_checkpoint_writer_destroy(r.writer);
}
