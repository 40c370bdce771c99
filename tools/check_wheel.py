"""Build the wheel, install it into an empty environment outside the clone, and use it there.

`make wheel` runs this. It fails if the sdist or the wheel lacks a file of the package, if twine
objects to the metadata, or if the installed demo leaves an incomplete run or report.
"""

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHORT = {"training.pretrain_steps": 20, "training.cycles": 2, "training.cycle_steps": 5}
METHODS = ("basic", "cvp")


def run(*words: str | Path, where: Path, **variables: str) -> str:
    """Run a command that must succeed, without the clone on its path; return what it prints."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=where,
        env={**environment, **variables},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        command = " ".join(map(str, words))
        sys.exit(f"{done.stdout}{done.stderr}\ncheck_wheel: `{command}` failed")
    return done.stdout


def build(out: Path) -> Path:
    """Build the sdist and, from it, the wheel; check the metadata and the files of both."""
    run(sys.executable, "-m", "build", "--outdir", out, ROOT, where=out)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, where=out)
    with zipfile.ZipFile(wheel) as archive:
        missing("the wheel", archive.namelist())
    with tarfile.open(sdist) as archive:
        names = [name.partition("/src/")[2] for name in archive.getnames()]
        missing("the sdist", names)
    return wheel


def missing(archive: str, names: Iterable[str]) -> None:
    """Exit if the archive lacks a file of the package."""
    tracked = run("git", "ls-files", "certvol", where=ROOT / "src").splitlines()
    lacking = sorted(set(tracked) - set(names))
    if lacking:
        sys.exit(f"check_wheel: {archive} lacks {', '.join(lacking)}; see package-data")


def install(wheel: Path, place: Path) -> Path:
    """Install the wheel into a new environment; return the folder of its commands."""
    venv.create(place, with_pip=True)
    commands = place / ("Scripts" if os.name == "nt" else "bin")
    pip = (commands / "python", "-m", "pip", "--disable-pip-version-check", "--quiet")
    run(*pip, "install", "--no-compile", "-c", ROOT / "constraints.txt", wheel, where=place)
    return commands


def use(commands: Path, place: Path) -> None:
    """Run the installed demo, shortened, and check what it leaves."""
    certvol, python = commands / "certvol", commands / "python"
    where = run(python, "-c", "import certvol; print(certvol.__file__)", where=place).strip()
    if not Path(where).is_relative_to(commands.parent):
        sys.exit(f"check_wheel: the environment imports {where}, not the installed wheel")
    print(run(certvol, "--version", where=place).strip(), "from", Path(where).parent)
    assert "cvp" in run(certvol, "list", "methods", where=place)
    short = [word for name, value in SHORT.items() for word in (f"--{name}", str(value))]
    cache = {"CERTVOL_CACHE": str(place / "cache")}
    words = ("demo", "--out", "runs", "--methods", ",".join(METHODS), *short)
    print(run(certvol, *words, where=place, **cache))
    check_runs(place / "runs")


def check_runs(runs: Path) -> None:
    """Compare the reports' data with the tables that the runs left."""
    summary = json.loads((runs / "summary.json").read_text())
    assert list(summary) == list(METHODS), summary
    for method, accuracy in summary.items():
        with (runs / method / "predictions.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        metrics = json.loads((runs / method / "metrics.json").read_text())
        assert metrics["adapted"]["accuracy"] == accuracy
        assert len(rows) == 1797, len(rows)
        gallery = data_of(runs / method / "report.html")["gallery"]
        assert sorted(gallery["paths"]) == sorted(row["path"] for row in rows)
        assert gallery["pictures"], "the report has no thumbnails"
    assert data_of(runs / "report.html")["figures"]


def data_of(report: Path) -> dict[str, Any]:
    """Return a report's data block; exit if the page would load anything."""
    text = report.read_text(encoding="utf-8")
    loaded = re.findall(r"""<(?:script|link|img)[^>]+(?:src|href)=["'](?!data:|#)[^"']*""", text)
    if loaded:
        sys.exit(f"check_wheel: {report} loads {loaded[0]}")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found, f"{report} has no data"
    return dict(json.loads(found.group(1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="keep the sdist and the wheel in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="certvol-wheel-") as temporary:
        out = options.out or Path(temporary, "dist")
        out = out.resolve()
        out.mkdir(parents=True, exist_ok=True)
        for old in out.glob("certvol-*"):
            old.unlink()
        wheel = build(out)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB; twine finds nothing wrong")
        use(install(wheel, Path(temporary, "venv")), Path(temporary))
    print("check_wheel: the wheel works in an empty environment")


if __name__ == "__main__":
    main()
