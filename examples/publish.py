"""Ask halfmoon over NATS alone, from any program: needs `pip install nats-py msgpack`, and nothing of halfmoon.

    python publish.py SmolLM2-135M-Instruct "Why is the sky blue?"
    python publish.py SmolLM2-135M-Instruct '[1, 9690, 198]' 20       # token ids; at most 20 tokens in answer

From a shell, as JSON; answers come as JSON lines, the last one is `finished.v1` or `failed.v1`:

    nats req halfmoon.generate.SmolLM2-135M-Instruct '{"prompt": "The moon", "sampling": {"max_tokens": 9}}' --replies=0
"""

import asyncio
import json
import os
import re
import sys
import time
import uuid

import msgpack
import nats

TIMEOUT_S = 120


async def main(model: str, question: str, max_tokens: int = 100) -> int:
    connection = await nats.connect(os.environ.get("HALFMOON_NATS_URL", "nats://127.0.0.1:4222"))
    answers = await connection.subscribe(inbox := connection.new_inbox())
    request_id = str(uuid.uuid4())
    request: dict[str, object] = {
        "type": "request.submitted.v1",
        "request_id": request_id,
        "sampling": {"max_tokens": max_tokens, "temperature": 0},
    }
    if question.startswith("["):
        request["tokens"] = json.loads(question)
    else:
        request["messages"] = [{"role": "user", "content": question}]
    headers = {"halfmoon-reply": inbox, "halfmoon-deadline": str(time.time_ns() + TIMEOUT_S * 10**9)}
    # In a subject, a dot in the model's name is written %2E. The stream acknowledges: from here on it isn't lost.
    subject = "halfmoon.request." + re.sub(r"[\s.*>%]", lambda found: f"%{ord(found[0]):02X}", model)
    await connection.jetstream().publish(subject, msgpack.packb(request), headers=headers)
    try:
        while True:
            event = msgpack.unpackb((await answers.next_msg(TIMEOUT_S)).data)
            if event["type"] == "failed.v1":
                print(f"{event['error']['code']}: {event['error']['message']}", file=sys.stderr)
                return 1
            print(event["text"], end="", flush=True)
            if event["type"] == "finished.v1":
                print(f"\n{event['usage']}")
                return 0
    except asyncio.CancelledError:
        cancel = {"type": "request.cancel.v1", "request_id": request_id}
        await connection.publish("halfmoon.request.cancel", msgpack.packb(cancel))
        raise
    finally:
        await connection.drain()


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    sys.exit(asyncio.run(main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))))
