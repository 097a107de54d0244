# SPDX-License-Identifier: Apache-2.0
"""python -m anyrank.logprobs MODEL: whose log-probabilities are off, a trainer's or a rollout engine's (logprobs.md).

The model's own are those of `anyrank grads --logprobs`. Arrays of tokens are flat, one sequence after the other.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import pathlib
import re
import sys
import typing

import numpy as np

from anyrank import _arrays, _safetensors
from anyrank._arguments import option_words
from anyrank._command import Finished, run_words
from anyrank._errors import AnyrankError, path_name
from anyrank._model import model_path
from anyrank._options import OPTIONS
from anyrank._progress import Progress
from anyrank._rollouts import Json, Sequence, read, refuse
from anyrank._samplers import Claims, fit_samplers
from anyrank._scratch import Scratch
from anyrank.report import LogprobsReport, report_of

Array = typing.Any  # of numpy
Path = typing.Union[str, "os.PathLike[str]"]

SIDES = ("trainer", "rollout")
_PATHS = (*SIDES, "input", "other", "out")
KEPT_BYTES = 64 << 20  # of logits for an explanation, at most
# How many times what rounding makes a side may be off, as a root mean square and in one place: arithmetics differ in
# where they round.
ROUNDING_RMS, ROUNDING_WORST = 4.0, 8.0
ROUNDED_TOKENS = 64  # of the longest sequence, by which rounding is measured
PACKED_MOST = 4096  # tokens of a row in which all sequences stand
EXPLAINED_LEAST = 0.75  # of the squares of the differences: a cause is named where it explains so much,
EXPLAINED_ALONE = 0.9  # and of a side that rounding could have made
NOTHING = 1e-6  # differences of a fp32 softmax, which nothing else is to explain
WORTH_A_NUMBER = 0.5  # a sampler is believed where it leaves less than this share of what a simpler one leaves
WORST = 5  # places that are listed

_MODE = "the sampler: log-probabilities after it are not the model's (vLLM: logprobs_mode)"
#: Of each cause what it says of the numbers, and what to look at.
CAUSES = {
    "logits_in_bf16": ("the logits were rounded to bf16 before the softmax",
                       "the dtype of the head's output: cast it to fp32 before log_softmax"),
    "logprobs_in_bf16": ("the log-probabilities were rounded to bf16", "the dtype of what is returned or stored"),
    "raw_logit": ("the numbers are logits: no softmax was taken", "log_softmax before the gather"),
    "largest_for_token": ("the numbers are those of the most likely token, not of the token that is there",
                          "which ids are gathered: the sequence's, not argmax"),
    "entropy_for_logprob": ("the numbers are minus the entropy of each place", "which tensor is returned"),
    "sign_flipped": ("the sign is flipped: a loss of each token", "cross_entropy returns -log p"),
    "probability_for_logprob": ("the numbers are probabilities, not their logarithms", "softmax for log_softmax"),
    "logarithm_base_2": ("the logarithms are to base 2", "log2 for log"),
    "logarithm_base_10": ("the logarithms are to base 10", "log10 for log"),
    "shifted_by_one": ("each number is that of the token {value} it", "logits[:, :-1] against tokens[:, 1:]"),
    "temperature": ("the logits were divided by a temperature, {value}",
                    "the sampling temperature: divide by it on both sides, or on neither (vLLM: logprobs_mode)"),
    "top_k": ("the softmax is over the {value} largest logits alone{temperature}", f"top_k of {_MODE}"),
    "top_p": ("the softmax is over the largest probabilities up to a sum of {value} alone{temperature}",
              f"top_p of {_MODE}"),
    "min_p": ("the softmax is over probabilities of at least {value} of the largest alone{temperature}",
              f"min_p of {_MODE}"),
    "positions_from_one": ("positions count from 1", "position_ids: the first token's is 0"),
    "positions_restart": ("positions of the response count from 0 again",
                          "position_ids of the response: they go on behind the prompt's"),
    "positions_count_padding": ("positions count the padding in front of a sequence",
                                "position_ids of left padding: attention_mask.cumsum(-1) - 1"),
    "padding_attended": ("the padding in front of a sequence is attended to", "attention_mask with left padding"),
    "documents_attended": ("packed sequences attend to those before them",
                           "cu_seqlens, or the mask, of packed sequences"),
    "other_weights": ("the weights are those of the other model",
                      "whether the weights were sent before these tokens were computed"),
    "module_not_synchronised": ("the weights of {value} are those of the other model, all others are this one's",
                                "names and shards of that module in the transfer of weights"),
}


# --- the model's numbers ----------------------------------------------------------------------------------------------


class Tokens:
    """Tokens of some sequences, and where each stands: `sequence`, and `place` from 0 in it."""

    def __init__(self, sequences: typing.Sequence[typing.Any], prompts: typing.Sequence[int] | None = None) -> None:
        self.of_each = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
        self.lengths = np.array([len(sequence) for sequence in sequences])
        self.prompts = np.array(prompts or [0] * len(sequences))
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.token = np.concatenate(self.of_each)
        self.sequence: Array = np.repeat(np.arange(len(sequences)), self.lengths)
        self.place = np.arange(len(self.token)) - self.starts[self.sequence]


class Case:
    """The model, how its numbers are computed, the tokens, and what else a side is judged by."""

    tokens: Tokens
    numbers: dict[str, Array] = {}  # of the tokens
    sides: dict[str, Array]  # what each gives for them, NaN where it says nothing
    rounding = (0.0, 0.0)  # what it makes: root mean square, and the most
    tolerance: float | None = None
    mixed: _Mixed | None = None

    # What no layout is: other batches are computed with these, as a layout may not allow their lengths.
    _WITHOUT_LAYOUT = ("numerics", "precision", "device", "scale", "mtp", "mtp-weight", "mlp-order", "seed", "threads")

    def __init__(self, model: str, words: list[str], shown: str, progress: Progress) -> None:
        self.model, self.words, self.shown, self.progress = model, words, shown, progress
        self.scratch = Scratch()
        self.out = self.scratch.path / "out.safetensors"
        self.seconds, self.vocab = 0.0, 0
        self.report: dict[str, typing.Any] = {}  # of the last run

    def run(self, batch: Path, *extra_words: str, layout: bool = True, model: Path | None = None) -> dict[str, Array]:
        """The file of `anyrank grads --logprobs`: of the tokens of all sequences, numbers by name."""
        words = [word for word in self.words if layout or word.split("=")[0][2:] in self._WITHOUT_LAYOUT]
        try:
            finished = run_words(
                "grads",
                [
                    *words,
                    *extra_words,
                    f"--input={batch}",
                    f"--logprobs={self.out}",
                    "--no-color",
                    "--",
                    path_name(model or self.model),
                ],
                self.progress,
            )
        except AnyrankError as error:  # the caller has not seen the temporary file
            raise AnyrankError(str(error).replace(str(batch), self.shown), error.exit_status) from None
        entries, metadata = _safetensors.read(self.out)
        self.report, self.vocab = finished.data, int(metadata["vocab"])
        self.seconds += float(finished.data["seconds"])
        found = {name: _arrays.numpy_of(entry) for name, entry in entries.items()}
        token_mask = found["sequences"].reshape(-1) >= 0
        return {name: value if name == "logits" else value.reshape(*value.shape[:-2], -1)[..., token_mask]
                for name, value in found.items()}

    def evaluate(self, tokens: Tokens, *extra_words: str, positions: Array | None = None, labels: Array | None = None,
                 **run_options: typing.Any) -> dict[str, Array]:
        """The same of tokens, each sequence in a row of its own; positions, labels: of the tokens."""
        token_mask = np.arange(tokens.lengths.max()) < tokens.lengths[:, None]
        entries = {"attention_mask": _arrays.entry_of(token_mask.astype(np.uint8))}
        for name, values in ("input_ids", tokens.token), ("position_ids", positions), ("labels", labels):
            if values is not None:
                rows = np.zeros(token_mask.shape, dtype=np.int64)
                rows[token_mask] = values
                entries[name] = _arrays.entry_of(rows)
        _safetensors.write(self.scratch.path / "batch.safetensors", entries)
        return self.run(self.scratch.path / "batch.safetensors", *extra_words, **run_options)

    def rows_of(self, index: Array) -> Array:
        """The logits [n, V] that predict the tokens of an ascending index, as fp32."""
        sequences = np.unique(self.tokens.sequence[index])
        part = Tokens([self.tokens.of_each[i] for i in sequences])
        origin = self.tokens.starts[sequences][part.sequence] + part.place
        labels = np.where(np.isin(origin, index), part.token, -100)
        return self.evaluate(part, "--logits", labels=labels)["logits"].astype(np.float32)

    def measure_rounding(self, arithmetic: str) -> None:
        """By the longest sequence."""
        longest = Tokens([max(self.tokens.of_each, key=len)[:ROUNDED_TOKENS]])
        off = self.evaluate(longest, "--sensitivity", f"--sensitivity-of={arithmetic}", layout=False)["rounding"][:, 1:]
        self.rounding = (math.sqrt(np.mean(off * off)), float(np.abs(off).max())) if off.size else (0.0, 0.0)

    def read_batch(self, path: str, extra_words: list[str]) -> None:
        """Tokens of a batch of `anyrank grads`, whose rules say where sequences are, with their numbers."""
        try:
            batch_tensors = {name: _arrays.numpy_of(entry) for name, entry in _safetensors.read(path)[0].items()}
        except OSError as error:
            refuse(f"{path}: {error.strerror}")
        if "labels" in batch_tensors:
            refuse(f"{path}: labels would not be looked at: each token is predicted")
        self.numbers = self.run(path, *extra_words)
        number = _arrays.numpy_of(_safetensors.read(self.out)[0]["sequences"])
        ends: Array = np.flatnonzero(np.diff(self.numbers["sequences"])) + 1
        self.tokens = Tokens(np.split(batch_tensors["input_ids"][number >= 0], ends))
        positions = np.broadcast_to(batch_tensors.get("position_ids", -1), number.shape)[number >= 0]
        wrong: Array = np.flatnonzero(positions != self.tokens.place) if "position_ids" in batch_tensors else []
        for i in wrong[:1]:
            row, place = np.argwhere(number >= 0)[i]
            refuse(f"{path}: position_ids[{row}, {place}] is {positions[i]}, expected {self.tokens.place[i]}: each "
                   "sequence is computed alone, from position 0")


class _Mixed:
    """A model's folder with weights of another one's: a file of each module of both, and a list of which are used."""

    def __init__(self, model: str, other_model: str) -> None:
        self.scratch, self.weights = Scratch(), [self._weights(pathlib.Path(path)) for path in (model, other_model)]
        if not self.weights[0]:
            refuse(f"the other model's weights are compared with the model's, and {model} has none")
        if not self.weights[1]:
            refuse(f"{other_model}: there are no weights")
        for name in sorted(self.weights[0].keys() ^ self.weights[1].keys()):
            refuse(f"{other_model}: its weights have other names than those of {model}: {name} is in one alone")
        self.modules = sorted({self._module(name) for name in self.weights[0]}, key=lambda name: (
            int(name.rpartition(".")[2]) if name[-1:].isdigit() else sys.maxsize, name))  # layers, then all else
        (self.scratch.path / "config.json").write_bytes(pathlib.Path(model, "config.json").read_bytes())

    @staticmethod
    def _module(name: str) -> str:
        layer = re.match(r"(.*?\.\d+)\.", name)
        return layer[1] if layer else name.rpartition(".")[0]

    @staticmethod
    def _weights(folder: pathlib.Path) -> dict[str, _safetensors.Entry]:
        files, index = [folder / "model.safetensors"], folder / "model.safetensors.index.json"
        if not files[0].exists():
            listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.exists() else {}
            files = [folder / file for file in sorted(set(listed.values()))]
        return {name: entry for file in files for name, entry in _safetensors.read(file)[0].items()}

    def folder(self, replaced: str | None) -> pathlib.Path:
        """With the other model's weights of a module; None: of all."""
        used = {module: (int(replaced in (None, module)), f"{i}.safetensors") for i, module in enumerate(self.modules)}
        for module, (side, file) in used.items():
            path = self.scratch.path / f"{side}-{file}"
            if not path.exists():
                _safetensors.write(path, {name: entry for name, entry in self.weights[side].items()
                                          if self._module(name) == module})
        listed = {name: "{}-{}".format(*used[self._module(name)]) for name in self.weights[0]}
        (self.scratch.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}),
                                                                        encoding="utf-8")
        return self.scratch.path


