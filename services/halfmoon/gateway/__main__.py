"""`python -m halfmoon.gateway`."""

import sys

from halfmoon import lifecycle
from halfmoon.gateway.config import GatewayConfig
from halfmoon.gateway.service import Gateway

if __name__ == "__main__":
    sys.exit(lifecycle.run("gateway", GatewayConfig, Gateway))
