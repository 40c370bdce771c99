"""The pool of processes, with a launcher that plays the run."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from certvol.benchmark import worker
from certvol.benchmark.grid import LocalPool, visible_gpus
from certvol.benchmark.launcher import Compiled
from certvol.benchmark.plan import Job
from certvol.benchmark.worker import Outcome
from certvol.stopping import StopSignal

PLAYED = """
import json, os, signal, sys, time
from pathlib import Path
for line in sys.stdin:
    log, run, settings, source, target, seed = json.loads(line)
    sys.stderr = open(log, "a", buffering=1)
    run, code = Path(run), 0
    tries = run.parent / (run.name + ".tries")
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    print("gpu", os.environ.get("CUDA_VISIBLE_DEVICES"), "threads", os.environ.get("OMP_NUM_THREADS"), file=sys.stderr)
    what = Path(source).name
    if what == "fails":
        print("certvol: the reason is this", file=sys.stderr)
        code = 2
    if what == "crashes":
        print("RuntimeError: unforeseen", file=sys.stderr)
        code = 1
    if what == "does not start":
        raise RuntimeError("unforeseen")
    if what == "dies" or what == "dies once" and len(tries.read_text()) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stopped" or what == "stopped once" and len(tries.read_text()) == 1:
        code = 143
    if what == "waits":
        signal.signal(signal.SIGTERM, lambda *_: (run.with_suffix(".saved").write_text(""), sys.exit(143)))
        run.with_suffix(".waits").write_text("")
        time.sleep(60)
    if code == 0:
        run.write_text(str(os.getpid()))
    print(code, flush=True)
    if what == "dies after" or code != 0:
        os._exit(code)
