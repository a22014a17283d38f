# `make demo` and `make test` work as the first command in a fresh clone.
SHELL := /usr/bin/env bash
BIN := .venv/bin
OUT ?= out/demo
ROUNDS ?= 3
FLEET ?= deploy/fleets/cpu-demo.yaml

.DEFAULT_GOAL := help
.PHONY: help setup demo compare up test lint format bench bench-router boards clean

help: ## show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

setup: ## build .venv (the other commands do it when needed)
	@scripts/setup.sh

demo: setup ## a fleet of real vLLM workers, long prompts against short ones: picture in out/demo/
	@mkdir -p $(OUT)
	@$(BIN)/vllm-sched demo $(FLEET) --rounds $(ROUNDS) \
		--save $(OUT)/demo.json --plot $(OUT)/demo.html

compare: setup ## the same inside one worker: vLLM's scheduler against ours, in out/demo/
	@mkdir -p $(OUT)
	@$(BIN)/vllm-sched compare --baseline default --candidate long_prompt \
		--workload long-blocks-short --rounds $(ROUNDS) \
		--save $(OUT)/compare.json --plot $(OUT)/compare.html

up: setup ## real workers and the router in front, until Ctrl-C; FLEET=... for another file
	@$(BIN)/vllm-sched up $(FLEET)

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

bench-router: setup ## what the router costs beside the Rust ones, against its targets (5 min)
	@mkdir -p out/bench-router
	@$(BIN)/python -m benchmarks.router --save out/bench-router/run.json

boards: setup ## write the dashboards in grafana/dashboards anew
	@$(BIN)/python -m grafana.build

clean: ## remove what the commands above made
	rm -rf .venv out .pytest_cache .mypy_cache .ruff_cache .hypothesis
