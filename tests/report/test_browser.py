"""The page in a real browser: what a user sees, clicks and downloads is what Python computes."""

import csv
import io
import time
from pathlib import Path

import numpy as np
import pytest

from certvol.report import page
from certvol.report.records import MEASURES
from certvol.reporting import Silent
from report.browser import Browser
from report.runs import NASTY, MadeRun, make_run, rewrite_json


def _open(browser: Browser, made: MadeRun, **look: object) -> None:
    browser.open(page.write_report(made.path, Silent()), **look)  # type: ignore[arg-type]


def _quiet(browser: Browser) -> None:
    assert browser.requests == []
    assert browser.complaints == []


def _shown(value: int) -> str:
    return f"{value:,}"


def _download(browser: Browser, folder: Path) -> list[dict[str, str]]:
    folder.mkdir(exist_ok=True)
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder), eventsEnabled=True)
    browser.run("document.getElementById('download').click()")
    file, until = folder / "selection.csv", time.monotonic() + 20
    while not file.exists():
        assert time.monotonic() < until, "nothing was downloaded"
        time.sleep(0.05)
    text = file.read_bytes().decode("utf-8")
    file.unlink()
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_the_page_asks_nothing_and_complains_of_nothing(browser: Browser, tmp_path: Path, screenshots: Path) -> None:
    place = page.write_report(make_run(tmp_path, count=60).path, Silent())
    for name, look in (
        ("desktop", {"width": 1280}),
        ("dark", {"width": 1280, "dark": True}),
        ("phone", {"width": 390, "height": 844}),
        ("narrow", {"width": 320, "height": 600}),
    ):
        browser.open(place, **look)  # type: ignore[arg-type]
        _quiet(browser)
        assert browser.run("document.documentElement.scrollWidth") <= look["width"], f"{name}: wider than the screen"
        for id in (
            "risk-coverage",
            "reliability",
            "auroc",
            "correlations",
            "per-class",
            "confusion",
            "sigma",
            "losses",
        ):
            assert browser.count(f"#figure-{id} svg *") > 10, f"{name}: {id} is empty"
        assert browser.count("#top .picture") == browser.count("#bottom .picture") == 20
        browser.screenshot(screenshots / f"{name}.png", whole=True)


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_the_labels_of_bars_are_whole_at_any_width(browser: Browser, tmp_path: Path, width: int) -> None:
    place = page.write_report(make_run(tmp_path, features=False).path, Silent())
    browser.open(place, width=width, height=844)
    for id in ("correlations", "auroc"):
        told = f"[...document.querySelectorAll('#figure-{id} svg text')]"
        labels = browser.run(f"{told}.filter((t) => t.classList.contains('strong')).map((t) => t.textContent)")
        rows = browser.run(
            f"[...document.querySelectorAll('#figure-{id} table tbody tr')].map((r) => r.cells[0].textContent)"
        )
        assert labels == rows
        assert len(labels) >= 2
        edges = browser.run(f"{told}.map((t) => t.getBoundingClientRect()).map((box) => [box.left, box.right])")
        assert all(0 <= left < right <= width for left, right in edges)
        lines = f"{told}.filter((t) => t.classList.contains('strong')).map((t) => t.getBoundingClientRect().top)"
        assert len(set(browser.run(lines))) == len(labels)


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_no_point_covers_the_value_beside_it(browser: Browser, tmp_path: Path, width: int) -> None:
    made = make_run(tmp_path, features=False)
    with rewrite_json(made.path / "metrics.json") as metrics:
        metrics["adapted"]["per_class"] = dict.fromkeys(made.classes, 1.0)
    _open(browser, made, width=width, height=844)
    box = "getBoundingClientRect()"
    svg = "document.querySelectorAll('#figure-per-class svg"
    points = browser.run(f"[...{svg} circle')].map((c) => c.{box}.right)")
    told = f"[...{svg} text')].filter((t) => t.textContent === '100.0 %')"
    values = browser.run(f"{told}.map((t) => [t.{box}.left, t.{box}.right])")
    assert len(points) == 6
    assert len(values) == 3
    assert all(max(points) < left < right <= width for left, right in values)


