"""No code path unpickles, evaluates text or hands text to a shell.

Ruff's rules in `pyproject.toml` ban the functions; this checks that the bans work and that nobody
switches them off.
"""

import subprocess
import sys
from pathlib import Path

import pytest

import certvol

SOURCE = Path(certvol.__file__).parent
# The one file that reads weights of others, and those that talk to the network.
EXEMPT = {"nn/weights.py", "nn/backbones.py", "benchmark/ray_pool.py"}


def test_no_file_switches_the_bans_off() -> None:
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).as_posix() not in EXEMPT:
            assert "noqa: S" not in path.read_text(), path
            assert "noqa: TID" not in path.read_text(), path


def test_weights_are_loaded_without_unpickling() -> None:
    texts = [path.read_text() for path in SOURCE.rglob("*.py")]
    loads = [line for text in texts for line in text.splitlines() if "torch.load(" in line]
    assert loads
    assert all("weights_only=True" in line for line in loads)
    assert not any("allow_pickle=True" in text for text in texts)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import joblib",
        "import socket",
        "from urllib.request import urlopen",
        "import torch; torch.load('x')",
        "import yaml; yaml.load('x', yaml.Loader)",
        "import yaml; yaml.unsafe_load('x')",
        "import os; os.system('x')",
        "import subprocess; subprocess.run('x', shell=True)",
        "eval('x')",
        "exec('x')",
    ],
)
def test_the_bans_work(line: str) -> None:
    words = ["check", "--select", "S,TID251", "--stdin-filename", "src/certvol/new.py", "-"]
    ruff = [str(Path(sys.executable).with_name("ruff")), *words]
    done = subprocess.run(
        ruff, input=line + "\n", capture_output=True, text=True, check=False, cwd=SOURCE.parents[1]
    )
    assert done.returncode == 1, done.stdout + done.stderr
