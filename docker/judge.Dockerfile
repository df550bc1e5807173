# The judge over HTTP, in a container of its own: it runs code that a model wrote.
#
#   docker build -f docker/judge.Dockerfile -t rlkernel:judge .
#   openssl rand -hex 32 > token
#   docker run --rm -p 127.0.0.1:8473:8473 -v "$PWD/token:/run/judge-token:ro" rlkernel:judge
#
# For kernels on NVIDIA GPUs: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130, then docker run --gpus all
# with `serve --host 0.0.0.0 --token-file /run/judge-token --device cuda:0` behind the image's name.

FROM python:3.12-slim-bookworm AS wheels
WORKDIR /source
COPY . .
RUN pip install --no-cache-dir --require-hashes --no-deps -r requirements/build.txt \
    && pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . ./backends/triton

FROM python:3.12-slim-bookworm
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Candidates may be Triton or C++: a compiler. bubblewrap is a level of the sandbox.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap g++ \
    && rm -rf /var/lib/apt/lists/*
# Everything but torch, which has an index of its own, and our own wheels by digest: `make lock` writes the file.
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    --mount=type=bind,source=requirements/judge.txt,target=/judge.txt \
    pip install --no-cache-dir --require-hashes --no-deps -r /judge.txt \
    && pip install --no-cache-dir --index-url "$TORCH_INDEX" torch==2.13.0 \
    && pip install --no-cache-dir --no-index --find-links /wheels \
        "$(echo /wheels/rlkernel-*.whl)[cpu,judge]" /wheels/rlkernel_triton-*.whl
# The judge is root here so that candidates are not: it starts them as nobody, who cannot read its token.
EXPOSE 8473
ENTRYPOINT ["rlkernel", "judge"]
CMD ["serve", "--host", "0.0.0.0", "--token-file", "/run/judge-token"]
