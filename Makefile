# make demo    diagnose a shipped run: terminal answer and report.html (RUN=DIR for another one)
# make test    run every test on all cores; installs what the tests need (a CPU build of torch among it)
# make lint    ruff and mypy
# make docs    the documentation as a site, in build/site: docs, rules, facts, decisions, and a gallery of answers
# make oldest  a sample, its page, figures and tables, and a comparison, with the oldest versions of what tracedoc needs
# make newest  the same with the newest that there are
# make refresh golden files, schemas and outputs in documents made anew, to read what changed
# make pythons the tests that need no torch, on each other Python that is supported and found
# make mutate  change definitions one at a time, and hold that a test fails for each (MUTANTS="NAME ...")
# make shipped what users get: wheels, and the code that fixes and plans print, each built or run as it is
# make wheel   what a release uploads, in dist: sources, the wheel for every platform and this one's native one, all checked
# make soak    what takes minutes: wheels, printed code, hard inputs, jobs that go wrong: an hour and more (SOAK="--share 0.01")
# make bench   measure speed and memory side by side with other tools (BENCH="--rounds 1" for options)
# make bench-plan   hold predicted steps and peaks of `tracedoc plan` against published runs (ROWS=--rows: each run)
# make bench-replay hold predicted steps against 300 simulated jobs with the fix applied (REPLAY="--jobs 60 --wrong")
# make bench-truth  diagnose 200 random simulated jobs whose causes are known (TRUTH="--only heavy-stage --wrong")
# make bench-try    capture twelve kinds of jobs, try their fixes, and count predictions that held (TRY="--same 5 ddp")
# make fuzz    mutants of real traces through both readers, the native one with sanitizers (FUZZ="--count 100000")
# make constraints  take the newest versions of all that the environments hold into requirements/constraints.txt
# make clean   remove what the targets above made

PYTHON ?= python3
RUN ?= sample_traces/synthetic_ddp_tiny_batch
BENCH ?=
FUZZ ?=
CLANG ?= clang
FUZZ_SECONDS ?= 120
SOAK ?=
ROWS ?=
MUTANTS ?=
# One worker a core; a worker that is done takes tests over from the others.
XDIST ?= -n auto --dist worksteal

TRUTH ?=
TRY ?=
BIN := .venv/bin
PIP := -m pip install -qq --disable-pip-version-check
PINNED := $(PIP) --constraint requirements/constraints.txt

.PHONY: demo test lint docs refresh oldest newest pythons mutate shipped wheel soak bench bench-plan bench-truth bench-replay
.PHONY: bench-try fuzz constraints clean

demo: .venv/installed
	$(BIN)/tracedoc diagnose $(RUN) -o - -o report.html
	@echo "tracedoc is in $(BIN): to type such commands, first: . $(BIN)/activate"

test: .venv/test-installed loaders peers
	$(BIN)/python -m pytest $(XDIST)

lint: .venv/lint-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What it is built from is installed before; building asks for nothing, and links that lead nowhere are errors.
docs: .venv/installed .venv-docs/ready
	if [ -x .venv-docs/bin/mkdocs ]; then \
		$(BIN)/python docs/gallery.py build/gallery && \
		$(BIN)/python docs/rule_pages.py build/pages && \
		NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet; \
	else echo "mkdocs could not be installed; the site is not built" >&2; fi

# What pyproject.toml asks for and nothing else, so without torch; the oldest are for Python 3.10 and 3.11.
oldest: VERSIONS = s/>=/==/
oldest newest:
	$(PYTHON) -m venv .venv-$@
	sed -n '/^dependencies = \[/,/^\]/s/^ *"\(.*\)",$$/\1/p' pyproject.toml | sed '$(VERSIONS)' > .venv-$@/needs.txt
	.venv-$@/bin/python $(PIP) --upgrade --upgrade-strategy eager --requirement .venv-$@/needs.txt
	.venv-$@/bin/python -m tests.any_versions

refresh: .venv/test-installed
	$(BIN)/python docs/refresh.py

pythons:
	.ci/pythons

