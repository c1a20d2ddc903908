"""Mutation tests: `python tools/mutants.py [name ...]`.

Each entry of `tests/mutations.toml` removes one prevention of a failure from the sources, and names
the tests that must then fail. The entries are applied one at a time to a copy of the checkout; its
native extension is built again where necessary. An entry with `survives` states why no test on a
machine without GPUs can fail. One with `compiles = false` must not compile.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIST = ROOT / "tests/mutations.toml"
# Sources that are compiled into the extension of a machine without GPUs. Tests compile .cu files.
COMPILED = (".cc", ".h")
FAILED_TESTS = 1  # exit status of pytest; others are failures of pytest itself
LIMIT_S = 300  # of the tests of one mutation


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One entry; `old` occurs once in `file`."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str = ""
    compiles: bool = True

    @property
    def is_compiled(self) -> bool:
        return self.file.endswith(COMPILED)


def mutations() -> list[Mutation]:
    entries = tomllib.loads(LIST.read_text())["mutation"]
    return [Mutation(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


class Checkout:
    """A copy of the tracked files, with an extension of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.split("\0")
        for name in filter(None, names):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
        # The interpreter of the virtual environment would import the installed jaxkv.
        backend = folder / "backend"
        paths = [str(folder), str(backend), *site.getsitepackages()]
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        self.python = getattr(sys, "_base_executable", sys.executable)
        # Without isolation, which would configure each build anew.
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        needed = [name for name in project["build-system"]["requires"] if "jaxlib" not in name]
        needed += ["cmake", "ninja"]
        self._run([*self._pip("install"), "--target", str(backend), *needed], check=True)

    def build(self) -> None:
        """Builds the extension; incremental.

        Raises:
          subprocess.CalledProcessError: the sources do not compile.
        """
        options = {
            "build-dir": str(self.folder / "build"),
            "cmake.define.JAXKV_CUDA": "OFF",
            "cmake.define.JAXKV_TEST_HOOKS": "ON",
        }
        command = [*self._pip("wheel"), "--no-deps", "--no-build-isolation"]
        command += [f"--config-settings={key}={value}" for key, value in options.items()]
        wheels = self.folder / "wheels"
        shutil.rmtree(wheels, ignore_errors=True)
        self._run([*command, "-w", str(wheels), "."], check=True)
        (wheel,) = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if re.fullmatch(r"jaxkv/_ext\..*so", name):
                    archive.extract(name, self.folder)

    def test(self, tests: tuple[str, ...], limit_s: float | None = LIMIT_S) -> int:
        """Exit status of pytest; that of failed tests after the time limit."""
        # Hypothesis imports packages that warn when it reports a failure.
        options = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning"]
        command = [self.python, "-m", "pytest", *options, *tests]
        try:
            return self._run(command, timeout=limit_s, show=limit_s is None).returncode
        except subprocess.TimeoutExpired:
            return FAILED_TESTS

    def _pip(self, command: str) -> list[str]:
        return [self.python, "-m", "pip", "--disable-pip-version-check", command, "-q"]

    def _run(
        self,
        command: list[str],
        *,
        check: bool = False,
        timeout: float | None = None,
        show: bool = False,
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            check=check,
            timeout=timeout,
            stdout=None if show else subprocess.DEVNULL,
        )

    def apply(self, mutation: Mutation) -> int:
        """Exit status of the tests under a mutation, which is undone.

        Raises:
          subprocess.CalledProcessError: its sources should compile and do not.
        """
        path = self.folder / mutation.file
        original = path.read_text()
        if original.count(mutation.old) != 1:
            raise ValueError(f"{mutation.name}: `old` must occur once in {mutation.file}")
        path.write_text(original.replace(mutation.old, mutation.new))
        try:
            if mutation.is_compiled:
                self.build()
        except subprocess.CalledProcessError:
            if mutation.compiles:
                raise
            return FAILED_TESTS
        else:
            return self.test(mutation.tests) if mutation.compiles else 0
        finally:
            path.write_text(original)


def run(chosen: list[Mutation], folder: Path) -> list[Mutation]:
    """The mutations that survive without a reason; prints a line each."""
    checkout = Checkout(folder)
    checkout.build()
    every = sorted({test for mutation in chosen for test in mutation.tests})
    if status := checkout.test(tuple(every), limit_s=None):
        raise RuntimeError(f"the tests fail without a mutation: exit status {status}")
    survivors = []
    # Native code last: it leaves an extension with a mutation until the next build.
    for mutation in sorted(chosen, key=lambda mutation: mutation.is_compiled):
        begin = time.monotonic()
        caught = checkout.apply(mutation) == FAILED_TESTS
        if not caught and not mutation.survives:
            survivors.append(mutation)
        verdict = "caught" if caught else f"survives: {mutation.survives or 'UNEXPECTED'}"
        print(f"{mutation.name:40} {time.monotonic() - begin:6.1f} s  {verdict}", flush=True)
    return survivors


def main(names: list[str]) -> int:
    chosen = [mutation for mutation in mutations() if not names or mutation.name in names]
    with tempfile.TemporaryDirectory() as folder:
        survivors = run(chosen, Path(folder))
    print(f"{len(chosen)} mutations, {len(survivors)} unexpected survivors")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
