"""What the pipeline made of a tenant's history, for the tenant itself."""

from __future__ import annotations

from django.http import HttpResponse

from core import errors, threadpool
from core.http.api_view import ApiView, json_response
from core.http.operation import Operation
from pipeline import selectors
from pipeline.api import wire
from pipeline.models import MARTS
from tenants.permissions import IsProducer
from tenants.tenant import Caller


class InsightsView(ApiView):
    path_schemas = {"mart": {"type": "string", "enum": list(MARTS), "description": "Which table."}}

    @Operation(
        "read_insights",
        tag="Insights",
        summary="Read a mart",
        may=(IsProducer,),
        rate="admin",
        query=wire.InsightsQuery,
        answers={200: wire.Insights},
        errors=(errors.NotFound,),
    )
    async def get(self, caller: Caller, mart: str, query: wire.InsightsQuery) -> HttpResponse:
        """Rows of the tenant, by day and then by what else makes a row one; as fresh as the pipeline's last run, which
        is hourly. Days and hours are UTC. At most 92 days; the last 7 if none are named."""
        if mart not in MARTS:
            raise errors.NotFound(f"There is no mart of that name: there are {', '.join(MARTS)}.")
        days = selectors.days(query.from_, query.to)
        page = await threadpool.run_db(
            selectors.page,
            MARTS[mart],
            caller.tenant.tid,
            days,
            command=query.command,
            cursor=query.cursor,
            limit=query.limit,
        )
        return json_response(wire.insights(mart, page))
