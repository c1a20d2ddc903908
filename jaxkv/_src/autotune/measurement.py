"""Shared by the measurements of tuning tables: timing, progress, and provenance."""

from __future__ import annotations

import math
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax

from jaxkv._src.environment import driver, probes

T = TypeVar("T")

SECONDS_OF_SAMPLE, SAMPLES = 0.03, 5


def seconds_per_step(
    step: Callable[[jax.Array], jax.Array],
    state: jax.Array,
    *,
    seconds_of_sample: float = SECONDS_OF_SAMPLE,
    samples: int = SAMPLES,
) -> tuple[float, jax.Array]:
    """Median seconds per step, over chains of steps with one host sync at the end; last state.

    A step of more than ten times `seconds_of_sample` is timed once.
    """

    def chain(length: int) -> float:
        nonlocal state
        start = time.perf_counter()
        for _ in range(length):
            state = step(state)
        state.block_until_ready()
        return (time.perf_counter() - start) / length

    estimate = min(chain(1), chain(1))  # command buffers are captured in the second run
    if estimate > 10 * seconds_of_sample:
        return chain(1), state
    length = min(200, math.ceil(seconds_of_sample / estimate))
    return statistics.median(chain(length) for _ in range(samples)), state


def check_replaceable(
    path: pathlib.Path, load: Callable[[pathlib.Path], object], tables: str
) -> None:
    """Raises a FileExistsError unless `path` is free, empty or a table of the same kind.

    Both kinds of tables have the same file name in a folder. To be called before a measurement.

    Args:
      path: where the table will be written.
      load: reads a table of this kind; a ValueError for other files.
      tables: name of this kind, for the error.
    """
    if not path.exists() or (path.is_file() and not path.stat().st_size):
        return
    try:
        load(path)
    except ValueError as error:
        raise FileExistsError(
            f"--out: {path} exists and is not a valid table of {tables} ({error}); remove it or "
            "name another file"
        ) from None


def write(path: pathlib.Path, text: str) -> None:
    """Writes a table, or nothing if it is interrupted: a truncated one would fail every call.

    Raises:
      OSError: the table can't be written.
    """
    path = path.resolve()  # a link is kept
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text)
        if path.exists():
            shutil.copymode(path, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def versions() -> dict[str, str]:
    found = {**probes.versions(), "cuda driver": probes._attempt(lambda: driver.Driver().version())}
    return {name: text for name, text in found.items() if "unavailable" not in text}


def commit() -> str | None:
    """The commit of this code: JAXKV_COMMIT, if set, or the state of the git checkout."""
    if from_environment := os.environ.get("JAXKV_COMMIT"):
        return from_environment
    checkout = pathlib.Path(__file__).resolve().parent.parent.parent.parent
    if not (checkout / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    found = probes._attempt(
        lambda: subprocess.check_output(command, cwd=checkout, text=True).strip()
    )
    return None if found.startswith("unavailable") else found


def progress(found: list[T]) -> Iterator[T]:
    """The cells, with a progress bar on standard error."""
    try:
        from tqdm import tqdm
    except ImportError:
        for done, cell in enumerate(found):
            print(f"\r{done}/{len(found)} cells", end="", file=sys.stderr, flush=True)
            yield cell
        print("\r", end="", file=sys.stderr)
    else:
        yield from tqdm(found, unit="cell", leave=False)
