"""Classes of service: what requests of each are promised, and how they share with the others."""

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

DEFAULT_CLASS = "interactive"
"""Of requests that name none."""


class ServiceClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One class. Limits that are None promise nothing, so nothing is refused for them."""

    ttft_s: Annotated[float, Meta(gt=0)] | None = None
    """Time to first token at most, from the request's arrival at its conductor."""
    tbt_s: Annotated[float, Meta(gt=0)] | None = None
    """Time between two tokens at most, with this request in the batch."""
    weight: Annotated[float, Meta(gt=0)] = 1.0
    """Share of the served tokens, against the other classes' weights, while requests of several classes wait."""
    priority: int = 0
    """Added to the request's own where its halves wait in a worker's line."""


def default_classes() -> dict[str, ServiceClass]:
    """Interactive before batch, and yet batch gets one token in seventeen however much is interactive."""
    return {"interactive": ServiceClass(weight=16.0), "batch": ServiceClass(weight=1.0, priority=-1)}


def check_classes(classes: Mapping[str, ServiceClass]) -> None:
    """Raises `ValueError` where requests that name no class would have none."""
    if DEFAULT_CLASS not in classes:
        raise ValueError(f"classes must have {DEFAULT_CLASS!r}: requests that name no class belong to it")
