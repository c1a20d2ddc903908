"""Systems of KV offload on one serving engine: `python -m bench.serving.compare`.

Parts: multi_turn, trace, random (bench.serving.cases); systems: bench.serving.systems.
"""

import sys
from functools import partial

from bench.serving import cases, runs

PARTS = ("multi_turn", "trace", "random")
main = partial(runs.main, "serving", __doc__, cases.compare, PARTS)

if __name__ == "__main__":
    sys.exit(main())
