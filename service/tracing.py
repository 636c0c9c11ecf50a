"""OpenTelemetry traces, when `OTEL_EXPORTER_OTLP_ENDPOINT` asks for them."""

import os
import time
from collections.abc import Mapping

from core.errors import CareError

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Tracer:
    """Makes a span for each request, and under it one for each stage.

    Spans are made when the request has ended, from the times that it took anyway: what is
    not traced costs nothing. Stages are laid end to end from the request's start. Where
    traces go, and how many, is said by the `OTEL_*` variables of OpenTelemetry.
    """

    def __init__(self) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            need = "OpenTelemetry is not installed: pip install 'care-retrieval[tracing]'"
            message = f"{ENDPOINT} is set and {need}"
            raise CareError(message, code="missing_package") from error
        name = os.environ.get("OTEL_SERVICE_NAME", "care-retrieval")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("care.service")
        self._propagator = TraceContextTextMapPropagator()

    def record(
        self,
        route: str,
        status: int,
        headers: Mapping[str, str],
        seconds: float,
        stages: Mapping[str, float],
        request_id: str,
    ) -> None:
        """Makes the spans of a request that has just ended after `seconds`.

        The route is the template, never the path that was asked for; `traceparent` among the
        headers becomes the parent; the times of the stages are in their order [ms].
        """
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        end = time.time_ns()
        start = end - round(seconds * 1e9)
        span = self._tracer.start_span(
            route,
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes={
                "http.route": route,
                "http.response.status_code": status,
                "care.request_id": request_id,
            },
            start_time=start,
        )
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        inside = set_span_in_context(span)
        for stage, spent in stages.items():
            child = self._tracer.start_span(stage, context=inside, start_time=start)
            start += round(spent * 1e6)
            child.end(start)
        span.end(end)

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


def make_tracer() -> Tracer | None:
    """Returns a tracer if the environment asks for traces; without OpenTelemetry `CareError`."""
    return Tracer() if os.environ.get(ENDPOINT) else None
