import numpy as np
import pytest
import torch

from certvol.data import SOURCE, TARGET
from certvol.data.store import Store
from certvol.data.views import FeatureViews, ImageViews
from certvol.settings import AugmentConfig
from support.images import Format

CPU = torch.device("cpu")


def image_views(**settings: bool) -> ImageViews:
    pixels = np.random.default_rng(0).integers(0, 256, (11, 10, 10, 3), dtype=np.uint8)
    source = Store(pixels, np.arange(5), CPU, 0.5)
    target = Store(pixels, np.arange(5, 11), CPU, 0.5)
    return ImageViews(source, target, Format(8), AugmentConfig(**settings))


def store(base: float, images: int, views: int) -> Store:
    """Make features whose view v of image i is (base + i, v); rows are reversed on the disk."""
    features = np.array(
        [[[base + i, v] for v in range(views)] for i in reversed(range(images))], dtype=np.float32
    )
    return Store(features, np.arange(images)[::-1].copy(), CPU, 0.5)


VIEWS = FeatureViews(store(0, 5, 3), store(100, 6, 4))


def test_a_batch_holds_its_images_each_in_one_of_its_views() -> None:
    whole = np.array([4, 0, 2, 5, 5, 1])
    seen: set[tuple[float, float]] = set()
    for seed in range(60):
        batch = VIEWS.training_batch(whole, np.arange(6), 3, torch.Generator().manual_seed(seed))
        assert batch[:, 0].tolist() == [4, 0, 2, 105, 105, 101]
        seen |= {(float(image), float(view)) for image, view in batch}
    assert {view for image, view in seen if image < 100} == {0, 1, 2}
    assert {view for image, view in seen if image >= 100} == {0, 1, 2, 3}


@pytest.mark.parametrize("views", [VIEWS, image_views()], ids=["features", "images"])
def test_a_view_depends_only_on_its_place_in_the_whole_batch(
    views: FeatureViews | ImageViews,
) -> None:
    whole, rows = np.array([4, 0, 2, 5, 5, 1]), np.array([1, 2, 4, 5])
    all_rows = views.training_batch(whole, np.arange(6), 3, torch.Generator().manual_seed(0))
    part = views.training_batch(whole, rows, 2, torch.Generator().manual_seed(0))
    assert torch.allclose(part, all_rows[rows], atol=1e-5)


def test_without_augmentation_training_sees_the_test_view() -> None:
    whole, generator = np.array([4, 0, 5, 1]), torch.Generator()
    for enabled in (False, True):
        views = image_views(enabled=enabled)
        batch = views.training_batch(whole, np.arange(4), 2, generator)
        plain = [views.test_view(SOURCE, whole[:2]), views.test_view(TARGET, whole[2:])]
        assert torch.equal(batch, torch.cat(plain)) != enabled
        assert torch.equal(views.target_view(whole[2:], generator), plain[1]) != enabled
        assert torch.equal(views.target_view(whole[2:], None), plain[1])


def test_a_batch_may_hold_one_domain_only() -> None:
    images, rows, generator = np.array([1, 3]), np.arange(2), torch.Generator().manual_seed(0)
    for num_source, expected in ((2, [1, 3]), (0, [101, 103])):
        batch = VIEWS.training_batch(images, rows, num_source, generator)
        assert batch[:, 0].tolist() == expected


def test_test_views_of_features_are_the_first_ones() -> None:
    images = np.array([3, 1, 0])
    assert [b.tolist() for b in VIEWS.test_batches(SOURCE, images, 2)] == [
        [[3, 0], [1, 0]],
        [[0, 0]],
    ]
    assert torch.cat(list(VIEWS.test_batches(TARGET, images, 2)))[:, 0].tolist() == [103, 101, 100]
    assert VIEWS.target_view(images, None).tolist() == [[103, 0], [101, 0], [100, 0]]
    assert VIEWS.target_view(images, torch.Generator().manual_seed(3))[:, 0].tolist() == [
        103,
        101,
        100,
    ]
