"""What the system's own policies would do with recorded traffic. All figures from here are simulated."""
