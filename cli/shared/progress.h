/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct ari_common;

/* Progress line of a long job on stderr: only on a terminal, only after a second, at most ten times a second, and
 * removed at the end. One thread uses it. Nothing else may print between begin and end without ari_progress_clear.
 *
 * With --progress-fd a program reads lines of JSON instead, {"fraction": 0.25, "seconds": 1.5, "what": ".."}, from the
 * start and equally often; `fraction` is null if unknown. A reader that has closed the pipe ends the command by
 * SIGPIPE, so that an abandoned job does not continue. */
typedef struct ari_progress {
    bool is_enabled;   /* stderr is a terminal and --quiet is not set */
    int fd;            /* file descriptor that a program reads; 0: none */
    bool shown;        /* the line is on the screen */
    int width;         /* columns of the terminal */
    uint64_t start_ns; /* start of the job */
    uint64_t last_ns;  /* time of the last print */
    const char *about; /* prefix of the line, such as "llama-demo: "; NULL: none */
} ari_progress;

/** Starts the clock. */
void ari_progress_begin(ari_progress *p, const struct ari_common *common);
/** Shows the progress. fraction is in [0, 1], or negative if unknown; `label` is shortened in the middle to fit. */
void ari_progress_update(ari_progress *p, double fraction, const char *label);
/** Updates the progress as a callback of the library; user: the ari_progress. */
void ari_progress_show(void *user, double fraction, const char *label);
/** Erases the line; the next update draws it again. */
void ari_progress_clear(ari_progress *p);
/** Removes the line. */
void ari_progress_end(ari_progress *p);

/** Writes the line's text, at most `width` columns, to line[0 .. size). What ari_progress_update prints. */
void ari_progress_line(char *line, int size, int width, double seconds, double fraction, const char *label);
