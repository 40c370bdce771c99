"""Start small runs of `certvol adapt` in their own processes, to kill and compare them."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
TRIAL_CYCLES = 2
SETTINGS: dict[str, object] = {
    "model.backbone": "small_cnn",
    "model.norm": "auto",  # makes a trial of both modes part of the run
    "data.image_size": 8,
    "training.pretrain_steps": 54,
    "training.cycles": 6,
    "training.cycle_steps": 6,
    "training.batch_size": 24,
    "training.log_every": 3,  # so that there is a checkpoint inside every cycle
    "training.learning_rate": 0.01,
    "training.device": "cpu",
    "training.checkpoint_seconds": 0,
    "guard.trial_cycles": TRIAL_CYCLES,
    "guard.keep": "all",  # keeps the best cycle of every validator
}
METHOD_SETTINGS: dict[str, dict[str, object]] = {
    "deep_coral": {"training.grad_clip": 10},  # its loss grows with the features' fourth power
    "rsda_dann": {"method.rounds": 2},  # three stages of two cycles each
    "rsda_mstn": {"method.rounds": 2},
}
# Further configurations: name -> (method, settings). A name without an entry is that method's.
CONFIGURATIONS: dict[str, tuple[str, dict[str, object]]] = {
    "cvp+bf16": ("cvp", {"training.precision": "bf16"}),
    "cvp+teacher": ("cvp", {"training.teacher": 0.9}),
    "cvp+mc_dropout": (
        "cvp",
        {
            "training.pseudo_labels": "mc_dropout",
            "training.label_view": "augmented",
            "training.mc_passes": 4,
        },
    ),
    "basic+dsbn+plain": ("basic", {"model.norm": "dsbn", "training.batches": "plain"}),
    "cvp+last_block": ("cvp", {"model.train": "last_block"}),
    "cvp+ensv": ("cvp", {"guard.select": "ensv", "training.settled": 0}),
    "cvp+features": ("cvp", {"source": "source.npz", "target": "target.npz"}),
    "cvp+frozen+views": ("cvp", {"model.train": "head", "data.views": 3}),
    "rsda_mstn+teacher": ("rsda_mstn", {"training.teacher": 0.9}),
    "can+share": ("can", {"training.labelling_share": 0.5}),
    "cvp+guard_back": (
        "cvp",
        {
            "guard.action": "back",
            "guard.spread": 1.2,  # every cycle looks collapsed
            "model.norm": "mixed",
            "training.settled": 0,
        },
    ),
}
NOT_COMPARED = (  # given by the user, or about time and place
    "config.yaml environment.json timing.jsonl warnings.jsonl report.html lock checkpoint".split()
)
PATIENCE = 600.0  # seconds until a process counts as stuck; the machine may be busy
POLL = 0.0005
# Blocks of a few images: a build of the cache that is killed leaves finished blocks behind.
SMALL_BLOCKS = (
    "from certvol.data import cache, decode_pool\n"
    "cache.BLOCK_BYTES, decode_pool._GROUP_BYTES = 16 * 300, 4 * 300\n"
    "from certvol.__main__ import main\n"
    "main()"
)
# A process that sends itself a signal right after a call of a method of its `RunKeeper`: no watcher
# is quick enough for that on a busy machine.
SIGNALLED = """
import os
from certvol.__main__ import main
from certvol.training.keeper import RunKeeper
real, left = RunKeeper.{method}, {calls}
def watched(*given):
    global left
    real(*given)
    left -= 1
    if left == 0:
        os.kill(os.getpid(), {number})
