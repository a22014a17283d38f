# `make demo` and `make test` work as the first command in a fresh clone.
SHELL := /usr/bin/env bash
BIN := .venv/bin
OUT ?= out/demo
ROUNDS ?= 3
COUNT ?= 440
MINUTES ?= 30
SEED ?= 1
# Most tests wait for something: three processes for each processor keep it busy.
PROCESSES ?= $$(( $$(nproc) * 3 ))
# The tests of what each request goes through, which are also run on compiled modules.
DATA_PATH := tests/proxy tests/faults tests/fuzz/test_http.py tests/fuzz/test_bodies.py tests/fuzz/test_sockets.py \
	tests/test_packaging.py
FLEET ?= deploy/fleets/cpu-demo.yaml

.DEFAULT_GOAL := help
.PHONY: help setup demo compare up test check explore versions mutants update lint format bench bench-router boards figures fuzz soak starvation reliability sbom audit clean

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

test: setup ## all tests, real engines included, and those of the data path on compiled modules too (17 min)
	@nice -n 10 $(BIN)/vllm-sched compile & compile=$$!; \
	$(BIN)/python -m pytest -q --processes $(PROCESSES) -m "not compiled" && wait $$compile && \
	VLLM_SCHED_COMPILED=1 $(BIN)/python -m pytest -q --processes $(PROCESSES) $(DATA_PATH)

check: lint ## lint, types and all tests that need no engine, browser or compiler (4.5 min)
	@$(BIN)/python -m pytest -q --processes $(PROCESSES) -m "not engine and not browser and not compiled"

explore: setup ## the tests that choose at random, with other choices than `make test` has
	@$(BIN)/python -m pytest --hypothesis-profile=explore \
		$$(grep -rlE "^from hypothesis" tests --include="test_*.py")

versions: setup ## the engine's tests and vLLM's scheduler tests on vLLM 0.31, 0.32 and 0.33
	@$(BIN)/python -m tests.upstream.versions

mutants: setup ## small faults in the source, and which of them the tests catch (COUNT=440; an hour)
	@mkdir -p out/mutants
	@$(BIN)/python -m benchmarks.mutants --count $(COUNT) --save out/mutants/found.json

update: ## install the newest version of every dependency, and write the versions into constraints.txt
	@UPDATE=1 scripts/setup.sh

lint: setup ## ruff, mypy and the links of the documentation
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mkdocs build --strict --quiet

format: setup ## let ruff rewrite what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup ## what a step of our schedulers costs beside upstream's
	@$(BIN)/python -m benchmarks.step_cost

bench-router: setup ## what the router costs, compiled, beside the Rust ones, against its targets (7 min)
	@mkdir -p out/bench-router
	@$(BIN)/vllm-sched compile || echo 'bench-router: with plain modules'
	@$(BIN)/python -m benchmarks.router --save out/bench-router/run.json

boards: setup ## write the dashboards in grafana/dashboards anew
	@$(BIN)/python -m grafana.build

figures: setup ## the figures of docs/evaluation.md anew, in docs/figures (minutes)
	@$(BIN)/python -m benchmarks.figures --out docs/figures

fuzz: setup ## 100,000 malformed messages against the readers of HTTP, compiled
	@$(BIN)/vllm-sched compile || echo 'fuzz: NOT COMPILED: this tests the plain modules'
	@$(BIN)/python -m benchmarks.fuzz --requests 100000

soak: setup ## the router, compiled, under load and faults, 30 minutes; MINUTES=5, SEED=2, WITH="--processes 2 --guarded"
	@$(BIN)/vllm-sched compile || echo 'soak: NOT COMPILED: this tests the plain modules'
	@$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) --seed $(SEED) $(WITH)

starvation: setup ## how long those whom a policy holds wait in real workers, beside its bound (7 min)
	@$(BIN)/python -m benchmarks.starvation

reliability: setup ## the same troubles for our router and two others
	@$(BIN)/python -m benchmarks.reliability

sbom: setup ## what the router is made of, as CycloneDX, in out/sbom.json
	@mkdir -p out
	@$(BIN)/python scripts/sbom.py > out/sbom.json

audit: setup ## asks an advisory service about what is installed (network)
	@$(BIN)/python scripts/audit.py

clean: ## remove what the commands above made
	rm -rf .venv .vllm-sched-compiled out .pytest_cache .mypy_cache .ruff_cache .hypothesis
