/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/options/transport.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "gpu/cluster/process/process_private.h"
#include "gpu/cluster/process/transport/process_private.h"
#include "gpu/device_private.h"
#include "ref/core/names.h"
#include "ref/core/os/os.h"
#include "ref/core/process_private.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "verify/run/process_run.h"
#include "verify/run/run.h"

/* For a silent process: its original stderr descriptor, and the one that collects its errors; -1: not silent. */
static int errors_fd = -1, kept_fd = -1;
/* True if the other processes know the failure, or this process has printed it. */
static bool joined;
static bool failed_to_join;

#define ARI_VALUES ari_transport_values
const ari_option ari_transport_options[] = {
    ARI_OPTION_SECTION("cluster"),
    ARI_OPTION_ENUM("transport", transport, ari_transport_names,
                    "sim: ranks are threads of this process; mpi, nccl: each process that mpirun, srun or torchrun "
                    "starts is a rank; nccl without a launcher: threads, a GPU each (default sim; with --device cuda "
                    "and a GPU for each rank: nccl)",
                    .details = "With mpi, MPI moves what is in the hosts' memory. With nccl, each process is a rank on "
                               "the GPU of its number on its machine, and NCCL moves what is there. Layouts have as "
                               "many ranks as there are processes; process 0 alone prints and writes."),
    ARI_OPTION_FLAG("share-gpus", share_gpus,
                    "with --transport nccl: several processes may use one GPU (slow; for tests)"),
    {0},
};
#undef ARI_VALUES

/* Returns this process's rank as set by Open MPI, the PMI of MPICH and Slurm, torchrun or srun; NULL: no launcher. */
static const char *launched_rank(void)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK", "SLURM_PROCID"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *rank = getenv(names[i]);
        if (rank && *rank)
            return rank;
    }
    return NULL;
}

static bool is_launched(void)
{
    return launched_rank() || getenv("WORLD_SIZE") || getenv("ANYRANK_NCCL_ID_FILE");
}

static bool is_another(void)
{
    const char *rank = launched_rank();
    return rank && strtol(rank, NULL, 10) > 0;
}

/* --- watching over the launcher ----------------------------------------------------------------------------------- */

/* A library that enforces the timeout itself reports more, and starting takes some time. */
static const double least_seconds = 10, more_seconds = 2;

/* For a process whose peers never come: the descriptor for the message (negative: none), and the exit status. */
static int late_fd, late_exit_code;
static char late_words[192];

static void end_late(int number)
{
    (void)number;
    if (late_fd >= 0 && write(late_fd, late_words, strlen(late_words)) < 0)
        _exit(ARI_EXIT_MACHINE);
    _exit(late_exit_code);
}

/* Sets an alarm that ends the program some seconds after timeout_s, with a message to `errors` and this exit status,
 * unless alarm(0) is called first. A launcher's processes find each other inside of the launcher's library, which may
 * wait forever for a process that has ended or runs another program. */
static void set_alarm(double timeout_s, int errors, int exit_code)
{
    const double seconds = (timeout_s > least_seconds ? timeout_s : least_seconds) + more_seconds;
    late_fd = errors;
    late_exit_code = exit_code;
    snprintf(late_words, sizeof late_words,
             "anyrank: waited %.0f s for the launcher's other processes to join: do all of them run the same command, "
             "with the same --transport?\n",
             seconds);
    signal(SIGALRM, end_late);
    alarm((unsigned)seconds);
}

/* --- joining ------------------------------------------------------------------------------------------------------ */

/* Compares two texts of options and reports the first line that differs; with equal subcommands both have one line for
 * each option. */
static ar_status compare_options(int rank, const char *options, const char *root_options)
{
    size_t a = 0, b = 0;
    while ((a = strcspn(options, "\n")) == (b = strcspn(root_options, "\n")) &&
           strncmp(options, root_options, a) == 0) {
        if (options[a] == '\0')
            return AR_OK;
        options += a + 1;
        root_options += b + 1;
    }
    char local_line[256], root_line[256];
    snprintf(local_line, sizeof local_line, "%.*s", (int)a, options);
    snprintf(root_line, sizeof root_line, "%.*s", (int)b, root_options);
    return ar_error_set(AR_ERR_ARG, "process %d was started with '%s', process 0 with '%s': all take the same options",
                        rank, ARI_SHOW(local_line), ARI_SHOW(root_line));
}

