"""The API view that returns a tenant's rows of a mart."""

from __future__ import annotations

from django.http import HttpResponse

from core import errors, threadpool
from core.http.api_view import ApiView, json_response
from core.http.operation import Operation
from pipeline import selectors
from pipeline.api import schemas
from pipeline.models import MARTS
from tenants.domain import Caller
from tenants.permissions import IsProducer


class InsightsView(ApiView):
    path_schemas = {"mart": {"type": "string", "enum": list(MARTS), "description": "Name of the mart."}}

    @Operation(
        "read_insights",
        tag="Insights",
        summary="Read a mart",
        permission_classes=(IsProducer,),
        rate="admin",
        query=schemas.InsightsQuery,
        answers={200: schemas.Insights},
        errors=(errors.NotFound,),
    )
    async def get(self, caller: Caller, mart: str, query: schemas.InsightsQuery) -> HttpResponse:
        """Returns the tenant's rows, ordered by day and then by the rest of the mart's key.

        The pipeline updates the marts once an hour. Days and hours are UTC. The period is at most 92 days; the
        default is the last 7 days.
        """
        if mart not in MARTS:
            raise errors.NotFound(f"No such mart. Available marts: {', '.join(MARTS)}.")
        period = selectors.parse_period(query.from_, query.to)
        page = await threadpool.run_db(
            selectors.read_page,
            MARTS[mart],
            caller.tenant.tid,
            period,
            command=query.command,
            cursor=query.cursor,
            limit=query.limit,
        )
        return json_response(schemas.build_insights(mart, page))
