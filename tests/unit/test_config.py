"""Settings: sources, precedence, and loud refusal."""

from pathlib import Path
from typing import Annotated

import pytest
from msgspec import Meta

from halfmoon.config import CommonConfig, ConfigError, load_config


class DoorConfig(CommonConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    port: Annotated[int, Meta(description="A port.", ge=0, le=65535)] = 8000
    api_keys: dict[str, str] | None = None


def load(environ: dict[str, str]) -> DoorConfig:
    return load_config(DoorConfig, "gateway", environ)


def test_defaults_then_file_then_environment_then_command_line(tmp_path: Path) -> None:
    file = tmp_path / "halfmoon.toml"
    file.write_text('nats_url = "nats://file:1"\nlog_level = "debug"\n[gateway]\nport = 1\n[decode]\nanything = 1\n')
    environ = {"HALFMOON_CONFIG": str(file), "HALFMOON_NATS_URL": "nats://environment:1"}
    assert load(environ).nats_url == "nats://environment:1"
    assert load(environ).log_level == "debug"
    assert load(environ).port == 1
    assert load(environ | {"HALFMOON_GATEWAY_PORT": "2"}).port == 2
    assert load_config(DoorConfig, "gateway", environ, overrides={"port": 3}).port == 3


def test_a_service_can_have_its_own_value_of_a_common_setting() -> None:
    environ = {"HALFMOON_LOG_LEVEL": "error", "HALFMOON_GATEWAY_LOG_LEVEL": "debug"}
    assert load(environ).log_level == "debug"
    assert load({"HALFMOON_LOG_LEVEL": "error", "HALFMOON_DECODE_LOG_LEVEL": "debug"}).log_level == "error"


def test_collections_are_json_and_optional_values_can_be_unset() -> None:
    environ = {"HALFMOON_GATEWAY_API_KEYS": '{"sk-1": "tenant-a"}', "HALFMOON_OTLP_ENDPOINT": ""}
    assert load(environ).api_keys == {"sk-1": "tenant-a"}
    assert load(environ).otlp_endpoint is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"HALFMOON_NATS_ULR": "x"}, "unknown environment variable HALFMOON_NATS_ULR; did you mean HALFMOON_NATS_URL?"),
        ({"HALFMOON_GATEWAY_PROT": "1"}, "unknown environment variable HALFMOON_GATEWAY_PROT"),
        ({"HALFMOON_GATEWAY_PORT": "99999"}, "HALFMOON_GATEWAY_PORT: Expected `int` <= 65535"),
        ({"HALFMOON_GATEWAY_PORT": "eighty"}, "HALFMOON_GATEWAY_PORT: Expected `int`, got `str`"),
        ({"HALFMOON_CONFIG": "/nowhere.toml"}, "HALFMOON_CONFIG=/nowhere.toml: can't be read: No such file"),
    ],
)
def test_what_is_wrong_in_the_environment_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nats_ulr = 1", "unknown setting 'nats_ulr'; did you mean nats_url?"),
        ("[gateway]\nprot = 1", "unknown setting 'prot' in [gateway]; did you mean port?"),
        ("[gateway]\nport = 'x'", "[gateway] port: Expected `int`, got `str`"),
        ("nats_url = ", "not valid TOML"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "halfmoon.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load({"HALFMOON_CONFIG": str(file)})
    assert message in str(caught.value)
    assert str(file) in str(caught.value)


def test_paths_are_read_from_text_with_the_home_folder_filled_in() -> None:
    config = load_config(CommonConfig, "up", {"HALFMOON_DATA_DIR": "~/data", "HALFMOON_MODEL": "/models/m"})
    assert (config.data_dir, config.model) == (Path.home() / "data", Path("/models/m"))


@pytest.mark.parametrize("text", ["", "none"])
def test_nothing_can_be_said_of_an_optional_number_too(text: str) -> None:
    assert load_config(CommonConfig, "up", {"HALFMOON_METRICS_PORT": text}).metrics_port is None
