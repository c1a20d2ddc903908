"""`main` of a benchmark: flags, measurement, record."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.harness.records import NO_OPTIONS, Results, arguments

Flags = argparse.Namespace
WORLDS = (2, 4, 8)  # numbers of devices with a record each


def benchmark(
    name: str,
    description: str | None,
    measure: Callable[[Results, Flags], object],
    *,
    options: Mapping[str, dict[str, Any]] = NO_OPTIONS,
    device: str | None = None,
    needs_gpu: bool = True,
    quick: bool = True,
) -> Callable[..., int]:
    """The `main(argv=None)` of a benchmark with one record; its exit code is 1 if a check failed.

    Args:
      name: of the record.
      description: of the program.
      measure: adds rows, targets and checks to the results.
      options: of `arguments`.
      device: of `Results`.
      needs_gpu: `flags.quick` is set on a CPU, where the sizes of a GPU would take hours.
      quick: there is a flag of that name.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        flags = arguments(description, argv, options, quick=quick)
        if quick:
            flags.quick |= needs_gpu and not on_gpu()
        results = Results(name, device=device, log=True)
        measure(results, flags)
        results.save(flags.out)
        return results.exit_code

    return main


def benchmark_of_devices(
    name: str,
    description: str | None,
    measure: Callable[[Results, int, Flags], object],
    count: Callable[[Flags], int],
) -> Callable[..., int]:
    """As `benchmark`, with one record for each number of devices; 1 if one or a check failed.

    `measure` gets that number; `count` returns the number of devices of the machine.
    """
    devices = {
        "type": int, "nargs": "+", "choices": WORLDS, "default": WORLDS,
        "help": "numbers of devices; default: all that the machine has",
    }  # fmt: skip

    def main(argv: Sequence[str] | None = None) -> int:
        flags = arguments(description, argv, {"--devices": devices})
        available, failed = count(flags), 0
        for world in flags.devices:
            if world > available:
                print(f"not measured: {world} devices, of {available}", flush=True)
                continue
            results = Results(f"{name}_{world}", log=True)
            try:
                measure(results, world, flags)
            except Exception as error:  # earlier measurements are worth keeping
                results.not_measured(f"{world} devices: {type(error).__name__}: {error}")
                failed = 1
            results.save(flags.out)
            failed |= results.exit_code
        return failed

    return main


def on_gpu() -> bool:
    import jax

    return jax.default_backend() == "gpu"
