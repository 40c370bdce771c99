from pathlib import Path

import pytest

from certvol.data.digits import write_digit_domains


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with two domains of digits, drawn once."""
    root = tmp_path_factory.mktemp("digits")
    write_digit_domains(root, ["thin", "bold"])
    return root
