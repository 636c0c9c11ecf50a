# Service and indexer with the embedded pair, without torch; runs as an unprivileged user.
#   docker build --tag care-retrieval .
#   docker run --rm -v care-indexes:/indexes -v care-builds:/builds -v /data/mine:/corpus:ro \
#     care-retrieval care index /corpus --index mine
#   docker run --rm -v care-indexes:/indexes:ro -p 127.0.0.1:8000:8000 -e CARE_INDEX=mine care-retrieval
#
# BASE_IMAGE: any Debian image with Python 3.11 or newer, with venv and pip, as `python`.
# A pip configuration file, for a package mirror: --secret id=pip,src=pip.conf
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS build
WORKDIR /src
COPY . .
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python -m venv /opt/care \
    && /opt/care/bin/pip install --no-cache-dir -c constraints.txt '.[tracing]'

FROM ${BASE_IMAGE}
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
    CARE_INDEXES=/indexes \
    CARE_BUILDS=/builds
WORKDIR /home/care
USER 10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ.get('CARE_PORT', '8000')}/health/ready\", timeout=4)"]
CMD ["care", "serve"]
