"""The tier below DRAM: a node's SSD, what lies there, and how chunks move between the two."""
