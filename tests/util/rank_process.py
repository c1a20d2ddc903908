"""One of several processes that share a mesh: `python rank_process.py SETUP CHECK`, SETUP in JSON.

Runs a function of process_checks.py, thread_checks.py or serving_checks.py. The last line that it
prints is the result in JSON.
"""

import json
import os
import sys
import traceback
from typing import Any

import jax


def start(
    platform: str, coordinator: str, processes: int, process: int, local_devices: list[int]
) -> None:
    jax.config.update("jax_platforms", {"gpu": "cuda"}.get(platform, platform))
    jax.config.update("jax_num_cpu_devices", len(local_devices))
    jax.distributed.initialize(
        coordinator_address=coordinator,
        num_processes=processes,
        process_id=process,
        local_device_ids=local_devices if platform == "gpu" else None,
    )


def main(setup: str, check: str) -> None:
    arguments: dict[str, Any] = json.loads(setup)
    order = arguments.pop("order")
    start(**arguments)
    from tests.util import process_checks, serving_checks, thread_checks  # initialize the devices

    modules = process_checks, thread_checks, serving_checks
    found = next(module for module in modules if hasattr(module, check))
    print(json.dumps(getattr(found, check)(order)), flush=True)
    if jax.process_index() == 0:
        sys.stdin.read()  # the others need its coordinator until they end


if __name__ == "__main__":
    code = 1
    try:
        main(*sys.argv[1:])
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # without jax.distributed's shutdown, which waits for killed processes
