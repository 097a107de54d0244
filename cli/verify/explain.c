/* SPDX-License-Identifier: Apache-2.0 */
/* Explaining in a child process. The child gives back through shared memory what it found; pointers in it are to static
 * storage, or to what both processes have at the same address. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/verify/report.h"
#include "ref/core/os/os.h"
#include "verify/dumps/verify_private.h"

enum {
    EXPLAINING_SECONDS = 1800, /* many times what an explanation takes: it reads a few tensors, or samples of them */
    NO_CHILD = 128             /* the exit status that stands for a fork that failed */
};

typedef struct findings {
    ar_verify_report report;
    char failure[sizeof((ar_verify_report *)0)->unexplained]; /* of an explanation that returned an error */
    ar_verify_row row[];
} findings;

static const char *signal_name(int number)
{
    static const struct {
        int number;
        const char *name;
    } names[] = {{SIGSEGV, "SIGSEGV"}, {SIGABRT, "SIGABRT"}, {SIGBUS, "SIGBUS"},   {SIGFPE, "SIGFPE"},
                 {SIGILL, "SIGILL"},   {SIGKILL, "SIGKILL"}, {SIGALRM, "SIGALRM"}, {SIGINT, "SIGINT"},
                 {SIGTERM, "SIGTERM"}, {SIGQUIT, "SIGQUIT"}, {SIGXCPU, "SIGXCPU"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].number == number)
            return names[i].name;
    return "a signal";
}

static int explain_in_child(ar_verify_report *r, findings *found)
{
    ari_end_with_parent();
    signal(SIGALRM, SIG_DFL);
    alarm(EXPLAINING_SECONDS);
    if (ari_verify_explain(r) != AR_OK) {
        snprintf(found->failure, sizeof found->failure, "%s", ar_error_message());
        return 1;
    }
    found->report = *r;
    memcpy(found->row, r->row, r->rows * sizeof *r->row);
    return 0;
}

/* Explains in a child and gives its status as waitpid does. An interrupt from the terminal ends the child alone. */
static int explain_and_wait(ar_verify_report *r, findings *found)
{
    const struct sigaction ignored = {.sa_handler = SIG_IGN};
    struct sigaction before;
    int status = NO_CHILD << 8;
    sigaction(SIGINT, &ignored, &before);
    const pid_t child = fork();
    if (child == 0) {
        sigaction(SIGINT, &before, NULL);
        _exit(explain_in_child(r, found));
    }
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {
        /* a signal that is no end of the child */
    }
    sigaction(SIGINT, &before, NULL);
    return status;
}

static void adopt(ar_verify_report *r, const findings *found)
{
    ar_verify_row *row = r->row;
    struct ari_verifying *comparison = r->comparison; /* which the child has closed for itself alone */
    memcpy(row, found->row, r->rows * sizeof *row);
    *r = found->report;
    r->row = row;
    r->comparison = comparison;
}

static void explain_apart(ar_verify_report *r, findings *found)
{
    const int status = explain_and_wait(r, found);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        adopt(r, found);
    else if (WIFSIGNALED(status))
        snprintf(r->unexplained, sizeof r->unexplained, "%s", signal_name(WTERMSIG(status)));
    else if (found->failure[0])
        snprintf(r->unexplained, sizeof r->unexplained, "%s", found->failure);
    else
        snprintf(r->unexplained, sizeof r->unexplained, "exit status %d", WEXITSTATUS(status));
}

void ari_verify_explain_apart(ar_verify_report *r)
{
    if (r->explained)
        return;
    const size_t bytes = sizeof(findings) + r->rows * sizeof *r->row;
    void *found = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) {
        snprintf(r->unexplained, sizeof r->unexplained, "no memory for what is found");
    } else {
        explain_apart(r, found);
        munmap(found, bytes);
    }
    if (!r->explained)
        fprintf(stderr, "note: explaining ended (%s); the verdict stands\n", r->unexplained);
}
