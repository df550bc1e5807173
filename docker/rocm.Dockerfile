# rlkernel on AMD GPUs: its kernels beside the torch and Triton of AMD's image, which stay as they are.
#
#   docker build -f docker/rocm.Dockerfile -t rlkernel:rocm .
#   docker run --rm --device /dev/kfd --device /dev/dri --group-add video rlkernel:rocm rlkernel doctor --probe

FROM python:3.12-slim-bookworm AS wheels
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . ./backends/triton ./backends/rocm

FROM rocm/pytorch:rocm7.2.3_ubuntu24.04_py3.12_pytorch_release_2.10.0
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# pip is told the torch that is here, so that it fails rather than take another one.
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    pip list --format=freeze | grep -E '^(torch|triton|pytorch-triton)' > /tmp/theirs.txt \
    && pip install --no-cache-dir --find-links /wheels --constraint /tmp/theirs.txt \
        "$(echo /wheels/rlkernel-*.whl)[rocm,conformance,bench]" \
    && rm /tmp/theirs.txt
RUN useradd --create-home --uid 10001 --groups video rlkernel
USER 10001
WORKDIR /home/rlkernel
CMD ["rlkernel", "doctor"]
