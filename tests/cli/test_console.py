"""The console: stdout and stderr, fault 29 (hostile names) and fault 40 (stdout closed early)."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interrupting import lose

from ciuic_cli.cli import console as console_module
from ciuic_cli.cli.console import Console, to_json
from ciuic_cli.cli.exit_codes import run
from ciuic_cli.cli.progress import Lines
from ciuic_cli.errors import MAX_NAME, EnvironmentFault, InputError, TargetError, UsageError, printable
from ciuic_cli.report.readable import readable_bytes


class Panic(BaseException):
    """Like the exception that Rust libraries raise for a panic."""


ROOT = Path(console_module.__file__).parents[1]


def pair(**options: bool) -> tuple[Console, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return Console(stdout=out, stderr=err, **options), out, err


def python(code: str, *, shell_tail: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process with its stdout piped to `shell_tail`; the last line is its exit status."""
    script = textwrap.dedent(code)
    command = f'"{sys.executable}" -c "$CODE" {shell_tail or ">/dev/null"}; echo "${{PIPESTATUS[0]}}"'
    env = {**os.environ, "CODE": script, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env, timeout=60)


def test_a_table_in_a_pipe_is_not_folded() -> None:
    out = io.StringIO()
    names = ["a" * 150, "b" * 150]
    Console(stdout=out).table("tensors", ["name", "other"], [names])
    assert any(all(name in line for name in names) for line in out.getvalue().splitlines())


@pytest.mark.parametrize(("width", "left_out"), [(31, []), (30, ["bits"]), (20, ["bits", "shape"])])
def test_a_narrow_terminal_gets_fewer_columns(
    monkeypatch: pytest.MonkeyPatch, width: int, left_out: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    sink, out, err = pair()
    columns = ["name", "bits", "shape", "bytes"]
    sink.table("t", columns, [["model.w1", 4.5, "64x64", 2048]], optional=["bits", "shape", "name"])
    lines = out.getvalue().splitlines()
    assert lines[1].replace("┃", " ").split() == [name for name in columns if name not in left_out]
    assert len(lines) == 4 and "model.w1" in lines[3] and all(len(line) <= width for line in lines)
    named = err.getvalue()
    assert all(name in named for name in left_out) and bool(named) == bool(left_out)


def test_data_to_stdout_hints_to_stderr() -> None:
    sink, out, err = pair()
    sink.data("perplexity 18.67")
    sink.hint("reading")
    sink.warning("odd")
    sink.json({"ignored": 1})
    assert out.getvalue() == "perplexity 18.67\n"
    assert err.getvalue() == "reading\nwarning: odd\n"


def test_json_mode_prints_one_object_and_nothing_else() -> None:
    sink, out, err = pair(json_mode=True)
    sink.data("text")
    sink.table("t", ["a"], [[1]])
    sink.hint("still here")
    sink.json({"kl": float("nan"), "rows": (1, float("inf")), "name": "\x1b[31m", "path": Path("a")})
    assert json.loads(out.getvalue()) == {"kl": None, "rows": [1, None], "name": "\x1b[31m", "path": "a"}
    assert "\x1b" not in out.getvalue() and err.getvalue() == "still here\n"


def test_quiet_keeps_warnings_and_errors() -> None:
    sink, out, err = pair(quiet=True)
    sink.hint("no")
    with sink.progress() as progress:
        progress("step", 1, 2)
    sink.warning("yes")
    assert err.getvalue() == "warning: yes\n" and out.getvalue() == ""


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("model.layers.0.mlp.weight", "model.layers.0.mlp.weight"),
        ("\x1b[2J\x1b]0;pwned\x07", "\\x1b[2J\\x1b]0;pwned\\x07"),
        ("a\r\nb\tc", "a\\r\\nb\\tc"),
        ("\u202egpj.exe", "\\u202egpj.exe"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("\x9b31m", "\\x9b31m"),
        ("\ud800", "\\ud800"),
        ("[bold red]x[/]", "[bold red]x[/]"),
        ("größe 模型", "größe 模型"),
        ("C:\\path", "C:\\path"),
    ],
)
def test_29_hostile_names_are_harmless(name: str, shown: str) -> None:
    assert printable(name) == shown
    sink, out, err = pair()
    sink.table("t", ["name"], [[name]])
    sink.data(name.replace("\n", ""))
    sink.error(InputError("m", tensor=name, file=name))
    for text in (out.getvalue(), err.getvalue(), str(InputError("m", tensor=name, file=name))):
        assert "\x1b" not in text and "\x9b" not in text and "\u202e" not in text
    assert shown.split("\\")[0][:8] in err.getvalue()


def test_29_a_name_of_a_megabyte_is_cut_in_the_middle() -> None:
    name = "begin" + "\x1b[31m" * 200_000 + "end"
    shown = printable(name)
    assert shown.startswith("begin") and shown.endswith("end") and len(shown) < 1000
    assert f"{len(name) - MAX_NAME} more characters" in shown
    sink, _, err = pair()
    sink.error(InputError("bad", tensor=name))
    assert len(err.getvalue()) < 4000


@given(st.text())
def test_29_nothing_invisible_survives(text: str) -> None:
    shown = printable(text)
    assert all(character.isprintable() or character.isspace() for character in shown)
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in shown)


