"""The command as a whole. Fast: what it says and writes, with runs that are there. Slow: real runs, killed and gone on with."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from PIL import Image

from certvol.benchmark import command
from certvol.benchmark.command import Request
from certvol.benchmark.grid import LocalPool
from certvol.benchmark.plan import Job
from certvol.benchmark.suites import CALTECH_CLASSES, OFFICE_CLASSES
from certvol.benchmark.tables import Cell, Row, Table
from certvol.benchmark.worker import Outcome
from certvol.cli import run
from certvol.data.digit_domains import write_digit_domains
from certvol.errors import Interrupted, UserError
from certvol.methods import config_classes
from certvol.reporting import Silent
from certvol.stopping import StopSignal
from run_folders import write_run

ACCURACY = {"source_only": 0.5, "basic": 0.6, "cvp": 0.7}
TINY = (
    "--training.pretrain_steps 20 --training.cycles 4 --training.cycle_steps 10 --training.batch_size 32 --model.norm mixed "
    "--method.num_samples 4 --training.checkpoint_seconds 0.3 --training.log_every 2"
).split()


@pytest.fixture(scope="module", autouse=True)
def _data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Drawn once."""
    global DATA
    DATA = tmp_path_factory.mktemp("digits")
    write_digit_domains(DATA, ["thin", "bold"])
    yield
    DATA = None


