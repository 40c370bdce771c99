"""Kill `certvol adapt` again and again, resume it, and compare the bytes it ends with.

    python tools/chaos.py --kills 100 --seed 0 --out docs/reliability.md

A chain is one run that is killed a few times and then left to finish. It passes if every compared
file equals that of an undisturbed run. Kills are aimed at phases, most at those with most state to
lose: in the middle of the phase, or at a delicate moment such as a half-written checkpoint. Every
chain of a method that adapts has a kill during adaptation.
"""

import argparse
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from chaos_runs import (
    CONFIGURATIONS,
    SMALL_BLOCKS,
    TRIAL_CYCLES,
    Process,
    Setup,
    Subject,
    Unexpected,
    write_images,
)

PHASES = ("start-up", "cache", "pretrain", "trial", "adapt", "prediction")
SHARES = dict(zip(("any", *PHASES), (2, 1, 1, 2, 4, 3, 2), strict=True))
DELICATE = 0.4  # share of delicate moments among the kills that are aimed at a phase
BEGIN, END = "<!-- chaos: begin -->", "<!-- chaos: end -->"


# Moments to kill at. Their conditions are asked thousands of times a second, so they use `os`.


@dataclass(frozen=True)
class Moment:
    """When to kill a process."""

    name: str
    came: Callable[[], bool]
    within: float | None = None
    """Kill at most so many seconds later; None for a delicate moment, which must not be missed."""
    training: bool = False
    """True if the moment counts only after training has begun or resumed."""
    fresh_cache: bool = False
    """Delete the decoded images first, so that the process has to decode them again."""


@dataclass(frozen=True)
class Mark:
    """A checkpoint of the undisturbed run, and the seconds until the next one."""

    number: int
    phase: str
    seconds: float


def exists(*paths: Path) -> Callable[[], bool]:
    return lambda: any(os.path.exists(path) for path in paths)  # noqa: PTH110


def written(path: Path) -> Callable[[], bool]:
    """Return a condition: the file is there, or half written."""
    there, half = exists(path), holds(path.parent, ".part", f"{path.name}.")
    return lambda: there() or half()


def holds(folder: Path, ending: str, start: str = "") -> Callable[[], bool]:
    """Return a condition: the folder has a file whose name begins and ends like this."""

    def found() -> bool:
        try:
            names = os.listdir(folder)  # noqa: PTH208
        except OSError:
            return False
        return any(name.startswith(start) and name.endswith(ending) for name in names)

    return found


def reached(subject: Subject, number: int) -> Callable[[], bool]:
    """Return a condition: the checkpoint of this number is there."""
    pointer, seen, newest = subject.run / "checkpoint" / "latest.json", 0, 0

    def came() -> bool:
        nonlocal seen, newest
        try:
            changed = os.stat(pointer).st_mtime_ns  # noqa: PTH116
        except OSError:
            return False
        if changed != seen:
            seen, newest = changed, subject.number()
        return newest >= number

    return came


def delicate_moments(subject: Subject, reference: "Reference", phase: str) -> list[Moment]:
    """Return the delicate moments of a phase that are still to come."""
    run, checkpoint, cycles = subject.run, subject.run / "checkpoint", subject.run / "cycles"
    weights = sorted(n for n in reference.results if re.fullmatch(r"cycles/\d+\.safetensors", n))
    weights = weights[1 + TRIAL_CYCLES * ("trial" in reference.phases) :]
    conditions = {
        "start-up": {
            "the run's folder is made": exists(run / "lock"),
            "the run's settings are written": written(run / "config.yaml"),
        },
        "cache": {"the cache is being built": holds(subject.cache, ".building")},
        "pretrain": {
            "the first checkpoint": written(checkpoint / "latest.json"),
            "the pretrained weights": written(run / "pretrained.safetensors"),
        },
        "trial": {
            "trials begin": exists(checkpoint / "start"),
            "the first trial begins": exists(cycles / "trial-mixed"),
            "the first trial ends": exists(checkpoint / "trial-mixed"),
            "the second trial begins": exists(cycles / "trial-per_domain"),
            "the second trial ends": exists(checkpoint / "trial-per_domain"),
        },
        "adapt": {
            "adaptation begins": exists(cycles / "scores.jsonl"),
            **({"a cycle ends": exists(run / weights[0])} if len(weights) > 1 else {}),
            **({"the last cycle ends": exists(run / weights[-1])} if weights else {}),
        },
        "prediction": {
            "the predictions": written(run / "predictions.csv"),
            "the figures": written(run / "metrics.json"),
            "the delivered weights": holds(run, ".part", "model.safetensors."),
        },
    }
    moments = conditions[phase].items()
    if phase == "cache":
        return [Moment(name, came, fresh_cache=True) for name, came in moments]
    return [Moment(name, came) for name, came in moments if not came()]


def half_written(process: Process, *folders: Path) -> bool:
    """Return whether this process, not an earlier one, left an incomplete file behind."""
    return any(
        path.stat().st_mtime >= process.started_at
        for folder in folders
        for path in (*folder.rglob("*.part"), *folder.glob("*.building/*"))
    )


