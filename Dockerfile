# Two images with one wheel: `docker build --target server .` (the default) for web, the Celery worker and beat, and
# `docker build --target pipeline .` for the Celery worker that runs the pipeline: it adds Spark and Java.
#
# A container runs one process, as the user 10001. It writes only to /var/lib/codeq and /tmp. docker-compose.yml and
# deploy/helm start the processes; docs/howto/production.md lists them.
FROM python:3.11-slim AS build
WORKDIR /src
RUN python -m venv /opt/codeq
ENV PATH=/opt/codeq/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# The dependencies have a layer of their own, which a change of the code leaves in the cache.
COPY pyproject.toml constraints.txt deploy/requirements.py ./
RUN python requirements.py s3 tracing > requirements.txt && pip install -r requirements.txt -c constraints.txt
COPY . .
RUN pip wheel --no-deps --wheel-dir /wheels . && pip install --no-deps /wheels/*.whl

FROM build AS build-pipeline
RUN python deploy/requirements.py pipeline > requirements.txt && pip install -r requirements.txt -c constraints.txt

FROM python:3.11-slim AS base
# The number, not the name, is in USER: Kubernetes cannot check a name for `runAsNonRoot`. Spark needs the name.
RUN useradd --uid 10001 --create-home --home-dir /var/lib/codeq codeq
ENV PATH=/opt/codeq/bin:$PATH CODEQ_HOME=/var/lib/codeq CODEQ_WEB_HOST=0.0.0.0 \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /var/lib/codeq
USER 10001:10001
VOLUME /var/lib/codeq
EXPOSE 8080
CMD ["python", "-m", "codeq_site.web"]

FROM base AS pipeline
COPY --from=build-pipeline /opt/codeq /opt/codeq

FROM base AS server
COPY --from=build /opt/codeq /opt/codeq
