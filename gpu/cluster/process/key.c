/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/cluster/process/handshake.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ref/core/atomic_file.h"
#include "ref/core/os/os.h"

/* Whoever saw one proof can try keys at leisure: 16 characters drawn from hexadecimal digits take 2^64 tries. */
enum { LEAST_CHARACTERS = 16, MOST_CHARACTERS = 4096 };

static ar_status take_text(ari_key *k, const char *text, size_t n, const char *source)
{
    ari_sha256 s;
    while (n > 0 && isspace((unsigned char)text[n - 1]))
        n--;
    if (n < LEAST_CHARACTERS || n > MOST_CHARACTERS)
        return ar_error_set(AR_ERR_ARG,
                            "the job key of %s has %zu characters%s: %d to %d expected that nobody can guess, as "
                            "openssl rand -hex 32 prints",
                            source, n, n > MOST_CHARACTERS ? " or more" : "", LEAST_CHARACTERS, MOST_CHARACTERS);
    ari_sha256_init(&s);
    ari_sha256_update(&s, text, n);
    ari_sha256_digest(&s, k->at);
    k->is_set = true;
    return AR_OK;
}

static ar_status check_file(int fd, const char *path)
{
    struct stat info;
    if (fstat(fd, &info) != 0)
        return ar_error_set(AR_ERR_IO, "ANYRANK_JOB_KEY_FILE %s: %s", ARI_SHOW(path), strerror(errno));
    if (!S_ISREG(info.st_mode))
        return ar_error_set(AR_ERR_ARG, "ANYRANK_JOB_KEY_FILE %s is no file", ARI_SHOW(path));
    if (info.st_mode & (S_IRWXG | S_IRWXO))
        return ar_error_set(AR_ERR_ARG,
                            "ANYRANK_JOB_KEY_FILE %s is open to others than its owner (mode %04o): chmod 600 %s, and "
                            "another key if they may have read it",
                            ARI_SHOW(path), (unsigned)info.st_mode & 07777, ARI_SHOW(path));
    return AR_OK;
}

static ar_status take_file(ari_key *k, const char *path)
{
    char text[MOST_CHARACTERS + 2]; /* room to see that there is more */
    size_t n = 0;
    ssize_t got = 0;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe without a writer is not waited for */
    if (fd < 0)
        return ar_error_set(AR_ERR_IO, "ANYRANK_JOB_KEY_FILE %s: %s", ARI_SHOW(path), strerror(errno));
    ar_status st = check_file(fd, path);
    while (st == AR_OK && n < sizeof text && (got = read(fd, text + n, sizeof text - n)) > 0)
        n += (size_t)got;
    if (got < 0)
        st = ar_error_set(AR_ERR_IO, "ANYRANK_JOB_KEY_FILE %s: %s", ARI_SHOW(path), strerror(errno));
    close(fd);
    return st == AR_OK ? take_text(k, text, n, ARI_SHOW(path)) : st;
}

ar_status ari_key_read(ari_key *k)
{
    const char *text = getenv("ANYRANK_JOB_KEY"), *path = getenv("ANYRANK_JOB_KEY_FILE");
    const bool has_text = text && text[0], has_path = path && path[0];
    *k = (ari_key){.is_set = false};
    if (has_text && has_path)
        return ar_error_set(AR_ERR_ARG, "both ANYRANK_JOB_KEY and ANYRANK_JOB_KEY_FILE are set: one of them expected");
    if (has_text)
        return take_text(k, text, strlen(text), "ANYRANK_JOB_KEY");
    return has_path ? take_file(k, path) : AR_OK;
}

ar_status ari_key_make(ari_key *k)
{
    k->is_set = ari_random(k->at, sizeof k->at);
    return k->is_set ? AR_OK : ar_error_set(AR_ERR_IO, "no random bytes for a job key: %s", strerror(errno));
}
