"""`halfmoon trace`: one request's waterfall from the local store."""

from pathlib import Path

from rich.console import Console

from halfmoon.tracing.render import render
from halfmoon.tracing.store import TraceStore, TraceStoreError
from halfmoon.tracing.timeline import build

_RECENT = 10


def print_trace(console: Console, store_path: Path, request_id: str | None, width: int | None) -> int:
    """Print the waterfall. The exit code: 1 where the store or the request can't be found."""
    try:
        with TraceStore(store_path) as store:
            recent = [request.request_id for request in store.recent_requests(_RECENT)]
            wanted = request_id or (recent[0] if recent else None)
            spans = store.spans_of_request(wanted) if wanted is not None else []
    except TraceStoreError as error:
        console.print(f"halfmoon trace: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    if wanted is None:
        console.print(f"halfmoon trace: no request has been traced yet in {store_path}", style="red", markup=False)
        return 1
    if not spans:
        console.print(f"halfmoon trace: request {wanted} isn't in {store_path}", style="red", markup=False)
        if recent:
            console.print("the latest are:\n  " + "\n  ".join(recent), markup=False, highlight=False)
        return 1
    columns = width or console.width
    console.print(render(build(spans, wanted), columns), markup=False, highlight=False, soft_wrap=True)
    return 0
