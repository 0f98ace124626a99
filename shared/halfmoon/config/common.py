"""Settings that every service has."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta


def _default_data_dir() -> Path:
    return Path.home() / ".local" / "share" / "halfmoon"


class CommonConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each field is the variable `HALFMOON_<FIELD>`, or `HALFMOON_<SERVICE>_<FIELD>` for one service only."""

    nats_url: Annotated[str, Meta(description="NATS server, with JetStream.")] = "nats://127.0.0.1:4222"
    nats_user: Annotated[str | None, Meta(description="User name for NATS.")] = None
    nats_password: Annotated[str | None, Meta(description="Password for NATS. Secret: never logged.")] = None
    nats_credentials: Annotated[Path | None, Meta(description="NATS credentials file (JWT and seed).")] = None
    nats_connect_timeout_s: Annotated[
        float, Meta(description="How long to try to reach NATS at start before giving up.", gt=0)
    ] = 10.0
    worker_id: Annotated[
        str | None, Meta(description="Name of this process in the cluster. None: service, host name and process id.")
    ] = None
    model: Annotated[Path | None, Meta(description="Model: a Hugging Face folder, or a GGUF file.")] = None
    model_name: Annotated[str | None, Meta(description="Name that users ask for. None: the folder's name.")] = None
    chunk_tokens: Annotated[
        int, Meta(description="Tokens per chunk of KV: one value for the whole deployment.", ge=1, le=4096)
    ] = 256
    data_dir: Annotated[
        Path, Meta(description="Where local files go: models, traces, and the embedded servers' data.")
    ] = msgspec.field(default_factory=_default_data_dir)
    drain_timeout_s: Annotated[
        float, Meta(description="At a stop: how long running work may take to finish before it is cut off.", ge=0)
    ] = 30.0
    log_level: Annotated[str, Meta(description="`debug`, `info`, `warning` or `error`.")] = "info"
    log_format: Annotated[str, Meta(description="`json`, or `console` for people.")] = "json"
    otlp_endpoint: Annotated[
        str | None,
        Meta(description="OTLP/HTTP collector, such as `http://127.0.0.1:4318`. None: local store only."),
    ] = None
    trace_sample_ratio: Annotated[float, Meta(description="Share of requests that are traced.", ge=0, le=1)] = 1.0
    metrics_host: Annotated[str, Meta(description="Where Prometheus metrics are served.")] = "127.0.0.1"
    metrics_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(description="Port of `/metrics`; 0 takes a free one, None serves none."),
    ] = None
    cluster_secret: Annotated[
        str | None,
        Meta(description="Shared by all nodes; a peer must know it to read KV over tcp. Secret: never logged."),
    ] = None
