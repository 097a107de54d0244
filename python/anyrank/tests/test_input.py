# SPDX-License-Identifier: Apache-2.0
"""Files of others: what is refused, in which words, and what reaches a terminal."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pathlib
import socket
import sys
import typing
import warnings

from anyrank import AnyrankError, _safetensors
from anyrank._input import (integer, list_of, map_of, nullable, number, parse_json, parsed, read_json, record, step_key,
                            string)
from anyrank._terminal import Parser, printable, refuse, say, with_clean_warnings
from anyrank.explain.__main__ import main as explain
from anyrank.page.__main__ import main as page
from anyrank.tests import FolderCase, run_python
from anyrank.watch import main as watch

# Each is shown as one question mark, as by the command (tests/core/size_test.c tests that).
CONTROLS = "\x00\x07\x1b\x1f\x7f\x80\x9b\x9f\u061c\u200e\u200f\u2028\u2029\u202a\u202e\u2066\u2069\ud800\udc9b\n\t\r"
SIGNS = "a \u00a0\u00e9\u061b\u200d\u2027\u202f\u2065\u206a\ud7ff\ue000\U0001f600"


class Terminal(FolderCase):
    def test_control_characters_are_question_marks_and_signs_stay(self) -> None:
        self.assertEqual(printable(CONTROLS), "?" * len(CONTROLS))
        self.assertEqual(printable(SIGNS), SIGNS)
        self.assertEqual(printable("abcdef\x1b", 3), "abc..")
        out = io.StringIO()
        say("a\nb\x1b[2J", "c", file=out)
        self.assertEqual(out.getvalue(), "a?b?[2J\nc\n")

    def test_a_stream_that_lacks_a_sign_gets_a_question_mark(self) -> None:
        out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        say("\u00e9", file=out)
        out.flush()
        out.seek(0)
        self.assertEqual(out.read(), "?\n")

    def test_warnings_and_the_words_of_the_command_line_are_clean_too(self) -> None:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            with_clean_warnings(lambda: warnings.warn("x\x1b[2J", stacklevel=1))
            self.assertEqual(refuse("anyrank.x", AnyrankError("a\x9b\nnote: b\u202e")), 2)
            with self.assertRaises(SystemExit):
                Parser(prog="p").parse_args(["--x\x1b[2J"])
        self.assertEqual(said.getvalue().splitlines()[:3], ["warning: x?[2J", "anyrank.x: a?", "note: b?"])
        self.assertNotIn("\x1b", said.getvalue())

    def test_no_name_of_a_file_reaches_the_terminal_as_it_is(self) -> None:
        named = self.path / "run\x1b[2J\u202e\udcff"
        os.mkdir(os.fsencode(named))
        (named / "x.json").write_text("{}")
        for program, words in ((watch, [str(named)]), (page, [str(named / "x.json")]),
                               (explain, [str(named), str(named), "--facts"]), (explain, [str(named)])):
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
                try:
                    self.assertEqual(program(words), 2)
                except SystemExit as ended:
                    self.assertEqual(ended.code, 2)
            self.assertNotRegex(out.getvalue(), "[\x1b\u202e\ud800-\udfff]")


class Files(FolderCase):
    def refused(self, says: str, function: typing.Callable[..., object], *arguments: typing.Any) -> None:
        with self.assertRaises(AnyrankError) as raised:
            function(*arguments)
        self.assertIn(says, str(raised.exception))

    def special(self, name: str) -> dict[str, str]:
        """A file of each kind that is none, and what is said of it."""
        made = {kind: self.path / kind / name for kind in ("a pipe", "a socket", "a directory", "a device")}
        for path in made.values():
            path.parent.mkdir()
        os.mkfifo(made["a pipe"])
        before = os.getcwd()
        os.chdir(made["a socket"].parent)  # the path of a socket is short
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(name)
        finally:
            os.chdir(before)
        made["a directory"].mkdir()
        made["a device"].symlink_to("/dev/zero")
        return {str(path.parent): kind for kind, path in made.items()}

    def test_what_is_no_regular_file_is_refused_and_never_waited_for(self) -> None:
        for folder, kind in self.special("model.json").items():
            path = pathlib.Path(folder, "model.json")
            with self.subTest(kind):
                self.refused(f"model.json: {kind}, expected a file", read_json, path)
                self.refused(f"model.json: {kind}, expected a file", _safetensors.read, path)
                for program, words in ((page, [str(path)]), (explain, [folder, folder, "--facts"])):
                    with contextlib.redirect_stderr(io.StringIO()) as said:
                        self.assertEqual(program(words), 2)
                    self.assertIn(f"model.json: {kind}, expected a file", said.getvalue())
                    self.assertEqual(said.getvalue().count("\n"), 1)

    def test_records_and_dumps_that_are_none(self) -> None:
        for name in ("rank-00000.sketch", "rank-00000.safetensors"):
            folder = self.path / name
            folder.mkdir()
            os.mkfifo(folder / name)
            with contextlib.redirect_stderr(io.StringIO()) as said:
                is_run = name.endswith("sketch")
                self.assertEqual(watch([str(folder)]) if is_run else explain([str(folder), str(folder)]), 2)
            self.assertRegex(said.getvalue(), name if is_run else f"{name}|needs numpy, which is not installed")

    def test_json_is_that_of_the_standard(self) -> None:
        for data, says in ((b"{", "not JSON: line 1, column 2"), (b"[NaN]", "JSON has no NaN"), (b"\xff", "byte 0"),
                           (b"[1e999]", "1e999 is beyond the largest number"), (b"[" * 65 + b"]" * 65, "64 deep"),
                           (b"[" * 100000, "64 deep"), (b'{"a": ' * 65 + b"1" + b"}" * 65, "64 deep"),
                           (b"\xef\xbb\xbf{}", "not JSON")):
            self.refused(f"x.json: {says}" if says[0] in "nb" else says, parse_json, data, "x.json")
        self.assertEqual(parse_json(b"[" * 64 + b"]" * 64, ""), json.loads("[" * 64 + "]" * 64))
        self.assertEqual(parse_json(b"[NaN, 1e999]", "", constants=True)[1], math.inf)
        if sys.version_info >= (3, 11):
            self.refused("not JSON that can be read", parse_json, b"9" * 5000, "x.json")

    def test_a_value_of_another_kind_has_its_place_and_what_is_right(self) -> None:
        check = record({"rows": list_of(record({"name": string}, {"size": integer(1, 8), "map": map_of(number(0.0))}))})
        good = {"rows": [{"name": "a", "size": None, "more": 1}, {"name": "b", "map": {"x": 1}}]}
        self.assertEqual(parsed(good, check, "f")["rows"], [{"name": "a", "more": 1}, {"name": "b", "map": {"x": 1}}])
        for value, says in (([], "f: got a list of 0, expected an object"), ({}, 'f: has no "rows"'),
                            ({"rows": [{}]}, 'f: rows[0]: has no "name"'),
                            ({"rows": [{"name": True}]}, "f: rows[0].name: got true, expected a string"),
                            ({"rows": [{"name": "", "size": 9}]}, "[0].size: got 9, expected an integer from 1 to 8"),
                            ({"rows": [{"name": "", "size": 1.0}]}, "rows[0].size: got 1.0, expected an integer"),
                            ({"rows": [{"name": "", "size": True}]}, "rows[0].size: got true, expected an integer"),
                            ({"rows": [{"name": "", "map": {"a\x1b": -1}}]},
                             "rows[0].map.a?: got -1, expected a number from 0.0 on")):
            self.refused(says, parsed, value, check, "f")
        self.refused("got 1e+101, expected a number", parsed, 1e101, number(), "f")
        self.refused("got 1" + "0" * 59 + "..", parsed, 10 ** 400, number(), "f")
        self.assertEqual(parsed("-Infinity", number(words=True), "f"), -math.inf)
        self.assertIsNone(parsed(None, nullable(string), "f"))
        for key in ("x", "-1", "\u0663", "1" * 16):
            self.refused("the number of a step as the key", parsed, {key: ""}, map_of(string, step_key), "f")

    def test_a_header_of_safetensors_is_checked(self) -> None:
        def file(header: typing.Any, length: int | None = None) -> pathlib.Path:
            text = header if isinstance(header, bytes) else json.dumps(header).encode()
            path = self.path / "x.safetensors"
            path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(8))
            return path
        entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
        self.assertEqual(_safetensors.read(file({"__metadata__": {"a": "b"}, "w": entry}))[1], {"a": "b"})
        for header, says in (([], "header: got a list of 0"), ({"w": 3}, "header: w: got 3, expected an object"),
                             ({"w": {**entry, "shape": [-1, -2]}}, "w.shape[0]: got -1"),
                             ({"w": {**entry, "shape": [10 ** 30]}}, "is not what its bytes 0..8 hold"),
                             ({"w": {**entry, "dtype": "F\x1b"}}, "'w': F? [2] is not what"),
                             ({"w": {**entry, "data_offsets": [0]}}, "w.data_offsets: got a list of 1"),
                             ({"w": {"dtype": "F32"}}, 'w: has no "shape"'),
                             ({"__metadata__": {"a": 1}}, "__metadata__.a: got 1, expected a string"),
                             (b"[" * 5000 + b"]" * 5000, "64 deep"), (b"\xff", "header: byte 0 is not UTF-8")):
            self.refused(says, _safetensors.read, file(header))
        self.refused("its header does not fit", _safetensors.read, file({}, 1 << 40))


class Processes(FolderCase):
    def test_an_absurd_size_allocates_nothing(self) -> None:
        """A record, or a header, that claims a terabyte."""
        (self.path / "rank-00000.sketch").write_bytes(b"anyrank sketch 2" + (1 << 40).to_bytes(8, "little") * 3)
        done = run_python(
            "import resource, sys\nresource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31))\n"
            "from anyrank.watch import main\nsys.exit(main(sys.argv[1:]))", str(self.path))
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("0 findings", done.stdout)



