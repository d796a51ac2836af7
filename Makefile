# The one spelling of every command. `make` alone lists them.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
MODEL ?=
ARGS ?=

# Pure logic: no process, no server, no torch. What people run while they write.
QUICK := tests/schedule tests/test_config.py tests/test_errors.py tests/test_keys.py \
	tests/test_mutants.py tests/test_sizing.py tests/test_structure.py \
	$(addprefix tests/telemetry/test_,registry.py aggregation.py) \
	$(addprefix tests/ingest/test_,cutter.py delivery.py digest.py fetch_policy.py files.py \
		pace.py probe.py source.py) \
	$(addprefix tests/serve/test_,auth.py capabilities.py generate.py messages.py responses.py \
		tool_calls.py uvicorn.py) \
	$(addprefix tests/store/test_,allocator.py budget.py claims.py codec.py eviction.py jobs.py \
		objects.py objects_machine.py permits.py reservations.py single_flight.py state.py \
		state_machine.py verbs.py)

# Whole servers, kills and measuring: one after the other, with both cores for each.
ALONE := tests/test_tutorial.py tests/serve/test_connection.py tests/end_to_end tests/benchmarks

# Servers start sooner from modules that are compiled.
unexport PYTHONDONTWRITEBYTECODE
# What builds the site prints no advertisement.
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm serve test test-vllm quick fuzz storm package lint type imports fmt bench bench-ray bench-vllm mutants docs check \
	train evaluate clean

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
ifeq ($(strip $(ARGS)),)
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile $(addprefix --ignore=,$(ALONE))
	@$(BIN)/python -m pytest -q $(ALONE)
else
	@$(BIN)/python -m pytest $(ARGS)
endif

quick: setup  ## run the tests that start no process (under a minute)
	@$(BIN)/python -m pytest -q $(QUICK) $(ARGS)

package: setup  ## build wheel and sdist, install them into an empty environment, check their types
	@$(BIN)/python -m pytest -q tests/packaging --package -s $(ARGS)

setup-vllm: setup .venv-vllm/.ready  ## make an environment with a vLLM for this CPU (4 GB, some minutes)

.venv-vllm/.ready: tools/vllm_env.py
	@$(BIN)/python -m tools.vllm_env .venv-vllm
	@touch $@

test-vllm: setup-vllm  ## compare with a real vLLM, and kill it (a quarter of an hour), ARGS="-k oracle"
	@$(BIN)/python -m pytest -q tests/vllm --vllm --timeout 1800 -s $(ARGS)

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

imports: setup  ## check that the rooms import one way only
	@$(BIN)/lint-imports

fmt: setup  ## format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: setup  ## run a benchmark, ARGS="codec --quick"
	@$(BIN)/python -m benchmarks.run $(ARGS)

bench-ray: setup  ## the benchmark of the store with Ray's beside it, ARGS="--quick"
	@$(BIN)/python -m pip install --disable-pip-version-check -e '.[bench-ray]'
	@$(BIN)/python -m benchmarks.run store $(ARGS)

bench-vllm: setup-vllm  ## in front of vLLM, beside vLLM itself (a quarter of an hour), ARGS="--quick"
	@$(BIN)/python -m benchmarks.run vllm $(ARGS)

mutants: setup  ## see whether the tests notice small faults (a quarter of an hour), ARGS="--only admit"
	@$(BIN)/python -m tools.mutants $(ARGS)

docs: $(VENV)/.docs  ## build the documentation's site into site/, and fail on a warning
	@$(BIN)/python -m mkdocs build --strict $(ARGS)
	@echo "==> open site/index.html"

$(VENV)/.docs: $(VENV)/.ready pyproject.toml
	@echo "==> installing what builds the site"
	@$(BIN)/python -m pip install --disable-pip-version-check -e '.[docs]'
	@touch $@

check: lint type test docs  ## all of the above that a change has to pass

train: setup  ## train the built-in model afresh (about two hours on two cores)
	@$(BIN)/python training/train.py --out src/afferent/models/shapes $(ARGS)

evaluate: setup  ## judge the built-in model on images it was never trained on
	@$(BIN)/python training/evaluate.py src/afferent/models/shapes $(ARGS)

clean:  ## remove the environment and all caches
	rm -rf $(VENV) .venv-vllm build dist site src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
