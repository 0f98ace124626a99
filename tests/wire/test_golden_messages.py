"""Golden bytes: what one version wrote, every later version reads, and an outside MessagePack client understands.

To add a message, add its example, and its bytes with `python tests/wire/test_golden_messages.py`. Bytes that are there
already never change: a message that must change gets a new tag.
"""

import importlib
import inspect
import json
import pkgutil
import sys
from pathlib import Path

import msgpack
import msgspec
import pytest

import halfmoon.schemas
from halfmoon.schemas.wire import Message
from support.examples import EXAMPLES

GOLDEN = Path(__file__).parents[1] / "data" / "messages.v1.json"


def tag(message: Message | type[Message]) -> str:
    return str(message.__struct_config__.tag)


def tagged_messages() -> set[str]:
    """Tags of all messages in the schemas."""
    found: set[str] = set()
    for module in pkgutil.iter_modules(halfmoon.schemas.__path__):
        for _, value in inspect.getmembers(importlib.import_module(f"halfmoon.schemas.{module.name}"), inspect.isclass):
            if issubclass(value, Message) and value.__struct_config__.tag is not None:
                found.add(tag(value))
    return found


def test_every_message_has_an_example_and_a_tag_of_its_own() -> None:
    tags = [tag(example) for example in EXAMPLES]
    assert len(tags) == len(set(tags))
    assert set(tags) == tagged_messages() == set(json.loads(GOLDEN.read_text()))


@pytest.mark.parametrize("example", EXAMPLES, ids=tag)
def test_what_is_written_is_the_golden_and_comes_back_equal(example: Message) -> None:
    """All but the width of a map's length: msgspec takes the wider one as soon as a struct could have 16 entries."""
    golden = bytes.fromhex(json.loads(GOLDEN.read_text())[tag(example)])
    assert list(msgpack.unpackb(msgspec.msgpack.encode(example)).items()) == list(msgpack.unpackb(golden).items())
    assert msgspec.msgpack.decode(golden, type=type(example)) == example


@pytest.mark.parametrize("example", EXAMPLES, ids=tag)
def test_an_outside_client_reads_and_writes_them(example: Message) -> None:
    plain = msgpack.unpackb(msgspec.msgpack.encode(example))
    assert plain["type"] == tag(example)
    assert msgspec.msgpack.decode(msgpack.packb(plain), type=type(example)) == example


@pytest.mark.parametrize("example", EXAMPLES, ids=tag)
def test_a_field_from_the_future_is_ignored(example: Message) -> None:
    plain = msgpack.unpackb(msgspec.msgpack.encode(example)) | {"field_of_tomorrow": {"x": [1]}}
    assert msgspec.msgpack.decode(msgpack.packb(plain), type=type(example)) == example


if __name__ == "__main__":
    known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    added = {tag(example): msgspec.msgpack.encode(example).hex() for example in EXAMPLES if tag(example) not in known}
    GOLDEN.write_text(json.dumps(known | added, indent=1, sort_keys=True) + "\n")
    sys.stdout.write(f"{len(added)} added\n")