def test_correlations_have_two_decimals(browser: Browser, tmp_path: Path) -> None:
    made = make_run(tmp_path, features=False)
    with rewrite_json(made.path / "evaluation.json") as evaluation:
        evaluation["correlations"] = {"pearson": {"logit": 0.81, "entropy": 0.0841, "mcd_mu": -0.001}}
    _open(browser, made)
    texts = browser.run(
        "[...document.querySelectorAll('#figure-correlations svg rect')].map((r) => r.previousSibling)"
        ".filter((t) => t.tagName === 'text').map((t) => t.textContent)"
    )
    assert texts == ["0.81", "0.08", "0.00"]
    cells = "[...document.querySelectorAll('#figure-correlations tbody td')].map((c) => c.textContent)"
    assert browser.run(cells) == ["0.81", "0.08", "0.00"]


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("width", [500, 830, 1165, 1280])
def test_the_controls_show_their_choice_whole(browser: Browser, tmp_path: Path, width: int, labelled: bool) -> None:
    _open(browser, make_run(tmp_path, count=12, features=False, labelled=labelled), width=width)
    longest = max((MEASURES[name].title for name in MEASURES), key=len)
    browser.run(f"document.getElementById('measure').append(new Option('{longest}'))")
    cut = browser.run(
        "[...document.querySelectorAll('.controls select')].filter((e) => {"
        "const wide = e.offsetWidth; e.style.width = 'max-content';"
        "const asked = e.offsetWidth; e.style.width = ''; return asked > wide; }).map((e) => e.id)"
    )
    assert cut == []


@pytest.mark.parametrize(("count", "most", "least"), [(28, 14, 14), (27, 14, 13), (1, 1, 0), (60, 20, 20)])
def test_no_image_is_among_the_most_and_the_least_certain(
    browser: Browser, tmp_path: Path, count: int, most: int, least: int
) -> None:
    _open(browser, make_run(tmp_path, count=count, features=False))
    top, bottom = (
        browser.run(f"[...document.querySelectorAll('#{id} .picture')].map((b) => b.title)") for id in ("top", "bottom")
    )
    assert (len(top), len(bottom)) == (most, least)
    assert set(top).isdisjoint(bottom)
    assert (browser.text("#bottom") == "There is no other image.") == (least == 0)
    browser.choose("#coverage", "100")
    browser.choose("#state", "rejected")
    assert browser.text("#top") == browser.text("#bottom") == "No image is left by these filters."
    _quiet(browser)


def test_the_gallery_is_as_high_as_its_rows_and_no_higher_than_the_screen_allows(
    browser: Browser, tmp_path: Path
) -> None:
    heights = "['grid', 'rows'].map((id) => document.getElementById(id).clientHeight)"
    _open(browser, make_run(tmp_path / "few", count=28, features=False))
    grid, rows = browser.run(heights)
    assert grid == rows == 3 * 124 + 16
    browser.choose("#state", "rejected")
    assert browser.run(heights) == [124 + 16] * 2
    browser.choose("#state", "")
    assert browser.run(heights) == [grid, rows]
    assert browser.count("#rows .picture") == 28
    _open(browser, make_run(tmp_path / "many", count=300, features=False))
    grid, rows = browser.run(heights)
    assert grid <= 560 < rows


@pytest.mark.parametrize("coverage", ["100", "92.5", "90", "33.5", "0.5"])
def test_the_command_asks_for_what_the_slider_shows(browser: Browser, tmp_path: Path, coverage: str) -> None:
    made = make_run(tmp_path, count=28, features=False)
    _open(browser, made)
    browser.choose("#coverage", coverage)
    share = float(browser.text("#command").rpartition("--coverage ")[2])
    assert share == float(coverage) / 100
    assert browser.text("#coverage-shown") == f"{100 * share:.1f} %"
    accepted = int(made.accepted(share).sum())
    assert browser.text("#accepted") == str(accepted)
    assert browser.text("#accepted-hint") == f"of 28 images, {100 * accepted / 28:.1f}\u00a0%"
    spoken = browser.run("document.getElementById('coverage').getAttribute('aria-valuetext')")
    assert spoken == f"{100 * share:.1f} %, {accepted} of 28 images accepted"
    browser.choose("#threshold", "1.0")
    reached = float((made.sigma_N >= 1.0).mean())
    assert browser.text("#coverage-shown") == f"{100 * reached:.1f} %"