DATA: Path | None = None


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Runs that are over at once; the list tells which were made. A method may be told to fail, or to stop the benchmark."""
    made: list[Job] = []

    def play(pool: LocalPool, jobs: list[Job], ended: object, under_way: object, stop_signal: object) -> int | None:
        for job in jobs:
            made.append(job)
            if os.environ.get("STOP_AT") == job.name:
                return signal.SIGTERM
            if os.environ.get("FORGET") == job.name:
                continue
            if os.environ.get("TERM_AT") == job.name:
                ended(job, Outcome(143, 1.0, "stopped by a SIGTERM from elsewhere"))  # type: ignore[operator]
                continue
            if os.environ.get("FAIL_AT") == job.name:
                ended(job, Outcome(1, 1.0, "it broke"))  # type: ignore[operator]
                continue
            base = ACCURACY[job.method.partition("@")[0]] + job.seed / 100
            write_run(job.folder, [0.5, base + 0.02, base] if "source" not in job.method else [base])
            settings = job.settings.read_text()
            for name, path in (("source", job.source), ("target", job.target)):
                settings = settings.replace(f"{name}: null", f"{name}: {json.dumps(str(path))}", 1)
            (job.folder / "config.yaml").write_text(settings)
            ended(job, Outcome(0, 1.0, None))  # type: ignore[operator]
        return None

    monkeypatch.setattr(LocalPool, "run", play)
    return made


def _benchmark(out: Path, **changed: object) -> command.Summary:
    request = Request(suite="digits", out=out, **{"data": DATA, "tasks": ["T-B"], "seeds": [0, 1], **changed})
    return command.run(request, config_classes(), Silent(), StopSignal())


def _rows(out: Path) -> list[dict[str, str]]:
    with (out / "results.csv").open() as file:
        return list(csv.DictReader(file))


def test_every_run_once_and_all_files(tmp_path: Path, played: list[Job]) -> None:
    summary = _benchmark(tmp_path)
    assert [job.name for job in played][:4] == [
        "T-B source_only seed 0",
        "T-B basic seed 0",
        "T-B cvp seed 0",
        "T-B source_only seed 1",
    ]
    assert summary.failures == []
    assert [row["last"] for row in _rows(tmp_path)] == [
        "0.500000",
        "0.510000",
        "0.600000",
        "0.610000",
        "0.700000",
        "0.710000",
    ]
    assert {row["status"] for row in _rows(tmp_path)} == {"done"}
    assert "**70.5 ± 0.7**" in (tmp_path / "table.md").read_text()
    for name in ("table.tex", "table.csv", "settings/cvp.yaml"):
        assert (tmp_path / name).exists(), name
    before = (tmp_path / "table.md").read_text()
    played.clear()
    _benchmark(tmp_path)
    assert played == []
    assert (tmp_path / "table.md").read_text() == before


@pytest.mark.parametrize("keep", ["chosen", "all"])
def test_finished_runs_keep_no_state(
    tmp_path: Path, played: list[Job], monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    """Neither those of this call nor those of one that was killed before it could remove them."""
    heavy = ("checkpoint/state-000002.safetensors", "cycles/best-bnm.safetensors")
    asked = {"methods": ["basic", "cvp"], "seeds": [0], "settings": {"guard.keep": keep}}

    def write_heavy(job: Job) -> None:
        for name in heavy:
            (job.folder / name).parent.mkdir(exist_ok=True)
            (job.folder / name).write_bytes(b"state")

    _benchmark(tmp_path, **asked)
    done, stopped = played
    for job in played:
        write_heavy(job)
    (stopped.folder / "model.safetensors").rename(tmp_path / "model")
    monkeypatch.setenv("STOP_AT", stopped.name)
    with pytest.raises(Interrupted):
        _benchmark(tmp_path, **asked)
    assert [(done.folder / name).exists() for name in heavy] == [False, keep == "all"]
    assert [(stopped.folder / name).exists() for name in heavy] == [True, True]
    (tmp_path / "model").rename(stopped.folder / "model.safetensors")
    _benchmark(tmp_path, **asked)
    assert [(stopped.folder / name).exists() for name in heavy] == [False, keep == "all"]
    assert {row["status"] for row in _rows(tmp_path)} == {"done"}


def test_a_failure_is_recorded_and_tried_again_by_the_next_call(
    tmp_path: Path, played: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL_AT", "T-B basic seed 0")
    summary = _benchmark(tmp_path)
    assert summary.failures == [("T-B basic seed 0", "it broke")]
    assert next(row for row in _rows(tmp_path) if row["status"] != "done")["status"] == "failed: it broke"
    assert len(played) == 6
    monkeypatch.delenv("FAIL_AT")
    assert _benchmark(tmp_path).failures == []
    assert [job.name for job in played[6:]] == ["T-B basic seed 0"]
    assert next(row for row in _rows(tmp_path) if row["run"] == "runs/T-B/basic/0")["seconds"] == "2.0"


@pytest.mark.parametrize("what", ["FAIL_AT", "TERM_AT"])
def test_the_reason_of_a_failure_stays_until_the_run_is_tried_again(
    what: str, tmp_path: Path, played: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(what, "T-B cvp seed 0")
    reason = _benchmark(tmp_path, methods=["cvp"], seeds=[0]).failures[0][1]
    (tmp_path / "runs" / "T-B" / "cvp" / "0").mkdir()
    (tmp_path / "runs" / "T-B" / "cvp" / "0" / "config.yaml").write_text("")
    for _ in range(2):
        assert _benchmark(tmp_path, methods=["basic"], seeds=[0]).failures == [], "it was not asked for"
        assert [row["status"] for row in _rows(tmp_path)] == ["done", f"failed: {reason}"]


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ({"code": 1}, "failed: why"),
        ({"code": 143}, "stopped"),
        ({"code": -9, "failed": False}, "stopped"),
        ({"code": 143, "failed": True}, "failed: why"),
    ],
)
def test_how_an_attempt_ended_is_read_again(
    line: dict[str, object], status: str, tmp_path: Path, played: list[Job]
) -> None:
    _benchmark(tmp_path, methods=["cvp"], seeds=[0])
    (tmp_path / "runs" / "T-B" / "cvp" / "0" / "model.safetensors").unlink()
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('{"run": "runs/T-B/c\n')  # torn
        file.write(json.dumps({"run": "runs/T-B/cvp/0", "seconds": 1.0, "reason": "why", **line}) + "\n")
    _benchmark(tmp_path, methods=["basic"], seeds=[0])
    assert [row["status"] for row in _rows(tmp_path)] == ["done", status]


def test_what_an_earlier_call_did_not_end_empties_no_table(
    tmp_path: Path, played: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOP_AT", "F-R basic seed 0")
    with pytest.raises(Interrupted):
        _benchmark(tmp_path, tasks=["F-R"], methods=["basic", "cvp"], seeds=[0])
    begun = tmp_path / "runs" / "F-R" / "cvp" / "0"
    begun.mkdir(parents=True)
    (begun / "config.yaml").write_text("")
    _benchmark(tmp_path, methods=["basic"], seeds=[0])
    assert [(row["task"], row["method"], row["status"]) for row in _rows(tmp_path)] == [
        ("F-R", "cvp", "stopped"),
        ("T-B", "basic", "done"),
    ]
    text = (tmp_path / "table.md").read_text()
    assert "F-R" not in text
    assert "cvp" not in text.split("\n\n")[1]
    assert "| basic | small_cnn | last | 60.0 | 60.0 |" in text


def test_a_stop_leaves_a_table_of_what_is_there_and_goes_on(
    tmp_path: Path, played: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOP_AT", "T-B cvp seed 1")
    with pytest.raises(Interrupted, match="the same command goes on") as caught:
        _benchmark(tmp_path)
    assert caught.value.exit_code == 143
    assert [row["status"] for row in _rows(tmp_path)].count("waiting") == 1
    monkeypatch.delenv("STOP_AT")
    _benchmark(tmp_path)
    assert [job.name for job in played[6:]] == ["T-B cvp seed 1"]


def test_cells_add_up_over_several_calls(tmp_path: Path, played: list[Job]) -> None:
    _benchmark(tmp_path, methods=["basic"], seeds=[0])
    _benchmark(tmp_path, methods=["cvp"], seeds=[0], tasks=["F-T"])
    assert [(row["task"], row["method"]) for row in _rows(tmp_path)] == [("T-B", "basic"), ("F-T", "cvp")]


def test_a_varied_setting_gives_rows_and_a_figure(tmp_path: Path, played: list[Job]) -> None:
    _benchmark(tmp_path, methods=["basic", "cvp"], vary=["method.num_samples=4,8"])
    assert {job.method for job in played} == {"basic", "cvp@method.num_samples=4", "cvp@method.num_samples=8"}
    for kind in ("png", "pdf"):
        assert (tmp_path / "figures" / f"method.num_samples.{kind}").stat().st_size > 1000
    assert (tmp_path / "runs" / "T-B" / "cvp@method.num_samples=4" / "0" / "metrics.json").exists()
    before = (tmp_path / "figures" / "method.num_samples.png").read_bytes()
    _benchmark(tmp_path, methods=["cvp"], vary=["method.num_samples=8"])
    assert (tmp_path / "figures" / "method.num_samples.png").read_bytes() == before, (
        "a figure is of all runs that are there"
    )


def test_the_settings_that_were_asked_for_reach_the_runs(tmp_path: Path, played: list[Job]) -> None:
    _benchmark(tmp_path, methods=["cvp"], settings={"training.cycles": "9"}, seeds=[0])
    text = played[0].settings.read_text()
    assert "cycles: 9" in text
    assert "flip: false" in text, "the suite's own"
    with pytest.raises(UserError, match=r"`training.cycles` 9, now it is 10"):
        _benchmark(tmp_path, methods=["cvp"], settings={"training.cycles": "10"}, seeds=[0])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"suite": "digit"}, "did you mean `digits`"),
        ({"workers": 0}, "--workers"),
        ({"seeds": [-1]}, "--seeds"),
        ({"gpu_share": 2.0}, "--gpu-share"),
        ({"selector": "luck"}, "no validator `luck`"),
        ({"baseline": "dann"}, "not among the methods"),
        ({"settings": {"training.cycle": "1"}}, "unknown setting"),
        ({"config": Path("nowhere.yaml")}, "nowhere.yaml"),
        ({"settings": {"model.weights": "/nope"}}, "the weights file /nope is not there"),
        ({"methods": ["cvp@model.weights=/"]}, "the weights file / is no file"),
        ({"settings": {"training.device": "tpu"}}, "`tpu` is no device|`tpu` is not supported"),
        ({"settings": {"model.backbone": "resnet9999"}}, "no backbone `resnet9999`"),
        ({"suite": "office-31", "tasks": None, "data": None}, "--data ROOT"),
    ],
)
def test_mistakes_are_said_before_anything_runs(
    tmp_path: Path, played: list[Job], changed: dict[str, object], said: str
) -> None:
    request = Request(**{"suite": "digits", "out": tmp_path / "out", "tasks": ["T-B"], "data": DATA, **changed})
    with pytest.raises(UserError, match=said):
        command.run(request, config_classes(), Silent(), StopSignal())
    assert played == []
    assert not (tmp_path / "out" / "benchmark.json").exists()


def test_seeds_of_one_method_have_the_same_settings(tmp_path: Path, played: list[Job]) -> None:
    """A mean over seeds of unlike runs would be a figure of nothing."""
    _benchmark(tmp_path, methods=["basic"], seeds=[0])
    with pytest.raises(UserError, match=r"runs/T-B/basic/0 was made with `training.cycles` \d+, now it is 2"):
        _benchmark(tmp_path, methods=["basic"], seeds=[1], settings={"training.cycles": "2"})
    _benchmark(tmp_path, methods=["cvp"], seeds=[1], settings={"training.cycles": "2"})  # another method may differ


def test_a_damaged_file_of_settings_stops_no_other_run(tmp_path: Path, played: list[Job]) -> None:
    _benchmark(tmp_path, methods=["basic", "cvp"])
    (tmp_path / "runs/T-B/cvp/1/config.yaml").write_text("{{{")
    summary = _benchmark(tmp_path, methods=["basic", "cvp"])
    ((name, reason),) = summary.failures
    assert name == "T-B cvp seed 1"
    assert "damaged" in reason
    assert "remove" in reason
    assert [row["status"] for row in _rows(tmp_path)][:3] == ["done"] * 3


def test_a_baseline_may_be_spelt_as_its_method_was(tmp_path: Path, played: list[Job]) -> None:
    asked = {"methods": ["basic", "cvp@method.samples_weight=0.0"], "baseline": "cvp@method.samples_weight=0.0"}
    (gains,) = [t for t in _benchmark(tmp_path, **asked).tables if t.title.startswith("gain")]
    assert gains.title.startswith("gain over cvp@method.samples_weight=0 ")
    assert [row.name for row in gains.rows] == ["basic"]


def test_a_run_that_is_not_over_hinders_no_other(tmp_path: Path, played: list[Job]) -> None:
    _benchmark(tmp_path, methods=["basic"], seeds=[0])
    (tmp_path / "runs/T-B/basic/0/model.safetensors").unlink()
    _benchmark(tmp_path, methods=["basic"], seeds=[1], settings={"training.cycles": "2"})


def test_a_seed_given_twice_is_one(tmp_path: Path, played: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data", str(DATA), "--out", str(tmp_path), "--tasks", "T-B", "--methods", "cvp", "--device", "cpu"]
    assert run(["benchmark", "digits", *words, "--seeds", "0,00, 0"]) == 0
    assert [job.seed for job in played] == [0]
    assert "1 seed per cell" in capsys.readouterr().out


def test_nothing_is_written_into_a_root_without_digits(tmp_path: Path, played: list[Job]) -> None:
    (tmp_path / "root").mkdir()
    _benchmark(tmp_path / "out", methods=["cvp"], data=tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []
    assert (tmp_path / "out/data/thin").is_dir()


def test_folders_of_another_kind_are_refused(tmp_path: Path, played: list[Job]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.yaml").write_text("")
    with pytest.raises(UserError, match="is a run itself"):
        _benchmark(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "benchmark.json").write_text('{"suite": "office-31"}')
    with pytest.raises(UserError, match="holds the benchmark office-31"):
        _benchmark(tmp_path / "b")


def _office(root: Path, classes: Sequence[str] = OFFICE_CLASSES, names: Sequence[str] = ("amazon", "webcam")) -> Path:
    for name in names:
        for number, kind in enumerate(classes):
            (root / name / kind).mkdir(parents=True)
            Image.new("L", (2, 2), number).save(root / name / kind / "0.png")
    return root


def _on(suite: str, data: Path, out: Path, task: str, method: str = "basic") -> command.Summary:
    request = Request(suite=suite, out=out, data=data, tasks=[task], methods=[method])
    return command.run(request, config_classes(), Silent(), StopSignal())


def test_runs_of_another_root_are_refused(tmp_path: Path, played: list[Job]) -> None:
    one, other, out = _office(tmp_path / "one"), _office(tmp_path / "other"), tmp_path / "out"
    _on("office-31", one, out, "A-W")
    with pytest.raises(UserError) as caught:
        _on("office-31", other, out, "A-W")
    for words in (str(out / "runs/A-W/basic/0"), str(one / "amazon"), str(other / "amazon"), "--data", "another --out"):
        assert words in str(caught.value)
    with pytest.raises(UserError, match=r"runs/A-W/basic/0 was made from"):
        _on("office-31", other, out, "W-A", "cvp")  # not asked for now, and in the same tables
    (tmp_path / "link").symlink_to(one)
    _on("office-31", tmp_path / "link", out, "A-W")
    one.rename(tmp_path / "moved")
    _on("office-31", tmp_path / "moved", out, "A-W")
    assert [job.name for job in played] == ["A-W basic seed 0"]


def test_another_root_is_refused_also_where_its_tasks_have_other_domains(tmp_path: Path, played: list[Job]) -> None:
    one = _office(tmp_path / "one", CALTECH_CLASSES)
    other = _office(tmp_path / "other", CALTECH_CLASSES, ("dslr", "caltech"))
    _on("office-caltech", one, tmp_path / "out", "A-W")
    with pytest.raises(UserError, match=r"was made from .*one/amazon, now .*other/amazon"):
        _on("office-caltech", other, tmp_path / "out", "D-C")
    (tmp_path / "out/runs/A-W/basic/0/config.yaml").write_text("{")  # of a run that is not asked for: it stops no other
    _on("office-caltech", other, tmp_path / "out", "D-C")
    assert [job.name for job in played] == ["A-W basic seed 0", "D-C basic seed 0"]


def test_links_to_classes_of_another_root_are_refused_and_stay(tmp_path: Path, played: list[Job]) -> None:
    classes = ["backpack" if name == "back_pack" else name for name in CALTECH_CLASSES]
    one, other = (_office(tmp_path / name, classes) for name in ("one", "other"))
    _on("office-caltech", one, tmp_path / "out", "A-W")
    with pytest.raises(UserError, match=r"was made from .*one/amazon, now .*other/amazon"):
        _on("office-caltech", other, tmp_path / "out", "A-W")
    assert (tmp_path / "out" / "data" / "amazon" / "back_pack").readlink() == one / "amazon" / "backpack"
    (tmp_path / "out").rename(tmp_path / "moved")
    _on("office-caltech", one, tmp_path / "moved", "A-W")
    assert len(played) == 1


def test_a_mistaken_call_leaves_the_folder_free(tmp_path: Path, played: list[Job]) -> None:
    with pytest.raises(UserError, match="does not hold office-31"):
        _on("office-31", tmp_path, tmp_path / "out", "A-W")
    assert not (tmp_path / "out").exists()
    _benchmark(tmp_path / "out")
    with pytest.raises(UserError, match="holds the benchmark digits"):
        _on("office-31", _office(tmp_path / "root"), tmp_path / "out", "A-W")


def test_embedded_images_move_with_the_folder(tmp_path: Path, played: list[Job]) -> None:
    _benchmark(tmp_path / "out", data=None)
    (tmp_path / "out").rename(tmp_path / "moved")
    made = len(played)
    assert not _benchmark(tmp_path / "moved", data=None).failures
    assert len(played) == made


def test_two_at_a_time_in_one_folder_are_refused(tmp_path: Path, played: list[Job]) -> None:
    import fcntl

    with (tmp_path / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another benchmark"):
            _benchmark(tmp_path)


def test_a_file_system_without_locks_is_no_other_benchmark(
    tmp_path: Path, played: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import fcntl

    def none(file: object, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    assert not _benchmark(tmp_path).failures


def test_the_command_line(tmp_path: Path, played: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "benchmark",
        "digits",
        "--data",
        str(DATA),
        "--out",
        str(tmp_path),
        "--tasks",
        "T-B",
        "--methods",
        "basic,cvp",
    ]
    assert run([*words, "--seeds", "0,1", "--select", "bnm", "--training.cycles", "7", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    for text in ("digits: target accuracy", "70.5 ± 0.7", "label-free choice (bnm)", "too few", "table.md"):
        assert text in " ".join(out.split()), text
    assert "cycles: 7" in played[0].settings.read_text()
    for more, said in (
        (["--seeds", "a"], "whole numbers"),
        (["--tusks", "1"], "did you mean `--tasks`"),
        (["--methods", "a,,b"], "commas"),
    ):
        assert run([*words, *more]) == 2
        assert said in capsys.readouterr().err


def test_finished_runs_need_no_weights_file(tmp_path: Path, played: list[Job]) -> None:
    weights = tmp_path / "w.pth"
    weights.write_bytes(b"w")
    changed = {"methods": ["cvp"], "settings": {"model.weights": str(weights)}}
    _benchmark(tmp_path / "out", **changed)
    weights.unlink()
    assert not _benchmark(tmp_path / "out", **changed).failures


@pytest.mark.parametrize("width", [30, 80, 200])
def test_figures_and_words_are_never_broken(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(name: str, published: bool = False) -> Row:
        return Row(
            name,
            [Cell(text="inception_v3.tv_in1k"), *[Cell(0.824, 0.0125)] * 5, Cell(text="+82.4 ± 1.2 points")],
            published,
        )

    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    title, columns = "a title of several words", ["backbone", *"ABCDE", "which is"]
    command.show(
        [Table(title, columns, [row("cvp@method.samples_weight=0"), row("SE", True)], 1, ["A note of words."])]
    )
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    whole = next(line for line in lines if "cvp@" in line)
    assert whole.count("82.4 ± 1.2") == 6
    assert "cvp@method.samples_weight=0" in whole
    assert "inception_v3.tv_in1k" in whole
    table = [line for line in lines if line[:1] in ("┏", "┃", "┡", "│", "├", "└")]
    assert len({len(line) for line in table}) == 1
    assert len(table[0]) == {30: 133, 80: 133, 200: 140}[width], "as wide as needed, and no wider"


def test_a_place_whose_name_is_no_unicode_is_printed(
    tmp_path: Path, played: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    out = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    words = ["--data", str(DATA), "--out", out, "--tasks", "T-B", "--methods", "cvp", "--device", "cpu"]
    assert run(["benchmark", "digits", *words]) == 0
    assert r"caf\xe9/table.md" in capsys.readouterr().out


def test_the_exit_code_tells_a_failure(
    tmp_path: Path, played: list[Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAIL_AT", "T-B cvp seed 0")
    assert (
        run(
            [
                "benchmark",
                "digits",
                "--data",
                str(DATA),
                "--out",
                str(tmp_path),
                "--tasks",
                "T-B",
                "--methods",
                "basic,cvp",
            ]
        )
        == 1
    )
    assert "failed: T-B cvp seed 0: it broke" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("what", "said"), [("TERM_AT", "stopped by a SIGTERM from elsewhere"), ("FORGET", "not done, but waiting")]
)
def test_the_exit_code_tells_a_run_that_is_not_done(
    what: str,
    said: str,
    tmp_path: Path,
    played: list[Job],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(what, "T-B cvp seed 0")
    words = ["benchmark", "digits", "--data", str(DATA), "--out", str(tmp_path), "--tasks", "T-B", "--methods", "cvp"]
    assert run(words) == 1
    assert f"failed: T-B cvp seed 0: {said}" in capsys.readouterr().err
    monkeypatch.delenv(what)
    assert run(words) == 0


def test_suites_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "suites"]) == 0
    out = capsys.readouterr().out
    assert "adaptiope" in out
    assert "W-A" in out


# --- real runs ---------------------------------------------------------------------------------------------------------


def _start(out: Path, *more: str) -> subprocess.Popen[bytes]:
    words = [
        "benchmark",
        "digits",
        "--out",
        str(out),
        "--tasks",
        "T-B",
        "--methods",
        "source_only,cvp",
        "--seeds",
        "0,1",
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "certvol", *words, *TINY, *more],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _until(condition: object, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 300
    while not condition():  # type: ignore[operator]
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < until
        time.sleep(0.02)


def _adapting(out: Path) -> bool:
    history = out / "runs" / "T-B" / "cvp" / "0" / "history.jsonl"
    return history.exists() and '"adapt"' in history.read_text()


def _without_seconds(out: Path) -> list[dict[str, str]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in _rows(out)]


@pytest.fixture(scope="module")
def whole(_data: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A benchmark that nobody disturbed."""
    out = tmp_path_factory.mktemp("benchmark") / "whole"
    assert _start(out, "--workers", "2").wait(600) == 0
    assert [*out.glob("runs/*/*/*/checkpoint"), *out.glob("runs/*/*/*/cycles/best-*")] == [], "states of finished runs"
    return out


