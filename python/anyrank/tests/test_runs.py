# SPDX-License-Identifier: Apache-2.0
"""The commands as functions: options, results, refusals, progress, interruption."""

from __future__ import annotations

import io
import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import time
import typing
import unittest
from unittest import mock

import anyrank
from anyrank import _arguments, _command, _options
from anyrank.report import LintReport, Report
from anyrank.tests import FolderCase, needs, run_python

COMMANDS = ("check", "grads", "train", "verify", "plan", "lint")


class Options(unittest.TestCase):
    def test_they_are_those_of_the_command(self) -> None:
        for command in COMMANDS:
            usage = subprocess.check_output([_command.find_command(), command, "--help-all"], text=True)
            words = {line.split("--", 1)[1].split()[0] for line in usage.splitlines()
                     if line.startswith("  --") or line.startswith("  -q, --")}
            given_here = {"json", "quiet", "no-color", "progress-fd", "version", "help-all"}
            options = {name.replace("_", "-") for name in _options.OPTIONS[command]}
            self.assertEqual(options, words - given_here, command)

    def test_a_value_becomes_a_word(self) -> None:
        cases: list[tuple[dict[str, object], list[str]]] = [
                ({"tp": 2, "sp": True, "zigzag": False, "pp": None}, ["--tp=2", "--sp"]),
                ({"scale": 16, "betas": (0.9, 0.95), "lr": 1e-3}, ["--scale=1/16", "--betas=0.9,0.95", "--lr=0.001"]),
                ({"stages": [3, 5], "group": ["a:lr=2", "b"]}, ["--stages=3,5", "--group=a:lr=2", "--group=b"]),
                ({"bucket_bytes": "25MiB", "sweep": True}, ["--bucket-bytes=25MiB", "--sweep"]),
                ({"sweep": 4, "text": pathlib.Path("x")}, ["--sweep=4", "--text=x"])]
        for options, words in cases:
            self.assertEqual(_arguments.option_words("check", options), words)

    def test_an_unknown_one_is_refused_with_the_likely_one(self) -> None:
        for name, near in [("micro_batch", "micro_batches"), ("tpp", "tp"), ("optimiser", "optimizer")]:
            with self.assertRaisesRegex(TypeError, rf"check\(\) got an unexpected .*'{name}'; did you mean {near}\?"):
                anyrank.check("llama-demo", **{name: 2})  # type: ignore[arg-type]

    def test_a_value_of_another_type_is_refused(self) -> None:
        wrong: list[dict[str, typing.Any]] = [{"tp": "2"}, {"tp": 2.5}, {"tp": True}, {"sp": 1}, {"lr": "x"},
                                              {"text": 3}, {"numerics": 1}, {"scale": 0.5}]
        for options in wrong:
            with self.assertRaisesRegex(TypeError, f"{next(iter(options))}=.*expected"):
                anyrank.check("llama-demo", **options)

    def test_signatures_show_them(self) -> None:
        import inspect

        self.assertIn("micro_batches", inspect.signature(anyrank.check).parameters)
        self.assertIn("tensor-parallel ranks", anyrank.check.__doc__ or "")


class Results(FolderCase):
    def test_a_check_that_finds_the_same(self) -> None:
        report = anyrank.check("llama-demo", tp=2, steps=0, batch=2, seq=8, skip_f64=True, strict_predictions=True)
        self.assertTrue(report and report.ok)
        self.assertEqual((report.result, report.runs[0].name, report.first), ("same", "tp=2", None))
        self.assertIn("check: the same bits", str(report))

    def test_a_fault_that_only_the_prediction_shows_fails(self) -> None:
        report = anyrank.check("llama-demo", tp=2, sp=True, steps=0, batch=2, seq=8, skip_f64=True,
                               inject="qkv_gathered_three_times")
        self.assertEqual((report.result, report.ok, report.exit_status), ("mispredicted", False, 1))
        self.assertEqual((report.runs[0].result, report.runs[0].ok), ("mispredicted", False))

    @needs("numpy")
    def test_a_check_that_finds_a_fault(self) -> None:
        report = anyrank.check("llama-demo", tp=2, steps=0, batch=2, seq=8, skip_f64=True,
                               inject="column_dx_not_reduced")
        first = report.first
        assert first is not None
        self.assertFalse(report)
        self.assertEqual((first.tensor, first.cause, report.exit_status), ("lm_head:bwd", "missing_all_reduce", 1))

    def wrong_plan(self) -> pathlib.Path:
        rule = {"modules": "layers.*.self_attn.o_proj", "style": "rowwise", "input": "R", "output": "P(sum)"}
        path = self.path / "plan.json"
        path.write_text(json.dumps({"rules": [rule]}), encoding="utf-8")
        return path

    def test_lint_plan_and_train(self) -> None:
        lint = anyrank.lint("llama-demo", tp=2, plan=self.wrong_plan())
        self.assertFalse(lint.ok)
        self.assertEqual((lint.first and lint.first.rule, len(lint.findings)), ("missing_reduction", 1))
        plan = anyrank.plan("llama-3-8b", gpus=8)
        assert plan.best is not None
        self.assertTrue(plan.best.fits and plan.best.seconds and plan.best.seconds > 0)
        train = anyrank.train("llama-demo", steps=2, batch=1, seq=8)
        self.assertEqual((len(train.loss), train.steps, len(train.weights_hash or "")), (2, 2, 64))

    def test_a_report_is_text_json_and_html(self) -> None:
        report = anyrank.lint("llama-demo", tp=2, plan=self.wrong_plan())
        shown = report._repr_html_()
        self.assertIn("<td>missing_reduction</td>", shown)
        self.assertNotIn("http", shown.lower())
        self.assertIn('"findings"', report.to_json(self.path / "report.json"))
        self.assertTrue((self.path / "report.json").stat().st_size)
        self.assertIn("missing_reduction", report.html(self.path / "report.html").read_text(encoding="utf-8"))
        page = anyrank.plan("llama-demo", gpus=4).html(self.path / "plan.html").read_text(encoding="utf-8")
        self.assertIn("<script>", page)

    def test_a_page_is_opened(self) -> None:
        with mock.patch("webbrowser.open") as opened:
            page = anyrank.lint("llama-demo", tp=2).open_html()
        opened.assert_called_once_with(page.as_uri())
        self.addCleanup(shutil.rmtree, page.parent)
        self.assertIn("<!doctype html>", page.read_text(encoding="utf-8"))

    def test_markup_in_names_is_text(self) -> None:
        from anyrank import _html

        self.assertIn("&lt;b&gt;", _html.table("<b>", False, ["c"], [["<b>"]], "<b>\n"))
        self.assertNotIn("<b>", _html.table("<b>", False, ["<b>"], [["<b>"]], "<b>\n"))


