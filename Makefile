# `make help` lists the targets. Needs make and Python 3.11 or newer; everything else is installed into .venv.
.DEFAULT_GOAL := help
SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
# The first of these that is new enough. `make PYTHON=/path/to/python run` selects another.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)
TESTS ?= tests

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1@\2/p' $(MAKEFILE_LIST) | column -t -s @ 2>/dev/null \
		|| sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1  \2/p' $(MAKEFILE_LIST)

.PHONY: run
run: $(VENV)/.run ## start everything on port 8080 (or CODEQ_PORT); Ctrl-C stops it
	@$(BIN)/python manage.py up

.PHONY: test
test: $(VENV)/.dev ## run all tests, with a separate Valkey and PostgreSQL (TESTS=tests/queues for some)
	@$(BIN)/python -m pytest -n 3 -q $(TESTS)

.PHONY: test-long
test-long: $(VENV)/.dev ## run the long tests: 5,000 random histories, every crash point, 300 kills, long outages, an hour of API fuzzing
	@CODEQ_TEST_LONG=1 $(BIN)/python -m pytest -n 2 -q tests/queues/engine tests/concurrency \
		tests/faults tests/webhooks/test_crash.py tests/codeq_site/test_schemathesis.py

# sagemaker_pyspark is the only package on PyPI that contains Hadoop's S3A. Two jars of its 180 MB are used.
# CODEQ_TEST_S3A_JARS selects other jars, such as those of the Hadoop version that Spark includes.
.PHONY: test-s3a
test-s3a: $(VENV)/.dev ## test the lake in a bucket through Hadoop's S3A (downloads 180 MB once)
	@test -n "$$CODEQ_TEST_S3A_JARS" || test -d $(VENV)/s3a || { mkdir -p $(VENV)/s3a.part && \
		$(BIN)/python -m pip download -q --disable-pip-version-check --no-deps --no-binary :all: -d $(VENV)/s3a.part \
			sagemaker_pyspark==1.4.5 && \
		tar xzf $(VENV)/s3a.part/*.tar.gz -C $(VENV)/s3a.part --strip-components=3 --wildcards \
			'*/hadoop-aws-*.jar' '*/aws-java-sdk-bundle-*.jar' && \
		rm $(VENV)/s3a.part/*.tar.gz && mv $(VENV)/s3a.part $(VENV)/s3a; }
	@CODEQ_TEST_S3A_JARS="$${CODEQ_TEST_S3A_JARS:-$$(ls $(VENV)/s3a/*.jar | paste -sd , -)}" \
		$(BIN)/python -m pytest -q tests/pipeline/test_s3a.py

# helm is built from its source, which takes some minutes. CODEQ_TEST_DEPLOY selects a directory with other copies of helm
# and kubernetes-validate.
HELM := v3.18.6
.PHONY: test-deploy
test-deploy: $(VENV)/.dev ## test the Helm chart, the systemd units and the nginx sample (needs go, nginx and systemd)
	@test -n "$$CODEQ_TEST_DEPLOY" || test -f $(VENV)/deploy/.$(HELM) || { $(PYTHON) -m venv $(VENV)/deploy && \
		$(VENV)/deploy/bin/python -m pip install -q --disable-pip-version-check -r tests/deploy/requirements.txt && \
		GOBIN=$(CURDIR)/$(VENV)/deploy/bin go install helm.sh/helm/v3/cmd/helm@$(HELM) && \
		touch $(VENV)/deploy/.$(HELM); }
	@CODEQ_TEST_DEPLOY="$${CODEQ_TEST_DEPLOY:-$(CURDIR)/$(VENV)/deploy/bin}" $(BIN)/python -m pytest -q tests/deploy

.PHONY: test-browser
test-browser: $(VENV)/.dev ## test the console in a real browser (needs chromium)
	@$(BIN)/python -m pytest -q tests/browser

.PHONY: screenshots
screenshots: $(VENV)/.dev ## take the screenshots in docs/images again (needs chromium)
	@$(BIN)/python -m tests.browser.screenshots

.PHONY: check
check: $(VENV)/.dev ## check style, types, import layers, production settings, migrations, generated pages and prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy .
	$(BIN)/lint-imports
	@$(PRODUCTION) $(BIN)/python manage.py check --deploy --fail-level WARNING
	@$(BIN)/python -W "ignore:Got an error checking a consistent migration history" \
		manage.py makemigrations --check --dry-run

	$(BIN)/python docs/generate.py --check
	$(BIN)/python -m tests.spec --check
	$(BIN)/python -m tests.prose --check
	$(BIN)/codespell
	@$(BIN)/python manage.py spectacular --validate --fail-on-warn --file $(VENV)/openapi.yaml
	@diff -u docs/reference/openapi.yaml $(VENV)/openapi.yaml || { \
		echo "docs/reference/openapi.yaml differs from the code. Run \`make docs\` and review the changes." >&2; exit 1; }

# BENCH="--systems celery,codeq-http" measures some systems; `python -m bench.beside --help` lists the other options.
.PHONY: bench
bench: $(VENV)/.dev ## compare codeQ with six other task queues and write docs/reference/performance.md (30 minutes)
	@$(BIN)/python -m bench.beside $(BENCH)

.PHONY: bench-quick
bench-quick: $(VENV)/.dev ## print the same comparison from one short round (3 minutes)
	@$(BIN)/python -m bench.beside --quick $(BENCH)

.PHONY: bench-engine
bench-engine: $(VENV)/.dev ## measure the cost of a task inside Valkey, and the effect of the Bloom filters
	$(BIN)/python -m bench.engine
	$(BIN)/python -m bench.filters

.PHONY: docs
docs: $(VENV)/.dev ## generate the pages of docs/reference that come from the code and the tests
	$(BIN)/python docs/generate.py
	$(BIN)/python -m tests.spec
	$(BIN)/python manage.py spectacular --validate --fail-on-warn --file docs/reference/openapi.yaml

# The settings of a correct deployment, for the deployment checks. No connection is made.
PRODUCTION = env CODEQ_PRODUCTION=true CODEQ_ALLOWED_HOSTS=codeq.example.com \
	REDIS_URL=rediss://valkey.example.com:6379/0 CELERY_BROKER_URL=rediss://broker.example.com:6379/0 \
	DATABASE_URL=postgresql://codeq@postgresql.example.com/codeq?sslmode=verify-full \
	SECRET_KEY=$$($(BIN)/python -c 'import secrets; print(secrets.token_urlsafe(64))')

.PHONY: constraints
constraints: $(VENV)/.python ## write the newest compatible versions to constraints.txt
	rm -rf $(VENV)/fresh && $(PYTHON) -m venv $(VENV)/fresh
	$(VENV)/fresh/bin/python -m pip install -q --disable-pip-version-check -e '.[embedded,pipeline,dev]'
	{ echo "# The versions that were tested together. Written by \`make constraints\`."; \
		$(VENV)/fresh/bin/python -m pip freeze --exclude-editable | grep -v ' @ '; } > constraints.txt
	rm -rf $(VENV)/fresh

# Installed once, and again when the requirements change.
$(VENV)/.run: EXTRAS := embedded,pipeline
$(VENV)/.dev: EXTRAS := embedded,pipeline,dev
$(VENV)/.run $(VENV)/.dev: pyproject.toml constraints.txt $(VENV)/.python
	@echo "Installing codeq-server[$(EXTRAS)] into $(VENV); the first time this takes a minute or two …"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[$(EXTRAS)]' -c constraints.txt
	@touch $@

$(VENV)/.python:
	@if [ -z "$(PYTHON)" ]; then echo "codeQ needs Python 3.11 or newer, and none was found. Install it, or select it" \
		"with make PYTHON=/path/to/python3 run." >&2; exit 1; fi
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "codeQ needs Python 3.11 or newer;" \
		"$(PYTHON) is $$("$(PYTHON)" --version 2>&1)." >&2; exit 1; }
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) has no venv module. Install it" \
		"(on Debian and Ubuntu: apt-get install python3-venv)." >&2; exit 1; }
	@touch $@
