"""Build what is published: a source distribution, and one wheel for each architecture with the compiled kernels inside.

    python release/build.py --out dist [--for x86_64 aarch64]

The same commit gives the same bytes: times come from the commit, names from the versions. Every wheel is checked with auditwheel.
Two more files say what was built and from what: sbom.cdx.json (all dependencies with their licences, CycloneDX) and
provenance.json (in-toto: each file's SHA-256, the commit, the tools).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from wheel.wheelfile import WheelFile

from clearhead.kernels import native_library
from clearhead.version import __version__

ROOT = Path(__file__).resolve().parents[1]
# The oldest glibc whose Linux can use the wheels: torch's own wheels ask for the same.
PLATFORM = "manylinux_2_28"
# Processors below the first of these compile their own kernels, or run on torch's operators.
WHEELS = {"x86_64": ("x86-64-v3", "x86-64-v4", "x86-64-v4-vnni"), "aarch64": ("aarch64",)}
NOBODY = ("--owner=0", "--group=0", "--numeric-owner", "--mode=u=rwX,go=rX")
# Of packages whose metadata does not name one, read in their files.
LICENCES = {"protobuf": "BSD-3-Clause"}
CROSS = {"aarch64": "aarch64-linux-gnu-g++", "x86_64": "x86_64-linux-gnu-g++"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="folder for the files; files in it are replaced"
    )
    parser.add_argument("--for", nargs="+", choices=sorted(WHEELS), dest="machines", default=[platform.machine()])
    parser.add_argument(
        "--draft", action="store_true", help="build although the changelog or the work tree is not ready"
    )
    args = parser.parse_args()
    problems = [] if args.draft else not_ready()
    if problems:
        print(f"error: {'; '.join(problems)}; --draft builds nevertheless", file=sys.stderr)
        return 1
    os.environ["SOURCE_DATE_EPOCH"] = git("log", "-1", "--format=%ct")
    args.out.mkdir(parents=True, exist_ok=True)
    for old in args.out.glob("clearhead-*"):
        old.unlink()
    with tempfile.TemporaryDirectory() as work:
        plain = build_plain(Path(work), args.out)
        for machine in args.machines:
            wheel = add_kernels(plain, machine, args.out, Path(work))
            audit(wheel)
            print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB")
    write_sbom(args.out / "sbom.cdx.json")
    write_provenance(args.out)
    return 0


def not_ready() -> list[str]:
    problems = []
    if git("status", "--porcelain"):
        problems.append("the work tree has changes that are not committed")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    if not re.search(rf"^## {re.escape(__version__)} - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        problems.append(
            f"CHANGELOG.md has no section '## {__version__} - YYYY-MM-DD' (clearhead/version.py names {__version__})"
        )
    return problems


def build_plain(work: Path, out: Path) -> Path:
    """The source distribution, into `out`, and from it the wheel without kernels, into `work`."""
    # From a copy of what is committed: leftovers in the work tree must not get into the files.
    source = work / "source"
    source.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(source)], input=archive, check=True)
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(work / "built"), str(source)])
    (sdist,) = (work / "built").glob("*.tar.gz")
    normalise_sdist(sdist, out / sdist.name)
    (plain,) = (work / "built").glob("*.whl")
    return plain


def normalise_sdist(built: Path, path: Path) -> None:
    """The same archive with the commit's time, sorted, and without names of users: setuptools writes those of now."""
    with tempfile.TemporaryDirectory() as work:
        run(["tar", "-xzf", str(built), "-C", work])
        (folder,) = Path(work).iterdir()
        made = subprocess.run(
            ["tar", "--sort=name", f"--mtime=@{os.environ['SOURCE_DATE_EPOCH']}", *NOBODY, "-cf", "-", folder.name],
            cwd=work,
            capture_output=True,
            check=True,
        ).stdout
    path.write_bytes(subprocess.run(["gzip", "-9n"], input=made, capture_output=True, check=True).stdout)


