"""Take an HTML page apart: its tags, its words, its scripts and styles."""

import json
from html.parser import HTMLParser
from typing import Any


class Markup(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: list[tuple[str, dict[str, str | None], str]] = []
        """Tag, attributes and content of each script and style."""
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("dd", "dt", "td", "th", "li"):
            self.text += " "
        if tag in ("script", "style"):
            self.blocks.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem and self.blocks:
            tag, attributes, before = self.blocks[-1]
            self.blocks[-1] = (tag, attributes, before + data)
        else:
            self.text += data

    @property
    def words(self) -> str:
        return " ".join(self.text.split())

    @property
    def data_block(self) -> str:
        return next(text for _, attributes, text in self.blocks if attributes.get("id") == "data")

    @property
    def data(self) -> dict[str, Any]:
        return dict(json.loads(self.data_block))
