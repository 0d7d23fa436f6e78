# One environment for everything, made from pinned versions. PYTHON picks the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS := $(VENV)/.docs
COURSE := $(VENV)/.course
LAB := $(VENV)/.lab

.PHONY: demo test test-all check wheels try-wheels matrix torchtitan gpu bench science race validate-model peers mutations stress chaos look look-docs docs pictures tutorial course clean

demo: $(if $(wildcard $(READY)),$(READY),$(LAB))  ## what a slow network costs, and what laconic gains
	$(BIN)/laconic demo

# One process per processor: with one more, no time is spent waiting, and as much on starting it.
WORKERS := $(shell nproc)

T ?=
TEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(T)

test: $(READY)            ## run the tests but those marked slow, on all processors; T=tests/links
	$(TEST)

test-all: $(READY)        ## run all tests, the slow ones too
	$(TEST) -m ""

check: $(READY)           ## lint and type-check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

wheels: $(READY)          ## build both wheels into dist/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[wheels]' --no-build-isolation
	$(BIN)/python packaging/wheels.py

TRY ?=

try-wheels:               ## use the wheels in empty environments without a compiler; TRY="--python python3.13"
	$(BIN)/python packaging/try_wheels.py $(TRY)

MATRIX ?=

matrix:                   ## the tests that decide, with the oldest and newest Python and torch; gigabytes
	$(PYTHON) packaging/matrix.py $(MATRIX)

TITAN := build/torchtitan

torchtitan: $(READY)      ## the example for torchtitan, on CPUs
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(TITAN) -r examples/torchtitan/requirements.txt
	PYTHONPATH=$(CURDIR)/$(TITAN):$(CURDIR)/examples/torchtitan $(BIN)/python -m pytest -n 0 examples/torchtitan

GPU ?=
GPU_PYTHON ?=
GPU_SECONDS ?= 780

gpu: $(if $(GPU_PYTHON),,$(READY))  ## what needs a GPU, as much as fits into GPU_SECONDS; GPU="--only NAME"; GPU_PYTHON=python3: with another torch
	PYTHONPATH=src $(or $(GPU_PYTHON),$(BIN)/python) -m benchmarks.cuda --seconds $(GPU_SECONDS) $(GPU)

bench: $(READY)           ## measure what laconic costs, as ratios
	$(BIN)/python -m benchmarks

peers: $(READY)           ## install the other libraries that laconic compare --peer can race
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/peers/requirements.txt

SCIENCE ?= full

science: $(READY)         ## tune and compare the recipes' quality; SCIENCE=quick in a few minutes
	$(BIN)/python -m benchmarks.science $(SCIENCE)

RACE ?=

race: peers               ## recipes and other libraries on three networks; hours; goes on where it was
	$(BIN)/python -m benchmarks.race $(RACE)

VALIDATE ?=

validate-model: $(READY)  ## the cost model against emulated networks; 40 minutes; VALIDATE=--quick
	$(BIN)/python -m benchmarks.validate $(VALIDATE)

SOURCES := pyproject.toml setup.py constraints.txt $(wildcard src/laconic/*/*.c src/laconic/*/*/*.c)

# pip would compile on one processor.
define environment
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[$(1)]'
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null || true
	touch $@
endef

$(READY): $(SOURCES)
	$(call environment,dev)

$(LAB): $(SOURCES)
	$(call environment,lab)

$(COURSE): $(SOURCES)
	$(call environment,course)

SAMPLE ?= 0
SEED ?= 0
MUTATIONS ?=

mutations: $(READY)       ## change the source at random and see a test fail; SAMPLE=100 SEED=1, else all: hours
	$(BIN)/python -m tests.mutations --sample $(SAMPLE) --seed $(SEED) $(MUTATIONS)

stress: $(READY)          ## start and end 200 labs in every way there is; nothing may be left
	$(BIN)/python -m benchmarks.stress

CHAOS ?=

chaos: $(READY)           ## faults in elastic runs of processes; 10 minutes; CHAOS="--faults 20", CHAOS=--tls
	$(BIN)/python -m benchmarks.chaos $(CHAOS)

look: $(READY)            ## pictures of the demo's report, with Chromium
	$(BIN)/python -m tests.look

look-docs: docs           ## search and pictures of the docs site, with Chromium
	$(BIN)/python -m tests.look docs

docs: $(DOCS)             ## build the docs site into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	$(BIN)/python -m tests.offline build/site

pictures: $(READY)        ## draw the timelines of docs/algorithms and the diagrams of the course
	$(BIN)/python docs/pictures.py
	$(BIN)/python -m tutorial.pictures

tutorial: $(DOCS)         ## execute the tutorial's chapters and write their pages; some minutes
	$(BIN)/python -m tutorial.pages

course: $(COURSE)         ## the course's light environment, and its chapters as notebooks for Jupyter
	$(BIN)/python -m tutorial.notebooks

$(DOCS): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) laconic-compare laconic-demo laconic-science build mutants *.egg-info
