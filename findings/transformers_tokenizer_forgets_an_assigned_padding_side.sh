#!/usr/bin/env bash
# What: tokenizer.padding_side = "left" is not saved: save_pretrained and from_pretrained give back a tokenizer
# that pads on the right.
#
# Version: transformers==5.23.0, tokenizers==0.23.3; a CPU, Python 3.12 or newer.
# Expected: The state that the tokenizer had, as for model_max_length, which is saved after the same kind of
#   assignment, and for padding_side itself where it is an argument of the constructor.
# Seen: padding_side and truncation_side are written to tokenizer_config.json only if they were constructor
#   arguments. Assigning padding_side is the usual first line before a batch is generated from; with the saved
#   copy the shorter prompts of a batch end in padding, and long ones are cut at the other end.
# In jaxfused: Its serving takes prompts of any lengths and pads none of them (examples/lm,
#   docs/operators/serving.md).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m venv --without-pip "$folder/venv"
"$python" -m pip --python "$folder/venv/bin/python" install --quiet --no-compile transformers==5.23.0 tokenizers==0.23.3

HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import tempfile

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

words = {word: number for number, word in enumerate(["<pad>", "<unk>", *"abcdef"])}


def tokenizer(**arguments):
    model = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", unk_token="<unk>", **arguments)


def read_back(tokenizer):
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return AutoTokenizer.from_pretrained(folder)


assigned = tokenizer()
assigned.padding_side = assigned.truncation_side = "left"
assigned.model_max_length = 7
given, read = tokenizer(padding_side="left", truncation_side="left"), read_back(assigned)
rows = [t(["a b c", "d"], padding=True)["input_ids"][1] for t in (assigned, read)]
cut = [t("a b c d e", truncation=True, max_length=2)["input_ids"] for t in (assigned, read)]
print("padded before and after", rows, "cut before and after", cut, "length", read.model_max_length)
assert rows == [[0, 0, 5], [5, 0, 0]] and cut == [[5, 6], [2, 3]]
assert read.model_max_length == 7 and read_back(given).padding_side == "left"
PYTHON
