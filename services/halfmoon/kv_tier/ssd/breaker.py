"""Leaves a failing disk alone for a while: a circuit breaker (Nygard, *Release It!*, "Stability Patterns"). Pure."""

from dataclasses import dataclass, field

from halfmoon.transport.health import Backoff


@dataclass(slots=True)
class Breaker:
    """Opens after `tolerance + 1` failures in a row, twice as long each time it fails again on being tried."""

    tolerance: int = 0
    backoff: Backoff = field(default_factory=lambda: Backoff(first_s=1.0, max_s=60.0))
    num_failures: int = 0
    """In a row; while the breaker is open, those that came of what had begun before don't count."""
    retry_ns: int = 0
    reason: str = ""
    """Of the last failure that counted; empty when all is well."""

    @property
    def is_broken(self) -> bool:
        """Whether the last that was heard of the disk is that it fails."""
        return self.num_failures > self.tolerance

    def is_open(self, now_ns: int) -> bool:
        """Whether the disk is not to be tried now."""
        return self.is_broken and now_ns < self.retry_ns

    def failed(self, now_ns: int, reason: str) -> bool:
        """Note a failure; whether this is the one that broke it."""
        if self.is_open(now_ns):
            return False
        was_broken = self.is_broken
        self.num_failures += 1
        self.reason = reason
        if self.is_broken:
            self.retry_ns = now_ns + self.backoff.pause_ns(self.num_failures - self.tolerance, 0.0)
        return self.is_broken and not was_broken

    def succeeded(self, now_ns: int) -> bool:
        """Note a success; whether it mended what was broken. One that began before it broke proves nothing."""
        if self.is_open(now_ns):
            return False
        was_broken = self.is_broken
        self.num_failures, self.reason = 0, ""
        return was_broken
