# Every target sets up what it needs: `git clone`, then `make demo` or `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed
EXTRAS := dev,lora,cluster,lm-eval
CODE := src tests patients benchmarks
WORKERS ?= 2
export HF_HUB_DISABLE_TELEMETRY = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: install demo demo-picture test test-slow test-families check format docs bench bench-quick faults fuzz same clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

demo: install
	$(BIN)/headwise demo --out out/demo

# the picture in README; the loss in its caption is that of `auto` in this picture
demo-picture: demo
	cp out/demo/figures/overview.png docs/demo.png

test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not faults and not families"

test-slow: install
	$(BIN)/python -m pytest -m slow

test-families: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m families

# Each campaign prints a table of tried, survived, wrong and lost; the last two must be 0.
CAMPAIGN = PYTHONPATH=src:tests OMP_NUM_THREADS=1 $(BIN)/python -m campaigns
KILLS ?= 500
CORRUPTIONS ?= 2000
FUZZED ?= 1000000
SOAK ?= 5000
SEED ?= 0

faults: install
	$(BIN)/python -m pytest -m faults
	$(CAMPAIGN) corruptions --count $(CORRUPTIONS) --seed $(SEED)
	$(CAMPAIGN) kills --count $(KILLS) --seed $(SEED)
	$(CAMPAIGN) soak --count $(SOAK)

fuzz: install
	$(CAMPAIGN) fuzz --count $(FUZZED) --seed $(SEED)

# Did a redesign move a number? The same commands with the code of BASE and with the working tree.
BASE ?= HEAD
SAME = PYTHONPATH=tests:src OMP_NUM_THREADS=1 $(BIN)/python -m campaigns.artefacts
same: install
	rm -rf out/same && mkdir -p out/same/base
	git archive $(BASE) src | tar -x -C out/same/base
	$(SAME) write out/same/base/src out/same/old
	$(SAME) write src out/same/new
	$(SAME) compare out/same/old out/same/new

check: install
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

format: install
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

bench: install
	$(BIN)/python -m benchmarks all --out out/bench

bench-quick: install
	$(BIN)/python -m benchmarks --quick --out out/bench-quick

# Strict: a broken link, a page outside the menu or an unknown reference fails. The site is out/site.
docs: install
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

clean:
	rm -rf out .mypy_cache .ruff_cache .pytest_cache
