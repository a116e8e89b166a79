# `make` builds the environment; `make help` lists the rest.
PYTHON ?= python3
JOBS ?= 2
ARGS ?=

BIN := .venv/bin
ENV_BIN := .venv-env/bin
PIP := -m pip --disable-pip-version-check install --quiet

.PHONY: setup help demo test test-env test-jax aot lint format types lock clean

setup: .venv/.installed ## create .venv with the pinned dependencies and both packages

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

# Large pages for what XLA allocates at every step, where Linux offers them.
demo: .venv/.installed ## run the whole loop on this machine (options: make demo ARGS="--seed 1")
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/hsql demo $(ARGS)

test: test-env test-jax ## the tests of both halves

test-env: .venv-env/.installed ## the text half's tests, where JAX is not installed
	cd env && ../$(ENV_BIN)/python -m pytest -n $(JOBS) $(ARGS)

test-jax: .venv/.installed ## the tensor half's tests
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

# The compilers are large (cuda 5 GB), so they have an environment of their own.
AOT_EXTRAS ?= tpu
aot: .venv-aot/.installed ## full-size programs through accelerators' compilers (AOT_EXTRAS=tpu,cuda)
	.venv-aot/bin/python -m pytest tests/aot.py --timeout 1800 $(ARGS)

lint: .venv/.installed ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/.installed ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/.installed ## mypy over both packages and the configs
	$(BIN)/mypy

# One resolution for every Python from 3.11 on: markers choose the newest JAX that each can run.
lock: .venv/.installed ## resolve the dependencies anew (versions only, no index host)
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --upgrade --extra dev \
	  --no-emit-package hsql-env --no-emit-index-url --no-annotate --no-header \
	  --output-file requirements.lock pyproject.toml

clean: ## remove the environments and caches; runs stay
	rm -rf .venv .venv-env .venv-aot .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# create_venv(FOLDER): a virtual environment, after a check that PYTHON is there and new enough.
define create_venv
@command -v $(PYTHON) >/dev/null || { \
  echo "make: $(PYTHON) was not found; name a Python >= 3.11: make PYTHON=python3.12" >&2; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make: $(PYTHON) is Python %d.%d, but 3.11 or later is needed: make PYTHON=python3.12" % sys.version_info[:2])'
test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
endef

# The lock pins everything, the build backend too, so the two installs need no isolated build.
.venv/.installed: requirements.lock pyproject.toml env/pyproject.toml
	$(call create_venv,.venv)
	@echo "Installing the pinned dependencies into .venv (about 1 GB, a few minutes the first time)"
	$(BIN)/python $(PIP) -r requirements.lock
	$(BIN)/python $(PIP) --no-deps --no-build-isolation -e env -e .
	@touch $@

# The text half alone, at the same pins.
.venv-env/.installed: requirements.lock env/pyproject.toml
	$(call create_venv,.venv-env)
	$(ENV_BIN)/python $(PIP) -c requirements.lock hatchling
	$(ENV_BIN)/python $(PIP) -c requirements.lock --no-build-isolation -e 'env[test]'
	@$(ENV_BIN)/python -c 'import importlib.util as u; assert not u.find_spec("jax"), "jax is in .venv-env"'
	@touch $@

# The same JAX as in .venv, with the compilers of AOT_EXTRAS.
.venv-aot/.installed: requirements.lock pyproject.toml env/pyproject.toml
	$(call create_venv,.venv-aot)
	.venv-aot/bin/python $(PIP) -c requirements.lock hatchling -e env -e '.[dev,$(AOT_EXTRAS)]'
	@touch $@
