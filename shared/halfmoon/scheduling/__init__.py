"""Placing requests: pure policies, run unchanged by the conductor and by the simulator."""
