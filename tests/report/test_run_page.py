"""The page of a run shows its numbers, and says what is missing and why."""

import json
from pathlib import Path

import pytest

from certvol.progress import Silent
from certvol.report import thumbnails
from certvol.report.records import read_record
from certvol.report.render import with_code
from certvol.report.run_page import run_page
from certvol.scores.validators import spreading_warning
from support.made_runs import MadeRun, make_run, rewrite_json
from support.markup import Markup


def _page(made: MadeRun) -> Markup:
    return Markup(run_page(read_record(made.path), Silent()))


def _ids(page: Markup) -> set[str | None]:
    return {attributes.get("id") for _, attributes in page.tags}


def test_the_overview_has_the_numbers_of_the_run(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    accuracy = float((made.predicted_N == made.true_N).mean())
    words = _page(made).words
    assert f"Before adaptation {50 * accuracy:.1f} %" in words
    assert f"After adaptation {100 * accuracy:.1f} % {50 * accuracy:+.1f} points" in words
    assert "With 90 % accepted 65.0 %" in words
    assert "uses the model after adaptation cycle 3, the last one" in words
    assert "BatchNorm statistics (the norm mode): mixed" in words
    assert "cvp on small_cnn · 60 target images · 3 classes · 75 s" in words
    assert "num_samples 16" in words


def test_pictures_of_a_folder_that_a_strangers_run_names_are_not_shown(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    assert _page(made).data["gallery"]["pictures"] is not None
    private = made.target.rename(tmp_path / "private")
    config = made.path / "config.yaml"
    config.write_text(config.read_text().replace(str(made.target), str(private)))
    page = _page(made)
    assert page.data["gallery"]["pictures"] is None
    assert "You did not make this run on this machine" in page.words
    with rewrite_json(made.path / "environment.json") as environment:
        del environment["origin"]
    assert _page(made).data["gallery"]["pictures"] is None
    shown = Markup(run_page(read_record(made.path), Silent(), private))
    assert shown.data["gallery"]["pictures"] is not None


def test_a_loss_has_no_frame_of_success_and_agrees_with_the_figures_shown(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    with rewrite_json(made.path / "metrics.json") as metrics:
        metrics["source_only"]["accuracy"] = 0.7004
        metrics["adapted"]["accuracy"] = 0.6505
    page = _page(made)
    assert "Before adaptation 70.0 %" in page.words
    assert "After adaptation 65.0 % worse: -5.0 points" in page.words
    frames = [attributes.get("class") or "" for tag, attributes in page.tags if tag == "div"]
    assert "tile worse" in frames
    assert "tile strong" not in frames


def test_what_serves_the_paper_comes_last(tmp_path: Path) -> None:
    page = _page(make_run(tmp_path))
    places = [attributes.get("id") for tag, attributes in page.tags if tag in ("section", "figure")]
    assert places.index("figure-correlations") > places.index("paper") > places.index("settings")


def test_the_page_says_what_sigma_means(tmp_path: Path) -> None:
    meaning = "a wide sigma means that the model is sure"
    assert meaning in _page(make_run(tmp_path / "a")).words
    assert meaning not in _page(make_run(tmp_path / "b", sigma=False)).words


def test_accuracies_of_the_most_certain_images_are_a_table(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    with rewrite_json(made.path / "evaluation.json") as evaluation:
        evaluation["aurc"] = {"sigma": 0.0123}
    words = _page(made).words
    assert "measure 80 % 90 % 95 % AURC certainty volume (sigma) 70.0 65.0 60.0 0.012" in words
    assert "Oscillation 1.50 1.25 times the floor" in words


def test_without_labels_the_page_says_what_it_leaves_out(tmp_path: Path) -> None:
    page = _page(make_run(tmp_path, labelled=False))
    assert "has no labels, so this page leaves out" in page.words
    assert "figure-sigma" in _ids(page)
    assert {"accepted-accuracy", "figure-confusion"}.isdisjoint(_ids(page))


def test_without_sigma_the_page_says_that_the_probability_replaces_it(tmp_path: Path) -> None:
    page = _page(make_run(tmp_path, sigma=False, method="basic"))
    assert "basic has no sigma" in page.words
    assert page.data["gallery"]["certainty"] == "probability"


def test_a_trained_network_has_sigma_but_is_ranked_by_the_probability(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    settings = (made.path / "config.yaml").read_text()
    (made.path / "config.yaml").write_text(settings.replace("train: head", "train: all"))
    words = _page(made).words
    assert "has no sigma" not in words
    assert "it finds errors better than sigma in a network that was trained as a whole" in words


def test_names_between_backticks_are_shown_as_code_and_markup_is_escaped() -> None:
    found = with_code("raise `data.holdout`, or <b>`x<y`</b>")
    assert found == "raise <code>data.holdout</code>, or &lt;b&gt;<code>x&lt;y</code>&lt;/b&gt;"


def test_an_older_run_has_a_page_that_names_what_is_missing(tmp_path: Path) -> None:
    words = _page(make_run(tmp_path, measures=False, features=False)).words
    assert "no evaluation.json" in words
    assert "no features.safetensors" in words
    assert "not saved the label of each image" in words


def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    for entry in made.path.rglob("*"):
        if entry.is_file() and entry.name != "config.yaml":
            entry.unlink()
    words = _page(made).words
    assert "not complete" in words
    assert "no predictions.csv" in words


def test_a_run_on_features_has_no_thumbnails_and_says_why(tmp_path: Path) -> None:
    made = make_run(tmp_path, features=False)
    config = made.path / "config.yaml"
    config.write_text(config.read_text().replace(str(made.target), str(tmp_path / "target.npz")))
    page = _page(made)
    assert "This run was given features, not images" in page.words
    assert page.data["gallery"]["pictures"] is None


def _spreading(made: MadeRun) -> str:
    warning = spreading_warning(
        {"classes_in_use": 4.0, "agreement_with_pretrained": 0.7}, {"classes_in_use": 2.0}
    )
    assert warning is not None
    lines = [json.dumps({"warning": text}) for text in ("a file cannot be read", warning)]
    (made.path / "warnings.jsonl").write_text("\n".join(lines) + "\n")
    return warning


@pytest.mark.parametrize(
    ("after", "effect"), [(1.0, "a gain"), (0.75, "no change"), (0.5, "a loss")]
)
def test_a_warning_made_without_labels_is_followed_by_what_the_labels_show(
    tmp_path: Path, after: float, effect: str
) -> None:
    made = make_run(tmp_path, features=False)
    with rewrite_json(made.path / "metrics.json") as metrics:
        metrics["source_only"]["accuracy"], metrics["adapted"]["accuracy"] = 0.75, after
    warning = _spreading(made)
    words = _page(made).words
    remark = f"show {effect}: 75.0 % right before adaptation, {100 * after:.1f} % after."
    warning = warning.replace("`", "")  # shown as code
    assert f"{warning} The target's labels, which training did not see, {remark}" in words
    assert words.count("which training did not see") == 1  # other warnings have no remark


def test_a_warning_stands_alone_without_labels(tmp_path: Path) -> None:
    made = make_run(tmp_path, features=False, labelled=False)
    warning = _spreading(made)
    words = _page(made).words
    assert warning.replace("`", "") in words  # shown as code
    assert "which training did not see" not in words


def test_only_the_most_and_least_certain_of_very_many_images_have_thumbnails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thumbnails, "MOST_THUMBNAILS", 20)
    page = _page(make_run(tmp_path, count=50))
    assert len(page.data["gallery"]["paths"]) == 50
    pictures = page.data["gallery"]["pictures"]
    assert (pictures["skipFrom"], pictures["skipped"], len(pictures["shapes"])) == (10, 30, 20)
    assert "Only the 10 most and the 10 least certain of 50 images have thumbnails" in page.words


def test_the_verdict_comes_first_with_its_facts_and_says_which_labels_it_used(
    tmp_path: Path,
) -> None:
    made = make_run(tmp_path, labelled=False)
    found = {
        "verdict": "look first",
        "reasons": ["an estimated 71 % of the predictions are correct"],
        "images": 60,
        "source": {"images": 20, "before": 0.9, "after": 0.85},
        "changed": {"images": 6, "share": 0.1},
        "classes": {"apple": {"before": 20, "after": 26}},
        "accuracy": {"estimate": 0.71, "usual_error": 0.08, "labels": 0},
    }
    (made.path / "verdict.json").write_text(json.dumps(found))
    words = _page(made).words
    assert "Overview Look first an estimated 71 %" in words
    assert "The verdict uses no labels of the target." in words
    assert "Estimated accuracy 71 %, usually within 8 points" in words
    assert "Held-out source images 90.0 % of 20 correct before adaptation, 85.0 % after" in words
    found["accuracy"] = {"estimate": 0.92, "usual_error": 0.08, "labels": 100}
    (made.path / "verdict.json").write_text(json.dumps(found))
    words = _page(made).words
    assert "The verdict uses 100 reviewed labels of the target." in words
    assert "Estimated accuracy 92 % Held-out" in words
    assert "Changed predictions 10 % of 60 Predicted images per class" in words
    (made.path / "verdict.json").write_text(json.dumps({**found, "target_images": 5000}))
    words = _page(made).words
    assert "Changed predictions 10 % of 60 sampled images Predictions of sampled images" in words
