"""The page as text: whole by itself, nothing in it executes but our script, and a report never costs a run."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from certvol.errors import Interrupted, UserError
from certvol.report import page
from certvol.report.records import read_record
from certvol.reporting import Silent
from certvol.selection import sign_of_spreading
from report.runs import NASTY, make_run, rewrite_json


class _Markup(HTMLParser):
    """Tags, with their attributes; scripts and styles by content."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: list[tuple[str, dict[str, str | None], str]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("dd", "dt", "td", "th", "li"):
            self.text += " "
        if tag in ("script", "style"):
            self.blocks.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem and self.blocks:
            tag, attributes, before = self.blocks[-1]
            self.blocks[-1] = (tag, attributes, before + data)
        else:
            self.text += data


def _page(path: Path) -> str:
    return page.run_page(read_record(path), Silent())


def _words(text: str) -> str:
    return " ".join(_Markup(text).text.split())


def test_everything_is_in_the_page_and_the_policy_allows_nothing_else(tmp_path: Path) -> None:
    markup = _Markup(_page(make_run(tmp_path).path))
    for tag, attributes in markup.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), f"{tag} {name}"
            if name in ("src", "href", "action", "srcset", "poster", "data"):
                assert str(value).startswith(("#", "data:,")), f"{tag} {name}={value}"
    policy = next(
        a["content"] for tag, a in markup.tags if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy.replace("http-equiv", "")
    executed = [text for tag, attributes, text in markup.blocks if tag == "script" and "type" not in attributes]
    assert len(executed) == 1
    for text in (*executed, next(text for tag, _, text in markup.blocks if tag == "style")):
        assert "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\((?![\"']?\$\{)", text)


def test_hostile_names_are_text(tmp_path: Path) -> None:
    names = [f"{i}{name.replace('/', '∕').replace(chr(0), '')[:120]}.png" for i, name in enumerate(NASTY)] + [
        f"{i}.png" for i in range(20)
    ]
    made = make_run(tmp_path, classes=NASTY, count=len(names), names=names)
    (made.path / "warnings.jsonl").write_text(json.dumps({"warning": "<script>alert('w')</script>"}) + "\n")
    settings = (made.path / "config.yaml").read_text()
    (made.path / "config.yaml").write_text(settings.replace("small_cnn", "'</script><script>alert(3)</script>'"))
    text = _page(made.path)
    markup = _Markup(text)
    assert {tag for tag, _ in markup.tags}.isdisjoint({"img", "b-evil", "iframe", "object", "embed"})
    kinds = [attributes.get("type") for tag, attributes, _ in markup.blocks if tag == "script"]
    assert kinds.count(None) == 1
    data = next(text for tag, attributes, text in markup.blocks if attributes.get("type") == "application/json")
    assert not set("<>&") & set(data)
    parsed = json.loads(data)
    assert parsed["gallery"]["classes"] == NASTY
    assert sorted(parsed["gallery"]["paths"]) == sorted(names)
    for name in (*NASTY[:3], NASTY[8]):
        assert name in markup.text
    assert "line\\nbreak\\rand\\ttab" in markup.text
    assert "\u202e" not in text
    assert "<script>alert('w')</script>" in markup.text


def test_names_that_are_no_unicode_can_be_written(tmp_path: Path) -> None:
    made = make_run(tmp_path, count=12)
    raw = (made.path / "predictions.csv").read_bytes().replace(b"00003.png", b"\xff\xfe.png")
    (made.path / "predictions.csv").write_bytes(raw)
    place = page.write_report(made.path, Silent())
    assert "\\udcff\\udcfe.png" in place.read_text(encoding="utf-8")


def test_without_labels_the_page_says_what_it_leaves_out(tmp_path: Path) -> None:
    text = _page(make_run(tmp_path, labelled=False).path)
    assert "tells no labels, so this page leaves out" in _words(text)
    assert 'id="accepted-accuracy"' not in text
    assert 'id="figure-confusion"' not in text
    assert 'id="figure-sigma"' in text


def test_a_method_without_sigma_says_what_stands_in_for_it(tmp_path: Path) -> None:
    text = _page(make_run(tmp_path, sigma=False, method="basic").path)
    assert "basic has no sigma" in _words(text)
    assert (
        json.loads(next(t for _, a, t in _Markup(text).blocks if a.get("id") == "data"))["gallery"]["certainty"]
        == "probability"
    )


def test_an_older_run_has_a_page_that_names_what_is_missing(tmp_path: Path) -> None:
    made = make_run(tmp_path, measures=False, features=False)
    words = _words(_page(made.path))
    assert "no evaluation.json" in words
    assert "no features.safetensors" in words
    assert "did not write down the label of each image" in words


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    for entry in sorted(made.path.rglob("*"), reverse=True):
        if entry.is_file() and entry.name != "config.yaml":
            entry.unlink()
    words = _words(_page(made.path))
    assert "not complete" in words
    assert "no predictions.csv" in words


def test_images_that_were_moved_can_be_pointed_to(tmp_path: Path) -> None:
    made = make_run(tmp_path, count=12)
    moved = made.target.rename(tmp_path / "moved")
    assert "not where they were" in _words(_page(made.path))
    place = page.write_report(made.path, Silent(), moved)
    text = place.read_text()
    assert "not where they were" not in _words(text)
    assert 'id="sheet-0"' in text
    with pytest.raises(UserError, match="no folder"):
        page.write_report(made.path, Silent(), tmp_path / "nowhere")


