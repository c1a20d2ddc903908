#!/usr/bin/env bash
# Tests a wheel as users install it: in its own virtual environment, without the checkout's jaxkv/
# on the path. Usage: tools/test_wheel.sh WHEEL ROOM JAX COMMAND...
# ROOM is a directory to create, JAX a requirement such as "jax==0.10.2"; COMMAND runs in a copy of
# the tests. $PYTHON is the interpreter.
set -euo pipefail

wheel=$(realpath "$1") room=$2 jax=$3
shift 3

rm -rf "$room"
mkdir -p "$room/tree"
"$PYTHON" -m venv "$room/venv"
"$room/venv/bin/pip" install -q --disable-pip-version-check "$wheel[test,bench]" "$jax"
"$room/venv/bin/pip" freeze --disable-pip-version-check | grep '^jax'
cp -r pyproject.toml tests bench examples "$room/tree"

export PATH="$(realpath "$room/venv/bin"):$PATH"
cd "$room/tree"
"$@"
