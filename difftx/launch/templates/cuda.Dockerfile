# docker build -f difftx/launch/templates/cuda.Dockerfile -t difftx:cuda .
# jax[cuda13] includes CUDA, cuDNN and NCCL. The host provides the driver (580 or newer) and NVIDIA's container runtime.
FROM python:3.12.12-slim-trixie
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# GKE mounts the driver here.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64
RUN useradd --uid 1000 --create-home --home-dir /difftx difftx
WORKDIR /difftx
# Without a vocabulary in the image, each process would download it at each start.
ENV TIKTOKEN_CACHE_DIR=/difftx/vocabularies
COPY pyproject.toml requirements.txt constraints.txt ./
RUN pip install --no-cache-dir -r requirements.txt --constraint constraints.txt \
    $(python -c "import tomllib; extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; print(*extras['gcs'], *extras['s3'], *extras['cuda'])")
RUN python -c "import tiktoken; tiktoken.get_encoding('cl100k_base')" && chown -R 1000 vocabularies
COPY configs configs
COPY difftx difftx
COPY train.py eval.py ./
USER 1000
