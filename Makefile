# `make demo` and `make test` work as the first command in a fresh clone.
SHELL := /usr/bin/env bash
BIN := .venv/bin
OUT ?= out/demo
ROUNDS ?= 3
COUNT ?= 440
MINUTES ?= 30
SEED ?= 1
# Most tests wait for events, so three processes per CPU keep it busy.
PROCESSES ?= $$(( $$(nproc) * 3 ))
# The tests of a request's path, which also run on compiled modules.
DATA_PATH := tests/proxy tests/faults tests/fuzz/test_http.py tests/fuzz/test_bodies.py tests/fuzz/test_sockets.py \
	tests/test_packaging.py::test_wheel_has_compiled_modules_that_the_router_finds
# Of these, the tests that take long and run no compiled module, or few lines of one beside databases and processes.
PLAIN_ONLY := config batches/storage batches/test_killed.py batches/test_replicas.py health/test_worker_metrics.py \
	journal/test_engine_state.py journal/test_subscriber.py metrics/test_exposition.py net processes/replicas \
	processes/test_supervisor.py processes/test_tls.py telemetry/test_logs_seen.py
FLEET ?= deploy/fleets/cpu-demo.yaml

# Hundreds of processes import the same modules; without bytecode each compiles them again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo compare up test check tests-alone explore versions mutants update lint format bench bench-router boards frontier cache-pressure figures fuzz soak starvation reliability sbom audit clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

setup: ## build .venv (the other commands do it when needed)
	@scripts/setup.sh

demo: setup ## run a fleet of real vLLM workers with long and short prompts; the picture is in out/demo/
	@mkdir -p $(OUT)
	@$(BIN)/vllm-sched demo $(FLEET) --rounds $(ROUNDS) \
		--save $(OUT)/demo.json --plot $(OUT)/demo.html

compare: setup ## the same inside one worker: vLLM's scheduler and a policy; the picture is in out/demo/
	@mkdir -p $(OUT)
	@$(BIN)/vllm-sched compare --baseline default --candidate long_prompt \
		--workload long-blocks-short --rounds $(ROUNDS) \
		--save $(OUT)/compare.json --plot $(OUT)/compare.html

up: setup ## run real workers and the router until Ctrl-C; FLEET=... for another file
	@$(BIN)/vllm-sched up $(FLEET)

test: setup ## run all tests, with real engines, and the data path's tests also on compiled modules (15 min)
	@nice -n 10 $(BIN)/vllm-sched compile & compile=$$!; \
	$(BIN)/python -m pytest -q --processes $(PROCESSES) -m "not compiled" && wait $$compile && \
	VLLM_SCHED_COMPILED=1 $(BIN)/python -m pytest -q --processes $(PROCESSES) -m "not browser" -k "not postgres" \
		$(DATA_PATH) $(PLAIN_ONLY:%=--ignore=tests/proxy/%)

check: setup ## run lint beside all tests that need no engine, browser or compiler (4 min)
	@$(MAKE) --no-print-directory --jobs 2 lint tests-alone

tests-alone: setup
	@$(BIN)/python -m pytest -q --processes $(PROCESSES) -m "not engine and not browser and not compiled"

explore: setup ## run the property tests with new random examples
	@$(BIN)/python -m pytest --hypothesis-profile=explore \
		$$(grep -rlE "^from hypothesis" tests --include="test_*.py")

versions: setup ## run the engine's tests and vLLM's scheduler tests on vLLM 0.31, 0.32 and 0.33
	@$(BIN)/python -m tests.upstream.versions

mutants: setup ## make small faults in the source and count those that the tests catch (COUNT=440; an hour)
	@mkdir -p out/mutants
	@$(BIN)/python -m benchmarks.mutants --count $(COUNT) --save out/mutants/found.json

update: ## install the newest version of every dependency, and write the versions into constraints.txt
	@UPDATE=1 scripts/setup.sh

lint: setup ## run ruff and mypy, and check the links of the documentation
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mkdocs build --strict --quiet

format: setup ## let ruff fix and format the source
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup ## measure the time of a scheduler step, with policies and without
	@$(BIN)/python -m benchmarks.step_cost

bench-router: setup ## measure the compiled router beside Rust routers, and check its targets (7 min)
	@mkdir -p out/bench-router
	@$(BIN)/vllm-sched compile || echo 'bench-router: NOT COMPILED: this measures the plain modules'
	@$(BIN)/python -m benchmarks.router --save out/bench-router/run.json

boards: setup ## build the dashboards in grafana/dashboards
	@$(BIN)/python -m grafana.build

frontier: setup ## compare policies and baselines on modelled GPUs; the table and picture are in out/frontier/ (30 minutes of processor time)
	@mkdir -p out/frontier
	@$(BIN)/python -m benchmarks.frontier --save out/frontier/found.json --plot out/frontier/frontier.svg

cache-pressure: setup ## compare what the router knows of the caches, when prefixes do not fit into them (20 minutes of processor time)
	@$(BIN)/python -m benchmarks.cache_pressure

figures: setup ## draw the figures of docs/simulated-fleets.md in docs/figures (minutes)
	@$(BIN)/python -m benchmarks.figures --out docs/figures

fuzz: setup ## send 100,000 malformed messages to the compiled HTTP parsers
	@$(BIN)/vllm-sched compile || echo 'fuzz: NOT COMPILED: this tests the plain modules'
	@$(BIN)/python -m benchmarks.fuzz --requests 100000

soak: setup ## run the compiled router under load and faults for 30 minutes; MINUTES=5, SEED=2, WITH="--processes 2 --guarded"
	@$(BIN)/vllm-sched compile || echo 'soak: NOT COMPILED: this tests the plain modules'
	@$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) --seed $(SEED) $(WITH)

starvation: setup ## measure how long requests that a policy holds wait in real workers, beside the bound (7 min)
	@$(BIN)/python -m benchmarks.starvation

reliability: setup ## inject the same faults into this router and two others
	@$(BIN)/python -m benchmarks.reliability

sbom: setup ## write the router's dependencies as CycloneDX to out/sbom.json
	@mkdir -p out
	@$(BIN)/python scripts/sbom.py > out/sbom.json

audit: setup ## look up security advisories for the installed packages (network)
	@$(BIN)/python scripts/audit.py

clean: ## remove everything that the commands above built
	rm -rf .venv .vllm-sched-compiled out .pytest_cache .mypy_cache .ruff_cache .hypothesis
