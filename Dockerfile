# Service and indexer; weights other than care-mini are mounted. Runs as an unprivileged user.
#   docker build --tag care-retrieval .
#   docker run --rm -v care-indexes:/indexes -v care-builds:/builds -v /data/mine:/corpus:ro \
#     care-retrieval care index /corpus --index mine
#   docker run --rm -v care-indexes:/indexes:ro -p 127.0.0.1:8000:8000 -e CARE_INDEX=mine care-retrieval
#
# Targets: service (the default: for processors, with the embedded pair, without torch), service-gpu (CUDA,
# TensorRT), indexer-gpu (vLLM). CUDA's libraries are Python packages, so that all have the same base; the
# machine needs NVIDIA's driver (580 or newer) and container toolkit. deploy/README.md has their commands.
#
# BASE_IMAGE: any Debian image with Python 3.11 or newer, with venv and pip, as `python`.
# A pip configuration file, for a package mirror: --secret id=pip,src=pip.conf
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS source
WORKDIR /src
COPY . .
RUN python -m venv /opt/care

# EXTRAS: with milvus for an index in Milvus.
FROM source AS build
ARG EXTRAS=files,jwt,rerank,tracing
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/care/bin/pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]"

# GPU_PACKAGES: what the service needs beside the builds for GPUs; empty without TensorRT.
FROM source AS build-gpu
ARG GPU_PACKAGES=tensorrt-cu13
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/care/bin/python care/gpu_builds.py --no-cache-dir -c constraints.txt ${GPU_PACKAGES} \
    && /opt/care/bin/pip install --no-cache-dir -c constraints.txt '.[files,jwt,rerank,tracing]'

# EXTRAS: with distributed to encode on several pods by Ray.
FROM source AS build-vllm
ARG EXTRAS=vllm
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/care/bin/python care/gpu_builds.py --no-cache-dir -c constraints-vllm.txt \
    && /opt/care/bin/pip install --no-cache-dir -c constraints-vllm.txt ".[${EXTRAS}]"

FROM ${BASE_IMAGE} AS base
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 care \
    && mkdir /indexes /builds /pairs /cache && chown care /indexes /builds /cache
COPY data/sample /data/sample
ENV PATH=/opt/care/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    CARE_HOST=0.0.0.0 \
    CARE_INDEXES=/indexes \
    CARE_BUILDS=/builds \
    CARE_PAIRS=/pairs
WORKDIR /home/care
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import os, http.client as h; port = os.environ.get('CARE_PORT', ''); c = h.HTTPConnection('127.0.0.1', int(port) if port.isdecimal() else 8000, timeout=4); c.request('GET', '/health/ready'); exit(c.getresponse().status != 200)"]
CMD ["care", "serve"]

# What NVIDIA's container toolkit makes available in the container.
FROM base AS gpu
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM gpu AS service-gpu
COPY --from=build-gpu /opt/care /opt/care
ENV CARE_PROVIDER=cuda \
    CARE_TENSORRT_CACHE=/cache/tensorrt
USER 10001

# Triton compiles the launchers of its kernels with a C compiler and Python's headers; Inductor and FlashInfer call g++.
FROM gpu AS indexer-gpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libpython3-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build-vllm /opt/care /opt/care
ENV HF_HOME=/builds/huggingface
HEALTHCHECK NONE
USER 10001
CMD ["care", "index", "--help"]

FROM base AS service
COPY --from=build /opt/care /opt/care
USER 10001
