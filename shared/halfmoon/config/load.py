"""Reading settings: defaults, then the TOML file, then the environment; later ones win.

    nats_url = "nats://10.0.0.5:4222"      # for every service       HALFMOON_NATS_URL
    [gateway]
    port = 8000                            # for the gateway only    HALFMOON_GATEWAY_PORT

An unknown key is an error, in the file and in the environment, and so is a value of the wrong type: a setting that is
silently ignored costs a night. The file is the one named by HALFMOON_CONFIG.
"""

import difflib
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from halfmoon.config.common import CommonConfig

PREFIX = "HALFMOON_"
CONFIG_FILE = "HALFMOON_CONFIG"

SERVICES = ("gateway", "conductor", "prefill", "decode", "kv_tier", "registry", "up")
"""Sections of the file, and prefixes in the environment. A service reads its own and skips the others'."""

FOREIGN = frozenset({CONFIG_FILE, "HALFMOON_MODELS_DIR"})
"""Variables that aren't fields of any service's settings."""

C = TypeVar("C", bound=CommonConfig)


class ConfigError(Exception):
    """Settings that can't be used. The message names the setting, its source, and what was expected."""


def load_config(
    cls: type[C], service: str, environ: Mapping[str, str], *, overrides: Mapping[str, Any] | None = None
) -> C:
    """Settings of one service. `overrides` (from the command line) win over everything. Raises `ConfigError`."""
    known = {field.name: field.type for field in msgspec.structs.fields(cls)}
    common = {field.name for field in msgspec.structs.fields(CommonConfig)}
    values: dict[str, tuple[str, Any]] = {}
    if path := environ.get(CONFIG_FILE):
        values.update(_from_file(Path(path), service, known, common))
    values.update(_from_environment(environ, service, known, common))
    for name, value in (overrides or {}).items():
        values[name] = ("command line", str(value) if isinstance(value, Path) else value)
    for name, (source, value) in values.items():
        try:
            msgspec.convert({name: value}, _one_field(cls, name), strict=False, dec_hook=_from_text)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{source}: {_plain(str(error), name)}") from None
    try:
        return msgspec.convert(
            {name: value for name, (_, value) in values.items()}, cls, strict=False, dec_hook=_from_text
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"settings of {service}: {error}") from None


def _from_file(path: Path, service: str, known: Mapping[str, Any], common: set[str]) -> dict[str, tuple[str, Any]]:
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{CONFIG_FILE}={path}: can't be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    values: dict[str, tuple[str, Any]] = {}
    section: dict[str, Any] = {}
    for key, value in document.items():
        if key in SERVICES and isinstance(value, dict):
            section = value if key == service else section
        elif key in common:
            values[key] = (f"{path}: {key}", value)
        else:
            raise ConfigError(f"{path}: unknown setting {key!r}{_hint(key, [*common, *SERVICES])}")
    for key, value in section.items():
        if key not in known:
            raise ConfigError(f"{path}: unknown setting {key!r} in [{service}]{_hint(key, known)}")
        values[key] = (f"{path}: [{service}] {key}", value)
    return values


def _from_environment(
    environ: Mapping[str, str], service: str, known: Mapping[str, Any], common: set[str]
) -> dict[str, tuple[str, Any]]:
    general: dict[str, tuple[str, Any]] = {}
    special: dict[str, tuple[str, Any]] = {}
    own = f"{PREFIX}{service.upper()}_"
    others = tuple(f"{PREFIX}{name.upper()}_" for name in SERVICES if name != service)
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in FOREIGN:
            continue
        if variable.startswith(own) and (name := variable.removeprefix(own).lower()) in known:
            special[name] = (variable, _value(text, known[name]))
        elif (name := variable.removeprefix(PREFIX).lower()) in common:
            general[name] = (variable, _value(text, known[name]))
        elif variable.startswith(own) or not variable.startswith(others):
            candidates = [f"{PREFIX}{name.upper()}" for name in common] + [f"{own}{name.upper()}" for name in known]
            raise ConfigError(f"unknown environment variable {variable}{_hint(variable, candidates)}")
    return general | special


def _value(text: str, kind: Any) -> Any:
    """An environment variable's text as what the field's type can be converted from: collections are JSON."""
    if _is_optional(kind) and text in ("", "none", "None"):
        return None
    if text.startswith(("{", "[")):
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            return text
    return text


def _from_text(kind: type, value: object) -> object:
    """What msgspec can't make by itself: a path from a text."""
    if kind is Path and isinstance(value, str):
        return Path(value).expanduser()
    raise ValueError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")


def _is_optional(kind: Any) -> bool:
    if typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    return typing.get_origin(kind) in (types.UnionType, typing.Union) and type(None) in typing.get_args(kind)


def _one_field(cls: type[C], name: str) -> type[msgspec.Struct]:
    """A struct of one field, so that an error names the source of that field's value."""
    hints = typing.get_type_hints(cls, include_extras=True)
    if name not in hints:
        raise ConfigError(f"unknown setting {name!r}{_hint(name, hints)}")
    return msgspec.defstruct(cls.__name__, [(name, hints[name])])


def _plain(message: str, name: str) -> str:
    return message.replace(f" - at `$.{name}`", "")


def _hint(word: str, candidates: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(candidates), n=1)
    return f"; did you mean {close[0]}?" if close else ""
