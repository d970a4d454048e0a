# Two commands do everything: `make serve` and `make test`. Both create .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SERVE_ARGS ?=

export RAY_USAGE_STATS_ENABLED := 0

.PHONY: serve test lint types imports unit integration proto format clean

serve: $(VENV)/.serve-installed
	$(BIN)/tessera serve $(SERVE_ARGS)

test: lint types imports unit integration

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive attention workers service

types: $(VENV)/.dev-installed
	$(BIN)/mypy

imports: $(VENV)/.dev-installed
	$(BIN)/lint-imports

unit: $(VENV)/.dev-installed
	$(BIN)/pytest tests/architecture tests/unit tests/helm tests/distributed tests/gpu

integration: $(VENV)/.dev-installed
	tests/integration/isolated.sh $(BIN)/pytest tests/integration

proto: $(VENV)/.dev-installed
	$(BIN)/python -m service.proto.generate

format: $(VENV)/.dev-installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.serve-installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "torch>=2.11,<2.14"
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.dev-installed: $(VENV)/.serve-installed
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
