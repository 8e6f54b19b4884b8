#!/usr/bin/env bash
# sentencepiece 0.2.3 leaves out every training line that holds the character U+2585 (▅).
#
# The trainer uses this block character inside as a mark for unknown ones, so it drops the whole
# line, not the character, and only says so in the log at the lowest level. Bars of this kind are in
# logs and documents on programs, such as the sparkline ▁▃▅▇ of a loss. With character_coverage=1.0
# letters that occur nowhere else are then unknown to the model. It does not help to make ▅ a
# user-defined symbol, which gives it a piece of its own. Its neighbours ▃ and ▇ are ordinary.
#
# Seen on 2026-11-29 with sentencepiece 0.2.3, Python 3.11:
#   line "loss ▃▇ zebra": encoding and decoding "zebra" gives "zebra"
#   line "loss ▃▅▇ zebra": encoding and decoding "zebra" gives "ze ⁇ a"
#   line "loss ▃▅▇ zebra", ▅ user-defined: encoding and decoding "zebra" gives "ze ⁇ a"
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install sentencepiece==0.2.3
cd "$folder"
venv/bin/python - <<'PYTHON'
import io

import sentencepiece


def again(word, line, symbols):
    """The word, encoded and decoded by a model that learns from this line and another."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the lazy dog", line] * 5),
        model_writer=model,
        model_type="bpe",
        vocab_size=60,
        hard_vocab_limit=False,
        character_coverage=1.0,
        user_defined_symbols=symbols,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return processor.decode(processor.encode(word))


found = []
for line, symbols in (("loss ▃▇ zebra", []), ("loss ▃▅▇ zebra", []), ("loss ▃▅▇ zebra", ["▅"])):
    found.append(again("zebra", line, symbols))
    note = ", ▅ user-defined" if symbols else ""
    print(f'line "{line}"{note}: encoding and decoding "zebra" gives "{found[-1]}"')
assert found == ["zebra", "ze ⁇ a", "ze ⁇ a"], found
PYTHON
