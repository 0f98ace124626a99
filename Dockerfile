# One image for every service: `docker run halfmoon run gateway`.
FROM python:3.11-slim

# On a machine without GPU, name PyTorch's CPU build here: it is smaller by gigabytes.
ARG TORCH="torch==2.13.0"
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /app

RUN pip install "${TORCH}"
COPY pyproject.toml README.md LICENSE ./
COPY schemas schemas
COPY tracing tracing
COPY shared shared
COPY services services
RUN pip install ".[torch]" && useradd --create-home halfmoon && mkdir /data && chown halfmoon /data

USER halfmoon
ENV HALFMOON_DATA_DIR=/data
ENTRYPOINT ["halfmoon"]
CMD ["--help"]
