"""The command line: `halfmoon up`, `run`, `trace`, `model`."""
