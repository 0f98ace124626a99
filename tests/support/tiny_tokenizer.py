"""Small real tokenizers, trained in a blink: for tests of text that need no model."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)

CORPUS = ["the quick brown fox jumps over the lazy dog", "hello world, hello moon", "ein Mond, zwei Monde"] * 4


def byte_level(folder: Path) -> Path:
    """GPT-2's kind: every character is bytes, so those outside the corpus take several tokens. Has a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|start|>", "<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _save(tokenizer, folder, {"eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE})


def byte_fallback(folder: Path) -> Path:
    """SentencePiece's kind: blanks as a letter, the first of them dropped; unknown characters as byte tokens."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for letter in "▁abcdefghijklmnopqrstuvwxyz":
        vocab[letter] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _save(tokenizer, folder, {"eos_token": "</s>"})


def _save(tokenizer: Tokenizer, folder: Path, settings: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings})
    )
    return folder
