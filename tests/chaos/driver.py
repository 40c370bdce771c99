"""Kills `certvol adapt` with SIGKILL, over and over, resumes it, and compares the bytes it ends with.

    python tests/chaos/driver.py --kills 100 --seed 0 --out docs/reliability.md

A chain is one run: started, killed a few times, and at last let finish. It passes where every compared file is, byte for byte,
that of a run that nobody disturbed. Kills are aimed at phases, most at those with most state to lose (`SHARES`), and one of every
chain at adaptation: amid the phase, or at its short and delicate moments, such as a checkpoint half written. Some come at any
moment of the process's life.
"""

import argparse
import dataclasses
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
CYCLES, TRIAL_CYCLES = 6, 2
SETTINGS = {
    "model.backbone": "small_cnn",
    "model.norm": "auto",  # a trial of both modes is part of the run
    "data.image_size": 8,
    "training.pretrain_steps": 54,
    "training.cycles": CYCLES,
    "training.cycle_steps": 6,
    "training.batch_size": 24,
    "training.log_every": 3,  # and so a checkpoint amid every cycle, with its plan
    "training.learning_rate": 0.01,
    "training.device": "cpu",
    "training.checkpoint_seconds": 0,
    "guard.trial_cycles": TRIAL_CYCLES,
    "guard.keep": "all",  # the best cycle so far by every selector
}
METHOD_SETTINGS: dict[str, dict[str, object]] = {
    "deep_coral": {"training.grad_clip": 10},  # its loss grows with the fourth power of the features
    "rsda_dann": {"method.rounds": 2},  # three stages of two cycles each
    "rsda_mstn": {"method.rounds": 2},
}
# Every file of a run is compared but what it was given, and those that tell of time, place or the kills themselves.
NOT_COMPARED = (
    "config.yaml",
    "environment.json",
    "timing.jsonl",
    "warnings.jsonl",
    "report.html",
    "lock",
    "checkpoint",
)
PHASES = ("start-up", "cache", "pretrain", "trial", "adapt", "prediction")
SHARES = {"any": 2, "start-up": 1, "cache": 1, "pretrain": 2, "trial": 4, "adapt": 3, "prediction": 2}
DELICATE = 0.4  # of the kills that are aimed at a phase
BEGIN, END = "<!-- chaos: begin -->", "<!-- chaos: end -->"
PATIENCE = 180.0  # seconds until a process counts as stuck
POLL = 0.0005
# A block of a few images, so that a build that is killed leaves finished blocks behind.
SMALL_BLOCKS = (
    "from certvol.data import cache, reading\n"
    "cache.BLOCK_BYTES, reading._TASK_BYTES = 16 * 300, 4 * 300\n"
    "from certvol.__main__ import main\n"
    "main()"
)


class NotAsExpected(AssertionError):
    """A run that was killed did not go on as it should."""


def words_of(settings: dict[str, object]) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


@dataclass(frozen=True)
class Scene:
    """What all runs of one method share: the images and the settings."""

    root: Path
    method: str
    settings: dict[str, object] = field(default_factory=lambda: dict(SETTINGS))

    @property
    def all_settings(self) -> dict[str, object]:
        return {**self.settings, **METHOD_SETTINGS.get(self.method, {})}

    @property
    def source(self) -> Path:
        return self.root / "source"

    @property
    def target(self) -> Path:
        return self.root / "target"

    def play(self, name: str) -> "Play":
        """A run that has not begun, with a cache of its own."""
        return Play(self, self.root / f"{self.method}-{name}", self.root / f"{self.method}-{name}.cache")


