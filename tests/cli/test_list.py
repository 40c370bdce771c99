"""`certvol list` prints every entry, or those that hold a word."""

import pytest

from certvol.cli._main import run
from certvol.settings import settings_of
from certvol.training import pseudo_labels


def test_every_pseudo_label_rule_is_listed_with_its_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, rule in pseudo_labels.discover().items():
        assert run(["list", "rules", name]) == 0
        printed = capsys.readouterr().out.replace("│", " ").split()
        assert {name, *rule.summary.split()} <= set(printed)
        assert {f"--pseudo_labels.{each.name}" for each in settings_of(rule.Config)} <= set(printed)


@pytest.mark.parametrize(
    ("words", "present", "absent"),
    [
        (["methods"], ["cvp", "basic", "source_only"], []),
        (["methods", "cvp"], ["cvp"], ["source_only"]),
        (["rules"], ["argmax", "lame", "--pseudo_labels.vote"], []),
        (["rules", "dropout"], ["mc_dropout", "training.mc_passes"], ["argmax"]),
        (["settings", "LEARNING_rate"], ["--training.learning_rate", "> 0"], ["--training.cycles"]),
        (["settings", "norm"], ["mixed, per_domain, dsbn, frozen, auto"], []),
        (["presets"], ["default", "paper", "authors", "quick"], []),
        (["suites", "visda"], ["visda-2017"], ["office-31:"]),
        (["backbones", "small"], ["small_cnn"], ["resnet50\n"]),
    ],
)
def test_entries_are_listed(
    words: list[str], present: list[str], absent: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["list", *words]) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert all(word in printed for word in present)
    assert not any(word in printed for word in absent)
