"""What a simulation assumes of models and machines: published figures, or measured ones.

models.py    named models, or a config of your own: weights, FLOPs and KV bytes derived
hardware.py  named machines: peak figures with their sources, and how much of them is reached
machine.py   one model on one machine: how long it takes, what fits, how fast KV moves
measured.py  the same, made from what a running system or a recording measured
"""