@dataclass(frozen=True)
class Play:
    """One run and its cache, which any number of processes work on, one after the other."""

    scene: Scene
    run: Path
    cache: Path

    def begin_words(self) -> list[str]:
        scene = self.scene
        places = ["--source", str(scene.source), "--target", str(scene.target), "--out", str(self.run)]
        return ["adapt", *places, "--method", scene.method, *words_of(scene.all_settings)]

    def next_words(self) -> list[str]:
        """What a user gives next: a run that has not begun is started, another resumed."""
        begun = (self.run / "config.yaml").exists()
        return ["adapt", "--resume", str(self.run)] if begun else self.begin_words()

    def start(self, words: Sequence[str] | None = None, small_blocks: bool = False) -> "Process":
        how = ["-c", SMALL_BLOCKS] if small_blocks else ["-m", "certvol"]
        return Process([sys.executable, *how, *(words or self.next_words())], self.cache, self.run)

    def finish(self) -> "Process":
        """Begins or resumes, and lets it come to its end."""
        process = self.start()
        process.wait()
        if process.code != 0:
            raise NotAsExpected(f"exit {process.code} instead of 0 of {' '.join(process.words)}\n{process.errors}")
        return process

    def results(self) -> dict[str, bytes]:
        """By name, the bytes of every file that is compared."""
        places = {path.relative_to(self.run): path for path in self.run.rglob("*") if path.is_file()}
        return {
            str(name): path.read_bytes() for name, path in sorted(places.items()) if name.parts[0] not in NOT_COMPARED
        }

    def latest(self) -> dict[str, object]:
        """The newest checkpoint as `latest.json` tells of it; nothing where there is none."""
        try:
            entries = json.loads((self.run / "checkpoint" / "latest.json").read_text())
            return dict(entries[0])
        except (OSError, ValueError, IndexError):
            return {}

    def position(self) -> dict[str, object]:
        facts = self.latest().get("facts", {})
        return dict(facts["position"]) if isinstance(facts, dict) and "position" in facts else {}

    def clear(self) -> None:
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.rmtree(self.cache, ignore_errors=True)


class Process:
    """`certvol`, on one thread, with what it says in a file: a pipe would be lost with it, or block it."""

    def __init__(self, words: list[str], cache: Path, run: Path) -> None:
        self.words = words
        self._said = tempfile.TemporaryFile("w+b")  # noqa: SIM115 (it lives as long as the process)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CERTVOL_CACHE": str(cache)}
        self._trained = False
        self.started, self.started_at = time.monotonic(), time.time()
        self.popen = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=self._said, env=environment)

    @property
    def errors(self) -> str:
        return os.pread(self._said.fileno(), 1 << 20, 0).decode(errors="replace")

    @property
    def code(self) -> int | None:
        return self.popen.poll()

    def wait(self) -> int:
        return self.popen.wait(timeout=PATIENCE)

    def until(self, happened: Callable[[], bool]) -> bool:
        """True as soon as it happened; False where the process ended first."""
        while self.popen.poll() is None:
            if happened():
                return True
            if time.monotonic() - self.started > PATIENCE:
                self.kill()
                raise NotAsExpected(f"stuck for {PATIENCE:.0f} s: {' '.join(self.words)}\n{self.errors}")
            time.sleep(POLL)
        return False

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    @property
    def trained(self) -> bool:
        """Past start-up and decoding."""
        self._trained = self._trained or " source images in " in self.errors
        return self._trained


# --- moments ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """When to kill. `fresh_cache`: the decoded images are taken away first, so that the process has to make them again."""

    name: str
    came: Callable[[], bool]
    fresh_cache: bool = False
    training: bool = False
    """Not before training has begun or gone on."""
    within: float = 0.05
    """At most so many seconds later; a delicate one is mostly not made to wait."""
    delicate: bool = True


@dataclass(frozen=True)
class Mark:
    """A checkpoint of the undisturbed run. Those of a run that was killed have the same numbers."""

    number: int
    phase: str
    seconds: float
    """Until the next one, or the end."""


def there(*paths: Path) -> Callable[[], bool]:
    return lambda: any(os.path.exists(path) for path in paths)  # noqa: PTH110 (asked thousands of times a second)


def parts_in(folder: Path) -> Callable[[], bool]:
    def found() -> bool:
        try:
            return any(name.endswith(".part") for name in os.listdir(folder))  # noqa: PTH208
        except OSError:
            return False

    return found


def building(cache: Path) -> Callable[[], bool]:
    def found() -> bool:
        try:
            return any(name.endswith(".building") for name in os.listdir(cache))  # noqa: PTH208
        except OSError:
            return False

    return found


def reached(play: Play, number: int) -> Callable[[], bool]:
    """Whether that checkpoint is there."""
    pointer, seen, newest = play.run / "checkpoint" / "latest.json", 0, 0

    def came() -> bool:
        nonlocal seen, newest
        try:
            changed = os.stat(pointer).st_mtime_ns  # noqa: PTH116 (asked thousands of times a second)
        except OSError:
            return False
        if changed != seen:
            seen, newest = changed, int(str(play.latest().get("number", 0)))
        return newest >= number

    return came


def half_a_checkpoint(play: Play, number: int) -> Callable[[], bool]:
    """Whether the one after it is half written."""
    there_is, write = reached(play, number), parts_in(play.run / "checkpoint")
    return lambda: there_is() and write()


