/* SPDX-License-Identifier: Apache-2.0 */
/* A cluster in words. */
#include "anyrank/sim.h"
#include "sim/sim_private.h"
#include "tests/support/test.h"

static ar_sim_cluster parsed(const char *text)
{
    ar_sim_cluster c = {0};
    cr_assert_eq(ar_sim_cluster_parse(&c, text), AR_OK, "%s: %s", text, ar_error_message());
    return c;
}

static void expect(const char *text, int node, double in_s, double in_rate, double net_s, double net_rate, double flops)
{
    const ar_sim_cluster c = parsed(text);
    cr_expect_eq(c.ranks_per_node, node, "%s", text);
    const double got[] = {c.inside.latency_s, c.inside.bytes_per_s, c.between.latency_s, c.between.bytes_per_s,
                          c.flops};
    const double want[] = {in_s, in_rate, net_s, net_rate, flops};
    for (int i = 0; i < 5; i++)
        cr_expect(fabs(got[i] - want[i]) <= 1e-14 * want[i], "%s: number %d is %.17g, not %.17g", text, i, got[i],
                  want[i]);
}

Test(cluster, words_in_any_order_and_either_separator)
{
    expect("8x nvlink=2us:300GB/s net=5us:25GB/s flops=400T", 8, 2e-6, 300e9, 5e-6, 25e9, 400e12);
    expect("flops=400T,between=5us:200Gbit/s,,inside=2000ns:0.3TB/s 8x", 8, 2e-6, 300e9, 5e-6, 25e9, 400e12);
    expect("inside=0s:1e9B/s flops=1e12", 0, 0, 1e9, 0, 0, 1e12);
    expect("  inside=.5ms:12.5MB/s flops=2.5PFLOPS ", 0, 5e-4, 12.5e6, 0, 0, 2.5e15);
    expect("2x inside=nvlink3 between=roce100 flops=7GFLOPS", 2, 3.4e-6, 300e9, 9.6e-6, 12.5e9, 7e9);
}

Test(cluster, a_machine_can_be_changed_by_words_after_it)
{
    expect("h100", 8, 3.4e-6, 450e9, 9.6e-6, 50e9, 989e12);
    expect("a100 4x flops=150T", 4, 3.4e-6, 300e9, 9.6e-6, 25e9, 150e12);
}

Test(cluster, a_machine_has_memory_and_a_peak_that_slower_products_leave)
{
    for (size_t i = 0; ar_sim_cluster_names[i]; i++) {
        const ar_sim_cluster c = parsed(ar_sim_cluster_names[i]);
        cr_expect(c.memory_bytes >= 80e9 && c.flops > 0 && c.peak_flops >= c.flops, "%s", ar_sim_cluster_names[i]);
    }
    const ar_sim_cluster slower = parsed("h100 flops=600T memory=64GiB");
    cr_expect(slower.flops < slower.peak_flops && slower.memory_bytes == 64 * 0x1p30);
    const ar_sim_cluster narrow = parsed("h100 flops=1979T");
    cr_expect_eq(narrow.flops, narrow.peak_flops, "products of 8 bits are faster than the peak of 16");
    const ar_sim_cluster own = parsed("inside=1us:1GB/s flops=1T");
    cr_expect(own.memory_bytes == 0 && own.peak_flops == 0);
}

Test(cluster, rates_may_be_infinite)
{
    const ar_sim_cluster c = parsed("inside=1us:inf flops=inf");
    cr_expect(isinf(c.inside.bytes_per_s) && isinf(c.flops));
}

Test(cluster, a_description_reads_back)
{
    const char *texts[] = {"h100", "gb200-nvl72 flops=1P", "inside=2us:300GB/s flops=400T",
                           "3x inside=0s:1B/s between=7ns:1kB/s flops=1", "inside=1us:inf flops=inf"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        const ar_sim_cluster c = parsed(texts[i]);
        char text[160], again[160];
        ari_sim_cluster_describe(&c, text, sizeof text);
        const ar_sim_cluster d = parsed(text);
        ari_sim_cluster_describe(&d, again, sizeof again);
        cr_expect_str_eq(text, again);
    }
    char text[160];
    const ar_sim_cluster c = parsed("8x inside=2us:300GB/s between=5us:25GB/s flops=400T");
    ari_sim_cluster_describe(&c, text, sizeof text);
    cr_expect_str_eq(text, "8x inside=2us:300GB/s between=5us:25GB/s flops=400T");
}

