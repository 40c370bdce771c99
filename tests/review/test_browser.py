"""In a real browser: label by keyboard, lose the server, continue, and see what Python computes."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from certvol.review.estimates import estimate
from certvol.review.guesses import stored_guesses
from certvol.review.target import open_target
from certvol.runs.review_labels import read_review
from support.browser import Browser
from support.made_runs import NASTY, MadeRun
from support.reviews import made_for_review, served, session_of, stored

CLASSES = ["back_pack", "bike helmet", "calculator", "desk chair", "laptop", "mug", "Ruler & <b>"]
LOADED = (
    "document.querySelectorAll('#likeliest button').length > 0"
    " && document.querySelector('#picture').naturalWidth > 0"
)


@contextmanager
def reviewing(made: MadeRun, *words: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Run `certvol review`; yield the process and the page's address."""
    command = [sys.executable, "-m", "certvol", "review", str(made.path), "--no-browser", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = re.search(r"http://\S+", process.stdout.readline())
        assert address is not None
        yield process, address[0]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def label(browser: Browser, key: str, count: int) -> None:
    """Press a key; wait until the page has so many labels and the next image."""
    browser.press(key)
    browser.wait(f"document.querySelector('#count').textContent.startsWith('{count} of ')")


def shown_share(browser: Browser, name: str) -> list[float]:
    """Return the numbers of a figure: the share, its interval, and bounds with unsure images."""
    text = browser.text(f"#{name} .value") + browser.text(f"#{name} .words")
    return [float(number) for number in re.findall(r"[\d.]+(?= %)", text)]


def test_thirty_images_labelled_by_keyboard_outlive_a_kill(
    browser: Browser, tmp_path: Path, screenshots: Path
) -> None:
    made = made_for_review(tmp_path, 300, classes=CLASSES)
    words = ["--labels", "25", "--max-error", "0.8"]
    keys = ["1", "2", "1", "1", "-", "1", "1", "?", "1", "1"] * 2
    with reviewing(made, *words) as (process, address):
        browser.open(address)
        browser.wait(LOADED)
        for count, key in enumerate(keys, start=1):
            label(browser, key, count)
        process.send_signal(signal.SIGKILL)
        process.wait()
        browser.press("1")
        browser.wait("!document.querySelector('#error').hidden")
        assert "every answer is saved" in browser.text("#error")
    assert len(stored(made)) == 20
    with reviewing(made, *words) as (process, address):
        browser.open(address)
        browser.wait(LOADED)
        assert browser.text("#count") == "20 of 50 labelled"
        for count in range(21, 31):
            label(browser, "1", count)
        assert browser.text("#phase").startswith("Chosen image")
        target = open_target(made.path)
        reviews = read_review(made.path / "review.csv", CLASSES)
        found = estimate(target, reviews, 0.8, stored_guesses(target).before_N(target))
        assert (found.random, found.chosen, found.none, found.unsure) == (25, 5, 2, 2)
        assert found.before is not None
        assert found.bounds is not None
        accuracy = [*found.accuracy, *found.bounds]
        for name, interval in (("accuracy", accuracy), ("before", list(found.before))):
            expected = [round(100 * value, 1) for value in interval]
            assert shown_share(browser, name) == pytest.approx(expected, abs=0.051)
        assert found.threshold.threshold is None  # before 50 labels
        assert "about 50 random labels should" in browser.text("#threshold .words")
        assert browser.text("#more .value") == f"+ {found.to_halve}"
        items = target.queue(25)
        rows = [item.row for item in items[:30]]
        assert [target.row_of[each.path] for each in reviews] == rows
        likeliest = stored_guesses(target).likeliest(target)
        answered = [*keys, *["1"] * 10]
        for row, key, each in zip(rows, answered, reviews, strict=True):
            by_key = {"-": None, "?": None} | {
                str(place): CLASSES[label] for place, label in enumerate(likeliest[row], start=1)
            }
            assert each.label == by_key[key]
        assert browser.complaints == []
        assert browser.blocked == []
        browser.screenshot(screenshots / "review.png")
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        said = process.stdout.read()
        assert process.wait() == 0
        assert "25 random and 5 chosen images labelled" in said


def test_a_class_is_found_by_typing_and_an_answer_is_undone(
    browser: Browser, tmp_path: Path
) -> None:
    made = made_for_review(tmp_path, classes=CLASSES)
    with session_of(made) as session, served(session) as address:
        browser.open(address)
        browser.wait(LOADED)
        for letter in "back p":
            browser.press(letter)
        assert browser.each("#matches li", "e.textContent") == ["back_pack"]
        assert browser.one("#search", "e.getAttribute('aria-activedescendant')") == "match-0"
        browser.key("Enter")
        browser.wait("document.querySelector('#count').textContent.startsWith('1 of ')")
        assert [each.label for each in stored(made)] == ["back_pack"]
        assert "back_pack. Image 2 of" in browser.text("#live")
        browser.press("r")
        browser.press("u")
        found = browser.each("#matches li", "e.textContent")
        assert found == ["Ruler & <b>"]
        browser.key("Escape")
        assert browser.one("#matches", "e.hidden") is True
        browser.press("Backspace")
        browser.wait("document.querySelector('#count').textContent.startsWith('0 of ')")
        assert stored(made) == []
        assert browser.complaints == []


def test_class_names_with_markup_are_text(browser: Browser, tmp_path: Path) -> None:
    classes = [name for name in NASTY if "\n" not in name]
    made = made_for_review(tmp_path, classes=classes)
    with session_of(made) as session, served(session) as address:
        browser.open(address)
        browser.wait(LOADED)
        shown = set(browser.each("#likeliest button span", "e.textContent"))
        assert len(shown) == 5
        assert browser.count("#likeliest script, #likeliest img, #likeliest b") == 0
        browser.press("<")
        found = browser.each("#matches li", "e.textContent")
        assert "<script>alert(1)</script>" in found
        browser.key("Enter")
        browser.wait("document.querySelector('#count').textContent.startsWith('1 of ')")
        assert [each.label in classes for each in stored(made)] == [True]
        assert browser.complaints == []


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (400, False)])
def test_the_page_fits_the_screen_and_names_its_controls(
    browser: Browser, tmp_path: Path, screenshots: Path, width: int, dark: bool
) -> None:
    made = made_for_review(tmp_path, classes=CLASSES)
    with session_of(made) as session, served(session) as address:
        browser.open(address, width=width, height=800, dark=dark)
        browser.wait(LOADED)
        assert browser.run("document.documentElement.scrollWidth") <= width
        tree = browser.call("Accessibility.getFullAXTree")["nodes"]
        seen = [node for node in tree if not node.get("ignored")]
        controls = [
            node for node in seen if node["role"]["value"] in ("button", "combobox", "progressbar")
        ]
        assert len(controls) >= 9
        assert [node for node in controls if not node.get("name", {}).get("value")] == []
        assert [url for url in browser.requests if not url.startswith(address)] == []
        browser.screenshot(screenshots / f"review-{width}{'-dark' * dark}.png", whole=True)


def test_the_end_says_what_to_do_next(browser: Browser, tmp_path: Path) -> None:
    made = made_for_review(tmp_path, 12, classes=["0", "1", "7"])
    with session_of(made, labels=12) as session, served(session) as address:
        browser.open(address)
        browser.wait(LOADED)
        for count in range(1, 13):
            label(browser, "7", count)
        assert browser.one("#done", "e.hidden") is False
        assert f"certvol adapt --from {made.path}" in browser.text("#next")
        assert browser.run("document.activeElement.id") == "done-title"
        assert {each.label for each in stored(made)} == {"7"}  # its own key, not the seventh place
        browser.press("Backspace")
        browser.wait("!document.querySelector('#work').hidden")
        assert len(stored(made)) == 11
