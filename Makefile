# Every target sets up what it needs; `make run` and `make test` work on a fresh machine with Python 3.11+, git and make.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup run test test-fast lint types bench real-workers train proto clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

# ARGS are those of `headrace serve`: make run ARGS='--port 9000'
run: setup
	$(BIN)/headrace serve $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/pyright

# Everything: also the conformance suite on the real vllm-rs and the real vLLM engine, which are downloaded once.
test: lint types real-workers
	$(BIN)/python -m pytest

# Nothing that has to be downloaded as a worker.
test-fast: lint types
	$(BIN)/python -m pytest -m 'not real'

# Installs the real workers into $HEADRACE_REAL_WORKERS (default ~/.cache/headrace/real-workers). Where that is
# impossible the tests that need them skip and say why.
real-workers: setup
	$(BIN)/python -m tests.workers.install || echo 'real workers: not installed; the tests that need them will say why'

# A training loop on this machine, see examples/train: make train ARGS='--transport nixl'
train: real-workers
	$(BIN)/python -m examples.train $(ARGS)

# Direct, through headrace, and with PEERS=1 through ai-dynamo and vllm-router.
bench: setup
	$(BIN)/python -m bench $(if $(PEERS),--peers)

proto: setup
	$(BIN)/python proto/generate.py

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache
