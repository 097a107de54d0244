# SPDX-License-Identifier: Apache-2.0
"""Tokens and log-probabilities as programs write them, in JSON or JSON Lines (logprobs.md): records of one's own, and
responses of the servers of vLLM and SGLang."""

from __future__ import annotations

import json
import math
import pathlib
import re
import sys
import typing

from anyrank._errors import AnyrankError

Json = typing.Any


class Sequence(typing.NamedTuple):
    tokens: list[int]
    prompt: int = 0  #: the first tokens, which were given and not sampled; 0: not known
    logprobs: list[float] = []  #: of a side, of each token; NaN where it says nothing


def refuse(text: str) -> typing.NoReturn:
    raise AnyrankError(f"anyrank logprobs: {text}", 2)


def _list(source: Json, *names: str) -> tuple[str, list[Json] | None]:
    """Returns the first of these names under which an object has a list, and the list."""
    values = source if isinstance(source, dict) else {}
    return next(((name, values[name]) for name in names if isinstance(values.get(name), list)), (names[0], None))


def _tokens(values: list[Json], name: str, location: str) -> list[int]:
    for i, value in enumerate(values):
        if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 1 << 63:
            refuse(f"{location}: {name}[{i}] is no integer")
    return values


def _numbers(values: list[Json], name: str, location: str) -> list[float]:
    """Log-probabilities, NaN for null."""
    numbers = []
    for i, value in enumerate(values):
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        if not number and value is not None and value != "-Infinity":
            refuse(f"{location}: {name}[{i}] is neither a number nor null")
        numbers.append(math.nan if value is None else float(value))
    return numbers


_WHOLE = ("tokens", "token_ids", "input_ids")
_PROMPTS = ("prompt_ids", "prompt_token_ids")
_RESPONSES = ("response_ids", "output_ids", "completion_ids", "response_token_ids")
_NUMBERS = ("logprobs", "log_probs", "token_logprobs", "response_logprobs", "rollout_log_probs", "old_log_probs")


def _own(record: Json, location: str, logprobs_required: bool) -> Sequence:
    """A record of one's own. Its numbers are of all n tokens, where the first has none, of all but the first, or of the
    last ones. A null in front is the first token's: with it n - 1 numbers would be those of other tokens."""
    prompt_name, prompt = _list(record, *_PROMPTS)
    name, tokens = _list(record, *_RESPONSES)
    number_name, values = _list(record, *_NUMBERS)
    if prompt is None or tokens is None:
        prompt = []
        name, tokens = _list(record, *_WHOLE)
    if tokens is None:
        refuse(f'{location}: expected "tokens": [..], or "prompt_ids" and "response_ids"')
    n, m = len(prompt) + len(tokens), len(values or [])
    if n == 0:
        refuse(f"{location}: has no tokens")
    if logprobs_required and values is None:
        refuse(f'{location}: has no log-probabilities: expected "logprobs": [..]')
    sequence = Sequence(_tokens(prompt, prompt_name, location) + _tokens(tokens, name, location), len(prompt))
    if not logprobs_required or values is None:
        return sequence
    if m > n:
        refuse(f"{location}: {number_name} has {m} numbers for {n} tokens")
    if m + 1 == n and values[:1] == [None] and not prompt:
        refuse(
            f"{location}: {number_name} begins with null, as of the first token, and has {m} entries for {n} tokens: "
            "expected an entry for each, or no null in front"
        )
    numbers = [math.nan] * (n - m) + _numbers(values, number_name, location)
    if abs(numbers[0]) > 0.0:  # 0 is what some write for none
        refuse(
            f"{location}: {number_name} has a number for the first token, which nothing predicts: expected null there, "
            f"or {m - 1} numbers for the tokens after it"
        )
    return sequence._replace(logprobs=[math.nan, *numbers[1:]])


def _named(text: Json, location: str) -> int:
    """"token_id:17", as return_tokens_as_token_ids has them."""
    if not isinstance(text, str) or not text.startswith("token_id:"):
        refuse(f"{location}: says tokens as text: ask vLLM for return_token_ids, or return_tokens_as_token_ids")
    if not re.fullmatch(r"token_id:-?\d{1,18}", text):
        refuse(f"{location}: has a token_id that is no number")
    return int(text[len("token_id:"):])


