"""Whole runs with several sources: images, frozen features and files of features."""

import json
from pathlib import Path

import numpy as np
import pytest

import certvol
from certvol import api
from certvol.cli import _main as cli
from certvol.data.sources import Origins
from certvol.data.target_prior import TargetPrior
from certvol.errors import Interrupted, UserError
from certvol.progress import Silent
from certvol.report.page import write_report
from certvol.runs.folder import RunFolder
from certvol.settings import TrainingConfig, read_settings_file
from certvol.training.planner import Planner, SourceRows
from support.images import tiny, tiny_head, write_domain
from support.reporter import RecordingReporter
from support.run_folders import read_table
from support.stop_at import StopAt


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("office")
    for number, name in enumerate(("a", "b", "t")):
        write_domain(root / name, per_class=8 + 4 * number, shift=10 * number, seed=number)
    return root


@pytest.mark.parametrize("method", ["cvp", "dann", "coral"])
def test_a_run_trains_on_the_union(method: str, office: Path, tmp_path: Path) -> None:
    settings = tiny_head(method__name=method, training__source_shares="2,1")
    sources = [office / "a", office / "b"]
    run = certvol.adapt(sources, office / "t", out=tmp_path / "run", **settings)
    assert len(read_table(run.path / "predictions.csv")) == 48
    assert run.metrics is not None
    kept = read_settings_file(run.path / "config.yaml")
    assert kept["data.source"] == str(office / "a")
    assert kept["data.more_sources"] == str(office / "b")
    page = write_report(run.path, Silent()).read_text()
    assert "a + b" in page


