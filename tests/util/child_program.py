"""A program for the tests of `bench.harness.processes`: executes its request in order."""

import json
import pathlib
import sys
import time

request = json.loads(sys.argv[1])
for line in request.get("prints", []):
    print(line, flush=True)
if "touches" in request:
    pathlib.Path(request["touches"]).touch()
time.sleep(request.get("sleeps", 0))
if "raises" in request:
    raise RuntimeError(request["raises"])
