"""The endpoint `/metrics`, which uses several apps."""

from __future__ import annotations

from django.http import HttpResponse

from core import errors, metrics, threadpool
from core.conf import conf
from core.http.api_view import ApiView
from core.http.operation import Operation
from ranked import metrics as _ranked_metrics  # noqa: F401 - registers gauges that a scrape reads
from tenants.auth.authentication import BearerAuthentication
from tenants.domain import CallerRole
from webhooks import metrics as _webhook_metrics  # noqa: F401


class MetricsView(ApiView):
    @Operation(
        "metrics",
        tag="Operations",
        summary="Metrics for Prometheus",
        is_open=True,
        answers={200: "text/plain"},
        errors=(errors.Unauthenticated, errors.Forbidden),
    )
    async def get(self) -> HttpResponse:
        """Return the metrics. No label contains a tenant.

        In production this needs an operator's token (`CODEQ_WEB_METRICS`).
        """
        access = conf().web.metrics
        if access == "operator" or (access == "auto" and conf().production):
            caller = await BearerAuthentication().authenticate_async(self.request.header(b"authorization"))
            if CallerRole.OPERATOR not in caller.roles:
                raise errors.Forbidden("This needs a platform operator's token.")
        metrics.flush()
        return HttpResponse(await threadpool.run_db(metrics.scrape), content_type=metrics.CONTENT_TYPE)
