#!/usr/bin/env bash
# Tests a wheel as users install it: in its own virtual environment, without the checkout's jaxkv/
# on the path. Usage: tools/test_wheel.sh WHEEL ROOM JAX COMMAND...
# JAX is a requirement such as "jax==0.10.2"; COMMAND runs in ROOM, in a copy of the tests. An
# existing ROOM is used again, with this jax. $PYTHON is the interpreter.
set -euo pipefail

wheel=$(realpath "$1") room=$2 jax=$3
shift 3

pip=("$room/venv/bin/pip" --disable-pip-version-check)
if [[ ! -d $room ]]; then
  mkdir -p "$room/tree"
  "$PYTHON" -m venv "$room/venv"
  cp -r pyproject.toml tests bench examples "$room/tree"
fi
# Without --no-compile, pip takes as long to compile modules that no test imports.
"${pip[@]}" install -q --no-compile "$wheel[test,bench]" "$jax"
"${pip[@]}" freeze | grep '^jax'

export PATH="$(realpath "$room/venv/bin"):$PATH"
cd "$room/tree"
"$@"
