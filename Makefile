# Two commands matter: `make up` and `make test`. Everything they need is installed, built and cached by the scripts they call.
export STASIS_DATA ?= .stasis
export STASIS_LISTEN ?= 127.0.0.1:3000

.DEFAULT_GOAL := help
.PHONY: help up down doctor build test test-unit test-direct test-rig rig bench

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

up: ## Build everything, start stasis, answer one invocation (STASIS_DATA and STASIS_LISTEN change where)
	@scripts/up.sh

down: ## Stop it; no process, mount, loop device or cgroup is left
	@if [ -x target/release/stasis ]; then target/release/stasis down; else echo "nothing was built, so nothing runs"; fi

doctor: build ## Check what this host offers
	@target/release/stasis doctor

build: ## The binary, the guest kernel for this host, the root file system
	@scripts/build.sh

test: ## All that CI runs
	@scripts/test.sh

test-unit: ## Format, lints, unit and property tests, documentation
	@scripts/test.sh style unit

test-direct: ## End-to-end tests on this machine's KVM
	@scripts/test.sh direct

test-rig: ## End-to-end tests in the emulated production host, with the hw guest kernel
	@scripts/test.sh rig

rig: ## Run stasis in the emulated production host; its API is on STASIS_LISTEN's port here
	@scripts/rig.sh

bench: ## Measure; writes target/bench/report.json
	@scripts/bench.sh
