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
    given: list[float] = []  #: of a side, of each token; NaN where it says nothing


def refuse(text: str) -> typing.NoReturn:
    raise AnyrankError(f"anyrank logprobs: {text}", 2)


def _list(source: Json, *names: str) -> tuple[str, list[Json] | None]:
    """The first of the names under which an object has a list, and that list."""
    values = source if isinstance(source, dict) else {}
    return next(((name, values[name]) for name in names if isinstance(values.get(name), list)), (names[0], None))


def _tokens(values: list[Json], name: str, where: str) -> list[int]:
    for i, value in enumerate(values):
        if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 1 << 63:
            refuse(f"{where}: {name}[{i}] is no integer")
    return values


def _numbers(values: list[Json], name: str, where: str) -> list[float]:
    """Log-probabilities, NaN for null."""
    made = []
    for i, value in enumerate(values):
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        if not number and value is not None and value != "-Infinity":
            refuse(f"{where}: {name}[{i}] is neither a number nor null")
        made.append(math.nan if value is None else float(value))
    return made


_WHOLE = ("tokens", "token_ids", "input_ids")
_PROMPTS = ("prompt_ids", "prompt_token_ids")
_RESPONSES = ("response_ids", "output_ids", "completion_ids", "response_token_ids")
_NUMBERS = ("logprobs", "log_probs", "token_logprobs", "response_logprobs", "rollout_log_probs", "old_log_probs")


def _own(record: Json, where: str, given: bool) -> Sequence:
    """A record of one's own. Its numbers are of all n tokens, where the first has none, of all but the first, or of the
    last ones. A null in front is the first token's: with it n - 1 numbers would be those of other tokens."""
    prompt_name, prompt = _list(record, *_PROMPTS)
    name, tokens = _list(record, *_RESPONSES)
    number_name, values = _list(record, *_NUMBERS)
    if prompt is None or tokens is None:
        prompt = []
        name, tokens = _list(record, *_WHOLE)
    if tokens is None:
        refuse(f'{where}: expected "tokens": [..], or "prompt_ids" and "response_ids"')
    n, m = len(prompt) + len(tokens), len(values or [])
    if n == 0:
        refuse(f"{where}: has no tokens")
    if given and values is None:
        refuse(f'{where}: has no log-probabilities: expected "logprobs": [..]')
    made = Sequence(_tokens(prompt, prompt_name, where) + _tokens(tokens, name, where), len(prompt))
    if not given or values is None:
        return made
    if m > n:
        refuse(f"{where}: {number_name} has {m} numbers for {n} tokens")
    if m + 1 == n and values[:1] == [None] and not prompt:
        refuse(f"{where}: {number_name} begins with null, as of the first token, and has {m} entries for {n} tokens: "
               "expected an entry for each, or no null in front")
    numbers = [math.nan] * (n - m) + _numbers(values, number_name, where)
    if abs(numbers[0]) > 0.0:  # 0 is what some write for none
        refuse(f"{where}: {number_name} has a number for the first token, which nothing predicts: expected null there, "
               f"or {m - 1} numbers for the tokens after it")
    return made._replace(given=[math.nan, *numbers[1:]])


def _named(text: Json, where: str) -> int:
    """"token_id:17", as return_tokens_as_token_ids has them."""
    if not isinstance(text, str) or not text.startswith("token_id:"):
        refuse(f"{where}: says tokens as text: ask vLLM for return_token_ids, or return_tokens_as_token_ids")
    if not re.fullmatch(r"token_id:-?\d{1,18}", text):
        refuse(f"{where}: has a token_id that is no number")
    return int(text[len("token_id:"):])