@pytest.mark.parametrize("coverage", ["100", "90", "62.5", "33.5", "0.5"])
def test_the_slider_gives_the_numbers_python_computes(browser: Browser, tmp_path: Path, coverage: str) -> None:
    made = make_run(tmp_path, count=83, features=False)
    _open(browser, made)
    browser.choose("#coverage", coverage)
    accepted = made.accepted(float(coverage) / 100)
    rest = ~accepted
    assert browser.text("#accepted") == _shown(int(accepted.sum()))
    assert browser.text("#rejected") == _shown(int(rest.sum()))
    assert browser.text("#accepted-accuracy") == f"{100 * made.accuracy(accepted):.1f} %"
    assert browser.text("#rejected-accuracy") == (f"{100 * made.accuracy(rest):.1f} %" if rest.any() else "–")
    assert float(browser.run("document.getElementById('threshold').value")) == made.sigma_N[accepted].min()
    time.sleep(0.5)
    assert browser.text("#live").startswith(f"{_shown(int(accepted.sum()))} of 83 images accepted")


def test_a_typed_threshold_and_another_measure(browser: Browser, tmp_path: Path) -> None:
    made = make_run(tmp_path, count=83, features=False)
    _open(browser, made)
    browser.choose("#threshold", "1.0")
    assert browser.text("#accepted") == str(int((made.sigma_N >= 1.0).sum()))
    assert "--min-certainty 1" in browser.text("#command")
    browser.choose("#threshold", "what")
    assert browser.run("document.getElementById('threshold').getAttribute('aria-invalid')") == "true"
    entropy = next(str(i) for i, name in enumerate(("sigma", "probability", "entropy")) if name == "entropy")
    browser.choose("#measure", entropy)
    browser.choose("#coverage", "50")
    accepted = made.accepted(0.5, -made.extra["entropy"])  # the less, the more certain
    assert browser.text("#accepted") == str(int(accepted.sum()))
    assert browser.text("#accepted-accuracy") == f"{100 * made.accuracy(accepted):.1f} %"
    assert browser.text("#command").endswith("--coverage 0.5 --measure entropy")
    first = browser.run("document.querySelector('#top .picture').title")
    assert first == made.names[int(np.argmin(made.extra["entropy"]))]
    _quiet(browser)


def test_filters_and_download_agree_with_python(browser: Browser, tmp_path: Path) -> None:
    made = make_run(tmp_path, count=83, features=False)
    _open(browser, made)
    browser.choose("#coverage", "60")
    browser.choose("#predicted", "1")
    browser.choose("#right", "wrong")
    browser.choose("#state", "accepted")
    wanted = made.accepted(0.6) & (made.predicted_N == 1) & (made.true_N != 1)
    assert 0 < wanted.sum() < 83
    assert browser.text("#shown-count").split()[0] == str(int(wanted.sum()))
    rows = _download(browser, tmp_path / "down")
    assert [row["path"] for row in rows] == [
        made.names[i] for i in sorted(np.flatnonzero(wanted), key=lambda i: (-made.sigma_N[i], i))
    ]
    for row in rows:
        i = made.names.index(row["path"])
        assert row["label"] == made.classes[made.predicted_N[i]]
        assert row["truth"] == made.classes[made.true_N[i]]
        assert float(row["sigma"]) == made.sigma_N[i]
        assert float(row["probability"]) == made.probability_N[i]
        assert row["accepted"] == "true"
    browser.choose("#order", "up")
    assert [row["path"] for row in _download(browser, tmp_path / "down")] == [row["path"] for row in rows][::-1]
    browser.choose("#true", "1")  # wrong, and of the class it was taken for: nobody
    assert browser.text("#shown-count") == "0 images"
    assert browser.run("document.getElementById('download').disabled") is True
    _quiet(browser)


