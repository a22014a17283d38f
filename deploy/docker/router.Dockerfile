# The router: Python and what it imports (what traces take too), no vLLM, no torch. From the repository's root:
#
#     docker build --file deploy/docker/router.Dockerfile --tag vllm-sched/router:0.1.0 .
#
# pip compiles its hot modules to machine code (docs/adr/0014-compiled-modules.md): three minutes, and 7 MB in the image.
# With `--build-arg COMPILED=0` they are plain; with VLLM_SCHED_COMPILED=0 a container takes the plain ones.
FROM python:3.12.12-slim-bookworm AS build
ARG COMPILED=1
WORKDIR /source
RUN python -m venv /opt/venv
RUN if [ "$COMPILED" = 1 ]; then apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev; fi
COPY pyproject.toml README.md LICENSE ./
COPY proxy proxy
COPY vllm_sched vllm_sched
RUN VLLM_SCHED_COMPILED="$COMPILED" /opt/venv/bin/pip install --no-cache-dir --no-compile '.[otel]'
# Fails where pip could not compile and installed plain modules.
RUN if [ "$COMPILED" = 1 ]; then /opt/venv/bin/vllm-sched compile; fi

FROM python:3.12.12-slim-bookworm
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin router
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 8000
# Alive, not ready: a router without workers is no broken one.
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s CMD \
    ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
# SIGTERM drains for as long as the fleet file's drain_s says: give `docker stop` more than that.
STOPSIGNAL SIGTERM
ENTRYPOINT ["vllm-sched"]
CMD ["router", "/etc/vllm-sched/fleet.yaml"]