@pytest.mark.slow
def test_methods_in_closed_form_can_be_asked_for_again(tmp_path: Path) -> None:
    words = ["benchmark", "digits", "--data", str(DATA), "--out", str(tmp_path), "--tasks", "T-B", "--methods", "coral"]
    for _ in range(2):
        assert run([*words, "--training.pretrain_steps", "20", "--training.batch_size", "32", "--device", "cpu"]) == 0
    assert [row["status"] for row in _rows(tmp_path)] == ["done"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the runs by /proc")
def test_killed_halfway_and_started_again_it_ends_with_the_same_table(whole: Path, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    killed = _start(parts, "--workers", "2")
    _until(lambda: _adapting(parts), killed)
    runs = _children(killed.pid)
    os.killpg(killed.pid, signal.SIGKILL)
    for run_pid in runs[:1]:  # one dies at once, the other is told by the system and saves
        os.kill(run_pid, signal.SIGKILL)
    killed.communicate()
    assert not (parts / "runs" / "T-B" / "cvp" / "1" / "model.safetensors").exists(), "nothing was left to do"

    stopped = _start(parts, "--workers", "2")  # at once: the run that saves still holds its folder
    _until(lambda: len(_children(stopped.pid)) > 0, stopped)
    os.kill(stopped.pid, signal.SIGINT)
    said = stopped.communicate(timeout=300)[1].decode()
    assert stopped.returncode == 130, said
    assert "the same command goes on" in said

    assert _start(parts, "--workers", "2").wait(600) == 0
    for name in ("table.md", "table.tex", "table.csv"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes(), name
    assert _without_seconds(whole) == _without_seconds(parts)
    assert {row["status"] for row in _rows(parts)} == {"done"}
    attempts = [json.loads(line) for line in (parts / "attempts.jsonl").read_text().splitlines()]
    assert {line["code"] for line in attempts} <= {0, 143, -15}


@pytest.mark.slow
def test_the_same_on_a_local_ray_with_a_worker_killed(whole: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    out = tmp_path / "ray"
    process = _start(out, "--ray", "local", "--workers", "2")
    _until(lambda: _adapting(out), process)
    victim = _worker_of(out / "logs" / "T-B" / "cvp" / "0.log")
    os.kill(victim, signal.SIGKILL)
    said = process.communicate(timeout=600)[1].decode()
    assert process.returncode == 0, said
    assert "going on from" in (out / "logs" / "T-B" / "cvp" / "0.log").read_text(), "the run was not taken up again"
    assert (whole / "table.md").read_bytes() == (out / "table.md").read_bytes()
    assert {row["status"] for row in _rows(out)} == {"done"}


def _worker_of(log: Path) -> int:
    """Process id of the Ray worker whose child is the run that prints to this file."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if b"certvol.benchmark.launcher" in words and (entry / "fd" / "1").readlink() == log:
                    return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    raise AssertionError("the run has no process")
