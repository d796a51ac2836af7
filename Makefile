# The one spelling of every command. `make` alone lists them.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
MODEL ?=
VERSION ?=
VLLM_VENV := .venv-vllm$(if $(VERSION),-$(VERSION))
ARGS ?=

# Servers start sooner from modules that are compiled.
unexport PYTHONDONTWRITEBYTECODE
# What builds the site prints no advertisement.
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm setup-clients setup-open-webui setup-engines setup-llama serve test test-bench test-vllm test-vllm-families probe-vllm test-clients test-open-webui test-engines test-page test-ray quick fuzz storm \
	soak sweep simulate package wheels schema lint type imports fmt bench bench-ray bench-vllm bench-render measured records mutants \
	mutation docs docs-version check lock audit train evaluate clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1|/' | column -t -s '|'

setup: $(VENV)/.ready  ## make the virtual environment and install everything into it

$(VENV)/.ready: $(VENV)/.quick
	@echo "==> installing $(TORCH), then the rest (a few minutes, once)"
	@$(BIN)/python -m pip install --disable-pip-version-check $(TORCH)
	@$(BIN)/python -m pip install --disable-pip-version-check -e '.[engine,bench,dev]'
	@touch $@
	@echo "==> ready"

# The library, the server and the tests of pure logic: no torch.
$(VENV)/.quick: pyproject.toml $(wildcard src/afferent/media/native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Afferent needs Python 3.11 or newer; try make PYTHON=python3.12 ..."; exit 1; }
	@echo "==> setting up $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip uninstall --disable-pip-version-check --quiet --yes afferent 2>/dev/null || true
	@$(BIN)/python -m pip install --disable-pip-version-check -e '.[server,test]'
	@touch $@

serve: setup  ## serve the built-in model, or MODEL=folder, with ARGS="--explain ..."
	@$(BIN)/afferent serve $(MODEL) $(ARGS)

test: setup imports  ## run the tests, ARGS="-k name ..." for some of them
	@echo "==> running the tests (some minutes)"
	@$(BIN)/python -m pytest $(or $(strip $(ARGS)),-q -n auto --dist loadfile)

test-bench: setup  ## run the long ones of the benchmarks in their quick forms (two minutes)
	@$(BIN)/python -m pytest -q -n auto --dist loadfile tests/benchmarks -m bench --bench $(ARGS)

quick: $(VENV)/.quick  ## run the tests that start no process (under a minute, without torch)
	@$(BIN)/python -m pytest -q -n auto --dist loadfile @tests/quick.txt $(ARGS)

package: setup  ## build wheel and sdist, install them into an empty environment, check their types
	@$(BIN)/python -m pytest -q tests/packaging --package -s $(ARGS)

wheels: $(VENV)/.wheels  ## build the wheels of a release in the containers of manylinux (Docker or Podman)
	@$(BIN)/python -m cibuildwheel --platform linux --output-dir dist $(ARGS)

$(VENV)/.wheels: $(VENV)/.ready pyproject.toml
	@echo "==> installing what builds wheels"
	@$(BIN)/python -m pip install --disable-pip-version-check -e '.[wheels]'
	@touch $@

setup-vllm: setup $(VLLM_VENV)/.ready  ## make an environment with a vLLM for this CPU (4 GB, some minutes), VERSION=0.31

$(VLLM_VENV)/.ready: tools/vllm_env.py pyproject.toml
	@$(BIN)/python -m tools.vllm_env $(VLLM_VENV) $(if $(VERSION),--version $(VERSION))
	@touch $@

test-vllm: setup-vllm  ## compare with a real vLLM, and kill it (an hour), VERSION=0.31 ARGS="-k oracle"
	@TEST_VLLM_PYTHON=$(VLLM_VENV)/bin/python $(BIN)/python -m pytest -q tests/vllm --ignore tests/vllm/test_families.py --vllm --timeout 1800 -s $(ARGS)

test-vllm-families: setup-vllm  ## compare each family with a real vLLM (four minutes each), ARGS="-k llama4"
	@TEST_VLLM_PYTHON=$(VLLM_VENV)/bin/python $(BIN)/python -m pytest -q tests/vllm/test_families.py --vllm --timeout 1800 -s $(ARGS)

probe-vllm: setup  ## read whether VERSION=0.33.0 of vLLM, a wheel for any device, has what Afferent needs
	@$(BIN)/python -m tools.vllm_wheels $(VERSION) $(ARGS)

setup-engines: setup .venv-serve/.ready  ## make an environment with another engine and three routers (350 MB)

.venv-serve/.ready: tools/serve_env.py tools/ray_env.py
	@$(BIN)/python -m tools.serve_env .venv-serve
	@touch $@

setup-llama: setup .venv-llama/.ready  ## compile llama.cpp's server for `make test-engines` (ten minutes)

.venv-llama/.ready: tools/llama_env.py tools/ray_env.py
	@$(BIN)/python -m tools.llama_env .venv-llama
	@touch $@

test-engines: setup-engines  ## stand in front of other engines and routers, ARGS="-k streams"
	@$(BIN)/python -m pytest -q tests/end_to_end/test_real_engines.py tests/end_to_end/test_routers.py \
		tests/http_server/test_proxies.py --engines -s $(ARGS)

setup-clients: setup .venv-clients/.ready  ## make environments with clients of others (6 GB, some minutes)

.venv-clients/.ready: tools/clients_env.py tests/clients/table.py
	@$(BIN)/python -m tools.clients_env
	@touch $@

test-clients: setup-clients  ## ask with each of the clients of others, ARGS="-k litellm"
	@$(BIN)/python -m pytest -q tests/clients --clients $(ARGS)

setup-open-webui: setup .venv-clients/open-webui/.ready  ## make an environment with Open WebUI (3 GB, some minutes)

.venv-clients/open-webui/.ready: tools/clients_env.py
	@$(BIN)/python -m tools.clients_env open-webui
	@touch $@

test-open-webui: setup-open-webui  ## ask with Open WebUI, as its page in a browser does
	@$(BIN)/python -m pytest -q tests/clients --clients -k open_webui $(ARGS)

test-page: $(VENV)/.page  ## try the live page in a real browser, and take the pictures of the docs
	@$(BIN)/python -m pytest -q tests/page --page -s $(ARGS)

$(VENV)/.page: $(VENV)/.ready pyproject.toml
	@echo "==> installing what drives a browser"
	@$(BIN)/python -m pip install --disable-pip-version-check -e '.[page]'
	@touch $@

test-ray: setup .venv-ray/.ready  ## jobs of Ray, whose processes are killed, and Ray Serve (six minutes), ARGS="-k killed"
	@.venv-ray/bin/python -m pytest -q tests/ray --ray $(ARGS)

fuzz: setup  ## feed the readers of foreign bytes with generated ones, ARGS="--minutes 60"
	@$(BIN)/python -m tests.store.fuzz $(ARGS)

soak: setup  ## an hour of mixed load: does the private memory of a process grow? ARGS="--minutes 20"
	@$(BIN)/python -m tests.end_to_end.soak $(ARGS)

schema: setup .venv-schema/bin/schemathesis  ## ask a server all that its schema allows (Schemathesis), ARGS="--minutes 60"
	@$(BIN)/python -m tests.end_to_end.against_schema $(ARGS)

.venv-schema/bin/schemathesis:
	@$(PYTHON) -m venv .venv-schema
	@.venv-schema/bin/python -m pip install --disable-pip-version-check -q 'schemathesis>=4.32,<5'

storm: setup  ## kill every kind of process under load, overload the arena, generate more (45 minutes)
	@$(BIN)/python -m pytest tests/store tests/schedule tests/media/test_cutter.py \
		tests/media/test_families.py tests/library/test_float_features.py tests/engine/test_packed.py \
		tests/end_to_end/test_worker_storm.py \
		tests/end_to_end/test_forms.py tests/end_to_end/test_overload.py tests/end_to_end/test_hostile_media.py \
		tests/end_to_end/test_kill_storm.py tests/end_to_end/test_engine_mixed.py \
		tests/end_to_end/test_all_apis.py tests/end_to_end/test_disconnect.py \
		tests/end_to_end/test_live.py \
		tests/engine/test_group.py tests/test_tutorial.py --storm --timeout 1800 -q -s $(ARGS)

sweep: setup  ## let each call of the system fail once in each process (strace), ARGS="--only store --calls 5"
	@$(BIN)/python -m tests.end_to_end.error_sweep $(ARGS)

simulate: setup  ## run servers that are not there, with everything going wrong, ARGS="--seeds 100000 --from 7"
	@$(BIN)/python -m tests.simulation $(ARGS)

lock: setup  ## write deploy/requirements.lock: versions and hashes of what a server needs
	@$(BIN)/python -m pip install --disable-pip-version-check -q uv
	@$(BIN)/uv pip compile -q pyproject.toml --generate-hashes --extra engine --extra otel --extra tier --python-version 3.11 \
		--python-platform x86_64-unknown-linux-gnu --custom-compile-command "make lock" \
		--output-file deploy/requirements.lock $(ARGS)

audit: setup  ## ask whether a version in the lock has a known fault (pip-audit, needs pypi.org)
	@$(BIN)/python -m pip install --disable-pip-version-check -q pip-audit
	@$(BIN)/pip-audit --requirement deploy/requirements.lock --no-deps --disable-pip $(ARGS)

lint: setup  ## check format, style and language
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/python -m tools.language

type: setup  ## check types, those of the documentation's programs too
	@$(BIN)/mypy
	@$(BIN)/python -m tools.typed_examples

imports: setup  ## check that packages import downwards only
	@$(BIN)/lint-imports

fmt: setup  ## format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: setup  ## run a benchmark, ARGS="codec --quick"
	@$(BIN)/python -m benchmarks.run $(ARGS)

bench-ray: setup .venv-ray/.ready  ## a benchmark with Ray or torchvision (NAME=store, tier, rollouts, rollout_nodes, batch_job, ray_serve, preprocess or feature_batch), ARGS="--quick"
	@.venv-ray/bin/python -m benchmarks.run $(or $(NAME),store) $(ARGS)

.venv-ray/.ready: $(VENV)/.ready tools/ray_env.py
	@$(BIN)/python -m tools.ray_env .venv-ray
	@touch $@

bench-vllm: setup-vllm  ## in front of vLLM, beside vLLM itself (a quarter of an hour), ARGS="--quick"
	@$(BIN)/python -m benchmarks.run vllm $(ARGS)

bench-render: setup-vllm  ## features alone (a quarter of an hour) or prompts for a router (NAME=router), beside vLLM's render server, ARGS="--quick"
	@$(BIN)/python -m benchmarks.run $(or $(NAME),render) $(ARGS)

measured: setup  ## which benchmark records were measured with other code than this
	@$(BIN)/python -m tools.measured_code

records: setup setup-vllm setup-engines .venv-ray/.ready  ## measure the records again that other code has made (hours), ARGS="--list"
	@$(BIN)/python -m tools.remeasure $(ARGS)

mutants: setup  ## see whether the tests notice small faults (a quarter of an hour), ARGS="--only admission"
	@$(BIN)/python -m tools.mutants $(ARGS)

mutation: $(VENV)/.mutation  ## how many generated faults of store, schedule and admission are noticed (hours), ARGS="--only admission"
	@$(BIN)/python -m tools.mutation $(ARGS)

$(VENV)/.mutation: $(VENV)/.ready pyproject.toml
	@echo "==> installing what generates faults"
	@$(BIN)/python -m pip install --disable-pip-version-check -e '.[mutation]'
	@touch $@

docs: $(VENV)/.docs  ## build the documentation's site into site/, and fail on a warning
	@$(BIN)/python -m mkdocs build --strict $(ARGS)
	@echo "==> open site/index.html"

docs-version: $(VENV)/.docs  ## add this version to the site of all versions (a branch, gh-pages), ARGS="--push"
	@$(BIN)/python -m tools.docs_version $(ARGS)

$(VENV)/.docs: $(VENV)/.ready pyproject.toml
	@echo "==> installing what builds the site"
	@$(BIN)/python -m pip install --disable-pip-version-check -e '.[docs]'
	@touch $@

check: lint type test test-bench docs  ## all of the above that a change has to pass

train: setup  ## train the built-in model afresh (a hundred and ten minutes on two cores)
	@$(BIN)/python training/train.py --out src/afferent/builtin/models/shapes $(ARGS)

evaluate: setup  ## judge the built-in model on images it was never trained on
	@$(BIN)/python training/evaluate.py src/afferent/builtin/models/shapes $(ARGS)
	@$(BIN)/python -m tests.end_to_end.form_figures

clean:  ## remove the environment and all caches
	rm -rf $(VENV) .venv-vllm .venv-clients .venv-ray .venv-schema .venv-serve .venv-llama build dist site src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
