# `make` lists the targets. Everything runs in .venv, which is made from nothing where missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
# Other PySparks, each in a directory that comes first on the import path of the tests that use it.
SPARKS := $(patsubst pyspark==%,$(VENV)/spark-%,$(shell grep ^pyspark constraints-spark.txt))
# How many processes share the files of the tests: most wait for something most of the time.
JOBS ?= 5
# Tests start hundreds of interpreters, which would all compile the same sources without it.
export PYTHONDONTWRITEBYTECODE :=
SHARED := --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 1

.DEFAULT_GOAL := help
.PHONY: help setup demo lint types test durations nightly docs bench peers soak endurance cluster fuzz browser dist images protos clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

setup: $(STAMP) ## make .venv with everything that the other targets need

# uv takes half as long as pip. It does not read pip's settings: to use an index other than PyPI, set
# UV_DEFAULT_INDEX.
UV := $(BIN)/uv pip install --system-certs --python $(BIN)/python
INSTALL := $(UV) --constraint constraints.txt

$(BIN)/uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv

$(STAMP): pyproject.toml constraints.txt | $(BIN)/uv
	@echo "Set-up, once: about $$(grep -c == constraints.txt) packages into $(VENV), 2 GB on disk. It takes a minute or more."
	$(INSTALL) --editable '.[dev,docs,all,native]'
	touch $@

# The demo needs less than the tests: without .venv, what users install.
$(DEMO_STAMP): pyproject.toml constraints.txt | $(BIN)/uv
	@test -e $(STAMP) || { \
	    echo "Set-up, once: the packages of ister[all] into $(VENV). It takes a minute or more; the demo then takes under three."; \
	    $(INSTALL) --editable '.[all]'; }
	touch $@

$(VENV)/spark-%: | $(STAMP)
	rm -rf $@.part
	$(UV) --quiet --no-deps --target $@.part pyspark==$*
	mv -T $@.part $@

demo: $(DEMO_STAMP) ## a broker, 120,000 messages, a kill -9, Spark, Iceberg and a report, in under three minutes
	$(BIN)/python -m demo

lint: $(STAMP) ## ruff: rules and format; the lines of each package beside its budget
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/python -m tools.size --budget

types: $(STAMP) ## mypy, strict, over src, benchmarks and demo
	$(BIN)/mypy

# What is to be done before the tests: ruff, mypy, another Spark, and test modules as bytecode.
.PHONY: ready compiled
ready: lint types compiled $(firstword $(SPARKS))

compiled: $(STAMP)
	@$(BIN)/python -m pytest --collect-only --quiet --quiet -m "not nightly" > $(VENV)/.collected \
	    || { grep -A 20 = $(VENV)/.collected; exit 1; }

test: $(STAMP) ## lint, types and the tests that everybody runs, in about nine minutes on two cores, once installed
	$(MAKE) --jobs 3 --output-sync=target ready
	$(BIN)/python -m pytest -m "not nightly" $(SHARED) --record-durations .durations.jsonl

durations: $(STAMP) ## how long the tests of the last `make test` took, by suite, and the slowest files
	@$(BIN)/python -m tests.support.durations

nightly: lint types $(SPARKS) ## every test with its large counts, soak, endurance, cluster, fuzzing and benchmarks: several hours
	ISTER_NIGHTLY=1 $(BIN)/python -m pytest --timeout=3000 --override-ini faulthandler_timeout=3300 $(SHARED)
	$(MAKE) soak endurance cluster fuzz bench
	$(MAKE) peers SCALE=$(SCALE) PEERS_CACHE=$(PEERS_CACHE)

docs: $(STAMP) ## the site of the documents, into site/
	$(BIN)/python -m tools.reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: $(STAMP) ## every benchmark, each beside its limit, as JSON lines
	@for name in startup append replay tail recover topics readers upload express history catalog cycle chain spark jobs broker; do \
	    $(BIN)/python -m benchmarks $$name --json || exit 1; done

# SCALE below 1 is a shorter trial; PEERS_CACHE is a directory that keeps the peers for the next run.
SCALE ?= 1
PEERS_CACHE ?=
peers: $(STAMP) ## measure Ister beside NATS, Redis, RabbitMQ and Kafka, into docs/BENCHMARKS.md, in 20 minutes
	$(BIN)/python -m benchmarks.peers --scale $(SCALE) $(if $(PEERS_CACHE),--cache $(PEERS_CACHE))

soak: $(STAMP) ## ten minutes of mixed load; memory, files and threads stay flat
	$(BIN)/python -m tests.soak --seconds 600

endurance: $(STAMP) ## ten minutes with both clients and a broker that is killed every 8 s: nothing lost, all in order
	$(BIN)/python -m tests.endurance --seconds 600

cluster: $(STAMP) ## ten minutes with three brokers, etcd and S3 that are killed, stopped and cut off: nothing lost, all in order
	$(BIN)/python -m tests.endurance --seconds 600 --brokers 3 --kills 100 --pauses 20 --restarts 5 --etcd-kills 10 --cuts 10

fuzz: $(STAMP) ## coverage-guided fuzzing of the decoders, five minutes
	$(INSTALL) --quiet --editable '.[fuzz]'
	$(BIN)/python -m tests.fuzz.fuzz_formats -max_total_time=300

browser: ## the browser of the dashboard's tests, from Debian's packages (root)
	command -v chromium || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium)

# Two builds of a commit make the same wheel, byte for byte: its files have the time of the commit.
dist: $(STAMP) ## wheel and sdist, into dist/; the wheel is installed on its own, and started
	$(INSTALL) --quiet build
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv dist/.trial
	dist/.trial/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	cd dist && .trial/bin/ister --version && rm -rf .trial

# For another registry: make images IMAGE=registry.example/ister TAG=v0.1.0
IMAGE ?= ister
TAG ?= local
images: ## the images of the broker and of the pipeline (needs Docker)
	docker build -f deploy/docker/Dockerfile --target broker -t $(IMAGE):$(TAG) .
	docker build -f deploy/docker/Dockerfile --target spark -t $(IMAGE)-spark:$(TAG) .

protos: $(STAMP) ## compile src/ister/wire/*.proto
	$(BIN)/python -m tools.protos

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site src/*.egg-info
