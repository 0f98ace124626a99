"""`python -m halfmoon.decode`: one decode worker, or a colocated one (`role`)."""

import sys

from halfmoon import lifecycle
from halfmoon.decode.config import DecodeConfig
from halfmoon.decode.service import Decode

if __name__ == "__main__":
    sys.exit(lifecycle.run("decode", DecodeConfig, Decode))
