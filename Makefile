# onegraph: make targets. `make` alone lists them.
PYTHON ?= python3
VENV ?= .venv
SEED ?= 0
RUN ?= runs/demo-$(SEED)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install install-dev install-all demo test check learn smoke bench clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing onegraph into $(VENV) (PyTorch is several GB; this happens once)"
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.all: $(VENV)/.dev
	$(PIP) -e '.[dev,all]'
	@touch $@

install: $(VENV)/.base ## Install the package into .venv
install-dev: $(VENV)/.dev ## The same, with the test tools
install-all: $(VENV)/.all ## The same, with every optional environment and logger

demo: $(VENV)/.base ## Train on CartPole in minutes, draw the curve, evaluate (SEED=0, RUN=runs/demo-0)
	$(BIN)/onegraph train dreamer --preset demo --seed $(SEED) --directory $(RUN) --overwrite
	$(BIN)/onegraph eval $(RUN)
	@echo "learning curve: $(RUN)/learning_curve.png"

test: $(VENV)/.dev ## Run the tests (minutes)
	$(BIN)/python -m pytest

check: $(VENV)/.dev ## Lint, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

learn: $(VENV)/.dev ## Slow: Pendulum-v1 is learned over three seeds (under an hour), with its picture
	$(BIN)/python -m pytest -m slow --timeout 7200 -s tests/learn

smoke: $(VENV)/.all ## Slow: 500 steps in every kind of environment
	$(BIN)/python -m pytest -m slow --timeout 3600 tests/smoke tests/unit

bench: $(VENV)/.base ## Time the learner's update, the replay and the loop's shares
	$(BIN)/python benchmarks/learner.py

clean: ## Remove caches and build products, not .venv and runs
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
