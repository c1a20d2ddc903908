"""Autotuning: `python -m jaxkv.tune [--all-reduce] [--out PATH] [--quick]`."""

import sys

from jaxkv._src.autotune.copies import main as main

if __name__ == "__main__":
    sys.exit(main())
