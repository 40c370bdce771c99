"""In a real browser, the gallery filters, sorts and downloads what Python computes."""

import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from support.browser import TWO_FRAMES, Browser, assert_quiet, download, open_report
from support.made_runs import HUES, NASTY, make_run

ACCENTED = """(() => {
  const row = e.getContext('2d').getImageData(0, e.height - 2, e.width, 1).data;
  const accent = getComputedStyle(document.documentElement).getPropertyValue('--accent');
  const green = parseInt(accent.trim().slice(3, 5), 16);
  let edge = 0;
  for (let x = 0; x < e.width; x++)
    if (row[4 * x + 3] > 128 && row[4 * x + 1] === green) edge = x + 1;
  return [edge, e.width];
})()"""
"""The end of the accented bars of a histogram, and its width."""


@pytest.mark.parametrize(
    ("count", "most", "least"), [(28, 14, 14), (27, 14, 13), (1, 1, 0), (60, 20, 20)]
)
def test_no_image_is_in_both_strips(
    browser: Browser, tmp_path: Path, count: int, most: int, least: int
) -> None:
    open_report(browser, make_run(tmp_path, count=count, features=False))
    top, bottom = (browser.each(f"#{strip} .picture", "e.title") for strip in ("top", "bottom"))
    assert (len(top), len(bottom)) == (most, least)
    assert set(top).isdisjoint(bottom)
    assert (browser.text("#bottom") == "There are no more images.") == (least == 0)
    browser.choose("#coverage", "100")
    browser.choose("#state", "rejected")
    assert browser.text("#top") == browser.text("#bottom") == "No image matches these filters."
    assert_quiet(browser)


def test_the_gallery_is_as_high_as_its_rows_up_to_a_limit(browser: Browser, tmp_path: Path) -> None:
    def heights() -> list[int]:
        return browser.each("#grid, #rows", "e.clientHeight")

    open_report(browser, make_run(tmp_path / "few", count=28, features=False))
    assert heights() == [3 * 124 + 16] * 2
    browser.choose("#state", "rejected")
    assert heights() == [124 + 16] * 2
    browser.choose("#state", "")
    assert heights() == [3 * 124 + 16] * 2
    assert browser.count("#rows .picture") == 28
    open_report(browser, make_run(tmp_path / "many", count=300, features=False))
    grid, rows = heights()
    assert grid <= 560 < rows


@pytest.mark.parametrize("width", [400, 1280])
def test_accepted_images_end_below_the_thumb_of_the_slider(
    browser: Browser, tmp_path: Path, width: int
) -> None:
    open_report(browser, make_run(tmp_path, count=400, features=False), width=width)
    for coverage in (0.5, 40.0, 75.0, 100.0):
        browser.choose("#coverage", str(coverage))
        edge, wide = browser.one("#histogram", ACCENTED)
        thumb = 8 + (wide - 16) * (coverage - 0.5) / 99.5  # its middle; it is 16 pixels wide
        # Some images are equally certain.
        assert edge == pytest.approx(thumb, abs=4 if coverage > 0.5 else 9), coverage


def test_the_slider_gives_the_numbers_python_computes(browser: Browser, tmp_path: Path) -> None:
    made = make_run(tmp_path, count=83, features=False)
    open_report(browser, made)
    for coverage in ("100", "92.5", "62.5", "33.5", "0.5"):
        browser.choose("#coverage", coverage)
        share = float(coverage) / 100
        accepted = made.accepted(share)
        count, rest = int(accepted.sum()), ~accepted
        assert browser.text("#accepted") == str(count)
        assert browser.text("#accepted-hint") == f"of 83 images, {100 * count / 83:.1f}\u00a0%"
        assert browser.text("#rejected") == str(83 - count)
        assert browser.text("#accepted-accuracy") == f"{100 * made.accuracy(accepted):.1f} %"
        left = f"{100 * made.accuracy(rest):.1f} %" if rest.any() else "–"
        assert browser.text("#rejected-accuracy") == left
        assert float(browser.one("#threshold", "e.value")) == made.sigma_N[accepted].min()
        assert float(browser.text("#command").rpartition("--coverage ")[2]) == share
        assert browser.text("#coverage-shown") == f"{100 * share:.1f} %"
        spoken = browser.one("#coverage", "e.getAttribute('aria-valuetext')")
        assert spoken == f"{100 * share:.1f} %, {count} of 83 images accepted"
        live = "document.querySelector('#live').textContent"
        browser.wait(f"{live}.startsWith('{count} of 83 images accepted')")


