# Two targets for a newcomer, on a machine with Python >= 3.10, git and make:
#   make demo   choose layers of the default model, with figures
#   make test   run all tests
PYTHON ?= python3
VENV ?= .venv
RESULT = demo/smollm2-135m

.PHONY: demo test
demo: $(RESULT)/run.json
	@cat $(RESULT)/analyze.txt; echo; echo "figures and tables: $(RESULT)"

$(RESULT)/run.json: $(VENV)/.installed nbs/experiments/analyze.ipynb $(wildcard sdsel/*.py sdsel/analysis/*.py)
	@$(VENV)/bin/sdsel fetch smollm2-135m
	@$(VENV)/bin/sdsel run analyze --models smollm2-135m --out demo --json
	@touch $@

test: $(VENV)/.installed
	@VENV=$(VENV) .ci/check

$(VENV)/.installed: settings.ini setup.py constraints.txt
	@$(PYTHON) -c "import sys; v=sys.version_info; sys.exit(v < (3, 10) and f'Python {v[0]}.{v[1]} is too old: run make with PYTHON=/path/to/python3.10 or newer')"
	@$(PYTHON) -m venv $(VENV) || { echo "could not make $(VENV): install your system's venv package (e.g. python3-venv)" >&2; exit 1; }
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@
