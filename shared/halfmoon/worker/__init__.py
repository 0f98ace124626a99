"""What prefill and decode workers share: settings, the engine's sequences, leases, prompt computation, heartbeats."""
