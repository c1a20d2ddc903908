"""Systems of KV offload on one serving engine: `python -m bench.serving.compare`.

Parts: multi_turn, trace, random, float32 (bench.serving.cases); systems: bench.serving.systems.

All systems must give the same tokens in float32: a check of each workload and system, in the part
of that name and with `--tiny`. In bfloat16, as in the other parts, nothing is claimed of them.
"""

import sys
from functools import partial

from bench.serving import cases, runs

PARTS = ("multi_turn", "trace", "random", cases.FLOAT32)
main = partial(runs.main, "serving", __doc__, cases.compare, PARTS)

if __name__ == "__main__":
    sys.exit(main())