"""


@pytest.fixture(autouse=True)
def _played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(PLAYED)
    monkeypatch.setattr(worker, "LAUNCHER", [sys.executable, str(script)])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def _job(tmp_path: Path, what: str, number: int = 0) -> Job:
    return Job("A-B", what, number, tmp_path / f"{what}-{number}", tmp_path / "s.yaml", Path(what), Path("target"))


def _pool(tmp_path: Path, workers: int = 2, gpus: tuple[str, ...] = ()) -> LocalPool:
    return LocalPool(workers, lambda job: tmp_path / "logs" / f"{job.method}-{job.seed}.log", gpus)


def _run(
    pool: LocalPool, jobs: list[Job], stop: StopSignal | None = None
) -> tuple[int | None, dict[str, list[Outcome]]]:
    ends: dict[str, list[Outcome]] = {}
    number = pool.run(
        jobs,
        lambda job, outcome: ends.setdefault(job.method, []).append(outcome),
        lambda jobs: None,
        stop or StopSignal(),
    )
    return number, ends


def test_one_that_fails_stops_no_other_and_says_why(tmp_path: Path) -> None:
    jobs = [_job(tmp_path, what) for what in ("fails", "crashes", "works")]
    number, ends = _run(_pool(tmp_path), jobs)
    assert number is None
    assert (ends["fails"][0].code, ends["fails"][0].reason) == (2, "the reason is this")
    assert (ends["crashes"][0].code, ends["crashes"][0].reason) == (1, "RuntimeError: unforeseen")
    assert (ends["works"][0].code, ends["works"][0].reason) == (0, None)
    assert (tmp_path / "fails-0.tries").read_text() == "x", "what says why it failed is not tried again"


def test_a_process_that_ends_without_a_reply_is_told_by_its_last_line(tmp_path: Path) -> None:
    _, ends = _run(_pool(tmp_path), [_job(tmp_path, "does not start"), _job(tmp_path, "works")])
    assert (ends["does not start"][0].code, ends["does not start"][0].reason) == (1, "RuntimeError: unforeseen")
    assert ends["works"][0].code == 0


def test_a_process_does_one_job_after_the_other_until_one_fails(tmp_path: Path) -> None:
    order = ["works", "works", "fails", "works", "dies after", "works"]
    jobs = [_job(tmp_path, what, number) for number, what in enumerate(order)]
    _, ends = _run(_pool(tmp_path, 1), jobs)
    assert [end.code for end in ends["works"]] == [0, 0, 0, 0]
    first, second, _, after_failure, dies_after, last = (
        job.folder.read_text() if job.folder.exists() else None for job in jobs
    )
    assert first == second, "a process for each"
    assert after_failure not in (None, first), "after a failure the process was kept"
    assert dies_after == after_failure
    assert last not in (None, dies_after)


def test_workers_without_work_end_and_can_be_needed_again(tmp_path: Path) -> None:
    pool = _pool(tmp_path, 3)
    number, ends = _run(pool, [_job(tmp_path, "works"), _job(tmp_path, "dies once")])
    assert number is None
    assert [end.code for end in ends["dies once"]] == [-9, 0]
    assert not any(end.asked_to_stop for found in ends.values() for end in found)


def test_a_process_that_dies_is_tried_again_but_not_for_ever(tmp_path: Path) -> None:
    _, ends = _run(_pool(tmp_path), [_job(tmp_path, "dies"), _job(tmp_path, "dies once")])
    assert [end.tried_again for end in ends["dies"]] == [True, True, False]
    assert ends["dies"][-1].reason == "killed by SIGKILL"
    assert [end.code for end in ends["dies once"]] == [-9, 0]


def test_a_run_that_somebody_else_stopped_is_tried_again_too(tmp_path: Path) -> None:
    _, ends = _run(_pool(tmp_path), [_job(tmp_path, "stopped"), _job(tmp_path, "stopped once")])
    assert [end.tried_again for end in ends["stopped"]] == [True, True, False]
    assert ends["stopped"][-1].reason == "stopped by a SIGTERM from elsewhere"
    assert not ends["stopped"][-1].asked_to_stop
    assert [end.code for end in ends["stopped once"]] == [143, 0]


def test_gpus_and_cores_are_dealt_out(tmp_path: Path) -> None:
    _run(_pool(tmp_path, 2, ("3", "7")), [_job(tmp_path, "works", n) for n in range(2)])
    logs = sorted((tmp_path / "logs").glob("*"))
    assert sorted(log.read_text().split()[1] for log in logs) == ["3", "7"]
    assert {log.read_text().split()[3] for log in logs} == {str(max(1, (os.cpu_count() or 1) // 2))}
    _run(_pool(tmp_path, 1, ("3",)), [_job(tmp_path, "works", 5)])
    assert "gpu None threads None" in (tmp_path / "logs" / "works-5.log").read_text(), (
        "one of each: nothing to deal out"
    )


def test_a_stop_lets_every_run_save_and_starts_no_more(tmp_path: Path) -> None:
    jobs = [_job(tmp_path, "waits", n) for n in range(3)]

    class WhenBothWait(StopSignal):
        def __call__(self) -> int | None:
            both = all(job.folder.with_suffix(".waits").exists() for job in jobs[:2])
            return signal.SIGINT if both else None

    started = time.monotonic()
    number, ends = _run(_pool(tmp_path), jobs, WhenBothWait())
    assert number == signal.SIGINT
    assert [end.code for end in ends["waits"]] == [143, 143]
    assert all(end.asked_to_stop and not end.tried_again for end in ends["waits"])
    assert all(job.folder.with_suffix(".saved").exists() for job in jobs[:2])
    assert not jobs[2].folder.with_suffix(".waits").exists()
    assert time.monotonic() - started < 30


def test_visible_gpus_are_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    assert visible_gpus() == ["2", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_how_far_a_run_is(tmp_path: Path) -> None:
    assert worker.standing(tmp_path) == "starting"
    (tmp_path / "history.jsonl").write_text('{"phase": "adapt", "step": 1}\n{"phase": "adapt", "step": 20}\n')
    assert worker.standing(tmp_path) == "adapt step 20"
    (tmp_path / "history.jsonl").write_text('{"phase": "ad')
    assert worker.standing(tmp_path) == "under way"


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no folder")
    with pytest.raises(FileExistsError):
        _run(_pool(tmp_path), [_job(tmp_path, "done")])


def test_what_was_compiled_is_forgotten_for_another_network_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[str] = []
    compiled = Compiled()
    places = {
        "first": "method: {name: cvp}\ntraining: {batch_size: 32}",
        "other method": "method: {name: basic}\ntraining: {batch_size: 32, cycles: 3}",
        "other batches": "method: {name: basic}\ntraining: {batch_size: 64}",
        "damaged": "{",
        "same batches": "method: {name: cvp}\ntraining: {batch_size: 64}",
        "other statistics": "model: {norm: dsbn}\ntraining: {batch_size: 64}",
    }
    for place in places:
        monkeypatch.setattr("torch.compiler.reset", lambda place=place: forgotten.append(place))
        (tmp_path / "settings.yaml").write_text(places[place])
        compiled.keep_for(tmp_path / "settings.yaml")
    assert forgotten == ["other batches", "other statistics"]
