"""The message catalogue as an AsyncAPI 3.0 document, rendered from the structs themselves, so that it can't drift.

<https://www.asyncapi.com/docs/reference/specification/v3.0.0>
"""

from typing import Any

import msgspec

from halfmoon.cli.catalogue import Channel, channels, summary, tag
from halfmoon.lifecycle import VERSION


def document() -> str:
    """The AsyncAPI document, as YAML."""
    every = list(dict.fromkeys(message for channel in channels() for message in channel.messages))
    schemas, components = msgspec.json.schema_components(every, ref_template="#/components/schemas/{name}")
    messages = {
        message.__name__: {
            "name": tag(message),
            "summary": summary(message),
            "contentType": "application/msgpack",
            "payload": schema,
        }
        for message, schema in zip(every, schemas, strict=True)
    }
    content: dict[str, Any] = {
        "asyncapi": "3.0.0",
        "info": {
            "title": "halfmoon",
            "version": VERSION,
            "description": "Messages between halfmoon's services and its clients, over NATS. MessagePack; `type` is "
            "the tag. Requests may also be JSON. Trace context (W3C traceparent) and halfmoon-deadline are headers.",
        },
        "defaultContentType": "application/msgpack",
        "channels": {channel.name: _channel(channel) for channel in channels()},
        "components": {"messages": messages, "schemas": components},
    }
    return msgspec.yaml.encode(content).decode()


def _channel(channel: Channel) -> dict[str, Any]:
    return {
        "address": channel.address,
        "description": channel.what,
        "messages": {
            message.__name__: {"$ref": f"#/components/messages/{message.__name__}"} for message in channel.messages
        },
    }