def test_markup_is_not_interpreted_in_tables() -> None:
    sink, out, _ = pair()
    sink.table(
        "[link=http://x]title[/link]", ["[b]name[/b]", "bytes"], [["[red]w[/red]", 12345678], ["v", None]]
    )
    assert "[link=http://x]title[/link]" in out.getvalue() and "[red]w[/red]" in out.getvalue()
    assert "12,345,678" in out.getvalue()


def test_error_shows_message_file_tensor_and_remedy() -> None:
    sink, out, err = pair()
    sink.error(InputError("truncated", file="m.safetensors", tensor="w", remedy="download it again"))
    assert (
        err.getvalue() == "error: truncated\n  file: m.safetensors\n  tensor: w\n  try: download it again\n"
    )
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("u"), 2),
        (InputError("i"), 3),
        (TargetError("t"), 4),
        (EnvironmentFault("e"), 5),
        (KeyboardInterrupt(), 130),
        (MemoryError(), 5),
        (OSError(28, "No space left on device", "/x/out"), 5),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), 5),
        (Panic("ThreadPoolBuildError { kind: IOError(Os { code: 11 }) }"), 5),
        (Panic("index out of bounds"), 1),
        (RuntimeError("oops"), 1),
    ],
)
def test_exit_codes(error: BaseException, code: int) -> None:
    sink, _, err = pair()

    def fail() -> None:
        raise error

    assert run(sink, fail) == code
    assert ("Traceback" in err.getvalue()) == (code == 1)
    if isinstance(error, OSError):
        assert "No space left on device" in err.getvalue() and "/x/out" in err.getvalue()
    assert run(sink, lambda: None) == 0


def test_40_stdout_closed_early_is_no_error() -> None:
    done = python(
        """
        import sys
        from ciuic_cli.cli.console import Console
        from ciuic_cli.cli.exit_codes import run
        sink = Console()
        def action():
            for line in range(100000):
                sink.data("x" * 100)
        sys.exit(run(sink, action))
        """,
        shell_tail="| head -n 2",
    )
    assert done.stdout.splitlines()[-1] == "0" and done.stdout.count("x" * 100) == 2
    assert "closed early" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_a_full_disk_behind_stdout_is_exit_code_5() -> None:
    done = python(
        """
        import sys
        from ciuic_cli.cli.console import Console
        from ciuic_cli.cli.exit_codes import run
        sink = Console(json_mode=True)
        sys.exit(run(sink, lambda: sink.json({"a": 1})))
        """,
        shell_tail="> /dev/full",
    )
    assert (
        done.stdout.strip() == "5"
        and "No space left" in done.stderr
        and "Exception ignored" not in done.stderr
    )


def test_a_closed_stdout_and_a_terminal_without_utf8() -> None:
    code = """
        import sys
        from ciuic_cli.cli.console import Console
        from ciuic_cli.cli.exit_codes import run
        sink = Console()
        sys.exit(run(sink, lambda: (sink.data("größe"), sink.table("模型", ["名"], [["é"]]), sink.hint("é"))))
        """
    assert python(code, shell_tail=">&-").stdout.strip() == "0"
    done = python(code, shell_tail="| cat", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.stdout.splitlines()[-1] == "0" and "gr\\xf6\\xdfe" in done.stdout


def test_progress_lines_where_stderr_is_no_terminal() -> None:
    sink, out, err = pair()
    with sink.progress() as progress:
        for done in range(101):
            progress("encode", done, 100)
        progress("write", 0, 0)
    assert err.getvalue() == "encode: 0 %\nencode: 100 %\nwrite: 100 %\n" and out.getvalue() == ""


def test_progress_lines_follow_the_clock() -> None:
    now = [0.0]
    stream = io.StringIO()
    lines = Lines(console_module._rich(stream, None), clock=lambda: now[0])
    for done in range(10):
        now[0] = 4.0 * done
        lines("encode", done, 10)
    assert stream.getvalue().splitlines() == ["encode: 0 %", "encode: 40 %", "encode: 80 %"]


def test_progress_bars_on_a_terminal_reach_the_end() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    sink = Console(stdout=io.StringIO(), stderr=stream)
    with sink.progress() as progress:
        progress("[red]encode", 0, 4)
        progress("[red]encode", 4, 4)
    assert "[red]encode" in stream.getvalue() and "100 %" in stream.getvalue()
    assert "[progress" not in stream.getvalue()


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_swallowed_interrupt_ends_the_work(quiet: bool, steps: int) -> None:
    sink, _, err = pair(quiet=quiet)
    done: list[int] = []

    def action() -> None:
        with sink.progress() as progress:
            lose(signal.SIGINT)
            for step in range(steps):
                progress("encode", step, steps)
                done.append(step)

    assert run(sink, action) == 130 and done == []
    assert ("interrupted" in err.getvalue()) is not quiet


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (17_487_240, "17.5 MB"),
        (1.342e12, "1.34 TB"),
        (5e15, "5e+03 TB"),
    ],
)
def test_readable_bytes(count: float, text: str) -> None:
    assert readable_bytes(count) == text


def test_to_json_is_ascii() -> None:
    assert to_json({"é": "\u202e"}).isascii()
