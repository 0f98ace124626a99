"""Classes of service: what requests of each are promised, and how they share with the others."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

DEFAULT_CLASS = "interactive"
"""Of requests that name none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClass:
    """One class. Limits that are None promise nothing, so nothing is refused for them."""

    ttft_s: float | None = None
    """Time to first token at most, from the request's arrival at its conductor."""
    tbt_s: float | None = None
    """Time between two tokens at most, with this request in the batch."""
    weight: float = 1.0
    """Share of the served tokens, against the other classes' weights, while requests of several classes wait."""
    priority: int = 0
    """Added to the request's own where its halves wait in a worker's line."""


class ClassSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a deployment says of a class. None: as it is by default."""

    ttft_s: Annotated[float, Meta(gt=0)] | None = None
    tbt_s: Annotated[float, Meta(gt=0)] | None = None
    weight: Annotated[float, Meta(gt=0)] | None = None
    priority: int | None = None


def default_classes() -> dict[str, ServiceClass]:
    """Interactive before batch, and yet batch gets one token in seventeen however much is interactive."""
    return {DEFAULT_CLASS: ServiceClass(weight=16.0), "batch": ServiceClass(weight=1.0, priority=-1)}


def classes_of(settings: Mapping[str, ClassSettings]) -> dict[str, ServiceClass]:
    """The classes that there are by default, as far as nothing else is said of them; and the others."""
    classes = default_classes()
    for name, said in settings.items():
        known = classes.get(name, ServiceClass())
        classes[name] = ServiceClass(
            ttft_s=said.ttft_s,
            tbt_s=said.tbt_s,
            weight=known.weight if said.weight is None else said.weight,
            priority=known.priority if said.priority is None else said.priority,
        )
    return classes