def test_without_labels_the_gallery_counts_and_leaves_out_accuracy(
    browser: Browser, tmp_path: Path, screenshots: Path
) -> None:
    made = make_run(tmp_path, count=47, labelled=False, features=False)
    _open(browser, made)
    browser.choose("#coverage", "80")
    assert browser.text("#accepted") == str(int(made.accepted(0.8).sum()))
    assert browser.count("#accepted-accuracy, #true, #right, #figure-confusion, #figure-reliability") == 0
    rows = _download(browser, tmp_path / "down")
    assert len(rows) == 47
    assert list(rows[0]) == ["path", "label", "sigma", "probability", "entropy", "accepted"]
    assert "tells no labels" in browser.text("#overview")
    browser.screenshot(screenshots / "without-labels.png", whole=True)
    _quiet(browser)


def test_without_sigma_the_largest_probability_decides(browser: Browser, tmp_path: Path) -> None:
    made = make_run(tmp_path, count=47, sigma=False, method="basic")
    _open(browser, made)
    browser.choose("#coverage", "70")
    assert browser.text("#accepted") == str(int(made.accepted(0.7, made.probability_N).sum()))
    assert "has no sigma" in browser.text("#overview")
    _quiet(browser)


def test_hostile_names_are_text_on_the_screen_and_in_the_table(
    browser: Browser, tmp_path: Path, screenshots: Path
) -> None:
    names = [f"{name.replace('/', '∕')[:200]}{i}.png" for i, name in enumerate(NASTY)] + [
        f"{i:03d}.png" for i in range(40)
    ]
    made = make_run(tmp_path, classes=NASTY, count=len(names), names=names)
    place = page.write_report(made.path, Silent())
    browser.open(place)
    browser.run("document.querySelector('#top .picture').click()")
    for option in range(len(NASTY)):
        browser.choose("#predicted", str(option))
    browser.choose("#predicted", "-1")
    assert browser.count("img, iframe, object, script:not([type]):not(:only-of-type) ~ script:not([type])") == 0
    shown = browser.run("[...document.querySelectorAll('#predicted option')].map((o) => o.textContent)")
    used = sorted(set(made.predicted_N.tolist()))
    for label in used:
        if NASTY[label].isprintable():
            assert NASTY[label] in shown
    assert "line\\nbreak\\rand\\ttab" in browser.run("document.body.innerText") or 5 not in used
    rows = _download(browser, tmp_path / "down")
    assert sorted(row["path"].removeprefix("./") for row in rows) == sorted(names)
    for row in rows:
        assert not row["path"].startswith(("=", "+", "-", "@", "\t", "\r"))
        assert not row["label"].startswith(("=", "+", "-", "@", "\t", "\r"))
    assert {row["label"].removeprefix("'") for row in rows} == {NASTY[label] for label in used}
    assert browser.run("document.documentElement.scrollWidth") <= 1280
    browser.screenshot(screenshots / "hostile.png", whole=True)
    _quiet(browser)


@pytest.mark.parametrize("cell", [r"$'caf\xe9 it\'s \\a.png'", r"$'$\'a\'.png'", "😀.png"])
def test_names_that_are_no_unicode_are_in_the_download_as_they_were_in_the_table(
    cell: str, browser: Browser, tmp_path: Path
) -> None:
    made = make_run(tmp_path, count=12, features=False)
    for table in ("predictions.csv", "measures.csv"):
        file, name = made.path / table, made.names[3]
        assert name in file.read_text()
        file.write_text(file.read_text().replace(name, cell))
    _open(browser, made)
    assert cell in [row["path"] for row in _download(browser, tmp_path / "down")]
    _quiet(browser)


