/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/explain/explain.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ref/core/os/os.h"
#include "ref/core/size.h"
#include "ref/io/config_private.h"

enum {
    LONGEST_SECONDS = 600, /* far more than an explanation takes, which reads a few tensors or samples of them */
    NO_NUMPY = 3,          /* exit status of the script after which the next Python is tried */
    NOT_STARTED = 127      /* exit status of a child that could not start the program */
};

/* Unnamed files for the request, the answer, and the child's stderr. */
typedef struct channel {
    int fd[3];
} channel;

static void channel_fini(channel *c)
{
    for (int i = 0; i < 3; i++) {
        if (c->fd[i] >= 0)
            close(c->fd[i]);
    }
}

static ar_status channel_init(channel *c, const json_t *request)
{
    bool open = true;
    for (int i = 0; i < 3; i++) {
        c->fd[i] = ari_scratch_open();
        open = open && c->fd[i] >= 0;
    }
    if (!open || json_dumpfd(request, c->fd[0], JSON_COMPACT) != 0)
        return ar_error_set(AR_ERR_IO, "no temporary file for a request: %s", strerror(errno));
    return AR_OK;
}

/* --- the child ---------------------------------------------------------------------------------------------------- */

_Noreturn static void become_python(const channel *c, const char *python, const char *script)
{
    char *const words[] = {(char *)(uintptr_t)python, "-I", "-B", (char *)(uintptr_t)script, NULL};
    ari_end_with_parent();
    signal(SIGINT, SIG_DFL);
    signal(SIGALRM, SIG_DFL);
    alarm(LONGEST_SECONDS);
    bool ready = true;
    for (int i = 0; i < 3; i++) /* a duplicate stays open in the program */
        ready = ready && lseek(c->fd[i], 0, SEEK_SET) == 0 && dup2(c->fd[i], i) == i;
    if (ready)
        execv(python, words);
    _exit(NOT_STARTED);
}

/* Returns the status as waitpid does. */
static int run_python(const channel *c, const char *python, const char *script)
{
    const struct sigaction ignored = {.sa_handler = SIG_IGN};
    struct sigaction before;
    int status = NOT_STARTED << 8;
    sigaction(SIGINT, &ignored, &before);
    const pid_t child = fork();
    if (child == 0)
        become_python(c, python, script);
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {
        /* this signal does not end the child */
    }
    sigaction(SIGINT, &before, NULL);
    return status;
}

/* --- the answer --------------------------------------------------------------------------------------------------- */

/* Returns the last line that the child wrote to stderr. */
static void last_words(char *text, size_t cap, int fd)
{
    char tail[1024];
    const off_t end = lseek(fd, 0, SEEK_END), start = end > (off_t)sizeof tail - 1 ? end - (off_t)sizeof tail + 1 : 0;
    ssize_t n = pread(fd, tail, sizeof tail - 1, start);
    while (n > 0 && (tail[n - 1] == '\n' || tail[n - 1] == '\r'))
        n--;
    tail[n > 0 ? n : 0] = '\0';
    const char *line = strrchr(tail, '\n');
    snprintf(text, cap, "%.*s", (int)cap - 1, line ? line + 1 : tail);
}

static void tell_end(char *failure, size_t cap, const channel *c, const char *python, int status)
{
    char stderr_tail[256];
    last_words(stderr_tail, sizeof stderr_tail, c->fd[2]);
    if (WIFSIGNALED(status))
        snprintf(failure, cap, "explaining ended by signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else if (WEXITSTATUS(status) == NOT_STARTED)
        snprintf(failure, cap, "%s could not be started", python);
    else if (WEXITSTATUS(status) == NO_NUMPY)
        snprintf(failure, cap, "%s has no numpy, which causes need: pip install numpy", python);
    else
        snprintf(failure, cap, "explaining ended with status %d: %s", WEXITSTATUS(status), stderr_tail);
}

static void read_answer(json_t **answer, char *failure, size_t cap, const channel *c)
{
    json_error_t error;
    *answer = lseek(c->fd[1], 0, SEEK_SET) == 0 ? json_loadfd(c->fd[1], 0, &error) : NULL;
    if (!json_is_object(*answer)) {
        json_decref(*answer);
        *answer = NULL;
        snprintf(failure, cap, "the explanation is no JSON object");
    } else {
        failure[0] = '\0'; /* an earlier Python's */
    }
}

/* True if the question is settled, by an answer or by a failure that another Python would share. */
static bool ask_python(json_t **answer, char *failure, size_t cap, const channel *c, const char *python,
                       const char *script)
{
    if (ftruncate(c->fd[1], 0) != 0 || ftruncate(c->fd[2], 0) != 0)
        return false;
    const int status = run_python(c, python, script);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        read_answer(answer, failure, cap, c);
    else
        tell_end(failure, cap, c, python, status);
    return !WIFEXITED(status) || (WEXITSTATUS(status) != NO_NUMPY && WEXITSTATUS(status) != NOT_STARTED);
}

/* Tries each python3 on the PATH, except in folders with a relative path, which depend on the working folder. */
static void ask_pythons(json_t **answer, char *failure, size_t cap, const channel *c, const char *script)
{
    const char *folder = getenv("PATH");
    bool found = false, settled = false;
    while (folder && *folder && !settled) {
        char python[PATH_MAX];
        const size_t n = strcspn(folder, ":");
        const int length = snprintf(python, sizeof python, "%.*s/python3", (int)n, folder);
        if (*folder == '/' && length > 0 && (size_t)length < sizeof python && access(python, X_OK) == 0) {
            found = true;
            settled = ask_python(answer, failure, cap, c, python, script);
        }
        folder += n + (folder[n] == ':');
    }
    if (!found)
        snprintf(failure, cap, "there is no python3 on the PATH, which causes need, with numpy");
    else if (!settled)
        snprintf(failure, cap,
                 "no python3 on the PATH has numpy, which causes need: apt-get install python3-numpy, pip install "
                 "numpy, or ANYRANK_PYTHON=PATH");
}

ar_status ari_explain(json_t **answer, char *failure, size_t cap, const json_t *request)
{
    ARI_ENDED(channel_fini) channel c = {{-1, -1, -1}};
    const char *chosen = getenv("ANYRANK_PYTHON");
    char script[PATH_MAX];
    *answer = NULL;
    failure[0] = '\0';
    if (!ari_package_path(script, sizeof script, "explain/door.py")) {
        snprintf(failure, cap, "the Python package anyrank is not beside this program");
        return AR_OK;
    }
    AR_TRY(channel_init(&c, request));
    if (chosen && chosen[0] == '/')
        ask_python(answer, failure, cap, &c, chosen, script);
    else if (chosen && chosen[0])
        snprintf(failure, cap, "ANYRANK_PYTHON is '%.200s', expected an absolute path", chosen);
    else
        ask_pythons(answer, failure, cap, &c, script);
    return AR_OK;
}