def add_kernels(plain: Path, machine: str, out: Path, work: Path) -> Path:
    """The wheel with the kernels of one architecture inside."""
    content = work / machine
    with WheelFile(plain) as wheel:
        wheel.extractall(content)
    compiler = native_library.find_compiler() if machine == platform.machine() else shutil.which(CROSS[machine])
    if compiler is None:
        raise SystemExit(f"error: no {CROSS[machine]} found; on Debian or Ubuntu: apt install g++-aarch64-linux-gnu")
    folder = content / "clearhead" / "kernels" / "prebuilt"
    folder.mkdir()
    check = work / f"check-{machine}"
    run([compiler, "-O1", "-fopenmp", str(ROOT / "release" / "check_kernels.cpp"), "-o", str(check), "-ldl"])
    for level in WHEELS[machine]:
        library = folder / native_library.name_inside(level)
        native_library.compile_to(library, level, compiler)
        try_kernels(check, library, machine, level)
    tag = f"py3-none-{PLATFORM}_{machine}"
    (facts,) = content.glob("*.dist-info/WHEEL")
    lines = facts.read_text().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
    facts.write_text(re.sub(r"^Tag: .*$", f"Tag: {tag}", lines, flags=re.MULTILINE))
    path = out / f"clearhead-{__version__}-{tag}.whl"
    (content / facts.parent.name / "RECORD").unlink()
    for file in content.rglob("*"):
        file.chmod(0o755 if file.is_dir() or file.suffix == ".so" else 0o644)
    with WheelFile(path, "w") as wheel:
        wheel.write_files(content)
    return path


def try_kernels(check: Path, library: Path, machine: str, level: str) -> None:
    """Compare the kernels with plain sums, under an emulator where they are for another processor."""
    if machine == platform.machine():
        if not native_library.LEVELS[level][1] <= native_library.processor_words():
            print(f"{level}: compiled, not run: this processor is below it")
            return
        run([str(check), str(library)])
    else:
        emulator = shutil.which(f"qemu-{machine}")
        if emulator is None:
            raise SystemExit(
                f"error: no qemu-{machine} found to try the kernels with; on Debian or Ubuntu: apt install qemu-user"
            )
        run([emulator, "-L", f"/usr/{machine}-linux-gnu", str(check), str(library)])
    print(f"{level}: {library.stat().st_size / 1e3:.0f} kB, compared with plain sums")


def audit(wheel: Path) -> None:
    """That the kernels use nothing newer than the tag promises."""
    said = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", str(wheel)], capture_output=True, text=True, check=False
    )
    if said.returncode or PLATFORM not in said.stdout.replace("\n", " "):
        raise SystemExit(f"error: {wheel.name} is not {PLATFORM}: {(said.stdout + said.stderr).strip()}")


def write_sbom(path: Path) -> None:
    """All packages that this environment holds, with versions and licences."""
    run([sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--of", "JSON", "-o", str(path)])
    content = json.loads(path.read_text())
    for part in content["components"]:
        if part["name"] == "clearhead":
            part.pop("externalReferences", None)  # the folder it was built in
        if not part.get("licenses") and part["name"] in LICENCES:
            part["licenses"] = [{"license": {"id": LICENCES[part["name"]]}}]
    if unknown := [part["name"] for part in content["components"] if not part.get("licenses")]:
        raise SystemExit(f"error: no licence is known of {', '.join(unknown)}; look it up and add it to LICENCES")
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_provenance(out: Path) -> None:
    files = sorted(path for path in out.iterdir() if path.name.startswith(("clearhead-", "sbom")))
    compiler = native_library.find_compiler()
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": path.name, "digest": {"sha256": sha256(path)}} for path in files],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "make release",
                "externalParameters": {"version": __version__},
                "resolvedDependencies": [
                    {"name": "commit", "digest": {"gitCommit": git("rev-parse", "HEAD")}},
                    {"name": "constraints.txt", "digest": {"sha256": sha256(ROOT / "constraints.txt")}},
                ],
            },
            "runDetails": {
                "builder": {"id": os.environ.get("GITHUB_WORKFLOW_REF", "a developer's computer")},
                "metadata": {
                    "python": platform.python_version(),
                    "compiler": subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout.split(
                        "\n"
                    )[0],
                },
            },
        },
    }
    (out / "provenance.json").write_text(json.dumps(statement, indent=2) + "\n")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} failed: {(done.stdout + done.stderr).strip()[-2000:]}")


if __name__ == "__main__":
    raise SystemExit(main())
