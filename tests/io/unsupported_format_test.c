/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/io/file.h"
#include "ref/io/safetensors_private.h"
#include "support/together.h"
#include "tests/io/st_bytes.h"
#include "tests/support/temporary.h"

CLAIM(each_kind_is_known_by_its_first_bytes)
{
    static const struct {
        const char *path, *what;
        size_t n;
        const char *head;
    } files[] = {{"a.x", "a NumPy array", 12, "\x93NUMPY\1\0v\0{'"},
                 {"a.npz", "an archive of NumPy arrays", 8, "PK\3\4\0\0\0\0"},
                 {"a.x", "an archive of NumPy arrays", 20, "PK\3\4\0\0\0\0\0\0w.npy\0\0\0\0"},
                 {"a.pt", "a file of torch.save", 24, "PK\3\4\0\0\0\0archive/data.pkl"},
                 {"a.x", "a file of torch.save", 14, "\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20j\xa8P\x19"},
                 {"a.zip", "a zip archive", 12, "PK\3\4\0\0\0\0a.tx"},
                 {"a.x", "a GGUF file", 8, "GGUF\3\0\0\0"},
                 {"a.x", "an HDF5 file", 8, "\x89HDF\r\n\x1a\n"},
                 {"a.x", "an Arrow file", 8, "ARROW1\0\0"},
                 {"a.x", "compressed by gzip", 4, "\x1f\x8b\x08\0"},
                 {"a.x", "compressed by zstd", 4, "\x28\xb5\x2f\xfd"},
                 {"__0_0.distcp", "a part of a checkpoint", 24, "PK\3\4\0\0\0\0archive/data.pkl"}};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        cr_expect_eq(ari_unsupported_format_check(files[i].path, files[i].head, files[i].n, ARI_WANT_TENSORS),
                     AR_ERR_FORMAT);
        cr_expect(error_says(files[i].what) && error_says("expected a safetensors file"), "%s: %s", files[i].what,
                  ar_error_message());
        cr_expect_eq(ari_unsupported_format_check(files[i].path, files[i].head, files[i].n - 1, ARI_WANT_TENSORS),
                     files[i].n > 14 || i == 0 || i == 1 || i == 5 || i == 8 || i == 9 ? AR_ERR_FORMAT : AR_OK,
                     "%s cut off", files[i].what);
    }
}

CLAIM(what_is_asked_for_is_a_supported_format)
{
    static const char tensors[] = "\x40\0\0\0\0\0\0\0{\"a\":", words[] = "GGUF and HDF5 are formats";
    static const char gzip_tokens[] = "\x1f\x8b\x08\0\1\0\2\0";
    cr_expect_ok(ari_unsupported_format_check("a", tensors, 12, ARI_WANT_TENSORS));
    cr_expect_eq(ari_unsupported_format_check("a", tensors, 12, ARI_WANT_TOKENS), AR_ERR_FORMAT);
    cr_expect_ok(ari_unsupported_format_check("a", words, sizeof words, ARI_WANT_TEXT));
    cr_expect_eq(ari_unsupported_format_check("a", gzip_tokens, 8, ARI_WANT_TOKENS), AR_OK,
                 "three bytes are too few to say so");
    cr_expect_ok(ari_unsupported_format_check("a", "", 0, ARI_WANT_TENSORS));
}

/* A folder with one file of these bytes, or a folder in it. */
static ar_status ask(const char *name, const void *bytes, size_t n)
{
    SCOPED(temp_end) const temp_path folder = temp_folder();
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder.path, name);
    if (bytes)
        cr_assert_ok(ari_file_write(path, bytes, n));
    else
        cr_assert_eq(mkdir(path, 0777), 0);
    return ari_unsupported_format_check_folder(folder.path);
}

CLAIM(a_folder_with_weights_that_are_not_read_is_refused_with_the_file)
{
    char names[] = "pytorch_model.bin pytorch_model-00001-of-00002.bin pytorch_model.bin.index.json "
                   "adapter_model.safetensors adapter_model.bin model.gguf tf_model.h5 flax_model.msgpack "
                   "consolidated.00.pth __0_0.distcp .metadata step=0___rank=1___dump_index=3___name=h.pt "
                   "model-00001-of-00002.safetensors mp_rank_00_model_states.pt latest_checkpointed_iteration.txt";
    for (const char *name = strtok(names, " "); name; name = strtok(NULL, " ")) {
        cr_expect_eq(ask(name, "x", 1), AR_ERR_FORMAT, "%s", name);
        cr_expect(error_says(name) && error_says("model.safetensors"), "%s: %s", name, ar_error_message());
    }
    cr_expect_refused(ask("iter_0000010", NULL, 0), AR_ERR_FORMAT, "Megatron");
    cr_expect_refused(ask("global_step10", NULL, 0), AR_ERR_FORMAT, "DeepSpeed");
    cr_expect_eq(ask("any.pt", "PK\3\4archive/data.pkl", 20), AR_ERR_FORMAT);
}

