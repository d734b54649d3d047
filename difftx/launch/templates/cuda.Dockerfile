# docker build -f difftx/launch/templates/cuda.Dockerfile -t difftx:cuda .
# jax[cuda13] includes CUDA, cuDNN and NCCL. The host provides the driver (580 or newer) and NVIDIA's container runtime.
FROM python:3.12.12-slim-trixie
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# GKE mounts the driver here.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64
RUN useradd --uid 1000 --create-home --home-dir /difftx difftx
WORKDIR /difftx
COPY pyproject.toml requirements.txt constraints.txt ./
RUN pip install --no-cache-dir -r requirements.txt --constraint constraints.txt \
    $(python -c "import tomllib; extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; print(*extras['gcs'], *extras['s3'], *extras['cuda'])")
COPY configs configs
COPY difftx difftx
COPY train.py eval.py ./
USER 1000