static ar_status compare_process(void *user, int rank, ari_bytes *b)
{
    ARI_OWNED char *options = malloc(b->count + 1);
    if (!options)
        return ar_error_set(AR_ERR_MEMORY, "no memory for the options of process %d", rank);
    const size_t n = b->count;
    options[n] = '\0';
    AR_TRY(ari_bytes_take(b, options, n));
    return compare_options(rank, options, user);
}

static ar_status agree_on_options(ar_process *p, const ari_args_spec *spec, const void *values)
{
    ARI_OWNED char *options = NULL;
    ar_status st = ari_args_describe(&options, spec, values);
    const ari_bytes local_options = {.data = (unsigned char *)options, .count = options ? strlen(options) : 0};
    st = ari_process_agree(p, st);
    if (st == AR_OK)
        st = ari_process_collect(p, &local_options, compare_process, options);
    return st;
}

ar_status ari_transport_check(const ari_transport_values *v, const char *option)
{
    if (v->transport == AR_TRANSPORT_SIM || !option)
        return AR_OK;
    return ar_error_set(AR_ERR_ARG, "--%s needs ranks that are threads of one process: leave --transport %s out",
                        option, ari_transport_name((ar_transport)v->transport));
}

static ar_status join_process(ar_process **result, const ar_process_options *o, double timeout_s)
{
    set_alarm(timeout_s, errors_fd >= 0 ? errors_fd : STDERR_FILENO, ARI_EXIT_MACHINE);
    const ar_status st = ar_process_create(result, o);
    alarm(0);
    failed_to_join = st != AR_OK;
    /* An error in the build or the options occurs in every process. */
    joined = st != AR_ERR_UNSUPPORTED && st != AR_ERR_ARG;
    if (!joined)
        return st;
    /* no other process knows; but process 0 reports what it found itself */
    if (st != AR_OK && errors_fd >= 0 && strncmp(ar_error_message(), "process 0:", strlen("process 0:")) != 0)
        dprintf(errors_fd, "anyrank: %s\n", ar_error_message());
    return st;
}

/* Returns the number of processes that the launcher reports; 1: no launcher. */
static long processes_started(void)
{
    static const char *const sizes[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"};
    long n = 1;
    for (size_t i = 0; n <= 1 && i < sizeof sizes / sizeof *sizes; i++) {
        const char *size = getenv(sizes[i]);
        n = size ? strtol(size, NULL, 10) : 1;
    }
    return n;
}

/* Refuses several processes without a transport: the user means ranks, but each process that torchrun started would run
 * the whole job. */
static ar_status refuse_several(void)
{
    const char *size = getenv("WORLD_SIZE");
    if (!getenv("RANK") || !size || strtol(size, NULL, 10) <= 1)
        return AR_OK;
    return ar_error_set(
        AR_ERR_ARG,
        "WORLD_SIZE is %.12s, so this is one of several processes, and without --transport each would do "
        "all of this by itself: start the ranks by mpirun with --transport mpi; on GPUs give --transport "
        "nccl, and ANYRANK_NCCL_ID_FILE where mpirun is not the launcher; or start one process, whose "
        "threads are the ranks",
        size);
}

static void tell_of_alone(const ari_common *common)
{
    if (!common->quiet && !is_another() && processes_started() > 1)
        fprintf(stderr,
                "anyrank: %ld processes were started, and each does all of this by itself; --transport mpi or "
                "nccl makes each a rank\n",
                processes_started());
}

ar_status ari_transport_begin(ari_common *common, const ari_transport_values *v, const ari_args_spec *spec,
                              double timeout_s, bool check_calls)
{
    const ar_process_options o = {.transport = (ar_transport)v->transport,
                                  .timeout_ns = (uint64_t)(timeout_s * 1e9),
                                  .share_gpus = v->share_gpus,
                                  .check_calls = check_calls};
    common->process = NULL;
    if (v->share_gpus && o.transport != AR_TRANSPORT_NCCL)
        return ar_error_set(AR_ERR_ARG, "--share-gpus is for processes that NCCL connects: give --transport nccl");
    if (o.transport == AR_TRANSPORT_SIM) {
        AR_TRY(refuse_several());
        tell_of_alone(common);
        return AR_OK;
    }
    common->nccl_threads = o.transport == AR_TRANSPORT_NCCL && !v->share_gpus && !is_launched();
    if (common->nccl_threads)
        return AR_OK;
    AR_TRY(join_process(&common->process, &o, timeout_s));
    return agree_on_options(common->process, spec, common);
}

ar_status ari_transport_fits(const ari_common *common, const ar_run *run, int ranks)
{
    char nccl[512];
    const int gpus = ari_gpu_count();
    if (!common->nccl_threads || ranks == 1 || ari_run_by_nccl(run, ranks))
        return AR_OK;
    if (run->device.kind == AR_DEVICE_CPU)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "--transport nccl with --device cpu: NCCL moves what lies on GPUs; give "
                            "--device cuda, or leave --transport nccl out");
    if (!ari_transport_describe(AR_TRANSPORT_NCCL, nccl, sizeof nccl))
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s", nccl);
    return ar_error_set(
        AR_ERR_ARG,
        "--transport nccl in one process takes a GPU for each rank: %d ranks, and this machine has %d "
        "GPU%s; start a process for each rank by mpirun, srun or torchrun, or leave --transport nccl out",
        ranks, gpus, ARI_PLURAL(gpus));
}