def delicate_moments(play: Play, whole: "Whole", phase: str, rng: random.Random) -> list[Moment]:
    """Those of a phase that are still to come."""
    run, checkpoint, cycles = play.run, play.run / "checkpoint", play.run / "cycles"
    ends = sorted(name for name in whole.results if re.fullmatch(r"cycles/\d+\.safetensors", name))
    own = ends[1 + TRIAL_CYCLES :] if "trial" in whole.phases else ends[1:]
    by_phase = {
        "start-up": [
            Moment("the run's folder is made", there(run / "lock")),
            Moment("the run's settings are written", there(run / "config.yaml.part", run / "config.yaml")),
        ],
        "cache": [Moment("the cache is being built", building(play.cache), fresh_cache=True)],
        "pretrain": [
            Moment("the first checkpoint", there(checkpoint / "latest.json.part", checkpoint / "latest.json")),
            Moment(
                "the pretrained weights", there(run / "pretrained.safetensors.part", run / "pretrained.safetensors")
            ),
        ],
        "trial": [
            Moment("trials begin", there(checkpoint / "start")),
            Moment("the first trial begins", there(cycles / "trial-mixed")),
            Moment("the first trial ends", there(checkpoint / "trial-mixed")),
            Moment("the second trial begins", there(cycles / "trial-per_domain")),
            Moment("the second trial ends", there(checkpoint / "trial-per_domain")),
        ],
        "adapt": [
            Moment("adaptation begins", there(cycles / "scores.jsonl")),
            *(Moment("a cycle ends", there(run / name)) for name in rng.sample(own[:-1], min(1, len(own[:-1])))),
            *(Moment("the last cycle ends", there(run / name)) for name in own[-1:]),
        ],
        "prediction": [
            Moment("the predictions", there(run / "predictions.csv.part", run / "predictions.csv")),
            Moment("the figures", there(run / "metrics.json.part", run / "metrics.json")),
            Moment("the delivered weights", there(run / "model.safetensors.part")),
        ],
    }
    return [moment for moment in by_phase[phase] if moment.fresh_cache or not moment.came()]


def half_written(process: Process, *folders: Path) -> bool:
    """Whether this process, not one before it, left there what is not whole."""
    found = (path for folder in folders for path in (*folder.rglob("*.part"), *folder.glob("*.building/*")))
    return any(path.stat().st_mtime >= process.started_at for path in found)


def phase_of(play: Play, process: Process) -> str:
    """Where the process stood when it died, by what it said and by its last checkpoint."""
    if not process.trained:
        return "cache" if half_written(process, play.cache) else "start-up"
    phase = str(play.position().get("phase", "pretrain"))
    return "prediction" if phase == "done" else phase


# --- chains ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    moment: str
    phase: str
    in_a_write: bool
    """A file was half written."""


@dataclass(frozen=True)
class Chain:
    name: str
    method: str
    kills: list[Kill]
    problem: str
    """What was not as expected; empty where it ended as the undisturbed run."""


@dataclass
class Outcome:
    chains: list[Chain]
    seconds: float = 0.0

    @property
    def kills(self) -> list[Kill]:
        return [kill for chain in self.chains for kill in chain.kills]

    @property
    def problems(self) -> dict[str, str]:
        return {chain.name: chain.problem for chain in self.chains if chain.problem}

    @property
    def identical(self) -> int:
        """Kills after which the run ended with the same bytes."""
        return sum(len(chain.kills) for chain in self.chains if not chain.problem)


@dataclass(frozen=True)
class Whole:
    """The undisturbed run of a method."""

    results: dict[str, bytes]
    seconds: float
    until_training: float
    marks: list[Mark]

    @property
    def phases(self) -> list[str]:
        """Those that a kill can be aimed at, in their order."""
        return [phase for phase in PHASES if phase in ("start-up", "cache", *(mark.phase for mark in self.marks))]


def undisturbed(scene: Scene) -> Whole:
    play = scene.play("whole")
    process = play.start()
    process.until(lambda: process.trained)
    until_training = time.monotonic() - process.started
    seen: list[tuple[int, str, float]] = []
    while process.until(reached(play, seen[-1][0] + 1 if seen else 1)):
        seen.append((int(str(play.latest()["number"])), phase_of(play, process), time.monotonic()))
    if process.code != 0:
        raise NotAsExpected(f"exit {process.code} instead of 0 of {' '.join(process.words)}\n{process.errors}")
    ended = time.monotonic()
    times = [*(at for _, _, at in seen), ended]
    marks = [Mark(number, phase, times[i + 1] - at) for i, (number, phase, at) in enumerate(seen)]
    results = play.results()
    play.clear()
    return Whole(results, ended - process.started, until_training, marks)