CLAIM(what_the_python_package_converts_is_said_with_the_one_command)
{
    static const struct {
        const char *file, *what;
    } cases[] = {{"__0_0.distcp", "torch.distributed.checkpoint"},
                 {".metadata", "torch.distributed.checkpoint"},
                 {"zero_pp_rank_0_mp_rank_00_optim_states.pt", "DeepSpeed"},
                 {"mp_rank_00_model_states.pt", "DeepSpeed"},
                 {"mp_rank_00", "Megatron"},
                 {"latest_checkpointed_iteration.txt", "Megatron"},
                 {"step=0___rank=1___dump_index=3___name=h.pt", "SGLang"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cr_expect_eq(ask(cases[i].file, "x", 1), AR_ERR_FORMAT, "%s", cases[i].file);
        cr_expect(error_says(cases[i].what), "%s: %s", cases[i].file, ar_error_message());
        const char *command = strstr(ar_error_message(), "\n  python3 -m anyrank.convert '/tmp/anyrank-test-");
        cr_expect(command && strstr(command, "' OUT ") && !strchr(command, '"'), "%s: %s", cases[i].file,
                  ar_error_message());
    }
}

/* FSDP's model_0.pt and model_1.pt: what converts the first alone would be believed to convert both. */
CLAIM(files_of_several_ranks_have_no_line_that_converts_the_first_alone)
{
    static const char zip[] = "PK\3\4archive/data.pkl";
    SCOPED(temp_end) const temp_path folder = temp_folder();
    for (int i = 0; i < 2; i++) {
        char path[96];
        snprintf(path, sizeof path, "%s/model_%d.pt", folder.path, i);
        cr_assert_ok(ari_file_write(path, zip, sizeof zip));
        cr_expect_eq(ari_unsupported_format_check_folder(folder.path), AR_ERR_FORMAT);
        cr_expect(error_says("this converts it") == (i == 0), "%d: %s", i, ar_error_message());
    }
    cr_expect(error_says("model_0.pt and 1 more") && error_says("torch.distributed.checkpoint"), "%s",
              ar_error_message());
}

CLAIM(safetensors_of_any_name_are_weights_by_their_tensors)
{
    const float x[] = {1, 2};
    ar_st_tensor t = {.name = "a.weight", .dtype = AR_F32, .ndim = 1, .shape = {2}, .data = x};
    const char *const placed[] = {"ANYRANK_PLACEMENT", "{}"};
    static const struct {
        const char *file, *tensor;
        size_t pairs;
        const char *what; /* NULL: it may lie there */
    } cases[] = {{"other.safetensors", "a.weight", 0, "model.safetensors.index.json"},
                 {"rank-0.safetensors", "a.weight", 1, "anyrank.convert"},
                 {"batch.safetensors", "input_ids", 0, NULL},
                 {"model.safetensors", "a.weight", 0, NULL},
                 {"grads.safetensors", "a.weight", 0, NULL}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        SCOPED(temp_end) const temp_path folder = temp_folder();
        char path[256];
        snprintf(path, sizeof path, "%s/%s", folder.path, cases[i].file);
        t.name = cases[i].tensor;
        cr_assert_ok(ari_st_write(path, &t, 1, placed, cases[i].pairs));
        cr_expect_eq(ari_unsupported_format_check_folder(folder.path), cases[i].what ? AR_ERR_FORMAT : AR_OK, "%s",
                     cases[i].file);
        cr_expect(!cases[i].what || error_says(cases[i].what), "%s: %s", cases[i].file, ar_error_message());
    }
}

CLAIM(what_is_no_weight_may_lie_in_a_model_s_folder)
{
    static const char *const names[] = {"train.bin",      "training_args.bin", "optimizer.pt", "rng_state_0.pth",
                                        "tokenizer.json", "README.md",         "notes.pt"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        cr_expect_eq(ask(names[i], "\1\0\2\0", 4), AR_OK, "%s: %s", names[i], ar_error_message());
}

EVERY_CLAIM(unsupported_format)