def test_the_summary_gives_the_figures_of_the_run(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    accuracy = float((made.predicted_N == made.true_N).mean())
    words = _words(_page(made.path))
    assert f"Source only {50 * accuracy:.1f} %" in words
    assert f"Adapted {100 * accuracy:.1f} %" in words
    assert f"{50 * accuracy:+.1f} points" in words
    assert "cycle 3, the last one" in words
    assert "1 min 15 s" in words


def _warn_of_spreading(path: Path) -> str:
    sign = sign_of_spreading({"classes_in_use": 4.0, "agreement_with_pretrained": 0.7}, {"classes_in_use": 2.0})
    assert sign is not None
    lines = [json.dumps({"warning": warning}) for warning in ("a file cannot be read", sign)]
    (path / "warnings.jsonl").write_text("\n".join(lines) + "\n")
    return sign


@pytest.mark.parametrize(("after", "found"), [(1.0, "a gain"), (0.75, "no change"), (0.5, "a loss")])
def test_a_warning_made_without_labels_is_followed_by_what_the_labels_show(
    tmp_path: Path, after: float, found: str
) -> None:
    made = make_run(tmp_path, features=False)
    with rewrite_json(made.path / "metrics.json") as metrics:
        metrics["source_only"]["accuracy"], metrics["adapted"]["accuracy"] = 0.75, after
    sign = _warn_of_spreading(made.path)
    shown = f"show {found}: 75.0 % right before adaptation, {100 * after:.1f} % after."
    words = _words(_page(made.path))
    assert f"{sign} The target's labels, which training did not see, {shown}" in words
    assert words.count("which training did not see") == 1  # nothing of other warnings


def test_a_warning_stands_alone_where_there_are_no_labels(tmp_path: Path) -> None:
    made = make_run(tmp_path, features=False, labelled=False)
    sign = _warn_of_spreading(made.path)
    words = _words(_page(made.path))
    assert sign in words
    assert "which training did not see" not in words


def test_of_very_many_images_the_most_and_least_certain_are_pictured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page.thumbnails, "MOST_THUMBNAILS", 20)
    made = make_run(tmp_path, count=50)
    text = _page(made.path)
    data = json.loads(next(t for _, a, t in _Markup(text).blocks if a.get("id") == "data"))
    assert len(data["gallery"]["paths"]) == 50
    pictures = data["gallery"]["pictures"]
    assert (pictures["skipFrom"], pictures["skipped"], len(pictures["shapes"])) == (10, 30, 20)
    assert "Of 50 images the 10 most and the 10 least certain have thumbnails" in _words(text)


def test_a_report_never_costs_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_run(tmp_path, count=12)
    told: list[str] = []

    class Listening(Silent):
        def warn(self, text: str) -> None:
            told.append(text)

    def fail(*_: object) -> str:
        raise RuntimeError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr(page, "run_page", fail)
        assert page.report_on_finished(made.path, Listening()) is None
    assert len(told) == 1
    assert "the run is complete" in told[0]
    assert "no such luck" in told[0]
    assert f"certvol report {made.path}" in told[0]

    def stop(*_: object) -> str:
        raise Interrupted("stopped", 130)

    with monkeypatch.context() as patch:
        patch.setattr(page, "run_page", stop)
        with pytest.raises(Interrupted, match="only its report was stopped") as stopped:
            page.report_on_finished(made.path, Listening())
    assert stopped.value.exit_code == 130


def test_a_report_that_is_there_is_kept(tmp_path: Path) -> None:
    made = make_run(tmp_path, count=12)
    place = page.report_on_finished(made.path, Silent())
    assert place is not None
    place.write_text("mine")
    assert page.report_on_finished(made.path, Silent()) == place
    assert place.read_text() == "mine"


def test_runs_are_compared_on_one_page(tmp_path: Path) -> None:
    one = make_run(tmp_path / "a", seed=0)
    two = make_run(tmp_path / "b", seed=1, sigma=False, method="basic", count=40)
    place = page.write_comparison([one.path, two.path], tmp_path / "new" / "compared.html")
    words = _words(place.read_text())
    assert "a/run · b/run" in words  # both folders are called `run`
    for made in (one, two):
        assert f"{100 * float((made.predicted_N == made.true_N).mean()):.1f}" in words
    assert "method.name" in words
    assert "training.cycles" not in words  # the same in both
    assert "These runs have different targets" in words
    with pytest.raises(UserError, match="is a folder"):
        page.write_comparison([one.path, two.path], tmp_path)


def test_a_comparison_says_which_runs_have_no_labels_and_nothing_of_one_target(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "a", labelled=False, count=12), make_run(tmp_path / "b", count=12)
    settings = two.path / "config.yaml"
    settings.write_text(settings.read_text().replace(str(tmp_path / "b"), str(tmp_path / "a")))
    words = _words(page.write_comparison([one.path, two.path], tmp_path / "compared.html").read_text())
    assert "without accuracies: a/run." in words
    assert "different targets" not in words


def test_a_folder_without_any_of_the_images_is_refused(tmp_path: Path) -> None:
    made = make_run(tmp_path, count=12)
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(UserError, match="none of the run's images"):
        page.write_report(made.path, Silent(), tmp_path / "elsewhere")