void ari_transport_end(ar_process *p, ar_status st)
{
    fflush(stdout);
    /* process 0 reports what ends all processes, but not its own death */
    if (p && st == AR_ERR_ABORTED && errors_fd >= 0 && ar_process_rank(p) == 1 &&
        strstr(ar_error_message(), "rank 0 is gone"))
        dprintf(errors_fd, "anyrank: %s\n", ar_error_message());
    if (p && st != AR_OK && st != AR_ERR_ABORTED) {
        char why[512];
        snprintf(why, sizeof why, "%s", ar_error_message());
        ari_process_abort(p, st, why);
    }
    ar_process_destroy(p);
}

/* --- reporting ---------------------------------------------------------------------------------------------------- */

bool ari_transport_reports(const ar_process *p)
{
    return !p || ar_process_rank(p) == 0;
}

void ari_ranks_print(FILE *out, const ar_run *run, int world)
{
    const ar_process *p = run->process;
    ar_gpu_info gpu = {0};
    if (run->device.kind == AR_DEVICE_EMULATED)
        fprintf(out, "device: on the emulated device, the kernels of cuda on the host\n");
    if (!p && ari_run_by_nccl(run, world) && run->device.kind == AR_DEVICE_EMULATED)
        fprintf(out, "ranks: threads, each on a device of its own, connected by NCCL\n");
    const int index = ari_gpu_index(&run->device);
    if (run->device.kind == AR_DEVICE_CUDA && ari_gpu_info_get(&gpu, index) == AR_OK) {
        if (!p && world == 0 && run->device.index == AR_GPU_EACH && ari_gpu_count() > 1)
            fprintf(out, "device: a GPU for each rank, connected by NCCL, or one for all (here %d x %s)\n",
                    ari_gpu_count(), gpu.name);
        else if (!p && ari_run_by_nccl(run, world))
            fprintf(out, "device: a GPU for each rank (%d x %s), connected by NCCL\n", world, gpu.name);
        else if (p)
            fprintf(out, "device: each rank on the GPU of its number on its machine (here %s)\n", gpu.name);
        else if (world == 1)
            fprintf(out, "device: on GPU %d (%s)\n", index, gpu.name);
        else if (world == 0)
            fprintf(out, "device: all ranks share GPU %d (%s)\n", index, gpu.name);
        else
            fprintf(out, "device: %d ranks share GPU %d (%s)\n", world, index, gpu.name);
    }
    if (p)
        fprintf(out, "ranks: %d process%s, connected by %s\n", ari_process_size(p),
                ari_process_size(p) == 1 ? "" : "es", ari_process_transport(p) == AR_TRANSPORT_MPI ? "MPI" : "NCCL");
}

