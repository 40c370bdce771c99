"""Several sources: their images in one list, folders of domains, and shares."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from certvol.data.check import check
from certvol.data.domains import open_source
from certvol.data.feature_files import open_source_features
from certvol.data.sources import (
    expand_domains,
    find_domains,
    joined,
    mix_ups,
    places_of,
    read_shares,
    scan_sources,
    with_sources,
)
from certvol.errors import UserError
from certvol.settings import DataConfig
from support.images import write_noise


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    return DataConfig(cache_dir=str(tmp_path / "cache"), workers=2)


@pytest.fixture
def domains(tmp_path: Path) -> list[Path]:
    """Two domains: one has cats and dogs, the other dogs and owls."""
    for i in range(8):
        write_noise(tmp_path / "d" / "one" / ("cat" if i % 2 else "dog") / f"{i}.png", i)
    for i in range(6):
        write_noise(tmp_path / "d" / "two" / ("owl" if i % 2 else "dog") / f"{i}.png", 50 + i)
    return [tmp_path / "d" / "one", tmp_path / "d" / "two"]


def test_the_union_has_all_images_with_their_class_and_source(
    domains: list[Path], config: DataConfig
) -> None:
    source = open_source(domains, 8, config)
    assert source.classes == ["cat", "dog", "owl"]
    assert np.bincount(source.labels).tolist() == [4, 7, 3]
    for i, path in enumerate(source.paths):
        domain, name, _ = path.split("/")
        assert (source.classes[source.labels[i]], source.origins[i]) == (
            name,
            ["one", "two"].index(domain),
        )
        pixels = np.asarray(Image.open(domains[0].parent / path))
        assert np.array_equal(source.pixels[source.rows[i]], pixels)
    swapped = open_source(domains[::-1], 8, config)
    assert swapped.paths == source.paths
    assert swapped.origins.tolist() == (1 - source.origins).tolist()
    assert swapped.fingerprint != source.fingerprint  # shares are in the order of the sources


def test_one_source_in_a_list_is_that_source(domains: list[Path], config: DataConfig) -> None:
    alone, listed = open_source(domains[0], 8, config), open_source([domains[0]], 8, config)
    assert listed.fingerprint == alone.fingerprint
    assert listed.paths == alone.paths
    assert not alone.origins.any()


def test_bad_files_of_every_source_are_listed(domains: list[Path], config: DataConfig) -> None:
    (domains[0] / "cat" / "bad.png").write_bytes(b"bad")
    write_noise(domains[1] / "stray.png", 99)
    (domains[1] / "dog" / "gone.png").symlink_to("nowhere")
    source = open_source(domains, 8, config)
    failed = [path for path, _ in source.failures]
    assert failed == ["one/cat/bad.png", "two/dog/gone.png", "two/stray.png"]
    assert len(source) == 14


def test_a_source_without_readable_images_is_refused(
    domains: list[Path], config: DataConfig, tmp_path: Path
) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "d" / "bad" / name).mkdir(parents=True)
        (tmp_path / "d" / "bad" / name / "1.png").write_bytes(b"bad")
    with pytest.raises(UserError, match="bad holds no readable images"):
        open_source([*domains, tmp_path / "d" / "bad"], 8, config)


@pytest.mark.parametrize("other", ["one", "one/../one", "link", "one/cat", "."])
def test_sources_that_share_images_are_refused(domains: list[Path], other: str) -> None:
    (domains[0].parent / "link").symlink_to("one")
    with pytest.raises(UserError, match="share images; give each domain once"):
        scan_sources([domains[0], domains[0].parent / other])


def test_a_folder_of_domains_stands_for_its_domains(domains: list[Path], tmp_path: Path) -> None:
    root = domains[0].parent
    assert find_domains(root) == []  # their classes differ
    (domains[0] / "cat").rename(domains[0] / "owl")
    assert find_domains(root) == domains
    assert find_domains(domains[0]) == []
    assert find_domains(tmp_path / "none") == []
    write_noise(root / "three" / "dog" / "1.png", 1)
    write_noise(root / "three" / "owl" / "1.png", 2)
    names = [str(root / name) for name in ("one", "three", "two")]
    found, said = expand_domains([root], tmp_path)
    assert found == names
    assert len(said) == 1
    assert said[0].endswith("d holds source domains: one, three, two")
    found, said = expand_domains([root], root / "three")
    assert found == [names[0], names[2]]
    assert said[0].endswith("one, two; the target is left out")
    assert expand_domains(domains, root / "three") == ([names[0], names[2]], [])
    copy = shutil.copytree(root, tmp_path / "again")
    found, said = expand_domains([root, copy], tmp_path)
    assert len(found) == 6
    assert [sentence.split(" holds ")[0] for sentence in said] == [str(root), str(copy)]
    with pytest.raises(UserError, match="lies inside one of the domains"):
        expand_domains([root], root / "three" / "dog")


def test_folders_of_one_object_each_are_no_domains(tmp_path: Path) -> None:
    for name in ("cup", "pen"):
        for number in range(3):
            write_noise(tmp_path / name / f"{name}-{number}" / "1.png", number)
    assert find_domains(tmp_path) == []


def test_classes_with_a_training_part_are_no_domains(tmp_path: Path) -> None:
    for name in ("cup", "pen"):
        for part in ("Train", "val"):
            write_noise(tmp_path / name / part / "1.png", 1)
    assert find_domains(tmp_path) == []


def test_settings_hold_several_sources() -> None:
    config = with_sources(DataConfig(), ["/a", Path("/b c"), "/d"])
    assert (config.source, config.more_sources) == ("/a", "/b c:/d")
    assert places_of(config) == ["/a", "/b c", "/d"]
    assert with_sources(config, ["/a"]).more_sources is None
    with pytest.raises(UserError, match="`/x:y`; rename it"):
        joined(["/x:y"])


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("equal", [0.5, 0.5]), ("size", [0.25, 0.75]), ("2,1", [2 / 3, 1 / 3])],
)
def test_shares(setting: str, expected: list[float]) -> None:
    origins = read_shares(setting, np.array([0, 1, 1, 1]))
    assert origins is not None
    assert origins.shares_O.tolist() == pytest.approx(expected)
    assert [part.tolist() for part in origins.split(np.array([3, 0, 1]))] == [[0], [3, 1]]


def test_one_source_has_no_shares() -> None:
    assert read_shares("equal", np.zeros(4, np.int64)) is None


@pytest.mark.parametrize("setting", ["1", "1,2,3", "1,0", "1,nan", "1,inf", "a,b", "", "1,-1"])
def test_wrong_shares_are_refused(setting: str) -> None:
    with pytest.raises(UserError, match="equal, size or 2 positive numbers"):
        read_shares(setting, np.array([0, 1]))


def _write_rows(path: Path, seed: int, labels: list[str], dim: int = 4, about: str = "a") -> Path:
    rows = np.random.default_rng(seed).normal(size=(len(labels), dim)).astype(np.float32)
    np.savez(path, features=rows, labels=labels, about=np.array(about))
    return path


def test_files_of_features_are_joined(tmp_path: Path) -> None:
    one = _write_rows(tmp_path / "one.npz", 0, ["a", "b", "a"])
    two = _write_rows(tmp_path / "two.npz", 1, ["c", "b"])
    source = open_source_features([one, two])
    assert source.classes == ["a", "b", "c"]
    own = {place.stem: np.load(place) for place in (one, two)}
    for i, path in enumerate(source.paths):
        domain, row = path.split("/")
        assert np.array_equal(source.features[source.rows[i], 0], own[domain]["features"][int(row)])
        assert source.classes[source.labels[i]] == own[domain]["labels"][int(row)]
        assert source.origins[i] == ["one", "two"].index(domain)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dim": 5}, "have 4 dimensions, those of .*two.npz 5"),
        ({"about": "b"}, "one.npz were made by a, those of .*two.npz by b"),
    ],
)
def test_features_of_different_backbones_are_not_joined(
    changed: dict[str, object], said: str, tmp_path: Path
) -> None:
    one = _write_rows(tmp_path / "one.npz", 0, ["a", "b"])
    two = _write_rows(tmp_path / "two.npz", 1, ["a", "b"], **changed)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=said):
        open_source_features([one, two])


def test_a_file_of_features_counts_once(tmp_path: Path) -> None:
    one = _write_rows(tmp_path / "one.npz", 0, ["a", "b"])
    (tmp_path / "link.npz").symlink_to(one)
    with pytest.raises(UserError, match="share images; give each domain once"):
        open_source_features([one, tmp_path / "link.npz"])
    assert mix_ups([one], tmp_path / "link.npz")[0].startswith(
        "source and target are the same file"
    )


def test_features_are_compared_even_if_the_first_file_does_not_say_what_made_them(
    tmp_path: Path,
) -> None:
    one = _write_rows(tmp_path / "one.npz", 0, ["a", "b"], about="")
    two = _write_rows(tmp_path / "two.npz", 1, ["a", "b"], about="p")
    three = _write_rows(tmp_path / "three.npz", 2, ["a", "b"], about="q")
    with pytest.raises(UserError, match=r"two.npz were made by p, those of .*three.npz by q"):
        open_source_features([one, two, three])
    assert open_source_features([one, two]).about == "p"


def test_check_reads_all_sources(domains: list[Path], tmp_path: Path, config: DataConfig) -> None:
    write_noise(tmp_path / "t" / "1.png", 50)
    (domains[1] / "empty").mkdir()
    report = check(domains, tmp_path / "t", config)
    assert report.source_counts == {"cat": 4, "dog": 7, "owl": 3}
    assert report.in_both == [("two/dog/0.png", "1.png")]
    assert any("folders without images are not classes: empty" in f.text for f in report.findings)
    report = check([domains[0], domains[0]], tmp_path / "t", config)
    assert not report.can_adapt