def phase_of(subject: Subject, process: Process) -> str:
    """Return the place in the run at which the process died."""
    if not process.training:
        return "cache" if half_written(process, subject.cache) else "start-up"
    phase = str(subject.position().get("phase", "pretrain"))
    return "prediction" if phase == "done" else phase


@dataclass(frozen=True)
class Kill:
    """One kill: what it was aimed at, where it hit, and whether a file was half written."""

    moment: str
    phase: str
    in_a_write: bool


@dataclass(frozen=True)
class Chain:
    """A run that was killed several times; `problem` is empty if it ended as it should."""

    name: str
    method: str
    kills: list[Kill]
    problem: str


@dataclass(frozen=True)
class Reference:
    """The undisturbed run of a method."""

    results: dict[str, bytes]
    until_training: float
    marks: list[Mark]

    @property
    def phases(self) -> list[str]:
        """The phases that a kill can be aimed at, in order."""
        return [p for p in PHASES if p in {"start-up", "cache", *(m.phase for m in self.marks)}]


def undisturbed(setup: Setup) -> Reference:
    subject = setup.subject("undisturbed")
    process = subject.start()
    process.until(lambda: process.training)
    until_training = time.monotonic() - process.started
    seen: list[tuple[int, str, float]] = []
    while process.until(reached(subject, seen[-1][0] + 1 if seen else 1)):
        seen.append((subject.number(), phase_of(subject, process), time.monotonic()))
    process.check(0)
    if subject.number() > (seen[-1][0] if seen else 0):  # the last ones came too quickly to be seen
        seen.append((subject.number(), phase_of(subject, process), time.monotonic()))
    if not seen:
        raise Unexpected(f"no checkpoint: {' '.join(process.words)}")
    times = [*(at for *_, at in seen), time.monotonic()]
    marks = [Mark(number, phase, times[i + 1] - at) for i, (number, phase, at) in enumerate(seen)]
    results = subject.results()
    subject.clear()
    return Reference(results, until_training, marks)


def draw_aims(reference: Reference, kills: int, rng: random.Random) -> list[str]:
    """Draw the phases that a chain's kills are aimed at, in the order of a run."""
    names = ("any", *reference.phases)
    drawn = rng.choices(names, [SHARES[name] for name in names], k=kills)
    if "adapt" in names and "adapt" not in drawn:
        drawn[0] = "adapt"
    anywhere = [name for name in drawn if name in ("any", "start-up", "cache")]
    aims = sorted((name for name in drawn if name not in anywhere), key=PHASES.index)
    for name in anywhere:  # every process has these
        aims.insert(rng.randint(0, len(aims)), name)
    return aims


def next_moment(subject: Subject, reference: Reference, aim: str, rng: random.Random) -> Moment:
    """Draw a moment of the phase aimed at, or a later one if the phase is over."""
    # A resumed run may write more checkpoints than the undisturbed one; then take its last mark.
    marks, number = reference.marks, subject.number()
    ahead = [mark for mark in marks if mark.number >= number] or marks[-1:]
    if aim in ("any", "start-up"):
        rest = sum(mark.seconds for mark in ahead) if aim == "any" else 0
        due = time.monotonic() + rng.uniform(0, reference.until_training + rest)
        moments = [Moment("at random", lambda: time.monotonic() >= due, within=0.0)]
        if aim == "start-up":
            moments += delicate_moments(subject, reference, aim)
        return rng.choice(moments)
    if aim == "cache":
        return rng.choice(delicate_moments(subject, reference, aim))
    mark = rng.choice([mark for mark in ahead if mark.phase == aim] or ahead[-1:])
    there = reached(subject, mark.number)
    moments = delicate_moments(subject, reference, mark.phase)
    if mark is not reference.marks[-1]:
        part = holds(subject.run / "checkpoint", ".part")
        half = Moment("a checkpoint is half written", lambda: there() and part(), training=True)
        moments.append(half)
    if moments and rng.random() < DELICATE:
        return rng.choice(moments)
    return Moment(f"amid {mark.phase}", there, within=mark.seconds, training=True)


def kill_once(subject: Subject, reference: Reference, aim: str, rng: random.Random) -> Kill | None:
    """Run until a moment and kill; return None if the run ended first."""
    moment = next_moment(subject, reference, aim, rng)
    if moment.fresh_cache:
        shutil.rmtree(subject.cache, ignore_errors=True)
    process = subject.start(program=SMALL_BLOCKS if moment.fresh_cache else None)
    if process.until(lambda: moment.came() and (process.training or not moment.training)):
        soon = rng.choice([0.0, 0.0, 0.005, 0.05])
        time.sleep(soon if moment.within is None else rng.uniform(0, moment.within))
        process.kill()
    if process.popen.poll() == 0:
        return None
    process.check(-9)
    in_a_write = half_written(process, subject.run, subject.cache)
    return Kill(moment.name, phase_of(subject, process), in_a_write)


