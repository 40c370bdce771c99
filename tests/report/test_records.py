"""Runs of any age and state can be read; a damaged file removes only its own content."""

import json
from pathlib import Path

import numpy as np
import pytest

from certvol.errors import UserError
from certvol.report.records import number, numbers, read_record, section
from support.made_runs import NASTY, make_run


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
    # Empty columns are not measures.
    assert set(record.images.measures) == {"sigma", "probability", "entropy"}
    assert record.certainty == "sigma"
    assert record.seconds == 75.0
    assert record.settings["training.cycles"] == 3
    assert record.features is not None
    assert record.notes == []


def test_a_run_is_named_by_its_folder_and_a_seed_also_by_the_folders_above(tmp_path: Path) -> None:
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
    assert record.certainty == "probability"
    assert "sigma" not in record.images.measures


FILES = (
    "environment.json history.jsonl timing.jsonl cycles/scores.jsonl metrics.json measures.csv "
    "evaluation.json "
    "features.safetensors predictions.csv model.safetensors"
)


@pytest.mark.parametrize("file", FILES.split())
def test_any_file_may_be_missing_or_damaged(tmp_path: Path, file: str) -> None:
    made = make_run(tmp_path, measures=file != "predictions.csv")
    (made.path / file).write_bytes(b"\x00\xff{[not this\n,,,\n1\n")
    damaged = read_record(made.path)
    if not file.endswith(".jsonl"):
        assert any(Path(file).name in note for note in damaged.notes)
    (made.path / file).unlink()
    missing = read_record(made.path)
    assert not any("damaged" in note for note in missing.notes)
    for record in (damaged, missing):
        assert record.settings["training.cycles"] == 3
        assert record.classes == made.classes
        assert (record.images is None) == (file == "predictions.csv")
        if record.images is not None:
            assert (record.images.true_N is None) == (file == "measures.csv")
        assert (record.metrics is None) == (file == "metrics.json")


def test_features_of_other_images_are_left_out(tmp_path: Path) -> None:
    made = make_run(tmp_path, count=30)
    table = made.path / "measures.csv"
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:20]))
    record = read_record(made.path)
    assert record.features is None
    assert any("features.safetensors" in note for note in record.notes)


def test_a_folder_without_a_run_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        read_record(tmp_path)


def test_a_link_that_leads_out_of_the_run_is_refused(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    (made.path / "report.html.part").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="leads out"):
        read_record(made.path)


def test_a_warning_is_shown_once_and_a_line_cut_off_is_skipped(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    texts = [{"warning": "sigma has collapsed"}, {"warning": "few"}]
    lines = [json.dumps(line) for line in (*texts, texts[0], {"other": 1})]
    (made.path / "warnings.jsonl").write_text("\n".join(lines) + '\n{"warn')
    assert read_record(made.path).warnings == ["sigma has collapsed", "few"]


def test_only_finite_numbers_are_read_from_files() -> None:
    odd = (True, "3", None, float("nan"), float("inf"), [1])
    assert numbers([1, 2.5, *odd]) == [1.0, 2.5, *[None] * len(odd)]
    assert number(1) == 1.0
    assert numbers("abc") == []
    assert section({"a": {"b": {"c": 1}}}, "a", "b") == {"c": 1}
    assert section({"a": 3}, "a", "b") == section(None) == {}
