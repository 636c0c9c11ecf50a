# The online plane with the embedded pair. The index is mounted at /indexes, or built there by
#   docker run --rm -v care-indexes:/indexes IMAGE python -m indexer build --corpus … --index …
FROM python:3.11-slim AS build
WORKDIR /src
COPY . .
RUN python -m venv /opt/care \
    && /opt/care/bin/pip install --no-cache-dir -c constraints.txt '.[tracing]'

FROM python:3.11-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 care \
    && mkdir /indexes /builds && chown care /indexes /builds
COPY --from=build /opt/care /opt/care
COPY data/sample /data/sample
ENV PATH=/opt/care/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    CARE_HOST=0.0.0.0 \
    CARE_INDEXES=/indexes
WORKDIR /home/care
USER 10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ.get('CARE_PORT', '8000')}/health/ready\", timeout=4)"]
CMD ["python", "-m", "service"]
