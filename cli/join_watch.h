/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_JOIN_WATCH_H
#define ARI_CLI_JOIN_WATCH_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/* A launcher's processes find each other inside the launcher's library, which may wait without end for one that never
 * comes: one that ended before, or is another program. So somebody watches. */
typedef struct ari_join_watch {
    pthread_t thread;
    bool runs; /* without a thread nobody watches */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool over;
    double seconds;
    uint64_t deadline_ns;
    int errors; /* a file descriptor; negative: none */
    int exit_code;
} ari_join_watch;

/** Unless ended some seconds after timeout_s, ends the program: words to `errors`, and this exit status. */
void ari_join_watch_begin(ari_join_watch *w, double timeout_s, int errors, int exit_code);
void ari_join_watch_end(ari_join_watch *w);

#endif
