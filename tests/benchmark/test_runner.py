"""A benchmark's plan, results and messages, with played runs; test_real_runs.py has real ones."""

import errno
import fcntl
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from certvol.benchmark.plan import BenchmarkOptions
from certvol.benchmark.pool import JobOutcome
from certvol.benchmark.runner import Summary, run
from certvol.benchmark.suites import CALTECH_CLASSES, OFFICE_CLASSES
from certvol.errors import Interrupted, UserError
from certvol.progress import Silent, StopSignal
from support.played import Played
from support.tables import rows_of

Benchmark = Callable[..., Summary]


@pytest.fixture
def benchmark(tmp_path: Path, digits: Path, played: Played) -> Benchmark:
    """Run a benchmark on two domains of digits, in `tmp_path` unless `out` is given."""

    def call(**changed: Any) -> Summary:
        options = {"suite": "digits", "out": tmp_path, "data": digits, "tasks": ["T-B"]}
        return run(
            BenchmarkOptions(**{**options, "seeds": [0, 1], **changed}), Silent(), StopSignal()
        )

    return call


def _rows(out: Path) -> list[dict[str, str]]:
    return rows_of(out / "results.csv")


def _statuses(out: Path) -> list[str]:
    return [row["status"] for row in _rows(out)]


def test_every_run_is_made_once(tmp_path: Path, benchmark: Benchmark, played: Played) -> None:
    summary = benchmark()
    first = ["T-B source_only seed 0", "T-B basic seed 0", "T-B cvp seed 0"]
    assert played.names[:4] == [*first, "T-B source_only seed 1"]
    assert summary.failures == []
    accuracies = [float(row["last"]) for row in _rows(tmp_path)]
    assert accuracies == pytest.approx([0.5, 0.51, 0.6, 0.61, 0.7, 0.71])
    assert set(_statuses(tmp_path)) == {"done"}
    assert "**70.5 ± 0.7**" in (tmp_path / "table.md").read_text()
    for name in ("table.tex", "table.csv", "settings/cvp.yaml"):
        assert (tmp_path / name).exists(), name
    before = (tmp_path / "table.md").read_text()
    played.jobs.clear()
    benchmark()
    assert played.jobs == []
    assert (tmp_path / "table.md").read_text() == before


def test_a_task_with_several_sources_gets_all_their_folders(
    tmp_path: Path, benchmark: Benchmark, played: Played
) -> None:
    benchmark(tasks=["T+F-B"], methods=["basic"], seeds=[0])
    (job,) = played.jobs
    assert [place.name for place in (*job.sources, job.target)] == ["thin", "fonts", "bold"]
    assert job.folder == tmp_path / "runs" / "T+F-B" / "basic" / "0"


@pytest.mark.parametrize("keep", ["chosen", "all"])
def test_finished_runs_keep_no_checkpoints(
    tmp_path: Path, benchmark: Benchmark, played: Played, keep: str
) -> None:
    """This call's are removed, and those of a call that was killed before it could."""
    heavy = ("checkpoint/state-000002.safetensors", "cycles/best-bnm.safetensors")
    asked = {"methods": ["basic", "cvp"], "seeds": [0], "settings": {"guard.keep": keep}}
    benchmark(**asked)
    done, stopped = played.jobs
    for job in played.jobs:
        for name in heavy:
            (job.folder / name).parent.mkdir(exist_ok=True)
            (job.folder / name).write_bytes(b"state")
    (stopped.folder / "model.safetensors").rename(tmp_path / "model")
    played.ends[stopped.name] = JobOutcome("stopped", 143, 1.0)
    with pytest.raises(Interrupted):
        benchmark(**asked)
    assert [(done.folder / name).exists() for name in heavy] == [False, keep == "all"]
    assert [(stopped.folder / name).exists() for name in heavy] == [True, True]
    (tmp_path / "model").rename(stopped.folder / "model.safetensors")
    benchmark(**asked)
    assert [(stopped.folder / name).exists() for name in heavy] == [False, keep == "all"]
    assert set(_statuses(tmp_path)) == {"done"}


