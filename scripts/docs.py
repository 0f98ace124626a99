"""Writes the generated pages of docs/ anew; with --check, says which are out of date and fails.

docs/configuration.md   from the settings' types
docs/messages.md        from the message structs
docs/asyncapi.yaml      the same, for tools
docs/states.md          from the services' transition tables
"""

import importlib
import sys
from pathlib import Path

from halfmoon.cli import asyncapi, catalogue, settings
from halfmoon.machine import diagram

DOCS = Path(__file__).parents[1] / "docs"

MACHINES = (
    ("gateway", "LIFE", "an HTTP request"),
    ("conductor", "TABLE", "a request"),
    ("prefill", "HALF_TABLE", "a prefill half"),
    ("decode", "HALF_TABLE", "a decode half"),
    ("kv_tier", "SLOT_TABLE", "a slot of the arena"),
    ("registry", "MEMBER_TABLE", "a member"),
    ("registry", "ROLE_TABLE", "a registry, which leads or follows"),
)


def states_page() -> str:
    lines = [
        "# Life cycles",
        "",
        "Generated from the transition tables in each service's `state.py` by `make docs`.",
        "",
    ]
    for service, name, what in MACHINES:
        table = getattr(importlib.import_module(f"halfmoon.{service}.state"), name)
        initial, _ = next(iter(table))
        lines += [f"## {service.replace('_', '-')}: {what}", "", "```mermaid", diagram(table, initial), "```", ""]
    return "\n".join(lines)


def pages() -> dict[str, str]:
    return {
        "configuration.md": settings.markdown_page(),
        "messages.md": catalogue.markdown_page(),
        "asyncapi.yaml": asyncapi.document(),
        "states.md": states_page(),
    }


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = []
    for name, text in pages().items():
        path = DOCS / name
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not check:
                path.write_text(text)
    if check and stale:
        print(f"out of date: {', '.join(stale)}; run `make docs`", file=sys.stderr)
        return 1
    print(f"docs: {len(stale)} written" if not check else "docs: up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
