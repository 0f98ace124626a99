"""Dynamo's `RadixTree`, through its Python binding, under the same load. Runs in an environment of its own.

Its blocks are named by 64-bit hashes: here, the first eight bytes of our keys.
"""

import gc
import json
import sys
import time

from dynamo._core import RadixTree  # type: ignore[import-not-found]
from index_load import asked, prompts, resident_bytes, serve_rounds  # type: ignore[import-not-found]


def main() -> None:
    num_holders = int(sys.argv[1])
    questions = asked(num_holders)
    tree = RadixTree()
    gc.collect()
    before_bytes, build_s, num_entries = resident_bytes(), 0.0, 0
    for number, (keys, holders) in enumerate(prompts(num_holders)):
        hashes = [int.from_bytes(key[:8], "little") for key in keys]
        blocks = [{"block_hash": each, "tokens_hash": each} for each in hashes]
        stored = {"stored": {"parent_hash": None, "blocks": blocks}}
        event = json.dumps({"event_id": number, "data": stored, "dp_rank": 0}).encode()
        num_entries += len(keys)
        for holder in holders:
            started_s = time.perf_counter()
            tree.apply_event(holder, event)
            build_s += time.perf_counter() - started_s
    # Events are carried out in another thread: the answer to a question comes after them.
    started_s = time.perf_counter()
    tree.find_matches([0])
    build_s += time.perf_counter() - started_s
    gc.collect()
    print("BUILT", num_entries, (resident_bytes() - before_bytes) / num_entries, build_s, flush=True)

    def hashes_of(keys: list[bytes]) -> list[int]:
        return [int.from_bytes(key[:8], "little") for key in keys]

    serve_rounds(lambda sequence: max(tree.find_matches(sequence).scores.values(), default=0), hashes_of, questions)


if __name__ == "__main__":
    main()
