# make ablation   train learned, rope and alibi, evaluate at 1x, 2x and 4x, write runs/ablation/report.md
# make test       the whole test suite
# make smoke      the ablation, shrunk to a minute
# Another experiment of configs/experiment: make ablation EXPERIMENT=ablation_cpu

PYTHON ?= python3
EXPERIMENT ?= ablation
RUNS = runs/$(EXPERIMENT)

.PHONY: ablation smoke test lint clean

ablation: .venv/requirements
	.venv/bin/python train.py experiment=$(EXPERIMENT)
	.venv/bin/python eval.py runs=$(RUNS) factors=[1,2,4]
	.venv/bin/python eval.py runs=$(RUNS) factors=[1,2,4] position.overflow=clamp
	.venv/bin/python scripts/compare.py $(RUNS)

smoke:
	$(MAKE) ablation EXPERIMENT=smoke

# one thread for each of as many workers as there are cores
test: .venv/requirements-dev
	.venv/bin/python -m pytest -n auto

lint: .venv/requirements-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

clean:
	rm -rf .venv runs .pytest_cache .ruff_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/requirements .venv/requirements-dev: .venv/%: %.txt requirements.txt | .venv/bin/python
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@
