from pathlib import Path

import pytest

from certvol.cli._benchmark_worker import CompiledNetworks


def test_compiled_networks_are_forgotten_only_for_another_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[str] = []
    compiled = CompiledNetworks()
    places = {
        "first": "method: {name: cvp}\ntraining: {batch_size: 32}",
        "other method": "method: {name: basic}\ntraining: {batch_size: 32, cycles: 3}",
        "other batches": "method: {name: basic}\ntraining: {batch_size: 64}",
        "damaged": "{",
        "same batches": "method: {name: cvp}\ntraining: {batch_size: 64}",
        "other norm mode": "model: {norm: dsbn}\ntraining: {batch_size: 64}",
    }
    for place in places:
        monkeypatch.setattr("torch.compiler.reset", lambda place=place: forgotten.append(place))
        (tmp_path / "settings.yaml").write_text(places[place])
        compiled.keep_for(tmp_path / "settings.yaml")
    assert forgotten == ["other batches", "other norm mode"]
