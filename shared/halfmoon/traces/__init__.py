"""Traces of requests: what is known of each, the format of our own recordings, and one reader for all formats."""

from halfmoon.traces.files import OpenTrace, Trace, TraceError, num_lines_of, open_trace, read_trace
from halfmoon.traces.request import TracedRequest

__all__ = ["OpenTrace", "Trace", "TraceError", "TracedRequest", "num_lines_of", "open_trace", "read_trace"]
