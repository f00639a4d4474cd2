"""What every test shares.

Shapes. Before anything imports clearhead, jaxtyping's import hook wraps each of its functions, so that every shape
annotation is checked on every call of the test run. A test that passes what the annotations forbid, to read the error a
user gets, asks for the `unchecked` fixture: the hook is not there for users.

Compiling. torch.compile can't trace through the hook's wrappers. Tests of compiled code therefore live in
`tests/compiled/cases_*.py`, which pytest does not collect by itself; `tests/compiled/test_compiled.py` runs each of these
files as a test of its own, in a fresh process with CLEARHEAD_SHAPES=unchecked, which leaves the hook out. To run one by hand:

    CLEARHEAD_SHAPES=unchecked python -m pytest tests/compiled/cases_attend.py

The flex kernel compiles by itself, so a checked test that runs it asks for `uncompiled_flex`.

Slow tests carry `@pytest.mark.slow`; `make test-fast` leaves them out.

Network. A test that reaches for another machine fails (test_network.py): only this one, by its loopback addresses, may be reached.

Tools. Tests that need Chromium, node or a C++ compiler are skipped without them, and the last line says so (tools.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import jaxtyping
import pytest
import torch
from hypothesis import register_random, settings
from torch.nn.attention import flex_attention

from tests import network, tools

# Without a GPU, Triton's kernels run in its interpreter. It is chosen when triton is imported, which any library may do first.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if os.environ.get("CLEARHEAD_SHAPES") != "unchecked":
    jaxtyping.install_import_hook("clearhead", "beartype.beartype")

torch.set_num_threads(1)  # several test processes run side by side and already fill the cores

# The same examples in every run: a red build can be run again. No deadline: another process may hold the core.
settings.register_profile("clearhead", derandomize=True, deadline=None, database=None)
settings.load_profile("clearhead")


class TorchRandom:
    """torch's random numbers as hypothesis wants to be given them: seeded alike before each example, put back after."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


torch_random = TorchRandom()
register_random(torch_random)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A browser and torch.compile are slow in every test."""
    for item in items:
        if item.path.parent.name in ("browser", "compiled"):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if reason := tools.what_is_missing(item):
        pytest.skip(reason)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One loud line when tests were skipped for want of a tool."""
    skipped = tools.count_skips(terminalreporter.stats.get("skipped", []))
    if not skipped:
        return
    why = ", ".join(f"{count} without {tool}" for tool, count in skipped.items())
    verdict = "; here that is a failure" if tools.all_tools_needed() else ""
    line = f"{skipped.total()} TESTS SKIPPED FOR WANT OF A TOOL ({why}){verdict}; this brings it: make tools"
    terminalreporter.write_sep("!", line, red=True, bold=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = tools.count_skips(reporter.stats.get("skipped", [])) if reporter is not None else None
    if skipped and tools.all_tools_needed() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


sys.addaudithook(network.forbid)


@pytest.fixture(autouse=True)
def only_this_machine() -> Iterator[None]:
    yield
    found, network.reached[:] = list(network.reached), []
    assert not found, found


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Without the annotations' checks, as a user runs it."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def uncompiled_flex() -> Iterator[None]:
    """The flex kernel run step by step, with clearhead's own masks and biases; tests/compiled runs it compiled."""

    from clearhead.kernels import attention

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        patch.setattr(attention, "_compiled_flex", lambda: attention.flex_attention)
        yield
