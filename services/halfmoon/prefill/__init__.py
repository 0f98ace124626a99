"""The prefill service: turns prompts into KV that others can read, chunk by chunk."""
