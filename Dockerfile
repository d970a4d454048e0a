# syntax=docker/dockerfile:1
# Tessera with Ray and CUDA libraries. Two stages: what builds does not stay.
#   docker build -t tessera:0.1.0 .
#   docker build -t tessera:0.1.0 $(deploy/pin_images.sh) .        # the bases of this moment, by digest
#   docker build -t tessera:0.1.0-cpu --build-arg BASE=ubuntu:24.04 --build-arg EXTRAS= \
#     --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
# Torch brings its own CUDA libraries; the base brings the driver's interface and the variables that
# NVIDIA's container runtime looks for.
ARG BASE=nvidia/cuda:13.0.0-runtime-ubuntu24.04
ARG BUILD_BASE=ubuntu:24.04

FROM ${BUILD_BASE} AS build
ARG EXTRAS=cuda
# Where torch comes from first; empty for the package index, whose torch needs CUDA.
ARG TORCH_INDEX=
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3.12 python3.12-venv python3.12-dev build-essential \
 && rm -rf /var/lib/apt/lists/*
RUN python3.12 -m venv /opt/tessera
ENV PATH=/opt/tessera/bin:$PATH
WORKDIR /src
COPY pyproject.toml README.md LICENSE deploy/requirements.lock ./
COPY attention attention
COPY workers workers
COPY service service
# The image for GPUs holds what the lock file names, hash by hash. Others take its versions, without hashes: torch then
# comes from an index of its own, whose files the lock does not know.
RUN if [ "$EXTRAS" = cuda ] && [ -z "$TORCH_INDEX" ]; then \
      pip install --require-hashes --no-deps --only-binary :all: -r requirements.lock \
   && pip install --no-deps --no-build-isolation .; \
    else \
      sed -n 's/^\([^ ]*==[^ ;]*\).*/\1/p' requirements.lock > versions.txt \
   && if [ -n "$TORCH_INDEX" ]; then pip install "$(grep '^torch==' versions.txt)" --index-url "$TORCH_INDEX"; fi \
   && pip install --constraint versions.txt ".[tracing${EXTRAS:+,$EXTRAS}]"; \
    fi \
 && find /opt/tessera -name '__pycache__' -prune -exec rm -rf {} + \
 && python -m compileall -q /opt/tessera/lib

FROM ${BASE} AS final
ARG EXTRAS=cuda
ENV DEBIAN_FRONTEND=noninteractive
# gcc, libc6-dev and Python's headers are no leftovers: Triton compiles a launcher in C for every kernel
# signature it meets, at run time, and the CUDA engine's layers are Triton kernels. The image without the
# cuda extra has none of them. KubeRay starts containers with bash, which the base has.
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3.12 ca-certificates tini \
 && if [ -n "$EXTRAS" ]; then \
      apt-get install -y --no-install-recommends gcc libc6-dev libpython3.12-dev; \
    fi \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 tessera \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/cache/tessera --shell /usr/sbin/nologin tessera \
 && install -d -o 10001 -g 10001 /var/cache/tessera /models
COPY --from=build /opt/tessera /opt/tessera
ENV PATH=/opt/tessera/bin:$PATH \
    HOME=/var/cache/tessera \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    RAY_USAGE_STATS_ENABLED=0
USER 10001:10001
WORKDIR /var/cache/tessera
# HTTP, gRPC, metrics. They listen on loopback until told otherwise.
EXPOSE 8000 9000 9400
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/bin/tini", "--", "tessera"]
CMD ["serve"]
