"""What a run that continues from another one must not change, or warns of."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import certvol
from certvol.errors import UserError
from certvol.predict.new_images import PredictOptions, predict
from certvol.progress import Silent
from support.images import tiny, write_noise
from support.reporter import RecordingReporter

Domains = tuple[Path, Path]


@pytest.fixture
def first(folders: Domains, tmp_path: Path) -> Path:
    return certvol.adapt(*folders, out=tmp_path / "first", **tiny()).path


def test_another_share_of_held_out_images_is_refused(first: Path, tmp_path: Path) -> None:
    """Images that trained the model would judge it."""
    with pytest.raises(UserError, match=r"keeps `data\.holdout` 0\.1; leave"):
        certvol.adapt(from_run=first, out=tmp_path / "run", data={"holdout": 0.3})
    assert not (tmp_path / "run").exists()


def test_another_source_gives_a_warning(folders: Domains, first: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(folders[0], source)
    same = RecordingReporter()
    certvol.adapt(source, from_run=first, out=tmp_path / "same", reporter=same)
    assert not any("is not the one that trained" in text for text in same.warned)
    write_noise(source / "apple" / "more.png", seed=5)
    other = RecordingReporter()
    certvol.adapt(source, from_run=first, out=tmp_path / "other", reporter=other)
    assert any("is not the one that trained" in text for text in other.warned)


def _write_features(path: Path, about: str, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    labels = np.repeat(["a", "b"], 12)
    rows = rng.normal(size=(24, 6)) + (labels == "b")[:, None]
    np.savez(path, features=rows.astype(np.float32), labels=labels, about=np.array(about))
    return path


def test_features_of_another_backbone_are_refused(tmp_path: Path) -> None:
    source, target = (_write_features(tmp_path / f"{i}.npz", "this net", i) for i in (0, 1))
    others = (_write_features(tmp_path / f"{i}.npz", "that net", i) for i in (2, 3))
    settings = {k: v for k, v in tiny().items() if not k.startswith("model.")}
    first = certvol.adapt(source, target, out=tmp_path / "first", **settings).path
    with pytest.raises(UserError, match=r"made by that net, those of the run .* by this net"):
        certvol.adapt(next(others), next(others), from_run=first, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    certvol.adapt(from_run=first, out=tmp_path / "run")


def test_rows_of_the_same_name_in_two_files_are_refused(tmp_path: Path) -> None:
    source, target = (_write_features(tmp_path / f"{i}.npz", "", i) for i in (0, 1))
    settings = {k: v for k, v in tiny().items() if not k.startswith("model.")}
    run = certvol.adapt(source, target, out=tmp_path / "run", **settings).path
    words = [str(source), str(target)]
    with pytest.raises(UserError, match=r"both have a row named \d+, which"):
        predict(PredictOptions(str(run), words, str(tmp_path / "p.csv")), Silent())
    assert not (tmp_path / "p.csv").exists()
    found = predict(PredictOptions(str(run), [words[0]] * 2, str(tmp_path / "p.csv")), Silent())
    assert len(found.paths) == 24
