"""The conductor: takes requests, places their two halves, and watches each to its one terminal message."""
