# `make demo` and `make test` work as the first command in a fresh clone.
SHELL := /usr/bin/env bash
BIN := .venv/bin
OUT ?= out/demo
ROUNDS ?= 3

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench clean

help: ## show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

setup: ## build .venv (the other commands do it when needed)
	@scripts/setup.sh

demo: setup ## long prompts against short ones on a real vLLM: table and picture in out/demo/
	@mkdir -p $(OUT)
	@$(BIN)/vllm-sched compare --baseline default --candidate long_prompt \
		--workload long-blocks-short --rounds $(ROUNDS) \
		--save $(OUT)/compare.json --plot $(OUT)/compare.html

test: setup ## all tests, real engines included
	@$(BIN)/python -m pytest

lint: setup ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup ## let ruff rewrite what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup ## what a step of our schedulers costs beside upstream's
	@$(BIN)/python -m benchmarks.step_cost

clean: ## remove what the commands above made
	rm -rf .venv out .pytest_cache .mypy_cache .ruff_cache .hypothesis