void ari_transport_json(json_t *o, const ar_run *run, int world)
{
    const ar_transport t = ari_run_by_nccl(run, world) ? AR_TRANSPORT_NCCL : ari_process_transport(run->process);
    json_object_set_new(o, "transport", json_string(ari_transport_name(t)));
}

/* --- silence ------------------------------------------------------------------------------------------------------ */

/* Returns the transport of processes that the arguments name, even if it does not exist; NULL: none. */
static const char *named_transport(int argc, char *const *argv)
{
    static const char name[] = "--transport";
    for (int i = 1; i < argc; i++) {
        const char *value = strncmp(argv[i], name, sizeof name - 1) == 0 ? argv[i] + sizeof name - 1 : NULL;
        if (value && *value == '=')
            value++;
        else if (value && *value == '\0')
            value = i + 1 < argc ? argv[i + 1] : NULL;
        else
            value = NULL;
        if (value && strcmp(value, ari_transport_names[AR_TRANSPORT_SIM]) != 0)
            return value;
    }
    return NULL;
}

void ari_transport_prepare(int argc, char *const *argv)
{
    if (!named_transport(argc, argv))
        return;
    /* Otherwise a kernel is loaded at its first launch, which may wait for the GPU while NCCL's kernels wait for other
     * ranks, and those ranks wait for this one. */
    (void)setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    if (!is_another())
        return;
    errors_fd = dup(STDERR_FILENO);
    kept_fd = ari_scratch_open();
    /* without /dev/null the message appears more than once, which is harmless */
    if (!freopen("/dev/null", "w", stdout) || !freopen("/dev/null", "w", stderr))
        return;
    if (kept_fd >= 0)
        (void)dup2(kept_fd, STDERR_FILENO);
}

bool ari_transport_is_silent(void)
{
    return errors_fd >= 0;
}

/* --- failing before the others are joined ------------------------------------------------------------------------- */

enum { SPEAK_AFTER_SECONDS = 2, TELL_SECONDS = 10 };

/* Joins the other processes only to report the exit code to them. The first process has printed the error already; of
 * the others, the one with the lowest rank prints it. */
static bool tell_others(const char *transport, int exit_code)
{
    ar_process *p = NULL;
    ar_process_options o = {.timeout_ns = TELL_SECONDS * UINT64_C(1000000000)};
    char why[1024];
    snprintf(why, sizeof why, "%s", ar_error_message());
    if (failed_to_join || !why[0] || ar_transport_parse(&o.transport, transport) != AR_OK)
        return false;
    set_alarm(TELL_SECONDS, -1, exit_code);
    ar_status st = ar_process_create(&p, &o);
    alarm(0);
    if (st == AR_OK)
        st = ari_process_agree(p, ar_error_set(exit_code == ARI_EXIT_USAGE ? AR_ERR_ARG : AR_ERR_INTERNAL, "%s", why));
    const bool is_reported = p != NULL;
    ar_process_destroy(p);
    return is_reported;
}

/* Prints the collected error after a delay, in which the launcher ends this process if the first process has printed
 * the same. */
static void speak(void)
{
    char words[4096];
    fflush(stderr);
    if (sleep(SPEAK_AFTER_SECONDS) > 0)
        return; /* a signal from the launcher, which is ending all processes */
    const ssize_t n = lseek(kept_fd, 0, SEEK_SET) == 0 ? read(kept_fd, words, sizeof words) : 0;
    if (n > 0)
        dprintf(errors_fd, "%.*s", (int)n, words);
}

void ari_transport_finish(int argc, char *const *argv, int exit_code)
{
    const char *transport = named_transport(argc, argv);
    if (exit_code == ARI_EXIT_SAME || joined || !transport)
        return;
    const bool is_reported = processes_started() > 1 && tell_others(transport, exit_code);
    if (!is_reported && errors_fd >= 0 && kept_fd >= 0)
        speak();
}
