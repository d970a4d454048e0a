# Two commands do everything: `make serve` and `make test`. Both create .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SERVE_ARGS ?=
MUTATION_ARGS ?=
GPUS ?= 2
# Processes that run unit tests, and those that run integration tests, each with a Ray of its own. 0 runs
# them in one without others; "logical" in as many as there are cores, up to four.
TEST_PROCESSES ?= 2
INTEGRATION_PROCESSES ?= 2

export RAY_USAGE_STATS_ENABLED := 0
# Where the environment forbids byte code, every process of a test would compile what it imports again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: serve test checks tools programs clients lock constraints lint types imports unit unit-gpu unit-beside unit-behind integration nightly mutation test-gpu test-gpus proto format clean

serve: $(VENV)/.serve-installed
	$(BIN)/tessera serve $(SERVE_ARGS)

# Tests wait about as long as they compute, integration tests longer: four processes keep two cores busy
# (docs/decisions/0102). Both kinds have namespaces of their own, are shown when they have ended, and end
# whatever the other one comes to. What can wait until integration tests
# have ended (BEHIND, mypy) takes their place, so that two cores are busy to the end.
# What was made a line before is not made again, or mypy would take the second place meanwhile.
test: $(VENV)/.dev-installed
	$(MAKE) --jobs=2 --output-sync=target unit-gpu lint imports programs
	$(MAKE) --jobs=2 --keep-going --output-sync=target --old-file=programs unit-beside integration unit-behind types

checks: lint types imports

# Helm and redis-server come with the dev extra. Prometheus and Chromium are unpacked from Debian's packages where
# apt-get can fetch them; nothing is installed or started. Where something is missing, its tests are skipped and counted.
tools: programs clients

programs: $(VENV)/.dev-installed
	$(BIN)/python -m tests.programs

clients: $(VENV)/.dev-installed
	$(BIN)/python -m tests.client_environment

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive attention workers service

types: $(VENV)/.dev-installed
	$(BIN)/mypy

imports: $(VENV)/.dev-installed
	$(BIN)/lint-imports

UNIT_TESTS := tests/integration/isolated.sh $(BIN)/pytest -n $(TEST_PROCESSES) --maxprocesses 4 --dist loadfile -m "not nightly"
BEHIND := tests/unit/service/api tests/unit/service/tokenizer tests/unit/benchmarks $(addprefix tests/unit/workers/,graphs layers runner speculation)

unit: unit-gpu programs
	$(UNIT_TESTS) tests/architecture tests/unit tests/helm tests/distributed

# The three parts of unit. The first imports most of what the others do: it compiles that for all of them.
unit-gpu: $(VENV)/.dev-installed
	tests/integration/isolated.sh $(BIN)/pytest tests/gpu

unit-beside: $(VENV)/.dev-installed programs
	$(UNIT_TESTS) tests/architecture tests/unit $(BEHIND:%=--ignore=%)

unit-behind: $(VENV)/.dev-installed programs
	$(UNIT_TESTS) --no-loadscope-reorder tests/distributed $(BEHIND) tests/helm

integration: $(VENV)/.dev-installed programs
	tests/integration/isolated.sh $(BIN)/pytest -n $(INTEGRATION_PROCESSES) --maxprocesses 4 --dist loadfile -m "not nightly" \
	  tests/integration

test-gpu: $(VENV)/.gpu-installed
	$(BIN)/python -m tests.gpu

test-gpus: $(VENV)/.gpu-installed
	$(BIN)/python -m tests.gpu --gpus $(GPUS)

# What takes too long for every change.
nightly: $(VENV)/.dev-installed tools
	tests/integration/isolated.sh $(BIN)/pytest tests/nightly
	tests/integration/isolated.sh $(BIN)/pytest tests/integration tests/unit -m nightly

# Part of nightly, with all survivors shown: MUTATION_ARGS="--area router --all".
mutation: $(VENV)/.dev-installed
	tests/integration/isolated.sh $(BIN)/python -m tests.nightly.mutation $(MUTATION_ARGS)

# What the image for GPUs holds: Linux on x86-64, Python 3.12. No index or host is written, hashes are.
lock: $(VENV)/.dev-installed
	$(BIN)/uv pip compile pyproject.toml --extra cuda --extra tracing --generate-hashes --upgrade --quiet \
	  --python-version 3.12 --python-platform x86_64-manylinux_2_28 --no-header --no-annotate --output-file deploy/requirements.lock

proto: $(VENV)/.dev-installed
	$(BIN)/python -m service.proto.generate

format: $(VENV)/.dev-installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Arguments: options of pip, extras.
define install
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(1) "torch>=2.11,<2.14"
	$(BIN)/pip install --quiet $(1) --constraint constraints.txt --editable "$(strip .$(2))"
	touch $@
endef

$(VENV)/.serve-installed: pyproject.toml constraints.txt
	$(call install,,)

# Of 24,000 files tests import a third: what is not imported is not compiled.
$(VENV)/.dev-installed: pyproject.toml constraints.txt
	$(call install,--no-compile,[dev])
	touch $(VENV)/.serve-installed

$(VENV)/.gpu-installed: $(VENV)/.dev-installed
	$(BIN)/pip install --quiet --editable ".[cuda]"
	touch $@

# The versions that the virtual environment gets, so that what a package releases breaks nobody's tests:
# the newest that pyproject.toml allows. torch and what comes with it depend on the machine.
constraints: $(VENV)/.dev-installed
	$(BIN)/pip install --quiet --upgrade --upgrade-strategy eager --editable ".[dev]" "torch==$$($(BIN)/python -c 'import torch; print(torch.__version__)')"
	$(BIN)/pip freeze --exclude-editable | grep -E '^[A-Za-z0-9._-]+==' | grep -vE '^(torch|triton|nvidia-|cuda-)' > constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
