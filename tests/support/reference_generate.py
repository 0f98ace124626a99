"""The reference: transformers' own `generate`, greedy, in a process that holds none of our code.

    python reference_generate.py MODEL < '{"prompts": [[…token ids…], …], "max_new_tokens": 6}'

Prints a JSON list with one list of new token ids per prompt. Prompts are generated one by one, in float32, on one
thread; end-of-sequence tokens don't end them, so each gets all of its tokens.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging


def main() -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    request = json.load(sys.stdin)
    path = Path(sys.argv[1])
    where = {"pretrained_model_name_or_path": str(path)}
    if path.is_file():
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    config = GenerationConfig(do_sample=False, max_new_tokens=request["max_new_tokens"], pad_token_id=0)
    # `generate` fills what the config leaves open from the model's own.
    model.generation_config = config
    completions = []
    for prompt in request["prompts"]:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        completions.append(output[0, len(prompt) :].tolist())
    json.dump(completions, sys.stdout)


if __name__ == "__main__":
    main()