def aims(whole: Whole, kills: int, rng: random.Random) -> list[str]:
    """What the kills of a chain are aimed at: phases in the order of a run's course, and between them what any process has."""
    phases = whole.phases
    drawn = rng.choices(["any", *phases], [SHARES[name] for name in ("any", *phases)], k=kills)
    if "adapt" in phases and "adapt" not in drawn:
        drawn[0] = "adapt"
    anywhere = [name for name in drawn if name in ("any", "start-up", "cache")]
    aimed = sorted((name for name in drawn if name not in anywhere), key=PHASES.index)
    for name in anywhere:
        aimed.insert(rng.randint(0, len(aimed)), name)
    return aimed


def next_moment(play: Play, whole: Whole, aim: str, rng: random.Random) -> Moment:
    """A moment of the phase aimed at; where that is past, one of those to come."""
    done = int(str(play.latest().get("number", 0)))
    ahead = [mark for mark in whole.marks if mark.number >= done]
    if aim in ("any", "start-up"):
        life = whole.until_training + (sum(mark.seconds for mark in ahead) if aim == "any" else 0)
        due = time.monotonic() + rng.uniform(0, life)
        at_random = Moment("at random", lambda: time.monotonic() >= due, within=0.0, delicate=False)
        if aim == "any":
            return at_random
        return rng.choice([*delicate_moments(play, whole, aim, rng), at_random])
    if aim == "cache":
        return rng.choice(delicate_moments(play, whole, aim, rng))
    marks = [mark for mark in ahead if mark.phase == aim] or ahead[-1:]
    mark = rng.choice(marks)
    moments = delicate_moments(play, whole, mark.phase, rng)
    if mark is not whole.marks[-1]:
        moments.append(Moment("a checkpoint is half written", half_a_checkpoint(play, mark.number), training=True))
    if moments and rng.random() < DELICATE:
        return rng.choice(moments)
    return Moment(f"amid {mark.phase}", reached(play, mark.number), training=True, within=mark.seconds, delicate=False)


def kill_once(play: Play, whole: Whole, aim: str, rng: random.Random) -> Kill | None:
    """None where the process came to its end before the moment did."""
    moment = next_moment(play, whole, aim, rng)
    after = rng.uniform(0, moment.within)
    if moment.delicate:
        after = rng.choice([0.0, 0.0, after / 5, after])
    if moment.fresh_cache:
        shutil.rmtree(play.cache, ignore_errors=True)
    process = play.start(small_blocks=moment.fresh_cache)
    if process.until(lambda: (process.trained or not moment.training) and moment.came()):
        time.sleep(after)
        process.kill()
    if process.code == 0:
        return None
    if process.code != -9:
        raise NotAsExpected(f"exit {process.code} of {' '.join(process.words)}\n{process.errors}")
    in_a_write = half_written(process, play.run, play.cache)
    return Kill(moment.name, phase_of(play, process), in_a_write)


def one_chain(scene: Scene, whole: Whole, rng: random.Random, name: str, most: int) -> Chain:
    play = scene.play(name.replace(" ", "-"))
    kills: list[Kill] = []
    try:
        for aim in aims(whole, most, rng):
            kill = kill_once(play, whole, aim, rng)
            if kill is None:
                break
            kills.append(kill)
        play.finish()
    except NotAsExpected as problem:
        return Chain(name, scene.method, kills, f"{problem} (kept in {play.run})")
    found = play.results()
    other = [file for file in sorted({*found, *whole.results}) if found.get(file) != whole.results.get(file)]
    left = [str(path.relative_to(play.run)) for path in play.run.rglob("*.part")]
    if other or left:
        what = [f"other bytes in {', '.join(other)}"] * bool(other) + [f"left behind: {', '.join(left)}"] * bool(left)
        return Chain(name, scene.method, kills, f"{'; '.join(what)} (kept in {play.run})")
    play.clear()
    return Chain(name, scene.method, kills, "")


def write_images(root: Path) -> None:
    sys.path.insert(0, str(TESTS))
    from images import write_domain

    write_domain(root / "source", per_class=40)
    write_domain(root / "target", per_class=40, shift=20, seed=1)


