"""Read YAML without surprises: no repeated keys, and no aliases that grow beyond memory."""

from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode

from certvol.errors import UserError, first_line
from certvol.files import check_regular

MOST_BYTES = 1_000_000  # a file with every setting and its help has about 20,000
MOST_ALIASES = 1_000
MOST_ENTRIES = 10_000  # of a mapping with its merge keys


class _Loader(yaml.SafeLoader):
    aliases = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        if self.check_event(yaml.AliasEvent):
            self.aliases += 1
            if self.aliases > MOST_ALIASES:
                raise ConstructorError(None, None, f"it has more than {MOST_ALIASES:,} aliases")
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, ScalarNode) and key.value != "<<"]
        lines: dict[str, int] = {}
        for key in keys:
            line = key.start_mark.line + 1
            if key.value in lines:
                where = f"in lines {lines[key.value]} and {line}"
                raise ConstructorError(None, None, f"`{key.value[:80]}` is given twice, {where}")
            lines[key.value] = line
        return node

    def flatten_mapping(self, node: MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MOST_ENTRIES:
            text = f"its merge keys (<<) expand to more than {MOST_ENTRIES:,} entries"
            raise ConstructorError(None, None, text)


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds; UserError if it cannot be read as one."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read the settings file {path}: {error.strerror}") from None
    if len(content) > MOST_BYTES:
        raise UserError(f"{path} is larger than {MOST_BYTES:,} bytes, too large for settings")
    try:
        return _Loader(content.decode("utf-8")).get_single_data()
    except Exception as error:  # PyYAML also lets ValueError, RecursionError and others through
        raise UserError(f"{path} is not valid YAML: {first_line(error)}") from None
