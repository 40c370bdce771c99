"""A folder with everything wrong in it, through the commands: what can be read is used, the rest is skipped and counted."""

import contextlib
import csv
import io
import json
import os
import re
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from corpus import INJECTED, Corpus, Pictures, write_corpus

import certvol
from certvol.cli import run
from certvol.data import folders
from certvol.data.folders import labels_of, scan
from certvol.tables import unquoted
from images import TINY, write_domain

SETTINGS = [word for key, value in TINY.items() for word in (f"--{key}", str(value))]


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """All of it, tables unfolded."""
        return " ".join(re.sub("[│┃]", " ", self.out + self.err).split())


def spoken(*arguments: str) -> Said:
    """What a command prints, on streams as a terminal has them: stdout takes no bytes that are not Unicode."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    said = Said(code, out.buffer.getvalue().decode(), err.buffer.getvalue().decode())
    assert "Traceback" not in said.err
    return said


def one_sentence(said: Said) -> str:
    lines = [line for line in said.err.splitlines() if line.startswith("certvol: ")]
    assert len(lines) == 1, said.err
    return lines[0]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, strict=True))
    assert all(None not in row and None not in row.values() for row in rows)
    return rows


def paths_of(path: Path, below: Path | None = None) -> list[bytes]:
    """The files a table is about, as bytes; `./` before a name that looks like a formula is no part of it."""
    found = [os.fsencode(unquoted(row["path"]).removeprefix("./")) for row in rows_of(path)]
    return found if below is None else [name.removeprefix(os.fsencode(below) + b"/") for name in found]


def adapting(source: Path, target: Path, out: Path, *more: str) -> list[str]:
    return ["adapt", "--source", str(source), "--target", str(target), "--out", str(out), *SETTINGS, *more]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_domain(tmp_path_factory.mktemp("clean") / "source")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "target")


@pytest.fixture(scope="module")
def adapted(clean: Path, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Said]]:
    """A run on the corpus, and what it said."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CERTVOL_CACHE", str(tmp_path_factory.mktemp("cache")))
        out = tmp_path_factory.mktemp("adapted") / "run"
        yield out, spoken(*adapting(clean, corpus.root, out))


# --- everything at once


def test_check_counts_what_it_leaves_out(clean: Path, corpus: Corpus) -> None:
    said = spoken("check", "--source", str(clean), "--target", str(corpus.root))
    assert said.code == 0
    assert "adaptation can start" in said.out
    assert f"target: {len(corpus.unreadable)} files or folders cannot be read and are left out" in said.text
    assert f"target: {len(corpus.empty)} files are empty (0 bytes)" in said.text
    assert f"target: {corpus.passed_over} files have no image suffix" in said.text
    assert f"all │ {len(corpus.readable)}" in re.sub(" +", " ", said.out)
    assert "\x1b" not in said.out + said.err
    assert "certvol: all is well" not in [line[:20] for line in said.err.splitlines()]


def test_adapt_uses_what_can_be_read_and_counts_the_rest(corpus: Corpus, adapted: tuple[Path, Said]) -> None:
    out, said = adapted
    assert said.code == 0, said.err
    assert f"{corpus.skipped} unreadable target images were skipped" in said.err
    found = paths_of(out / "predictions.csv")
    assert len(found) == len(set(found))
    assert set(found) == corpus.readable


def test_a_name_that_adapt_skips_cannot_write_lines_of_its_own(adapted: tuple[Path, Said]) -> None:
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
    assert set(found) == corpus.readable
    assert f"{len(corpus.readable)} images predicted" in said.out


def test_predict_counts_everything_it_skips(corpus: Corpus, adapted: tuple[Path, Said], tmp_path: Path) -> None:
    said = spoken("predict", str(adapted[0]), str(corpus.root), "--out", str(tmp_path / "p.csv"))
    assert f"{corpus.skipped} unreadable skipped" in said.out


