# rlkernel on AMD GPUs: its kernels beside the torch and Triton of AMD's image, which stay as they are.
#
#   docker build -f docker/rocm.Dockerfile -t rlkernel:rocm .
#   docker run --rm --device /dev/kfd --device /dev/dri --group-add video rlkernel:rocm rlkernel doctor --probe

FROM python:3.12-slim-bookworm AS wheels
WORKDIR /source
COPY . .
RUN pip install --no-cache-dir --require-hashes --no-deps -r requirements/build.txt \
    && pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels . ./backends/triton ./backends/rocm

FROM rocm/pytorch:rocm7.2.3_ubuntu24.04_py3.12_pytorch_release_2.10.0
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Everything but our own wheels by digest: `make lock` writes the file. Their torch, Triton and NumPy are not in it and stay;
# without an index pip fails rather than fetch another.
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    --mount=type=bind,source=requirements/rocm.txt,target=/rocm.txt \
    pip install --no-cache-dir --require-hashes --no-deps -r /rocm.txt \
    && pip install --no-cache-dir --no-index --find-links /wheels \
        "$(echo /wheels/rlkernel-*.whl)[rocm,conformance,bench]"
RUN useradd --create-home --uid 10001 --groups video rlkernel
USER 10001
WORKDIR /home/rlkernel
CMD ["rlkernel", "doctor"]
