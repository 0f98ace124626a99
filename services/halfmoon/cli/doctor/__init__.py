"""`halfmoon doctor`: looks at a running cluster, and says what is wrong and what to do.

report.py     what was found, as data
examine.py    asks the broker, the registry and the nodes
command.py    settings, exit code
screen.py     what a person sees
"""
