"""For whom the KV was computed that the engine's own prefix cache may hold. Pure.

An engine keeps the KV of one root (see `chunks.keys`) apart from all others, and knows no tenants. Tenants that share a
salt share a root: so beside the tenants that ask here, those count whose chunks came here from the pool.
"""

from halfmoon.schemas.ids import ModelName, TenantId
from halfmoon.schemas.orders import Selection

MAX_NOTED = 65_536


class Makers:
    """Of one worker, since its start."""

    def __init__(self, max_noted: int = MAX_NOTED) -> None:
        self._max_noted = max_noted
        self._by_root: dict[bytes, set[tuple[TenantId, ModelName]]] = {}
        self._num_noted = 0
        self._is_full = False

    def note(self, root: bytes, tenant: TenantId, model: ModelName) -> None:
        """From now on the engine may hold KV of this root that was computed for this tenant, by this model."""
        made = self._by_root.get(root, set())
        if (tenant, model) in made:
            return
        self._is_full = self._num_noted == self._max_noted
        if not self._is_full:
            self._by_root.setdefault(root, made).add((tenant, model))
            self._num_noted += 1

    def roots_of(self, selection: Selection) -> frozenset[bytes] | None:
        """All roots under which the engine may hold what is selected; None where that may be any.

        Keys and prefixes narrow nothing: a root isn't to be told from them.
        """
        if self._is_full or (selection.tenant is None and selection.model is None):
            return None
        return frozenset(
            root
            for root, made in self._by_root.items()
            if any(selection.tenant in (None, tenant) and selection.model in (None, model) for tenant, model in made)
        )