def test_a_name_that_predict_skips_cannot_write_lines_of_its_own(
    corpus: Corpus, adapted: tuple[Path, Said], tmp_path: Path
) -> None:
    words = [corpus.path(INJECTED), corpus.path(b"names/b\xe9d.jpg"), corpus.path(b"links/real.png")]
    said = spoken("predict", str(adapted[0]), *words, "--out", str(tmp_path / "p.csv"))
    assert said.code == 0
    assert "2 unreadable skipped" in said.out
    assert not [line for line in said.err.splitlines() if line.startswith("certvol: ")]
    assert "\x1b" not in said.err


def test_none_readable_is_one_sentence(corpus: Corpus, adapted: tuple[Path, Said], tmp_path: Path) -> None:
    said = spoken("predict", str(adapted[0]), corpus.path(INJECTED), "--out", str(tmp_path / "p.csv"))
    assert said.code == 2
    assert "none of the 1 files can be read" in one_sentence(said)


def test_predict_takes_names_with_globs_in_them_as_they_are(
    corpus: Corpus, adapted: tuple[Path, Said], tmp_path: Path
) -> None:
    name = corpus.path(b"names/[0-9]*?.png")
    assert spoken("predict", str(adapted[0]), name, "--out", str(tmp_path / "p.csv")).code == 0
    assert [row["path"] for row in rows_of(tmp_path / "p.csv")] == [name]


@pytest.mark.parametrize("name", [b"links/pipe.jpg", b"links/zero.jpg", b"links/null.jpg"])
def test_predict_on_a_pipe_or_device_refuses_without_reading_it(
    name: bytes, corpus: Corpus, adapted: tuple[Path, Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Path.read_bytes

    def regular_only(path: Path) -> bytes:
        """A pipe would be waited for and /dev/zero read for ever: neither may happen in a test."""
        assert stat.S_ISREG(path.stat().st_mode), f"would read {path}"
        return whole(path)

    monkeypatch.setattr(Path, "read_bytes", regular_only)
    said = spoken("predict", str(adapted[0]), corpus.path(name), "--out", str(tmp_path / "p.csv"))
    assert said.code == 2
    assert "none of the 1 files can be read" in one_sentence(said)


def test_an_output_whose_name_is_no_unicode_is_written(
    corpus: Corpus, adapted: tuple[Path, Said], tmp_path: Path
) -> None:
    out = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.csv")
    said = spoken("predict", str(adapted[0]), corpus.path(b"links/real.png"), "--out", out)
    assert said.code == 0
    assert Path(out).exists()


def test_a_run_whose_folders_names_are_no_unicode(clean: Path, tmp_path: Path) -> None:
    """Also after a stop: the names go through config.yaml, and all tensors are read again. A trial reads states of its own."""
    places = {name: Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name + b" caf\xe9\n")) for name in (b"t", b"out")}
    write_domain(places[b"t"], per_class=3, flat=True)
    assert spoken(*adapting(clean, places[b"t"], places[b"out"], "--model.norm", "auto")).code == 0
    (places[b"out"] / "model.safetensors").unlink()
    said = spoken("adapt", "--resume", str(places[b"out"]))
    assert said.code == 0
    assert "going on from done" in said.err
    assert "cannot be used" not in said.err
    assert len(certvol.load(places[b"out"]).predict(list(places[b"t"].glob("*.png"))).labels) == 9
    assert spoken("report", str(places[b"out"])).code == 0
    labelled = write_domain(Path(os.fsdecode(os.fsencode(tmp_path) + b"/labelled caf\xe9\n")), per_class=3)
    said = spoken("evaluate", str(places[b"out"]), "--data", str(labelled))
    assert said.code == 0
    assert r"caf\xe9\n" in re.sub(r"\s", "", said.out)
    assert len(rows_of(places[b"out"] / "predictions.csv")) == 9


