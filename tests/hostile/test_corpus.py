"""On a folder with everything wrong in it, commands use what can be read and count the rest."""

import json
import os
import re
import stat
from pathlib import Path

import numpy as np
import pytest

import certvol
from support.commands import Said, adapt_words, last_sentence, spoken
from support.corpus import INJECTED, Corpus, Pictures
from support.images import write_domain
from support.tables import as_text, paths_of, rows_of


def test_check_counts_the_files_it_leaves_out(clean: Path, corpus: Corpus) -> None:
    said = spoken("check", "--source", str(clean), "--target", str(corpus.root))
    assert said.code == 0
    assert "adaptation can start" in said.out
    assert (
        f"target: unreadable files and folders are left out: {len(corpus.unreadable)} " in said.text
    )
    assert f"target: empty files (0 bytes) are left out: {len(corpus.empty)} " in said.text
    assert f"target: files without an image suffix are ignored: {corpus.passed_over}" in said.text
    assert f"all │ {len(corpus.readable)}" in re.sub(" +", " ", said.out)
    assert "\x1b" not in said.out + said.err
    assert "certvol: all is well" not in [line[:20] for line in said.err.splitlines()]


def test_adapt_uses_what_can_be_read_and_counts_the_rest(
    corpus: Corpus, adapted: tuple[Path, Said]
) -> None:
    out, said = adapted
    assert said.code == 0, said.err
    assert f"{corpus.skipped} unreadable target images were skipped" in said.err
    found = paths_of(out / "predictions.csv")
    assert len(found) == len(set(found))
    assert set(found) == as_text(corpus.readable)


def test_a_skipped_file_name_cannot_forge_a_line_of_adapt(adapted: tuple[Path, Said]) -> None:
    assert not [line for line in adapted[1].err.splitlines() if line.startswith("certvol: ")]
    assert "\x1b" not in adapted[1].err


def test_every_prediction_is_a_number(adapted: tuple[Path, Said]) -> None:
    for row in rows_of(adapted[0] / "predictions.csv"):
        assert row["label"] in ("apple", "leaf", "sky")
        assert 1 / 3 <= float(row["probability"]) <= 1
        assert np.isfinite(float(row["sigma"]))


def test_predict_on_the_folder(corpus: Corpus, adapted: tuple[Path, Said], tmp_path: Path) -> None:
    said = spoken("predict", str(adapted[0]), str(corpus.root), "--out", str(tmp_path / "p.csv"))
    assert said.code == 0, said.err
    found = paths_of(tmp_path / "p.csv", corpus.root)
    assert len(found) == len(set(found))
    assert set(found) == as_text(corpus.readable)
    assert f"{len(corpus.readable)} images predicted" in said.out


def test_predict_counts_everything_it_skips(
    corpus: Corpus, adapted: tuple[Path, Said], tmp_path: Path
) -> None:
    said = spoken("predict", str(adapted[0]), str(corpus.root), "--out", str(tmp_path / "p.csv"))
    assert f"{corpus.skipped} unreadable skipped" in said.out


def test_a_skipped_file_name_cannot_forge_a_line_of_predict(
    corpus: Corpus, adapted: tuple[Path, Said], tmp_path: Path
) -> None:
    words = [
        corpus.path(INJECTED),
        corpus.path(b"names/b\xe9d.jpg"),
        corpus.path(b"links/real.png"),
    ]
    said = spoken("predict", str(adapted[0]), *words, "--out", str(tmp_path / "p.csv"))
    assert said.code == 0
    assert "2 unreadable skipped" in said.out
    assert not [line for line in said.err.splitlines() if line.startswith("certvol: ")]
    assert "\x1b" not in said.err


def test_predicting_only_unreadable_files_is_refused(
    corpus: Corpus, adapted: tuple[Path, Said], tmp_path: Path
) -> None:
    said = spoken(
        "predict", str(adapted[0]), corpus.path(INJECTED), "--out", str(tmp_path / "p.csv")
    )
    assert said.code == 2
    assert "none of the 1 files can be read" in last_sentence(said.err)


def test_predict_takes_a_file_whose_name_looks_like_a_glob(
    corpus: Corpus, adapted: tuple[Path, Said], tmp_path: Path
) -> None:
    name = corpus.path(b"names/[0-9]*?.png")
    assert spoken("predict", str(adapted[0]), name, "--out", str(tmp_path / "p.csv")).code == 0
    assert [row["path"] for row in rows_of(tmp_path / "p.csv")] == [name]


