"""What both indexes are filled with: prompts of 24 chunks, each held by some of 64 workers. Needs no other module."""

import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

NUM_WORKERS = 64
PROMPT_CHUNKS = 24
NUM_PROMPTS = 41_667
"""A million chunks."""
NUM_ASKED = 2_000
"""Prompts looked up in a round, drawn from all."""
_PREPARED = 50


def prompts(num_holders: int) -> Iterator[tuple[list[bytes], list[int]]]:
    """Chunk keys and holders of each prompt; the same ones at each call."""
    draw = random.Random(1)
    for _ in range(NUM_PROMPTS):
        keys = [draw.randbytes(32) for _ in range(PROMPT_CHUNKS)]
        yield keys, draw.sample(range(NUM_WORKERS), num_holders)


def asked(num_holders: int) -> list[list[bytes]]:
    """The keys of prompts to look up."""
    chosen = set(random.Random(2).sample(range(NUM_PROMPTS), NUM_ASKED))
    found = [keys for number, (keys, _) in enumerate(prompts(num_holders)) if number in chosen]
    random.Random(3).shuffle(found)
    return found


def resident_bytes() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def serve_rounds(ask: Callable[[T], int], prepare: Callable[[list[bytes]], T], questions: list[list[bytes]]) -> None:
    """For each line on stdin: look all up once, and print `ROUND <wall seconds> <processor seconds>` each lookup.

    Questions are prepared a few at a time, untimed: in life, a prompt's keys have just been computed, and lie in the
    processor's cache.
    """
    for _ in iter(input, "end"):
        num_found, wall_s, cpu_s = 0, 0.0, 0.0
        for start in range(0, len(questions), _PREPARED):
            todo = [prepare(keys) for keys in questions[start : start + _PREPARED]]
            cpu_began_s, began_s = time.process_time(), time.perf_counter()
            for question in todo:
                num_found += ask(question)
            wall_s += time.perf_counter() - began_s
            cpu_s += time.process_time() - cpu_began_s
        if num_found != PROMPT_CHUNKS * len(questions):
            raise SystemExit(f"{num_found} chunks matched instead of {PROMPT_CHUNKS * len(questions)}")
        print("ROUND", wall_s / len(questions), cpu_s / len(questions), flush=True)
