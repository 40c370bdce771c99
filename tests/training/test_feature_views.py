"""Features served as images are."""

import numpy as np
import torch

from certvol.nn.norm import SOURCE, TARGET
from certvol.training.feature_views import FeatureStore, FeatureViews

CPU = torch.device("cpu")


def store(base: float, images: int, views: int) -> FeatureStore:
    """Image i, view v is (base + i, v); rows are reversed on the disk."""
    features = np.array([[[base + i, v] for v in range(views)] for i in reversed(range(images))], dtype=np.float32)
    return FeatureStore(features, np.arange(images)[::-1].copy(), CPU)


VIEWS = FeatureViews(store(0, 5, 3), store(100, 6, 4))


def test_a_batch_holds_the_images_it_names_each_in_one_of_its_views() -> None:
    whole = np.array([4, 0, 2, 5, 5, 1])
    seen: set[tuple[float, float]] = set()
    for seed in range(60):
        batch = VIEWS.training_batch(whole, np.arange(6), 3, torch.Generator().manual_seed(seed))
        assert batch[:, 0].tolist() == [4, 0, 2, 105, 105, 101]
        seen |= {(float(image), float(view)) for image, view in batch}
    assert {view for image, view in seen if image < 100} == {0, 1, 2}
    assert {view for image, view in seen if image >= 100} == {0, 1, 2, 3}


def test_a_view_depends_on_its_place_in_the_whole_batch_alone() -> None:
    whole, rows = np.array([4, 0, 2, 5, 5, 1]), np.array([1, 2, 4, 5])
    all_rows = VIEWS.training_batch(whole, np.arange(6), 3, torch.Generator().manual_seed(0))
    part = VIEWS.training_batch(whole, rows, 2, torch.Generator().manual_seed(0))
    assert torch.equal(part, all_rows[rows])


def test_batches_of_one_domain_only() -> None:
    generator = torch.Generator().manual_seed(0)
    assert VIEWS.training_batch(np.array([1, 3]), np.arange(2), 2, generator)[:, 0].tolist() == [1, 3]
    assert VIEWS.training_batch(np.array([1, 3]), np.arange(2), 0, generator)[:, 0].tolist() == [101, 103]


def test_test_views_are_the_first_ones() -> None:
    images = np.array([3, 1, 0])
    assert [b.tolist() for b in VIEWS.test_batches(SOURCE, images, 2)] == [[[3, 0], [1, 0]], [[0, 0]]]
    assert torch.cat(list(VIEWS.test_batches(TARGET, images, 2)))[:, 0].tolist() == [103, 101, 100]
    assert VIEWS.target_view(images, None).tolist() == [[103, 0], [101, 0], [100, 0]]
    assert VIEWS.target_view(images, torch.Generator().manual_seed(3))[:, 0].tolist() == [103, 101, 100]
