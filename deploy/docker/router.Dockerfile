# The router with its dependencies (tracing, Redis, PostgreSQL), without vLLM or torch. From the repository's root:
#
#     docker build --file deploy/docker/router.Dockerfile --tag vllm-sched/router:0.1.0 .
#
# pip compiles the hot modules to machine code (docs/adr/0014-compiled-modules.md): three minutes, and 7 MB in the image.
# `--build-arg COMPILED=0` builds plain modules; VLLM_SCHED_COMPILED=0 has a container use plain modules.
FROM python:3.12.12-slim-bookworm AS build
ARG COMPILED=1
WORKDIR /source
RUN python -m venv /opt/venv
RUN if [ "$COMPILED" = 1 ]; then apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev; fi
COPY pyproject.toml README.md LICENSE ./
COPY proxy proxy
COPY vllm_sched vllm_sched
RUN VLLM_SCHED_COMPILED="$COMPILED" /opt/venv/bin/pip install --no-cache-dir --no-compile '.[otel,redis,postgres]'
# Fails if pip could not compile and installed plain modules.
RUN if [ "$COMPILED" = 1 ]; then /opt/venv/bin/vllm-sched compile; fi

FROM python:3.12.12-slim-bookworm
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin router
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 8000
# /health, not /ready: a router without workers is healthy.
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s CMD \
    ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
# SIGTERM drains for up to router.drain_s; `docker stop` needs a longer timeout.
STOPSIGNAL SIGTERM
ENTRYPOINT ["vllm-sched"]
CMD ["router", "/etc/vllm-sched/fleet.yaml"]
