/* SPDX-License-Identifier: Apache-2.0 */
/* Processes without MPI: the launcher's variables say where process 0 listens. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/cluster/process/net.h"
#include "gpu/cluster/process/process.h"
#include "ref/core/size.h"
#include "ref/core/text.h"

/* A launcher's description of a process in its environment: torchrun's variables, or Slurm's. */
typedef struct launch {
    int rank, size, local_rank;
    bool one_machine; /* all are on this one */
    char host[256];   /* of process 0 */
    int port;         /* where process 0 listens */
    uint64_t job;     /* a hash of its names */
} launch;

/* --- what a launcher says ----------------------------------------------------------------------------------------- */

enum { MOST_RANKS = 1 << 20, MOST_PORT = 65535 };

/* "" counts as not set, as launchers and shells pass variables on. */
static const char *variable(const char *name)
{
    const char *value = getenv(name);
    return value && value[0] ? value : NULL;
}

static ar_status read_number(int *out, const char *name, int least, int most)
{
    const char *value = variable(name);
    if (!value)
        return ar_error_set(AR_ERR_ARG, "the environment variable %s is not set", name);
    uint64_t n = 0;
    const char *end = NULL;
    if (!ari_natural(&n, value, &end) || *end || n < (uint64_t)least || n > (uint64_t)most)
        return ar_error_set(AR_ERR_ARG, "%s is '%s': a number from %d to %d expected", name, ARI_SHOW(value), least,
                            most);
    *out = (int)n;
    return AR_OK;
}

/* The variables that identify this process. */
typedef struct names {
    const char *rank, *size, *local, *machines;
} names;

static ar_status read_place(launch *l, const names *n)
{
    const char *machines = n->machines ? variable(n->machines) : NULL;
    AR_TRY(read_number(&l->size, n->size, 1, MOST_RANKS));
    AR_TRY(read_number(&l->rank, n->rank, 0, MOST_RANKS));
    AR_TRY(read_number(&l->local_rank, n->local, 0, MOST_RANKS));
    if (l->rank >= l->size)
        return ar_error_set(AR_ERR_ARG, "%s is %d and %s is %d: ranks go from 0 to %d", n->rank, l->rank, n->size,
                            l->size, l->size - 1);
    if (l->local_rank >= l->size)
        return ar_error_set(AR_ERR_ARG, "%s is %d and %s is %d: more processes on one machine than there are", n->local,
                            l->local_rank, n->size, l->size);
    l->one_machine = machines && strcmp(machines, "1") == 0;
    int local_size = 0;
    if (!variable("LOCAL_WORLD_SIZE") || strcmp(n->local, "LOCAL_RANK") != 0)
        return AR_OK;
    AR_TRY(read_number(&local_size, "LOCAL_WORLD_SIZE", 1, MOST_RANKS));
    if (l->local_rank >= local_size)
        return ar_error_set(AR_ERR_ARG, "LOCAL_RANK is %d and LOCAL_WORLD_SIZE is %d: it goes from 0 to %d",
                            l->local_rank, local_size, local_size - 1);
    l->one_machine = local_size == l->size;
    return AR_OK;
}

/* --- where process 0 listens -------------------------------------------------------------------------------------- */

/* The first name of Slurm's list: "node[07-09,12],login" begins with node07. */
static bool first_of_list(char *host, size_t size, const char *list)
{
    const char *open = strchr(list, '['), *comma = strchr(list, ',');
    if (!open || (comma && comma < open)) {
        snprintf(host, size, "%.*s", (int)strcspn(list, ","), list);
        return host[0] != '\0';
    }
    const char *close = strchr(open, ']');
    if (!close)
        return false;
    snprintf(host, size, "%.*s%.*s%.*s", (int)(open - list), list, (int)strcspn(open + 1, "-,]"), open + 1,
             (int)strcspn(close + 1, ","), close + 1);
    return strchr(host, '[') == NULL; /* a list of lists: MASTER_ADDR is needed */
}

static ar_status read_host(launch *l, bool slurm)
{
    const char *host = variable("MASTER_ADDR");
    const char *list = variable("SLURM_STEP_NODELIST");
    if (host && strlen(host) >= sizeof l->host)
        return ar_error_set(AR_ERR_ARG, "MASTER_ADDR has %zu characters: at most %zu expected", strlen(host),
                            sizeof l->host - 1);
    if (host) {
        snprintf(l->host, sizeof l->host, "%s", host);
        return AR_OK;
    }
    if (slurm && list && strlen(list) < sizeof l->host && first_of_list(l->host, sizeof l->host, list))
        return AR_OK;
    if (l->size == 1) {
        snprintf(l->host, sizeof l->host, "127.0.0.1");
        return AR_OK;
    }
    return ar_error_set(AR_ERR_ARG, "the environment variable MASTER_ADDR is not set: the name or address of the "
                                    "machine of rank 0, the same for all processes");
}

/* torchrun itself listens on MASTER_PORT where this variable is set, and another program cannot: the next port is taken
 * then. */
