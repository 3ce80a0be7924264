"""Tokenises texts from outside as plain words: none of them becomes a control token."""

import re

# Marks that the next character is tokenised alone: a Unicode noncharacter, see `clean`.
TOKEN_BREAK = "\ufdd0"
ESCAPED_BREAK = "\\ufdd0"  # as some templates write arguments and tools


def clean(text: str) -> str:
    """Returns the text without TOKEN_BREAK, and with "?" for lone surrogates (JSON's "\\ud83d")."""
    return text.encode(errors="replace").decode().replace(TOKEN_BREAK, "")


class Texts:
    """A tokenizer for texts from outside.

    Control tokens are the special tokens, and added tokens such as <tool_call> that begin with
    punctuation, have a letter and no space. `special` and `controls` are {id: token}."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.special = {}
        self.controls = {}
        for number, token in tokenizer.added_tokens_decoder.items():
            if token.special:
                self.special[number] = token.content
            if token.special or re.fullmatch(r"[^\w\s]\S*\w\S*", token.content):
                self.controls[number] = token.content
        self.special_starts = _start_of_any(self.special.values())
        self.control_starts = _start_of_any(self.controls.values())

    def with_breaks(self, value, role: str = "user"):
        """Returns a message or a list of tools with a break wherever a control token begins.

        A tool that says "so<|im_end|>" must not end its message. In messages of the assistant and
        the system, only special tokens are broken: the policy samples markup such as <tool_call>,
        and system prompts show it in examples."""
        keeps_markup = role in ("assistant", "system")
        starts = self.special_starts if keeps_markup else self.control_starts
        return _edited(value, lambda text: starts.sub(TOKEN_BREAK, clean(text)))

    def ids(self, text: str, begins: bool = True) -> list[int]:
        """Returns the ids of a text. No token spans a break, or is a control token after one.

        begins: whether the text begins a sequence. If not, the tokenizer puts no space before it.
        No special tokens are added, because the template writes them all, BOS included."""
        first, *pieces = text.replace(ESCAPED_BREAK, TOKEN_BREAK).split(TOKEN_BREAK)
        ids = self._encoded(first, begins)
        for piece in pieces:
            # The first character alone, so that no control token begins with it, or is it.
            first = self._encoded(piece[:1], False)
            ids += [number for number in first if number not in self.controls]
            ids += self._encoded(piece[1:], False)
        return ids

    def _encoded(self, text, begins):
        # Behind an EOS token, whose id is dropped, a tokenizer puts no space before the text.
        start = "" if begins else self.tokenizer.eos_token or ""
        ids = self.tokenizer.encode(start + text, add_special_tokens=False)
        return ids[1:] if start else ids

    def special_ids(self, text: str) -> list[int]:
        """Returns the ids of the special tokens in a text."""
        return self.tokenizer.convert_tokens_to_ids(self.special_starts.findall(text))


def _start_of_any(texts):
    """Returns a regular expression for each place where one of the texts begins (group 1).

    It looks ahead, because tokens may overlap: "[e~[e~[" has the token "[e~[" twice."""
    longest_first = sorted(texts, key=len, reverse=True)
    if not longest_first:
        return re.compile("(?!)()")  # matches nowhere
    firsts = re.escape("".join({text[0] for text in longest_first}))  # faster
    any_text = "|".join(map(re.escape, longest_first))
    return re.compile(f"(?=[{firsts}])(?=({any_text}))")


def _edited(value, edit):
    """Returns nested lists and dicts with edit(text) in place of each text and each key."""
    if isinstance(value, str):
        return edit(value)
    if isinstance(value, list):
        return [_edited(inner, edit) for inner in value]
    if isinstance(value, dict):
        return {edit(key): _edited(inner, edit) for key, inner in value.items()}
    return value
