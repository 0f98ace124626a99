"""API keys: who asks."""

import hmac
from collections.abc import Mapping

from halfmoon.gateway.errors import ApiError
from halfmoon.schemas.ids import TenantId

ANYBODY = TenantId("default")


def tenant_of(authorization: str | None, api_keys: Mapping[str, str] | None) -> TenantId:
    """The tenant behind an `Authorization` header. Raises `ApiError` 401."""
    if not api_keys:
        return ANYBODY
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise _unauthorized("You must give an API key, in the header `Authorization: Bearer <key>`.")
    given = key.strip().encode()
    found: str | None = None
    for known, tenant in api_keys.items():
        # All are compared, each in constant time: how long a refusal takes tells nothing about the keys.
        if hmac.compare_digest(known.encode(), given):
            found = tenant
    if found is None:
        raise _unauthorized("The API key is not known here.")
    return TenantId(found)


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")
