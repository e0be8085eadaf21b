# `make` lists the targets. Everything runs in .venv, which is made from nothing where missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# How many processes `make test` shares its files among: long ones first, as it happens, so that
# all end at about the same time.
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo lint types test docs fault bench soak endurance fuzz browser protos clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

setup: $(STAMP) ## make .venv with everything that the other targets need

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs,fast,etcd,spark,avro,broker,client,lakehouse,tracing]'
	touch $@

demo: $(STAMP) ## a broker, 120,000 messages, a kill -9, Spark, Iceberg and a report, in under three minutes
	$(BIN)/ister demo

lint: $(STAMP) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## mypy, strict, over src
	$(BIN)/mypy

test: lint types ## lint, types and every suite but the heavy ones, in half an hour on two cores
	$(BIN)/python -m pytest -m "not fault" --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

docs: $(STAMP) ## the site of the documents, into site/
	$(BIN)/python -m tools.reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

fault: $(STAMP) ## real kill -9, real power cuts (root), 1,000,000 mutated frames, long simulations
	ISTER_HEAVY=1 ISTER_FUZZ_COUNT=1000000 $(BIN)/python -m pytest --timeout=3000 \
	    tests/fault tests/fuzz tests/sim

bench: $(STAMP) ## every benchmark, each beside its limit, as JSON lines
	@for name in append replay tail recover topics readers upload history catalog chain spark jobs broker; do \
	    $(BIN)/ister bench $$name --json || exit 1; done

soak: $(STAMP) ## ten minutes of mixed load with kills; memory, files and threads stay flat
	$(BIN)/python -m tests.soak --seconds 600

endurance: $(STAMP) ## ten minutes with both clients and a broker that is killed every 8 s: nothing lost, all in order
	$(BIN)/python -m tests.endurance --seconds 600

fuzz: $(STAMP) ## coverage-guided fuzzing of the decoders, five minutes
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[fuzz]'
	$(BIN)/python tests/fuzz/fuzz_formats.py -max_total_time=300

browser: ## the browser of the dashboard's tests, from Debian's packages (root)
	command -v chromium || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium)

protos: $(STAMP) ## compile src/ister/broker/wire/*.proto
	cd src/ister/broker/wire && $(CURDIR)/$(BIN)/python -m grpc_tools.protoc -I. --include_imports \
	    --descriptor_set_out=services.binpb danube.proto danube_schema.proto danube_admin.proto ister.proto

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site src/*.egg-info
