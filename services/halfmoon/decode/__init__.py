"""The decode service: loads a prompt's KV as it becomes readable, and generates."""
