"""Random streams."""

import torch

from certvol.randomness import seed_torch


def test_seeding_for_a_device_draws_what_torchs_own_seeding_draws() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        expected = torch.rand(4)
        seed_torch(torch.device("cpu"), 3)
        assert torch.equal(torch.rand(4), expected)
