"""Settings: one frozen struct per service, from environment and TOML, refused loudly when wrong."""

from halfmoon.config.common import CommonConfig
from halfmoon.config.load import ConfigError, load_config

__all__ = ["CommonConfig", "ConfigError", "load_config"]