def one_chain(
    setup: Setup, reference: Reference, rng: random.Random, name: str, most: int
) -> Chain:
    """Kill a run up to `most` times, let it finish and compare its files."""
    subject = setup.subject(name.replace(" ", "-"))
    kills: list[Kill] = []
    try:
        for aim in draw_aims(reference, most, rng):
            kill = kill_once(subject, reference, aim, rng)
            if kill is None:
                break
            kills.append(kill)
        subject.finish()
        found, expected = subject.results(), reference.results
        other = [n for n in sorted({*found, *expected}) if found.get(n) != expected.get(n)]
        if other:
            raise Unexpected(f"other bytes in {', '.join(other)}")
        if left := [str(path.relative_to(subject.run)) for path in subject.run.rglob("*.part")]:
            raise Unexpected(f"left behind: {', '.join(left)}")
    except Unexpected as problem:
        return Chain(name, setup.name, kills, f"{problem} (kept in {subject.run})")
    subject.clear()
    return Chain(name, setup.name, kills, "")


@dataclass(frozen=True)
class Plan:
    """How many kills, how many of them per chain, and how many methods at a time."""

    kills: int
    seed: int = 0
    per_chain: tuple[int, int] = (2, 4)
    jobs: int = 1


def chaos(
    root: Path, methods: Sequence[str], plan: Plan, say: Callable[[str], object] = print
) -> list[Chain]:
    """Carry out a plan, with about as many kills of each method."""
    write_images(root)
    share, more = divmod(plan.kills, len(methods))

    def of_method(place: int) -> list[Chain]:
        setup, kills = Setup(root, methods[place]), share + (place < more)
        rng, chains, done = random.Random(f"{plan.seed} {setup.name}"), list[Chain](), 0
        reference = undisturbed(setup) if kills else None
        while reference is not None and done < kills:
            name = f"{setup.name} {len(chains) + 1}"
            most = min(rng.randint(*plan.per_chain), kills - done)
            chain = one_chain(setup, reference, rng, name, most)
            chains.append(chain)
            done += len(chain.kills)
            moments = ", ".join(f"{kill.phase} ({kill.moment})" for kill in chain.kills)
            say(f"{name}: {chain.problem or 'identical'} after {moments}; {done} of {kills} kills")
        return chains

    with ThreadPoolExecutor(plan.jobs) as pool:
        return [chain for chains in pool.map(of_method, range(len(methods))) for chain in chains]


def summary(chains: Sequence[Chain], seed: int, seconds: float) -> str:
    """Return the result as Markdown."""
    import torch

    from certvol.runs.environment import describe_environment

    about = describe_environment(torch.device("cpu"))
    kills = [kill for chain in chains for kill in chain.kills]
    identical = sum(len(chain.kills) for chain in chains if not chain.problem)
    methods = sorted({chain.method for chain in chains})
    further = sum(name in CONFIGURATIONS for name in methods)
    most = max((len(chain.kills) for chain in chains), default=0)
    half = sum(kill.in_a_write for kill in kills)
    rows = [
        f"**{identical} of {len(kills)} kills: the run ended with the bytes of an undisturbed "
        f"one.** {len(methods) - further} methods and {further} further configurations, "
        f"{len(chains)} runs of up to {most} kills; at {half} a file was half written.\n",
        f"Commit `{about['commit']}`, {time.strftime('%Y-%m-%d')}, seed {seed}, {seconds / 60:.0f} "
        f"minutes, CPU, one thread, torch {torch.__version__}, Python "
        f"{about['versions']['python']}.\n",
        "| method, killed in | " + " | ".join((*PHASES, "all")) + " |",
        "|---|" + "---:|" * (len(PHASES) + 1),
    ]
    counts = Counter((chain.method, kill.phase) for chain in chains for kill in chain.kills)
    for title, own in [*((f"`{name}`", [name]) for name in methods), ("all", methods)]:
        each = [sum(counts[name, phase] for name in own) for phase in PHASES]
        rows.append(f"| {title} | " + " | ".join(map(str, [*each, sum(each)])) + " |")
    moments = Counter(kill.moment for kill in kills).most_common()
    rows.append("\nAimed at: " + ", ".join(f"{name} {count}" for name, count in moments) + ".")
    rows += [f"- {c.name} differs: {c.problem.splitlines()[0]}" for c in chains if c.problem]
    return "\n".join(rows)


def put_between_markers(page: Path, text: str) -> None:
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{page} lacks the lines {BEGIN} and {END}; the summary goes between them")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> int:
    from certvol.methods import discover

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    names = [*discover(), *CONFIGURATIONS]
    parser.add_argument("--methods", default=",".join(names), help="default: all, in all ways")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, help="put the summary between this page's markers")
    options = parser.parse_args()
    root, started = Path(tempfile.mkdtemp(prefix="certvol-chaos-")), time.monotonic()
    plan = Plan(options.kills, options.seed, jobs=options.jobs)
    chains = chaos(root, options.methods.split(","), plan)
    text = summary(chains, options.seed, time.monotonic() - started)
    print(f"\n{text}")
    if options.out is not None:
        put_between_markers(options.out, text)
    if any(chain.problem for chain in chains):
        return 1
    shutil.rmtree(root, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
