# Every target sets up what it needs; the first run takes a few minutes, later ones none.

PYTHON ?= python3
PIP_FLAGS ?= -qq
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo docs test test-fast test-gpu test-faults tools check bench format release clean compiler-needed page-packages

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.installed ## Train a Transformer to read dates in 33 languages, in about a minute
	@$(BIN)/clearhead demo

# One thread each: the test processes already fill the cores. What a machine has no tool for is skipped, and counted at the end.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=auto --maxprocesses=8 --dist=worksteal

test: .venv/.installed page-packages ## Run all tests
	@$(PYTEST)

test-fast: .venv/.installed page-packages ## Run all tests but the slow ones, in about two minutes
	@$(PYTEST) -m "not slow"

# By the python that has a torch for this GPU, which is seldom the one of .venv.
test-gpu: ## Run all tests that need a CUDA GPU, with a table at the end (GPU_PYTHON=python3 has torch and pytest)
	@PYTHON=$(or $(GPU_PYTHON),$(PYTHON)) bash benchmarks/gpu/tests.sh

test-faults: .venv/.installed ## Inject faults: the engine's events, the disk's calls, changed bytes, attacks on a server; print what was survived
	@$(BIN)/python -m tests.faults.simulation
	@$(BIN)/python -m tests.faults.disk_faults --kills 100
	@$(BIN)/python -m tests.faults.byte_flips
	@$(BIN)/python -m tests.serving.attack_table

tools: ## Install what some tests need: Chromium, node, a C++ compiler (by apt as root; elsewhere Chromium by playwright)
	@missing=""; \
	  { $(CAN_COMPILE); } || missing="$$missing g++ python3-dev"; \
	  command -v node >/dev/null 2>&1 && command -v npm >/dev/null 2>&1 || missing="$$missing nodejs npm"; \
	  $(PYTHON) tests/chromium.py >/dev/null || missing="$$missing chromium"; \
	  if [ -z "$$missing" ]; then echo "all tools are here"; exit; fi; \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then apt-get update -qq && apt-get install -y -qq $$missing; exit; fi; \
	  case "$$missing" in *chromium*) \
	    $(MAKE) --no-print-directory .venv/.installed && $(BIN)/python -m playwright install chromium && missing="$${missing%% chromium}";; esac; \
	  if [ -n "$$missing" ]; then \
	    echo "error: missing:$$missing; on Debian or Ubuntu: sudo apt-get install$$missing, on macOS: xcode-select --install," \
	      "brew install node chromium" >&2; exit 1; fi

check: .venv/.installed node_modules/.installed ## Check format, lint, types, import arrows and public names
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	npm run --silent check
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/python -m pytest tests/test_arrows.py tests/test_public_names.py

docs: .venv/.installed node_modules/.installed ## Build the site of docs/ into build/site/, with its experiments run
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "open build/site/index.html"

bench: compiler-needed .venv-bench/.installed ## Measure speed and memory beside other libraries
	@.venv-bench/bin/python benchmarks/run.py

release: compiler-needed .venv-release/.installed ## Build sdist and wheel into dist/ and try them in a clean environment
	@.venv-release/bin/python release/build.py $(BUILD_FLAGS)
	@.venv-release/bin/python release/smoke.py dist/*_$$(uname -m).whl

format: .venv/.installed ## Format the code and apply the lint fixes that are safe
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove caches and build leftovers; environments and runs/ stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

# $(call install,ENVIRONMENT,EXTRAS): the constraints fix every version, torch included.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "clearhead needs Python 3.10 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true); choose another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot create environments: its venv module is missing; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "creating $(1) and installing (a few minutes the first time)"
	@$(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(1)
	@$(1)/bin/python -m pip install $(PIP_FLAGS) --disable-pip-version-check -c constraints.txt -e ".[$(2)]" || { \
	  echo "installing into $(1) failed; to see every step: make PIP_FLAGS= $(MAKECMDGOALS)" >&2; exit 1; }
	@touch $@
endef

.venv/.installed: pyproject.toml constraints.txt
	$(call install,.venv,dev$(COMMA)demo)

.venv-release/.installed: pyproject.toml constraints.txt
	$(call install,.venv-release,release$(COMMA)all)

.venv-bench/.installed: pyproject.toml constraints.txt
	$(call install,.venv-bench,bench)

# Only checks need these: axe-core and the type checker of the explorer's page, in the lock file's versions.
node_modules/.installed: package.json package-lock.json
	@command -v node >/dev/null 2>&1 && command -v npm >/dev/null 2>&1 || { \
	  echo "error: no node or no npm found, and the explorer's page is checked with both; on Debian or Ubuntu: apt install nodejs npm, on macOS: brew install node" >&2; exit 1; }
	@npm ci --ignore-scripts --no-audit --no-fund --loglevel=error || { \
	  echo "installing into node_modules failed; to see every step: npm ci --ignore-scripts" >&2; exit 1; }
	@touch $@

COMMA := ,
# What torch.compile looks for: $CXX or g++, and the headers it includes.
CAN_COMPILE = command -v "$${CXX:-g++}" >/dev/null 2>&1 && { $(PYTHON) -c 'import os, sys, sysconfig; \
  sys.exit(0 if os.path.exists(sysconfig.get_path("include") + "/Python.h") else 3)' 2>/dev/null; test $$? -ne 3; }
CANNOT_COMPILE = no C++ compiler or no Python headers found, and torch.compile needs both on the CPU; \
  on Debian or Ubuntu: apt install g++ python3-dev, on macOS: xcode-select --install

compiler-needed:
	@{ $(CAN_COMPILE); } || { echo "error: $(CANNOT_COMPILE)" >&2; exit 1; }

# Where there is node, what it brings for the tests of the explorer's page.
page-packages:
	@if command -v node >/dev/null 2>&1 && command -v npm >/dev/null 2>&1; then $(MAKE) --no-print-directory node_modules/.installed; fi
