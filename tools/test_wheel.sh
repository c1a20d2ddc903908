#!/usr/bin/env bash
# Tests a wheel as users install it: in its own virtual environment, without the checkout's jaxkv/
# on the path. Usage: tools/test_wheel.sh WHEEL WORKDIR JAX COMMAND...
# JAX is a requirement such as "jax==0.10.2"; COMMAND runs in WORKDIR, in a copy of the tests. The
# environment of an existing WORKDIR is reused, with this jax. $PYTHON is the interpreter.
set -euo pipefail

wheel=$(realpath "$1") workdir=$2 jax=$3
shift 3

pip=("$workdir/venv/bin/pip" --disable-pip-version-check)
if [[ ! -d $workdir ]]; then
  mkdir -p "$workdir/tree"
  "$PYTHON" -m venv "$workdir/venv"
  cp -r pyproject.toml tests bench examples "$workdir/tree"
fi
# By default pip also compiles the modules that no test imports, which takes longer than the rest.
"${pip[@]}" install -q --no-compile "$wheel[test,bench]" "$jax"
"${pip[@]}" freeze | grep '^jax'

export PATH="$(realpath "$workdir/venv/bin"):$PATH"
cd "$workdir/tree"
"$@"
