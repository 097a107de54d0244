#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of anyrank.logprobs and `anyrank grads --logprobs`: one hash for every batch, packing and layout; against a
softmax in plain Python; every form of input; broken trainers and rollouts, of which the side and the cause are said;
right ones without an alarm."""

import contextlib
import importlib.util
import io
import itertools
import json
import math
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, sys.path[0] + "/../support")
import tensor_files  # noqa: E402
from command import COMMAND, GOLDEN, ROOT, Case, run, start  # noqa: E402

if importlib.util.find_spec("numpy") is None:
    print("no numpy here, which anyrank.logprobs needs")
    sys.exit(77)
sys.path.insert(0, str(ROOT / "python"))
os.environ["ANYRANK"] = COMMAND
from anyrank import logprobs  # noqa: E402

VOCAB = 61
GPT2 = {"vocab_size": VOCAB, "n_positions": 400, "model_type": "gpt2", "n_embd": 16, "n_layer": 3, "n_head": 4, "tie_word_embeddings": True}
LLAMA = {"vocab_size": VOCAB, "max_position_embeddings": 400, "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5,
         "tie_word_embeddings": False}


def integers(shape, values):
    return ["I64", shape, struct.pack(f"<{len(values)}q", *values)]


def floats(entry):
    return struct.unpack(f"<{len(entry[2]) // 4}f", entry[2])


def short(x):
    """Rounded to bf16, to the nearest, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def log_softmax(row, temperature=1.0):
    most = max(row)
    total = math.log(sum(math.exp((x - most) / temperature) for x in row))
    return [(x - most) / temperature - total for x in row]


def sampled(row, token, temperature=1.0, top_k=0, top_p=0.0, min_p=0.0):
    """The log-probability after a sampler; None: it would not have taken the token."""
    logs = log_softmax(row, temperature)
    order = sorted(range(len(row)), key=lambda j: -logs[j])
    kept, mass = [], 0.0
    for j in order:
        if (top_k and len(kept) == top_k) or (top_p and mass >= top_p) or (min_p and
                                                                         logs[j] < logs[order[0]] + math.log(min_p)):
            break
        kept.append(j)
        mass += math.exp(logs[j])
    return logs[token] - math.log(mass) if token in kept else None


