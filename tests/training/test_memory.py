import pytest
import torch

from certvol.training.memory import largest_batch, rows_that_fit
from methods.test_contract import make_method

GB = 10**9


def test_the_estimate_is_linear_in_the_rows() -> None:
    # 2 GB of weights and 0.1 GB a row: 2.8 and 3.6 GB; of 10 GB nine tenths may be used, which hold 70 rows
    assert rows_that_fit(2.8 * GB, 3.6 * GB, 10 * GB) == 64


def test_where_not_even_eight_rows_fit_there_is_no_advice() -> None:
    assert rows_that_fit(12 * GB, 13 * GB, 10 * GB) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_step_is_measured() -> None:
    rows = largest_batch(make_method("cvp").cuda(), False, torch.device("cuda"))
    assert rows is not None
    assert rows % 8 == 0