@pytest.mark.parametrize("name", [b"links/pipe.jpg", b"links/zero.jpg", b"links/null.jpg"])
def test_predict_on_a_pipe_or_device_refuses_without_reading_it(
    name: bytes,
    corpus: Corpus,
    adapted: tuple[Path, Said],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Path.read_bytes

    def regular_only(path: Path) -> bytes:
        """Reading a pipe or /dev/zero would never end."""
        assert stat.S_ISREG(path.stat().st_mode), f"would read {path}"
        return whole(path)

    monkeypatch.setattr(Path, "read_bytes", regular_only)
    said = spoken("predict", str(adapted[0]), corpus.path(name), "--out", str(tmp_path / "p.csv"))
    assert said.code == 2
    assert "none of the 1 files can be read" in last_sentence(said.err)


def test_an_output_file_may_have_a_name_that_is_not_unicode(
    corpus: Corpus, adapted: tuple[Path, Said], tmp_path: Path
) -> None:
    out = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.csv")
    said = spoken("predict", str(adapted[0]), corpus.path(b"links/real.png"), "--out", out)
    assert said.code == 0
    assert Path(out).exists()


def test_a_run_works_in_folders_whose_names_are_not_unicode(clean: Path, tmp_path: Path) -> None:
    """After a stop, the names are read from config.yaml, and all states are read again."""
    places = {
        name: Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name + b" caf\xe9\n"))
        for name in (b"t", b"out")
    }
    write_domain(places[b"t"], per_class=3, flat=True)
    assert spoken(*adapt_words(clean, places[b"t"], places[b"out"], model__norm="auto")).code == 0
    (places[b"out"] / "model.safetensors").unlink()
    said = spoken("adapt", "--resume", str(places[b"out"]))
    assert said.code == 0
    assert "resuming from done" in said.err
    assert "is damaged" not in said.err
    assert len(certvol.load(places[b"out"]).predict(list(places[b"t"].glob("*.png"))).labels) == 9
    assert spoken("report", str(places[b"out"])).code == 0
    labelled = write_domain(
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/labelled caf\xe9\n")), per_class=3
    )
    said = spoken("evaluate", str(places[b"out"]), "--data", str(labelled))
    assert said.code == 0
    assert r"caf\xe9\n" in re.sub(r"\s", "", said.out)
    assert len(rows_of(places[b"out"] / "predictions.csv")) == 9


def test_names_with_carriage_returns_stay_in_their_cells(
    adapted: tuple[Path, Said], tmp_path: Path
) -> None:
    images, picture = Corpus(tmp_path / "images"), Pictures(3)
    for name in (
        b"carriage\rreturn.png",
        b"\rfirst.png",
        b"last\r.png",
        b"a\r=1+1.png",
        b"a\r\nb.png",
    ):
        images.good(name, picture.png())
    assert (
        spoken("predict", str(adapted[0]), str(images.root), "--out", str(tmp_path / "p.csv")).code
        == 0
    )
    assert set(paths_of(tmp_path / "p.csv", images.root)) == as_text(images.readable)


CLASSES = (
    b"Leaf",  # beside leaf
    "caf\u00e9".encode(),
    "cafe\u0301".encode(),
    b"b\xe9d",
    b"=1+1",
    b"-x",
    b"@a",
    b'new\nline, "quoted"',
    b"c" * 255,
    b"\x1b[31mred",
    b"'",
)


@pytest.fixture(scope="module")
def odd_classes(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    root = write_domain(tmp_path_factory.mktemp("classes") / "source", per_class=3)
    corpus, picture = Corpus(root), Pictures(7)
    for name in CLASSES:
        for number in range(3):
            corpus.good(name + f"/{number}.png".encode(), picture.png())
    corpus.bad(b"ruined/0.jpg", b"no image")
    corpus.bad(b"ruined/1.jpg", b"")
    corpus.good(b"stray.png", picture.png())
    Path(corpus.path(b"vacant")).mkdir()
    corpus.link(b"again", root / "leaf")
    return corpus


def test_check_reports_classes_that_differ_only_in_case_or_normal_form(
    odd_classes: Corpus, clean: Path
) -> None:
    said = spoken("check", "--source", str(odd_classes.root), "--target", str(clean))
    assert said.code == 0
    assert "the classes 'Leaf', 'leaf' differ only in case" in said.text
    assert "the classes 'cafe\u0301', 'caf\u00e9' differ only in case" in said.text
    assert "classes without a readable image are left out: ruined" in said.text
    assert "images outside class folders are left out: 1 " in said.text
    assert "vacant" in said.text
    assert "\x1b" not in said.out + said.err


def test_classes_may_have_any_name(odd_classes: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "run"
    said = spoken(*adapt_words(odd_classes.root, odd_classes.root, out, training__batch_size=60))
    assert said.code == 0, said.err
    assert "classes without a readable image" in said.err
    assert "\x1b" not in said.out + said.err
    expected = as_text([b"apple", b"leaf", b"sky", *CLASSES])
    labels = {row["label"] for row in rows_of(out / "predictions.csv")}
    assert labels <= expected | {f"'{name}" for name in expected}
    words = ["evaluate", str(out), "--data", str(odd_classes.root)]
    words += ["--json", str(tmp_path / "f.json")]
    (odd_classes.root / "stray.png").rename(tmp_path / "stray.png")
    try:
        said = spoken(*words)
    finally:
        (tmp_path / "stray.png").rename(odd_classes.root / "stray.png")
    assert said.code == 0, said.err
    found = json.loads((tmp_path / "f.json").read_text())
    names = as_text(map(os.fsencode, found["adapted"]["per_class"]))
    assert names == expected
