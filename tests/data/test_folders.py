import os
import socket
from pathlib import Path

import numpy as np
import pytest

from certvol.data.folders import (
    Listing,
    class_level,
    class_of,
    folder_labels,
    has_image_suffix,
    labels_of,
    printable,
    scan,
)
from certvol.errors import UserError


def touch(root: Path, *paths: str) -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"x" * len(path))
    return root


def listing_of(*paths: str) -> Listing:
    none = np.zeros(len(paths), dtype=np.int64)
    return Listing(Path("/data"), sorted(paths), none, [], 0, [])


# --- scan


def test_scan_lists_images_sorted_with_their_sizes_and_times(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "b/2.JPG",
        "a/10.png",
        "a/9.tiff",
        "b/deep/er/3.WebP",
        "top.gif",
        "readme.txt",
        "b/labels.csv",
    )
    os.utime(tmp_path / "a/9.tiff", ns=(5, 1234567890123456789))
    listing = scan(tmp_path)
    assert listing.paths == ["a/10.png", "a/9.tiff", "b/2.JPG", "b/deep/er/3.WebP", "top.gif"]
    assert listing.status_N3[:, 0].tolist() == [len(path) for path in listing.paths]
    assert listing.status_N3[1, 1] == 1234567890123456789
    assert listing.other_files == 2
    assert listing.problems == []
    assert listing.folders == ["a", "b", "b/deep"]


def test_scan_ignores_hidden_files_and_folders(tmp_path: Path) -> None:
    touch(
        tmp_path,
        ".hidden.jpg",
        ".git/a.jpg",
        "__MACOSX/a.jpg",
        "a/._1.jpg",
        "a/Thumbs.db",
        "a/1.jpg",
    )
    listing = scan(tmp_path)
    assert listing.paths == ["a/1.jpg"]
    assert listing.other_files == 0


def test_scan_lists_a_hidden_root(tmp_path: Path) -> None:
    assert scan(touch(tmp_path / ".data", "a.jpg")).paths == ["a.jpg"]


@pytest.mark.parametrize(
    ("name", "is_image"),
    [
        ("a.jpg", True),
        ("a.JPEG", True),
        ("a.b.Tif", True),
        ("jpg", False),
        (".jpg", False),
        ("a.jpg.txt", False),
    ],
)
def test_images_are_recognised_by_their_suffix(name: str, is_image: bool) -> None:
    assert has_image_suffix(name) is is_image


@pytest.mark.parametrize(
    "name",
    [
        "with space.jpg",
        "quote'\".jpg",
        "new\nline.jpg",
        "e\u0301.jpg",
        "\u00e9.jpg",
        "日本.jpg",
        "n" * 251 + ".jpg",
        "-rf.jpg",
    ],
)
def test_scan_takes_any_name(tmp_path: Path, name: str) -> None:
    touch(tmp_path, f"c l'a\nss/{name}")
    assert scan(tmp_path).paths == [f"c l'a\nss/{name}"]


def test_scan_takes_names_that_are_not_utf8(tmp_path: Path) -> None:
    raw = os.fsencode(tmp_path) + b"/caf\xe9.jpg"
    try:
        Path(os.fsdecode(raw)).write_bytes(b"x")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    (path,) = scan(tmp_path).paths
    assert os.fsencode(path) == b"caf\xe9.jpg"
    assert printable(path) == "caf\\xe9.jpg"


def test_printable_is_one_line() -> None:
    assert printable("a\nb\x1b[31m é") == "a\\nb\\x1b[31m é"


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no folder .*nowhere"):
        scan(tmp_path / "nowhere")


def test_a_file_instead_of_a_folder_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "a.jpg")
    with pytest.raises(UserError, match=r"a\.jpg is a file; expected a folder"):
        scan(tmp_path / "a.jpg")


@pytest.mark.parametrize("root", ["a\0b", "x" * 5000])
def test_impossible_paths_are_refused(root: str) -> None:
    with pytest.raises(UserError, match="cannot read the folder"):
        scan(root)


def test_a_root_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match="permission denied"):
        scan(tmp_path)


