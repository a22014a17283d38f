# A worker: vLLM's image with vllm-sched. From the repository's root:
#
#     docker build --file deploy/docker/worker.Dockerfile --tag vllm-sched/worker:0.1.0-vllm0.32.0 .
FROM python:3.12.12-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY proxy proxy
COPY vllm_sched vllm_sched
# Plain modules: an engine runs no router code, and the final image may have another Python.
RUN VLLM_SCHED_COMPILED=0 pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM vllm/vllm-openai:v0.32.0
# The wheel requires neither vLLM nor torch, so both stay as they are. NIXL transfers KV caches between
# prefill and decode workers; the image may already have it.
COPY --from=build /wheels /tmp/wheels
RUN python3 -m pip install --no-cache-dir /tmp/wheels/*.whl \
    && { python3 -c 'import nixl' || python3 -m pip install --no-cache-dir 'nixl>=1.5,<2'; } \
    && vllm-sched --version \
    && rm -r /tmp/wheels
# torch needs a user name.
RUN getent passwd 2000 || useradd --uid 2000 --create-home --home-dir /home/vllm vllm
ENV HOME=/home/vllm \
    HF_HOME=/models \
    USER=vllm
RUN mkdir --parents /models /home/vllm && chown 2000:2000 /models /home/vllm
USER 2000:2000
EXPOSE 8000
STOPSIGNAL SIGTERM
ENTRYPOINT ["vllm-sched"]
CMD ["serve", "--help"]
