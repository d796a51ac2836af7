# The one spelling of every command. `make` alone lists them.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
MODEL ?=
ARGS ?=

# Servers start sooner from modules that are compiled.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup serve test fuzz storm lint type imports fmt bench docs check train evaluate clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1|/' | column -t -s '|'

setup: $(VENV)/.ready  ## make the virtual environment and install everything into it

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Afferent needs Python 3.11 or newer; try make PYTHON=python3.12 ..."; exit 1; }
	@echo "==> setting up $(VENV) (a few minutes, once)"
	@$(PYTHON) -m venv $(VENV)
	@echo "==> installing $(TORCH), then the rest"
	@$(BIN)/python -m pip install --disable-pip-version-check $(TORCH)
	@$(BIN)/python -m pip install --disable-pip-version-check -e '.[engine,bench,dev]'
	@touch $@
	@echo "==> ready"

serve: setup  ## serve the built-in model, or MODEL=folder, with ARGS="--explain ..."
	@$(BIN)/afferent serve $(MODEL) $(ARGS)

test: setup imports  ## run the tests, ARGS="-k name ..." for some of them
	@echo "==> running the tests (some minutes)"
	@$(BIN)/python -m pytest $(ARGS)

fuzz: setup  ## feed the readers of foreign bytes with generated ones, ARGS="--minutes 60"
	@$(BIN)/python -m tests.store.fuzz $(ARGS)

storm: setup  ## kill every kind of process under load, overload the arena, generate more (45 minutes)
	@$(BIN)/python -m pytest tests/store tests/schedule tests/ingest/test_cutter.py \
		tests/preprocess/test_families.py tests/engine/test_packed.py \
		tests/end_to_end/test_worker_storm.py \
		tests/end_to_end/test_overload.py tests/end_to_end/test_hostile_media.py \
		tests/end_to_end/test_kill_storm.py tests/end_to_end/test_engine_mixed.py \
		tests/end_to_end/test_all_apis.py tests/end_to_end/test_disconnect.py \
		tests/engine/test_group.py tests/test_tutorial.py --storm --timeout 1800 -q -s $(ARGS)

lint: setup  ## check format and style
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

type: setup  ## check types
	@$(BIN)/mypy

imports: setup  ## check that the stages import one way only
	@$(BIN)/lint-imports

fmt: setup  ## format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: setup  ## run a benchmark, ARGS="codec --quick"
	@$(BIN)/afferent bench $(ARGS)

docs: setup  ## check that the documentation's links and commands exist
	@$(BIN)/python -m pytest -q tests/test_docs.py

check: lint type test  ## all of the above that a change has to pass

train: setup  ## train the built-in model afresh (about two hours on two cores)
	@$(BIN)/python training/train.py --out src/afferent/models/shapes $(ARGS)

evaluate: setup  ## judge the built-in model on pictures it was never trained on
	@$(BIN)/python training/evaluate.py src/afferent/models/shapes $(ARGS)

clean:  ## remove the environment and all caches
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
