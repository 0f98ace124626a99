"""Measurements, side by side in one run: `make bench` runs them all and writes docs/benchmarks.md."""
