"""In a real browser, a user sees, clicks and downloads what Python computes."""

import time
from pathlib import Path

import numpy as np
import pytest

from certvol.progress import Silent, percent
from certvol.report import page
from certvol.report.records import MEASURES
from support.browser import Browser, assert_quiet, open_report
from support.made_runs import make_run, rewrite_json

BOX = "((b) => [b.left, b.right, b.top, b.bottom])(e.getBoundingClientRect())"
WIDTHS = (320, 390, 1280)
CHARTS = "risk-coverage reliability auroc correlations per-class confusion sigma losses".split()


def test_the_page_loads_nothing_complains_of_nothing_and_fits_the_screen(
    browser: Browser, tmp_path: Path, screenshots: Path
) -> None:
    place = page.write_report(make_run(tmp_path).path, Silent())
    for width, dark in ((1280, False), (1280, True), (390, False), (320, False)):
        browser.open(place, width=width, dark=dark)
        assert_quiet(browser)
        assert browser.run("document.documentElement.scrollWidth") <= width
        for chart in CHARTS:
            assert browser.count(f"#figure-{chart} svg *") > 10, f"{chart} is empty"
        assert browser.count("#top .picture") == browser.count("#bottom .picture") == 20
        browser.screenshot(screenshots / f"{width}{'-dark' * dark}.png", whole=True)


def test_lines_end_where_their_values_are_on_the_axes(browser: Browser, tmp_path: Path) -> None:
    made = make_run(tmp_path, features=False)
    steps = [
        f'{{"phase": "adapt", "step": {x}, "lr": {y}}}' for x, y in ((0, 4), (60, 1), (100, 2))
    ]
    (made.path / "history.jsonl").write_text("\n".join(steps))
    open_report(browser, made)
    chart = "#figure-learning-rate svg"
    texts = dict(
        zip(
            browser.each(f"{chart} text", "e.textContent"),
            browser.each(f"{chart} text", BOX),
            strict=True,
        )
    )
    (path,) = browser.each(f"{chart} path", "e.getAttribute('d')")
    points = np.array([point.split() for point in path[1:].split("L")], dtype=float)
    left, top = (browser.one(chart, BOX)[i] for i in (0, 2))
    for label, y in (("4", points[0, 1]), ("1", points[1, 1]), ("2", points[2, 1])):
        assert sum(texts[label][2:]) / 2 - top == pytest.approx(y, abs=2)  # the label's middle
    assert sum(texts["60"][:2]) / 2 - left == pytest.approx(points[1, 0], abs=2)


def test_the_labels_of_bars_are_complete_at_any_width(browser: Browser, tmp_path: Path) -> None:
    place = page.write_report(make_run(tmp_path, features=False).path, Silent())
    for width in WIDTHS:
        browser.open(place, width=width)
        for chart in ("correlations", "auroc"):
            labels = f"#figure-{chart} svg text.strong"
            rows = browser.each(f"#figure-{chart} tbody th", "e.textContent")
            assert browser.each(labels, "e.textContent") == rows
            assert len(rows) >= 2
            edges = browser.each(f"#figure-{chart} svg text", BOX)
            assert all(0 <= left < right <= width for left, right, _, _ in edges)
            assert len({top for _, _, top, _ in browser.each(labels, BOX)}) == len(rows)


def test_no_point_covers_the_value_beside_it(browser: Browser, tmp_path: Path) -> None:
    made = make_run(tmp_path, features=False)
    with rewrite_json(made.path / "metrics.json") as metrics:
        metrics["adapted"]["per_class"] = dict.fromkeys(made.classes, 1.0)
    place = page.write_report(made.path, Silent())
    for width in WIDTHS:
        browser.open(place, width=width)
        points = browser.each("#figure-per-class svg circle", BOX)
        texts = browser.each("#figure-per-class svg text", f"[e.textContent, {BOX}]")
        values = [box for text, box in texts if text == "100.0 %"]
        assert (len(points), len(values)) == (6, 3)
        edge = max(right for _, right, _, _ in points)
        assert all(edge < left < right <= width for left, right, _, _ in values)


def test_both_points_show_where_their_values_are_equal(browser: Browser, tmp_path: Path) -> None:
    made = make_run(tmp_path, features=False)
    with rewrite_json(made.path / "metrics.json") as metrics:
        for model in ("source_only", "adapted"):
            metrics[model]["per_class"] = dict.fromkeys(made.classes, 0.5)
    open_report(browser, made)
    points = browser.each(
        "#figure-per-class svg circle", "[e.getAttribute('r') * 1, getComputedStyle(e).fill]"
    )
    (ring, ring_fill), (dot, dot_fill) = points[:2]
    assert ring > dot + 1
    assert ring_fill == "none"
    assert dot_fill != "none"


def test_a_comparison_on_a_phone_shows_accuracies_and_the_whole_button(
    browser: Browser, tmp_path: Path
) -> None:
    runs = [make_run(tmp_path / name, features=False).path for name in "ab"]
    browser.open(page.write_comparison(runs, tmp_path / "both.html"), width=400)
    assert_quiet(browser)
    assert browser.run("document.documentElement.scrollWidth") <= 400
    heads = dict(browser.each("#overview th", f"[e.textContent, {BOX}]"))
    for name in ("before", "after"):
        left, right, top, bottom = heads[name]
        assert 0 <= left < right <= 400
        assert bottom - top < 40  # one line: no gap above the others
    left, right, _, _ = browser.one("#theme", BOX)
    assert 0 <= left < right <= 400


