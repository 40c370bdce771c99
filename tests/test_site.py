"""The pages of the documentation that are generated, and the checks of its links."""

from pathlib import Path, PurePosixPath

import pytest

import check_site
import site_examples
import site_reference
from certvol.methods import discover
from certvol.runs.folder import RunFolder
from certvol.settings import SECTIONS, settings_of

pytest.importorskip("mkdocs")
from mkdocs.exceptions import PluginError

import site_hook

# Their settings are the paper's own, or their defaults are the published ones.
UNPUBLISHED = ("source_only", "basic", "cvp", "coral", "jda", "gtda")
WORDS = PurePosixPath("docs/guides/a.md")


def test_every_setting_of_a_section_is_on_the_settings_page() -> None:
    page = site_reference.settings()
    for section, cls in SECTIONS.items():
        for each in settings_of(cls):
            assert f"| `{section}.{each.name}` |" in page


def test_every_method_has_its_text_and_its_settings() -> None:
    page = site_reference.methods()
    for name, method in discover().items():
        part = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        for each in settings_of(method.Config):
            assert f"`method.{each.name}`" in part, f"{name}: {each.name}"
    assert "**Deliberate differences:**" in page


def test_every_method_stands_beside_the_systems_of_the_paper() -> None:
    text = (Path(__file__).parents[1] / "docs/comparators.md").read_text(encoding="utf-8")
    for heading in ("Published settings", "Every system of the paper"):
        part = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        systems = "Every" in heading
        for name in discover():
            family = f"`{name.partition('_')[0]}_*`"
            elsewhere = not systems and name in UNPUBLISHED
            assert f"`{name}`" in part or family in part or elsewhere, f"{heading}: {name}"


def test_every_command_is_on_its_page_with_its_options() -> None:
    page = site_reference.commands()
    part = page.partition("\n## predict\n")[2].partition("\n## ")[0]
    for word in ("usage: certvol predict", "--coverage SHARE", "--rejected-dir DIR"):
        assert word in part


def test_the_files_of_a_run_are_described() -> None:
    page = site_reference.run_folder()
    places = {name: own for name, own in vars(RunFolder("RUN")).items() if isinstance(own, Path)}
    internal = {"path", "lock_file", "projection", "guesses"}
    for name in places.keys() - internal:
        assert f"`{places[name].as_posix()}" in page, name


def test_prose_cannot_become_markup_but_code_stays() -> None:
    assert site_reference.prose("a * b_c <d> `e_f*`") == r"a \* b\_c &lt;d\> `e_f*`"
    assert r"\|" in site_reference.table(["x"], [["a|b"]])


def test_the_navigation_takes_in_new_pages_and_refuses_absent_ones() -> None:
    nav = [{"Home": "index.md"}, {"Guides": [{"A": "a.md"}]}, {"Results": [{"S": "results.md"}]}]
    found = site_hook.complete(nav, {"index.md", "a.md", "results.md", "new.md", "results/new.md"})
    assert found == [
        {"Home": "index.md"},
        {"Guides": [{"A": "a.md"}, "new.md"]},
        {"Results": [{"S": "results.md"}, "results/new.md"]},
    ]
    with pytest.raises(PluginError, match=r"names a\.md, which does not exist"):
        site_hook.complete(nav, {"index.md", "results.md"})


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[x](../results.md#a)", "[x](../results.md#a)"),
        ("[x](../../CONTRIBUTING.md)", "[x](../contributing.md)"),
        ("[x](../../examples/digits.py)", "[x](../examples/digits.md)"),
        ("[x](../../Makefile)", "x (`Makefile`)"),
        ("[x](https://a.org/b)", "[x](https://a.org/b)"),
        ("[x](../../absent.txt)", "[x](../../absent.txt)"),
        ("```\n[x](../../Makefile)\n```", "```\n[x](../../Makefile)\n```"),
    ],
)
def test_links_to_files_of_the_repository_lead_to_their_page(link: str, expected: str) -> None:
    assert site_hook.repository_links(link, WORDS, "guides/a.md") == expected


def test_an_example_becomes_text_code_and_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_examples, "KEPT", tmp_path / "kept")
    script = tmp_path / "a.py"
    script.write_text(
        '# %% [markdown]\n# # Title\n\n# %%\nx = 2\nprint("x", x)\n\n# %%\nprint(x + 1)\n'
    )
    page = site_examples.page(script)
    assert page.startswith("# Title\n\n```python\nx = 2\n")
    assert page.index('title="Output"\nx 2\n') < page.index('title="Output"\n3\n')
    script.write_text(script.read_text().replace("x = 2", "x = 5"))
    assert "x 5" in site_examples.page(script)


def test_broken_links_and_foreign_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.html").write_text('<h1 id="there">c</h1>')
    good = (
        '<a href="b/c.html#there">1</a><a href="https://a.org">2</a><a href="#own" id="own">3</a>'
    )
    (tmp_path / "a.html").write_text(good)
    assert check_site.faults_of_site(tmp_path) == []
    bad = '<a href="d.html">1</a><a href="b/c.html#gone">2</a><img src="https://a.org/x.png">'
    (tmp_path / "a.html").write_text(bad)
    faults = check_site.faults_of_site(tmp_path)
    assert [fault.split(": ")[1] for fault in faults] == [
        "d.html does not exist",
        "b/c.html#gone has no such anchor",
        "https://a.org/x.png is loaded from another host",
    ]
