"""The command line, as a user meets it: in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import clearhead as ch
from clearhead.cli import app
from clearhead.families import PAGES

pytestmark = pytest.mark.usefixtures("unchecked")  # typer hands over None where an option has a callback

ROOT = Path(__file__).resolve().parents[1]
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


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["presets"], ["presets", "--help"], ["demo", "--help"]], ids=" ".join
)
def test_what_computes_nothing_loads_no_torch(arguments: list[str]) -> None:
    """-X importtime prints every module that python loads: the measured list."""
    ran = clearhead(*arguments, python=("-X", "importtime"))
    assert ran.returncode == 0
    loaded = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines() if line.startswith("import time:")}
    assert "clearhead.cli" in loaded  # the list is there
    heavy = {"torch", "numpy", "jaxtyping", "safetensors", "tokenizers", "transformers"}
    assert not {name for name in loaded if name.partition(".")[0] in heavy}


def test_importing_clearhead_loads_no_torch() -> None:
    code = "import sys, clearhead; clearhead.preset('gpt2'); dir(clearhead); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def in_process(*arguments: str, **variables: str) -> str:
    """The same without a new process, where its start is not what is tested."""
    clean = {"FORCE_COLOR": None, "NO_COLOR": None, "COLUMNS": None}
    ran = CliRunner(env=clean | variables).invoke(app, arguments, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return ran.output


def rows(text: str) -> dict[str, list[str]]:
    """The table's lines by their first word."""
    return {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}


def test_presets_is_a_table_of_every_size() -> None:
    table = rows(assert_fine(clearhead("presets")))
    assert table["name"] == ["name", "family", "shape", "layers", "width", "heads", "parameters"]
    assert list(table)[1:] == ch.presets()
    assert table["gpt2"] == ["gpt2", "gpt2", "decoder", "12", "768", "12", "124,439,808"]
    assert table["llama-3-8b"] == ["llama-3-8b", "llama", "decoder", "32", "4096", "32/8", "8,030,261,248"]
    assert table["t5-small"] == ["t5-small", "t5", "encoder-decoder", "6+6", "512", "8", "60,506,624"]


@pytest.mark.parametrize("family", PAGES)
def test_presets_of_one_family(family: str) -> None:
    table = rows(in_process("presets", family))
    assert list(table)[1:] == list(PAGES[family].SIZES)


def test_a_table_in_a_narrow_pipe_keeps_its_width() -> None:
    assert in_process("presets", COLUMNS="20") == in_process("presets")


def test_an_unknown_family_is_one_line_and_exit_1() -> None:
    ran = clearhead("presets", "lama")
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert ran.stderr == "clearhead: there is no family 'lama'; did you mean 'llama'?\n"


def test_debug_shows_where_an_error_came_from() -> None:
    ran = clearhead("--debug", "presets", "lama")
    assert ran.returncode == 1
    assert "Traceback" in ran.stderr
    assert "ConfigError: there is no family 'lama'" in ran.stderr


@pytest.mark.parametrize(
    "arguments", [["preset"], ["--wrong"], ["presets", "llama", "gpt2"], ["demo", "--wrong"]], ids=" ".join
)
def test_wrong_usage_is_exit_2(arguments: list[str]) -> None:
    ran = clearhead(*arguments)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert "Usage: " in ran.stderr
    assert "Traceback" not in ran.stderr


def assert_demo(text: str) -> None:
    lines = rows(text)
    for family in PAGES:  # nine families, each with its first size and its parameters
        assert lines[family][1] == next(iter(PAGES[family].SIZES))
        assert re.search(r"\d{1,3}(,\d{3})+", " ".join(lines[family]))
    for title in ("gpt2: only the past", "mistral: a window of 4", "alibi: nearer is louder", "bert: both ways"):
        assert title in text
    assert sum(text.count(shade) for shade in SHADES) > 100


def test_demo_in_a_pipe_has_no_colours() -> None:
    text = assert_fine(clearhead("demo"))
    assert "\x1b" not in text
    assert_demo(text)
    assert causal_picture(text)


def causal_picture(text: str) -> bool:
    """In the first picture the first word sees itself alone, as strongly as can be."""
    first = next(line for line in text.splitlines() if line.lstrip().startswith("the ") and "█" in line)
    cells = first.split("the ", 1)[1]
    return cells.startswith("██") and not cells[2:22].strip(" ")


def test_demo_in_colour() -> None:
    text = in_process("demo", FORCE_COLOR="1", COLORTERM="truecolor", TERM="xterm-256color", COLUMNS="200")
    assert "\x1b[38;2;" in text or "\x1b[1;38;2;" in text
    assert_demo(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text))


def test_presets_without_colours() -> None:
    plain = in_process("presets", "gpt2", FORCE_COLOR="1", NO_COLOR="1")
    assert "\x1b[3" not in plain
    assert "124,439,808" in plain
