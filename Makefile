# `make demo` and `make test` need only Python >= 3.11 and a C++ compiler: they create .venv with an
# editable install of jaxkv, and rebuild it when its native sources change.
#
#   PYTHON=python3.13    interpreter from which .venv is created
#   SYSTEM_PACKAGES=1    use the packages of that interpreter; no downloads
#   JAXKV_CUDA=ON|OFF    CUDA handlers; by default if there is an nvcc >= 13.0 or a GPU
#   TESTS=...            arguments of pytest for `make test`; by default all tests
PYTHON ?= python3
export PYTHON
# Targets of `make fresh`; see tools/fresh.py.
FRESH_TARGETS ?= test demo
# The oldest supported jax, the version of the GPU machines, and the newest.
JAX_VERSIONS := 0.10.2 0.11.2 0.12.0.1

comma := ,
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
INSTALLED := $(VENV)/installed
# As INSTALLED, built with compiler warnings as errors.
WITHOUT_WARNINGS := $(VENV)/without_warnings
NATIVE := $(wildcard cuda/*.* cuda/*/*) CMakeLists.txt pyproject.toml tools/build_backend.py tools/locate.py

# With a GPU, jax is installed with its CUDA plugin, and nvcc from the package index if needed.
GPUS := $(wildcard /dev/nvidia[0-9]*)
ifeq ($(or $(JAXKV_CUDA),$(GPUS),$(shell $(PYTHON) tools/locate.py nvcc)),)
export JAXKV_CUDA := OFF
endif
# Not on GPUs: processes that share a GPU compete for its memory; see bench.checks.gpu_test.
PYTEST_XDIST := -n auto --maxprocesses=4 --dist=worksteal
IF_XDIST = $(if $(GPUS),,$$($(PY) -c "import xdist" 2>/dev/null && echo "$(PYTEST_XDIST)"))
# Tests that depend on neither the jax version nor a sanitizer run once, in `test`.
BRIEF := -m "not host_only and not end_to_end" --hypothesis-profile=brief
COMPAT_TESTS := --ignore=tests/metadata --sample=2 $(BRIEF)
# Those under all but the newest jax: `test` runs all under the oldest, `gpu-test` under that of the
# GPU machines. What is left is the wheel.
TESTS_OF_WHEEL := tests/environment tests/runtime
# What the random cases of tests.fuzz leave out. These cover valid copies and compile few programs;
# a unit test compiles one of its own, which dominates its time. Processes start slowly with ASan.
ASAN_TESTS := $(addprefix tests/,cache collectives recurrent runtime sparse) \
  $(wildcard tests/transfer/test_*errors.py) \
  $(addprefix --ignore=tests/collectives/,test_multiprocess.py test_soak.py) $(BRIEF)
ifdef SYSTEM_PACKAGES
INSTALL := --no-build-isolation --no-deps --no-index -e .
else
INSTALL := -e ".[test,bench,dev$(if $(GPUS),$(comma)cuda13)]"
endif

# In every build here; `pip install .` and released wheels are without.
TEST_HOOKS := cmake.define.JAXKV_TEST_HOOKS=ON
# nvcc compiles each architecture separately. Without a GPU one is enough for .venv; `compat` builds
# for another, whose code differs (__CUDA_ARCH__ < 900). Released wheels have all of pyproject.toml.
VENV_ARCHITECTURES := $(if $(GPUS),,cmake.define.JAXKV_CUDA_ARCHITECTURES=90a-real)

.PHONY: help demo test lint format docs asan compat fresh check gpu-test multigpu-test memcheck \
        ranks-on-one-gpu soak fuzz gpu-programs mutants bench evidence clean

.DELETE_ON_ERROR:  # an incomplete .venv must not count as built

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

demo: $(INSTALLED)  ## serve conversations with and without the host pool, and compare
	$(PY) -m examples.serving

test: $(INSTALLED)  ## all tests that can run on this machine
	$(PY) -m pytest $(IF_XDIST) $(TESTS)

lint: $(WITHOUT_WARNINGS)  ## format, types, evidence, and compilation with warnings as errors
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(VENV)/bin/clang-format --dry-run -Werror $(wildcard cuda/*.* cuda/*/* bench/*/*.cc tests/*/*.cc tests/*/*.cu tests/*/*.h)
	$(PY) -m mypy
	$(PY) -m bench.report.evidence --check

format: $(INSTALLED)  ## format the sources for `make lint`
	$(PY) -m ruff check --fix
	$(PY) -m ruff format
	$(VENV)/bin/clang-format -i $(wildcard cuda/*.* cuda/*/* bench/*/*.cc tests/*/*.cc tests/*/*.cu tests/*/*.h)

