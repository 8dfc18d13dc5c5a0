# make demo, make test: everything from a fresh clone, with Python and make only. make help lists the rest.

VENV ?= .venv
DIR ?= .
MIN_PYTHON := 3.11

ifeq ($(strip $(VENV)),)  # the current environment, as it is
  PY := python3
  READY :=
  TOOLS :=
  SITE :=
  export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
  PY := $(abspath $(VENV))/bin/python
  READY := $(VENV)/.installed
  TOOLS := $(VENV)/.tools
  SITE := $(VENV)/.site
endif

# the oldest and the newest Triton that lra runs on, each in a folder that hides the installed one
TRITONS = $(if $(strip $(VENV)),$(abspath $(VENV))/triton-3.6.0 $(abspath $(VENV))/triton-3.9.0)

# the full-size task where PyTorch sees a GPU, minutes on two cores elsewhere
RECIPE = $(shell $(PY) -c 'import torch; print("xiong2021" if torch.cuda.is_available() else "demo")')
PYTEST_OPTIONS = -q -n auto --maxprocesses=8 --dist=worksteal
PYTEST = $(PY) -m pytest $(PYTEST_OPTIONS)

# What `make versions` tries, and how uv chooses each: the lowest versions that pyproject.toml names and this Python has,
# or the highest there are. Its tests are those that use most of other packages: a minute or two.
VERSIONS ?= oldest newest
# OmegaConf 2.3, beside which hydra-core can be installed, needs a package that has no wheel.
oldest := --resolution lowest-direct --only-binary :all: --no-binary antlr4-python3-runtime
newest := --resolution highest
SOME = tests/kernels/test_ops.py tests/kernels/test_flash.py::test_within_budget \
  $(patsubst %,tests/models/test_%.py,transformer peers fused_blocks) \
  $(patsubst %,tests/training/test_%.py,step fit engine checkpoints) \
  $(patsubst %,tests/data/test_%.py,golden image text) tests/config/test_compose.py \
  tests/experiments/results/test_report.py tests/experiments/grid/test_launch.py tests/test_cli.py \
  tests/test_studies.py::test_runs_share_the_gpus_that_are_visible

.DEFAULT_GOAL := help
.PHONY: demo test test-all versions aot lint docs site screenshot clean help

demo: $(READY)  ## train on ListOps and score the test set; again: the same result at once (ARGS="field=value …")
	@cd "$(DIR)" && $(PY) -m lra fit task=listops attn=flash recipe=$(RECIPE) resume=auto $(ARGS)

test: $(TOOLS)  ## the tests, without the slow ones (PYTEST_ARGS="-k …")
	@$(PYTEST) -m "not slow" $(PYTEST_ARGS)

# the other versions too, unless some tests are chosen or nothing may be installed
test-all: $(TOOLS)  ## every test, and make versions; on a GPU host and with LRA_TEST_DATA none is skipped
	@$(PYTEST) $(PYTEST_ARGS)
	@$(if $(strip $(PYTEST_ARGS))$(if $(strip $(VENV)),,none),,$(MAKE) --no-print-directory versions)

versions: $(TOOLS)  ## some tests with the oldest versions that lra supports and with the newest of everything (VERSIONS=newest)
	@[ -n "$(strip $(VENV))" ] || { echo "make versions installs: name a folder for it with VENV=" >&2; exit 1; }
	@set -e; $(foreach set,$(VERSIONS),python="$(abspath $(VENV))/$(set)/bin/python"; \
	  [ -x "$$python" ] || $(PY) -m venv --without-pip "$(abspath $(VENV))/$(set)"; \
	  $(PY) -m uv pip install -q -U -p "$$python" $($(set)) -e '.[dev]'; \
	  "$$python" -c 'from lra.environment import versions; print("$(set):", *(" ".join(map(str, each)) for each in versions().items()), sep="  ")'; \
	  "$$python" -m pytest $(PYTEST_OPTIONS) -m "not slow" $(SOME) $(PYTEST_ARGS);)

aot: $(TOOLS) $(TRITONS)  ## compile every kernel for sm_80, 86, 89, 90, 100 and 120 with the oldest and the newest Triton, without a GPU
	@set -e; for triton in $(or $(TRITONS),installed); do \
	  echo "$${triton##*/}"; PYTHONPATH=$$triton $(PYTEST) tests/kernels/test_compiled.py tests/kernels/test_layers.py::test_kernels_compile \
	    tests/kernels/test_moving_average.py::test_kernels_compile $(PYTEST_ARGS); \
	done

lint: $(TOOLS)  ## ruff and pyright
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(PY) -m pyright --pythonpath "$$($(PY) -c 'import sys; print(sys.executable)')"

docs: $(TOOLS)  ## make README.md's tables and the pages of docs anew from measurements and sources
	@$(PY) -m benchmarks.pages

site: $(SITE)  ## build/site: README.md and docs as web pages, with the docstrings of the Python API
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

# what lra report makes of the committed results
screenshot: $(READY)  ## docs/report.png, in Chromium (CHROMIUM=…)
	@$(PY) -m lra report table3 recipe=curriculum seeds=1 tasks=listops,text,image,pathfinder,pathfinder-lit \
	  results=benchmarks/results speed=benchmarks/results/speed/h200/table3-curriculum.json out=build/report > /dev/null
	@$(or $(CHROMIUM),chromium) --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1260,5100 \
	  --screenshot=docs/report.png build/report/table3.html

clean:  ## remove the environment, builds and caches; checkpoints and prepared data stay
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache
	find lra tests -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1: \2/p' $(firstword $(MAKEFILE_LIST))
	@echo "VENV=<folder> puts the environment there; VENV= (empty) uses the current one and installs nothing."
	@echo "No GPU? PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo saves gigabytes of CUDA libraries."

# torch first: the pinned one brings its own Triton and setuptools, with which lra is then installed
$(VENV)/.installed: pyproject.toml constraints.txt
	@python=; for name in python3 python3.13 python3.12 python3.11 python3.14; do \
	  $$name -c 'import sys; sys.exit(sys.version_info < tuple(map(int, "$(MIN_PYTHON)".split("."))))' 2>/dev/null \
	    && python=$$name && break; \
	done; \
	[ -n "$$python" ] || { echo "lra needs Python $(MIN_PYTHON) or newer and finds none: install it, or name an environment that has it with VENV=" >&2; exit 1; }; \
	echo "installing into $(VENV) with $$($$python --version): some minutes, once"; \
	$$python -m venv "$(VENV)"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install -qq -c constraints.txt setuptools torch
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install -qq -c constraints.txt --no-build-isolation -e .
	@touch $@

$(VENV)/.tools: $(VENV)/.installed
	@echo "installing the development tools"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install -qq -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

$(VENV)/.site: $(VENV)/.installed
	@echo "installing what builds the site"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install -qq -c constraints.txt --no-build-isolation -e '.[site]'
	@touch $@

$(abspath $(VENV))/triton-%: | $(READY)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install -qq --no-deps --upgrade --target "$@.partial" "triton==$*"
	@mv "$@.partial" "$@"
