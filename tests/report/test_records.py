"""Runs of any age and in any state are read; what is wrong with a file costs that file alone."""

import json
from pathlib import Path

import numpy as np
import pytest

from certvol.errors import UserError
from certvol.report.records import number, numbers, read_record, section
from report.runs import NASTY, make_run


def test_a_whole_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    record = read_record(made.path)
    assert record.classes == made.classes
    assert record.images is not None
    assert record.images.paths == made.names
    assert record.images.predicted_N.tolist() == made.predicted_N.tolist()
    assert record.images.true_N is not None
    assert record.images.true_N.tolist() == made.true_N.tolist()
    np.testing.assert_array_equal(record.images.measures["sigma"], made.sigma_N)
    np.testing.assert_array_equal(record.images.measures["entropy"], made.extra["entropy"])
    assert set(record.images.measures) == {"sigma", "probability", "entropy"}  # the empty columns are no measures
    assert record.images.certainty == "sigma"
    assert record.seconds == 75.0
    assert record.settings["training.cycles"] == 3
    assert record.features is not None
    assert record.notes == []


def test_a_run_is_called_by_its_folder_and_a_seed_by_those_above_it_too(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    assert read_record(made.path).name == made.path.name
    place = tmp_path / "F-R" / "cvp" / "0"
    place.parent.mkdir(parents=True)
    made.path.rename(place)
    assert read_record(place).name == "F-R/cvp/0"


def test_hostile_class_names_come_back_unchanged(tmp_path: Path) -> None:
    made = make_run(tmp_path, classes=NASTY, count=40)
    record = read_record(made.path)
    assert record.classes == NASTY
    assert record.images is not None
    assert record.images.predicted_N.tolist() == made.predicted_N.tolist()


def test_without_labels_there_is_no_truth(tmp_path: Path) -> None:
    record = read_record(make_run(tmp_path, labelled=False).path)
    assert record.images is not None
    assert record.images.true_N is None
    assert record.metrics is None


def test_a_method_without_sigma_is_ordered_by_probability(tmp_path: Path) -> None:
    record = read_record(make_run(tmp_path, sigma=False).path)
    assert record.images is not None
    assert record.images.certainty == "probability"
    assert "sigma" not in record.images.measures


FILES = (
    "environment.json history.jsonl timing.jsonl cycles/scores.jsonl metrics.json measures.csv evaluation.json "
    "features.safetensors predictions.csv model.safetensors"
)


@pytest.mark.parametrize("file", FILES.split())
def test_any_file_may_be_missing_or_damaged(tmp_path: Path, file: str) -> None:
    made = make_run(tmp_path)
    (made.path / file).write_bytes(b"\x00\xff{[not this\n,,,\n1\n")
    damaged = read_record(made.path)
    if not file.endswith(".jsonl"):
        assert any(Path(file).name in note for note in damaged.notes)
    (made.path / file).unlink()
    missing = read_record(made.path)
    assert not any("damaged" in note for note in missing.notes)
    for record in (damaged, missing):
        assert record.settings["training.cycles"] == 3
        if file == "measures.csv":
            assert record.images is not None
            assert record.images.true_N is None
        if file == "metrics.json":
            assert record.metrics is None


def test_measures_of_other_images_are_left_out(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    table = made.path / "measures.csv"
    table.write_text(table.read_text().replace("00007.png", "other.png"))
    record = read_record(made.path)
    assert record.images is not None
    assert record.images.true_N is None
    assert "measures.csv is damaged" in record.notes[0]


def test_features_of_images_that_there_are_not_are_left_out(tmp_path: Path) -> None:
    made = make_run(tmp_path, count=30)
    lines = (made.path / "predictions.csv").read_text().splitlines()
    (made.path / "predictions.csv").write_text("\n".join(lines[:20]) + "\n")
    record = read_record(made.path)
    assert record.features is None
    assert any("features.safetensors" in note for note in record.notes)


def test_what_is_no_run_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        read_record(tmp_path)


def test_a_link_that_leads_out_of_the_run_is_refused(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    (made.path / "report.html.part").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="leads out"):
        read_record(made.path)


def test_a_warning_is_shown_once(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    lines = [{"warning": "sigma has collapsed"}, {"warning": "few"}, {"warning": "sigma has collapsed"}, {"other": 1}]
    (made.path / "warnings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"warn')
    assert read_record(made.path).warnings == ["sigma has collapsed", "few"]


def test_numbers_from_files_are_numbers_or_nothing() -> None:
    assert [number(value) for value in (1, 2.5, True, "3", None, float("nan"), float("inf"), [1])] == [
        1.0,
        2.5,
        *[None] * 6,
    ]
    assert numbers("abc") == []
    assert section({"a": {"b": {"c": 1}}}, "a", "b") == {"c": 1}
    assert section({"a": 3}, "a", "b") == {}
    assert section(None) == {}
