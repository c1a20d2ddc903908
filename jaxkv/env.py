"""Environment report: `python -m jaxkv.env [--json]`."""

import sys

from jaxkv._src.environment.report import main as main
from jaxkv._src.environment.report import report as report

if __name__ == "__main__":
    sys.exit(main())
