"""Write the table of requests that each backend must accept: `python -m tests.conformance.make_acceptance`.

It is made from capabilities. Run it after a backend has learned something; a table that lost an entry needs a reason in
the commit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.conformance.requests import DEVICES, acceptance
from vattn.backends import selector
from vattn.config.device import DeviceInfo

PATH = Path(__file__).with_name("acceptance.json")

Sections = dict[str, dict[str, str]]
"""Section -> line -> accepted names, separated by spaces."""


def accepted_by(backend: str, device: DeviceInfo) -> Sections:
    """Return the grid of requests that a backend accepts on a kind of device."""
    reasons = selector.get_backend(backend).reasons
    return acceptance(backend, lambda config: not reasons(config, device))


def load_table() -> dict[str, dict[str, Sections]]:
    """Return the committed table as backend -> device -> sections."""
    table: dict[str, Any] = json.loads(PATH.read_text())
    return {
        backend: {name: sections for names, sections in devices.items() for name in names.split()}
        for backend, devices in table.items()
    }


def main() -> None:
    """Write the table, devices with equal entries together."""
    table: dict[str, dict[str, Sections]] = {}
    for backend in selector.backend_names():
        groups: list[tuple[list[str], Sections]] = []
        for name, device in DEVICES.items():
            sections = accepted_by(backend, device)
            equal = next((names for names, known in groups if known == sections), None)
            if equal is not None:
                equal.append(name)
            elif any(any(lines.values()) for lines in sections.values()):
                groups.append(([name], sections))
        table[backend] = {" ".join(names): sections for names, sections in groups}
    PATH.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