def test_a_typed_threshold_and_another_measure(browser: Browser, tmp_path: Path) -> None:
    made = make_run(tmp_path, count=83, features=False)
    open_report(browser, made)
    browser.choose("#threshold", "1.0")
    assert browser.text("#accepted") == str(int((made.sigma_N >= 1.0).sum()))
    assert browser.text("#coverage-shown") == f"{100 * (made.sigma_N >= 1.0).mean():.1f} %"
    assert "--min-certainty 1" in browser.text("#command")
    browser.choose("#threshold", "what")
    assert browser.one("#threshold", "e.getAttribute('aria-invalid')") == "true"
    browser.choose("#measure", str(["sigma", "probability", "entropy"].index("entropy")))
    browser.choose("#coverage", "50")
    accepted = made.accepted(0.5, -made.extra["entropy"])  # less entropy is more certain
    assert browser.text("#accepted") == str(int(accepted.sum()))
    assert browser.text("#accepted-accuracy") == f"{100 * made.accuracy(accepted):.1f} %"
    assert browser.text("#command").endswith("--coverage 0.5 --measure entropy")
    first = browser.one("#top .picture", "e.title")
    assert first == made.names[int(np.argmin(made.extra["entropy"]))]
    assert_quiet(browser)


def test_filters_and_download_agree_with_python(browser: Browser, tmp_path: Path) -> None:
    made = make_run(tmp_path, count=83, features=False)
    open_report(browser, made)
    choices = {"coverage": "60", "predicted": "1", "right": "wrong", "state": "accepted"}
    for name, value in choices.items():
        browser.choose(f"#{name}", value)
    wanted = made.accepted(0.6) & (made.predicted_N == 1) & (made.true_N != 1)
    assert 0 < wanted.sum() < 83
    assert browser.text("#shown-count").split()[0] == str(int(wanted.sum()))
    rows = download(browser, tmp_path / "down")
    order = sorted(np.flatnonzero(wanted), key=lambda i: (-made.sigma_N[i], i))
    assert [row["path"] for row in rows] == [made.names[i] for i in order]
    for i, row in zip(order, rows, strict=True):
        assert row["label"] == made.classes[made.predicted_N[i]]
        assert row["truth"] == made.classes[made.true_N[i]]
        assert float(row["sigma"]) == made.sigma_N[i]
        assert float(row["probability"]) == made.probability_N[i]
        assert row["accepted"] == "true"
    browser.choose("#order", "up")
    assert download(browser, tmp_path / "down") == rows[::-1]
    browser.choose("#true", "1")  # no image is both wrong and of the class it was predicted as
    assert browser.text("#shown-count") == "0 images"
    assert browser.one("#download", "e.disabled") is True
    assert_quiet(browser)


def test_without_labels_the_gallery_leaves_out_accuracies(browser: Browser, tmp_path: Path) -> None:
    made = make_run(tmp_path, count=47, labelled=False, features=False)
    open_report(browser, made)
    browser.choose("#coverage", "80")
    assert browser.text("#accepted") == str(int(made.accepted(0.8).sum()))
    labelled = "#accepted-accuracy, #true, #right, #figure-confusion, #figure-reliability"
    assert browser.count(labelled) == 0
    rows = download(browser, tmp_path / "down")
    assert len(rows) == 47
    assert list(rows[0]) == ["path", "label", "sigma", "probability", "entropy", "accepted"]
    assert "has no labels" in browser.text("#overview")
    assert_quiet(browser)


def test_without_sigma_the_largest_probability_decides(browser: Browser, tmp_path: Path) -> None:
    made = make_run(tmp_path, count=47, sigma=False, method="basic")
    open_report(browser, made)
    browser.choose("#coverage", "70")
    assert browser.text("#accepted") == str(int(made.accepted(0.7, made.probability_N).sum()))
    assert "has no sigma" in browser.text("#overview")
    assert_quiet(browser)


def test_hostile_names_are_text_on_the_screen_and_in_the_table(
    browser: Browser, tmp_path: Path, screenshots: Path
) -> None:
    names = [f"{name.replace('/', '∕')[:200]}{i}.png" for i, name in enumerate(NASTY)]
    names += [f"{i:03d}.png" for i in range(40)]
    made = make_run(tmp_path, classes=NASTY, count=len(names), names=names)
    open_report(browser, made)
    browser.one("#top .picture", "e.click()")
    used = sorted(set(made.predicted_N.tolist()))
    options = browser.each("#predicted option", "[e.value, e.textContent]")
    assert [int(value) for value, _ in options] == [-1, *used]
    for value, shown in options[1:]:
        name = NASTY[int(value)]
        assert shown == name if name.isprintable() else "\\" in shown
        browser.choose("#predicted", value)
    browser.choose("#predicted", "-1")
    scripts = "script:not([type]):not(:only-of-type) ~ script:not([type])"
    assert browser.count(f"img, iframe, object, {scripts}") == 0
    rows = download(browser, tmp_path / "down")
    assert sorted(row["path"].removeprefix("./") for row in rows) == sorted(names)
    for row in rows:
        assert not row["path"].startswith(("=", "+", "-", "@", "\t", "\r"))
        assert not row["label"].startswith(("=", "+", "-", "@", "\t", "\r"))
    assert {row["label"].removeprefix("'") for row in rows} == {NASTY[label] for label in used}
    assert browser.run("document.documentElement.scrollWidth") <= 1280
    browser.screenshot(screenshots / "hostile.png", whole=True)
    assert_quiet(browser)


