"""Render the scripts of examples/ as pages, with what they print.

A script is split at its `# %%` lines. Cells marked `[markdown]` are text. The others are code,
which is run in order, and the output of each stands below it. Outputs are kept in build/examples
until the script or the package changes.
"""

import ast
import contextlib
import hashlib
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
KEPT = ROOT / "build" / "examples"


@dataclass(frozen=True)
class Cell:
    text: str
    is_code: bool


def cells(script: str) -> list[Cell]:
    """Split a script at its `# %%` lines."""
    found = []
    for part in re.split(r"^# %%", script, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in body.splitlines())
            found.append(Cell(text.strip(), False))
        else:
            found.append(Cell(body.strip(), True))
    return found


def run_cells(script: Path) -> list[str]:
    """Return what each cell prints; empty for text."""
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
    printed = []
    for cell in cells(script.read_text(encoding="utf-8")):
        output = io.StringIO()
        if cell.is_code:
            with contextlib.redirect_stdout(output):
                exec(compile(ast.parse(cell.text), str(script), "exec"), names)
        printed.append(output.getvalue().rstrip())
    return printed


def outputs(script: Path) -> list[str]:
    """Return what each cell prints, from the last run if nothing has changed since."""
    files = [script, *sorted((ROOT / "src").rglob("*.py"))]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    kept = KEPT / f"{script.stem}.json"
    if kept.exists():
        found = json.loads(kept.read_text(encoding="utf-8"))
        if found["digest"] == digest:
            return list(found["outputs"])
    printed = run_cells(script)
    KEPT.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps({"digest": digest, "outputs": printed}), encoding="utf-8")
    return printed


def page(script: Path) -> str:
    """Return the script as Markdown."""
    parts = []
    found = cells(script.read_text(encoding="utf-8"))
    for cell, output in zip(found, outputs(script), strict=True):
        parts.append(f"```python\n{cell.text}\n```" if cell.is_code else cell.text)
        if output:
            parts.append(f'```text title="Output"\n{output}\n```')
    where = f"This page is the script `examples/{script.name}`, run when the site was built."
    return "\n\n".join([*parts, where]) + "\n"
