import numpy as np

from certvol.runs.folder import to_half


def test_in_half_precision_the_most_probable_class_stays_so() -> None:
    rng = np.random.default_rng(0)
    close_NC = np.full((500, 10), 0.05, np.float32) + rng.uniform(0, 2e-5, (500, 10)).astype(
        np.float32
    )
    labels_N = close_NC.argmax(axis=1)
    assert (close_NC.astype(np.float16).argmax(axis=1) != labels_N).any(), "or nothing is tested"
    half_NC = to_half(close_NC)
    assert half_NC.dtype == np.float16
    assert np.array_equal(half_NC.argmax(axis=1), labels_N)
    assert np.abs(half_NC - close_NC).max() < 1e-4
    assert np.array_equal(to_half(np.eye(3, dtype=np.float32)), np.eye(3))
