"""`normkit env`: what is installed, what it runs on, and which kernels are in use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from normkit.cli.options import Format
from normkit.environment import describe_environment


def env(format: Format = "text") -> None:
    """Show versions, hardware, the kernels in use and why, optional extras, and the allocator's settings."""
    environment = describe_environment()
    if format == "json":
        print(json.dumps(environment, indent=2))
        return
    lines = list(_lines(environment))
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:<{width}}  {value}")


def _lines(environment: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in environment.items():
        if name == "extras":
            yield from ((f"extra {extra!r}", _presence(extra, packages)) for extra, packages in value.items())
        elif name == "allocator":
            yield name, " ".join(f"{key}={setting}" for key, setting in value.items()) or "as the system has it"
        elif isinstance(value, dict):
            yield from value.items()
        elif value is not None:
            yield name.replace("_", " "), str(value)


def _presence(extra: str, packages: dict[str, str | None]) -> str:
    missing = [package for package, version in packages.items() if version is None]
    return f"missing {', '.join(missing)}: pip install 'normkit[{extra}]'" if missing else "present"
