"""A page holds everything it needs, and runs no code but ours."""

import base64
import hashlib
import json
import re
from pathlib import Path

from certvol.progress import Silent
from certvol.report.records import read_record
from certvol.report.run_page import run_page
from support.made_runs import NASTY, make_run
from support.markup import Markup


def test_everything_is_in_the_page_and_the_policy_allows_nothing_else(tmp_path: Path) -> None:
    page = Markup(run_page(read_record(make_run(tmp_path).path), Silent()))
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), f"{tag} {name}"
            if name in ("src", "href", "action", "srcset", "poster", "data"):
                assert str(value).startswith(("#", "data:,")), f"{tag} {name}={value}"
    (policy,) = (
        attributes["content"]
        for _, attributes in page.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    (script,) = (t for tag, about, t in page.blocks if tag == "script" and "type" not in about)
    (style,) = (text for tag, _, text in page.blocks if tag == "style")
    for text in (script, style):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
        outside = r"https?://(?!www\.w3\.org/2000/svg)|@import|url\((?![\"']?\$\{)"
        assert not re.search(outside, text)


def test_hostile_names_are_text(tmp_path: Path) -> None:
    names = [f"{i}{name.replace('/', '∕')[:120]}.png" for i, name in enumerate(NASTY)]
    names += [f"{i}.png" for i in range(20)]
    made = make_run(tmp_path, classes=NASTY, count=len(names), names=names)
    warning = {"warning": "<script>alert('w')</script>"}
    (made.path / "warnings.jsonl").write_text(json.dumps(warning) + "\n")
    config = made.path / "config.yaml"
    hostile = "'</script><script>alert(3)</script>'"
    config.write_text(config.read_text().replace("small_cnn", hostile))
    text = run_page(read_record(made.path), Silent())
    page = Markup(text)
    assert {tag for tag, _ in page.tags}.isdisjoint({"img", "iframe", "object", "embed"})
    scripts = [about.get("type") for tag, about, _ in page.blocks if tag == "script"]
    assert scripts.count(None) == 1
    assert not set("<>&") & set(page.data_block)
    assert page.data["gallery"]["classes"] == NASTY
    assert sorted(page.data["gallery"]["paths"]) == sorted(names)
    for name in (*NASTY[:3], NASTY[8], warning["warning"]):
        assert name in page.text
    assert "line\\nbreak\\rand\\ttab" in page.text
    assert "\u202e" not in text
