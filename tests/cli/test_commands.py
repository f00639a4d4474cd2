"""The command line, as a user runs it: in a process of its own."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import clearhead as ch
from clearhead.cli import app, examples
from clearhead.cli.command_list import SUMMARIES, load_command
from clearhead.families import FAMILIES

try:
    import tomllib
except ImportError:
    import tomli as tomllib

pytestmark = pytest.mark.usefixtures("unchecked")  # typer passes None to an option with a callback

ROOT = Path(__file__).resolve().parents[2]
SHADES = "░▒▓█"


def clearhead(*arguments: str, python: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR", "COLUMNS")}
    return subprocess.run(
        [sys.executable, *python, "-m", "clearhead", *arguments],
        cwd=ROOT,
        env=kept | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "TERM": "xterm-256color"} | variables,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )


def assert_fine(ran: subprocess.CompletedProcess[str]) -> str:
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    return ran.stdout


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_the_commands(flag: str) -> None:
    text = assert_fine(clearhead(flag))
    assert "The Transformer as one library" in text
    for word in ("presets", "demo", "--version", "--debug"):
        assert word in text


def test_no_command_shows_the_help() -> None:
    ran = clearhead()
    assert ran.returncode == 2
    assert "presets" in ran.stdout + ran.stderr


def test_version() -> None:
    assert assert_fine(clearhead("--version")) == f"clearhead {ch.__version__}\n"


def test_the_installed_command_is_the_module() -> None:
    script = Path(sys.executable).parent / "clearhead"
    ran = subprocess.run([script, "--version"], capture_output=True, text=True, check=False)
    assert ran.stdout == f"clearhead {ch.__version__}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["presets"], ["presets", "--help"], ["demo", "--help"]], ids=" ".join
)
def test_commands_that_compute_nothing_do_not_import_torch(arguments: list[str]) -> None:
    """-X importtime prints every module that python imports."""
    ran = clearhead(*arguments, python=("-X", "importtime"))
    assert ran.returncode == 0
    loaded = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines() if line.startswith("import time:")}
    assert "clearhead.cli" in loaded  # the list is not empty
    heavy = {"torch", "numpy", "jaxtyping", "safetensors", "tokenizers", "transformers"}
    assert not {name for name in loaded if name.partition(".")[0] in heavy}


def test_importing_clearhead_does_not_import_torch() -> None:
    code = "import sys, clearhead; clearhead.preset('gpt2'); dir(clearhead); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def in_process(*arguments: str, **variables: str) -> str:
    """The same without a new process, for tests that do not need one."""
    clean = {"FORCE_COLOR": None, "NO_COLOR": None, "COLUMNS": None}
    ran = CliRunner(env=clean | variables).invoke(app, arguments, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return ran.output


def rows(text: str) -> dict[str, list[str]]:
    """The table's rows by their first word."""
    return {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}


def test_presets_is_a_table_of_every_size() -> None:
    table = rows(assert_fine(clearhead("presets")))
    assert table["name"] == ["name", "family", "shape", "layers", "width", "heads", "parameters"]
    assert list(table)[1:] == ch.presets()
    assert table["gpt2"] == ["gpt2", "gpt2", "decoder", "12", "768", "12", "124,439,808"]
    assert table["llama-3-8b"] == ["llama-3-8b", "llama", "decoder", "32", "4096", "32/8", "8,030,261,248"]
    assert table["t5-small"] == ["t5-small", "t5", "encoder-decoder", "6+6", "512", "8", "60,506,624"]


@pytest.mark.parametrize("family", FAMILIES)
def test_presets_of_one_family(family: str) -> None:
    table = rows(in_process("presets", family))
    assert list(table)[1:] == list(FAMILIES[family].SIZES)


def test_presets_as_json() -> None:
    sizes = json.loads(in_process("presets", "llama", "--json"))
    assert {row["family"] for row in sizes} == {"llama"}
    (small,) = (row for row in sizes if row["name"] == "llama-7b")
    assert (small["d_model"], small["parameters"]) == (4096, 6_738_415_616)


def test_a_table_in_a_narrow_pipe_keeps_its_width() -> None:
    assert in_process("presets", COLUMNS="20") == in_process("presets")


def test_an_unknown_family_is_one_line_and_exit_1() -> None:
    ran = clearhead("presets", "lama")
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert ran.stderr == "clearhead: there is no family 'lama'; did you mean 'llama'?\n"


