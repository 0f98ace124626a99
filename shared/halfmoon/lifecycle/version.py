"""halfmoon's version, as services name it to others. A checkout runs without being installed, so it stands here."""

VERSION = "0.1.0"
