#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints split over ranks and merged by python -m anyrank.convert: what each rank's file holds against what the rank
of a run holds, round trips byte for byte, and requests that are refused."""

import json
import os
import random
import shutil
import struct
import sys
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
import tensor_files  # noqa: E402
from command import GOLDEN, Case, convert, run  # noqa: E402


WIDTH = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I64": 8, "U8": 1}
ORDER = "BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 I16 U16 F16 BF16 I32 U32 F32 C64 F64 I64 U64".split()


class Tensor:
    """dtype, shape, and the elements as a list of byte strings."""

    def __init__(self, dtype, shape, data):
        self.dtype, self.shape, self.data = dtype, list(shape), data

    def __eq__(self, other):
        return (self.dtype, self.shape, self.data) == (other.dtype, other.shape, other.data)

    def take(self, dim, indices):
        """The slices at `indices` along a dimension of a tensor of one or two."""
        width = WIDTH[self.dtype]
        rows, columns = (self.shape + [1])[:2]
        at = [(r, c) for r in (indices if dim == 0 else range(rows)) for c in (indices if dim == 1 else range(columns))]
        shape = list(self.shape)
        shape[dim] = len(indices)
        return Tensor(self.dtype, shape, b"".join(self.data[(r * columns + c) * width:][:width] for r, c in at))


def count(shape):
    n = 1
    for extent in shape:
        n *= extent
    return n


def fresh(name, shape, dtype="BF16"):
    return Tensor(dtype, shape, random.Random(name).randbytes(count(shape) * WIDTH[dtype]))


def write(path, tensors, metadata=None):
    """As the official library writes it: dtypes from the end of their order, then names."""
    header, data, at = {"__metadata__": metadata or {"format": "pt"}}, [], 0
    for name in sorted(tensors, key=lambda n: (-ORDER.index(tensors[n].dtype), n)):
        t = tensors[name]
        header[name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [at, at + len(t.data)]}
        at += len(t.data)
        data.append(t.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(tensor_files.packed(text + b" " * (-len(text) % 8), b"".join(data)))


def read(path):
    return {name: Tensor(*t) for name, t in tensor_files.read(path).items()}, \
        tensor_files.unpacked(path)[0].get("__metadata__", {})


LLAMA = {"model_type": "llama", "vocab_size": 257, "hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 3,
         "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": False,
         "attention_bias": True, "max_position_embeddings": 32, "rms_norm_eps": 1e-5}
GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 16}


def llama(c, dtype="BF16"):
    h, f, v = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    shapes = {"model.embed_tokens.weight": [v, h], "model.norm.weight": [h]}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = [v, h]
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        linear = {"self_attn.q_proj": [q, h], "self_attn.k_proj": [kv, h], "self_attn.v_proj": [kv, h],
                  "self_attn.o_proj": [h, q], "mlp.gate_proj": [f, h], "mlp.up_proj": [f, h], "mlp.down_proj": [h, f]}
        for name, shape in linear.items():
            shapes[f"{p}{name}.weight"] = shape
            if c["attention_bias"] and "attn" in name:
                shapes[f"{p}{name}.bias"] = shape[:1]
        for name in "input_layernorm", "post_attention_layernorm":
            shapes[f"{p}{name}.weight"] = [h]
    return {name: fresh(name, shape, dtype) for name, shape in shapes.items()}


def gpt2(c):
    d, p = c["n_embd"], "transformer."
    shapes = {p + "wte.weight": [c["vocab_size"], d], p + "wpe.weight": [c["n_positions"], d],
              p + "ln_f.weight": [d], p + "ln_f.bias": [d]}
    for i in range(c["n_layer"]):
        for name, shape in {"attn.c_attn": [d, 3 * d], "attn.c_proj": [d, d], "mlp.c_fc": [d, 4 * d],
                            "mlp.c_proj": [4 * d, d]}.items():
            shapes[f"{p}h.{i}.{name}.weight"] = shape
            shapes[f"{p}h.{i}.{name}.bias"] = shape[1:]
        for name in "ln_1", "ln_2":
            shapes[f"{p}h.{i}.{name}.weight"] = shapes[f"{p}h.{i}.{name}.bias"] = [d]
    return {name: fresh(name, shape, "F32") for name, shape in shapes.items()}


QWEN2_MOE = {**LLAMA, "model_type": "qwen2_moe", "qkv_bias": False, "attention_bias": False, "num_experts": 3,
             "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
             "mlp_only_layers": [1]}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "attention_bias": False, "num_local_experts": 2, "num_experts_per_tok": 1}


def small(name, shape):
    """Values that a model can be run with."""
    numbers = random.Random(name)
    return Tensor("F32", shape, struct.pack(f"<{count(shape)}f", *(numbers.uniform(-0.1, 0.1) for _ in range(count(shape)))))


def experts(c, make=fresh):
    """A model's tensors, and as transformers 5 has them: those of a layer's experts in two."""
    mixtral = c["model_type"] == "mixtral"
    h, n = c["hidden_size"], c["num_local_experts" if mixtral else "num_experts"]
    f, shared = c["intermediate_size" if mixtral else "moe_intermediate_size"], c.get("shared_expert_intermediate_size")
    apart = {name: make(name, t.shape) for name, t in llama(c).items()}
    together = dict(apart)
    for i in set(range(c["num_hidden_layers"])) - set(c.get("mlp_only_layers", [])):
        p, now = f"model.layers.{i}.{'block_sparse_moe' if mixtral else 'mlp'}.", f"model.layers.{i}.mlp."
        for name in "gate_proj", "up_proj", "down_proj":
            del apart[f"{now}{name}.weight"], together[f"{now}{name}.weight"]
        apart[p + "gate.weight"] = together[now + "gate.weight"] = make(p, [n, h])
        if shared:
            for name, shape in {"shared_expert.gate_proj": [shared, h], "shared_expert.up_proj": [shared, h],
                                "shared_expert.down_proj": [h, shared], "shared_expert_gate": [1, h]}.items():
                apart[f"{p}{name}.weight"] = together[f"{now}{name}.weight"] = make(p + name, shape)
        gate, up, down = ([make(f"{p}{k}{e}", [h, f] if k == 2 else [f, h]) for e in range(n)] for k in range(3))
        for k, each in zip(("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj"), (gate, up, down)):
            apart.update({f"{p}experts.{e}.{k}.weight": t for e, t in enumerate(each)})
        together[now + "experts.gate_up_proj"] = Tensor(gate[0].dtype, [n, 2 * f, h],
                                                        b"".join(g.data + u.data for g, u in zip(gate, up)))
        together[now + "experts.down_proj"] = Tensor(down[0].dtype, [n, h, f], b"".join(t.data for t in down))
    return apart, together


# --- running ---------------------------------------------------------------------------------------------------------

class ReshardTest(Case):
    def ran(self, *arguments, **options):
        return convert(*arguments, cwd=self.folder, **options)

    def result(self, *arguments):
        """Its notes, and the files of tensors in the folder behind --out."""
        printed = self.passes(*arguments).splitlines()
        out = arguments[arguments.index("--out") + 1]
        return {"notes": [line.removeprefix("note: ") for line in printed[:-1]],
                "files": sorted(path.name for path in out.iterdir() if path.suffix == ".safetensors")}

    def model(self, config, tensors, name="model"):
        folder = self.put(f"{name}/config.json", config).parent
        write(folder / "model.safetensors", tensors)
        return folder

    def refused(self, text, *arguments):
        super().refused(*arguments, says=text)

    def same_files(self, a, b, but=()):
        names = [sorted(p.name for p in folder.iterdir() if p.name[0] != "." and p.name not in but)
                 for folder in (a, b)]
        self.assertEqual(names[0], names[1])
        for name in names[0]:
            self.assertEqual((a / name).read_bytes(), (b / name).read_bytes(), name)


class Split(ReshardTest):

    def test_stages_take_their_layers_and_tied_weights_are_on_both_ends(self):
        config = {**LLAMA, "tie_word_embeddings": True}
        out = self.folder / "out"
        self.result(self.model(config, llama(config)), "--tp", 2, "--pp", 2, "--out", out)
        names = [read(out / f"rank-{rank:05}.safetensors")[0] for rank in range(4)]
        layers = [sorted({n.split(".")[2] for n in held if ".layers." in n}) for held in names]
        self.assertEqual(layers, [["0", "1"], ["0", "1"], ["2"], ["2"]])
        self.assertTrue(all("model.embed_tokens.weight" in held for held in names))
        self.assertEqual(["model.norm.weight" in held for held in names], [False, False, True, True])
        placement = json.loads(read(out / "rank-00003.safetensors")[1]["ANYRANK_PLACEMENT"])
        self.assertEqual(placement["mesh"], [["pp", 2], ["tp", 2]])
        self.assertEqual(placement["tensors"]["model.embed_tokens.weight"],
                         {"shape": [257, 16], "replica": 1, "replicas": 2})

    def test_ranks_take_several_stages_and_the_layers_that_are_given(self):
        config = {**LLAMA, "num_hidden_layers": 6}
        model = self.model(config, llama(config))
        for options, held in ((("--pp", 3, "--virtual-stages", 2), ["03", "14", "25"]),
                              (("--pp", 2, "--virtual-stages", 2), ["034", "125"]),
                              (("--pp", 3, "--stages", "1,5,0"), ["0", "12345", ""]),
                              (("--pp", 2, "--virtual-stages", 2, "--stages", "0,3,2,1"), ["34", "0125"])):
            out = self.folder / "-".join(map(str, options))
            result = self.result(model, *options, "--out", out)
            names = [read(out / file)[0] for file in result["files"]]
            layers = ["".join(sorted({n.split(".")[2] for n in rank if ".layers." in n})) for rank in names]
            self.assertEqual(layers, held, options)
            self.assertEqual(["lm_head.weight" in rank for rank in names], [False] * (len(held) - 1) + [True])
            self.result(out, "--out", self.folder / "back")
            self.assertEqual((self.folder / "back/model.safetensors").read_bytes(),
                             (model / "model.safetensors").read_bytes())
            shutil.rmtree(self.folder / "back")
        out = self.folder / "out"
        self.refused("the layers given for 3 stages are 5; the model has 6", model, "--pp", 3, "--stages", "1,2,2",
                     "--out", out)
        self.refused("the bundled model of this name has no weights", "llama-demo", "--tp", 2, "--out", out)
        self.refused("stage 1 has no layers", model, "--pp", 3, "--stages", "3,0,3", "--out", out)
        self.refused("give one number for each", model, "--pp", 3, "--stages", "3,3", "--out", out)
        self.refused("without a pipeline", model, "--tp", 2, "--stages", "6", "--out", out)
        self.refused("without a pipeline", model, "--virtual-stages", 2, "--out", out)
        self.refused("a tp of at least 2", model, "--pp", 2, "--embedding-hidden", "--out", out)
        self.refused("6 layers cannot be split over 8 stages", model, "--pp", 4, "--virtual-stages", 2, "--out", out)

    def test_ranks_get_what_the_ranks_of_a_run_hold(self):
        for model, layout in (("gpt2-tiny", ["--pp", 2, "--tp", 2]), ("llama-gqa-tiny", ["--pp", 2, "--tp", 2]),
                              ("llama-gqa-tiny", ["--pp", 3, "--stages", "1,1,0", "--tp", 4]),
                              ("gpt2-tiny", ["--pp", 2, "--virtual-stages", 2, "--stages", "0,1,1,0"]),
                              ("experts/qwen2moe-tiny", ["--pp", 2, "--tp", 2]),
                              ("experts/qwen2moe-tiny", ["--ep", 2, "--tp", 2]),
                              ("experts/deepseek-v3-mtp-tiny", ["--pp", 2, "--tp", 2]),
                              ("variants/gpt-neox-tiny", ["--tp", 2]), ("variants/starcoder2-tiny", ["--tp", 2]),
                              ("variants/glm4-tiny", ["--tp", 2]), ("phi3-tiny", ["--tp", 2, "--pp", 2]),
                              ("experts/mixtral-tiny", ["--tp", 4])):
            golden, out = GOLDEN / model, self.folder / "-".join(map(str, [model.replace("/", "-"), *layout]))
            out.mkdir()
            more = ["--schedule-pp", "interleaved"] if "--virtual-stages" in layout else []
            more += ["--dp", layout[layout.index("--ep") + 1]] if "--ep" in layout else []
            done = run("grads", golden, "--input", golden / "batch.safetensors", "--per-rank", *layout, *more,
                       "--out", out / "run")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.result(golden, *layout, "--out", out / "split")
            files = sorted(path.name for path in (out / "split").glob("rank-*"))
            self.assertEqual(files, sorted(path.name for path in (out / "run/ranks").glob("rank-*")))
            for file in files:
                split, said = read(out / "split" / file)
                held, told = read(out / "run/ranks" / file)
                self.assertEqual(split, {n.removesuffix(":init"): t for n, t in held.items() if n.endswith(":init")})
                said, told = (json.loads(metadata["ANYRANK_PLACEMENT"]) for metadata in (said, told))
                self.assertEqual((said["rank"], said["world"]), (told["rank"], told["world"]))
                for name, place in said["tensors"].items():
                    self.assertEqual(place, told["tensors"][name + ":init"], (file, name))


def halved(t, half, rank):
    """Of stacked experts, gate before up, what a rank has: `half` of their width."""
    experts, rows, columns = t.shape
    down, width, size = columns == 2 * half, WIDTH[t.dtype], rows * columns
    kept = [(r, c) for r in range(rows) for c in range(columns) if (c if down else r % (2 * half)) // half == rank]
    data = b"".join(t.data[(e * size + r * columns + c) * width:][:width] for e in range(experts) for r, c in kept)
    return Tensor(t.dtype, [experts, rows, half] if down else [experts, rows // 2, columns], data)


class RoundTrip(ReshardTest):
    def there_and_back(self, config, tensors, *layouts):
        model = self.model(config, tensors)
        was = model
        for i, layout in enumerate(layouts):
            self.result(was, *layout, "--out", self.folder / f"step{i}")
            was = self.folder / f"step{i}"
        self.result(was, "--out", self.folder / "merged")
        self.same_files(model, self.folder / "merged")

    def test_from_layout_to_layout(self):
        self.there_and_back(LLAMA, llama(LLAMA), ["--tp", 8], ["--tp", 2, "--pp", 3], ["--tp", 4],
                            ["--tp", 1, "--pp", 2], ["--tp", 2, "--embedding-hidden"])

    def test_packed_and_tied(self):
        self.there_and_back(GPT2, gpt2(GPT2), ["--tp", 4], ["--tp", 2, "--pp", 2])
        config = {**LLAMA, "tie_word_embeddings": True, "num_key_value_heads": 1}
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        self.there_and_back(config, llama(config), ["--tp", 4, "--pp", 3])

    def test_experts(self):
        self.there_and_back(QWEN2_MOE, experts(QWEN2_MOE)[0], ["--tp", 4], ["--tp", 2, "--pp", 3], ["--tp", 8],
                            ["--ep", 3, "--pp", 2])

    def test_stacked_experts_stay_together(self):
        """With their optimizer state, from whole files and from ranks that have every other part."""
        for config, ep in (QWEN2_MOE, 3), (MIXTRAL, 2):
            stacked = experts(config)[1]
            here = self.folder / config["model_type"]
            model = self.model(config, stacked, f"{config['model_type']}/model")
            write(model / "optimizer.safetensors", {f"{n}.exp_avg": t for n, t in stacked.items()})
            self.result(model, "--tp", 2, "--pp", 3, "--out", here / "tp")
            down = f"model.layers.{config['num_hidden_layers'] - 1}.mlp.experts.down_proj"
            held = read(here / "tp/rank-00005.safetensors")[0]
            self.assertEqual(held[down], halved(stacked[down], held[down].shape[2], 1))
            self.assertEqual(held[down + ".exp_avg"], held[down])
            self.result(here / "tp", "--ep", ep, "--out", here / "ep")
            held = read(here / "ep/rank-00001.safetensors")[0]
            self.assertEqual(held[down].data, stacked[down].data[len(held[down].data):2 * len(held[down].data)])
            self.result(here / "ep", "--out", here / "merged")
            self.same_files(model, here / "merged")

    def test_stacked_experts_are_read_as_weights(self):
        for config in QWEN2_MOE, MIXTRAL:
            hashes = set()
            for k, tensors in enumerate(experts(config, small)):
                model = self.model(config, tensors, f"{config['model_type']}{k}")
                done = run("grads", model, "--input", GOLDEN / "experts/mixtral-tiny/batch.safetensors", "--tp", 2,
                           "--json", "-", "--out", model / "out")
                self.assertEqual(done.returncode, 0, done.stderr)
                hashes.add(json.loads(done.stdout)["outputs_hash"])
            self.assertEqual(len(hashes), 1, config)

    def test_stacked_experts_of_ranks_are_put_together(self):
        stacked = experts(MIXTRAL)[1]
        self.put("ranks/config.json", MIXTRAL)
        half = MIXTRAL["intermediate_size"] // 2
        for rank in range(2):
            write(self.folder / f"ranks/tp{rank}.safetensors",
                  {n: halved(t, half, rank) if "experts" in n else t for n, t in stacked.items()})
        rules = [{"match": "*.gate_up_proj", "shard": {"tp": 1}, "blocks": [1, 1]},
                 {"match": "*.down_proj", "shard": {"tp": 2}}]
        mapping = self.put("map.json", {"version": 1, "mesh": [["tp", 2]], "files": "tp{tp}.safetensors", "tensors": rules})
        self.result(self.folder / "ranks", "--map", mapping, "--out", self.folder / "merged")
        self.assertEqual(read(self.folder / "merged/model.safetensors")[0], stacked)

    def test_a_layout_from_another_is_the_one_from_the_model(self):
        model = self.model(LLAMA, llama(LLAMA))
        self.result(model, "--tp", 4, "--out", self.folder / "four")
        self.result(self.folder / "four", "--tp", 2, "--out", self.folder / "two")
        self.result(model, "--tp", 2, "--out", self.folder / "direct")
        self.same_files(self.folder / "two", self.folder / "direct")

    def test_shards_have_an_index_and_can_be_read_again(self):
        model = self.model(LLAMA, llama(LLAMA))
        result = self.result(model, "--shard-size", 8000, "--out", self.folder / "shards")
        index = json.loads((self.folder / "shards/model.safetensors.index.json").read_text())
        self.assertGreater(len(result["files"]), 3)
        self.assertEqual(sorted(set(index["weight_map"].values())), result["files"])
        self.result(self.folder / "shards", "--tp", 4, "--out", self.folder / "four")
        self.result(self.folder / "four", "--out", self.folder / "merged")
        self.same_files(model, self.folder / "merged")

    def test_optimizer_state_lies_as_its_parameters_do(self):
        tensors = llama(LLAMA)
        model = self.model(LLAMA, tensors, "step-00000007")
        state = {f"{n}.{s}": fresh(n + s, t.shape, "F32") for n, t in tensors.items() for s in ("exp_avg", "exp_avg_sq")}
        write(model / "optimizer.safetensors", state)
        (model / "training.json").write_text("{}")
        (self.folder / "latest").symlink_to(model.name)
        self.result(self.folder, "--tp", 4, "--out", self.folder / "four")
        held, _ = read(self.folder / "four/rank-00001.safetensors")
        name = "model.layers.2.self_attn.v_proj.weight.exp_avg"
        self.assertEqual(held[name], state[name].take(0, range(4)))  # rank 1 has the first of 2 KV heads
        self.result(self.folder / "four", "--out", self.folder / "merged")
        self.same_files(model, self.folder / "merged")
        for folder in (model, self.folder):
            done = run("verify", folder, self.folder / "four")
            self.assertIn(f"the same bits: {3 * len(tensors)} tensors", done.stdout)
        changed = state[name].data
        state[name].data = bytes([changed[0] ^ 1]) + changed[1:]
        write(model / "optimizer.safetensors", state)
        self.assertIn(f"execution order: {name}", run("verify", self.folder / "merged", model).stdout)
        write(model / "optimizer.safetensors", tensors)
        self.refused("two files have the tensor", model, "--out", self.folder / "twice")

    def test_copies_that_differ_are_refused(self):
        out = self.folder / "out"
        self.result(self.model(LLAMA, llama(LLAMA)), "--tp", 4, "--out", out)
        tensors, metadata = read(out / "rank-00002.safetensors")
        norm = tensors["model.norm.weight"]
        norm.data = norm.data[:6] + b"\0\0" + norm.data[8:]
        write(out / "rank-00002.safetensors", tensors, metadata)
        self.refused("'model.norm.weight': the copies of ranks 0 and 2 differ in 1 of 16 elements, first at [3]", out,
                     "--out", self.folder / "merged")


class Unusual(ReshardTest):
    def test_names_that_are_not_known_are_copied_whole_and_noted(self):
        tensors = {**llama(LLAMA), "model.layers.1.self_attn.rotary_emb.inv_freq": fresh("inv", [2], "F32"),
                   "adapter.lora_A": fresh("a", [3, 5], "U8")}
        model = self.model(LLAMA, tensors)
        result = self.result(model, "--tp", 2, "--pp", 3, "--out", self.folder / "out")
        self.assertEqual(result["notes"], ["2 tensors of names that are not known, copied whole: "
                                           "'model.layers.1.self_attn.rotary_emb.inv_freq', 'adapter.lora_A'"])
        held = [read(self.folder / f"out/rank-0000{rank}.safetensors")[0] for rank in range(6)]
        self.assertTrue(all(h["adapter.lora_A"] == tensors["adapter.lora_A"] for h in held))
        self.assertEqual(["model.layers.1.self_attn.rotary_emb.inv_freq" in h for h in held],
                         [False, False, True, True, False, False])
        cut = self.result(model, "--tp", 2, "--shard", "*.inv_freq=0", "--shard", "adapter.*=copy", "--out",
                          self.folder / "cut")
        self.assertEqual(cut["notes"], [])
        self.assertEqual(read(self.folder / "cut/rank-00001.safetensors")[0][
            "model.layers.1.self_attn.rotary_emb.inv_freq"].shape, [1])
        self.result(self.folder / "out", "--out", self.folder / "merged")
        self.same_files(model, self.folder / "merged")

    def test_a_padded_vocabulary_is_cut_and_padded_again(self):
        model = self.model(LLAMA, llama(LLAMA))
        padded = {n: Tensor(t.dtype, [264] + t.shape[1:], t.data + b"\xab" * 7 * 16 * 2) if t.shape[0] == 257 else t
                  for n, t in llama(LLAMA).items()}
        other = self.model(LLAMA, padded, "padded")
        result = self.result(other, "--out", self.folder / "cut")
        self.assertEqual(result["notes"], ["rows past the vocabulary of 257 cut: 'lm_head.weight', "
                                           "'model.embed_tokens.weight'"])
        self.same_files(model, self.folder / "cut")
        self.result(model, "--tp", 4, "--pad-vocab", 8, "--out", self.folder / "four")
        last, metadata = read(self.folder / "four/rank-00003.safetensors")
        self.assertEqual(last["lm_head.weight"].shape, [66, 16])
        self.assertEqual(last["lm_head.weight"].data[59 * 32:], bytes(7 * 32))
        self.assertEqual(json.loads(metadata["ANYRANK_PLACEMENT"])["tensors"]["lm_head.weight"]["shape"], [264, 16])
        self.result(other, "--tp", 4, "--pad-vocab", 8, "--out", self.folder / "from padded")
        self.same_files(self.folder / "four", self.folder / "from padded")
        self.result(self.folder / "four", "--out", self.folder / "merged")
        self.same_files(model, self.folder / "merged")

    def test_names_without_the_models_prefix(self):
        tensors = {n.removeprefix("transformer."): t for n, t in gpt2(GPT2).items()}
        self.result(self.model(GPT2, tensors), "--tp", 2, "--out", self.folder / "out")
        held, _ = read(self.folder / "out/rank-00001-2.safetensors")
        self.assertEqual(held["h.1.attn.c_attn.bias"], tensors["h.1.attn.c_attn.bias"].take(0, range(36, 48)))  # of k

    def test_merging_needs_no_config(self):
        out = self.folder / "out"
        tensors = llama(LLAMA)
        self.result(self.model(LLAMA, tensors), "--tp", 2, "--out", out)
        (out / "config.json").unlink()
        self.result(out, "--out", self.folder / "merged")
        self.assertEqual(read(self.folder / "merged/model.safetensors")[0], tensors)
        self.refused("give config (--config FILE)", out, "--tp", 4, "--out", self.folder / "four")
        self.result(out, "--tp", 4, "--config", self.folder / "model", "--out", self.folder / "four")
        self.assertTrue((self.folder / "four/config.json").exists())

    def test_small_files_are_taken_along(self):
        model = self.model(LLAMA, llama(LLAMA))
        (model / "tokenizer.json").write_text("{}")
        (model / "model.json").write_text('{"format": "anyrank model"}')
        (model / "tokenizer.model").write_bytes(b"\0\1")
        (model / "pytorch_model.bin").write_bytes(b"weights")
        result = self.result(model, "--tp", 2, "--out", self.folder / "out")
        self.assertTrue((self.folder / "out/tokenizer.json").exists())
        self.assertFalse((self.folder / "out/model.json").exists())
        self.assertEqual(result["notes"], ["not read and not taken along, for the model's tensors are in other files: "
                                           "pytorch_model.bin"])
        self.assertEqual((self.folder / "out/tokenizer.model").read_bytes(), b"\0\1")
        self.assertFalse((self.folder / "out/pytorch_model.bin").exists())

    @unittest.skipIf("ANYRANK_TEST_SMALL" in os.environ, "hundreds of megabytes: ./test --all")
    def test_memory_is_that_of_the_largest_tensor_not_of_the_model(self):
        h, v = 1024, 8192  # 32 MiB each; the file is all holes
        config = {**LLAMA, "vocab_size": v, "hidden_size": h, "num_hidden_layers": 1, "tie_word_embeddings": True}
        names = ["model.embed_tokens.weight", *(f"model.embed_tokens.weight.{i}" for i in range(5))]
        tensors = {name: {"dtype": "F32", "shape": [v, h], "data_offsets": [4 * v * h * i, 4 * v * h * (i + 1)]}
                   for i, name in enumerate(names)}
        model = self.model(config, {})
        text = json.dumps(tensors).encode()
        with (model / "model.safetensors").open("wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            f.truncate(8 + len(text) + 4 * v * h * len(names))
        program = "import resource, sys; from anyrank.convert.__main__ import main; " \
            "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; least = peak(); " \
            "assert main(sys.argv[1:]) == 0; print(peak() - least)"
        for arguments in ([model, "--tp", 2, "--embedding-hidden", "--out", self.folder / "two"],
                          [self.folder / "two", "--out", self.folder / "merged"]):
            done = convert(*arguments, program=program)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertLess(int(done.stdout.split()[-1]), 3.2 * 4 * v * h / 1024)  # mapped, read, and a part of it


class Refused(ReshardTest):
    def test_what_does_not_divide_is_named(self):
        model = self.model(LLAMA, llama(LLAMA))
        out = self.folder / "out"
        six = {**LLAMA, "num_attention_heads": 6, "num_key_value_heads": 2, "attention_bias": False}
        self.refused("model.layers.0.self_attn.o_proj.weight: dimension 1 of 24 is 6 heads, which cannot be split over "
                     "tp=4 ranks; use a tp that divides 6", self.model(six, llama(six), "six"), "--tp", 4, "--out", out)
        self.refused("model.layers.0.self_attn.k_proj.bias: dimension 0 of 12 is 3 heads, which cannot be split over, nor "
                     "copied evenly to, tp=2 ranks; use a tp that divides 3 or is a multiple of it",
                     self.model({**LLAMA, "num_key_value_heads": 3}, llama({**LLAMA, "num_key_value_heads": 3}), "three"),
                     "--tp", 2, "--out", out)
        self.refused("2 experts cannot be split over ep=3 ranks", self.model(MIXTRAL, experts(MIXTRAL)[0], "moe"),
                     "--ep", 3, "--out", out)
        self.refused("3 layers cannot be split over 4 stages", model, "--pp", 4, "--out", out)
        wide = self.model({**LLAMA, "intermediate_size": 50}, llama({**LLAMA, "intermediate_size": 50}), "wide")
        self.refused("model.layers.0.mlp.down_proj.weight: dimension 1 of 50 cannot be split over tp=4", wide, "--tp",
                     4, "--out", out)
        self.assertFalse(out.exists())

    def test_an_input_that_is_not_the_models(self):
        packed = {**GPT2, "n_head": 5}
        self.refused("c_attn.bias: dimension 0 of 72 is no 5 + 2 * 5 heads", self.model(packed, gpt2(packed)), "--tp", 5,
                     "--out", self.folder / "out")
        out = self.folder / "two"
        self.result(self.model(LLAMA, llama(LLAMA), "llama"), "--tp", 2, "--out", out)
        self.refused("rank-00000.safetensors: is one rank's part", out / "rank-00000.safetensors", "--out",
                     self.folder / "out")
        (out / "rank-00001.safetensors").unlink()
        self.refused("no file of rank 1", out, "--out", self.folder / "out")

    def test_folders_are_not_mixed(self):
        model = self.model(LLAMA, llama(LLAMA))
        self.refused("is there already", model, "--tp", 2, "--out", self.model(GPT2, gpt2(GPT2), "gpt2"))
        self.refused("is there already", model, "--tp", 2, "--out", model)

    def test_usage(self):
        for wrong in ((self.folder,), (self.folder, "out", "--out", "out"), (self.folder, "out", "--tp", 0),
                      (self.folder, "out", "--shard-size", "0"), (self.folder, "out", "--stages", "1,")):
            self.assertIn("usage: ", self.done(*wrong, code=2).stderr)
        self.refused("nothing-there", self.folder / "nothing-there", "--tp", 2, "--out", self.folder / "out")
        self.refused("--full is for checkpoints of other programs", self.folder, "out", "--tp", 2, "--full")


if __name__ == "__main__":
    unittest.main()
