"""Reads pages that the package writes, with the standard library's parser."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
ADDRESSES = {"src", "href", "action", "srcset", "data", "poster", "formaction", "xlink:href"}


class WellFormed(HTMLParser):
    """Fails for tags that are not closed, or closed in another order. Collects addresses, styles, scripts and text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.inside: dict[str, str] = {}  # by id, the text in script elements
        self.styles = ""
        self.text = ""
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        named = dict(attributes)
        assert len(named) == len(attributes), f"{tag} has an attribute twice"
        self.addresses += [value or "" for name, value in attributes if name in ADDRESSES]
        self.handlers += [name for name in named if name.startswith("on")]
        self.styles += named.get("style") or ""
        if tag not in VOID:
            self.open.append(tag if tag != "script" else f"script {named.get('id', '')}")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop().split()[0] == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside.startswith("script"):
            self.inside[inside[7:]] = self.inside.get(inside[7:], "") + data
        elif inside == "style":
            self.styles += data
        else:
            self.text += data


def check_page(path: Path) -> WellFormed:
    """The page, if it is well-formed and refers to nothing outside of it."""
    page = WellFormed()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    assert page.open == []
    assert all(address.startswith("#") for address in page.addresses), page.addresses
    assert not re.search(r"url\(|@import", page.styles)
    assert page.handlers == [] and not {"link", "iframe", "img", "object", "base"} & set(page.tags)
    return page


def parse_page(path: Path) -> dict[str, Any]:
    """The data of a report."""
    return json.loads(check_page(path).inside["data"])