docs: $(INSTALLED)  ## the documentation in build/docs/html, warnings as errors
ifndef SYSTEM_PACKAGES
	$(PIP) install -q $$($(PY) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb')) \
	  ['project']['optional-dependencies']['docs'])")
endif
	$(PY) -m sphinx -q -W --keep-going -E -b html docs build/docs/html

# Without --capture=sys, a sanitizer's report would be lost with the process of pytest.
asan: $(INSTALLED)  ## the native CPU handlers under AddressSanitizer and UBSan; CASES as for `make fuzz`
	$(call wheel,asan,cmake.build-type=Debug cmake.define.JAXKV_ASAN=ON cmake.define.JAXKV_CUDA=OFF)
	tools/test_wheel.sh build/asan/*.whl build/asan/work "jax>=0.10.2" \
	  env LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  sh -exc 'python -m tests.fuzz --cases $(or $(CASES),1000); \
	           python -m pytest $(PYTEST_XDIST) --capture=sys $(ASAN_TESTS)'

# With nvcc: checks that CUDA handlers load without a driver.
compat: $(INSTALLED)  ## one stable-ABI wheel under every supported jax (PYTHON >= 3.12)
	$(PY) -c "import sys; assert sys.version_info >= (3, 12), 'make compat needs Python >= 3.12'"
	export JAXKV_CUDA=ON; $(call wheel,compat,cmake.define.JAXKV_CUDA_ARCHITECTURES=80-real cmake.define.JAXKV_WERROR=ON)
	set -e; for jax in $(JAX_VERSIONS); do \
	  tools/test_wheel.sh build/compat/*-abi3-*.whl build/compat/work "jax==$$jax" \
	    python -m pytest $(PYTEST_XDIST) $(COMPAT_TESTS) \
	    $$(test $$jax = $(lastword $(JAX_VERSIONS)) || echo $(TESTS_OF_WHEEL)); \
	done

fresh:  ## `make $(FRESH_TARGETS)` in a fresh clone on a clean Debian (root; debootstrap)
	$(PYTHON) tools/fresh.py $(FRESH_TARGETS)

check: lint test docs asan  ## everything that CI runs
	$(MAKE) fresh FRESH_TARGETS="demo test compat" TESTS="tests/metadata --hypothesis-profile=brief"

gpu-test: $(INSTALLED)  ## the tests on one GPU, recorded in bench/results
	$(PY) -m bench.checks.gpu_test

multigpu-test: $(INSTALLED)  ## the tests that need several GPUs, recorded in bench/results
	$(PY) -m bench.checks.gpu_test --multigpu

memcheck: $(INSTALLED)  ## the CUDA handlers under compute-sanitizer, recorded in bench/results
	$(PY) -m bench.checks.memcheck

ranks-on-one-gpu: $(INSTALLED)  ## all-reduces of up to 8 ranks on one GPU, recorded in bench/results
	$(PY) -m bench.checks.ranks_on_one_gpu

soak: $(INSTALLED)  ## everything mixed for MINUTES, 30 by default: results, memory, open files
	$(PY) -m bench.checks.soak --minutes $(or $(MINUTES),30)

fuzz: $(INSTALLED)  ## CASES random cases of each operation, 5000 by default, each verified
	$(PY) -m tests.fuzz --cases $(or $(CASES),5000)

# The CUDA plugin is not installed in .venv, where jax would try to start a CUDA backend.
gpu-programs: $(INSTALLED)  ## programs as XLA compiles them for an H200, without a GPU
	jax=$$($(PY) -c "import jax; print(jax.__version__)"); \
	test -d build/gpu_compiler || { $(PIP) install -q --no-deps --target build/gpu_compiler.new \
	  jax-cuda13-pjrt==$$jax jax-cuda13-plugin==$$jax && mv build/gpu_compiler.new build/gpu_compiler; }
	$(PY) -m pytest tests/runtime/test_programs_for_gpu.py

mutants: $(INSTALLED)  ## remove each prevention of a failure in turn: its tests must fail
	$(PY) tools/mutants.py $(MUTANTS)

bench: $(INSTALLED)  ## all benchmarks, recorded in bench/results
	$(PY) -m bench.run_all

evidence: $(INSTALLED)  ## targets and measured figures; README tables and plots from the records
	$(PY) -m bench.report.evidence

clean:  ## remove all build products
	rm -rf build $(VENV) jaxkv/_ext.pyi

# $(call wheel,NAME,SETTINGS...) builds build/NAME/*.whl
wheel = rm -rf build/$(1) && $(PIP) wheel -q --no-deps -w build/$(1) \
	$(addprefix --config-settings=,build-dir=build/$(1)/cmake $(TEST_HOOKS) $(2)) .

$(INSTALLED): $(NATIVE) | $(PY)
	$(call install,$(if $(wildcard $(WITHOUT_WARNINGS)),ON,OFF))

$(WITHOUT_WARNINGS): $(NATIVE) | $(PY)
	$(call install,ON)

# The stub is copied to the sources because type checkers do not follow editable installs.
define install
	$(PIP) install --no-compile $(addprefix --config-settings=,cmake.define.JAXKV_WERROR=$(1) $(TEST_HOOKS) \
	  $(VENV_ARCHITECTURES)) $(INSTALL)
	cp $$($(PY) -c "import jaxkv._ext as e; print(e.__file__.split('_ext.')[0])")_ext.pyi jaxkv/
	@$(PY) -c "import jaxkv._ext as e; print('CUDA handlers:', 'built' if e.CUDA else 'NOT built')"
	touch $(INSTALLED) $(if $(filter ON,$(1)),$(WITHOUT_WARNINGS))
endef

# A .pth file, because --system-site-packages of an interpreter in a virtual environment would use
# the packages of its base interpreter.
$(PY):
ifdef SYSTEM_PACKAGES
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -c 'import sys; [print(f"import site; site.addsitedir({p!r})") for p in sys.path \
	  if p.endswith(("site-packages", "dist-packages"))]' > $$(echo $(VENV)/lib/python*/site-packages)/parent.pth
else
	$(PYTHON) -m venv $(VENV)
endif