RunKeeper.{method} = watched
main()
"""


class Unexpected(AssertionError):
    """Raised if a killed run did not resume as it should."""


def words_of(settings: dict[str, object]) -> list[str]:
    """Return settings as they are given on the command line."""
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def write_images(root: Path) -> None:
    """Write a source and a target of 120 images each, and two files of features."""
    sys.path.insert(0, str(TESTS))
    import numpy as np

    from support.images import write_domain

    write_domain(root / "source", per_class=40)
    write_domain(root / "target", per_class=40, shift=20, seed=1)
    rng, labels_N = np.random.default_rng(0), np.arange(120) % 3
    for name, shift in (("source", 0.0), ("target", 0.5)):
        features_ND = 2 * np.eye(16)[labels_N] + shift + rng.normal(size=(120, 16))
        np.savez(root / f"{name}.npz", features=features_ND, labels=labels_N)


@dataclass(frozen=True)
class Setup:
    """What all runs of one configuration share: images and settings."""

    root: Path
    name: str
    """A method, or one of the `CONFIGURATIONS`."""
    settings: dict[str, object] = field(default_factory=lambda: dict(SETTINGS))

    @property
    def source(self) -> Path:
        return self.root / "source"

    @property
    def target(self) -> Path:
        return self.root / "target"

    def words(self, out: Path) -> list[str]:
        """Return the arguments of `certvol adapt` for a run of this configuration."""
        method, further = CONFIGURATIONS.get(self.name, (self.name, {}))
        given: dict[str, object] = {"source": "source", "target": "target", "method": method}
        given |= {**self.settings, **METHOD_SETTINGS.get(method, {}), **further}
        for domain in ("source", "target"):
            given[domain] = self.root / str(given[domain])
        return words_of({**given, "out": out})

    def subject(self, name: str) -> "Subject":
        """Return a run that has not begun, with a cache of its own."""
        run = self.root / f"{self.name}-{name}"
        return Subject(self, run, run.with_name(f"{run.name}.cache"))


@dataclass(frozen=True)
class Subject:
    """One run and its cache; several processes work on it, one after the other."""

    setup: Setup
    run: Path
    cache: Path

    def first_words(self) -> list[str]:
        return ["adapt", *self.setup.words(self.run)]

    def next_words(self) -> list[str]:
        """Return what a user would type: start a run that has not begun, resume any other."""
        begun = (self.run / "config.yaml").exists()
        return ["adapt", "--resume", str(self.run)] if begun else self.first_words()

    def start(self, words: Sequence[str] | None = None, program: str | None = None) -> "Process":
        """Start `certvol`, or a program that calls it, with the next words of the run."""
        how = ["-m", "certvol"] if program is None else ["-c", program]
        return Process([sys.executable, *how, *(words or self.next_words())], self.cache)

    def finish(self) -> "Process":
        """Start or resume the run and wait for its end."""
        process = self.start()
        process.wait()
        process.check(0)
        return process

    def results(self) -> dict[str, bytes]:
        """Return the content of every file that is compared, by name."""
        files = sorted(path for path in self.run.rglob("*") if path.is_file())
        names = {str(path.relative_to(self.run)): path for path in files}
        return {
            name: path.read_bytes()
            for name, path in names.items()
            if Path(name).parts[0] not in NOT_COMPARED
        }

    def latest(self) -> dict[str, object]:
        """Return the newest checkpoint's entry in `latest.json`; empty if there is none."""
        try:
            return dict(json.loads((self.run / "checkpoint" / "latest.json").read_text())[0])
        except (OSError, ValueError, IndexError):
            return {}

    def number(self) -> int:
        """Return the number of the newest checkpoint."""
        return int(str(self.latest().get("number", 0)))

    def position(self) -> dict[str, object]:
        facts = self.latest().get("facts", {})
        return dict(facts["position"]) if isinstance(facts, dict) and "position" in facts else {}

    def clear(self) -> None:
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.rmtree(self.cache, ignore_errors=True)


def start_interpreter(
    words: list[str], environment: dict[str, str], stderr: str
) -> "subprocess.Popen[bytes]":
    with open(stderr, "ab") as said:  # noqa: PTH123
        return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=said, env=environment)


START: Callable[[list[str], dict[str, str], str], Any] = start_interpreter
"""How processes are started; tests replace it by something quicker."""


class Process:
    """`certvol` on one thread; its stderr goes to a file, because a full pipe would block it."""

    def __init__(self, words: list[str], cache: Path) -> None:
        self.words = words
        self._said = tempfile.NamedTemporaryFile("w+b")  # noqa: SIM115 (as long as the process)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CERTVOL_CACHE": str(cache)}
        self.started, self.started_at = time.monotonic(), time.time()
        self.popen = START(words, environment, self._said.name)

    @property
    def errors(self) -> str:
        return os.pread(self._said.fileno(), 1 << 20, 0).decode(errors="replace")

    @property
    def training(self) -> bool:
        """Start-up and decoding are over."""
        return " source images in " in self.errors

    def wait(self) -> int:
        return int(self.popen.wait(timeout=PATIENCE))

    def is_suspended(self) -> bool:
        """Wait until the process is suspended or ends; return which."""
        while self.popen.poll() is None:
            command = ["ps", "-o", "stat=", "-p", str(self.popen.pid)]
            if subprocess.run(command, capture_output=True, check=False).stdout.startswith(b"T"):
                return True
            time.sleep(100 * POLL)
        return False

    def check(self, code: int) -> None:
        if self.popen.poll() != code:
            found = f"exit {self.popen.poll()} instead of {code}"
            raise Unexpected(f"{found}: {' '.join(self.words)}\n{self.errors}")

    def until(self, happened: Callable[[], bool]) -> bool:
        """Wait for something; return False if the process ended first."""
        while self.popen.poll() is None:
            if happened():
                return True
            if time.monotonic() - self.started > PATIENCE:
                self.kill()
                raise Unexpected(f"stuck: {' '.join(self.words)}\n{self.errors}")
            time.sleep(POLL)
        return False

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
