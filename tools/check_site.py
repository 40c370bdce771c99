"""Check every link of the built site, and of the READMEs, without a network.

    python tools/check_site.py build/site

A link to another host is not followed. The exit code is 1 if a file or an anchor does not exist.
"""

import argparse
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
LINKS = {"a": "href", "link": "href", "img": "src", "script": "src", "source": "src"}
LOADED = ("img", "link", "script", "source")


class Links(HTMLParser):
    """Collect a page's links and anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.anchors: set[str] = set()

    def has(self, fragment: str) -> bool:
        return unquote(fragment) in self.anchors | {"__skip", "top"}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := given.get(key))}
        target = given.get(LINKS.get(tag, ""))
        if target:
            self.found.append((tag, target))


def read(page: Path) -> Links:
    links = Links()
    links.feed(page.read_text(encoding="utf-8"))
    return links


def faults_of_site(site: Path) -> list[str]:
    """Return a sentence for each link that leads nowhere and each file from another host."""
    pages = {page.resolve(): read(page) for page in site.rglob("*.html")}
    faults = []
    for page, links in pages.items():
        for tag, target in links.found:
            parts = urlsplit(target)
            where = f"{page.relative_to(site.resolve())}: {target}"
            if parts.scheme or parts.netloc:
                if tag in LOADED and parts.scheme != "data":
                    faults.append(f"{where} is loaded from another host")
                continue
            base = site.resolve() if parts.path.startswith("/") else page.parent
            file = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else page
            file = file / "index.html" if file.is_dir() else file
            if not file.exists():
                faults.append(f"{where} does not exist")
            elif parts.fragment and file in pages and not pages[file].has(parts.fragment):
                faults.append(f"{where} has no such anchor")
    return faults


def faults_of_markdown(files: list[Path]) -> list[str]:
    """Return a sentence for each relative link in these files whose file does not exist."""
    faults = []
    for file in files:
        text = re.sub(r"```.*?```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", text):
            if not urlsplit(target).scheme and not (file.parent / target).exists():
                faults.append(f"{file.relative_to(ROOT)}: {target} does not exist")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    site = parser.parse_args().site
    files = [*ROOT.glob("*.md"), *ROOT.glob("*/README.md")]
    faults = faults_of_site(site) + faults_of_markdown(files)
    if faults:
        sys.exit("\n".join([*faults, f"check_site: {len(faults)} broken links"]))
    print(f"check_site: {len(list(site.rglob('*.html')))} pages, no broken link")


if __name__ == "__main__":
    main()
