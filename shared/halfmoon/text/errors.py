"""What can be wrong with text on its way to tokens, or with the files that say how."""


class TextError(ValueError):
    """This text or these messages can't be made into a prompt. The message never quotes them."""


class TokenizerUnusable(TextError):
    """The model's tokenizer can't be loaded; says which file, and what to do."""
