"""Turn a template and its data into one page that needs no network and no other file.

Three defences keep the name of a file or class from running as code: Jinja escapes the markup,
`json_block` escapes the data, and the policy in the page's head allows only our own script and no
requests.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from jinja2.loaders import FunctionLoader
from markupsafe import Markup, escape

from certvol.data.folders import printable

_SCRIPTS = ("start.js", "charts.js", "pictures.js", "gallery.js", "embedding.js")


def render(
    template: str, context: Mapping[str, Any], data: Mapping[str, Any], sheets: Sequence[str] = ()
) -> str:
    """Fill in a template. `data`: for the scripts. `sheets`: thumbnails in base64."""
    style = "\n" + _asset("page.css")
    scripts = "\n".join(_asset(name) for name in _SCRIPTS)
    script = f"\n(() => {{\n'use strict';\n{scripts}\n}})();\n"
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        loader=FunctionLoader(_asset),
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
    )
    environment.filters["code"] = with_code
    return environment.get_template(template).render(
        **context,
        policy=policy,
        style=Markup(style),
        script=Markup(script),
        data=Markup(json_block(data)),
        sheets=[Markup(sheet) for sheet in sheets],
    )


def with_code(text: str) -> Markup:
    """Escape a text and show what stands between backticks as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(printable(text)))))


def json_block(data: Mapping[str, Any]) -> str:
    """Write JSON that cannot end its script block or begin a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return resources.files("certvol.report").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
