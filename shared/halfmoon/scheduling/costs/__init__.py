"""How long things take here, learned from what the workers and pools measure."""