def _choice(record: Json, choice: Json, location: str, logprobs_required: bool) -> Sequence:
    """A choice of a response of vLLM's server, completions or chat: OpenAI's, with prompt_logprobs, token_ids and
    prompt_token_ids beside. Its numbers are of the last tokens, with echo of all."""
    log = choice.get("logprobs") if isinstance(choice, dict) else None
    content, listed = _list(log, "content")[1], _list(log, "token_logprobs")[1]
    texts, ids = _list(log, "tokens")[1] or [], _list(choice, "token_ids")[1]
    if content is not None:
        objects = [entry if isinstance(entry, dict) else {} for entry in content]
        listed, texts = [entry.get("logprob") for entry in objects], [entry.get("token") for entry in objects]
    prompt, before = (_list(choice, name)[1] or _list(record, name)[1]
                      for name in ("prompt_token_ids", "prompt_logprobs"))
    if prompt is None:
        refuse(f"{location}: has no prompt_token_ids: ask vLLM for return_token_ids, and for no stream")
    if logprobs_required and listed is None and before is None:
        refuse(f"{location}: has no log-probabilities: ask vLLM for logprobs or prompt_logprobs")
    if ids is not None and listed is not None and len(listed) not in (len(ids), len(prompt) + len(ids)):
        refuse(f"{location}: has another number of token_ids than of logprobs")
    if before is not None and len(before) != len(prompt):
        refuse(f"{location}: has another number of prompt_logprobs than of prompt_token_ids")
    values = listed or []
    if ids is None:
        ids = [_named(texts[i] if i < len(texts) else None, location) for i in range(len(values))]
    tokens = _tokens(prompt, "prompt_token_ids", location) + _tokens(ids, "token_ids", location)
    if not tokens:
        refuse(f"{location}: has no tokens")
    numbers = [math.nan] * (len(tokens) - len(values)) + (
        _numbers(values, "logprobs", location) if logprobs_required else []
    )
    for i, entry in enumerate(before or [] if logprobs_required else []):
        if entry is not None:
            found = entry.get(str(tokens[i])) if isinstance(entry, dict) else None
            if not isinstance(found, dict) or "logprob" not in found:
                refuse(f"{location}: prompt_logprobs[{i}] has no entry for the prompt's token {tokens[i]}")
            numbers[i] = _numbers([found["logprob"]], "prompt_logprobs", location)[0]
    return Sequence(tokens, len(prompt), [math.nan, *numbers[1:]])


def _sglang(record: Json, location: str) -> Sequence:
    """Reads a response of SGLang's /generate: [[log-probability or null, id, text or null], ..]."""
    meta = record["meta_info"]
    prompt = _list(meta, "input_token_logprobs")[1] or []
    triples = prompt + (_list(meta, "output_token_logprobs")[1] or [])
    if not triples:
        refuse(f"{location}: has no token_logprobs: ask SGLang for return_logprob with logprob_start_len 0")
    if isinstance(meta.get("prompt_tokens"), int) and meta["prompt_tokens"] != len(prompt):
        refuse(f"{location}: has log-probabilities for a part of the prompt alone: ask SGLang for logprob_start_len 0")
    if any(not isinstance(triple, list) or len(triple) < 2 for triple in triples):
        refuse(f"{location}: has a token_logprobs entry that is not [log-probability, id, text]")
    numbers = _numbers([triple[0] for triple in triples[1:]], "token_logprobs", location)
    return Sequence(
        _tokens([triple[1] for triple in triples], "token_logprobs", location), len(prompt), [math.nan, *numbers]
    )


def _sequences(value: Json, location: str, logprobs_required: bool) -> typing.Iterator[Sequence]:
    """Returns the sequences of a record, or of a server's response."""
    if not isinstance(value, dict):
        refuse(f'{location}: expected an object with "tokens", or a server\'s response')
    for key in ("labels", "attention_mask", "position_ids", "loss_mask", "response_mask"):
        if key in value:
            refuse(
                f"{location}: '{key}' would not be looked at: give the tokens of a sequence without padding, and null "
                "where there is no log-probability"
            )
    choices = _list(value, "choices")[1]
    if choices is not None:
        yield from (_choice(value, choice, location, logprobs_required) for choice in choices)
    else:
        yield (
            _sglang(value, location)
            if isinstance(value.get("meta_info"), dict)
            else _own(value, location, logprobs_required)
        )


def _constant(name: str) -> typing.NoReturn:
    raise ValueError(f"there is no {name.lstrip('-')}: write null")


def _parsed(text: str, location: str) -> Json:
    try:
        return json.loads(text, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        refuse(f"{location}: not JSON: {error}")


def _values(text: str, path: str) -> list[tuple[str, Json]]:
    """JSON Lines if the first line that is not blank is a whole value, and another follows; else one value."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip(" \t\r")]
    try:
        json.loads(lines[0][1] if len(lines) > 1 else "")
    except (ValueError, RecursionError):
        return [(path, _parsed(text, path))]
    return [(f"{path}: line {number}", _parsed(line, f"{path}: line {number}")) for number, line in lines]


def read(path: str, need_logprobs: bool) -> list[Sequence]:
    """Reads the sequences of a file. need_logprobs: the file must have log-probabilities. Errors: AnyrankError."""
    if path.endswith(".safetensors"):
        refuse(f"{path}: log-probabilities are read from JSON or JSON Lines")
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        refuse(f"{path}: {getattr(error, 'strerror', None) or f'not JSON: {error}'}")
    found: list[Sequence] = []
    for location, value in _values(text, path):
        is_list = isinstance(value, list)
        for i, entry in enumerate(value if is_list else [value]):
            found += _sequences(entry, f"{location}: entry {i}" if is_list else location, need_logprobs)
    if not found:
        refuse(f"{path}: holds no sequence")
    for i, sequence in enumerate(found):
        for t, token in enumerate(sequence.tokens):
            if token < 0:
                refuse(f"{path}: token {t} of sequence {i} is {token}, and ids count from 0")
    return found