mutate: .venv/test-installed
	$(BIN)/python tests/mutate.py $(MUTANTS)

shipped: .venv/test-installed loaders
	$(BIN)/python -m pytest -m soak tests/project tests/planner tests/rules --ignore tests/planner/test_never_dominated.py

wheel: .venv/installed .venv-wheel/ready
	.venv-wheel/bin/python requirements/wheel.py $(BIN)/python

soak: .venv/test-installed loaders peers
	$(BIN)/python -m pytest -m soak
	$(BIN)/python soak/run.py $(SOAK)

# From the checkout, but with no editable installation: what makes one work takes time at every start.
bench: .venv-bench/python .venv-hta/ready .venv-gpu-idle/ready
	rm -rf build/lib
	.venv-bench/bin/python $(PINNED) .
	.venv-bench/bin/python benchmarks/run.py $(BENCH)

bench-truth: .venv/test-installed
	$(BIN)/python benchmarks/truth.py $(TRUTH)

bench-replay: .venv/test-installed
	$(BIN)/python benchmarks/replay.py $(REPLAY)

bench-try: .venv/test-installed
	$(BIN)/python benchmarks/tried.py $(TRY)

bench-plan: .venv/installed
	$(BIN)/python benchmarks/plan.py $(ROWS)

SANITIZE := -g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined

# Python itself is not built with the sanitizers, so their libraries are loaded before it.
fuzz: .venv/test-installed
	CFLAGS="$(SANITIZE)" LDFLAGS="$(SANITIZE)" $(BIN)/python setup.py -q build_ext --force \
		--build-lib build/fuzz --build-temp build/fuzz/objects
	LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc $(BIN)/python soak/fuzz_readers.py \
		--scanner build/fuzz/tracedoc/trace --corpus build/fuzz/corpus $(FUZZ)
	if command -v $(CLANG) > /dev/null; then \
		$(CLANG) $(SANITIZE) -fsanitize=fuzzer -o build/fuzz/events native/fuzz.c native/events.c native/table.c && \
		build/fuzz/events -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -print_final_stats=1 build/fuzz/corpus; \
	else echo "there is no $(CLANG), whose fuzzer would run now" >&2; fi

constraints: .venv/loaders-installed
	$(BIN)/python requirements/refresh.py

clean:
	rm -rf .venv .venv-* build dist report.html *.egg-info
	rm -f tracedoc/trace/_scanner.*.so

.venv/python .venv-bench/python:
	$(PYTHON) -m venv $(@D)
	touch $@

.venv/installed: pyproject.toml setup.py requirements/constraints.txt $(wildcard native/*) .venv/python
	@echo "installing tracedoc into .venv, which takes half a minute" >&2
	$(BIN)/python $(PINNED) --editable .
	touch $@

.venv/test-installed: requirements/test.txt requirements/light.txt .venv/installed
	$(BIN)/python $(PINNED) --requirement $<
	touch $@

.venv/lint-installed: requirements/lint.txt .venv/installed
	$(BIN)/python $(PINNED) --requirement $<
	touch $@

# Where these cannot be installed, the tests that need them skip and say so.
.PHONY: loaders
loaders: .venv/loaders-installed

.venv/loaders-installed: requirements/loaders.txt .venv/test-installed
	if DS_BUILD_OPS=0 $(BIN)/python $(PINNED) --no-build-isolation --requirement $<; then touch $@; \
	else echo "the loaders of configurations could not be installed; tests that need them will be skipped" >&2; fi

# The tools that tracedoc is compared with live apart, each in an environment of its own, with a pandas of their
# own. Where one of them cannot be installed, the tests that need it skip and say so.
.PHONY: peers
peers: .venv-hta/ready .venv-traceinsight/ready

.venv-%/ready: requirements/%.txt
	$(PYTHON) -m venv .venv-$*
	grep -v '^pandas==' requirements/constraints.txt > .venv-$*/constraints.txt
	if .venv-$*/bin/python $(PIP) --constraint .venv-$*/constraints.txt --requirement $<; then touch $@; \
	else echo "$* could not be installed; what needs it will be left out" >&2; fi
