"""Complete the documentation site while MkDocs builds it.

The hook adds pages that are generated (reference, examples, and files of the repository's root such
as CONTRIBUTING.md), adds pages that the navigation does not name, and points links to files of the
repository at their page. A page that the navigation names and that does not exist is an error.
"""

import copy
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import site_examples
import site_reference

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "code-of-conduct.md": "CODE_OF_CONDUCT.md",
    "security.md": "SECURITY.md",
    "speed.md": "benchmarks/README.md",
}
EXTRA = {"results/": "Results", "": "Guides"}
"""The section of the navigation for pages that it does not name, by the start of their path."""
UNNAMED = ("index.md",)


def example_pages() -> dict[str, str]:
    """Return the page of each script, by its path in the repository."""
    scripts = sorted(site_examples.EXAMPLES.glob("*.py"))
    return {f"examples/{each.name}": f"examples/{each.stem}.md" for each in scripts}


def generated() -> dict[str, Any]:
    """Return a function per generated page that makes its Markdown."""
    pages: dict[str, Any] = dict(site_reference.PAGES)
    for page, file in ROOT_PAGES.items():
        pages[page] = partial((ROOT / file).read_text, encoding="utf-8")
    for file, page in example_pages().items():
        pages[page] = partial(site_examples.page, ROOT / file)
    return pages


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    docs = Path(config.docs_dir)
    own = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    existing = own | set(generated())
    config.nav = complete(config.nav or [], existing)
    return config


def complete(nav: list[Any], existing: set[str]) -> list[Any]:
    """Add the pages that the navigation lacks; PluginError if it names one that does not exist."""
    named = set(named_pages(nav))
    if absent := sorted(named - existing):
        raise PluginError(
            f"mkdocs.yml names {', '.join(absent)}, which does not exist; add the page to docs/, "
            "or remove it from `nav`"
        )
    done = copy.deepcopy(nav)
    for page in sorted(existing - named):
        if page.startswith(UNNAMED):
            continue
        part = next(part for start, part in EXTRA.items() if page.startswith(start))
        section = next(entry[part] for entry in done if part in entry)
        section.append(page)
    return done


def named_pages(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(value, list):
            yield from named_pages(value)
        elif not re.match(r"[a-z]+:", value):
            yield value


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, make in generated().items():
        files.append(File.generated(config, page, content=make()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave docs/ at the page of that file; without a page, only name the file."""
    place = page.file.src_uri
    own = {page: file for file, page in example_pages().items()}
    origin = PurePosixPath({**ROOT_PAGES, **own}.get(place, f"docs/{place}"))
    return repository_links(markdown, origin, place)


def repository_links(markdown: str, origin: PurePosixPath, place: str) -> str:
    """Rewrite links that are relative to `origin`, a path in the repository, for a page."""
    page_of = {file: page for page, file in ROOT_PAGES.items()}
    page_of |= example_pages()

    def replaced(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if re.match(r"[a-z]+:|/", target):
            return found[0]
        file = os.path.normpath(origin.parent / target)
        if (ROOT / file / "results.csv").exists():
            file += "/results.csv"
        page = page_of.get(file) or file.removeprefix("docs/")
        if file not in page_of and not file.startswith("docs/"):
            if not (ROOT / file).exists():
                return found[0]  # MkDocs reports it
            return f"{text} (`{file}`)" if file not in text else text
        return f"[{text}]({os.path.relpath(page, PurePosixPath(place).parent)}{anchor})"

    outside_code = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)
    link = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
    return "".join(p if p.startswith("```") else link.sub(replaced, p) for p in outside_code)