class Refusals(FolderCase):
    def test_wrong_input_is_said_in_the_words_of_the_command(self) -> None:
        cases: list[tuple[typing.Callable[[], object], str]] = [
            (lambda: anyrank.check("no-such-model"), "^anyrank check: model 'no-such-model': no such folder or file"),
            (lambda: anyrank.check("llama-demo", numerics="exakt"), "did you mean exact"),  # type: ignore[arg-type]
            (lambda: anyrank.grads("llama-demo", [[1, -3]], scale=8), "^anyrank grads: batch: input_ids.*\n.*note: "),
            (lambda: anyrank.check("llama-demo", tp=0), "--tp: got '0', expected an integer from 1"),
            (lambda: anyrank.verify(self.path / "a", self.path / "b"), "a: cannot open: No such file"),
            (lambda: anyrank.verify("--tp", "b"), "--tp: cannot open"),
            (lambda: anyrank.plan("llama-demo", gpus=7, tp=3), "anyrank plan: ")]
        for call, pattern in cases:
            with self.assertRaisesRegex(anyrank.AnyrankError, pattern) as caught:
                call()
            self.assertEqual(caught.exception.exit_status, 2)

    def test_tensors_are_no_dumps(self) -> None:
        for sides, name in (((None, "b"), "reference"), (("a", {"w": [1.0]}), "other")):
            with self.assertRaisesRegex(TypeError, rf"verify\(\): {name}: expected the path of a dump, .*assert_same"):
                anyrank.verify(*sides)

    def test_broken_dumps(self) -> None:
        for name in ("a", "b"):
            (self.path / f"{name}.safetensors").write_bytes(b"\xff" * 64)
        with self.assertRaisesRegex(anyrank.AnyrankError, "a.safetensors"):
            anyrank.verify(self.path / "a.safetensors", self.path / "b.safetensors")

    def run_with(self, command: str) -> Report:
        """What a program in place of the command leads to: text of a shell script."""
        program = self.path / "program"
        program.write_text(f"#!/bin/sh\n{command}\n", encoding="utf-8")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        before = os.environ.get("ANYRANK")
        os.environ["ANYRANK"] = str(program)
        try:
            return anyrank.lint("llama-demo")
        finally:
            os.environ.pop("ANYRANK")
            if before is not None:
                os.environ["ANYRANK"] = before

    RESULT = 'for a in "$@"; do case "$a" in --json=*) f="${a#--json=}";; esac; done; cat > "$f" <<E\n%s\nE\nexit 0'

    def test_other_programs_and_versions(self) -> None:
        for command, pattern in [
                ("exit 0", "exit status 0, no result and no message"),
                ("echo broken >&2; exit 3", "^broken$"),
                ("kill -9 $$", r"ended by SIGKILL \(the system does that where memory runs out\)"),
                (self.RESULT % "{}", "its JSON is not that of anyrank lint"),
                (self.RESULT.replace("exit 0", "echo late >&2; exit 3") % '{"tool": "anyrank"}', "^late$"),
                (self.RESULT % '{"tool": "anyrank", "command": "lint"', "no result")]:
            with self.assertRaisesRegex(anyrank.AnyrankError, pattern):
                self.run_with(command)

    def test_a_later_version_may_say_more_and_less(self) -> None:
        text = '{"tool": "anyrank", "command": "lint", "version": "9", "new": [1], "findings": [{"rule": "r", "n": 1}]}'
        report = self.run_with(self.RESULT % text)
        assert isinstance(report, LintReport)
        self.assertEqual((report.version, report.data["new"], report.operations), ("9", [1], 0))
        self.assertEqual((report.findings[0].rule, report.findings[0].data["n"]), ("r", 1))
        self.assertIn("<td>r</td>", report._repr_html_())

    def test_a_command_that_is_missing(self) -> None:
        done = run_python("import anyrank; anyrank.check()", ANYRANK=str(self.path / "nothing"))
        self.assertIn("nothing: No such file or directory", done.stderr)