def test_any_name_is_in_the_download_as_in_the_table(browser: Browser, tmp_path: Path) -> None:
    made = make_run(tmp_path, count=12, features=False)
    table = made.path / "measures.csv"
    names = [b"caf\\xe9.png", b"caf\xe9.png", "😀.png".encode()]
    for old, new in zip(made.names[3:], names, strict=False):
        table.write_bytes(table.read_bytes().replace(old.encode(), new))
    open_report(browser, made)
    paths = [row["path"] for row in download(browser, tmp_path / "down")]
    for name in names:
        assert name.decode(errors="backslashreplace") in paths
    assert_quiet(browser)


def test_the_gallery_can_be_used_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    made = make_run(tmp_path, count=300, features=False)
    open_report(browser, made)
    assert browser.count("#rows .picture") < 120  # only those in sight
    browser.one("#rows .picture", "e.focus()")
    place = "document.activeElement.dataset.place"
    browser.key("ArrowRight")
    assert browser.run(place) == "1"
    columns = browser.one("#grid", "Math.floor((e.clientWidth - 16) / 92)")
    browser.key("ArrowDown")
    assert browser.run(place) == str(1 + columns)
    browser.key("End")
    assert browser.run(place) == "299"
    label = browser.run("document.activeElement.getAttribute('aria-label')")
    last = max(range(300), key=lambda i: (-made.sigma_N[i], i))
    assert made.names[last] in label
    assert f"predicted {made.classes[made.predicted_N[last]]}" in label
    browser.key("Enter")
    assert browser.one("#picture", "e.open") is True
    assert browser.text("#picture-name") == made.names[last]
    browser.key("Escape")
    assert browser.one("#picture", "e.open") is False
    assert browser.run(place) == "299"
    assert_quiet(browser)


def test_the_thumbnails_show_their_images(browser: Browser, tmp_path: Path) -> None:
    """The middle of each picture has the colour of its class: sheet, cell and shape are right."""
    made = make_run(tmp_path, count=240, noise=5, features=False)
    (made.target / made.names[0]).unlink()
    open_report(browser, made, height=1400)
    browser.one("#rows", "e.scrollIntoView({block: 'center', behavior: 'instant'})")
    browser.run(TWO_FRAMES)
    time.sleep(0.3)
    middle = (
        "{ const r = e.querySelector('.frame').getBoundingClientRect();"
        "const x = r.x + r.width / 2, y = r.y + r.height / 2;"
        "return [e.title, x, y, e.contains(document.elementFromPoint(x, y))]; }"
    )
    places = browser.each("#rows .picture:not(.wrong):not(.rejected)", middle)
    seen = [(name, int(x), int(y)) for name, x, y, in_sight in places if in_sight]
    assert len(seen) > 20
    with Image.open(browser.screenshot(tmp_path / "grid.png")) as picture:
        pixels = np.asarray(picture.convert("RGB"), dtype=int)
    for name, x, y in seen:
        if name != made.names[0]:
            hue = HUES[made.true_N[made.names.index(name)]]
            np.testing.assert_allclose(pixels[y, x], hue, atol=45, err_msg=name)
    assert "1 of 240 images could not be read" in browser.text("#overview")


@pytest.mark.slow
def test_twenty_thousand_images_stay_usable(
    browser: Browser, tmp_path: Path, screenshots: Path
) -> None:
    # Noise takes the most room.
    made = make_run(tmp_path, count=20_000, side=72, noise=60, features=False, distinct=800)
    place = open_report(browser, made)
    assert place.stat().st_size < 40_000_000
    paint = browser.run("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    assert paint < 3000
    browser.choose("#coverage", "75")
    assert browser.text("#accepted") == f"{int(made.accepted(0.75).sum()):,}"
    step_ms = browser.one(
        "#coverage",
        "{ const start = performance.now(); for (let v = 40; v < 60; v++) { e.value = v; "
        "e.dispatchEvent(new Event('input')); } return (performance.now() - start) / 20; }",
    )
    assert step_ms < 150
    browser.run("grid.scrollTop = rows.clientHeight / 2")
    browser.run(TWO_FRAMES)
    assert browser.count("#rows .picture") < 150
    assert browser.count("#rows .frame > i") > 20
    browser.screenshot(screenshots / "twenty-thousand.png")
    assert_quiet(browser)