def test_the_policy_forbids_what_a_hostile_name_would_do(browser: Browser, tmp_path: Path) -> None:
    """Even where escaping had failed: an injected script does not run and an injected image asks for nothing."""
    _open(browser, make_run(tmp_path, count=12, features=False))
    browser.run(
        "document.body.insertAdjacentHTML('beforeend', '<img src=\"http://127.0.0.1:9/x.png\" onerror=\"window.ran = 1\">');"
        "const s = document.createElement('script'); s.textContent = 'window.ran = 2'; document.body.append(s);"
    )
    time.sleep(0.3)
    assert browser.run("window.ran") is None
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)
    assert [url for url in browser.requests if "127.0.0.1" in url and not _blocked(browser, url)] == []


def _blocked(browser: Browser, url: str) -> bool:
    ids = {
        e["params"]["requestId"]
        for e in browser.events
        if e["method"] == "Network.requestWillBeSent" and e["params"]["request"]["url"] == url
    }
    return all(
        any(
            e["method"] == "Network.loadingFailed"
            and e["params"]["requestId"] == i
            and e["params"].get("blockedReason") == "csp"
            for e in browser.events
        )
        for i in ids
    )


def test_the_gallery_can_be_used_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    made = make_run(tmp_path, count=300, features=False)
    _open(browser, made)
    assert browser.count("#rows .picture") < 120  # only what is in sight
    browser.run("document.querySelector('#rows .picture').focus()")
    place = "document.activeElement.dataset.place"
    browser.key("ArrowRight")
    assert browser.run(place) == "1"
    columns = int(browser.run("Math.floor((document.getElementById('grid').clientWidth - 16) / 92)"))
    browser.key("ArrowDown")
    assert browser.run(place) == str(1 + columns)
    browser.key("End")
    assert browser.run(place) == "299"
    label = browser.run("document.activeElement.getAttribute('aria-label')")
    last = sorted(range(300), key=lambda i: (-made.sigma_N[i], i))[-1]
    assert made.names[last] in label
    assert f"predicted {made.classes[made.predicted_N[last]]}" in label
    browser.key("Enter")
    assert browser.run("document.getElementById('picture').open") is True
    assert browser.text("#picture-name") == made.names[last]
    browser.key("Escape")
    assert browser.run("document.getElementById('picture').open") is False
    assert browser.run(place) == "299"
    _quiet(browser)


def test_everything_that_can_be_used_has_a_name(browser: Browser, tmp_path: Path) -> None:
    _open(browser, make_run(tmp_path, count=60))
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    used = {"button", "slider", "combobox", "textbox", "link", "image", "img", "application", "searchbox"}
    nameless = [
        n for n in nodes if not n.get("ignored") and n["role"]["value"] in used and not n.get("name", {}).get("value")
    ]
    assert nameless == []
    headings = [n["name"]["value"] for n in nodes if not n.get("ignored") and n["role"]["value"] == "heading"]
    assert headings[0] == "run"


def test_the_thumbnails_show_their_images(browser: Browser, tmp_path: Path) -> None:
    """The colour of a class is seen in the middle of its picture: sheet, cell and shape are the right ones."""
    from PIL import Image

    from report.runs import HUES

    made = make_run(tmp_path, count=240, noise=5, features=False)
    (made.target / made.names[0]).unlink()
    _open(browser, made, width=1280, height=1400)
    browser.run("document.getElementById('rows').scrollIntoView({block: 'center', behavior: 'instant'})")
    browser.settle()
    time.sleep(0.3)
    in_sight = browser.run(
        "[...document.querySelectorAll('#rows .picture:not(.wrong):not(.rejected)')].map((b) => {"
        "const r = b.querySelector('.frame').getBoundingClientRect(), x = r.x + r.width / 2, y = r.y + r.height / 2;"
        "return [b.title, x, y, b.contains(document.elementFromPoint(x, y))]; })"
    )
    seen = [(name, x, y) for name, x, y, is_there in in_sight if is_there]
    assert len(seen) > 20
    with Image.open(browser.screenshot(tmp_path / "grid.png")) as picture:
        for name, x, y in seen:
            if name != made.names[0]:
                hue = HUES[made.true_N[made.names.index(name)]]
                np.testing.assert_allclose(
                    picture.convert("RGB").getpixel((int(x), int(y))), hue, atol=45, err_msg=name
                )
    assert "1 of 240 images could not be read" in browser.text("#overview")


