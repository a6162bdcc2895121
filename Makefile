# The commands of this project; `make` alone lists them. All set up .venv by themselves.

PYTHON ?= python3.11
CONFIG ?= deploy/mindgrid.yaml
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup check test soak demo serve bench proto docs pins lint

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv with mindgrid and its tools in it
$(READY): pyproject.toml deploy/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint deploy/constraints.txt --editable '.[local,dev]'
	@touch $@

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint ## format, lint, types, import layers and the quick tests
	$(BIN)/python -m pytest tests/tidy tests/unit

test: lint ## what CI runs: the above and all tests but the long ones
	$(BIN)/python -m pytest -m 'not soak'

soak: $(READY) ## the long random and kill tests
	$(BIN)/python -m pytest -m soak --timeout 0

demo: $(READY) ## index Python's own documentation and ask it questions
	$(BIN)/mindgrid demo

serve: $(READY) ## run a server with CONFIG (deploy/mindgrid.yaml)
	$(BIN)/mindgrid serve --config $(CONFIG)

bench: $(READY) ## measure, each figure beside a peer of the same run
	@for script in tests/bench/*.py; do \
		echo "== $$script"; PYTHONPATH=. $(BIN)/python $$script || exit 1; done

proto: $(READY) ## generate the stubs from api/wire/proto
	PYTHON=$(BIN)/python deploy/proto.sh

docs: $(READY) ## write docs/configuration.md from the settings
	$(BIN)/python -m mindgrid.cluster.settings.page > docs/configuration.new
	mv docs/configuration.new docs/configuration.md

pins: ## write deploy/constraints.txt anew from what pyproject.toml allows today
	PYTHON=$(PYTHON) deploy/pins.sh
