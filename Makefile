# Every target sets up what it needs. `make demo` trains; `make test` proves; `make check` reads.
PYTHON ?= python3
ROUNDS ?= 40
SEED ?= 0
PARALLEL ?= 1
VENV := .venv
BIN := $(VENV)/bin
BUF := .tools/node_modules/.bin/buf
# Compute threads of torch spin on barriers and collapse when cores are busy; see docs/benchmarks.md.
export OMP_NUM_THREADS := 1
export OMP_WAIT_POLICY := PASSIVE

.PHONY: setup demo test newcomer floors check prose protos verify lint-protos sim soak models leaks chaos tamper attack verdicts bench clean garbage many-runs

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[trainer,verify,telemetry]" --group dev --group codegen
	touch $@

demo: setup ## train the demo with a live display; the report lies in runs/<run>/report.html
	$(BIN)/rollmesh demo

test: setup ## all fast tests
	$(BIN)/python -m pytest -q

newcomer: setup ## README's own-tasks path, literally, with small ChatML and Llama 3 models made by plain transformers
	$(BIN)/python -m pytest -q -m slow --timeout 900 tests/newcomer

floors: setup ## the wheel with the lowest version of every dependency (all extras but the trainer's) in an environment of its own
	$(BIN)/python -m pytest -q -s -m slow --timeout 1200 tests/floors

check: setup ## style, types, import contracts, layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

prose: ## plain English in code and docs: expressions to replace, lines that are too long
	$(PYTHON) .ci/prose.py

protos: setup ## regenerate the Python code of protos/
	PYTHON=$(BIN)/python .ci/protos.sh

verify: setup ## the committed generated code is what protos/ generates
	rm -rf .tools/generated && PYTHON=$(BIN)/python .ci/protos.sh .tools/generated
	for f in .tools/generated/rollmesh/v1/*; do diff -q $$f protos/rollmesh/v1/$$(basename $$f) || exit 1; done
	diff -q .tools/generated/facts.py services/rollmesh/services/coordinator/core/facts.py

lint-protos: $(BUF) ## style and comments of protos/
	$(BUF) lint

$(BUF):
	mkdir -p .tools && npm install --silent --no-audit --no-fund --prefix .tools @bufbuild/buf@1.75.0

sim: setup ## long seeded simulations of the coordinator core
	ROLLMESH_SEEDS=$$(seq -s, 0 199) $(BIN)/python -m pytest -q tests/sim

soak: setup ## slow suites: full demo per seed, 10,000 samples under kills
	$(BIN)/python -m pytest -q -m slow --timeout 1800

models: setup ## tiny models of every architecture of tests/models through trainer and engine; the table of docs/models.md
	$(BIN)/python -m pytest -q -m "slow or not slow" --timeout 600 tests/models
	$(BIN)/python -m tests.models

leaks: setup ## 10,000 sandbox sessions under kills of the service; nothing of them is left
	$(BIN)/python -m pytest -q -s -m slow --timeout 7200 tests/integration/test_sandbox_leaks.py

garbage: setup ## malformed and oversized requests to every method of a mesh of processes, with its memory
	$(BIN)/python -m pytest -q -s -m slow --timeout 1800 tests/garbage/test_garbage.py

many-runs: setup ## 20 and 100 runs one after the other on one mesh of processes: time from publication to batch
	$(BIN)/python -m pytest -q -s -m slow --timeout 1800 tests/garbage/test_many_runs.py

chaos: setup ## ROUNDS of random kills and pauses of every process of a demo run; a table of what became of them
	$(BIN)/python -m tests.chaos --rounds $(ROUNDS) --seed $(SEED) --parallel $(PARALLEL)

tamper: setup ## 500 random tamperings with copies of the ledgers of real runs; the audit finds every one
	$(BIN)/python -m tests.tamper --num 500 --seed $(SEED)

attack: setup ## every attack on the sandbox, as root and as an ordinary user; the table of docs/sandbox/attacks.md
	$(BIN)/python -m tests.attack --write docs/sandbox/attacks.md

verdicts: setup ## the table of right and wrong candidates, as root and as an ordinary user, and under plain python
	$(BIN)/python -m pytest -q -m "slow or not slow" --timeout 900 tests/verdicts
	$(BIN)/python -m pytest -q -m slow --timeout 900 tests/integration/test_sandbox_unprivileged.py -k verdicts

contract: setup ## 500 random sequences of valid and invalid calls against an independent model of RunService and the worker verbs
	$(BIN)/python -m tests.contract --sequences 500 --seed $(SEED)

contract-kills: setup ## the same for 20 minutes while services are killed
	$(BIN)/python -m tests.contract --minutes 20 --seed $(SEED)

bench: setup ## figures of docs/benchmarks.md
	$(BIN)/rollmesh bench

clean: ## remove what the targets made
	rm -rf $(VENV) .tools .pytest_cache .mypy_cache .ruff_cache .hypothesis
