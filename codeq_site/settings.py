"""Django's settings. codeQ's own are the values in `CODEQ`, which core/conf.py validates."""

from __future__ import annotations

from pathlib import Path

import dj_database_url

from codeq_site import env
from codeq_site.beat_schedule import PERIODIC_TASKS  # noqa: F401 - a setting that the apps read
from core.conf import build

BASE_DIR = Path(__file__).resolve().parent.parent

CODEQ = env.read()
_conf = build(CODEQ)

DEBUG = False
# Before `manage.py up` has created a key, other commands use this one. checks.py refuses it in production.
SECRET_KEY = _conf.secret_key or "insecure-development-key-of-codeq"
SECRET_KEY_FALLBACKS = _conf.secret_key_fallbacks
ALLOWED_HOSTS = _conf.allowed_hosts
USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en"
USE_I18N = False
# One format for dates and times on all pages. Django reads formats from a language's module, not from the settings.
FORMAT_MODULE_PATH = ["codeq_site.formats"]

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
    "console",
    "tenants",
    "queues",
    "ranked",
    "webhooks",
    "pipeline",
]

# The middleware of the console. API requests do not pass through it (core/http/router.py).
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "core.admin.content_security_policy.ContentSecurityPolicyMiddleware",
    "core.admin.bad_query.BadQueryMiddleware",
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
# A frozen server or a network that drops packets must not block a thread forever. Options in the URL take precedence.
DATABASES["default"]["OPTIONS"] = {
    "connect_timeout": 5, "tcp_user_timeout": 30_000,
    "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3,
    **DATABASES["default"].get("OPTIONS", {}),
}  # fmt: skip
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# The cache uses the broker's Redis if there is one, else that of the queues. It never uses a cluster node, which has
# only part of the keys.
_cache_urls = [
    url
    for url in (_conf.broker_url, "" if _conf.redis_cluster else _conf.redis_url, "redis://127.0.0.1:6379/1")
    if url.startswith(("redis://", "rediss://", "unix://"))
]
CACHES = {
    "default": {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": _cache_urls[0],
        "KEY_PREFIX": "codeq-cache",
        # A frozen Redis must not block every login.
        "OPTIONS": {"SOCKET_CONNECT_TIMEOUT": 2, "SOCKET_TIMEOUT": 2},
    }
}

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 12}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]

LOGIN_URL = "/admin/login/"
LOGIN_REDIRECT_URL = "/admin/"

STATIC_URL = "/static/"
# Static files are served from the packages, without a `collectstatic` step.
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
    "EXCEPTION_HANDLER": "core.problem_details.exception_handler",
}

# The API's authentication and rate limiter, by dotted path because core.http must not import the apps.
API_AUTHENTICATION = "tenants.auth.authentication.BearerAuthentication"
API_RATE_LIMITER = "queues.services.admit"

# The console's theme.
_mark = f"{STATIC_URL}console/mark.svg"
UNFOLD = {
    "LOGIN": {"form": "core.admin.login_throttle.LoginForm"},
    "SITE_TITLE": "codeQ",
    "SITE_HEADER": "codeQ",
    "SITE_SUBHEADER": "Console",
    "SITE_ICON": _mark,
    "SITE_FAVICONS": [{"rel": "icon", "type": "image/svg+xml", "href": _mark}],
    "SITE_URL": None,
    "STYLES": [f"{STATIC_URL}console/console.css"],
    "SHOW_HISTORY": True,
    "SHOW_VIEW_ON_SITE": False,
    "SHOW_BACK_BUTTON": True,
    "SIDEBAR": {"show_search": True, "navigation": "console.navigation.sidebar"},
    "COLORS": {
        "primary": {
            "50": "oklch(96.2% .018 272.3)",
            "100": "oklch(93% .034 272.8)",
            "200": "oklch(87% .065 274)",
            "300": "oklch(78.5% .115 274.7)",
            "400": "oklch(67.3% .182 276.9)",
            "500": "oklch(58.5% .233 277.1)",
            "600": "oklch(51.1% .262 277)",
            "700": "oklch(45.7% .24 277)",
            "800": "oklch(39.8% .195 277.4)",
            "900": "oklch(35.9% .144 278.7)",
            "950": "oklch(25.7% .09 281.3)",
        },
    },
}

SPECTACULAR_SETTINGS = {
    "TITLE": "codeQ",
    "VERSION": "1",
    "OAS_VERSION": "3.1.1",
    "SERVE_INCLUDE_SCHEMA": False,
    # The structs name their enums. drf-spectacular's default hook would rename them.
    "POSTPROCESSING_HOOKS": [],
    "DESCRIPTION": (
        "Task queues for many tenants: leases, retries, delays, dead letters and webhooks. To try a call here, press "
        "Authorize and paste a token: `manage.py token --tenant demo --role producer` prints one. The headings "
        "Producer, Worker and Admin are the roles of tokens."
    ),
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "REDOC_DIST": "SIDECAR",
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {
        "request": {"()": "core.request_id.RequestIdFilter"},
        "client_errors": {"()": "core.logging.ClientErrorFilter"},
    },
    "formatters": {
        "text": {"format": "%(asctime)s %(levelname)-7s %(name)s [%(request_id)s] %(message)s"},
        "json": {"()": "core.logging.JsonFormatter"},
    },
    "handlers": {
        "stderr": {
            "class": "logging.StreamHandler",
            "formatter": _conf.log_format,
            "filters": ["request", "client_errors"],
        },
    },
    "root": {"handlers": ["stderr"], "level": _conf.log_level},
    "loggers": {"django.request": {"level": "ERROR"}},
}