def test_a_failed_run_is_recorded_and_tried_again_by_the_next_call(
    tmp_path: Path, benchmark: Benchmark, played: Played
) -> None:
    played.ends["T-B basic seed 0"] = JobOutcome("failed", 1, 1.0, "it broke")
    assert benchmark().failures == [("T-B basic seed 0", "it broke")]
    assert "failed: it broke" in _statuses(tmp_path)
    assert len(played.jobs) == 6, "the others ran"
    played.ends.clear()
    assert benchmark().failures == []
    assert played.names[6:] == ["T-B basic seed 0"]
    row = next(row for row in _rows(tmp_path) if row["run"] == "runs/T-B/basic/0")
    assert row["seconds"] == "2.0", "of both attempts"


@pytest.mark.parametrize("begun", [True, False])
def test_a_failure_stays_recorded_until_the_run_is_tried_again(
    begun: bool, tmp_path: Path, benchmark: Benchmark, played: Played
) -> None:
    played.ends["T-B cvp seed 0"] = JobOutcome("died", 143, 1.0, "killed by SIGTERM")
    failures = benchmark(methods=["cvp"], seeds=[0]).failures
    assert failures == [("T-B cvp seed 0", "killed by SIGTERM")]
    if begun:
        (tmp_path / "runs/T-B/cvp/0").mkdir()
        (tmp_path / "runs/T-B/cvp/0/config.yaml").write_text("")
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('{"run": "runs/T-B/c')  # by a kill
    assert benchmark(methods=["basic"], seeds=[0]).failures == [], "it was not asked for"
    assert _statuses(tmp_path) == ["done", "failed: killed by SIGTERM"]


def test_unfinished_runs_of_an_earlier_call_are_in_no_table(
    tmp_path: Path, benchmark: Benchmark, played: Played
) -> None:
    played.ends["F-R basic seed 0"] = JobOutcome("stopped", 143, 1.0)
    with pytest.raises(Interrupted):
        benchmark(tasks=["F-R"], methods=["basic", "cvp"], seeds=[0], data=None)
    begun = tmp_path / "runs" / "F-R" / "cvp" / "0"
    begun.mkdir(parents=True)
    (begun / "config.yaml").write_text("")
    copy = tmp_path / "runs" / "F-R" / "cvp.old" / "0"
    copy.mkdir(parents=True)
    (copy / "config.yaml").write_text("")
    benchmark(methods=["basic"], seeds=[0])
    rows = [(row["task"], row["method"], row["status"]) for row in _rows(tmp_path)]
    assert rows == [("F-R", "cvp", "stopped"), ("T-B", "basic", "done")]
    text = (tmp_path / "table.md").read_text()
    assert "F-R" not in text
    assert "cvp" not in text.split("\n\n")[1]
    assert "| basic | small_cnn | last | 60.0 | 60.0 |" in text


def test_a_stopped_benchmark_writes_its_tables_and_resumes(
    tmp_path: Path, benchmark: Benchmark, played: Played
) -> None:
    played.ends["T-B cvp seed 1"] = JobOutcome("stopped", 143, 1.0)
    with pytest.raises(Interrupted, match="the same command resumes") as caught:
        benchmark()
    assert caught.value.exit_code == 143
    assert _statuses(tmp_path).count("waiting") == 1
    played.ends.clear()
    benchmark()
    assert played.names[6:] == ["T-B cvp seed 1"]


def test_calls_with_one_folder_add_up(tmp_path: Path, benchmark: Benchmark) -> None:
    benchmark(methods=["basic"], seeds=[0])
    benchmark(methods=["cvp"], seeds=[0], tasks=["F-T"], data=None)
    rows = [(row["task"], row["method"]) for row in _rows(tmp_path)]
    assert rows == [("T-B", "basic"), ("F-T", "cvp")]


