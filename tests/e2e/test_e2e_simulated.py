"""The simulator is honest: the live system, its engine simulated, does with the same requests as the simulator says.

Half as fast as recorded, so that times are mostly the engine's own, which a busy machine doesn't lengthen.
"""

import pytest

from support.agreement import MEASURES, disagreements
from support.beside import Setup, compare

pytestmark = [pytest.mark.nats, pytest.mark.etcd, pytest.mark.nightly, pytest.mark.timeout(300)]


def test_live_is_as_simulated() -> None:
    figures = compare(Setup(seconds=15.0, stretch=2.0))
    print({name: (round(of(figures.live), 3), round(of(figures.simulated), 3)) for name, of in MEASURES.items()})
    assert len(figures.live) == len(figures.simulated) > 20
    assert disagreements(figures.live, figures.simulated) == []
