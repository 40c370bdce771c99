import math

import torch

from certvol.methods.protocol import Batch
from certvol.training.history import in_words, medians, sigma_warnings


def watched_batch(sigma: list[float], num_source: int) -> Batch:
    batch = Batch(
        images_NCHW=torch.zeros(len(sigma), 3, 1, 1),
        labels_N=torch.zeros(len(sigma), dtype=torch.int64),
        num_source=num_source,
        rows=torch.arange(len(sigma)),
        total=len(sigma),
        generator=torch.Generator(),
        progress=torch.zeros(()),
        adapting=num_source < len(sigma),
    )
    batch.watched["sigma"] = torch.tensor(sigma)
    return batch


def test_medians_of_each_domain() -> None:
    assert medians(watched_batch([1.0, 2.0, 9.0, 0.5, 0.25], 3)) == {"sigma_source": 2.0, "sigma_target": 0.25}
    assert medians(watched_batch([1.0, 3.0, 2.0], 3)) == {"sigma_source": 2.0, "sigma_target": None}
    assert medians(watched_batch([1.0], 0)) == {"sigma_source": None, "sigma_target": 1.0}


def test_a_line_in_words() -> None:
    assert in_words(2.314, {"sigma_source": 1.2, "sigma_target": 0.8}) == "loss 2.31 sigma 1.20 source 0.80 target"
    assert in_words(2.0, {"sigma_source": None, "sigma_target": 0.8}) == "loss 2.00 sigma 0.80 target"
    assert in_words(0.5, {}) == "loss 0.50"


def test_a_sigma_that_says_nothing_is_warned_of_once_for_each_kind() -> None:
    assert sigma_warnings({"sigma_source": 3 * math.log(10), "sigma_target": 1e-3}, 10) == {}
    found = sigma_warnings({"sigma_source": 7.0, "sigma_target": 1e-4}, 10)
    assert set(found) == {"large sigma", "sigma"}
    assert "sigma of the source has grown to 7.0, far above its largest target log C = 2.3" in found["large sigma"]
    assert "sigma of the target has collapsed to 1.0e-04" in found["sigma"]
    assert "of the source" in sigma_warnings({"sigma_source": 7.0, "sigma_target": 8.0}, 10)["large sigma"]
    assert sigma_warnings({"sigma_source": 1.0, "sigma_target": None}, 10) == {}
    assert sigma_warnings({}, 10) == {}
