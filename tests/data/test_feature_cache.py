"""Features computed once, by chunks that survive a kill."""

from pathlib import Path

import numpy as np
import pytest

from certvol.config import DataConfig
from certvol.data.feature_cache import open_features
from certvol.errors import UserError

KEY, SHAPE = "0" * 32, (10, 2, 3)
ROWS = np.arange(60, dtype=np.float32).reshape(SHAPE)


class Maker:
    def __init__(self, fail_at: int | None = None) -> None:
        self.asked: list[tuple[int, int]] = []
        self.fail_at = fail_at

    def __call__(self, start: int, stop: int) -> np.ndarray:
        if start == self.fail_at:
            raise KeyboardInterrupt
        self.asked.append((start, stop))
        return ROWS[start:stop]


def config(folder: Path, limit: float = 1.0) -> DataConfig:
    return DataConfig(cache_dir=str(folder), cache_limit_gb=limit)


def test_rows_are_made_once_and_mapped_after(tmp_path: Path) -> None:
    maker = Maker()
    assert np.array_equal(open_features(KEY, SHAPE, maker, 4, config(tmp_path)), ROWS)
    assert maker.asked == [(0, 4), (4, 8), (8, 10)]
    again = Maker()
    assert np.array_equal(open_features(KEY, SHAPE, again, 4, config(tmp_path)), ROWS)
    assert again.asked == []


def test_a_build_goes_on_after_its_last_whole_chunk(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        open_features(KEY, SHAPE, Maker(fail_at=8), 4, config(tmp_path))
    building = tmp_path / f"{KEY}.building"
    with (building / "features.bin").open("ab") as file:
        file.write(b"half a row")  # what a kill may leave
    with (building / "journal").open("ab") as file:
        file.write(b'{"content": {"rows"')
    maker = Maker()
    assert np.array_equal(open_features(KEY, SHAPE, maker, 4, config(tmp_path)), ROWS)
    assert maker.asked == [(8, 10)]


def test_a_line_without_its_end_is_not_whole(tmp_path: Path) -> None:
    """What is written behind it would be one line with it, which no later build could read."""
    with pytest.raises(KeyboardInterrupt):
        open_features(KEY, SHAPE, Maker(fail_at=8), 4, config(tmp_path))
    journal = tmp_path / f"{KEY}.building" / "journal"
    journal.write_bytes(journal.read_bytes()[:-1])
    maker = Maker()
    assert np.array_equal(open_features(KEY, SHAPE, maker, 4, config(tmp_path)), ROWS)
    assert maker.asked == [(4, 8), (8, 10)]


def test_a_journal_that_says_more_than_there_is_is_not_believed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        open_features(KEY, SHAPE, Maker(fail_at=8), 4, config(tmp_path))
    with (tmp_path / f"{KEY}.building" / "features.bin").open("r+b") as file:
        file.truncate(5 * 24)
    maker = Maker()
    assert np.array_equal(open_features(KEY, SHAPE, maker, 4, config(tmp_path)), ROWS)
    assert maker.asked == [(4, 8), (8, 10)]


@pytest.mark.parametrize("file", ["features.bin", "index.json"])
def test_damage_is_noticed_and_the_features_made_anew(tmp_path: Path, file: str) -> None:
    del_me = open_features(KEY, SHAPE, Maker(), 4, config(tmp_path))
    del del_me
    path = tmp_path / KEY / file
    path.write_bytes(path.read_bytes()[:-1])
    maker = Maker()
    with pytest.warns(UserWarning, match="damaged"):
        assert np.array_equal(open_features(KEY, SHAPE, maker, 4, config(tmp_path)), ROWS)
    assert len(maker.asked) == 3


def test_the_limit_of_the_cache_holds_for_features_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.views"):
        open_features(KEY, SHAPE, Maker(), 4, config(tmp_path, limit=1e-7))
