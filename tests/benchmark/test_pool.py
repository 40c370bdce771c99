"""The pool of processes, with a worker process that plays the runs."""

import os
import signal
import sys
from pathlib import Path

import pytest

from certvol.benchmark import pool
from certvol.benchmark.plan import BenchmarkJob
from certvol.benchmark.pool import JobOutcome, LocalPool, visible_gpus
from certvol.progress import StopSignal

PLAYED = """
import json, os, signal, sys, time
from pathlib import Path
for line in sys.stdin:
    log, run, settings, sources, target, seed = json.loads(line)
    sys.stderr = open(log, "a", buffering=1)
    run, code = Path(run), 0
    tries = run.parent / (run.name + ".tries")
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    gpu, threads = map(os.environ.get, ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"))
    print("gpu", gpu, "threads", threads, file=sys.stderr)
    what = Path(sources[0]).name
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
        saved = run.with_suffix(".saved")
        signal.signal(signal.SIGTERM, lambda *_: (saved.write_text(""), sys.exit(143)))
        run.with_suffix(".waits").write_text("")
        time.sleep(600)
    if code == 0:
        run.write_text(str(os.getpid()))
    print(code, flush=True)
    if what == "dies after" or code != 0:
        os._exit(code)
"""


@pytest.fixture(autouse=True)
def _played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "played.py"
    script.write_text(PLAYED)
    monkeypatch.setattr(pool, "COMMAND", [sys.executable, str(script)])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def _job(out: Path, behaviour: str, number: int = 0) -> BenchmarkJob:
    return BenchmarkJob("A-B", behaviour, number, out, (Path(behaviour),), Path("target"))


def _run(
    pool: LocalPool, jobs: list[BenchmarkJob], stop: StopSignal | None = None
) -> tuple[int | None, dict[str, list[JobOutcome]]]:
    ends: dict[str, list[JobOutcome]] = {}
    for job in jobs:
        job.folder.parent.mkdir(parents=True, exist_ok=True)
    number = pool.run(
        jobs,
        lambda job, outcome: ends.setdefault(job.method, []).append(outcome),
        lambda jobs: None,
        stop or StopSignal(),
    )
    return number, ends


def test_a_failure_has_a_reason_and_does_not_stop_the_others(tmp_path: Path) -> None:
    jobs = [_job(tmp_path, what) for what in ("fails", "crashes", "works")]
    number, ends = _run(LocalPool(2, ()), jobs)
    assert number is None
    assert (ends["fails"][0].code, ends["fails"][0].reason) == (2, "the reason is this")
    assert (ends["crashes"][0].code, ends["crashes"][0].reason) == (1, "RuntimeError: unforeseen")
    assert (ends["works"][0].code, ends["works"][0].reason) == (0, "")
    assert [end.status for end in ends["fails"]] == ["failed"], "it is not tried again"


def test_a_process_that_ends_without_a_reply_is_explained_by_its_last_line(tmp_path: Path) -> None:
    _, ends = _run(LocalPool(2, ()), [_job(tmp_path, "does not start"), _job(tmp_path, "works")])
    assert (ends["does not start"][0].code, ends["does not start"][0].reason) == (
        1,
        "RuntimeError: unforeseen",
    )
    assert ends["works"][0].code == 0


def test_a_process_does_jobs_until_one_fails(tmp_path: Path) -> None:
    order = ["works", "works", "fails", "works", "dies after", "works"]
    jobs = [_job(tmp_path, what, number) for number, what in enumerate(order)]
    _, ends = _run(LocalPool(1, ()), jobs)
    assert [end.code for end in ends["works"]] == [0, 0, 0, 0]
    first, second, _, after_failure, dies_after, last = (
        job.folder.read_text() if job.folder.exists() else None for job in jobs
    )
    assert first == second, "a process for each"
    assert after_failure not in (None, first), "after a failure the process was kept"
    assert dies_after == after_failure
    assert last not in (None, dies_after)


def test_workers_without_work_end_and_can_start_again(tmp_path: Path) -> None:
    pool = LocalPool(3, ())
    number, ends = _run(pool, [_job(tmp_path, "works"), _job(tmp_path, "dies once")])
    assert number is None
    assert [end.code for end in ends["dies once"]] == [-9, 0]
    assert [end.status for end in ends["works"]] == ["done"]


def test_a_process_that_dies_is_tried_three_times(tmp_path: Path) -> None:
    _, ends = _run(LocalPool(2, ()), [_job(tmp_path, "dies"), _job(tmp_path, "dies once")])
    assert [end.status for end in ends["dies"]] == ["retried", "retried", "died"]
    assert ends["dies"][-1].reason == "killed by SIGKILL"
    assert [end.code for end in ends["dies once"]] == [-9, 0]


def test_a_run_that_is_stopped_from_outside_is_tried_again(tmp_path: Path) -> None:
    _, ends = _run(LocalPool(2, ()), [_job(tmp_path, "stopped"), _job(tmp_path, "stopped once")])
    assert [end.status for end in ends["stopped"]] == ["retried", "retried", "died"]
    assert ends["stopped"][-1].reason == "killed by SIGTERM"
    assert [end.code for end in ends["stopped once"]] == [143, 0]


def test_gpus_and_cores_are_shared(tmp_path: Path) -> None:
    _run(LocalPool(2, ("3", "7")), [_job(tmp_path, "works", n) for n in range(2)])
    logs = sorted((tmp_path / "logs").rglob("*.log"))
    assert sorted(log.read_text().split()[1] for log in logs) == ["3", "7"]
    assert {log.read_text().split()[3] for log in logs} == {str(max(1, (os.cpu_count() or 1) // 2))}
    _run(LocalPool(1, ("3",)), [_job(tmp_path, "works", 5)])
    assert "gpu None threads None" in _job(tmp_path, "works", 5).log.read_text(), (
        "one worker has all of them"
    )


def test_a_stop_lets_every_run_save_and_starts_no_more(tmp_path: Path) -> None:
    jobs = [_job(tmp_path, "waits", n) for n in range(3)]

    class WhenBothWait(StopSignal):
        def __call__(self) -> int | None:
            both = all(job.folder.with_suffix(".waits").exists() for job in jobs[:2])
            return signal.SIGINT if both else None

    number, ends = _run(LocalPool(2, ()), jobs, WhenBothWait())
    assert number == signal.SIGINT
    assert [end.code for end in ends["waits"]] == [143, 143]
    assert {end.status for end in ends["waits"]} == {"stopped"}
    assert all(job.folder.with_suffix(".saved").exists() for job in jobs[:2])
    assert not jobs[2].folder.with_suffix(".waits").exists()


def test_visible_gpus_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    assert visible_gpus() == ["2", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_progress_is_the_last_line_of_the_history(tmp_path: Path) -> None:
    assert pool.progress_of(tmp_path) == "starting"
    (tmp_path / "history.jsonl").write_text(
        '{"phase": "adapt", "step": 1}\n{"phase": "adapt", "step": 20}\n'
    )
    assert pool.progress_of(tmp_path) == "adapt step 20"
    (tmp_path / "history.jsonl").write_text('{"phase": "ad')
    assert pool.progress_of(tmp_path) == "running"


def test_a_log_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no folder")
    with pytest.raises(NotADirectoryError):
        _run(LocalPool(2, ()), [_job(tmp_path, "done")])
