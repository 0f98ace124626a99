"""Settings of the registry."""

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta

from halfmoon.config import CommonConfig

DEFAULT_ETCD_PORT = 2379


class RegistryConfig(CommonConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each field is the variable `HALFMOON_REGISTRY_<FIELD>`."""

    etcd_url: Annotated[
        str, Meta(description="etcd, as `http://host:port` or `https://host:port`; several with commas between.")
    ] = f"http://127.0.0.1:{DEFAULT_ETCD_PORT}"
    etcd_user: Annotated[str | None, Meta(description="User name for etcd.")] = None
    etcd_password: Annotated[str | None, Meta(description="Password for etcd. Secret: never logged.")] = None
    etcd_ca: Annotated[
        Path | None, Meta(description="PEM file of the authority that signed etcd's certificate. None: the system's.")
    ] = None
    etcd_cert: Annotated[Path | None, Meta(description="PEM file of the client certificate shown to etcd.")] = None
    etcd_key: Annotated[Path | None, Meta(description="PEM file of that certificate's private key.")] = None
    etcd_connect_timeout_s: Annotated[
        float, Meta(description="How long to try to reach etcd at start before giving up.", gt=0)
    ] = 10.0
    etcd_timeout_s: Annotated[float, Meta(description="How long one write to etcd may take.", gt=0)] = 2.0
    etcd_max_txn_ops: Annotated[
        int, Meta(description="Operations per etcd transaction; etcd's own `--max-txn-ops` must allow it.", ge=8)
    ] = 1024
    key_prefix: Annotated[
        str, Meta(description="Prefix of all keys in etcd; one per deployment that shares an etcd.", min_length=1)
    ] = "/halfmoon"
    lookup_timeout_s: Annotated[
        float, Meta(description="How long a lookup or a snapshot page may wait for etcd.", gt=0)
    ] = 1.0
    leader_ttl_s: Annotated[
        int, Meta(description="A leader that is silent for this long is replaced.", ge=2, le=60)
    ] = 5
    member_ttl_s: Annotated[
        int,
        Meta(description="How long a member stays listed without a heartbeat when nobody leads.", ge=2, le=60),
    ] = 5
    forget_node_after_s: Annotated[
        float,
        Meta(description="How long the placements of a lost node are kept (and hidden), should it come back.", ge=0),
    ] = 60.0
    reconcile_every_s: Annotated[
        float, Meta(description="How often what etcd says of a node is compared with the node's inventory.", gt=0)
    ] = 600.0
    orders_timeout_s: Annotated[
        float, Meta(description="How long a node may take to carry out a pin or a flush.", gt=0)
    ] = 5.0
    max_pins: Annotated[int, Meta(description="Chunks that may be pinned at a time.", ge=0, le=100_000)] = 10_000
    flush_lifetime_s: Annotated[
        float,
        Meta(
            description="A node with an SSD tier that was away for longer, and missed a flush, drops all it has there.",
            gt=0,
        ),
    ] = 30 * 86_400.0
    unheard_node_grace_s: Annotated[
        float, Meta(description="How long a node that has placements may take until its first heartbeat.", gt=0)
    ] = 10.0


def etcd_endpoints(config: RegistryConfig) -> tuple[str, ...]:
    """`host:port` of each etcd member. Raises ValueError for what can't be one, or a mixture of http and https."""
    endpoints = []
    schemes = set()
    for url in config.etcd_url.split(","):
        parts = urlsplit(url.strip())
        try:
            port = parts.port or DEFAULT_ETCD_PORT
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or not port or parts.path not in ("", "/"):
            raise ValueError(f"etcd_url: {url.strip()!r} is not an etcd address; write http://host:port")
        if parts.username or parts.password:
            raise ValueError("etcd_url must not hold credentials; set etcd_user and etcd_password")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        endpoints.append(f"{host}:{port}")
        schemes.add(parts.scheme)
    if len(schemes) > 1:
        raise ValueError("etcd_url mixes http and https; use one of them for all members")
    return tuple(endpoints)


def etcd_uses_tls(config: RegistryConfig) -> bool:
    return config.etcd_url.strip().startswith("https:")
