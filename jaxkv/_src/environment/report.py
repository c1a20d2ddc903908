"""Environment report of this machine: `python -m jaxkv.env [--json]`."""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxkv._src.environment.probes import (
    _attempt,
    cuda_libraries,
    date,
    devices,
    driver,
    environment,
    gpus,
    implementations,
    memory,
    native,
    numa,
    peer_access,
    pinned_host,
    tuning,
    versions,
)

PROBES: dict[str, Callable[[], object]] = {
    "date": date,
    "versions": versions,
    "devices": devices,
    "driver": driver,
    "gpus": gpus,
    "peer_access": peer_access,
    "cuda_libraries": cuda_libraries,
    "native": native,
    "memory": memory,
    "pinned_host": pinned_host,
    "numa": numa,
    "environment": environment,
    "tuning": tuning,
    "implementations": implementations,
}


def report() -> dict[str, Any]:
    """Runs every probe.

    Returns:
      A JSON-serializable dictionary with one entry per probe. The entry of a failed probe is a
      string that begins with "unavailable:" and states the reason.

    Example: `report()["versions"]["jax"]`.
    """
    return {name: without_directories(_attempt(probe)) for name, probe in PROBES.items()}


def without_directories(value: Any) -> Any:
    """Reduces absolute paths in `value` to their last component, so that reports can be shared."""
    if isinstance(value, str):
        return re.sub(r"(?<![\w.~/])~?/(?:[^\s/:;=,'\"]+/)+", ".../", value)
    if isinstance(value, dict):
        return {key: without_directories(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_directories(item) for item in value]
    return value


def to_text(value: object, indent: str = "") -> str:
    """Renders a report, or a part of one, as indented lines."""
    if isinstance(value, dict):
        return "\n".join(_entry(str(key), item, indent) for key, item in value.items())
    if isinstance(value, list):
        return "\n".join(_entry(str(i), item, indent) for i, item in enumerate(value))
    return "\n".join(indent + line for line in str(value).splitlines())


def _entry(name: str, value: object, indent: str) -> str:
    if isinstance(value, list) and all(not isinstance(item, dict | list) for item in value):
        value = ", ".join(map(str, value)) or "none"
    nested = (isinstance(value, dict | list) and value) or "\n" in str(value)
    if nested:
        return f"{indent}{name}:\n{to_text(value, indent + '  ')}"
    return f"{indent}{name}: {'none' if value is None or value == {} else value}"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report as text, or as JSON with `--json`; returns 0, the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jaxkv.env", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    arguments = parser.parse_args(argv)
    found = report()
    print(json.dumps(found, indent=2) if arguments.json else to_text(found))
    return 0
