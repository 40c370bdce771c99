"""Measure the peak memory of a run on a CPU, for small and large targets.

    python benchmarks/memory.py [--images 100000]

Prints the peaks of anonymous and of resident memory. Resident memory includes decoded images in the
page cache, which the system takes back when it needs the room.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from certvol.cli._console import print_table
from certvol.data.digits import write_digits

SETTINGS = (
    "--preset quick --data.image_size 32 --training.pretrain_steps 20 "
    "--training.cycles 2 --training.cycle_steps 10 "
    "--training.labelling full --device cpu"
).split()


def peak_megabytes(command: list[str], environment: dict[str, str]) -> tuple[float, float, float]:
    """Run a command; return peak anonymous and resident memory, and its seconds."""
    started = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    anonymous = resident = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        found = {
            line.split(":")[0]: line.split()[1]
            for line in status.splitlines()
            if line.startswith(("RssAnon", "VmHWM"))
        }
        anonymous = max(anonymous, int(found.get("RssAnon", 0)))
        resident = max(resident, int(found.get("VmHWM", 0)))
        time.sleep(0.05)
    if process.wait() != 0:
        sys.exit(f"{command} failed")
    return anonymous / 1024, resident / 1024, time.monotonic() - started


def many(source: Path, out: Path, count: int) -> Path:
    """Make `count` hard links to the images of `source`, so that the disk holds them once."""
    files = sorted(source.rglob("*.png"))
    for number in range(count):
        folder = out / f"{number // 1000:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        os.link(files[number % len(files)], folder / f"{number}.png")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=100_000)
    images = parser.parse_args().images
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        environment = {**os.environ, "CERTVOL_CACHE": str(root / "cache")}
        source, target = write_digits(root / "data")
        rows = []
        for name, place in (
            ("1,797 target images", target),
            (f"{images:,} target images", many(target, root / "many", images)),
        ):
            command = [sys.executable, "-m", "certvol", "adapt", *SETTINGS, "--source", str(source)]
            command += ["--target", str(place), "--out", str(root / f"run-{len(rows)}")]
            figures = peak_megabytes(command, environment)
            rows.append([name, *(f"{figure:.0f}" for figure in figures)])
        print_table(
            "peak memory of `certvol adapt`, CPU", ["", "own MB", "resident MB", "seconds"], rows
        )


if __name__ == "__main__":
    main()
