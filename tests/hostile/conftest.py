"""Runs that a stranger may have changed."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

import certvol
from certvol.errors import Interrupted
from support.commands import Said, adapt_words, spoken
from support.corpus import Corpus, write_corpus
from support.images import tiny, write_domain
from support.stop_at import StopAt


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, their cache, and a run twice: complete, and stopped while adapting."""
    root = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CERTVOL_CACHE", str(root / "cache"))
        source = write_domain(root / "source", per_class=6)
        target = write_domain(root / "target", per_class=6, seed=1)
        certvol.adapt(source, target, out=root / "complete", **tiny())
        with pytest.raises(Interrupted):
            certvol.adapt(source, target, out=root / "stopped", stop_signal=StopAt(15), **tiny())
    states = (root / "stopped" / "checkpoint").glob("state-*.safetensors")
    assert "plan.images_SN" in load_file(next(states))
    return root


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    """A folder with copies of the runs, which a test may change."""
    for name in ("complete", "stopped"):
        shutil.copytree(made / name, tmp_path / name)
    return tmp_path


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_domain(tmp_path_factory.mktemp("clean") / "source")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "target")


@pytest.fixture(scope="module")
def adapted(
    clean: Path, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Said]]:
    """A run on the corpus, and what it said."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CERTVOL_CACHE", str(tmp_path_factory.mktemp("cache")))
        out = tmp_path_factory.mktemp("adapted") / "run"
        yield out, spoken(*adapt_words(clean, corpus.root, out))
