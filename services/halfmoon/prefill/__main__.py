"""`python -m halfmoon.prefill`: one prefill worker."""

import sys

from halfmoon import lifecycle
from halfmoon.prefill.config import PrefillConfig
from halfmoon.prefill.service import Prefill

if __name__ == "__main__":
    sys.exit(lifecycle.run("prefill", PrefillConfig, Prefill))