# --- causes -----------------------------------------------------------------------------------------------------------


def _bf16(x: Array) -> Array:
    """Rounded to bf16, to the nearest, ties to even, as fp32."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    short = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), short).astype(np.float64)


def _logprob_of_bf16(row: Array, token: int) -> float:
    z = _bf16(row)
    return float(z[token] - z.max() - math.log(np.exp(z - z.max()).sum()))


class _Search:
    """The cause that leaves least so far. Each predicts numbers from the model's logits, or from another run of the
    model, and is judged by the share of the squares of the differences that it takes away."""

    def __init__(self, case: Case, claims: Claims) -> None:
        self.case, self.claims = case, claims
        self.rounding = (4.0 * case.rounding[0]) ** 2 * len(claims.claimed)  # squares that it may leave
        self.squares = self.residual = claims.squares(claims.reference)
        self.cause, self.facts = "", {"value": "", "temperature": ""}

    def note(self, cause: str, residual: float, value: str = "", temperature: str = "") -> None:
        if residual < self.residual:
            self.cause, self.residual, self.facts = cause, residual, {"value": value, "temperature": temperature}

    @property
    def found(self) -> bool:
        """Nothing is left but rounding."""
        return self.residual <= 0.001 * self.squares or (
            self.residual <= 0.1 * self.squares and self.residual <= self.rounding)

    def try_rows(self) -> None:
        """Place by place."""
        c, tokens, numbers = self.claims, self.case.tokens, self.case.numbers
        x, token_indices = c.reference, c.token_indices
        logprobs, is_last = (
            numbers["logprobs"],
            tokens.place[token_indices] + 1 == tokens.lengths[tokens.sequence[token_indices]],
        )
        self.note("logits_in_bf16", c.squares(np.array([_logprob_of_bf16(*pair) for pair in zip(c.rows, c.token)])))
        for cause, predicted in {
            "logprobs_in_bf16": _bf16(x),
            "raw_logit": c.rows[np.arange(len(token_indices)), c.token],
            "largest_for_token": numbers["largest"][token_indices],
            "entropy_for_logprob": -numbers["entropies"][token_indices],
            "sign_flipped": -x,
            "probability_for_logprob": np.exp(x),
            "logarithm_base_2": x / math.log(2.0),
            "logarithm_base_10": x / math.log(10.0),
        }.items():
            self.note(cause, c.squares(predicted))
        self.note(
            "shifted_by_one",
            c.squares(np.where(is_last, c.claimed, np.append(logprobs, np.nan)[token_indices + 1])),
            "after",
        )
        self.note(
            "shifted_by_one",
            c.squares(np.where(tokens.place[token_indices] > 1, logprobs[token_indices - 1], c.claimed)),
            "before",
        )

    def try_samplers(self) -> None:
        """First those with one number, then those with a temperature too."""
        samplers = fit_samplers(self.claims)
        for plain in (True, False):
            for kind, sampler in samplers.items():
                divided = kind != "temperature" and abs(sampler.temperature - 1.0) > 1e-9
                if divided != plain and sampler.residual < WORTH_A_NUMBER * self.residual:
                    value = sampler.temperature if kind == "temperature" else sampler.number
                    self.note(kind, sampler.residual, f"{value:.4g}",
                              f", after a division by a temperature, {sampler.temperature:.4g}" if divided else "")

    def try_run(self, cause: str, tokens: Tokens, selection: typing.Any = slice(None), value: str = "",
                **run_options: typing.Any) -> None:
        """Another run, of the tokens `selection` among its own."""
        if self.found:
            return
        try:
            predicted = self.case.evaluate(tokens, layout=False, **run_options)["logprobs"][selection]
            self.note(cause, self.claims.squares(predicted[self.claims.token_indices]), value)
        except AnyrankError as error:  # the model cannot read them so, as without positions enough
            if error.exit_status != 2:
                raise

    def try_readings(self) -> None:
        """The sequences laid into rows as a broken program would."""
        tokens = self.case.tokens
        max_length, place, prompt = int(tokens.lengths.max()), tokens.place, tokens.prompts[tokens.sequence]
        padding = (max_length - tokens.lengths)[tokens.sequence]
        self.try_run("positions_from_one", tokens, positions=place + 1)
        if prompt.any():
            response = (prompt > 0) & (place >= prompt)
            self.try_run("positions_restart", tokens, positions=np.where(response, place - prompt, place))
        if padding.any():
            padded = Tokens([np.pad(token_ids, (max_length - len(token_ids), 0)) for token_ids in tokens.of_each])
            token_mask = padded.place >= (max_length - tokens.lengths)[padded.sequence]
            self.try_run("positions_count_padding", tokens, positions=place + padding)
            self.try_run("padding_attended", padded, token_mask)
        if len(tokens.lengths) > 1 and len(tokens.token) <= PACKED_MOST:
            self.try_run("documents_attended", Tokens([tokens.token]))
            self.try_run("documents_attended", Tokens([tokens.token]), positions=place)

    def try_weights(self, mixed: _Mixed) -> None:
        """The other model's weights in all modules, and in one module after the other."""
        for module in [None, *mixed.modules]:
            if not self.found:
                self.try_run("module_not_synchronised" if module else "other_weights", self.case.tokens,
                             value=module or "", model=mixed.folder(module))

    def of_each(self) -> bool:
        """Whether what the best cause leaves is little beside how the numbers vary among themselves, or is rounding:
        any cause with their mean takes away most of what numbers that are far from the model's are off by."""
        vary = float(((self.claims.claimed - self.claims.claimed.mean()) ** 2).sum())
        return self.residual <= (1.0 - EXPLAINED_LEAST) * vary or self.residual <= self.rounding

    def conclude(self, side: dict[str, typing.Any]) -> None:
        """Nothing is said of a side that is as the model but for rounding, unless a cause explains nearly all; then the
        side is off, unless the cause is a rounding."""
        explained = 1.0 - self.residual / self.squares if self.squares > 0.0 else 0.0
        if not side["off"] and not (explained >= EXPLAINED_ALONE and side["largest"] > NOTHING):
            return
        side["off"] = side["off"] or self.cause not in ("logits_in_bf16", "logprobs_in_bf16")
        side.update(cause="unknown", says="what was found fits no known cause", explained=explained)
        if explained >= EXPLAINED_LEAST and self.of_each():
            says, look_at = CAUSES[self.cause]
            side.update(cause=self.cause, says=says.format(**self.facts), look_at=look_at)


