"""A GGUF file's tokenizer, as the folder that `TextCodec` reads.

transformers reads GGUF only with torch, so a process of its own does it: the caller stays without.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halfmoon.text.errors import TokenizerUnusable

_TIMEOUT_S = 120.0

_CONVERT = """
import sys
from pathlib import Path
from transformers import PreTrainedTokenizerFast
source, target = Path(sys.argv[1]), sys.argv[2]
tokenizer = PreTrainedTokenizerFast.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
tokenizer.save_pretrained(target)
"""


@contextmanager
def converted_gguf(path: Path) -> Iterator[Path]:
    """A folder with the tokenizer of this file, gone afterwards. Raises `TokenizerUnusable`."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise TokenizerUnusable(f"{path}: not a GGUF file; give a Hugging Face model folder, or a GGUF file")
    with tempfile.TemporaryDirectory(prefix="halfmoon-tokenizer-") as folder:
        try:
            subprocess.run(
                [sys.executable, "-c", _CONVERT, str(path.absolute()), folder],
                check=True,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise TokenizerUnusable(f"{path}: reading its tokenizer took more than {_TIMEOUT_S:g} s") from None
        except subprocess.CalledProcessError as error:
            reason = (error.stderr or "").strip().splitlines()[-1:] or [f"exit code {error.returncode}"]
            raise TokenizerUnusable(
                f"{path}: its tokenizer can't be read: {reason[0]}. Reading GGUF needs the torch extra "
                "(pip install 'halfmoon[torch]'); or give a Hugging Face folder"
            ) from None
        yield Path(folder)