Test(cluster, what_is_wrong_is_named_with_what_would_be_right)
{
    const char *wrong[][2] = {
        {"", "inside=LINK, what joins the ranks of a node, is missing"},
        {"inside=nvlink4", "flops=RATE, what a rank computes in a second, is missing"},
        {"8x inside=nvlink4 flops=1T", "between=LINK, what joins the nodes, is missing"},
        {"inside=nvlink4 between=ndr flops=1T", "RANKSx, how many ranks a node has, is missing"},
        {"8x inside=2:300GB/s", "'2' is no latency; expected a number and behind it one of: ns, us, ms, s"},
        {"inside=2us:300Gb/s", "'300Gb/s' is no rate; expected a number and behind it one of: B/s, kB/s, MB/s"},
        {"inside=2us:", "'' is no rate"},
        {"inside=2us:e9B/s", "'e9B/s' is no rate"},
        {"inside=2us:1e999B/s", "'1e999B/s' is no rate"},
        {"inside=nvlink",
         "a link is LATENCY:RATE, as 2us:300GB/s, or one of nvlink3, nvlink4, nvlink5, pcie4, pcie5, hdr, ndr"},
        {"flops=400X", "'400X' is no rate of computation; expected a number and behind it one of: nothing, G, T, P"},
        {"0x", "'0x' is none of RANKSx (1 to 4096 ranks of a node)"},
        {"5000x", "'5000x' is none of RANKSx"},
        {"99999999999999999999x", "is none of RANKSx"},
        {"8", "'8' is none of RANKSx"},
        {"v100", "'v100' is none of RANKSx"},
        {"8x h100", "in front a machine's name, a100, h100"},
        {"h100 8x 8x", "'8x' says a second time"},
        {"inside=nvlink4 nvlink=nvlink3 flops=1", "'nvlink=nvlink3' says a second time"},
        {"inside=1us:0GB/s flops=1T", "the link inside a node moves 0 bytes/s; more than 0 is expected"},
        {"inside=infs:1GB/s flops=1T", "has a latency of inf s; 0 or more is expected"},
        {"2x inside=nvlink3 between=1us:0B/s flops=1T", "the link between nodes moves 0 bytes/s"},
        {"inside=nvlink4 flops=2T peak=1T", "flops=2T is more than the peak of 1T"},
        {"h100 memory=0GB", "'memory=0GB': a rank has more than 0 bytes"},
        {"h100 memory=80", "'80' is no size of memory; expected a number and behind it one of: MB, GB"},
        {"flops=0", "'flops=0': a rank computes more than 0 flops"},
        {"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
         "a word of 100 characters; at most 95 are expected"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        ar_sim_cluster c = {.ranks_per_node = 77};
        cr_expect_refused(ar_sim_cluster_parse(&c, wrong[i][0]), AR_ERR_ARG, wrong[i][1]);
        cr_expect_eq(c.ranks_per_node, 77, "'%s' changed the cluster", wrong[i][0]);
    }
}

static ar_status nothing(ar_comm *world, void *arg)
{
    (void)world, (void)arg;
    return AR_OK;
}

Test(cluster, a_run_refuses_one_that_makes_no_sense)
{
    const ar_sim_cluster good = {.ranks_per_node = 2, .inside = {1e-6, 1e9}, .between = {1e-6, 1e9}, .flops = 1e12};
    ar_sim_cluster bad[11];
    for (int i = 0; i < 11; i++)
        bad[i] = good;
    bad[0].ranks_per_node = -1;
    bad[1].inside.latency_s = -1e-9;
    bad[2].inside.latency_s = NAN;
    bad[3].inside.bytes_per_s = -1;
    bad[4].inside.bytes_per_s = NAN;
    bad[5].between.bytes_per_s = 0;
    bad[6].flops = 0;
    bad[7].flops = NAN;
    bad[8].flops = -1e12;
    bad[9].gpu = -1;
    bad[10].gpu = 6;
    for (int i = 0; i < 11; i++) {
        const ar_sim_options o = {.cluster = &bad[i]};
        cr_expect_eq(ar_sim_run(1, &o, nothing, NULL, NULL), AR_ERR_ARG, "cluster %d runs", i);
        cr_expect_says("cluster: ");
    }
    ar_sim_cluster one_node = good;
    one_node.ranks_per_node = 0;
    one_node.between = (ar_sim_link){NAN, NAN};
    const ar_sim_options o = {.cluster = &one_node};
    cr_expect_eq(ar_sim_run(1, &o, nothing, NULL, NULL), AR_OK, "a link that nobody uses does not matter: %s",
                 ar_error_message());
}
