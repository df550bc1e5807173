# rlkernel on NVIDIA GPUs: its kernels, PyTorch for CUDA 13, and nvcc, which FlashInfer compiles with.
#
#   docker build -f docker/cuda.Dockerfile -t rlkernel:cuda .
#   docker run --rm --gpus all rlkernel:cuda rlkernel doctor --probe

FROM python:3.12-slim-bookworm AS wheels
WORKDIR /source
COPY . .
RUN pip install --no-cache-dir --require-hashes --no-deps -r requirements/build.txt \
    && pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . ./backends/triton ./backends/cuda

FROM nvidia/cuda:13.2.1-devel-ubuntu24.04
# Triton compiles its launchers at run time: a C compiler and Python's headers.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/rlkernel
ENV PATH=/opt/rlkernel/bin:$PATH
# Everything but our own wheels by digest: `make lock` writes the file.
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    --mount=type=bind,source=requirements/cuda.txt,target=/cuda.txt \
    pip install --no-cache-dir --require-hashes --no-deps -r /cuda.txt \
    && pip install --no-cache-dir --no-index --find-links /wheels \
        "$(echo /wheels/rlkernel-*.whl)[cuda,conformance,bench,judge]"
RUN useradd --create-home --uid 10001 rlkernel
USER 10001
WORKDIR /home/rlkernel
CMD ["rlkernel", "doctor"]