class Models:
    """Folders with weights that tell tokens apart."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.made = {}

    def weights(self, name, config, seed):
        """Random ones of every parameter."""
        folder = self.folder / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        tensor_files.write(self.folder / "one.safetensors", {"input_ids": integers([1, 2], [0, 1])})
        done = run("grads", folder, "--input", self.folder / "one.safetensors", "--out", self.folder / f"g-{name}", "-q")
        assert done.returncode == 0, done.stderr
        dice, tensors = random.Random(seed), {}
        for key, (dtype, shape, data) in sorted(tensor_files.read(self.folder / f"g-{name}" / "grads.safetensors").items()):
            norm = "norm" in key or "ln_" in key
            spread = 0.4 if "w" in key.split(".")[-1] else 0.1
            values = [dice.gauss(1.0 if norm and key.endswith("weight") else 0.0, 0.1 if norm else spread)
                      for _ in range(len(data) // 4)]
            if "lm_head" in key or "wte" in key:
                values = [2.0 * x for x in values]
            tensors[key] = [dtype, shape, struct.pack(f"<{len(values)}f", *values)]
        tensor_files.write(folder / "model.safetensors", tensors)
        self.made[name] = tensors
        return folder


class Logprobs(Case):
    def ran(self, *arguments):
        """python -m anyrank.logprobs, within this process."""
        out, err, here = io.StringIO(), io.StringIO(), os.getcwd()
        os.chdir(self.folder)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = logprobs.main([str(one) for one in arguments])
        finally:
            os.chdir(here)
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    def result(self, *arguments):
        return json.loads(self.passes(*arguments, "--json"))

    @classmethod
    def setUpClass(cls):
        cls.holder = tempfile.TemporaryDirectory(prefix="anyrank-test-models-")
        cls.addClassCleanup(cls.holder.cleanup)
        models = Models(cls.holder.name)
        cls.gpt2, cls.llama = models.weights("gpt2", GPT2, 1), models.weights("llama", LLAMA, 2)
        cls.old = models.weights("old", LLAMA, 2)
        dice = random.Random(3)
        trained = {key: [dtype, shape, struct.pack(f"<{len(data) // 4}f", *(x + dice.gauss(0.0, 0.05) for x in
                                                                          floats([dtype, shape, data])))]
                   for key, (dtype, shape, data) in models.made["old"].items()}
        tensor_files.write(cls.old / "model.safetensors", trained)
        mixed = dict(models.made["llama"])
        mixed.update({key: value for key, value in trained.items() if key.startswith("model.layers.1.")})
        cls.mixed = cls.old.parent / "mixed"
        cls.mixed.mkdir()
        (cls.mixed / "config.json").write_text(json.dumps(LLAMA))
        tensor_files.write(cls.mixed / "model.safetensors", mixed)
        dice = random.Random(4)
        cls.sequences = [[dice.randrange(VOCAB) for _ in range(n)] for n in (12, 24, 16, 24, 7, 12, 30, 16)]
        cls.prompt = 5

    def setUp(self):
        super().setUp()
        self.tokens = self.lines("tokens.jsonl", self.sequences)

    def lines(self, name, sequences, logprobs=None, prompt=0):
        rows = []
        for i, tokens in enumerate(sequences):
            row = {"prompt_ids": tokens[:prompt], "response_ids": tokens[prompt:]} if prompt else {"tokens": tokens}
            if logprobs:
                row["logprobs"] = logprobs[i][prompt:]
            rows.append(json.dumps(row))
        return self.put(name, "\n".join(rows) + "\n")

    def grads(self, model, tensors, name="x"):
        """Logits of a batch, [b][s][V]."""
        b, s = tensors["input_ids"][1]
        tensor_files.write(self.folder / f"{name}.safetensors", tensors)
        done = run("grads", model, "--input", self.folder / f"{name}.safetensors", "--out", self.folder / name, "-q")
        self.assertEqual(done.returncode, 0, done.stderr)
        flat = floats(tensor_files.read(self.folder / name / "outputs.safetensors")["logits"])
        return [[flat[(i * s + t) * VOCAB:(i * s + t + 1) * VOCAB] for t in range(s)] for i in range(b)]

    def logits(self, model, sequences=None, shift=None):
        """Of each sequence alone; shift(t): its positions."""
        made = []
        for tokens in sequences or self.sequences:
            tensors = {"input_ids": integers([1, len(tokens)], tokens)}
            if shift:
                tensors["position_ids"] = integers([1, len(tokens)], [shift(t) for t in range(len(tokens))])
                tensors["attention_mask"] = integers([1, len(tokens)], [1] * len(tokens))
            made.append(self.grads(model, tensors)[0])
        return made

    def padded(self, model, attended):
        most = max(map(len, self.sequences))
        ids, mask, positions = [], [], []
        for tokens in self.sequences:
            pad = most - len(tokens)
            ids += [0] * pad + tokens
            mask += [0] * pad + [1] * len(tokens)
            positions += list(range(most))
        shape = [len(self.sequences), most]
        tensors = {"input_ids": integers(shape, ids), "position_ids": integers(shape, positions)}
        if not attended:
            tensors["attention_mask"] = integers(shape, mask)
        rows = self.grads(model, tensors)
        return [row[most - len(tokens):] for row, tokens in zip(rows, self.sequences)]

    def packed(self, model):
        flat = [token for tokens in self.sequences for token in tokens]
        rows, made, at = self.grads(model, {"input_ids": integers([1, len(flat)], flat)})[0], [], 0
        for tokens in self.sequences:
            made.append(rows[at:at + len(tokens)])
            at += len(tokens)
        return made

    def given(self, logits, number=None):
        """What a side says: number(row, token) of each place but the first."""
        number = number or (lambda row, token: log_softmax(row)[token])
        return [[None] + [number(rows[t - 1], tokens[t]) for t in range(1, len(tokens))]
                for tokens, rows in zip(self.sequences, logits)]

    # --- the numbers ---

    def test_they_are_those_of_a_softmax(self):
        for model in (self.gpt2, self.llama):
            self.result(model, "--input", self.tokens, "--out", "out.jsonl", "--top", "4")
            said = [json.loads(line) for line in (self.folder / "out.jsonl").read_text().splitlines()]
            for tokens, rows, line in zip(self.sequences, self.logits(model), said):
                self.assertEqual((line["tokens"], line["logprobs"][0], line["entropies"][0], line["top"][0]),
                                 (tokens, None, None, None))
                for t in range(1, len(tokens)):
                    logs = log_softmax(rows[t - 1])
                    self.assertAlmostEqual(line["logprobs"][t], logs[tokens[t]], delta=2e-6)
                    self.assertAlmostEqual(line["entropies"][t], -sum(math.exp(x) * x for x in logs), delta=2e-6)
                    order = sorted(range(VOCAB), key=lambda j: -logs[j])[:4]
                    self.assertEqual([entry[0] for entry in line["top"][t]], order)
                    for token, number in line["top"][t]:
                        self.assertAlmostEqual(number, logs[token], delta=2e-6)

    def written(self, model, tensors, *more):
        """What `anyrank grads --logprobs` writes for a batch, and its bytes."""
        tensor_files.write(self.folder / "batch.safetensors", tensors)
        done = run("grads", model, "--input", "batch.safetensors", "--logprobs", "l.safetensors", "-q", *more, cwd=self.folder)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        path = self.folder / "l.safetensors"
        return {name: [dtype, shape, struct.unpack(f"<{math.prod(shape)}{'dfq'['F64 F32 I64'.index(dtype) // 4]}", data)]
                for name, (dtype, shape, data) in tensor_files.read(path).items()}, path.read_bytes()

    def test_the_file_of_the_command(self):
        """Padding and labels of -100 are NaN, rows of logits are those of labels, and every layout gives the same bytes."""
        tokens, other = self.sequences[0], self.sequences[3]
        n, shape = len(tokens), [2, len(other)]
        ids, mask = tokens + [0] * n + other, [1] * n + [0] * n + [1] * len(other)
        labels = [*ids[:3], -100, (ids[4] + 1) % VOCAB, *ids[5:]]
        batch = {"input_ids": integers(shape, ids), "attention_mask": integers(shape, mask), "labels": integers(shape, labels)}
        found, data = self.written(self.llama, batch, "--logits")
        self.assertEqual({name: entry[:2] for name, entry in found.items()}, {
            "sequences": ["I64", shape], **{name: ["F64", shape] for name in ("logprobs", "entropies", "largest", "lse")},
            "logits": ["F32", [n - 2 + len(other) - 1, VOCAB]]})
        self.assertEqual(found["sequences"][2], (*[0] * n, *[-1] * n, *[1] * len(other)))
        places = [p for p in range(len(ids)) if mask[p] and p not in (0, 3, shape[1])]
        rows = [[None, *row] for row in self.logits(self.llama, [tokens, other])]
        rows = rows[0][:n] + [None] * n + rows[1][:len(other)]
        for p in range(len(ids)):
            self.assertEqual(math.isnan(found["logprobs"][2][p]), p not in places, p)
        for k, p in enumerate(places):
            row = found["logits"][2][k * VOCAB:(k + 1) * VOCAB]
            self.assertEqual(row, rows[p])
            logs, lse = log_softmax(row), found["lse"][2][p]
            self.assertAlmostEqual(found["logprobs"][2][p], logs[labels[p]], delta=2e-6)
            self.assertAlmostEqual(found["largest"][2][p], max(logs), delta=2e-6)
            self.assertEqual(found["logprobs"][2][p], struct.unpack("<f", struct.pack("<f", row[labels[p]] - lse))[0])
        for layout in (["--tp", "2", "--sp"], ["--dp", "2"], ["--pp", "3"], ["--cp", "2"], ["--dp", "2", "--zero", "3"]):
            self.assertEqual(self.written(self.llama, batch, "--logits", *layout)[1], data, layout)
        wide, _ = self.written(self.llama, batch, "--logits", "--binary64")
        self.assertEqual(wide["logits"][0], "F64")
        noisy, _ = self.written(self.llama, batch, "--sensitivity", "--sensitivity-of", "bf16")
        self.assertEqual(noisy["rounding"][:2], ["F64", [3, *shape]])
        self.assertGreater(max(abs(noisy["rounding"][2][p]) for p in places), 1e-4)

    def test_the_mean_is_the_loss(self):
        for model in (self.gpt2, self.llama):
            batch = {"input_ids": integers([2, 24], self.sequences[1] + self.sequences[3])}
            tensor_files.write(self.folder / "batch.safetensors", batch)
            losses = [json.loads(run("grads", model, "--input", "batch.safetensors", *more, "--json", "-", "-q",
                                     cwd=self.folder).stdout)["loss"][0]
                      for more in (["--out", "out"], ["--logprobs", "l.safetensors"])]
            self.assertAlmostEqual(*losses, delta=1e-6)

    def test_what_does_not_go_with_it_is_refused(self):
        tensor_files.write(self.folder / "b.safetensors", {"input_ids": integers([1, 4], [1, 2, 3, 4])})
        for more, says in ((["--out", "out"], "not both"), (["--label-smoothing", "0.1"], "label smoothing"),
                           (["--trace", "t.json"], "trace"), (["--per-rank"], "written alone"),
                           (["--inject", "column_dx_not_reduced", "--tp", "2"], "fault")):
            done = run("grads", self.llama, "--input", "b.safetensors", "--logprobs", "l.safetensors", *more, cwd=self.folder)
            self.assertEqual((done.returncode, done.stdout), (2, ""), more)
            self.assertIn(says, done.stderr)
        for option in ("--logits", "--binary64"):
            done = run("grads", self.llama, "--input", "b.safetensors", "--out", "out", option, cwd=self.folder)
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertIn(f"{option} goes with --logprobs", done.stderr)

    def test_the_page_lists_the_causes(self):
        page = (ROOT / "docs/guide/logprobs.md").read_text(encoding="utf-8").replace("\\", "")
        for cause, (says, look_at) in logprobs.CAUSES.items():
            self.assertIn(f"| `{cause}` | {says} | {look_at} |\n", page)

    def test_they_are_transformers_in_binary64(self):
        worst, models = {"--binary64": 0.0, "--numerics=exact": 0.0}, 0
        for folder in sorted(GOLDEN.glob("*/*-tiny")) + sorted(GOLDEN.glob("*-tiny")):
            batch = tensor_files.read(folder / "batch.safetensors") if (folder / "outputs64.safetensors").exists() else {}
            if not batch or set(batch) - {"input_ids", "labels"}:
                continue
            _, (b, s), data = batch["input_ids"]
            ids = struct.unpack(f"<{b * s}q", data)
            _, (_, _, v), data = tensor_files.read(folder / "outputs64.safetensors")["logits"]
            logits = struct.unpack(f"<{b * s * v}d", data)
            self.lines("ids.jsonl", [ids[i * s:(i + 1) * s] for i in range(b)])
            right = [(i, t, log_softmax(logits[(i * s + t - 1) * v:(i * s + t) * v])[ids[i * s + t]])
                     for i, t in itertools.product(range(b), range(1, s))]
            for numerics in worst:
                self.done(folder, "--input", "ids.jsonl", "--out", "out.jsonl", numerics)
                said = [json.loads(line) for line in (self.folder / "out.jsonl").read_text().splitlines()]
                worst[numerics] = max([worst[numerics], *(abs(said[i]["logprobs"][t] - x) for i, t, x in right)])
            models += 1
        self.assertGreaterEqual(models, 32)
        self.assertLess(worst["--binary64"], 1e-6)
        self.assertLess(worst["--numerics=exact"], 2e-6)  # activations are fp32 numbers

    def test_binary64_is_asked_for(self):
        """One hash for every batch and packing; both sides are compared with it; a layout is refused."""
        flat = [token for tokens in self.sequences for token in tokens]
        bounds = [0, *itertools.accumulate(map(len, self.sequences))]
        tensor_files.write(self.folder / "packed.safetensors", {"input_ids": integers([1, len(flat)], flat),
                                                                "cu_seqlens": integers([len(bounds)], bounds)})
        files = (self.tokens, self.lines("shuffled.jsonl", self.sequences[::-1]), "packed.safetensors")
        said = [self.result(self.llama, "--input", file, "--binary64", "--out", "out.jsonl", "--top", 256)
                for file in files]
        self.assertEqual(len({one["hash"] for one in said}), 1)
        self.assertEqual((said[0]["numerics"], said[0]["precision"]), ("binary64", "f64"))
        self.assertNotEqual(self.result(self.llama, "--input", self.tokens)["hash"], said[0]["hash"])
        lines = [json.loads(line) for line in (self.folder / "out.jsonl").read_text().splitlines()]
        tokens, right = [line["tokens"] for line in lines], [line["logprobs"] for line in lines]
        for line in lines:  # the token's own entry of the largest is its number in every bit
            for token, x, top in zip(line["tokens"][1:], line["logprobs"][1:], line["top"][1:]):
                self.assertEqual(dict(top)[token], x)
        wrong = [[x if x is None else x + 3e-7 * (t % 2) for t, x in enumerate(row)] for row in right]
        sides = ("--trainer", self.lines("right.jsonl", tokens, right), "--rollout",
                 self.lines("wrong.jsonl", tokens, wrong), "--binary64", "--json", "--within")
        said = json.loads(self.ran(self.llama, *sides, "1e-7").stdout)
        self.assertEqual((said["trainer"]["off"], said["rollout"]["off"]), (False, True))
        self.assertEqual(said["trainer"]["largest"], 0.0)
        self.assertAlmostEqual(said["rollout"]["largest"], 3e-7, delta=1e-12)
        self.assertFalse(json.loads(self.ran(self.llama, *sides, "4e-7").stdout)["rollout"]["off"])
        padded = self.lines("padded.jsonl", self.sequences, self.given(self.padded(self.gpt2, True)))
        said = json.loads(self.ran(self.gpt2, "--rollout", padded, "--binary64", "--json").stdout)
        self.assertEqual(said["rollout"]["cause"], "padding_attended", said)
        for more in (["--tp", "2"], ["--dp", "2"], ["--numerics", "native"], ["--precision", "bf16"],
                     ["--recompute", "full"]):
            self.refused(self.llama, "--input", self.tokens, "--binary64", *more, says="in plain loops on one rank")

    def test_one_hash_for_every_batch_packing_and_layout(self):
        even = [tokens for tokens in self.sequences if len(tokens) % 4 == 0]
        dice, most = random.Random(5), max(map(len, even))
        hashes, layouts = set(), [[], ["--tp", "2"], ["--tp", "2", "--sp"], ["--dp", "3"], ["--cp", "2"],
                                  ["--cp", "2", "--cp-inner", "2", "--tp", "2"], ["--cp", "2", "--zigzag"],
                                  ["--pp", "3"], ["--dp", "2", "--tp", "2", "--collectives", "ring"]]
        for number in range(50):
            dice.shuffle(even)
            layout = layouts[number % len(layouts)]
            flat = [token for tokens in even for token in tokens]
            if number % 4 == 0:
                path = self.lines("b.jsonl", even)
            elif number % 4 == 1:  # padded at a random end
                left = [dice.random() < 0.5 for _ in even]
                pads = [[0] * (most - len(tokens)) for tokens in even]
                path, shape = self.folder / "b.safetensors", [len(even), most]
                tensor_files.write(path, {
                    "input_ids": integers(shape, [x for tokens, pad, at in zip(even, pads, left)
                                                  for x in (pad + tokens if at else tokens + pad)]),
                    "attention_mask": integers(shape, [x for tokens, pad, at in zip(even, pads, left) for x in
                                                       (pad + [1] * len(tokens) if at else [1] * len(tokens) + pad)])})
            elif number % 4 == 2:  # packed
                bounds = [0]
                for tokens in even:
                    bounds.append(bounds[-1] + len(tokens))
                path = self.folder / "b.safetensors"
                tensor_files.write(path, {"input_ids": integers([1, len(flat)], flat),
                                          "cu_seqlens": integers([len(bounds)], bounds)})
            else:
                path = self.put("b.json", [{"input_ids": tokens} for tokens in even])
            said = self.result(self.llama, "--input", path, *layout)
            self.assertEqual(said["sequences"], len(even))
            hashes.add(said["hash"])
        self.assertEqual(len(hashes), 1)
        other = self.result(self.llama, "--input", self.lines("c.jsonl", even[1:]))["hash"]
        self.assertNotIn(other, hashes)

    # --- forms ---

    def test_responses_of_servers(self):
        lists = self.given(self.logits(self.llama))
        prompt, tokens, numbers = self.prompt, self.sequences[0], lists[0]
        own = {"tokens": tokens, "logprobs": numbers}
        triples = [[number, token, None] for number, token in zip(numbers, tokens)]
        dicts = [None] + [{str(token): {"logprob": number, "rank": 1}, str((token + 1) % VOCAB): {"logprob": -9.0}}
                          for number, token in zip(numbers[1:prompt], tokens[1:prompt])]
        named = [f"token_id:{token}" for token in tokens[prompt:]]
        forms = {
            "own": own, "list": [own], "of_the_rest": {"tokens": tokens, "logprobs": numbers[1:]},
            "response": {"prompt_ids": tokens[:prompt], "response_ids": tokens[prompt:], "logprobs": numbers[prompt:]},
            "zero": {"token_ids": tokens, "log_probs": [0.0, *numbers[1:]]},
            "sglang": {"text": "", "meta_info": {"prompt_tokens": prompt, "input_token_logprobs": triples[:prompt],
                                                 "output_token_logprobs": triples[prompt:]}},
            "vllm": {"choices": [{"prompt_token_ids": tokens[:prompt], "token_ids": tokens[prompt:],
                                  "prompt_logprobs": dicts, "logprobs": {"token_logprobs": numbers[prompt:]}}]},
            "echo": {"choices": [{"prompt_token_ids": tokens[:prompt], "token_ids": tokens[prompt:],
                                  "logprobs": {"token_logprobs": numbers}}]},
            "named": {"choices": [{"logprobs": {"tokens": named, "token_logprobs": numbers[prompt:]}}],
                      "prompt_token_ids": tokens[:prompt]},
            "chat": {"prompt_token_ids": tokens[:prompt], "choices": [{"logprobs": {"content": [
                {"token": name, "logprob": number} for name, number in zip(named, numbers[prompt:])]}}]}}
        for name, form in forms.items():
            said = self.result(self.llama, "--rollout", self.put(f"{name}.json", form), "--within", "1e-5")
            self.assertFalse(said["rollout"]["off"], name)
            whole = name in ("own", "list", "of_the_rest", "zero", "sglang", "vllm", "echo")
            self.assertEqual(said["rollout"]["tokens"], len(tokens) - (1 if whole else prompt), name)

    def test_bad_input(self):
        tokens, numbers = self.sequences[0], [None] + [-1.0] * 11
        bad = {"{": "not JSON", "[]": "holds no sequence", "[3]": "expected an object",
               json.dumps({"logprobs": []}): 'expected "tokens"',
               json.dumps({"tokens": tokens}): "has no log-probabilities",
               json.dumps({"tokens": [], "logprobs": []}): "has no tokens",
               json.dumps({"tokens": [1.5, 2], "logprobs": [None, -1]}): "tokens[0] is no integer",
               json.dumps({"tokens": [1, VOCAB], "logprobs": [None, -1]}): f"is {VOCAB}, the vocabulary has {VOCAB} ids",
               json.dumps({"tokens": [1, -2], "logprobs": [None, -1]}): "is -2",
               json.dumps({"tokens": tokens, "logprobs": [-1.0] * 12}): "which nothing predicts",
               json.dumps({"tokens": tokens, "logprobs": [-1.0] * 13}): "13 numbers for 12 tokens",
               json.dumps({"tokens": tokens, "logprobs": numbers[:11]}): "begins with null, as of the first token",
               json.dumps({"tokens": tokens, "logprobs": [None] * 12}): "has no log-probability",
               json.dumps({"tokens": tokens, "logprobs": [None, "x", *numbers[2:]]}): "neither a number nor null",
               json.dumps({"tokens": tokens, "logprobs": [None, float("-inf"), *numbers[2:]]}): "no Infinity: write null",
               json.dumps({"choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": [-1]}}]}): "return_token_ids",
               json.dumps({"choices": [{"prompt_token_ids": [1, 2], "token_ids": [3, 4], "logprobs": {
                   "token_logprobs": [-1] * 3}}]}): "another number of token_ids",
               json.dumps({"choices": [{"prompt_token_ids": [1], "logprobs": {"tokens": ["a"],
                                                                             "token_logprobs": [-1]}}]}):
                   "return_tokens_as_token_ids",
               json.dumps({"meta_info": {"prompt_tokens": 4, "input_token_logprobs": [[None, 1, None]],
                                         "output_token_logprobs": []}}): "logprob_start_len 0"}
        for text, says in bad.items():
            self.refused(self.llama, "--rollout", self.put("bad.json", text), says=says)
        for key in ("labels", "attention_mask", "position_ids"):
            self.refused(self.llama, "--input", self.put("bad.json", {"tokens": tokens, key: tokens}),
                         says=f"'{key}' would not be looked at")
        shape = [1, len(tokens)]
        for key, wrong, says in (("labels", tokens, "labels would not"), ("position_ids", range(1, 13), "is 1, expected 0")):
            tensor_files.write(self.folder / "bad.safetensors",
                               {"input_ids": integers(shape, tokens), key: integers(shape, list(wrong))})
            self.refused(self.llama, "--input", "bad.safetensors", says=says)
        tensor_files.write(self.folder / "good.safetensors", {"input_ids": integers(shape, tokens),
                                                              "position_ids": integers(shape, list(range(12)))})
        self.assertEqual(self.result(self.llama, "--input", "good.safetensors")["tokens"], 11)
        good = self.lines("good.jsonl", [tokens], [numbers])
        other = self.lines("other.jsonl", [self.sequences[1]], [[None] + [-1.0] * 23])
        self.refused(self.llama, "--rollout", good, "--trainer", other, says="is not among those of")
        self.refused(self.llama, says="--rollout FILE")
        self.refused(self.llama, "--input", self.tokens, "--top", "3", says="--out")
        for option, value in ("--other", self.old), ("--within", 1), ("--arithmetic", "f32"):
            self.refused(self.llama, "--input", self.tokens, option, value, says="--rollout")
        self.refused(self.llama, "--rollout", good, "--within", 0, says="from 1e-30")
        self.refused(self.llama, "--input", self.tokens, "--cp", "2", says="sequence 4, of 7 tokens")
        self.refused(self.llama, "--rollout", good, "--other", self.gpt2, says="")
        self.refused(self.llama, "--input", self.tokens, "--out", "no/such/folder/x", says="no/such/folder")

    # --- which side, and why ---

    def judged(self, model, side, numbers, *more, prompt=0):
        """Says of one side, the other being right."""
        right = self.lines("right.jsonl", self.sequences, self.given(self.logits(model)), prompt)
        wrong = self.lines("wrong.jsonl", self.sequences, numbers, prompt)
        files = {"trainer": right, "rollout": right, side: wrong}
        said = json.loads(self.ran(model, "--trainer", files["trainer"], "--rollout", files["rollout"], *more, "--json").stdout)
        other = said["trainer" if side == "rollout" else "rollout"]
        self.assertFalse(other["off"])
        self.assertIsNone(other["cause"])
        return said[side]

    def test_broken_sides(self):
        logits = {model: self.logits(model) for model in (self.gpt2, self.llama)}
        gpt2, llama = self.gpt2, self.llama

        def after(**sampler):
            return lambda row, token: sampled(row, token, **sampler)

        def shifted(model):
            right = self.given(logits[model])
            return [[None, *row[2:], None] for row in right]

        broken = [
            ("temperature", "0.7", llama, self.given(logits[llama], after(temperature=0.7))),
            ("temperature", "1.3", gpt2, self.given(logits[gpt2], after(temperature=1.3))),
            ("top_k", "20 largest", llama, self.given(logits[llama], after(top_k=20))),
            ("top_p", "0.9 alone", gpt2, self.given(logits[gpt2], after(top_p=0.9))),
            ("top_p", "0.95", llama, self.given(logits[llama], after(top_p=0.95, temperature=0.8))),
            ("min_p", "0.05", llama, self.given(logits[llama], after(min_p=0.05))),
            ("logits_in_bf16", "", llama,
             self.given(logits[llama], lambda row, token: log_softmax([short(x) for x in row])[token])),
            ("logprobs_in_bf16", "", gpt2, self.given(logits[gpt2], lambda row, token: short(log_softmax(row)[token]))),
            ("raw_logit", "", gpt2, self.given(logits[gpt2], lambda row, token: row[token])),
            ("largest_for_token", "", llama, self.given(logits[llama], lambda row, token: max(log_softmax(row)))),
            ("entropy_for_logprob", "", llama, self.given(
                logits[llama], lambda row, token: sum(math.exp(x) * x for x in log_softmax(row)))),
            ("sign_flipped", "", gpt2, self.given(logits[gpt2], lambda row, token: -log_softmax(row)[token])),
            ("probability_for_logprob", "", llama,
             self.given(logits[llama], lambda row, token: math.exp(log_softmax(row)[token]))),
            ("logarithm_base_2", "", llama,
             self.given(logits[llama], lambda row, token: log_softmax(row)[token] / math.log(2.0))),
            ("logarithm_base_10", "", gpt2,
             self.given(logits[gpt2], lambda row, token: log_softmax(row)[token] / math.log(10.0))),
            ("shifted_by_one", "after it", llama, shifted(llama)),
            ("positions_from_one", "", gpt2, self.given(self.logits(gpt2, shift=lambda t: t + 1))),
            ("positions_count_padding", "", gpt2, self.given(self.padded(gpt2, False))),
            ("padding_attended", "", llama, self.given(self.padded(llama, True))),
            ("documents_attended", "", llama, self.given(self.packed(llama))),
        ]
        for i, (cause, says, model, numbers) in enumerate(broken):
            side = ("rollout", "trainer")[i % 2]
            more = ["--arithmetic", "f32"] if "bf16" in cause else []
            with self.subTest(cause=cause, side=side):
                said = self.judged(model, side, numbers, *more)
                self.assertTrue(said["off"], said)
                self.assertEqual(said["cause"], cause, said)
                self.assertIn(says, said["says"])
                self.assertGreater(said["explained"], 0.9)

    def test_positions_that_restart_behind_the_prompt(self):
        numbers = self.given(self.logits(self.gpt2, shift=lambda t: t if t < self.prompt else t - self.prompt))
        said = self.judged(self.gpt2, "trainer", numbers, prompt=self.prompt)
        self.assertEqual(said["cause"], "positions_restart", said)

    def test_weights_that_were_not_sent(self):
        old = self.given(self.logits(self.old))
        self.assertEqual(self.judged(self.llama, "rollout", old, "--other", self.old)["cause"], "other_weights")
        self.assertEqual(self.judged(self.llama, "rollout", old)["cause"], "unknown")
        said = self.judged(self.llama, "rollout", self.given(self.logits(self.mixed)), "--other", self.old)
        self.assertEqual(said["cause"], "module_not_synchronised", said)
        self.assertIn("model.layers.1 ", said["says"])

    def test_rounding_that_is_known(self):
        numbers = self.given(self.logits(self.llama), lambda row, token: log_softmax([short(x) for x in row])[token])
        said = self.judged(self.llama, "rollout", numbers)
        self.assertEqual((said["off"], said["cause"]), (False, "logits_in_bf16"))

    def test_numbers_of_no_known_kind(self):
        dice = random.Random(6)
        noisy = [[x if x is None else x + dice.gauss(0.0, 0.5) for x in row]
                 for row in self.given(self.logits(self.llama))]
        said = self.judged(self.llama, "rollout", noisy, "--arithmetic", "f32")
        self.assertEqual((said["off"], said["cause"]), (True, "unknown"))
        trained = [[x if x is None else dice.uniform(-1.0, -0.5) for x in row] for row in noisy]
        said = self.judged(self.llama, "rollout", trained, "--arithmetic", "f32")  # any constant has their mean
        self.assertEqual((said["off"], said["cause"]), (True, "unknown"), said)
        numbers = self.given(self.logits(self.llama))
        numbers[0][3] = "-Infinity"
        said = self.judged(self.llama, "rollout", numbers)
        self.assertTrue(said["off"])
        self.assertEqual((said["worst"][0]["sequence"], said["worst"][0]["place"]), (0, 3))

    def test_right_sides(self):
        for model in (self.gpt2, self.llama):
            for native, arithmetic in ((["--precision", "bf16"], "bf16-pure"), ([], "f32"),
                                       (["--precision", "tf32"], "tf32")):
                self.done(model, "--input", self.tokens, "--numerics", "native", *native, "--out", "native.jsonl")
                said = self.result(model, "--rollout", "native.jsonl", "--arithmetic", arithmetic)
                self.assertFalse(said["rollout"]["off"], (native, said["rollout"], said["rounding"]))

    def test_the_text(self):
        logits = self.logits(self.llama)
        right = self.lines("right.jsonl", self.sequences, self.given(logits))
        wrong = self.lines("wrong.jsonl", self.sequences,
                           self.given(logits, lambda row, token: log_softmax(row, 0.7)[token]))
        text = self.passes(self.llama, "--trainer", right, "--rollout", wrong, code=1)
        for words in ("the rollout is off\n", "trainer     133", "OFF", "as the model, but for rounding",
                      "rollout is off: temperature: the logits were divided by a temperature, 0.7 (",
                      "look at: the sampling temperature", "sequence  place  token"):
            self.assertIn(words, text)
        text = self.passes(self.llama, "--trainer", right, "--rollout", right)
        self.assertIn("no side is off\n", text)


if __name__ == "__main__":
    unittest.main()