def chaos(
    root: Path,
    methods: Sequence[str],
    kills: int,
    seed: int,
    say: Callable[[str], object] = lambda text: None,
    per_chain: tuple[int, int] = (2, 4),
    jobs: int = 1,
) -> Outcome:
    """`kills` kills, as many of each method but for the remainder; `per_chain` of them to a chain; `jobs` methods at a time."""
    write_images(root)
    started = time.monotonic()
    share, more = divmod(kills, len(methods))
    with ThreadPoolExecutor(jobs) as pool:
        each = pool.map(
            lambda place: _of_method(
                Scene(root, methods[place]), share + (place < more), f"{seed} {methods[place]}", say, per_chain
            ),
            range(len(methods)),
        )
        outcome = Outcome([chain for chains in each for chain in chains])
    outcome.seconds = time.monotonic() - started
    return outcome


def _of_method(
    scene: Scene, kills: int, seed: str, say: Callable[[str], object], per_chain: tuple[int, int]
) -> list[Chain]:
    rng, chains, done = random.Random(seed), list[Chain](), 0
    whole = undisturbed(scene) if kills else None
    while whole is not None and done < kills:
        name = f"{scene.method} {len(chains) + 1}"
        chain = one_chain(scene, whole, rng, name, min(rng.randint(*per_chain), kills - done))
        chains.append(chain)
        done += len(chain.kills)
        moments = ", ".join(f"{kill.phase} ({kill.moment})" for kill in chain.kills)
        say(f"{name}: {chain.problem or 'identical'} after {moments or 'no kill'}; {done} of {kills} kills")
    return chains


# --- telling ---------------------------------------------------------------------------------------------------------------


def commit() -> str:
    """Of the code that ran, which need not be the code beside this file."""
    import certvol

    place = Path(certvol.__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(place), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = " with changes" if git("status", "--porcelain", "--", str(place)) else ""
    return (git("rev-parse", "--short", "HEAD") or "unknown") + changed


def summary(outcome: Outcome, seed: int) -> str:
    import torch

    methods = sorted({chain.method for chain in outcome.chains})
    counts = Counter((chain.method, kill.phase) for chain in outcome.chains for kill in chain.kills)
    most = max((len(chain.kills) for chain in outcome.chains), default=0)
    rows = [
        f"**{outcome.identical} of {len(outcome.kills)} kills: the run ended with the bytes of an undisturbed one.** "
        f"{len(methods)} methods, {len(outcome.chains)} runs of up to {most} kills each; at "
        f"{sum(kill.in_a_write for kill in outcome.kills)} kills a file or the cache was half written.",
        "",
        f"Commit `{commit()}`, {time.strftime('%Y-%m-%d')}, seed {seed}, {outcome.seconds / 60:.0f} minutes, CPU, one thread, "
        f"torch {torch.__version__}, Python {platform.python_version()}.",
        "",
        "| method, killed in | " + " | ".join((*PHASES, "all")) + " |",
        "|---|" + "---:|" * (len(PHASES) + 1),
    ]
    for method in methods:
        each = [counts[method, phase] for phase in PHASES]
        rows.append(f"| `{method}` | " + " | ".join(map(str, [*each, sum(each)])) + " |")
    each = [sum(counts[method, phase] for method in methods) for phase in PHASES]
    rows.append("| all | " + " | ".join(map(str, [*each, sum(each)])) + " |")
    moments = Counter(kill.moment for kill in outcome.kills).most_common()
    rows += ["", "Aimed at: " + ", ".join(f"{name} {count}" for name, count in moments) + "."]
    rows += [f"- {name} differs: {problem.splitlines()[0]}" for name, problem in outcome.problems.items()]
    return "\n".join(rows)


def put_between_markers(page: Path, text: str) -> None:
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{page} lacks the lines {BEGIN} and {END} between which the summary goes")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> int:
    from certvol.methods import discover

    parser = argparse.ArgumentParser(description="kill `certvol adapt`, resume it, compare the bytes")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", default=",".join(discover()), help="comma-separated; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="methods at a time")
    parser.add_argument("--out", type=Path, help="a page whose part between the markers becomes the summary")
    parser.add_argument("--json", type=Path, help="every kill, as JSON")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="certvol-chaos-"))
    outcome = chaos(
        root,
        options.methods.split(","),
        options.kills,
        options.seed,
        lambda text: print(text, flush=True),
        jobs=options.jobs,
    )
    text = summary(outcome, options.seed)
    print(f"\n{text}")
    if options.out is not None:
        put_between_markers(options.out, text)
    if options.json is not None:
        options.json.write_text(json.dumps(dataclasses.asdict(outcome), indent=1) + "\n", encoding="utf-8")
    if not outcome.problems:
        shutil.rmtree(root, ignore_errors=True)
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
