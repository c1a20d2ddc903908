"""Runs every benchmark in a separate process: `python -m bench.run_all [--quick]`.

Separate processes start with empty device memory, and a failure does not stop the others.
"""

import subprocess
import sys
from collections.abc import Sequence

from bench.harness.records import REPOSITORY, arguments

BENCHMARKS = {  # by record name; transfer also writes small_batches
    "transfer": "transfer",
    "pages": "pages",
    "array_caches": "array_caches",
    "engines": "engines",
    "host_pool": "host_pool",
    "overlap": "overlap",
    "dispatch": "dispatch",
    "metadata": "metadata",
    "recurrent": "recurrent",
    "sparse": "sparse.fetch",
    "sparse_decode": "sparse.decode",
    "all_reduce": "collectives.all_reduce",
    "tensor_parallel": "collectives.tensor_parallel",
    "offload_manager": "offload.manager",
    "serving": "serving.compare",
    "serving_decode": "serving.decode",
    "serving_ttft": "serving.ttft",
    "demo": "serving.demo",
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments(__doc__, argv)  # every benchmark takes the same flags; this rejects others
    flags = sys.argv[1:] if argv is None else [*argv]
    failed = []
    for name in BENCHMARKS:
        print(f"== bench.{name}", flush=True)
        command = [sys.executable, "-m", f"bench.{BENCHMARKS[name]}", *flags]
        if subprocess.run(command, cwd=REPOSITORY, check=False).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all benchmarks ran")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