def test_a_point_shows_its_image_on_both_sides(browser: Browser, tmp_path: Path) -> None:
    _open(browser, make_run(tmp_path, count=60))
    browser.run("document.querySelector('.scatter').scrollIntoView({block: 'center', behavior: 'instant'})")
    assert browser.count(".scatter") == 2
    browser.run("document.querySelector('.scatter').focus()")
    browser.key("ArrowRight")
    assert browser.run("document.getElementById('tip').hidden") is False
    assert browser.count("#tip .frame > i") == 1
    assert "sigma" in browser.text("#point-live")
    box = browser.run(
        "(() => { const r = document.querySelector('.scatter').getBoundingClientRect(); return [r.x, r.y, r.width]; })()"
    )
    for value in ("truth", "right", "certainty"):
        browser.choose("#colour", value)
    browser.run("document.activeElement.blur()")
    assert browser.run("document.getElementById('tip').hidden") is True
    found = False
    for step in range(40):
        browser.point(box[0] + box[2] * (step + 0.5) / 40, box[1] + box[2] / 2)
        found = found or not browser.run("document.getElementById('tip').hidden")
    assert found
    _quiet(browser)


def test_the_colours_can_be_switched(browser: Browser, tmp_path: Path) -> None:
    _open(browser, make_run(tmp_path, count=12, features=False))
    paper = "getComputedStyle(document.body).backgroundColor"
    light = browser.run(paper)
    browser.run("document.getElementById('theme').click()")
    assert browser.run(paper) != light
    _quiet(browser)


def test_a_comparison_loads_quietly(browser: Browser, tmp_path: Path, screenshots: Path) -> None:
    one = make_run(tmp_path / "a", seed=0)
    two = make_run(tmp_path / "b", seed=1, sigma=False, method="basic", count=40)
    browser.open(page.write_comparison([one.path, two.path], tmp_path / "compared.html"))
    _quiet(browser)
    assert browser.count("#figures svg") == 4
    browser.screenshot(screenshots / "comparison.png", whole=True)


@pytest.mark.slow
def test_twenty_thousand_images_stay_usable(browser: Browser, tmp_path: Path, screenshots: Path) -> None:
    """Photographs, not flat colours: noise takes the most room there is."""
    made = make_run(tmp_path, count=20_000, side=72, noise=60, features=False, distinct=800)
    place = page.write_report(made.path, Silent())
    assert place.stat().st_size < 40_000_000
    browser.open(place)
    paint = browser.run("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    usable = browser.run("performance.timing.domContentLoadedEventEnd - performance.timing.navigationStart")
    print(f"{place.stat().st_size / 1e6:.1f} MB, first paint after {paint:.0f} ms, all there after {usable} ms")
    assert paint < 3000
    browser.choose("#coverage", "75")
    assert browser.text("#accepted") == _shown(int(made.accepted(0.75).sum()))
    slid = browser.run(
        "(() => { const e = document.getElementById('coverage'), t = performance.now(); for (let v = 40; v < 60; v++) "
        "{ e.value = v; e.dispatchEvent(new Event('input')); } return (performance.now() - t) / 20; })()"
    )
    assert slid < 150, f"{slid} ms for a step of the slider"
    browser.run("document.getElementById('grid').scrollTop = document.getElementById('rows').clientHeight / 2")
    browser.settle()
    assert browser.count("#rows .picture") < 150
    assert browser.count("#rows .frame > i") > 20
    browser.screenshot(screenshots / "twenty-thousand.png")
    _quiet(browser)