def test_a_varied_setting_gives_rows_and_a_figure(
    tmp_path: Path, benchmark: Benchmark, played: Played
) -> None:
    benchmark(methods=["basic", "cvp"], vary=["method.num_samples=4,8"])
    varied = {"cvp@method.num_samples=4", "cvp@method.num_samples=8"}
    assert {job.method for job in played.jobs} == {"basic", *varied}
    assert (tmp_path / "runs/T-B/cvp@method.num_samples=4/0/metrics.json").exists()
    figure = tmp_path / "figures" / "method.num_samples.png"
    before = figure.read_bytes()
    assert figure.with_suffix(".pdf").exists()
    benchmark(methods=["cvp"], vary=["method.num_samples=8"])
    assert figure.read_bytes() == before, "a figure shows all finished runs"


def test_settings_reach_the_runs(benchmark: Benchmark, played: Played) -> None:
    benchmark(methods=["cvp"], settings={"training.cycles": "9"}, seeds=[0])
    text = played.jobs[0].settings.read_text()
    assert "cycles: 9" in text
    assert "flip: false" in text, "the suite's own"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"suite": "digit"}, "did you mean `digits`"),
        ({"workers": 0}, "--workers"),
        ({"baseline": "dann"}, "--baseline dann is not one of the methods"),
        ({"settings": {"training.cycle": "1"}}, "unknown setting"),
        ({"config": Path("nowhere.yaml")}, "nowhere.yaml"),
        ({"settings": {"model.weights": "/nope"}}, "weights file /nope not found"),
        ({"methods": ["cvp@model.weights=/"]}, "weights file / is not a file"),
        ({"settings": {"training.device": "tpu"}}, "tpu"),
        ({"settings": {"model.backbone": "resnet9999"}}, "resnet9999"),
        ({"suite": "office-31", "tasks": None, "data": None}, "--data ROOT"),
        ({"suite": "office-31", "tasks": ["A-W"]}, "does not hold office-31"),
    ],
)
def test_mistakes_are_reported_before_anything_is_written(
    tmp_path: Path, benchmark: Benchmark, changed: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        benchmark(out=tmp_path / "out", **changed)
    assert not (tmp_path / "out").exists()


def test_all_seeds_of_a_method_need_the_same_settings(benchmark: Benchmark) -> None:
    benchmark(methods=["basic"], seeds=[0])
    other = {"training.cycles": "2"}
    message = r"runs/T-B/basic/0 was made with `training.cycles` \d+, now it is 2"
    with pytest.raises(UserError, match=message):
        benchmark(methods=["basic"], seeds=[1], settings=other)
    benchmark(methods=["cvp"], seeds=[1], settings=other)  # another method may differ


def test_an_unfinished_earlier_run_may_have_other_settings(
    tmp_path: Path, benchmark: Benchmark
) -> None:
    benchmark(methods=["basic"], seeds=[0])
    (tmp_path / "runs/T-B/basic/0/model.safetensors").unlink()
    benchmark(methods=["basic"], seeds=[1], settings={"training.cycles": "2"})


def test_a_damaged_run_does_not_stop_the_others(tmp_path: Path, benchmark: Benchmark) -> None:
    benchmark(methods=["basic", "cvp"])
    (tmp_path / "runs/T-B/cvp/1/config.yaml").write_text("{{{")
    ((name, reason),) = benchmark(methods=["basic", "cvp"]).failures
    assert name == "T-B cvp seed 1"
    assert "cannot read its files" in reason
    assert _statuses(tmp_path)[:3] == ["done"] * 3


def test_a_baseline_may_be_spelled_as_its_method_was(benchmark: Benchmark) -> None:
    name = "cvp@method.samples_weight=0.0"
    summary = benchmark(methods=["basic", name], baseline=name)
    gains = next(table for table in summary.tables if table.title.startswith("gain"))
    assert gains.title.startswith("gain over cvp@method.samples_weight=0 ")
    assert [row.name for row in gains.rows] == ["basic"]


def test_digits_are_not_written_into_a_data_root(tmp_path: Path, benchmark: Benchmark) -> None:
    (tmp_path / "root").mkdir()
    benchmark(out=tmp_path / "out", methods=["cvp"], data=tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []
    assert (tmp_path / "out/data/thin").is_dir()


def _write_office(root: Path, classes: Sequence[str] = OFFICE_CLASSES) -> Path:
    for name in ("amazon", "webcam"):
        for number, kind in enumerate(classes):
            (root / name / kind).mkdir(parents=True)
            Image.new("L", (2, 2), number).save(root / name / kind / "0.png")
    return root


def test_runs_on_another_root_are_refused(
    tmp_path: Path, benchmark: Benchmark, played: Played
) -> None:
    one, other = _write_office(tmp_path / "one"), _write_office(tmp_path / "other")
    office = {"suite": "office-31", "out": tmp_path / "out", "methods": ["basic"], "seeds": [0]}
    benchmark(**office, data=one, tasks=["A-W"])
    with pytest.raises(UserError, match="were made from"):
        benchmark(**office, data=other, tasks=["W-A"])
    one.rename(tmp_path / "moved")
    benchmark(**office, data=tmp_path / "moved", tasks=["A-W"])
    assert played.names == ["A-W basic seed 0"]
    with pytest.raises(UserError, match="holds the benchmark office-31"):
        benchmark(out=tmp_path / "out")


def test_classes_by_other_names_are_linked_and_the_folder_can_move(
    tmp_path: Path, benchmark: Benchmark, played: Played
) -> None:
    classes = ["backpack" if name == "back_pack" else name for name in CALTECH_CLASSES]
    root = _write_office(tmp_path / "root", classes)
    caltech = {"suite": "office-caltech", "data": root, "tasks": ["A-W"], "seeds": [0]}
    benchmark(**caltech, out=tmp_path / "out")
    made = len(played.jobs)
    link = tmp_path / "out" / "data" / "amazon" / "back_pack"
    assert link.readlink() == root / "amazon" / "backpack"
    assert played.jobs[0].sources == (link.parent,)
    (tmp_path / "out").rename(tmp_path / "moved")
    benchmark(**caltech, out=tmp_path / "moved")
    assert len(played.jobs) == made


def test_runs_on_images_that_changed_are_not_averaged(tmp_path: Path, benchmark: Benchmark) -> None:
    root = _write_office(tmp_path / "office")
    office = {"suite": "office-31", "data": root, "out": tmp_path / "out", "methods": ["basic"]}
    benchmark(**office, tasks=["W-A"], seeds=[0])
    Image.new("L", (2, 2)).save(root / "amazon" / "mug" / "more.png")
    with pytest.raises(UserError, match=r"amazon were added, .* since the run runs/W-A/basic/0"):
        benchmark(**office, tasks=["W-A"], seeds=[0, 1])
    shutil.rmtree(tmp_path / "out" / "runs" / "W-A")
    benchmark(**office, tasks=["W-A"], seeds=[0, 1])


def test_two_benchmarks_in_one_folder_are_refused(tmp_path: Path, benchmark: Benchmark) -> None:
    with (tmp_path / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another benchmark"):
            benchmark()


def test_a_file_system_without_locks_works(
    benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: object, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    assert not benchmark().failures


def test_finished_runs_need_no_weights_file(tmp_path: Path, benchmark: Benchmark) -> None:
    weights = tmp_path / "w.pth"
    weights.write_bytes(b"w")
    settings = {"model.weights": str(weights)}
    benchmark(methods=["cvp"], settings=settings)
    weights.unlink()
    assert not benchmark(methods=["cvp"], settings=settings).failures