static ar_status read_port(launch *l, bool slurm)
{
    if (variable("ANYRANK_PORT"))
        return read_number(&l->port, "ANYRANK_PORT", 1, MOST_PORT);
    if (variable("MASTER_PORT")) {
        AR_TRY(read_number(&l->port, "MASTER_PORT", 1, MOST_PORT));
        const char *store = variable("TORCHELASTIC_USE_AGENT_STORE");
        if (store && strcmp(store, "True") == 0)
            l->port += l->port < MOST_PORT ? 1 : -1;
        return AR_OK;
    }
    const char *job = slurm ? variable("SLURM_JOB_ID") : NULL;
    if (job) { /* any port that the job's processes agree on, out of the range that systems hand out themselves */
        l->port = 10000 + (int)(strtoul(job, NULL, 10) % 20000);
        return AR_OK;
    }
    if (l->size == 1) {
        l->port = 0;
        return AR_OK;
    }
    return ar_error_set(AR_ERR_ARG, "the environment variable MASTER_PORT is not set: a port that is free on the "
                                    "machine of rank 0, the same for all processes");
}

/* --- all of it ---------------------------------------------------------------------------------------------------- */

/* FNV-1a of what identifies a job, as far as its launcher sets it. */
static uint64_t hash_of_job(void)
{
    static const char *const of[] = {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID",
                                     "SLURM_STEP_ID", "ANYRANK_JOB"};
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
        const char *value = variable(of[i]);
        for (const char *c = value ? value : ""; *c; c++)
            hash = (hash ^ (unsigned char)*c) * UINT64_C(0x100000001b3);
        hash = (hash ^ 0xff) * UINT64_C(0x100000001b3);
    }
    return hash;
}

/* Errors: AR_ERR_ARG, naming the variable that is missing or makes no sense. */
static ar_status read_launch(launch *l)
{
    static const names torch = {"RANK", "WORLD_SIZE", "LOCAL_RANK", NULL};
    static const names step = {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES"};
    static const names job = {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NNODES"};
    const bool by_torch = variable(torch.rank) || variable(torch.size);
    const bool slurm = !by_torch && variable(job.rank);
    *l = (launch){.rank = 0};
    if (!by_torch && !slurm)
        return ar_error_set(AR_ERR_ARG,
                            "no launcher started this process: neither RANK and WORLD_SIZE (torchrun) nor SLURM_PROCID "
                            "(srun) are set; by hand, set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT");
    AR_TRY(read_place(l, by_torch ? &torch : variable(step.size) ? &step : &job));
    AR_TRY(read_host(l, slurm));
    AR_TRY(read_port(l, slurm));
    l->job = hash_of_job();
    return AR_OK;
}

/* --- the process -------------------------------------------------------------------------------------------------- */

static void tcp_abort(ar_process *p, ar_status st, const char *why)
{
    char text[1024];
    snprintf(text, sizeof text, "rank %d aborted: %s", p->rank, why);
    ari_store_fail(p->store, st, text);
}

static void tcp_destroy(ar_process *p)
{
    ari_store_destroy(p->store);
    free(p);
}

static const ari_process_ops tcp_ops = {.abort = tcp_abort, .destroy = tcp_destroy};

/* Without a key the machine's own processes alone may come, unless all who reach the port are meant to. */
static ar_status choose_reach(launch *l, bool *loopback, const ari_key *key, bool open_store)
{
    *loopback = ari_net_is_loopback(l->host);
    if (!*loopback && l->one_machine) {
        snprintf(l->host, sizeof l->host, "127.0.0.1");
        *loopback = true;
    }
    if (*loopback || key->is_set || open_store)
        return AR_OK;
    return ar_error_set(AR_ERR_ARG,
                        "MASTER_ADDR '%.128s' is no loopback address, and whoever reaches port %d could join the "
                        "job: give all processes the same ANYRANK_JOB_KEY, or the same ANYRANK_JOB_KEY_FILE, or allow "
                        "it by open_store",
                        l->host, l->port);
}

static ar_status join_launch(ar_process *p, launch *l)
{
    ari_store_options o = {.rank = l->rank,
                           .size = l->size,
                           .job = l->job,
                           .timeout_ns = p->options.timeout_ns,
                           .host = l->host,
                           .listener = -1};
    bool loopback = false;
    if (l->size == 1)
        return ari_store_create(&p->store, &o);
    AR_TRY(ari_key_read(&o.key));
    AR_TRY(choose_reach(l, &loopback, &o.key, p->options.open_store));
    o.port = l->port;
    if (l->rank == 0)
        AR_TRY(ari_net_listen(&o.listener, &o.port, loopback ? l->host : NULL, l->port));
    return ari_store_create(&p->store, &o);
}

ar_status ari_process_tcp_create(ar_process **gives, const ar_process_options *o)
{
    launch l;
    ar_process *p = NULL;
    AR_TRY(read_launch(&l));
    AR_TRY(ARI_ALLOC_ZERO(&p, 1, "a process"));
    *p = (ar_process){.ops = &tcp_ops, .rank = l.rank, .size = l.size, .local_rank = l.local_rank, .options = *o};
    const ar_status st = join_launch(p, &l);
    if (st == AR_OK)
        *gives = p;
    else
        tcp_destroy(p);
    return st;
}
