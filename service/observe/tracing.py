"""OpenTelemetry traces, enabled by `OTEL_EXPORTER_OTLP_ENDPOINT`."""

import os
import time
from collections.abc import Mapping

from core.errors import CareError
from core.loopback import is_local

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Tracer:
    """Creates a span for each request, with a child span for each stage.

    Spans are created when a request has ended, from times that are measured anyway, so requests
    that are not sampled cost nothing. Stages follow each other from the start of the request. The
    `OTEL_*` variables of OpenTelemetry set destination and sampling. CareError if OpenTelemetry is
    not installed.
    """

    def __init__(self) -> None:
        try:
            import requests
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            need = "OpenTelemetry is not installed: pip install 'care-retrieval[tracing]'"
            message = f"{ENDPOINT} is set, but {need}"
            raise CareError(message, code="missing_package") from error
        name = os.environ.get("OTEL_SERVICE_NAME", "care-retrieval")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}))
        session = requests.Session()
        address = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ[ENDPOINT]
        session.trust_env = not is_local(address)
        exporter = OTLPSpanExporter(session=session)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
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
        """Creates the spans of a request that has just ended.

        `route` is the path template, as the path itself may contain query text; the header
        `traceparent` names the parent span. The request took `seconds` [s], its stages, in order,
        the times in `stages` [ms].
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
        """Sends the remaining spans and stops."""
        self._provider.shutdown()


def make_tracer() -> Tracer | None:
    """Returns a tracer if the environment variable is set."""
    return Tracer() if os.environ.get(ENDPOINT) else None