def test_a_folder_of_domains_is_its_domains_without_the_target(
    office: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = certvol.adapt(
        [office / "a", office / "b"], office / "t", out=tmp_path / "1", **tiny_head()
    )
    words = [f"--{key}={value}" for key, value in tiny_head().items()]
    given = ["--source", str(office), "--target", str(office / "t"), "--out", str(tmp_path / "2")]
    assert cli.run(["adapt", *given, *words]) == 0
    assert "source domains: a, b; the target is left out" in capsys.readouterr().err
    predicted = [(path / "predictions.csv").read_bytes() for path in (run.path, tmp_path / "2")]
    assert predicted[0] == predicted[1]


def test_a_stopped_run_ends_with_the_same_bytes(office: Path, tmp_path: Path) -> None:
    sources, settings = [office / "a", office / "b"], tiny(training__checkpoint_seconds=0)
    whole = certvol.adapt(sources, office / "t", out=tmp_path / "whole", **settings)
    with pytest.raises(Interrupted):
        certvol.adapt(
            sources, office / "t", out=tmp_path / "cut", stop_signal=StopAt(18), **settings
        )
    resumed = certvol.adapt(resume=tmp_path / "cut")
    weights = [(run.path / "model.safetensors").read_bytes() for run in (whole, resumed)]
    assert weights[0] == weights[1]


def test_sources_that_changed_places_stop_a_resumed_run(office: Path, tmp_path: Path) -> None:
    """The shares belong to the sources in their order."""
    settings = tiny(training__checkpoint_seconds=0)
    with pytest.raises(Interrupted):
        certvol.adapt(
            [office / "a", office / "b"],
            office / "t",
            out=tmp_path / "run",
            stop_signal=StopAt(18),
            **settings,
        )
    config = RunFolder(tmp_path / "run").config
    text = config.read_text()
    a, b = str(office / "a"), str(office / "b")
    text = text.replace(f"  source: {a}", "  source: X").replace(f"  more_sources: {b}", "  Y")
    config.write_text(
        text.replace("source: X", f"source: {b}").replace("  Y", f"  more_sources: {a}")
    )
    with pytest.raises(UserError, match="the source images changed"):
        certvol.adapt(resume=tmp_path / "run", accept_changes=True)


def test_files_of_features_are_several_sources_too(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    with np.load(files[0]) as arrays:
        content = dict(arrays)
    halves = []
    for number in range(2):
        part = {
            name: array if array.ndim == 0 else array[number::2] for name, array in content.items()
        }
        np.savez(tmp_path / f"{number}.npz", **part)
        halves.append(tmp_path / f"{number}.npz")
    settings = tiny_head()
    settings.pop("model.backbone")
    run = certvol.adapt(halves, files[1], out=tmp_path / "run", **settings)
    assert run.metrics is not None
    assert json.loads((run.path / "metrics.json").read_text())["adapted"]["accuracy"] > 0.3
    with pytest.raises(
        UserError, match=r"another domain is not a \.npz file; use features for all"
    ):
        certvol.adapt([*halves, tmp_path / "run"], files[1], out=tmp_path / "other", **settings)


def test_features_are_those_of_each_source_alone(office: Path, tmp_path: Path) -> None:
    """Runs with one source share the extraction: the cache gets no new features."""
    cache, settings = tmp_path / "cache", tiny_head(data__cache_dir=str(tmp_path / "cache"))
    for name in ("a", "b"):
        certvol.adapt(office / name, office / "t", out=tmp_path / name, **settings)
    before = set(cache.rglob("features.bin"))
    assert len(before) == 3
    certvol.adapt([office / "a", office / "b"], office / "t", out=tmp_path / "c", **settings)
    assert set(cache.rglob("features.bin")) == before


@pytest.mark.parametrize("batches", ["balanced", "plain"])
def test_the_planner_gives_each_source_its_share(batches: str) -> None:
    labels, origins = np.array([0, 1] * 20), np.array([0] * 8 + [1] * 32)
    settings = TrainingConfig(batch_size=16, batches=batches)  # type: ignore[arg-type]
    source = SourceRows(np.arange(40), labels, Origins(origins, np.array([0.5, 0.5])))
    planner = Planner(settings, source, TargetPrior(np.ones(2, dtype=bool)), 20)
    plan = planner.pretraining(0, 0, 5)
    assert (origins[plan.images_SN].mean(axis=1) == 0.5).all()
    plan, _ = planner.labelled_adaptation(0, 0, 5, np.array([0, 1] * 10))
    for images, count in zip(plan.images_SN, plan.num_source_S, strict=True):
        assert origins[images[:count]].mean() == 0.5
    assert planner.trained_shares_C.tolist() == [0.5, 0.5]


def test_check_takes_several_sources(office: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--source", str(office / "a"), "--source", str(office / "b")]
    assert cli.run(["check", *words, "--target", str(office / "t")]) == 0
    assert "all 3 classes" in capsys.readouterr().out
    assert cli.run(["check", "--source", str(office), "--target", str(office / "t")]) == 0
    assert "source domains: a, b; the target is left out" in capsys.readouterr().out


def test_reviewing_needs_the_target_alone(office: Path, tmp_path: Path) -> None:
    sources = [office / "a", office / "b"]
    run = certvol.adapt(sources, office / "t", out=tmp_path / "run", **tiny_head())
    again = certvol.adapt(from_run=run.path, out=tmp_path / "again", training={"cycles": 1})
    kept = read_settings_file(again.path / "config.yaml")
    assert kept["data.more_sources"] == str(office / "b")
    assert api.evaluate(run.path, office / "t", "cpu")["adapted"]["accuracy"] > 0


def test_a_run_warns_of_classes_and_domains_that_are_probably_the_same(tmp_path: Path) -> None:
    one, two = (write_domain(tmp_path / name, seed=i) for i, name in enumerate(("one", "two")))
    (two / "leaf").rename(two / "Leaf")
    reporter = RecordingReporter()
    certvol.adapt([one, two], two, out=tmp_path / "run", reporter=reporter, **tiny())
    assert any("'Leaf', 'leaf' differ only in case" in text for text in reporter.warned)
    assert any("source and target are the same folder" in text for text in reporter.warned)
