/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/shared/progress.h"

#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "cli/shared/command.h"
#include "ref/core/clock.h"
#include "ref/core/size.h"
#include "ref/io/json.h"

static const uint64_t FIRST_NS = 1000000000u; /* shorter jobs show nothing */
static const uint64_t AGAIN_NS = 100000000u;  /* ten times a second */

enum { LINE_SIZE = 512, DEFAULT_WIDTH = 80, LEAST_WIDTH = 20 };

static int terminal_width(void)
{
    struct winsize size;
    if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col >= LEAST_WIDTH)
        return size.ws_col;
    const char *columns = getenv("COLUMNS");
    const long n = columns != NULL ? strtol(columns, NULL, 10) : 0;
    return n >= LEAST_WIDTH && n < LINE_SIZE ? (int)n : DEFAULT_WIDTH;
}

void ari_progress_begin(ari_progress *p, const ari_common *common)
{
    const char *terminal = getenv("TERM");
    const bool dumb = terminal != NULL && strcmp(terminal, "dumb") == 0;
    const bool is_enabled = !common->quiet && !dumb && isatty(STDERR_FILENO) == 1;
    *p = (ari_progress){.is_enabled = is_enabled, .fd = common->progress_fd, .start_ns = ari_now_ns()};
    p->width = p->is_enabled ? terminal_width() : DEFAULT_WIDTH;
}

void ari_progress_line(char *line, int size, int width, double seconds, double fraction, const char *label)
{
    char head[64];
    if (fraction >= 0.0)
        snprintf(head, sizeof head, "%3.0f %%  %.0f s  ", (fraction < 1.0 ? fraction : 1.0) * 100.0, seconds);
    else
        snprintf(head, sizeof head, "%.0f s  ", seconds);
    /* one column stays empty, because a full line would wrap on some terminals */
    const int scratch = (width < size ? width : size) - 1 - (int)strlen(head);
    const int length = (int)strlen(label);
    if (scratch < 4)
        snprintf(line, (size_t)size, "%.*s", width - 1, head);
    else if (length <= scratch)
        snprintf(line, (size_t)size, "%s%s", head, label);
    else
        snprintf(line, (size_t)size, "%s%.*s..%s", head, (scratch - 2) / 2, label,
                 label + length - (scratch - 2 - (scratch - 2) / 2));
}

/* Writes a progress line for a program. The line may be lost if memory is short or nobody reads the pipe; the job
 * continues. */
static void report_line(const ari_progress *p, double seconds, double fraction, const char *label)
{
    json_t *line = json_pack("{s:o, s:f, s:o}", "fraction", fraction < 0.0 ? json_null() : json_real(fraction),
                             "seconds", seconds, "what", ari_json_text(label));
    ARI_OWNED char *text = line ? json_dumps(line, JSON_COMPACT) : NULL;
    if (text)
        dprintf(p->fd, "%s\n", text);
    json_decref(line);
}

void ari_progress_update(ari_progress *p, double fraction, const char *label)
{
    const uint64_t now_ns = ari_now_ns();
    if ((!p->is_enabled && p->fd == 0) || (p->last_ns != 0 && now_ns - p->last_ns < AGAIN_NS))
        return;
    if (p->fd > 0) {
        p->last_ns = now_ns;
        report_line(p, (double)(now_ns - p->start_ns) / 1e9, fraction, label);
    }
    if (!p->is_enabled || now_ns - p->start_ns < FIRST_NS)
        return;
    char line[LINE_SIZE];
    ari_progress_line(line, LINE_SIZE, p->width, (double)(now_ns - p->start_ns) / 1e9, fraction, label);
    fprintf(stderr, "\r\033[K%s", line);
    fflush(stderr);
    p->last_ns = now_ns;
    p->shown = true;
}

void ari_progress_show(void *user, double fraction, const char *label)
{
    ari_progress *p = user;
    char text[256];
    snprintf(text, sizeof text, "%s%s", p->about ? p->about : "", label);
    ari_progress_update(p, fraction, text);
}

void ari_progress_clear(ari_progress *p)
{
    if (p->shown) {
        fprintf(stderr, "\r\033[K");
        fflush(stderr);
    }
    p->shown = false;
}

void ari_progress_end(ari_progress *p)
{
    ari_progress_clear(p);
    p->is_enabled = false;
}
