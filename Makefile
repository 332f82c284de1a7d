# One command per task. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
# Where this variable is set, each of hundreds of test processes compiles our code again.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
DEVCLUSTER := $(PYTHON) tools/devcluster
LOCKS := dev operator workers
ENGINE_NAMES := sglang vllm
ENGINE_LOCKING := --python-version 3.11 --python-platform x86_64-manylinux_2_35 --generate-hashes --no-annotate --no-header --no-emit-index-url --no-emit-find-links

.PHONY: help
help: ## List the commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  \033[1m%-16s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Set-up
.PHONY: setup
setup: $(VENV)/.done ## Make the Python environment in .venv from locks/dev.txt
$(VENV)/.done: locks/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "AgenticRun needs Python 3.11 or newer: set PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -c 'import ensurepip' 2> /dev/null || { echo "this Python makes no environments with pip: install the package with venv (Debian, Ubuntu: apt-get install $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'))"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet "$$(sed -nE 's/^(uv==[0-9.]+).*/\1/p' locks/dev.txt)"
	@echo "installing locks/dev.txt into $(VENV) (PyTorch is several GB the first time)"
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --require-hashes -r locks/dev.txt
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

.PHONY: engines
engines: $(ENGINE_NAMES:%=.engines/$(if $(GPUS),gpu/)%/.done) ## Make the environments of SGLang and vLLM in .engines, for CPUs or (GPUS=1) for GPUs; 5 GB each
.engines/gpu/%/.done: locks/%.txt images/worker/complete-toolkit | $(VENV)/.done
	$(install-engine)
.engines/%/.done: locks/%-cpu.txt | $(VENV)/.done
	$(install-engine)
define install-engine
@echo "installing $< into $(@D)"
@test -x $(@D)/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python $(@D)
@$(BIN)/uv pip sync --quiet --python $(@D)/bin/python --compile-bytecode --require-hashes $<
@images/worker/complete-toolkit $(@D)
@touch $@
endef

.PHONY: lock
lock: setup ## Compile locks/*.txt from pyproject.toml (UPGRADE=1: to the newest versions that it allows)
	@for name in $(LOCKS); do \
	  $(BIN)/uv pip compile --quiet $(if $(UPGRADE),--upgrade) --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --no-emit-index-url --no-emit-find-links \
	    --extra $$name $$([ $$name != workers ] || echo --extra megatron --extra deepspeed) \
	    $$([ $$name = dev ] || echo --constraint locks/dev.txt) pyproject.toml -o locks/$$name.txt; done
	@$(BIN)/uv pip compile --quiet $(if $(UPGRADE),--upgrade) --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --no-emit-index-url --no-emit-find-links \
	  --constraint locks/dev.txt locks/trl.in -o locks/trl.txt
	@mkdir -p build && sed -nE 's/^(nvidia-nccl-cu13==[0-9.]+).*/\1/p' locks/workers.txt > build/nccl.txt  # trainers and engines form one communicator
	@for name in $(ENGINE_NAMES); do \
	  $(BIN)/uv pip compile --quiet $(if $(UPGRADE),--upgrade) $(ENGINE_LOCKING) --override build/nccl.txt --extra $$name pyproject.toml -o locks/$$name.txt && \
	  $(BIN)/uv pip compile --quiet $(if $(UPGRADE),--upgrade) $(ENGINE_LOCKING) --override locks/$$name-cpu.overrides locks/$$name-cpu.in -o locks/$$name-cpu.txt || exit 1; done

.PHONY: generate
generate: setup ## Generate the CRD, the chart's copy of it, docs/reference.md from the models, docs/metrics.md, the tables of docs/sizing.md; write the version into the chart
	@$(BIN)/python -m agenticrun_api.crd > crds/agenticruns.yaml
	@cp crds/agenticruns.yaml charts/agenticrun/crds/agenticruns.yaml
	@$(BIN)/python tools/docs/reference.py > docs/reference.md
	@$(BIN)/python tools/docs/metrics.py > docs/metrics.md
	@$(BIN)/python tools/docs/sizing.py
	@$(BIN)/python tools/release.py chart

.PHONY: check-generated
check-generated: setup
	@$(BIN)/python -m agenticrun_api.crd | diff -u crds/agenticruns.yaml - || { echo "run: make generate"; exit 1; }
	@diff -u crds/agenticruns.yaml charts/agenticrun/crds/agenticruns.yaml || { echo "run: make generate"; exit 1; }
	@$(BIN)/python tools/docs/reference.py | diff -u docs/reference.md - || { echo "run: make generate"; exit 1; }
	@$(BIN)/python tools/docs/metrics.py | diff -u docs/metrics.md - || { echo "run: make generate"; exit 1; }

.PHONY: docs
docs: setup ## Build the documentation as a site into build/docs; broken links and anchors are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: docs-serve
docs-serve: setup ## Serve the documentation on http://127.0.0.1:8000, built again at every change
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --watch tools

##@ Checks
.PHONY: lint
lint: setup check-generated docs ## ruff, mypy --strict, import contracts, spelling, plain English, generated files, documentation
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/codespell
	@$(BIN)/pre-commit run plain-english --all-files

.PHONY: format
format: setup ## Format and fix what ruff can
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

.PHONY: test-unit
test-unit: setup ## Unit tests
	@$(BIN)/pytest tests/unit -q

.PHONY: test-integration
test-integration: setup ## Real apiserver, Ray, engine and trainer
	@$(BIN)/pytest tests/integration -q

.PHONY: test-e2e
test-e2e: setup ## The whole way on a real cluster
	@$(BIN)/pytest tests/e2e -q

.PHONY: check
check: ## The inner loop: lint, types, unit tests, one tiny run on this machine (about 6 minutes)
	@$(PYTHON) tools/ci.py check

.PHONY: coverage
coverage: setup ## Measure the lines and branches that the unit tests reach; reports in build/coverage
	@$(BIN)/pytest -q -n 2 --no-loadscope-reorder tests/unit \
	  --cov --cov-report=xml:build/coverage/coverage.xml --cov-report=html:build/coverage/html --cov-report=
	@$(BIN)/coverage report --sort=cover > build/coverage/table.txt; head -12 build/coverage/table.txt; grep ^TOTAL build/coverage/table.txt

.PHONY: test
test: ## Everything that must pass: lint, unit, integration, e2e (tier one of docs/testing.md)
	@$(PYTHON) tools/ci.py

.PHONY: drills
drills: setup ## Slow fault drills (tier two of docs/testing.md)
	@AGENTICRUN_MODEL_TYPES=all $(BIN)/pytest -q --timeout 1800 tests/unit/docs/test_model_types_page.py tests/unit/trainer/test_mixtures.py
	@HYPOTHESIS_PROFILE=explore $(BIN)/pytest -q --timeout 1800 tests/unit/operator/test_any_order_of_events.py
	@HYPOTHESIS_PROFILE=nightly $(PYTHON) tools/stalls.py --every 0.3 $(BIN)/pytest -q --timeout 1800 -n 2 --no-loadscope-reorder tests/unit
	@$(PYTHON) tools/stalls.py --every 0.6 $(BIN)/pytest -q --timeout 1800 -n 2 --no-loadscope-reorder tests/integration
	@AGENTICRUN_PROCESS_FAULTS=50 $(BIN)/pytest -q --timeout 3600 tests/integration/driver/test_process_faults.py
	@AGENTICRUN_ENGINE_FAULTS=50 $(BIN)/pytest -q tests/unit/rollout/test_engine_faults.py
	@AGENTICRUN_SERVER_FAULTS=1 $(BIN)/pytest -q -s --timeout 7200 tests/integration/inference/test_server_faults.py
	@AGENTICRUN_SERVER_FAULTS=1 AGENTICRUN_DRILLS_TABLE=benchmarks/results/bad-answers.md $(BIN)/pytest -q -s --timeout 7200 tests/integration/inference/test_faulty_servers.py
	@$(BIN)/python benchmarks/soak.py
	@$(BIN)/pytest -q -s --timeout 1800 tests/drills
	@AGENTICRUN_DETERMINISTIC_KILLS=20 $(BIN)/pytest -q tests/integration/local/test_deterministic.py
	@AGENTICRUN_E2E_OPERATOR_DOWN_SECONDS=300 $(BIN)/pytest -q tests/e2e/test_run.py
	@AGENTICRUN_E2E_DRILLS=all AGENTICRUN_DRILLS_TABLE=benchmarks/results/drills.md $(BIN)/pytest -q tests/e2e/test_drills.py
	@AGENTICRUN_E2E_DRILLS=all $(BIN)/pytest -q tests/e2e/test_upgrade.py
	@AGENTICRUN_E2E_DRILLS=all $(BIN)/pytest -q -s tests/e2e/test_queues.py
	@AGENTICRUN_KUEUE=1 AGENTICRUN_KUEUE_PREEMPTIONS=50 $(BIN)/pytest -q -s tests/integration/operator/test_kueue.py
	@AGENTICRUN_HALF_PLACED=1 $(BIN)/pytest -q -s tests/integration/operator/test_half_placed.py
	@AGENTICRUN_PROXY_SECONDS=600 AGENTICRUN_PROXY_RUNS=20 $(BIN)/pytest -q -s tests/integration/operator/test_faulty_apiserver.py
	@AGENTICRUN_E2E_ENGINES=sglang,vllm $(BIN)/pytest -q -s tests/e2e/test_engines.py

.PHONY: bench
bench: setup ## Benchmarks, by hand; results go to benchmarks/results
	@for file in $$(grep -l -- --quick benchmarks/*.py); do $(BIN)/python $$file --json benchmarks/results/$$(date +%F)-$$(basename $$file .py).json; done

.PHONY: gpu-check
gpu-check: setup ## Check on one GPU what no CPU can show, in half an hour (STAGES=a,b; DRY_RUN=1: the same code on the CPU)
	@$(BIN)/python -m agenticrun_workers.gpu_check $(if $(DRY_RUN),--dry-run) $(if $(STAGES),--stages $(STAGES))

.PHONY: gpu-check-cluster
gpu-check-cluster: setup ## Check a cluster with 8 GPUs: NCCL, and two steps of each run in examples/gpu (IMAGE=worker image, NAMESPACE=; DRY_RUN=1: print the manifests)
	@$(BIN)/python tools/gpu_check_cluster.py --image $(or $(IMAGE),$(error set IMAGE to the worker image)) $(if $(NAMESPACE),-n $(NAMESPACE)) $(if $(DRY_RUN),--dry-run)

##@ Cluster
.PHONY: demo
demo: ## Bring up a cluster, install everything, train examples/frozen-lake.yaml, show progress
	@$(PYTHON) tools/prepare.py
	@$(BIN)/python tools/demo.py

.PHONY: up
up: ## Bring up the development cluster (CONTEXT=<name> uses an existing one)
	@$(DEVCLUSTER) up

.PHONY: images
images: ## Build images: for the cluster of `make up` (ENGINES=sglang,vllm: also these), or REGISTRY=host/path [TAG= PUSH=1]: for yours
	@$(if $(REGISTRY),$(PYTHON) tools/images.py build $(REGISTRY) $(if $(TAG),--tag $(TAG)) $(if $(ENGINES),--engines $(ENGINES)) $(if $(PUSH),--push),\
	  $(DEVCLUSTER) images $(if $(ENGINES),--engines $(ENGINES)))

.PHONY: image-list
image-list: ## List the images that an installation pulls (REGISTRY=host/path TAG= ENGINES=; DIGESTS=1: with digests)
	@$(PYTHON) tools/images.py list $(REGISTRY) $(if $(TAG),--tag $(TAG)) $(if $(ENGINES),--engines $(ENGINES)) $(if $(DIGESTS),--digests)

.PHONY: down
down: ## Stop the development cluster and remove what it made (caches stay)
	@$(DEVCLUSTER) down

.PHONY: status
status: ## Show the development cluster's components
	@$(DEVCLUSTER) status

.PHONY: clean
clean: ## Remove the Python environment and local outputs
	@rm -rf $(VENV) .engines runs .mypy_cache .ruff_cache .pytest_cache
