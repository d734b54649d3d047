# docker build -f difftx/launch/templates/tpu.Dockerfile -t difftx:tpu .
# jax[tpu] includes libtpu. The host provides only the TPU devices.
FROM python:3.12.12-slim-trixie
RUN useradd --uid 1000 --create-home --home-dir /difftx difftx
WORKDIR /difftx
# Without a vocabulary in the image, each process would download it at each start.
ENV TIKTOKEN_CACHE_DIR=/difftx/vocabularies
COPY pyproject.toml requirements.txt constraints.txt ./
RUN pip install --no-cache-dir -r requirements.txt --constraint constraints.txt \
    $(python -c "import tomllib; extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; print(*extras['gcs'], *extras['s3'], *extras['tpu'])")
RUN python -c "import tiktoken; tiktoken.get_encoding('cl100k_base')" && chown -R 1000 vocabularies
COPY configs configs
COPY difftx difftx
COPY train.py eval.py ./
USER 1000