def test_an_unreadable_folder_is_a_problem_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path, "a/1.jpg", "locked/2.jpg")
    real = os.scandir

    def refuse(path: Path) -> object:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    listing = scan(tmp_path)
    assert listing.paths == ["a/1.jpg"]
    assert listing.problems == [("locked", "cannot read this folder: permission denied")]


def test_links_to_files_and_folders_are_followed(tmp_path: Path) -> None:
    outside = touch(tmp_path / "outside", "1.jpg", "sub/2.jpg")
    root = touch(tmp_path / "root", "a/0.jpg")
    (root / "b").symlink_to(outside)
    (root / "a/link.jpg").symlink_to(outside / "1.jpg")
    listing = scan(root)
    assert listing.paths == ["a/0.jpg", "a/link.jpg", "b/1.jpg", "b/sub/2.jpg"]
    assert listing.problems == []


def test_loops_end_and_real_folders_win_over_links(tmp_path: Path) -> None:
    root = touch(tmp_path / "root", "z/1.jpg", "z/deep/2.jpg")
    (root / "a_link").symlink_to(root / "z")
    (root / "z/deep/up").symlink_to(root)
    (root / "z/above").symlink_to(tmp_path)
    (root / "self.jpg").symlink_to(root / "self.jpg")
    (root / "gone.jpg").symlink_to(root / "nothing.jpg")
    listing = scan(root)
    assert listing.paths == ["z/1.jpg", "z/deep/2.jpg"]
    reasons = dict(listing.problems)
    assert set(reasons) == {"a_link", "z/deep/up", "z/above", "self.jpg", "gone.jpg"}
    for link in ("a_link", "z/deep/up", "z/above"):
        assert "already read" in reasons[link]
    assert "broken link" in reasons["gone.jpg"]


def test_folders_that_all_link_to_each_other_are_read_once(tmp_path: Path) -> None:
    for i in range(12):
        touch(tmp_path, f"d{i:02d}/{i}.jpg")
        for j in range(12):
            (tmp_path / f"d{i:02d}/to{j}").symlink_to(tmp_path / f"d{j:02d}")
    assert len(scan(tmp_path).paths) == 12


def test_pipes_sockets_and_devices_are_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path may have 108 bytes at most
    os.mkfifo("pipe.jpg")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.jpg")
        Path("device.jpg").symlink_to("/dev/null")
        listing = scan(tmp_path)
    assert listing.paths == []
    assert listing.problems == [
        ("device.jpg", "a pipe, socket or device, not a file"),
        ("pipe.jpg", "a pipe, socket or device, not a file"),
        ("socket.jpg", "a pipe, socket or device, not a file"),
    ]


def test_a_file_that_vanishes_while_listed_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path, "a.jpg")
    (tmp_path / "b.jpg").symlink_to(tmp_path / "a.jpg")
    real = os.scandir

    class Vanishing:
        def __init__(self, entry: os.DirEntry[str]) -> None:
            self.name, self.is_dir, self.is_file = entry.name, entry.is_dir, lambda: True

        def stat(self) -> os.stat_result:
            raise FileNotFoundError(2, "No such file or directory")

    class Listed:
        def __init__(self, path: Path) -> None:
            with real(path) as entries:
                self.entries: list[object] = [
                    Vanishing(entry) if entry.name == "b.jpg" else entry for entry in entries
                ]

        def __enter__(self) -> list[object]:
            return self.entries

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(os, "scandir", Listed)
    listing = scan(tmp_path)
    assert listing.paths == ["a.jpg"]
    assert listing.problems == [("b.jpg", "cannot be read: no such file or directory")]


# --- classes


def test_the_class_of_an_image_is_its_first_folder() -> None:
    assert class_of("cat/1.jpg") == "cat"
    assert class_of("cat/deep/1.jpg") == "cat"
    assert class_of("1.jpg") is None
    assert class_of("images/cat/1.jpg", level=1) == "cat"
    assert class_of("images/1.jpg", level=1) is None