class Progress(unittest.TestCase):
    def test_a_function_is_called(self) -> None:
        seen: list[tuple[float | None, str]] = []
        anyrank.check("llama-demo", tp=2, steps=0, batch=2, seq=8, skip_f64=True,
                      progress=lambda f, text: seen.append((f, text)))
        self.assertTrue(seen)
        self.assertTrue(all(f is None or 0 <= f <= 1 for f, _ in seen))
        self.assertTrue(all(text.startswith("llama-demo") for _, text in seen))

    def test_a_line_on_a_terminal_is_gone_at_the_end(self) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        for stream, notebook in ((Terminal(), False), (io.StringIO(), True), (io.StringIO(), False)):
            with mock.patch("anyrank._progress.FIRST_SECONDS", 0.0), mock.patch("sys.stderr", stream), \
                    mock.patch("anyrank._progress.in_notebook", lambda notebook=notebook: notebook):
                anyrank.check("llama-demo", tp=2, steps=0, batch=2, seq=8, skip_f64=True,
                              progress=True)
            shown = stream.getvalue()
            if stream.isatty() or notebook:
                self.assertRegex(shown, r"\r[ 0-9]+ %  \d+ s  llama-demo: baseline")
                self.assertTrue(shown.endswith(" \r"))
            else:
                self.assertEqual(shown, "")

    def test_an_exception_of_it_ends_the_run(self) -> None:
        def fail(fraction: float | None, text: str) -> None:
            raise LookupError(text)

        with self.assertRaises(LookupError):
            anyrank.check("llama-demo", tp=2, progress=fail)


    def test_a_descriptor_that_is_not_open_is_refused(self) -> None:
        done = subprocess.run([_command.find_command(), "lint", "llama-demo", "--progress-fd=97"], capture_output=True,
                              text=True, check=False)
        self.assertEqual((done.returncode, done.stderr),
                         (2, "anyrank lint: --progress-fd 97: this file descriptor is not open\n"))


class Interruption(FolderCase):
    def test_ctrl_c_ends_the_command(self) -> None:
        # The function is called when the command is at work; the interrupt comes as from a terminal.
        code = ("import anyrank, os, signal, sys\n"
                "def at_work(fraction, text):\n"
                "    kids = open(f'/proc/self/task/{os.getpid()}/children').read() if sys.platform == 'linux' else ''\n"
                "    print(kids, flush=True)\n"
                "    os.kill(os.getpid(), signal.SIGINT)\n"
                "try:\n"
                "    anyrank.train('llama-demo', steps=100000, batch=2, seq=8, progress=at_work)\n"
                "except KeyboardInterrupt:\n"
                "    print('interrupted')\n")
        done = run_python(code)
        self.assertEqual(done.stdout.splitlines()[-1:], ["interrupted"], done.stderr)
        for child in done.stdout.split()[:-1]:
            with self.assertRaises(ProcessLookupError):
                os.kill(int(child), 0)

    def test_train_saves_first(self) -> None:
        code = ("import anyrank, os, signal, sys\n"
                "def at_work(fraction, text):\n"
                "    if fraction and fraction > 0: os.kill(os.getpid(), signal.SIGINT)\n"
                "try:\n"
                "    anyrank.train('llama-demo', steps=100000, batch=2, seq=8, save=sys.argv[1], progress=at_work)\n"
                "except KeyboardInterrupt:\n"
                "    print('interrupted')\n")
        done = run_python(code, str(self.path / "run"))
        self.assertEqual(done.stdout, "interrupted\n", done.stderr)
        self.assertTrue(list((self.path / "run").rglob("*.safetensors")))

    @unittest.skipUnless(sys.platform == "linux", "reads /proc, which Linux has")
    def test_a_killed_caller_leaves_no_command_behind(self) -> None:
        # The command ends by SIGPIPE when it next reports how far it is.
        code = ("import anyrank, os, signal\n"
                "def at_work(fraction, text):\n"
                "    print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)\n"
                "    os.kill(os.getpid(), signal.SIGKILL)\n"
                "anyrank.train('llama-demo', steps=100000, batch=2, seq=8, progress=at_work)\n")
        children = run_python(code).stdout.split()
        self.assertTrue(children)
        for child in children:
            while self.runs(child):
                time.sleep(0.02)

    @staticmethod
    def runs(process: str) -> bool:
        """Whether it is there, and no zombie that nobody has waited for."""
        try:
            return pathlib.Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False


if __name__ == "__main__":
    unittest.main()
