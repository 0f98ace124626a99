"""`halfmoon up`: the whole system on one machine, each service a process of its own.

plan.py       options → what runs where, in which order (pure)
servers.py    the embedded nats-server and etcd
process.py    one child process: start, watch, stop
supervisor.py all of them: start in order, restart what dies, drain in order
watch.py      what the heartbeats say: progress, readiness
screen.py     what a person sees
command.py    ties them together
"""
