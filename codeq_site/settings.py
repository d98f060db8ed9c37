"""Django's settings: plain values. What codeQ itself reads is `CODEQ`, typed by `conf.py`."""

from __future__ import annotations

from pathlib import Path

import dj_database_url

from codeq_site import env
from codeq_site.conf import build

BASE_DIR = Path(__file__).resolve().parent.parent

CODEQ = env.read()
_conf = build(CODEQ)

DEBUG = False
# Outside production a fixed key keeps `manage.py` usable before `up` has made one; checks.py refuses it there.
SECRET_KEY = _conf.secret_key or "insecure-development-key-of-codeq"
ALLOWED_HOSTS = _conf.allowed_hosts
USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en"
USE_I18N = False

INSTALLED_APPS = [
    "unfold",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "codeq_site",
    "tenants",
    "queues",
    "webhooks",
    "pipeline",
]

# The console's middleware. The API's lean handler has its own, in asgi.py.
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "codeq_site.urls"
ASGI_APPLICATION = "codeq_site.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

DATABASES = {
    "default": dj_database_url.parse(
        _conf.database_url or "postgres://postgres@127.0.0.1:5432/codeq",
        conn_max_age=60,
        conn_health_checks=True,
    )
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# The broker's server rather than the hot path's, where Celery's broker is a Redis at all.
_cache_urls = [
    url
    for url in (_conf.broker_url, _conf.redis_url, "redis://127.0.0.1:6379/1")
    if url.startswith(("redis://", "rediss://", "unix://"))
]
CACHES = {
    "default": {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": _cache_urls[0],
        "KEY_PREFIX": "codeq-cache",
    }
}

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 12}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]

STATIC_URL = "/static/"
# Static files are served from the packages themselves, so that no `collectstatic` step can be forgotten.
WHITENOISE_USE_FINDERS = True
WHITENOISE_AUTOREFRESH = False

SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
CSRF_COOKIE_SAMESITE = "Lax"
if _conf.production:
    SECURE_SSL_REDIRECT = True
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
    SECURE_HSTS_SECONDS = 31_536_000
    SECURE_HSTS_INCLUDE_SUBDOMAINS = True
    SECURE_HSTS_PRELOAD = True
    SESSION_COOKIE_SECURE = True
    CSRF_COOKIE_SECURE = True

REST_FRAMEWORK = {
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "UNAUTHENTICATED_USER": None,
    "EXCEPTION_HANDLER": "codeq_site.problem.exception_handler",
}

SPECTACULAR_SETTINGS = {
    "TITLE": "codeQ",
    "VERSION": "1",
    "OAS_VERSION": "3.1.1",
    "SERVE_INCLUDE_SCHEMA": False,
    # The structs name their enums; the stock hook would rename them.
    "POSTPROCESSING_HOOKS": [],
    "DESCRIPTION": "Task queues for many tenants: leases, retries, delays, dead letters and webhooks.",
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "REDOC_DIST": "SIDECAR",
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"text": {"format": "%(asctime)s %(levelname)-7s %(name)s %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "text"}},
    "root": {"handlers": ["stderr"], "level": _conf.log_level},
    "loggers": {"django.request": {"level": "ERROR"}},
}
