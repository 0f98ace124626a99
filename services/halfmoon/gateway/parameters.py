"""From a request's body to typed parameters: what isn't understood is refused by name, never dropped in silence."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from halfmoon.gateway.errors import ApiError, bad_request
from halfmoon.gateway.openai_types import CommonRequest

R = TypeVar("R", bound=CommonRequest)

IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "store",
        "user",
    }
)
"""Say nothing about the text that is generated; clients send them unasked."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}
"""Not supported, except with the values that ask for nothing."""

_PATH = re.compile(r"(.*) - at `(?:key in )?\$(.*)`", re.DOTALL)


def parse(body: bytes, kind: type[R]) -> R:
    """Raises `ApiError` 400, which names the parameter."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The body is not valid JSON: {error}") from None
    except RecursionError:
        raise bad_request("The body is not valid JSON: it is nested too deeply") from None
    if not isinstance(document, dict):
        raise bad_request("The body must be a JSON object")
    known = {field.name for field in msgspec.structs.fields(kind)}
    for name, value in document.items():
        if name not in known:
            _check_extra(name, value)
    try:
        return msgspec.convert({name: value for name, value in document.items() if name in known}, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None


def _check_extra(name: str, value: Any) -> None:
    if name in IGNORED or value is None:
        return
    if name not in NEUTRAL:
        raise bad_request(f"Unknown parameter: '{name}'", name, "unknown_parameter")
    # 0 == False in Python, but not in JSON.
    if not any(value == neutral and isinstance(value, bool) is isinstance(neutral, bool) for neutral in NEUTRAL[name]):
        allowed = " or ".join(msgspec.json.encode(neutral).decode() for neutral in NEUTRAL[name])
        raise bad_request(
            f"'{name}' is not supported here; leave it out (or send {allowed})", name, "unsupported_parameter"
        )


def _named(message: str) -> ApiError:
    """msgspec's "Expected `int`, got `str` - at `$.max_tokens`", as the API says it."""
    if found := _PATH.fullmatch(message):
        path = found[2].lstrip(".")
        return bad_request(f"Invalid '{path}': {found[1]}", path, "invalid_type")
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", message):
        return bad_request(f"Missing required parameter: '{missing[1]}'", missing[1], "missing_required_parameter")
    return bad_request(message)
