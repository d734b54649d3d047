# docker build -f difftx/launch/templates/tpu.Dockerfile -t difftx:tpu .
# jax[tpu] includes libtpu. The host provides only the TPU devices.
FROM python:3.12.12-slim-trixie
RUN useradd --uid 1000 --create-home --home-dir /difftx difftx
WORKDIR /difftx
COPY pyproject.toml requirements.txt constraints.txt ./
RUN pip install --no-cache-dir -r requirements.txt --constraint constraints.txt \
    $(python -c "import tomllib; extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; print(*extras['gcs'], *extras['s3'], *extras['tpu'])")
COPY configs configs
COPY difftx difftx
COPY train.py eval.py ./
USER 1000