def test_names_with_carriage_returns_come_back(adapted: tuple[Path, Said], tmp_path: Path) -> None:
    images, picture = Corpus(tmp_path / "images"), Pictures(3)
    for name in (b"carriage\rreturn.png", b"\rfirst.png", b"last\r.png", b"a\r=1+1.png", b"a\r\nb.png"):
        images.good(name, picture.png())
    assert spoken("predict", str(adapted[0]), str(images.root), "--out", str(tmp_path / "p.csv")).code == 0
    assert set(paths_of(tmp_path / "p.csv", images.root)) == images.readable


# --- the source


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


def test_check_tells_classes_that_differ_in_case_or_normal_form_only(odd_classes: Corpus, clean: Path) -> None:
    said = spoken("check", "--source", str(odd_classes.root), "--target", str(clean))
    assert said.code == 0
    assert "'Leaf', 'leaf' are different classes" in said.text
    assert "'cafe\u0301', 'caf\u00e9' are different classes" in said.text
    assert "1 classes have no readable image and are left out (ruined)" in said.text
    assert "1 images lie in no class folder" in said.text
    assert "vacant" in said.text
    assert "\x1b" not in said.out + said.err


def test_classes_with_any_name_are_learnt_and_predicted(odd_classes: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "run"
    said = spoken(*adapting(odd_classes.root, odd_classes.root, out, "--training.batch_size", "60"))
    assert said.code == 0, said.err
    assert "left out 1 of the classes" in said.err
    assert "\x1b" not in said.out + said.err
    expected = {b"apple", b"leaf", b"sky", *CLASSES}
    labels = {os.fsencode(unquoted(row["label"])) for row in rows_of(out / "predictions.csv")}
    assert labels <= expected | {b"'" + name for name in expected}
    words = ["evaluate", str(out), "--data", str(odd_classes.root), "--json", str(tmp_path / "f.json")]
    (odd_classes.root / "stray.png").rename(tmp_path / "stray.png")
    try:
        said = spoken(*words)
    finally:
        (tmp_path / "stray.png").rename(odd_classes.root / "stray.png")
    assert said.code == 0, said.err
    found = json.loads((tmp_path / "f.json").read_text())
    assert {os.fsencode(name) for name in found["adapted"]["per_class"]} == expected


# --- folders that change, and folders that refuse


def changing(monkeypatch: pytest.MonkeyPatch, module: str, root: Path, change: Callable[[], None]) -> None:
    """`change` happens once, between the listing of `root` and the reading of its files."""
    done = threading.Event()

    def scan_and_change(folder: str | Path) -> folders.Listing:
        listing = scan(folder)
        if Path(folder) == root and not done.is_set():
            done.set()
            change()
        return listing

    monkeypatch.setattr(f"{module}.scan", scan_and_change)


def disturb(root: Path) -> None:
    """Four of twelve files: gone, another content, cut, a pipe now."""
    (root / "apple" / "0.png").unlink()
    (root / "apple" / "1.png").write_bytes(Pictures(9).png())
    (root / "leaf" / "2.png").write_bytes((root / "leaf" / "2.png").read_bytes()[:50])
    (root / "leaf" / "3.png").unlink()
    os.mkfifo(root / "leaf" / "3.png")


def test_check_while_files_change(clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_domain(tmp_path / "target", per_class=4)
    changing(monkeypatch, "certvol.data.check", target, lambda: disturb(target))
    said = spoken("check", "--source", str(clean), "--target", str(target))
    assert said.code == 0
    assert "target: 4 files or folders cannot be read" in said.text


def test_adapt_while_files_change(clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_domain(tmp_path / "target", per_class=4)
    changing(monkeypatch, "certvol.data.domains", target, lambda: disturb(target))
    said = spoken(*adapting(clean, target, tmp_path / "run"))
    assert said.code == 0, said.err
    assert "4 unreadable target images were skipped" in said.err
    assert len(rows_of(tmp_path / "run" / "predictions.csv")) == 8


def test_predict_while_files_change(
    adapted: tuple[Path, Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = write_domain(tmp_path / "images", per_class=4)

    def vanish() -> None:
        (images / "apple" / "0.png").unlink()
        (images / "leaf" / "2.png").write_bytes((images / "leaf" / "2.png").read_bytes()[:50])

    changing(monkeypatch, "certvol.prediction", images, vanish)
    said = spoken("predict", str(adapted[0]), str(images), "--out", str(tmp_path / "p.csv"))
    assert said.code == 0
    assert "2 unreadable skipped" in said.out
    assert len(rows_of(tmp_path / "p.csv")) == 10


def test_adapt_while_a_whole_class_or_the_folder_goes_away(
    clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_domain(tmp_path / "source", per_class=4)
    with monkeypatch.context() as patch:
        changing(patch, "certvol.data.domains", source, lambda: (source / "sky").rename(tmp_path / "sky") and None)
        said = spoken(*adapting(source, clean, tmp_path / "run"))
    assert said.code == 0, said.err
    assert "left out 1 of the classes" in said.err
    with monkeypatch.context() as patch:
        changing(patch, "certvol.data.domains", source, lambda: source.rename(tmp_path / "away") and None)
        said = spoken(*adapting(source, clean, tmp_path / "other"))
    assert said.code == 1
    assert "became unreadable" in one_sentence(said)
    assert not (tmp_path / "other").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_folders_and_files_without_permission(clean: Path, tmp_path: Path) -> None:
    target = write_domain(tmp_path / "target", per_class=4)
    (target / "sky").chmod(0)
    (target / "leaf" / "0.png").chmod(0)
    try:
        said = spoken(*adapting(clean, target, tmp_path / "run"))
        assert said.code == 0
        assert "2 unreadable target images were skipped" in said.err
        assert len(rows_of(tmp_path / "run" / "predictions.csv")) == 7
        target.chmod(0)
        assert "permission denied" in one_sentence(spoken(*adapting(clean, target, tmp_path / "none")))
    finally:
        target.chmod(0o700)
        (target / "sky").chmod(0o700)


# --- very many files


class _Entry:
    """What os.scandir gives for a plain file."""

    __slots__ = ("name",)
    status = os.stat_result((0o100644, 1, 1, 1, 0, 0, 1000, 0, 0, 0), {"st_mtime_ns": 0})

    def __init__(self, name: str) -> None:
        self.name = name

    def is_dir(self) -> bool:
        return False

    def is_file(self) -> bool:
        return True

    def is_symlink(self) -> bool:
        return False

    def stat(self) -> os.stat_result:
        return self.status


@pytest.mark.slow
def test_a_million_files_are_listed_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 classes of 1,000 files, of which nothing but the names exists."""
    for number in range(1000):
        (tmp_path / f"class {number:03d}").mkdir()
    real = os.scandir
    open_at_once = [0, 0]

    class Many:
        def __init__(self, path: Path) -> None:
            self.path = Path(path)

        def __enter__(self) -> Iterator[object]:
            open_at_once[0] += 1
            open_at_once[1] = max(open_at_once)
            if self.path == tmp_path:
                with real(self.path) as entries:
                    return iter(list(entries))
            return (_Entry(f"image-{number:06d}.jpg") for number in range(1000))

        def __exit__(self, *_: object) -> None:
            open_at_once[0] -= 1

    monkeypatch.setattr(os, "scandir", Many)
    listing = scan(tmp_path)
    assert len(listing.paths) == 1_000_000
    assert open_at_once[1] == 1  # however many folders: no limit of open files is met
    assert listing.paths == sorted(listing.paths)
    held = sum(map(sys.getsizeof, listing.paths)) + listing.sizes.nbytes + listing.mtimes_ns.nbytes
    assert held < 200e6
    classes, labels = labels_of(listing)
    assert len(classes) == 1000
    assert np.bincount(labels).tolist() == [1000] * 1000