def test_debug_shows_the_traceback() -> None:
    ran = clearhead("--debug", "presets", "lama")
    assert ran.returncode == 1
    assert "Traceback" in ran.stderr
    assert "ConfigError: there is no family 'lama'" in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["preset"], ["--wrong"], ["presets", "llama", "gpt2"], ["demo", "--wrong"]], ids=" ".join
)
def test_wrong_usage_is_exit_2(arguments: list[str]) -> None:
    ran = clearhead(*arguments)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert "Usage: " in ran.stderr
    assert "Traceback" not in ran.stderr


QUICK = ("train.steps=3", "train.evaluate_every=3", "train.score_rows=0", "train.tensorboard=false")


def demo(name: str, out: Path, *settings: str) -> str:
    """A demo of three training steps: all of its output."""
    changes = [word for setting in (*QUICK, *settings) for word in ("--set", setting)]
    return assert_fine(clearhead("demo", name, "--out", str(out), *changes))


EXAMPLE_LINES = [line for lines in examples.EXAMPLES.values() for line in lines]


def test_every_command_has_examples() -> None:
    assert set(examples.EXAMPLES) == set(SUMMARIES)
    for name, lines in examples.EXAMPLES.items():
        shown = CliRunner().invoke(app, [name, "--help"]).output
        assert "Examples:" in shown
        assert all(line in shown for line in lines), shown


def test_every_extra_in_a_message_can_be_installed() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        declared = set(tomllib.load(file)["project"]["optional-dependencies"])
    named = {
        (path.name, extra)
        for path in (ROOT / "clearhead").rglob("*.py")
        for extra in re.findall(r"install '?clearhead\[(\w+)\]", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert not {(name, extra) for name, extra in named if extra not in declared}


def test_the_list_of_commands_is_that_of_the_files() -> None:
    """The list is written down so that --help imports no command; each summary is the first line of the command's own help."""
    files = (
        path.stem for path in (ROOT / "clearhead" / "cli").glob("*.py") if path.stem not in ("__init__", "__main__")
    )
    modules = (importlib.import_module(f"clearhead.cli.{name}") for name in files)
    commands = {
        module.__name__.rpartition(".")[2] for module in modules if hasattr(module, "run") or hasattr(module, "show")
    }
    assert commands == set(SUMMARIES)
    for name, summary in SUMMARIES.items():
        assert load_command(name).help.splitlines()[0] == summary


def test_help_imports_no_command() -> None:
    program = "import sys, clearhead.cli\nsys.argv = ['clearhead', '--help']\ntry:\n    clearhead.cli.main()\n"
    program += "finally:\n    print(*(name for name in sys.modules if name.startswith('clearhead.')), file=sys.stderr)"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.removeprefix("clearhead.") for name in ran.stderr.split()}
    expected = {"cli", "cli.command_list", "cli.examples", "cli.option_names", "errors", "version", "viewers"}
    assert loaded == expected, loaded ^ expected


@pytest.mark.parametrize("line", EXAMPLE_LINES)
def test_the_examples_are_right_usage(line: str) -> None:
    """Each is parsed with its options and values; nothing runs."""
    program, name, *words = shlex.split(line)
    assert program == "clearhead"
    load_command(name).make_context(name, words)


@pytest.mark.slow
def test_demo_reads_dates(tmp_path: Path) -> None:
    text = demo("dates", tmp_path / "run")
    assert "\x1b" not in text
    assert "128,000 to learn from, 2,000 held out" in text
    assert re.search(r"result, on held-out data: loss \d", text)
    assert re.search(r"le 7 mars 1989 +-> ", text)
    picture = text.split("Where it looked")[1]
    assert sum(picture.count(shade) for shade in SHADES) > 10
    assert str(tmp_path / "run" / "report.html") in text.replace("\n", "")
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.slow
def test_demo_reads_digits(tmp_path: Path) -> None:
    text = demo("digits", tmp_path / "run")
    assert "1,442 to learn from, 355 held out" in text
    assert "10: 0, 1, 2, 3, 4, 5, 6, 7" in text


@pytest.mark.slow
def test_demo_writes_code(tmp_path: Path) -> None:
    text = demo(
        "code", tmp_path / "run", "model.n_layers=1", "model.d_model=24", "train.evaluate_rows=2", "data.vocab_size=300"
    )
    assert "def read(self, path):" in text


def test_presets_without_colours() -> None:
    plain = in_process("presets", "gpt2", FORCE_COLOR="1", NO_COLOR="1")
    assert "\x1b[3" not in plain
    assert "124,439,808" in plain
