"""Where the compiled kernels come from: compiled once, whole, by nobody else, and the same bytes each time."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead.kernels import native, native_library

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not native.is_there(), reason=str(native.why_not()))]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the compiled library of a small source that compiles at once."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "cpp").mkdir()
    (folder / "cpp" / "one.h").write_text("inline int one() { return 1; }\n")
    (folder / "native.cpp").write_text('#include "cpp/one.h"\nextern "C" int two() { return one() + one(); }\n')
    return folder


@pytest.fixture
def cache(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(native_library, "SOURCE", compiled / "native.cpp")
    monkeypatch.setattr(native_library, "HEADERS", compiled / "cpp")
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def n_compiled(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    calls: list[Path] = []
    compile_to = native_library.compile_to

    def counted(path: Path, level: str, compiler: str) -> None:
        calls.append(path)
        compile_to(path, level, compiler)

    monkeypatch.setattr(native_library, "compile_to", counted)
    return calls


def test_compiled_once_and_said(cache: Path, n_compiled: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    first = native_library.locate()
    assert native_library.locate() == first
    assert len(n_compiled) == 1
    assert [record.message for record in caplog.records if "compiling the CPU kernels" in record.message] == [
        f"compiling the CPU kernels for this processor ({native_library.choose_level()}), once: about 15 seconds"
    ]
    assert list(cache.iterdir()) == [first], "one file, and no folder left behind"


def test_a_changed_header_is_compiled_anew(cache: Path, compiled: Path, n_compiled: list[Path]) -> None:
    before = native_library.locate()
    header = compiled / "cpp" / "one.h"
    header.write_text(header.read_text() + "// changed\n")
    assert native_library.locate() != before
    assert len(n_compiled) == 2


@pytest.mark.parametrize("harm", ["cut", "flip", "empty"])
def test_a_damaged_file_is_compiled_anew(harm: str, cache: Path, n_compiled: list[Path]) -> None:
    """A library that is cut short would end the process when a page of it is read."""
    path = native_library.locate()
    whole = path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(
        {
            "cut": whole[:middle],
            "flip": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "empty": b"",
        }[harm]
    )
    assert native_library.locate() == path
    assert path.read_bytes() == whole, "the same sources give the same bytes"
    assert len(n_compiled) == 2


def test_a_planted_library_is_not_loaded(cache: Path, n_compiled: list[Path]) -> None:
    """A file that others may write to, or in a folder that others may write to, may be anyone's."""
    path = native_library.locate()
    path.chmod(0o757)
    assert native_library.locate() == path
    assert len(n_compiled) == 2
    assert not path.stat().st_mode & 0o002
    for mode in (0o777, 0o775):
        cache.chmod(mode)
        with pytest.raises(RuntimeError, match=r"others may write to it.*set CLEARHEAD_CACHE to a folder of your own"):
            native_library.locate()


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o700), (0o022, 0o755), (0o002, 0o755)])
def test_the_umask_holds(cache: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        path = native_library.locate()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert stat.S_IMODE(cache.stat().st_mode) & umask == 0


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give files away")
def test_another_users_library_is_not_loaded(cache: Path, n_compiled: list[Path]) -> None:
    os.chown(native_library.locate(), 12345, 12345)
    native_library.locate()
    assert len(n_compiled) == 2
    os.chown(cache, 12345, 12345)
    with pytest.raises(RuntimeError, match="belongs to another user"):
        native_library.locate()


def test_a_wheel_brings_its_own(
    cache: Path, n_compiled: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a compiler nor the cache folder is needed; kernels of other sources are not taken."""
    path = native_library.locate()
    inside = tmp_path / "prebuilt"
    inside.mkdir()
    monkeypatch.setattr(native_library, "PREBUILT", inside)
    monkeypatch.setenv("CXX", "/nowhere")
    monkeypatch.setenv("PATH", "")
    shutil.move(path, inside / f"{path.stem.rpartition('-')[0]}.so")
    assert native_library.locate().parent == inside
    monkeypatch.setattr(native_library, "FLAGS", (*native_library.FLAGS, "-DOTHER"))
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler was found"):
        native_library.locate()


def test_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.delenv("CLEARHEAD_NATIVE", raising=False)
    for level, (_, words) in native_library.LEVELS.items():
        if level.startswith("x86"):
            monkeypatch.setattr(native_library, "processor_words", lambda words=words: words | {"sse2"})
            assert native_library.choose_level() == level
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert native_library.choose_level() == "aarch64"
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(RuntimeError, match="this is riscv64"):
        native_library.choose_level()


def test_a_level_above_the_processor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first instruction would end the process."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(native_library, "processor_words", lambda: native_library.LEVELS["x86-64-v3"][1])
    monkeypatch.setenv("CLEARHEAD_NATIVE", "x86-64-v3")
    assert native_library.choose_level() == "x86-64-v3"
    monkeypatch.setenv("CLEARHEAD_NATIVE", "x86-64-v4")
    with pytest.raises(
        RuntimeError, match=r"CLEARHEAD_NATIVE=x86-64-v4: this processor has no avx512bw, .*; leave it out"
    ):
        native_library.choose_level()


def test_none_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler found there would link another OpenMP than torch's."""
    monkeypatch.setattr(native_library.sys, "platform", "win32")
    with pytest.raises(RuntimeError, match="not built on Windows"):
        native_library.choose_level()


def test_two_processes_compile_at_once(tmp_path: Path) -> None:
    env = {**os.environ, "CLEARHEAD_CACHE": str(tmp_path / "deep" / "cache")}
    command = [sys.executable, "-c", "from clearhead.kernels import native; assert native.is_there(), native.why_not()"]
    running = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE) for _ in range(2)]
    assert [process.wait() for process in running] == [0, 0]
    for process in running:
        process.communicate()
    assert len(list((tmp_path / "deep" / "cache").iterdir())) == 1, "one file, and no folder left behind"
