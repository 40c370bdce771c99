"""Completion scripts name every command, option and setting, and run without torch."""

import subprocess

import pytest

from certvol.cli._main import run


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_names_commands_options_and_settings(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name in ("evaluate", "resume", "training.cycles", "method.num_samples", "per_domain"):
        assert name in script
    assert "python" not in script


def test_bash_completes_settings_and_their_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    words = (
        "COMP_WORDS=(certvol adapt --training.pre); COMP_CWORD=2; _shtab_certvol\n"
        "echo ${COMPREPLY[@]}\n"
        "COMP_WORDS=(certvol adapt --method c); COMP_CWORD=3; _shtab_certvol\n"
        "echo ${COMPREPLY[@]}\n"
    )
    done = subprocess.run(
        ["bash", "-c", script + words], capture_output=True, text=True, check=True
    )
    settings, methods = done.stdout.splitlines()
    assert {"--training.pretrain_steps", "--training.precision"} <= set(settings.split())
    assert {"can", "cdan", "cvp"} <= set(methods.split())
