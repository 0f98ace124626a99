"""How busy a simulated cluster was over time, in a bounded number of samples."""

from dataclasses import asdict, dataclass

_MAX_SAMPLES = 720


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSample:
    at_s: float
    prefill_backlog_s: float
    """Seconds of work that wait or run, on average of the instances that prefill."""
    max_prefill_backlog_s: float
    decode_batch: float
    """Sequences in a batch, on average of the instances that decode."""
    decode_tbt_s: float
    """Of the batches as they are, on average."""
    num_rejected: int
    """So far."""


class LoadSeries:
    """Every `interval_s` of virtual time. When there are too many samples, every other is dropped."""

    def __init__(self, interval_s: float = 5.0, max_samples: int = _MAX_SAMPLES) -> None:
        self.interval_s = interval_s
        self._max_samples = max_samples
        self._samples: list[LoadSample] = []

    def add(self, sample: LoadSample) -> None:
        self._samples.append(sample)
        if len(self._samples) > self._max_samples:
            del self._samples[1::2]
            self.interval_s *= 2

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def samples(self) -> tuple[LoadSample, ...]:
        return tuple(self._samples)

    def columns(self) -> dict[str, list[float]]:
        """By name, for JSON."""
        names = LoadSample.__slots__
        rows = [asdict(sample) for sample in self._samples]
        return {name: [round(row[name], 4) for row in rows] for name in names}