def _choice(record: Json, choice: Json, where: str, given: bool) -> Sequence:
    """A choice of a response of vLLM's server, completions or chat: OpenAI's, with prompt_logprobs, token_ids and
    prompt_token_ids beside. Its numbers are of the last tokens, with echo of all."""
    log = choice.get("logprobs") if isinstance(choice, dict) else None
    content, listed = _list(log, "content")[1], _list(log, "token_logprobs")[1]
    texts, ids = _list(log, "tokens")[1] or [], _list(choice, "token_ids")[1]
    if content is not None:
        objects = [one if isinstance(one, dict) else {} for one in content]
        listed, texts = [one.get("logprob") for one in objects], [one.get("token") for one in objects]
    prompt, before = (_list(choice, name)[1] or _list(record, name)[1]
                      for name in ("prompt_token_ids", "prompt_logprobs"))
    if prompt is None:
        refuse(f"{where}: has no prompt_token_ids: ask vLLM for return_token_ids, and for no stream")
    if given and listed is None and before is None:
        refuse(f"{where}: has no log-probabilities: ask vLLM for logprobs or prompt_logprobs")
    if ids is not None and listed is not None and len(listed) not in (len(ids), len(prompt) + len(ids)):
        refuse(f"{where}: has another number of token_ids than of logprobs")
    if before is not None and len(before) != len(prompt):
        refuse(f"{where}: has another number of prompt_logprobs than of prompt_token_ids")
    values = listed or []
    if ids is None:
        ids = [_named(texts[i] if i < len(texts) else None, where) for i in range(len(values))]
    tokens = _tokens(prompt, "prompt_token_ids", where) + _tokens(ids, "token_ids", where)
    if not tokens:
        refuse(f"{where}: has no tokens")
    numbers = [math.nan] * (len(tokens) - len(values)) + (_numbers(values, "logprobs", where) if given else [])
    for i, one in enumerate(before or [] if given else []):
        if one is not None:
            found = one.get(str(tokens[i])) if isinstance(one, dict) else None
            if not isinstance(found, dict) or "logprob" not in found:
                refuse(f"{where}: prompt_logprobs[{i}] has no entry for the prompt's token {tokens[i]}")
            numbers[i] = _numbers([found["logprob"]], "prompt_logprobs", where)[0]
    return Sequence(tokens, len(prompt), [math.nan, *numbers[1:]])


def _sglang(record: Json, where: str) -> Sequence:
    """A response of SGLang's /generate: [[log-probability or null, id, text or null], ..]."""
    meta = record["meta_info"]
    prompt = _list(meta, "input_token_logprobs")[1] or []
    triples = prompt + (_list(meta, "output_token_logprobs")[1] or [])
    if not triples:
        refuse(f"{where}: has no token_logprobs: ask SGLang for return_logprob with logprob_start_len 0")
    if isinstance(meta.get("prompt_tokens"), int) and meta["prompt_tokens"] != len(prompt):
        refuse(f"{where}: has log-probabilities for a part of the prompt alone: ask SGLang for logprob_start_len 0")
    if any(not isinstance(one, list) or len(one) < 2 for one in triples):
        refuse(f"{where}: has a token_logprobs entry that is not [log-probability, id, text]")
    numbers = _numbers([one[0] for one in triples[1:]], "token_logprobs", where)
    return Sequence(_tokens([one[1] for one in triples], "token_logprobs", where), len(prompt), [math.nan, *numbers])


def _sequences(value: Json, where: str, given: bool) -> typing.Iterator[Sequence]:
    """Those of a record, or of a server's response."""
    if not isinstance(value, dict):
        refuse(f'{where}: expected an object with "tokens", or a server\'s response')
    for key in ("labels", "attention_mask", "position_ids", "loss_mask", "response_mask"):
        if key in value:
            refuse(f"{where}: '{key}' would not be looked at: give the tokens of a sequence without padding, and null "
                   "where there is no log-probability")
    choices = _list(value, "choices")[1]
    if choices is not None:
        yield from (_choice(value, choice, where, given) for choice in choices)
    else:
        yield _sglang(value, where) if isinstance(value.get("meta_info"), dict) else _own(value, where, given)


def _constant(name: str) -> typing.NoReturn:
    raise ValueError(f"there is no {name.lstrip('-')}: write null")


def _parsed(text: str, where: str) -> Json:
    try:
        return json.loads(text, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        refuse(f"{where}: not JSON: {error}")


def _values(text: str, path: str) -> list[tuple[str, Json]]:
    """JSON Lines if the first line that is not blank is a whole value, and another follows; else one value."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip(" \t\r")]
    try:
        json.loads(lines[0][1] if len(lines) > 1 else "")
    except (ValueError, RecursionError):
        return [(path, _parsed(text, path))]
    return [(f"{path}: line {number}", _parsed(line, f"{path}: line {number}")) for number, line in lines]


def read(path: str, given: bool) -> list[Sequence]:
    """The sequences of a file. given: it must have log-probabilities. Errors: AnyrankError."""
    if path.endswith(".safetensors"):
        refuse(f"{path}: log-probabilities are read from JSON or JSON Lines")
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        refuse(f"{path}: {getattr(error, 'strerror', None) or f'not JSON: {error}'}")
    found: list[Sequence] = []
    for where, value in _values(text, path):
        many = isinstance(value, list)
        for i, one in enumerate(value if many else [value]):
            found += _sequences(one, f"{where}: entry {i}" if many else where, given)
    if not found:
        refuse(f"{path}: holds no sequence")
    for i, sequence in enumerate(found):
        for t, token in enumerate(sequence.tokens):
            if token < 0:
                refuse(f"{path}: token {t} of sequence {i} is {token}, and ids count from 0")
    return found
