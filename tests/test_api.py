"""The Python API: adapt, load, predict."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import certvol
from certvol.errors import UserError
from support.images import tiny, write_domain


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> certvol.Run:
    root = tmp_path_factory.mktemp("api")
    source, target = write_domain(root / "source"), write_domain(root / "target", shift=20, seed=1)
    return certvol.adapt(source, target, out=root / "run", **tiny())


@pytest.fixture(scope="module")
def files(run: certvol.Run) -> list[Path]:
    return sorted((run.path.parent / "target").rglob("*.png"))[:5]


def test_paths_images_and_tensors_are_predicted_the_same(
    run: certvol.Run, files: list[Path]
) -> None:
    model = certvol.load(run.path)
    by_path = model.predict(files)
    by_image = model.predict([Image.open(file) for file in files])
    assert by_path.labels == by_image.labels
    assert np.array_equal(by_path.probabilities, by_image.probabilities)
    pixels = torch.stack(
        [torch.from_numpy(np.array(Image.open(file).convert("RGB"))) for file in files]
    )
    for tensor in (pixels, pixels.permute(0, 3, 1, 2)):
        by_tensor = model.predict(tensor)
        assert np.allclose(by_tensor.probabilities, by_path.probabilities, atol=0.02)
    assert by_path.sigma is not None
    assert by_path.sigma.shape == (5,)
    assert by_path.probabilities.sum(axis=1) == pytest.approx(np.ones(5), abs=1e-5)


def test_one_image_or_none_can_be_predicted(run: certvol.Run, files: list[Path]) -> None:
    model = run.model()
    assert model.predict(str(files[0])).labels == model.predict(files[:1]).labels
    nothing = model.predict([])
    assert nothing.labels == []
    assert nothing.probabilities.shape == (0, 3)


def test_batches_do_not_change_predictions(run: certvol.Run, files: list[Path]) -> None:
    model = certvol.load(run.path)
    assert np.allclose(
        model.predict(files, batch_size=2).probabilities,
        model.predict(files).probabilities,
        atol=1e-5,
    )


@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(2, 8, 8, 3),
        torch.zeros(8, 8, 3, dtype=torch.uint8),
        torch.zeros(2, 4, 8, 8, dtype=torch.uint8),
        torch.zeros(2, 0, 8, 3, dtype=torch.uint8),
        torch.zeros(2, 3, 8, 0, dtype=torch.uint8),
        torch.tensor(1, dtype=torch.uint8),
        np.zeros((2, 8, 8, 3), np.complex64),
    ],
)
def test_other_tensors_are_refused(run: certvol.Run, images: Any) -> None:
    with pytest.raises(UserError, match="uint8 tensor"):
        certvol.load(run.path).predict(images)


@pytest.mark.parametrize(
    ("given", "batch_size", "reason"),
    [
        ([], 0, "batch_size"),
        (torch.zeros(2, 8, 8, 3, dtype=torch.uint8), -1, "batch_size"),
        (["a\0.png"], 2, "path is invalid"),
        (np.array(["a\0b.png", "c.png"]), 2, "path is invalid"),
        (3, 2, "found one int"),
        (None, 2, "found one NoneType"),
        (np.zeros((2, 8, 8, 3), "M8[s]"), 2, "array of numbers"),
        (Image.new("RGB", (0, 4)), 2, "cannot read the image"),
    ],
)
def test_other_input_is_refused(run: certvol.Run, given: Any, batch_size: int, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        certvol.load(run.path).predict(given, batch_size=batch_size)


def test_arrays_of_paths_and_reversed_arrays_give_the_same_predictions(run: certvol.Run) -> None:
    model, files = run.model(), sorted((run.path.parent / "target").rglob("*.png"))[:4]
    expected = model.predict(files).probabilities
    for paths in (np.array([str(file) for file in files]), np.array(files, dtype=object)):
        assert np.array_equal(model.predict(paths).probabilities, expected)
    rgb = np.stack([np.asarray(Image.open(file)) for file in files])
    expected = model.predict(rgb).probabilities
    bgr = np.ascontiguousarray(rgb[..., ::-1])  # as OpenCV reads images
    assert np.array_equal(model.predict(bgr[..., ::-1]).probabilities, expected)
    assert np.array_equal(model.predict(rgb[::-1]).probabilities, expected[::-1])


def test_the_error_names_a_file_that_is_not_an_image(run: certvol.Run, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("no image")
    with pytest.raises(UserError, match=r"a\.png"):
        certvol.load(run.path).predict([tmp_path / "a.png"])
    with pytest.raises(UserError, match=r"b\.png"):
        certvol.load(run.path).predict([tmp_path / "b.png"])


def test_a_damaged_or_foreign_weights_file_is_refused(run: certvol.Run, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import save_file

    copy = tmp_path / "run"
    shutil.copytree(run.path, copy)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match="damaged"):
        certvol.load(copy)
    save_file({"x": torch.zeros(3)}, weights)
    with pytest.raises(UserError, match="damaged or not certvol's"):
        certvol.load(copy)


def test_an_unfinished_run_cannot_be_loaded(run: certvol.Run, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((run.path / "config.yaml").read_text())
    with pytest.raises(UserError, match="not complete"):
        certvol.load(tmp_path)


@pytest.mark.parametrize(
    "more",
    [
        {"source": "s"},
        {"out": "o"},
        {"preset": "paper"},
        {"config": "c.yaml"},
        {"training": {"cycles": 3}},
    ],
)
def test_resume_takes_no_other_options(run: certvol.Run, more: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="with its own settings; give no other"):
        certvol.adapt(resume=run.path, **more)
    assert certvol.adapt(resume=run.path).path == run.path


def test_a_list_of_arrays_is_refused(run: certvol.Run) -> None:
    with pytest.raises(UserError, match="found one ndarray among them"):
        certvol.load(run.path).predict([np.zeros((8, 8, 3), np.uint8)])


def test_a_shell_completes_the_public_names() -> None:
    assert {"adapt", "load", "evaluate"} <= set(dir(certvol))
    assert not {"Any", "import_module"} & set(dir(certvol))
    assert all(hasattr(certvol, name) for name in dir(certvol))


def test_a_run_leaves_the_callers_random_numbers_alone(run: certvol.Run, tmp_path: Path) -> None:
    source, target = (run.path.parent / name for name in ("source", "target"))
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    certvol.adapt(source, target, out=tmp_path / "run", **tiny())
    assert torch.equal(torch.rand(3), expected)


def test_a_method_may_be_given_by_its_name(run: certvol.Run, tmp_path: Path) -> None:
    source, target = (run.path.parent / name for name in ("source", "target"))
    settings = tiny(method__name="basic", training__cycles=1)
    settings["method"] = settings.pop("method.name")
    again = certvol.adapt(source, target, out=tmp_path / "run", **settings)
    assert again.model().config.method_name == "basic"
    with pytest.raises(UserError, match="cvpp"):
        certvol.adapt(source, target, out=tmp_path / "other", method="cvpp")


def test_threads_that_predict_together_get_what_one_gets(run: certvol.Run) -> None:
    model = certvol.load(run.path)
    pixels = np.random.default_rng(0).integers(0, 256, (4, 12, 12, 3), dtype=np.uint8)
    alone_NC = model.predict(pixels).probabilities
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda _: model.predict(pixels).probabilities, range(200)))
    assert all(np.array_equal(found_NC, alone_NC) for found_NC in together)


def test_a_model_can_be_copied_and_pickled(run: certvol.Run, files: list[Path]) -> None:
    model = certvol.load(run.path)
    expected_NC = model.predict(files).probabilities
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert np.array_equal(twin.predict(files).probabilities, expected_NC)
        assert twin._predicting.lock is not model._predicting.lock


@pytest.mark.parametrize("name", ["source", "more_sources", "target", "target_labels"])
def test_a_place_that_is_given_twice_is_refused(
    name: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {f"data.{name}": str(tmp_path)}
    if name == "target_labels":
        settings["target_labels"] = "labels.csv"
    with pytest.raises(UserError, match=rf"`data\.{name}` and --.* differ"):
        certvol.adapt(folders[0], folders[1], tmp_path / "run", **settings)