# --- the sides --------------------------------------------------------------------------------------------------------


def _match(tokens: Tokens, sequences: list[Sequence], path: str, input_path: str) -> Array:
    """What a side gives for each token of the input; NaN: nothing. Equal sequences are taken in their order."""
    free: dict[bytes, list[int]] = {}
    for i, token_ids in enumerate(tokens.of_each):
        free.setdefault(token_ids.tobytes(), []).append(i)
    side_logprobs = np.full(len(tokens.token), np.nan)
    for i, sequence in enumerate(sequences):
        equal, n = free.get(np.array(sequence.tokens, dtype=np.int64).tobytes()), len(sequence.tokens)
        if not equal:
            refuse(
                f"{path}: sequence {i}, of {n} token{'s' * (n != 1)}, is not among those of {input_path}: both have to "
                "be of the same tokens"
            )
        found = equal.pop(equal.index(i) if i in equal else 0)
        side_logprobs[tokens.starts[found]:tokens.starts[found] + n] = sequence.logprobs
        tokens.prompts[found] = tokens.prompts[found] or sequence.prompt
    if np.isnan(side_logprobs).all():
        refuse(f"{path}: has no log-probability of any token after the first of its sequence")
    return side_logprobs


def _judge(side_logprobs: Array, case: Case) -> dict[str, typing.Any]:
    """A side's part of the JSON."""
    token_indices, tokens = np.flatnonzero(~np.isnan(side_logprobs)), case.tokens
    reference = case.numbers["logprobs"]
    off = side_logprobs[token_indices] - reference[token_indices]
    bound = ROUNDING_WORST * case.rounding[1] if case.tolerance is None else case.tolerance
    beyond, finite = int((~(np.abs(off) <= bound)).sum()), off[np.isfinite(off)]
    rms = math.sqrt(np.mean(finite * finite)) if len(finite) else math.inf
    side: dict[str, typing.Any] = {
        "off": beyond > 0 or (case.tolerance is None and rms > ROUNDING_RMS * case.rounding[0]),
        "tokens": len(token_indices), "rms": rms, "mean": float(finite.mean()) if len(finite) else math.inf,
        "largest": float(np.where(np.isnan(off), np.inf, np.abs(off)).max()), "share_off": beyond / len(token_indices),
        "cause": None, "says": None, "look_at": None, "explained": None,
        "worst": [{"sequence": int(tokens.sequence[i]), "place": int(tokens.place[i]), "token": int(tokens.token[i]),
                   "given": float(side_logprobs[i]), "model": float(reference[i])}
                  for i in token_indices[np.argsort(-np.abs(off), kind="stable")[:WORST]]]}
    room = KEPT_BYTES // 4 // case.vocab
    token_indices = token_indices[::-(-len(token_indices) // room) if room else len(token_indices)]
    token_indices = token_indices[np.isfinite(side_logprobs[token_indices]) & np.isfinite(reference[token_indices])]
    if (side["off"] or side["largest"] > NOTHING) and len(token_indices):
        rows = case.rows_of(token_indices)
        _explain(
            side,
            case,
            Claims(
                token_indices, side_logprobs[token_indices], reference[token_indices], rows, tokens.token[token_indices]
            ),
        )
    return side


def _explain(side: dict[str, typing.Any], case: Case, claims: Claims) -> None:
    search = _Search(case, claims)
    search.try_rows()
    if not search.found:
        search.try_samplers()
    if side["off"]:
        search.try_readings()
        if case.mixed is not None:
            search.try_weights(case.mixed)
    search.conclude(side)


# --- what is said -----------------------------------------------------------------------------------------------------


def _hash(tokens: Tokens, logprobs: Array) -> str:
    """Of each sequence one, over its tokens and their log-probabilities; of these one, in the order of their bytes."""
    digests = [hashlib.sha256(token_ids.tobytes() + logprobs[begin + 1:begin + n].tobytes()).digest()
               for token_ids, begin, n in zip(tokens.of_each, tokens.starts, tokens.lengths)]
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()


def _json(value: Json, digits: int = 17) -> Json:
    """JSON has no NaN and no infinities."""
    if isinstance(value, dict):
        return {name: _json(entry, digits) for name, entry in value.items()}
    if isinstance(value, list):
        return [_json(entry, digits) for entry in value]
    if not isinstance(value, float):
        return value
    return (float(f"{value:.{digits}g}") if math.isfinite(value) else
            None if math.isnan(value) else str(value).replace("inf", "Infinity"))


def _write_lines(path: str, case: Case, top: int, digits: int) -> None:
    """Tokens, log-probabilities and entropies, a line for each sequence."""
    tokens, numbers, row = case.tokens, case.numbers, 0
    with open(path + ".part", "w", encoding="utf-8") as out:
        for token_ids, begin, n in zip(tokens.of_each, tokens.starts, tokens.lengths):
            line = {"tokens": token_ids.tolist()}
            line.update({name: numbers[name][begin:begin + n].tolist() for name in ("logprobs", "entropies")})
            if top:
                line["top"] = [None, *(_largest(numbers["logits"][row + t - 1], numbers["lse"][begin + t], top)
                                       for t in range(1, n))]
                row += n - 1
            line.update({name: side_logprobs[begin:begin + n].tolist() for name, side_logprobs in case.sides.items()
                         if not np.isnan(side_logprobs[begin:begin + n]).all()})
            out.write(json.dumps(_json(line, digits), separators=(",", ":")) + "\n")
    os.replace(path + ".part", path)


def _largest(row: Array, lse: float, top: int) -> list[list[Json]]:
    """The most likely tokens, of equal ones the lower first."""
    order = np.argsort(-row, kind="stable")[:top]
    return [
        list(pair) for pair in zip(order.tolist(), (row[order].astype(np.float64) - lse).astype(row.dtype).tolist())
    ]


def _table(rows: list[list[str]], left_aligned: typing.Container[int] = (), indent: str = "") -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [(indent + "  ".join(cell.ljust(widths[i]) if i in left_aligned else cell.rjust(widths[i])
                                for i, cell in enumerate(row))).rstrip() for row in rows]


def _text_of_side(name: str, side: dict[str, typing.Any]) -> list[str]:
    says = f"{side['cause']}: {side['says']}" if side["cause"] else "unknown: its numbers are not finite"
    if side["look_at"]:
        says += f" ({100.0 * side['explained']:.1f} % of the difference)\n  look at: {side['look_at']}"
    rows = [[f"{worst_token[key]:.6g}" if key in ("model", "given") else str(worst_token[key]) for key in
             ("sequence", "place", "token", "model", "given")] for worst_token in side["worst"]]
    return ["", f"{name} is off: {says}", *_table([["sequence", "place", "token", "model", name], *rows], indent="  ")]


def _text(data: dict[str, typing.Any], out: str | None) -> str:
    sides = {name: data[name] for name in SIDES if data[name] is not None}
    off = [name for name, side in sides.items() if side["off"]]
    lines = []
    if sides:
        rows = [["", "tokens", "off by (rms)", "mean", "most", ""]]
        for name, side in sides.items():
            says = "as the model, but for rounding" + f": {side['says']}" * bool(side["cause"])
            rows.append([name, str(side["tokens"]), f"{side['rms']:.3g}", f"{side['mean']:+.3g}",
                         f"{side['largest']:.3g}", "OFF" if side["off"] else says])
        lines += ["both are off" if len(off) > 1 else f"the {off[0]} is off" if off else "no side is off", "",
                  *_table(rows, left_aligned=(0, 5))]
        if data.get("rounding"):
            lines.append("rounding in {arithmetic} makes {rms:.3g} (rms), {largest:.3g} at most".format_map(
                data["rounding"]))
        lines += [line for name in off for line in _text_of_side(name, sides[name])] + [""]
    tokens, sequences = data["tokens"], data["sequences"]
    weights = "fresh weights" if data["weights"] == "fresh" else "weights of the folder"
    lines.append(f"{tokens} token{'s' * (tokens != 1)} of {sequences} sequence{'s' * (sequences != 1)} ({weights}): "
                 f"log-probability {data['mean_logprob']:.6g}, entropy {data['mean_entropy']:.6g} in the mean")
    axes = [f"{axis}={data['layout'][axis]}" for axis in ("dp", "pp", "cp", "ep", "tp")
            if axis == "tp" or data["layout"][axis] > 1]
    lines += [out] if out else []
    lines.append(f"{data['numerics']}, {' '.join(axes)}; hash {data['hash']}")
    return "\n".join(lines) + "\n"


# --- all --------------------------------------------------------------------------------------------------------------


def compare(model: typing.Any, *, trainer: Path | None = None, rollout: Path | None = None, input: Path | None = None,
            other: Path | None = None, arithmetic: str | None = None, within: float | None = None,
            out: Path | None = None, top: int = 0, progress: Progress = None, **options: typing.Any) -> LogprobsReport:
    """Computes log-probabilities of given tokens, and says whose are off.

    model: a bundled name, a folder with a Hugging Face config.json, or a model of transformers in memory.
    trainer, rollout: tokens and log-probabilities of a side: JSON, JSON Lines, or a response of vLLM's or SGLang's
    server. input: tokens alone: such records, or input_ids as `anyrank grads` reads them; None: those of a side.
    other: a folder whose weights a side may have used in place of the model's, as an earlier step's.
    arithmetic: in which the sides compute, for what rounding may do (None: "bf16-pure"); within: what a side may be
    off, in place of that. out: JSON Lines of the numbers, with the `top` most likely tokens of each place.
    options: binary64, the layout and the numerics, as of `anyrank grads`.

        anyrank.logprobs.compare(model, rollout="vllm.json", trainer="trainer.jsonl", binary64=True)

    Errors: TypeError for an unknown option; AnyrankError for what cannot be read or computed.
    """
    words = option_words("grads", options)
    files = dict(zip(_PATHS, (trainer, rollout, input, other, out)))
    paths = {name: path_name(file) for name, file in files.items() if file is not None}
    _check(paths, arithmetic, within, top)
    with model_path(model) as path:
        case = _case(path_name(path or ""), words, paths, top, progress)
        return _report(case, paths, arithmetic or "bf16-pure", within, top)


def _check(paths: dict[str, str], arithmetic: str | None, tolerance: float | None, top: int) -> None:
    """Refuses options that mean nothing together, before anything is read."""
    sides, out = any(name in paths for name in SIDES), paths.get("out")
    reads = [path for name, path in paths.items() if name != "out" and out and os.path.exists(path)]
    for wrong, text in (
            (not sides and "input" not in paths,
             "give --rollout FILE, --trainer FILE, or --input FILE: the tokens are there"),
            (top and not out, "--top goes with --out FILE, where the most likely tokens are written"),
            (top < 0, f"--top: got {top}, expected an integer from 1"),
            ("other" in paths and not sides, "--other goes with --rollout or --trainer, whose weights it may be"),
            (arithmetic and not sides, "--arithmetic is that of --rollout or --trainer: give one"),
            (tolerance is not None and not sides, "--within goes with --rollout or --trainer, which it judges"),
            (tolerance is not None and not 1e-30 <= tolerance <= 1e6,
             f"--within: got {tolerance}, expected a number from 1e-30 to 1e6"),
            (out and not os.path.isdir(os.path.dirname(out) or "."), f"{out}: there is no such folder"),
            (out and os.path.exists(out) and any(os.path.samefile(path, out) for path in reads),
             f"--out {out}: that is a file that is read; give the name of another file")):
        if wrong:
            refuse(text)


def _case(model: str, words: list[str], paths: dict[str, str], top: int, progress: Progress) -> Case:
    """Reads everything, and computes the model's numbers."""
    names = [name for name in SIDES if name in paths]
    shown, extra_words = paths.get("input") or paths[names[0]], ["--logits"] * bool(top)
    sides = {name: read(paths[name], True) for name in names}
    case = Case(model, words, shown, progress)
    case.mixed = _Mixed(model, paths["other"]) if "other" in paths else None
    if "input" in paths and shown.endswith(".safetensors"):
        case.read_batch(shown, extra_words)
    else:
        sequences = read(shown, False) if "input" in paths else sides[names[0]]
        case.tokens = Tokens([sequence.tokens for sequence in sequences], [sequence.prompt for sequence in sequences])
    case.sides = {name: _match(case.tokens, sides[name], paths[name], shown) for name in names}
    case.numbers = case.numbers or case.evaluate(case.tokens, *extra_words)
    return case


def _report(case: Case, paths: dict[str, str], arithmetic: str, tolerance: float | None, top: int) -> LogprobsReport:
    numbers, run, case.tolerance = case.numbers, case.report, tolerance
    if case.sides and tolerance is None:
        case.measure_rounding(arithmetic)
    judged = {name: _judge(side_logprobs, case) for name, side_logprobs in case.sides.items()}
    if "out" in paths:
        _write_lines(paths["out"], case, top, 17 if run["numerics"] == "binary64" else 9)
    predicted = case.tokens.place > 0
    off, count = any(side["off"] for side in judged.values()), int(predicted.sum())
    means = [float(numbers[name][predicted].mean()) if count else 0.0 for name in ("logprobs", "entropies")]
    data: dict[str, typing.Any] = {
        **{name: run[name] for name in ("tool", "version", "schema")}, "command": "logprobs",
        "result": "different" if off else "same",
        **{name: run[name] for name in ("numerics", "precision", "layout", "weights")},
        "sequences": len(case.tokens.lengths), "tokens": count, "mean_logprob": means[0], "mean_entropy": means[1],
        "hash": _hash(case.tokens, numbers["logprobs"]), "seconds": case.seconds}
    if case.rounding[0] > 0.0:
        data["rounding"] = {"arithmetic": arithmetic, "rms": case.rounding[0], "largest": case.rounding[1]}
    data.update({name: judged.get(name) for name in SIDES}, notes=run["notes"])
    return report_of(LogprobsReport, Finished(("logprobs", *case.words), int(off), _json(data),
                                              _text(data, paths.get("out"))))


_OWN = {
    "rollout": ("FILE.json", "tokens and log-probabilities of the engine that sampled: JSON, JSON Lines, or a response "
                             "of vLLM's or SGLang's server"),
    "trainer": ("FILE.json", "the same of the trainer, for the same tokens"),
    "input": ("FILE", "tokens alone: such records, or input_ids as 'anyrank grads' reads them"),
    "other": ("DIR", "a model folder whose weights a side may have used in place of the model's: an earlier step's"),
    "arithmetic": ("NAME", "in which the sides compute, for what rounding may do, as of 'anyrank grads "
                           "--sensitivity-of' (default bf16-pure)"),
    "within": ("X", "what a side may be off, in place of what rounding makes"),
    "out": ("FILE.jsonl", "tokens, log-probabilities and entropies, a line for each sequence"),
    "top": ("K", "the K most likely tokens of each place, in --out"),
}
# Options of the command that are this one's own, or of no use to it.
_LEFT_OUT = ("input", "out", "block", "logprobs", "logits", "per_rank", "activations", "stacked", "inject", "trace",
             "sensitivity", "sensitivity_of", "timeline", "cluster", "label_smoothing", "z_loss")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m anyrank.logprobs", allow_abbrev=False, description="Computes "
                                     "log-probabilities of given tokens, and says whose are off: the trainer's or the "
                                     "rollout's.")
    parser.add_argument("model", metavar="MODEL", help="a folder with a Hugging Face config.json, or a bundled name")
    for name, (metavar, text) in _OWN.items():
        kind = {"within": float, "top": int}.get(name, str)
        parser.add_argument(f"--{name}", metavar=metavar, help=text, type=kind, default=0 if name == "top" else None)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("-q", "--quiet", action="store_true", help="no notes")
    shared = parser.add_argument_group("layout and numerics, as of 'anyrank grads'")
    for name, option in OPTIONS["grads"].items():
        dashed, text = "--" + name.replace("_", "-"), option.help.replace("%", "%%")
        if name not in _LEFT_OUT and option.type == "bool":
            shared.add_argument(dashed, dest="words", action="append_const", const=dashed, help=text)
        elif name not in _LEFT_OUT:
            shared.add_argument(dashed, dest="words", action="append", metavar="X", help=text,
                                type=(dashed + "={}").format)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 no side is off, 1 a side is, 2 wrong usage or input, 3 the machine failed."""
    args = _parser().parse_args(arguments)
    paths = {name: value for name, value in vars(args).items() if name in _PATHS and value is not None}
    try:
        _check(paths, args.arithmetic, args.within, args.top)
        case = _case(args.model, args.words or [], paths, args.top, None if args.quiet else True)
        report = _report(case, paths, args.arithmetic or "bf16-pure", args.within, args.top)
    except AnyrankError as error:
        print(error, file=sys.stderr)
        return error.exit_status if error.exit_status in (2, 3) else 2
    notes = list(report.data["notes"])
    if report.weights == "fresh":
        notes.append(f"{args.model} has no weights: they are random, drawn from --seed, and the log-probabilities "
                     "those of an untrained model, from which a trained model's trainer and rollout are far")
    for note in notes if not args.quiet else []:
        print(f"note: {note}", file=sys.stderr)
    print(report.to_json() if args.json else report)
    return report.exit_status


if __name__ == "__main__":
    sys.exit(main())