def test_labels_by_first_folder_in_sorted_order() -> None:
    classes, labels = labels_of(listing_of("dog/1.jpg", "cat/2.jpg", "cat/deep/3.jpg", "ant/4.jpg"))
    assert classes == ["ant", "cat", "dog"]
    assert labels.tolist() == [0, 1, 1, 2]
    assert labels.dtype == np.int64


def test_a_folder_images_above_the_classes_is_recognised() -> None:
    classes, labels = labels_of(listing_of("images/cat/1.jpg", "images/dog/2.jpg"))
    assert classes == ["cat", "dog"]
    assert labels.tolist() == [0, 1]


def test_images_beside_another_folder_is_a_class() -> None:
    assert class_level(["images/cat/1.jpg", "other/2.jpg"]) == 0
    assert labels_of(listing_of("images/1.jpg", "other/2.jpg"))[0] == ["images", "other"]


def test_a_folder_images_inside_each_class_is_recognised() -> None:
    assert labels_of(listing_of("cat/images/1.jpg", "dog/images/2.jpg"))[0] == ["cat", "dog"]


def test_one_sub_folder_per_class_is_accepted() -> None:
    assert labels_of(listing_of("cat/set1/1.jpg", "dog/set1/2.jpg"))[0] == ["cat", "dog"]


def test_stray_images_have_no_label() -> None:
    classes, labels = labels_of(listing_of("a/1.jpg", "b/2.jpg", "stray.jpg"))
    assert classes == ["a", "b"]
    assert labels.tolist() == [0, 1, -1]


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "a/notes.txt")
    with pytest.raises(UserError, match=r"holds no images .*1 other files"):
        labels_of(scan(tmp_path))


@pytest.mark.parametrize("paths", [("1.jpg", "2.jpg"), ("images/1.jpg",)])
def test_flat_or_lone_folder_is_refused(paths: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=r"no class folders|one class only"):
        labels_of(listing_of(*paths))


def test_a_single_class_is_refused() -> None:
    with pytest.raises(UserError, match=r"one class only \(cat\)"):
        labels_of(listing_of("cat/1.jpg", "cat/2.jpg"))


@pytest.mark.parametrize(
    ("paths", "meant"),
    [
        (("amazon/bike/1.jpg", "amazon/mug/1.jpg", "dslr/bike/1.jpg"), "/data/amazon"),
        (("amazon/images/bike/1.jpg", "amazon/images/mug/1.jpg"), "/data/amazon"),
        (("o31/amazon/bike/1.jpg", "o31/amazon/mug/1.jpg", "o31/dslr/mug/1.jpg"), "/data/o31"),
        (
            ("images/amazon/bike/1.jpg", "images/amazon/mug/1.jpg", "images/dslr/mug/1.jpg"),
            "/data/images/amazon",
        ),
    ],
)
def test_a_folder_of_domains_names_the_right_folder(paths: tuple[str, ...], meant: str) -> None:
    with pytest.raises(UserError, match=f"look like domains, not classes; did you mean {meant}\\?"):
        labels_of(listing_of(*paths))


# --- labels for evaluation


def test_folder_labels_come_from_class_folders() -> None:
    labels = folder_labels(["dog/1.jpg", "cat/2.jpg", "dog/x/3.jpg"], ["cat", "dog"])
    assert labels is not None
    assert labels.tolist() == [1, 0, 1]


def test_folder_labels_are_found_below_a_folder_images() -> None:
    labels = folder_labels(["images/dog/1.jpg", "images/cat/2.jpg"], ["cat", "dog"])
    assert labels is not None
    assert labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    "paths", [[], ["1.jpg"], ["cat/1.jpg", "2.jpg"], ["cat/1.jpg", "cow/2.jpg"], ["Cat/1.jpg"]]
)
def test_folder_labels_need_every_path(paths: list[str]) -> None:
    assert folder_labels(paths, ["cat", "dog"]) is None


def test_folder_labels_ignore_the_unicode_form() -> None:
    labels = folder_labels(["e\u0301/1.jpg"], ["a", "\u00e9"])
    assert labels is not None
    assert labels.tolist() == [1]