def test_python_and_the_page_round_alike(browser: Browser, tmp_path: Path) -> None:
    """Both sides round a value exactly between two figures to the even one."""
    made = make_run(tmp_path, features=False)
    scores = [0.0625, 0.1875, 0.00049, 0.0, 1.0]
    shares = [0.1025, 0.1075, 0.10249, 0.0, 0.00049, 1.0]
    with rewrite_json(made.path / "evaluation.json") as evaluation:
        evaluation["auroc"] = dict(zip(MEASURES, scores, strict=False))
    with rewrite_json(made.path / "metrics.json") as metrics:
        metrics["adapted"]["per_class"] = {f"class {i}": share for i, share in enumerate(shares)}
    open_report(browser, made)
    shown = browser.each("#figure-auroc svg text:not(.strong)", "e.textContent")
    assert {f"{score:.3f}" for score in scores} <= set(shown)
    shown = browser.each("#figure-per-class svg text:not(.strong)", "e.textContent")
    assert {f"{percent(share)} %" for share in shares} <= set(shown)


def test_correlations_have_two_decimals(browser: Browser, tmp_path: Path) -> None:
    made = make_run(tmp_path, features=False)
    with rewrite_json(made.path / "evaluation.json") as evaluation:
        values = {"logit": 0.81, "entropy": 0.0841, "mcd_mu": -0.001}
        evaluation["correlations"] = {"pearson": values}
    open_report(browser, made)
    beside = browser.each(
        "#figure-correlations svg text + rect[rx]", "e.previousSibling.textContent"
    )
    assert beside == ["0.81", "0.08", "0.00"]
    cells = browser.each("#figure-correlations tbody td", "e.textContent")
    assert cells == ["0.81", "0.08", "0.00"]


@pytest.mark.parametrize("labelled", [True, False])
def test_the_lists_are_wide_enough_for_their_choice(
    browser: Browser, tmp_path: Path, labelled: bool
) -> None:
    made = make_run(tmp_path, count=12, features=False, labelled=labelled)
    place = page.write_report(made.path, Silent())
    longest = max((measure.title for measure in MEASURES.values()), key=len)
    missing = (
        "{ const is = e.offsetWidth; e.style.width = 'max-content'; const needs = e.offsetWidth; "
        "e.style.width = ''; return Math.max(0, needs - is); }"
    )
    for width in (500, 830, 1165, 1280):
        browser.open(place, width=width)
        browser.one("#measure", f"e.append(new Option('{longest}'))")
        widths = browser.each(".controls select", missing)
        assert widths == [0] * len(widths)


def test_the_policy_stops_code_even_if_escaping_failed(browser: Browser, tmp_path: Path) -> None:
    open_report(browser, make_run(tmp_path, count=12, features=False))
    image = '<img src="http://127.0.0.1:9/x.png" onerror="window.ran = 1">'
    browser.run(
        f"document.body.insertAdjacentHTML('beforeend', '{image}');"
        "const s = document.createElement('script'); s.textContent = 'window.ran = 2';"
        "document.body.append(s);"
    )
    time.sleep(0.3)
    assert browser.run("window.ran") is None
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)
    assert len(browser.requests) == len(browser.blocked)


def test_everything_a_user_can_operate_has_a_name(browser: Browser, tmp_path: Path) -> None:
    open_report(browser, make_run(tmp_path))
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    seen = [node for node in nodes if not node.get("ignored")]
    roles = "button slider combobox textbox link image img application searchbox".split()
    used = [node for node in seen if node["role"]["value"] in roles]
    assert len(used) > 20
    assert [node for node in used if not node.get("name", {}).get("value")] == []
    headings = [node["name"]["value"] for node in seen if node["role"]["value"] == "heading"]
    assert headings[0] == "run"


def test_a_point_of_the_layout_shows_its_image(browser: Browser, tmp_path: Path) -> None:
    open_report(browser, make_run(tmp_path))
    assert browser.count(".scatter") == 2
    browser.one(".scatter", "e.scrollIntoView({block: 'center', behavior: 'instant'})")
    browser.one(".scatter", "e.focus()")
    browser.key("ArrowRight")
    assert browser.one("#tip", "e.hidden") is False
    assert browser.count("#tip .frame > i") == 1
    assert "sigma" in browser.text("#point-live")
    for value in ("truth", "right", "certainty"):
        browser.choose("#colour", value)
    browser.run("document.activeElement.blur()")
    assert browser.one("#tip", "e.hidden") is True
    left, right, top, bottom = browser.one(".scatter", BOX)
    shown = []
    for x in np.linspace(left, right, 40):
        browser.point(x, (top + bottom) / 2)
        shown.append(not browser.one("#tip", "e.hidden"))
    assert any(shown)
    assert_quiet(browser)


def test_the_colours_can_be_switched(browser: Browser, tmp_path: Path) -> None:
    open_report(browser, make_run(tmp_path, count=12, features=False))
    paper = "getComputedStyle(e).backgroundColor"
    light = browser.one("body", paper)
    browser.one("#theme", "e.click()")
    assert browser.one("body", paper) != light
    assert_quiet(browser)


def test_a_comparison_draws_its_figures(
    browser: Browser, tmp_path: Path, screenshots: Path
) -> None:
    one = make_run(tmp_path / "a", seed=0)
    two = make_run(tmp_path / "b", seed=1, sigma=False, method="basic", count=40)
    browser.open(page.write_comparison([one.path, two.path], tmp_path / "compared.html"))
    assert_quiet(browser)
    assert browser.count("#figures svg") == 4
    browser.screenshot(screenshots / "comparison.png", whole=True)
