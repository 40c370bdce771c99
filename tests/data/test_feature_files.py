import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certvol.data.feature_files import (
    TargetFeatures,
    check_comparable,
    is_feature_file,
    known_labels,
    open_source_features,
    open_target_features,
    write_features,
)
from certvol.errors import UserError

ROWS = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
NAMES = ["b", "a", "b", "a", "ü", "b"]


def written(folder: Path, name: str = "f.npz", **changed: Any) -> Path:
    arrays: dict[str, Any] = {
        "features": ROWS,
        "paths": np.array([f"{n}/{i}.png" for i, n in enumerate(NAMES)]),
        "labels": np.array(NAMES),
    }
    arrays = {key: value for key, value in {**arrays, **changed}.items() if value is not None}
    np.savez(folder / name, **arrays)
    return folder / name


def test_written_features_are_read_back(tmp_path: Path) -> None:
    write_features(
        tmp_path / "new" / "f.npz", ROWS, ["x", "y", "z", "=u", "v", "w"], NAMES, "made by hand"
    )
    source = open_source_features(tmp_path / "new" / "f.npz")
    assert source.classes == ["a", "b", "ü"]
    assert source.about == "made by hand"
    assert source.dim == 4
    for i, row in enumerate(source.rows):
        assert source.classes[source.labels[i]] == NAMES[row]
        assert source.paths[i] == ["x", "y", "z", "=u", "v", "w"][row]
    assert list(source.labels) == sorted(source.labels)
    with np.load(tmp_path / "new" / "f.npz", allow_pickle=False) as file:
        assert np.array_equal(file["features"], ROWS)


def test_rows_are_ordered_by_content(tmp_path: Path) -> None:
    turned = np.array([5, 2, 0, 4, 1, 3])
    first = open_target_features(written(tmp_path))
    other = open_target_features(
        written(
            tmp_path,
            "g.npz",
            features=ROWS[turned],
            labels=None,
            paths=np.array([str(i) for i in turned]),
        )
    )
    assert np.array_equal(first.features[first.rows], other.features[other.rows])
    assert first.fingerprint == other.fingerprint
    assert [path[2] for path in first.paths] == other.paths


def test_target_features_have_no_labels() -> None:
    assert set(inspect.signature(TargetFeatures).parameters) == {
        "features",
        "rows",
        "paths",
        "fingerprint",
        "stamp",
        "about",
    }


def test_views_numeric_labels_and_missing_names_are_read(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        features=np.stack([ROWS, ROWS + 1], axis=1).astype(np.float64),
        labels=np.arange(6) % 2,
        paths=None,
    )
    source = open_source_features(path)
    assert source.features.shape == (6, 2, 4)
    assert source.features.dtype == np.float32
    assert source.classes == ["0", "1"]
    assert sorted(source.paths) == list("012345")


def test_known_labels_need_the_models_classes(tmp_path: Path) -> None:
    path = written(tmp_path)
    target = open_target_features(path)
    labels = known_labels(path, target.rows, ["a", "b", "u\u0308"])
    assert labels is not None
    assert [["a", "b", "ü"][label] for label in labels] == [NAMES[row] for row in target.rows]
    assert known_labels(path, target.rows, ["a", "b"]) is None
    assert (
        known_labels(written(tmp_path, "n.npz", labels=None), target.rows, ["a", "b", "ü"]) is None
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"features": None, "other": ROWS}, "no array `features`"),
        ({"features": ROWS.ravel()}, "rows x D"),
        ({"features": np.array(["x"] * 6)}, "rows x D"),
        ({"features": np.empty((0, 4))}, "rows x D"),
        ({"features": np.full((6, 4), np.nan)}, "finite"),
        ({"features": np.full((6, 4), 1e300)}, "finite"),
        ({"features": np.array([object()] * 6)}, "cannot be read"),
        ({"paths": np.array(["x"])}, "one per row"),
        ({"labels": np.array(["x"])}, "per row"),
        ({"labels": np.zeros(6)}, "name or whole number"),
        ({"labels": None}, "no labels"),
        ({"labels": np.array(["x"] * 6)}, "only one class"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_an_invalid_file_is_refused_in_words(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        open_source_features(written(tmp_path, **changed))


def test_damaged_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    for content in (
        b"",
        b"no zip at all",
        whole[: len(whole) // 2],
        whole[:200] + b"\xff" * 60 + whole[260:],
    ):
        path.write_bytes(content)
        with pytest.raises(UserError):
            open_source_features(path)
    with pytest.raises(UserError, match="there is no file"):
        open_target_features(tmp_path / "none.npz")
    np.save(tmp_path / "single.npy", ROWS)
    (tmp_path / "single.npy").rename(tmp_path / "single.npz")
    with pytest.raises(UserError, match="single array"):
        open_target_features(tmp_path / "single.npz")


def test_features_of_two_backbones_are_not_comparable(tmp_path: Path) -> None:
    first = open_target_features(written(tmp_path, about=np.array("resnet")))
    with pytest.raises(UserError, match=r"have 4 dimensions, those of the target 3"):
        check_comparable(
            first, open_target_features(written(tmp_path, "g.npz", features=ROWS[:, :3]))
        )
    with pytest.raises(
        UserError, match="of the source were made by resnet, those of the target by vit"
    ):
        check_comparable(
            first, open_target_features(written(tmp_path, "h.npz", about=np.array("vit")))
        )
    check_comparable(first, open_target_features(written(tmp_path, "i.npz")))


def test_a_feature_file_is_recognised_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "folder.npz").mkdir()
    assert is_feature_file(tmp_path / "F.NPZ")
    assert not is_feature_file(tmp_path / "folder.npz")
    assert not is_feature_file("images")


@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_archive_gives_a_user_error_or_is_read(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    np.savez_compressed(
        tmp_path / "whole.npz", features=rng.normal(size=(40, 6)), labels=np.arange(40) % 3
    )
    whole = (tmp_path / "whole.npz").read_bytes()
    refused = 0
    for number in range(25):
        data = bytearray(whole)
        for place in rng.integers(0, len(data), 3):
            data[place] = rng.integers(0, 256)
        damaged = tmp_path / f"{number}.npz"
        damaged.write_bytes(bytes(data))
        try:
            open_source_features(damaged)
        except UserError:  # nothing else may come out
            refused += 1
    assert refused > 5


def test_a_scalar_and_the_label_minus_one_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "scalar.npz", features=np.float32(3), labels=np.array([1]))
    with pytest.raises(UserError, match="rows x D"):
        open_source_features(tmp_path / "scalar.npz")
    np.savez(tmp_path / "mixed.npz", features=np.ones((3, 2)), labels=np.array([-1, 0, 1]))
    with pytest.raises(UserError, match="label -1"):
        open_source_features(tmp_path / "mixed.npz")
