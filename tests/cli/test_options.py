"""Options and settings: which are accepted, and how a mistake is reported."""

import subprocess
import sys
from pathlib import Path

import pytest

from certvol import cli
from certvol.cli import discover
from certvol.cli._main import run
from certvol.cli._options import SHORTHANDS, build_parser, help_of, read
from support.commands import refused, words_of
from support.images import TINY

COMMANDS = (
    "adapt benchmark check completion demo evaluate export extract list predict report".split()
)


def test_every_command_is_found_with_its_help() -> None:
    commands = discover()
    assert set(COMMANDS) <= set(commands)
    files = {path.stem for path in Path(cli.__path__[0]).glob("*.py")}
    assert set(commands) == {name.rstrip("_") for name in files if not name.startswith("_")}
    for module in commands.values():
        assert module.HELP
        assert callable(module.run)


def test_help_needs_no_torch() -> None:
    code = (
        "import sys, certvol.cli._main as cli\n"
        "try: cli.run(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'timm', 'torchvision', 'sklearn', 'matplotlib', 'numpy'}\n"
        "sys.exit(f'loaded {heavy & set(sys.modules)}' if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert command in done.stdout


def test_python_dash_m_is_the_same_command() -> None:
    words = [sys.executable, "-m", "certvol", "list", "presets"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    for preset in ("default", "paper", "authors", "quick"):
        assert preset in done.stdout


def test_the_help_of_a_shorthand_is_the_settings_own() -> None:
    commands = build_parser(discover())[1]
    for command in ("adapt", "benchmark", "extract"):
        options = commands[command]._option_string_actions
        assert {"--config", "--preset", "--device"} <= set(options)
        for flag, name in SHORTHANDS.items():
            if flag in options and options[flag].dest == name:
                assert options[flag].help == f"{help_of(name)}; short for --{name}"


def test_settings_may_stand_anywhere_and_take_either_form() -> None:
    words = ["benchmark", "--training.cycles", "3", "digits", "--out", "o", "--model.norm=frozen"]
    options = read(words, discover())
    assert options is not None
    assert (options.suite, options.out) == ("digits", "o")
    assert options.settings == {"training.cycles": "3", "model.norm": "frozen"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["adpat"], "did you mean `adapt`?"),
        (["adapt", "--target", "T", "--out", "O"], "no source folder"),
        (["adapt", "--source", "S", "--out", "O"], "no target folder"),
        (["adapt", "--source", "S", "--target", "T"], "--out"),
        (["adapt", "--sorce", "S"], "did you mean `--source`?"),
        (["adapt", "--cycles", "3"], "did you mean `--training.cycles`?"),
        (["benchmark", "digits", "--out", "O", "--num_samples=3"], "`--method.num_samples`?"),
        (["adapt", "--training.cycles"], "needs a value"),
        (["adapt", "--training.cycles", "--out", "O"], "needs a value"),
        (["adapt", "--meth", "cvp"], "did you mean `--method"),
        (["adapt", "--resume", "nowhere"], "no run"),
        (["adapt", "--resume", "x", "--training.cycles", "3"], "no other options"),
        (["adapt", "--resume", "x", "--preset", "paper"], "no other options"),
        (["adapt", "--config", "no.yaml"], "cannot read"),
        (["evaluate", "nowhere", "--data", "x"], "no run"),
        (["evaluate", "x", "--data", "y", "--training.seed", "1"], "not know `--training.seed`"),
        (["extract", "x", "--out", "f.npz", "--training.cycles", "3"], "does not use `--training."),
        (["extract", "x", "--out", "f.npz", "--data.image_size", "2"], "`data.image_size` should"),
        (["predict", "nowhere", "x", "--out", "y"], "no file, folder or match"),
        (["predict", "nowhere"], "required"),
        (["list", "nothing"], "invalid choice"),
        (["list", "settings", "unheard"], "has no entry with `unheard`"),
        (["check", "--source", "nowhere", "--target", "nowhere"], "nowhere"),
    ],
)  # fmt: skip
def test_a_mistake_gets_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--training.cyles", "3"], "did you mean `training.cycles`?"),
        (["--training.cycles", "many"], "whole number"),
        (["--method", "cpv"], "did you mean `cvp`?"),
        (["--preset", "papr"], "did you mean `paper`?"),
        (["--backbone", "resnet5O"], "resnet50"),
        (["--weights", "nowhere.safetensors"], "nowhere.safetensors"),
        (["--device", "cuda:77"], "CUDA"),
        (["--device", "gpu"], "unknown device"),
    ],
)
def test_a_wrong_setting_leaves_nothing_behind(
    extra: list[str],
    words: str,
    folders: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    places = {"source": folders[0], "target": folders[1], "out": out}
    given = {"--backbone": "small_cnn", extra[0]: extra[1]}
    pairs = [word for pair in given.items() for word in pair]
    assert words in refused(capsys, "adapt", *words_of(places), *pairs)
    assert not out.exists()


def test_a_shorthand_must_agree_with_its_setting(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["adapt", "--source", "a", "--target", "b", "--out", "c", "--seed", "1"]
    assert (
        "--seed is short for --training.seed, but they differ: 1 and 2; leave one out"
        in refused(capsys, *words, "--training.seed", "2")
    )
    assert "leave one out" not in refused(capsys, *words, "--training.seed", "1")


@pytest.mark.parametrize(
    "option", ["--source", "--target", "--out", "--weights", "--data.cache_dir"]
)
def test_an_empty_path_is_not_the_current_folder(
    option: str,
    folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An unset shell variable gives an empty path."""
    monkeypatch.chdir(tmp_path)
    given = {"--source": str(folders[0]), "--target": str(folders[1]), "--out": "run", option: ""}
    pairs = [word for pair in given.items() for word in pair]
    assert f"`{option}` is empty" in refused(capsys, "adapt", *pairs, *words_of(TINY))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words", [["report", ""], ["predict", "run", "", "--out", "p.csv"], ["adapt", "--out="]]
)
def test_an_empty_argument_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "is empty" in refused(capsys, *words)


def test_a_value_may_end_with_an_equals_sign(capsys: pytest.CaptureFixture[str]) -> None:
    assert "is empty" not in refused(capsys, "adapt", "--out=runs/lr=")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run(["--version"])
    assert capsys.readouterr().out.startswith("certvol 0.")
