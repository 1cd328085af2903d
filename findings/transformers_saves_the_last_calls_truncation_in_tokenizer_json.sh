#!/usr/bin/env bash
# What: After tokenizer(text, truncation=True, max_length=3) save_pretrained writes a tokenizer.json that cuts
# every text to 3 tokens in other programs.
#
# Version: transformers==5.23.0, tokenizers==0.23.3; a CPU, Python 3.12 or newer.
# Expected: Arguments of one call belong to that call: a tokenizer that is saved before and after it is the same.
# Seen: The call leaves its truncation and padding in the Rust tokenizer, and both are saved with it.
#   tokenizers.Tokenizer.from_file, which servers and other languages read, then cuts six tokens to three, or
#   fills one up to three. transformers itself resets both at each call, so that no test within it shows the
#   fault.
# In jaxfused: examples/lm/tokenizer.py takes truncation and padding off what it reads.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile transformers==5.23.0 tokenizers==0.23.3

HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import pathlib
import tempfile

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

words = {word: number for number, word in enumerate(["<pad>", "<unk>", *"abcdef"])}


def lengths(**call):
    model = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", unk_token="<unk>")
    tokenizer("a b c d e f", **call)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        alone = Tokenizer.from_file(str(pathlib.Path(folder, "tokenizer.json")))
        whole = AutoTokenizer.from_pretrained(folder)
        return [(len(alone.encode(text).ids), len(whole(text)["input_ids"])) for text in ("a", "a b c d e f")]


plain, cut = lengths(), lengths(truncation=True, max_length=3)
filled = lengths(truncation=True, max_length=3, padding="max_length")
print("tokenizers and transformers read", plain, "after a call with truncation", cut, "and padding", filled)
assert plain == [(1, 1), (6, 6)] and cut == [(1, 1), (3, 6)] and filled == [(3, 1), (3, 6)]
PYTHON
