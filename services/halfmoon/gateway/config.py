"""Settings of the gateway."""

from typing import Annotated

from msgspec import Meta, field

from halfmoon.config import CommonConfig

SERVICE_TIERS = {
    "auto": "interactive",
    "default": "interactive",
    "flex": "batch",
    "priority": "interactive",
    "scale": "interactive",
}
"""OpenAI's tiers."""


class GatewayConfig(CommonConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each field is the variable `HALFMOON_GATEWAY_<FIELD>`."""

    host: Annotated[str, Meta(description="Address to listen on. `0.0.0.0` for all; set `api_keys` then.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Meta(description="Port of the HTTP API; 0 takes a free one.", ge=0, le=65535)] = 8000
    api_keys: Annotated[
        dict[str, str] | None,
        Meta(
            description='Who may ask: `{"key": "tenant"}`, in JSON. Tenants don\'t share cached KV. '
            "Secret: never logged. None: anybody, as tenant `default`."
        ),
    ] = None
    service_tiers: Annotated[
        dict[str, str],
        Meta(
            description="What a request's `service_tier` asks for, as JSON: tier to class of service, as conductors "
            "know them. Other tiers are refused."
        ),
    ] = field(default_factory=lambda: dict(SERVICE_TIERS))
    tenant_classes: Annotated[
        dict[str, str],
        Meta(description="Tenant to class of service, as JSON: of all its requests, whatever tier they ask for."),
    ] = field(default_factory=dict)
    request_timeout_s: Annotated[
        float, Meta(description="A request that takes longer is cancelled and answered with 504.", gt=0)
    ] = 600.0
    max_body_bytes: Annotated[
        int, Meta(description="A request's body at most; larger ones are answered with 413.", ge=1024)
    ] = 8 * 1024 * 1024
    max_choices: Annotated[int, Meta(description="Upper limit of `n`.", ge=1, le=128)] = 16
    max_prompts: Annotated[int, Meta(description="Prompts in one completion request at most.", ge=1, le=1024)] = 64
    tokenizer_threads: Annotated[int, Meta(description="Threads that tokenize.", ge=1, le=64)] = 2
    probe_timeout_s: Annotated[
        float, Meta(description="How long the generation that proves readiness may take.", gt=0)
    ] = 30.0
    probe_interval_s: Annotated[
        float, Meta(description="Pause before a failed readiness probe is tried again.", gt=0)
    ] = 1.0
    retry_after_s: Annotated[
        float, Meta(description="`Retry-After` of 429 and 503 where nobody knows better.", gt=0)
    ] = 1.0

    def __post_init__(self) -> None:
        for key, tenant in (self.api_keys or {}).items():
            if not key or not tenant:
                raise ValueError("api_keys must map keys to tenants, neither of them empty")
            if not key.isascii() or key != key.strip():
                raise ValueError("api_keys: a key must be ASCII without blanks at its ends, to travel in a header")


def served_name(config: GatewayConfig) -> str:
    """The model's name in the API. Raises ValueError where no model is set."""
    if config.model_name is not None:
        return config.model_name
    if config.model is None:
        raise ValueError("no model is set")
    return config.model.stem if config.model.is_file() else config.model.name
