"""Time to first token with a prefix in host memory: `python -m bench.serving.ttft`.

Parts: ttft, latency (bench.serving.cases); systems: bench.serving.systems.
"""

import sys
from functools import partial

from bench.serving import cases, runs

main = partial(runs.main, "serving_ttft", __doc__, cases.ttft, ("ttft", "latency"))

if __name__ == "__main__":
    sys.exit(main())
